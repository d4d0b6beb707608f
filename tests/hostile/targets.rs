//! Readers of bytes from others: each target passes its input to the function that a command calls.
//!
//! The property tests here and the fuzzers in `fuzz/` share them. A target passes if nothing panics and the result is
//! consistent; time and memory are watched from outside.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use burn::tensor::Device;
use lora_train::config::{CheckpointConfig, DataConfig, DataFormat, DataSource, LoggingConfig, OnBadRow, RowKind};
use lora_train::data::cache::CacheSettings;
use lora_train::data::dataset::{Dataset, OpenOptions};
use lora_train::data::formats::{RowFormat, Sample};
use lora_train::data::template::ChatTemplate;
use lora_train::data::tokenizer::Tokenizer;
use lora_train::device::Dtype;
use lora_train::images::picture::{Picture, size_of};
use lora_train::insight::report::{self, compare::Comparison};
use lora_train::measure::metrics::{Shows, SinkOptions, Sinks, StepMetrics};
use lora_train::model::load;
use lora_train::model::weights::{WeightFiles, Weights};
use lora_train::recipe::{Purpose, Recipe};
use lora_train::save::checkpoint::{self, Checkpoints, HostValues};
use lora_train::save::export::{check_adapter, read_adapter, write_adapter};
use lora_train::schema::Override;
use lora_train::spec::ModelConfig;
use lora_train::train::state::TrainerState;
use serde_json::Value;

use crate::folder::Folder;

/// A target: its name and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const TARGETS: [Target; 14] = [
    ("recipe", recipe),
    ("rows", rows),
    ("config", config),
    ("tokenizer", tokenizer),
    ("template", template),
    ("weights", weights),
    ("gguf", gguf),
    ("base", base),
    ("adapter", adapter),
    ("checkpoint", checkpoint_folder),
    ("logs", logs),
    ("picture", picture),
    ("report", report),
    ("tokens", crate::token_store::tokens),
];

/// Maximum rows to read from a file.
const MAX_ROWS: usize = 200;

pub(crate) fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The fuzzers are built in a subfolder of the repository.
    if here.join("quickstart").is_dir() { here.to_owned() } else { here.join("..") }
}

/// The quickstart model's tokenizer.
pub(crate) fn quickstart_tokenizer() -> &'static Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    TOKENIZER.get_or_init(|| Arc::new(Tokenizer::open(&repository().join("quickstart/model")).unwrap()))
}

pub(crate) fn tiny_config() -> &'static ModelConfig {
    static CONFIG: OnceLock<ModelConfig> = OnceLock::new();
    CONFIG.get_or_init(|| ModelConfig::from_file(&repository().join("configs/tiny.json")).unwrap())
}

/// The parts of an input with several files, separated by a zero byte, which no text contains.
pub(crate) fn parts<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut parts = data.splitn(N, |byte| *byte == 0);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

/// A safetensors file. Input that begins like JSON is a header, a zero byte and data, and gets the header's length in
/// front. Other input is the file itself.
pub(crate) fn safetensors(data: &[u8]) -> Vec<u8> {
    if !data.starts_with(b"{") {
        return data.to_owned();
    }
    let [header, content] = parts(data);
    [&(header.len() as u64).to_le_bytes()[..], header, content].concat()
}

/// A recipe; after a line of three dashes, each line is one `--set`.
pub(crate) fn recipe(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (text, changes) = text.split_once("\n---\n").unwrap_or((text, ""));
    let changes: Vec<Override> = changes.lines().map(Override::set).collect();
    let path = Path::new("recipes/r.toml");
    let parsed = Recipe::parse(path, text, &changes, Purpose::Benchmark);
    match parsed {
        Ok(recipe) => {
            let again = Recipe::parse(path, &recipe.to_toml(), &[], Purpose::Benchmark).unwrap();
            assert_eq!(again, recipe, "resolved.toml is not the recipe that was read");
        }
        Err(problems) => assert!(problems.0.iter().all(|problem| !problem.shown(true).is_empty())),
    }
}

