//! The files of a model: downloads them into the cache, and finds them there without a network.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use hf_hub::repository::RepoTypeModel;
use hf_hub::{HFRepositorySync, split_id};

use super::repository::{REQUEST_RETRIES, RemoteFile, Repository};
use super::{HubError, Progress, Wanted, gguf};
use crate::schema::{Problem, searched_folder};
use crate::util::gguf::is_gguf;

const CONFIG: &str = "config.json";
const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Files of an adapter, beside those of a tokenizer.
const ADAPTER_FILES: [&str; 3] = [ADAPTER_CONFIG, "adapter_model.safetensors", "prompt_form.json"];
const SINGLE: &str = "model.safetensors";
/// Lists which tensor is in which shard.
const INDEX: &str = "model.safetensors.index.json";
/// Small files that a model needs or that belong to it.
const SIDE_FILES: [&str; 8] = [
    CONFIG, "generation_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "added_tokens.json", "preprocessor_config.json", "processor_config.json",
];
/// A model's repository, and which of its files are needed.
#[derive(Clone, Copy)]
pub(super) struct ModelRequest<'a> {
    pub(super) repository: Repository<'a>,
    /// The user's name for the model.
    pub(super) asked: &'a str,
    /// The GGUF file, or the quantisation in its name.
    pub(super) file: Option<&'a str>,
    pub(super) wanted: Wanted,
}

