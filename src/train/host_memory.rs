//! Host memory of a recipe whose steps run on a GPU.

use serde::Serialize;

use super::config::GradientCheckpointing;
use super::memory::{Component, Workload};

/// The binary, the driver's part in the process, kernels being compiled. An estimate: this project has not measured it.
const PROCESS_BYTES: usize = 1 << 30;
/// While a tensor is loaded, it is both in the mapped file and, converted, on its way to the device.
const COPIES_WHILE_LOADING: usize = 2;
/// Bytes of a token in a micro-batch: its id, its target and the target's position.
const TOKEN_BYTES: usize = 4 + 16;
/// Adapters and both moments are copied before they are written.
const COPIES_WHILE_SAVING: usize = 3;

/// Host memory beside a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostPlan {
    /// Its parts.
    pub components: Vec<Component>,
    /// Peak memory. Weights are loaded before the first step, when only the process itself takes memory.
    pub peak_bytes: usize,
}

impl Workload<'_> {
    /// Memory of the host; `None` on the CPU, where [`plan`](Self::plan) already is the host's memory.
    #[must_use]
    pub fn host_plan(&self) -> Option<HostPlan> {
        if self.on_cpu {
            return None;
        }
        let tensors = self.config.expected_tensors();
        let largest = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).max().unwrap_or(0);
        let loading = COPIES_WHILE_LOADING * largest * self.storage.num_bytes();
        let tokens = self.rows * self.row_length;
        let parked = if self.gradient_checkpointing == GradientCheckpointing::Offload {
            self.config.num_hidden_layers * tokens * self.config.hidden_size * self.precision.num_bytes()
        } else {
            0
        };
        // The micro-batch in use has left the queue.
        let queue = (self.prefetch_batches + 1) * tokens * TOKEN_BYTES;
        let saving = COPIES_WHILE_SAVING * self.adapter_bytes();
        let part = |name, bytes, depends_on| Component { name, bytes, depends_on };
        let components = vec![
            part("process and driver", PROCESS_BYTES, "the device"),
            part("rows in the queue", queue, "data.prefetch_batches, train.micro_batch_size, data.max_length"),
            part("parked block inputs", parked, "train.gradient_checkpointing"),
            part("adapters being saved", saving, "lora.r, lora.target_modules"),
            part("weights being loaded", loading, "model.dtype; before the first step"),
        ];
        Some(HostPlan { components, peak_bytes: PROCESS_BYTES + loading.max(queue + parked + saving) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Dtype;
    use crate::lora::config::LoraConfig;
    use crate::ops::cross_entropy::LossChunk;
    use crate::spec::ModelConfig;

    #[test]
    fn block_inputs_that_leave_the_gpu_are_in_host_memory() {
        let config = ModelConfig::from_json(include_str!("../../configs/llama-3.1-8b.json")).unwrap();
        let selection = LoraConfig { r: 16, ..LoraConfig::default() }.select(config.num_hidden_layers).unwrap();
        let on_gpu = Workload {
            config: &config,
            selection: &selection,
            storage: Dtype::Bf16,
            precision: Dtype::Bf16,
            rows: 4,
            row_length: 4096,
            gradient_checkpointing: GradientCheckpointing::On,
            gradient_accumulation_steps: 1,
            loss_chunk: LossChunk::Auto,
            prefetch_batches: 4,
            on_cpu: false,
        };
        let bytes = |plan: &HostPlan, name: &str| {
            plan.components.iter().find(|component| component.name == name).unwrap().bytes
        };
        let kept = on_gpu.host_plan().unwrap();
        let offloaded = Workload { gradient_checkpointing: GradientCheckpointing::Offload, ..on_gpu.clone() };
        let parked = offloaded.host_plan().unwrap();
        assert_eq!(bytes(&kept, "parked block inputs"), 0);
        // 32 layers, 16,384 tokens, 4,096 numbers of two bytes: 4 GiB, which the device no longer holds.
        assert_eq!(bytes(&parked, "parked block inputs"), 4 << 30);
        assert!(on_gpu.plan().peak_bytes - offloaded.plan().peak_bytes > (4 << 30) * 15 / 16);
        assert_eq!(bytes(&parked, "rows in the queue"), 5 * 16_384 * 20);
        // While loading, the process holds only two copies of the embedding: the queue is filled later.
        let loading = 2 * 128_256 * 4096 * 2;
        assert_eq!((bytes(&kept, "weights being loaded"), kept.peak_bytes), (loading, (1 << 30) + loading));
        let in_steps = bytes(&parked, "rows in the queue") + (4 << 30) + bytes(&parked, "adapters being saved");
        assert_eq!(parked.peak_bytes, (1 << 30) + in_steps);
        assert_eq!(Workload { on_cpu: true, ..on_gpu }.host_plan(), None);
    }
}
