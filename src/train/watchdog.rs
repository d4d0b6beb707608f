//! The watchdog: detects from its figures alone that a run goes wrong.
//!
//! It warns at once and asks to stop only after a set patience. So a run left alone overnight does not waste hours, and
//! one odd batch does not end it.

use serde::{Deserialize, Serialize};

use super::step::SkipReason;
use crate::config::WatchdogConfig;

/// Number of losses after which a spike can be distinguished from noise.
const WARM_UP_LOSSES: u64 = 20;
/// Weight of a new loss in the running mean and variance: the last 50 losses count most.
const LOSS_WEIGHT: f64 = 0.02;
/// Number of first losses that determine the loss at the start: the first row alone may be short or odd.
const START_LOSSES: usize = 8;
/// Number of these that may be unusually low. With an evaluation before the first step, all of them count.
const ODD_START_LOSSES: usize = 2;
/// Losses have diverged if they stay this many nats above the start, which is 7 times its perplexity. A model ruined by
/// a high learning rate settles not far above that, at the loss of the most frequent tokens.
const DIVERGED_NATS: f64 = 2.0;
/// Weight of a new loss in the mean of the last few losses, which is compared with the start.
const RECENT_WEIGHT: f64 = 0.2;
/// Least standard deviation, relative to the mean: the last digits of an almost constant loss are no spikes.
const LEAST_DEVIATION: f64 = 0.01;
/// Number of last steps for which the watchdog remembers whether they were skipped.
const HISTORY_STEPS: u32 = u64::BITS;
/// Number of skipped steps among them that counts as trouble.
const MIN_SKIPS_OF_TROUBLE: u32 = 2;
/// Number of steps between two checks of the adapters.
pub const LOOK_STEPS: u64 = 10;

/// What is wrong with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anomaly {
    /// There was no update.
    SkippedStep,
    /// The loss is far above what it was.
    LossSpike,
    /// Every gradient is exactly zero.
    ZeroGradient,
    /// Updates were made, but the adapters did not change.
    UnmovedAdapters,
}

impl Anomaly {
    /// Its name in metrics.jsonl.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SkippedStep => "skipped_step",
            Self::LossSpike => "loss_spike",
            Self::ZeroGradient => "zero_gradient",
            Self::UnmovedAdapters => "unmoved_adapters",
        }
    }
}

/// The figures of a step that the watchdog checks.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    /// Mean loss of the target tokens, in nats.
    pub loss: f64,
    /// Global norm of the gradient.
    pub grad_norm: f64,
    /// Why there was no update, if it was skipped.
    pub skipped: Option<SkipReason>,
    /// The step was skipped because `f16`'s loss scale was too high; this is how the right scale is found.
    pub is_scale_search: bool,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Digest of some of the adapters' numbers after the step; needed only every [`LOOK_STEPS`] steps.
    pub adapters_digest: Option<u64>,
}

/// The watchdog's result for a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// What is wrong with the step.
    pub anomaly: Option<Anomaly>,
    /// Warning for the user, at the first of several such steps; a skipped step has its own warning.
    pub warning: Option<String>,
    /// Why training should stop, if patience is over.
    pub stop: Option<String>,
}

/// The watchdog's state. It is part of a checkpoint, so that a resumed run is judged like an uninterrupted one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watchdog {
    num_losses: u64,
    first_losses: [f64; START_LOSSES],
    /// The loss of the evaluation before the first step, or a low one of the first losses, whichever is higher. A high one
    /// of the first losses could already come from a run that has diverged.
    start_loss: Option<f64>,
    /// Running mean and variance of the losses.
    mean: f64,
    variance: f64,
    /// Mean of the last few losses.
    recent: f64,
    /// Steps in a row, each: skipped, with a loss spike, with a gradient of zero.
    skipped_steps: u64,
    spike_steps: u64,
    zero_gradient_steps: u64,
    /// Which of the last [`HISTORY_STEPS`] steps were skipped, except by the search for a loss scale; the lowest bit is
    /// the last step. Steps without target tokens are not included.
    skipped_lately: u64,
    /// Updates in a row that did not change the adapters.
    unmoved_updates: u64,
    updates_since_look: u64,
    adapters_digest: Option<u64>,
}

