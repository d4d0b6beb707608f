//! What was typed: arguments, sub-commands and exit codes.

use std::process::ExitCode;

/// Parses the command line and runs what it asks for.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