impl ModelRequest<'_> {
    /// The model's folder in the cache; does not use the network.
    pub(super) fn find(&self) -> Result<PathBuf, HubError> {
        let (Repository { revision, settings, .. }, asked) = (self.repository, self.asked);
        match self.cached() {
            Some((folder, missing)) if missing.is_empty() => Ok(folder),
            Some((folder, missing)) => {
                let (folder, missing) = (folder.display(), missing.join(", "));
                let problem = Problem::new(format!("{asked} is half-downloaded: {folder} lacks {missing}"));
                Err(problem.hint("run once with the network on").into())
            }
            None => {
                let (cache, folder) = (settings.cache.display(), searched_folder(asked.as_ref()));
                let message = format!(
                    "HF_HUB_OFFLINE is set, and {asked} at `{revision}` is not in {cache}, and there is no such folder in {}",
                    folder.display()
                );
                let hint = "download it once with the network on, or point HF_HOME to the right cache";
                Err(Problem::new(message).hint(hint).into())
            }
        }
    }

    /// The folder in the cache of the adapter that the repository holds, with its files; `None` where it holds none. Of a
    /// repository that is in the cache as a model, nobody is asked.
    pub(super) fn adapter(&self, progress: Progress) -> Result<Option<PathBuf>, HubError> {
        let commit = self.repository.known_commit();
        let cached = commit.map(|commit| self.repository.snapshot(&commit)).filter(|snapshot| snapshot.is_dir());
        let names = cached.iter().flat_map(std::fs::read_dir).flatten().flatten().map(|entry| entry.path());
        let is_model = names.into_iter().any(|path| path.ends_with(CONFIG) || is_gguf(&path));
        let cached = cached.filter(|snapshot| ADAPTER_FILES[..2].iter().all(|name| snapshot.join(name).is_file()));
        if is_model || self.repository.settings.offline {
            return Ok(cached.filter(|_| !is_model));
        }
        match self.download_adapter(progress) {
            Err(HubError::Network { endpoint, reason, .. }) if cached.is_some() => {
                progress.note(&format!("cannot reach {endpoint} ({reason}); using {} from the cache", self.asked));
                Ok(cached)
            }
            // A model that is in the cache in part; what it lacks is said where it is opened.
            Err(HubError::Network { .. }) if self.repository.folder().is_dir() => Ok(None),
            Err(HubError::Network { endpoint, reason, .. }) => {
                let (asked, folder) = (self.asked, searched_folder(self.asked.as_ref()));
                let folder = folder.display();
                let cached = format!("there is no folder {asked} in {folder}, and {asked} is not in the cache");
                Err(HubError::Network { endpoint, reason, cached })
            }
            other => other,
        }
    }

    /// A client of the repository, its commit, and the files that it has there, also those in folders or not.
    fn listed(&self, recursive: bool) -> Result<(HFRepositorySync<RepoTypeModel>, String, Vec<RemoteFile>), HubError> {
        let repository = &self.repository;
        let explain = |error| repository.explain(error);
        let client = repository.settings.client(REQUEST_RETRIES).map_err(explain)?;
        let (owner, name) = split_id(repository.id);
        let client = client.model(owner, name);
        let info = client.info().revision(repository.revision).send().map_err(explain)?;
        let commit = repository.checked_commit(info.sha)?;
        let entries = client.list_tree().revision(&*commit).recursive(recursive).send().map_err(explain)?;
        Ok((client, commit, RemoteFile::list(&entries)))
    }

    fn download_adapter(&self, progress: Progress) -> Result<Option<PathBuf>, HubError> {
        let repository = &self.repository;
        let (client, commit, mut files) = self.listed(false)?;
        let has = |name: &str| files.iter().any(|file| file.name == name);
        if has(CONFIG) || !has(ADAPTER_CONFIG) {
            return Ok(None);
        }
        files.retain(|file| ADAPTER_FILES.contains(&&*file.name) || is_beside(&file.name));
        repository.write_ref(&commit)?;
        repository.download(&client, &files, &commit, progress)?;
        Ok(Some(repository.snapshot(&commit)))
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
                progress.note(&format!("cannot reach {endpoint} ({reason}); using {} from the cache", self.asked));
                return Ok(folder);
            }
            Some((_, missing)) => format!("the cache lacks {}", missing.join(", ")),
            None => {
                let (asked, folder) = (self.asked, searched_folder(self.asked.as_ref()));
                format!("there is no folder {asked} in {}, and {asked} is not in the cache", folder.display())
            }
        };
        Err(HubError::Network { endpoint, reason, cached })
    }

    fn download_missing(&self, progress: Progress) -> Result<PathBuf, HubError> {
        let repository = &self.repository;
        let (client, commit, files) = self.listed(true)?;
        if let Some(file) = gguf::choose(repository.id, self.file, &files)? {
            return self.download_gguf(&client, &file, &beside_gguf(files), &commit, progress);
        }
        let files = self.select(files)?;
        // Written before the files, so that an interrupted download is later recognised as half-downloaded.
        repository.write_ref(&commit)?;
        repository.download(&client, &files, &commit, progress)?;
        Ok(repository.snapshot(&commit))
    }

    /// A GGUF file and the files beside it; without weights only its head, unless the whole file is in the cache.
    fn download_gguf(
        &self,
        client: &HFRepositorySync<RepoTypeModel>,
        file: &RemoteFile,
        beside: &[RemoteFile],
        commit: &str,
        progress: Progress,
    ) -> Result<PathBuf, HubError> {
        let (repository, snapshot) = (&self.repository, self.repository.snapshot(commit));
        repository.write_ref(commit)?;
        repository.record(&self.choice(commit), file)?;
        repository.download(client, beside, commit, progress)?;
        if self.wanted == Wanted::Model || file.is_in(&snapshot) {
            repository.download(client, std::slice::from_ref(file), commit, progress)?;
            return Ok(snapshot.join(&file.name));
        }
        let head = gguf::download_head(repository, client, file, commit)?;
        for RemoteFile { name, .. } in beside {
            let copied = std::fs::copy(snapshot.join(name), gguf::head_path(repository, commit, name));
            copied.map_err(|error| repository.cache_error(&error))?;
        }
        Ok(head)
    }

    /// What is recorded of the GGUF file that was chosen.
    fn choice<'a>(&'a self, commit: &'a str) -> (&'a str, Option<&'a str>) {
        (commit, self.file)
    }

    /// The files to download, out of those in the repository's top folder.
    fn select(&self, mut files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>, HubError> {
        let id = self.repository.id;
        files.retain(|file| !file.name.contains(['/', '\\']));
        let has = |test: &dyn Fn(&str) -> bool| files.iter().any(|file| test(&file.name));
        if !has(&|name| name == CONFIG) {
            let problem = Problem::new(format!("{id} has no {CONFIG}"));
            return Err(HubError::Input(if has(&|name| name == ADAPTER_CONFIG) {
                problem.hint(HINT_OF_ADAPTER)
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
        let is_needed = |name: &str| is_beside(name) || (self.wanted == Wanted::Model && is_weight(name));
        let mut needed: Vec<RemoteFile> = files.into_iter().filter(|file| is_needed(&file.name)).collect();
        // Small files first, so that a problem with them shows before gigabytes are downloaded.
        needed.sort_by_key(|file| (file.name.ends_with(".safetensors"), file.name.clone()));
        Ok(needed)
    }

    /// The last known snapshot of the revision or the GGUF file in it, and the files that it lacks.
    fn cached(&self) -> Option<(PathBuf, Vec<String>)> {
        let commit = self.repository.known_commit()?;
        let snapshot = self.repository.snapshot(&commit);
        let recorded = || Some(self.repository.recorded::<RemoteFile>(&self.choice(&commit))?.name);
        let named = self.file.filter(|file| is_gguf(file.as_ref())).map(str::to_owned);
        if let Some(name) = named.or_else(recorded) {
            let head = gguf::head_path(&self.repository, &commit, &name);
            let head = Some(head).filter(|_| self.wanted == Wanted::WithoutWeights);
            let found = [snapshot.join(&name)].into_iter().chain(head).find(|path| path.is_file());
            let missing = || snapshot.is_dir().then(|| (snapshot.clone(), vec![name]));
            return found.map(|path| (path, Vec::new())).or_else(missing);
        }
        (self.file.is_none() && snapshot.is_dir()).then(|| {
            let missing = missing_files(&snapshot, self.wanted);
            (snapshot, missing)
        })
    }
}

/// What to do with an adapter that is named as a model.
pub(super) const HINT_OF_ADAPTER: &str =
    "this is an adapter: the model that it was trained on is `model.path`, and this `lora.start_from`";

/// Whether a file in the top folder belongs to every model that has it.
fn is_beside(name: &str) -> bool {
    SIDE_FILES.contains(&name)
        || (name.starts_with("tokenizer") && name.ends_with(".json"))
        || (name.starts_with("additional_chat_templates/") && name.ends_with(".jinja"))
}

/// The files of the tokenizer that is used instead of a GGUF file's own, if there are any.
fn beside_gguf(mut files: Vec<RemoteFile>) -> Vec<RemoteFile> {
    let has_tokenizer = files.iter().any(|file| file.name == "tokenizer.json");
    files.retain(|file| has_tokenizer && is_beside(&file.name) && !file.name.contains('/'));
    files
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
