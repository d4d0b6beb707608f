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
mod measured;
mod report;
mod table;
mod target;

use std::io::{self, Write};

use crate::failure::Failure;
use crate::metrics::CostConfig;
use crate::model::{Init, ModelOptions};
use crate::recipe::{Recipe, RecipeArgs};
use crate::run::inputs::{self, ModelSource};
use crate::schema::Problem;
use report::{Basis, Report};

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

/// Plans a recipe and prints the plan.
///
/// # Errors
///
/// Mistakes in the recipe or the model's config; a device that is neither present nor known.
pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let (target, recipe) = target::open(args)?;
    let options = ModelOptions { init: Init::Random, ..recipe.model.clone() };
    let source = ModelSource::open(&options, recipe.seed, true)
        .map_err(|failure| failure.about("model.path").located(&recipe.places))?;
    let selection = source.select(&recipe.lora).map_err(|failure| failure.located(&recipe.places))?;
    let workload = inputs::workload(&recipe, &source.config, &selection, target.is_cpu);
    let calibrated = match (args.calibrate, target.is_here) {
        (false, _) => None,
        (true, true) => Some(measured::step_seconds(&args.recipe, recipe.scheduler.warmup_steps.is_some())?),
        (true, false) => {
            let problem = Problem::new("--calibrate takes steps, and the device is not there");
            return Err(problem.hint("leave out --calibrate, or --device").into());
        }
    };
    // On the CPU the batch has no padding.
    let forecast = measured::forecast(&recipe, &source, &workload, !target.is_cpu);
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
        table::table(&report, &target, &prices, forecast.as_ref().err().map(String::as_str))
    };
    writeln!(io::stdout(), "{text}").map_err(Failure::running)
}

/// The recipe's prices, overridden by those on the command line.
fn prices(args: &PlanArgs, recipe: &Recipe) -> CostConfig {
    CostConfig { price_per_hour: args.price_per_hour.or(recipe.cost.price_per_hour), ..recipe.cost.clone() }
}
