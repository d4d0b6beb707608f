//! Errors of turning a model's name into its files.

use std::path::PathBuf;

use crate::failure::Failure;
use crate::schema::searched_folder;

/// Why there is no local folder for a model.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A path that does not exist.
    #[error("{}: no such folder in {}{}", path.display(), searched_folder(path).display(), no_folder_hint(path))]
    NoFolder {
        /// The path.
        path: PathBuf,
    },
    /// A path that is a file.
    #[error("{} is a file, expected a folder with config.json and safetensors files", path.display())]
    File {
        /// The path.
        path: PathBuf,
    },
    /// Neither a folder nor a name that the Hub allows.
    #[error(
        "`{name}` is neither a folder in {} nor a Hub repository id such as `meta-llama/Llama-3.2-1B`",
        searched_folder(name.as_ref()).display()
    )]
    NotAName {
        /// The given name.
        name: String,
    },
    /// A revision was given for a local folder.
    #[error(
        "revision `{revision}` was given, but {} is a local folder\n  hint: leave `model.revision` out", folder.display()
    )]
    RevisionOfFolder {
        /// The folder.
        folder: PathBuf,
        /// The revision.
        revision: String,
    },
    /// The user must accept the repository's licence first.
    #[error(
        "{id} is gated{}\n  hint: accept its licence at {endpoint}/{id}, then {}",
        if *has_token { ", and the token that was sent gives no access to it" } else { "" },
        if *has_token { "check that HF_TOKEN belongs to that account" } else { "set HF_TOKEN to a token of that account" }
    )]
    Gated {
        /// The repository.
        id: String,
        /// Address of the Hub.
        endpoint: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// The token is not valid.
    #[error(
        "{endpoint} does not accept the access token\n  hint: set HF_TOKEN to a valid one (made at \
         {endpoint}/settings/tokens), or unset it for public models"
    )]
    BadToken {
        /// Address of the Hub.
        endpoint: String,
    },
    /// There is no such repository, or it is private.
    #[error(
        "{id} was not found at {endpoint}, and there is no such folder in {}\n  hint: check the name; a private repository \
         looks like this too{}", searched_folder(id.as_ref()).display(),
        if *has_token { " to an account without access" } else { " without HF_TOKEN" }
    )]
    NoRepository {
        /// The repository.
        id: String,
        /// Address of the Hub.
        endpoint: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// There is no such branch, tag or commit.
    #[error("{id} has no revision `{revision}`\n  hint: `model.revision` is a branch, a tag or a commit")]
    NoRevision {
        /// The repository.
        id: String,
        /// The revision.
        revision: String,
    },
    /// The repository has no model that can be used.
    #[error("{id} has no {missing}{hint}")]
    NotAModel {
        /// The repository.
        id: String,
        /// The files that are missing.
        missing: &'static str,
        /// The files that are there instead, on a line of its own.
        hint: String,
    },
    /// The Hub cannot be reached, and the cache does not have the complete model.
    #[error("cannot reach {endpoint}: {reason}\n  hint: {cached}; a local folder works without a network")]
    Network {
        /// Address of the Hub.
        endpoint: String,
        /// The innermost cause.
        reason: String,
        /// What the cache has of the model.
        cached: String,
    },
    /// The Hub answered with an error that has no variant here.
    #[error("{endpoint} answered {status}{detail}\n  hint: {hint}")]
    Server {
        /// Address of the Hub.
        endpoint: String,
        /// HTTP status.
        status: u16,
        /// The Hub's message.
        detail: String,
        /// How to fix it.
        hint: &'static str,
    },
    /// Network use is switched off and the model is not in the cache.
    #[error(
        "HF_HUB_OFFLINE is set, and {id} at `{revision}` is not in {}, and there is no such folder in {}\n  hint: download \
         it once with the network on, or point HF_HOME to the right cache",
        cache.display(), searched_folder(id.as_ref()).display()
    )]
    NotCached {
        /// The repository.
        id: String,
        /// The revision.
        revision: String,
        /// The cache folder.
        cache: PathBuf,
    },
    /// Some files of the model are in the cache, others are not.
    #[error("{id} is half-downloaded: {} lacks {}\n  hint: run once with the network on", folder.display(), missing.join(", "))]
    HalfCached {
        /// The repository.
        id: String,
        /// Its folder in the cache.
        folder: PathBuf,
        /// The files.
        missing: Vec<String>,
    },
    /// A downloaded file is shorter or longer than the Hub lists.
    #[error("`{file}` of {id} came as {found} bytes, expected {expected}\n  hint: run again; complete files are kept")]
    Incomplete {
        /// The repository.
        id: String,
        /// The file.
        file: String,
        /// Bytes on disk.
        found: u64,
        /// Bytes that the Hub lists.
        expected: u64,
    },
    /// The cache cannot be written or read.
    #[error("cannot use the cache {}: {source}\n  hint: HF_HOME moves the cache", cache.display())]
    Cache {
        /// The cache folder.
        cache: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Any other error of the Hub's client.
    #[error("cannot download {id}: {reason}")]
    Other {
        /// The repository.
        id: String,
        /// The client's message.
        reason: String,
    },
}

impl From<HubError> for Failure {
    /// Refusals by the network, the Hub or the disk are failures on the way; every other error is a wrong input.
    fn from(error: HubError) -> Self {
        match error {
            HubError::Network { .. }
            | HubError::Server { .. }
            | HubError::Incomplete { .. }
            | HubError::Cache { .. }
            | HubError::Other { .. } => Self::running(error),
            _ => Self::input(error),
        }
    }
}

fn no_folder_hint(path: &std::path::Path) -> &'static str {
    if path.starts_with("~") {
        "\n  hint: `~` is not replaced here; write the folder in full"
    } else {
        "\n  hint: a Hub repository id has the form `owner/name`"
    }
}
