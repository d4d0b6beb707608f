//! The kernels of NVIDIA GPUs, each behind the operation that it computes.

mod attention;
mod bias;
mod cached_attention;
mod cross_entropy;
mod decode;
mod delta_rule;
mod draw;
mod expert_rank;
mod experts;
mod fp8;
mod frozen;
mod low_rank;
mod matrix;
#[expect(unsafe_code, reason = "NCCL is a C library")]
mod nccl;
mod next;
mod norm;
mod optimizer;
#[expect(unsafe_code, reason = "cuBLASLt is a C library")]
pub(in crate::ops) mod products;
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
use super::{Cuda, MOST_RANK, attention_heads, has_activation, has_cached_attention, has_delta_rule, is_half, ptx};
use crate::ops::cpu::{Draw, Drawn};
use crate::ops::custom::device_of;
use crate::ops::experts::Experts;
use crate::ops::kernels::linears::each_backward;
use crate::ops::kernels::norms::{norm_then_rotate, rotate_then_norm_backward};
use crate::ops::kernels::{Attention, Linears, Losses, Norms, Properties, Recurrent, Updates};
use crate::ops::layout::Layout;
use crate::ops::low_rank::Lora;
use crate::ops::plain::attention::{Attended, AttentionInputs};
use crate::ops::plain::cached_attention::TextsOnDevice;
use crate::ops::plain::cross_entropy::target_ids;
use crate::ops::plain::delta_rule::{DeltaInputs, Gates};
use crate::ops::plain::linear::{
    Applied, InputGrad, Layer, LayerGrads, LayerOutput, LayersGrads, Matrix, Weight, linear_backward_by, linear_by,
};
use crate::ops::plain::next::{Convolution, TextRows};
use crate::ops::plain::norms::{Factors, HeadNorms, Normed};
use crate::ops::plain::short_conv::ConvWeights;
use crate::ops::plain::state_space::StateInputs;
use crate::ops::plain::updates::{AdamState, Coded, Update};
use crate::spec::{Activation, Heads};
use crate::util::files;

pub use nccl::{Nccl, WrittenNumbers};
pub use self_check::self_check;
pub use stream::take_noted_bytes;

/// Names the kernels of this build.
#[must_use]
pub fn digest() -> String {
    files::hex(&Sha256::digest(ptx::ARCHIVE))
}

/// While the other kernels are compared on a Hopper, too.
static IS_HOPPER_ASIDE: AtomicBool = AtomicBool::new(false);

/// Whether these kernels for Hopper are used on the GPU of `x`: they are for `bf16`.
fn uses_hopper(kernel: Kernel, x: &CubeTensor) -> bool {
    let device = x.client.service_id().device.index_id;
    x.dtype == DType::BF16
        && check::is_on(kernel)
        && stream::is_hopper(device)
        && !IS_HOPPER_ASIDE.load(Ordering::Relaxed)
}

/// Whether kernels of our own are used on `device`; `None` unless it is an NVIDIA GPU. The first call tries one out.
#[must_use]
pub fn kernel_state(device: &Device) -> Option<&'static KernelState> {
    let gpu = gpu_of(device)?;
    Some(check::decided(stream::capability(gpu), || twice::check(device), || products::check(gpu)))
}

/// The ordinal of an NVIDIA GPU.
fn gpu_of(device: &Device) -> Option<u16> {
    let tensor = Tensor::<1>::zeros([1], (device, DType::F32)).into_dispatch();
    let Some(CubeDevice::Cuda(gpu)) = device_of(&tensor) else { return None };
    u16::try_from(gpu.index).ok()
}

/// Whether a kernel for matrices of 16 bits is used on one.
fn has(x: &Tensor<2>, kernel: Kernel) -> bool {
    is_half(x.dtype()) && x.dims()[1].is_multiple_of(8) && check::is_on(kernel)
}

/// Whether a kernel norms and rotates heads.
fn has_head_norms(norms: HeadNorms<'_>) -> bool {
    let head_dim = norms.heads.head_dim;
    let is_of_heads = norms.weights[0].dims() == [head_dim] && norms.layout.table(norms.rope).turns_halves();
    let is_sized = head_dim.is_multiple_of(16) && head_dim <= 256;
    is_of_heads && is_sized && has(norms.qk[0], Kernel::Rotary) && check::is_on(Kernel::Norm)
}

