//! Short causal convolution of every channel by itself, and `SiLU`.

use pulp::Simd;
use rayon::prelude::*;

use super::simd::{rows_per_chunk, sigmoid, vectorised};

/// Documents of one row of channels each, and the convolution's weight.
#[derive(Clone, Copy)]
struct Conv<'a> {
    x: &'a [f32],
    /// `[kernel_size, channels]`
    weight: &'a [f32],
    channels: usize,
    kernel_size: usize,
}

impl<'a> Conv<'a> {
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

/// `silu(sum over shifts of weight x)`, where tokens before a document are zeros.
///
/// # Shapes
/// `x`, `y`: `[tokens, channels]`, `weight`: `[kernel_size, channels]`.
pub fn short_conv(x: &[f32], weight: &[f32], channels: usize, documents: &[(usize, usize)], y: &mut [f32]) {
    let tokens = check(x, weight, channels, documents);
    assert_eq!(y.len(), x.len(), "short_conv: result");
    let (conv, before) =
        (Conv { x, weight, channels, kernel_size: weight.len() / channels }, neighbours(documents, tokens));
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
    for shift in 0..=num_before.min(conv.kernel_size - 1) {
        multiply(conv.row(token - shift), conv.weight(shift), y, shift > 0);
    }
}

/// The gradient of [`short_conv`] with respect to `x`.
pub fn short_conv_backward(
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    channels: usize,
    documents: &[(usize, usize)],
    dx: &mut [f32],
) {
    let tokens = check(x, weight, channels, documents);
    assert!(dy.len() == x.len() && dx.len() == x.len(), "short_conv_backward: lengths");
    let kernel_size = weight.len() / channels;
    let (conv, around) = (Conv { x, weight, channels, kernel_size }, neighbours(documents, tokens));
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
