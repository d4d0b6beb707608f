//! Section `[objective]` of a recipe.

mod choices;
mod environment;
mod reward;

use std::ops::Bound;

use ObjectiveName::{Cpo, Dpo, Grpo, Kto, Orpo, Reward, Simpo};
use choices::LossTypes;
pub use choices::{
    Aggregation, Divergence, ImportanceSamplingLevel, LossType, ObjectiveName, OrpoNll, RowKind, ScaleRewards,
};
pub use environment::{EnvironmentConfig, OnFailure};
pub use reward::{RewardConfig, RewardKind};

use super::POSITIVE;
use crate::schema::{Choice, Problem, Section, Value, section};

/// A share of all tokens that is not none.
const TOP_P: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Included(1.0));

section! {
    /// Section `[objective]`: the keys have the names that TRL gives them.
    pub struct ObjectiveConfig then check {
        /// What training minimises. `"cross_entropy"` of the rows' answers; for rows with a chosen and a rejected answer "dpo",
        /// "orpo", "cpo" or "simpo"; for rows whose answer has a label, good or bad, "kto"; for prompts, which the model
        /// answers itself, "grpo". "reward" trains no text at all, but a model that scores answers, on chosen and rejected ones.
        name: ObjectiveName = ObjectiveName::CrossEntropy => choice(), OtherRows,
            ["rl", "stage"];
        /// How much a difference of log-probabilities counts: a higher one keeps "dpo" and "kto" nearer to the base.
        /// Of "grpo" the weight of the divergence from the base. Default: 0.1, of "simpo" 2, of "grpo" 0.
        beta: Option<f64> = None => optional_number(0.0..) like 0.1 for [Dpo, Orpo, Cpo, Simpo, Kto, Grpo],
            ["pref_beta", "rl_beta", "orpo_alpha", "dpo_beta", "kto_beta", "orpo_beta", "simpo_beta"];
        /// The loss, or a list of losses that are added. Of "dpo": "sigmoid", "hinge", "ipo", "robust", `"exo_pair"`,
        /// `"nca_pair"`, `"bco_pair"`, `"sppo_hard"`, "aot", `"aot_unpaired"`, `"apo_zero"`, `"apo_down"`, "discopop",
        /// `"sigmoid_norm"` and "sft"; of "cpo": "sigmoid", "hinge" or "ipo"; of "kto": "kto" or `"apo_zero_unpaired"`; of
        /// "grpo", by what a token's loss is divided: "dapo" by all tokens of the step, "bnpo" by those of the micro-batch,
        /// "grpo" by those of its answer, `"dr_grpo"` by the most that an answer may have, "luspo" by none;
        /// "cispo" and "vespo" (as "dapo") and "sapo" (as "grpo") bound what is used again in other ways.
        /// Default: "sigmoid"; of "kto" "kto", of "grpo" "dapo".
        loss_type: Option<LossTypes> = None => any(LossTypes::EXPECTED, LossTypes::accept)
            like "sigmoid" for [Dpo, Cpo, Kto, Grpo],
            ["pref_loss", "dpo_loss_type", "dpo_loss", "dpo_cpo_loss_type"];
        /// Weights of the losses of `loss_type`. Default: 1 each.
        loss_weights: Option<Vec<f64>> = None => any("a list of numbers", accept_weights) like [1.0, 0.5] for [Dpo],
            ["pref_ftx", "rpo_alpha", "dpo_ftx";
             "the loss of the chosen answer is a loss of its own: loss_type = [\"sigmoid\", \"sft\"], loss_weights = [1.0, 0.5]"];
        /// Share of the rows whose two answers may be the wrong way round: of "sigmoid" (conservative DPO), "robust", "aot",
        /// `"aot_unpaired"` and `"exo_pair"`, which needs one above 0.
        label_smoothing: f64 = 0.0 => number(0.0..0.5) for [Dpo, Cpo, Simpo], ["dpo_label_smoothing"];
        /// Divergence from the base that "dpo" penalises: `"reverse_kl"`, `"forward_kl"`, `"js_divergence"` or
        /// `"alpha_divergence"`.
        f_divergence_type: Divergence = Divergence::ReverseKl => choice() for [Dpo];
        /// The alpha of `"alpha_divergence"`.
        f_alpha_divergence_coef: f64 = 0.5 => number(..) for [Dpo];
        /// Weight of the tokens by which one answer of "dpo" is longer than the other. Default: 1.
        ld_alpha: Option<f64> = None => optional_number(0.0..=1.0) like 0.5 for [Dpo];
        /// Pairs of "dpo" count by how likely the model is to write both answers (weighted preference optimisation).
        use_weighting: bool = false => boolean() for [Dpo], ["dpo_use_weighting", "wpo"];
        /// Temperature of "discopop".
        discopop_tau: f64 = 0.05 => number(POSITIVE) for [Dpo];
        /// Weight of the chosen answer's cross-entropy in "cpo" and "simpo". Default: 1, of "simpo" 0.
        cpo_alpha: Option<f64> = None => optional_number(0.0..) like 1.0 for [Cpo, Simpo];
        /// Margin that "simpo" asks of the mean log-probabilities, times `beta`.
        simpo_gamma: f64 = 1.0 => number(0.0..) for [Simpo], ["simpo_gamma_beta_ratio"; "it is their ratio times beta"];
        /// Another reward of "cpo" and "simpo" (`AlphaPO`): (1 - p^-alpha) / alpha.
        alpha: f64 = 0.0 => number(..) for [Cpo, Simpo], ["alphapo_alpha"];
        /// The tokens of "orpo"'s cross-entropy: "all" of the prompt and the chosen answer, as in TRL, or those of the
        /// "completion" alone.
        orpo_nll: OrpoNll = OrpoNll::All => choice() for [Orpo];
        /// Weight of the good answers of "kto".
        desirable_weight: f64 = 1.0 => number(0.0..) for [Kto], ["kto_chosen_weight", "kto_desirable_weight"];
        /// Weight of the bad answers of "kto". Such that good and bad ones have about the same in all.
        undesirable_weight: f64 = 1.0 => number(0.0..) for [Kto], ["kto_rejected_weight", "kto_undesirable_weight"];
        /// Of "reward", weight of the square of a pair's summed scores, which keeps scores around 0; TRL advises 0.01.
        center_rewards_coefficient: f64 = 0.0 => number(0.0..) for [Reward];
        /// Answers that "grpo" draws to each prompt, and compares with one another.
        num_generations: usize = 8 => count(2..=1024) for [Grpo], ["group_size", "num_return_sequences"];
        /// The same in an evaluation. Default: `num_generations`.
        num_generations_eval: Option<usize> = None => optional_count(1..=1024) like 1 for [Grpo];
        /// Divisor of the logits from which answers of "grpo" are drawn, and of those in its loss: a higher one draws from
        /// more different tokens.
        temperature: f64 = 1.0 => number(POSITIVE) for [Grpo];
        /// Answers of "grpo" are drawn only from the most likely tokens that together have this probability.
        top_p: f64 = 1.0 => number(TOP_P) for [Grpo];
        /// Answers of "grpo" are drawn only from this many most likely tokens. Default: all.
        top_k: Option<usize> = None => optional_count(1..) like 20 for [Grpo];
        /// Answers of "grpo" are drawn only from tokens at least this share as likely as the most likely one. Default: all.
        min_p: Option<f64> = None => optional_number(0.0..=1.0) like 0.05 for [Grpo];
        /// Steps of "grpo" that train on the same answers.
        num_iterations: usize = 1 => count(1..=1024) for [Grpo];
        /// Micro-batches of prompts that "grpo" answers together: a multiple of `train.gradient_accumulation_steps`, which is
        /// the default.
        steps_per_generation: Option<usize> = None => optional_count(1..) like 4 for [Grpo];
        /// By how much a token of "grpo" may become less likely, or likelier, than when it was written, as a share: nothing
        /// drives it further.
        epsilon: f64 = 0.2 => number(0.0..1.0) for [Grpo], ["cliprange"];
        /// The same for likelier ones alone; of "cispo" the most that a ratio counts. Default: `epsilon`; of "cispo" 5.
        epsilon_high: Option<f64> = None => optional_number(0.0..) like 0.28 for [Grpo];
        /// The most that a ratio of "grpo" counts in answers that are worse than others. Default: no such bound.
        delta: Option<f64> = None => optional_number(1.0..) like 2.0 for [Grpo];
        /// What becomes likelier in "grpo": each "token", or the "sequence", a token of it in the mean (GSPO).
        importance_sampling_level: ImportanceSamplingLevel = ImportanceSamplingLevel::Token => choice() for [Grpo];
        /// Sharpness of the gate by which "sapo" follows tokens of answers that are better than others.
        sapo_temperature_pos: f64 = 1.0 => number(POSITIVE) for [Grpo];
        /// The same of the other answers.
        sapo_temperature_neg: f64 = 1.05 => number(POSITIVE) for [Grpo];
        /// Of "vespo", for answers that are no worse than others: the weight of an answer that is w times as likely as when it was
        /// written is w^k exp(lambda (1 - w)). This is k.
        vespo_k_pos: f64 = 2.0 => number(0.0..) for [Grpo];
        /// The same, lambda.
        vespo_lambda_pos: f64 = 3.0 => number(0.0..) for [Grpo];
        /// The k of the other answers.
        vespo_k_neg: f64 = 3.0 => number(0.0..) for [Grpo];
        /// The lambda of the other answers.
        vespo_lambda_neg: f64 = 2.0 => number(0.0..) for [Grpo];
        /// Answers of "grpo" that are worse than others are left as they are once they have become less likely than when they were
        /// written by more than this, in nats a token of them in the mean. Default: none are.
        off_policy_mask_threshold: Option<f64> = None => optional_number(0.0..) like 0.1 for [Grpo];
        /// Share of the tokens of a micro-batch of "grpo" that are followed: those where the model is least sure what comes.
        top_entropy_quantile: f64 = 1.0 => number(0.0..=1.0) for [Grpo];
        /// Most tokens of an answer of "grpo"; prompt and answer together have at most `data.max_length`.
        max_completion_length: usize = 256 => count(1..) for [Grpo], ["max_response_length"];
        /// What "grpo" divides rewards by, less their mean: the standard deviation of the "group" of answers to a prompt, of
        /// the "batch" of those written together, or "none".
        scale_rewards: ScaleRewards = ScaleRewards::Group => choice() for [Grpo];
        /// Whether what several functions say of an answer of "grpo" is added and then compared with that of others,
        /// `"sum_then_normalize"`, or each is compared first, so that none drowns the others, `"normalize_then_sum"` (GDPO).
        multi_objective_aggregation: Aggregation = Aggregation::SumThenNormalize => choice() for [Grpo];
        /// Answers of "grpo" that do not end by themselves carry no loss.
        mask_truncated_completions: bool = false => boolean() for [Grpo];
        /// How answers of "grpo" are judged; the sum counts.
        reward: Vec<RewardConfig> = Vec::new() => sections() like { kind = "exact" } for [Grpo] of RewardConfig,
            ["rewards", "reward_funcs", "reward_functions"];
        /// What replies to answers of "grpo", which then have several turns.
        environment: EnvironmentConfig = EnvironmentConfig::default() => section() for [Grpo] of EnvironmentConfig;
    }
}

