//! Opens the files of a dataset, and checks the settings that depend on their formats.

use std::path::PathBuf;

use crate::config::{DataConfig, DataFormat, RowKind, RowLimit};
use crate::data::data_file::{OpenedFile, Reading};
use crate::data::error::DataError;
use crate::data::files::OpenOptions;
use crate::data::sources::source_files;
use crate::data::template::{ChatTemplate, TemplateError};
use crate::data::tokenizer::Tokenizer;

/// The files of a source, with its limit of rows.
pub(super) type OpenedSource = (Option<RowLimit>, Vec<OpenedFile>);

/// Opens the files of all sources, those to train on first, each with its limit of rows.
pub(super) fn all_opened(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    options: &OpenOptions<'_>,
) -> Result<Vec<OpenedSource>, DataError> {
    let mut opened = Vec::new();
    for (section, sources) in [("train", &config.train), ("eval", &config.eval)] {
        for (index, source) in sources.iter().enumerate() {
            let paths = source_files(&format!("data.{section}[{index}].path"), source, options)?;
            let reading = Reading { is_eval: section == "eval", source, config, tokenizer, template, options };
            opened.push((source.rows, opened_files(paths, &reading)?));
        }
    }
    Ok(opened)
}

/// Opens the files of a source, as many as its `rows` need.
fn opened_files(paths: Vec<PathBuf>, reading: &Reading<'_>) -> Result<Vec<OpenedFile>, DataError> {
    let (mut limit, mut opened) = (reading.source.rows, Vec::<OpenedFile>::new());
    for path in paths {
        if limit == Some(RowLimit::Rows(0)) {
            break;
        }
        let file = OpenedFile::open(path, limit, reading)?;
        if let (Some(RowLimit::Rows(left)), Some(rows)) = (limit, file.num_rows()) {
            limit = Some(RowLimit::Rows(left.saturating_sub(rows)));
        }
        opened.push(file);
    }
    let num_texts = opened.iter().filter(|file| file.num_rows().is_none()).count();
    if RowLimit::number(limit).is_some() && num_texts > 0 && num_texts < opened.len() {
        let path = &reading.source.path;
        let reason = format!("`rows` of \"{path}\" would count rows of tables and windows of texts together");
        return Err(DataError::Config(format!("{reason}\n  hint: name the .txt files in a section of their own")));
    }
    Ok(opened)
}

/// Warnings about files that `data.system` does not change.
pub(super) fn unmoved_by_system(
    config: &DataConfig,
    has_template: bool,
    files: &[&OpenedFile],
) -> Result<Vec<String>, DataError> {
    let Some(system) = &config.system else { return Ok(Vec::new()) };
    let is_unmoved = |file: &&&OpenedFile| match file.format() {
        DataFormat::Text => true,
        DataFormat::PromptCompletion => !has_template,
        _ => false,
    };
    let unmoved: Vec<&&OpenedFile> = files.iter().filter(is_unmoved).collect();
    if unmoved.len() == files.len() {
        let reason = format!("`data.system` = {system:?} changes nothing: the rows are plain text, no conversations");
        return Err(DataError::Config(format!("{reason}\n  hint: take it out")));
    }
    let warning = |file: &&&OpenedFile| {
        format!("{}: `data.system` does not change these rows, which are plain text", file.path().display())
    };
    Ok(unmoved.iter().map(warning).collect())
}

/// Warnings about answers that end nowhere, and prompts behind which none begins.
pub(super) fn without_ends(
    config: &DataConfig,
    template: Option<&ChatTemplate>,
    tokenizer: &Tokenizer,
    files: &[&OpenedFile],
) -> Vec<String> {
    let ends = template.map(ChatTemplate::ends);
    let has_answers = !matches!(config.row_kind, RowKind::Prompt | RowKind::ScoredPair);
    let without_end = ends.and_then(|ends| ends.without_end.clone()).filter(|_| has_answers);
    let bad_prompt = ends.and_then(|ends| ends.bad_prompt.clone()).filter(|_| config.row_kind != RowKind::ScoredPair);
    let is_joined = |file: &&OpenedFile| matches!(file.format(), DataFormat::PromptCompletion | DataFormat::Alpaca);
    let no_eos = template.is_none() && has_answers && tokenizer.eos().is_none() && files.iter().any(is_joined);
    let no_eos = no_eos.then(|| {
        "the tokenizer has no `eos_token` that could end a completion: the model does not learn where one ends\n  hint: name \
         one in tokenizer_config.json"
            .to_owned()
    });
    [without_end, bad_prompt, no_eos].into_iter().flatten().collect()
}

/// The chat template, if a file needs one. `opened` is the result of opening the template that the recipe names.
pub(super) fn needed_template(
    config: &DataConfig,
    opened: Result<Option<ChatTemplate>, TemplateError>,
    files: &[&OpenedFile],
) -> Result<Option<ChatTemplate>, DataError> {
    if !files.iter().any(|file| file.format().uses_template()) {
        // A template that the recipe names must be usable even where no row needs it. An unusable template of the model
        // is ignored.
        return match opened {
            Err(error) if config.chat_template != "auto" => Err(error.into()),
            _ => Ok(None),
        };
    }
    let template = opened?;
    let needs = |file: &&&OpenedFile| matches!(file.format(), DataFormat::Messages | DataFormat::Sharegpt);
    match files.iter().find(needs) {
        Some(file) if template.is_none() => Err(DataError::Config(format!(
            "{}: format `{}` needs a chat template, and {}\n  hint: set `data.chat_template` to a Jinja file, or put chat_template.jinja beside the model",
            file.path().display(),
            file.format().name(),
            if config.chat_template == "none" {
                "`data.chat_template` = \"none\" turns it off"
            } else {
                "the model has none"
            }
        ))),
        _ => Ok(template),
    }
}
