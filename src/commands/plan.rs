//! `lora-train plan`: the memory that a recipe will take, component by component, and how long it will run, before
//! any weight is loaded.
//!
//! The table goes to stdout, or one JSON object with `--json`. Memory follows from shapes alone ([`memory`]); time from
//! the step's model FLOPs and a share of the device's rate of matrix products.
//!
//! [`memory`]: crate::train::memory

mod gpus;
mod measured;

use std::io::{self, Write};

use serde::Serialize;

use crate::device::{self, DeviceKind, Dtype, OpenDevice};
use crate::failure::Failure;
use crate::metrics::CostConfig;
use crate::model::{Init, ModelOptions};
use crate::ops::peak::gemm_peak_flops;
use crate::recipe::{Purpose, Recipe, RecipeArgs};
use crate::run::inputs::{self, ModelSource};
use crate::schema::Problem;
use crate::telemetry::total_host_memory_bytes;
use crate::train::config::GradientCheckpointing;
use crate::train::fit::{self, Suggestion, USABLE, size};
use crate::train::flops::StepFlops;
use crate::train::memory::{MemoryPlan, Workload};
use gpus::Gpu;

/// Share of the measured rate of products that a step reaches on the CPU: between 0.57 and 0.74 on the models of
/// `scripts/bench_vs_peft.py`.
const CPU_EFFICIENCY: f64 = 0.6;
/// Share of a GPU's data-sheet rate: what the best published trainers reach on one GPU. Not measured here yet.
const GPU_EFFICIENCY: f64 = 0.4;
const MIB: f64 = 1024.0 * 1024.0;

/// Arguments of `lora-train plan`.
#[derive(Clone, Debug, clap::Args)]
pub struct PlanArgs {
    /// The recipe and changes to it; `--device` can also name a GPU that is not there, such as H100-80GB
    #[command(flatten)]
    pub recipe: RecipeArgs,

    /// Plan for this much memory instead of the device's, in GiB
    #[arg(long, value_name = "GIB", value_parser = positive)]
    pub memory: Option<f64>,

    /// Also find the largest micro-batch that fits, and what makes it fit
    #[arg(long)]
    pub fit: bool,

    /// Take a few steps on synthetic rows of full length for the time of a step, instead of reckoning it
    #[arg(long)]
    pub calibrate: bool,

    /// Price of an hour on the machine, in the recipe's `cost.currency`; goes before its `cost.price_per_hour`
    #[arg(long, value_name = "PRICE", value_parser = positive)]
    pub price_per_hour: Option<f64>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|number: &f64| number.is_finite() && *number > 0.0)
        .ok_or("expected a number above 0".into())
}

/// What the plan is for.
#[derive(Debug)]
struct Target {
    label: String,
    memory_bytes: Option<f64>,
    is_cpu: bool,
    /// It is of this machine.
    is_here: bool,
    /// Rate that a step is reckoned to reach.
    flops_per_second: Option<f64>,
    /// Board power of a GPU.
    watts: Option<f64>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    #[serde(flatten)]
    plan: MemoryPlan,
    /// Absent where the device's memory is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<bool>,
    /// Model FLOPs of a token at full length.
    flops_per_token: f64,
    /// Tokens of a step at full length.
    tokens_per_step: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_seconds: Option<f64>,
    /// Steps were taken for it, instead of reckoning.
    is_calibrated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    energy_kwh: Option<f64>,
    /// Hours and, where the device's power is known, energy, by the recipe's prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    currency: Option<String>,
    /// Changes that make it fit, or the largest micro-batch, each with its peak.
    suggestions: Vec<Suggestion>,
}

/// Plans a recipe and prints the plan.
///
/// # Errors
///
/// Mistakes in the recipe or the model's config; a device that neither is there nor is known.
pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let (target, recipe) = open(args)?;
    let options = ModelOptions { init: Init::Random, ..recipe.model.clone() };
    let source = ModelSource::open(&options, recipe.seed, true)?;
    let selection = source.select(&recipe.lora)?;
    let workload = inputs::workload(&recipe, &source.config, &selection, target.is_cpu);
    let calibrated = match (args.calibrate, target.is_here) {
        (false, _) => None,
        (true, true) => Some(measured::step_seconds(&args.recipe, recipe.scheduler.warmup_steps.is_some())?),
        (true, false) => {
            let problem = Problem::new("--calibrate takes steps, and the device is not there");
            return Err(problem.hint("leave out --calibrate, or --device").into());
        }
    };
    let steps = measured::num_steps(&recipe, &source);
    let prices = prices(args, &recipe);
    let report = report(args, steps, calibrated, &prices, &workload, &target);
    let text = if args.json {
        serde_json::to_string(&report).map_err(Failure::running)?
    } else {
        table(&report, &target, &prices)
    };
    writeln!(io::stdout(), "{text}").map_err(Failure::running)
}

