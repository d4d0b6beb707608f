//! Runs that end early: each gives its reason, and leaves a page that says how it ended.

#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::common::{Bench, json, lora_train, run, signal, stderr, steps, train, wait, wait_measured, wait_until};
use serde_json::Value;

/// Starts a run of 5000 steps whose stderr goes to `log`, and waits for three of them.
fn start(bench: &Bench, recipe: &Path, args: &[&str]) -> Child {
    let log = fs::File::create(bench.path("log")).unwrap();
    let mut all = vec![recipe.to_str().unwrap(), "--set", "train.max_steps=5000"];
    all.extend(args);
    let child = lora_train(&all).stdout(Stdio::null()).stderr(log).spawn().unwrap();
    wait_until("three steps", || steps_so_far(&bench.path("run")) > 3);
    child
}

/// Number of lines so far; the last one may be torn.
fn steps_so_far(run_dir: &Path) -> usize {
    fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default().lines().count()
}

fn log(bench: &Bench) -> String {
    fs::read_to_string(bench.path("log")).unwrap()
}

/// The page, with HTML escapes undone.
fn page(run_dir: &Path) -> String {
    let page = fs::read_to_string(run_dir.join("report.html")).unwrap();
    let plain = [("&lt;", "<"), ("&gt;", ">"), ("&#x27;", "'"), ("&#x2f;", "/"), ("&quot;", "\""), ("&amp;", "&")];
    plain.iter().fold(page, |page, (written, meant)| page.replace(written, meant))
}

/// Asserts that the console, unfinished.json and the page agree about a run that ended early; returns unfinished.json.
fn told(run_dir: &Path, said: &str, outcome: &str, words: &str) -> Value {
    let ended = json(&run_dir.join("unfinished.json"));
    let last = steps(run_dir).last().unwrap()["step"].as_u64().unwrap();
    assert_eq!((&ended["outcome"], ended["steps"].as_u64()), (&outcome.into(), Some(last)), "{ended:#}");
    let page = page(run_dir);
    let total = ended["total_steps"].as_u64().unwrap();
    let thousands = if total == 5000 { "5,000".to_owned() } else { total.to_string() };
    assert!(said.contains(&format!("{words} at step {last} of {total}, after ")), "{said}");
    assert!(page.contains(&format!("<p><span>{words} at step {last} of {thousands}")), "{page}");
    // The reason, and every finding with its changes.
    for line in ended["reason"].as_str().unwrap().lines() {
        assert!(page.contains(line.trim()) && said.contains(line.trim()), "`{line}` in\n{said}");
    }
    // A run that failed is not called healthy.
    let findings = ended["diagnosis"].as_array().cloned().unwrap_or_default();
    assert!(outcome == "interrupted" || findings.iter().all(|finding| finding["severity"] != "healthy"), "{ended:#}");
    assert!(outcome != "interrupted" || !findings.is_empty(), "{ended:#}");
    for finding in &findings {
        let verdict = finding["verdict"].as_str().unwrap();
        assert!(page.contains(verdict), "`{verdict}` is not in the page");
    }
    let first = findings.first().map(|finding| format!("\n  {}\n", finding["verdict"].as_str().unwrap()));
    assert!(first.is_none_or(|first| said.contains(&first)), "{said}");
    assert!(said.contains(&format!("report: {}", run_dir.join("report.html").display())), "{said}");
    assert!(!run_dir.join("summary.json").exists(), "summary.json means finished");
    ended
}

#[test]
fn an_interrupted_run_says_what_held_it_back_and_the_page_of_the_resumed_one_takes_its_place() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "[cost]\nprice_per_hour = 3.6\n");
    let dir = bench.path("run");
    for which in [libc::SIGTERM, libc::SIGINT] {
        // The second start replaces the page of the first.
        let mut child = start(&bench, &recipe, &["--resume"]);
        let before = steps_so_far(&dir);
        wait_until("a step of this start", || steps_so_far(&dir) > before + 1);
        signal(&child, which);
        let (status, seconds) = wait_measured(&mut child);
        assert_eq!(status.code(), Some(130), "{}", log(&bench));
        // Processor time of two threads in five seconds.
        assert!(seconds < 10.0, "{seconds} s");
        let ended = told(&dir, &log(&bench), "interrupted", "interrupted");
        assert!(ended["reason"].as_str().unwrap().contains(" --resume"), "{ended:#}");
        assert!(ended["cost"].as_f64().unwrap() > 0.0, "{ended:#}");
        // The command to resume comes last.
        assert!(log(&bench).trim_end().ends_with("--resume"), "{}", log(&bench));
        // The checkpoint was saved before anything else was written.
        let checkpoint = dir.join(format!("checkpoints/step-{:06}/SHA256SUMS", ended["steps"].as_u64().unwrap()));
        let at = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        assert!(at(&checkpoint) <= at(&dir.join("unfinished.json")));
    }
    let more = format!("train.max_steps={}", steps(&dir).len() + 2);
    train(&recipe, &["--set", &more, "--resume"]);
    assert!(!dir.join("unfinished.json").exists());
    let page = page(&dir);
    assert!(page.contains("<p><span>finished</span> ·") && !page.contains("interrupted at step"), "{page}");
}

