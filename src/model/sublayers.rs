//! The sublayers of blocks, a file each: what it computes, forward, backward and in decoding, its weights, its sizes, its FLOPs.
//! This file is their list.

mod attention;
mod delta_net;
mod gated;
mod heads;
mod latent;
mod laurel;
mod layer_input;
mod mixture;
mod short_conv;
mod state_space;
mod two_branches;

use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::Model;
use super::budget::{SizedBy, SublayerSizes};
use super::context::{BlockContext, KeyValues};
use super::linears::Linears;
use super::mixing::{LayerCache, Mixing};
use super::weights::LayerWeights;
use crate::device::Dtype;
use crate::schema::Problem;
use crate::spec::{NormKind, Sublayer, SublayerKind};

fn shape(kind: &SublayerKind) -> &dyn SublayerShape {
    match kind {
        SublayerKind::Attention(it) => it,
        SublayerKind::DeltaNet(it) => it,
        SublayerKind::ShortConv(it) => it,
        SublayerKind::StateSpace(it) => it,
        SublayerKind::Gated(it) => it,
        SublayerKind::Mixture(it) => it,
        SublayerKind::TwoBranches(it) => it,
        SublayerKind::LayerInput(it) => it,
        SublayerKind::Laurel(it) => it,
    }
}

type LoadedSublayer = Result<Arc<dyn Forward>, Problem>;

/// What is known of a sublayer without its weights.
trait SublayerShape {
    /// With its frozen weights that are no linear layers.
    fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer;

    /// Sizes of its tensors.
    fn sizes(&self, by: SizedBy) -> SublayerSizes;

    /// What it keeps of the tokens of a text, before the first; absent: nothing.
    fn cache(&self, _: &Model) -> Option<LayerCache> {
        None
    }

    /// Numbers that [`cache`](Self::cache) has for each token of a text, in the type of the activations, and of its state, in `f32`.
    fn cached_numbers(&self) -> [usize; 2] {
        [0; 2]
    }

    /// Floating-point operations of the forward for a token, without linear layers and attention.
    fn flops_per_token(&self) -> usize {
        0
    }
}

/// What a sublayer computes, `[tokens, hidden_size]` from as much.
trait Compute: Debug + Send + Sync + 'static {
    /// What the backward needs of the forward.
    type Kept: Debug + Send + 'static;

    /// The forward, up to the input of the last linear layer.
    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> Self::Kept;

    /// The rest of it, added to `residual` if there is one.
    fn output(&self, kept: &Self::Kept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2>;

    /// The gradient of the input, if it is asked for.
    fn backward(&self, kept: Self::Kept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>>;

    /// Its keys and values, where later layers may use them.
    fn key_values(_: &Self::Kept) -> Option<KeyValues> {
        None
    }
}

/// What a backward is given.
pub(super) struct Backward<'a> {
    /// The gradient of the output.
    pub(super) dy: &'a Tensor<2>,
    /// Computes the input again.
    pub(super) x: &'a dyn Fn() -> Tensor<2>,
    /// Whether the gradient of the input is asked for, besides those of adapters.
    pub(super) input_grad: bool,
}

/// [`Compute`] of any kind.
pub(super) trait Forward: Debug + Send + Sync {
    fn activations(self: Arc<Self>, x: &Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> Box<dyn Passed>;
}

/// [`Compute`] of any kind behind its `activations`.
pub(super) trait Passed: Debug + Send {
    fn output(&self, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2>;
    fn backward(self: Box<Self>, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>>;
    fn key_values(&self) -> Option<KeyValues>;
}

#[derive(Debug)]
struct Of<C: Compute>(Arc<C>, C::Kept);

impl<C: Compute> Forward for C {
    fn activations(self: Arc<Self>, x: &Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> Box<dyn Passed> {
        let kept = Compute::activations(&*self, x, linears, mixing);
        Box::new(Of(self, kept))
    }
}

impl<C: Compute> Passed for Of<C> {
    fn output(&self, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        self.0.output(&self.1, residual, linears)
    }

    fn backward(self: Box<Self>, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        self.0.backward(self.1, given, linears)
    }

    fn key_values(&self) -> Option<KeyValues> {
        C::key_values(&self.1)
    }
}

impl Sublayer {
    pub(super) fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer {
        shape(&self.kind).load(weights)
    }

    /// What it keeps of the tokens of a text, before the first; absent: nothing.
    pub(super) fn cache(&self, model: &Model) -> Option<LayerCache> {
        shape(&self.kind).cache(model)
    }

    /// Numbers that this has for each token of a text, in the type of the activations, and of its state, in `f32`.
    pub(super) fn cached_numbers(&self) -> [usize; 2] {
        shape(&self.kind).cached_numbers()
    }

    /// Floating-point operations of the forward for a token, without linear layers and attention.
    #[must_use]
    pub fn flops_per_token(&self) -> usize {
        shape(&self.kind).flops_per_token()
    }

    /// Sizes of its tensors, with those of the norms around it.
    #[must_use]
    pub fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let inside = shape(&self.kind).sizes(by);
        // The input, and a factor of every token in its norm; the norm of the output has an input of its own.
        let of_norms = usize::from(self.norm_before.is_some()) + self.norm_after.map_or(0, |_| by.hidden_size);
        // What is centred, in `f32`, and what is made of that.
        let centred = match by.norm_kind {
            NormKind::Rms => 0,
            NormKind::Layer | NormKind::LayerWithoutBias => {
                3 * by.hidden_size * Dtype::F32.num_bytes() / by.place.activation_dtype(by.dtype).num_bytes()
            }
        };
        SublayerSizes {
            kept: inside.kept + by.hidden_size + of_norms,
            forward: inside.forward + centred,
            // What both are added to has a gradient of its own.
            backward: inside.backward + centred + if self.is_beside { by.hidden_size } else { 0 },
        }
    }
}
