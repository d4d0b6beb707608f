//! A model that sees against transformers and PEFT, in `f32` on the CPU; and the command on rows with images.
//!
//! `scripts/make_image_golden.py` makes the golden files and says at its top what they hold.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use burn::tensor::Device;
use lora_train::config::{
    DataConfig, DataSource, ObjectiveConfig, ObjectiveName, OptimizerConfig, RowKind, TrainConfig,
};
use lora_train::data::batch::{Batch, RowSource};
use lora_train::data::dataset::{Dataset, OpenOptions};
use lora_train::data::encode::EncodedRow;
use lora_train::data::tokenizer::Tokenizer;
use lora_train::device::Dtype;
use lora_train::images::picture::Picture;
use lora_train::images::resize::resize;
use lora_train::images::{FeatureWriter, Images, Limits, is_of_image};
use lora_train::lora::AdapterSet;
use lora_train::model::decode::{NextTokens, Sequence, next_logits};
use lora_train::model::tower::{self, Tower};
use lora_train::model::weights::{WeightFiles, Weights};
use lora_train::model::{Model, load};
use lora_train::spec::{Filter, ModelConfig, SeenBothWays, Vision};
use lora_train::train::objective::objective;
use lora_train::train::step::TrainStep;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::common::families::formula;
use crate::common::{lora_train, signal, stderr, wait, wait_until};
use crate::golden::{Golden, assert_near, compare_gradients, name_in_file, numbers, values};
use crate::preferences::norm;

const NAMES: [&str; 3] = ["a.png", "b.png", "c.png"];

/// Folders of golden files, and how many tokens a row may have there.
const FAMILIES: [(&str, usize); 14] = [
    (MISTRAL3, 64),
    (SMOLVLM, 256),
    ("images-internvl", 256),
    (QWEN3_VL, 96),
    ("images-qwen3_5", 96),
    (QWEN2_5_VL, 96),
    (QWEN2_VL, 96),
    (GEMMA3, 96),
    (PADDLEOCR, 96),
    (GLM, 96),
    (GLM_MOE, 96),
    (LFM2_VL, 256),
    (GEMMA4, 96),
    (GEMMA4_UNIFIED, 96),
];
const GLM: &str = "images-glm46v";
const GLM_MOE: &str = "images-glm4v_moe";
const LFM2_VL: &str = "images-lfm2_vl";
const GEMMA4: &str = "images-gemma4";
const GEMMA4_UNIFIED: &str = "images-gemma4_unified";
const PADDLEOCR: &str = "images-paddleocr_vl";
const QWEN2_VL: &str = "images-qwen2_vl";
pub(crate) const GEMMA3: &str = "images-gemma3";
pub(crate) const QWEN3_VL: &str = "images-qwen3_vl";
const QWEN2_5_VL: &str = "images-qwen2_5_vl";
const SMOLVLM: &str = "images-smolvlm";
pub(crate) const MISTRAL3: &str = "images-mistral3";

fn golden_folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(family)
}

fn json_of(family: &str, name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(golden_folder(family).join(name)).unwrap()).unwrap()
}

