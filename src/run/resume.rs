//! Finds where a resumed run continues, and what has changed since.

use std::path::{Path, PathBuf};

use super::args::{Resume, TrainArgs};
use super::changes::{Change, changes};
use super::dir::{Finished, RunDir, free_name};
use super::overview::total_steps;
use crate::config::GradientCheckpointing;
use crate::data::dataset::Dataset;
use crate::lora::AdapterSet;
use crate::measure::metrics::Sinks;
use crate::recipe::of_run::{RESOLVED_FILE, started_in};
use crate::recipe::{Purpose, Recipe};
use crate::save::checkpoint::{self, Checkpoints};
use crate::save::export::is_adapter;
use crate::schema::{Effect, Problem, Problems};
use crate::train::saver::BEST_ADAPTER;
use crate::train::schedule::Schedule;
use crate::train::state::{Inputs, RowOrder, TrainerState};
use crate::train::step::{StepState, TrainStep};
use crate::util::failure::Failure;
use crate::util::text::quoted;

/// A checkpoint to continue from.
#[derive(Debug)]
pub(super) struct Resumed {
    /// Its folder.
    pub(super) checkpoint: PathBuf,
    /// State of training at the checkpoint.
    pub(super) state: TrainerState,
    /// Recipe keys that have changed since.
    changes: Vec<Change>,
    /// What the checkpoint was trained with, where the recipe has `train.gradient_checkpointing` = "auto".
    pub(super) checkpointing: Option<GradientCheckpointing>,
    /// The recipe of the checkpoint.
    earlier: Option<String>,
    /// Errors of newer checkpoints, which are damaged.
    damaged: Vec<String>,
    /// The newest checkpoint of the run, up to this one, that was saved while the watchdog found nothing wrong.
    pub(super) sound: Option<PathBuf>,
}

/// How many times higher a learning rate is after a jump.
const JUMP: f64 = 1.5;

/// How many micro-batches a step has.
const ACCUMULATION: &str = "train.gradient_accumulation_steps";

impl Resumed {
    /// Finds and reads the checkpoint that `--resume` names; `None` where the run has not saved any yet.
    ///
    /// # Errors
    /// No checkpoint is undamaged, the named folder is no checkpoint, or the recipe has changed so that the checkpoint
    /// cannot be continued.
    fn find(resume: &Resume, checkpoints: &Checkpoints, recipe: &Recipe) -> Result<Option<Self>, Failure> {
        let (checkpoint, damaged) = match resume {
            Resume::Checkpoint(path) => {
                let found = checkpoint::verify(path).map_err(|error| with_other_checkpoint(&error, path, checkpoints));
                found.map(|()| (path.clone(), Vec::new()))?
            }
            Resume::Latest => {
                let found = checkpoints.newest_good().map_err(Failure::running)?;
                let damaged: Vec<String> = found.damaged.iter().map(ToString::to_string).collect();
                match found.checkpoint {
                    Some(path) => (path, damaged),
                    None if damaged.is_empty() => return Ok(None),
                    None => return Err(none_is_good(damaged, checkpoints)),
                }
            }
        };
        let mut state: TrainerState = checkpoint::load_state(&checkpoint).map_err(Failure::input)?;
        let earlier = checkpoint::load_recipe(&checkpoint);
        let checkpointing = earlier.as_deref().and_then(|earlier| kept_checkpointing(earlier, recipe));
        let mut now = recipe.clone();
        now.train.gradient_checkpointing = checkpointing.unwrap_or(recipe.train.gradient_checkpointing);
        let started = checkpoint.ancestors().find_map(started_in).unwrap_or_default();
        let changes = earlier.as_ref().map(|earlier| changes(earlier, &started, &now.to_toml())).unwrap_or_default();
        let is_sound = |path: &Path| {
            let found = checkpoint::load_state::<TrainerState>(path);
            found.is_ok_and(|found| found.trouble.is_none() && found.step <= state.step)
        };
        let sound = checkpoints.newest_that(is_sound).map_err(Failure::running)?;
        // Answers in use were written and weighed as the recipe was.
        let weighs = |change: &Change| change.key.starts_with("objective.") || change.key == ACCUMULATION;
        if changes.iter().any(weighs) {
            state.round = None;
        }
        let resumed = Self { checkpoint, state, changes, checkpointing, earlier, damaged, sound };
        resumed.refuse_unsound_changes()?;
        Ok(Some(resumed))
    }

