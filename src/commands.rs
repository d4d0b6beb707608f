//! Sub-commands other than training, one file each.

pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod compare;
pub(crate) mod doctor;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod merge;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod tune;

use std::io::{ErrorKind, Write as _, stderr, stdout};

use crate::failure::Failure;

/// Writes a line to stdout. A closed reader, such as `head`, is no failure.
fn print(text: &str) -> Result<(), Failure> {
    match writeln!(stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::running(error)),
        _ => Ok(()),
    }
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

/// The median; the mean of the middle two for an even number of values. There is at least one.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) { f64::midpoint(values[middle - 1], values[middle]) } else { values[middle] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_the_middle_two() {
        assert!((median(&mut [3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median(&mut [4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
    }
}
