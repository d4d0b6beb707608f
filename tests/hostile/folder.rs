//! A folder for one input, deep inside another one that must otherwise stay empty.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Path from the outer folder to the inner one, as deep as an attacking path usually climbs.
const INNER: &str = "a/b/c/d/e/f/given";

/// A new folder, in memory if the machine has such a file system.
pub(crate) struct Folder {
    outer: PathBuf,
    inner: PathBuf,
}

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let root = Path::new("/dev/shm");
        let root = if root.is_dir() { root.to_owned() } else { std::env::temp_dir() };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let outer = root.join(format!("lora-train-hostile-{}-{number}", std::process::id()));
        // A killed process with the same number may have left one.
        drop(fs::remove_dir_all(&outer));
        let inner = outer.join(INNER);
        fs::create_dir_all(&inner).unwrap();
        Self { outer, inner }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.inner
    }

    pub(crate) fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.inner.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Asserts that nothing was written outside the inner folder.
    pub(crate) fn assert_nothing_outside(&self) {
        let mut at = self.outer.clone();
        for step in Path::new(INNER) {
            let names: Vec<_> = fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, [step], "something was written to {}", at.display());
            at.push(step);
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.outer));
    }
}
