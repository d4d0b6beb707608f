//! Section `[optimizer]` of a recipe.

use std::ops::Bound;

use serde::Serialize;

use super::POSITIVE;
use crate::schema::{Choice, section};

section! {
    /// Section `[optimizer]`.
    pub struct OptimizerConfig {
        /// "adamw".
        name: OptimizerName = OptimizerName::Adamw => choice(),
            ["optim", "optimizer_type", "type", "_component_", "optimizer_name", "optimizer"];
        /// Peak learning rate.
        learning_rate: f64 = 2e-4 => number((Bound::Excluded(0.0), Bound::Included(1.0))),
            ["lr", "max_lr", "peak_lr", "base_lr", "learning_rate_init"];
        /// Decoupled weight decay.
        weight_decay: f64 = 0.0 => number(0.0..=1.0), ["wd", "decay", "l2"];
        /// Decay of the first and second moment.
        betas: [f64; 2] = [0.9, 0.999] => numbers(0.0..1.0),
            ["adam_beta1", "adam_beta2", "beta1", "beta2", "adam_betas", "optim_args";
             "both in one list: betas = [0.9, 0.999]"];
        /// Added to the root of the second moment.
        eps: f64 = 1e-8 => number(POSITIVE), ["adam_epsilon", "epsilon", "adam_eps"];
    }
}

/// The optimizer's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
    #[default]
    Adamw,
}

impl Choice for OptimizerName {
    const NAMES: &'static [(&'static str, Self)] = &[("adamw", Self::Adamw)];
    const PEERS: &'static [(&'static str, &'static str)] = &[
        ("adam", "adamw"),
        ("adamw_torch", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("adamw_hf", "adamw"),
        ("torch.optim.adamw", "adamw"),
        ("paged_adamw_32bit", "adamw"),
    ];
}
