use std::path::Path;

use super::*;
use crate::data::config::{DataFormat, DataSource, EvalSplit};
use crate::device::Dtype;
use crate::lora::config::{InitLoraWeights, TargetModules};
use crate::model::{Init, Quantization};

fn parse(text: &str, set: &[&str]) -> Result<Recipe, Problems> {
    let overrides: Vec<Override> = set.iter().map(|assignment| Override::set(*assignment)).collect();
    Recipe::parse(Path::new("dir/r.toml"), text, &overrides, Purpose::Training)
}

fn least(more: &str) -> String {
    // TOML has one key a line; the recipe's own tables come first.
    format!("[model]\npath = \"m\"\n[[data.train]]\npath = \"rows.jsonl\"\n{more}")
}

/// The problems of the least recipe and `more`, whose first line is line 5.
fn problems(more: &str) -> Vec<String> {
    lines(parse(&least(more), &[]))
}

fn lines(result: Result<Recipe, Problems>) -> Vec<String> {
    result.unwrap_err().0.iter().map(|problem| problem.to_string().replace("dir/r.toml", "r")).collect()
}

fn set(assignments: &[&str]) -> Result<Recipe, Problems> {
    parse(&least("[lora]\nr = 4\n"), assignments)
}

#[test]
fn the_least_recipe_has_every_default() {
    let recipe = parse(&least(""), &[]).unwrap();
    let source = DataSource {
        path: "rows.jsonl".into(),
        format: DataFormat::Auto,
        columns: std::collections::BTreeMap::new(),
        weight: 1.0,
    };
    assert_eq!(recipe.output_dir, Path::new("runs/r"));
    assert_eq!(recipe.seed, 0);
    assert_eq!(recipe.model.path, "m");
    assert_eq!((recipe.model.quantization, recipe.model.init), (Quantization::None, Init::Pretrained));
    assert_eq!(recipe.lora, LoraConfig::default());
    assert_eq!(recipe.data, DataConfig { train: vec![source], ..DataConfig::default() });
    assert_eq!(recipe.train, TrainConfig { num_epochs: Some(1.0), ..TrainConfig::default() });
    assert_eq!(recipe.optimizer, OptimizerConfig::default());
    assert_eq!(recipe.scheduler, SchedulerConfig::default());
    assert_eq!(recipe.eval, EvalConfig::default());
    assert_eq!(recipe.checkpoint, CheckpointConfig::default());
    assert_eq!(recipe.logging, LoggingConfig::default());
    assert_eq!(recipe.device, DeviceConfig::default());
}

