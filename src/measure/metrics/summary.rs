//! The final figures: summary.json, or unfinished.json of a run that did not finish.

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::finding::Finding;
use super::totals::{Evaluations, Totals};
use crate::measure::figures::evaluation::kept;

/// The final figures of a run that finished; the file exists only then.
pub const SUMMARY_FILE: &str = "summary.json";
/// The final figures of a run that was interrupted, stopped or failed, until it is resumed and takes a step.
pub const UNFINISHED_FILE: &str = "unfinished.json";

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All steps were taken.
    #[default]
    Finished,
    /// The evaluation loss stopped falling.
    StoppedEarly,
    /// SIGINT, SIGTERM or the dashboard; a checkpoint was saved.
    Interrupted,
    /// The watchdog's patience ran out; a checkpoint was saved.
    StoppedByWatchdog,
    /// An error ended it.
    Failed,
}

impl Outcome {
    /// For people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::StoppedEarly => "stopped early",
            Self::Interrupted => "interrupted",
            Self::StoppedByWatchdog => "stopped by the watchdog",
            Self::Failed => "failed",
        }
    }

    /// Whether the run finished, with an adapter.
    #[must_use]
    pub fn is_finished(self) -> bool {
        matches!(self, Self::Finished | Self::StoppedEarly)
    }
}

/// The final figures of a run, over all its starts if it was resumed, unless a field says otherwise. The work of a
/// killed start after its last checkpoint is not included: its steps were made again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// How the run ended.
    pub outcome: Outcome,
    /// Why the run did not finish, and what to do.
    pub reason: Option<String>,
    /// Optimizer updates.
    pub steps: u64,
    /// Updates that the run was to make, if it did not finish.
    pub total_steps: Option<u64>,
    /// Passes over the training rows.
    pub epochs: f64,
    /// Sums, means and peaks.
    pub totals: Totals,
    /// Results of the evaluations.
    pub evaluations: Evaluations,
    /// The energy in kWh.
    pub energy_kwh: Option<f64>,
    /// What the run cost by the recipe's `[cost]`: the hours of the machine and the energy.
    pub cost: Option<f64>,
    /// Currency of `cost`.
    pub currency: Option<String>,
    /// Time, energy and cost of a million tokens.
    pub per_million_tokens: Option<PerMillionTokens>,
    /// The device, for people.
    pub device: String,
    /// Type of activations and matrix products.
    pub precision: String,
    /// Parameters that are trained.
    pub trainable_parameters: u64,
    /// Parameters of the base model and the adapters.
    pub all_parameters: u64,
    /// Whether the exported adapter was read back and gave the same logits.
    pub adapter_verified: Option<bool>,
    /// What held the run back since the last start, the worst first.
    pub diagnosis: Vec<Finding>,
    /// Findings reported while the run was going, since the last start, with the steps through which each had lasted.
    pub reported: Vec<Finding>,
    /// Warnings of the run, in order.
    pub warnings: Vec<String>,
}

