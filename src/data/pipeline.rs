//! From the files of a recipe to rows of tokens.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use super::batch::{Batch, RowSource};
use super::config::{DataConfig, DataSource, EvalSplit, OnBadRow};
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::loader::{EvalLoader, Loader};
use super::order::{self, Purpose, num_visits, shuffle, skip_held_out};
use super::packing::best_fit;
use super::sources::{FileInfo, FileSet, needed_template};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;

pub use super::ahead::OpenOptions;
pub use super::counts::RowCounts;

/// The exact place of a micro-batch: a resumed run that starts here sees what the first one would have seen.
///
/// It holds for one `micro_batch_size`, one seed and one set of files.
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
    /// Training rows that `eval_split` holds out, ascending.
    held_out: Vec<u32>,
    /// Tokens of every training and every evaluation row, where rows are packed; 0 for a row that is left out.
    lengths: Option<[Vec<u32>; 2]>,
    /// Rows of the first epoch once they are packed: to know, they must be.
    num_packed: OnceLock<usize>,
    warnings: Vec<String>,
}

/// One of the two sets of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Train,
    Eval,
}

/// The rows of batches, in the order in which they are visited.
#[derive(Debug)]
pub(super) struct Order {
    set: Set,
    rows: OrderRows,
}

#[derive(Debug)]
enum OrderRows {
    /// A document each.
    Single(Vec<u32>),
    /// Several documents each.
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
    /// Files of [`LARGE_FILE_BYTES`](super::sources::LARGE_FILE_BYTES) and more, and with `packing` or
    /// `on_bad_row = "skip"` all, are tokenised on all cores, and the tokens kept in the cache of `options`, where the
    /// next start finds them. Other rows are tokenised as they are visited.
    ///
    /// `chat_template` and the paths of `config` are used as they are: relative ones start at the current directory.
    ///
    /// # Errors
    /// No files, a file that cannot be read, columns of no known format, conversations without a chat template, an
    /// `eval_split` that leaves nothing to train on; any row that cannot be used of those that are tokenised; a wish to
    /// stop meanwhile.
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
        // Whether it is needed is known once the files are open; what is kept of them depends on it.
        let template = ChatTemplate::open(&config.chat_template, &tokenizer);
        let kept_with = template.as_ref().ok().and_then(Option::as_ref);
        let mut train = FileSet::open(&config.train, false, config, &tokenizer, kept_with, options)?;
        let mut eval = FileSet::open(&config.eval, true, config, &tokenizer, kept_with, options)?;
        let held_out = held_out_rows(config.eval_split, train.num_rows(), seed)?;
        let infos: Vec<FileInfo> = train.infos().chain(eval.infos()).cloned().collect();
        let template = needed_template(config, template, &infos)?;

        let encoder = Encoder::new(&tokenizer, template.as_ref(), config);
        let mut warnings = Vec::new();
        let every_row = config.packing || config.on_bad_row == OnBadRow::Skip;
        let lengths = [
            train.tokenise(&encoder, every_row, options, &mut warnings)?,
            eval.tokenise(&encoder, every_row, options, &mut warnings)?,
        ];
        let infos = train.infos().chain(eval.infos()).cloned().collect();
        let lengths = config.packing.then_some(lengths);
        let (config, num_packed) = (config.clone(), OnceLock::new());
        let shared =
            Shared { config, seed, tokenizer, template, infos, train, eval, held_out, lengths, num_packed, warnings };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The files, those of `[[data.train]]` first; [`RowSource::file`] counts in this list.
    #[must_use]
    pub fn files(&self) -> &[FileInfo] {
        &self.shared.infos
    }

