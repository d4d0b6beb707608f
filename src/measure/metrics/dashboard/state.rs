//! What the dashboard knows of the run.

use serde_json::Value;

use super::super::pace::Pace;
use super::super::{EvalMetrics, Sample, StepMetrics, on_a_line};

/// Points of the loss that are kept; those of a longer run are thinned.
const MAX_POINTS: usize = 1024;
/// Recent values that the small curves show.
const RECENT: usize = 256;
/// Steps over which the shares of the time are taken.
const SHARE_STEPS: usize = 50;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Question {
    #[default]
    None,
    Stop,
    Stopping,
}

#[derive(Clone, Debug, Default)]
pub(super) struct DashboardState {
    pub(super) label: String,
    pub(super) first_step: u64,
    pub(super) total_steps: u64,
    pub(super) pace: Pace,
    pub(super) last: Option<StepMetrics>,
    pub(super) last_eval: Option<EvalMetrics>,
    /// Step and loss of the best evaluation.
    pub(super) best_eval: Option<(u64, f64)>,
    /// Step, prompt and text of the last sample.
    pub(super) sample: Option<(u64, String)>,
    pub(super) losses: Curve,
    pub(super) eval_losses: Curve,
    pub(super) rates: Vec<f64>,
    pub(super) utilizations: Vec<f64>,
    pub(super) memories: Vec<f64>,
    /// Parts of the time of the last steps.
    pub(super) times: Vec<[f64; NUM_PARTS]>,
    pub(super) work: Option<String>,
    pub(super) num_warnings: usize,
    pub(super) last_warning: Option<String>,
    /// What the diagnosis has found since the last warning.
    pub(super) finding: Option<String>,
    pub(super) question: Question,
    pub(super) is_changed: bool,
    pub(super) is_closed: bool,
}

pub(super) const NUM_PARTS: usize = 6;
/// The parts that a step's time is divided into.
pub(super) const PARTS: [&str; NUM_PARTS] =
    ["data", "forward+backward", "optimizer", "evaluation", "checkpoint", "other"];

/// Points over the steps. Many points are thinned evenly: neighbours become their mean.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Curve {
    pub(super) points: Vec<(f64, f64)>,
    per_point: usize,
    waiting: Vec<(f64, f64)>,
}