pub(super) fn accept_weights(value: &Value) -> Result<Option<Vec<f64>>, Option<String>> {
    let Value::Array(items) = value else { return Err(None) };
    let number = |value: &Value| match value {
        Value::Float(number) => Some(*number),
        #[expect(clippy::cast_precision_loss, reason = "a weight is a small number")]
        Value::Integer(number) => Some(*number as f64),
        _ => None,
    };
    items.iter().map(|item| number(item.value())).collect::<Option<Vec<_>>>().map(Some).ok_or(None)
}

impl ObjectiveConfig {
    /// The programs that it starts.
    #[must_use]
    pub fn programs(&self) -> Vec<Vec<String>> {
        self.reward.iter().flat_map(RewardConfig::programs).chain(self.environment.programs()).collect()
    }

    fn check(self, section: &mut Section) -> Self {
        use LossType::{Aot, AotUnpaired, Discopop, ExoPair, Robust, Sigmoid};
        use ObjectiveName::CrossEntropy;
        let default = Self::default();
        let is_other = |own: f64, default: f64| own.to_bits() != default.to_bits();
        if self.name != Grpo && self.beta.is_some_and(|beta| beta <= 0.0) {
            section.problem("beta", format!("must be above 0 for \"{}\"", self.name.word()));
        }
        let losses = self.losses();
        let known = |loss: LossType| match self.name {
            CrossEntropy | Orpo | Simpo | Reward => true,
            Dpo => loss.is_of_pairs(),
            Cpo => matches!(loss, Sigmoid | LossType::Hinge | LossType::Ipo),
            Kto => matches!(loss, LossType::Kto | LossType::ApoZeroUnpaired),
            Grpo => loss.is_of_rewards(),
        };
        for loss in losses.iter().copied().filter(|loss| !known(*loss)) {
            section.problem("loss_type", format!("\"{}\" is none of \"{}\"", loss.word(), self.name.word()));
        }
        if [Cpo, Kto, Grpo].contains(&self.name) && losses.len() > 1 {
            section.problem("loss_type", format!("is one loss of \"{}\"", self.name.word()));
        }
        if self.name == Grpo && self.reward.is_empty() && !self.environment.is_set() && !section.is_wrong("reward") {
            let message = "\"grpo\" learns from rewards, and there is none";
            section.reject(
                "name",
                Problem::new(message).hint("add [[objective.reward]] with a `kind`, such as \"exact\""),
            );
        }
        if self.name == Grpo {
            self.check_reuse(&losses, section);
        }
        if self.loss_weights.as_ref().is_some_and(|weights| weights.len() != losses.len()) {
            section.problem("loss_weights", format!("needs one number for each of {} losses", losses.len()));
        }
        if losses.contains(&ExoPair) && self.label_smoothing <= 0.0 {
            section.problem("label_smoothing", "must be above 0 for \"exo_pair\", such as 0.001");
        }
        let smooths = |loss: &LossType| matches!(loss, Sigmoid | Robust | ExoPair | Aot | AotUnpaired);
        if self.name == Dpo && self.label_smoothing > 0.0 && !losses.iter().any(smooths) {
            section.problem("label_smoothing", "does nothing to these losses: leave it out");
        }
        if self.f_divergence_type != Divergence::ReverseKl {
            for loss in losses.iter().filter(|loss| !loss.takes_divergence()) {
                let text = format!("has no meaning with the loss \"{}\"", loss.word());
                section.problem("f_divergence_type", text);
            }
        }
        if self.use_weighting && losses.iter().any(|loss| matches!(loss, Aot | AotUnpaired)) {
            section.problem("use_weighting", "has no meaning with losses that are sorted over pairs");
        }
        if is_other(self.discopop_tau, default.discopop_tau) && self.name == Dpo && !losses.contains(&Discopop) {
            section.reject("discopop_tau", Problem::new("`objective.discopop_tau` is of \"discopop\" alone"));
        }
        self
    }

