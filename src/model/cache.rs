//! What the layers of a model keep of the tokens of a text, and how the next tokens see it.

use burn::tensor::{DType, Device, Tensor};

use super::Model;
use super::context::TokenMixing;
use crate::ops::attention::{Attended, AttentionInputs, attention};
use crate::ops::cached_attention::{KeyValueCache, append_each, attend_each};
use crate::ops::delta_rule::{DeltaInputs, Gates, delta_rule_from};
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::ops::short_conv::{gated_conv, short_conv};
use crate::spec::{self, DeltaHeads, Heads};

/// What a layer keeps of the tokens of a text.
#[derive(Clone, Debug)]
pub(super) enum LayerCache {
    /// Of an attention.
    KeyValues(KeyValueCache),
    /// Of a linear attention.
    State(Box<DeltaState>),
    /// Of a gated convolution: its last inputs, `[kernel_size - 1, 3 * hidden_size]`.
    Inputs(Tensor<2>),
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
        place: Place,
        qkv: Tensor<2>,
        gates: &Gates<Tensor<2>>,
        conv: &Tensor<2>,
        heads: DeltaHeads,
        layouts: &TextLayouts,
    ) -> Tensor<2> {
        let convolved = behind(&mut self.inputs, qkv, layouts, |qkv, layout| short_conv(place, qkv, conv, layout));
        // Taken out, so that nothing else holds it and it is changed in place.
        let state = std::mem::replace(&mut self.state, Tensor::zeros([0; 3], (&convolved.device(), DType::F32)));
        let inputs = DeltaInputs { qkv: &convolved, gates, layout: &layouts.own, heads };
        let (o, state) = delta_rule_from(place, state, inputs);
        self.state = state;
        o
    }
}

/// What `convolve` makes of the next tokens with the last inputs before them, which become those of the tokens.
fn behind(
    inputs: &mut Tensor<2>,
    next: Tensor<2>,
    layouts: &TextLayouts,
    convolve: impl Fn(&Tensor<2>, &Layout) -> Tensor<2>,
) -> Tensor<2> {
    let ([num_tokens, _], [num_before, width]) = (next.dims(), inputs.dims());
    if num_before == 0 {
        return convolve(&next, &layouts.own);
    }
    let all = Tensor::cat(vec![inputs.clone(), next], 0);
    // A copy: a view would hold all tokens.
    let last = all.clone().narrow(0, num_tokens, num_before);
    *inputs = inputs.zeros_like().slice_assign([0..num_before, 0..width], last);
    convolve(&all, &layouts.with_before).narrow(0, num_before, num_tokens)
}

impl LayerCache {
    /// Of no tokens, for every layer.
    pub(super) fn of_layers(model: &Model) -> Vec<Self> {
        let (place, device, compute) = (model.place(), model.device(), model.compute);
        let of_kind = |kind: &spec::SublayerKind| match kind {
            spec::SublayerKind::DeltaNet(net) => Some(Self::State(Box::new(DeltaState::new(net, &device, compute)))),
            spec::SublayerKind::ShortConv(conv) => {
                let shape = [conv.kernel_size - 1, 3 * model.config.hidden_size];
                Some(Self::Inputs(Tensor::zeros(shape, (&device, compute))))
            }
            spec::SublayerKind::Attention(attention) if attention.key_value_layer().is_some() => Some(Self::OfEarlier),
            spec::SublayerKind::Attention(attention) => {
                Some(Self::KeyValues(KeyValueCache::new(place, attention.heads, &device, compute)))
            }
            _ => None,
        };
        let of_block = |block: &spec::Block| {
            let found = block.sublayers.iter().find_map(|sublayer| of_kind(&sublayer.kind));
            found.unwrap_or_else(|| unreachable!("a block mixes tokens"))
        };
        model.config.blocks.iter().map(of_block).collect()
    }

    /// Whether it can only forget all tokens.
    pub(super) fn is_state(&self) -> bool {
        matches!(self, Self::State(_) | Self::Inputs(_))
    }

