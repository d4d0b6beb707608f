//! Attention with latents as llama.cpp describes it: one head of keys and values in the cache, and the widths that they are made of.

use super::file::refused;
use crate::schema::Problem;
use crate::spec::family::OwnRopes;
use crate::spec::gguf::{DENSE_LAYERS, KEY_WIDTHS, LATENT_RANKS};
use crate::spec::{Block, Gated, ModelConfig, RopePairs, RopeScaling};
use crate::util::gguf::Value;

/// Its keys besides those of other families.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "counts below 2^32, and the file has f32")]
pub(super) fn keys(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>, Problem> {
    let attention = config.blocks.iter().find_map(Block::attention);
    let Some((attention, latent)) = attention.and_then(|it| Some((it, it.latent()?))) else { return Ok(Vec::new()) };
    let count = |value: usize| Value::U32(value as u32);
    let biased = config.blocks.iter().flat_map(|block| &block.sites).any(|site| site.has_bias);
    let rope = &config.ropes[0];
    // Those of MiniCPM 3 are none in the cache.
    let is_split = config.family().gguf.splits_latents;
    if is_split && rope.pairs != RopePairs::Neighbours {
        return refused(config, "`rope_interleave` = false");
    }
    if biased {
        return refused(config, "biases of attention");
    }
    // It goes by the number of layers: V2-Lite has 27.
    if latent.queries.is_none() && !is_split {
        return refused(config, "queries without a latent");
    }
    if latent.queries.is_none() && ![26, 27].contains(&config.num_layers()) {
        return refused(config, "queries without a latent in other than 26 or 27 layers");
    }
    let [of_queries, of_keys] = LATENT_RANKS.map(|(_, key)| key);
    let mut keys = vec![(of_keys, count(latent.rank)), ("vocab_size", count(config.vocab_size))];
    keys.extend(latent.queries.map(|(_, rank)| (of_queries, count(rank))));
    if !is_split {
        return Ok(keys);
    }
    keys.extend(KEY_WIDTHS.into_iter().zip([attention.heads.head_dim, latent.value_dim].map(count)));
    if config.blocks.iter().all(|block| block.mixture().is_none()) {
        let width = config.blocks[0].gated().map_or(0, |Gated { intermediate_size, .. }| *intermediate_size);
        keys.push((DENSE_LAYERS, count(config.num_layers())));
        keys.extend([("expert_feed_forward_length", count(width)), ("expert_shared_count", count(0))]);
    }
    if let Some(growth) = rope.query_growth {
        keys.push(("attention.temperature_scale", Value::F32(growth.beta as f32)));
        keys.push(("attention.temperature_length", count(growth.period)));
    }
    Ok(keys)
}

/// What a yarn has as `mscale_all_dim` in a model with latents, which scores grow by; `None` where it has none.
pub(super) fn yarn_growth(config: &ModelConfig) -> Option<f64> {
    let attention = config.blocks.iter().find_map(Block::attention).filter(|it| it.latent().is_some())?;
    let Some(RopeScaling::Yarn { factor, .. }) = config.ropes[0].scaling else { return None };
    #[expect(clippy::cast_precision_loss, reason = "a head is a few hundred wide at most")]
    let growth = (attention.heads.scale * (attention.heads.head_dim as f64).sqrt()).sqrt() - 1.0;
    let growth = growth / (0.1 * factor.ln());
    (growth > 1e-6 || config.family().own_ropes == OwnRopes::Ministral).then_some(growth)
}
