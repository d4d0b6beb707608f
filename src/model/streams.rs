//! Several residual streams (`AltUp`; Baykal et al., 2023), side by side in a row of `[tokens, count * hidden_size]`: what a block makes
//! of all of them around its sublayers, and how they begin and end (Gemma 3n). All is in `f32`, in plain tensor calls.

use burn::tensor::{DType, Tensor};

use super::Model;
use super::context::BlockContext;
use super::weights::LayerWeights;
use crate::ops::linear::{InputGrad, Weight, linear, linear_backward};
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::schema::Problem;
use crate::spec::{self, CORRECTION, PREDICTION, STREAM_NORM, STREAM_ROUTER, STREAM_SCALE};
use crate::util::stats::as_f64;

/// A block's weights for them, in `f32`.
#[derive(Clone, Debug)]
pub struct Streams {
    count: usize,
    /// Of the norm of what `router` takes, less a factor of the width, `[hidden_size]`.
    norm: Tensor<1>,
    /// `[count, hidden_size]`
    router: Tensor<2>,
    /// `[count * count, count]`
    prediction: Tensor<2>,
    /// `[count, count]`
    correction: Tensor<2>,
    /// `[1, hidden_size]`
    scale: Tensor<2>,
}

/// What a block's forward keeps of them.
#[derive(Debug)]
pub(super) struct StreamsKept {
    pub(super) x: Tensor<2>,
    pub(super) predicted: Tensor<2>,
    /// What its sublayers make of the first, but for the last one.
    pub(super) activated: Tensor<2>,
}

/// What makes the others of the first, and what they pass before all become one.
#[derive(Clone, Debug)]
pub(super) struct StreamProjections {
    pub(super) first: Vec<Weight>,
    pub(super) last: Vec<Weight>,
}

impl Streams {
    pub(super) fn load(spec: spec::Streams, weights: LayerWeights<'_>) -> Result<Self, Problem> {
        let (spec::Streams { count, clip }, hidden) = (spec, weights.config.hidden_size);
        let clipped = |matrix: Tensor<2>| match clip {
            Some(clip) => matrix.clamp(-clip, clip),
            None => matrix,
        };
        Ok(Self {
            count,
            norm: weights.vector(STREAM_NORM, hidden)? / as_f64(hidden),
            router: weights.load(STREAM_ROUTER, [count, hidden])?,
            prediction: clipped(weights.load(PREDICTION, [count * count, count])?),
            correction: clipped(weights.load(CORRECTION, [count, count])?),
            scale: weights.vector(STREAM_SCALE, hidden)?.unsqueeze_dim(0),
        })
    }

    /// The first of streams.
    pub(super) fn first(&self, x: &Tensor<2>) -> Tensor<2> {
        part(x, self.count, 0)
    }

    /// All as they are predicted.
    pub(super) fn predict(&self, x: &Tensor<2>, context: &BlockContext<'_>) -> Tensor<2> {
        let parts = self.parts(&self.first(x), context);
        let all = by_stream(x, self.count);
        joined(all.clone() + mixed(&self.coefficients(parts), &all), x.dtype())
    }

    /// The gradient of [`predict`](Self::predict)'s input from that of its result.
    pub(super) fn predict_backward(&self, d: &Tensor<2>, x: &Tensor<2>, context: &BlockContext<'_>) -> Tensor<2> {
        let first = self.first(x);
        let parts = self.parts(&first, context);
        let (all, d) = (by_stream(x, self.count), by_stream(d, self.count));
        let transposed = self.coefficients(parts.clone()).swap_dims(1, 2);
        let dx = joined(d.clone() + mixed(&transposed, &d), x.dtype());
        let of_stream = |stream| (d.clone().narrow(1, stream, 1) * all.clone()).sum_dim(2);
        let d_coefficients = Tensor::cat((0..self.count).map(of_stream).collect(), 2);
        // [tokens, by, of] -> [tokens, of * by]
        let d_coefficients = d_coefficients.swap_dims(1, 2).reshape([x.dims()[0], self.count * self.count]);
        let d_parts = product(d_coefficients, &self.prediction.clone().transpose());
        let residual = self.first(&dx);
        let d_first = self.parts_backward(d_parts, parts, &first, residual, context);
        with_first(dx, d_first)
    }

    /// All with what the first has become.
    pub(super) fn correct(&self, kept: &StreamsKept, context: &BlockContext<'_>) -> Tensor<2> {
        let StreamsKept { predicted, activated, .. } = kept;
        let shares = product(self.parts(activated, context), &self.correction) + 1.0;
        let innovation = as_f32(activated) - as_f32(&self.first(predicted));
        let shared = shares.unsqueeze_dim::<3>(2) * innovation.unsqueeze_dim::<3>(1);
        joined(by_stream(predicted, self.count) + shared, predicted.dtype())
    }

