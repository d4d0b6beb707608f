//! The content of a plan: sizes, times, prices.

use serde::Serialize;

use super::images::PlannedImages;
use super::ranks::{Cluster, OneRank, SharedStep};
use super::target::{PlanTarget, Speed};
use crate::config::{CostConfig, FileType, GradientCheckpointing, ObjectiveName, Residency};
use crate::model::Storage;
use crate::recipe::Recipe;
use crate::train::budget::fit::{self, Decision, Suggestion};
use crate::train::budget::forecast::Forecast;
use crate::train::budget::memory::{HostPlan, MemoryPlan};
use crate::train::budget::workload::Workload;
use crate::train::schedule::{repeated, total_steps};
use crate::util::stats::as_f64;

mod table;

pub(super) use table::table;

/// The inputs of a plan.
pub(super) struct Basis<'a> {
    pub(super) recipe: &'a Recipe,
    pub(super) workload: &'a Workload<'a>,
    pub(super) target: &'a PlanTarget,
    pub(super) prices: &'a CostConfig,
    /// What became of `train.gradient_checkpointing` = "auto".
    pub(super) decision: Option<&'a Decision>,
    /// The steps from the training rows; `None` where these cannot be read.
    pub(super) forecast: Option<&'a Forecast>,
    /// Those of the rows, if they have some.
    pub(super) images: Option<PlannedImages>,
    /// Most rows of an epoch, without a forecast; `None` where nobody counted them.
    pub(super) most_rows: Option<usize>,
    /// Measured time of a step on full-length rows.
    pub(super) calibrated: Option<f64>,
    /// Ranks that share the steps; `None` for one.
    pub(super) cluster: Option<Cluster>,
    /// Rate of the disk that holds the model's files, where a step reads them.
    pub(super) disk_bytes_per_second: Option<f64>,
    /// Whether to find the largest micro-batch.
    pub(super) wants_fit: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    /// The part of it that this process can have now, which decides whether the plan fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    free_memory_bytes: Option<u64>,
    gradient_checkpointing: GradientCheckpointing,
    /// Why, where the recipe says "auto".
    #[serde(skip)]
    decision: Option<Decision>,
    #[serde(flatten)]
    plan: MemoryPlan,
    /// The plan with `train.layered_accumulation`, where that brings weights less often.
    #[serde(skip)]
    layered: Option<MemoryPlan>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_bytes_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<Host>,
    /// Absent where the device's memory is not known. With a GPU of this machine, the host's memory must suffice, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<bool>,
    /// Model FLOPs of a token at full length.
    flops_per_token: f64,
    /// Tokens of a step at full length.
    tokens_per_step: usize,
    /// Time of a step at full length.
    #[serde(skip_serializing_if = "Option::is_none")]
    step_seconds: Option<f64>,
    /// The step time was measured instead of estimated.
    is_calibrated: bool,
    /// Absent where the training rows cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<PlannedRows>,
    rows_per_step: usize,
    #[serde(flatten)]
    images: Option<PlannedImages>,
    /// Tokens that every answer is taken to have, where the model writes them; the time that this takes is not in the plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    answer_tokens: Option<usize>,
    /// Steps of the whole run.
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u64>,
    /// Tokens of a step with the actual rows, without padding; at full length where the rows cannot be read.
    mean_step_tokens: f64,
    /// Time of a step with the actual rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_step_seconds: Option<f64>,
    /// The step as ranks share it, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks: Option<SharedStep>,
    /// Tokens of the whole run, without padding.
    #[serde(skip_serializing_if = "Option::is_none")]
    total_tokens: Option<u64>,
    /// Time of all steps and evaluations, without the samples and scores of these.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// Evaluations of the whole run; absent where the rows cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    evaluations: Option<u64>,
    /// The part of the time that is theirs.
    #[serde(skip_serializing_if = "Option::is_none")]
    evaluation_seconds: Option<f64>,
    /// Whether evaluations take more than that, for samples or scores.
    #[serde(skip)]
    writes: bool,
    /// As which the last steps round weights, too.
    #[serde(skip)]
    ship_as: Option<FileType>,
    /// Tokens, time, energy and cost of the run assume rows of full length.
    is_at_most: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    energy_kwh: Option<f64>,
    /// Cost of the hours and, where the device's power is known, of the energy, at the recipe's prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    currency: Option<String>,
    /// Changes to make it fit, or the largest micro-batch, each with its peak.
    suggestions: Vec<Suggestion>,
}

