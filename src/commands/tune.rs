//! `lora-train tune`: tries the changes to a recipe that are likely to make it faster, in short measured runs on its own
//! rows, within the memory that there is, and writes the fastest recipe.
//!
//! Every trial is a process of its own, so that one that runs out of memory takes nothing with it. A candidate is run in turn
//! with the fastest settings before it, and believed only where it beats them by more than the noise of the machine, which is
//! measured first. What was tried goes to stdout as a table or as JSON, progress to stderr.

mod axis;
mod contest;
mod outlook;
mod search;
mod settings;
mod slices;
mod table;
mod trial;
mod verdict;

use std::cell::Cell;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::device::{self, Dtype};
use crate::failure::Failure;
use crate::model::{Init, ModelOptions};
use crate::recipe::{Purpose, RecipeArgs};
use crate::run::device_memory::Resources;
use crate::run::inputs::{ModelSource, workload};
use crate::schema::{Problem, Problems};
use crate::telemetry::available_host_memory_bytes;
use crate::train::fit;
use crate::train::memory::Workload;
use axis::{Axis, Limits};
use contest::{Contest, Event};
use outlook::Outlook;
use search::{Found, Trial};
use settings::Settings;
use table::table;
use trial::{Length, Runner};
use verdict::{Comparison, Verdict};

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

    /// Time for all candidates; one that is running then is ended, and what has not been tried is named. The recipe as it is
    /// is run three times first, and in turn with the fastest at the end, however long that takes
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, value_parser = minutes)]
    pub max_minutes: f64,

    /// Leave out what changes the numbers: precision, storage of the base, packing, rows of an update
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
    /// Settings of the fastest trial, as `--set` takes them; none where the recipe stays.
    fastest: Vec<String>,
    /// By how much the comparison of one trial with its neighbours varies on this machine (standard deviation), as a share.
    noise: f64,
    /// Time of the whole search.
    seconds: f64,
    /// Speed of the fastest over that of the recipe as it is, both run in turn once more at the end; absent where the recipe
    /// stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup: Option<f64>,
    /// What that may be wrong by, as a share.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup_noise: Option<f64>,
    /// What the fastest trial lacked at the end, where the recipe stays all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_confirmed: Option<String>,
    /// The recipe that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<PathBuf>,
}

