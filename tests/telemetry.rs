//! The sampler against a stand-in NVML, from the shared library to the figures.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use lora_train::telemetry::{NvmlSelector, Telemetry};

/// Compiles the stand-in. The build of this project needs a C compiler too, so `cc` is there where this runs.
fn stand_in(folder: &Path, define: Option<&str>) -> OsString {
    let library: PathBuf = folder.join(format!("libnvml-{}.so", define.unwrap_or("plain")));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/nvml_stand_in.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&library).arg(source);
    cc.args(define.map(|name| format!("-D{name}")));
    let status = cc.status().expect("a C compiler named cc");
    assert!(status.success(), "cc: {status}");
    library.into_os_string()
}

fn sleep_ms(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

#[test]
fn every_gpu_figure_comes_from_nvml_with_its_unit() {
    let folder = tempfile::tempdir().unwrap();
    let started = Instant::now();
    let telemetry =
        Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), Some(stand_in(folder.path(), None)));
    assert_eq!(telemetry.notice(), None);
    sleep_ms(300);
    let sample = telemetry.window();
    // Samples go 60, 80, 100 and again: the mean is near 80, whatever the number of samples.
    let mean = sample.gpu_utilization_percent.unwrap();
    assert!((70.0..=90.0).contains(&mean), "{sample:?}");
    assert_eq!(sample.gpu_utilization_max_percent, Some(100.0));
    assert_eq!(sample.gpu_memory_used_bytes, Some(10 << 30));
    assert_eq!(sample.gpu_power_watts, Some(300.0));
    assert_eq!(sample.gpu_temperature_celsius, Some(61.0));
    assert!(sample.host_memory_bytes.unwrap() > 1 << 20);
    // The counter stood at 7,000 J when it was first read and runs at 500 W.
    let energy = sample.energy_joules.unwrap();
    assert!(energy > 10.0 && energy < 500.0 * started.elapsed().as_secs_f64(), "{energy} J");
    // Energy is since the start, not since the last window.
    sleep_ms(100);
    assert!(telemetry.window().energy_joules.unwrap() > energy);
    assert_eq!(telemetry.peak_gpu_memory_bytes(), Some(10 << 30));
    // A window shorter than the sampling interval has the latest figures, not none.
    let at_once = telemetry.window();
    assert!(at_once.gpu_utilization_percent.is_some() && at_once.gpu_memory_used_bytes.is_some(), "{at_once:?}");
}

#[test]
fn a_gpu_is_found_by_the_uuid_that_cuda_gives() {
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in(folder.path(), None);
    for uuid in ["ffeeddcc-bbaa-9988-7766-554433221100", "GPU-ffeeddcc-bbaa-9988-7766-554433221100"] {
        let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Uuid(uuid.into())), Some(library.clone()));
        assert_eq!(telemetry.notice(), None);
        sleep_ms(50);
        assert_eq!(telemetry.window().gpu_memory_used_bytes, Some(20 << 30), "{uuid}");
    }
    let nobody = NvmlSelector::Uuid("00000000-0000-0000-0000-000000000000".into());
    let telemetry = Telemetry::start_with_library(10, Some(nobody), Some(library));
    let notice = telemetry.notice().unwrap();
    assert!(notice.contains("does not find the GPU with UUID 00000000-"), "{notice}");
    sleep_ms(50);
    assert_eq!(telemetry.window().gpu_memory_used_bytes, None);
}

#[test]
fn a_mig_slice_has_its_memory_and_a_line_about_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let slice = NvmlSelector::Uuid("01234567-89ab-cdef-0123-456789abcdef".into());
    let telemetry = Telemetry::start_with_library(10, Some(slice), Some(stand_in(folder.path(), None)));
    assert!(telemetry.notice().unwrap().contains("MIG slice"), "{:?}", telemetry.notice());
    sleep_ms(50);
    let sample = telemetry.window();
    assert_eq!(sample.gpu_memory_used_bytes, Some(5 << 30));
    assert_eq!((sample.gpu_utilization_percent, sample.gpu_power_watts, sample.energy_joules), (None, None, None));
}

#[test]
fn without_an_energy_counter_power_is_integrated() {
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in(folder.path(), Some("NO_ENERGY_COUNTER"));
    let started = Instant::now();
    let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), Some(library));
    sleep_ms(300);
    let energy = telemetry.window().energy_joules.unwrap();
    assert!(energy > 20.0 && energy <= 300.0 * started.elapsed().as_secs_f64(), "{energy} J");
}

#[test]
fn an_nvml_that_does_not_start_is_one_line_of_notice() {
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in(folder.path(), Some("INIT_FAILS"));
    let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), Some(library));
    let notice = telemetry.notice().unwrap();
    assert_eq!(notice, "no GPU figures: NVML cannot be loaded (NVIDIA driver is not loaded)");
    assert_eq!(telemetry.window().gpu_power_watts, None);
}

#[test]
fn asking_for_a_window_costs_the_training_loop_next_to_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let telemetry =
        Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), Some(stand_in(folder.path(), None)));
    let rounds = 1_000;
    let started = Instant::now();
    for _ in 0..rounds {
        std::hint::black_box(telemetry.window());
    }
    let per_call = started.elapsed() / rounds;
    assert!(per_call < Duration::from_micros(200), "{per_call:?} a call");
}
