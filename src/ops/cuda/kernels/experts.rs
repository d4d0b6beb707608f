//! The experts of a mixture together: rows by the kernels of `experts.cu`, and a product of cuBLASLt for each group of them.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::decode::Decoding;
use super::matrix::{dims, rows, rows_of, scratch, side_by_side, stacked, stride};
use super::products::{Way, multiply};
use super::stream::{Launch, Module};
use super::{Cuda, bias, check, decode, has_products, one};
use crate::ops::custom::{self, Output, custom, queue, spec};
use crate::ops::experts::{Experts, Sorted};
use crate::ops::linear::{Matrix, Weight};

pub(super) static MODULE: Module = Module { name: "experts", ptx: include_str!("experts.ptx") };

const THREADS: usize = 128;
/// Rows, or tokens, of a block that has a warp for each.
const ROWS: usize = 8;

fn kernel(name: &str, [rows, width]: [usize; 2]) -> Launch {
    Launch::new(&MODULE, name, [rows, width.div_ceil(8 * THREADS), 1], THREADS)
}

/// A frozen matrix as products take it: as it lies in memory, or decoded for them.
struct Factor {
    decoding: Option<Decoding>,
    num_inputs: usize,
}

impl Factor {
    /// With its tensors.
    fn new(weight: &Weight) -> (Self, Vec<DispatchTensor>) {
        let (decoding, inputs) = match &weight.values {
            Matrix::Quantised(matrix) => {
                let (decoding, inputs) = Decoding::new(matrix);
                (Some(decoding), inputs)
            }
            values => (None, vec![values.dense_in(DType::BF16).into_owned().into_dispatch()]),
        };
        (Self { decoding, num_inputs: inputs.len() }, inputs)
    }

    /// The matrix of its tensors, which come next.
    fn matrix(&self, inputs: &mut std::vec::IntoIter<CubeTensor>, like: &CubeTensor) -> CubeTensor {
        let inputs: Vec<_> = inputs.by_ref().take(self.num_inputs).collect();
        match self.decoding {
            // Freed after the products that read it: memory for one is in use at a time.
            Some(decoding) => {
                let out = scratch(like, decoding.shape, DType::BF16);
                decoding.launch(inputs, &out);
                out
            }
            None => rows(one(inputs)),
        }
    }
}

/// The one matrix of factors that lie one below the other, whose tensors come next; they are not taken where they do not.
fn in_memory(factors: &[Factor], inputs: &mut std::vec::IntoIter<CubeTensor>) -> Option<CubeTensor> {
    if factors.iter().any(|factor| factor.decoding.is_some()) {
        return None;
    }
    let weight = stacked(inputs.as_slice().get(..factors.len())?)?;
    inputs.nth(factors.len().checked_sub(1)?);
    Some(rows(weight))
}

/// The factors of all groups, group after group, with their tensors.
fn factors(weights: &[Vec<&Weight>]) -> (Vec<Vec<Factor>>, Vec<DispatchTensor>) {
    let mut tensors = Vec::new();
    let mut factor = |weight: &&Weight| {
        let (factor, inputs) = Factor::new(weight);
        tensors.extend(inputs);
        factor
    };
    let factors = weights.iter().map(|weights| weights.iter().map(&mut factor).collect()).collect();
    (factors, tensors)
}

fn biases(weights: &[Vec<&Weight>]) -> Vec<DispatchTensor> {
    weights.iter().flatten().filter_map(|weight| Some(weight.bias.clone()?.into_dispatch())).collect()
}

impl Experts for Cuda {
    fn takes(&self, dtype: DType, weight: &Weight) -> bool {
        let is_decoded = match &weight.values {
            Matrix::Quantised(matrix) => check::is_on("decode") && decode::takes(matrix),
            _ => true,
        };
        is_decoded && check::is_on("experts") && has_products(dtype, weight)
    }

