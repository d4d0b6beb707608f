//! The attention of a block: projections, norms of heads, rotary embedding, attention.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::heads::{by_head, grown, of_heads};
use super::latent::{LatentAttention, Latents};
use super::{
    Backward, BlockContext, Compute, KeyValues, LayerCache, LayerWeights, Linears, LoadedSublayer, Mixing, Model,
    SizedBy, SublayerShape, SublayerSizes,
};
use crate::ops::attention::{Attended, AttentionInputs, attention_backward, with_sinks};
use crate::ops::cached_attention::KeyValueCache;
use crate::ops::head_norm::{
    Factors, HeadNorms, norm_and_rotate, norm_and_rotate_backward, norm_by_head, norm_by_head_backward, norm_values,
    norm_values_backward,
};
use crate::ops::linear::InputGrad;
use crate::ops::output_gate::{gate_output, gate_output_backward};
use crate::ops::rotary::rotate;
use crate::spec::{self, Qkv, QueryKeyNorms, SINKS};

/// Of queries and of keys.
type Pair = [Tensor<2>; 2];

/// An attention and its own frozen weights.
#[derive(Debug)]
struct AttentionWeights {
    spec: spec::Attention,
    /// Weights of the norms of queries and keys, where the family has them; such have a rotary embedding, too.
    head_norms: Option<[Tensor<1>; 2]>,
    /// Of the norms of latents, where it has such.
    latent_norms: Vec<Tensor<1>>,
    /// Ones, `[head_dim]`, where values are normed.
    value_norm: Option<Tensor<1>>,
    /// `[num_heads]` in `f32`, where the family has them.
    sinks: Option<Tensor<1>>,
}

/// What the backward needs of the forward.
#[derive(Debug)]
struct AttentionKept {
    /// After the rotary embedding, `[tokens, num_heads * head_dim]`.
    q: Tensor<2>,
    /// After the rotary embedding, `[tokens, num_kv_heads * head_dim]`.
    k: Tensor<2>,
    v: Tensor<2>,
    /// Where they come from latents.
    latents: Option<Latents>,
    /// Queries and keys before their norms, and what the backward of these needs, where the family has them.
    before_head_norms: Option<([Tensor<2>; 2], Factors)>,
    /// Queries and keys before norms by head, where it has such.
    before_norms_by_head: Option<[Tensor<2>; 2]>,
    /// Queries and keys behind the rotary embedding, where they are normed there.
    turned: Option<[Tensor<2>; 2]>,
    /// Values before their norm, where the family has one and they are no other layer's.
    before_value_norm: Option<Tensor<2>>,
    /// Of the output, where the family has one, `[tokens, num_heads * head_dim]`.
    gate: Option<Tensor<2>>,
    attended: Attended,
}

impl SublayerShape for spec::Attention {
    fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer {
        let [of_q, of_k] = self.norm_names;
        // Keys of an earlier layer are normed there; what stands for them here is zero.
        let of_k = if self.key_value_layer().is_some() { of_q } else { of_k };
        let ones = || Tensor::ones([self.heads.head_dim], (weights.device, DType::F32));
        let head_norms = match self.norms_by_head() {
            Some([q, k]) => Some(Ok([weights.norms_by_head(&q)?, weights.norms_by_head(&k)?])),
            None if self.query_key_norms == Some(QueryKeyNorms::Unweighted) => Some(Ok([ones(), ones()])),
            None => self.norm_widths().map(|[q, k]| Ok([weights.norm(of_q, q)?, weights.norm(of_k, k)?])),
        };
        Ok(Arc::new(AttentionWeights {
            spec: self.clone(),
            head_norms: head_norms.transpose()?,
            latent_norms: self
                .latent_norms()
                .map(|(name, width)| weights.norm(name, width))
                .collect::<Result<_, _>>()?,
            value_norm: self.has_value_norm.then(ones),
            sinks: self.has_sinks.then(|| weights.vector(SINKS, self.heads.num_heads)).transpose()?,
        }))
    }

    fn cache(&self, model: &Model) -> Option<LayerCache> {
        let new = |heads| KeyValueCache::new(model.place(), heads, &model.device(), model.compute);
        match self.latent() {
            Some(latent) => Some(LayerCache::Latents(new(latent.heads(self.heads)))),
            None => self.key_value_layer().is_none().then(|| LayerCache::KeyValues(new(self.heads))),
        }
    }

