//! Mistakes that people make, each with what it says: the place, the value, what would be right, and the exit code.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const RECIPE: &str = r#"output_dir = "out"
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
const ROW: &str = "{\"prompt\": \"a b\", \"completion\": \"c d\"}\n";

/// What is wrong, and the parts of the message that must be there.
enum Wrong<'a> {
    /// This text of the recipe is replaced by that.
    Recipe(&'a str, &'a str),
    /// The whole recipe.
    Whole(&'a str),
    /// `--set`.
    Set(&'a [&'a str]),
    /// A file with this content.
    File(&'a str, &'a str),
    /// A file that is gone.
    Gone(&'a str),
    /// A file with this content, and `--set`.
    FileAndSet(&'a str, &'a str, &'a str),
}
use Wrong::{File, FileAndSet, Gone, Recipe, Set, Whole};

/// Mistakes that `check` finds; all of them end with 2.
const MISTAKES: &[(&str, Wrong<'static>, &[&str])] = &[
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
    ("an unknown key by --set", Set(&["lora.rnk=3"]), &["--set lora.rnk=3: unknown key `rnk`", "[lora] takes `r`"]),
    // Values.
    (
        "a number in quotes",
        Recipe("r = 4", "r = \"4\""),
        &["r.toml:5:5: `lora.r` = \"4\"", "write it without quotes: 4"],
    ),
    ("half a rank", Recipe("r = 4", "r = 4.5"), &["r.toml:5:5: `lora.r` = 4.5, expected a whole number of at least 1"]),
    ("no rank", Recipe("r = 4", "r = 0"), &["`lora.r` = 0, expected a whole number of at least 1"]),
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
        Set(&["optimizer.name=\"lion\""]),
        &["`optimizer.name` = \"lion\", expected \"adamw\""],
    ),
    (
        "yes for true",
        Set(&["train.gradient_checkpointing=\"yes\""]),
        &["= \"yes\", expected true, false or \"offload\""],
    ),
    ("DoRA", Set(&["lora.use_dora=true"]), &["`lora.use_dora` = true is not available yet", "plain LoRA"]),
    ("quantization", Set(&["model.quantization=\"nf4\""]), &["`model.quantization` = \"nf4\" is not available yet"]),
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
    ("TOML that is none", Recipe("r = 4", "r = "), &["r.toml:5:5: not valid TOML"]),
    ("a key twice", Recipe("r = 4", "r = 4\nr = 5"), &["r.toml:6:1: `r` is given twice"]),
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
    // Devices.
    ("gpu for cuda", Set(&["device.name=\"gpu\""]), &["`device.name` = \"gpu\"", "this trainer calls it `cuda`"]),
    // Models.
    ("no such model", Set(&["model.path=\"./nope\""]), &["./nope: no such folder"]),
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
        File("model/config.json", "{\"model_type\": \"qwen2\"}"),
        &["`model_type` = \"qwen2\" is not supported, expected one of `llama`, `mistral`"],
    ),
    ("no tokenizer", Gone("model/tokenizer.json"), &["model: no tokenizer.json", "save_pretrained"]),
    ("no tokenizer in it", File("model/tokenizer.json", "[]"), &["model/tokenizer.json: "]),
    (
        "no weights",
        Gone("model/model.safetensors"),
        &["model: no model.safetensors and no model.safetensors.index.json"],
    ),
    (
        "weights that are none",
        File("model/model.safetensors", "\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}{}"),
        &["model/model.safetensors: not a safetensors file"],
    ),
    // Rows.
    ("no such rows", Set(&["data.train.0.path=\"none.jsonl\""]), &["none.jsonl: no such file"]),
    ("a pattern without a file", Set(&["data.train.0.path=\"x*.jsonl\""]), &["x*.jsonl: matches no file"]),
    ("a folder for a file", Set(&["data.train.0.path=\"model\""]), &["model: is a folder", "name its files"]),
    ("no rows", File("rows.jsonl", ""), &["rows.jsonl: the file has no rows"]),
    (
        "a row that is no JSON",
        File("rows.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n{oops\n"),
        &["rows.jsonl:line 2: not valid JSON"],
    ),
    ("a row that is no object", File("rows.jsonl", "[1, 2]\n"), &["rows.jsonl:row 1: a row must be a JSON object"]),
    (
        "columns of no format",
        File("rows.jsonl", "{\"foo\": \"a\"}\n"),
        &["rows.jsonl:line 1: the columns [\"foo\"]", "`columns` renames"],
    ),
    (
        "columns renamed to what is not there",
        Set(&["data.train.0.columns={ prompt = \"question\" }"]),
        &["rows.jsonl:line 1: the columns", "`columns` renames"],
    ),
    (
        "a number for text",
        File("rows.jsonl", "{\"prompt\": 5, \"completion\": \"x\"}\n"),
        &["rows.jsonl:line 1: `prompt` must be text, not a number"],
    ),
    (
        "a format's name",
        Set(&["data.train.0.format=\"chatml\""]),
        &["= \"chatml\", expected one of \"auto\", \"messages\"", "calls it `messages`"],
    ),
    (
        "a file of another kind",
        FileAndSet("rows.csv", "a,b\n", "data.train.0.path=\"rows.csv\""),
        &["rows.csv: files end in .json, .jsonl, .parquet or .txt"],
    ),
    (
        "half a Parquet file",
        FileAndSet("r.parquet", "PAR1xxxxPAR1", "data.train.0.path=\"r.parquet\""),
        &["r.parquet: "],
    ),
    (
        "conversations without an answer",
        File("rows.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n"),
        &["carries loss", "lora-train inspect"],
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
        &["chat template of t.jinja"],
    ),
    (
        "evaluation rows twice",
        Recipe("[train]", "[[data.eval]]\npath = \"rows.jsonl\"\n[data]\neval_split = 0.1\n[train]"),
        &["r.toml:"],
    ),
    ("all rows held out", Set(&["data.eval_split=8"]), &["`data.eval_split` holds out 8 of 8 training rows"]),
    // Output.
    (
        "a file for the output",
        Set(&["output_dir=\"rows.jsonl\""]),
        &["`output_dir` = rows.jsonl: rows.jsonl is a file, expected a folder"],
    ),
];

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lora-train"));
    command.args(arguments).current_dir(folder).env("HF_HUB_OFFLINE", "1").env("HF_HOME", folder.join("hub"));
    command.env("LORA_TRAIN_CACHE", folder.join("cache")).output().unwrap()
}

