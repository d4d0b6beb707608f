//! The learning rate of every step, as `transformers` computes it.

use crate::config::{DecayType, LrScheduler, SchedulerConfig};
use crate::util::stats::as_f64;

/// The learning rate as a pure function of the step.
///
/// Step `n` (from 1) has the rate that `get_scheduler` of transformers gives its `n`-th optimizer step, which is the
/// factor of `LambdaLR` at `n - 1`. With a warm-up, the first step therefore has rate 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    config: SchedulerConfig,
    peak: f64,
    warmup_steps: u64,
    total_steps: u64,
}

impl Schedule {
    /// The schedule of a run of `total_steps` steps with the highest rate `peak`.
    ///
    /// `warmup_ratio` is a share of `total_steps`, rounded up, as `TrainingArguments.get_warmup_steps` does.
    #[must_use]
    pub fn new(config: &SchedulerConfig, peak: f64, total_steps: u64) -> Self {
        let warmup_steps = match (config.warmup_steps, config.warmup_ratio) {
            (Some(steps), _) => steps,
            (None, Some(ratio)) => ceil_to_u64(as_f64(total_steps) * ratio),
            (None, None) => 0,
        };
        Self { config: config.clone(), peak, warmup_steps, total_steps }
    }

    /// Number of steps in which the rate rises.
    #[must_use]
    pub fn warmup_steps(&self) -> u64 {
        self.warmup_steps
    }

    /// Number of steps after which the rate has reached its end.
    #[must_use]
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Learning rate of step `step`, counted from 1.
    ///
    /// Source: the `get_..._schedule` functions of transformers 5.23. `min_lr_ratio` is that of
    /// `get_cosine_with_min_lr_schedule_with_warmup` and `get_wsd_schedule`, the `lr_end` of
    /// `get_polynomial_decay_schedule_with_warmup`; the others that fall to an end take it in the same way.
    #[must_use]
    pub fn learning_rate(&self, step: u64) -> f64 {
        self.peak * self.factor(step.saturating_sub(1))
    }

    /// The factor by which `LambdaLR` multiplies the peak after `done` steps.
    fn factor(&self, done: u64) -> f64 {
        let falls = |share: f64| share * (1.0 - self.config.min_lr_ratio) + self.config.min_lr_ratio;
        let shape = self.config.lr_scheduler;
        if done < self.warmup_steps {
            let share = as_f64(done) / as_f64(self.warmup_steps);
            return if shape == LrScheduler::WarmupStableDecay { falls(share) } else { share };
        }
        let decay_steps = as_f64(self.total_steps.saturating_sub(self.warmup_steps).max(1));
        let progress = as_f64(done - self.warmup_steps) / decay_steps;
        let share = match shape {
            LrScheduler::Constant => return 1.0,
            LrScheduler::InverseSqrt => return self.inverse_sqrt(done),
            LrScheduler::Linear => as_f64(self.total_steps.saturating_sub(done)) / decay_steps,
            LrScheduler::Polynomial => (1.0 - progress).max(0.0).powf(self.config.power.unwrap_or(1.0)),
            LrScheduler::Cosine => half_cosine(progress),
            LrScheduler::CosineWithRestarts if progress >= 1.0 => 0.0,
            LrScheduler::CosineWithRestarts => {
                half_cosine(as_f64(self.config.num_cycles.unwrap_or(1)) * progress % 1.0)
            }
            LrScheduler::WarmupStableDecay => self.decay(done),
        };
        falls(share).max(0.0)
    }

    fn inverse_sqrt(&self, done: u64) -> f64 {
        let by_default = if self.warmup_steps > 0 { self.warmup_steps } else { 10_000 };
        let timescale = as_f64(self.config.timescale.unwrap_or(by_default));
        1.0 / ((as_f64(done - self.warmup_steps) + timescale) / timescale).sqrt()
    }

    /// The share of the peak in the last steps, 1 before them.
    fn decay(&self, done: u64) -> f64 {
        let num_steps = self.config.num_decay_steps.unwrap_or_else(|| self.total_steps.div_ceil(10));
        // More steps than there are after the warm-up have begun during that.
        let progress =
            (as_f64((done + num_steps).saturating_sub(self.total_steps)) / as_f64(num_steps.max(1))).min(1.0);
        match self.config.decay_type.unwrap_or_default() {
            DecayType::Cosine => half_cosine(progress),
            DecayType::Linear => 1.0 - progress,
            DecayType::OneMinusSqrt => 1.0 - progress.sqrt(),
        }
    }
}

