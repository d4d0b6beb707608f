//! Short causal convolution of every channel by itself, with `SiLU` or between two gates.

use pulp::Simd;
use rayon::prelude::*;

use super::simd::{rows_per_chunk, sigmoid, vectorised};

/// The weight of a convolution, `[kernel_size, channels]`, and what it adds, `[channels]`.
type Weights<'a> = (&'a [f32], Option<&'a [f32]>);

/// Documents of one row of channels each, and the convolution's weights.
#[derive(Clone, Copy)]
struct Conv<'a> {
    x: &'a [f32],
    /// `[kernel_size, channels]`
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    channels: usize,
    kernel_size: usize,
}

impl<'a> Conv<'a> {
    fn new(x: &'a [f32], (weight, bias): Weights<'a>, channels: usize) -> Self {
        assert!(bias.is_none_or(|bias| bias.len() == channels), "short_conv: bias of {channels}");
        Self { x, weight, bias, channels, kernel_size: weight.len() / channels }
    }

    fn row(&self, token: usize) -> &'a [f32] {
        &self.x[token * self.channels..(token + 1) * self.channels]
    }

    /// The weight of the token `shift` before.
    fn weight(&self, shift: usize) -> &'a [f32] {
        let first = (self.kernel_size - 1 - shift) * self.channels;
        &self.weight[first..first + self.channels]
    }
}

vectorised! {
/// `to = x w`, or `to += x w`.
fn multiply<'a, S>(_simd, x: &'a [f32], w: &'a [f32], to: &'a mut [f32], accumulate: bool) {
    if accumulate {
        for ((to, x), w) in to.iter_mut().zip(x).zip(w) {
            *to += x * w;
        }
    } else {
        for ((to, x), w) in to.iter_mut().zip(x).zip(w) {
            *to = x * w;
        }
    }
} }

vectorised! {
/// `to = a b w`, or `to += a b w`.
fn multiply_product<'a, S>(_simd, ab: [&'a [f32]; 2], w: &'a [f32], to: &'a mut [f32], accumulate: bool) {
    let [a, b] = ab;
    if accumulate {
        for (((to, a), b), w) in to.iter_mut().zip(a).zip(b).zip(w) {
            *to += a * b * w;
        }
    } else {
        for (((to, a), b), w) in to.iter_mut().zip(a).zip(b).zip(w) {
            *to = a * b * w;
        }
    }
} }

vectorised! {
/// `to *= x`.
fn scale<'a, S>(_simd, x: &'a [f32], to: &'a mut [f32]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to *= x;
    }
} }

vectorised! {
fn silu<'a, S>(simd, x: &'a mut [f32]) {
    let (body, tail) = S::as_mut_simd_f32s(x);
    for x in body {
        *x = simd.mul_f32s(*x, sigmoid(simd, *x));
    }
    if !tail.is_empty() {
        let x = simd.partial_load_f32s(tail);
        simd.partial_store_f32s(tail, simd.mul_f32s(x, sigmoid(simd, x)));
    }
} }

#[inline(always)]
fn slope<S: Simd>(simd: S, dy: S::f32s, x: S::f32s) -> S::f32s {
    let (one, s) = (simd.splat_f32s(1.0), sigmoid(simd, x));
    let inner = simd.mul_add_e_f32s(x, simd.sub_f32s(one, s), one);
    simd.mul_f32s(dy, simd.mul_f32s(s, inner))
}

vectorised! {
/// `x = dy silu'(x)`.
fn silu_backward<'a, S>(simd, dy: &'a [f32], x: &'a mut [f32]) {
    let ((dy, dy_tail), (body, tail)) = (S::as_simd_f32s(dy), S::as_mut_simd_f32s(x));
    for (x, dy) in body.iter_mut().zip(dy) {
        *x = slope(simd, *dy, *x);
    }
    if !tail.is_empty() {
        let (dy, x) = (simd.partial_load_f32s(dy_tail), simd.partial_load_f32s(tail));
        simd.partial_store_f32s(tail, slope(simd, dy, x));
    }
} }

