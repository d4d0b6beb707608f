//! The experts of a mixture together: rows by the kernels of `experts.cu`, their products by those of `grouped.cu`, on Hopper of
//! `grouped_hopper.cu`.

use std::iter::once;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::decode::Decoding;
use super::matrix::{aligned, dims, rows, rows_of_one_stride, scratch, stride};
use super::stream::{Launch, Operand, note_memory, tiles_in_flight};
use super::{Cuda, Kernel, check, decode, is_half, one, uses_hopper};
use crate::ops::custom::{self, Output, custom, first_of, launch, queue, spec};
use crate::ops::experts::{DECODED_BYTES, Experts, Sorted};
use crate::ops::plain::linear::{Matrix, Weight};
use crate::spec::Probabilities;

const MODULE: &str = "experts";
const GROUPED: &str = "grouped";
const HOPPER: &str = "grouped_hopper";

const THREADS: usize = 128;
/// Rows, or tokens, of a block that has a warp for each.
const ROWS: usize = 8;
/// Experts that a token chooses from.
const MOST_EXPERTS: usize = 512;
const SORTERS: usize = 256;
/// Biases in a table.
const BIASES: usize = 240;
/// Experts in a table of products, and layers of one input.
const EXPERTS: usize = 64;
const LAYERS: usize = 2;
/// Rows of a block's results.
const SIZE: usize = 128;

fn kernel(name: &str, [rows, width]: [usize; 2]) -> Launch {
    Launch::new(MODULE, name, [rows, width.div_ceil(8 * THREADS), 1], THREADS)
}

/// A kernel that has a warp for each row.
fn by_warps(name: &str, rows: usize) -> Launch {
    Launch::new(MODULE, name, [rows.div_ceil(ROWS), 1, 1], 32 * ROWS)
}

/// A frozen matrix as products take it: as it lies in memory, or decoded for them.
struct Factor {
    decoding: Option<Decoding>,
    num_inputs: usize,
}

impl Factor {
    /// With its tensors.
    fn new(weight: &Weight, dtype: DType) -> (Self, Vec<DispatchTensor>) {
        let (decoding, inputs) = match &weight.values {
            Matrix::Quantised(matrix) => {
                let (decoding, inputs) = Decoding::new(matrix);
                (Some(decoding), inputs)
            }
            values => (None, vec![values.dense_in(dtype).into_owned().into_dispatch()]),
        };
        (Self { decoding, num_inputs: inputs.len() }, inputs)
    }

    /// The matrix of its tensors, which come next.
    fn matrix(&self, inputs: &mut impl Iterator<Item = CubeTensor>, like: &CubeTensor) -> CubeTensor {
        let inputs: Vec<_> = inputs.by_ref().take(self.num_inputs).collect();
        match self.decoding {
            Some(decoding) => {
                let out = scratch(like, decoding.shape, like.dtype);
                decoding.launch(inputs, &out);
                out
            }
            None => one(inputs),
        }
    }
}

/// The frozen matrices of layers of one input, of all experts.
struct Factors {
    of_experts: Vec<Vec<Factor>>,
    /// `[out_features, in_features]` of each matrix.
    shape: [usize; 2],
    /// Experts of a launch.
    at_a_time: usize,
}

impl Factors {
    /// With the tensors of all, expert after expert.
    fn new(weights: &[Vec<&Weight>], dtype: DType) -> (Self, Vec<DispatchTensor>) {
        let (mut tensors, mut is_decoded) = (Vec::new(), false);
        let mut factor = |weight: &&Weight| {
            let (factor, inputs) = Factor::new(weight, dtype);
            tensors.extend(inputs);
            is_decoded |= factor.decoding.is_some();
            factor
        };
        let of_experts: Vec<Vec<_>> = weights.iter().map(|weights| weights.iter().map(&mut factor).collect()).collect();
        let shape = weights[0][0].dims();
        let bytes = weights[0].len() * shape[0] * shape[1] * dtype.size();
        let at_a_time = if is_decoded { (DECODED_BYTES / bytes).clamp(1, EXPERTS) } else { EXPERTS };
        (Self { of_experts, shape, at_a_time }, tensors)
    }

