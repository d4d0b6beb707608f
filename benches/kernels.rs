//! Every operation of a CPU step, forward and backward, as a kernel and in plain tensor calls, on the shapes of
//! stories15M and SmolLM2-135M: `cargo bench --bench kernels [FILTER]`. `scripts/bench_kernels.py` compares it with
//! PyTorch's operations.
//!
//! Names are `MODEL OPERATION DTYPE/VERSION`. Tensors that autodiff could track take the plain version.

#![allow(missing_docs, reason = "criterion's macros make public functions")]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "small sizes")]
#![allow(clippy::expect_used, reason = "a benchmark ends where something is missing")]

use std::hint::black_box;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main};
use lora_train::ops::adamw::{AdamState, Update, adamw};
use lora_train::ops::attention::{AttentionInputs, Heads, attention, attention_backward};
use lora_train::ops::cross_entropy::{Head, LossChunk, linear_cross_entropy};
use lora_train::ops::kernels::Place;
use lora_train::ops::layout::Layout;
use lora_train::ops::linear::{InputGrad, Weight, linear, linear_backward};
use lora_train::ops::low_rank::{Lora, LowRank};
use lora_train::ops::norm::{rms_norm, rms_norm_backward};
use lora_train::ops::place::place_of;
use lora_train::ops::rotary::rotate;
use lora_train::ops::swiglu::{gated, gated_backward};
use lora_train::ops::{host, linear};
use lora_train::spec::{Activation, ModelConfig, short_name};

/// Tokens of a micro-batch.
const TOKENS: usize = 1024;

/// Target tokens per chunk of the head.
const TARGETS: usize = 512;

/// A model's file in `configs/`, and the rank of its adapters.
const MODELS: [(&str, &str, usize); 2] = [
    ("smollm2", include_str!("../configs/smollm2-135m.json"), 16),
    ("stories", include_str!("../configs/stories15m.json"), 8),
];

/// Values without special numbers or repetitions.
fn filled<const D: usize>(shape: [usize; D], seed: u32, device: &Device) -> Tensor<D> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    host::tensor(std::iter::repeat_with(next).take(shape.iter().product()).collect(), shape, device)
}

/// The arithmetic of the kernels, or the plain version.
#[derive(Clone, Copy, PartialEq)]
enum Version {
    Kernel,
    /// Base stored in bf16 and products in bf16, for the operations with a frozen weight.
    KernelBf16,
    Plain,
}

impl Version {
    const ALL: [Self; 3] = [Self::Kernel, Self::KernelBf16, Self::Plain];

    fn device(self) -> Device {
        if self == Self::Plain { Device::flex().autodiff() } else { Device::flex() }
    }

    fn place(self) -> Place {
        place_of(&self.device(), DType::F32)
    }

    fn name(self) -> &'static str {
        if self == Self::Plain { "plain" } else { "kernel" }
    }

    fn dtype(self) -> &'static str {
        if self == Self::KernelBf16 { "bf16" } else { "f32" }
    }

    fn weight(self, shape: [usize; 2], seed: u32) -> Weight {
        let values = filled(shape, seed, &self.device());
        match self {
            Self::KernelBf16 => Weight { rounds: true, ..Weight::new(values.cast(DType::BF16)) },
            _ => Weight::new(values),
        }
    }
}

struct Bench<'a> {
    criterion: &'a mut Criterion,
    model: &'static str,
    version: Version,
}

impl Bench<'_> {
    fn run<R>(&mut self, operation: &str, mut work: impl FnMut() -> R) {
        let name = format!("{} {operation} {}", self.model, self.version.dtype());
        let mut group: BenchmarkGroup<'_, WallTime> = self.criterion.benchmark_group(name);
        group.bench_function(self.version.name(), |bencher| bencher.iter(|| black_box(work())));
        group.finish();
    }
}

fn kernels(criterion: &mut Criterion) {
    for (model, config, rank) in MODELS {
        let config = ModelConfig::from_json(config).unwrap_or_else(|error| panic!("{error}"));
        for version in Version::ALL {
            let mut bench = Bench { criterion, model, version };
            linear_layers(&mut bench, &config, rank);
            head(&mut bench, &config);
            if version != Version::KernelBf16 {
                attention_layers(&mut bench, &config);
                element_wise(&mut bench, &config);
            }
        }
    }
}

