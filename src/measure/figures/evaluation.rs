//! Every figure of an evaluation, one row each. The rows determine the lines of metrics.jsonl, TensorBoard's tags, what
//! checkpoints and summary.json keep, and how people see the figures.
//!
//! To add a figure, add a row here and the code that measures it.

use serde::Serialize;
use serde_json::{Map, Value, json};

/// Evaluations of a run whose figures are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Before the first step.
    First,
    Last,
    /// Before the last one.
    Previous,
    Best,
}

/// The moments, with their names in a checkpoint, and in summary.json for those that are there.
const MOMENTS: [(Moment, &str, Option<&str>); 4] = [
    (Moment::First, "first", Some("initial")),
    (Moment::Last, "last", Some("final")),
    (Moment::Previous, "previous", None),
    (Moment::Best, "best", Some("best")),
];

/// What a figure is measured on; figures of one group stand together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    /// Target tokens.
    Loss,
    /// Answers to a task.
    Score,
    /// Pairs of answers.
    Pairs,
    /// Answers of "grpo".
    Answers,
}

/// How people see a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShownAs {
    Percent,
    /// As it is, with so many decimals.
    Decimals(usize),
}

/// A figure of an evaluation that people see.
#[derive(Debug)]
pub(crate) struct EvalFigure {
    pub(crate) name: &'static str,
    label: &'static str,
    pub(crate) group: Group,
    pub(crate) shown: ShownAs,
    pub(crate) is_higher_better: bool,
    kept: &'static [Moment],
    pub(crate) of: fn(&EvalMetrics) -> Option<f64>,
    pub(crate) place: fn(&mut EvalMetrics) -> &mut Option<f64>,
}

const LOWER: bool = false;
const HIGHER: bool = true;

/// Makes [`EvalMetrics`] and its tables from rows. A row is the sentence with its unit, the name, the type and TensorBoard's tag;
/// where people see it also its label, its group, how it is shown, which is better, and of which evaluations it is kept.
macro_rules! evaluation {
    ($(
        $(#[doc = $doc:literal])+ $(#[serde $serde:tt])? $name:ident: $type:ty $(, $tag:literal)?
        $(=> $label:literal, $group:ident, $shown:expr, $better:ident, $kept:expr)?;
    )+) => {
        /// The figures of one evaluation, in one line of metrics.jsonl.
        #[derive(Clone, Debug, Default, PartialEq, Serialize)]
        pub struct EvalMetrics {
            $($(#[doc = $doc])+ $(#[serde $serde])? pub $name: $type,)+
        }

        /// Every figure: its name, TensorBoard's tag (empty if it has none), the sentence.
        pub(super) const ROWS: &[(&str, &str, &str)] =
            &[$((stringify!($name), concat!("" $(, $tag)?), concat!($($doc),+)),)+];

        static SHOWN: &[EvalFigure] = &[$($(EvalFigure {
            name: stringify!($name),
            label: $label,
            group: Group::$group,
            shown: $shown,
            is_higher_better: $better,
            kept: &$kept,
            of: |metrics| metrics.$name,
            place: |metrics| &mut metrics.$name,
        },)?)+];
    };
}

evaluation! {
    /// Optimizer updates before this evaluation; 0 before the first.
    step: u64;
    /// Passes over the training rows so far.
    epoch: f64;
    /// Mean loss of all target tokens of the evaluation rows, in nats.
    eval_loss: Option<f64>, "eval/loss"
        => "loss", Loss, ShownAs::Decimals(4), LOWER, [Moment::First, Moment::Last, Moment::Previous, Moment::Best];
    /// exp of the evaluation loss.
    eval_perplexity: Option<f64>, "eval/perplexity" => "perplexity", Loss, ShownAs::Decimals(3), LOWER, [];
    /// Share of the evaluation rows whose chosen answer has the higher reward.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_rewards_accuracies: Option<f64>, "eval/rewards/accuracies"
        => "accuracy", Pairs, ShownAs::Percent, HIGHER, [Moment::Last, Moment::Best];
    /// Reward of the chosen answers of the evaluation rows over that of the rejected ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_rewards_margins: Option<f64>, "eval/rewards/margins"
        => "margin", Pairs, ShownAs::Decimals(3), HIGHER, [Moment::Last, Moment::Best];
    /// Reward of an answer of grpo to the evaluation rows, mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_reward: Option<f64>, "eval/reward"
        => "reward", Answers, ShownAs::Decimals(3), HIGHER, [Moment::First, Moment::Last, Moment::Best];
    /// Standard deviation of the rewards of the answers to an evaluation row, mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_reward_std: Option<f64>, "eval/reward_std";
    /// Tokens of an answer to the evaluation rows, mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_completion_length: Option<f64>, "eval/completion_length";
    /// Tokens of the evaluation rows that carry loss.
    eval_target_tokens: u64;
    /// Wall time of the evaluation, the task among it.
    eval_seconds: f64;
    /// Score of the task on the evaluation rows, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_score: Option<f64>, "eval/score"
        => "score", Score, ShownAs::Percent, HIGHER, [Moment::First, Moment::Last, Moment::Best];
    /// Score of multiple choice by likelihood over length, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_score_norm: Option<f64>, "eval/score_norm";
    /// Rows that were scored.
    #[serde(skip_serializing_if = "Option::is_none")]
    eval_score_rows: Option<u64>;
}

impl EvalFigure {
    /// Those of some groups, in their order.
    pub(crate) fn of_groups(groups: &[Group]) -> impl Iterator<Item = &'static Self> {
        groups.iter().flat_map(|group| SHOWN.iter().filter(move |figure| figure.group == *group))
    }

    /// Those that a run is judged by from its beginning to its end.
    pub(crate) fn headlines(groups: &[Group]) -> impl Iterator<Item = &'static Self> {
        Self::of_groups(groups).filter(|figure| figure.kept.contains(&Moment::First))
    }

    /// The one that `eval.metric_for_best` names.
    pub(crate) fn deciding(name: &str) -> Option<&'static Self> {
        SHOWN.iter().find(|figure| figure.label == name && figure.kept.contains(&Moment::Best))
    }

    /// Its name for people; losses and rewards, which steps have too, with `evaluation` before it.
    pub(crate) fn label(&self, evaluation: &str) -> String {
        let is_of_steps = matches!(self.group, Group::Loss | Group::Answers);
        format!("{}{}", if is_of_steps { evaluation } else { "" }, self.label)
    }

    /// Whether a value is better than another.
    pub(crate) fn is_better(&self, value: f64, other: f64) -> bool {
        if self.is_higher_better { value > other } else { value < other }
    }

    /// A value as people see it.
    pub(crate) fn text(&self, value: f64) -> String {
        match self.shown {
            ShownAs::Percent => format!("{:.1}%", 100.0 * value),
            ShownAs::Decimals(decimals) => format!("{value:.decimals$}"),
        }
    }
}

