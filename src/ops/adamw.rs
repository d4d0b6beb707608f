//! One `AdamW` update of one parameter (Loshchilov and Hutter, 2019, algorithm 2), as `torch.optim.AdamW` does it.

use burn::tensor::Tensor;

use super::{cpu, host};

/// Constants of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay of the moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Which update of this parameter this is, from 1.
    pub step: u64,
    /// Factor of the gradient, for clipping and averaging.
    pub grad_scale: f64,
}

impl Update {
    /// `1 - beta^step` for both moments.
    fn bias_corrections(&self) -> [f64; 2] {
        #[expect(clippy::cast_precision_loss, reason = "exact below 2^53 steps")]
        self.betas.map(|beta| 1.0 - beta.powf(self.step as f64))
    }
}

/// A parameter with its moments.
#[derive(Clone, Debug)]
pub struct State {
    /// The parameter.
    pub parameter: Tensor<2>,
    /// First moment.
    pub m: Tensor<2>,
    /// Second moment.
    pub v: Tensor<2>,
}

/// The state after one update with `grad`, all in `f32` and of one shape.
#[must_use]
pub fn adamw(state: State, grad: &Tensor<2>, update: &Update) -> State {
    let Some(host_grad) = host::view(grad) else { return plain_adamw(state, grad, update) };
    let State { parameter, m, v } = state;
    let (Some(mut p), Some(mut m), Some(mut v)) = (host::take(parameter), host::take(m), host::take(v)) else {
        unreachable!("moments lie where their parameter's gradient lies");
    };
    #[expect(clippy::cast_possible_truncation, reason = "parameters and moments are in f32")]
    cpu::adamw(
        p.storage_mut(),
        host_grad.as_slice(),
        m.storage_mut(),
        v.storage_mut(),
        &cpu::AdamwFactors {
            grad_scale: update.grad_scale as f32,
            beta1: update.betas[0] as f32,
            beta2: update.betas[1] as f32,
            decay: (1.0 - update.learning_rate * update.weight_decay) as f32,
            step_size: (update.learning_rate / update.bias_corrections()[0]) as f32,
            root_correction: update.bias_corrections()[1].sqrt() as f32,
            eps: update.eps as f32,
        },
    );
    State { parameter: host::restore(p), m: host::restore(m), v: host::restore(v) }
}

/// [`adamw`] in plain tensor calls.
#[must_use]
pub fn plain_adamw(state: State, grad: &Tensor<2>, update: &Update) -> State {
    let [beta1, beta2] = update.betas;
    let [correction1, correction2] = update.bias_corrections();
    let grad = grad.clone() * update.grad_scale;
    let m = state.m * beta1 + grad.clone() * (1.0 - beta1);
    let v = state.v * beta2 + grad.square() * (1.0 - beta2);
    let denominator = v.clone().sqrt() / correction2.sqrt() + update.eps;
    let decayed = state.parameter * (1.0 - update.learning_rate * update.weight_decay);
    let parameter = decayed - m.clone() / denominator * (update.learning_rate / correction1);
    State { parameter, m, v }
}
