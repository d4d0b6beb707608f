//! One transformer block, forward and backward by hand.
//!
//! The base is frozen, so the backward only needs the gradients of the block's input and of its adapters. The forward
//! keeps [`Activations`] for it; normed inputs and the feed-forward product are cheaper to recompute.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::lora::{Adapter, BlockAdapters};
use crate::ops::attention::{Attended, Heads, attention, attention_backward};
use crate::ops::dropout::{Dropout, mix};
use crate::ops::layout::Layout;
use crate::ops::linear::{InputGrad, Weight, add_low_rank, linear, linear_backward, low_rank_input};
use crate::ops::low_rank::{Lora, LowRank};
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::place::Place;
use crate::ops::rotary::rotate;
use crate::ops::swiglu::{swiglu, swiglu_backward};
use crate::spec::{Linear, ModelConfig};

/// Frozen weights of one block.
#[derive(Clone, Debug)]
pub struct Block {
    /// Weight of the norm before attention, `[hidden_size]`.
    pub input_layernorm: Tensor<1>,
    /// Weight of the norm before the feed-forward layer, `[hidden_size]`.
    pub post_attention_layernorm: Tensor<1>,
    /// Weights of the norms of every query and key head, each `[head_dim]`, where the family has them.
    pub qk_norms: Option<[Tensor<1>; 2]>,
    /// Linear layers in the order of [`Linear::ALL`], each `[out_features, in_features]`.
    pub linears: [Weight; 7],
}

/// The inputs of a block besides its weights and activations.
#[derive(Clone, Copy, Debug)]
pub struct BlockContext<'a> {
    /// Positions of the sequences.
    pub layout: &'a Layout,
    /// Heads of the attention.
    pub heads: Heads,
    /// Added to the mean square in the norms.
    pub eps: f64,
    /// Adapters of this block.
    pub adapters: &'a BlockAdapters,
    /// Dropout on the inputs of the adapters, with the seed of this block's masks; absent in evaluation.
    pub dropout: Option<Dropout>,
    /// Where texts of several adapters are written together: the adapters by rows of tokens, instead of `adapters`.
    pub by_rows: &'a [(Range<usize>, &'a BlockAdapters)],
}

impl<'a> BlockContext<'a> {
    /// The context of block `layer` of a model of this configuration.
    #[must_use]
    pub fn new(
        config: &ModelConfig,
        layer: usize,
        layout: &'a Layout,
        adapters: &'a BlockAdapters,
        dropout: Option<Dropout>,
    ) -> Self {
        Self { layout, heads: config.heads(layer), eps: config.rms_norm_eps, adapters, dropout, by_rows: &[] }
    }

    fn place(&self) -> Place {
        self.layout.place()
    }

    /// A linear layer with the adapters of its tokens.
    fn linear(
        &self,
        x: &Tensor<2>,
        weight: &Weight,
        layer: Linear,
        residual: Option<Tensor<2>>,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        let (y, low) = linear(self.place(), x, weight, self.lora(layer), residual);
        let add = |y, (rows, adapters): &(Range<usize>, &BlockAdapters)| match &adapters[layer as usize] {
            Some(Adapter { matrices, scale }) => {
                let lora = Lora { matrices: matrices.as_ref(), scale: *scale, dropout: None };
                add_low_rank(self.place(), y, x, weight, lora, rows.clone())
            }
            None => y,
        };
        (self.by_rows.iter().fold(y, add), low)
    }

    fn lora(&self, linear: Linear) -> Option<Lora<&'a Tensor<2>>> {
        let adapter = self.adapters[linear as usize].as_ref()?;
        let dropout = self.dropout.map(|dropout| Dropout { seed: mix(dropout.seed ^ linear as u64), ..dropout });
        Some(Lora { matrices: adapter.matrices.as_ref(), scale: adapter.scale, dropout })
    }
}

/// The tensors that a block's forward keeps for its backward.
#[derive(Clone, Debug)]
pub struct Activations {
    /// Input of the block, `[tokens, hidden_size]`.
    x: Tensor<2>,
    input_rstd: Tensor<1>,
    /// After the rotary embedding, `[tokens, num_heads * head_dim]`.
    q: Tensor<2>,
    /// After the rotary embedding, `[tokens, num_key_value_heads * head_dim]`.
    k: Tensor<2>,
    v: Tensor<2>,
    /// Queries and keys before their norms, where the family has them.
    before_qk_norms: [Option<HeadNormInput>; 2],
    attended: Attended,
    /// Input plus attention, `[tokens, hidden_size]`.
    middle: Tensor<2>,
    middle_rstd: Tensor<1>,
    /// `[tokens, intermediate_size]`.
    gate: Tensor<2>,
    up: Tensor<2>,
    /// `drop(x) A^T` by projection, `[tokens, r]`; the down projection's is computed in the backward.
    xa: [Option<Tensor<2>>; 7],
}

