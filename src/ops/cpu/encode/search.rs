//! Searches of the scales of a group of numbers: those of ggml-quants.c, operation by operation in `f32`, for a row of
//! blocks at once.

use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use super::lanes::{Lanes, Mask, Row};

/// Declares a function that is compiled once for each instruction set, however many callers it has.
macro_rules! search {
    ($(#[$meta:meta])* fn $name:ident<$S:ident>($simd:ident $(, $arg:ident: $ty:ty)* $(,)?) -> $ret:ty $body:block) => {
        $(#[$meta])*
        pub(super) fn $name<'a, $S: Simd>($simd: $S, $($arg: $ty),*) -> $ret {
            struct Body<'a, $S: Simd>($S, $($ty,)* PhantomData<&'a ()>);
            impl<'a, $S: Simd> WithSimd for Body<'a, $S> {
                type Output = $ret;

                #[inline(always)]
                fn with_simd<T: Simd>(self, _: T) -> $ret {
                    let Self($simd, $($arg,)* _) = self;
                    $body
                }
            }
            $simd.vectorize(Body($simd, $($arg,)* PhantomData))
        }
    };
}

/// What is smaller than this is zero.
const TINY: f32 = 1e-15;

/// Candidates of a [scale and minimum](scale_and_minimum).
#[derive(Clone, Copy)]
pub(super) struct Candidates {
    /// The first one puts the numbers on this many codes more than there are.
    pub(super) start: f32,
    /// By which the next ones have more.
    pub(super) step: f32,
    /// Number of steps.
    pub(super) num_steps: usize,
    /// Errors are absolute ones instead of squares.
    pub(super) absolute: bool,
    /// Codes of candidates are brought between their bounds before they are rounded, not after. It makes a difference where the
    /// best offset so far is the largest number: what is beyond all bounds is no integer.
    pub(super) bounded: bool,
}

/// With an importance of each column.
pub(super) const MANY: Candidates =
    Candidates { start: -0.9, step: 0.05, num_steps: 36, absolute: false, bounded: true };

/// The number of largest magnitude, the first of several.
#[inline(always)]
pub(super) fn largest<S: Simd>(simd: S, x: &[Row<S>]) -> Lanes<S> {
    let mut largest = Lanes::splat(simd, 0.0);
    for x in x {
        let x = Lanes::new(simd, *x);
        largest = largest.abs().less(x.abs()).select(x, largest);
    }
    largest
}

/// The code of a number, between two bounds.
#[inline(always)]
fn code<S: Simd>(inverse: Lanes<S>, x: Lanes<S>, [lowest, highest]: [Lanes<S>; 2]) -> Lanes<S> {
    (inverse * x).near().max(lowest).min(highest)
}

/// As [`code`], for a candidate of several.
#[inline(always)]
fn candidate_code<S: Simd>(inverse: Lanes<S>, x: Lanes<S>, bounds: [Lanes<S>; 2], bounded: bool) -> Lanes<S> {
    if bounded { bounds[0].max(inverse * x).min(bounds[1]).near() } else { code(inverse, x, bounds) }
}

#[inline(always)]
fn penalty<S: Simd>(error: Lanes<S>, candidates: Candidates) -> Lanes<S> {
    if candidates.absolute { error.abs() } else { error * error }
}

/// Weighted sums of the products of codes and numbers, and of the squares of codes.
#[inline(always)]
fn sums<S: Simd>(simd: S, x: &[Row<S>], weights: &[Row<S>], inverse: Lanes<S>, bounds: [Lanes<S>; 2]) -> [Lanes<S>; 2] {
    let mut sums = [Lanes::splat(simd, 0.0); 2];
    for (x, w) in x.iter().zip(weights) {
        let (x, w) = (Lanes::new(simd, *x), Lanes::new(simd, *w));
        let code = code(inverse, x, bounds);
        sums = [sums[0] + w * x * code, sums[1] + w * code * code];
    }
    sums
}

