//! A mixture of experts: tokens go to their experts, and what these make of them is summed.

mod adapted;
mod together;

use std::sync::Arc;

use burn::tensor::{DType, Tensor, activation};
use rayon::prelude::*;

use super::gated::GatedKept;
use super::{Backward, Compute, LayerWeights, Linears, LoadedSublayer, Mixing, SizedBy, SublayerShape, SublayerSizes};
use crate::ops::experts::{self, Experts, Sorted};
use crate::ops::kernels::Place;
use crate::ops::linear::InputGrad;
use crate::ops::routing::{Router, Routing, gather, route, scatter_add};
use crate::spec::{self, SharedExpert};

/// More tokens of one expert than this often the mean are not planned for.
const MOST_OF_MEAN: usize = 4;

/// What the backward needs of the forward.
#[derive(Debug)]
pub(super) struct MixtureKept {
    experts: KeptExperts,
    /// The input of the experts and the sum of their outputs, where there are projections around them.
    latent: Option<[Tensor<2>; 2]>,
    /// Of the shared expert, with the sigmoid that its output is multiplied by, `[tokens, 1]`, if it is.
    shared: Option<(GatedKept, Option<Tensor<2>>)>,
}

/// A mixture whose router adds numbers to the probabilities of the experts when it chooses.
#[derive(Debug)]
struct Biased {
    spec: spec::Mixture,
    /// In `f32`.
    bias: Tensor<1>,
}

#[derive(Debug)]
enum KeptExperts {
    /// Of each that has tokens.
    Apart(Box<Routing>, Vec<GatedKept>),
    Together(Box<Sorted>, Box<GatedKept>),
}

impl SublayerShape for spec::Mixture {
    fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer {
        let Some(name) = self.choice.bias else { return Ok(Arc::new(self.clone())) };
        let bias = weights.router_bias(name, self.experts.len())?.cast(DType::F32);
        Ok(Arc::new(Biased { spec: self.clone(), bias }))
    }

    /// Where no expert gets more than [`MOST_OF_MEAN`] times the mean number of tokens.
    fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (num_experts, hidden) = (self.experts.len(), by.hidden_size);
        let of_expert = self.experts.first().map_or(SublayerSizes::default(), |gated| gated.sizes(by));
        let shared = self.shared.as_ref().map(|shared| shared.gated.sizes(by)).unwrap_or_default();
        // At most, what is between the projections around experts.
        let around = self.latent.map_or(0, |_| 2 * hidden);
        if by.place.has_experts(by.dtype) {
            let (rows, inside) = (self.num_per_token, self.experts.first().map_or(0, |gated| gated.intermediate_size));
            // Probabilities and slopes of sigmoids, and four numbers of each slot, in 32 bits.
            return SublayerSizes {
                kept: rows * (of_expert.kept + 8) + 4 * num_experts + shared.kept + 1 + around,
                forward: 2 * hidden + (rows * (inside + hidden)).max(shared.forward),
                backward: 3 * hidden + (rows * (3 * inside + hidden).max(2 * (inside + hidden))).max(shared.backward),
            };
        }
        // One expert at a time, with the rows that it takes.
        let of_one = |size: usize| (size + hidden) * (MOST_OF_MEAN * self.num_per_token).min(num_experts) / num_experts;
        SublayerSizes {
            kept: self.num_per_token * (of_expert.kept + 3) + 2 * num_experts + shared.kept + 1 + around,
            forward: 2 * hidden + of_one(of_expert.forward).max(shared.forward),
            backward: 3 * hidden + of_one(of_expert.backward).max(shared.backward),
        }
    }
}

impl Compute for spec::Mixture {
    type Kept = MixtureKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, _: Mixing<'_>) -> MixtureKept {
        self.activations_with(x, x, self.router_with(None, None), linears)
    }

    fn output(&self, kept: &MixtureKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let shared = self.shared.as_ref().zip(kept.shared.as_ref());
        let shared = shared.map(|(shared, (kept, sigmoid))| {
            let output = shared.gated.output(kept, None, linears);
            sigmoid.iter().fold(output, |output, sigmoid| output * sigmoid.clone())
        });
        let y = match (shared, residual) {
            (Some(y), Some(residual)) => Some(y + residual),
            (y, residual) => y.or(residual),
        };
        match self.latent.zip(kept.latent.as_ref()) {
            Some(([_, outwards], [_, sum])) => linears.forward(outwards, sum, y),
            None => self.sum_of_experts(&kept.experts, y, linears),
        }
    }

    fn backward(&self, kept: MixtureKept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        let Backward { dy, x, input_grad } = given;
        let x = x();
        let (dx, d_scores) = self.backward_to_scores(dy, kept, &x, linears, input_grad)?;
        linears.backward(self.router, &d_scores, &x, InputGrad::of(input_grad, dx))
    }
}