    /// Checks that the checkpoint still fits the recipe.
    fn refuse_unsound_changes(&self) -> Result<(), Failure> {
        let is_between_epochs = self.state.cursor.batch == 0;
        let shown = self.checkpoint.display();
        let problem = |change: &Change| {
            let (why, hint) = match change.effect_on_adapter() {
                Effect::OtherAdapter => (
                    "its adapter is of that shape and of that model",
                    "undo the change, or start a new run with another `output_dir`",
                ),
                Effect::OtherStates => (
                    "its optimizer's states are others",
                    "undo the change, or start a new run from its adapter with `lora.start_from`",
                ),
                Effect::OtherRows if !is_between_epochs => (
                    "it lies within an epoch, and its place in the rows would not be the same",
                    "undo the change, or resume from a checkpoint between two epochs",
                ),
                _ => return None,
            };
            let Change { key, before, after, .. } = change;
            let message = format!("--resume: `{key}` was {before} for checkpoint {shown}, and is {after} now: {why}");
            Some(Problem::new(message).hint(hint))
        };
        let problems: Vec<Problem> = self.changes.iter().filter_map(problem).collect();
        if problems.is_empty() { Ok(()) } else { Err(Failure::Input(Problems(problems))) }
    }

    /// Loads the checkpoint's adapters and moments into a step. `order` is the row order of the current recipe.
    ///
    /// # Errors
    /// A checkpoint that is damaged, that belongs to other adapters, or that is within an epoch of other data.
    pub(super) fn restore(&self, step: &mut TrainStep, adapters: AdapterSet, order: &RowOrder) -> Result<(), Failure> {
        let shown = self.checkpoint.display();
        let state = &self.state;
        if state.order != *order && state.cursor.batch != 0 {
            return Err(Failure::input(format!(
                "checkpoint {shown}: it lies within an epoch of {}, and the recipe has {order}\n  hint: keep `seed`, \
                 `train.micro_batch_size` and the data as they were; between two epochs they can be changed",
                state.order
            )));
        }
        let moments = checkpoint::load_moments(&self.checkpoint).map_err(Failure::running)?;
        let saved = StepState { moments, counters: state.counters };
        step.restore(adapters, &saved).map_err(|error| Failure::input(format!("checkpoint {shown}: {error}")))
    }

    /// Checks that steps are left, once the total is known.
    pub(super) fn refuse_if_done(&self, resume: &Resume, dir: &RunDir, total_steps: u64) -> Result<(), Failure> {
        let Some(finished) = dir.finished() else { return Ok(()) };
        let step = if *resume == Resume::Latest { self.state.step.max(finished.steps) } else { self.state.step };
        if step < total_steps { Ok(()) } else { Err(nothing_left(dir, &finished, true)) }
    }

    /// Reports where training continues and what has changed, and renames later checkpoints of this run.
    pub(super) fn report(
        &self,
        inputs: &Inputs,
        checkpoints: &Checkpoints,
        output_dir: &Path,
        sinks: &mut Sinks,
    ) -> Result<(), Failure> {
        for damaged in &self.damaged {
            sinks.warn(&format!("{damaged}\n  hint: the one before it is taken; the steps since are made again"));
        }
        sinks.note(&format!("resuming after step {} from {}", self.state.step, self.checkpoint.display()));
        if let Some(trouble) = &self.state.trouble {
            let instead = match &self.sound {
                Some(path) => {
                    format!("\n  hint: {} was saved before that: `--resume {0}` continues from it", path.display())
                }
                None => String::new(),
            };
            sinks.warn(&format!("this checkpoint was saved while {trouble}{instead}"));
        }
        if let Some(warning) = inputs.warning_since(&self.state.inputs) {
            sinks.warn(&format!("{warning}; this holds for the steps from here on"));
        }
        for change in &self.changes {
            let text = format!("the recipe has changed: {change}");
            match change.effect {
                Effect::None => sinks.note(&text),
                _ => sinks.warn(&format!("{text}; this holds for the steps from here on")),
            }
        }
        if self.is_within(output_dir) {
            for path in checkpoints.set_aside_after(self.state.step).map_err(Failure::running)? {
                sinks.note(&format!("a later checkpoint was renamed to {}", path.display()));
            }
        }
        Ok(())
    }