    fn cached_numbers(&self) -> [usize; 2] {
        if let Some(latent) = self.latent() {
            return [2 * latent.heads(self.heads).head_dim, 0];
        }
        [if self.key_value_layer().is_none() { 2 * self.heads.key_value_width() } else { 0 }, 0]
    }

    fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (query, key_value) = (self.heads.query_width(), self.own_key_value_width());
        // Queries and keys before their norms, and a factor for each.
        let of_norms = self.norm_widths().map_or(0, |[q, k]| query + key_value + query / q + key_value / k);
        // Its gradient takes its place.
        let gate = if self.has_output_gate || self.gate.is_some() { query } else { 0 };
        // Where they are keys before their norm, these are kept already.
        let of_values = if self.has_value_norm && !matches!(self.qkv, Qkv::ValuesAreKeys(_)) { key_value } else { 0 };
        let latent = self.latent();
        let of_latents = latent.map_or(0, |it| it.queries.map_or(0, |(_, rank)| rank) + it.rank + it.num_turning);
        // The latents keep the memory of queries that come from the input.
        let beside = latent.filter(|it| by.joins_outputs && it.queries.is_none()).map_or(0, |_| query);
        // Keys without what turns and values, before they are joined; and the output and its gradient without zeros.
        let [made, without_zeros] = latent.map_or([0; 2], |it| {
            let still = self.heads.head_dim - it.num_turning;
            [query + self.heads.num_heads * (still + it.value_dim), 2 * query]
        });
        // The keys and values keep the memory of the queries and their gate, which are taken apart.
        let held = if by.joins_outputs && self.has_output_gate { 2 * gate } else { 0 };
        // Heads, less their means and normed, in `f32`.
        let centred = self.norms_by_head().map_or(0, |_| 4 * query * size_of::<f32>() / by.dtype.num_bytes());
        SublayerSizes {
            kept: 2 * query
                + 2 * key_value
                + self.heads.num_heads
                + of_norms
                + of_values
                + gate
                + held
                + of_latents
                + beside,
            forward: by.hidden_size + gate + made + centred,
            backward: by.place.attention_backward_numbers(self.heads, by.dtype)
                + 3 * by.hidden_size
                + without_zeros
                + centred,
        }
    }
}

impl Compute for AttentionWeights {
    type Kept = AttentionKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> AttentionKept {
        let spec::Attention { heads, rope, .. } = self.spec;
        let context = linears.context;
        if let Some(latent) = self.latent() {
            let ([q, k, v], latents, attended) = latent.activations(x, linears, mixing);
            let latents = Some(latents);
            return AttentionKept {
                q,
                k,
                v,
                latents,
                before_head_norms: None,
                before_norms_by_head: None,
                turned: None,
                before_value_norm: None,
                gate: None,
                attended,
            };
        }
        let [q, k, v] = self.projected(x, linears);
        let (q, gate) = if self.spec.has_output_gate {
            let [q, gate] = of_heads(&q, heads.num_heads, [heads.head_dim; 2]);
            (q, Some(gate))
        } else {
            (q, self.spec.gate.map(|site| linears.forward(site, x, None)))
        };
        let ([q, k], before_norms_by_head) = self.normed_by_head(context, [q, k]);
        let ([q, k], before_head_norms) = match self.norms(context, [&q, &k]) {
            None => match rope {
                Some(rope) => (rotate(context.place(), [q, k], context.layout, rope, heads, false), None),
                None => ([q, k], None),
            },
            Some(norms) => {
                let (normed, factors) = norm_and_rotate(context.place(), norms);
                (normed, Some(([q, k], factors)))
            }
        };
        let q = grown(q, self.spec.query_growth, context);
        let ([q, k], turned) = match self.norms_behind() {
            Some([of_q, of_k]) => {
                let normed = [(&q, of_q), (&k, of_k)].map(|(x, of)| norm_values(context.place(), x, of, context.eps));
                (normed, Some([q, k]))
            }
            None => ([q, k], None),
        };
        let ([k, v], before_value_norm) = match (context.inputs.key_values, &self.value_norm) {
            (Some(shared), _) => (shared.clone(), None),
            (None, Some(weight)) => ([k, norm_values(context.place(), &v, weight, context.eps)], Some(v)),
            (None, None) => ([k, v], None),
        };
        let attended = mixing.attention([&q, &k, &v], heads);
        let attended = match &self.sinks {
            Some(sinks) => with_sinks(attended, sinks, context.layout, heads),
            None => attended,
        };
        AttentionKept {
            q,
            k,
            v,
            latents: None,
            before_head_norms,
            before_norms_by_head,
            turned,
            before_value_norm,
            gate,
            attended,
        }
    }

