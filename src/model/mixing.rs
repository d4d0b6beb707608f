//! How tokens see those before them: in the documents of a micro-batch, or in what layers keep of the tokens of a text.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::Model;
use crate::ops::attention::{Attended, AttentionInputs, attention};
use crate::ops::cached_attention::{KeyValueCache, append_each, attend_each};
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::spec::Heads;

/// What a sublayer makes of the next tokens of a text, in these rows, from its state.
pub type Next<'a> = &'a dyn Fn(Range<usize>, &mut RecurrentState, &TextLayouts) -> Tensor<2>;

/// A way in which they do.
pub type Mixing<'a> = &'a mut dyn TokenMixing;

/// How tokens see those before them.
pub trait TokenMixing {
    /// Attention of queries, keys (both after the rotary embedding) and values.
    fn attention(&mut self, qkv: [&Tensor<2>; 3], heads: Heads) -> Attended;

    /// Keeps latents of keys and values, where a text's are kept, and says whether [`attention_to_latents`](Self::attention_to_latents)
    /// must be asked, since there are earlier ones.
    fn keep_latents(&mut self, _: &dyn Fn() -> Tensor<2>) -> bool {
        false
    }

    /// Attention of queries of latents to those that are kept, in place of keys and values, with the heads of the cache.
    fn attention_to_latents(&mut self, _: &Tensor<2>) -> Attended {
        unreachable!("nothing is kept")
    }

    /// What a sublayer with a state makes of all tokens: `of_documents` begins with none, `next` goes on from that of each text.
    fn recurrent(&mut self, of_documents: &dyn Fn(&Layout) -> Tensor<2>, next: Next<'_>) -> Tensor<2>;
}

/// Tokens see those of their document in a micro-batch.
#[derive(Debug)]
pub struct InDocuments<'a> {
    /// Where the operations run.
    pub place: Place,
    /// Of the micro-batch.
    pub layout: &'a Layout,
    /// What the block's attention gives, from the first pass on, so that a second pass does not compute it again; absent where it is
    /// not to be remembered.
    pub memory: Option<Option<Attended>>,
}

impl TokenMixing for InDocuments<'_> {
    fn attention(&mut self, qkv: [&Tensor<2>; 3], heads: Heads) -> Attended {
        let attend = || attention(self.place, AttentionInputs { qkv, layout: self.layout, heads });
        match &mut self.memory {
            Some(memory) => memory.get_or_insert_with(attend).clone(),
            None => attend(),
        }
    }

    fn recurrent(&mut self, of_documents: &dyn Fn(&Layout) -> Tensor<2>, _: Next<'_>) -> Tensor<2> {
        of_documents(self.layout)
    }
}

/// What a layer keeps of the tokens of a text.
#[derive(Clone, Debug)]
pub(super) enum LayerCache {
    /// Of an attention.
    KeyValues(KeyValueCache),
    /// Of one whose keys and values come from latents: these, with what turns behind them, as the keys and the values of one head.
    Latents(KeyValueCache),
    /// As much, however long the text is.
    State(Box<RecurrentState>),
    /// Both, of an attention and what stands beside it.
    Both(KeyValueCache, Box<RecurrentState>),
    /// Nothing: its attention uses the keys and values of an earlier layer.
    Nothing,
}

/// What a sublayer without attention keeps.
#[derive(Clone, Debug)]
pub struct RecurrentState {
    /// The last inputs of its convolution, `[kernel_size - 1, channels]`.
    inputs: Tensor<2>,
    /// Of all tokens, in `f32`; empty where it has only a convolution.
    pub(super) memory: Tensor<3>,
}

impl RecurrentState {
    fn forget(&mut self) {
        self.inputs = self.inputs.zeros_like();
        self.memory = self.memory.zeros_like();
    }

    /// Taken out, so that nothing else holds it and it is changed in place.
    pub(super) fn take_memory(&mut self) -> Tensor<3> {
        let empty = Tensor::zeros([0; 3], (&self.memory.device(), DType::F32));
        std::mem::replace(&mut self.memory, empty)
    }

    /// What `convolve` makes of the next tokens with the last inputs before them, which become those of the tokens.
    pub(super) fn behind(
        &mut self,
        next: Tensor<2>,
        layouts: &TextLayouts,
        convolve: impl Fn(&Tensor<2>, &Layout) -> Tensor<2>,
    ) -> Tensor<2> {
        let ([num_tokens, _], [num_before, width]) = (next.dims(), self.inputs.dims());
        if num_before == 0 {
            return convolve(&next, &layouts.own);
        }
        let all = Tensor::cat(vec![self.inputs.clone(), next], 0);
        // A copy: a view would hold all tokens.
        let last = all.clone().narrow(0, num_tokens, num_before);
        self.inputs = self.inputs.zeros_like().slice_assign([0..num_before, 0..width], last);
        convolve(&all, &layouts.with_before).narrow(0, num_before, num_tokens)
    }
}

