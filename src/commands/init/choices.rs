//! Settings for a model and rows, by what the machine, the model and the first rows are.

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::InitArgs;
use super::draft::Draft;
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::data::error::DataError;
use crate::device::{Dtype, OpenDevice};
use crate::hub::Progress;
use crate::measure::telemetry::available_host_memory_bytes;
use crate::ops::kernels::place_on;
use crate::recipe::{Purpose, Recipe};
use crate::run::device_memory::{Resources, StepMemory};
use crate::run::inputs::{self, WeightsFrom, data_failure};
use crate::run::prepare::Prepared;
use crate::schema::{Override, Problem, Problems};
use crate::train::fit::{self, Memories};
use crate::util::failure::Failure;
use crate::util::text::{bytes, with_commas};

/// Rows of each file that are looked at.
const MAX_ROWS: usize = 1000;
/// A sequence length that most models and machines take: longer only where rows need it.
const USUAL_LENGTH: usize = 2048;
/// Tokens of a micro-batch beyond which a GPU gains no speed.
const ENOUGH_TOKENS: usize = 16_384;

/// A recipe for a model and rows that fits the device.
pub(super) fn draft(model: &str, data: &str, args: &InitArgs) -> Result<Draft, Failure> {
    let mut draft = Draft::default();
    draft.set("model.path", model, "");
    draft.set("data.train.0.path", data, "");
    if let Some(device) = &args.device {
        draft.set("device.name", device.as_str(), "");
    }
    let mut prepared = prepared(&draft).map_err(of_arguments)?;
    let rows = match Rows::look(&prepared) {
        Ok(rows) => rows,
        Err(failure) => Rows::of_preferences(&mut draft, &mut prepared).ok_or_else(|| of_arguments(failure))?,
    };
    let stem = args.out.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy());
    draft.set("output_dir", format!("runs/{stem}"), "");
    draft.set("lora.r", 16, "");
    draft.set("lora.lora_alpha", 32, "updates are scaled by lora_alpha / r");
    draft.set("optimizer.learning_rate", prepared.recipe.objective.learning_rate().unwrap_or(2e-4), "");
    draft.set("scheduler.warmup_ratio", 0.03, "");
    choose_length(&mut draft, &rows, &prepared);
    choose_steps(&mut draft, &rows);
    choose_precision(&mut draft, &prepared.device);
    fit_memory(&mut draft, &prepared)?;
    draft.header = header(&draft, &rows, &prepared);
    Ok(draft)
}

/// What a draft asks for.
fn prepared(draft: &Draft) -> Result<Prepared, Failure> {
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Training)?;
    Prepared::new(recipe, None, WeightsFrom::Disk, false).or_else(|failure| without_weights(failure, draft))
}

