//! What a bench measured, for programs and for people.

use serde::Serialize;

use crate::config::GradientCheckpointing;
use crate::ops::profile::ProfileRow;
use crate::util::stats::{as_f64, median, quantile};
use crate::util::text::{Mark, aligned, bytes, thousands, with_commas};

/// The difference in speed that a bench should show.
const SHOWN_PERCENT: f64 = 5.0;

/// How far the times of steps lie apart, in percent of their median.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Scatter {
    /// Half the interquartile range of the steps.
    pub(super) spread_percent: f64,
    /// The smallest difference to another bench of as many steps that is not noise.
    pub(super) detectable_percent: f64,
}

/// The last line of stdout.
#[derive(Clone, Debug, Serialize)]
pub(super) struct BenchReport {
    /// Tokens of a step over its median time.
    pub(super) tokens_per_second: f64,
    /// Median time of a step.
    pub(super) step_seconds: f64,
    #[serde(flatten)]
    pub(super) scatter: Option<Scatter>,
    /// Time from the start of the process to the end of the first step.
    pub(super) first_step_seconds: f64,
    /// `gflops / gemm_peak_gflops`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mfu: Option<f64>,
    /// Model FLOPs of a step over its median time, in 10^9 a second.
    pub(super) gflops: f64,
    /// The fastest matrix product measured on the device, in 10^9 a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) gemm_peak_gflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peak_host_memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peak_gpu_memory_bytes: Option<u64>,
    /// The peak that `plan` estimates, of the device that computes.
    pub(super) planned_peak_bytes: u64,
    pub(super) device: String,
    pub(super) precision: &'static str,
    pub(super) gradient_checkpointing: GradientCheckpointing,
    pub(super) measured_steps: usize,
    pub(super) tokens_per_step: u64,
    pub(super) trainable_parameters: usize,
    pub(super) all_parameters: usize,
    /// Loss of the last step: about ln(`vocab_size`) for random weights. A value that is not finite would be a bug.
    pub(super) loss: f64,
    /// Operations of a step, the longest first; `seconds` are per step.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) profile: Vec<ProfileRow>,
}

impl Scatter {
    /// `None` where there are too few steps. Chance makes the detectable difference in one of twenty pairs of benches: it is
    /// 1.96 times the standard error of the difference of two medians, or the drift from the first half of the steps to the
    /// second if that is more.
    pub(super) fn of(step_seconds: &[f64]) -> Option<Self> {
        /// That standard error times 1.96, for normally distributed numbers, over the range of their middle half and the
        /// root of their count.
        const FACTOR: f64 = 1.96 * 1.2533 * std::f64::consts::SQRT_2 / 1.349;
        const MIN_NUM_STEPS: usize = 5;
        let (first, second) = step_seconds.split_at(step_seconds.len() / 2);
        let drift = (median(second)? - median(first)?).abs();
        let range = quantile(step_seconds, 0.75)? - quantile(step_seconds, 0.25)?;
        let chance = FACTOR * range / as_f64(step_seconds.len()).sqrt();
        let percent = 100.0 / median(step_seconds)?;
        (step_seconds.len() >= MIN_NUM_STEPS)
            .then(|| Self { spread_percent: percent * range / 2.0, detectable_percent: percent * chance.max(drift) })
    }
}

impl BenchReport {
    /// The figures for people.
    pub(super) fn text(&self) -> String {
        let spread = self.scatter.map(|scatter| format!(" ± {:.1} %", scatter.spread_percent)).unwrap_or_default();
        let (steps, tokens) = (self.measured_steps, with_commas(self.tokens_per_step));
        let rate = format!("{} GFLOP/s", thousands(self.gflops));
        let peak = self.peak_gpu_memory_bytes.or(self.peak_host_memory_bytes);
        let rows = [
            ("step", format!("{:.1} ms{spread}, the median of {steps} of {tokens} tokens", self.step_seconds * 1e3)),
            ("speed", format!("{} tokens/s{spread}", thousands(self.tokens_per_second))),
            (
                "MFU",
                match self.mfu.zip(self.gemm_peak_gflops) {
                    Some((mfu, peak)) => format!("{:.1} %: {rate} of {}", 100.0 * mfu, thousands(peak)),
                    None => format!("not known: {rate}"),
                },
            ),
            (
                "memory",
                match peak {
                    Some(peak) => format!("{} at the peak, {} planned", bytes(peak), bytes(self.planned_peak_bytes)),
                    None => format!("{} planned", bytes(self.planned_peak_bytes)),
                },
            ),
            ("device", format!("{}, {}", self.device, self.precision)),
        ];
        let lines: String = rows.iter().map(|(name, text)| format!("{name:<8}{text}\n")).collect();
        lines + &self.verdict()
    }

    /// What the figures can be used for.
    fn verdict(&self) -> String {
        let longer = |times: f64| {
            let seconds = (times * as_f64(self.measured_steps) * self.step_seconds).ceil().max(10.0);
            format!("--seconds {seconds}")
        };
        match self.scatter.map(|scatter| scatter.detectable_percent) {
            None => format!("{} too few steps to say how steady they are: --steps 20", Mark::Open),
            Some(percent) if percent <= SHOWN_PERCENT => {
                format!("{} steady: a change of {percent:.1} % or more would show", Mark::Good)
            }
            Some(percent) => format!(
                "{} too noisy: only a change of {percent:.0} % or more would show\n  close other programs, or measure longer: {}",
                Mark::Note,
                longer((percent / SHOWN_PERCENT).powi(2))
            ),
        }
    }
}

/// The rows as a table. The last row is the sum, relative to a step that was not profiled.
pub(super) fn profile_table(rows: &[ProfileRow], step_seconds: f64) -> String {
    let rate = |amount: f64, seconds: f64| {
        if amount > 0.0 { format!("{:.0}", amount / seconds.max(1e-9) * 1e-9) } else { String::new() }
    };
    let time = |seconds: f64| [format!("{:.1}", seconds * 1e3), format!("{:.1} %", 100.0 * seconds / step_seconds)];
    let mut table = vec![["operation", "shape", "calls", "ms", "share", "GFLOP/s", "GB/s"].map(str::to_owned).to_vec()];
    for ProfileRow { operation, shape, calls, seconds, flops, bytes } in rows {
        let [milliseconds, share] = time(*seconds);
        let (flops, bytes) = (rate(*flops, *seconds), rate(*bytes, *seconds));
        table.push(vec![(*operation).to_string(), shape.clone(), calls.to_string(), milliseconds, share, flops, bytes]);
    }
    let [milliseconds, share] = time(rows.iter().map(|row| row.seconds).sum());
    table.push(vec!["all of these".to_owned(), String::new(), String::new(), milliseconds, share]);
    aligned(&table).join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steady_steps_show_a_small_difference_and_scattered_or_drifting_ones_only_a_large_one() {
        let scatter = |seconds: fn(u32) -> f64| Scatter::of(&(0..40).map(seconds).collect::<Vec<_>>()).unwrap();
        let steady = scatter(|step| 1.0 + 0.02 * f64::from(step % 2));
        assert!(
            (steady.spread_percent - 0.99).abs() < 0.01 && (0.5..1.5).contains(&steady.detectable_percent),
            "{steady:?}"
        );
        let scattered = scatter(|step| 1.0 + 0.3 * f64::from(step % 2)).detectable_percent;
        let drifting = scatter(|step| 1.0 + 0.3 * f64::from(step / 20)).detectable_percent;
        assert!(scattered > SHOWN_PERCENT && drifting > 20.0, "{scattered} {drifting}");
        assert!(Scatter::of(&[1.0; 4]).is_none());
    }
}
