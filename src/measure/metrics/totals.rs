//! Sums, means and peaks over a run, and results of its evaluations; checkpoints carry them from start to start.

use std::ops::Add;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::StepMetrics;
use crate::measure::figures::evaluation::{EvalFigure, EvalMetrics, Moment, kept};
use crate::util::stats::{MeanOverTime, as_f64};

/// Figures of all starts of a run. The steps of a killed process after its last checkpoint are not included: they are
/// repeated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Number of starts of the process.
    pub num_starts: u64,
    /// Number of tokens, without padding.
    pub tokens: u64,
    /// Number of tokens that carried loss.
    pub target_tokens: u64,
    /// Number of padding tokens.
    pub padding_tokens: u64,
    /// Steps without an update, because the loss or the gradient was not finite.
    pub skipped_steps: u64,
    /// Steps that the watchdog found anomalous.
    pub anomalous_steps: u64,
    /// Loss of the last step with target tokens, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_loss: Option<f64>,
    /// Time of the steps, without the time between them.
    pub step_seconds: f64,
    /// Model FLOPs per second over the device's peak, from 0 to 1; each start has its own device.
    pub mfu: MeanOverTime,
    /// GPU utilization, in percent.
    pub gpu_utilization_percent: MeanOverTime,
    /// Share of all processor threads that the process used, in percent.
    pub cpu_utilization_percent: MeanOverTime,
    /// Peak memory of the process in RAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_host_memory_bytes: Option<u64>,
    /// Peak memory in use on the GPU, by all processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_gpu_memory_bytes: Option<u64>,
    /// The highest measured memory of the backend's pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_gpu_memory_reserved_bytes: Option<u64>,
    /// Wall time since the start of each process.
    pub wall_seconds: f64,
    /// The wall time by part.
    pub time: TimeSpent,
    /// Share of the time of forward and backward that was forward, from 0 to 1.
    pub forward_share: MeanOverTime,
    /// Energy of the GPU, or of the processor's packages in starts without a GPU, where it is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_joules: Option<f64>,
    /// Processor time spent on sampling the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub telemetry_seconds: Option<f64>,
}

impl Totals {
    /// Adds a step. What is not measured by step is left as it is.
    pub(crate) fn add(&mut self, line: &StepMetrics) {
        if line.target_tokens > 0 {
            self.last_loss = Some(line.loss);
        }
        self.tokens += line.tokens;
        self.target_tokens += line.target_tokens;
        self.padding_tokens += line.padding_tokens.unwrap_or_default();
        self.skipped_steps += u64::from(line.skipped);
        self.anomalous_steps += u64::from(line.anomaly.is_some());
        self.step_seconds += line.step_seconds;
        self.mfu.add(line.mfu, line.step_seconds);
        self.gpu_utilization_percent.add(line.gpu_utilization_percent, line.step_seconds);
        self.cpu_utilization_percent.add(line.cpu_utilization_percent, line.step_seconds);
        // The kernel's own peak may lag some pages behind a sample.
        self.peak_host_memory_bytes = self.peak_host_memory_bytes.max(line.host_memory_bytes);
    }

    /// Tokens over the time of the steps; `None` without steps.
    #[must_use]
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.step_seconds > 0.0).then(|| as_f64(self.tokens) / self.step_seconds)
    }

    /// Share of the micro-batches' tokens that was padding, from 0 to 1; `None` without tokens.
    #[must_use]
    pub fn padding_share(&self) -> Option<f64> {
        let all = self.tokens + self.padding_tokens;
        (all > 0).then(|| as_f64(self.padding_tokens) / as_f64(all))
    }
}