    fn gather(&self, x: &Tensor<2>, sorted: &Sorted, weighted: bool) -> Tensor<2> {
        let per_token = sorted.per_token;
        let output = Output::New(spec(DType::BF16, [sorted.num_rows, x.dims()[1]]));
        let inputs = [x.clone().into_dispatch(), sorted.slots.clone().into_dispatch()];
        let inputs = inputs.into_iter().chain(weights_of(sorted, weighted));
        let run = move |inputs: Vec<CubeTensor>, y: &[CubeTensor]| {
            let mut inputs = inputs.into_iter();
            let (Some(x), Some(slots)) = (inputs.next().map(rows), inputs.next()) else {
                unreachable!("there are two")
            };
            let launch = optional(kernel("experts_gather", dims(&y[0])).read(&x).read(&slots), inputs.next());
            launch.write(&y[0]).ints([stride(&x), stride(&y[0]), dims(&y[0])[1], per_token]).launch();
        };
        Tensor::from_dispatch(one(queue("experts_gather", inputs.collect(), vec![output], run)))
    }

    fn combine(&self, sum: Tensor<2>, y: &Tensor<2>, sorted: &Sorted, weighted: bool) -> Tensor<2> {
        let per_token = sorted.per_token;
        let inputs = [y.clone().into_dispatch(), sorted.places.clone().into_dispatch()];
        let inputs = [sum.into_dispatch()].into_iter().chain(inputs).chain(weights_of(sorted, weighted));
        let run = move |inputs: Vec<CubeTensor>, sum: &[CubeTensor]| {
            let mut inputs = inputs.into_iter();
            let (Some(y), Some(places)) = (inputs.next().map(rows), inputs.next()) else {
                unreachable!("there are two")
            };
            let launch = optional(kernel("experts_combine", dims(&sum[0])).read(&y).read(&places), inputs.next());
            launch.change(&sum[0]).ints([stride(&y), stride(&sum[0]), dims(&sum[0])[1], per_token]).launch();
        };
        Tensor::from_dispatch(one(queue("experts_combine", inputs.collect(), vec![Output::Changed(0)], run)))
    }

    fn forward(&self, x: &Tensor<2>, weights: &[Vec<&Weight>], sorted: &Sorted) -> Vec<Tensor<2>> {
        let widths = weights.first().into_iter().flatten().map(|weight| weight.dims()[0]);
        let outputs = custom::side_by_side(sorted.num_rows, widths);
        let (factors, tensors) = factors(weights);
        let groups: Vec<_> = sorted.groups.iter().map(|(_, rows)| rows.clone()).collect();
        let inputs = [x.clone().into_dispatch()].into_iter().chain(tensors).chain(biases(weights));
        let run = move |inputs: Vec<CubeTensor>, ys: &[CubeTensor]| {
            let mut inputs = inputs.into_iter();
            let Some(x) = inputs.next().map(rows) else { unreachable!("there is an input") };
            for (group, factors) in groups.iter().zip(&factors) {
                let x = rows_of(&x, group.clone());
                let ys: Vec<_> = ys.iter().map(|y| rows_of(y, group.clone())).collect();
                if let Some(y) = side_by_side(&ys)
                    && let Some(weight) = in_memory(factors, &mut inputs)
                {
                    multiply(Way::Forward, &x, &weight, None, &y);
                    continue;
                }
                for (factor, y) in factors.iter().zip(&ys) {
                    multiply(Way::Forward, &x, &factor.matrix(&mut inputs, &x), None, y);
                }
            }
            let biases: Vec<_> = inputs.map(into_contiguous).collect();
            for (group, biases) in groups.iter().zip(biases.chunks(ys.len())) {
                for (y, of_layer) in ys.iter().zip(biases) {
                    bias::launch(&rows_of(y, group.clone()), std::slice::from_ref(of_layer));
                }
            }
        };
        queue("experts", inputs.collect(), outputs, run).into_iter().map(Tensor::from_dispatch).collect()
    }

