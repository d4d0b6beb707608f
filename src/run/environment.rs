//! `environment.json`: the information needed to repeat a run elsewhere.

use serde::Serialize;

use crate::device::{self, CudaGpu, DeviceKind};

/// Program, machine and settings of a run. Secrets such as `HF_TOKEN` are never read here.
#[derive(Clone, Debug, Serialize)]
pub struct Environment {
    /// Version of this program.
    pub lora_train_version: &'static str,
    /// Commit that the binary was built from; absent where the build did not know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub git_commit: Option<&'static str>,
    /// Version of burn.
    pub burn_version: &'static str,
    /// Cargo features of the binary.
    pub features: Vec<&'static str>,
    /// Number of starts that have written into this folder, including this one.
    pub starts: u64,
    /// The command line; invalid UTF-8 is shown as a replacement character.
    pub command_line: Vec<String>,
    /// Start of the run, RFC 3339, UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<String>,
    /// Description of the device that trains.
    pub device: String,
    /// The GPU that trains, as CUDA reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<CudaGpu>,
    /// Operating system and its version.
    pub os: String,
    /// Version of the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Processor architecture.
    pub architecture: &'static str,
    /// Name of the processor.
    pub cpu: String,
    /// Threads that this process may run in parallel.
    pub num_cpu_threads: usize,
    /// Vector instructions of the processor that affect training.
    pub cpu_features: Vec<&'static str>,
    /// Memory of the machine.
    pub host_memory_bytes: u64,
    /// Environment variables that change how a run computes; only those that are set.
    pub variables: std::collections::BTreeMap<&'static str, String>,
}

impl Environment {
    /// The environment of this process, which trains on `device`.
    #[must_use]
    pub fn of_this_process(device: &str) -> Self {
        let mut system = sysinfo::System::new();
        system.refresh_memory();
        Self {
            lora_train_version: env!("CARGO_PKG_VERSION"),
            git_commit: option_env!("LORA_TRAIN_GIT_COMMIT"),
            burn_version: "0.22.1",
            features: features(),
            starts: 1,
            command_line: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            started_at: time::OffsetDateTime::now_utc().format(&time::format_description::well_known::Rfc3339).ok(),
            device: device.to_owned(),
            gpu: None,
            os: sysinfo::System::long_os_version().unwrap_or_else(|| std::env::consts::OS.to_owned()),
            kernel: sysinfo::System::kernel_version(),
            architecture: std::env::consts::ARCH,
            cpu: device::cpu_model_name(),
            num_cpu_threads: device::num_cpu_threads(),
            cpu_features: device::cpu_features(),
            host_memory_bytes: system.total_memory(),
            variables: ["RAYON_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_HOME"]
                .into_iter()
                .filter_map(|name| Some((name, std::env::var(name).ok()?)))
                .collect(),
        }
    }
}

/// Cargo features of the binary: its backends, and the dashboard.
fn features() -> Vec<&'static str> {
    let backends = DeviceKind::ALL.into_iter().filter(|kind| *kind != DeviceKind::Cpu && kind.is_compiled_in());
    backends.map(DeviceKind::name).chain(cfg!(feature = "tui").then_some("tui")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_the_machine_and_no_secret() {
        let environment = Environment::of_this_process("cpu");
        assert!(environment.host_memory_bytes > 1 << 20);
        assert!(environment.num_cpu_threads >= 1);
        let json = serde_json::to_string(&environment).unwrap();
        assert!(json.contains("\"device\":\"cpu\""), "{json}");
        assert!(!json.contains("HF_TOKEN"), "{json}");
    }

    #[test]
    fn the_recorded_burn_version_is_the_one_in_the_manifest() {
        let manifest = include_str!("../../Cargo.toml");
        assert!(
            manifest
                .contains(&format!("burn = {{ version = \"={}\"", Environment::of_this_process("cpu").burn_version))
        );
    }
}
