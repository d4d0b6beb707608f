use super::super::linear::{linear, linear_backward_input};
use super::super::reference::random;
use super::super::weight::Weight;
use super::*;
use crate::ops::quantised::{FP4, FP8, NF4};

const NUM: usize = 70 * 130;

/// Bytes without a pattern.
fn bytes(len: usize) -> Vec<u8> {
    random(len, 3).iter().map(|x| (x.to_bits() >> 7) as u8).collect()
}

/// Runs `test` with every kind of codes, and the number that each code stands for.
fn with_all_kinds(block_len: usize, mut test: impl FnMut(Codes<'_>, &[f32])) {
    let (codes, num_blocks) = (bytes(NUM), NUM.div_ceil(block_len));
    let scales = random(num_blocks, 4);
    let (table, outer, inner) = (random(256, 5), random(num_blocks.div_ceil(NESTED_LEN), 6), bytes(num_blocks));
    let nested: Scales<&[f32], &[u8]> = Scales::Nested { codes: &inner, table: &table, scales: &outer, offset: 0.25 };
    let by_hand: Vec<f32> = inner
        .iter()
        .enumerate()
        .map(|(block, code)| table[usize::from(*code)] * outer[block / NESTED_LEN] + 0.25)
        .collect();
    let zeros = random(num_blocks, 7);
    let shifted: Scales<&[f32], &[u8]> = Scales::Shifted { scales: &scales, zeros: &zeros };
    let fp8 = FP8.map(|x| if x.is_nan() { 1.0 } else { x });
    for packed in [
        Packed::Four(&codes, &NF4),
        Packed::Four(&codes, &FP4),
        Packed::Eight(bytemuck::cast_slice(&codes)),
        Packed::Table(&codes, &fp8),
    ] {
        for (scales, numbers) in [(Scales::Plain(&scales[..]), &scales), (shifted, &scales), (nested, &by_hand)] {
            let expected: Vec<f32> = (0..NUM)
                .map(|i| {
                    let number = match packed {
                        Packed::Four(codes, table) => table[usize::from(codes[i / 2] >> (4 * (1 - i % 2)) & 15)],
                        Packed::Eight(codes) => f32::from(codes[i]),
                        Packed::Table(codes, table) => table[usize::from(codes[i])],
                    };
                    let zero = if matches!(scales, Scales::Shifted { .. }) { zeros[i / block_len] } else { 0.0 };
                    (number - zero) * numbers[i / block_len]
                })
                .collect();
            test(Codes { packed, block_len, scales, len: NUM }, &expected);
        }
    }
}

#[test]
fn any_stretch_is_table_times_scale_to_the_bit() {
    for block_len in [64, 32, 130] {
        with_all_kinds(block_len, |codes, expected| {
            for (first, len) in [(0, NUM), (1, 70), (63, 2), (64, 64), (129, 300), (NUM - 5, 5), (200, 1), (7, 0)] {
                let mut found = vec![7.0; len];
                codes.decode(first, &mut found);
                assert_eq!(found, expected[first..first + len], "{first}, {len}");
            }
        });
    }
}

#[test]
fn products_have_the_bits_of_those_with_the_decoded_matrix() {
    for [out_features, in_features] in [[70, 130], [65, 140], [91, 100], [700, 13]] {
        for block_len in [64, in_features] {
            with_all_kinds(block_len, |codes, decoded| {
                for (tokens, rounds) in [(1, false), (1, true), (40, false), (40, true), (200, true)] {
                    let len = out_features * in_features;
                    let [coded, dense] = [Weight::codes(Codes { len, ..codes }), Weight::f32(&decoded[..len])]
                        .map(|w| w.rounding(rounds));
                    let (x, dy) = (random(tokens * in_features, 1), random(tokens * out_features, 2));
                    let products = |w| {
                        let (mut y, mut dx) = (vec![0.5; dy.len()], vec![0.5; x.len()]);
                        linear(&x, w, in_features, out_features, &mut y, false);
                        linear_backward_input(&dy, w, in_features, out_features, &mut dx, true);
                        (y, dx)
                    };
                    assert!(products(coded) == products(dense), "{tokens} tokens, {out_features}, {in_features}");
                }
            });
        }
    }
}
