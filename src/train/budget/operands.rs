//! What linear layers take in a step beside their inputs, outputs and weights.

use super::workload::{F32, Workload};
use crate::config::Precision;
use crate::model::weights::Quantisation;
use crate::ops::experts::DECODED_BYTES;
use crate::ops::quantised::Coding;
use crate::spec::{Site, StoredQuantisation};

impl Workload<'_> {
    /// Bytes of the copies of the head, which is never quantised.
    pub(super) fn copied_head_bytes(&self) -> usize {
        self.copied_weight_bytes(self.head(), None)
    }

    /// Bytes of a weight's copies in the type of the computation, in plain tensor calls; `f32` may be split in two.
    fn copied_weight_bytes(&self, shape: [usize; 2], quantisation: Option<Quantisation>) -> usize {
        let is_in_type = quantisation.is_none() && self.storage.dtype == self.precision.dtype();
        let copies = match self.precision {
            _ if !self.place.copies_operands() => 0,
            Precision::F32 if is_in_type => 2,
            _ => usize::from(!is_in_type),
        };
        copies * shape.iter().product::<usize>() * self.activation_bytes()
    }

    /// Bytes of what products in eight bits take beside a matrix of this shape; `None` where there are none. Such as a base is
    /// stored in have several scales.
    fn eight_bit_bytes(&self, shape: [usize; 2]) -> Option<usize> {
        let is_stored = self.config.quantisation.as_ref().is_some_and(StoredQuantisation::is_in_codes);
        let is_fp8 = self.storage.quantisation.is_some_and(|quantisation| quantisation.coding == Coding::Fp8);
        let bytes = || self.place.eight_bit_bytes(shape, self.tokens(), self.precision.dtype());
        if is_fp8 && !is_stored { bytes() } else { None }
    }

    /// Whether the outputs of several layers of one input share memory. Decoded matrices are multiplied with one by one.
    pub(super) fn joins_outputs(&self) -> bool {
        let are_joined = self.storage.quantisation.is_none() || self.eight_bit_bytes([0; 2]).is_some();
        are_joined && self.place.joins_outputs(self.precision.dtype())
    }

    /// Bytes in the backward of the largest linear layer beside its gradients: of the copies of its weight, or what products
    /// in eight bits take, and of `x` and `dy` in `f32`, or the sums of kernels; or of the experts that are decoded together.
    pub(super) fn operand_bytes(&self) -> usize {
        let copies = match self.precision {
            _ if !self.place.copies_operands() => 0,
            Precision::F32 => 2,
            Precision::Tf32 => 0,
            Precision::Bf16 | Precision::F16 => 1,
        };
        let largest_rank = self.selection.iter().map(|(.., shape)| shape.r).max().unwrap_or(0);
        let rank = largest_rank * if self.is_part_of_base { 2 } else { 1 };
        let of_update = |site: &Site| {
            match self.place.low_rank_bytes(site.shape, self.tokens(), rank, self.precision.dtype()) {
                // A layer's gate and what it multiplies are computed together.
                Some(sums) => 2 * sums,
                None => copies * self.tokens() * site.shape.iter().sum::<usize>() * F32,
            }
        };
        let of_site = |site: &Site| {
            let of_weight = self.eight_bit_bytes(site.shape);
            of_weight.unwrap_or_else(|| self.copied_weight_bytes(site.shape, self.storage.quantisation))
                + of_update(site)
        };
        let has_codes = self.storage.quantisation.is_some() && self.place.has_experts(self.precision.dtype());
        let has_experts = has_codes && self.config.blocks.iter().any(|block| block.mixture().is_some());
        // Those of an expert at least, which are two of one shape.
        let largest = self.config.sites().map(|(_, site)| 2 * site.shape.iter().product::<usize>()).max().unwrap_or(0);
        let of_experts = if has_experts { DECODED_BYTES.max(2 * largest) } else { 0 };
        self.config.sites().map(|(_, site)| of_site(site)).max().unwrap_or(0).max(of_experts)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Precision;
    use crate::device::{DeviceKind, Dtype};
    use crate::model::Storage;
    use crate::model::weights::Quantisation;
    use crate::ops::place::place_on;
    use crate::ops::quantised::Coding;
    use crate::train::budget::workload::Workload;
    use crate::train::budget::workload::tests::{model, workload};

    fn in_codes(coding: Coding) -> Storage {
        Storage { quantisation: Some(Quantisation { coding, nested: false }), ..Dtype::Bf16.into() }
    }

    #[test]
    fn what_nvidia_gpus_take_beside_a_layer_depends_on_how_it_is_multiplied() {
        let (config, selection) = model(include_str!("../../../configs/llama-3.1-8b.json"), 64);
        let bf16 = Workload {
            storage: Dtype::Bf16.into(),
            precision: Precision::Bf16,
            place: place_on(DeviceKind::Cuda),
            ..workload(&config, &selection)
        };
        let with = |storage| Workload { storage, ..bf16.clone() };
        // The head is not quantised.
        assert_eq!([bf16.copied_head_bytes(), with(in_codes(Coding::Nf4)).copied_head_bytes()], [0; 2]);
        assert_eq!(with(Dtype::F32.into()).copied_head_bytes(), 2 * 128_256 * 4096);
        // Sums of 56 blocks of the gate's gradient, and of as many of `up`.
        let (tokens, matrix, sums) = (1024, 14_336 * 4096, 2 * 56 * 1024 * 64 * 4);
        assert_eq!(bf16.operand_bytes(), sums);
        assert_eq!(with(in_codes(Coding::Nf4)).operand_bytes(), 2 * matrix + sums);
        // The matrix transposed, and the wider operand rounded.
        assert_eq!(with(in_codes(Coding::Fp8)).operand_bytes(), matrix + tokens * 14_336 + sums);
        let f16 = Workload { precision: Precision::F16, ..with(Dtype::F16.into()) };
        assert_eq!(f16.operand_bytes(), sums);
        // Kernels take no ranks above 256, which are twice as many beside what takes the start out of the base.
        let (_, selection) = model(include_str!("../../../configs/llama-3.1-8b.json"), 136);
        let of_base = Workload { selection: &selection, is_part_of_base: true, ..bf16.clone() };
        assert_eq!(of_base.operand_bytes(), tokens * (14_336 + 4096) * 4);
    }

    #[test]
    fn what_shares_memory_with_what_is_kept_is_not_free() {
        let (config, selection) = model(include_str!("../../../configs/qwen3.5-4b.json"), 16);
        let dense = Workload {
            storage: Dtype::Bf16.into(),
            precision: Precision::Bf16,
            place: place_on(DeviceKind::Cuda),
            ..workload(&config, &selection)
        };
        let decoded = Workload { storage: in_codes(Coding::Nf4), ..dense.clone() };
        let more: Vec<_> = dense.blocks(0).zip(decoded.blocks(0)).collect();
        let kept = more.iter().map(|(dense, decoded)| dense.kept - decoded.kept);
        // In each fourth block, queries of 16 heads of 256 and their gates.
        assert_eq!(kept.collect::<Vec<_>>(), [0, 0, 0, 2 * 4096].repeat(8));
        let backward = more.iter().map(|(dense, decoded)| dense.backward - decoded.backward);
        // In the others, 32 value heads of 128, twice.
        assert_eq!(backward.collect::<Vec<_>>(), [2 * 4096, 2 * 4096, 2 * 4096, 0].repeat(8));
    }
}
