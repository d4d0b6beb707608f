//! Attention in plain tensor calls, a chunk of queries at a time.
//!
//! Scores and everything that is computed from them are in `f32`, as in a kernel that never writes them: their products
//! take operands in `f32`, since a product has the type of its operands. Probabilities and the gradients of scores are
//! rounded to the type of the activations only as operands of the next products.
//!
//! All tensors are `[rows, num_kv_heads, length * group, head_dim]`, the query heads that share keys side by side: then
//! a chunk of queries is a range of rows of a matrix, which costs no copy, and grouped queries are one product. The
//! calls are in an order that lets burn's fusion join what lies between a product and the next sum.

use burn::tensor::{DType, Tensor};

use self::chunk::QueryChunk;
use crate::ops::layout::Layout;
use crate::ops::product::{F32Products, matmul};
use crate::spec::Heads;

pub mod blocks;
pub(crate) mod both_ways;
pub mod chunk;
pub mod sinks;

/// What attention computes with.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a> {
    /// Queries, `[tokens, num_heads * head_dim]`, keys and values, `[tokens, num_kv_heads * head_dim]` each.
    pub qkv: [&'a Tensor<2>; 3],
    /// Where the documents are.
    pub layout: &'a Layout,
    /// The heads.
    pub heads: Heads,
}

impl<'a> AttentionInputs<'a> {
    /// The same where tokens see those before them in the documents of `cut`, which are chunks, if there is such a layout.
    pub(crate) fn with_texts_of(self, cut: Option<&'a Layout>) -> Self {
        Self { layout: cut.unwrap_or(self.layout), heads: Heads { chunk: None, ..self.heads }, ..self }
    }
}

/// Output of attention, and what its backward needs.
#[derive(Clone, Debug)]
pub struct Attended {
    /// `[tokens, num_heads * head_dim]`.
    pub o: Tensor<2>,
    /// Log-sum-exp of every row of scores, in `f32`, `[num_heads * tokens]`.
    pub lse: Tensor<1>,
    /// Its order, which is the implementation's.
    pub order: LseOrder,
}

/// How the rows of scores of all heads follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LseOrder {
    /// Head by head: `[num_heads, tokens]`.
    ByHead,
    /// Token by token: `[tokens, num_heads]`.
    ByToken,
    /// `[rows, num_kv_heads, row_length, heads of a group]`.
    Grouped,
}

/// The parts of a matrix, end to end.
fn joined(mut parts: Vec<Tensor<4>>) -> Tensor<4> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 2) }
}

/// `[tokens, heads * head_dim]` to `[rows, num_kv_heads, row_length * group, head_dim]`.
fn split_heads(x: Tensor<2>, layout: &Layout, Heads { num_kv_heads, head_dim, .. }: Heads) -> Tensor<4> {
    let (rows, length, group) = (layout.rows(), layout.row_length(), x.dims()[1] / head_dim / num_kv_heads);
    let by_token = x.reshape([rows, length, num_kv_heads, group, head_dim]);
    by_token.swap_dims(1, 2).reshape([rows, num_kv_heads, length * group, head_dim])
}

/// The inverse of [`split_heads`].
fn join_heads(x: Tensor<4>, layout: &Layout) -> Tensor<2> {
    let ([rows, num_kv_heads, queries, head_dim], length) = (x.dims(), layout.row_length());
    let group = queries / length;
    let by_head = x.reshape([rows, num_kv_heads, length, group, head_dim]);
    by_head.swap_dims(1, 2).reshape([rows * length, num_kv_heads * group * head_dim])
}

pub(crate) fn plain_attention(products: F32Products, inputs: AttentionInputs<'_>) -> Attended {
    in_chunks(products, inputs, &inputs.layout.chunks(inputs.heads, &inputs.qkv[0].device()))
}