/// A data file. The first byte chooses its name and its format.
pub(crate) fn rows(data: &[u8]) {
    let Some((choice, content)) = data.split_first() else { return };
    let names = match choice & 0x40 {
        0 => ["rows.jsonl", "rows.json", "rows.txt", "rows.jsonl"],
        _ => ["rows.csv", "rows.tsv", "rows.csv.gz", "rows.jsonl.zst"],
    };
    let name = names[usize::from(choice & 3)];
    let formats = [
        DataFormat::Auto,
        DataFormat::Messages,
        DataFormat::Sharegpt,
        DataFormat::Alpaca,
        DataFormat::PromptCompletion,
        DataFormat::Text,
    ];
    let format = formats[usize::from((choice >> 2) & 15) % formats.len()];
    let on_bad_row = if choice & 0x80 == 0 { OnBadRow::Skip } else { OnBadRow::Error };
    let folder = Folder::new();
    let config = data_config(&folder.write(name, content), format, on_bad_row);
    let Ok(pipeline) = Dataset::open(&config, quickstart_tokenizer().clone(), 0, &OpenOptions::default()) else {
        return;
    };
    check_rows(&pipeline, &config);
    folder.assert_nothing_outside();
}

pub(crate) fn data_config(path: &Path, format: DataFormat, on_bad_row: OnBadRow) -> DataConfig {
    let path = path.to_str().unwrap().to_owned();
    let source = DataSource { path, format, ..DataSource::default() };
    DataConfig { train: vec![source], max_length: 64, on_bad_row, ..DataConfig::default() }
}

/// Reads the rows and asserts that a model can be trained on them.
pub(crate) fn check_rows(pipeline: &Dataset, config: &DataConfig) {
    let num_rows = pipeline.num_train_rows();
    assert!(!pipeline.warnings().iter().any(String::is_empty));
    for row in 0..num_rows.min(MAX_ROWS) {
        let Ok((_, row)) = pipeline.train_row(row) else { continue };
        assert_eq!(row.ids.len(), row.carries_loss.len());
        assert!(row.ids.len() <= config.max_length && row.ids.len() <= row.full_length);
        assert!(row.ids.iter().all(|id| *id <= pipeline.tokenizer().max_id()));
        assert!(row.num_target_tokens() <= row.full_target_tokens);
    }
    if config.packing {
        assert!(pipeline.batches_per_epoch(1) <= num_rows as u64);
    }
}

/// A `config.json`.
pub(crate) fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(config) = ModelConfig::from_json(text) else { return };
    let tensors = config.expected_tensors();
    assert!(tensors.len() > config.num_layers());
    // Bytes of weights, two moments and a gradient must fit into 64 bits.
    let parameters: u128 =
        tensors.iter().map(|(_, shape)| shape.iter().map(|size| *size as u128).product::<u128>()).sum();
    assert!(parameters * 16 < u128::from(u64::MAX), "{parameters} parameters");
    assert_eq!(config.num_parameters() as u128, parameters);
    assert!(config.ropes[0].inverse_frequencies(0).iter().all(|frequency| frequency.is_finite()));
}

/// The folder of a tokenizer: `tokenizer.json`, `tokenizer_config.json`, `config.json`.
pub(crate) fn tokenizer(data: &[u8]) {
    let [tokenizer, settings, config] = parts(data);
    let folder = Folder::new();
    folder.write("tokenizer.json", tokenizer);
    for (name, content) in [("tokenizer_config.json", settings), ("config.json", config)] {
        if !content.is_empty() {
            folder.write(name, content);
        }
    }
    let Ok(tokenizer) = Tokenizer::open(folder.path()) else { return };
    for text in ["", "a", "At the beach, Clara\n met  a big frog. \u{e9}\u{1f600}\u{301}<|im_end|>\0\u{feff}"] {
        for special in [true, false] {
            let Ok(tokens) = tokenizer.encode_tokens(text, special) else { continue };
            assert!(tokens.iter().all(|token| token.start <= token.end && token.end <= text.len() + 1));
            let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
            drop(tokenizer.decode(&ids, special));
            let mut stream = tokenizer.decode_stream(true);
            for id in ids {
                drop(stream.push(id));
            }
            drop(stream.finish());
        }
    }
    drop(tokenizer.decode(&[0, 1, u32::MAX], false));
    if let Some(source) = tokenizer.chat_template() {
        drop(ChatTemplate::new(source, "the model", &tokenizer));
    }
}

