//! Panics that are caught: third-party code panics on odd files.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread would be caught. It then ends nothing and must not be printed.
#[must_use]
pub fn is_guarded() -> bool {
    IS_GUARDED.get()
}

/// Returns the result of `call` or, if it panics, the panic's message, which is then not printed.
///
/// After a panic, do not use anything that `call` worked on, unless it cannot be left half changed.
///
/// # Errors
///
/// If `call` panics.
pub fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if !is_guarded() {
                print(panic);
            }
        }));
    });
    let before = IS_GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    IS_GUARDED.set(before);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        text.unwrap_or("it cannot be read").to_owned()
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
