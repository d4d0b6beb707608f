//! The kernels of NVIDIA GPUs, each behind the operation that it computes.

mod attention;
mod bias;
mod cross_entropy;
mod decode;
mod delta_rule;
mod experts;
mod fp8;
mod low_rank;
mod matrix;
#[expect(unsafe_code, reason = "NCCL is a C library")]
mod nccl;
mod norm;
mod optimizer;
#[expect(unsafe_code, reason = "cuBLASLt is a C library")]
mod products;
mod rotary;
mod self_check;
mod short_conv;
#[expect(unsafe_code, reason = "launches through the driver, a C library")]
mod stream;
mod swiglu;
mod twice;

use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use sha2::{Digest as _, Sha256};

use super::check::{self, KernelState};
use super::table::{self, Kernel};
use super::{MOST_RANK, Sizes, has_attention, has_delta_rule, ptx};
use crate::device::Dtype;
use crate::ops::adamw::{State, Update};
use crate::ops::adamw_8bit::Coded;
use crate::ops::attention::{Attended, Heads};
use crate::ops::cross_entropy::{Head, HeadGrads, chunked_cross_entropy, target_ids};
use crate::ops::custom::device_of;
use crate::ops::delta_rule::{DeltaHeads, DeltaInputs, Gates};
use crate::ops::experts::Experts;
use crate::ops::head_norm::{Factors, HeadNorms, QueriesKeys, norm_then_rotate, rotate_then_norm_backward};
use crate::ops::kernels::{Kernels, Place, Plain, each_backward};
use crate::ops::layout::Layout;
use crate::ops::linear::{InputGrad, Layer, Matrix, Weight, linear_backward_by, linear_by};
use crate::ops::low_rank::{Lora, LowRank};
use crate::ops::product::F32Products;
use crate::spec::Activation;
use crate::util::files;

pub use nccl::{Nccl, Written};
pub use self_check::self_check;
pub use stream::take_noted_bytes;

/// Names the kernels of this build.
#[must_use]
pub fn digest() -> String {
    files::hex(&Sha256::digest(ptx::ARCHIVE))
}

/// While the other kernels are compared on a Hopper, too.
static IS_HOPPER_ASIDE: AtomicBool = AtomicBool::new(false);

/// Whether these kernels for Hopper are used on the GPU of `x`.
fn uses_hopper(kernel: Kernel, x: &CubeTensor) -> bool {
    let device = x.client.service_id().device.index_id;
    check::is_on(kernel) && stream::is_hopper(device) && !IS_HOPPER_ASIDE.load(Ordering::Relaxed)
}

/// Which kernels are used on a device; `None` unless it is an NVIDIA GPU.
pub(super) fn state(device: &Device) -> Option<&'static KernelState> {
    let gpu = gpu_of(device)?;
    Some(check::decided(stream::capability(gpu), || twice::check(device)))
}

/// The ordinal of an NVIDIA GPU.
fn gpu_of(device: &Device) -> Option<u16> {
    let tensor = Tensor::<1>::zeros([1], (device, DType::F32)).into_dispatch();
    let Some(CubeDevice::Cuda(gpu)) = device_of(&tensor) else { return None };
    u16::try_from(gpu.index).ok()
}

/// NVIDIA GPUs, with kernels of our own and the plain versions.
#[derive(Debug)]
struct Cuda(Sizes);

pub(super) fn cuda(products: F32Products) -> Place {
    match products {
        F32Products::OfDevice => &Cuda(Sizes(Plain(F32Products::OfDevice))),
        F32Products::Split => &Cuda(Sizes(Plain(F32Products::Split))),
    }
}

/// Whether a kernel for matrices in `bf16` is used on one.
fn has(x: &Tensor<2>, kernel: Kernel) -> bool {
    x.dtype() == DType::BF16 && x.dims()[1].is_multiple_of(8) && check::is_on(kernel)
}

