//! The times of a plan against those that cards took: all records in benches/results.

use std::path::Path;

use serde_json::Value;

use super::gpus::{self, Gpu};
use super::report::FullStep;
use super::target::Speed;
use crate::device::DeviceKind;
use crate::ops::place::place_on;
use crate::recipe::{Purpose, Recipe};
use crate::run::inputs;
use crate::schema::Override;
use crate::spec::ModelConfig;
use crate::train::budget::images::NO_IMAGES;

/// Beyond this share of what was measured a plan is wrong.
const TOLERANCE: f64 = 0.15;

/// What a benchmark says that it ran, and the model and settings that this means.
const BENCHES: &[(&str, &str, &str)] = &[
    ("8b 1x4096", "llama-3.1-8b", ""),
    ("8b 1x4096 20 steps", "llama-3.1-8b", ""),
    ("8b 1x4096 no checkpointing", "llama-3.1-8b", "train.gradient_checkpointing=false"),
    ("8b 1x4096 auto", "llama-3.1-8b", "train.gradient_checkpointing=false"),
    ("8b 1x4096 nf4", "llama-3.1-8b", "model.quantization=nf4"),
    ("8b 1x4096 nf4 double", "llama-3.1-8b", "model.quantization=nf4 model.double_quantization=true"),
    ("8b 1x4096 int8", "llama-3.1-8b", "model.quantization=int8"),
    ("8b 1x4096 dropout 0.05", "llama-3.1-8b", "lora.lora_dropout=0.05"),
    ("8b 1x4096 r 64", "llama-3.1-8b", "lora.r=64"),
    ("8b 1x16384", "llama-3.1-8b", ""),
    ("1b 4x2048 no checkpointing", "llama-3.2-1b", "train.gradient_checkpointing=false"),
    ("1b 2x2048", "llama-3.2-1b", ""),
    ("1b 2x2048 f32", "llama-3.2-1b", "train.precision=f32"),
    ("1b 2x2048 tf32", "llama-3.2-1b", "train.precision=tf32"),
    ("0.6b 1x1024", "qwen3-0.6b", ""),
    ("gemma-3-4b 2x2048", "gemma-3-4b", ""),
    ("phi-4 2x2048", "phi-4", ""),
    ("smollm3-3b 2x2048", "smollm3-3b", ""),
];

/// Records of builds without the kernels that compute these now.
const OF_OLD_KERNELS: [&str; 3] = ["qwen3.5-4b 2x2048", "1b 2x2048 adamw_8bit", "1b 2x2048 f16"];

/// A step that was measured.
#[derive(Debug)]
struct Record {
    what: String,
    model: String,
    settings: String,
    shape: [usize; 3],
    seconds: f64,
}

impl Record {
    /// A line of `bench` or of a comparison with peers.
    fn of(line: &Value) -> Option<Self> {
        let seconds = line["step_seconds"].as_f64()?;
        let text = |key: &str| line[key].as_str();
        let number = |key: &str| line[key].as_u64().map(|number| usize::try_from(number).unwrap());
        if let Some(what) = text("what") {
            if OF_OLD_KERNELS.contains(&what) {
                return None;
            }
            let (_, model, settings) =
                BENCHES.iter().find(|(name, ..)| *name == what).unwrap_or_else(|| panic!("{what}"));
            let (rows, length) = what.split(' ').find_map(|word| word.split_once('x')).unwrap();
            let shape = [rows.parse().unwrap(), length.parse().unwrap(), 1];
            return Some(Self {
                what: what.into(),
                model: (*model).into(),
                settings: (*settings).into(),
                shape,
                seconds,
            });
        }
        let model = text("model").filter(|_| text("side") == Some("ours"))?;
        let shape = [number("rows")?, number("length")?, number("accumulation")?];
        let what = format!("{model} {shape:?}");
        Some(Self { what, model: model.into(), settings: String::new(), shape, seconds })
    }

    fn planned(&self, gpu: &Gpu) -> f64 {
        let [rows, length, accumulation] = self.shape;
        let config = std::fs::read_to_string(format!("configs/{}.json", self.model)).unwrap();
        let config = ModelConfig::from_json(&config).unwrap();
        // As the benchmarks have it.
        let text = format!(
            "[model]\npath = \"m\"\ndtype = \"bf16\"\ninit = \"random\"\n[lora]\nr = 16\n[data]\nmax_length = {length}\n[train]\n\
             precision = \"bf16\"\nmicro_batch_size = {rows}\ngradient_accumulation_steps = {accumulation}\n\
             gradient_checkpointing = true\n"
        );
        let changes = self.settings.split_whitespace().map(Override::set).collect::<Vec<_>>();
        let recipe = Recipe::parse(Path::new("r.toml"), &text, &changes, Purpose::Benchmark).unwrap();
        let selection = inputs::select(&recipe.lora, &config).unwrap();
        let workload = inputs::workload(&recipe, &config, &selection, &NO_IMAGES, place_on(DeviceKind::Cuda));
        let speed = Speed::Gpu(gpu.rates(recipe.train.precision));
        FullStep::of(&recipe, &workload).seconds(&workload, &speed, 1.0)
    }
}

/// The last record of each kind, of all runs on a card.
fn records() -> Vec<(Gpu, Record)> {
    let mut found: Vec<(Gpu, Record)> = Vec::new();
    for path in glob::glob("benches/results/gpu-*.json").unwrap() {
        let record: Value = serde_json::from_slice(&std::fs::read(path.unwrap()).unwrap()).unwrap();
        let name = record["machine"]["gpu"].as_str().unwrap().split(',').next().unwrap();
        let [gpu] = gpus::find(name)[..] else { panic!("{name}") };
        for run in record["runs"].as_array().unwrap() {
            for line in ["beside_peers", "bench"].iter().filter_map(|key| run[*key].as_array()).flatten() {
                let Some(record) = Record::of(line) else { continue };
                found.retain(|(other, earlier)| (other, &earlier.what) != (&gpu, &record.what));
                found.push((gpu, record));
            }
        }
    }
    found
}

#[test]
fn a_planned_step_takes_as_long_as_cards_took() {
    let records = records();
    assert!(records.len() >= 20, "{}", records.len());
    let mut table = String::new();
    let mut worst = 0.0_f64;
    for (gpu, record) in &records {
        let planned = record.planned(gpu);
        let error = planned / record.seconds - 1.0;
        worst = worst.max(error.abs());
        table += &format!(
            "{:<16} {:<32} {planned:>7.3} {:>7.3} {:>+6.1} %\n",
            gpu.name,
            record.what,
            record.seconds,
            100.0 * error
        );
    }
    assert!(worst <= TOLERANCE, "{table}");
}
