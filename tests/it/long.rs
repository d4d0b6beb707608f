//! Long runs and late resumes on a tiny, fast model: nothing grows, and nothing is read again.

#![cfg(target_os = "linux")]
#![allow(clippy::print_stderr, reason = "the figures of the test")]

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::{Bench, lora_train, processor_seconds, quickstart_model, signal, steps, train};

const STEPS: u64 = 20_000;

/// A model of one layer with the quickstart's tokenizer.
fn small_model(bench: &Bench) -> PathBuf {
    let folder = bench.path("model");
    fs::create_dir(&folder).unwrap();
    for entry in fs::read_dir(quickstart_model()).unwrap() {
        let file = entry.unwrap().path();
        fs::copy(&file, folder.join(file.file_name().unwrap())).unwrap();
    }
    let mut config = crate::common::json(&folder.join("config.json"));
    for (key, value) in [
        ("hidden_size", 16),
        ("intermediate_size", 32),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("head_dim", 8),
    ] {
        config[key] = value.into();
    }
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder
}

/// Resources that a process holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    step: u64,
    resident_mib: f64,
    threads: usize,
    files: usize,
}

/// Inspects a process; `None` once it has ended.
fn look(pid: u32, run: &Path) -> Option<Held> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let number = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    // The last complete line, of a step or an evaluation.
    let text = fs::read_to_string(run.join("metrics.jsonl")).ok()?;
    let line = text.lines().rev().find(|line| line.ends_with('}'))?;
    let step = serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64()?;
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?.count();
    Some(Held { step, resident_mib: number("VmRSS:")? / 1024.0, threads, files })
}

#[test]
fn twenty_thousand_steps_hold_no_more_memory_files_or_threads_than_the_first_thousands() {
    let bench = Bench::new();
    let recipe = bench.recipe(
        "run",
        "[eval]\neval_steps = 1000\nmax_batches = 1\ngenerate = [\"a\"]\n[checkpoint]\nsave_steps = 1000\n\
         save_total_limit = 2\n[logging]\nlogging_steps = 1000\n",
    );
    let model = small_model(&bench);
    let set = |key: &str| ["--set".to_owned(), key.to_owned()];
    let mut child = lora_train(&[recipe.to_str().unwrap()])
        .args(set(&format!("model.path={}", model.display())))
        .args(set("model.init=random"))
        .args(set("train.micro_batch_size=1"))
        .args(set("train.gradient_accumulation_steps=1"))
        .args(set(&format!("train.max_steps={STEPS}")))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (run, mut seen) = (bench.path("run"), Vec::new());
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        seen.extend(look(child.id(), &run));
        assert!(started.elapsed() < Duration::from_mins(10), "{:?}", seen.last());
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(child.wait().unwrap().success());

    let between = |from: u64, to: u64| seen.iter().filter(move |held| (from..to).contains(&held.step));
    let most = |from, to| {
        between(from, to).fold((0, 0, 0), |most: (usize, usize, u64), held| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few hundred MiB")]
            let kib = (held.resident_mib * 1024.0) as u64;
            (most.0.max(held.threads), most.1.max(held.files), most.2.max(kib))
        })
    };
    // The first quarter includes evaluations, samples, checkpoints and the deletion of old ones. After the last step
    // the end of the run begins, which makes the page in a thread of its own.
    let (early, late) = (most(0, STEPS / 4), most(STEPS / 4, STEPS));
    let looks = (between(0, STEPS / 4).count(), between(STEPS / 4, STEPS).count());
    eprintln!("threads, files, KiB: {early:?} in {} looks, then {late:?} in {}", looks.0, looks.1);
    assert!(looks.0 >= 5 && looks.1 >= 10, "{looks:?}");
    // A look may miss a thread that lives for an evaluation or a save, of which there are fifteen more.
    assert!(late.0 <= early.0 + 3, "threads: {early:?}, then {late:?}");
    assert!(late.1 <= early.1 + 3, "open files: {early:?}, then {late:?}");

    // Every step records its own memory.
    let lines = steps(&run);
    assert_eq!(lines.len() as u64, STEPS);
    let peak_mib = |from: u64, to: u64| {
        let held = lines[from as usize..to as usize].iter().filter_map(|line| line["host_memory_bytes"].as_u64());
        held.max().unwrap() as f64 / f64::from(1 << 20)
    };
    let (early, late) = (peak_mib(1000, STEPS / 4), peak_mib(STEPS / 4, STEPS));
    eprintln!("memory: {early:.1} MiB up to step {}, {late:.1} MiB after it; {:.1?}", STEPS / 4, started.elapsed());
    // Alone 0.7 MiB; 3.1 once beside another program, where a save, an evaluation and the steps behind it met.
    assert!(late <= early + 6.0, "memory grew from {early:.1} to {late:.1} MiB");
}

