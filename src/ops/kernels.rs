//! Where the operations of a model run, and what a place computes with.
//!
//! [`Kernels`] has every operation of a step. Its default methods are plain tensor calls, which run on any backend; a place
//! overrides what it has kernels for, and says what it is like. A door, such as [`norm`](super::norm), measures and calls.
//!
//! What kernels of a place lack (a type, a size, a cap of scores, an activation) it leaves to the default method.

use std::fmt::Debug;

use burn::tensor::{DType, Device, Tensor};
use burn_flex::Flex;

use super::adamw::{State, Update, plain_adamw};
use super::adamw_8bit::{Coded, plain_adamw_8bit};
use super::attention::{Attended, Heads, chunk_len, plain_attention, plain_attention_backward};
use super::cached_attention::Held;
use super::cpu_kernels::Cpu;
use super::cross_entropy::{
    Head, HeadGrads, PLAIN_MULTIPLE, chunked_cross_entropy, most_plain_targets, plain_cross_entropy,
};
use super::cuda::{self, cuda, kernel_state};
use super::delta_rule::{
    DeltaHeads, DeltaInputs, Gates, plain_delta_rule, plain_delta_rule_backward, plain_delta_rule_numbers,
};
use super::dropout::{Dropout, plain_dropout};
use super::experts::Experts;
use super::grad_norm::plain_sum_of_squares;
use super::head_norm::{Factors, HeadNorms, QueriesKeys, norm_then_rotate, rotate_then_norm_backward};
use super::layout::Layout;
use super::linear::{InputGrad, Layer, Weight, plain_add_low_rank, plain_linear, plain_linear_backward};
use super::low_rank::{Lora, LowRank};
use super::norm::{plain_rms_norm, plain_rms_norm_backward};
use super::output_gate::{plain_gate_output, plain_gate_output_backward};
use super::product::F32Products;
use super::rotary::plain_rotate;
use super::routing::{Rows, plain_gather, plain_scatter_add};
use super::short_conv::{plain_gated_conv, plain_gated_conv_backward, plain_short_conv, plain_short_conv_backward};
use super::swiglu::{plain_gated, plain_gated_backward};
use crate::device::{DeviceKind, Dtype};
use crate::spec::Activation;

/// Where the operations of a model run. It is decided once, with the model.
pub type Place = &'static dyn Kernels;

/// The place of activations of type `dtype` on `device`, with the device's own products.
#[must_use]
pub fn place_of(device: &Device, dtype: DType) -> Place {
    if kernel_state(device).is_some() {
        return place_on(DeviceKind::Cuda);
    }
    let is_host = || Tensor::<1>::zeros([1], (device, DType::F32)).try_into_primitive::<Flex>().is_ok();
    if dtype == DType::F32 && is_host() { &Cpu { rounds: false } } else { plain(F32Products::OfDevice) }
}

/// The place of activations in `f32` on such a device, which need not be here.
#[must_use]
pub fn place_on(kind: DeviceKind) -> Place {
    match kind {
        DeviceKind::Cpu => &Cpu { rounds: false },
        DeviceKind::Cuda => cuda(F32Products::OfDevice),
        _ => plain(F32Products::OfDevice),
    }
}

/// Plain tensor calls, with these products of operands in `f32`.
#[must_use]
pub fn plain(products: F32Products) -> Place {
    match products {
        F32Products::OfDevice => &Plain(F32Products::OfDevice),
        F32Products::Split => &Plain(F32Products::Split),
    }
}

/// The product as a device computes it, in the operands' type: on an NVIDIA GPU by cuBLASLt where it is found, which takes no
/// time to choose among kernels and to compile them; else burn's.
#[must_use]
pub fn device_product<const D: usize>(lhs: Tensor<D>, rhs: Tensor<D>) -> Tensor<D> {
    cuda::matmul(&lhs, &rhs).unwrap_or_else(|| lhs.matmul(rhs))
}

/// Runs small operations where their tasks start fastest: on the CPU in a thread of the pool that computes them, so that
/// each of hundreds need not wake it from outside. A GPU's queue belongs to the thread that calls. Steps of training do
/// not go through here: every thread of the pool would come to keep the scratch memory of large operations.
pub fn run<R: Send>(place: Place, operations: impl FnOnce() -> R + Send) -> R {
    if place.is_host() { rayon::scope(|_| operations()) } else { operations() }
}

/// What a place computes with. Shapes are those of the doors' functions of the same names.
#[expect(missing_docs, reason = "the doors describe the operations")]
pub trait Kernels: Debug + Send + Sync {
    /// How operands in `f32` are multiplied in plain tensor calls.
    fn f32_products(&self) -> F32Products {
        F32Products::OfDevice
    }

