//! What the first rows show, and what a recipe has to say so that they can be read.

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use serde_json::Value;

use super::columns::{Guess, media};
use super::draft::Draft;
use crate::config::{DataConfig, OnBadRow};
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::data::error::DataError;
use crate::data::files::{FileInfo, FileKind};
use crate::data::sources::first_rows;
use crate::data::tokenizer::Tokenizer;
use crate::hub::Progress;
use crate::recipe::{Purpose, Recipe};
use crate::run::images::image_headers_of_rows;
use crate::run::inputs::{ModelSource, data_failure};
use crate::run::prepare::Prepared;
use crate::schema::{Override, Problem, Problems};
use crate::train::budget::images::ImageMemory;
use crate::util::failure::Failure;
use crate::util::text::shortened;

/// Rows of each file that are looked at.
pub(super) const MAX_ROWS: usize = 1000;
/// Rows from which columns are guessed.
const GUESSED_ROWS: usize = 50;
/// More tokens than a row has that is trained on.
const WHOLE: usize = 1 << 24;
/// Tokens of a window of text.
const WINDOW_TOKENS: usize = 1024;
/// Characters of a text that are shown; no name of a column has more.
const MAX_SHOWN: usize = 60;
const OBJECTIVE: &str = "objective.name";
/// Columns of the first source.
const COLUMNS: &str = "data.train.0.columns";

/// What the first rows show.
pub(super) struct FirstRows {
    /// Rows that were looked at.
    pub(super) count: usize,
    /// Rows that there are.
    pub(super) total: usize,
    /// Tokens a row, ascending.
    lengths: Vec<usize>,
    pub(super) format: &'static str,
    pub(super) num_files: usize,
    /// Whether they are windows of texts: how long those are is to be chosen.
    pub(super) are_windows: bool,
    /// What their images take.
    pub(super) images: ImageMemory,
}

impl FirstRows {
    /// Length that `percent` of the rows do not exceed.
    pub(super) fn percentile(&self, percent: usize) -> usize {
        let rank = (self.lengths.len() * percent).div_ceil(100).max(1);
        self.lengths.get(rank - 1).copied().unwrap_or(0)
    }

    pub(super) fn is_part(&self) -> bool {
        self.total > self.count
    }

    /// Mean number of tokens of a row, none of which is longer than `max_length`.
    pub(super) fn mean_length(&self, max_length: usize) -> usize {
        self.lengths.iter().map(|length| (*length).min(max_length)).sum::<usize>().div_ceil(self.lengths.len().max(1))
    }

    /// `window`: the tokens of a window of text.
    fn of(data: &Dataset, window: usize) -> Result<Self, DataError> {
        let num_files = data.files().len();
        let length = |index: usize| data.file_row(index).map(|(_, row)| row.full_length);
        let lengths = (0..data.num_file_rows()).into_par_iter().map(length).collect::<Result<Vec<_>, DataError>>();
        let mut lengths: Vec<usize> = lengths?.into_iter().filter(|length| *length > 0).collect();
        let are_windows = data.files().iter().all(|file| file.kind == FileKind::Txt);
        if are_windows {
            // Every file is a text of its own, here one row.
            lengths = lengths.into_iter().flat_map(|tokens| windows(tokens, window)).collect();
        }
        lengths.sort_unstable();
        let format = data.files().first().map_or("", |file| file.format.name());
        let unread: usize = data.files().iter().map(|file| file.num_rows_in_file - file.num_rows).sum();
        let (count, images) = (lengths.len(), ImageMemory::of(data)?);
        Ok(Self { count, total: count + unread, lengths, format, num_files, are_windows, images })
    }
}

/// The lengths of the windows of a text.
fn windows(tokens: usize, window: usize) -> impl Iterator<Item = usize> {
    (0..tokens).step_by(window).map(move |start| window.min(tokens - start))
}

/// Looks at the first rows. What they need is set or offered in `draft`; where they cannot be read even so, it says why, and
/// there is nothing to tell.
pub(super) fn look(draft: &mut Draft, prepared: &mut Prepared) -> Result<Option<FirstRows>, Failure> {
    let tokenizer = prepared.source.tokenizer().map_err(|failure| of_arguments(failure.about("model.path")))?;
    let (tokenizer, mut on_bad_row) = (Arc::new(tokenizer), prepared.recipe.data.on_bad_row);
    let opened = loop {
        let error = match opened(&prepared.recipe.data, on_bad_row, (&prepared.source, &tokenizer)) {
            Ok(opened) => break opened,
            Err(error) => error,
        };
        let is_named = prepared.recipe.data.train.first().is_none_or(|source| !source.columns.is_empty());
        match error {
            DataError::Rows(mistakes) if on_bad_row == OnBadRow::Error => {
                on_bad_row = OnBadRow::Skip;
                draft.offer(
                    "data.on_bad_row",
                    "skip",
                    "leaves out the rows that cannot be used, which stand at the end",
                );
                draft.has_mistakes = true;
                draft.footer.extend(mistakes.iter().map(|mistake| one_line(&mistake.to_string())));
            }
            DataError::Row { .. } | DataError::Config(_) if finds_objective(draft, prepared, &tokenizer) => {}
            DataError::Row { .. } if !is_named && guess(draft, prepared)? => {}
            // Said already.
            DataError::Rows(_) if draft.has_mistakes => return Ok(None),
            DataError::Row { .. } | DataError::Rows(_) | DataError::Config(_) | DataError::Template(_) => {
                draft.has_mistakes = true;
                draft.footer.push(one_line(&error.to_string()));
                return Ok(None);
            }
            error => return Err(of_arguments(data_failure(error))),
        }
    };
    let notes =
        opened.files().iter().filter_map(|file| Some(format!("{}: {}", file.path.display(), file.note.as_ref()?)));
    draft.footer.extend(notes.map(|note| one_line(&note)));
    opened.files().iter().for_each(|file| tell_unread(draft, file));
    let window = if draft.is_given("data.max_length") {
        prepared.recipe.data.max_length
    } else {
        WINDOW_TOKENS.min(prepared.source.config.max_position_embeddings)
    };
    FirstRows::of(&opened, window).map(Some).map_err(data_failure)
}

