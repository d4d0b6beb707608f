//! Decides whether a name is a folder or a repository.

use std::path::{Path, PathBuf};

use super::HubError;
use super::repository::is_below;
use crate::schema::{Problem, did_you_mean, searched_folder};
use crate::util::gguf::is_gguf;

/// What `model.path` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A folder on this machine, or a GGUF file.
    Folder(PathBuf),
    /// A repository on the Hub.
    Repository {
        /// `name` or `owner/name`.
        id: String,
        /// The name of one of its GGUF files, or the quantisation in that name.
        file: Option<String>,
    },
}

impl Location {
    /// An existing folder or GGUF file comes first. `owner/name/file.gguf` and `owner/name:Q4_K_M` are files of a repository.
    /// Any other name that looks like a path must exist, and what is left is a repository id.
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
        if let Some(location) = file_of_repository(path_or_id) {
            return Ok(location);
        }
        let searched = searched_folder(path);
        if looks_like_a_path(path_or_id) || is_gguf(path) {
            let kind = if is_gguf(path) { "file" } else { "folder" };
            let problem = Problem::new(format!("{path_or_id}: no such {kind} in {}", searched.display()));
            if let Some(near) = did_you_mean(path) {
                return Err(problem.hint(near).into());
            }
            let hint = if path.starts_with("~") {
                "`~` is not replaced here; write the folder in full"
            } else {
                "a Hub repository id has the form `owner/name`, a GGUF file there `owner/name/file.gguf`"
            };
            return Err(problem.hint(hint).into());
        }
        if is_repository_id(path_or_id) {
            return Ok(Self::Repository { id: path_or_id.to_owned(), file: None });
        }
        let example = "nor a Hub repository id such as `meta-llama/Llama-3.2-1B`";
        let message = format!("`{path_or_id}` is neither a folder in {} {example}", searched.display());
        Err(Problem::new(message).into())
    }
}

/// A GGUF file of a repository by its name, or by the quantisation in its name.
fn file_of_repository(name: &str) -> Option<Location> {
    let end_of_id = match name.find(':') {
        Some(colon) => colon,
        None => name.match_indices('/').nth(1).filter(|_| is_gguf(Path::new(name)))?.0,
    };
    let (id, file) = (&name[..end_of_id], &name[end_of_id + 1..]);
    let is_named = id.contains('/') && is_repository_id(id) && !file.is_empty() && is_below(file);
    (is_named && !looks_like_a_path(id))
        .then(|| Location::Repository { id: id.to_owned(), file: Some(file.to_owned()) })
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
            assert_eq!(Location::parse(id).unwrap(), Location::Repository { id: id.into(), file: None });
        }
        for (name, file) in [
            ("o/n/f-Q8_0.gguf", "f-Q8_0.gguf"),
            ("o/n/Q8_0/f.GGUF", "Q8_0/f.GGUF"),
            ("o/n:q4_k_m", "q4_k_m"),
            ("o/n:f.gguf", "f.gguf"),
        ] {
            let expected = Location::Repository { id: "o/n".into(), file: Some(file.into()) };
            assert_eq!(Location::parse(name).unwrap(), expected);
        }
    }

    #[test]
    fn what_looks_like_a_path_must_exist() {
        for path in [
            "./nope", "/nope/model", "../nope", "~/models/x", "a/b/c", "nope/", "C:\\models", "src/nope",
            "o/n/../f.gguf",
        ] {
            let error = Location::parse(path).unwrap_err().to_string();
            assert!(error.contains(": no such f") && error.contains(" in /"), "{path}: {error}");
        }
        for path in ["nope.gguf", "nope/nope.gguf", "src/a/b.gguf", "C:/a/b.gguf"] {
            assert!(Location::parse(path).unwrap_err().to_string().contains(": no such file in "), "{path}");
        }
        for (path, near) in [("quickstart/modle", "quickstart/model"), ("./quikstart/model", "./quickstart/model")] {
            let error = Location::parse(path).unwrap_err().to_string();
            assert!(error.ends_with(&format!("hint: did you mean `{near}`?")), "{error}");
        }
        assert!(Location::parse("~/models").unwrap_err().to_string().contains("`~`"));
        let error = Location::parse("Cargo.toml").unwrap_err().to_string();
        assert!(error.contains("is a file"), "{error}");
        for name in ["", "a b", "-x", "a--b/c", "a/b..c", "a:b", "a/b:", "a b/c:d"] {
            let error = Location::parse(name).unwrap_err().to_string();
            assert!(error.contains("is neither a folder in"), "{name}: {error}");
        }
    }
}