    /// The gradients of [`correct`](Self::correct)'s predictions and of what the first has become.
    pub(super) fn correct_backward(
        &self,
        d: &Tensor<2>,
        kept: &StreamsKept,
        context: &BlockContext<'_>,
    ) -> [Tensor<2>; 2] {
        let StreamsKept { predicted, activated, .. } = kept;
        let parts = self.parts(activated, context);
        let shares = product(parts.clone(), &self.correction) + 1.0;
        let innovation = as_f32(activated) - as_f32(&self.first(predicted));
        let by = by_stream(d, self.count);
        let d_shares = (by.clone() * innovation.unsqueeze_dim::<3>(1)).sum_dim(2).squeeze_dim(2);
        let d_innovation = (by * shares.unsqueeze_dim::<3>(2)).sum_dim(1).squeeze_dim(1).cast(d.dtype());
        let d_parts = product(d_shares, &self.correction.clone().transpose());
        let d_activated = self.parts_backward(d_parts, parts, activated, d_innovation.clone(), context);
        let d_first = self.first(d) - d_innovation;
        [with_first(d.clone(), d_first), d_activated]
    }

    /// What the last sublayer takes of corrected streams, or the gradient of that which it takes them from.
    pub(super) fn scaled(&self, first: &Tensor<2>) -> Tensor<2> {
        (as_f32(first) * self.scale.clone()).cast(first.dtype())
    }

    /// Streams with `y` added to all but the first.
    pub(super) fn with_others(&self, all: Tensor<2>, y: &Tensor<2>) -> Tensor<2> {
        let others = std::iter::repeat_n(y.clone(), self.count - 1);
        all + Tensor::cat(std::iter::once(y.zeros_like()).chain(others).collect(), 1)
    }

    /// The sum of all but the first.
    pub(super) fn sum_of_others(&self, all: &Tensor<2>) -> Tensor<2> {
        let others = by_stream(all, self.count).narrow(1, 1, self.count - 1);
        others.sum_dim(1).squeeze_dim::<2>(1).cast(all.dtype())
    }

    /// A number for each stream, of one of them: `[tokens, count]` in `f32`.
    fn parts(&self, x: &Tensor<2>, context: &BlockContext<'_>) -> Tensor<2> {
        let (normed, _) = rms_norm(context.place, x, &self.norm, context.eps);
        product(normed.cast(DType::F32), &self.router).tanh()
    }

    /// Adds the gradient of [`parts`](Self::parts) with respect to `x` to `residual`.
    fn parts_backward(
        &self,
        d_parts: Tensor<2>,
        parts: Tensor<2>,
        x: &Tensor<2>,
        residual: Tensor<2>,
        context: &BlockContext<'_>,
    ) -> Tensor<2> {
        let d_parts = d_parts * (parts.clone() * parts - 1.0).neg();
        let d_normed = product(d_parts, &self.router.clone().transpose()).cast(x.dtype());
        let (_, rstd) = rms_norm(context.place, x, &self.norm, context.eps);
        rms_norm_backward(context.place, &d_normed, x, &self.norm, &rstd, residual)
    }

    /// The part that each stream has in the prediction of each: `[tokens, of, by]`.
    fn coefficients(&self, parts: Tensor<2>) -> Tensor<3> {
        let tokens = parts.dims()[0];
        product(parts, &self.prediction).reshape([tokens, self.count, self.count])
    }
}

impl Model {
    /// The residual streams that begin with these embeddings.
    pub(super) fn first_streams(&self, x: Tensor<2>) -> Tensor<2> {
        let Some(projections) = &self.streams else { return x };
        let size = magnitude(&as_f32(&x));
        let others = projections.first.iter().map(|weight| {
            let (u, least) = self.projected(&x, weight);
            (u * size.clone() / least).cast(x.dtype())
        });
        let others: Vec<_> = others.collect();
        Tensor::cat(std::iter::once(x).chain(others).collect(), 1)
    }

    /// The hidden states `[tokens, hidden_size]` that the last residual streams make.
    #[must_use]
    pub fn last_hidden(&self, x: Tensor<2>) -> Tensor<2> {
        let Some(projections) = &self.streams else { return x };
        let count = projections.last.len() + 1;
        let first = as_f32(&part(&x, count, 0));
        let size = magnitude(&first);
        let all = projections.last.iter().enumerate().fold(first, |sum, (other, weight)| {
            let (u, least) = self.projected(&part(&x, count, other + 1), weight);
            sum + u * size.clone() / least
        });
        (all / as_f64(count)).cast(x.dtype())
    }

