//! Adapters and merged models as GGUF files, for llama.cpp and Ollama.
//!
//! Names, order and numbers are those that llama.cpp's own converter writes (`scripts/check_gguf.py` compares).

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::merge::{MergedTensor, Merging};
use super::{AdapterWeights, Ends, ExportError, HostMatrix, MergeSummary, PromptForm};
use crate::config::FileType;
use crate::data::tokenizer::Tokenizer;
use crate::device::Dtype;
use crate::lora::Matrices;
use crate::model::weights::{Quantisation, Weights};
use crate::ops::blocks;
use crate::schema::Problem;
use crate::spec::gguf::{
    Coding, Order, Part, curve_key, norms_of_scale, parts_of, rope_factors, row_factors, scale_rows,
    stored_rope_factors,
};
use crate::spec::{Attention, LAYER_INPUT_TABLE, ModelConfig};
use crate::util::files;
use crate::util::gguf::{GgufFile, List, Value, joined};

mod file;
mod gemma3n;
mod gemma4;
mod imatrix;
mod latent;
mod names;
mod types;
mod vocabulary;

use file::{Gguf, Tensor, decode, encode, list, text, too_large};
pub use imatrix::{Imatrix, InputSquares};
pub use names::lost_windows;

/// The key of the chat template.
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
const TOOL_TEMPLATE: &str = "tokenizer.chat_template.tool_use";
/// Settings of a generation in `generation_config.json`, and their names here.
const SAMPLING: [(&str, &str); 3] = [("top_p", "top_p"), ("min_p", "min_p"), ("temperature", "temp")];

/// How a merged model is written as a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct GgufOptions<'a> {
    /// Type of the file; without it, the model's own, where that has 16 bits, or `f16`.
    pub dtype: Option<FileType>,
    /// As in [`MergeOptions`](super::MergeOptions).
    pub decoded: Option<Quantisation>,
    /// What the inputs of its matrices weigh, for types with fewer bits; it is written [beside the file](imatrix_file).
    pub imatrix: Option<&'a Imatrix>,
    /// The adapter with which scales are searched for that the merged one keeps, as it was trained with them.
    pub start: Option<&'a AdapterWeights>,
}

/// Writes the merged model of [`merge`](super::merge()) as one file; the base may be one too.
///
/// # Errors
/// As `merge`; an `out` that exists, and what llama.cpp has no place for.
pub fn merge_gguf(
    model: &Path,
    adapter: &Path,
    out: &Path,
    GgufOptions { dtype, decoded, imatrix, start }: GgufOptions<'_>,
    on_bytes: &dyn Fn(usize, usize),
) -> Result<MergeSummary, ExportError> {
    require_absent(&[out, &modelfile(out), &imatrix_file(out)])?;
    let merging = Merging::open(model, adapter, decoded)?;
    let start = start.map(|weights| merging.with(model, adapter, weights)).transpose()?;
    let config = &merging.config;
    let form = PromptForm::read(adapter)?;
    let tokenizer = Tokenizer::open(&merging.tokenizer).map_err(|error| Problem::new(error.to_string()))?;
    let ends = form.as_ref().map(|form| form.ends(&tokenizer)).unwrap_or_default();
    let float = default_dtype(&merging);
    let dtype = dtype.unwrap_or(float);
    if !dtype.is_for_files() {
        return Err(Problem::new(format!("GGUF has no {}", dtype.name())).hint("--out DIR writes a folder").into());
    }
    let factors = match &merging.base {
        Weights::Gguf(base) => stored_rope_factors(base.file()),
        _ => rope_factors(config),
    };
    let factors = factors
        .into_iter()
        .map(|(name, factors)| Tensor::of(name.to_owned(), vec![factors.len()], move || factors.clone()));
    let mut tensors: Vec<Tensor> = factors.chain(tensors(&merging, start.as_ref(), imatrix, on_bytes)).collect();

    let mut metadata = if let Weights::Gguf(base) = &merging.base {
        of_base(base.file(), dtype)
    } else {
        let num_parameters = tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        let mut metadata = names::general(config, "model", &stem(out), num_parameters)?;
        metadata.extend(sampling(model));
        metadata.extend(names::shape(config, dtype)?);
        metadata.extend(curves(&merging)?);
        metadata.extend(vocabulary::vocabulary(&merging.tokenizer, config, &tokenizer)?);
        metadata
    };
    let templates = match &form {
        Some(PromptForm::ChatTemplate { chat_template: Some(template), .. }) => {
            [(CHAT_TEMPLATE, Some(template.as_str())), (TOOL_TEMPLATE, None)]
        }
        _ => [(CHAT_TEMPLATE, tokenizer.chat_template()), (TOOL_TEMPLATE, tokenizer.tool_template())],
    };
    metadata.extend(templates.into_iter().filter_map(|(key, template)| Some(named((key, text(template?))))));
    add_ends(&mut metadata, &ends);
    let chosen = dtype.choose(&mut tensors, &metadata, float, imatrix.is_some())?;
    create_parent(out)?;
    metadata.extend(imatrix.into_iter().flat_map(|imatrix| imatrix.keys(config, &imatrix_file(out))));
    let num_bytes = Gguf { metadata, tensors }.write(out)?;
    imatrix.map_or(Ok(()), |imatrix| imatrix.write(config, &imatrix_file(out)))?;
    write_modelfile(out, form.as_ref(), &tokenizer, &ends)?;
    let about = |text: &String| format!("answers end with the text {text:?}: for llama-cli, --reverse-prompt {text:?}");
    let about_types = dtype.float().is_none().then(|| chosen.about());
    Ok(MergeSummary { about_ends: ends.text.as_ref().map(about), about_types, ..merging.summary(1, num_bytes) })
}