impl Compute for Biased {
    type Kept = MixtureKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, _: Mixing<'_>) -> MixtureKept {
        self.spec.activations_with(x, x, self.spec.router_with(Some(&self.bias), None), linears)
    }

    fn output(&self, kept: &MixtureKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        self.spec.output(kept, residual, linears)
    }

    fn backward(&self, kept: MixtureKept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        self.spec.backward(kept, given, linears)
    }
}

impl spec::Mixture {
    /// Its router, with numbers of the experts, `[experts]`, that it has beside its matrix.
    pub(super) fn router_with<'a>(&self, bias: Option<&'a Tensor<1>>, scales: Option<&'a Tensor<1>>) -> Router<'a> {
        let spec::Mixture { num_per_token, probabilities, choice, .. } = *self;
        Router { num_per_token, probabilities, choice, bias, scales }
    }

    /// The weighted sum of the outputs of experts, added to `y` if there is one.
    fn sum_of_experts(&self, experts: &KeptExperts, mut y: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let place = linears.context.place();
        let (routing, experts) = match experts {
            KeptExperts::Together(sorted, kept) => {
                let together = of_place(place);
                let output = self.output_together(together, kept, sorted, linears);
                let sum = y.unwrap_or_else(|| zeros(sorted.num_tokens(), &output));
                return together.combine(sum, &output, sorted, !self.weighs_inputs);
            }
            KeptExperts::Apart(routing, experts) => (routing, experts),
        };
        let (adapters, with) = (self.adapters_of(&routing.groups, linears), linears.with());
        some_at_a_time(
            place,
            routing.groups.iter().zip(experts).zip(&adapters),
            |(((expert, rows), kept), own)| (rows, self.experts[*expert].output(kept, None, &mut with(own))),
            |(rows, output)| {
                let sum = y.take().unwrap_or_else(|| zeros(routing.num_tokens(), &output));
                y = Some(scatter_add(place, sum, rows, &output, !self.weighs_inputs));
            },
        );
        y.unwrap_or_else(|| unreachable!("every token has an expert"))
    }

    /// [`activations`](Compute::activations) with another input `router_x` of the router.
    pub(super) fn activations_with(
        &self,
        x: &Tensor<2>,
        router_x: &Tensor<2>,
        router: Router<'_>,
        linears: &mut Linears<'_>,
    ) -> MixtureKept {
        let place = linears.context.place();
        let scores = linears.forward(self.router, router_x, None);
        let narrow = self.latent.map(|[inwards, _]| linears.forward(inwards, x, None));
        let given = narrow.as_ref().unwrap_or(x);
        let experts = if let Some(together) = self.together(given, linears) {
            let sorted = experts::route(together, &scores, router);
            let kept = self.activations_together(together, given, &sorted, linears);
            KeptExperts::Together(Box::new(sorted), Box::new(kept))
        } else {
            let routing = route(&scores, router);
            let (adapters, with) = (self.adapters_of(&routing.groups, linears), linears.with());
            let mut experts = Vec::with_capacity(routing.groups.len());
            some_at_a_time(
                place,
                routing.groups.iter().zip(&adapters),
                |((expert, rows), own)| {
                    let given = gather(place, given, rows, self.weighs_inputs);
                    self.experts[*expert].inside(&given, &mut with(own))
                },
                |kept| experts.push(kept),
            );
            KeptExperts::Apart(Box::new(routing), experts)
        };
        let shared = self.shared.as_ref().map(|SharedExpert { gated, gate }| {
            let kept = gated.inside(x, linears);
            (kept, gate.map(|gate| activation::sigmoid(linears.forward(gate, x, None))))
        });
        let latent = narrow.map(|given| [given, self.sum_of_experts(&experts, None, linears)]);
        MixtureKept { experts, latent, shared }
    }

