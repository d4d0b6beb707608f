//! The language-model head and its cross-entropy, in chunks of tokens: the logits of a whole micro-batch never exist.

use burn::tensor::{DType, Int, Tensor, activation};

use super::{cpu, host, linear};

/// Bytes of `f32` logits made at a time.
const CHUNK_BYTES: usize = 96 << 20;

/// Losses of tokens, and the gradient of their weighted sum.
#[derive(Debug)]
pub struct LossAndGrad {
    /// Negative log-likelihood of each target, in nats, `f32`, `[targets]`.
    pub losses: Tensor<1>,
    /// `grad_scale` times the gradient of the losses' sum with respect to `hidden`, `[targets, hidden_size]`.
    pub dhidden: Tensor<2>,
}

/// Cross-entropy of `softmax(hidden head^T)` at `targets`, and its gradient (the head is frozen).
///
/// # Shapes
/// `hidden`: `[targets, hidden_size]`, `head`: `[vocab_size, hidden_size]`, `targets`: as many ids as `hidden` has rows.
#[must_use]
pub fn linear_cross_entropy(hidden: &Tensor<2>, head: &Tensor<2>, targets: &[u32], grad_scale: f64) -> LossAndGrad {
    let chunks = chunks(targets, head).map(|(start, targets)| {
        let hidden = hidden.clone().narrow(0, start, targets.len());
        let (logits, _) = linear::linear(&hidden, head, None);
        let (losses, dlogits) = cross_entropy_with_grad(logits, targets, grad_scale);
        let (dhidden, _) = linear::linear_backward(&dlogits, &hidden, head, None, linear::InputGrad::Fresh);
        (losses, dhidden.unwrap_or_else(|| hidden.zeros_like()))
    });
    let (losses, dhidden): (Vec<_>, Vec<_>) = chunks.unzip();
    LossAndGrad { losses: Tensor::cat(losses, 0), dhidden: Tensor::cat(dhidden, 0) }
}

/// Cross-entropy of `softmax(hidden head^T)` at `targets`, without a gradient: `[targets]`, `f32`, in nats.
///
/// # Shapes
/// As for [`linear_cross_entropy`].
#[must_use]
pub fn linear_cross_entropy_loss(hidden: &Tensor<2>, head: &Tensor<2>, targets: &[u32]) -> Tensor<1> {
    let losses = chunks(targets, head).map(|(start, targets)| {
        let (logits, _) = linear::linear(&hidden.clone().narrow(0, start, targets.len()), head, None);
        cross_entropy(logits, targets)
    });
    Tensor::cat(losses.collect(), 0)
}

fn chunks<'a>(targets: &'a [u32], head: &Tensor<2>) -> impl Iterator<Item = (usize, &'a [u32])> {
    let [vocab_size, _] = head.dims();
    let most = (CHUNK_BYTES / size_of::<f32>() / vocab_size).clamp(16, 4096);
    // Chunks of one size: a last one of a few rows would cost a pass over the whole head.
    let size = targets.len().div_ceil(targets.len().div_ceil(most).max(1)).max(1);
    targets.chunks(size).enumerate().map(move |(index, targets)| (index * size, targets))
}

/// Losses `[rows]`, and `grad_scale (softmax - onehot)` in the type of `logits`, `[rows, vocab_size]`.
fn cross_entropy_with_grad(logits: Tensor<2>, targets: &[u32], grad_scale: f64) -> (Tensor<1>, Tensor<2>) {
    let device = logits.device();
    if host::has_kernels(&device, logits.dtype())
        && let Some(mut flex) = host::take(logits.clone())
    {
        drop(logits);
        let mut losses = vec![0.0; targets.len()];
        cpu::softmax_cross_entropy(flex.storage_mut(), targets, &mut losses);
        let dlogits = host::restore::<2>(flex);
        let dlogits = if (grad_scale - 1.0).abs() < f64::EPSILON { dlogits } else { dlogits * grad_scale };
        return (host::tensor(losses, [targets.len()], &device), dlogits);
    }
    plain_cross_entropy_with_grad(logits, targets, grad_scale)
}

/// [`cross_entropy_with_grad`] in plain tensor calls.
fn plain_cross_entropy_with_grad(logits: Tensor<2>, targets: &[u32], grad_scale: f64) -> (Tensor<1>, Tensor<2>) {
    let dtype = logits.dtype();
    let log_probabilities = activation::log_softmax(logits.cast(DType::F32), 1);
    let targets = target_column(targets, &log_probabilities);
    let losses = log_probabilities.clone().gather(1, targets.clone()).neg().squeeze_dim(1);
    let ones = Tensor::<2>::ones(targets.dims(), (&log_probabilities.device(), DType::F32));
    let dlogits = log_probabilities.exp().scatter(1, targets, ones.neg(), burn::tensor::IndexingUpdateOp::Add);
    (losses, (dlogits * grad_scale).cast(dtype))
}

fn cross_entropy(logits: Tensor<2>, targets: &[u32]) -> Tensor<1> {
    if let Some(view) = host::view(&logits) {
        let mut losses = vec![0.0; targets.len()];
        cpu::cross_entropy(view.as_slice(), targets, &mut losses);
        return host::tensor(losses, [targets.len()], &logits.device());
    }
    plain_cross_entropy(logits, targets)
}

/// Losses `[rows]` of `logits` `[rows, vocab_size]`, in plain tensor calls.
#[must_use]
pub fn plain_cross_entropy(logits: Tensor<2>, targets: &[u32]) -> Tensor<1> {
    let log_probabilities = activation::log_softmax(logits.cast(DType::F32), 1);
    let targets = target_column(targets, &log_probabilities);
    log_probabilities.gather(1, targets).neg().squeeze_dim(1)
}

fn target_column(targets: &[u32], like: &Tensor<2>) -> Tensor<2, Int> {
    let ids: Vec<i32> = targets.iter().map(|&id| id.cast_signed()).collect();
    Tensor::<1, Int>::from_data(ids.as_slice(), (&like.device(), DType::I32)).unsqueeze_dim(1)
}
