//! The lock of a run's folder.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::{RunDirError, io_error};

/// File that is locked while a process writes into the folder.
pub(super) const LOCK_FILE: &str = ".lock";

/// Lock on a folder.
#[derive(Debug)]
pub(super) struct Lock {
    /// The lock ends with the file handle, even if the process is killed.
    _file: File,
    /// Whether the file system supports locks.
    is_held: bool,
}

impl Lock {
    /// Locks the folder and writes this process's id into the lock file, for messages.
    ///
    /// # Errors
    ///
    /// Where another process holds it, or the file system refuses.
    pub(super) fn take(folder: &Path) -> Result<Self, RunDirError> {
        lock(folder, File::try_lock)
    }

    /// Whether the lock keeps other processes out: some file systems have no locks.
    pub(super) fn is_held(&self) -> bool {
        self.is_held
    }
}

/// As [`Lock::take`].
fn lock(folder: &Path, try_lock: impl FnOnce(&File) -> Result<(), TryLockError>) -> Result<Lock, RunDirError> {
    let path = folder.join(LOCK_FILE);
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|e| io_error(&path, "open", e))?;
    let is_held = match try_lock(&file) {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            let read = file.read_to_string(&mut pid).is_ok() && !pid.trim().is_empty();
            return Err(RunDirError::Locked { path: folder.to_owned(), pid: read.then(|| pid.trim().to_owned()) });
        }
        // Some network file systems have no locks: running without a lock is better than not running.
        Err(TryLockError::Error(error)) if has_no_locks(&error) => false,
        Err(TryLockError::Error(error)) => return Err(io_error(&path, "lock", error)),
    };
    file.set_len(0)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .and_then(|_| writeln!(file, "{}", std::process::id()))
        .map_err(|e| io_error(&path, "write", e))?;
    Ok(Lock { _file: file, is_held })
}

fn has_no_locks(error: &io::Error) -> bool {
    #[cfg(unix)]
    if error.raw_os_error() == Some(libc::ENOLCK) {
        return true;
    }
    error.kind() == io::ErrorKind::Unsupported
}

#[cfg(test)]
mod tests {
    #[cfg(unix)]
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_folder_without_locks_is_used_and_known_to_have_none() {
        let folder = tempfile::tempdir().unwrap();
        let without = |code| lock(folder.path(), move |_| Err(TryLockError::Error(io::Error::from_raw_os_error(code))));
        assert!(Lock::take(folder.path()).unwrap().is_held());
        for code in [libc::ENOLCK, libc::EOPNOTSUPP] {
            assert!(!without(code).unwrap().is_held());
        }
        assert!(matches!(without(libc::EIO), Err(RunDirError::Io { action: "lock", .. })));
    }
}
