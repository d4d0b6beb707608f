//! A file to which records are appended whole or not at all.

use std::collections::VecDeque;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Memory for records that wait while the disk is full.
const MAX_WAITING_BYTES: usize = 16 << 20;

/// A file that grows by whole records. If a record does not fit on the disk, its written part is cut off again, so that
/// readers find whole records only; the record waits and is written once there is room. If the file is deleted
/// meanwhile, it is created again.
#[derive(Debug)]
pub(super) struct AppendLog {
    path: PathBuf,
    file: File,
    /// Length up to which the file holds whole records.
    whole_bytes: u64,
    torn: bool,
    /// What every file begins with.
    header: Vec<u8>,
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    num_lost: u64,
    has_restarted: bool,
}

impl AppendLog {
    /// Opens a file at its end, or creates an empty one.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened for writing.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let whole_bytes = file.metadata()?.len();
        Ok(Self::new(path, file, whole_bytes, Vec::new()))
    }

    /// Creates a file that must not exist yet, with a header at its start.
    ///
    /// # Errors
    ///
    /// If it exists, or cannot be created or written.
    pub(super) fn create_new(path: &Path, header: Vec<u8>) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create_new(true).open(path)?;
        let mut log = Self::new(path, file, 0, header);
        log.write_whole(&log.header.clone())?;
        Ok(log)
    }

    fn new(path: &Path, file: File, whole_bytes: u64, header: Vec<u8>) -> Self {
        Self {
            path: path.to_owned(),
            file,
            whole_bytes,
            torn: false,
            header,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            num_lost: 0,
            has_restarted: false,
        }
    }

    /// Appends one record after those that wait. On success the operating system has all of them.
    ///
    /// # Errors
    ///
    /// If they cannot be written whole. The file then ends with a whole record, and the others wait.
    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if self.waiting_bytes + record.len() > MAX_WAITING_BYTES {
            self.num_lost += 1;
        } else {
            self.waiting_bytes += record.len();
            self.waiting.push_back(record.to_owned());
        }
        self.flush()
    }

    /// Writes the waiting records.
    ///
    /// # Errors
    ///
    /// As [`append`](Self::append).
    pub(super) fn flush(&mut self) -> io::Result<()> {
        if !self.waiting.is_empty() {
            self.make_anew_if_gone()?;
        }
        while let Some(record) = self.waiting.pop_front() {
            if let Err(error) = self.write_whole(&record) {
                self.waiting.push_front(record);
                return Err(error);
            }
            self.waiting_bytes -= record.len();
        }
        Ok(())
    }

    /// Forces what was written to the disk.
    ///
    /// # Errors
    ///
    /// Whatever the file system reports.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.file.sync_data()
    }

    /// Number of records missing from the file: those that wait, and those dropped because too many waited.
    pub(super) fn num_unwritten(&self) -> u64 {
        self.num_lost + self.waiting.len() as u64
    }

    /// Whether the file was created again since the last call: its earlier content is lost.
    pub(super) fn take_restarted(&mut self) -> bool {
        std::mem::take(&mut self.has_restarted)
    }

    fn write_whole(&mut self, record: &[u8]) -> io::Result<()> {
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
                // If cutting fails too, it is tried again before the next record.
                self.torn = self.file.set_len(self.whole_bytes).is_err();
                Err(error)
            }
        }
    }

    /// Writing to a deleted file would succeed, but nobody could ever read it.
    fn make_anew_if_gone(&mut self) -> io::Result<()> {
        match fs::metadata(&self.path) {
            Ok(there) if is_same_file(&there, &self.file.metadata()?) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if let Some(folder) = self.path.parent() {
                    fs::create_dir_all(folder)?;
                }
            }
            Err(error) => return Err(error),
        }
        self.file = OpenOptions::new().append(true).create(true).open(&self.path)?;
        (self.whole_bytes, self.torn, self.has_restarted) = (self.file.metadata()?.len(), false, true);
        if self.whole_bytes == 0 {
            self.write_whole(&self.header.clone())?;
        }
        Ok(())
    }
}

#[cfg(unix)]
fn is_same_file(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// On other systems an open file is not deleted.
#[cfg(not(unix))]
fn is_same_file(_: &Metadata, _: &Metadata) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_go_to_the_end_of_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, "one\n").unwrap();
        let mut log = AppendLog::open(&path).unwrap();
        log.append(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        assert!(AppendLog::create_new(&path, Vec::new()).is_err());
    }

    #[test]
    fn what_was_left_of_a_torn_record_is_cut_off_before_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = AppendLog::open(&path).unwrap();
        log.append(b"one\n").unwrap();
        // What a full disk leaves behind if the file could not be cut at once.
        fs::write(&path, "one\ntw").unwrap();
        log.torn = true;
        log.append(b"three\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\nthree\n");
    }

    #[test]
    fn a_file_that_is_deleted_is_made_anew_with_its_folder_and_its_header() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/log");
        fs::create_dir(folder.path().join("run")).unwrap();
        let mut log = AppendLog::create_new(&path, b"header\n".to_vec()).unwrap();
        log.append(b"one\n").unwrap();
        fs::remove_dir_all(folder.path().join("run")).unwrap();
        assert!(!log.take_restarted());
        log.append(b"two\n").unwrap();
        assert!(log.take_restarted() && !log.take_restarted());
        assert_eq!(fs::read_to_string(&path).unwrap(), "header\ntwo\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_every_time_and_what_waits_is_written_in_order_once_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = AppendLog::open(Path::new("/dev/full")).unwrap();
        for record in [b"one\n", b"two\n"] {
            assert_eq!(log.append(record).unwrap_err().kind(), io::ErrorKind::StorageFull);
            // A device has no end to cut off.
            log.torn = false;
        }
        assert_eq!(log.num_unwritten(), 2);
        log.path = path.clone();
        log.append(b"three\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\n");
        assert_eq!((log.num_unwritten(), log.waiting_bytes), (0, 0));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_waits_does_not_fill_the_memory() {
        let mut log = AppendLog::open(Path::new("/dev/full")).unwrap();
        let record = vec![b'x'; MAX_WAITING_BYTES / 2];
        for _ in 0..4 {
            assert!(log.append(&record).is_err());
            log.torn = false;
        }
        assert_eq!((log.waiting.len(), log.num_unwritten()), (2, 4));
    }
}
