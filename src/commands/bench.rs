//! `lora-train bench`: how fast a recipe trains on this machine.

use std::time::Instant;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::{print, say};
use crate::data::batch::{Batch, Document, Target};
use crate::device::OpenDevice;
use crate::failure::Failure;
use crate::ops::peak::gemm_peak_flops;
use crate::ops::profile::{self, Row};
use crate::recipe::{Purpose, Recipe, RecipeArgs};
use crate::run::Prepared;
use crate::run::inputs::{WeightsFrom, nvml_selector};
use crate::stats::median;
use crate::telemetry::{Telemetry, peak_host_memory_bytes};
use crate::train::config::GradientCheckpointing;
use crate::train::flops::StepFlops;
use crate::train::step::TrainStep;

/// Measured steps where the recipe has no `train.max_steps`.
const DEFAULT_NUM_STEPS: u64 = 10;

/// Arguments of `lora-train bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Steps before those that are measured: they compile kernels and touch memory for the first time
    #[arg(long, value_name = "STEPS", default_value_t = 2)]
    pub(crate) warmup: u64,

    /// After the measured steps, runs two more and prints where their time went, operation by operation
    #[arg(long)]
    pub(crate) profile: bool,
}

/// The last line of stdout.
#[derive(Clone, Debug, Serialize)]
struct BenchReport {
    /// Tokens of a step over its median time.
    tokens_per_second: f64,
    /// Median time of a step.
    step_seconds: f64,
    /// Time from the start of the process to the end of the first step.
    first_step_seconds: f64,
    /// `gflops / gemm_peak_gflops`.
    #[serde(skip_serializing_if = "Option::is_none")]
    mfu: Option<f64>,
    /// Model FLOPs of a step over its median time, in 10^9 a second.
    gflops: f64,
    /// The fastest matrix product measured on the device, in 10^9 a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    gemm_peak_gflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_host_memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_gpu_memory_bytes: Option<u64>,
    device: String,
    precision: &'static str,
    gradient_checkpointing: GradientCheckpointing,
    measured_steps: usize,
    tokens_per_step: u64,
    trainable_parameters: usize,
    all_parameters: usize,
    /// Loss of the last step: about ln(`vocab_size`) for random weights. A value that is not finite would be a bug.
    loss: f64,
    /// Operations of a step, the longest first; `seconds` are per step.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    profile: Vec<Row>,
}

/// Runs `max_steps` steps on synthetic full-length batches, after some unmeasured ones, and prints the figures.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let process_start = Instant::now();
    let recipe = args.recipe.load(Purpose::Benchmark)?;
    // `max_steps` counts only the measured steps.
    let num_steps = args.warmup + recipe.train.max_steps.unwrap_or(DEFAULT_NUM_STEPS);
    let prepared = Prepared::new(recipe, None, WeightsFrom::Hub, false)?;
    let Prepared { recipe, source, selection, device, .. } = &prepared;
    let telemetry = Telemetry::start(recipe.logging.gpu_sample_ms, nvml_selector(device));
    let model = source.load(recipe.model.dtype, recipe.train.precision, device)?;
    let adapters = source.new_adapters(selection, &recipe.lora, recipe.seed, device);
    let num_trainable = adapters.num_parameters();
    let loraplus_lr_ratio = recipe.lora.loraplus_lr_ratio;
    let mut step = TrainStep::new(model, adapters, &recipe.train, &recipe.optimizer, loraplus_lr_ratio, recipe.seed);

    let mut batches = SyntheticBatches::new(recipe, source.config.vocab_size);
    let flops = StepFlops::new(&source.config, num_trainable);
    let mut first_step_seconds = 0.0;
    let mut step_seconds = Vec::new();
    let (mut tokens_per_step, mut flops_per_step, mut loss) = (0, 0.0, f64::NAN);
    for number in 1..=num_steps {
        let batches: Vec<Batch> = batches.by_ref().take(recipe.train.gradient_accumulation_steps).collect();
        let step_start = Instant::now();
        for batch in &batches {
            step.forward_backward(batch);
        }
        // As in training: the loop waits for a GPU when it reads the step's loss, and a step lasts from one such point
        // to the next.
        let outcome = step.update(recipe.optimizer.learning_rate);
        let seconds = step_start.elapsed().as_secs_f64();
        if number == 1 {
            device.wait();
            first_step_seconds = process_start.elapsed().as_secs_f64();
        }
        if number > args.warmup {
            step_seconds.push(seconds);
        }
        tokens_per_step = batches.iter().map(|batch| batch.num_tokens() as u64).sum();
        flops_per_step = batches.iter().map(|batch| flops.of(batch)).sum();
        loss = outcome.loss;
        let kind = if number > args.warmup { "" } else { " (warm-up)" };
        say(&format!("step {number}/{num_steps}: {seconds:.3} s, loss {loss:.4}{kind}"));
    }

    let measured_steps = step_seconds.len();
    let step_seconds = median(&step_seconds).unwrap_or(f64::NAN);
    // Read before the products below are measured.
    let (peak_host_memory_bytes, peak_gpu_memory_bytes) = (peak_host_memory_bytes(), telemetry.peak_gpu_memory_bytes());
    let peak = gemm_peak_flops(device, recipe.train.precision.dtype());
    let profile = if args.profile { profile_step(&mut step, &mut batches, recipe, device) } else { Vec::new() };
    if args.profile {
        say(&profile_table(&profile, step_seconds));
    }
    let flops_per_second = flops_per_step / step_seconds;
    let report = BenchReport {
        #[allow(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
        tokens_per_second: tokens_per_step as f64 / step_seconds,
        step_seconds,
        first_step_seconds,
        mfu: peak.map(|peak| flops_per_second / peak),
        gflops: flops_per_second / 1e9,
        gemm_peak_gflops: peak.map(|peak| peak / 1e9),
        peak_host_memory_bytes,
        peak_gpu_memory_bytes,
        device: device.label.clone(),
        precision: recipe.train.precision.name(),
        gradient_checkpointing: recipe.train.gradient_checkpointing,
        measured_steps,
        tokens_per_step,
        trainable_parameters: num_trainable,
        all_parameters: source.config.num_parameters() + num_trainable,
        loss,
        profile,
    };
    let json = serde_json::to_string(&report).map_err(Failure::running)?;
    print(&json)
}

