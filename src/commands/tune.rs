//! `lora-train tune`: tries the changes to a recipe that are likely to make it faster, in short measured runs on its own
//! rows, within the memory that there is, and writes the fastest recipe.
//!
//! Every trial is a process of its own, so that one that runs out of memory takes nothing with it. A candidate is run in turn
//! with the fastest settings before it, and believed only where it beats them by more than the noise of the machine, which is
//! measured first. What was tried goes to stdout as a table or as JSON, progress to stderr.

mod contest;
mod search;
mod settings;
mod slices;
mod table;
mod trial;
mod verdict;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

use crate::device::{self, Dtype};
use crate::failure::Failure;
use crate::model::{Init, ModelOptions};
use crate::recipe::{Purpose, RecipeArgs};
use crate::run::inputs::{ModelSource, workload};
use crate::schema::{Problem, Problems};
use crate::telemetry::available_host_memory_bytes;
use crate::train::fit;
use crate::train::memory::Workload;
use contest::{Contest, Event};
use search::{Axis, Trial};
use settings::Settings;
use table::table;
use trial::{Length, Runner};
use verdict::Verdict;

/// First line of a recipe that this command wrote, which it may overwrite.
const WRITTEN_BY: &str = "# Written by `lora-train tune`";

/// Arguments of `lora-train tune`.
#[derive(Clone, Debug, clap::Args)]
pub struct TuneArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub recipe: RecipeArgs,

    /// Where to write the fastest recipe; default: the recipe's name with .tuned.toml, beside it
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Steps that are measured in each trial at least, after one that is not
    #[arg(long, value_name = "STEPS", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub steps: u64,

    /// Time that each trial is measured at least; steps of a few milliseconds are taken by the hundred
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, value_parser = seconds)]
    pub seconds: f64,

    /// Time for all trials together; what has not been tried by then is named
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, value_parser = minutes)]
    pub max_minutes: f64,

    /// Leave out what changes the numbers: precision, storage of the base, packing
    #[arg(long)]
    pub keep_numbers: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    device: &'a str,
    /// In the order in which they were tried; the first is the recipe as it is.
    trials: &'a [Trial],
    /// Settings of the fastest trial, as `--set` takes them; none where the recipe is the fastest.
    fastest: Vec<String>,
    /// By how much the comparison of one trial with its neighbours varies on this machine (standard deviation), as a share.
    noise: f64,
    /// Speed of the fastest over that of the recipe as it is, both run in turn once more at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup: Option<f64>,
    /// What that may be wrong by, as a share.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup_noise: Option<f64>,
    /// Whether it is faster by more than the noise, and so is written.
    #[serde(skip)]
    is_faster: bool,
    /// The recipe that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<PathBuf>,
}

/// Tries, measures, and writes the fastest recipe.
///
/// # Errors
///
/// Mistakes in the recipe, a recipe that does not run as it is, a file that cannot be written or is not of this command.
pub fn run(args: &TuneArgs) -> Result<(), Failure> {
    let recipe = args.recipe.load(Purpose::Training)?;
    let out = args.out.clone().unwrap_or_else(|| args.recipe.recipe.with_extension("tuned.toml"));
    refuse_foreign(&out)?;
    let options = ModelOptions { init: Init::Random, ..recipe.model.clone() };
    let source = ModelSource::open(&options, recipe.seed, false)?;
    let selection = source.select(&recipe.lora)?;
    let device = device::open(&recipe.device.name).map_err(Failure::input)?;
    let memory_bytes =
        if device.is_gpu() { device.cuda.as_ref().map(|gpu| gpu.memory_bytes) } else { available_host_memory_bytes() };
    let as_it_is = workload(&recipe, &source.config, &selection, !device.is_gpu());
    let does_fit = |settings: &Settings| {
        let workload = with(&as_it_is, settings);
        #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
        let memory = memory_bytes.map(|bytes| bytes as f64);
        let plan = workload.plan();
        match memory {
            Some(memory) if !fit::fits(&plan, memory) => Err(plan.peak_bytes),
            _ => Ok(()),
        }
    };
    let base = Settings {
        micro_batch_size: recipe.train.micro_batch_size,
        gradient_accumulation_steps: recipe.train.gradient_accumulation_steps,
        gradient_checkpointing: recipe.train.gradient_checkpointing,
        num_workers: recipe.data.num_workers,
        packing: recipe.data.packing,
        precision: recipe.train.precision,
        storage: recipe.model.dtype,
    };
    let axes = Axis::all(args.keep_numbers);
    let limits = search::Limits {
        threads: device::num_cpu_threads(),
        is_gpu: device.is_gpu(),
        has_bf16: device.supports(Dtype::Bf16),
    };
    let mut runner = Runner::new(&args.recipe, &recipe, Length { steps: args.steps, seconds: args.seconds })?;
    tell(&format!(
        "tuning: each trial is measured for at least {} steps and {} s, all of them for at most {} minutes",
        args.steps, args.seconds, args.max_minutes
    ));
    let started = Instant::now();
    let time_left = || 1.0 - started.elapsed().as_secs_f64() / (60.0 * args.max_minutes);
    let hear = |event: Event<'_>| tell(&told(&event, &base, started));
    let mut measure = |settings: &Settings| runner.measure(&settings.changes_from(&base));
    let mut contest = Contest::new(&mut measure, &time_left, &hear);
    let found = search::run(&base, &axes, &limits, &does_fit, &mut contest);
    let confirmed = match &found {
        Ok(found) if found.best != base => {
            tell("once more, in turn: the recipe as it is and the fastest");
            Some(contest.confirm(&base, &found.best).map_err(Failure::running)?)
        }
        _ => None,
    };
    let noise = contest.noise().of_a_round();
    let found = found.map_err(|error| match runner.exit_code {
        // What is wrong is the recipe or its rows.
        Some(2) => Failure::input(error),
        _ => Failure::running(error),
    })?;
    let mut report = Report {
        device: &device.label,
        trials: &found.trials,
        fastest: found.best.changes_from(&base),
        noise,
        speedup: confirmed.map(|comparison| comparison.ratio),
        speedup_noise: confirmed.map(|comparison| comparison.margin),
        is_faster: confirmed.is_some_and(|comparison| comparison.verdict == Verdict::Faster),
        written: None,
    };
    if report.is_faster {
        write_recipe(&out, args, &report)?;
        report.written = Some(out);
    }
    let text = if args.json { serde_json::to_string(&report).map_err(Failure::running)? } else { table(&report) };
    writeln!(io::stdout(), "{text}").map_err(Failure::running)
}

