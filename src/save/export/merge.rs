//! Adds an adapter to its base model: a Hugging Face folder that needs no PEFT.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Value, json};

use self::experts::Experts;
use self::written::{ToWrite, Written, torch_name};
use super::adapter_file::{EMBEDDING, HEAD};
use super::tokenizer_files::{TOKENIZER_FILES, copy, copy_named_templates, write_template};
use super::{Ends, ExportError, PromptForm};
use crate::data::tokenizer::{Tokenizer, token_ids};
use crate::device::Dtype;
use crate::model::weights::{Quantisation, WeightFiles, Weights};
use crate::ops::quantised::Coding;
use crate::schema::Problem;
use crate::spec::ModelConfig;
use crate::util::files;

mod experts;
mod packed;
mod tensor;
mod written;

pub use packed::Packing;
pub use tensor::Differences;
pub(super) use tensor::{MergedTensor, Merging};
pub use written::Codes;

/// What `generate` of transformers and servers go by.
const GENERATION_CONFIG: &str = "generation_config.json";
/// Files of a model besides its weights and its tokenizer; copied where the base has them.
const SIDE_FILES: [&str; 4] = ["config.json", GENERATION_CONFIG, "preprocessor_config.json", "processor_config.json"];
/// Which tensor is in which shard; copied unchanged into the merged model.
const INDEX: &str = "model.safetensors.index.json";

/// Onto what an adapter is merged, and how the sum is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct MergeOptions {
    /// The codes from which the base's linear layers are decoded first, as the adapter was trained on them.
    pub decoded: Option<Quantisation>,
    /// Type of the tensors; without it, the base's.
    pub dtype: Option<Dtype>,
    /// Codes that the linear layers are written as.
    pub quantise: Option<Codes>,
}

/// Summary of a merge.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeSummary {
    /// Linear layers that the adapter changed.
    pub num_modules: usize,
    /// Weight files.
    pub num_files: usize,
    /// Size of all tensors.
    pub num_bytes: usize,
    /// The model that the adapter's config names as its base.
    pub trained_on: Option<String>,
    /// How far the weights are from those that were trained.
    pub differences: Differences,
    /// What is to be known about the ends of answers, for people.
    pub about_ends: Option<String>,
    /// Bits that a weight of a quantised file takes, and which tensors have other types than they should, for people.
    pub about_types: Option<String>,
}

