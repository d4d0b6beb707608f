//! One transformer block, forward and backward by hand: the order of its norms and residuals.
//!
//! The base is frozen, so the backward only needs the gradients of the block's input and of its adapters. The forward
//! keeps [`Activations`] for it; normed inputs and the feed-forward product are cheaper to recompute.

use burn::tensor::Tensor;

use super::attention::{self, Attention};
use super::context::{BlockContext, BlockGrads, InDocuments, TokenMixing};
use super::delta_net::{self, DeltaNet};
use super::gated;
use super::linears::Linears;
use super::mixture;
use crate::ops::linear::Weight;
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::spec::{self, PerSite};

/// Frozen weights of one block.
#[derive(Clone, Debug)]
pub struct Block {
    /// Linear layers by site, each `[out_features, in_features]`.
    pub linears: Vec<Weight>,
    /// Its sublayers, in order.
    pub sublayers: Vec<Sublayer>,
}

/// A sublayer and the norms around it, each `[hidden_size]`.
#[derive(Clone, Debug)]
pub struct Sublayer {
    /// Of its input.
    pub norm_before: Option<Tensor<1>>,
    /// Of its output, before that is added to the residual stream.
    pub norm_after: Option<Tensor<1>>,
    /// Factor of what is added to the residual stream.
    pub output_scale: Option<f64>,
    /// What it computes between them.
    pub kind: SublayerKind,
}

/// What a sublayer computes, `[tokens, hidden_size]` from as much.
#[derive(Clone, Debug)]
pub enum SublayerKind {
    /// Causal self-attention.
    Attention(Attention),
    /// Linear attention.
    DeltaNet(DeltaNet),
    /// A gated feed-forward layer.
    Gated(spec::Gated),
    /// A mixture of experts.
    Mixture(spec::Mixture),
}

/// The tensors that a block's forward keeps for its backward.
#[derive(Clone, Debug)]
pub struct Activations {
    sublayers: Vec<Kept>,
    /// What the adapters' backwards need, but for the block's last linear layer, whose is computed in the backward.
    of_adapters: PerSite<Tensor<2>>,
}

/// The tensors that a sublayer's forward keeps.
#[derive(Clone, Debug)]
struct Kept {
    /// The residual stream before it, `[tokens, hidden_size]`.
    x: Tensor<2>,
    /// Factor of each token in the norm of its input.
    rstd: Option<Tensor<1>>,
    inner: KeptInside,
    /// The input of the norm after it.
    after: Option<Tensor<2>>,
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a tensor is a handle of a few hundred bytes")]
enum KeptInside {
    Attention(attention::Kept),
    DeltaNet(delta_net::Kept),
    Gated(gated::Kept),
    Mixture(mixture::Kept),
}

impl Sublayer {
    /// The input of what it computes.
    fn normed(&self, x: &Tensor<2>, context: &BlockContext<'_>) -> (Tensor<2>, Option<Tensor<1>>) {
        let Some(weight) = &self.norm_before else { return (x.clone(), None) };
        let (normed, rstd) = rms_norm(context.place(), x, weight, context.eps);
        (normed, Some(rstd))
    }

    fn activations(&self, x: Tensor<2>, linears: &mut Linears<'_>, mixing: &mut dyn TokenMixing) -> Kept {
        let (normed, rstd) = self.normed(&x, linears.context);
        let inner = match &self.kind {
            SublayerKind::Attention(it) => KeptInside::Attention(it.activations(&normed, linears, mixing)),
            SublayerKind::DeltaNet(it) => KeptInside::DeltaNet(it.activations(&normed, linears, mixing)),
            SublayerKind::Gated(it) => KeptInside::Gated(it.activations(&normed, linears)),
            SublayerKind::Mixture(it) => KeptInside::Mixture(it.activations(&normed, linears)),
        };
        drop(normed);
        let mut kept = Kept { x, rstd, inner, after: None };
        kept.after = self.norm_after.as_ref().map(|_| self.inner_output(&kept, None, linears));
        kept
    }

    fn inner_output(&self, kept: &Kept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        match (&self.kind, &kept.inner) {
            (SublayerKind::Attention(it), KeptInside::Attention(kept)) => it.output(kept, residual, linears),
            (SublayerKind::DeltaNet(it), KeptInside::DeltaNet(kept)) => it.output(kept, residual, linears),
            (SublayerKind::Gated(it), KeptInside::Gated(kept)) => it.output(kept, residual, linears),
            (SublayerKind::Mixture(it), KeptInside::Mixture(kept)) => it.output(kept, residual, linears),
            _ => unreachable!("a sublayer keeps what is its own"),
        }
    }

