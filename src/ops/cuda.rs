//! NVIDIA GPUs: plain tensor calls, and kernels in CUDA C++ for what these are slow at.
//!
//! A kernel runs on burn's own stream. Where it has none for a type, a size or a GPU, and where the check at the start failed, the plain
//! version runs. [`KERNELS_VARIABLE`] switches kernels off, to find the one that is at fault.

#[cfg(feature = "cuda-llvm")]
mod attention;
mod check;
#[cfg(feature = "cuda-llvm")]
mod cross_entropy;
#[cfg(feature = "cuda-llvm")]
mod low_rank;
#[cfg(feature = "cuda-llvm")]
mod matrix;
#[cfg(feature = "cuda-llvm")]
mod norm;
#[cfg(feature = "cuda-llvm")]
mod optimizer;
#[cfg(feature = "cuda-llvm")]
#[expect(unsafe_code, reason = "cuBLASLt is a C library")]
mod products;
#[cfg(feature = "cuda-llvm")]
mod rotary;
#[cfg(feature = "cuda-llvm")]
mod self_check;
#[cfg(feature = "cuda-llvm")]
#[expect(unsafe_code, reason = "launches through the driver, a C library")]
mod stream;
#[cfg(feature = "cuda-llvm")]
mod swiglu;
#[cfg(feature = "cuda-llvm")]
mod twice;

use burn::tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

#[cfg(feature = "cuda-llvm")]
use super::adamw::{State, Update};
use super::attention::{Attended, Heads, plain_attention, plain_attention_backward};
#[cfg(feature = "cuda-llvm")]
use super::cross_entropy::target_ids;
use super::cross_entropy::{TokenWeights, chunked_cross_entropy};
use super::kernels::{Kernels, Place, Plain};
use super::layout::Layout;
use super::linear::Weight;
#[cfg(feature = "cuda-llvm")]
use super::linear::{InputGrad, Matrix, linear_backward_by, linear_by};
#[cfg(feature = "cuda-llvm")]
use super::low_rank::{Lora, LowRank};
use super::product::F32Products;
use crate::device::Dtype;
use crate::util::files;

pub use check::{KERNELS_VARIABLE, KernelState, NAMES, leave_alone};
#[cfg(feature = "cuda-llvm")]
pub use self_check::self_check;

/// What a kernel computes, and how far it is off.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Compared {
    /// The name by which it is switched off.
    pub kernel: String,
    /// What was computed.
    pub what: String,
    /// Norm of the difference from the CPU's result in `f32`, over the norm of that; absent if it failed.
    pub error: Option<f64>,
    /// What went wrong: an error of the device, or a difference that is too large.
    pub problem: Option<String>,
}

/// The kernels, as the driver takes them.
const KERNELS: [&str; 8] = [
    include_str!("cuda/kernels/attention.ptx"),
    include_str!("cuda/kernels/cross_entropy.ptx"),
    include_str!("cuda/kernels/low_rank.ptx"),
    include_str!("cuda/kernels/norm.ptx"),
    include_str!("cuda/kernels/optimizer.ptx"),
    include_str!("cuda/kernels/rotary.ptx"),
    include_str!("cuda/kernels/swiglu.ptx"),
    include_str!("cuda/kernels/twice.ptx"),
];

/// Names the kernels of this build.
#[must_use]
pub fn digest() -> String {
    files::hex(&Sha256::digest(KERNELS.concat()))
}

/// Memory that a product of cuBLASLt may use beside its operands, one for a device: what NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The kernels of NVIDIA GPUs.
#[derive(Debug)]
pub(super) struct Cuda(pub(super) Plain);

/// NVIDIA GPUs, with these products of operands in `f32`.
pub(super) fn cuda(products: F32Products) -> Place {
    match products {
        F32Products::OfDevice => &Cuda(Plain(F32Products::OfDevice)),
        F32Products::Split => &Cuda(Plain(F32Products::Split)),
    }
}

/// Whether kernels of our own are used on `device`; `None` unless it is an NVIDIA GPU. The first call tries one out.
#[must_use]
pub fn kernel_state(device: &Device) -> Option<&'static KernelState> {
    #[cfg(feature = "cuda-llvm")]
    {
        let tensor = Tensor::<1>::zeros([1], (device, DType::F32)).into_dispatch();
        if matches!(super::custom::device_of(&tensor), Some(burn_cubecl::CubeDevice::Cuda(_))) {
            return Some(check::decided(device));
        }
    }
    let _ = device;
    None
}

