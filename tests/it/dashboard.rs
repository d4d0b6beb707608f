//! The dashboard in a pseudo-terminal, which presses keys and shows what is left at the end.
//!
//! Each test starts its own executable again as the program under test, on the pseudo-terminal.

#![cfg(all(unix, feature = "tui"))]
#![allow(unsafe_code, reason = "pseudo-terminals are made with system calls")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use burn_train::Interrupter;
use lora_train::commands::cli;
use lora_train::config::LoggingConfig;
use lora_train::measure::metrics::{EvalMetrics, Shows, SinkOptions, Sinks, StepMetrics, Summary};
use lora_train::train::stop::Stop;
use lora_train::util::failure::Failure;
use lora_train::util::panics::guarded;

use crate::faults;

/// Environment variable of the program under test: `run`, `panic`, `caught`, `fault` or `abort`.
const CHILD: &str = "LORA_TRAIN_DASHBOARD_CHILD";
const NUM_STEPS: u64 = 3_000;
const DEADLINE: Duration = Duration::from_mins(1);

const ENTER_DASHBOARD: &str = "\x1b[?1049h";
const LEAVE_DASHBOARD: &str = "\x1b[?1049l";

/// A training loop that computes nothing.
fn train(mode: &str) -> Result<(), Failure> {
    let folder = tempfile::tempdir().unwrap();
    let signal = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&signal)).unwrap();
    let options = SinkOptions {
        run_dir: folder.path(),
        resume_step: None,
        has_evaluated: false,
        has_rollouts: false,
        total_steps: NUM_STEPS,
        eval_steps: None,
        shows: Shows::Dashboard,
        interrupter: Interrupter::new(),
    };
    // As in a real run.
    Stop::default().on_abort("take less");
    if mode == "caught" {
        assert!(guarded(|| panic!("caught before")).is_err());
    }
    let mut sinks = Sinks::open(&LoggingConfig::default(), options).unwrap();
    sinks.eval(&EvalMetrics { eval_loss: Some(2.0), ..EvalMetrics::default() });
    sinks.start();
    let mut steps = 0;
    while steps < NUM_STEPS && !sinks.stop_requested() && !signal.load(Ordering::Relaxed) {
        steps += 1;
        std::thread::sleep(Duration::from_millis(20));
        sinks.step(&StepMetrics { step: steps, loss: 1.0, ..StepMetrics::default() });
        match steps {
            5 => sinks.warn("a warning in the middle"),
            10 if mode == "caught" => assert!(guarded(|| panic!("caught in the middle")).is_err()),
            10 if mode == "fault" => faults::warn_of_little_memory(),
            50 if mode == "fault" => {
                faults::lose_work();
                let _ = lora_train::util::faults::read(Tensor::<1>::ones([1], &Device::flex()), "the loss");
            }
            50 if mode == "panic" => panic!("a bug in the middle"),
            50 if mode == "abort" => std::process::abort(),
            _ => {}
        }
    }
    sinks.finish(&Summary { steps, ..Summary::default() }).unwrap();
    drop(folder);
    if steps < NUM_STEPS { Err(Failure::Interrupted) } else { Ok(()) }
}

struct PseudoTerminal {
    keyboard: File,
    /// Kept open, to read the settings after the program has ended.
    terminal: OwnedFd,
    screen: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
    program: Child,
}

impl PseudoTerminal {
    fn start(test: &str, mode: &str) -> Self {
        let mut program = Command::new(std::env::current_exe().unwrap());
        let test = format!("dashboard::{test}");
        program.args(["--exact", &test, "--nocapture"]).env(CHILD, mode);
        Self::of(program)
    }