    /// The model's tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.shared.tokenizer
    }

    /// SHA-256 of the content of the training files; absent where it is not known without reading a large file for it.
    #[must_use]
    pub fn train_digest(&self) -> Option<[u8; 32]> {
        self.shared.train.digest()
    }

    /// The chat template, if rows are written with one.
    #[must_use]
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.shared.template.as_ref()
    }

    /// What is odd about the files but no error.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let train: HashSet<&Path> = self.shared.train.infos().map(|file| file.path.as_path()).collect();
        let both = self.shared.eval.infos().filter(|file| train.contains(file.path.as_path()));
        let text = |file: &FileInfo| {
            format!(
                "{} is in [[data.train]] and in [[data.eval]]: the evaluation loss will be that of seen rows\n  hint: \
                 `data.eval_split` holds rows out",
                file.path.display()
            )
        };
        let mut warnings = self.shared.warnings.clone();
        warnings.extend(both.map(text));
        for (file, bad) in self.shared.train.bad_rows().chain(self.shared.eval.bad_rows()) {
            let (path, first) = (file.path.display(), bad.first.join("\n  "));
            let more = if bad.count > bad.first.len() as u64 { "\n  ..." } else { "" };
            let rows = file.num_rows;
            warnings
                .push(format!("{path}: {} of {rows} rows cannot be used and are skipped:\n  {first}{more}", bad.count));
        }
        warnings
    }

    /// Training rows; those that `eval_split` holds out are not counted.
    #[must_use]
    pub fn num_train_rows(&self) -> usize {
        self.shared.train.num_rows() as usize - self.shared.held_out.len()
    }

    /// Training rows that an epoch visits, by the weight of their source. With `packing` too, these are rows of the
    /// files.
    #[must_use]
    pub fn rows_per_epoch(&self) -> usize {
        let sources = self.shared.config.train.iter().zip(self.shared.kept_ranges());
        sources.map(|(source, rows)| num_visits(source.weight, rows.len())).sum()
    }

    /// Rows to evaluate on, by the weight of their source.
    #[must_use]
    pub fn num_eval_rows(&self) -> usize {
        self.shared.eval_rows().1.len()
    }

    /// Micro-batches of an evaluation.
    #[must_use]
    pub fn num_eval_batches(&self, micro_batch_size: usize, max_batches: Option<usize>) -> usize {
        let num_batches = self.shared.eval_order().num_rows().div_ceil(micro_batch_size.max(1));
        num_batches.min(max_batches.unwrap_or(usize::MAX))
    }

    /// Micro-batches of an epoch; the last one may have fewer rows. With `packing`, those of the first epoch: a later
    /// one, packed in its own order, may differ by a few.
    #[must_use]
    pub fn batches_per_epoch(&self, micro_batch_size: usize) -> u64 {
        let num_rows = if self.shared.lengths.is_some() {
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
    /// Where there is no such row.
    pub fn train_row(&self, index: usize) -> Result<(RowSource, EncodedRow), DataError> {
        assert!(index < self.num_train_rows(), "there is no training row {index}");
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        self.shared.encode(Set::Train, skip_held_out(&self.shared.held_out, index))
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Micro-batches of `micro_batch_size` rows from `from` on, without end: epoch follows epoch.
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
    /// Training rows in the order of epoch `epoch`.
    pub(super) fn train_order(&self, epoch: u64) -> Order {
        let mut rows = self.visits(&self.config.train, self.kept_ranges(), epoch);
        for row in &mut rows {
            *row = skip_held_out(&self.held_out, *row);
        }
        if self.config.shuffle {
            shuffle(&mut rows, self.seed, epoch, Purpose::Epoch);
        }
        let mut order = self.order(Set::Train, rows);
        if let (OrderRows::Packed(packs), true) = (&mut order.rows, self.config.shuffle) {
            // Packing leaves rows full of long documents beside each other.
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
            return (Set::Train, self.held_out.clone());
        }
        (Set::Eval, self.visits(&self.config.eval, self.eval.sources().iter().cloned(), 0))
    }

    fn order(&self, set: Set, rows: Vec<u32>) -> Order {
        let rows = match &self.lengths {
            None => OrderRows::Single(rows),
            Some([train, eval]) => {
                let lengths = if set == Set::Train { train } else { eval };
                let capacity = u32::try_from(self.config.max_length).unwrap_or(u32::MAX);
                OrderRows::Packed(best_fit(&rows, lengths, capacity))
            }
        };
        Order { set, rows }
    }

    /// Training rows of each source, counted without those held out.
    fn kept_ranges(&self) -> impl Iterator<Item = Range<u32>> {
        let held_out_before = |row: u32| self.held_out.partition_point(|held_out| *held_out < row);
        // A count of held-out rows below `row` fits where `row` does.
        let kept = move |row: u32| row - u32::try_from(held_out_before(row)).unwrap_or(row);
        self.train.sources().iter().map(move |rows| kept(rows.start)..kept(rows.end))
    }

    fn visits(&self, sources: &[DataSource], rows: impl Iterator<Item = Range<u32>>, epoch: u64) -> Vec<u32> {
        let sources = sources.iter().zip(rows).enumerate();
        sources
            .flat_map(|(index, (source, rows))| order::visits(&rows, source.weight, self.seed, epoch, index))
            .collect()
    }

    /// The tokens of a row and where it was read.
    fn encode(&self, set: Set, row: u32) -> Result<(RowSource, EncodedRow), DataError> {
        let encoder = Encoder::new(&self.tokenizer, self.template.as_ref(), &self.config);
        match set {
            Set::Train => self.train.encode(row, &encoder),
            Set::Eval => {
                let (source, tokens) = self.eval.encode(row, &encoder)?;
                Ok((RowSource { file: self.train.infos().count() + source.file, ..source }, tokens))
            }
        }
    }

    /// One micro-batch of rows `rows` of `order`. Documents without a token that carries loss are left out.
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
                let (source, encoded) = self.encode(order.set, *document)?;
                if counts.add(&encoded) {
                    documents.push((source, encoded));
                }
            }
            if !documents.is_empty() {
                encoded_rows.push(documents);
            }
        }
        Ok((Batch::of_rows(&encoded_rows, self.tokenizer.pad_id()), counts))
    }
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
