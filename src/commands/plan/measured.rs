//! What of a plan can be known better than by reckoning: the time of a step by taking some, the number of steps by looking
//! at the rows.

use std::process::{Command, Stdio};

use crate::data::cache::CacheSettings;
use crate::data::pipeline::OpenOptions;
use crate::failure::Failure;
use crate::hub::Progress;
use crate::recipe::{Recipe, RecipeArgs};
use crate::run::inputs::ModelSource;
use crate::train::schedule::total_steps;

/// Files of this size and more are tokenised when they are opened, which a plan does not wait for.
const MAX_DATA_BYTES: u64 = 16 << 20;

/// Time of a step on full-length rows: `lora-train bench` in a process of its own, since it loads the model.
/// `has_warmup_steps`: the recipe gives `scheduler.warmup_steps`, which may be more than are taken here.
///
/// # Errors
///
/// What the steps end with.
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

/// Steps of the whole run. Where `train.max_steps` does not say so, the rows are counted; `None` where they are not there,
/// or where counting them would take long.
pub(super) fn num_steps(recipe: &Recipe, source: &ModelSource) -> Option<u64> {
    let files = recipe.data.train.iter().flat_map(|file| glob::glob(&file.path).into_iter().flatten().flatten());
    let bytes: u64 = files.filter_map(|path| std::fs::metadata(path).ok()).map(|file| file.len()).sum();
    if recipe.data.packing || bytes == 0 || bytes >= MAX_DATA_BYTES {
        return recipe.train.max_steps;
    }
    let options = OpenOptions { cache: CacheSettings::default(), progress: Progress::Quiet, is_stopped: &|| false };
    let Ok(data) = source.open_data(&recipe.data, recipe.seed, &options) else { return recipe.train.max_steps };
    let train = &recipe.train;
    let batches = usize::try_from(data.batches_per_epoch(train.micro_batch_size)).ok()?;
    Some(total_steps(batches, train.gradient_accumulation_steps, train.num_epochs, train.max_steps))
}
