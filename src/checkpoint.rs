//! Training state on disk: `checkpoints/step-000500/`, complete or absent.
//!
//! A checkpoint is a folder that PEFT can load, plus what training needs to go on from there:
//!
//! ```text
//! step-000500/
//!   adapter_model.safetensors  adapter_config.json    the adapter in f32, exactly
//!   optimizer.safetensors                             moments, by parameter name
//!   trainer_state.json                                TrainerState of train/trainer.rs
//! ```

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::schema::Section;

/// File of the optimizer's moments.
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// File of everything else.
const STATE_FILE: &str = "trainer_state.json";

/// Section `[checkpoint]` of a recipe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; absent: only when training is interrupted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_steps: Option<u64>,
    /// Checkpoints kept; the oldest go first; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_total_limit: Option<usize>,
}

impl CheckpointConfig {
    /// Reads section `[checkpoint]`.
    pub fn read(section: &mut Section) -> Self {
        Self {
            save_steps: section.optional_count("save_steps", 1..),
            save_total_limit: section.optional_count("save_total_limit", 1..),
        }
    }
}

/// Why a checkpoint could not be written or read.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("checkpoint {}: cannot {action}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The adapter could not be written.
    #[error("checkpoint {}: {source}", path.display())]
    Adapter {
        /// Folder of the checkpoint.
        path: PathBuf,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file of the checkpoint is not what this program writes.
    #[error("checkpoint {}: {problem}\n  hint: choose another checkpoint with `--resume DIR`", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The folder named by `--resume` holds no checkpoint.
    #[error("{}: no {STATE_FILE} here, so this is not a checkpoint\n  hint: pass a folder such as runs/NAME/checkpoints/step-000500", path.display())]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
    },
}

/// A named `f32` tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// Unique name.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Values in row-major order.
    pub values: Vec<f32>,
}

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    save_total_limit: Option<usize>,
}

impl Checkpoints {
    /// The checkpoints below `output_dir`. Nothing is created before the first one is saved.
    #[must_use]
    pub fn new(output_dir: &Path, config: &CheckpointConfig) -> Self {
        Self { folder: output_dir.join("checkpoints"), save_total_limit: config.save_total_limit }
    }

    /// The folder that holds them.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Steps and folders of all complete checkpoints, oldest first.
    ///
    /// # Errors
    ///
    /// Where the folder exists and cannot be read.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|e| io_error(&self.folder, "read the folder", e))?,
        };
        let mut checkpoints = Vec::new();
        for entry in entries {
            let path = entry.map_err(|e| io_error(&self.folder, "read the folder", e))?.path();
            if let Some(step) = step_of(&path) {
                checkpoints.push((step, path));
            }
        }
        checkpoints.sort();
        Ok(checkpoints)
    }

    /// The checkpoint of the highest step.
    ///
    /// # Errors
    ///
    /// Where the folder exists and cannot be read.
    pub fn latest(&self) -> Result<Option<PathBuf>, CheckpointError> {
        Ok(self.list()?.pop().map(|(_, path)| path))
    }

    /// Writes the checkpoint of `step`, then deletes the oldest ones beyond `save_total_limit`.
    ///
    /// Everything is written into a folder of another name, forced to the disk, and renamed: a checkpoint that can be
    /// seen is whole. `write_adapter` fills the folder that it is given with PEFT's two files.
    ///
    /// # Errors
    ///
    /// Where the file system refuses; older checkpoints are then all still there.
    pub fn save<E: std::error::Error + Send + Sync + 'static>(
        &self,
        step: u64,
        write_adapter: impl FnOnce(&Path) -> Result<(), E>,
        moments: &[HostTensor],
        state: &impl Serialize,
    ) -> Result<PathBuf, CheckpointError> {
        let target = self.folder.join(format!("step-{step:06}"));
        let partial = self.folder.join(format!(".step-{step:06}.partial"));
        remove_folder(&partial)?;
        fs::create_dir_all(&partial).map_err(|e| io_error(&partial, "create the folder", e))?;

        write_adapter(&partial)
            .map_err(|source| CheckpointError::Adapter { path: target.clone(), source: Box::new(source) })?;
        write_moments(&partial.join(OPTIMIZER_FILE), moments)?;
        let state_file = partial.join(STATE_FILE);
        let json = serde_json::to_vec_pretty(state).map_err(|e| malformed(&state_file, &e))?;
        fs::write(&state_file, json).map_err(|e| io_error(&state_file, "write", e))?;
        sync_folder(&partial)?;

        // A run that was resumed from an earlier step comes by here again.
        let replaced = self.folder.join(format!(".step-{step:06}.replaced"));
        if target.exists() {
            remove_folder(&replaced)?;
            fs::rename(&target, &replaced).map_err(|e| io_error(&target, "replace", e))?;
        }
        fs::rename(&partial, &target).map_err(|e| io_error(&target, "rename the finished checkpoint to", e))?;
        sync(&self.folder)?;
        remove_folder(&replaced)?;
        self.rotate(&target)?;
        Ok(target)
    }

    /// Renames the checkpoints after `step`, so that a run resumed from there neither continues nor counts them.
    /// Returns their new names.
    ///
    /// # Errors
    ///
    /// Where the file system refuses.
    pub fn set_aside_after(&self, step: u64) -> Result<Vec<PathBuf>, CheckpointError> {
        let mut renamed = Vec::new();
        for (later, path) in self.list()?.into_iter().filter(|(later, _)| *later > step) {
            let aside = self.folder.join(format!("superseded-step-{later:06}"));
            remove_folder(&aside)?;
            fs::rename(&path, &aside).map_err(|e| io_error(&path, "rename", e))?;
            renamed.push(aside);
        }
        Ok(renamed)
    }

    /// Deletes the oldest checkpoints beyond the limit, never `newest`.
    fn rotate(&self, newest: &Path) -> Result<(), CheckpointError> {
        let Some(limit) = self.save_total_limit else { return Ok(()) };
        let older: Vec<_> = self.list()?.into_iter().filter(|(_, path)| path != newest).collect();
        let excess = older.len().saturating_sub(limit.max(1) - 1);
        for (_, path) in &older[..excess] {
            remove_folder(path)?;
        }
        Ok(())
    }
}

