use burn::tensor::{DType, Device, Tensor};
use safetensors::tensor::TensorView;

use super::super::fixture::{self, tiny_config};
use super::super::source::Source as _;
use super::super::{Storage, Weights};
use super::*;
use crate::config::Residency;
use crate::spec::{Method, ModelConfig, StoredQuantisation};

fn read<const D: usize>(weights: &Weights, name: &str, shape: [usize; D], dtype: Dtype) -> Vec<f32> {
    let tensor: Tensor<D> = weights.load(name, shape, dtype, &Device::flex()).unwrap();
    assert_eq!(tensor.dtype(), DType::from(dtype));
    tensor.into_data().convert::<f32>().try_to_vec().unwrap()
}

#[test]
fn tensors_load_with_their_values_in_every_storage_type_from_one_file_or_shards() {
    for num_shards in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let config = tiny_config();
        let stored = fixture::write_model(folder.path(), &config, num_shards, Dtype::Bf16);
        let files = WeightFiles::open(folder.path()).unwrap();
        files.check(&config).unwrap();
        assert_eq!(files.shard_names().count(), num_shards);
        assert_eq!(files.num_bytes(), 2 * config.num_parameters());
        let weights = Weights::Files(files.clone());
        for dtype in Dtype::ALL {
            let name = "model.layers.1.mlp.down_proj.weight";
            // Small bf16 numbers are exact in f32 and, here, in f16 too.
            assert_eq!(read(&weights, name, [64, 176], dtype), stored[name]);
            let norm = "model.layers.0.input_layernorm.weight";
            assert_eq!(read(&weights, norm, [64], dtype), stored[norm]);
        }
        // Released pages come back.
        assert_eq!(files.load_f32("model.norm.weight", &[64]).unwrap(), stored["model.norm.weight"]);
        assert_eq!(files.load_f32("model.norm.weight", &[64]).unwrap(), stored["model.norm.weight"]);
    }
}

#[test]
fn weights_are_known_again_wherever_they_are_and_others_are_told_apart() {
    let digest = |change: &dyn Fn(&mut Vec<u8>)| {
        let folder = tempfile::tempdir().unwrap();
        fixture::write_model(folder.path(), &tiny_config(), 1, Dtype::F32);
        let path = folder.path().join(SINGLE);
        let mut bytes = std::fs::read(&path).unwrap();
        change(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        WeightFiles::open(folder.path()).unwrap().digest()
    };
    let as_it_is = digest(&|_| {});
    assert_eq!(digest(&|_| {}), as_it_is);
    // As further training would change them.
    let other = digest(&|bytes| {
        let start = bytes.len() / 2;
        bytes[start..].iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
    });
    assert_ne!(other, as_it_is);
}

#[test]
fn every_tensor_that_does_not_fit_is_listed_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny_config();
    fixture::write_model(folder.path(), &config, 1, Dtype::F32);
    let files = WeightFiles::open(folder.path()).unwrap();
    let wider = fixture::tiny_with(&[("intermediate_size", 200), ("num_hidden_layers", 1)]);
    let wider = ModelConfig { tie_word_embeddings: false, ..wider };
    let text = files.check(&wider).unwrap_err().to_string();
    let counts = ["\n  misshapen: ", "\n  unexpected: ", "\n  missing: "].map(|kind| text.matches(kind).count());
    assert_eq!(counts, [3, 9, 1], "{text}");
    assert!(text.contains("misshapen: `model.layers.0.mlp.up_proj.weight` is [176, 64], expected [200, 64]"));
    assert!(text.contains("missing: `lm_head.weight` [256, 64]"), "{text}");
    let error = Weights::Files(files).load::<2>("model.norm.weight", [8, 8], Dtype::F32, &Device::flex()).unwrap_err();
    assert!(error.to_string().contains("`model.norm.weight` is [64], expected [8, 8]"), "{error}");
}

