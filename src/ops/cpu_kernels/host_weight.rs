//! Frozen weights as the kernels of the CPU take them.

use burn::tensor::DType;
use burn_flex::FlexTensor;
use half::{bf16, f16};

use crate::ops::blocks::HostBlocks;
use crate::ops::plain::linear::{Matrix, Weight};
use crate::ops::quantised::HostCodes;
use crate::ops::{cpu, host};

/// The elements of a frozen weight, in their storage type.
pub(super) struct HostWeight {
    values: HostMatrix,
    rounds: bool,
}

enum HostMatrix {
    Dense(FlexTensor),
    Quantised(Box<HostCodes>),
    Blocks(HostBlocks),
}

impl HostWeight {
    pub(super) fn new(weight: &Weight) -> Self {
        let values = match &weight.values {
            Matrix::Dense(values) => HostMatrix::Dense(host::contiguous(values.clone())),
            Matrix::Quantised(values) => HostMatrix::Quantised(Box::new(HostCodes::new(values))),
            Matrix::Blocks(values) => HostMatrix::Blocks(HostBlocks::new(values)),
        };
        Self { values, rounds: weight.rounds }
    }

    /// The weight as the kernels take it.
    pub(super) fn get(&self) -> cpu::Weight<'_> {
        let weight = match &self.values {
            HostMatrix::Quantised(values) => Some(cpu::Weight::codes(values.get())),
            HostMatrix::Blocks(values) => Some(cpu::Weight::blocks(values.get())),
            HostMatrix::Dense(values) => match values.dtype() {
                DType::F32 => values.as_slice::<f32>().map(cpu::Weight::f32),
                DType::BF16 => values.as_slice::<bf16>().map(cpu::Weight::bf16),
                DType::F16 => values.as_slice::<f16>().map(cpu::Weight::f16),
                _ => None,
            },
        };
        let Some(weight) = weight else { panic!("the kernels take weights in f32, bf16 and f16") };
        weight.rounding(self.rounds)
    }
}
