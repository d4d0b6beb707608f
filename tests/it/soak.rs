//! Runs that are killed at random moments and resumed until they are done: their files must equal those of an
//! uninterrupted run, byte for byte.
//!
//! By default each kind of run gets a few kills. `LORA_TRAIN_SOAK_KILLS` sets their number, `LORA_TRAIN_SOAK_SEED` the
//! moments. `scripts/soak.sh` makes a hundred.

#![cfg(unix)]
#![allow(clippy::print_stderr, reason = "what was skipped, and what was done")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Bench, events, lora_train, run, signal, stderr, train, wait};
use lora_train::save::checkpoint::verify;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value};

/// Settings that all runs share.
const SETTINGS: [&str; 7] = [
    // Two and a half epochs, and a multiple of `save_steps`, so that the last checkpoint is that of the last step.
    "train.max_steps=18", "checkpoint.save_steps=3", "checkpoint.save_total_limit=2", "eval.eval_steps=4",
    "eval.generate=[\"Once\"]", "data.num_workers=2", "logging.gpu_sample_ms=50",
];

/// Whether a figure of metrics.jsonl depends on the machine rather than on the computation.
fn is_of_the_machine(name: &str) -> bool {
    let units = ["_seconds", "_percent", "_bytes", "_per_second", "_joules", "_watts", "_celsius", "_mhz"];
    units.iter().any(|unit| name.ends_with(unit)) || ["mfu", "major_page_faults", "findings"].contains(&name)
}

/// Lines of metrics.jsonl without the machine's figures, as text.
fn computed(run_dir: &Path) -> Vec<String> {
    let text = fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap();
    text.lines()
        .map(|line| {
            let line: Map<String, Value> = serde_json::from_str(line).unwrap();
            let kept = line.into_iter().filter(|(name, _)| !is_of_the_machine(name));
            Value::Object(kept.collect()).to_string()
        })
        .collect()
}

/// Everything that must be equal, by name.
fn outcome(run_dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut outcome = BTreeMap::new();
    let mut take = |path: PathBuf| {
        let name = path.strip_prefix(run_dir).unwrap().display().to_string();
        outcome.insert(name, fs::read(&path).unwrap());
    };
    take(run_dir.join("adapter/adapter_model.safetensors"));
    take(run_dir.join("adapter/adapter_config.json"));
    take(run_dir.join("samples.jsonl"));
    let mut checkpoints: Vec<_> =
        fs::read_dir(run_dir.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path()).collect();
    checkpoints.sort();
    // Whatever was interrupted, a visible checkpoint is complete.
    for checkpoint in &checkpoints {
        verify(checkpoint).unwrap_or_else(|error| panic!("{error}"));
    }
    // Signals save checkpoints at steps other than multiples of `save_steps`; only the last one is common to all.
    let last = checkpoints.pop().unwrap();
    for file in ["adapter_model.safetensors", "optimizer.safetensors"] {
        take(last.join(file));
    }
    // No partial files of killed processes are left.
    for folder in ["", "adapter", "checkpoints"] {
        let mut names: Vec<_> = fs::read_dir(run_dir.join(folder)).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        // Signals save checkpoints at other steps; runs killed before their first checkpoint are set aside.
        let other = match folder {
            "" => "superseded-",
            "checkpoints" => "step-",
            _ => "\0",
        };
        names.retain(|name| !name.to_string_lossy().starts_with(other));
        outcome.insert(format!("files in {folder}"), format!("{names:?}").into_bytes());
    }
    outcome
}

/// How to end a start of the run.
#[derive(Clone, Copy, Debug)]
enum End {
    /// SIGKILL after a time.
    KillAfter(Duration),
    /// SIGKILL while a checkpoint is being written.
    KillWhileSaving(Duration),
    /// SIGKILL once metrics.jsonl has this many more lines.
    KillAfterLines(usize, Duration),
    /// SIGTERM after a time, and SIGKILL if that is not enough.
    TermAfter(Duration),
}

impl End {
    fn draw(rng: &mut ChaCha8Rng, typical: Duration) -> Self {
        let short = Duration::from_micros(rng.random_range(0..8000));
        match rng.random_range(0..8) {
            0..3 => Self::KillAfter(typical.mul_f64(rng.random_range(0.0..1.2))),
            3..5 => Self::KillWhileSaving(short),
            5..7 => Self::KillAfterLines(rng.random_range(1..12), short),
            _ => Self::TermAfter(typical.mul_f64(rng.random_range(0.2..1.2))),
        }
    }

