//! Matrices of codes as numbers of 16 bits, for products, by the kernel of `decode.cu`.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::aligned;
use super::stream::Launch;
use crate::ops::custom::{Output, launch, spec};
use crate::ops::quantised::{BlockScales, Quantised, table};

const MODULE: &str = "decode";

const THREADS: usize = 256;
/// Numbers of a thread.
const NUMBERS: usize = 8;
/// Whether the kernel decodes a matrix.
pub(super) fn takes(matrix: &Quantised) -> bool {
    matrix.shape[1].is_multiple_of(NUMBERS) && matrix.block_len.is_multiple_of(NUMBERS) && matrix.block_len > 0
}

/// The matrix rounded to `dtype`, `[out_features, in_features]`.
pub(super) fn decoded(matrix: &Quantised, dtype: DType) -> Tensor<2> {
    let (decoding, inputs) = Decoding::new(matrix);
    let output = Output::New(spec(dtype, matrix.shape));
    let [out] = launch("decode", inputs, [output], move |[], inputs, [out]| decoding.launch(inputs, out));
    Tensor::from_dispatch(out)
}

/// How a matrix is decoded.
#[derive(Clone, Copy)]
pub(super) struct Decoding {
    kernel: &'static str,
    pub(super) shape: [usize; 2],
    block_len: usize,
    offset: f64,
    /// Whether there are scales, zeros, and the codes and the table of scales that are codes themselves.
    is_there: [bool; 4],
}

impl Decoding {
    /// With the tensors of the matrix.
    pub(super) fn new(matrix: &Quantised) -> (Self, Vec<DispatchTensor>) {
        let Quantised { shape, coding, ref codes, block_len, ref scales } = *matrix;
        let kernel = if coding.table().is_some() { "decode_4" } else { "decode_8" };
        let table = table(coding, &codes.device()).into_dispatch();
        let float = |x: &Tensor<1>| Some(x.clone().into_dispatch());
        let (of_blocks, offset) = match scales {
            BlockScales::Plain(scales) => ([float(scales), None, None, None], 0.0),
            BlockScales::Shifted { scales, zeros } => ([float(scales), float(zeros), None, None], 0.0),
            BlockScales::Nested { codes, table, scales, offset } => {
                ([float(scales), None, Some(codes.clone().into_dispatch()), float(table)], f64::from(*offset))
            }
        };
        let is_there = of_blocks.each_ref().map(Option::is_some);
        let inputs = [codes.clone().into_dispatch(), table].into_iter().chain(of_blocks.into_iter().flatten());
        (Self { kernel, shape, block_len, offset, is_there }, inputs.collect())
    }

    /// Decodes the tensors of the matrix into `out`.
    pub(super) fn launch(&self, inputs: Vec<CubeTensor>, out: &CubeTensor) {
        let len = self.shape[0] * self.shape[1];
        let inputs: Vec<_> = inputs.into_iter().map(aligned).collect();
        let launch = Launch::new(MODULE, self.kernel, [len.div_ceil(NUMBERS * THREADS), 1, 1], THREADS);
        let mut of_blocks = inputs[2..].iter();
        let scales = |launch: Launch, is_there: &bool| match is_there.then(|| of_blocks.next()).flatten() {
            Some(input) => launch.read(input),
            None => launch.long(0),
        };
        let launch = self.is_there.iter().fold(launch.read(&inputs[0]).read(&inputs[1]), scales);
        launch.write(out).long(len as u64).ints([self.block_len]).float(self.offset).launch();
    }
}
