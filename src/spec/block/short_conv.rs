//! A gated short convolution as data.

use super::SiteId;

/// A convolution of every channel over the last tokens, with a gate before and one behind it (LFM2):
/// `out_proj(c * conv(b * x))`, where `in_proj` makes `b`, `c` and `x`, each as wide as the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConv {
    /// Tokens that the convolution sees, the current one included.
    pub kernel_size: usize,
    /// The projection of its input.
    pub input: SiteId,
    /// The projection of its output.
    pub output: SiteId,
}

/// Name within the block of the weight of the convolution.
pub const GATED_CONV: &str = "conv.conv.weight";

/// Names of its linear layers, in the order of the forward pass.
pub const SHORT_CONV_NAMES: [&str; 2] = ["conv.in_proj", "conv.out_proj"];

impl ShortConv {
    /// Its tensor that is no linear layer, with its shape.
    #[must_use]
    pub fn tensor(&self, hidden_size: usize) -> (&'static str, Vec<usize>) {
        (GATED_CONV, vec![hidden_size, 1, self.kernel_size])
    }
}