    /// Checks the keys of what is used again in "grpo".
    fn check_reuse(&self, losses: &[LossType], section: &mut Section) {
        let default = Self::default();
        let (has, reuses) = (|loss| losses.contains(&loss), self.reuses_answers());
        let (is_sapo, is_vespo) = (has(LossType::Sapo), has(LossType::Vespo));
        let clips = reuses && !is_sapo && !is_vespo && !has(LossType::Cispo);
        let weighs = reuses && is_vespo;
        let is_other = |own: f64, default: f64| own.to_bits() != default.to_bits();
        for (key, is_set, is_read) in [
            ("epsilon", is_other(self.epsilon, default.epsilon), clips),
            ("epsilon_high", self.epsilon_high.is_some(), reuses && !is_sapo && !is_vespo),
            ("delta", self.delta.is_some(), clips),
            ("sapo_temperature_pos", is_other(self.sapo_temperature_pos, default.sapo_temperature_pos), is_sapo),
            ("sapo_temperature_neg", is_other(self.sapo_temperature_neg, default.sapo_temperature_neg), is_sapo),
            ("vespo_k_pos", is_other(self.vespo_k_pos, default.vespo_k_pos), weighs),
            ("vespo_lambda_pos", is_other(self.vespo_lambda_pos, default.vespo_lambda_pos), weighs),
            ("vespo_k_neg", is_other(self.vespo_k_neg, default.vespo_k_neg), weighs),
            ("vespo_lambda_neg", is_other(self.vespo_lambda_neg, default.vespo_lambda_neg), weighs),
            ("off_policy_mask_threshold", self.off_policy_mask_threshold.is_some(), reuses),
        ] {
            if is_set && !is_read {
                let why = if reuses || key.starts_with("sapo") {
                    "does nothing to this `loss_type`: leave it out"
                } else {
                    "does nothing while every answer is used once: set `num_iterations` above 1, or leave it out"
                };
                section.problem(key, why);
            }
        }
        if has(LossType::Luspo) && self.importance_sampling_level == ImportanceSamplingLevel::Token {
            section.problem("importance_sampling_level", "must be \"sequence\" for \"luspo\"");
        }
        if is_vespo && self.importance_sampling_level == ImportanceSamplingLevel::Sequence {
            section
                .problem("importance_sampling_level", "must be \"token\" for \"vespo\", which weighs sequences itself");
        }
        if self.multi_objective_aggregation == Aggregation::NormalizeThenSum
            && self.scale_rewards != ScaleRewards::Group
        {
            section.problem("scale_rewards", "does nothing with \"normalize_then_sum\": leave it out");
        }
    }

