//! Settings for a model and rows, by what the machine, the model and the first rows are.

use std::path::Path;

use super::InitArgs;
use super::draft::Draft;
use super::mlx;
use super::rows::{FirstRows, look, of_arguments};
use crate::device::{Dtype, OpenDevice, has_bf16_products};
use crate::measure::telemetry::available_host_memory_bytes;
use crate::ops::place::place_on;
use crate::recipe::{Purpose, Recipe};
use crate::run::device_memory::{Resources, StepMemory};
use crate::run::inputs::{self, WeightsFrom};
use crate::run::prepare::Prepared;
use crate::schema::{Override, Problem};
use crate::train::budget::fit::{self, Memories};
use crate::train::budget::images::{ImageMemory, NO_IMAGES};
use crate::train::schedule::{repeated, total_steps};
use crate::util::failure::Failure;
use crate::util::text::{bytes, counted, with_commas};

/// A sequence length that most models and machines take: longer only where rows need it.
const USUAL_LENGTH: usize = 2048;
/// Tokens of a micro-batch beyond which a GPU gains no speed.
const ENOUGH_TOKENS: usize = 16_384;
/// Rows from which on one epoch is enough to begin with.
const MANY_ROWS: usize = 1000;
/// Rows of an evaluation: with more, a figure that is hardly more exact takes longer.
const EVALUATED_ROWS: usize = 256;
/// Evaluations of a run, besides those at its ends.
const NUM_EVALUATIONS: u64 = 10;

/// Why a recipe is in `f16`.
const WITHOUT_BF16: &str = "this card multiplies no bf16, and f32 eight times as slowly";

/// A recipe for a model and rows that fits the device. Rows that cannot be used as they are do not hinder it: it then says
/// what they lack.
pub(super) fn draft(model: &str, data: &str, args: &InitArgs) -> Result<Draft, Failure> {
    let mut draft = Draft::default();
    draft.set("model.path", model, "");
    draft.set("data.train.0.path", data, "");
    if let Some(device) = &args.device {
        draft.set("device.name", device.as_str(), "");
    }
    let changes: Vec<Override> = args.set.iter().map(Override::set).collect();
    Recipe::parse(Path::new("recipe.toml"), &draft.text(), &changes, Purpose::Training)
        .map_err(|problems| of_arguments(problems.into()))?;
    changes.iter().for_each(|change| draft.give(change));
    if let Some(problem) = of_other_form(draft.get("model.path").and_then(toml::Value::as_str).unwrap_or(model)) {
        return Err(problem.into());
    }
    let mut prepared = prepared(&draft).map_err(of_arguments)?;
    let rows = look(&mut draft, &mut prepared)?;
    let stem = args.out.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy());
    draft.set("output_dir", format!("runs/{stem}"), "");
    draft.set("lora.r", 16, "");
    draft.set("lora.lora_alpha", 32, "updates are scaled by lora_alpha / r");
    draft.set("optimizer.learning_rate", prepared.recipe.objective.learning_rate().unwrap_or(2e-4), "");
    if !draft.is_given("scheduler.warmup_steps") {
        draft.set("scheduler.warmup_ratio", 0.03, "");
    }
    match &rows {
        Some(rows) => choose_length(&mut draft, rows, &prepared),
        None => {
            let most = prepared.source.config.max_position_embeddings;
            if prepared.recipe.data.max_length > most && !draft.is_given("data.max_length") {
                draft.set("data.max_length", integer(most), "what this model reads");
            }
        }
    }
    choose_steps(&mut draft, rows.as_ref());
    choose_precision(&mut draft, &prepared.device);
    let images = rows.as_ref().map_or_else(ImageMemory::default, |rows| rows.images.clone());
    fit_memory(&mut draft, &prepared, &images)?;
    if let Some(rows) = &rows {
        choose_evaluations(&mut draft, rows)?;
    }
    draft.header = header(&draft, rows.as_ref(), &prepared);
    Ok(draft)
}

