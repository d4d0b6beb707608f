//! A micro-batch in host memory.

mod prefixes;

use std::ops::Range;

use serde::{Deserialize, Deserializer, Serialize};

use super::encode::EncodedRow;
use crate::config::RowKind;

/// One micro-batch: rows of tokens end to end, without padding.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// Token ids of all rows, `[tokens]`.
    pub input_ids: Vec<u32>,
    /// Tokens of each row.
    pub row_lengths: Vec<usize>,
    /// Stretches of tokens, in order. Each attends only to itself, its positions start at 0, and it lies within one
    /// row.
    pub documents: Vec<Document>,
    /// The tokens to predict, in order of their position. Already shifted: `token` is what follows `position`. Of rows that are
    /// scored, the last token of each.
    pub targets: Vec<Target>,
    /// The tokens before its own that each document continues, parallel to `documents`: the beginning of one before it. Empty
    /// where none does, and always before it is [asked for](Self::sharing_prefixes).
    #[serde(skip)]
    pub prefixes: Vec<Range<usize>>,
    /// Where each document came from, parallel to `documents`: for messages to the user.
    pub sources: Vec<RowSource>,
    /// What an objective of preferences knows of each document, parallel to `documents`; empty for others. The documents of
    /// a pair follow one another, that of the chosen answer first.
    pub answers: Vec<Answer>,
    /// Log-probability of each target in nats, parallel to `targets`, by the model that wrote it; empty where that is the one
    /// in training.
    #[serde(deserialize_with = "null_is_nan")]
    pub written: Vec<f32>,
    /// The prompts of labelled rows, each with the answer of another: of these the divergence from the base is measured.
    pub mismatched: Option<Box<Batch>>,
}

/// An answer of a preference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Whether it is the chosen one of a pair, or has a good label.
    pub is_good: bool,
    /// The first so many targets of its document are the prompt's.
    pub prompt_targets: usize,
    /// How much better it is than the other answers to its prompt.
    pub advantage: f32,
    /// By how much the score of a pair's chosen answer shall be above that of its rejected one, more than at all.
    #[serde(default)]
    pub margin: f32,
}

/// A stretch of a row that attends to nothing but itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Index of its first token in [`Batch::input_ids`].
    pub start: usize,
    /// Number of its tokens.
    pub len: usize,
}

/// A token that carries loss (is to be predicted).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// Index in [`Batch::input_ids`] of the token that predicts it.
    pub position: usize,
    /// Id of the token to predict.
    pub token: u32,
}

/// The file and row that a document was read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowSource {
    /// Index of the file, in the order of the dataset's file list.
    pub file: usize,
    /// Index of the row in that file, from 0.
    pub row: usize,
}

/// Length to which rows are padded on devices that compute padding; the longest row has `longest` tokens. It is a
/// multiple of 64, beyond 1024 of 128, so that most steps have the same shapes and use the same tuned and compiled
/// kernels, and loads are as wide as a vector.
#[must_use]
pub fn padded_length(longest: usize) -> usize {
    longest.next_multiple_of(if longest > 1024 { 128 } else { 64 })
}

impl Batch {
    /// Puts documents end to end, `rows[i]` into row i. The first token of a document is not predicted, so no target
    /// crosses a document boundary.
    #[must_use]
    pub fn of_rows(rows: &[Vec<(RowSource, EncodedRow)>]) -> Self {
        let mut batch = Self::default();
        for row in rows {
            let row_start = batch.input_ids.len();
            row.iter().for_each(|(source, document)| batch.push(*source, &document.ids, &document.carries_loss));
            batch.row_lengths.push(batch.input_ids.len() - row_start);
        }
        batch
    }

