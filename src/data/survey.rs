//! What all rows will be like, told from some of them: how many an epoch visits and how many tokens they have.
//!
//! Bounded work whatever the size of the files, and nothing is written: rows are spread over the files, and where there
//! are too many bytes to count the rows, their number follows from the bytes.

use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::cache::LARGE_FILE_BYTES;
use super::config::{DataConfig, DataSource, EvalSplit};
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::files::FileKind;
use super::files::excerpt::{Excerpt, ExcerptRow, in_shares};
use super::formats::RowFormat;
use super::order::{Purpose, num_visits, shuffle};
use super::packing::best_fit;
use super::sources::matching_files;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::windows::{num_tokens, tokens_in_proportion};

/// Rows that are tokenised, and their bytes.
const MAX_ROWS: usize = 512;
const MAX_BYTES: usize = 2 << 20;
/// Rows of a source that are tokenised at least.
const MIN_ROWS: usize = 16;
/// Files of an entry that are looked at.
const MAX_FILES: usize = 8;
/// Text files below this size are tokenised as a whole.
const WHOLE_TEXT_BYTES: u64 = 1 << 20;
/// Rows that stand for an epoch at most.
const MAX_EPOCH_ROWS: usize = 4096;
/// Bytes of a token at most, where a row is too long to be tokenised.
const BYTES_PER_TOKEN: usize = 8;

/// Size of a row, or of one of the documents in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowSize {
    /// Its tokens, at most `max_length`.
    pub tokens: usize,
    /// Those that carry loss. A row that has none is left out of its micro-batch.
    pub target_tokens: usize,
}

/// The rows that an epoch visits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Rows that an epoch visits.
    pub rows_per_epoch: u64,
    /// They were counted; else their number follows from the bytes of the files.
    pub is_counted: bool,
    /// Rows that were tokenised.
    pub num_sampled: usize,
    /// What stands for an epoch, in the order of visits: all rows, or so many drawn from those that were tokenised.
    rows: Vec<RowSize>,
    /// Length of rows that are packed.
    packed_length: Option<usize>,
}

/// What was seen of one entry of the recipe.
struct Seen {
    num_rows: u64,
    is_counted: bool,
    sizes: Vec<RowSize>,
}

/// The files of an entry, some of them chosen.
struct Chosen<'a> {
    source: &'a DataSource,
    files: Vec<(PathBuf, FileKind)>,
    /// Bytes of all files and of the chosen ones.
    bytes: [u64; 2],
    are_all: bool,
}

impl Survey {
    /// Looks at the files of `[[data.train]]`.
    ///
    /// # Errors
    /// No files, a file that cannot be read or has columns of no known format, conversations without a chat template, an
    /// `eval_split` that leaves nothing to train on.
    pub fn look(config: &DataConfig, tokenizer: &Tokenizer, seed: u64) -> Result<Self, DataError> {
        let template = ChatTemplate::open(&config.chat_template, tokenizer);
        let num_sources = config.train.len().max(1);
        let mut seen = Vec::with_capacity(num_sources);
        for (index, source) in config.train.iter().enumerate() {
            let chosen = Chosen::of(source, index)?;
            let share = Share { rows: (MAX_ROWS / num_sources).max(MIN_ROWS), bytes: MAX_BYTES / num_sources };
            seen.push(chosen.look(config, tokenizer, &template, share)?);
        }
        let all: u64 = seen.iter().map(|source| source.num_rows).sum();
        let held_out = held_out(config.eval_split, all);
        if all <= held_out {
            let message = format!("`data.eval_split` holds out {held_out} of {all} training rows");
            return Err(DataError::Config(message));
        }
        let is_counted = seen.iter().all(|source| source.is_counted) && (held_out == 0 || seen.len() == 1);
        let visits: Vec<usize> = config
            .train
            .iter()
            .zip(&seen)
            .map(|(source, seen)| {
                let kept = u128::from(seen.num_rows) * u128::from(all - held_out) / u128::from(all);
                num_visits(source.weight, usize::try_from(kept).unwrap_or(usize::MAX))
            })
            .collect();
        let per_epoch: usize = visits.iter().sum();
        let standing = per_epoch.min(MAX_EPOCH_ROWS);
        let mut rows = Vec::with_capacity(standing);
        for (visits, seen) in visits.into_iter().zip(&seen) {
            let quota = (visits * standing).div_ceil(per_epoch.max(1));
            rows.extend(repeated(&seen.sizes, quota));
        }
        shuffle(&mut rows, seed, 0, Purpose::Epoch);
        rows.truncate(standing);
        Ok(Self {
            rows_per_epoch: per_epoch as u64,
            is_counted,
            num_sampled: seen.iter().map(|source| source.sizes.len()).sum(),
            rows,
            packed_length: config.packing.then_some(config.max_length),
        })
    }

