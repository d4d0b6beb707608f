//! What the kernels of tiled attention are made of.
//!
//! A tile is a square of queries and keys. Its parts lie in shared memory; products of matrices are made by tensor
//! cores, a strip of 16 rows to a plane, or, without them, by each unit for itself.

use cubecl::cmma::{self, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// What the kernels know when they are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tiles {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Side of a square tile of scores.
    pub(crate) side: usize,
    /// Units of a cube.
    pub(crate) units: usize,
    /// Units that share a row of scores.
    pub(crate) lanes: usize,
    /// By tensor cores.
    pub(crate) cmma: bool,
}

impl Tiles {
    /// Shared memory that the greediest of the kernels takes, for numbers of `bytes` each.
    pub(super) fn shared_bytes(&self, bytes: usize) -> usize {
        let (heads, scores) = (self.side * self.head_dim, self.side * self.side);
        // Queries, keys, values and the output's gradient; two kinds of scores, wide and narrow; two kinds of sums.
        4 * heads * bytes + 2 * scores * (4 + bytes) + 2 * heads * 4 + 2 * self.side * 4
    }
}

/// Side of the matrices that tensor cores take.
const FRAGMENT: usize = 16;

/// `[side, head_dim]` of a head, from token `first` on; zeros beyond the last token.
#[cube]
pub(super) fn load<E: Float>(
    global: &[E],
    tile: &mut [E],
    first: usize,
    tokens: usize,
    num_heads: usize,
    head: usize,
    #[comptime] t: Tiles,
) {
    let mut e = UNIT_POS as usize;
    while e < t.side * t.head_dim {
        let token = first + e / t.head_dim;
        let mut value = E::from_int(0);
        if token < tokens {
            value = global[(token * num_heads + head) * t.head_dim + e % t.head_dim];
        }
        tile[e] = value;
        e += t.units;
    }
}

/// `scores = a b^T`, `[side, side]` of `[side, head_dim]` each.
#[cube]
pub(super) fn score<E: Float>(a: &[E], b: &[E], scores: &mut [f32], #[comptime] t: Tiles) {
    if comptime!(t.cmma) {
        let strip = (UNIT_POS / PLANE_DIM) as usize * FRAGMENT;
        #[unroll]
        for n in 0..comptime!(t.side / FRAGMENT) {
            let sum = cmma::Matrix::<f32>::from_value(
                MatrixIdent::Accumulator,
                16usize,
                16usize,
                16usize,
                MatrixLayout::Undefined,
                0.0,
            );
            #[unroll]
            for k in 0..comptime!(t.head_dim / FRAGMENT) {
                let x = cmma::Matrix::<E>::from_slice(
                    MatrixIdent::A,
                    16usize,
                    16usize,
                    16usize,
                    MatrixLayout::RowMajor,
                    &a[strip * t.head_dim + k * FRAGMENT..t.side * t.head_dim],
                    t.head_dim as u32,
                );
                let y = cmma::Matrix::<E>::from_slice(
                    MatrixIdent::B,
                    16usize,
                    16usize,
                    16usize,
                    MatrixLayout::ColMajor,
                    &b[n * FRAGMENT * t.head_dim + k * FRAGMENT..t.side * t.head_dim],
                    t.head_dim as u32,
                );
                cmma::execute(&x, &y, &sum, &sum);
            }
            cmma::store(
                &mut scores[strip * t.side + n * FRAGMENT..t.side * t.side],
                &sum,
                t.side as u32,
                MatrixLayout::RowMajor,
            );
        }
    } else {
        let mut e = UNIT_POS as usize;
        while e < t.side * t.side {
            let row = e / t.side * t.head_dim;
            let column = e % t.side * t.head_dim;
            let mut sum = 0.0f32;
            for d in 0..t.head_dim {
                sum += f32::cast_from(a[row + d]) * f32::cast_from(b[column + d]);
            }
            scores[e] = sum;
            e += t.units;
        }
    }
}

/// Sums of products, `[side, head_dim]`: kept in registers by tensor cores, else in shared memory.
#[cube]
pub(super) fn sums(out: &mut [f32], #[comptime] t: Tiles) -> Sequence<cmma::Matrix<f32>> {
    let mut fragments = Sequence::<cmma::Matrix<f32>>::new();
    if comptime!(t.cmma) {
        #[unroll]
        for _ in 0..comptime!(t.head_dim / FRAGMENT) {
            fragments.push(cmma::Matrix::<f32>::from_value(
                MatrixIdent::Accumulator,
                16usize,
                16usize,
                16usize,
                MatrixLayout::Undefined,
                0.0,
            ));
        }
    } else {
        let mut e = UNIT_POS as usize;
        while e < t.side * t.head_dim {
            out[e] = 0.0f32;
            e += t.units;
        }
    }
    fragments
}

