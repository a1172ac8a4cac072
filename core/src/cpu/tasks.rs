//! Splits of an op over threads. Results never depend on them: every task writes its own tile.

/// Multiply-adds (or elements of slower functions, weighted) below which waking a thread costs more than it gains.
#[cfg(not(target_arch = "wasm32"))]
const WORTH_A_THREAD: usize = 150_000;

/// Runs `f(i, task)` on every task, on several threads where `work` (about the multiply-adds of all tasks) is worth it.
pub(crate) fn for_each<T: Send>(tasks: Vec<T>, work: usize, f: impl Fn(usize, T) + Send + Sync) {
    #[cfg(not(target_arch = "wasm32"))]
    if tasks.len() > 1 && work >= WORTH_A_THREAD && rayon::current_num_threads() > 1 {
        use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
        tasks.into_par_iter().enumerate().for_each(|(i, task)| f(i, task));
        return;
    }
    let _ = work;
    tasks.into_iter().enumerate().for_each(|(i, task)| f(i, task));
}

/// Threads that [`for_each`] may use.
pub(crate) fn threads() -> usize {
    #[cfg(not(target_arch = "wasm32"))]
    return rayon::current_num_threads();
    #[cfg(target_arch = "wasm32")]
    1
}
