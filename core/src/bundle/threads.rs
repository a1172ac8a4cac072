//! Divides the work on a bundle among threads, where there are some.

use std::iter;
#[cfg(not(target_arch = "wasm32"))]
use std::{sync::mpsc::sync_channel, thread};

#[cfg(not(target_arch = "wasm32"))]
use rayon::prelude::*;

use crate::{error::Result, source::Shared};

/// Calls `f` with each of `tasks`, several at a time; returns the first error in their order.
pub(super) fn each<T: Shared>(tasks: Vec<T>, f: impl Fn(T) -> Result<()> + Shared) -> Result<()> {
    #[cfg(target_arch = "wasm32")]
    return tasks.into_iter().try_for_each(f);
    #[cfg(not(target_arch = "wasm32"))]
    tasks.into_par_iter().map(f).collect::<Vec<_>>().into_iter().collect()
}

/// What `f` makes of each of `tasks`, several at a time, in their order.
pub(super) fn map<T: Shared, R: Shared>(tasks: Vec<T>, f: impl Fn(T) -> R + Shared) -> Vec<R> {
    #[cfg(target_arch = "wasm32")]
    return tasks.into_iter().map(f).collect();
    #[cfg(not(target_arch = "wasm32"))]
    tasks.into_par_iter().map(f).collect()
}

/// Runs `there` in a thread of its own, if there can be one, while `here` runs.
pub(super) fn beside<A: Shared, B>(there: impl Fn() -> A + Shared, here: impl FnOnce() -> B) -> (A, B) {
    #[cfg(not(target_arch = "wasm32"))]
    let (made, done) = thread::scope(|scope| {
        let thread = thread::Builder::new().name("selkie-checksums".into()).spawn_scoped(scope, &there).ok();
        let done = here();
        (thread.map(|thread| thread.join().expect("it does not panic")), done)
    });
    #[cfg(target_arch = "wasm32")]
    let (made, done) = (None, here());
    (made.unwrap_or_else(there), done)
}

/// Hands `take` all that `make` gives. `make` runs in a thread of its own while `take` is at work, one item ahead.
///
/// # Errors
/// The first of `take`, after which nothing more is made.
pub(super) fn ahead<T: Shared>(
    mut make: impl FnMut() -> Option<T> + Shared,
    mut take: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    #[cfg(not(target_arch = "wasm32"))]
    let done = thread::scope(|scope| {
        let ((made, taken), make) = (sync_channel(1), &mut make);
        let maker = move || iter::from_fn(make).try_for_each(|item| made.send(item).ok());
        // Without a thread it is made below.
        thread::Builder::new().name("selkie-bundle".into()).spawn_scoped(scope, maker).ok()?;
        Some(taken.into_iter().try_for_each(&mut take))
    });
    #[cfg(target_arch = "wasm32")]
    let done = None;
    done.unwrap_or_else(|| iter::from_fn(&mut make).try_for_each(&mut take))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn the_first_error_in_order_is_returned() {
        let odd = |i: usize| if i % 2 == 1 { Err(Error::BadRequest(i.to_string())) } else { Ok(()) };
        assert!(each(vec![2, 4, 6], odd).is_ok());
        let error = each((0..100).collect(), odd).unwrap_err();
        assert_eq!(error.to_string(), Error::BadRequest("1".into()).to_string());
    }

    #[test]
    fn all_is_taken_in_order_until_an_error() {
        let mut next = 0..100;
        let mut seen = Vec::new();
        let take = |i| {
            seen.push(i);
            Ok(())
        };
        ahead(|| next.next(), take).unwrap();
        assert!(seen.into_iter().eq(0..100));
        let mut next = 0..100;
        let failed = ahead(|| next.next(), |i| if i < 50 { Ok(()) } else { Err(Error::BadRequest("50".into())) });
        assert!(failed.is_err() && next.start < 60, "{next:?}");
    }
}
