//! Results of the kernels of mixtures.

use std::sync::Arc;

use burn::tensor::{Bytes, DType, Device, Tensor};

use super::{Results, numbers, one, read};
use crate::ops::dropout::mix;
use crate::ops::experts::Experts;
use crate::ops::kernels::Place;
use crate::ops::linear::{InputGrad, Matrix, Weight, linear, linear_backward};
use crate::ops::low_rank::{Lora, LowRank};
use crate::ops::place::place_of;
use crate::ops::quantised::{BlockScales, Coding, Quantised, bytes_tensor};
use crate::ops::routing::{Router, Routing, gather, route, scatter_add};
use crate::spec::{Choice, ExpertGroups, Probabilities};

// More experts than a table has, more rows of one than a block takes, and longer sums than are loaded at a time.
const TOKENS: usize = 200;
const WIDTH: usize = 336;
const INSIDE: usize = 400;
/// Of experts as codes, of which many are decoded together.
const INSIDE_OF_CODED: usize = 72;
const NUM_EXPERTS: usize = 70;
const PER_TOKEN: usize = 2;
const RANK: usize = 5;
const SCALE: f64 = 0.5;

/// The layers of all experts: two of one input, and one of their sum, which has a bias; and updates of each.
struct Layers {
    inner: Vec<[Weight; 2]>,
    outer: Vec<Weight>,
    updates: Option<[LowRank<Tensor<2>>; 3]>,
}

/// What experts make of tokens, and their gradients: of tokens, of scores, and of updates.
struct Made {
    y: Tensor<2>,
    dx: Tensor<2>,
    d_scores: Tensor<2>,
    of_updates: Vec<LowRank<Tensor<2>>>,
}

/// Experts in memory, as codes and with updates, each chosen by another router.
pub(super) fn mixture(device: &Device, dtype: DType) -> Result<Results, String> {
    let place = place_of(device, dtype);
    let [x, dy] = [1, 2].map(|seed| numbers([TOKENS, WIDTH], seed, device).cast(dtype));
    let scores = numbers([TOKENS, NUM_EXPERTS], 3, device).cast(DType::F32) * 4.0;
    // Most tokens choose the first expert, and none those in the middle, by their scores alone.
    let [first, none] = [(0, 1, 4.0), (4, 60, -16.0)].map(|(at, count, by)| scores.clone().narrow(1, at, count) + by);
    let scores = scores.slice_assign([0..TOKENS, 0..1], first).slice_assign([0..TOKENS, 4..64], none);
    let of_experts = |seed| numbers([1, NUM_EXPERTS], seed, device).cast(DType::F32).reshape([NUM_EXPERTS]);
    let (scales, bias) = (of_experts(4), of_experts(5));
    let groups = Some(ExpertGroups { count: 7, num_kept: 3, num_best: 2 });
    let router = |probabilities| Router {
        num_per_token: PER_TOKEN,
        probabilities,
        choice: Choice::PLAIN,
        bias: None,
        scales: None,
    };
    let by_sigmoids = Router {
        choice: Choice { groups, factor: 1.5, ..Choice::PLAIN },
        bias: Some(&bias),
        ..router(Probabilities::SigmoidsOfChosen(1e-20))
    };
    let cases = [
        (router(Probabilities::OfChosen), layers(device, dtype, false)),
        (Router { scales: Some(&scales), ..router(Probabilities::OfAll) }, layers(device, dtype, true)),
        (by_sigmoids, Layers { updates: Some(updates(device)), ..layers(device, dtype, false) }),
    ];
    let mut results = Results::new();
    for (router, layers) in cases {
        let made = match place.experts().filter(|experts| layers.are_taken(*experts, &x, router.choice)) {
            Some(experts) => layers.together(experts, [&x, &dy], &scores, router),
            None => layers.expert_by_expert(place, [&x, &dy], &route(&scores, router))?,
        };
        results.extend(read([("y", &made.y), ("dx", &made.dx), ("the gradient of scores", &made.d_scores)])?);
        for LowRank { a, b } in &made.of_updates {
            results.extend(read([("the gradient of A", a), ("the gradient of B", b)])?);
        }
    }
    Ok(results)
}

