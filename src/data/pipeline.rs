//! From the files of a recipe to rows of tokens.

use std::collections::HashSet;
use std::ops::{AddAssign, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::batch::{Batch, Document, RowSource, Target};
use super::config::{DataConfig, DataFormat, DataSource, EvalSplit};
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::files::{FileKind, RowFile};
use super::formats::RowFormat;
use super::loader::{EvalLoader, Loader};
use super::order::{Purpose, permutation, shuffle};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::windows::TokenFile;

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

/// What rows turned out to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCounts {
    /// Rows that were read.
    pub rows: u64,
    /// Rows that were longer than `max_length`.
    pub truncated: u64,
    /// Truncated rows of whose answer nothing was left.
    pub answer_cut: u64,
    /// Rows that were left out, since no token of theirs carries loss (those of `answer_cut` among them).
    pub without_targets: u64,
    /// Tokens of the rows that were not left out.
    pub tokens: u64,
    /// Tokens that carry loss.
    pub target_tokens: u64,
}

impl AddAssign for RowCounts {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.truncated += other.truncated;
        self.answer_cut += other.answer_cut;
        self.without_targets += other.without_targets;
        self.tokens += other.tokens;
        self.target_tokens += other.target_tokens;
    }
}

/// A file of the recipe, and what was found in it.
#[derive(Clone, Debug, PartialEq)]
pub struct FileInfo {
    /// The file.
    pub path: PathBuf,
    /// Its layout.
    pub kind: FileKind,
    /// How its rows are read; what `auto` found.
    pub format: DataFormat,
    /// Its rows; for a .txt file, windows of `max_length` tokens.
    pub num_rows: usize,
    /// Columns that are not read.
    pub unused_columns: Vec<String>,
    /// Whether it comes from `[[data.eval]]`.
    pub is_eval: bool,
}

#[derive(Debug)]
enum Rows {
    Objects(RowFile),
    Windows(TokenFile),
}

#[derive(Debug)]
struct DataFile {
    rows: Rows,
    format: RowFormat,
    /// Number of its first row among the rows of all training files, or of all evaluation files.
    first_row: usize,
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
    files: Vec<DataFile>,
    /// Files of `[[data.train]]`; those of `[[data.eval]]` follow.
    num_train_files: usize,
    /// Training rows that `eval_split` holds out, ascending.
    held_out: Vec<u32>,
    /// Rows of each training source, counted without those held out.
    train_sources: Vec<Range<u32>>,
    eval_sources: Vec<Range<u32>>,
}

impl DataPipeline {
    /// Finds the rows of all files and decides how they are read. Nothing is tokenised but .txt files.
    ///
    /// `chat_template` and the paths of `config` are used as they are: relative ones start at the current folder.
    ///
    /// # Errors
    /// No files, a file that cannot be read, columns of no known format, conversations without a chat template, an
    /// `eval_split` that leaves nothing to train on.
    pub fn open(config: &DataConfig, tokenizer: Arc<Tokenizer>, seed: u64) -> Result<Self, DataError> {
        if config.train.is_empty() {
            return Err(DataError::Config("no training data\n  hint: add `[[data.train]]` with a `path`".into()));
        }
        if !config.eval.is_empty() && config.eval_split.is_some() {
            let hint = "`data.eval_split` holds out training rows, `[[data.eval]]` names files: give one of the two";
            return Err(DataError::Config(hint.into()));
        }
        let (mut files, mut infos) = (Vec::new(), Vec::new());
        let mut open_sources = |sources: &[DataSource], is_eval: bool| -> Result<Vec<Range<u32>>, DataError> {
            let mut first_row = 0;
            let mut ranges = Vec::new();
            for source in sources {
                let start = row_number(first_row)?;
                for path in matching_files(&source.path)? {
                    let (rows, format, mut info) = open_file(&path, source, config, &tokenizer)?;
                    info.is_eval = is_eval;
                    files.push(DataFile { rows, format, first_row });
                    first_row += info.num_rows;
                    infos.push(info);
                }
                ranges.push(start..row_number(first_row)?);
            }
            Ok(ranges)
        };
        let mut train_sources = open_sources(&config.train, false)?;
        let eval_sources = open_sources(&config.eval, true)?;
        let num_train_files = infos.iter().filter(|info| !info.is_eval).count();

        let num_rows = train_sources.last().map_or(0, |last| last.end);
        let held_out = held_out_rows(config.eval_split, num_rows, seed)?;
        for source in &mut train_sources {
            let held_out_before = |row: u32| row_number(held_out.partition_point(|held_out| *held_out < row));
            *source = source.start - held_out_before(source.start)?..source.end - held_out_before(source.end)?;
        }

        let template = open_template(config, &tokenizer, &infos)?;
        Ok(Self {
            shared: Arc::new(Shared {
                config: config.clone(),
                seed,
                tokenizer,
                template,
                infos,
                files,
                num_train_files,
                held_out,
                train_sources,
                eval_sources,
            }),
        })
    }

