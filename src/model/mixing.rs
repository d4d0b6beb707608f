//! How tokens see those before them: in the documents of a micro-batch, or in what layers keep of the tokens of a text.

use burn::tensor::{DType, Tensor};

use super::Model;
use crate::ops::attention::{Attended, AttentionInputs, attention};
use crate::ops::cached_attention::{KeyValueCache, append_each, attend_each};
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::ops::short_conv::{Convolution, TextRows, convolve_next};
use crate::spec::Heads;

/// What a sublayer makes of the next tokens of texts from their states.
pub type Next<'a> = &'a dyn Fn(TextStates<'_>) -> Tensor<2>;

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
    inputs: Option<Tensor<2>>,
    /// Of all tokens, in `f32`; absent where it has only a convolution.
    memory: Option<Tensor<3>>,
}

impl RecurrentState {
    fn forget(&mut self) {
        self.inputs = self.inputs.take().map(|inputs| inputs.zeros_like());
        self.memory = self.memory.take().map(|memory| memory.zeros_like());
    }
}

/// States of texts, and their next tokens. What is changed is taken out, so that nothing else holds it and it is changed in place.
#[derive(Debug)]
pub struct TextStates<'a> {
    place: Place,
    states: Vec<&'a mut RecurrentState>,
    texts: &'a [TextRows],
}

impl TextStates<'_> {
    /// What a convolution makes of the tokens behind the last inputs.
    pub(super) fn convolved(&mut self, conv: Convolution<'_>, x: &Tensor<2>) -> Tensor<2> {
        let last = self.states.iter_mut().filter_map(|state| state.inputs.take()).collect();
        let (y, last) = convolve_next(self.place, conv, last, self.texts, x);
        self.states.iter_mut().zip(last).for_each(|(state, inputs)| state.inputs = Some(inputs));
        y
    }

    /// What is read of the memories, which `next` gives with those after the tokens.
    pub(super) fn read(
        mut self,
        next: impl FnOnce(Vec<Tensor<3>>, &[TextRows]) -> (Tensor<2>, Vec<Tensor<3>>),
    ) -> Tensor<2> {
        let memories = self.states.iter_mut().filter_map(|state| state.memory.take()).collect();
        let (y, memories) = next(memories, self.texts);
        self.states.iter_mut().zip(memories).for_each(|(state, memory)| state.memory = Some(memory));
        y
    }
}

impl LayerCache {
    /// A state of no tokens.
    pub(super) fn state(model: &Model, inputs: [usize; 2], memory: Option<[usize; 3]>) -> Self {
        let device = &model.device();
        let inputs = Some(Tensor::zeros(inputs, (device, model.compute)));
        let memory = memory.map(|memory| Tensor::zeros(memory, (device, DType::F32)));
        Self::State(Box::new(RecurrentState { inputs, memory }))
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

/// Texts with so many new tokens each, whose layers keep `caches`; none where these have no states.
pub(super) fn rows_of_texts(caches: &[LayerCache], lengths: &[usize]) -> Vec<TextRows> {
    let num_inputs = caches.iter().find_map(|cache| match cache {
        LayerCache::State(state) | LayerCache::Both(_, state) => Some(state.inputs.as_ref()?.dims()[0]),
        _ => None,
    });
    num_inputs.map(|num_inputs| TextRows::of(lengths, num_inputs)).unwrap_or_default()
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
    /// By text, where layers have states.
    pub(super) texts: &'a [TextRows],
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
        let states = self.caches.iter_mut().filter_map(|cache| cache.own_state()).collect();
        next(TextStates { place: self.place, states, texts: self.texts })
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
