//! `AdamW` with moments in codes by the kernel of the CPU.

use burn::tensor::Tensor;

use crate::ops::plain::updates::{Coded, Update};
use crate::ops::{cpu, host};

/// [`adamw_8bit`](crate::ops::adamw_8bit::adamw_8bit).
pub(super) fn update(state: Coded, grad: &Tensor<2>, update: &Update) -> Coded {
    let Coded { parameter, codes: [m, v], scales } = state;
    let grad = host::view(grad);
    let [mut m, mut v] = [m, v].map(host::HostCodes::new);
    let scales = scales.map(|scales| scales.reshape([1, -1]));
    let [m_scales, v_scales] = scales;
    let [parameter, m_scales, v_scales] =
        host::update_all([parameter, m_scales, v_scales], |[parameter, m_scales, v_scales]| {
            let moments =
                [cpu::Coded { codes: m.get(), scales: m_scales }, cpu::Coded { codes: v.get(), scales: v_scales }];
            cpu::adamw_8bit(parameter, &grad, moments, update);
        });
    Coded { parameter, codes: [m.into_tensor(), v.into_tensor()], scales: [m_scales, v_scales] }
}