/// The recipe's prices, and what was typed instead.
fn prices(args: &PlanArgs, recipe: &Recipe) -> CostConfig {
    CostConfig { price_per_hour: args.price_per_hour.or(recipe.cost.price_per_hour), ..recipe.cost.clone() }
}

/// The device to plan for, and the recipe without a device that is not there.
fn open(args: &PlanArgs) -> Result<(Target, Recipe), Failure> {
    let memory_bytes = args.memory.map(|gib| gib * 1024.0 * MIB);
    if let Some(gpu) = args.recipe.device.as_deref().and_then(gpus::find) {
        let recipe = RecipeArgs { device: None, ..args.recipe.clone() }.load(Purpose::Benchmark)?;
        return Ok((of_gpu(&gpu, memory_bytes), recipe));
    }
    if let Some(name) = &args.recipe.device
        && name.parse::<device::DeviceName>().is_err()
    {
        let problem = Problem::new(format!("--device {name}: neither a device of this machine nor a known GPU"));
        let hint =
            format!("auto, cpu, cuda, cuda:N, or one of {}; with another, give its memory by --memory", gpus::names());
        return Err(Failure::Input(crate::schema::Problems(vec![problem.hint(hint)])));
    }
    let recipe = args.recipe.load(Purpose::Benchmark)?;
    let device = device::open(&recipe.device.name).map_err(Failure::input)?;
    Ok((of_device(&device, recipe.train.precision, memory_bytes), recipe))
}

fn of_gpu(gpu: &Gpu, memory_bytes: Option<f64>) -> Target {
    #[expect(clippy::cast_precision_loss, reason = "a few hundred thousand MiB")]
    let own = gpu.memory_mib as f64 * MIB;
    Target {
        label: gpu.name.to_owned(),
        memory_bytes: memory_bytes.or(Some(own)),
        is_cpu: false,
        is_here: false,
        flops_per_second: Some(gpu.teraflops * 1e12 * GPU_EFFICIENCY),
        watts: Some(gpu.watts),
    }
}

fn of_device(device: &OpenDevice, precision: Dtype, memory_bytes: Option<f64>) -> Target {
    let is_cpu = device.kind == DeviceKind::Cpu;
    #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
    let own = if is_cpu { total_host_memory_bytes() } else { device.cuda.as_ref().map(|gpu| gpu.memory_bytes) }
        .map(|bytes| bytes as f64);
    let efficiency = if is_cpu { CPU_EFFICIENCY } else { GPU_EFFICIENCY };
    Target {
        label: device.label.clone(),
        memory_bytes: memory_bytes.or(own),
        is_cpu,
        is_here: true,
        flops_per_second: gemm_peak_flops(device, precision).map(|peak| peak * efficiency),
        watts: None,
    }
}

