//! Tokens of data files, kept on disk between runs.
//!
//! A file of tokens is named by a key (`CacheKey`): the content of the data file and all that decides its tokens. It is
//! complete or absent, since it is written under another name and renamed; what is in it is checked before it is
//! used, and a damaged one is made again. Rows are whole: `max_length` cuts them when they are read. Rows are read with
//! one `pread` each rather than through a mapping: mapped pages would count as the process's memory once they were
//! touched, so that an epoch over a large file would look (and, in a container, be billed) as if it were all in memory,
//! and a file cut short under a mapping ends the process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::config::DataFormat;
use super::files::FileKind;

mod content;
mod store;

pub(super) use content::{Signature, content_hash, hash_of};
pub(super) use store::{Chunk, Details, RowEntry, StoreWriter, TokenStore};

/// Environment variable that names the cache folder.
pub const CACHE_VARIABLE: &str = "LORA_TRAIN_CACHE";
/// Tokens of files from this size on are kept: those of smaller ones are made again before they were found.
pub const LARGE_FILE_BYTES: u64 = 16 << 20;
/// Bytes of token files that are kept; beyond, those go that were not used for longest.
pub const MAX_CACHE_BYTES: u64 = 32 << 30;
/// Goes up with every change of a token file: of its layout, and of what encoding makes of a row.
const FORMAT_VERSION: u32 = 4;
/// How names of token files end.
const STORE_SUFFIX: &str = ".tokens";
/// How names of files that are being written end.
const UNFINISHED_SUFFIX: &str = ".unfinished";
/// A file that nobody has written to for so long was left by a process that was killed.
const UNFINISHED_AGE: Duration = Duration::from_hours(24);

/// Where tokens are kept between runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheSettings {
    /// The folder; `None` where nothing is kept.
    pub folder: Option<PathBuf>,
    /// Bytes that are kept.
    pub max_bytes: u64,
    /// Size of the smallest data file whose tokens are kept.
    pub min_file_bytes: u64,
}

impl CacheSettings {
    /// `LORA_TRAIN_CACHE`, else `lora-train` in `XDG_CACHE_HOME`, else in `~/.cache`; there, `tokens`.
    #[must_use]
    pub fn from_env() -> Self {
        let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = folder(CACHE_VARIABLE)
            .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("lora-train")))
            .or_else(|| std::env::home_dir().map(|home| home.join(".cache/lora-train")));
        Self {
            folder: cache.map(|cache| cache.join("tokens")),
            max_bytes: MAX_CACHE_BYTES,
            min_file_bytes: LARGE_FILE_BYTES,
        }
    }
}

/// All that decides the tokens of a file.
#[derive(Debug, Serialize)]
pub(super) struct KeyParts<'a> {
    /// SHA-256 of the data file.
    pub(super) content: [u8; 32],
    /// The layout that the file's name asks for.
    pub(super) kind: FileKind,
    pub(super) format: DataFormat,
    pub(super) columns: &'a BTreeMap<String, String>,
    pub(super) tokenizer: [u8; 32],
    pub(super) template: Option<[u8; 32]>,
    pub(super) train_on_inputs: bool,
}

/// Name of the tokens of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheKey(pub(super) [u8; 32]);

impl CacheKey {
    pub(super) fn new(parts: &KeyParts<'_>) -> Self {
        let versions = (FORMAT_VERSION, env!("CARGO_PKG_VERSION"));
        // Numbers, lists and text alone: they can always be written.
        let text = serde_json::to_string(&(versions, parts)).unwrap_or_default();
        Self(Sha256::digest(text).into())
    }

    /// The file of tokens in `folder`.
    pub(super) fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}{STORE_SUFFIX}", hex(&self.0)))
    }
}

/// Removes what nobody will finish and, beyond `max_bytes`, the token files that were not used for longest; never `keep`.
/// What cannot be removed stays.
pub(super) fn tidy(folder: &Path, max_bytes: u64, keep: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let mut stores: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let Ok(metadata) = entry.metadata() else { continue };
        let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        let name = name.to_string_lossy();
        if name.ends_with(UNFINISHED_SUFFIX) && modified.elapsed().is_ok_and(|age| age > UNFINISHED_AGE) {
            drop(std::fs::remove_file(&path));
        } else if name.ends_with(STORE_SUFFIX) {
            stores.push((modified, metadata.len(), path));
        }
    }
    stores.sort();
    let mut bytes: u64 = stores.iter().map(|(_, bytes, _)| *bytes).sum();
    for (_, size, path) in stores.into_iter().filter(|(.., path)| path != keep) {
        if bytes <= max_bytes {
            return;
        }
        if std::fs::remove_file(&path).is_ok() {
            bytes -= size;
        }
    }
}

/// Notes that a token file is in use: [`tidy`] goes by its time.
pub(super) fn touch(file: &File) -> io::Result<()> {
    file.set_modified(SystemTime::now())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
