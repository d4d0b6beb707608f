//! Small models of every family, made by the formula of `scripts/make_golden.py`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lora_train::spec::ModelConfig;
use safetensors::tensor::{Dtype, TensorView};

/// Folders of `tests/golden` with a `config.json`.
pub(crate) const FAMILIES: [&str; 105] = [
    "qwen2", "qwen3", "qwen3_5", "qwen3_5-multimodal", "qwen3_5_moe", "qwen3_next", "llama-with-biases", "gemma2",
    "gemma3", "gemma3-multimodal", "gemma4", "gemma4-multimodal", "gemma4-experts", "smollm3", "olmo2", "granite",
    "phi3", "phi3-longrope", "glm", "glm4", "qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "lfm2", "nemotron",
    "ernie4_5", "mistral", "ministral3", "mistral3", "internlm3", "iquestcoder", "seed_oss", "ministral", "cwm",
    "gemma", "vaultgemma", "arcee", "jais2", "helium", "granitemoehybrid", "olmo3", "olmoe", "granitemoe", "qwen2_vl",
    "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm_ocr", "internvl", "llava", "llava_next", "llava_onevision",
    "lfm2_vl", "lighton_ocr", "ovis2", "paddleocr_vl", "idefics3", "smolvlm", "glm4_moe", "dots1", "ernie4_5_moe",
    "lfm2_moe", "minimax_m2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "mistral4", "minicpm3",
    "granitemoehybrid-mamba", "granitemoehybrid-experts", "nemotron_h", "nemotron_h-latent", "falcon_h1", "cohere",
    "cohere2", "stablelm", "stablelm-beside", "starcoder2", "hunyuan_v1_dense", "hunyuan_v1_moe", "gpt_neox",
    "cohere-norms", "stablelm-norms", "phi", "exaone4", "exaone_moe", "solar_open", "hy_v3", "llama4", "glm4v_moe",
    "gemma3n", "muse_glimmer", "granite_swa", "hyperclovax", "exaone", "mellum", "flex_olmo", "granitemoeshared",
    "bamba", "flint", "granitemoe_swa", "apertus",
];