#[test]
fn every_value_is_read_and_the_resolved_recipe_reads_back_equal() {
    let text = r#"
output_dir = "out"
seed = 9223372036854775807
[model]
path = "m"
revision = "v1"
dtype = "bf16"
init = "random"
[lora]
r = 16
lora_alpha = 32
lora_dropout = 0.05
target_modules = '.*\.self_attn\.[qv]_proj'
use_rslora = true
init_lora_weights = "gaussian"
layers_to_transform = [3, 1]
rank_pattern = { q_proj = 4, "layers.0.self_attn.v_proj" = 2 }
alpha_pattern = { q_proj = 8.5 }
loraplus_lr_ratio = 16
[data]
max_length = 512
train_on_inputs = true
eval_split = 0.1
shuffle = false
num_workers = 2
prefetch_batches = 8
chat_template = "none"
[[data.train]]
path = "a.jsonl"
format = "alpaca"
columns = { instruction = "question", output = "answer" }
weight = 0.5
[[data.train]]
path = "b \"quoted\".txt"
[train]
precision = "f16"
micro_batch_size = 2
gradient_accumulation_steps = 3
num_epochs = 2.5
max_steps = 100
gradient_checkpointing = false
max_grad_norm = 0
[optimizer]
name = "adamw"
learning_rate = 1e-5
weight_decay = 0.01
betas = [0.8, 0.95]
eps = 1e-6
[scheduler]
lr_scheduler = "linear"
warmup_ratio = 0.03
min_lr_ratio = 0.1
[eval]
eval_steps = 10
max_batches = 4
early_stopping_patience = 2
generate = ["Hello", "two\nlines"]
[checkpoint]
save_steps = 50
save_total_limit = 1
[logging]
logging_steps = 5
tensorboard = false
gpu_sample_ms = 250
[device]
name = "cuda:1"
"#;
    let recipe = parse(text, &[]).unwrap();
    assert_eq!(recipe.seed, i64::MAX as u64);
    assert_eq!(recipe.model.dtype, Some(Dtype::Bf16));
    assert_eq!(recipe.lora.lora_alpha.to_bits(), 32.0_f64.to_bits());
    assert_eq!(recipe.lora.target_modules, TargetModules::Regex(r".*\.self_attn\.[qv]_proj".into()));
    assert_eq!(recipe.lora.init_lora_weights, InitLoraWeights::Gaussian);
    assert_eq!(recipe.lora.layers_to_transform, Some(vec![1, 3]));
    assert_eq!(recipe.lora.rank_pattern["layers.0.self_attn.v_proj"], 2);
    assert_eq!(recipe.data.eval_split, Some(EvalSplit::Share(0.1)));
    assert_eq!(recipe.data.train[0].columns["output"], "answer");
    assert_eq!(recipe.train.precision, Dtype::F16);
    assert_eq!((recipe.train.num_epochs, recipe.train.max_steps), (Some(2.5), Some(100)));
    assert_eq!(recipe.scheduler.warmup_ratio, Some(0.03));
    assert_eq!(recipe.device.name, "cuda:1");

    for recipe in [recipe, parse(&least(""), &[]).unwrap(), set(&["data.eval_split=7"]).unwrap()] {
        let toml = recipe.to_toml();
        let again = Recipe::parse(Path::new("resolved.toml"), &toml, &[], Purpose::Training);
        assert_eq!(again.unwrap_or_else(|problems| panic!("{problems}\n{toml}")), recipe);
    }
}

#[test]
fn one_epoch_is_the_default_only_where_no_steps_are_given() {
    assert_eq!(parse(&least(""), &[]).unwrap().train.num_epochs, Some(1.0));
    assert_eq!(set(&["train.max_steps=3"]).unwrap().train.num_epochs, None);
}

#[test]
fn all_problems_are_reported_together_by_place() {
    let text = "seed = -1\n[lora]\nlora_dropout = 1.2\ntarget = \"all\"\n[model]\npath = \"m\"\n[eval]\neval_steps = 0";
    assert_eq!(
        lines(parse(text, &["lora.r=x", "optimizer.eps=0"])),
        [
            "r: there is no training data\n  hint: add [[data.train]] with the `path` of a file",
            "r:1:8: `seed` = -1, expected a whole number from 0 to 9223372036854775807",
            "r:3:16: `lora.lora_dropout` = 1.2, expected a number in [0, 1)",
            "r:4:1: unknown key `target`\n  hint: did you mean `target_modules`?",
            "r:8:14: `eval.eval_steps` = 0, expected a whole number of at least 1",
            "--set lora.r=x: `lora.r` = \"x\", expected a whole number of at least 1",
            "--set optimizer.eps=0: `optimizer.eps` = 0, expected a number above 0",
        ]
    );
}

#[test]
fn text_that_is_not_toml_is_located() {
    assert_eq!(
        lines(parse("a = \nb = \"x\n[lora\nr = 8\n", &[])),
        [
            "r:1:5: not valid TOML: string values must be quoted, expected literal string",
            "r:2:7: not valid TOML: invalid basic string, expected `\"`",
            "r:3:6: not valid TOML: unclosed table, expected `]`",
        ]
    );
    assert_eq!(
        lines(parse(
            "[lora]\nr = 8\nr = 9\n[lora]\nalpha = 1\n[model]\npath = \"m\"\n[[data.train]]\npath = \"a\"",
            &[]
        )),
        [
            "r:3:1: `r` is given twice",
            "r:4:2: `lora` is given twice",
            "r:5:1: unknown key `alpha`; this trainer calls it `lora_alpha`",
        ]
    );
}

