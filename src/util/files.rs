//! Files that are complete or absent, and the cache folder.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::TempPath;

/// An unnamed file that is gone once it is closed.
///
/// # Errors
/// The folder of temporary files, and why there can be none in it.
pub fn temporary() -> Result<File, String> {
    tempfile::tempfile().map_err(|error| {
        let folder = std::env::temp_dir();
        format!("cannot create a temporary file in {}: {error}\n  hint: TMPDIR names another folder", folder.display())
    })
}

/// Writes a file through a temporary file beside it: `write` fills the path that it is given, then the content is
/// forced to disk and replaces `path` in one step.
///
/// # Errors
/// Whatever `write` or the file system reports; `path` is then unchanged.
pub fn write_with(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name");
    let name = path.file_name().ok_or_else(no_name)?.to_string_lossy();
    // A fixed name: the next start overwrites what a crash left behind.
    let temporary = path.with_file_name(format!(".{name}.partial"));
    // However `write` makes the file, it gets the permissions of a newly created file.
    let written = File::create(&temporary).and_then(|file| file.metadata()).and_then(|fresh| {
        write(&temporary)?;
        std::fs::set_permissions(&temporary, fresh.permissions())?;
        File::open(&temporary)?.sync_all()?;
        std::fs::rename(&temporary, path)
    });
    if written.is_err() {
        // The first error is the one to report; the leftover may not even exist.
        drop(std::fs::remove_file(&temporary));
        return written;
    }
    sync_folder(path.parent().unwrap_or(Path::new(".")))
}

/// Writes a file whole or not at all, like [`write_with`].
///
/// # Errors
/// Whatever the file system reports; `path` is then unchanged.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> io::Result<()> {
    write_with(path, |path| std::fs::write(path, bytes))
}

/// Tests whether [`write()`] can make a file, and leaves none behind.
///
/// # Errors
/// A path that is a folder; whatever the file system reports.
pub fn try_writing(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let mut is_open = false;
    let stopped = write_with(path, |_| {
        is_open = true;
        Err(io::ErrorKind::Interrupted.into())
    });
    if is_open { Ok(()) } else { stopped }
}

/// Forces the entries of a folder to disk, so that a rename in it survives a power cut.
///
/// # Errors
/// Whatever the file system reports.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    // An empty path is the current folder. Only Unix can open a folder to synchronise it.
    if cfg!(unix) {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// Environment variable that names the cache folder.
pub const CACHE_VARIABLE: &str = "LORA_TRAIN_CACHE";
/// Most bytes of files of one kind that are kept there. Beyond that, the least recently used are removed.
pub(crate) const MAX_CACHE_BYTES: u64 = 32 << 30;
/// Suffix of the names of files and folders that are still being written.
pub(crate) const UNFINISHED_SUFFIX: &str = ".unfinished";
/// Suffix of the names of files that say that others are in use.
const IN_USE_SUFFIX: &str = ".in-use";
/// An unfinished file that was last written to this long ago was left by a process that was killed.
const UNFINISHED_AGE: Duration = Duration::from_hours(24);

/// What runs keep for later ones: `$LORA_TRAIN_CACHE`, else `$XDG_CACHE_HOME/lora-train`, else `~/.cache/lora-train`.
#[must_use]
pub fn cache_folder() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    folder(CACHE_VARIABLE)
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("lora-train")))
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/lora-train")))
}

/// Bytes that may still be written to the disk of a folder, where the system says it.
#[cfg_attr(unix, expect(unsafe_code, reason = "the system's call"))]
pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt as _;
        let folder = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
        let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: the path ends with a zero, and the call fills what it is given where it returns 0.
        let found = unsafe {
            if libc::statvfs(folder.as_ptr(), found.as_mut_ptr()) != 0 {
                return None;
            }
            found.assume_init()
        };
        #[allow(clippy::unnecessary_cast, clippy::useless_conversion, reason = "their width depends on the system")]
        Some((found.f_bavail as u64).saturating_mul(found.f_frsize as u64))
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}

/// Keeps [`tidy`] from files of a folder that were last modified at its time or later, until it is dropped or its process ends.
#[derive(Debug)]
pub(crate) struct InUse {
    /// Its time, by the clock of the folder's files.
    pub(crate) since: SystemTime,
    /// Locked for as long as it is open.
    _file: File,
    _path: TempPath,
}

impl InUse {
    /// In a folder, from now on.
    ///
    /// # Errors
    /// A folder that cannot be written to, or whose files cannot be locked.
    pub(crate) fn mark(folder: &Path) -> io::Result<Self> {
        let (file, path) = tempfile::Builder::new().suffix(IN_USE_SUFFIX).tempfile_in(folder)?.into_parts();
        file.lock()?;
        Ok(Self { since: file.metadata()?.modified()?, _file: file, _path: path })
    }
}

/// Whether no process holds this mark any more.
fn is_left_behind(mark: &Path) -> bool {
    File::options().read(true).write(true).open(mark).is_ok_and(|mark| mark.try_lock().is_ok())
}

/// Removes abandoned unfinished files and, beyond `max_bytes`, the least recently used files whose names end in `suffix`,
/// but never `keep`, nor those that are [in use](InUse). A file that cannot be removed stays.
pub(crate) fn tidy(folder: &Path, suffix: &str, max_bytes: u64, keep: &Path) {
    // One process at a time, so that what is marked before is not removed behind it by another that had looked earlier.
    let _alone = File::open(folder).and_then(|folder| folder.lock().map(|()| folder));
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let mut stores: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    let mut in_use_since = None;
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let Ok(metadata) = entry.metadata() else { continue };
        let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        let name = name.to_string_lossy();
        let is_mark = name.ends_with(IN_USE_SUFFIX);
        if is_mark && !is_left_behind(&path) {
            in_use_since = Some(in_use_since.map_or(modified, |since| modified.min(since)));
        } else if (is_mark || name.ends_with(UNFINISHED_SUFFIX))
            && modified.elapsed().is_ok_and(|age| age > UNFINISHED_AGE)
        {
            drop(std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path)));
        } else if name.ends_with(suffix) {
            stores.push((modified, metadata.len(), path));
        }
    }
    stores.sort();
    let mut bytes: u64 = stores.iter().map(|(_, bytes, _)| *bytes).sum();
    let is_free = |modified: SystemTime| in_use_since.is_none_or(|since| modified < since);
    for (_, size, path) in stores.into_iter().filter(|(modified, _, path)| path != keep && is_free(*modified)) {
        if bytes <= max_bytes {
            return;
        }
        if std::fs::remove_file(&path).is_ok() {
            bytes -= size;
        }
    }
}

/// Bytes as text.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, "old").unwrap();
        let failed = write_with(&path, |path| {
            std::fs::write(path, "half")?;
            Err(io::Error::other("disk full"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "disk full");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        write(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        try_writing(&path).unwrap();
        try_writing(&folder.path().join("other")).unwrap();
        assert!(try_writing(folder.path()).is_err() && try_writing(&folder.path().join("none/file")).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