/// Adds `a b` to `sums`, or `a^T b`; `a`: `[side, side]`, `b`: `[side, head_dim]`.
#[cube]
pub(super) fn add_product<E: Float>(
    a: &[E],
    b: &[E],
    fragments: &Sequence<cmma::Matrix<f32>>,
    out: &mut [f32],
    #[comptime] transposed: bool,
    #[comptime] t: Tiles,
) {
    if comptime!(t.cmma) {
        let strip = (UNIT_POS / PLANE_DIM) as usize * FRAGMENT;
        #[unroll]
        for k in 0..comptime!(t.side / FRAGMENT) {
            let layout = comptime!(if transposed { MatrixLayout::ColMajor } else { MatrixLayout::RowMajor });
            let start =
                if comptime!(transposed) { k * FRAGMENT * t.side + strip } else { strip * t.side + k * FRAGMENT };
            let x = cmma::Matrix::<E>::from_slice(
                MatrixIdent::A,
                16usize,
                16usize,
                16usize,
                layout,
                &a[start..t.side * t.side],
                t.side as u32,
            );
            #[unroll]
            for n in 0..comptime!(t.head_dim / FRAGMENT) {
                let y = cmma::Matrix::<E>::from_slice(
                    MatrixIdent::B,
                    16usize,
                    16usize,
                    16usize,
                    MatrixLayout::RowMajor,
                    &b[k * FRAGMENT * t.head_dim + n * FRAGMENT..t.side * t.head_dim],
                    t.head_dim as u32,
                );
                let sum = fragments.index(n);
                cmma::execute(&x, &y, sum, sum);
            }
        }
    } else {
        let mut e = UNIT_POS as usize;
        while e < t.side * t.head_dim {
            let row = e / t.head_dim;
            let column = e % t.head_dim;
            let mut sum = out[e];
            for k in 0..t.side {
                let x = if comptime!(transposed) { a[k * t.side + row] } else { a[row * t.side + k] };
                sum += f32::cast_from(x) * f32::cast_from(b[k * t.head_dim + column]);
            }
            out[e] = sum;
            e += t.units;
        }
    }
}

/// Writes sums to a head, from token `first` on.
#[cube]
pub(super) fn store<E: Float>(
    fragments: &Sequence<cmma::Matrix<f32>>,
    out: &mut [f32],
    global: &mut [E],
    first: usize,
    tokens: usize,
    num_heads: usize,
    head: usize,
    #[comptime] t: Tiles,
) {
    if comptime!(t.cmma) {
        let strip = (UNIT_POS / PLANE_DIM) as usize * FRAGMENT;
        #[unroll]
        for n in 0..comptime!(t.head_dim / FRAGMENT) {
            cmma::store(
                &mut out[strip * t.head_dim + n * FRAGMENT..t.side * t.head_dim],
                fragments.index(n),
                t.head_dim as u32,
                MatrixLayout::RowMajor,
            );
        }
    }
    sync_cube();
    let mut e = UNIT_POS as usize;
    while e < t.side * t.head_dim {
        let token = first + e / t.head_dim;
        if token < tokens {
            global[(token * num_heads + head) * t.head_dim + e % t.head_dim] = E::cast_from(out[e]);
        }
        e += t.units;
    }
}

/// A number of every query of a head, from token `first` on; zeros beyond the last.
#[cube]
pub(super) fn load_row(
    global: &[f32],
    row: &mut [f32],
    first: usize,
    tokens: usize,
    head: usize,
    #[comptime] t: Tiles,
) {
    let mut r = UNIT_POS as usize;
    while r < t.side {
        let mut value = 0.0f32;
        if first + r < tokens {
            value = global[(first + r) * t.num_heads + head];
        }
        row[r] = value;
        r += t.units;
    }
}

/// Whether a query looks at a key: one before it or its own, in its document and its window.
#[cube]
pub(super) fn visible(query: usize, key: usize, first_key: &[i32], tokens: usize, window: usize) -> bool {
    let mut seen = query < tokens && key <= query && key + window > query;
    if seen {
        seen = first_key[query] as usize <= key;
    }
    seen
}
