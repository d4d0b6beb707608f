//! The facts about a run that the diagnosis gets at the start.

use super::inputs::workload;
use super::prepare::Prepared;
use crate::data::pipeline::DataPipeline;
use crate::data::sources::FileInfo;
use crate::device::{Dtype, num_cpu_threads};
use crate::diagnosis::Facts;
use crate::telemetry::total_host_memory_bytes;
use crate::train::config::GradientCheckpointing;
use crate::train::memory::Workload;

/// The facts about recipe and machine that the diagnosis rules use.
pub(super) fn facts(prepared: &Prepared, data: &DataPipeline, leaves_padding_out: bool) -> Facts {
    let Prepared { recipe, source, selection, device, .. } = prepared;
    let config = &source.config;
    let (train, rows) = (&recipe.train, recipe.train.micro_batch_size);
    let host_memory_bytes = total_host_memory_bytes();
    let workload = workload(recipe, config, selection, !device.is_gpu());
    let peak = |gradient_checkpointing| Workload { gradient_checkpointing, ..workload.clone() }.plan().peak_bytes;
    let own_peak = workload.plan().peak_bytes;
    let doubled_peak = Workload { rows: 2 * workload.rows, ..workload.clone() }.plan().peak_bytes;
    // If checkpointing is off: the memory with it on. Otherwise: the memory of the chosen kind.
    let least = match train.gradient_checkpointing {
        GradientCheckpointing::Off => peak(GradientCheckpointing::On),
        GradientCheckpointing::On | GradientCheckpointing::Offload => own_peak,
    };
    // Rows are read from the tokenised copy of a file, where there is one.
    let size = |file: &FileInfo| match file.kept_tokens {
        Some(kept) => Some(kept.bytes),
        None => std::fs::metadata(&file.path).map(|metadata| metadata.len()).ok(),
    };
    let sizes = data.files().iter().filter(|file| !file.is_eval).map(size);
    let eval_batches = data.num_eval_batches(rows, recipe.eval.max_batches) as u64;
    let block = config.block_linear_size();
    Facts {
        is_gpu: device.is_gpu(),
        leaves_padding_out,
        num_cpu_threads: num_cpu_threads() as u64,
        num_workers: recipe.data.num_workers as u64,
        prefetch_batches: recipe.data.prefetch_batches as u64,
        packing: recipe.data.packing,
        max_length: recipe.data.max_length as u64,
        max_positions: config.max_position_embeddings as u64,
        data_bytes: sizes.sum(),
        shuffle: recipe.data.shuffle,
        micro_batch_size: rows as u64,
        gradient_accumulation_steps: train.gradient_accumulation_steps as u64,
        recomputes: train.gradient_checkpointing != GradientCheckpointing::Off,
        offloads: train.gradient_checkpointing == GradientCheckpointing::Offload,
        is_f32: train.precision == Dtype::F32,
        eval_steps: recipe.eval.eval_steps,
        eval_batches: (eval_batches > 0).then_some(eval_batches),
        draws_samples: !recipe.eval.generate.is_empty(),
        save_steps: recipe.checkpoint.save_steps,
        tensorboard: recipe.logging.tensorboard,
        max_sm_clock_mhz: None,
        power_limit_watts: None,
        default_power_limit_watts: None,
        device_memory_bytes: if device.is_gpu() {
            device.cuda.as_ref().map(|gpu| gpu.memory_bytes)
        } else {
            host_memory_bytes
        },
        host_memory_bytes,
        activation_bytes: peak(GradientCheckpointing::Off).checked_sub(least).map(|bytes| bytes as u64),
        doubling_bytes: doubled_peak.checked_sub(own_peak).map(|bytes| bytes as u64),
        block_parameters: (config.num_hidden_layers * block) as u64,
        head_parameters: (config.vocab_size * config.hidden_size) as u64,
    }
}
