use super::super::MergeOptions;
use super::super::adapter_file::tests::adapter;
use super::super::{adapter_weights, write_adapter};
use super::file::list;
use super::file::tests::{Read, read};
use super::*;
use crate::spec::gguf::tensor_name;
use burn::tensor::Device;
use serde_json::json;

use crate::config::{InitLoraWeights, LoraConfig};
use crate::lora::AdapterSet;
use crate::model::Storage;
use crate::model::weights::fixture::{self, tiny_config};
use crate::model::weights::{WeightFiles, Weights};
use crate::ops::linear::Matrix;
use crate::util::gguf::List;

/// A tiny model with the quickstart's tokenizer, and an adapter for it.
fn folders(config: &LoraConfig, dtype: Dtype) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("base");
    std::fs::create_dir(&base).unwrap();
    fixture::write_model(&base, &ModelConfig { vocab_size: 1344, ..tiny_config() }, 1, dtype);
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

fn of_type(dtype: FileType) -> GgufOptions<'static> {
    GgufOptions { dtype: Some(dtype), ..GgufOptions::default() }
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn adapter_of(config: &LoraConfig) -> Read {
    let root = folders(config, Dtype::F32);
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
    for (module, pair) in &*saved.weights {
        let name = tensor_name(&tiny_config(), &format!("{module}.weight")).unwrap();
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
fn adapters_of_experts_are_one_for_all_of_a_layer() {
    let root = tempfile::tempdir().unwrap();
    let [base, adapter, out] = ["base", "adapter", "a.gguf"].map(|name| root.path().join(name));
    std::fs::create_dir(&base).unwrap();
    std::fs::write(base.join("config.json"), include_str!("../../../../tests/golden/gpt_oss/config.json")).unwrap();
    let config = ModelConfig::from_file(&base.join("config.json")).unwrap();
    let lora = LoraConfig { r: 4, lora_alpha: 6.0, expert_rank: Some(3), ..LoraConfig::default() };
    let selection = lora.select(&config).unwrap();
    let set = AdapterSet::new(&config, &selection, InitLoraWeights::Gaussian, 0.0, 3, &Device::flex());
    let mut weights = adapter_weights(&set);
    // B is zero at the start.
    for pair in weights.values_mut() {
        pair.b.values = pair.a.values.iter().copied().cycle().take(pair.b.values.len()).collect();
    }
    write_adapter(&adapter, &weights, &lora, "base").unwrap();
    adapter_gguf(&base, &adapter, &out).unwrap();
    let file = read(&out);
    assert_eq!(numbers(&file.metadata["adapter.lora.alpha"]), [4.5]);
    for (name, [inputs, outputs]) in [("gate", [64, 56]), ("up", [64, 56]), ("down", [56, 64])] {
        for (letter, shape) in [("a", [inputs, 3, 6]), ("b", [3, outputs, 6])] {
            let (_, found, bytes) = &file.tensors[&format!("blk.1.ffn_{name}_exps.weight.lora_{letter}")];
            assert_eq!(found[..], shape);
            let of_expert = |expert| {
                let pair = &weights[&format!("model.layers.1.mlp.experts.{expert}.{name}_proj")];
                if letter == "a" { pair.a.values.clone() } else { pair.b.values.clone() }
            };
            assert_eq!(numbers(bytes), (0..6).flat_map(of_expert).collect::<Vec<f32>>());
        }
    }
    // Attention has rank 4 and the same scale, which is in B.
    let (_, _, bytes) = &file.tensors["blk.1.attn_output.weight.lora_b"];
    let own = &weights["model.layers.1.self_attn.o_proj"].b.values;
    assert!(numbers(bytes).iter().zip(own).all(|(found, own)| (found - own * 4.0 / 3.0).abs() <= 1e-6 * own.abs()));
}

#[test]
fn the_merged_file_has_the_merged_folders_numbers_its_tokenizer_and_a_modelfile_beside_it() {
    // A base in bf16, of which f32 is written.
    let root = folders(&adapter().config, Dtype::Bf16);
    let form = PromptForm::ChatTemplate { chat_template: Some("{{ mine }}".into()), system: Some("Be.".into()) };
    let [base, adapter, folder, out] = ["base", "adapter", "merged", "a.gguf"].map(|name| root.path().join(name));
    form.write(&adapter).unwrap();
    let options = MergeOptions { dtype: Some(Dtype::F32), ..MergeOptions::default() };
    super::super::merge(&base, &adapter, &folder, options, &|_, _| {}).unwrap();
    merge_gguf(&base, &adapter, &out, of_type(FileType::F32), &|_, _| {}).unwrap();
    let file = read(&out);
    let merged = WeightFiles::open(&folder).unwrap();
    assert_eq!(file.tensors.len(), merged.tensors().len());
    for (name, stored) in merged.tensors() {
        let (_, shape, bytes) = &file.tensors[&tensor_name(&tiny_config(), name).unwrap()];
        assert!(shape.iter().rev().copied().eq(stored.shape.iter().map(|size| *size as u64)), "{name}");
        let is_turned = name.contains("q_proj") || name.contains("k_proj");
        assert_eq!(numbers(bytes) != merged.load_f32(name, &stored.shape).unwrap(), is_turned, "{name}");
    }
    assert_eq!(file.metadata["tokenizer.chat_template"][8..], *b"{{ mine }}");
    assert_eq!(file.metadata["tokenizer.ggml.tokens"][4..12], 1344u64.to_le_bytes());
    let text = std::fs::read_to_string(root.path().join("a.Modelfile")).unwrap();
    assert!(text.starts_with("FROM ./a.gguf\nSYSTEM \"\"\"Be.\"\"\"\nPARAMETER stop \""), "{text}");
    assert!(text.contains("PARAMETER stop \"<|im_end|>\"\n"), "{text}");

    let again = merge_gguf(&base, &adapter, &out, GgufOptions::default(), &|_, _| {}).unwrap_err().to_string();
    assert!(again.contains("a.gguf exists"), "{again}");
    PromptForm::Raw.write(&adapter).unwrap();
    std::fs::remove_file(&out).unwrap();
    std::fs::remove_file(modelfile(&out)).unwrap();
    merge_gguf(&base, &adapter, &out, of_type(FileType::Q8), &|_, _| {}).unwrap();
    assert_eq!(read(&out).tensors["token_embd.weight"].0, 8);
    assert!(std::fs::read_to_string(modelfile(&out)).unwrap().contains("\nTEMPLATE {{ .Prompt }}\n"));
}

#[test]
fn where_answers_end_is_known_to_a_merged_folder_and_to_a_merged_file() {
    let root = folders(&adapter().config, Dtype::F32);
    let [base, adapter] = ["base", "adapter"].map(|name| root.path().join(name));
    let chat = |end: &str| PromptForm::ChatTemplate {
        chat_template: Some(format!("{{% for m in messages %}}<|im_start|>{{{{ m.content }}}}{end}{{% endfor %}}")),
        system: None,
    };
    // By config.json generation stops at token 7; the tokenizer's EOS is <|im_end|>, 2.
    let config = std::fs::read_to_string(base.join("config.json")).unwrap();
    let config = config.replace("\"eos_token_id\": 2", "\"eos_token_id\": 7, \"pad_token_id\": 3");
    std::fs::write(base.join("config.json"), config).unwrap();
    for (index, (form, ids, eot, stops)) in [
        (chat("<|endoftext|>"), Some(json!([7, 0])), Some(0), &["<|endoftext|>", "<|im_end|>"][..]),
        (chat("<|im_end|>"), Some(json!([7, 2])), None, &["<|im_end|>"]),
        (PromptForm::Raw, Some(json!([7, 2])), None, &["<|im_end|>"]),
        (chat("\n### End\n"), None, None, &["<|im_end|>", "### End"]),
    ]
    .into_iter()
    .enumerate()
    {
        form.write(&adapter).unwrap();
        let [folder, file] = ["", ".gguf"].map(|end| root.path().join(format!("{index}{end}")));
        let summary = super::super::merge(&base, &adapter, &folder, MergeOptions::default(), &|_, _| {}).unwrap();
        assert!(summary.about_ends.is_some());
        let written = std::fs::read_to_string(folder.join("generation_config.json")).ok();
        let written = written.map(|text| serde_json::from_str::<serde_json::Value>(&text).unwrap());
        assert_eq!(written, ids.map(|ids| json!({"bos_token_id": 1, "pad_token_id": 3, "eos_token_id": ids})));
        merge_gguf(&base, &adapter, &file, GgufOptions::default(), &|_, _| {}).unwrap();
        let metadata = read(&file).metadata;
        let id = |name: &str| metadata.get(&format!("tokenizer.ggml.{name}_token_id")).map(|bytes| bytes[0]);
        assert_eq!([id("eos"), id("eot"), id("eom")], [Some(2), eot, None]);
        let modelfile = std::fs::read_to_string(modelfile(&file)).unwrap();
        for stop in stops {
            assert!(modelfile.contains(&format!("PARAMETER stop \"{stop}\"\n")), "{modelfile}");
        }
        // What is there already stays as it is.
        std::fs::write(folder.join("generation_config.json"), "{\"eos_token_id\":[0,2]}").unwrap();
        let again = root.path().join(format!("{index}-again"));
        super::super::merge(&folder, &adapter, &again, MergeOptions::default(), &|_, _| {}).unwrap();
        assert_eq!(std::fs::read_to_string(again.join("generation_config.json")).unwrap(), "{\"eos_token_id\":[0,2]}");
    }
}

fn loaded<const D: usize>(tensor: Result<burn::tensor::Tensor<D>, Problem>) -> Vec<f32> {
    tensor.unwrap().to_data().try_to_vec().unwrap()
}

#[test]
fn a_merged_file_is_a_base_with_the_shape_the_tokenizer_and_the_numbers_of_the_merged_folder() {
    let root = folders(&adapter().config, Dtype::F32);
    let [base, adapter, folder] = ["base", "adapter", "merged"].map(|name| root.path().join(name));
    super::super::merge(&base, &adapter, &folder, MergeOptions::default(), &|_, _| {}).unwrap();
    let merged = WeightFiles::open(&folder).unwrap();
    for (dtype, tolerance) in [(FileType::F32, 0.0), (FileType::F16, 5e-4), (FileType::Q8, 5e-3)] {
        let out = root.path().join(format!("{dtype:?}/a.gguf"));
        merge_gguf(&base, &adapter, &out, of_type(dtype), &|_, _| {}).unwrap();
        let config = ModelConfig::from_file(&out).unwrap();
        let blocks = &config.quantisation.as_ref().unwrap().blocks;
        // Rows of `down_proj` are no whole blocks.
        assert_eq!(blocks.len(), if dtype == FileType::Q8 { 12 } else { 0 }, "{blocks:?}");
        let expected = ModelConfig::from_file(&folder.join("config.json")).unwrap();
        let (bos_token_id, eos_token_ids) = (expected.bos_token_id, expected.eos_token_ids.clone());
        let as_json = ModelConfig { bos_token_id, eos_token_ids, quantisation: None, ..config.clone() };
        assert_eq!(as_json, expected);

        let weights = Weights::open(&out, &config).unwrap();
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
fn into_a_file_an_adapter_is_merged_as_the_file_decodes_and_the_rest_is_the_files_own() {
    let root = folders(&adapter().config, Dtype::F32);
    let [base, folder, first, second] = ["base", "adapter", "a/a.gguf", "b/b.gguf"].map(|name| root.path().join(name));
    merge_gguf(&base, &folder, &first, of_type(FileType::Q8), &|_, _| {}).unwrap();
    let config = ModelConfig::from_model(&first).unwrap();
    let reported = std::cell::Cell::new((0, 0));
    let on_bytes = |written, all| reported.set((reported.get().0 + written, all));
    let summary = merge_gguf(&first, &folder, &second, of_type(FileType::F32), &on_bytes).unwrap();
    assert_eq!((summary.num_modules, summary.num_files, reported.get().0), (4, 1, reported.get().1));

    let weights = [&first, &second].map(|path| Weights::open(path, &config).unwrap());
    let saved = adapter();
    for (name, shape) in config.expected_tensors() {
        let [before, after] = weights.each_ref().map(|weights| match shape[..] {
            [rows, columns] => loaded(weights.load(&name, [rows, columns], Dtype::F32, &Device::flex())),
            _ => loaded(weights.load(&name, [shape[0]], Dtype::F32, &Device::flex())),
        });
        let Some(pair) = saved.weights.get(name.trim_end_matches(".weight")) else {
            assert!(before == after, "{name}");
            continue;
        };
        let (width, scale) = (pair.a.num_columns, saved.config.lora_alpha / 3.0);
        for (index, (before, after)) in before.iter().zip(&after).enumerate() {
            let term = |k: usize| pair.b.values[index / width * 3 + k] * pair.a.values[k * width + index % width];
            let expected = f64::from(*before) + scale * f64::from(term(0) + term(1) + term(2));
            assert!((f64::from(*after) - expected).abs() < 1e-5, "{name} {index}: {after} {expected}");
        }
    }
    let [mut before, mut after] = [&first, &second].map(|path| read(path).metadata);
    let types = [&mut before, &mut after].map(|metadata| metadata.remove("general.file_type").unwrap());
    assert_eq!(types, [7u32, 0].map(|code| code.to_le_bytes().to_vec()));
    assert_eq!(before, after);

    // Blocks become f16 unless the embedding says otherwise.
    let third = root.path().join("c.gguf");
    merge_gguf(&first, &folder, &third, GgufOptions::default(), &|_, _| {}).unwrap();
    assert_eq!(read(&third).tensors["blk.0.attn_q.weight"].0, 1);
    let into_folder = super::super::merge(&first, &folder, &root.path().join("d"), MergeOptions::default(), &|_, _| {});
    assert!(into_folder.unwrap_err().to_string().contains("--out mine.gguf"));
}

#[test]
fn metadata_of_every_type_stays_and_what_says_how_a_file_was_split_or_quantised_goes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gguf");
    let kept = [
        ("a", Value::U8(1)),
        ("b", Value::I8(-1)),
        ("c", Value::U16(2)),
        ("d", Value::I16(-2)),
        ("e", Value::U64(1 << 40)),
        ("f", Value::I64(-1 << 40)),
        ("g", Value::F64(0.1)),
        ("general.file_type", Value::U32(1)),
        ("general.quantization_version", Value::U32(3)),
        ("h", list(List::U8(vec![1, 2]))),
        ("i", list(List::Bool(vec![true, false]))),
        ("j", list(List::U64(vec![7]))),
        ("k", list(List::F64(vec![0.2, 0.3]))),
        ("l", list(List::Array(vec![List::I16(vec![1]), List::String(vec!["é".into(), String::new()])]))),
        ("m", list(List::I8(vec![-5]))),
        ("n", list(List::I64(vec![]))),
    ]
    .map(named);
    let lost = [
        ("general.alignment", Value::U32(32)),
        ("split.count", Value::U16(1)),
        ("quantize.imatrix.file", text("x.dat")),
        ("tokenizer.chat_template", text("{{ old }}")),
    ]
    .map(named);
    Gguf { metadata: [&kept[..], &lost].concat(), tensors: vec![] }.write(&path).unwrap();
    assert_eq!(of_base(&GgufFile::open(&path).unwrap(), FileType::F16), kept);
}

#[test]
fn a_file_that_cannot_be_a_base_says_why_and_a_tokenizer_beside_it_goes_before_its_own() {
    let root = folders(&adapter().config, Dtype::F32);
    let [base, adapter, out] = ["base", "adapter", "a.gguf"].map(|name| root.path().join(name));
    merge_gguf(&base, &adapter, &out, of_type(FileType::Bf16), &|_, _| {}).unwrap();
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
            "grok9",
            "`general.architecture` = \"grok9\" is not supported, expected one of `llama`, `mistral3`, \
             `qwen2`, `qwen3`, `qwen2moe`, `qwen3moe`, `gpt-oss`, `qwen35`",
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
    let error = Weights::open(&out, &config).unwrap().check(&config).unwrap_err().to_string();
    assert!(error.contains("missing: `blk.1.ffn_up.weight`") && error.contains("unexpected: `blk.1.ffn_Up.weight`"));
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
    let root = folders(&adapter().config, Dtype::F32);
    let path = root.path().join("base/tokenizer.json");
    let json = std::fs::read_to_string(&path).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
    json["pre_tokenizer"] = serde_json::json!({"type": "WhitespaceSplit"});
    std::fs::write(&path, json.to_string()).unwrap();
    let [base, adapter, out] = ["base", "adapter", "a.gguf"].map(|name| root.path().join(name));
    let error = merge_gguf(&base, &adapter, &out, GgufOptions::default(), &|_, _| {}).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("`pre_tokenizer`"), "{error}");
    assert!(error.contains("--adapter-only") && !out.exists());
}

#[test]
fn a_mistral_and_a_ministral_of_one_architecture_are_told_apart_by_their_yarn() {
    let folder = tempfile::tempdir().unwrap();
    let (json, path) = (folder.path().join("config.json"), folder.path().join("a.gguf"));
    let text_of = include_str!("../../../../tests/golden/ministral3/config.json");
    std::fs::write(&json, text_of.replace("\"beta_fast\": 32.0", "\"beta_fast\": 8.0")).unwrap();
    let config = ModelConfig::from_file(&json).unwrap();
    let of_file = |lost: &str| {
        let mut metadata = names::shape(&config, FileType::F32).unwrap();
        metadata.retain(|(key, _)| !key.contains(lost));
        metadata.push(("general.architecture".to_owned(), text("mistral3")));
        let embedding = Tensor::of("token_embd.weight".to_owned(), vec![1344, 2], || vec![0.0; 2688]);
        Gguf { metadata, tensors: vec![embedding] }.write(&path).unwrap();
        ModelConfig::from_file(&path).map_err(|error| error.to_string())
    };
    assert_eq!(of_file("nothing").unwrap().ropes, config.ropes);
    let older = of_file("rope.scaling").unwrap();
    assert_eq!((&*older.model_type, &older.ropes[0].scaling), ("mistral", &None));
    let error = of_file("temperature_scale").unwrap_err();
    assert!(error.contains("`mistral3.attention.temperature_scale` is missing"), "{error}");
}

#[test]
fn an_imatrix_has_sums_and_counts_and_those_of_experts_in_one_tensor_in_their_order() {
    let json = include_str!("../../../../tests/golden/qwen3_moe/config.json");
    let config = ModelConfig::from_json(&json.replace("\"num_experts\": 8", "\"num_experts\": 12")).unwrap();
    let inputs = |sum: f32, num_tokens| InputSquares { sums: vec![sum; 64], num_tokens };
    let expert_name = |expert: u8| format!("model.layers.1.mlp.experts.{expert}.gate_proj.weight");
    let expert = |expert: u8| {
        let num_tokens = if expert == 3 { 0 } else { expert + 1 };
        (expert_name(expert), inputs(0.5 * f32::from(num_tokens), usize::from(num_tokens)))
    };
    let query = ("model.layers.0.self_attn.q_proj.weight".to_owned(), inputs(5.0, 20));
    let imatrix = Imatrix {
        inputs: (0..12).map(expert).chain([query]).collect(),
        num_tokens: 20,
        num_chunks: 2,
        datasets: vec!["rows.jsonl".to_owned()],
    };
    let means = |expert: u8| imatrix.of(&config, &expert_name(expert)).unwrap();
    assert_eq!([2, 3].map(means), [vec![0.5; 64], vec![1.0; 64]]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.imatrix.gguf");
    imatrix.write(&config, &path).unwrap();
    let file = read(&path);
    let tensor = |name: &str| {
        let (_, shape, bytes) = &file.tensors[name];
        (shape.clone(), numbers(bytes))
    };
    assert_eq!(tensor("blk.0.attn_q.weight.in_sum2"), (vec![64, 1], vec![5.0; 64]));
    assert_eq!(tensor("blk.0.attn_q.weight.counts"), (vec![1, 1], vec![20.0]));
    let counts = [1.0, 2.0, 3.0, 0.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0];
    assert_eq!(tensor("blk.1.ffn_gate_exps.weight.counts"), (vec![1, 12], counts.to_vec()));
    let sums = counts.iter().flat_map(|count| [0.5 * count; 64]).collect();
    assert_eq!(tensor("blk.1.ffn_gate_exps.weight.in_sum2"), (vec![64, 12], sums));
    assert_eq!(file.metadata["imatrix.chunk_size"], 10u32.to_le_bytes());
    let keys: BTreeMap<_, _> = imatrix.keys(&config, &path).into_iter().collect();
    assert_eq!(keys["quantize.imatrix.entries_count"], Value::U32(2));
}
