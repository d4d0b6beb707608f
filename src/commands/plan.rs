//! `lora-train plan`: the memory that a recipe will take, component by component, and how long it will run, before
//! any weight is loaded.
//!
//! The table, or with `--json` one JSON object, goes to stdout. Memory follows from shapes alone ([`memory`]), with
//! every row at full length. Time follows from the FLOPs of the steps of an epoch ([`forecast`]): on the CPU by a fraction of its
//! matrix-product rate, on a GPU by what a step is made of ([`gpu`]).
//!
//! [`memory`]: crate::train::budget::memory
//! [`forecast`]: crate::train::budget::forecast
//! [`gpu`]: crate::train::budget::gpu

mod gpus;
mod images;
mod ranks;
#[cfg(test)]
mod records;
mod report;
mod rows;
mod target;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::{number, print, print_text, say};
use crate::config::{CostConfig, GradientCheckpointing};
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::device::DeviceKind;
use crate::hub::Progress;
use crate::lora::targets::Selection;
use crate::measure::telemetry::disk_read_bytes_per_second;
use crate::ops::place::place_on;
use crate::recipe::{Recipe, RecipeArgs};
use crate::run::images::kept_image_headers_of_rows;
use crate::run::inputs::{self, ModelSource, WeightsFrom, data_failure};
use crate::schema::Problem;
use crate::spec::{ModelConfig, shipped_config};
use crate::train::budget::fit::Decision;
use crate::train::budget::forecast::Forecast;
use crate::train::budget::images::ImageMemory;
use crate::train::budget::workload::Workload;
use crate::train::objective::{OfReference, needs};
use crate::util::failure::Failure;
use crate::util::stats::as_f64;
use images::PlannedImages;
use ranks::Cluster;
use report::{Basis, Report, table};

const MIB: f64 = 1024.0 * 1024.0;

/// The value of `--device` that asks for the names of all GPUs, which needs no recipe.
const LIST: &str = "list";
const NO_RECIPE: &str = "-";

/// Arguments of `lora-train plan`.
#[derive(Clone, Debug, clap::Args)]
#[command(
    mut_arg("device", |arg| arg.help(
        "Where to compute: auto, cpu, cuda, or a GPU that is not here: H100-80GB, \"RTX 4090\", or a part of its name; \
         `--device list` shows all"
    )),
    mut_arg("recipe", |arg| arg.required(false).default_value(NO_RECIPE).hide_default_value(true))
)]
pub(crate) struct PlanArgs {
    /// The recipe and changes to it.
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

    /// Plan for this many ranks, a process each, that share the steps
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ranks: u32,

    /// Nodes that the ranks are on
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) nodes: u32,

    /// Rate of a node's network, in bits a second: 25G, 100M
    #[arg(long, value_name = "RATE", default_value = "10G", value_parser = ranks::rate)]
    pub(crate) network: f64,

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
    if args.recipe.device.as_deref() == Some(LIST) {
        return print(&gpus::list());
    }
    if args.recipe.recipe == Path::new(NO_RECIPE) {
        return Err(Problem::new("the recipe is missing").hint("lora-train plan RECIPE.toml").into());
    }
    let (target, recipe) = target::open(args)?;
    let cluster = cluster(args, target.kind)?;
    inputs::require_residency(recipe.model.residency, target.kind.is_gpu().then_some(&*target.label))
        .map_err(|problem| recipe.places.locate(problem))?;
    let PlannedModel { config, selection, source } = PlannedModel::of_recipe(&recipe)?;
    let data = source.as_ref().map_err(Clone::clone).and_then(|source| rows(&recipe, source));
    let images = data.as_ref().map_or(Ok(ImageMemory::default()), ImageMemory::of).map_err(data_failure)?;
    let mut workload = inputs::workload(&recipe, &config, &selection, &images, place_on(target.kind));
    workload.num_ranks = args.ranks as usize;
    let decision = (workload.gradient_checkpointing == GradientCheckpointing::Auto)
        .then(|| Decision::new(&workload, target.usable_bytes()));
    if let Some(Decision { choice, .. }) = &decision {
        workload.gradient_checkpointing = *choice;
    }
    let calibrated = match (args.calibrate, target.is_here) {
        (false, _) => None,
        (true, true) => {
            let all = [workload.gradient_accumulation_steps, workload.rows];
            // A part takes longer than its share of the whole.
            let part = cluster.map_or(all, |cluster| cluster.part_of(all[0], all[1]));
            let seconds = step_seconds(&args.recipe, part, recipe.scheduler.warmup_steps.is_some())?;
            let rows = |[micro_batches, rows]: [usize; 2]| as_f64(micro_batches * rows);
            Some(seconds * rows(all) / rows(part))
        }
        (true, false) => {
            let problem = Problem::new("--calibrate takes steps, and the device is not there");
            return Err(problem.hint("leave out --calibrate, or --device").into());
        }
    };
    let folder = source.as_ref().ok().filter(|_| target.is_here && workload.plan().read_bytes_per_step.is_some());
    let disk_bytes_per_second = folder.and_then(|source| rate_of_disk(&source.folder));
    let planned_images =
        data.as_ref().ok().and_then(|data| PlannedImages::of(data, images.token_share, target.rate_in_f32(&recipe)));
    // On the CPU the batch has no padding.
    let forecast = data.and_then(|data| forecast(&recipe, &data, &workload, target.kind.is_gpu(), args.ranks == 1));
    let prices = prices(args, &recipe);
    let report = Report::new(&Basis {
        recipe: &recipe,
        workload: &workload,
        target: &target,
        prices: &prices,
        decision: decision.as_ref(),
        forecast: forecast.as_ref().ok(),
        images: planned_images,
        most_rows: if forecast.is_err() { rows::at_most(&recipe.data) } else { None },
        calibrated,
        cluster,
        disk_bytes_per_second,
        wants_fit: args.fit,
    });
    if args.json {
        return print(&serde_json::to_string(&report).map_err(Failure::running)?);
    }
    print_text(&table(&report, &target, &prices, forecast.as_ref().err().map(String::as_str)))
}

