//! Ranks that run the same ops, and what they exchange.
//!
//! Every rank comes to every exchange, in the same order, with as many values. It leaves its values, waits for the others and reads
//! theirs in ascending order of ranks, so sums do not depend on which rank comes first. Two sets of places take turns: whoever
//! fills the second has read the first, and nobody fills the first again before all have left it.
//!
//! The group of ranks in threads of one process is here; `ranks/process.rs` has the way to it from another process.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock},
    time::Duration,
};

use crate::error::{Error, Result};

/// How long a rank waits for the others at one exchange. All have the same work, so nothing but a fault takes so long.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Where the ranks of a group meet.
pub(crate) trait Group: Send + Sync {
    /// See [`Member::exchange`]; `fill` is called once.
    fn exchange(
        &self,
        rank: usize,
        fill: &mut dyn FnMut(&mut Vec<f32>),
        read: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()>;
    /// See [`Member::fail`].
    fn fail(&self, rank: usize, why: String);
    /// See [`Member::check`].
    fn check(&self) -> Result<()>;
    /// See [`Member::tell`].
    fn tell(&self, rank: usize, key: String, value: Vec<u8>);
    /// See [`Member::learn`].
    fn learn(&self, rank: usize, key: &str) -> Result<Vec<u8>>;
}

/// A rank's place in its group. Clones are the same rank.
#[derive(Clone)]
pub struct Member {
    rank: usize,
    ranks: usize,
    group: Arc<dyn Group>,
}

impl Member {
    /// The ranks of a group of `ranks` in this process, which wait for one another for at most `deadline`.
    pub fn group(ranks: usize, deadline: Duration) -> Vec<Self> {
        let places = || (0..ranks).map(|_| RwLock::default()).collect();
        let (meeting, moved) = (Mutex::default(), Condvar::new());
        let group = Arc::new(Here { meeting, moved, places: [places(), places()], deadline });
        (0..ranks).map(|rank| Self::of(rank, ranks, group.clone())).collect()
    }

    /// A rank of a group.
    pub(crate) fn of(rank: usize, ranks: usize, group: Arc<dyn Group>) -> Self {
        Self { rank, ranks, group }
    }

    /// A rank without others.
    pub fn alone() -> Self {
        Self::group(1, DEADLINE).remove(0)
    }

    /// Its number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Ends the work of all ranks: whoever waits or comes later gets this reason, or the first one.
    pub fn fail(&self, why: String) {
        self.group.fail(self.rank, why);
    }

    /// # Errors
    /// [`Error::Device`] with the reason of the rank that failed first.
    pub fn check(&self) -> Result<()> {
        self.group.check()
    }

    /// Tells all ranks a value, once for each key.
    pub fn tell(&self, key: String, value: Vec<u8>) {
        self.group.tell(self.rank, key, value);
    }

    /// The value of a key, which a rank has told or will tell.
    ///
    /// # Errors
    /// As [`Member::check`]; [`Error::Device`] if it does not come before the deadline.
    pub fn learn(&self, key: &str) -> Result<Vec<u8>> {
        self.group.learn(self.rank, key)
    }