/// From 1 down to 0.
fn half_cosine(progress: f64) -> f64 {
    0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
}

/// Number of steps of a run, from the micro-batches of an epoch.
///
/// The last step of an epoch may have fewer micro-batches than the others. As in transformers, `num_epochs` is
/// multiplied by the steps of an epoch and rounded up. `max_steps` ends a run earlier, or sets its length alone.
#[must_use]
pub fn total_steps(
    micro_batches_per_epoch: usize,
    gradient_accumulation_steps: usize,
    num_epochs: Option<f64>,
    max_steps: Option<u64>,
) -> u64 {
    let from_epochs = num_epochs.map(|epochs| {
        ceil_to_u64(as_f64(steps_per_epoch(micro_batches_per_epoch, gradient_accumulation_steps)) * epochs)
    });
    match (from_epochs, max_steps) {
        (Some(from_epochs), Some(max_steps)) => from_epochs.min(max_steps),
        (Some(steps), None) | (None, Some(steps)) => steps,
        (None, None) => steps_per_epoch(micro_batches_per_epoch, gradient_accumulation_steps),
    }
}

/// Micro-batches of an epoch whose steps are each made `num_iterations` times.
#[must_use]
pub fn repeated(micro_batches: usize, gradient_accumulation_steps: usize, num_iterations: usize) -> usize {
    let num_steps = steps_per_epoch(micro_batches, gradient_accumulation_steps);
    usize::try_from(num_steps).unwrap_or(usize::MAX).saturating_mul(gradient_accumulation_steps * num_iterations)
}

/// Number of steps of an epoch; the last step takes the remaining micro-batches.
#[must_use]
pub fn steps_per_epoch(micro_batches_per_epoch: usize, gradient_accumulation_steps: usize) -> u64 {
    micro_batches_per_epoch.div_ceil(gradient_accumulation_steps.max(1)) as u64
}

