//! One transformer block, forward and backward by hand: the order of its norms and residuals.
//!
//! The matrices are frozen, so the backward only needs the gradients of the block's input, of its adapters and of norms. The forward
//! keeps [`Activations`] for it; normed inputs and the feed-forward product are cheaper to recompute.

use std::f64::consts::FRAC_1_SQRT_2;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::context::{BlockBackward, BlockContext, KeyValues};
use super::linears::Linears;
use super::mixing::{InDocuments, Mixing};
use super::streams::{Streams, StreamsKept, with_first};
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
    /// Its part in several residual streams, where there are such.
    pub streams: Option<Streams>,
}

/// A sublayer and the norms around it.
#[derive(Clone, Debug)]
pub struct Sublayer {
    /// Of its input.
    pub norm_before: Option<Norm>,
    /// Of its output, before that is added to the residual stream.
    pub norm_after: Option<Norm>,
    /// What the norm of its output adds to the mean square.
    pub eps_after: f64,
    /// Factor of its normed input.
    pub input_scale: Option<f64>,
    /// Factor of what is added to the residual stream.
    pub output_scale: Option<f64>,
    /// It takes what the sublayer in front of it takes.
    pub is_beside: bool,
    /// Its normed input is added to its output, too, and the residual stream is divided by the root of 2 then (Laurel).
    pub is_laurel: bool,
    /// What it computes between them.
    pub(super) inner: Arc<dyn Forward>,
    /// Names of the norms of its input and of its output, where they are trained.
    pub trained_norms: [Option<&'static str>; 2],
}

/// The tensors that a block's forward keeps for its backward.
#[derive(Debug)]
pub struct Activations {
    sublayers: Vec<SublayerKept>,
    /// Of several residual streams.
    streams: Option<StreamsKept>,
    /// What the adapters' backwards need, but for the block's last linear layer, whose is computed in the backward.
    of_adapters: PerSite<Tensor<2>>,
}

/// The tensors that a sublayer's forward keeps.
#[derive(Debug)]
struct SublayerKept {
    /// The residual stream that it takes, `[tokens, hidden_size]`.
    x: Tensor<2>,
    /// That which its output is added to, where this has the output of a sublayer beside it.
    onto: Option<Tensor<2>>,
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
        (scaled(normed, self.input_scale), Some(rstd))
    }

