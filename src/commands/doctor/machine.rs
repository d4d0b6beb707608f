//! Processor and memory.

use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::{Section, flops};
use crate::device::{self, Dtype};
use crate::measure::telemetry::{available_host_memory_bytes, counts_processor_energy, total_host_memory_bytes};
use crate::ops::peak::gemm_peak_flops;
use crate::util::text;

/// Maximum time to measure the memory.
const BUDGET: Duration = Duration::from_millis(300);
/// Numbers in each of the two copied buffers: more than any cache holds.
const COPIED: usize = 32 << 20;
/// With less memory, little can be trained.
const LITTLE_MEMORY_BYTES: u64 = 1 << 30;

/// Examines the processor and the memory, and measures both.
pub(super) fn look() -> Section {
    let mut section = Section::new("machine");
    section.fact("os", sysinfo::System::long_os_version().unwrap_or_else(|| std::env::consts::OS.into()));
    if let Some(kernel) = sysinfo::System::kernel_version() {
        section.fact("kernel", kernel);
    }
    section.fact("cpu", device::cpu_model_name());
    let threads = device::num_cpu_threads();
    section.figure("cpu_threads", threads, threads.to_string());
    let features = device::cpu_features();
    section.figure("cpu_features", features.clone(), features.join(", "));
    if cfg!(target_arch = "x86_64") && !features.contains(&"AVX2") {
        section.problem(
            "the processor has no AVX2, so that training on it is several times slower than it could be",
            "train on a GPU or on another machine; in a virtual machine, let it see the host's processor",
        );
    }
    section.bytes("memory_bytes", total_host_memory_bytes());
    let available = available_host_memory_bytes();
    section.bytes("available_memory_bytes", available);
    if let Some(bytes) = available.filter(|bytes| *bytes < LITTLE_MEMORY_BYTES) {
        section.problem(
            format!("only {} of memory are available", text::bytes(bytes)),
            "end other programs, raise the container's limit or `ulimit -v`",
        );
    }
    let energy = if counts_processor_energy() { "counted" } else { "not counted: /sys/class/powercap may not be read" };
    section.fact("processor_energy", energy);
    if let Ok(cpu) = device::open("cpu") {
        for (name, dtype) in [("f32_gemm_flops", Dtype::F32), ("bf16_gemm_flops", Dtype::Bf16)] {
            if let Some(rate) = gemm_peak_flops(&cpu, dtype) {
                section.figure(name, rate.round(), format!("{} (measured)", flops(rate)));
            }
        }
    }
    section.fact("bf16_products", bf16_products(&features));
    let bandwidth = copy_bytes_per_second();
    let text = format!("{:.1} GB/s (measured, reading and writing)", bandwidth / 1e9);
    section.figure("memory_bandwidth_bytes_per_second", bandwidth.round(), text);
    section
}

/// How the kernels multiply what `train.precision = "bf16"` rounds.
fn bf16_products(features: &[&str]) -> &'static str {
    if device::has_bf16_tiles() {
        "in tiles (AMX)"
    } else if device::has_bf16_pairs() {
        "in pairs, faster than f32"
    } else if features.contains(&"AVX-512 BF16") {
        "in f32: this processor's pairs are no faster (measured)"
    } else {
        "in f32: this processor has none of its own"
    }
}

/// Bytes read and written per second while all threads copy, the best of several rounds.
#[expect(clippy::cast_precision_loss, reason = "2^28 is exact")]
fn copy_bytes_per_second() -> f64 {
    let (from, mut to) = (vec![1.0_f32; COPIED], vec![0.0_f32; COPIED]);
    let part = COPIED / rayon::current_num_threads().max(1) + 1;
    let started = Instant::now();
    let mut best = 0.0_f64;
    while started.elapsed() < BUDGET || best == 0.0 {
        let round = Instant::now();
        to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(|(to, from)| to.copy_from_slice(from));
        best = best.max((2 * size_of_val(&to[..])) as f64 / round.elapsed().as_secs_f64());
        std::hint::black_box(&mut to);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described_with_measured_rates() {
        let section = look();
        let number = |name: &str| {
            let fact = section.facts.iter().find(|fact| fact.name == name).unwrap();
            fact.value.as_f64().unwrap()
        };
        assert!(number("memory_bytes") >= number("available_memory_bytes"));
        // Between those of a very old and a very new machine.
        assert!((1e9..1e15).contains(&number("f32_gemm_flops")));
        assert!((1e8..1e13).contains(&number("memory_bandwidth_bytes_per_second")));
    }
}