    /// The gradient of the last residual streams `x` from that of [`last_hidden`](Self::last_hidden).
    #[must_use]
    pub fn last_hidden_backward(&self, x: Option<Tensor<2>>, dy: Tensor<2>) -> Tensor<2> {
        let (Some(projections), Some(x)) = (&self.streams, x) else { return dy };
        let (count, width) = (projections.last.len() + 1, as_f64(self.config.hidden_size));
        let first = as_f32(&part(&x, count, 0));
        let size = magnitude(&first);
        let d = as_f32(&dy) / as_f64(count);
        let mut d_size = size.zeros_like();
        let mut parts = Vec::with_capacity(count);
        for (other, weight) in projections.last.iter().enumerate() {
            let of = part(&x, count, other + 1);
            let (u, least) = self.projected(&of, weight);
            let along = (d.clone() * u.clone()).sum_dim(1) / least.clone();
            d_size = d_size + along.clone();
            let is_larger = least.clone().greater_elem(LEAST_SQUARE.sqrt()).float().cast(DType::F32);
            let turned = u * (along * is_larger / (least.clone() * least.clone() * width));
            let du = (d.clone() / least - turned) * size.clone();
            let du = du.cast(x.dtype());
            let dx = linear_backward(self.place(), &du, &of, weight, None, InputGrad::Fresh).0;
            parts.push(dx.unwrap_or_else(|| of.zeros_like()));
        }
        let d_first = d + first * (d_size / (size * width));
        Tensor::cat(std::iter::once(d_first.cast(x.dtype())).chain(parts).collect(), 1)
    }

    /// What a matrix makes of rows, in `f32`, and their magnitudes, which are not below a bound.
    fn projected(&self, x: &Tensor<2>, weight: &Weight) -> (Tensor<2>, Tensor<2>) {
        let u = as_f32(&linear(self.place(), x, weight, None, None).0);
        let least = magnitude(&u).clamp_min(LEAST_SQUARE.sqrt());
        (u, least)
    }
}

/// Below which no mean square of a projection is.
const LEAST_SQUARE: f64 = 1e-5;

/// The root of the mean square of each row, `[tokens, 1]`.
fn magnitude(x: &Tensor<2>) -> Tensor<2> {
    (x.clone() * x.clone()).mean_dim(1).sqrt()
}

fn as_f32(x: &Tensor<2>) -> Tensor<2> {
    x.clone().cast(DType::F32)
}

/// One of `count` streams. A copy: views of one tensor have gaps between their rows.
fn part(x: &Tensor<2>, count: usize, stream: usize) -> Tensor<2> {
    let [tokens, width] = x.dims();
    let hidden = width / count;
    let part = x.clone().narrow(1, stream * hidden, hidden);
    part.zeros_like().slice_assign([0..tokens, 0..hidden], part)
}

/// Streams with another first one.
pub(super) fn with_first(all: Tensor<2>, first: Tensor<2>) -> Tensor<2> {
    let [tokens, hidden] = first.dims();
    all.slice_assign([0..tokens, 0..hidden], first)
}

/// `[tokens, count, hidden_size]`, in `f32`.
fn by_stream(x: &Tensor<2>, count: usize) -> Tensor<3> {
    let [tokens, width] = x.dims();
    as_f32(x).reshape([tokens, count, width / count])
}

/// The inverse of [`by_stream`].
fn joined(x: Tensor<3>, dtype: DType) -> Tensor<2> {
    let [tokens, count, hidden] = x.dims();
    x.reshape([tokens, count * hidden]).cast(dtype)
}

/// `x w^T`, where either has few rows or columns: without rounding, and without a product's start.
///
/// # Shapes
/// `x`: `[tokens, n]`, `w`: `[m, n]`. Returns `[tokens, m]`.
fn product(x: Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    (x.unsqueeze_dim::<3>(1) * w.clone().unsqueeze_dim::<3>(0)).sum_dim(2).squeeze_dim(2)
}

/// Sums of streams, each times its part.
///
/// # Shapes
/// `parts`: `[tokens, of, by]`, `x`: `[tokens, by, hidden_size]`. Returns `[tokens, of, hidden_size]`.
fn mixed(parts: &Tensor<3>, x: &Tensor<3>) -> Tensor<3> {
    let [_, count, _] = parts.dims();
    // [tokens, by, 1]
    let of = |stream| parts.clone().narrow(1, stream, 1).swap_dims(1, 2);
    Tensor::cat((0..count).map(|stream| (of(stream) * x.clone()).sum_dim(1)).collect(), 1)
}
