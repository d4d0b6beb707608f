//! A folder with a recipe and rows, and the binary run on it.
#![allow(dead_code, reason = "every test binary uses its own part")]
#![allow(unsafe_code, reason = "signals are system calls")]
#![allow(clippy::unnecessary_debug_formatting, reason = "a quoted path is TOML")]

pub(crate) mod events;
pub(crate) mod families;

use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// The repository's pretrained model.
pub(crate) fn quickstart_model() -> PathBuf {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/model");
    assert!(model.join("config.json").is_file(), "{} is part of the repository", model.display());
    model
}

/// A folder with rows to train on, removed at the end of the test.
pub(crate) struct Bench {
    pub(crate) folder: TempDir,
}

impl Bench {
    /// A folder with 24 training rows and 6 evaluation rows.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rows = |range: std::ops::Range<usize>| {
            range.fold(String::new(), |mut text, i| {
                let animal = ["cat", "dog", "bird", "fox"][i % 4];
                let place = ["garden", "forest", "house"][i % 3];
                let story = format!("Once there was a little {animal} in the {place}. ").repeat(1 + i % 3);
                writeln!(text, "{}", serde_json::json!({"prompt": format!("{i}: "), "completion": story})).unwrap();
                text
            })
        };
        fs::write(folder.path().join("train.jsonl"), rows(0..24)).unwrap();
        fs::write(folder.path().join("eval.jsonl"), rows(24..30)).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a recipe with its output in `output`; `extra` is appended, and `--set` changes the rest.
    pub(crate) fn recipe(&self, output: &str, extra: &str) -> PathBuf {
        let text = format!(
            r#"
output_dir = {output:?}
seed = 7

[model]
path = {model:?}

[lora]
r = 4
lora_dropout = 0.1

[data]
max_length = 64
num_workers = 1
[[data.train]]
path = {train:?}
[[data.eval]]
path = {eval:?}

[train]
micro_batch_size = 2
gradient_accumulation_steps = 2

[optimizer]
learning_rate = 1e-3

[scheduler]
lr_scheduler = "cosine"
warmup_steps = 1

[device]
name = "cpu"
{extra}
"#,
            output = self.path(output),
            model = quickstart_model(),
            train = self.path("train.jsonl"),
            eval = self.path("eval.jsonl"),
        );
        let path = self.path(&format!("{output}.toml"));
        fs::write(&path, text).unwrap();
        path
    }
}

/// The command with arguments, not yet started.
pub(crate) fn lora_train(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lora-train"));
    command
        .args(args)
        .env("NO_COLOR", "1")
        .env("LORA_TRAIN_CACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"))
        .env("RAYON_NUM_THREADS", "2")
        .stdin(Stdio::null());
    with_default_signals(command)
}

/// The command with default signals, also where the tests were started by `nohup`.
pub(crate) fn with_default_signals(mut command: Command) -> Command {
    let reset = || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
            // SAFETY: changes the process after the fork, by a call that is allowed there.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: as above.
    unsafe { command.pre_exec(reset) };
    command
}

/// Whether `unshare` can do this here, which mostly takes root. If not, the test that asks is skipped, or fails where
/// `LORA_TRAIN_NO_SKIPS` is set, as in `.ci/run`.
#[expect(clippy::print_stderr, reason = "as a test says it")]
pub(crate) fn can_unshare(args: &[&str]) -> bool {
    let can = Command::new("unshare").args(args).output().is_ok_and(|output| output.status.success());
    assert!(can || std::env::var_os("LORA_TRAIN_NO_SKIPS").is_none(), "unshare {args:?} failed");
    if !can {
        eprintln!("skipped: unshare {args:?} failed");
    }
    can
}

/// Runs the command to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    lora_train(args).output().unwrap()
}

/// Trains and asserts success.
pub(crate) fn train(recipe: &Path, args: &[&str]) -> Output {
    let mut all = vec![recipe.to_str().unwrap()];
    all.extend(args);
    let output = run(&all);
    assert!(output.status.success(), "{}", stderr(&output));
    output
}

/// The command's stderr.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Lines of metrics.jsonl. Of a run that goes on, the last may be half written: it is none yet.
pub(crate) fn metrics(run_dir: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    whole.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// `--set` before each of these settings.
pub(crate) fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

/// Trains six steps with these settings in the folder `run`, and again from the third on: to the same bytes.
pub(crate) fn resumes_to_the_same_bytes(bench: &Bench, run: &str, settings: &[&str]) {
    let steps = ["train.max_steps=6", "checkpoint.save_steps=3", "eval.eval_steps=3"];
    let args = set(&[&steps[..], settings].concat());
    train(&bench.recipe(run, ""), &args);
    let resumed = format!("{run}-resumed");
    let checkpoint = bench.path(&format!("{run}/checkpoints/step-000003"));
    train(&bench.recipe(&resumed, ""), &[&args[..], &["--resume", checkpoint.to_str().unwrap()]].concat());
    for file in ["adapter/adapter_model.safetensors", "checkpoints/step-000006/optimizer.safetensors"] {
        let [whole, resumed] = [run, &resumed].map(|run| fs::read(bench.path(run).join(file)).unwrap());
        assert!(whole == resumed, "{file} of {settings:?}");
    }
}

/// The step lines of metrics.jsonl.
pub(crate) fn steps(run_dir: &Path) -> Vec<Value> {
    metrics(run_dir).into_iter().filter(|line| line.get("loss").is_some()).collect()
}

/// Reads a JSON file of a run.
pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Sends a signal to a running process.
pub(crate) fn signal(child: &Child, signal: i32) {
    // SAFETY: kill() takes two numbers and touches no memory; the process is our own child, not yet waited for.
    let sent = unsafe { libc::kill(child.id().cast_signed(), signal) };
    assert_eq!(sent, 0);
}

/// Waits until a condition holds, at most three minutes.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_mins(3), "waited three minutes for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Processor time that a process of our own has taken, in seconds, also after its end until it is waited for. Unlike the time
/// on the clock, it does not grow with what else the machine does.
pub(crate) fn processor_seconds(pid: u32) -> f64 {
    let stat = stat(pid);
    // The state, ten more numbers, the time in the program and that in the kernel, in hundredths of a second.
    stat.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap()).sum::<f64>() / 100.0
}

/// What Linux tells of a process, after its name in parentheses.
fn stat(pid: u32) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.to_owned()
}

/// Waits for a process, at most three minutes: how it ended, and the processor time that it took meanwhile, in seconds.
pub(crate) fn wait_measured(child: &mut Child) -> (ExitStatus, f64) {
    let before = processor_seconds(child.id());
    wait_until("the process to end", || stat(child.id()).starts_with('Z'));
    let taken = processor_seconds(child.id()) - before;
    (child.wait().unwrap(), taken)
}

/// Waits for a process, at most three minutes.
pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until("the process to end", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}
