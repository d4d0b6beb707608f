//! The linear attention of a block: projections, short convolution, gated delta rule, gated norm.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::heads::{by_head, of_heads};
use super::{
    Backward, Compute, LayerCache, LayerWeights, Linears, LoadedSublayer, Mixing, Model, SizedBy, SublayerShape,
    SublayerSizes,
};
use crate::ops::delta_rule::{CHUNK_TOKENS, DeltaInputs, Gates, delta_rule, delta_rule_backward, delta_rule_next};
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::ops::linear::InputGrad;
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::short_conv::{Convolution, short_conv, short_conv_backward};
use crate::ops::swiglu::{gated, gated_backward};
use crate::spec::delta_net::{A_LOG, CONV, DT_BIAS, GATED_NORM};
use crate::spec::{self, Activation, DeltaNetInputs, Projections};

/// A linear attention and its own frozen weights, in `f32`.
#[derive(Debug)]
struct DeltaNet {
    spec: spec::DeltaNet,
    /// Of the convolution, `[kernel_size, qkv_width]`.
    conv: Tensor<2>,
    /// Logarithm of the decay's rate, `[num_value_heads]`.
    a_log: Tensor<1>,
    /// Added to the decay's projection, `[num_value_heads]`.
    dt_bias: Tensor<1>,
    /// Weight of the norm of a value head, `[value_head_dim]`.
    norm: Tensor<1>,
}

/// What the backward needs of the forward; the convolution, the gates and the norm are cheaper to compute again.
#[derive(Debug)]
struct DeltaNetKept {
    /// Before the convolution, `[tokens, qkv_width]`.
    qkv: Tensor<2>,
    /// Gate of the output, `[tokens, value_width]`.
    z: Tensor<2>,
    /// Strength and decay before their functions, `[tokens, num_value_heads]` each.
    gates: [Tensor<2>; 2],
    /// What is read of the states, `[tokens, value_width]`.
    o: Tensor<2>,
}

impl SublayerShape for spec::DeltaNet {
    fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer {
        Ok(Arc::new(DeltaNet {
            spec: self.clone(),
            conv: weights.conv(CONV, self.heads.qkv_width(), self.kernel_size)?,
            a_log: weights.vector(A_LOG, self.heads.num_value_heads)?,
            dt_bias: weights.vector(DT_BIAS, self.heads.num_value_heads)?,
            norm: weights.vector(GATED_NORM, self.heads.value_head_dim)?,
        }))
    }

    fn cache(&self, model: &Model) -> Option<LayerCache> {
        let heads = self.heads;
        let memory = [heads.num_value_heads, heads.key_head_dim, heads.value_head_dim];
        Some(LayerCache::state(model, [self.kernel_size - 1, heads.qkv_width()], Some(memory)))
    }

    fn cached_numbers(&self) -> [usize; 2] {
        [0, self.heads.num_value_heads * self.heads.state_len()]
    }

    fn flops_per_token(&self) -> usize {
        self.heads.flops_per_token(CHUNK_TOKENS)
    }

    fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (qkv, value, hidden) = (self.heads.qkv_width(), self.heads.value_width(), by.hidden_size);
        let rule = by.place.delta_rule_numbers(self.heads, by.dtype);
        // What is joined for the linear layers, or was.
        let joined = match self.inputs {
            DeltaNetInputs::Apart(_) => 0,
            DeltaNetInputs::ByKeyHead(_) => qkv + value,
        };
        // By head: the two gates and what they are made of.
        let gates = 4 * self.heads.num_value_heads;
        // What is done with, but shares memory with what is not: the gradient of the normed output with the gate's and, unless both
        // are copied out of what is joined, the gate with `qkv`.
        let held = match self.inputs {
            _ if !by.joins_outputs => 0,
            DeltaNetInputs::Apart(_) => 2 * value,
            DeltaNetInputs::ByKeyHead(_) => value,
        };
        SublayerSizes {
            kept: qkv + 2 * value + 2 * self.heads.num_value_heads,
            // The output of the convolution; or the product of norm and gate, and the output beside its residual.
            forward: (qkv + gates + rule[0]).max(2 * value).max(joined) + hidden,
            // The output of the convolution and its gradient, where norm and gate are done with as much as their gradients take; or
            // the normed output, the gradients of its product with the gate, and of both.
            backward: (2 * qkv + gates + rule[1] + held).max(4 * value).max(2 * joined) + 2 * hidden,
        }
    }
}