/// The numbers of xIELU, in a list of all layers for each.
fn curves(merging: &Merging) -> Result<Vec<(String, Value)>, Problem> {
    let mut lists: BTreeMap<&str, Vec<f32>> = BTreeMap::new();
    for (name, shape) in merging.config.expected_tensors() {
        if let Some((key, _)) = curve_key(&name) {
            lists.entry(key).or_default().push(merging.base.scalar(&name, &shape)?);
        }
    }
    Ok(lists.into_iter().map(|(key, numbers)| (key.to_owned(), list(List::F32(numbers)))).collect())
}

/// Names the tokens that end the answers of the training: llama.cpp stops at the end of a text, of a turn and of a message.
fn add_ends(metadata: &mut Vec<(String, Value)>, ends: &Ends) {
    let [end_of_text, end_of_turn, end_of_message] =
        ["eos", "eot", "eom"].map(|name| format!("tokenizer.ggml.{name}_token_id"));
    for token in &ends.tokens {
        let is_known = |(key, value): &(String, Value)| {
            [&end_of_text, &end_of_turn, &end_of_message].contains(&key)
                && matches!(value, Value::U32(id) if *id == token.id)
        };
        if metadata.iter().any(is_known) {
            continue;
        }
        let is_free = |key: &&String| metadata.iter().all(|(other, _)| other != *key);
        let key = [&end_of_turn, &end_of_message].into_iter().find(is_free).unwrap_or(&end_of_turn);
        metadata.retain(|(other, _)| other != key);
        metadata.push((key.clone(), Value::U32(token.id)));
    }
}

/// The metadata of a base that is a file, but for its template and what says how its tensors are stored.
fn of_base(file: &GgufFile, dtype: FileType) -> Vec<(String, Value)> {
    let stays = |key: &str| {
        ![CHAT_TEMPLATE, TOOL_TEMPLATE].contains(&key)
            && key != "general.alignment"
            && !key.starts_with("split.")
            && !key.starts_with("quantize.")
    };
    let keys = file.metadata().iter().filter(|(key, _)| stays(key)).map(|(key, value)| (key.clone(), value.clone()));
    let mut keys: BTreeMap<String, Value> = keys.collect();
    keys.insert("general.file_type".to_owned(), Value::U32(dtype.code()));
    keys.entry("general.quantization_version".to_owned()).or_insert(Value::U32(2));
    keys.into_iter().collect()
}