/// Writes the model, its rows and their images into `folder`; tensors have the names that transformers saves them under.
pub(crate) fn write_model(family: &str, folder: &Path) -> Golden {
    for entry in fs::read_dir(golden_folder(family)).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_str().unwrap().starts_with("golden") {
            fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
        }
    }
    let golden = Golden::open(family, folder.to_owned());
    let mut tensors = BTreeMap::new();
    for (name, made) in golden.json["tensors"].as_object().unwrap() {
        let shape = numbers(&made["shape"], |side| side.as_u64().unwrap() as usize);
        let centre = made["centre"].as_f64().unwrap() as f32;
        let values = formula(name, made["bound"].as_f64().unwrap()).take(shape.iter().product());
        let bytes: Vec<u8> = values.flat_map(|value| (centre + value).to_le_bytes()).collect();
        let name = match name.strip_prefix("model.language_model.") {
            _ if [SMOLVLM, GLM, GLM_MOE, LFM2_VL, GEMMA4, GEMMA4_UNIFIED].contains(&family)
                || family.starts_with("images-qwen3") =>
            {
                name.clone()
            }
            Some(rest) if [QWEN2_5_VL, QWEN2_VL, PADDLEOCR].contains(&family) => format!("model.{rest}"),
            None if [QWEN2_5_VL, QWEN2_VL, PADDLEOCR].contains(&family) && name == "lm_head.weight" => name.clone(),
            Some(rest) => format!("language_model.model.{rest}"),
            None if name == "lm_head.weight" => format!("language_model.{name}"),
            None if family == PADDLEOCR => {
                name.replace("model.projector.", "mlp_AR.").trim_start_matches("model.").to_owned()
            }
            None => name.trim_start_matches("model.").to_owned(),
        };
        tensors.insert(name, (shape, bytes));
    }
    let views = tensors
        .iter()
        .map(|(name, (shape, bytes))| (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    golden
}

struct Seen {
    golden: Golden,
    data: Dataset,
    model: Model,
    images: Arc<Images>,
    tower: Tower,
}

/// The rows of the golden files, and the model with the features of their images.
fn seen(family: (&str, usize), folder: &Path) -> Seen {
    seen_in(family, folder, ("rows.jsonl", RowKind::default()))
}

fn seen_in((family, max_length): (&str, usize), folder: &Path, (rows, row_kind): (&str, RowKind)) -> Seen {
    let golden = write_model(family, folder);
    let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
    let vision = Vision::of_folder(folder, &config).unwrap().unwrap();
    let limits = Limits { max_length, ..Limits::default() };
    let images = Arc::new(Images::new(Ok(vision.clone()), limits).of_rows());
    let source = DataSource { path: folder.join(rows).display().to_string(), ..DataSource::default() };
    let data = DataConfig { train: vec![source], max_length, row_kind, ..DataConfig::default() };
    let options = OpenOptions { images: Some(Arc::clone(&images)), ..OpenOptions::default() };
    let data = Dataset::open(&data, Arc::new(Tokenizer::open(folder).unwrap()), 0, &options).unwrap();
    let files = WeightFiles::open(folder).unwrap();
    let weights = Weights::Files(files.clone());
    let tower = Tower::load(vision.clone(), (&weights, &files), &config, &Device::flex()).unwrap();
    let (key, all) = (images.key(tower::digest(&files).unwrap()).unwrap(), images.all());
    let mut writer = FeatureWriter::new((None, u64::MAX), key, &vision, &all).unwrap();
    for image in &all {
        writer.add(image, || Ok(tower.features(images.pieces(image)?))).unwrap();
    }
    let model = load::load(&config, &weights, Dtype::F32, Dtype::F32, &Device::flex()).unwrap();
    Seen { golden, data, model: model.with_features(writer.finish()), images, tower }
}

#[test]
fn resized_images_are_torchvisions_to_the_bit() {
    for case in json_of(MISTRAL3, "resize.json").as_array().unwrap() {
        let picture =
            Picture::decode(&fs::read(golden_folder(MISTRAL3).join(case["image"].as_str().unwrap())).unwrap()).unwrap();
        let to = numbers(&case["to"], |side| side.as_u64().unwrap() as usize).try_into().unwrap();
        let filter = match case["filter"].as_str().unwrap() {
            "bicubic" => Filter::Bicubic,
            "bilinear" => Filter::Bilinear,
            _ => Filter::Lanczos,
        };
        let resized = resize(&picture.pixels, picture.size, to, filter);
        assert_eq!(format!("{:x}", Sha256::digest(&resized)), case["sha256"].as_str().unwrap(), "{case}");
    }
}

#[test]
fn images_of_any_size_become_as_many_tokens_as_in_transformers() {
    for (family, _) in FAMILIES {
        let folder = golden_folder(family);
        let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
        let vision = Vision::of_folder(&folder, &config).unwrap().unwrap();
        let tokenizer = Tokenizer::open(&folder).unwrap();
        let counts = json_of(family, "counts.json");
        assert_eq!(counts.as_array().unwrap().len(), 200);
        for case in counts.as_array().unwrap() {
            let [width, height, count] = numbers(case, |n| n.as_u64().unwrap() as usize).try_into().unwrap();
            let cut = vision.cut([width, height], None).unwrap();
            let ids = tokenizer.encode(&cut.text(vision.cutting), false).unwrap();
            assert_eq!(ids.len(), count, "{family}: {width} x {height}");
            let features = ids.iter().filter(|id| **id == vision.image_token_id).count();
            assert_eq!(features, cut.num_tokens(), "{family}: {width} x {height}");
        }
    }
}

/// As the first files of PaddleOCR-VL have it.
#[test]
fn a_config_with_the_keys_of_the_text_beside_the_others_is_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let read = |config: &Value| {
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let config = ModelConfig::from_file(&folder.path().join("config.json")).unwrap();
        (Vision::of_folder(folder.path(), &config).unwrap().unwrap(), config)
    };
    let preprocessor = "preprocessor_config.json";
    fs::copy(golden_folder(PADDLEOCR).join(preprocessor), folder.path().join(preprocessor)).unwrap();
    let mut config = json_of(PADDLEOCR, "config.json");
    let (vision, nested) = read(&config);
    let all = config.as_object_mut().unwrap();
    let mut text = all.remove("text_config").unwrap();
    let text = text.as_object_mut().unwrap();
    text.remove("model_type");
    let mut rope = text.remove("rope_parameters").unwrap();
    text.insert("rope_theta".to_owned(), rope.as_object_mut().unwrap().remove("rope_theta").unwrap());
    text.insert("rope_scaling".to_owned(), rope);
    all.append(text);
    all["vision_config"]["model_type"] = json!("paddleocr_vl");
    assert_eq!(read(&config), (vision, nested));
}

#[test]
fn pixels_features_and_tokens_are_those_of_transformers() {
    for family in FAMILIES {
        let folder = tempfile::tempdir().unwrap();
        let Seen { golden, data, images, tower, .. } = seen(family, folder.path());
        for name in NAMES {
            let image = images.add(&folder.path().join(name).display().to_string()).unwrap();
            let pieces = images.pieces(&image).unwrap();
            let expected = &golden.json["images"][name];
            assert_eq!(json!(pieces[0].size), expected["size"]);
            let values = pieces.iter().flat_map(|piece| &piece.values);
            let bytes: Vec<u8> = values.flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(
                format!("{:x}", Sha256::digest(bytes)),
                expected["pixels"].as_str().unwrap(),
                "{family:?} {name}"
            );
            assert_close(&tower.features(pieces), &golden.f32s(&format!("features.{name}")), 1e-5, name);
        }
        assert_eq!(images.all().len(), 3);
        for (index, expected) in golden.json["rows"].as_array().unwrap().iter().enumerate() {
            let (_, row) = data.train_row(index).unwrap();
            assert_eq!(json!(in_vocabulary(&row.ids, &images)), expected["ids"], "{family:?}, row {index}");
            let carries_loss: Vec<u8> = row.carries_loss.iter().map(|loss| u8::from(*loss)).collect();
            assert_eq!(json!(carries_loss), expected["carries_loss"], "{family:?}, row {index}");
        }
    }
}

/// Ids of tokens as the vocabulary has them.
fn in_vocabulary(ids: &[u32], images: &Images) -> Vec<u32> {
    ids.iter().map(|&id| if is_of_image(id) { images.image_token_id() } else { id }).collect()
}

#[test]
fn preferences_among_answers_to_images_have_the_loss_and_gradients_that_follow_from_transformers() {
    for family in FAMILIES {
        let expected = json_of(family.0, "pairs.json");
        compare_pairs(family, (RowKind::Pair, ObjectiveName::Dpo), (&expected["ids"], &expected));
    }
}

#[test]
fn scores_of_answers_to_images_do_too() {
    for family in FAMILIES {
        let expected = json_of(family.0, "pairs.json");
        compare_pairs(family, (RowKind::ScoredPair, ObjectiveName::Reward), (&expected["ids"], &expected["rewards"]));
    }
}

