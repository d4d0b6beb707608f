//! Section `[optimizer]` of a recipe.

use std::ops::Bound;

use super::POSITIVE;
use crate::schema::{Choice as _, Problem, Section, choice, section};

section! {
    /// Section `[optimizer]`.
    pub struct OptimizerConfig then check {
        /// "adamw"; `"adamw_8bit"` with moments in codes of eight bits, as bitsandbytes has them; "lion"; "adafactor"; "sgd";
        /// `"schedule_free_adamw"`, for `lr_scheduler = "constant"`, whose average is evaluated and written; or "muon".
        name: OptimizerName = OptimizerName::Adamw => choice(), OtherStates,
            ["optim", "optimizer_type", "type", "_component_", "optimizer_name", "optimizer"];
        /// Peak learning rate. Default: 2e-4; of preferences and "grpo" 1e-5, of "reward" 1e-4.
        learning_rate: f64 = 2e-4 => number((Bound::Excluded(0.0), Bound::Included(1.0))),
            ["lr", "max_lr", "peak_lr", "base_lr", "learning_rate_init"];
        /// Decoupled weight decay; of "sgd" it is added to the gradient.
        weight_decay: f64 = 0.0 => number(0.0..=1.0), ["wd", "decay", "l2"];
        /// Decay of the first and second moment; of "lion" in the update and in the momentum.
        betas: [f64; 2] = [0.9, 0.999] => numbers(0.0..1.0),
            ["adam_beta1", "adam_beta2", "beta1", "beta2", "adam_betas", "optim_args";
             "both in one list: betas = [0.9, 0.999]"];
        /// Added to the root of the second moment.
        eps: f64 = 1e-8 => number(POSITIVE), ["adam_epsilon", "epsilon", "adam_eps"];
        /// Momentum of "sgd" and "muon". Default: 0 and 0.95.
        momentum: Option<f64> = None => optional_number(0.0..1.0) like 0.9, OtherStates, ["sgd_momentum", "muon_momentum"];
        /// Evaluate and write the exponential moving average of the adapters, which keeps this share of itself at each step.
        /// Default: none.
        ema_decay: Option<f64> = None => optional_number((Bound::Excluded(0.0), Bound::Excluded(1.0))) like 0.999, OtherStates,
            ["ema", "use_ema", "ema_rate", "model_ema_decay"];
    }
}

impl OptimizerConfig {
    fn check(self, section: &mut Section) -> Self {
        use OptimizerName::{Adamw, Adamw8bit, Lion, Muon, ScheduleFreeAdamw, Sgd};
        let default = Self::default();
        for (key, is_other, of) in [
            ("betas", self.betas != default.betas, &[Adamw, Adamw8bit, Lion, ScheduleFreeAdamw][..]),
            ("eps", self.eps.to_bits() != default.eps.to_bits(), &[Adamw, Adamw8bit, ScheduleFreeAdamw]),
            ("momentum", self.momentum.is_some(), &[Sgd, Muon]),
        ] {
            if is_other && !of.contains(&self.name) {
                section.problem(key, format!("is of no use to \"{}\": leave it out", self.name.word()));
            }
        }
        if self.name == ScheduleFreeAdamw && self.betas[0] <= 0.0 {
            section.problem("betas", "must begin with a number above 0: \"schedule_free_adamw\" averages with it");
        }
        if self.name == ScheduleFreeAdamw && self.ema_decay.is_some() {
            let message = "`optimizer.ema_decay` averages what \"schedule_free_adamw\" averages already";
            section.reject("ema_decay", Problem::new(message).hint("leave one of the two out"));
        }
        self
    }

    /// The momentum, if there is any.
    #[must_use]
    pub fn momentum(&self) -> Option<f64> {
        self.momentum.filter(|momentum| *momentum > 0.0)
    }
}

choice! {
    /// The optimizer's name.
    #[derive(Default)]
    pub enum OptimizerName {
        /// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
        #[default]
        Adamw = "adamw",
            ["adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "torch.optim.adamw", "paged_adamw_32bit"];
        /// The same with moments in codes of eight bits (Dettmers et al., 2022).
        Adamw8bit = "adamw_8bit", ["adamw8bit", "adamw_bnb_8bit", "paged_adamw_8bit"];
        /// The sign of a momentum (Chen et al., 2023).
        Lion = "lion", ["lion_32bit", "paged_lion_32bit", "lion_pytorch"];
        /// Adam with a second moment in rows and columns (Shazeer and Stern, 2018).
        Adafactor = "adafactor";
        /// Stochastic gradient descent.
        Sgd = "sgd", ["torch.optim.sgd"];
        /// Adam with an average in the place of a schedule (Defazio et al., 2024).
        ScheduleFreeAdamw = "schedule_free_adamw", ["adamwschedulefree"];
        /// An orthogonalised momentum (Jordan et al., 2024).
        Muon = "muon";
    }
}