    /// A warning where the learning rate jumps up from the checkpoint on, as the schedule is another one now.
    pub(super) fn jump(&self, schedule: &Schedule, data: &Dataset) -> Option<String> {
        let text = self.earlier.as_deref().filter(|_| !self.changes.is_empty())?;
        let earlier = Recipe::parse(Path::new(RESOLVED_FILE), text, &[], Purpose::Resuming).ok()?;
        let steps = total_steps(&earlier, data);
        let step = self.state.step;
        let before = Schedule::new(&earlier.scheduler, earlier.optimizer.learning_rate, steps).learning_rate(step);
        let now = schedule.learning_rate(step + 1);
        let text = || {
            format!(
                "the learning rate goes up from {before:.1e} to {now:.1e} here: the schedule is that of {} steps now, and \
                 was of {steps}\n  hint: `--set scheduler.lr_scheduler=constant` and a low `optimizer.learning_rate` go on \
                 without that",
                schedule.total_steps()
            )
        };
        (step > 0 && now > JUMP * before).then(text)
    }

    /// Whether the checkpoint belongs to this run.
    fn is_within(&self, output_dir: &Path) -> bool {
        match (self.checkpoint.canonicalize(), output_dir.canonicalize()) {
            (Ok(checkpoint), Ok(output_dir)) => checkpoint.starts_with(output_dir),
            _ => false,
        }
    }
}

/// Locks `output_dir` if it exists and this process `writes` to it, and finds the checkpoint that `--resume` names.
///
/// # Errors
/// Another run in the folder, also a finished one; files of others that would be replaced; errors of [`Resumed::find`].
pub(super) fn open_folder(
    args: &TrainArgs,
    recipe: &Recipe,
    writes: bool,
) -> Result<(Option<RunDir>, Option<Resumed>), Failure> {
    let dir = if writes { RunDir::open(&recipe.output_dir)? } else { None };
    let Some(resume) = &args.resume else {
        if let Some(dir) = &dir {
            if args.overwrite { dir.refuse_foreign(true) } else { dir.refuse_other_runs() }?;
        }
        return Ok((dir, None));
    };
    let checkpoints = Checkpoints::new(&recipe.output_dir, &recipe.checkpoint);
    let resumed = Resumed::find(resume, &checkpoints, recipe)?;
    if let Some(dir) = &dir {
        refuse_finished(resume, resumed.as_ref(), dir, &recipe.to_toml())?;
        if resumed.is_none() {
            dir.refuse_other_runs()?;
        }
    }
    Ok((dir, resumed))
}

/// The value of `train.gradient_checkpointing` in an earlier recipe, where this one leaves it to "auto".
fn kept_checkpointing(earlier: &str, recipe: &Recipe) -> Option<GradientCheckpointing> {
    let earlier: toml::Table = earlier.parse().ok()?;
    let value = earlier.get("train")?.get("gradient_checkpointing")?;
    let kept = match value.as_str() {
        Some("offload") => GradientCheckpointing::Offload,
        Some(text) => GradientCheckpointing::some_blocks(text)?,
        None => value.as_bool()?.into(),
    };
    (recipe.train.gradient_checkpointing == GradientCheckpointing::Auto).then_some(kept)
}

