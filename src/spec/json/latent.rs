//! The shape of an attention with latents.

use super::{MAX_HEADS_WIDTH, count_or};
use crate::schema::{Section, Value};
use crate::spec::block::attention::{Attention, Heads, LATENT_NAMES, Latent, Qkv};
use crate::spec::block::{Role, Site};
use crate::spec::family::{AttentionExtra, Family, LatentWidths};
use crate::spec::{HEAD_NORMS, Rope, RopePairs, RopeScaling, SITE_NAMES};

/// Its widths, in a family that has it.
pub(super) fn widths(json: &mut Section, family: &Family, hidden: usize) -> Option<LatentWidths> {
    let AttentionExtra::Latent(default) = family.attention_extra else { return None };
    let num_heads = count_or(json, "num_attention_heads", family.num_attention_heads, 1 << 16);
    let is_null = json.is_null("q_lora_rank");
    let mut count = |key, default| json.count(key, default, 1..=1 << 16);
    let queries = default.queries.filter(|_| !is_null).map(|rank| count("q_lora_rank", rank));
    let key_values = count("kv_lora_rank", default.key_values);
    let [still, turning, values] = default.of_head;
    let values = if values == 0 { (hidden / num_heads).max(1) } else { values };
    let of_head = [("qk_nope_head_dim", still), ("qk_rope_head_dim", turning), ("v_head_dim", values)]
        .map(|(key, default)| count(key, default));
    Some(LatentWidths { queries, key_values, of_head })
}

impl LatentWidths {
    /// The heads of every layer.
    pub(super) fn heads(self, json: &mut Section, num_heads: usize) -> Heads {
        let [still, turning, values] = self.of_head;
        let head_dim = still + turning;
        if !turning.is_multiple_of(2) {
            let message = format!("= {turning} is odd: rotary embeddings turn pairs of features");
            json.problem("qk_rope_head_dim", message);
        }
        if values > head_dim {
            let message = format!("= {values}, expected at most `qk_nope_head_dim` + `qk_rope_head_dim` = {head_dim}");
            json.problem("v_head_dim", message);
        }
        if num_heads * head_dim > MAX_HEADS_WIDTH {
            let message = format!("= {num_heads} heads of {head_dim}, expected at most {MAX_HEADS_WIDTH} in all");
            json.problem("num_attention_heads", message);
        }
        json.only(
            "num_key_value_heads",
            &format!("{num_heads}, as many as of queries"),
            |value| matches!(value, Value::Integer(count) if usize::try_from(*count) == Ok(num_heads)),
        );
        #[expect(clippy::cast_precision_loss, reason = "a head is a few hundred wide at most")]
        let scale = 1.0 / (head_dim as f64).sqrt();
        Heads { num_heads, num_kv_heads: num_heads, head_dim, scale, window: None, chunk: None, soft_cap: None }
    }

    /// The attention of a layer, whose linear layers are the first of `sites`.
    pub(super) fn of_layer(self, heads: Heads, hidden: usize, biases: [bool; 2], sites: &mut Vec<Site>) -> Attention {
        let [still, num_turning, value_dim] = self.of_head;
        let [of_inputs, of_output] = biases;
        let mut add = |name: &str, shape, has_bias| {
            sites.push(Site { name: name.to_owned(), shape, has_bias, role: Role::Linear });
            sites.len() - 1
        };
        let [q, .., output, _, _, _] = SITE_NAMES;
        let [queries_down, queries_up, down, up] = LATENT_NAMES;
        let (input, queries) = match self.queries {
            None => (add(q, [heads.query_width(), hidden], false), None),
            Some(rank) => {
                let input = add(queries_down, [rank, hidden], of_inputs);
                (input, Some((add(queries_up, [heads.query_width(), rank], false), rank)))
            }
        };
        let rank = self.key_values;
        let inputs = [input, add(down, [rank + num_turning, hidden], of_inputs)];
        let key_values = add(up, [heads.num_heads * (still + value_dim), rank], false);
        let output = add(output, [hidden, heads.num_heads * value_dim], of_output);
        Attention {
            heads,
            rope: Some(0),
            query_growth: None,
            query_key_norms: None,
            norm_names: HEAD_NORMS,
            has_sinks: false,
            has_output_gate: false,
            gate: None,
            has_value_norm: false,
            qkv: Qkv::Latent(Latent { inputs, queries, key_values, rank, num_turning, value_dim }),
            output,
        }
    }
}

/// What the rotary embedding of such a model has of its own: its pairs. Returns a factor of the scores: a yarn's, where it has one
/// for all numbers of a head (`mscale_all_dim`).
pub(super) fn turn(json: &mut Section, rope: &mut Rope) -> f64 {
    if !json.boolean("rope_interleave", rope.pairs == RopePairs::Neighbours) {
        rope.pairs = RopePairs::Halves;
    }
    let Some(RopeScaling::Yarn { factor, .. }) = rope.scaling else { return 1.0 };
    let name = if json.value("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let of_all = json.below(name, "an object or null").number("mscale_all_dim", 0.0, 0.0..=1e3);
    let growth = if factor > 1.0 { 0.1 * of_all * factor.ln() + 1.0 } else { 1.0 };
    growth * growth
}
