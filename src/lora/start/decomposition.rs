//! The largest singular values of a matrix with their vectors.

use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::rows::{StartRows, as_f32, dot};

/// Largest singular values, descending, with their vectors.
#[derive(Clone, Debug)]
pub(in crate::lora) struct Singular {
    pub(in crate::lora) values: Vec<f32>,
    /// `[count, out_features]`.
    pub(in crate::lora) left: StartRows,
    /// `[count, in_features]`.
    pub(in crate::lora) right: StartRows,
}

/// Products of a block with the matrix before its vectors are taken from the space that they span.
const POWERS: usize = 4;
/// Vectors of a block beyond those that are asked for.
const SPARE: usize = 8;
/// Largest change of a singular value, as a share of it, with which it counts as found.
const TOLERANCE: f32 = 1e-6;
const MOST_ROUNDS: usize = 20;

impl Singular {
    /// The `count` largest of `w`, `[out_features, in_features]`: blocks of a Krylov space (Musco and Musco, 2015), restarted
    /// from the vectors found until the values stay.
    pub(in crate::lora) fn largest(w: &StartRows, count: usize, rng: &mut ChaCha8Rng) -> Self {
        let most = w.count().min(w.length);
        let width = (count + SPARE).min(most);
        let mut block = StartRows::normal(width, w.count(), rng).orthonormal();
        let mut found = Self::within(w, &block);
        for _ in 0..MOST_ROUNDS {
            let mut space = block.clone();
            for _ in 0..POWERS.min(most.div_ceil(width).saturating_sub(1)) {
                block = block.times(w).times_transposed(w).orthonormal();
                space.values.extend(&block.values);
            }
            let next = Self::within(w, &space.first(most).orthonormal());
            let pairs = next.values.iter().zip(&found.values).take(count);
            let is_found = pairs.clone().all(|(next, last)| (next - last).abs() <= TOLERANCE * next);
            found = next;
            block = found.left.clone().first(width);
            if is_found {
                break;
            }
        }
        found.first(count)
    }

    /// The largest as `torch.svd_lowrank` estimates them with this number of iterations, as many as there are vectors to start
    /// from, `[count, in_features]`.
    pub(in crate::lora) fn estimated(w: &StartRows, start: &StartRows, num_iterations: usize) -> Self {
        let mut block = start.times_transposed(w).orthonormal();
        for _ in 0..num_iterations {
            block = block.times(w).orthonormal().times_transposed(w).orthonormal();
        }
        Self::within(w, &block)
    }

    /// All within the space of some orthonormal vectors `[count, out_features]`.
    fn within(w: &StartRows, space: &StartRows) -> Self {
        Self::of_images(&space.times(w), space)
    }

    /// All of a product `b a`, of `b` transposed, `[r, out_features]`, and `a`, `[r, in_features]`.
    pub(in crate::lora) fn of_product(b: &StartRows, a: &StartRows) -> Self {
        let space = b.clone().first(b.length).orthonormal();
        Self::of_images(&space.times_transposed(b).times(a), &space)
    }

    /// All of a matrix whose products with these orthonormal vectors are `images`.
    fn of_images(images: &StartRows, space: &StartRows) -> Self {
        let (squares, vectors) = symmetric_eigen(images);
        let values: Vec<f32> = squares.iter().map(|square| as_f32(square.max(0.0).sqrt())).collect();
        let inverse: Vec<f32> = values.iter().map(|value| 1.0 / value.max(f32::MIN_POSITIVE)).collect();
        Self { left: vectors.times(space), right: vectors.times(images).scaled(&inverse), values }
    }

    pub(in crate::lora) fn first(mut self, count: usize) -> Self {
        self.values.truncate(count);
        Self { values: self.values, left: self.left.first(count), right: self.right.first(count) }
    }
}

/// The eigenvalues of the products of rows with each other, descending, and the eigenvectors as rows: Jacobi's method.
fn symmetric_eigen(rows: &StartRows) -> (Vec<f64>, StartRows) {
    let size = rows.count();
    let of: Vec<&[f32]> = rows.iter().collect();
    let mut matrix: Vec<Vec<f64>> = of.par_iter().map(|a| of.iter().map(|b| dot(a, b)).collect()).collect();
    let mut vectors: Vec<Vec<f64>> =
        (0..size).map(|row| (0..size).map(|column| f64::from(u8::from(row == column))).collect()).collect();
    let scale = (0..size).map(|index| matrix[index][index]).fold(f64::MIN_POSITIVE, f64::max);
    for _ in 0..MOST_SWEEPS {
        let mut largest = 0.0_f64;
        for p in 0..size {
            for q in p + 1..size {
                let off = matrix[p][q];
                largest = largest.max(off.abs());
                if off.abs() <= f64::EPSILON * scale {
                    continue;
                }
                let theta = (matrix[q][q] - matrix[p][p]) / (2.0 * off);
                let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
                let cosine = 1.0 / t.hypot(1.0);
                rotate_rows(&mut matrix, p, q, [cosine, t * cosine]);
                for row in &mut matrix {
                    (row[p], row[q]) = turned(row[p], row[q], [cosine, t * cosine]);
                }
                rotate_rows(&mut vectors, p, q, [cosine, t * cosine]);
            }
        }
        if largest <= f64::EPSILON * scale {
            break;
        }
    }
    let mut order: Vec<usize> = (0..size).collect();
    order.sort_by(|a, b| matrix[*b][*b].total_cmp(&matrix[*a][*a]));
    let values = order.iter().map(|index| matrix[*index][*index]).collect();
    let vectors = order.iter().flat_map(|index| vectors[*index].iter().map(|value| as_f32(*value))).collect();
    (values, StartRows { values: vectors, length: size })
}

const MOST_SWEEPS: usize = 30;

fn turned(p: f64, q: f64, [cosine, sine]: [f64; 2]) -> (f64, f64) {
    (cosine * p - sine * q, sine * p + cosine * q)
}

fn rotate_rows(rows: &mut [Vec<f64>], p: usize, q: usize, by: [f64; 2]) {
    let (before, after) = rows.split_at_mut(q);
    for (p, q) in before[p].iter_mut().zip(&mut after[0]) {
        (*p, *q) = turned(*p, *q, by);
    }
}