    /// The same for rows of a kind. The two sequences of a pair are rows of their own, but where rows hold several.
    #[must_use]
    pub fn of_kind(kind: RowKind, rows: &[Vec<(RowSource, EncodedRow)>], max_length: usize) -> Self {
        if matches!(kind, RowKind::Sequence | RowKind::Prompt) {
            return Self::of_rows(rows);
        }
        let mut batch = Self::default();
        let is_packed = rows.iter().any(|row| row.len() > 1);
        for row in rows {
            let mut row_start = batch.input_ids.len();
            for (source, encoded) in row {
                for (index, place) in encoded.sequences().into_iter().enumerate() {
                    if index == 1 && !is_packed {
                        batch.row_lengths.push(batch.input_ids.len() - row_start);
                        row_start = batch.input_ids.len();
                    }
                    let (ids, carries_loss) = (&encoded.ids[place.clone()], &encoded.carries_loss[place]);
                    let first = carries_loss.iter().position(|carries_loss| *carries_loss).unwrap_or_default();
                    let is_good = if kind.is_pair() { index == 0 } else { !encoded.is_bad_answer };
                    let mut answer = Answer { is_good, prompt_targets: 0, advantage: 0.0, margin: encoded.margin };
                    if kind == RowKind::PairWithPrompt && index == 0 {
                        answer.prompt_targets = first.saturating_sub(1);
                        let all: Vec<bool> =
                            (0..ids.len()).map(|at| at > 0 && (at < first || carries_loss[at])).collect();
                        batch.push(*source, ids, &all);
                    } else if kind == RowKind::ScoredPair {
                        batch.push_scored(*source, ids);
                    } else {
                        batch.push(*source, ids, carries_loss);
                    }
                    batch.answers.push(answer);
                }
            }
            batch.row_lengths.push(batch.input_ids.len() - row_start);
            if kind.is_pair() && row.is_empty() && !is_packed {
                batch.row_lengths.push(0);
            }
        }
        if kind == RowKind::Labelled {
            batch.mismatched = mismatched(rows, max_length).map(Box::new);
        }
        batch
    }

    /// Adds a document without a row of its own.
    pub(crate) fn push(&mut self, source: RowSource, ids: &[u32], carries_loss: &[bool]) {
        let start = self.input_ids.len();
        self.input_ids.extend(ids);
        self.documents.push(Document { start, len: ids.len() });
        self.sources.push(source);
        // Labels are shifted only here: the token at `at` is predicted from `at - 1`.
        let tokens = ids.iter().zip(carries_loss).enumerate().skip(1);
        let targets = tokens.filter(|(_, (_, carries_loss))| **carries_loss);
        self.targets.extend(targets.map(|(at, (&token, _))| Target { position: start + at - 1, token }));
    }

    /// Adds a document that is scored at its end, without a row of its own.
    pub(crate) fn push_scored(&mut self, source: RowSource, ids: &[u32]) {
        self.push(source, ids, &[]);
        self.targets.extend(ids.last().map(|&token| Target { position: self.input_ids.len() - 1, token }));
    }

    /// Some of its rows; of preferences, which are compared with one another, all of them.
    #[must_use]
    pub fn part(&self, rows: Range<usize>) -> Self {
        if !self.answers.is_empty() {
            return self.clone();
        }
        let start: usize = self.row_lengths[..rows.start].iter().sum();
        let row_lengths = self.row_lengths[rows].to_vec();
        let tokens = start..start + row_lengths.iter().sum::<usize>();
        let is_in = |document: &Document| document.len > 0 && tokens.contains(&document.start);
        let documents = self.documents.iter().filter(|document| is_in(document));
        let sources = self.sources.iter().zip(&self.documents).filter(|(_, document)| is_in(document));
        let targets = self.targets.iter().filter(|target| tokens.contains(&target.position));
        Self {
            input_ids: self.input_ids[tokens.clone()].to_vec(),
            row_lengths,
            documents: documents.map(|document| Document { start: document.start - start, ..*document }).collect(),
            targets: targets.map(|target| Target { position: target.position - start, ..*target }).collect(),
            sources: sources.map(|(source, _)| *source).collect(),
            ..Self::default()
        }
    }

