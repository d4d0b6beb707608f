//! SHA-256 of data files, remembered for as long as the file's metadata is unchanged.

use std::fs::{File, Metadata};
use std::io::{self, BufReader, Read as _};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::util::files::{UNFINISHED_SUFFIX, hex};

const BLOCK_BYTES: usize = 1 << 20;
/// A file that changed within this time may change again without its timestamps showing it.
const SETTLING: Duration = Duration::from_secs(2);
/// Longest note that is read; a note has about 300 bytes.
const MAX_NOTE_BYTES: u64 = 4096;

/// The metadata of a file that changes with its content. It includes the time of the last metadata change (ctime),
/// which no program can set back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::data) struct Signature {
    bytes: u64,
    modified_nanoseconds: u128,
    changed_nanoseconds: i128,
    device: u64,
    inode: u64,
}

impl Signature {
    pub(in crate::data) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self::of_metadata(&std::fs::metadata(path)?))
    }

    fn of_metadata(metadata: &Metadata) -> Self {
        let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let (changed_nanoseconds, device, inode) = identity(metadata);
        Self {
            bytes: metadata.len(),
            modified_nanoseconds: modified.unwrap_or_default().as_nanos(),
            changed_nanoseconds,
            device,
            inode,
        }
    }

    /// Whether the last change is old enough that another change would show in the timestamps.
    fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let before = now.saturating_sub(SETTLING).as_nanos();
        self.modified_nanoseconds < before && self.changed_nanoseconds < i128::try_from(before).unwrap_or(i128::MAX)
    }
}

/// ctime, device and inode.
#[cfg(unix)]
fn identity(metadata: &Metadata) -> (i128, u64, u64) {
    use std::os::unix::fs::MetadataExt as _;
    let changed = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
    (changed, metadata.dev(), metadata.ino())
}

/// Other systems lack these: the signature is only size and modification time there.
#[cfg(not(unix))]
fn identity(_: &Metadata) -> (i128, u64, u64) {
    (0, 0, 0)
}

/// SHA-256 of the file `path`, and the signature of the file that was read. Notes in `folder` avoid reading an
/// unchanged file again.
pub(in crate::data) fn content_hash(path: &Path, folder: &Path) -> io::Result<(Signature, [u8; 32])> {
    let note = std::fs::canonicalize(path)
        .map(|path| folder.join(format!("{}.sha256", hex(&Sha256::digest(path.as_os_str().as_encoded_bytes())))))?;
    let signature = Signature::of(path)?;
    if let Some(known) = read_note(&note).filter(|(known, _)| *known == signature) {
        return Ok(known);
    }
    let read = hash_of(path)?;
    if read.0.is_settled() && Signature::of(path)? == read.0 {
        // A failure is harmless: the next start only hashes the file again.
        drop(write_note(&note, &read));
    }
    Ok(read)
}

/// SHA-256 of the file `path`, and the signature of the file that was read.
pub(in crate::data) fn hash_of(path: &Path) -> io::Result<(Signature, [u8; 32])> {
    let file = File::open(path)?;
    let signature = Signature::of_metadata(&file.metadata()?);
    let mut hash = Sha256::new();
    io::copy(&mut BufReader::with_capacity(BLOCK_BYTES, file), &mut hash)?;
    Ok((signature, hash.finalize().into()))
}

fn read_note(path: &Path) -> Option<(Signature, [u8; 32])> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_NOTE_BYTES).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

fn write_note(path: &Path, note: &(Signature, [u8; 32])) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    // Several runs may hash the same file at once, so each has a file of its own.
    let temporary = tempfile::Builder::new().suffix(UNFINISHED_SUFFIX).tempfile_in(folder)?;
    serde_json::to_writer(temporary.as_file(), note)?;
    temporary.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{FileTimes, OpenOptions};

    use super::*;

    #[test]
    fn a_note_is_used_only_for_a_file_that_looks_untouched() {
        let folder = tempfile::tempdir().unwrap();
        let (path, notes) = (folder.path().join("rows"), folder.path().join("notes"));
        let hash = |content: &str| <[u8; 32]>::from(Sha256::digest(content));
        let hash_of_file = || content_hash(&path, &notes).unwrap().1;
        std::fs::write(&path, "old").unwrap();
        assert_eq!(hash_of_file(), hash("old"));
        assert!(!notes.exists(), "it changed a moment ago");

        // A false hash in the note shows that the note is used.
        let note = notes.join(format!(
            "{}.sha256",
            hex(&Sha256::digest(std::fs::canonicalize(&path).unwrap().as_os_str().as_encoded_bytes()))
        ));
        let lie = (Signature::of(&path).unwrap(), hash("lie"));
        write_note(&note, &lie).unwrap();
        assert_eq!(read_note(&note), Some(lie));
        assert_eq!(hash_of_file(), hash("lie"));

        // Size and modification time stay equal, the content changes.
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        std::fs::write(&path, "new").unwrap();
        let times = FileTimes::new().set_modified(modified);
        OpenOptions::new().write(true).open(&path).unwrap().set_times(times).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), modified);
        if cfg!(unix) {
            assert_eq!(hash_of_file(), hash("new"));
        }
        for damaged in ["", "[", "[{}, []]"] {
            std::fs::write(&note, damaged).unwrap();
            assert_eq!(hash_of_file(), hash("new"), "{damaged:?}");
        }
    }
}
