//! Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout (`rotate_half`).

use rayon::prelude::*;

use super::simd::{rows_per_chunk, vectorised};
use crate::spec::RopePairs;

vectorised! { fn rope_row<'a, S>(
    _simd, x: &'a mut [f32], head_dim: usize, cos: &'a [f32], sin: &'a [f32], sign: f32,
) {
    let half = cos.len();
    for head in x.chunks_exact_mut(head_dim) {
        let (low, high) = head[..2 * half].split_at_mut(half);
        for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let sin = sign * sin;
            let (x, y) = (*low, *high);
            *low = x * cos - y * sin;
            *high = y * cos + x * sin;
        }
    }
} }

vectorised! { fn rope_row_of_neighbours<'a, S>(
    _simd, x: &'a mut [f32], head_dim: usize, cos: &'a [f32], sin: &'a [f32], sign: f32,
) {
    for head in x.chunks_exact_mut(head_dim) {
        for ((pair, cos), sin) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
            let (x, y, sin) = (pair[0], pair[1], sign * sin);
            pair[0] = x * cos - y * sin;
            pair[1] = y * cos + x * sin;
        }
    }
} }

/// How the heads of tokens turn.
#[derive(Clone, Copy, Debug)]
pub struct RopeShape {
    /// Number of heads of a token.
    pub num_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Number of pairs of a head that turn.
    pub half: usize,
    /// Which numbers form a pair: `i` and `i + half`, or neighbours.
    pub pairs: RopePairs,
}

/// Rotates every head of every token by the angles of the token's position, in place; `inverse` rotates back, which is also
/// the gradient where cosines and sines have no factor.
///
/// # Shapes
/// `x`: `[tokens, num_heads * head_dim]`; `cos`, `sin`: `[positions in the table, half]`; `positions`: `[tokens]`, each a
/// row of the table.
pub fn rope(x: &mut [f32], (cos, sin): (&[f32], &[f32]), positions: &[u32], shape: RopeShape, inverse: bool) {
    let RopeShape { num_heads, head_dim, half, pairs } = shape;
    let width = num_heads * head_dim;
    assert!(2 * half <= head_dim && cos.len() == sin.len(), "rope: {shape:?}");
    assert_eq!(x.len(), positions.len() * width, "rope: tokens");
    if x.is_empty() {
        return;
    }
    let sign = if inverse { -1.0 } else { 1.0 };
    let rows = rows_per_chunk(width);
    x.par_chunks_mut(rows * width).zip(positions.par_chunks(rows)).for_each(|(x, positions)| {
        for (x, position) in x.chunks_exact_mut(width).zip(positions) {
            let table = *position as usize * half..(*position as usize + 1) * half;
            let (cos, sin) = (&cos[table.clone()], &sin[table]);
            match pairs {
                RopePairs::Halves => rope_row(x, head_dim, cos, sin, sign),
                RopePairs::Neighbours => rope_row_of_neighbours(x, head_dim, cos, sin, sign),
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::reference::{assert_close, random};
    use super::*;

    fn table(num_positions: usize, half: usize) -> (Vec<f32>, Vec<f32>) {
        let angles = (0..num_positions * half)
            .map(|i| (i / half) as f64 / 10_000f64.powf((i % half) as f64 / half as f64))
            .collect::<Vec<_>>();
        (angles.iter().map(|a| a.cos() as f32).collect(), angles.iter().map(|a| a.sin() as f32).collect())
    }

    /// A head's rotation in f64.
    fn exact(x: &[f32], position: u32, shape: RopeShape) -> Vec<f64> {
        let mut turned: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for i in 0..shape.half {
            let (low, high) = match shape.pairs {
                RopePairs::Halves => (i, i + shape.half),
                RopePairs::Neighbours => (2 * i, 2 * i + 1),
            };
            let angle = f64::from(position) / 10_000f64.powf(i as f64 / shape.half as f64);
            turned[low] = f64::from(x[low]) * angle.cos() - f64::from(x[high]) * angle.sin();
            turned[high] = f64::from(x[high]) * angle.cos() + f64::from(x[low]) * angle.sin();
        }
        turned
    }

    #[test]
    fn pairs_turn_by_their_angles_and_the_inverse_undoes_it() {
        use RopePairs::{Halves, Neighbours};
        for (tokens, num_heads, head_dim, half, pairs) in [
            (1, 1, 2, 1, Halves),
            (7, 3, 10, 5, Halves),
            (50, 9, 64, 32, Halves),
            (40, 6, 48, 12, Halves),
            (9, 3, 20, 5, Neighbours),
            (30, 4, 32, 16, Neighbours),
        ] {
            let shape = RopeShape { num_heads, head_dim, half, pairs };
            let (cos, sin) = table(64, half);
            let positions: Vec<u32> = (0..tokens as u32).map(|t| (t * 5) % 64).collect();
            let x = random(tokens * num_heads * head_dim, 1);
            let heads = x.chunks(head_dim).enumerate();
            let exact: Vec<f64> = heads.flat_map(|(head, x)| exact(x, positions[head / num_heads], shape)).collect();
            let mut y = x.clone();
            rope(&mut y, (&cos, &sin), &positions, shape, false);
            assert_close(&y, &exact, 1e-6);
            rope(&mut y, (&cos, &sin), &positions, shape, true);
            assert_close(&y, &x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 1e-6);
        }
    }
}