    fn output(&self, kept: &AttentionKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let o = self.read(kept.gate.as_ref(), &kept.attended.o, linears.context);
        linears.forward(self.spec.output, &o, residual)
    }

    fn backward(&self, kept: AttentionKept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        let Backward { dy, x, input_grad } = given;
        let spec::Attention { heads, rope, output, .. } = self.spec;
        let context = linears.context;
        let AttentionKept { q, k, v, latents, before_value_norm, gate, attended, .. } = kept;
        let AttentionKept { before_head_norms, before_norms_by_head, turned, .. } = kept;
        let o = self.read(gate.as_ref(), &attended.o, context);
        let d_o = linears.backward(output, dy, &o, InputGrad::Fresh).unwrap_or_else(|| o.zeros_like());
        drop(o);
        let d_o = self.latent().map_or(d_o.clone(), |latent| latent.widened(d_o));
        let (d_o, d_gate) = match gate {
            None => (d_o, None),
            Some(gate) => {
                let [d_o, d_gate] = gate_output_backward(context.place(), d_o, &attended.o, gate);
                (d_o, Some(d_gate))
            }
        };
        let inputs = AttentionInputs { qkv: [&q, &k, &v], layout: context.layout, heads };
        let [dq, dk, dv] = attention_backward(context.place(), &d_o, &attended, inputs);
        drop((d_o, attended, q, k, v));
        let dq = grown(dq, self.spec.query_growth, context);
        let [dk, dv] = match (self.spec.qkv, context.inputs.key_value_grads) {
            (Qkv::OfLayer { .. }, _) => {
                linears.grads.key_values = Some([dk, dv]);
                [0, 1].map(|_| self.no_keys(&dq))
            }
            (_, Some([of_k, of_v])) => [dk + of_k.clone(), dv + of_v.clone()],
            _ => [dk, dv],
        };
        let dv = match (&self.value_norm, before_value_norm) {
            (Some(weight), Some(v)) => norm_values_backward(context.place(), dv, &v, weight, context.eps),
            _ => dv,
        };
        let [dq, dk] = match (self.norms_behind(), turned) {
            (Some([of_q, of_k]), Some([q, k])) => [(dq, q, of_q), (dk, k, of_k)]
                .map(|(grad, x, of)| norm_values_backward(context.place(), grad, &x, of, context.eps)),
            _ => [dq, dk],
        };
        let [dq, dk] = match (before_head_norms, rope.filter(|_| latents.is_none())) {
            (Some(([q, k], factors)), _) => match self.norms(context, [&q, &k]) {
                Some(norms) => norm_and_rotate_backward(context.place(), [dq, dk], factors, norms),
                None => [dq, dk],
            },
            (None, Some(rope)) => rotate(context.place(), [dq, dk], context.layout, rope, heads, true),
            (None, None) => [dq, dk],
        };
        let [dq, dk] = self.normed_by_head_backward(context, [dq, dk], before_norms_by_head);
        let x = &x();
        let (dq, of_gate) = match (d_gate, self.spec.gate) {
            (None, _) => (dq, None),
            (Some(d_gate), Some(site)) => (dq, linears.backward(site, &d_gate, x, InputGrad::of(input_grad, None))),
            (Some(d_gate), None) => (by_head([dq, d_gate], heads.num_heads), None),
        };
        if let (Some(latent), Some(latents)) = (self.latent(), latents) {
            return latent.backward(latents, [dq, dk, dv], x, linears, input_grad);
        }
        let dx = match self.spec.qkv {
            Qkv::All(projections) => linears.project_backward(projections, [dq, dk, dv], x, input_grad),
            Qkv::ByHead(site) => {
                let all = by_head([dq, dk, dv], heads.num_heads);
                linears.backward(site, &all, x, InputGrad::of(input_grad, None))
            }
            Qkv::ValuesAreKeys(projections) => linears.project_backward(projections, [dq, dk + dv], x, input_grad),
            Qkv::OfLayer { queries, .. } => linears.backward(queries, &dq, x, InputGrad::of(input_grad, None)),
            Qkv::Latent(_) => unreachable!("its forward kept latents"),
        };
        match of_gate {
            Some(of_gate) => dx.map(|dx| dx + of_gate),
            None => dx,
        }
    }

    fn key_values(kept: &AttentionKept) -> Option<KeyValues> {
        Some([kept.k.clone(), kept.v.clone()])
    }
}

