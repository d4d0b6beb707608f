//! Decoding: the logits of a text that grows token by token, without computing earlier tokens again.

use burn::tensor::{DType, Tensor};

use super::Model;
use super::block::BlockContext;

use crate::lora::AdapterSet;
use crate::ops::attention::attention;
use crate::ops::cached_attention::KeyValueCache;
use crate::ops::layout::Layout;
use crate::ops::linear::linear;
use crate::ops::norm::rms_norm;

/// A model, its adapters (unmerged), and the keys and values of the text so far.
///
/// The caller must keep the text within `max_position_embeddings`.
#[derive(Debug)]
pub struct Decoder<'a> {
    model: &'a Model,
    adapters: &'a AdapterSet,
    /// By layer.
    caches: Vec<KeyValueCache>,
    num_tokens: usize,
}

impl<'a> Decoder<'a> {
    /// An empty text.
    #[must_use]
    pub fn new(model: &'a Model, adapters: &'a AdapterSet) -> Self {
        let cache =
            |layer| KeyValueCache::new(model.place(), model.config.heads(layer), &model.device(), model.compute);
        let caches = (0..model.blocks.len()).map(cache).collect();
        Self { model, adapters, caches, num_tokens: 0 }
    }

    /// Tokens of the text so far.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Appends tokens and returns the logits of the next token, `[vocab_size]` in `f32`. Dropout is off.
    ///
    /// The first call processes all its tokens (the prompt) in one pass; later calls process theirs one by one.
    ///
    /// # Panics
    /// Where `token_ids` is empty.
    #[must_use]
    pub fn append(&mut self, token_ids: &[u32]) -> Tensor<1> {
        let pass_tokens = if self.num_tokens == 0 { token_ids.len() } else { 1 };
        let last = token_ids.chunks(pass_tokens).map(|token_ids| self.pass(token_ids)).last();
        let Some(last) = last else { panic!("at least one token is appended") };
        let (normed, _) = rms_norm(self.model.place(), &last, &self.model.norm, self.model.config.rms_norm_eps);
        linear(self.model.place(), &normed, &self.model.lm_head, None, None).0.cast(DType::F32).squeeze_dim(0)
    }

