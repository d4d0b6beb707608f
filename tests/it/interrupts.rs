//! Signals to real processes: in every phase of a run, twice, as process 1, and without a reader of its output.

#![cfg(unix)]
#![allow(unsafe_code, reason = "signals are system calls")]
#![allow(clippy::print_stderr, reason = "what was skipped, and what was done")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::{
    Bench, can_unshare, lora_train, metrics, run, signal, stderr, steps, train, wait, wait_measured, wait_until,
};

/// Maximum processor time from a signal to the end of the process, in seconds: that of two threads in five.
const PROMPT: f64 = 10.0;

/// Starts a run whose stderr goes to `log`.
fn start(bench: &Bench, recipe: &Path, args: &[&str]) -> Child {
    let log = fs::File::create(bench.path("log")).unwrap();
    let mut all = vec![recipe.to_str().unwrap()];
    all.extend(args);
    lora_train(&all).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

fn log(bench: &Bench) -> String {
    fs::read_to_string(bench.path("log")).unwrap_or_default()
}

/// Whether a process handles SIGTERM by now.
fn handles_sigterm(pid: impl std::fmt::Display) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|caught| caught >> (libc::SIGTERM - 1) & 1 == 1)
}

/// Interrupts a process and asserts that it ends promptly with exit code 130.
fn interrupt(bench: &Bench, child: &mut Child, which: i32) {
    signal(child, which);
    let (status, seconds) = wait_measured(child);
    assert_eq!(status.code(), Some(130), "{}", log(bench));
    assert!(seconds < PROMPT, "took {seconds} s:\n{}", log(bench));
}

/// Asserts that an interrupted run can be resumed to its end.
fn finishes(bench: &Bench, recipe: &Path, args: &[&str]) {
    let mut all = vec![recipe.to_str().unwrap(), "--resume"];
    all.extend(args);
    let output = run(&all);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(bench.path("run/summary.json").is_file());
}

#[test]
fn an_interrupted_run_says_how_to_continue_it_even_when_it_is_quiet() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut child = start(&bench, &recipe, &["--set", "train.max_steps=5000", "--quiet"]);
    wait_until("a step", || steps(&bench.path("run")).len() > 1);
    interrupt(&bench, &mut child, libc::SIGTERM);
    let command = format!("lora-train {} --set train.max_steps=5000 --quiet --resume", recipe.display());
    assert!(log(&bench).contains(&command), "{}", log(&bench));
    assert!(!bench.path("run/summary.json").exists(), "summary.json means finished");
    let more = format!("train.max_steps={}", steps(&bench.path("run")).len() + 2);
    finishes(&bench, &recipe, &["--set", &more]);
}

#[test]
fn an_interrupt_during_an_evaluation_ends_it_and_leaves_no_half_of_it() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("eval.jsonl")).unwrap();
    fs::write(bench.path("eval.jsonl"), rows.repeat(3000)).unwrap();
    let recipe = bench.recipe("run", "");
    let set = ["--set", "train.max_steps=2"];
    let mut child = start(&bench, &recipe, &set);
    wait_until("the evaluation", || bench.path("run/metrics.jsonl").exists());
    std::thread::sleep(Duration::from_millis(300));
    interrupt(&bench, &mut child, libc::SIGINT);
    assert!(metrics(&bench.path("run")).is_empty(), "{}", log(&bench));
    let mut all = set.to_vec();
    all.extend(["--set", "eval.max_batches=3"]);
    finishes(&bench, &recipe, &all);
    let evaluated: Vec<_> = metrics(&bench.path("run")).iter().filter_map(|line| line["eval_loss"].as_f64()).collect();
    assert_eq!(evaluated.len(), 2, "before the first step and after the last, once each");
}

#[test]
fn an_interrupt_while_text_is_sampled_ends_it() {
    let bench = Bench::new();
    let prompts = vec!["\"Once there was\""; 3000].join(",");
    let recipe = bench.recipe("run", &format!("[eval]\ngenerate = [{prompts}]\n"));
    let mut child = start(&bench, &recipe, &["--set", "train.max_steps=2"]);
    wait_until("the samples", || bench.path("run/samples.jsonl").exists());
    std::thread::sleep(Duration::from_millis(500));
    interrupt(&bench, &mut child, libc::SIGINT);
    assert_eq!(fs::read(bench.path("run/samples.jsonl")).unwrap(), b"");
    finishes(&bench, &recipe, &["--set", "train.max_steps=2", "--set", "eval.generate=[]"]);
}

