//! Fork and join over independent pieces of work.

/// Threads that [`pieces`] uses.
pub fn threads() -> usize {
    #[cfg(target_arch = "wasm32")]
    return 1;
    #[cfg(not(target_arch = "wasm32"))]
    rayon::current_num_threads()
}

/// Calls `f(i)` once for every `i < n` and returns when all calls have returned; `f` runs on several threads at once.
///
/// The calling thread works too and pieces are handed out one by one, so a thread that wakes late costs little.
/// `n <= 1` stays on the calling thread. Pieces must not depend on who runs them or in which order.
pub fn pieces(n: usize, f: impl Fn(usize) + Sync) {
    #[cfg(not(target_arch = "wasm32"))]
    if n > 1 && threads() > 1 {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= n {
                    break;
                }
                f(i);
            }
        };
        rayon::in_place_scope(|scope| {
            for _ in 1..threads().min(n) {
                scope.spawn(|_| work());
            }
            work();
        });
        return;
    }
    (0..n).for_each(f);
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
}
