//! Valid inputs of each target, made by the writers of the formats.

use std::fs;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lora_train::config::{LoraConfig, TargetModules};
use lora_train::lora::Matrices;
use lora_train::model::weights::convert;
use lora_train::ops::quantised::NF4;
use lora_train::save::export::{AdapterWeights, HostMatrix, write_adapter};
use lora_train::spec::ModelConfig;
use safetensors::tensor::{Dtype, TensorView};

use crate::folder::Folder;
use crate::targets::repository;

/// Valid inputs of a target.
pub(crate) fn seeds(target: &str) -> Vec<Vec<u8>> {
    let read = |path: &str| fs::read(repository().join(path)).unwrap();
    match target {
        "recipe" => {
            let changed = |text: &[u8]| {
                [text, b"\n---\nlora.r=4\ndata.train[0].path=x.jsonl\nlora.rank_pattern.\"a.b\"=3\n"].concat()
            };
            let small = b"[model]\npath = \"m\"\n[lora]\nrank_pattern = { \"layers.0\" = 3 }\ntarget_modules = [\"q_proj\"]\n[[data.train]]\npath = \"x\"\ncolumns = { prompt = \"q\", completion = \"a\" }\n";
            vec![
                read("recipes/reference.toml"),
                read("recipes/quickstart.toml"),
                changed(&read("recipes/llama.toml")),
                changed(small),
            ]
        }
        "rows" => {
            let texts = ROWS.iter().map(|(choice, text)| (*choice, text.as_bytes()));
            texts.chain(PACKED_ROWS).map(|(choice, content)| [&[choice][..], content].concat()).collect()
        }
        "config" => {
            vec![read("configs/tiny.json"), read("configs/llama-3.2-1b.json"), read("configs/mistral-7b-v0.1.json")]
        }
        "tokenizer" => tokenizers(),
        "template" => TEMPLATES.iter().map(|text| text.as_bytes().to_vec()).collect(),
        "weights" => {
            let (one, two) = (tensors(&[("a", [2, 3]), ("b", [1, 1])]), tensors(&[("c", [4, 2])]));
            let index = br#"{"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}"#;
            // These headers and numbers contain no zero byte, which would separate parts.
            let text = b"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]}}\0abcdefgh".to_vec();
            let sharded = [b"\0", &index[..], b"\0{\"a\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[4,6]}}\0abcdef"].concat();
            vec![one, two, text, sharded]
        }
        "gguf" => vec![gguf("llama"), gguf("gpt2")],
        "base" => ["nf4", "int8", "awq", "fp8", "mxfp4", "nvfp4", "int4"].map(base).to_vec(),
        "adapter" => vec![adapter(TargetModules::AllLinear), adapter(TargetModules::Names(vec!["q_proj".into()]))],
        "checkpoint" => vec![checkpoint()],
        "picture" => {
            let cases: Vec<serde_json::Value> = serde_json::from_slice(&read("tests/golden/pictures.json")).unwrap();
            cases.iter().map(|case| STANDARD.decode(case["file"].as_str().unwrap()).unwrap()).collect()
        }
        "logs" => {
            let line = |step: u32| {
                format!(
                    "{{\"step\":{step},\"loss\":2.5,\"learning_rate\":1e-3}}\n{{\"step\":{step},\"eval_loss\":1.5}}\n"
                )
            };
            let metrics: String = (1..6).map(line).collect();
            vec![format!("\u{3}{metrics}\01700000000.host.1.0\n1700000001.host.1.0").into_bytes()]
        }
        "report" => {
            let line = |step: u32| {
                format!(
                    "{{\"step\":{step},\"epoch\":0.1,\"loss\":2.5,\"learning_rate\":1e-3,\"tokens\":64,\"wall_seconds\":0.5,\"gpu_throttle_shares\":{{\"x\":0.5}}}}\n"
                )
            };
            let metrics: String = (1..30).map(line).collect();
            let rest = "{\"steps\":29,\"final_loss\":2.5,\"warnings\":[\"<hostile>\"]}\0seed = 1\n[data]\nmax_length = 64\n\0{\"device\":\"<hostile a=1>\"}\0{\"step\":1,\"prompt\":\"<hostile>\",\"text\":\"</script><hostile>\"}\n\0{\"components\":[{\"name\":\"weights\",\"bytes\":100}],\"peak_bytes\":100}";
            vec![format!("{{\"step\":0,\"epoch\":0,\"eval_loss\":4.5,\"anomaly\":\"<hostile>\"}}\n{metrics}{{\"step\":9,\"lo\0{rest}").into_bytes()]
        }
        "tokens" => vec![
            b"\x03".to_vec(),
            b"\x03\x00\x00\x05\x84\x00\x01\x05\xff".to_vec(),
            b"\x03\x00\x90\x00\x01\x01\x20\x00\x80".to_vec(),
        ],
        _ => panic!("no such target: {target}"),
    }
}