#[test]
fn a_signal_in_a_long_step_is_heard_at_once_and_ends_the_step_between_two_operations() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("train.jsonl")).unwrap();
    fs::write(bench.path("train.jsonl"), rows.repeat(250)).unwrap();
    let recipe = bench.recipe("run", "[eval]\neval_on_start = false\n");
    // One step over all rows, in a single micro-batch.
    let set = ["--set", "train.micro_batch_size=6000", "--set", "train.gradient_accumulation_steps=1"];
    let mut child = start(&bench, &recipe, &set);
    wait_until("the start", || bench.path("run/memory_plan.json").exists());
    std::thread::sleep(Duration::from_secs(2));
    interrupt(&bench, &mut child, libc::SIGTERM);
    assert!(log(&bench).contains("stopping; a second signal ends the run at once"), "{}", log(&bench));
    assert!(steps(&bench.path("run")).is_empty(), "{}", log(&bench));
}

#[test]
fn a_step_that_a_signal_cut_off_is_computed_again_to_the_same_bytes() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("train.jsonl")).unwrap();
    fs::write(bench.path("train.jsonl"), rows.repeat(40)).unwrap();
    let set = ["--set", "train.micro_batch_size=240", "--set", "train.max_steps=4", "--set", "lora.lora_dropout=0.1"];
    let adapter = |name: &str| fs::read(bench.path(name).join("adapter/adapter_model.safetensors")).unwrap();
    train(&bench.recipe("whole", ""), &set);
    let recipe = bench.recipe("run", "");
    let mut child = start(&bench, &recipe, &set);
    wait_until("a step", || !steps(&bench.path("run")).is_empty());
    interrupt(&bench, &mut child, libc::SIGTERM);
    finishes(&bench, &recipe, &set);
    assert!(adapter("run") == adapter("whole"));
}

#[test]
fn a_second_signal_ends_the_process_at_once_and_the_run_can_be_continued() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    // A micro-batch takes seconds, so the first signal alone could not have ended the run by then.
    let slow = ["--set", "train.max_steps=9", "--set", "checkpoint.save_steps=1", "--set", "train.micro_batch_size=24"];
    let mut child = start(&bench, &recipe, &slow);
    wait_until("a checkpoint", || bench.path("run/checkpoints/step-000001").is_dir());
    signal(&child, libc::SIGINT);
    std::thread::sleep(Duration::from_millis(600));
    signal(&child, libc::SIGTERM);
    let (status, seconds) = wait_measured(&mut child);
    assert_eq!(status.code(), Some(130));
    assert!(seconds < 2.0, "{seconds} s");
    finishes(&bench, &recipe, &slow);
    let seen: Vec<_> = steps(&bench.path("run")).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(seen, (1..=9).collect::<Vec<_>>());
}

#[test]
fn two_signals_at_once_are_one_as_timeout_sends_them() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut child = start(&bench, &recipe, &["--set", "train.max_steps=5000"]);
    wait_until("a step", || !steps(&bench.path("run")).is_empty());
    for kind in [libc::SIGTERM, libc::SIGTERM, libc::SIGINT] {
        signal(&child, kind);
    }
    assert_eq!(wait(&mut child).code(), Some(130));
    assert_eq!(fs::read_dir(bench.path("run/checkpoints")).unwrap().count(), 1, "{}", log(&bench));
}

#[test]
fn a_signal_at_any_moment_of_the_start_ends_the_process_with_130() {
    let bench = Bench::new();
    for delay in [0, 5, 10, 20, 40, 80, 160] {
        let name = format!("run{delay}");
        let recipe = bench.recipe(&name, "");
        let mut child = start(&bench, &recipe, &["--set", "train.max_steps=5000"]);
        std::thread::sleep(Duration::from_millis(delay));
        let handles = handles_sigterm(child.id());
        // Scripts that run the tests in the background leave SIGINT ignored.
        signal(&child, libc::SIGTERM);
        let (status, seconds) = wait_measured(&mut child);
        // Before the program's first line, the signal itself kills the process.
        let is_interrupted = status.code() == Some(130) || (!handles && status.code().is_none());
        assert!(is_interrupted, "after {delay} ms: {status}\n{}", log(&bench));
        assert!(seconds < PROMPT, "after {delay} ms: {seconds} s");
    }
}