    /// Rows that stand for an epoch.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// The micro-batches of the rows that stand for an epoch: for each row its documents, those that carry no loss left
    /// out.
    #[must_use]
    pub fn micro_batches(&self, micro_batch_size: usize) -> Vec<Vec<Vec<RowSize>>> {
        let rows = self.packed();
        let documents = |row: &Vec<u32>| -> Vec<RowSize> {
            row.iter().map(|row| self.rows[*row as usize]).filter(|row| row.target_tokens > 0).collect()
        };
        let batch = |rows: &[Vec<u32>]| rows.iter().map(documents).filter(|row| !row.is_empty()).collect();
        rows.chunks(micro_batch_size.max(1)).map(batch).collect()
    }

    /// Micro-batches of an epoch.
    #[must_use]
    pub fn batches_per_epoch(&self, micro_batch_size: usize) -> u64 {
        let (packed, standing) = (self.packed().len() as u128, self.rows.len().max(1) as u128);
        let rows = (packed * u128::from(self.rows_per_epoch)).div_ceil(standing);
        u64::try_from(rows.div_ceil(micro_batch_size.max(1) as u128)).unwrap_or(u64::MAX)
    }

    /// Rows of the batches: the documents of each.
    fn packed(&self) -> Vec<Vec<u32>> {
        let order: Vec<u32> = (0..).take(self.rows.len()).collect();
        let Some(capacity) = self.packed_length else { return order.into_iter().map(|row| vec![row]).collect() };
        let length =
            |row: &RowSize| if row.target_tokens == 0 { 0 } else { u32::try_from(row.tokens).unwrap_or(u32::MAX) };
        let lengths: Vec<u32> = self.rows.iter().map(length).collect();
        best_fit(&order, &lengths, u32::try_from(capacity).unwrap_or(u32::MAX))
    }
}

/// What of the work is for one entry.
#[derive(Clone, Copy)]
struct Share {
    rows: usize,
    bytes: usize,
}

impl<'a> Chosen<'a> {
    fn of(source: &'a DataSource, index: usize) -> Result<Self, DataError> {
        let all = matching_files(&format!("data.train[{index}].path"), &source.path)?;
        let size = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
        let visited = all.len().min(MAX_FILES);
        let chosen: Vec<&PathBuf> = (0..visited).map(|index| &all[index * all.len() / visited]).collect();
        let kind = |path: &&PathBuf| {
            let reason = "files end in .json, .jsonl, .parquet or .txt".to_owned();
            let kind = FileKind::of(path).ok_or_else(|| DataError::File { path: (*path).clone(), reason })?;
            Ok(((*path).clone(), kind))
        };
        Ok(Self {
            source,
            bytes: [all.iter().map(|path| size(path)).sum(), chosen.iter().map(|path| size(path)).sum()],
            are_all: visited == all.len(),
            files: chosen.iter().map(kind).collect::<Result<_, DataError>>()?,
        })
    }

    fn look(
        &self,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        template: &Result<Option<ChatTemplate>, super::template::TemplateError>,
        share: Share,
    ) -> Result<Seen, DataError> {
        let mut all = Seen { num_rows: 0, is_counted: self.are_all, sizes: Vec::new() };
        let (mut files, mut num_sizes) = (Vec::new(), 0);
        let share = Share { rows: share.rows.div_ceil(self.files.len()), bytes: share.bytes / self.files.len() };
        for (path, kind) in &self.files {
            let seen = if *kind == FileKind::Txt {
                text(path, config.max_length, tokenizer, share)?
            } else {
                objects(path, *kind, self.source, config, tokenizer, template, share)?
            };
            all.num_rows += seen.num_rows;
            all.is_counted &= seen.is_counted;
            num_sizes += seen.sizes.len();
            files.push((seen.num_rows.max(1), seen.sizes));
        }
        // A file of few rows does not count as much as one of many.
        all.sizes = in_shares(&files, num_sizes);
        // Rows in which nothing carries loss are not visited.
        let looked_at = all.sizes.len() as u64;
        all.sizes.retain(|row| row.target_tokens > 0);
        all.is_counted &= all.sizes.len() as u64 == looked_at || looked_at == all.num_rows;
        all.num_rows = (all.num_rows * all.sizes.len() as u64).checked_div(looked_at).unwrap_or(0);
        if !self.are_all {
            let [bytes, looked_at] = self.bytes.map(u128::from);
            all.num_rows = u64::try_from(u128::from(all.num_rows) * bytes / looked_at.max(1)).unwrap_or(u64::MAX);
        }
        // As many as the numbers of rows can count.
        all.num_rows = all.num_rows.min(u64::from(u32::MAX));
        Ok(all)
    }
}