#[test]
fn columns_are_counted_in_characters() {
    assert_eq!(
        problems("[eval]\ngenerate = [\"äöü\"] ; x = 1\n")[0].split(": ").next(),
        Some("r:6:20"),
        "a umlaut is one column"
    );
}

#[test]
fn unknown_keys_lead_to_the_right_name_or_the_right_section() {
    let cases = [
        ("[lora]\nlora_r = 8", "r:6:1: unknown key `lora_r`; this trainer calls it `r`"),
        ("[lora]\nLoRA-R = 8", "r:6:1: unknown key `LoRA-R`; this trainer calls it `r`"),
        (
            "[lora]\nbatch_size = 8",
            "r:6:1: unknown key `batch_size`; this trainer calls it `micro_batch_size`, in [train]",
        ),
        ("[train]\nlearning_rate = 1e-4", "r:6:1: unknown key `learning_rate`; it belongs in [optimizer]"),
        ("[train]\nseed = 1", "r:6:1: unknown key `seed`; it belongs at the top, before the first section"),
        ("[data]\nformat = \"text\"", "r:6:1: unknown key `format`; it belongs in [[data.train]] or in [[data.eval]]"),
        ("[data]\nmax_lenght = 5", "r:6:1: unknown key `max_lenght`\n  hint: did you mean `max_length`?"),
        (
            "[data]\nlearning_rte = 5",
            "r:6:1: unknown key `learning_rte`\n  hint: did you mean `learning_rate`, in [optimizer]?",
        ),
        (
            "[checkpoint]\nzzz = 5",
            "r:6:1: unknown key `zzz`\n  hint: [checkpoint] takes `save_steps`, `save_total_limit`",
        ),
        ("[training]\nzzz = 5", "r:5:2: unknown section [training]; this trainer calls it [train]"),
        ("[optimiser_]\nzzz = 5", "r:5:2: unknown section [optimiser_]\n  hint: did you mean [optimizer]?"),
        ("[[datasets]]\npath = \"a\"", "r:5:3: unknown section [datasets]; this trainer calls it [[data.train]]"),
        (
            "[train]\nbf16 = true",
            "r:6:1: unknown key `bf16`; this trainer calls it `precision`\n  hint: write precision = \"bf16\"",
        ),
        ("[train]\ndeepspeed = \"x\"", "r:6:1: unknown key `deepspeed`\n  hint: this trainer runs on one device"),
        ("type = \"alpaca\"", "r:5:1: unknown key `type`; this trainer calls it `format`"),
    ];
    for (text, expected) in cases {
        assert_eq!(problems(text), [expected], "{text}");
    }
}