    /// Ends the process in this way, unless it ends by itself before.
    fn apply(self, child: &mut Child, run_dir: &Path) {
        let started = Instant::now();
        let lines = || fs::read(run_dir.join("metrics.jsonl")).unwrap_or_default().split(|b| *b == b'\n').count();
        let is_saving = || {
            let entries = fs::read_dir(run_dir.join("checkpoints")).into_iter().flatten().flatten();
            entries.into_iter().any(|entry| entry.file_name().to_string_lossy().ends_with(".partial"))
        };
        let lines_before = lines();
        let is_due = || match self {
            Self::KillAfter(after) | Self::TermAfter(after) => started.elapsed() >= after,
            Self::KillWhileSaving(_) => is_saving(),
            Self::KillAfterLines(more, _) => lines() >= lines_before + more,
        };
        while !is_due() {
            if child.try_wait().unwrap().is_some() || started.elapsed() > Duration::from_mins(1) {
                return;
            }
            std::thread::sleep(Duration::from_micros(300));
        }
        match self {
            Self::KillWhileSaving(then) | Self::KillAfterLines(_, then) => std::thread::sleep(then),
            Self::KillAfter(_) => {}
            Self::TermAfter(_) => {
                signal(child, libc::SIGTERM);
                let code = wait(child).code();
                assert!(matches!(code, Some(0 | 130)), "SIGTERM ended with {code:?}");
                return;
            }
        }
        // If the process has ended already, there is nothing to kill.
        if child.try_wait().unwrap().is_none() {
            signal(child, libc::SIGKILL);
        }
    }
}

/// A number from the environment.
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Kills runs with `settings` until there were enough kills, and compares each with an uninterrupted run.
fn soak(name: &str, settings: &[&str]) {
    let (kills, seed) = (number("LORA_TRAIN_SOAK_KILLS", 4), number("LORA_TRAIN_SOAK_SEED", 1));
    let bench = Bench::new();
    let stories = fs::read_to_string(bench.path("train.jsonl")).unwrap();
    let more: String = stories.lines().take(9).map(|line| line.replace("Once", "Twice") + "\n").collect();
    fs::write(bench.path("more.jsonl"), more).unwrap();
    let extra = format!("[[data.train]]\npath = {:?}\nweight = 1.5\n", bench.path("more.jsonl").display().to_string());
    let mut changes: Vec<String> = SETTINGS.iter().chain(settings).map(ToString::to_string).collect();
    changes.push("data.train.0.weight=0.7".into());
    let set: Vec<&str> = changes.iter().flat_map(|change| ["--set", change.as_str()]).collect();

    let started = Instant::now();
    train(&bench.recipe("whole", &extra), &set);
    let typical = started.elapsed();
    let whole = bench.path("whole");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut num_kills, mut num_starts, mut num_runs) = (0, 0, 0);
    while num_kills < kills {
        num_runs += 1;
        let run_name = format!("killed{num_runs}");
        let recipe = bench.recipe(&run_name, &extra);
        let run_dir = bench.path(&run_name);
        let mut args = vec![recipe.to_str().unwrap(), "--resume"];
        args.extend(&set);
        let mut history = Vec::new();
        let mut is_late = false;
        loop {
            num_starts += 1;
            if num_kills >= kills {
                let output = run(&args);
                assert!(output.status.success(), "{name}, seed {seed}, {history:?}: {}", stderr(&output));
                break;
            }
            let log = fs::File::create(bench.path("log")).unwrap();
            let mut child = lora_train(&args).stdout(Stdio::null()).stderr(log).spawn().unwrap();
            let end = End::draw(&mut rng, typical);
            history.push(end);
            end.apply(&mut child, &run_dir);
            let status = wait(&mut child);
            match status.code() {
                Some(0) => break,
                // Killed while it made its page: there is nothing to resume, and the page may be missing.
                None if run_dir.join("summary.json").exists() => {
                    is_late = true;
                    break;
                }
                None | Some(130) => num_kills += 1,
                Some(code) => {
                    let said = fs::read_to_string(bench.path("log")).unwrap();
                    panic!("{name}, seed {seed}, {history:?}: exit code {code}\n{said}");
                }
            }
        }
        if is_late {
            continue;
        }
        let context = format!("{name}, seed {seed}: {history:?}");
        assert_eq!(computed(&whole), computed(&run_dir), "{context}");
        let (ours, theirs) = (outcome(&run_dir), outcome(&whole));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{context}");
        for (file, bytes) in &theirs {
            assert!(ours[file] == *bytes, "{file} differs: {context}");
        }
        assert_eq!(events::losses(&run_dir), events::losses(&whole), "TensorBoard's curve: {context}");
        fs::remove_dir_all(&run_dir).unwrap();
    }
    eprintln!(
        "{name}: {num_kills} kills in {num_runs} runs ({num_starts} starts) in {:.0}s",
        started.elapsed().as_secs_f64()
    );
}

#[test]
fn a_run_that_is_killed_again_and_again_leaves_what_an_uninterrupted_one_leaves() {
    soak("rows of their own", &[]);
}

#[test]
fn so_does_one_with_packed_rows() {
    soak("packed rows", &["data.packing=true", "data.max_length=96", "train.micro_batch_size=1"]);
}

#[test]
fn so_does_one_in_f16_with_its_loss_scale() {
    // Slower than the other kinds, so its rows are shorter.
    soak("f16", &["train.precision=f16", "model.dtype=f16", "data.max_length=32", "eval.generate=[]"]);
}
