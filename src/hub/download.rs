//! Downloads from the Hub into the cache that Hugging Face tools share, and finds models there without a network.
//!
//! Layout, locks and links of the cache are those of the `hf-hub` client. The client does not compare the size of a
//! downloaded file with the size that the Hub lists, and stops waiting for another process after ten seconds. This
//! module does the comparison and the longer wait. Files are fetched one by one, since the client's `snapshot_download`
//! starts all weights again when one of them breaks off.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFError, HFRepositorySync, RepoTypeModel, split_id};

use super::progress::{FileMeter, Progress};
use super::{HubError, HubSettings, Wanted};
use crate::schema::{Problem, searched_folder};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
/// Lists which tensor is in which shard.
const INDEX: &str = "model.safetensors.index.json";
/// Small files that a model needs or that belong to it.
const SIDE_FILES: [&str; 5] =
    [CONFIG, "generation_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json"];
/// How often a request is repeated if no server answers: about a second in all, since the cache may do instead.
const REQUEST_RETRIES: usize = 3;
/// Attempts to download a file when the connection breaks off.
const ATTEMPTS: usize = 4;

/// A repository at a revision, with the Hub's and the cache's location.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) id: &'a str,
    pub(super) revision: &'a str,
    pub(super) wanted: Wanted,
    pub(super) settings: &'a HubSettings,
}

