//! Adds an adapter to its base model: a Hugging Face folder that needs no PEFT.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use safetensors::View;

use super::{ExportError, HostMatrix, PromptForm, SavedAdapter, check_adapter, read_adapter};
use crate::device::Dtype;
use crate::files;
use crate::model::weights::{StoredTensor, WeightFiles, convert};
use crate::ops::cpu::{Weight, linear_backward_input};
use crate::ops::low_rank::LowRank;
use crate::schema::Problem;
use crate::spec::ModelConfig;

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

/// Summary of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeSummary {
    /// Linear layers that the adapter changed.
    pub num_modules: usize,
    /// Weight files.
    pub num_files: usize,
    /// Size of all tensors.
    pub num_bytes: usize,
    /// The model that the adapter's config names as its base.
    pub trained_on: Option<String>,
}

/// Writes `W + scale B A` for every adapted layer, and copies the rest of the model unchanged.
///
/// Sums are computed in `f32` from the base's own files and rounded once, to the base's type. The files are split as in
/// the base. They are written one after the other and tensor by tensor, so that host memory stays below one file's
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
    on_bytes: &dyn Fn(usize, usize),
) -> Result<MergeSummary, ExportError> {
    require_absent_or_empty(out)?;
    let merging = Merging::open(model, adapter)?;
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(ExportError::io("create", parent))?;
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = Unfinished(parent.join(format!(".{name}.{}.tmp", std::process::id())));
    std::fs::create_dir(&unfinished.0).map_err(ExportError::io("create", &unfinished.0))?;

    for (shard, name) in merging.files.shard_names().enumerate() {
        merging.write_shard(shard, &unfinished.0.join(name), on_bytes)?;
    }
    for name in SIDE_FILES.into_iter().chain([INDEX]).filter(|name| model.join(name).is_file()) {
        copy(&model.join(name), &unfinished.0.join(name))?;
    }
    if let Some(PromptForm::ChatTemplate { chat_template: Some(template), .. }) = PromptForm::read(adapter)? {
        // The adapter was trained with this template.
        let path = unfinished.0.join(CHAT_TEMPLATE);
        files::write(&path, template).map_err(ExportError::io("write", &path))?;
    }
    WeightFiles::open(&unfinished.0)?.check(&merging.config)?;
    // Replace an empty folder. A folder with files was refused above; if files were added since, it is refused here.
    if out.is_dir() {
        std::fs::remove_dir(out).map_err(ExportError::io("replace", out))?;
    }
    std::fs::rename(&unfinished.0, out).map_err(ExportError::io("write", out))?;
    files::sync_folder(parent).map_err(ExportError::io("write", parent))?;
    let (num_files, num_bytes) = (merging.files.shard_names().count(), merging.files.num_bytes());
    Ok(merging.summary(num_files, num_bytes))
}

/// A model, and an adapter that fits it.
pub(super) struct Merging {
    pub(super) config: ModelConfig,
    pub(super) files: WeightFiles,
    adapter: SavedAdapter,
    /// The scale of every adapted module.
    scales: BTreeMap<String, f64>,
}

impl Merging {
    pub(super) fn open(model: &Path, adapter: &Path) -> Result<Self, ExportError> {
        let config = ModelConfig::from_file(&model.join("config.json"))?;
        if let Some(stored) = &config.quantisation {
            let problem = Problem::new(format!("the base is stored as {}, whose codes cannot change", stored.method));
            let hint = "merge into the 16-bit model that it was made of; its folder or repository is --model";
            return Err(problem.at(model.display()).hint(hint).into());
        }
        let files = WeightFiles::open(model)?;
        files.check(&config)?;
        let saved = read_adapter(adapter)?;
        let selection = check_adapter(adapter, &saved, &config)?;
        let scales = selection.iter().map(|(layer, linear, shape)| (linear.module_name(layer), shape.scale)).collect();
        Ok(Self { config, files, adapter: saved, scales })
    }

