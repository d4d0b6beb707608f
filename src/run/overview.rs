//! The values that follow from recipe, model and data, as text: printed by `check`, and by a run before its first step.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use indicatif::HumanBytes;

use super::device_memory::StepMemory;
use super::prepare::Prepared;
use crate::config::{
    GradientCheckpointing, LoraConfig, LrScheduler, ModelOptions, ObjectiveConfig, ObjectiveName, OptimizerName,
    Precision, Quantization, Residency, RowKind,
};
use crate::data::dataset::Dataset;
use crate::data::files::FileInfo;
use crate::device::OpenDevice;
use crate::images::Image;
use crate::lora::FullTensor;
use crate::lora::targets::Selection;
use crate::measure::metrics::Sinks;
use crate::model::Storage;
use crate::model::weights::convert::float_dtype;
use crate::model::weights::{StoredTensor, WeightFiles, Weights};
use crate::ops::cuda::kernel_state;
use crate::recipe::Recipe;
use crate::spec::{Block, Method, ModelConfig, StoredQuantisation};
use crate::train::rollouts::environment_warnings;
use crate::train::schedule::{self, Schedule};
use crate::util::stats::as_f64;
use crate::util::text::{counted, with_commas};

/// The highest learning rate that nobody is warned of: small models learn well at 1e-2.
const MOST_LEARNING_RATE: f64 = 2e-2;

/// Hosts of images that are named.
const MAX_HOSTS: usize = 4;

/// Label of what became of `train.gradient_checkpointing` = "auto".
pub(crate) const CHECKPOINTING: &str = "gradient checkpointing";