/// For every token, how many tokens of its document are before it, and how many are after it.
fn neighbours(documents: &[(usize, usize)], tokens: usize) -> Vec<[usize; 2]> {
    let mut found = vec![[0; 2]; tokens];
    for &(start, len) in documents {
        for (index, found) in found[start..start + len].iter_mut().enumerate() {
            *found = [index, len - 1 - index];
        }
    }
    found
}

fn check(x: &[f32], weight: &[f32], channels: usize, documents: &[(usize, usize)]) -> usize {
    assert!(channels > 0 && x.len().is_multiple_of(channels), "short_conv: {} of {channels}", x.len());
    assert!(!weight.is_empty() && weight.len().is_multiple_of(channels), "short_conv: weight of {channels}");
    let tokens = x.len() / channels;
    assert!(documents.iter().all(|(start, len)| start + len <= tokens), "short_conv: documents of {tokens} tokens");
    tokens
}

/// `silu(bias + sum over shifts of weight x)`, where tokens before a document are zeros.
///
/// # Shapes
/// `x`, `y`: `[tokens, channels]`, the weight: `[kernel_size, channels]`, the bias: `[channels]`.
pub fn short_conv(x: &[f32], weights: Weights<'_>, channels: usize, documents: &[(usize, usize)], y: &mut [f32]) {
    let tokens = check(x, weights.0, channels, documents);
    assert_eq!(y.len(), x.len(), "short_conv: result");
    let (conv, before) = (Conv::new(x, weights, channels), neighbours(documents, tokens));
    let rows = rows_per_chunk(channels);
    y.par_chunks_mut(rows * channels).enumerate().for_each(|(chunk, y)| {
        for (row, y) in y.chunks_exact_mut(channels).enumerate() {
            convolve(conv, chunk * rows + row, before[chunk * rows + row][0], y);
            silu(y);
        }
    });
}

/// Without the activation.
fn convolve(conv: Conv<'_>, token: usize, num_before: usize, y: &mut [f32]) {
    if let Some(bias) = conv.bias {
        y.copy_from_slice(bias);
    }
    for shift in 0..=num_before.min(conv.kernel_size - 1) {
        multiply(conv.row(token - shift), conv.weight(shift), y, shift > 0 || conv.bias.is_some());
    }
}

/// The gradient of [`short_conv`] with respect to `x`.
pub fn short_conv_backward(
    dy: &[f32],
    x: &[f32],
    weights: Weights<'_>,
    channels: usize,
    documents: &[(usize, usize)],
    dx: &mut [f32],
) {
    let tokens = check(x, weights.0, channels, documents);
    assert!(dy.len() == x.len() && dx.len() == x.len(), "short_conv_backward: lengths");
    let (conv, around) = (Conv::new(x, weights, channels), neighbours(documents, tokens));
    let kernel_size = conv.kernel_size;
    let rows = rows_per_chunk(channels).max(4 * kernel_size);
    dx.par_chunks_mut(rows * channels).enumerate().for_each(|(chunk, dx)| {
        let first = chunk * rows;
        let num_rows = dx.len() / channels;
        // Tokens behind the chunk's see its tokens, too.
        let end = (first + num_rows + kernel_size - 1).min(tokens);
        super::simd::with_scratch((end - first) * channels, |du| {
            for (token, du) in (first..end).zip(du.chunks_exact_mut(channels)) {
                convolve(conv, token, around[token][0], du);
                silu_backward(&dy[token * channels..(token + 1) * channels], du);
            }
            for (row, dx) in dx.chunks_exact_mut(channels).enumerate() {
                for shift in 0..=around[first + row][1].min(kernel_size - 1) {
                    let du = &du[(row + shift) * channels..(row + shift + 1) * channels];
                    multiply(du, conv.weight(shift), dx, shift > 0);
                }
            }
        });
    });
}

