//! Going on from a checkpoint.

use std::path::{Path, PathBuf};

use super::{Trainer, TrainerError};
use crate::checkpoint;
use crate::lora::AdapterSet;
use crate::train::state::{RowOrder, TrainerState};
use crate::train::step::{StepState, TrainStep};
use crate::train::totals::RunFigures;

/// Puts the adapters and moments of a checkpoint into a step. `order` is what the recipe's rows are in now. Nothing is
/// written: what does not fit is refused before anything of the run is touched.
///
/// # Errors
///
/// A checkpoint that is damaged, or of other adapters, or in the middle of other data.
pub fn restore_step(
    step: &mut TrainStep,
    checkpoint: &Path,
    state: &TrainerState,
    adapters: AdapterSet,
    order: &RowOrder,
) -> Result<(), TrainerError> {
    let mismatch = |reason: String| TrainerError::Mismatch { path: checkpoint.to_owned(), reason };
    if state.order != *order && state.cursor.batch != 0 {
        return Err(mismatch(format!(
            "it lies within an epoch of {}, and the recipe has {order}\n  hint: keep `seed`, `train.micro_batch_size` and \
             the data as they were; between two epochs they can be changed",
            state.order
        )));
    }
    let saved = StepState { moments: checkpoint::load_moments(checkpoint)?, counters: state.counters };
    step.restore(adapters, &saved).map_err(|error| mismatch(error.to_string()))
}

impl Trainer<'_> {
    /// Goes on where a checkpoint stands whose adapters and moments the step [has](restore_step). `sound_checkpoint` is the
    /// newest one that was saved while nothing was wrong.
    pub fn go_on_from(&mut self, state: TrainerState, sound_checkpoint: Option<PathBuf>) {
        self.earlier = state.totals;
        // Those that ended without a checkpoint are counted too.
        let num_starts = self.plan.earlier_starts;
        self.earlier_figures = RunFigures { num_starts, ..state.totals.figures };
        self.state = TrainerState { order: self.plan.order, inputs: self.plan.inputs.clone(), trouble: None, ..state };
        self.is_saved = true;
        self.sound_checkpoint = sound_checkpoint;
    }
}