/// A chat template, the messages, the tools.
pub(crate) fn template(data: &[u8]) {
    let [source, messages, tools] = parts(data);
    let Ok(source) = std::str::from_utf8(source) else { return };
    let Ok(template) = ChatTemplate::new(source, "the test", quickstart_tokenizer()) else { return };
    // Each of them may take all the steps that a rendering has.
    if source.matches("range(").count() > 1 && source.len() % 16 > 0 {
        return;
    }
    let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap_or_default();
    let messages = match json(messages) {
        Value::Array(messages) => messages.into_iter().take(8).collect(),
        _ => serde_json::json!([
            {"role": "user", "content": "x <'\u{e9}\n"},
            {"role": "assistant", "content": "y"},
        ]),
    };
    // A template gets what a row's format has read.
    let row = serde_json::json!({"messages": messages, "tools": json(tools)});
    let Ok(format) = RowFormat::detect(DataFormat::Messages, &BTreeMap::new(), &row, RowKind::Sequence) else { return };
    let Ok(Sample::Chat { messages, tools }) = format.read(&row, Some(&template)) else { return };
    drop(template.render(&messages, tools.as_ref(), true));
    let Ok(rendered) = template.render_with_marks(&messages, tools.as_ref()) else { return };
    let mut end = 0;
    for answer in &rendered.answers {
        assert!(end <= answer.start && answer.start < answer.end, "{:?}", rendered.answers);
        assert!(rendered.text.get(answer.clone()).is_some(), "{:?}", rendered.answers);
        end = answer.end;
    }
}

/// A model folder: `model.safetensors`, or an index and two shards.
pub(crate) fn weights(data: &[u8]) {
    let folder = Folder::new();
    if let Some(sharded) = data.strip_prefix(b"\0") {
        let [index, first, second] = parts(sharded);
        folder.write("model.safetensors.index.json", index);
        folder.write("model-1.safetensors", &safetensors(first));
        folder.write("model-2.safetensors", &safetensors(second));
    } else {
        folder.write("model.safetensors", &safetensors(data));
    }
    let Ok(files) = WeightFiles::open(folder.path()) else { return };
    drop(Weights::Files(files.clone()).check(tiny_config()));
    assert!(files.num_bytes() <= data.len());
    for (name, stored) in files.tensors() {
        let bytes = files.bytes(stored).len();
        if stored.float_dtype().is_some() {
            let numbers = files.load_f32(name, &stored.shape).unwrap();
            assert_eq!(numbers.len(), stored.shape.iter().product::<usize>());
            assert!(numbers.len() <= bytes);
        }
    }
}

/// A GGUF file: its shape, its tokenizer and its tensors.
pub(crate) fn gguf(data: &[u8]) {
    let folder = Folder::new();
    let path = folder.write("model.gguf", data);
    if let Ok(tokenizer) = Tokenizer::open(&path) {
        let ids = tokenizer.encode("a ab\u{e9}", true).unwrap_or_default();
        drop(tokenizer.decode(&ids, true));
    }
    let Ok(config) = ModelConfig::from_file(&path) else { return };
    let weights = Weights::open(&path, &config).unwrap();
    drop(weights.check(&config));
    for (name, shape) in config.expected_tensors() {
        if let [rows, columns] = shape[..]
            && let Ok(tensor) = weights.load(&name, [rows, columns], Dtype::F32, &Device::flex())
        {
            assert!(tensor.shape().num_elements() / 64 <= data.len());
        }
    }
}

