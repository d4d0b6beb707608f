//! Checks which values a key takes, and describes the allowed values.

use std::fmt::Display;
use std::ops::{Bound, RangeBounds};

use super::tree::Value;

/// Description of an allowed text.
pub(super) const TEXT: &str = "text that is not empty";

/// Accepts a text that is not empty; otherwise returns a hint if the value is a number or similar.
pub(super) fn accept_text(value: &Value) -> Result<String, Option<String>> {
    match value {
        Value::String(text) if !text.trim().is_empty() => Ok(text.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) | Value::Datetime(_) => {
            let written = value.shown();
            Err(Some(format!("put it in quotes: \"{written}\", and all of that in '...' after `--set`")))
        }
        _ => Err(None),
    }
}

/// Accepts a whole number in a range; otherwise returns a hint if there is one.
pub(super) fn accept_count<T>(value: &Value, range: &impl RangeBounds<T>) -> Result<T, Option<String>>
where
    T: Copy + PartialOrd + TryFrom<i128>,
{
    match value {
        Value::Integer(integer) => T::try_from(*integer).ok().filter(|count| range.contains(count)).ok_or(None),
        Value::Float(float) if float.fract() == 0.0 && float.abs() < 1e15 => {
            Err(Some(format!("write it without a point: {float:.0}")))
        }
        Value::String(text) if text.trim().parse::<i128>().is_ok() => Err(Some(without_quotes(text))),
        _ => Err(None),
    }
}

/// Accepts a number in a range, whole or not; otherwise returns a hint if there is one.
pub(super) fn accept_number(value: &Value, range: &impl RangeBounds<f64>) -> Result<f64, Option<String>> {
    match value {
        Value::String(text) if text.trim().parse::<f64>().is_ok() => Err(Some(without_quotes(text))),
        _ => value.number().filter(|number| number.is_finite() && range.contains(number)).ok_or(None),
    }
}

fn without_quotes(text: &str) -> String {
    format!("write it without quotes: {}", text.trim())
}

/// Describes a range, such as `a whole number of at least 1`.
pub(super) fn describe_count<T: Display>(range: &impl RangeBounds<T>) -> String {
    match (range.start_bound(), range.end_bound()) {
        (Bound::Included(low), Bound::Included(high)) => format!("a whole number from {low} to {high}"),
        (Bound::Included(low), _) => format!("a whole number of at least {low}"),
        _ => "a whole number of at least 0".to_owned(),
    }
}

/// Describes a range, such as `a number in [0, 1)`.
pub(super) fn describe_number(range: &impl RangeBounds<f64>) -> String {
    let opening = |bound| match bound {
        Bound::Included(low) => Some(format!("[{low}")),
        Bound::Excluded(low) => Some(format!("({low}")),
        Bound::Unbounded => None,
    };
    match (opening(range.start_bound()), range.end_bound(), range.start_bound()) {
        (Some(low), Bound::Included(high), _) => format!("a number in {low}, {high}]"),
        (Some(low), Bound::Excluded(high), _) => format!("a number in {low}, {high})"),
        (_, Bound::Unbounded, Bound::Included(low)) => format!("a number of at least {low}"),
        (_, Bound::Unbounded, Bound::Excluded(low)) => format!("a number above {low}"),
        _ => "a finite number".to_owned(),
    }
}
