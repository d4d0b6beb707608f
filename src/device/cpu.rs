//! The processor: its name, threads and vector instructions.

use std::fs;
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod tiles;

/// Model name of the processor, as it calls itself: `AMD EPYC 9654 96-Core Processor`.
#[must_use]
pub fn cpu_model_name() -> String {
    let from_proc = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    from_proc.filter(|name| !name.is_empty()).unwrap_or_else(|| format!("{} processor", std::env::consts::ARCH))
}

/// Threads that this process may run at the same time (cgroup limits and affinity included).
#[must_use]
pub fn num_cpu_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Whether the kernels use AVX-512: where the processor has it, unless `LORA_TRAIN_NO_AVX512` is set, to measure what a
/// processor without it would do.
#[must_use]
pub fn has_avx512() -> bool {
    static HAS_IT: OnceLock<bool> = OnceLock::new();
    #[cfg(target_arch = "x86_64")]
    let find = || std::env::var_os("LORA_TRAIN_NO_AVX512").is_none() && std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    let find = || false;
    *HAS_IT.get_or_init(find)
}

/// Whether they multiply what is rounded to bfloat16 as such, in [pairs](has_bf16_pairs) or in [tiles](has_bf16_tiles).
/// Elsewhere it is multiplied in `f32`.
#[must_use]
pub fn has_bf16_products() -> bool {
    has_bf16_pairs() || has_bf16_tiles()
}

/// Whether pairs of bfloat16 are multiplied by AVX-512 BF16: where the processor has the instruction and is faster with it,
/// which is measured once in each process. `LORA_TRAIN_NO_BF16_PAIRS` leaves them out, and with them tiles, to measure
/// what a processor without them would do.
#[must_use]
pub fn has_bf16_pairs() -> bool {
    static HAS_THEM: OnceLock<bool> = OnceLock::new();
    *HAS_THEM.get_or_init(|| has_bf16_instructions() && bf16_pairs_pay())
}

/// Whether the kernels multiply tiles of such pairs (AMX), unless `LORA_TRAIN_NO_AMX` is set. What is no whole tile is
/// left to the instruction for pairs, so there are no tiles without it.
#[must_use]
pub fn has_bf16_tiles() -> bool {
    static HAS_THEM: OnceLock<bool> = OnceLock::new();
    #[cfg(target_arch = "x86_64")]
    let find = || std::env::var_os("LORA_TRAIN_NO_AMX").is_none() && has_bf16_instructions() && tiles::are_usable();
    #[cfg(not(target_arch = "x86_64"))]
    let find = || false;
    *HAS_THEM.get_or_init(find)
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "runs instructions after a check of the processor")]
fn bf16_pairs_pay() -> bool {
    // SAFETY: the processor has the instructions.
    unsafe { pairs::are_faster() }
}

#[cfg(not(target_arch = "x86_64"))]
fn bf16_pairs_pay() -> bool {
    false
}

/// Whether the processor has tiles that this process may use, whatever is left out.
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) fn processor_has_tiles() -> bool {
    tiles::are_usable()
}

/// Whether the processor has instructions for pairs of bfloat16, and AVX-512 is used.
fn has_bf16_instructions() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::env::var_os("LORA_TRAIN_NO_BF16_PAIRS").is_none()
        && has_avx512()
        && std::arch::is_x86_feature_detected!("avx512bf16")
        && std::arch::is_x86_feature_detected!("avx512bw");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Vector instructions that matter to matrix products, widest first: `AVX-512`, `AVX-512 BF16`, `AMX BF16`, `AVX2`, `FMA`, `NEON`.
#[must_use]
pub fn cpu_features() -> Vec<&'static str> {
    let mut features = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx512() {
            features.push("AVX-512");
        }
        if has_bf16_instructions() {
            features.push("AVX-512 BF16");
        }
        if has_bf16_tiles() {
            features.push("AMX BF16");
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            features.push("AVX2");
        }
        if std::arch::is_x86_feature_detected!("fma") {
            features.push("FMA");
        }
    }
    #[cfg(target_arch = "aarch64")]
    features.push("NEON");
    features
}

/// One line: `cpu (AMD EPYC 9654 96-Core Processor, 2 threads, AVX-512)`.
pub(super) fn label() -> String {
    let threads = num_cpu_threads();
    let plural = if threads == 1 { "" } else { "s" };
    let features: String = cpu_features().into_iter().take(1).map(|feature| format!(", {feature}")).collect();
    format!("cpu ({}, {threads} thread{plural}{features})", cpu_model_name())
}