    /// This place with these products, where it has a choice.
    fn with_f32_products(&'static self, products: F32Products) -> Place;

    /// This place with attention that rounds its operands to bfloat16, where activations have another type.
    fn with_rounding(&'static self, rounds: bool) -> Place;

    /// Whether its tensors are in host memory, and autodiff does not track them.
    fn is_host(&self) -> bool {
        false
    }

    /// Whether the rows of a micro-batch must have one length.
    fn pads_rows(&self) -> bool {
        true
    }

    /// Whether its products take matrices as blocks of GGUF.
    fn takes_blocks(&self) -> bool {
        false
    }

    /// Type of the activations where products are computed in `compute`: another one if only operands are rounded to that.
    fn activation_dtype(&self, compute: Dtype) -> Dtype {
        compute
    }

    /// Bytes of the rounded copy that a product in `compute` makes of `numbers` activations of another type.
    fn rounded_bytes(&self, _numbers: usize, _compute: Dtype) -> usize {
        0
    }

    /// Whether products with several weights of one input are one where these lie one below the other in memory.
    fn stacks_weights(&self) -> bool {
        false
    }

    /// Whether operands of products are copied in another type.
    fn copies_operands(&self) -> bool {
        true
    }

    /// Temporary bytes in the backward of a low-rank update of a layer `[out_features, in_features]`; `None` where its
    /// gradients are products in `f32`.
    fn low_rank_bytes(&self, _shape: [usize; 2], _tokens: usize, _rank: usize, _dtype: Dtype) -> Option<usize> {
        None
    }

    /// Temporary bytes of products with a matrix of this shape as E4M3 with one scale, as which it is kept; `None` where it is
    /// decoded.
    fn eight_bit_bytes(&self, _shape: [usize; 2], _tokens: usize, _dtype: Dtype) -> Option<usize> {
        None
    }

    /// Whether the outputs of several layers of one input, and a gate's gradient and that of what it gates, share memory, which is
    /// free when none of them is kept.
    fn joins_outputs(&self, _dtype: Dtype) -> bool {
        false
    }

    /// Temporary numbers for each token in the backward of an attention, beside those of width `hidden_size`.
    fn attention_backward_numbers(&self, heads: Heads, dtype: Dtype) -> usize {
        // By head: operands, and in half precision also in `f32`; the gradients of keys and values are summed in `f32`. By
        // token: the gradients of the output and of the queries.
        let as_f32 = if dtype.num_bytes() < size_of::<f32>() { size_of::<f32>() / dtype.num_bytes() } else { 0 };
        (4 + 2 * as_f32) * heads.query_width() + (2 + 2 * as_f32 + 2 * as_f32.max(1)) * heads.key_value_width()
    }

    /// Temporary bytes for scores of rows `[rows, length]`: a chunk, its exponentials and gradients.
    fn score_bytes(&self, [rows, length]: [usize; 2], heads: Heads, _dtype: Dtype) -> usize {
        let of_chunk = rows * heads.num_heads * chunk_len([rows, length], heads) * length * size_of::<f32>();
        // The slope of a cap is as large.
        (4 + usize::from(heads.soft_cap.is_some())) * of_chunk
    }

    /// Temporary numbers for each token in the forward and in the backward of a delta rule, beside its inputs and outputs.
    fn delta_rule_numbers(&self, heads: DeltaHeads, dtype: Dtype) -> [usize; 2] {
        plain_delta_rule_numbers(heads, dtype)
    }

    /// Bytes that its libraries take beside tensors.
    fn library_bytes(&self) -> usize {
        0
    }

    /// Bytes of memory that sums over several processes take beside their numbers.
    fn exchange_bytes(&self) -> usize {
        0
    }

    /// Temporary bytes for each logit of a chunk of targets: logits and their gradient in the type of the activations; in f32
    /// the probabilities, those less the targets, and the gradient, which fusion leaves where a product is not fused.
    fn bytes_per_logit(&self, dtype: Dtype) -> usize {
        2 * dtype.num_bytes() + 3 * size_of::<f32>()
    }

    /// Target tokens whose logits exist at a time by default, for a head `[vocab_size, hidden_size]`.
    fn most_targets(&self, head: [usize; 2]) -> usize {
        most_plain_targets(head)
    }

    /// The number of targets fills up a multiple of this.
    fn target_multiple(&self) -> usize {
        PLAIN_MULTIPLE
    }

    fn rms_norm(&self, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        plain_rms_norm(x, weight, eps)
    }

    fn rms_norm_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Tensor<1>,
        rstd: &Tensor<1>,
        residual: Tensor<2>,
    ) -> Tensor<2> {
        plain_rms_norm_backward(dy, x, weight, rstd, residual)
    }

    fn gated(&self, activation: Activation, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
        plain_gated(activation, gate, up)
    }

    fn gated_backward(
        &self,
        activation: Activation,
        dh: &Tensor<2>,
        gate: &Tensor<2>,
        up: &Tensor<2>,
    ) -> (Tensor<2>, Tensor<2>) {
        plain_gated_backward(activation, dh, gate, up)
    }

    fn gather(&self, x: &Tensor<2>, rows: &Rows, weighted: bool) -> Tensor<2> {
        plain_gather(x, rows, weighted)
    }

    fn scatter_add(&self, y: Tensor<2>, rows: &Rows, update: &Tensor<2>, weighted: bool) -> Tensor<2> {
        plain_scatter_add(y, rows, update, weighted)
    }

    /// Whether the experts of a mixture are computed together in this type, where matrices allow it.
    fn has_experts(&self, _dtype: Dtype) -> bool {
        false
    }

    /// The experts of a mixture together, where it has kernels for them.
    fn experts(&self) -> Option<&dyn Experts> {
        None
    }

    fn rotate(&self, qk: [Tensor<2>; 2], layout: &Layout, rope: usize, heads: Heads, inverse: bool) -> [Tensor<2>; 2] {
        qk.map(|x| plain_rotate(x, layout, rope, heads.head_dim, inverse))
    }

    fn norm_and_rotate(&self, qk: QueriesKeys<&Tensor<2>>, norms: HeadNorms<'_>) -> (QueriesKeys<Tensor<2>>, Factors) {
        norm_then_rotate(self, qk, norms)
    }

    fn norm_and_rotate_backward(
        &self,
        dqk: QueriesKeys<Tensor<2>>,
        qk: QueriesKeys<&Tensor<2>>,
        factors: Factors,
        norms: HeadNorms<'_>,
    ) -> QueriesKeys<Tensor<2>> {
        rotate_then_norm_backward(self, dqk, qk, factors, norms)
    }

    fn attention(&self, qkv: [&Tensor<2>; 3], layout: &Layout, heads: Heads) -> Attended {
        plain_attention(qkv, layout, heads)
    }

    fn attention_backward(
        &self,
        d_o: &Tensor<2>,
        qkv: [&Tensor<2>; 3],
        attended: &Attended,
        layout: &Layout,
        heads: Heads,
    ) -> [Tensor<2>; 3] {
        plain_attention_backward(d_o, qkv, attended, layout, heads)
    }

    fn gate_output(&self, o: &Tensor<2>, gate: &Tensor<2>) -> Tensor<2> {
        plain_gate_output(o, gate)
    }

    fn gate_output_backward(&self, dy: Tensor<2>, o: &Tensor<2>, gate: Tensor<2>) -> [Tensor<2>; 2] {
        plain_gate_output_backward(dy, o, gate)
    }

    fn short_conv(&self, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        plain_short_conv(x, weight, layout)
    }

    fn short_conv_backward(&self, dy: &Tensor<2>, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        plain_short_conv_backward(dy, x, weight, layout)
    }

    fn gated_conv(&self, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        plain_gated_conv(bcx, weight, layout)
    }

    fn gated_conv_backward(&self, dy: &Tensor<2>, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        plain_gated_conv_backward(dy, bcx, weight, layout)
    }

    /// With a state, that after the only document as well.
    fn delta_rule(
        &self,
        inputs: DeltaInputs<'_>,
        layout: &Layout,
        heads: DeltaHeads,
        state: Option<Tensor<3>>,
    ) -> (Tensor<2>, Option<Tensor<3>>) {
        plain_delta_rule(inputs, layout, heads, state)
    }

    fn delta_rule_backward(
        &self,
        d_o: &Tensor<2>,
        inputs: DeltaInputs<'_>,
        layout: &Layout,
        heads: DeltaHeads,
    ) -> (Tensor<2>, Gates<Tensor<2>>) {
        plain_delta_rule_backward(d_o, inputs, layout, heads)
    }

    /// Memory for keys and values of a text.
    fn cache(&self, heads: Heads, device: &Device, dtype: DType) -> Held {
        Held::on_device(heads, device, dtype, self.f32_products())
    }

    fn linear(
        &self,
        x: &Tensor<2>,
        weight: &Weight,
        lora: Option<Lora<&Tensor<2>>>,
        residual: Option<Tensor<2>>,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        plain_linear(self.f32_products(), x, weight, lora, residual)
    }

    fn linear_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        lora: Option<(Lora<&Tensor<2>>, &Tensor<2>)>,
        input_grad: InputGrad,
    ) -> (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>) {
        plain_linear_backward(self.f32_products(), dy, x, weight, lora, input_grad)
    }

