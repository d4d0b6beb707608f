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

    /// Widths of what the projection of the input makes: the gate, the inputs of heads, what writes and what reads, and strengths.
    #[must_use]
    pub fn widths(&self) -> [usize; 5] {
        let of_groups = self.num_groups * self.state_dim;
        [self.inner_width(), self.inner_width(), of_groups, of_groups, self.num_heads]
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

/// A state space with one decay a head (Dao and Gu, 2024): short convolution, states, gate and mostly a norm behind it.
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
    /// Names within the block of its tensors that are no linear layers.
    pub names: &'static StateNames,
    /// Whether there is a norm behind the gate.
    pub has_norm: bool,
    /// Factors of what the projection of its input makes: of the gate, of inputs of heads, of what writes and what reads states, and of
    /// strengths (Falcon-H1); absent: 1.
    pub scales: Option<[f64; 5]>,
}

/// Names within the block of what a state space has.
#[derive(Debug, PartialEq, Eq)]
pub struct StateNames {
    /// Its linear layers, in the order of the forward pass.
    pub linears: [&'static str; 2],
    /// Weight of its convolution.
    pub conv: &'static str,
    /// What the convolution adds.
    pub conv_bias: &'static str,
    /// Logarithm of the decay's rate.
    pub a_log: &'static str,
    /// Added to the projection to strengths.
    pub dt_bias: &'static str,
    /// What a head's input is multiplied by, which is added to what is read of its state.
    pub skip: &'static str,
    /// Weight of the norm behind the gate.
    pub norm: &'static str,
}

/// Those of most families.
pub static IN_MAMBA: StateNames = StateNames {
    linears: ["mamba.in_proj", "mamba.out_proj"],
    conv: "mamba.conv1d.weight",
    conv_bias: "mamba.conv1d.bias",
    a_log: "mamba.A_log",
    dt_bias: "mamba.dt_bias",
    skip: "mamba.D",
    norm: "mamba.norm.weight",
};

/// Those of Nemotron-H.
pub static IN_MIXER: StateNames = StateNames {
    linears: ["mixer.in_proj", "mixer.out_proj"],
    conv: "mixer.conv1d.weight",
    conv_bias: "mixer.conv1d.bias",
    a_log: "mixer.A_log",
    dt_bias: "mixer.dt_bias",
    skip: "mixer.D",
    norm: "mixer.norm.weight",
};

impl StateSpace {
    /// Its tensors that are no linear layers, with their shapes.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, Vec<usize>)> + use<> {
        let Self { heads, kernel_size, has_conv_bias, names, has_norm, .. } = *self;
        let of_heads = [names.a_log, names.dt_bias, names.skip].map(|name| (name, vec![heads.num_heads]));
        let bias = has_conv_bias.then(|| (names.conv_bias, vec![heads.xbc_width()]));
        let conv = (names.conv, vec![heads.xbc_width(), 1, kernel_size]);
        let norm = has_norm.then(|| (names.norm, vec![heads.inner_width()]));
        [conv].into_iter().chain(bias).chain(of_heads).chain(norm)
    }
}
