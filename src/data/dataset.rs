//! The rows of a recipe's files, as tokens, and the order in which they are visited.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::batch::RowSource;
use super::data_file::{DataFile, OpenedFile};
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::files::FileInfo;
use super::order::{self, Order, Purpose, num_visits, shuffle};
use super::packing::best_fit;
use super::template::{ChatTemplate, Stops};
use super::tokenizer::Tokenizer;
use crate::config::{DataConfig, DataFormat, DataSource, EvalSplit, OnBadRow, RowKind, RowLimit};
use crate::images::{Images, is_of_image};

mod opening;
mod questions;

use opening::{all_opened, needed_template, unmoved_by_system, without_ends};

pub use super::counts::RowCounts;
pub use super::files::OpenOptions;
pub use questions::{Asking, Question};

/// The exact place of a micro-batch: a resumed run that starts here sees the rows that the first run would have seen.
///
/// It is valid for one `micro_batch_size`, one seed and one set of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Pass over the training rows, from 0.
    pub epoch: u64,
    /// Micro-batch of that pass, from 0.
    pub batch: u64,
}

/// The rows of a recipe's files, as tokens. They are numbered consecutively: those of the training files, then those of
/// the evaluation files.
#[derive(Debug)]
pub struct Dataset {
    pub(super) config: DataConfig,
    seed: u64,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    images: Option<Arc<Images>>,
    infos: Vec<FileInfo>,
    /// The training files, then the evaluation files. The loader's threads read them.
    pub(super) files: Arc<Vec<DataFile>>,
    /// The rows of each `[[data.train]]`, then of each `[[data.eval]]`.
    entries: Vec<Range<u32>>,
    /// Number of tokens of every row, at most `max_length`; 0 for a row that is left out.
    lengths: Vec<u32>,
    /// Rows to train on, ascending: neither left out nor held out.
    train_rows: Vec<u32>,
    /// Rows to evaluate on, ascending: rows of the evaluation files, or training rows that `eval_split` holds out.
    eval_rows: Vec<u32>,
    /// Number of packed rows in the first epoch. Counting them requires packing them.
    num_packed: OnceLock<usize>,
    warnings: Vec<String>,
}

impl Dataset {
    /// Finds the rows of all files and tokenises them, on all cores.
    ///
    /// Tokens of files of [`LARGE_FILE_BYTES`](super::cache::LARGE_FILE_BYTES) or more are kept in the cache of
    /// `options` for the next start. Rows that cannot be used, and rows without a token that carries loss, are left
    /// out.
    ///
    /// Without training files there are the rows to evaluate on alone.
    ///
    /// `chat_template` and the paths of `config` are used unchanged: relative paths start at the current directory.
    ///
    /// # Errors
    /// No files; a file that cannot be read; columns of no known format; conversations without a chat template; an
    /// `eval_split` that leaves nothing to train on; rows that cannot be used, unless they are to be skipped; no row
    /// with a token that carries loss; a request to stop.
    pub fn open(
        config: &DataConfig,
        tokenizer: Arc<Tokenizer>,
        seed: u64,
        options: &OpenOptions<'_>,
    ) -> Result<Self, DataError> {
        if config.train.is_empty() && config.eval.is_empty() {
            return Err(DataError::Config("no training data\n  hint: add `[[data.train]]` with a `path`".into()));
        }
        // Only the opened files show whether the template is needed, but the cached tokens depend on it.
        let template = ChatTemplate::open(&config.chat_template, &tokenizer);
        let kept_with = template.as_ref().ok().and_then(Option::as_ref);
        // All are opened before the first is tokenised, which may take long.
        let opened = all_opened(config, &tokenizer, kept_with, options)?;
        let all: Vec<&OpenedFile> = opened.iter().flat_map(|(_, files)| files).collect();
        let template = needed_template(config, template, &all)?;
        let mut warnings = unmoved_by_system(config, template.is_some(), &all)?;
        warnings.extend(without_ends(config, template.as_ref(), &tokenizer, &all));
        drop(all);

        let encoder = Encoder {
            tokenizer: &tokenizer,
            template: template.as_ref(),
            train_on_inputs: config.train_on_inputs,
            scores: config.row_kind == RowKind::ScoredPair,
            images: options.images.as_deref(),
        };
        let EncodedFiles { files, entries, lengths } =
            EncodedFiles::new(opened, config, &encoder, options, &mut warnings)?;
        let num_file_rows = entries[..config.train.len()].last().map_or(0, |rows| rows.end);
        let (mut train_rows, mut eval_rows): (Vec<u32>, Vec<u32>) =
            (0..count(&lengths)).filter(|row| lengths[*row as usize] > 0).partition(|row| *row < num_file_rows);
        let file_warnings: Vec<String> = files.iter().flat_map(DataFile::warnings).collect();
        let is_measured = config.train.is_empty();
        let used = if is_measured { &eval_rows } else { &train_rows };
        if used.is_empty() {
            return Err(nothing_left(&files, is_measured, file_warnings.first().map_or("", String::as_str)));
        }
        if config.eval.is_empty() {
            let held_out = held_out_rows(config.eval_split, count(&train_rows), seed)?;
            eval_rows = held_out.iter().map(|index| train_rows[*index as usize]).collect();
            train_rows.retain(|row| eval_rows.binary_search(row).is_err());
        }
        warnings.extend(file_warnings);
        Ok(Self {
            config: config.clone(),
            seed,
            tokenizer,
            template,
            images: options.images.clone(),
            infos: files.iter().map(|file| file.info.clone()).collect(),
            files: Arc::new(files),
            entries,
            lengths,
            train_rows,
            eval_rows,
            num_packed: OnceLock::new(),
            warnings,
        })
    }

