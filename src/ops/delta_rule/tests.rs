//! The rule against a loop over tokens in `f64`, and its backward against burn's autodiff of the plain forward.

use burn::tensor::{DType, Device};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::ops::host;
use crate::ops::layout::Layout;
use crate::ops::place::place_of;
use crate::ops::plain::delta_rule::NORM_EPS;

/// Value heads share key heads; widths are no multiples of a vector.
const HEADS: DeltaHeads = DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_head_dim: 12, value_head_dim: 20 };

/// Lengths that are no multiples of a chunk, one of a chunk, of one token, and tokens in no document at the end.
const DOCUMENTS: [(usize, usize); 4] = [(0, 150), (150, 1), (151, 64), (215, 70)];
const TOKENS: usize = 290;

const PLACES: [fn() -> Device; 2] = [Device::flex, || Device::flex().autodiff()];

struct Fixture {
    qkv: Tensor<2>,
    gates: Gates<Tensor<2>>,
    d_o: Tensor<2>,
}

/// Keys of a head are alike, so that a token overwrites much of what those before have written.
fn fixture(device: &Device) -> Fixture {
    let rng = &mut ChaCha8Rng::seed_from_u64(11);
    let mut random = |width: usize, low: f32, high: f32| {
        let values: Vec<f32> = (0..TOKENS * width).map(|_| rng.random_range(low..high)).collect();
        host::tensor(values, [TOKENS, width], device)
    };
    let (keys, values) = (HEADS.key_width(), HEADS.value_width());
    let parts = vec![random(keys, -1.0, 1.0), random(keys, -0.5, 1.5), random(values, -1.0, 1.0)];
    let decay = random(HEADS.num_value_heads, -0.3, 0.0);
    let strength = random(HEADS.num_value_heads, 0.0, 1.0);
    let d_o = random(values, -1.0, 1.0);
    let zeros = d_o.clone().narrow(0, 285, 5).zeros_like();
    let d_o = d_o.slice_assign([285..TOKENS, 0..values], zeros);
    Fixture { qkv: Tensor::cat(parts, 1), gates: Gates { decay, strength }, d_o }
}

fn place(device: &Device) -> Place {
    place_of(device, DType::F32)
}

fn inputs<'a>(qkv: &'a Tensor<2>, gates: &'a Gates<Tensor<2>>, layout: &'a Layout) -> DeltaInputs<'a> {
    DeltaInputs { qkv, gates, layout, heads: HEADS }
}

fn layout(documents: &[(usize, usize)], num_tokens: usize) -> Layout {
    let mut positions = vec![0; num_tokens];
    for &(start, len) in documents {
        positions[start..start + len].iter_mut().zip(0..).for_each(|(position, index)| *position = index);
    }
    Layout::new(1, documents.to_vec(), positions, [].into())
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    let tensor = if tensor.is_autodiff() { tensor.clone().inner() } else { tensor.clone() };
    tensor.into_data().try_to_vec().unwrap()
}

/// The difference relative to the norm of what is expected.
fn error(found: &[f32], expected: &[f32]) -> f32 {
    let norm = expected.iter().map(|x| x * x).sum::<f32>().sqrt();
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt() / norm
}

