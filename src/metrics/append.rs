//! A file to which whole records are appended, or nothing.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// A file that grows by whole records. Where a record does not fit on the disk, what was written of it is cut off
/// again, so that readers find whole records only and writing can go on once there is room.
#[derive(Debug)]
pub(super) struct AppendLog {
    file: File,
    /// Length up to which the file holds whole records.
    whole_bytes: u64,
    torn: bool,
}

impl AppendLog {
    /// Opens a file at its end, or makes an empty one.
    ///
    /// # Errors
    ///
    /// Where the file cannot be opened for writing.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let whole_bytes = file.metadata()?.len();
        Ok(Self { file, whole_bytes, torn: false })
    }

    /// Makes a file that must not exist yet.
    ///
    /// # Errors
    ///
    /// Where it exists or cannot be made.
    pub(super) fn create_new(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create_new(true).open(path)?;
        Ok(Self { file, whole_bytes: 0, torn: false })
    }

    /// Appends one record; it is with the operating system when this returns.
    ///
    /// # Errors
    ///
    /// Where it cannot be written whole. The file then ends with the record before it.
    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if self.torn {
            self.file.set_len(self.whole_bytes)?;
            self.torn = false;
        }
        match self.file.write_all(record) {
            Ok(()) => {
                self.whole_bytes += record.len() as u64;
                Ok(())
            }
            Err(error) => {
                // Where cutting fails too, it is tried again before the next record.
                self.torn = self.file.set_len(self.whole_bytes).is_err();
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_go_to_the_end_of_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "one\n").unwrap();
        let mut log = AppendLog::open(&path).unwrap();
        log.append(b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        assert!(AppendLog::create_new(&path).is_err());
    }

    #[test]
    fn what_was_left_of_a_torn_record_is_cut_off_before_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = AppendLog::open(&path).unwrap();
        log.append(b"one\n").unwrap();
        // What a full disk leaves behind where the file could not be cut at once.
        std::fs::write(&path, "one\ntw").unwrap();
        log.torn = true;
        log.append(b"three\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\nthree\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_every_time_and_never_a_panic() {
        let mut log = AppendLog::open(Path::new("/dev/full")).unwrap();
        for _ in 0..3 {
            assert_eq!(log.append(b"record\n").unwrap_err().kind(), io::ErrorKind::StorageFull);
            log.torn = false;
        }
    }
}