/// Memory of the host when training on a GPU.
#[derive(Clone, Debug, Serialize)]
struct Host {
    #[serde(flatten)]
    plan: HostPlan,
    /// The part of it that this process can have now; absent where the machine is not here.
    #[serde(skip_serializing_if = "Option::is_none")]
    free_memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<bool>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PlannedRows {
    /// Rows visited per epoch.
    per_epoch: usize,
}

impl Report {
    pub(super) fn new(basis: &Basis<'_>) -> Self {
        let Basis { recipe, workload, target, prices, decision, forecast, most_rows, calibrated, .. } = *basis;
        let (plan, layered, host) = (workload.plan(), layered(basis), Host::of(basis));
        let holds = host.as_ref().and_then(|host| host.fits).unwrap_or(true);
        let fits = target.usable_bytes().map(|memory| holds && fit::fits(&plan, memory));
        let full_step = FullStep::of(recipe, workload);
        let FullStep { flops_per_row, tokens_per_step, flops_per_step, recomputation } = full_step;
        // Of a step whose rows need this share of what full rows do. Copies and reading go beside the computation.
        let bringing = seconds_of_bringing(basis, &plan);
        let seconds_of = |share: f64| {
            let estimated =
                || target.speed.map(|speed| full_step.seconds(workload, &speed, share).max(bringing * share));
            calibrated.map(|seconds| seconds * share).or_else(estimated)
        };
        let step_seconds = seconds_of(1.0);

        let rows_per_epoch = forecast.map(|forecast| forecast.rows_per_epoch).or(most_rows);
        let steps = forecast.map(|forecast| forecast.steps).or_else(|| steps_at_most(recipe, most_rows));
        let mean_step_tokens = forecast.map_or(as_f64(tokens_per_step), |forecast| forecast.step_tokens);
        let of_full_step = forecast.map_or(1.0, |forecast| forecast.step_flops / flops_per_step);
        let mean_step_seconds = seconds_of(of_full_step);
        let (num_ranks, num_nodes) = basis.cluster.map_or((1.0, 1.0), |of| (as_f64(of.ranks), as_f64(of.nodes)));
        let ranks = mean_step_seconds.and_then(|seconds| shared(basis, &plan, seconds, mean_step_tokens));
        let mean_step_seconds = ranks.as_ref().map(|step| step.step_seconds).or(mean_step_seconds);
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53 steps")]
        let of_all_steps = |of_step: f64| steps.map(|steps| of_step * steps as f64);
        // Ranks share evaluations, too; a forward is not made again.
        let evaluation_seconds =
            forecast.zip(step_seconds).map(|(Forecast { evaluations: (number, flops), .. }, step)| {
                as_f64(*number) * flops / (flops_per_step * recomputation) * step / num_ranks
            });
        let seconds = mean_step_seconds.and_then(of_all_steps);
        let seconds = seconds.map(|seconds| seconds + evaluation_seconds.unwrap_or(0.0));
        let energy_kwh =
            seconds.zip(target.watts).map(|(seconds, watts)| num_ranks * seconds / 3600.0 * watts / 1000.0);
        let cost = seconds.and_then(|seconds| prices.price(num_nodes * seconds, energy_kwh));
        Self {
            device: target.label.clone(),
            memory_bytes: target.memory_bytes.map(whole),
            free_memory_bytes: target.free_bytes.map(whole),
            gradient_checkpointing: workload.gradient_checkpointing,
            decision: decision.cloned(),
            host,
            fits,
            layered: (bytes_brought(&layered) < bytes_brought(&plan)).then_some(layered),
            disk_bytes_per_second: basis.disk_bytes_per_second,
            plan,
            flops_per_token: flops_per_row / as_f64(recipe.data.max_length.max(1)),
            tokens_per_step,
            step_seconds,
            is_calibrated: calibrated.is_some(),
            rows: rows_per_epoch.map(|per_epoch| PlannedRows { per_epoch }),
            rows_per_step: workload.rows * workload.gradient_accumulation_steps,
            images: basis.images.clone(),
            answer_tokens: (recipe.objective.name == ObjectiveName::Grpo)
                .then_some(recipe.objective.max_completion_length),
            steps,
            mean_step_tokens,
            mean_step_seconds,
            ranks,
            total_tokens: of_all_steps(mean_step_tokens).map(whole),
            seconds,
            evaluations: forecast.map(|forecast| forecast.evaluations.0),
            evaluation_seconds,
            writes: !recipe.eval.generate.is_empty() || recipe.eval.task.metric.is_some(),
            ship_as: recipe.train.ship_as,
            is_at_most: forecast.is_none(),
            energy_kwh,
            cost,
            currency: cost.map(|_| prices.currency.clone()),
            suggestions: suggestions(basis, fits),
        }
    }
}

impl Host {
    fn of(basis: &Basis<'_>) -> Option<Self> {
        let free = basis.target.host_free_bytes;
        let plan = basis.workload.host_plan()?;
        let fits = free.map(|memory| fit::is_room(plan.peak_bytes, memory));
        Some(Self { plan, free_memory_bytes: free.map(whole), fits })
    }
}

/// A step whose rows are all of full length.
pub(super) struct FullStep {
    /// Model FLOPs of a row.
    flops_per_row: f64,
    tokens_per_step: usize,
    /// With those of padding.
    flops_per_step: f64,
    /// What is computed over what counts as model FLOPs.
    recomputation: f64,
}

impl FullStep {
    pub(super) fn of(recipe: &Recipe, workload: &Workload<'_>) -> Self {
        let flops = workload.flops();
        let row_length = recipe.data.max_length;
        let num_sequences = workload.objective.num_sequences();
        let flops_per_row = as_f64(num_sequences) * flops.of_full_row(row_length);
        // Recomputing the forward does not count as model FLOPs, but takes its time.
        let keeps_attention = workload.gradient_checkpointing.keeps_attention();
        let recomputed = flops.of_second_forward(row_length, keeps_attention) / flops.of_full_row(row_length);
        let recomputation = 1.0 + recomputed * workload.share_recomputed();
        // So does a product with a decomposed weight; with dropout, there are three more of them.
        let products = if recipe.lora.lora_dropout > 0.0 { 3.0 } else { 1.0 };
        let computed_per_row = flops_per_row + flops.of_padding(num_sequences * (workload.row_length - row_length));
        Self {
            flops_per_row,
            tokens_per_step: workload.rows * num_sequences * row_length * workload.gradient_accumulation_steps,
            flops_per_step: computed_per_row * as_f64(workload.rows * workload.gradient_accumulation_steps),
            recomputation: recomputation + 0.5 * products * workload.share_decomposed(),
        }
    }

