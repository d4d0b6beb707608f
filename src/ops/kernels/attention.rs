//! Attention, the gate of its output, and its memory of earlier tokens.

use burn::tensor::{DType, Device, Tensor};

use super::Properties;
use crate::ops::plain::attention::both_ways::plain_both_ways;
use crate::ops::plain::attention::{Attended, AttentionInputs, plain_attention, plain_attention_backward};
use crate::ops::plain::cached_attention::{CachedKeyValues, TextsOnDevice, plain_append, plain_attend};
use crate::ops::plain::gates::{plain_gate_output, plain_gate_output_backward};
use crate::spec::Heads;

/// Attention, as in [`attention`](crate::ops::attention), [`output_gate`](crate::ops::output_gate) and
/// [`cached_attention`](crate::ops::cached_attention).
#[expect(missing_docs, reason = "the doors describe the operations")]
pub trait Attention: Properties {
    fn attention(&self, inputs: AttentionInputs<'_>) -> Attended {
        plain_attention(self.f32_products(), inputs)
    }

    fn attention_backward(&self, d_o: &Tensor<2>, attended: &Attended, inputs: AttentionInputs<'_>) -> [Tensor<2>; 3] {
        plain_attention_backward(self.f32_products(), d_o, attended, inputs)
    }

    fn attention_both_ways(&self, qkv: [&Tensor<2>; 3], groups: &[[usize; 2]], heads: Heads) -> Tensor<2> {
        plain_both_ways(self.f32_products(), qkv, groups, heads)
    }

    fn gate_output(&self, o: &Tensor<2>, gate: &Tensor<2>) -> Tensor<2> {
        plain_gate_output(o, gate)
    }

    fn gate_output_backward(&self, dy: Tensor<2>, o: &Tensor<2>, gate: Tensor<2>) -> [Tensor<2>; 2] {
        plain_gate_output_backward(dy, o, gate)
    }

    /// Memory for keys and values of a text.
    fn cache(&self, heads: Heads, device: &Device, dtype: DType) -> CachedKeyValues {
        CachedKeyValues::on_device(heads, device, dtype)
    }

    fn append(&self, texts: TextsOnDevice, kv: [&Tensor<2>; 2]) -> Vec<[Tensor<3>; 2]> {
        plain_append(texts, kv)
    }

    fn attend(&self, texts: &TextsOnDevice, q: &Tensor<2>) -> Attended {
        plain_attend(self.f32_products(), texts, q)
    }
}