/// Reads `trainer_state.json` of a checkpoint.
///
/// # Errors
///
/// Where the folder is no checkpoint, or the file cannot be read or is not of this program.
pub fn load_state<S: DeserializeOwned>(checkpoint: &Path) -> Result<S, CheckpointError> {
    let file = checkpoint.join(STATE_FILE);
    let json = match fs::read(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(CheckpointError::NotACheckpoint { path: checkpoint.to_owned() });
        }
        json => json.map_err(|e| io_error(&file, "read", e))?,
    };
    serde_json::from_slice(&json).map_err(|e| malformed(&file, &e))
}

/// Reads `optimizer.safetensors` of a checkpoint, in the order of the names.
///
/// # Errors
///
/// Where the file cannot be read or is not of this program.
pub fn load_moments(checkpoint: &Path) -> Result<Vec<HostTensor>, CheckpointError> {
    let file = checkpoint.join(OPTIMIZER_FILE);
    let bytes = fs::read(&file).map_err(|e| io_error(&file, "read", e))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| malformed(&file, &e))?;
    let mut moments = Vec::with_capacity(tensors.len());
    for (name, view) in tensors.iter() {
        if view.dtype() != safetensors::Dtype::F32 {
            return Err(malformed(&file, &format!("tensor `{name}` has type {:?}, expected F32", view.dtype())));
        }
        let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        moments.push(HostTensor { name: name.to_owned(), shape: view.shape().to_vec(), values });
    }
    moments.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(moments)
}

/// Writes the moments as little-endian `f32`.
fn write_moments(file: &Path, moments: &[HostTensor]) -> Result<(), CheckpointError> {
    let bytes: Vec<Vec<u8>> =
        moments.iter().map(|tensor| tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let mut views = Vec::with_capacity(moments.len());
    for (tensor, bytes) in moments.iter().zip(&bytes) {
        let view = TensorView::new(safetensors::Dtype::F32, tensor.shape.clone(), bytes)
            .map_err(|e| malformed(file, &format!("tensor `{}`: {e}", tensor.name)))?;
        views.push((tensor.name.as_str(), view));
    }
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let serialized = serialize(views, Some(metadata)).map_err(|e| malformed(file, &e))?;
    fs::write(file, serialized).map_err(|e| io_error(file, "write", e))
}

/// The step of a folder named `step-000500`.
fn step_of(path: &Path) -> Option<u64> {
    let digits = path.file_name()?.to_str()?.strip_prefix("step-")?;
    (path.is_dir() && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// Forces the files of a folder, and the folder, to the disk.
fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    for entry in fs::read_dir(folder).map_err(|e| io_error(folder, "read the folder", e))? {
        sync(&entry.map_err(|e| io_error(folder, "read the folder", e))?.path())?;
    }
    sync(folder)
}

/// Forces a file, or the names in a folder, to the disk.
fn sync(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|e| io_error(path, "force to the disk", e))
}

/// Deletes a folder that may not exist.
fn remove_folder(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(path, "delete", error)),
        _ => Ok(()),
    }
}

fn io_error(path: &Path, action: &'static str, source: io::Error) -> CheckpointError {
    CheckpointError::Io { path: path.to_owned(), action, source }
}

