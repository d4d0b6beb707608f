//! Code of others that panics where a file is odd.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `call` gives; where it panics, what it said.
///
/// What it was working on must not be used again, or must not be able to be half changed.
pub(super) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        text.unwrap_or("it cannot be read").to_owned()
    })
}
