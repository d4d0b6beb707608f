//! The product against f64, in every storage dtype and orientation.

use half::{bf16 as Bf16, f16};

use super::super::reference::{assert_close, matmul_f64, on_threads, random};
use super::*;

fn rounded(x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| Bf16::from_f32(*x).to_f32()).collect()
}

const SHAPES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [3, 5, 7],
    [7, 16, 2],
    [64, 64, 64],
    [97, 130, 33],
    [100, 47, 641],
    [401, 200, 100],
    [33, 192, 1500],
    [12, 300, 2600],
];

/// Strides of element (p, j), and of the second term, whose rank is r.
fn strides(transposed: bool, k: usize, n: usize) -> [usize; 2] {
    if transposed { [1, k] } else { [n, 1] }
}

#[test]
fn products_match_f64_in_both_orientations_with_and_without_a_second_term() {
    for [m, n, k] in SHAPES {
        for transposed in [true, false] {
            for rank in [0, 1, 8, 17] {
                let (a, b) = (random(m * k, 1), random(k * n, 2));
                let (a2, b2) = (random(m * rank, 3), random(rank * n, 4));
                let b_f16: Vec<f16> = b.iter().map(|x| f16::from_f32(*x)).collect();
                let b_bf16: Vec<Bf16> = b.iter().map(|x| Bf16::from_f32(*x)).collect();
                let widened_f16: Vec<f32> = b_f16.iter().map(|x| x.to_f32()).collect();
                let widened_bf16 = rounded(&b);
                for (weight, values, round) in [
                    (Weight::f32(&b), &b, false),
                    (Weight::f16(&b_f16), &widened_f16, false),
                    (Weight::bf16(&b_bf16), &widened_bf16, false),
                    (Weight::bf16(&b_bf16).rounding(true), &widened_bf16, has_bf16_products()),
                    (
                        Weight::f32(&b).rounding(true),
                        if has_bf16_products() { &widened_bf16 } else { &b },
                        has_bf16_products(),
                    ),
                ] {
                    let operand = |x: &[f32]| if round { rounded(x) } else { x.to_vec() };
                    let scaled: Vec<f32> = b2.iter().map(|x| x * 0.5).collect();
                    let (row, column) = (strides(transposed, k, n), strides(transposed, rank, n));
                    let exact = matmul_f64([m, n, k], &operand(&a), [k, 1], values, row);
                    let low = matmul_f64([m, n, rank], &operand(&a2), [rank, 1], &operand(&scaled), column);
                    let exact: Vec<f64> = exact.iter().zip(&low).map(|(x, y)| x + y).collect();
                    let stride = |k: usize| if transposed { k } else { n };
                    let first = Term { a: &a, k, b: Right { weight, stride: stride(k), transposed, factor: 1.0 } };
                    let second = Term {
                        a: &a2,
                        k: rank,
                        b: Right { weight: Weight::f32(&b2), stride: stride(rank), transposed, factor: 0.5 },
                    };
                    let mut c = vec![f32::NAN; m * n];
                    gemm(m, n, &mut c, first, Some(second), false);
                    assert_close(&c, &exact, 1e-5);
                    gemm(m, n, &mut c, first, Some(second), true);
                    assert_close(&c, &exact.iter().map(|x| 2.0 * x).collect::<Vec<_>>(), 1e-5);
                }
            }
        }
    }
}

#[test]
fn bfloat16_is_rounded_to_the_nearest_even() {
    let mut x: Vec<f32> = random(1000, 1);
    x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1.003_906_2, 1.011_718_8, f32::MIN_POSITIVE]);
    for x in x {
        assert_eq!(round(x), Bf16::from_f32(x).to_bits(), "{x}");
    }
    assert!(Bf16::from_bits(round(f32::NAN)).is_nan());
}

#[test]
fn products_without_the_instruction_agree_with_it() {
    let [m, n, k] = [50, 100, 301];
    let (a, b) = (random(m * k, 1), random(k * n, 2));
    let b: Vec<Bf16> = b.iter().map(|x| Bf16::from_f32(*x)).collect();
    let right = Right { weight: Weight::bf16(&b).rounding(true), stride: k, transposed: true, factor: 1.0 };
    let first = Term { a: &a, k, b: right };
    let (mut fast, mut slow) = (vec![0.0; m * n], vec![0.0; m * n]);
    gemm(m, n, &mut fast, first, None, false);
    let none = Term { a: &[], k: 0, b: right };
    let a = if right.weight.rounds { rounded(&a) } else { a.clone() };
    run::<Single>(m, n, (&mut slow, n), &[first, none], [(&a, k), (&[], 0)], false);
    assert_close(&fast, &slow.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 1e-6);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let [m, n, k] = [500, 300, 700];
    let (a, b) = (random(m * k, 1), random(k * n, 2));
    let b_bf16: Vec<Bf16> = b.iter().map(|x| Bf16::from_f32(*x)).collect();
    for weight in [Weight::f32(&b), Weight::bf16(&b_bf16).rounding(true)] {
        let product = |threads| {
            on_threads(threads, || {
                let mut c = vec![0.0; m * n];
                let b = Right { weight, stride: k, transposed: true, factor: 1.0 };
                gemm(m, n, &mut c, Term { a: &a, k, b }, None, false);
                c
            })
        };
        let one = product(1);
        assert!(one == product(2) && one == product(7));
    }
}
