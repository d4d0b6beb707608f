//! Frozen matrices on their way from host memory to a device.

use std::iter::once;
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, StreamId, Tensor, TensorData};

use super::host;
use super::plain::linear::Matrix;

/// Where the tensors of a matrix in host memory go. It stays where it is, too.
#[derive(Clone, Copy, Debug)]
pub enum Way<'a> {
    /// Into host memory that this device copies from by itself (page-locked), where its backend has such memory.
    Pinned(&'a Device),
    /// To a device, by the current stream, for computation on another one, which will wait for the copy.
    To(&'a Device, StreamId),
}

impl Way<'_> {
    fn floats<const D: usize>(self, tensor: &Tensor<D>) -> Tensor<D> {
        self.take(host::data(tensor), |data, device| {
            let dtype = data.dtype();
            Tensor::from_data(data, (device, dtype))
        })
    }

    fn bytes(self, tensor: &Tensor<1, Int>) -> Tensor<1, Int> {
        self.take(host::byte_data(tensor), |data, device| Tensor::from_data(data, (device, DType::U8)))
    }

    fn take<T: Clone>(self, mut data: TensorData, make: impl Fn(TensorData, &Device) -> T) -> T {
        match self {
            Self::Pinned(device) => {
                device.staging(once(&mut data));
                let (bytes, shape, dtype) = data.into_parts();
                make(TensorData::from_bytes(bytes.shared(), shape, dtype), &Device::flex())
            }
            // A tensor is of the stream that made it. A clone of another stream is that stream's own.
            Self::To(device, stream) => {
                let there = make(data, device);
                stream.executes(|| there.clone())
            }
        }
    }
}

impl Matrix {
    /// The matrix at the end of the way.
    #[must_use]
    pub fn moved(&self, way: Way<'_>) -> Self {
        match self {
            Self::Dense(values) => Self::Dense(way.floats(values)),
            Self::Quantised(values) => {
                Self::Quantised(Arc::new(values.map(|floats| way.floats(floats), |bytes| way.bytes(bytes))))
            }
            Self::Blocks(values) => Self::Blocks(Arc::clone(values)),
        }
    }

    /// The result of a small operation with the matrix; `None` where it is in host memory.
    #[must_use]
    pub fn touched(&self) -> Option<Tensor<1>> {
        match self {
            Self::Dense(values) => Some(values.clone().narrow(0, 0, 1).flatten::<1>(0, 1).narrow(0, 0, 1).neg()),
            Self::Quantised(values) => Some(values.codes.clone().narrow(0, 0, 1).float()),
            Self::Blocks(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Bytes;

    use super::*;
    use crate::ops::quantised::Coding::{self, Int8, Nf4};
    use crate::ops::quantised::{BlockScales, Quantised, bytes_tensor};

    fn bits(matrix: &Matrix) -> Vec<u8> {
        matrix.dense().into_owned().into_data().as_bytes().to_vec()
    }

    #[test]
    fn a_matrix_arrives_with_every_bit_and_its_bytes_are_not_copied_on_the_host() {
        let flex = Device::flex();
        let floats = |len: usize| host::tensor((0..len).map(|i| i as f32 / 7.0).collect(), [len], &flex);
        let bytes = |len: usize| bytes_tensor(Bytes::from_bytes_vec((0..len).map(|i| (i * 37) as u8).collect()), &flex);
        let codes = |coding: Coding, scales| {
            let codes = bytes(if coding == Nf4 { 32 } else { 64 });
            Matrix::Quantised(Arc::new(Quantised { shape: [4, 16], coding, codes, block_len: 16, scales }))
        };
        let nested = BlockScales::Nested { codes: bytes(4), table: floats(256), scales: floats(1), offset: 0.5 };
        let matrices = [
            Matrix::Dense(floats(64).reshape([4, 16]).cast(DType::BF16)),
            codes(Int8, BlockScales::Plain(floats(4))),
            codes(Nf4, BlockScales::Shifted { scales: floats(4), zeros: floats(4) }),
            codes(Nf4, nested),
        ];
        for matrix in matrices {
            let parked = matrix.moved(Way::Pinned(&flex));
            let there = StreamId::allocate().executes(|| parked.moved(Way::To(&flex, StreamId::current())));
            assert_eq!(there.touched().map(|one| one.dims()), Some([1]));
            assert_eq!([bits(&parked), bits(&there)], [bits(&matrix), bits(&matrix)]);
            if let (Matrix::Dense(parked), Matrix::Dense(there)) = (parked, there) {
                let [parked, there] = [parked, there].map(|tensor| host::data(&tensor).as_bytes().as_ptr());
                assert_eq!(parked, there);
            }
        }
    }
}
