//! The sampler with a stand-in NVML, from the shared library to the figures.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{Bench, json as read_json, lora_train, stderr, steps, wait_until};
use lora_train::measure::telemetry::{NvmlSelector, Telemetry};
use serde_json::{Value, json};

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

const MIB: f64 = 1_048_576.0;

/// Waits for so many samples, however long a busy machine takes for them.
fn wait_for_samples(telemetry: &Telemetry, count: usize) {
    for _ in 0..count {
        let before = telemetry.seconds();
        wait_until("a sample", || telemetry.seconds() != before);
    }
}

#[test]
fn every_gpu_figure_comes_from_nvml_with_its_unit() {
    let folder = tempfile::tempdir().unwrap();
    let started = Instant::now();
    let telemetry =
        Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), Some(stand_in(folder.path(), None)));
    assert_eq!(telemetry.notice(), None);
    wait_for_samples(&telemetry, 30);
    let sample = telemetry.window();
    // Samples cycle through 60, 80, 100: the mean is near 80, whatever their number.
    let mean = sample.gpu_utilization_percent.unwrap();
    assert!((70.0..=90.0).contains(&mean), "{sample:?}");
    assert_eq!(sample.gpu_utilization_max_percent, Some(100.0));
    assert_eq!(sample.gpu_memory_used_bytes, Some(10 << 30));
    assert_eq!(sample.gpu_power_watts, Some(300.0));
    assert_eq!(sample.gpu_temperature_celsius, Some(61.0));
    assert!(sample.host_memory_bytes.unwrap() > 1 << 20);
    // The counter is at 7,000 J when first read and runs at 500 W.
    let energy = sample.energy_joules.unwrap();
    assert_eq!(telemetry.gpu(), Some("Stand-in H1, GPU-00112233-4455-6677-8899-aabbccddeeff"));
    assert_eq!((sample.gpu_sm_activity_percent, sample.gpu_memory_activity_percent), (Some(88.0), Some(44.0)));
    assert_eq!((sample.gpu_tensor_activity_percent, sample.gpu_float_activity_percent), (Some(31.0), Some(12.0)));
    assert_eq!((sample.gpu_sm_clock_mhz, sample.gpu_memory_clock_mhz), (Some(1755.0), Some(2619.0)));
    assert_eq!(telemetry.max_sm_clock_mhz(), Some(1980.0));
    assert_eq!((telemetry.power_limit_watts(), telemetry.default_power_limit_watts()), (Some(500.0), Some(700.0)));
    // Thermal throttling in every second sample.
    let throttles = sample.gpu_throttle_shares.unwrap();
    assert_eq!(throttles["power cap"], 1.0);
    assert!((0.4..=0.6).contains(&throttles["thermal slowdown"]), "{throttles:?}");
    let pcie = (sample.gpu_pcie_received_bytes_per_second, sample.gpu_pcie_sent_bytes_per_second);
    assert_eq!(pcie, (Some(300.0 * MIB), Some(200.0 * MIB)));
    assert_eq!(sample.gpu_other_processes_memory_bytes, Some(1 << 30));
    assert!(sample.host_available_bytes.unwrap() > 1 << 20);
    assert!(energy > 10.0 && energy < 500.0 * started.elapsed().as_secs_f64(), "{energy} J");
    // Energy counts from the start, not from the last window.
    wait_for_samples(&telemetry, 10);
    assert!(telemetry.window().energy_joules.unwrap() > energy);
    assert_eq!(telemetry.peak_gpu_memory_bytes(), Some(10 << 30));
    // A window shorter than the sampling interval has the latest figures instead of none.
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
        wait_for_samples(&telemetry, 5);
        assert_eq!(telemetry.window().gpu_memory_used_bytes, Some(20 << 30), "{uuid}");
    }
    let nobody = NvmlSelector::Uuid("00000000-0000-0000-0000-000000000000".into());
    let telemetry = Telemetry::start_with_library(10, Some(nobody), Some(library));
    let notice = telemetry.notice().unwrap();
    assert!(notice.contains("does not find the GPU with UUID 00000000-"), "{notice}");
    wait_for_samples(&telemetry, 5);
    assert_eq!(telemetry.window().gpu_memory_used_bytes, None);
}

