//! Panics that are caught: third-party code panics on odd files.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use crate::util::faults;

thread_local! {
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread would be caught. It then ends nothing and must not be printed.
fn is_guarded() -> bool {
    IS_GUARDED.get()
}

/// Whether a panic says, in the words of the standard library, of rayon or of tokio, that the system allows no more threads.
#[must_use]
pub fn is_for_want_of_threads(text: &str) -> bool {
    ["failed to spawn thread", "global thread pool has not been initialized", "can't spawn worker thread"]
        .iter()
        .any(|words| text.contains(words))
}

/// Whether a panic is to be printed: it is not one that is caught, and says no more than the message that ends the command:
/// the backend of a device failed, or there are too few threads.
#[must_use]
pub fn is_printed(panic: &PanicHookInfo<'_>) -> bool {
    let thread = std::thread::current();
    let text = panic.payload_as_str().unwrap_or_default();
    !is_guarded() && !is_for_want_of_threads(text) && faults::is_printed(thread.name(), text)
}

/// From now on only such panics are printed as [`is_printed`] says.
pub fn install() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if is_printed(panic) {
                print(panic);
            }
        }));
    });
}

/// Returns the result of `call` or, if it panics, the panic's message, which is then not printed.
///
/// After a panic, do not use anything that `call` worked on, unless it cannot be left half changed.
///
/// # Errors
/// If `call` panics.
pub fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    install();
    let before = IS_GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    IS_GUARDED.set(before);
    result.map_err(|panic| match faults::panic_text(&*panic) {
        "" => "it cannot be read".to_owned(),
        text => text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_called_is_guarded_also_after_a_panic() {
        let inner = guarded(|| (guarded(|| panic!("a {}", "bug")), is_guarded()));
        assert_eq!(inner, Ok((Err::<(), _>("a bug".to_owned()), true)));
        assert!(!is_guarded());
        let other_thread = guarded(|| std::thread::spawn(is_guarded).join().unwrap());
        assert_eq!(other_thread, Ok(false));
    }
}
