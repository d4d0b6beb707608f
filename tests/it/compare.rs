//! `compare` on real runs: its text and its exit codes.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Bench, json, run, stderr, steps, train};
use serde_json::Value;

/// A run's folder with this step time, scattered by this fraction.
fn made(folder: &Path, name: &str, step_seconds: f64, scatter: f64, memory: u64) -> PathBuf {
    let path = folder.join(name);
    fs::create_dir(&path).unwrap();
    let mut text = String::new();
    for step in 1..=120_u32 {
        let seconds = step_seconds * (1.0 + scatter * f64::from((step * 7919) % 101) / 101.0);
        let rate = 1000.0 / seconds;
        writeln!(
            text,
            "{{\"step\":{step},\"loss\":2.5,\"learning_rate\":1e-3,\"tokens\":1000,\"step_seconds\":{seconds},\
             \"tokens_per_second\":{rate},\"host_memory_bytes\":{memory}}}"
        )
        .unwrap();
    }
    writeln!(text, "{{\"step\":120,\"eval_loss\":2.0}}").unwrap();
    fs::write(path.join("metrics.jsonl"), text).unwrap();
    path
}

fn compare(runs: &[&Path], options: &[&str]) -> (Option<i32>, String, String) {
    let mut args = vec!["compare"];
    args.extend(runs.iter().map(|path| path.to_str().unwrap()));
    args.extend(options);
    let output = run(&args);
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), stderr(&output))
}

fn figure<'a>(comparison: &'a Value, run: usize, name: &str) -> &'a Value {
    let figures = comparison["runs"][run]["figures"].as_array().unwrap();
    figures.iter().find(|figure| figure["name"] == name).unwrap()
}

#[test]
fn two_trainings_are_compared_by_their_own_figures() {
    let bench = Bench::new();
    for (name, rank) in [("small", 2), ("large", 16)] {
        let recipe = bench.recipe(name, "");
        train(&recipe, &["--set", "train.max_steps=20", "--set", &format!("lora.r={rank}")]);
    }
    let (small, large) = (bench.path("small"), bench.path("large"));
    let (code, stdout, said) = compare(&[&small, &large], &["--json"]);
    assert_eq!(code, Some(0), "{said}");
    let comparison: Value = serde_json::from_str(&stdout).unwrap();
    let differences = comparison["recipe_differences"].as_array().unwrap();
    let keys: Vec<&str> = differences.iter().map(|difference| difference["key"].as_str().unwrap()).collect();
    assert!(keys.contains(&"lora.r") && !keys.contains(&"output_dir"), "{keys:?}");
    let rank = differences.iter().find(|difference| difference["key"] == "lora.r").unwrap();
    assert_eq!(rank["values"], serde_json::json!(["2", "16"]));
    for (index, dir) in [&small, &large].into_iter().enumerate() {
        let mut rates: Vec<f64> =
            steps(dir)[2..].iter().map(|step| step["tokens_per_second"].as_f64().unwrap()).collect();
        rates.sort_unstable_by(f64::total_cmp);
        let median = f64::midpoint(rates[8], rates[9]);
        let told = figure(&comparison, index, "tokens_per_second")["value"].as_f64().unwrap();
        assert!((told - median).abs() < 1e-6 * median, "{told} for {median}, after 2 of 20 steps of warm-up");
        let summary = json(&dir.join("summary.json"));
        for name in ["final_eval_loss", "peak_host_memory_bytes", "wall_seconds"] {
            assert_eq!(figure(&comparison, index, name)["value"].as_f64(), summary[name].as_f64(), "{name}");
        }
    }
    let (code, table, _) = compare(&[&small, &large], &[]);
    assert_eq!(code, Some(0));
    assert!(table.contains("tokens/s, median") && table.contains("large against small\n"), "{table}");
    // The folder that holds them names both; other files there are none.
    let (code, ranked, _) = compare(&[bench.folder.path()], &[]);
    assert!(code == Some(0) && ranked.starts_with("rank  ") && ranked.contains("small against large\n"), "{ranked}");
}

