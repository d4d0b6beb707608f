//! The rows of a data file, as tokens.

use rayon::prelude::*;

use super::cache::{RowEntry, TokenStore};
use super::counts::RowCounts;
use super::encode::{EncodedRow, NO_ANSWER};
use super::error::DataError;
use super::files::{FileInfo, FileKind};
use super::findings::RowFindings;
use super::rows::RowFile;
use crate::config::DataFormat;
use crate::util::stats::as_f64;

mod addresses;
mod opened;

pub(super) use opened::{OpenedFile, Reading};

/// The tokens of a .txt file are stored in pieces of this many tokens.
const PIECE_TOKENS: usize = 1024;

/// The rows of a file, as tokens.
#[derive(Debug)]
pub(super) struct DataFile {
    pub(super) info: FileInfo,
    /// Number of the file's first row within the dataset.
    pub(super) first_row: u32,
    /// SHA-256 of its content.
    pub(super) content: [u8; 32],
    max_length: usize,
    /// Largest token id that the tokenizer has.
    max_id: u32,
    counts: RowCounts,
    /// Rows that are used and whose label says that the answer is bad.
    pub(super) num_bad_answers: usize,
    bad_rows: RowFindings,
    /// Rows without a token that carries loss, whatever `max_length` is.
    unanswered_rows: RowFindings,
    odd_rows: RowFindings,
    /// Letters beyond ASCII, the tokens of them, and all tokens.
    letters: [u64; 3],
    /// Rows that are cut but still have tokens with loss. `counts` lacks their target tokens.
    cut_rows: Vec<usize>,
    /// Rows of which every token that carries loss is cut off.
    cut_off_rows: RowFindings,
    tokens: TokenStore,
}

impl DataFile {
    /// The lengths of the windows of a text; `limited` says how many of them are read.
    fn count_windows(&mut self, pieces: &[RowEntry], limited: impl Fn(usize) -> usize) -> Vec<u32> {
        let num_tokens: usize = pieces.iter().map(|piece| piece.num_tokens() as usize).sum();
        let windows = (0..num_tokens).step_by(self.max_length).map(|start| self.max_length.min(num_tokens - start));
        // The first token is not predicted, so a window of one token has no target.
        let mut lengths: Vec<u32> =
            windows.map(|length| if length < 2 { 0 } else { u32::try_from(length).unwrap_or(u32::MAX) }).collect();
        lengths.truncate(limited(lengths.len()));
        self.counts.rows = lengths.len() as u64;
        self.counts.tokens = lengths.iter().copied().map(u64::from).sum();
        self.counts.target_tokens = lengths.iter().map(|length| u64::from(length.saturating_sub(1))).sum();
        self.counts.longest_tokens = lengths.iter().copied().max().map_or(0, u64::from);
        lengths
    }

    /// The lengths of the rows. Without `rows`, which say where they are, only places of odd ones are known.
    fn count_rows(&mut self, entries: &[RowEntry], rows: Option<&RowFile>) -> Vec<u32> {
        let limit = u32::try_from(self.max_length).unwrap_or(u32::MAX);
        let mut lengths = Vec::with_capacity(entries.len());
        for (row, entry) in entries.iter().enumerate() {
            let (length, counts) = (entry.longest(), &mut self.counts);
            // An answer needs room behind a prompt.
            let is_filled = self.info.format == DataFormat::Prompt && length >= limit;
            let is_usable = entry.is_usable(limit) && !is_filled;
            counts.rows += 1;
            counts.bad += u64::from(entry.is_bad());
            counts.truncated += u64::from(length > limit || is_filled);
            counts.longest_tokens = counts.longest_tokens.max(length.into());
            if !is_usable && !entry.is_bad() {
                counts.without_targets += 1;
            }
            if !is_usable && entry.has_targets() {
                counts.answer_cut += 1;
                let reason = if is_filled {
                    format!("the prompt has {length} tokens, and `data.max_length` is {limit}: no answer has room")
                } else if entry.is_pair() {
                    format!(
                        "of {length} tokens, the first {limit} (`data.max_length`) lack an answer, or how the two differ"
                    )
                } else {
                    format!("of {length} tokens, none that carries loss is in the first {limit} (`data.max_length`)")
                };
                self.cut_off_rows.add(row, &reason);
            }
            if is_usable {
                self.num_bad_answers += usize::from(entry.is_bad_answer());
                counts.tokens += u64::from(entry.cut(limit));
                if length <= limit {
                    counts.target_tokens += u64::from(entry.num_targets());
                } else {
                    self.cut_rows.push(row);
                }
            }
            lengths.push(if is_usable { entry.cut(limit) } else { 0 });
        }
        let place = |row: &usize| self.odd_rows.place_of(*row).unwrap_or_else(|| format!("row {}", row + 1));
        self.cut_off_rows
            .place(|named| rows.map_or_else(|| named.iter().map(place).collect(), |rows| rows.places(named)));
        lengths
    }

    /// Counts of the rows. Reads the rows that are cut.
    pub(super) fn all_counts(&self) -> Result<RowCounts, DataError> {
        let target_tokens = |row: &usize| self.read(*row).map(|row| row.num_target_tokens() as u64);
        let of_cut: u64 = self.cut_rows.par_iter().map(target_tokens).sum::<Result<_, _>>()?;
        Ok(RowCounts { target_tokens: self.counts.target_tokens + of_cut, ..self.counts })
    }

