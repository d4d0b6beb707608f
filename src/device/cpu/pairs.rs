//! Whether products of bfloat16 pairs are faster than those of `f32`.
//!
//! AMD's processors start as many `vdpbf16ps` a cycle as `vfmadd231ps`, so pairs double the rate. Intel's start half as
//! many: the rate is that of `f32`, and rounding the operands comes on top.

use std::arch::x86_64::{_mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_set1_ps, _mm512_storeu_ps};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// What pairs must gain in arithmetic to pay for rounding and packing. Processors have either 1 or 2.
const LEAST_GAIN: f64 = 1.4;
/// Sums that are carried at a time: more than a product takes cycles, times those that begin in one.
const CHAINS: usize = 12;
/// Products of each sum in a measurement, some 10 microseconds.
const ROUNDS: usize = 2048;
/// Measurements of either, in turn. The shortest counts: whatever else runs only makes one longer.
const REPEATS: usize = 16;

/// Measures both instructions on vectors of 512 bits, in less than a millisecond.
///
/// # Safety
/// The processor must have AVX-512 F, BW and BF16.
#[expect(unsafe_code, reason = "calls instructions that only some processors have")]
pub(super) unsafe fn are_faster() -> bool {
    let mut shortest = [Duration::MAX; 2];
    for _ in 0..REPEATS {
        // SAFETY: by the caller's promise.
        for (shortest, multiply) in shortest.iter_mut().zip([multiply_f32 as unsafe fn(), multiply_pairs]) {
            let begun = Instant::now();
            // SAFETY: by the caller's promise.
            unsafe { multiply() };
            *shortest = begun.elapsed().min(*shortest);
        }
    }
    pay(shortest)
}

/// Whether pairs pay, by the seconds of as many instructions of either; one of pairs does the work of two of `f32`.
fn pay([f32, pairs]: [Duration; 2]) -> bool {
    2.0 * f32.as_secs_f64() > LEAST_GAIN * pairs.as_secs_f64()
}

/// Declares a function that keeps [`CHAINS`] sums going with one instruction.
macro_rules! measured {
    ($(#[$doc:meta])* $name:ident, |$sum:ident, $x:ident| $product:expr) => {
        $(#[$doc])*
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        fn $name() {
            let $x = _mm512_set1_ps(black_box(0.5));
            let mut sums = [$x; CHAINS];
            for _ in 0..ROUNDS {
                for $sum in &mut sums {
                    *$sum = $product;
                }
            }
            for sum in sums {
                let mut kept = [0.0_f32; 16];
                // SAFETY: the array has 512 bits.
                #[expect(unsafe_code, reason = "stores a vector")]
                unsafe {
                    _mm512_storeu_ps(kept.as_mut_ptr(), sum);
                }
                black_box(kept);
            }
        }
    };
}

measured!(
    /// Products of `f32`.
    multiply_f32, |sum, x| _mm512_fmadd_ps(x, x, *sum));
measured!(
    /// Products of pairs of bfloat16.
    multiply_pairs, |sum, x| _mm512_dpbf16_ps(*sum, pairs(x), pairs(x)));

/// Reinterprets the bits as the instruction's operand type.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn pairs(x: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512bh {
    // SAFETY: both types have 512 bits, and all bits are valid for both.
    #[expect(unsafe_code, reason = "changes a vector's type")]
    unsafe {
        std::mem::transmute(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_pay_where_as_many_of_them_start_in_a_cycle_and_not_where_half_as_many_do() {
        let ratio = |f32: u64, pairs| pay([f32, pairs].map(Duration::from_nanos));
        assert!(ratio(12_000, 12_000) && ratio(12_000, 15_000));
        assert!(!ratio(6_000, 12_000) && !ratio(6_000, 10_000));
    }

    #[test]
    #[expect(unsafe_code, reason = "calls instructions after a check of the processor")]
    fn a_measurement_gives_one_answer_on_a_busy_machine() {
        if !super::super::has_bf16_instructions() {
            return;
        }
        // SAFETY: checked above.
        let answers: Vec<bool> = (0..20).map(|_| unsafe { are_faster() }).collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    }
}