#[test]
fn a_mig_slice_has_its_memory_its_counters_and_a_line_about_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let slice = || NvmlSelector::Uuid("01234567-89ab-cdef-0123-456789abcdef".into());
    let telemetry = Telemetry::start_with_library(10, Some(slice()), Some(stand_in(folder.path(), None)));
    let notice = telemetry.notice().unwrap();
    assert!(notice.contains("MIG slice: NVML gives its memory and what its counters say, the other GPU"), "{notice}");
    wait_for_samples(&telemetry, 10);
    let sample = telemetry.window();
    assert_eq!(sample.gpu_memory_used_bytes, Some(5 << 30));
    assert_eq!((sample.gpu_utilization_percent, sample.gpu_power_watts, sample.energy_joules), (None, None, None));
    // These belong to the slice, although the counters of the card are read.
    assert_eq!((sample.gpu_sm_activity_percent, sample.gpu_memory_activity_percent), (Some(44.0), Some(22.0)));
    assert_eq!((sample.gpu_tensor_activity_percent, sample.gpu_float_activity_percent), (Some(15.5), Some(6.0)));
    assert_eq!((sample.gpu_pcie_received_bytes_per_second, telemetry.max_sm_clock_mhz()), (None, None));
    assert_eq!((telemetry.power_limit_watts(), telemetry.default_power_limit_watts()), (None, None));

    let without = Telemetry::start_with_library(10, Some(slice()), Some(stand_in(folder.path(), Some("NO_GPM"))));
    assert!(without.notice().unwrap().contains("NVML gives its memory, the other GPU figures are absent"));
    wait_for_samples(&without, 10);
    let sample = without.window();
    assert_eq!((sample.gpu_memory_used_bytes, sample.gpu_sm_activity_percent), (Some(5 << 30), None));
}

#[test]
fn a_slice_that_is_not_found_is_not_taken_for_the_whole_card() {
    let folder = tempfile::tempdir().unwrap();
    let unknown = |prefix: &str| NvmlSelector::Uuid(format!("{prefix}00000000-0000-0000-0000-000000000000"));
    let start = |selector, machine| {
        Telemetry::start_with_library(10, Some(selector), Some(stand_in(folder.path(), Some(machine))))
    };
    // A virtual GPU has another UUID than CUDA's: the only card is used,
    let telemetry = start(unknown(""), "ONE_CARD");
    wait_for_samples(&telemetry, 5);
    assert_eq!((telemetry.notice(), telemetry.window().gpu_memory_used_bytes), (None, Some(10 << 30)));
    // but not if it is divided into slices, or a slice was named.
    for (selector, machine) in [(unknown(""), "CUT_CARD"), (unknown("MIG-"), "CUT_CARD"), (unknown("MIG-"), "ONE_CARD")]
    {
        let telemetry = start(selector, machine);
        let notice = telemetry.notice().unwrap();
        assert!(notice.contains("NVML does not find the GPU with UUID"), "{machine}: {notice}");
        wait_for_samples(&telemetry, 5);
        assert_eq!(telemetry.window().gpu_memory_used_bytes, None, "{machine}");
    }
}

#[test]
fn without_performance_counters_the_older_figures_stand_in() {
    let folder = tempfile::tempdir().unwrap();
    for machine in ["NO_GPM", "GPM_REFUSED", "METRICS_NOT_SUPPORTED", "METRICS_FAIL"] {
        let library = stand_in(folder.path(), Some(machine));
        let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), Some(library));
        wait_for_samples(&telemetry, 10);
        let sample = telemetry.window();
        assert_eq!(
            (sample.gpu_sm_activity_percent, sample.gpu_memory_activity_percent),
            (None, Some(11.0)),
            "{machine}"
        );
        let pcie = (sample.gpu_pcie_received_bytes_per_second, sample.gpu_pcie_sent_bytes_per_second);
        assert_eq!(pcie, (Some(3000.0 * 1024.0), Some(2000.0 * 1024.0)), "{machine}");
    }
}

