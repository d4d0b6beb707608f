//! Types without scales of scales: 32 numbers a block, or 64 in four parts (`NVFP4`).

use anamnesis::GgufType;
use bytemuck::Zeroable;
use pulp::Simd;

use super::encoded::Encoded;
use super::lanes::{Bytes, Lanes, Row};
use super::search::{MANY, largest, scale_and_minimum, signed_scale, table_code, table_scale};
use super::tile::Tile;

/// Numbers of most blocks.
const LEN: usize = 32;

/// Encodes the blocks of a tile.
#[inline(always)]
pub(super) fn encode<S: Simd>(tile: &Tile<S>, to: &mut Encoded) {
    match to.kind {
        GgufType::Q8_0 => q8_0(tile, to),
        GgufType::Q4_0 => signed(tile, to, 8.0),
        GgufType::Q5_0 => signed(tile, to, 16.0),
        GgufType::Q4_1 => with_minimum(tile, to, 15.0),
        GgufType::Q5_1 => with_minimum(tile, to, 31.0),
        GgufType::IQ4_NL => of_table(tile, to),
        GgufType::MXFP4 => mxfp4(tile, to),
        _ => nvfp4(tile, to),
    }
    to.pack();
}

#[inline(always)]
fn store<S: Simd>(simd: S, codes: &[Row<S>], to: &mut [Bytes]) {
    for (to, code) in to.iter_mut().zip(codes) {
        *to = Lanes::new(simd, *code).bytes();
    }
}

/// The inverse of a scale, 0 for 0.
#[inline(always)]
fn inverse<S: Simd>(simd: S, scale: Lanes<S>) -> Lanes<S> {
    let zero = Lanes::splat(simd, 0.0);
    scale.equal(zero).select(zero, Lanes::splat(simd, 1.0) / scale)
}

/// The integer part of small numbers from 0 on as bytes; 0 for what is not finite.
#[inline(always)]
fn truncated<S: Simd>(simd: S, x: Lanes<S>, top: f32) -> Bytes {
    let near = x.near();
    let below = x.less(near).select(near - Lanes::splat(simd, 1.0), near);
    below.max(Lanes::splat(simd, 0.0)).min(Lanes::splat(simd, top)).bytes()
}

/// The largest magnitude gets code 127; halves are rounded away from 0.
#[inline(always)]
fn q8_0<S: Simd>(tile: &Tile<S>, to: &mut Encoded) {
    let simd = tile.simd;
    let splat = |x| Lanes::splat(simd, x);
    let scale = largest(simd, &tile.x[..LEN]).abs() / splat(127.0);
    let inverse = inverse(simd, scale);
    let (zero, one, half) = (splat(0.0), splat(1.0), splat(0.5));
    for (x, code) in tile.x[..LEN].iter().zip(&mut to.codes) {
        let x = Lanes::new(simd, *x) * inverse;
        let near = x.near();
        let rest = x - near;
        let up = rest.equal(half).and(zero.less(x));
        let down = rest.equal(zero - half).and(x.less(zero));
        *code = up.select(near + one, down.select(near - one, near)).bytes();
    }
    to.set_floats(0, &scale.numbers());
}

/// `x = scale * (code - half)`: `Q4_0`, `Q5_0`.
#[inline(always)]
fn signed<S: Simd>(tile: &Tile<S>, to: &mut Encoded, half: f32) {
    let simd = tile.simd;
    let x = &tile.x[..LEN];
    let scale = if tile.is_weighted {
        let [mut weights, mut codes] = [[Row::<S>::zeroed(); LEN]; 2];
        tile.weigh(0, Lanes::of(simd, &tile.mean_square), &mut weights);
        let scale = signed_scale(simd, x, &weights, half, &mut codes);
        store(simd, &codes, &mut to.codes);
        scale
    } else {
        let scale = largest(simd, x) / Lanes::splat(simd, -half);
        let inverse = inverse(simd, scale);
        for (x, code) in x.iter().zip(&mut to.codes) {
            let x = Lanes::new(simd, *x) * inverse + Lanes::splat(simd, half + 0.5);
            *code = truncated(simd, x, 2.0 * half - 1.0);
        }
        scale
    };
    to.set_floats(0, &scale.numbers());
}