    /// The time on a device of one that needs this share of it.
    pub(super) fn seconds(&self, workload: &Workload<'_>, speed: &Speed, share: f64) -> f64 {
        speed.seconds(workload, self.flops_per_step * self.recomputation, share)
    }
}

/// A step of so many seconds and tokens as the ranks share it, where there are several.
fn shared(basis: &Basis<'_>, plan: &MemoryPlan, seconds: f64, tokens: f64) -> Option<SharedStep> {
    let workload = basis.workload;
    Some(basis.cluster?.share(OneRank {
        seconds,
        rows: workload.rows * workload.gradient_accumulation_steps,
        backwards: workload.gradient_accumulation_steps / workload.layered(),
        tokens,
        gradient_bytes: 4.0 * as_f64(plan.num_trainable),
        of_blocks: plan.num_trainable - workload.selection.num_module_parameters(),
    }))
}

/// Settings with which it fits where it does not, or the largest micro-batch, if that is asked for.
fn suggestions(basis: &Basis<'_>, fits: Option<bool>) -> Vec<Suggestion> {
    let workload = basis.workload;
    match basis.target.memories() {
        Some(memories) if fits == Some(false) => fit::largest_that_fit(workload, memories),
        Some(memories) if basis.wants_fit => {
            // What "auto" became may change with the rows, so it is named.
            let gradient_checkpointing = basis.recipe.train.gradient_checkpointing;
            fit::largest_that_fit(&Workload { gradient_checkpointing, ..workload.clone() }, memories)
        }
        _ => Vec::new(),
    }
}

/// Frozen weights that a step reads from disk, or copies from host memory.
fn bytes_brought(plan: &MemoryPlan) -> Option<usize> {
    plan.read_bytes_per_step.or(plan.moved_bytes_per_step)
}

/// The plan with `train.layered_accumulation`.
fn layered(basis: &Basis<'_>) -> MemoryPlan {
    let mut layered = Workload { layered_accumulation: true, ..basis.workload.clone() };
    if basis.decision.is_some() {
        layered.gradient_checkpointing = Decision::new(&layered, basis.target.usable_bytes()).choice;
    }
    layered.plan()
}

/// Seconds of a step's copies of weights, or of reading them. What memory is left is page cache.
fn seconds_of_bringing(basis: &Basis<'_>, plan: &MemoryPlan) -> f64 {
    let Basis { workload, target, disk_bytes_per_second, .. } = *basis;
    let in_memory = Storage { residency: Residency::Memory, ..workload.storage };
    let in_memory = Workload { storage: in_memory, ..workload.clone() }.plan().peak_bytes;
    let is_cached = target.usable_bytes().is_none_or(|bytes| as_f64(in_memory) <= bytes);
    let reading = if is_cached { None } else { seconds_of_reading(plan, disk_bytes_per_second) };
    plan.seconds_of_copies().or(reading).unwrap_or(0.0)
}

fn seconds_of_reading(plan: &MemoryPlan, disk_bytes_per_second: Option<f64>) -> Option<f64> {
    plan.read_bytes_per_step.zip(disk_bytes_per_second).map(|(bytes, rate)| as_f64(bytes) / rate)
}

/// Steps of a run over so many rows, or as many as the recipe allows; `None` where neither is known.
fn steps_at_most(recipe: &Recipe, rows: Option<usize>) -> Option<u64> {
    let train = &recipe.train;
    let Some(rows) = rows else { return train.max_steps };
    let batches = rows.div_ceil(train.micro_batch_size);
    let batches = repeated(batches, train.gradient_accumulation_steps, recipe.objective.num_iterations);
    Some(total_steps(batches, train.gradient_accumulation_steps, train.num_epochs, train.max_steps))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes and tokens")]
fn whole(count: f64) -> u64 {
    count.round() as u64
}