    fn of(mut program: Command) -> Self {
        let (mut master, mut slave) = (-1, -1);
        let size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the outputs outlive the call; name and settings may be null.
        let result = unsafe {
            libc::openpty(&raw mut master, &raw mut slave, std::ptr::null_mut(), std::ptr::null(), &raw const size)
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: both were just opened and nothing else owns them.
        let (master, terminal) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        program.env("TERM", "xterm-256color").env_remove("RUST_BACKTRACE");
        program.stdin(terminal.try_clone().unwrap()).stdout(terminal.try_clone().unwrap());
        program.stderr(terminal.try_clone().unwrap());
        // SAFETY: two system calls that are allowed between fork and exec. They make this pseudo-terminal the
        // controlling one, whose Ctrl-C reaches the program.
        unsafe {
            program.pre_exec(|| {
                if libc::setsid() >= 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) >= 0 {
                    Ok(())
                } else {
                    Err(std::io::Error::last_os_error())
                }
            });
        }
        let program = program.spawn().unwrap();
        let screen = Arc::new(Mutex::new(Vec::new()));
        let (mut output, shown) = (master.try_clone().unwrap(), Arc::clone(&screen));
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut buffer) {
                shown.lock().unwrap().extend_from_slice(&buffer[..length]);
            }
        });
        Self { keyboard: master, terminal, screen, reader, program }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned()
    }

    fn wait_for(&self, text: &str) {
        let started = Instant::now();
        while !self.text().contains(text) {
            assert!(started.elapsed() < DEADLINE, "`{text}` does not come:\n{}", self.text().escape_debug());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for a text after the output so far.
    fn wait_for_more(&self, shown: usize, text: &str) {
        let started = Instant::now();
        while !self.text().get(shown..).is_some_and(|new| new.contains(text)) {
            assert!(started.elapsed() < DEADLINE, "`{text}` does not come again");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// The normal screen after the program has ended. Asserts that the terminal is as it was before.
    fn end(mut self) -> (ExitStatus, String) {
        let started = Instant::now();
        let status = loop {
            match self.program.try_wait().unwrap() {
                Some(status) => break status,
                None if started.elapsed() > DEADLINE => {
                    self.program.kill().unwrap();
                    panic!("the program does not end:\n{}", self.text().escape_debug());
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        // SAFETY: `settings` is valid as all zeros and outlives the call.
        let settings = unsafe {
            let mut settings: libc::termios = std::mem::zeroed();
            assert_eq!(libc::tcgetattr(self.terminal.as_raw_fd(), &raw mut settings), 0);
            settings
        };
        let cooked = libc::ICANON | libc::ECHO | libc::ISIG;
        assert_eq!(settings.c_lflag & cooked, cooked, "the terminal is still in raw mode");
        // The last output may still be on its way; without the terminal, its reader comes to the end of it.
        drop(self.terminal);
        self.reader.join().unwrap();
        let text = String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned();
        let (_, after) = text.rsplit_once(LEAVE_DASHBOARD).expect("the dashboard's screen was left");
        assert!(text.contains(ENTER_DASHBOARD) && !after.contains(ENTER_DASHBOARD));
        (status, after.to_owned())
    }
}

/// Runs the training loop if this is the program under test.
fn train_if_child() {
    if let Ok(mode) = std::env::var(CHILD) {
        // Ends like the command.
        std::process::exit(i32::from(cli::ended(|| train(&mode))));
    }
}

#[test]
fn quitting_in_the_dashboard_stops_training_and_shows_its_warnings_and_its_ending() {
    train_if_child();
    let mut terminal =
        PseudoTerminal::start("quitting_in_the_dashboard_stops_training_and_shows_its_warnings_and_its_ending", "run");
    terminal.wait_for("warning,");
    terminal.press("q");
    terminal.wait_for("Cancel");
    terminal.press("s");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(130), "{after}");
    let said = ["a warning in the middle", "finished after "];
    let places: Vec<_> = said.iter().map(|text| after.find(text).expect(text)).collect();
    assert!(places.is_sorted() && !after.contains("eval at step 0"), "{after}");
}

#[test]
fn a_run_that_is_quit_in_the_dashboard_says_on_the_normal_screen_what_held_it_back() {
    let bench = crate::common::Bench::new();
    let recipe = bench.recipe("run", "");
    let args = [recipe.to_str().unwrap(), "--set", "train.max_steps=5000", "--tui"];
    let mut terminal = PseudoTerminal::of(crate::common::lora_train(&args));
    let is_training = || crate::common::metrics(&bench.path("run")).len() > 5;
    crate::common::wait_until("some steps", || bench.path("run/metrics.jsonl").exists() && is_training());
    terminal.press("q");
    terminal.wait_for("Cancel");
    terminal.press("s");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(130), "{after}");
    let summary = crate::common::json(&bench.path("run/unfinished.json"));
    let interrupted = format!("interrupted at step {} of 5000", summary["steps"]);
    let verdict = summary["diagnosis"][0]["verdict"].as_str().unwrap();
    let said = [&*interrupted, verdict, "report: ", "to continue: lora-train "];
    let places: Vec<_> = said.iter().map(|text| after.find(text).expect(text)).collect();
    assert!(places.is_sorted(), "{after}");
    let page = fs::read_to_string(bench.path("run/report.html")).unwrap();
    assert!(page.contains("<p><span>interrupted at step ") && page.contains(verdict), "{page}");
}

/// The real command with its dashboard, after its first steps.
fn training(bench: &crate::common::Bench, settings: &[&str]) -> PseudoTerminal {
    let recipe = bench.recipe("run", "");
    let changes = settings.iter().flat_map(|change| ["--set", change]);
    let args: Vec<&str> = [recipe.to_str().unwrap(), "--tui"].into_iter().chain(changes).collect();
    let terminal = PseudoTerminal::of(crate::common::lora_train(&args));
    terminal.wait_for(ENTER_DASHBOARD);
    let has_steps = || bench.path("run/metrics.jsonl").exists() && !crate::common::steps(&bench.path("run")).is_empty();
    crate::common::wait_until("a step", has_steps);
    terminal
}

#[test]
fn a_signal_to_a_run_under_its_dashboard_saves_a_checkpoint_and_gives_the_terminal_back() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let bench = crate::common::Bench::new();
        let terminal = training(&bench, &["train.max_steps=5000"]);
        crate::common::signal(&terminal.program, signal);
        let (status, after) = terminal.end();
        assert_eq!(status.code(), Some(130), "{after}");
        let step = crate::common::json(&bench.path("run/unfinished.json"))["steps"].as_u64().unwrap();
        assert!(bench.path(&format!("run/checkpoints/step-{step:06}/trainer_state.json")).is_file(), "{after}");
        let said = format!("stopped after step {step}, with a checkpoint; to continue: lora-train ");
        assert!(after.contains(&said), "{after}");
    }
}

#[test]
fn a_second_signal_to_a_run_under_its_dashboard_ends_it_at_once_with_its_terminal_given_back() {
    let bench = crate::common::Bench::new();
    // All steps take many times what the end is waited for.
    let slow = ["train.max_steps=5000", "checkpoint.save_steps=1", "train.micro_batch_size=24"];
    let terminal = training(&bench, &slow);
    for _ in 0..2 {
        crate::common::signal(&terminal.program, libc::SIGINT);
    }
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(130), "{after}");
    let steps = || crate::common::steps(&bench.path("run"));
    let more = steps().len() as u64 + 2;
    let (recipe, max_steps) = (bench.path("run.toml"), format!("train.max_steps={more}"));
    let changes = [&max_steps, slow[1], slow[2]].into_iter().flat_map(|change| ["--set", change]);
    let args: Vec<&str> = [recipe.to_str().unwrap(), "--resume"].into_iter().chain(changes).collect();
    let output = crate::common::run(&args);
    assert!(output.status.success(), "{}", crate::common::stderr(&output));
    let seen: Vec<_> = steps().iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(seen, (1..=more).collect::<Vec<_>>());
}

#[test]
fn a_question_that_is_cancelled_changes_nothing_and_the_screen_goes_on() {
    train_if_child();
    let mut terminal =
        PseudoTerminal::start("a_question_that_is_cancelled_changes_nothing_and_the_screen_goes_on", "run");
    terminal.wait_for("warning,");
    terminal.press("q");
    terminal.wait_for("Cancel");
    let shown = terminal.text().len();
    terminal.press("c");
    // The area that the question covered is redrawn.
    terminal.wait_for_more(shown, "norm");
    terminal.press("\x03");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(130), "{after}");
}

