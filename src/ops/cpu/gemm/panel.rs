//! Packing of weights, from their storage dtype and either orientation, into panels of words.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::super::pack::{PANEL, pack_columns};
use super::super::round::round;
use super::super::simd::{vectorised, with_scratch};
use super::super::weight::{Values, Weight};
use super::{Right, round_to_pairs};

vectorised! { fn widen_bf16<'a, S>(_simd, from: &'a [bf16], to: &'a mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
} }

vectorised! { fn scale<'a, S>(_simd, x: &'a mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
} }

vectorised! {
/// Words with `low` in the low half and `high` in the high half; without `high`, the high half is zero.
fn interleave<'a, S>(_simd, low: &'a [bf16], high: Option<&'a [bf16]>, words: &'a mut [u32]) {
    match high {
        Some(high) => {
            for ((word, low), high) in words.iter_mut().zip(low).zip(high) {
                *word = u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
            }
        }
        None => {
            for (word, low) in words.iter_mut().zip(low) {
                *word = u32::from(low.to_bits());
            }
        }
    }
} }

/// Converts to f32.
pub(in super::super) fn widen(weight: Weight<'_>, first: usize, to: &mut [f32]) {
    let range = first..first + to.len();
    match weight.values {
        Values::F32(w) => to.copy_from_slice(&w[range]),
        Values::Bf16(w) => widen_bf16(&w[range], to),
        Values::F16(w) => <[f16]>::convert_to_f32_slice(&w[range], to),
        Values::Codes(w) => w.decode(first, to),
        Values::Blocks(w) => w.decode(first, to),
    }
}

/// Zeroes what lies behind the columns, up to the next multiple of 16.
fn clear_padding<W: super::PanelWord>(panel: &mut [W], columns: usize) {
    let padded = columns.next_multiple_of(16);
    if columns < padded {
        for row in panel.chunks_exact_mut(PANEL) {
            row[columns..padded].fill(W::zeroed());
        }
    }
}

/// Packs numbers `first..first + depth` of the depth as f32.
pub(super) fn pack_single(b: &Right<'_>, first: usize, depth: usize, column: usize, columns: usize, panel: &mut [f32]) {
    match (b.transposed, b.weight.values) {
        (true, Values::F32(w)) => {
            pack_columns(&w[column * b.stride + first..], b.stride, columns, depth, panel, PANEL);
        }
        (true, _) => with_scratch(columns * depth, |rows| {
            for (j, row) in rows.chunks_exact_mut(depth.max(1)).enumerate() {
                widen(b.weight, (column + j) * b.stride + first, row);
            }
            pack_columns(rows, depth, columns, depth, panel, PANEL);
        }),
        (false, _) => {
            for (p, row) in panel.chunks_exact_mut(PANEL).enumerate().take(depth) {
                widen(b.weight, (first + p) * b.stride + column, &mut row[..columns]);
            }
            clear_padding(panel, columns);
        }
    }
    if b.factor != 1.0 {
        scale(panel, b.factor);
    }
}

/// Packs words `first..first + depth`, pairs of bfloat16 along a depth of `k` numbers.
pub(super) fn pack_pairs(
    b: &Right<'_>,
    k: usize,
    first: usize,
    depth: usize,
    column: usize,
    columns: usize,
    panel: &mut [u32],
) {
    // Numbers of the depth that the words hold; the last word may hold only one.
    let (number, numbers) = (2 * first, (2 * depth).min(k - 2 * first));
    if b.transposed {
        with_scratch(columns * depth + numbers, |scratch| {
            let (words, row) = scratch.split_at_mut(columns * depth);
            let words: &mut [u32] = bytemuck::cast_slice_mut(words);
            for (j, words) in words.chunks_exact_mut(depth.max(1)).enumerate() {
                let at = (column + j) * b.stride + number;
                match b.weight.values {
                    Values::Bf16(w) if b.factor == 1.0 => {
                        copy_pairs(&w[at..at + numbers], words);
                    }
                    Values::Codes(w) if b.factor == 1.0 && w.decode_pairs(at, numbers, words) => {}
                    _ => {
                        widen(b.weight, at, row);
                        scale(row, b.factor);
                        round_to_pairs(row, words);
                    }
                }
            }
            pack_columns(words, depth, columns, depth, panel, PANEL);
        });
        return;
    }
    with_scratch(2 * columns, |scratch| {
        let (low, high) = scratch.split_at_mut(columns);
        for (p, words) in panel.chunks_exact_mut(PANEL).enumerate().take(depth) {
            let at = |i: usize| (number + 2 * p + i) * b.stride + column;
            let paired = 2 * p + 1 < numbers;
            match b.weight.values {
                Values::Bf16(w) if b.factor == 1.0 => {
                    let high = paired.then(|| &w[at(1)..at(1) + columns]);
                    interleave(&w[at(0)..at(0) + columns], high, &mut words[..columns]);
                }
                Values::Codes(w)
                    if b.factor == 1.0 && w.decode_rows(at(0), paired.then(|| at(1)), &mut words[..columns]) => {}
                _ => {
                    widen(b.weight, at(0), low);
                    if paired {
                        widen(b.weight, at(1), high);
                    } else {
                        high.fill(0.0);
                    }
                    for ((word, low), high) in words.iter_mut().zip(&*low).zip(&*high) {
                        let (low, high) = (round(low * b.factor), round(high * b.factor));
                        *word = u32::from(low) | u32::from(high) << 16;
                    }
                }
            }
        }
    });
    clear_padding(panel, columns);
}

/// Neighbours as words; an odd last one is paired with zero.
fn copy_pairs(from: &[bf16], words: &mut [u32]) {
    let (pairs, odd) = pulp::as_arrays::<2, _>(from);
    for (word, [low, high]) in words.iter_mut().zip(pairs) {
        *word = u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
    }
    if let ([x], Some(word)) = (odd, words.last_mut()) {
        *word = u32::from(x.to_bits());
    }
}