#[test]
fn what_an_older_driver_lacks_is_absent_and_the_rest_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in(folder.path(), Some("OLD_DRIVER"));
    let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), Some(library));
    assert_eq!(telemetry.notice(), None);
    wait_for_samples(&telemetry, 10);
    let sample = telemetry.window();
    assert_eq!((sample.gpu_memory_used_bytes, sample.gpu_power_watts), (Some(10 << 30), Some(300.0)));
    assert_eq!(sample.gpu_memory_activity_percent, Some(11.0));
    assert_eq!(
        (sample.gpu_sm_clock_mhz, sample.gpu_memory_clock_mhz, sample.gpu_sm_activity_percent),
        (None, None, None)
    );
    assert_eq!((sample.gpu_throttle_shares, sample.gpu_other_processes_memory_bytes), (None, None));
    assert_eq!((sample.gpu_tensor_activity_percent, telemetry.max_sm_clock_mhz()), (None, None));
    assert_eq!((telemetry.power_limit_watts(), telemetry.default_power_limit_watts()), (None, None));
    assert_eq!((sample.gpu_pcie_received_bytes_per_second, sample.gpu_pcie_sent_bytes_per_second), (None, None));
}

/// Trains three steps on the processor with a stand-in; returns the lines, the summary and stderr.
fn trained_beside(library: &Path, visible: Option<&str>) -> (Vec<Value>, Value, String) {
    let settings = ["train.max_steps=3", "train.gradient_accumulation_steps=12", "logging.gpu_sample_ms=10"];
    trained_with(library, visible, &settings)
}

/// Trains three steps in the same way, with settings.
fn trained_with(library: &Path, visible: Option<&str>, settings: &[&str]) -> (Vec<Value>, Value, String) {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut args = vec![recipe.to_str().unwrap()];
    args.extend(settings.iter().flat_map(|set| ["--set", set]));
    let mut command = lora_train(&args);
    command.env("LORA_TRAIN_NVML", library).env_remove("CUDA_VISIBLE_DEVICES");
    visible.map(|visible| command.env("CUDA_VISIBLE_DEVICES", visible));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let dir = bench.path("run");
    (steps(&dir), read_json(&dir.join("summary.json")), stderr(&output))
}

