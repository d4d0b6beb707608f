//! Products of small matrices that lie in the caches, by register tiles in f32.

use pulp::{Simd, WithSimd};

/// A left operand: element (i, p) lies at `i * row_stride + p * column_stride`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a, W = f32> {
    pub(super) data: &'a [W],
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a, W> Left<'a, W> {
    /// Row-major with rows of `width`.
    #[inline(always)]
    pub(super) fn rows(data: &'a [W], width: usize) -> Self {
        Self { data, row_stride: width, column_stride: 1 }
    }

    /// The transpose of a row-major matrix with rows of `width`.
    #[inline(always)]
    pub(super) fn columns(data: &'a [W], width: usize) -> Self {
        Self { data, row_stride: 1, column_stride: width }
    }

    /// Whether all elements of `[m, k]` lie inside.
    #[inline(always)]
    pub(super) fn holds(&self, m: usize, k: usize) -> bool {
        k == 0 || (m - 1) * self.row_stride + (k - 1) * self.column_stride < self.data.len()
    }
}

/// A left operand as a register tile reads it, from the tile's first row on.
#[derive(Clone, Copy)]
struct TileRows {
    a: *const f32,
    row: usize,
    column: usize,
    k: usize,
}

impl TileRows {
    #[inline(always)]
    fn new(a: Left<'_>, k: usize) -> Self {
        Self { a: a.data.as_ptr(), row: a.row_stride, column: a.column_stride, k }
    }

    /// # Safety
    /// Row `i` must lie inside the operand.
    #[inline(always)]
    unsafe fn at_row(self, i: usize) -> Self {
        // An operand without depth has no elements, so its pointer stays.
        // SAFETY: by the caller's promise.
        if self.k == 0 { self } else { unsafe { Self { a: self.a.add(i * self.row), ..self } } }
    }
}

/// What a register tile needs to know, with the pointers at its corner.
#[derive(Clone, Copy)]
struct Corner {
    c: *mut f32,
    c_stride: usize,
    rows: [TileRows; 2],
    b: *const f32,
    b_stride: usize,
    accumulate: bool,
}

/// `c = a b`, or `c += a b`. The result is a bare pointer, for tasks that write parts of the same rows.
///
/// # Shapes
/// `[m, n] = [m, k] [k, n]`, with `c` and `b` in rows of `c_stride` and `b_stride`. `n` counts whole vectors, `k` words.
#[derive(Clone, Copy)]
pub(super) struct ProductInto<'a, W = f32> {
    pub(super) shape: [usize; 3],
    pub(super) c: *mut f32,
    pub(super) c_stride: usize,
    pub(super) a: Left<'a, W>,
    pub(super) b: &'a [W],
    pub(super) b_stride: usize,
    /// A second left operand and its depth; its product with the rows of `b` below the first k is added.
    pub(super) then: Option<(Left<'a, W>, usize)>,
    pub(super) accumulate: bool,
}

/// [`ProductInto`] after [`ProductInto::promise`].
pub(super) struct Promised<'a>(ProductInto<'a>);

impl<'a> ProductInto<'a> {
    /// # Safety
    /// `m` rows of `n` floats, `c_stride` apart, must be writable at `c`; nothing else may use them meanwhile.
    #[inline(always)]
    pub(super) unsafe fn promise(self) -> Promised<'a> {
        Promised(self)
    }
}

/// One register tile: `ROWS` rows by `VECTORS` vectors of the result.
///
/// # Safety
/// The strides must keep rows `0..ROWS`, columns `0..VECTORS * S::F32_LANES` and all depths inside the operands.
#[inline(always)]
unsafe fn register_tile<S: Simd, const ROWS: usize, const VECTORS: usize>(simd: S, t: Corner) {
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
    let mut first = 0;
    for rows in t.rows {
        for p in 0..rows.k {
            // SAFETY: row first + p of b, columns inside by the caller's promise.
            let b: [S::f32s; VECTORS] = unsafe {
                let row = t.b.add((first + p) * t.b_stride).cast::<S::f32s>();
                std::array::from_fn(|v| row.add(v).read_unaligned())
            };
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: row i < ROWS, depth p < k of a.
                let a = simd.splat_f32s(unsafe { *rows.a.add(i * rows.row + p * rows.column) });
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = simd.mul_add_e_f32s(a, b, *sum);
                }
            }
        }
        first += rows.k;
    }
    for (i, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate() {
            // SAFETY: row i, vector v of c, inside by the caller's promise.
            unsafe {
                let c = t.c.add(i * t.c_stride).cast::<S::f32s>().add(v);
                let value = if t.accumulate { simd.add_f32s(c.read_unaligned(), *sum) } else { *sum };
                c.write_unaligned(value);
            }
        }
    }
}

