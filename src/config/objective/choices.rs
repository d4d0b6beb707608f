//! The values of the keys of `[objective]`.

use serde::Serialize;

use crate::schema::{Choice, Value};

/// What training minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectiveName {
    /// The cross-entropy of the target tokens.
    #[default]
    CrossEntropy,
    /// Direct preference optimisation (Rafailov et al., 2023).
    Dpo,
    /// Odds ratio preference optimisation (Hong et al., 2024).
    Orpo,
    /// Contrastive preference optimisation (Xu et al., 2024).
    Cpo,
    /// Simple preference optimisation (Meng et al., 2024).
    Simpo,
    /// Kahneman-Tversky optimisation (Ethayarajh et al., 2024).
    Kto,
    /// Scores of answers (Ouyang et al., 2022).
    Reward,
    /// Group relative policy optimisation (Shao et al., 2024).
    Grpo,
}

impl Choice for ObjectiveName {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("cross_entropy", Self::CrossEntropy),
        ("dpo", Self::Dpo),
        ("orpo", Self::Orpo),
        ("cpo", Self::Cpo),
        ("simpo", Self::Simpo),
        ("kto", Self::Kto),
        ("reward", Self::Reward),
        ("grpo", Self::Grpo),
    ];
    const PEERS: &'static [(&'static str, &'static str)] = &[
        ("sft", "cross_entropy"),
        ("ce", "cross_entropy"),
        ("nll", "cross_entropy"),
        ("rm", "reward"),
        ("bradley_terry", "reward"),
    ];
    const NOTES: &'static [(&'static [&'static str], &'static str)] = &[
        (&["ppo", "rloo"], "this trainer does not have it yet"),
        (&["ipo"], "a loss of \"dpo\": write loss_type = \"ipo\""),
    ];
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

/// A loss of preferences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "names of the field; docs/preferences.md has their formulas")]
pub enum LossType {
    Sigmoid,
    Hinge,
    Ipo,
    Robust,
    ExoPair,
    NcaPair,
    BcoPair,
    SppoHard,
    Aot,
    AotUnpaired,
    ApoZero,
    ApoDown,
    Discopop,
    SigmoidNorm,
    Sft,
    Kto,
    ApoZeroUnpaired,
    Dapo,
    Bnpo,
    Grpo,
    DrGrpo,
    Luspo,
    Cispo,
    Sapo,
}

impl LossType {
    /// Whether it is a loss of pairs of answers.
    pub(super) fn is_of_pairs(self) -> bool {
        !matches!(self, Self::Kto | Self::ApoZeroUnpaired) && !self.is_of_rewards()
    }

    /// Whether it is a loss of answers that have rewards.
    pub(super) fn is_of_rewards(self) -> bool {
        use LossType::{Bnpo, Cispo, Dapo, DrGrpo, Grpo, Luspo, Sapo};
        matches!(self, Dapo | Bnpo | Grpo | DrGrpo | Luspo | Cispo | Sapo)
    }

    /// Whether its scores may be those of another divergence.
    pub(super) fn takes_divergence(self) -> bool {
        use LossType::{Discopop, ExoPair, Hinge, Ipo, Robust, Sft, Sigmoid, SigmoidNorm};
        matches!(self, Sigmoid | SigmoidNorm | Hinge | Ipo | ExoPair | Robust | Discopop | Sft)
    }
}

impl Choice for LossType {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("sigmoid", Self::Sigmoid),
        ("hinge", Self::Hinge),
        ("ipo", Self::Ipo),
        ("robust", Self::Robust),
        ("exo_pair", Self::ExoPair),
        ("nca_pair", Self::NcaPair),
        ("bco_pair", Self::BcoPair),
        ("sppo_hard", Self::SppoHard),
        ("aot", Self::Aot),
        ("aot_unpaired", Self::AotUnpaired),
        ("apo_zero", Self::ApoZero),
        ("apo_down", Self::ApoDown),
        ("discopop", Self::Discopop),
        ("sigmoid_norm", Self::SigmoidNorm),
        ("sft", Self::Sft),
        ("kto", Self::Kto),
        ("apo_zero_unpaired", Self::ApoZeroUnpaired),
        ("dapo", Self::Dapo),
        ("bnpo", Self::Bnpo),
        ("grpo", Self::Grpo),
        ("dr_grpo", Self::DrGrpo),
        ("luspo", Self::Luspo),
        ("cispo", Self::Cispo),
        ("sapo", Self::Sapo),
    ];
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

/// A divergence of two models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "names of the field")]
pub enum Divergence {
    ReverseKl,
    ForwardKl,
    JsDivergence,
    AlphaDivergence,
}

impl Choice for Divergence {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("reverse_kl", Self::ReverseKl),
        ("forward_kl", Self::ForwardKl),
        ("js_divergence", Self::JsDivergence),
        ("alpha_divergence", Self::AlphaDivergence),
    ];
}

/// What rewards, less their mean, are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The standard deviation of the answers to a prompt.
    Group,
    /// That of all answers of a micro-batch.
    Batch,
    /// Nothing (Liu et al., 2025).
    None,
}

impl Choice for ScaleRewards {
    const NAMES: &'static [(&'static str, Self)] =
        &[("group", Self::Group), ("batch", Self::Batch), ("none", Self::None)];
}

/// What is likelier, or less likely, than it was when it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceSamplingLevel {
    /// A token.
    Token,
    /// An answer, by the mean of its tokens (Zheng et al., 2025).
    Sequence,
}

impl Choice for ImportanceSamplingLevel {
    const NAMES: &'static [(&'static str, Self)] = &[("token", Self::Token), ("sequence", Self::Sequence)];
}

/// The tokens of ORPO's cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OrpoNll {
    /// Prompt and answer.
    All,
    /// The answer.
    Completion,
}

impl Choice for OrpoNll {
    const NAMES: &'static [(&'static str, Self)] = &[("all", Self::All), ("completion", Self::Completion)];
}
