//! Sinks (gpt-oss): a score of every head that takes its share of the probabilities and has no value.

use burn::tensor::{DType, Tensor};

use super::{Attended, LseOrder};
use crate::ops::layout::Layout;
use crate::spec::Heads;

/// The attention whose rows of scores had one more, the head's sink. What the backward of an attention needs of its result is
/// right for one with sinks, too.
///
/// # Shapes
/// `sinks`: `[num_heads]`, in `f32`.
#[must_use]
pub fn with_sinks(attended: Attended, sinks: &Tensor<1>, layout: &Layout, heads: Heads) -> Attended {
    let Attended { o, lse, order } = attended;
    let (Heads { num_heads, num_kv_heads, head_dim, .. }, [tokens, width]) = (heads, o.dims());
    let group = num_heads / num_kv_heads;
    // What all orders can be seen as.
    let (shape, sink_shape) = match order {
        LseOrder::ByHead => ([1, num_heads, tokens, 1], [1, num_heads, 1, 1]),
        LseOrder::ByToken => ([1, 1, tokens, num_heads], [1, 1, 1, num_heads]),
        LseOrder::Grouped => ([layout.rows(), num_kv_heads, layout.row_length(), group], [1, num_kv_heads, 1, group]),
    };
    let lse = lse.reshape(shape);
    let sinks = sinks.clone().reshape(sink_shape);
    let difference = sinks.clone() - lse.clone();
    let sum = lse.clone().max_pair(sinks) + (difference.abs().neg().exp() + 1.0).log();
    // By row, token, head of keys, head of its group.
    let share = (lse - sum.clone()).exp().swap_dims(1, 2).reshape([tokens, num_heads, 1]);
    let dtype = o.dtype();
    let o = o.reshape([tokens, num_heads, head_dim]).cast(DType::F32) * share;
    Attended { o: o.cast(dtype).reshape([tokens, width]), lse: sum.reshape([tokens * num_heads]), order }
}
