//! A repository of the Hub and its folder in the cache that Hugging Face tools share.
//!
//! Layout, locks and links of the cache are those of the `hf-hub` client. The client does not compare the size of a
//! downloaded file with the size that the Hub lists, and stops waiting for another process after ten seconds. This
//! module does the comparison and the longer wait. Files are fetched one by one, since the client's `snapshot_download`
//! starts all weights again when one of them breaks off.

use std::fmt::Debug;
use std::path::{Component, Path, PathBuf};

use hf_hub::repository::{RepoTreeEntry, RepoType};
use hf_hub::{HFError, HFRepositorySync};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::{code_and_message, unreachable};
use super::progress::{FileMeter, Progress};
use super::{HubError, HubSettings};
use crate::schema::{Problem, searched_folder};
use crate::util::files::hex;

/// How often a request is repeated if no server answers: about a second in all, since the cache may do instead.
pub(super) const REQUEST_RETRIES: usize = 3;
/// Attempts to download a file when the connection breaks off.
const ATTEMPTS: usize = 4;

/// What a repository holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RepositoryKind {
    Model,
    Dataset,
}

/// A repository at a revision, with the Hub's and the cache's location.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repository<'a> {
    pub(super) kind: RepositoryKind,
    pub(super) id: &'a str,
    pub(super) revision: &'a str,
    pub(super) settings: &'a HubSettings,
}

/// A file as the Hub lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RemoteFile {
    pub(super) name: String,
    pub(super) num_bytes: u64,
}

impl RemoteFile {
    /// The files among the entries of a repository.
    pub(super) fn list(entries: &[RepoTreeEntry]) -> Vec<Self> {
        let file = |entry: &RepoTreeEntry| match entry {
            RepoTreeEntry::File { path, size, .. } => Some(Self { name: path.clone(), num_bytes: *size }),
            RepoTreeEntry::Directory { .. } => None,
        };
        entries.iter().filter_map(file).collect()
    }

    /// Whether it is in a snapshot as a whole.
    pub(super) fn is_in(&self, snapshot: &Path) -> bool {
        self.num_bytes_in(snapshot) == Some(self.num_bytes)
    }

    /// Its size in a snapshot; `None` if it is not there.
    fn num_bytes_in(&self, snapshot: &Path) -> Option<u64> {
        std::fs::metadata(snapshot.join(&self.name)).ok().map(|metadata| metadata.len())
    }
}