    /// The files, first those of `[[data.train]]`; [`RowSource::file`] is an index into this list.
    #[must_use]
    pub fn files(&self) -> &[FileInfo] {
        &self.infos
    }

    /// The model's tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// SHA-256 of the content of the training files, and of the images that their rows have.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub fn train_digest(&self) -> Result<[u8; 32], DataError> {
        let mut digest = Sha256::new();
        self.files.iter().filter(|file| !file.info.is_eval).for_each(|file| digest.update(file.content));
        let all = self.images.iter().flat_map(|images| images.all());
        let all: HashMap<u32, [u8; 32]> = all.map(|image| (image.first_id, image.content)).collect();
        if !all.is_empty() {
            let of_row = |row: &u32| {
                let (_, row) = read_row(&self.files, *row)?;
                Ok(row.ids.iter().filter_map(|id| all.get(id)).collect::<Vec<_>>())
            };
            let rows = self.train_rows.par_iter().chain(&self.eval_rows);
            let rows = rows.filter(|row| (**row as usize) < self.num_file_rows()).map(of_row);
            // Threads find images in any order.
            let images: BTreeSet<_> = rows.collect::<Result<Vec<_>, DataError>>()?.into_iter().flatten().collect();
            images.into_iter().for_each(|content| digest.update(content));
        }
        Ok(digest.finalize().into())
    }

    /// How a file's questions and answers are written for the model, where the format alone does not say it.
    #[must_use]
    pub fn form_of(&self, file: &FileInfo) -> &'static str {
        match (file.format, self.template.is_some()) {
            (DataFormat::PromptCompletion | DataFormat::Alpaca, true) => {
                "; as turns of the chat template (`data.chat_template` = \"none\" for plain text)"
            }
            (DataFormat::PromptCompletion, false) => "; prompt and completion joined as they are",
            _ => "",
        }
    }

    /// The images that its rows have; `None` where the model sees none.
    #[must_use]
    pub fn images(&self) -> Option<&Arc<Images>> {
        self.images.as_ref()
    }

    /// Whether a row has an image.
    #[must_use]
    pub fn has_images(&self) -> bool {
        self.images.as_ref().is_some_and(|images| !images.all().is_empty())
    }

    /// Of every row that is used and has images, the number of their tokens, and of all its tokens.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub fn image_tokens(&self) -> Result<Vec<[usize; 2]>, DataError> {
        let of_row = |row: &u32| {
            let (_, row) = read_row(&self.files, *row)?;
            Ok([row.ids.iter().filter(|id| is_of_image(**id)).count(), row.ids.len()])
        };
        let rows = self.train_rows.par_iter().chain(&self.eval_rows);
        let counts = rows.map(of_row).collect::<Result<Vec<_>, DataError>>()?;
        Ok(counts.into_iter().filter(|[of_images, _]| *of_images > 0).collect())
    }

    /// The chat template; `None` if no rows are written with one.
    #[must_use]
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Where texts end that the model writes.
    #[must_use]
    pub fn stops(&self) -> Stops {
        Stops::of(&self.tokenizer, self.template())
    }

    /// Warnings about rows.
    #[must_use]
    pub fn row_warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Warnings about rows and files.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        // Compare canonical paths: one file can be written in several ways.
        let file = |file: &FileInfo| file.path.canonicalize().unwrap_or_else(|_| file.path.clone());
        let train: HashSet<PathBuf> = self.infos.iter().filter(|info| !info.is_eval).map(file).collect();
        let both = self.infos.iter().filter(|info| info.is_eval && train.contains(&file(info)));
        let text = |file: &FileInfo| {
            format!(
                "{} is in [[data.train]] and in [[data.eval]]: the evaluation loss will be that of seen rows\n  hint: \
                 `data.eval_split` holds rows out",
                file.path.display()
            )
        };
        let mut warnings = self.row_warnings().to_vec();
        warnings.extend(both.map(text));
        if self.train_rows.len() == 1 && self.config.row_kind != RowKind::Prompt {
            let note =
                "there is one row to train on: it is learnt by heart, and nothing shows what that does to other texts";
            warnings.push(note.to_owned());
        }
        let unlearnt = |file: &FileInfo| Some(format!("{}: {}", file.path.display(), file.unlearnt.as_ref()?));
        warnings.extend(self.infos.iter().filter_map(unlearnt));
        if !self.config.eval.is_empty() && self.eval_rows.is_empty() {
            warnings.push("no token of the evaluation rows carries loss: there is no evaluation".to_owned());
        }
        warnings
    }

    /// Counts of the training rows, including rows that `eval_split` holds out. Reads the rows that are cut.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub fn train_counts(&self) -> Result<RowCounts, DataError> {
        counts(&self.files, false)
    }

    /// Number of rows to train on: neither left out, nor held out by `eval_split`.
    #[must_use]
    pub fn num_train_rows(&self) -> usize {
        self.train_rows.len()
    }

    /// Number of training rows that an epoch visits, by the weight of their source. With `packing`, these are still
    /// rows of the files.
    #[must_use]
    pub fn rows_per_epoch(&self) -> usize {
        let sources = self.config.train.iter().zip(ranges(&self.entries, &self.train_rows));
        sources.map(|(source, rows)| num_visits(source.weight, rows.len())).sum()
    }

    /// Names alone of the files to train on, without their folders: what they are written into may be published.
    #[must_use]
    pub fn names_of_train_files(&self) -> Vec<String> {
        let name = |path: &str| path.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
        self.config.train.iter().map(|source| name(&source.path)).collect()
    }

    /// Number of rows to evaluate on, by the weight of their source.
    #[must_use]
    pub fn num_eval_rows(&self) -> usize {
        self.eval_visits().len()
    }

    /// Number of micro-batches of an evaluation.
    #[must_use]
    pub fn num_eval_batches(&self, micro_batch_size: usize, max_batches: Option<usize>) -> usize {
        let num_batches = self.eval_order().num_rows().div_ceil(micro_batch_size.max(1));
        num_batches.min(max_batches.unwrap_or(usize::MAX))
    }

    /// Number of micro-batches of an epoch; the last one may have fewer rows. With `packing`, this is the first epoch's
    /// number: a later epoch is packed in its own order and may differ by a few.
    #[must_use]
    pub fn batches_per_epoch(&self, micro_batch_size: usize) -> u64 {
        let num_rows = if self.config.packing {
            *self.num_packed.get_or_init(|| self.train_order(0).num_rows())
        } else {
            self.rows_per_epoch()
        };
        num_rows.div_ceil(micro_batch_size.max(1)) as u64
    }

    /// Training row `index` of [`num_train_rows`](Self::num_train_rows), in the order of the files.
    ///
    /// # Errors
    /// A row that cannot be read, with its place.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn train_row(&self, index: usize) -> Result<(RowSource, EncodedRow), DataError> {
        read_row(&self.files, self.train_rows[index])
    }

    /// Number of good and of bad answers in the training files, by their labels, including rows that are held out.
    #[must_use]
    pub fn num_labels(&self) -> [usize; 2] {
        let num_used = self.lengths[..self.num_file_rows()].iter().filter(|length| **length > 0).count();
        let bad = self.files.iter().filter(|file| !file.info.is_eval).map(|file| file.num_bad_answers).sum();
        [num_used - bad, bad]
    }

    /// Number of tokens of every row that is used, held out ones and those of evaluation files among them.
    pub fn used_lengths(&self) -> impl Iterator<Item = usize> {
        self.lengths.iter().filter(|length| **length > 0).map(|length| *length as usize)
    }

    /// Number of rows in the training files, including rows that are left out or held out.
    #[must_use]
    pub fn num_file_rows(&self) -> usize {
        self.entries[..self.config.train.len()].last().map_or(0, |rows| rows.end as usize)
    }

    /// Row `index` of [`num_file_rows`](Self::num_file_rows). A row that cannot be used has no tokens.
    ///
    /// # Errors
    /// A row that cannot be read.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn file_row(&self, index: usize) -> Result<(RowSource, EncodedRow), DataError> {
        assert!(index < self.num_file_rows(), "there is no row {index}");
        read_row(&self.files, u32::try_from(index).unwrap_or(u32::MAX))
    }

    /// Training rows in the order of `epoch`.
    pub(super) fn train_order(&self, epoch: u64) -> Order {
        let mut rows = self.visits(&self.config.train, &self.entries, &self.train_rows, epoch);
        if self.config.shuffle {
            shuffle(&mut rows, self.seed, epoch, Purpose::Epoch);
        }
        let mut order = self.order(rows);
        if let (Order::Packed(packs), true) = (&mut order, self.config.shuffle) {
            // Packing leaves rows full of long documents next to each other.
            shuffle(packs, self.seed, epoch, Purpose::Packs);
        }
        order
    }

    /// Evaluation rows, in the order of the files.
    pub(super) fn eval_order(&self) -> Order {
        self.order(self.eval_visits())
    }

    fn eval_visits(&self) -> Vec<u32> {
        if self.config.eval.is_empty() {
            return self.eval_rows.clone();
        }
        self.visits(&self.config.eval, &self.entries[self.config.train.len()..], &self.eval_rows, 0)
    }

    fn order(&self, rows: Vec<u32>) -> Order {
        if self.config.packing {
            let capacity = self.config.max_length.saturating_mul(self.config.row_kind.num_sequences());
            let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
            Order::Packed(best_fit(&rows, &self.lengths, capacity))
        } else {
            Order::Single(rows)
        }
    }

    /// The rows of `sources` among `rows` (ascending) that `epoch` visits, by their weights. `entries` are the rows of
    /// each source.
    fn visits(&self, sources: &[DataSource], entries: &[Range<u32>], rows: &[u32], epoch: u64) -> Vec<u32> {
        let sources = sources.iter().zip(ranges(entries, rows)).enumerate();
        sources
            .flat_map(|(index, (source, range))| order::visits(&range, source.weight, self.seed, epoch, index))
            .map(|index| rows[index as usize])
            .collect()
    }
}

