//! Rotary position embedding by the kernel of `rotary.cu`, in place.

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, side_by_side, stride};
use super::stream::{Launch, Module};
use crate::ops::attention::Heads;
use crate::ops::custom::change_columns;
use crate::ops::layout::Layout;

pub(super) static MODULE: Module = Module { name: "rotary", ptx: include_str!("rotary.ptx") };

const THREADS: usize = 128;
/// Pairs that a thread turns.
const PAIRS: usize = 8;

/// [`rotate`](crate::ops::rotary::rotate) of `bf16`.
pub(super) fn rotate(qk: [Tensor<2>; 2], layout: &Layout, rope: usize, heads: Heads, inverse: bool) -> [Tensor<2>; 2] {
    let turns = layout.turns(rope, &qk[0].device());
    let inputs = [turns.cos.into_dispatch(), turns.sin.into_dispatch(), turns.rows.into_dispatch()];
    let run = move |qk: &[CubeTensor; 2], [cos, sin, rows]: [CubeTensor; 3]| {
        let turn = |x: &CubeTensor| {
            let ([tokens, width], head_dim) = (dims(x), heads.head_dim);
            let grid = [(width / 2).div_ceil(PAIRS * THREADS), tokens, 1];
            let rotary = Launch::new(&MODULE, "rotary", grid, THREADS).change(x).read(&cos).read(&sin).read(&rows);
            rotary.ints([stride(x), width / head_dim, head_dim, usize::from(inverse)]).launch();
        };
        match side_by_side(qk) {
            Some(qk) => turn(&qk),
            None => qk.iter().for_each(turn),
        }
    };
    change_columns("rotate", qk.map(Tensor::into_dispatch), inputs, run).map(Tensor::from_dispatch)
}