/// Why training cannot start from `model`: it is an adapter, or weights in a form that is not read.
fn of_other_form(model: &str) -> Option<Problem> {
    if let Some(text) = mlx::of_base(model) {
        return Some(Problem::new(text));
    }
    let folder = Path::new(model);
    let config =
        std::fs::read(folder.join("adapter_config.json")).ok().filter(|_| !folder.join("config.json").exists())?;
    let config: serde_json::Value = serde_json::from_slice(&config).ok()?;
    let base = config.get("base_model_name_or_path")?.as_str()?;
    let problem = Problem::new(format!("--model: {model} is an adapter of {base}"));
    Some(problem.hint(format!("--model {base} --set lora.start_from={model} goes on from it")))
}

/// What a draft asks for.
fn prepared(draft: &Draft) -> Result<Prepared, Failure> {
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Training)?;
    Prepared::new(recipe, None, WeightsFrom::Disk, false).or_else(|failure| without_weights(failure, draft))
}

/// A model of the Hub whose weights are not there yet: its configuration is enough.
fn without_weights(failure: Failure, draft: &Draft) -> Result<Prepared, Failure> {
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Training)?;
    if Path::new(&recipe.model.path).exists() {
        Err(failure)
    } else {
        Prepared::new(recipe, None, WeightsFrom::Nowhere, false)
    }
}

/// A length that the rows have, and packing where it saves a GPU half of its work.
fn choose_length(draft: &mut Draft, rows: &FirstRows, prepared: &Prepared) {
    let (longest, most) = (rows.percentile(100), rows.percentile(99));
    // Rows are not cut before their images end.
    let has_images = rows.images != NO_IMAGES;
    let covered = if longest <= USUAL_LENGTH || has_images { longest } else { most.max(USUAL_LENGTH) };
    let most_of_model = prepared.source.config.max_position_embeddings;
    let length = covered.next_multiple_of(128).min(most_of_model);
    let seen = if rows.is_part() { format!("the first {} rows", rows.count) } else { "the rows".into() };
    let reason = if rows.are_windows {
        "a text is cut into rows of this many tokens".to_owned()
    } else {
        format!("{seen} have up to {longest} tokens, 99 % of them up to {most}")
    };
    if longest > most_of_model {
        draft
            .footer
            .push(format!("{seen} have up to {longest} tokens: this model reads {most_of_model}, and they are cut"));
    }
    draft.set("data.max_length", integer(length), reason);
    if prepared.device.is_gpu() && rows.percentile(50) * 2 <= length {
        draft.set("data.packing", true, "most rows are short: several in one sequence, none of which sees another");
    }
}

/// Rows of a step, and epochs. Few rows are seen three times, in small steps.
fn choose_steps(draft: &mut Draft, rows: Option<&FirstRows>) {
    let is_many = rows.is_some_and(|rows| rows.total >= MANY_ROWS);
    draft.set("train.micro_batch_size", if is_many { 16 } else { 8 }, "");
    if !draft.is_given("train.max_steps") {
        draft.set("train.num_epochs", if is_many { 1 } else { 3 }, "");
    }
}

/// Rows that are held out, and steps between evaluations of them: these take a tenth of a run, or somewhat more.
fn choose_evaluations(draft: &mut Draft, rows: &FirstRows) -> Result<(), Failure> {
    if rows.total < 100 || draft.get("data.eval.0.path").is_some() {
        return Ok(());
    }
    let held_out = if rows.total < MANY_ROWS { rows.total / 10 } else { (rows.total / 50).clamp(50, EVALUATED_ROWS) };
    draft.set("data.eval_split", integer(held_out), "rows held out to measure the loss on what was not trained on");
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Training)?;
    let Recipe { train, data, objective, .. } = recipe;
    let mut visited = rows.total - held_out;
    if data.packing {
        visited = (visited * rows.mean_length(data.max_length)).div_ceil(data.max_length);
    }
    let passes = train.gradient_accumulation_steps;
    let batches = repeated(visited.div_ceil(train.micro_batch_size), passes, objective.num_iterations);
    let steps = total_steps(batches, passes, train.num_epochs, train.max_steps);
    draft.set("eval.eval_steps", integer(round(steps / NUM_EVALUATIONS)), "about ten evaluations");
    Ok(())
}