/// Mistakes in keys that arguments gave name the arguments.
fn of_arguments(failure: Failure) -> Failure {
    let Failure::Input(Problems(problems)) = failure else { return failure };
    let renamed = problems.into_iter().map(|problem| {
        let message = problem.message.replace("`model.path`", "--model").replace("`data.train[0].path`", "--data");
        let message = message.replace("`device.name`", "--device");
        Problem { place: None, message, excerpt: None, ..problem }
    });
    Failure::Input(Problems(renamed.collect()))
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

/// What the first rows show.
struct Rows {
    /// Rows that were looked at.
    count: usize,
    /// Whether there are more.
    is_part: bool,
    /// Tokens a row, ascending.
    lengths: Vec<usize>,
    format: &'static str,
}

impl Rows {
    /// Tokenises the first rows of each file.
    fn look(prepared: &Prepared) -> Result<Self, Failure> {
        let tokenizer = prepared.source.tokenizer().map_err(|failure| failure.about("model.path"))?;
        let options = OpenOptions {
            cache: CacheSettings::default(),
            progress: Progress::Quiet,
            max_rows: Some(MAX_ROWS),
            ..OpenOptions::default()
        };
        let data = Dataset::open(&prepared.recipe.data, Arc::new(tokenizer), 0, &options).map_err(data_failure)?;
        let length = |index: usize| data.train_row(index).map(|(_, row)| row.full_length);
        let lengths = (0..data.num_train_rows()).into_par_iter().map(length).collect::<Result<Vec<_>, DataError>>();
        let mut lengths = lengths.map_err(data_failure)?;
        lengths.sort_unstable();
        let format = data.files().first().map_or("", |file| file.format.name());
        Ok(Self { count: lengths.len(), is_part: lengths.len() >= MAX_ROWS, lengths, format })
    }

    /// The first rows where they are those of preferences, with the objective for them in `draft` and `prepared`.
    fn of_preferences(draft: &mut Draft, prepared: &mut Prepared) -> Option<Self> {
        [("dpo", "the rows have a chosen and a rejected answer"), ("kto", "the rows have answers with a label")]
            .into_iter()
            .find_map(|(name, reason)| {
                let changes = [Override::set(format!("objective.name={name}"))];
                let recipe =
                    Recipe::parse(Path::new("recipe.toml"), &draft.text(), &changes, Purpose::Training).ok()?;
                prepared.recipe = recipe;
                let rows = Self::look(prepared).ok()?;
                draft.set("objective.name", name, reason);
                Some(rows)
            })
    }

    /// Length that `percent` of the rows do not exceed.
    fn percentile(&self, percent: usize) -> usize {
        let rank = (self.lengths.len() * percent).div_ceil(100).max(1);
        self.lengths.get(rank - 1).copied().unwrap_or(0)
    }
}

/// A length that the rows have, and packing where it saves a GPU half of its work.
fn choose_length(draft: &mut Draft, rows: &Rows, prepared: &Prepared) {
    let (longest, most) = (rows.percentile(100), rows.percentile(99));
    let covered = if longest <= USUAL_LENGTH { longest } else { most.max(USUAL_LENGTH) };
    let length = covered.next_multiple_of(128).min(prepared.source.config.max_position_embeddings);
    let seen = if rows.is_part { format!("the first {} rows", rows.count) } else { "the rows".into() };
    let reason = format!("{seen} have up to {longest} tokens, 99 % of them up to {most}");
    draft.set("data.max_length", integer(length), reason);
    if prepared.device.is_gpu() && rows.percentile(50) * 2 <= length {
        draft.set("data.packing", true, "most rows are short: several in one sequence, none of which sees another");
    }
}

/// Rows of a step, epochs and evaluations. Few rows are seen three times, in small steps.
fn choose_steps(draft: &mut Draft, rows: &Rows) {
    let is_many = rows.is_part;
    draft.set("train.micro_batch_size", if is_many { 16 } else { 8 }, "");
    draft.set("train.num_epochs", if is_many { 1 } else { 3 }, "");
    if rows.count >= 100 {
        let reason = "rows held out to measure the loss on what was not trained on";
        draft.set("data.eval_split", if is_many { toml::Value::Float(0.02) } else { toml::Value::Float(0.1) }, reason);
        draft.set("eval.eval_steps", 50, "");
    }
}

fn choose_precision(draft: &mut Draft, device: &OpenDevice) {
    if device.is_gpu() && device.supports(Dtype::Bf16) {
        draft.set("train.precision", "bf16", "");
    }
}

/// As many rows of a step at a time as the memory holds, and what else makes it fit.
fn fit_memory(draft: &mut Draft, prepared: &Prepared) -> Result<(), Failure> {
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Training)?;
    let place = place_on(prepared.device.kind);
    let mut workload = inputs::workload(&recipe, &prepared.source.config, &prepared.selection, place);
    let rows = workload.rows;
    let at_once = (ENOUGH_TOKENS / workload.row_length).clamp(1, rows);
    let at_once = (1..=at_once).rev().find(|at_once| rows.is_multiple_of(*at_once)).unwrap_or(1);
    workload.rows = at_once;
    workload.gradient_accumulation_steps = rows / at_once;
    set_rows(draft, at_once, rows / at_once);
    let Some(memories) = memories(&prepared.device) else { return Ok(()) };
    if fit::shortage(&workload, memories, "").is_none() {
        return Ok(());
    }
    let Some(change) = fit::that_fit(&workload, memories).into_iter().next() else {
        let text = fit::shortage(&workload, memories, &prepared.device.label).unwrap_or_default();
        return Err(Failure::input(text));
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
fn header(draft: &Draft, rows: &Rows, prepared: &Prepared) -> Vec<String> {
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Training);
    let config = &prepared.source.config;
    let peak = recipe.ok().map(|recipe| {
        let memory = StepMemory::estimate(&recipe, config, &prepared.selection, &prepared.device, None);
        format!(", about {} of memory", bytes(memory.plan.peak_bytes as u64))
    });
    let count = if rows.is_part { format!("more than {}", with_commas(rows.count)) } else { with_commas(rows.count) };
    vec![
        format!("Written by `lora-train init` for {}{}.", prepared.device.label, peak.unwrap_or_default()),
        format!("{} parameters; {count} rows of format `{}`.", with_commas(config.num_parameters()), rows.format),
        "Every key: `lora-train help reference`; one: `lora-train help lora.r`. Changes for one run: --set lora.r=32"
            .into(),
    ]
}
