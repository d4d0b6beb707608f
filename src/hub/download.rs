//! From the Hub into the cache.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFError, HFRepositorySync, RepoTypeModel, split_id};

use super::cache::{self, CONFIG, INDEX, SINGLE};
use super::content::Content;
use super::explain::explain;
use super::progress::{Meter, Progress, TooLong};
use super::{HubError, HubSettings, Wanted};

/// Small files that a model needs or that belong to it.
const SIDE_FILES: [&str; 5] =
    [CONFIG, "generation_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json"];
/// Times that a request is repeated where nobody answers: about a second in all, since the cache may do as well.
const REQUEST_RETRIES: usize = 3;
/// Attempts at a file whose connection breaks off.
const ATTEMPTS: usize = 4;

/// Most files that a repository may have at its top; a list without end is refused there.
const MAX_FILES: usize = 5_000;

/// A file of the repository.
#[derive(Clone, Debug)]
struct RemoteFile {
    name: String,
    num_bytes: u64,
    content: Content,
}

/// Downloads what is missing and gives the folder of the snapshot.
pub(super) fn download(
    id: &str,
    revision: &str,
    wanted: Wanted,
    settings: &HubSettings,
    progress: Progress,
) -> Result<PathBuf, HubError> {
    let request = Request { id, revision, settings };
    match request.download(wanted, progress) {
        // What is in the cache is good enough where the Hub is away.
        Err(HubError::Network { endpoint, reason, .. }) => match cache::find(id, revision, wanted, settings) {
            Ok(folder) => {
                progress.note(&format!("cannot reach {endpoint} ({reason}); using {id} from the cache"));
                Ok(folder)
            }
            Err(error) => {
                let cached = match error {
                    HubError::HalfCached { missing, .. } => format!("the cache lacks {}", missing.join(", ")),
                    _ => format!("{id} is not in the cache"),
                };
                Err(HubError::Network { endpoint, reason, cached })
            }
        },
        other => other,
    }
}

/// A repository at a revision, and how to ask for it.
struct Request<'a> {
    id: &'a str,
    revision: &'a str,
    settings: &'a HubSettings,
}