impl Watchdog {
    /// Records the loss of the evaluation before the first step.
    pub fn start_at(&mut self, eval_loss: f64) {
        if eval_loss.is_finite() && self.num_losses == 0 {
            self.start_loss = Some(eval_loss);
        }
    }

    /// Forgets past trouble, but not what is normal: after a stop, a resumed run should show whether it has improved.
    pub fn forgive(&mut self) {
        (self.skipped_steps, self.spike_steps, self.zero_gradient_steps, self.unmoved_updates) = (0, 0, 0, 0);
        self.skipped_lately = 0;
    }

    /// What is wrong with the last steps, if anything: text that completes "saved while".
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let lately = self.skipped_lately.count_ones();
        let trouble = if self.spike_steps > 0 {
            "the loss was far too high".to_owned()
        } else if lately >= MIN_SKIPS_OF_TROUBLE {
            format!("{lately} of the last {HISTORY_STEPS} steps made no update")
        } else if self.zero_gradient_steps > 0 {
            "every gradient was exactly zero".to_owned()
        } else if self.unmoved_updates > 0 {
            "updates left the adapters as they were".to_owned()
        } else {
            return None;
        };
        Some(trouble)
    }

    /// Whether the last few losses are far above the start.
    #[must_use]
    pub fn has_diverged(&self) -> bool {
        self.start_loss.is_some_and(|start| self.recent > start + DIVERGED_NATS)
    }

    /// Checks a step.
    pub fn observe(&mut self, config: &WatchdogConfig, step: &Observation) -> Verdict {
        match step.skipped {
            None => {}
            // This is caused by the rows, not by training.
            Some(SkipReason::NoTargetTokens) => return Verdict::default(),
            Some(_) => return self.observe_skipped(config, step),
        }
        self.skipped_steps = 0;
        self.skipped_lately <<= 1;
        self.updates_since_look += u64::from(step.learning_rate > 0.0);
        let verdicts =
            [self.observe_loss(config, step.loss), self.observe_gradient(step.grad_norm), self.observe_adapters(step)];
        let patience = |steps: u64| config.patience > 0 && steps >= config.patience;
        let stop = if patience(self.spike_steps) {
            Some(format!(
                "the loss has been far too high for {} steps: {:.4}, after {:.4} at the start\n  hint: resume from a \
                 checkpoint before that, with a lower `optimizer.learning_rate` or a longer warm-up; `watchdog.patience` \
                 is how long this is watched",
                self.spike_steps,
                step.loss,
                self.start_loss.unwrap_or_default()
            ))
        } else if patience(self.zero_gradient_steps) {
            Some(format!(
                "every gradient has been exactly zero for {} steps: nothing is learned\n  hint: look at `lora.lora_alpha`, \
                 `train.precision` and the rows",
                self.zero_gradient_steps
            ))
        } else if patience(self.unmoved_updates) {
            Some(format!(
                "the adapters are what they were {} updates ago: nothing is learned\n  hint: raise \
                 `optimizer.learning_rate`",
                self.unmoved_updates
            ))
        } else {
            None
        };
        let (anomaly, warning) = verdicts.into_iter().flatten().next().unzip();
        Verdict { anomaly, warning: warning.flatten(), stop }
    }

    fn observe_skipped(&mut self, config: &WatchdogConfig, step: &Observation) -> Verdict {
        let is_scale_search = step.is_scale_search;
        self.skipped_steps += 1;
        self.skipped_lately = (self.skipped_lately << 1) | u64::from(!is_scale_search);
        let lately = self.skipped_lately.count_ones();
        let steps = if config.max_skipped_steps == 0 {
            None
        } else if self.skipped_steps >= config.max_skipped_steps {
            Some(format!("{} steps in a row", self.skipped_steps))
        } else if lately > HISTORY_STEPS / 2 && u64::from(lately) >= config.max_skipped_steps {
            // An occasional update in between is no improvement.
            Some(format!("{lately} of the last {HISTORY_STEPS} steps"))
        } else {
            None
        };
        let stop = steps.map(|steps| {
            format!(
                "{steps} made no update\n  hint: look at the rows that the warnings name, at the model's weights and at \
                 `optimizer.learning_rate`; `watchdog.max_skipped_steps` is how long this is watched"
            )
        });
        Verdict { anomaly: (!is_scale_search).then_some(Anomaly::SkippedStep), warning: None, stop }
    }

    /// The anomaly of a loss, with a warning if it is the first in a row.
    fn observe_loss(&mut self, config: &WatchdogConfig, loss: f64) -> Option<(Anomaly, Option<String>)> {
        if self.num_losses == 0 {
            self.recent = loss;
        }
        self.find_start(loss);
        self.recent += RECENT_WEIGHT * (loss - self.recent);
        let deviation = self.variance.sqrt().max(LEAST_DEVIATION * self.mean.abs());
        let z = (loss - self.mean) / deviation.max(f64::MIN_POSITIVE);
        let is_known = self.num_losses >= WARM_UP_LOSSES;
        let is_spike = is_known && z > config.loss_spike_z;
        // The start is only known after enough losses.
        let is_started = self.num_losses + 1 >= START_LOSSES as u64;
        let start_loss = self.start_loss.filter(|_| is_started);
        let has_diverged = is_started && self.has_diverged();
        let mean = self.mean;
        // A spike is counted as the highest loss that is no spike. So one spike does not hide the next, and where the
        // loss stays high for good reason, as with harder rows, the mean follows.
        let counted = if is_spike { mean + config.loss_spike_z * deviation } else { loss };
        self.count_loss(counted);
        if config.loss_spike_z <= 0.0 || !(is_spike || has_diverged) {
            self.spike_steps = 0;
            return None;
        }
        self.spike_steps += 1;
        let warning = (self.spike_steps == 1).then(|| {
            if is_spike {
                format!("the loss of {loss:.4} is {z:.1} standard deviations above its mean of {mean:.4}")
            } else {
                let start = start_loss.unwrap_or_default();
                format!("the last losses, now {loss:.4}, are far above the {start:.4} at the start")
            }
        });
        Some((Anomaly::LossSpike, warning))
    }

    /// Records one of the first losses; after the last of them, the loss at the start is known.
    fn find_start(&mut self, loss: f64) {
        let index = usize::try_from(self.num_losses).unwrap_or(usize::MAX);
        let Some(place) = self.first_losses.get_mut(index) else { return };
        *place = loss;
        if index + 1 == START_LOSSES {
            let mut sorted = self.first_losses;
            sorted.sort_by(f64::total_cmp);
            self.start_loss = Some(match self.start_loss {
                Some(eval_loss) => eval_loss.max(sorted[0]),
                None => sorted[ODD_START_LOSSES],
            });
        }
    }

    /// Plain mean and variance over the first losses, then exponentially weighted ones (Finch, 2009, section 9).
    fn count_loss(&mut self, loss: f64) {
        self.num_losses += 1;
        #[expect(clippy::cast_precision_loss, reason = "at most 50")]
        let weight = LOSS_WEIGHT.max(1.0 / self.num_losses.min(50) as f64);
        let increment = weight * (loss - self.mean);
        self.variance = (1.0 - weight) * (self.variance + (loss - self.mean) * increment);
        self.mean += increment;
    }

    fn observe_gradient(&mut self, grad_norm: f64) -> Option<(Anomaly, Option<String>)> {
        if grad_norm != 0.0 {
            self.zero_gradient_steps = 0;
            return None;
        }
        self.zero_gradient_steps += 1;
        let warning = (self.zero_gradient_steps == 1).then(|| "every gradient is exactly zero".to_owned());
        Some((Anomaly::ZeroGradient, warning))
    }

    fn observe_adapters(&mut self, step: &Observation) -> Option<(Anomaly, Option<String>)> {
        let digest = step.adapters_digest?;
        let updates = std::mem::take(&mut self.updates_since_look);
        if self.adapters_digest.replace(digest) != Some(digest) {
            self.unmoved_updates = 0;
            return None;
        }
        if updates == 0 {
            return None;
        }
        let is_first = self.unmoved_updates == 0;
        self.unmoved_updates += updates;
        let warning = is_first.then(|| format!("{updates} updates have left the adapters exactly as they were"));
        Some((Anomaly::UnmovedAdapters, warning))
    }
}

#[cfg(test)]
mod tests;