    /// Number of rows, with those that hold no tokens.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.row_lengths.len()
    }

    /// Number of padding tokens that [`padded`](Self::padded) adds.
    #[must_use]
    pub fn num_padding_tokens(&self) -> usize {
        self.num_rows() * self.padded_length() - self.input_ids.len()
    }

    fn padded_length(&self) -> usize {
        padded_length(self.row_lengths.iter().copied().max().unwrap_or(0))
    }

    /// Number of tokens that are not padding.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.documents.iter().map(|document| document.len).sum()
    }

    /// Number of tokens that carry loss.
    #[must_use]
    pub fn num_target_tokens(&self) -> usize {
        self.targets.len()
    }

    /// Position of every token within its document, `[tokens]`; padding has position 0.
    #[must_use]
    pub fn positions(&self) -> Vec<u32> {
        let mut positions = vec![0; self.input_ids.len()];
        for (index, document) in self.documents.iter().enumerate() {
            let before = self.prefix(index).len();
            for (offset, position) in positions[document.start..][..document.len].iter_mut().enumerate() {
                *position = u32::try_from(before + offset).unwrap_or(u32::MAX);
            }
        }
        positions
    }

    /// The tokens that document `index` continues.
    #[must_use]
    pub fn prefix(&self, index: usize) -> Range<usize> {
        self.prefixes.get(index).cloned().unwrap_or_default()
    }

    /// The batch with all rows at one [length](padded_length), padded on the right with token 0. Padding belongs to no
    /// document.
    #[must_use]
    pub fn padded(&self) -> Self {
        let length = self.padded_length();
        let mut padded = Self {
            row_lengths: vec![length; self.num_rows()],
            sources: self.sources.clone(),
            answers: self.answers.clone(),
            written: self.written.clone(),
            mismatched: self.mismatched.clone(),
            ..Self::default()
        };
        let (mut start, mut documents, mut targets) =
            (0, self.documents.iter().peekable(), self.targets.iter().peekable());
        for (row, row_length) in self.row_lengths.iter().enumerate() {
            let (end, padding) = (start + row_length, row * length - start);
            while let Some(document) = documents.next_if(|document| document.start < end) {
                padded.documents.push(Document { start: document.start + padding, ..*document });
            }
            while let Some(target) = targets.next_if(|target| target.position < end) {
                padded.targets.push(Target { position: target.position + padding, ..*target });
            }
            padded.input_ids.extend(&self.input_ids[start..end]);
            padded.input_ids.resize((row + 1) * length, 0);
            start = end;
        }
        padded
    }
}

fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
    let numbers = Vec::<Option<f32>>::deserialize(deserializer)?;
    Ok(numbers.into_iter().map(|number| number.unwrap_or(f32::NAN)).collect())
}

