//! Training state on disk: `checkpoints/step-000500/`, complete or absent.
//!
//! A checkpoint is a folder that PEFT can load, plus what training needs to continue from there:
//!
//! ```text
//! step-000500/
//!   adapter_model.safetensors  adapter_config.json    the adapter in f32, exactly
//!   prompt_form.json                                  whether rows went through a chat template, and which
//!   optimizer.safetensors                             moments, by parameter name
//!   trainer_state.json                                TrainerState of train/state.rs
//!   resolved.toml                                     the recipe that it was trained with
//!   SHA256SUMS                                        of all the others
//! ```

mod checksums;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{SafeTensorError, SafeTensors, serialize_to_file};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::save::export::{PROMPT_FORM_FILE, SHIPPED_FILE};
use crate::util::files::sync_folder;

use crate::config::CheckpointConfig;

const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const STATE_FILE: &str = "trainer_state.json";
const RECIPE_FILE: &str = "resolved.toml";

/// The files of a checkpoint that have a checksum.
const FILES: [&str; 7] = [
    "adapter_config.json", "adapter_model.safetensors", OPTIMIZER_FILE, PROMPT_FORM_FILE, RECIPE_FILE, SHIPPED_FILE,
    STATE_FILE,
];

/// Suffix of a checkpoint that is being written.
const PARTIAL: &str = ".partial";
/// Suffix of a checkpoint that is being replaced by a new one of the same step.
const REPLACED: &str = ".replaced";
/// Suffix of a checkpoint that is being deleted.
const DELETED: &str = ".deleted";

/// Why a checkpoint could not be written or read.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("checkpoint {}: cannot {action}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The adapter could not be written, or a file is missing or has changed since it was written.
    #[error("checkpoint {}: {problem}", path.display())]
    Damaged {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file does not have the format that this program writes.
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

/// The values of a tensor in host memory, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum HostValues {
    /// Numbers.
    F32(Vec<f32>),
    /// Bytes.
    U8(Vec<u8>),
}

impl HostValues {
    /// The numbers; bytes have none.
    #[must_use]
    pub fn numbers(&self) -> &[f32] {
        match self {
            Self::F32(numbers) => numbers,
            Self::U8(_) => &[],
        }
    }
}

/// A named tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// Unique name.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: HostValues,
}

/// What [`Checkpoints::newest_good`] found.
#[derive(Debug, Default)]
pub struct NewestGood {
    /// The folder of the newest undamaged checkpoint; absent where there is none.
    pub checkpoint: Option<PathBuf>,
    /// The damaged checkpoints that are newer than it.
    pub damaged: Vec<CheckpointError>,
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