    /// The files, those of `[[data.train]]` first; [`RowSource::file`] counts in this list.
    #[must_use]
    pub fn files(&self) -> &[FileInfo] {
        &self.shared.infos
    }

    /// What is odd about the files but no error.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let train: HashSet<&Path> = self.files().iter().filter(|f| !f.is_eval).map(|f| f.path.as_path()).collect();
        let both = self.files().iter().filter(|file| file.is_eval && train.contains(file.path.as_path()));
        both.map(|file| {
            format!(
                "{} is in `data.train` and in `data.eval`: the evaluation loss will be that of seen rows\n  hint: \
                 `data.eval_split` holds rows out",
                file.path.display()
            )
        })
        .collect()
    }

    /// Training rows; those that `eval_split` holds out are not counted.
    #[must_use]
    pub fn num_train_rows(&self) -> usize {
        self.shared.train_sources.last().map_or(0, |last| last.end as usize)
    }

    /// Rows that an epoch visits: the training rows by the weight of their source.
    #[must_use]
    pub fn rows_per_epoch(&self) -> usize {
        let visits = self.shared.config.train.iter().zip(&self.shared.train_sources);
        visits.map(|(source, range)| num_visits(source.weight, range.len())).sum()
    }

    /// Rows to evaluate on.
    #[must_use]
    pub fn num_eval_rows(&self) -> usize {
        self.shared.eval_order().len()
    }

    /// Micro-batches of an epoch; the last one may have fewer rows.
    #[must_use]
    pub fn batches_per_epoch(&self, micro_batch_size: usize) -> u64 {
        self.rows_per_epoch().div_ceil(micro_batch_size.max(1)) as u64
    }

    /// Training row `index` of [`num_train_rows`](Self::num_train_rows), in the order of the files.
    ///
    /// # Errors
    /// A row that cannot be read, with its place.
    pub fn train_row(&self, index: usize) -> Result<(RowSource, EncodedRow), DataError> {
        self.shared.encode(Place::Train(row_number(index)?))
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

/// A row by its number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// Among the training rows that are not held out.
    Train(u32),
    /// Among the rows of all training files.
    HeldOut(u32),
    /// Among the rows of the evaluation files.
    Eval(u32),
}

impl Shared {
    /// Training rows in the order of epoch `epoch`.
    pub(super) fn train_order(&self, epoch: u64) -> Vec<Place> {
        let mut order = self.visits(&self.config.train, &self.train_sources, epoch);
        if self.config.shuffle {
            shuffle(&mut order, self.seed, epoch, Purpose::Epoch);
        }
        order.into_iter().map(Place::Train).collect()
    }

    /// Evaluation rows, in the order of the files.
    pub(super) fn eval_order(&self) -> Vec<Place> {
        if self.config.eval.is_empty() {
            return self.held_out.iter().copied().map(Place::HeldOut).collect();
        }
        self.visits(&self.config.eval, &self.eval_sources, 0).into_iter().map(Place::Eval).collect()
    }

    /// Rows of `sources` in the order of the files, each as often as the weight of its source says. Of a weight that is
    /// not a whole number, the rest is a subset of the rows drawn for the epoch.
    fn visits(&self, sources: &[DataSource], ranges: &[Range<u32>], epoch: u64) -> Vec<u32> {
        let mut visits = Vec::new();
        for (index, (source, range)) in sources.iter().zip(ranges).enumerate() {
            let count = num_visits(source.weight, range.len());
            let (whole, rest) =
                (count.checked_div(range.len()).unwrap_or(0), count.checked_rem(range.len()).unwrap_or(0));
            for _ in 0..whole {
                visits.extend(range.clone());
            }
            if rest > 0 {
                let order = permutation(range.end - range.start, self.seed, epoch, Purpose::Subset { source: index });
                let mut subset = order[..rest].to_vec();
                subset.sort_unstable();
                visits.extend(subset.into_iter().map(|row| range.start + row));
            }
        }
        visits
    }

