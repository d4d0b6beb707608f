//! Turns the files of a recipe into rows of tokens.

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use super::batch::{Batch, RowSource};
use super::config::{DataConfig, DataFormat, DataSource, EvalSplit};
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::loader::{EvalLoader, Loader};
use super::order::{self, Purpose, num_visits, shuffle};
use super::packing::best_fit;
use super::sources::{FileInfo, FileSet, OpenedSet, needed_template};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;

pub use super::ahead::OpenOptions;
pub use super::counts::RowCounts;

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

/// The rows of a recipe's files, as tokens. Cheap to clone; can be shared between threads.
#[derive(Clone, Debug)]
pub struct DataPipeline {
    shared: Arc<Shared>,
}

/// What the loader's threads share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: DataConfig,
    seed: u64,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    infos: Vec<FileInfo>,
    train: FileSet,
    eval: FileSet,
    /// Rows to train on, ascending: neither left out nor held out.
    train_rows: Vec<u32>,
    /// Rows to evaluate on, ascending: rows of the evaluation files, or training rows that `eval_split` holds out.
    eval_rows: Vec<u32>,
    /// Number of packed rows in the first epoch. Counting them requires packing them.
    num_packed: OnceLock<usize>,
    warnings: Vec<String>,
}

/// Training files or evaluation files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Train,
    Eval,
}

/// The rows of batches, in the order of the visits.
#[derive(Debug)]
pub(super) struct Order {
    set: Set,
    rows: OrderRows,
}

#[derive(Debug)]
enum OrderRows {
    /// One document per row.
    Single(Vec<u32>),
    /// Several documents per row.
    Packed(Vec<Vec<u32>>),
}

impl Order {
    pub(super) fn num_rows(&self) -> usize {
        match &self.rows {
            OrderRows::Single(rows) => rows.len(),
            OrderRows::Packed(rows) => rows.len(),
        }
    }

    pub(super) fn truncate(&mut self, num_rows: usize) {
        match &mut self.rows {
            OrderRows::Single(rows) => rows.truncate(num_rows),
            OrderRows::Packed(rows) => rows.truncate(num_rows),
        }
    }

    fn documents(&self, row: usize) -> &[u32] {
        match &self.rows {
            OrderRows::Single(rows) => std::slice::from_ref(&rows[row]),
            OrderRows::Packed(rows) => &rows[row],
        }
    }
}

impl DataPipeline {
    /// Finds the rows of all files and decides how they are read.
    ///
    /// All rows are tokenised, on all cores. Tokens of files of [`LARGE_FILE_BYTES`](super::cache::LARGE_FILE_BYTES) or
    /// more are kept in the cache of `options` for the next start. Rows that cannot be used, and rows without a token
    /// that carries loss, are left out.
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
        if config.train.is_empty() {
            return Err(DataError::Config("no training data\n  hint: add `[[data.train]]` with a `path`".into()));
        }
        if !config.eval.is_empty() && config.eval_split.is_some() {
            let message = "`data.eval_split` excludes [[data.eval]]: evaluation rows come from one of them";
            return Err(DataError::Config(message.into()));
        }
        // Only the opened files show whether the template is needed, but the cached tokens depend on it.
        let template = ChatTemplate::open(&config.chat_template, &tokenizer);
        let kept_with = template.as_ref().ok().and_then(Option::as_ref);
        let train = OpenedSet::open(&config.train, false, config, &tokenizer, kept_with, options)?;
        let eval = OpenedSet::open(&config.eval, true, config, &tokenizer, kept_with, options)?;
        let template = needed_template(config, template, train.formats().chain(eval.formats()))?;

