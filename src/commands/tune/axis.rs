//! The kinds of change to try, the candidates of each, and the recipe keys that they change.

use super::trial::Figures;
use crate::config::{GradientCheckpointing, Precision};
use crate::device::{DeviceKind, Dtype};
use crate::ops::place::place_on;
use crate::recipe::Recipe;

/// Below this share of data wait in a step, another worker is not worth it.
const DATA_WAIT: f64 = 0.02;
/// From this share of data wait in a step, it comes first.
const LONG_DATA_WAIT: f64 = 0.1;
/// Most rows of a micro-batch to try.
const MAX_ROWS: usize = 256;
/// Larger updates must leave an epoch at least this many of them.
const MIN_STEPS_OF_EPOCH: f64 = 4.0;
/// Factor by which the queue of batches grows.
const PREFETCH_FACTOR: usize = 4;
/// Most prefetched batches to try.
const MAX_PREFETCH: usize = 256;
/// Factor between one chunk size of the loss and the next.
const LOSS_CHUNK_FACTOR: usize = 4;
/// Fewest target tokens of a chunk to try: with fewer, the product with the head becomes one of vectors.
const MIN_LOSS_CHUNK: usize = 32;

/// Limits of the machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) threads: usize,
    pub(super) kind: DeviceKind,
    /// The type of two bytes that the device multiplies.
    pub(super) two_bytes: Option<Dtype>,
    /// Shape of the head, `[vocab_size, hidden_size]`.
    pub(super) head: [usize; 2],
}

/// A kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    /// What is kept for the backward.
    Checkpointing,
    /// How a step's rows are divided into micro-batches.
    MicroBatch,
    /// Target tokens whose logits exist at the same time.
    LossChunk,
    /// Threads that build batches.
    Workers,
    /// Batches built ahead.
    Prefetch,
    /// Precision of activations and products.
    Precision,
    /// Storage of the base.
    Storage,
    /// Several rows in one sequence.
    Packing,
    /// Rows of an update, where no larger micro-batch divides them.
    Rows,
}

impl Axis {
    /// All axes, or only those that keep the numbers, the most rewarding first. The chunk of the loss comes last,
    /// because it must fit the targets of a micro-batch. More rows come after dividing the existing ones, and storage
    /// of the base after precision.
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

    /// Moves what the original recipe's figures call for to the front: workers where it waits long for data, then the
    /// keys that its own diagnosis names, the worst first. The others keep their order.
    pub(super) fn put_promising_first(axes: &mut [Self], figures: &Figures) {
        let mut keys: Vec<&str> = Vec::new();
        if figures.data_wait_share >= LONG_DATA_WAIT {
            keys.extend([Self::Workers, Self::Prefetch].map(Self::key));
        }
        keys.extend(figures.advised_keys.iter().map(String::as_str));
        axes.sort_by_key(|axis| keys.iter().position(|key| *key == axis.key()).unwrap_or(usize::MAX));
    }

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

    /// The changes of this kind to `best`, which has these figures, in a search that began with `base`.
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
                all.extend(limits.kind.is_gpu().then_some(GradientCheckpointing::Offload));
                all.retain(|checkpointing| *checkpointing != best.train.gradient_checkpointing);
                all.into_iter().map(|value| with(&|recipe| recipe.train.gradient_checkpointing = value)).collect()
            }
            Self::MicroBatch => {
                let of_step = rows_of_step(best);
                // The neighbours; farther values are tried only after a better neighbour.
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
                let leaves_updates = figures.steps_of_epoch >= 2.0 * MIN_STEPS_OF_EPOCH;
                let is_tried = 2 * rows <= MAX_ROWS && leaves_updates && larger_micro_batch(best).is_none();
                is_tried.then(|| with(&|recipe| recipe.train.micro_batch_size *= 2)).into_iter().collect()
            }
            Self::LossChunk => {
                let tried = loss_chunks(base, best, figures, limits);
                tried.map(|tokens| with(&|recipe| recipe.train.loss_chunk_tokens = Some(tokens))).collect()
            }
            Self::Workers | Self::Prefetch if figures.data_wait_share < DATA_WAIT => Vec::new(),
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
            Self::Precision if best.train.precision.dtype() == Dtype::F32 => {
                let to = |dtype| {
                    with(&|recipe| {
                        // Keep the storage of the base, which defaults to the recipe's precision.
                        recipe.model.dtype = best.model.dtype.or(Some(best.train.precision.dtype()));
                        recipe.train.precision = Precision::from(dtype);
                    })
                };
                limits.two_bytes.map(to).into_iter().collect()
            }
            Self::Storage if best.storage(None) == Dtype::F32.into() => {
                limits.two_bytes.map(|dtype| with(&|recipe| recipe.model.dtype = Some(dtype))).into_iter().collect()
            }
            Self::Packing if !best.data.packing => vec![with(&|recipe| recipe.data.packing = true)],
            _ => Vec::new(),
        }
    }

    /// Whether to try the next value after a better one.
    pub(super) fn continues(self) -> bool {
        matches!(self, Self::MicroBatch | Self::LossChunk | Self::Prefetch | Self::Rows)
    }
}

