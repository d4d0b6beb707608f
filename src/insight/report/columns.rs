//! The figures of metrics.jsonl as columns, by field name.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// One column per figure, with one value per record. A value that a record lacks or has as `null` is NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Columns {
    len: usize,
    columns: BTreeMap<String, Vec<f64>>,
}

impl Columns {
    /// Appends a record, without the fields that are no number.
    pub(super) fn push(&mut self, record: &Map<String, Value>) {
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
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// A figure of all records; `None` where no record has a finite value.
    pub(super) fn get(&self, name: &str) -> Option<&[f64]> {
        let column = self.columns.get(name)?;
        column.iter().any(|value| value.is_finite()).then_some(column.as_slice())
    }

    /// A figure of all records, 0 where it is not finite.
    pub(super) fn or_zero(&self, name: &str) -> Vec<f64> {
        let column = self.columns.get(name).cloned().unwrap_or_else(|| vec![f64::NAN; self.len]);
        column.into_iter().map(|value| if value.is_finite() { value } else { 0.0 }).collect()
    }

    /// A figure of the records after warm-up, in which kernels are compiled, caches are filled and the device is
    /// measured: the first tenth, at least 1 and at most 10, but never all.
    pub(super) fn steady(&self, name: &str) -> &[f64] {
        let num_warmup = (self.len / 10).clamp(1, 10).min(self.len.saturating_sub(1));
        self.get(name).map_or(&[], |column| &column[num_warmup..])
    }

    /// The last finite value of a figure.
    pub(super) fn last(&self, name: &str) -> Option<f64> {
        self.get(name)?.iter().rev().copied().find(|value| value.is_finite())
    }

    /// A figure in the last record. NaN where that record lacks it or has it as `null`: the last finite value would make
    /// a diverged run look sound. `None` where no record has it at all.
    pub(super) fn latest(&self, name: &str) -> Option<f64> {
        self.columns.get(name)?.last().copied()
    }

    /// The highest value of a figure.
    pub(super) fn max(&self, name: &str) -> Option<f64> {
        self.get(name)?.iter().copied().filter(|value| value.is_finite()).reduce(f64::max)
    }

    /// Sum of the finite values of a figure.
    pub(super) fn sum(&self, name: &str) -> Option<f64> {
        self.get(name).map(|_| self.or_zero(name).iter().sum())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::insight::report) fn columns(lines: &[&str]) -> Columns {
        let mut columns = Columns::default();
        lines.iter().for_each(|line| columns.push(&serde_json::from_str(line).unwrap()));
        columns
    }

    #[test]
    fn what_a_record_lacks_is_a_gap_and_a_figure_that_none_has_is_absent() {
        let columns = columns(&[
            r#"{"step":1,"loss":2.5,"a":null}"#,
            r#"{"step":2,"mfu":0.5}"#,
            r#"{"step":3,"loss":1,"t":"x"}"#,
        ]);
        assert_eq!(columns.get("step"), Some([1.0, 2.0, 3.0].as_slice()));
        let loss = columns.get("loss").unwrap();
        assert!(loss[0] == 2.5 && loss[1].is_nan() && loss[2] == 1.0, "{loss:?}");
        assert_eq!((columns.or_zero("mfu"), columns.or_zero("nothing")), (vec![0.0, 0.5, 0.0], vec![0.0; 3]));
        assert!(columns.get("a").is_none() && columns.get("t").is_none() && columns.get("nothing").is_none());
        assert_eq!((columns.latest("loss"), columns.latest("nothing")), (Some(1.0), None));
        assert!(columns.latest("mfu").unwrap().is_nan() && columns.latest("a").unwrap().is_nan());
        assert_eq!((columns.last("loss"), columns.max("loss"), columns.sum("loss")), (Some(1.0), Some(2.5), Some(3.5)));
    }

    #[test]
    fn the_first_steps_are_warm_up_but_never_all() {
        for (len, num_warmup) in [(0, 0), (1, 0), (2, 1), (30, 3), (200, 10)] {
            let columns = columns(&vec![r#"{"step":1}"#; len]);
            assert_eq!(columns.steady("step").len(), len - num_warmup);
        }
    }
}
