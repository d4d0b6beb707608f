//! Queries, keys and values from latents (DeepSeek-AI, 2024): forward and backward.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::heads::{by_head, grown, of_heads};
use super::{BlockContext, Linears, Mixing};
use crate::ops::attention::Attended;
use crate::ops::linear::InputGrad;
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::rotary::rotate;
use crate::spec::{Heads, Latent, Projections, QueryGrowth};

/// What the norms of latents add to the mean square, whatever a config says.
const EPS: f64 = 1e-6;

/// Tokens whose queries are applied to latents at a time: each takes a row for each head, as wide as the projection from the latents.
const TOKENS_AT_A_TIME: usize = 16;

/// Latents before their norms: of queries, where they have one, and of keys and values.
#[derive(Debug)]
pub(super) struct Latents {
    queries: Option<Tensor<2>>,
    key_values: Tensor<2>,
}

/// An attention's latents, with what is around them.
#[derive(Clone, Copy)]
pub(super) struct LatentAttention<'a> {
    pub(super) latent: &'a Latent,
    pub(super) heads: Heads,
    /// Its rotary embedding.
    pub(super) rope: usize,
    pub(super) query_growth: Option<QueryGrowth>,
    /// Weights of the norms of latents, of that of keys and values the last.
    pub(super) norms: &'a [Tensor<1>],
}

/// Queries, keys and values; latents before their norms; and what attention makes of them.
pub(super) type LatentActivations = ([Tensor<2>; 3], Latents, Attended);

