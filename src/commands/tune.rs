//! `lora-train tune`: tries changes that are likely to make a recipe faster, in short measured runs on its own rows
//! within the available memory, and writes the fastest recipe.
//!
//! Every trial is a process of its own, so that running out of memory ends only that trial. A candidate runs in pairs
//! with the fastest recipe so far. The results go to stdout as a table or as JSON, progress to stderr.

mod axis;
mod search;
mod trial;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{number, print, say};
use crate::data::cache::CacheSettings;
use crate::data::dataset::OpenOptions;
use crate::device::num_cpu_threads;
use crate::hub::Progress;
use crate::ops::place::place_on;
use crate::recipe::{Purpose, Recipe, RecipeArgs, is_stdin};
use crate::run::Prepared;
use crate::run::inputs::{WeightsFrom, workload};
use crate::run::shipping::not_measured;
use crate::schema::{Problem, Problems};
use crate::train::budget::fit;
use crate::util::failure::Failure;
use crate::util::stats::{as_f64, median};
use crate::util::terminal::redraws;
use crate::util::text::duration;
use axis::{Axis, Limits, changes};
use search::{MIN_GAIN, NUM_PAIRS, Paired, Trial, TrialResult};
use trial::{Length, OUT_OF_TIME, Runner};

/// Where pairs of runs differ by more than this, gains that matter do not show.
const NOISY: f64 = 0.05;

/// First line of a recipe that this command wrote, and so may overwrite.
const WRITTEN_BY: &str = "# Written by `lora-train tune`";

/// Arguments of `lora-train tune`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TuneArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Where to write the fastest recipe; default: the recipe's name with .tuned.toml, beside it
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,

    /// Steps that are measured in each trial at least, after one that is not
    #[arg(long, value_name = "STEPS", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) steps: u64,

    /// Time that each trial is measured at least; steps of a few milliseconds are taken by the hundred
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, value_parser = seconds)]
    pub(crate) seconds: f64,

    /// Time for all candidates; one that is running then is ended, and what has not been tried is named. The recipe as it is
    /// is run first, and in turn with the fastest at the end, however long that takes
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, value_parser = minutes)]
    pub(crate) max_minutes: f64,

    /// Leave out what changes the numbers: precision, storage of the base, packing, rows of an update
    #[arg(long)]
    pub(crate) keep_numbers: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `--json` prints.
#[derive(Debug, Default, Serialize)]
struct Report<'a> {
    device: &'a str,
    /// In the order of trials; the first is the original recipe.
    trials: &'a [Trial],
    /// Settings of the fastest trial, in the syntax of `--set`; empty where the recipe stays.
    fastest: Vec<String>,
    /// Time of the whole search.
    seconds: f64,
    /// Speed of the fastest relative to the original recipe, from final runs of the two in turn; absent where the
    /// recipe stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    speedup: Option<f64>,
    /// Why the fastest trial was rejected at the end, so that the recipe stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_confirmed: Option<String>,
    /// Path of the recipe that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    written: Option<PathBuf>,
}

impl Report<'_> {
    /// Records the final pairs of the fastest trial.
    fn confirm(&mut self, settings: Vec<String>, outcome: Result<Paired, String>) {
        match outcome {
            Ok(paired) if paired.is_faster() => (self.fastest, self.speedup) = (settings, Some(paired.ratio)),
            Ok(Paired { ratio, num_pairs, num_faster, .. }) => {
                self.not_confirmed = Some(format!(
                    "did not stay so when it was measured again ({ratio:.2}x, ahead in {num_faster} of {num_pairs} pairs)"
                ));
            }
            Err(error) => self.not_confirmed = Some(format!("could not be measured again ({error})")),
        }
    }
}

