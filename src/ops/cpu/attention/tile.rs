//! Products of small matrices that lie in the caches, by register tiles.

use pulp::{Simd, WithSimd};

/// Queries and keys in a tile: a multiple of 6 and 8 rows and of every vector length.
pub(super) const TILE: usize = 96;

/// Rows of a tile on the diagonal whose masked part is cut off together.
pub(super) const STRIP: usize = 32;

/// One operand of a [`Product`]: element (i, p) lies at `i * row_stride + p * column_stride`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) data: &'a [f32],
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

/// `c = a b`, or `c += a b`.
///
/// # Shapes
/// `[m, n] = [m, k] [k, n]`, with `c` and `b` in rows of `c_stride` and `b_stride`. `n` counts whole vectors.
pub(super) struct Product<'a> {
    pub(super) shape: [usize; 3],
    pub(super) c: &'a mut [f32],
    pub(super) c_stride: usize,
    pub(super) a: Left<'a>,
    pub(super) b: &'a [f32],
    pub(super) b_stride: usize,
    pub(super) accumulate: bool,
}

impl Product<'_> {
    /// Computes the product; `simd` is the caller's instruction set.
    #[inline(always)]
    pub(super) fn run<S: Simd>(self, simd: S) {
        simd.vectorize(self);
    }
}

/// What a register tile needs to know, with the pointers at its corner.
#[derive(Clone, Copy)]
struct Corner {
    c: *mut f32,
    c_stride: usize,
    a: *const f32,
    a_row: usize,
    a_column: usize,
    b: *const f32,
    b_stride: usize,
    k: usize,
    accumulate: bool,
}

/// One register tile: `ROWS` rows by `VECTORS` vectors of the result.
///
/// # Safety
/// The strides must keep rows `0..ROWS`, columns `0..VECTORS * S::F32_LANES` and depths `0..k` inside the operands.
#[inline(always)]
unsafe fn register_tile<S: Simd, const ROWS: usize, const VECTORS: usize>(simd: S, t: Corner) {
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
    for p in 0..t.k {
        // SAFETY: row p < k of b, columns inside by the caller's promise.
        let b: [S::f32s; VECTORS] = unsafe {
            let row = t.b.add(p * t.b_stride).cast::<S::f32s>();
            std::array::from_fn(|v| row.add(v).read_unaligned())
        };
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: row i < ROWS, depth p < k of a.
            let a = simd.splat_f32s(unsafe { *t.a.add(i * t.a_row + p * t.a_column) });
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = simd.mul_add_e_f32s(a, b, *sum);
            }
        }
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
            while i + $rows <= m {
                // SAFETY: rows i..i + rows lie below m; the offsets stay inside the operands by the caller's promise.
                unsafe {
                    let at =
                        Corner { c: corner.c.add(i * corner.c_stride), a: corner.a.add(i * corner.a_row), ..corner };
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

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [m, n, k] = self.shape;
        if m == 0 || n == 0 {
            return;
        }
        assert!(n.is_multiple_of(S::F32_LANES) && (m - 1) * self.c_stride + n <= self.c.len());
        if k > 0 {
            assert!((k - 1) * self.b_stride + n <= self.b.len());
            assert!((m - 1) * self.a.row_stride + (k - 1) * self.a.column_stride < self.a.data.len());
        }
        let mut vectors = n / S::F32_LANES;
        let mut corner = Corner {
            c: self.c.as_mut_ptr(),
            c_stride: self.c_stride,
            a: self.a.data.as_ptr(),
            a_row: self.a.row_stride,
            a_column: self.a.column_stride,
            b: self.b.as_ptr(),
            b_stride: self.b_stride,
            k,
            accumulate: self.accumulate,
        };
        while vectors > 0 {
            // SAFETY: the assertions above hold every row, column and depth inside the slices, and the panels taken
            // so far and this one make up at most n columns.
            let taken = unsafe {
                if S::REGISTER_COUNT >= 32 {
                    match vectors {
                        1 => {
                            panel::<S, 8, 1>(simd, m, corner);
                            1
                        }
                        2 => {
                            panel::<S, 8, 2>(simd, m, corner);
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
                // SAFETY: columns remain, so that both pointers stay inside their slices.
                unsafe {
                    corner.c = corner.c.add(taken * S::F32_LANES);
                    corner.b = corner.b.add(taken * S::F32_LANES);
                }
            }
        }
    }
}

/// Copies `rows` rows of `width` floats, `stride` apart, times `factor`, into rows of `to_stride`; pads with zeros.
#[inline(always)]
pub(super) fn pack_rows(
    from: &[f32],
    stride: usize,
    rows: usize,
    width: usize,
    factor: f32,
    to: &mut [f32],
    to_stride: usize,
) {
    for i in 0..rows {
        let to = &mut to[i * to_stride..(i + 1) * to_stride];
        let (body, padding) = to.split_at_mut(width);
        for (to, from) in body.iter_mut().zip(&from[i * stride..i * stride + width]) {
            *to = from * factor;
        }
        padding.fill(0.0);
    }
}

/// The transpose of [`pack_rows`], into rows of [`TILE`]: element (i, d) goes to `d * TILE + i`.
#[inline(always)]
pub(super) fn pack_columns(from: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [f32]) {
    for i in 0..rows {
        for (d, x) in from[i * stride..i * stride + width].iter().enumerate() {
            to[d * TILE + i] = x * factor;
        }
    }
    if rows < TILE {
        for to in to.chunks_exact_mut(TILE).take(width) {
            to[rows..].fill(0.0);
        }
    }
}
