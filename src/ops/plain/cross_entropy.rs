//! The cross-entropy of a head in plain tensor calls.

use burn::tensor::{DType, Int, Tensor};

use super::linear::Weight;
use crate::ops::token_rows::{HeadRows, ids_on};

/// Bytes of `f32` logits made at a time by default on the CPU.
const CHUNK_BYTES: usize = 96 << 20;
/// Most targets of a chunk by default in plain tensor calls: products of that many rows keep a GPU busy.
const PLAIN_TOKENS: usize = 1024;
/// In plain tensor calls the targets, and those of a chunk, are a multiple of this: shapes repeat from step to step,
/// and kernels are compiled and tuned for shapes.
pub const PLAIN_MULTIPLE: usize = 64;

/// By default on the CPU.
pub(crate) fn most_cpu_targets([vocab_size, _]: [usize; 2]) -> usize {
    (CHUNK_BYTES / size_of::<f32>() / vocab_size.max(1)).clamp(16, 4096)
}

/// By default in plain tensor calls.
pub(crate) fn most_plain_targets([_, hidden_size]: [usize; 2]) -> usize {
    whole_multiples(hidden_size.clamp(PLAIN_MULTIPLE, PLAIN_TOKENS), PLAIN_MULTIPLE)
}

/// The largest multiple of `multiple` up to `tokens`; `tokens`, if it is smaller than that.
pub(crate) fn whole_multiples(tokens: usize, multiple: usize) -> usize {
    if tokens < multiple { tokens } else { tokens / multiple * multiple }
}

/// The head of a model.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// `[vocab_size, hidden_size]`; its bias, if it has one, is added to the logits.
    pub weight: &'a Weight,
    /// Rows in place of the weight's, which has no bias then.
    pub rows: Option<&'a HeadRows>,
    /// Where the whole weight is trained, what its gradient is made of: `hidden`, each row times the weight of its loss.
    pub inputs: Option<&'a Tensor<2>>,
    /// Logits `l` become `cap tanh(l / cap)`.
    pub soft_cap: Option<f64>,
}

impl Head<'_> {
    /// Logits with their cap.
    pub(crate) fn capped(self, logits: Tensor<2>) -> Tensor<2> {
        let dtype = logits.dtype();
        match self.soft_cap {
            None => logits,
            Some(cap) => ((logits.cast(DType::F32) / cap).tanh() * cap).cast(dtype),
        }
    }

    /// The gradient of logits before their cap, from that of `logits`, which have it.
    pub(crate) fn capped_backward(self, dlogits: Tensor<2>, logits: Tensor<2>) -> Tensor<2> {
        let dtype = dlogits.dtype();
        match self.soft_cap {
            None => dlogits,
            Some(cap) => {
                let slope = (logits.cast(DType::F32) / cap).square().neg() + 1.0;
                (dlogits.cast(DType::F32) * slope).cast(dtype)
            }
        }
    }
}

/// What the losses of a head are computed from.
#[derive(Clone, Copy, Debug)]
pub struct LossInputs<'a> {
    /// `[targets, hidden_size]`
    pub hidden: &'a Tensor<2>,
    /// The head.
    pub head: Head<'a>,
    /// As many ids as `hidden` has rows.
    pub targets: &'a [u32],
    /// What the gradient is multiplied by; without it there is none.
    pub scale: Option<f64>,
    /// Targets whose logits exist at a time.
    pub chunk_len: usize,
}

/// Gradients of a head's losses.
#[derive(Debug)]
pub struct HeadGrads {
    /// In each row `scale` times the gradient of its loss with respect to that row of `hidden`, `[targets, hidden_size]`.
    pub dhidden: Tensor<2>,
    /// The same with respect to the logits of the head's own rows, before their cap, `[targets, rows]` in `f32`, where it has some.
    pub drows: Option<Tensor<2>>,
    /// `scale` times the gradient of the weighted sum of the losses with respect to the whole weight, `[vocab_size, hidden_size]`
    /// in `f32`, where it is trained.
    pub dweight: Option<Tensor<2>>,
}

/// Losses of logits `[targets, vocab_size]` at `targets`, and their gradients times `scale`, in plain tensor calls.
pub(crate) fn plain_cross_entropy(
    logits: &Tensor<2>,
    targets: &[u32],
    scale: Option<f64>,
) -> (Tensor<1>, Option<Tensor<2>>) {
    let targets = target_ids(targets, logits).unsqueeze_dim(1);
    let losses = PlainLosses::new(logits, targets.clone());
    let dlogits = scale.map(|scale| {
        // scale (softmax - onehot)
        let probabilities = losses.log_probabilities(in_f32(logits)).exp();
        let dlogits = probabilities.clone().mask_where(vocabulary(logits).equal(targets), probabilities - 1.0);
        (dlogits * scale).cast(logits.dtype())
    });
    (losses.values(), dlogits)
}

/// Logits in `f32`. Every use casts them anew: fused into its kernel the cast costs nothing, but a tensor that several
/// kernels use would be written, and logits are the largest tensors of all.
fn in_f32(logits: &Tensor<2>) -> Tensor<2> {
    logits.clone().cast(DType::F32)
}

/// What the losses of some logits `[rows, vocab_size]` are made of, each `[rows, 1]`, in `f32`.
struct PlainLosses {
    /// The largest logit.
    max: Tensor<2>,
    /// Logarithm of the sum of the exponentials of all logits, each less the largest.
    log_sum: Tensor<2>,
    /// The target's logit.
    of_target: Tensor<2>,
}

impl PlainLosses {
    fn new(logits: &Tensor<2>, targets: Tensor<2, Int>) -> Self {
        let max = in_f32(logits).max_dim(1);
        let log_sum = (in_f32(logits) - max.clone()).exp().sum_dim(1).log();
        Self { max, log_sum, of_target: logits.clone().gather(1, targets).cast(DType::F32) }
    }

    fn log_probabilities(&self, logits: Tensor<2>) -> Tensor<2> {
        logits - self.max.clone() - self.log_sum.clone()
    }

    /// `[rows]`
    fn values(&self) -> Tensor<1> {
        self.log_probabilities(self.of_target.clone()).neg().squeeze_dim(1)
    }
}

/// The ids of all tokens, `[1, vocab_size]`.
fn vocabulary(logits: &Tensor<2>) -> Tensor<2, Int> {
    let size = i64::try_from(logits.dims()[1]).unwrap_or(i64::MAX);
    Tensor::<1, Int>::arange(0..size, (&logits.device(), DType::I32)).unsqueeze_dim(0)
}

/// `[targets]`
pub(crate) fn target_ids(targets: &[u32], like: &Tensor<2>) -> Tensor<1, Int> {
    ids_on(targets, &like.device())
}
