//! The AdamW update and the sum of squares behind the global gradient norm.

use rayon::prelude::*;

use super::simd::{CHUNK, vectorised};

/// Settings of one AdamW step (Loshchilov and Hutter 2019, algorithm 2, as PyTorch computes it).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first and second moment, in [0, 1).
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Number of this step, from 1, for the bias corrections.
    pub step: u64,
    /// Factor on the gradient: clipping, 1 / target tokens, loss scale.
    pub grad_scale: f64,
}

/// [`AdamW`] in the form that the inner loop uses.
#[derive(Clone, Copy)]
pub(super) struct Constants {
    decay: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    step_size: f32,
    root_correction: f32,
    eps: f32,
    grad_scale: f32,
}

vectorised! { pub(super) fn adamw_chunk<'a, S>(
    _simd, param: &'a mut [f32], grad: &'a [f32], m: &'a mut [f32], v: &'a mut [f32], c: Constants,
) {
    for (((param, grad), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        let grad = grad * c.grad_scale;
        *m += (grad - *m) * c.one_minus_beta1;
        *v = *v * c.beta2 + grad * grad * c.one_minus_beta2;
        let denominator = v.sqrt() * c.root_correction + c.eps;
        *param = *param * c.decay - c.step_size * (*m / denominator);
    }
} }

vectorised! { fn sum_of_squares_chunk<'a, S>(_simd, x: &'a [f32]) -> f64 {
    let (blocks, rest) = pulp::as_arrays::<32, _>(x);
    let mut sums = [0f64; 32];
    for block in blocks {
        for (sum, x) in sums.iter_mut().zip(block) {
            *sum += f64::from(*x) * f64::from(*x);
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>()
} }

impl AdamW {
    /// As the kernels of GPUs take it: see `adamw` in `ops/cuda/kernels/optimizer.cu`.
    #[must_use]
    pub fn constants(&self) -> [f32; 8] {
        let Constants { decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps, grad_scale } =
            Constants::new(self);
        [decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps, grad_scale]
    }
}

impl Constants {
    pub(super) fn new(settings: &AdamW) -> Self {
        let [beta1, beta2] = settings.betas;
        let power = |beta: f64| 1.0 - beta.powf(settings.step as f64);
        Self {
            decay: (1.0 - settings.learning_rate * settings.weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            step_size: (settings.learning_rate / power(beta1)) as f32,
            root_correction: (1.0 / power(beta2).sqrt()) as f32,
            eps: settings.eps as f32,
            grad_scale: settings.grad_scale as f32,
        }
    }
}

/// One AdamW step on `param`, with moments `m` and `v`.
pub fn adamw(param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], settings: &AdamW) {
    let len = param.len();
    assert!([grad.len(), m.len(), v.len()] == [len; 3], "adamw: lengths");
    let constants = Constants::new(settings);
    param
        .par_chunks_mut(CHUNK)
        .zip(grad.par_chunks(CHUNK))
        .zip(m.par_chunks_mut(CHUNK))
        .zip(v.par_chunks_mut(CHUNK))
        .for_each(|(((param, grad), m), v)| adamw_chunk(param, grad, m, v, constants));
}

/// Sum of the squares of `x`, in f64.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    if x.len() <= CHUNK {
        return sum_of_squares_chunk(x);
    }
    x.par_chunks(CHUNK).map(sum_of_squares_chunk).collect::<Vec<_>>().iter().sum()
}

#[cfg(test)]
mod tests {
    use super::super::reference::{assert_close, on_threads, random};
    use super::*;

    #[test]
    fn five_steps_match_f64() {
        let len = CHUNK + 13;
        let mut param = random(len, 1);
        let mut exact: Vec<f64> = param.iter().map(|x| f64::from(*x)).collect();
        let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
        let (mut m_exact, mut v_exact) = (vec![0f64; len], vec![0f64; len]);
        for step in 1..=5 {
            let grad = random(len, 10 + step);
            let settings =
                AdamW { learning_rate: 1e-2, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, step, grad_scale: 0.5 };
            adamw(&mut param, &grad, &mut m, &mut v, &settings);
            for i in 0..len {
                let g = f64::from(grad[i]) * 0.5;
                m_exact[i] = 0.9 * m_exact[i] + 0.1 * g;
                v_exact[i] = 0.999 * v_exact[i] + 0.001 * g * g;
                let m_hat = m_exact[i] / (1.0 - 0.9f64.powi(step as i32));
                let v_hat = v_exact[i] / (1.0 - 0.999f64.powi(step as i32));
                exact[i] -= 1e-2 * 0.1 * exact[i];
                exact[i] -= 1e-2 * m_hat / (v_hat.sqrt() + 1e-8);
            }
        }
        assert_close(&param, &exact, 1e-6);
        assert_close(&m, &m_exact, 1e-6);
        assert_close(&v, &v_exact, 1e-5);
    }

    #[test]
    fn the_sum_of_squares_is_exact_to_f64_and_independent_of_the_threads() {
        for len in [0, 1, 31, 33, 5 * CHUNK + 17] {
            let x = random(len, 1);
            let exact: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            let sum = sum_of_squares(&x);
            assert!((sum - exact).abs() <= 1e-12 * exact);
            assert_eq!(sum.to_bits(), on_threads(3, || sum_of_squares(&x)).to_bits());
        }
    }
}