/// The value is a count of steps: not negative and far below 2^53.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn ceil_to_u64(count: f64) -> u64 {
    count.ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Learning rates of steps 1 to 7 out of 7.
    fn curve(lr_scheduler: LrScheduler, warmup_steps: u64, min_lr_ratio: f64) -> Vec<f64> {
        let config = SchedulerConfig { lr_scheduler, min_lr_ratio, ..SchedulerConfig::default() };
        curve_of(&SchedulerConfig { warmup_steps: Some(warmup_steps), ..config })
    }

    fn curve_of(config: &SchedulerConfig) -> Vec<f64> {
        let schedule = Schedule::new(config, 2e-4, 7);
        (1..=7).map(|step| schedule.learning_rate(step)).collect()
    }

    #[test]
    fn the_curves_equal_those_of_transformers() {
        // Printed by transformers 5.23 (`get_scheduler`, SGD at lr 2e-4, 7 steps, warm-up 2). The tolerance is a few units
        // in the last place: cos of the C library against Rust's.
        let cosine = [
            0.0, 1e-4, 2e-4, 0.000_180_901_699_437_494_76, 0.000_130_901_699_437_494_76, 6.909_830_056_250_527e-5,
            1.909_830_056_250_526_6e-5,
        ];
        let cosine_with_minimum = [
            0.0, 1e-4, 2e-4, 0.000_182_811_529_493_745_27, 0.000_137_811_529_493_745_26, 8.218_847_050_625_476e-5,
            3.718_847_050_625_475e-5,
        ];
        let linear = [0.0, 1e-4, 2e-4, 1.6e-4, 1.2e-4, 8e-5, 4e-5];
        let constant = [0.0, 1e-4, 2e-4, 2e-4, 2e-4, 2e-4, 2e-4];
        for (shape, min_lr_ratio, reference) in [
            (LrScheduler::Cosine, 0.0, cosine),
            (LrScheduler::Cosine, 0.1, cosine_with_minimum),
            (LrScheduler::Linear, 0.0, linear),
            (LrScheduler::Constant, 0.0, constant),
        ] {
            for (ours, expected) in curve(shape, 2, min_lr_ratio).into_iter().zip(reference) {
                assert!((ours - expected).abs() <= 1e-18, "{shape:?}: {ours:e} against {expected:e}");
            }
        }
        // Without warm-up, the same five steps of decay.
        let schedule = Schedule::new(&SchedulerConfig::default(), 2e-4, 5);
        assert!((1..=5).zip(&cosine[2..]).all(|(step, rate)| (schedule.learning_rate(step) - rate).abs() <= 1e-18));
    }

    #[test]
    fn the_shapes_with_settings_of_their_own_equal_those_of_transformers() {
        // Printed as above; `lr_end` of the polynomial is 2e-5.
        let of = |lr_scheduler| SchedulerConfig { lr_scheduler, warmup_steps: Some(2), ..SchedulerConfig::default() };
        let restarts = SchedulerConfig { num_cycles: Some(2), ..of(LrScheduler::CosineWithRestarts) };
        let polynomial = SchedulerConfig { power: Some(2.0), min_lr_ratio: 0.1, ..of(LrScheduler::Polynomial) };
        let timescale = SchedulerConfig { timescale: Some(3), ..of(LrScheduler::InverseSqrt) };
        let stable = SchedulerConfig { num_decay_steps: Some(3), ..of(LrScheduler::WarmupStableDecay) };
        let with_minimum = SchedulerConfig { min_lr_ratio: 0.1, ..stable.clone() };
        let falling = |decay_type| SchedulerConfig { decay_type: Some(decay_type), ..stable.clone() };
        let longer = SchedulerConfig { num_decay_steps: Some(6), ..stable.clone() };
        for (config, expected) in [
            (
                restarts,
                [
                    0.0, 1e-4, 2e-4, 0.000_130_901_699_437_494_76, 1.909_830_056_250_526_6e-5,
                    0.000_180_901_699_437_494_76, 6.909_830_056_250_524e-5,
                ],
            ),
            (polynomial, [0.0, 1e-4, 2e-4, 1.352e-4, 8.48e-5, 4.88e-5, 2.72e-5]),
            (
                of(LrScheduler::InverseSqrt),
                [
                    0.0, 1e-4, 2e-4, 0.000_163_299_316_185_545_24, 0.000_141_421_356_237_309_5,
                    0.000_126_491_106_406_735_18, 0.000_115_470_053_837_925_17,
                ],
            ),
            (
                timescale,
                [
                    0.0, 1e-4, 2e-4, 0.000_173_205_080_756_887_76, 0.000_154_919_333_848_296_7,
                    0.000_141_421_356_237_309_5, 0.000_130_930_734_141_595_4,
                ],
            ),
            (
                longer,
                [
                    0.0, 1e-4, 0.000_186_602_540_378_443_88, 0.000_150_000_000_000_000_01, 1e-4,
                    5.000_000_000_000_002e-5, 1.339_745_962_155_613e-5,
                ],
            ),
            (with_minimum, [2e-5, 1.1e-4, 2e-4, 2e-4, 2e-4, 1.55e-4, 6.5e-5]),
            (falling(DecayType::Linear), [0.0, 1e-4, 2e-4, 2e-4, 2e-4, 4e-4 / 3.0, 2e-4 / 3.0]),
            (
                falling(DecayType::OneMinusSqrt),
                [0.0, 1e-4, 2e-4, 2e-4, 2e-4, 8.452_994_616_207_485e-5, 3.670_068_381_445_479e-5],
            ),
        ] {
            for (ours, expected) in curve_of(&config).into_iter().zip(expected) {
                assert!((ours - expected).abs() <= 1e-18, "{config:?}: {ours:e} against {expected:e}");
            }
        }
    }

    #[test]
    fn a_warmup_as_long_as_the_run_never_decays() {
        let curve = curve(LrScheduler::Cosine, 7, 0.0);
        assert!((0..7).zip(curve).all(|(done, rate)| (rate - 2e-4 * f64::from(done) / 7.0).abs() <= 1e-18));
    }

    #[test]
    fn warmup_ratio_is_rounded_up() {
        let config = SchedulerConfig { warmup_ratio: Some(0.03), ..SchedulerConfig::default() };
        assert_eq!(Schedule::new(&config, 1.0, 100).warmup_steps(), 3);
        assert_eq!(Schedule::new(&config, 1.0, 101).warmup_steps(), 4);
        assert_eq!(Schedule::new(&config, 1.0, 1).warmup_steps(), 1);
    }

    #[test]
    fn the_last_step_of_an_epoch_takes_what_is_left() {
        assert_eq!(steps_per_epoch(10, 4), 3);
        assert_eq!(steps_per_epoch(8, 4), 2);
        assert_eq!(total_steps(10, 4, Some(1.5), None), 5);
        assert_eq!(total_steps(10, 4, Some(0.1), None), 1);
        assert_eq!(total_steps(10, 4, Some(3.0), Some(4)), 4);
        assert_eq!(total_steps(10, 4, None, Some(100)), 100);
    }
}
