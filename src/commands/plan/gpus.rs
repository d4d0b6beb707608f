//! GPUs to plan for without having them: memory, its rate, dense rates of products and board power from their makers' data sheets.

use crate::config::Precision;
use crate::device::{DeviceError, Dtype};
use crate::train::budget::gpu::GpuRates;

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
    /// Rate of its memory, in 10^9 bytes a second.
    memory_gigabytes: f64,
    /// Share of the rates of products that those of a step reach: 0.725 on an H200, by measurement, where power sets the clock. The
    /// others are assumed: 0.9 where the data sheet's rate is half of what the tensor cores could, less the less power there is.
    share: f64,
    /// Board power.
    pub(super) watts: f64,
}

impl Gpu {
    /// Checks that it computes in all of these types, as training does.
    ///
    /// # Errors
    /// If it does not; the error lists the types that it computes in.
    pub(super) fn require(&self, dtypes: impl IntoIterator<Item = Dtype>) -> Result<(), DeviceError> {
        let supports = |dtype: &Dtype| *dtype != Dtype::Bf16 || !self.is_before_bf16();
        let Some(dtype) = dtypes.into_iter().find(|dtype| !supports(dtype)) else { return Ok(()) };
        let supported = Dtype::ALL.into_iter().filter(supports).collect();
        Err(DeviceError::UnsupportedDtype { dtype, device: self.name.to_owned(), supported })
    }

    fn is_before_bf16(&self) -> bool {
        BEFORE_BF16.iter().any(|model| self.name.starts_with(model))
    }

    /// What a step gets of it in a precision that it has.
    pub(super) fn rates(&self, precision: Precision) -> GpuRates {
        let teraflops = match precision {
            Precision::F32 if !self.is_before_bf16() => self.f32_teraflops / PRODUCTS_OF_SPLIT,
            Precision::F32 | Precision::Tf32 => self.f32_teraflops,
            Precision::Bf16 | Precision::F16 => self.half_teraflops,
        };
        GpuRates {
            product_flops: self.share * teraflops * 1e12,
            memory_bytes: SHARE_OF_MEMORY * self.memory_gigabytes * 1e9,
            is_hopper: precision == Precision::Bf16
                && ["H100", "H200", "GH200"].iter().any(|model| self.name.starts_with(model)),
            has_kernels: matches!(precision, Precision::Bf16 | Precision::F16) && !self.name.starts_with("V100-"),
        }
    }
}

/// Products of TF32 in one of `f32`, and the time of splitting its operands in one of them, on an H200.
pub(super) const PRODUCTS_OF_SPLIT: f64 = 4.0;

/// Share of the memory's rate that kernels reach that do little else, on an H200.
const SHARE_OF_MEMORY: f64 = 0.75;

/// Models whose tensor cores multiply `f16` only.
const BEFORE_BF16: [&str; 2] = ["V100-", "T4-"];

