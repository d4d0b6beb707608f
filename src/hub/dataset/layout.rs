//! Which files of a data set belong to which configuration and split, as the Hub and `datasets` see it.

use std::collections::{BTreeMap, BTreeSet};

use glob::{MatchOptions, Pattern};
use serde_json::Value;

use crate::schema::Problem;

/// The configuration of files outside of any configuration's folder.
const DEFAULT: &str = "default";
const TRAIN: &str = "train";
/// Words in the names of files and folders, and the split that they stand for.
const SPLIT_WORDS: [(&str, &str); 10] = [
    ("train", TRAIN),
    ("training", TRAIN),
    ("validation", "validation"),
    ("valid", "validation"),
    ("val", "validation"),
    ("dev", "validation"),
    ("test", "test"),
    ("testing", "test"),
    ("eval", "test"),
    ("evaluation", "test"),
];
/// Files that describe a data set, and hold none of its rows.
const DESCRIPTIONS: [&str; 4] = ["dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"];

/// The configurations of a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatasetLayout {
    configurations: BTreeMap<String, Splits>,
    default: Option<String>,
}

/// The files of each split.
type Splits = BTreeMap<String, Vec<String>>;

impl DatasetLayout {
    /// The layout that the `configs` of a data set's card describe; `None` where it has none.
    pub(super) fn of_card(card: &Value, files: &[String]) -> Option<Self> {
        let mut layout = Self::default();
        for config in card["configs"].as_array()? {
            let name = config["config_name"].as_str().unwrap_or(DEFAULT);
            let folder = config["data_dir"].as_str().map(|folder| format!("{}/", folder.trim_matches('/')));
            let inside = |file: &&String| folder.as_ref().is_none_or(|folder| file.starts_with(folder.as_str()));
            let inside: Vec<&String> = files.iter().filter(inside).collect();
            let mut splits = Splits::new();
            if config["data_files"].is_null() {
                inside.iter().for_each(|file| add(&mut splits, split_of(file), file));
            }
            for (split, pattern) in patterns(&config["data_files"]) {
                let pattern = format!("{}{pattern}", folder.as_deref().unwrap_or_default());
                inside
                    .iter()
                    .filter(|file| is_match(&pattern, file))
                    .for_each(|file| add(&mut splits, split.clone(), file));
            }
            if config["default"] == true {
                layout.default = Some(name.to_owned());
            }
            layout.configurations.insert(name.to_owned(), splits);
        }
        (!layout.configurations.is_empty()).then_some(layout)
    }

    /// The layout that the names of files follow: `train-00000-of-00002.parquet`, `data/test.jsonl`,
    /// `configuration/train.csv`.
    #[must_use]
    pub fn of_names(files: &[String]) -> Self {
        let mut layout = Self::default();
        let is_description = |file: &&String| DESCRIPTIONS.contains(&file.rsplit('/').next().unwrap_or(file));
        for file in files.iter().filter(|file| !is_description(file)) {
            let inner = file.strip_prefix("data/").unwrap_or(file);
            let folder = inner.split_once('/').map(|(folder, _)| folder).filter(|folder| split_word(folder).is_none());
            let splits = layout.configurations.entry(folder.unwrap_or(DEFAULT).to_owned()).or_default();
            add(splits, split_of(inner), file);
        }
        layout
    }

    /// The layout of the Hub's conversion: `configuration/split/0000.parquet`.
    pub(super) fn of_conversion(files: &[String]) -> Self {
        let mut layout = Self::default();
        for file in files {
            if let [name, split, _] = file.split('/').collect::<Vec<_>>()[..] {
                add(layout.configurations.entry(name.to_owned()).or_default(), split.to_owned(), file);
            }
        }
        layout
    }

    /// The splits that the names tell apart, of all configurations.
    #[must_use]
    pub fn splits(&self) -> BTreeSet<&str> {
        self.configurations.values().flat_map(BTreeMap::keys).map(String::as_str).collect()
    }

