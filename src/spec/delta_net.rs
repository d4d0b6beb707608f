//! Gated `DeltaNet`: the heads of a linear attention with a state of fixed size, and the names of its tensors.

/// The heads of a delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Number of query and key heads.
    pub num_key_heads: usize,
    /// Number of value heads, each with a state; a multiple of `num_key_heads`.
    pub num_value_heads: usize,
    /// Width of a query or key head.
    pub key_head_dim: usize,
    /// Width of a value head.
    pub value_head_dim: usize,
}

impl DeltaHeads {
    /// Width of all query heads, and of all key heads.
    #[must_use]
    pub fn key_width(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// Width of all value heads.
    #[must_use]
    pub fn value_width(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// Width of queries, keys and values side by side.
    #[must_use]
    pub fn qkv_width(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Value heads that share a key head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.num_value_heads / self.num_key_heads
    }

    /// Floating-point operations of the forward for a token, in chunks of so many: the products of a chunk with its state, and of
    /// its tokens with each other up to the diagonal.
    #[must_use]
    pub fn flops_per_token(&self, chunk_tokens: usize) -> usize {
        let with_state = 6 * self.state_len();
        let with_tokens = (chunk_tokens + 1) * (2 * self.key_head_dim + 2 * self.value_head_dim);
        self.num_value_heads * (with_state + with_tokens)
    }

    /// Numbers of a head's state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.key_head_dim * self.value_head_dim
    }
}

/// Names of its tensors that are no linear layers.
pub const CONV: &str = "linear_attn.conv1d.weight";
/// Logarithm of the decay's rate.
pub const A_LOG: &str = "linear_attn.A_log";
/// Added to the decay's projection.
pub const DT_BIAS: &str = "linear_attn.dt_bias";
/// Weight of the norm of a value head, which is stored as it is also where others are stored less 1.
pub const GATED_NORM: &str = "linear_attn.norm.weight";

/// Names of the two that some families have for all of its input.
pub const DELTA_NET_FUSED_NAMES: [&str; 2] = ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"];

/// Names of its linear layers, in the order of the forward pass.
pub const DELTA_NET_NAMES: [&str; 5] = [
    "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a",
    "linear_attn.out_proj",
];
