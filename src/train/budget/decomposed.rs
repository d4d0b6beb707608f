//! What decomposed weights take in a step beside their matrices.

use super::workload::{F32, Workload};
use crate::lora::kind::AdapterKind;
use crate::spec::Site;
use crate::util::stats::as_f64;

impl Workload<'_> {
    /// The layers whose weights are decomposed.
    fn decomposed(&self) -> impl Iterator<Item = &Site> {
        let decomposed = self.selection.iter().filter(|(.., shape)| shape.kind == AdapterKind::Dora);
        decomposed.map(|(layer, site, _)| &self.config.blocks[layer].sites[site])
    }

    /// Their share of the weights of all blocks.
    #[must_use]
    pub fn share_decomposed(&self) -> f64 {
        let weights: usize = self.decomposed().map(Site::num_weights).sum();
        as_f64(weights) / as_f64(self.config.num_block_weights().max(1))
    }

    /// Bytes in the backward of the widest of them: its output before it is scaled, computed again, and the scaled gradient,
    /// in plain tensor calls in `f32` too.
    pub(super) fn decomposed_bytes(&self) -> usize {
        let widest = self.decomposed().map(|site| site.shape[0]).max().unwrap_or(0);
        let in_f32 = if self.place.is_host() { 0 } else { F32 };
        2 * self.tokens() * widest * (self.activation_bytes() + in_f32)
    }

    /// Bytes of the norms of their rows, and of those with the update.
    pub(super) fn norm_bytes(&self) -> usize {
        2 * self.decomposed().map(|site| site.shape[0]).sum::<usize>() * F32
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{LoraConfig, TargetModules};
    use crate::train::budget::workload::tests::{model, workload};

    #[test]
    fn their_norms_and_outputs_are_planned_and_their_share_is_of_the_blocks() {
        let json = r#"{"model_type": "llama", "vocab_size": 90, "hidden_size": 40, "intermediate_size": 80,
            "num_hidden_layers": 3, "num_attention_heads": 4}"#;
        let (config, plain) = model(json, 8);
        let target_modules = TargetModules::Names(vec!["q_proj".into(), "up_proj".into()]);
        let lora = LoraConfig { use_dora: true, target_modules, ..LoraConfig::default() };
        let selection = lora.select(&config).unwrap();
        let (with, without) = (workload(&config, &selection), workload(&config, &plain));
        assert_eq!((with.norm_bytes(), without.norm_bytes()), (2 * 3 * (40 + 80) * 4, 0));
        assert_eq!((with.decomposed_bytes(), without.decomposed_bytes()), (2 * with.tokens() * 80 * 4, 0));
        let of_block = 4 * 40 * 40 + 3 * 40 * 80;
        assert!((with.share_decomposed() - f64::from(40 * 40 + 40 * 80) / f64::from(of_block)).abs() < 1e-12);
        assert_eq!(without.share_decomposed(), 0.0);
    }
}
