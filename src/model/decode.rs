//! Decoding: the logits of texts that grow token by token, without computing earlier tokens again.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::Tensor;

use super::Model;
use super::context::BlockContext;
use super::embed::{Embedded, Tokens};
use super::mixing::{InCaches, LayerCache, rows_of_texts};
use crate::lora::{AdapterSet, BlockAdapters};
use crate::ops::kernels::{self, Place};
use crate::spec::{Attention, Block};

/// The tokens of a text that a model has seen, with what its layers keep of them.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// By layer.
    caches: Vec<LayerCache>,
    token_ids: Vec<u32>,
    /// Of the rotary frequencies of the keys, which may depend on the length of a text.
    reaches: Vec<usize>,
}

impl Sequence {
    /// An empty text.
    #[must_use]
    pub fn new(model: &Model) -> Self {
        let of_block = |block: &Block| LayerCache::of_all(block.sublayers.iter().filter_map(|it| it.cache(model)));
        let caches = model.config.blocks.iter().map(of_block).collect();
        Self { caches, token_ids: Vec::new(), reaches: Vec::new() }
    }

    /// Number of tokens so far.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Whether it is that text.
    #[must_use]
    pub fn has_seen(&self, token_ids: &[u32]) -> bool {
        self.token_ids == token_ids
    }

    /// The tokens so far.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// Whether [`truncate`](Self::truncate) can leave some tokens: a state of all tokens cannot go back to some of them, and keys
    /// that turn by the length of a text are another's.
    #[must_use]
    pub fn can_go_back(&self, model: &Model) -> bool {
        !self.caches.iter().any(LayerCache::is_state) && !keys_depend_on_length(model)
    }

    /// Keeps the tokens that `token_ids` starts with, but not all of it, and returns how many these are: the rest is still to
    /// be passed to the model.
    pub fn keep_start_of(&mut self, token_ids: &[u32]) -> usize {
        let equal = self.token_ids.iter().zip(token_ids).take_while(|(a, b)| a == b).count();
        let kept = equal.min(token_ids.len().saturating_sub(1));
        let is_lost = kept < self.num_tokens() && self.caches.iter().any(LayerCache::is_state);
        let kept = if is_lost { 0 } else { kept };
        self.truncate(kept);
        kept
    }

    /// Forgets all tokens but the first `num_tokens`; a state forgets all.
    pub fn truncate(&mut self, num_tokens: usize) {
        if num_tokens >= self.num_tokens() {
            return;
        }
        self.token_ids.truncate(num_tokens);
        self.caches.iter_mut().for_each(|cache| cache.truncate(num_tokens));
    }
}

/// The next tokens of a text, and the adapters (unmerged) that it is written with.
#[derive(Debug)]
pub struct NextTokens<'a> {
    /// The text so far; the caller keeps it within `max_position_embeddings`.
    pub sequence: &'a mut Sequence,
    /// The adapters; [`AdapterSet::none`] for the base model alone.
    pub adapters: &'a AdapterSet,
    /// One token or more; where there are several parts, at most [`MOST_TEXTS`](crate::ops::cpu::MOST_TEXTS) in all.
    pub token_ids: &'a [u32],
    /// The logits after so many of its last tokens are wanted.
    pub num_logits: usize,
}