impl<'a> Report<'a> {
    /// What was found, and what became of it when it was measured once more.
    fn new(
        device: &'a str,
        base: &Settings,
        found: &'a Found,
        noise: f64,
        confirmed: Option<Result<Comparison, String>>,
    ) -> Self {
        let (faster, not_confirmed) = match confirmed {
            None => (None, None),
            Some(Ok(comparison)) if comparison.verdict == Verdict::Faster => (Some(comparison), None),
            Some(Ok(Comparison { ratio, margin, verdict, .. })) => {
                let what = match verdict {
                    Verdict::NotSettled => "was ahead when it was measured again, but there was no time to settle it",
                    _ => "did not stay so when it was measured again",
                };
                (None, Some(format!("{what} ({ratio:.2}x, noise {:.1} %)", 100.0 * margin)))
            }
            Some(Err(error)) => (None, Some(format!("could not be measured again ({error})"))),
        };
        Self {
            device,
            trials: &found.trials,
            fastest: faster.map(|_| found.best.changes_from(base)).unwrap_or_default(),
            noise,
            seconds: 0.0,
            speedup: faster.map(|comparison| comparison.ratio),
            speedup_noise: faster.map(|comparison| comparison.margin),
            not_confirmed,
            written: None,
        }
    }
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
    let source = ModelSource::open(&options, recipe.seed, false)
        .map_err(|failure| failure.about("model.path").located(&recipe.places))?;
    let selection = source.select(&recipe.lora).map_err(|failure| failure.located(&recipe.places))?;
    let device = device::open(&recipe.device.name).map_err(Failure::input)?;
    let memory_bytes = Resources::of(&device).usable_bytes();
    let host_bytes = available_host_memory_bytes();
    let as_it_is = workload(&recipe, &source.config, &selection, !device.is_gpu());
    let does_fit = |settings: &Settings| {
        let workload = with(&as_it_is, settings);
        let device = Some((workload.plan().peak_bytes, memory_bytes));
        // Beside a GPU, where block inputs may wait.
        let host = workload.host_plan().map(|plan| (plan.peak_bytes, host_bytes));
        let mut peaks = [device, host].into_iter().flatten().filter_map(|(peak, bytes)| Some((peak, bytes?)));
        #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
        let too_large = peaks.find(|(peak, bytes)| !fit::is_room(*peak, *bytes as f64));
        too_large.map_or(Ok(()), |(peak, _)| Err(peak))
    };
    let base = Settings {
        micro_batch_size: recipe.train.micro_batch_size,
        gradient_accumulation_steps: recipe.train.gradient_accumulation_steps,
        gradient_checkpointing: recipe.train.gradient_checkpointing,
        loss_chunk_tokens: recipe.train.loss_chunk_tokens,
        num_workers: recipe.data.num_workers,
        prefetch_batches: recipe.data.prefetch_batches,
        packing: recipe.data.packing,
        precision: recipe.train.precision,
        storage: recipe.model.dtype,
    };
    let axes = Axis::all(args.keep_numbers);
    let limits = Limits {
        threads: device::num_cpu_threads(),
        is_gpu: device.is_gpu(),
        has_bf16: device.supports(Dtype::Bf16),
        vocab_size: source.config.vocab_size,
    };
    let mut runner = Runner::new(&args.recipe, &recipe, Length { steps: args.steps, seconds: args.seconds })?;
    tell(&format!(
        "tuning: each trial is measured for at least {} steps and {} s; candidates are tried for at most {} minutes",
        args.steps, args.seconds, args.max_minutes
    ));
    let started = Instant::now();
    let time_left = || 1.0 - started.elapsed().as_secs_f64() / (60.0 * args.max_minutes);
    let time = Duration::try_from_secs_f64(60.0 * args.max_minutes).ok();
    let deadline = Cell::new(time.and_then(|time| started.checked_add(time)));
    let is_started = Cell::new(false);
    let hear = |event: Event<'_>| {
        is_started.set(true);
        tell(&told(&event, &base, started, args.max_minutes));
    };
    let mut measure = |settings: &Settings| {
        // Without the first runs of the recipe as it is there is nothing to compare with.
        let until = deadline.get().filter(|_| is_started.get() || *settings != base);
        runner.measure(&settings.changes_from(&base), until)
    };
    let mut contest = Contest::new(&mut measure, &time_left, &hear);
    let found = search::run(&base, &axes, &limits, &does_fit, &mut contest);
    let confirmed = match &found {
        Ok(found) if found.best != base => {
            tell("once more, in turn: the recipe as it is and the fastest");
            // What was found is not thrown away for a few runs more.
            deadline.set(None);
            Some(contest.confirm(&base, &found.best).inspect_err(|error| tell(&format!("  it failed: {error}"))))
        }
        _ => None,
    };
    let noise = contest.noise().of_a_round();
    let found = found.map_err(|error| match runner.exit_code {
        // What is wrong is the recipe or its rows.
        Some(2) => Failure::input(error),
        _ => Failure::running(error),
    })?;
    let mut report = Report::new(&device.label, &base, &found, noise, confirmed);
    report.seconds = started.elapsed().as_secs_f64();
    if report.speedup.is_some() {
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
fn told(event: &Event<'_>, base: &Settings, started: Instant, max_minutes: f64) -> String {
    match event {
        Event::Planned { axes, num_promising, num_candidates, run_seconds } => {
            let spent_seconds = started.elapsed().as_secs_f64();
            let outlook = Outlook { run_seconds: *run_seconds, spent_seconds, num_candidates: *num_candidates };
            let mut text = outlook.text(max_minutes);
            let promising: Vec<&str> = axes.iter().take(*num_promising).map(|axis| axis.key()).collect();
            if !promising.is_empty() {
                text.push_str("\ntried first, since these runs ask for it: ");
                text.push_str(&promising.join(", "));
            }
            text
        }
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
        loss_chunk: settings.loss_chunk(),
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
    use crate::train::config::GradientCheckpointing;

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

    #[test]
    fn what_is_not_confirmed_is_told_and_not_recommended() {
        let base = Settings {
            micro_batch_size: 4,
            gradient_accumulation_steps: 1,
            gradient_checkpointing: GradientCheckpointing::Off,
            loss_chunk_tokens: None,
            num_workers: 1,
            prefetch_batches: 4,
            packing: false,
            precision: Dtype::F32,
            storage: None,
        };
        let figures = trial::Figures {
            target_tokens_per_second: 1.0,
            tokens_per_second: 1.0,
            step_seconds: 1.0,
            data_wait_share: 0.0,
            steps_of_epoch: 100.0,
            run_seconds: 1.0,
            advised_keys: Vec::new(),
            peak_memory_bytes: None,
            loss: 1.0,
        };
        let told = |confirmed: Option<Verdict>, of_trial: Verdict| {
            let result = search::TrialResult { speedup: 1.5, noise: 0.05, rounds: 1, verdict: of_trial };
            let trial = Trial {
                settings: vec!["data.packing=true".into()],
                keeps_numbers: false,
                rows_of_step: None,
                figures: Some(figures.clone()),
                result: Some(result),
                left_out: None,
            };
            let found = Found { trials: vec![trial], best: Settings { packing: true, ..base.clone() } };
            let comparison = |verdict| Comparison { ratio: 1.5, margin: 0.05, rounds: 3, verdict };
            // Nothing was measured again where nothing was faster.
            let confirmed = (of_trial == Verdict::Faster).then(|| confirmed.map(comparison).ok_or("killed".to_owned()));
            let report = Report::new("cpu", &base, &found, 0.01, confirmed);
            let json = serde_json::to_value(&report).unwrap();
            (json["fastest"].clone(), json["speedup"].clone(), table(&report).lines().last().unwrap().to_owned())
        };
        let (fastest, speedup, line) = told(Some(Verdict::Faster), Verdict::Faster);
        assert_eq!((fastest, speedup), (serde_json::json!(["data.packing=true"]), serde_json::json!(1.5)));
        assert_eq!(line, "fastest: 1.50x (noise 5.0 %) with data.packing=true");
        let cases = [
            (Some(Verdict::WithinNoise), Verdict::Faster, "did not stay so"),
            (Some(Verdict::NotSettled), Verdict::Faster, "was ahead when it was measured again"),
            (None, Verdict::Faster, "could not be measured again (killed)"),
            (None, Verdict::NotSettled, "no time to settle"),
            (None, Verdict::WithinNoise, "nothing that was tried is faster"),
        ];
        for (confirmed, of_trial, expected) in cases {
            let (fastest, speedup, line) = told(confirmed, of_trial);
            assert_eq!((fastest, speedup), (serde_json::json!([]), serde_json::Value::Null));
            assert!(line.contains(expected) && line.contains("the recipe stays"), "{line}");
        }
    }
}