fn compare_pairs(
    family: (&str, usize),
    (row_kind, objective_name): (RowKind, ObjectiveName),
    (ids, expected): (&Value, &Value),
) {
    let folder = tempfile::tempdir().unwrap();
    let Seen { mut golden, data, model, images, .. } = seen_in(family, folder.path(), ("pairs.jsonl", row_kind));
    let rows: Vec<_> = (0..data.num_train_rows()).map(|row| vec![data.train_row(row).unwrap()]).collect();
    let sequences = rows.iter().flat_map(|row| {
        let row = &row[0].1;
        row.sequences().into_iter().map(|sequence| in_vocabulary(&row.ids[sequence], &images))
    });
    assert_eq!(&json!(sequences.collect::<Vec<_>>()), ids, "{family:?}");

    let config = ObjectiveConfig { name: objective_name, ..ObjectiveConfig::default() };
    golden.json["score_bound"] = expected["score_bound"].clone();
    let adapters = Golden::adapters(&golden.json, &model);
    let (train, optimizer) = (TrainConfig::default(), OptimizerConfig::default());
    let step = TrainStep::new(model, adapters, &train, &optimizer, None, 0);
    let mut step = step.with_objective(objective(&config));
    let losses = numbers(&expected["losses"], |loss| loss.as_f64().unwrap());
    assert_eq!(losses.len(), rows.len());
    let batch_of = |rows: &[_]| Batch::of_kind(row_kind, rows, family.1);
    for (row, loss) in rows.iter().zip(losses) {
        let found = step.eval_loss(&batch_of(std::slice::from_ref(row))).mean().unwrap();
        assert_near(found, loss, 1e-5, family.0);
    }
    step.forward_backward(&batch_of(&rows));
    assert_eq!(step.grads().iter().count(), expected["gradient_norms"].as_object().unwrap().len());
    for (id, grad) in step.grads().iter() {
        let key = name_in_file(step.adapters(), id);
        let (expected, found) = (expected["gradient_norms"][&key].as_f64().unwrap(), norm(grad) / 4.0);
        assert!((found - expected).abs() <= 1e-3 * expected, "{family:?}: {key}: {found} and {expected}");
    }
}

/// Numbers that differ by less than a share of the largest.
fn assert_close(found: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let error = found.iter().zip(expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs())) / largest;
    assert!(error < bound, "{what}: {error:.1e}");
}

#[test]
fn logits_losses_and_gradients_with_images_are_those_of_transformers_and_peft() {
    FAMILIES.into_iter().filter(|(family, _)| !has_three_positions(family)).for_each(compare_training);
}

#[test]
fn those_of_models_with_three_positions_are_too() {
    FAMILIES.into_iter().filter(|(family, _)| has_three_positions(family)).for_each(compare_training);
}

fn has_three_positions(family: &str) -> bool {
    family.contains("qwen") || [PADDLEOCR, GLM, GLM_MOE].contains(&family)
}

fn compare_training(family: (&str, usize)) {
    let folder = tempfile::tempdir().unwrap();
    let Seen { golden, data, model, images, .. } = seen(family, folder.path());
    let rows: Vec<_> = (0..data.num_train_rows()).map(|row| vec![data.train_row(row).unwrap()]).collect();
    let adapters = Golden::adapters(&golden.json, &model);

    let logits = values(&model.logits(&Batch::of_rows(&rows[..1]), &adapters));
    assert_close(&logits, &golden.f32s("logits"), 1e-4, family.0);
    // Images that are seen both ways are passed as a whole.
    let behind_image =
        rows[0][0].1.ids.windows(2).position(|pair| is_of_image(pair[0]) && !is_of_image(pair[1])).unwrap() + 1;
    let is_seen_ahead = images.vision().unwrap().seen_both_ways != SeenBothWays::Nowhere;
    let splits = if is_seen_ahead { vec![0, behind_image] } else { vec![0, 12, 30] };
    compare_continued(&model, &adapters, (&rows[0][0].1.ids, &splits), &logits);
    compare_with_one_position(&model, &adapters, &rows[..1], &logits);
    compare_shared(&model, &adapters, &rows[0]);

    let train = TrainConfig { max_grad_norm: 1.0, ..TrainConfig::default() };
    let optimizer = OptimizerConfig { learning_rate: 1e-3, weight_decay: 0.0, ..OptimizerConfig::default() };
    let step = || TrainStep::new(model.clone(), adapters.clone(), &train, &optimizer, None, 0);
    let batch = Batch::of_rows(&rows);
    let mut first = step();
    first.forward_backward(&batch);
    compare_gradients(&first, batch.num_target_tokens() as f64, &golden.json["gradients"]);

    // Packed into one row, each has what it has alone, to the bit.
    let logits_of = |rows: &[Vec<_>]| values(&model.logits(&Batch::of_rows(rows), &adapters));
    let alone: Vec<f32> = rows.iter().flat_map(|row| logits_of(std::slice::from_ref(row))).collect();
    let packed = logits_of(&[rows.concat()]);
    if family.0 == GLM_MOE {
        // How a product of an expert is rounded depends on how many tokens it gets.
        assert_close(&packed, &alone, 1e-6, family.0);
    } else {
        let apart = packed.iter().zip(&alone).filter(|(a, b)| a != b).count();
        assert_eq!(apart, 0, "{family:?}: of {}", alone.len());
    }

    // One by one, together, and packed into one row: 20 steps are the same, of which the first say that rows do not see each other.
    let packed: Vec<_> = vec![rows.concat()];
    let one_by_one = rows.iter().map(|row| vec![row.clone()]).collect();
    for (num_steps, micro_batches) in [(20, one_by_one), (6, vec![rows.clone()]), (6, vec![packed])] {
        let mut step = step();
        let curve = golden.json["curve"].as_array().unwrap();
        assert_eq!(curve.len(), 20);
        for expected in &curve[..num_steps] {
            micro_batches.iter().for_each(|rows| step.forward_backward(&Batch::of_rows(rows)));
            let outcome = step.update(1e-3);
            assert_near(outcome.loss, expected.as_f64().unwrap(), 1e-5, "loss");
        }
    }
}

