//! A program that judges answers, or is the environment that replies to them, as long as it runs: lines to it, and lines back.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Variables that it gets beside those that the recipe names, and those of Python: no token is among them.
const KEPT: [&str; 5] = ["PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV"];

/// Longest line that is read.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Lines that are read ahead.
const MAX_LINES: usize = 1024;

/// How often it is seen whether the program still runs, and whether the run was asked to stop.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// What is shown of what it wrote to stderr before it failed.
const SHOWN: (u64, usize) = (4096, 10);

/// How a program is started, and where what it writes to stderr goes: without a file to this program's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch<'a> {
    pub(super) command: &'a [String],
    pub(super) name: &'a str,
    pub(super) env: &'a [String],
    pub(super) log: Option<&'a Path>,
}

/// A program that runs.
#[derive(Debug)]
pub(super) struct Program {
    /// Its name to people.
    pub(super) name: String,
    child: Child,
    /// To the thread that writes: a program that does not read keeps nobody else from going on.
    input: Sender<String>,
    lines: Receiver<Result<String, String>>,
    /// Where it writes to, and what was in it before.
    log: Option<(PathBuf, u64)>,
}

impl Program {
    /// # Errors
    /// A program that cannot be started; a variable that is not there.
    pub(super) fn start(launch: Launch<'_>) -> Result<Self, String> {
        let Launch { command, name, env, log } = launch;
        let [program, arguments @ ..] = command else { return Err("`command` is empty".into()) };
        let failed = |error: io::Error| format!("{program} cannot be started: {error}");
        let log = log.map(|path| open(path).map(|(file, length)| (file, path.to_owned(), length))).transpose()?;
        let mut process = Command::new(program);
        process.args(arguments).env_clear().envs(environment(env)?).stdin(Stdio::piped()).stdout(Stdio::piped());
        // What it starts ends with it.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut process, 0);
        if let Some((file, ..)) = &log {
            process.stderr(file.try_clone().map_err(failed)?);
        }
        let mut child = process.spawn().map_err(failed)?;
        let (Some(mut stdin), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("{program} has no input or output"));
        };
        let (input, questions) = mpsc::channel::<String>();
        // Ends with the program, or with the sender.
        let write = move || questions.iter().all(|line| writeln!(stdin, "{line}").and_then(|()| stdin.flush()).is_ok());
        std::thread::Builder::new().name("questions".into()).spawn(write).map_err(failed)?;
        let (sender, lines) = mpsc::sync_channel(MAX_LINES);
        let read = move || {
            let mut output = BufReader::new(output);
            // Ends with the program, or with the receiver.
            while let Some(line) = line_of(&mut output) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("rewards".into()).spawn(read).map_err(failed)?;
        Ok(Self { name: name.to_owned(), child, input, lines, log: log.map(|(_, path, length)| (path, length)) })
    }

