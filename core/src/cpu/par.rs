//! Fork and join over independent pieces of work. Results never depend on how it is split: every piece writes its own
//! outputs.

use std::cell::UnsafeCell;

/// Multiply-adds (or elements of slower functions, weighted) below which a second thread costs more than it gains.
const WORTH_A_THREAD: usize = 40_000;

/// Threads that [`pieces`] uses.
pub fn threads() -> usize {
    #[cfg(target_arch = "wasm32")]
    return 1;
    #[cfg(not(target_arch = "wasm32"))]
    super::team::own_threads().unwrap_or_else(|| match rayon::current_thread_index().is_none() && !*HAVE_POOL {
        true => 1,
        false => rayon::current_num_threads(),
    })
}

/// Gives the calling thread a team of its own of `threads` threads, itself included: the others are those of the process' pool.
#[cfg(not(target_arch = "wasm32"))]
pub fn own_team(threads: usize) {
    super::team::own(threads.min(self::threads()).max(1));
}

/// Whether the process' pool exists. Where the system refuses threads (a limit on processes or memory), everything runs on the
/// calling thread; rayon itself would panic at the first use.
#[cfg(not(target_arch = "wasm32"))]
static HAVE_POOL: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
    let made = rayon::ThreadPoolBuilder::new().build_global();
    // An error without a source says that the pool is there already.
    made.err().is_none_or(|e| std::error::Error::source(&e).is_none())
});

/// Calls `f(i)` once for every `i < n` and returns when all calls have returned; `f` runs on several threads concurrently.
///
/// The calling thread works too and pieces are handed out one by one, so a thread that comes late or not at all costs
/// nothing. `n <= 1` stays on the calling thread. Pieces must not depend on the thread that runs them or on their order.
pub fn pieces(n: usize, f: impl Fn(usize) + Sync) {
    #[cfg(not(target_arch = "wasm32"))]
    if n > 1 && threads() > 1 && super::team::fork(n, threads(), &f) {
        return;
    }
    (0..n).for_each(f);
}

/// A task until a piece takes it.
struct Slot<T>(UnsafeCell<Option<T>>);

// SAFETY: a slot is touched by the one piece that has its number.
unsafe impl<T: Send> Sync for Slot<T> {}

/// Runs `f(i, task)` on every task, on several threads where `work` (about the multiply-adds of all tasks) is worth it.
pub(crate) fn for_each<T: Send>(tasks: Vec<T>, work: usize, f: impl Fn(usize, T) + Send + Sync) {
    /// One copy of a task's code for both callers, since it is long.
    #[inline(never)]
    fn run<T>(f: &impl Fn(usize, T), i: usize, task: T) {
        f(i, task);
    }
    if tasks.len() <= 1 || work < WORTH_A_THREAD || threads() == 1 {
        tasks.into_iter().enumerate().for_each(|(i, task)| run(&f, i, task));
        return;
    }
    let slots: Vec<Slot<T>> = tasks.into_iter().map(|task| Slot(UnsafeCell::new(Some(task)))).collect();
    pieces(slots.len(), |i| {
        let slot = &slots[i];
        // SAFETY: each piece runs once.
        if let Some(task) = unsafe { (*slot.0.get()).take() } {
            run(&f, i, task);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn every_piece_runs_once() {
        for n in [0, 1, 2, 3, 1000] {
            let seen: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
            pieces(n, |i| {
                seen[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|s| s.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn forks_of_many_threads_do_not_mix() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for n in (0..200).cycle().take(5000) {
                        let sum = AtomicU32::new(0);
                        pieces(n, |i| {
                            sum.fetch_add(i as u32 + 1, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), (n * (n + 1) / 2) as u32);
                    }
                });
            }
        });
    }

    #[test]
    fn forks_within_a_piece_run() {
        let sum = AtomicU32::new(0);
        pieces(10, |_| {
            pieces(10, |_| {
                sum.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 100);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_next_fork_works() {
        for bad in [0, 50, 99] {
            let result = std::panic::catch_unwind(|| pieces(100, |i| assert!(i != bad, "piece {bad}")));
            assert!(result.is_err());
        }
        for_each((0..100).collect(), usize::MAX, |i, task: usize| assert_eq!(i, task));
    }
}