/// What is between two gates: rows of `b`, `c` and `x` side by side.
struct Gated<'a> {
    bcx: &'a [f32],
    /// `[kernel_size, channels]`
    weight: &'a [f32],
    channels: usize,
    /// Tokens of its document before and behind every token.
    around: Vec<[usize; 2]>,
}

impl<'a> Gated<'a> {
    fn new(bcx: &'a [f32], weight: &'a [f32], channels: usize, documents: &[(usize, usize)]) -> Self {
        let tokens = check(bcx, weight, channels, documents) / 3;
        Self { bcx, weight, channels, around: neighbours(documents, tokens) }
    }

    fn part(&self, token: usize, part: usize) -> &'a [f32] {
        let first = (3 * token + part) * self.channels;
        &self.bcx[first..first + self.channels]
    }

    fn shifts(&self, limit: usize) -> impl Iterator<Item = (usize, &'a [f32])> + use<'a> {
        let rows = self.weight.chunks_exact(self.channels).rev();
        rows.take(limit + 1).enumerate()
    }

    /// The sum over shifts of `weight b x` of a token.
    fn convolve(&self, token: usize, y: &mut [f32]) {
        for (shift, weight) in self.shifts(self.around[token][0]) {
            let [b, x] = [0, 2].map(|part| self.part(token - shift, part));
            multiply_product([b, x], weight, y, shift > 0);
        }
    }
}

/// `c` times the sum over shifts of `weight b x`, where tokens before a document are zeros.
///
/// # Shapes
/// `bcx`: `b`, `c` and `x` side by side, `[tokens, 3 * channels]`, `weight`: `[kernel_size, channels]`, `y`: `[tokens, channels]`.
pub fn gated_conv(bcx: &[f32], weight: &[f32], channels: usize, documents: &[(usize, usize)], y: &mut [f32]) {
    let gated = Gated::new(bcx, weight, channels, documents);
    assert_eq!(3 * y.len(), bcx.len(), "gated_conv: result");
    let rows = rows_per_chunk(3 * channels);
    y.par_chunks_mut(rows * channels).enumerate().for_each(|(chunk, y)| {
        for (row, y) in y.chunks_exact_mut(channels).enumerate() {
            gated.convolve(chunk * rows + row, y);
            scale(gated.part(chunk * rows + row, 1), y);
        }
    });
}

/// The gradient of [`gated_conv`] with respect to `bcx`.
pub fn gated_conv_backward(
    dy: &[f32],
    bcx: &[f32],
    weight: &[f32],
    channels: usize,
    documents: &[(usize, usize)],
    d_bcx: &mut [f32],
) {
    let gated = Gated::new(bcx, weight, channels, documents);
    assert!(3 * dy.len() == bcx.len() && d_bcx.len() == bcx.len(), "gated_conv_backward: lengths");
    let dy = |token: usize| &dy[token * channels..(token + 1) * channels];
    let rows = rows_per_chunk(3 * channels);
    d_bcx.par_chunks_mut(rows * 3 * channels).enumerate().for_each(|(chunk, d_bcx)| {
        for (row, d_bcx) in d_bcx.chunks_exact_mut(3 * channels).enumerate() {
            let token = chunk * rows + row;
            let (db, rest) = d_bcx.split_at_mut(channels);
            let (dc, dx) = rest.split_at_mut(channels);
            gated.convolve(token, dc);
            scale(dy(token), dc);
            // The gradient of b x first.
            for (shift, weight) in gated.shifts(gated.around[token][1]) {
                multiply_product([dy(token + shift), gated.part(token + shift, 1)], weight, db, shift > 0);
            }
            dx.copy_from_slice(db);
            scale(gated.part(token, 0), dx);
            scale(gated.part(token, 2), db);
        }
    });
}
