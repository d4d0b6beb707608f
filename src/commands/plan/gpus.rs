//! GPUs to plan for without having one: memory and the dense `bf16` rate from their makers' data sheets.

/// A kind of GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gpu {
    /// As on the command line.
    pub(super) name: &'static str,
    /// Memory that programs can use, in MiB.
    pub(super) memory_mib: usize,
    /// Dense `bf16` products with sums in `f32`, in 10^12 floating-point operations a second.
    pub(super) teraflops: f64,
    /// Board power.
    pub(super) watts: f64,
}

const GPUS: [Gpu; 13] = [
    gpu("B200-180GB", 183_359, 2250.0, 1000.0),
    gpu("H200-141GB", 143_771, 989.0, 700.0),
    gpu("H100-80GB", 81_559, 989.0, 700.0),
    gpu("A100-80GB", 81_920, 312.0, 400.0),
    gpu("A100-40GB", 40_960, 312.0, 400.0),
    gpu("L40S-48GB", 46_068, 362.0, 350.0),
    gpu("RTX-5090-32GB", 32_607, 209.5, 575.0),
    gpu("RTX-4090-24GB", 24_564, 165.2, 450.0),
    gpu("RTX-3090-24GB", 24_576, 71.0, 350.0),
    gpu("A10-24GB", 23_028, 125.0, 150.0),
    gpu("L4-24GB", 23_034, 121.0, 72.0),
    gpu("RTX-4060-Ti-16GB", 16_380, 44.0, 165.0),
    gpu("RTX-3060-12GB", 12_288, 25.5, 170.0),
];

const fn gpu(name: &'static str, memory_mib: usize, teraflops: f64, watts: f64) -> Gpu {
    Gpu { name, memory_mib, teraflops, watts }
}

/// The GPU of this name, whatever its case; `H100` means the first of that model.
pub(super) fn find(name: &str) -> Option<Gpu> {
    let name = name.to_lowercase().replace([' ', '_'], "-");
    let matches = |gpu: &&Gpu| {
        let known = gpu.name.to_lowercase();
        known == name || known.rsplit_once('-').is_some_and(|(model, _)| model == name)
    };
    GPUS.iter().find(matches).copied()
}

/// All names, for messages.
pub(super) fn names() -> String {
    GPUS.iter().map(|gpu| gpu.name).collect::<Vec<_>>().join(", ")
}
