//! The language-model head and its cross-entropy, in chunks of tokens: the logits of a whole micro-batch never exist.

use burn::tensor::{DType, Tensor};

use super::kernels::Place;
use super::kernels::losses::uncapped;
use super::plain::cross_entropy::{LossInputs, whole_multiples};
use super::profile::{self, Cost};

pub use super::plain::cross_entropy::{Head, HeadGrads, PLAIN_MULTIPLE};

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

impl Head<'_> {
    /// The logits of `hidden`, `[targets, vocab_size]`, in `f32`.
    #[must_use]
    pub fn logits(self, place: Place, hidden: &Tensor<2>) -> Tensor<2> {
        self.capped(uncapped(place, self, hidden).cast(DType::F32))
    }
}

/// Cross-entropy of `softmax(hidden head^T)` at `targets`, and its gradient times `scale`: the negative log-likelihood of each
/// target in nats, `[targets]` in `f32`, and [`HeadGrads`].
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
) -> (Tensor<1>, HeadGrads) {
    let [vocab_size, width] = head.weight.dims();
    let cost = || Cost {
        shape: format!("{width} -> {vocab_size}"),
        flops: profile::count((4 + 2 * usize::from(head.inputs.is_some())) * targets.len() * vocab_size * width),
        bytes: 2.0 * head.weight.values.num_bytes() + 2.0 * profile::bytes(hidden),
    };
    let chunk_len = chunk.tokens(place, head.weight.dims(), targets.len());
    let work = || {
        let inputs = LossInputs { hidden, head, targets, scale: Some(scale), chunk_len };
        let (losses, grads) = place.linear_cross_entropy(inputs);
        let none = || HeadGrads { dhidden: hidden.zeros_like(), drows: None, dweight: None };
        (losses, grads.unwrap_or_else(none))
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
    let chunk_len = chunk.tokens(place, head.weight.dims(), targets.len());
    place.linear_cross_entropy(LossInputs { hidden, head, targets, scale: None, chunk_len }).0
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, activation};

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::host;
    use crate::ops::linear::Weight;
    use crate::ops::place::{place_of, place_on};
    use crate::ops::plain::cross_entropy::target_ids;
    use crate::ops::token_rows::HeadRows;

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
        let (losses, HeadGrads { dhidden, drows, .. }) =
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
    fn a_bias_is_what_a_last_input_of_1_would_make() {
        let targets: Vec<u32> = (0..53).map(|i| i * 5 % 37).collect();
        for device in [Device::flex(), Device::flex().autodiff()] {
            let place = place_of(&device, DType::F32);
            let wide = values(VOCAB * (WIDTH + 1), 1.0, &device, VOCAB);
            let bias = wide.clone().narrow(1, WIDTH, 1).squeeze_dim(1);
            let weight = Weight { bias: Some(bias), ..Weight::new(wide.clone().narrow(1, 0, WIDTH)) };
            let hidden = values(TARGETS * WIDTH, 3.0, &device, TARGETS);
            let with_one = Tensor::cat(vec![hidden.clone(), Tensor::ones([TARGETS, 1], &device)], 1);
            let run = |hidden: &Tensor<2>, weight: &Weight, soft_cap| {
                let head = Head { weight, rows: None, inputs: None, soft_cap };
                let (losses, grads) = linear_cross_entropy(place, hidden, head, &targets, 2.0, LossChunk::Tokens(16));
                let alone = linear_cross_entropy_loss(place, hidden, head, &targets, LossChunk::Tokens(16));
                let dhidden = grads.dhidden.narrow(1, 0, WIDTH);
                [losses.unsqueeze(), alone.unsqueeze(), dhidden, head.logits(place, hidden)]
                    .map(|tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap())
            };
            for cap in [None, Some(3.0)] {
                let expected = run(&with_one, &Weight::new(wide.clone()), cap);
                run(&hidden, &weight, cap).iter().zip(&expected).for_each(|(found, is)| assert_close(found, is));
            }
        }
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
                    let grad = linear_cross_entropy(place, &hidden, head, &targets, 2.0, chunk).1.dweight.unwrap();
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
        let (cpu, plain) = (place_on(DeviceKind::Cpu), place_on(DeviceKind::Cuda));
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
            .map(|vocab_size| LossChunk::Auto.most_tokens(place_on(DeviceKind::Cpu), [vocab_size, 4096]));
        assert_eq!(most, [196, 4096, 16]);
        let most = |kind: DeviceKind| {
            [4096, 576, 100, 40].map(|width| LossChunk::Auto.most_tokens(place_on(kind), [128_256, width]))
        };
        assert_eq!(most(DeviceKind::Vulkan), [1024, 576, 64, 64]);
        assert_eq!(most(DeviceKind::Cuda), [512, 512, 64, 64]);
    }
}
