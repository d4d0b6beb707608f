//! `lora-train plan`: the memory that a recipe will take, component by component, and how long it will run, before
//! any weight is loaded.
//!
//! The table, or with `--json` one JSON object, goes to stdout. Memory follows from shapes alone ([`memory`]), with
//! every row at full length. Time follows from the FLOPs of the steps of an epoch ([`forecast`]) and a fraction of the
//! device's matrix-product rate.
//!
//! [`memory`]: crate::train::memory
//! [`forecast`]: crate::train::forecast

mod gpus;
mod report;
mod target;

use std::process::{Command, Stdio};
use std::sync::Arc;

use super::{number, print};
use crate::data::cache::CacheSettings;
use crate::data::config::DataConfig;
use crate::data::pipeline::{DataPipeline, OpenOptions};
use crate::failure::Failure;
use crate::hub::Progress;
use crate::metrics::CostConfig;
use crate::recipe::{Recipe, RecipeArgs};
use crate::run::inputs::{self, ModelSource, WeightsFrom};
use crate::schema::Problem;
use crate::train::flops::StepFlops;
use crate::train::forecast::Forecast;
use crate::train::memory::Workload;
use report::{Basis, Report, table};

const MIB: f64 = 1024.0 * 1024.0;

/// Arguments of `lora-train plan`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// The recipe and changes to it; `--device` can also name a GPU that is not there, such as H100-80GB
    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Plan for this much memory instead of the device's, in GiB
    #[arg(long, value_name = "GIB", value_parser = positive)]
    pub(crate) memory: Option<f64>,

    /// Also find the largest micro-batch that fits, and what makes it fit
    #[arg(long)]
    pub(crate) fit: bool,

    /// Take a few steps on synthetic rows of full length for the time of a step, instead of estimating it
    #[arg(long)]
    pub(crate) calibrate: bool,

    /// Price of an hour on the machine, in the recipe's `cost.currency`; goes before its `cost.price_per_hour`
    #[arg(long, value_name = "PRICE", value_parser = positive)]
    pub(crate) price_per_hour: Option<f64>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0, "a number above 0")
}

/// Plans a recipe and prints the plan.
pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let (target, recipe) = target::open(args)?;
    let (source, selection) = ModelSource::of_recipe(&recipe, WeightsFrom::Nowhere, true)?;
    let workload = inputs::workload(&recipe, &source.config, &selection, target.is_cpu);
    let calibrated = match (args.calibrate, target.is_here) {
        (false, _) => None,
        (true, true) => Some(step_seconds(&args.recipe, recipe.scheduler.warmup_steps.is_some())?),
        (true, false) => {
            let problem = Problem::new("--calibrate takes steps, and the device is not there");
            return Err(problem.hint("leave out --calibrate, or --device").into());
        }
    };
    // On the CPU the batch has no padding.
    let forecast = forecast(&recipe, &source, &workload, !target.is_cpu);
    let prices = prices(args, &recipe);
    let report = Report::new(&Basis {
        recipe: &recipe,
        workload: &workload,
        target: &target,
        prices: &prices,
        forecast: forecast.as_ref().ok(),
        calibrated,
        wants_fit: args.fit,
    });
    let text = if args.json {
        serde_json::to_string(&report).map_err(Failure::running)?
    } else {
        table(&report, &target, &prices, forecast.as_ref().err().map(String::as_str))
    };
    print(&text)
}

/// Time of a step on full-length rows, from `lora-train bench` in a process of its own, because it loads the model.
/// `has_warmup_steps`: the recipe gives `scheduler.warmup_steps`, which may be more than the steps run here.
fn step_seconds(args: &RecipeArgs, has_warmup_steps: bool) -> Result<f64, Failure> {
    let program = std::env::current_exe().map_err(Failure::running)?;
    let mut command = Command::new(program);
    command.arg("bench").arg(&args.recipe).args(["--warmup", "1"]);
    let shortened = has_warmup_steps.then_some("scheduler.warmup_steps=0");
    for change in args.set.iter().map(String::as_str).chain(["train.max_steps=3"]).chain(shortened) {
        command.args(["--set", change]);
    }
    if let Some(device) = &args.device {
        command.args(["--device", device]);
    }
    let output = command.stdin(Stdio::null()).output().map_err(Failure::running)?;
    let printed = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let error = printed.split_once("error: ").map_or(&*printed, |(_, error)| error);
        return Err(Failure::running(format!("no step could be taken: {}", error.trim())));
    }
    let report = String::from_utf8_lossy(&output.stdout);
    let report = report.lines().last().and_then(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let seconds = report.and_then(|report| report["step_seconds"].as_f64());
    seconds.ok_or_else(|| Failure::running("`lora-train bench` printed no time of a step"))
}

/// The steps from the training rows, or one line on why these cannot be read here. A large file is not tokenised for
/// it.
fn forecast(
    recipe: &Recipe,
    source: &ModelSource,
    workload: &Workload<'_>,
    is_padded: bool,
) -> Result<Forecast, String> {
    if recipe.data.train.is_empty() {
        return Err("the recipe names no training data".into());
    }
    let first_line = |text: String| text.lines().next().unwrap_or_default().to_owned();
    let tokenizer = source.tokenizer().map_err(|failure| first_line(failure.messages().join("\n")))?;
    let config = DataConfig { eval: Vec::new(), ..recipe.data.clone() };
    let options = OpenOptions {
        cache: CacheSettings::from_env(),
        progress: Progress::detect(false),
        refuse_large: true,
        ..OpenOptions::default()
    };
    let flops = StepFlops::new(workload.config, workload.plan().num_trainable);
    DataPipeline::open(&config, Arc::new(tokenizer), recipe.seed, &options)
        .and_then(|data| Forecast::new(&data, &recipe.train, &flops, is_padded))
        .map_err(|error| first_line(error.to_string()))
}

/// The recipe's prices, overridden by those on the command line.
fn prices(args: &PlanArgs, recipe: &Recipe) -> CostConfig {
    CostConfig { price_per_hour: args.price_per_hour.or(recipe.cost.price_per_hour), ..recipe.cost.clone() }
}