/// A number of steps with one digit that counts, or two.
fn round(steps: u64) -> usize {
    let unit = (0..steps.max(1).ilog10()).fold(1, |unit, _| unit * 10) / 2;
    let unit = unit.max(1);
    usize::try_from((steps / unit * unit).max(1)).unwrap_or(usize::MAX)
}

/// What the device multiplies fastest.
fn choose_precision(draft: &mut Draft, device: &OpenDevice) {
    match device.two_byte_dtype() {
        Some(Dtype::Bf16) if device.is_gpu() || has_bf16_products() => draft.set("train.precision", "bf16", ""),
        Some(Dtype::F16) if device.cuda.is_some() => draft.set("train.precision", "f16", WITHOUT_BF16),
        _ => {}
    }
}

/// As many rows of a step at a time as the memory holds, and what else makes it fit.
fn fit_memory(draft: &mut Draft, prepared: &Prepared, images: &ImageMemory) -> Result<(), Failure> {
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Training)?;
    let place = place_on(prepared.device.kind);
    let mut workload = inputs::workload(&recipe, &prepared.source.config, &prepared.selection, images, place);
    let rows = workload.rows;
    if !["train.micro_batch_size", "train.gradient_accumulation_steps"].iter().any(|key| draft.is_given(key)) {
        let at_once = (ENOUGH_TOKENS / workload.row_length).clamp(1, rows);
        let at_once = (1..=at_once).rev().find(|at_once| rows.is_multiple_of(*at_once)).unwrap_or(1);
        workload.rows = at_once;
        workload.gradient_accumulation_steps = rows / at_once;
        set_rows(draft, at_once, rows / at_once);
    }
    let Some(memories) = memories(&prepared.device) else { return Ok(()) };
    if fit::shortage(&workload, memories, "").is_none() {
        return Ok(());
    }
    let Some(change) = fit::that_fit(&workload, memories).into_iter().next() else {
        let text = fit::shortage(&workload, memories, &prepared.device.label).unwrap_or_default();
        draft.has_mistakes = true;
        draft.footer.push(text.replace("\n  hint: ", "; "));
        return Ok(());
    };
    for setting in change.settings.split(' ') {
        if let Some((key, value)) = setting.split_once('=') {
            let value = value.parse().unwrap_or_else(|_| toml::Value::from(value));
            draft.set(key, value, "so that it fits the memory");
        }
    }
    Ok(())
}

fn set_rows(draft: &mut Draft, micro_batch_size: usize, passes: usize) {
    draft.set("train.micro_batch_size", integer(micro_batch_size), "rows at a time");
    if passes > 1 {
        let rows = micro_batch_size * passes;
        draft.set("train.gradient_accumulation_steps", integer(passes), format!("{rows} rows in a step"));
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
fn memories(device: &OpenDevice) -> Option<Memories> {
    let device_bytes = Resources::of(device).usable_bytes()? as f64;
    let host_bytes = available_host_memory_bytes().map(|bytes| bytes as f64).filter(|_| device.is_gpu());
    Some(Memories { device_bytes, host_bytes })
}

fn integer(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The facts that the choices rest on.
fn header(draft: &Draft, rows: Option<&FirstRows>, prepared: &Prepared) -> Vec<String> {
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Training);
    let config = &prepared.source.config;
    let peak = recipe.ok().map(|recipe| {
        let images = rows.map_or(&NO_IMAGES, |rows| &rows.images);
        let (model, room) = ((config, &prepared.selection), prepared.memory.room());
        let memory = StepMemory::estimate(&recipe, model, images, room, None);
        format!(", about {} of memory", bytes(memory.plan.peak_bytes as u64))
    });
    let about_rows = rows.map(|rows| {
        let files =
            if rows.num_files > 1 { format!(" in {} files", with_commas(rows.num_files)) } else { String::new() };
        format!("; {} of format `{}`{files}", counted(rows.total, "row"), rows.format)
    });
    vec![
        format!("Written by `lora-train init` for {}{}.", prepared.device.label, peak.unwrap_or_default()),
        format!("{} parameters{}.", with_commas(config.num_parameters()), about_rows.unwrap_or_default()),
        "Every key: `lora-train help reference`; one: `lora-train help lora.r`. Changes for one run: --set lora.r=32"
            .into(),
    ]
}
