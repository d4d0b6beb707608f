//! Types of 256 numbers a block, in groups of 16 or 32 whose scales are small integers: multiples of a unit of the block.

use anamnesis::GgufType;
use bytemuck::Zeroable;
use pulp::Simd;

use super::encoded::{Encoded, MAX_GROUPS, OfGroups};
use super::lanes::{Bytes, Lanes, MAX_LANES, Numbers, Row, nearest};
use super::search::{
    Candidates, MANY, scale_and_minimum, scale_of_scales, settled_scale, signed_scale, table_code, table_scale,
};
use super::tile::{LEN, Tile};

/// The most numbers of a group.
const MAX_GROUP_LEN: usize = 32;

/// Encodes the blocks of a tile; with `keep_scales` under the scales and minimums that are encoded already.
#[inline(always)]
pub(super) fn encode<S: Simd>(tile: &Tile<S>, to: &mut Encoded, keep_scales: bool) {
    let exact = match to.kind {
        _ if keep_scales => None,
        GgufType::IQ4_XS => Some(of_table(tile, to)),
        GgufType::Q3_K | GgufType::Q6_K => {
            signed(tile, to);
            None
        }
        _ => {
            with_minimums(tile, to);
            None
        }
    };
    let [scales, minimums] = to.decoded(LEN / group_len(to.kind));
    choose_codes(tile, to, exact.as_ref().unwrap_or(&scales), &minimums);
    to.pack();
}

/// Numbers of a group.
fn group_len(kind: GgufType) -> usize {
    if matches!(kind, GgufType::Q2_K | GgufType::Q3_K | GgufType::Q6_K) { 16 } else { 32 }
}

/// The sum of a block's squares by its numbers, times `factor`.
#[inline(always)]
fn mean_square<S: Simd>(tile: &Tile<S>, factor: f32) -> Lanes<S> {
    // Division and factors are powers of two: their order is free.
    tile.sum_of_squares(&tile.x) * Lanes::splat(tile.simd, factor / LEN as f32)
}

#[inline(always)]
fn sum<S: Simd>(simd: S, weights: &[Row<S>]) -> Row<S> {
    let mut sum = Lanes::splat(simd, 0.0);
    for w in weights {
        sum = sum + Lanes::new(simd, *w);
    }
    sum.row
}

#[inline(always)]
fn store<S: Simd>(simd: S, codes: &[Row<S>], to: &mut [Bytes]) {
    for (to, code) in to.iter_mut().zip(codes) {
        *to = Lanes::new(simd, *code).bytes();
    }
}

/// `x = scale * code - minimum`: `Q2_K`, `Q4_K`, `Q5_K`.
#[inline(always)]
fn with_minimums<S: Simd>(tile: &Tile<S>, to: &mut Encoded) {
    let simd = tile.simd;
    let len = group_len(to.kind);
    let num = LEN / len;
    let is_q2 = to.kind == GgufType::Q2_K;
    let (top, top_scale, (start, num_steps, absolute)) = match to.kind {
        GgufType::Q2_K => (3.0, 15, (-0.5, 15, true)),
        GgufType::Q4_K => (15.0, 63, (-1.0, 20, false)),
        _ => (31.0, 63, (-0.5, 15, false)),
    };
    let few = Candidates { start, step: 0.1, num_steps, absolute, bounded: false };
    let candidates = if tile.is_weighted { MANY } else { few };
    let mean_square = mean_square(tile, if is_q2 { 1.0 } else { 2.0 });
    let [mut scales, mut minimums, mut sums] = [[Row::<S>::zeroed(); MAX_GROUPS]; 3];
    let [mut weights, mut codes] = [[Row::<S>::zeroed(); MAX_GROUP_LEN]; 2];
    let (weights, codes) = (&mut weights[..len], &mut codes[..len]);
    for group in 0..num {
        let x = &tile.x[group * len..][..len];
        if tile.is_weighted {
            tile.weigh(group * len, mean_square, weights);
        } else {
            let least = if is_q2 {
                Lanes::splat(simd, 0.0)
            } else {
                (tile.sum_of_squares(x) / Lanes::splat(simd, len as f32)).sqrt()
            };
            for (to, x) in weights.iter_mut().zip(x) {
                *to = (least + Lanes::new(simd, *x).abs()).row;
            }
        }
        sums[group] = sum(simd, weights);
        let [scale, minimum] = scale_and_minimum(simd, x, weights, top, candidates, codes);
        (scales[group], minimums[group]) = (scale.row, minimum.row);
        store(simd, codes, &mut to.codes[group * len..]);
    }
    let mut integers = [[[0; MAX_LANES]; MAX_GROUPS]; 2];
    for ((found, integers), at) in [scales, minimums].iter().zip(&mut integers).zip(to.units_at()) {
        let unit = if tile.is_weighted {
            let codes = &mut codes[..num];
            let unit = scale_of_scales(simd, &found[..num], &sums[..num], f32::from(top_scale), codes);
            // Some fields have no room for what is beyond their top; ggml looks after those of one type.
            let bound = Lanes::splat(simd, if to.kind == GgufType::Q5_K { 63.0 } else { 255.0 });
            for (to, code) in integers.iter_mut().zip(codes.iter()) {
                *to = Lanes::new(simd, *code).min(bound).bytes();
            }
            unit.numbers()
        } else {
            largest_is_top(&found.map(|row| Lanes::new(simd, row).numbers()), top_scale, to.lanes, integers)
        };
        to.set_floats(at, &unit);
    }
    to.set_integers(&integers[0], &integers[1]);
}

