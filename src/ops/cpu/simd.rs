//! Vectorised building blocks shared by the kernels: dispatch, exponentials, scratch memory, chunking.

use std::cell::RefCell;

use pulp::{Arch, Simd};

use crate::device::has_avx512;

/// Number of elements that one rayon task handles in an element-wise kernel.
///
/// Fixed, so that the order of every reduction, and with it every bit of the result, does not depend on the number
/// of threads.
pub(super) const CHUNK: usize = 16 * 1024;

/// Rows of `row_len` elements that make up about one [`CHUNK`].
pub(super) fn rows_per_chunk(row_len: usize) -> usize {
    (CHUNK / row_len.max(1)).max(1)
}

/// The instruction set of the kernels.
pub(super) fn arch() -> Arch {
    #[cfg(target_arch = "x86_64")]
    if !has_avx512()
        && let Some(simd) = pulp::x86::V3::try_new()
    {
        return Arch::V3(simd);
    }
    Arch::new()
}

/// Declares a function whose body is compiled once per instruction set and picked at run time.
///
/// `vectorised! { fn name<'a, S>(simd, x: &'a [f32]) -> f32 { .. } }` gives `fn name(x: &[f32]) -> f32`. The body sees
/// `S: pulp::Simd` and the token `simd: S`.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<'a, $S:ident>($simd:ident $(, $arg:ident : $ty:ty)* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<'a>($($arg: $ty),*) $(-> $ret)? {
            struct Call<'a> { $($arg: $ty,)* lifetime: ::std::marker::PhantomData<&'a ()> }
            impl<'a> ::pulp::WithSimd for Call<'a> {
                type Output = $crate::ops::cpu::simd::vectorised!(@ret $($ret)?);
                #[inline(always)]
                fn with_simd<$S: ::pulp::Simd>(self, $simd: $S) -> Self::Output {
                    let Call { $($arg,)* lifetime: _ } = self;
                    $body
                }
            }
            $crate::ops::cpu::simd::arch().dispatch(Call { $($arg,)* lifetime: ::std::marker::PhantomData })
        }
    };
    (@ret) => { () };
    (@ret $ret:ty) => { $ret };
}
pub(super) use vectorised;

/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum's mantissa.
pub(super) const ROUND: f32 = 12_582_912.0;
pub(super) const LN_2_HI: f32 = 0.693_359_4;
pub(super) const LN_2_LO: f32 = -2.121_944_4e-4;

// Minimax fits of (2^r - 1)/r on [-1/2, 1/2] and (e^r - 1)/r on [-ln 2 / 2, ln 2 / 2]: relative error 2.0e-9.
const EXP2_POLYNOMIAL: [f32; 6] =
    [0.693_147_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_5, 0.000_153_533_6];
pub(super) const EXP_POLYNOMIAL: [f32; 6] =
    [1.0, 0.499_999_94, 0.166_664_32, 0.041_668, 0.008_374_155_5, 0.001_384_365_3];

/// `1 + r * p(r)`.
#[inline(always)]
fn one_plus_polynomial<S: Simd>(simd: S, r: S::f32s, coefficients: [f32; 6]) -> S::f32s {
    let mut sum = simd.splat_f32s(coefficients[5]);
    for c in [coefficients[4], coefficients[3], coefficients[2], coefficients[1], coefficients[0], 1.0] {
        sum = simd.mul_add_e_f32s(sum, r, simd.splat_f32s(c));
    }
    sum
}

/// `2^n` for the integer that [`ROUND`] left in the low mantissa bits of `rounded`, n in [-127, 128].
#[inline(always)]
fn power_of_two<S: Simd>(simd: S, rounded: S::f32s) -> S::f32s {
    let bits = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(rounded), simd.splat_u32s(23));
    simd.transmute_f32s_u32s(simd.add_u32s(bits, simd.splat_u32s(127 << 23)))
}

/// `2^x` for `x <= 127`, within 2 ulp; 0 below the normal range (also at -inf), NaN at NaN.
#[inline(always)]
pub(super) fn exp2_bounded<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let rounded = simd.add_f32s(x, simd.splat_f32s(ROUND));
    let r = simd.sub_f32s(x, simd.sub_f32s(rounded, simd.splat_f32s(ROUND)));
    let value = simd.mul_f32s(one_plus_polynomial(simd, r, EXP2_POLYNOMIAL), power_of_two(simd, rounded));
    simd.select_f32s(simd.less_than_f32s(x, simd.splat_f32s(-126.0)), simd.splat_f32s(0.0), value)
}

/// What is left of `x` when a multiple of `ln 2` is taken from it, and that multiple, as [`power_of_two`] takes it.
#[inline(always)]
fn reduced<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let rounded = simd.mul_add_e_f32s(x, simd.splat_f32s(std::f32::consts::LOG2_E), simd.splat_f32s(ROUND));
    let n = simd.sub_f32s(rounded, simd.splat_f32s(ROUND));
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(-LN_2_HI), x);
    (simd.mul_add_e_f32s(n, simd.splat_f32s(-LN_2_LO), r), rounded)
}

