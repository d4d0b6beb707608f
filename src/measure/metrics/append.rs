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
    name: &'static str,
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
    /// The user has been warned that writing fails.
    has_warned: bool,
    /// The file was made anew, and the user does not know yet that its earlier content is lost.
    is_anew: bool,
}

impl AppendLog {
    /// Opens a file at its end, or creates an empty one.
    pub(super) fn open(name: &'static str, path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let whole_bytes = file.metadata()?.len();
        Ok(Self::new(name, path, file, whole_bytes, Vec::new()))
    }

    /// Creates a file that must not exist yet, with a header at its start.
    pub(super) fn create_new(name: &'static str, path: &Path, header: Vec<u8>) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create_new(true).open(path)?;
        let mut log = Self::new(name, path, file, 0, header);
        log.write_whole(&log.header.clone())?;
        Ok(log)
    }

    fn new(name: &'static str, path: &Path, file: File, whole_bytes: u64, header: Vec<u8>) -> Self {
        Self {
            name,
            path: path.to_owned(),
            file,
            whole_bytes,
            torn: false,
            header,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            num_lost: 0,
            has_warned: false,
            is_anew: false,
        }
    }

    /// Appends one record after those that wait. Returns a warning at the first failure, when writing works again, and
    /// when the file was deleted.
    pub(super) fn append(&mut self, record: Vec<u8>) -> Option<String> {
        if self.waiting_bytes + record.len() > MAX_WAITING_BYTES {
            self.num_lost += 1;
        } else {
            self.waiting_bytes += record.len();
            self.waiting.push_back(record);
        }
        let name = self.name;
        match self.flush() {
            Err(error) => (!std::mem::replace(&mut self.has_warned, true)).then(|| {
                format!("{name} cannot be written ({error}); training continues, and it is tried again at every step")
            }),
            Ok(()) => {
                let has_warned = std::mem::take(&mut self.has_warned);
                match self.num_lost {
                    lost if std::mem::take(&mut self.is_anew) => {
                        let missing =
                            if lost == 0 { String::new() } else { format!(", {lost} records are missing in it") };
                        Some(format!("{name} was deleted while training; a new one begins here{missing}"))
                    }
                    _ if !has_warned => None,
                    0 => Some(format!("{name} can be written again; nothing is missing in it")),
                    lost => Some(format!("{name} can be written again; {lost} records are missing in it")),
                }
            }
        }
    }

    /// Writes the waiting records.
    fn flush(&mut self) -> io::Result<()> {
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
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.file.sync_data()
    }

    /// Tries to write what waits for the last time. Returns a warning about records that are not in the file.
    pub(super) fn finish(&mut self) -> Option<String> {
        let flushed = self.flush().err().map(|error| format!(": {error}")).unwrap_or_default();
        match self.num_lost + self.waiting.len() as u64 {
            0 => None,
            lost => Some(format!("{} lacks {lost} records that could not be written{flushed}", self.name)),
        }
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
        (self.whole_bytes, self.torn, self.is_anew) = (self.file.metadata()?.len(), false, true);
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
    fn records_go_to_the_end_of_what_is_there_after_a_torn_one_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, "one\n").unwrap();
        let mut log = AppendLog::open("log", &path).unwrap();
        assert_eq!(log.append(b"two\n".to_vec()), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        assert!(AppendLog::create_new("log", &path, Vec::new()).is_err());
        // What a full disk leaves behind if the file could not be cut at once.
        fs::write(&path, "one\ntwo\nthr").unwrap();
        log.torn = true;
        assert_eq!(log.append(b"four\n".to_vec()), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nfour\n");
    }

    #[test]
    fn a_file_that_is_deleted_is_made_anew_with_its_folder_and_its_header() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/log");
        fs::create_dir(folder.path().join("run")).unwrap();
        let mut log = AppendLog::create_new("log", &path, b"header\n".to_vec()).unwrap();
        assert_eq!(log.append(b"one\n".to_vec()), None);
        fs::remove_dir_all(folder.path().join("run")).unwrap();
        assert_eq!(log.append(b"two\n".to_vec()).unwrap(), "log was deleted while training; a new one begins here");
        assert_eq!(log.append(b"three\n".to_vec()), None);
        assert_eq!(fs::read_to_string(&path).unwrap(), "header\ntwo\nthree\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_warns_once_and_what_waits_is_written_in_order_once_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = AppendLog::open("log", Path::new("/dev/full")).unwrap();
        let warning = log.append(b"one\n".to_vec()).unwrap();
        assert!(warning.starts_with("log cannot be written (No space left"), "{warning}");
        // A device has no end to cut off.
        log.torn = false;
        assert_eq!(log.append(b"two\n".to_vec()), None);
        log.torn = false;
        assert!(log.finish().unwrap().starts_with("log lacks 2 records that could not be written: No space left"));
        (log.path, log.file) = (path.clone(), File::create(&path).unwrap());
        log.torn = false;
        let again = log.append(b"three\n".to_vec()).unwrap();
        assert_eq!(again, "log can be written again; nothing is missing in it");
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\n");
        assert_eq!((log.finish(), log.waiting_bytes), (None, 0));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_waits_does_not_fill_the_memory() {
        let mut log = AppendLog::open("log", Path::new("/dev/full")).unwrap();
        for _ in 0..4 {
            log.append(vec![b'x'; MAX_WAITING_BYTES / 2]);
            log.torn = false;
        }
        assert_eq!((log.waiting.len(), log.num_lost), (2, 2));
    }
}