/// Whether kernels compute a convolution with as many taps.
fn has_short_conv(x: &Tensor<2>, (weight, bias): ConvWeights<'_>) -> bool {
    has(x, Kernel::ShortConv) && bias.is_none() && weight.dims()[0] == short_conv::TAPS
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
    let is_taken = match &weight.values {
        Matrix::Dense(values) => values.dtype() == dtype,
        Matrix::Quantised(_) => true,
        Matrix::Blocks(_) => false,
    };
    let is_aligned = weight.dims().iter().all(|width| width.is_multiple_of(8));
    is_half(dtype) && is_taken && is_aligned && check::is_on(Kernel::Products)
}

/// The only one of them.
fn one<T>(mut all: Vec<T>) -> T {
    all.pop().unwrap_or_else(|| unreachable!("there is one"))
}

impl Cuda {
    /// The outputs of layers of one input, each with the low-rank input of its update, which the kernels take; added to `residual` if
    /// there is one, which is for one layer.
    fn layers(&self, x: &Tensor<2>, layers: &[Layer<'_>], residual: Option<Tensor<2>>) -> Vec<LayerOutput> {
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
            (None, _) if !has_some && are_joined(x, weights) => frozen::forward(x, weights, residual.as_ref()),
            (None, [weight]) => return vec![self.0.linear(x, Layer { weight, lora: None }, residual).0],
            _ => return weights.iter().map(|weight| one(self.products(x, &[*weight], residual.take()))).collect(),
        };
        if biases.is_empty() { ys } else { bias::add(ys, &biases) }
    }

