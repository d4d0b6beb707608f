//! `lora-train compare`: runs side by side, a verdict, and an exit code for checks.

use std::fs;
use std::path::{Path, PathBuf};

use crate::insight::report::compare::{Comparison, Limit};
use crate::schema::Problem;
use crate::util::failure::Failure;

use super::report::failure;
use super::{print, say};

/// A run's folder has it from its first step on.
const METRICS_FILE: &str = "metrics.jsonl";

/// Arguments of `lora-train compare`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CompareArgs {
    /// Output folders of runs, or a folder that holds some; the first is the one that the others are compared with. Several
    /// runs of one side are joined by commas: `a1,a2,a3 b1,b2,b3`
    #[arg(value_name = "RUN", required = true, num_args = 1..)]
    pub(crate) runs: Vec<PathBuf>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,

    /// Exit with 1 where a run is worse than the first by more than this: of `tokens_per_second`, `peak_memory` and
    /// `eval_loss`, or of the one that is named, such as `eval_loss=0.5`. Can be given several times
    #[arg(long, value_name = "[FIGURE=]PERCENT")]
    pub(crate) max_regression: Vec<Limit>,
}

pub(crate) fn run(args: &CompareArgs) -> Result<(), Failure> {
    let sides: Vec<Vec<PathBuf>> = args.runs.iter().flat_map(|runs| sides(runs)).collect();
    let (comparison, no_runs) = Comparison::of(&sides).map_err(failure)?;
    if let [runs] = &sides[..] {
        let problem = Problem::new(format!("{}: one run, expected two or more", shown(runs)));
        return Err(problem.hint("name another, or a folder that holds several").into());
    }
    let checked = comparison.check(&args.max_regression).map_err(Failure::input)?;
    let text = if args.json {
        let mut json = serde_json::to_value(&comparison).map_err(Failure::running)?;
        json["regressions"] = serde_json::to_value(&checked.regressions).map_err(Failure::running)?;
        json["not_checked"] = serde_json::to_value(&checked.not_checked).map_err(Failure::running)?;
        json.to_string()
    } else {
        comparison.text()
    };
    print(&text)?;
    for text in &checked.not_checked {
        say(&format!("not checked: {text}"));
    }
    let texts: Vec<&str> = checked.regressions.iter().map(|regression| regression.text.as_str()).collect();
    if !texts.is_empty() {
        no_runs.iter().for_each(|error| say(&format!("error: {error}")));
        return Err(Failure::running(format!("regression\n  {}", texts.join("\n  "))));
    }
    no_runs.into_iter().map(failure).reduce(Failure::and).map_or(Ok(()), Err)
}

/// The sides that an argument names: one, or each run in a folder of runs.
fn sides(runs: &Path) -> Vec<Vec<PathBuf>> {
    let is_run = |folder: &PathBuf| folder.join(METRICS_FILE).is_file();
    if runs.join(METRICS_FILE).exists() {
        return vec![side(runs)];
    }
    let mut within: Vec<PathBuf> =
        fs::read_dir(runs).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    within.retain(is_run);
    within.sort();
    if within.is_empty() { vec![side(runs)] } else { within.into_iter().map(|run| vec![run]).collect() }
}

fn shown(runs: &[PathBuf]) -> String {
    runs.iter().map(|run| run.display().to_string()).collect::<Vec<_>>().join(",")
}

/// The folders of one side.
fn side(runs: &Path) -> Vec<PathBuf> {
    match runs.to_str() {
        // A comma may be part of a name.
        Some(text) if !runs.exists() => text.split(',').filter(|run| !run.is_empty()).map(PathBuf::from).collect(),
        _ => vec![runs.to_owned()],
    }
}