fn layers(device: &Device, dtype: DType, is_coded: bool) -> Layers {
    let inside = if is_coded { INSIDE_OF_CODED } else { INSIDE };
    let coded = |shape: [usize; 2], seed: usize| {
        let bytes = (0..shape[0] * shape[1] / 2).map(|i| (mix((seed << 32 | i) as u64) >> 56) as u8).collect();
        let scales = numbers([1, shape[0] * shape[1] / 16], seed, device).cast(DType::F32);
        let scales = BlockScales::Plain(scales.reshape([shape[0] * shape[1] / 16]));
        let codes = bytes_tensor(Bytes::from_bytes_vec(bytes), device);
        Matrix::Quantised(Arc::new(Quantised { shape, coding: Coding::Nf4, codes, block_len: 16, scales }))
    };
    let dense = |shape: [usize; 2], seed: usize| numbers(shape, seed, device).cast(dtype);
    // Two layers of one input, whose matrices lie one below the other where they are no codes.
    let inner = |expert: usize| {
        let (seed, shape) = (10 + 2 * expert, [inside, WIDTH]);
        let whole = dense([2 * inside, WIDTH], seed);
        [0, 1].map(|layer| {
            if is_coded {
                Weight { values: coded(shape, seed + layer), bias: None, rounds: false }
            } else {
                Weight::new(whole.clone().narrow(0, layer * inside, inside))
            }
        })
    };
    let outer = |expert: usize| {
        let (seed, shape) = (200 + expert, [WIDTH, inside]);
        let values = if is_coded { coded(shape, seed) } else { Matrix::Dense(dense(shape, seed)) };
        let bias = numbers([1, WIDTH], seed, device).cast(DType::F32).reshape([WIDTH]);
        Weight { values, bias: Some(bias), rounds: false }
    };
    Layers { inner: (0..NUM_EXPERTS).map(inner).collect(), outer: (0..NUM_EXPERTS).map(outer).collect(), updates: None }
}

fn updates(device: &Device) -> [LowRank<Tensor<2>>; 3] {
    [(300, WIDTH, INSIDE), (302, WIDTH, INSIDE), (304, INSIDE, WIDTH)].map(|(seed, from, to)| {
        let of = |shape, seed| numbers(shape, seed, device).cast(DType::F32) * 0.1;
        LowRank { a: of([NUM_EXPERTS * RANK, from], seed), b: of([NUM_EXPERTS * to, RANK], seed + 1) }
    })
}

fn lora(matrices: &LowRank<Tensor<2>>) -> Lora<&Tensor<2>> {
    Lora { matrices: matrices.as_ref(), scale: SCALE, dropout: None }
}

/// Those of one expert.
fn of_expert(matrices: &LowRank<Tensor<2>>, expert: usize) -> LowRank<Tensor<2>> {
    matrices.as_ref().map(|all| {
        let rows = all.dims()[0] / NUM_EXPERTS;
        all.clone().narrow(0, expert * rows, rows)
    })
}

impl Layers {
    fn inner(&self) -> Vec<Vec<&Weight>> {
        self.inner.iter().map(|weights| weights.iter().collect()).collect()
    }

    fn outer(&self) -> Vec<Vec<&Weight>> {
        self.outer.iter().map(|weight| vec![weight]).collect()
    }

    fn are_taken(&self, experts: &dyn Experts, x: &Tensor<2>, choice: Choice) -> bool {
        let takes = |weights: Vec<Vec<&Weight>>| experts.takes(x, TOKENS * PER_TOKEN, choice, &weights);
        takes(self.inner()) && takes(self.outer()) && experts.takes_rank(RANK)
    }