search! {
    /// `scale` and `minimum` with the least weighted errors of `x = scale * code - minimum`, codes from 0 to `top` (`make_qkx2_quants`
    /// and `make_qkx3_quants`). Each candidate rounds on the grid that begins at the best offset so far.
    fn scale_and_minimum<S>(
        simd,
        x: &'a [Row<S>],
        weights: &'a [Row<S>],
        top: f32,
        candidates: Candidates,
        codes: &'a mut [Row<S>],
    ) -> [Lanes<S>; 2] {
        let splat = |x| Lanes::splat(simd, x);
        let row = |row: &Row<S>| Lanes::new(simd, *row);
        let zero = splat(0.0);
        let bounds = [zero, splat(top)];

        let first = row(&x[0]);
        let (mut low, mut high, mut sum_w) = (first, first, row(&weights[0]));
        let mut sum_x = sum_w * first;
        for (x, w) in x.iter().zip(weights).skip(1) {
            let (x, w) = (row(x), row(w));
            (low, high) = (low.min(x), high.max(x));
            (sum_w, sum_x) = (sum_w + w, sum_x + w * x);
        }
        low = low.min(zero);
        let spread = low.less(high);
        let lowest = low;

        let mut inverse = splat(top) / (high - low);
        let mut scale = splat(1.0) / inverse;
        let mut best = zero;
        for (x, w) in x.iter().zip(weights) {
            let x = row(x);
            best = best + row(w) * penalty(scale * code(inverse, x - low, bounds) + low - x, candidates);
        }
        let (mut offset, mut is_candidate) = (low, zero.less(zero));
        for step in 0..=candidates.num_steps {
            let tried = splat(candidates.start + candidates.step * step as f32 + top) / (high - low);
            let (mut sum_l, mut sum_ll, mut sum_lx) = (zero, zero, zero);
            for ((x, w), l) in x.iter().zip(weights).zip(codes.iter_mut()) {
                let x = row(x);
                let code = candidate_code(tried, x - low, bounds, candidates.bounded);
                let weighted = row(w) * code;
                sum_l = sum_l + weighted;
                sum_ll = sum_ll + weighted * code;
                sum_lx = sum_lx + weighted * x;
                *l = code.row;
            }
            let determinant = sum_w * sum_ll - sum_l * sum_l;
            let slope = (sum_w * sum_lx - sum_x * sum_l) / determinant;
            let start = (sum_ll * sum_x - sum_l * sum_lx) / determinant;
            let above = zero.less(start);
            let slope = above.select(sum_lx / sum_ll, slope);
            let start = above.select(zero, start);
            let mut sum = zero;
            for ((x, w), l) in x.iter().zip(weights).zip(codes.iter()) {
                sum = sum + row(w) * penalty(slope * row(l) + start - row(x), candidates);
            }
            let better = zero.less(determinant).and(sum.less(best));
            best = better.select(sum, best);
            scale = better.select(slope, scale);
            (inverse, offset) = (better.select(tried, inverse), better.select(low, offset));
            low = better.select(start, low);
            is_candidate = is_candidate.or(better);
        }
        for (x, l) in x.iter().zip(codes) {
            let x = row(x) - offset;
            let found = candidate_code(inverse, x, bounds, candidates.bounded);
            *l = spread.select(is_candidate.select(found, code(inverse, x, bounds)), zero).row;
        }
        let minimum = spread.select(low, lowest);
        [spread.select(scale, zero), minimum.negated()]
    }
}

search! {
    /// `scale` with the least weighted squares of `x = scale * (code - half)`, codes from 0 to `2 * half - 1` (`make_qx_quants`).
    fn signed_scale<S>(
        simd,
        x: &'a [Row<S>],
        weights: &'a [Row<S>],
        half: f32,
        codes: &'a mut [Row<S>],
    ) -> Lanes<S> {
        let splat = |x| Lanes::splat(simd, x);
        let zero = splat(0.0);
        let bounds = [splat(-half), splat(half - 1.0)];
        let largest = largest(simd, x);
        let (mut inverse, mut scale, mut best) = (zero, zero, zero);
        for step in [0, -9, -8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8, 9i8] {
            let tried = splat(-(half + 0.1 * f32::from(step))) / largest;
            let [lx, ll] = sums(simd, x, weights, tried, bounds);
            let some = zero.less(ll);
            let better = if step == 0 { some } else { some.and((best * ll).less(lx * lx)) };
            scale = better.select(lx / ll, scale);
            best = better.select(scale * lx, best);
            inverse = if step == 0 { tried } else { better.select(tried, inverse) };
        }
        let zeros = largest.abs().less(splat(TINY));
        for (x, l) in x.iter().zip(codes) {
            let code = code(inverse, Lanes::new(simd, *x), bounds) + splat(half);
            *l = zeros.select(zero, code).row;
        }
        zeros.select(zero, scale)
    }
}