/// A .csv.gz and a .jsonl.zst.
const PACKED_ROWS: [(u8, &[u8]); 2] = [
    (0x42, b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03+(\xca\xcf-(\xd1I\x06\x929\xa9%\x99\xf9y\x5c\x1e\x99:J\x89\x5ciE\xf9\xe9J\x5c\x00n\x03ow\x1e\x00\x00\x00"),
    (0x43, b"(\xb5/\xfd\x04X\x99\x00\x00{\x22text\x22: \x22a frog\x22}\x0aK6\xa8\x1a"),
];

const ROWS: [(u8, &str); 10] = [
    (
        0,
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi, Clara\"}, {\"role\": \"assistant\", \"content\": \"a frog\"}]}\n{\"messages\": [{\"role\": \"assistant\", \"content\": \"\\u00e9\"}], \"tools\": \"[]\"}\n",
    ),
    (
        0,
        "{\"conversations\": [{\"from\": \"human\", \"value\": \"Hi\"}, {\"from\": \"gpt\", \"value\": \"yo\"}], \"system\": \"s\"}\n",
    ),
    (
        1,
        "[{\"instruction\": \"say\", \"input\": null, \"output\": \"it\"},\n {\"instruction\": \"go\", \"input\": \"there\", \"output\": \"\"}]\n",
    ),
    (0, "\u{feff}{\"prompt\": \"2+2=\", \"completion\": \" 4\"}\n\n{\"prompt\": \"\", \"completion\": 4}\n"),
    (0x83, "{\"text\": \"At the beach\", \"id\": 1}\n{\"text\": \"\"}\n"),
    (2, "\u{feff}At the beach, Clara met a big frog.\n\u{1f600}"),
    (0x14, "{\"text\": \"a\"}\n"),
    (9, "[{\"conversations\": [{\"role\": \"user\", \"content\": []}]}]"),
    (0x40, "\u{feff}id,question,answer\r\n1,\"Hi, \"\"Clara\"\"\n\",\"a frog\"\r\n\r\n2,,5\" wide\r\n3,x\r\n"),
    (
        0x41,
        "messages\ttools\n[{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"yo\"}]\t\n",
    ),
];

const TEMPLATES: [&str; 5] = [
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\\n' + m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ bos_token }}{% set ns = namespace(found=false) %}{% for m in messages if m.role != 'system' %}{% if loop.first and tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}{% generation %}{{ m.content.strip().split('x')[-1] }}{% endgeneration %}{{ eos_token }}{% endfor %}",
    "{% macro turn(m) %}[{{ m.role.upper() }}]{{ m.content | replace('a', 'bb') | indent(2) }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}{{ strftime_now('%d %b %Y') }}",
    "{% for i in range(9) %}{% for j in range(9) %}{{ i * j }}{% endfor %}{% endfor %}\0[{\"role\": \"user\", \"content\": \"a\", \"x\": [1, {\"y\": null}]}]\0[{\"name\": \"f\"}]",
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ '%s-%d' | format('a', 3) }}{{ 'ab' * 3 }}{{ messages | map(attribute='role') | list }}",
];

/// Small tokenizers of every model kind, with the files beside them.
fn tokenizers() -> Vec<Vec<u8>> {
    let models = [
        r#"{"type":"BPE","dropout":null,"unk_token":"u","continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"vocab":{"u":0,"a":1,"b":2,"ab":3},"merges":[["a","b"]]}"#,
        r###"{"type":"WordPiece","unk_token":"u","continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{"u":0,"a":1,"##b":2}}"###,
        r#"{"type":"WordLevel","vocab":{"u":0,"a":1},"unk_token":"u"}"#,
        r#"{"type":"Unigram","unk_id":0,"vocab":[["u",0.0],["a",-1.0],["b",-2.5]],"byte_fallback":false}"#,
    ];
    let pre = [
        r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#,
        r#"{"type":"Split","pattern":{"Regex":"\\p{L}+|\\s"},"behavior":"Isolated","invert":false}"#,
        r#"{"type":"Sequence","pretokenizers":[{"type":"Whitespace"},{"type":"Digits","individual_digits":true}]}"#,
        r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"first","split":true}"#,
    ];
    let normal = [
        "null",
        r#"{"type":"Replace","pattern":{"Regex":"a+"},"content":"b"}"#,
        r#"{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Lowercase"}]}"#,
        r#"{"type":"Prepend","prepend":"▁"}"#,
    ];
    let post = r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<s>":{"id":"<s>","ids":[4],"tokens":["<s>"]}}}"#;
    let decoder = r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#;
    let one = |index: usize| {
        let (model, pre, normal) = (models[index], pre[index], normal[index]);
        format!(
            "{{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{{\"id\":4,\"content\":\"<s>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}}],\
             \"normalizer\":{normal},\"pre_tokenizer\":{pre},\"post_processor\":{post},\"decoder\":{decoder},\"model\":{model}}}\0{{\"bos_token\":\"<s>\",\"eos_token\":{{\"content\":\"a\"}},\"add_bos_token\":true,\"chat_template\":\"{{{{ x }}}}\"}}\0{{\"eos_token_id\":[1,2]}}"
        )
        .into_bytes()
    };
    (0..4).map(one).collect()
}