/// `x = scale * code + minimum`: `Q4_1`, `Q5_1`.
#[inline(always)]
fn with_minimum<S: Simd>(tile: &Tile<S>, to: &mut Encoded, top: f32) {
    let simd = tile.simd;
    let x = &tile.x[..LEN];
    let [scale, low] = if tile.is_weighted {
        let [mut weights, mut codes] = [[Row::<S>::zeroed(); LEN]; 2];
        tile.weigh(0, Lanes::of(simd, &tile.mean_square), &mut weights);
        let [scale, minimum] = scale_and_minimum(simd, x, &weights, top, MANY, &mut codes);
        store(simd, &codes, &mut to.codes);
        [scale, minimum.negated()]
    } else {
        let (mut low, mut high) = (Lanes::splat(simd, f32::MAX), Lanes::splat(simd, f32::MIN));
        for x in x {
            let x = Lanes::new(simd, *x);
            (low, high) = (low.min(x), high.max(x));
        }
        let scale = (high - low) / Lanes::splat(simd, top);
        let inverse = inverse(simd, scale);
        for (x, code) in x.iter().zip(&mut to.codes) {
            let x = (Lanes::new(simd, *x) - low) * inverse + Lanes::splat(simd, 0.5);
            *code = truncated(simd, x, top);
        }
        [scale, low]
    };
    to.set_floats(0, &scale.numbers());
    to.set_floats(2, &low.numbers());
}

/// `x = scale * entry of a table`: `IQ4_NL`.
#[inline(always)]
fn of_table<S: Simd>(tile: &Tile<S>, to: &mut Encoded) {
    let simd = tile.simd;
    let x = &tile.x[..LEN];
    let mut weights = [Row::<S>::zeroed(); LEN];
    tile.weigh(0, tile.sum_of_squares(x) * Lanes::splat(simd, 2.0 / LEN as f32), &mut weights);
    let scale = table_scale(simd, x, &weights);
    let inverse = inverse(simd, scale);
    for (x, code) in x.iter().zip(&mut to.codes) {
        *code = table_code(simd, inverse * Lanes::new(simd, *x)).bytes();
    }
    to.set_floats(0, &scale.numbers());
}

/// The code of the float of four bits that is nearest, the first of several. `unit` is half of the scale, as there are halves.
#[inline(always)]
fn four_bit_float<S: Simd>(simd: S, x: Lanes<S>, unit: Lanes<S>) -> Bytes {
    let zero = Lanes::splat(simd, 0.0);
    let (mut code, mut best) = (zero, (zero * unit - x).abs());
    for (i, number) in [1i8, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12].into_iter().enumerate() {
        let error = (Lanes::splat(simd, f32::from(number)) * unit - x).abs();
        let better = error.less(best);
        code = better.select(Lanes::splat(simd, (i + 1) as f32), code);
        best = better.select(error, best);
    }
    code.bytes()
}

/// The scale is a power of two in one byte: that of the largest magnitude, less two.
#[inline(always)]
fn mxfp4<S: Simd>(tile: &Tile<S>, to: &mut Encoded) {
    let simd = tile.simd;
    let exponents = largest(simd, &tile.x[..LEN]).numbers().map(|largest| exponent(largest.abs()));
    let unit = Lanes::of(simd, &exponents.map(power));
    for (x, code) in tile.x[..LEN].iter().zip(&mut to.codes) {
        *code = four_bit_float(simd, Lanes::new(simd, *x), unit);
    }
    to.bytes[0] = exponents;
}

/// 127 + log2(magnitude), rounded to `f32` and then down, - 2; 0 for 0.
fn exponent(magnitude: f32) -> u8 {
    if magnitude == 0.0 {
        return 0;
    }
    let log = f64::from(magnitude).log2() as f32;
    (log.floor() as i32 + 125) as u8
}

/// 2^(exponent - 128).
fn power(exponent: u8) -> f32 {
    let bits = match exponent {
        0 | 1 => 0x20_0000 << exponent,
        _ => u32::from(exponent - 1) << 23,
    };
    f32::from_bits(bits)
}

/// Scales of 16 numbers in floats of eight bits without a sign.
#[inline(always)]
fn nvfp4<S: Simd>(tile: &Tile<S>, to: &mut Encoded) {
    const PART: usize = 16;
    let simd = tile.simd;
    for part in 0..4 {
        let x = &tile.x[PART * part..][..PART];
        let scales = (largest(simd, x).abs() / Lanes::splat(simd, 6.0)).numbers().map(eight_bit_float);
        let unit = Lanes::of(simd, &scales.map(half_of));
        for (x, code) in x.iter().zip(&mut to.codes[PART * part..]) {
            *code = four_bit_float(simd, Lanes::new(simd, *x), unit);
        }
        to.bytes[part] = scales;
    }
}

/// The nearest E4M3 float to a number from 0 on, halves upwards, at most 448.
fn eight_bit_float(x: f32) -> u8 {
    let bits = x.min(448.0).to_bits();
    let exponent = (bits >> 23).cast_signed() - 120;
    match exponent {
        ..=0 => (x * 512.0 + 0.5).min(7.0) as u8,
        // Rounding carries into the exponent; the largest code stands for everything beyond.
        1..15 => {
            let code = ((bits + (1 << 19)) >> 20).cast_signed() - (120 << 3);
            if code >= 15 << 3 { 0x7e } else { code as u8 }
        }
        _ => 0x7e,
    }
}

/// Half of the number of an E4M3 float.
fn half_of(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3), f32::from(code & 7));
    let whole = if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    whole * 0.5
}
