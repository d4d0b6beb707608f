//! The attention of a block: projections, norms of heads, rotary embedding, attention.

use burn::tensor::Tensor;

use super::budget::{SizedBy, SublayerSizes};
use super::context::{Attend, BlockContext};
use super::linears::Linears;
use crate::ops::attention::{Attended, attention_backward};
use crate::ops::linear::InputGrad;
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::rotary::rotate;
use crate::spec;

/// An attention and its own frozen weights.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Its shape.
    pub spec: spec::Attention,
    /// Weights of the norms of every query and key head, each `[head_dim]`, where the family has them.
    pub head_norms: Option<[Tensor<1>; 2]>,
}

/// What the backward needs of the forward.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// After the rotary embedding, `[tokens, num_heads * head_dim]`.
    q: Tensor<2>,
    /// After the rotary embedding, `[tokens, num_kv_heads * head_dim]`.
    k: Tensor<2>,
    v: Tensor<2>,
    /// Queries and keys before their norms, where the family has them.
    before_head_norms: [Option<HeadNormInput>; 2],
    attended: Attended,
}

/// What the backward of a head norm needs: its input, `[tokens * heads, head_dim]`, and the factor of each head.
type HeadNormInput = (Tensor<2>, Tensor<1>);

impl spec::Attention {
    /// Sizes of its tensors.
    pub(super) fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (query, key_value) = (self.heads.query_width(), self.heads.key_value_width());
        // Queries and keys before their norms, and a factor for each head.
        let of_norms = query + key_value + self.heads.num_heads + self.heads.num_kv_heads;
        let of_norms = if self.has_head_norms { of_norms } else { 0 };
        SublayerSizes {
            kept: 2 * query + 2 * key_value + self.heads.num_heads + of_norms,
            forward: by.hidden_size,
            backward: by.place.attention_backward_numbers(self.heads, by.dtype) + 3 * by.hidden_size,
        }
    }
}

impl Attention {
    pub(super) fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, attend: Attend<'_>) -> Kept {
        let spec::Attention { heads, rope, qkv: [query, key, value], .. } = self.spec;
        let (context, layout) = (linears.context, linears.context.layout);
        let (q, q_input) = self.norm_heads(0, linears.forward(query, x, None), context);
        let (k, k_input) = self.norm_heads(1, linears.forward(key, x, None), context);
        let q = rotate(q, layout, rope, heads.num_heads, false);
        let k = rotate(k, layout, rope, heads.num_kv_heads, false);
        let v = linears.forward(value, x, None);
        let attended = attend([&q, &k, &v], heads);
        Kept { q, k, v, before_head_norms: [q_input, k_input], attended }
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
        let spec::Attention { heads, rope, qkv: [query, key, value], output, .. } = self.spec;
        let (context, layout) = (linears.context, linears.context.layout);
        let Kept { q, k, v, before_head_norms, attended } = kept;
        let d_o = linears.backward(output, dy, &attended.o, InputGrad::Fresh);
        let d_o = d_o.unwrap_or_else(|| q.zeros_like());
        let [dq, dk, dv] = attention_backward(&d_o, [&q, &k, &v], &attended, layout, heads);
        drop((d_o, attended, q, k, v));
        let dq = rotate(dq, layout, rope, heads.num_heads, true);
        let dk = rotate(dk, layout, rope, heads.num_kv_heads, true);
        let [q_input, k_input] = before_head_norms;
        let dq = self.norm_heads_backward(0, dq, q_input, context);
        let dk = self.norm_heads_backward(1, dk, k_input, context);
        let x = x();
        let sum = |dx: Option<Tensor<2>>| match dx {
            _ if !input_grad => InputGrad::Skip,
            Some(dx) => InputGrad::AddTo(dx),
            None => InputGrad::Fresh,
        };
        let dx = linears.backward(query, &dq, &x, sum(None));
        let dx = linears.backward(key, &dk, &x, sum(dx));
        linears.backward(value, &dv, &x, sum(dx))
    }

    /// Norms every head of queries (`which` = 0) or keys (1), if the family has such norms.
    fn norm_heads(&self, which: usize, x: Tensor<2>, context: &BlockContext<'_>) -> (Tensor<2>, Option<HeadNormInput>) {
        let Some(norms) = &self.head_norms else { return (x, None) };
        let ([tokens, width], [head_dim]) = (x.dims(), norms[which].dims());
        let x = x.reshape([tokens * width / head_dim, head_dim]);
        let (y, rstd) = rms_norm(context.place(), &x, &norms[which], context.eps);
        (y.reshape([tokens, width]), Some((x, rstd)))
    }

    /// The gradient of [`norm_heads`](Self::norm_heads) with respect to its input.
    fn norm_heads_backward(
        &self,
        which: usize,
        dy: Tensor<2>,
        input: Option<HeadNormInput>,
        context: &BlockContext<'_>,
    ) -> Tensor<2> {
        let (Some(norms), Some((x, rstd))) = (&self.head_norms, input) else { return dy };
        let shape = dy.dims();
        let dy = dy.reshape(x.dims());
        rms_norm_backward(context.place(), &dy, &x, &norms[which], &rstd, dy.zeros_like()).reshape(shape)
    }
}
