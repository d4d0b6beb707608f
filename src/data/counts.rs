//! Counts of what was found in the rows.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use super::encode::EncodedRow;

/// Counts of what was found in the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCounts {
    /// Rows that were read.
    pub rows: u64,
    /// Rows that were longer than `max_length`.
    pub truncated: u64,
    /// Truncated rows that have nothing left of their answer.
    pub answer_cut: u64,
    /// Rows that were left out because none of their tokens carries loss (includes the rows of `answer_cut`).
    pub without_targets: u64,
    /// Rows that cannot be used and were left out because of `on_bad_row = "skip"`.
    pub bad: u64,
    /// Tokens of the rows that were not left out.
    pub tokens: u64,
    /// Tokens that carry loss.
    pub target_tokens: u64,
    /// Length of the longest row before truncation.
    pub longest_tokens: u64,
}

impl RowCounts {
    /// Counts a row that is in a micro-batch.
    pub(super) fn add(&mut self, row: &EncodedRow) {
        self.rows += 1;
        self.truncated += u64::from(row.is_truncated());
        self.tokens += row.ids.len() as u64;
        self.target_tokens += row.num_target_tokens() as u64;
        self.longest_tokens = self.longest_tokens.max(row.full_length as u64);
    }
}

impl AddAssign for RowCounts {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.truncated += other.truncated;
        self.answer_cut += other.answer_cut;
        self.without_targets += other.without_targets;
        self.bad += other.bad;
        self.tokens += other.tokens;
        self.target_tokens += other.target_tokens;
        self.longest_tokens = self.longest_tokens.max(other.longest_tokens);
    }
}
