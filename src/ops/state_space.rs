//! State spaces with one decay a head (Mamba-2: Dao and Gu, 2024), in chunks of tokens.
//!
//! Every head has a state `S`, `[state_dim, head_dim]`, which is zero before a document. A token with decay `a <= 0` and strength
//! `d` makes `S = exp(a) S + d b x^T` and reads `y = S^T c`; heads of a group share `b` and `c`.
//!
//! In a chunk, with the sums `l` of its decays: `Y = M X + exp(l) C S` with `M_ts = c_t b_s exp(l_t - l_s) d_s` up to the diagonal,
//! and the next state is `exp(l_last) S + (exp(l_last - l) d B)^T X`.

use burn::tensor::Tensor;

use super::kernels::Place;
use super::plain::next::TextRows;
use super::profile::{self, Cost};

pub use super::plain::delta_rule::chunks::CHUNK_TOKENS;
pub(crate) use super::plain::state_space::plain_state_space_numbers;
pub use super::plain::state_space::{StateGates, StateInputs, StepBounds};
pub use crate::spec::StateHeads;

/// The outputs of all heads, `[tokens, inner_width]`; zeros outside all documents.
#[must_use]
pub fn state_space(place: Place, inputs: StateInputs<'_>) -> Tensor<2> {
    profile::measure("state_space", || cost(inputs, 1), || place.state_space(inputs, None).0)
}

/// [`state_space`] of the next tokens of texts, and the states after them.
///
/// # Shapes
/// `memories`: the states before them, `[num_heads, state_dim, head_dim]` each, in `f32`.
#[must_use]
pub fn state_space_next(
    place: Place,
    memories: Vec<Tensor<3>>,
    texts: &[TextRows],
    inputs: StateInputs<'_>,
) -> (Tensor<2>, Vec<Tensor<3>>) {
    profile::measure("state_space_next", || cost(inputs, 1), || place.state_space_next(memories, texts, inputs))
}

/// The gradients of [`state_space`] with respect to `x`, `b` and `c` side by side, and to decays and strengths.
///
/// # Shapes
/// `dy`: `[tokens, inner_width]`, zeros outside all documents.
#[must_use]
pub fn state_space_backward(
    place: Place,
    dy: &Tensor<2>,
    inputs: StateInputs<'_>,
) -> (Tensor<2>, StateGates<Tensor<2>>) {
    profile::measure("state_space_backward", || cost(inputs, 4), || place.state_space_backward(dy, inputs))
}

