//! Numbers of the GPU path (plain tensor calls, burn's fusion, `CubeCL`'s kernels), compared with the kernels of the
//! CPU backend.
//!
//! With `--features cubecl-cpu` attention runs on the processor: slow, but without a GPU. With `--features cuda` all
//! tests run on the first NVIDIA GPU when `--ignored` requests them.

#![cfg(any(feature = "cubecl-cpu", feature = "cuda-llvm"))]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "small numbers of tests")]

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use lora_train::data::batch::{Batch, Document, Target};
use lora_train::device::Dtype;
use lora_train::lora::AdapterSet;
use lora_train::lora::config::{InitLoraWeights, LoraConfig};
use lora_train::model::load;
use lora_train::model::weights::{WeightFiles, Weights};
use lora_train::ops::attention::{Heads, attention, attention_backward};
use lora_train::ops::host;
use lora_train::ops::layout::{Layout, RotaryTable};
use lora_train::ops::place::Place;
use lora_train::spec::{Linear, ModelConfig};
use lora_train::train::config::{GradientCheckpointing, OptimizerConfig, TrainConfig};
use lora_train::train::step::TrainStep;

fn cubecl() -> Device {
    #[cfg(feature = "cubecl-cpu")]
    return Device::cpu();
    #[cfg(not(feature = "cubecl-cpu"))]
    return Device::cuda(0);
}

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1013) as f32 / 506.5 - 1.0).collect()
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().cast(DType::F32).into_data().try_to_vec().unwrap()
}

/// Norm of the difference over the norm of `expected`.
fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(f32::MIN_POSITIVE)
}

const HEADS: Heads =
    Heads { num_heads: 4, num_kv_heads: 2, head_dim: 32, scale: 0.176_776_695_296_636_9, window: None };

/// Output, log-sum-exps and the three gradients of an attention of two rows, the second of which has two documents.
fn attend(device: &Device, dtype: DType, heads: Heads) -> Vec<Vec<f32>> {
    const TOKENS: usize = 2 * 70;
    let table = Arc::new(RotaryTable::new(vec![1.0; 70 * 16], vec![0.0; 70 * 16], 16));
    let positions = (0..70).chain(0..30).chain(0..40).collect();
    let place = Place::of(device, dtype);
    let layout = Layout::new(place, 2, vec![(0, 70), (70, 30), (100, 40)], positions, table, device);
    let tensor = |num_heads: usize, seed: usize| {
        let shape = [TOKENS, num_heads * heads.head_dim];
        let data = host::tensor::<2>(numbers(shape[0] * shape[1], seed), shape, device);
        // Equal rounding on both devices.
        data.cast(DType::BF16).cast(dtype)
    };
    let (q, d_o) = (tensor(heads.num_heads, 1), tensor(heads.num_heads, 2));
    let (k, v) = (tensor(heads.num_kv_heads, 3), tensor(heads.num_kv_heads, 4));
    let attended = attention(&q, &k, &v, &layout, heads);
    let [dq, dk, dv] = attention_backward(&d_o, [&q, &k, &v], &attended, &layout, heads);
    vec![values(&attended.o), values(&dq), values(&dk), values(&dv)]
}