/// What the backward of a head norm needs: its input, `[tokens * heads, head_dim]`, and the factor of each head.
type HeadNormInput = (Tensor<2>, Tensor<1>);

/// Gradients of a block's adapters, in the order of [`Linear::ALL`].
pub type BlockGrads = [Option<LowRank<Tensor<2>>>; 7];

impl Block {
    fn weight(&self, linear: Linear) -> &Weight {
        &self.linears[linear as usize]
    }

    /// Norms every head of queries (`which` = 0) or keys (1), if the model family has such norms.
    fn norm_heads(&self, which: usize, x: Tensor<2>, context: &BlockContext<'_>) -> (Tensor<2>, Option<HeadNormInput>) {
        let Some(norms) = &self.qk_norms else { return (x, None) };
        let ([tokens, width], [head_dim]) = (x.dims(), norms[which].dims());
        let x = x.reshape([tokens * width / head_dim, head_dim]);
        let (y, rstd) = rms_norm(context.place(), &x, &norms[which], context.eps);
        (y.reshape([tokens, width]), Some((x, rstd)))
    }

    /// The gradient of [`norm_heads`](Self::norm_heads) with respect to its input.
    fn norm_heads_backward(
        &self,
        place: Place,
        which: usize,
        dy: Tensor<2>,
        input: Option<HeadNormInput>,
    ) -> Tensor<2> {
        let (Some(norms), Some((x, rstd))) = (&self.qk_norms, input) else { return dy };
        let shape = dy.dims();
        let dy = dy.reshape(x.dims());
        rms_norm_backward(place, &dy, &x, &norms[which], &rstd, dy.zeros_like()).reshape(shape)
    }

    /// The tensors that the backward needs, up to the input of the down projection.
    ///
    /// # Shapes
    /// `x`: `[tokens, hidden_size]`.
    #[must_use]
    pub fn activations(&self, x: Tensor<2>, context: &BlockContext<'_>) -> Activations {
        self.activations_with(x, context, |q, k, v| attention(q, k, v, context.layout, context.heads))
    }

    /// [`activations`](Self::activations) with the caller's own attention function of queries, keys (both after the
    /// rotary embedding) and values. A cache can so store keys and values, and prepend earlier ones.
    #[must_use]
    pub fn activations_with(
        &self,
        x: Tensor<2>,
        context: &BlockContext<'_>,
        attend: impl FnOnce(&Tensor<2>, &Tensor<2>, &Tensor<2>) -> Attended,
    ) -> Activations {
        use Linear::{Gate, Key, Output, Query, Up, Value};
        let place = context.place();
        let mut xa = [const { None }; 7];
        let mut apply = |input: &Tensor<2>, layer: Linear, residual: Option<Tensor<2>>| {
            let (y, low) = context.linear(input, self.weight(layer), layer, residual);
            xa[layer as usize] = low;
            y
        };
        let Heads { num_heads, num_kv_heads, .. } = context.heads;
        let (normed, input_rstd) = rms_norm(place, &x, &self.input_layernorm, context.eps);
        let (q, q_input) = self.norm_heads(0, apply(&normed, Query, None), context);
        let (k, k_input) = self.norm_heads(1, apply(&normed, Key, None), context);
        let q = rotate(q, context.layout, num_heads, false);
        let k = rotate(k, context.layout, num_kv_heads, false);
        let v = apply(&normed, Value, None);
        let attended = attend(&q, &k, &v);
        let middle = apply(&attended.o, Output, Some(x.clone()));
        let (normed, middle_rstd) = rms_norm(place, &middle, &self.post_attention_layernorm, context.eps);
        let gate = apply(&normed, Gate, None);
        let up = apply(&normed, Up, None);
        let before_qk_norms = [q_input, k_input];
        Activations { x, input_rstd, q, k, v, before_qk_norms, attended, middle, middle_rstd, gate, up, xa }
    }

