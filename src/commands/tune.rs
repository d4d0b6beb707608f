//! `lora-train tune`: tries the changes to a recipe that are likely to make it faster, in short measured runs on its own
//! rows, within the memory that there is, and writes the fastest recipe.
//!
//! Every trial is a process of its own, so that one that runs out of memory takes nothing with it. What was tried goes to
//! stdout as a table or as JSON, progress to stderr.

mod search;
mod trial;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

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
use search::{Axis, Settings, Trial};
use trial::{Figures, Runner};

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

    /// Steps that are measured in each trial, after one that is not
    #[arg(long, value_name = "STEPS", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub steps: u64,

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
    /// Target tokens per second of the fastest over those of the recipe as it is, both measured again at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup: Option<f64>,
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
    let mut runner = Runner::new(&args.recipe, &recipe, args.steps)?;
    let mut measure = |settings: &Settings| {
        let changes = settings.changes_from(&base);
        let what = if changes.is_empty() { "as the recipe is".to_owned() } else { changes.join(" ") };
        // Nobody is told where standard error is closed.
        drop(writeln!(io::stderr(), "trying: {what}"));
        runner.measure(&changes)
    };
    let trials = search::run(&base, &axes, &limits, &does_fit, &mut measure);
    let trials = trials.map_err(|error| match runner.exit_code {
        // What is wrong is the recipe or its rows.
        Some(2) => Failure::input(error),
        _ => Failure::running(error),
    })?;
    let best = search::fastest(&trials);
    let fastest = trials.get(best).map_or_else(Vec::new, |trial| trial.settings.clone());
    let mut report = Report { device: &device.label, trials: &trials, fastest, speedup: None, written: None };
    if best > 0 {
        // Once more, one after the other: what was a lucky moment does not show twice.
        let rate = |figures: Figures| figures.target_tokens_per_second;
        let before = runner.measure(&[]).map(rate).map_err(Failure::running)?;
        let after = runner.measure(&report.fastest).map(rate).map_err(Failure::running)?;
        report.speedup = Some(after / before);
        if after > search::GAIN * before {
            write_recipe(&out, args, &report)?;
            report.written = Some(out);
        }
    }
    let text = if args.json { serde_json::to_string(&report).map_err(Failure::running)? } else { table(&report) };
    writeln!(io::stdout(), "{text}").map_err(Failure::running)
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

fn table(report: &Report<'_>) -> String {
    let mut lines =
        vec![format!("{:>13}  {:>9}  {:>9}  {:>9}  {}", "target tok/s", "step", "data wait", "peak", "change")];
    for trial in report.trials {
        let what = if trial.settings.is_empty() { "as the recipe is".to_owned() } else { trial.settings.join(" ") };
        let remark = if trial.keeps_numbers { "" } else { "   (other numbers)" };
        lines.push(match (&trial.figures, &trial.left_out) {
            (Some(Figures { target_tokens_per_second, step_seconds, data_wait_share, peak_memory_bytes, .. }), _) => {
                #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
                let peak = peak_memory_bytes.map_or_else(|| "?".into(), |bytes| fit::size(bytes as f64));
                format!(
                    "{target_tokens_per_second:>13.1}  {:>9}  {:>8.1}%  {peak:>9}  {what}{remark}",
                    format!("{step_seconds:.3} s"),
                    100.0 * data_wait_share
                )
            }
            (None, reason) => format!("{:>13}  {what}: {}", "-", reason.as_deref().unwrap_or("not tried")),
        });
    }
    match (report.speedup, &report.written) {
        (Some(speedup), Some(path)) => {
            lines.push(format!("fastest: {speedup:.2}x with {}", report.fastest.join(" ")));
            lines.push(format!("recipe: {}", path.display()));
        }
        // While the recipe is being written, its file is not named in its own comment.
        (Some(speedup), None) if speedup > search::GAIN => {
            lines.push(format!("fastest: {speedup:.2}x with {}", report.fastest.join(" ")));
        }
        (Some(speedup), None) => lines.push(format!(
            "the fastest trial did not stay so when it was measured again ({speedup:.2}x): the recipe is as fast as it \
             gets here"
        )),
        (None, _) => lines.push("nothing that was tried is faster by more than the noise: the recipe stays".into()),
    }
    lines.join("\n")
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
