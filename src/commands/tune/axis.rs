//! The kinds of change that are tried, and the candidates of each.

use super::settings::rows_of_step;
use super::trial::Figures;
use crate::device::Dtype;
use crate::recipe::Recipe;
use crate::train::config::GradientCheckpointing;

/// Data wait below this share of a step is not worth another worker.
const DATA_WAIT: f64 = 0.02;
/// Data wait from this share of a step on is what to mend first.
const LONG_DATA_WAIT: f64 = 0.1;
/// The most rows of a micro-batch that are tried.
const MAX_ROWS: usize = 256;
/// An epoch of fewer updates than these is not made by more rows in each.
const MIN_STEPS_OF_EPOCH: f64 = 4.0;
/// By how much the queue of batches is made longer.
const PREFETCH_FACTOR: usize = 4;
/// The most batches made ahead that are tried.
const MAX_PREFETCH: usize = 256;
/// By how much the next chunk of the loss is larger or smaller.
const LOSS_CHUNK_FACTOR: usize = 4;
/// The least target tokens of a chunk that are tried: fewer make the product with the head one of vectors.
const MIN_LOSS_CHUNK: usize = 32;

/// What the machine allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) threads: usize,
    pub(super) is_gpu: bool,
    pub(super) has_bf16: bool,
    /// Logits of a target token.
    pub(super) vocab_size: usize,
}

/// A kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    /// What is kept for the backward.
    Checkpointing,
    /// How a step's rows are divided into micro-batches.
    MicroBatch,
    /// Target tokens whose logits exist at a time.
    LossChunk,
    /// Threads that make batches.
    Workers,
    /// Batches made ahead.
    Prefetch,
    /// Precision of activations and products.
    Precision,
    /// Storage of the base.
    Storage,
    /// Several rows in one sequence.
    Packing,
    /// Rows of an update, where dividing them otherwise makes no larger micro-batch.
    Rows,
}

impl Axis {
    /// All of them, what mostly pays first, or those that keep the numbers only. The chunk of the loss comes last, since it
    /// is to fit the targets of a micro-batch; more rows follow on the division of those that there are, and what the base is
    /// stored in follows on the precision.
    pub(super) fn all(keep_numbers: bool) -> Vec<Self> {
        let mut axes = vec![
            Self::Checkpointing,
            Self::MicroBatch,
            Self::Workers,
            Self::Prefetch,
            Self::Precision,
            Self::Packing,
            Self::Rows,
            Self::Storage,
            Self::LossChunk,
        ];
        axes.retain(|axis| !(keep_numbers && axis.changes_numbers()));
        axes
    }

    fn changes_numbers(self) -> bool {
        matches!(self, Self::Precision | Self::Packing | Self::Rows | Self::Storage)
    }

    /// Brings to the front what the figures of the recipe as it is ask for: workers where it waits long for data, then the
    /// keys that its own diagnosis names, the worst first. The rest stays in its order.
    pub(super) fn put_promising_first(axes: &mut [Self], figures: &Figures) {
        let mut keys: Vec<&str> = Vec::new();
        if figures.speed.data_wait_share >= LONG_DATA_WAIT {
            keys.extend([Self::Workers, Self::Prefetch].map(Self::key));
        }
        keys.extend(figures.advised_keys.iter().map(String::as_str));
        axes.sort_by_key(|axis| keys.iter().position(|key| *key == axis.key()).unwrap_or(usize::MAX));
    }