/// Steps that are profiled.
const NUM_PROFILED_STEPS: usize = 2;

/// Operations of a step, profiled over a few steps that wait for the device after each operation.
fn profile_step(
    step: &mut TrainStep,
    batches: &mut SyntheticBatches,
    recipe: &Recipe,
    device: &OpenDevice,
) -> Vec<Row> {
    profile::start(&device.device);
    for _ in 0..NUM_PROFILED_STEPS {
        for batch in batches.by_ref().take(recipe.train.gradient_accumulation_steps) {
            step.forward_backward(&batch);
        }
        step.update(recipe.optimizer.learning_rate);
    }
    let mut rows = profile::finish();
    for row in &mut rows {
        let steps = NUM_PROFILED_STEPS as u64;
        row.calls /= steps;
        #[allow(clippy::cast_precision_loss, reason = "a handful of steps")]
        for amount in [&mut row.seconds, &mut row.flops, &mut row.bytes] {
            *amount /= steps as f64;
        }
    }
    rows
}

/// The rows as a Markdown table. The last row is the remaining time of a step that was not profiled.
fn profile_table(rows: &[Row], step_seconds: f64) -> String {
    let mut table = String::from(
        "| operation | shape | calls | ms | share | GFLOP/s | GB/s |\n|---|---|---:|---:|---:|---:|---:|\n",
    );
    let rate = |amount: f64, seconds: f64| {
        if amount > 0.0 { format!("{:.0}", amount / seconds.max(1e-9) * 1e-9) } else { String::new() }
    };
    for row in rows {
        let Row { operation, shape, calls, seconds, flops, bytes } = row;
        let (milliseconds, share) = (seconds * 1e3, 100.0 * seconds / step_seconds);
        let (flops, bytes) = (rate(*flops, *seconds), rate(*bytes, *seconds));
        table +=
            &format!("| {operation} | {shape} | {calls} | {milliseconds:.1} | {share:.1} % | {flops} | {bytes} |\n");
    }
    let all: f64 = rows.iter().map(|row| row.seconds).sum();
    let (milliseconds, share) = (all * 1e3, 100.0 * all / step_seconds);
    table + &format!("| all of these | | | {milliseconds:.1} | {share:.1} % of a step that is not profiled | | |")
}

/// Micro-batches of random tokens, every row as long as `data.max_length`, every token predicted.
#[derive(Debug)]
struct SyntheticBatches {
    rng: ChaCha8Rng,
    num_rows: usize,
    row_length: usize,
    vocab_size: u32,
}

impl SyntheticBatches {
    fn new(recipe: &Recipe, vocab_size: usize) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(recipe.seed),
            num_rows: recipe.train.micro_batch_size,
            row_length: recipe.data.max_length,
            vocab_size: u32::try_from(vocab_size).unwrap_or(u32::MAX),
        }
    }
}

impl Iterator for SyntheticBatches {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let Self { num_rows, row_length, vocab_size, .. } = *self;
        let input_ids: Vec<u32> = (0..num_rows * row_length).map(|_| self.rng.random_range(0..vocab_size)).collect();
        let documents = (0..num_rows).map(|row| Document { start: row * row_length, len: row_length }).collect();
        let target = |position: usize| Target { position, token: input_ids[position + 1] };
        // The last token of a row has nothing to predict.
        let is_last = |position: usize| (position + 1).is_multiple_of(row_length);
        let targets = (0..input_ids.len()).filter(|position| !is_last(*position)).map(target).collect();
        let row_lengths = vec![row_length; num_rows];
        Some(Batch { input_ids, row_lengths, documents, targets, sources: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_batches_are_full_and_every_token_but_the_first_of_a_row_is_predicted() {
        let rng = ChaCha8Rng::seed_from_u64(1);
        let mut batches = SyntheticBatches { rng, num_rows: 2, row_length: 3, vocab_size: 50 };
        let batch = batches.next().unwrap();
        assert_eq!((batch.num_rows(), batch.num_tokens(), batch.num_target_tokens()), (2, 6, 4));
        let positions: Vec<usize> = batch.targets.iter().map(|target| target.position).collect();
        assert_eq!(positions, [0, 1, 3, 4]);
        assert!(batch.targets.iter().all(|target| target.token == batch.input_ids[target.position + 1]));
        assert_ne!(batch.input_ids, batches.next().unwrap().input_ids);
    }
}
