//! What the Hub says that a file holds, and whether it does.
//!
//! The list of a repository has git's object id of every file: SHA-1 of `blob LENGTH`, a zero byte and the content. Of a
//! file in Git LFS, which weights are, that content is a pointer of three lines, which follow from the size and the
//! SHA-256 of the file. Files are kept under the names that Python's library gives them: the object id, or for those in
//! LFS the SHA-256.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// Bytes read at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// The content of a file, by its hash.
#[derive(Clone, Debug)]
pub(super) struct Content {
    /// Git's object id of the file, or of its LFS pointer.
    pub(super) oid: String,
    /// Whether the file is in Git LFS.
    pub(super) is_lfs: bool,
    /// Length of its LFS pointer, where the Hub says it.
    pub(super) pointer_bytes: Option<u64>,
}

impl Content {
    /// Name of the file among the blobs of `folder`, if it is there.
    pub(super) fn find(&self, folder: &Path, num_bytes: u64) -> Option<String> {
        let blobs = std::fs::read_dir(folder.join("blobs")).ok()?.flatten();
        let is_whole = |entry: &std::fs::DirEntry| {
            entry.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == num_bytes)
        };
        let names = blobs.filter(is_whole).filter_map(|entry| entry.file_name().into_string().ok());
        names.into_iter().find(|name| {
            let oid = if self.is_lfs { pointer_oid(name, num_bytes) } else { name.clone() };
            self.is_known(num_bytes) && oid == self.oid
        })
    }

    /// The name that the file `path` is to have among the blobs; `None` where it is not what the Hub has listed.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(super) fn name_of(&self, path: &Path) -> io::Result<Option<String>> {
        let mut file = File::open(path)?;
        let num_bytes = file.metadata()?.len();
        let mut sha256 = Sha256::new();
        let mut oid = Sha1::new_with_prefix(format!("blob {num_bytes}\0"));
        let mut block = vec![0; BLOCK_BYTES];
        loop {
            match file.read(&mut block)? {
                0 => break,
                read if self.is_lfs => sha256.update(&block[..read]),
                read => {
                    sha256.update(&block[..read]);
                    oid.update(&block[..read]);
                }
            }
        }
        let sha256 = hex(&sha256.finalize());
        let (name, found) = if self.is_lfs {
            let found = pointer_oid(&sha256, num_bytes);
            (sha256, found)
        } else {
            let oid = hex(&oid.finalize());
            (oid.clone(), oid)
        };
        Ok((!self.is_known(num_bytes) || found == self.oid).then_some(name))
    }

    /// Whether the id says what the file holds. Other servers that speak the Hub's protocol may have ids of another kind; and
    /// of an LFS pointer of another length than git-lfs writes, nothing follows.
    fn is_known(&self, num_bytes: u64) -> bool {
        let is_usual = |length: u64| length == pointer("", num_bytes).len() as u64 + 64;
        (!self.is_lfs || self.pointer_bytes.is_none_or(is_usual))
            && self.oid.len() == 40
            && self.oid.chars().all(|c| c.is_ascii_hexdigit() && !c.is_ascii_uppercase())
    }
}

/// Git's object id of the LFS pointer to a file (git-lfs, docs/spec.md).
fn pointer_oid(sha256: &str, num_bytes: u64) -> String {
    let pointer = pointer(sha256, num_bytes);
    hex(&Sha1::new_with_prefix(format!("blob {}\0", pointer.len())).chain_update(pointer).finalize())
}

fn pointer(sha256: &str, num_bytes: u64) -> String {
    format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {num_bytes}\n")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Git's object id of a file that is not in LFS.
#[cfg(test)]
pub(super) fn oid(content: &[u8]) -> String {
    hex(&Sha1::new_with_prefix(format!("blob {}\0", content.len())).chain_update(content).finalize())
}

/// Git's object id of the LFS pointer to a file.
#[cfg(test)]
pub(super) fn lfs_oid(content: &[u8]) -> String {
    pointer_oid(&hex(&Sha256::digest(content)), content.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_ids_are_gits() {
        // `git hash-object` of an empty file, of "hello\n", and of the pointer that `git lfs pointer` makes of the latter.
        assert_eq!(oid(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(oid(b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(lfs_oid(b"hello\n"), "fa61e1ef71c9908c0926776a4aa3504b3a27f159");
    }

    #[test]
    fn a_file_is_found_by_its_content_and_refused_where_it_differs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, "hello\n").unwrap();
        for (oid, is_lfs) in [(oid(b"hello\n"), false), (lfs_oid(b"hello\n"), true)] {
            let content = Content { oid, is_lfs, pointer_bytes: Some(126) };
            let name = content.name_of(&path).unwrap().unwrap();
            super::super::cache::keep(folder.path(), &path, &name).unwrap();
            assert_eq!(content.find(folder.path(), 6), Some(name.clone()));
            assert_eq!(content.find(folder.path(), 7), None);
            std::fs::write(&path, "hallo\n").unwrap();
            assert_eq!(content.name_of(&path).unwrap(), None);
            std::fs::write(&path, "hello\n").unwrap();
        }
    }

    #[test]
    fn of_a_pointer_that_git_lfs_did_not_write_nothing_follows() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hello\n").unwrap();
        // A weight of ten digits has a pointer of 135 bytes.
        assert_eq!(pointer(&"0".repeat(64), 4_976_698_672).len(), 135);
        let content = Content { oid: oid(b"another pointer"), is_lfs: true, pointer_bytes: Some(127) };
        assert_eq!(content.name_of(file.path()).unwrap(), Some(hex(&Sha256::digest(b"hello\n"))));
        let content = Content { pointer_bytes: Some(126), ..content };
        assert_eq!(content.name_of(file.path()).unwrap(), None);
    }
}
