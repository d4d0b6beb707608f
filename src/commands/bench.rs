//! `lora-train bench`: how fast a recipe trains on this machine.

mod report;

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{number, print_figures, say};
use crate::config::RowKind;
use crate::data::batch::{Answer, Batch, Document, Target};
use crate::device::OpenDevice;
use crate::measure::telemetry::{Telemetry, peak_host_memory_bytes};
use crate::ops::peak::gemm_peak_flops;
use crate::ops::profile::{self, ProfileRow};
use crate::recipe::{Purpose, Recipe, RecipeArgs};
use crate::run::Prepared;
use crate::run::inputs::{WeightsFrom, nvml_selector};
use crate::run::shipping::not_measured;
use crate::train::step::TrainStep;
use crate::util::failure::Failure;
use crate::util::stats::{as_u64, median};
use crate::util::terminal;
use report::{BenchReport, Scatter, profile_table};

/// Measured steps where the recipe has no `train.max_steps`.
const DEFAULT_NUM_STEPS: u64 = 10;

/// Time between two lines about the progress, where there is no bar.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Arguments of `lora-train bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Steps before those that are measured: they compile kernels and touch memory for the first time
    #[arg(long, value_name = "STEPS", default_value_t = 2)]
    pub(crate) warmup: u64,

    /// Steps that are measured, instead of `train.max_steps`
    #[arg(long, value_name = "STEPS", conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: Option<u64>,

    /// Measure as many steps as this time holds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) seconds: Option<f64>,

    /// After the measured steps, runs two more and prints where their time went, operation by operation
    #[arg(long)]
    pub(crate) profile: bool,

    /// Write one JSON object also on a terminal
    #[arg(long)]
    pub(crate) json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0, "seconds above 0")
}

/// Runs `max_steps` steps on synthetic full-length batches, after some unmeasured ones, and prints the figures.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let recipe = args.recipe.load(Purpose::Benchmark)?;
    let num_steps = args.steps.or(recipe.train.max_steps).unwrap_or(DEFAULT_NUM_STEPS);
    let prepared = Prepared::new(recipe, None, WeightsFrom::Hub, false)?;
    let Prepared { recipe, source, device, memory, .. } = &prepared;
    not_measured(recipe).iter().for_each(|note| say(note));
    let telemetry = Telemetry::start(recipe.logging.gpu_sample_ms, nvml_selector(device));
    let model = prepared.load_model()?;
    let mut adapters = prepared.unstarted_adapters();
    model.start_magnitudes(&mut adapters.trained);
    let mut step = prepared.step(model, adapters);

    let mut batches = SyntheticBatches::new(recipe, source.config.vocab_size);
    let progress = BenchProgress::new(args, num_steps);
    let measured = measure(&prepared, &mut step, &mut batches, (start, args.warmup), progress);
    let Measured { first_step_seconds, step_seconds, tokens_per_step, flops_per_step, loss } = measured;

    let measured_steps = step_seconds.len();
    let scatter = Scatter::of(&step_seconds);
    let step_seconds = median(&step_seconds).unwrap_or(f64::NAN);
    // Read before the products below are measured.
    let (peak_host_memory_bytes, peak_gpu_memory_bytes) = (peak_host_memory_bytes(), telemetry.peak_gpu_memory_bytes());
    let profile = if args.profile { profile_step(&mut step, &mut batches, recipe, device) } else { Vec::new() };
    // The products' memory is not to come on top of the model's.
    drop(step);
    let peak = gemm_peak_flops(device, recipe.train.precision.dtype());
    let flops_per_second = flops_per_step / step_seconds;
    let report = BenchReport {
        #[allow(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
        tokens_per_second: tokens_per_step as f64 / step_seconds,
        step_seconds,
        scatter,
        first_step_seconds,
        mfu: peak.map(|peak| flops_per_second / peak),
        gflops: flops_per_second / 1e9,
        gemm_peak_gflops: peak.map(|peak| peak / 1e9),
        peak_host_memory_bytes,
        peak_gpu_memory_bytes,
        planned_peak_bytes: memory.plan.steps_bytes() as u64,
        device: device.label.clone(),
        precision: recipe.train.precision.name(),
        gradient_checkpointing: recipe.train.gradient_checkpointing,
        measured_steps,
        tokens_per_step,
        trainable_parameters: prepared.num_trainable(),
        all_parameters: prepared.num_parameters(),
        loss,
        profile,
    };
    if args.profile {
        say(&profile_table(&report.profile, step_seconds));
    }
    print_figures(&report, args.json, &report.text())
}

/// What the steps took.
struct Measured {
    /// From the start of the program to the end of the first step.
    first_step_seconds: f64,
    /// Of each step after the warm-up.
    step_seconds: Vec<f64>,
    tokens_per_step: u64,
    flops_per_step: f64,
    /// Of the last step.
    loss: f64,
}

