//! How prompts were formatted in training: a small file beside the adapter.
//!
//! PEFT refuses keys in `adapter_config.json` that it does not know, and ignores other files of the folder.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ExportError;
use crate::data::template::{ChatTemplate, TemplateError};
use crate::data::tokenizer::{SpecialToken, Tokenizer};
use crate::util::files;

/// The file's name, in the folder of an adapter.
pub const PROMPT_FORM_FILE: &str = "prompt_form.json";

/// How a prompt is passed to a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "prompt_form", rename_all = "snake_case")]
pub enum PromptForm {
    /// As plain text that the model continues.
    Raw,
    /// As a user's turn.
    ChatTemplate {
        /// The template, where it differs from the model's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chat_template: Option<String>,
        /// The system message of rows that have none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        system: Option<String>,
    },
}

/// What ends answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// Tokens.
    pub tokens: Vec<SpecialToken>,
    /// A text, where no token does.
    pub text: Option<String>,
}

impl PromptForm {
    /// The system message of rows that have none.
    #[must_use]
    pub fn system(&self) -> Option<&str> {
        match self {
            Self::Raw => None,
            Self::ChatTemplate { system, .. } => system.as_deref(),
        }
    }

    /// The template that prompts went through in training, or by default the model's own; `None` where they went through none.
    ///
    /// # Errors
    /// A template that is not valid.
    pub fn template(form: Option<&Self>, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, TemplateError> {
        match form {
            Some(Self::Raw) => Ok(None),
            Some(Self::ChatTemplate { chat_template: Some(source), .. }) => {
                ChatTemplate::new(source, "the adapter", tokenizer).map(Some)
            }
            _ => ChatTemplate::open("auto", tokenizer),
        }
    }

    /// What ends the answers that were trained on.
    #[must_use]
    pub fn ends(&self, tokenizer: &Tokenizer) -> Ends {
        // Of a template that cannot be used nothing is known.
        match (self, Self::template(Some(self), tokenizer).ok().flatten()) {
            (_, Some(template)) => Ends { tokens: template.ends().tokens.clone(), text: template.ends().text.clone() },
            (Self::Raw, None) => Ends { tokens: tokenizer.eos().cloned().into_iter().collect(), text: None },
            (Self::ChatTemplate { .. }, None) => Ends::default(),
        }
    }

    /// Writes it beside an adapter; the file is written completely or not at all.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), ExportError> {
        let path = folder.join(PROMPT_FORM_FILE);
        let written = serde_json::to_string_pretty(self).map_err(std::io::Error::other);
        written.and_then(|json| files::write(&path, format!("{json}\n"))).map_err(ExportError::io("write", &path))
    }

    /// Reads the form of an adapter; `None` where it is unknown, as for adapters that another program wrote.
    ///
    /// # Errors
    /// A file that cannot be read or understood.
    pub fn read(folder: &Path) -> Result<Option<Self>, ExportError> {
        let path = folder.join(PROMPT_FORM_FILE);
        let read = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            content => content.and_then(|json| Ok(serde_json::from_slice(&json)?)),
        };
        read.map(Some).map_err(ExportError::io("read", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_comes_back_as_it_was_written_and_is_unknown_where_there_is_none() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(PromptForm::read(folder.path()).unwrap(), None);
        for text in [None, Some("{{ messages }}\n".to_owned())] {
            let of_chat = PromptForm::ChatTemplate { chat_template: text.clone(), system: text };
            for form in [PromptForm::Raw, of_chat] {
                form.write(folder.path()).unwrap();
                assert_eq!(PromptForm::read(folder.path()).unwrap(), Some(form));
            }
        }
        std::fs::write(folder.path().join(PROMPT_FORM_FILE), r#"{"prompt_form": "song"}"#).unwrap();
        let error = PromptForm::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains(PROMPT_FORM_FILE) && error.contains("song"), "{error}");
    }
}
