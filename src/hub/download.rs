//! The files of a model: downloads them into the cache, and finds them there without a network.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use hf_hub::split_id;

use super::repository::{REQUEST_RETRIES, RemoteFile, Repository};
use super::{HubError, Progress, Wanted};
use crate::schema::{Problem, searched_folder};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
/// Lists which tensor is in which shard.
const INDEX: &str = "model.safetensors.index.json";
/// Small files that a model needs or that belong to it.
const SIDE_FILES: [&str; 5] =
    [CONFIG, "generation_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json"];
/// A model's repository, and which of its files are needed.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) repository: Repository<'a>,
    pub(super) wanted: Wanted,
}

impl Request<'_> {
    /// The model's folder in the cache; does not use the network.
    pub(super) fn find(&self) -> Result<PathBuf, HubError> {
        let Repository { id, revision, settings, .. } = self.repository;
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
                progress
                    .note(&format!("cannot reach {endpoint} ({reason}); using {} from the cache", self.repository.id));
                return Ok(folder);
            }
            Some((_, missing)) => format!("the cache lacks {}", missing.join(", ")),
            None => format!("{} is not in the cache", self.repository.id),
        };
        Err(HubError::Network { endpoint, reason, cached })
    }

    fn download_missing(&self, progress: Progress) -> Result<PathBuf, HubError> {
        let repository = &self.repository;
        let explain = |error| HubError::explain(error, *repository);
        let client = repository.settings.client(REQUEST_RETRIES).map_err(explain)?;
        let (owner, name) = split_id(repository.id);
        let client = client.model(owner, name);
        let info = client.info().revision(repository.revision).send().map_err(explain)?;
        let commit = repository.checked_commit(info.sha)?;
        let entries = client.list_tree().revision(&*commit).send().map_err(explain)?;
        let files = self.select(RemoteFile::list(&entries))?;
        // Written before the files, so that an interrupted download is later recognised as half-downloaded.
        repository.write_ref(&commit)?;
        repository.download(&client, &files, &commit, progress)?;
        Ok(repository.snapshot(&commit))
    }

    /// The files to download, out of those in the repository's top folder.
    fn select(&self, mut files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>, HubError> {
        let id = self.repository.id;
        files.retain(|file| !file.name.contains(['/', '\\']));
        let has = |test: &dyn Fn(&str) -> bool| files.iter().any(|file| test(&file.name));
        if !has(&|name| name == CONFIG) {
            let problem = Problem::new(format!("{id} has no {CONFIG}"));
            return Err(HubError::Input(if has(&|name| name == "adapter_config.json") {
                problem.hint("this is an adapter; `model.path` is the model that it was trained on")
            } else if has(&|name| name.ends_with(".gguf")) {
                problem.hint("download one of its GGUF files and set `model.path` to it, or use the repository with the safetensors")
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
            let problem = Problem::new(format!("{id} has no {SINGLE} and no {INDEX}"));
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

    /// The last known snapshot of the revision, and the files that it lacks.
    fn cached(&self) -> Option<(PathBuf, Vec<String>)> {
        let snapshot = self.repository.snapshot(&self.repository.known_commit()?);
        snapshot.is_dir().then(|| {
            let missing = missing_files(&snapshot, self.wanted);
            (snapshot, missing)
        })
    }
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
