//! Floating-point operations that a step of LoRA needs, however it is computed: the numerator of MFU.

use super::workload::Workload;
use crate::data::batch::{Batch, Document};
use crate::spec::{Block, Heads, ModelConfig, Site, Sublayer};
use crate::train::inputs::longest_sharing;
use crate::train::objective::needs;
use crate::util::stats::as_f64;

/// Model FLOPs of forward and backward, as coefficients.
///
/// A product with a frozen weight of `n` numbers takes `2n` per token in the forward and `2n` for the gradient of its
/// input. There is no weight gradient, so the sum is `4n`; of the experts, only those that a token passes are counted.
/// The adapters' own products take `6` per parameter. Attention takes two products in the forward and four in the backward
/// for every visible pair of query and key: `12 * head_dim` per head. Blocks before the first that is trained have no
/// backward. The head is counted only for tokens that carry loss. Recomputation by gradient checkpointing is not counted
/// (Chowdhery et al., 2022, appendix B). A gated delta rule takes three times its forward, which is counted in chunks:
/// the products of tokens with the state, and with each other in a chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct StepFlops {
    per_token: f64,
    per_target_token: f64,
    /// Heads and products, in forward and backward, of every attention.
    attentions: Vec<(Heads, usize)>,
    /// Of a second forward, without attention.
    second_per_token: f64,
    /// Attentions before it, in blocks that have no backward.
    num_attentions_once: usize,
    /// Those of a forward of the reference, which are in the others.
    of_reference: Option<Box<Self>>,
    /// See [`longest_sharing`].
    longest_sharing: usize,
}

impl Workload<'_> {
    /// The FLOPs of its steps: of what is trained by its objective, which may need a forward of the reference beside, on its place,
    /// which may compute once what documents begin with alike. Of the modules among what is trained, the gradient of the head takes
    /// as much as its output, embeddings and norms next to nothing.
    #[must_use]
    pub fn flops(&self) -> StepFlops {
        let Self { config, selection, objective, .. } = self;
        let longest_sharing = longest_sharing(self.place, config, self.is_noisy);
        let counts = |num_trainable, first_trained| StepFlops {
            longest_sharing,
            ..StepFlops::new(config, num_trainable, first_trained)
        };
        let of_adapters = selection.num_active_parameters(config);
        let num_trainable = of_adapters + objective.num_score_parameters(config.hidden_size);
        let mut flops = counts(num_trainable, selection.first_trained());
        if objective.scores() {
            flops.per_target_token = 0.0;
        }
        if needs(objective).reference.is_some() {
            let base = counts(0, config.num_layers());
            let reference = StepFlops { per_target_token: 0.5 * base.per_target_token, ..base };
            flops.per_token += reference.per_token;
            flops.per_target_token += reference.per_target_token;
            flops.attentions.iter_mut().for_each(|(_, products)| *products += 2);
            flops.of_reference = Some(Box::new(reference));
        }
        let head = selection.modules().filter(|(full, _)| full.is_head()).map(|(_, [rows, columns])| rows * columns);
        flops.per_target_token += as_f64(2 * head.sum::<usize>());
        flops
    }
}

impl StepFlops {
    /// The counts for a model with `num_trainable` parameters in its adapters, and the first block that has a backward.
    fn new(config: &ModelConfig, num_trainable: usize, first_trained: usize) -> Self {
        let of_blocks = |blocks: &[Block], of_weight: f64, of_others: usize| {
            let weights = blocks.iter().flat_map(|block| &block.sites).map(Site::num_active_weights).sum::<f64>();
            let others = blocks.iter().flat_map(|block| &block.sublayers).map(Sublayer::flops_per_token);
            let of_streams = blocks.iter().filter_map(|block| Some(block.streams?.flops_per_token(config.hidden_size)));
            of_weight * weights + as_f64(of_others * (others.sum::<usize>() + of_streams.sum::<usize>()))
        };
        let heads = |blocks: &[Block]| {
            blocks.iter().filter_map(|block| Some(block.attention()?.mean_heads())).collect::<Vec<_>>()
        };
        let (before, trained) = config.blocks.split_at(first_trained.min(config.num_layers()));
        let of_trained = of_blocks(trained, 4.0, 3) + as_f64(6 * num_trainable);
        let (once, thrice) = (heads(before), heads(trained));
        let num_attentions_once = once.len();
        let once = once.into_iter().map(|heads| (heads, 2));
        // The others are made of the first in a forward, and joined in both passes.
        let of_streams = as_f64(6 * config.stream_projections()[0].len() * config.hidden_size.pow(2));
        Self {
            per_token: of_blocks(before, 2.0, 1) + of_trained + of_streams,
            per_target_token: as_f64(4 * config.vocab_size * config.hidden_size),
            attentions: once.chain(thrice.into_iter().map(|heads| (heads, 6))).collect(),
            second_per_token: 0.5 * of_trained,
            num_attentions_once,
            of_reference: None,
            longest_sharing: 0,
        }
    }