impl Curve {
    pub(super) fn push(&mut self, x: f64, y: f64) {
        self.per_point = self.per_point.max(1);
        self.waiting.push((x, y));
        if self.waiting.len() < self.per_point {
            return;
        }
        self.points.push(mean(&std::mem::take(&mut self.waiting)));
        if self.points.len() > MAX_POINTS {
            self.points = self.points.chunks(2).map(mean).collect();
            self.per_point *= 2;
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a few points")]
fn mean(points: &[(f64, f64)]) -> (f64, f64) {
    let (x, y) = points.iter().fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
    (x / points.len() as f64, y / points.len() as f64)
}

impl DashboardState {
    pub(super) fn new(label: &str, [first_step, total_steps]: [u64; 2]) -> Self {
        let pace = Pace::new(first_step, total_steps, None);
        Self { label: label.to_owned(), first_step, total_steps, pace, is_changed: true, ..Self::default() }
    }

    /// Takes the losses of an earlier start from lines of its metrics.jsonl.
    #[expect(clippy::cast_precision_loss, reason = "drawn")]
    pub(super) fn earlier(&mut self, metrics: &str) {
        for line in metrics.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            let Some(step) = line["step"].as_u64() else { continue };
            line["loss"].as_f64().into_iter().for_each(|loss| self.losses.push(step as f64, loss));
            line["eval_loss"].as_f64().into_iter().for_each(|loss| self.evaluated(step, loss));
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "drawn")]
    pub(super) fn step(&mut self, step: &StepMetrics) {
        self.work = None;
        if step.loss.is_finite() {
            self.losses.push(step.step as f64, step.loss);
        }
        push(&mut self.rates, Some(step.tokens_per_second));
        push(&mut self.utilizations, step.gpu_utilization_percent.or(step.cpu_utilization_percent));
        push(&mut self.memories, step.gpu_memory_used_bytes.or(step.host_memory_bytes).map(|bytes| bytes as f64));
        let mut parts = [
            step.data_wait_seconds,
            step.forward_backward_seconds,
            step.optimizer_seconds,
            step.evaluation_seconds.unwrap_or_default(),
            step.checkpoint_seconds.unwrap_or_default(),
            0.0,
        ];
        let whole = step.wall_seconds.unwrap_or(step.step_seconds);
        parts[NUM_PARTS - 1] = (whole - parts.iter().sum::<f64>()).max(0.0);
        self.times.push(parts);
        if self.times.len() > SHARE_STEPS {
            self.times.remove(0);
        }
        self.last = Some(step.clone());
    }

    pub(super) fn eval(&mut self, eval: &EvalMetrics) {
        self.work = None;
        if let Some(loss) = eval.eval_loss.filter(|loss| loss.is_finite()) {
            self.evaluated(eval.step, loss);
        }
        self.last_eval = Some(eval.clone());
    }

    #[expect(clippy::cast_precision_loss, reason = "drawn")]
    fn evaluated(&mut self, step: u64, loss: f64) {
        self.eval_losses.push(step as f64, loss);
        if self.best_eval.is_none_or(|(_, best)| loss < best) {
            self.best_eval = Some((step, loss));
        }
    }

    /// The sample of the first prompt of an evaluation.
    pub(super) fn sample(&mut self, sample: &Sample) {
        self.sample = Some((sample.step, on_a_line(sample)));
    }

    pub(super) fn warning(&mut self, text: &str) {
        self.num_warnings += 1;
        self.last_warning = text.lines().next().map(|line| line.trim_end_matches(':').to_owned());
        self.finding = None;
    }

    pub(super) fn done(&self) -> u64 {
        self.last.as_ref().map_or(self.first_step, |step| step.step)
    }

    pub(super) fn remaining_seconds(&self) -> Option<f64> {
        self.pace.remaining_seconds(self.done())
    }

    /// Shares of the time of the last steps, in percent.
    pub(super) fn shares(&self) -> Option<[f64; NUM_PARTS]> {
        let mut sums = [0.0; NUM_PARTS];
        for times in &self.times {
            for (sum, time) in sums.iter_mut().zip(times) {
                *sum += time;
            }
        }
        let whole: f64 = sums.iter().sum();
        (whole > 0.0).then(|| sums.map(|sum| 100.0 * sum / whole))
    }
}

fn push(values: &mut Vec<f64>, value: Option<f64>) {
    values.extend(value.filter(|value| value.is_finite()));
    if values.len() > RECENT {
        values.remove(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_is_thinned_and_keeps_its_mean() {
        let mut curve = Curve::default();
        for step in 0..100_000_u32 {
            curve.push(f64::from(step), f64::from(step % 10));
        }
        assert!((500..=MAX_POINTS).contains(&curve.points.len()), "{}", curve.points.len());
        assert!(curve.points.is_sorted_by(|a, b| a.0 < b.0));
        let mean = curve.points.iter().map(|point| point.1).sum::<f64>() / curve.points.len() as f64;
        assert!((mean - 4.5).abs() < 0.05, "{mean}");
    }

    #[test]
    fn a_resumed_run_has_the_curve_from_its_first_step_on() {
        let mut state = DashboardState::new("runs/a", [2, 9]);
        state.earlier("{\"step\":0,\"eval_loss\":3.0}\n{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"loss\":2.25}\n{\"st");
        state.step(&StepMetrics { step: 3, loss: 2.0, ..StepMetrics::default() });
        assert_eq!(state.losses.points, [(1.0, 2.5), (2.0, 2.25), (3.0, 2.0)]);
        assert_eq!((state.eval_losses.points.len(), state.best_eval, state.done()), (1, Some((0, 3.0)), 3));
        state.warning("rows.csv: 2 of 300 rows are odd:\n  line 3: empty");
        assert_eq!(state.last_warning.as_deref(), Some("rows.csv: 2 of 300 rows are odd"));
    }

    #[test]
    fn the_shares_of_the_time_add_up() {
        let mut state = DashboardState::new("run", [0, 10]);
        state.step(&StepMetrics {
            step: 1,
            step_seconds: 2.0,
            data_wait_seconds: 0.5,
            forward_backward_seconds: 1.0,
            optimizer_seconds: 0.25,
            wall_seconds: Some(4.0),
            evaluation_seconds: Some(2.0),
            ..StepMetrics::default()
        });
        assert_eq!(state.shares().unwrap(), [12.5, 25.0, 6.25, 50.0, 0.0, 6.25]);
    }
}
