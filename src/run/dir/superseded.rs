//! Files of a start that was killed.

use std::fs::{self, File};
use std::io::{self, BufRead as _, Read as _};
use std::path::{Path, PathBuf};

use super::{REFERENCE, REWARDS_LOG, RunDir, io_error};
use crate::insight::report::REPORT_FILE;
use crate::measure::metrics::UNFINISHED_FILE;
use crate::recipe::of_run::{ENVIRONMENT_FILE, RECIPE_FILE, RESOLVED_FILE};
use crate::train::rollouts::EPISODES_LOG;
use crate::util::failure::Failure;

/// Bytes of a metrics.jsonl that are searched for a step: evaluations before the first step are few and short.
const MAX_SEARCHED_BYTES: u64 = 1 << 20;

/// Names that a start writes into the folder, except checkpoints and the best adapter.
pub(super) const WRITTEN: [&str; 14] = [
    "adapter", ENVIRONMENT_FILE, "memory_plan.json", "metrics.jsonl", RECIPE_FILE, REFERENCE, REPORT_FILE,
    RESOLVED_FILE, REWARDS_LOG, EPISODES_LOG, "rollouts.jsonl", "samples.jsonl", "tensorboard", UNFINISHED_FILE,
];

impl RunDir {
    /// Moves the files of a start that was killed after its first step, before its first checkpoint, into a new folder,
    /// so that a new start does not overwrite them; returns that folder. A start that ended by itself has left a file
    /// that says how.
    pub(crate) fn supersede_killed(&self) -> Result<Option<PathBuf>, Failure> {
        let has_adapter = self.adapter().join("adapter_model.safetensors").exists();
        let was_killed = has_step(&self.path.join("metrics.jsonl")) && !self.path.join(UNFINISHED_FILE).exists();
        if !has_adapter && !was_killed {
            return Ok(None);
        }
        let folder =
            (1..u32::MAX).map(|number| self.path.join(format!("superseded-{number}"))).find(|path| !path.exists());
        let Some(folder) = folder else { return Ok(None) };
        fs::create_dir(&folder).map_err(|e| io_error(&folder, "create the folder", &e))?;
        for name in WRITTEN {
            let path = self.path.join(name);
            match fs::rename(&path, folder.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error(&path, "move", &error)),
                _ => {}
            }
        }
        Ok(Some(folder))
    }
}

/// Whether a metrics.jsonl has a step in it.
fn has_step(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    let mut lines = io::BufReader::new(file.take(MAX_SEARCHED_BYTES)).split(b'\n').map_while(Result::ok);
    let is_step = |line: &[u8]| {
        serde_json::from_slice::<serde_json::Value>(line).is_ok_and(|line| line.get("learning_rate").is_some())
    };
    lines.any(|line| is_step(&line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_start_has_left_is_moved_and_what_an_ended_one_has_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::create(folder.path()).unwrap();
        let names = |path: &Path| {
            let mut names: Vec<_> = fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("metrics.jsonl", "{\"step\": 0, \"eval_loss\": 1.0}\n");
        assert_eq!(run.supersede_killed().unwrap(), None, "it has no step");
        write("metrics.jsonl", "torn\n{\"step\": 1, \"loss\": 2.0, \"learning_rate\": 1e-3}\n");
        write(UNFINISHED_FILE, "{}");
        assert_eq!(run.supersede_killed().unwrap(), None, "it has ended by itself");
        fs::remove_file(folder.path().join(UNFINISHED_FILE)).unwrap();
        write("samples.jsonl", "");
        write("notes.txt", "the user's own");
        for number in 1..3 {
            let moved = run.supersede_killed().unwrap().unwrap();
            assert_eq!(moved, folder.path().join(format!("superseded-{number}")));
            // An adapter was exported, then the power failed.
            fs::create_dir(run.adapter()).unwrap();
            write("adapter/adapter_model.safetensors", "");
        }
        assert_eq!(names(&folder.path().join("superseded-1")), ["metrics.jsonl", "samples.jsonl"]);
        assert_eq!(names(&folder.path().join("superseded-2")), ["adapter"]);
        assert_eq!(names(folder.path()), [".lock", "adapter", "notes.txt", "superseded-1", "superseded-2"]);
    }
}
