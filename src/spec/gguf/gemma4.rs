//! The layers of Gemma 4 in GGUF files: lists with a number for each.

use serde_json::{Map, Value, json};

use crate::schema::Problem;
use crate::util::gguf::GgufFile;

/// Adds its keys to those that `config.json` shares with other families.
pub(super) fn read(
    file: &GgufFile,
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, Value>,
) -> Result<(), Problem> {
    let missing = |name: &str| file.problem(format!("`{}` is missing", key(name)));
    let required = |name: &str| file.integer(&key(name))?.ok_or_else(|| missing(name));
    let pattern = "attention.sliding_window_pattern";
    let is_local = file.integers(&key(pattern)).ok_or_else(|| missing(pattern))?;
    let num_sharing = file.integer(&key("attention.shared_kv_layers"))?.unwrap_or(0);
    let kinds: Vec<_> =
        is_local.iter().map(|local| if *local == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let layers = || is_local.iter().enumerate().filter(|(_, local)| **local == 0).map(|(layer, _)| layer);
    let num_kv_heads = |layer: Option<usize>| {
        let all = file.integers(&key("attention.head_count_kv"));
        all.map_or(json["num_key_value_heads"].clone(), |all| json!(layer.and_then(|layer| all.get(layer))))
    };
    let of_full = |layer: usize| {
        (layer.to_string(), json!({"head_dim": json["head_dim"], "num_key_value_heads": num_kv_heads(Some(layer))}))
    };
    let of_full: Map<String, Value> = layers().map(of_full).collect();
    let of_local = num_kv_heads(is_local.iter().position(|local| *local != 0).or(Some(0)));
    let widths = file.integers(&key("feed_forward_length"));
    let has_values = |layer: usize| file.tensors().contains_key(&format!("blk.{layer}.attn_v.weight"));
    let local_theta = file.number(&key("rope.freq_base_swa")).unwrap_or(10_000.0);
    let more = json!({
        "layer_types": kinds,
        "sliding_window": required("attention.sliding_window")?,
        "per_layer_config": of_full,
        "num_key_value_heads": of_local,
        "head_dim": required("attention.key_length_swa")?,
        "attention_k_eq_v": layers().next().is_some_and(|layer| !has_values(layer)),
        "num_kv_shared_layers": num_sharing,
        "use_double_wide_mlp": widths.is_some_and(|widths| widths.first() < widths.last()),
        "hidden_size_per_layer_input": required("embedding_length_per_layer_input")?,
        "vocab_size_per_layer_input": file.tensors().get("token_embd.weight").map(|tensor| tensor.shape.first()),
        "final_logit_softcapping": file.number(&key("final_logit_softcapping")),
        "enable_moe_block": json.contains_key("num_experts"),
        "top_k_experts": json.get("num_experts_per_tok"),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": json["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    });
    let more = more.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    json.extend(more.map(|(key, value)| (key.clone(), value.clone())));
    Ok(())
}
