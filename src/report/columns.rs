//! The figures of metrics.jsonl as columns, by field name.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// One column per figure, with one value per record. A value that a record lacks or has as `null` is NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Columns {
    len: usize,
    columns: BTreeMap<String, Vec<f64>>,
}

impl Columns {
    /// Appends a record, without the fields that are no number.
    pub fn push(&mut self, record: &Map<String, Value>) {
        for (name, value) in record {
            let number = match value {
                Value::Null => f64::NAN,
                Value::Number(number) => number.as_f64().unwrap_or(f64::NAN),
                _ => continue,
            };
            if !self.columns.contains_key(name) {
                self.columns.insert(name.clone(), vec![f64::NAN; self.len]);
            }
            if let Some(column) = self.columns.get_mut(name) {
                column.push(number);
            }
        }
        self.len += 1;
        for column in self.columns.values_mut() {
            column.resize(self.len, f64::NAN);
        }
    }

    /// Number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A figure of all records; `None` where no record has a finite value.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[f64]> {
        let column = self.columns.get(name)?;
        column.iter().any(|value| value.is_finite()).then_some(column.as_slice())
    }

    /// The last finite value of a figure.
    #[must_use]
    pub fn last(&self, name: &str) -> Option<f64> {
        self.get(name)?.iter().rev().copied().find(|value| value.is_finite())
    }

    /// A figure in the last record. NaN where that record lacks it or has it as `null`, like a loss that is no longer a
    /// number; `None` where no record has it at all.
    #[must_use]
    pub fn latest(&self, name: &str) -> Option<f64> {
        self.columns.get(name)?.last().copied()
    }

    /// The highest value of a figure.
    #[must_use]
    pub fn max(&self, name: &str) -> Option<f64> {
        self.get(name)?.iter().copied().filter(|value| value.is_finite()).reduce(f64::max)
    }

    /// Sum of the finite values of a figure.
    #[must_use]
    pub fn sum(&self, name: &str) -> Option<f64> {
        Some(self.get(name)?.iter().filter(|value| value.is_finite()).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_record_lacks_is_a_gap_and_a_figure_that_none_has_is_absent() {
        let mut columns = Columns::default();
        for line in [r#"{"step":1,"loss":2.5,"a":null}"#, r#"{"step":2,"mfu":0.5}"#, r#"{"step":3,"loss":1,"t":"x"}"#] {
            columns.push(&serde_json::from_str(line).unwrap());
        }
        assert_eq!(columns.get("step"), Some([1.0, 2.0, 3.0].as_slice()));
        let loss = columns.get("loss").unwrap();
        assert!(loss[0] == 2.5 && loss[1].is_nan() && loss[2] == 1.0, "{loss:?}");
        let mfu = columns.get("mfu").unwrap();
        assert!(mfu[0].is_nan() && mfu[1] == 0.5 && mfu[2].is_nan(), "{mfu:?}");
        assert!(columns.get("a").is_none() && columns.get("t").is_none() && columns.get("nothing").is_none());
        assert_eq!((columns.latest("loss"), columns.latest("nothing")), (Some(1.0), None));
        assert!(columns.latest("mfu").unwrap().is_nan() && columns.latest("a").unwrap().is_nan());
        assert_eq!((columns.last("loss"), columns.max("loss"), columns.sum("loss")), (Some(1.0), Some(2.5), Some(3.5)));
    }
}