#[test]
fn a_tied_head_may_be_stored_if_it_is_the_embedding_and_rotary_buffers_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny_config();
    let mut tensors = fixture::random_tensors(&config);
    let embedding = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".into(), embedding);
    tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (vec![8], vec![0.5; 8]));
    tensors.insert("mtp.layers.0.mlp.up_proj.weight".into(), (vec![2, 2], vec![0.5; 4]));
    fixture::write_tensors(&folder.path().join(SINGLE), &tensors, Dtype::F32);
    WeightFiles::open(folder.path()).unwrap().check(&config).unwrap();

    let head = tensors.get_mut("lm_head.weight").unwrap();
    head.1[77] += 1.0;
    fixture::write_tensors(&folder.path().join(SINGLE), &tensors, Dtype::F32);
    let error = WeightFiles::open(folder.path()).unwrap().check(&config).unwrap_err().to_string();
    assert!(error.contains("`lm_head.weight` differs from `model.embed_tokens.weight`"), "{error}");
}

#[test]
fn a_layer_of_a_quantised_base_may_be_whole_and_have_a_bias_of_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let quantisation = Some(StoredQuantisation { method: Method::Int8, whole: Vec::new(), blocks: BTreeMap::new() });
    let config = ModelConfig { quantisation, ..tiny_config() };
    let mut tensors = fixture::random_tensors(&config);
    for (bias, is_read) in [(0.0, true), (0.5, false)] {
        tensors.insert("model.layers.0.mlp.up_proj.bias".into(), (vec![176], vec![bias; 176]));
        fixture::write_tensors(&folder.path().join(SINGLE), &tensors, Dtype::F32);
        assert_eq!(WeightFiles::open(folder.path()).unwrap().check(&config).is_ok(), is_read);
    }
}

#[test]
fn a_truncated_file_is_called_half_downloaded_and_a_pointer_a_pointer() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny_config();
    fixture::write_model(folder.path(), &config, 1, Dtype::F32);
    let path = folder.path().join(SINGLE);
    let content = std::fs::read(&path).unwrap();
    for length in [content.len() - 1, 100, 3, 0] {
        std::fs::write(&path, &content[..length]).unwrap();
        let error = WeightFiles::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("half-downloaded"), "{length}: {error}");
    }
    std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n").unwrap();
    let error = WeightFiles::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("Git LFS pointer") && error.contains("git lfs pull"), "{error}");
}

#[test]
fn an_index_that_disagrees_with_its_files_is_an_error_that_says_where() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny_config();
    fixture::write_model(folder.path(), &config, 2, Dtype::F32);
    let index = folder.path().join(INDEX);
    let text = std::fs::read_to_string(&index).unwrap();
    let error_with = |text: &str| {
        std::fs::write(&index, text).unwrap();
        WeightFiles::open(folder.path()).unwrap_err().to_string()
    };
    let more =
        text.replacen("\"weight_map\": {", "\"weight_map\": {\"ghost\": \"model-00001-of-00002.safetensors\",", 1);
    assert!(error_with(&more).contains("`ghost` is not in `model-00001-of-00002.safetensors`"));
    let outside = more.replacen("model-00001-of-00002.safetensors", "../elsewhere.safetensors", 1);
    assert!(error_with(&outside).contains("is in `../elsewhere.safetensors`, expected file names without folders"));
    assert!(error_with("{}").contains("weight_map"));
    std::fs::remove_file(folder.path().join("model-00002-of-00002.safetensors")).unwrap();
    let error = error_with(&text);
    assert!(error.contains("`model-00002-of-00002.safetensors`, which is not in the folder"), "{error}");
}