    /// Forgets all tokens but the first `num_tokens`; a state forgets all.
    pub(super) fn truncate(&mut self, num_tokens: usize) {
        match self {
            Self::KeyValues(cache) => cache.truncate(num_tokens),
            Self::State(state) => state.clear(),
            Self::Inputs(inputs) => *inputs = inputs.zeros_like(),
            Self::OfEarlier => {}
        }
    }
}

/// The new tokens of a text, as linear attention and convolutions see them.
#[derive(Debug)]
pub(super) struct TextLayouts {
    own: Layout,
    /// With the last inputs of the convolution before them.
    with_before: Layout,
}

impl TextLayouts {
    /// Of texts with so many new tokens each; none where the model has no convolutions.
    pub(super) fn of(model: &Model, lengths: &[usize]) -> Vec<Self> {
        let kernel_size = |block: &spec::Block| {
            let of_net = block.delta_net().map(|net| net.kernel_size);
            of_net.or_else(|| block.short_conv().map(|conv| conv.kernel_size))
        };
        let Some(kernel_size) = model.config.blocks.iter().find_map(kernel_size) else { return Vec::new() };
        let layout = |len: usize| {
            let positions = (0..len).map(|position| u32::try_from(position).unwrap_or(u32::MAX)).collect();
            Layout::new(1, vec![(0, len)], positions, [].into())
        };
        let of_text = |len: &usize| Self { own: layout(*len), with_before: layout(len + kernel_size - 1) };
        lengths.iter().map(of_text).collect()
    }
}

/// Tokens see those of their text in its cache.
pub(super) struct InCaches<'a> {
    /// Where the operations run.
    pub(super) place: Place,
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
    fn attention(&mut self, qkv @ [q, k, v]: [&Tensor<2>; 3], heads: Heads) -> Attended {
        let caches = self.caches.iter_mut().filter_map(|cache| match &mut **cache {
            LayerCache::KeyValues(cache) => Some(cache),
            LayerCache::State(_) | LayerCache::Inputs(_) | LayerCache::OfEarlier => None,
        });
        let mut caches: Vec<_> = caches.collect();
        if !self.is_appended {
            append_each(&mut caches, self.lengths, [k, v]);
        }
        if self.is_start {
            return attention(self.place, AttentionInputs { qkv, layout: self.layout, heads });
        }
        attend_each(&caches, self.lengths, q)
    }

    fn gated_conv(&mut self, bcx: &Tensor<2>, conv: &Tensor<2>) -> Tensor<2> {
        let (place, mut end) = (self.place, 0);
        let texts = self.caches.iter_mut().zip(self.lengths).zip(self.layouts);
        let outputs = texts.filter_map(|((cache, length), layouts)| {
            end += length;
            let LayerCache::Inputs(inputs) = &mut **cache else { return None };
            let next = bcx.clone().narrow(0, end - length, *length);
            Some(behind(inputs, next, layouts, |bcx, layout| gated_conv(place, bcx, conv, layout)))
        });
        Tensor::cat(outputs.collect(), 0)
    }

    fn delta_rule(
        &mut self,
        qkv: &Tensor<2>,
        gates: &Gates<Tensor<2>>,
        conv: &Tensor<2>,
        heads: DeltaHeads,
    ) -> Tensor<2> {
        let (place, mut end) = (self.place, 0);
        let texts = self.caches.iter_mut().zip(self.lengths).zip(self.layouts);
        let outputs = texts.filter_map(|((cache, length), layouts)| {
            end += length;
            let LayerCache::State(state) = &mut **cache else { return None };
            let part = |x: &Tensor<2>| x.clone().narrow(0, end - length, *length);
            let gates = Gates { decay: part(&gates.decay), strength: part(&gates.strength) };
            Some(state.next(place, part(qkv), &gates, conv, heads, layouts))
        });
        Tensor::cat(outputs.collect(), 0)
    }
}