fn malformed(path: &Path, problem: &impl ToString) -> CheckpointError {
    CheckpointError::Malformed { path: path.to_owned(), problem: problem.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments() -> Vec<HostTensor> {
        vec![
            HostTensor {
                name: "a.exp_avg".into(),
                shape: vec![2, 3],
                values: vec![0.1, -0.0, 1e-38, 3.0, f32::MAX, 0.3],
            },
            HostTensor { name: "b.exp_avg".into(), shape: vec![1], values: vec![1.0 / 3.0] },
        ]
    }

    fn adapter(folder: &Path) -> io::Result<()> {
        fs::write(folder.join("adapter_model.safetensors"), b"adapter")
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_was_saved_is_loaded_bit_for_bit() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(run.path(), &CheckpointConfig::default());
        assert_eq!(checkpoints.latest().unwrap(), None);
        let path = checkpoints.save(500, adapter, &moments(), &vec![7, 8]).unwrap();
        assert_eq!(path, run.path().join("checkpoints/step-000500"));
        assert_eq!(names(&path), ["adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json"]);
        assert_eq!(checkpoints.latest().unwrap(), Some(path.clone()));
        let bits = |tensors: &[HostTensor]| -> Vec<u32> {
            tensors.iter().flat_map(|tensor| tensor.values.iter().map(|value| value.to_bits())).collect()
        };
        let loaded = load_moments(&path).unwrap();
        assert_eq!(loaded, moments());
        assert_eq!(bits(&loaded), bits(&moments()));
        assert_eq!(load_state::<Vec<u32>>(&path).unwrap(), [7, 8]);
    }

    #[test]
    fn rotation_keeps_the_newest() {
        let run = tempfile::tempdir().unwrap();
        let config = CheckpointConfig { save_steps: Some(10), save_total_limit: Some(2) };
        let checkpoints = Checkpoints::new(run.path(), &config);
        for step in [10, 20, 30, 40] {
            checkpoints.save(step, adapter, &moments(), &step).unwrap();
        }
        assert_eq!(names(&run.path().join("checkpoints")), ["step-000030", "step-000040"]);
    }

    #[test]
    fn a_failed_save_leaves_the_older_checkpoints_and_nothing_that_looks_like_a_new_one() {
        let run = tempfile::tempdir().unwrap();
        let config = CheckpointConfig { save_steps: Some(10), save_total_limit: Some(1) };
        let checkpoints = Checkpoints::new(run.path(), &config);
        let first = checkpoints.save(10, adapter, &moments(), &10).unwrap();
        // Three values do not fill a shape of two: the second save fails after the adapter was written.
        let broken = [HostTensor { name: "a".into(), shape: vec![2], values: vec![1.0, 2.0, 3.0] }];
        let error = checkpoints.save(20, adapter, &broken, &20).unwrap_err();
        assert!(error.to_string().contains("tensor `a`"), "{error}");
        assert_eq!(checkpoints.list().unwrap(), [(10, first)]);
        let second = checkpoints.save(20, adapter, &moments(), &20).unwrap();
        assert_eq!(checkpoints.list().unwrap(), [(20, second)]);
        assert_eq!(names(&run.path().join("checkpoints")), ["step-000020"]);
    }

    #[test]
    fn saving_a_step_again_replaces_it() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(run.path(), &CheckpointConfig::default());
        checkpoints.save(10, adapter, &moments(), &1).unwrap();
        let path = checkpoints.save(10, adapter, &moments(), &2).unwrap();
        assert_eq!(load_state::<u32>(&path).unwrap(), 2);
        assert_eq!(names(&run.path().join("checkpoints")), ["step-000010"]);
    }

    #[test]
    fn later_checkpoints_are_set_aside() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(run.path(), &CheckpointConfig::default());
        for step in [10, 20, 30] {
            checkpoints.save(step, adapter, &moments(), &step).unwrap();
        }
        assert_eq!(checkpoints.set_aside_after(10).unwrap().len(), 2);
        assert_eq!(
            names(&run.path().join("checkpoints")),
            ["step-000010", "superseded-step-000020", "superseded-step-000030"]
        );
        assert_eq!(checkpoints.list().unwrap().len(), 1);
    }

    #[test]
    fn a_folder_that_is_no_checkpoint_is_refused_by_name() {
        let run = tempfile::tempdir().unwrap();
        let error = load_state::<u32>(run.path()).unwrap_err().to_string();
        assert!(error.contains("not a checkpoint") && error.contains("step-000500"), "{error}");
        fs::write(run.path().join(STATE_FILE), "{\"step\": ").unwrap();
        let error = load_state::<u32>(run.path()).unwrap_err().to_string();
        assert!(error.contains("trainer_state.json"), "{error}");
    }
}
