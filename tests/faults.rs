//! tests/README.md says which test shows what; this holds that there are such tests, and that `scripts/soak.sh` runs them.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files of Rust below a folder.
fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// A file with tests.
struct Tests {
    /// Its modules, from the outermost: `checkpoint`, `tests`.
    modules: Vec<String>,
    /// Its test binary; absent for a unit test.
    binary: Option<String>,
    names: Vec<String>,
}

impl Tests {
    fn read(path: &Path) -> Self {
        let relative = path.strip_prefix(root()).unwrap().with_extension("");
        let mut modules: Vec<String> = relative.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        let is_binary = modules.remove(0) == "tests";
        modules.retain(|module| !["main", "mod"].contains(&module.as_str()));
        let text = fs::read_to_string(path).unwrap();
        let functions = text.split("#[test]").skip(1).filter_map(|rest| rest.split("fn ").nth(1));
        let names = functions.map(|rest| rest.split('(').next().unwrap().to_owned()).collect();
        Self { binary: is_binary.then(|| modules[0].clone()), modules, names }
    }

    /// Whether `words` name these tests, or one of them: `checkpoint::a_failed_save_...`, `train::watchdog`.
    fn are_meant(&self, words: &[&str]) -> bool {
        let Some((last, modules)) = words.split_last() else { return false };
        let are_inside = |modules: &[&str]| {
            let mut own = self.modules.iter();
            modules.iter().all(|module| own.any(|name| name == module))
        };
        match last.strip_suffix("...") {
            Some(start) => are_inside(modules) && self.names.iter().any(|name| name.starts_with(start)),
            None => !self.names.is_empty() && are_inside(words),
        }
    }
}

/// What the last columns of the tables of tests/README.md name, where they are headed `test`.
fn named(text: &str) -> Vec<String> {
    let mut named = Vec::new();
    let mut is_table_of_tests = false;
    for line in text.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let last = *cells.last().unwrap();
        match line.starts_with('|') {
            true if is_table_of_tests => named.extend(last.split('`').skip(1).step_by(2).map(str::to_owned)),
            true => is_table_of_tests = last == "test",
            false => is_table_of_tests = false,
        }
    }
    named
}

#[test]
fn every_test_that_the_readme_names_is_there_and_is_run_by_the_soak() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    sources(&root().join("tests"), &mut files);
    let tests: Vec<Tests> = files.iter().map(|path| Tests::read(path)).collect();
    let soak = fs::read_to_string(root().join("scripts/soak.sh")).unwrap();
    let named = named(&fs::read_to_string(root().join("tests/README.md")).unwrap());
    assert!(named.len() > 80, "{} names", named.len());
    let mut wrong = Vec::new();
    for name in &named {
        if name.contains('/') {
            if !root().join(name).is_file() {
                wrong.push(format!("there is no file {name}"));
            }
            continue;
        }
        let words: Vec<&str> = name.split("::").collect();
        let meant: Vec<&Tests> = tests.iter().filter(|tests| tests.are_meant(&words)).collect();
        if meant.is_empty() {
            wrong.push(format!("there is no test {name}"));
        }
        let is_run =
            |tests: &&&Tests| tests.binary.as_ref().is_none_or(|binary| soak.contains(&format!("--test {binary} ")));
        if meant.iter().any(|tests| !is_run(&tests)) {
            wrong.push(format!("scripts/soak.sh does not run {name}"));
        }
    }
    assert!(soak.contains("--lib "), "scripts/soak.sh does not run the unit tests");
    for script in ["scripts/fuzz.sh", "scripts/memcheck.sh", "cargo deny"] {
        assert!(soak.contains(script), "scripts/soak.sh does not run {script}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_test_that_is_not_there_is_noticed() {
    let tests = Tests {
        modules: vec!["metrics".into(), "jsonl".into()],
        binary: None,
        names: vec!["every_truncation_is_seen".into()],
    };
    let are_meant = |name: &str| tests.are_meant(&name.split("::").collect::<Vec<_>>());
    for name in ["metrics::jsonl::every_truncation_...", "jsonl::every_...", "metrics", "metrics::jsonl"] {
        assert!(are_meant(name), "{name}");
    }
    for name in ["jsonl::no_truncation_...", "metrics::tags", "jsonl::metrics", "disks::every_truncation_..."] {
        assert!(!are_meant(name), "{name}");
    }
    let table = "| fault | test |\n|---|---|\n| a | `b::c_...`, `d` |\n\n| inputs |\n|---|\n| `e` |\n";
    assert_eq!(named(table), ["b::c_...", "d"]);
}
