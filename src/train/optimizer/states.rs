//! What a rule remembers of a parameter.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::save::checkpoint::{HostTensor, HostValues};
use crate::util::faults;

/// A state of a parameter.
#[derive(Clone, Debug)]
pub enum State {
    /// Numbers in `f32`.
    Numbers(Tensor<2>),
    /// A byte for each number of the parameter, row by row.
    Codes(Tensor<1, Int>),
}

/// What a state is before the first update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Zeros,
    Parameter,
    Codes,
}

/// The name of a state in a checkpoint, and its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateForm {
    /// Its name.
    pub name: &'static str,
    shape: [usize; 2],
    start: Start,
}

impl StateForm {
    /// Numbers that start at zero.
    pub(super) fn zeros(name: &'static str, shape: [usize; 2]) -> Self {
        Self { name, shape, start: Start::Zeros }
    }

    /// Numbers that start as the parameter's.
    pub(super) fn parameter(name: &'static str, shape: [usize; 2]) -> Self {
        Self { name, shape, start: Start::Parameter }
    }

    /// Codes that start at zero.
    pub(super) fn codes(name: &'static str, shape: [usize; 2]) -> Self {
        Self { name, shape, start: Start::Codes }
    }

    /// Its size in memory.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let width = if self.start == Start::Codes { 1 } else { size_of::<f32>() };
        self.shape.iter().product::<usize>() * width
    }

    /// The state of a parameter before the first update.
    pub(super) fn start(&self, parameter: &Tensor<2>) -> State {
        let device = &parameter.device();
        match self.start {
            Start::Zeros => State::Numbers(Tensor::zeros(self.shape, (device, DType::F32))),
            Start::Parameter => State::Numbers(parameter.clone()),
            Start::Codes => State::Codes(Tensor::zeros([self.shape[0] * self.shape[1]], (device, DType::U8))),
        }
    }

    /// Copies a state to the host.
    pub(super) fn save(&self, state: &State, name: String) -> HostTensor {
        let values = match state {
            State::Numbers(numbers) => HostValues::F32(faults::read(numbers.clone(), &name)),
            State::Codes(codes) => HostValues::U8(faults::read_bytes(codes.clone(), &name)),
        };
        HostTensor { name, shape: self.shape.to_vec(), values }
    }

    /// The inverse of [`save`](Self::save); `None` for a tensor of another form.
    pub(super) fn restore(&self, tensor: &HostTensor, device: &Device) -> Option<State> {
        match &tensor.values {
            _ if tensor.shape != self.shape => None,
            HostValues::F32(numbers) if self.start != Start::Codes => {
                let data = TensorData::new(numbers.clone(), self.shape);
                Some(State::Numbers(Tensor::from_data(data, (device, DType::F32))))
            }
            HostValues::U8(codes) if self.start == Start::Codes => {
                let data = TensorData::new(codes.clone(), [codes.len()]);
                Some(State::Codes(Tensor::from_data(data, (device, DType::U8))))
            }
            _ => None,
        }
    }
}

/// The states of a rule that has `N`, all of them numbers.
pub(super) fn numbers<const N: usize>(states: Vec<State>) -> [Tensor<2>; N] {
    let numbers = states.into_iter().filter_map(|state| match state {
        State::Numbers(numbers) => Some(numbers),
        State::Codes(_) => None,
    });
    <[_; N]>::try_from(numbers.collect::<Vec<_>>()).unwrap_or_else(|_| unreachable!("as the rule's forms say"))
}
