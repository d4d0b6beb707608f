//! Adds an adapter to its base model: a Hugging Face folder that needs no PEFT.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Value, json};

use self::written::Written;
use super::{ExportError, PromptForm};
use crate::device::Dtype;
use crate::files;
use crate::model::weights::{Quantisation, WeightFiles};
use crate::ops::quantised::Coding;
use crate::schema::Problem;
use crate::spec::ModelConfig;

mod tensor;
mod written;

pub use tensor::Differences;
pub(super) use tensor::Merging;

/// The chat template file, which takes precedence over the template in `tokenizer_config.json`.
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Files of a model besides its weights; copied where the base has them.
const SIDE_FILES: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
];
/// Which tensor is in which shard; copied unchanged into the merged model.
const INDEX: &str = "model.safetensors.index.json";

/// Onto what an adapter is merged, and how the sum is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct MergeOptions {
    /// The codes from which the base's linear layers are decoded first, as the adapter was trained on them.
    pub decoded: Option<Quantisation>,
    /// Type of the tensors; without it, the base's.
    pub dtype: Option<Dtype>,
    /// Codes that the linear layers are written as, in the form of bitsandbytes.
    pub quantise: Option<Coding>,
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
}

/// Writes `W + scale B A` for every adapted layer, and copies the rest of the model unchanged.
///
/// Sums are computed in `f32` from the base's own files and rounded once. The files are split as in the base. They are written one after the other and tensor by tensor, so that host memory stays below one file's
/// size. The folder `out` appears only when it is complete. `on_bytes` is called with the size of each tensor as it is
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
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(ExportError::io("create", parent))?;
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = Unfinished(parent.join(format!(".{name}.{}.tmp", std::process::id())));
    std::fs::create_dir(&unfinished.0).map_err(ExportError::io("create", &unfinished.0))?;

    let mut index = Index::default();
    for (shard, name) in merging.files.shard_names().enumerate() {
        merging.write_shard(shard, &unfinished.0.join(name), options, &mut index, on_bytes)?;
    }
    for name in SIDE_FILES.into_iter().filter(|name| model.join(name).is_file()) {
        copy(&model.join(name), &unfinished.0.join(name))?;
    }
    if model.join(INDEX).is_file() {
        let map = json!({"metadata": {"total_size": index.num_bytes}, "weight_map": index.files});
        write_json(&unfinished.0.join(INDEX), &map)?;
    }
    describe(&unfinished.0.join("config.json"), options)?;
    if let Some(PromptForm::ChatTemplate { chat_template: Some(template), .. }) = PromptForm::read(adapter)? {
        // The adapter was trained with this template.
        let path = unfinished.0.join(CHAT_TEMPLATE);
        files::write(&path, template).map_err(ExportError::io("write", &path))?;
    }
    let config = ModelConfig::from_file(&unfinished.0.join("config.json"))?;
    WeightFiles::open(&unfinished.0)?.check(&config)?;
    // Replace an empty folder. A folder with files was refused above; if files were added since, it is refused here.
    if out.is_dir() {
        std::fs::remove_dir(out).map_err(ExportError::io("replace", out))?;
    }
    std::fs::rename(&unfinished.0, out).map_err(ExportError::io("write", out))?;
    files::sync_folder(parent).map_err(ExportError::io("write", parent))?;
    Ok(merging.summary(merging.files.shard_names().count(), index.num_bytes))
}

/// The tensors that were written.
#[derive(Default)]
struct Index {
    /// The file of each.
    files: BTreeMap<String, String>,
    num_bytes: usize,
}

