//! When this run started.

use std::time::Instant;

/// The moment the command begins: what comes before, loading the program and reading its arguments, takes milliseconds.
///
/// The system's own record of when the process started would also count what a caller did in the same process before
/// it turned into this program: under `cargo run` that is the whole build.
#[must_use]
pub fn process_start() -> Instant {
    Instant::now()
}
