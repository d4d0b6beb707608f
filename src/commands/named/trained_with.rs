//! What runs were trained with, for a base that has changed since under its name.

use super::{NamedAdapter, recipe_of};
use crate::commands::say;
use crate::model::weights::Weights;
use crate::save::checkpoint::{Checkpoints, load_state};
use crate::train::state::{Inputs, TrainerState};

/// The inputs of the runs of adapters, where they are known.
#[derive(Clone, Debug, Default)]
pub(crate) struct TrainedWith(Vec<Inputs>);

impl TrainedWith {
    pub(super) fn of(adapters: &[NamedAdapter]) -> Self {
        Self(adapters.iter().filter_map(inputs).collect())
    }

    /// Warns where the weights are no longer those of a run.
    pub(crate) fn warn_if_changed(&self, weights: &Weights) {
        let now = Inputs { weights: weights.digest().map(Inputs::hexadecimal), ..Inputs::default() };
        if let Some(warning) = self.0.iter().find_map(|earlier| now.warning_since(earlier)) {
            say(&format!("warning: {warning}\n  hint: an adapter belongs to the weights that it was trained on"));
        }
    }
}

/// The inputs at the checkpoint that is the adapter, or at the newest one of its run.
fn inputs(adapter: &NamedAdapter) -> Option<Inputs> {
    let run = recipe_of(&adapter.folder)?.parent()?.to_owned();
    let newest = || Some(Checkpoints::of_folder(&run.join("checkpoints")).list().ok()?.pop()?.1);
    let state: TrainerState = load_state(&run).ok().or_else(|| load_state(&newest()?).ok())?;
    Some(state.inputs)
}
