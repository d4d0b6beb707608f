//! Adapters and merged models as GGUF files, for llama.cpp and Ollama.
//!
//! Names, order and numbers are those that llama.cpp's own converter writes (`scripts/check_gguf.py` compares).

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::merge::Merging;
use super::{ExportError, HostMatrix, MergeSummary, PromptForm};
use crate::data::tokenizer::Tokenizer;
use crate::device::Dtype;
use crate::files;
use crate::gguf::is_gguf;
use crate::model::weights::{Quantisation, convert};
use crate::ops::low_rank::LowRank;
use crate::schema::Problem;
use crate::spec::ModelConfig;
use crate::spec::gguf::ROPE_FACTORS;

mod file;
mod names;
mod vocabulary;

pub use file::GgufType;
use file::{Gguf, Tensor, Value};

/// Settings of a generation in `generation_config.json`, and their names here.
const SAMPLING: [(&str, &str); 3] = [("top_p", "top_p"), ("min_p", "min_p"), ("temperature", "temp")];

/// Writes the merged model of [`merge`](super::merge()) as one file. `dtype` is the type of its matrices; without it, the
/// model's own, where that has 16 bits, or `f16`. `decoded` as in [`MergeOptions`](super::MergeOptions).
///
/// # Errors
/// As `merge`; an `out` that exists, and what llama.cpp has no place for.
pub fn merge_gguf(
    model: &Path,
    adapter: &Path,
    out: &Path,
    dtype: Option<GgufType>,
    decoded: Option<Quantisation>,
    on_bytes: &dyn Fn(usize, usize),
) -> Result<MergeSummary, ExportError> {
    require_absent(&[out, &modelfile(out)])?;
    let merging = Merging::open(model, adapter, decoded)?;
    let config = &merging.config;
    let form = PromptForm::read(adapter)?;
    let tokenizer = Tokenizer::open(model).map_err(|error| Problem::new(error.to_string()))?;
    let dtype = dtype.unwrap_or_else(|| default_dtype(&merging));
    let factors = names::rope_factors(config)?;
    let factors = factors.into_iter().map(|factors| {
        Tensor::new(ROPE_FACTORS.to_owned(), vec![factors.len()], GgufType::F32, move || Ok(factors.clone()))
    });
    let tensors: Vec<Tensor> = factors.chain(tensors(&merging, dtype, on_bytes)).collect();

    let num_parameters = tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
    let mut metadata = names::general(config, "model", &stem(out), num_parameters);
    metadata.extend(sampling(model));
    metadata.extend(names::shape(config, dtype));
    metadata.extend(vocabulary::vocabulary(model, config, &tokenizer)?);
    let template = match &form {
        Some(PromptForm::ChatTemplate { chat_template: Some(template), .. }) => Some(template.as_str()),
        _ => tokenizer.chat_template(),
    };
    metadata.extend(template.map(|template| ("tokenizer.chat_template".to_owned(), template.into())));
    create_parent(out)?;
    let num_bytes = Gguf { metadata, tensors }.write(out)?;
    write_modelfile(out, form.as_ref(), &tokenizer)?;
    Ok(merging.summary(1, num_bytes))
}

/// Writes the adapter alone, in `f32`, to be loaded beside its base model.
///
/// A file has one scale for all layers, `alpha / r` with each layer's own rank. Where a layer's scale is another
/// (`use_rslora`, `alpha_pattern`), its B carries the difference.
///
/// # Errors
/// An adapter that cannot be read or does not fit the model, or an `out` that exists.
pub fn adapter_gguf(model: &Path, adapter: &Path, out: &Path) -> Result<usize, ExportError> {
    require_absent(&[out])?;
    let described = if is_gguf(model) { model.to_owned() } else { model.join("config.json") };
    let config = ModelConfig::from_file(&described)?;
    let saved = super::read_adapter(adapter)?;
    let selection = super::check_adapter(adapter, &saved, &config)?;
    let mut layers: Vec<_> =
        selection.iter().map(|(layer, linear, shape)| (linear.module_name(layer), linear, shape)).collect();
    layers.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    let num_parameters = layers.iter().map(|(_, linear, _)| config.linear(*linear).iter().product::<usize>()).sum();

    let mut metadata = names::general(&config, "adapter", &stem(out), num_parameters);
    #[expect(clippy::cast_possible_truncation, reason = "the file has f32")]
    let alpha = saved.config.lora_alpha as f32;
    metadata.extend([("adapter.type", "lora".into()), ("adapter.lora.alpha", Value::F32(alpha))].map(named));
    let pairs = layers.iter().filter_map(|(module, _, shape)| Some((module, saved.weights.get(module)?, shape)));
    let tensors = pairs.flat_map(|(module, pair, shape)| {
        #[expect(clippy::cast_precision_loss, reason = "a rank")]
        let in_b = shape.scale / (saved.config.lora_alpha / shape.r as f64);
        adapter_tensors(&config, module, pair, in_b)
    });
    create_parent(out)?;
    Gguf { metadata, tensors: tensors.collect() }.write(out)
}