/// A model folder with its `config.json`, which says how the weights are stored; loaded where it is sound.
pub(crate) fn base(data: &[u8]) {
    let [config, tensors] = parts(data);
    let folder = Folder::new();
    let config = folder.write("config.json", config);
    folder.write("model.safetensors", &safetensors(tensors));
    let Ok(config) = ModelConfig::from_file(&config) else { return };
    let Ok(weights) = Weights::open(folder.path(), &config) else { return };
    let is_sound = weights.check(&config).is_ok();
    let loaded = load::load(&config, &weights, Dtype::F32, Dtype::F32, &Device::flex());
    assert_eq!(loaded.is_ok(), is_sound);
    for weight in loaded.iter().flat_map(|model| &model.blocks).flat_map(|block| &block.linears) {
        let values: Vec<f32> = weight.values.dense().to_data().try_to_vec().unwrap();
        assert_eq!(values.len(), weight.dims().iter().product::<usize>());
    }
}

/// An adapter: `adapter_config.json` and `adapter_model.safetensors`.
pub(crate) fn adapter(data: &[u8]) {
    let [config, tensors] = parts(data);
    let folder = Folder::new();
    folder.write("in/adapter_config.json", config);
    folder.write("in/adapter_model.safetensors", &safetensors(tensors));
    let Ok(adapter) = read_adapter(&folder.path().join("in")) else { return };
    drop(check_adapter(folder.path(), &adapter, tiny_config()));
    let out = folder.path().join("out");
    write_adapter(&out, &adapter.weights, &adapter.config, "base").unwrap();
    let again = read_adapter(&out).unwrap();
    // NaN does not equal itself.
    let bits = |adapter: &lora_train::save::export::SavedAdapter| -> Vec<(String, Vec<u32>)> {
        let weights = adapter.weights.iter().map(|(module, pair)| {
            (module.clone(), pair.a.values.iter().chain(&pair.b.values).map(|value| value.to_bits()).collect())
        });
        weights.collect()
    };
    assert_eq!(bits(&again), bits(&adapter));
    assert_eq!((again.config.r, again.config.lora_alpha), (adapter.config.r, adapter.config.lora_alpha));
    folder.assert_nothing_outside();
}

/// A checkpoint: its state, its checksums, the optimizer's moments, its recipe.
pub(crate) fn checkpoint_folder(data: &[u8]) {
    let [state, sums, recipe, moments] = parts(data);
    let folder = Folder::new();
    let name = |file: &str| format!("checkpoints/step-000001/{file}");
    folder.write(&name("trainer_state.json"), state);
    folder.write(&name("SHA256SUMS"), sums);
    folder.write(&name("optimizer.safetensors"), &safetensors(moments));
    folder.write(&name("resolved.toml"), recipe);
    let checkpoint = folder.path().join(name(""));
    drop(checkpoint::verify(&checkpoint));
    let found = Checkpoints::new(folder.path(), &CheckpointConfig::default()).newest_good().unwrap();
    assert_eq!(found.checkpoint.is_some(), found.damaged.is_empty());
    if let Ok(state) = checkpoint::load_state::<TrainerState>(&checkpoint) {
        assert!(state.epochs() >= 0.0);
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::to_string(&serde_json::from_str::<TrainerState>(&text).unwrap()).unwrap(), text);
    }
    for tensor in checkpoint::load_moments(&checkpoint).unwrap_or_default() {
        let len = match &tensor.values {
            HostValues::F32(numbers) => numbers.len(),
            HostValues::U8(bytes) => bytes.len(),
        };
        assert_eq!(len, tensor.shape.iter().product::<usize>());
    }
    if let Some(text) = checkpoint::load_recipe(&checkpoint) {
        drop(Recipe::parse(&checkpoint, &text, &[], Purpose::Training));
    }
    folder.assert_nothing_outside();
}