/// The next larger micro-batch that divides the rows of a step.
fn larger_micro_batch(recipe: &Recipe) -> Option<usize> {
    let rows = rows_of_step(recipe);
    (recipe.train.micro_batch_size + 1..=rows.min(MAX_ROWS)).find(|size| rows.is_multiple_of(*size))
}

/// The values of the keys that are searched, in the syntax of `--set`.
fn values(recipe: &Recipe) -> [(&'static str, Option<String>); 9] {
    let Recipe { model, data, train, .. } = recipe;
    [
        ("train.gradient_checkpointing", Some(train.gradient_checkpointing.to_string())),
        ("train.micro_batch_size", Some(train.micro_batch_size.to_string())),
        ("train.gradient_accumulation_steps", Some(train.gradient_accumulation_steps.to_string())),
        ("train.loss_chunk_tokens", train.loss_chunk_tokens.map(|tokens| tokens.to_string())),
        ("data.num_workers", Some(data.num_workers.to_string())),
        ("data.prefetch_batches", Some(data.prefetch_batches.to_string())),
        ("data.packing", Some(data.packing.to_string())),
        ("train.precision", Some(train.precision.to_string())),
        ("model.dtype", model.dtype.map(|dtype| dtype.to_string())),
    ]
}

/// The settings that turn `base` into `recipe`.
pub(super) fn changes(base: &Recipe, recipe: &Recipe) -> Vec<String> {
    let pairs = values(base).into_iter().zip(values(recipe)).filter(|(old, new)| old != new);
    pairs.filter_map(|(_, (key, value))| Some(format!("{key}={}", value?))).collect()
}

pub(super) fn rows_of_step(recipe: &Recipe) -> usize {
    recipe.train.micro_batch_size * recipe.train.gradient_accumulation_steps
}

/// Whether both train on the same rows, with as many rows in an update, in the same arithmetic.
pub(super) fn have_same_numbers(base: &Recipe, recipe: &Recipe) -> bool {
    let numbers = |of: &Recipe| (rows_of_step(of), of.data.packing, of.train.precision, of.model.dtype);
    numbers(base) == numbers(recipe)
}

/// Other numbers of target tokens whose logits exist at a time.
fn loss_chunks(
    base: &Recipe,
    best: &Recipe,
    figures: &Figures,
    limits: &Limits,
) -> impl Iterator<Item = usize> + use<> {
    let targets = figures.target_tokens_per_second * figures.step_seconds;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tokens of a step")]
    let targets = targets.ceil() as usize / best.train.gradient_accumulation_steps.max(1);
    let most = |recipe: &Recipe| recipe.train.loss_chunk().most_tokens(place_on(limits.kind), limits.head);
    let [most, of_recipe] = [best, base].map(most);
    // Fewer passes over the head, where there is more than one; or logits that stay in a cache. Once one direction was
    // better, skip the other: its next size has lost already.
    let more = (most < targets && most >= of_recipe).then_some(LOSS_CHUNK_FACTOR * most);
    let fewer = Some(most.min(targets) / LOSS_CHUNK_FACTOR);
    more.into_iter().chain(fewer.filter(|tokens| *tokens >= MIN_LOSS_CHUNK && most <= of_recipe))
}
