//! `environment.json`: the information needed to repeat a run elsewhere.

use serde_json::{Value, json};

use crate::device::{self, DeviceKind, KernelCompiler, NCCL_VARIABLE, OpenDevice};
use crate::ops::cuda::{KERNELS_VARIABLE, kernel_state};

const BURN_VERSION: &str = "0.22.1";

/// Environment variables that change how a run computes.
const VARIABLES: [&str; 7] = [
    "RAYON_NUM_THREADS", "CUDA_VISIBLE_DEVICES", KERNELS_VARIABLE, NCCL_VARIABLE, "NCCL_ALGO", "HF_HUB_OFFLINE",
    "HF_HOME",
];

/// Program, machine and settings of this process, which trains on `device`. `starts`: how many starts have written into
/// the folder, including this one; `exchange`: what sums the gradients of several ranks. What is not known is absent. Secrets such as
/// `HF_TOKEN` are never read here.
pub(super) fn environment(device: &OpenDevice, starts: u64, exchange: Option<&str>) -> Value {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let variables = VARIABLES.into_iter().filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?.into())));
    let mut environment = json!({
        "lora_train_version": env!("CARGO_PKG_VERSION"),
        "git_commit": option_env!("LORA_TRAIN_GIT_COMMIT"),
        "burn_version": BURN_VERSION,
        "features": features(),
        "starts": starts,
        "command_line": std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>(),
        "directory": std::env::current_dir().ok().map(|directory| directory.to_string_lossy().into_owned()),
        "started_at": time::OffsetDateTime::now_utc().format(&time::format_description::well_known::Rfc3339).ok(),
        "device": device.label,
        "gpu": device.cuda,
        "f32_products_are_tf32": device.f32_products_are_tf32(),
        "cuda_kernels": kernel_state(&device.device),
        "gradients_summed_by": exchange,
        "os": sysinfo::System::long_os_version().unwrap_or_else(|| std::env::consts::OS.to_owned()),
        "kernel": sysinfo::System::kernel_version(),
        "architecture": std::env::consts::ARCH,
        "cpu": device::cpu_model_name(),
        "num_cpu_threads": device::num_cpu_threads(),
        "cpu_features": device::cpu_features(),
        "host_memory_bytes": system.total_memory(),
        "variables": variables.collect::<serde_json::Map<_, _>>(),
    });
    if let Some(facts) = environment.as_object_mut() {
        facts.retain(|_, fact| !fact.is_null());
    }
    environment
}

/// Cargo features of the binary: its backends, and the dashboard.
fn features() -> Vec<&'static str> {
    let backends = DeviceKind::ALL.into_iter().filter(|kind| *kind != DeviceKind::Cpu && kind.is_compiled_in());
    let name = |kind: DeviceKind| match (kind, KernelCompiler::OF_BUILD) {
        (DeviceKind::Cuda, KernelCompiler::Llvm) => "cuda-llvm",
        _ => kind.name(),
    };
    backends.map(name).chain(cfg!(feature = "tui").then_some("tui")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_the_machine_and_no_secret() {
        let environment = environment(&device::open("cpu").unwrap(), 1, None);
        assert!(environment["host_memory_bytes"].as_u64().unwrap() > 1 << 20);
        assert!(environment["num_cpu_threads"].as_u64().unwrap() >= 1);
        assert!(environment["device"].as_str().unwrap().starts_with("cpu (") && environment.get("gpu").is_none());
        assert_eq!(environment["f32_products_are_tf32"], false);
        assert!(!environment.to_string().contains("HF_TOKEN"), "{environment}");
    }

    #[test]
    fn the_recorded_burn_version_is_the_one_in_the_manifest() {
        let manifest = include_str!("../../Cargo.toml");
        assert!(manifest.contains(&format!("burn = {{ version = \"={BURN_VERSION}\"")));
    }
}