    fn together(
        &self,
        experts: &dyn Experts,
        [x, dy]: [&Tensor<2>; 2],
        scores: &Tensor<2>,
        router: Router<'_>,
    ) -> Made {
        let (inner, outer, mut of_updates) = (self.inner(), self.outer(), Vec::new());
        let sorted = &experts.route(scores, router);
        let update = |layer: usize| self.updates.as_ref().map(|updates| lora(&updates[layer]));
        let add = |layer: usize, y, x: &Tensor<2>| match update(layer) {
            Some(lora) => experts.add_low_rank(y, x, lora, sorted),
            None => y,
        };
        let mut backward = |layer: usize, dx, [dy, x]: [&Tensor<2>; 2]| match update(layer) {
            Some(lora) => {
                let (dx, grads) = experts.low_rank_backward(dy, x, lora, sorted, dx);
                of_updates.push(grads);
                dx
            }
            None => dx,
        };
        let rows = experts.gather(x, sorted, false);
        let mut hs = experts.forward(&rows, &inner, sorted).into_iter().enumerate().map(|(at, h)| add(at, h, &rows));
        let [gate, up] = [(); 2].map(|()| hs.next().unwrap_or_else(|| unreachable!("there are two layers")));
        let h = gate + up;
        let output = add(2, one(experts.forward(&h, &outer, sorted)), &h);
        let d_output = experts.gather(dy, sorted, true);
        let dh = experts.backward(std::slice::from_ref(&d_output), &outer, sorted);
        let dh = backward(2, dh, [&d_output, &h]);
        let products = experts.products(&h, &dh, &d_output, &outer, sorted);
        let d_input = experts.backward(&[dh.clone(), dh.clone()], &inner, sorted);
        let d_input = (0..2).fold(d_input, |d_input, layer| backward(layer, d_input, [&dh, &rows]));
        let combined = |y, weighted| experts.combine(x.zeros_like(), y, sorted, weighted);
        let d_scores = experts.scores_backward(products, sorted);
        Made { y: combined(&output, true), dx: combined(&d_input, false), d_scores, of_updates }
    }

    fn expert_by_expert(&self, place: Place, [x, dy]: [&Tensor<2>; 2], routing: &Routing) -> Result<Made, String> {
        let (mut y, mut dx, mut products) = (x.zeros_like(), x.zeros_like(), Vec::new());
        let zeros = |all: &LowRank<Tensor<2>>| all.as_ref().map(Tensor::zeros_like);
        let mut of_updates: Vec<_> =
            self.updates.iter().flat_map(|updates| [2, 0, 1].map(|layer| zeros(&updates[layer]))).collect();
        for (expert, rows) in &routing.groups {
            let updates = self.updates.as_ref().map(|updates| updates.each_ref().map(|all| of_expert(all, *expert)));
            let update = |layer: usize| updates.as_ref().map(|updates| lora(&updates[layer]));
            let row = gather(place, x, rows, false);
            let apply = |layer: usize, x: &Tensor<2>, weight: &Weight| linear(place, x, weight, update(layer), None);
            let [(gate, of_gate), (up, of_up)] = [0, 1].map(|layer| apply(layer, &row, &self.inner[*expert][layer]));
            let h = gate + up;
            let (output, of_output) = apply(2, &h, &self.outer[*expert]);
            let d_output = gather(place, dy, rows, true);
            let mut back = |dy: &Tensor<2>, x: &Tensor<2>, layer: usize, weight, kept: Option<&Tensor<2>>, grad| {
                let (dx, grads) = linear_backward(place, dy, x, weight, update(layer).zip(kept), grad);
                for (all, own) in of_updates.iter_mut().skip((layer + 1) % 3).zip(grads) {
                    *all = all.as_ref().zip(own).map(|(all, own)| {
                        let [rows, columns] = own.dims();
                        all.clone().slice_assign([expert * rows..(expert + 1) * rows, 0..columns], own)
                    });
                }
                dx.ok_or("no gradient")
            };
            products.push((output.clone() * d_output.clone()).sum_dim(1).squeeze_dim(1));
            let outer = &self.outer[*expert];
            let dh = back(&d_output, &h, 2, outer, of_output.as_ref(), InputGrad::Fresh)?;
            let [gate, up] = &self.inner[*expert];
            let d_input = back(&dh, &row, 0, gate, of_gate.as_ref(), InputGrad::Fresh)?;
            let d_input = back(&dh, &row, 1, up, of_up.as_ref(), InputGrad::AddTo(d_input))?;
            y = scatter_add(place, y, rows, &output, true);
            dx = scatter_add(place, dx, rows, &d_input, false);
        }
        Ok(Made { y, dx, d_scores: routing.backward(products), of_updates })
    }
}