/// A text that is passed to the model in parts, and then token by token, has the logits of the whole.
fn compare_continued(model: &Model, adapters: &AdapterSet, (ids, splits): (&[u32], &[usize]), logits: &[f32]) {
    let mut sequence = Sequence::new(model);
    let ends: Vec<usize> = splits[1..].iter().copied().chain(ids.len() - 4..=ids.len()).collect();
    for part in splits[..1].iter().chain(&ends).zip(&ends).map(|(start, end)| *start..*end) {
        let (end, token_ids) = (part.end, &ids[part]);
        let next =
            next_logits(model, &mut [NextTokens { sequence: &mut sequence, adapters, token_ids, num_logits: 1 }]);
        let of_token = &logits[(end - 1) * model.config.vocab_size..][..model.config.vocab_size];
        assert_close(&values(&next), of_token, 1e-4, "parts");
    }
}

/// Where tokens have three positions, other logits follow from one.
fn compare_with_one_position(
    model: &Model,
    adapters: &AdapterSet,
    rows: &[Vec<(RowSource, EncodedRow)>],
    logits: &[f32],
) {
    let mut other = model.clone();
    if other.config.ropes.iter_mut().all(|rope| rope.axes.take().is_none()) {
        return;
    }
    let found = values(&other.logits(&Batch::of_rows(rows), adapters));
    let apart = found.iter().zip(logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart > 0.03 * logits.iter().fold(0.0, |most, logit| logit.abs().max(most)), "{apart}");
}

/// Texts that begin with the same images share their beginning.
fn compare_shared(model: &Model, adapters: &AdapterSet, row: &[(RowSource, EncodedRow)]) {
    let mut other = row.to_vec();
    *other[0].1.ids.last_mut().unwrap() = 9;
    let alike = [row.to_vec(), other];
    let together = Batch::of_rows(&alike);
    let shares = model.config.longest_sharing() >= row[0].1.ids.len();
    assert_eq!(shares, model.arranged(&together, false).num_tokens() < together.num_tokens());
    let loss = |micro_batches: &[Batch]| {
        let (train, optimizer) = (TrainConfig::default(), OptimizerConfig::default());
        let mut step = TrainStep::new(model.clone(), adapters.clone(), &train, &optimizer, None, 0);
        micro_batches.iter().for_each(|batch| step.forward_backward(batch));
        step.update(1e-3).loss
    };
    assert_near(loss(&[together]), loss(&alike.map(|row| Batch::of_rows(&[row]))), 1e-6, "loss");
}