#[test]
fn a_slower_run_fails_the_check_by_name_and_runs_whose_ranges_overlap_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let base = made(folder.path(), "base", 1.0, 0.02, 1 << 30);
    let slow = made(folder.path(), "slow", 1.2, 0.02, 1 << 30);
    let large = made(folder.path(), "large", 1.0, 0.02, 2 << 30);

    let (code, stdout, said) = compare(&[&base, &slow], &["--max-regression", "5"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("slow: tokens_per_second is 16.7 % worse than in base"), "{said}");
    assert!(stdout.contains("(-16.7 %)") && !stdout.contains("slower"), "{stdout}");
    assert_eq!(compare(&[&base, &slow], &["--max-regression", "20"]).0, Some(0));
    assert_eq!(compare(&[&base, &slow], &["--max-regression", "peak_memory=0"]).0, Some(0));

    let (code, _, said) = compare(&[&base, &large], &["--max-regression", "5"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("large: peak_memory is 100.0 % worse") && !said.contains("tokens_per_second"), "{said}");

    let side = |one: &Path, other: &Path| PathBuf::from(format!("{},{}", one.display(), other.display()));
    let slower = made(folder.path(), "slower", 1.3, 0.02, 1 << 30);
    let (code, stdout, said) = compare(&[&side(&base, &large), &side(&slow, &slower)], &["--max-regression", "5"]);
    assert!(code == Some(1) && stdout.contains("19.9 % slower"), "{stdout}{said}");
    let (code, stdout, said) = compare(&[&side(&base, &slow), &side(&large, &slower)], &["--max-regression", "1"]);
    assert!(code == Some(0) && !said.contains("tokens_per_second"), "{said}");
    assert!(stdout.contains("%; the ranges of the runs overlap)"), "{stdout}");
}

#[test]
fn what_cannot_be_compared_is_refused_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let base = made(folder.path(), "base", 1.0, 0.01, 1);
    let nowhere = folder.path().join("nowhere");
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let no_step = folder.path().join("no-step");
    fs::create_dir(&no_step).unwrap();
    fs::write(no_step.join("metrics.jsonl"), "{\"step\":0,\"eval_loss\":2.0}\n").unwrap();
    // The others are compared.
    let (code, stdout, said) = compare(&[&base, &nowhere, &base, &empty], &[]);
    assert!(code == Some(2) && said.contains("nowhere: there is") && said.contains("empty: not a run"), "{said}");
    assert!(stdout.contains("base against"), "{stdout}");
    let cases: [(&[&Path], &[&str], &str); 7] = [
        (&[&nowhere], &[], "nowhere: there is no such folder"),
        (&[&base, &nowhere], &[], "nowhere: there is no such folder"),
        (&[&base, &empty], &[], "empty: not a run"),
        (&[&base, &no_step], &[], "no-step: metrics.jsonl holds no step"),
        (&[&base], &[], "base: one run, expected two or more"),
        (&[&base, &base], &["--max-regression", "speed=1"], "`speed`: expected one of tokens_per_second"),
        (&[&base, &base], &["--max-regression", "-5"], "expected a percentage"),
    ];
    for (runs, options, expected) in cases {
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        // A number that begins with a dash needs an equals sign.
        let joined = if options.is_empty() { Vec::new() } else { vec![options.join("=")] };
        let joined: Vec<&str> = joined.iter().map(String::as_str).collect();
        let (code, _, said) = compare(runs, &joined);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(expected), "`{expected}` is not in: {said}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_changes_no_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let base = made(folder.path(), "base", 1.0, 0.02, 1 << 30);
    let slow = made(folder.path(), "slow", 1.2, 0.02, 1 << 30);
    let code = |args: &[&std::ffi::OsStr]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lora-train"));
        let output = command.args(args).stdout(writer).output().unwrap();
        (output.status.code(), stderr(&output))
    };
    let compare = ["compare".as_ref(), base.as_os_str(), slow.as_os_str()];
    assert_eq!(code(&compare), (Some(0), String::new()));
    let (regressed, said) = code(&[&compare[..], &["--max-regression=5".as_ref()]].concat());
    assert!(regressed == Some(1) && said.contains("regression"), "{said}");
    assert_eq!(code(&["report".as_ref(), base.as_os_str()]), (Some(0), String::new()));
}
