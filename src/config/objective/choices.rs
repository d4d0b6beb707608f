//! The values of the keys of `[objective]`.

use serde::Serialize;

use crate::schema::{Choice, Value, choice};

choice! {
    /// What training minimises.
    #[derive(Default)]
    pub enum ObjectiveName {
        /// The cross-entropy of the target tokens.
        #[default]
        CrossEntropy = "cross_entropy", ["sft", "ce", "nll"];
        /// Direct preference optimisation (Rafailov et al., 2023).
        Dpo = "dpo";
        /// Odds ratio preference optimisation (Hong et al., 2024).
        Orpo = "orpo";
        /// Contrastive preference optimisation (Xu et al., 2024).
        Cpo = "cpo";
        /// Simple preference optimisation (Meng et al., 2024).
        Simpo = "simpo";
        /// Kahneman-Tversky optimisation (Ethayarajh et al., 2024).
        Kto = "kto";
        /// Scores of answers (Ouyang et al., 2022).
        Reward = "reward", ["rm", "bradley_terry"];
        /// Group relative policy optimisation (Shao et al., 2024).
        Grpo = "grpo";
    }
    notes [
        (&["ppo", "rloo"], "this trainer does not have it yet"),
        (&["ipo"], "a loss of \"dpo\": write loss_type = \"ipo\""),
    ]
}

/// What a row of the data trains on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// A sequence of tokens.
    #[default]
    Sequence,
    /// A chosen and a rejected answer to one prompt.
    Pair,
    /// The same, with loss on the prompt before the chosen answer too.
    PairWithPrompt,
    /// A chosen and a rejected answer, each with a score at its end.
    ScoredPair,
    /// An answer that is good or bad.
    Labelled,
    /// A prompt, whose answers the model writes.
    Prompt,
}

impl RowKind {
    /// Whether a row has two answers.
    #[must_use]
    pub fn is_pair(self) -> bool {
        matches!(self, Self::Pair | Self::PairWithPrompt | Self::ScoredPair)
    }

    /// Number of sequences of a row.
    #[must_use]
    pub fn num_sequences(self) -> usize {
        if self.is_pair() { 2 } else { 1 }
    }
}

choice! {
    /// A loss of preferences.
    #[expect(missing_docs, reason = "names of the field; docs/preferences.md has their formulas")]
    pub enum LossType {
        Sigmoid = "sigmoid"; Hinge = "hinge"; Ipo = "ipo"; Robust = "robust"; ExoPair = "exo_pair";
        NcaPair = "nca_pair"; BcoPair = "bco_pair"; SppoHard = "sppo_hard"; Aot = "aot";
        AotUnpaired = "aot_unpaired"; ApoZero = "apo_zero"; ApoDown = "apo_down"; Discopop = "discopop";
        SigmoidNorm = "sigmoid_norm"; Sft = "sft"; Kto = "kto"; ApoZeroUnpaired = "apo_zero_unpaired";
        Dapo = "dapo"; Bnpo = "bnpo"; Grpo = "grpo"; DrGrpo = "dr_grpo"; Luspo = "luspo"; Cispo = "cispo";
        Sapo = "sapo"; Vespo = "vespo";
    }
}

impl LossType {
    /// Whether it is a loss of pairs of answers.
    pub(super) fn is_of_pairs(self) -> bool {
        !matches!(self, Self::Kto | Self::ApoZeroUnpaired) && !self.is_of_rewards()
    }

    /// Whether it is a loss of answers that have rewards.
    pub(super) fn is_of_rewards(self) -> bool {
        use LossType::{Bnpo, Cispo, Dapo, DrGrpo, Grpo, Luspo, Sapo, Vespo};
        matches!(self, Dapo | Bnpo | Grpo | DrGrpo | Luspo | Cispo | Sapo | Vespo)
    }

    /// Whether its scores may be those of another divergence.
    pub(super) fn takes_divergence(self) -> bool {
        use LossType::{Discopop, ExoPair, Hinge, Ipo, Robust, Sft, Sigmoid, SigmoidNorm};
        matches!(self, Sigmoid | SigmoidNorm | Hinge | Ipo | ExoPair | Robust | Discopop | Sft)
    }
}

/// `objective.loss_type`: one loss or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LossTypes(pub Vec<LossType>);

impl LossTypes {
    pub(super) const EXPECTED: &'static str = "a loss such as \"sigmoid\", or a list of losses";

    pub(super) fn accept(value: &Value) -> Result<Option<Self>, Option<String>> {
        let one = |value: &Value| match value {
            Value::String(text) => {
                let found = LossType::NAMES.iter().find(|(name, _)| name == text).map(|(_, loss)| *loss);
                let names = || LossType::NAMES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
                found.ok_or_else(|| Some(format!("there is no loss {text:?}; there are {}", names())))
            }
            _ => Err(None),
        };
        let losses = match value {
            Value::Array(items) if !items.is_empty() => items.iter().map(|item| one(item.value())).collect(),
            single => one(single).map(|loss| vec![loss]),
        };
        losses.map(|losses| Some(Self(losses)))
    }
}

impl Serialize for LossTypes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [only] => only.serialize(serializer),
            all => all.serialize(serializer),
        }
    }
}

choice! {
    /// A divergence of two models.
    #[expect(missing_docs, reason = "names of the field")]
    pub enum Divergence {
        ReverseKl = "reverse_kl";
        ForwardKl = "forward_kl";
        JsDivergence = "js_divergence";
        AlphaDivergence = "alpha_divergence";
    }
}

choice! {
    /// What rewards, less their mean, are divided by.
    pub enum ScaleRewards {
        /// The standard deviation of the answers to a prompt.
        Group = "group";
        /// That of all answers that were written together.
        Batch = "batch";
        /// Nothing (Liu et al., 2025).
        None = "none";
    }
}

choice! {
    /// How what several functions say of an answer becomes its advantage.
    pub enum Aggregation {
        /// The weighted sum is compared with those of the group.
        SumThenNormalize = "sum_then_normalize";
        /// What each function says is compared, and the weighted sum of that counts (GDPO, Liu et al., 2026).
        NormalizeThenSum = "normalize_then_sum";
    }
}

choice! {
    /// What is likelier, or less likely, than it was when it was written.
    pub enum ImportanceSamplingLevel {
        /// A token.
        Token = "token";
        /// An answer, by the mean of its tokens (Zheng et al., 2025).
        Sequence = "sequence";
    }
}

choice! {
    /// The tokens of ORPO's cross-entropy.
    pub enum OrpoNll {
        /// Prompt and answer.
        All = "all";
        /// The answer.
        Completion = "completion";
    }
}