/// A time of at least nothing.
fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=3600.0).contains(number));
    number.ok_or_else(|| "expected seconds in [0, 3600]".into())
}

/// A time of more than nothing.
fn minutes(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "expected minutes above 0".into())
}

fn tell(text: &str) {
    // Nobody is told where standard error is closed.
    drop(writeln!(io::stderr(), "{text}"));
}

/// What is told while it happens.
fn told(event: &Event<'_>, base: &Settings, started: Instant) -> String {
    match event {
        Event::Started { noise, num_runs } => format!(
            "the recipe as it is: {num_runs} trials took {:.0} s; one of them differs from its neighbours by {:.1} % \
             (standard deviation)",
            started.elapsed().as_secs_f64(),
            100.0 * noise.of_a_round()
        ),
        Event::Trying(settings) => format!("trying: {}", settings.changes_from(base).join(" ")),
        Event::Tried(result) => format!(
            "  {:.2}x the recipe as it is, {} ({} rounds, {:.0} s so far)",
            result.speedup,
            table::remark(result),
            result.rounds,
            started.elapsed().as_secs_f64()
        ),
    }
}

/// The workload with other settings.
fn with<'a>(workload: &Workload<'a>, settings: &Settings) -> Workload<'a> {
    Workload {
        rows: settings.micro_batch_size,
        gradient_accumulation_steps: settings.gradient_accumulation_steps,
        gradient_checkpointing: settings.gradient_checkpointing,
        precision: settings.precision,
        storage: settings.storage.unwrap_or(settings.precision),
        ..workload.clone()
    }
}

/// Refuses to overwrite a recipe that somebody wrote.
fn refuse_foreign(out: &Path) -> Result<(), Failure> {
    match fs::read_to_string(out) {
        Ok(text) if text.starts_with(WRITTEN_BY) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(_) => {
            let problem = Problem::new(format!("{}: is there, and was not written by `tune`", out.display()));
            Err(Failure::Input(Problems(vec![problem.hint("name another file by --out")])))
        }
        Err(error) => Err(Failure::input(format!("{}: {error}", out.display()))),
    }
}

/// Writes the recipe with the settings of the fastest trial, under the table of all.
fn write_recipe(out: &Path, args: &TuneArgs, report: &Report<'_>) -> Result<(), Failure> {
    let set = args.recipe.set.iter().chain(&report.fastest).cloned().collect();
    let mut recipe = RecipeArgs { set, ..args.recipe.clone() }.load(Purpose::Training)?;
    // A folder of its own, beside that of the recipe, which may have been trained already.
    recipe.output_dir.as_mut_os_string().push("-tuned");
    let comment: String = table(report).lines().map(|line| format!("# {line}").trim_end().to_owned() + "\n").collect();
    let text = format!(
        "{WRITTEN_BY} from {}, on {}.\n#\n{comment}\n{}",
        args.recipe.recipe.display(),
        report.device,
        recipe.to_toml()
    );
    fs::write(out, text).map_err(|error| Failure::running(format!("{}: {error}", out.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_that_somebody_wrote_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.tuned.toml");
        assert!(refuse_foreign(&path).is_ok());
        fs::write(&path, format!("{WRITTEN_BY} from r.toml\n")).unwrap();
        assert!(refuse_foreign(&path).is_ok());
        fs::write(&path, "[model]\n").unwrap();
        assert!(refuse_foreign(&path).unwrap_err().to_string().contains("--out"));
    }
}