/// Whether kernels compute attention with such heads.
fn has_attention(heads: Heads, dtype: DType) -> bool {
    dtype == DType::BF16 && matches!(heads.head_dim, 32 | 64 | 96 | 128 | 256) && check::is_on("attention")
}

/// Whether a kernel for matrices in `bf16` is used on one.
#[cfg(feature = "cuda-llvm")]
fn has(x: &Tensor<2>, name: &str) -> bool {
    x.dtype() == DType::BF16 && x.dims()[1].is_multiple_of(8) && check::is_on(name)
}

/// Whether the kernels of low-rank updates take this one.
#[cfg(feature = "cuda-llvm")]
fn has_low_rank_of(x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> bool {
    let ([rank, _], [out_features, _]) = (lora.matrices.a.dims(), lora.matrices.b.dims());
    has(x, "low_rank") && rank <= low_rank::MOST_RANK && out_features.is_multiple_of(8)
}

/// Whether cuBLASLt multiplies with a frozen matrix: it wants widths that are multiples of 16 bytes.
#[cfg(feature = "cuda-llvm")]
fn has_products(dtype: DType, weight: &Weight) -> bool {
    let is_bf16 = match &weight.values {
        Matrix::Dense(values) => values.dtype() == DType::BF16,
        Matrix::Quantised(_) => true,
        Matrix::Blocks(_) => false,
    };
    let is_aligned = weight.dims().iter().all(|width| width.is_multiple_of(8));
    dtype == DType::BF16 && is_bf16 && is_aligned && check::is_on("products")
}

impl Kernels for Cuda {
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
        if !has_attention(heads, dtype.into()) {
            return self.0.attention_backward_numbers(heads, dtype);
        }
        // The gradients of the output, queries, keys and values; in `f32` the row sums.
        2 * heads.query_width() + 2 * heads.key_value_width() + 2 * heads.num_heads
    }

    fn score_bytes(&self, all: usize, heads: Heads, dtype: Dtype) -> usize {
        if has_attention(heads, dtype.into()) { 0 } else { self.0.score_bytes(all, heads, dtype) }
    }

    fn library_bytes(&self) -> usize {
        if check::is_on("products") { WORKSPACE_BYTES } else { 0 }
    }

    /// Logits and their gradient are one tensor.
    fn bytes_per_logit(&self, activation_bytes: usize) -> usize {
        let is_half = activation_bytes == size_of::<half::bf16>();
        if is_half && check::is_on("cross_entropy") {
            activation_bytes
        } else {
            self.0.bytes_per_logit(activation_bytes)
        }
    }

    fn attention(&self, qkv: [&Tensor<2>; 3], layout: &Layout, heads: Heads) -> Attended {
        #[cfg(feature = "cuda-llvm")]
        if has_attention(heads, qkv[0].dtype()) {
            return attention::forward(qkv, layout, heads);
        }
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
        #[cfg(feature = "cuda-llvm")]
        if has_attention(heads, qkv[0].dtype()) {
            return attention::backward(d_o, qkv, attended, layout, heads);
        }
        plain_attention_backward(d_o, qkv, attended, layout, heads)
    }

    fn linear_cross_entropy(
        &self,
        hidden: &Tensor<2>,
        head: &Weight,
        targets: &[u32],
        weights: Option<&TokenWeights>,
        chunk_len: usize,
    ) -> (Tensor<1>, Option<Tensor<2>>) {
        chunked_cross_entropy(self, hidden, head, targets, weights, chunk_len)
    }

    #[cfg(feature = "cuda-llvm")]
    fn cross_entropy(
        &self,
        logits: Tensor<2>,
        targets: &[u32],
        weights: Option<&TokenWeights>,
    ) -> (Tensor<1>, Option<Tensor<2>>) {
        if logits.dtype() != DType::BF16 || !check::is_on("cross_entropy") {
            return self.0.cross_entropy(logits, targets, weights);
        }
        let targets = target_ids(targets, &logits);
        cross_entropy::cross_entropy(logits, targets, weights)
    }

    #[cfg(feature = "cuda-llvm")]
    fn rms_norm(&self, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        if has(x, "norm") { norm::forward(x, weight, eps) } else { self.0.rms_norm(x, weight, eps) }
    }

    #[cfg(feature = "cuda-llvm")]
    fn rms_norm_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Tensor<1>,
        rstd: &Tensor<1>,
        residual: Tensor<2>,
    ) -> Tensor<2> {
        if has(x, "norm") {
            norm::backward(dy, x, weight, rstd, residual)
        } else {
            self.0.rms_norm_backward(dy, x, weight, rstd, residual)
        }
    }

    #[cfg(feature = "cuda-llvm")]
    fn swiglu(&self, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
        if has(gate, "swiglu") { swiglu::forward(gate, up) } else { self.0.swiglu(gate, up) }
    }

    #[cfg(feature = "cuda-llvm")]
    fn swiglu_backward(&self, dh: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        if has(gate, "swiglu") { swiglu::backward(dh, gate, up) } else { self.0.swiglu_backward(dh, gate, up) }
    }

    #[cfg(feature = "cuda-llvm")]
    fn rotate(&self, x: Tensor<2>, layout: &Layout, rope: usize, num_heads: usize, inverse: bool) -> Tensor<2> {
        if has(&x, "rotary") && (x.dims()[1] / num_heads).is_multiple_of(16) {
            rotary::rotate(x, layout, rope, num_heads, inverse)
        } else {
            self.0.rotate(x, layout, rope, num_heads, inverse)
        }
    }

    #[cfg(feature = "cuda-llvm")]
    fn linear(
        &self,
        x: &Tensor<2>,
        weight: &Weight,
        lora: Option<Lora<&Tensor<2>>>,
        residual: Option<Tensor<2>>,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        if let Some(lora) = lora.filter(|lora| has_low_rank_of(x, *lora)) {
            let (y, _) = self.linear(x, weight, None, residual);
            let xa = low_rank::input(x, lora);
            return (low_rank::output(y, &xa, lora), Some(xa));
        }
        if !has_products(x.dtype(), weight) {
            return self.0.linear(x, weight, lora, residual);
        }
        let base =
            |sum: Option<Tensor<2>>| (products::forward(x, &weight.values.dense_in(x.dtype()), sum.as_ref()), None);
        linear_by(base, self.f32_products(), x, weight, lora, residual)
    }

    #[cfg(feature = "cuda-llvm")]
    fn linear_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        lora: Option<(Lora<&Tensor<2>>, &Tensor<2>)>,
        input_grad: InputGrad,
    ) -> (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>) {
        if let Some((lora, xa)) = lora.filter(|(lora, _)| has_low_rank_of(x, *lora)) {
            let (dx, _) = self.linear_backward(dy, x, weight, None, input_grad);
            let (dx, grads) = low_rank::backward(dy, x, xa, lora, dx);
            return (dx, Some(grads));
        }
        if !has_products(dy.dtype(), weight) {
            return self.0.linear_backward(dy, x, weight, lora, input_grad);
        }
        let base =
            |sum: Option<Tensor<2>>| (products::backward(dy, &weight.values.dense_in(dy.dtype()), sum.as_ref()), None);
        linear_backward_by(base, self.f32_products(), dy, x, weight, lora, input_grad)
    }

    #[cfg(feature = "cuda-llvm")]
    fn adamw(&self, states: Vec<(State, &Tensor<2>)>, update: &Update) -> Vec<State> {
        if check::is_on("optimizer") && !states.is_empty() {
            optimizer::adamw(states, update)
        } else {
            self.0.adamw(states, update)
        }
    }

    #[cfg(feature = "cuda-llvm")]
    fn sum_of_squares(&self, blocks: &[Vec<&Tensor<2>>]) -> Tensor<1> {
        if check::is_on("optimizer") {
            return optimizer::sum_of_squares(blocks.iter().flatten().map(|grad| (*grad).clone()));
        }
        self.0.sum_of_squares(blocks)
    }

    #[cfg(feature = "cuda-llvm")]
    fn low_rank_input(&self, x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
        if has_low_rank_of(x, lora) { low_rank::input(x, lora) } else { self.0.low_rank_input(x, lora) }
    }
}