search! {
    /// As [`signed_scale`] with squares as weights, by moving single codes (`make_q3_quants`).
    fn settled_scale<S>(
        simd,
        x: &'a [Row<S>],
        squares: &'a [Row<S>],
        half: f32,
        codes: &'a mut [Row<S>],
    ) -> Lanes<S> {
        let splat = |x| Lanes::splat(simd, x);
        let zero = splat(0.0);
        let bounds = [splat(-half), splat(half - 1.0)];
        let largest = largest(simd, x);
        let inverse = splat(-half) / largest;
        for (x, l) in x.iter().zip(codes.iter_mut()) {
            *l = code(inverse, Lanes::new(simd, *x), bounds).row;
        }
        let zeros = largest.abs().less(splat(TINY));
        let scale = settle(simd, x, squares, bounds, Codes::Signed, zeros, codes);
        for l in codes {
            *l = zeros.select(zero, Lanes::new(simd, *l) + splat(half)).row;
        }
        scale
    }
}

search! {
    /// `scale` with the least weighted squares of `x = scale * code` for numbers from 0 on, codes from 0 to `top` (`make_qp_quants`).
    /// ggml keeps them in bytes: the code of a negative number, which a search of scales rarely gives, is beyond `top`.
    fn scale_of_scales<S>(
        simd,
        x: &'a [Row<S>],
        weights: &'a [Row<S>],
        top: f32,
        codes: &'a mut [Row<S>],
    ) -> Lanes<S> {
        let splat = |x| Lanes::splat(simd, x);
        let zero = splat(0.0);
        let bounds = [splat(f32::NEG_INFINITY), splat(top)];
        let mut largest = zero;
        for x in x {
            largest = Lanes::new(simd, *x).max(largest);
        }
        let (mut inverse, mut best) = (zero, zero);
        for step in [0, -4, -3, -2, -1, 1, 2, 3, 4i8] {
            let tried = splat(0.1 * f32::from(step) + top) / largest;
            let (mut sum, scale) = (zero, splat(1.0) / tried);
            for (x, w) in x.iter().zip(weights) {
                let x = Lanes::new(simd, *x);
                // The first of these codes is a byte before it meets its bound.
                let code = (tried * x).near();
                let code = if step == 0 { code.low_byte() } else { code.min(splat(top)) };
                let error = x - scale * code;
                sum = sum + Lanes::new(simd, *w) * error * error;
            }
            let better = sum.less(best);
            (best, inverse) = match step {
                0 => (sum, tried),
                _ => (better.select(sum, best), better.select(tried, inverse)),
            };
        }
        for (x, l) in x.iter().zip(codes.iter_mut()) {
            *l = code(inverse, Lanes::new(simd, *x), bounds).row;
        }
        let zeros = largest.less(splat(TINY));
        let scale = settle(simd, x, weights, bounds, Codes::Bytes, zeros, codes);
        for l in codes {
            *l = zeros.select(zero, Lanes::new(simd, *l)).row;
        }
        scale
    }
}

/// What [`settle`] moves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Codes {
    Signed,
    Bytes,
}

/// Moves one code after the other to where the squares that remain are the least, at most five times, and gives the scale; 0
/// where all is `zeros`.
#[inline(always)]
fn settle<S: Simd>(
    simd: S,
    x: &[Row<S>],
    weights: &[Row<S>],
    bounds: [Lanes<S>; 2],
    kind: Codes,
    zeros: Mask<S>,
    codes: &mut [Row<S>],
) -> Lanes<S> {
    let zero = Lanes::splat(simd, 0.0);
    let [mut sum_lx, mut sum_ll] = [zero; 2];
    for ((x, w), l) in x.iter().zip(weights).zip(codes.iter_mut()) {
        let (x, w, code) = (Lanes::new(simd, *x), Lanes::new(simd, *w), Lanes::new(simd, *l));
        (sum_lx, sum_ll) = (sum_lx + w * x * code, sum_ll + w * code * code);
        if kind == Codes::Bytes {
            *l = code.low_byte().row;
        }
    }
    let mut live = zeros.not();
    for _ in 0..5 {
        let mut changed = zero.less(zero);
        for ((x, w), l) in x.iter().zip(weights).zip(codes.iter_mut()) {
            let (x, w, old) = (Lanes::new(simd, *x), Lanes::new(simd, *w), Lanes::new(simd, *l));
            let (lx, ll) = (sum_lx - w * x * old, sum_ll - w * old * old);
            let new = (x * ll / lx).near().max(bounds[0]).min(bounds[1]);
            let (new_lx, new_ll) = (lx + w * x * new, ll + w * new * new);
            let some = zero.less(if kind == Codes::Bytes { ll } else { new_ll });
            let better = (sum_lx * sum_lx * new_ll).less(new_lx * new_lx * sum_ll).and(new.equal(old).not());
            let better = live.and(zero.less(lx)).and(some).and(better);
            let stored = if kind == Codes::Bytes { new.low_byte() } else { new };
            *l = better.select(stored, old).row;
            (sum_lx, sum_ll) = (better.select(new_lx, sum_lx), better.select(new_ll, sum_ll));
            changed = changed.or(better);
        }
        live = live.and(changed);
        if !live.any() {
            break;
        }
    }
    zero.less(sum_ll).and(zeros.not()).select(sum_lx / sum_ll, zero)
}

