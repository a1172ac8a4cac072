//! Reference-counted ids. One pool counts slots, another counts pages.

/// Ids `1..=capacity`, each with a number of holders. Id 0 is the null slot or page: it is never handed out, and holding
/// or releasing it does nothing.
#[derive(Debug)]
pub struct Pool {
    /// Holders per id; index 0 is unused.
    holders: Vec<u32>,
    free: Vec<u32>,
    peak: usize,
}

impl Pool {
    /// A pool of `capacity` free ids.
    pub fn new(capacity: usize) -> Self {
        // Low ids first: the CPU backend commits its pools lazily.
        Self { holders: vec![0; capacity + 1], free: (1..=capacity as u32).rev().collect(), peak: 0 }
    }

    /// A free id with one holder, the caller.
    pub fn take(&mut self) -> Option<u32> {
        let id = self.free.pop()?;
        self.holders[id as usize] = 1;
        self.peak = self.peak.max(self.used());
        Some(id)
    }

    /// One more holder of an id that has some already.
    pub fn hold(&mut self, id: u32) {
        if id != 0 {
            assert!(self.holders[id as usize] > 0, "holding free id {id}");
            self.holders[id as usize] += 1;
        }
    }

    /// One holder fewer; the last one frees the id.
    pub fn release(&mut self, id: u32) {
        if id != 0 {
            let holders = &mut self.holders[id as usize];
            assert!(*holders > 0, "releasing free id {id}");
            *holders -= 1;
            if *holders == 0 {
                self.free.push(id);
            }
        }
    }

    /// How many hold `id`; 0 for a free one and for the null id.
    pub fn holders(&self, id: u32) -> u32 {
        self.holders[id as usize]
    }

    /// Ids in all.
    pub fn capacity(&self) -> usize {
        self.holders.len() - 1
    }

    /// Ids without a holder.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Ids with a holder.
    pub fn used(&self) -> usize {
        self.capacity() - self.free.len()
    }

    /// The largest [`used`](Self::used) so far.
    pub fn peak(&self) -> usize {
        self.peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_holders_and_never_gives_out_zero() {
        let mut pool = Pool::new(2);
        let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
        assert!(a != 0 && b != 0 && a != b);
        assert_eq!(pool.take(), None);
        pool.hold(a);
        pool.release(a);
        assert_eq!((pool.holders(a), pool.free()), (1, 0));
        pool.release(a);
        assert_eq!((pool.holders(a), pool.free(), pool.peak()), (0, 1, 2));
        pool.hold(0);
        pool.release(0);
        assert_eq!(pool.take(), Some(a));
    }
}
