//! The files of a tokenizer, in a model's folder, and beside an adapter.

use std::path::Path;

use super::{ExportError, PromptForm};
use crate::util::files;

/// The chat template file, which takes precedence over the template in `tokenizer_config.json`.
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// The file with a template that processors of transformers read before [`CHAT_TEMPLATE`].
pub(super) const PROCESSOR_TEMPLATE: &str = "chat_template.json";

/// The folder of further templates, such as that for conversations with tools.
const NAMED_TEMPLATES: &str = "additional_chat_templates";

/// The names that a tokenizer's files have.
pub const TOKENIZER_FILES: [&str; 9] = [
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", CHAT_TEMPLATE, PROCESSOR_TEMPLATE,
];

/// Copies the content, not the permissions: files of a cache are often links to write-protected files.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), ExportError> {
    let content = std::fs::read(from).map_err(ExportError::io("read", from))?;
    files::write(to, content).map_err(ExportError::io("write", to))
}

/// Copies the templates that have names, if there are any.
pub(super) fn copy_named_templates(from: &Path, to: &Path) -> Result<(), ExportError> {
    let Ok(entries) = std::fs::read_dir(from.join(NAMED_TEMPLATES)) else { return Ok(()) };
    let folder = to.join(NAMED_TEMPLATES);
    std::fs::create_dir_all(&folder).map_err(ExportError::io("create", &folder))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut templates = paths.filter(|path| path.extension().is_some_and(|extension| extension == "jinja"));
    templates.try_for_each(|path| copy(&path, &folder.join(path.file_name().unwrap_or_default())))
}

/// Writes the chat template of a training in the place of the tokenizer's own.
pub(super) fn write_template(folder: &Path, template: &str) -> Result<(), ExportError> {
    let path = folder.join(CHAT_TEMPLATE);
    files::write(&path, template).map_err(ExportError::io("write", &path))?;
    let path = folder.join(PROCESSOR_TEMPLATE);
    if path.exists() { std::fs::remove_file(&path).map_err(ExportError::io("remove", &path)) } else { Ok(()) }
}

/// Puts the tokenizer in `from` beside an adapter, where other programs look for it, with the chat template of the training if it
/// was none of the tokenizer's.
///
/// # Errors
/// Files that cannot be read or written.
pub fn write_tokenizer(from: &Path, folder: &Path, form: &PromptForm) -> Result<(), ExportError> {
    let num_bytes = |path: &Path| std::fs::metadata(path).map(|metadata| metadata.len()).ok();
    for name in TOKENIZER_FILES.iter().filter(|name| from.join(name).is_file()) {
        let (from, to) = (from.join(name), folder.join(name));
        // The best adapter is written again and again.
        if *name == CHAT_TEMPLATE || num_bytes(&from) != num_bytes(&to) {
            copy(&from, &to)?;
        }
    }
    let PromptForm::ChatTemplate { chat_template: Some(template), .. } = form else {
        return copy_named_templates(from, folder);
    };
    write_template(folder, template)
}
