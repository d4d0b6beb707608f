//! `lora-train doctor --json` with a stand-in driver.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::lora_train;
use serde_json::{Value, json};

/// Its output on a machine with two GPUs, the first full and the second divided, with `visible` in
/// `CUDA_VISIBLE_DEVICES`.
fn doctor(folder: &Path, visible: Option<&str>, is_complete: bool) -> Value {
    let nvml = folder.join("libnvml.so");
    // The build of this project needs a C compiler too, so `cc` is there where this runs.
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-DFULL_GPU", "-o"]).arg(&nvml).arg("tests/fixtures/nvml_stand_in.c");
    assert!(cc.status().unwrap().success());
    let mut command = lora_train(&["doctor", "--json"]);
    command.env("LORA_TRAIN_NVML", &nvml).env("HF_HUB_OFFLINE", "1").env("HF_TOKEN", "hf_secret");
    command.env_remove("CUDA_VISIBLE_DEVICES").env("CUDA_PATH", folder.join("toolkit"));
    if let Some(visible) = visible {
        command.env("CUDA_VISIBLE_DEVICES", visible);
    }
    if is_complete {
        let headers = folder.join("toolkit/include");
        for header in ["cuda_fp16.h", "cuda_bf16.h", "mma.h", "cooperative_groups.h", "crt/mma.h", "nv/target"] {
            fs::create_dir_all(headers.join(header).parent().unwrap()).unwrap();
            fs::write(headers.join(header), "").unwrap();
        }
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", crate::common::stderr(&output));
    assert!(!String::from_utf8_lossy(&output.stdout).contains("hf_secret"));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Problems about memory in use.
fn full(report: &Value) -> Vec<&str> {
    let problems = report["problems"].as_array().unwrap();
    assert!(problems.iter().all(|problem| !problem["remedy"].as_str().unwrap().is_empty()), "{problems:#?}");
    problems
        .iter()
        .filter_map(|problem| problem["problem"].as_str())
        .filter(|problem| problem.contains("in use"))
        .collect()
}

#[test]
#[cfg_attr(feature = "cuda-llvm", ignore = "without a GPU and NVRTC only")]
fn what_the_machine_offers_is_one_json_object() {
    let folder = tempfile::tempdir().unwrap();
    let report = doctor(folder.path(), None, true);
    let sections = ["program", "machine", "nvidia driver", "cuda libraries", "device cpu", "places", "hub", "problems"];
    for section in sections {
        assert!(report.get(section).is_some(), "{section} in {report:#}");
    }
    let driver = &report["nvidia driver"];
    assert_eq!((&driver["present"], &driver["version"]), (&json!(true), &json!("570.00.00")));
    let [first, second] = &driver["gpus"].as_array().unwrap()[..] else { panic!("{driver:#}") };
    assert_eq!(first["uuid"], "GPU-00112233-4455-6677-8899-aabbccddeeff");
    let gib = |count: u64| count << 30;
    let slice = json!({
        "name": "Stand-in H1",
        "uuid": "MIG-01234567-89ab-cdef-0123-456789abcdef",
        "memory_bytes": gib(80),
        "free_memory_bytes": gib(74),
    });
    assert_eq!(second["mig_slices"], json!([slice]));
    assert_eq!((first.get("mig_slices"), &first["free_memory_bytes"]), (None, &json!(gib(9))));
    assert_eq!((&first["visible"], &second["visible"]), (&json!(true), &json!(true)));
    assert_eq!(full(&report), ["71.0 GiB of the 80.0 GiB of Stand-in H1 are in use"]);
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let toolkit = json!({
        "path": path("toolkit"),
        "missing": [{ "file": "cuda/barrier", "package": "nvidia-cuda-cccl" }],
    });
    assert_eq!(report["cuda libraries"]["toolkit"], toolkit);
    assert_eq!(report["device cpu"]["dtypes"], json!(["f32", "bf16", "f16"]));
}

#[test]
fn a_full_gpu_that_cuda_does_not_see_is_no_problem() {
    let folder = tempfile::tempdir().unwrap();
    for (visible, expected) in [("1", [false, true]), ("MIG-01234567", [false, true]), ("GPU-0011,1", [true, true])] {
        let report = doctor(folder.path(), Some(visible), false);
        let driver = &report["nvidia driver"];
        let seen: Vec<&Value> = driver["gpus"].as_array().unwrap().iter().map(|gpu| &gpu["visible"]).collect();
        assert_eq!(seen, expected.map(|is_seen| json!(is_seen)).iter().collect::<Vec<_>>(), "{visible}: {driver:#}");
        assert_eq!(full(&report).is_empty(), !expected[0], "{visible}: {report:#}");
        assert_eq!(driver["CUDA_VISIBLE_DEVICES"], visible);
        assert_ne!(report["cuda libraries"]["toolkit"]["missing"], json!([]));
    }
}