/// Appends tokens to texts and returns the logits that their parts want, one behind the other, `[.., vocab_size]` in `f32`. Dropout
/// is off.
///
/// On the CPU the logits of a text are the same to the bit whatever other texts are in the pass.
#[must_use]
pub fn next_logits(model: &Model, parts: &mut [NextTokens<'_>]) -> Tensor<2> {
    // Modules in place of the model's are those of all texts in a pass.
    let is_one = parts.windows(2).all(|pair| std::ptr::eq(pair[0].adapters, pair[1].adapters));
    if !is_one && parts.iter().any(|part| part.adapters.adapts_experts()) {
        // Rows of an expert are of all texts.
        let of_one = parts.chunk_by_mut(|one, two| std::ptr::eq(one.adapters, two.adapters));
        return Tensor::cat(of_one.map(|parts| next_logits(model, parts)).collect(), 0);
    }
    let have_modules = parts.iter().any(|part| part.adapters.full.replaces_modules());
    let see_ahead = parts.iter().any(|part| model.sees_ahead(part.token_ids));
    if !keys_depend_on_length(model) && !see_ahead && (is_one || !have_modules) {
        return kernels::run(model.place(), || logits_of_last(model, parts));
    }
    // Where the rotary frequencies depend on the length of a text, each has its own, and keys are computed again when they change.
    // Where tokens see others behind them, a text begins anew.
    let each = parts.iter_mut().map(|part| {
        let num_tokens = part.sequence.num_tokens();
        let end = num_tokens + part.token_ids.len();
        let reaches: Vec<usize> = model.config.ropes.iter().map(|rope| rope.reach(end)).collect();
        let before = std::mem::replace(&mut part.sequence.reaches, reaches);
        if num_tokens == 0 || before == part.sequence.reaches && !model.sees_ahead(part.token_ids) {
            return kernels::run(model.place(), || logits_of_last(model, std::slice::from_mut(part)));
        }
        let token_ids = [&part.sequence.token_ids, part.token_ids].concat();
        part.sequence.truncate(0);
        let part = NextTokens { sequence: part.sequence, token_ids: &token_ids, ..*part };
        kernels::run(model.place(), || logits_of_last(model, &mut [part]))
    });
    Tensor::cat(each.collect(), 0)
}

/// Whether keys turn by the length of their text.
fn keys_depend_on_length(model: &Model) -> bool {
    model.config.ropes.iter().any(|rope| rope.reach(usize::MAX) > 0)
}

fn logits_of_last(model: &Model, parts: &mut [NextTokens<'_>]) -> Tensor<2> {
    let lengths: Vec<usize> = parts.iter().map(|part| part.token_ids.len()).collect();
    let place = model.place();
    let place = place.of_texts().filter(|_| parts.len() > 1).unwrap_or(place);
    let x = last_block(model, place, parts, &lengths);
    let num_logits: Vec<usize> = parts.iter().map(|part| part.num_logits).collect();
    let mut end = 0;
    let lasts = lengths.iter().zip(&num_logits).map(|(length, wanted)| {
        end += length;
        x.clone().narrow(0, end - wanted, *wanted)
    });
    let last = if lengths == num_logits { x.clone() } else { Tensor::cat(lasts.collect(), 0) };
    let norm = parts.first().map_or_else(|| model.norm.clone(), |part| model.own_norm(part.adapters));
    let (normed, _) = norm.forward(place, &last, model.config.rms_norm_eps);
    let of_rows = |(texts, adapters): (Range<usize>, &AdapterSet)| {
        let normed = normed.clone().narrow(0, texts.start, texts.len());
        model.own_head(adapters).head().logits(place, &normed)
    };
    Tensor::cat(by_token_rows(parts, &num_logits).into_iter().map(of_rows).collect(), 0)
}

/// The output of the last block for the new tokens, `[tokens, hidden_size]`.
fn last_block(model: &Model, place: Place, parts: &mut [NextTokens<'_>], lengths: &[usize]) -> Tensor<2> {
    let is_start = matches!(parts, [part] if part.sequence.num_tokens() == 0);
    let token_ids: Vec<u32> = parts.iter().flat_map(|part| part.token_ids).copied().collect();
    let position_of = |part: &NextTokens<'_>| {
        let start = part.sequence.num_tokens();
        start..start + part.token_ids.len()
    };
    let positions: Vec<u32> =
        parts.iter().flat_map(position_of).map(|position| u32::try_from(position).unwrap_or(u32::MAX)).collect();
    let mut start = 0;
    let continued = parts.iter().zip(lengths).map(|(part, length)| {
        start += length;
        (start - length, &part.sequence.token_ids[..])
    });
    let continued: Vec<_> = continued.collect();
    let tokens = Tokens::new(model, &token_ids, 1, vec![(0, token_ids.len())], positions, (&[], &continued));
    for part in &mut *parts {
        part.sequence.token_ids.extend(part.token_ids);
    }
    let caches = parts.first().map_or(&[][..], |part| &part.sequence.caches);
    let texts = rows_of_texts(caches, lengths);
    let (by_rows, none) = (by_rows(parts, lengths), BlockAdapters::default());
    let Embedded { mut x, mut between_blocks } = model.embed_by_rows(place, &tokens, by_token_rows(parts, lengths));
    for (layer, block) in model.walk(0..model.blocks.len()) {
        let block = match parts.first() {
            Some(part) => model.with_own_norms(layer, &block, part.adapters),
            None => Cow::Borrowed(&*block),
        };
        let of_layer: Vec<_> = by_rows.iter().map(|(rows, adapters)| (rows.clone(), &adapters.blocks[layer])).collect();
        let (adapters, by_rows) = match &of_layer[..] {
            [(_, adapters)] => (*adapters, &[][..]),
            several => (&none, several),
        };
        let context = BlockContext { by_rows, ..between_blocks.context(place, &model.config, layer, adapters, None) };
        let earlier = model.config.blocks[layer].attention().and_then(Attention::key_value_layer);
        let caches = parts.iter_mut().map(|part| &mut part.sequence.caches[earlier.unwrap_or(layer)]).collect();
        let is_appended = earlier.is_some();
        let layout = context.layout;
        let mut mixing = InCaches { place, caches, lengths, layout, texts: &texts, is_start, is_appended };
        let activations = block.activations_with(x, &context, &mut mixing);
        let y = block.output(&activations, &context);
        x = between_blocks.added(layer, y);
        between_blocks.keep(&model.config, layer, &activations);
    }
    model.last_hidden(x)
}

/// The adapters whose embeddings and head texts have, by rows of tokens: neighbours without rows of the embedding are one.
fn by_token_rows<'a>(parts: &[NextTokens<'a>], lengths: &[usize]) -> Vec<(Range<usize>, &'a AdapterSet)> {
    let mut all: Vec<(Range<usize>, &AdapterSet)> = Vec::new();
    for (rows, adapters) in by_rows(parts, lengths) {
        match all.last_mut() {
            Some((before, of)) if [*of, adapters].iter().all(|it| it.full.tokens().is_none()) => before.end = rows.end,
            _ => all.push((rows, adapters)),
        }
    }
    all
}