/// Where wall time went, in seconds. The parts do not overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimeSpent {
    /// From the start of each process to its first step: reading data, loading weights, opening the device.
    pub startup_seconds: f64,
    /// Waiting for data.
    pub data_wait_seconds: f64,
    /// Writing and judging answers to train on.
    pub rollout_seconds: f64,
    /// Laying out micro-batches and handing them to the device. A GPU is not waited for after every part: the sum of
    /// this and the next two parts is measured, and divided as in the steps that did wait.
    pub host_to_device_seconds: f64,
    /// Forward and backward passes.
    pub forward_backward_seconds: f64,
    /// Clipping and updates.
    pub optimizer_seconds: f64,
    /// Evaluations, and the samples drawn at them.
    pub evaluation_seconds: f64,
    /// Writing checkpoints and the adapter.
    pub checkpoint_seconds: f64,
    /// Writing figures.
    pub logging_seconds: f64,
    /// The rest: bookkeeping, measuring the device's peak, ending the run.
    pub other_seconds: f64,
}

impl Add for TimeSpent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            startup_seconds: self.startup_seconds + other.startup_seconds,
            data_wait_seconds: self.data_wait_seconds + other.data_wait_seconds,
            rollout_seconds: self.rollout_seconds + other.rollout_seconds,
            host_to_device_seconds: self.host_to_device_seconds + other.host_to_device_seconds,
            forward_backward_seconds: self.forward_backward_seconds + other.forward_backward_seconds,
            optimizer_seconds: self.optimizer_seconds + other.optimizer_seconds,
            evaluation_seconds: self.evaluation_seconds + other.evaluation_seconds,
            checkpoint_seconds: self.checkpoint_seconds + other.checkpoint_seconds,
            logging_seconds: self.logging_seconds + other.logging_seconds,
            other_seconds: self.other_seconds + other.other_seconds,
        }
    }
}

impl TimeSpent {
    /// Adds the time that is missing in the parts, compared with `wall_seconds`, to `other_seconds`.
    #[must_use]
    pub fn within(mut self, wall_seconds: f64) -> Self {
        self.other_seconds += (wall_seconds - self.total_seconds()).max(0.0);
        self
    }

    /// Sum of the parts.
    #[must_use]
    pub fn total_seconds(&self) -> f64 {
        self.parts().into_iter().map(|(_, seconds)| seconds).sum()
    }

    /// The parts with their names for people.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, f64); 10] {
        [
            ("startup", self.startup_seconds),
            ("data", self.data_wait_seconds),
            ("rollouts", self.rollout_seconds),
            ("host to device", self.host_to_device_seconds),
            ("forward+backward", self.forward_backward_seconds),
            ("optimizer", self.optimizer_seconds),
            ("evaluation", self.evaluation_seconds),
            ("checkpoint", self.checkpoint_seconds),
            ("logging", self.logging_seconds),
            ("other", self.other_seconds),
        ]
    }
}

/// Results of the evaluations so far, and the count for early stopping.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluations {
    /// Step after which the last evaluation ran.
    pub last_step: Option<u64>,
    /// Figures before the first step.
    pub first: EvalMetrics,
    /// Those of the last evaluation.
    pub last: EvalMetrics,
    /// Those of the evaluation before it.
    pub previous: EvalMetrics,
    /// Those of the best evaluation.
    pub best: EvalMetrics,
    /// Step of the best evaluation.
    pub best_step: Option<u64>,
    /// Number of evaluations since then.
    pub since_best: usize,
}

impl Evaluations {
    /// One of the figures. Those that their rows do not keep are lost where a run is resumed.
    pub(crate) fn place(&mut self, moment: Moment, figure: &EvalFigure) -> &mut Option<f64> {
        (figure.place)(match moment {
            Moment::First => &mut self.first,
            Moment::Last => &mut self.last,
            Moment::Previous => &mut self.previous,
            Moment::Best => &mut self.best,
        })
    }
}

