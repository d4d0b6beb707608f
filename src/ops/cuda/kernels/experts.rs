//! The experts of a mixture together: rows by the kernels of `experts.cu`, their products by those of `grouped.cu`, on Hopper of
//! `grouped_hopper.cu`.

use std::iter::once;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor, activation};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::decode::Decoding;
use super::matrix::{aligned, dims, rows, rows_from, rows_of_one_stride, scratch, stride};
use super::stream::{Launch, Operand, note_memory, tiles_in_flight};
use super::{Cuda, Kernel, MOST_RANK, check, decode, expert_rank, is_half, uses_hopper};
use crate::ops::custom::{self, Output, custom, first_of, launch, queue, spec};
use crate::ops::experts::{DECODED_BYTES, Experts, Sorted};
use crate::ops::low_rank::{Lora, LowRank};
use crate::ops::plain::linear::{Matrix, Weight};
use crate::ops::plain::routing::Router;
use crate::spec::{Choice, Probabilities};

const MODULE: &str = "experts";
const GROUPED: &str = "grouped";
const HOPPER: &str = "grouped_hopper";

const THREADS: usize = 128;
/// Rows, or tokens, of a block that has a warp for each.
const ROWS: usize = 8;
/// Experts that a token chooses from.
const MOST_EXPERTS: usize = 512;
/// Groups of them.
const MOST_GROUPS: usize = 32;
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

/// The frozen matrices of layers of one input, of all experts.
struct Factors {
    /// How each is decoded, expert after expert; none where they lie in memory as products take them.
    decodings: Vec<Decoding>,
    num_experts: usize,
    num_layers: usize,
    /// `[out_features, in_features]` of each matrix.
    shape: [usize; 2],
    /// Experts of a launch.
    at_a_time: usize,
}

impl Factors {
    /// With the tensors of all, expert after expert, and before them what codes stand for.
    fn new(weights: &[Vec<&Weight>], dtype: DType) -> (Self, Vec<DispatchTensor>) {
        let (mut tensors, mut decodings) = (Vec::new(), Vec::<Decoding>::new());
        for weight in weights.iter().flatten() {
            match &weight.values {
                Matrix::Quantised(matrix) => {
                    let (decoding, inputs) = Decoding::new(matrix);
                    if decodings.is_empty() {
                        tensors.push(decoding.table(&matrix.codes.device()));
                    }
                    decodings.push(decoding);
                    tensors.extend(inputs);
                }
                values => tensors.push(values.dense_in(dtype).into_owned().into_dispatch()),
            }
        }
        let (num_experts, num_layers, shape) = (weights.len(), weights[0].len(), weights[0][0].dims());
        let bytes = num_layers * shape[0] * shape[1] * dtype.size();
        let at_a_time = if decodings.is_empty() { EXPERTS } else { (DECODED_BYTES / bytes).clamp(1, EXPERTS) };
        (Self { decodings, num_experts, num_layers, shape, at_a_time }, tensors)
    }

    /// The matrices of `num` experts from `first` on, of their tensors, which come next, and of what codes stand for.
    fn matrices(
        &self,
        [first, num]: [usize; 2],
        table: Option<&CubeTensor>,
        tensors: &mut impl Iterator<Item = CubeTensor>,
        like: &CubeTensor,
    ) -> Vec<CubeTensor> {
        let ([height, width], num_matrices) = (self.shape, num * self.num_layers);
        let Some(table) = table else {
            return rows_of_one_stride(tensors.take(num_matrices).collect());
        };
        let decodings = &self.decodings[first * self.num_layers..][..num_matrices];
        let inputs = tensors.take(decodings.iter().map(Decoding::num_inputs).sum()).collect();
        let all = scratch(like, [num_matrices * height, width], like.dtype);
        decode::decode(decodings, table, inputs, &all);
        (0..num_matrices).map(|index| rows_from(&all, index * height, height)).collect()
    }

