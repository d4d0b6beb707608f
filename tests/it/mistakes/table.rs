//! The table of mistakes.

use std::fs;
use std::path::Path;

use serde_json::Value;

pub(crate) const RECIPE: &str = r#"output_dir = "out"
[model]
path = "model"
[lora]
r = 4
[data]
max_length = 64
[[data.train]]
path = "rows.jsonl"
[train]
max_steps = 2
"#;
pub(crate) const ROW: &str = "{\"prompt\": \"a b\", \"completion\": \"c d\"}\n";

/// A change that makes the mistake.
pub(crate) enum Wrong<'a> {
    /// Replaces this text of the recipe by that.
    Recipe(&'a str, &'a str),
    /// The whole recipe.
    Whole(&'a str),
    /// `--set`.
    Set(&'a [&'a str]),
    /// Writes a file with this content.
    File(&'a str, &'a str),
    /// Removes a file.
    Gone(&'a str),
    /// Writes a file with this content, and adds a `--set`.
    FileAndSet(&'a str, &'a str, &'a str),
    /// Changes the folder.
    Made(fn(&Path)),
}
use Wrong::{File, FileAndSet, Gone, Made, Recipe, Set, Whole};

/// Mistakes that `check` and training find; all exit with 2. A message names the place, the value, and the correction.
/// Where a row asserts two of these, the third is in the same line.
pub(crate) const MISTAKES: &[(&str, Wrong<'static>, &[&str])] = &[
    // Keys.
    (
        "a typo",
        Recipe("r = 4", "lora_alhpa = 4"),
        &["r.toml:5:1: unknown key `lora_alhpa`", "did you mean `lora_alpha`?"],
    ),
    (
        "PEFT's older name",
        Recipe("r = 4", "lora_r = 4"),
        &["r.toml:5:1: unknown key `lora_r`; this trainer calls it `r`"],
    ),
    ("torchtune's name", Recipe("r = 4", "rank = 4"), &["r.toml:5:1: unknown key `rank`; this trainer calls it `r`"]),
    (
        "axolotl's name",
        Recipe("max_length", "sequence_len"),
        &["r.toml:7:1: unknown key `sequence_len`", "`max_length`"],
    ),
    (
        "a name of another section",
        Recipe("max_steps = 2", "batch_size = 2"),
        &["r.toml:11:1: unknown key `batch_size`", "`micro_batch_size`"],
    ),
    (
        "a section's typo",
        Recipe("[train]", "[training]"),
        &["r.toml:10:2: unknown section [training]; this trainer calls it [train]"],
    ),
    (
        "a key without its section",
        Recipe("[model]\npath", "base_model"),
        &["r.toml:2:1: unknown key `base_model`", "`path`, in [model]"],
    ),
    (
        "a Hub to push to",
        Recipe("r = 4", "push_to_hub = true"),
        &["r.toml:5:1: unknown key `push_to_hub`", "`lora-train push RUN OWNER/NAME`"],
    ),
    (
        "an output that is overwritten",
        Recipe("[model]", "overwrite_output_dir = true\n[model]"),
        &["r.toml:2:1: unknown key `overwrite_output_dir`", "`--overwrite` on the command line deletes it"],
    ),
    (
        "several GPUs",
        Set(&["gpus=2"]),
        &["--set gpus=2: unknown key `gpus`", "each GPU holds the whole model: `mpirun -n N"],
    ),
    (
        "another stage",
        Set(&["train.stage=dpo"]),
        &["--set train.stage=dpo: unknown key `stage`; this trainer calls it `name`, in [objective]"],
    ),
    (
        "axolotl's targets",
        Recipe("r = 4", "target_linear = true"),
        &[
            "r.toml:5:1: unknown key `target_linear`; this trainer calls it `target_modules`",
            "\"all-linear\", or a list",
        ],
    ),
    (
        "mlx-lm's layers",
        Recipe("r = 4", "num_layers = 4"),
        &[
            "unknown key `num_layers`; this trainer calls it `layers_to_transform`",
            "the last 4 of 16 are [12, 13, 14, 15]",
        ],
    ),
    ("an unknown key by --set", Set(&["lora.rnk=3"]), &["--set lora.rnk=3: unknown key `rnk`", "[lora] takes `r`"]),
    // Values.
    (
        "a number in quotes",
        Recipe("r = 4", "r = \"4\""),
        &["r.toml:5:5: `lora.r` = \"4\"", "write it without quotes: 4"],
    ),
    (
        "half a rank",
        Recipe("r = 4", "r = 4.5"),
        &["r.toml:5:5: `lora.r` = 4.5, expected a whole number from 1 to 65536"],
    ),
    ("no rank", Recipe("r = 4", "r = 0"), &["`lora.r` = 0, expected a whole number from 1 to 65536"]),
    ("negative steps", Recipe("= 2", "= -1"), &["r.toml:11:13: `train.max_steps` = -1, expected a whole number"]),
    (
        "all inputs dropped",
        Set(&["lora.lora_dropout=1.0"]),
        &["`lora.lora_dropout` = 1.0, expected a number in [0, 1)"],
    ),
    (
        "a negative learning rate",
        Set(&["optimizer.learning_rate=-1"]),
        &["`optimizer.learning_rate` = -1, expected a number in (0, 1]"],
    ),
    ("one beta", Set(&["optimizer.betas=[0.9]"]), &["`optimizer.betas` = [0.9], expected a list of 2 numbers"]),
    (
        "PyTorch's precision",
        Set(&["train.precision=\"fp16\""]),
        &["`train.precision` = \"fp16\", expected one of", "calls it `f16`"],
    ),
    (
        "a storage type",
        Set(&["model.dtype=\"float8\""]),
        &["`model.dtype` = \"float8\", expected one of \"f32\", \"bf16\", \"f16\""],
    ),
    (
        "a schedule's typo",
        Set(&["scheduler.lr_scheduler=\"cosin\""]),
        &["\"cosin\", expected one of", "did you mean `cosine`?"],
    ),
    (
        "an optimizer that is not there",
        Set(&["optimizer.name=\"lyon\""]),
        &["`optimizer.name` = \"lyon\", expected one of", "did you mean `lion`?"],
    ),
    (
        "a setting of another optimizer",
        Set(&["optimizer.name=\"adafactor\"", "optimizer.betas=[0.9, 0.99]"]),
        &["`optimizer.betas` is of no use to \"adafactor\""],
    ),
    (
        "yes for true",
        Set(&["train.gradient_checkpointing=\"yes\""]),
        &["= \"yes\", expected \"auto\", true, false, \"12-blocks\" or \"offload\""],
    ),
    (
        "DoRA with an optimizer of matrices",
        Set(&["lora.use_dora=true", "optimizer.name=\"muon\""]),
        &["`optimizer.name` = \"muon\" trains matrices, and `lora.use_dora` brings vectors"],
    ),
    (
        "scales of no codes",
        Set(&["model.double_quantization=true"]),
        &["`model.quantization` is not \"nf4\" or \"fp4\""],
    ),
    (
        "four bits of another kind",
        Set(&["model.quantization=\"int4\""]),
        &["\"int4\", expected one of", "four bits are \"nf4\" or \"fp4\""],
    ),
    (
        "scales in the name of the codes",
        Set(&["model.quantization=\"nf4_double\""]),
        &["\"nf4_double\", expected one of", "`double_quantization` = true beside"],
    ),
    (
        "codes that are read and not made",
        Set(&["model.quantization=\"Q4_K_M\""]),
        &["\"Q4_K_M\", expected one of", "leave the key out, and name a base in `model.path` that is stored so"],
    ),
    (
        "another name of scales",
        Set(&["model.use_double_quant=true"]),
        &["unknown key `use_double_quant`; this trainer calls it `double_quantization`"],
    ),
    (
        "residency",
        Set(&["model.residency=\"disk\""]),
        &["expected one of \"memory\", \"mapped\", \"host\"", "calls it `mapped`"],
    ),
    (
        "two warm-ups",
        Set(&["scheduler.warmup_ratio=0.1", "scheduler.warmup_steps=1"]),
        &["`scheduler.warmup_steps` excludes `scheduler.warmup_ratio`", "keep one"],
    ),
    (
        "a warm-up as long as the run",
        Set(&["scheduler.warmup_steps=5"]),
        &["`scheduler.warmup_steps` = 5 leaves none", "make it smaller"],
    ),
    ("--set without a value", Set(&["lora.r"]), &["--set lora.r: expected section.key=value", "--set lora.r=16"]),
    (
        "--set beyond a list",
        Set(&["data.train.7.path=\"x\""]),
        &["there is no `data.train[7]`: the list has 1 element"],
    ),
    // Files of recipes.
    (
        "TOML that is none",
        Recipe("r = 4", "r = "),
        &["r.toml:5:5: not valid TOML: a value is missing after `=`\n  |\n5 | r = \n  |     ^\n"],
    ),
    ("YAML", Whole("base_model: model\nlora_r: 4\n"), &["r.toml:1:1: not valid TOML: this looks like YAML"]),
    (
        "a key twice",
        Recipe("r = 4", "r = 4\nr = 5"),
        &["r.toml:6:1: `r` is given twice; the first time in line 5\n", "6 | r = 5\n"],
    ),
    ("an empty recipe", Whole(""), &["`model.path` is missing", "there is no training data", "add [[data.train]]"]),
    ("no recipe", Gone("r.toml"), &["r.toml: there is no such file"]),
    // Targets.
    (
        "a target that is no layer",
        Set(&["lora.target_modules=[\"query\"]"]),
        &["there is no `query`", "q_proj, k_proj, v_proj"],
    ),
    ("the head as a target", Set(&["lora.target_modules=[\"lm_head\"]"]), &["`lm_head` cannot be adapted"]),
    (
        "a regular expression",
        Set(&["lora.target_modules=\"(q_proj\""]),
        &["`lora.target_modules` = \"(q_proj\"", "unclosed group"],
    ),
    (
        "a layer too many",
        Set(&["lora.layers_to_transform=[99]"]),
        &["`lora.layers_to_transform` = 99, expected layers from 0 to 3"],
    ),
    ("a target's typo", Set(&["lora.target_modules=[\"qproj\"]"]), &["there is no `qproj`: did you mean `q_proj`?"]),
    ("PEFT's name for the section", Recipe("[lora]", "[adapter]"), &["[adapter]; this trainer calls it [lora]"]),
    // Devices.
    ("gpu for cuda", Set(&["device.name=\"gpu\""]), &["`device.name` = \"gpu\"", "this trainer calls it `cuda`"]),
    (
        "another device's name",
        Set(&["device.name=\"cude\""]),
        &["`device.name` = \"cude\", expected \"auto\", \"cpu\", \"cuda\"", "did you mean `cuda`?"],
    ),
    // Models.
    (
        "no such model",
        Recipe("\"model\"", "\"./nope\""),
        &["r.toml:3:8: `model.path`: ./nope: no such folder in /", "3 | path = \"./nope\"\n"],
    ),
    (
        "no such model by --set",
        Set(&["model.path=./nope"]),
        &["--set model.path=./nope: `model.path`: ./nope: no such folder in /"],
    ),
    (
        "a file for a folder",
        Set(&["model.path=\"rows.jsonl\""]),
        &["rows.jsonl is a file, expected a folder with config.json"],
    ),
    (
        "a model that is not in the cache",
        Set(&["model.path=\"meta-llama/Llama-3.2-1B\""]),
        &["HF_HUB_OFFLINE is set, and meta-llama/Llama-3.2-1B", "HF_HOME"],
    ),
    ("no config", Gone("model/config.json"), &["cannot read model/config.json", "a model folder holds a config.json"]),
    ("half a config", File("model/config.json", "{"), &["model/config.json: not valid JSON"]),
    (
        "another architecture",
        File("model/config.json", "{\"model_type\": \"mpt\"}"),
        &["`model_type` = \"mpt\" is not supported: it needs LayerNorm and scores that fall with distance"],
    ),
    ("no tokenizer", Gone("model/tokenizer.json"), &["model: no tokenizer.json", "save_pretrained"]),
    (
        "no tokenizer in it",
        File("model/tokenizer.json", "[]"),
        &["model/tokenizer.json: invalid type: sequence, expected", "the model's own tokenizer.json"],
    ),
    (
        "a tokenizer of another model",
        Made(with_another_token),
        &["model: token 1344 (", "is beyond the 1344 tokens of config.json", "of different models"],
    ),
    (
        "no weights",
        Gone("model/model.safetensors"),
        &["model: no model.safetensors and no model.safetensors.index.json"],
    ),
    (
        "two models in one folder",
        Made(with_two_models),
        &[
            "r.toml:3:8: `model.path`: model: 2 GGUF files, expected one:\n",
            "\n  a.gguf\n  b.gguf\n  hint: `model.path` may name one of them: model/a.gguf\n",
        ],
    ),
    (
        "weights that are none",
        File("model/model.safetensors", "\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}{}"),
        &["model/model.safetensors: not a safetensors file"],
    ),
    (
        "an index that names a shard that is not there",
        Made(with_half_an_index),
        &[
            "model/model.safetensors.index.json: shards are missing",
            "names `model-00002-of-00002.safetensors`, which is not in the folder",
            "half-downloaded",
        ],
    ),
    (
        "weights of another size",
        Made(with_a_wider_config),
        &["model: the weights do not fit config.json", "mlp.gate_proj.weight` is [512, 128], expected [600, 128]"],
    ),
    // Rows.
    ("no such rows", Set(&["data.train.0.path=\"none.jsonl\""]), &["`data.train[0].path` = \"none.jsonl\" is no file"]),
    ("a pattern without a file", Set(&["data.train.0.path=\"x*.jsonl\""]), &["\"x*.jsonl\" matches no file"]),
    (
        "a model for data",
        Set(&["data.train.0.path=\"model\""]),
        &["model/config.json:1:1: not valid JSON: EOF while parsing an object"],
    ),
    ("no rows", File("rows.jsonl", ""), &["rows.jsonl: the file has no rows"]),
    (
        "a row that is no JSON",
        File("rows.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n{oops\n"),
        &["rows.jsonl:2:2: not valid JSON: key must be a string"],
    ),
    ("a row that is no object", File("rows.jsonl", "[1, 2]\n"), &["rows.jsonl:row 1: a row must be a JSON object"]),
    (
        "columns of no format",
        File("rows.jsonl", "{\"foo\": \"a\"}\n"),
        &["rows.jsonl:line 1: the columns `foo`", "`columns = { text = \"foo\" }`"],
    ),
    (
        "columns renamed to what is not there",
        Set(&["data.train.0.columns={ prompt = \"question\" }"]),
        &["rows.jsonl:line 1: `columns` says that `prompt` is column `question`; the row has `prompt`"],
    ),
    (
        "an object for text",
        File("rows.jsonl", "{\"prompt\": {}, \"completion\": \"x\"}\n"),
        &["rows.jsonl:line 1: `prompt` must be text, not an object"],
    ),
    (
        "a format's name",
        Set(&["data.train.0.format=\"chatml\""]),
        &["= \"chatml\", expected one of \"auto\", \"messages\"", "calls it `messages`"],
    ),
    (
        "half a Parquet file",
        FileAndSet("r.parquet", "PAR1xxxxPAR1", "data.train.0.path=\"r.parquet\""),
        &["r.parquet: not a whole Parquet file: ", "write it, or download it, again"],
    ),
    (
        "conversations without an answer",
        File("rows.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n"),
        &["line 1: no message is an answer of the assistant", "these are prompts: with `[objective] name = \"grpo\"`"],
    ),
    (
        "no template for conversations",
        FileAndSet(
            "rows.jsonl",
            "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n",
            "data.chat_template=\"none\"",
        ),
        &["rows.jsonl: format `messages` needs a chat template"],
    ),
    (
        "a template that is not there",
        Set(&["data.chat_template=\"t.jinja\""]),
        &["`data.chat_template` = \"t.jinja\": No such file", "\"auto\" (the model's own)"],
    ),
    (
        "a template that is none",
        FileAndSet("t.jinja", "{% for", "data.chat_template=\"t.jinja\""),
        &[
            "chat template of t.jinja: syntax error: unexpected end of input, expected identifier (in chat_template:1)",
            "`data.chat_template` can name a file with another one",
        ],
    ),
    (
        "evaluation rows twice",
        Set(&["data.eval_split=0.5", "data.eval=[{ path = \"rows.jsonl\" }]"]),
        &["--set data.eval_split=0.5: `data.eval_split` excludes [[data.eval]]", "keep one of the two"],
    ),
    ("all rows held out", Set(&["data.eval_split=8"]), &["`data.eval_split` holds out 8 of 8 training rows"]),
    // Output.
    (
        "a variable that is not set",
        Recipe("\"out\"", "\"${LORA_TRAIN_NO}/out\""),
        &["r.toml:1:14: `output_dir` = \"${LORA_TRAIN_NO}/out\": the environment variable `LORA_TRAIN_NO` is not set"],
    ),
    (
        "somebody's home",
        Set(&["output_dir=~you/out"]),
        &["`output_dir` = \"~you/out\": the home folder of `you` is not known here"],
    ),
    (
        "a number for a folder",
        Set(&["output_dir=2024"]),
        &["--set output_dir=2024: `output_dir` = 2024, expected text that is not empty", "put it in quotes: \"2024\""],
    ),
    (
        "what TOML takes for no number",
        Set(&["output_dir=nan"]),
        &["`output_dir` = nan, expected text that is not empty", "put it in quotes: \"nan\""],
    ),
    (
        "a file for the output",
        Set(&["output_dir=\"rows.jsonl\""]),
        &["`output_dir` = rows.jsonl: rows.jsonl is a file, expected a folder"],
    ),
];

/// The tokenizer has one token more than the model.
fn with_another_token(folder: &Path) {
    let path = folder.join("model/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["model"]["vocab"]["extra"] = 1344.into();
    fs::write(path, tokenizer.to_string()).unwrap();
}

/// A model of two shards, both missing.
fn with_half_an_index(folder: &Path) {
    fs::remove_file(folder.join("model/model.safetensors")).unwrap();
    let index = r#"{"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}"#;
    fs::write(folder.join("model/model.safetensors.index.json"), index).unwrap();
}

/// GGUF files in the place of a model's own.
fn with_two_models(folder: &Path) {
    fs::remove_dir_all(folder.join("model")).unwrap();
    fs::create_dir(folder.join("model")).unwrap();
    for file in ["b.gguf", "a.gguf"] {
        fs::write(folder.join("model").join(file), "").unwrap();
    }
}

fn with_a_wider_config(folder: &Path) {
    let path = folder.join("model/config.json");
    let config = fs::read_to_string(&path).unwrap();
    let wider = config.replace("\"intermediate_size\": 512", "\"intermediate_size\": 600");
    assert_ne!(config, wider);
    fs::write(path, wider).unwrap();
}