/// The first rows, in whole: how long they are is a question here.
fn opened(
    data: &DataConfig,
    on_bad_row: OnBadRow,
    (source, tokenizer): (&ModelSource, &Arc<Tokenizer>),
) -> Result<Dataset, DataError> {
    let config = DataConfig { max_length: WHOLE, on_bad_row, eval: Vec::new(), eval_split: None, ..data.clone() };
    let options = OpenOptions {
        cache: CacheSettings::default(),
        progress: Progress::detect(false),
        max_rows: Some(MAX_ROWS),
        images: image_headers_of_rows(&source.folder, &source.config, &config),
        ..OpenOptions::default()
    };
    Dataset::open(&config, Arc::clone(tokenizer), 0, &options)
}

/// A message of several lines as one.
fn one_line(text: &str) -> String {
    text.replace("\n  hint: ", "; ").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Takes a change into `draft` and `prepared`.
fn take(draft: &mut Draft, prepared: &mut Prepared, key: &str, value: impl Into<toml::Value>, reason: &str) -> bool {
    let value = value.into();
    let changes = [Override::set(format!("{key}={value}"))];
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &changes, Purpose::Training);
    let Ok(recipe) = recipe else { return false };
    prepared.recipe = recipe;
    draft.set(key, value, reason);
    true
}

/// Sets the objective of rows that are those of preferences.
fn finds_objective(draft: &mut Draft, prepared: &mut Prepared, tokenizer: &Arc<Tokenizer>) -> bool {
    if draft.get(OBJECTIVE).is_some() {
        return false;
    }
    let objectives =
        [("dpo", "the rows have a chosen and a rejected answer"), ("kto", "the rows have answers with a label")];
    objectives.into_iter().any(|(name, reason)| {
        let changes = [Override::set(format!("{OBJECTIVE}={name}"))];
        let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &changes, Purpose::Training);
        recipe.is_ok_and(|recipe| opened(&recipe.data, OnBadRow::Skip, (&prepared.source, tokenizer)).is_ok())
            && take(draft, prepared, OBJECTIVE, name, reason)
    })
}

/// Sets the columns of rows whose names are those of no format. `false` where there is nothing to guess.
fn guess(draft: &mut Draft, prepared: &mut Prepared) -> Result<bool, Failure> {
    let rows = first_rows(&prepared.recipe.data.train[0], GUESSED_ROWS);
    let cell = rows.first().and_then(Value::as_object).and_then(|row| row.keys().find(|name| is_cell(name)));
    if let Some(cell) = cell {
        draft.footer.push(format!(
            "the first line is read as names of columns, such as {:?}: if it is a row, write a line of names above it, such as \
             prompt,completion",
            shortened(cell, MAX_SHOWN)
        ));
    }
    let (columns, objective) = match Guess::of(&rows) {
        Some(Guess::Columns(columns)) => (columns, None),
        Some(Guess::Preferences(columns)) => (columns, Some("dpo")),
        Some(Guess::Embeddings) => {
            let text = "these are rows of a model of embeddings (a text, one that is near and one that is far), which is not \
                        trained here";
            return Err(Failure::input(text));
        }
        None => return Ok(false),
    };
    let table: toml::Table =
        columns.iter().map(|(ours, theirs)| ((*ours).to_owned(), theirs.as_str().into())).collect();
    let is_taken = objective
        .is_none_or(|name| take(draft, prepared, OBJECTIVE, name, "the rows have a better and a worse answer"))
        && take(draft, prepared, COLUMNS, toml::Value::Table(table), "guessed");
    if is_taken {
        let columns: Vec<String> = columns.iter().map(|(ours, theirs)| format!("{theirs} -> {ours}")).collect();
        draft.footer.push(format!("columns: {} (guessed; change them in the recipe)", columns.join(", ")));
    }
    Ok(is_taken)
}

/// Whether a name of a column reads like what is in one: a number, a sentence, a whole text.
fn is_cell(name: &str) -> bool {
    let is_sentence = name.ends_with(['.', '?', '!', '。', '？', '！']) && name.split_whitespace().count() >= 3;
    is_sentence || name.chars().count() > MAX_SHOWN || name.parse::<f64>().is_ok()
}

/// Names the columns that are not read, and asks about one that may be the point of the rows.
fn tell_unread(draft: &mut Draft, file: &FileInfo) {
    let unread = &file.unused_columns;
    if unread.is_empty() {
        return;
    }
    draft.footer.push(format!("columns not read: {}", unread.join(", ")));
    if let Some(media) = media(unread) {
        draft.footer.push(format!("`{media}` is not learnt: texts alone are trained on"));
    }
    draft.footer.extend(file.unlearnt.as_deref().map(one_line));
}

/// Mistakes in keys that arguments gave name the arguments.
pub(super) fn of_arguments(failure: Failure) -> Failure {
    let Failure::Input(Problems(problems)) = failure else { return failure };
    let renamed = problems.into_iter().map(|problem| {
        let message = problem.message.replace("`model.path`", "--model").replace("`data.train[0].path`", "--data");
        let message = message.replace("`device.name`", "--device");
        let place = problem.place.filter(|place| place.starts_with("--"));
        Problem { place, message, excerpt: None, ..problem }
    });
    Failure::Input(Problems(renamed.collect()))
}