    /// The recipe's key.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Checkpointing => "train.gradient_checkpointing",
            Self::MicroBatch | Self::Rows => "train.micro_batch_size",
            Self::LossChunk => "train.loss_chunk_tokens",
            Self::Workers => "data.num_workers",
            Self::Prefetch => "data.prefetch_batches",
            Self::Precision => "train.precision",
            Self::Storage => "model.dtype",
            Self::Packing => "data.packing",
        }
    }

    /// The changes of this kind to `best`, whose figures are given, in a search that began with `base`.
    pub(super) fn candidates(self, base: &Recipe, best: &Recipe, figures: &Figures, limits: &Limits) -> Vec<Recipe> {
        let with = |change: &dyn Fn(&mut Recipe)| {
            let mut recipe = best.clone();
            change(&mut recipe);
            recipe
        };
        let rows = best.train.micro_batch_size;
        match self {
            Self::Checkpointing => {
                let mut all = vec![GradientCheckpointing::Off, GradientCheckpointing::On];
                all.extend(limits.is_gpu.then_some(GradientCheckpointing::Offload));
                all.retain(|checkpointing| *checkpointing != best.train.gradient_checkpointing);
                all.into_iter().map(|value| with(&|recipe| recipe.train.gradient_checkpointing = value)).collect()
            }
            Self::MicroBatch => {
                let of_step = rows_of_step(best);
                // The neighbours; far ones follow only from a better neighbour.
                let below = (1..rows).rev().find(|size| of_step.is_multiple_of(*size));
                let near = [larger_micro_batch(best), below].into_iter().flatten();
                near.map(|size| {
                    with(&|recipe| {
                        recipe.train.micro_batch_size = size;
                        recipe.train.gradient_accumulation_steps = of_step / size;
                    })
                })
                .collect()
            }
            Self::Rows => {
                let leaves_updates = figures.speed.steps_of_epoch >= 2.0 * MIN_STEPS_OF_EPOCH;
                let is_tried = 2 * rows <= MAX_ROWS && leaves_updates && larger_micro_batch(best).is_none();
                is_tried.then(|| with(&|recipe| recipe.train.micro_batch_size *= 2)).into_iter().collect()
            }
            Self::LossChunk => {
                let targets = figures.speed.target_tokens_per_second * figures.speed.step_seconds;
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tokens of a step")]
                let targets = targets.ceil() as usize / best.train.gradient_accumulation_steps.max(1);
                let [most, of_recipe] =
                    [best, base].map(|recipe| recipe.train.loss_chunk().most_tokens(limits.vocab_size));
                // Fewer passes over the head, where there is more than one; or logits that stay in a cache. Once one
                // direction was better, the other is not tried: the size there has lost already.
                let more = (most < targets && most >= of_recipe).then_some(LOSS_CHUNK_FACTOR * most);
                let fewer = Some(most.min(targets) / LOSS_CHUNK_FACTOR);
                let fewer = fewer.filter(|tokens| *tokens >= MIN_LOSS_CHUNK && most <= of_recipe);
                let tried = more.into_iter().chain(fewer);
                tried.map(|tokens| with(&|recipe| recipe.train.loss_chunk_tokens = Some(tokens))).collect()
            }
            Self::Workers | Self::Prefetch if figures.speed.data_wait_share < DATA_WAIT => Vec::new(),
            Self::Workers => {
                let more = [2 * best.data.num_workers, 4 * best.data.num_workers];
                let more = more.into_iter().filter(|workers| *workers <= limits.threads.max(2));
                more.map(|workers| with(&|recipe| recipe.data.num_workers = workers)).collect()
            }
            Self::Prefetch => {
                let batches = PREFETCH_FACTOR * best.data.prefetch_batches;
                let is_tried = batches <= MAX_PREFETCH;
                is_tried.then(|| with(&|recipe| recipe.data.prefetch_batches = batches)).into_iter().collect()
            }
            Self::Precision if limits.has_bf16 && best.train.precision == Dtype::F32 => vec![with(&|recipe| {
                // The base stays as it is stored, which is what the recipe's precision says where it says nothing else.
                recipe.model.dtype = best.model.dtype.or(Some(best.train.precision));
                recipe.train.precision = Dtype::Bf16;
            })],
            Self::Storage if limits.has_bf16 && best.model.dtype.unwrap_or(best.train.precision) == Dtype::F32 => {
                vec![with(&|recipe| recipe.model.dtype = Some(Dtype::Bf16))]
            }
            Self::Packing if !best.data.packing => vec![with(&|recipe| recipe.data.packing = true)],
            _ => Vec::new(),
        }
    }

    /// Whether a better value asks for the next one.
    pub(super) fn goes_on(self) -> bool {
        matches!(self, Self::MicroBatch | Self::LossChunk | Self::Prefetch | Self::Rows)
    }
}

/// The next larger micro-batch that divides the rows of a step.
fn larger_micro_batch(recipe: &Recipe) -> Option<usize> {
    let rows = rows_of_step(recipe);
    (recipe.train.micro_batch_size + 1..=rows.min(MAX_ROWS)).find(|size| rows.is_multiple_of(*size))
}
