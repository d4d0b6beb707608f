//! Parts of a plan that can be measured: the time of a step by running some, the number of steps and their tokens by
//! reading the rows.

use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::data::cache::CacheSettings;
use crate::data::config::DataConfig;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::failure::Failure;
use crate::hub::Progress;
use crate::recipe::{Recipe, RecipeArgs};
use crate::run::inputs::ModelSource;
use crate::train::flops::StepFlops;
use crate::train::forecast::Forecast;
use crate::train::memory::Workload;

/// Time of a step on full-length rows, from `lora-train bench` in a process of its own, because it loads the model.
/// `has_warmup_steps`: the recipe gives `scheduler.warmup_steps`, which may be more than the steps run here.
///
/// # Errors
///
/// Those of the steps.
pub(super) fn step_seconds(args: &RecipeArgs, has_warmup_steps: bool) -> Result<f64, Failure> {
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
    let told = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let error = told.split_once("error: ").map_or(&*told, |(_, error)| error);
        return Err(Failure::running(format!("no step could be taken: {}", error.trim())));
    }
    let report = String::from_utf8_lossy(&output.stdout);
    let report = report.lines().last().and_then(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let seconds = report.and_then(|report| report["step_seconds"].as_f64());
    seconds.ok_or_else(|| Failure::running("`lora-train bench` printed no time of a step"))
}

/// The steps from the training rows, or one line on why these cannot be read here. A large file is not tokenised for
/// it.
pub(super) fn forecast(
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
    Dataset::open(&config, Arc::new(tokenizer), recipe.seed, &options)
        .and_then(|data| Forecast::new(&data, &recipe.train, &flops, is_padded))
        .map_err(|error| first_line(error.to_string()))
}