/// An earlier start's metrics.jsonl, and the names of its event files, one per line. The first byte is the step from
/// which the run resumes.
pub(crate) fn logs(data: &[u8]) {
    let Some((step, data)) = data.split_first() else { return };
    let [metrics, names] = parts(data);
    let (folder, step) = (Folder::new(), u64::from(*step & 0x7f));
    let path = folder.write("metrics.jsonl", metrics);
    for name in String::from_utf8_lossy(names).lines().take(8) {
        let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '.').take(60).collect();
        folder.write(&format!("tensorboard/events.out.tfevents.{name}"), b"");
    }
    let options = SinkOptions {
        run_dir: folder.path(),
        resume_step: Some(step),
        has_rollouts: true,
        has_evaluated: false,
        total_steps: 300,
        eval_steps: None,
        shows: Shows::Warnings,
        interrupter: burn_train::Interrupter::new(),
    };
    let mut sinks = Sinks::open(&LoggingConfig::default(), options).unwrap();
    sinks.step(&StepMetrics { step: step + 1, ..StepMetrics::default() });
    drop(sinks);
    let text = std::fs::read(&path).unwrap();
    assert!(text.ends_with(b"\n"));
    let mut steps = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(|line| {
        let line: Value = serde_json::from_slice(line).unwrap();
        line["step"].as_u64().unwrap()
    });
    assert!(steps.all(|found| found <= step + 1));
    folder.assert_nothing_outside();
}

/// The folder of a run, for a report and a comparison: metrics.jsonl, summary.json or unfinished.json, resolved.toml,
/// environment.json, samples.jsonl, `memory_plan.json`.
pub(crate) fn report(data: &[u8]) {
    let summary = if data.len().is_multiple_of(2) { "summary.json" } else { "unfinished.json" };
    let names = ["metrics.jsonl", summary, "resolved.toml", "environment.json", "samples.jsonl", "memory_plan.json"];
    let folder = Folder::new();
    for (name, content) in names.iter().zip(parts::<6>(data)) {
        folder.write(name, content);
    }
    if let Ok(path) = report::write(folder.path(), None) {
        let page = std::fs::read_to_string(path).unwrap();
        // File contents must appear in the page only as text.
        assert!(!page.contains("<hostile"), "a tag of the input is one of the page");
        assert!(page.len() < 4 << 20, "{} bytes", page.len());
        assert_drawn_by_numbers(&page);
    }
    if let Ok((comparison, _)) = Comparison::of(&[vec![folder.path().to_owned()], vec![folder.path().to_owned()]]) {
        assert!(!comparison.text().is_empty());
    }
    folder.assert_nothing_outside();
}

/// A number that is not finite would leave a hole in a drawing.
fn assert_drawn_by_numbers(page: &str) {
    for name in ["d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "points", "viewBox"] {
        for rest in page.split(&format!(" {name}=\"")).skip(1) {
            let value = rest.split('"').next().unwrap_or(rest);
            assert!(!value.contains("NaN") && !value.contains("inf"), "{name}=\"{value}\"");
        }
    }
}

/// Options with a token cache in `folder`.
pub(crate) fn with_cache(folder: &Path) -> OpenOptions<'static> {
    let cache = CacheSettings { folder: Some(folder.to_owned()), max_bytes: 1 << 30, min_file_bytes: 0 };
    OpenOptions { cache, ..OpenOptions::default() }
}

/// Whatever it is, it is an image of the size that its header says, or an error.
fn picture(input: &[u8]) {
    let size = size_of(input);
    // Larger ones take their time.
    if size.as_ref().is_ok_and(|[width, height]| width * height > 1 << 22) {
        return;
    }
    if let Ok(picture) = Picture::decode(input) {
        assert_eq!(size, Ok(picture.size));
        assert_eq!(picture.pixels.len(), 3 * picture.size[0] * picture.size[1]);
    }
}