/// Writes the adapter alone, in `f32`, to be loaded beside its base model.
///
/// A file has one scale for all layers, `alpha / r` with each layer's own rank. Where a layer's scale is another
/// (`use_rslora`, `alpha_pattern`), its B carries the difference.
///
/// # Errors
/// An adapter that cannot be read, does not fit the model or is of a kind that llama.cpp lacks, or an `out` that exists.
pub fn adapter_gguf(model: &Path, adapter: &Path, out: &Path) -> Result<usize, ExportError> {
    require_absent(&[out])?;
    let mut config = ModelConfig::from_model(model)?;
    let mut saved = super::read_adapter(adapter)?.that_writes(adapter)?.named_for(&config);
    saved.grow(&mut config, model, adapter);
    if let Ok(base) = Weights::open(model, &config) {
        saved = saved.without_equal_tables(&base, &config);
    }
    let selection = super::check_adapter(adapter, &saved, &config)?;
    if saved.config.use_dora {
        let problem = Problem::new("llama.cpp has no adapters with `use_dora`").at(adapter.display());
        return Err(problem.hint("leave --adapter-only out: the merged model needs none").into());
    }
    if saved.weights.replaces_weights() {
        let what = match saved.weights.modules().next() {
            _ if saved.config.trainable_token_indices.is_some() => "`trainable_token_indices`",
            Some(_) => "`modules_to_save`",
            None => "an embedding or a head of their own",
        };
        let problem = Problem::new(format!("llama.cpp has no adapters with {what}")).at(adapter.display());
        return Err(problem.hint("leave --adapter-only out: the merged model has these weights").into());
    }
    let mut layers: Vec<_> =
        selection.iter().map(|(layer, site, shape)| (config.module_name(layer, site), (layer, site), shape)).collect();
    layers.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    let num_parameters =
        layers.iter().map(|(_, (layer, site), _)| config.blocks[*layer].sites[*site].num_weights()).sum();

    let mut metadata = names::general(&config, "adapter", &stem(out), num_parameters)?;
    let makes_latents = |layer: usize, site: usize| {
        let block = &config.blocks[layer];
        let attention = block.attention().and_then(Attention::latent).is_some_and(|latent| latent.has(site));
        attention || block.mixture().and_then(|mixture| mixture.latent).is_some_and(|sites| sites.contains(&site))
    };
    if let Some((module, ..)) = layers.iter().find(|(_, (layer, site), _)| makes_latents(*layer, *site)) {
        let message = format!("llama.cpp does not add the adapter of `{module}`, which makes latents or reads them");
        let problem = Problem::new(message).at(adapter.display());
        return Err(problem.hint("leave --adapter-only out: the merged model needs none").into());
    }
    #[expect(clippy::cast_possible_truncation, reason = "the file has f32")]
    let alpha = saved.config.lora_alpha as f32;
    metadata.extend([("adapter.type", text("lora")), ("adapter.lora.alpha", Value::F32(alpha))].map(named));
    let mut tensors = Vec::new();
    for (_, (layer, site), shape) in &layers {
        #[expect(clippy::cast_precision_loss, reason = "a rank")]
        let in_b = shape.scale / (saved.config.lora_alpha / shape.r as f64);
        // Those of experts are one for all of a layer.
        let mut of_experts: BTreeMap<String, Vec<Tensor<'_>>> = BTreeMap::new();
        for site in config.blocks[*layer].of_experts(*site) {
            let own = config.module_name(*layer, site);
            let Some(pair) = saved.weights.get(&own) else { continue };
            for tensor in adapter_tensors(&config, &own, pair, in_b) {
                match shape.num_experts.and_then(|_| joined_of_adapter(&tensor.name)) {
                    Some(name) => of_experts.entry(name).or_default().push(tensor),
                    None => tensors.push(tensor),
                }
            }
        }
        tensors.extend(of_experts.into_iter().map(|(name, matrices)| Tensor::joined(name, matrices)));
    }
    create_parent(out)?;
    Gguf { metadata, tensors }.write(out)
}

/// The name of the tensor that holds a matrix of all experts' adapters.
fn joined_of_adapter(name: &str) -> Option<String> {
    let (weight, matrix) = name.rsplit_once('.')?;
    Some(format!("{}.{matrix}", joined(weight)?.0))
}

fn adapter_tensors<'a>(
    config: &'a ModelConfig,
    module: &str,
    pair: &'a Matrices<HostMatrix>,
    in_b: f64,
) -> impl Iterator<Item = Tensor<'a>> + use<'a> {
    let weight = format!("{module}.weight");
    let order = Order::of(config, &weight);
    let mut before = 0;
    let factors = row_factors(config, &weight);
    parts_of(config, &weight, &[pair.b.num_rows, pair.a.num_columns]).into_iter().flat_map(move |part| {
        let (name, rows) = (part.name, before..before + part.num_rows);
        before = rows.end;
        let factors = &factors;
        [('a', &pair.a, 0..pair.a.num_rows, 1.0), ('b', &pair.b, rows, in_b)].map(|(letter, matrix, rows, scale)| {
            // The columns of a weight are A's.
            let order = order.filter(|order| order.is_of_columns == (letter == 'a'));
            let (shape, width) = (vec![rows.len(), matrix.num_columns], matrix.num_columns);
            let factors = if letter == 'b' { factors.clone() } else { Vec::new() };
            let values = move || {
                #[expect(clippy::cast_possible_truncation, reason = "the product is in f32")]
                let mut scaled: Vec<f32> = matrix.values.iter().map(|value| value * scale as f32).collect();
                scale_rows(&factors, width, &mut scaled);
                let in_file = order.map_or_else(|| scaled.clone(), |order| order.in_file(&scaled, width));
                in_file[rows.start * width..rows.end * width].to_vec()
            };
            Tensor::of(format!("{name}.lora_{letter}"), shape, values)
        })
    })
}