impl Merging {
    /// Writes one file of the model.
    fn write_shard(
        &self,
        shard: usize,
        path: &Path,
        options: MergeOptions,
        index: &mut Index,
        on_bytes: &dyn Fn(usize, usize),
    ) -> Result<(), ExportError> {
        let failure = OnceLock::new();
        let tensors = self.files.tensors().iter().filter(|(_, stored)| stored.shard == shard);
        let views = tensors.clone().flat_map(|(name, stored)| {
            let dtype = options.dtype.filter(|_| stored.float_dtype().is_some()).or(stored.float_dtype());
            let coding = options.quantise.filter(|_| self.linears.contains(name));
            let quantisation = coding.map(|coding| Quantisation { coding, nested: false });
            Written::all(self.tensor(name, stored, on_bytes), dtype, quantisation, &failure)
        });
        let views: Vec<(String, Written<'_>)> = views.collect();
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        index.files.extend(views.iter().map(|(name, _)| (name.clone(), file.clone().into_owned())));
        index.num_bytes += views.iter().map(|(_, view)| safetensors::View::data_len(view)).sum::<usize>();
        let metadata = self.files.shard_metadata(shard).cloned();
        let written = files::write_with(path, |path| {
            safetensors::serialize_to_file(views, metadata, path).map_err(std::io::Error::other)
        });
        tensors.for_each(|(_, stored)| self.files.release(stored));
        match failure.into_inner() {
            Some(problem) => Err(problem.into()),
            None => written.map_err(ExportError::io("write", path)),
        }
    }

    pub(super) fn summary(&self, num_files: usize, num_bytes: usize) -> MergeSummary {
        let trained_on = self.adapter.base_model_name_or_path.clone();
        let differences = self.differences();
        MergeSummary { num_modules: self.adapter.weights.len(), num_files, num_bytes, trained_on, differences }
    }
}

/// Says in config.json in which types the weights are.
fn describe(path: &Path, options: MergeOptions) -> Result<(), ExportError> {
    if options.dtype.is_none() && options.quantise.is_none() {
        return Ok(());
    }
    let content = std::fs::read(path).map_err(ExportError::io("read", path))?;
    let mut config: Value = serde_json::from_slice(&content).map_err(|error| Problem::new(error.to_string()))?;
    if let Some(dtype) = options.dtype {
        let name = match dtype {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
        };
        for key in ["dtype", "torch_dtype"] {
            if config.get(key).is_some() {
                config[key] = name.into();
            }
        }
    }
    if let Some(coding) = options.quantise {
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

fn require_absent_or_empty(out: &Path) -> Result<(), ExportError> {
    match std::fs::read_dir(out).map(Iterator::count) {
        Ok(0) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        _ => {
            let problem = Problem::new(format!("{} exists and is not empty", out.display()));
            Err(problem.hint("give a folder that does not exist yet; nothing is overwritten").into())
        }
    }
}

fn copy(from: &Path, to: &Path) -> Result<(), ExportError> {
    // Copy only the content, not the permissions: files of a cache are often links to write-protected files.
    let content = std::fs::read(from).map_err(ExportError::io("read", from))?;
    files::write(to, content).map_err(ExportError::io("write", to))
}

#[cfg(test)]
mod tests {
    use super::super::adapter_file::tests::adapter;
    use super::super::write_adapter;
    use burn::tensor::Device;

    use super::*;
    use crate::export::{HostMatrix, SavedAdapter};
    use crate::model::weights::fixture::{self, tiny_config};
    use crate::ops::low_rank::LowRank;

    /// A tiny model and an adapter for it, in a temporary folder.
    fn folders(num_shards: usize, dtype: Dtype, adapter: &SavedAdapter) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("base")).unwrap();
        fixture::write_model(&root.path().join("base"), &tiny_config(), num_shards, dtype);
        std::fs::write(root.path().join("base/tokenizer.json"), "{}").unwrap();
        std::fs::write(root.path().join("base/pytorch_model.bin"), "not for the copy").unwrap();
        write_adapter(&root.path().join("adapter"), &adapter.weights, &adapter.config, "org/base").unwrap();
        root
    }

    fn merge_in(root: &Path) -> Result<MergeSummary, ExportError> {
        merge(&root.join("base"), &root.join("adapter"), &root.join("out"), MergeOptions::default(), &|_, _| ())
    }

    /// `W + scale B A`, in f64.
    fn expected(weight: &[f32], pair: &LowRank<HostMatrix>, scale: f64) -> Vec<f64> {
        let [rank, in_features] = pair.a.shape();
        let number = |index: usize| -> f64 {
            let (row, column) = (index / in_features, index % in_features);
            (0..rank)
                .map(|k| {
                    let (b, a) = (pair.b.values[row * rank + k], pair.a.values[k * in_features + column]);
                    f64::from(b) * f64::from(a)
                })
                .sum()
        };
        weight.iter().enumerate().map(|(index, weight)| f64::from(*weight) + scale * number(index)).collect()
    }

    #[test]
    fn merged_weights_are_the_base_plus_the_scaled_product_in_the_bases_type_and_files() {
        for (num_shards, dtype, epsilon) in
            [(1, Dtype::F32, 1e-6), (3, Dtype::Bf16, 1.0 / 256.0), (2, Dtype::F16, 1.0 / 2048.0)]
        {
            let mut adapter = adapter();
            adapter.config.use_rslora = true;
            adapter.config.lora_alpha = 0.5;
            let scale = 0.5 / 3.0_f64.sqrt();
            let root = folders(num_shards, dtype, &adapter);
            let summary = merge_in(root.path()).unwrap();
            assert_eq!((summary.num_modules, summary.num_files), (4, num_shards));
            assert_eq!(summary.trained_on.as_deref(), Some("org/base"));

            let base = WeightFiles::open(&root.path().join("base")).unwrap();
            let merged = WeightFiles::open(&root.path().join("out")).unwrap();
            assert!(base.shard_names().eq(merged.shard_names()));
            let mut num_merged = 0;
            for (name, stored) in base.tensors() {
                let found = &merged.tensors()[name];
                assert_eq!((found.dtype, found.shard), (stored.dtype, stored.shard));
                let before = base.load_f32(name, &stored.shape).unwrap();
                let after = merged.load_f32(name, &stored.shape).unwrap();
                match adapter.weights.get(name.trim_end_matches(".weight")) {
                    None => assert_eq!(before, after, "{name}"),
                    Some(pair) => {
                        num_merged += 1;
                        assert_ne!(before, after);
                        for (after, expected) in after.iter().zip(expected(&before, pair, scale)) {
                            // Half a unit in the last place of the type, plus the rounding of the sum in f32.
                            let allowed = expected.abs() * epsilon + 1e-6;
                            assert!((f64::from(*after) - expected).abs() <= allowed, "{name}: {after} {expected}");
                        }
                    }
                }
            }
            assert_eq!(num_merged, 4);
            let out = root.path().join("out");
            assert_eq!(std::fs::read_to_string(out.join("tokenizer.json")).unwrap(), "{}");
            assert!(out.join("config.json").is_file() && !out.join("pytorch_model.bin").exists());
            let metadata = merged.shard_metadata(0).unwrap();
            assert_eq!(metadata["format"], "pt");
        }
    }

    #[test]
    fn on_a_quantised_base_the_sum_is_with_the_decoded_weights_of_every_linear_layer() {
        let adapter = adapter();
        let root = folders(1, Dtype::Bf16, &adapter);
        let quantisation = Quantisation { coding: Coding::Nf4, nested: true };
        let options = MergeOptions { decoded: Some(quantisation), dtype: Some(Dtype::F32), quantise: None };
        let [base, out] = ["base", "out"].map(|name| root.path().join(name));
        let summary = merge(&base, &root.path().join("adapter"), &out, options, &|_, _| ()).unwrap();
        let (base, merged) = (WeightFiles::open(&base).unwrap(), WeightFiles::open(&out).unwrap());
        let scale = adapter.config.lora_alpha / 3.0;
        let mut largest = 0.0f32;
        for (name, stored) in base.tensors() {
            let before = base.load_f32(name, &stored.shape).unwrap();
            let after = merged.load_f32(name, &stored.shape).unwrap();
            if !name.ends_with("_proj.weight") {
                assert_eq!(before, after, "{name}");
                continue;
            }
            let fill = |first: usize, to: &mut [f32]| to.copy_from_slice(&before[first..first + to.len()]);
            let shape = [stored.shape[0], stored.shape[1]];
            let decoded = quantisation.quantise(shape, &Device::flex(), fill).unwrap().to_f32();
            largest = before.iter().zip(&decoded).fold(largest, |most, (a, b)| (a - b).abs().max(most));
            match adapter.weights.get(name.trim_end_matches(".weight")) {
                None => assert_eq!(after, decoded, "{name}"),
                Some(pair) => {
                    for (after, expected) in after.iter().zip(expected(&decoded, pair, scale)) {
                        assert!((f64::from(*after) - expected).abs() < 1e-6, "{name}: {after} {expected}");
                    }
                }
            }
        }
        assert_eq!(summary.differences, Differences { written: 0.0, decoded: largest });
        assert!(largest > 0.0);
    }

    #[test]
    fn written_as_codes_a_linear_layer_has_the_names_of_bitsandbytes() {
        let root = folders(2, Dtype::Bf16, &adapter());
        for (coding, extra) in
            [(Coding::Fp4, ["weight.absmax", "weight.quant_map"]), (Coding::Int8, ["SCB", "weight_format"])]
        {
            let out = root.path().join(coding.to_string());
            let options = MergeOptions { quantise: Some(coding), ..MergeOptions::default() };
            let [base, adapter] = ["base", "adapter"].map(|name| root.path().join(name));
            let summary = merge(&base, &adapter, &out, options, &|_, _| ()).unwrap();
            let index: Value = serde_json::from_slice(&std::fs::read(out.join(INDEX)).unwrap()).unwrap();
            assert_eq!(index["metadata"]["total_size"], summary.num_bytes);
            for name in extra {
                let name = format!("model.layers.1.mlp.up_proj.{name}");
                assert!(index["weight_map"][&name].is_string(), "{name} in {index:#}");
            }
            let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
            assert_eq!(config["quantization_config"]["load_in_8bit"], coding == Coding::Int8);
        }
    }

    #[test]
    fn an_output_that_is_not_empty_is_refused_and_an_empty_one_filled() {
        let root = folders(1, Dtype::F32, &adapter());
        let out = root.path().join("out");
        std::fs::create_dir(&out).unwrap();
        std::fs::write(out.join("mine"), "").unwrap();
        let exists = || merge_in(root.path()).unwrap_err().to_string().contains("exists and is not empty");
        assert!(exists());
        std::fs::remove_file(out.join("mine")).unwrap();
        let form = PromptForm::ChatTemplate { chat_template: Some("{{ messages }}\n".into()), system: None };
        form.write(&root.path().join("adapter")).unwrap();
        merge_in(root.path()).unwrap();
        assert_eq!(std::fs::read_to_string(out.join(CHAT_TEMPLATE)).unwrap(), "{{ messages }}\n");
        assert!(exists());
    }

    #[test]
    fn a_failed_merge_leaves_nothing_behind() {
        let mut adapter = adapter();
        adapter.config.lora_alpha = 1e6;
        let root = folders(1, Dtype::F16, &adapter);
        let error = merge_in(root.path()).unwrap_err().to_string();
        assert!(error.contains("is too large for f16"), "{error}");
        let mut names: Vec<_> =
            std::fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["adapter", "base"]);

        adapter.weights.remove("model.layers.0.mlp.down_proj");
        write_adapter(&root.path().join("adapter"), &adapter.weights, &adapter.config, "x").unwrap();
        let error = merge_in(root.path()).unwrap_err().to_string();
        assert!(error.contains("missing: `model.layers.0.mlp.down_proj.lora_A`"), "{error}");
    }
}
