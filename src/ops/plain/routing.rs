//! Which tokens go to which experts, and what carries them there and back in plain tensor calls.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData, activation};
use rayon::prelude::*;

use crate::ops::layout::indices;
use crate::spec::{Choice, ExpertGroups, Probabilities};
use crate::util::faults;

/// Where the tokens of a micro-batch go.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The experts that have tokens, each with these.
    pub groups: Vec<(usize, ExpertRows)>,
    /// Number of tokens and of experts.
    shape: [usize; 2],
    /// What the sum of a token's products is multiplied by in the gradient of its scores, `[tokens, experts]` in `f32`.
    shares: Option<Tensor<2>>,
    /// What that gradient is multiplied by, likewise: the slope of a sigmoid, over the sigmoid.
    slopes: Option<Tensor<2>>,
    /// Where those of the groups' tokens are in them, group after group.
    places: Tensor<1, Int>,
}

/// The tokens of one expert.
#[derive(Clone, Debug)]
pub struct ExpertRows {
    /// Tokens of all experts, expert after expert.
    all: Arc<[i32]>,
    /// Those of this one, in their order.
    range: Range<usize>,
    /// Likewise on the device, `[tokens of this one]`.
    on_device: Tensor<1, Int>,
    /// Weights of the outputs, `[tokens of this one]` in `f32`.
    pub weights: Tensor<1>,
}

impl ExpertRows {
    /// The tokens.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = usize> {
        self.all[self.range.clone()].iter().map(|&token| usize::try_from(token).unwrap_or_default())
    }
}

/// How a token's experts are chosen and weighted.
#[derive(Clone, Copy, Debug)]
pub struct Router<'a> {
    /// Experts of a token.
    pub num_per_token: usize,
    /// What the scores become.
    pub probabilities: Probabilities,
    /// What chooses and weights beside them.
    pub choice: Choice,
    /// What the choice adds to the probabilities, `[experts]`.
    pub bias: Option<&'a Tensor<1>>,
    /// What the outputs of experts are multiplied by, `[experts]`.
    pub scales: Option<&'a Tensor<1>>,
}

/// [`route`](crate::ops::routing::route), not measured.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "far below 2^31")]
pub(crate) fn route_now(
    scores: &Tensor<2>,
    Router { num_per_token, probabilities, choice, bias, scales }: Router<'_>,
) -> Routing {
    let ([num_tokens, num_experts], device) = (scores.dims(), scores.device());
    let scores = scores.clone().cast(DType::F32);
    let mut values = faults::read(scores.clone(), "the scores of experts");
    let bias = bias.map(|bias| faults::read(bias.clone(), "the bias of a router")).unwrap_or_default();
    let chosen: Vec<usize> = values
        .par_chunks_exact_mut(num_experts)
        .flat_map_iter(|row| {
            weigh(row, probabilities, choice.groups, &bias);
            choose(row, num_per_token)
        })
        .collect();
    let mask = || Tensor::<2>::from_data(TensorData::new(values, [num_tokens, num_experts]), (&device, DType::F32));
    let (weights, shares, slopes) = weights_of(scores, probabilities, mask);
    let weights = match scales {
        None => weights,
        Some(scales) => weights * scales.clone().unsqueeze(),
    };
    let weights = if choice.factor == 1.0 { weights } else { weights * choice.factor };
    let weights = weights.reshape([num_tokens * num_experts]);
    let mut tokens_of = vec![Vec::new(); num_experts];
    chosen.iter().enumerate().for_each(|(slot, expert)| tokens_of[*expert].push((slot / num_per_token) as i32));
    let all: Arc<[i32]> = tokens_of.iter().flatten().copied().collect();
    let experts = tokens_of.iter().enumerate().flat_map(|(expert, tokens)| tokens.iter().map(move |_| expert));
    let places = experts.zip(all.iter()).map(|(expert, &token)| token * num_experts as i32 + expert as i32);
    let (places, on_device) = (indices(places, &device), indices(all.iter().copied(), &device));
    let weights = weights.select(0, places.clone());
    let (mut groups, mut first) = (Vec::new(), 0);
    for (expert, tokens) in tokens_of.iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()) {
        let len = tokens.len();
        let rows = ExpertRows {
            all: Arc::clone(&all),
            range: first..first + len,
            on_device: on_device.clone().narrow(0, first, len),
            weights: weights.clone().narrow(0, first, len),
        };
        groups.push((expert, rows));
        first += len;
    }
    Routing { groups, shape: [num_tokens, num_experts], shares, slopes, places }
}

