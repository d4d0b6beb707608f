//! What heads have side by side, taken apart and joined.

use burn::tensor::Tensor;

use super::BlockContext;
use crate::ops::host;
use crate::spec::QueryGrowth;

/// The parts of `x`, `[tokens, num_heads * (sum of widths)]`, which has those of a head side by side: `[tokens, num_heads * width]`
/// each.
pub(super) fn of_heads<const N: usize>(x: &Tensor<2>, num_heads: usize, widths: [usize; N]) -> [Tensor<2>; N] {
    let [tokens, width] = x.dims();
    let (by_head, mut first) = (x.clone().reshape([tokens, num_heads, width / num_heads]), 0);
    widths.map(|width| {
        first += width;
        by_head.clone().narrow(2, first - width, width).reshape([tokens, num_heads * width])
    })
}

/// The inverse of [`of_heads`].
pub(super) fn by_head<const N: usize>(parts: [Tensor<2>; N], num_heads: usize) -> Tensor<2> {
    let by_head = |part: Tensor<2>| {
        let [tokens, width] = part.dims();
        part.reshape([tokens, num_heads, width / num_heads])
    };
    let joined = Tensor::cat(parts.map(by_head).into(), 2);
    let [tokens, heads, width] = joined.dims();
    joined.reshape([tokens, heads * width])
}

/// Queries, or their gradient, times what their positions make of them.
pub(super) fn grown(q: Tensor<2>, growth: Option<QueryGrowth>, context: &BlockContext<'_>) -> Tensor<2> {
    let positions = context.layout.positions();
    let Some(growth) = growth.filter(|growth| positions.iter().any(|at| growth.num_periods(*at as usize) > 0)) else {
        return q;
    };
    let factors = positions.iter().map(|at| growth.factor(*at as usize)).collect();
    q.clone() * host::tensor(factors, [positions.len(), 1], &q.device()).cast(q.dtype())
}