    /// FLOPs of the reference's forward of a micro-batch, which are among [its own](Self::of).
    #[must_use]
    pub fn of_reference(&self, batch: &Batch) -> f64 {
        self.of_reference.as_ref().map_or(0.0, |reference| reference.of(batch))
    }

    /// FLOPs of one micro-batch.
    #[must_use]
    pub fn of(&self, batch: &Batch) -> f64 {
        let batch = &*batch.sharing_prefixes(self.longest_sharing);
        let of_document = |(index, document): (usize, &Document)| {
            let before = batch.prefix(index).len();
            self.of_attention(before + document.len) - self.of_attention(before)
        };
        self.per_token * as_f64(batch.num_tokens())
            + self.per_target_token * as_f64(batch.num_target_tokens())
            + batch.documents.iter().enumerate().map(of_document).sum::<f64>()
    }

    /// The counts of an evaluation: forwards alone.
    #[must_use]
    pub fn of_evaluation(&self) -> Self {
        let products = |index: usize| if index < self.num_attentions_once { 0 } else { 4 };
        let attentions = self.attentions.iter().enumerate();
        Self {
            per_token: self.per_token - self.second_per_token,
            per_target_token: 0.5 * self.per_target_token,
            attentions: attentions.map(|(index, (heads, all))| (*heads, all - products(index))).collect(),
            ..self.clone()
        }
    }

    /// FLOPs spent on tokens of padding, in addition to those that a micro-batch [needs](Self::of).
    #[must_use]
    pub fn of_padding(&self, num_tokens: usize) -> f64 {
        self.per_token * as_f64(num_tokens)
    }

    /// FLOPs of one row of `len` tokens, where each token except the last predicts the next.
    #[must_use]
    pub fn of_full_row(&self, len: usize) -> f64 {
        self.per_token * as_f64(len) + self.per_target_token * as_f64(len.saturating_sub(1)) + self.of_attention(len)
    }

    /// FLOPs of a row's second forward through all blocks that have a backward, which gradient checkpointing makes; without
    /// attention, where that is kept. Adapters and delta rules count for half, too, though it is a third of them.
    #[must_use]
    pub fn of_second_forward(&self, len: usize, keeps_attention: bool) -> f64 {
        let again = self.attentions.iter().skip(self.num_attentions_once).map(|(heads, _)| of_product(heads, len));
        let of_attention = if keeps_attention { 0 } else { 2 * again.sum::<usize>() };
        self.second_per_token * as_f64(len) + as_f64(of_attention)
    }

    /// FLOPs of all attentions in a document of `len` tokens.
    pub(super) fn of_attention(&self, len: usize) -> f64 {
        as_f64(self.attentions.iter().map(|(heads, products)| products * of_product(heads, len)).sum::<usize>())
    }
}