    /// The files of a configuration and a split of the data set `id`. A configuration that is the only one, or the
    /// default, need not be named.
    ///
    /// # Errors
    /// A configuration or a split that is not there, or has to be named; files of several kinds.
    pub fn files(&self, id: &str, name: Option<&str>, split: &str) -> Result<Vec<String>, Problem> {
        let only = (self.configurations.len() == 1).then(|| self.configurations.keys().next().cloned()).flatten();
        let default = only.or_else(|| self.default.clone()).unwrap_or_else(|| DEFAULT.to_owned());
        let listed = || list(self.configurations.keys());
        let Some(splits) = self.configurations.get(name.unwrap_or(&default)) else {
            let message = match name {
                Some(name) => format!("{id} has no configuration `{name}`; it has {}", listed()),
                None => format!("{id} has several configurations: {}", listed()),
            };
            let first = self.configurations.keys().next().map_or("...", String::as_str);
            return Err(Problem::new(message).hint(format!("beside the path, `name = {first:?}` takes one")));
        };
        let Some(files) = splits.get(split).filter(|files| !files.is_empty()) else {
            let partial = splits.contains_key(&format!("partial-{split}"));
            let message = format!("{id} has no split `{split}`; it has {}", list(splits.keys()));
            let hint = if partial {
                format!("the Hub has converted only its beginning: `split = \"partial-{split}\"` takes that")
            } else {
                "beside the path, `split = \"...\"` takes one".to_owned()
            };
            return Err(Problem::new(message).hint(hint));
        };
        let endings: BTreeMap<&str, &String> = files.iter().map(|file| (ending(file), file)).collect();
        if endings.len() > 1 {
            let message =
                format!("split `{split}` of {id} is there in several kinds: {}", list(endings.values().copied()));
            let hint = format!("name the files: `path = \"hf://datasets/{id}/{}\"`", files[0]);
            return Err(Problem::new(message).hint(hint));
        }
        Ok(files.clone())
    }
}

/// The files that a name or a glob stands for.
pub(super) fn matching(id: &str, pattern: &str, files: &[String]) -> Result<Vec<String>, Problem> {
    let found: Vec<String> = files.iter().filter(|file| is_match(pattern, file)).cloned().collect();
    if found.is_empty() {
        return Err(Problem::new(format!("{id} has no data file `{pattern}`; it has {}", list(files.iter()))));
    }
    Ok(found)
}

fn add(splits: &mut Splits, split: String, file: &str) {
    let files = splits.entry(split).or_default();
    if !files.iter().any(|known| known == file) {
        files.push(file.to_owned());
    }
}

/// Splits and patterns of a card's `data_files`: a pattern, a list of them, or a list of `{split, path}`.
fn patterns(data_files: &Value) -> Vec<(String, String)> {
    let one_or_many = |value: &Value| match value {
        Value::Array(items) => items.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        value => value.as_str().map(str::to_owned).into_iter().collect::<Vec<String>>(),
    };
    let with_splits = data_files.as_array().into_iter().flatten().filter(|entry| entry.is_object());
    let named = with_splits.flat_map(|entry| {
        let split = entry["split"].as_str().unwrap_or(TRAIN);
        one_or_many(&entry["path"]).into_iter().map(move |path| (split.to_owned(), path))
    });
    one_or_many(data_files).into_iter().map(|path| (TRAIN.to_owned(), path)).chain(named).collect()
}

/// Whether a file is the one that a pattern names, matches it, or is in the folder that it names.
fn is_match(pattern: &str, file: &str) -> bool {
    let pattern = pattern.trim_start_matches("./").trim_end_matches('/');
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::default() };
    file == pattern
        || file.strip_prefix(pattern).is_some_and(|rest| rest.starts_with('/'))
        || Pattern::new(pattern).is_ok_and(|pattern| pattern.matches_with(file, options))
}

/// The split of a file: the word before its shard's number, else one in its name or in those of its folders.
fn split_of(file: &str) -> String {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let sharded = file.rsplit_once("-of-").and_then(|(before, _)| before.rsplit_once('-'));
    let sharded = sharded.filter(|(_, number)| is_number(number)).and_then(|(name, _)| name.rsplit(['/', '-']).next());
    sharded.or_else(|| file.rsplit('/').find_map(split_word)).unwrap_or(TRAIN).to_owned()
}

/// The split that a word in the name of a file or a folder stands for.
fn split_word(name: &str) -> Option<&'static str> {
    let mut words = name.split(|c: char| !c.is_ascii_alphabetic());
    words.find_map(|word| {
        SPLIT_WORDS.iter().find(|(known, _)| word.eq_ignore_ascii_case(known)).map(|(_, split)| *split)
    })
}

/// The ending of a file, with that of a compression.
fn ending(file: &str) -> &str {
    let plain = [".gz", ".zst"].iter().find_map(|packed| file.strip_suffix(packed)).unwrap_or(file);
    &file[plain.rfind('.').unwrap_or(0)..]
}