/// Weights of all experts, and the `shares` and `slopes` of a [`Routing`]. `mask`: 0 for those that are chosen, else -infinity.
fn weights_of(
    scores: Tensor<2>,
    probabilities: Probabilities,
    mask: impl FnOnce() -> Tensor<2>,
) -> (Tensor<2>, Option<Tensor<2>>, Option<Tensor<2>>) {
    match probabilities {
        Probabilities::OfAll => {
            let softmax = activation::softmax(scores, 1);
            (softmax.clone(), Some(softmax), None)
        }
        Probabilities::OfChosen => {
            let softmax = activation::softmax(scores + mask(), 1);
            (softmax.clone(), Some(softmax), None)
        }
        Probabilities::Sigmoids => {
            let sigmoids = activation::sigmoid(scores);
            (sigmoids.clone(), None, Some(1.0 - sigmoids))
        }
        Probabilities::SigmoidsOfChosen(more) => {
            let sigmoids = activation::sigmoid(scores);
            let of_chosen = sigmoids.clone() * mask().exp();
            let sums = of_chosen.clone().sum_dim(1) + more;
            let shares = of_chosen / sums;
            (shares.clone(), Some(shares), Some(1.0 - sigmoids))
        }
    }
}

/// Makes the scores of a token what its experts are chosen by, where that is in another order.
fn weigh(scores: &mut [f32], probabilities: Probabilities, groups: Option<ExpertGroups>, bias: &[f32]) {
    if groups.is_none() && bias.is_empty() {
        return;
    }
    match probabilities {
        Probabilities::Sigmoids | Probabilities::SigmoidsOfChosen(_) => {
            scores.iter_mut().for_each(|score| *score = 1.0 / (1.0 + (-*score).exp()));
        }
        Probabilities::OfAll | Probabilities::OfChosen => {
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= sum);
        }
    }
    scores.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
    if let Some(ExpertGroups { count, num_kept, num_best }) = groups {
        let of_group = scores.len() / count;
        let sum_of_best = |group: &[f32]| {
            let mut sorted = group.to_vec();
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            sorted.iter().take(num_best).sum::<f32>()
        };
        let sums: Vec<f32> = scores.chunks_exact(of_group).map(sum_of_best).collect();
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]));
        for group in &order[num_kept..] {
            scores[group * of_group..][..of_group].fill(f32::NEG_INFINITY);
        }
    }
}

/// The experts with the highest scores of a token; of equal ones, the first. Their scores become 0, those of the others -infinity.
fn choose(scores: &mut [f32], num: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let before = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
    if num < order.len() {
        order.select_nth_unstable_by(num, before);
        order.truncate(num);
    }
    order.sort_unstable_by(before);
    scores.fill(f32::NEG_INFINITY);
    order.iter().for_each(|expert| scores[*expert] = 0.0);
    order
}

impl Routing {
    /// Number of tokens of the micro-batch.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.shape[0]
    }

    /// The gradient of the scores from the products of every weight and its gradient, group after group.
    ///
    /// # Shapes
    /// Each of `products`: `[tokens of the group]`. Returns `[tokens, experts]` in `f32`.
    #[must_use]
    pub fn backward(&self, products: Vec<Tensor<1>>) -> Tensor<2> {
        let shape @ [num_tokens, num_experts] = self.shape;
        let device = self.places.device();
        let zeros = |len| Tensor::<1>::zeros([len], (&device, DType::F32));
        // No `cat`: fusion makes one kernel of it, with as many inputs, and compiles another wherever tokens go elsewhere.
        let joined = |(all, first): (Tensor<1>, usize), product: Tensor<1>| {
            let end = first + product.dims()[0];
            (all.slice_assign(first..end, product.cast(DType::F32)), end)
        };
        let products = products.into_iter().fold((zeros(self.places.dims()[0]), 0), joined).0;
        let zeros = zeros(num_tokens * num_experts);
        let all = zeros.select_assign(0, self.places.clone(), products, IndexingUpdateOp::Add).reshape(shape);
        let of_sum = match &self.shares {
            None => all,
            Some(shares) => {
                let sums = all.clone().sum_dim(1);
                all - shares.clone() * sums
            }
        };
        self.slopes.iter().fold(of_sum, |gradient, slopes| gradient * slopes.clone())
    }
}

pub(crate) fn plain_gather(x: &Tensor<2>, rows: &ExpertRows, weighted: bool) -> Tensor<2> {
    scaled(x.clone().select(0, rows.on_device.clone()), rows, weighted)
}

pub(crate) fn plain_scatter_add(y: Tensor<2>, rows: &ExpertRows, update: &Tensor<2>, weighted: bool) -> Tensor<2> {
    let update = scaled(update.clone(), rows, weighted);
    y.select_assign(0, rows.on_device.clone(), update, IndexingUpdateOp::Add)
}

fn scaled(x: Tensor<2>, rows: &ExpertRows, weighted: bool) -> Tensor<2> {
    let dtype = x.dtype();
    if weighted { x * rows.weights.clone().cast(dtype).unsqueeze_dim::<2>(1) } else { x }
}
