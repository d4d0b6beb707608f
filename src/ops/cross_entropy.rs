//! The language-model head and its cross-entropy, in chunks of tokens: the logits of a whole micro-batch never exist.

use burn::tensor::{DType, Int, Tensor};

use super::kernels::{Kernels, Place};
use super::linear::{InputGrad, Weight};
use super::product::matmul;
use super::profile::{self, Cost};
use super::token_rows::{HeadRows, ids_on};

/// Bytes of `f32` logits made at a time by default on the CPU.
const CHUNK_BYTES: usize = 96 << 20;
/// Most targets of a chunk by default in plain tensor calls: products of that many rows keep a GPU busy.
const PLAIN_TOKENS: usize = 1024;
/// In plain tensor calls the targets, and those of a chunk, are a multiple of this: shapes repeat from step to step,
/// and kernels are compiled and tuned for shapes.
pub const PLAIN_MULTIPLE: usize = 64;

/// How many target tokens' logits exist at a time. More take fewer passes over the head's weights and more memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossChunk {
    /// On the CPU as many as fill 96 MiB, but not fewer than 16 and not more than 4096. In plain tensor calls as many
    /// as have no more logits than the head has weights, but not fewer than 64 and not more than 1024; on NVIDIA GPUs also
    /// not more than fill 128 MiB in `bf16`.
    #[default]
    Auto,
    /// At most this many; values below 1 count as 1.
    Tokens(usize),
}

impl LossChunk {
    /// The most target tokens in a chunk, for a head `[vocab_size, hidden_size]`.
    #[must_use]
    pub fn most_tokens(self, place: Place, head: [usize; 2]) -> usize {
        match self {
            Self::Auto => place.most_targets(head),
            Self::Tokens(tokens) => whole_multiples(tokens.max(1), place.target_multiple()),
        }
    }

    /// Target tokens per chunk, for `num_targets` in all. Chunks are of one size, since a small last one would cost a
    /// pass over the whole head.
    #[must_use]
    pub fn tokens(self, place: Place, head: [usize; 2], num_targets: usize) -> usize {
        let (most, multiple) = (self.most_tokens(place, head), place.target_multiple());
        let size = num_targets.div_ceil(num_targets.div_ceil(most).max(1)).max(1);
        if most < multiple { size } else { size.next_multiple_of(multiple) }
    }
}

/// By default on the CPU.
pub(super) fn most_cpu_targets([vocab_size, _]: [usize; 2]) -> usize {
    (CHUNK_BYTES / size_of::<f32>() / vocab_size.max(1)).clamp(16, 4096)
}

/// By default in plain tensor calls.
pub(super) fn most_plain_targets([_, hidden_size]: [usize; 2]) -> usize {
    whole_multiples(hidden_size.clamp(PLAIN_MULTIPLE, PLAIN_TOKENS), PLAIN_MULTIPLE)
}

/// The largest multiple of `multiple` up to `tokens`; `tokens`, if it is smaller than that.
fn whole_multiples(tokens: usize, multiple: usize) -> usize {
    if tokens < multiple { tokens } else { tokens / multiple * multiple }
}

/// The head of a model.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// `[vocab_size, hidden_size]`
    pub weight: &'a Weight,
    /// Rows in place of the weight's.
    pub rows: Option<&'a HeadRows>,
    /// Where the whole weight is trained, what its gradient is made of: `hidden`, each row times the weight of its loss.
    pub inputs: Option<&'a Tensor<2>>,
    /// Logits `l` become `cap tanh(l / cap)`.
    pub soft_cap: Option<f64>,
}