    /// The checkpoints in any folder, also one of another run.
    #[must_use]
    pub fn of_folder(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), save_total_limit: None }
    }

    /// The folder that holds the checkpoints.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Steps and folders of all complete checkpoints, oldest first.
    ///
    /// # Errors
    /// Where the folder exists and cannot be read.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|e| io_error(&self.folder, "read the folder", e))?,
        };
        let mut checkpoints = Vec::new();
        for entry in entries {
            let path = entry.map_err(|e| io_error(&self.folder, "read the folder", e))?.path();
            let Some(step) = step_of(&path) else { continue };
            // The process may have ended between the two renames of `save`.
            if !path.ends_with(replaced_name(step)) || !self.folder.join(folder_name(step)).exists() {
                checkpoints.push((step, path));
            }
        }
        checkpoints.sort();
        Ok(checkpoints)
    }

    /// The undamaged checkpoint with the highest step.
    ///
    /// # Errors
    /// Where the folder exists and cannot be read.
    pub fn newest_good(&self) -> Result<NewestGood, CheckpointError> {
        let mut found = NewestGood::default();
        for (_, path) in self.list()?.into_iter().rev() {
            match verify(&path) {
                Ok(()) => {
                    found.checkpoint = Some(path);
                    break;
                }
                Err(error) => found.damaged.push(error),
            }
        }
        Ok(found)
    }

    /// Writes the checkpoint of `step`.
    ///
    /// All files are written into a folder with a temporary name, synced to disk, and the folder is renamed: every
    /// visible checkpoint is complete. `write_adapter` writes PEFT's two files into the folder that it gets; `recipe`
    /// is the recipe with every default filled in. Older checkpoints stay: [`rotate`](Self::rotate) deletes them.
    ///
    /// # Errors
    /// Where the file system refuses. The partial checkpoint is then deleted, and all older checkpoints stay.
    pub fn save<E: ToString>(
        &self,
        step: u64,
        write_adapter: impl FnOnce(&Path) -> Result<(), E>,
        moments: &[HostTensor],
        state: &impl Serialize,
        recipe: &str,
    ) -> Result<PathBuf, CheckpointError> {
        let target = self.folder.join(folder_name(step));
        self.remove_partial()?;
        let partial = self.folder.join(format!(".{}{PARTIAL}", folder_name(step)));
        let written = (|| {
            fs::create_dir_all(&partial).map_err(|e| io_error(&partial, "create the folder", e))?;
            write_adapter(&partial).map_err(|error| damaged(&target, &error))?;
            write_moments(&partial.join(OPTIMIZER_FILE), moments)?;
            let json = serde_json::to_vec_pretty(state).map_err(|e| malformed(&partial.join(STATE_FILE), &e))?;
            for (name, bytes) in [(STATE_FILE, json.as_slice()), (RECIPE_FILE, recipe.as_bytes())] {
                let path = partial.join(name);
                fs::write(&path, bytes).map_err(|e| io_error(&path, "write", e))?;
            }
            checksums::write(&partial, &FILES).map_err(|e| io_error(&partial, "write the checksums", e))?;
            sync_files(&partial)
        })();
        if written.is_err() {
            // The disk may be full, so make room. The first error is the one to report.
            drop(remove_folder(&partial));
            return written.map(|()| target);
        }

        // A run that was resumed from an earlier step saves the same step again.
        let replaced = self.folder.join(replaced_name(step));
        if target.exists() {
            remove_folder(&replaced)?;
            fs::rename(&target, &replaced).map_err(|e| io_error(&target, "replace", e))?;
        }
        fs::rename(&partial, &target).map_err(|e| io_error(&target, "rename the finished checkpoint to", e))?;
        // The folder of checkpoints may itself be new.
        for folder in self.folder.ancestors().take(2) {
            sync_folder(folder).map_err(|e| io_error(folder, "force to the disk", e))?;
        }
        remove_folder(&replaced)?;
        Ok(target)
    }

    /// Deletes what interrupted saves and deletions left behind.
    fn remove_partial(&self) -> Result<(), CheckpointError> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_partial =
            |name: &str| name.starts_with(".step-") && (name.ends_with(PARTIAL) || name.ends_with(DELETED));
        entries
            .filter(|entry| entry.file_name().to_str().is_some_and(is_partial))
            .try_for_each(|entry| remove_folder(&entry.path()))
    }

    /// Renames the checkpoints after `step`, so that a run resumed from there neither continues nor counts them. Also
    /// deletes what interrupted saves and deletions left behind. Returns the new names.
    ///
    /// # Errors
    /// Where the file system refuses.
    pub fn set_aside_after(&self, step: u64) -> Result<Vec<PathBuf>, CheckpointError> {
        self.remove_partial()?;
        let mut renamed = Vec::new();
        for (later, path) in self.list()?.into_iter().filter(|(later, _)| *later > step) {
            let aside = self.folder.join(format!("superseded-step-{later:06}"));
            remove_folder(&aside)?;
            fs::rename(&path, &aside).map_err(|e| io_error(&path, "rename", e))?;
            renamed.push(aside);
        }
        Ok(renamed)
    }

    /// Deletes the oldest checkpoints beyond `save_total_limit`, but none that is in `keep`.
    ///
    /// # Errors
    /// Where the file system refuses.
    pub fn rotate(&self, keep: &[&Path]) -> Result<(), CheckpointError> {
        let Some(limit) = self.save_total_limit else { return Ok(()) };
        let all = self.list()?;
        let excess = all.len().saturating_sub(limit.max(1));
        let oldest = all[..excess].iter().map(|(_, path)| path.as_path());
        oldest.filter(|path| !keep.contains(path)).try_for_each(discard)
    }

    /// The newest complete checkpoint for which `is_sound` returns true.
    ///
    /// # Errors
    /// Where the folder cannot be read.
    pub fn newest_that(&self, is_sound: impl Fn(&Path) -> bool) -> Result<Option<PathBuf>, CheckpointError> {
        let all = self.list()?;
        Ok(all.into_iter().rev().map(|(_, path)| path).find(|path| is_sound(path) && verify(path).is_ok()))
    }
}

/// Checks the files of a checkpoint against their checksums.
///
/// # Errors
/// Where the folder is no checkpoint, or a file is missing or has changed.
pub fn verify(checkpoint: &Path) -> Result<(), CheckpointError> {
    if !checkpoint.join(STATE_FILE).exists() && !checkpoint.join(checksums::SUMS_FILE).exists() {
        return Err(CheckpointError::NotACheckpoint { path: checkpoint.to_owned() });
    }
    checksums::verify(checkpoint, &FILES).map_err(|problem| damaged(checkpoint, &problem))
}