    /// An error if none of the rows can be used.
    pub(super) fn refuse_if_no_row_is_usable(&self) -> Result<(), DataError> {
        if self.bad_rows.num_rows < self.info.num_rows as u64 {
            return Ok(());
        }
        let (_, first) = self.bad_rows.messages().next().unwrap_or_default();
        let reason = format!("none of its {} rows can be used; the first: {first}", self.info.num_rows);
        Err(DataError::Rows(vec![DataError::File { path: self.info.path.clone(), reason }]))
    }

    /// Whether all rows are conversations without an answer.
    pub(super) fn is_of_prompts(&self) -> bool {
        let mut reasons = self.unanswered_rows.messages();
        self.unanswered_rows.num_rows == self.info.num_rows as u64
            && reasons.all(|(_, text)| text.starts_with(NO_ANSWER))
    }

    /// An error for each kind of bad rows.
    pub(super) fn mistakes(&self) -> Vec<DataError> {
        let path = &self.info.path;
        let error = |(place, reason)| DataError::Row { path: path.clone(), place, reason };
        let mut errors: Vec<DataError> = self.bad_rows.messages().map(error).collect();
        let unnamed = self.bad_rows.num_unnamed();
        if unnamed > 0 {
            let reason = format!("{unnamed} more rows cannot be used, for other reasons");
            errors.push(DataError::File { path: path.clone(), reason });
        }
        errors
    }

    /// Warnings about rows that are left out, cut or unusual.
    pub(super) fn warnings(&self) -> Vec<String> {
        let (path, rows) = (self.info.path.display(), self.info.num_rows);
        let list = |findings: &RowFindings| -> String {
            let texts = findings.messages().map(|(place, text)| (place, text.replace('\n', "\n  ")));
            texts.map(|(place, text)| format!("\n  {place}: {text}")).collect()
        };
        let mut warnings: Vec<String> = self.info.note.iter().map(|note| format!("{path}: {note}")).collect();
        if self.bad_rows.num_rows > 0 {
            let count = self.bad_rows.num_rows;
            warnings.push(format!(
                "{path}: {count} of {rows} rows cannot be used and are skipped:{}",
                list(&self.bad_rows)
            ));
        }
        let count = self.counts.without_targets;
        if count > 0 {
            let list = list(&self.cut_off_rows) + &list(&self.unanswered_rows);
            warnings.push(format!("{path}: {count} of {rows} rows carry no loss and are left out:{list}"));
        }
        let RowCounts { truncated, answer_cut, longest_tokens, .. } = self.counts;
        if truncated > answer_cut {
            warnings.push(format!(
                "{path}: {} of {rows} rows are longer than `data.max_length` = {} and lose their end\n  hint: \
                 the longest has {longest_tokens} tokens",
                truncated - answer_cut,
                self.max_length
            ));
        }
        if self.odd_rows.num_rows > 0 {
            warnings.push(format!(
                "{path}: {} of {rows} rows are odd:{}",
                self.odd_rows.num_rows,
                list(&self.odd_rows)
            ));
        }
        let [letters, of_letters, tokens] = self.letters.map(as_f64);
        // Scripts that a tokenizer knows take half a token a letter and less, the Chinese two thirds.
        if letters >= 50.0 && of_letters > 0.9 * letters && of_letters > tokens / 3.0 {
            warnings.push(format!(
                "{path}: {:.1} tokens a letter: the tokenizer hardly knows the script of these rows\n  hint: a model made for \
                 the language writes them in a fraction of the tokens",
                of_letters / letters
            ));
        }
        warnings
    }

    /// The tokens of row `row`, at most `max_length` of them.
    pub(super) fn read(&self, row: usize) -> Result<EncodedRow, DataError> {
        let max_length = self.max_length;
        if self.info.kind != FileKind::Txt {
            return Ok(self.record(row)?.cut(max_length));
        }
        let mut ids = Vec::with_capacity(max_length.min(self.tokens.num_records() * PIECE_TOKENS));
        let mut at = row * max_length;
        while ids.len() < max_length && at / PIECE_TOKENS < self.tokens.num_records() {
            let piece = self.record(at / PIECE_TOKENS)?.ids;
            let rest = piece.get(at % PIECE_TOKENS..).unwrap_or_default();
            ids.extend(rest.iter().take(max_length - ids.len()));
            at = (at / PIECE_TOKENS + 1) * PIECE_TOKENS;
        }
        Ok(EncodedRow::window(ids))
    }

    /// Reads a record of the token file. Records were checked when written, so damage here comes from the disk.
    fn record(&self, index: usize) -> Result<EncodedRow, DataError> {
        self.tokens.read(index, self.max_id).ok_or_else(|| {
            // Without the file, the next start makes the tokens again.
            let path = self.tokens.file().map(|(_, path)| path);
            if let Some(path) = path {
                drop(std::fs::remove_file(path));
            }
            let reason = format!("the tokens of row {} are damaged on the disk\n  hint: start again", index + 1);
            DataError::Tokens { path: path.unwrap_or(&self.info.path).into(), reason }
        })
    }
}