/// A model of one layer whose tokenizer is of this kind.
fn gguf(tokenizer: &str) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let integer = |number: u32| [&4u32.to_le_bytes()[..], &number.to_le_bytes()].concat();
    let float = |number: f32| [&6u32.to_le_bytes()[..], &number.to_le_bytes()].concat();
    let texts = |texts: &[&str]| {
        let all: Vec<u8> = texts.iter().flat_map(|one| text(one)).collect();
        [&9u32.to_le_bytes()[..], &8u32.to_le_bytes(), &(texts.len() as u64).to_le_bytes(), &all].concat()
    };
    let list = |kind: u32, bytes: Vec<u8>| {
        [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &(bytes.len() as u64 / 4).to_le_bytes(), &bytes].concat()
    };
    let named = |name: &str| [&8u32.to_le_bytes()[..], &text(name)].concat();
    let keys = [
        ("general.architecture", named("llama")),
        ("llama.block_count", integer(1)),
        ("llama.context_length", integer(64)),
        ("llama.embedding_length", integer(32)),
        ("llama.feed_forward_length", integer(32)),
        ("llama.attention.head_count", integer(4)),
        ("llama.attention.layer_norm_rms_epsilon", float(1e-5)),
        ("tokenizer.ggml.model", named(tokenizer)),
        ("tokenizer.ggml.pre", named("smollm")),
        ("tokenizer.ggml.tokens", texts(&["<s>", "a", "b", "ab", "<0xC3>", "<0xA9>", "\u{2581}", "aab"])),
        ("tokenizer.ggml.token_type", list(5, [3, 1, 1, 1, 6, 6, 1, 1].map(i32::to_le_bytes).concat())),
        (
            "tokenizer.ggml.scores",
            list(6, [0.0, -9.0, -9.0, -1.0, 0.0, 0.0, -9.0, -2.0].map(f32::to_le_bytes).concat()),
        ),
        ("tokenizer.ggml.merges", texts(&["a b", "a ab"])),
        ("tokenizer.ggml.bos_token_id", integer(0)),
        ("tokenizer.chat_template", named("{{ x }}")),
    ];
    let matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let blocks = matrices.map(|name| (format!("blk.0.{name}.weight"), vec![32, 32], 8));
    let norms = ["attn_norm", "ffn_norm"].map(|name| (format!("blk.0.{name}.weight"), vec![32], 0));
    let outer = [("token_embd.weight".to_owned(), vec![32, 8], 1), ("output_norm.weight".to_owned(), vec![32], 0)];
    let mut header = [&b"GGUF\x03\0\0\0"[..], &11u64.to_le_bytes(), &(keys.len() as u64).to_le_bytes()].concat();
    keys.iter().for_each(|(key, value)| header.extend([text(key), value.clone()].concat()));
    let mut offset = 0u64;
    for (name, shape, kind) in blocks.into_iter().chain(norms).chain(outer) {
        header.extend([text(&name), u32::to_le_bytes(shape.len() as u32).to_vec()].concat());
        shape.iter().for_each(|size: &u64| header.extend(size.to_le_bytes()));
        header.extend([&u32::to_le_bytes(kind)[..], &offset.to_le_bytes()].concat());
        let bytes = shape.iter().product::<u64>() * [4, 2, 0, 0, 0, 0, 0, 0, 34][kind as usize];
        offset += (if kind == 8 { bytes / 32 } else { bytes }).next_multiple_of(32);
    }
    header.resize(header.len().next_multiple_of(32), 0);
    header.resize(header.len() + offset as usize, 0x11);
    header
}