/// Writes a table with a column of texts, and what `datasets` makes of lists of images and of images: structs of bytes and paths.
fn write_table(path: &Path, texts: [String; 2], [a, c]: [Vec<u8>; 2]) {
    let image = "{ optional binary bytes; optional binary path (UTF8); }";
    let schema = format!(
        "message rows {{ required binary messages (UTF8); optional group images (LIST) {{ repeated group list {{ optional group element \
         {image} }} }} optional group image {image} }}"
    );
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let mut writer = SerializedFileWriter::new(fs::File::create(path).unwrap(), schema, Arc::default()).unwrap();
    let mut columns = writer.next_row_group().unwrap();
    let texts = texts.map(|text| ByteArray::from(&*text));
    let [a, c] = [a, c].map(ByteArray::from);
    // Values, and how deep each place is defined and repeated.
    let lists: [&[i16]; 2] = [&[4, 3, 0], &[4, 4, 0]];
    for (values, defined, repeated) in [
        (&texts[..], None, None),
        (&[a], Some(lists[0]), Some(&[0, 1, 0][..])),
        (&["a.png".into(), "b.png".into()], Some(lists[1]), Some(&[0, 1, 0])),
        (&[c], Some(&[0, 2]), None),
        (&[], Some(&[0, 1]), None),
    ] {
        let mut column = columns.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(values, defined, repeated).unwrap();
        column.close().unwrap();
    }
    columns.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn images_as_bytes_in_a_table_are_those_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    let said = |text: &str| json!([{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]);
    let messages = [said("<image> or <image>"), said("This?")];
    let bytes = ["a.png", "c.png"].map(|name| fs::read(path.join(name)).unwrap());
    write_table(&path.join("table.parquet"), messages.clone().map(|said| said.to_string()), bytes);
    let rows = [json!(["a.png", "b.png"]), json!(["c.png"])];
    let rows = rows.iter().zip(&messages).map(|(images, said)| json!({"messages": said, "images": images}));
    fs::write(path.join("files.jsonl"), rows.map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    let found = ["table.parquet", "files.jsonl"].map(|name| {
        let Seen { data, images, .. } = seen_in((MISTRAL3, 64), path, (name, RowKind::default()));
        let rows: Vec<_> = (0..data.num_train_rows()).map(|row| data.train_row(row).unwrap().1).collect();
        // What is in a row waits in a file, and is read from there again.
        let seen = |image: &Arc<_>| images.pieces(image).unwrap();
        (rows, images.all().iter().map(seen).collect::<Vec<_>>())
    });
    assert_eq!((found[0].0.len(), found[0].1.len()), (2, 3));
    assert!(found[0] == found[1]);
}

/// Runs the command in `folder`, with a cache of its own there.
fn run_in(folder: &Path, args: &[&str]) -> (bool, String) {
    let mut command = lora_train(args);
    let command = command.current_dir(folder).env("LORA_TRAIN_CACHE", folder.join("cache")).env("HF_HUB_OFFLINE", "1");
    let output = command.output().unwrap();
    (output.status.success(), stderr(&output) + &String::from_utf8_lossy(&output.stdout))
}

pub(crate) const RECIPE: &str = "output_dir = \"run\"\n[model]\npath = \".\"\n[data]\nmax_length = 160\n[[data.train]]\npath = \"rows.jsonl\"\n\
                      [[data.eval]]\npath = \"rows.jsonl\"\n[train]\nmax_steps = 2\nmicro_batch_size = 2\n\
                      [eval.task]\nmetric = \"exact_match\"\nmax_new_tokens = 4\n[device]\nname = \"cpu\"\n";

#[test]
fn a_model_that_sees_is_trained_and_its_images_are_encoded_once() {
    train_and_ask((MISTRAL3, "[IMG][IMG][IMG_BREAK]"));
    train_and_ask((QWEN3_VL, "<|vision_start|><|image_pad|><|image_pad|>"));
}

#[test]
fn so_are_models_with_tables_of_layers_and_those_that_cut_images_into_tiles() {
    train_and_ask((GEMMA4, "<|image><|image|><|image|>"));
    train_and_ask((GEMMA4_UNIFIED, "<|image><|image|><|image|>"));
    train_and_ask((LFM2_VL, "<|image_start|><|img_row_1_col_1|><image>"));
    train_and_ask((GLM, "<|begin_of_image|><|image|><|image|>"));
    train_and_ask((GLM_MOE, "<|begin_of_image|><|image|><|image|>"));
}

fn train_and_ask((family, tokens): (&str, &str)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(family, path);
    let sampled = "[eval]\ngenerate = [\"![](a.png) What?\"]\n[eval.task]";
    fs::write(path.join("recipe.toml"), RECIPE.replace("[eval.task]", sampled)).unwrap();
    let (is_done, said) = run_in(path, &["check", "recipe.toml"]);
    assert!(is_done, "{said}");
    let lost = "eval.generate=['![](lost.png) What?']";
    let (is_done, said) = run_in(path, &["check", "recipe.toml", "--set", lost]);
    assert!(!is_done && said.contains("`eval.generate`: the image \"lost.png\" cannot be read"), "{said}");
    let (is_done, said) = run_in(path, &["inspect", "recipe.toml"]);
    assert!(is_done && said.contains(tokens), "{said}");
    let kept = || {
        let entries = fs::read_dir(path.join("cache/images")).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = entries.map(|file| (fs::read(&file).unwrap(), file)).collect();
        files.sort();
        files
    };
    let (is_done, said) = run_in(path, &["recipe.toml"]);
    assert!(is_done, "{said}");
    let first = kept();
    assert_eq!(first.len(), 3);
    let losses = fs::read_to_string(path.join("run/metrics.jsonl")).unwrap();
    assert!(losses.contains("eval_loss") && losses.contains("eval_score"), "{losses}");
    let config = fs::read_to_string(path.join("run/adapter/adapter_config.json")).unwrap();
    assert!(config.contains("language_model") && !config.contains("vis"), "{config}");

    // What is kept is used: the weights of the tower are not asked for again, and another limit makes others.
    let (is_done, said) = run_in(path, &["eval", "run"]);
    assert!(is_done, "{said}");
    assert_eq!(kept(), first);
    let answer = |images: &[&str]| {
        let args = [&["generate", "run", "What?", "--max-new-tokens", "8", "--quiet"], images].concat();
        let (is_done, said) = run_in(path, &args);
        assert!(is_done, "{said}");
        said
    };
    assert_ne!(answer(&["--image", "a.png"]), answer(&["--image", "c.png"]));
    let samples = fs::read_to_string(path.join("run/samples.jsonl")).unwrap();
    let last: Value = serde_json::from_str(samples.lines().last().unwrap()).unwrap();
    let (_, said) =
        run_in(path, &["generate", "run", "What?", "--image", "a.png", "--max-new-tokens", "96", "--quiet"]);
    assert_eq!(last["text"].as_str().unwrap(), said.trim_end_matches('\n'));
    let inlined = format!("data:image/png;base64,{}", STANDARD.encode(fs::read(path.join("a.png")).unwrap()));
    assert!(fs::read_to_string(path.join("run/report.html")).unwrap().contains(&inlined));
    assert_ne!(answer(&["--image", "a.png", "--image", "c.png"]), answer(&[]));
    let (is_done, said) = run_in(path, &["merge", "run", "--out", "merged"]);
    assert!(is_done, "{said}");
    let (is_done, said) =
        run_in(path, &["generate", "merged", "What?", "--max-new-tokens", "8", "--quiet", "--image", "a.png"]);
    assert!(is_done && said == answer(&["--image", "a.png"]), "{said}");
    let (is_done, said) = run_in(path, &["merge", "run", "--out", "run.gguf"]);
    assert!(is_done || said.contains("are not written here"), "{said}");
    assert_eq!(kept(), first);
    // As rows of a file in another folder; its texts come in its order.
    fs::create_dir(path.join("asked")).unwrap();
    let said = json!([{"role": "user", "content": [{"type": "image", "path": "../a.png"}, {"type": "text", "text": "What?"}]}]);
    let rows = [
        json!({"prompt": "What?", "images": ["../a.png"], "id": 7}),
        json!({"prompt": "What?", "image": "../c.png"}),
        json!({"prompt": "<image><image>What?", "images": ["../a.png", "../c.png"]}),
        json!({"messages": said}),
        json!({"prompt": "What?", "images": []}),
    ];
    fs::write(path.join("asked/rows.jsonl"), rows.map(|row| format!("{row}\n")).concat()).unwrap();
    let args = ["generate", "run", "--prompts", "asked/rows.jsonl", "--max-new-tokens", "8", "--quiet"];
    let (is_done, said) = run_in(path, &args);
    let lines: Vec<Value> = said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(is_done && lines.len() == 5 && lines[0]["id"] == 7, "{said}");
    let texts = [&["--image", "a.png"][..], &["--image", "c.png"], &["--image", "a.png", "--image", "c.png"]];
    for (line, images) in lines.iter().zip(texts.into_iter().chain([texts[0], &[]])) {
        assert_eq!(line["text"].as_str().unwrap(), answer(images).trim_end_matches('\n'), "{line}");
    }
    fs::write(path.join("asked/rows.jsonl"), json!({"prompt": "What?", "image": "a.png"}).to_string()).unwrap();
    let (is_done, said) = run_in(path, &args);
    assert!(!is_done && said.contains("asked/rows.jsonl:1: the image \"asked/a.png\" cannot be read"), "{said}");
    let (is_done, said) =
        run_in(path, &["recipe.toml", "--set", "data.image_max_pixels=600", "--set", "output_dir=small"]);
    assert!(is_done, "{said}");
    assert_eq!(kept().len(), 6);

    // Where nothing may be kept, the numbers are the same.
    let settings = ["--set", "data.image_cache_gib=0", "--set", "output_dir=unkept"];
    let (is_done, said) = run_in(path, &[&["plan", "recipe.toml"][..], &settings].concat());
    assert!(is_done && said.contains("beyond `data.image_cache_gib`, made in every epoch"), "{said}");
    let (is_done, said) = run_in(path, &[&["recipe.toml"][..], &settings].concat());
    assert!(is_done && said.contains("what is seen of 3 of 3 images: they are encoded in every epoch"), "{said}");
    assert!(kept().is_empty(), "the limit is of earlier runs too");
    let adapter = |run: &str| fs::read(path.join(run).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(adapter("run") == adapter("unkept"));
}

#[test]
fn answers_to_images_are_written_and_rewarded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    let row = |image: &str, text: &str| json!({"images": [image], "prompt": text}).to_string() + "\n";
    let rows = [row("a.png", "What?"), row("c.png", "What?"), json!({"prompt": "No image."}).to_string()].concat();
    fs::write(path.join("prompts.jsonl"), rows).unwrap();
    let reward = "def few(prompts, completions, images, **columns):\n    asked = [prompt[0]['content'] for prompt in prompts]\n    \
                  shown = [part['image'] for parts in asked if isinstance(parts, list) for part in parts if part['type'] == 'image']\n    \
                  assert [of[0] for of in images if of] == [path.split('/')[-1] for path in shown], (images, shown)\n    \
                  return [float(len(completion[0]['content'])) for completion in completions]\n";
    fs::write(path.join("rewards.py"), reward).unwrap();
    let recipe = "output_dir = \"run\"\n[model]\npath = \".\"\n[data]\nmax_length = 64\n[[data.train]]\npath = \"prompts.jsonl\"\n\
                  [objective]\nname = \"grpo\"\nnum_generations = 4\nmax_completion_length = 6\n[[objective.reward]]\nkind = \"python\"\n\
                  file = \"rewards.py\"\nfunctions = [\"few\"]\n[train]\nmax_steps = 2\nmicro_batch_size = 3\n[device]\nname = \"cpu\"\n\
                  [logging]\nrollouts = 12\n";
    fs::write(path.join("recipe.toml"), recipe).unwrap();
    let (is_done, said) = run_in(path, &["recipe.toml"]);
    assert!(is_done, "{said}");
    let rollouts = fs::read_to_string(path.join("run/rollouts.jsonl")).unwrap();
    assert_eq!(rollouts.lines().count(), 24, "{rollouts}");
    let turns = "[objective.environment]\ncommand = [\"cat\"]\n";
    fs::write(path.join("recipe.toml"), format!("{recipe}{turns}")).unwrap();
    let (is_done, said) = run_in(path, &["check", "recipe.toml"]);
    assert!(!is_done && said.contains("plays episodes of text"), "{said}");
}

type Tensors = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

/// Writes other tensors of those in a folder.
fn rewrite(folder: &Path, change: impl FnOnce(&mut Tensors)) {
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let views = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let stored = |view: &TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    let mut tensors: Tensors = views.tensors().iter().map(|(name, view)| (name.clone(), stored(view))).collect();
    change(&mut tensors);
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &path).unwrap();
}

#[test]
fn a_tower_that_cannot_be_read_is_refused_by_check() {
    const BIAS: &str = "model.visual.blocks.1.attn.proj.bias";
    const SCALES: &str = "model.visual.merger.norm.weight";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(QWEN3_VL, path);
    fs::write(path.join("recipe.toml"), RECIPE).unwrap();
    let whole = fs::read(path.join("model.safetensors")).unwrap();
    let check = |change: &dyn Fn(&mut Tensors)| {
        fs::write(path.join("model.safetensors"), &whole).unwrap();
        rewrite(path, change);
        run_in(path, &["check", "recipe.toml"])
    };
    assert!(check(&|_| ()).0);
    let (is_done, said) = check(&|tensors| {
        tensors.remove(BIAS);
        tensors.insert(SCALES.to_owned(), (safetensors::Dtype::U8, vec![24], vec![0; 24]));
        tensors.insert("model.visual.pos_embed.weight".to_owned(), (safetensors::Dtype::F32, vec![1, 24], vec![0; 96]));
    });
    assert!(!is_done, "{said}");
    for problem in [
        format!("missing: `{BIAS}` [24]"),
        format!("type: `{SCALES}` is U8, expected F32, BF16 or F16"),
        "misshapen: `model.visual.pos_embed.weight` is [1, 24], expected [25, 24]".to_owned(),
    ] {
        assert!(said.contains(&problem), "{problem}\n{said}");
    }
    let (is_done, said) = check(&|tensors| tensors.retain(|name, _| !name.contains("visual")));
    assert!(!is_done && said.contains("have no vision tower"), "{said}");
    // Rows of text need none.
    fs::write(path.join("rows.jsonl"), json!({"prompt": "What?", "completion": "x"}).to_string()).unwrap();
    let (is_done, said) = run_in(path, &["check", "recipe.toml"]);
    assert!(is_done, "{said}");
}

#[test]
fn a_tower_that_is_stored_as_codes_is_decoded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(QWEN3_VL, path);
    fs::write(path.join("recipe.toml"), RECIPE).unwrap();
    // A row's largest number is code 127, as in bitsandbytes.
    let is_matrix = |name: &str, shape: &[usize]| {
        name.starts_with("model.visual.") && shape.len() == 2 && !name.contains("pos_embed")
    };
    let coded = |tensors: &mut Tensors, decodes: bool| {
        let names = tensors.iter().filter(|(name, (_, shape, _))| is_matrix(name, shape)).map(|(name, _)| name.clone());
        for name in names.collect::<Vec<_>>() {
            let (_, shape, bytes) = tensors.remove(&name).unwrap();
            let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let rows = numbers.chunks(shape[1]);
            let largest: Vec<f32> =
                rows.clone().map(|row| row.iter().fold(0.0, |most, number| number.abs().max(most))).collect();
            let of_row = |(row, most): (&[f32], &f32)| -> Vec<f32> {
                row.iter().map(|number| (number / most * 127.0).round()).collect()
            };
            let codes: Vec<Vec<f32>> = rows.zip(&largest).map(of_row).collect();
            let value = if decodes {
                let decoded = codes.iter().zip(&largest);
                let decoded = decoded.flat_map(|(row, most)| row.iter().map(move |code| code * (most / 127.0)));
                (safetensors::Dtype::F32, shape, decoded.flat_map(f32::to_le_bytes).collect())
            } else {
                let scales = (
                    safetensors::Dtype::F32,
                    vec![shape[0]],
                    largest.iter().flat_map(|most| most.to_le_bytes()).collect(),
                );
                tensors.insert(name.replace(".weight", ".SCB"), scales);
                #[expect(clippy::cast_possible_truncation, reason = "at most 127")]
                let codes = codes.concat().into_iter().map(|code| (code as i8).to_le_bytes()[0]).collect();
                (safetensors::Dtype::I8, shape, codes)
            };
            tensors.insert(name, value);
        }
    };
    let whole = fs::read(path.join("model.safetensors")).unwrap();
    let features = || {
        let config = ModelConfig::from_file(&path.join("config.json")).unwrap();
        let vision = Vision::of_folder(path, &config).unwrap().unwrap();
        let images = Images::new(Ok(vision.clone()), Limits::default());
        let image = images.add(&path.join("a.png").display().to_string()).unwrap();
        let files = WeightFiles::open(path).unwrap();
        let tower = Tower::load(vision, (&Weights::Files(files.clone()), &files), &config, &Device::flex()).unwrap();
        tower.features(images.pieces(&image).unwrap())
    };
    let of_whole = features();
    rewrite(path, |tensors| coded(tensors, true));
    let decoded = features();
    fs::write(path.join("model.safetensors"), whole).unwrap();
    rewrite(path, |tensors| coded(tensors, false));
    // Without the config's word they are no numbers.
    let (is_done, said) = run_in(path, &["check", "recipe.toml"]);
    assert!(!is_done && said.contains("attn.qkv.weight` is I8, expected F32"), "{said}");
    let mut config: Value = serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
    config["quantization_config"] = json!({"quant_method": "bitsandbytes", "load_in_8bit": true});
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    assert_close(&features(), &decoded, 1e-6, "codes");
    assert!(of_whole.iter().zip(&decoded).any(|(a, b)| (a - b).abs() > 1e-3));
    for command in [&["check", "recipe.toml"][..], &["recipe.toml"]] {
        let (is_done, said) = run_in(path, command);
        assert!(is_done, "{said}");
    }
}