impl Head<'_> {
    /// Logits before their cap, `[targets, vocab_size]`, in the type of `hidden`.
    fn uncapped(self, place: &dyn Kernels, hidden: &Tensor<2>) -> Tensor<2> {
        let product = |weight| place.linear(hidden, weight, None, None).0;
        let logits = product(self.weight);
        match self.rows {
            Some(rows) => rows.put(logits, Some(product(&rows.weight))),
            None => logits,
        }
    }

    /// The logits of `hidden`, `[targets, vocab_size]`, in `f32`.
    #[must_use]
    pub fn logits(self, place: Place, hidden: &Tensor<2>) -> Tensor<2> {
        self.capped(self.uncapped(place, hidden).cast(DType::F32))
    }

    /// Logits with their cap.
    fn capped(self, logits: Tensor<2>) -> Tensor<2> {
        let dtype = logits.dtype();
        match self.soft_cap {
            None => logits,
            Some(cap) => ((logits.cast(DType::F32) / cap).tanh() * cap).cast(dtype),
        }
    }

    /// The gradient of logits before their cap, from that of `logits`, which have it.
    fn capped_backward(self, dlogits: Tensor<2>, logits: Tensor<2>) -> Tensor<2> {
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

/// Losses of tokens, and their gradients.
#[derive(Debug)]
pub struct LossAndGrad {
    /// Negative log-likelihood of each target, in nats, `f32`, `[targets]`.
    pub losses: Tensor<1>,
    /// Their gradients.
    pub grads: HeadGrads,
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

/// Cross-entropy of `softmax(hidden head^T)` at `targets`, and its gradient times `scale`.
///
/// # Shapes
/// `hidden`: `[targets, hidden_size]`, `targets`: as many ids as `hidden` has rows.
#[must_use]
pub fn linear_cross_entropy(
    place: Place,
    hidden: &Tensor<2>,
    head: Head<'_>,
    targets: &[u32],
    scale: f64,
    chunk: LossChunk,
) -> LossAndGrad {
    let [vocab_size, width] = head.weight.dims();
    let cost = || Cost {
        shape: format!("{width} -> {vocab_size}"),
        flops: profile::count((4 + 2 * usize::from(head.inputs.is_some())) * targets.len() * vocab_size * width),
        bytes: 2.0 * head.weight.values.num_bytes() + 2.0 * profile::bytes(hidden),
    };
    let size = chunk.tokens(place, head.weight.dims(), targets.len());
    let work = || {
        let (losses, grads) = place.linear_cross_entropy(hidden, head, targets, Some(scale), size);
        let none = || HeadGrads { dhidden: hidden.zeros_like(), drows: None, dweight: None };
        LossAndGrad { losses, grads: grads.unwrap_or_else(none) }
    };
    profile::measure("linear_cross_entropy", cost, work)
}

/// Cross-entropy of `softmax(hidden head^T)` at `targets`, without a gradient: `[targets]`, `f32`, in nats.
///
/// # Shapes
/// As for [`linear_cross_entropy`].
#[must_use]
pub fn linear_cross_entropy_loss(
    place: Place,
    hidden: &Tensor<2>,
    head: Head<'_>,
    targets: &[u32],
    chunk: LossChunk,
) -> Tensor<1> {
    let size = chunk.tokens(place, head.weight.dims(), targets.len());
    place.linear_cross_entropy(hidden, head, targets, None, size).0
}

/// [`linear_cross_entropy`] by the products and the cross-entropy of `place`, in chunks of `size` targets; without a scale,
/// without the gradient.
#[must_use]
pub(super) fn chunked_cross_entropy(
    place: &dyn Kernels,
    hidden: &Tensor<2>,
    head: Head<'_>,
    targets: &[u32],
    scale: Option<f64>,
    size: usize,
) -> (Tensor<1>, Option<HeadGrads>) {
    let mut dweight: Option<Tensor<2>> = None;
    let chunk = |(index, targets): (usize, &[u32])| {
        let part = |x: &Tensor<2>| x.clone().narrow(0, index * size, targets.len());
        let hidden = part(hidden);
        let logits = head.capped(head.uncapped(place, &hidden));
        let kept = head.soft_cap.map(|_| logits.clone());
        let (losses, dlogits) = place.cross_entropy(logits, targets, scale);
        let dhidden = dlogits.map(|dlogits| {
            let dlogits = match kept {
                Some(logits) => head.capped_backward(dlogits, logits),
                None => dlogits,
            };
            let input_grad = |dlogits: &Tensor<2>, weight| {
                let (dhidden, _) = place.linear_backward(dlogits, &hidden, weight, None, InputGrad::Fresh);
                dhidden.unwrap_or_else(|| hidden.zeros_like())
            };
            if let Some(inputs) = head.inputs {
                let in_f32 = |x: Tensor<2>| x.cast(DType::F32);
                let grad = matmul(&in_f32(dlogits.clone()).transpose(), &in_f32(part(inputs)), place.f32_products());
                dweight = Some(match dweight.take() {
                    Some(sum) => sum + grad,
                    None => grad,
                });
            }
            let Some(rows) = head.rows else { return (input_grad(&dlogits, head.weight), None) };
            let of_rows = rows.of(&dlogits);
            let of_others = input_grad(&rows.put(dlogits, None), head.weight);
            (of_others + input_grad(&of_rows, &rows.weight), Some(of_rows.cast(DType::F32)))
        });
        (losses, dhidden)
    };
    let (losses, grads): (Vec<_>, Vec<_>) = targets.chunks(size).enumerate().map(chunk).unzip();
    let (dhidden, drows): (Vec<_>, Vec<_>) = grads.into_iter().flatten().unzip();
    let drows: Vec<_> = drows.into_iter().flatten().collect();
    let drows = (!drows.is_empty()).then(|| Tensor::cat(drows, 0));
    (Tensor::cat(losses, 0), scale.map(|_| HeadGrads { dhidden: Tensor::cat(dhidden, 0), drows, dweight }))
}

/// Losses of logits `[targets, vocab_size]` at `targets`, and their gradients times `scale`, in plain tensor calls.
pub(super) fn plain_cross_entropy(
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
pub(super) fn target_ids(targets: &[u32], like: &Tensor<2>) -> Tensor<1, Int> {
    ids_on(targets, &like.device())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, activation};

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::host;
    use crate::ops::kernels::{self, place_of};

    const TARGETS: usize = 53;
    const VOCAB: usize = 37;
    const WIDTH: usize = 12;

    fn values(count: usize, factor: f32, device: &Device, rows: usize) -> Tensor<2> {
        let values = (0..count).map(|i| ((i * 7919 % 1013) as f32 / 506.5 - 1.0) * factor).collect();
        host::tensor(values, [rows, count / rows], device)
    }

    /// Tokens with rows of their own, some of which are targets.
    const OWN: [u32; 3] = [30, 5, 36];

    /// The losses, their gradient, and that of the head's own rows.
    fn run(device: &Device, chunk: LossChunk, soft_cap: Option<f64>, own: bool) -> [Vec<f32>; 3] {
        let hidden = values(TARGETS * WIDTH, 3.0, device, TARGETS);
        let head = Weight::new(values(VOCAB * WIDTH, 1.0, device, VOCAB));
        let targets: Vec<u32> = (0..53).map(|i| i * 5 % 37).collect();
        let place = place_of(device, DType::F32);
        let rows =
            HeadRows { ids: OWN.into(), weight: Weight::new(values(OWN.len() * WIDTH, -1.5, device, OWN.len())) };
        let head = Head { weight: &head, rows: own.then_some(&rows), inputs: None, soft_cap };
        let LossAndGrad { losses, grads: HeadGrads { dhidden, drows, .. } } =
            linear_cross_entropy(place, &hidden, head, &targets, 2.0, chunk);
        let without_gradient = linear_cross_entropy_loss(place, &hidden, head, &targets, chunk);
        let of_rows = drows.map(|drows| drows.transpose().matmul(hidden).into_data().try_to_vec().unwrap());
        let losses: Vec<f32> = losses.into_data().try_to_vec().unwrap();
        assert_eq!(without_gradient.into_data().try_to_vec::<f32>().unwrap(), losses);
        [losses, dhidden.into_data().try_to_vec().unwrap(), of_rows.unwrap_or_default()]
    }

    /// The whole logits under burn's autodiff.
    fn by_autodiff(soft_cap: Option<f64>, own: bool) -> [Vec<f32>; 3] {
        let device = Device::flex().autodiff();
        let hidden = values(TARGETS * WIDTH, 3.0, &device, TARGETS).require_grad();
        let rows = values(OWN.len() * WIDTH, -1.5, &device, OWN.len()).require_grad();
        let mut head = values(VOCAB * WIDTH, 1.0, &device, VOCAB);
        for (index, id) in OWN.into_iter().enumerate().filter(|_| own) {
            let id = id as usize;
            head = head.slice_assign([id..=id, 0..=WIDTH - 1], rows.clone().narrow(0, index, 1));
        }
        let targets: Vec<u32> = (0..53).map(|i| i * 5 % 37).collect();
        let logits = hidden.clone().matmul(head.transpose());
        let logits = if let Some(cap) = soft_cap { (logits / cap).tanh() * cap } else { logits };
        let log_probabilities = activation::log_softmax(logits, 1);
        let targets = target_ids(&targets, &log_probabilities).unsqueeze_dim(1);
        let losses = log_probabilities.gather(1, targets).neg().squeeze_dim::<1>(1);
        let grads = (losses.clone() * 2.0).sum().backward();
        let [dhidden, drows] = [hidden.grad(&grads), rows.grad(&grads)]
            .map(|grad| grad.map(|grad| grad.into_data().try_to_vec().unwrap()).unwrap_or_default());
        [losses.inner().into_data().try_to_vec().unwrap(), dhidden, drows]
    }

    #[test]
    fn the_gradient_of_a_whole_head_is_that_of_the_weighted_losses() {
        let weights = |device: &Device| values(TARGETS, 1.5, device, TARGETS);
        let targets: Vec<u32> = (0..53).map(|i| i * 5 % 37).collect();
        for soft_cap in [None, Some(3.0)] {
            let tracked = Device::flex().autodiff();
            let weight = values(VOCAB * WIDTH, 1.0, &tracked, VOCAB).require_grad();
            let hidden = values(TARGETS * WIDTH, 3.0, &tracked, TARGETS);
            let logits = hidden.matmul(weight.clone().transpose());
            let logits = if let Some(cap) = soft_cap { (logits / cap).tanh() * cap } else { logits };
            let log_probabilities = activation::log_softmax(logits, 1);
            let ids = target_ids(&targets, &log_probabilities).unsqueeze_dim(1);
            let grads = (log_probabilities.gather(1, ids) * weights(&tracked) * -2.0).sum().backward();
            let expected: Vec<f32> = weight.grad(&grads).unwrap().into_data().try_to_vec().unwrap();
            for device in [Device::flex(), Device::flex().autodiff()] {
                for chunk in [LossChunk::Tokens(1), LossChunk::Tokens(16), LossChunk::Auto] {
                    let hidden = values(TARGETS * WIDTH, 3.0, &device, TARGETS);
                    let inputs = hidden.clone() * weights(&device);
                    let weight = Weight::new(values(VOCAB * WIDTH, 1.0, &device, VOCAB));
                    let head = Head { weight: &weight, rows: None, inputs: Some(&inputs), soft_cap };
                    let place = place_of(&device, DType::F32);
                    let grad = linear_cross_entropy(place, &hidden, head, &targets, 2.0, chunk).grads.dweight.unwrap();
                    assert_close(&grad.into_data().try_to_vec::<f32>().unwrap(), &expected);
                }
            }
        }
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
        for (cap, own) in [(None, false), (Some(3.0), false), (None, true), (Some(3.0), true)] {
            let expected = by_autodiff(cap, own);
            for device in [Device::flex(), Device::flex().autodiff()] {
                for chunk in [LossChunk::Tokens(1), LossChunk::Tokens(16), LossChunk::Tokens(1000), LossChunk::Auto] {
                    let found = run(&device, chunk, cap, own);
                    found.iter().zip(&expected).for_each(|(found, expected)| assert_close(found, expected));
                }
            }
        }
    }

    #[test]
    fn chunks_are_of_one_size_and_cover_every_target() {
        let sizes = |place: Place, num_targets: usize, chunk: LossChunk| {
            let targets = vec![0; num_targets];
            let size = chunk.tokens(place, [VOCAB, WIDTH], num_targets);
            let chunks = targets.chunks(size).enumerate();
            chunks.map(|(index, targets)| (index * size, targets.len())).collect::<Vec<_>>()
        };
        let (cpu, plain) = (kernels::place_on(DeviceKind::Cpu), kernels::place_on(DeviceKind::Cuda));
        assert_eq!(sizes(cpu, 53, LossChunk::Tokens(16)), [(0, 14), (14, 14), (28, 14), (42, 11)]);
        assert!(sizes(cpu, 0, LossChunk::Tokens(0)).is_empty() && sizes(plain, 0, LossChunk::Auto).is_empty());
        // In plain tensor calls they are multiples of 64, unless fewer are asked for.
        assert_eq!(sizes(plain, 320, LossChunk::Tokens(200)), [(0, 192), (192, 128)]);
        assert_eq!(sizes(plain, 64, LossChunk::Tokens(30)), [(0, 22), (22, 22), (44, 20)]);
    }

    #[test]
    fn by_default_a_chunk_fills_96_mib_on_the_cpu_and_elsewhere_a_product() {
        // Llama 3's vocabulary; a tiny one and a huge one.
        let most = [128_256, 5, usize::MAX / 8]
            .map(|vocab_size| LossChunk::Auto.most_tokens(kernels::place_on(DeviceKind::Cpu), [vocab_size, 4096]));
        assert_eq!(most, [196, 4096, 16]);
        let most = |kind: DeviceKind| {
            [4096, 576, 100, 40].map(|width| LossChunk::Auto.most_tokens(kernels::place_on(kind), [128_256, width]))
        };
        assert_eq!(most(DeviceKind::Vulkan), [1024, 576, 64, 64]);
        assert_eq!(most(DeviceKind::Cuda), [512, 512, 64, 64]);
    }
}