/// Scales as multiples of a unit, of which the largest has `top`.
fn largest_is_top(scales: &OfGroups, top: u8, lanes: usize, integers: &mut [Bytes; MAX_GROUPS]) -> Numbers {
    let mut unit = [0.0; MAX_LANES];
    for lane in 0..lanes {
        let larger = |largest: f32, scale: &Numbers| if scale[lane] > largest { scale[lane] } else { largest };
        let largest = scales.iter().fold(0.0, larger);
        let inverse = if largest > 0.0 { f32::from(top) / largest } else { 0.0 };
        for (integer, scale) in integers.iter_mut().zip(scales) {
            // A byte before it meets its bound, which the fields of `Q2_K` have none of.
            let code = nearest(inverse * scale[lane]) as u8;
            integer[lane] = if top == 15 { code } else { code.min(top) };
        }
        unit[lane] = largest / f32::from(top);
    }
    unit
}

/// `x = scale * (code - half)`, scales of either sign: `Q3_K`, `Q6_K`.
#[inline(always)]
fn signed<S: Simd>(tile: &Tile<S>, to: &mut Encoded) {
    const GROUP_LEN: usize = 16;
    let simd = tile.simd;
    let is_q3 = to.kind == GgufType::Q3_K;
    let half = if is_q3 { 4.0 } else { 32.0 };
    let mean_square = mean_square(tile, 2.0);
    let [mut scales, mut sums] = [[Row::<S>::zeroed(); MAX_GROUPS]; 2];
    let [mut weights, mut codes] = [[Row::<S>::zeroed(); GROUP_LEN]; 2];
    for group in 0..MAX_GROUPS {
        let first = group * GROUP_LEN;
        let x = &tile.x[first..][..GROUP_LEN];
        if tile.is_weighted && !is_q3 {
            weights.copy_from_slice(&tile.importance[first..][..GROUP_LEN]);
        } else {
            tile.weigh(first, mean_square, &mut weights);
        }
        sums[group] = sum(simd, &weights);
        let scale = if is_q3 && !tile.is_weighted {
            settled_scale(simd, x, &weights, half, &mut codes)
        } else {
            signed_scale(simd, x, &weights, half, &mut codes)
        };
        scales[group] = scale.row;
        store(simd, &codes, &mut to.codes[first..]);
    }
    let mut integers = [[0; MAX_LANES]; MAX_GROUPS];
    let unit = if is_q3 && tile.is_weighted {
        let unit = signed_scale(simd, &scales, &sums, 32.0, &mut codes);
        store(simd, &codes, &mut integers);
        unit.numbers()
    } else {
        largest_is_lowest(&scales.map(|row| Lanes::new(simd, row).numbers()), to, &mut integers)
    };
    to.set_floats(to.units_at()[0], &unit);
    to.set_integers(&integers, &integers);
}

/// The scale of largest magnitude, the first of several.
fn largest(scales: &OfGroups, lane: usize) -> f32 {
    let larger = |largest: f32, scale: &Numbers| if scale[lane].abs() > largest.abs() { scale[lane] } else { largest };
    scales.iter().fold(0.0, larger)
}