fn adapter_tensors<'a>(
    config: &'a ModelConfig,
    module: &str,
    pair: &'a LowRank<HostMatrix>,
    in_b: f64,
) -> impl Iterator<Item = Tensor<'a>> + use<'a> {
    let weight = format!("{module}.weight");
    let name = names::tensor_name(&weight).unwrap_or_default();
    let tensor = move |(letter, matrix, scale): (char, &'a HostMatrix, f64)| {
        let is_turned = letter == 'b' && names::is_interleaved(config, &weight);
        let values = move || {
            #[expect(clippy::cast_possible_truncation, reason = "the product is in f32")]
            let scaled: Vec<f32> = matrix.values.iter().map(|value| value * scale as f32).collect();
            Ok(if is_turned { names::interleaved(&scaled, config.head_dim, matrix.num_columns) } else { scaled })
        };
        Tensor::new(format!("{name}.lora_{letter}"), matrix.shape().to_vec(), GgufType::F32, values)
    };
    [('a', &pair.a, 1.0), ('b', &pair.b, in_b)].into_iter().map(tensor)
}

/// Every tensor of the merged model, in the order of Hugging Face's names.
fn tensors<'a>(
    merging: &'a Merging,
    dtype: GgufType,
    on_bytes: &'a dyn Fn(usize, usize),
) -> impl Iterator<Item = Tensor<'a>> {
    let mut expected = merging.config.expected_tensors();
    expected.sort();
    expected.into_iter().filter_map(move |(name, shape)| {
        let (name, stored) = merging.files.tensors().get_key_value(&name)?;
        let values = move || {
            let bytes = merging.tensor(name, stored, on_bytes).bytes()?;
            let values = convert::to_f32(&bytes, stored.float_dtype().unwrap_or(Dtype::F32));
            merging.files.release(stored);
            let width = stored.shape.get(1).copied().unwrap_or(1);
            let is_turned = names::is_interleaved(&merging.config, name);
            Ok(if is_turned { names::interleaved(&values, merging.config.head_dim, width) } else { values })
        };
        Some(Tensor::new(names::tensor_name(name)?, shape, dtype, values))
    })
}