        let encoder = Encoder::new(&tokenizer, template.as_ref(), config);
        let mut warnings = Vec::new();
        let train = train.tokenise(&encoder, config, options, &mut warnings);
        let eval = eval.tokenise(&encoder, config, options, &mut warnings);
        let (train, eval) = match (train, eval) {
            (Err(DataError::Rows(mut mistakes)), Err(DataError::Rows(more))) => {
                mistakes.extend(more);
                return Err(DataError::Rows(mistakes));
            }
            (train, eval) => (train?, eval?),
        };
        let usable = |set: &FileSet| -> Vec<u32> {
            let rows = (0..).zip(set.lengths()).filter(|(_, length)| **length > 0);
            rows.map(|(row, _)| row).collect()
        };
        let (mut train_rows, mut eval_rows) = (usable(&train), usable(&eval));
        if train_rows.is_empty() {
            let reason = train.warnings().into_iter().next().unwrap_or_default().replace('\n', "\n  ");
            let hint = if train.counts(tokenizer.max_id())?.answer_cut > 0 {
                "raise `data.max_length`"
            } else {
                "`data.train_on_inputs = true` puts loss on every token"
            };
            return Err(DataError::Config(format!("no row is left to train on\n  {reason}\n  hint: {hint}")));
        }
        if config.eval.is_empty() {
            let num_rows = u32::try_from(train_rows.len()).unwrap_or(u32::MAX);
            let held_out = held_out_rows(config.eval_split, num_rows, seed)?;
            eval_rows = held_out.iter().map(|index| train_rows[*index as usize]).collect();
            train_rows.retain(|row| eval_rows.binary_search(row).is_err());
        }
        warnings.extend(train.warnings());
        warnings.extend(eval.warnings());
        let infos = train.infos().chain(eval.infos()).cloned().collect();
        let (config, num_packed) = (config.clone(), OnceLock::new());
        let shared = Shared {
            config,
            seed,
            tokenizer,
            template,
            infos,
            train,
            eval,
            train_rows,
            eval_rows,
            num_packed,
            warnings,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The files, first those of `[[data.train]]`; [`RowSource::file`] is an index into this list.
    #[must_use]
    pub fn files(&self) -> &[FileInfo] {
        &self.shared.infos
    }

    /// The model's tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.shared.tokenizer
    }

    /// SHA-256 of the content of the training files.
    #[must_use]
    pub fn train_digest(&self) -> [u8; 32] {
        self.shared.train.digest()
    }

    /// How a file's questions and answers are written for the model, where the format alone does not say it.
    #[must_use]
    pub fn form_of(&self, file: &FileInfo) -> &'static str {
        match (file.format, self.template().is_some()) {
            (DataFormat::PromptCompletion | DataFormat::Alpaca, true) => {
                "; as turns of the chat template (`data.chat_template` = \"none\" for plain text)"
            }
            (DataFormat::PromptCompletion, false) => "; prompt and completion joined as they are",
            _ => "",
        }
    }

    /// The chat template; `None` if no rows are written with one.
    #[must_use]
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.shared.template.as_ref()
    }

    /// Warnings about the files.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        // Compare canonical paths: one file can be written in several ways.
        let file = |file: &FileInfo| file.path.canonicalize().unwrap_or_else(|_| file.path.clone());
        let train: HashSet<PathBuf> = self.shared.train.infos().map(file).collect();
        let both = self.shared.eval.infos().filter(|info| train.contains(&file(info)));
        let text = |file: &FileInfo| {
            format!(
                "{} is in [[data.train]] and in [[data.eval]]: the evaluation loss will be that of seen rows\n  hint: \
                 `data.eval_split` holds rows out",
                file.path.display()
            )
        };
        let mut warnings = self.shared.warnings.clone();
        warnings.extend(both.map(text));
        if !self.shared.config.eval.is_empty() && self.shared.eval_rows.is_empty() {
            warnings.push("no token of the evaluation rows carries loss: there is no evaluation".to_owned());
        }
        warnings
    }

    /// Counts of the training rows, including rows that `eval_split` holds out. Reads the rows that are cut.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub fn train_counts(&self) -> Result<RowCounts, DataError> {
        self.shared.train.counts(self.shared.tokenizer.max_id())
    }

    /// Number of rows to train on: neither left out, nor held out by `eval_split`.
    #[must_use]
    pub fn num_train_rows(&self) -> usize {
        self.shared.train_rows.len()
    }

    /// Number of training rows that an epoch visits, by the weight of their source. With `packing`, these are still
    /// rows of the files.
    #[must_use]
    pub fn rows_per_epoch(&self) -> usize {
        let sources = self.shared.config.train.iter().zip(self.shared.train_ranges());
        sources.map(|(source, rows)| num_visits(source.weight, rows.len())).sum()
    }

    /// Number of rows to evaluate on, by the weight of their source.
    #[must_use]
    pub fn num_eval_rows(&self) -> usize {
        self.shared.eval_rows().1.len()
    }

    /// Number of micro-batches of an evaluation.
    #[must_use]
    pub fn num_eval_batches(&self, micro_batch_size: usize, max_batches: Option<usize>) -> usize {
        let num_batches = self.shared.eval_order().num_rows().div_ceil(micro_batch_size.max(1));
        num_batches.min(max_batches.unwrap_or(usize::MAX))
    }

    /// Number of micro-batches of an epoch; the last one may have fewer rows. With `packing`, this is the first epoch's
    /// number: a later epoch is packed in its own order and may differ by a few.
    #[must_use]
    pub fn batches_per_epoch(&self, micro_batch_size: usize) -> u64 {
        let num_rows = if self.shared.config.packing {
            *self.shared.num_packed.get_or_init(|| self.shared.train_order(0).num_rows())
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
        self.shared.read(Set::Train, self.shared.train_rows[index])
    }

    /// Number of rows in the training files, including rows that are left out or held out.
    #[must_use]
    pub fn num_file_rows(&self) -> usize {
        self.shared.train.lengths().len()
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
        self.shared.read(Set::Train, u32::try_from(index).unwrap_or(u32::MAX))
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Micro-batches of `micro_batch_size` rows, starting at `from`, without end: epochs repeat.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn loader(&self, from: Cursor, micro_batch_size: usize) -> Result<Loader, DataError> {
        Loader::start(Arc::clone(&self.shared), from, micro_batch_size)
    }

    /// The evaluation rows in micro-batches, always in the same order; at most `max_batches` of them.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn eval_batches(&self, micro_batch_size: usize, max_batches: Option<usize>) -> Result<EvalLoader, DataError> {
        EvalLoader::start(Arc::clone(&self.shared), micro_batch_size, max_batches)
    }
}

