//! A micro-batch in host memory.

use super::encode::EncodedRow;

/// One micro-batch: rows of tokens, padded on the right to one length.
///
/// Every token belongs to at most one [`Document`]; what belongs to none is padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Length of every row, in tokens.
    pub row_length: usize,
    /// Token ids, `[rows * row_length]`.
    pub input_ids: Vec<u32>,
    /// Stretches that attend to nothing but themselves and whose positions start at 0, in order.
    pub documents: Vec<Document>,
    /// The tokens to predict, in order of their position. Already shifted: `token` is what follows `position`.
    pub targets: Vec<Target>,
    /// Where each document came from, parallel to `documents`: for messages to the user.
    pub sources: Vec<RowSource>,
}

/// A stretch of a row that attends to nothing but itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document {
    /// Index of its first token in [`Batch::input_ids`].
    pub start: usize,
    /// Number of its tokens.
    pub len: usize,
}

/// A token that carries loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Index in [`Batch::input_ids`] of the token from which it is predicted.
    pub position: usize,
    /// Its token id.
    pub token: u32,
}

/// Where a row was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSource {
    /// Index of the file, in the order of the pipeline's file list.
    pub file: usize,
    /// Index of the row in that file, from 0.
    pub row: usize,
}

impl Batch {
    /// Puts documents into rows, `rows[i]` end to end into row i, each row padded on the right with `pad_id` to the
    /// longest. The first token of a document is not predicted, so no target crosses a boundary.
    #[must_use]
    pub fn of_rows(rows: &[Vec<(RowSource, EncodedRow)>], pad_id: u32) -> Self {
        let length = |row: &Vec<(RowSource, EncodedRow)>| row.iter().map(|(_, document)| document.ids.len()).sum();
        let row_length = rows.iter().map(length).max().unwrap_or(0);
        let mut batch = Self { row_length, ..Self::default() };
        for (index, row) in rows.iter().enumerate() {
            for (source, document) in row {
                let start = batch.input_ids.len();
                batch.input_ids.extend(&document.ids);
                batch.documents.push(Document { start, len: document.ids.len() });
                batch.sources.push(*source);
                // The one place where labels are shifted: the token at `at` is predicted from `at - 1`.
                let tokens = document.ids.iter().zip(&document.carries_loss).enumerate().skip(1);
                let targets = tokens.filter(|(_, (_, carries_loss))| **carries_loss);
                batch.targets.extend(targets.map(|(at, (&token, _))| Target { position: start + at - 1, token }));
            }
            batch.input_ids.resize((index + 1) * row_length, pad_id);
        }
        batch
    }

    /// Number of rows.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.input_ids.len().checked_div(self.row_length).unwrap_or(0)
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

    /// Position of every token within its document, `[rows * row_length]`; padding is at 0.
    #[must_use]
    pub fn positions(&self) -> Vec<u32> {
        let mut positions = vec![0; self.input_ids.len()];
        for document in &self.documents {
            for (offset, position) in positions[document.start..][..document.len].iter_mut().enumerate() {
                *position = u32::try_from(offset).unwrap_or(u32::MAX);
            }
        }
        positions
    }

    /// The same documents end to end in a single row, without padding.
    #[must_use]
    pub fn without_padding(&self) -> Self {
        let num_tokens = self.num_tokens();
        let mut new_index = vec![0; self.input_ids.len()];
        let mut input_ids = Vec::with_capacity(num_tokens);
        let mut documents = Vec::with_capacity(self.documents.len());
        for document in &self.documents {
            let start = input_ids.len();
            documents.push(Document { start, len: document.len });
            for offset in 0..document.len {
                new_index[document.start + offset] = start + offset;
                input_ids.push(self.input_ids[document.start + offset]);
            }
        }
        let targets = self.targets.iter().map(|t| Target { position: new_index[t.position], token: t.token }).collect();
        Self { row_length: num_tokens, input_ids, documents, targets, sources: self.sources.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_padding_keeps_documents_targets_and_positions() {
        let batch = Batch {
            row_length: 4,
            input_ids: vec![1, 2, 0, 0, 3, 4, 5, 0],
            documents: vec![Document { start: 0, len: 2 }, Document { start: 4, len: 3 }],
            targets: vec![Target { position: 0, token: 2 }, Target { position: 5, token: 5 }],
            sources: vec![RowSource { file: 0, row: 0 }, RowSource { file: 0, row: 1 }],
        };
        let flat = batch.without_padding();
        assert_eq!(flat.input_ids, [1, 2, 3, 4, 5]);
        assert_eq!(flat.targets, [Target { position: 0, token: 2 }, Target { position: 3, token: 5 }]);
        assert_eq!(flat.positions(), [0, 1, 0, 1, 2]);
        assert_eq!((flat.num_rows(), flat.num_tokens(), batch.num_rows()), (1, 5, 2));
    }
}