    /// The residual stream after it.
    fn output(&self, kept: &Kept, linears: &mut Linears<'_>) -> Tensor<2> {
        match (&self.norm_after, &kept.after) {
            (Some(weight), Some(y)) => {
                kept.x.clone() + rms_norm(linears.context.place(), y, weight, linears.context.eps).0
            }
            _ => match self.output_scale {
                Some(scale) => kept.x.clone() + self.inner_output(kept, None, linears) * scale,
                None => self.inner_output(kept, Some(kept.x.clone()), linears),
            },
        }
    }

    /// The gradient of the residual stream before it, if `input_grad`, from that after it.
    fn backward(&self, dy: Tensor<2>, kept: Kept, linears: &mut Linears<'_>, input_grad: bool) -> Option<Tensor<2>> {
        let (place, Kept { x, rstd, inner, after }) = (linears.context.place(), kept);
        let context = linears.context;
        let before_norm = self.norm_after.as_ref().zip(after).map(|(weight, y)| {
            // Cheaper to compute again than to keep.
            let (_, rstd) = rms_norm(place, &y, weight, context.eps);
            rms_norm_backward(place, &dy, &y, weight, &rstd, y.zeros_like())
        });
        let before_norm = before_norm.or_else(|| Some(dy.clone() * self.output_scale?));
        let d_inner = before_norm.as_ref().unwrap_or(&dy);
        let again = || self.normed(&x, context).0;
        let dnormed = match (&self.kind, inner) {
            (SublayerKind::Attention(it), KeptInside::Attention(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            (SublayerKind::DeltaNet(it), KeptInside::DeltaNet(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            (SublayerKind::Gated(it), KeptInside::Gated(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            (SublayerKind::Mixture(it), KeptInside::Mixture(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            _ => unreachable!("a sublayer keeps what is its own"),
        }?;
        Some(match (&self.norm_before, rstd) {
            (Some(weight), Some(rstd)) => rms_norm_backward(place, &dnormed, &x, weight, &rstd, dy),
            _ => dy + dnormed,
        })
    }
}

impl Block {
    /// The tensors that the backward needs, up to the input of the block's last linear layer.
    ///
    /// # Shapes
    /// `x`: `[tokens, hidden_size]`.
    #[must_use]
    pub fn activations(&self, x: Tensor<2>, context: &BlockContext<'_>) -> Activations {
        self.activations_with(x, context, &mut InDocuments(context.layout))
    }

    /// [`activations`](Self::activations) with another way for tokens to see those before them, such as a cache.
    #[must_use]
    pub fn activations_with(
        &self,
        x: Tensor<2>,
        context: &BlockContext<'_>,
        mixing: &mut dyn TokenMixing,
    ) -> Activations {
        let mut linears = Linears::new(&self.linears, context, PerSite::new());
        let mut sublayers: Vec<Kept> = Vec::with_capacity(self.sublayers.len());
        let mut input = Some(x);
        for (index, sublayer) in self.sublayers.iter().enumerate() {
            let Some(x) = input.take() else { break };
            let kept = sublayer.activations(x, &mut linears, mixing);
            input = (index + 1 < self.sublayers.len()).then(|| sublayer.output(&kept, &mut linears));
            sublayers.push(kept);
        }
        Activations { sublayers, of_adapters: linears.kept }
    }

    /// The block's output from its activations, `[tokens, hidden_size]`.
    #[must_use]
    pub fn output(&self, activations: &Activations, context: &BlockContext<'_>) -> Tensor<2> {
        let last = self.sublayers.iter().zip(&activations.sublayers).next_back();
        let Some((sublayer, kept)) = last else { unreachable!("a block has sublayers") };
        sublayer.output(kept, &mut Linears::new(&self.linears, context, PerSite::new()))
    }

    /// The gradients of the adapters and, if `input_grad`, of the block's input.
    ///
    /// # Shapes
    /// `dy`: gradient of the block's output, `[tokens, hidden_size]`.
    #[must_use]
    pub fn backward(
        &self,
        dy: Tensor<2>,
        activations: Activations,
        context: &BlockContext<'_>,
        input_grad: bool,
    ) -> (Option<Tensor<2>>, BlockGrads) {
        let Activations { sublayers, of_adapters } = activations;
        let mut linears = Linears::new(&self.linears, context, of_adapters);
        let mut dx = Some(dy);
        for (index, (sublayer, kept)) in self.sublayers.iter().zip(sublayers).enumerate().rev() {
            dx = dx.and_then(|dy| sublayer.backward(dy, kept, &mut linears, input_grad || index > 0));
        }
        (dx, linears.grads)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::config::LoraConfig;
    use crate::device::has_bf16_products;
    use crate::lora::BlockAdapters;
    use crate::lora::Matrices;
    use crate::lora::start::normal;
    use crate::lora::{Adapter, AdapterSet};
    use crate::model::weights::fixture::windowed;
    use crate::ops::dropout::Dropout;
    use crate::ops::kernels::place_of;
    use crate::ops::layout::Layout;
    use crate::spec::ModelConfig;

    /// Grouped queries, heads narrower than the hidden size, an odd number of tokens. The block has every option of any
    /// family: biases everywhere, and head norms.
    fn config() -> ModelConfig {
        let mut config = ModelConfig::from_json(
            r#"{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 40,
            "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": true, "hidden_act": "silu"}"#,
        )
        .unwrap();
        config.blocks[0].sites.iter_mut().for_each(|site| site.has_bias = true);
        config
    }

    /// With norms before and after each sublayer, or only after it.
    fn normed_after(is_normed_before: bool) -> ModelConfig {
        let mut config = config();
        for sublayer in &mut config.blocks[0].sublayers {
            sublayer.norm_after = sublayer.norm_before;
            sublayer.norm_before = sublayer.norm_before.filter(|_| is_normed_before);
        }
        config
    }

    /// With a cap of scores and GELU.
    fn capped() -> ModelConfig {
        let mut config = config();
        for sublayer in &mut config.blocks[0].sublayers {
            match &mut sublayer.kind {
                spec::SublayerKind::Attention(attention) => attention.heads.soft_cap = Some(0.7),
                spec::SublayerKind::Gated(gated) => gated.activation = spec::Activation::GeluTanh,
                spec::SublayerKind::DeltaNet(_) | spec::SublayerKind::Mixture(_) => {}
            }
        }
        config
    }

    /// With norms of all heads together, and a factor of what is added to the residual stream.
    fn normed_as_whole() -> ModelConfig {
        let mut config = config();
        for sublayer in &mut config.blocks[0].sublayers {
            sublayer.output_scale = Some(0.4);
            if let spec::SublayerKind::Attention(attention) = &mut sublayer.kind {
                attention.query_key_norms = Some(spec::QueryKeyNorms::Whole);
            }
        }
        config
    }

    /// With a mixture of experts.
    fn with_experts(normalised: bool, shared: bool) -> ModelConfig {
        let kind = if shared { "qwen2_moe" } else { "qwen3_moe" };
        let text = format!(
            r#"{{"model_type": "{kind}", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 56,
                "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                "shared_expert_intermediate_size": 24, "norm_topk_prob": {normalised}}}"#
        );
        ModelConfig::from_json(&text).unwrap()
    }

    /// With sinks, biases everywhere, and experts with clamped gates.
    fn with_sinks() -> ModelConfig {
        ModelConfig::from_json(
            r#"{"model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 40, "intermediate_size": 20,
                "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": true, "sliding_window": 3,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}"#,
        )
        .unwrap()
    }

    /// A layer of Qwen3.5 of this type: value heads share key heads, and a part of each head turns.
    fn hybrid(layer_type: &str) -> ModelConfig {
        let json = r#"{"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 64, "hidden_size": 40,
            "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
            "linear_value_head_dim": 8, "layer_types": ["TYPE"]}"#;
        ModelConfig::from_json(&json.replace("TYPE", layer_type)).unwrap()
    }

    /// Normal numbers that depend only on the seed: all tests of a process share burn's generator.
    fn random<const D: usize>(shape: [usize; D], scale: f32, rng: &mut ChaCha8Rng, device: &Device) -> Tensor<D> {
        let values = (0..shape.iter().product()).map(|_| scale * normal(rng)).collect();
        crate::ops::host::tensor(values, shape, device)
    }

    fn fixture(
        config: &ModelConfig,
        use_dora: bool,
        device: &Device,
        rounds: bool,
    ) -> (Block, AdapterSet, Tensor<2>, Tensor<2>) {
        let rng = &mut ChaCha8Rng::seed_from_u64(5);
        let spec::Block { sites, sublayers } = &config.blocks[0];
        let mut linears = Vec::new();
        for site in sites {
            let bias = site.has_bias.then(|| random([site.shape[0]], 0.2, rng, device));
            linears.push(Weight { bias, rounds, ..Weight::new(random(site.shape, 0.2, rng, device)) });
        }
        let mut norm = |width| random([width], 0.3, rng, device) + 1.0;
        let sublayer = |spec: &spec::Sublayer| Sublayer {
            norm_before: spec.norm_before.map(|_| norm(40)),
            norm_after: spec.norm_after.map(|_| norm(40)),
            output_scale: spec.output_scale,
            kind: match &spec.kind {
                spec::SublayerKind::Attention(spec) => {
                    let head_norms = spec.norm_widths().map(|widths| widths.map(&mut norm));
                    let sinks = spec.has_sinks.then(|| norm(4) - 1.0);
                    SublayerKind::Attention(Attention { spec: spec.clone(), head_norms, sinks })
                }
                spec::SublayerKind::DeltaNet(spec) => {
                    let [channels, heads] = [spec.heads.qkv_width(), spec.heads.num_value_heads];
                    let conv = norm(spec.kernel_size * channels).reshape([spec.kernel_size, channels]);
                    let [a_log, dt_bias] = [0, 1].map(|_| norm(heads));
                    let norm = norm(spec.heads.value_head_dim);
                    SublayerKind::DeltaNet(DeltaNet { spec: spec.clone(), conv, a_log, dt_bias, norm })
                }
                spec::SublayerKind::Gated(spec) => SublayerKind::Gated(spec.clone()),
                spec::SublayerKind::Mixture(spec) => SublayerKind::Mixture(spec.clone()),
            },
        };
        let block = Block { linears, sublayers: sublayers.iter().map(sublayer).collect() };
        let selection = LoraConfig { r: 3, lora_alpha: 5.0, use_dora, ..LoraConfig::default() }.select(config).unwrap();
        let init = crate::config::InitLoraWeights::Kaiming;
        let mut adapters = AdapterSet::new(config, &selection, init, 0.0, 3, device);
        for adapter in adapters.iter_mut() {
            adapter.matrices.b = random(adapter.matrices.b.dims(), 0.2, rng, device);
            let magnitude = adapter.matrices.magnitude.take();
            adapter.matrices.magnitude = magnitude.map(|ones| random(ones.dims(), 0.3, rng, device) + ones);
        }
        (block, adapters, random([22, 40], 1.0, rng, device), random([22, 40], 1.0, rng, device))
    }

    /// Two rows of 11 tokens: the first holds two documents, the second holds one document and two tokens of padding.
    fn layout(config: &ModelConfig, device: &Device) -> Layout {
        let documents = vec![(0, 4), (4, 7), (11, 9)];
        let positions = [0..4, 0..7, 0..9, 0..2].into_iter().flatten().collect();
        let place = place_of(device, DType::F32);
        Layout::new(place, 2, documents, positions, config.rotary_tables(16, &[]))
    }

    fn values(tensor: &Tensor<2>) -> Vec<f32> {
        tensor.clone().inner_if_tracked().into_data().try_to_vec().unwrap()
    }

    trait InnerIfTracked {
        fn inner_if_tracked(self) -> Self;
    }
    impl InnerIfTracked for Tensor<2> {
        fn inner_if_tracked(self) -> Self {
            if self.is_autodiff() { self.inner() } else { self }
        }
    }

    fn relative_error(found: &Tensor<2>, expected: &Tensor<2>) -> f32 {
        let (found, expected) = (values(found), values(expected));
        let norm = expected.iter().map(|v| v * v).sum::<f32>().sqrt();
        let error = found.iter().zip(&expected).map(|(f, e)| (f - e) * (f - e)).sum::<f32>().sqrt();
        error / norm
    }

    /// Output, input gradient and adapter gradients from burn's autodiff of the plain forward.
    fn by_autodiff(config: &ModelConfig, use_dora: bool, dropout: Option<Dropout>) -> Vec<Tensor<2>> {
        let device = Device::flex().autodiff();
        let (block, adapters, x, dy) = fixture(config, use_dora, &device, false);
        let x = x.require_grad();
        let leaf = |(site, adapter): (usize, Adapter)| {
            (site, Adapter { matrices: adapter.matrices.map(Tensor::require_grad), ..adapter })
        };
        let tracked: BlockAdapters = adapters.blocks[0].clone().into_iter().map(leaf).collect();
        let layout = layout(config, &device);
        let context = BlockContext::new(config, &layout, &tracked, dropout);
        let y = block.output(&block.activations(x.clone(), &context), &context);
        // Padding carries no gradient in training.
        let grads = (y.clone() * masked(dy)).sum().backward();
        let mut all = vec![masked(y), x.grad(&grads).unwrap()];
        for adapter in tracked.values() {
            all.extend(adapter.matrices.as_ref().map(|matrix| matrix.grad(&grads).unwrap()).values());
        }
        all
    }

    /// Zeroes the two tokens of padding.
    fn masked(x: Tensor<2>) -> Tensor<2> {
        let zeros = x.clone().narrow(0, 0, 2).zeros_like();
        x.slice_assign([20..22, 0..40], zeros)
    }

    fn by_hand(
        config: &ModelConfig,
        use_dora: bool,
        device: &Device,
        rounds: bool,
        dropout: Option<Dropout>,
    ) -> Vec<Tensor<2>> {
        let (block, adapters, x, dy) = fixture(config, use_dora, device, rounds);
        let layout = layout(config, device);
        let context = BlockContext::new(config, &layout, &adapters.blocks[0], dropout);
        let activations = block.activations(x, &context);
        let y = block.output(&activations, &context);
        let (dx, grads) = block.backward(masked(dy), activations, &context, true);
        let mut all = vec![masked(y), dx.unwrap()];
        all.extend(grads.into_values().flat_map(Matrices::values));
        all
    }

    fn compare(device: &Device, config: &ModelConfig, dropout: Option<Dropout>) {
        for use_dora in [false, true] {
            let expected = by_autodiff(config, use_dora, dropout);
            let found = by_hand(config, use_dora, device, false, dropout);
            // Output, input, and the matrices of four layers at least.
            assert!(found.len() >= 10 && found.len() == expected.len());
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let error = relative_error(found, expected);
                assert!(error < 2e-5, "tensor {index}: error {error}");
            }
        }
    }

    fn compare_all(device: &Device) {
        compare(device, &config(), None);
        compare(device, &windowed(config(), Some(3)), None);
        compare(device, &config(), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
        compare(device, &normed_after(true), None);
        compare(device, &normed_after(false), None);
        compare(device, &capped(), None);
        compare(device, &normed_as_whole(), None);
        for (normalised, shared) in [(true, false), (false, false), (false, true), (true, true)] {
            compare(device, &with_experts(normalised, shared), None);
        }
        compare(device, &with_sinks(), None);
        compare(device, &with_experts(true, true), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
        compare(device, &hybrid("full_attention"), None);
        compare(device, &hybrid("linear_attention"), None);
        compare(device, &hybrid("linear_attention"), Some(Dropout { probability: 0.3, seed: 9, first_row: 0 }));
    }

    #[test]
    fn the_plain_backward_is_the_derivative_of_the_plain_forward() {
        compare_all(&Device::flex().autodiff());
    }

    #[test]
    fn the_kernels_backward_is_the_derivative_of_the_plain_forward() {
        compare_all(&Device::flex());
    }

    #[test]
    fn products_that_round_to_bf16_give_the_plain_products_of_rounded_operands() {
        let by_hand = |device: Device, rounds| by_hand(&config(), false, &device, rounds, None);
        let found = by_hand(Device::flex(), true);
        let plain = by_hand(Device::flex().autodiff(), true);
        let exact = by_hand(Device::flex(), false);
        for (index, found) in found.iter().enumerate() {
            // Where sums in another order straddle a tie, a number rounds in the other direction: one bit of 2^-9.
            let (error, rounding) = (relative_error(found, &plain[index]), relative_error(found, &exact[index]));
            if has_bf16_products() {
                assert!(error < 1e-3, "tensor {index}: {error} from the plain products");
                assert!((1e-4..2e-2).contains(&rounding), "tensor {index}: {rounding} from f32");
            } else {
                assert!(rounding == 0.0, "tensor {index}: {rounding} from f32 without products of pairs");
            }
        }
    }
}