/// A label and its value.
pub(crate) type Fact = (&'static str, String);

/// Prints every value on a line of its own; unusual values as warnings.
pub(super) fn note(prepared: &Prepared, data: &Dataset, schedule: &Schedule, sinks: &mut Sinks) {
    let Prepared { recipe, source, selection, about_start, device, memory, .. } = prepared;
    let config = Some(&source.config);
    let weights = weights(&source.weights, config, recipe);
    let mut facts = prepared_facts(recipe, Some(device), config, &weights, Some(selection), Some(memory));
    for info in data.files() {
        let (subject, fact) = file(data, info);
        facts.push((subject, fact + &file_notes(info)));
    }
    if recipe.data.eval_split.is_some() {
        facts.push(held_out(data));
    }
    facts.extend(about_start.clone().map(|about| ("starts from", about)));
    facts.push(batch(recipe));
    for (subject, fact) in facts {
        sinks.note(&format!("{subject}: {fact}"));
    }
    sinks.note(&steps(recipe, data, schedule));
    for warning in data.warnings().into_iter().chain(objective_warnings(recipe, data)) {
        sinks.warn(&warning);
    }
    for warning in prepared_warnings(recipe, Some(device), config).into_iter().chain(prepared.memory_warning(data)) {
        sinks.warn(&warning);
    }
}

/// The parts of a [`Prepared`] that are known. `weights`: how they are stored.
pub(crate) fn prepared_facts(
    recipe: &Recipe,
    open: Option<&OpenDevice>,
    config: Option<&ModelConfig>,
    weights: &str,
    selection: Option<&Selection>,
    memory: Option<&StepMemory>,
) -> Vec<Fact> {
    let mut facts: Vec<Fact> = open.map(|open| device(recipe, open, config)).into_iter().collect();
    if let Some(config) = config {
        facts.push(model(recipe, config, weights));
        facts.extend(
            selection
                .into_iter()
                .flat_map(|selection| [parameters(selection, config, &recipe.objective), layers(selection, config)]),
        );
        facts.extend(selection.and_then(|selection| experts(&recipe.lora, selection, config)));
    }
    let start = recipe.lora.start_from.as_ref();
    facts.extend(start.map(|folder| ("starts from", format!("the adapter in {}", folder.display()))));
    let decision = memory.and_then(|memory| memory.checkpointing.as_ref());
    facts.extend(decision.map(|decision| (CHECKPOINTING, decision.to_string())));
    let from = 100.0 * recipe.train.ship_from;
    let served =
        recipe.train.ship_as.map(|it| format!("{}, trained as such a file after {from:.0} % of the steps", it.name()));
    facts.extend(served.map(|served| ("served as", served)));
    facts
}

/// What may be unintended in a [`Prepared`], memory apart.
pub(crate) fn prepared_warnings(
    recipe: &Recipe,
    open: Option<&OpenDevice>,
    config: Option<&ModelConfig>,
) -> Vec<String> {
    let offload = open.and_then(|open| offload_warning(recipe, open));
    let residency = open.and_then(|open| residency_warning(recipe, open));
    let length = config.and_then(|config| length_warning(recipe, config));
    let codes = config.and_then(|config| codes_warning(recipe, config));
    let half = open.and_then(|open| half_warning(recipe, open));
    let kernels = open.and_then(kernels_warning);
    let of_recipe = [rate_warning(recipe), schedule_warning(recipe)];
    [offload, residency, half, kernels, length, codes].into_iter().chain(of_recipe).flatten().collect()
}

/// A rate that falls, with an optimizer whose average takes the place of that.
fn schedule_warning(recipe: &Recipe) -> Option<String> {
    let is_free = recipe.optimizer.name == OptimizerName::ScheduleFreeAdamw;
    (is_free && recipe.scheduler.lr_scheduler != LrScheduler::Constant).then(|| {
        "`optimizer.name` = \"schedule_free_adamw\" is made for a rate that does not fall\n  hint: set \
         `scheduler.lr_scheduler` to \"constant\""
            .to_owned()
    })
}

/// Arithmetic that the processor has no kernels for.
fn half_warning(recipe: &Recipe, device: &OpenDevice) -> Option<String> {
    (recipe.train.precision == Precision::F16 && !device.is_gpu()).then(|| {
        "`train.precision` = \"f16\" takes several times as long as the others on a CPU, which has no kernels for it\n  \
         hint: \"bf16\""
            .to_owned()
    })
}

/// A GPU that computes without kernels that it should have.
fn kernels_warning(device: &OpenDevice) -> Option<String> {
    let state = kernel_state(&device.device)?;
    let mut by_reason = BTreeMap::<&str, Vec<&str>>::new();
    state.off.iter().for_each(|(name, reason)| by_reason.entry(reason).or_default().push(name));
    let off: Vec<_> = by_reason.iter().map(|(reason, names)| format!("{} ({reason})", names.join(", "))).collect();
    (!off.is_empty()).then(|| format!("computes without CUDA kernels that are faster: {}", off.join(", ")))
}

/// A learning rate far above those of adapters.
fn rate_warning(recipe: &Recipe) -> Option<String> {
    let rate = recipe.optimizer.learning_rate;
    (rate > MOST_LEARNING_RATE).then(|| {
        format!(
            "`optimizer.learning_rate` = {rate} is far above the usual 1e-5 to 1e-3 of adapters\n  hint: 2e-4 is a good start"
        )
    })
}

/// What the rows are to the objective.
pub(crate) fn objective_warnings(recipe: &Recipe, data: &Dataset) -> Vec<String> {
    let objective = &recipe.objective;
    let of_rows = if objective.name == ObjectiveName::Grpo {
        let lengths: Vec<usize> = data.used_lengths().collect();
        room_warning(recipe.data.max_length, objective.max_completion_length, &lengths)
    } else {
        labels_warning(objective, data.num_labels())
    };
    of_rows.into_iter().chain(environment_warnings(objective, data)).collect()
}

/// Warns where prompts leave answers less room than they may take.
fn room_warning(max_length: usize, longest_answer: usize, prompts: &[usize]) -> Option<String> {
    let num_short = prompts.iter().filter(|length| **length + longest_answer > max_length).count();
    let longest = prompts.iter().max().filter(|_| num_short > 0)?;
    Some(format!(
        "{} of {} prompts leave an answer less than {} tokens (`objective.max_completion_length`) within `data.max_length` = {}\n  \
         hint: max_length = {} has room for all",
        with_commas(num_short),
        with_commas(prompts.len()),
        with_commas(longest_answer),
        with_commas(max_length),
        longest + longest_answer
    ))
}

/// Warns where good and bad answers of "kto" weigh differently in all.
fn labels_warning(objective: &ObjectiveConfig, [good, bad]: [usize; 2]) -> Option<String> {
    let ObjectiveConfig { desirable_weight, undesirable_weight, .. } = *objective;
    // A weight of 0 is meant.
    if objective.name != ObjectiveName::Kto || desirable_weight * undesirable_weight <= 0.0 {
        return None;
    }
    if good == 0 || bad == 0 {
        let which = if good == 0 { "bad" } else { "good" };
        return Some(format!("all answers are {which} ones: \"kto\" learns from both\n  hint: `label` says which are"));
    }
    let [of_good, of_bad] = [desirable_weight * as_f64(good), undesirable_weight * as_f64(bad)];
    let ratio = of_good / of_bad;
    // TRL asks for 1 to 4/3.
    let even = if ratio < 0.5 {
        format!("desirable_weight = {:.2}", of_bad / as_f64(good))
    } else if ratio > 2.0 {
        format!("undesirable_weight = {:.2}", of_good / as_f64(bad))
    } else {
        return None;
    };
    Some(format!(
        "{} good answers and {} bad ones, by their weights {ratio:.2} to 1: little is learned from the fewer\n  hint: \
         `objective.{even}` evens it out; TRL advises 1 to 1.33",
        with_commas(good),
        with_commas(bad)
    ))
}

/// The device and its types.
fn device(recipe: &Recipe, device: &OpenDevice, config: Option<&ModelConfig>) -> Fact {
    let precision = recipe.train.precision;
    let storage = held(recipe.storage(config), config, device.is_gpu());
    let OpenDevice { label, reason, .. } = device;
    let precision = match (precision, device.f32_products_are_tf32()) {
        (Precision::F32, true) => "f32 (each product in three of tf32; train.precision = \"tf32\" takes one)",
        (Precision::Tf32, false) => "f32 (this device has no tf32)",
        (Precision::Bf16, _) if multiplies_eight_bits(&recipe.model, config, device) => {
            "bf16 (and fp8: what quantised layers are multiplied with is rounded to it)"
        }
        _ => precision.name(),
    };
    ("device", format!("{label} ({reason}); computes in {precision}, base stored in {storage}"))
}

/// Whether a GPU multiplies with the codes of the base, which are E4M3 numbers.
pub(crate) fn multiplies_eight_bits(model: &ModelOptions, config: Option<&ModelConfig>, device: &OpenDevice) -> bool {
    let is_stored = config.and_then(|config| config.quantisation.as_ref()).is_some_and(StoredQuantisation::is_in_codes);
    let is_used = || kernel_state(&device.device).is_some_and(|state| state.used.contains(&"fp8"));
    model.quantization == Quantization::Fp8 && !is_stored && is_used()
}

/// How the base is held.
pub(crate) fn held(storage: Storage, config: Option<&ModelConfig>, is_gpu: bool) -> String {
    let stored = config.and_then(|config| config.quantisation.as_ref());
    let has_blocks = stored.is_some_and(|stored| stored.method == Method::Gguf && stored.is_in_codes());
    match (has_blocks, is_gpu) {
        (false, _) => storage.to_string(),
        (true, false) => format!("the blocks of the GGUF file, the rest in {storage}"),
        (true, true) => format!("{storage}, decoded from the GGUF file"),
    }
}

/// The model's shape, with a word on its weights.
fn model(recipe: &Recipe, config: &ModelConfig, weights: &str) -> Fact {
    let (num_layers, ModelConfig { model_type, hidden_size, .. }) = (config.num_layers(), config);
    let (path, parameters) = (&recipe.model.path, config.parameters());
    let shape = format!("{model_type}, {num_layers} layers of width {hidden_size}");
    ("model", format!("{path} ({shape}, {parameters}, {weights})"))
}

/// How the weights are stored.
pub(crate) fn weights(weights: &Weights, config: Option<&ModelConfig>, recipe: &Recipe) -> String {
    let types = match weights {
        Weights::Files(files) => file_types(files, config),
        Weights::Gguf(file) => file.types(),
        Weights::Random(_) => return "weights drawn at random".to_owned(),
    };
    let stored = format!("stored as {}", types.join(" and "));
    let copy = config.and_then(|config| weights.copy(config, recipe.storage(Some(config))).ok().flatten());
    let Some(path) = copy else { return stored };
    let is_new = if path.is_file() { "" } else { ", which is written first" };
    format!("{stored}; used from {}{is_new}", path.display())
}

/// The types of the tensors, and what a base that is quantised already is.
fn file_types(files: &WeightFiles, config: Option<&ModelConfig>) -> Vec<String> {
    let quantised = config.and_then(|config| Some((config, config.quantisation.as_ref()?)));
    let mut types: BTreeSet<String> = match quantised {
        None => files.tensors().values().map(dtype).collect(),
        Some((config, _)) => {
            let whole = config.expected_tensors().into_iter();
            whole
                .filter_map(|(name, shape)| files.tensors().get(&name).filter(|stored| stored.shape == shape))
                // The others are codes.
                .filter(|stored| float_dtype(stored.dtype).is_some())
                .map(dtype)
                .collect()
        }
    };
    types.extend(quantised.map(|(_, stored)| stored.method.to_string()));
    types.into_iter().collect()
}

fn dtype(stored: &StoredTensor) -> String {
    format!("{:?}", stored.dtype).to_lowercase()
}

/// How many parameters are trained, and of how many.
fn parameters(selection: &Selection, config: &ModelConfig, objective: &ObjectiveConfig) -> Fact {
    let trainable = selection.num_parameters(config) + objective.num_score_parameters(config.hidden_size);
    let all = config.num_parameters() + trainable;
    #[allow(clippy::cast_precision_loss, reason = "shown with four digits")]
    let percent = 100.0 * trainable as f64 / all as f64;
    let (trainable, all) = (with_commas(trainable), with_commas(all));
    ("trainable params", format!("{trainable} || all params: {all} || trainable%: {percent:.4}"))
}

/// The adapted modules.
fn layers(selection: &Selection, config: &ModelConfig) -> Fact {
    let hits = selection.hits.iter().map(|hits| match &*hits.target {
        "all-linear" => format!("{} (all-linear)", counted(hits.num_hits, "linear layer")),
        target => format!("{} x {target}", hits.num_hits),
    });
    let tokens = Some(selection.num_tokens()).filter(|tokens| *tokens > 0);
    let tokens = tokens
        .map(|tokens| format!("{tokens} x row of embed_tokens (vLLM and llama.cpp take such an adapter only merged)"));
    let new = Some(config.num_new_rows).filter(|new| *new > 0);
    let new = new.map(|new| {
        format!("{} that the model's files do not have, at first the mean of the others", counted(new, "row"))
    });
    let named = |full| if let FullTensor::BlockNorm(_, name) = full { name.to_owned() } else { full.module() };
    let mut modules = BTreeMap::<String, usize>::new();
    selection.modules().for_each(|(full, _)| *modules.entry(named(full)).or_default() += 1);
    let modules = modules.into_iter().map(|(name, count)| {
        format!("{count} x {name} as a whole (vLLM and llama.cpp take such an adapter only merged)")
    });
    ("adapted modules", hits.chain(tokens).chain(modules).chain(new).collect::<Vec<_>>().join(", "))
}

/// That experts are frozen, and the key that adapts them.
fn experts(lora: &LoraConfig, selection: &Selection, config: &ModelConfig) -> Option<Fact> {
    let mixture = config.blocks.iter().find_map(Block::mixture).filter(|_| !selection.adapts_experts())?;
    let rank = (lora.r / mixture.num_per_token).max(1);
    let of = format!("r over the {} of a token", counted(mixture.num_per_token, "expert"));
    Some(("experts", format!("frozen; lora.expert_rank = {rank} ({of}) adapts those that lora.target_modules names")))
}

/// A file of rows.
pub(crate) fn file(data: &Dataset, file: &FileInfo) -> Fact {
    let subject = if file.is_eval { "evaluation data" } else { "training data" };
    let (path, rows, format) = (file.path.display(), counted(file.num_rows, "row"), file.format.name());
    (subject, format!("{path} ({rows}, {format}){}", data.form_of(file)))
}

/// The columns of a file that are not read, and its tokens in the cache.
pub(crate) fn file_notes(file: &FileInfo) -> String {
    let mut notes = String::new();
    if !file.unused_columns.is_empty() {
        notes.push_str(&format!("; columns not read: {}", file.unused_columns.join(", ")));
    }
    if let Some(kept) = file.kept_tokens {
        notes.push_str(&format!("; {kept}"));
    }
    notes
}

/// Images of which something else is seen than one may expect.
const ODD_IMAGES: [(&str, IsOdd); 4] = [
    ("of several pictures, the first is seen", |image| image.odd.moves),
    ("of 16 bits, the upper 8 are seen", |image| image.odd.is_deep),
    ("that may be transparent, seen on white", |image| image.odd.is_transparent),
    ("of a single pixel", |image| image.size == [1, 1]),
];

type IsOdd = fn(&Image) -> bool;

/// The images of rows, if there are any.
pub(crate) fn images(data: &Dataset) -> Option<Fact> {
    let images = data.images()?;
    let all = images.all();
    let tokens = counted(all.iter().map(|image| image.num_tokens()).sum::<usize>(), "token");
    let [kept, unkept] = images.feature_bytes().map(HumanBytes);
    let mut about = format!("{} of {tokens}, {kept} on disk", counted(all.len(), "image"));
    if unkept.0 > 0 {
        about.push_str(&format!(", {unkept} more made in every epoch"));
    }
    let hosts = images.hosts();
    for (host, count) in hosts.iter().take(MAX_HOSTS) {
        about.push_str(&format!("; {count} from {host}"));
    }
    if hosts.len() > MAX_HOSTS {
        let others: usize = hosts.values().skip(MAX_HOSTS).sum();
        about.push_str(&format!("; {others} from {} other hosts", hosts.len() - MAX_HOSTS));
    }
    for (what, is_so) in ODD_IMAGES {
        let count = all.iter().filter(|image| is_so(image)).count();
        if count > 0 {
            about.push_str(&format!("; {count} {what}"));
        }
    }
    (!all.is_empty()).then_some(("images", about))
}

/// The rows of `data.eval_split`.
pub(crate) fn held_out(data: &Dataset) -> Fact {
    let (held_out, left) = (counted(data.num_eval_rows(), "row"), counted(data.num_train_rows(), "row"));
    ("evaluation data", format!("{held_out} held out, {left} left to train on"))
}

fn batch(recipe: &Recipe) -> Fact {
    let (rows, steps) = (recipe.train.micro_batch_size, recipe.train.gradient_accumulation_steps);
    let kind = recipe.data.row_kind;
    let tokens = with_commas(rows * steps * recipe.objective.num_sequences() * recipe.data.max_length);
    let what = match kind {
        RowKind::Pair | RowKind::PairWithPrompt | RowKind::ScoredPair => "pair",
        RowKind::Prompt => "prompt",
        RowKind::Sequence | RowKind::Labelled => "sequence",
    };
    ("effective batch", format!("{} ({rows} x {steps}), at most {tokens} tokens", counted(rows * steps, what)))
}

fn steps(recipe: &Recipe, data: &Dataset, schedule: &Schedule) -> String {
    let (total, warmup) = (schedule.total_steps(), schedule.warmup_steps());
    let per_epoch = steps_per_epoch(recipe, data);
    #[allow(clippy::cast_precision_loss, reason = "shown with two decimals")]
    let epochs = total as f64 / per_epoch.max(1) as f64;
    let warmup = match warmup {
        0 => "no warm-up".to_owned(),
        warmup => format!("warm-up in the first {warmup}"),
    };
    let (total, per_epoch) = (counted(total, "step"), counted(per_epoch, "step"));
    format!("{total}: {epochs:.2} epochs of {per_epoch}; {warmup}{}", ended_by(recipe, data))
}

/// Which of two limits ends the run, where the recipe has both.
pub(crate) fn ended_by(recipe: &Recipe, data: &Dataset) -> String {
    let train = &recipe.train;
    let epochs = |epochs| {
        let batches = batches_per_epoch(recipe, data);
        schedule::total_steps(batches, train.gradient_accumulation_steps, Some(epochs), None)
    };
    earlier_end(train.num_epochs.map(|number| (number, epochs(number))), train.max_steps).unwrap_or_default()
}

/// The first of the limits: epochs with the steps that they are, and steps.
fn earlier_end(epochs: Option<(f64, u64)>, max_steps: Option<u64>) -> Option<String> {
    let ((epochs, steps), max_steps) = epochs.zip(max_steps)?;
    let [epochs, most] = [format!("num_epochs = {epochs}"), format!("max_steps = {max_steps}")];
    match steps.cmp(&max_steps) {
        Ordering::Less => Some(format!("; {epochs} ends it before {most}")),
        Ordering::Greater => Some(format!("; {most} ends it before {epochs}")),
        Ordering::Equal => None,
    }
}

pub(crate) fn steps_per_epoch(recipe: &Recipe, data: &Dataset) -> u64 {
    schedule::steps_per_epoch(batches_per_epoch(recipe, data), recipe.train.gradient_accumulation_steps)
}

/// Steps of the whole run.
pub(crate) fn total_steps(recipe: &Recipe, data: &Dataset) -> u64 {
    let train = &recipe.train;
    let batches = batches_per_epoch(recipe, data);
    schedule::total_steps(batches, train.gradient_accumulation_steps, train.num_epochs, train.max_steps)
}

fn batches_per_epoch(recipe: &Recipe, data: &Dataset) -> usize {
    let Recipe { train, objective, .. } = recipe;
    let batches = usize::try_from(data.batches_per_epoch(train.micro_batch_size)).unwrap_or(usize::MAX);
    schedule::repeated(batches, train.gradient_accumulation_steps, objective.num_iterations)
}

/// Warns where offloading saves nothing.
fn offload_warning(recipe: &Recipe, device: &OpenDevice) -> Option<String> {
    (recipe.train.gradient_checkpointing == GradientCheckpointing::Offload && !device.is_gpu()).then(|| {
        "`train.gradient_checkpointing` = \"offload\" saves nothing here: on the CPU what is kept of blocks is in host memory \
         anyway, and is copied once more\n  hint: set it to true"
            .to_owned()
    })
}

/// Models with fewer parameters lose much by codes of four bits (docs/quantised.md).
const SMALL_MODEL: usize = 1_500_000_000;

/// Warns if a small model is to be quantised to four bits.
fn codes_warning(recipe: &Recipe, config: &ModelConfig) -> Option<String> {
    let ModelOptions { quantization, .. } = recipe.model;
    let is_four_bits = matches!(quantization, Quantization::Nf4 | Quantization::Fp4);
    (is_four_bits && config.quantisation.is_none() && config.num_parameters() < SMALL_MODEL).then(|| {
        format!(
            "4-bit quantisation costs a model this small much of its quality: it has {} parameters\n  hint: \
             model.quantization = \"int8\" costs little; `lora-train help quantised` has figures",
            with_commas(config.num_parameters())
        )
    })
}

/// Warns if the CPU computes and weights are to be in its memory anyway.
fn residency_warning(recipe: &Recipe, device: &OpenDevice) -> Option<String> {
    (recipe.model.residency == Residency::Host && !device.is_gpu()).then(|| {
        "`model.residency` = \"host\" changes nothing here: the CPU computes, and all weights are in its memory\n  hint: \
          \"mapped\" leaves them on disk"
             .to_owned()
    })
}

/// Warns if rows may be longer than the model was made for.
fn length_warning(recipe: &Recipe, config: &ModelConfig) -> Option<String> {
    let (longest, positions) = (recipe.data.max_length, config.max_position_embeddings);
    (longest > positions).then(|| {
        format!(
            "`data.max_length` = {longest} is longer than the {positions} positions that the model was made for\n  hint: \
             set it to {positions} or less"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_kto_that_weigh_differently_come_with_the_weight_that_evens_them_out() {
        let kto = |desirable_weight: f64, undesirable_weight: f64| ObjectiveConfig {
            name: ObjectiveName::Kto,
            desirable_weight,
            undesirable_weight,
            ..ObjectiveConfig::default()
        };
        for (weights, labels, hint) in [
            ((1.0, 1.0), [300, 100], "`objective.undesirable_weight = 3.00`"),
            ((1.0, 2.0), [50, 200], "`objective.desirable_weight = 8.00`"),
            ((1.0, 1.0), [7, 0], "all answers are good ones"),
            ((1.0, 1.0), [0, 7], "all answers are bad ones"),
        ] {
            let warning = labels_warning(&kto(weights.0, weights.1), labels).unwrap();
            assert!(warning.contains(hint), "{warning}");
        }
        for (weights, labels) in [((1.0, 1.0), [130, 100]), ((1.0, 3.0), [300, 100]), ((1.0, 0.0), [9, 1])] {
            assert_eq!(labels_warning(&kto(weights.0, weights.1), labels), None);
        }
        assert_eq!(labels_warning(&ObjectiveConfig::default(), [9, 0]), None);
    }

    #[test]
    fn of_two_limits_the_one_that_ends_the_run_is_named() {
        let of = |steps| earlier_end(Some((1.5, 30)), Some(steps));
        assert_eq!(of(100).unwrap(), "; num_epochs = 1.5 ends it before max_steps = 100");
        assert_eq!(of(7).unwrap(), "; max_steps = 7 ends it before num_epochs = 1.5");
        assert_eq!([of(30), earlier_end(Some((1.5, 30)), None), earlier_end(None, Some(7))], [const { None }; 3]);
    }

    #[test]
    fn prompts_that_leave_an_answer_too_little_room_are_counted() {
        let warning = room_warning(256, 200, &[10, 56, 57, 100]).unwrap();
        assert!(warning.starts_with("2 of 4 prompts") && warning.contains("max_length = 300 has room"), "{warning}");
        assert_eq!(room_warning(256, 200, &[10, 56]), None);
    }
}
