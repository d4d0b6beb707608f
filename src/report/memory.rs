//! The peak memory of a run, compared with its plan.

use super::axis::Unit;
use super::record::Record;
use super::stack::{self, Piece};

/// The peak memory in use, and of which device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Peak {
    pub(super) bytes: f64,
    pub(super) of: &'static str,
}

impl Peak {
    /// The GPU's where there is one.
    pub(super) fn of(record: &Record) -> Option<Self> {
        match record.peak_memory_bytes(true) {
            Some(bytes) => Some(Self { bytes, of: "of the GPU" }),
            None => Some(Self { bytes: record.peak_memory_bytes(false)?, of: "of the process" }),
        }
    }
}

/// The plan beside the measurement.
pub(super) struct Memory {
    pub(super) title: &'static str,
    planned: Vec<Piece>,
    measured: Piece,
    pub(super) notes: Vec<String>,
}

impl Memory {
    pub(super) fn of(record: &Record) -> Option<Self> {
        const CLASSES: [&str; 9] = [
            "p-backward",
            "p-optimizer",
            "p-data",
            "p-evaluation",
            "p-transfer",
            "p-logging",
            "p-forward",
            "p-other",
            "p-checkpoint",
        ];
        let plan = record.memory_plan.as_ref().filter(|plan| plan.peak_bytes > 0)?;
        let peak = Peak::of(record)?;
        let classes = CLASSES.into_iter().cycle();
        #[expect(clippy::cast_precision_loss, reason = "shown with four digits")]
        let planned = plan
            .components
            .iter()
            .zip(classes)
            .filter(|(component, _)| component.bytes > 0)
            .map(|(component, class)| Piece { name: component.name.clone(), class, value: component.bytes as f64 });
        #[expect(clippy::cast_precision_loss, reason = "shown in percent")]
        let share = 100.0 * peak.bytes / plan.peak_bytes as f64;
        let mut notes = vec![format!("The measured peak is {share:.0} % of the plan.")];
        notes.extend(Self::fullness(record));
        Some(Self {
            title: "The plan against what was measured",
            planned: planned.collect(),
            measured: Piece { name: format!("measured, {}", peak.of), class: "p-passes", value: peak.bytes },
            notes,
        })
    }

    /// By how much the rows are shorter than the plan assumes.
    fn fullness(record: &Record) -> Option<String> {
        let count = |key: &str| record.setting(key).and_then(toml::Value::as_integer).filter(|count| *count > 0);
        let longest = count("data.max_length")?;
        let rows = count("train.micro_batch_size")? * count("train.gradient_accumulation_steps")?;
        let most = record.steps.max("tokens")?;
        #[expect(clippy::cast_precision_loss, reason = "shown in percent")]
        let share = 100.0 * most / (rows * longest) as f64;
        Some(format!(
            "The plan assumes every row at data.max_length = {longest}; the fullest step of this run held \
             {share:.0} % of that many tokens."
        ))
    }

    pub(super) fn bars(&self) -> String {
        stack::bars(
            &[("planned", self.planned.clone()), (self.measured.name.as_str(), vec![self.measured.clone()])],
            Unit::Bytes,
        )
    }

    pub(super) fn list(&self) -> String {
        stack::piece_list(&self.planned, Unit::Bytes)
    }
}