/// FLOPs of one product of an attention in a document of `len` tokens.
fn of_product(heads: &Heads, len: usize) -> usize {
    2 * heads.query_width() * heads.visible_pairs(len)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::batch::Target;

    fn config(window: Option<usize>) -> ModelConfig {
        let json = json!({
            "model_type": "mistral", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "tie_word_embeddings": true,
            "sliding_window": window, "bos_token_id": null, "eos_token_id": null,
        });
        ModelConfig::from_json(&json.to_string()).unwrap()
    }

    fn batch() -> Batch {
        Batch {
            input_ids: vec![1; 8],
            row_lengths: vec![5, 3],
            documents: vec![Document { start: 0, len: 5 }, Document { start: 5, len: 3 }],
            targets: vec![Target { position: 1, token: 2 }, Target { position: 6, token: 2 }],
            ..Batch::default()
        }
    }

    #[test]
    fn padding_needs_nothing_and_only_targets_need_the_head() {
        // Block: q 4x4, k and v 2x4, o 4x4, gate, up and down 4x8: 16 + 8 + 8 + 16 + 96 = 144 numbers, two blocks.
        let tokens = 8.0 * (4.0 * 288.0 + 6.0 * 7.0);
        let head = 2.0 * 4.0 * 40.0;
        // 15 + 6 pairs, 2 layers of 2 heads of 2.
        let attention = 21.0 * 12.0 * 8.0;
        let flops = StepFlops::new(&config(None), 7, 0).of(&batch());
        assert!((flops - (tokens + head + attention)).abs() < 1e-6, "{flops}");
    }

    #[test]
    fn an_evaluation_takes_a_third_of_attention_and_half_of_what_else_a_step_takes() {
        for first_trained in [0, 1] {
            let flops = StepFlops::new(&config(None), 0, first_trained);
            let once = 15.0 + 6.0;
            let (tokens, head) = (8.0 * 2.0 * 288.0, 2.0 * 2.0 * 40.0);
            // Two products, 2 layers of 2 heads of 2.
            let attention = once * 2.0 * 2.0 * 2.0 * 4.0;
            let found = flops.of_evaluation().of(&batch());
            assert!((found - (tokens + head + attention)).abs() < 1e-6, "{found}");
        }
    }

    #[test]
    fn padding_takes_the_products_of_its_places() {
        let padding = StepFlops::new(&config(None), 7, 0).of_padding(2);
        assert!((padding - 2.0 * (4.0 * 288.0 + 6.0 * 7.0)).abs() < 1e-6, "{padding}");
    }

    #[test]
    fn a_second_forward_takes_half_of_the_products_and_a_third_of_attention_unless_it_is_kept() {
        let flops = StepFlops::new(&config(None), 7, 0);
        let products = 0.5 * 3.0 * (4.0 * 288.0 + 6.0 * 7.0);
        let [with, without] = [false, true].map(|keeps_attention| flops.of_second_forward(3, keeps_attention));
        assert!((without - products).abs() < 1e-6, "{without}");
        // 6 pairs, 2 layers of 2 heads of 2.
        assert!((with - (products + 6.0 * 4.0 * 8.0)).abs() < 1e-6, "{with}");
    }

    #[test]
    fn blocks_before_the_first_trained_have_a_forward_alone() {
        let flops = StepFlops::new(&config(None), 7, 1);
        // Of a block 144 numbers, and with 6 pairs 6 times 4 times 2 for a product of its attention.
        let products = 3.0 * (2.0 * 144.0 + 4.0 * 144.0 + 6.0 * 7.0);
        let row = products + 2.0 * 4.0 * 40.0 + (2.0 + 6.0) * 48.0;
        assert!((flops.of_full_row(3) - row).abs() < 1e-6, "{}", flops.of_full_row(3));
        let second = 0.5 * 3.0 * (4.0 * 144.0 + 6.0 * 7.0) + 2.0 * 48.0;
        assert!((flops.of_second_forward(3, false) - second).abs() < 1e-6, "{}", flops.of_second_forward(3, false));
    }

    #[test]
    fn a_delta_rule_takes_as_much_for_every_token_and_the_attention_beside_it_more_for_later_ones() {
        let json = json!({
            "model_type": "qwen3_5_text", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
        });
        let flops = StepFlops::new(&ModelConfig::from_json(&json.to_string()).unwrap(), 0, 0);
        // qkv 16, z 10, b 2, a 2 and out 10 by 4; q and its gate 32, k 8, v 8, o 16 by 4; gate, up and down 8 by 4, twice.
        let weights = 4.0 * (40.0 + 64.0 + 48.0);
        // Two states of 3 x 5 in three products, and 65 tokens by keys and values in two each.
        let rule = 2.0 * (6.0 * 15.0 + 65.0 * (2.0 * 3.0 + 2.0 * 5.0));
        assert!((flops.of_padding(1) - (4.0 * weights + 3.0 * rule)).abs() < 1e-6, "{}", flops.of_padding(1));
        assert!((flops.of_attention(3) - 12.0 * 16.0 * 6.0).abs() < 1e-6, "{}", flops.of_attention(3));
    }

    #[test]
    fn a_sliding_window_limits_the_pairs() {
        let attention = |window, len| StepFlops::new(&config(window), 0, 0).of_attention(len) / (12.0 * 4.0);
        assert_eq!((attention(Some(2), 5), attention(Some(2), 1)), (f64::from(2 * (1 + 4 * 2)), 2.0));
        assert_eq!(attention(None, 5), f64::from(2 * 15));
    }
}