#[test]
fn every_figure_of_nvml_arrives_in_the_lines_and_the_summary_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let library = PathBuf::from(stand_in(folder.path(), None));
    let (lines, summary, said) = trained_beside(&library, None);
    assert!(said.contains("GPU figures are those of Stand-in H1, GPU-00112233-"), "{said}");
    let line = lines.last().unwrap();
    let gib = |count: u64| count << 30;
    for (name, value) in [
        ("gpu_memory_used_bytes", gib(10).into()),
        ("gpu_power_watts", 300.0.into()),
        ("gpu_temperature_celsius", 61.0.into()),
        ("gpu_sm_activity_percent", 88.0.into()),
        ("gpu_memory_activity_percent", 44.0.into()),
        ("gpu_sm_clock_mhz", 1755.0.into()),
        ("gpu_memory_clock_mhz", 2619.0.into()),
        ("gpu_tensor_activity_percent", 31.0.into()),
        ("gpu_float_activity_percent", 12.0.into()),
        ("gpu_throttle_reasons", json!(["power cap", "thermal slowdown"])),
        ("gpu_pcie_received_bytes_per_second", (300.0 * MIB).into()),
        ("gpu_pcie_sent_bytes_per_second", (200.0 * MIB).into()),
        ("gpu_other_processes_memory_bytes", gib(1).into()),
    ] as [(&str, Value); 13]
    {
        assert_eq!(line[name], value, "{name} in {line}");
    }
    let tokens_per_second = line["tokens_per_second"].as_f64().unwrap();
    assert!((line["tokens_per_joule"].as_f64().unwrap() - tokens_per_second / 300.0).abs() < 1e-9, "{line}");
    assert_eq!(line["gpu_throttle_shares"]["power cap"], 1.0, "{line}");
    for name in ["gpu_utilization_percent", "gpu_utilization_max_percent", "energy_joules", "host_available_bytes"] {
        assert!(line[name].as_f64().unwrap() > 0.0, "{name} in {line}");
    }
    if cfg!(target_os = "linux") {
        for name in ["disk_read_bytes", "major_page_faults", "host_swapped_bytes", "worker_cpu_seconds"] {
            assert!(line[name].is_number(), "{name} in {line}");
        }
    }
    let number = |name: &str| summary[name].as_f64().unwrap_or_else(|| panic!("{name} in {summary}"));
    assert!((60.0..=100.0).contains(&number("mean_gpu_utilization_percent")), "{summary}");
    assert!(number("mean_cpu_utilization_percent") > 0.0 && number("energy_joules") > 0.0, "{summary}");
    assert!(number("telemetry_seconds") > 0.0, "{summary}");
    assert_eq!(summary["peak_gpu_memory_bytes"], gib(10));
    // Thermal throttling, and another process that holds a GiB of memory.
    let findings = summary["diagnosis"].as_array().unwrap();
    for (rule, verdict) in [
        ("throttled_thermal", "THERMAL THROTTLING: "),
        ("shared_gpu", "SHARED GPU: other processes hold 1.0 GiB of its memory"),
    ] {
        let finding = findings.iter().find(|finding| finding["rule"] == rule);
        let finding = finding.unwrap_or_else(|| panic!("no {rule} in {findings:#?}"));
        assert!(finding["verdict"].as_str().unwrap().starts_with(verdict), "{finding:#}");
        assert!(said.contains(verdict), "{said}");
    }
}

#[test]
fn gpus_and_slices_are_told_apart_by_what_cuda_is_allowed_to_see() {
    let folder = tempfile::tempdir().unwrap();
    let library = PathBuf::from(stand_in(folder.path(), None));
    for (visible, gib) in
        [("1,0", 20_u64), ("GPU-ffee", 20), ("GPU-00112233-4455", 10), ("MIG-01234567-89ab-cdef-0123-456789abcdef", 5)]
    {
        let (lines, _, said) = trained_beside(&library, Some(visible));
        assert_eq!(lines.last().unwrap()["gpu_memory_used_bytes"], gib << 30, "{visible}: {said}");
    }
}

#[test]
fn without_an_energy_counter_power_is_integrated() {
    let folder = tempfile::tempdir().unwrap();
    let library = stand_in(folder.path(), Some("NO_ENERGY_COUNTER"));
    let started = Instant::now();
    let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), Some(library));
    wait_for_samples(&telemetry, 30);
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
    let mut calls: Vec<Duration> = (0..1_000)
        .map(|_| {
            let started = Instant::now();
            std::hint::black_box(telemetry.window());
            started.elapsed()
        })
        .collect();
    // On a loaded machine, some of them lose their processor.
    calls.sort();
    assert!(calls[500] < Duration::from_micros(200), "{:?} a call", calls[500]);
}

#[test]
fn sampling_takes_less_than_half_a_percent_of_a_runs_time() {
    let folder = tempfile::tempdir().unwrap();
    let library = PathBuf::from(stand_in(folder.path(), None));
    let settings = ["train.max_steps=40", "train.gradient_accumulation_steps=8"];
    let (_, summary, _) = trained_with(&library, None, &settings);
    let number = |name: &str| summary[name].as_f64().unwrap_or_else(|| panic!("{name} in {summary}"));
    let (sampling, wall) = (number("telemetry_seconds"), number("wall_seconds"));
    assert!(sampling > 0.0 && sampling / wall < 0.005, "{sampling} s of {wall} s");
}
