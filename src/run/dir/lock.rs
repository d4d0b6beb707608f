//! The lock of a run's folder.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::io_error;
use crate::util::failure::Failure;

/// File that is locked while a process writes into the folder.
pub(super) const LOCK_FILE: &str = ".lock";

/// Locks the folder with `try_lock` and writes this process's id into the lock file, for messages. Returns the locked
/// file, and whether the lock keeps other processes out: some file systems have no locks.
pub(super) fn lock(
    folder: &Path,
    try_lock: impl FnOnce(&File) -> Result<(), TryLockError>,
) -> Result<(File, bool), Failure> {
    let path = folder.join(LOCK_FILE);
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|e| io_error(&path, "open", &e))?;
    let is_held = match try_lock(&file) {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            let read = file.read_to_string(&mut pid).is_ok() && !pid.trim().is_empty();
            let process = if read { format!(" (process {})", pid.trim()) } else { String::new() };
            let folder = folder.display();
            return Err(Failure::input(format!("`output_dir` = {folder}: another run{process} is writing into it")));
        }
        // Some network file systems have no locks: running without a lock is better than not running.
        Err(TryLockError::Error(error)) if has_no_locks(&error) => false,
        Err(TryLockError::Error(error)) => return Err(io_error(&path, "lock", &error)),
    };
    file.set_len(0)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .and_then(|_| writeln!(file, "{}", std::process::id()))
        .map_err(|e| io_error(&path, "write", &e))?;
    Ok((file, is_held))
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
        assert!(lock(folder.path(), File::try_lock).unwrap().1);
        for code in [libc::ENOLCK, libc::EOPNOTSUPP] {
            assert!(!without(code).unwrap().1);
        }
        let error = without(libc::EIO).unwrap_err();
        assert!(error.to_string().contains("cannot lock") && error.exit_code() == 1, "{error}");
        for (code, has_hint) in [(libc::EIO, false), (libc::EACCES, true), (libc::EROFS, true)] {
            let error = without(code).unwrap_err().to_string();
            assert_eq!(error.contains("hint: `output_dir` is the folder of a run"), has_hint, "{error}");
        }
    }
}