    /// The tokens of a row and where it was read.
    pub(super) fn encode(&self, place: Place) -> Result<(RowSource, EncodedRow), DataError> {
        let (files, row) = match place {
            Place::Train(index) => (0..self.num_train_files, skip_held_out(&self.held_out, index)),
            Place::HeldOut(row) => (0..self.num_train_files, row),
            Place::Eval(row) => (self.num_train_files..self.files.len(), row),
        };
        let row = row as usize;
        let file = files.start + self.files[files].partition_point(|file| file.first_row <= row) - 1;
        let DataFile { rows, format, first_row } = &self.files[file];
        let row = row - first_row;
        let encoder = Encoder {
            tokenizer: &self.tokenizer,
            template: self.template.as_ref(),
            max_length: self.config.max_length,
            train_on_inputs: self.config.train_on_inputs,
        };
        let encoded = match rows {
            Rows::Windows(tokens) => encoder.window(tokens.read(row)),
            Rows::Objects(objects) => {
                let failed = |reason: String| objects.row_error(row, reason);
                let sample = format.read(&objects.read(row)?, self.template.is_some()).map_err(failed)?;
                encoder.encode(&sample).map_err(|error| failed(error.to_string()))?
            }
        };
        Ok((RowSource { file, row }, encoded))
    }

