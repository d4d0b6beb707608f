//! Measures a device: its fastest matrix product, its copy speed, and how exactly it multiplies.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Distribution, Tensor};
use gemm::Parallelism;

use super::Dtype;
use crate::util::panics::guarded;

/// How a device multiplies two matrices.
pub type Multiply = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;

/// Time that the measurement on a CPU may take.
const CPU_BUDGET: Duration = Duration::from_millis(100);

/// Time that the measurement on a GPU may take, once its kernels are tuned.
const GPU_BUDGET: Duration = Duration::from_millis(200);

/// Side lengths of the square products that are tried on a CPU.
const CPU_SIZES: [usize; 2] = [512, 1024];

/// Name of the file with the peaks of devices.
const PEAKS_FILE: &str = "peaks.json";

/// The build that measured: another has other kernels.
const BUILD: (&str, Option<&str>) = (env!("CARGO_PKG_VERSION"), option_env!("LORA_TRAIN_GIT_COMMIT"));

/// Side length of the square product that is timed on a GPU, whose kernels are tuned first, for seconds. The largest
/// one takes 0.4 GB in two-byte types and is faster there; in `f32` it is no faster.
fn gpu_size(dtype: Dtype, has_room: bool) -> usize {
    match (has_room, dtype) {
        (false, _) => 2048,
        (true, Dtype::F32) => 4096,
        (true, Dtype::Bf16 | Dtype::F16) => 8192,
    }
}

/// The fastest `f32` product of `gemm` on all threads, in FLOP/s.
pub(super) fn cpu_gemm_flops() -> Option<f64> {
    let (mut best, begun) = (0.0_f64, Instant::now());
    for n in CPU_SIZES {
        // A processor whose smaller product takes so long, as an emulated one, would take eight times that for the next.
        if begun.elapsed() > CPU_BUDGET {
            break;
        }
        let (a, b, mut c) = (vec![0.5_f32; n * n], vec![0.25_f32; n * n], vec![0.0_f32; n * n]);
        let started = Instant::now();
        // The first round also touches the pages of `c` and wakes the threads, so the best of several rounds counts.
        while started.elapsed() < CPU_BUDGET / 2 {
            let round = Instant::now();
            square_gemm(n, &mut c, &a, &b);
            best = best.max(square_gemm_flops(n) / round.elapsed().as_secs_f64());
        }
        std::hint::black_box(&c);
    }
    (best.is_finite() && best > 0.0).then_some(best)
}