    /// Launches a kernel with all experts, by tables of them: `start` gives it its grid, from the share of the experts in a table,
    /// `end` its arguments after them, from the first expert, their number, and the stride of the matrices. Tensors of the matrices
    /// come next, after them the biases, if there are any.
    fn launch(
        &self,
        inputs: impl IntoIterator<Item = CubeTensor>,
        like: &CubeTensor,
        start: impl Fn([usize; 2]) -> Launch,
        end: impl Fn(Launch, [usize; 2], usize) -> Launch,
    ) {
        let mut tensors: Vec<_> = inputs.into_iter().collect();
        let table = (!self.decodings.is_empty()).then(|| tensors.remove(0));
        let num_inputs = match table {
            Some(_) => self.decodings.iter().map(Decoding::num_inputs).sum(),
            None => self.num_experts * self.num_layers,
        };
        let biases: Vec<_> = tensors.drain(num_inputs..).map(aligned).collect();
        let (num_layers, mut tensors) = (self.num_layers, tensors.into_iter());
        for first in (0..self.num_experts).step_by(self.at_a_time) {
            let num = self.at_a_time.min(self.num_experts - first);
            // Decoded ones are freed after the launch that reads them.
            let matrices = self.matrices([first, num], table.as_ref(), &mut tensors, like);
            note_memory(like);
            let of_biases = biases.get(first * num_layers..(first + num) * num_layers).unwrap_or_default();
            let table = [by_expert(&matrices, num_layers), by_expert(of_biases, num_layers)].concat();
            let launch = start([num, self.num_experts]).table(table, 2 * EXPERTS * LAYERS);
            end(launch, [first, num], stride(&matrices[0])).launch();
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
    fn takes(&self, x: &Tensor<2>, slots: usize, choice: Choice, weights: &[Vec<&Weight>]) -> bool {
        let Some(first) = weights.first().and_then(|weights| weights.first()) else { return false };
        let is_taken = |weight: &&Weight| {
            let is_read = match &weight.values {
                Matrix::Dense(values) => values.dtype() == x.dtype() && matches!(first.values, Matrix::Dense(_)),
                // All are decoded, also those that no token chose.
                Matrix::Quantised(matrix) => {
                    let is_alike =
                        matches!(&first.values, Matrix::Quantised(first) if decode::are_alike(matrix, first));
                    check::is_on(Kernel::Decode) && decode::takes(matrix) && is_alike && slots >= weights.len()
                }
                Matrix::Blocks(_) => false,
            };
            is_read && weight.dims() == first.dims() && weight.bias.is_some() == first.bias.is_some()
        };
        let is_one_shape = weights.iter().all(|weights| weights.len() <= LAYERS && weights.iter().all(is_taken));
        let is_aligned = first.dims().iter().all(|width| width.is_multiple_of(8));
        let is_small = weights.len() <= MOST_EXPERTS && choice.groups.is_none_or(|groups| groups.count <= MOST_GROUPS);
        check::is_on(Kernel::Experts) && is_half(x.dtype()) && is_small && is_aligned && is_one_shape
    }

    fn takes_rank(&self, rank: usize) -> bool {
        rank <= MOST_RANK
    }

    fn route(&self, scores: &Tensor<2>, router: Router<'_>) -> Sorted {
        let Router { num_per_token: per_token, probabilities, choice: Choice { groups, factor, .. }, bias, scales } =
            router;
        let ([tokens, num_experts], scores) = (scores.dims(), scores.clone().cast(DType::F32));
        let (slots, given) = (tokens * per_token, [bias, scales].map(|numbers| numbers.is_some()));
        let [ints, floats] = [DType::I32, DType::F32].map(|dtype| spec(dtype, [slots]));
        let outputs = [spec(DType::F32, [tokens, num_experts]), ints.clone(), floats].map(Output::New);
        let inputs = [bias, scales].into_iter().flatten().map(|numbers| numbers.clone().into_dispatch());
        let inputs = [scores.clone().into_dispatch()].into_iter().chain(inputs);
        let (kind, more) = match probabilities {
            Probabilities::OfAll => (0, 0.0),
            Probabilities::OfChosen => (1, 0.0),
            Probabilities::Sigmoids => (2, 0.0),
            Probabilities::SigmoidsOfChosen(more) => (3, more),
        };
        let groups = groups.map_or([0; 3], |of| [of.count, of.num_kept, of.num_best]);
        let run = move |[scores]: [CubeTensor; 1], numbers: Vec<CubeTensor>, outputs: &[CubeTensor; 3]| {
            let (launch, mut numbers) =
                (by_warps("experts_route", tokens).read(&into_contiguous(scores)), numbers.into_iter());
            let launch = given.into_iter().fold(launch, |launch, is_given| {
                optional(launch, is_given.then(|| numbers.next()).flatten().map(into_contiguous))
            });
            let launch = outputs.iter().fold(launch, Launch::write);
            launch.ints([tokens, num_experts, per_token, kind]).ints(groups).float(more).float(factor).launch();
        };
        let (slopes, is_over_sum) = match probabilities {
            Probabilities::OfAll | Probabilities::OfChosen => (None, true),
            Probabilities::Sigmoids => (Some(1.0 - activation::sigmoid(scores)), false),
            Probabilities::SigmoidsOfChosen(_) => (Some(1.0 - activation::sigmoid(scores)), true),
        };
        let [probabilities, chosen, weights] = launch("experts_route", inputs, outputs, run);
        let (probabilities, weights) = (Tensor::from_dispatch(probabilities), Tensor::from_dispatch(weights));
        let outputs = [spec(DType::I32, [num_experts + 1]), ints.clone(), ints];
        let [first, of_rows, places] = custom("experts_sort", [chosen.clone()], outputs, move |[chosen], outputs| {
            let launch = Launch::new(MODULE, "experts_sort", [num_experts, 1, 1], SORTERS).read(&chosen);
            outputs.iter().fold(launch, Launch::write).ints([slots]).launch();
        });
        let [chosen, first, slots, places] = [chosen, first, of_rows, places].map(Tensor::from_dispatch);
        Sorted { per_token, probabilities, is_over_sum, slopes, chosen, weights, first, slots, places }
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

    fn add_low_rank(&self, y: Tensor<2>, x: &Tensor<2>, lora: Lora<&Tensor<2>>, sorted: &Sorted) -> Tensor<2> {
        expert_rank::add(y, x, lora, &sorted.first)
    }

    fn low_rank_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        lora: Lora<&Tensor<2>>,
        sorted: &Sorted,
        dx: Tensor<2>,
    ) -> (Tensor<2>, LowRank<Tensor<2>>) {
        expert_rank::backward(dy, x, lora, &sorted.first, dx)
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
        let is_over_sum = sorted.is_over_sum;
        let [places, chosen] = [&sorted.places, &sorted.chosen].map(|table| table.clone().into_dispatch());
        let inputs = [sorted.probabilities.clone().into_dispatch(), products.into_dispatch(), places, chosen];
        let [gradient] = custom("experts_scores", inputs, [spec(DType::F32, shape)], move |inputs, [gradient]| {
            let inputs = inputs.map(into_contiguous);
            let launch = inputs.iter().fold(by_warps("experts_scores", tokens), Launch::read);
            launch.write(gradient).ints([tokens, num_experts, per_token, is_over_sum.into()]).launch();
        });
        let gradient = Tensor::from_dispatch(gradient);
        sorted.slopes.iter().fold(gradient, |gradient, slopes| gradient * slopes.clone())
    }
}

/// A launch of products of some of the experts, for results of these layers and columns. Blocks share the rows, which are as many as the
/// experts' share of those of `x` where all have as many.
fn grouped(name: &str, x: &CubeTensor, [num_layers, width]: [usize; 2], [num, all]: [usize; 2]) -> Launch {
    let is_hopper = uses_hopper(Kernel::ExpertsHopper, x);
    let (module, columns, threads) = if is_hopper { (HOPPER, 256, 256) } else { (GROUPED, SIZE, 128) };
    let shared =
        if is_hopper { 4 * (SIZE + columns) * 64 * 2 } else { (tiles_in_flight(x) + 1) * (SIZE + columns) * 32 * 2 };
    let grid = [num_layers * width.div_ceil(columns), (dims(x)[0] * num).div_ceil(SIZE * all) + num, 1];
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