impl Serialize for Summary {
    /// The figures under their names in summary.json, in its order; those that are absent are left out.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { totals, evaluations, .. } = self;
        let mut file = Entries(serializer.serialize_map(None)?);
        file.add("outcome", Some(self.outcome))?;
        file.add("reason", self.reason.as_ref())?;
        file.add("steps", Some(self.steps))?;
        file.add("starts", Some(totals.num_starts))?;
        file.add("total_steps", self.total_steps)?;
        file.add("skipped_steps", Some(totals.skipped_steps))?;
        file.add("anomalous_steps", Some(totals.anomalous_steps))?;
        file.add("epochs", Some(self.epochs))?;
        file.add("final_loss", totals.last_loss)?;
        let mut own = evaluations.clone();
        for (moment, figure, _, _, name) in kept() {
            let Some(name) = name else { continue };
            file.add(&name, *own.place(moment, figure))?;
            if name == "best_eval_loss" {
                file.add("best_eval_step", evaluations.best_step)?;
            }
        }
        file.add("tokens", Some(totals.tokens))?;
        file.add("target_tokens", Some(totals.target_tokens))?;
        file.add("tokens_per_second", totals.tokens_per_second())?;
        file.add("mfu", totals.mfu.get())?;
        file.add("peak_host_memory_bytes", totals.peak_host_memory_bytes)?;
        file.add("peak_gpu_memory_bytes", totals.peak_gpu_memory_bytes)?;
        file.add("peak_gpu_memory_reserved_bytes", totals.peak_gpu_memory_reserved_bytes)?;
        file.add("mean_gpu_utilization_percent", totals.gpu_utilization_percent.get())?;
        file.add("mean_cpu_utilization_percent", totals.cpu_utilization_percent.get())?;
        file.add("padding_share", totals.padding_share())?;
        file.add("energy_joules", totals.energy_joules)?;
        file.add("energy_kwh", self.energy_kwh)?;
        file.add("cost", self.cost)?;
        file.add("currency", self.currency.as_ref())?;
        file.add("per_million_tokens", self.per_million_tokens)?;
        file.add("telemetry_seconds", totals.telemetry_seconds)?;
        file.add("wall_seconds", Some(totals.wall_seconds))?;
        file.add("time", Some(totals.time))?;
        file.add("forward_share", totals.forward_share.get())?;
        file.add("device", Some(&self.device))?;
        file.add("precision", Some(&self.precision))?;
        file.add("trainable_parameters", Some(self.trainable_parameters))?;
        file.add("all_parameters", Some(self.all_parameters))?;
        file.add("adapter_verified", self.adapter_verified)?;
        file.add("diagnosis", Some(&self.diagnosis).filter(|findings| !findings.is_empty()))?;
        file.add("reported", Some(&self.reported).filter(|findings| !findings.is_empty()))?;
        file.add("warnings", Some(&self.warnings))?;
        file.0.end()
    }
}

struct Entries<M>(M);

impl<M: SerializeMap> Entries<M> {
    fn add(&mut self, name: &str, figure: Option<impl Serialize>) -> Result<(), M::Error> {
        figure.map_or(Ok(()), |figure| self.0.serialize_entry(name, &figure))
    }
}

/// What a million tokens took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerMillionTokens {
    /// Wall time, start-up and evaluations included.
    pub seconds: f64,
    /// Energy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_kwh: Option<f64>,
    /// Cost, in the summary's currency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_figures_that_were_measured_in_their_order() {
        let empty = serde_json::to_value(Summary { steps: 3, device: "cpu".into(), ..Summary::default() }).unwrap();
        let names: Vec<&str> = empty.as_object().unwrap().keys().map(String::as_str).collect();
        let counts = ["skipped_steps", "anomalous_steps", "epochs", "tokens", "target_tokens", "wall_seconds", "time"];
        let run = ["device", "precision", "trainable_parameters", "all_parameters", "warnings"];
        let always = [&["outcome", "steps", "starts"][..], &counts, &run].concat();
        assert_eq!((names, &empty["steps"]), (always, &3.into()));
        let evaluations = r#"{"first_loss":4,"last_loss":3,"best_loss":2,"best_step":4,"first_score":0,"last_score":1,
            "best_score":1,"last_rewards":[1,2],"best_rewards":[1,2],"first_reward":0,"last_reward":1,"best_reward":1,
            "since_best":0}"#;
        let evaluations = serde_json::from_str(evaluations).unwrap();
        let evaluated = serde_json::to_value(Summary { evaluations, ..Summary::default() }).unwrap();
        let names: Vec<&str> = evaluated.as_object().unwrap().keys().map(String::as_str).collect();
        let expected = "initial_eval_loss final_eval_loss best_eval_loss best_eval_step initial_eval_score final_eval_score \
                        best_eval_score final_eval_rewards_accuracies final_eval_rewards_margins \
                        best_eval_rewards_accuracies best_eval_rewards_margins initial_eval_reward final_eval_reward \
                        best_eval_reward";
        assert!(names.join(" ").contains(&format!("epochs {expected} tokens")), "{names:?}");
        let totals = Totals {
            tokens: 30,
            padding_tokens: 10,
            step_seconds: 2.0,
            last_loss: Some(f64::NAN),
            ..Totals::default()
        };
        let full = serde_json::to_value(Summary { totals, ..Summary::default() }).unwrap();
        assert_eq!((&full["tokens_per_second"], &full["padding_share"]), (&15.0.into(), &0.25.into()));
        assert_eq!(full.get("final_loss"), Some(&serde_json::Value::Null), "not finite");
    }
}
