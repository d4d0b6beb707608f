//! The state space of a block: projection, short convolution, states, gate and norm.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::{
    Backward, Compute, LayerCache, LayerWeights, Linears, LoadedSublayer, Mixing, Model, SizedBy, SublayerShape,
    SublayerSizes,
};
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::ops::linear::InputGrad;
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::short_conv::{Convolution, short_conv, short_conv_backward};
use crate::ops::state_space::{
    CHUNK_TOKENS, StateGates, StateInputs, plain_state_space_numbers, state_space, state_space_backward,
    state_space_next,
};
use crate::ops::swiglu::{gated, gated_backward};
use crate::spec::{self, Activation};

/// A state space and its own frozen weights, in `f32`.
#[derive(Debug)]
struct StateSpace {
    spec: spec::StateSpace,
    /// Of the convolution, `[kernel_size, xbc_width]`, and what it adds, `[xbc_width]`.
    conv: Tensor<2>,
    conv_bias: Option<Tensor<1>>,
    /// Logarithm of the decay's rate, `[num_heads]`.
    a_log: Tensor<1>,
    /// Added to the projection to strengths, `[num_heads]`.
    dt_bias: Tensor<1>,
    /// What inputs of heads are multiplied by on the way beside the states, `[1, inner_width]`.
    skip: Tensor<2>,
    /// Ones as wide as a group, and the weight of the norm, `[1, inner_width]`; absent: there is none.
    norm: Option<(Tensor<1>, Tensor<2>)>,
    /// Factors of what the projection of the input makes, `[1, all of it]`, where they are not 1.
    scales: Option<Tensor<2>>,
}

/// What the backward needs of the forward; the convolution, the gates and the norm are cheaper to compute again.
#[derive(Debug)]
struct StateSpaceKept {
    /// Gate of the output, `[tokens, inner_width]`.
    z: Tensor<2>,
    /// Before the convolution, `[tokens, xbc_width]`.
    xbc: Tensor<2>,
    /// Strengths before their function, `[tokens, num_heads]`.
    dt: Tensor<2>,
    /// What is read of the states, with what goes beside them, `[tokens, inner_width]`.
    y: Tensor<2>,
}

impl SublayerShape for spec::StateSpace {
    fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer {
        let (heads, names, device) = (self.heads, self.names, weights.device);
        let of_heads = |name| weights.vector(name, heads.num_heads);
        let skip = of_heads(names.skip)?.reshape([heads.num_heads, 1]).repeat_dim(1, heads.head_dim);
        let bias = self.has_conv_bias.then(|| weights.vector(names.conv_bias, heads.xbc_width()));
        let inner = heads.inner_width();
        let norm = self.has_norm.then(|| {
            let ones = Tensor::ones([inner / heads.num_groups], (device, DType::F32));
            Ok((ones, weights.vector(names.norm, inner)?.reshape([1, inner])))
        });
        let scales = self.scales.map(|scales| {
            let parts = heads.widths().into_iter().zip(scales);
            Tensor::cat(parts.map(|(width, scale)| Tensor::full([1, width], scale, (device, DType::F32))).collect(), 1)
        });
        Ok(Arc::new(StateSpace {
            spec: *self,
            conv: weights.conv(names.conv, heads.xbc_width(), self.kernel_size)?,
            conv_bias: bias.transpose()?,
            a_log: of_heads(names.a_log)?,
            dt_bias: of_heads(names.dt_bias)?,
            skip: skip.reshape([1, inner]),
            norm: norm.transpose()?,
            scales,
        }))
    }

    fn cache(&self, model: &Model) -> Option<LayerCache> {
        let heads = self.heads;
        let memory = [heads.num_heads, heads.state_dim, heads.head_dim];
        Some(LayerCache::state(model, [self.kernel_size - 1, heads.xbc_width()], Some(memory)))
    }

    fn cached_numbers(&self) -> [usize; 2] {
        [0, self.heads.num_heads * self.heads.state_len()]
    }

    fn flops_per_token(&self) -> usize {
        self.heads.flops_per_token(CHUNK_TOKENS)
    }

    fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (xbc, inner, hidden) = (self.heads.xbc_width(), self.heads.inner_width(), by.hidden_size);
        let [forward, backward] = plain_state_space_numbers(self.heads, by.dtype);
        // By head: both gates and what they are made of, in `f32`.
        let gates = 4 * self.heads.num_heads;
        SublayerSizes {
            kept: 2 * inner + xbc + self.heads.num_heads,
            // The output of the convolution, whose sums are in `f32`; or the gated and the normed output.
            forward: (3 * xbc + gates + forward).max(3 * inner) + hidden,
            // The convolution's output and its gradient; or the gated output, its gradient, that of the gate and of what is read.
            backward: (4 * xbc + gates + backward + inner).max(6 * inner) + 2 * hidden,
        }
    }
}

