//! Matrices of codes as numbers of 16 bits, for products, by the kernel of `decode.cu`.

use std::iter::{once, zip};

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{aligned, rows_from};
use super::stream::{Launch, Operand};
use crate::ops::custom::{Output, launch, spec};
use crate::ops::quantised::{BlockScales, Coding, Quantised, table};

const MODULE: &str = "decode";

const THREADS: usize = 256;
/// Numbers of a thread.
const NUMBERS: usize = 8;
/// Matrices of a launch.
const MATRICES: usize = 64;
/// Words of a matrix in a table.
const WORDS: usize = 6;

/// Whether the kernel decodes a matrix.
pub(super) fn takes(matrix: &Quantised) -> bool {
    matrix.shape[1].is_multiple_of(NUMBERS) && matrix.block_len.is_multiple_of(NUMBERS) && matrix.block_len > 0
}

/// Whether two matrices are decoded in one launch.
pub(super) fn are_alike(a: &Quantised, b: &Quantised) -> bool {
    (a.shape, a.coding, a.block_len) == (b.shape, b.coding, b.block_len)
}

/// The matrix rounded to `dtype`, `[out_features, in_features]`.
pub(super) fn decoded(matrix: &Quantised, dtype: DType) -> Tensor<2> {
    let (decoding, inputs) = Decoding::new(matrix);
    let inputs = once(decoding.table(&matrix.codes.device())).chain(inputs);
    let output = Output::New(spec(dtype, matrix.shape));
    let run = move |[table]: [CubeTensor; 1], inputs, [out]: &[CubeTensor; 1]| decode(&[decoding], &table, inputs, out);
    let [out] = launch("decode", inputs, [output], run);
    Tensor::from_dispatch(out)
}

/// How a matrix is decoded.
#[derive(Clone, Copy)]
pub(super) struct Decoding {
    coding: Coding,
    shape: [usize; 2],
    block_len: usize,
    offset: f32,
    /// Whether there are scales, zeros, and the codes and the table of scales that are codes themselves.
    is_there: [bool; 4],
}

impl Decoding {
    /// With the tensors of the matrix.
    pub(super) fn new(matrix: &Quantised) -> (Self, Vec<DispatchTensor>) {
        let Quantised { shape, coding, ref codes, block_len, ref scales } = *matrix;
        let float = |x: &Tensor<1>| Some(x.clone().into_dispatch());
        let (of_blocks, offset) = match scales {
            BlockScales::Plain(scales) => ([float(scales), None, None, None], 0.0),
            BlockScales::Shifted { scales, zeros } => ([float(scales), float(zeros), None, None], 0.0),
            BlockScales::Nested { codes, table, scales, offset } => {
                ([float(scales), None, Some(codes.clone().into_dispatch()), float(table)], *offset)
            }
        };
        let is_there = of_blocks.each_ref().map(Option::is_some);
        let inputs = once(codes.clone().into_dispatch()).chain(of_blocks.into_iter().flatten());
        (Self { coding, shape, block_len, offset, is_there }, inputs.collect())
    }

    /// What its codes stand for.
    pub(super) fn table(&self, device: &Device) -> DispatchTensor {
        table(self.coding, device).into_dispatch()
    }

    /// Number of the matrix's tensors.
    pub(super) fn num_inputs(&self) -> usize {
        1 + self.is_there.iter().filter(|is_there| **is_there).count()
    }

    /// Its words in a table, of its tensors.
    fn words<'a>(&self, inputs: &'a [CubeTensor]) -> [Operand<'a>; WORDS] {
        let mut of_blocks = inputs[1..].iter();
        let [scales, zeros, codes, table] = self
            .is_there
            .map(|is_there| is_there.then(|| of_blocks.next()).flatten().map_or(Operand::Value(0), Operand::Read));
        [Operand::Read(&inputs[0]), scales, zeros, codes, table, Operand::Word(self.offset.to_bits().into())]
    }
}

/// Decodes matrices that are alike, one below the other, into `out`. `inputs`: their tensors, one matrix's after the other's.
pub(super) fn decode(matrices: &[Decoding], table: &CubeTensor, inputs: Vec<CubeTensor>, out: &CubeTensor) {
    let (table, mut inputs) = (aligned(table.clone()), inputs.into_iter().map(aligned));
    for (index, matrices) in matrices.chunks(MATRICES).enumerate() {
        let of_each: Vec<Vec<_>> =
            matrices.iter().map(|matrix| inputs.by_ref().take(matrix.num_inputs()).collect()).collect();
        let Decoding { coding, shape, block_len, .. } = matrices[0];
        let kernel = if coding.table().is_some() { "decode_4" } else { "decode_8" };
        let (len, part) = (shape[0] * shape[1], rows_from(out, index * MATRICES * shape[0], matrices.len() * shape[0]));
        let grid = [len.div_ceil(NUMBERS * THREADS), matrices.len(), 1];
        let words = zip(matrices, &of_each).flat_map(|(matrix, inputs)| matrix.words(inputs));
        let launch = Launch::new(MODULE, kernel, grid, THREADS).table(words, MATRICES * WORDS).read(&table);
        launch.write(&part).long(len as u64).ints([block_len]).launch();
    }
}