/// Every tensor of the merged model, in the order of Hugging Face's names; the matrices of experts are one for all of a layer. Scales
/// of adapted matrices are those that they have with `start`.
fn tensors<'a>(
    merging: &'a Merging,
    start: Option<&'a Merging>,
    imatrix: Option<&Imatrix>,
    on_bytes: &'a dyn Fn(usize, usize),
) -> Vec<Tensor<'a>> {
    let mut tensors = Vec::new();
    let mut experts: BTreeMap<String, BTreeMap<usize, Tensor<'a>>> = BTreeMap::new();
    for tensor in merging.tensors(on_bytes) {
        // Numbers without dimensions are of towers, which go into no such file.
        let Some((_, of_row)) = tensor.shape.split_first() else { continue };
        let width: usize = of_row.iter().product();
        // What is left of its numbers for the other tensors that it is written as, which follow.
        let rest: Rc<Cell<Option<Numbers>>> = Rc::default();
        let importance = imatrix.and_then(|imatrix| imatrix.of(&merging.config, tensor.name)).map(Rc::new);
        let mut before = 0;
        let of_scale = norms_of_scale(&merging.config, tensor.name).into_iter();
        tensors.extend(of_scale.map(|(name, weight)| Tensor::of(name, vec![weight.len()], move || weight.clone())));
        for part in parts_of(&merging.config, tensor.name, tensor.shape) {
            let (name, mut shape, num_rows) = (part.name.clone(), part.shape.clone(), part.num_rows);
            // Tokens of images and sound have zeros there.
            let is_table = tensor.name == LAYER_INPUT_TABLE;
            let num_added = if is_table { merging.config.vocab_size.saturating_sub(num_rows) } else { 0 };
            shape[0] += num_added;
            let importance = importance.clone().filter(|_| part.turned.is_none());
            let rows = before * width..(before + num_rows) * width;
            before += num_rows;
            let (rest, of) = (rest.clone(), name.clone());
            let row = shape.last().copied().unwrap_or_default();
            let bytes = move |kind| {
                let mut numbers = rest.take().map_or_else(|| Numbers::of(merging, tensor, width), Ok)?;
                let others = numbers.split_off(num_rows * width);
                rest.set(Some(others).filter(|others| !others.values.is_empty()));
                let mut numbers = numbers.in_part(&part, width);
                numbers.values.resize(numbers.values.len() + num_added * width, 0.0);
                let importance = importance.as_ref().map(|importance| &importance[..]);
                let begun = start.filter(|_| !numbers.update.is_empty() && blocks::keeps_scales(kind));
                let begun = begun.and_then(|start| start.tensors(&|_, _| ()).find(|it| it.name == tensor.name));
                let bytes = match begun {
                    None => encode(kind, &numbers.values, row, importance).map_err(|_| too_large(&of))?,
                    Some(begun) => {
                        let begun = part.turn(Numbers::of(merging, begun, width)?.values[rows.clone()].to_vec(), width);
                        let begun = encode(kind, &begun, row, importance).map_err(|_| too_large(&of))?;
                        blocks::encode_again(kind, begun, &numbers.values, row, None).map_err(|_| too_large(&of))?
                    }
                };
                tensor.note_rounding(&numbers.values, &decode(kind, &bytes), &numbers.update);
                Ok(bytes)
            };
            let place = joined(&name);
            let written = Tensor::new(name, shape, bytes);
            match place {
                Some((name, expert)) => drop(experts.entry(name).or_default().insert(expert, written)),
                None => tensors.push(written),
            }
        }
    }
    tensors.extend(gemma3n::unused(&merging.config));
    tensors.extend(experts.into_iter().map(|(name, matrices)| Tensor::joined(name, matrices.into_values().collect())));
    tensors
}