impl Compute for StateSpace {
    type Kept = StateSpaceKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> StateSpaceKept {
        let (place, heads) = (linears.context.place(), self.spec.heads);
        let all = self.scaled(linears.forward(self.spec.input, x, None));
        let (inner, xbc_width) = (heads.inner_width(), heads.xbc_width());
        let z = all.clone().narrow(1, 0, inner);
        let xbc = all.clone().narrow(1, inner, xbc_width);
        let dt = all.narrow(1, inner + xbc_width, heads.num_heads);
        let gates = self.gates(&dt);
        let whole = |layout: &Layout| {
            let xbc = self.convolved(place, &xbc, layout);
            self.beside(state_space(place, StateInputs { xbc: &xbc, gates: &gates, layout, heads }), &xbc)
        };
        let layout = linears.context.layout;
        let y = mixing.recurrent(&whole, &|mut states| {
            let xbc = states.convolved(Convolution::Short((&self.conv, self.conv_bias.as_ref())), &xbc);
            let inputs = StateInputs { xbc: &xbc, gates: &gates, layout, heads };
            self.beside(states.read(|memories, texts| state_space_next(place, memories, texts, inputs)), &xbc)
        });
        StateSpaceKept { z, xbc, dt, y }
    }

    fn output(&self, kept: &StateSpaceKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let (place, eps) = (linears.context.place(), linears.context.eps);
        let h = gated(place, Activation::Silu, &kept.z, &kept.y);
        let normed = self.normed(place, &h, eps).map_or(h, |(normed, _)| normed);
        linears.forward(self.spec.output, &normed, residual)
    }

    fn backward(&self, kept: StateSpaceKept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        let Backward { dy, x, input_grad } = given;
        let context = linears.context;
        let (place, layout, heads) = (context.place(), context.layout, self.spec.heads);
        let StateSpaceKept { z, xbc, dt, y } = kept;
        let h = gated(place, Activation::Silu, &z, &y);
        let normed = self.normed(place, &h, context.eps);
        let input = normed.as_ref().map_or(&h, |(normed, _)| normed);
        let d_input = linears.backward(self.spec.output, dy, input, InputGrad::Fresh);
        let d_input = d_input.unwrap_or_else(|| h.zeros_like());
        let dh = match (&self.norm, normed) {
            (Some((ones, weight)), Some((_, rstd))) => {
                let d_rows = self.by_group(&(d_input * weight.clone().cast(h.dtype())));
                rms_norm_backward(place, &d_rows, &self.by_group(&h), ones, &rstd, d_rows.zeros_like())
            }
            _ => d_input,
        };
        let (dz, dy) = gated_backward(place, Activation::Silu, &dh.reshape(h.dims()), &z, &y);
        drop((h, y, z));
        let gates = self.gates(&dt);
        let convolved = self.convolved(place, &xbc, layout);
        let inputs = StateInputs { xbc: &convolved, gates: &gates, layout, heads };
        let (d_convolved, d_gates) = state_space_backward(place, &dy, inputs);
        drop(convolved);
        let inner = heads.inner_width();
        let dx = d_convolved.clone().narrow(1, 0, inner) + dy * self.skip.clone().cast(dt.dtype());
        let rest = d_convolved.narrow(1, inner, heads.xbc_width() - inner);
        let d_convolved = Tensor::cat(vec![dx, rest], 1);
        let dxbc = short_conv_backward(place, &d_convolved, &xbc, (&self.conv, self.conv_bias.as_ref()), layout);
        drop((d_convolved, xbc));
        let ddt = gates.backward(d_gates, &dt, &self.a_log, &self.dt_bias, self.spec.bounds);
        let all = self.scaled(Tensor::cat(vec![dz, dxbc, ddt], 1));
        linears.backward(self.spec.input, &all, &x(), InputGrad::of(input_grad, None))
    }
}

impl StateSpace {
    fn gates(&self, dt: &Tensor<2>) -> StateGates<Tensor<2>> {
        StateGates::new(dt, &self.a_log, &self.dt_bias, self.spec.bounds)
    }

    fn convolved(&self, place: Place, xbc: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        short_conv(place, xbc, (&self.conv, self.conv_bias.as_ref()), layout)
    }

    /// What is read of the states, with what goes beside them.
    fn beside(&self, y: Tensor<2>, xbc: &Tensor<2>) -> Tensor<2> {
        let x = xbc.clone().narrow(1, 0, self.spec.heads.inner_width());
        y + x * self.skip.clone().cast(xbc.dtype())
    }

    /// The output of the norm, `[tokens, inner_width]`, and the factor of every group, where there is one.
    fn normed(&self, place: Place, h: &Tensor<2>, eps: f64) -> Option<(Tensor<2>, Tensor<1>)> {
        let (ones, weight) = self.norm.as_ref()?;
        let (normed, rstd) = rms_norm(place, &self.by_group(h), ones, eps);
        Some((normed.reshape(h.dims()) * weight.clone().cast(h.dtype()), rstd))
    }

    fn scaled(&self, all: Tensor<2>) -> Tensor<2> {
        let dtype = all.dtype();
        self.scales.iter().fold(all, |all, scales| all * scales.clone().cast(dtype))
    }

    /// A row for every group.
    fn by_group(&self, x: &Tensor<2>) -> Tensor<2> {
        let ([tokens, width], groups) = (x.dims(), self.spec.heads.num_groups);
        x.clone().reshape([tokens * groups, width / groups])
    }
}
