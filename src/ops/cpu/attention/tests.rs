//! Attention against a plain f64 version.

use super::super::reference::{assert_close, assert_close_at_scale, on_threads, random};
use super::*;

/// Values and gradients of one case.
struct Exact {
    o: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

fn naive(d_o: &[f32], q: &[f32], k: &[f32], v: &[f32], stretches: &[Stretch], shape: &Heads) -> Exact {
    let [d_o, q, k, v] = [d_o, q, k, v].map(|x| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
    let tokens = q.len() / shape.query_width();
    let (dim, scale) = (shape.head_dim, shape.scale);
    let mut exact = Exact {
        o: vec![0.0; q.len()],
        lse: vec![0.0; tokens * shape.num_heads],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; k.len()],
    };
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    for stretch @ Stretch { start, len, prefix, .. } in stretches {
        // A window holds all of what is shared.
        let window = shape.window.filter(|_| !stretch.is_shared()).unwrap_or(usize::MAX);
        for head in 0..shape.num_heads {
            for i in *start..start + len {
                let at_q = i * shape.query_width() + head * dim..i * shape.query_width() + (head + 1) * dim;
                let own = *start.max(&(i + 1).saturating_sub(window))..i + 1;
                let keys = prefix.clone().chain(own);
                let at_k = |j: usize| {
                    let first = j * shape.key_value_width() + shape.kv_head(head) * dim;
                    first..first + dim
                };
                let cap = |score: f64| shape.soft_cap.map_or(score, |cap| cap * (score / cap).tanh());
                let score = |j: usize| cap(scale * dot(&q[at_q.clone()], &k[at_k(j)]));
                let scores: Vec<f64> = keys.clone().map(score).collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
                exact.lse[head * tokens + i] = lse;
                for (j, s) in keys.clone().zip(&scores) {
                    for d in 0..dim {
                        exact.o[at_q.start + d] += (s - lse).exp() * v[at_k(j).start + d];
                    }
                }
                let delta = dot(&d_o[at_q.clone()], &exact.o[at_q.clone()]);
                for (j, s) in keys.zip(&scores) {
                    let p = (s - lse).exp();
                    let slope = shape.soft_cap.map_or(1.0, |cap| 1.0 - (s / cap).powi(2));
                    let ds = p * (dot(&d_o[at_q.clone()], &v[at_k(j)]) - delta) * slope * scale;
                    for d in 0..dim {
                        exact.dv[at_k(j).start + d] += p * d_o[at_q.start + d];
                        exact.dq[at_q.start + d] += ds * k[at_k(j).start + d];
                        exact.dk[at_k(j).start + d] += ds * q[at_q.start + d];
                    }
                }
            }
        }
    }
    exact
}

struct Got {
    o: Vec<f32>,
    lse: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// Runs both passes on outputs full of garbage, which must all be overwritten.
fn kernels([d_o, q, k, v]: [&[f32]; 4], stretches: &[Stretch], shape: &Heads, rounds: bool) -> Got {
    let tokens = q.len() / shape.query_width();
    let rubbish = |len| vec![f32::NAN; len];
    let mut got = Got {
        o: rubbish(q.len()),
        lse: rubbish(tokens * shape.num_heads),
        dq: rubbish(q.len()),
        dk: rubbish(k.len()),
        dv: rubbish(k.len()),
    };
    attention(q, k, v, stretches, shape, rounds, &mut got.o, &mut got.lse);
    let grads = [&mut got.dq, &mut got.dk, &mut got.dv].map(Vec::as_mut_slice);
    attention_backward(d_o, [q, k, v], &got.o, &got.lse, stretches, shape, rounds, grads);
    got
}

fn inputs(tokens: usize, shape: &Heads, spread: f32) -> [Vec<f32>; 4] {
    let widths = [shape.query_width(), shape.query_width(), shape.key_value_width(), shape.key_value_width()];
    let mut seed = 0;
    widths.map(|width| {
        seed += 1;
        random(tokens * width, seed).iter().map(|x| x * spread).collect()
    })
}

#[track_caller]
fn check(tokens: usize, documents: &[(usize, usize)], shape: &Heads, spread: f32) {
    check_stretches(tokens, &Stretch::of(documents, &[]), shape, spread);
}

#[track_caller]
fn check_stretches(tokens: usize, stretches: &[Stretch], shape: &Heads, spread: f32) {
    // Where operands are rounded, those of the first products are exact; probabilities and their gradients are not.
    for (rounds, tolerance) in [(false, 1e-5), (true, 1e-2)] {
        let round = |x: f32| if rounds { half::bf16::from_f32(x).to_f32() } else { x };
        let inputs = inputs(tokens, shape, spread).map(|x| x.into_iter().map(round).collect::<Vec<_>>());
        let [d_o, q, k, v] = &inputs;
        let exact = naive(d_o, q, k, v, stretches, shape);
        let got = kernels([d_o, q, k, v], stretches, shape, rounds);
        assert_close(&got.o, &exact.o, tolerance);
        assert_close(&got.lse, &exact.lse, 1e-5);
        assert_close(&got.dv, &exact.dv, tolerance);
        // A query that sees one key has gradients that cancel to zero from terms of order 1.
        assert_close_at_scale(&got.dq, &exact.dq, tolerance, 0.1);
        assert_close_at_scale(&got.dk, &exact.dk, tolerance, 0.1);
    }
}

fn shape(num_heads: usize, num_kv_heads: usize, head_dim: usize, window: Option<usize>) -> Heads {
    Heads {
        num_heads,
        num_kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f64).sqrt(),
        window,
        chunk: None,
        soft_cap: None,
    }
}

#[test]
fn one_document_of_any_length_matches_f64() {
    for len in [1, 2, 15, 31, 33, 64, 95, 96, 97, 128, 191, 193, 300] {
        check(len, &[(0, len)], &shape(2, 2, 64, None), 1.0);
    }
}

#[test]
fn every_head_dimension_matches_f64() {
    for head_dim in [1, 2, 6, 16, 20, 36, 48, 64, 80, 96, 100, 128, 144] {
        check(130, &[(0, 130)], &shape(2, 1, head_dim, None), 1.0);
    }
}

#[test]
fn grouped_queries_match_f64() {
    for (heads, kv_heads) in [(9, 3), (4, 4), (4, 1), (6, 2)] {
        check(110, &[(0, 110)], &shape(heads, kv_heads, 24, None), 1.0);
    }
}

#[test]
fn documents_see_only_themselves_and_gaps_are_zero() {
    let documents = [(0, 40), (40, 0), (40, 1), (45, 130), (175, 97), (280, 20)];
    check(310, &documents, &shape(3, 1, 16, None), 1.0);
    check(50, &[], &shape(3, 1, 16, None), 1.0);
    check(0, &[], &shape(3, 1, 16, None), 1.0);
}

#[test]
fn documents_that_begin_alike_match_f64() {
    // Beginnings and answers of less than a tile, a whole one, one and a bit, and several blocks of keys.
    for (prefix, answers) in
        [(1, &[1, 1][..]), (9, &[40, 96, 3]), (96, &[96, 97, 0, 20]), (130, &[1, 200]), (1000, &[30, 600, 7])]
    {
        let mut documents = vec![(0, 11), (11, prefix + answers[0])];
        for len in &answers[1..] {
            let (start, before) = documents[documents.len() - 1];
            documents.push((start + before, *len));
        }
        let num_answers = answers.len();
        let prefix_of = |i: usize| if i > 1 && i <= num_answers { 11..11 + prefix } else { 0..0 };
        let (start, len) = documents[documents.len() - 1];
        // A document by itself, of which the window hides a part.
        documents.push((start + len + 3, 80));
        let stretches = Stretch::of(&documents, &(0..documents.len()).map(prefix_of).collect::<Vec<_>>());
        for (window, soft_cap) in [(None, None), (Some(70), Some(2.0))] {
            let shape = Heads { soft_cap, ..shape(4, 2, 24, window) };
            check_stretches(start + len + 90, &stretches, &shape, 1.0);
        }
    }
}

#[test]
fn a_sliding_window_matches_f64() {
    for window in [1, 2, 31, 96, 100, 200, 1000] {
        check(400, &[(0, 350), (360, 40)], &shape(2, 1, 16, Some(window)), 1.0);
    }
}

#[test]
fn capped_scores_match_f64() {
    for (soft_cap, window) in [(0.3, None), (2.0, Some(70)), (50.0, None)] {
        let shape = Heads { soft_cap: Some(soft_cap), ..shape(4, 2, 24, window) };
        check(300, &[(0, 130), (135, 165)], &shape, 1.5);
    }
    check(1100, &[(10, 1090)], &Heads { soft_cap: Some(1.0), ..shape(1, 1, 8, Some(500)) }, 1.0);
}

#[test]
fn a_document_of_many_key_blocks_matches_f64() {
    check(2200, &[(0, 2200)], &shape(2, 1, 8, None), 1.0);
    check(1100, &[(10, 1090)], &shape(1, 1, 8, Some(500)), 1.0);
}

#[test]
fn large_scores_neither_overflow_nor_lose_the_sum() {
    let tokens = 200;
    let shape = shape(1, 1, 64, None);
    let [d_o, q, k, v] = inputs(tokens, &shape, 1.0);
    let q: Vec<f32> = q.iter().map(|x| x * 100.0).collect();
    let stretches = Stretch::of(&[(0, tokens)], &[]);
    let exact = naive(&d_o, &q, &k, &v, &stretches, &shape);
    let got = kernels([&d_o, &q, &k, &v], &stretches, &shape, false);
    // Scores of several hundred carry a rounding error of their own size times 2^-24 into the exponent.
    assert_close(&got.o, &exact.o, 3e-4);
    assert_close(&got.dq, &exact.dq, 3e-4);
    assert_close(&got.dk, &exact.dk, 3e-4);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let shape = shape(6, 2, 48, None);
    let tokens = 700;
    // 40 tokens of the first document begin the second too.
    let stretches = Stretch::of(&[(0, 350), (350, 170), (530, 170)], &[0..0, 0..40, 0..0]);
    let [d_o, q, k, v] = inputs(tokens, &shape, 1.0);
    for rounds in [false, true] {
        let run = |threads| {
            let got = on_threads(threads, || kernels([&d_o, &q, &k, &v], &stretches, &shape, rounds));
            (got.o, got.lse, got.dq, got.dk, got.dv)
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5));
    }
}