/// The adapters of the parts, by rows of tokens: neighbours with the same adapters are one.
fn by_rows<'a>(parts: &[NextTokens<'a>], lengths: &[usize]) -> Vec<(Range<usize>, &'a AdapterSet)> {
    let mut by_rows: Vec<(Range<usize>, &AdapterSet)> = Vec::new();
    for (part, length) in parts.iter().zip(lengths) {
        match by_rows.last_mut() {
            Some((rows, adapters)) if std::ptr::eq(*adapters, part.adapters) => rows.end += length,
            last => {
                let start = last.map_or(0, |(rows, _)| rows.end);
                by_rows.push((start..start + length, part.adapters));
            }
        }
    }
    by_rows
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::config::{InitLoraWeights, LoraConfig};
    use crate::data::batch::{Batch, Document};
    use crate::device::Dtype;
    use crate::model::budget::text_bytes;
    use crate::model::load;
    use crate::model::weights::fixture::{tiny_config, windowed};
    use crate::model::weights::{RandomWeights, Weights};
    use crate::spec::{ModelConfig, QueryGrowth, SublayerKind};

    /// A random model with grouped queries and adapters that change its output.
    fn fixture(config: &ModelConfig, compute: Dtype, device: &Device) -> (Model, AdapterSet) {
        fixture_of(&LoraConfig { r: 3, ..LoraConfig::default() }, config, compute, device)
    }

    fn fixture_of(lora: &LoraConfig, config: &ModelConfig, compute: Dtype, device: &Device) -> (Model, AdapterSet) {
        let weights = Weights::Random(RandomWeights::new(config, 3));
        let model = load::load(config, &weights, compute, compute, device).unwrap();
        let selection = lora.select(config).unwrap();
        let mut adapters = AdapterSet::new(config, &selection, InitLoraWeights::Gaussian, 0.0, 5, device);
        for adapter in adapters.iter_mut() {
            let [out_features, r] = adapter.matrices.b.dims();
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let values = (0..out_features * r).map(|i| ((i * 37 % 101) as f32 - 50.0) / 400.0).collect();
            adapter.matrices.b = crate::ops::host::tensor(values, [out_features, r], device);
        }
        model.start_magnitudes(&mut adapters);
        // Every other token of the texts below has a row of its own.
        model.start_tokens(&mut adapters, &(0..config.vocab_size).step_by(2).collect::<Vec<_>>());
        adapters.full.iter_mut().for_each(|(_, tokens)| *tokens = tokens.clone() * 1.1);
        (model, adapters)
    }

    fn values(logits: Tensor<2>) -> Vec<f32> {
        logits.into_data().try_to_vec().unwrap()
    }

    /// The logits after more tokens of one text.
    fn one(model: &Model, sequence: &mut Sequence, adapters: &AdapterSet, token_ids: &[u32]) -> Vec<f32> {
        values(next_logits(model, &mut [NextTokens { sequence, adapters, token_ids, num_logits: 1 }]))
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
        let all = values(model.logits(&batch, &adapters));
        let rows: Vec<&[f32]> = all.chunks(config.vocab_size).collect();
        let scale = all.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        assert!(scale > 0.5, "the logits say something: {scale}");
        let mut worst = 0.0_f32;
        for split in [1, 2, num_tokens / 2, num_tokens - 1] {
            let mut sequence = Sequence::new(&model);
            let mut append = |ids: &[u32]| one(&model, &mut sequence, &adapters, ids);
            let mut logits = append(&ids[..split]);
            for position in split..=num_tokens {
                let found = logits.clone();
                let differences = found.iter().zip(rows[position - 1]).map(|(a, b)| (a - b).abs());
                worst = differences.fold(worst, f32::max);
                if position < num_tokens {
                    logits = append(&ids[position..=position]);
                }
            }
            assert_eq!(sequence.num_tokens(), num_tokens);
        }
        worst / scale
    }

    /// Makes logits of about size 1, so that differences are meaningful.
    fn config(window: Option<usize>) -> ModelConfig {
        let mut config = windowed(ModelConfig { initializer_range: 0.15, ..tiny_config() }, window);
        // Caps where there are windows.
        config.logit_soft_cap = window.map(|_| 3.0);
        for sublayer in config.blocks.iter_mut().flat_map(|block| &mut block.sublayers) {
            if let SublayerKind::Attention(attention) = &mut sublayer.kind {
                attention.heads.soft_cap = window.map(|_| 0.5);
            }
        }
        let heads = config.blocks[0].attention().unwrap().heads;
        assert!(heads.num_kv_heads < heads.num_heads);
        config
    }

    /// The same where layers see chunks, and queries grow.
    fn in_chunks() -> ModelConfig {
        let mut config = config(None);
        for sublayer in config.blocks.iter_mut().flat_map(|block| &mut block.sublayers) {
            if let SublayerKind::Attention(attention) = &mut sublayer.kind {
                attention.heads.chunk = Some(6);
                attention.query_growth = Some(QueryGrowth { beta: 0.3, period: 4, first: 1 });
            }
        }
        config
    }

    #[test]
    fn prompt_and_single_tokens_give_the_logits_of_the_full_pass() {
        for window in [None, Some(1), Some(6)] {
            let worst = worst_difference(&config(window), Dtype::F32, &Device::flex(), 40);
            assert!(worst < 1e-4, "window {window:?}: {worst}");
        }
        let worst = worst_difference(&in_chunks(), Dtype::F32, &Device::flex(), 40);
        assert!(worst < 1e-4, "chunks: {worst}");
    }

    #[test]
    fn it_holds_in_plain_tensor_calls_and_when_the_cache_grows() {
        // The kernels do not run for tensors on an autodiff device.
        let device = Device::flex().autodiff();
        for (window, num_tokens) in [(None, 20), (Some(6), 20), (None, 270)] {
            let worst = worst_difference(&config(window), Dtype::F32, &device, num_tokens);
            assert!(worst < 1e-4, "window {window:?}, {num_tokens} tokens: {worst}");
        }
        let worst = worst_difference(&in_chunks(), Dtype::F32, &device, 20);
        assert!(worst < 1e-4, "chunks: {worst}");
    }

    /// Layers of linear attention, and one of attention with a gate.
    fn hybrid() -> ModelConfig {
        let config = ModelConfig::from_json(include_str!("../../tests/golden/qwen3_5/config.json")).unwrap();
        ModelConfig { initializer_range: 0.15, ..config }
    }

    #[test]
    fn linear_attention_gives_the_logits_of_the_full_pass_from_its_state() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            let worst = worst_difference(&hybrid(), Dtype::F32, &device, 90);
            assert!(worst < 1e-4, "{worst}");
        }
    }

    /// Layers that use the keys and values of earlier ones, and have embeddings of the tokens of their own.
    fn with_shared_keys() -> ModelConfig {
        let config = ModelConfig::from_json(include_str!("../../tests/golden/gemma4/config.json")).unwrap();
        ModelConfig { initializer_range: 0.15, ..config }
    }

    #[test]
    fn layers_with_the_keys_of_earlier_ones_give_the_logits_of_the_full_pass() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            for config in [with_shared_keys(), golden("gemma3n")] {
                let worst = worst_difference(&config, Dtype::F32, &device, 40);
                assert!(worst < 1e-4, "{}: {worst}", config.model_type);
            }
        }
    }

    #[test]
    fn state_spaces_give_the_logits_of_the_full_pass_from_their_states() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            for folder in ["granitemoehybrid-mamba", "nemotron_h", "falcon_h1"] {
                let worst = worst_difference(&golden(folder), Dtype::F32, &device, 90);
                assert!(worst < 1e-4, "{folder}: {worst}");
            }
        }
    }

    /// A model of a folder of golden files.
    fn golden(folder: &str) -> ModelConfig {
        let file = format!("{}/tests/golden/{folder}/config.json", env!("CARGO_MANIFEST_DIR"));
        ModelConfig { initializer_range: 0.15, ..ModelConfig::from_file(file.as_ref()).unwrap() }
    }

    #[test]
    fn latents_give_the_logits_of_the_full_pass_without_keys_and_values() {
        // With and without a latent of queries, a yarn, queries that grow, and values as wide as keys.
        for folder in ["deepseek_v3", "deepseek_v2", "glm4_moe_lite", "mistral4"] {
            for device in [Device::flex(), Device::flex().autodiff()] {
                let worst = worst_difference(&golden(folder), Dtype::F32, &device, 40);
                assert!(worst < 1e-4, "{folder}: {worst}");
            }
        }
        // So many numbers for a token of two layers: the latent, and what turns.
        assert_eq!(text_bytes(&golden("deepseek_v3"), 4, 3), 2 * 2 * (28 + 8) * 4 * 3);
    }

    #[test]
    fn a_state_goes_on_to_a_longer_text_and_starts_anew_for_another() {
        let (model, adapters) = fixture(&hybrid(), Dtype::F32, &Device::flex());
        let mut sequence = Sequence::new(&model);
        let _ = one(&model, &mut sequence, &adapters, &[1, 2, 3, 4, 5]);
        for (text, kept) in
            [(&[1, 2, 3, 4, 5, 6, 7][..], 5), (&[1, 2, 3, 4, 5, 6, 7], 0), (&[1, 2, 3, 9], 0), (&[1, 2], 0)]
        {
            assert_eq!(sequence.keep_start_of(text), kept, "{text:?}");
            let found = one(&model, &mut sequence, &adapters, &text[kept..]);
            let fresh = one(&model, &mut Sequence::new(&model), &adapters, text);
            let worst = found.iter().zip(&fresh).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-5, "{text:?}: {worst}");
            assert_eq!(sequence.num_tokens(), text.len());
        }
    }

    #[test]
    fn half_precision_stays_within_its_rounding() {
        // The attention of a prompt rounds its operands, that of a single token does not.
        let worst = worst_difference(&config(Some(6)), Dtype::Bf16, &Device::flex(), 20);
        assert!(worst < 0.05, "{worst}");
    }

    #[test]
    fn several_tokens_can_follow_the_prompt_at_once() {
        let cases = [
            (config(Some(3)), Device::flex(), 0.0),
            (config(Some(3)), Device::flex().autodiff(), 1e-4),
            (golden("deepseek_v3"), Device::flex(), 1e-5),
            (golden("deepseek_v3"), Device::flex().autodiff(), 1e-4),
        ];
        for (config, device, tolerance) in cases {
            let (model, adapters) = fixture(&config, Dtype::F32, &device);
            let (mut apart, mut at_once) = (Sequence::new(&model), Sequence::new(&model));
            let _ = (one(&model, &mut apart, &adapters, &[1, 2]), one(&model, &mut at_once, &adapters, &[1, 2]));
            let _ = one(&model, &mut apart, &adapters, &[3]);
            let _ = one(&model, &mut apart, &adapters, &[4]);
            let apart = one(&model, &mut apart, &adapters, &[5]);
            let at_once = one(&model, &mut at_once, &adapters, &[3, 4, 5]);
            let worst = apart.iter().zip(&at_once).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= tolerance, "{worst}");
        }
    }

    #[test]
    fn texts_with_different_adapters_in_one_pass_are_those_of_each_alone() {
        let cases = [
            (config(None), false, Device::flex(), 0.0),
            (config(None), false, Device::flex().autodiff(), 1e-4),
            (hybrid(), false, Device::flex(), 0.0),
            (hybrid(), false, Device::flex().autodiff(), 1e-4),
            (with_shared_keys(), false, Device::flex(), 0.0),
            (with_shared_keys(), false, Device::flex().autodiff(), 1e-4),
            (golden("gemma3n"), false, Device::flex(), 1e-5),
            (golden("muse_glimmer"), false, Device::flex(), 1e-5),
            (golden("deepseek_v3"), false, Device::flex(), 1e-5),
            (golden("deepseek_v3"), true, Device::flex().autodiff(), 1e-4),
            (golden("granitemoehybrid-mamba"), false, Device::flex(), 1e-5),
            (golden("falcon_h1"), false, Device::flex(), 1e-5),
            (config(None), true, Device::flex(), 1e-4),
            (config(None), true, Device::flex().autodiff(), 1e-4),
        ];
        for (config, use_dora, device, tolerance) in cases {
            let lora = LoraConfig { r: 3, use_dora, ..LoraConfig::default() };
            let (model, adapters) = fixture_of(&lora, &config, Dtype::F32, &device);
            let (base, mut others) = (AdapterSet::none(model.blocks.len()), adapters.clone());
            others.iter_mut().for_each(|adapter| adapter.scale *= -2.0);
            // More than are multiplied as a few.
            let sets = [&base, &adapters, &adapters, &others, &base].repeat(4);
            let prompts = [&[1][..], &[2, 3, 4], &[5, 6], &[7, 8, 9, 10], &[2, 3]].repeat(4);
            let start = || {
                let mut sequences: Vec<Sequence> = prompts.iter().map(|_| Sequence::new(&model)).collect();
                for ((sequence, adapters), prompt) in sequences.iter_mut().zip(&sets).zip(&prompts) {
                    let _ = one(&model, sequence, adapters, prompt);
                }
                sequences
            };
            let mut sequences = start();
            let parts = sequences.iter_mut().zip(&sets);
            let mut parts: Vec<_> = parts
                .map(|(sequence, adapters)| NextTokens { sequence, adapters, token_ids: &[11], num_logits: 1 })
                .collect();
            let together = values(next_logits(&model, &mut parts));
            let rows = together.chunks(model.config.vocab_size);
            for (((sequence, adapters), together), prompt) in start().iter_mut().zip(&sets).zip(rows).zip(&prompts) {
                let alone = one(&model, sequence, adapters, &[11]);
                let worst = alone.iter().zip(together).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst <= tolerance, "{prompt:?}: {worst}");
            }
            assert_ne!(together[..10], together[model.config.vocab_size..][..10]);
        }
    }

    #[test]
    fn a_sequence_goes_on_from_the_start_that_it_shares_with_a_text() {
        for (device, tolerance) in [(Device::flex(), 1e-5), (Device::flex().autodiff(), 1e-4)] {
            let (model, adapters) = fixture(&config(None), Dtype::F32, &device);
            let mut sequence = Sequence::new(&model);
            let _ = one(&model, &mut sequence, &adapters, &[1, 2, 3, 4, 5]);
            for (text, shared) in [(&[1, 2, 3, 9, 8, 7][..], 3), (&[1, 2, 3], 2), (&[6, 6], 0)] {
                let kept = sequence.keep_start_of(text);
                let found = one(&model, &mut sequence, &adapters, &text[kept..]);
                let fresh = one(&model, &mut Sequence::new(&model), &adapters, text);
                let worst = found.iter().zip(&fresh).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < tolerance, "{text:?}: {worst}");
                assert_eq!(kept, shared);
            }
        }
    }
}
