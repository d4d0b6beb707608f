//! One transformer block, forward and backward by hand: the order of its norms and residuals.
//!
//! The matrices are frozen, so the backward only needs the gradients of the block's input, of its adapters and of norms. The forward
//! keeps [`Activations`] for it; normed inputs and the feed-forward product are cheaper to recompute.

use burn::tensor::Tensor;

use super::attention::{self, Attention};
use super::beside::{self, Beside};
use super::context::{BlockContext, BlockGrads, InDocuments, KeyValues, TokenMixing};
use super::delta_net::{self, DeltaNet};
use super::gated;
use super::layer_input;
use super::linears::Linears;
use super::mixture;
use super::short_conv::{self, ShortConv};
use crate::ops::linear::Weight;
use crate::ops::norm::{Norm, rms_norm_weight_grad};
use crate::spec::{self, PerSite};

/// Frozen weights of one block.
#[derive(Clone, Debug)]
pub struct Block {
    /// Linear layers by site, each `[out_features, in_features]`.
    pub linears: Vec<Weight>,
    /// Its sublayers, in order.
    pub sublayers: Vec<Sublayer>,
    /// What its output is multiplied by, where the family has such.
    pub scale: Option<f64>,
}

/// A sublayer and the norms around it.
#[derive(Clone, Debug)]
pub struct Sublayer {
    /// Of its input.
    pub norm_before: Option<Norm>,
    /// Of its output, before that is added to the residual stream.
    pub norm_after: Option<Norm>,
    /// Factor of what is added to the residual stream.
    pub output_scale: Option<f64>,
    /// What it computes between them.
    pub kind: SublayerKind,
    /// Names of the norms of its input and of its output, where they are trained.
    pub trained_norms: [Option<&'static str>; 2],
}

/// What a sublayer computes, `[tokens, hidden_size]` from as much.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a tensor is a handle of a few hundred bytes")]
pub enum SublayerKind {
    /// Causal self-attention.
    Attention(Attention),
    /// Linear attention.
    DeltaNet(DeltaNet),
    /// A gated short convolution.
    ShortConv(ShortConv),
    /// A gated feed-forward layer.
    Gated(spec::Gated),
    /// A mixture of experts.
    Mixture(spec::Mixture),
    /// A feed-forward layer with a mixture of experts beside it.
    Beside(Box<Beside>),
    /// What the layer makes of its own embedding of the tokens.
    LayerInput(spec::LayerInput),
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
    ShortConv(short_conv::Kept),
    Gated(gated::Kept),
    Mixture(mixture::Kept),
    Beside(beside::Kept),
    LayerInput(layer_input::Kept),
}

/// What a block's backward makes.
#[derive(Debug)]
pub struct BlockBackward {
    /// The gradient of the block's input, where it was asked for.
    pub dx: Option<Tensor<2>>,
    /// Of the keys and values of an earlier layer, where it uses such.
    pub key_values: Option<KeyValues>,
    /// Of its adapters.
    pub adapters: BlockGrads,
    /// Of those of its norms that are trained, `[1, hidden_size]`, in `f32`.
    pub norms: Vec<(&'static str, Tensor<2>)>,
}

impl Sublayer {
    /// The input of what it computes.
    fn normed(&self, x: &Tensor<2>, context: &BlockContext<'_>) -> (Tensor<2>, Option<Tensor<1>>) {
        let Some(norm) = &self.norm_before else { return (x.clone(), None) };
        let (normed, rstd) = norm.forward(context.place(), x, context.eps);
        (normed, Some(rstd))
    }

    fn activations(&self, x: Tensor<2>, linears: &mut Linears<'_>, mixing: &mut dyn TokenMixing) -> Kept {
        let (normed, rstd) = self.normed(&x, linears.context);
        let inner = match &self.kind {
            SublayerKind::Attention(it) => KeptInside::Attention(it.activations(&normed, linears, mixing)),
            SublayerKind::DeltaNet(it) => KeptInside::DeltaNet(it.activations(&normed, linears, mixing)),
            SublayerKind::ShortConv(it) => KeptInside::ShortConv(it.activations(&normed, linears, mixing)),
            SublayerKind::Gated(it) => KeptInside::Gated(it.activations(&normed, linears)),
            SublayerKind::Mixture(it) => KeptInside::Mixture(it.activations(&normed, linears)),
            SublayerKind::Beside(it) => KeptInside::Beside(it.activations(&normed, linears)),
            SublayerKind::LayerInput(it) => KeptInside::LayerInput(it.activations(&normed, linears)),
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
            (SublayerKind::ShortConv(it), KeptInside::ShortConv(kept)) => it.output(kept, residual, linears),
            (SublayerKind::Gated(it), KeptInside::Gated(kept)) => it.output(kept, residual, linears),
            (SublayerKind::Mixture(it), KeptInside::Mixture(kept)) => it.output(kept, residual, linears),
            (SublayerKind::Beside(it), KeptInside::Beside(kept)) => it.output(kept, residual, linears),
            (SublayerKind::LayerInput(it), KeptInside::LayerInput(kept)) => it.output(kept, residual, linears),
            _ => unreachable!("a sublayer keeps what is its own"),
        }
    }