#[test]
fn rows_whose_images_cannot_be_used_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    fs::write(path.join("recipe.toml"), RECIPE).unwrap();
    let (is_done, said) = run_in(path, &["check", "recipe.toml", "--set", "data.max_length=40"]);
    assert!(!is_done && said.contains("its images end with token 41") && said.contains("image_max_pixels"), "{said}");
    fs::write(path.join("page.png"), "<html>404</html>").unwrap();
    let whole = fs::read(path.join("a.png")).unwrap();
    fs::write(path.join("cut.png"), &whole[..whole.len() / 2]).unwrap();
    let row = |content: Value, images: Value| json!({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}], "images": images});
    let at = |url: &str| row(json!([{"type": "image_url", "image_url": {"url": url}}]), json!(null));
    for (row, reason) in [
        (row(json!("a"), json!(["none.png"])), "none.png\" cannot be read"),
        (row(json!("a"), json!(["page.png"])), "page.png\" is no image but HTML"),
        (row(json!("a"), json!(["cut.png"])), "cut.png\" is damaged or cut short"),
        (row(json!("a <image>"), json!(["a.png", "b.png"])), "1 places for images, and the row has 2 images"),
        (
            row(json!([{"type": "image"}, {"type": "image"}]), json!(["a.png"])),
            "2 places for images, and the row has 1",
        ),
        (row(json!("[IMG] a"), json!(["a.png"])), "has 1 images, and its text has 2 times \"[IMG]\""),
        (row(json!("[IMG] a"), json!(null)), "has the token of images in its text, which stands for none"),
        (
            at("https://example.com/a.png?key=x"),
            "rows.jsonl:line 1: the image \"https://example.com/a.png\" HF_HUB_OFFLINE is set",
        ),
        (at("http://example.com/a.png"), "a.png\" is at an address without https"),
        (at("https://169.254.169.254/a.png"), "which is not of the internet"),
        (at("s3://bucket/a.png"), "is an address, and here only files are read"),
        (row(json!([{"type": "video", "video": "a.mp4"}]), json!(null)), "is of type \"video\""),
    ] {
        fs::write(path.join("rows.jsonl"), row.to_string()).unwrap();
        let (is_done, said) = run_in(path, &["check", "recipe.toml"]);
        assert!(!is_done && said.contains(reason), "{reason}\n{said}");
    }
    let shown = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image", "path": "a.png"}]}]);
    fs::write(path.join("rows.jsonl"), json!({"messages": shown}).to_string()).unwrap();
    let model = format!("model.path={:?}", Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/drawings/model"));
    let (is_done, said) = run_in(path, &["check", "recipe.toml", "--set", &model]);
    assert!(!is_done && said.contains("line 1: message 2 answers with an image and no text"), "{said}");
    // As whole as a file can be that has half its pixels.
    let mut half = bomb([40, 30]);
    half[20..24].copy_from_slice(&60_u32.to_be_bytes());
    let checksum = crc32fast::hash(&half[12..29]);
    half[29..33].copy_from_slice(&checksum.to_be_bytes());
    fs::write(path.join("half.png"), half).unwrap();
    fs::write(path.join("rows.jsonl"), row(json!("a"), json!(["half.png"])).to_string()).unwrap();
    let (is_done, said) = run_in(path, &["recipe.toml"]);
    assert!(!is_done && said.contains("half.png\" is damaged or cut short"), "{said}");
    assert!(!path.join("run/metrics.jsonl").exists());
}

