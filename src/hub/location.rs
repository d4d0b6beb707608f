//! Decides whether a name is a folder or a repository.

use std::path::{Path, PathBuf};

use super::HubError;
use crate::gguf::is_gguf;
use crate::schema::{Problem, searched_folder};

/// What `model.path` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A folder on this machine, or a GGUF file.
    Folder(PathBuf),
    /// A repository id on the Hub: `name` or `owner/name`.
    Repository(String),
}

impl Location {
    /// An existing folder comes first; a name that looks like a path must exist; any other name is a repository id.
    ///
    /// # Errors
    /// A path that does not exist or is a file; a name that no repository can have.
    pub fn parse(path_or_id: &str) -> Result<Self, HubError> {
        let path = Path::new(path_or_id);
        if path.is_dir() || (path.is_file() && is_gguf(path)) {
            return Ok(Self::Folder(path.to_owned()));
        }
        if path.is_file() {
            let message = format!(
                "{path_or_id} is a file, expected a folder with config.json and safetensors files, or a .gguf file"
            );
            return Err(Problem::new(message).into());
        }
        let searched = searched_folder(path);
        if looks_like_a_path(path_or_id) || is_gguf(path) {
            let kind = if is_gguf(path) { "file" } else { "folder" };
            let problem = Problem::new(format!("{path_or_id}: no such {kind} in {}", searched.display()));
            let hint = if path.starts_with("~") {
                "`~` is not replaced here; write the folder in full"
            } else {
                "a Hub repository id has the form `owner/name`"
            };
            return Err(problem.hint(hint).into());
        }
        if is_repository_id(path_or_id) {
            return Ok(Self::Repository(path_or_id.to_owned()));
        }
        let example = "nor a Hub repository id such as `meta-llama/Llama-3.2-1B`";
        let message = format!("`{path_or_id}` is neither a folder in {} {example}", searched.display());
        Err(Problem::new(message).into())
    }
}

fn looks_like_a_path(name: &str) -> bool {
    name.starts_with(['/', '.', '~'])
        || name.ends_with('/')
        || name.contains('\\')
        || name.matches('/').count() > 1
        || name.split('/').next().is_some_and(|first| name.contains('/') && Path::new(first).is_dir())
}

/// The Hub's rule: one or two parts of letters, digits, `-`, `_` and `.`, at most 96 characters in all.
pub(super) fn is_repository_id(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
            && !part.starts_with(['-', '.'])
            && !part.ends_with(['-', '.'])
            && !part.contains("--")
            && !part.contains("..")
    };
    name.len() <= 96 && name.split('/').count() <= 2 && name.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_folders_win_and_ids_are_recognised() {
        assert_eq!(Location::parse("src").unwrap(), Location::Folder("src".into()));
        for id in ["gpt2", "meta-llama/Llama-3.2-1B", "HuggingFaceTB/SmolLM2-135M", "a/b_c.d"] {
            assert_eq!(Location::parse(id).unwrap(), Location::Repository(id.into()));
        }
    }

    #[test]
    fn what_looks_like_a_path_must_exist() {
        for path in ["./nope", "/nope/model", "../nope", "~/models/x", "a/b/c", "nope/", "C:\\models", "src/nope"] {
            let error = Location::parse(path).unwrap_err().to_string();
            assert!(error.contains(": no such folder in "), "{path}: {error}");
        }
        assert!(Location::parse("nope.gguf").unwrap_err().to_string().contains(": no such file in "));
        assert!(Location::parse("~/models").unwrap_err().to_string().contains("`~`"));
        let error = Location::parse("Cargo.toml").unwrap_err().to_string();
        assert!(error.contains("is a file"), "{error}");
        for name in ["", "a b", "-x", "a--b/c", "a/b..c"] {
            let error = Location::parse(name).unwrap_err().to_string();
            assert!(error.contains("is neither a folder in"), "{name}: {error}");
        }
    }
}