#[test]
fn a_terminal_that_is_closed_stops_the_run_unless_nohup_has_turned_that_off() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut child = start(&bench, &recipe, &["--set", "train.max_steps=5000"]);
    wait_until("a step", || steps(&bench.path("run")).len() > 1);
    interrupt(&bench, &mut child, libc::SIGHUP);
    assert_eq!(fs::read_dir(bench.path("run/checkpoints")).unwrap().count(), 1);

    let recipe = bench.recipe("nohup", "");
    let binary = env!("CARGO_BIN_EXE_lora-train");
    let mut command = Command::new("nohup");
    command.args([binary, recipe.to_str().unwrap(), "--set", "train.max_steps=60"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("a step", || steps(&bench.path("nohup")).len() > 1);
    signal(&child, libc::SIGHUP);
    assert!(wait(&mut child).success());
}

#[test]
fn a_cell_of_a_notebook_that_is_killed_leaves_a_checkpoint() {
    let bench = Bench::new();
    // What the kernel sends within half a second, and what the system does where memory runs out.
    for (name, signals) in [
        ("stopped", &[libc::SIGINT, libc::SIGHUP, libc::SIGCONT, libc::SIGINT, libc::SIGKILL][..]),
        ("killed", &[libc::SIGKILL]),
    ] {
        let recipe = bench.recipe(name, "");
        let file = fs::File::create(bench.path("log")).unwrap();
        let mut command = lora_train(&[recipe.to_str().unwrap(), "--set", "train.max_steps=5000"]);
        let command = command.env("JPY_PARENT_PID", "1").stdout(Stdio::null()).stderr(file);
        let mut cell = command.spawn().unwrap();
        wait_until("a step", || steps(&bench.path(name)).len() > 1);
        signals.iter().for_each(|which| signal(&cell, *which));
        assert_eq!(wait(&mut cell).code(), None);
        wait_until("the end of the run", || bench.path(name).join("report.html").exists());
        assert!(log(&bench).contains("stopping the cell saves a checkpoint"), "{}", log(&bench));
        assert_eq!(fs::read_dir(bench.path(name).join("checkpoints")).unwrap().count(), 1);
        // Whoever asks for it at once finds it still locked.
        let more = format!("train.max_steps={}", steps(&bench.path(name)).len() + 2);
        let resumed = || run(&[bench.path(name).to_str().unwrap(), "--resume", "--set", &more]);
        wait_until("the folder", || !stderr(&resumed()).contains("is writing into it"));
        assert!(bench.path(name).join("summary.json").is_file());
    }
    // One that ends by itself ends the cell with its exit code.
    let recipe = bench.recipe("whole", "");
    let code = |set: &str| {
        let mut command = lora_train(&[recipe.to_str().unwrap(), "--set", set]);
        command.env("COLAB_GPU", "").output().unwrap().status.code()
    };
    assert_eq!([code("train.max_steps=2"), code("lora.r=0")], [Some(0), Some(2)]);
}

#[test]
#[ignore = "needs LORA_TRAIN_PYTHON, a Python with nbclient (scripts/setup_python.sh)"]
fn a_notebook_keeps_the_lines_of_a_run_and_the_work_of_a_cell_that_is_stopped() {
    let bench = Bench::new();
    let python = std::env::var("LORA_TRAIN_PYTHON").expect("LORA_TRAIN_PYTHON names a Python with nbclient");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/check_notebook.py");
    let mut command = Command::new(python);
    command.args([script, "--binary", env!("CARGO_BIN_EXE_lora-train"), "--out"]).arg(bench.path("runs"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_run_goes_on_when_nobody_reads_what_it_says() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let args = [recipe.to_str().unwrap(), "--set", "train.max_steps=10"];
    let mut child = lora_train(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut first = String::new();
    // Like `2>&1 | head -n 1`.
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.starts_with("device: "), "{first}");
    assert!(wait(&mut child).success());
    assert_eq!(steps(&bench.path("run")).len(), 10);
}

#[test]
fn process_1_of_a_container_is_interrupted_as_any_other() {
    let bench = Bench::new();
    if !can_unshare(&["--pid", "--fork", "true"]) {
        return;
    }
    for (name, has_begun) in [("loading", false), ("training", true)] {
        let recipe = bench.recipe(name, "");
        let log = fs::File::create(bench.path("log")).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", env!("CARGO_BIN_EXE_lora-train"), recipe.to_str().unwrap()]);
        command.args(["--set", "train.max_steps=5000"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut outer = command.spawn().unwrap();
        let children = format!("/proc/{0}/task/{0}/children", outer.id());
        let mut inner = None;
        wait_until("the process in the container", || {
            inner = fs::read_to_string(&children).ok().and_then(|pids| pids.trim().parse::<i32>().ok());
            // Until it handles signals, process 1 does not hear them.
            inner.is_some_and(handles_sigterm)
        });
        if has_begun {
            wait_until("a step", || steps(&bench.path(name)).len() > 1);
        }
        // SAFETY: kill() takes two numbers and touches no memory; the process is a child of our own child.
        assert_eq!(unsafe { libc::kill(inner.unwrap(), libc::SIGTERM) }, 0);
        assert_eq!(wait(&mut outer).code(), Some(130), "{name}: {}", fs::read_to_string(bench.path("log")).unwrap());
        assert!(!has_begun || bench.path(name).join("checkpoints").is_dir(), "{name}");
    }
}

#[test]
fn rows_and_bytes_do_not_depend_on_the_number_of_workers() {
    let bench = Bench::new();
    let adapter = |workers: usize| {
        let name = format!("workers{workers}");
        let workers = format!("data.num_workers={workers}");
        train(&bench.recipe(&name, ""), &["--set", "train.max_steps=9", "--set", &workers]);
        fs::read(bench.path(&name).join("adapter/adapter_model.safetensors")).unwrap()
    };
    let alone = adapter(1);
    assert!(alone == adapter(2) && alone == adapter(5));
}