/// Writes `W + scale B A` for every adapted layer, and copies the rest of the model unchanged. Layers that the base stores
/// as codes are decoded.
///
/// Sums are computed in `f32` from the base's own files and rounded once. The files are split as in the base, and written
/// one after the other and tensor by tensor, so that host memory holds a few tensors. The folder `out` appears only when it is complete. `on_bytes` is called with the size of each tensor as it is
/// written, and with that of all.
///
/// # Errors
/// A model or adapter that cannot be used, an adapter that does not fit the model, an `out` that is not empty, or a sum
/// that is too large for its type.
pub fn merge(
    model: &Path,
    adapter: &Path,
    out: &Path,
    options: MergeOptions,
    on_bytes: &dyn Fn(usize, usize),
) -> Result<MergeSummary, ExportError> {
    require_absent_or_empty(out)?;
    let merging = Merging::open(model, adapter, options.decoded)?;
    let Weights::Files(base) = &merging.base else {
        let problem = Problem::new(format!("a GGUF file is merged into another, and {} is none", out.display()));
        return Err(problem.at(model.display()).hint("name one: --out mine.gguf").into());
    };
    let whole = merging.whole_modules(options.quantise)?;
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(ExportError::io("create", parent))?;
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    // A fixed name: the next merge overwrites what a signal left behind.
    let unfinished = Unfinished(parent.join(format!(".{name}.partial")));
    drop(std::fs::remove_dir_all(&unfinished.0));
    std::fs::create_dir(&unfinished.0).map_err(ExportError::io("create", &unfinished.0))?;

    // Where one tensor holds all experts of a layer, it is copied as it is, if nothing changes them.
    let apart = |on_bytes| merging.tensors(on_bytes).filter(|tensor| !base.is_part(tensor.name));
    let is_changed = merging.adapter.config.expert_rank.is_some() || options.decoded.is_some();
    let is_decoded =
        merging.tensors(&|_, _| ()).any(|tensor| tensor.is_coded() && (is_changed || !base.is_part(tensor.name)));
    check_joined(base, options, is_decoded, is_changed)?;
    let joined_bytes: usize = base.joined().values().map(|stored| base.bytes(stored).len()).sum();
    let of_parts = || merging.tensors(&|_, _| ()).filter(|tensor| base.is_part(tensor.name));
    let of_joined = if is_changed { of_parts().map(|tensor| tensor.num_bytes()).sum() } else { joined_bytes };
    let all = apart(&|_, _| ()).map(|tensor| tensor.num_bytes()).sum::<usize>() + of_joined;
    let on_bytes: &dyn Fn(usize, usize) = &|size, _| on_bytes(size, all);
    let experts = Experts { base, parts: merging.tensors(on_bytes).map(|tensor| (tensor.name, tensor)).collect() };

    let mut index = Index::default();
    for (shard, name) in base.shard_names().enumerate() {
        let tensors = apart(on_bytes).filter(|tensor| tensor.shard(base) == shard);
        let joined = base.joined().iter().filter(|(_, stored)| stored.shard == shard);
        let failure = OnceLock::new();
        let joined = joined.filter_map(|(name, stored)| {
            let name = stored.nested_name.as_ref().unwrap_or(name);
            if is_changed {
                let joined = experts.joined(name, stored, options.dtype, &failure);
                return joined.map(|(name, joined)| (name, ToWrite::Joined(joined)));
            }
            Some((name.clone(), ToWrite::AsStored(base, stored, on_bytes)))
        });
        let (tensors, joined, metadata) =
            (tensors.collect::<Vec<_>>(), joined.collect(), base.shard_metadata(shard).cloned());
        let path = unfinished.0.join(name);
        merging.write_shard(&tensors, (joined, &failure), metadata, &path, options, &mut index)?;
    }
    if model.join(INDEX).is_file() {
        let map = json!({"metadata": {"total_size": index.num_bytes}, "weight_map": index.files});
        write_json(&unfinished.0.join(INDEX), &map)?;
    }
    let about_ends = write_side_files(&merging, model, adapter, &unfinished.0)?;
    describe(&unfinished.0.join("config.json"), &merging.config, options, is_decoded, &whole)?;
    let config = ModelConfig::from_file(&unfinished.0.join("config.json"))?;
    Weights::open(&unfinished.0, &config)?.check(&config)?;
    // Replace an empty folder. A folder with files was refused above; if files were added since, it is refused here.
    if out.is_dir() {
        std::fs::remove_dir(out).map_err(ExportError::io("replace", out))?;
    }
    std::fs::rename(&unfinished.0, out).map_err(ExportError::io("write", out))?;
    files::sync_folder(parent).map_err(ExportError::io("write", parent))?;
    let summary = merging.summary(index.files.values().collect::<BTreeSet<_>>().len(), index.num_bytes);
    Ok(MergeSummary { about_ends, ..summary })
}

/// Copies what is beside the weights of a model, with the template and the ends of the adapter's training; what people are to know of
/// these.
fn write_side_files(
    merging: &Merging,
    model: &Path,
    adapter: &Path,
    out: &Path,
) -> Result<Option<String>, ExportError> {
    for (folder, names) in [(model, &SIDE_FILES[..]), (&*merging.tokenizer, &TOKENIZER_FILES)] {
        for name in names.iter().filter(|name| folder.join(name).is_file()) {
            copy(&folder.join(name), &out.join(name))?;
        }
    }
    let form = PromptForm::read(adapter)?;
    if let Some(PromptForm::ChatTemplate { chat_template: Some(template), .. }) = &form {
        // The adapter was trained with this template.
        write_template(out, template)?;
    } else {
        copy_named_templates(&merging.tokenizer, out)?;
    }
    // Of an adapter of another program, or of a model without a tokenizer, nothing is known.
    let tokenizer = Tokenizer::open(out).ok();
    let ends = form.zip(tokenizer.as_ref()).map(|(form, tokenizer)| form.ends(tokenizer)).unwrap_or_default();
    write_ends(out, &ends, &merging.config)
}