/// Token by token, as the first lines of the module say it.
fn one_by_one(fixture: &Fixture, documents: &[(usize, usize)]) -> Vec<f32> {
    let [qkv, decay, strength] = [&fixture.qkv, &fixture.gates.decay, &fixture.gates.strength].map(values);
    let DeltaHeads { num_value_heads, key_head_dim, value_head_dim, .. } = HEADS;
    let mut o = vec![0.0; TOKENS * HEADS.value_width()];
    let unit = |x: &[f32]| -> Vec<f64> {
        let norm = (x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() + NORM_EPS).sqrt();
        x.iter().map(|x| f64::from(*x) / norm).collect()
    };
    for (document, head) in documents.iter().flat_map(|document| (0..num_value_heads).map(move |head| (document, head)))
    {
        let mut state = vec![0.0; key_head_dim * value_head_dim];
        for token in document.0..document.0 + document.1 {
            let row = &qkv[token * HEADS.qkv_width()..(token + 1) * HEADS.qkv_width()];
            let first = head / HEADS.group() * key_head_dim;
            let q = unit(&row[first..first + key_head_dim]);
            let k = unit(&row[HEADS.key_width() + first..][..key_head_dim]);
            let v = &row[2 * HEADS.key_width() + head * value_head_dim..][..value_head_dim];
            let gate = token * num_value_heads + head;
            let factor = f64::from(decay[gate]).exp();
            state.iter_mut().for_each(|x| *x *= factor);
            for (column, v) in v.iter().enumerate() {
                let at = |row: usize| row * value_head_dim + column;
                let known: f64 = k.iter().enumerate().map(|(row, k)| k * state[at(row)]).sum();
                let difference = f64::from(strength[gate]) * (f64::from(*v) - known);
                k.iter().enumerate().for_each(|(row, k)| state[at(row)] += k * difference);
                let read: f64 = q.iter().enumerate().map(|(row, q)| q * state[at(row)]).sum();
                #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "compared in f32")]
                let read = (read / (key_head_dim as f64).sqrt()) as f32;
                o[token * HEADS.value_width() + head * value_head_dim + column] = read;
            }
        }
    }
    o
}

#[test]
fn chunks_give_what_a_loop_over_tokens_gives() {
    for device in PLACES.map(|place| place()) {
        let fixture = fixture(&device);
        let layout = layout(&DOCUMENTS, TOKENS);
        let found = delta_rule(place(&device), inputs(&fixture.qkv, &fixture.gates, &layout));
        let error = error(&values(&found), &one_by_one(&fixture, &DOCUMENTS));
        assert!(error < 1e-6, "{error}");
    }
}

/// The gradients of queries, keys and values, decays, and logarithms of strengths, by autodiff.
fn by_autodiff() -> [Vec<f32>; 3] {
    let device = Device::flex().autodiff();
    let Fixture { qkv, gates, d_o } = fixture(&device);
    let [qkv, decay] = [qkv, gates.decay].map(Tensor::require_grad);
    let log_strength = gates.strength.log().require_grad();
    let gates = Gates { decay: decay.clone(), strength: log_strength.clone().exp() };
    let o = delta_rule(place(&device), inputs(&qkv, &gates, &layout(&DOCUMENTS, TOKENS)));
    let grads = (o * d_o).sum().backward();
    [qkv, decay, log_strength].map(|x| values(&x.grad(&grads).unwrap()))
}

#[test]
fn the_backward_is_the_derivative_of_the_plain_forward() {
    let expected = by_autodiff();
    for device in PLACES.map(|place| place()) {
        let Fixture { qkv, gates, d_o } = fixture(&device);
        let layout = layout(&DOCUMENTS, TOKENS);
        let (dqkv, grads) = delta_rule_backward(place(&device), &d_o, inputs(&qkv, &gates, &layout));
        for (found, expected) in [dqkv, grads.decay, grads.strength].iter().zip(&expected) {
            let error = error(&values(found), expected);
            assert!(error < 5e-6, "{error}");
        }
    }
}

#[test]
fn packed_documents_are_those_of_each_alone() {
    for device in PLACES.map(|place| place()) {
        let Fixture { qkv, gates, d_o } = fixture(&device);
        let run = |qkv: &Tensor<2>, gates: &Gates<Tensor<2>>, d_o: &Tensor<2>, documents: &[(usize, usize)]| {
            let (place, layout) = (place(&device), layout(documents, qkv.dims()[0]));
            let inputs = inputs(qkv, gates, &layout);
            let (dqkv, grads) = delta_rule_backward(place, d_o, inputs);
            [delta_rule(place, inputs), dqkv, grads.decay, grads.strength]
        };
        let packed = run(&qkv, &gates, &d_o, &DOCUMENTS);
        for (start, len) in DOCUMENTS {
            let part = |x: &Tensor<2>| x.clone().narrow(0, start, len);
            let gates = Gates { decay: part(&gates.decay), strength: part(&gates.strength) };
            let alone = run(&part(&qkv), &gates, &part(&d_o), &[(0, len)]);
            for (packed, alone) in packed.iter().zip(&alone) {
                let largest = values(packed).iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let (found, alone) = (values(&part(packed)), values(alone));
                let worst = found.iter().zip(&alone).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 2e-6 * largest, "document of {len}: {worst} of {largest}");
            }
        }
    }
}

