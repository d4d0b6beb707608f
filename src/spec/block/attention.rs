//! Self-attention as data: heads, norms, and where queries, keys and values come from.

use super::{Projections, SiteId};
use crate::spec::QueryGrowth;

/// Causal self-attention with grouped queries.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Its heads.
    pub heads: Heads,
    /// The rotary embedding of queries and keys, by its place in [`ModelConfig::ropes`](crate::spec::ModelConfig::ropes); absent:
    /// there is none.
    pub rope: Option<usize>,
    /// How queries grow with their position; absent: they do not.
    pub query_growth: Option<QueryGrowth>,
    /// How queries and keys are normed; absent: they are not.
    pub query_key_norms: Option<QueryKeyNorms>,
    /// Names within the block of the norms of queries and of keys.
    pub norm_names: [&'static str; 2],
    /// Whether every head has a sink: one more score, without a value (gpt-oss).
    pub has_sinks: bool,
    /// Whether the layer of queries also makes a gate beside each of their heads, whose sigmoid multiplies the output (Qwen3.5).
    pub has_output_gate: bool,
    /// The layer that makes such a gate, where it has its own (Muse Glimmer).
    pub gate: Option<SiteId>,
    /// Whether values are normed too, by a norm without weights (Gemma 4).
    pub has_value_norm: bool,
    /// The projections of its input to queries, keys and values.
    pub qkv: Qkv,
    /// The projection of its output.
    pub output: SiteId,
}

/// Where queries, keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qkv {
    /// From projections of the input.
    All(Projections<3>),
    /// From one, of each head side by side (GPT-NeoX).
    ByHead(SiteId),
    /// Queries and keys from these; values are the keys before norm and rotary embedding (Gemma 4).
    ValuesAreKeys(Projections<2>),
    /// Queries from a projection; keys and values are those of an earlier layer (Gemma 4).
    OfLayer {
        /// The projection.
        queries: SiteId,
        /// The layer.
        layer: usize,
    },
    /// From latents.
    Latent(Latent),
}

/// Queries, keys and values from normed latents that are narrower than they are (DeepSeek-AI, 2024, section 2.1). Some numbers of a
/// head turn: of queries its last, and of keys those that the input makes for all heads alike. Values may be narrower than keys;
/// attention has zeros behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// The projections of the input: to the latent of queries, or to queries; to that of keys and values, with what turns behind it.
    pub inputs: [SiteId; 2],
    /// The projection from the latent of queries, and its width; absent: they come from the input.
    pub queries: Option<(SiteId, usize)>,
    /// The projection from the latent of keys and values: of each head, what does not turn and the values.
    pub key_values: SiteId,
    /// Width of that latent.
    pub rank: usize,
    /// Numbers of a head that turn.
    pub num_turning: usize,
    /// Width of the values of a head.
    pub value_dim: usize,
}

impl Latent {
    /// Whether a linear layer is one of its projections.
    #[must_use]
    pub fn has(&self, site: SiteId) -> bool {
        let queries = self.queries.map(|(site, _)| site);
        self.inputs.contains(&site) || queries == Some(site) || self.key_values == site
    }

    /// The heads of an attention to the latents, with what turns behind them, in place of keys and values.
    #[must_use]
    pub fn heads(&self, heads: Heads) -> Heads {
        Heads { num_kv_heads: 1, head_dim: self.rank + self.num_turning, ..heads }
    }
}

/// Names within the block of the norms of the latents of queries, and of keys and values.
pub const LATENT_NORMS: [&str; 2] = ["self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"];

/// Names of the linear layers with a latent of queries, in the order of the forward pass, and of what makes queries without one.
pub const LATENT_NAMES: [&str; 4] =
    ["self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"];

impl Qkv {
    /// The projections of the input.
    #[must_use]
    pub fn sites(&self) -> &[SiteId] {
        match self {
            Self::All(projections) => projections.sites(),
            Self::ByHead(site) => std::slice::from_ref(site),
            Self::ValuesAreKeys(projections) => projections.sites(),
            Self::OfLayer { queries, .. } => std::slice::from_ref(queries),
            Self::Latent(latent) => &latent.inputs,
        }
    }
}

/// Name of the layer that makes the gate of an attention's output.
pub const GATE_NAME: &str = "self_attn.gate_proj";

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorms {
    /// Of every head by itself (Qwen3).
    Heads,
    /// Of all heads together (`olmo2`).
    Whole,
    /// Of every head by itself, after the rotary embedding (Hunyuan).
    Turned,
    /// Of every head by itself without weights, after the rotary embedding (Llama 4), which is as before it (Muse Glimmer).
    Unweighted,
    /// `LayerNorm` of every head by itself without bias, each with weights of its own, in files as [`HeadWeights`] says.
    ByHead(HeadWeights),
}