    /// Launches a kernel with all experts, by tables of them: `start` gives it its grid, from the number of experts of a table,
    /// `end` its arguments after them, from the first expert, their number, and the stride of the matrices. Tensors of the matrices come
    /// next, after them the biases, if there are any.
    fn launch(
        &self,
        inputs: impl IntoIterator<Item = CubeTensor>,
        like: &CubeTensor,
        start: impl Fn(usize) -> Launch,
        end: impl Fn(Launch, [usize; 2], usize) -> Launch,
    ) {
        let mut inputs = inputs.into_iter();
        let num_tensors: usize = self.of_experts.iter().flatten().map(|factor| factor.num_inputs).sum();
        let mut tensors: Vec<_> = inputs.by_ref().take(num_tensors).collect();
        let biases: Vec<_> = inputs.map(aligned).collect();
        let (num_layers, mut tensors) = (self.of_experts[0].len(), tensors.drain(..));
        for (index, experts) in self.of_experts.chunks(self.at_a_time).enumerate() {
            // Decoded ones are freed after the launch that reads them.
            let matrices = experts.iter().flatten().map(|factor| factor.matrix(&mut tensors, like)).collect();
            let matrices = rows_of_one_stride(matrices);
            note_memory(like);
            let first = index * self.at_a_time;
            let of_biases = biases.get(first * num_layers..(first + experts.len()) * num_layers).unwrap_or_default();
            let table = [by_expert(&matrices, num_layers), by_expert(of_biases, num_layers)].concat();
            let launch = start(experts.len()).table(table, 2 * EXPERTS * LAYERS);
            end(launch, [first, experts.len()], stride(&matrices[0])).launch();
        }
    }
}

/// Where the tensors of experts start, in the places that a table has for their layers.
fn by_expert(tensors: &[CubeTensor], num_layers: usize) -> Vec<Operand<'_>> {
    let mut table = vec![Operand::Value(0); EXPERTS * LAYERS];
    for (entries, tensors) in table.chunks_mut(LAYERS).zip(tensors.chunks(num_layers)) {
        entries.iter_mut().zip(tensors).for_each(|(entry, tensor)| *entry = Operand::Read(tensor));
    }
    table
}

impl Experts for Cuda {
    fn takes(&self, x: &Tensor<2>, slots: usize, weights: &[Vec<&Weight>]) -> bool {
        let Some(first) = weights.first().and_then(|weights| weights.first()) else { return false };
        let is_taken = |weight: &&Weight| {
            let is_read = match &weight.values {
                Matrix::Dense(values) => values.dtype() == x.dtype(),
                // All are decoded, also those that no token chose.
                Matrix::Quantised(matrix) => {
                    check::is_on(Kernel::Decode) && decode::takes(matrix) && slots >= weights.len()
                }
                Matrix::Blocks(_) => false,
            };
            is_read && weight.dims() == first.dims() && weight.bias.is_some() == first.bias.is_some()
        };
        let is_one_shape = weights.iter().all(|weights| weights.len() <= LAYERS && weights.iter().all(is_taken));
        let is_aligned = first.dims().iter().all(|width| width.is_multiple_of(8));
        let is_small = weights.len() <= MOST_EXPERTS;
        check::is_on(Kernel::Experts) && is_half(x.dtype()) && is_small && is_aligned && is_one_shape
    }

    fn route(
        &self,
        scores: &Tensor<2>,
        per_token: usize,
        probabilities: Probabilities,
        scales: Option<&Tensor<1>>,
    ) -> Sorted {
        let [tokens, num_experts] = scores.dims();
        let slots = tokens * per_token;
        let [ints, floats] = [DType::I32, DType::F32].map(|dtype| spec(dtype, [slots]));
        let outputs = [spec(DType::F32, [tokens, num_experts]), ints.clone(), floats].map(Output::New);
        let inputs = [scores.clone().cast(DType::F32).into_dispatch()];
        let inputs = inputs.into_iter().chain(scales.map(|scales| scales.clone().into_dispatch()));
        let is_of_chosen = usize::from(probabilities == Probabilities::OfChosen);
        let [probabilities, chosen, weights] =
            launch("experts_route", inputs, outputs, move |[scores], scales, outputs| {
                let launch = by_warps("experts_route", tokens).read(&into_contiguous(scores));
                let launch = optional(launch, scales.into_iter().next().map(into_contiguous));
                let launch = outputs.iter().fold(launch, Launch::write);
                launch.ints([tokens, num_experts, per_token, is_of_chosen]).launch();
            });
        let (probabilities, weights) = (Tensor::from_dispatch(probabilities), Tensor::from_dispatch(weights));
        let outputs = [spec(DType::I32, [num_experts + 1]), ints.clone(), ints];
        let [first, of_rows, places] = custom("experts_sort", [chosen.clone()], outputs, move |[chosen], outputs| {
            let launch = Launch::new(MODULE, "experts_sort", [num_experts, 1, 1], SORTERS).read(&chosen);
            outputs.iter().fold(launch, Launch::write).ints([slots]).launch();
        });
        let [chosen, first, slots, places] = [chosen, first, of_rows, places].map(Tensor::from_dispatch);
        Sorted { per_token, probabilities, chosen, weights, first, slots, places }
    }

