//! GPUs to plan for without having them: memory, dense rates and board power from their makers' data sheets.

use crate::config::Precision;

/// A kind of GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gpu {
    /// Name on the command line.
    pub(super) name: &'static str,
    /// Name in the output of `nvidia-smi`.
    driver_name: &'static str,
    /// Memory available to programs, in MiB.
    pub(super) memory_mib: usize,
    /// Rate of dense `bf16` and `f16` products with sums in `f32`, in 10^12 floating-point operations a second.
    half_teraflops: f64,
    /// Rate of dense products of operands in `f32`, in 10^12 floating-point operations a second. From compute capability
    /// 8.0 on it is that of `tf32`, because burn's tuning uses tensor cores for `f32` where they support that type.
    f32_teraflops: f64,
    /// Board power.
    pub(super) watts: f64,
}

impl Gpu {
    /// Floating-point operations a second in a precision; `None` where the data sheet has no rate for it.
    pub(super) fn flops(&self, precision: Precision) -> Option<f64> {
        let is_before_bf16 = BEFORE_BF16.iter().any(|model| self.name.starts_with(model));
        let teraflops = match precision {
            Precision::F32 if !is_before_bf16 => self.f32_teraflops / PRODUCTS_OF_SPLIT,
            Precision::F32 | Precision::Tf32 => self.f32_teraflops,
            Precision::Bf16 if is_before_bf16 => return None,
            Precision::Bf16 | Precision::F16 => self.half_teraflops,
        };
        Some(teraflops * 1e12)
    }
}

/// Products of TF32 in one of `f32`.
pub(super) const PRODUCTS_OF_SPLIT: f64 = 3.0;

/// Models whose tensor cores multiply `f16` only.
const BEFORE_BF16: [&str; 2] = ["V100-", "T4-"];

/// A model name alone means the first of its sizes or shapes.
pub(super) const GPUS: [Gpu; 30] = [
    gpu("B200-180GB", "NVIDIA B200", 183_359, [2250.0, 1125.0], 1000.0),
    gpu("H200-141GB", "NVIDIA H200", 143_771, [989.0, 494.5], 700.0),
    gpu("H200-NVL-141GB", "NVIDIA H200 NVL", 143_771, [835.5, 417.5], 600.0),
    gpu("H100-80GB", "NVIDIA H100 80GB HBM3", 81_559, [989.0, 494.5], 700.0),
    gpu("H100-NVL-94GB", "NVIDIA H100 NVL", 95_830, [835.5, 417.5], 400.0),
    gpu("H100-PCIe-80GB", "NVIDIA H100 PCIe", 81_559, [756.0, 378.0], 350.0),
    gpu("GH200-96GB", "NVIDIA GH200 480GB", 97_871, [989.0, 494.5], 1000.0),
    gpu("A100-80GB", "NVIDIA A100-SXM4-80GB", 81_920, [312.0, 156.0], 400.0),
    gpu("A100-40GB", "NVIDIA A100-SXM4-40GB", 40_960, [312.0, 156.0], 400.0),
    gpu("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe", 81_920, [312.0, 156.0], 300.0),
    gpu("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB", 40_960, [312.0, 156.0], 250.0),
    gpu("L40S-48GB", "NVIDIA L40S", 46_068, [362.0, 183.0], 350.0),
    gpu("L40-48GB", "NVIDIA L40", 46_068, [181.0, 90.5], 300.0),
    gpu("RTX-6000-Ada-48GB", "NVIDIA RTX 6000 Ada Generation", 49_140, [364.2, 182.1], 300.0),
    gpu("RTX-A6000-48GB", "NVIDIA RTX A6000", 49_140, [154.8, 77.4], 300.0),
    gpu("A40-48GB", "NVIDIA A40", 46_068, [149.7, 74.8], 300.0),
    gpu("RTX-5090-32GB", "NVIDIA GeForce RTX 5090", 32_607, [209.5, 104.8], 575.0),
    gpu("RTX-5080-16GB", "NVIDIA GeForce RTX 5080", 16_303, [112.6, 56.3], 360.0),
    gpu("RTX-4090-24GB", "NVIDIA GeForce RTX 4090", 24_564, [165.2, 82.6], 450.0),
    gpu("RTX-4080-16GB", "NVIDIA GeForce RTX 4080", 16_376, [97.5, 48.7], 320.0),
    gpu("RTX-4060-Ti-16GB", "NVIDIA GeForce RTX 4060 Ti", 16_380, [44.0, 22.0], 165.0),
    gpu("RTX-3090-24GB", "NVIDIA GeForce RTX 3090", 24_576, [71.0, 35.6], 350.0),
    gpu("RTX-3080-10GB", "NVIDIA GeForce RTX 3080", 10_240, [59.5, 29.8], 320.0),
    gpu("RTX-3060-12GB", "NVIDIA GeForce RTX 3060", 12_288, [25.5, 12.7], 170.0),
    gpu("A10-24GB", "NVIDIA A10", 23_028, [125.0, 62.5], 150.0),
    gpu("L4-24GB", "NVIDIA L4", 23_034, [121.0, 60.0], 72.0),
    gpu("T4-16GB", "Tesla T4", 15_360, [65.0, 8.1], 70.0),
    gpu("V100-16GB", "Tesla V100-SXM2-16GB", 16_384, [125.0, 15.7], 300.0),
    gpu("V100-32GB", "Tesla V100-SXM2-32GB", 32_768, [125.0, 15.7], 300.0),
    gpu("V100-PCIe-16GB", "Tesla V100-PCIE-16GB", 16_384, [112.0, 14.0], 250.0),
];