/// Processor time that a process takes from its start until it says that the first step of its resumed run is done.
fn seconds_to_first_step(recipe: &Path, checkpoint: &Path, model: &Path) -> f64 {
    let name = checkpoint.file_name().unwrap().to_str().unwrap();
    let from: u64 = name.strip_prefix("step-").unwrap().parse().unwrap();
    let mut child = lora_train(&[recipe.to_str().unwrap()])
        .arg(format!("--resume={}", checkpoint.display()))
        .args(["--set", &format!("model.path={}", model.display()), "--set", "model.init=random"])
        .args(["--set", "train.max_steps=1000000", "--set", "logging.logging_steps=1"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let first = format!("step {}/", from + 1);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let found = lines.any(|line| line.starts_with(&first));
    let seconds = processor_seconds(child.id());
    signal(&child, libc::SIGKILL);
    child.wait().unwrap();
    assert!(found, "no line begins with {first}");
    seconds
}

#[test]
fn a_late_resume_takes_no_longer_than_an_early_one() {
    let bench = Bench::new();
    let mut rows = String::new();
    for index in 0..60_000 {
        writeln!(rows, "{{\"prompt\": \"{index}: \", \"completion\": \"Once there was a fox in the garden.\"}}")
            .unwrap();
    }
    fs::write(bench.path("train.jsonl"), rows).unwrap();
    let model = small_model(&bench);
    for packing in [false, true] {
        let name = if packing { "packed" } else { "run" };
        let checkpointing = "[checkpoint]\nsave_steps = 20\n[logging]\nlogging_steps = 1000\ntensorboard = false\n";
        let recipe = bench.recipe(name, checkpointing);
        let text = fs::read_to_string(&recipe).unwrap();
        let text = text.replace("micro_batch_size = 2", "micro_batch_size = 128");
        let text = text.replace("num_workers = 1", &format!("num_workers = 1\npacking = {packing}"));
        fs::write(&recipe, text).unwrap();
        // The run ends after two thirds of the rows: 200 of 234 steps without packing, 40 of about 60 with packing.
        let last = if packing { 40 } else { 200 };
        let model_path = format!("model.path={}", model.display());
        let max_steps = format!("train.max_steps={last}");
        train(&recipe, &["--set", &model_path, "--set", "model.init=random", "--set", &max_steps]);
        let run = bench.path(name);
        let checkpoint = |step: u64| run.join(format!("checkpoints/step-{step:06}"));
        // Late first: resuming from an early checkpoint sets the later ones aside.
        let [late, early] = [last, 20].map(|step| {
            let tries = [(); 3].map(|()| seconds_to_first_step(&recipe, &checkpoint(step), &model));
            tries.into_iter().fold(f64::INFINITY, f64::min)
        });
        eprintln!("packing {packing}: {late} s from step {last}, {early} s from step 20");
        assert!(late <= 1.5 * early + 0.2, "packing {packing}: {late} s late, {early} s early");
    }
}
