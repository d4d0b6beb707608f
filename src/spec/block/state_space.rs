//! State spaces (Mamba-2): their heads, and the names of their tensors.

use super::SiteId;

/// The heads of a state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateHeads {
    /// Number of heads, each with a state; a multiple of `num_groups`.
    pub num_heads: usize,
    /// Heads of a group share what writes and reads their states.
    pub num_groups: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Numbers of a state for each of its head's.
    pub state_dim: usize,
}

impl StateHeads {
    /// Width of all heads.
    #[must_use]
    pub fn inner_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of what the convolution sees: all heads, and for every group what writes and what reads.
    #[must_use]
    pub fn xbc_width(&self) -> usize {
        self.inner_width() + 2 * self.num_groups * self.state_dim
    }

    /// Heads of a group.
    #[must_use]
    pub fn group(&self) -> usize {
        self.num_heads / self.num_groups
    }

    /// Numbers of a head's state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.state_dim * self.head_dim
    }

    /// Floating-point operations of the forward for a token, in chunks of so many: the products of a chunk with its state, and of
    /// its tokens with each other up to the diagonal.
    #[must_use]
    pub fn flops_per_token(&self, chunk_tokens: usize) -> usize {
        self.num_heads * (4 * self.state_len() + (chunk_tokens + 1) * (self.state_dim + self.head_dim))
    }
}

/// A state space with one decay a head (Dao and Gu, 2024): short convolution, states, and a norm behind the gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpace {
    /// Its heads.
    pub heads: StateHeads,
    /// Tokens that the convolution sees, the current one included.
    pub kernel_size: usize,
    /// Whether the convolution adds a bias.
    pub has_conv_bias: bool,
    /// Bounds of strengths.
    pub bounds: [f64; 2],
    /// The projection of its input: the gate, what the convolution sees, and a number for each head's strength, side by side.
    pub input: SiteId,
    /// The projection of its output.
    pub output: SiteId,
}

impl StateSpace {
    /// Its tensors that are no linear layers, with their shapes.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, Vec<usize>)> + use<> {
        let Self { heads, kernel_size, has_conv_bias, .. } = *self;
        let of_heads = [STATE_A_LOG, STATE_DT_BIAS, STATE_SKIP].map(|name| (name, vec![heads.num_heads]));
        let bias = has_conv_bias.then(|| (STATE_CONV_BIAS, vec![heads.xbc_width()]));
        let conv = (STATE_CONV, vec![heads.xbc_width(), 1, kernel_size]);
        [conv].into_iter().chain(bias).chain(of_heads).chain([(STATE_NORM, vec![heads.inner_width()])])
    }
}

/// Weight of its convolution.
pub const STATE_CONV: &str = "mamba.conv1d.weight";
/// What the convolution adds.
pub const STATE_CONV_BIAS: &str = "mamba.conv1d.bias";
/// Logarithm of the decay's rate.
pub const STATE_A_LOG: &str = "mamba.A_log";
/// Added to the projection to strengths.
pub const STATE_DT_BIAS: &str = "mamba.dt_bias";
/// What a head's input is multiplied by, which is added to what is read of its state.
pub const STATE_SKIP: &str = "mamba.D";
/// Weight of the norm behind the gate.
pub const STATE_NORM: &str = "mamba.norm.weight";

/// Names of its linear layers, in the order of the forward pass.
pub const STATE_NAMES: [&str; 2] = ["mamba.in_proj", "mamba.out_proj"];