impl Request<'_> {
    fn download(&self, wanted: Wanted, progress: Progress) -> Result<PathBuf, HubError> {
        let mut client = HFClient::builder()
            .endpoint(&self.settings.endpoint)
            .cache_dir(&self.settings.cache)
            .retry_max_attempts(REQUEST_RETRIES);
        if let Some(token) = &self.settings.token {
            client = client.token(token.secret());
        }
        let client = client.build_sync().map_err(|error| self.explain(error))?;
        let (owner, name) = split_id(self.id);
        let repository = client.model(owner, name);

        let info = repository.info().revision(self.revision).send().map_err(|error| self.explain(error))?;
        // It becomes the name of a folder.
        let commit = info.sha.filter(|commit| cache::is_commit(commit));
        let commit = commit.ok_or_else(|| self.explain(HFError::malformed_response("the Hub named no commit")))?;
        let entries = repository.list_tree().revision(commit.clone()).limit(MAX_FILES).send();
        let entries = entries.map_err(|error| self.explain(error))?;
        if entries.len() == MAX_FILES {
            let reason = format!("its list has {MAX_FILES} files at the top and more");
            return Err(HubError::Other { id: self.id.to_owned(), reason });
        }
        let files = self.select(&entries, wanted)?;

        let folder = cache::repository_folder(self.id, self.settings);
        let snapshot = folder.join("snapshots").join(&commit);
        // Before the files: what is cut short is then known as half-downloaded.
        if !cache::is_commit(self.revision) {
            self.write_ref(&folder, &commit).map_err(|source| self.cache_error(source))?;
        }
        if self.absent(&files, &snapshot)?.is_empty() {
            return Ok(snapshot);
        }
        let wait = || progress.note(&format!("waiting for another process that downloads {}", self.id));
        let lock = cache::Lock::take(self.id, self.settings, wait);
        if let Some(lock) = &lock {
            lock.sweep();
        }
        // Another process may have brought them meanwhile.
        let absent = self.absent(&files, &snapshot)?;
        if !absent.is_empty() {
            let total_bytes = absent.iter().map(|file| file.num_bytes).sum();
            let meter = Meter::start(progress, self.id, absent.len(), total_bytes);
            for file in absent {
                meter.start_file(&file.name, file.num_bytes);
                self.fetch(&repository, file, &commit, &folder, &meter)?;
                meter.finish_file();
            }
            meter.finish();
        }
        Ok(snapshot)
    }

    /// The files to have, of those in the repository's top folder.
    fn select(&self, entries: &[RepoTreeEntry], wanted: Wanted) -> Result<Vec<RemoteFile>, HubError> {
        let files: Vec<RemoteFile> = entries
            .iter()
            .filter_map(|entry| match entry {
                // The name becomes one here: it must not lead to another folder.
                RepoTreeEntry::File { oid, path, size, lfs, .. } if !path.contains(['/', '\\']) => {
                    let pointer_bytes = lfs.as_ref().and_then(|lfs| lfs.pointer_size);
                    let content = Content { oid: oid.clone(), is_lfs: lfs.is_some(), pointer_bytes };
                    Some(RemoteFile { name: path.clone(), num_bytes: *size, content })
                }
                _ => None,
            })
            .collect();
        let has = |test: &dyn Fn(&str) -> bool| files.iter().any(|file| test(&file.name));
        if !has(&|name| name == CONFIG) {
            let hint = if has(&|name| name == "adapter_config.json") {
                "\n  hint: this is an adapter; `model.path` is the model that it was trained on"
            } else if has(&|name| name.ends_with(".gguf")) {
                "\n  hint: GGUF files cannot be trained on; use the repository with the original safetensors"
            } else {
                ""
            };
            return Err(HubError::NotAModel { id: self.id.to_owned(), missing: CONFIG, hint: hint.to_owned() });
        }
        let single = has(&|name| name == SINGLE);
        let is_weight = |name: &str| {
            if single { name == SINGLE } else { name == INDEX || is_shard(name) }
        };
        if wanted == Wanted::Model && !single && !has(&|name| name == INDEX) {
            let hint = if has(&|name| name.ends_with(".bin") || name.ends_with(".pth")) {
                "\n  hint: PyTorch pickle files are not read; look for a `refs/pr/N` revision with safetensors"
            } else {
                ""
            };
            let missing = "model.safetensors and no model.safetensors.index.json";
            return Err(HubError::NotAModel { id: self.id.to_owned(), missing, hint: hint.to_owned() });
        }
        let is_needed = |name: &str| {
            SIDE_FILES.contains(&name)
                || (name.starts_with("tokenizer") && name.ends_with(".json"))
                || (wanted == Wanted::Model && is_weight(name))
        };
        let mut needed: Vec<RemoteFile> = files.into_iter().filter(|file| is_needed(&file.name)).collect();
        // Small files first: what is wrong with them shows before gigabytes are downloaded.
        needed.sort_by(|a, b| (is_weight(&a.name), &a.name).cmp(&(is_weight(&b.name), &b.name)));
        Ok(needed)
    }

    /// The files that are not complete in the snapshot; wrong ones are removed.
    fn absent<'f>(&self, files: &'f [RemoteFile], snapshot: &Path) -> Result<Vec<&'f RemoteFile>, HubError> {
        let mut absent = Vec::new();
        for file in files {
            let path = snapshot.join(&file.name);
            match std::fs::metadata(&path) {
                Ok(found) if found.len() == file.num_bytes => {}
                Ok(_) => {
                    cache::remove(&path).map_err(|source| self.cache_error(source))?;
                    absent.push(file);
                }
                Err(_) => absent.push(file),
            }
        }
        Ok(absent)
    }

    /// Downloads one file into the cache and holds its size and its hash against the Hub's list.
    ///
    /// The client's own cache is not used: it takes names of files and folders from the server's headers.
    fn fetch(
        &self,
        repository: &HFRepositorySync<RepoTypeModel>,
        file: &RemoteFile,
        commit: &str,
        folder: &Path,
        meter: &Meter,
    ) -> Result<(), HubError> {
        let failed = |source| self.cache_error(source);
        // Another revision may have brought it already.
        if let Some(blob) = file.content.find(folder, file.num_bytes) {
            return cache::link(folder, commit, &file.name, &blob).map_err(failed);
        }
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut attempt = 1;
        loop {
            // In the same file system, so that it can be renamed; gone with the attempt.
            let unfinished = cache::unfinished(folder).map_err(failed)?;
            let download =
                repository.download_file().filename(&file.name).revision(commit).local_dir(unfinished.path());
            let result = within_its_length(|| download.progress(meter.clone()).send());
            let path = unfinished.path().join(&file.name);
            let found = std::fs::metadata(&path).map(|metadata| metadata.len()).ok();
            let (id, name) = (self.id.to_owned(), file.name.clone());
            let error = match (result, found) {
                (Ok(Err(TooLong { found })), _) => {
                    HubError::Incomplete { id, file: name, found, expected: file.num_bytes }
                }
                (Ok(_), Some(found)) if found == file.num_bytes => match file.content.name_of(&path).map_err(failed)? {
                    Some(blob) => {
                        cache::keep(folder, &path, &blob).map_err(failed)?;
                        return cache::link(folder, commit, &file.name, &blob).map_err(failed);
                    }
                    None => HubError::WrongContent { id, file: name },
                },
                (Ok(_), found) => {
                    let (found, expected) = (found.unwrap_or(0), file.num_bytes);
                    HubError::Incomplete { id, file: name, found, expected }
                }
                (Err(error), _) => self.explain(error),
            };
            let may_help =
                matches!(error, HubError::Network { .. } | HubError::Incomplete { .. } | HubError::WrongContent { .. });
            if !may_help || attempt == ATTEMPTS {
                return Err(error);
            }
            std::thread::sleep(std::time::Duration::from_millis(250 << attempt));
            attempt += 1;
        }
    }

    fn write_ref(&self, folder: &Path, commit: &str) -> std::io::Result<()> {
        let path = folder.join("refs").join(self.revision);
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        std::fs::write(path, commit)
    }

    fn cache_error(&self, source: std::io::Error) -> HubError {
        HubError::Cache { cache: self.settings.cache.clone(), source }
    }

    fn explain(&self, error: HFError) -> HubError {
        explain(error, self.id, self.revision, self.settings)
    }
}

/// What a download gives, unless it was ended because more of the file came than it has.
fn within_its_length<T>(download: impl FnOnce() -> Result<T, HFError>) -> Result<Result<T, TooLong>, HFError> {
    match catch_unwind(AssertUnwindSafe(download)) {
        Ok(result) => result.map(Ok),
        Err(panic) => match panic.downcast::<TooLong>() {
            Ok(too_long) => Ok(Err(*too_long)),
            Err(panic) => resume_unwind(panic),
        },
    }
}

/// `model-00001-of-00004.safetensors`
fn is_shard(name: &str) -> bool {
    name.strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(a, b)| [a, b].iter().all(|part| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit())))
}