/// `e^x` within 2 ulp; 0 where the result would be subnormal, infinity from 88.37 on, NaN at NaN.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let (r, rounded) = reduced(simd, x);
    let value = simd.mul_f32s(one_plus_polynomial(simd, r, EXP_POLYNOMIAL), power_of_two(simd, rounded));
    let value = simd.select_f32s(simd.less_than_f32s(x, simd.splat_f32s(-87.33)), simd.splat_f32s(0.0), value);
    simd.select_f32s(simd.greater_than_f32s(x, simd.splat_f32s(88.37)), simd.splat_f32s(f32::INFINITY), value)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let one = simd.splat_f32s(1.0);
    simd.div_f32s(one, simd.add_f32s(one, exp(simd, simd.neg_f32s(x))))
}

/// `tanh(x)` within 4 ulp, NaN at NaN.
#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // From here on it is 1.
    let most = simd.splat_f32s(9.1);
    let x = simd.select_f32s(simd.greater_than_f32s(x, most), most, x);
    let least = simd.neg_f32s(most);
    let x = simd.select_f32s(simd.less_than_f32s(x, least), least, x);
    let e = exp_less_one(simd, simd.add_f32s(x, x));
    simd.div_f32s(e, simd.add_f32s(e, simd.splat_f32s(2.0)))
}

/// `e^x - 1` for `x` within 30 of 0, without cancellation.
#[inline(always)]
fn exp_less_one<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let (r, rounded) = reduced(simd, x);
    let mut sum = simd.splat_f32s(EXP_POLYNOMIAL[5]);
    for c in EXP_POLYNOMIAL[..5].iter().rev() {
        sum = simd.mul_add_e_f32s(sum, r, simd.splat_f32s(*c));
    }
    let power = power_of_two(simd, rounded);
    simd.mul_add_e_f32s(power, simd.mul_f32s(r, sum), simd.sub_f32s(power, simd.splat_f32s(1.0)))
}

/// Sum of products of two equally long slices, in four interleaved chains of vectors.
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let (x_body, x_tail) = S::as_simd_f32s(x);
    let (y_body, y_tail) = S::as_simd_f32s(y);
    let zero = simd.splat_f32s(0.0);
    let mut sums = [zero; 4];
    let (x_quads, x_rest) = pulp::as_arrays::<4, _>(x_body);
    let (y_quads, y_rest) = pulp::as_arrays::<4, _>(y_body);
    for (x, y) in x_quads.iter().zip(y_quads) {
        for lane in 0..4 {
            sums[lane] = simd.mul_add_e_f32s(x[lane], y[lane], sums[lane]);
        }
    }
    for (x, y) in x_rest.iter().zip(y_rest) {
        sums[0] = simd.mul_add_e_f32s(*x, *y, sums[0]);
    }
    if !x_tail.is_empty() {
        sums[1] = simd.mul_add_e_f32s(simd.partial_load_f32s(x_tail), simd.partial_load_f32s(y_tail), sums[1]);
    }
    simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3])))
}

/// The vector at the start of `x`.
#[inline(always)]
pub(super) fn load<S: Simd>(x: &[f32]) -> S::f32s {
    S::as_simd_f32s(&x[..S::F32_LANES]).0[0]
}

/// Writes a vector to the start of `x`.
#[inline(always)]
pub(super) fn store<S: Simd>(x: &mut [f32], value: S::f32s) {
    S::as_mut_simd_f32s(&mut x[..S::F32_LANES]).0[0] = value;
}

/// A pointer that rayon tasks share to write disjoint parts of one slice.
#[derive(Clone, Copy)]
pub(super) struct SharedMut(pub(super) *mut f32);

// SAFETY: each task dereferences the pointer only at indices that it alone owns; every use says which.
unsafe impl Send for SharedMut {}
// SAFETY: as above.
unsafe impl Sync for SharedMut {}

impl SharedMut {
    /// The pointer. A method makes closures capture the wrapper instead of the bare pointer.
    #[inline(always)]
    pub(super) fn get(self) -> *mut f32 {
        self.0
    }
}