    /// Whether "grpo" trains on answers after the model that wrote them has been updated.
    #[must_use]
    pub fn reuses_answers(&self) -> bool {
        self.num_iterations > 1 || self.steps_per_generation.is_some()
    }

    /// Whether answers of "grpo" that are no better and no worse than the others to their prompt can be left out of the step: without a
    /// divergence they have no gradient, and what a step divides by can be counted without them. Which tokens are followed cannot.
    #[must_use]
    pub fn leaves_out_equal_answers(&self) -> bool {
        self.beta() <= 0.0 && !self.losses().contains(&LossType::Bnpo) && self.top_entropy_quantile >= 1.0
    }

    /// What logits are divided by in the loss; `None` for 1.
    #[must_use]
    pub fn logit_temperature(&self) -> Option<f64> {
        Some(self.temperature).filter(|temperature| temperature.to_bits() != 1.0_f64.to_bits())
    }

    /// `beta`, or its default.
    #[must_use]
    pub fn beta(&self) -> f64 {
        self.beta.unwrap_or(match self.name {
            ObjectiveName::Simpo => 2.0,
            ObjectiveName::Grpo => 0.0,
            _ => 0.1,
        })
    }

    /// The losses that are added.
    #[must_use]
    pub fn losses(&self) -> Vec<LossType> {
        let default = match self.name {
            ObjectiveName::Kto => LossType::Kto,
            ObjectiveName::Grpo => LossType::Dapo,
            _ => LossType::Sigmoid,
        };
        self.loss_type.as_ref().map_or_else(|| vec![default], |losses| losses.0.clone())
    }

