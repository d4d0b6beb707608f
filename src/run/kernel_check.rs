//! Kernels of our own, compared with the CPU's once for a GPU, a driver and a build, before anything rests on them.
//!
//! A kernel that writes where it must not would end the process on a GPU, so another process tries them out.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::device::{self, DeviceError, Dtype, OpenDevice};
use crate::ops::cuda::{self, Compared, KERNELS_VARIABLE};
use crate::util::{faults, files};

/// The results, by GPU, driver and build.
const FILE: &str = "kernels.json";
/// Locked while the results are written.
const LOCK_FILE: &str = "kernels.lock";
/// The driver compiles the kernels for the GPU first.
const TIMEOUT: Duration = Duration::from_mins(5);

/// Names the type of numbers of 16 bits for which `doctor --kernels` compares.
const NUMBERS_VARIABLE: &str = "LORA_TRAIN_COMPARED_NUMBERS";

/// Opens a device as [`device::open`] does, after its kernels for this precision were compared, unless that was done, and has those
/// left alone that are wrong.
pub(crate) fn open(name: &str, precision: Dtype) -> Result<OpenDevice, DeviceError> {
    let half = if precision == Dtype::F16 { precision } else { Dtype::Bf16 };
    let device = device::open_after(name, &|gpu| {
        // Whoever names kernels has decided.
        if std::env::var(KERNELS_VARIABLE).is_ok_and(|asked| !asked.is_empty()) {
            return;
        }
        let library = device::cublas_library().ok();
        let build = (env!("CARGO_PKG_VERSION"), option_env!("LORA_TRAIN_GIT_COMMIT"), cuda::digest());
        // Each build of the driver compiles the kernels anew.
        let driver = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
        let key = serde_json::json!([gpu.label(), driver, library, build, half]).to_string();
        cuda::leave_alone(kept_or(files::cache_folder().as_deref(), key, || compared(gpu.ordinal, half)));
    })?;
    // A plan counts on those that are used.
    let _ = cuda::kernel_state(&device.device);
    Ok(device)
}

/// What an earlier run has found and kept in a folder, or this one finds now. A process that failed may do so for another reason next
/// time.
fn kept_or(
    folder: Option<&Path>,
    key: String,
    compare: impl FnOnce() -> Result<Option<Vec<Compared>>, String>,
) -> Problems {
    if let Some(problems) = folder.and_then(|folder| read(folder).remove(&key)) {
        return problems;
    }
    let found = match compare() {
        Ok(Some(compared)) => problems(compared),
        Ok(None) => return Problems::new(),
        Err(reason) => return cuda::names().into_iter().map(|name| (name.to_owned(), reason.clone())).collect(),
    };
    // Without the file the next run compares.
    folder.map(|folder| keep(folder, key, found.clone()).ok());
    found
}

fn keep(folder: &Path, key: String, problems: Problems) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    // Ranks on one machine compare at the same time. Where there are no locks, one of them may compare again.
    let lock = File::create(folder.join(LOCK_FILE))?;
    drop(lock.lock());
    let mut kept = read(folder);
    kept.insert(key, problems);
    files::write(&folder.join(FILE), serde_json::to_vec(&kept)?)
}

/// What is wrong with kernels, by their names.
type Problems = BTreeMap<String, String>;