#[test]
fn values_of_the_wrong_type_or_out_of_range_say_what_is_allowed() {
    let cases = [
        ("[lora]\nr = 0", "r:6:5: `lora.r` = 0, expected a whole number of at least 1"),
        ("[lora]\nr = -3", "r:6:5: `lora.r` = -3, expected a whole number of at least 1"),
        (
            "[lora]\nr = 99999999999999999999",
            "r:6:5: `lora.r` = 99999999999999999999, expected a whole number of at least 1",
        ),
        (
            "[lora]\nr = 8.0",
            "r:6:5: `lora.r` = 8.0, expected a whole number of at least 1\n  hint: write it without a point: 8",
        ),
        (
            "[lora]\nr = \"8\"",
            "r:6:5: `lora.r` = \"8\", expected a whole number of at least 1\n  hint: write it without quotes: 8",
        ),
        ("[lora]\nr = [8]", "r:6:5: `lora.r` = [8], expected a whole number of at least 1"),
        ("[lora]\nr = 2020-01-01", "r:6:5: `lora.r` = 2020-01-01, expected a whole number of at least 1"),
        ("[lora]\nlora_alpha = nan", "r:6:14: `lora.lora_alpha` = nan, expected a number above 0"),
        ("[lora]\nlora_alpha = inf", "r:6:14: `lora.lora_alpha` = inf, expected a number above 0"),
        ("[lora]\nuse_rslora = 1", "r:6:14: `lora.use_rslora` = 1, expected true or false"),
        (
            "[lora]\nuse_rslora = \"true\"",
            "r:6:14: `lora.use_rslora` = \"true\", expected true or false\n  hint: write true without quotes",
        ),
        (
            "[lora]\nrank_pattern = { q_proj = 0 }",
            "r:6:27: `lora.rank_pattern.q_proj` = 0, expected a whole number of at least 1",
        ),
        (
            "[lora]\nalpha_pattern = 3",
            "r:6:17: `lora.alpha_pattern` = 3, expected a table\n  hint: write alpha_pattern = { name = value }",
        ),
        (
            "[lora]\nrank_pattern = { \"a(\" = 3 }",
            "r:6:1: `lora.rank_pattern` has the name `a(`, which is no regular expression\n  hint: unclosed group",
        ),
        ("[optimizer]\nlearning_rate = 0", "r:6:17: `optimizer.learning_rate` = 0, expected a number in (0, 1]"),
        (
            "[optimizer]\nbetas = [0.9, 1.0]",
            "r:6:9: `optimizer.betas` = [0.9, 1.0], expected a list of 2 numbers, each a number in [0, 1)",
        ),
        ("[optimizer]\nname = \"sgd\"", "r:6:8: `optimizer.name` = \"sgd\", expected \"adamw\""),
        (
            "[optimizer]\nname = \"adamw_torch\"",
            "r:6:8: `optimizer.name` = \"adamw_torch\", expected \"adamw\"\n  hint: this trainer calls it `adamw`",
        ),
        (
            "[scheduler]\nlr_scheduler = \"cosin\"",
            "r:6:16: `scheduler.lr_scheduler` = \"cosin\", expected one of \"cosine\", \"linear\", \"constant\"\n  hint: did you mean `cosine`?",
        ),
        ("[train]\nprecision = 16", "r:6:13: `train.precision` = 16, expected one of \"f32\", \"bf16\", \"f16\""),
        ("[train]\nmax_grad_norm = -1", "r:6:17: `train.max_grad_norm` = -1, expected a number of at least 0"),
        ("[data]\nchat_template = \" \"", "r:6:17: `data.chat_template` = \" \", expected text that is not empty"),
        (
            "[data]\neval_split = 1.0",
            "r:6:14: `data.eval_split` = 1.0, expected a share of the rows in (0, 1) or a number of rows of at least 1",
        ),
        ("weight = 0", "r:5:10: `data.train[0].weight` = 0, expected a number above 0"),
        (
            "[eval]\ngenerate = \"hi\"",
            "r:6:12: `eval.generate` = \"hi\", expected a list of texts, none of them empty\n  hint: a list is written in brackets: [...]",
        ),
        (
            "[device]\nname = \"gpu\"",
            "r:6:8: `device.name` = \"gpu\", expected \"auto\", \"cpu\", \"cuda\", \"cuda:N\", \"vulkan\", \"metal\" or \"rocm\"\n  hint: this trainer calls it `cuda`",
        ),
        (
            "[device]\nname = \"cud:0\"",
            "r:6:8: `device.name` = \"cud:0\", expected \"auto\", \"cpu\", \"cuda\", \"cuda:N\", \"vulkan\", \"metal\" or \"rocm\"\n  hint: did you mean `cuda`?",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(problems(text), [expected], "{text}");
    }
}

#[test]
fn a_section_that_is_a_value_or_a_list_is_refused() {
    let text = "lora = 3\n[model]\npath = \"m\"\n[data]\ntrain = 3\neval = [1]";
    assert_eq!(
        lines(parse(text, &[])),
        [
            "r:1:8: `lora` = 3, expected a section [lora]",
            "r:5:9: `data.train` = 3, expected sections [[data.train]]",
            "r:6:9: `data.eval[0]` = 1, expected sections [[data.eval]]",
        ]
    );
    assert_eq!(
        lines(parse("[model]\npath = \"m\"\n[data.train]\npath = \"a\"", &[])),
        [
            "r:3:1: `data.train` = a table, expected sections [[data.train]]\n  hint: write [[data.train]], in double brackets: there can be several"
        ]
    );
}

#[test]
fn targets_that_cannot_exist_are_refused() {
    const EXPECTED: &str = "expected \"all-linear\", a list of names such as [\"q_proj\", \"v_proj\"], or a regular \
                            expression for whole module names";
    const NAMES: &str = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
    let cases = [
        ("[\"q_proj\", \"c_attn\"]", format!("\n  hint: there is no `c_attn`: there are {NAMES}")),
        (
            "[\"lm_head\"]",
            "\n  hint: `lm_head` cannot be adapted: its loss is computed in chunks that need it frozen".into(),
        ),
        ("[\"all-linear\"]", "\n  hint: write \"all-linear\" without brackets".into()),
        ("\"q_proj\"", "\n  hint: for the layers of this name write [\"q_proj\"]".into()),
        ("\"c_attn\"", format!("\n  hint: there are {NAMES}")),
        ("\"(q_proj\"", "\n  hint: unclosed group".into()),
        ("[]", String::new()),
        ("7", String::new()),
    ];
    for (value, hint) in cases {
        let found = problems(&format!("[lora]\ntarget_modules = {value}"));
        assert_eq!(found, [format!("r:6:18: `lora.target_modules` = {value}, {EXPECTED}{hint}")]);
    }
    let targets = |value: &str| {
        let text = least(&format!("[lora]\ntarget_modules = {value}"));
        parse(&text, &[]).unwrap().lora.target_modules
    };
    assert_eq!(targets("\"all-linear\""), TargetModules::AllLinear);
    assert_eq!(targets("[\"self_attn.q_proj\"]"), TargetModules::Names(vec!["self_attn.q_proj".into()]));
    assert_eq!(targets("\".*q_proj\""), TargetModules::Regex(".*q_proj".into()));
}

#[test]
fn what_is_planned_is_refused_as_not_available_yet() {
    let cases = [
        (
            "[lora]\nuse_dora = true",
            "r:6:12: `lora.use_dora` = true is not available yet\n  hint: leave it out for plain LoRA",
        ),
        (
            "[data]\npacking = true",
            "r:6:11: `data.packing` = true is not available yet\n  hint: leave it out: every row is a sequence of its own",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(problems(text), [expected], "{text}");
    }
    assert_eq!(
        lines(set(&["model.quantization=nf4"])),
        [
            "--set model.quantization=nf4: `model.quantization` = \"nf4\" is not available yet\n  hint: what there is: `none`"
        ]
    );
    let mut refused = problems("[lora]\ninit_lora_weights = \"pissa\"\nlayers_to_transform = [1, 1]");
    assert!(
        refused.remove(1).ends_with("expected a list of layer numbers from 0, each once\n  hint: 1 is there twice")
    );
    assert!(refused[0].ends_with("= \"pissa\", expected true (uniform, as PEFT does by default) or \"gaussian\""));
}

#[test]
fn missing_keys_are_reported_where_they_should_be() {
    assert_eq!(
        lines(parse("[model]\ninit = \"random\"\n[[data.train]]\nformat = \"text\"", &[])),
        [
            "r:1:1: `model.path` is missing: a local Hugging Face folder or the id of a Hub repository",
            "r:3:1: `data.train[0].path` is missing: a .json, .jsonl, .parquet or .txt file, or a glob of them",
        ]
    );
    let text = "[model]\npath = \"m\"\n[data]\ntrain = []";
    assert_eq!(
        lines(parse(text, &[])),
        ["r:3:2: there is no training data\n  hint: add [[data.train]] with the `path` of a file"]
    );
    assert!(Recipe::parse(Path::new("r.toml"), text, &[], Purpose::Benchmark).is_ok(), "a benchmark needs no rows");
}

#[test]
fn an_address_of_the_hub_is_not_a_repository_id() {
    assert_eq!(
        lines(set(&["model.path=https://huggingface.co/org/name"])),
        ["--set model.path=https://huggingface.co/org/name: `model.path` = \"https://huggingface.co/org/name\" is an \
          address, expected a folder or a repository id\n  hint: write \"org/name\""]
    );
}

#[test]
fn columns_must_be_those_of_the_format() {
    assert_eq!(
        problems("format = \"alpaca\"\ncolumns = { prompt = \"a\", output = \"b\" }"),
        ["r:6:13: `data.train[0].columns` has `prompt`, which format `alpaca` does not read\n  hint: it reads \
          instruction, output, input, system"]
    );
    assert_eq!(
        problems("columns = { question = \"prompt\" }"),
        ["r:5:13: `data.train[0].columns` has `question`, which no format reads\n  hint: our name first: prompt = \
          \"question\""]
    );
}

#[test]
fn sections_that_contradict_each_other_are_refused() {
    let cases = [
        (
            "[data]\neval_split = 0.1\n[[data.eval]]\npath = \"e\"",
            "r:6:1: `data.eval_split` excludes [[data.eval]]: evaluation rows come from one of them\n  hint: keep one of \
             the two",
        ),
        (
            "[scheduler]\nwarmup_ratio = 0.1\nwarmup_steps = 5",
            "r:7:1: `scheduler.warmup_steps` excludes `scheduler.warmup_ratio`: they say the same thing twice\n  hint: \
             keep one of the two",
        ),
        (
            "[scheduler]\nwarmup_steps = 5\n[train]\nmax_steps = 5",
            "r:6:1: `scheduler.warmup_steps` = 5 leaves none of `train.max_steps` = 5\n  hint: make it smaller, or use \
             `warmup_ratio`",
        ),
        (
            "[scheduler]\nlr_scheduler = \"constant\"\nmin_lr_ratio = 0.1",
            "r:7:1: `scheduler.min_lr_ratio` has no meaning for a constant learning rate\n  hint: take it out, or use \
             `cosine` or `linear`",
        ),
        (
            "[eval]\neval_steps = 5",
            "r:6:1: `eval.eval_steps` needs evaluation data, and there is none\n  hint: add [[data.eval]], or \
             `eval_split` in [data]",
        ),
        (
            "[data]\neval_split = 3\n[eval]\nearly_stopping_patience = 5",
            "r:8:1: `eval.early_stopping_patience` needs evaluations during training\n  hint: set `eval_steps` in [eval]",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(problems(text), [expected], "{text}");
    }
    assert_eq!(
        problems("[eval]\nearly_stopping_patience = 2")[0],
        "r:6:1: `eval.early_stopping_patience` needs evaluation data, and there is none\n  hint: add [[data.eval]], or \
         `eval_split` in [data]"
    );
    let samples_only = "[eval]\neval_steps = 5\ngenerate = [\"Hello\"]";
    assert!(parse(&least(samples_only), &[]).is_ok(), "samples need no evaluation data");
}

#[test]
fn changes_of_the_command_line_go_through_the_same_schema() {
    let recipe = set(&[
        "seed=7",
        "lora.r = 16",
        "lora.r=32",
        "lora.target_modules=[\"q_proj\"]",
        "lora.rank_pattern.q_proj=4",
        "lora.rank_pattern.\"layers.0.v_proj\"=2",
        "model.path=org/name",
        "data.train[0].path=x.jsonl",
        "data.train.1.path=y.jsonl",
        "data.train[1].format=text",
        "data.eval[0].path=e.jsonl",
        "optimizer.learning_rate=1e-5",
    ])
    .unwrap();
    assert_eq!((recipe.seed, recipe.lora.r), (7, 32));
    assert_eq!(recipe.lora.target_modules, TargetModules::Names(vec!["q_proj".into()]));
    assert_eq!(recipe.lora.rank_pattern.len(), 2);
    assert_eq!(recipe.model.path, "org/name");
    let paths: Vec<&str> =
        recipe.data.train.iter().chain(&recipe.data.eval).map(|source| source.path.as_str()).collect();
    assert_eq!(paths, ["x.jsonl", "y.jsonl", "e.jsonl"]);
    assert_eq!(recipe.data.train[1].format, DataFormat::Text);

    assert_eq!(set(&["lora.r="]).unwrap().lora.r, LoraConfig::default().r, "nothing after `=` takes the key out");
}

#[test]
fn changes_that_cannot_be_made_say_why() {
    let cases = [
        ("lora.r", "expected section.key=value\n  hint: for example --set lora.r=16"),
        ("lora.=3", "`lora.` is not the name of a key\n  hint: write section.key=value"),
        ("lora r=3", "`lora r` is not the name of a key\n  hint: write section.key=value"),
        (
            "lora.rank_pattern.\"q=3",
            "`lora.rank_pattern.\"q` is not the name of a key\n  hint: write section.key=value",
        ),
        ("model.revision=", "there is no `model.revision` in the recipe to take out"),
        ("model.path.x=3", "`model.path` = \"m\" has no keys"),
        ("data.train.path=3", "`data.train` is a list\n  hint: name one of its elements: data.train[0]"),
        ("data.train[2].path=x", "there is no `data.train[2]`: the list has 1 element"),
        (
            "lora.target_modules=[q_proj]",
            "not a TOML value: string values must be quoted, expected literal string\n  hint: text that begins with `[` \
             needs quotes of its own: '...'",
        ),
        ("lora.rank=4", "unknown key `rank`; this trainer calls it `r`"),
        ("loar.r=4", "unknown section [loar]\n  hint: did you mean [lora]?"),
    ];
    for (assignment, expected) in cases {
        assert_eq!(lines(set(&[assignment])), [format!("--set {assignment}: {expected}")]);
    }
}

#[test]
fn the_device_argument_is_a_change_like_any_other() {
    let change = Override::argument("--device", "device.name", "tpu");
    let text = least("");
    let problems = Recipe::parse(Path::new("r.toml"), &text, &[change], Purpose::Training).unwrap_err();
    assert!(problems.to_string().starts_with("--device tpu: `device.name` = \"tpu\", expected \"auto\""), "{problems}");
}

#[test]
fn files_that_are_no_recipe_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let load = |name: &str| {
        let path = folder.path().join(name);
        let text = Recipe::load(&path, &[], Purpose::Training).unwrap_err().to_string();
        text.replace(&format!("{}/", folder.path().display()), "")
    };
    assert_eq!(load("absent.toml"), "absent.toml: there is no such file");
    fs::create_dir(folder.path().join("dir.toml")).unwrap();
    assert_eq!(load("dir.toml"), "dir.toml: this is a folder, expected a recipe file");
    fs::write(folder.path().join("latin1.toml"), b"# \xe9t\xe9\n").unwrap();
    assert_eq!(
        load("latin1.toml"),
        "latin1.toml: not UTF-8 text at byte 2, expected a TOML file\n  hint: save it as UTF-8"
    );
}

#[test]
fn windows_line_ends_and_a_byte_order_mark_are_no_problem() {
    let text = format!("\u{feff}{}", least("").replace('\n', "\r\n"));
    assert_eq!(parse(&text, &[]).unwrap(), parse(&least(""), &[]).unwrap());
}