/// Names of tensors, with their shapes.
pub(crate) type NamedShapes = Vec<(String, Vec<usize>)>;

/// How files have the weights of norms by head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadWeights {
    /// In one tensor, `[heads, head_dim]` (Cohere).
    Together,
    /// In a tensor for each head, `norms.0.weight` and so on (`StableLM`).
    Apart,
}

/// The heads of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// How many tokens a token can look back, itself included; absent: all.
    pub window: Option<usize>,
    /// Tokens see those before them in their own of the chunks of so many tokens in which a text is taken (Llama 4); absent: all.
    pub chunk: Option<usize>,
    /// Scaled scores `s` become `cap tanh(s / cap)` (Gemma 2); absent: they stay as they are.
    pub soft_cap: Option<f64>,
}

impl Attention {
    /// The earlier layer whose keys and values it uses, if it has none of its own.
    #[must_use]
    pub fn key_value_layer(&self) -> Option<usize> {
        match self.qkv {
            Qkv::OfLayer { layer, .. } => Some(layer),
            Qkv::All(_) | Qkv::ByHead(_) | Qkv::ValuesAreKeys(_) | Qkv::Latent(_) => None,
        }
    }

    /// Its latents, where it has such.
    #[must_use]
    pub fn latent(&self) -> Option<&Latent> {
        if let Qkv::Latent(latent) = &self.qkv { Some(latent) } else { None }
    }

    /// The norms of its latents with their widths.
    pub fn latent_norms(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let widths = self.latent().map(|latent| [latent.queries.map(|(_, rank)| rank), Some(latent.rank)]);
        LATENT_NORMS.into_iter().zip(widths.into_iter().flatten()).filter_map(|(name, width)| Some((name, width?)))
    }

    /// Its heads, as wide as its products with keys and with values are on average.
    #[must_use]
    pub fn mean_heads(&self) -> Heads {
        let head_dim =
            self.latent().map_or(self.heads.head_dim, |latent| self.heads.head_dim.midpoint(latent.value_dim));
        Heads { head_dim, ..self.heads }
    }

    /// Width of its own keys, and of its own values.
    #[must_use]
    pub fn own_key_value_width(&self) -> usize {
        self.key_value_layer().map_or(self.heads.key_value_width(), |_| 0)
    }

    /// The tensors of norms by head, of queries and of keys, where it has such: their names within the block and shapes.
    #[must_use]
    pub fn norms_by_head(&self) -> Option<[NamedShapes; 2]> {
        let Some(QueryKeyNorms::ByHead(weights)) = self.query_key_norms else { return None };
        let Heads { num_heads, num_kv_heads, head_dim, .. } = self.heads;
        let [of_q, of_k] = self.norm_names;
        Some([(of_q, num_heads), (of_k, num_kv_heads)].map(|(name, heads)| match weights {
            HeadWeights::Together => vec![(format!("{name}.weight"), vec![heads, head_dim])],
            HeadWeights::Apart => {
                (0..heads).map(|head| (format!("{name}.norms.{head}.weight"), vec![head_dim])).collect()
            }
        }))
    }

    /// Widths of the norms of queries and of keys, where it has such; of keys, they may be those of an earlier layer.
    #[must_use]
    pub fn norm_widths(&self) -> Option<[usize; 2]> {
        Some(match self.query_key_norms? {
            QueryKeyNorms::Heads | QueryKeyNorms::Turned | QueryKeyNorms::Unweighted => [self.heads.head_dim; 2],
            QueryKeyNorms::Whole | QueryKeyNorms::ByHead(_) => [self.heads.query_width(), self.heads.key_value_width()],
        })
    }
}

impl Heads {
    /// Width of all query heads.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key heads, and of all value heads.
    #[must_use]
    pub fn key_value_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// The first token of a text that the one at `position` sees.
    #[must_use]
    pub fn first_seen(&self, position: usize) -> usize {
        let in_window = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        in_window.max(self.chunk.map_or(0, |chunk| position - position % chunk))
    }

    /// Number of visible pairs of a query and a key in a document of `len` tokens: a token sees itself and the tokens
    /// before it, within the window or chunk.
    #[must_use]
    pub fn visible_pairs(&self, len: usize) -> usize {
        if let Some(chunk) = self.chunk.filter(|chunk| *chunk < len) {
            let [whole, rest] = [chunk, len % chunk].map(|len| len * (len + 1) / 2);
            return len / chunk * whole + rest;
        }
        let window = self.window.unwrap_or(len).min(len);
        window * (window + 1) / 2 + (len - window) * window
    }
}
