//! What the layers of a model keep of the tokens of a text, and how the next tokens see it.

use burn::tensor::{DType, Device, Tensor};

use super::Model;
use super::context::TokenMixing;
use crate::ops::attention::{Attended, attention};
use crate::ops::cached_attention::{KeyValueCache, append_each, attend_each};
use crate::ops::delta_rule::{DeltaInputs, Gates, delta_rule_from};
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::ops::short_conv::short_conv;
use crate::spec::{self, DeltaHeads, Heads};

/// What a layer keeps of the tokens of a text.
#[derive(Clone, Debug)]
pub(super) enum LayerCache {
    /// Of an attention.
    KeyValues(KeyValueCache),
    /// Of a linear attention.
    State(Box<DeltaState>),
    /// Nothing: its attention uses the keys and values of an earlier layer.
    OfEarlier,
}

/// What a linear attention keeps: as much, however long the text is.
#[derive(Clone, Debug)]
pub(super) struct DeltaState {
    /// The last inputs of the convolution, `[kernel_size - 1, qkv_width]`.
    inputs: Tensor<2>,
    /// `[num_value_heads, key_head_dim, value_head_dim]`, in `f32`.
    state: Tensor<3>,
}

impl DeltaState {
    fn new(net: &spec::DeltaNet, device: &Device, compute: DType) -> Self {
        let heads = net.heads;
        Self {
            inputs: Tensor::zeros([net.kernel_size - 1, heads.qkv_width()], (device, compute)),
            state: Tensor::zeros(
                [heads.num_value_heads, heads.key_head_dim, heads.value_head_dim],
                (device, DType::F32),
            ),
        }
    }

    /// Of no tokens.
    fn clear(&mut self) {
        self.inputs = self.inputs.zeros_like();
        self.state = self.state.zeros_like();
    }

    /// The outputs for the next tokens.
    fn next(
        &mut self,
        qkv: Tensor<2>,
        gates: &Gates<Tensor<2>>,
        conv: &Tensor<2>,
        heads: DeltaHeads,
        layouts: &TextLayouts,
    ) -> Tensor<2> {
        let ([num_tokens, _], [num_before, width]) = (qkv.dims(), self.inputs.dims());
        let convolved = if num_before == 0 {
            short_conv(&qkv, conv, &layouts.own)
        } else {
            let all = Tensor::cat(vec![self.inputs.clone(), qkv], 0);
            // A copy: a view would hold all tokens.
            let last = all.clone().narrow(0, num_tokens, num_before);
            self.inputs = self.inputs.zeros_like().slice_assign([0..num_before, 0..width], last);
            short_conv(&all, conv, &layouts.with_before).narrow(0, num_before, num_tokens)
        };
        // Taken out, so that nothing else holds it and it is changed in place.
        let state = std::mem::replace(&mut self.state, Tensor::zeros([0; 3], (&convolved.device(), DType::F32)));
        let inputs = DeltaInputs { qkv: &convolved, gates };
        let (o, state) = delta_rule_from(state, inputs, &layouts.own, heads);
        self.state = state;
        o
    }
}

impl LayerCache {
    /// Of no tokens, for every layer.
    pub(super) fn of_layers(model: &Model) -> Vec<Self> {
        let (place, device, compute) = (model.place(), model.device(), model.compute);
        let of_block = |block: &spec::Block| match (block.delta_net(), block.attention()) {
            (Some(net), _) => Self::State(Box::new(DeltaState::new(net, &device, compute))),
            (None, Some(attention)) if attention.key_value_layer().is_some() => Self::OfEarlier,
            (None, Some(attention)) => Self::KeyValues(KeyValueCache::new(place, attention.heads, &device, compute)),
            (None, None) => unreachable!("a block has an attention"),
        };
        model.config.blocks.iter().map(of_block).collect()
    }

    /// Whether it can only forget all tokens.
    pub(super) fn is_state(&self) -> bool {
        matches!(self, Self::State(_))
    }

    /// Forgets all tokens but the first `num_tokens`; a state forgets all.
    pub(super) fn truncate(&mut self, num_tokens: usize) {
        match self {
            Self::KeyValues(cache) => cache.truncate(num_tokens),
            Self::State(state) => state.clear(),
            Self::OfEarlier => {}
        }
    }
}

/// The new tokens of a text, as linear attention sees them.
#[derive(Debug)]
pub(super) struct TextLayouts {
    own: Layout,
    /// With the last inputs of the convolution before them.
    with_before: Layout,
}

impl TextLayouts {
    /// Of texts with so many new tokens each; none where the model has no linear attention.
    pub(super) fn of(model: &Model, lengths: &[usize]) -> Vec<Self> {
        let Some(net) = model.config.blocks.iter().find_map(spec::Block::delta_net) else { return Vec::new() };
        let layout = |place: Place, len: usize| {
            let positions = (0..len).map(|position| u32::try_from(position).unwrap_or(u32::MAX)).collect();
            Layout::new(place, 1, vec![(0, len)], positions, [].into())
        };
        let of_text = |len: &usize| Self {
            own: layout(model.place(), *len),
            with_before: layout(model.place(), len + net.kernel_size - 1),
        };
        lengths.iter().map(of_text).collect()
    }
}

/// Tokens see those of their text in its cache.
pub(super) struct InCaches<'a> {
    /// Of one layer, by text.
    pub(super) caches: Vec<&'a mut LayerCache>,
    /// New tokens by text.
    pub(super) lengths: &'a [usize],
    /// Of all new tokens.
    pub(super) layout: &'a Layout,
    /// By text.
    pub(super) layouts: &'a [TextLayouts],
    /// Whether there is one text, and the tokens are its first.
    pub(super) is_start: bool,
    /// Whether the caches are those of an earlier layer, which have the keys and values of the new tokens.
    pub(super) is_appended: bool,
}

impl TokenMixing for InCaches<'_> {
    fn attention(&mut self, [q, k, v]: [&Tensor<2>; 3], heads: Heads) -> Attended {
        let caches = self.caches.iter_mut().filter_map(|cache| match &mut **cache {
            LayerCache::KeyValues(cache) => Some(cache),
            LayerCache::State(_) | LayerCache::OfEarlier => None,
        });
        let mut caches: Vec<_> = caches.collect();
        if !self.is_appended {
            append_each(&mut caches, self.lengths, [k, v]);
        }
        if self.is_start {
            return attention(q, k, v, self.layout, heads);
        }
        attend_each(&caches, self.lengths, q)
    }

    fn delta_rule(
        &mut self,
        qkv: &Tensor<2>,
        gates: &Gates<Tensor<2>>,
        conv: &Tensor<2>,
        heads: DeltaHeads,
    ) -> Tensor<2> {
        let mut end = 0;
        let texts = self.caches.iter_mut().zip(self.lengths).zip(self.layouts);
        let outputs = texts.filter_map(|((cache, length), layouts)| {
            end += length;
            let LayerCache::State(state) = &mut **cache else { return None };
            let part = |x: &Tensor<2>| x.clone().narrow(0, end - length, *length);
            let gates = Gates { decay: part(&gates.decay), strength: part(&gates.strength) };
            Some(state.next(part(qkv), &gates, conv, heads, layouts))
        });
        Tensor::cat(outputs.collect(), 0)
    }
}
