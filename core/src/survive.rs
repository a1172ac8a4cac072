//! Calls into libraries that panic on some inputs.

use std::{
    any::Any,
    cell::Cell,
    panic::{self, AssertUnwindSafe},
    sync::Once,
};

thread_local! {
    /// Panics of this thread are caught, and not reported on stderr.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The result of `call`; `None` if it panicked, which is not reported on stderr. Where panics end the process they
/// still do.
///
/// Values that `call` changes may be left half changed.
pub(crate) fn survived<T>(call: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    if cfg!(panic = "abort") {
        return Some(call());
    }
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    let outer = QUIET.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call)).ok();
    QUIET.set(outer);
    result
}

/// The message of a panic.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref().cloned()).unwrap_or_else(|| "without a message".into())
}
