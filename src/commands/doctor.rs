//! `lora-train doctor`: what this machine offers for training, its problems, and how to fix them.
//!
//! The report goes to stdout, as text or as one JSON object. It changes nothing and never shows the access token.

mod devices;
mod machine;

use std::io::Write;
use std::path::Path;

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

use super::{print, print_text};
use crate::data::cache::CacheSettings;
use crate::device::DeviceKind;
use crate::hub::{Greeting, HubSettings, greet};
use crate::measure::telemetry::{disk_read_bytes_per_second, free_disk_bytes};
#[cfg(unix)]
use crate::train::ranks::mpi_libraries;
use crate::util::failure::Failure;
use crate::util::text::{self, Mark};

/// With less space, a model or a few checkpoints do not fit.
const LITTLE_DISK_BYTES: u64 = 2 << 30;

/// Written and read to measure a disk.
const TRIED_BYTES: usize = 64 << 20;

/// Arguments of `lora-train doctor`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Only compare the CUDA kernels of this program with the CPU's, on this device
    #[arg(long, value_name = "DEVICE", num_args = 0..=1, default_missing_value = "cuda")]
    pub(crate) kernels: Option<String>,
}

/// One subject of the report.
#[derive(Debug)]
struct Section {
    name: String,
    facts: Vec<Fact>,
    problems: Vec<Trouble>,
    /// What is missing and only some runs need.
    notes: Vec<Trouble>,
}

/// A fact, for programs and for people.
#[derive(Debug)]
struct Fact {
    name: &'static str,
    value: Value,
    text: String,
}

/// A problem and its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Trouble {
    problem: String,
    remedy: String,
}

impl Section {
    fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), facts: Vec::new(), problems: Vec::new(), notes: Vec::new() }
    }

    /// Adds a fact with one text for programs and people.
    fn fact(&mut self, name: &'static str, text: impl Into<String>) {
        let text = text.into();
        self.facts.push(Fact { name, value: Value::from(text.clone()), text });
    }

    /// Adds a figure whose unit is in its name, with a text for people.
    fn figure(&mut self, name: &'static str, value: impl Into<Value>, text: impl Into<String>) {
        self.facts.push(Fact { name, value: value.into(), text: text.into() });
    }

    fn bytes(&mut self, name: &'static str, bytes: Option<u64>) {
        if let Some(bytes) = bytes {
            self.figure(name, bytes, text::bytes(bytes));
        }
    }

    fn problem(&mut self, problem: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(Trouble { problem: problem.into(), remedy: remedy.into() });
    }

    fn note(&mut self, missing: impl Into<String>, remedy: impl Into<String>) {
        self.notes.push(Trouble { problem: missing.into(), remedy: remedy.into() });
    }

    fn mark(&self) -> Mark {
        match (&self.problems[..], &self.notes[..]) {
            ([], []) => Mark::Good,
            ([], _) => Mark::Note,
            _ => Mark::Bad,
        }
    }

    /// Adds an error of another module: its first line, and its hint as the remedy.
    fn refusal(&mut self, error: &impl ToString) {
        let text = error.to_string();
        let (problem, remedy) = text.split_once("\n  hint: ").unwrap_or((&text, "see the message"));
        self.problem(problem, remedy);
    }
}

/// Examines everything and prints the report.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    if let Some(device) = &args.kernels {
        return devices::compare_kernels(device, args.json);
    }
    let mut sections = vec![program(), machine::look()];
    sections.extend(devices::look());
    sections.push(ranks());
    sections.push(places());
    sections.push(hub(&HubSettings::from_env()));
    if args.json { print(&to_json(&sections).to_string()) } else { print_text(&to_text(&sections)) }
}

fn program() -> Section {
    let mut section = Section::new("program");
    section.fact("version", env!("CARGO_PKG_VERSION"));
    if let Some(commit) = option_env!("LORA_TRAIN_GIT_COMMIT") {
        section.fact("git_commit", commit);
    }
    let kinds: Vec<_> =
        DeviceKind::ALL.into_iter().filter(|kind| kind.is_compiled_in()).map(DeviceKind::name).collect();
    section.figure("backends", kinds.clone(), kinds.join(", "));
    section
}

/// The MPI libraries by which several processes share a run.
fn ranks() -> Section {
    let mut section = Section::new("ranks");
    #[cfg(unix)]
    let found = mpi_libraries();
    #[cfg(not(unix))]
    let found = Vec::<&str>::new();
    let text = match found[..] {
        [] => "no MPI library: one rank (openmpi-bin or mpich connects several GPUs or machines)".to_owned(),
        _ => format!("{}: `mpirun -n N lora-train RECIPE.toml`, one rank a GPU", found.join(", ")),
    };
    section.figure("mpi_libraries", found, text);
    section
}