/// Names for a message, the first of many.
fn list<'a>(names: impl Iterator<Item = &'a String>) -> String {
    const MAX_LISTED: usize = 20;
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    match names.len() {
        0 => "none".to_owned(),
        count if count > MAX_LISTED => format!("{} and {} more", names[..MAX_LISTED].join(", "), count - MAX_LISTED),
        _ => names.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn names(files: &[&str]) -> Vec<String> {
        files.iter().map(|file| (*file).to_owned()).collect()
    }

    fn of_names(files: &[&str], name: Option<&str>, split: &str) -> Result<Vec<String>, String> {
        DatasetLayout::of_names(&names(files)).files("a/b", name, split).map_err(|problem| problem.to_string())
    }

    #[test]
    fn names_say_the_split_and_folders_the_configuration() {
        type Case<'a> = (&'a [&'a str], Option<&'a str>, &'a str, &'a [&'a str]);
        let cases: [Case; 9] = [
            (
                &[
                    "data/train-00000-of-00002.parquet",
                    "data/train-00001-of-00002.parquet",
                    "data/test-00000-of-00001.parquet",
                ],
                None,
                "train",
                &["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            ),
            (
                &[
                    "main/train-00000-of-00001.parquet",
                    "main/test-00000-of-00001.parquet",
                    "socratic/train-00000-of-00001.parquet",
                ],
                Some("main"),
                "test",
                &["main/test-00000-of-00001.parquet"],
            ),
            (
                &["train_sft-00000-of-00001.parquet", "train_gen-00000-of-00001.parquet"],
                None,
                "train_sft",
                &["train_sft-00000-of-00001.parquet"],
            ),
            (&["c4-train-00000-of-00001.parquet"], None, "train", &["c4-train-00000-of-00001.parquet"]),
            (&["my-Dev.csv", "my-train.csv"], None, "validation", &["my-Dev.csv"]),
            (&["eval/x.jsonl", "training/x.jsonl"], None, "test", &["eval/x.jsonl"]),
            (&["a.jsonl", "b.jsonl", "dataset_infos.json"], None, "train", &["a.jsonl", "b.jsonl"]),
            (&["only/x.jsonl"], None, "train", &["only/x.jsonl"]),
            (&["x.jsonl", "other/y.jsonl"], None, "train", &["x.jsonl"]),
        ];
        for (files, name, split, expected) in cases {
            assert_eq!(of_names(files, name, split).unwrap(), expected, "{files:?}");
        }
    }

    #[test]
    fn what_is_not_there_or_ambiguous_lists_what_there_is() {
        let files = ["main/train.parquet", "socratic/train.parquet"];
        let error = |name: Option<&str>, split: &str| of_names(&files, name, split).unwrap_err();
        assert_eq!(
            error(None, "train"),
            "a/b has several configurations: `main`, `socratic`\n  hint: beside the path, `name = \"main\"` takes one"
        );
        assert!(error(Some("x"), "train").starts_with("a/b has no configuration `x`; it has `main`, `socratic`"));
        assert!(error(Some("main"), "test").starts_with("a/b has no split `test`; it has `train`"));
        let kinds = of_names(&["train.jsonl", "train.jsonl.gz", "train.csv"], None, "train").unwrap_err();
        assert!(kinds.contains("several kinds: `train.csv`, `train.jsonl`, `train.jsonl.gz`"), "{kinds}");
        assert!(kinds.contains("`path = \"hf://datasets/a/b/train.jsonl\"`"), "{kinds}");
    }

    #[test]
    fn a_card_says_which_files_a_split_has() {
        let files = names(&["en/one.csv", "en/two.csv", "en/held.csv", "de/x.csv", "all.jsonl"]);
        let card = json!({"configs": [
            {"config_name": "en", "data_files": [
                {"split": "train", "path": ["en/one.csv", "en/t*.csv"]}, {"split": "test", "path": "en/held.csv"}]},
            {"config_name": "de", "data_dir": "de"},
            {"config_name": "all", "default": true, "data_files": "all.jsonl"},
            {"config_name": "deep", "data_files": ["**/*.csv"]},
        ]});
        let layout = DatasetLayout::of_card(&card, &files).unwrap();
        let read = |name: Option<&str>, split: &str| layout.files("a/b", name, split).unwrap();
        assert_eq!(read(None, "train"), ["all.jsonl"]);
        assert_eq!(read(Some("en"), "train"), ["en/one.csv", "en/two.csv"]);
        assert_eq!(read(Some("en"), "test"), ["en/held.csv"]);
        assert_eq!(read(Some("de"), "train"), ["de/x.csv"]);
        assert_eq!(read(Some("deep"), "train").len(), 4);
        assert_eq!(DatasetLayout::of_card(&json!({"license": "mit"}), &files), None);
    }

    #[test]
    fn a_conversion_has_a_folder_for_each_split_and_says_where_it_is_partial() {
        let files = names(&["default/test/0000.parquet", "default/partial-train/0000.parquet"]);
        let layout = DatasetLayout::of_conversion(&files);
        assert_eq!(layout.files("a/b", None, "test").unwrap(), ["default/test/0000.parquet"]);
        let error = layout.files("a/b", None, "train").unwrap_err().to_string();
        assert!(error.contains("`split = \"partial-train\"` takes that"), "{error}");
    }
}
