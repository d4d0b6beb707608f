//! A row as token ids: its sequences, what carries loss, where it is cut.

use std::ops::Range;

/// A row as token ids with its loss mask.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EncodedRow {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each of `ids`, whether it carries loss, that is, is to be predicted from the tokens before it. Not shifted.
    /// The first token never carries loss: nothing precedes it.
    pub carries_loss: Vec<bool>,
    /// What [`cut`](Self::cut) took off a single sequence, at most as much as it left, each token with whether it carries loss.
    pub rest: Vec<(u32, bool)>,
    /// Where the rejected answer's sequence begins, behind that of the chosen one; 0 where there is one sequence.
    pub second: usize,
    /// Whether the label says that the answer is bad.
    pub is_bad_answer: bool,
    /// By how much the score of the chosen answer shall be above that of the rejected one, more than at all.
    pub margin: f32,
    /// Length in tokens before truncation, of the longer sequence.
    pub full_length: usize,
    /// Number of tokens that carried loss before truncation.
    pub full_target_tokens: usize,
    /// Why the row cannot be used; such a row has no tokens.
    pub problem: Option<String>,
}

impl EncodedRow {
    /// Stands for a row that cannot be used.
    pub(in crate::data) fn bad(problem: String) -> Self {
        Self { problem: Some(problem), ..Self::default() }
    }

    pub(in crate::data) fn of_parts(ids: Vec<u32>, mut carries_loss: Vec<bool>) -> Self {
        if let Some(first) = carries_loss.first_mut() {
            *first = false;
        }
        let full_target_tokens = carries_loss.iter().filter(|loss| **loss).count();
        Self { full_length: ids.len(), ids, carries_loss, full_target_tokens, ..Self::default() }
    }

    /// The sequences of a chosen and a rejected answer, end to end.
    #[must_use]
    pub fn pair(mut chosen: Self, rejected: Self) -> Self {
        chosen.second = chosen.ids.len();
        chosen.ids.extend(rejected.ids);
        chosen.carries_loss.extend(rejected.carries_loss);
        chosen.full_length = chosen.full_length.max(rejected.full_length);
        chosen.full_target_tokens += rejected.full_target_tokens;
        chosen
    }

    /// A row as it was stored; the second of two sequences begins at `second`.
    pub(in crate::data) fn of_record(mut ids: Vec<u32>, mut carries_loss: Vec<bool>, second: usize) -> Self {
        if second == 0 {
            return Self::of_parts(ids, carries_loss);
        }
        let (rejected, loss) = (ids.split_off(second), carries_loss.split_off(second));
        Self::pair(Self::of_parts(ids, carries_loss), Self::of_parts(rejected, loss))
    }

    /// The sequences of the row: their places in `ids`.
    #[must_use]
    pub fn sequences(&self) -> Vec<Range<usize>> {
        let [first, second] = [0..self.second, self.second..self.ids.len()];
        if first.is_empty() { vec![second] } else { vec![first, second] }
    }

    /// Index, in its sequence, of the first token that carries loss, in the sequence where it is the later one, and of a pair no
    /// earlier than where its sequences differ; `None` where a sequence has none, or they are equal.
    #[must_use]
    pub fn first_target(&self) -> Option<usize> {
        let first = |sequence: Range<usize>| self.carries_loss[sequence].iter().position(|carries_loss| *carries_loss);
        let later = |latest: usize, first: Option<usize>| first.map(|first| latest.max(first));
        self.sequences().into_iter().map(first).chain([self.first_difference()]).try_fold(0, later)
    }

    /// Index of the first token in which the sequences of a pair differ; 0 where there is one sequence.
    fn first_difference(&self) -> Option<usize> {
        let (chosen, rejected) = self.ids.split_at(self.second);
        if chosen == rejected {
            return None;
        }
        let num_equal = chosen.iter().zip(rejected).take_while(|(chosen, rejected)| chosen == rejected).count();
        Some(num_equal)
    }

    /// A window of a longer text; every token carries loss.
    #[must_use]
    pub(in crate::data) fn window(ids: Vec<u32>) -> Self {
        let carries_loss = vec![true; ids.len()];
        Self::of_parts(ids, carries_loss)
    }

    /// The same with a mark at the end of every sequence alone, where a score is read.
    #[must_use]
    pub(in crate::data) fn marked_at_ends(mut self) -> Self {
        let sequences = self.sequences();
        self.carries_loss.fill(false);
        sequences.iter().for_each(|sequence| self.carries_loss[sequence.end - 1] = true);
        self.full_target_tokens = sequences.len();
        self
    }

    /// Puts loss on what lies between token `first` and the first token that carries loss.
    pub(super) fn begin_loss_at(&mut self, first: usize) {
        let until = self.first_target().unwrap_or(first);
        self.carries_loss[first..until].fill(true);
        self.full_target_tokens = self.num_target_tokens();
    }

    /// The first `max_length` tokens of the row, of a pair those of each sequence.
    #[must_use]
    pub fn cut(mut self, max_length: usize) -> Self {
        let end = self.second + max_length;
        if self.second == 0 {
            let tokens = self.ids.iter().copied().zip(self.carries_loss.iter().copied());
            self.rest = tokens.skip(end).take(max_length).collect();
        }
        self.ids.truncate(end);
        self.carries_loss.truncate(end);
        if self.second > max_length {
            self.ids.drain(max_length..self.second);
            self.carries_loss.drain(max_length..self.second);
            self.second = max_length;
        }
        self
    }

    /// Number of tokens that carry loss.
    #[must_use]
    pub fn num_target_tokens(&self) -> usize {
        self.carries_loss.iter().filter(|loss| **loss).count()
    }

    /// Whether tokens were cut off.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.sequences().into_iter().all(|sequence| sequence.len() < self.full_length)
    }

    /// Whether truncation left nothing of an answer.
    #[must_use]
    pub fn is_answer_cut(&self) -> bool {
        self.full_target_tokens > 0 && self.first_target().is_none()
    }
}