/// The numbers that the codes of `IQ4_NL` and `IQ4_XS` stand for.
const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Entry of [`TABLE`].
fn entry(i: usize) -> f32 {
    f32::from(TABLE[i])
}

/// Twice the middle between an entry of [`TABLE`] and the one before it; from there on, the entry is the nearest.
fn middle(i: usize) -> f32 {
    entry(i - 1) + entry(i)
}

/// The entry of [`TABLE`] nearest to a number, the upper one in the middle.
#[inline(always)]
fn nearest_entry<S: Simd>(simd: S, x: Lanes<S>) -> Lanes<S> {
    let twice = x + x;
    let splat = |x| Lanes::splat(simd, x);
    let low_8 = twice.less(splat(middle(8)));
    let low_4 = twice.less(low_8.select(splat(middle(4)), splat(middle(12))));
    let low_2 = twice.less(quarter(simd, low_8, low_4, [2, 6, 10, 14].map(middle)));
    let low = quarter(simd, low_8, low_4, [0, 4, 8, 12].map(entry));
    let low = low_2.select(low, quarter(simd, low_8, low_4, [2, 6, 10, 14].map(entry)));
    let high = quarter(simd, low_8, low_4, [1, 5, 9, 13].map(entry));
    let high = low_2.select(high, quarter(simd, low_8, low_4, [3, 7, 11, 15].map(entry)));
    twice.less(low + high).select(low, high)
}

/// Which of four numbers belongs to a quarter of the table.
#[inline(always)]
fn quarter<S: Simd>(simd: S, low_8: Mask<S>, low_4: Mask<S>, [a, b, c, d]: [f32; 4]) -> Lanes<S> {
    let low = low_8.select(Lanes::splat(simd, a), Lanes::splat(simd, c));
    low_4.select(low, low_8.select(Lanes::splat(simd, b), Lanes::splat(simd, d)))
}

/// The code of the entry of [`TABLE`] that is nearest.
#[inline(always)]
pub(super) fn table_code<S: Simd>(simd: S, x: Lanes<S>) -> Lanes<S> {
    let (one, twice) = (Lanes::splat(simd, 1.0), x + x);
    let mut code = Lanes::splat(simd, 15.0);
    for i in 1..16 {
        code = twice.less(Lanes::splat(simd, middle(i))).select(code - one, code);
    }
    code
}

search! {
    /// `scale` with the least weighted squares of `x = scale * entry` (`quantize_row_iq4_nl_impl`).
    fn table_scale<S>(simd, x: &'a [Row<S>], weights: &'a [Row<S>]) -> Lanes<S> {
        let splat = |x| Lanes::splat(simd, x);
        let zero = splat(0.0);
        let largest = largest(simd, x);
        let first = entry(0);
        let mut inverse = splat(1.0) / (largest.negated() / splat(first));
        let (mut scale, mut best) = (zero, zero);
        for step in -8i8..=7 {
            let is_first = step == -8;
            if !is_first {
                inverse = splat(f32::from(step) + first) / largest;
            }
            let (mut sum_qx, mut sum_qq) = (zero, zero);
            for (x, w) in x.iter().zip(weights) {
                let x = Lanes::new(simd, *x);
                let entry = nearest_entry(simd, inverse * x);
                let weighted = Lanes::new(simd, *w) * entry;
                (sum_qx, sum_qq) = (sum_qx + weighted * x, sum_qq + weighted * entry);
            }
            let some = zero.less(sum_qq);
            let better = if is_first { some } else { some.and((best * sum_qq).less(sum_qx * sum_qx)) };
            scale = better.select(sum_qx / sum_qq, scale);
            best = better.select(scale * sum_qx, best);
        }
        largest.abs().less(splat(TINY)).select(zero, scale)
    }
}