/// A model name alone means the first of its sizes or shapes.
pub(super) const GPUS: [Gpu; 30] = [
    gpu("B200-180GB", "NVIDIA B200", 183_359, [2250.0, 1125.0], [8000.0, 0.65], 1000.0),
    gpu("H200-141GB", "NVIDIA H200", 143_771, [989.0, 494.5], [4800.0, 0.725], 700.0),
    gpu("H200-NVL-141GB", "NVIDIA H200 NVL", 143_771, [835.5, 417.5], [4800.0, 0.7], 600.0),
    gpu("H100-80GB", "NVIDIA H100 80GB HBM3", 81_559, [989.0, 494.5], [3350.0, 0.7], 700.0),
    gpu("H100-NVL-94GB", "NVIDIA H100 NVL", 95_830, [835.5, 417.5], [3938.0, 0.6], 400.0),
    gpu("H100-PCIe-80GB", "NVIDIA H100 PCIe", 81_559, [756.0, 378.0], [2039.0, 0.6], 350.0),
    gpu("GH200-96GB", "NVIDIA GH200 480GB", 97_871, [989.0, 494.5], [4000.0, 0.7], 1000.0),
    gpu("A100-80GB", "NVIDIA A100-SXM4-80GB", 81_920, [312.0, 156.0], [2039.0, 0.8], 400.0),
    gpu("A100-40GB", "NVIDIA A100-SXM4-40GB", 40_960, [312.0, 156.0], [1555.0, 0.8], 400.0),
    gpu("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe", 81_920, [312.0, 156.0], [1935.0, 0.7], 300.0),
    gpu("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB", 40_960, [312.0, 156.0], [1555.0, 0.7], 250.0),
    gpu("L40S-48GB", "NVIDIA L40S", 46_068, [362.0, 183.0], [864.0, 0.65], 350.0),
    gpu("L40-48GB", "NVIDIA L40", 46_068, [181.0, 90.5], [864.0, 0.8], 300.0),
    gpu("RTX-6000-Ada-48GB", "NVIDIA RTX 6000 Ada Generation", 49_140, [364.2, 182.1], [960.0, 0.65], 300.0),
    gpu("RTX-A6000-48GB", "NVIDIA RTX A6000", 49_140, [154.8, 77.4], [768.0, 0.8], 300.0),
    gpu("A40-48GB", "NVIDIA A40", 46_068, [149.7, 74.8], [696.0, 0.75], 300.0),
    gpu("RTX-5090-32GB", "NVIDIA GeForce RTX 5090", 32_607, [209.5, 104.8], [1792.0, 0.88], 575.0),
    gpu("RTX-5080-16GB", "NVIDIA GeForce RTX 5080", 16_303, [112.6, 56.3], [960.0, 0.9], 360.0),
    gpu("RTX-4090-24GB", "NVIDIA GeForce RTX 4090", 24_564, [165.2, 82.6], [1008.0, 0.9], 450.0),
    gpu("RTX-4080-16GB", "NVIDIA GeForce RTX 4080", 16_376, [97.5, 48.7], [717.0, 0.9], 320.0),
    gpu("RTX-4060-Ti-16GB", "NVIDIA GeForce RTX 4060 Ti", 16_380, [44.0, 22.0], [288.0, 0.9], 165.0),
    gpu("RTX-3090-24GB", "NVIDIA GeForce RTX 3090", 24_576, [71.0, 35.6], [936.0, 0.88], 350.0),
    gpu("RTX-3080-10GB", "NVIDIA GeForce RTX 3080", 10_240, [59.5, 29.8], [760.0, 0.88], 320.0),
    gpu("RTX-3060-12GB", "NVIDIA GeForce RTX 3060", 12_288, [25.5, 12.7], [360.0, 0.9], 170.0),
    gpu("A10-24GB", "NVIDIA A10", 23_028, [125.0, 62.5], [600.0, 0.55], 150.0),
    gpu("L4-24GB", "NVIDIA L4", 23_034, [121.0, 60.0], [300.0, 0.45], 72.0),
    gpu("T4-16GB", "Tesla T4", 15_360, [65.0, 8.1], [320.0, 0.4], 70.0),
    gpu("V100-16GB", "Tesla V100-SXM2-16GB", 16_384, [125.0, 15.7], [900.0, 0.7], 300.0),
    gpu("V100-32GB", "Tesla V100-SXM2-32GB", 32_768, [125.0, 15.7], [900.0, 0.7], 300.0),
    gpu("V100-PCIe-16GB", "Tesla V100-PCIE-16GB", 16_384, [112.0, 14.0], [900.0, 0.65], 250.0),
];

const fn gpu(
    name: &'static str,
    driver_name: &'static str,
    memory_mib: usize,
    [half_teraflops, f32_teraflops]: [f64; 2],
    [memory_gigabytes, share]: [f64; 2],
    watts: f64,
) -> Gpu {
    Gpu { name, driver_name, memory_mib, half_teraflops, f32_teraflops, memory_gigabytes, share, watts }
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
    fn rates_are_those_of_the_type() {
        let rates = |name: &str| {
            let precisions = [Precision::F32, Precision::Tf32, Precision::F16, Precision::Bf16];
            precisions.map(|precision| find(name)[0].rates(precision).product_flops * 1e-12 / find(name)[0].share)
        };
        assert_eq!(rates("H100").map(f64::round), [124.0, 495.0, 989.0, 989.0]);
        assert_eq!(rates("T4")[..3].iter().map(|rate| rate.round()).collect::<Vec<_>>(), [8.0, 8.0, 65.0]);
        for gpu in GPUS {
            assert!(gpu.f32_teraflops < gpu.half_teraflops && (0.4..=0.9).contains(&gpu.share), "{}", gpu.name);
            // A card computes hundreds of operations for each byte of its memory.
            let intensity = 1000.0 * gpu.half_teraflops / gpu.memory_gigabytes;
            assert!((70.0..450.0).contains(&intensity), "{} {intensity}", gpu.name);
        }
    }

    #[test]
    fn a_card_without_bf16_is_refused_in_the_words_of_training() {
        let require = |name: &str, dtypes: &[Dtype]| find(name)[0].require(dtypes.iter().copied());
        let error = require("T4", &[Dtype::F16, Dtype::Bf16]).unwrap_err().to_string();
        assert_eq!(error, "T4-16GB does not compute in `bf16`\n  hint: use `f32` or `f16`");
        assert_eq!(require("V100-32GB", &[Dtype::F16, Dtype::F32]), Ok(()));
        assert_eq!(require("A100", &[Dtype::Bf16]), Ok(()));
    }
}