impl EvalMetrics {
    /// Figures of some groups for people, each with its name.
    pub(crate) fn texts(&self, groups: &[Group]) -> Vec<String> {
        let text = |figure: &EvalFigure| Some(format!("{} {}", figure.label, figure.text((figure.of)(self)?)));
        EvalFigure::of_groups(groups).filter_map(text).collect()
    }

    /// Some figures by name: losses, and others that there are.
    pub(crate) fn by_name(&self, figures: impl Iterator<Item = &'static EvalFigure>) -> Map<String, Value> {
        let values = figures.map(|figure| (figure, (figure.of)(self)));
        let values = values.filter(|(figure, value)| value.is_some() || figure.group == Group::Loss);
        values.map(|(figure, value)| (figure.name.to_owned(), json!(value))).collect()
    }
}

/// A kept figure: of which evaluation, its name in a checkpoint, its place in that name's list (of pairs), its name in summary.json.
pub(crate) type KeptFigure = (Moment, &'static EvalFigure, String, Option<usize>, Option<String>);

/// What is kept of evaluations, in the order of files.
pub(crate) fn kept() -> Vec<KeptFigure> {
    let mut all = Vec::new();
    for group in [Group::Loss, Group::Score, Group::Pairs, Group::Answers] {
        for (moment, stored, summed) in MOMENTS {
            let figures = SHOWN.iter().filter(|figure| figure.group == group && figure.kept.contains(&moment));
            all.extend(figures.enumerate().map(|(index, figure)| {
                let is_list = group == Group::Pairs;
                let stored = format!("{stored}_{}", if is_list { "rewards" } else { figure.label });
                let summed = summed.map(|summed| format!("{summed}_{}", figure.name));
                (moment, figure, stored, is_list.then_some(index), summed)
            }));
        }
    }
    all
}
