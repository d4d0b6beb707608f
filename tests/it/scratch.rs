use std::path::Path;
use burn::tensor::{DType, Device};
use lora_train::data::batch::{Batch, Document, Target};
use lora_train::device::Dtype;
use lora_train::lora::AdapterSet;
use lora_train::lora::config::{InitLoraWeights, LoraConfig};
use lora_train::model::load;
use lora_train::model::weights::{WeightFiles, Weights};
use lora_train::ops::host;
use lora_train::spec::ModelConfig;
use lora_train::train::config::{OptimizerConfig, TrainConfig};
use lora_train::train::step::TrainStep;
fn batch(seed: u32) -> Batch {
    let input_ids: Vec<u32> = (0..128).map(|i| (i * i * 7 + i * 3 + seed * 31) % 1300 + 3).collect();
    let documents = vec![Document { start: 0, len: 64 }, Document { start: 64, len: 64 }];
    let target = |p: usize| Target { position: p, token: input_ids[p + 1] };
    let targets = (0..128).filter(|p| ![63, 127].contains(p)).map(target).collect();
    Batch { row_lengths: vec![64; 2], input_ids, documents, targets, sources: Vec::new() }
}
fn run(device: &Device, compute: Dtype, with_b: bool) -> (Vec<f64>, Vec<Vec<f32>>, f64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/model");
    let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
    let weights = Weights::Files(WeightFiles::open(&folder).unwrap());
    let model = load::load(&config, &weights, compute, compute, device).unwrap();
    let selection = LoraConfig { r: 4, ..LoraConfig::default() }.select(config.num_hidden_layers).unwrap();
    let mut adapters = AdapterSet::new(&model.config, &selection, InitLoraWeights::Kaiming, 0.0, 2, device);
    if with_b {
        for (index, adapter) in adapters.iter_mut().enumerate() {
            let shape = adapter.matrices.b.dims();
            let value = |i: usize| ((i * 37 + index * 11) % 101) as f32 / 1010.0 - 0.05;
            adapter.matrices.b = host::tensor((0..shape[0] * shape[1]).map(value).collect(), shape, device);
        }
    }
    let mut step = TrainStep::new(model, adapters, &TrainConfig::default(), &OptimizerConfig::default(), None, 0);
    let mut out = Vec::new();
    let mut grads = Vec::new();
    let mut loss = 0.0;
    for s in 0..2 {
        step.forward_backward(&batch(s));
        if s == 0 {
            for g in step.grads().iter() {
                for t in [&g.a, &g.b] { grads.push(t.clone().cast(DType::F32).into_data().try_to_vec::<f32>().unwrap()); }
            }
        }
        let o = step.update(1e-3);
        out.push(o.grad_norm); loss = o.loss; out.push(loss);
    }
    (out, grads, loss)
}
fn err(found: &[Vec<f32>], expected: &[Vec<f32>], which: usize) -> f64 {
    let (mut d, mut n) = (0.0, 0.0);
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        if which < 2 && i % 2 != which { continue; }
        for (f, e) in f.iter().zip(e) { d += f64::from(f - e).powi(2); n += f64::from(*e).powi(2); }
    }
    (d / n).sqrt()
}
#[test]
fn scratch_bf16() {
    for with_b in [false, true] {
        let (of, expected, _) = run(&Device::flex(), Dtype::F32, with_b);
        println!("f32 {of:?}");
        for (name, device, bits) in [("cpu", Device::flex(), 0u8), ("plain", Device::flex().autodiff(), 0), ("old", Device::flex().autodiff(), 1), ("xa32", Device::flex().autodiff(), 2), ("attn32", Device::flex().autodiff(), 4), ("attn32 old", Device::flex().autodiff(), 5), ("all", Device::flex().autodiff(), 6)] {
            lora_train::ops::linear::SCRATCH.store(bits, std::sync::atomic::Ordering::Relaxed);
            let (f, grads, _) = run(&device, Dtype::Bf16, with_b);
            println!("{name} b={with_b} {f:?} A {:.4} B {:.4} norm {:+.4} {:+.4}", err(&grads, &expected, 0), err(&grads, &expected, 1), f[0] / of[0] - 1.0, f[2] / of[2] - 1.0);
        }
    }
}