#[test]
fn ctrl_c_reaches_the_program_through_raw_mode() {
    train_if_child();
    let mut terminal = PseudoTerminal::start("ctrl_c_reaches_the_program_through_raw_mode", "run");
    terminal.wait_for("warning,");
    terminal.press("\x03");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(130), "{after}");
    assert!(after.contains("finished after "), "{after}");
}

#[test]
fn a_panic_leaves_a_usable_terminal_and_a_readable_message() {
    train_if_child();
    let terminal = PseudoTerminal::start("a_panic_leaves_a_usable_terminal_and_a_readable_message", "panic");
    terminal.wait_for("a bug in the middle");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(1), "{after}");
    let said = ["a warning in the middle", "this is a bug in lora-train ", "report it with the lines above"];
    for text in [&said[..], &["a bug in the middle", "tests/it/dashboard.rs:"]].concat() {
        assert!(after.contains(text), "{text}: {after}");
    }
}

#[test]
fn a_fault_of_the_device_is_told_once_after_the_backends_warnings() {
    train_if_child();
    let test = "a_fault_of_the_device_is_told_once_after_the_backends_warnings";
    let terminal = PseudoTerminal::start(test, "fault");
    terminal.wait_for("the GPU stopped");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(1), "{after}");
    let said = ["a warning in the middle", "cubecl_server: device allocation", "the GPU stopped: CUDA_ERROR_ILLEGAL"];
    let places: Vec<_> = said.iter().map(|text| after.find(text).expect(text)).collect();
    assert!(places.is_sorted() && !after.contains("panicked at"), "{after}");
    assert_eq!(said.map(|text| after.matches(text).count()), [1; 3], "{after}");
}