impl Compute for DeltaNet {
    type Kept = DeltaNetKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> DeltaNetKept {
        let [qkv, z, b, a] = self.projected(x, linears);
        let gates = [b, a];
        let (place, heads, of_rule) = (linears.context.place(), self.spec.heads, self.gates(&gates));
        let conv = (&self.conv, None);
        let whole = |layout: &Layout| {
            let qkv = short_conv(place, &qkv, conv, layout);
            delta_rule(place, DeltaInputs { qkv: &qkv, gates: &of_rule, layout, heads })
        };
        let layout = linears.context.layout;
        let o = mixing.recurrent(&whole, &|mut states| {
            let qkv = states.convolved(Convolution::Short(conv), &qkv);
            let inputs = DeltaInputs { qkv: &qkv, gates: &of_rule, layout, heads };
            states.read(|memories, texts| delta_rule_next(place, memories, texts, inputs))
        });
        DeltaNetKept { qkv, z, gates, o }
    }

    fn output(&self, kept: &DeltaNetKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let (place, eps) = (linears.context.place(), linears.context.eps);
        let normed = self.normed(place, &kept.o, eps).0.reshape(kept.z.dims());
        let h = gated(place, Activation::Silu, &kept.z, &normed);
        drop(normed);
        linears.forward(self.spec.output, &h, residual)
    }

    fn backward(&self, kept: DeltaNetKept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        let Backward { dy, x, input_grad } = given;
        let context = linears.context;
        let (place, layout, heads) = (context.place(), context.layout, self.spec.heads);
        let DeltaNetKept { qkv, z, gates: [b, a], o } = kept;
        let (normed, rstd) = self.normed(place, &o, context.eps);
        let normed = normed.reshape(z.dims());
        let h = gated(place, Activation::Silu, &z, &normed);
        let dh = linears.backward(self.spec.output, dy, &h, InputGrad::Fresh);
        drop(h);
        let dh = dh.unwrap_or_else(|| z.zeros_like());
        let (dz, d_normed) = gated_backward(place, Activation::Silu, &dh, &z, &normed);
        drop((dh, z, normed));
        let (d_normed, o) = (self.by_head(&d_normed), self.by_head(&o));
        let d_o = rms_norm_backward(place, &d_normed, &o, &self.norm, &rstd, d_normed.zeros_like());
        drop((d_normed, o));
        let d_o = d_o.reshape(dz.dims());
        let gates = self.gates(&[b, a.clone()]);
        let convolved = short_conv(place, &qkv, (&self.conv, None), layout);
        let inputs = DeltaInputs { qkv: &convolved, gates: &gates, layout, heads };
        let (d_convolved, d_gates) = delta_rule_backward(place, &d_o, inputs);
        drop((convolved, d_o));
        let dqkv = short_conv_backward(place, &d_convolved, &qkv, (&self.conv, None), layout);
        drop((d_convolved, qkv));
        let [db, da] = gates.backward(d_gates, &a, &self.a_log, &self.dt_bias);
        match self.spec.inputs {
            DeltaNetInputs::Apart(sites) => {
                linears.project_backward(Projections::Apart(sites), [dqkv, dz, db, da], &x(), input_grad)
            }
            DeltaNetInputs::ByKeyHead(sites) => {
                let (key, value) = (heads.key_width(), heads.value_width());
                let part = |first, width| dqkv.clone().narrow(1, first, width);
                let qkvz = [part(0, key), part(key, key), part(2 * key, value), dz];
                let joined = [by_head(qkvz, heads.num_key_heads), by_head([db, da], heads.num_key_heads)];
                linears.project_backward(Projections::Apart(sites), joined, &x(), input_grad)
            }
        }
    }
}

impl DeltaNet {
    fn gates(&self, kept: &[Tensor<2>; 2]) -> Gates<Tensor<2>> {
        Gates::new(kept.each_ref(), &self.a_log, &self.dt_bias)
    }

    /// The output of the norm and the factor of every head, `[tokens * num_value_heads, value_head_dim]`.
    fn normed(&self, place: Place, o: &Tensor<2>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        rms_norm(place, &self.by_head(o), &self.norm, eps)
    }

    /// A row for every head.
    fn by_head(&self, x: &Tensor<2>) -> Tensor<2> {
        let [tokens, _] = x.dims();
        let heads = self.spec.heads;
        x.clone().reshape([tokens * heads.num_value_heads, heads.value_head_dim])
    }

    /// Queries, keys and values side by side, the gate of the output, strength and decay.
    fn projected(&self, x: &Tensor<2>, linears: &mut Linears<'_>) -> [Tensor<2>; 4] {
        let heads = self.spec.heads;
        match self.spec.inputs {
            DeltaNetInputs::Apart(sites) => linears.project(Projections::Apart(sites), x),
            DeltaNetInputs::ByKeyHead(sites) => {
                let [qkvz, ba] = linears.project(Projections::Apart(sites), x);
                let values = heads.group() * heads.value_head_dim;
                let widths = [heads.key_head_dim, heads.key_head_dim, values, values];
                let [q, k, v, z] = of_heads(&qkvz, heads.num_key_heads, widths);
                let [b, a] = of_heads(&ba, heads.num_key_heads, [heads.group(); 2]);
                [Tensor::cat(vec![q, k, v], 1), z, b, a]
            }
        }
    }
}