fn default_dtype(merging: &Merging) -> GgufType {
    let is_bf16 = merging.files.tensors().values().any(|stored| stored.float_dtype() == Some(Dtype::Bf16));
    if is_bf16 { GgufType::Bf16 } else { GgufType::F16 }
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

/// Ollama finds the template of a chat model itself, by the one in the file, where it knows it.
fn write_modelfile(gguf: &Path, form: Option<&PromptForm>, tokenizer: &Tokenizer) -> Result<(), ExportError> {
    let mut text = format!("FROM ./{}\n", gguf.file_name().unwrap_or_default().to_string_lossy());
    if form == Some(&PromptForm::Raw) {
        text.push_str("TEMPLATE {{ .Prompt }}\n");
    }
    if let Some(system) = form.and_then(PromptForm::system).filter(|system| !system.contains("\"\"\"")) {
        let _ = writeln!(text, "SYSTEM \"\"\"{system}\"\"\"");
    }
    for stop in tokenizer.eos_ids().iter().filter_map(|id| tokenizer.token_text(*id)) {
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
mod tests {
    use std::sync::Arc;

    use super::super::MergeOptions;
    use super::super::adapter_file::tests::adapter;
    use super::super::write_adapter;
    use super::file::tests::{Read, read};
    use super::*;
    use burn::tensor::Device;

    use crate::lora::config::LoraConfig;
    use crate::model::Storage;
    use crate::model::weights::fixture::{self, tiny_config};
    use crate::model::weights::{GgufWeights, WeightFiles, Weights};
    use crate::ops::linear::Matrix;

    /// A tiny model with the quickstart's tokenizer, and an adapter for it.
    fn folders(config: &LoraConfig) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().join("base");
        std::fs::create_dir(&base).unwrap();
        fixture::write_model(&base, &ModelConfig { vocab_size: 1344, ..tiny_config() }, 1, Dtype::F32);
        let config_json = std::fs::read_to_string(base.join("config.json")).unwrap();
        let config_json = config_json.replace("\"vocab_size\": 256", "\"vocab_size\": 1344");
        std::fs::write(base.join("config.json"), config_json).unwrap();
        let quickstart = Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/model");
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(quickstart.join(name), base.join(name)).unwrap();
        }
        write_adapter(&root.path().join("adapter"), &adapter().weights, config, "org/base").unwrap();
        root
    }

    fn numbers(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    fn adapter_of(config: &LoraConfig) -> Read {
        let root = folders(config);
        let out = root.path().join("new/a.gguf");
        adapter_gguf(&root.path().join("base"), &root.path().join("adapter"), &out).unwrap();
        let error = adapter_gguf(&root.path().join("base"), &root.path().join("adapter"), &out).unwrap_err();
        assert!(error.to_string().contains("a.gguf exists"), "{error}");
        read(&out)
    }

    #[test]
    fn an_adapter_has_the_trained_numbers_and_b_carries_what_alpha_by_rank_does_not_say() {
        let saved = adapter();
        let plain = adapter_of(&saved.config);
        assert_eq!(plain.tensors.len(), 2 * saved.weights.len());
        assert_eq!(plain.metadata["general.type"][8..], *b"adapter");
        #[expect(clippy::cast_possible_truncation)]
        let alpha = saved.config.lora_alpha as f32;
        assert_eq!(numbers(&plain.metadata["adapter.lora.alpha"]), [alpha]);
        let rooted = adapter_of(&LoraConfig { use_rslora: true, ..saved.config.clone() });
        for (module, pair) in &saved.weights {
            let name = names::tensor_name(&format!("{module}.weight")).unwrap();
            let (code, shape, a) = &plain.tensors[&format!("{name}.lora_a")];
            assert_eq!((*code, shape.as_slice()), (0, &[pair.a.num_columns as u64, pair.a.num_rows as u64][..]));
            assert_eq!(numbers(a), pair.a.values);
            let [b, rooted] = [&plain, &rooted].map(|file| numbers(&file.tensors[&format!("{name}.lora_b")].2));
            let is_turned = module.contains("q_proj") || module.contains("k_proj");
            assert_eq!(b != pair.b.values, is_turned, "{module}");
            #[expect(clippy::cast_precision_loss)]
            let root = (pair.a.num_rows as f32).sqrt();
            assert!(b.iter().zip(&rooted).all(|(b, rooted)| (b * root - rooted).abs() <= 1e-6 * b.abs()));
        }
    }

    #[test]
    fn the_merged_file_has_the_merged_folders_numbers_its_tokenizer_and_a_modelfile_beside_it() {
        let root = folders(&adapter().config);
        let form = PromptForm::ChatTemplate { chat_template: Some("{{ mine }}".into()), system: Some("Be.".into()) };
        let [base, adapter, folder, out] = ["base", "adapter", "merged", "a.gguf"].map(|name| root.path().join(name));
        form.write(&adapter).unwrap();
        super::super::merge(&base, &adapter, &folder, MergeOptions::default(), &|_, _| {}).unwrap();
        merge_gguf(&base, &adapter, &out, Some(GgufType::F32), None, &|_, _| {}).unwrap();
        let file = read(&out);
        let merged = WeightFiles::open(&folder).unwrap();
        assert_eq!(file.tensors.len(), merged.tensors().len());
        for (name, stored) in merged.tensors() {
            let (_, shape, bytes) = &file.tensors[&names::tensor_name(name).unwrap()];
            assert!(shape.iter().rev().copied().eq(stored.shape.iter().map(|size| *size as u64)), "{name}");
            let is_turned = name.contains("q_proj") || name.contains("k_proj");
            assert_eq!(numbers(bytes) != merged.load_f32(name, &stored.shape).unwrap(), is_turned, "{name}");
        }
        assert_eq!(file.metadata["tokenizer.chat_template"][8..], *b"{{ mine }}");
        assert_eq!(file.metadata["tokenizer.ggml.tokens"][4..12], 1344u64.to_le_bytes());
        let text = std::fs::read_to_string(root.path().join("a.Modelfile")).unwrap();
        assert!(text.starts_with("FROM ./a.gguf\nSYSTEM \"\"\"Be.\"\"\"\nPARAMETER stop \""), "{text}");
        assert!(text.contains("PARAMETER stop \"<|im_end|>\"\n"), "{text}");

        let again = merge_gguf(&base, &adapter, &out, None, None, &|_, _| {}).unwrap_err().to_string();
        assert!(again.contains("a.gguf exists"), "{again}");
        PromptForm::Raw.write(&adapter).unwrap();
        std::fs::remove_file(&out).unwrap();
        std::fs::remove_file(modelfile(&out)).unwrap();
        merge_gguf(&base, &adapter, &out, Some(GgufType::Q8), None, &|_, _| {}).unwrap();
        assert_eq!(read(&out).tensors["token_embd.weight"].0, 8);
        assert!(std::fs::read_to_string(modelfile(&out)).unwrap().contains("\nTEMPLATE {{ .Prompt }}\n"));
    }

    fn loaded<const D: usize>(tensor: Result<burn::tensor::Tensor<D>, Problem>) -> Vec<f32> {
        tensor.unwrap().to_data().try_to_vec().unwrap()
    }

    #[test]
    fn a_merged_file_is_a_base_with_the_shape_the_tokenizer_and_the_numbers_of_the_merged_folder() {
        let root = folders(&adapter().config);
        let [base, adapter, folder] = ["base", "adapter", "merged"].map(|name| root.path().join(name));
        super::super::merge(&base, &adapter, &folder, MergeOptions::default(), &|_, _| {}).unwrap();
        let merged = WeightFiles::open(&folder).unwrap();
        for (dtype, tolerance) in [(GgufType::F32, 0.0), (GgufType::F16, 5e-4), (GgufType::Q8, 5e-3)] {
            let out = root.path().join(format!("{dtype:?}/a.gguf"));
            merge_gguf(&base, &adapter, &out, Some(dtype), None, &|_, _| {}).unwrap();
            let config = ModelConfig::from_file(&out).unwrap();
            let blocks = &config.quantisation.as_ref().unwrap().blocks;
            // Rows of `down_proj` are no whole blocks.
            assert_eq!(blocks.len(), if dtype == GgufType::Q8 { 12 } else { 0 }, "{blocks:?}");
            let expected = ModelConfig::from_file(&folder.join("config.json")).unwrap();
            let (bos_token_id, eos_token_ids) = (expected.bos_token_id, expected.eos_token_ids.clone());
            let as_json = ModelConfig { bos_token_id, eos_token_ids, quantisation: None, ..config.clone() };
            assert_eq!(as_json, expected);

            let weights = Weights::Gguf(Arc::new(GgufWeights::open(&out, &config).unwrap()));
            weights.check(&config).unwrap();
            for (name, shape) in config.expected_tensors() {
                let expected = merged.load_f32(&name, &shape).unwrap();
                let found: Vec<f32> = match shape[..] {
                    [rows, columns] if name.starts_with("model.layers.") => {
                        let storage = Storage::from(Dtype::F32);
                        let matrix = weights.matrix(&name, [rows, columns], storage, &config, &Device::flex()).unwrap();
                        let num_bytes = blocks.get(&name).map(|bytes| *bytes as f64);
                        let is_in_blocks = matches!(matrix, Matrix::Blocks(_));
                        assert_eq!(is_in_blocks.then(|| matrix.num_bytes()), num_bytes, "{name}");
                        matrix.dense().to_data().try_to_vec().unwrap()
                    }
                    [rows, columns] => loaded(weights.load(&name, [rows, columns], Dtype::F32, &Device::flex())),
                    _ => loaded(weights.load(&name, [shape[0]], Dtype::F32, &Device::flex())),
                };
                let most = |numbers: &mut dyn Iterator<Item = f32>| numbers.fold(0f32, |most, x| most.max(x.abs()));
                let error = most(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
                let bound = tolerance * most(&mut expected.iter().copied());
                assert!(error <= bound && found.len() == expected.len(), "{dtype:?} {name}: {error}");
            }

            let [ours, theirs] = [&out, &folder].map(|path| Tokenizer::open(path).unwrap());
            for text in ["Clara saw\n 12 frogs.  Bären é\u{301} 🙂<|im_end|>", "", " ", "日本"] {
                assert_eq!(ours.encode(text, true).unwrap(), theirs.encode(text, true).unwrap(), "{text:?}");
            }
            assert_eq!(
                (ours.eos(), ours.pad(), ours.chat_template()),
                (theirs.eos(), theirs.pad(), theirs.chat_template())
            );
        }
    }

    #[test]
    fn a_file_that_cannot_be_a_base_says_why_and_a_tokenizer_beside_it_goes_before_its_own() {
        let root = folders(&adapter().config);
        let [base, adapter, out] = ["base", "adapter", "a.gguf"].map(|name| root.path().join(name));
        merge_gguf(&base, &adapter, &out, Some(GgufType::Bf16), None, &|_, _| {}).unwrap();
        let content = std::fs::read(&out).unwrap();
        let put = |bytes: &[u8]| std::fs::write(&out, bytes).unwrap();
        // Another text of the same length.
        let with = |from: &str, to: &str| {
            let at = content.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
            put(&[&content[..at], to.as_bytes(), &content[at + from.len()..]].concat());
            ModelConfig::from_file(&out).map(drop).map_err(|error| error.to_string())
        };
        for (from, to, part) in [
            (
                "llama",
                "gemma",
                "`general.architecture` = \"gemma\" is not supported, expected one of `llama`, `qwen2`, `qwen3`",
            ),
            ("llama.block_count", "llama.block_cOunt", "`llama.block_count` is missing"),
            ("llama.attention.head_count", "llama.attention.head_cOunt", "`llama.attention.head_count` is missing"),
            ("token_embd.weight", "token_Embd.weight", "no tensor `token_embd.weight`"),
            ("\x05\0\0\0\0\0\0\0model", "\x05\0\0\0\0\0\0\0motel", "`general.type` = \"motel\", expected a model"),
            ("GGUF", "GGML", "not a GGUF file"),
        ] {
            let error = with(from, to).unwrap_err();
            assert!(error.contains(part) && error.contains("a.gguf"), "{from}: {error}");
        }
        for length in [content.len() - 1000, 300, 10] {
            put(&content[..length]);
            let error = ModelConfig::from_file(&out).unwrap_err().to_string();
            assert!(error.contains("half-downloaded"), "{length}: {error}");
        }
        with("blk.1.ffn_up", "blk.1.ffn_Up").unwrap();
        let config = ModelConfig::from_file(&out).unwrap();
        let error = GgufWeights::open(&out, &config).unwrap().check(&config).unwrap_err().to_string();
        assert!(
            error.contains("missing: `blk.1.ffn_up.weight`") && error.contains("unexpected: `blk.1.ffn_Up.weight`")
        );
        for (from, to) in
            [("gpt2", "gpt9"), ("gpt-2", "gpt-9"), ("ggml.merges", "ggml.meRges"), ("ggml.tokens", "ggml.tOkens")]
        {
            with(from, to).unwrap();
            let error = Tokenizer::open(&out).unwrap_err().to_string();
            assert!(error.contains("a.gguf") && error.contains("put the model's own tokenizer.json beside"), "{error}");
        }
        put(&content);
        std::fs::copy(base.join("tokenizer.json"), root.path().join("tokenizer.json")).unwrap();
        let tokenizer = Tokenizer::open(&out).unwrap();
        assert_eq!(tokenizer.eos().unwrap().text, "<|im_end|>");
        assert!(tokenizer.chat_template().is_some());
    }

    #[test]
    fn a_tokenizer_that_llama_cpp_has_no_name_for_is_an_error_that_names_the_file() {
        let root = folders(&adapter().config);
        let path = root.path().join("base/tokenizer.json");
        let json = std::fs::read_to_string(&path).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
        json["pre_tokenizer"] = serde_json::json!({"type": "WhitespaceSplit"});
        std::fs::write(&path, json.to_string()).unwrap();
        let [base, adapter, out] = ["base", "adapter", "a.gguf"].map(|name| root.path().join(name));
        let error = merge_gguf(&base, &adapter, &out, None, None, &|_, _| {}).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains("`pre_tokenizer`"), "{error}");
        assert!(error.contains("--adapter-only") && !out.exists());
    }
}
