//! The cache that Hugging Face's tools share: `models--OWNER--NAME/{blobs,refs,snapshots}`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use super::{HubError, HubSettings, Wanted};

/// Config of the model.
pub(super) const CONFIG: &str = "config.json";
/// Weights in one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// Which tensor is in which shard.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The cached folder of a repository at a revision, without any network.
pub(super) fn find(id: &str, revision: &str, wanted: Wanted, settings: &HubSettings) -> Result<PathBuf, HubError> {
    let folder = snapshot(id, revision, settings).filter(|folder| folder.is_dir()).ok_or_else(|| {
        let (id, revision, cache) = (id.to_owned(), revision.to_owned(), settings.cache.clone());
        HubError::NotCached { id, revision, cache }
    })?;
    let missing = missing_files(&folder, wanted);
    if missing.is_empty() { Ok(folder) } else { Err(HubError::HalfCached { id: id.to_owned(), folder, missing }) }
}

/// Where a repository is cached.
pub(super) fn repository_folder(id: &str, settings: &HubSettings) -> PathBuf {
    settings.cache.join(format!("models--{}", id.replace('/', "--")))
}

/// The snapshot that a revision last was, whether or not it is complete.
fn snapshot(id: &str, revision: &str, settings: &HubSettings) -> Option<PathBuf> {
    let folder = repository_folder(id, settings);
    let commit = if is_commit(revision) {
        revision.to_owned()
    } else {
        std::fs::read_to_string(folder.join("refs").join(revision)).ok()?.trim().to_owned()
    };
    // The file may have come from anywhere; a commit leads to no other folder.
    is_commit(&commit).then(|| folder.join("snapshots").join(commit))
}

/// Whether a revision is a full commit hash, which never changes.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.chars().all(|c| c.is_ascii_hexdigit())
}

/// Files without which the folder is no model: the config, and every file of the weights.
pub(super) fn missing_files(folder: &Path, wanted: Wanted) -> Vec<String> {
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

/// The files that an index names; `None` where there is no readable index.
fn shards(index: &Path) -> Option<BTreeSet<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_str(&std::fs::read_to_string(index).ok()?).ok()?;
    Some(index.weight_map.into_values().collect())
}

/// Moves a finished file to the blobs of a repository, under a name that is a hash.
pub(super) fn keep(folder: &Path, file: &Path, blob: &str) -> std::io::Result<()> {
    let blobs = folder.join("blobs");
    std::fs::create_dir_all(&blobs)?;
    std::fs::rename(file, blobs.join(blob))
}

/// Begin of the names of folders in which something is made, in the folder of a repository.
pub(super) const UNFINISHED: &str = ".unfinished-";

/// Holds off other downloads of a repository until it is dropped.
pub(super) struct Lock {
    repository: PathBuf,
    _file: File,
}

impl Lock {
    /// Waits until no other process downloads a repository; `wait` is called where it must. `None` where the file system
    /// knows no locks, or does not let a file be made: then the download is tried without.
    pub(super) fn take(id: &str, settings: &HubSettings, wait: impl FnOnce()) -> Option<Self> {
        let repository = repository_folder(id, settings);
        // Where Hugging Face's tools have theirs, which are for single files.
        let folder = settings.cache.join(".locks").join(repository.file_name()?);
        std::fs::create_dir_all(&folder).ok()?;
        let file = File::create(folder.join("lora-train.lock")).ok()?;
        if let Err(std::fs::TryLockError::WouldBlock) = file.try_lock() {
            wait();
        }
        file.lock().ok()?;
        Some(Self { repository, _file: file })
    }

    /// Removes what downloads that were killed have left in the folder of the repository.
    pub(super) fn sweep(&self) {
        for entry in std::fs::read_dir(&self.repository).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                // It only takes room: what cannot be removed is left.
                drop(std::fs::remove_dir_all(entry.path()));
            }
        }
    }
}

/// A folder for something unfinished, removed when it is dropped.
pub(super) fn unfinished(folder: &Path) -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(folder)
}

/// Makes a blob the file `name` of a snapshot, in place of what is there.
pub(super) fn link(folder: &Path, commit: &str, name: &str, blob: &str) -> std::io::Result<()> {
    let snapshot = folder.join("snapshots").join(commit);
    std::fs::create_dir_all(&snapshot)?;
    // Made elsewhere and renamed: another process may do the same now.
    let unfinished = unfinished(folder)?;
    let made = unfinished.path().join(name);
    #[cfg(unix)]
    std::os::unix::fs::symlink(Path::new("../../blobs").join(blob), &made)?;
    // Elsewhere a link needs rights that not everybody has.
    #[cfg(not(unix))]
    std::fs::copy(folder.join("blobs").join(blob), &made)?;
    std::fs::rename(made, snapshot.join(name))
}

/// Removes a file of a snapshot and its content, so that it is downloaded again.
pub(super) fn remove(file: &Path) -> std::io::Result<()> {
    let content = std::fs::canonicalize(file);
    std::fs::remove_file(file)?;
    match content {
        Ok(content) if content.exists() => std::fs::remove_file(content),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn two_that_link_the_same_file_at_once_both_succeed() {
        let folder = tempfile::tempdir().unwrap();
        let link_often = || (0..300).try_for_each(|_| link(folder.path(), "commit", "config.json", "blob"));
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(link_often)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        let target = std::fs::read_link(folder.path().join("snapshots/commit/config.json")).unwrap();
        assert_eq!(target, Path::new("../../blobs/blob"));
        let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["snapshots"], "nothing unfinished is left");
    }
}
