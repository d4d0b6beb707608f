use super::*;
use crate::measure::telemetry::thread_time;

/// Values, and what is said of them.
const WRONG_VALUES: &[(&str, &str)] = &[
    ("[lora]\nr = 0", "r:6:5: `lora.r` = 0, expected a whole number from 1 to 65536"),
    ("[lora]\nr = 65537", "r:6:5: `lora.r` = 65537, expected a whole number from 1 to 65536"),
    ("[lora]\nr = -3", "r:6:5: `lora.r` = -3, expected a whole number from 1 to 65536"),
    ("[lora]\nr = [8]", "r:6:5: `lora.r` = [8], expected a whole number from 1 to 65536"),
    (
        "[lora]\nr = 99999999999999999999",
        "r:6:5: `lora.r` = 99999999999999999999, expected a whole number from 1 to 65536",
    ),
    (
        "[lora]\nr = 8.0",
        "r:6:5: `lora.r` = 8.0, expected a whole number from 1 to 65536\n  hint: write it without a point: 8",
    ),
    (
        "[lora]\nr = \"8\"",
        "r:6:5: `lora.r` = \"8\", expected a whole number from 1 to 65536\n  hint: write it without quotes: 8",
    ),
    ("[lora]\nr = 2020-01-01", "r:6:5: `lora.r` = 2020-01-01, expected a whole number from 1 to 65536"),
    ("[lora]\nlora_alpha = nan", "r:6:14: `lora.lora_alpha` = nan, expected a number above 0"),
    ("[lora]\nlora_alpha = inf", "r:6:14: `lora.lora_alpha` = inf, expected a number above 0"),
    ("[lora]\nuse_rslora = 1", "r:6:14: `lora.use_rslora` = 1, expected true or false"),
    (
        "[lora]\nuse_rslora = \"true\"",
        "r:6:14: `lora.use_rslora` = \"true\", expected true or false\n  hint: write true without quotes",
    ),
    (
        "[lora]\nrank_pattern = { q_proj = 0 }",
        "r:6:27: `lora.rank_pattern.q_proj` = 0, expected a whole number from 1 to 65536",
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
    (
        "[optimizer]\nname = \"rmsprop\"",
        "r:6:8: `optimizer.name` = \"rmsprop\", expected one of \"adamw\", \"adamw_8bit\", \"lion\", \"adafactor\", \"sgd\", \"schedule_free_adamw\", \"muon\"",
    ),
    ("[optimizer]\nname = \"sgd\"\neps = 1e-6", "r:7:1: `optimizer.eps` is of no use to \"sgd\": leave it out"),
    ("[optimizer]\nmomentum = 0.9", "r:6:1: `optimizer.momentum` is of no use to \"adamw\": leave it out"),
    (
        "[optimizer]\nname = \"schedule_free_adamw\"\nema_decay = 0.99",
        "r:7:1: `optimizer.ema_decay` averages what \"schedule_free_adamw\" averages already\n  hint: leave one of the two out",
    ),
    (
        "[scheduler]\nnum_cycles = 2",
        "r:6:1: `scheduler.num_cycles` is of \"cosine_with_restarts\"; lr_scheduler = \"cosine\" has no use for it",
    ),
    (
        "[optimizer]\nname = \"adamw_torch\"",
        "r:6:8: `optimizer.name` = \"adamw_torch\", expected one of \"adamw\", \"adamw_8bit\", \"lion\", \"adafactor\", \"sgd\", \"schedule_free_adamw\", \"muon\"\n  hint: this trainer calls it `adamw`",
    ),
    (
        "[scheduler]\nlr_scheduler = \"cosin\"",
        "r:6:16: `scheduler.lr_scheduler` = \"cosin\", expected one of \"cosine\", \"linear\", \"constant\", \"cosine_with_restarts\", \"polynomial\", \"inverse_sqrt\", \"warmup_stable_decay\"\n  hint: did you mean `cosine`?",
    ),
    ("[train]\nprecision = 16", "r:6:13: `train.precision` = 16, expected one of \"f32\", \"tf32\", \"bf16\", \"f16\""),
    (
        "[train]\ngradient_checkpointing = \"unsloth\"",
        "r:6:26: `train.gradient_checkpointing` = \"unsloth\", expected \"auto\", true, false, \"12-blocks\" or \"offload\"\n  hint: what Unsloth does is called \"offload\" here",
    ),
    (
        "[train]\ngradient_checkpointing = 1",
        "r:6:26: `train.gradient_checkpointing` = 1, expected \"auto\", true, false, \"12-blocks\" or \"offload\"",
    ),
    (
        "[train]\ngradient_checkpointing = \"true\"",
        "r:6:26: `train.gradient_checkpointing` = \"true\", expected \"auto\", true, false, \"12-blocks\" or \"offload\"\n  hint: write true without quotes",
    ),
    ("[train]\nmax_grad_norm = -1", "r:6:17: `train.max_grad_norm` = -1, expected a number of at least 0"),
    ("[data]\nchat_template = \" \"", "r:6:17: `data.chat_template` = \" \", expected text that is not empty"),
    (
        "[data]\neval_split = 1.0",
        "r:6:14: `data.eval_split` = 1.0, expected a share of the rows in (0, 1) or a number of rows of at least 1",
    ),
    ("weight = 0", "r:5:10: `data.train[0].weight` = 0, expected a number in (0, 1000]"),
    ("weight = 1001", "r:5:10: `data.train[0].weight` = 1001, expected a number in (0, 1000]"),
    (
        "[train]\nmicro_batch_size = 65537",
        "r:6:20: `train.micro_batch_size` = 65537, expected a whole number from 1 to 65536",
    ),
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

#[test]
fn values_of_the_wrong_type_or_out_of_range_say_what_is_allowed() {
    for (text, expected) in WRONG_VALUES {
        assert_eq!(problems(text), [*expected], "{text}");
    }
}

#[test]
fn targets_that_cannot_exist_are_refused() {
    const EXPECTED: &str = "expected \"all-linear\", a list of names such as [\"q_proj\", \"v_proj\"], or a regular \
                            expression for whole module names";
    const NAMES: &str = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
    let cases = [
        ("[\"q_proj\", \"c_attn\"]", format!("\n  hint: there is no `c_attn`: there are {NAMES}")),
        ("[\"qproj\"]", "\n  hint: there is no `qproj`: did you mean `q_proj`?".into()),
        ("[\"mlp.gateproj\"]", "\n  hint: there is no `mlp.gateproj`: did you mean `gate_proj`?".into()),
        ("\"downproj\"", "\n  hint: did you mean `down_proj`?".into()),
        ("[\"lm_head\"]", "\n  hint: `lm_head` cannot be adapted: `modules_to_save` trains it as a whole".into()),
        ("[\"all-linear\"]", "\n  hint: write \"all-linear\" without brackets".into()),
        ("\"q_proj\"", "\n  hint: for the layers of this name write [\"q_proj\"]".into()),
        ("\"all_linear\"", "\n  hint: did you mean \"all-linear\"?".into()),
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
    // Of attention, and a router.
    for name in ["self_attn.q_proj", "mlp.gate"] {
        assert_eq!(targets(&format!("[{name:?}]")), TargetModules::Names(vec![name.into()]));
    }
    assert_eq!(targets("\".*q_proj\""), TargetModules::Regex(".*q_proj".into()));
}

#[test]
fn what_does_not_go_together_or_is_not_available_is_refused() {
    let cases = [(
        "[lora]\nuse_dora = true\n[optimizer]\nname = \"muon\"",
        "r:8:1: `optimizer.name` = \"muon\" trains matrices, and `lora.use_dora` brings vectors\n  hint: use \"adamw\", or take `use_dora` out",
    )];
    for (text, expected) in cases {
        assert_eq!(problems(text), [expected], "{text}");
    }
    let mut refused = problems("[lora]\ninit_lora_weights = \"loftq\"\nlayers_to_transform = [1, 1]");
    assert!(
        refused.remove(1).ends_with("expected a list of layer numbers from 0, each once\n  hint: 1 is there twice")
    );
    assert!(
        refused[0].contains("= \"loftq\", expected true (uniform, as PEFT does by default), \"gaussian\""),
        "{refused:?}"
    );
}

#[test]
fn an_address_of_the_hub_is_not_a_repository_id() {
    assert_eq!(
        lines(set(&["model.path=https://huggingface.co/org/name"])),
        ["--set model.path=https://huggingface.co/org/name: `model.path` = \"https://huggingface.co/org/name\" is an \
          address, expected a folder or a repository id\n  hint: write \"org/name\""]
    );
    for (address, name) in [
        ("org/name/tree/main", "org/name"),
        ("org/name/blob/main/q/a-Q4_0.gguf", "org/name/q/a-Q4_0.gguf"),
        ("org/name/resolve/main/a-Q4_0.gguf?download=true", "org/name/a-Q4_0.gguf"),
    ] {
        let problem = lines(set(&[&format!("model.path=https://huggingface.co/{address}")]));
        assert!(problem[0].ends_with(&format!("hint: write \"{name}\"")), "{problem:?}");
    }
}

#[test]
fn columns_must_be_those_of_the_format() {
    assert_eq!(
        problems("format = \"alpaca\"\ncolumns = { prompt = \"a\", output = \"b\" }"),
        ["r:6:13: `data.train[0].columns` has `prompt`, which format `alpaca` does not read\n  hint: it reads \
          instruction, output, input, system, images"]
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
            "r:7:1: `scheduler.min_lr_ratio` has no meaning with `lr_scheduler` = \"constant\"\n  hint: take it out, or use \
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
fn long_lines_and_long_names_take_no_longer_than_they_are_long() {
    // Before the limit, a quarter of a million values took 30 seconds, and a name of two megabytes seven seconds and
    // 400 MB.
    let start = thread_time().cpu.unwrap_or_default();
    let values = vec!["1"; 250_000].join(", ");
    assert_eq!(problems(&format!("[lora]\nr = [{values}]")).len(), 1);
    assert_eq!(problems(&format!("{} = 1", "a".repeat(2_000_000))).len(), 1);
    let taken = thread_time().cpu.unwrap_or_default().saturating_sub(start);
    assert!(taken.as_secs() < 10, "{taken:?}");
    let columns =
        problems("[lora]\nlayers_to_transform = { \"\u{e9}\" = 1, q = 2 }\nalpha_pattern = { \"\u{e9}\" = 0, q = 0 }");
    for place in ["r:7:25: ", "r:7:32: "] {
        assert!(columns.iter().any(|problem| problem.starts_with(place)), "{columns:?}");
    }
}

#[test]
fn a_recipe_of_a_megabyte_is_another_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.bin");
    std::fs::write(&path, vec![b'#'; 1 << 20]).unwrap();
    let error = |path| Recipe::load(path, &[], Purpose::Training).unwrap_err().to_string();
    assert!(error(&path).contains("`model.path` is missing"), "{}", error(&path));
    std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(error(&path).contains("longer than 1048576 bytes, expected a recipe file"), "{}", error(&path));
}