#[test]
fn a_text_goes_on_from_its_state() {
    for device in PLACES.map(|place| place()) {
        let Fixture { qkv, gates, .. } = fixture(&device);
        let at_once = values(&delta_rule(place(&device), inputs(&qkv, &gates, &layout(&[(0, 290)], 290))));
        let mut state = Tensor::zeros([4, 12, 20], (&device, DType::F32));
        let (mut first, mut found) = (0, Vec::new());
        for len in [100, 1, 1, 128, 60] {
            let part = |x: &Tensor<2>| x.clone().narrow(0, first, len);
            let gates = Gates { decay: part(&gates.decay), strength: part(&gates.strength) };
            let (qkv, layout) = (part(&qkv), layout(&[(0, len)], len));
            let (texts, inputs) = (TextRows::of(&[len], 0), inputs(&qkv, &gates, &layout));
            let (o, mut next) = delta_rule_next(place(&device), vec![state], &texts, inputs);
            found.extend(values(&o));
            (first, state) = (first + len, next.remove(0));
        }
        let error = error(&found, &at_once);
        assert!(error < 1e-6, "{error}");
    }
}

#[test]
fn equal_keys_that_overwrite_each_other_stay_exact() {
    for device in PLACES.map(|place| place()) {
        let mut fixture = fixture(&device);
        let keys = HEADS.key_width();
        let first = fixture.qkv.clone().narrow(0, 0, 1).narrow(1, keys, keys).repeat_dim(0, TOKENS);
        let noise = fixture.qkv.clone().narrow(1, keys, keys) * 1e-3;
        fixture.qkv = fixture.qkv.slice_assign([0..TOKENS, keys..2 * keys], first + noise);
        fixture.gates = Gates { decay: fixture.gates.decay * 1e-3, strength: fixture.gates.strength * 1e-3 + 0.999 };
        let layout = layout(&DOCUMENTS, TOKENS);
        let found = delta_rule(place(&device), inputs(&fixture.qkv, &fixture.gates, &layout));
        let error = error(&values(&found), &one_by_one(&fixture, &DOCUMENTS));
        assert!(error < 1e-5, "{error}");
    }
}

#[test]
fn gates_and_their_gradients_are_those_of_their_formula() {
    let device = Device::flex().autodiff();
    let row = |values: [f32; 6]| Tensor::<1>::from_floats(values, &device).unsqueeze::<2>();
    let [b, a] =
        [[-3.0, 0.5, 2.0, 40.0, -40.0, 0.0], [-100.0, -2.0, 0.0, 1.5, 30.0, 100.0]].map(row).map(Tensor::require_grad);
    let (a_log, dt_bias) = (row([0.3, -1.0, 2.0, 0.0, 1.0, 0.5]).squeeze_dim(0), row([1.0; 6]).squeeze_dim(0));
    let gates = Gates::new([&b, &a], &a_log, &dt_bias);
    for (found, (a, log)) in values(&gates.decay).iter().zip(values(&a).iter().zip(values(&a_log))) {
        let expected = -f64::from(log).exp() * (f64::from(*a) + 1.0).exp().ln_1p();
        let expected = if *a > 50.0 { -f64::from(log).exp() * (f64::from(*a) + 1.0) } else { expected };
        assert!((f64::from(*found) - expected).abs() <= 1e-6 * expected.abs() + 1e-30, "{found}, expected {expected}");
    }
    let [d_decay, d_strength] = [[1.0, -2.0, 0.5, 3.0, -1.0, 2.0], [2.0, 1.0, -1.0, 0.5, 1.0, -3.0]].map(row);
    let grads =
        (gates.decay.clone() * d_decay.clone() + gates.strength.clone().log() * d_strength.clone()).sum().backward();
    let expected = [&b, &a].map(|x| values(&x.grad(&grads).unwrap()));
    let found = gates.backward(Gates { decay: d_decay, strength: d_strength }, &a, &a_log, &dt_bias);
    for (found, expected) in found.iter().zip(&expected) {
        assert!(error(&values(found), expected) < 1e-6, "{:?} {expected:?}", values(found));
    }
}
