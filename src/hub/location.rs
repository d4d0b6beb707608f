//! Decides whether a name is a folder or a repository.

use std::path::{Path, PathBuf};

use super::HubError;

/// What `model.path` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A folder on this machine.
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
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if path.is_file() {
            return Err(HubError::File { path: path.to_owned() });
        }
        if looks_like_a_path(path_or_id) {
            return Err(HubError::NoFolder { path: path.to_owned() });
        }
        if is_repository_id(path_or_id) {
            return Ok(Self::Repository(path_or_id.to_owned()));
        }
        Err(HubError::NotAName { name: path_or_id.to_owned() })
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
fn is_repository_id(name: &str) -> bool {
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
            let error = Location::parse(path).unwrap_err();
            assert!(matches!(error, HubError::NoFolder { .. }), "{path}: {error}");
        }
        assert!(Location::parse("~/models").unwrap_err().to_string().contains("`~`"));
        let error = Location::parse("Cargo.toml").unwrap_err().to_string();
        assert!(error.contains("is a file"), "{error}");
        for name in ["", "a b", "-x", "a--b/c", "a/b..c"] {
            assert!(matches!(Location::parse(name).unwrap_err(), HubError::NotAName { .. }), "{name}");
        }
    }
}
