//! Resizing as torchvision resizes images of bytes on a processor, to the bit: both passes are antialiased, weights are numbers of
//! 16 bits, and what the first pass makes is rounded to bytes.

use std::f64::consts::PI;

use crate::spec::Filter;

/// Numbers of a pixel.
const CHANNELS: usize = 3;

/// Most bits behind the point of a weight.
const MOST_BITS: u32 = 22;

/// Resizes red, green and blue bytes, row by row. `from` and `to` are width and height.
#[must_use]
pub fn resize(pixels: &[u8], from: [usize; 2], to: [usize; 2], filter: Filter) -> Vec<u8> {
    let wide =
        if from[0] == to[0] { pixels.to_vec() } else { across(pixels, from, &Weights::of(from[0], to[0], filter)) };
    if from[1] == to[1] {
        return wide;
    }
    down(&wide, to[0] * CHANNELS, &Weights::of(from[1], to[1], filter))
}

/// What each new pixel of a row, or of a column, is made of.
struct Weights {
    /// The first pixel, and the weights of it and those behind it.
    of_each: Vec<(usize, Vec<i32>)>,
    /// Bits of the weights behind the point.
    bits: u32,
}

impl Weights {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "images have fewer than 2^32 pixels on a side"
    )]
    fn of(from: usize, to: usize, filter: Filter) -> Self {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let reach = reach(filter) * stretch;
        let of_pixel = |pixel: usize| {
            let centre = (pixel as f64 + 0.5) * scale;
            let first = (centre - reach + 0.5).max(0.0) as usize;
            let end = ((centre + reach + 0.5) as usize).min(from);
            let weights = (first..end).map(|at| weight(filter, (at as f64 - centre + 0.5) / stretch));
            let weights: Vec<f64> = weights.collect();
            let sum: f64 = weights.iter().sum();
            (first, weights.into_iter().map(|weight| weight / sum).collect::<Vec<f64>>())
        };
        let of_each: Vec<(usize, Vec<f64>)> = (0..to).map(of_pixel).collect();
        let largest = of_each.iter().flat_map(|(_, weights)| weights).copied().fold(0.0, f64::max);
        let fits = |bits: &u32| ((0.5 + largest * f64::from(1_u32 << bits)) as i64) < 1 << 15;
        let bits = (1..=MOST_BITS).take_while(fits).last().unwrap_or(0);
        // `round` goes away from zero.
        let rounded = |weight: f64| (weight * f64::from(1_u32 << bits)).round() as i32;
        let of_each = of_each.into_iter().map(|(first, weights)| (first, weights.into_iter().map(rounded).collect()));
        Self { of_each: of_each.collect(), bits }
    }

    #[expect(clippy::cast_sign_loss, reason = "within a byte")]
    fn byte(&self, sum: i32) -> u8 {
        ((sum + (1 << self.bits >> 1)) >> self.bits).clamp(0, 255) as u8
    }
}

fn across(pixels: &[u8], [width, _]: [usize; 2], weights: &Weights) -> Vec<u8> {
    let rows = pixels.chunks_exact(width * CHANNELS);
    let of_row = |row: &[u8], out: &mut Vec<u8>| {
        for (first, of_pixel) in &weights.of_each {
            for channel in 0..CHANNELS {
                let taken = row[first * CHANNELS + channel..].iter().step_by(CHANNELS);
                out.push(
                    weights.byte(of_pixel.iter().zip(taken).map(|(weight, byte)| weight * i32::from(*byte)).sum()),
                );
            }
        }
    };
    let mut out = Vec::with_capacity(rows.len() * weights.of_each.len() * CHANNELS);
    rows.for_each(|row| of_row(row, &mut out));
    out
}

fn down(bytes: &[u8], row_bytes: usize, weights: &Weights) -> Vec<u8> {
    let mut out = Vec::with_capacity(row_bytes * weights.of_each.len());
    let mut sums = vec![0_i32; row_bytes];
    for (first, of_row) in &weights.of_each {
        sums.fill(0);
        for (weight, row) in of_row.iter().zip(bytes[first * row_bytes..].chunks_exact(row_bytes)) {
            sums.iter_mut().zip(row).for_each(|(sum, byte)| *sum += weight * i32::from(*byte));
        }
        out.extend(sums.iter().map(|sum| weights.byte(*sum)));
    }
    out
}

/// Pixels on each side that a filter sees, where an image is not made smaller.
fn reach(filter: Filter) -> f64 {
    match filter {
        Filter::Bilinear => 1.0,
        Filter::Bicubic => 2.0,
        Filter::Lanczos => 3.0,
    }
}

fn weight(filter: Filter, x: f64) -> f64 {
    let size = x.abs();
    match filter {
        Filter::Bilinear => (1.0 - size).max(0.0),
        Filter::Bicubic if size < 1.0 => ((A + 2.0) * size - (A + 3.0)) * size * size + 1.0,
        Filter::Bicubic if size < 2.0 => (((size - 5.0) * size + 8.0) * size - 4.0) * A,
        Filter::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
        _ => 0.0,
    }
}

/// Of Keys' cubic.
const A: f64 = -0.5;

fn sinc(x: f64) -> f64 {
    if x == 0.0 { 1.0 } else { (PI * x).sin() / (PI * x) }
}