impl Serialize for Evaluations {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut own = self.clone();
        let mut file = Map::from_iter([("last_step".to_owned(), json!(self.last_step))]);
        for (moment, figure, name, index, _) in kept() {
            let value = json!(own.place(moment, figure));
            if let Value::Array(list) = file.entry(&name).or_insert(json!([]))
                && index.is_some()
            {
                list.push(value);
            } else {
                file.insert(name.clone(), value);
            }
            if name == "best_loss" {
                file.insert("best_step".to_owned(), json!(self.best_step));
            }
        }
        file.insert("since_best".to_owned(), json!(self.since_best));
        file.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Evaluations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Stored {
            last_step: Option<u64>,
            best_step: Option<u64>,
            since_best: usize,
            #[serde(flatten)]
            figures: Map<String, Value>,
        }
        let Stored { last_step, best_step, since_best, figures } = Stored::deserialize(deserializer)?;
        let mut evaluations = Self { last_step, best_step, since_best, ..Self::default() };
        for (moment, figure, name, index, _) in kept() {
            let stored = figures.get(&name).and_then(|stored| index.map_or(Some(stored), |index| stored.get(index)));
            *evaluations.place(moment, figure) = stored.and_then(Value::as_f64);
        }
        Ok(evaluations)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BestBy;
    use crate::schema::Choice;

    #[test]
    fn results_of_evaluations_are_in_a_checkpoint_under_the_names_that_they_have_always_had() {
        let text = r#"{"last_step":8,"first_loss":4.5,"last_loss":3.5,"previous_loss":3.75,"best_loss":3.25,"best_step":4,
            "first_score":0.1,"last_score":0.2,"best_score":0.3,"last_rewards":[0.9,0.25],"best_rewards":[null,0.5],
            "first_reward":null,"last_reward":-1.0,"best_reward":1.0,"since_best":1}"#;
        let evaluations: Evaluations = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&evaluations).unwrap(), text.replace(char::is_whitespace, ""));
        assert_eq!((evaluations.best.eval_rewards_margins, evaluations.last.eval_reward), (Some(0.5), Some(-1.0)));
        // Earlier ones had no rewards.
        let text = r#"{"last_step":null,"first_loss":4.5,"best_step":null,"since_best":0}"#;
        assert_eq!(serde_json::from_str::<Evaluations>(text).unwrap().first.eval_loss, Some(4.5));
        assert!(BestBy::NAMES.iter().all(|(name, _)| EvalFigure::deciding(name).is_some()));
    }

    #[test]
    fn the_parts_of_the_time_sum_to_the_wall_time() {
        let time = TimeSpent { startup_seconds: 1.5, forward_backward_seconds: 6.0, ..TimeSpent::default() };
        let time = TimeSpent { other_seconds: 0.5, ..time }.within(10.0);
        assert_eq!((time.other_seconds, time.total_seconds()), (2.5, 10.0));
        assert_eq!(time.within(10.0), time, "asked twice, the same");
    }

    #[test]
    fn steps_of_two_starts_are_sums_means_over_time_and_the_higher_peak() {
        let step = |peak_flops: f64, gpu_utilization_percent, host| StepMetrics {
            loss: 2.0,
            tokens: 100,
            target_tokens: 50,
            padding_tokens: Some(20),
            step_seconds: 1.0,
            mfu: Some(1e9 / peak_flops),
            gpu_utilization_percent,
            host_memory_bytes: Some(host),
            ..StepMetrics::default()
        };
        let mut first = Totals::default();
        first.add(&step(10e9, Some(80.0), 700));
        let mut all: Totals = serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap();
        // The second start runs on a device with half the peak, which has no GPU.
        all.add(&step(5e9, None, 100));
        all.add(&StepMetrics { loss: f64::NAN, target_tokens: 0, skipped: true, ..step(f64::NAN, None, 100) });
        assert_eq!((all.tokens, all.target_tokens, all.padding_tokens), (300, 100, 60));
        assert_eq!((all.step_seconds, all.skipped_steps, all.last_loss), (3.0, 1, Some(2.0)));
        assert!((all.mfu.get().unwrap() - 0.15).abs() < 1e-12, "half the time at 0.2, half at 0.1");
        // Utilization is the mean over the steps that have it.
        assert_eq!((all.gpu_utilization_percent.get(), all.cpu_utilization_percent.get()), (Some(80.0), None));
        assert_eq!(all.peak_host_memory_bytes, Some(700));
    }
}
