//! What a place is like: for plans, and for what is laid out for it.

use std::fmt::Debug;

use super::Place;
use crate::device::Dtype;
use crate::ops::plain::attention::chunk::chunk_len;
use crate::ops::plain::cross_entropy::{PLAIN_MULTIPLE, most_plain_targets};
use crate::ops::plain::delta_rule::plain_delta_rule_numbers;
use crate::ops::product::F32Products;
use crate::spec::{DeltaHeads, Heads};

/// What a place is like.
pub trait Properties: Debug + Send + Sync {
    /// How operands in `f32` are multiplied in plain tensor calls.
    fn f32_products(&self) -> F32Products {
        F32Products::OfDevice
    }

    /// This place with these products, where it has a choice.
    fn with_f32_products(&self, _products: F32Products) -> Option<Place> {
        None
    }

    /// This place with attention that rounds its operands to bfloat16, where activations may have another type.
    fn with_rounding(&self, _rounds: bool) -> Option<Place> {
        None
    }

    /// This place for the next tokens of up to [`MOST_TEXTS`](crate::ops::cpu::MOST_TEXTS) texts, each of which gets the bits that it
    /// gets alone, where that depends on how many they are.
    fn of_texts(&self) -> Option<Place> {
        None
    }

    /// Whether its tensors are in host memory, and autodiff does not track them.
    fn is_host(&self) -> bool {
        false
    }

    /// Whether the rows of a micro-batch must have one length.
    fn pads_rows(&self) -> bool {
        true
    }

    /// Whether its products take matrices as blocks of GGUF.
    fn takes_blocks(&self) -> bool {
        false
    }

    /// Type of the activations where products are computed in `compute`: another one if only operands are rounded to that.
    fn activation_dtype(&self, compute: Dtype) -> Dtype {
        compute
    }

    /// Bytes of the rounded copy that a product in `compute` makes of `numbers` activations of another type.
    fn rounded_bytes(&self, _numbers: usize, _compute: Dtype) -> usize {
        0
    }

    /// Whether products with several weights of one input are one where these lie one below the other in memory.
    fn stacks_weights(&self) -> bool {
        false
    }

    /// Whether operands of products are copied in another type.
    fn copies_operands(&self) -> bool {
        true
    }

    /// Temporary bytes in the backward of a low-rank update of a layer `[out_features, in_features]`; `None` where its
    /// gradients are products in `f32`.
    fn low_rank_bytes(&self, _shape: [usize; 2], _tokens: usize, _rank: usize, _dtype: Dtype) -> Option<usize> {
        None
    }

    /// Temporary bytes of products with a matrix of this shape as E4M3 with one scale, as which it is kept; `None` where it is
    /// decoded.
    fn eight_bit_bytes(&self, _shape: [usize; 2], _tokens: usize, _dtype: Dtype) -> Option<usize> {
        None
    }

    /// Whether the outputs of several layers of one input, and a gate's gradient and that of what it gates, share memory, which is
    /// free when none of them is kept.
    fn joins_outputs(&self, _dtype: Dtype) -> bool {
        false
    }

    /// Temporary numbers for each token in the backward of an attention, beside those of width `hidden_size`.
    fn attention_backward_numbers(&self, heads: Heads, dtype: Dtype) -> usize {
        // By head: operands, and in half precision also in `f32`; the gradients of keys and values are summed in `f32`. By
        // token: the gradients of the output and of the queries.
        let as_f32 = if dtype.num_bytes() < size_of::<f32>() { size_of::<f32>() / dtype.num_bytes() } else { 0 };
        (4 + 2 * as_f32) * heads.query_width() + (2 + 2 * as_f32 + 2 * as_f32.max(1)) * heads.key_value_width()
    }

    /// Temporary bytes for scores of rows `[rows, length]`: a chunk, its exponentials and gradients.
    fn score_bytes(&self, [rows, length]: [usize; 2], heads: Heads, _dtype: Dtype) -> usize {
        let of_chunk = rows * heads.num_heads * chunk_len([rows, length], heads) * length * size_of::<f32>();
        // The slope of a cap is as large.
        (4 + usize::from(heads.soft_cap.is_some())) * of_chunk
    }

    /// Temporary numbers for each token in the forward and in the backward of a delta rule, beside its inputs and outputs.
    fn delta_rule_numbers(&self, heads: DeltaHeads, dtype: Dtype) -> [usize; 2] {
        plain_delta_rule_numbers(heads, dtype)
    }

    /// Bytes that its libraries take beside tensors.
    fn library_bytes(&self) -> usize {
        0
    }

    /// Bytes of memory that sums over several processes take beside their numbers.
    fn exchange_bytes(&self) -> usize {
        0
    }

    /// Temporary bytes for each logit of a chunk of targets: logits and their gradient in the type of the activations; in f32
    /// the probabilities, those less the targets, and the gradient, which fusion leaves where a product is not fused.
    fn bytes_per_logit(&self, dtype: Dtype) -> usize {
        2 * dtype.num_bytes() + 3 * size_of::<f32>()
    }

    /// Target tokens whose logits exist at a time by default, for a head `[vocab_size, hidden_size]`.
    fn most_targets(&self, head: [usize; 2]) -> usize {
        most_plain_targets(head)
    }

    /// The number of targets fills up a multiple of this.
    fn target_multiple(&self) -> usize {
        PLAIN_MULTIPLE
    }

    /// Whether the experts of a mixture are computed together in this type, where matrices allow it.
    fn has_experts(&self, _dtype: Dtype) -> bool {
        false
    }
}
