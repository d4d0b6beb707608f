//! Products of activations with frozen weights, and with a low-rank term in the same pass.
//!
//! Each task takes up to 128 columns of the result. It packs the weight's columns for a stretch of the depth into
//! panels that stay in the second-level cache and streams the rows past them. Only the few tasks that share columns
//! pack them again, and no thread waits for another.

#[cfg(target_arch = "x86_64")]
pub(super) mod bf16;
mod panel;
#[cfg(target_arch = "x86_64")]
mod tiles;

use rayon::prelude::*;

pub(super) use panel::widen;

use super::pack::{PANEL, PanelWord};
use super::product::{Left, ProductInto};
use super::round::round;
use super::simd::{SharedMut, arch, vectorised, with_scratch};
use super::weight::Weight;
use crate::device::{has_avx512, has_bf16_products};

/// Rows that pass one group of panels before the next stretch of the depth; they stay in the second-level cache.
const BLOCK_ROWS: usize = 96;
/// Panels that one task packs together.
const GROUP_PANELS: usize = 2;
/// A task has at least this many rows if there are enough; fewer would not pay for the packing.
const MIN_TASK_ROWS: usize = 2 * BLOCK_ROWS;

/// One product `a b` of a sum.
#[derive(Clone, Copy)]
pub(super) struct Term<'a> {
    /// `[m, k]`, contiguous.
    pub(super) a: &'a [f32],
    pub(super) k: usize,
    /// `[k, n]`.
    pub(super) b: Right<'a>,
}

/// A right operand: element (p, j) is `factor * weight[j * stride + p]` if `transposed`, else `[p * stride + j]`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub(super) weight: Weight<'a>,
    pub(super) stride: usize,
    pub(super) transposed: bool,
    pub(super) factor: f32,
}

/// How numbers lie in words and how words are multiplied.
trait Arithmetic {
    type Word: PanelWord;

    /// Words that hold `k` numbers of a row.
    fn words(k: usize) -> usize;