#[test]
#[cfg_attr(not(feature = "cubecl-cpu"), ignore = "needs an NVIDIA GPU")]
fn attention_of_packed_documents_and_grouped_heads_equals_the_cpus_kernels() {
    for heads in [HEADS, Heads { window: Some(20), ..HEADS }] {
        let expected = attend(&Device::flex(), DType::F32, heads);
        // bf16 rounds scores and weights to 2^-9.
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::BF16, 2e-2)] {
            let found = attend(&cubecl(), dtype, heads);
            for ((found, expected), name) in found.iter().zip(&expected).zip(["o", "dq", "dk", "dv"]) {
                let error = relative_error(found, expected);
                assert!(error < tolerance, "{name} in {dtype:?}, window {:?}: {error}", heads.window);
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU; on a processor CubeCL compiles and tunes its products for more than ten minutes"]
fn products_keep_their_sums_in_f32() {
    // In bf16 a sum of terms of 2^-8 stops growing at 1, in f16 at 8.
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let small = Tensor::<2>::full([64, 65_536], 1.0 / 256.0, (&cubecl(), dtype));
        let sums = values(&small.matmul(Tensor::<2>::ones([65_536, 64], (&cubecl(), dtype))));
        assert!(sums.iter().all(|sum| *sum == 256.0), "{dtype:?}: {}", sums[0]);
    }
}

fn batch() -> Batch {
    let input_ids: Vec<u32> = (0..48).map(|i| (i * i * 7 + i * 3) % 250 + 3).collect();
    let documents =
        vec![Document { start: 0, len: 24 }, Document { start: 24, len: 10 }, Document { start: 34, len: 14 }];
    let target = |position: usize| Target { position, token: input_ids[position + 1] };
    let is_last = |position: usize| [23, 33, 47].contains(&position);
    let targets = (0..48).filter(|position| !is_last(*position)).map(target).collect();
    Batch { row_lengths: vec![24; 2], input_ids, documents, targets, sources: Vec::new() }
}

/// Losses and gradient norms of three steps of two micro-batches, and the resulting adapters.
fn train(device: &Device, compute: Dtype, gradient_checkpointing: GradientCheckpointing) -> (Vec<f64>, Vec<f32>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/model");
    let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
    let weights = Weights::Files(WeightFiles::open(&folder).unwrap());
    let model = load::load(&config, &weights, compute, compute, device).unwrap();
    let selection = LoraConfig { r: 4, ..LoraConfig::default() }.select(config.num_hidden_layers).unwrap();
    let adapters = AdapterSet::new(&model.config, &selection, InitLoraWeights::Kaiming, 0.0, 2, device);
    let train = TrainConfig { gradient_checkpointing, ..TrainConfig::default() };
    let optimizer = OptimizerConfig { learning_rate: 1e-2, ..OptimizerConfig::default() };
    let mut step = TrainStep::new(model, adapters, &train, &optimizer, None, 0);
    let mut figures = Vec::new();
    for _ in 0..3 {
        step.forward_backward(&batch());
        step.forward_backward(&batch());
        let outcome = step.update(1e-2);
        figures.extend([outcome.loss, outcome.grad_norm]);
    }
    let adapters =
        step.adapters().iter().flat_map(|(_, _, adapter)| adapter.matrices.as_ref().map(values).into_array()).flatten();
    (figures, adapters.collect())
}

#[test]
#[ignore = "needs an NVIDIA GPU; on a processor CubeCL compiles and tunes its products for more than ten minutes"]
fn three_steps_give_the_losses_norms_and_adapters_of_the_cpus_kernels() {
    let (figures, adapters) = train(&Device::flex(), Dtype::F32, GradientCheckpointing::On);
    // The third step contains the rounding of two updates.
    for (dtype, of_figures, of_adapters) in [(Dtype::F32, 1e-4, 1e-3), (Dtype::Bf16, 5e-2, 2e-1)] {
        let (found, found_adapters) = train(&cubecl(), dtype, GradientCheckpointing::On);
        for (found, expected) in found.iter().zip(&figures) {
            assert!((found - expected).abs() < of_figures * expected.abs(), "{dtype}: {found} against {expected}");
        }
        let error = relative_error(&found_adapters, &adapters);
        assert!(error < of_adapters, "{dtype}: adapters differ by {error}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU; on a processor CubeCL compiles and tunes its products for more than ten minutes"]
fn kept_activations_and_inputs_in_host_memory_give_the_same_steps_as_recomputing() {
    let (figures, adapters) = train(&cubecl(), Dtype::F32, GradientCheckpointing::On);
    for way in [GradientCheckpointing::Off, GradientCheckpointing::Offload] {
        let (found, found_adapters) = train(&cubecl(), Dtype::F32, way);
        for (found, expected) in found.iter().zip(&figures) {
            assert!((found - expected).abs() < 1e-5 * expected.abs(), "{way:?}: {found} against {expected}");
        }
        let error = relative_error(&found_adapters, &adapters);
        assert!(error < 1e-4, "{way:?}: adapters differ by {error}");
    }
}