/// Refuses to resume a finished run, as far as this is known before anything large is read: `--resume` continues at its
/// end, and `recipe` asks for no more steps than the run took.
fn refuse_finished(resume: &Resume, resumed: Option<&Resumed>, dir: &RunDir, recipe: &str) -> Result<(), Failure> {
    let Some(finished) = dir.finished() else { return Ok(()) };
    let is_at_its_end = match resume {
        Resume::Latest => true,
        Resume::Checkpoint(_) => resumed.is_some_and(|resumed| resumed.state.step >= finished.steps),
    };
    let started = started_in(dir.path()).unwrap_or_default();
    let changed = changes(&dir.recipe(), &started, recipe);
    let may_add_steps = resumed.is_some() && changed.iter().any(Change::may_add_steps);
    if is_at_its_end && !may_add_steps { Err(nothing_left(dir, &finished, resumed.is_some())) } else { Ok(()) }
}

fn nothing_left(dir: &RunDir, finished: &Finished, has_checkpoint: bool) -> Failure {
    let (folder, adapter) = (dir.path().display(), dir.adapter());
    let Finished { steps, outcome } = finished;
    let left = if has_checkpoint { "nothing is left to do" } else { "its checkpoints are gone" };
    let problem = Problem::new(format!(
        "--resume: the run in {folder} has {} after {steps} steps, {left}; its adapter is in {}",
        outcome.name(),
        adapter.display()
    ));
    let hint = if has_checkpoint {
        "to train on, raise `train.max_steps` or `train.num_epochs`; for a new run, choose another folder with `--set \
         output_dir=...`, or delete this one"
            .to_owned()
    } else {
        from_adapter(dir.path(), dir.path())
    };
    problem.hint(hint).into()
}

/// How to train on from the adapter of the run in `run`, which is in `folder`.
fn from_adapter(run: &Path, folder: &Path) -> String {
    let free = free_name(&run.display().to_string());
    let set = [format!("lora.start_from={}", folder.display()), format!("output_dir={free}")].map(|set| quoted(&set));
    format!(
        "in place of --resume, `--set {}` trains on from its adapter, with a fresh optimizer, in a new folder",
        set.join(" --set ")
    )
}

/// The same for a run without a whole checkpoint; `None` where there is no adapter beside `checkpoints`.
fn from_adapter_beside(checkpoints: &Checkpoints) -> Option<String> {
    let run = checkpoints.folder().parent()?;
    if is_adapter(&run.join("adapter")) {
        return Some(from_adapter(run, run));
    }
    let best = run.join(BEST_ADAPTER);
    is_adapter(&best).then(|| from_adapter(run, &best))
}

/// The error when all checkpoints are damaged.
fn none_is_good(damaged: Vec<String>, checkpoints: &Checkpoints) -> Failure {
    let mut problems: Vec<Problem> = damaged.into_iter().map(Problem::new).collect();
    let folder = checkpoints.folder().display();
    problems.push(Problem::new(format!("--resume: no checkpoint in {folder} is whole")).hint(
        from_adapter_beside(checkpoints).unwrap_or_else(|| {
            "start a new run with another `output_dir`, or name a checkpoint of another run".to_owned()
        }),
    ));
    Failure::Input(Problems(problems))
}

/// The error for a named checkpoint that cannot be used, with an undamaged checkpoint as a hint.
fn with_other_checkpoint(error: &checkpoint::CheckpointError, named: &Path, checkpoints: &Checkpoints) -> Failure {
    let problem = Problem::new(error.to_string());
    // Search next to the named checkpoint: it may belong to another run.
    let beside = named.parent().filter(|folder| *folder != checkpoints.folder()).map(Checkpoints::of_folder);
    let checkpoints = beside.as_ref().unwrap_or(checkpoints);
    let other = checkpoints.newest_good().ok().and_then(|found| found.checkpoint);
    let whole = other.map(|path| format!("{} is whole", path.display()));
    match whole.or_else(|| from_adapter_beside(checkpoints)) {
        Some(hint) => Failure::from(problem.hint(hint)),
        None => Failure::from(problem),
    }
}
