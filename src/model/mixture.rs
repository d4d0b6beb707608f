//! A mixture of experts: tokens go to their experts, and what these make of them is summed.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::{Tensor, activation};
use rayon::prelude::*;

use super::budget::{SizedBy, SublayerSizes};
use super::gated;
use super::linears::Linears;
use crate::ops::kernels::Place;
use crate::ops::linear::InputGrad;
use crate::ops::routing::{Routing, gather, route, scatter_add};
use crate::spec::{self, SharedExpert};

/// More tokens of one expert than this often the mean are not planned for.
const MOST_OF_MEAN: usize = 4;

/// What the backward needs of the forward.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    routing: Routing,
    /// Of the experts that have tokens.
    experts: Vec<gated::Kept>,
    /// Of the shared expert, with the sigmoid that its output is multiplied by, `[tokens, 1]`.
    shared: Option<(gated::Kept, Tensor<2>)>,
}

impl spec::Mixture {
    /// Sizes of its tensors, where no expert gets more than [`MOST_OF_MEAN`] times the mean number of tokens.
    pub(super) fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (num_experts, hidden) = (self.experts.len(), by.hidden_size);
        let of_expert = self.experts.first().map_or(SublayerSizes::default(), |gated| gated.sizes(by));
        let shared = self.shared.as_ref().map(|shared| shared.gated.sizes(by)).unwrap_or_default();
        // One expert at a time, with the rows that it takes.
        let of_one = |size: usize| (size + hidden) * (MOST_OF_MEAN * self.num_per_token).min(num_experts) / num_experts;
        SublayerSizes {
            kept: self.num_per_token * (of_expert.kept + 3) + 2 * num_experts + shared.kept + 1,
            forward: 2 * hidden + of_one(of_expert.forward).max(shared.forward),
            backward: 3 * hidden + of_one(of_expert.backward).max(shared.backward),
        }
    }

    pub(super) fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>) -> Kept {
        let place = linears.context.place();
        let scores = linears.forward(self.router, x, None);
        let routing = route(&scores, self.num_per_token, self.probabilities);
        let alone = linears.alone();
        let experts = each(place, 0..routing.groups.len(), |index| {
            let (expert, rows) = &routing.groups[index];
            self.experts[*expert].activations(&gather(place, x, rows, false), &mut alone())
        });
        let shared = self.shared.as_ref().map(|SharedExpert { gated, gate }| {
            let kept = gated.activations(x, linears);
            (kept, activation::sigmoid(linears.forward(*gate, x, None)))
        });
        Kept { routing, experts, shared }
    }

    pub(super) fn output(&self, kept: &Kept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let place = linears.context.place();
        let shared = self.shared.as_ref().zip(kept.shared.as_ref());
        let shared = shared.map(|(shared, (kept, sigmoid))| shared.gated.output(kept, None, linears) * sigmoid.clone());
        let mut y = match (shared, residual) {
            (Some(y), Some(residual)) => Some(y + residual),
            (y, residual) => y.or(residual),
        };
        let (groups, alone) = (&kept.routing.groups, linears.alone());
        for some in at_once(place, groups.len()) {
            let output = |index: usize| self.experts[groups[index].0].output(&kept.experts[index], None, &mut alone());
            for (output, (_, rows)) in each(place, some.clone(), output).into_iter().zip(&groups[some]) {
                let sum = y.take().unwrap_or_else(|| zeros(kept.routing.num_tokens(), &output));
                y = Some(scatter_add(place, sum, rows, &output, true));
            }
        }
        y.unwrap_or_else(|| unreachable!("every token has an expert"))
    }

    /// The gradient of the input if `input_grad`. `x` computes the input again.
    pub(super) fn backward(
        &self,
        dy: &Tensor<2>,
        kept: Kept,
        x: impl FnOnce() -> Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> Option<Tensor<2>> {
        let (place, x, Kept { routing, experts, shared }) = (linears.context.place(), x(), kept);
        let mut dx = None;
        if let Some((SharedExpert { gated, gate }, (kept, sigmoid))) = self.shared.as_ref().zip(shared) {
            let d_output = dy.clone() * sigmoid.clone();
            let (d_gated, product) = gated.backward_with_product(&d_output, kept, || x.clone(), linears, input_grad);
            // The product is of the output times the sigmoid, whose slope is the sigmoid times this.
            let d_number = product.unsqueeze_dim::<2>(1) * (1.0 - sigmoid);
            let sum = d_gated.map_or(InputGrad::of(input_grad, None), InputGrad::AddTo);
            dx = linears.backward(*gate, &d_number, &x, sum);
        }
        if !input_grad {
            return None;
        }
        let mut products = Vec::with_capacity(experts.len());
        let (groups, alone) = (&routing.groups, linears.alone());
        let experts: Vec<_> = experts.into_iter().map(|kept| Mutex::new(Some(kept))).collect();
        for some in at_once(place, groups.len()) {
            let backward = |index: usize| {
                let (expert, rows) = &groups[index];
                // Dropped as soon as it is used.
                let kept = experts[index].lock().unwrap_or_else(PoisonError::into_inner).take()?;
                let d_output = gather(place, dy, rows, true);
                let input = || gather(place, &x, rows, false);
                Some(self.experts[*expert].backward_with_product(&d_output, kept, input, &mut alone(), true))
            };
            for (result, (_, rows)) in each(place, some.clone(), backward).into_iter().zip(&groups[some]) {
                let Some((d_input, product)) = result else { continue };
                products.push(product);
                let sum = dx.take().unwrap_or_else(|| x.zeros_like());
                dx = Some(d_input.map_or(sum.clone(), |d_input| scatter_add(place, sum, rows, &d_input, false)));
            }
        }
        let d_scores = routing.backward(products).cast(x.dtype());
        linears.backward(self.router, &d_scores, &x, InputGrad::of(true, dx))
    }
}

/// What `work` makes of each expert: at a time on the host, where the threads of one product would wait for each other more.
fn each<T: Send>(place: Place, experts: Range<usize>, work: impl Fn(usize) -> T + Send + Sync) -> Vec<T> {
    if place.is_host() { experts.into_par_iter().map(work).collect() } else { experts.map(work).collect() }
}

/// Parts of the experts, each so small that the results of all its experts may exist at a time.
fn at_once(place: Place, num_experts: usize) -> impl Iterator<Item = Range<usize>> {
    let len = if place.is_host() { rayon::current_num_threads() } else { 1 };
    (0..num_experts).step_by(len).map(move |first| first..(first + len).min(num_experts))
}

fn zeros(num_tokens: usize, like: &Tensor<2>) -> Tensor<2> {
    Tensor::zeros([num_tokens, like.dims()[1]], (&like.device(), like.dtype()))
}