    fn gather(&self, x: &Tensor<2>, sorted: &Sorted, weighted: bool) -> Tensor<2> {
        let per_token = sorted.per_token;
        let output = Output::New(spec(x.dtype(), [sorted.num_rows(), x.dims()[1]]));
        let inputs = [x.clone().into_dispatch(), sorted.slots.clone().into_dispatch()];
        let inputs = inputs.into_iter().chain(weights_of(sorted, weighted));
        let [y] = launch("experts_gather", inputs, [output], move |[x, slots], weights, [y]| {
            let x = rows(x);
            let launch = optional(kernel("experts_gather", dims(y)).read(&x).read(&slots), weights.into_iter().next());
            launch.write(y).ints([stride(&x), stride(y), dims(y)[1], per_token]).launch();
        });
        Tensor::from_dispatch(y)
    }

    fn combine(&self, sum: Tensor<2>, y: &Tensor<2>, sorted: &Sorted, weighted: bool) -> Tensor<2> {
        let per_token = sorted.per_token;
        let inputs = [y.clone().into_dispatch(), sorted.places.clone().into_dispatch()];
        let inputs = [sum.into_dispatch()].into_iter().chain(inputs).chain(weights_of(sorted, weighted));
        let [sum] = launch("experts_combine", inputs, [Output::Changed(0)], move |[y, places], weights, [sum]| {
            let y = rows(y);
            let launch = kernel("experts_combine", dims(sum)).read(&y).read(&places);
            let launch = optional(launch, weights.into_iter().next()).change(sum);
            launch.ints([stride(&y), stride(sum), dims(sum)[1], per_token]).launch();
        });
        Tensor::from_dispatch(sum)
    }

    fn forward(&self, x: &Tensor<2>, weights: &[Vec<&Weight>], sorted: &Sorted) -> Vec<Tensor<2>> {
        let (factors, tensors) = Factors::new(weights, x.dtype());
        let ([width, depth], num_layers) = (factors.shape, weights[0].len());
        let biases = weights.iter().flatten().filter_map(|weight| Some(weight.bias.clone()?.into_dispatch()));
        let inputs = [x.clone().into_dispatch(), sorted.first.clone().into_dispatch()];
        let run = move |inputs: Vec<CubeTensor>, ys: &[CubeTensor]| {
            let ([x, first], inputs) = first_of(inputs);
            let x = rows(x);
            let start = |num| grouped("forward", &x, [num_layers, width], num);
            let end = |launch: Launch, experts: [usize; 2], weight_stride: usize| {
                let launch = ys.iter().fold(launch.read(&x).read(&first), Launch::write);
                let launch = (num_layers..LAYERS).fold(launch, |launch, _| launch.long(0)).ints(experts);
                launch.ints([stride(&x), weight_stride, stride(&ys[0]), width, depth])
            };
            factors.launch(inputs, &x, start, end);
        };
        let outputs = custom::side_by_side(x, vec![width; num_layers]);
        let inputs = inputs.into_iter().chain(tensors).chain(biases).collect();
        queue("experts", inputs, outputs, run).into_iter().map(Tensor::from_dispatch).collect()
    }

    fn backward(&self, dys: &[Tensor<2>], weights: &[Vec<&Weight>], sorted: &Sorted) -> Tensor<2> {
        let (factors, tensors) = Factors::new(weights, dys[0].dtype());
        let ([depth, width], num_rows, num_layers) = (factors.shape, sorted.num_rows(), dys.len());
        let inputs = once(sorted.first.clone().into_dispatch()).chain(dys.iter().map(|dy| dy.clone().into_dispatch()));
        let output = Output::New(spec(dys[0].dtype(), [num_rows, width]));
        let [dx] = launch("experts_backward", inputs.chain(tensors), [output], move |[first], mut dys, [dx]| {
            let matrices = dys.split_off(num_layers);
            let dys = rows_of_one_stride(dys);
            let start = |num| grouped("backward", dx, [1, width], num);
            let end = |launch: Launch, experts: [usize; 2], weight_stride: usize| {
                let launch = dys.iter().fold(launch, Launch::read);
                let launch = (num_layers..LAYERS).fold(launch, |launch, _| launch.long(0));
                let launch = launch.read(&first).write(dx).ints(experts);
                launch.ints([num_layers, stride(&dys[0]), weight_stride, stride(dx), width, depth])
            };
            factors.launch(matrices, dx, start, end);
        });
        Tensor::from_dispatch(dx)
    }

