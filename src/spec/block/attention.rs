//! Self-attention as data: heads, norms, and where queries, keys and values come from.

use super::{Projections, SiteId};

/// Causal self-attention with grouped queries.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Its heads.
    pub heads: Heads,
    /// The rotary embedding of queries and keys, by its place in [`ModelConfig::ropes`](crate::spec::ModelConfig::ropes); absent:
    /// there is none.
    pub rope: Option<usize>,
    /// How queries and keys are normed before the rotary embedding; absent: they are not.
    pub query_key_norms: Option<QueryKeyNorms>,
    /// Names within the block of the norms of queries and of keys.
    pub norm_names: [&'static str; 2],
    /// Whether every head has a sink: one more score, without a value (gpt-oss).
    pub has_sinks: bool,
    /// Whether the layer of queries also makes a gate beside each of their heads, whose sigmoid multiplies the output (Qwen3.5).
    pub has_output_gate: bool,
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
    /// Queries and keys from these; values are the keys before norm and rotary embedding (Gemma 4).
    ValuesAreKeys(Projections<2>),
    /// Queries from a projection; keys and values are those of an earlier layer (Gemma 4).
    OfLayer {
        /// The projection.
        queries: SiteId,
        /// The layer.
        layer: usize,
    },
}

impl Qkv {
    /// The projections of the input.
    #[must_use]
    pub fn sites(&self) -> &[SiteId] {
        match self {
            Self::All(projections) => projections.sites(),
            Self::ValuesAreKeys(projections) => projections.sites(),
            Self::OfLayer { queries, .. } => std::slice::from_ref(queries),
        }
    }
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorms {
    /// Of every head by itself (Qwen3).
    Heads,
    /// Of all heads together (`olmo2`).
    Whole,
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
    /// Scaled scores `s` become `cap tanh(s / cap)` (Gemma 2); absent: they stay as they are.
    pub soft_cap: Option<f64>,
}

impl Attention {
    /// The earlier layer whose keys and values it uses, if it has none of its own.
    #[must_use]
    pub fn key_value_layer(&self) -> Option<usize> {
        match self.qkv {
            Qkv::OfLayer { layer, .. } => Some(layer),
            Qkv::All(_) | Qkv::ValuesAreKeys(_) => None,
        }
    }

    /// Width of its own keys, and of its own values.
    #[must_use]
    pub fn own_key_value_width(&self) -> usize {
        self.key_value_layer().map_or(self.heads.key_value_width(), |_| 0)
    }

    /// Widths of the norms of queries and of keys, where it has such; of keys, they may be those of an earlier layer.
    #[must_use]
    pub fn norm_widths(&self) -> Option<[usize; 2]> {
        Some(match self.query_key_norms? {
            QueryKeyNorms::Heads => [self.heads.head_dim; 2],
            QueryKeyNorms::Whole => [self.heads.query_width(), self.heads.key_value_width()],
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

    /// Number of visible pairs of a query and a key in a document of `len` tokens: a token sees itself and the tokens
    /// before it, within the window.
    #[must_use]
    pub fn visible_pairs(&self, len: usize) -> usize {
        let window = self.window.unwrap_or(len).min(len);
        window * (window + 1) / 2 + (len - window) * window
    }
}