    /// The output of the last block for the last of `token_ids`, `[1, hidden_size]`. The first pass of a text takes any
    /// number of tokens, later passes take one token.
    fn pass(&mut self, token_ids: &[u32]) -> Tensor<2> {
        let model = self.model;
        let (start, count) = (self.num_tokens, token_ids.len());
        self.num_tokens += count;
        let positions = (start..self.num_tokens).map(|position| u32::try_from(position).unwrap_or(u32::MAX)).collect();
        let table = model.rotary_table(self.num_tokens);
        let layout = Layout::new(model.place(), 1, vec![(0, count)], positions, table, &model.device());
        let mut x = model.embed(token_ids);
        let blocks = model.blocks.iter().zip(&self.adapters.blocks).zip(&mut self.caches);
        for (layer, ((block, adapters), cache)) in blocks.enumerate() {
            let context = BlockContext::new(&model.config, layer, &layout, adapters, None);
            let activations = block.activations_with(x, &context, |q, k, v| {
                cache.append(k, v);
                if start == 0 { attention(q, k, v, &layout, context.heads) } else { cache.attend(q) }
            });
            x = block.output(&activations, &context);
        }
        x.narrow(0, count - 1, 1)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::data::batch::{Batch, Document};
    use crate::device::Dtype;
    use crate::lora::config::{InitLoraWeights, LoraConfig};
    use crate::model::load;
    use crate::model::weights::fixture::tiny_config;
    use crate::model::weights::{RandomWeights, Weights};
    use crate::spec::ModelConfig;

    /// A random model with grouped queries and adapters that change its output.
    fn fixture(config: &ModelConfig, compute: Dtype, device: &Device) -> (Model, AdapterSet) {
        let weights = Weights::Random(RandomWeights::new(config, 3));
        let model = load::load(config, &weights, compute, compute, device).unwrap();
        let lora = LoraConfig { r: 3, ..LoraConfig::default() };
        let selection = lora.select(config.num_hidden_layers).unwrap();
        let mut adapters = AdapterSet::new(config, &selection, InitLoraWeights::Gaussian, 0.0, 5, device);
        for adapter in adapters.iter_mut() {
            let [out_features, r] = adapter.matrices.b.dims();
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let values = (0..out_features * r).map(|i| ((i * 37 % 101) as f32 - 50.0) / 400.0).collect();
            adapter.matrices.b = crate::ops::host::tensor(values, [out_features, r], device);
        }
        (model, adapters)
    }

    /// Largest difference from the logits of the full pass, relative to the largest logit, over all splits.
    fn worst_difference(config: &ModelConfig, compute: Dtype, device: &Device, num_tokens: usize) -> f32 {
        let (model, adapters) = fixture(config, compute, device);
        #[expect(clippy::cast_possible_truncation, reason = "below the size of the vocabulary")]
        let ids: Vec<u32> = (0..num_tokens).map(|i| (i * 89 % config.vocab_size) as u32).collect();
        let batch = Batch {
            input_ids: ids.clone(),
            row_lengths: vec![num_tokens],
            documents: vec![Document { start: 0, len: num_tokens }],
            ..Batch::default()
        };
        let values = |logits: Tensor<1>| logits.into_data().try_to_vec::<f32>().unwrap();
        let all = values(model.logits(&batch, &adapters).flatten(0, 1));
        let rows: Vec<&[f32]> = all.chunks(config.vocab_size).collect();
        let scale = all.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        assert!(scale > 0.5, "the logits say something: {scale}");
        let mut worst = 0.0_f32;
        for split in [1, 2, num_tokens / 2, num_tokens - 1] {
            let mut decoder = Decoder::new(&model, &adapters);
            let mut logits = decoder.append(&ids[..split]);
            for position in split..=num_tokens {
                let found = values(logits.clone());
                let differences = found.iter().zip(rows[position - 1]).map(|(a, b)| (a - b).abs());
                worst = differences.fold(worst, f32::max);
                if position < num_tokens {
                    logits = decoder.append(&ids[position..=position]);
                }
            }
            assert_eq!(decoder.num_tokens(), num_tokens);
        }
        worst / scale
    }

    /// Makes logits of about size 1, so that differences are meaningful.
    fn config(window: Option<usize>) -> ModelConfig {
        let tiny = tiny_config();
        let windows = vec![window; tiny.num_hidden_layers];
        let config = ModelConfig { initializer_range: 0.15, windows, ..tiny };
        assert!(config.num_key_value_heads < config.num_attention_heads);
        config
    }

    #[test]
    fn prompt_and_single_tokens_give_the_logits_of_the_full_pass() {
        for window in [None, Some(1), Some(6)] {
            let worst = worst_difference(&config(window), Dtype::F32, &Device::flex(), 40);
            assert!(worst < 1e-4, "window {window:?}: {worst}");
        }
    }

    #[test]
    fn it_holds_in_plain_tensor_calls_and_when_the_cache_grows() {
        // The kernels do not run for tensors on an autodiff device.
        let device = Device::flex().autodiff();
        for (window, num_tokens) in [(None, 20), (Some(6), 20), (None, 270)] {
            let worst = worst_difference(&config(window), Dtype::F32, &device, num_tokens);
            assert!(worst < 1e-4, "window {window:?}, {num_tokens} tokens: {worst}");
        }
    }

    #[test]
    fn half_precision_stays_within_its_rounding() {
        let worst = worst_difference(&config(Some(6)), Dtype::Bf16, &Device::flex(), 20);
        assert!(worst < 0.03, "{worst}");
    }

    #[test]
    fn several_tokens_can_follow_the_prompt_at_once() {
        let (model, adapters) = fixture(&config(None), Dtype::F32, &Device::flex());
        let (mut one, mut many) = (Decoder::new(&model, &adapters), Decoder::new(&model, &adapters));
        let _ = (one.append(&[1, 2]), many.append(&[1, 2]));
        let _ = one.append(&[3]);
        assert_eq!(one.append(&[4]).to_data(), many.append(&[3, 4]).to_data());
    }
}
