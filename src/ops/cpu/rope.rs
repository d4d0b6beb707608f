//! Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout (`rotate_half`).

use rayon::prelude::*;

use super::simd::{rows_per_chunk, vectorised};

vectorised! { fn rope_row<'a, S>(_simd, x: &'a mut [f32], cos: &'a [f32], sin: &'a [f32], sign: f32) {
    let half = cos.len();
    for head in x.chunks_exact_mut(2 * half) {
        let (low, high) = head.split_at_mut(half);
        for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let sin = sign * sin;
            let (x, y) = (*low, *high);
            *low = x * cos - y * sin;
            *high = y * cos + x * sin;
        }
    }
} }

/// Rotates every head of every token by the angles of the token's position, in place; `inverse` rotates back.
///
/// Elements `i` and `i + head_dim / 2` of a head form a pair. The inverse is also the gradient.
///
/// # Shapes
/// `x`: `[tokens, num_heads * head_dim]`; `cos`, `sin`: `[positions in the table, head_dim / 2]`;
/// `positions`: `[tokens]`, each a row of the table.
pub fn rope(
    x: &mut [f32],
    cos: &[f32],
    sin: &[f32],
    positions: &[u32],
    num_heads: usize,
    head_dim: usize,
    inverse: bool,
) {
    let width = num_heads * head_dim;
    let half = head_dim / 2;
    assert!(head_dim.is_multiple_of(2) && cos.len() == sin.len(), "rope: head_dim {head_dim}");
    assert_eq!(x.len(), positions.len() * width, "rope: tokens");
    if x.is_empty() {
        return;
    }
    let sign = if inverse { -1.0 } else { 1.0 };
    let rows = rows_per_chunk(width);
    x.par_chunks_mut(rows * width).zip(positions.par_chunks(rows)).for_each(|(x, positions)| {
        for (x, position) in x.chunks_exact_mut(width).zip(positions) {
            let table = *position as usize * half..(*position as usize + 1) * half;
            rope_row(x, &cos[table.clone()], &sin[table], sign);
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

    #[test]
    fn pairs_are_half_a_head_apart_and_the_inverse_undoes_it() {
        for (tokens, num_heads, head_dim) in [(1, 1, 2), (7, 3, 10), (50, 9, 64), (40, 6, 48)] {
            let half = head_dim / 2;
            let (cos, sin) = table(64, half);
            let positions: Vec<u32> = (0..tokens as u32).map(|t| (t * 5) % 64).collect();
            let x = random(tokens * num_heads * head_dim, 1);
            let mut exact = vec![0.0; x.len()];
            for (t, p) in positions.iter().enumerate() {
                for h in 0..num_heads {
                    for i in 0..half {
                        let (low, high) =
                            ((t * num_heads + h) * head_dim + i, (t * num_heads + h) * head_dim + i + half);
                        let angle = f64::from(*p) / 10_000f64.powf(i as f64 / half as f64);
                        exact[low] = f64::from(x[low]) * angle.cos() - f64::from(x[high]) * angle.sin();
                        exact[high] = f64::from(x[high]) * angle.cos() + f64::from(x[low]) * angle.sin();
                    }
                }
            }
            let mut y = x.clone();
            rope(&mut y, &cos, &sin, &positions, num_heads, head_dim, false);
            assert_close(&y, &exact, 1e-6);
            rope(&mut y, &cos, &sin, &positions, num_heads, head_dim, true);
            assert_close(&y, &x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 1e-6);
        }
    }
}