    /// The block's output from its activations, `[tokens, hidden_size]`.
    #[must_use]
    pub fn output(&self, activations: &Activations, context: &BlockContext<'_>) -> Tensor<2> {
        let h = swiglu(context.place(), &activations.gate, &activations.up);
        context.linear(&h, self.weight(Linear::Down), Linear::Down, Some(activations.middle.clone())).0
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
        use Linear::{Down, Gate, Key, Output, Query, Up, Value};
        let Activations { x, input_rstd, q, k, v, before_qk_norms, attended, middle, middle_rstd, gate, up, xa } =
            activations;
        let place = context.place();
        let mut grads: BlockGrads = [const { None }; 7];
        let mut apply = |dy: &Tensor<2>, input: &Tensor<2>, layer: Linear, input_grad: InputGrad| {
            let lora = context.lora(layer).map(|lora| {
                let kept = xa[layer as usize].clone();
                (lora, kept.unwrap_or_else(|| low_rank_input(place, input, lora)))
            });
            let lora = lora.as_ref().map(|(lora, xa)| (*lora, xa));
            let (dx, grad) = linear_backward(place, dy, input, self.weight(layer), lora, input_grad);
            grads[layer as usize] = grad;
            dx
        };
        let sum = |dx: Option<Tensor<2>>| dx.map_or(InputGrad::Fresh, InputGrad::AddTo);

        // Feed-forward layer.
        let h = swiglu(place, &gate, &up);
        let dh = apply(&dy, &h, Down, InputGrad::Fresh);
        drop(h);
        let dh = dh.unwrap_or_else(|| gate.zeros_like());
        let (dgate, dup) = swiglu_backward(place, &dh, &gate, &up);
        drop((dh, gate, up));
        let (normed, _) = rms_norm(place, &middle, &self.post_attention_layernorm, context.eps);
        let dnormed = apply(&dgate, &normed, Gate, InputGrad::Fresh);
        drop(dgate);
        let dnormed = apply(&dup, &normed, Up, sum(dnormed)).unwrap_or_else(|| normed.zeros_like());
        drop((dup, normed));
        let dmiddle = rms_norm_backward(place, &dnormed, &middle, &self.post_attention_layernorm, &middle_rstd, dy);
        drop((dnormed, middle));

        // Attention.
        let d_o = apply(&dmiddle, &attended.o, Output, InputGrad::Fresh).unwrap_or_else(|| q.zeros_like());
        let [dq, dk, dv] = attention_backward(&d_o, [&q, &k, &v], &attended, context.layout, context.heads);
        drop((d_o, attended, q, k, v));
        let Heads { num_heads, num_kv_heads, .. } = context.heads;
        let dq = rotate(dq, context.layout, num_heads, true);
        let dk = rotate(dk, context.layout, num_kv_heads, true);
        let [q_input, k_input] = before_qk_norms;
        let dq = self.norm_heads_backward(place, 0, dq, q_input);
        let dk = self.norm_heads_backward(place, 1, dk, k_input);
        let (normed, _) = rms_norm(place, &x, &self.input_layernorm, context.eps);
        let first = if input_grad { InputGrad::Fresh } else { InputGrad::Skip };
        let add = |dx: Option<Tensor<2>>| if input_grad { sum(dx) } else { InputGrad::Skip };
        let dnormed = apply(&dq, &normed, Query, first);
        let dnormed = apply(&dk, &normed, Key, add(dnormed));
        let dnormed = apply(&dv, &normed, Value, add(dnormed));
        let dx =
            dnormed.map(|dnormed| rms_norm_backward(place, &dnormed, &x, &self.input_layernorm, &input_rstd, dmiddle));
        (dx, grads)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::config::LoraConfig;
    use crate::lora::adapters::normal;
    use crate::lora::{Adapter, AdapterSet};
    use crate::spec::ModelConfig;

    /// Grouped queries, heads narrower than the hidden size, an odd number of tokens. The block has every option of any
    /// family: biases everywhere, and head norms.
    fn config() -> ModelConfig {
        ModelConfig::from_json(
            r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 40,
            "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": true, "hidden_act": "silu"}"#,
        )
        .unwrap()
    }

    /// Normal numbers that depend only on the seed: all tests of a process share burn's generator.
    fn random<const D: usize>(shape: [usize; D], scale: f32, rng: &mut ChaCha8Rng, device: &Device) -> Tensor<D> {
        let values = (0..shape.iter().product()).map(|_| scale * normal(rng)).collect();
        crate::ops::host::tensor(values, shape, device)
    }

    fn fixture(device: &Device, rounds: bool) -> (Block, AdapterSet, Tensor<2>, Tensor<2>) {
        let rng = &mut ChaCha8Rng::seed_from_u64(5);
        let config = config();
        let block = Block {
            input_layernorm: random([40], 0.3, rng, device) + 1.0,
            post_attention_layernorm: random([40], 0.3, rng, device) + 1.0,
            qk_norms: None,
            linears: Linear::ALL
                .map(|linear| Weight { rounds, ..Weight::new(random(config.linear(linear), 0.2, rng, device)) }),
        };
        let selection = LoraConfig { r: 3, lora_alpha: 5.0, ..LoraConfig::default() }.select(1).unwrap();
        let init = crate::config::InitLoraWeights::Kaiming;
        let mut adapters = AdapterSet::new(&config, &selection, init, 0.0, 3, device);
        for adapter in adapters.iter_mut() {
            adapter.matrices.b = random(adapter.matrices.b.dims(), 0.2, rng, device);
        }
        (block, adapters, random([22, 40], 1.0, rng, device), random([22, 40], 1.0, rng, device))
    }

