//! The state of training besides the adapter and the optimizer's moments: `trainer_state.json` of a checkpoint.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::rollouts::Round;
use super::step::StepCounters;
use super::step_work::StepWork;
use super::watchdog::Watchdog;
use crate::config::BestBy;
use crate::data::dataset::Cursor;
use crate::measure::figures::evaluation::EvalFigure;
use crate::measure::metrics::{EvalMetrics, Evaluations, Totals};
use crate::schema::Choice;
use crate::util::files::hex;

/// `trainer_state.json`: the state of training after a whole number of steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Number of finished steps.
    pub step: u64,
    /// The next micro-batch.
    pub cursor: Cursor,
    /// Rows of the cursor's epoch that come before it.
    pub rows_of_epoch: u64,
    /// The row order that the cursor refers to.
    pub order: RowOrder,
    /// Counters of the training step: updates, dropout masks, loss scale.
    pub counters: StepCounters,
    /// Results of the evaluations so far.
    pub evaluations: Evaluations,
    /// State of the watchdog.
    pub watchdog: Watchdog,
    /// Sums over the run.
    pub totals: Totals,
    /// Digests of the inputs of training.
    pub inputs: Inputs,
    /// Answers that the next steps train on again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub round: Option<Round>,
    /// What the watchdog found wrong with the last steps before the checkpoint, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

impl TrainerState {
    /// The state at the beginning of a run.
    #[must_use]
    pub fn new(order: RowOrder, inputs: Inputs, counters: StepCounters) -> Self {
        Self {
            step: 0,
            cursor: Cursor::default(),
            rows_of_epoch: 0,
            order,
            counters,
            evaluations: Evaluations::default(),
            watchdog: Watchdog::default(),
            totals: Totals::default(),
            inputs,
            round: None,
            trouble: None,
        }
    }

    /// Number of passes over the training rows so far.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "rows and epochs are counted far below 2^53")]
    pub fn epochs(&self) -> f64 {
        self.cursor.epoch as f64 + self.rows_of_epoch as f64 / self.order.rows_per_epoch.max(1) as f64
    }

    pub(super) fn advance(&mut self, work: &StepWork) {
        self.step += 1;
        self.rows_of_epoch =
            if work.cursor.epoch == self.cursor.epoch { self.rows_of_epoch + work.rows.rows } else { 0 };
        self.cursor = work.cursor;
    }
}

/// The settings that determine which rows are in which micro-batch. A cursor has no meaning under another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowOrder {
    /// `seed`.
    pub seed: u64,
    /// `train.micro_batch_size`.
    pub micro_batch_size: usize,
    /// `data.shuffle`.
    pub shuffle: bool,
    /// `data.max_length` if rows are packed; absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packed_length: Option<usize>,
    /// Number of rows in an epoch.
    pub rows_per_epoch: usize,
}

impl fmt::Display for RowOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, micro_batch_size, shuffle, packed_length, rows_per_epoch } = self;
        write!(f, "{rows_per_epoch} rows, {micro_batch_size} in a micro-batch, shuffle = {shuffle}, seed = {seed}")?;
        packed_length.map_or(Ok(()), |length| write!(f, ", packed into {length} tokens"))
    }
}

/// Digests of the inputs (SHA-256, in hexadecimal digits), because a path may point to something else when a run is
/// resumed. Absent where a digest is not known, or differs every time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// Digest of the content of the files of `data.train`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train_rows: Option<String>,
    /// Digest of tokenizer.json.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Digest of the chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Digest of the files of weights: names, sizes and parts of their content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
}

impl Inputs {
    /// A digest as text.
    #[must_use]
    pub fn hexadecimal(digest: [u8; 32]) -> String {
        hex(&digest)
    }

