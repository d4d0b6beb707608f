//! Rotary position embedding (Su et al., 2021) in Hugging Face's half-split layout: dimension `i` turns with
//! `i + head_dim / 2`.

use burn::tensor::{DType, Tensor};

use super::layout::Layout;
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
    let [tokens, width] = x.dims();
    let half = width / num_heads / 2;
    let dtype = x.dtype();
    let (cos, sin) = layout.angles(); // [tokens, half]
    let cos = cos.unsqueeze_dim::<3>(1);
    let sin = sin.unsqueeze_dim::<3>(1);
    let sin = if inverse { sin.neg() } else { sin };
    let x = x.cast(DType::F32).reshape([tokens, num_heads, 2 * half]);
    let first = x.clone().narrow(2, 0, half);
    let second = x.narrow(2, half, half);
    let turned_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let turned_second = second * cos + first * sin;
    Tensor::cat(vec![turned_first, turned_second], 2).reshape([tokens, width]).cast(dtype)
}