/// Every prompt with the whole answer of the row before, the first with that of the last, as in TRL; then at most `max_length`
/// tokens each.
fn mismatched(rows: &[Vec<(RowSource, EncodedRow)>], max_length: usize) -> Option<Batch> {
    let rows: Vec<_> =
        rows.iter().flatten().filter_map(|(source, row)| Some((source, row, row.first_target()?))).collect();
    let mut batch = Batch::default();
    for (index, (source, row, first)) in rows.iter().enumerate() {
        let (_, other, answer) = rows[(index + rows.len() - 1) % rows.len()];
        let prompt = row.ids[..*first].iter().map(|id| (*id, false));
        let kept = other.ids.iter().copied().zip(other.carries_loss.iter().copied()).skip(answer);
        let joined = prompt.chain(kept).chain(other.rest.iter().copied()).take(max_length);
        let (ids, carries_loss): (Vec<u32>, Vec<bool>) = joined.unzip();
        batch.push(**source, &ids, &carries_loss);
        batch.row_lengths.push(ids.len());
    }
    (!rows.is_empty()).then_some(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_keeps_documents_targets_and_positions() {
        let batch = Batch {
            input_ids: vec![1, 2, 3, 4, 5, 6],
            row_lengths: vec![2, 4, 0],
            documents: vec![
                Document { start: 0, len: 2 },
                Document { start: 2, len: 3 },
                Document { start: 5, len: 1 },
            ],
            targets: vec![Target { position: 0, token: 2 }, Target { position: 3, token: 5 }],
            sources: vec![RowSource { file: 0, row: 0 }; 3],
            ..Batch::default()
        };
        let padded = batch.padded();
        let starting = |rows: [&[u32]; 3]| rows.map(|row| [row, &vec![0; 64 - row.len()]].concat()).concat();
        assert_eq!(padded.input_ids, starting([&[1, 2], &[3, 4, 5, 6], &[]]));
        assert_eq!(padded.documents.iter().map(|d| (d.start, d.len)).collect::<Vec<_>>(), [(0, 2), (64, 3), (67, 1)]);
        assert_eq!(padded.targets, [Target { position: 0, token: 2 }, Target { position: 65, token: 5 }]);
        assert_eq!(padded.positions(), starting([&[0, 1], &[0, 1, 2, 0], &[]]));
        assert_eq!((batch.num_padding_tokens(), padded.num_padding_tokens(), padded.num_tokens()), (186, 0, 6));
        assert_eq!(padded.padded(), padded);
    }

    #[test]
    fn parts_hold_the_documents_and_targets_of_their_rows() {
        let batch = Batch {
            input_ids: (0..9).collect(),
            row_lengths: vec![3, 4, 2],
            documents: [(0, 3), (3, 2), (5, 2), (7, 2)].map(|(start, len)| Document { start, len }).to_vec(),
            targets: [1, 3, 6, 7].map(|position| Target { position, token: 9 }).to_vec(),
            sources: (0..4).map(|row| RowSource { file: 0, row }).collect(),
            ..Batch::default()
        };
        assert_eq!(batch.part(0..3), batch);
        let part = batch.part(1..3);
        assert_eq!((&part.input_ids[..], &part.row_lengths[..]), (&[3, 4, 5, 6, 7, 8][..], &[4, 2][..]));
        assert_eq!(part.documents.iter().map(|d| (d.start, d.len)).collect::<Vec<_>>(), [(0, 2), (2, 2), (4, 2)]);
        assert_eq!(part.targets.iter().map(|target| target.position).collect::<Vec<_>>(), [0, 3, 4]);
        assert_eq!(part.sources.iter().map(|source| source.row).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn rows_are_computed_at_few_lengths() {
        let lengths = [0, 1, 64, 65, 1000, 1024, 1025, 4096].map(padded_length);
        assert_eq!(lengths, [0, 64, 64, 128, 1024, 1024, 1152, 4096]);
    }

    fn row(ids: &[u32], first_target: usize) -> EncodedRow {
        EncodedRow::of_parts(ids.to_vec(), (0..ids.len()).map(|at| at >= first_target).collect())
    }

    #[test]
    fn a_pair_is_two_rows_or_two_documents_of_one() {
        let source = RowSource { file: 0, row: 0 };
        let pair = |id: u32| (source, EncodedRow::pair(row(&[1, id, 2], 1), row(&[1, 9], 1)));
        let rows = [vec![pair(3)], vec![pair(4)], vec![]];
        let batch = Batch::of_kind(RowKind::Pair, &rows, 8);
        assert_eq!(batch.row_lengths, [3, 2, 3, 2, 0, 0]);
        assert_eq!(batch.answers.iter().map(|answer| answer.is_good).collect::<Vec<_>>(), [true, false, true, false]);
        let packed = Batch::of_kind(RowKind::Pair, &[vec![pair(3), pair(4)]], 8);
        assert_eq!((packed.row_lengths, packed.documents.len()), (vec![10], 4));
        let with_prompt = EncodedRow::pair(row(&[1, 5, 6, 2], 2), row(&[1, 5, 9], 2));
        let batch = Batch::of_kind(RowKind::PairWithPrompt, &[vec![(source, with_prompt)]], 8);
        assert_eq!(batch.answers.iter().map(|answer| answer.prompt_targets).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(batch.targets.iter().map(|target| target.token).collect::<Vec<_>>(), [5, 6, 2, 9]);
    }

    #[test]
    fn labelled_rows_are_compared_with_the_answers_before_them() {
        let source = RowSource { file: 0, row: 0 };
        let bad = EncodedRow { is_bad_answer: true, ..row(&[1, 20, 21, 22], 2) };
        let rows = [vec![(source, row(&[1, 10, 11], 2))], vec![(source, bad)]];
        let batch = Batch::of_kind(RowKind::Labelled, &rows, 3);
        assert_eq!(batch.answers.iter().map(|answer| answer.is_good).collect::<Vec<_>>(), [true, false]);
        let mismatched = batch.mismatched.unwrap();
        assert_eq!((mismatched.row_lengths, mismatched.input_ids), (vec![3, 3], vec![1, 10, 21, 1, 20, 11]));
        assert_eq!(mismatched.targets.iter().map(|target| target.token).collect::<Vec<_>>(), [21, 11]);
        // An answer that was cut behind its own prompt is whole behind a shorter one.
        let rows = [row(&[1, 9, 9, 30, 31, 32], 3).cut(4), row(&[1, 40], 1)].map(|row| vec![(source, row)]);
        let mismatched = Batch::of_kind(RowKind::Labelled, &rows, 4).mismatched.unwrap();
        assert_eq!((mismatched.row_lengths, mismatched.input_ids), (vec![4, 4], vec![1, 9, 9, 40, 1, 30, 31, 32]));
        assert_eq!(mismatched.targets.iter().map(|target| target.token).collect::<Vec<_>>(), [40, 30, 31, 32]);
    }
}