    /// A warning about the inputs that are known to have changed.
    #[must_use]
    pub fn warning_since(&self, earlier: &Self) -> Option<String> {
        let others = self.changes_since(earlier);
        let verb = if others.len() == 1 && !others[0].ends_with('s') { "is" } else { "are" };
        (!others.is_empty()).then(|| {
            let others = others.join(", ");
            format!("{others} {verb} no longer what the checkpoint was trained with, under the same name")
        })
    }

    /// The inputs that are known to have changed, as text for the user.
    fn changes_since(&self, earlier: &Self) -> Vec<&'static str> {
        let parts = [
            ("the training rows", &self.train_rows, &earlier.train_rows),
            ("the tokenizer", &self.tokenizer, &earlier.tokenizer),
            ("the chat template", &self.chat_template, &earlier.chat_template),
            ("the model's weights", &self.weights, &earlier.weights),
        ];
        let is_other = |now: &Option<String>, then: &Option<String>| now.is_some() && then.is_some() && now != then;
        parts.into_iter().filter(|(_, now, then)| is_other(now, then)).map(|(name, ..)| name).collect()
    }
}

impl Evaluations {
    /// Records an evaluation after `step`; its figures are absent where there are no evaluation rows and only text was sampled.
    /// A score `of_all_rows` can be compared with others, one of fewer cannot.
    pub fn record(&mut self, step: u64, figures: Option<&EvalMetrics>, of_all_rows: bool, by: BestBy) {
        self.last_step = Some(step);
        let Some(figures) = figures else { return };
        let mut last = figures.clone();
        // That of rewarded answers is about 0, whatever they are like.
        last.eval_loss = last.eval_loss.filter(|_| last.eval_reward.is_none());
        if step == 0 {
            self.first = last.clone();
        }
        self.previous = std::mem::replace(&mut self.last, last);
        // A figure that is not a number is never an improvement.
        let is_better = EvalFigure::deciding(by.word()).is_some_and(|figure| {
            let best = (figure.of)(&self.best);
            let improves = |last| best.is_none_or(|best| figure.is_better(last, best));
            let last = (figure.of)(&self.last).filter(|last| last.is_finite() && (by != BestBy::Score || of_all_rows));
            last.is_some_and(improves)
        });
        if is_better {
            (self.best, self.best_step, self.since_best) = (self.last.clone(), Some(step), 0);
        } else {
            self.since_best += 1;
        }
    }

    /// Forgets the best evaluation: the next one is.
    pub(super) fn forget_best(&mut self) {
        (self.best, self.best_step, self.since_best) = (EvalMetrics::default(), None, 0);
    }