/// Cost of `times` the products of the forward.
fn cost(StateInputs { xbc, heads, .. }: StateInputs<'_>, times: usize) -> Cost {
    let tokens = xbc.dims()[0];
    let StateHeads { num_heads, head_dim, state_dim, .. } = heads;
    Cost {
        shape: format!("{num_heads} heads of {head_dim} x {state_dim}"),
        flops: profile::count(times * tokens * heads.flops_per_token(CHUNK_TOKENS)),
        bytes: profile::count(times) * (profile::bytes(xbc) + profile::count(4 * tokens * heads.inner_width())),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::ops::host;
    use crate::ops::layout::Layout;
    use crate::ops::place::place_of;

    const HEADS: StateHeads = StateHeads { num_heads: 4, num_groups: 2, head_dim: 6, state_dim: 10 };
    /// Lengths that are no multiples of a chunk, one of a chunk, of one token, of more chunks than one product has, and tokens in no
    /// document at the end.
    const DOCUMENTS: [(usize, usize); 4] = [(0, 150), (150, 1), (151, 64), (215, 4300)];
    const TOKENS: usize = 4520;

    struct Fixture {
        xbc: Tensor<2>,
        gates: StateGates<Tensor<2>>,
        dy: Tensor<2>,
    }

    fn fixture(device: &Device) -> Fixture {
        let rng = &mut ChaCha8Rng::seed_from_u64(12);
        let mut random = |width: usize, low: f32, high: f32| {
            let values: Vec<f32> = (0..TOKENS * width).map(|_| rng.random_range(low..high)).collect();
            host::tensor(values, [TOKENS, width], device)
        };
        let xbc = random(HEADS.xbc_width(), -1.0, 1.0);
        let gates = StateGates { decay: random(4, -0.3, 0.0), strength: random(4, 0.0, 1.0) };
        let dy = random(HEADS.inner_width(), -1.0, 1.0);
        let zeros = dy.clone().narrow(0, 4515, 5).zeros_like();
        Fixture { xbc, gates, dy: dy.slice_assign([4515..TOKENS, 0..HEADS.inner_width()], zeros) }
    }

    fn layout(documents: &[(usize, usize)], num_tokens: usize) -> Layout {
        Layout::new(1, documents.to_vec(), vec![0; num_tokens], [].into())
    }

    fn place(device: &Device) -> Place {
        place_of(device, DType::F32)
    }

    fn values(tensor: &Tensor<2>) -> Vec<f32> {
        let tensor = if tensor.is_autodiff() { tensor.clone().inner() } else { tensor.clone() };
        tensor.into_data().try_to_vec().unwrap()
    }

    /// Token after token, in `f64`.
    fn by_loop(Fixture { xbc, gates, .. }: &Fixture) -> Vec<f64> {
        let StateHeads { num_heads, num_groups, head_dim, state_dim } = HEADS;
        let (xbc, width) = (values(xbc), HEADS.xbc_width());
        let [decay, strength] = [&gates.decay, &gates.strength].map(values);
        let mut y = vec![0.0; TOKENS * HEADS.inner_width()];
        for (start, len) in DOCUMENTS {
            for head in 0..num_heads {
                let group = head / (num_heads / num_groups);
                let mut state = vec![0.0; state_dim * head_dim];
                for token in start..start + len {
                    let at = |column: usize| f64::from(xbc[token * width + column]);
                    let b = |i: usize| at(num_heads * head_dim + group * state_dim + i);
                    let c = |i: usize| at(num_heads * head_dim + (num_groups + group) * state_dim + i);
                    let [decay, strength] = [&decay, &strength].map(|gate| f64::from(gate[token * num_heads + head]));
                    for (i, p) in (0..state_dim).flat_map(|i| (0..head_dim).map(move |p| (i, p))) {
                        let entry = &mut state[i * head_dim + p];
                        *entry = decay.exp() * *entry + strength * b(i) * at(head * head_dim + p);
                        y[token * HEADS.inner_width() + head * head_dim + p] += *entry * c(i);
                    }
                }
            }
        }
        y
    }

    fn worst(found: &[f32], expected: &[f64]) -> f64 {
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max) / largest
    }

    #[test]
    fn chunks_give_what_token_after_token_gives() {
        let device = Device::flex();
        let fixture = fixture(&device);
        let layout = layout(&DOCUMENTS, TOKENS);
        let inputs = StateInputs { xbc: &fixture.xbc, gates: &fixture.gates, layout: &layout, heads: HEADS };
        let worst = worst(&values(&state_space(place(&device), inputs)), &by_loop(&fixture));
        assert!(worst < 1e-5, "{worst}");
    }

    #[test]
    fn a_text_goes_on_from_its_state() {
        let device = Device::flex();
        let Fixture { xbc, gates, .. } = fixture(&device);
        let part = |x: &Tensor<2>, start: usize, len: usize| x.clone().narrow(0, start, len);
        let of = |start: usize, len: usize, state: Tensor<3>| {
            let layout = layout(&[(0, len)], len);
            let gates =
                StateGates { decay: part(&gates.decay, start, len), strength: part(&gates.strength, start, len) };
            let xbc = part(&xbc, start, len);
            let inputs = StateInputs { xbc: &xbc, gates: &gates, layout: &layout, heads: HEADS };
            let (y, mut states) = state_space_next(place(&device), vec![state], &TextRows::of(&[len], 0), inputs);
            (y, states.remove(0))
        };
        let zero = || Tensor::zeros([HEADS.num_heads, HEADS.state_dim, HEADS.head_dim], (&device, DType::F32));
        let (all, _) = of(0, 150, zero());
        let (first, state) = of(0, 97, zero());
        let (second, _) = of(97, 53, state);
        let apart = values(&Tensor::cat(vec![first, second], 0));
        let all: Vec<f64> = values(&all).into_iter().map(f64::from).collect();
        assert!(worst(&apart, &all) < 1e-5);
    }

    #[test]
    fn the_backward_is_the_derivative_of_the_forward() {
        let device = Device::flex().autodiff();
        let Fixture { xbc, gates, dy } = fixture(&device);
        let (xbc, decay, strength) = (xbc.require_grad(), gates.decay.require_grad(), gates.strength.require_grad());
        let (gates, layout) = (StateGates { decay, strength }, layout(&DOCUMENTS, TOKENS));
        let y = state_space(place(&device), StateInputs { xbc: &xbc, gates: &gates, layout: &layout, heads: HEADS });
        let grads = (y * dy).sum().backward();
        let expected = [&xbc, &gates.decay, &gates.strength].map(|leaf| values(&leaf.grad(&grads).unwrap()));
        let device = Device::flex();
        let Fixture { xbc, gates, dy } = fixture(&device);
        let inputs = StateInputs { xbc: &xbc, gates: &gates, layout: &layout, heads: HEADS };
        let (dx, of_gates) = state_space_backward(place(&device), &dy, inputs);
        for (found, expected) in [&dx, &of_gates.decay, &of_gates.strength].into_iter().zip(expected) {
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            let worst = worst(&values(found), &expected);
            assert!(worst < 1e-5, "{worst}");
        }
    }
}
