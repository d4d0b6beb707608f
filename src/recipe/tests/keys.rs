use super::*;

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
            "r:6:1: unknown key `zzz`\n  hint: [checkpoint] takes `save_minutes`, `save_steps`, `save_total_limit`",
        ),
        ("[training]\nzzz = 5", "r:5:2: unknown section [training]; this trainer calls it [train]"),
        ("[optimiser_]\nzzz = 5", "r:5:2: unknown section [optimiser_]\n  hint: did you mean [optimizer]?"),
        ("[[datasets]]\npath = \"a\"", "r:5:3: unknown section [datasets]; this trainer calls it [[data.train]]"),
        (
            "[train]\nbf16 = true",
            "r:6:1: unknown key `bf16`; this trainer calls it `precision`\n  hint: write precision = \"bf16\"",
        ),
        (
            "[train]\ndeepspeed = \"x\"",
            "r:6:1: unknown key `deepspeed`\n  hint: each GPU holds the whole model: `mpirun -n N lora-train RECIPE`; `lora-train help cluster`",
        ),
        ("[adapter]\nr = 8", "r:5:2: unknown section [adapter]; this trainer calls it [lora]"),
        ("[peft]\nr = 8", "r:5:2: unknown section [peft]; this trainer calls it [lora]"),
        ("[dataset]\npath = \"a\"", "r:5:2: unknown section [dataset]; this trainer calls it [[data.train]]"),
        ("[train]\nadapter = \"lora\"", "r:6:1: unknown key `adapter`\n  hint: LoRA is what this trainer does"),
        ("[train]\noptim = \"adamw\"", "r:6:1: unknown key `optim`; this trainer calls it `name`, in [optimizer]"),
        ("type = \"alpaca\"", "r:5:1: unknown key `type`; this trainer calls it `format`"),
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
fn missing_keys_are_reported_where_they_should_be() {
    assert_eq!(
        lines(parse("[model]\ninit = \"random\"\n[[data.train]]\nformat = \"text\"", &[])),
        [
            "r:1:1: `model.path` is missing: a local Hugging Face folder or the id of a Hub repository",
            "r:3:1: `data.train[0].path` is missing: a file, a folder, a glob, or a data set of the Hub",
        ]
    );
    let text = "[model]\npath = \"m\"\n[data]\ntrain = []";
    assert_eq!(
        lines(parse(text, &[])),
        ["r:3:2: there is no training data\n  hint: add [[data.train]] with the `path` of a file"]
    );
    assert!(Recipe::parse(Path::new("r.toml"), text, &[], Purpose::Benchmark).is_ok(), "a benchmark needs no rows");
}