impl Request<'_> {
    /// The model's folder in the cache; does not use the network.
    pub(super) fn find(&self) -> Result<PathBuf, HubError> {
        let Self { id, revision, settings, .. } = self;
        match self.cached() {
            Some((folder, missing)) if missing.is_empty() => Ok(folder),
            Some((folder, missing)) => {
                let (folder, missing) = (folder.display(), missing.join(", "));
                let problem = Problem::new(format!("{id} is half-downloaded: {folder} lacks {missing}"));
                Err(problem.hint("run once with the network on").into())
            }
            None => {
                let (cache, folder) = (settings.cache.display(), searched_folder(id.as_ref()));
                let message = format!(
                    "HF_HUB_OFFLINE is set, and {id} at `{revision}` is not in {cache}, and there is no such folder in {}",
                    folder.display()
                );
                let hint = "download it once with the network on, or point HF_HOME to the right cache";
                Err(Problem::new(message).hint(hint).into())
            }
        }
    }

    /// Downloads the missing files and returns the model's folder in the cache; if the Hub cannot be reached, returns
    /// the cached folder.
    pub(super) fn download(&self, progress: Progress) -> Result<PathBuf, HubError> {
        let (endpoint, reason) = match self.download_missing(progress) {
            Err(HubError::Network { endpoint, reason, .. }) => (endpoint, reason),
            other => return other,
        };
        let cached = match self.cached() {
            Some((folder, missing)) if missing.is_empty() => {
                progress.note(&format!("cannot reach {endpoint} ({reason}); using {} from the cache", self.id));
                return Ok(folder);
            }
            Some((_, missing)) => format!("the cache lacks {}", missing.join(", ")),
            None => format!("{} is not in the cache", self.id),
        };
        Err(HubError::Network { endpoint, reason, cached })
    }

    fn download_missing(&self, progress: Progress) -> Result<PathBuf, HubError> {
        let explain = |error| HubError::explain(error, *self);
        let client = self.settings.client(REQUEST_RETRIES).map_err(explain)?;
        let (owner, name) = split_id(self.id);
        let repository = client.model(owner, name);
        let info = repository.info().revision(self.revision).send().map_err(explain)?;
        // The commit becomes a folder name, so it must be a plain hash.
        let commit = info.sha.filter(|commit| is_commit(commit));
        let commit = commit.ok_or_else(|| explain(HFError::malformed_response("the Hub named no commit")))?;
        let entries = repository.list_tree().revision(&*commit).send().map_err(explain)?;
        let files = self.select(&entries)?;

        let snapshot = self.folder().join("snapshots").join(&commit);
        // Written before the files, so that an interrupted download is later recognised as half-downloaded.
        if !is_commit(self.revision) {
            self.write_ref(&commit).map_err(|error| self.cache_error(&error))?;
        }
        let absent: Vec<_> = files.iter().filter(|file| file.num_bytes_in(&snapshot) != Some(file.num_bytes)).collect();
        if !absent.is_empty() {
            let bar = progress.start(self.id, absent.len(), absent.iter().map(|file| file.num_bytes).sum());
            for file in absent {
                let meter = FileMeter::start(progress, &bar, &file.name, file.num_bytes);
                self.fetch(&repository, file, &commit, &snapshot, &meter)?;
                meter.finish();
            }
            bar.finish_and_clear();
        }
        Ok(snapshot)
    }

    /// The files to download, out of those in the repository's top folder.
    fn select(&self, entries: &[RepoTreeEntry]) -> Result<Vec<RemoteFile>, HubError> {
        let files: Vec<RemoteFile> = entries
            .iter()
            .filter_map(|entry| match entry {
                RepoTreeEntry::File { path, size, .. } if !path.contains(['/', '\\']) => {
                    Some(RemoteFile { name: path.clone(), num_bytes: *size })
                }
                _ => None,
            })
            .collect();
        let has = |test: &dyn Fn(&str) -> bool| files.iter().any(|file| test(&file.name));
        if !has(&|name| name == CONFIG) {
            let problem = Problem::new(format!("{} has no {CONFIG}", self.id));
            return Err(HubError::Input(if has(&|name| name == "adapter_config.json") {
                problem.hint("this is an adapter; `model.path` is the model that it was trained on")
            } else if has(&|name| name.ends_with(".gguf")) {
                problem.hint("GGUF files cannot be trained on; use the repository with the original safetensors")
            } else {
                problem
            }));
        }
        let single = has(&|name| name == SINGLE);
        // model-00001-of-00002.safetensors, but not model-00001-of-00002.fp16.safetensors.
        let is_shard = |name: &str| {
            let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
            numbers.and_then(|numbers| numbers.split_once("-of-")).is_some_and(|(index, count)| {
                [index, count].iter().all(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
            })
        };
        let is_weight = |name: &str| if single { name == SINGLE } else { name == INDEX || is_shard(name) };
        if self.wanted == Wanted::Model && !single && !has(&|name| name == INDEX) {
            let problem = Problem::new(format!("{} has no {SINGLE} and no {INDEX}", self.id));
            return Err(HubError::Input(if has(&|name| name.ends_with(".bin") || name.ends_with(".pth")) {
                problem.hint("PyTorch pickle files are not read; look for a `refs/pr/N` revision with safetensors")
            } else {
                problem
            }));
        }
        let is_needed = |name: &str| {
            SIDE_FILES.contains(&name)
                || (name.starts_with("tokenizer") && name.ends_with(".json"))
                || (self.wanted == Wanted::Model && is_weight(name))
        };
        let mut needed: Vec<RemoteFile> = files.into_iter().filter(|file| is_needed(&file.name)).collect();
        // Small files first, so that a problem with them shows before gigabytes are downloaded.
        needed.sort_by_key(|file| (file.name.ends_with(".safetensors"), file.name.clone()));
        Ok(needed)
    }

    /// Downloads one file; repeats this if the connection breaks off or the size differs from the one that the Hub
    /// lists.
    fn fetch(
        &self,
        repository: &HFRepositorySync<RepoTypeModel>,
        file: &RemoteFile,
        commit: &str,
        snapshot: &Path,
        meter: &FileMeter,
    ) -> Result<(), HubError> {
        // Needed because the client accepts any file that is already there.
        let remove = || remove(&snapshot.join(&file.name)).map_err(|error| self.cache_error(&error));
        remove()?;
        let (mut attempt, mut is_waiting) = (1, false);
        loop {
            let download = repository.download_file().filename(&*file.name).revision(commit).progress(meter.clone());
            let error = match download.send() {
                Ok(_) => {
                    let found = file.num_bytes_in(snapshot).unwrap_or(0);
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
                Err(error) => match HubError::explain(error, *self) {
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

    /// The repository's folder in the cache.
    fn folder(&self) -> PathBuf {
        self.settings.cache.join(format!("models--{}", self.id.replace('/', "--")))
    }

    /// The last known snapshot of the revision, and the files that it lacks. Read without the client, which cannot be
    /// built on a machine that has no certificates.
    fn cached(&self) -> Option<(PathBuf, Vec<String>)> {
        let folder = self.folder();
        let commit = if is_commit(self.revision) {
            self.revision.to_owned()
        } else {
            std::fs::read_to_string(folder.join("refs").join(self.revision)).ok()?.trim().to_owned()
        };
        let snapshot = folder.join("snapshots").join(&commit);
        (is_commit(&commit) && snapshot.is_dir()).then(|| {
            let missing = missing_files(&snapshot, self.wanted);
            (snapshot, missing)
        })
    }

    fn write_ref(&self, commit: &str) -> std::io::Result<()> {
        let path = self.folder().join("refs").join(self.revision);
        std::fs::create_dir_all(path.parent().unwrap_or(&path))?;
        std::fs::write(path, commit)
    }

    fn cache_error(&self, error: &std::io::Error) -> HubError {
        HubError::cache(&self.settings.cache, error)
    }
}

struct RemoteFile {
    name: String,
    num_bytes: u64,
}

impl RemoteFile {
    /// Its size in a snapshot; `None` if it is not there.
    fn num_bytes_in(&self, snapshot: &Path) -> Option<u64> {
        std::fs::metadata(snapshot.join(&self.name)).ok().map(|metadata| metadata.len())
    }
}

/// Whether a revision is a full commit hash, which never changes.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.chars().all(|c| c.is_ascii_hexdigit())
}

/// Required files that the folder lacks: the config, and every file of the weights.
fn missing_files(folder: &Path, wanted: Wanted) -> Vec<String> {
    let absent = |name: &str| !folder.join(name).is_file();
    let mut missing = Vec::new();
    if absent(CONFIG) {
        missing.push(CONFIG.to_owned());
    }
    if wanted == Wanted::Model && absent(SINGLE) {
        match shards(&folder.join(INDEX)) {
            None => missing.push(SINGLE.to_owned()),
            Some(shards) => missing.extend(shards.into_iter().filter(|shard| absent(shard))),
        }
    }
    missing
}

/// The files that an index names; `None` where the index cannot be read.
fn shards(index: &Path) -> Option<BTreeSet<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_str(&std::fs::read_to_string(index).ok()?).ok()?;
    Some(index.weight_map.into_values().collect())
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
