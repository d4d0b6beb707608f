//! Rotary position embedding by the kernel of `rotary.cu`, in place.

use burn::tensor::Tensor;

use super::matrix::stride;
use super::stream::{Launch, Module};
use crate::ops::custom::change;
use crate::ops::layout::Layout;

pub(super) static MODULE: Module = Module { name: "rotary", ptx: include_str!("rotary.ptx") };

const THREADS: usize = 128;
/// Pairs that a thread turns.
const PAIRS: usize = 8;

/// [`rotate`](crate::ops::rotary::rotate) of `bf16`.
pub(super) fn rotate(x: Tensor<2>, layout: &Layout, rope: usize, num_heads: usize, inverse: bool) -> Tensor<2> {
    let [tokens, width] = x.dims();
    let turns = layout.turns(rope, &x.device());
    let inputs = [turns.cos.into_dispatch(), turns.sin.into_dispatch(), turns.rows.into_dispatch()];
    let [x] = change("rotate", [x.into_dispatch()], inputs, move |[x], [cos, sin, rows]| {
        let grid = [(width / 2).div_ceil(PAIRS * THREADS), tokens, 1];
        let rotary = Launch::new(&MODULE, "rotary", grid, THREADS).change(x).read(&cos).read(&sin).read(&rows);
        rotary.ints([stride(x), num_heads, width / num_heads, usize::from(inverse)]).launch();
    });
    Tensor::from_dispatch(x)
}