fn read(folder: &Path) -> BTreeMap<String, Problems> {
    let text = std::fs::read(folder.join(FILE)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// The first problem of each kernel.
fn problems(compared: Vec<Compared>) -> Problems {
    let mut problems = Problems::new();
    for Compared { kernel, what, problem, .. } in compared {
        if let Some(problem) = problem {
            problems.entry(kernel).or_insert_with(|| format!("{what}: {problem}"));
        }
    }
    problems
}

/// The types of numbers of 16 bits for which kernels are compared: all unless another process asks.
#[cfg(feature = "cuda-llvm")]
pub(crate) fn asked() -> Vec<Dtype> {
    let asked = std::env::var(NUMBERS_VARIABLE).ok();
    let is_asked = |half: &Dtype| asked.as_ref().is_none_or(|asked| *asked == half.to_string());
    [Dtype::Bf16, Dtype::F16].into_iter().filter(is_asked).collect()
}

/// What [`compared_by`] finds. After a kernel that ends all computing in its process, the others are compared without it.
fn compared(ordinal: u32, half: Dtype) -> Result<Option<Vec<Compared>>, String> {
    let (mut asked, mut ended) = ("all".to_owned(), Vec::new());
    loop {
        let Some(mut found) = compared_by(ordinal, half, &asked)? else { return Ok(None) };
        let last = found.iter().position(|row| row.problem.as_deref().is_some_and(faults::is_lasting));
        let Some(last) = last.filter(|_| ended.len() < cuda::names().len()) else {
            ended.extend(found);
            return Ok(Some(ended));
        };
        asked += &format!(",-{}", found[last].kernel);
        ended.push(found.swap_remove(last));
    }
}

/// `lora-train doctor --kernels` in a process of its own, with such numbers and kernels; `None` if it could not use the GPU, which may
/// admit one process only, another than these, or have no memory left.
fn compared_by(ordinal: u32, half: Dtype, kernels: &str) -> Result<Option<Vec<Compared>>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("the kernels could not be compared: {error}");
    let program = std::env::current_exe().map_err(|error| failed(&error))?;
    let mut command = Command::new(program);
    command.args(["doctor", "--json", "--kernels", &format!("cuda:{ordinal}")]);
    command.env(KERNELS_VARIABLE, kernels).env(NUMBERS_VARIABLE, half.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| failed(&error))?;
    let started = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| failed(&error))? {
            Some(status) => break status,
            None if started.elapsed() > TIMEOUT => {
                drop(child.kill());
                drop(child.wait());
                return Err(format!("they took longer than {} s to compare with the CPU's", TIMEOUT.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let mut text = String::new();
    child
        .stdout
        .take()
        .map(|mut stdout| stdout.read_to_string(&mut text))
        .transpose()
        .map_err(|error| failed(&error))?;
    // Ended as one whose arguments name no device that it can use.
    if status.code() == Some(2) {
        return Ok(None);
    }
    let found: Result<Vec<Compared>, _> = serde_json::from_str(&text);
    let is_memory = |row: &Compared| row.problem.as_deref().is_some_and(faults::is_out_of_memory);
    found
        .map(|found| (!found.iter().any(is_memory)).then_some(found))
        .map_err(|_| format!("a process that compared them with the CPU's ended with {status}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_compare_at_the_same_time_keep_what_each_found() {
        let folder = tempfile::tempdir().unwrap();
        let kept_or = |key: &str, found| kept_or(Some(folder.path()), key.to_owned(), || found);
        let keys: Vec<_> = (0..9).map(|ordinal| format!("cuda:{ordinal}")).collect();
        std::thread::scope(|scope| {
            for key in &keys {
                scope.spawn(move || kept_or(key, Ok(Some(Vec::new()))));
            }
        });
        kept_or("busy", Ok(None));
        assert_eq!(kept_or("killed", Err("killed".to_owned())).len(), cuda::names().len());
        assert_eq!(read(folder.path()).into_keys().collect::<Vec<_>>(), keys);
        assert_eq!(kept_or("cuda:0", Err("compared again".to_owned())), Problems::new());
    }

    #[test]
    fn a_kernel_has_its_first_problem() {
        let compared = |kernel: &str, problem: Option<&str>| Compared {
            kernel: kernel.to_owned(),
            what: "dq".to_owned(),
            error: None,
            problem: problem.map(str::to_owned),
        };
        let found = vec![compared("attention", None), compared("attention", Some("off")), compared("products", None)];
        assert_eq!(problems(found), Problems::from([("attention".to_owned(), "dq: off".to_owned())]));
    }
}