/// The numbers of a tensor, coded and in the order of a file, and the update that they contain; empty for none.
struct Numbers {
    values: Vec<f32>,
    update: Vec<f32>,
}

impl Numbers {
    /// With rows of `width`.
    fn of(merging: &Merging, tensor: MergedTensor<'_>, width: usize) -> Result<Self, Problem> {
        let (mut values, mut update) = tensor.values()?;
        let coding = Coding::of(&merging.config, tensor.name);
        values.iter_mut().for_each(|value| *value = coding.written(*value));
        let factors = row_factors(&merging.config, tensor.name);
        [&mut values, &mut update].into_iter().for_each(|numbers| scale_rows(&factors, width, numbers));
        if let Some(order) = Order::of(&merging.config, tensor.name) {
            values = order.in_file(&values, width);
            if !update.is_empty() {
                update = order.in_file(&update, width);
            }
        }
        Ok(Self { values, update })
    }

    /// Those of a part as they lie in it.
    fn in_part(self, part: &Part, width: usize) -> Self {
        Self { values: part.turn(self.values, width), update: part.turn(self.update, width) }
    }

    fn split_off(&mut self, at: usize) -> Self {
        Self { values: self.values.split_off(at), update: self.update.split_off(at.min(self.update.len())) }
    }
}

/// Of matrices.
fn default_dtype(merging: &Merging) -> FileType {
    let is_bf16 = merging.tensors(&|_, _| ()).any(|tensor| tensor.dtype() == Dtype::Bf16);
    if is_bf16 { FileType::Bf16 } else { FileType::F16 }
}

/// Settings of a generation that the model's makers recommend.
#[expect(clippy::cast_possible_truncation, reason = "the file has f32 and 32-bit integers")]
fn sampling(model: &Path) -> Vec<(String, Value)> {
    let content = std::fs::read(model.join("generation_config.json")).unwrap_or_default();
    let json: serde_json::Value = serde_json::from_slice(&content).unwrap_or_default();
    let numbers = SAMPLING.into_iter().filter_map(|(key, name)| Some((name, Value::F32(json[key].as_f64()? as f32))));
    let top_k = json["top_k"].as_i64().map(|top_k| ("top_k", Value::I32(top_k as i32)));
    numbers.chain(top_k).map(|(name, value)| (format!("general.sampling.{name}"), value)).collect()
}

/// Where the description of the model for Ollama is: beside it.
#[must_use]
pub fn modelfile(gguf: &Path) -> PathBuf {
    gguf.with_extension("Modelfile")
}

/// Where what the inputs of a file's matrices weigh is: beside it.
#[must_use]
pub fn imatrix_file(gguf: &Path) -> PathBuf {
    gguf.with_extension("imatrix.gguf")
}

/// Ollama finds the template of a chat model itself, by the one in the file, where it knows it.
fn write_modelfile(
    gguf: &Path,
    form: Option<&PromptForm>,
    tokenizer: &Tokenizer,
    ends: &Ends,
) -> Result<(), ExportError> {
    let mut text = format!("FROM ./{}\n", gguf.file_name().unwrap_or_default().to_string_lossy());
    if form == Some(&PromptForm::Raw) {
        text.push_str("TEMPLATE {{ .Prompt }}\n");
    }
    if let Some(system) = form.and_then(PromptForm::system).filter(|system| !system.contains("\"\"\"")) {
        let _ = writeln!(text, "SYSTEM \"\"\"{system}\"\"\"");
    }
    let stops: BTreeSet<u32> =
        ends.tokens.iter().map(|token| token.id).chain(tokenizer.eos_ids().iter().copied()).collect();
    let stops = stops.into_iter().filter_map(|id| tokenizer.token_text(id));
    for stop in stops.chain(ends.text.iter().map(|text| text.trim().to_owned())) {
        let _ = writeln!(text, "PARAMETER stop \"{stop}\"");
    }
    let path = modelfile(gguf);
    files::write(&path, text).map_err(ExportError::io("write", &path))
}

fn named((key, value): (&str, Value)) -> (String, Value) {
    (key.to_owned(), value)
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn require_absent(paths: &[&Path]) -> Result<(), ExportError> {
    paths.iter().find(|path| path.exists()).map_or(Ok(()), |path| {
        let problem = Problem::new(format!("{} exists", path.display()));
        Err(problem.hint("give a file that does not exist yet; nothing is overwritten").into())
    })
}

fn create_parent(out: &Path) -> Result<(), ExportError> {
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(ExportError::io("create", parent))
}

#[cfg(test)]
mod tests;