const CACHE_LINE_FLOATS: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` on a cache-line aligned buffer of `len` floats with arbitrary contents; the thread keeps it for reuse.
///
/// Calls may nest, also when rayon runs another task on the thread meanwhile; each call gets its own buffer.
pub(super) fn with_scratch<R>(len: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = SCRATCH.with_borrow_mut(|pool| {
        // The smallest buffer that is large enough, otherwise the largest, which then grows.
        let best = (0..pool.len()).min_by_key(|&i| {
            let held = pool[i].len();
            if held >= len + CACHE_LINE_FLOATS { (false, held) } else { (true, usize::MAX - held) }
        });
        best.map(|i| pool.swap_remove(i)).unwrap_or_default()
    });
    if buffer.len() < len + CACHE_LINE_FLOATS {
        buffer = vec![0.0; len + CACHE_LINE_FLOATS];
    }
    let start = buffer.as_ptr().align_offset(4 * CACHE_LINE_FLOATS).min(CACHE_LINE_FLOATS);
    let result = work(&mut buffer[start..start + len]);
    SCRATCH.with_borrow_mut(|pool| pool.push(buffer));
    result
}

/// Memory from which buffers are taken, one behind the other.
pub(super) struct Scratch<'a>(pub(super) &'a mut [f32]);

impl<'a> Scratch<'a> {
    pub(super) fn take(&mut self, len: usize) -> &'a mut [f32] {
        let (taken, rest) = std::mem::take(&mut self.0).split_at_mut(len);
        self.0 = rest;
        taken
    }

    /// Likewise, of words of 32 bits.
    pub(super) fn take_words<W: bytemuck::Pod>(&mut self, len: usize) -> &'a mut [W] {
        bytemuck::cast_slice_mut(self.take(len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    vectorised! { fn exp_slice<'a, S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        for (x, y) in x.iter().zip(y) {
            let value = exp(simd, simd.splat_f32s(*x));
            *y = simd.reduce_max_f32s(value);
        }
    } }

    vectorised! { fn exp2_slice<'a, S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        for (x, y) in x.iter().zip(y) {
            let value = exp2_bounded(simd, simd.splat_f32s(*x));
            *y = simd.reduce_max_f32s(value);
        }
    } }

    vectorised! { fn tanh_slice<'a, S>(simd, x: &'a [f32], y: &'a mut [f32]) {
        for (x, y) in x.iter().zip(y) {
            let value = tanh(simd, simd.splat_f32s(*x));
            *y = simd.reduce_max_f32s(value);
        }
    } }

    fn worst_ulp(x: &[f32], y: &[f32], exact: impl Fn(f64) -> f64) -> f64 {
        x.iter().zip(y).fold(0.0, |worst: f64, (x, y)| {
            let exact = exact(f64::from(*x));
            let ulp = f64::from((exact as f32).next_up() - exact as f32);
            worst.max((f64::from(*y) - exact).abs() / ulp)
        })
    }

    #[test]
    fn exp_is_within_two_ulp_on_the_normal_range() {
        let x: Vec<f32> = (0..400_000).map(|i| -87.3 + 175.6 * i as f32 / 400_000.0).collect();
        let mut y = vec![0.0; x.len()];
        exp_slice(&x, &mut y);
        let worst = worst_ulp(&x, &y, f64::exp);
        assert!(worst < 2.0, "{worst} ulp");
    }

    #[test]
    fn exp2_is_within_two_ulp_on_the_normal_range() {
        let x: Vec<f32> = (0..400_000).map(|i| -126.0 + 252.0 * i as f32 / 400_000.0).collect();
        let mut y = vec![0.0; x.len()];
        exp2_slice(&x, &mut y);
        let worst = worst_ulp(&x, &y, f64::exp2);
        assert!(worst < 2.0, "{worst} ulp");
    }

    #[test]
    fn tanh_is_within_four_ulp_of_numbers_of_every_size() {
        let x: Vec<f32> = (0..400_000).map(|i| 1e-6 * 1.000_042_f32.powi(i)).collect();
        assert!(x[x.len() - 1] > 15.0);
        let negative: Vec<f32> = x.iter().map(|x| -x).collect();
        let (mut y, mut z) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        tanh_slice(&x, &mut y);
        tanh_slice(&negative, &mut z);
        let worst = worst_ulp(&x, &y, f64::tanh);
        assert!(worst < 4.0, "{worst} ulp");
        // Twice a negative number may be rounded to another multiple of ln 2.
        assert!(y.iter().zip(&z).all(|(y, z)| (y + z).abs() <= 4e-7 * y));
        let mut y = [0.0; 5];
        tanh_slice(&[f32::INFINITY, f32::NEG_INFINITY, 0.0, 1e30, f32::NAN], &mut y);
        assert_eq!(y[..4], [1.0, -1.0, 0.0, 1.0]);
        assert!(y[4].is_nan());
    }

    #[test]
    fn exponentials_are_right_at_the_edges() {
        let x = [f32::NEG_INFINITY, -1e9, -104.0, 0.0, f32::NAN];
        let mut y = [9.0; 5];
        exp_slice(&x, &mut y);
        assert_eq!(y[..4], [0.0, 0.0, 0.0, 1.0]);
        assert!(y[4].is_nan());
        exp2_slice(&x, &mut y);
        assert_eq!(y[1..4], [0.0, 2f32.powi(-104), 1.0]);
        assert_eq!(y[0], 0.0);
        assert!(y[4].is_nan());
        let mut y = [0.0; 2];
        exp_slice(&[89.0, f32::INFINITY], &mut y);
        assert_eq!(y, [f32::INFINITY; 2]);
    }

    #[test]
    fn nested_scratch_buffers_are_distinct_and_aligned() {
        with_scratch(100, |outer| {
            outer.fill(1.0);
            with_scratch(1000, |inner| {
                inner.fill(2.0);
                assert_eq!(inner.as_ptr().align_offset(64), 0);
            });
            assert!(outer.iter().all(|x| *x == 1.0));
        });
    }
}