/// Makes steps and measures them. `start` is that of the program, and the first `warmup` steps are not counted.
fn measure(
    prepared: &Prepared,
    step: &mut TrainStep,
    batches: &mut SyntheticBatches,
    (start, warmup): (Instant, u64),
    mut progress: BenchProgress,
) -> Measured {
    let (recipe, flops) = (&prepared.recipe, prepared.flops(step.model()));
    let mut measured = Measured {
        first_step_seconds: 0.0,
        step_seconds: Vec::new(),
        tokens_per_step: 0,
        flops_per_step: 0.0,
        loss: f64::NAN,
    };
    let mut number = 0;
    while number < warmup || !progress.is_done(&measured.step_seconds) {
        number += 1;
        let batches: Vec<Batch> = batches.by_ref().take(recipe.train.gradient_accumulation_steps).collect();
        let step_start = Instant::now();
        step.accumulate(&batches);
        // As in training: the loop waits for a GPU when it reads the step's loss, and a step lasts from one such point
        // to the next.
        let outcome = step.update(recipe.optimizer.learning_rate);
        let seconds = step_start.elapsed().as_secs_f64();
        if number == 1 {
            prepared.device.wait();
            measured.first_step_seconds = start.elapsed().as_secs_f64();
        }
        if number > warmup {
            measured.step_seconds.push(seconds);
        }
        measured.tokens_per_step = batches.iter().map(|batch| batch.num_tokens() as u64).sum();
        measured.flops_per_step = batches.iter().map(|batch| flops.of(batch)).sum();
        measured.loss = outcome.loss;
        progress.show(&measured.step_seconds);
    }
    progress.bar.finish_and_clear();
    measured
}

/// How far the measurement is.
struct BenchProgress {
    /// Counts steps, or with `--seconds` milliseconds.
    bar: ProgressBar,
    seconds: Option<f64>,
    last_line: Instant,
}

impl BenchProgress {
    fn new(args: &BenchArgs, num_steps: u64) -> Self {
        let bar = terminal::bar(args.seconds.map_or(num_steps, |seconds| as_u64(seconds * 1e3).max(1)));
        if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {percent}% {wide_msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message("warm-up");
        Self { bar, seconds: args.seconds, last_line: Instant::now() }
    }

    fn is_done(&self, step_seconds: &[f64]) -> bool {
        self.position(step_seconds) >= self.bar.length().unwrap_or_default()
    }

    fn position(&self, step_seconds: &[f64]) -> u64 {
        let milliseconds = || as_u64(step_seconds.iter().sum::<f64>() * 1e3);
        self.seconds.map_or(step_seconds.len() as u64, |_| milliseconds())
    }

    fn show(&mut self, step_seconds: &[f64]) {
        let Some(median) = median(step_seconds) else { return };
        let text = format!("{} measured, {median:.3} s a step", step_seconds.len());
        self.bar.set_position(self.position(step_seconds));
        if self.bar.is_hidden() && self.last_line.elapsed() >= LINE_INTERVAL {
            say(&text);
            self.last_line = Instant::now();
        }
        self.bar.set_message(text);
    }
}

const NUM_PROFILED_STEPS: usize = 2;

/// Operations of a step, profiled over a few steps that wait for the device after each operation.
fn profile_step(
    step: &mut TrainStep,
    batches: &mut SyntheticBatches,
    recipe: &Recipe,
    device: &OpenDevice,
) -> Vec<ProfileRow> {
    profile::start(&device.device);
    for _ in 0..NUM_PROFILED_STEPS {
        step.accumulate(&batches.by_ref().take(recipe.train.gradient_accumulation_steps).collect::<Vec<_>>());
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

/// Micro-batches of random tokens, every row as long as `data.max_length`, every token predicted.
#[derive(Debug)]
struct SyntheticBatches {
    rng: ChaCha8Rng,
    num_rows: usize,
    kind: RowKind,
    row_length: usize,
    vocab_size: u32,
}

impl SyntheticBatches {
    fn new(recipe: &Recipe, vocab_size: usize) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(recipe.seed),
            num_rows: recipe.train.micro_batch_size * recipe.objective.num_sequences(),
            kind: recipe.data.row_kind,
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
        let targets = match self.kind {
            RowKind::ScoredPair => (0..input_ids.len())
                .filter(|position| is_last(*position))
                .map(|position| Target { position, token: input_ids[position] })
                .collect(),
            _ => (0..input_ids.len()).filter(|position| !is_last(*position)).map(target).collect(),
        };
        let row_lengths = vec![row_length; num_rows];
        let is_good = |row: usize| row.is_multiple_of(2);
        let answers = (0..num_rows).map(|row| Answer {
            is_good: is_good(row),
            prompt_targets: 0,
            advantage: if is_good(row) { 1.0 } else { -1.0 },
            margin: 0.0,
        });
        let answers = if self.kind == RowKind::Sequence { Vec::new() } else { answers.collect() };
        let mut batch = Batch { input_ids, row_lengths, documents, targets, answers, ..Batch::default() };
        if self.kind == RowKind::Labelled {
            batch.mismatched = Some(Box::new(batch.clone()));
        }
        Some(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_batches_are_full_and_every_token_but_the_first_of_a_row_is_predicted() {
        let rng = ChaCha8Rng::seed_from_u64(1);
        let mut batches = SyntheticBatches { rng, num_rows: 2, kind: RowKind::Sequence, row_length: 3, vocab_size: 50 };
        let batch = batches.next().unwrap();
        assert_eq!((batch.num_rows(), batch.num_tokens(), batch.num_target_tokens()), (2, 6, 4));
        let positions: Vec<usize> = batch.targets.iter().map(|target| target.position).collect();
        assert_eq!(positions, [0, 1, 3, 4]);
        assert!(batch.targets.iter().all(|target| target.token == batch.input_ids[target.position + 1]));
        assert_ne!(batch.input_ids, batches.next().unwrap().input_ids);
    }
}