/// Whether a kernel norms and rotates heads.
fn has_head_norms(q: &Tensor<2>, norms: HeadNorms<'_>) -> bool {
    let head_dim = norms.heads.head_dim;
    let is_of_heads = norms.weights[0].dims() == [head_dim] && norms.layout.table(norms.rope).turns_halves();
    is_of_heads
        && has(q, Kernel::Rotary)
        && check::is_on(Kernel::Norm)
        && head_dim.is_multiple_of(16)
        && head_dim <= 256
}

/// Whether kernels compute a convolution with as many taps.
fn has_short_conv(x: &Tensor<2>, weight: &Tensor<2>) -> bool {
    has(x, Kernel::ShortConv) && weight.dims()[0] == short_conv::TAPS
}

/// Whether there is a kernel for this gated convolution.
fn has_gated_conv(bcx: &Tensor<2>, weight: &Tensor<2>) -> bool {
    let [taps, channels] = weight.dims();
    has(bcx, Kernel::ShortConv) && taps <= short_conv::TAPS && channels.is_multiple_of(8)
}

/// Whether the kernels of low-rank updates take this one.
fn has_low_rank_of(x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> bool {
    let ([rank, _], [out_features, _]) = (lora.matrices.a.dims(), lora.matrices.b.dims());
    // Their masks begin at row 0.
    let has_mask = lora.dropout.is_none_or(|dropout| dropout.first_row == 0);
    has_mask && has(x, Kernel::LowRank) && rank <= MOST_RANK && out_features.is_multiple_of(8)
}

/// Whether cuBLASLt multiplies with a frozen matrix: it wants widths that are multiples of 16 bytes.
fn has_products(dtype: DType, weight: &Weight) -> bool {
    let is_bf16 = match &weight.values {
        Matrix::Dense(values) => values.dtype() == DType::BF16,
        Matrix::Quantised(_) => true,
        Matrix::Blocks(_) => false,
    };
    let is_aligned = weight.dims().iter().all(|width| width.is_multiple_of(8));
    dtype == DType::BF16 && is_bf16 && is_aligned && check::is_on(Kernel::Products)
}

/// The product of two matrices, or of batches of them, by cuBLASLt; `None` where it does not multiply.
pub(super) fn matmul<const D: usize>(lhs: &Tensor<D>, rhs: &Tensor<D>) -> Option<Tensor<D>> {
    let is_taken = |x: &Tensor<D>| {
        let is_float = matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16);
        is_float
            && x.dims().iter().all(|size| *size > 0)
            && matches!(device_of(&x.clone().into_dispatch()), Some(CubeDevice::Cuda(_)))
    };
    let is_used =
        check::is_decided_on(Kernel::Products) && is_taken(lhs) && is_taken(rhs) && lhs.dtype() == rhs.dtype();
    is_used.then(|| products::matmul(lhs, rhs))
}

/// The only one of them.
fn one<T>(mut all: Vec<T>) -> T {
    all.pop().unwrap_or_else(|| unreachable!("there is one"))
}