    /// Two rows of 11 tokens: the first holds two documents, the second holds one document and two tokens of padding.
    fn layout(device: &Device) -> Layout {
        let documents = vec![(0, 4), (4, 7), (11, 9)];
        let positions = [0..4, 0..7, 0..9, 0..2].into_iter().flatten().collect();
        let place = Place::of(device, DType::F32);
        Layout::new(place, 2, documents, positions, config().rotary_table(16), device)
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
    fn by_autodiff(window: Option<usize>, dropout: Option<Dropout>) -> Vec<Tensor<2>> {
        let device = Device::flex().autodiff();
        let (block, adapters, x, dy) = fixture(&device, false);
        let x = x.require_grad();
        let leaf = |adapter: &Adapter| Adapter {
            matrices: adapter.matrices.clone().map(Tensor::require_grad),
            scale: adapter.scale,
        };
        let tracked: BlockAdapters = std::array::from_fn(|i| adapters.blocks[0][i].as_ref().map(leaf));
        let (layout, mut config) = (layout(&device), config());
        config.windows = vec![window];
        let context = BlockContext::new(&config, 0, &layout, &tracked, dropout);
        let y = block.output(&block.activations(x.clone(), &context), &context);
        // Padding carries no gradient in training.
        let grads = (y.clone() * masked(dy)).sum().backward();
        let mut all = vec![masked(y), x.grad(&grads).unwrap()];
        for adapter in tracked.iter().flatten() {
            all.extend(adapter.matrices.as_ref().map(|matrix| matrix.grad(&grads).unwrap()).into_array());
        }
        all
    }

    /// Zeroes the two tokens of padding.
    fn masked(x: Tensor<2>) -> Tensor<2> {
        let zeros = x.clone().narrow(0, 0, 2).zeros_like();
        x.slice_assign([20..22, 0..40], zeros)
    }

    fn by_hand(device: &Device, rounds: bool, window: Option<usize>, dropout: Option<Dropout>) -> Vec<Tensor<2>> {
        let (block, adapters, x, dy) = fixture(device, rounds);
        let (layout, mut config) = (layout(device), config());
        config.windows = vec![window];
        let context = BlockContext::new(&config, 0, &layout, &adapters.blocks[0], dropout);
        let activations = block.activations(x, &context);
        let y = block.output(&activations, &context);
        let (dx, grads) = block.backward(masked(dy), activations, &context, true);
        let mut all = vec![masked(y), dx.unwrap()];
        all.extend(grads.into_iter().flatten().flat_map(LowRank::into_array));
        all
    }

    fn compare(device: &Device, window: Option<usize>, dropout: Option<Dropout>) {
        let (expected, found) = (by_autodiff(window, dropout), by_hand(device, false, window, dropout));
        assert_eq!(found.len(), 16);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = relative_error(found, expected);
            assert!(error < 2e-5, "tensor {index}: error {error}");
        }
    }

    #[test]
    fn the_plain_backward_is_the_derivative_of_the_plain_forward() {
        compare(&Device::flex().autodiff(), None, None);
        compare(&Device::flex().autodiff(), Some(3), None);
        compare(&Device::flex().autodiff(), None, Some(Dropout { probability: 0.3, seed: 9 }));
    }

    #[test]
    fn the_kernels_backward_is_the_derivative_of_the_plain_forward() {
        compare(&Device::flex(), None, None);
        compare(&Device::flex(), Some(3), None);
        compare(&Device::flex(), None, Some(Dropout { probability: 0.3, seed: 9 }));
    }

    #[test]
    fn products_that_round_to_bf16_give_the_plain_products_of_rounded_operands() {
        let found = by_hand(&Device::flex(), true, None, None);
        let plain = by_hand(&Device::flex().autodiff(), true, None, None);
        let exact = by_hand(&Device::flex(), false, None, None);
        for (index, found) in found.iter().enumerate() {
            // Where sums in another order straddle a tie, a number rounds in the other direction: one bit of 2^-9.
            let (error, rounding) = (relative_error(found, &plain[index]), relative_error(found, &exact[index]));
            assert!(error < 1e-3, "tensor {index}: {error} from the plain products");
            assert!((1e-4..2e-2).contains(&rounding), "tensor {index}: {rounding} from f32");
        }
    }
}