    fn backward(&self, dys: &[Tensor<2>], weights: &[Vec<&Weight>], sorted: &Sorted) -> Tensor<2> {
        let width = weights.first().and_then(|weights| weights.first()).map_or(0, |weight| weight.dims()[1]);
        let (num_layers, (factors, tensors)) = (dys.len(), factors(weights));
        let groups: Vec<_> = sorted.groups.iter().map(|(_, rows)| rows.clone()).collect();
        let inputs = dys.iter().map(|dy| dy.clone().into_dispatch()).chain(tensors);
        let run = move |inputs: Vec<CubeTensor>, dx: &[CubeTensor]| {
            let mut inputs = inputs.into_iter();
            let dys: Vec<_> = inputs.by_ref().take(num_layers).map(rows).collect();
            for (group, factors) in groups.iter().zip(&factors) {
                let (dx, mut sum) = (rows_of(&dx[0], group.clone()), None);
                let dys: Vec<_> = dys.iter().map(|dy| rows_of(dy, group.clone())).collect();
                if let Some(dy) = side_by_side(&dys)
                    && let Some(weight) = in_memory(factors, &mut inputs)
                {
                    multiply(Way::Backward, &dy, &weight, None, &dx);
                    continue;
                }
                for (factor, dy) in factors.iter().zip(&dys) {
                    multiply(Way::Backward, dy, &factor.matrix(&mut inputs, dy), sum, &dx);
                    sum = Some(&dx);
                }
            }
        };
        let output = Output::New(spec(DType::BF16, [sorted.num_rows, width]));
        Tensor::from_dispatch(one(queue("experts_backward", inputs.collect(), vec![output], run)))
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
        let [of_rows] = custom("experts_products", inputs, [spec(DType::F32, [sorted.num_rows])], |inputs, [out]| {
            let [h, dh] = inputs.map(rows);
            products(Launch::write, [&h, &dh], stride(&dh), out, 0);
        });
        let biases = weights.iter().flatten().filter_map(|weight| weight.bias.clone());
        let biases: Vec<_> = biases.map(|bias| bias.cast(DType::BF16).into_dispatch()).collect();
        if biases.is_empty() {
            return Tensor::from_dispatch(of_rows);
        }
        let groups: Vec<_> = sorted.groups.iter().map(|(_, rows)| rows.clone()).collect();
        let inputs = [of_rows, dy.clone().into_dispatch()].into_iter().chain(biases);
        let run = move |inputs: Vec<CubeTensor>, out: &[CubeTensor]| {
            let mut inputs = inputs.into_iter();
            let Some(dy) = inputs.next().map(rows) else { unreachable!("there is a gradient") };
            for (group, bias) in groups.iter().zip(inputs.map(into_contiguous)) {
                products(Launch::change, [&rows_of(&dy, group.clone()), &bias], 0, &out[0], group.start);
            }
        };
        Tensor::from_dispatch(one(queue("experts_products", inputs.collect(), vec![Output::Changed(0)], run)))
    }

    fn scores_backward(&self, probabilities: &Tensor<2>, products: Tensor<1>, sorted: &Sorted) -> Tensor<2> {
        let (shape @ [tokens, num_experts], per_token) = (probabilities.dims(), sorted.per_token);
        let [places, chosen] = [&sorted.places, &sorted.chosen].map(|table| table.clone().into_dispatch());
        let inputs = [probabilities.clone().into_dispatch(), products.into_dispatch(), places, chosen];
        let [gradient] = custom("experts_scores", inputs, [spec(DType::F32, shape)], move |inputs, [gradient]| {
            let inputs = inputs.map(into_contiguous);
            let grid = [tokens.div_ceil(ROWS), 1, 1];
            let launch = inputs.iter().fold(Launch::new(&MODULE, "experts_scores", grid, 32 * ROWS), Launch::read);
            launch.write(gradient).ints([tokens, num_experts, per_token]).launch();
        });
        Tensor::from_dispatch(gradient)
    }
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

/// Scalar products of the rows of two matrices, in `out` from number `first` on: written, or added to what is there.
fn products(
    way: fn(Launch, &CubeTensor) -> Launch,
    [a, b]: [&CubeTensor; 2],
    b_stride: usize,
    out: &CubeTensor,
    first: usize,
) {
    let ([rows, width], adds) = (dims(a), usize::from(b_stride == 0));
    let grid = [rows.div_ceil(ROWS), 1, 1];
    let launch = way(Launch::new(&MODULE, "experts_products", grid, 32 * ROWS).read(a).read(b), out);
    launch.ints([stride(a), b_stride, rows, width, first, adds]).launch();
}