#[test]
fn a_folder_without_safetensors_says_what_it_holds_instead() {
    for (file, part) in [
        ("pytorch_model.bin", "pickle"),
        ("consolidated.safetensors", "Mistral's own format"),
        ("model-q4.gguf", "GGUF"),
        ("adapter_model.safetensors", "this is an adapter"),
        ("model-00001-of-00002.safetensors", "index"),
        ("README.md", "`model.init`"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(file), "x").unwrap();
        let error = WeightFiles::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn numbers_beyond_the_range_of_f16_are_refused_with_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [("x".to_owned(), (vec![2], vec![1.0, 1e6]))].into();
    fixture::write_tensors(&folder.path().join(SINGLE), &tensors, Dtype::Bf16);
    let files = WeightFiles::open(folder.path()).unwrap();
    let error = Weights::Files(files).load::<1>("x", [2], Dtype::F16, &Device::flex()).unwrap_err().to_string();
    assert!(error.contains("`x` is too large for f16") && error.contains("bf16"), "{error}");
}

#[test]
fn experts_that_are_stored_as_one_tensor_are_found_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let block = "model.layers.0.mlp.experts";
    let values: Vec<u8> = (0..2 * 6 * 5).flat_map(|number: u16| f32::from(number).to_le_bytes()).collect();
    let view = |shape: [usize; 3]| TensorView::new(safetensors::Dtype::F32, shape.into(), &values).unwrap();
    let views = [("gate_up_proj", view([2, 6, 5])), ("down_proj", view([2, 5, 6]))];
    let views = views.map(|(name, view)| (format!("{block}.{name}"), view));
    let path = folder.path().join("model-00001-of-00001.safetensors");
    safetensors::serialize_to_file(views.clone(), None, &path).unwrap();
    let map: BTreeMap<_, _> = views.iter().map(|(name, _)| (name, path.file_name().unwrap().to_str())).collect();
    std::fs::write(folder.path().join(INDEX), serde_json::json!({"weight_map": map}).to_string()).unwrap();
    let files = WeightFiles::open(folder.path()).unwrap();
    assert_eq!(files.tensors().len(), 6);
    for (name, shape, first) in [
        ("0.gate_proj", [3, 5], 0.0),
        ("0.up_proj", [3, 5], 15.0),
        ("1.gate_proj", [3, 5], 30.0),
        ("1.up_proj", [3, 5], 45.0),
        ("1.down_proj", [5, 6], 30.0),
    ] {
        let found = files.load_f32(&format!("{block}.{name}.weight"), &shape).unwrap();
        let expected: Vec<f32> =
            (0..shape[0] * shape[1]).scan(first, |next, _| Some(std::mem::replace(next, *next + 1.0))).collect();
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn experts_of_granite_and_those_of_qwen3_vl_which_are_transposed_are_found_too() {
    let numbers = |len: usize| (0..len).flat_map(|number| (number as f32).to_le_bytes()).collect::<Vec<u8>>();
    let read = |block: &str, shapes: [(&str, [usize; 3]); 2]| {
        let folder = tempfile::tempdir().unwrap();
        let values = numbers(2 * 6 * 5);
        let view = |shape: [usize; 3]| {
            TensorView::new(safetensors::Dtype::F32, shape.into(), &values[..4 * shape.iter().product::<usize>()])
                .unwrap()
        };
        let views = shapes.map(|(name, shape)| (format!("model.layers.0.{block}{name}"), view(shape)));
        safetensors::serialize_to_file(views, None, &folder.path().join(SINGLE)).unwrap();
        let files = WeightFiles::open(folder.path()).unwrap();
        ["gate_proj", "up_proj", "down_proj"].map(|name| {
            let shape = if name == "down_proj" { [5, 3] } else { [3, 5] };
            let block = block.trim_end_matches("experts.");
            files.load_f32(&format!("model.layers.0.{block}experts.1.{name}.weight"), &shape).unwrap()
        })
    };
    let from = |first: usize, len: usize| (first..first + len).map(|number| number as f32).collect::<Vec<f32>>();
    let granite = [("input_linear.weight", [2, 6, 5]), ("output_linear.weight", [2, 5, 3])];
    assert_eq!(read("block_sparse_moe.", granite), [from(30, 15), from(45, 15), from(15, 15)]);
    let qwen = [("gate_up_proj", [2, 5, 6]), ("down_proj", [2, 3, 5])];
    let [gate, up, down] = read("mlp.experts.", qwen);
    // The second expert's first column of the file is the first row here.
    assert_eq!((&gate[..5], &up[5..10]), (&[30., 36., 42., 48., 54.][..], &[34., 40., 46., 52., 58.][..]));
    assert_eq!(down[..6], [15., 20., 25., 16., 21., 26.]);
}

#[test]
fn a_tensor_without_numbers_holds_no_experts() {
    let folder = tempfile::tempdir().unwrap();
    let view = TensorView::new(safetensors::Dtype::F32, vec![1 << 40, 0, 1], &[]).unwrap();
    let views = [("model.layers.0.mlp.experts.down_proj", view)];
    safetensors::serialize_to_file(views, None, &folder.path().join(SINGLE)).unwrap();
    assert_eq!(WeightFiles::open(folder.path()).unwrap().tensors().len(), 1);
}

#[test]
fn experts_of_gpt_oss_are_read_transposed_in_turn_and_as_codes() {
    let folder = tempfile::tempdir().unwrap();
    let config = ModelConfig::from_json(
        r#"{"model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2,
            "num_experts_per_tok": 1, "attention_bias": true, "rope_scaling": {"rope_type": "default"},
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}"#,
    )
    .unwrap();
    let module = |part: &str| format!("model.layers.0.mlp.experts.{part}");
    let floats = |numbers: Vec<f32>| -> Vec<u8> { numbers.into_iter().flat_map(f32::to_le_bytes).collect() };
    // Of the first layer, numbers; of the second, codes.
    let number = |index: usize| index as f32 / 1024.0;
    let gate_up: Vec<f32> = (0..2 * 64 * 64).map(number).collect();
    let down: Vec<f32> = (0..2 * 32 * 64).map(number).collect();
    let biases: Vec<f32> = (0..2 * 64).map(number).collect();
    let codes: Vec<u8> = (0..2 * 64 * 32).map(|index: u32| (index % 251) as u8).collect();
    let scales: Vec<u8> = (0..2 * 64 * 2).map(|index: u32| 120 + (index % 9) as u8).collect();
    let mut tensors: BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let (f32, u8) = (safetensors::Dtype::F32, safetensors::Dtype::U8);
    for (name, shape) in config.expected_tensors().into_iter().filter(|(name, _)| !name.contains(".experts.")) {
        let bytes = vec![0; 4 * shape.iter().product::<usize>()];
        tensors.insert(name, (f32, shape, bytes));
    }
    tensors.insert(module("gate_up_proj"), (f32, vec![2, 64, 64], floats(gate_up.clone())));
    tensors.insert(module("down_proj"), (f32, vec![2, 32, 64], floats(down.clone())));
    for layer in 0..2 {
        let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
        tensors.insert(name("gate_up_proj_bias"), (f32, vec![2, 64], floats(biases.clone())));
        tensors.insert(name("down_proj_bias"), (f32, vec![2, 64], floats(biases.clone())));
    }
    let second = |part: &str| format!("model.layers.1.mlp.experts.{part}");
    tensors.insert(second("gate_up_proj_blocks"), (u8, vec![2, 64, 2, 16], codes.clone()));
    tensors.insert(second("gate_up_proj_scales"), (u8, vec![2, 64, 2], scales.clone()));
    tensors.insert(second("down_proj_blocks"), (u8, vec![2, 64, 1, 16], codes[..2048].to_vec()));
    tensors.insert(second("down_proj_scales"), (u8, vec![2, 64, 1], scales[..128].to_vec()));
    let views = tensors
        .iter()
        .map(|(name, (kind, shape, bytes))| (name.as_str(), TensorView::new(*kind, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.path().join(SINGLE)).unwrap();
    let files = WeightFiles::open(folder.path()).unwrap();
    files.check(&config).unwrap();

    // Expert, row, column; the first of gate and up is the gate.
    let at = |values: &[f32], width: usize, [expert, row, column]: [usize; 3]| {
        values[expert * 64 * width + column * width + row]
    };
    let up = files.load_f32(&module("1.up_proj.weight"), &[32, 64]).unwrap();
    let expected: Vec<f32> = (0..32 * 64).map(|i| at(&gate_up, 64, [1, 2 * (i / 64) + 1, i % 64])).collect();
    assert_eq!(up, expected);
    let found = files.load_f32(&module("1.down_proj.weight"), &[64, 32]).unwrap();
    let expected: Vec<f32> = (0..64 * 32).map(|i| down[32 * 64 + (i % 32) * 64 + i / 32]).collect();
    assert_eq!(found, expected);
    let bias = files.load_f32(&module("1.gate_proj.bias"), &[32]).unwrap();
    assert_eq!(bias, (0..32).map(|row| biases[64 + 2 * row]).collect::<Vec<_>>());

    // E2M1: sign, two bits of exponent, one of mantissa. Scales are powers of two less 127; low halves come first.
    let levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0_f32];
    let decoded = |expert: usize, row: usize, column: usize| {
        let place = (expert * 64 + row) * 64 + column;
        let code = codes[place / 2] >> (4 * (place % 2)) & 15;
        let level = levels[usize::from(code & 7)] * if code & 8 == 0 { 1.0 } else { -1.0 };
        level * 2f32.powi(i32::from(scales[place / 32]) - 127)
    };
    assert!(files.is_part(&module("1.up_proj.weight")) && files.is_part(&second("1.up_proj.weight")));
    assert!(!files.is_part("model.layers.0.mlp.beside_them"));
    let weights = Weights::Files(files);
    let name = second("1.up_proj.weight");
    let matrix = weights.matrix(&name, [32, 64], Dtype::F32.into(), &config, &Device::flex()).unwrap();
    let found: Vec<f32> = matrix.dense().into_owned().into_data().try_to_vec().unwrap();
    let expected: Vec<f32> = (0..32 * 64).map(|i| decoded(1, 2 * (i / 64) + 1, i % 64)).collect();
    assert_eq!(found, expected);
    let name = |name: &str| format!("model.layers.1.{name}");
    let stored = config.quantisation.unwrap();
    assert!(stored.is_whole(&name("self_attn.q_proj")) && !stored.is_whole(&name("mlp.experts.0.up_proj")));
}

#[test]
fn rows_that_files_do_not_have_are_the_mean_of_those_that_they_have() {
    let folder = tempfile::tempdir().unwrap();
    let config = ModelConfig { tie_word_embeddings: false, ..tiny_config() };
    let stored = fixture::write_model(folder.path(), &config, 1, Dtype::F32);
    let weights = Weights::open(folder.path(), &config).unwrap();
    let mut grown = config.clone();
    grown.grow(258);
    weights.check(&grown).unwrap();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let own = &stored[name];
        let means: Vec<f32> = (0..64).map(|column| own[column..].iter().step_by(64).sum::<f32>() / 256.0).collect();
        let read = read(&weights, name, [258, 64], Dtype::F32);
        assert_eq!(read[..own.len()], own[..]);
        for row in read[own.len()..].chunks(64) {
            assert!(row.iter().zip(&means).all(|(row, mean)| (row - mean).abs() < 1e-6), "{row:?}, {means:?}");
        }
        let mut across = [0.0; 10];
        weights.source().numbers(name, &[258, 64]).unwrap().0.read(own.len() - 3, &mut across);
        assert_eq!(across, read[own.len() - 3..][..10]);
        let mapped = Storage { residency: Residency::Mapped, ..Dtype::F32.into() };
        let table = weights.table(name, [258, 64], mapped, &Device::flex()).unwrap();
        assert_eq!(table.into_data().convert::<f32>().try_to_vec::<f32>().unwrap(), read);
        let matrix = weights.matrix(name, [258, 64], mapped, &grown, &Device::flex()).unwrap();
        assert_eq!(matrix.dense().into_owned().into_data().convert::<f32>().try_to_vec::<f32>().unwrap(), read);
    }
    // Where a block of numbers begins far behind the file's end.
    let read = read(&weights, "lm_head.weight", [500, 64], Dtype::Bf16);
    assert_eq!(read[499 * 64..], read[256 * 64..257 * 64]);
    // Files of fewer rows than config.json says are of another model.
    let other = ModelConfig { vocab_size: 257, ..config };
    let error = weights.check(&other).unwrap_err().to_string();
    assert!(error.contains("misshapen: `lm_head.weight` is [256, 64], expected [257, 64]"), "{error}");
}
