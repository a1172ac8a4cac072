//! How many answers may run and wait at a time. Others are refused at once, which is better for a client than a long wait.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use super::refusal::Refusal;

/// The places of running and waiting answers.
pub struct Gate {
    taken: AtomicUsize,
    most: usize,
}

/// Places that were taken, free again when this is dropped.
pub struct Places {
    gate: Arc<Gate>,
    count: usize,
}

impl Gate {
    /// With `most` places.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { taken: AtomicUsize::new(0), most })
    }

    /// Places that are taken.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// Takes `count` places; `seconds` is how long an answer takes on average.
    ///
    /// # Errors
    /// If there are not that many: 429, or 400 if there can never be.
    pub fn take(self: &Arc<Self>, count: usize, seconds: f64) -> Result<Places, Refusal> {
        if count > self.most {
            return Err(Refusal::bad(format!("{count} answers at once; this server takes {}", self.most)));
        }
        let more = |taken: usize| taken.checked_add(count).filter(|sum| *sum <= self.most);
        match self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Places { gate: self.clone(), count }),
            Err(taken) => {
                let why = format!("{taken} answers run or wait, and {} are taken at most; try again later", self.most);
                let retry_after = Some((seconds.ceil() as u64).clamp(1, 60));
                Err(Refusal { retry_after, ..Refusal::new(429, why).coded("queue_full") })
            }
        }
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        self.gate.taken.fetch_sub(self.count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_back() {
        let gate = Gate::new(3);
        let two = gate.take(2, 0.2).unwrap();
        let full = gate.take(2, 7.2).err().unwrap();
        assert_eq!((full.status, full.retry_after), (429, Some(8)));
        let _one = gate.take(1, 0.0).unwrap();
        assert_eq!(gate.taken(), 3);
        drop(two);
        assert_eq!(gate.taken(), 1);
        assert_eq!(gate.take(4, 0.0).err().unwrap().status, 400);
    }
}
