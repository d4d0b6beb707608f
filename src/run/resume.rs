//! Where a resumed run goes on, and what has changed since.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::args::Resume;
use super::dir::RunDir;
use crate::checkpoint::{self, Checkpoints};
use crate::failure::Failure;
use crate::metrics::Sinks;
use crate::train::state::TrainerState;

/// A checkpoint to go on from.
#[derive(Debug)]
pub(super) struct Resumed {
    /// Its folder.
    pub(super) checkpoint: PathBuf,
    /// Where training stood.
    pub(super) state: TrainerState,
    /// Recipe keys that have changed since, `train.max_steps: 2 -> 4`.
    pub(super) changes: Vec<String>,
}

impl Resumed {
    /// Finds and reads the checkpoint that `--resume` means.
    ///
    /// # Errors
    ///
    /// No checkpoint there, or one that cannot be read.
    pub(super) fn find(resume: &Resume, checkpoints: &Checkpoints, recipe: &str) -> Result<Self, Failure> {
        let checkpoint = match resume {
            Resume::Checkpoint(path) => path.clone(),
            Resume::Latest => checkpoints.latest().map_err(Failure::running)?.ok_or_else(|| {
                let folder = checkpoints.folder().display();
                Failure::input(format!(
                    "--resume: there is no checkpoint in {folder}\n  hint: start without `--resume`, or name a checkpoint"
                ))
            })?,
        };
        let state = checkpoint::load_state(&checkpoint).map_err(Failure::input)?;
        // A checkpoint lies in the run's folder, two levels below resolved.toml.
        let earlier = checkpoint.canonicalize().ok().and_then(|path| {
            let run = path.parent()?.parent()?;
            std::fs::read_to_string(run.join("resolved.toml")).ok()
        });
        let changes = earlier.map(|earlier| changed_keys(&earlier, recipe)).unwrap_or_default();
        Ok(Self { checkpoint, state, changes })
    }

    /// Holds that something is left to do.
    ///
    /// # Errors
    ///
    /// A run that has finished all its steps.
    pub(super) fn refuse_if_done(&self, dir: &RunDir, total_steps: u64) -> Result<(), Failure> {
        if self.state.step < total_steps || !dir.is_finished() {
            return Ok(());
        }
        let (folder, step) = (dir.path().display(), self.state.step);
        Err(Failure::input(format!(
            "--resume: the run in {folder} has finished its {step} steps: nothing is left to do\n  hint: to train on, \
             raise `train.max_steps` or `train.num_epochs`"
        )))
    }

    /// Says where training goes on and what has changed, and sets later checkpoints of this run aside.
    ///
    /// # Errors
    ///
    /// Checkpoints that cannot be renamed.
    pub(super) fn tell(&self, checkpoints: &Checkpoints, output_dir: &Path, sinks: &mut Sinks) -> Result<(), Failure> {
        sinks.note(&format!("resuming after step {} from {}", self.state.step, self.checkpoint.display()));
        for change in &self.changes {
            sinks.warn(&format!("the recipe has changed: {change}"));
        }
        if self.is_within(output_dir) {
            for path in checkpoints.set_aside_after(self.state.step).map_err(Failure::running)? {
                sinks.note(&format!("a later checkpoint was renamed to {}", path.display()));
            }
        }
        Ok(())
    }

    /// Whether the checkpoint is one of this run's own.
    #[must_use]
    fn is_within(&self, output_dir: &Path) -> bool {
        match (self.checkpoint.canonicalize(), output_dir.canonicalize()) {
            (Ok(checkpoint), Ok(output_dir)) => checkpoint.starts_with(output_dir),
            _ => false,
        }
    }
}

/// Keys whose value differs between two recipes, other than where the output goes.
fn changed_keys(earlier: &str, now: &str) -> Vec<String> {
    let (Ok(earlier), Ok(now)) = (earlier.parse::<Table>(), now.parse::<Table>()) else { return Vec::new() };
    let (mut before, mut after) = (Vec::new(), Vec::new());
    flatten("", &Value::Table(earlier), &mut before);
    flatten("", &Value::Table(now), &mut after);
    let value_of = |entries: &[(String, String)], key: &str| {
        entries.iter().find(|(other, _)| other == key).map_or_else(|| "none".to_owned(), |(_, value)| value.clone())
    };
    let mut keys: Vec<&String> = before.iter().chain(&after).map(|(key, _)| key).collect();
    keys.sort();
    keys.dedup();
    keys.into_iter()
        .filter(|key| *key != "output_dir")
        .map(|key| (key, value_of(&before, key), value_of(&after, key)))
        .filter(|(_, before, after)| before != after)
        .map(|(key, before, after)| format!("{key}: {before} -> {after}"))
        .collect()
}

/// Every key with its value, `data.train[0].path`.
fn flatten(prefix: &str, value: &Value, entries: &mut Vec<(String, String)>) {
    match value {
        Value::Table(table) => {
            for (key, value) in table {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, entries);
            }
        }
        Value::Array(values) if values.iter().any(Value::is_table) => {
            for (index, value) in values.iter().enumerate() {
                flatten(&format!("{prefix}[{index}]"), value, entries);
            }
        }
        value => entries.push((prefix.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_added_and_removed_keys_are_named_with_both_values() {
        let earlier = "output_dir = \"a\"\nseed = 1\n[train]\nmax_steps = 2\n[[data.train]]\npath = \"a\"\n";
        let now =
            "output_dir = \"b\"\nseed = 1\n[train]\nmax_steps = 4\nnum_epochs = 1.0\n[[data.train]]\npath = \"b\"\n";
        assert_eq!(
            changed_keys(earlier, now),
            ["data.train[0].path: \"a\" -> \"b\"", "train.max_steps: 2 -> 4", "train.num_epochs: none -> 1.0"]
        );
        assert!(changed_keys(now, now).is_empty());
    }
}
