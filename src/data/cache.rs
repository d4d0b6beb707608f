//! Tokens of data files, kept on disk between runs.
//!
//! The name of a token file is a key (`CacheKey`) made from the content of the data file and everything else that
//! decides its tokens. A token file is either complete or absent, since it is written under another name and then
//! renamed. Its content is checked before use, and a damaged file is made again. Rows are stored whole; `max_length`
//! cuts them when they are read. Each row is read with one `pread` rather than through a mapping, for two reasons.
//! Mapped pages count as the process's memory once they are touched, so an epoch over a large file would look (and, in
//! a container, be billed) as if the whole file were in memory. And a file that is cut short while it is mapped ends
//! the process.

use std::path::{Path, PathBuf};

use serde::Serialize;
use sha2::{Digest as _, Sha256};

mod content;
mod store;

use crate::util::files::{MAX_CACHE_BYTES, cache_folder, hex};

pub(super) use content::{Signature, content_hash, hash_of};
pub(super) use store::{Details, Encoded, RowChunk, RowEntry, StoreWriter, TokenStore};

/// Smallest data file whose tokens are kept. Tokenising a smaller file takes less time than looking its tokens up.
pub const LARGE_FILE_BYTES: u64 = 16 << 20;
/// Increase this with every change to the layout of a token file or to how a row is encoded.
const FORMAT_VERSION: u32 = 13;
/// Suffix of token file names.
pub(super) const STORE_SUFFIX: &str = ".tokens";

/// Where tokens are kept between runs, and how many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheSettings {
    /// The cache folder; `None` where no tokens are kept.
    pub folder: Option<PathBuf>,
    /// Most bytes that are kept.
    pub max_bytes: u64,
    /// Size of the smallest data file whose tokens are kept.
    pub min_file_bytes: u64,
}

impl CacheSettings {
    /// In the folder `tokens` of [`cache_folder`].
    #[must_use]
    pub fn from_env() -> Self {
        Self {
            folder: cache_folder().map(|cache| cache.join("tokens")),
            max_bytes: MAX_CACHE_BYTES,
            min_file_bytes: LARGE_FILE_BYTES,
        }
    }

    /// The folder of files from web addresses, beside the tokens.
    #[must_use]
    pub fn downloads(&self) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.with_file_name("downloads"))
    }
}

/// Name of a token file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheKey(pub(super) [u8; 32]);

impl CacheKey {
    /// The key of tokens that are decided by `parts` alone.
    pub(super) fn new(parts: &impl Serialize) -> Self {
        let versions = (FORMAT_VERSION, env!("CARGO_PKG_VERSION"));
        // Only numbers, lists and text: writing them cannot fail.
        let text = serde_json::to_string(&(versions, parts)).unwrap_or_default();
        Self(Sha256::digest(text).into())
    }

    pub(super) fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}{STORE_SUFFIX}", hex(&self.0)))
    }
}

#[cfg(test)]
mod tests;
