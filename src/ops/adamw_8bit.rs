//! One `AdamW` update of one parameter whose moments are codes of eight bits (Dettmers et al., 2022), as bitsandbytes computes
//! it: decoded, updated, and coded again with the largest absolute number of each block as its scale.

use burn::tensor::Tensor;

use super::adamw::Update;
use super::kernels::Place;

pub use super::cpu::BLOCK_LEN;
pub use super::plain::updates::Coded;

/// The state after one update, as [`adamw`](super::adamw::adamw) takes it.
#[must_use]
pub fn adamw_8bit(place: Place, state: Coded, grad: &Tensor<2>, update: &Update, factor: Option<&Tensor<1>>) -> Coded {
    place.adamw_8bit(state, grad, update, factor)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::host;
    use crate::ops::place::place_on;
    use crate::ops::plain::updates::plain_adamw_8bit;

    fn values(tensor: &Tensor<2>) -> Vec<f32> {
        tensor.to_data().try_to_vec().unwrap()
    }

    #[test]
    fn plain_calls_and_the_kernel_give_the_same_codes_scales_and_parameters() {
        let (shape, device) = ([5, 333], Device::flex());
        let size = 5 * 333;
        let drawn = |seed: u32| {
            let draw = |i: u32| ((i.wrapping_mul(2_654_435_761) ^ seed) % 1999) as f32 / 999.0 - 1.0;
            host::tensor((0..size).map(draw).collect(), shape, &device)
        };
        let mut states = [false, true].map(|_| Coded {
            parameter: drawn(1),
            codes: [0, 1].map(|_| Tensor::zeros([1665], (&device, DType::U8))),
            scales: [0, 1].map(|_| Tensor::zeros([1, 7], (&device, DType::F32))),
        });
        for step in 1..=4 {
            let update = Update {
                learning_rate: 1e-2,
                betas: [0.9, 0.999],
                eps: 1e-8,
                weight_decay: 0.1,
                step,
                grad_scale: 0.5,
            };
            let grad = drawn(77 * u32::try_from(step).unwrap());
            states[0] = adamw_8bit(place_on(DeviceKind::Cpu), states[0].clone(), &grad, &update, None);
            states[1] = plain_adamw_8bit(states[1].clone(), &grad, &update);
            let [kernel, plain] = &states;
            for moment in 0..2 {
                let codes = [kernel, plain].map(|state| state.codes[moment].to_data().try_to_vec::<u8>().unwrap());
                // A number that is rounded otherwise may be nearer to the next code.
                let others = codes[0].iter().zip(&codes[1]).filter(|(a, b)| a != b).count();
                assert!(others <= 3, "{others} codes of step {step} differ");
                let scales = [kernel, plain].map(|state| values(&state.scales[moment]));
                assert!(scales[0].iter().zip(&scales[1]).all(|(a, b)| (a - b).abs() <= 1e-5 * a), "{scales:?}");
            }
            let parameters = [kernel, plain].map(|state| values(&state.parameter));
            let apart = parameters[0].iter().zip(&parameters[1]).filter(|(a, b)| (*a - *b).abs() > 1e-5).count();
            assert!(apart <= 3, "{apart} parameters of step {step} differ");
        }
    }
}