fn tensors(named: &[(&str, [usize; 2])]) -> Vec<u8> {
    let numbers = |shape: &[usize; 2]| {
        convert::from_f32(&vec![1.25; shape[0] * shape[1]], lora_train::device::Dtype::F32).unwrap()
    };
    let bytes: Vec<Vec<u8>> = named.iter().map(|(_, shape)| numbers(shape)).collect();
    let view = |((name, shape), bytes): (&(&str, [usize; 2]), _)| {
        (name.to_string(), TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap())
    };
    safetensors::serialize(named.iter().zip(bytes.iter().map(Vec::as_slice)).map(view), None).unwrap()
}

/// A model of one small block whose linear layers are stored as `method` has it, the first of nf4 with nested scales.
fn base(method: &str) -> Vec<u8> {
    let compressed = |format: &str| {
        let weights = r#"{"num_bits":4,"group_size":8,"symmetric":false}"#;
        format!(
            r#""quant_method":"compressed-tensors","format":"{format}","config_groups":{{"a":{{"weights":{weights}}}}}"#
        )
    };
    let how = match method {
        "nf4" => r#""load_in_4bit":true,"bnb_4bit_quant_type":"nf4""#.to_owned(),
        "int8" => r#""load_in_8bit":true"#.to_owned(),
        "awq" => r#""quant_method":"awq","bits":4,"group_size":8"#.to_owned(),
        "fp8" => r#""quant_method":"fp8","weight_block_size":[4,8]"#.to_owned(),
        "int4" => compressed("pack-quantized"),
        float => compressed(&format!("{float}-pack-quantized")),
    };
    let width = if matches!(method, "mxfp4" | "nvfp4") { 32 } else { 8 };
    let config = format!(
        r#"{{"model_type":"llama","vocab_size":4,"hidden_size":{width},"intermediate_size":{},"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":2,"tie_word_embeddings":true,"quantization_config":{{{how}}}}}"#,
        2 * width
    );
    let mut tensors = Vec::new();
    let mut add = |name: String, dtype: Dtype, shape: &[usize], bytes: Vec<u8>| {
        tensors.push((name, (dtype, shape.to_vec(), bytes)));
    };
    for (name, shape) in ModelConfig::from_json(&config).unwrap().expected_tensors() {
        let len: usize = shape.iter().product();
        let Some(module) = name.strip_suffix("_proj.weight") else {
            add(name, Dtype::BF16, &shape, vec![0x3f; 2 * len]);
            continue;
        };
        let (out, width) = (shape[0], shape[1]);
        // Each with a byte that it is full of.
        let parts: Vec<(&str, Dtype, Vec<usize>, u8)> = match method {
            "nf4" => vec![],
            "int8" => vec![
                ("SCB", Dtype::F32, vec![out], 0x3e),
                ("weight_format", Dtype::U8, vec![], 0),
                ("weight", Dtype::I8, shape.clone(), 7),
            ],
            "awq" => vec![
                ("qweight", Dtype::I32, vec![width, out / 8], 0x5a),
                ("qzeros", Dtype::I32, vec![width / 8, out / 8], 0x77),
                ("scales", Dtype::F16, vec![width / 8, out], 0x2c),
            ],
            "fp8" => vec![
                ("weight_scale_inv", Dtype::BF16, vec![out / 4, width / 8], 0x3f),
                ("weight", Dtype::F8_E4M3, shape.clone(), 0x35),
            ],
            "mxfp4" => vec![
                ("weight_packed", Dtype::U8, vec![out, width / 2], 0x5a),
                ("weight_scale", Dtype::U8, vec![out, width / 32], 0x7e),
            ],
            "nvfp4" => vec![
                ("weight_packed", Dtype::U8, vec![out, width / 2], 0x5a),
                ("weight_scale", Dtype::F8_E4M3, vec![out, width / 16], 0x35),
                ("weight_global_scale", Dtype::F32, vec![1], 0x42),
            ],
            _ => vec![
                ("weight_packed", Dtype::I32, vec![out, width / 8], 0x5a),
                ("weight_zero_point", Dtype::I32, vec![out / 8, width / 8], 0x77),
                ("weight_scale", Dtype::BF16, vec![out, width / 8], 0x3c),
            ],
        };
        if !parts.is_empty() {
            for (part, dtype, shape, byte) in parts {
                let num_bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
                add(format!("{module}_proj.{part}"), dtype, &shape, vec![byte; num_bytes]);
            }
            continue;
        }
        let blocks = len.div_ceil(64);
        let mut state = format!(r#"{{"quant_type":"nf4","blocksize":64,"shape":{shape:?}"#);
        if module.ends_with('q') {
            state += r#","nested_blocksize":256,"nested_offset":0.5"#;
            add(format!("{name}.nested_absmax"), Dtype::F32, &[1], vec![0x3e; 4]);
            add(format!("{name}.nested_quant_map"), Dtype::F32, &[256], vec![0x3e; 1024]);
            add(format!("{name}.absmax"), Dtype::U8, &[blocks], vec![9; blocks]);
        } else {
            add(format!("{name}.absmax"), Dtype::F32, &[blocks], vec![0x3e; 4 * blocks]);
        }
        state += "}";
        add(format!("{name}.quant_state.bitsandbytes__nf4"), Dtype::U8, &[state.len()], state.into_bytes());
        add(format!("{name}.quant_map"), Dtype::F32, &[16], NF4.iter().flat_map(|x| x.to_le_bytes()).collect());
        add(name, Dtype::U8, &[len / 2, 1], vec![0x5a; len / 2]);
    }
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    [config.into_bytes(), vec![0], safetensors::serialize(views, None).unwrap()].concat()
}

fn adapter(target_modules: TargetModules) -> Vec<u8> {
    let folder = Folder::new();
    let matrix = |num_rows: usize, num_columns: usize| HostMatrix {
        num_rows,
        num_columns,
        values: vec![0.5; num_rows * num_columns],
    };
    let pair = Matrices { a: matrix(2, 4), b: matrix(4, 2), magnitude: None };
    let weights: AdapterWeights = [
        ("model.layers.0.self_attn.q_proj".to_owned(), pair.clone()),
        ("model.layers.1.self_attn.q_proj".to_owned(), pair),
    ]
    .into_iter()
    .collect();
    let config = LoraConfig { r: 2, target_modules, layers_to_transform: Some(vec![0, 1]), ..LoraConfig::default() };
    write_adapter(folder.path(), &weights, &config, "org/base").unwrap();
    let read = |name: &str| fs::read(folder.path().join(name)).unwrap();
    [read("adapter_config.json"), vec![0], read("adapter_model.safetensors")].concat()
}

fn checkpoint() -> Vec<u8> {
    let state = r#"{"step":500,"cursor":{"epoch":1,"batch":7},"rows_of_epoch":56,"order":{"seed":0,"micro_batch_size":8,"shuffle":true,"rows_per_epoch":600},
"counters":{"num_updates":500,"num_micro_batches":500,"loss_scale":null},"evaluations":{"last_step":500,"first_loss":3.5,"last_loss":1.5,"best_loss":1.25,"best_step":400,"since_best":1},
"watchdog":WATCHDOG,"totals":TOTALS,"inputs":{}}"#;
    let json = |value: serde_json::Value| value.to_string();
    let watchdog = json(serde_json::to_value(lora_train::train::watchdog::Watchdog::default()).unwrap());
    let totals = json(serde_json::to_value(lora_train::measure::metrics::Totals::default()).unwrap());
    let state = state.replace("WATCHDOG", &watchdog).replace("TOTALS", &totals);
    let recipe = "[model]\npath = \"m\"\n";
    let sum = |text: &[u8]| {
        use sha2::Digest as _;
        sha2::Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let sums = format!("{}  resolved.toml\n{}  trainer_state.json\n", sum(recipe.as_bytes()), sum(state.as_bytes()));
    let moments = b"{\"a.m\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}\0abcdefgh";
    [state.as_bytes(), b"\0", sums.as_bytes(), b"\0", recipe.as_bytes(), b"\0", moments].concat()
}