fn report(
    args: &PlanArgs,
    steps: Option<u64>,
    calibrated: Option<f64>,
    prices: &CostConfig,
    workload: &Workload<'_>,
    target: &Target,
) -> Report {
    let plan = workload.plan();
    let does_fit = target.memory_bytes.map(|memory| fit::fits(&plan, memory));
    let flops = StepFlops::new(workload.config, plan.num_trainable);
    let flops_per_row = flops.of_full_row(workload.row_length);
    let tokens_per_step = workload.rows * workload.row_length * workload.gradient_accumulation_steps;
    // The forward that is computed again does not count as model FLOPs, but takes half as long as what does.
    let recomputation = if workload.gradient_checkpointing == GradientCheckpointing::Off { 1.0 } else { 1.5 };
    let rows_per_step = as_f64(workload.rows * workload.gradient_accumulation_steps);
    let reckoned = target.flops_per_second.map(|rate| flops_per_row * rows_per_step * recomputation / rate);
    let step_seconds = calibrated.or(reckoned);
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53 steps")]
    let seconds = step_seconds.zip(steps).map(|(step, steps)| step * steps as f64);
    let energy_kwh = seconds.zip(target.watts).map(|(seconds, watts)| seconds / 3600.0 * watts / 1000.0);
    let cost = seconds.and_then(|seconds| prices.price(seconds, energy_kwh));
    let suggestions = match target.memory_bytes {
        Some(memory) if args.fit || does_fit == Some(false) => fit::largest_that_fit(workload, memory),
        _ => Vec::new(),
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a memory")]
    let memory_bytes = target.memory_bytes.map(|bytes| bytes as u64);
    Report {
        device: target.label.clone(),
        memory_bytes,
        fits: does_fit,
        plan,
        flops_per_token: flops_per_row / as_f64(workload.row_length.max(1)),
        tokens_per_step,
        step_seconds,
        is_calibrated: calibrated.is_some(),
        steps,
        seconds,
        energy_kwh,
        cost,
        currency: cost.map(|_| prices.currency.clone()),
        suggestions,
    }
}

fn table(report: &Report, target: &Target, prices: &CostConfig) -> String {
    let mut lines = vec![format!("device: {}", report.device)];
    for component in &report.plan.components {
        lines.push(format!(
            "  {:<24} {:>10}   {}",
            component.name,
            size(as_f64(component.bytes)),
            component.depends_on
        ));
    }
    let peak = as_f64(report.plan.peak_bytes);
    lines.push(format!("  {:<24} {:>10}   with every row at data.max_length", "peak", size(peak)));
    match (report.fits, target.memory_bytes) {
        (Some(true), Some(memory)) => {
            lines.push(format!("fits: {} of {} would be free", size(memory - peak), size(memory)));
        }
        (Some(false), Some(memory)) => {
            let short = peak - memory * USABLE;
            lines.push(format!(
                "does not fit: short by {} of {}, of which {:.0} % can be used",
                size(short),
                size(memory),
                USABLE * 100.0
            ));
        }
        _ => lines.push("the device's memory is not known: give it by --memory".to_owned()),
    }
    for suggestion in &report.suggestions {
        let what = if report.fits == Some(true) { "would still fit" } else { "fits with" };
        lines.push(format!("  {what} {}   ({})", suggestion.arguments(), size(as_f64(suggestion.peak_bytes))));
    }
    if report.fits == Some(false) && report.suggestions.is_empty() {
        lines.push(
            "  nothing in the recipe makes it fit: take a shorter data.max_length, a smaller model or a larger device"
                .into(),
        );
    }
    if let Some(step) = report.step_seconds {
        let rate = as_f64(report.tokens_per_step) / step;
        lines.push(format!(
            "{}: {rate:.0} tokens/s, {} a step of {} tokens at full length",
            if report.is_calibrated { "measured" } else { "estimated" },
            duration(step),
            report.tokens_per_step
        ));
    }
    if let (Some(seconds), Some(steps)) = (report.seconds, report.steps) {
        let about = if report.is_calibrated { "at most" } else { "about" };
        lines.push(format!("estimated: {about} {} for {steps} steps, without evaluations", duration(seconds)));
    } else if report.steps.is_none() {
        lines.push("the rows are not counted here: give train.max_steps for the time of the whole run".to_owned());
    }
    if let Some(kwh) = report.energy_kwh {
        lines.push(format!("estimated: {kwh:.2} kWh at the board's full power"));
    }
    let knows_energy = report.energy_kwh.is_some();
    if let Some(cost) = report.cost {
        let hour = prices.price_per_hour.map(|price| format!("{price} an hour"));
        let kwh = prices.price_per_kwh.filter(|_| knows_energy).map(|price| format!("{price} a kWh"));
        let at: Vec<String> = hour.into_iter().chain(kwh).collect();
        lines.push(format!("estimated: {cost:.2} {} at {}", prices.currency, at.join(" and ")));
    }
    if prices.price_per_kwh.is_some() && report.seconds.is_some() && !knows_energy {
        lines.push("note: the power of this device is not known, so its energy is in no cost".to_owned());
    }
    if !target.is_cpu {
        lines.push("note: sizes and times on GPUs are reckoned, not yet held against a measurement".to_owned());
    }
    lines.join("\n")
}

#[expect(clippy::cast_precision_loss, reason = "bytes and tokens, far below 2^53")]
fn as_f64(count: usize) -> f64 {
    count as f64
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_found_by_model_with_or_without_their_memory() {
        assert_eq!(gpus::find("h100-80gb").unwrap().name, "H100-80GB");
        assert_eq!(gpus::find("RTX 4090").unwrap().name, "RTX-4090-24GB");
        assert_eq!(gpus::find("A100").unwrap().name, "A100-80GB");
        assert_eq!(gpus::find("cuda"), None);
    }
}