impl LatentAttention<'_> {
    /// Queries and keys are after the rotary embedding, and values have zeros behind those of each head, as has the output. Where
    /// attention is to latents that are kept, which is for texts that are written, keys and values are of no use.
    pub(super) fn activations(
        &self,
        x: &Tensor<2>,
        linears: &mut Linears<'_>,
        mixing: Mixing<'_>,
    ) -> LatentActivations {
        let Latent { inputs, queries, key_values, rank, num_turning, value_dim } = *self.latent;
        let (context, num_heads, still) = (linears.context, self.heads.num_heads, self.still());
        let [input, joined] = linears.project(Projections::Apart(inputs), x);
        let latents =
            Latents { queries: queries.map(|_| input.clone()), key_values: joined.clone().narrow(1, 0, rank) };
        let q = match queries {
            None => input,
            Some((up, _)) => linears.forward(up, &self.normed(&input, 0, context).0, None),
        };
        let [q, turning] = of_heads(&q, num_heads, [still, num_turning]);
        let [turning, shared] = self.rotated([turning, joined.narrow(1, rank, num_turning)], context, false);
        let latent = self.normed(&latents.key_values, 1, context).0;
        if mixing.keep_latents(&|| Tensor::cat(vec![latent.clone(), shared.clone()], 1)) {
            return self.on_latents([q, turning], latents, linears, mixing);
        }
        let kv = linears.forward(key_values, &latent, None);
        drop(latent);
        let [k, v] = of_heads(&kv, num_heads, [still, value_dim]);
        drop(kv);
        let q = grown(by_head([q, turning], num_heads), self.query_growth, context);
        let k = by_head([k, shared.repeat_dim(1, num_heads)], num_heads);
        let v = self.widened(v);
        let attended = mixing.attention([&q, &k, &v], self.heads);
        ([q, k, v], latents, attended)
    }

    /// The same by attention to the latents: the projection to keys is applied to queries, that to values to what is read.
    fn on_latents(
        &self,
        [still, turning]: [Tensor<2>; 2],
        latents: Latents,
        linears: &Linears<'_>,
        mixing: Mixing<'_>,
    ) -> LatentActivations {
        let (num_heads, num_tokens) = (self.heads.num_heads, still.dims()[0]);
        // On the CPU, what is made of a token does not depend on others.
        let at_a_time = if linears.context.place().is_host() { 1 } else { TOKENS_AT_A_TIME };
        let by_tokens = |x: Tensor<2>, of: &dyn Fn(Tensor<2>, Range<usize>) -> Tensor<2>| {
            let parts = (0..num_tokens).step_by(at_a_time).map(|start| {
                let tokens = start..(start + at_a_time).min(num_tokens);
                of(x.clone().narrow(0, start, tokens.len()), tokens)
            });
            Tensor::cat(parts.collect(), 0)
        };
        let absorbed = by_tokens(still, &|q, tokens| self.absorbed(&q, tokens, linears));
        let q = grown(by_head([absorbed, turning], num_heads), self.query_growth, linears.context);
        let attended = mixing.attention_to_latents(&q);
        let [read] = of_heads(&attended.o, num_heads, [self.latent.rank]);
        let o = self.widened(by_tokens(read, &|read, tokens| self.values_of(read, tokens, linears)));
        ([q.clone(), q.clone(), q], latents, Attended { o, ..attended })
    }

    /// The parts of some queries that do not turn, `[tokens, num_heads * still]`, times the projection to keys:
    /// `[tokens, num_heads * rank]`.
    fn absorbed(&self, q: &Tensor<2>, tokens: Range<usize>, linears: &Linears<'_>) -> Tensor<2> {
        let (num_heads, still, num_tokens) = (self.heads.num_heads, self.still(), tokens.len());
        // A row for each head, with zeros for the others. [tokens, heads, heads, width]
        let own = q.clone().reshape([num_tokens, num_heads, 1, still]) * own_head(num_heads, q);
        let zeros = [num_tokens, num_heads, num_heads, self.latent.value_dim];
        let own = Tensor::cat(vec![own, Tensor::zeros(zeros, (&q.device(), q.dtype()))], 3);
        let own = own.reshape([num_tokens * num_heads, num_heads * (still + self.latent.value_dim)]);
        let keys = linears.transposed_rows(self.latent.key_values, &own, tokens);
        keys.reshape([num_tokens, num_heads * self.latent.rank])
    }

    /// The values of some tokens, `[tokens, num_heads * value_dim]`, from the latents that each head has read.
    fn values_of(&self, read: Tensor<2>, tokens: Range<usize>, linears: &Linears<'_>) -> Tensor<2> {
        let Latent { key_values, rank, value_dim, .. } = *self.latent;
        let (num_heads, still, num_tokens) = (self.heads.num_heads, self.still(), tokens.len());
        let read = read.reshape([num_tokens * num_heads, rank]);
        let all = linears.forward_rows(key_values, &read, tokens);
        let all = all.reshape([num_tokens, num_heads, num_heads, still + value_dim]).narrow(3, still, value_dim);
        (all * own_head(num_heads, &read)).sum_dim(2).reshape([num_tokens, num_heads * value_dim])
    }

    /// The gradient of the input `x`, if `input_grad`, from those of queries, keys and values.
    pub(super) fn backward(
        &self,
        latents: Latents,
        [dq, dk, dv]: [Tensor<2>; 3],
        x: &Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> Option<Tensor<2>> {
        let Latent { inputs, queries, key_values, num_turning, .. } = *self.latent;
        let (context, num_heads, still) = (linears.context, self.heads.num_heads, self.still());
        let ([tokens, _], dtype) = (dk.dims(), dk.dtype());
        let [dq, d_turning] = of_heads(&dq, num_heads, [still, num_turning]);
        let [dk, d_shared] = of_heads(&dk, num_heads, [still, num_turning]);
        let d_shared = d_shared.cast(DType::F32).reshape([tokens, num_heads, num_turning]).sum_dim(1);
        let d_shared = d_shared.reshape([tokens, num_turning]).cast(dtype);
        let [d_turning, d_shared] = self.rotated([d_turning, d_shared], context, true);
        let dq = by_head([dq, d_turning], num_heads);
        let d_kv = by_head([dk, self.narrowed(&dv)], num_heads);
        let dq = match (queries, latents.queries) {
            (Some((up, _)), Some(latent)) => self.backward_of(up, &dq, (&latent, 0), linears),
            _ => dq,
        };
        let d_latent = self.backward_of(key_values, &d_kv, (&latents.key_values, 1), linears);
        let d_joined = Tensor::cat(vec![d_latent, d_shared], 1);
        linears.project_backward(Projections::Apart(inputs), [dq, d_joined], x, input_grad)
    }

    /// The gradient of a latent from that of what a projection makes of it.
    fn backward_of(
        &self,
        site: usize,
        dy: &Tensor<2>,
        (latent, which): (&Tensor<2>, usize),
        linears: &mut Linears<'_>,
    ) -> Tensor<2> {
        let context = linears.context;
        let (normed, rstd) = self.normed(latent, which, context);
        let d_normed = linears.backward(site, dy, &normed, InputGrad::Fresh).unwrap_or_else(|| normed.zeros_like());
        rms_norm_backward(context.place(), &d_normed, latent, self.norm(which), &rstd, normed.zeros_like())
    }

    /// Values, or the output of attention, as wide as keys: zeros are behind those of each head.
    pub(super) fn widened(&self, values: Tensor<2>) -> Tensor<2> {
        let Heads { num_heads, head_dim, .. } = self.heads;
        let num_zeros = num_heads * (head_dim - self.latent.value_dim);
        if num_zeros == 0 {
            return values;
        }
        let zeros = Tensor::zeros([values.dims()[0], num_zeros], (&values.device(), values.dtype()));
        by_head([values, zeros], num_heads)
    }

    /// The inverse of [`widened`](Self::widened).
    pub(super) fn narrowed(&self, values: &Tensor<2>) -> Tensor<2> {
        let Heads { num_heads, head_dim, .. } = self.heads;
        if self.latent.value_dim == head_dim {
            return values.clone();
        }
        let [values] = of_heads(values, num_heads, [self.latent.value_dim]);
        values
    }

    /// Numbers of a head that do not turn.
    fn still(&self) -> usize {
        self.heads.head_dim - self.latent.num_turning
    }

    fn norm(&self, which: usize) -> &Tensor<1> {
        // Without a latent of queries there is one.
        &self.norms[which.min(self.norms.len() - 1)]
    }

    fn normed(&self, latent: &Tensor<2>, which: usize, context: &BlockContext<'_>) -> (Tensor<2>, Tensor<1>) {
        rms_norm(context.place(), latent, self.norm(which), EPS)
    }

    fn rotated(&self, qk: [Tensor<2>; 2], context: &BlockContext<'_>, inverse: bool) -> [Tensor<2>; 2] {
        let heads = Heads { num_kv_heads: 1, head_dim: self.latent.num_turning, ..self.heads };
        rotate(context.place(), qk, context.layout, self.rope, heads, inverse)
    }
}

/// What keeps each head's own part of a row for each, `[1, heads, heads, 1]` in the type of `like`.
fn own_head(num_heads: usize, like: &Tensor<2>) -> Tensor<4> {
    Tensor::<2>::eye(num_heads, &like.device()).cast(like.dtype()).reshape([1, num_heads, num_heads, 1])
}
