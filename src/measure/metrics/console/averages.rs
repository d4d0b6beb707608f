//! Means over the steps since the last line.

use super::gpu_text;
use crate::measure::metrics::StepMetrics;
use crate::util::stats::as_f64;
use crate::util::text::{bytes, thousands};

/// Sums over steps: of losses by target tokens, of the machine's figures by seconds.
#[derive(Debug, Default)]
pub(super) struct Averages {
    loss: Mean,
    grad_norm: Mean,
    accuracy: Mean,
    margin: Mean,
    reward: Mean,
    data_wait_seconds: f64,
    mfu: Mean,
    gpu_utilization_percent: Mean,
    gpu_power_watts: Mean,
    tokens: u64,
    seconds: f64,
    steps: u64,
    skipped: u64,
}

/// A weighted mean.
#[derive(Debug, Default)]
struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    /// Adds a value; one that is not a number would hide the others.
    fn add(&mut self, value: Option<f64>, weight: f64) {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            self.sum += value * weight;
            self.weight += weight;
        }
    }

    fn get(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }
}

impl Averages {
    pub(super) fn add(&mut self, step: &StepMetrics) {
        let seconds = step.step_seconds;
        self.loss.add(Some(step.loss), as_f64(step.target_tokens));
        self.grad_norm.add(Some(step.grad_norm), 1.0);
        self.accuracy.add(step.rewards_accuracies, 1.0);
        self.margin.add(step.rewards_margins, 1.0);
        self.reward.add(step.reward, 1.0);
        self.data_wait_seconds += step.data_wait_seconds;
        self.mfu.add(step.mfu, seconds);
        self.gpu_utilization_percent.add(step.gpu_utilization_percent, seconds);
        self.gpu_power_watts.add(step.gpu_power_watts, seconds);
        self.tokens += step.tokens;
        self.seconds += seconds;
        self.steps += 1;
        self.skipped += u64::from(step.skipped);
    }

    /// The parts of a line: means, and the memory of the last step.
    pub(super) fn parts(&self, last: &StepMetrics, total_steps: u64, remaining: Option<&str>) -> Vec<String> {
        let rate = as_f64(self.tokens) / self.seconds;
        let mut parts = vec![
            format!("step {}/{total_steps}", last.step),
            format!("loss {:.4}", self.loss.get().unwrap_or(last.loss)),
            format!("lr {:.2e}", last.learning_rate),
            format!("grad {:.3}", self.grad_norm.get().unwrap_or(last.grad_norm)),
            format!("{} tok/s", thousands(if rate.is_finite() { rate } else { last.tokens_per_second })),
            format!("{:.3}s/step", self.seconds / as_f64(self.steps.max(1))),
        ];
        let preferences = [
            self.accuracy.get().map(|share| format!("accuracy {:.1}%", 100.0 * share)),
            self.margin.get().map(|margin| format!("margin {margin:.3}")),
            self.reward.get().map(|reward| format!("reward {reward:.3}")),
        ];
        parts.splice(2..2, preferences.into_iter().flatten());
        // Above a tenth of the time, `data.num_workers` is worth a look.
        if self.data_wait_seconds > 0.1 * self.seconds {
            parts.push(format!("data wait {:.3}s", self.data_wait_seconds / as_f64(self.steps.max(1))));
        }
        parts.extend(self.mfu.get().map(|mfu| format!("mfu {:.1}%", 100.0 * mfu)));
        parts.extend(gpu_text(self.gpu_utilization_percent.get(), last.gpu_memory_used_bytes));
        parts.extend(self.gpu_power_watts.get().map(|watts| format!("{watts:.0} W")));
        parts.extend(last.host_memory_bytes.map(|host| format!("host {}", bytes(host))));
        if self.skipped > 0 {
            parts.push(format!("{} skipped", self.skipped));
        }
        parts.extend(remaining.map(|text| format!("eta {text}")));
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::figures::tests::full_step;

    fn line(averages: &Averages, last: &StepMetrics) -> String {
        averages.parts(last, 10, Some("1m00s")).join("  ")
    }

    #[test]
    fn all_figures_of_a_line_are_means_of_the_steps_since_the_last_one() {
        let mut averages = Averages::default();
        let step = |loss, target_tokens, tokens, step_seconds, mfu| StepMetrics {
            step: 4,
            loss,
            grad_norm: step_seconds,
            target_tokens,
            tokens,
            step_seconds,
            mfu: Some(mfu),
            ..StepMetrics::default()
        };
        averages.add(&step(1.0, 300, 600, 1.0, 0.5));
        averages.add(&step(2.0, 100, 200, 3.0, 0.1));
        averages.add(&step(f64::NAN, 100, 200, 1.0, 0.2));
        let line = line(&averages, &step(2.0, 100, 200, 3.0, 0.1));
        // (300 * 1.0 + 100 * 2.0) / 400; 1000 tokens in 5 s; and (0.5 * 1 + 0.1 * 3 + 0.2 * 1) / 5 of the peak.
        let expected = "step 4/10  loss 1.2500  lr 0.00e0  grad 1.667  200 tok/s  1.667s/step  mfu 20.0%  eta 1m00s";
        assert_eq!(line, expected);
    }

    #[test]
    fn a_gpu_run_shows_utilization_memory_and_power() {
        let step = full_step(8);
        let mut averages = Averages::default();
        averages.add(&step);
        let line = line(&averages, &step);
        assert!(line.contains("mfu 50.0%  gpu 97% 12.0 GiB  510 W  host 3.0 GiB"), "{line}");
    }
}