impl Repository<'_> {
    /// The repository's folder in the cache.
    pub(super) fn folder(&self) -> PathBuf {
        let kind = match self.kind {
            RepositoryKind::Model => "models",
            RepositoryKind::Dataset => "datasets",
        };
        self.settings.cache.join(format!("{kind}--{}", self.id.replace('/', "--")))
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    /// The last known commit of the revision. Read without the client, which cannot be built on a machine that has no
    /// certificates.
    pub(super) fn known_commit(&self) -> Option<String> {
        let commit = if is_commit(self.revision) {
            self.revision.to_owned()
        } else {
            std::fs::read_to_string(self.folder().join("refs").join(self.revision)).ok()?.trim().to_owned()
        };
        is_commit(&commit).then_some(commit)
    }

    /// Records the commit of the revision, unless it is one itself.
    pub(super) fn write_ref(&self, commit: &str) -> Result<(), HubError> {
        if is_commit(self.revision) {
            return Ok(());
        }
        let path = self.folder().join("refs").join(self.revision);
        let written = std::fs::create_dir_all(path.parent().unwrap_or(&path));
        written.and_then(|()| std::fs::write(path, commit)).map_err(|error| self.cache_error(&error))
    }

    /// What was recorded for a choice among the files.
    pub(super) fn recorded<T: DeserializeOwned>(&self, choice: &impl Debug) -> Option<T> {
        serde_json::from_slice(&std::fs::read(self.record_path(choice)).ok()?).ok()
    }

    /// Records what was chosen: without a network, the names in the repository are not known.
    pub(super) fn record(&self, choice: &impl Debug, chosen: &impl Serialize) -> Result<(), HubError> {
        let path = self.record_path(choice);
        let written = std::fs::create_dir_all(path.parent().unwrap_or(&path))
            .and_then(|()| std::fs::write(path, serde_json::to_vec(chosen)?));
        written.map_err(|error| self.cache_error(&error))
    }

    /// It is only for those who accepted its licence.
    fn gated(&self) -> Problem {
        let Self { kind, id, settings, .. } = *self;
        let prefix = if kind == RepositoryKind::Model { "" } else { "datasets/" };
        let page = format!("accept its licence at {}/{prefix}{id}, then", settings.endpoint);
        if settings.token.is_some() {
            let message = format!("{id} is gated, and the token that was sent gives no access to it");
            Problem::new(message).hint(format!("{page} check that HF_TOKEN belongs to that account"))
        } else {
            Problem::new(format!("{id} is gated")).hint(format!("{page} set HF_TOKEN to a token of that account"))
        }
    }

    /// The user's view of an error of the client. It contains neither addresses with a query nor the token.
    pub(super) fn explain(&self, error: HFError) -> HubError {
        let Self { kind, id, revision, settings } = *self;
        let (code, message) = code_and_message(&error);
        let (endpoint, has_token) = (&settings.endpoint, settings.token.is_some());
        let detail =
            if message.is_empty() { String::new() } else { settings.redact(&format!(": {}", message.trim_end())) };
        let no_repository = || {
            let folder = searched_folder(id.as_ref());
            let what = if kind == RepositoryKind::Model { "folder" } else { "file or folder" };
            let message =
                format!("{id} was not found at {endpoint}, and there is no such {what} in {}", folder.display());
            let whose = if has_token { "to an account without access" } else { "without HF_TOKEN" };
            Problem::new(message)
                .hint(format!("check the name; a private repository looks like this too {whose}"))
                .into()
        };
        let server = |status: u16, hint: &str| {
            HubError::Failed(Problem::new(format!("{endpoint} answered {status}{detail}")).hint(hint))
        };
        match (code.as_str(), error) {
            ("GatedRepo", _) | (_, HFError::Forbidden { .. }) => self.gated().into(),
            (_, HFError::AuthRequired { .. }) if message.contains("Invalid credentials") => {
                let hint = format!(
                    "set HF_TOKEN to a valid one (made at {endpoint}/settings/tokens), or unset it for what is public"
                );
                Problem::new(format!("{endpoint} does not accept the access token")).hint(hint).into()
            }
            // Without a token the Hub answers 401 for anything that does not exist, to keep private names secret.
            ("RepoNotFound", _) | (_, HFError::AuthRequired { .. } | HFError::RepoNotFound { .. }) => no_repository(),
            // A repository without `main` counts as absent: servers that send no code do not tell the two cases apart.
            ("", HFError::RevisionNotFound { .. }) if revision == "main" => no_repository(),
            ("RevisionNotFound", _) | (_, HFError::RevisionNotFound { .. }) => {
                let problem = Problem::new(format!("{id} has no revision `{revision}`"));
                let key = if kind == RepositoryKind::Model { "`model.revision`" } else { "what follows the `@`" };
                problem.hint(format!("{key} is a branch, a tag or a commit")).into()
            }
            (_, HFError::Request { source, .. }) => HubError::Network {
                endpoint: endpoint.clone(),
                reason: settings.redact(&unreachable(&settings.endpoint, &source)),
                cached: String::new(),
            },
            (_, HFError::RateLimited { context, .. }) => {
                server(context.status.as_u16(), "too many requests; wait a few minutes, or set HF_TOKEN")
            }
            (_, HFError::Http { context }) => {
                server(context.status.as_u16(), "try again later; what was downloaded is kept")
            }
            (_, HFError::Io(error)) => HubError::cache(&settings.cache, &error),
            (_, error) => {
                HubError::Failed(Problem::new(format!("cannot download {id}: {}", settings.redact(&error.to_string()))))
            }
        }
    }

    /// Where the record of a choice is.
    fn record_path(&self, choice: &impl Debug) -> PathBuf {
        let choice = Sha256::digest(format!("{choice:?}"));
        let name = hex(&choice[..16]);
        self.folder().join("lora-train").join(format!("{name}.json"))
    }

    /// The commit that the Hub names; it becomes a folder name, so it must be a plain hash.
    pub(super) fn checked_commit(&self, commit: Option<String>) -> Result<String, HubError> {
        let commit = commit.filter(|commit| is_commit(commit));
        commit.ok_or_else(|| self.explain(HFError::malformed_response("the Hub named no commit")))
    }

    /// Downloads those of `files` that are not in the cache as a whole.
    pub(super) fn download<T: RepoType>(
        &self,
        client: &HFRepositorySync<T>,
        files: &[RemoteFile],
        commit: &str,
        progress: Progress,
    ) -> Result<(), HubError> {
        let snapshot = self.snapshot(commit);
        let absent: Vec<_> = files.iter().filter(|file| !file.is_in(&snapshot)).collect();
        if absent.is_empty() {
            return Ok(());
        }
        let bar = progress.start(
            &format!("downloading {}", self.id),
            absent.len(),
            absent.iter().map(|file| file.num_bytes).sum(),
        );
        for file in absent {
            let meter = FileMeter::start(progress, &bar, &file.name, file.num_bytes);
            self.fetch(client, file, commit, &meter)?;
            meter.finish();
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// Downloads one file; repeats this if the connection breaks off or the size differs from the one that the Hub
    /// lists.
    fn fetch<T: RepoType>(
        &self,
        client: &HFRepositorySync<T>,
        file: &RemoteFile,
        commit: &str,
        meter: &FileMeter,
    ) -> Result<(), HubError> {
        let snapshot = self.snapshot(commit);
        // Needed because the client accepts any file that is already there.
        let remove = || remove(&snapshot.join(&file.name)).map_err(|error| self.cache_error(&error));
        remove()?;
        let (mut attempt, mut is_waiting) = (1, false);
        loop {
            let download = client.download_file().filename(&*file.name).revision(commit).progress(meter.clone());
            let error = match download.send() {
                Ok(_) => {
                    let found = file.num_bytes_in(&snapshot).unwrap_or(0);
                    if found == file.num_bytes {
                        return Ok(());
                    }
                    remove()?;
                    let (name, expected) = (&file.name, file.num_bytes);
                    let problem = format!("`{name}` of {} came as {found} bytes, expected {expected}", self.id);
                    HubError::Failed(Problem::new(problem).hint("run again; complete files are kept"))
                }
                Err(HFError::CacheLockTimeout { .. }) => {
                    if !std::mem::replace(&mut is_waiting, true) {
                        meter.note(&format!("waiting for another process that downloads {}", file.name));
                    }
                    continue;
                }
                Err(error) => match self.explain(error) {
                    error @ HubError::Network { .. } => error,
                    error => return Err(error),
                },
            };
            if attempt == ATTEMPTS {
                return Err(error);
            }
            std::thread::sleep(std::time::Duration::from_millis(250 << attempt));
            attempt += 1;
        }
    }

    pub(super) fn cache_error(&self, error: &std::io::Error) -> HubError {
        HubError::cache(&self.settings.cache, error)
    }
}

/// Whether a name stays in its folder.
pub(super) fn is_below(name: &str) -> bool {
    Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Whether a revision is a full commit hash, which never changes.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.chars().all(|c| c.is_ascii_hexdigit())
}

/// Removes a file of a snapshot, if it exists, and the content that it links to.
fn remove(file: &Path) -> std::io::Result<()> {
    if std::fs::symlink_metadata(file).is_err() {
        return Ok(());
    }
    let content = std::fs::canonicalize(file);
    std::fs::remove_file(file)?;
    match content {
        Ok(content) if content.exists() => std::fs::remove_file(content),
        _ => Ok(()),
    }
}
