//! Attention with latents in GGUF files: its widths, and the factor of its scores.

use serde_json::{Map, Value, json};

use crate::schema::Problem;
use crate::spec::family::Family;
use crate::util::gguf::GgufFile;

/// The widths of the latents of queries and of keys and values, in `config.json` and behind the architecture.
pub const LATENT_RANKS: [(&str, &str); 2] =
    [("q_lora_rank", "attention.q_lora_rank"), ("kv_lora_rank", "attention.kv_lora_rank")];

/// Widths of a head's keys and of its values behind the architecture, where those of a file's usual keys are the cache's.
pub const KEY_WIDTHS: [&str; 2] = ["attention.key_length_mla", "attention.value_length_mla"];

/// A tenth of what a yarn has as `mscale_all_dim`, behind the architecture.
pub const YARN_GROWTH: &str = "rope.scaling.yarn_log_multiplier";

/// Adds its keys to those that `config.json` shares with other families.
pub(super) fn read(
    file: &GgufFile,
    family: &Family,
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, Value>,
) -> Result<(), Problem> {
    for (ours, theirs) in LATENT_RANKS {
        json.insert(ours.to_owned(), json!(file.integer(&key(theirs))?));
    }
    let turning = file.integer(&key("rope.dimension_count"))?.unwrap_or(0);
    let widths =
        if family.gguf.splits_latents { KEY_WIDTHS } else { ["attention.key_length", "attention.value_length"] };
    let [keys, mut values] = widths.map(|width| file.integer(&key(width)));
    if !family.gguf.splits_latents && matches!(values, Ok(None)) {
        let [hidden, heads] = ["hidden_size", "num_attention_heads"].map(|key| json[key].as_u64().unwrap_or(0));
        values = Ok(Some(hidden / heads.max(1)));
    }
    let (Some(keys), Some(values)) = (keys?, values?) else {
        let problem = file.problem(format!("`{}` is missing: the file is of a time before it", key(widths[0])));
        return Err(problem.hint("convert the model again, or use its original safetensors"));
    };
    json.insert("qk_rope_head_dim".to_owned(), json!(turning));
    json.insert("qk_nope_head_dim".to_owned(), json!(keys.saturating_sub(turning)));
    json.insert("v_head_dim".to_owned(), json!(values));
    json.insert("num_key_value_heads".to_owned(), json["num_attention_heads"].clone());
    Ok(())
}