const fn gpu(
    name: &'static str,
    driver_name: &'static str,
    memory_mib: usize,
    [half_teraflops, f32_teraflops]: [f64; 2],
    watts: f64,
) -> Gpu {
    Gpu { name, driver_name, memory_mib, half_teraflops, f32_teraflops, watts }
}

/// The GPU of this name, in any case: our name, with or without its memory, or the driver's. `H100` means the first of
/// that model. Where it is no name, all whose name has it as a part.
pub(super) fn find(name: &str) -> Vec<Gpu> {
    let name = plain(name);
    let matches = |gpu: &&Gpu| {
        let known = plain(gpu.name);
        known == name
            || known.rsplit_once('-').is_some_and(|(model, _)| model == name)
            || plain(gpu.driver_name) == name
    };
    if let Some(gpu) = GPUS.iter().find(matches) {
        return vec![*gpu];
    }
    GPUS.iter().filter(|gpu| !name.is_empty() && plain(gpu.name).contains(&name)).copied().collect()
}

/// A table of all.
pub(super) fn list() -> String {
    let row = |gpu: &Gpu| {
        let gib = (gpu.memory_mib + 512) / 1024;
        format!("{:<20}{gib:>5} GiB{:>14.0}{:>9.0} W", gpu.name, gpu.half_teraflops, gpu.watts)
    };
    let head = format!("{:<20}{:>9}{:>14}{:>11}", "--device", "memory", "half TFLOP/s", "power");
    std::iter::once(head).chain(GPUS.iter().map(row)).collect::<Vec<_>>().join("\n")
}

/// A name without maker and brand, in lower case, with hyphens.
fn plain(name: &str) -> String {
    let name = name.to_lowercase().replace([' ', '_'], "-");
    ["nvidia-", "geforce-", "tesla-"].iter().fold(name, |name, brand| name.trim_start_matches(brand).to_owned())
}

/// Names, for messages.
pub(super) fn names(gpus: &[Gpu]) -> String {
    gpus.iter().map(|gpu| gpu.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_found_by_model_with_or_without_their_memory_and_by_a_part_of_their_name() {
        assert_eq!(names(&find("h100-80gb")), "H100-80GB");
        assert_eq!(names(&find("RTX 4090")), "RTX-4090-24GB");
        assert_eq!(names(&find("A100")), "A100-80GB");
        assert_eq!(names(&find("v100")), "V100-16GB");
        assert_eq!(names(&find("4090")), "RTX-4090-24GB");
        assert_eq!(names(&find("rtx 30")), "RTX-3090-24GB, RTX-3080-10GB, RTX-3060-12GB");
        for name in ["cuda", "cuda:0", "auto", "cpu", "metal", "H1000", ""] {
            assert_eq!(find(name), [], "{name}");
        }
        assert_eq!(list().lines().count(), GPUS.len() + 1);
        assert!(list().contains("\nH100-80GB              80 GiB           989      700 W\n"), "{}", list());
    }

    #[test]
    fn every_gpu_is_found_by_the_names_that_it_has_here_and_with_its_driver() {
        for gpu in GPUS {
            assert_eq!(find(gpu.name), [gpu]);
            assert_eq!(find(gpu.driver_name), [gpu]);
        }
        assert_eq!(find("NVIDIA GeForce RTX 3080")[0].memory_mib, 10_240);
        assert_eq!(names(&find("Tesla V100-SXM2-32GB")), "V100-32GB");
    }

    #[test]
    fn rates_are_those_of_the_type_and_a_type_without_tensor_cores_has_none() {
        let rates = |name: &str| {
            [Precision::Tf32, Precision::Bf16, Precision::F16].map(|precision| find(name)[0].flops(precision))
        };
        assert_eq!(rates("H100"), [Some(494.5e12), Some(989e12), Some(989e12)]);
        assert_eq!(rates("T4"), [Some(8.1e12), None, Some(65e12)]);
        assert_eq!(rates("V100-32GB"), [Some(15.7e12), None, Some(125e12)]);
        // What rounds its operands takes three products for one of f32.
        let in_f32 = ["H100", "T4"].map(|name| find(name)[0].flops(Precision::F32).unwrap() * 1e-12);
        assert!((in_f32[0] - 164.8).abs() < 0.1 && in_f32[1] == 8.1, "{in_f32:?}");
        for gpu in GPUS {
            assert!(gpu.f32_teraflops < gpu.half_teraflops, "{}", gpu.name);
        }
    }
}
