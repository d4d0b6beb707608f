//! The kinds of change that are tried, and the candidates of each.

use super::settings::Settings;
use super::trial::Figures;
use crate::device::Dtype;
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

    /// Brings to the front what the figures of the recipe as it is ask for: workers where it waits long for data, then the keys
    /// that its own diagnosis names, the worst first. The rest stays in its order. How many axes are at the front.
    pub(super) fn put_promising_first(axes: &mut [Self], figures: &Figures) -> usize {
        let waits =
            (figures.data_wait_share >= LONG_DATA_WAIT).then_some([Self::Workers, Self::Prefetch].map(Self::key));
        let keys: Vec<&str> =
            waits.into_iter().flatten().chain(figures.advised_keys.iter().map(String::as_str)).collect();
        let place = |axis: &Self| keys.iter().position(|key| *key == axis.key()).unwrap_or(usize::MAX);
        axes.sort_by_key(place);
        axes.iter().filter(|axis| place(axis) < usize::MAX).count()
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
    pub(super) fn candidates(
        self,
        base: &Settings,
        best: &Settings,
        figures: &Figures,
        limits: &Limits,
    ) -> Vec<Settings> {
        let with = |change: &dyn Fn(&mut Settings)| {
            let mut settings = best.clone();
            change(&mut settings);
            settings
        };
        match self {
            Self::Checkpointing => {
                let mut all = vec![GradientCheckpointing::Off, GradientCheckpointing::On];
                all.extend(limits.is_gpu.then_some(GradientCheckpointing::Offload));
                all.retain(|checkpointing| *checkpointing != best.gradient_checkpointing);
                all.into_iter().map(|value| with(&|settings| settings.gradient_checkpointing = value)).collect()
            }
            Self::MicroBatch => {
                let rows = best.rows_of_step();
                // The neighbours; far ones follow only from a better neighbour.
                let below = (1..best.micro_batch_size).rev().find(|size| rows.is_multiple_of(*size));
                let near = [larger_micro_batch(best), below].into_iter().flatten();
                near.map(|size| {
                    with(&|settings| {
                        settings.micro_batch_size = size;
                        settings.gradient_accumulation_steps = rows / size;
                    })
                })
                .collect()
            }
            Self::Rows => {
                let is_small = 2 * best.micro_batch_size <= MAX_ROWS;
                let leaves_updates = figures.steps_of_epoch >= 2.0 * MIN_STEPS_OF_EPOCH;
                let is_tried = is_small && leaves_updates && larger_micro_batch(best).is_none();
                is_tried.then(|| with(&|settings| settings.micro_batch_size *= 2)).into_iter().collect()
            }
            Self::LossChunk => {
                let targets = figures.target_tokens_per_second * figures.step_seconds;
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tokens of a step")]
                let targets = targets.ceil() as usize / best.gradient_accumulation_steps.max(1);
                let [most, of_recipe] =
                    [best, base].map(|settings| settings.loss_chunk().most_tokens(limits.vocab_size));
                // Fewer passes over the head, where there is more than one; or logits that stay in a cache. What was better
                // in one direction is not left in the other: there lies the size that it has beaten.
                let more = (most < targets && most >= of_recipe).then_some(LOSS_CHUNK_FACTOR * most);
                let fewer = Some(most.min(targets) / LOSS_CHUNK_FACTOR);
                let fewer = fewer.filter(|tokens| *tokens >= MIN_LOSS_CHUNK && most <= of_recipe);
                let tried = more.into_iter().chain(fewer);
                tried.map(|tokens| with(&|settings| settings.loss_chunk_tokens = Some(tokens))).collect()
            }
            Self::Workers | Self::Prefetch if figures.data_wait_share < DATA_WAIT => Vec::new(),
            Self::Workers => {
                let more = [2 * best.num_workers, 4 * best.num_workers];
                let more = more.into_iter().filter(|workers| *workers <= limits.threads.max(2));
                more.map(|workers| with(&|settings| settings.num_workers = workers)).collect()
            }
            Self::Prefetch => {
                let batches = PREFETCH_FACTOR * best.prefetch_batches;
                let is_tried = batches <= MAX_PREFETCH;
                is_tried.then(|| with(&|settings| settings.prefetch_batches = batches)).into_iter().collect()
            }
            Self::Precision if limits.has_bf16 && best.precision == Dtype::F32 => {
                // The base stays as it is stored, which is what the recipe's precision says where it says nothing else.
                let storage = best.storage.or(Some(best.precision));
                vec![with(&|settings| (settings.precision, settings.storage) = (Dtype::Bf16, storage))]
            }
            Self::Storage if limits.has_bf16 && best.storage.unwrap_or(best.precision) == Dtype::F32 => {
                vec![with(&|settings| settings.storage = Some(Dtype::Bf16))]
            }
            Self::Packing if !best.packing => vec![with(&|settings| settings.packing = true)],
            _ => Vec::new(),
        }
    }

    /// Whether a better value asks for the next one.
    pub(super) fn goes_on(self) -> bool {
        matches!(self, Self::MicroBatch | Self::LossChunk | Self::Prefetch | Self::Rows)
    }
}

/// The next larger micro-batch that divides the rows of a step.
fn larger_micro_batch(settings: &Settings) -> Option<usize> {
    let rows = settings.rows_of_step();
    (settings.micro_batch_size + 1..=rows.min(MAX_ROWS)).find(|size| rows.is_multiple_of(*size))
}