impl LayerCache {
    /// A state of no tokens.
    pub(super) fn state(model: &Model, inputs: [usize; 2], memory: [usize; 3]) -> Self {
        let (device, inputs) = (&model.device(), Tensor::zeros(inputs, (&model.device(), model.compute)));
        Self::State(Box::new(RecurrentState { inputs, memory: Tensor::zeros(memory, (device, DType::F32)) }))
    }

    /// Whether it can only forget all tokens.
    pub(super) fn is_state(&self) -> bool {
        matches!(self, Self::State(_) | Self::Both(..))
    }

    /// What layers of these sublayers' caches keep.
    pub(super) fn of_all(caches: impl Iterator<Item = Self>) -> Self {
        caches.fold(Self::Nothing, |all, cache| match (all, cache) {
            (Self::State(state), Self::KeyValues(cache)) | (Self::KeyValues(cache), Self::State(state)) => {
                Self::Both(cache, state)
            }
            (_, cache) => cache,
        })
    }

    fn key_values(&mut self) -> Option<&mut KeyValueCache> {
        match self {
            Self::KeyValues(cache) | Self::Both(cache, _) => Some(cache),
            Self::Latents(_) | Self::State(_) | Self::Nothing => None,
        }
    }

    fn own_state(&mut self) -> Option<&mut RecurrentState> {
        match self {
            Self::State(state) | Self::Both(_, state) => Some(state),
            Self::KeyValues(_) | Self::Latents(_) | Self::Nothing => None,
        }
    }

    /// Forgets all tokens but the first `num_tokens`; a state forgets all.
    pub(super) fn truncate(&mut self, num_tokens: usize) {
        match self {
            Self::KeyValues(cache) | Self::Latents(cache) => cache.truncate(num_tokens),
            Self::State(state) => state.forget(),
            Self::Both(cache, state) => {
                cache.truncate(num_tokens);
                state.forget();
            }
            Self::Nothing => {}
        }
    }
}

/// The new tokens of a text, as sublayers with a state see them.
#[derive(Debug)]
pub struct TextLayouts {
    pub(super) own: Layout,
    /// With the last inputs of the convolution before them.
    with_before: Layout,
}

impl TextLayouts {
    /// Of texts with so many new tokens each, whose layers keep `caches`; none where these have no states.
    pub(super) fn of(caches: &[LayerCache], lengths: &[usize]) -> Vec<Self> {
        let num_inputs = caches.iter().find_map(|cache| match cache {
            LayerCache::State(state) | LayerCache::Both(_, state) => Some(state.inputs.dims()[0]),
            _ => None,
        });
        let Some(num_inputs) = num_inputs else { return Vec::new() };
        let layout = |len: usize| {
            let positions = (0..len).map(|position| u32::try_from(position).unwrap_or(u32::MAX)).collect();
            Layout::new(1, vec![(0, len)], positions, [].into())
        };
        lengths.iter().map(|len| Self { own: layout(*len), with_before: layout(len + num_inputs) }).collect()
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
        let mut caches: Vec<_> = self.caches.iter_mut().filter_map(|cache| cache.key_values()).collect();
        if !self.is_appended && !caches.is_empty() {
            append_each(self.place, &mut caches, self.lengths, [k, v]);
        }
        if self.is_start {
            return attention(self.place, AttentionInputs { qkv, layout: self.layout, heads });
        }
        attend_each(self.place, &caches, self.lengths, q)
    }

    fn keep_latents(&mut self, latents: &dyn Fn() -> Tensor<2>) -> bool {
        let (place, lengths, latents) = (self.place, self.lengths, latents());
        append_each(place, &mut self.latents(), lengths, [&latents; 2]);
        !self.is_start
    }

    fn attention_to_latents(&mut self, q: &Tensor<2>) -> Attended {
        let (place, lengths) = (self.place, self.lengths);
        attend_each(place, &self.latents(), lengths, q)
    }

    fn recurrent(&mut self, _: &dyn Fn(&Layout) -> Tensor<2>, next: Next<'_>) -> Tensor<2> {
        let mut end = 0;
        let texts = self.caches.iter_mut().zip(self.lengths).zip(self.layouts);
        let outputs = texts.filter_map(|((cache, length), layouts)| {
            end += length;
            Some(next(end - length..end, cache.own_state()?, layouts))
        });
        Tensor::cat(outputs.collect(), 0)
    }
}

impl InCaches<'_> {
    fn latents(&mut self) -> Vec<&mut KeyValueCache> {
        let caches = self.caches.iter_mut().filter_map(|cache| match &mut **cache {
            LayerCache::Latents(cache) => Some(cache),
            _ => None,
        });
        caches.collect()
    }
}
