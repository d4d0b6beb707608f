//! Names, shapes and parts of a model's tensors in GGUF files.

use crate::spec::delta_net::{A_LOG, DELTA_NET_FUSED_NAMES, DELTA_NET_NAMES, DT_BIAS};
use crate::spec::{
    BLOCK_SCALE, Block, CURVE_NAMES, EXPERT_SCALES, GATE_NAME, Heads, LATENT_NAMES, Latent, ModelConfig, ROUTER_SCALE,
    SHARED_MLP_NAMES, SINKS, STREAM_PROJECTIONS, STREAM_SCALE, name_alone,
};

/// Modules of a block, in Hugging Face's files and in GGUF.
const MODULES: [(&str, &str); 113] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    (GATE_NAME, "attn_gate"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("feed_forward.gate", "ffn_gate_inp"),
    ("feed_forward.router", "ffn_gate_inp"),
    ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
    ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.out_proj", "ssm_out"),
    ("router.proj", "ffn_gate_inp"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("laurel.linear_left", "laurel_l"),
    ("laurel.linear_right", "laurel_r"),
    ("laurel.post_laurel_norm", "laurel_post_norm"),
    ("altup.router_norm", "altup_router_norm"),
    ("altup.modality_router", "altup_router"),
    ("altup.prediction_coefs", "altup_predict_coef"),
    ("altup.correction_coefs", "altup_correct_coef"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("operator_norm", "attn_norm"),
    ("attention_layernorm", "attn_norm"),
    ("feedforward_layernorm", "ffn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.query_layernorm", "attn_q_norm"),
    ("self_attn.key_layernorm", "attn_k_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("self_attn.dense", "attn_output"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("mlp.gate.wg", "ffn_gate_inp"),
    ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
    ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("norm", "attn_norm"),
    ("mixer.q_proj", "attn_q"),
    ("mixer.k_proj", "attn_k"),
    ("mixer.v_proj", "attn_v"),
    ("mixer.o_proj", "attn_output"),
    ("mixer.up_proj", "ffn_up"),
    ("mixer.down_proj", "ffn_down"),
    ("mixer.gate", "ffn_gate_inp"),
    ("mixer.shared_experts.up_proj", "ffn_up_shexp"),
    ("mixer.shared_experts.down_proj", "ffn_down_shexp"),
    ("mixer.fc1_latent_proj", "ffn_latent_down"),
    ("mixer.fc2_latent_proj", "ffn_latent_up"),
    ("mixer.in_proj", "ssm_in"),
    ("mixer.conv1d", "ssm_conv1d"),
    ("mixer.norm", "ssm_norm"),
    ("mixer.out_proj", "ssm_out"),
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.down_proj", "ffn_down"),
    ("attention.query_key_value", "attn_qkv"),
    ("attention.dense", "attn_output"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
];
/// Tensors of a block that are no weight or bias, likewise.
const NO_MODULES: [(&str, &str); 19] = [
    (A_LOG, "ssm_a"),
    (DT_BIAS, "ssm_dt.bias"),
    (SINKS, "attn_sinks.weight"),
    (BLOCK_SCALE, "layer_output_scale.weight"),
    (STREAM_SCALE, "altup_correct_scale.weight"),
    (ROUTER_SCALE, "ffn_gate_inp.scale"),
    (EXPERT_SCALES, "ffn_down_exps.scale"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
    ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("pre_ff_layernorm.weight", "ffn_norm"),
    ("mixer.A_log", "ssm_a"),
    ("mixer.D", "ssm_d"),
    ("mixer.dt_bias", "ssm_dt.bias"),
    ("mixer.gate.e_score_correction_bias", "exp_probs_b.bias"),
];
/// Lists of [`CURVE_NAMES`] of all layers.
const CURVE_KEYS: [&str; 4] = ["xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"];
/// Matrices of an expert, likewise.
const OF_EXPERT: [(&str, &str); 6] = [
    ("gate_proj", "ffn_gate"),
    ("up_proj", "ffn_up"),
    ("down_proj", "ffn_down"),
    ("w1", "ffn_gate"),
    ("w3", "ffn_up"),
    ("w2", "ffn_down"),
];
/// The norm after the attention, which in most families is that before the feed-forward layer.
const POST_ATTENTION: [&str; 2] = ["post_attention_layernorm", "post_attention_norm"];

/// The name in GGUF of a tensor such as `model.layers.0.mlp.up_proj.weight`; `None` where there is no place for it.
#[must_use]
pub fn tensor_name(config: &ModelConfig, name: &str) -> Option<String> {
    let alone = name_alone(name);
    let name = alone.as_deref().unwrap_or(name);
    let in_block = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let no_module = in_block.and_then(|(_, part)| NO_MODULES.iter().find(|(ours, _)| *ours == part));
    if let (Some((layer, _)), Some((_, theirs))) = (in_block, no_module) {
        // Hunyuan 3's bias of the choice is none of a module there.
        let is_bare = config.family().gguf.architecture == Some("hy_v3");
        let theirs = theirs.strip_suffix(".bias").filter(|_| is_bare).unwrap_or(theirs);
        return Some(format!("blk.{layer}.{theirs}"));
    }
    let (module, part) = name.rsplit_once('.')?;
    let of_streams = STREAM_PROJECTIONS.into_iter().zip(["altup_proj", "altup_unembd_proj"]);
    let mut of_streams = of_streams.filter_map(|(ours, theirs)| Some((module.strip_prefix(ours)?, theirs)));
    if let Some((index, theirs)) = of_streams.next() {
        return Some(format!("{theirs}{index}.{part}"));
    }
    let module = match module {
        "model.embed_tokens" => "token_embd".to_owned(),
        "model.norm" | "model.norm_f" | "model.final_layernorm" | "model.final_layer_norm" => "output_norm".to_owned(),
        "model.embedding_norm" => "token_embd_norm".to_owned(),
        "lm_head" => "output".to_owned(),
        "model.embed_tokens_per_layer" => "per_layer_token_embd".to_owned(),
        "model.per_layer_model_projection" => "per_layer_model_proj".to_owned(),
        "model.per_layer_projection_norm" => "per_layer_proj_norm".to_owned(),
        block => {
            let (layer, module) = block.strip_prefix("model.layers.")?.split_once('.')?;
            let of_expert = module.split_once("experts.").filter(|(before, _)| !before.ends_with("shared_"));
            if let Some((_, expert)) = of_expert {
                let (index, matrix) = expert.split_once('.')?;
                let (_, theirs) = OF_EXPERT.iter().find(|(ours, _)| *ours == matrix)?;
                return Some(format!("blk.{layer}.{theirs}.{index}.{part}"));
            }
            let is_after = || {
                config.family().gguf.post_attention_norm
                    || config.blocks[0].sublayers.iter().any(|sublayer| sublayer.norm_after == Some(module))
            };
            let module = match MODULES.iter().find(|(theirs, _)| *theirs == module)? {
                (theirs, _) if *theirs == POST_ATTENTION[0] && is_after() => POST_ATTENTION[1],
                (_, module) => module,
            };
            format!("blk.{layer}.{module}")
        }
    };
    Some(format!("{module}.{part}"))
}

/// The key there of a number of xIELU in our tensor of this name, and its layer; absent: the tensor is none of them.
#[must_use]
pub fn curve_key(name: &str) -> Option<(&'static str, usize)> {
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let keys = CURVE_NAMES.into_iter().zip(CURVE_KEYS);
    keys.filter(|(ours, _)| *ours == part).find_map(|(_, key)| Some((key, layer.parse().ok()?)))
}

/// A tensor there with rows of one of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// How many rows, in the order of the file.
    pub num_rows: usize,
    /// Its shape, rows first.
    pub shape: Vec<usize>,
    /// Rows of each head that are columns there; absent: rows are rows.
    pub turned: Option<usize>,
}

impl Part {
    fn new(name: String, num_rows: usize, shape: &[usize]) -> Self {
        let shape = stored_shape(&[&[num_rows], &shape[1..]].concat());
        Self { name, num_rows, shape, turned: None }
    }

    /// Rows of `width` as they lie in it, or numbers as they lie in it as rows: with each head's rows for its columns.
    #[must_use]
    pub fn turn(&self, numbers: Vec<f32>, width: usize) -> Vec<f32> {
        let Some(rows) = self.turned.filter(|_| !numbers.is_empty()) else { return numbers };
        let head = |head: &[f32]| -> Vec<f32> {
            (0..rows * width).map(|place| head[place % rows * width + place / rows]).collect()
        };
        numbers.chunks_exact(rows * width).flat_map(head).collect()
    }
}

/// The names of [`parts_of`].
#[must_use]
pub fn names_of(config: &ModelConfig, name: &str) -> Vec<String> {
    parts_of(config, name, &[0, 0]).into_iter().map(|part| part.name).collect()
}

/// The tensors there that together have the rows of one of this shape; none where there is no place for it.
#[must_use]
pub fn parts_of(config: &ModelConfig, name: &str, shape: &[usize]) -> Vec<Part> {
    if curve_key(name).is_some() {
        return Vec::new();
    }
    let part = |name: &str, num_rows| Some(Part::new(tensor_name(config, name)?, num_rows, shape));
    let ([qkvz, _], [qkv, z, ..]) = (DELTA_NET_FUSED_NAMES, DELTA_NET_NAMES);
    let net = config.blocks.iter().find_map(Block::delta_net).filter(|_| name.contains(qkvz));
    if let Some(net) = net {
        let halves = [(qkv, net.heads.qkv_width()), (z, net.heads.value_width())];
        return halves.into_iter().filter_map(|(other, rows)| part(&name.replace(qkvz, other), rows)).collect();
    }
    let [gate_up, down] = SHARED_MLP_NAMES;
    if name.contains(gate_up) {
        let [gate, up] = ["gate_proj", "up_proj"].map(|half| name.replace(gate_up, &format!("mlp.{half}")));
        return [gate, up].iter().filter_map(|half| part(&beside_experts(config, half), shape[0] / 2)).collect();
    }
    if name.contains(down) {
        let name = beside_experts(config, &name.replace(down, "mlp.down_proj"));
        return part(&name, shape[0]).into_iter().collect();
    }
    if let Some((heads, latent)) = split_latent(config, name) {
        return of_latent(part(name, 0).as_ref(), heads, latent);
    }
    let space = config.blocks.iter().find_map(Block::state_space);
    let whole = part(name, shape[0]).map(|part| match space {
        Some(space) if name.ends_with(space.names.a_log) || name.ends_with(space.names.skip) => {
            Part { shape: vec![space.heads.num_heads, 1], ..part }
        }
        Some(space) if name.ends_with(space.names.norm) => {
            let groups = space.heads.num_groups;
            Part { shape: vec![groups, space.heads.inner_width() / groups], ..part }
        }
        _ => part,
    });
    whole.into_iter().collect()
}

/// The name that a feed-forward layer of Granite 4 has there: beside experts it is the shared one.
fn beside_experts(config: &ModelConfig, name: &str) -> String {
    let has_experts = config.blocks.iter().any(|block| block.mixture().is_some());
    if has_experts { name.replace("mlp.", "mlp.shared_experts.") } else { name.to_owned() }
}

/// The attention whose projection from the latent of keys and values this is, if a file has it in two tensors.
pub(super) fn split_latent<'a>(config: &'a ModelConfig, name: &str) -> Option<(Heads, &'a Latent)> {
    let [.., up] = LATENT_NAMES;
    let attention = config.blocks.iter().find_map(Block::attention).filter(|_| name.contains(up))?;
    Some((attention.heads, attention.latent().filter(|_| config.family().gguf.splits_latents)?))
}

/// The part of keys, each head's turned, and that of values.
fn of_latent(whole: Option<&Part>, heads: Heads, latent: &Latent) -> Vec<Part> {
    let still = heads.head_dim - latent.num_turning;
    let part = |name, rows, [first, second]: [usize; 2], turned| {
        whole.map(|whole| Part {
            name: whole.name.replace("attn_kv_b", name),
            num_rows: heads.num_heads * rows,
            shape: vec![heads.num_heads, first, second],
            turned,
        })
    };
    let keys = part("attn_k_b", still, [latent.rank, still], Some(still));
    let values = part("attn_v_b", latent.value_dim, [latent.value_dim, latent.rank], None);
    keys.into_iter().chain(values).collect()
}

/// The shape of a tensor there: a vector that is multiplied by a vector is none of a matrix, and a convolution has a row for
/// every channel.
#[must_use]
pub(super) fn stored_shape(shape: &[usize]) -> Vec<usize> {
    match shape {
        [1, rest @ ..] if !rest.is_empty() => rest.to_vec(),
        [channels, 1, kernel] => vec![*channels, *kernel],
        _ => shape.to_vec(),
    }
}
