//! The memory of adapters that start from the rows.

use super::memory::{Component, MemoryPlan, OF_A_RUN};
use super::workload::{F32, Workload};
use crate::spec::SiteId;
use crate::util::stats::{as_f64, as_u64};

impl Workload<'_> {
    /// The memory of the step with the most parameters that a layer's share of up to `rho` times its rank can make, and of the
    /// start where that takes more.
    pub(super) fn plan_from_rows(&self, rho: f64) -> MemoryPlan {
        let selection = self.selection.with_most_parameters(self.config, rho);
        let mut plan = Workload { selection: &selection, ..self.clone() }.step_plan();
        let of_both = ["base weights", "process and libraries", OF_A_RUN];
        let of_step = plan.components.iter().filter(|part| !of_both.contains(&part.name)).map(|part| part.bytes);
        let more = self.start_bytes(rho).saturating_sub(of_step.sum());
        if more > 0 {
            plan.peak_bytes += more;
            plan.components.push(Component::new("start of the adapters", more, "lora.init_lora_weights, lora.r"));
        }
        plan
    }

    /// Bytes of the directions, of what a block computes, of the inputs of its layers, and on the host of copies of these.
    fn start_bytes(&self, rho: f64) -> usize {
        let width = |layer: usize, site: SiteId| self.config.blocks[layer].sites[site].shape[1];
        let numbers: usize = self.selection.iter().map(|(layer, site, shape)| shape.r * width(layer, site)).sum();
        let directions = usize::try_from(as_u64(rho * as_f64(numbers * F32))).unwrap_or(usize::MAX);
        let of_layers = self.selection.shapes.iter().enumerate();
        let of_inputs = of_layers.map(|(layer, block)| block.keys().map(|site| width(layer, *site)).sum::<usize>());
        let of_inputs = of_inputs.max().unwrap_or_default();
        let of_block = self.blocks(0).map(|block| block.kept + block.forward).max().unwrap_or_default() + of_inputs;
        let copies = if self.place.is_host() { 2 * of_inputs * F32 } else { 0 };
        directions + self.tokens() * (of_block * self.activation_bytes() + copies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GradientCheckpointing;
    use crate::train::budget::workload::tests::{model, workload};

    #[test]
    fn ranks_that_are_shared_out_are_counted_where_they_are_largest_and_a_start_where_it_is_larger_than_a_step() {
        let plan = |json: &str, eva_rho| {
            let (config, selection) = model(json, 16);
            let workload = workload(&config, &selection);
            Workload { eva_rho, gradient_checkpointing: GradientCheckpointing::On, ..workload }.plan()
        };
        let smollm2 = include_str!("../../../configs/smollm2-135m.json");
        let [plain, equal, shared] = [None, Some(1.0), Some(2.0)].map(|rho| plan(smollm2, rho));
        assert_eq!(plain.components, equal.components);
        // Twice the rank for all feed-forward layers, and for half of those of queries and outputs.
        let of_rank = 30 * 3 * 2 * (576 + 1536) + 15 * 2 * (576 + 576);
        assert_eq!(shared.num_trainable, 16 * of_rank);
        assert!(shared.peak_bytes > plain.peak_bytes);
        let flat = r#"{"model_type": "llama", "vocab_size": 9, "hidden_size": 64, "intermediate_size": 4096,
            "num_hidden_layers": 1, "num_attention_heads": 4}"#;
        let [plain, equal] = [None, Some(1.0)].map(|rho| plan(flat, rho));
        let (start, step) = equal.components.split_last().unwrap();
        assert_eq!((start.name, step), ("start of the adapters", &plain.components[..]));
        assert_eq!(equal.peak_bytes, plain.peak_bytes + start.bytes);
    }
}