/// Scales as multiples of a unit, of which that of largest magnitude has the lowest: -32 in `Q3_K`, stored from 0 on, or -128 in
/// `Q6_K`.
fn largest_is_lowest(scales: &OfGroups, to: &mut Encoded, integers: &mut [Bytes; MAX_GROUPS]) -> Numbers {
    let is_q3 = to.kind == GgufType::Q3_K;
    let mut unit = [0.0; MAX_LANES];
    for lane in 0..to.lanes {
        let largest = largest(scales, lane);
        if largest == 0.0 || !is_q3 && largest.abs() < 1e-15 {
            // ggml leaves such a block's bytes at 0, whatever they stand for, but for the codes of Q3_K.
            if !is_q3 {
                to.codes.iter_mut().for_each(|code| code[lane] = 0);
            }
            continue;
        }
        let inverse = if is_q3 { -32.0 } else { -128.0 } / largest;
        for (integer, scale) in integers.iter_mut().zip(scales) {
            let code = nearest(inverse * scale[lane]);
            let code = if is_q3 { (code as i8).clamp(-32, 31) + 32 } else { code.min(127) as i8 };
            integer[lane] = code.cast_unsigned();
        }
        unit[lane] = 1.0 / inverse;
    }
    unit
}

/// `x = scale * entry of a table`: `IQ4_XS`. Gives the scales of the groups before their unit is rounded, under which ggml chooses
/// the codes.
#[inline(always)]
fn of_table<S: Simd>(tile: &Tile<S>, to: &mut Encoded) -> OfGroups {
    let simd = tile.simd;
    let mean_square = mean_square(tile, 2.0);
    let mut scales = [[0.0; MAX_LANES]; MAX_GROUPS];
    let mut weights = [Row::<S>::zeroed(); MAX_GROUP_LEN];
    for (group, scale) in scales[..LEN / MAX_GROUP_LEN].iter_mut().enumerate() {
        let first = group * MAX_GROUP_LEN;
        tile.weigh(first, mean_square, &mut weights);
        *scale = table_scale(simd, &tile.x[first..][..MAX_GROUP_LEN], &weights).numbers();
    }
    let mut integers = [[0; MAX_LANES]; MAX_GROUPS];
    let mut units = [0.0; MAX_LANES];
    for lane in 0..to.lanes {
        let unit = -largest(&scales, lane) / 32.0;
        let inverse = if unit == 0.0 { 0.0 } else { 1.0 / unit };
        for (integer, scale) in integers.iter_mut().zip(&mut scales) {
            let code = nearest(inverse * scale[lane]).clamp(-32, 31);
            scale[lane] = unit * code as f32;
            integer[lane] = (code + 32) as u8;
        }
        units[lane] = unit;
    }
    to.set_floats(0, &units);
    to.set_integers(&integers, &integers);
    scales
}

/// The codes nearest to the numbers under the scales of their groups; under a scale of 0 those that are there stay.
#[inline(always)]
fn choose_codes<S: Simd>(tile: &Tile<S>, to: &mut Encoded, scales: &OfGroups, minimums: &OfGroups) {
    let simd = tile.simd;
    let len = group_len(to.kind);
    let zero = Lanes::splat(simd, 0.0);
    let (lowest, highest) = match to.kind {
        GgufType::Q2_K => (0.0, 3.0),
        GgufType::Q3_K => (-4.0, 3.0),
        GgufType::Q4_K => (0.0, 15.0),
        GgufType::Q5_K => (0.0, 31.0),
        _ => (-32.0, 31.0),
    };
    let (lowest, highest) = (Lanes::splat(simd, lowest), Lanes::splat(simd, highest));
    for group in 0..LEN / len {
        let (scale, minimum) = (Lanes::of(simd, &scales[group]), Lanes::of(simd, &minimums[group]));
        let none = scale.equal(zero);
        let numbers = tile.x[group * len..][..len].iter().zip(&mut to.codes[group * len..]);
        if to.kind == GgufType::IQ4_XS {
            let inverse = none.select(zero, Lanes::splat(simd, 1.0) / scale);
            for (x, code) in numbers {
                *code = table_code(simd, inverse * Lanes::new(simd, *x)).bytes();
            }
            continue;
        }
        let stays = none.select(Lanes::splat(simd, 255.0), zero).bytes();
        for (x, code) in numbers {
            let nearest = ((Lanes::new(simd, *x) + minimum) / scale).near().max(lowest).min(highest);
            let new = (nearest - lowest).bytes();
            *code = std::array::from_fn(|lane| new[lane] & !stays[lane] | code[lane] & stays[lane]);
        }
    }
}