    /// One micro-batch of the rows at `places`, padded on the right to the longest. Rows without a token that carries
    /// loss are left out.
    pub(super) fn batch(
        &self,
        places: &[Place],
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<(Batch, RowCounts), DataError> {
        let mut counts = RowCounts::default();
        let mut rows = Vec::with_capacity(places.len());
        for place in places {
            if is_stopped() {
                return Err(DataError::Stopped);
            }
            let (source, row) = self.encode(*place)?;
            counts.rows += 1;
            counts.truncated += u64::from(row.is_truncated());
            counts.answer_cut += u64::from(row.is_answer_cut());
            let target_tokens = row.num_target_tokens();
            if target_tokens == 0 {
                counts.without_targets += 1;
                continue;
            }
            counts.tokens += row.ids.len() as u64;
            counts.target_tokens += target_tokens as u64;
            rows.push((source, row));
        }
        Ok((padded(&rows, self.tokenizer.pad_id()), counts))
    }
}

/// Rows of a batch, one document each.
fn padded(rows: &[(RowSource, EncodedRow)], pad_id: u32) -> Batch {
    let row_length = rows.iter().map(|(_, row)| row.ids.len()).max().unwrap_or(0);
    let mut batch = Batch { row_length, ..Batch::default() };
    for (source, row) in rows {
        let start = batch.input_ids.len();
        batch.input_ids.extend(&row.ids);
        batch.input_ids.resize(start + row_length, pad_id);
        batch.documents.push(Document { start, len: row.ids.len() });
        batch.sources.push(*source);
        // The one place where labels are shifted: the token at `at` is predicted from `at - 1`.
        let targets = row.ids.iter().zip(&row.carries_loss).enumerate().skip(1).filter(|(_, (_, loss))| **loss);
        batch.targets.extend(targets.map(|(at, (token, _))| Target { position: start + at - 1, token: *token }));
    }
    batch
}

/// Rows of a source that an epoch visits; at least one.
fn num_visits(weight: f64, num_rows: usize) -> usize {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let visits = (weight * num_rows as f64).round() as usize;
    if num_rows == 0 { 0 } else { visits.max(1) }
}

/// Rows are counted in 32 bits.
fn row_number(row: usize) -> Result<u32, DataError> {
    u32::try_from(row).map_err(|_| DataError::Config(format!("more than {} rows are not supported", u32::MAX)))
}

/// Number, among all rows, of the `index`-th row that is not held out.
fn skip_held_out(held_out: &[u32], index: u32) -> u32 {
    // Before the i-th held-out row (from 0) stand `held_out[i] - i` rows that are not.
    let (mut low, mut high) = (0, held_out.len());
    while low < high {
        let middle = usize::midpoint(low, high);
        if u64::from(held_out[middle]) <= u64::from(index) + middle as u64 { low = middle + 1 } else { high = middle }
    }
    index + u32::try_from(low).unwrap_or(u32::MAX)
}

/// Rows that `eval_split` holds out, ascending.
fn held_out_rows(split: Option<EvalSplit>, num_rows: u32, seed: u64) -> Result<Vec<u32>, DataError> {
    let count = match split {
        None => return Ok(Vec::new()),
        Some(EvalSplit::Rows(rows)) => rows,
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        Some(EvalSplit::Share(share)) => ((share * f64::from(num_rows)).round() as usize).max(1),
    };
    if count >= num_rows as usize {
        return Err(DataError::Config(format!(
            "`data.eval_split` holds out {count} of {num_rows} training rows, which leaves none to train on"
        )));
    }
    let mut held_out = permutation(num_rows, seed, 0, Purpose::EvalSplit);
    held_out.truncate(count);
    held_out.sort_unstable();
    Ok(held_out)
}

/// The files that a `path` names, sorted.
fn matching_files(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let literal = PathBuf::from(pattern);
    let failed = |reason: String| DataError::File { path: literal.clone(), reason };
    if literal.is_file() {
        return Ok(vec![literal]);
    }
    if literal.is_dir() {
        return Err(failed(format!("is a folder\n  hint: name its files, such as \"{pattern}/*.jsonl\"")));
    }
    if !pattern.contains(['*', '?', '[']) {
        return Err(failed("no such file".into()));
    }
    let matches = glob::glob(pattern).map_err(|error| failed(format!("not a valid glob: {error}")))?;
    let mut files = Vec::new();
    for path in matches {
        let path = path.map_err(|error| failed(error.to_string()))?;
        if path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() { Err(failed("matches no file".into())) } else { Ok(files) }
}

/// Opens a file of `source` and decides how its rows are read.
fn open_file(
    path: &Path,
    source: &DataSource,
    config: &DataConfig,
    tokenizer: &Tokenizer,
) -> Result<(Rows, RowFormat, FileInfo), DataError> {
    let failed = |reason: String| DataError::File { path: path.to_path_buf(), reason };
    let kind = FileKind::of(path).ok_or_else(|| failed("files end in .json, .jsonl, .parquet or .txt".into()))?;
    if kind == FileKind::Txt {
        if !matches!(source.format, DataFormat::Auto | DataFormat::Text) || !source.columns.is_empty() {
            return Err(failed("a .txt file has no columns: its `format` is \"text\"".into()));
        }
        let tokens = TokenFile::open(path, tokenizer, config.max_length)?;
        let (num_rows, format) = (tokens.num_rows(), DataFormat::Text);
        let info = FileInfo { path: path.into(), kind, format, num_rows, unused_columns: Vec::new(), is_eval: false };
        return Ok((Rows::Windows(tokens), RowFormat::text(), info));
    }
    let rows = RowFile::open(path, kind)?;
    let first = rows.read(0)?;
    let format =
        RowFormat::detect(source.format, &source.columns, &first).map_err(|reason| rows.row_error(0, reason))?;
    let info = FileInfo {
        path: path.into(),
        kind: rows.kind(),
        format: format.format(),
        num_rows: rows.num_rows(),
        unused_columns: format.unused_columns(&first),
        is_eval: false,
    };
    Ok((Rows::Objects(rows), format, info))
}

/// The chat template, if a file needs one.
fn open_template(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    files: &[FileInfo],
) -> Result<Option<ChatTemplate>, DataError> {
    let needs = |format| matches!(format, DataFormat::Messages | DataFormat::Sharegpt);
    if !files.iter().any(|file| needs(file.format) || file.format == DataFormat::Alpaca) {
        return Ok(None);
    }
    let template = ChatTemplate::open(&config.chat_template, tokenizer)?;
    match files.iter().find(|file| needs(file.format)) {
        Some(file) if template.is_none() => Err(DataError::File {
            path: file.path.clone(),
            reason: format!(
                "format `{}` needs a chat template, and {}\n  hint: set `data.chat_template` to a Jinja file",
                file.format.name(),
                if config.chat_template == "none" {
                    "`data.chat_template` = \"none\" turns it off"
                } else {
                    "the model has none"
                }
            ),
        }),
        _ => Ok(template),
    }
}