/// Rows of a .txt file: windows of its tokens.
fn text(path: &Path, max_length: usize, tokenizer: &Tokenizer, share: Share) -> Result<Seen, DataError> {
    let failed = |error: std::io::Error| DataError::File { path: path.into(), reason: error.to_string() };
    let is_small = std::fs::metadata(path).map_err(failed)?.len() < WHOLE_TEXT_BYTES;
    let num_tokens =
        if is_small { num_tokens(path, tokenizer)? } else { tokens_in_proportion(path, tokenizer, share.bytes)? };
    let num_rows = num_tokens.div_ceil(max_length);
    let size = |row: usize| {
        let tokens = (num_tokens - row * max_length).min(max_length);
        RowSize { tokens, target_tokens: tokens.saturating_sub(1) }
    };
    let sampled = num_rows.min(share.rows);
    let sizes = (0..sampled).map(|row| size(row * num_rows / sampled)).collect();
    Ok(Seen { num_rows: num_rows as u64, is_counted: is_small, sizes })
}

/// Rows of a file of objects.
fn objects(
    path: &Path,
    kind: FileKind,
    source: &DataSource,
    config: &DataConfig,
    tokenizer: &Tokenizer,
    template: &Result<Option<ChatTemplate>, super::template::TemplateError>,
    share: Share,
) -> Result<Seen, DataError> {
    let failed = |reason: String| DataError::File { path: path.into(), reason };
    let Excerpt { mut rows, num_rows, is_counted } = Excerpt::open(path, kind, share.rows, LARGE_FILE_BYTES)?;
    thin_out(&mut rows, share.bytes);
    let first = rows.iter().find_map(|row| row.value.as_ref()?.as_ref().ok());
    let first = first.ok_or_else(|| failed("no row that could be looked at can be used".into()))?;
    let format = RowFormat::detect(source.format, &source.columns, first).map_err(failed)?;
    let is_chat = format.format().uses_template();
    let template = match template {
        Ok(template) => template.as_ref(),
        Err(error) if is_chat => return Err(failed(error.to_string())),
        Err(_) => None,
    };
    let encoder = Encoder::new(tokenizer, template, config);
    let size = |row: &ExcerptRow| size(row, &format, &encoder, config.max_length);
    let sizes: Vec<Result<RowSize, String>> = rows.par_iter().map(size).collect();
    if let (Some(Err(reason)), true) = (sizes.first(), sizes.iter().all(Result::is_err)) {
        return Err(failed(reason.clone()));
    }
    Ok(Seen { num_rows, is_counted, sizes: sizes.into_iter().map(Result::unwrap_or_default).collect() })
}

/// `count` of `sizes`, spread evenly: all of them as often as that goes, as an epoch visits rows.
fn repeated(sizes: &[RowSize], count: usize) -> impl Iterator<Item = RowSize> {
    let count = if sizes.is_empty() { 0 } else { count };
    let whole = count / sizes.len().max(1) * sizes.len();
    let rest = (0..count - whole).map(move |row| sizes[row * sizes.len() / (count - whole)]);
    sizes.iter().copied().cycle().take(whole).chain(rest)
}

/// Size of a row, or why it cannot be used.
fn size(row: &ExcerptRow, format: &RowFormat, encoder: &Encoder<'_>, max_length: usize) -> Result<RowSize, String> {
    let Some(value) = &row.value else {
        let tokens = (row.bytes / BYTES_PER_TOKEN).min(max_length);
        return Ok(RowSize { tokens, target_tokens: tokens.saturating_sub(1) });
    };
    let sample = format.read(value.as_ref().map_err(Clone::clone)?, encoder.template)?;
    let row: EncodedRow = encoder.encode(&sample).map_err(|error| error.to_string())?.cut(max_length);
    Ok(RowSize { tokens: row.ids.len(), target_tokens: row.num_target_tokens() })
}

/// Leaves rows of about `bytes` in all, evenly. Those that are too long to be looked at cost nothing.
fn thin_out(rows: &mut Vec<ExcerptRow>, bytes: usize) {
    let all: usize = rows.iter().filter(|row| row.value.is_some()).map(|row| row.bytes).sum();
    let every = all.div_ceil(bytes.max(1)).max(1);
    let mut index = 0;
    rows.retain(|_| {
        index += 1;
        (index - 1) % every == 0
    });
}

/// Rows that `eval_split` holds out.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "at most 2^32 rows"
)]
fn held_out(split: Option<EvalSplit>, num_rows: u64) -> u64 {
    match split {
        None => 0,
        Some(EvalSplit::Rows(rows)) => rows as u64,
        Some(EvalSplit::Share(share)) => ((share * num_rows as f64).round() as u64).max(1),
    }
}

#[cfg(test)]
mod tests;