    /// Number of sequences of a row.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        if self.name == ObjectiveName::Grpo { self.num_generations } else { self.rows().num_sequences() }
    }

    /// Whether it measures how far the model is from that before training on answers to other prompts.
    #[must_use]
    pub fn needs_divergence(&self) -> bool {
        self.name == ObjectiveName::Kto && self.losses() == [LossType::Kto]
    }

    /// What a row trains on.
    #[must_use]
    pub fn rows(&self) -> RowKind {
        match self.name {
            ObjectiveName::CrossEntropy => RowKind::Sequence,
            ObjectiveName::Orpo if self.orpo_nll == OrpoNll::All => RowKind::PairWithPrompt,
            ObjectiveName::Dpo | ObjectiveName::Orpo | ObjectiveName::Cpo | ObjectiveName::Simpo => RowKind::Pair,
            ObjectiveName::Reward => RowKind::ScoredPair,
            ObjectiveName::Kto => RowKind::Labelled,
            ObjectiveName::Grpo => RowKind::Prompt,
        }
    }

    /// The learning rate where the recipe names none: TRL's for scores, ten times TRL's for preferences, as adapters want it.
    #[must_use]
    pub fn learning_rate(&self) -> Option<f64> {
        match self.name {
            ObjectiveName::CrossEntropy => None,
            ObjectiveName::Reward => Some(1e-4),
            _ => Some(1e-5),
        }
    }

    /// Number of parameters of the head that scores, of a model of this width.
    #[must_use]
    pub fn num_score_parameters(&self, hidden_size: usize) -> usize {
        if self.scores() { hidden_size } else { 0 }
    }

    /// Whether the model scores texts, and writes none.
    #[must_use]
    pub fn scores(&self) -> bool {
        self.name == ObjectiveName::Reward
    }
}