/// `c = a * b`, all `[n, n]` and row-major.
#[expect(unsafe_code, reason = "the product of the crate gemm takes pointers")]
fn square_gemm(n: usize, c: &mut [f32], a: &[f32], b: &[f32]) {
    assert!(a.len() == n * n && b.len() == n * n && c.len() == n * n);
    let row = n.cast_signed();
    // SAFETY: the three slices hold n * n numbers each, as asserted, and the strides stay inside them; `c` is
    // borrowed mutably, so nothing aliases it.
    unsafe {
        gemm::gemm(
            n,
            n,
            n,
            c.as_mut_ptr(),
            1,
            row,
            false,
            a.as_ptr(),
            1,
            row,
            b.as_ptr(),
            1,
            row,
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}

/// The rate of a large product in a type, in FLOP/s, with the device synchronised at both ends.
///
/// `has_room`: 2 GiB of the device's memory are free. A GPU that runs full may not recover, so without room only small
/// matrices are multiplied.
pub(super) fn gpu_gemm_flops(device: &Device, dtype: Dtype, has_room: bool, multiply: Multiply) -> Option<f64> {
    let flops = guarded(|| time_products(device, dtype, gpu_size(dtype, has_room), multiply)).ok().flatten();
    // The model needs this memory more than another measurement would.
    device.memory_cleanup();
    flops.filter(|flops| flops.is_finite() && *flops > 0.0)
}

/// The peak of a device that an earlier run of this build kept in a folder.
pub(super) fn kept(folder: &Path, device: &str, dtype: Dtype) -> Option<f64> {
    let (build, flops) = read_peaks(folder).remove(&peak_name(device, dtype))?;
    (build == serde_json::json!(BUILD)).then_some(flops)
}

/// Keeps a peak for later runs, instead of one that another build measured.
pub(super) fn keep(folder: &Path, device: &str, dtype: Dtype, flops: f64) -> io::Result<()> {
    let mut peaks = read_peaks(folder);
    peaks.insert(peak_name(device, dtype), (serde_json::json!(BUILD), flops));
    std::fs::create_dir_all(folder)?;
    let file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer(&file, &peaks)?;
    file.persist(folder.join(PEAKS_FILE))?;
    Ok(())
}

fn peak_name(device: &str, dtype: Dtype) -> String {
    format!("{device} {dtype}")
}

/// Builds and rates in FLOP/s, by device and type; nothing if the file cannot be read.
fn read_peaks(folder: &Path) -> BTreeMap<String, (serde_json::Value, f64)> {
    let text = std::fs::read(folder.join(PEAKS_FILE)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// Rate of the product of two `[n, n]` matrices, in FLOP/s.
fn time_products(device: &Device, dtype: Dtype, n: usize, multiply: Multiply) -> Option<f64> {
    // Zeros and ones draw less power than real numbers and are multiplied faster.
    let random = || Tensor::<2>::random([n, n], Distribution::Normal(0.0, 0.02), (device, DType::from(dtype)));
    let (a, b) = (random(), random());
    Some(square_gemm_flops(n) / seconds_of(device, || multiply(a.clone(), b.clone()))?)
}

/// Seconds of an operation, the best of several rounds. The device is synchronised at both ends of each round.
fn seconds_of<const D: usize>(device: &Device, operation: impl Fn() -> Tensor<D>) -> Option<f64> {
    const ROUND: u32 = 8;
    let run = |times: u32| -> Option<()> {
        for _ in 0..times {
            // Held until it is queued: where operations are lazy, what nobody holds need not be computed.
            let result = operation();
            device.flush().ok()?;
            drop(result);
        }
        device.sync().ok()
    };
    // Compiles and tunes.
    run(1)?;
    let mut best = f64::INFINITY;
    let started = Instant::now();
    while started.elapsed() < GPU_BUDGET / 2 {
        let round = Instant::now();
        run(ROUND)?;
        best = best.min(round.elapsed().as_secs_f64() / f64::from(ROUND));
    }
    Some(best)
}

/// Bytes read and written per second by adding a number to a large tensor, the best of several rounds.
#[expect(clippy::cast_precision_loss, reason = "2^32 is exact")]
pub(super) fn copy_bytes_per_second(device: &Device) -> Option<f64> {
    /// Numbers in the tensor, 256 MiB: more than any cache holds.
    const COPIED: usize = 64 << 20;
    let from = Tensor::<1>::ones([COPIED], (device, DType::F32));
    let seconds = seconds_of(device, || from.clone() + 1.0)?;
    device.memory_cleanup();
    Some((2 * COPIED * size_of::<f32>()) as f64 / seconds)
}

/// Largest relative error of a product of `1 + 2^-12`, which TF32 and `f16` round to 1, with ones. The 256 terms and
/// their sums are exact in `f32`, and there are enough of them for the tuner to consider kernels for tensor cores.
pub(super) fn product_error(device: &Device, dtype: Dtype, multiply: Multiply) -> Option<f64> {
    const N: u16 = 256;
    const FACTOR: f64 = 1.0 + 1.0 / 4096.0;
    let factor = |value| Tensor::<2>::full([usize::from(N); 2], value, (device, DType::from(dtype)));
    let product = multiply(factor(FACTOR), factor(1.0)).try_into_data().ok()?;
    let exact = f64::from(N) * FACTOR;
    product.iter::<f64>().map(|value| (value / exact - 1.0).abs()).reduce(f64::max)
}

/// Floating-point operations of a product of two `[n, n]` matrices.
#[allow(clippy::cast_precision_loss, reason = "n is at most 8192")]
fn square_gemm_flops(n: usize) -> f64 {
    2.0 * (n as f64).powi(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_product_that_is_timed_is_the_product() {
        let n = 64;
        let a: Vec<f32> = (0..7_u8).map(f32::from).cycle().take(n * n).collect();
        let b: Vec<f32> = (0..5_u8).map(f32::from).cycle().take(n * n).collect();
        let mut c = vec![f32::NAN; n * n];
        square_gemm(n, &mut c, &a, &b);
        let expected: f32 = (0..n).map(|k| a[3 * n + k] * b[k * n + 9]).sum();
        assert!((c[3 * n + 9] - expected).abs() < 1e-3, "{} against {expected}", c[3 * n + 9]);
    }

    #[test]
    fn the_cpu_peak_is_measured_in_a_fraction_of_a_second() {
        let started = Instant::now();
        let peak = cpu_gemm_flops().unwrap();
        // A minute is for a loaded machine.
        assert!(started.elapsed() < Duration::from_mins(1));
        assert!((1e8..1e15).contains(&peak), "{peak}");
    }

    #[test]
    fn a_full_gpu_is_measured_with_small_matrices_only() {
        for dtype in Dtype::ALL {
            assert_eq!(gpu_size(dtype, false), 2048);
            // Two factors and a product.
            let bytes = 3 * gpu_size(dtype, true).pow(2) * dtype.num_bytes();
            assert!(bytes < 1 << 30, "{dtype}: {bytes}");
        }
    }

    #[test]
    fn a_peak_is_kept_for_its_device_type_and_build() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("cache");
        assert_eq!(kept(&folder, "cuda:0 (NVIDIA H200)", Dtype::Bf16), None);
        keep(&folder, "cuda:0 (NVIDIA H200)", Dtype::Bf16, 7e14).unwrap();
        keep(&folder, "cuda:0 (NVIDIA H200)", Dtype::F32, 3e14).unwrap();
        keep(&folder, "cuda:0 (NVIDIA H200)", Dtype::Bf16, 8e14).unwrap();
        assert_eq!(kept(&folder, "cuda:0 (NVIDIA H200)", Dtype::Bf16), Some(8e14));
        assert_eq!(kept(&folder, "cuda:0 (NVIDIA H200)", Dtype::F32), Some(3e14));
        assert_eq!(kept(&folder, "cuda:0 (NVIDIA H100)", Dtype::Bf16), None);
        let file = folder.join(PEAKS_FILE);
        let older = std::fs::read_to_string(&file).unwrap().replace(BUILD.0, "0.0.9");
        std::fs::write(&file, older).unwrap();
        assert_eq!(kept(&folder, "cuda:0 (NVIDIA H200)", Dtype::Bf16), None);
    }

    #[test]
    fn a_product_of_rounded_factors_is_told_from_an_exact_one() {
        let error = |dtype| product_error(&Device::flex(), dtype, Tensor::matmul).unwrap();
        assert_eq!(error(Dtype::F32), 0.0);
        // As many bits of mantissa as TF32.
        assert!((2.3e-4..2.5e-4).contains(&error(Dtype::F16)), "{}", error(Dtype::F16));
    }

    #[test]
    fn the_product_of_a_device_is_timed_in_every_dtype() {
        for dtype in Dtype::ALL {
            let flops = time_products(&Device::flex(), dtype, 128, Tensor::matmul).unwrap();
            assert!((1e6..1e15).contains(&flops), "{dtype}: {flops}");
        }
    }
}
