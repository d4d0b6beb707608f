use super::*;

#[test]
fn what_is_not_toml_is_said_in_words() {
    let cases = [
        ("a = ", "r:1:5: not valid TOML: a value is missing after `=`"),
        ("a = \"x\nb = 1", "r:1:7: not valid TOML: the quote `\"` is not closed"),
        ("a = 'x\nb = 1", "r:1:7: not valid TOML: the quote `'` is not closed"),
        ("a = \"\"\"x\nb = 1", "r:2:6: not valid TOML: the three quotes are not closed"),
        ("[lora\nr = 8", "r:1:6: not valid TOML: the bracket `[` is not closed"),
        ("[[data.train]\npath = \"a\"", "r:1:14: not valid TOML: the brackets `[[` are not closed"),
        ("b = 1\na = [1, 2\n[lora]\nr = 8", "r:2:5: not valid TOML: the bracket `[` is not closed"),
        ("a = [[1, 2], [3, 4]\nb = 3", "r:1:5: not valid TOML: the bracket `[` is not closed"),
        ("a = { x = 1, y = [2] \n[lora]", "r:1:5: not valid TOML: the bracket `{` is not closed"),
        ("a = x.jsonl", "r:1:5: not valid TOML: text needs quotes: \"x.jsonl\""),
        ("a = “quickstart/model”", "r:1:5: not valid TOML: curly quotes: text needs plain ones: \"quickstart/model\""),
        ("a = True", "r:1:5: not valid TOML: `True` is not a TOML value: write true"),
        ("a = no", "r:1:5: not valid TOML: `no` is not a TOML value: write false"),
        ("a = None", "r:1:5: not valid TOML: there is no `None` in TOML: leave the key out"),
        ("a = 1\nb", "r:2:2: not valid TOML: `=` is missing after the key"),
        ("a = 1\nb: 2", "r:2:4: not valid TOML: TOML has `key = value`, not `key: value`"),
        ("a = 1, b = 2", "r:1:6: not valid TOML: something follows the value: a line holds one key"),
        ("a == 1", "r:1:4: not valid TOML: extra `=`"),
        ("a = [1,, 2]", "r:1:8: not valid TOML: extra comma in array, expected value"),
        ("a = \"C:\\data\"", "r:1:9: not valid TOML: `\\` begins an escape between \"...\": write '...' or `\\\\`"),
    ];
    for (text, expected) in cases {
        assert_eq!(lines(parse(text, &[])), [expected], "{text}");
    }
    assert_eq!(lines(parse("a = \nb = \"x\n[lora\nr = 8\n", &[])).len(), 3, "one for each line");
}

#[test]
fn a_file_of_another_language_is_named_once() {
    let cases = [
        ("# axolotl\nbase_model: m\nlora_r: 8\n", "r:2:1: not valid TOML: this looks like YAML"),
        ("model:\n  path: m\n", "r:1:1: not valid TOML: this looks like YAML"),
        ("---\na: 1\n", "r:1:1: not valid TOML: this looks like YAML"),
        ("\n{\n  \"lora_r\": 8\n}\n", "r:2:1: not valid TOML: this looks like JSON"),
        ("[\n  {\"lora_r\": 8}\n]\n", "r:1:1: not valid TOML: this looks like JSON"),
        ("[{\"lora_r\": 8}]\n", "r:1:1: not valid TOML: this looks like JSON"),
    ];
    for (text, start) in cases {
        let problems = lines(parse(text, &[]));
        assert!(problems.len() == 1 && problems[0].starts_with(start), "{problems:?}");
    }
}

#[test]
fn what_is_given_twice_names_the_first() {
    let text = "[lora]\nr = 8\nr = 9\n[lora]\nalpha = 1\n[model]\npath = \"m\"\n[[data.train]]\npath = \"a\"\n\
                [[data.train]]\npath = \"b\"\npath = \"c\"\n[model]\npath = \"n\"";
    assert_eq!(
        lines(parse(text, &[])),
        [
            "r:3:1: `r` is given twice; the first time in line 2",
            "r:4:2: `lora` is given twice; the first time in line 1",
            "r:5:1: unknown key `alpha`; this trainer calls it `lora_alpha`",
            "r:12:1: `path` is given twice; the first time in line 11",
            "r:13:2: `model` is given twice; the first time in line 6",
            "r:14:1: `path` is given twice; the first time in line 7",
        ]
    );
}