/// Runs the trials and writes the fastest recipe.
pub(crate) fn run(args: &TuneArgs) -> Result<(), Failure> {
    if is_stdin(&args.recipe.recipe) {
        let problem = Problem::new("`tune` reads its recipe several times, which standard input does not allow");
        return Err(problem.hint("save it as a file").into());
    }
    let recipe = args.recipe.load(Purpose::Training)?;
    let out = args.out.clone().unwrap_or_else(|| args.recipe.recipe.with_extension("tuned.toml"));
    refuse_foreign(&out)?;
    let mut prepared = Prepared::new(recipe, None, WeightsFrom::Nowhere, false)?;
    let options =
        OpenOptions { cache: CacheSettings::from_env(), progress: Progress::detect(false), ..OpenOptions::default() };
    prepared.look_for_images(&options).map_err(|failure| failure.located(&prepared.recipe.places))?;
    let Prepared { recipe, source, selection, device, images, memory, .. } = &prepared;
    let limits = Limits {
        threads: num_cpu_threads(),
        kind: device.kind,
        two_bytes: device.two_byte_dtype(),
        head: [source.config.vocab_size, source.config.hidden_size],
    };
    let mut runner = Runner::new(&args.recipe, recipe, Length { steps: args.steps, seconds: args.seconds })?;
    let started = Instant::now();
    let deadline = Duration::try_from_secs_f64(60.0 * args.max_minutes).ok().and_then(|time| started.checked_add(time));
    // Of 2, the recipe or its rows are at fault.
    let failed = |error, code| if code == Some(2) { Failure::input(error) } else { Failure::running(error) };
    let figures = runner.start().map_err(|error| failed(error, runner.exit_code))?;
    say(&format!(
        "the recipe as it is: one run takes {:.1} s; candidates are run up to {} times in turn with the fastest, for at most {} \
         in all",
        figures.run_seconds,
        NUM_PAIRS,
        duration(60.0 * args.max_minutes)
    ));
    not_measured(recipe).iter().for_each(|note| say(note));
    let axes = Axis::all(args.keep_numbers);
    let clock = clock(args.max_minutes);
    let say = |line: &str| clock.suspend(|| say(line));
    let may_run = |of: &Recipe| {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(OUT_OF_TIME.to_owned());
        }
        let fits = memory.fits(&workload(of, &source.config, selection, images, place_on(device.kind)));
        fits.map_err(|peak| format!("does not fit ({})", fit::size(as_f64(peak as u64))))
    };
    let mut measure = |of: &Recipe| runner.measure(&changes(recipe, of), deadline);
    let (trials, best) = search::run(recipe, figures, axes, &limits, &may_run, &mut measure, &say);
    let mut report = Report { device: &device.label, trials: &trials, ..Report::default() };
    let fastest = changes(recipe, &best);
    if !fastest.is_empty() {
        say("once more, in turn: the recipe as it is and the fastest");
        // Among many candidates one may have been lucky. No time limit here: the result is worth a few more runs.
        let outcome = search::run_pairs(recipe, &best, &mut |of| runner.measure(&changes(recipe, of), None));
        report.confirm(fastest, outcome.map(|(_, paired)| paired));
    }
    clock.finish_and_clear();
    report.seconds = started.elapsed().as_secs_f64();
    if report.speedup.is_some() {
        write_recipe(&out, args, &report, best)?;
        report.written = Some(out);
    }
    let text = if args.json { serde_json::to_string(&report).map_err(Failure::running)? } else { table(&report) };
    print(&text)
}

/// The time that the search has taken, on a terminal.
fn clock(max_minutes: f64) -> ProgressBar {
    let clock = if redraws(&io::stderr()) { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    let clock = clock.with_message(format!("of at most {}", duration(60.0 * max_minutes)));
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
        clock.set_style(style);
    }
    clock.enable_steady_tick(Duration::from_millis(200));
    clock
}

fn seconds(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=3600.0).contains(&number), "seconds in [0, 3600]")
}

fn minutes(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0, "minutes above 0")
}

/// Refuses to overwrite a recipe that this command did not write.
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