/// The recipe that a checkpoint was trained with, every default filled in; absent where it cannot be read.
#[must_use]
pub fn load_recipe(checkpoint: &Path) -> Option<String> {
    fs::read_to_string(checkpoint.join(RECIPE_FILE)).ok()
}

/// Reads `trainer_state.json` of a checkpoint.
///
/// # Errors
/// Where the folder is no checkpoint, or the file cannot be read or does not have this program's format.
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

/// Reads `optimizer.safetensors` of a checkpoint, sorted by name.
///
/// # Errors
/// Where the file cannot be read or does not have this program's format.
pub fn load_moments(checkpoint: &Path) -> Result<Vec<HostTensor>, CheckpointError> {
    let file = checkpoint.join(OPTIMIZER_FILE);
    let bytes = fs::read(&file).map_err(|e| io_error(&file, "read", e))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| malformed(&file, &e))?;
    let mut moments = Vec::with_capacity(tensors.len());
    for (name, view) in tensors.iter() {
        let values = match view.dtype() {
            safetensors::Dtype::F32 => HostValues::F32(bytemuck::pod_collect_to_vec(view.data())),
            safetensors::Dtype::U8 => HostValues::U8(view.data().to_vec()),
            other => {
                let problem = format!("tensor `{name}` has type {other:?}, expected F32 or U8");
                return Err(malformed(&file, &problem));
            }
        };
        moments.push(HostTensor { name: name.to_owned(), shape: view.shape().to_vec(), values });
    }
    moments.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(moments)
}

fn write_moments(file: &Path, moments: &[HostTensor]) -> Result<(), CheckpointError> {
    let mut views = Vec::with_capacity(moments.len());
    for tensor in moments {
        let (dtype, bytes) = match &tensor.values {
            HostValues::F32(numbers) => (safetensors::Dtype::F32, bytemuck::cast_slice(numbers)),
            HostValues::U8(bytes) => (safetensors::Dtype::U8, &bytes[..]),
        };
        let view = TensorView::new(dtype, tensor.shape.clone(), bytes)
            .map_err(|e| malformed(file, &format!("tensor `{}`: {e}", tensor.name)))?;
        views.push((tensor.name.as_str(), view));
    }
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize_to_file(views, Some(metadata), file).map_err(|error| match error {
        SafeTensorError::IoError(error) => io_error(file, "write", error),
        error => malformed(file, &error),
    })
}

/// `step-000500`.
fn folder_name(step: u64) -> String {
    format!("step-{step:06}")
}

/// `.step-000500.replaced`.
fn replaced_name(step: u64) -> String {
    format!(".{}{REPLACED}", folder_name(step))
}

/// The step of a folder named `step-000500` or `.step-000500.replaced`.
fn step_of(folder: &Path) -> Option<u64> {
    let name = folder.file_name()?.to_str()?;
    let replaced = name.strip_prefix('.').and_then(|name| name.strip_suffix(REPLACED));
    let digits = replaced.unwrap_or(name).strip_prefix("step-")?;
    (folder.is_dir() && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// Forces the files of a folder, and the folder, to disk.
fn sync_files(folder: &Path) -> Result<(), CheckpointError> {
    for entry in fs::read_dir(folder).map_err(|e| io_error(folder, "read the folder", e))? {
        let path = entry.map_err(|e| io_error(folder, "read the folder", e))?.path();
        File::open(&path).and_then(|file| file.sync_all()).map_err(|e| io_error(&path, "force to the disk", e))?;
    }
    sync_folder(folder).map_err(|e| io_error(folder, "force to the disk", e))
}

/// Deletes a checkpoint. It is renamed first, so that every visible checkpoint is complete even if the process ends
/// halfway. [`Checkpoints::remove_partial`] deletes the rest later.
fn discard(checkpoint: &Path) -> Result<(), CheckpointError> {
    let Some(name) = checkpoint.file_name() else { return Ok(()) };
    let deleted = checkpoint.with_file_name(format!(".{}{DELETED}", name.to_string_lossy().trim_start_matches('.')));
    remove_folder(&deleted)?;
    fs::rename(checkpoint, &deleted).map_err(|e| io_error(checkpoint, "rename", e))?;
    remove_folder(&deleted)
}

fn remove_folder(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(path, "delete", error)),
        _ => Ok(()),
    }
}

fn io_error(path: &Path, action: &'static str, source: io::Error) -> CheckpointError {
    CheckpointError::Io { path: path.to_owned(), action, source }
}

fn damaged(path: &Path, problem: &impl ToString) -> CheckpointError {
    CheckpointError::Damaged { path: path.to_owned(), problem: problem.to_string() }
}

fn malformed(path: &Path, problem: &impl ToString) -> CheckpointError {
    CheckpointError::Malformed { path: path.to_owned(), problem: problem.to_string() }
}

#[cfg(test)]
mod tests;