/// The folders that runs read and write: the caches, the temporary folder and the working directory.
fn places() -> Section {
    let mut section = Section::new("places");
    let model_cache = HubSettings::from_env().cache;
    place("model_cache", &model_cache, "HF_HOME names another folder", &mut section);
    if let Some(rate) = rate_of_disk(&model_cache) {
        let text = format!("{:.1} GB/s, of the model cache's disk", rate / 1e9);
        section.figure("disk_read_bytes_per_second", rate.round(), text);
    }
    if let Some(folder) = CacheSettings::from_env().folder {
        place("token_cache", &folder, "LORA_TRAIN_CACHE names another folder", &mut section);
    }
    place("temporary_files", &std::env::temp_dir(), "TMPDIR names another folder", &mut section);
    let working_folder = std::env::current_dir().unwrap_or_else(|_| ".".into());
    place("working_folder", &working_folder, "`output_dir` takes runs elsewhere", &mut section);
    section
}

/// Rate at which the disk of a folder reads, measured at a file that is written for it.
fn rate_of_disk(folder: &Path) -> Option<f64> {
    let there = folder.ancestors().find(|folder| folder.is_dir())?;
    let mut file = tempfile::NamedTempFile::new_in(there).ok()?;
    // Bytes that no disk or file system makes smaller.
    let mut bytes = vec![0; TRIED_BYTES];
    ChaCha8Rng::seed_from_u64(0).fill_bytes(&mut bytes);
    file.write_all(&bytes).and_then(|()| file.as_file().sync_all()).ok()?;
    disk_read_bytes_per_second(file.path())
}

/// Examines a folder; `moved_by` is the setting that moves it.
fn place(name: &'static str, folder: &Path, moved_by: &str, section: &mut Section) {
    let shown = folder.display();
    // A cache that does not exist yet is created when needed.
    let Some(there) = folder.ancestors().find(|folder| folder.is_dir()) else {
        return section.problem(format!("{shown}: there is no such folder, nor one above it"), moved_by);
    };
    let free = free_disk_bytes(there);
    let free_text = free.map_or(String::new(), |bytes| format!(", {} free", text::bytes(bytes)));
    let value = json!({ "path": folder.to_string_lossy(), "free_bytes": free });
    section.figure(name, value, format!("{shown}{free_text}"));
    if let Err(error) = tempfile::tempfile_in(there) {
        section.problem(format!("{shown}: cannot be written ({error})"), moved_by);
    } else if let Some(bytes) = free.filter(|bytes| *bytes < LITTLE_DISK_BYTES) {
        section.problem(format!("{shown}: only {} are free", text::bytes(bytes)), moved_by);
    }
}

/// Access to the Hub, and the token.
fn hub(settings: &HubSettings) -> Section {
    let mut section = Section::new("hub");
    section.fact("endpoint", settings.endpoint.clone());
    section.fact("token", if settings.token.is_some() { "set (not shown)" } else { "none" });
    if settings.token.is_none() {
        let remedy = format!("set HF_TOKEN to one that is made at {}/settings/tokens", settings.endpoint);
        section.note("no access token: gated models and `push` need one", remedy);
    }
    let milliseconds = |time: std::time::Duration| format!("yes, in {} ms", time.as_millis());
    let local = "local folders and the cache work without it; else see the network, HTTPS_PROXY and HF_ENDPOINT";
    match greet(settings) {
        Greeting::Offline => section.fact("reachable", "not asked, HF_HUB_OFFLINE is set"),
        Greeting::Anonymous { time } => section.figure("reachable", true, milliseconds(time)),
        Greeting::Known { time, account } => {
            section.figure("reachable", true, milliseconds(time));
            section.fact("account", account);
        }
        Greeting::Refused => {
            section.figure("reachable", true, "yes");
            let remedy = format!("make a new one at {}/settings/tokens, or unset HF_TOKEN", settings.endpoint);
            section.problem("the Hub does not accept the access token", remedy);
        }
        Greeting::Trouble { reason } => {
            section.figure("reachable", false, "no");
            section.problem(format!("{} answers with an error: {reason}", settings.endpoint), local);
        }
        Greeting::Unreachable { reason } => {
            section.figure("reachable", false, "no");
            section.problem(format!("cannot reach {}: {reason}", settings.endpoint), local);
        }
    }
    section
}

fn to_json(sections: &[Section]) -> Value {
    let object = |section: &Section| {
        Value::from(section.facts.iter().map(|fact| (fact.name.to_owned(), fact.value.clone())).collect::<Map<_, _>>())
    };
    let mut all: Map<String, Value> = sections.iter().map(|section| (section.name.clone(), object(section))).collect();
    let problems = sections.iter().flat_map(|section| &section.problems);
    let problems: Vec<_> =
        problems.map(|trouble| json!({ "problem": trouble.problem, "remedy": trouble.remedy })).collect();
    all.insert("problems".into(), problems.into());
    all.into()
}