    fn products(
        &self,
        h: &Tensor<2>,
        dh: &Tensor<2>,
        dy: &Tensor<2>,
        weights: &[Vec<&Weight>],
        sorted: &Sorted,
    ) -> Tensor<1> {
        let inputs = [h, dh].map(|x| x.clone().into_dispatch());
        let [of_rows] = custom("experts_products", inputs, [spec(DType::F32, [sorted.num_rows()])], |inputs, [out]| {
            let ([h, dh], [num_rows, width]) = (inputs.each_ref().map(|x| rows(x.clone())), dims(&inputs[0]));
            let launch = by_warps("experts_products", num_rows).read(&h).read(&dh).write(out);
            launch.ints([stride(&h), stride(&dh), num_rows, width]).launch();
        });
        let biases = weights.iter().flatten().filter_map(|weight| Some(weight.bias.clone()?.into_dispatch()));
        let biases: Vec<_> = biases.collect();
        if biases.is_empty() {
            return Tensor::from_dispatch(of_rows);
        }
        let tables = [&sorted.slots, &sorted.chosen].map(|table| table.clone().into_dispatch());
        let inputs = [of_rows, dy.clone().into_dispatch()].into_iter().chain(tables).chain(biases);
        let run = move |[dy, slots, chosen]: [CubeTensor; 3], biases: Vec<CubeTensor>, [out]: &[CubeTensor; 1]| {
            let (dy, biases) = (rows(dy), biases.into_iter().map(aligned).collect::<Vec<_>>());
            let [num_rows, width] = dims(&dy);
            for (index, biases) in biases.chunks(BIASES).enumerate() {
                let launch =
                    by_warps("experts_bias_products", num_rows).table(biases.iter().map(Operand::Read), BIASES);
                let launch = launch.read(&dy).read(&slots).read(&chosen).change(out);
                launch.ints([index * BIASES, biases.len(), stride(&dy), num_rows, width]).launch();
            }
        };
        let [out] = launch("experts_products", inputs, [Output::Changed(0)], run);
        Tensor::from_dispatch(out)
    }

    fn scores_backward(&self, products: Tensor<1>, sorted: &Sorted) -> Tensor<2> {
        let (shape @ [tokens, num_experts], per_token) = (sorted.probabilities.dims(), sorted.per_token);
        let [places, chosen] = [&sorted.places, &sorted.chosen].map(|table| table.clone().into_dispatch());
        let inputs = [sorted.probabilities.clone().into_dispatch(), products.into_dispatch(), places, chosen];
        let [gradient] = custom("experts_scores", inputs, [spec(DType::F32, shape)], move |inputs, [gradient]| {
            let inputs = inputs.map(into_contiguous);
            let launch = inputs.iter().fold(by_warps("experts_scores", tokens), Launch::read);
            launch.write(gradient).ints([tokens, num_experts, per_token]).launch();
        });
        Tensor::from_dispatch(gradient)
    }
}

/// A launch of products of `num_experts`, which have some of the rows of `x`, or all, for results of these layers and columns.
fn grouped(name: &str, x: &CubeTensor, [num_layers, width]: [usize; 2], num_experts: usize) -> Launch {
    let is_hopper = uses_hopper(Kernel::ExpertsHopper, x);
    let (module, columns, threads) = if is_hopper { (HOPPER, 256, 256) } else { (GROUPED, SIZE, 128) };
    let shared =
        if is_hopper { 4 * (SIZE + columns) * 64 * 2 } else { (tiles_in_flight(x) + 1) * (SIZE + columns) * 32 * 2 };
    let grid = [num_layers * width.div_ceil(columns), dims(x)[0].div_ceil(SIZE) + num_experts, 1];
    Launch::new(module, format!("{module}_{name}"), grid, threads).shared(shared)
}

fn weights_of(sorted: &Sorted, weighted: bool) -> Option<DispatchTensor> {
    weighted.then(|| sorted.weights.clone().into_dispatch())
}

/// With a tensor, or none.
fn optional(launch: Launch, x: Option<CubeTensor>) -> Launch {
    match x {
        Some(x) => launch.read(&x),
        None => launch.long(0),
    }
}