impl AttentionWeights {
    /// Queries, keys and values before norms and rotary embedding. Where keys and values are those of an earlier layer, there is one
    /// head of zeros for them: norm and rotary embedding take queries and keys together.
    fn projected(&self, x: &Tensor<2>, linears: &mut Linears<'_>) -> [Tensor<2>; 3] {
        match self.spec.qkv {
            Qkv::All(projections) => linears.project(projections, x),
            Qkv::ByHead(site) => {
                let spec::Heads { num_heads, head_dim, .. } = self.spec.heads;
                of_heads(&linears.forward(site, x, None), num_heads, [head_dim; 3])
            }
            Qkv::ValuesAreKeys(projections) => {
                let [q, k] = linears.project(projections, x);
                [q, k.clone(), k]
            }
            Qkv::OfLayer { queries, .. } => {
                let q = linears.forward(queries, x, None);
                let none = self.no_keys(&q);
                [q, none.clone(), none]
            }
            Qkv::Latent(_) => unreachable!("latents have a forward of their own"),
        }
    }

    fn latent(&self) -> Option<LatentAttention<'_>> {
        let spec::Attention { heads, rope, query_growth, .. } = self.spec;
        Some(LatentAttention {
            latent: self.spec.latent()?,
            heads,
            rope: rope?,
            query_growth,
            norms: &self.latent_norms,
        })
    }

    /// What is read of the values, `[tokens, num_heads * width of a value]`, times the gate.
    fn read(&self, gate: Option<&Tensor<2>>, o: &Tensor<2>, context: &BlockContext<'_>) -> Tensor<2> {
        match (gate, self.latent()) {
            (Some(gate), _) => gate_output(context.place(), o, gate),
            (None, Some(latent)) => latent.narrowed(o),
            (None, None) => o.clone(),
        }
    }

    fn no_keys(&self, q: &Tensor<2>) -> Tensor<2> {
        Tensor::zeros([q.dims()[0], self.spec.heads.head_dim], (&q.device(), q.dtype()))
    }

    /// The weights of the norms of queries and keys behind the rotary embedding, where they are there or where there is none.
    fn norms_behind(&self) -> Option<&[Tensor<1>; 2]> {
        let (norms, has_rope) = (self.spec.query_key_norms, self.spec.rope.is_some());
        let is_behind = match norms {
            Some(QueryKeyNorms::Turned | QueryKeyNorms::Unweighted) => true,
            Some(QueryKeyNorms::Heads) => !has_rope,
            _ => false,
        };
        self.head_norms.as_ref().filter(|_| is_behind)
    }

    /// The weights of norms by head, where they are there.
    fn norms_of_each(&self) -> Option<&[Tensor<1>; 2]> {
        self.head_norms.as_ref().filter(|_| matches!(self.spec.query_key_norms, Some(QueryKeyNorms::ByHead(_))))
    }

    /// Queries and keys behind norms by head, and before them where there are such.
    fn normed_by_head(&self, context: &BlockContext<'_>, [q, k]: Pair) -> (Pair, Option<Pair>) {
        let Some([of_q, of_k]) = self.norms_of_each() else { return ([q, k], None) };
        let head_dim = self.spec.heads.head_dim;
        let normed =
            [(&q, of_q), (&k, of_k)].map(|(x, of)| norm_by_head(context.place(), x, of, head_dim, context.eps));
        (normed, Some([q, k]))
    }

    fn normed_by_head_backward(&self, context: &BlockContext<'_>, [dq, dk]: Pair, before: Option<Pair>) -> Pair {
        let (Some([of_q, of_k]), Some([q, k])) = (self.norms_of_each(), before) else { return [dq, dk] };
        let head_dim = self.spec.heads.head_dim;
        [(dq, q, of_q), (dk, k, of_k)]
            .map(|(grad, x, of)| norm_by_head_backward(context.place(), grad, &x, of, head_dim, context.eps))
    }

    fn norms<'a>(&'a self, context: &BlockContext<'a>, qk: [&'a Tensor<2>; 2]) -> Option<HeadNorms<'a>> {
        let spec::Attention { rope, heads, .. } = self.spec;
        let is_other = self.norms_behind().or(self.norms_of_each()).is_some();
        let [q, k] = self.head_norms.as_ref().filter(|_| !is_other)?;
        Some(HeadNorms { qk, weights: [q, k], eps: context.eps, layout: context.layout, rope: rope?, heads })
    }
}