fn in_chunks(products: F32Products, inputs: AttentionInputs<'_>, chunks: &[QueryChunk]) -> Attended {
    let AttentionInputs { qkv, layout, heads } = inputs;
    let dtype = qkv[0].dtype();
    let [q, k, v] = qkv.map(|x| split_heads(x.clone(), layout, heads));
    let [q, k] = [q, k].map(|x| x.cast(DType::F32));
    let (mut outputs, mut maxima, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for chunk in chunks {
        let v = chunk.keys(&v);
        let scores = chunk.masked(chunk.scores([&q, &k], heads, products));
        let max = scores.clone().max_dim(3);
        let weights = (scores - max.clone()).exp();
        let sum = weights.clone().sum_dim(3);
        outputs.push(matmul(&(weights / sum.clone()).cast(dtype), &v, products));
        maxima.push(max);
        sums.push(sum);
    }
    let lse = joined(maxima) + joined(sums).log();
    let num_lse = lse.shape().num_elements();
    Attended { o: join_heads(joined(outputs), layout), lse: lse.reshape([num_lse]), order: LseOrder::Grouped }
}

pub(crate) fn plain_attention_backward(
    products: F32Products,
    d_o: &Tensor<2>,
    attended: &Attended,
    inputs: AttentionInputs<'_>,
) -> [Tensor<2>; 3] {
    let chunks = inputs.layout.chunks(inputs.heads, &d_o.device());
    backward_in_chunks(products, d_o, attended, inputs, &chunks)
}

fn backward_in_chunks(
    products: F32Products,
    d_o: &Tensor<2>,
    attended: &Attended,
    AttentionInputs { qkv, layout, heads }: AttentionInputs<'_>,
    chunks: &[QueryChunk],
) -> [Tensor<2>; 3] {
    let (dtype, group) = (d_o.dtype(), heads.num_heads / heads.num_kv_heads);
    let delta = row_sums(d_o, &attended.o, layout, heads);
    let lse = attended.lse.clone().reshape(delta.dims());
    let [q, k, v] = qkv.map(|x| split_heads(x.clone(), layout, heads));
    let d_o = split_heads(d_o.clone(), layout, heads);
    // Operands of the products that give scores and their gradients.
    let [exact_q, exact_k, exact_v, exact_d_o] = [&q, &k, &v, &d_o].map(|x| x.clone().cast(DType::F32));
    let mut dqs = Vec::new();
    let (mut dk, mut dv) = (None, None);
    // The last chunk sees all keys: the sums begin with it.
    for chunk in chunks.iter().rev() {
        let [lse, delta, q, d_o] = [&lse, &delta, &q, &d_o].map(|x| chunk.queries(x, group));
        let (exact_d_o, exact_v) = (chunk.queries(&exact_d_o, group), chunk.keys(&exact_v).swap_dims(2, 3));
        let dp = matmul(&exact_d_o, &exact_v, products);
        let scores = chunk.scores([&exact_q, &exact_k], heads, products);
        let slope = heads.soft_cap.map(|cap| (scores.clone() / cap).square().neg() + 1.0);
        let p = (chunk.masked(scores) - lse).exp();
        let ds = p.clone() * (dp - delta) * heads.scale;
        let ds = if let Some(slope) = slope { ds * slope } else { ds }.cast(dtype);
        let p = p.cast(dtype);
        dv = Some(add_product(dv, &p.swap_dims(2, 3), &d_o, products));
        dk = Some(add_product(dk, &ds.clone().swap_dims(2, 3), &q, products));
        dqs.push(matmul(&ds, &chunk.keys(&k), products));
    }
    dqs.reverse();
    let sums = [dk, dv].map(|sum| sum.unwrap_or_else(|| exact_k.zeros_like()).cast(dtype));
    let [dk, dv] = sums.map(|x| join_heads(x, layout));
    [join_heads(joined(dqs), layout), dk, dv]
}

/// Row sums of `dP * P`, from the output, `[rows, num_kv_heads, row_length * group, 1]`.
fn row_sums(d_o: &Tensor<2>, o: &Tensor<2>, layout: &Layout, heads: Heads) -> Tensor<4> {
    let ([tokens, _], Heads { num_heads, head_dim, .. }) = (o.dims(), heads);
    let [d_o, o] = [d_o, o].map(|x| x.clone().reshape([tokens, num_heads, head_dim]));
    let sums = (d_o.cast(DType::F32) * o.cast(DType::F32)).sum_dim(2);
    split_heads(sums.reshape([tokens, num_heads]), layout, Heads { head_dim: 1, ..heads })
}

/// `sum + a b` in `f32`; `a b` may cover only the first rows of every matrix.
fn add_product(sum: Option<Tensor<4>>, a: &Tensor<4>, b: &Tensor<4>, products: F32Products) -> Tensor<4> {
    let Some(sum) = sum else { return matmul(a, b, products).cast(DType::F32) };
    let [rows, num_kv_heads, num_keys, head_dim] = [sum.dims()[0], sum.dims()[1], a.dims()[2], sum.dims()[3]];
    // Before the product: a view between the product and the sum would keep fusion from joining them.
    let seen = sum.clone().narrow(2, 0, num_keys);
    let seen = matmul(a, b, products).cast(DType::F32) + seen;
    sum.slice_assign([0..rows, 0..num_kv_heads, 0..num_keys, 0..head_dim], seen)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::Device;

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::attention::{attention, attention_backward};
    use crate::ops::host;
    use crate::ops::layout::RotaryTable;
    use crate::ops::place::place_on;

    const HEADS: Heads =
        Heads { num_heads: 6, num_kv_heads: 2, head_dim: 8, scale: 0.3, window: None, chunk: None, soft_cap: None };

    /// Two rows of 11 tokens: two documents, then one document and two tokens of padding.
    fn layout() -> Layout {
        let positions = [0..4, 0..7, 0..9, 0..2].into_iter().flatten().collect();
        let tables = Arc::new([RotaryTable::new(vec![1.0; 44], vec![0.0; 44], 4)]);
        Layout::new(2, vec![(0, 4), (4, 7), (11, 9)], positions, tables)
    }

    /// Queries, keys, values and the gradient of the output, exact in `bf16`; the gradient is zero for padding.
    fn operands(factor: f32) -> [Tensor<2>; 4] {
        let widths = [HEADS.num_heads, HEADS.num_kv_heads, HEADS.num_kv_heads, HEADS.num_heads].map(|heads| heads * 8);
        std::array::from_fn(|which| {
            let value = |i: usize| factor * (((i + 31 * which) * 7919 % 1013) as f32 / 506.5 - 1.0);
            let visible = if which == 3 { 20 * widths[which] } else { usize::MAX };
            let values = (0..22 * widths[which]).map(|i| if i < visible { value(i) } else { 0.0 }).collect();
            host::tensor(values, [22, widths[which]], &Device::flex()).cast(DType::BF16).cast(DType::F32)
        })
    }

    /// Output and gradients, without padding.
    fn results(o: Tensor<2>, gradients: [Tensor<2>; 3]) -> Vec<Vec<f32>> {
        let all = std::iter::once(o).chain(gradients);
        all.map(|x| x.narrow(0, 0, 20).cast(DType::F32).into_data().try_to_vec().unwrap()).collect()
    }

    fn by_kernels([q, k, v, d_o]: &[Tensor<2>; 4], heads: Heads) -> Vec<Vec<f32>> {
        let place = place_on(DeviceKind::Cpu);
        let inputs = AttentionInputs { qkv: [q, k, v], layout: &layout(), heads };
        let attended = attention(place, inputs);
        let gradients = attention_backward(place, d_o, &attended, inputs);
        results(attended.o, gradients)
    }

    fn by_chunks(operands: &[Tensor<2>; 4], heads: Heads, chunk: usize, dtype: DType) -> Vec<Vec<f32>> {
        let (layout, products) = (layout(), F32Products::OfDevice);
        let [q, k, v, d_o] = operands.clone().map(|x| x.cast(dtype));
        let chunks = QueryChunk::of_length(chunk, [2, 11], layout.documents(), heads, &Device::flex());
        let inputs = AttentionInputs { qkv: [&q, &k, &v], layout: &layout, heads };
        let attended = in_chunks(products, inputs, &chunks);
        let gradients = backward_in_chunks(products, &d_o, &attended, inputs, &chunks);
        results(attended.o, gradients)
    }

    fn assert_close(found: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32) {
        for ((found, expected), name) in found.iter().zip(expected).zip(["o", "dq", "dk", "dv"]) {
            let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
            let error = squares(&mut found.iter().zip(expected).map(|(f, e)| f - e));
            let error = (error / squares(&mut expected.iter().copied())).sqrt();
            assert!(error < tolerance, "{name}: {error}");
        }
    }

    #[test]
    fn chunks_of_any_length_give_the_attention_of_the_kernels() {
        let operands = operands(1.0);
        for (window, soft_cap) in [(None, None), (Some(3), None), (None, Some(0.5))] {
            let heads = Heads { window, soft_cap, ..HEADS };
            let expected = by_kernels(&operands, heads);
            for chunk in [1, 4, 8, 11] {
                assert_close(&by_chunks(&operands, heads, chunk, DType::F32), &expected, 1e-5);
            }
        }
    }

    #[test]
    fn scores_of_half_precision_operands_are_not_rounded() {
        // Scores of about 50: rounded to bf16 they would be wrong by 0.1, and the probabilities by a tenth.
        let operands = operands(10.0);
        let expected = by_kernels(&operands, HEADS);
        for (dtype, tolerance) in [(DType::BF16, 5e-3), (DType::F16, 1e-3)] {
            assert_close(&by_chunks(&operands, HEADS, 4, dtype)[..1], &expected, tolerance);
        }
    }
}
