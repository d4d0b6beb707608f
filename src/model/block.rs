//! One transformer block, forward and backward by hand: the order of its norms and residuals.
//!
//! The matrices are frozen, so the backward only needs the gradients of the block's input, of its adapters and of norms. The forward
//! keeps [`Activations`] for it; normed inputs and the feed-forward product are cheaper to recompute.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::context::{BlockBackward, BlockContext, KeyValues};
use super::linears::Linears;
use super::mixing::{InDocuments, Mixing};
use super::sublayers::{Backward, Forward, Passed};
use crate::ops::linear::Weight;
use crate::ops::norm::{Norm, rms_norm_weight_grad};
use crate::spec::PerSite;

/// Frozen weights of one block.
#[derive(Clone, Debug)]
pub struct Block {
    /// Linear layers by site, each `[out_features, in_features]`.
    pub linears: Vec<Weight>,
    /// Its sublayers, in order: one at least.
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
    pub(super) inner: Arc<dyn Forward>,
    /// Names of the norms of its input and of its output, where they are trained.
    pub trained_norms: [Option<&'static str>; 2],
}

/// The tensors that a block's forward keeps for its backward.
#[derive(Debug)]
pub struct Activations {
    sublayers: Vec<SublayerKept>,
    /// What the adapters' backwards need, but for the block's last linear layer, whose is computed in the backward.
    of_adapters: PerSite<Tensor<2>>,
}

/// The tensors that a sublayer's forward keeps.
#[derive(Debug)]
struct SublayerKept {
    /// The residual stream before it, `[tokens, hidden_size]`.
    x: Tensor<2>,
    /// Factor of each token in the norm of its input.
    rstd: Option<Tensor<1>>,
    inner: Box<dyn Passed>,
    /// The input of the norm after it.
    after: Option<Tensor<2>>,
}

impl Sublayer {
    /// The input of what it computes.
    fn normed(&self, x: &Tensor<2>, context: &BlockContext<'_>) -> (Tensor<2>, Option<Tensor<1>>) {
        let Some(norm) = &self.norm_before else { return (x.clone(), None) };
        let (normed, rstd) = norm.forward(context.place(), x, context.eps);
        (normed, Some(rstd))
    }

    fn activations(&self, x: Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> SublayerKept {
        let (normed, rstd) = self.normed(&x, linears.context);
        let inner = Arc::clone(&self.inner).activations(&normed, linears, mixing);
        drop(normed);
        let after = self.norm_after.as_ref().map(|_| inner.output(None, linears));
        SublayerKept { x, rstd, inner, after }
    }

    /// The residual stream after it.
    fn output(&self, kept: &SublayerKept, linears: &mut Linears<'_>) -> Tensor<2> {
        match (&self.norm_after, &kept.after) {
            (Some(norm), Some(y)) => kept.x.clone() + norm.forward(linears.context.place(), y, linears.context.eps).0,
            _ => match self.output_scale {
                Some(scale) => kept.x.clone() + kept.inner.output(None, linears) * scale,
                None => kept.inner.output(Some(kept.x.clone()), linears),
            },
        }
    }

    /// The gradient of the residual stream before it, if `input_grad`, from that after it.
    fn backward(
        &self,
        dy: Tensor<2>,
        kept: SublayerKept,
        linears: &mut Linears<'_>,
        passes_gradient: bool,
    ) -> Option<Tensor<2>> {
        let (place, SublayerKept { x, rstd, inner, after }) = (linears.context.place(), kept);
        let context = linears.context;
        let [trained_before, trained_after] = self.trained_norms;
        let before_norm = self.norm_after.as_ref().zip(after).map(|(norm, y)| {
            // Cheaper to compute again than to keep.
            let (_, rstd) = norm.forward(place, &y, context.eps);
            linears.grads.norms.extend(trained_after.map(|name| (name, rms_norm_weight_grad(&dy, &y, &rstd))));
            norm.backward(place, &dy, &y, &rstd, y.zeros_like())
        });
        let before_norm = before_norm.or_else(|| Some(dy.clone() * self.output_scale?));
        let (again, input_grad) = (|| self.normed(&x, context).0, passes_gradient || trained_before.is_some());
        let given = Backward { dy: before_norm.as_ref().unwrap_or(&dy), x: &again, input_grad };
        let dnormed = inner.backward(given, linears);
        if let ((Some(name), Some(dnormed)), Some(rstd)) = ((trained_before, &dnormed), &rstd) {
            linears.grads.norms.push((name, rms_norm_weight_grad(dnormed, &x, rstd)));
        }
        dnormed.filter(|_| passes_gradient).map(|dnormed| match (&self.norm_before, rstd) {
            (Some(norm), Some(rstd)) => norm.backward(place, &dnormed, &x, &rstd, dy),
            _ => dy + dnormed,
        })
    }
}

impl Activations {
    /// The keys and values of the attention.
    #[must_use]
    pub fn key_values(&self) -> Option<KeyValues> {
        self.sublayers.iter().find_map(|kept| kept.inner.key_values())
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
    pub fn activations_with(&self, x: Tensor<2>, context: &BlockContext<'_>, mixing: Mixing<'_>) -> Activations {
        let mut linears = Linears::new(&self.linears, context, PerSite::new());
        let mut sublayers: Vec<SublayerKept> = Vec::with_capacity(self.sublayers.len());
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
        let last = self.sublayers.len() - 1;
        let linears = &mut Linears::new(&self.linears, context, PerSite::new());
        let y = self.sublayers[last].output(&activations.sublayers[last], linears);
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
        let mut dx = Some(self.scaled(dy));
        for (index, (sublayer, kept)) in self.sublayers.iter().zip(sublayers).enumerate().rev() {
            let Some(dy) = dx else { break };
            dx = sublayer.backward(dy, kept, &mut linears, input_grad || index > 0);
        }
        BlockBackward { dx, ..linears.grads }
    }
}

#[cfg(test)]
mod tests;