/// A verdict, then every section with its facts and what is wrong in it.
fn to_text(sections: &[Section]) -> String {
    let mut lines = vec![verdict(sections)];
    for section in sections {
        lines.push(format!("\n{} {}", section.mark(), section.name));
        lines.extend(section.facts.iter().map(|Fact { name, text, .. }| format!("    {:<22}  {text}", label(name))));
        let problems = section.problems.iter().map(|trouble| (Mark::Bad, trouble));
        for (mark, Trouble { problem, remedy }) in problems.chain(section.notes.iter().map(|note| (Mark::Note, note))) {
            lines.push(format!("  {mark} {problem}\n    → {remedy}"));
        }
    }
    lines.join("\n")
}

/// What can be trained on, and where problems are.
fn verdict(sections: &[Section]) -> String {
    let is_usable = |section: &&Section| section.facts.iter().any(|fact| fact.name == "usable" && fact.value == true);
    let devices: Vec<_> =
        sections.iter().filter(is_usable).map(|section| section.name.trim_start_matches("device ")).collect();
    let ready = if devices.is_empty() {
        format!("{} no device to train on", Mark::Bad)
    } else {
        format!("{} ready to train on: {}", Mark::Good, devices.join(", "))
    };
    let wrong = sections.iter().filter(|section| !section.problems.is_empty());
    let wrong: Vec<&str> = wrong.map(|section| section.name.as_str()).collect();
    if wrong.is_empty() {
        format!("{ready}; no problems found")
    } else {
        format!("{ready}; problems: {}", wrong.join(", "))
    }
}

/// The name of a fact without the unit, which the text has.
fn label(name: &str) -> String {
    let units = ["_bytes_per_second", "_bytes", "_flops"];
    units.iter().find_map(|unit| name.strip_suffix(unit)).unwrap_or(name).replace('_', " ")
}

/// A rate in FLOP/s, as text.
fn flops(rate: f64) -> String {
    if rate < 1e12 { format!("{:.0} GFLOP/s", rate / 1e9) } else { format!("{:.1} TFLOP/s", rate / 1e12) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Vec<Section> {
        let mut section = Section::new("machine");
        section.bytes("memory_bytes", Some(3 << 30));
        section.bytes("swap_bytes", None);
        section.refusal(&"device `cuda`: no driver\n  hint: install it");
        vec![section]
    }

    #[test]
    fn the_text_names_every_fact_and_every_problem_with_its_remedy() {
        let text = to_text(&example());
        assert!(text.starts_with("✗ no device to train on; problems: machine\n\n✗ machine\n"), "{text}");
        assert!(text.contains("    memory                  3.0 GiB\n"), "{text}");
        assert!(text.ends_with("  ✗ device `cuda`: no driver\n    → install it"), "{text}");
        let mut device = Section::new("device cpu");
        device.figure("usable", true, "yes");
        assert!(to_text(&[device]).starts_with("✓ ready to train on: cpu; no problems found\n\n✓ device cpu"));
    }

    #[test]
    fn the_json_has_plain_numbers() {
        let json = to_json(&example());
        assert_eq!(json["machine"], json!({ "memory_bytes": 3_u64 << 30 }));
        assert_eq!(json["problems"], json!([{ "problem": "device `cuda`: no driver", "remedy": "install it" }]));
    }

    #[test]
    fn the_token_is_reported_as_set_and_never_shown() {
        let variables = |name: &str| match name {
            "HF_TOKEN" => Some("hf_secret".to_owned()),
            "HF_ENDPOINT" => Some("http://127.0.0.1:9".to_owned()),
            _ => None,
        };
        let sections = [hub(&HubSettings::from_variables(variables))];
        let text = to_text(&sections);
        assert!(text.contains("    token                   set (not shown)\n"), "{text}");
        assert!(text.contains("  ✗ cannot reach http://127.0.0.1:9"), "{text}");
        assert!(!text.contains("hf_secret") && !to_json(&sections).to_string().contains("hf_secret"));
    }

    #[test]
    fn a_folder_that_is_not_there_yet_is_judged_by_the_one_above_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut section = Section::new("places");
        place("model_cache", &folder.path().join("a/b"), "HF_HOME", &mut section);
        assert_eq!(section.facts.len(), 1);
        assert!(section.problems.is_empty() || section.problems[0].problem.contains("are free"));
        assert!(section.facts[0].value["path"].as_str().unwrap().ends_with("a/b"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_that_cannot_be_written_is_a_problem_with_what_moves_it() {
        let mut section = Section::new("places");
        place("model_cache", Path::new("/proc/1"), "HF_HOME", &mut section);
        assert!(section.problems[0].problem.starts_with("/proc/1: cannot be written"), "{section:?}");
        assert_eq!(section.problems[0].remedy, "HF_HOME");
    }
}