#[test]
fn a_run_that_the_watchdog_stops_says_why_and_what_held_it_back() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let set = ["optimizer.learning_rate=1e-60", "train.max_steps=80", "watchdog.patience=30"];
    let mut args = vec![recipe.to_str().unwrap()];
    args.extend(set.iter().flat_map(|set| ["--set", set]));
    let output = run(&args);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let ended = told(&bench.path("run"), &stderr(&output), "stopped_by_watchdog", "stopped by the watchdog");
    assert!(ended["reason"].as_str().unwrap().contains("hint: raise `optimizer.learning_rate`"), "{ended:#}");

    // A new start in the same folder removes the old page and unfinished.json.
    fs::remove_dir_all(bench.path("run/checkpoints")).unwrap();
    fs::remove_file(bench.path("run/metrics.jsonl")).unwrap();
    let mut child = start(&bench, &recipe, &[]);
    assert!(!bench.path("run/report.html").exists() && !bench.path("run/unfinished.json").exists());
    signal(&child, libc::SIGKILL);
    wait(&mut child);
}

#[test]
fn a_run_whose_adapter_cannot_be_written_says_what_held_it_back() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    // A file in place of the adapter folder, at both possible paths.
    fs::create_dir(bench.path("run")).unwrap();
    fs::write(bench.path("run/adapter"), "").unwrap();
    let nowhere = bench.path("run/adapter");
    let args = [recipe.to_str().unwrap(), "--set", "train.max_steps=6"];
    let output = lora_train(&args).env("TMPDIR", nowhere).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let ended = told(&bench.path("run"), &stderr(&output), "failed", "failed");
    assert_eq!((ended["steps"].as_u64(), ended["total_steps"].as_u64()), (Some(6), Some(6)));
}

#[test]
fn a_page_that_cannot_be_written_changes_no_exit_code() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut child = start(&bench, &recipe, &[]);
    // A folder in place of a file.
    fs::create_dir(bench.path("run/report.html")).unwrap();
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130), "{}", log(&bench));
    let said = log(&bench);
    assert!(said.contains("warning: no report: ") && said.contains("interrupted at step "), "{said}");
    assert!(bench.path("run/unfinished.json").is_file());
    let left: Vec<_> = fs::read_dir(bench.path("run")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().ends_with(".partial")), "{left:?}");

    // A finished run cannot write its page either.
    let more = format!("train.max_steps={}", steps(&bench.path("run")).len() + 2);
    let output = train(&recipe, &["--set", &more, "--resume"]);
    assert!(stderr(&output).contains("warning: no report: "), "{}", stderr(&output));
}

#[test]
fn a_run_that_is_interrupted_before_its_first_step_says_so_and_has_no_page() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("eval.jsonl")).unwrap();
    fs::write(bench.path("eval.jsonl"), rows.repeat(3000)).unwrap();
    let recipe = bench.recipe("run", "");
    let log = fs::File::create(bench.path("log")).unwrap();
    let mut child = lora_train(&[recipe.to_str().unwrap()]).stderr(log).spawn().unwrap();
    wait_until("the evaluation", || bench.path("run/metrics.jsonl").exists());
    std::thread::sleep(Duration::from_millis(300));
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130));
    let ended = json(&bench.path("run/unfinished.json"));
    assert_eq!((&ended["outcome"], &ended["steps"]), (&"interrupted".into(), &0.into()), "{ended:#}");
    assert!(ended.get("diagnosis").is_none(), "nothing was done that could be healthy: {ended:#}");
    assert!(!bench.path("run/report.html").exists());
    assert!(!fs::read_to_string(bench.path("log")).unwrap().contains("no report"));
}

#[test]
fn how_a_run_ended_is_told_until_it_is_resumed_and_takes_a_step() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let dir = bench.path("run");
    let (end, report) = (dir.join("unfinished.json"), dir.join("report.html"));
    let mut child = start(&bench, &recipe, &[]);
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130), "{}", log(&bench));
    let first = told(&dir, &log(&bench), "interrupted", "interrupted");

    // A long evaluation precedes the first step of the second start.
    let rows = fs::read_to_string(bench.path("eval.jsonl")).unwrap();
    fs::write(bench.path("eval.jsonl"), rows.repeat(3000)).unwrap();
    let evaluating = ["--resume", "--set", "eval.eval_steps=1"];
    let mut child = start(&bench, &recipe, &evaluating);
    wait_until("the second start", || log(&bench).contains("resuming after step"));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(json(&end), first);
    assert!(page(&dir).contains("<p><span>interrupted at step "));
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130), "{}", log(&bench));
    let second = json(&end);
    assert_eq!((&second["outcome"], &second["steps"]), (&first["outcome"], &first["steps"]), "{}", log(&bench));
    assert!(second.get("diagnosis").is_none(), "no step was taken: {second:#}");
    assert!(page(&dir).contains("<p><span>interrupted at step "));

    // A third start makes steps and is killed: the old unfinished.json and page are removed.
    fs::write(bench.path("eval.jsonl"), rows).unwrap();
    let before = steps_so_far(&dir);
    let mut child = start(&bench, &recipe, &["--resume"]);
    wait_until("a step of this start", || steps_so_far(&dir) > before + 1);
    signal(&child, libc::SIGKILL);
    wait(&mut child);
    assert!(!end.exists() && !report.exists());
}

#[test]
fn a_run_whose_final_figures_cannot_be_written_has_its_page() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let dir = bench.path("run");
    let out = fs::File::create(bench.path("log")).unwrap();
    let args = [recipe.to_str().unwrap(), "--set", "train.max_steps=60"];
    let mut child = lora_train(&args).stderr(out).spawn().unwrap();
    wait_until("a step", || steps_so_far(&dir) > 1);
    // A folder at the path of the temporary file that becomes summary.json.
    fs::create_dir(dir.join(".summary.json.partial")).unwrap();
    assert_eq!(wait(&mut child).code(), Some(1), "{}", log(&bench));
    assert_eq!(steps(&dir).len(), 60, "it came to its end");
    assert!(!dir.join("summary.json").exists());
    assert!(log(&bench).contains("summary.json: cannot write"), "{}", log(&bench));
    assert!(dir.join("report.html").is_file(), "{}", log(&bench));
}
