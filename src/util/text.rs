//! Numbers, lists and marks for people.

use std::fmt;
use std::io::{IsTerminal, stdout};

/// Whether a stream shows colours: a terminal, unless `NO_COLOR` is set (<https://no-color.org>: present and not empty).
#[must_use]
pub fn has_colors(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// How a line of a summary on stdout begins; coloured on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// All is well, or better than before.
    Good,
    /// Worth knowing.
    Note,
    /// Wrong, or worse than before.
    Bad,
    /// The measurement does not decide it.
    Open,
    /// As before.
    Equal,
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, color) = match self {
            Self::Good => ('✓', 32),
            Self::Note => ('!', 33),
            Self::Bad => ('✗', 31),
            Self::Open => ('?', 33),
            Self::Equal => ('=', 0),
        };
        if has_colors(&stdout()) { write!(f, "\x1b[{color}m{sign}\x1b[0m") } else { write!(f, "{sign}") }
    }
}

/// Quotes a word for a shell.
#[must_use]
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// A whole number with its thousands grouped: `1,234,567`.
#[must_use]
pub fn thousands(number: f64) -> String {
    if !number.is_finite() {
        return number.to_string();
    }
    let sign = if number < 0.0 { "-" } else { "" };
    format!("{sign}{}", with_commas(format!("{:.0}", number.abs())))
}

/// A count with its thousands grouped: `1,234,567`.
#[must_use]
pub fn with_commas(count: impl std::fmt::Display) -> String {
    let digits = count.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(",")
}

/// A count with what is counted: `1 row`, `1,234 rows`.
#[must_use]
pub fn counted(count: impl std::fmt::Display, noun: &str) -> String {
    let count = with_commas(count);
    let plural = if count == "1" { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// The text, or as much of it as so many characters hold.
#[must_use]
pub fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most { text.to_owned() } else { text.chars().take(most - 1).chain(['…']).collect() }
}

/// A size: `812 MiB`, `12.3 GiB`.
#[allow(clippy::cast_precision_loss, reason = "shown with one decimal")]
#[must_use]
pub fn bytes(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.0} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

/// A time: `0.8s`, `42s`, `3m07s`, `2h05m`, `1d03h`.
#[must_use]
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "?".into();
    }
    if seconds < 9.95 {
        return format!("{seconds:.1}s");
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "finite, not negative, saturates")]
    let whole = seconds.round() as u64;
    match (whole / 86_400, whole / 3_600 % 24, whole / 60 % 60, whole % 60) {
        (0, 0, 0, seconds) => format!("{seconds}s"),
        (0, 0, minutes, seconds) => format!("{minutes}m{seconds:02}s"),
        (0, hours, minutes, _) => format!("{hours}h{minutes:02}m"),
        (days, hours, ..) => format!("{days}d{hours:02}h"),
    }
}

/// Each item on a line of its own, indented.
#[must_use]
pub fn lines(items: &[impl std::fmt::Display]) -> String {
    items.iter().map(|item| format!("\n  {item}")).collect()
}

/// The text with lines that end between words; what follows a break is indented like its line, and further.
#[must_use]
pub fn at_words(text: &str, width: usize) -> String {
    let wrapped = text.lines().map(|line| {
        let indent = " ".repeat(line.len() - line.trim_start().len() + 4);
        let breaks = textwrap::WrapAlgorithm::FirstFit;
        textwrap::fill(line, textwrap::Options::new(width).subsequent_indent(&indent).wrap_algorithm(breaks))
    });
    wrapped.collect::<Vec<_>>().join("\n")
}

/// The text for people on this stream: on a terminal its lines end between words.
#[must_use]
pub fn for_terminal(stream: &impl IsTerminal, text: &str) -> String {
    match terminal_size::terminal_size().filter(|_| stream.is_terminal()) {
        Some((width, _)) => at_words(text, width.0.into()),
        None => text.to_owned(),
    }
}

/// Columns of equal width: the first aligned left, the others right.
#[must_use]
pub fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let num_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..num_columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_carry_units() {
        let numbers = [0.0, 999.4, 1000.0, 1_234_567.0, -4321.0].map(thousands);
        assert_eq!(numbers, ["0", "999", "1,000", "1,234,567", "-4,321"]);
        assert_eq!(thousands(f64::NAN), "NaN");
        assert_eq!([0, 999, 1000, 1_234_567].map(with_commas), ["0", "999", "1,000", "1,234,567"]);
        let counts = [counted(0, "row"), counted(1, "row"), counted(1234, "row")];
        assert_eq!(counts, ["0 rows", "1 row", "1,234 rows"]);
        assert_eq!([0, 812 << 20, 1 << 30, 13_200_000_000].map(bytes), ["0 MiB", "812 MiB", "1.0 GiB", "12.3 GiB"]);
    }

    #[test]
    fn durations_have_two_units_at_most() {
        let texts = [0.84, 9.99, 59.6, 187.0, 7500.0, 97_200.0, f64::NAN].map(duration);
        assert_eq!(texts, ["0.8s", "10s", "1m00s", "3m07s", "2h05m", "1d03h", "?"]);
    }
}