    /// The gradients of [`layers`](Self::layers).
    fn layers_backward<'a>(
        &self,
        dys: &[&'a Tensor<2>],
        x: &Tensor<2>,
        layers: &[Applied<'a>],
        input_grad: InputGrad,
    ) -> LayersGrads {
        let weights: Vec<_> = layers.iter().map(|(layer, _)| layer.weight).collect();
        let dx = self.products_backward(dys, x, &weights, input_grad);
        let update = |(dy, (layer, xa)): (&&'a Tensor<2>, &Applied<'a>)| Some((*dy, layer.lora?, (*xa)?));
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
            _ if are_joined(x, weights) => Some(frozen::backward(dys, weights, sum.as_ref())),
            (None, [dy], [weight]) => {
                let layer = (Layer { weight, lora: None }, None);
                self.0.linear_backward(dy, x, layer, InputGrad::of(true, sum)).0
            }
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
    let has_bias = |weight: &Weight| weight.bias.is_none() || check::is_on(Kernel::Bias);
    (weights.len() == 1 || weights.iter().all(is_dense))
        && weights.iter().all(|weight| has_products(x.dtype(), weight) && has_bias(weight))
}

impl Linears for Cuda {
    fn linear(&self, x: &Tensor<2>, layer: Layer<'_>, residual: Option<Tensor<2>>) -> LayerOutput {
        let weight = layer.weight;
        if layer.lora.is_none_or(|lora| has_low_rank_of(x, lora)) {
            one(self.layers(x, &[layer], residual))
        } else if has_products(x.dtype(), weight) {
            let base = |sum| (one(self.products(x, &[&weight.without_bias()], sum)), None);
            linear_by(base, self.f32_products(), x, layer, residual)
        } else {
            self.0.linear(x, layer, residual)
        }
    }

    fn linears(&self, x: &Tensor<2>, layers: &[Layer<'_>]) -> Vec<LayerOutput> {
        if layers.iter().filter_map(|layer| layer.lora).all(|lora| has_low_rank_of(x, lora)) {
            return self.layers(x, layers, None);
        }
        layers.iter().map(|layer| self.linear(x, *layer, None)).collect()
    }

    fn linear_backward(&self, dy: &Tensor<2>, x: &Tensor<2>, layer: Applied<'_>, input_grad: InputGrad) -> LayerGrads {
        let Layer { weight, lora } = layer.0;
        if lora.is_none_or(|lora| has_low_rank_of(x, lora)) {
            let (dx, grads) = self.layers_backward(&[dy], x, &[layer], input_grad);
            (dx, one(grads))
        } else if has_products(dy.dtype(), weight) {
            let base = |sum| (self.products_backward(&[dy], x, &[weight], InputGrad::of(true, sum)), None);
            linear_backward_by(base, self.f32_products(), dy, x, layer, input_grad)
        } else {
            self.0.linear_backward(dy, x, layer, input_grad)
        }
    }

    fn linears_backward(&self, dys: Vec<Tensor<2>>, x: &Tensor<2>, layers: &[Applied<'_>], dx: bool) -> LayersGrads {
        if layers.iter().filter_map(|(layer, _)| layer.lora).all(|lora| has_low_rank_of(x, lora)) {
            let dys: Vec<_> = dys.iter().collect();
            return self.layers_backward(&dys, x, layers, InputGrad::of(dx, None));
        }
        each_backward(self, dys, x, layers, dx)
    }

    fn low_rank_input(&self, x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
        if has_low_rank_of(x, lora) { one(low_rank::input(x, &[lora])) } else { self.0.low_rank_input(x, lora) }
    }

    fn gated(&self, activation: Activation, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
        if has(gate, Kernel::Swiglu) && has_activation(activation) {
            swiglu::forward(activation, gate, up)
        } else {
            self.0.gated(activation, gate, up)
        }
    }

    fn gated_backward(&self, activation: Activation, dh: &Tensor<2>, gate_up: [&Tensor<2>; 2]) -> [Tensor<2>; 2] {
        if has(gate_up[0], Kernel::Swiglu) && has_activation(activation) {
            swiglu::backward(activation, dh, gate_up)
        } else {
            self.0.gated_backward(activation, dh, gate_up)
        }
    }

    fn experts(&self) -> Option<&dyn Experts> {
        Some(self)
    }
}

impl Norms for Cuda {
    fn rms_norm(&self, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        if has(x, Kernel::Norm) { norm::forward(x, weight, eps) } else { self.0.rms_norm(x, weight, eps) }
    }

    fn rms_norm_backward(&self, dy: &Tensor<2>, normed: Normed<'_>, residual: Tensor<2>) -> Tensor<2> {
        if has(normed.x, Kernel::Norm) {
            norm::backward(dy, normed, residual)
        } else {
            self.0.rms_norm_backward(dy, normed, residual)
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

    fn norm_and_rotate(&self, norms: HeadNorms<'_>) -> ([Tensor<2>; 2], Factors) {
        if has_head_norms(norms) { (rotary::norm_and_rotate(norms), None) } else { norm_then_rotate(self, norms) }
    }

    fn norm_and_rotate_backward(&self, dqk: [Tensor<2>; 2], factors: Factors, norms: HeadNorms<'_>) -> [Tensor<2>; 2] {
        if has_head_norms(norms) {
            rotary::norm_and_rotate_backward(dqk, norms)
        } else {
            rotate_then_norm_backward(self, dqk, factors, norms)
        }
    }
}

impl Attention for Cuda {
    fn attention(&self, inputs: AttentionInputs<'_>) -> Attended {
        match attention_heads(inputs.heads, inputs.qkv[0].dtype()) {
            Some(wide) => attention::forward(inputs, wide),
            None => self.0.attention(inputs),
        }
    }

    fn attention_backward(&self, d_o: &Tensor<2>, attended: &Attended, inputs: AttentionInputs<'_>) -> [Tensor<2>; 3] {
        match attention_heads(inputs.heads, inputs.qkv[0].dtype()) {
            Some(wide) => attention::backward(d_o, attended, inputs, wide),
            None => self.0.attention_backward(d_o, attended, inputs),
        }
    }

    fn append(&self, texts: TextsOnDevice, kv: [&Tensor<2>; 2]) -> Vec<[Tensor<3>; 2]> {
        if has_cached_attention(texts.heads, kv[0].dtype()) {
            cached_attention::append(texts, kv)
        } else {
            self.0.append(texts, kv)
        }
    }

    fn attend(&self, texts: &TextsOnDevice, q: &Tensor<2>) -> Attended {
        if has_cached_attention(texts.heads, q.dtype()) {
            cached_attention::attend(texts, q)
        } else {
            self.0.attend(texts, q)
        }
    }
}

impl Recurrent for Cuda {
    fn convolve_next(
        &self,
        conv: Convolution<'_>,
        last: Vec<Tensor<2>>,
        texts: &[TextRows],
        x: &Tensor<2>,
    ) -> (Tensor<2>, Vec<Tensor<2>>) {
        if has(x, Kernel::Next) && next::has_convolution(conv) {
            next::convolve(conv, last, texts, x)
        } else {
            self.0.convolve_next(conv, last, texts, x)
        }
    }

    fn delta_rule_next(
        &self,
        memories: Vec<Tensor<3>>,
        texts: &[TextRows],
        inputs: DeltaInputs<'_>,
    ) -> (Tensor<2>, Vec<Tensor<3>>) {
        if has(inputs.qkv, Kernel::Next) && next::States::from(inputs).have_kernel() {
            next::states(inputs.into(), memories, texts)
        } else {
            self.0.delta_rule_next(memories, texts, inputs)
        }
    }

    fn state_space_next(
        &self,
        memories: Vec<Tensor<3>>,
        texts: &[TextRows],
        inputs: StateInputs<'_>,
    ) -> (Tensor<2>, Vec<Tensor<3>>) {
        if has(inputs.xbc, Kernel::Next) && next::States::from(inputs).have_kernel() {
            next::states(inputs.into(), memories, texts)
        } else {
            self.0.state_space_next(memories, texts, inputs)
        }
    }

    fn short_conv(&self, x: &Tensor<2>, weights: ConvWeights<'_>, layout: &Layout) -> Tensor<2> {
        if has_short_conv(x, weights) {
            short_conv::forward("short_conv", x, weights.0, layout)
        } else {
            self.0.short_conv(x, weights, layout)
        }
    }

    fn short_conv_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weights: ConvWeights<'_>,
        layout: &Layout,
    ) -> Tensor<2> {
        if has_short_conv(x, weights) {
            short_conv::backward("short_conv_backward", dy, x, weights.0, layout)
        } else {
            self.0.short_conv_backward(dy, x, weights, layout)
        }
    }

    fn gated_conv(&self, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        if has_gated_conv(bcx, weight) {
            short_conv::forward("gated_conv", bcx, weight, layout)
        } else {
            self.0.gated_conv(bcx, weight, layout)
        }
    }

    fn gated_conv_backward(&self, dy: &Tensor<2>, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        if has_gated_conv(bcx, weight) {
            short_conv::backward("gated_conv_backward", dy, bcx, weight, layout)
        } else {
            self.0.gated_conv_backward(dy, bcx, weight, layout)
        }
    }

    fn delta_rule(&self, inputs: DeltaInputs<'_>, state: Option<Tensor<3>>) -> (Tensor<2>, Option<Tensor<3>>) {
        if state.is_none() && has_delta_rule(inputs.heads, inputs.qkv.dtype()) {
            (delta_rule::forward(inputs), None)
        } else {
            self.0.delta_rule(inputs, state)
        }
    }

    fn delta_rule_backward(&self, d_o: &Tensor<2>, inputs: DeltaInputs<'_>) -> (Tensor<2>, Gates<Tensor<2>>) {
        if has_delta_rule(inputs.heads, inputs.qkv.dtype()) {
            delta_rule::backward(d_o, inputs)
        } else {
            self.0.delta_rule_backward(d_o, inputs)
        }
    }
}

impl Losses for Cuda {
    fn draw(&self, logits: &Tensor<2>, draws: &[Draw]) -> Vec<Option<Drawn>> {
        if check::is_on(Kernel::Draw) && logits.dtype() == DType::F32 {
            draw::draw(logits, draws)
        } else {
            self.0.draw(logits, draws)
        }
    }

    fn cross_entropy(&self, logits: Tensor<2>, targets: &[u32], scale: Option<f64>) -> (Tensor<1>, Option<Tensor<2>>) {
        if !is_half(logits.dtype()) || !check::is_on(Kernel::CrossEntropy) {
            return self.0.cross_entropy(logits, targets, scale);
        }
        let targets = target_ids(targets, &logits);
        cross_entropy::cross_entropy(logits, targets, scale)
    }
}

impl Updates for Cuda {
    fn adamw(
        &self,
        states: Vec<(AdamState, &Tensor<2>)>,
        update: &Update,
        factor: Option<&Tensor<1>>,
    ) -> Vec<AdamState> {
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
}