    /// The residual stream after it.
    fn output(&self, kept: &Kept, linears: &mut Linears<'_>) -> Tensor<2> {
        match (&self.norm_after, &kept.after) {
            (Some(norm), Some(y)) => kept.x.clone() + norm.forward(linears.context.place(), y, linears.context.eps).0,
            _ => match self.output_scale {
                Some(scale) => kept.x.clone() + self.inner_output(kept, None, linears) * scale,
                None => self.inner_output(kept, Some(kept.x.clone()), linears),
            },
        }
    }

    /// The gradient of the residual stream before it, if `input_grad`, from that after it; and of the keys and values of an
    /// earlier layer.
    fn backward(
        &self,
        dy: Tensor<2>,
        kept: Kept,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> (Option<Tensor<2>>, Option<KeyValues>) {
        let (place, Kept { x, rstd, inner, after }) = (linears.context.place(), kept);
        let context = linears.context;
        let [trained_before, trained_after] = self.trained_norms;
        let before_norm = self.norm_after.as_ref().zip(after).map(|(norm, y)| {
            // Cheaper to compute again than to keep.
            let (_, rstd) = norm.forward(place, &y, context.eps);
            linears.norm_grads.extend(trained_after.map(|name| (name, rms_norm_weight_grad(&dy, &y, &rstd))));
            norm.backward(place, &dy, &y, &rstd, y.zeros_like())
        });
        let before_norm = before_norm.or_else(|| Some(dy.clone() * self.output_scale?));
        let d_inner = before_norm.as_ref().unwrap_or(&dy);
        let again = || self.normed(&x, context).0;
        let (mut key_values, goes_on) = (None, input_grad);
        let input_grad = input_grad || trained_before.is_some();
        let dnormed = match (&self.kind, inner) {
            (SublayerKind::Attention(it), KeptInside::Attention(kept)) => {
                let (dx, of_earlier) = it.backward(d_inner, kept, again, linears, input_grad);
                key_values = of_earlier;
                dx
            }
            (SublayerKind::DeltaNet(it), KeptInside::DeltaNet(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            (SublayerKind::ShortConv(it), KeptInside::ShortConv(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            (SublayerKind::Gated(it), KeptInside::Gated(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            (SublayerKind::Mixture(it), KeptInside::Mixture(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            (SublayerKind::Beside(it), KeptInside::Beside(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            (SublayerKind::LayerInput(it), KeptInside::LayerInput(kept)) => {
                it.backward(d_inner, kept, again, linears, input_grad)
            }
            _ => unreachable!("a sublayer keeps what is its own"),
        };
        if let ((Some(name), Some(dnormed)), Some(rstd)) = ((trained_before, &dnormed), &rstd) {
            linears.norm_grads.push((name, rms_norm_weight_grad(dnormed, &x, rstd)));
        }
        let dx = dnormed.filter(|_| goes_on).map(|dnormed| match (&self.norm_before, rstd) {
            (Some(norm), Some(rstd)) => norm.backward(place, &dnormed, &x, &rstd, dy),
            _ => dy + dnormed,
        });
        (dx, key_values)
    }
}

impl Activations {
    /// The keys and values of the attention.
    #[must_use]
    pub fn key_values(&self) -> Option<KeyValues> {
        self.sublayers.iter().find_map(|kept| match &kept.inner {
            KeptInside::Attention(kept) => Some(kept.key_values()),
            _ => None,
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
        let mixing = &mut InDocuments { place: context.place, layout: context.layout, memory: None };
        self.activations_with(x, context, mixing)
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
        let y = sublayer.output(kept, &mut Linears::new(&self.linears, context, PerSite::new()));
        self.scaled(y)
    }

    fn scaled(&self, y: Tensor<2>) -> Tensor<2> {
        match self.scale {
            Some(scale) => y * scale,
            None => y,
        }
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
    ) -> BlockBackward {
        let Activations { sublayers, of_adapters } = activations;
        let mut linears = Linears::new(&self.linears, context, of_adapters);
        let (mut dx, mut key_values) = (Some(self.scaled(dy)), None);
        for (index, (sublayer, kept)) in self.sublayers.iter().zip(sublayers).enumerate().rev() {
            let Some(dy) = dx else { break };
            let (d_input, of_earlier) = sublayer.backward(dy, kept, &mut linears, input_grad || index > 0);
            (dx, key_values) = (d_input, key_values.or(of_earlier));
        }
        BlockBackward { dx, key_values, adapters: linears.grads, norms: linears.norm_grads }
    }
}

#[cfg(test)]
mod tests;
