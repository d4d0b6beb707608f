//! Rotary position embedding (Su et al., 2021) in Hugging Face's half-split layout: dimension `i` turns with
//! `i + head_dim / 2`.

use burn::tensor::{DType, Tensor};

use super::layout::{Angles, Layout};
use super::place::Place;
use super::{cpu, host, profile};

/// Rotates every head of `x` by its token's angles; `inverse` rotates back, which is the gradient.
///
/// # Shapes
/// `x`: `[tokens, num_heads * head_dim]`.
#[must_use]
pub fn rotate(x: Tensor<2>, layout: &Layout, num_heads: usize, inverse: bool) -> Tensor<2> {
    // Not a clone of `x`: a second owner would make the kernel copy it.
    let cost = profile::passes(&x, 2);
    let work = || match layout.place() {
        Place::Plain(_) => plain_rotate(x, layout, num_heads, inverse),
        Place::Cpu => {
            let (head_dim, (cos, sin)) = (x.dims()[1] / num_heads, layout.table());
            host::update(x, |x| cpu::rope(x, cos, sin, layout.positions(), num_heads, head_dim, inverse))
        }
    };
    profile::measure("rotate", || cost, work)
}

/// [`rotate`] in plain tensor calls.
#[must_use]
pub fn plain_rotate(x: Tensor<2>, layout: &Layout, num_heads: usize, inverse: bool) -> Tensor<2> {
    let ([tokens, width], dtype) = (x.dims(), x.dtype());
    let Angles { cos, sin, swap } = layout.angles();
    let heads = [tokens, num_heads, width / num_heads];
    // Two views: a fused kernel reads a tensor either in place or by index.
    let (kept, turned) = (x.clone().reshape(heads), x.reshape(heads).select(2, swap));
    let (turned, kept) = (turned.cast(DType::F32) * sin, kept.cast(DType::F32) * cos);
    let x = if inverse { kept - turned } else { kept + turned };
    x.cast(dtype).reshape([tokens, width])
}
