//! The language-model head and its cross-entropy, in chunks of tokens: the logits of a whole micro-batch never exist.

use burn::tensor::{DType, Int, Tensor, activation};

use super::cpu;
use super::host::{self, HostWeight};
use super::linear::{InputGrad, Weight, plain_linear, plain_linear_backward};
use super::place::Place;
use super::profile::{self, Cost};

/// Bytes of `f32` logits made at a time by default.
const CHUNK_BYTES: usize = 96 << 20;

/// How many target tokens' logits exist at a time. More take fewer passes over the head's weights and more memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossChunk {
    /// As many as fill 96 MiB, but not fewer than 16 and not more than 4096.
    #[default]
    Auto,
    /// At most this many; values below 1 count as 1.
    Tokens(usize),
}

impl LossChunk {
    /// The most target tokens in a chunk, with `vocab_size` logits each.
    #[must_use]
    pub fn most_tokens(self, vocab_size: usize) -> usize {
        match self {
            Self::Auto => (CHUNK_BYTES / size_of::<f32>() / vocab_size.max(1)).clamp(16, 4096),
            Self::Tokens(tokens) => tokens.max(1),
        }
    }

    /// Target tokens per chunk, for `num_targets` in all. Chunks are of one size, since a small last one would cost a
    /// pass over the whole head.
    #[must_use]
    pub fn tokens(self, vocab_size: usize, num_targets: usize) -> usize {
        let num_chunks = num_targets.div_ceil(self.most_tokens(vocab_size)).max(1);
        num_targets.div_ceil(num_chunks).max(1)
    }
}

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
pub fn linear_cross_entropy(
    place: Place,
    hidden: &Tensor<2>,
    head: &Weight,
    targets: &[u32],
    grad_scale: f64,
    chunk: LossChunk,
) -> LossAndGrad {
    let [vocab_size, width] = head.dims();
    let cost = || Cost {
        shape: format!("{width} -> {vocab_size}"),
        flops: profile::count(4 * targets.len() * vocab_size * width),
        bytes: 2.0 * profile::bytes(&head.values) + 2.0 * profile::bytes(hidden),
    };
    let work = || match place {
        Place::Cpu => on_cpu(hidden, head, targets, Some(grad_scale), chunk),
        Place::Plain => {
            let chunks = chunks(targets, head, chunk).map(|(start, targets)| {
                plain_linear_cross_entropy(&hidden.clone().narrow(0, start, targets.len()), head, targets, grad_scale)
            });
            let (losses, dhidden): (Vec<_>, Vec<_>) = chunks.map(|chunk| (chunk.losses, chunk.dhidden)).unzip();
            LossAndGrad { losses: Tensor::cat(losses, 0), dhidden: Tensor::cat(dhidden, 0) }
        }
    };
    profile::measure("linear_cross_entropy", cost, work)
}

/// Without `grad_scale` the gradient is left empty.
fn on_cpu(
    hidden: &Tensor<2>,
    head: &Weight,
    targets: &[u32],
    grad_scale: Option<f64>,
    chunk: LossChunk,
) -> LossAndGrad {
    let (values, weight, width) = (host::view(hidden), HostWeight::new(head), hidden.dims()[1]);
    let mut losses = vec![0.0; targets.len()];
    let mut dhidden = vec![0.0; if grad_scale.is_some() { values.len() } else { 0 }];
    for (start, targets) in chunks(targets, head, chunk) {
        let (rows, range) = (start..start + targets.len(), start * width..(start + targets.len()) * width);
        #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
        let gradient = grad_scale.map(|grad_scale| (&mut dhidden[range.clone()], grad_scale as f32));
        cpu::linear_cross_entropy(&values[range], weight.get(), width, targets, &mut losses[rows], gradient);
    }
    let (device, shape) = (hidden.device(), [dhidden.len() / width, width]);
    let losses = host::tensor(losses, [targets.len()], &device);
    LossAndGrad { losses, dhidden: host::tensor(dhidden, shape, &device) }
}

/// Cross-entropy of `softmax(hidden head^T)` at `targets`, without a gradient: `[targets]`, `f32`, in nats.
///
/// # Shapes
/// As for [`linear_cross_entropy`].
#[must_use]
pub fn linear_cross_entropy_loss(
    place: Place,
    hidden: &Tensor<2>,
    head: &Weight,
    targets: &[u32],
    chunk: LossChunk,
) -> Tensor<1> {
    if place == Place::Cpu {
        return on_cpu(hidden, head, targets, None, chunk).losses;
    }
    let losses = chunks(targets, head, chunk).map(|(start, targets)| {
        let (logits, _) = plain_linear(&hidden.clone().narrow(0, start, targets.len()), head, None);
        plain_cross_entropy(logits, targets)
    });
    Tensor::cat(losses.collect(), 0)
}

fn chunks<'a>(targets: &'a [u32], head: &Weight, chunk: LossChunk) -> impl Iterator<Item = (usize, &'a [u32])> {
    let [vocab_size, _] = head.dims();
    let size = chunk.tokens(vocab_size, targets.len());
    targets.chunks(size).enumerate().map(move |(index, targets)| (index * size, targets))
}

