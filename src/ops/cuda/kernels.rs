//! The kernels of NVIDIA GPUs, each behind the operation that it computes.

mod attention;
mod cross_entropy;
mod low_rank;
mod matrix;
mod norm;
mod optimizer;
#[expect(unsafe_code, reason = "cuBLASLt is a C library")]
mod products;
mod rotary;
mod self_check;
#[expect(unsafe_code, reason = "launches through the driver, a C library")]
mod stream;
mod swiglu;
mod twice;

use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeDevice;
use sha2::{Digest as _, Sha256};

use super::check::{self, KernelState};
use super::{Sizes, has_attention};
use crate::device::Dtype;
use crate::ops::adamw::{State, Update};
use crate::ops::attention::{Attended, Heads};
use crate::ops::cross_entropy::{TokenWeights, chunked_cross_entropy, target_ids};
use crate::ops::custom::device_of;
use crate::ops::kernels::{Kernels, Place, Plain};
use crate::ops::layout::Layout;
use crate::ops::linear::{InputGrad, Matrix, Weight, linear_backward_by, linear_by};
use crate::ops::low_rank::{Lora, LowRank};
use crate::ops::product::F32Products;
use crate::util::files;

pub use self_check::self_check;

/// Names the kernels of this build.
#[must_use]
pub fn digest() -> String {
    let modules = [
        &attention::MODULE,
        &cross_entropy::MODULE,
        &low_rank::MODULE,
        &norm::MODULE,
        &optimizer::MODULE,
        &rotary::MODULE,
        &swiglu::MODULE,
        &twice::MODULE,
    ];
    files::hex(&Sha256::digest(modules.map(|module| module.ptx).concat()))
}

/// Which kernels are used on a device; `None` unless it is an NVIDIA GPU.
pub(super) fn state(device: &Device) -> Option<&'static KernelState> {
    let tensor = Tensor::<1>::zeros([1], (device, DType::F32)).into_dispatch();
    matches!(device_of(&tensor), Some(CubeDevice::Cuda(_))).then(|| check::decided(|| twice::check(device)))
}

/// Rows of a grid.
const MOST_ROWS: usize = 65_535;

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
fn has(x: &Tensor<2>, name: &str) -> bool {
    x.dtype() == DType::BF16 && x.dims()[1].is_multiple_of(8) && check::is_on(name)
}

/// Likewise of one whose grid has a row for each token.
fn has_rows(x: &Tensor<2>, name: &str) -> bool {
    has(x, name) && x.dims()[0] <= MOST_ROWS
}

/// Whether the kernels of low-rank updates take this one.
fn has_low_rank_of(x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> bool {
    let ([rank, _], [out_features, _]) = (lora.matrices.a.dims(), lora.matrices.b.dims());
    has(x, "low_rank") && rank <= low_rank::MOST_RANK && out_features.is_multiple_of(8)
}

/// Whether cuBLASLt multiplies with a frozen matrix: it wants widths that are multiples of 16 bytes.
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
        self.0.attention_backward_numbers(heads, dtype)
    }

    fn score_bytes(&self, all: usize, heads: Heads, dtype: Dtype) -> usize {
        self.0.score_bytes(all, heads, dtype)
    }

    fn library_bytes(&self) -> usize {
        self.0.library_bytes()
    }

    fn most_targets(&self, head: [usize; 2]) -> usize {
        self.0.most_targets(head)
    }

    fn bytes_per_logit(&self, activation_bytes: usize) -> usize {
        self.0.bytes_per_logit(activation_bytes)
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
        head: &Weight,
        targets: &[u32],
        weights: Option<&TokenWeights>,
        chunk_len: usize,
    ) -> (Tensor<1>, Option<Tensor<2>>) {
        chunked_cross_entropy(self, hidden, head, targets, weights, chunk_len)
    }

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

    fn rms_norm(&self, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        if has(x, "norm") { norm::forward(x, weight, eps) } else { self.0.rms_norm(x, weight, eps) }
    }

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

    fn swiglu(&self, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
        if has_rows(gate, "swiglu") { swiglu::forward(gate, up) } else { self.0.swiglu(gate, up) }
    }

    fn swiglu_backward(&self, dh: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        if has_rows(gate, "swiglu") { swiglu::backward(dh, gate, up) } else { self.0.swiglu_backward(dh, gate, up) }
    }

    fn rotate(&self, x: Tensor<2>, layout: &Layout, rope: usize, num_heads: usize, inverse: bool) -> Tensor<2> {
        if has_rows(&x, "rotary") && (x.dims()[1] / num_heads).is_multiple_of(16) {
            rotary::rotate(x, layout, rope, num_heads, inverse)
        } else {
            self.0.rotate(x, layout, rope, num_heads, inverse)
        }
    }

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

    fn adamw(&self, states: Vec<(State, &Tensor<2>)>, update: &Update) -> Vec<State> {
        if check::is_on("optimizer") && !states.is_empty() {
            optimizer::adamw(states, update)
        } else {
            self.0.adamw(states, update)
        }
    }

    fn sum_of_squares(&self, blocks: &[Vec<&Tensor<2>>]) -> Tensor<1> {
        if check::is_on("optimizer") {
            return optimizer::sum_of_squares(blocks.iter().flatten().map(|grad| (*grad).clone()));
        }
        self.0.sum_of_squares(blocks)
    }

    fn low_rank_input(&self, x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
        if has_low_rank_of(x, lora) { low_rank::input(x, lora) } else { self.0.low_rank_input(x, lora) }
    }
}