    /// Asks a question.
    ///
    /// # Errors
    /// A program that has ended, has written something by itself, or does not answer in time; a run that was asked to stop.
    pub(super) fn ask(
        &mut self,
        question: &Value,
        patience: Duration,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<String, String> {
        if let Ok(line) = self.lines.try_recv() {
            return Err(format!("{} has written {:?} without being asked", self.name, line?));
        }
        self.tell(question)?;
        self.answer(patience, is_stopped)
    }

    /// Writes a line to it.
    ///
    /// # Errors
    /// A program that has ended, or does not read.
    pub(super) fn tell(&mut self, question: &Value) -> Result<(), String> {
        self.input.send(question.to_string()).map_err(|_| self.ended())
    }

    /// The next line that it has written within this time, if it has.
    ///
    /// # Errors
    /// A program that has ended; a line that cannot be read.
    pub(super) fn heard(&mut self, patience: Duration) -> Result<Option<String>, String> {
        let mut heard = self.lines.recv_timeout(patience);
        if heard == Err(RecvTimeoutError::Timeout) {
            if !matches!(self.child.try_wait(), Ok(Some(_))) {
                return Ok(None);
            }
            // What it wrote before it ended may still be on its way.
            heard = self.lines.recv_timeout(LOOK);
        }
        match heard {
            Ok(line) => line.map(Some).map_err(|reason| format!("{} {reason}", self.name)),
            Err(_) => Err(self.ended()),
        }
    }

    /// The next line that it writes.
    ///
    /// # Errors
    /// A program that has ended, or does not answer in time; a run that was asked to stop.
    pub(super) fn answer(&mut self, patience: Duration, is_stopped: &dyn Fn() -> bool) -> Result<String, String> {
        let end = Instant::now() + patience;
        let mut has_ended = false;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(LOOK)) {
                Ok(line) => return line.map_err(|reason| format!("{} {reason}", self.name)),
                Err(RecvTimeoutError::Timeout) if is_stopped() => return Err("the run was asked to stop".into()),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    let text = format!("{} has not answered within {} s", self.name, patience.as_secs_f64());
                    return Err(text + &self.last_lines());
                }
                // A process that it has started may keep its output open.
                Err(RecvTimeoutError::Timeout) if !has_ended => {
                    has_ended = matches!(self.child.try_wait(), Ok(Some(_)));
                }
                Err(_) => return Err(self.ended()),
            }
        }
    }

    /// That it has ended, and how where it has by now: its output ends before it does.
    fn ended(&mut self) -> String {
        let status = (0..20).find_map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            self.child.try_wait().ok().flatten()
        });
        let status = status.map(|status| format!(" ({status})")).unwrap_or_default();
        format!("{} has ended{status}{}", self.name, self.last_lines())
    }

    /// The last lines that it wrote to its log.
    fn last_lines(&self) -> String {
        let Some((path, before)) = &self.log else { return String::new() };
        let bytes = fs::read(path).unwrap_or_default();
        let from = (*before).max((bytes.len() as u64).saturating_sub(SHOWN.0));
        let text = bytes.get(usize::try_from(from).unwrap_or(usize::MAX)..).map(String::from_utf8_lossy);
        let text = printable(text.unwrap_or_default().trim_end());
        let lines: Vec<&str> = text.lines().collect();
        match lines[lines.len().saturating_sub(SHOWN.1)..].join("\n  ") {
            last if last.is_empty() => String::new(),
            last => format!("\n  {last}\n  hint: {} has all that it wrote", path.display()),
        }
    }
}

impl Drop for Program {
    #[cfg_attr(unix, expect(unsafe_code, reason = "signals are matters of system calls"))]
    fn drop(&mut self) {
        // It may have ended already, and what it has started may not.
        #[cfg(unix)]
        if let Ok(group) = libc::pid_t::try_from(self.child.id()) {
            // SAFETY: a system call on numbers.
            unsafe { libc::killpg(group, libc::SIGKILL) };
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The variables that a program gets.
fn environment(named: &[String]) -> Result<Vec<(OsString, OsString)>, String> {
    if let Some(absent) = absent_variable(named) {
        return Err(absent);
    }
    let is_kept =
        |name: &str| KEPT.contains(&name) || name.starts_with("PYTHON") || named.iter().any(|own| own == name);
    Ok(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_kept)).collect())
}

/// What is wrong with the names of variables, if anything is.
pub(super) fn absent_variable(named: &[String]) -> Option<String> {
    let absent = named.iter().find(|name| std::env::var_os(name).is_none())?;
    Some(format!("`env` names {absent}, which is not set\n  hint: `export {absent}=...`, or leave it out"))
}

/// A log, to whose end is written, and its length.
pub(super) fn open(path: &Path) -> Result<(File, u64), String> {
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    Ok((file, length))
}

/// The next line of what a program writes; `None` at its end.
fn line_of(output: &mut impl io::BufRead) -> Option<Result<String, String>> {
    let mut line = Vec::new();
    let num_bytes = output.take(MAX_LINE_BYTES).read_until(b'\n', &mut line).ok()?;
    if num_bytes as u64 == MAX_LINE_BYTES {
        return Some(Err(format!("has written a line of more than {} MiB", MAX_LINE_BYTES >> 20)));
    }
    let text = String::from_utf8(line).map_err(|_| "has written a line that is no UTF-8".to_owned());
    (num_bytes > 0).then_some(text.map(|text| text.trim_end_matches(['\n', '\r']).to_owned()))
}

/// Text of which a terminal obeys nothing.
pub(super) fn printable(text: &str) -> String {
    let shown = |character: char| match character {
        '\n' | '\t' => character.to_string(),
        character if character.is_control() => character.escape_default().to_string(),
        character => character.to_string(),
    };
    text.chars().map(shown).collect()
}
