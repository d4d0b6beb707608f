//! Figures as text.

use std::fmt::Display;

use super::{Change, Finding, Severity};

/// `38%`, and with a decimal below 10.
pub(super) fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent.abs() < 9.95 { format!("{percent:.1}%") } else { format!("{percent:.0}%") }
}

/// `0.120 s`, `45 s`.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 0.01 => format!("{:.2} ms", 1e3 * seconds),
        seconds if seconds < 10.0 => format!("{seconds:.3} s"),
        seconds => format!("{seconds:.0} s"),
    }
}

/// The step time after a change: `about 1.50x (a step 0.120 s -> 0.080 s)`; without times where no step was timed.
pub(super) fn faster(before: f64, after: f64) -> String {
    if !(before > 0.0 && after > 0.0) {
        return "a shorter step".to_owned();
    }
    format!("about {:.2}x (a step {} -> {})", before / after, seconds(before), seconds(after))
}

/// The largest gain of a change that saves a share of the steps' time.
pub(super) fn at_most(share: f64) -> String {
    format!("at most {:.2}x", 1.0 / (1.0 - share.clamp(0.0, 0.99)))
}

pub(super) fn change(key: &str, from: impl Display, to: impl Display, expected: String) -> Change {
    Change { key: key.into(), from: from.to_string(), to: to.to_string(), expected }
}

/// A finding about a share of the time.
pub(super) fn finding(rule: &str, severity: Severity, share_of_time: Option<f64>, verdict: String) -> Finding {
    Finding { rule: rule.into(), severity, verdict, share_of_time, ..Finding::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_as_many_digits_as_matter() {
        assert_eq!([percent(0.384), percent(0.0123), percent(1.0)], ["38%", "1.2%", "100%"]);
        assert_eq!([seconds(0.00123), seconds(0.12), seconds(45.2)], ["1.23 ms", "0.120 s", "45 s"]);
        assert_eq!(faster(0.12, 0.08), "about 1.50x (a step 0.120 s -> 0.080 s)");
        assert_eq!(faster(0.0, 0.0), "a shorter step", "not NaN");
        assert_eq!(at_most(0.5), "at most 2.00x");
    }
}
