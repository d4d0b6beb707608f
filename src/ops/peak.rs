//! The fastest matrix product of a device: the denominator of MFU.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use half::bf16;

use super::cpu::{self, Weight};
use super::product::device_product;
use crate::device::{Dtype, OpenDevice};

/// Time that the measurement of the CPU's `bf16` products may take.
const BUDGET: Duration = Duration::from_millis(100);

/// The fastest product measured on the device in this precision, in FLOP/s; `None` if nothing could be measured.
/// Measured at the first call, then remembered.
///
/// The CPU's `bf16` products come from [`cpu`], since burn has none; its `f16` is computed in `f32`.
#[must_use]
pub fn gemm_peak_flops(device: &OpenDevice, precision: Dtype) -> Option<f64> {
    static CPU_BF16: OnceLock<f64> = OnceLock::new();
    let peak = device.gemm_peak_flops(precision, device_product);
    if device.is_gpu() || precision != Dtype::Bf16 {
        return peak;
    }
    // Without the instruction, rounding makes a product slower than in f32; then the f32 rate is what can be reached.
    let bf16 = CPU_BF16.get_or_init(|| device.fastest(Dtype::Bf16, cpu_bf16_flops()));
    Some(bf16.max(peak.unwrap_or(0.0)))
}

fn cpu_bf16_flops() -> f64 {
    const N: usize = 1024;
    let (x, w, mut y) = (vec![0.5; N * N], vec![bf16::from_f32(0.25); N * N], vec![0.0; N * N]);
    #[expect(clippy::cast_precision_loss, reason = "2^31 is exact")]
    let flops = (2 * N * N * N) as f64;
    let started = Instant::now();
    let mut best = 0.0_f64;
    while started.elapsed() < BUDGET {
        let round = Instant::now();
        cpu::linear(&x, Weight::bf16(&w).rounding(true), N, N, &mut y, false);
        best = best.max(flops / round.elapsed().as_secs_f64());
    }
    best
}