    /// Whether the last `patience` evaluations brought no improvement.
    #[must_use]
    pub fn patience_is_over(&self, patience: Option<usize>) -> bool {
        patience.is_some_and(|patience| self.since_best >= patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_count_rows_and_a_whole_epoch_is_a_whole_number() {
        let order = RowOrder { seed: 0, micro_batch_size: 4, shuffle: true, packed_length: None, rows_per_epoch: 10 };
        let counters = StepCounters { num_updates: 0, step_weights: None, num_micro_batches: 0, loss_scale: None };
        let mut state = TrainerState::new(order, Inputs::default(), counters);
        for (epoch, batch, rows, epochs) in [(0, 2, 8, 0.8), (1, 0, 2, 1.0), (1, 1, 4, 1.4)] {
            let mut work = StepWork::new(Cursor { epoch, batch });
            work.rows.rows = rows;
            state.advance(&work);
            assert!((state.epochs() - epochs).abs() < 1e-12, "{}", state.epochs());
        }
        assert_eq!(state.step, 3);
    }

    #[test]
    fn inputs_that_are_known_and_others_are_named() {
        let inputs = |rows: &str, weights: Option<&str>| Inputs {
            train_rows: Some(rows.to_owned()),
            tokenizer: Some("t".to_owned()),
            weights: weights.map(str::to_owned),
            ..Inputs::default()
        };
        let earlier = inputs("a", Some("w"));
        assert!(inputs("a", Some("w")).changes_since(&earlier).is_empty());
        // Where one of the two digests is unknown, no change is reported.
        assert_eq!(inputs("b", None).changes_since(&earlier), ["the training rows"]);
        assert_eq!(inputs("b", Some("v")).changes_since(&earlier), ["the training rows", "the model's weights"]);
        assert!(inputs("b", Some("v")).changes_since(&Inputs::default()).is_empty());
        let warning = inputs("b", Some("w")).warning_since(&earlier).unwrap();
        assert!(warning.starts_with("the training rows are no longer what"), "{warning}");
    }

    fn of_loss(eval_loss: f64) -> EvalMetrics {
        EvalMetrics { eval_loss: Some(eval_loss), ..EvalMetrics::default() }
    }

    #[test]
    fn by_margin_the_highest_is_the_best_and_a_lower_loss_is_not() {
        let mut evaluations = Evaluations::default();
        for (step, loss, [accuracy, margin]) in [(0, 0.69, [0.0, 0.0]), (1, 0.6, [0.7, 0.3]), (2, 0.5, [0.9, 0.2])] {
            let rewards = (Some(accuracy), Some(margin));
            let mut figures = of_loss(loss);
            (figures.eval_rewards_accuracies, figures.eval_rewards_margins) = rewards;
            evaluations.record(step, Some(&figures), true, BestBy::Margin);
        }
        let rewards = |figures: &EvalMetrics| [figures.eval_rewards_accuracies, figures.eval_rewards_margins];
        assert_eq!((evaluations.best_step, rewards(&evaluations.best)), (Some(1), [Some(0.7), Some(0.3)]));
        assert_eq!(rewards(&evaluations.last), [Some(0.9), Some(0.2)]);
    }

    #[test]
    fn patience_counts_evaluations_without_a_better_loss() {
        let mut evaluations = Evaluations::default();
        for (step, loss) in [(0, 3.0), (10, 2.5), (20, 2.5), (30, f64::NAN)] {
            evaluations.record(step, Some(&of_loss(loss)), true, BestBy::Loss);
        }
        assert_eq!((evaluations.best.eval_loss, evaluations.best_step), (Some(2.5), Some(10)));
        assert_eq!(evaluations.since_best, 2);
        assert!(evaluations.patience_is_over(Some(2)) && !evaluations.patience_is_over(Some(3)));
        assert!(!evaluations.patience_is_over(None));
        evaluations.record(40, Some(&of_loss(2.4)), true, BestBy::Loss);
        assert_eq!((evaluations.since_best, evaluations.first.eval_loss), (0, Some(3.0)));
    }

    #[test]
    fn a_first_loss_that_is_not_a_number_is_not_the_best() {
        let mut evaluations = Evaluations::default();
        evaluations.record(0, Some(&of_loss(f64::NAN)), true, BestBy::Loss);
        assert_eq!(evaluations.best.eval_loss, None);
        evaluations.record(1, Some(&of_loss(9.0)), true, BestBy::Loss);
        assert_eq!(evaluations.best_step, Some(1));
    }

    #[test]
    fn by_score_the_highest_is_the_best_and_one_that_ran_out_of_time_is_none() {
        let mut evaluations = Evaluations::default();
        for (step, loss, score, is_complete) in [(0, 3.0, 0.1, true), (1, 4.0, 0.3, true), (2, 2.0, 0.9, false)] {
            let figures = EvalMetrics { eval_score: Some(score), ..of_loss(loss) };
            evaluations.record(step, Some(&figures), is_complete, BestBy::Score);
        }
        assert_eq!(
            (evaluations.best_step, evaluations.best.eval_score, evaluations.best.eval_loss),
            (Some(1), Some(0.3), Some(4.0))
        );
        assert_eq!(
            (evaluations.first.eval_score, evaluations.last.eval_score, evaluations.since_best),
            (Some(0.1), Some(0.9), 1)
        );
    }
}