/// The tokens of a row, and the place it was read from. A row that cannot be used has no tokens.
pub(super) fn read_row(files: &[DataFile], row: u32) -> Result<(RowSource, EncodedRow), DataError> {
    let file = files.partition_point(|file| file.first_row <= row) - 1;
    let row = (row - files[file].first_row) as usize;
    Ok((RowSource { file, row }, files[file].read(row)?))
}

/// The rows of all files as tokens.
struct EncodedFiles {
    files: Vec<DataFile>,
    entries: Vec<Range<u32>>,
    lengths: Vec<u32>,
}

impl EncodedFiles {
    fn new(
        opened: Vec<(Option<RowLimit>, Vec<OpenedFile>)>,
        config: &DataConfig,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<Self, DataError> {
        let (mut files, mut entries) = (Vec::<DataFile>::new(), Vec::new());
        let (mut lengths, mut mistakes) = (Vec::new(), Vec::new());
        for (limit, opened) in opened {
            let first_row = count(&lengths);
            let mut left = RowLimit::number(limit);
            for opened in opened {
                if left == Some(0) {
                    break;
                }
                let place = (count(&lengths), left);
                let (file, rows) = opened.encode(place, config.max_length, encoder, options, warnings)?;
                left = left.map(|left| left.saturating_sub(rows.len()));
                lengths.extend(rows);
                if lengths.len() > u32::MAX as usize {
                    let reason = format!("more than {} rows in all are not supported", u32::MAX);
                    return Err(DataError::File { path: file.info.path, reason });
                }
                match config.on_bad_row {
                    OnBadRow::Error => mistakes.extend(file.mistakes()),
                    OnBadRow::Skip => file.refuse_if_no_row_is_usable()?,
                }
                files.push(file);
            }
            entries.push(first_row..count(&lengths));
        }
        if mistakes.is_empty() { Ok(Self { files, entries, lengths }) } else { Err(DataError::Rows(mistakes)) }
    }
}

fn count(rows: &[u32]) -> u32 {
    u32::try_from(rows.len()).unwrap_or(u32::MAX)
}

/// Why there is no row: `reason` is the first warning about a file.
fn nothing_left(files: &[DataFile], is_measured: bool, reason: &str) -> DataError {
    let purpose = if is_measured { "evaluate" } else { "train" };
    let counts = match counts(files, is_measured) {
        Ok(counts) => counts,
        Err(error) => return error,
    };
    let hint = if counts.answer_cut > 0 {
        "\n  hint: raise `data.max_length`"
    } else if files.iter().all(DataFile::is_of_prompts) {
        "\n  hint: these are prompts: with `[objective] name = \"grpo\"` the model answers them, for rewards"
    } else {
        ""
    };
    DataError::Config(format!("no row is left to {purpose} on\n  {}{hint}", reason.replace('\n', "\n  ")))
}

fn counts(files: &[DataFile], is_eval: bool) -> Result<RowCounts, DataError> {
    let mut counts = RowCounts::default();
    for file in files.iter().filter(|file| file.info.is_eval == is_eval) {
        counts += file.all_counts()?;
    }
    Ok(counts)
}

/// For each of `entries`, the range of indices of its rows in `rows` (ascending).
fn ranges(entries: &[Range<u32>], rows: &[u32]) -> impl Iterator<Item = Range<u32>> {
    let before = |row: u32| u32::try_from(rows.partition_point(|used| *used < row)).unwrap_or(u32::MAX);
    entries.iter().map(move |entry| before(entry.start)..before(entry.end))
}

/// Rows that `eval_split` holds out, ascending.
fn held_out_rows(split: Option<EvalSplit>, num_rows: u32, seed: u64) -> Result<Vec<u32>, DataError> {
    let count = match split {
        None => return Ok(Vec::new()),
        Some(EvalSplit::Rows(rows)) => rows,
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        Some(EvalSplit::Share(share)) => ((share * f64::from(num_rows)).round() as usize).max(1),
    };
    if count >= num_rows as usize {
        return Err(DataError::Config(format!(
            "`data.eval_split` holds out {count} of {num_rows} training rows, which leaves none to train on"
        )));
    }
    Ok(order::held_out(count, num_rows, seed))
}

#[cfg(test)]
mod tests;