/// [`linear_cross_entropy`] in plain tensor calls, of all targets at once.
#[must_use]
pub fn plain_linear_cross_entropy(hidden: &Tensor<2>, head: &Weight, targets: &[u32], grad_scale: f64) -> LossAndGrad {
    let (logits, _) = plain_linear(hidden, head, None);
    let (losses, dlogits) = plain_cross_entropy_with_grad(logits, targets, grad_scale);
    let (dhidden, _) = plain_linear_backward(&dlogits, hidden, head, None, InputGrad::Fresh);
    LossAndGrad { losses, dhidden: dhidden.unwrap_or_else(|| hidden.zeros_like()) }
}

/// Losses `[rows]`, and `grad_scale (softmax - onehot)` in the type of `logits`, `[rows, vocab_size]`.
fn plain_cross_entropy_with_grad(logits: Tensor<2>, targets: &[u32], grad_scale: f64) -> (Tensor<1>, Tensor<2>) {
    let dtype = logits.dtype();
    let log_probabilities = activation::log_softmax(logits.cast(DType::F32), 1);
    let targets = target_column(targets, &log_probabilities);
    let losses = log_probabilities.clone().gather(1, targets.clone()).neg().squeeze_dim(1);
    let ones = Tensor::<2>::ones(targets.dims(), (&log_probabilities.device(), DType::F32));
    let dlogits = log_probabilities.exp().scatter(1, targets, ones.neg(), burn::tensor::IndexingUpdateOp::Add);
    (losses, (dlogits * grad_scale).cast(dtype))
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

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    const TARGETS: usize = 53;
    const VOCAB: usize = 37;
    const WIDTH: usize = 12;

    fn values(count: usize, factor: f32, device: &Device, rows: usize) -> Tensor<2> {
        let values = (0..count).map(|i| ((i * 7919 % 1013) as f32 / 506.5 - 1.0) * factor).collect();
        host::tensor(values, [rows, count / rows], device)
    }

    fn run(device: &Device, chunk: LossChunk) -> (Vec<f32>, Vec<f32>) {
        let hidden = values(TARGETS * WIDTH, 3.0, device, TARGETS);
        let head = Weight::new(values(VOCAB * WIDTH, 1.0, device, VOCAB));
        let targets: Vec<u32> = (0..53).map(|i| i * 5 % 37).collect();
        let place = Place::of(device, DType::F32);
        let LossAndGrad { losses, dhidden } = linear_cross_entropy(place, &hidden, &head, &targets, 2.0, chunk);
        (losses.into_data().try_to_vec().unwrap(), dhidden.into_data().try_to_vec().unwrap())
    }

    /// The whole logits under burn's autodiff.
    fn by_autodiff() -> (Vec<f32>, Vec<f32>) {
        let device = Device::flex().autodiff();
        let hidden = values(TARGETS * WIDTH, 3.0, &device, TARGETS).require_grad();
        let head = values(VOCAB * WIDTH, 1.0, &device, VOCAB);
        let targets: Vec<u32> = (0..53).map(|i| i * 5 % 37).collect();
        let losses = plain_cross_entropy(hidden.clone().matmul(head.transpose()), &targets);
        let grads = (losses.clone().sum() * 2.0).backward();
        let dhidden = hidden.grad(&grads).unwrap();
        (losses.inner().into_data().try_to_vec().unwrap(), dhidden.into_data().try_to_vec().unwrap())
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 2e-6 * largest, "{found} against {expected}");
        }
    }

    #[test]
    fn chunks_of_any_size_give_the_loss_and_gradient_of_the_whole_logits() {
        let expected = by_autodiff();
        for device in [Device::flex(), Device::flex().autodiff()] {
            for chunk in [LossChunk::Tokens(1), LossChunk::Tokens(16), LossChunk::Tokens(1000), LossChunk::Auto] {
                let found = run(&device, chunk);
                assert_close(&found.0, &expected.0);
                assert_close(&found.1, &expected.1);
            }
        }
    }

    #[test]
    fn chunks_are_of_one_size_and_cover_every_target() {
        let head = Weight::new(Tensor::zeros([VOCAB, WIDTH], (&Device::flex(), DType::F32)));
        let targets = [0; 53];
        let sizes: Vec<_> =
            chunks(&targets, &head, LossChunk::Tokens(16)).map(|(start, targets)| (start, targets.len())).collect();
        assert_eq!(sizes, [(0, 14), (14, 14), (28, 14), (42, 11)]);
        assert!(chunks(&[], &head, LossChunk::Tokens(0)).next().is_none());
        // 96 MiB of Llama 3's vocabulary; a tiny one and a huge one.
        let most = [128_256, 5, usize::MAX / 8].map(|vocab_size| LossChunk::Auto.most_tokens(vocab_size));
        assert_eq!(most, [196, 4096, 16]);
    }
}