/// Writes the fastest recipe, with the table of all trials above it.
fn write_recipe(out: &Path, args: &TuneArgs, report: &Report<'_>, mut recipe: Recipe) -> Result<(), Failure> {
    // An output folder of its own, beside that of the original recipe, which may hold a trained run.
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

/// The trials, one per line, the fastest marked, and what they tell.
fn table(report: &Report<'_>) -> String {
    let mut lines = vec![format!(
        "  {:>13}  {:>13}  {:>9}  {:>9}  {:>9}  change",
        "target tok/s", "speed", "step", "data wait", "peak"
    )];
    let mark = |trial: &Trial| if trial.settings == report.fastest { "▶ " } else { "  " };
    lines.extend(report.trials.iter().map(|trial| mark(trial).to_owned() + &line(trial)));
    lines.push(match (report.speedup, &report.not_confirmed) {
        (Some(speedup), _) => format!("fastest: {speedup:.2}x with {}", report.fastest.join(" ")),
        (None, Some(why)) => format!("the fastest trial {why}: the recipe stays"),
        (None, None) if report.trials.len() > 1 && report.trials.iter().all(|trial| trial.result.is_none()) => {
            "no candidate was measured to its end, see above: the recipe stays".to_owned()
        }
        (None, None) => {
            format!("nothing that was tried is faster by {:.0} % or more: the recipe stays", 100.0 * (MIN_GAIN - 1.0))
        }
    });
    let spreads = report.trials.iter().filter_map(|trial| Some(trial.result?.paired.spread)).collect::<Vec<_>>();
    lines.extend(median(&spreads).filter(|spread| *spread > NOISY).map(|spread| {
        format!(
            "this machine is noisy: pairs of the same two runs differ by ±{:.0} %, so smaller gains do not show; close other \
             programs, or give it longer runs by --seconds, and more --max-minutes",
            100.0 * spread
        )
    }));
    lines.extend(report.written.as_ref().map(|path| format!("recipe: {}", path.display())));
    lines.join("\n")
}

fn line(trial: &Trial) -> String {
    let what = if trial.settings.is_empty() { "as the recipe is".to_owned() } else { trial.settings.join(" ") };
    let Some(figures) = &trial.figures else {
        return format!("{:>13}  {what}: {}", "-", trial.left_out.as_deref().unwrap_or("not tried"));
    };
    let mut remarks: Vec<String> = trial.result.iter().map(TrialResult::remark).collect();
    if !trial.keeps_numbers {
        let rows = trial.rows_of_step.map(|rows| format!(": {rows} rows an update"));
        remarks.push(format!("other numbers{}", rows.unwrap_or_default()));
    }
    let remarks = if remarks.is_empty() { String::new() } else { format!("   ({})", remarks.join("; ")) };
    let speed = trial.result.map_or("1.00x".to_owned(), |TrialResult { speedup, paired, .. }| {
        format!("{speedup:.2}x ±{:>3.0} %", 100.0 * paired.spread)
    });
    #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
    let peak = figures.peak_memory_bytes.map_or_else(|| "?".into(), |bytes| fit::size(bytes as f64));
    format!(
        "{:>13.1}  {speed:>13}  {:>7.3} s  {:>8.1}%  {peak:>9}  {what}{remarks}",
        figures.target_tokens_per_second,
        figures.step_seconds,
        100.0 * figures.data_wait_share
    )
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

    #[test]
    fn the_fastest_is_marked_and_a_noisy_machine_is_called_so() {
        let trial = |spread| {
            let paired = Paired { ratio: 1.5, num_pairs: 5, num_faster: 5, spread };
            Trial {
                settings: vec!["data.packing=true".into()],
                keeps_numbers: true,
                rows_of_step: None,
                figures: Some(trial::Figures::default()),
                result: Some(TrialResult { speedup: 1.5, is_faster: true, paired }),
                left_out: None,
            }
        };
        let shown = |spread| {
            let trial = trial(spread);
            let (trials, fastest) = (std::slice::from_ref(&trial), trial.settings.clone());
            table(&Report { trials, fastest, speedup: Some(1.5), ..Report::default() })
        };
        let noisy = shown(0.1);
        assert!(noisy.lines().nth(1).unwrap().starts_with('▶') && noisy.contains("1.50x ± 10 %"), "{noisy}");
        assert!(noisy.contains("noisy: pairs of the same two runs differ by ±10 %") && !shown(0.01).contains("noisy"));
        let untried = Trial { figures: None, result: None, left_out: Some(OUT_OF_TIME.to_owned()), ..trial(0.1) };
        let table = table(&Report { trials: &[untried.clone(), untried], ..Report::default() });
        assert!(table.ends_with("no candidate was measured to its end, see above: the recipe stays"), "{table}");
    }

    #[test]
    fn what_is_not_confirmed_is_reported_and_not_recommended() {
        let last_line = |outcome: Option<Result<f64, String>>| {
            let mut report = Report::default();
            if let Some(outcome) = outcome {
                let paired = outcome.map(|ratio| Paired { ratio, num_pairs: 5, num_faster: 4, spread: 0.1 });
                report.confirm(vec!["data.packing=true".into()], paired);
            }
            table(&report).lines().last().unwrap().to_owned()
        };
        assert_eq!(last_line(Some(Ok(1.5))), "fastest: 1.50x with data.packing=true");
        assert!(last_line(Some(Ok(1.01))).contains("did not stay so"));
        assert!(
            last_line(Some(Err("killed".into()))).contains("could not be measured again (killed): the recipe stays")
        );
        assert!(last_line(None).contains("faster by 2 % or more: the recipe stays"));
    }
}