    pub(super) fn tensor<'a>(
        &'a self,
        name: &'a str,
        stored: &'a StoredTensor,
        on_bytes: &'a dyn Fn(usize, usize),
    ) -> MergedTensor<'a> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let pair = self.adapter.weights.get(module).zip(self.scales.get(module).copied());
        let update = pair.zip(stored.float_dtype()).map(|((pair, scale), dtype)| (pair, scale, dtype));
        MergedTensor { files: &self.files, name, stored, update, on_bytes }
    }

    /// Writes one file of the model.
    fn write_shard(&self, shard: usize, path: &Path, on_bytes: &dyn Fn(usize, usize)) -> Result<(), ExportError> {
        let failure = OnceLock::new();
        let tensors = self.files.tensors().iter().filter(|(_, stored)| stored.shard == shard);
        let views = tensors.clone().map(|(name, stored)| {
            let tensor = self.tensor(name, stored, on_bytes);
            (name.as_str(), Written { tensor, failure: &failure })
        });
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

    pub(super) fn summary(self, num_files: usize, num_bytes: usize) -> MergeSummary {
        let trained_on = self.adapter.base_model_name_or_path;
        MergeSummary { num_modules: self.adapter.weights.len(), num_files, num_bytes, trained_on }
    }
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

/// A tensor of the merged model, computed when it is written.
pub(super) struct MergedTensor<'a> {
    files: &'a WeightFiles,
    name: &'a str,
    stored: &'a StoredTensor,
    /// The update that is added, its scale, and the type of the weight.
    update: Option<(&'a LowRank<HostMatrix>, f64, Dtype)>,
    on_bytes: &'a dyn Fn(usize, usize),
}

impl<'a> MergedTensor<'a> {
    /// Its numbers, in the base's type.
    pub(super) fn bytes(&self) -> Result<Cow<'a, [u8]>, Problem> {
        let bytes = self.files.bytes(self.stored);
        (self.on_bytes)(bytes.len(), self.files.num_bytes());
        let Some((pair, scale, dtype)) = self.update else { return Ok(Cow::Borrowed(bytes)) };
        let mut weight = convert::to_f32(bytes, dtype);
        self.files.release(self.stored);
        add_update(&mut weight, pair, scale);
        convert::from_f32(&weight, dtype).map(Cow::Owned).map_err(|convert::Overflow| {
            let problem = Problem::new(format!("a merged value of `{}` is too large for {dtype}", self.name));
            problem.hint("convert the base model to bf16 first")
        })
    }
}

/// A tensor as safetensors writes it, which knows no failure.
struct Written<'a> {
    tensor: MergedTensor<'a>,
    failure: &'a OnceLock<Problem>,
}

impl View for Written<'_> {
    fn dtype(&self) -> safetensors::Dtype {
        self.tensor.stored.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.stored.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.tensor.bytes().unwrap_or_else(|problem| {
            // The first problem is reported, and the unfinished file deleted.
            drop(self.failure.set(problem));
            Cow::Owned(vec![0; self.data_len()])
        })
    }

    fn data_len(&self) -> usize {
        self.tensor.files.bytes(self.tensor.stored).len()
    }
}

/// `weight += scale B A`. The product is rounded before it is scaled, as in PEFT.
fn add_update(weight: &mut [f32], pair: &LowRank<HostMatrix>, scale: f64) {
    let [rank, in_features] = pair.a.shape();
    let mut update = vec![0.0; weight.len()];
    linear_backward_input(&pair.b.values, Weight::f32(&pair.a.values), in_features, rank, &mut update, false);
    #[expect(clippy::cast_possible_truncation, reason = "the sum is in f32")]
    let scale = scale as f32;
    for (weight, update) in weight.iter_mut().zip(update) {
        *weight += scale * update;
    }
}

#[cfg(test)]
mod tests {
    use super::super::adapter_file::tests::adapter;
    use super::super::write_adapter;
    use super::*;
    use crate::model::weights::fixture::{self, tiny_config};

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
        merge(&root.join("base"), &root.join("adapter"), &root.join("out"), &|_, _| ())
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
