//! The folder of a run: its lock and its plain files.

mod lock;
mod superseded;

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::insight::report::REPORT_FILE;
use crate::measure::metrics::{Outcome, SUMMARY_FILE, UNFINISHED_FILE};
use crate::recipe::of_run::{ENVIRONMENT_FILE, RECIPE_FILE, RESOLVED_FILE};
use crate::schema::Problem;
use crate::train::saver::BEST_ADAPTER;
use crate::util::failure::Failure;
use crate::util::files;
use lock::lock;
use superseded::WRITTEN;

/// The adapter that a run of preferences started from, to which it compares: a resumed run needs it again.
pub(crate) const REFERENCE: &str = "reference";

/// What programs that judge answers have for people.
pub(crate) const REWARDS_LOG: &str = "rewards.log";

/// The mistake of a run from the beginning in the folder of a finished run.
pub(crate) fn finished(path: &Path) -> Problem {
    let path = &path.display().to_string();
    Problem::new(format!("`output_dir` = {path}: holds a finished run ({SUMMARY_FILE})")).hint(format!(
        "`--resume` with a larger `train.max_steps` or `train.num_epochs` continues it, `--set output_dir={}` starts \
             another, `--overwrite` deletes it",
        free_name(path)
    ))
}

/// The folder's name with the first number from 2 on that is not taken.
pub(super) fn free_name(path: &str) -> String {
    let names = (2..).map(|number| format!("{path}-{number}"));
    names.into_iter().find(|name| !Path::new(name).exists()).unwrap_or_default()
}

/// The mistake of a folder that cannot be made: it is a file, or below one, or a link that leads nowhere.
pub(crate) fn not_a_folder(path: &Path) -> Option<Problem> {
    let nearest = path.ancestors().find(|path| path.symlink_metadata().is_ok()).filter(|path| !path.is_dir())?;
    let shown = nearest.display();
    let what = match fs::read_link(nearest) {
        Ok(to) if !nearest.exists() => format!("{shown} is a link to {}, which is not there", to.display()),
        _ => format!("{shown} is a file, expected a folder"),
    };
    Some(Problem::new(format!("`output_dir` = {}: {what}", path.display())))
}

fn unfinished(path: &Path) -> Problem {
    let path = &path.display().to_string();
    Problem::new(format!("`output_dir` = {path}: holds checkpoints of an unfinished run")).hint(format!(
        "`--resume` continues it, `--set output_dir={}` starts another, `--overwrite` deletes it",
        free_name(path)
    ))
}

/// The file system refused: a failing disk is not a mistake in the recipe.
fn io_error(path: &Path, action: &str, source: &io::Error) -> Failure {
    let hint = match source.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "\n  hint: `output_dir` is the folder of a run: `--set output_dir=...` names another"
        }
        _ => "",
    };
    Failure::running(format!("{}: cannot {action}: {source}{hint}", path.display()))
}

/// How a run starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// From the beginning, in a folder that holds no run.
    Fresh,
    /// From a checkpoint.
    Resume,
}

/// How a run finished, as its final figures say.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Finished {
    pub(crate) outcome: Outcome,
    /// Optimizer updates.
    pub(crate) steps: u64,
}

/// The folder of a run, locked against other processes until it is dropped.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// The plain files, as they were written.
    files: RefCell<Vec<(&'static str, Vec<u8>)>>,
    /// Ends with the file handle, even if the process is killed.
    _lock: File,
    /// Whether the file system has locks.
    is_locked: bool,
}

impl RunDir {
    /// Locks the folder if it exists, so that nothing in it changes while it is checked.
    pub(crate) fn open(path: &Path) -> Result<Option<Self>, Failure> {
        if path.is_dir() {
            return Self::locked(path).map(Some);
        }
        match not_a_folder(path) {
            Some(problem) => Err(problem.into()),
            None => Ok(None),
        }
    }