/// A folder with the quickstart's model, eight rows and a recipe.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/model");
    fs::create_dir(folder.path().join("model")).unwrap();
    for entry in fs::read_dir(model).unwrap() {
        let file = entry.unwrap().path();
        fs::copy(&file, folder.path().join("model").join(file.file_name().unwrap())).unwrap();
    }
    fs::write(folder.path().join("rows.jsonl"), ROW.repeat(8)).unwrap();
    fs::write(folder.path().join("r.toml"), RECIPE).unwrap();
    folder
}

#[test]
fn every_mistake_names_its_place_and_what_would_be_right_and_ends_with_2() {
    assert!(MISTAKES.len() >= 60, "{} mistakes", MISTAKES.len());
    let mut wrong = Vec::new();
    for (name, mistake, parts) in MISTAKES {
        let folder = folder();
        let (recipe, mut settings) = (folder.path().join("r.toml"), Vec::new());
        match mistake {
            Recipe(old, new) => {
                assert!(RECIPE.contains(old), "{name}");
                fs::write(&recipe, RECIPE.replace(old, new)).unwrap();
            }
            Whole(text) => fs::write(&recipe, text).unwrap(),
            Set(changes) => settings.extend(changes.iter().flat_map(|change| ["--set", change])),
            File(file, text) => fs::write(folder.path().join(file), text).unwrap(),
            Gone(file) => fs::remove_file(folder.path().join(file)).unwrap(),
            FileAndSet(file, text, change) => {
                fs::write(folder.path().join(file), text).unwrap();
                settings.extend(["--set", change]);
            }
        }
        let output = run(folder.path(), &[&["check", "r.toml"], &settings[..]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        let missing: Vec<_> = parts.iter().filter(|part| !stderr.contains(**part)).collect();
        if output.status.code() != Some(2) || !missing.is_empty() || !stderr.contains("error: ") {
            wrong.push(format!("{name}: {:?}, without {missing:?}:\n{stderr}", output.status.code()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_run_whose_rows_all_lost_their_answers_ends_with_2_and_says_so() {
    let folder = folder();
    let row = format!("{{\"prompt\": \"{}\", \"completion\": \"c\"}}\n", "a ".repeat(300));
    fs::write(folder.path().join("rows.jsonl"), row.repeat(8)).unwrap();
    let output = run(folder.path(), &["r.toml", "--device", "cpu"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("no token of any row that was read carries loss"), "{stderr}");
}

/// Its steps are few, and each doubles what there is: 16 TB, of which the machine has none to spare.
#[cfg(unix)]
#[test]
fn a_template_that_doubles_a_text_ends_the_command_before_it_fills_the_memory() {
    let message =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n";
    let doubling = "{% set ns = namespace(x=messages[0].content) %}{% for i in range(44) %}{% set ns.x = ns.x ~ ns.x %}\
                    {% endfor %}{{ ns.x }}";
    let repeating = "{{ (messages * 100000000)|list|length }}";
    for template in [doubling, repeating] {
        let folder = folder();
        fs::write(folder.path().join("rows.jsonl"), message).unwrap();
        fs::write(folder.path().join("model/chat_template.jinja"), template).unwrap();
        fs::write(folder.path().join("r.toml"), RECIPE).unwrap();
        // Address space for the command itself, twice what a template may have, and not more.
        let mut command = Command::new("bash");
        command.args(["-c", "ulimit -v 4000000; exec \"$0\" check r.toml", env!("CARGO_BIN_EXE_lora-train")]);
        let output = command.current_dir(folder.path()).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(
            told.starts_with("error: the chat template takes more than 512 MiB for one conversation\n  hint: "),
            "{told}"
        );
    }
}