/// The ranks that share the steps; `None` for one.
fn cluster(args: &PlanArgs, kind: DeviceKind) -> Result<Option<Cluster>, Problem> {
    let PlanArgs { ranks, nodes, network, .. } = *args;
    if nodes > ranks {
        return Err(Problem::new(format!("--nodes {nodes} are more than the {ranks} ranks on them"))
            .hint("--ranks counts all of them: one for each GPU"));
    }
    Ok((ranks > 1).then_some(Cluster { ranks: ranks as usize, nodes: nodes as usize, network, kind }))
}

/// What a plan needs of a model.
struct PlannedModel {
    config: ModelConfig,
    selection: Selection,
    /// The model's files; else why there is only its shape, from [`shipped_config`].
    source: Result<ModelSource, String>,
}

impl PlannedModel {
    /// The recipe's model; if the Hub does not hand it out, the shape that this program ships.
    fn of_recipe(recipe: &Recipe) -> Result<Self, Failure> {
        let path = &recipe.model.path;
        let failure = match ModelSource::of_recipe(recipe, WeightsFrom::Nowhere, true) {
            Ok((source, selection)) => {
                return Ok(Self { config: source.config.clone(), selection, source: Ok(source) });
            }
            Err(failure) => failure,
        };
        let Some(json) = shipped_config(path).filter(|_| !Path::new(path).exists()) else { return Err(failure) };
        let config = ModelConfig::from_json(json).map_err(Failure::input)?;
        let selection = inputs::select(&recipe.lora, &config).map_err(|failure| failure.located(&recipe.places))?;
        say(&format!("note: the shape of {path} is the one that this program knows; {}", first_line(&failure)));
        Ok(Self { config, selection, source: Err("the model's tokenizer is not here".to_owned()) })
    }
}

/// Rate of the disk that holds a model, measured at its largest file.
fn rate_of_disk(model: &Path) -> Option<f64> {
    let files = std::fs::read_dir(model).into_iter().flatten().flatten().map(|entry| entry.path());
    let size = |path: &PathBuf| path.metadata().map_or(0, |metadata| metadata.len());
    let largest = files.max_by_key(size).unwrap_or_else(|| model.to_owned());
    disk_read_bytes_per_second(&largest)
}

fn first_line(failure: &Failure) -> String {
    failure.messages().join("\n").lines().next().unwrap_or_default().to_owned()
}

/// Time of a step of so many micro-batches of so many rows of full length, from `lora-train bench` in a process of its own, because it
/// loads the model.
/// `has_warmup_steps`: the recipe gives `scheduler.warmup_steps`, which may be more than the steps run here.
fn step_seconds(args: &RecipeArgs, [micro_batches, rows]: [usize; 2], has_warmup_steps: bool) -> Result<f64, Failure> {
    let program = std::env::current_exe().map_err(Failure::running)?;
    let mut command = Command::new(program);
    command.arg("bench").arg(&args.recipe).args(["--warmup", "1"]);
    let shortened = has_warmup_steps.then_some("scheduler.warmup_steps=0");
    let part = [
        format!("train.gradient_accumulation_steps={micro_batches}"),
        format!("train.micro_batch_size={rows}"),
        "train.max_steps=3".to_owned(),
    ];
    for change in args.set.iter().chain(&part).map(String::as_str).chain(shortened) {
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

/// The rows, or one line on why these cannot be read here. Large files are not tokenised.
fn rows(recipe: &Recipe, source: &ModelSource) -> Result<Dataset, String> {
    if recipe.data.train.is_empty() {
        return Err("the recipe names no training data".into());
    }
    let tokenizer = source.tokenizer().map_err(|failure| first_line(&failure))?;
    let options = OpenOptions {
        cache: CacheSettings::from_env(),
        progress: Progress::detect(false),
        refuse_large: true,
        images: kept_image_headers_of_rows(&source.folder, &source.config, &recipe.data),
        ..OpenOptions::default()
    };
    let sees = options.images.as_ref().is_some_and(|images| images.vision().is_ok());
    let without_images = if sees { "; the memory is without what images take" } else { "" };
    Dataset::open(&recipe.data, Arc::new(tokenizer), recipe.seed, &options)
        .map_err(|error| first_line(&Failure::input(error)) + without_images)
}

/// The steps from the training rows, or one line on why these cannot be read.
fn forecast(
    recipe: &Recipe,
    data: &Dataset,
    workload: &Workload<'_>,
    is_padded: bool,
    is_alone: bool,
) -> Result<Forecast, String> {
    let flops = workload.flops();
    let keeps_reference = is_alone && needs(workload.objective).reference == Some(OfReference::Documents);
    let Recipe { train, objective, eval, .. } = recipe;
    let max_length = recipe.data.max_length;
    Forecast::new(data, train, objective, max_length, &flops, is_padded, keeps_reference)
        .and_then(|steps| steps.with_evaluations(data, train.micro_batch_size, eval, &flops, is_padded))
        .map_err(|error| first_line(&Failure::input(error)))
}

/// The recipe's prices, overridden by those on the command line.
fn prices(args: &PlanArgs, recipe: &Recipe) -> CostConfig {
    CostConfig { price_per_hour: args.price_per_hour.or(recipe.cost.price_per_hour), ..recipe.cost.clone() }
}