fn linear_layers(bench: &mut Bench<'_>, config: &ModelConfig, rank: usize) {
    let device = bench.version.device();
    for role in ["q_proj", "k_proj", "gate_proj", "down_proj"] {
        let Some(site) = config.blocks[0].sites.iter().find(|site| short_name(&site.name) == role) else { continue };
        let [out_features, in_features] = site.shape;
        let (x, dy) = (filled([TOKENS, in_features], 1, &device), filled([TOKENS, out_features], 2, &device));
        let weight = bench.version.weight([out_features, in_features], 3);
        let (a, b) = (filled([rank, in_features], 4, &device), filled([out_features, rank], 5, &device));
        let lora = Lora { matrices: LowRank { a: &a, b: &b }, scale: 2.0, dropout: None };
        let place = bench.version.place();
        let xa = linear::low_rank_input(place, &x, lora);
        bench.run(&format!("linear {role}"), || linear(place, &x, &weight, Some(lora), None));
        bench.run(&format!("linear_backward {role}"), || {
            linear_backward(place, &dy, &x, &weight, Some((lora, &xa)), InputGrad::Fresh)
        });
    }
}

fn head(bench: &mut Bench<'_>, config: &ModelConfig) {
    let hidden = filled([TARGETS, config.hidden_size], 6, &bench.version.device());
    let weight = bench.version.weight([config.vocab_size, config.hidden_size], 7);
    let targets: Vec<u32> = (0..TARGETS as u32).collect();
    let place = bench.version.place();
    let head = Head { weight: &weight, rows: None, inputs: None, soft_cap: None };
    let loss = || linear_cross_entropy(place, &hidden, head, &targets, 1.0, LossChunk::Auto);
    bench.run("linear_cross_entropy", loss);
}

fn layout(config: &ModelConfig, rows: usize, length: usize) -> Layout {
    let documents = (0..rows).map(|row| (row * length, length)).collect();
    let positions = (0..rows).flat_map(|_| 0..length as u32).collect();
    Layout::new(rows, documents, positions, config.rotary_tables(length, &[]))
}

fn attention_layers(bench: &mut Bench<'_>, config: &ModelConfig) {
    let (device, place) = (bench.version.device(), bench.version.place());
    let heads: Heads = config.blocks[0].attention().expect("an attention").heads;
    let (q_width, kv_width) = (heads.query_width(), heads.key_value_width());
    for (rows, length) in [(2, 512), (1, 2048)] {
        let tokens = rows * length;
        let layout = layout(config, rows, length);
        let [q, d_o] = [1, 4].map(|seed| filled([tokens, q_width], seed, &device));
        let [k, v] = [2, 3].map(|seed| filled([tokens, kv_width], seed, &device));
        let inputs = AttentionInputs { qkv: [&q, &k, &v], layout: &layout, heads };
        let attended = attention(place, inputs);
        bench.run(&format!("attention {rows}x{length}"), || attention(place, inputs));
        let backward = || attention_backward(place, &d_o, &attended, inputs);
        bench.run(&format!("attention_backward {rows}x{length}"), backward);
    }
}

fn element_wise(bench: &mut Bench<'_>, config: &ModelConfig) {
    let (device, place) = (bench.version.device(), bench.version.place());
    let wide =
        |seed: u32| filled([TOKENS, config.blocks[0].gated().expect("a gated layer").intermediate_size], seed, &device);
    let (gate, up, dh) = (wide(1), wide(2), wide(3));
    bench.run("swiglu", || gated(place, Activation::Silu, &gate, &up));
    bench.run("swiglu_backward", || gated_backward(place, Activation::Silu, &dh, &gate, &up));

    let narrow = |seed: u32| filled([TOKENS, config.hidden_size], seed, &device);
    let (x, dy, weight) = (narrow(1), narrow(2), filled([config.hidden_size], 3, &device));
    let (_, rstd) = rms_norm(place, &x, &weight, 1e-5);
    bench.run("rms_norm", || rms_norm(place, &x, &weight, 1e-5));
    // In a block, nothing else uses the residual; here each run makes a new one, which both versions pay for.
    bench.run("rms_norm_backward", || rms_norm_backward(place, &dy, &x, &weight, &rstd, dy.clone() * 1.0));

    let layout = layout(config, 1, TOKENS);
    let heads = config.blocks[0].attention().expect("an attention").heads;
    let [q, k] = [heads.query_width(), heads.key_value_width()].map(|width| filled([TOKENS, width], 4, &device));
    bench.run("rotate", || rotate(place, [q.clone() * 1.0, k.clone() * 1.0], &layout, 0, heads, false));

    let shape = [2048, 1024];
    let update =
        Update { learning_rate: 1e-4, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, step: 3, grad_scale: 1.0 };
    let grad = filled(shape, 5, &device);
    let [parameter, m, v] = [6, 7, 8].map(|seed| filled(shape, seed, &device));
    let mut state = Some(AdamState { parameter, m, v: v.square() });
    bench.run("adamw", || {
        state = state.take().and_then(|state| adamw(place, vec![(state, &grad)], &update, None).pop());
    });
}

fn criterion() -> Criterion {
    let second = Duration::from_secs(1);
    Criterion::default().sample_size(10).warm_up_time(second / 4).measurement_time(second).without_plots()
}

criterion_group! { name = benches; config = criterion(); targets = kernels }
criterion_main!(benches);