    /// Creates the folder and locks it.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        fs::create_dir_all(path).map_err(|e| io_error(path, "create the folder", &e))?;
        Self::locked(path)
    }

    fn locked(path: &Path) -> Result<Self, Failure> {
        let (lock, is_locked) = lock(path, File::try_lock)?;
        Ok(Self { path: path.to_owned(), files: RefCell::default(), _lock: lock, is_locked })
    }

    /// A warning, where the file system cannot keep other runs out of the folder.
    pub(crate) fn warning(&self) -> Option<&'static str> {
        (!self.is_locked).then_some(
            "the file system of `output_dir` has no locks, so a second run in this folder would not be noticed\n  hint: \
             do not start one, or choose a local folder with `--set output_dir=...`",
        )
    }

    /// Checks that a run may start from the beginning in this folder.
    pub(crate) fn refuse_other_runs(&self) -> Result<(), Failure> {
        if self.is_finished() {
            return Err(finished(&self.path).into());
        }
        if has_checkpoints(&self.path) { Err(unfinished(&self.path).into()) } else { self.refuse_foreign(false) }
    }

    /// Checks that nothing is overwritten that no run has written; an adapter is moved unless `overwrite`.
    pub(crate) fn refuse_foreign(&self, overwrite: bool) -> Result<(), Failure> {
        let is_there = |name: &&str| self.path.join(name).exists();
        let is_lost = |name: &&str| is_there(name) && (overwrite || *name != "adapter");
        match WRITTEN.iter().find(|name| is_lost(name)) {
            // It is the first file that a run writes.
            Some(name) if !is_there(&ENVIRONMENT_FILE) && !self.is_finished() => {
                let path = self.path.display();
                let what = format!(
                    "`output_dir` = {path}: holds `{name}`, which no run has written and this one would replace"
                );
                Err(Problem::new(what).hint("choose a folder of its own for each run, such as runs/mine").into())
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn adapter(&self) -> PathBuf {
        self.path.join("adapter")
    }

    /// Deletes the files that a killed process left while writing the adapter: their names begin with a dot.
    pub(crate) fn clear_leftovers(&self) {
        let entries = fs::read_dir(self.adapter()).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with('.')) {
            // If this fails, they only take up space.
            drop(fs::remove_file(entry.path()));
        }
    }

    /// Whether the folder holds a finished run.
    pub(crate) fn is_finished(&self) -> bool {
        self.path.join(SUMMARY_FILE).exists()
    }

    /// How the run in this folder finished; absent where it did not, or its figures cannot be read.
    pub(crate) fn finished(&self) -> Option<Finished> {
        let json = fs::read(self.path.join(SUMMARY_FILE)).ok()?;
        Some(serde_json::from_slice(&json).unwrap_or_default())
    }

    /// The recipe of the latest start, every default filled in; empty where there is no recipe.
    pub(crate) fn recipe(&self) -> String {
        fs::read_to_string(self.path.join(RESOLVED_FILE)).unwrap_or_default()
    }

    /// Number of starts that have written into the folder.
    pub(crate) fn num_starts(&self) -> u64 {
        let json = fs::read(self.path.join(ENVIRONMENT_FILE)).unwrap_or_default();
        serde_json::from_slice::<serde_json::Value>(&json).ok().and_then(|json| json["starts"].as_u64()).unwrap_or(0)
    }

    /// Deletes the final figures of earlier starts. For [`Start::Fresh`], also deletes the files on how a start ended,
    /// its best adapter, and its TensorBoard events, which would be drawn as a second curve. For [`Start::Resume`], the files on how a
    /// start ended stay true until a step is taken: see [`Self::earlier_end`].
    pub(crate) fn reopen(&self, start: Start) -> Result<(), Failure> {
        let partial = format!(".{UNFINISHED_FILE}.partial");
        let mut leftovers = vec![self.path.join(SUMMARY_FILE), self.path.join(partial)];
        if start == Start::Fresh {
            leftovers.extend(self.earlier_end());
            let best = fs::read_dir(self.path.join(BEST_ADAPTER)).into_iter().flatten().flatten();
            leftovers.extend(best.map(|entry| entry.path()));
            let events = fs::read_dir(self.path.join("tensorboard")).into_iter().flatten().flatten();
            leftovers.extend(
                events
                    .filter(|entry| entry.file_name().to_string_lossy().starts_with("events.out.tfevents."))
                    .map(|entry| entry.path()),
            );
        }
        for leftover in leftovers {
            match fs::remove_file(&leftover) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(io_error(&leftover, "delete", &error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The files that say how an earlier start ended, whether or not they exist.
    pub(crate) fn earlier_end(&self) -> [PathBuf; 2] {
        [UNFINISHED_FILE, REPORT_FILE].map(|name| self.path.join(name))
    }

    /// Deletes what an earlier run has written.
    pub(crate) fn clear(&self) -> Result<(), Failure> {
        for name in WRITTEN.into_iter().chain([BEST_ADAPTER, "checkpoints", SUMMARY_FILE]) {
            let path = self.path.join(name);
            let deleted = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            match deleted {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(io_error(&path, "delete", &error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes `resolved.toml`, and `recipe.toml`, which alone trains the same.
    pub(crate) fn write_recipe(&self, recipe: &str, resolved: &str) -> Result<(), Failure> {
        self.write(RECIPE_FILE, recipe.as_bytes())?;
        self.write(RESOLVED_FILE, resolved.as_bytes())
    }

    /// Keeps the adapter in `folder` as the [`REFERENCE`].
    pub(crate) fn keep_reference(&self, folder: &Path) -> Result<(), Failure> {
        let kept = self.path.join(REFERENCE);
        fs::create_dir_all(&kept).map_err(|e| io_error(&kept, "create the folder", &e))?;
        for name in ["adapter_model.safetensors", "adapter_config.json"] {
            let path = kept.join(name);
            fs::copy(folder.join(name), &path).map_err(|e| io_error(&path, "write", &e))?;
        }
        Ok(())
    }

    /// Writes a file as JSON.
    pub(crate) fn write_json(&self, name: &'static str, value: &impl Serialize) -> Result<(), Failure> {
        let mut json =
            serde_json::to_vec_pretty(value).map_err(|e| io_error(&self.path.join(name), "write", &e.into()))?;
        json.push(b'\n');
        self.write(name, &json)
    }

    /// Writes plain files again that have been deleted since; returns their names.
    pub(crate) fn restore(&self) -> Result<Vec<&'static str>, Failure> {
        let mut restored = Vec::new();
        for (name, bytes) in self.files.borrow().iter() {
            if !self.path.join(name).exists() {
                self.put(name, bytes)?;
                restored.push(*name);
            }
        }
        Ok(restored)
    }

    /// Writes a file, and remembers it for [`restore`](Self::restore).
    fn write(&self, name: &'static str, bytes: &[u8]) -> Result<(), Failure> {
        self.files.borrow_mut().push((name, bytes.to_owned()));
        self.put(name, bytes)
    }

    /// Writes a file completely or not at all.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        let path = self.path.join(name);
        files::write(&path, bytes).map_err(|e| io_error(&path, "write", &e))
    }
}

/// Whether the folder holds checkpoints of a run.
pub(crate) fn has_checkpoints(path: &Path) -> bool {
    let is_checkpoint = |name: &str| name.starts_with("step-") || name.ends_with(".replaced");
    fs::read_dir(path.join("checkpoints"))
        .is_ok_and(|entries| entries.flatten().any(|e| is_checkpoint(&e.file_name().to_string_lossy())))
}

/// The nearest existing path among `path` and the folders above it; it decides whether the rest can be created.
pub(crate) fn nearest_existing(path: &Path) -> &Path {
    let mut existing = path;
    while !existing.exists() {
        existing = match existing.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => break,
        };
    }
    existing
}

#[cfg(test)]
mod tests {
    use super::lock::LOCK_FILE;
    use super::*;

    #[test]
    fn a_finished_run_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs/a");
        assert!(RunDir::open(&path).unwrap().is_none());
        fs::write(folder.path().join("file"), "").unwrap();
        let error = RunDir::open(&folder.path().join("file/a/b")).unwrap_err();
        assert!(error.to_string().ends_with("file is a file, expected a folder"), "{error}");
        #[cfg(unix)]
        for below in ["gone", "gone/a/b"] {
            drop(std::os::unix::fs::symlink("nowhere", folder.path().join("gone")));
            let error = RunDir::open(&folder.path().join(below)).unwrap_err();
            assert!(error.to_string().ends_with("gone is a link to nowhere, which is not there"), "{error}");
        }
        let run = RunDir::create(&path).unwrap();
        assert_eq!(run.warning(), None);
        run.refuse_other_runs().unwrap();
        fs::create_dir(path.join("adapter")).unwrap();
        run.refuse_foreign(false).unwrap();
        assert!(run.refuse_foreign(true).is_err(), "it would be deleted");
        fs::write(path.join("recipe.toml"), "").unwrap();
        let error = run.refuse_foreign(false).unwrap_err();
        assert!(error.to_string().contains("holds `recipe.toml`, which no run has written"), "{error}");
        fs::write(path.join(ENVIRONMENT_FILE), "{}").unwrap();
        run.refuse_foreign(true).unwrap();
        fs::write(path.join(SUMMARY_FILE), "{}").unwrap();
        let error = run.refuse_other_runs().unwrap_err();
        assert!(error.to_string().contains("holds a finished run") && error.exit_code() == 2, "{error}");
        assert!(run.is_finished());
        run.reopen(Start::Resume).unwrap();
        assert!(!run.is_finished());
    }

    #[test]
    fn a_fresh_start_drops_the_events_of_one_that_came_to_nothing_and_a_resumed_one_keeps_them() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tensorboard")).unwrap();
        for name in ["events.out.tfevents.1.host.2.0", "notes.txt"] {
            fs::write(folder.path().join("tensorboard").join(name), "x").unwrap();
        }
        let names = || fs::read_dir(folder.path().join("tensorboard")).unwrap().count();
        let run = RunDir::create(folder.path()).unwrap();
        run.reopen(Start::Resume).unwrap();
        assert_eq!(names(), 2);
        run.reopen(Start::Fresh).unwrap();
        assert_eq!(names(), 1);
    }

    #[test]
    fn an_unfinished_run_is_only_resumed() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("checkpoints/step-000010")).unwrap();
        let run = RunDir::create(folder.path()).unwrap();
        let error = run.refuse_other_runs().unwrap_err();
        assert!(error.to_string().contains("--resume"), "{error}");
    }

    #[test]
    fn two_runs_cannot_share_a_folder_but_a_dead_one_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        // What a killed process leaves behind.
        fs::write(folder.path().join(LOCK_FILE), "999999999\n").unwrap();
        let first = RunDir::create(folder.path()).unwrap();
        let error = RunDir::create(folder.path()).unwrap_err();
        assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        assert!(RunDir::open(folder.path()).is_err());
        drop(first);
        assert!(RunDir::open(folder.path()).unwrap().is_some());
    }

    #[test]
    fn a_recipe_that_is_deleted_is_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::create(folder.path()).unwrap();
        run.write_recipe("seed = 1\n", "seed = 1\nall = true\n").unwrap();
        let given = fs::read_to_string(folder.path().join("recipe.toml")).unwrap();
        assert_eq!(given, "seed = 1\n");
        let resolved = fs::read_to_string(folder.path().join("resolved.toml")).unwrap();
        assert_eq!(resolved, "seed = 1\nall = true\n");
        fs::remove_file(folder.path().join("recipe.toml")).unwrap();
        assert_eq!(run.restore().unwrap(), ["recipe.toml"]);
        assert_eq!(fs::read_to_string(folder.path().join("recipe.toml")).unwrap(), given);
    }
}