    /// Leaves this rank's values and calls `read` once per rank, with its number and its values, in ascending order.
    pub(crate) fn exchange(&self, fill: impl FnOnce(&mut Vec<f32>), mut read: impl FnMut(usize, &[f32])) -> Result<()> {
        let mut fill = Some(fill);
        self.group.exchange(self.rank, &mut |own| fill.take().into_iter().for_each(|fill| fill(own)), &mut read)
    }
}

/// The values of each rank at one exchange.
type Places = Vec<RwLock<Vec<f32>>>;

/// Ranks in threads of one process.
struct Here {
    meeting: Mutex<Meeting>,
    moved: Condvar,
    places: [Places; 2],
    deadline: Duration,
}

/// Who has come.
#[derive(Default)]
struct Meeting {
    arrived: usize,
    /// Exchanges that are complete.
    complete: u64,
    /// The rank that failed first, and why.
    failed: Option<(usize, String)>,
    told: HashMap<String, Vec<u8>>,
}

impl Group for Here {
    fn exchange(
        &self,
        rank: usize,
        fill: &mut dyn FnMut(&mut Vec<f32>),
        read: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        // A rank that is here has completed all exchanges before this one, so the number is the same for all.
        let places = &self.places[(self.meeting().complete % 2) as usize];
        {
            let mut own = places[rank].write().unwrap_or_else(PoisonError::into_inner);
            own.clear();
            fill(&mut own);
        }
        self.wait(rank)?;
        for (rank, values) in places.iter().enumerate() {
            read(rank, &values.read().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(())
    }

    fn fail(&self, rank: usize, why: String) {
        self.meeting().failed.get_or_insert((rank, why));
        self.moved.notify_all();
    }

    fn check(&self) -> Result<()> {
        self.meeting().check()
    }

    fn tell(&self, _: usize, key: String, value: Vec<u8>) {
        self.meeting().told.insert(key, value);
        self.moved.notify_all();
    }

    fn learn(&self, rank: usize, key: &str) -> Result<Vec<u8>> {
        let unknown = |m: &mut Meeting| !m.told.contains_key(key) && m.failed.is_none();
        let waited = self.moved.wait_timeout_while(self.meeting(), self.deadline, unknown);
        let (meeting, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = meeting.told.get(key) {
            return Ok(value.clone());
        }
        meeting.check()?;
        let why = format!("{key} of another rank did not come within {:?}", self.deadline);
        Err(Error::Device { op: format!("rank {rank}"), why })
    }
}

impl Here {
    /// Waits until all ranks have come.
    fn wait(&self, rank: usize) -> Result<()> {
        let mut meeting = self.meeting();
        meeting.check()?;
        meeting.arrived += 1;
        let (own, ranks) = (meeting.complete, self.places[0].len());
        if meeting.arrived == ranks {
            (meeting.arrived, meeting.complete) = (0, own + 1);
            self.moved.notify_all();
            return Ok(());
        }
        let goes_on = |m: &mut Meeting| m.complete == own && m.failed.is_none();
        let waited = self.moved.wait_timeout_while(meeting, self.deadline, goes_on);
        let (mut meeting, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() && meeting.complete == own {
            let why = format!("{} of {ranks} ranks came within {:?}", meeting.arrived, self.deadline);
            meeting.failed.get_or_insert((rank, why));
            self.moved.notify_all();
        }
        // An exchange that is complete stays so, whatever fails after it.
        if meeting.complete > own { Ok(()) } else { meeting.check() }
    }

    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Meeting {
    fn check(&self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some((rank, why)) => Err(Error::Device { op: format!("rank {rank}"), why: why.clone() }),
        }
    }
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use super::*;

    fn on_ranks<T: Send>(ranks: usize, deadline: Duration, f: impl Fn(Member) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = Member::group(ranks, deadline).into_iter().map(|m| scope.spawn(|| f(m))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn many_exchanges_do_not_mix() {
        let seen = on_ranks(3, DEADLINE, |m| {
            for i in 0..2000 {
                let mut seen = Vec::new();
                m.exchange(|own| own.push((10 * i + m.rank()) as f32), |rank, v| seen.push((rank, v[0]))).unwrap();
                let want: Vec<(usize, f32)> = (0..3).map(|rank| (rank, (10 * i + rank) as f32)).collect();
                assert_eq!(seen, want);
            }
        });
        assert_eq!(seen.len(), 3);
    }

    #[test]
    fn a_failed_rank_ends_the_wait_of_the_others_with_its_reason() {
        let errors = on_ranks(3, DEADLINE, |m| match m.rank() {
            1 => {
                m.fail("out of order".into());
                m.check().unwrap_err().to_string()
            }
            _ => m.exchange(|_| {}, |_, _| {}).unwrap_err().to_string(),
        });
        assert!(errors.iter().all(|e| e.contains("rank 1") && e.contains("out of order")), "{errors:?}");
    }

    #[test]
    fn what_a_rank_tells_is_learnt_by_all_or_not_waited_for_longer() {
        let learnt = on_ranks(2, Duration::from_millis(50), |m| {
            if m.rank() == 1 {
                m.tell("the area".into(), vec![7]);
            }
            (m.learn("the area").unwrap(), m.learn("nothing").unwrap_err().to_string())
        });
        for (value, error) in learnt {
            assert_eq!(value, [7]);
            assert!(error.contains("nothing of another rank"), "{error}");
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_waited_for_until_the_deadline() {
        let results = on_ranks(2, Duration::from_millis(50), |m| match m.rank() {
            0 => m.exchange(|_| {}, |_, _| {}),
            _ => Ok(()),
        });
        let error = results[0].as_ref().unwrap_err().to_string();
        assert!(error.contains("1 of 2 ranks"), "{error}");
    }
}
