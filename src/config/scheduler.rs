//! Section `[scheduler]` of a recipe.

use super::POSITIVE;
use crate::schema::{Choice as _, Problem, Section, choice, section};

section! {
    /// Section `[scheduler]`.
    pub struct SchedulerConfig then check {
        /// Shape after warm-up: "cosine", "linear", "constant", `"cosine_with_restarts"`, "polynomial", `"inverse_sqrt"` or
        /// `"warmup_stable_decay"`, as transformers computes them.
        lr_scheduler: LrScheduler = LrScheduler::Cosine => choice(),
            ["lr_scheduler_type", "scheduler", "schedule", "lr_schedule", "name", "type"];
        /// Share of all steps in which the learning rate rises from 0. Excludes `warmup_steps`. Default: no warm-up.
        warmup_ratio: Option<f64> = None => optional_number(0.0..1.0) like 0.03,
            ["warmup_fraction", "lr_warmup_fraction", "warmup_proportion"];
        /// The same as a number of steps.
        warmup_steps: Option<u64> = None => optional_count(0..) like 10,
            ["num_warmup_steps", "warmup", "lr_warmup_steps", "warmup_iters", "steps"];
        /// Where the decay ends, as a share of the peak.
        min_lr_ratio: f64 = 0.0 => number(0.0..=1.0),
            ["min_lr", "cosine_min_lr", "min_learning_rate", "end_lr", "lr_end";
             "it is a share of the peak: min_lr / learning_rate"],
            ["cosine_min_lr_ratio", "min_lr_rate", "lr_scheduler_kwargs"];
        /// Cosines of `"cosine_with_restarts"`. Default: 1.
        num_cycles: Option<u64> = None => optional_count(1..) like 3, ["lr_num_cycles", "cycles"];
        /// Power of the line of "polynomial". Default: 1, which is "linear".
        power: Option<f64> = None => optional_number(POSITIVE) like 2.0, ["lr_power", "poly_power"];
        /// Steps after which `"inverse_sqrt"` has fallen to the root of one half. Default: the steps of the warm-up, or 10000
        /// without one.
        timescale: Option<u64> = None => optional_count(1..) like 1000;
        /// Steps at the end in which `"warmup_stable_decay"` falls. Default: a tenth of all, rounded up.
        num_decay_steps: Option<u64> = None => optional_count(1..) like 100, ["decay_steps", "lr_decay_steps", "cooldown_steps"];
        /// How `"warmup_stable_decay"` falls: "cosine", "linear" or "1-sqrt". Default: "cosine".
        decay_type: Option<DecayType> = None => optional_choice() like "linear";
    }
}

impl SchedulerConfig {
    fn check(self, section: &mut Section) -> Self {
        if section.has("warmup_ratio") && section.has("warmup_steps") {
            let message = "`scheduler.warmup_steps` excludes `scheduler.warmup_ratio`: they say the same thing twice";
            section.reject("warmup_steps", Problem::new(message).hint("keep one of the two"));
        }
        let shape = self.lr_scheduler;
        for (key, is_given, of) in [
            ("num_cycles", self.num_cycles.is_some(), LrScheduler::CosineWithRestarts),
            ("power", self.power.is_some(), LrScheduler::Polynomial),
            ("timescale", self.timescale.is_some(), LrScheduler::InverseSqrt),
            ("num_decay_steps", self.num_decay_steps.is_some(), LrScheduler::WarmupStableDecay),
            ("decay_type", self.decay_type.is_some(), LrScheduler::WarmupStableDecay),
        ] {
            if is_given && shape != of {
                section.problem(
                    key,
                    format!("is of \"{}\"; lr_scheduler = \"{}\" has no use for it", of.word(), shape.word()),
                );
            }
        }
        self
    }
}

choice! {
    /// Shape of the learning rate after warm-up.
    #[derive(Default)]
    pub enum LrScheduler {
        /// Half a cosine down to `min_lr_ratio`.
        #[default]
        Cosine = "cosine", ["cosine_with_min_lr", "cosine_decay"];
        /// A straight line down to `min_lr_ratio`.
        Linear = "linear", ["linear_schedule"];
        /// The peak to the end.
        Constant = "constant", ["constant_with_warmup"];
        /// Several half cosines down to `min_lr_ratio`, each from the peak.
        CosineWithRestarts = "cosine_with_restarts";
        /// A power of a straight line down to `min_lr_ratio`.
        Polynomial = "polynomial";
        /// One over the root of the step.
        InverseSqrt = "inverse_sqrt", ["rsqrt"];
        /// The peak, and in the last steps down to `min_lr_ratio`, from where the warm-up starts too.
        WarmupStableDecay = "warmup_stable_decay", ["wsd"];
    }
}

choice! {
    /// How the last steps of [`LrScheduler::WarmupStableDecay`] fall.
    #[derive(Default)]
    pub enum DecayType {
        /// Half a cosine.
        #[default]
        Cosine = "cosine";
        /// A straight line.
        Linear = "linear";
        /// One less the root of the progress.
        OneMinusSqrt = "1-sqrt";
    }
}