/// All rows of a panel of `VECTORS` vectors, `ROWS` at a time, then 4, 2, 1.
///
/// # Safety
/// As for [`register_tile`], for rows `0..m`.
#[inline(always)]
unsafe fn panel<S: Simd, const ROWS: usize, const VECTORS: usize>(simd: S, m: usize, corner: Corner) {
    let mut i = 0;
    macro_rules! rows {
        ($rows:expr) => {
            while m - i >= $rows {
                // SAFETY: rows i..i + rows lie below m; the offsets stay inside the operands by the caller's promise.
                unsafe {
                    let at = Corner {
                        c: corner.c.add(i * corner.c_stride),
                        rows: [corner.rows[0].at_row(i), corner.rows[1].at_row(i)],
                        ..corner
                    };
                    register_tile::<S, { $rows }, VECTORS>(simd, at);
                }
                i += $rows;
            }
        };
    }
    rows!(ROWS);
    rows!(4);
    rows!(2);
    rows!(1);
}

impl WithSimd for Promised<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self(product) = self;
        let [m, n, k] = product.shape;
        if m == 0 || n == 0 {
            return;
        }
        assert!(n.is_multiple_of(S::F32_LANES));
        let (then, then_k) = product.then.unwrap_or((Left::rows(&[], 0), 0));
        assert!(product.a.holds(m, k) && then.holds(m, then_k));
        assert!(k + then_k == 0 || (k + then_k - 1) * product.b_stride + n <= product.b.len());
        let mut vectors = n / S::F32_LANES;
        let mut corner = Corner {
            c: product.c,
            c_stride: product.c_stride,
            rows: [TileRows::new(product.a, k), TileRows::new(then, then_k)],
            b: product.b.as_ptr(),
            b_stride: product.b_stride,
            accumulate: product.accumulate,
        };
        while vectors > 0 {
            // SAFETY: the assertions above keep every row, column and depth inside the slices, and the panels so far
            // and this one have at most n columns together.
            let taken = unsafe {
                if S::REGISTER_COUNT >= 32 {
                    match vectors {
                        1 => {
                            panel::<S, 12, 1>(simd, m, corner);
                            1
                        }
                        2 => {
                            panel::<S, 12, 2>(simd, m, corner);
                            2
                        }
                        v if v % 4 == 0 => {
                            panel::<S, 6, 4>(simd, m, corner);
                            4
                        }
                        _ => {
                            panel::<S, 8, 3>(simd, m, corner);
                            3
                        }
                    }
                } else if vectors == 1 {
                    panel::<S, 6, 1>(simd, m, corner);
                    1
                } else {
                    panel::<S, 6, 2>(simd, m, corner);
                    2
                }
            };
            vectors -= taken;
            if vectors > 0 {
                // SAFETY: columns remain, so the pointer stays inside its slice.
                corner.c = unsafe { corner.c.add(taken * S::F32_LANES) };
                // Not `add`: without depth nothing lies behind the pointer, and nothing is read.
                corner.b = corner.b.wrapping_add(taken * S::F32_LANES);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference::{assert_close, matmul_f64, random};
    use super::*;

    /// Products of several shapes, both ways of laying out the left operand, with a second left operand.
    fn check<S: Simd>(simd: S) {
        for [m, n, k, then_k] in [[1, 16, 1, 0], [5, 48, 7, 3], [17, 64, 20, 0], [96, 96, 64, 8], [13, 80, 0, 5]] {
            let (a, a2, b) = (random(m * k, 1), random(m * then_k, 2), random((k + then_k) * n, 3));
            let low = matmul_f64([m, n, then_k], &a2, [then_k, 1], &b[k * n..], [n, 1]);
            for (left, strides) in [(Left::rows(&a, k), [k, 1]), (Left::columns(&a, m), [1, m])] {
                let exact: Vec<f64> =
                    matmul_f64([m, n, k], &a, strides, &b, [n, 1]).iter().zip(&low).map(|(x, y)| x + y).collect();
                let mut c = vec![f32::NAN; m * n];
                for (accumulate, times) in [(false, 1.0), (true, 2.0)] {
                    let then = (then_k > 0).then_some((Left::rows(&a2, then_k), then_k));
                    let (shape, to) = ([m, n, k], c.as_mut_ptr());
                    let product =
                        ProductInto { shape, c: to, c_stride: n, a: left, b: &b, b_stride: n, then, accumulate };
                    // SAFETY: `c` has m rows of n floats.
                    simd.vectorize(unsafe { product.promise() });
                    assert_close(&c, &exact.iter().map(|x| times * x).collect::<Vec<_>>(), 1e-5);
                }
            }
        }
    }

    #[test]
    fn products_match_f64_without_vectors() {
        check(pulp::Scalar);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn products_match_f64_on_every_instruction_set_of_this_machine() {
        if let Some(simd) = pulp::x86::V3::try_new() {
            check(simd);
        }
        if let Some(simd) = pulp::x86::V4::try_new() {
            check(simd);
        }
    }
}