impl Cuda {
    /// The outputs of layers of one input, each with the low-rank input of its update, which the kernels take; added to `residual` if
    /// there is one, which is for one layer.
    fn layers(
        &self,
        x: &Tensor<2>,
        layers: &[Layer<'_>],
        residual: Option<Tensor<2>>,
    ) -> Vec<(Tensor<2>, Option<Tensor<2>>)> {
        let weights: Vec<_> = layers.iter().map(|layer| layer.weight).collect();
        let mut ys: Vec<_> = self.products(x, &weights, residual).into_iter().map(Some).collect();
        let has_update = |index: &usize| layers[*index].lora.is_some();
        let updated: Vec<_> = (0..layers.len()).filter(has_update).filter_map(|index| ys[index].take()).collect();
        let loras: Vec<_> = layers.iter().filter_map(|layer| layer.lora).collect();
        if loras.is_empty() {
            return ys.into_iter().flatten().map(|y| (y, None)).collect();
        }
        let xas = low_rank::input(x, &loras);
        let updated = low_rank::output(updated, &xas.iter().collect::<Vec<_>>(), &loras);
        let mut updated = updated.into_iter().zip(xas.into_iter().map(Some));
        ys.into_iter().filter_map(|y| y.map(|y| (y, None)).or_else(|| updated.next())).collect()
    }

    /// The layers without their updates.
    fn products(&self, x: &Tensor<2>, weights: &[&Weight], mut residual: Option<Tensor<2>>) -> Vec<Tensor<2>> {
        let biases: Vec<_> = weights.iter().filter_map(|weight| weight.bias.as_ref()).collect();
        let has_some = !biases.is_empty() && biases.len() < weights.len();
        let ys = match (fp8::matrices(x, weights), weights) {
            (Some(matrices), _) if !has_some => fp8::forward(x, &matrices, residual.as_ref()),
            (None, _) if !has_some && are_joined(x, weights) => products::forward(x, weights, residual.as_ref()),
            (None, [weight]) => return vec![self.0.linear(x, weight, None, residual).0],
            _ => return weights.iter().map(|weight| one(self.products(x, &[*weight], residual.take()))).collect(),
        };
        if biases.is_empty() { ys } else { bias::add(ys, &biases) }
    }

    /// The gradients of [`layers`](Self::layers).
    fn layers_backward<'a>(
        &self,
        dys: &[&'a Tensor<2>],
        x: &Tensor<2>,
        layers: &[(Layer<'a>, Option<&'a Tensor<2>>)],
        input_grad: InputGrad,
    ) -> (Option<Tensor<2>>, Vec<Option<LowRank<Tensor<2>>>>) {
        let weights: Vec<_> = layers.iter().map(|(layer, _)| layer.weight).collect();
        let dx = self.products_backward(dys, x, &weights, input_grad);
        let update =
            |(dy, (layer, xa)): (&&'a Tensor<2>, &(Layer<'a>, Option<&'a Tensor<2>>))| Some((*dy, layer.lora?, (*xa)?));
        let updates: Vec<_> = dys.iter().zip(layers).filter_map(update).collect();
        if updates.is_empty() {
            return (dx, vec![None; layers.len()]);
        }
        let (dys, (loras, xas)): (Vec<_>, (Vec<_>, Vec<_>)) =
            updates.into_iter().map(|(dy, lora, xa)| (dy, (lora, xa))).unzip();
        let (dx, grads) = low_rank::backward(&dys, x, &xas, &loras, dx);
        let mut grads = grads.into_iter();
        (dx, layers.iter().map(|(layer, _)| layer.lora.and_then(|_| grads.next())).collect())
    }

    fn products_backward(
        &self,
        dys: &[&Tensor<2>],
        x: &Tensor<2>,
        weights: &[&Weight],
        input_grad: InputGrad,
    ) -> Option<Tensor<2>> {
        let sum = match input_grad {
            InputGrad::Skip => return None,
            InputGrad::Fresh => None,
            InputGrad::AddTo(sum) => Some(sum),
        };
        match (fp8::matrices(x, weights), dys, weights) {
            (Some(matrices), ..) => Some(fp8::backward(dys, &matrices, sum.as_ref())),
            _ if are_joined(x, weights) => Some(products::backward(dys, weights, sum.as_ref())),
            (None, [dy], [weight]) => self.0.linear_backward(dy, x, weight, None, InputGrad::of(true, sum)).0,
            _ => dys
                .iter()
                .zip(weights)
                .fold(sum, |sum, (dy, weight)| self.products_backward(&[*dy], x, &[*weight], InputGrad::of(true, sum))),
        }
    }
}

/// Whether cuBLASLt multiplies with all of the weights in one operation: of several that are decoded for it, one at a time is in memory.
fn are_joined(x: &Tensor<2>, weights: &[&Weight]) -> bool {
    let is_dense = |weight: &&Weight| matches!(weight.values, Matrix::Dense(_));
    (weights.len() == 1 || weights.iter().all(is_dense)) && weights.iter().all(|weight| has_products(x.dtype(), weight))
}

impl Kernels for Cuda {
    fn stacks_weights(&self) -> bool {
        check::is_on(Kernel::Products)
    }

    fn f32_products(&self) -> F32Products {
        self.0.f32_products()
    }

    fn with_f32_products(&'static self, products: F32Products) -> Place {
        cuda(products)
    }

    fn with_rounding(&'static self, _: bool) -> Place {
        self
    }

    fn attention_backward_numbers(&self, heads: Heads, dtype: Dtype) -> usize {
        self.0.attention_backward_numbers(heads, dtype)
    }

    fn score_bytes(&self, rows: [usize; 2], heads: Heads, dtype: Dtype) -> usize {
        self.0.score_bytes(rows, heads, dtype)
    }

    fn low_rank_bytes(&self, shape: [usize; 2], tokens: usize, rank: usize, dtype: Dtype) -> Option<usize> {
        self.0.low_rank_bytes(shape, tokens, rank, dtype)
    }

    fn eight_bit_bytes(&self, shape: [usize; 2], tokens: usize, dtype: Dtype) -> Option<usize> {
        self.0.eight_bit_bytes(shape, tokens, dtype)
    }

    fn joins_outputs(&self, dtype: Dtype) -> bool {
        self.0.joins_outputs(dtype)
    }

    fn delta_rule_numbers(&self, heads: DeltaHeads, dtype: Dtype) -> [usize; 2] {
        self.0.delta_rule_numbers(heads, dtype)
    }

    fn exchange_bytes(&self) -> usize {
        self.0.exchange_bytes()
    }

    fn library_bytes(&self) -> usize {
        self.0.library_bytes()
    }

    fn most_targets(&self, head: [usize; 2]) -> usize {
        self.0.most_targets(head)
    }

    fn bytes_per_logit(&self, dtype: Dtype) -> usize {
        self.0.bytes_per_logit(dtype)
    }

    fn attention(&self, qkv: [&Tensor<2>; 3], layout: &Layout, heads: Heads) -> Attended {
        if has_attention(heads, qkv[0].dtype()) {
            return attention::forward(qkv, layout, heads);
        }
        self.0.attention(qkv, layout, heads)
    }

    fn attention_backward(
        &self,
        d_o: &Tensor<2>,
        qkv: [&Tensor<2>; 3],
        attended: &Attended,
        layout: &Layout,
        heads: Heads,
    ) -> [Tensor<2>; 3] {
        if has_attention(heads, qkv[0].dtype()) {
            return attention::backward(d_o, qkv, attended, layout, heads);
        }
        self.0.attention_backward(d_o, qkv, attended, layout, heads)
    }

    fn linear_cross_entropy(
        &self,
        hidden: &Tensor<2>,
        head: Head<'_>,
        targets: &[u32],
        scale: Option<f64>,
        chunk_len: usize,
    ) -> (Tensor<1>, Option<HeadGrads>) {
        chunked_cross_entropy(self, hidden, head, targets, scale, chunk_len)
    }

    fn cross_entropy(&self, logits: Tensor<2>, targets: &[u32], scale: Option<f64>) -> (Tensor<1>, Option<Tensor<2>>) {
        if logits.dtype() != DType::BF16 || !check::is_on(Kernel::CrossEntropy) {
            return self.0.cross_entropy(logits, targets, scale);
        }
        let targets = target_ids(targets, &logits);
        cross_entropy::cross_entropy(logits, targets, scale)
    }

    fn rms_norm(&self, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        if has(x, Kernel::Norm) { norm::forward(x, weight, eps) } else { self.0.rms_norm(x, weight, eps) }
    }

    fn rms_norm_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Tensor<1>,
        rstd: &Tensor<1>,
        residual: Tensor<2>,
    ) -> Tensor<2> {
        if has(x, Kernel::Norm) {
            norm::backward(dy, x, weight, rstd, residual)
        } else {
            self.0.rms_norm_backward(dy, x, weight, rstd, residual)
        }
    }

    fn gated(&self, activation: Activation, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
        if has(gate, Kernel::Swiglu) && swiglu::has(activation) {
            swiglu::forward(activation, gate, up)
        } else {
            self.0.gated(activation, gate, up)
        }
    }

    fn gated_backward(
        &self,
        activation: Activation,
        dh: &Tensor<2>,
        gate: &Tensor<2>,
        up: &Tensor<2>,
    ) -> (Tensor<2>, Tensor<2>) {
        if has(gate, Kernel::Swiglu) && swiglu::has(activation) {
            swiglu::backward(activation, dh, gate, up)
        } else {
            self.0.gated_backward(activation, dh, gate, up)
        }
    }

    fn has_experts(&self, dtype: Dtype) -> bool {
        self.0.has_experts(dtype)
    }

    fn experts(&self) -> Option<&dyn Experts> {
        Some(self)
    }

    fn short_conv(&self, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        if has_short_conv(x, weight) {
            short_conv::forward(x, weight, layout)
        } else {
            self.0.short_conv(x, weight, layout)
        }
    }

    fn short_conv_backward(&self, dy: &Tensor<2>, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        if has_short_conv(x, weight) {
            short_conv::backward(dy, x, weight, layout)
        } else {
            self.0.short_conv_backward(dy, x, weight, layout)
        }
    }

    fn gated_conv(&self, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        if has_gated_conv(bcx, weight) {
            short_conv::gated(bcx, weight, layout)
        } else {
            self.0.gated_conv(bcx, weight, layout)
        }
    }

    fn gated_conv_backward(&self, dy: &Tensor<2>, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        if has_gated_conv(bcx, weight) {
            short_conv::gated_backward(dy, bcx, weight, layout)
        } else {
            self.0.gated_conv_backward(dy, bcx, weight, layout)
        }
    }

    fn delta_rule(
        &self,
        inputs: DeltaInputs<'_>,
        layout: &Layout,
        heads: DeltaHeads,
        state: Option<Tensor<3>>,
    ) -> (Tensor<2>, Option<Tensor<3>>) {
        if state.is_none() && has_delta_rule(heads, inputs.qkv.dtype()) {
            (delta_rule::forward(inputs, layout, heads), None)
        } else {
            self.0.delta_rule(inputs, layout, heads, state)
        }
    }

    fn delta_rule_backward(
        &self,
        d_o: &Tensor<2>,
        inputs: DeltaInputs<'_>,
        layout: &Layout,
        heads: DeltaHeads,
    ) -> (Tensor<2>, Gates<Tensor<2>>) {
        if has_delta_rule(heads, inputs.qkv.dtype()) {
            delta_rule::backward(d_o, inputs, layout, heads)
        } else {
            self.0.delta_rule_backward(d_o, inputs, layout, heads)
        }
    }

    fn rotate(&self, qk: [Tensor<2>; 2], layout: &Layout, rope: usize, heads: Heads, inverse: bool) -> [Tensor<2>; 2] {
        let [head_dim, pairs] = [heads.head_dim, layout.table(rope).half()];
        if has(&qk[0], Kernel::Rotary) && [head_dim, pairs].iter().all(|size| size.is_multiple_of(rotary::PAIRS)) {
            rotary::rotate(qk, layout, rope, heads, inverse)
        } else {
            self.0.rotate(qk, layout, rope, heads, inverse)
        }
    }

    fn norm_and_rotate(&self, qk: QueriesKeys<&Tensor<2>>, norms: HeadNorms<'_>) -> (QueriesKeys<Tensor<2>>, Factors) {
        if has_head_norms(qk[0], norms) {
            (rotary::norm_and_rotate(qk, norms), None)
        } else {
            norm_then_rotate(self, qk, norms)
        }
    }

    fn norm_and_rotate_backward(
        &self,
        dqk: QueriesKeys<Tensor<2>>,
        qk: QueriesKeys<&Tensor<2>>,
        factors: Factors,
        norms: HeadNorms<'_>,
    ) -> QueriesKeys<Tensor<2>> {
        if has_head_norms(qk[0], norms) {
            rotary::norm_and_rotate_backward(dqk, qk, norms)
        } else {
            rotate_then_norm_backward(self, dqk, qk, factors, norms)
        }
    }

    fn linear(
        &self,
        x: &Tensor<2>,
        weight: &Weight,
        lora: Option<Lora<&Tensor<2>>>,
        residual: Option<Tensor<2>>,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        if lora.is_none_or(|lora| has_low_rank_of(x, lora)) {
            one(self.layers(x, &[Layer { weight, lora }], residual))
        } else if has_products(x.dtype(), weight) {
            let base = |sum| (one(self.products(x, &[&weight.without_bias()], sum)), None);
            linear_by(base, self.f32_products(), x, weight, lora, residual)
        } else {
            self.0.linear(x, weight, lora, residual)
        }
    }

    fn linears(&self, x: &Tensor<2>, layers: &[Layer<'_>]) -> Vec<(Tensor<2>, Option<Tensor<2>>)> {
        if layers.iter().filter_map(|layer| layer.lora).all(|lora| has_low_rank_of(x, lora)) {
            return self.layers(x, layers, None);
        }
        layers.iter().map(|layer| self.linear(x, layer.weight, layer.lora, None)).collect()
    }

    fn linear_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        lora: Option<(Lora<&Tensor<2>>, &Tensor<2>)>,
        input_grad: InputGrad,
    ) -> (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>) {
        let (lora_alone, xa) = lora.unzip();
        if lora_alone.is_none_or(|lora| has_low_rank_of(x, lora)) {
            let (dx, grads) = self.layers_backward(&[dy], x, &[(Layer { weight, lora: lora_alone }, xa)], input_grad);
            (dx, one(grads))
        } else if has_products(dy.dtype(), weight) {
            let base = |sum| {
                let dx = self.products_backward(&[dy], x, &[weight], InputGrad::of(true, sum));
                (dx.unwrap_or_else(|| unreachable!("it is asked for")), None)
            };
            linear_backward_by(base, self.f32_products(), dy, x, weight, lora, input_grad)
        } else {
            self.0.linear_backward(dy, x, weight, lora, input_grad)
        }
    }

    fn linears_backward(
        &self,
        dys: Vec<Tensor<2>>,
        x: &Tensor<2>,
        layers: &[(Layer<'_>, Option<&Tensor<2>>)],
        input_grad: bool,
    ) -> (Option<Tensor<2>>, Vec<Option<LowRank<Tensor<2>>>>) {
        if layers.iter().filter_map(|(layer, _)| layer.lora).all(|lora| has_low_rank_of(x, lora)) {
            let dys: Vec<_> = dys.iter().collect();
            return self.layers_backward(&dys, x, layers, InputGrad::of(input_grad, None));
        }
        each_backward(self, dys, x, layers, input_grad)
    }

    fn adamw(&self, states: Vec<(State, &Tensor<2>)>, update: &Update, factor: Option<&Tensor<1>>) -> Vec<State> {
        if check::is_on(Kernel::Optimizer) && !states.is_empty() {
            optimizer::adamw(states, update, factor)
        } else {
            self.0.adamw(states, update, factor)
        }
    }

    fn adamw_8bit(&self, state: Coded, grad: &Tensor<2>, update: &Update, factor: Option<&Tensor<1>>) -> Coded {
        if check::is_on(Kernel::Optimizer) {
            optimizer::adamw_8bit(state, grad, update, factor)
        } else {
            self.0.adamw_8bit(state, grad, update, factor)
        }
    }

    fn grad_factor(&self, numbers: &Tensor<1>, max_norm: f64, count: f64) -> Option<Tensor<1>> {
        check::is_on(Kernel::Optimizer).then(|| optimizer::grad_factor(numbers, max_norm, count))
    }

    fn flatten(&self, matrices: Vec<Tensor<2>>) -> Tensor<1> {
        if check::is_on(Kernel::Optimizer) { optimizer::flatten(matrices) } else { self.0.flatten(matrices) }
    }

    fn sum_of_squares(&self, blocks: &[Vec<&Tensor<2>>]) -> Tensor<1> {
        if check::is_on(Kernel::Optimizer) {
            return optimizer::sum_of_squares(blocks.iter().flatten().map(|grad| (*grad).clone()));
        }
        self.0.sum_of_squares(blocks)
    }

    fn low_rank_input(&self, x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
        if has_low_rank_of(x, lora) { one(low_rank::input(x, &[lora])) } else { self.0.low_rank_input(x, lora) }
    }
}