/// The numbers called `bits` in `scripts/make_golden.py`.
pub(crate) fn bits(name: &str) -> impl Iterator<Item = u64> + use<> {
    let state = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (1..).map(move |i: u64| {
        let z = state.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// Numbers within `bound`, derived from a name.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "24 bits, as the script does it")]
pub(crate) fn formula(name: &str, bound: f64) -> impl Iterator<Item = f32> + use<> {
    let unit = bits(name).map(|bits| (bits >> 40) as f64 / f64::from(1 << 24));
    unit.map(move |unit| ((unit * 2.0 - 1.0) * bound) as f32)
}

/// Writes the model of `tests/golden/NAME/config.json`, with the quickstart's tokenizer.
pub(crate) fn write_family(name: &str, folder: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    write_model(&fs::read_to_string(golden.join(name).join("config.json")).unwrap(), folder);
}

/// Writes a model of this `config.json`, with the quickstart's tokenizer.
#[allow(clippy::cast_precision_loss, reason = "a width")]
pub(crate) fn write_model(config: &str, folder: &Path) {
    fs::write(folder.join("config.json"), config).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(source.join("quickstart/model").join(file), folder.join(file)).unwrap();
    }
    let config = ModelConfig::from_json(config).unwrap();
    let norm = if config.has_norms_less_one { 0.0 } else { 1.0 };
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let centre = match &*name {
            name if name.ends_with("linear_attn.norm.weight") || name.ends_with("layer_scalar") => 1.0,
            "model.norm.weight" if config.model_type == "muse_glimmer_text" => 1.0,
            // Nothing else makes the scores of Gemma 3n and 4 smaller.
            name if ["gemma3n", "gemma4"].iter().any(|it| config.model_type.starts_with(it))
                && name.ends_with("q_norm.weight") =>
            {
                0.25
            }
            name if name.ends_with("norm.weight") || name.ends_with("norm_f.weight") => norm,
            name if name.ends_with(".A_log") => -3.0,
            name if name.ends_with("act_fn.beta") => 0.5,
            name if name.ends_with("act_fn.eps") => -1e-6,
            _ => 0.0,
        };
        let num_inputs = shape.iter().skip(1).product::<usize>();
        let bound = match shape.len() {
            // As every model of the kind has it.
            0 => 0.0,
            1 => 0.3,
            _ => 1.7 / (num_inputs as f64).sqrt(),
        };
        let values = formula(&name, bound).take(shape.iter().product());
        let bytes: Vec<u8> = values.flat_map(|value| (centre + value).to_le_bytes()).collect();
        // What transformers knows it by.
        let name = match &*config.model_type {
            "hy_v3" => name.replace(".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
            "flint" => name.replace(".sinks", ".softmax_offset"),
            _ => name,
        };
        (config.module_of(&name), (shape, bytes))
    };
    let mut tensors: Tensors = config.expected_tensors().into_iter().map(tensor).collect();
    if config.model_type == "gpt_oss" {
        join_experts(&config, &mut tensors);
    }
    if config.model_type == "llama4_text" {
        join_turned(&config, &mut tensors);
    }
    let own = ["experts.gate_up_proj", "experts.down_proj"];
    match &*config.model_type {
        _ if config.blocks[0].two_branches().is_some() => join_halves(&config, &mut tensors, "experts", own),
        "granitemoe" | "granitemoeshared" | "granitemoehybrid" if config.blocks[0].mixture().is_some() => {
            let joined = ["block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"];
            join_halves(&config, &mut tensors, "block_sparse_moe.experts", joined);
        }
        "granitemoe_swa" => {
            let joined = own.map(|name| format!("block_sparse_moe.{name}"));
            join_halves(&config, &mut tensors, "block_sparse_moe.experts", joined.each_ref().map(|name| &**name));
        }
        "qwen3_vl_moe" | "qwen3_vl_moe_text" | "mistral4" => {
            let joined = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
            join_halves(&config, &mut tensors, "mlp.experts", joined);
        }
        _ => {}
    }
    let view = |(shape, bytes)| TensorView::new(Dtype::F32, Vec::clone(shape), bytes).unwrap();
    let views = tensors.iter().map(|(name, (shape, bytes))| (name, view((shape, bytes))));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Shape and bytes by name.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// Puts the matrices of experts, whose names begin with `experts` in a block, into one tensor for all of a layer: up below gate.
fn join_halves(config: &ModelConfig, tensors: &mut Tensors, experts: &str, joined: [&str; 2]) {
    let num_experts = config.blocks[0].mixture().unwrap().experts.len();
    for layer in 0..config.num_layers() {
        let in_block = |name: &str| config.module_of(&format!("model.layers.{layer}.{name}"));
        for (joined, parts) in joined.into_iter().zip([&["gate_proj", "up_proj"][..], &["down_proj"]]) {
            let names = (0..num_experts).flat_map(|expert| parts.iter().map(move |part| format!("{expert}.{part}")));
            let matrices: Vec<_> =
                names.map(|name| tensors.remove(&in_block(&format!("{experts}.{name}.weight"))).unwrap()).collect();
            let [rows, columns] = [matrices[0].0[0], matrices[0].0[1]];
            let bytes = matrices.into_iter().flat_map(|(_, bytes)| bytes).collect();
            let shape = vec![num_experts, parts.len() * rows, columns];
            tensors.insert(in_block(joined), (shape, bytes));
        }
    }
}

/// Puts the matrices of experts into one tensor for all of a layer, as Llama 4 has them: transposed, up beside gate.
fn join_turned(config: &ModelConfig, tensors: &mut Tensors) {
    let mixtures = config.blocks.iter().enumerate().filter_map(|(layer, block)| Some((layer, block.mixture()?)));
    for (layer, mixture) in mixtures {
        let within = config.module_of(&format!("model.layers.{layer}.feed_forward.experts"));
        for (joined, parts) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
            let (mut values, mut shape) = (Vec::new(), Vec::new());
            for expert in 0..mixture.experts.len() {
                let name = |part| format!("{within}.{expert}.{part}.weight");
                let matrices: Vec<_> = parts.iter().map(|part| tensors.remove(&name(part)).unwrap()).collect();
                let [rows, columns] = [matrices[0].0[0], matrices[0].0[1]];
                let places = (0..columns).flat_map(|column| (0..rows).map(move |row| 4 * (row * columns + column)));
                let places: Vec<usize> = places.collect();
                for column in places.chunks(rows) {
                    let of =
                        |(_, bytes): &(_, Vec<u8>)| column.iter().flat_map(|&at| bytes[at..at + 4].to_vec()).collect();
                    values.extend(matrices.iter().flat_map(|matrix| -> Vec<u8> { of(matrix) }));
                }
                shape = vec![mixture.experts.len(), columns, parts.len() * rows];
            }
            tensors.insert(format!("{within}.{joined}"), (shape, values));
        }
    }
}

/// Puts the matrices of experts into one tensor for all of a layer, as gpt-oss has them: transposed, gate and up in turn.
fn join_experts(config: &ModelConfig, tensors: &mut Tensors) {
    let num_experts = config.blocks[0].mixture().unwrap().experts.len();
    for layer in 0..config.num_layers() {
        for (joined, parts) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
            let block = format!("model.layers.{layer}.mlp.experts");
            let mut take = |kind: &str| -> Vec<(Vec<usize>, Vec<u8>)> {
                let names =
                    (0..num_experts).flat_map(|expert| parts.iter().map(move |part| format!("{expert}.{part}")));
                names.map(|name| tensors.remove(&format!("{block}.{name}.{kind}")).unwrap()).collect()
            };
            let (weights, biases) = (take("weight"), take("bias"));
            let (rows, columns) = (weights[0].0[0], weights[0].0[1]);
            let number = |(_, bytes): &(Vec<usize>, Vec<u8>), index: usize| bytes[4 * index..4 * index + 4].to_vec();
            let (mut values, mut sums) = (Vec::new(), Vec::new());
            for (weights, biases) in weights.chunks(parts.len()).zip(biases.chunks(parts.len())) {
                let rows = || (0..rows).flat_map(|row| (0..parts.len()).map(move |part| (row, part)));
                for column in 0..columns {
                    values.extend(rows().flat_map(|(row, part)| number(&weights[part], row * columns + column)));
                }
                sums.extend(rows().flat_map(|(row, part)| number(&biases[part], row)));
            }
            let width = parts.len() * rows;
            tensors.insert(format!("{block}.{joined}"), (vec![num_experts, columns, width], values));
            tensors.insert(format!("{block}.{joined}_bias"), (vec![num_experts, width], sums));
        }
    }
}
