//! A small byte-level tokenizer and data files for the tests of this module.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::tokenizer::Tokenizer;
use crate::config::{DataConfig, DataSource};

pub(super) const BOS: u32 = 256;
pub(super) const EOS: u32 = 257;
pub(super) const IM_START: u32 = 258;
pub(super) const IM_END: u32 = 259;
/// The token of the two letters `ab`; every other token is a byte or a special one.
pub(super) const AB: u32 = 260;

/// `ChatML` with a default system message, as in `SmolLM2`.
pub(super) const CHATML: &str = "{% for message in messages %}\
    {% if loop.first and message.role != 'system' %}{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}{% endif %}\
    {{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The character that stands for a byte in a byte-level vocabulary (GPT-2's table).
fn byte_character(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|byte| !printable(*byte)).count();
    char::from_u32(256 + u32::try_from(place).unwrap()).unwrap()
}

/// A model folder whose tokens are bytes, `ab`, and four special tokens. BOS is put in front of texts. `config` is the
/// content of `tokenizer_config.json`.
pub(super) fn model_folder(config: &Value) -> TempDir {
    let folder = TempDir::new().unwrap();
    let mut vocab: BTreeMap<String, u32> = (0..=255).map(|b| (byte_character(b).to_string(), u32::from(b))).collect();
    vocab.insert("ab".into(), AB);
    let special = [("<s>", BOS), ("</s>", EOS), ("<|im_start|>", IM_START), ("<|im_end|>", IM_END)];
    let added: Vec<Value> = special
        .iter()
        .map(|(content, id)| {
            json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false})
        })
        .collect();
    vocab.extend(special.iter().map(|(content, id)| ((*content).to_owned(), *id)));
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "!"},
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                  "merges": [["a", "b"]]}
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

/// The tokenizer with BOS and EOS, without a padding token or a chat template.
pub(super) fn tokenizer() -> Tokenizer {
    let folder = model_folder(&json!({"bos_token": "<s>", "eos_token": "</s>"}));
    Tokenizer::open(folder.path()).unwrap()
}

/// The tokenizer of a chat model: turns end with `<|im_end|>`, which also pads, as in `SmolLM2`.
pub(crate) fn chat_tokenizer() -> Arc<Tokenizer> {
    let config = json!({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
                        "add_bos_token": false, "chat_template": CHATML});
    Arc::new(Tokenizer::open(model_folder(&config).path()).unwrap())
}

/// Data files in a folder of their own.
pub(super) struct Files(TempDir);

impl Files {
    pub(super) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file and returns the recipe entry that names it.
    pub(super) fn write(&self, name: &str, content: &str) -> DataSource {
        std::fs::write(self.path(name), content).unwrap();
        self.source(name)
    }

    pub(super) fn source(&self, pattern: &str) -> DataSource {
        let path = self.path(pattern).to_str().unwrap().to_owned();
        DataSource { path, ..DataSource::default() }
    }
}

/// A `[data]` section that trains on `sources`, without shuffling.
pub(super) fn config(sources: Vec<DataSource>) -> DataConfig {
    DataConfig { train: sources, shuffle: false, ..DataConfig::default() }
}

/// Lines `{"text": "row 0"}`, `{"text": "row 1"}` and so on.
pub(super) fn numbered_rows(count: usize) -> String {
    (0..count).map(|row| serde_json::json!({"text": format!("row {row}")}).to_string() + "\n").collect()
}

/// The content of a file whose name ends in .gz or .zst.
pub(super) fn packed(name: &str, content: &[u8]) -> Vec<u8> {
    if name.ends_with(".zst") {
        return zstd::encode_all(content, 0).unwrap();
    }
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

/// Writes conversations (lists of role and content), with an id and a score each.
pub(super) fn write_parquet(path: &Path, conversations: &[Vec<(&str, &str)>]) {
    let schema = "message rows {
        required int64 id;
        optional double score;
        optional group messages (LIST) { repeated group list { optional group element {
            optional binary role (UTF8);
            optional binary content (UTF8);
        } } }
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    // Two row groups.
    for group in conversations.chunks(conversations.len().div_ceil(2)) {
        let mut columns = writer.next_row_group().unwrap();
        let ids: Vec<i64> = (0_i64..).take(group.len()).collect();
        let mut column = columns.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let mut column = columns.next_column().unwrap().unwrap();
        let defined: Vec<i16> = ids.iter().map(|id| i16::from(*id == 0)).collect();
        column.typed::<DoubleType>().write_batch(&[0.5], Some(&defined), None).unwrap();
        column.close().unwrap();
        for part in 0..2 {
            let texts = group.iter().flatten().map(|turn| ByteArray::from(if part == 0 { turn.0 } else { turn.1 }));
            let texts: Vec<ByteArray> = texts.collect();
            let repeated: Vec<i16> =
                group.iter().flat_map(|turns| (0..turns.len()).map(|i| i16::from(i > 0))).collect();
            let mut column = columns.next_column().unwrap().unwrap();
            let defined = vec![4; texts.len()];
            column.typed::<ByteArrayType>().write_batch(&texts, Some(&defined), Some(&repeated)).unwrap();
            column.close().unwrap();
        }
        columns.close().unwrap();
    }
    writer.close().unwrap();
}
