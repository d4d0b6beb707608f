//! The command line, and the sub-commands other than training, one file each.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod check;
pub mod cli;
pub(crate) mod compare;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod generate;
mod http;
pub(crate) mod init;
pub(crate) mod inspect;
pub(crate) mod merge;
pub(crate) mod named;
pub(crate) mod plan;
pub(crate) mod push;
pub(crate) mod report;
pub(crate) mod serve;
pub(crate) mod tune;

use std::io::{ErrorKind, IsTerminal as _, Write as _, stderr, stdout};

use serde::Serialize;

use crate::util::failure::Failure;
use crate::util::text::for_terminal;

/// Writes a line to stdout. A closed reader, such as `head`, is no failure.
fn print(text: &str) -> Result<(), Failure> {
    match writeln!(stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::running(error)),
        _ => Ok(()),
    }
}

/// Writes a text for people to stdout.
fn print_text(text: &str) -> Result<(), Failure> {
    print(&for_terminal(&stdout(), text))
}

/// Writes figures to stdout: as one JSON object with `--json` or where stdout is no terminal, else as `text`.
fn print_figures(figures: &impl Serialize, as_json: bool, text: &str) -> Result<(), Failure> {
    if as_json || !stdout().is_terminal() {
        return print(&serde_json::to_string(figures).map_err(Failure::running)?);
    }
    print_text(text)
}

/// Writes a line to stderr. Errors are ignored: where stderr is closed, nobody reads this.
fn say(text: &str) {
    drop(writeln!(stderr(), "{text}"));
}

/// Reads a number on the command line; `expected` says which are allowed.
fn number(text: &str, is_allowed: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && is_allowed(*number));
    number.ok_or_else(|| format!("expected {expected}"))
}