/// A PNG of one bit a pixel, all black, which is small until it is decoded.
fn bomb([width, height]: [u32; 2]) -> Vec<u8> {
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    let row = vec![0; 1 + width.div_ceil(8) as usize];
    (0..height).for_each(|_| packed.write_all(&row).unwrap());
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[1, 0, 0, 0, 0]].concat();
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    for (name, content) in [(b"IHDR", header), (b"IDAT", packed.finish().unwrap()), (b"IEND", Vec::new())] {
        let chunk = [&name[..], &content].concat();
        file.extend(u32::try_from(content.len()).unwrap().to_be_bytes());
        file.extend(&chunk);
        file.extend(crc32fast::hash(&chunk).to_be_bytes());
    }
    file
}

#[test]
fn the_largest_images_take_less_than_two_gib() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    fs::write(path.join("recipe.toml"), RECIPE).unwrap();
    let said = [json!({"role": "user", "content": "What?"}), json!({"role": "assistant", "content": "x"})];
    let row = |name: &str| json!({"messages": said, "images": [name]}).to_string() + "\n";
    fs::write(path.join("rows.jsonl"), row("wide.png") + &row("high.png")).unwrap();
    fs::write(path.join("wide.png"), bomb([10_000, 10_000])).unwrap();
    fs::write(path.join("high.png"), bomb([9_999, 10_000])).unwrap();
    assert!(fs::metadata(path.join("high.png")).unwrap().len() < 100_000);
    let (is_done, said) = run_in(path, &["recipe.toml"]);
    assert!(is_done, "{said}");
    let summary: Value = serde_json::from_slice(&fs::read(path.join("run/summary.json")).unwrap()).unwrap();
    let peak = summary["peak_host_memory_bytes"].as_u64().unwrap();
    assert!(peak < 2 << 30, "{peak}");
    fs::write(path.join("high.png"), bomb([10_000, 10_001])).unwrap();
    let (is_done, said) = run_in(path, &["check", "recipe.toml", "--set", "output_dir=other"]);
    assert!(!is_done && said.contains("high.png\" has 10000 x 10001 pixels"), "{said}");
}