#[test]
fn a_panic_that_is_caught_is_not_seen() {
    train_if_child();
    let mut terminal = PseudoTerminal::start("a_panic_that_is_caught_is_not_seen", "caught");
    terminal.wait_for("warning,");
    std::thread::sleep(Duration::from_secs(1));
    assert!(!terminal.text().contains(LEAVE_DASHBOARD) && !terminal.text().contains("caught"), "{}", terminal.text());
    terminal.press("\x03");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(130), "{after}");
    assert!(after.contains("finished after ") && !after.contains("caught"), "{after}");
}

#[test]
fn keys_that_would_stop_or_kill_the_process_do_nothing() {
    train_if_child();
    let mut terminal = PseudoTerminal::start("keys_that_would_stop_or_kill_the_process_do_nothing", "run");
    terminal.wait_for("warning,");
    terminal.press("\x1a\x1c");
    let shown = terminal.text().len();
    terminal.wait_for_more(shown, "\x1b[");
    terminal.press("q");
    terminal.wait_for("Cancel");
    terminal.press("\x03");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(130), "{after}");
    assert!(after.contains("finished after "), "{after}");
}

#[test]
fn an_abort_leaves_a_usable_terminal_and_readable_advice() {
    train_if_child();
    let terminal = PseudoTerminal::start("an_abort_leaves_a_usable_terminal_and_readable_advice", "abort");
    let (status, after) = terminal.end();
    assert_eq!(status.code(), Some(1), "{after}");
    assert!(after.contains("if this was for want of memory: take less"), "{after}");
}