impl Shared {
    pub(super) fn train_order(&self, epoch: u64) -> Order {
        let mut rows = self.visits(&self.config.train, self.train_ranges(), epoch);
        for row in &mut rows {
            *row = self.train_rows[*row as usize];
        }
        if self.config.shuffle {
            shuffle(&mut rows, self.seed, epoch, Purpose::Epoch);
        }
        let mut order = self.order(Set::Train, rows);
        if let (OrderRows::Packed(packs), true) = (&mut order.rows, self.config.shuffle) {
            // Packing leaves rows full of long documents next to each other.
            shuffle(packs, self.seed, epoch, Purpose::Packs);
        }
        order
    }

    /// Evaluation rows, in the order of the files.
    pub(super) fn eval_order(&self) -> Order {
        let (set, rows) = self.eval_rows();
        self.order(set, rows)
    }

    fn eval_rows(&self) -> (Set, Vec<u32>) {
        if self.config.eval.is_empty() {
            return (Set::Train, self.eval_rows.clone());
        }
        let visits = self.visits(&self.config.eval, ranges(self.eval.sources(), &self.eval_rows), 0);
        (Set::Eval, visits.into_iter().map(|row| self.eval_rows[row as usize]).collect())
    }

    fn order(&self, set: Set, rows: Vec<u32>) -> Order {
        let rows = if self.config.packing {
            let set = if set == Set::Train { &self.train } else { &self.eval };
            let capacity = u32::try_from(self.config.max_length).unwrap_or(u32::MAX);
            OrderRows::Packed(best_fit(&rows, set.lengths(), capacity))
        } else {
            OrderRows::Single(rows)
        };
        Order { set, rows }
    }

    /// The range of `train_rows` that belongs to each source.
    fn train_ranges(&self) -> impl Iterator<Item = Range<u32>> {
        ranges(self.train.sources(), &self.train_rows)
    }

    fn visits(&self, sources: &[DataSource], rows: impl Iterator<Item = Range<u32>>, epoch: u64) -> Vec<u32> {
        let sources = sources.iter().zip(rows).enumerate();
        sources
            .flat_map(|(index, (source, rows))| order::visits(&rows, source.weight, self.seed, epoch, index))
            .collect()
    }

    /// The tokens of a row, and the place it was read from.
    fn read(&self, set: Set, row: u32) -> Result<(RowSource, EncodedRow), DataError> {
        let max_id = self.tokenizer.max_id();
        match set {
            Set::Train => self.train.read(row, max_id),
            Set::Eval => {
                let (source, tokens) = self.eval.read(row, max_id)?;
                Ok((RowSource { file: self.train.infos().count() + source.file, ..source }, tokens))
            }
        }
    }

    /// The micro-batch of rows `rows` of `order`.
    pub(super) fn batch(
        &self,
        order: &Order,
        rows: Range<usize>,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<(Batch, RowCounts), DataError> {
        let mut counts = RowCounts::default();
        let mut encoded_rows = Vec::with_capacity(rows.len());
        for row in rows {
            let mut documents = Vec::new();
            for document in order.documents(row) {
                if is_stopped() {
                    return Err(DataError::Stopped);
                }
                let (source, encoded) = self.read(order.set, *document)?;
                counts.add(&encoded);
                documents.push((source, encoded));
            }
            encoded_rows.push(documents);
        }
        Ok((Batch::of_rows(&encoded_rows), counts))
    }
}

/// The range of `rows` (ascending) that lies in each of `sources`.
fn ranges(sources: &[Range<u32>], rows: &[u32]) -> impl Iterator<Item = Range<u32>> {
    let before = |row: u32| u32::try_from(rows.partition_point(|used| *used < row)).unwrap_or(u32::MAX);
    sources.iter().map(move |source| before(source.start)..before(source.end))
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