#[test]
#[cfg(unix)]
fn a_run_that_is_killed_while_it_encodes_goes_on_with_what_is_missing() {
    use std::os::unix::fs::MetadataExt as _;

    const NUM_ROWS: u32 = 200;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    fs::write(path.join("recipe.toml"), RECIPE.replace("max_steps = 2", "max_steps = 1")).unwrap();
    let said = [json!({"role": "user", "content": "What?"}), json!({"role": "assistant", "content": "x"})];
    let row = |image: u32| {
        let name = format!("{image}.png");
        fs::write(path.join(&name), bomb([40 + image % 20, 30 + image / 20])).unwrap();
        json!({"messages": said, "images": [name]}).to_string() + "\n"
    };
    fs::write(path.join("rows.jsonl"), (0..NUM_ROWS).map(row).collect::<String>()).unwrap();
    let kept = |cache: &str| -> std::collections::BTreeMap<_, _> {
        let entries = fs::read_dir(path.join(cache)).into_iter().flatten().map(|entry| entry.unwrap().path());
        let files = entries.filter(|file| file.extension().is_some_and(|end| end == "features"));
        files
            .map(|file| {
                (file.file_name().unwrap().to_owned(), (fs::read(&file).unwrap(), fs::metadata(&file).unwrap().ino()))
            })
            .collect()
    };
    let mut command = lora_train(&["recipe.toml", "--set", "output_dir=killed"]);
    let command = command.current_dir(path).env("LORA_TRAIN_CACHE", path.join("cache"));
    let mut child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
    wait_until("some features", || kept("cache/images").len() > 9);
    signal(&child, libc::SIGKILL);
    wait(&mut child);
    let before = kept("cache/images");
    assert!(before.len() < NUM_ROWS as usize, "it was too fast");
    let (is_done, said) = run_in(path, &["recipe.toml"]);
    assert!(is_done, "{said}");
    let after = kept("cache/images");
    assert!(before.iter().all(|(name, file)| after[name] == *file), "they are not made again");
    let mut command = lora_train(&["recipe.toml", "--quiet", "--set", "output_dir=whole"]);
    assert!(command.current_dir(path).env("LORA_TRAIN_CACHE", path.join("whole")).status().unwrap().success());
    let contents = |cache: &str| kept(cache).into_iter().map(|(name, (file, _))| (name, file)).collect::<Vec<_>>();
    assert_eq!(after.len(), NUM_ROWS as usize);
    assert!(contents("cache/images") == contents("whole/images"));
    let adapter = |run: &str| fs::read(path.join(run).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(adapter("run") == adapter("whole"));
}

#[test]
fn images_that_an_earlier_run_has_fetched_are_used_without_a_network() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    fs::write(path.join("recipe.toml"), RECIPE).unwrap();
    let url = "https://images.example/a.png?key=x";
    let said = [json!({"role": "user", "content": "What?"}), json!({"role": "assistant", "content": "x"})];
    fs::write(path.join("rows.jsonl"), json!({"messages": said, "images": [url]}).to_string()).unwrap();
    let content = fs::read(path.join("a.png")).unwrap();
    let kept = path.join(format!("cache/images/{:x}.image", Sha256::digest(url)));
    fs::create_dir_all(kept.parent().unwrap()).unwrap();
    fs::write(&kept, [&Sha256::digest(&content)[..], &content].concat()).unwrap();
    let (is_done, said) = run_in(path, &["check", "recipe.toml"]);
    assert!(is_done && said.contains("1 image of") && said.contains("; 1 from images.example"), "{said}");
    let (is_done, said) = run_in(path, &["recipe.toml"]);
    assert!(is_done, "{said}");
    // What is damaged is not used.
    fs::write(&kept, &content).unwrap();
    for command in ["check", "plan"] {
        let (_, said) = run_in(path, &[command, "recipe.toml", "--set", "output_dir=other"]);
        let reason =
            if command == "plan" { "was not fetched yet: `lora-train check` does it" } else { "HF_HUB_OFFLINE is set" };
        assert!(said.contains(reason), "{said}");
    }
}

#[test]
fn a_tiny_model_learns_which_box_drawings_go_into() {
    let folder = tempfile::tempdir().unwrap();
    let output = format!("output_dir={:?}", folder.path().join("run").to_str().unwrap());
    let mut command = lora_train(&["recipes/drawings.toml", "--set", &output]);
    let command = command.current_dir(env!("CARGO_MANIFEST_DIR")).env("LORA_TRAIN_CACHE", folder.path().join("cache"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let lines = fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let scores: Vec<f64> = lines.filter_map(|line| line["eval_score"].as_f64()).collect();
    let (first, last) = (scores[0], scores[scores.len() - 1]);
    assert!(first < 0.45 && last > 0.95, "{scores:?}: one in four is chance");
}
