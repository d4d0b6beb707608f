//! Section `[scheduler]` of a recipe.

use serde::Serialize;

use crate::schema::{Choice, Problem, Section, section};

section! {
    /// Section `[scheduler]`.
    pub struct SchedulerConfig then check {
        /// Shape after warm-up: "cosine", "linear" or "constant".
        lr_scheduler: LrScheduler = LrScheduler::Cosine => choice(),
            ["lr_scheduler_type", "scheduler", "schedule", "lr_schedule", "decay_type", "name", "type"];
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
    }
}

impl SchedulerConfig {
    fn check(self, section: &mut Section) -> Self {
        if section.has("warmup_ratio") && section.has("warmup_steps") {
            let message = "`scheduler.warmup_steps` excludes `scheduler.warmup_ratio`: they say the same thing twice";
            section.reject("warmup_steps", Problem::new(message).hint("keep one of the two"));
        }
        self
    }
}

/// Shape of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LrScheduler {
    /// Half a cosine down to `min_lr_ratio`.
    #[default]
    Cosine,
    /// A straight line down to `min_lr_ratio`.
    Linear,
    /// The peak to the end.
    Constant,
}

impl Choice for LrScheduler {
    const NAMES: &'static [(&'static str, Self)] =
        &[("cosine", Self::Cosine), ("linear", Self::Linear), ("constant", Self::Constant)];
    const PEERS: &'static [(&'static str, &'static str)] = &[
        ("constant_with_warmup", "constant"),
        ("cosine_with_min_lr", "cosine"),
        ("cosine_decay", "cosine"),
        ("linear_schedule", "linear"),
    ];
}