/// Refuses what tensors that are copied do not allow. `is_decoded`: tensors are written that the base has as codes; `is_changed`:
/// experts are not copied.
fn check_joined(base: &WeightFiles, options: MergeOptions, is_decoded: bool, is_changed: bool) -> Result<(), Problem> {
    let refused = |message: &str, hint: &str| {
        let message =
            format!("experts that are stored as one tensor for all of a layer are copied as they are: {message}");
        Err(Problem::new(message).hint(hint.to_owned()))
    };
    if base.joined().is_empty() || is_changed {
        return Ok(());
    }
    let has_codes = base.joined().values().any(|stored| stored.float_dtype().is_none());
    if has_codes && (options.dtype.is_some() || options.quantise.is_some()) {
        return refused("here as codes, which --dtype and --quantize leave", "leave the option out");
    }
    if has_codes && is_decoded {
        return refused("here as codes, beside others that would be decoded", "serve the adapter beside its base");
    }
    Ok(())
}

/// The tensors that were written.
#[derive(Default)]
struct Index {
    /// The file of each.
    files: BTreeMap<String, String>,
    num_bytes: usize,
}

impl Merging {
    /// Writes one file of the model; none for no tensors. `joined` are tensors that hold several matrices, and where their failure is.
    fn write_shard(
        &self,
        tensors: &[MergedTensor<'_>],
        (joined, failure): (Vec<(String, ToWrite<'_>)>, &OnceLock<Problem>),
        metadata: Option<HashMap<String, String>>,
        path: &Path,
        options: MergeOptions,
        index: &mut Index,
    ) -> Result<(), ExportError> {
        if tensors.is_empty() && joined.is_empty() {
            return Ok(());
        }
        let views = tensors.iter().flat_map(|tensor| {
            let codes = options.quantise.filter(|_| self.codable.contains(tensor.name));
            Written::all(*tensor, options.dtype.unwrap_or(tensor.dtype()), codes, failure)
        });
        let views = views.map(|(name, written)| (name, ToWrite::Merged(written)));
        let views: Vec<(String, ToWrite<'_>)> = views.chain(joined).collect();
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        index.files.extend(views.iter().map(|(name, _)| (name.clone(), file.clone().into_owned())));
        index.num_bytes += views.iter().map(|(_, view)| safetensors::View::data_len(view)).sum::<usize>();
        let written = files::write_with(path, |path| {
            safetensors::serialize_to_file(views, metadata, path).map_err(std::io::Error::other)
        });
        tensors.iter().for_each(MergedTensor::release);
        match failure.get() {
            Some(problem) => Err(problem.clone().into()),
            None => written.map_err(ExportError::io("write", path)),
        }
    }

    /// The linear layers of every kind that are no codes, by the names of their modules.
    ///
    /// # Errors
    /// A model that a form of compressed-tensors has no place for.
    fn whole_modules(&self, codes: Option<Codes>) -> Result<Vec<String>, Problem> {
        let Some(Codes::Packed(packing)) = codes else { return Ok(Vec::new()) };
        if self.config.blocks.iter().any(|block| block.mixture().is_some()) {
            let problem = Problem::new("experts are written in no form of compressed-tensors");
            return Err(problem.hint("a GGUF file has them in blocks: --out mine.gguf --dtype q4_k_m"));
        }
        let mut whole = vec![HEAD.trim_end_matches(".weight").to_owned()];
        for tensor in self.tensors(&|_, _| ()).filter(|tensor| tensor.shape.len() == 2 && tensor.name != EMBEDDING) {
            if !self.codable.contains(tensor.name) {
                whole.extend(tensor.name_in_file().strip_suffix(".weight").map(str::to_owned));
            } else if !packing.divides(tensor.shape[1]) {
                let problem = Problem::new(format!("`{}` has rows of {}", tensor.name, tensor.shape[1]));
                return Err(problem.hint("--dtype fp8 takes rows of any length"));
            }
        }
        whole.sort();
        whole.dedup();
        Ok(whole)
    }

    pub(super) fn summary(&self, num_files: usize, num_bytes: usize) -> MergeSummary {
        let trained_on = self.adapter.base_model_name_or_path.clone();
        let differences = self.differences();
        let num_modules = self.adapter.weights.len();
        MergeSummary { num_modules, num_files, num_bytes, trained_on, differences, about_ends: None, about_types: None }
    }
}

/// Lets generation stop where the answers of the training end, besides where it stops already; says what it did.
fn write_ends(folder: &Path, ends: &Ends, model: &ModelConfig) -> Result<Option<String>, ExportError> {
    let path = folder.join(GENERATION_CONFIG);
    let read = |path: &Path| -> Result<Value, ExportError> {
        let content = std::fs::read(path).map_err(ExportError::io("read", path))?;
        serde_json::from_slice(&content).map_err(|error| Problem::new(error.to_string()).at(path.display()).into())
    };
    let (mut config, has_file) = if path.is_file() { (read(&path)?, true) } else { (json!({}), false) };
    let own: Vec<u32> = token_ids(&config["eos_token_id"]).collect();
    // Without the file, transformers goes by config.json.
    let stops = if has_file { &own } else { &model.eos_token_ids };
    let missing: Vec<_> = ends.tokens.iter().filter(|token| !stops.contains(&token.id)).collect();
    if missing.is_empty() {
        let about = |text: &String| {
            format!("answers end with the text {text:?}: other programs stop there where it is their `stop`")
        };
        return Ok(ends.text.as_ref().map(about));
    }
    if !has_file {
        let of_model = read(&folder.join("config.json"))?;
        let of_text = if of_model["text_config"].is_object() { &of_model["text_config"] } else { &of_model };
        for key in ["bos_token_id", "pad_token_id"].into_iter().filter(|key| !of_text[*key].is_null()) {
            config[key] = of_text[key].clone();
        }
    }
    let old = if own.is_empty() { &model.eos_token_ids } else { &own };
    config["eos_token_id"] = old.iter().copied().chain(missing.iter().map(|token| token.id)).collect();
    write_json(&path, &config)?;
    let missing: Vec<&str> = missing.iter().map(|token| &*token.text).collect();
    Ok(Some(format!("answers end with {}: {GENERATION_CONFIG} stops there now, too", missing.join(" or "))))
}

/// Says in config.json in which types the weights are, and how many rows the embedding has. `is_decoded`: it says that they are
/// codes; `whole`: linear layers that are none.
fn describe(
    path: &Path,
    model: &ModelConfig,
    options: MergeOptions,
    is_decoded: bool,
    whole: &[String],
) -> Result<(), ExportError> {
    let is_coded = options.quantise.is_some() || is_decoded;
    if options.dtype.is_none() && !is_coded && model.num_new_rows == 0 {
        return Ok(());
    }
    let content = std::fs::read(path).map_err(ExportError::io("read", path))?;
    let mut config: Value = serde_json::from_slice(&content).map_err(|error| Problem::new(error.to_string()))?;
    if model.num_new_rows > 0 {
        let is_below = config["text_config"].is_object();
        let of_text = if is_below { &mut config["text_config"] } else { &mut config };
        of_text["vocab_size"] = model.vocab_size.into();
    }
    if let Some(config) = config.as_object_mut().filter(|_| options.dtype.is_some() || is_coded) {
        config.shift_remove("quantization_config");
    }
    if let Some(dtype) = options.dtype {
        for key in ["dtype", "torch_dtype"] {
            if config.get(key).is_some() {
                config[key] = torch_name(dtype).into();
            }
        }
    }
    if let Some(Codes::Packed(packing)) = options.quantise {
        config["quantization_config"] = packing.config(whole);
    }
    if let Some(Codes::Bitsandbytes(coding)) = options.quantise {
        let is_int8 = coding == Coding::Int8;
        let mut method = json!({"quant_method": "bitsandbytes", "load_in_8bit": is_int8, "load_in_4bit": !is_int8});
        if !is_int8 {
            method["bnb_4bit_quant_type"] = coding.to_string().into();
        }
        config["quantization_config"] = method;
    }
    write_json(path, &config)
}

fn write_json(path: &Path, value: &Value) -> Result<(), ExportError> {
    files::write(path, format!("{value:#}\n")).map_err(ExportError::io("write", path))
}

/// A folder that is deleted unless it was renamed to its final name.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // After the rename nothing has this name.
        drop(std::fs::remove_dir_all(&self.0));
    }
}

pub(super) fn require_absent_or_empty(out: &Path) -> Result<(), ExportError> {
    match std::fs::read_dir(out).map(Iterator::count) {
        Ok(0) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        _ => {
            let problem = Problem::new(format!("{} exists and is not empty", out.display()));
            Err(problem.hint("give a folder that does not exist yet; nothing is overwritten").into())
        }
    }
}

#[cfg(test)]
mod tests;