    /// Packs `depth` words from word `first` on, of `columns` columns from `column` on, into rows of [`PANEL`] words;
    /// the rest of a panel up to the next multiple of 16 columns is zero.
    fn pack(term: &Term<'_>, first: usize, depth: usize, column: usize, columns: usize, panel: &mut [Self::Word]);

    /// Multiplies rows with a packed panel.
    ///
    /// # Safety
    /// As for [`ProductInto::promise`]; `n` counts whole vectors of 16.
    unsafe fn multiply(product: ProductInto<'_, Self::Word>);
}

/// f32 throughout.
struct Single;

impl Arithmetic for Single {
    type Word = f32;

    fn words(k: usize) -> usize {
        k
    }

    fn pack(term: &Term<'_>, first: usize, depth: usize, column: usize, columns: usize, panel: &mut [f32]) {
        panel::pack_single(&term.b, first, depth, column, columns, panel);
    }

    unsafe fn multiply(product: ProductInto<'_, f32>) {
        // SAFETY: by the caller's promise.
        arch().dispatch(unsafe { product.promise() });
    }
}

vectorised! {
/// Rounds to the nearest bfloat16 and back.
pub(super) fn round_in_place<'a, S>(_simd, x: &'a mut [f32]) {
    for x in x {
        *x = f32::from_bits(u32::from(round(*x)) << 16);
    }
} }

/// Pairs of neighbours, rounded to bfloat16, the first in the low half; an odd last one is paired with zero.
pub(super) fn round_to_pairs(x: &[f32], words: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    let done = bf16::round_to_pairs(x, words);
    #[cfg(not(target_arch = "x86_64"))]
    let done = 0;
    for (word, pair) in words[done..].iter_mut().zip(x[2 * done..].chunks(2)) {
        *word = pair.iter().rev().fold(0, |word, x| word << 16 | u32::from(round(*x)));
    }
}

/// `c = sum of the terms`, or `c += ...` if `accumulate`.
///
/// If the first term's weight [rounds](Weight::rounding), every operand is rounded to bfloat16; sums are in f32.
///
/// # Shapes
/// `c`: `[m, n]`, contiguous.
pub(super) fn gemm(m: usize, n: usize, c: &mut [f32], first: Term<'_>, second: Option<Term<'_>>, accumulate: bool) {
    assert_eq!(c.len(), m * n, "gemm: result [{m}, {n}]");
    gemm_strided(m, n, c, n, first, first.k, second, accumulate);
}

/// [`gemm`] with rows of the result `c_stride` apart and rows of the first left operand `a_stride` apart.
pub(super) fn gemm_strided(
    m: usize,
    n: usize,
    c: &mut [f32],
    c_stride: usize,
    first: Term<'_>,
    a_stride: usize,
    second: Option<Term<'_>>,
    accumulate: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(c_stride >= n && (m - 1) * c_stride + n <= c.len(), "gemm: result [{m}, {n}]");
    let second = second.unwrap_or(Term { a: &[], k: 0, ..first });
    let terms = [first, second];
    let a_strides = [a_stride, second.k];
    for (term, stride) in terms.iter().zip(a_strides) {
        let k = term.k;
        assert!(k == 0 || stride >= k && (m - 1) * stride + k <= term.a.len(), "gemm: left operand [{m}, {k}]");
        let (outer, inner) = if term.b.transposed { (n, term.k) } else { (term.k, n) };
        assert!(
            term.k == 0 || (outer - 1) * term.b.stride + inner <= term.b.weight.num_elements(),
            "gemm: right operand [{}, {n}]",
            term.k
        );
    }
    #[cfg(target_arch = "x86_64")]
    if first.b.weight.rounds {
        let words = terms.map(|term| bf16::Pairs::words(term.k));
        return with_scratch(m * (words[0] + words[1]), |scratch| {
            let (a, then) = bytemuck::cast_slice_mut::<f32, u32>(scratch).split_at_mut(m * words[0]);
            rows_to_pairs(first.a, first.k, a_stride, a);
            rows_to_pairs(second.a, second.k, second.k, then);
            run::<bf16::Pairs>(m, n, (c, c_stride), &terms, [(a, words[0]), (then, words[1])], accumulate);
        });
    }
    run::<Single>(m, n, (c, c_stride), &terms, [(first.a, a_stride), (second.a, second.k)], accumulate);
}

/// Multiplies rows that the caller has [rounded to pairs](round_to_pairs), `stride` words apart, with `b`; only for
/// machines that [multiply pairs](has_bf16_products).
///
/// # Shapes
/// `c`: `[m, n]`, contiguous; `words`: rows of `k.div_ceil(2)` words.
#[cfg(target_arch = "x86_64")]
pub(super) fn gemm_of_pairs(m: usize, n: usize, c: &mut [f32], words: &[u32], stride: usize, k: usize, b: Right<'_>) {
    assert!(has_bf16_products(), "gemm: no products of bf16 pairs here");
    assert_eq!(c.len(), m * n, "gemm: result [{m}, {n}]");
    if m == 0 || n == 0 {
        return;
    }
    let (outer, inner) = if b.transposed { (n, k) } else { (k, n) };
    let row = k.div_ceil(2);
    assert!(k > 0 && stride >= row && (m - 1) * stride + row <= words.len(), "gemm: left operand [{m}, {k}]");
    assert!((outer - 1) * b.stride + inner <= b.weight.num_elements(), "gemm: right operand [{k}, {n}]");
    let terms = [Term { a: &[], k, b }, Term { a: &[], k: 0, b }];
    run::<bf16::Pairs>(m, n, (c, n), &terms, [(words, stride), (&[], 0)], false);
}

/// Rounds rows of `k` floats to pairs of bfloat16.
#[cfg(target_arch = "x86_64")]
fn rows_to_pairs(x: &[f32], k: usize, stride: usize, words: &mut [u32]) {
    if k == 0 {
        return;
    }
    let per_row = k.div_ceil(2);
    let rows = super::simd::rows_per_chunk(k);
    words.par_chunks_mut(rows * per_row).zip(x.par_chunks(rows * stride)).for_each(|(words, x)| {
        if k.is_multiple_of(2) && k == stride {
            return round_to_pairs(x, words);
        }
        for (words, x) in words.chunks_exact_mut(per_row).zip(x.chunks(stride)) {
            round_to_pairs(&x[..k], words);
        }
    });
}

/// A stretch of the depth: words `first..first + depth` of the first term, then all of the second if `with_second`.
struct Stretch {
    first: usize,
    depth: usize,
    with_second: bool,
}

/// Longest stretch of the depth, in words, that is packed at once. Second-level caches have 1 MiB or more where there is
/// AVX-512, and often half of that elsewhere.
fn block_depth() -> usize {
    if has_avx512() { 640 } else { 320 }
}

fn stretches(words: usize) -> Vec<Stretch> {
    let count = words.div_ceil(block_depth()).max(1);
    let depth = words.div_ceil(count);
    (0..count)
        .map(|i| Stretch {
            first: i * depth,
            depth: depth.min(words - (i * depth).min(words)),
            with_second: i + 1 == count,
        })
        .collect()
}

/// `c` and the left operands come with their row strides.
fn run<A: Arithmetic>(
    m: usize,
    n: usize,
    (c, c_stride): (&mut [f32], usize),
    terms: &[Term<'_>; 2],
    [a, then]: [(&[A::Word], usize); 2],
    accumulate: bool,
) where
    A::Word: Send + Sync,
{
    let words = terms.map(|term| A::words(term.k));
    let stretches = stretches(words[0]);
    let columns_per_task = GROUP_PANELS * PANEL;
    let groups = n.div_ceil(columns_per_task);
    // Enough tasks to keep all threads busy to the end, but no more: each part of the rows packs its columns again. The
    // split changes no sum.
    let parts = (4 * rayon::current_num_threads()).div_ceil(groups).min(m / MIN_TASK_ROWS).max(1);
    let rows_per_task = m.div_ceil(parts).next_multiple_of(BLOCK_ROWS);
    let c = SharedMut(c.as_mut_ptr());
    let panel_len = (stretches[0].depth + words[1]) * PANEL;
    (0..groups * m.div_ceil(rows_per_task)).into_par_iter().with_max_len(1).for_each(|task| {
        let (group, part) = (task % groups, task / groups);
        let column = group * columns_per_task;
        let columns = columns_per_task.min(n - column);
        let rows = part * rows_per_task..m.min((part + 1) * rows_per_task);
        with_scratch(GROUP_PANELS * panel_len + BLOCK_ROWS * PANEL, |scratch| {
            let (panels, edge) = scratch.split_at_mut(GROUP_PANELS * panel_len);
            let panels: &mut [A::Word] = bytemuck::cast_slice_mut(panels);
            for stretch in &stretches {
                let then_depth = if stretch.with_second { words[1] } else { 0 };
                for (panel, first) in panels.chunks_exact_mut(panel_len).zip((0..columns).step_by(PANEL)) {
                    let (column, columns) = (column + first, PANEL.min(columns - first));
                    let (b, then) = panel.split_at_mut(stretch.depth * PANEL);
                    A::pack(&terms[0], stretch.first, stretch.depth, column, columns, b);
                    if then_depth > 0 {
                        A::pack(&terms[1], 0, then_depth, column, columns, &mut then[..then_depth * PANEL]);
                    }
                }
                let accumulate = accumulate || stretch.first > 0;
                for row in rows.clone().step_by(BLOCK_ROWS) {
                    let block_rows = BLOCK_ROWS.min(rows.end - row);
                    let a = Left::rows(&a.0[row * a.1 + stretch.first..], a.1);
                    let then = (then_depth > 0).then(|| (Left::rows(&then.0[row * then.1..], then.1), then_depth));
                    for (panel, first) in panels.chunks_exact(panel_len).zip((0..columns).step_by(PANEL)) {
                        let width = PANEL.min(columns - first);
                        // SAFETY: inside c; only this task uses these rows and columns.
                        let c = unsafe { c.get().add(row * c_stride + column + first) };
                        let product = ProductInto {
                            shape: [block_rows, width.next_multiple_of(16), stretch.depth],
                            c,
                            c_stride,
                            a,
                            b: panel,
                            b_stride: PANEL,
                            then,
                            accumulate,
                        };
                        if width.is_multiple_of(16) {
                            // SAFETY: as above.
                            unsafe { A::multiply(product) };
                        } else {
                            // SAFETY: as above, for `width` columns; `edge` holds a block of whole vectors.
                            unsafe { multiply_edge::<A>(product, width, edge) };
                        }
                    }
                }
            }
        });
    });
}

/// [`Arithmetic::multiply`] through a buffer, for a panel whose last vector is not whole.
///
/// # Safety
/// As for [`Arithmetic::multiply`], with `width` columns instead of the product's.
unsafe fn multiply_edge<A: Arithmetic>(product: ProductInto<'_, A::Word>, width: usize, edge: &mut [f32]) {
    let ProductInto { shape: [rows, ..], c, c_stride, accumulate, .. } = product;
    assert!(rows * PANEL <= edge.len());
    // SAFETY: `edge` has room for all rows, PANEL floats apart.
    unsafe { A::multiply(ProductInto { c: edge.as_mut_ptr(), c_stride: PANEL, accumulate: false, ..product }) };
    for (i, from) in edge.chunks_exact(PANEL).take(rows).enumerate() {
        // SAFETY: row i of the caller's part of the result.
        let to = unsafe { std::slice::from_raw_parts_mut(c.add(i * c_stride), width) };
        for (to, from) in to.iter_mut().zip(from) {
            *to = if accumulate { *to + from } else { *from };
        }
    }
}

#[cfg(test)]
mod tests;
