use super::*;
use crate::util::failure::Failure;

/// The problems of a recipe as the user sees them.
fn shown(result: Result<Recipe, Problems>) -> String {
    let problems = result.unwrap_err().0;
    problems.iter().map(|problem| problem.shown(false).replace("dir/r.toml", "r")).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_problem_is_shown_with_its_line_and_a_caret() {
    assert_eq!(
        shown(parse(&least("[lora]\n\ttarget = \"ä\"\nr = 0 # rank\n"), &["seed=x"])),
        "r:6:2: unknown key `target`\n  |\n6 |     target = \"ä\"\n  |     ^^^^^^\n  hint: did you mean `target_modules`?\n\
         r:7:5: `lora.r` = 0, expected a whole number from 1 to 65536\n  |\n7 | r = 0 # rank\n  |     ^\n\
         --set seed=x: `seed` = \"x\", expected a whole number from 0 to 9223372036854775807"
    );
    assert_eq!(
        shown(parse("a = \r\nb = 1", &[])),
        "r:1:5: not valid TOML: a value is missing after `=`\n  |\n1 | a = \n  |     ^"
    );
    let long = least(&format!("[eval]\ngenerate = [{}]", "1, ".repeat(200)));
    assert_eq!(shown(parse(&long, &[])).lines().count(), 1, "a long line is not shown");
    let coloured = parse("a =", &[]).unwrap_err().0[0].shown(true);
    assert!(coloured.contains("\x1b["), "{coloured:?}");
}

#[test]
fn what_is_found_out_later_is_shown_where_it_was_written() {
    let recipe = parse(&least("[lora]\nr = 4\n"), &["data.train[1].path=x.jsonl"]).unwrap();
    let located = |message: &str| Failure::input(message).located(&recipe.places).shown(false).concat();
    assert_eq!(
        located("`data.train[0].path`: no such file\n  hint: look again"),
        "dir/r.toml:4:8: `data.train[0].path`: no such file\n  |\n4 | path = \"rows.jsonl\"\n  |        ^^^^^^^^^^^^\n  \
         hint: look again"
    );
    assert_eq!(
        located("`data.train[1].path`: no such file"),
        "--set data.train[1].path=x.jsonl: `data.train[1].path`: no such file"
    );
    for unplaced in ["`data.train[2].path`: a", "`seed` = 0", "`x", "m: no such folder", "`a b`"] {
        assert_eq!(located(unplaced), unplaced);
    }
}

#[test]
fn paths_are_expanded_wherever_they_are_written() {
    let home = std::env::home_dir().unwrap();
    let in_home = |name: &str| home.join(name).display().to_string();
    let text = "output_dir = \"~/out\"\n[model]\npath = \"${HOME}/m\"\n[data]\nchat_template = \"~/t\"\n\
                [[data.train]]\npath = \"~/rows/*.jsonl\"";
    let recipe = parse(text, &["data.eval[0].path=~/e.txt"]).unwrap();
    assert_eq!(recipe.output_dir, home.join("out"));
    assert_eq!((recipe.model.path, recipe.data.chat_template), (in_home("m"), in_home("t")));
    assert_eq!(recipe.data.train[0].path, in_home("rows/*.jsonl"));
    assert_eq!(recipe.data.eval[0].path, in_home("e.txt"));

    assert_eq!(
        lines(parse("output_dir = \"$RUNS/a\"\n[model]\npath = \"~you/m\"", &["data.train[0].path=${LORA_NO}/a"])),
        [
            "r:1:14: `output_dir` = \"$RUNS/a\": `$RUNS` is not replaced\n  hint: write ${RUNS}",
            "r:3:8: `model.path` = \"~you/m\": the home folder of `you` is not known here\n  hint: write the folder in \
             full; `~` alone is your own",
            "--set data.train[0].path=${LORA_NO}/a: `data.train[0].path` = \"${LORA_NO}/a\": the environment variable \
             `LORA_NO` is not set",
        ]
    );
}