    fn linears(&self, x: &Tensor<2>, layers: &[Layer<'_>]) -> Vec<(Tensor<2>, Option<Tensor<2>>)> {
        layers.iter().map(|layer| self.linear(x, layer.weight, layer.lora, None)).collect()
    }

    fn linears_backward(
        &self,
        dys: Vec<Tensor<2>>,
        x: &Tensor<2>,
        layers: &[(Layer<'_>, Option<&Tensor<2>>)],
        input_grad: bool,
    ) -> (Option<Tensor<2>>, Vec<Option<LowRank<Tensor<2>>>>) {
        each_backward(self, dys, x, layers, input_grad)
    }

    fn low_rank_input(&self, x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
        let dropped = lora.dropout.map(|settings| self.dropout(x, settings));
        self.linear(dropped.as_ref().unwrap_or(x), &Weight::new(lora.matrices.a.clone()), None, None).0
    }

    fn add_low_rank(
        &self,
        y: Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        lora: Lora<&Tensor<2>>,
        rows: std::ops::Range<usize>,
    ) -> Tensor<2> {
        plain_add_low_rank(self.f32_products(), y, x, weight, lora, rows)
    }

    /// Losses and their gradients times `scale`, in chunks of `chunk_len` targets.
    fn linear_cross_entropy(
        &self,
        hidden: &Tensor<2>,
        head: Head<'_>,
        targets: &[u32],
        scale: Option<f64>,
        chunk_len: usize,
    ) -> (Tensor<1>, Option<HeadGrads>) {
        chunked_cross_entropy(plain(self.f32_products()), hidden, head, targets, scale, chunk_len)
    }

    /// Losses of logits `[targets, vocab_size]`, and their gradients times `scale`.
    fn cross_entropy(&self, logits: Tensor<2>, targets: &[u32], scale: Option<f64>) -> (Tensor<1>, Option<Tensor<2>>) {
        plain_cross_entropy(&logits, targets, scale)
    }

    fn dropout(&self, x: &Tensor<2>, settings: Dropout) -> Tensor<2> {
        plain_dropout(x, settings)
    }

    fn adamw(&self, states: Vec<(State, &Tensor<2>)>, update: &Update, factor: Option<&Tensor<1>>) -> Vec<State> {
        assert!(factor.is_none(), "made by no one");
        states.into_iter().map(|(state, grad)| plain_adamw(state, grad, update)).collect()
    }

    fn adamw_8bit(&self, state: Coded, grad: &Tensor<2>, update: &Update, factor: Option<&Tensor<1>>) -> Coded {
        assert!(factor.is_none(), "made by no one");
        plain_adamw_8bit(state, grad, update)
    }

    /// The factor of the gradients, `[1]`, which clips their mean over `count` to `max_norm`, unless that is 0; `None` where no update
    /// takes one that the host does not know. `numbers` are losses and the sum of the gradients' squares, `[losses + 1]`; where one of
    /// them is not finite, updates with the factor leave all as it is.
    fn grad_factor(&self, _numbers: &Tensor<1>, _max_norm: f64, _count: f64) -> Option<Tensor<1>> {
        None
    }

    /// The numbers of some matrices in `f32`, one after another.
    fn flatten(&self, matrices: Vec<Tensor<2>>) -> Tensor<1> {
        Tensor::cat(matrices.into_iter().map(|matrix| matrix.flatten(0, 1).cast(DType::F32)).collect(), 0)
    }

    fn sum_of_squares(&self, blocks: &[Vec<&Tensor<2>>]) -> Tensor<1> {
        plain_sum_of_squares(blocks)
    }
}

/// [`Kernels::linears_backward`] layer by layer.
pub(super) fn each_backward<K: Kernels + ?Sized>(
    place: &K,
    dys: Vec<Tensor<2>>,
    x: &Tensor<2>,
    layers: &[(Layer<'_>, Option<&Tensor<2>>)],
    input_grad: bool,
) -> (Option<Tensor<2>>, Vec<Option<LowRank<Tensor<2>>>>) {
    let mut sum = None;
    let grads = dys.into_iter().zip(layers).map(|(dy, (Layer { weight, lora }, xa))| {
        let (dx, grad) = place.linear_backward(&dy, x, weight, lora.zip(*xa), InputGrad::of(input_grad, sum.take()));
        sum = dx;
        grad
    });
    let grads = grads.collect();
    (sum, grads)
}

/// Plain tensor calls.
#[derive(Debug)]
pub(super) struct Plain(pub(super) F32Products);

impl Kernels for Plain {
    fn f32_products(&self) -> F32Products {
        self.0
    }

    fn with_f32_products(&'static self, products: F32Products) -> Place {
        plain(products)
    }

    fn with_rounding(&'static self, _: bool) -> Place {
        self
    }
}
