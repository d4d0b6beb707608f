//! The attention of a block: projections, norms of heads, rotary embedding, attention.

use burn::tensor::Tensor;

use super::budget::{SizedBy, SublayerSizes};
use super::context::{Attend, BlockContext};
use super::linears::Linears;
use crate::ops::attention::{Attended, attention_backward, with_sinks};
use crate::ops::head_norm::{Factors, HeadNorms, QueriesKeys, norm_and_rotate, norm_and_rotate_backward};
use crate::ops::host;
use crate::ops::linear::InputGrad;
use crate::ops::rotary::rotate;
use crate::spec;

/// An attention and its own frozen weights.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Its shape.
    pub spec: spec::Attention,
    /// Weights of the norms of queries and keys, where the family has them; such have a rotary embedding, too.
    pub head_norms: Option<[Tensor<1>; 2]>,
    /// `[num_heads]` in `f32`, where the family has them.
    pub sinks: Option<Tensor<1>>,
}

/// What the backward needs of the forward.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// After the rotary embedding, `[tokens, num_heads * head_dim]`.
    q: Tensor<2>,
    /// After the rotary embedding, `[tokens, num_kv_heads * head_dim]`.
    k: Tensor<2>,
    v: Tensor<2>,
    /// Queries and keys before their norms, and what the backward of these needs, where the family has them.
    before_head_norms: Option<(QueriesKeys<Tensor<2>>, Factors)>,
    attended: Attended,
}

impl spec::Attention {
    /// Sizes of its tensors.
    pub(super) fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (query, key_value) = (self.heads.query_width(), self.heads.key_value_width());
        // Queries and keys before their norms, and a factor for each.
        let of_norms = self.norm_widths().map_or(0, |[q, k]| query + key_value + query / q + key_value / k);
        SublayerSizes {
            kept: 2 * query + 2 * key_value + self.heads.num_heads + of_norms,
            forward: by.hidden_size,
            backward: by.place.attention_backward_numbers(self.heads, by.dtype) + 3 * by.hidden_size,
        }
    }
}

impl Attention {
    pub(super) fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, attend: Attend<'_>) -> Kept {
        let spec::Attention { heads, rope, qkv, .. } = self.spec;
        let [q, k, v] = linears.project(qkv, x);
        let context = linears.context;
        let ([q, k], before_head_norms) = match self.norms(context) {
            None => match rope {
                Some(rope) => (rotate([q, k], context.layout, rope, heads, false), None),
                None => ([q, k], None),
            },
            Some(norms) => {
                let (normed, factors) = norm_and_rotate([&q, &k], norms);
                (normed, Some(([q, k], factors)))
            }
        };
        let q = self.grown(q, context);
        let attended = attend([&q, &k, &v], heads);
        let attended = match &self.sinks {
            Some(sinks) => with_sinks(attended, sinks, context.layout, heads),
            None => attended,
        };
        Kept { q, k, v, before_head_norms, attended }
    }

    pub(super) fn output(&self, kept: &Kept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        linears.forward(self.spec.output, &kept.attended.o, residual)
    }

    /// The gradient of the input if `input_grad`. `x` computes the input again.
    pub(super) fn backward(
        &self,
        dy: &Tensor<2>,
        kept: Kept,
        x: impl FnOnce() -> Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> Option<Tensor<2>> {
        let spec::Attention { heads, rope, qkv, output, .. } = self.spec;
        let context = linears.context;
        let Kept { q, k, v, before_head_norms, attended } = kept;
        let d_o = linears.backward(output, dy, &attended.o, InputGrad::Fresh);
        let d_o = d_o.unwrap_or_else(|| q.zeros_like());
        let [dq, dk, dv] = attention_backward(&d_o, [&q, &k, &v], &attended, context.layout, heads);
        drop((d_o, attended, q, k, v));
        let dq = self.grown(dq, context);
        let [dq, dk] = match (self.norms(context), before_head_norms) {
            (Some(norms), Some(([q, k], factors))) => norm_and_rotate_backward([dq, dk], [&q, &k], factors, norms),
            _ => match rope {
                Some(rope) => rotate([dq, dk], context.layout, rope, heads, true),
                None => [dq, dk],
            },
        };
        linears.project_backward(qkv, [dq, dk, dv], &x(), input_grad)
    }

    /// Queries, or their gradient, times what their positions make of them.
    fn grown(&self, q: Tensor<2>, context: &BlockContext<'_>) -> Tensor<2> {
        let growth = self.spec.rope.and_then(|rope| context.layout.table(rope).query_growth());
        let positions = context.layout.positions();
        let Some(growth) = growth.filter(|growth| positions.iter().any(|at| *at as usize >= growth.period)) else {
            return q;
        };
        let factors = positions.iter().map(|at| growth.factor(*at as usize)).collect();
        q.clone() * host::tensor(factors, [positions.len(), 1], &q.device()).cast(q.dtype())
    }

    fn norms<'a>(&'a self, context: &BlockContext<'a>) -> Option<HeadNorms<'a>> {
        let spec::Attention { rope, heads, .. } = self.spec;
        let [q, k] = self.head_norms.as_ref()?;
        Some(HeadNorms { weights: [q, k], eps: context.eps, layout: context.layout, rope: rope?, heads })
    }
}