    fn activations(&self, x: Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> SublayerKept {
        let (normed, rstd) = self.normed(&x, linears.context);
        let inner = Arc::clone(&self.inner).activations(&normed, linears, mixing);
        drop(normed);
        let after = self.norm_after.as_ref().map(|_| inner.output(None, linears));
        SublayerKept { x, onto: None, rstd, inner, after }
    }

    /// The residual stream after it.
    fn output(&self, kept: &SublayerKept, linears: &mut Linears<'_>) -> Tensor<2> {
        let onto = kept.onto.as_ref().unwrap_or(&kept.x).clone();
        match (&kept.after, self.output_scale) {
            (Some(_), _) if self.is_laurel => {
                (onto + self.normed(&kept.x, linears.context).0 + self.update(kept, linears)) * FRAC_1_SQRT_2
            }
            (Some(_), _) | (None, Some(_)) => onto + self.update(kept, linears),
            (None, None) => kept.inner.output(Some(onto), linears),
        }
    }

    /// What is added to the residual stream.
    fn update(&self, kept: &SublayerKept, linears: &mut Linears<'_>) -> Tensor<2> {
        let update = match (&self.norm_after, &kept.after) {
            (Some(norm), Some(y)) => norm.forward(linears.context.place(), y, self.eps_after).0,
            _ => kept.inner.output(None, linears),
        };
        scaled(update, self.output_scale)
    }

    /// The gradient of the residual stream that it takes, if `passes_gradient`, added to `sum`: that of its output too, unless there is
    /// another, `of_output`.
    fn backward(
        &self,
        (sum, of_output): (Tensor<2>, Option<&Tensor<2>>),
        kept: SublayerKept,
        linears: &mut Linears<'_>,
        passes_gradient: bool,
    ) -> Option<Tensor<2>> {
        let (place, SublayerKept { x, rstd, inner, after, .. }) = (linears.context.place(), kept);
        let of_update = self.output_scale.map(|scale| of_output.unwrap_or(&sum).clone() * scale);
        let dy = of_update.as_ref().or(of_output).unwrap_or(&sum);
        let context = linears.context;
        let [trained_before, trained_after] = self.trained_norms;
        let before_norm = self.norm_after.as_ref().zip(after).map(|(norm, y)| {
            // Cheaper to compute again than to keep.
            let (_, rstd) = norm.forward(place, &y, self.eps_after);
            linears.grads.norms.extend(trained_after.map(|name| (name, rms_norm_weight_grad(dy, &y, &rstd))));
            norm.backward(place, dy, &y, &rstd, y.zeros_like())
        });
        let (again, input_grad) = (|| self.normed(&x, context).0, passes_gradient || trained_before.is_some());
        let given = Backward { dy: before_norm.as_ref().unwrap_or(dy), x: &again, input_grad };
        let dnormed = inner.backward(given, linears).map(|dnormed| scaled(dnormed, self.input_scale));
        let dnormed = dnormed.map(|dnormed| if self.is_laurel { dnormed + dy.clone() } else { dnormed });
        if let ((Some(name), Some(dnormed)), Some(rstd)) = ((trained_before, &dnormed), &rstd) {
            linears.grads.norms.push((name, rms_norm_weight_grad(dnormed, &x, rstd)));
        }
        dnormed.filter(|_| passes_gradient).map(|dnormed| match (&self.norm_before, rstd) {
            (Some(norm), Some(rstd)) => norm.backward(place, &dnormed, &x, &rstd, sum),
            _ => sum + dnormed,
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
    /// `x`: `[tokens, hidden_size]`, as often side by side as there are residual streams; likewise the output and gradients.
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
        let mut streams = self.streams.as_ref().map(|of| {
            let predicted = of.predict(&x, context);
            (of, StreamsKept { activated: of.first(&predicted), x: x.clone(), predicted })
        });
        let mut input = Some(streams.as_ref().map_or(x, |(_, kept)| kept.activated.clone()));
        for (index, sublayer) in self.sublayers.iter().enumerate() {
            let Some(stream) = input.take() else { break };
            let stream = match &mut streams {
                Some((of, kept)) if index + 1 == self.sublayers.len() => {
                    kept.activated = stream;
                    of.scaled(&of.first(&of.correct(kept, context)))
                }
                _ => stream,
            };
            let (x, onto) = match sublayers.last().filter(|_| sublayer.is_beside) {
                Some(before) => (before.x.clone(), Some(stream)),
                None => (stream, None),
            };
            let kept = SublayerKept { onto, ..sublayer.activations(x, &mut linears, mixing) };
            input = (index + 1 < self.sublayers.len()).then(|| sublayer.output(&kept, &mut linears));
            sublayers.push(kept);
        }
        Activations { sublayers, streams: streams.map(|(_, kept)| kept), of_adapters: linears.kept }
    }

    /// The block's output from its activations, `[tokens, hidden_size]`.
    #[must_use]
    pub fn output(&self, activations: &Activations, context: &BlockContext<'_>) -> Tensor<2> {
        let last = self.sublayers.len() - 1;
        let linears = &mut Linears::new(&self.linears, context, PerSite::new());
        let (sublayer, kept) = (&self.sublayers[last], &activations.sublayers[last]);
        if let (Some(of), Some(streams)) = (&self.streams, &activations.streams) {
            return of.with_others(of.correct(streams, context), &sublayer.update(kept, linears));
        }
        scaled(sublayer.output(kept, linears), self.scale)
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
        let Activations { sublayers, streams, of_adapters } = activations;
        let mut linears = Linears::new(&self.linears, context, of_adapters);
        let streams = self.streams.as_ref().zip(streams);
        // Of what the last sublayer makes of the first stream, which is added to the others.
        let of_others = streams.as_ref().map(|(of, _)| of.sum_of_others(&dy));
        let mut of_streams = streams.as_ref().map(|_| dy.clone());
        let mut dx = Some(of_others.as_ref().map_or_else(|| scaled(dy, self.scale), Tensor::zeros_like));
        // Where the sublayer behind is beside the next, of what both are added to.
        let mut of_both = of_others;
        for (index, (sublayer, kept)) in self.sublayers.iter().zip(sublayers).enumerate().rev() {
            let Some(sum) = dx else { break };
            let sum = if sublayer.is_laurel { sum * FRAC_1_SQRT_2 } else { sum };
            let of_output = of_both.take();
            of_both = sublayer.is_beside.then(|| of_output.as_ref().unwrap_or(&sum).clone());
            dx = sublayer.backward((sum, of_output.as_ref()), kept, &mut linears, input_grad || index > 0);
            if let (Some((of, kept)), Some(all), Some(d)) = (&streams, &of_streams, &dx)
                && index + 1 == self.sublayers.len()
            {
                let corrected = with_first(all.clone(), of.first(all) + of.scaled(d));
                let [predicted, activated] = of.correct_backward(&corrected, kept, context);
                (of_streams, dx) = (Some(predicted), Some(activated));
            }
        }
        if let (Some((of, kept)), Some(all), Some(d)) = (&streams, of_streams, &dx) {
            let first = of.first(&all) + d.clone();
            dx = Some(of.predict_backward(&with_first(all, first), &kept.x, context));
        }
        BlockBackward { dx, ..linears.grads }
    }
}

/// A tensor times a number, where there is one.
fn scaled(x: Tensor<2>, scale: Option<f64>) -> Tensor<2> {
    match scale {
        Some(scale) => x * scale,
        None => x,
    }
}

#[cfg(test)]
mod tests;
