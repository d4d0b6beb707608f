//! State spaces in GGUF files: their shape, which layers have one, and factors that weights have in a file.

use serde_json::{Map, Value, json};

use crate::schema::Problem;
use crate::spec::family::{Arrangement, Family, Scales, StateSpaces};
use crate::spec::{ModelConfig, SublayerKind};
use crate::util::gguf::GgufFile;

/// Tokens that the convolution sees, and numbers of a state, of groups, of heads and of all heads' inputs, behind the architecture.
pub const STATE_COUNTS: [&str; 5] =
    ["ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"];

/// Whether attention has a rotary embedding, behind the architecture.
pub const HAS_ROPE: &str = "rope.scaling.finetuned";

/// Adds its keys to those that `config.json` shares with other families.
pub(super) fn read(
    file: &GgufFile,
    (family, spaces): (&Family, &StateSpaces),
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, Value>,
) -> Result<(), Problem> {
    let count = |name: &str| {
        let found = file.integer(&key(name))?;
        found.filter(|count| *count > 0).ok_or_else(|| file.problem(format!("`{}` is missing", key(name))))
    };
    let [kernel, state, groups, heads, inner] = STATE_COUNTS;
    let (heads, inner) = (count(heads)?, count(inner)?);
    let found = [heads, count(groups)?, inner / heads, count(state)?, count(kernel)?];
    json.extend(spaces.counts.iter().zip(found).map(|((ours, _), count)| ((*ours).to_owned(), json!(count))));
    let hidden = json["hidden_size"].as_u64().unwrap_or(1).max(1);
    json.insert("mamba_expand".to_owned(), json!(inner / hidden));
    json.insert("mamba_d_ssm".to_owned(), json!(inner));
    let has = |part: &str| file.tensors().keys().any(|name| name.starts_with("blk.") && name.ends_with(part));
    let [of_conv, of_projections] = spaces.biases;
    json.insert(of_conv.to_owned(), json!(has(".ssm_conv1d.bias")));
    json.insert(of_projections.to_owned(), json!(has(".ssm_in.bias")));
    json.insert("mamba_rms_norm".to_owned(), json!(has(".ssm_norm.weight")));
    json.insert("mamba_norm_before_gate".to_owned(), json!(false));
    json.insert("attention_bias".to_owned(), json!(has(".attn_q.bias")));
    json.insert("mlp_bias".to_owned(), json!(has(".ffn_up.bias")));
    let layer_has = |layer: u64, part: &str| file.tensors().contains_key(&format!("blk.{layer}.{part}.weight"));
    let layers = 0..json["num_hidden_layers"].as_u64().unwrap_or(0);
    if family.arrangement == Arrangement::OneEach {
        let kind = |layer| match () {
            () if layer_has(layer, "ssm_in") => "mamba",
            () if layer_has(layer, "attn_q") => "attention",
            () if layer_has(layer, "ffn_gate_inp") => "moe",
            () => "mlp",
        };
        json.insert("layers_block_type".to_owned(), json!(layers.map(kind).collect::<Vec<_>>()));
    } else if family.arrangement == Arrangement::InTurn {
        let kind = |layer| if layer_has(layer, "ssm_in") { "mamba" } else { "attention" };
        json.insert("layer_types".to_owned(), json!(layers.map(kind).collect::<Vec<_>>()));
        json.insert("shared_intermediate_size".to_owned(), json["intermediate_size"].clone());
        json.insert("num_local_experts".to_owned(), json!(file.integer(&key("expert_count"))?.unwrap_or(0)));
        let rope = file.flag(&key(HAS_ROPE)).unwrap_or(true).then_some("rope");
        json.insert("position_embedding_type".to_owned(), json!(rope));
    }
    Ok(())
}

/// Factors of the rows of a weight that a file has in the weight, each with its number of rows; none where there are no such
/// (all but Falcon-H1).
#[must_use]
pub fn row_factors(config: &ModelConfig, name: &str) -> Vec<(usize, f64)> {
    if config.family().scales != Scales::Parts {
        return Vec::new();
    }
    let Some(module) = name.strip_suffix(".weight") else { return Vec::new() };
    let whole = |factor: f64| vec![(usize::MAX, factor)];
    match module {
        "model.embed_tokens" => return whole(config.embedding_scale.unwrap_or(1.0)),
        "lm_head" => return whole(1.0 / config.logit_divisor),
        _ => {}
    }
    let block = &config.blocks[0];
    let site = block.sites.iter().position(|site| module.ends_with(&*site.name));
    let Some(site) = site else { return Vec::new() };
    let of_sublayer = block.sublayers.iter().find_map(|sublayer| {
        let input = sublayer.kind.input_sites().iter().any(|sites| sites.contains(&site));
        let factor = if input { sublayer.input_scale } else { sublayer.output_scale }.unwrap_or(1.0);
        match &sublayer.kind {
            SublayerKind::Attention(attention) if attention.qkv.sites().contains(&site) => {
                let is_keys = attention.qkv.sites().get(1) == Some(&site);
                let of_keys = attention.heads.scale * width(attention.heads.head_dim).sqrt();
                Some(whole(if is_keys { factor * of_keys } else { factor }))
            }
            SublayerKind::Attention(attention) if attention.output == site => Some(whole(factor)),
            SublayerKind::StateSpace(space) if space.input == site => {
                let scales = space.scales.unwrap_or([1.0; 5]);
                Some(space.heads.widths().into_iter().zip(scales.map(|scale| scale * factor)).collect())
            }
            SublayerKind::StateSpace(space) if space.output == site => Some(whole(factor)),
            SublayerKind::Gated(gated) if gated.gate_up.sites().first() == Some(&site) => {
                Some(whole(gated.gate_scale.unwrap_or(1.0)))
            }
            SublayerKind::Gated(gated) if gated.down == site => Some(whole(factor)),
            _ => None,
        }
    });
    of_sublayer.unwrap_or_default()
}

#[expect(clippy::cast_precision_loss, reason = "a head is a few hundred wide at most")]
fn width(count: usize) -> f64 {
    count as f64
}

/// Rows of `width` numbers, each times its factor.
#[expect(clippy::cast_possible_truncation, reason = "the product is in f32")]
pub fn scale_rows(factors: &[(usize, f64)], width: usize, numbers: &mut [f32]) {
    let mut rest = numbers;
    for (rows, factor) in factors {
        let (stretch, behind) = rest.split_at_mut(rows.saturating_mul(width).min(rest.len()));
        stretch.iter_mut().for_each(|number| *number *= *factor as f32);
        rest = behind;
    }
}

impl ModelConfig {
    /// What files are called that hold such a model; `None` where llama.cpp has no such.
    #[must_use]
    pub fn gguf_architecture(&self) -> Option<&'static str> {
        let of_family = self.family().gguf;
        let has_mixture = self.blocks.iter().any(|block| block.mixture().is_some());
        match of_family.without_states {
            Some(_) if self.blocks.iter().any(|block| block.state_space().is_some()) => {}
            Some(_) if has_mixture => return None,
            Some(other) => return Some(other),
            None => {}
        }
        if has_mixture { of_family.of_mixtures.or(of_family.architecture) } else { of_family.architecture }
    }
}
