use super::*;

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
            "not a TOML value: text needs quotes: \"q_proj\"\n  hint: text that begins with `[` needs quotes of its own: \
             '...'",
        ),
        ("lora.rank=4", "unknown key `rank`; this trainer calls it `r`"),
        ("loar.r=4", "unknown section [loar]\n  hint: did you mean [lora]?"),
    ];
    for (assignment, expected) in cases {
        assert_eq!(lines(set(&[assignment])), [format!("--set {assignment}: {expected}")]);
    }
    let deep = format!("lora{}=1", ".a".repeat(60_000));
    assert!(lines(set(&[&deep]))[0].ends_with("the name of a key has more than 32 parts"));
}

#[test]
fn the_device_argument_is_a_change_like_any_other() {
    let change = Override::argument("--device", "device.name", "tpu");
    let text = least("");
    let problems = Recipe::parse(Path::new("r.toml"), &text, &[change], Purpose::Training).unwrap_err();
    assert!(problems.to_string().starts_with("--device tpu: `device.name` = \"tpu\", expected \"auto\""), "{problems}");
}