    /// The gradient of the input without what goes through the router, and that of the router's scores, if `input_grad` or the router
    /// has an adapter.
    pub(super) fn backward_to_scores(
        &self,
        dy: &Tensor<2>,
        kept: MixtureKept,
        x: &Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> Option<(Option<Tensor<2>>, Tensor<2>)> {
        let MixtureKept { experts, latent, shared } = kept;
        let input_grad = input_grad || linears.is_adapted(self.router);
        let mut dx = None;
        if let Some((SharedExpert { gated, gate }, (kept, sigmoid))) = self.shared.as_ref().zip(shared) {
            if let Some((gate, sigmoid)) = gate.zip(sigmoid) {
                let d_output = dy.clone() * sigmoid.clone();
                let given = Backward { dy: &d_output, x: &|| x.clone(), input_grad };
                let (d_gated, product) = gated.backward_with_product(kept, given, linears);
                // The product is of the output times the sigmoid, whose slope is the sigmoid times this.
                let d_number = product.unsqueeze_dim::<2>(1) * (1.0 - sigmoid);
                let sum = d_gated.map_or(InputGrad::of(input_grad, None), InputGrad::AddTo);
                dx = linears.backward(gate, &d_number, x, sum);
            } else {
                dx = gated.backward(kept, Backward { dy, x: &|| x.clone(), input_grad }, linears);
            }
        }
        if !input_grad && linears.of_experts().is_empty() && self.latent.is_none() {
            return None;
        }
        let Some(([inwards, outwards], [given, sum])) = self.latent.zip(latent) else {
            return self.experts_backward((dy, x), experts, dx, linears, input_grad);
        };
        let d_sum = linears.backward(outwards, dy, &sum, InputGrad::Fresh);
        let d_sum = d_sum.unwrap_or_else(|| sum.zeros_like());
        drop(sum);
        let (d_given, d_scores) = self.experts_backward((&d_sum, &given), experts, None, linears, true)?;
        let d_given = d_given.unwrap_or_else(|| given.zeros_like());
        let dx = linears.backward(inwards, &d_given, x, InputGrad::of(input_grad, dx));
        input_grad.then_some((dx, d_scores))
    }

    /// The same of experts alone, from the gradient of the sum of their outputs; the gradient of their input is added to `dx`.
    fn experts_backward(
        &self,
        (dy, x): (&Tensor<2>, &Tensor<2>),
        experts: KeptExperts,
        mut dx: Option<Tensor<2>>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> Option<(Option<Tensor<2>>, Tensor<2>)> {
        let place = linears.context.place();
        let (routing, experts) = match experts {
            KeptExperts::Together(sorted, kept) => {
                let together = of_place(place);
                let d_output = together.gather(dy, &sorted, !self.weighs_inputs);
                let (d_input, product) =
                    self.backward_together(together, [d_output, x.clone()], *kept, &sorted, linears);
                let product = if self.weighs_inputs {
                    row_products(&d_input, together.gather(x, &sorted, true))
                } else {
                    product
                };
                let sum = dx.unwrap_or_else(|| x.zeros_like());
                let d_scores = together.scores_backward(product, &sorted).cast(x.dtype());
                let dx = || together.combine(sum, &d_input, &sorted, self.weighs_inputs);
                return input_grad.then(|| (Some(dx()), d_scores));
            }
            KeptExperts::Apart(routing, experts) => (routing, experts),
        };
        let mut products = Vec::with_capacity(experts.len());
        let (adapters, with) = (self.adapters_of(&routing.groups, linears), linears.with());
        let mut grads = Vec::with_capacity(routing.groups.len());
        some_at_a_time(
            place,
            routing.groups.iter().zip(experts).zip(&adapters),
            |(((expert, rows), kept), own)| {
                let d_output = gather(place, dy, rows, !self.weighs_inputs);
                let x = || gather(place, x, rows, self.weighs_inputs);
                let given = Backward { dy: &d_output, x: &x, input_grad };
                let mut linears = with(own);
                let (d_input, product) = self.experts[*expert].backward_with_product(kept, given, &mut linears);
                let product = match &d_input {
                    Some(d_input) if self.weighs_inputs => row_products(d_input, x()),
                    _ => product,
                };
                (rows, (d_input, product), (*expert, linears.grads.adapters))
            },
            |(rows, (d_input, product), of_expert)| {
                products.push(product);
                grads.push(of_expert);
                if let Some(d_input) = d_input {
                    let sum = dx.take().unwrap_or_else(|| x.zeros_like());
                    dx = Some(scatter_add(place, sum, rows, &d_input, self.weighs_inputs));
                }
            },
        );
        self.join_grads(grads, linears);
        input_grad.then(|| (dx, routing.backward(products).cast(x.dtype())))
    }
}

/// Does `work` for every expert and `then` takes the results in their order. On the host as many are done at a time as there are
/// threads: those of one product would wait for each other more. The results of the others do not exist yet.
fn some_at_a_time<I: Send, T: Send>(
    place: Place,
    experts: impl IntoIterator<Item = I>,
    work: impl Fn(I) -> T + Send + Sync,
    mut then: impl FnMut(T),
) {
    let mut experts = experts.into_iter();
    if !place.is_host() {
        return experts.map(work).for_each(then);
    }
    loop {
        let some: Vec<I> = experts.by_ref().take(rayon::current_num_threads()).collect();
        if some.is_empty() {
            return;
        }
        some.into_par_iter().map(&work).collect::<Vec<T>>().into_iter().for_each(&mut then);
    }
}

/// The scalar product of every row and its gradient: what a weight of the row and its gradient multiply to.
fn row_products(d_rows: &Tensor<2>, rows: Tensor<2>) -> Tensor<1> {
    (rows.cast(DType::F32) * d_rows.clone().cast(DType::F32)).sum_dim(1).squeeze_dim(1)
}

fn of_place(place: Place) -> &'static dyn Experts {
    place.experts().unwrap_or_else(|| unreachable!("it has computed them"))
}

fn zeros(num_tokens: usize, like: &Tensor<2>) -> Tensor<2> {
    Tensor::zeros([num_tokens, like.dims()[1]], (&like.device(), like.dtype()))
}
