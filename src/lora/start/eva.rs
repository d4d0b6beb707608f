//! A start from the rows: the directions in which the inputs of layers vary most (EVA; Paischer et al., 2024).
//!
//! Source: `get_eva_state_dict` and `IncrementalPCA` of PEFT 0.21.

use std::borrow::Cow;
use std::collections::BTreeMap;

use rayon::prelude::*;

use super::decomposition::Singular;
use super::rows::{StartRows, as_f32, dot};
use crate::lora::AdapterSet;
use crate::lora::targets::{AdapterShape, Selection};
use crate::ops::dropout::mix;
use crate::ops::host;
use crate::spec::{PerSite, SiteId};
use crate::util::stats::{as_f64, as_u64};

/// Cosine of a direction before and after a micro-batch with which it counts as found.
const STABLE: f64 = 0.99;
/// Of the estimate of twice as many directions as are asked for.
const NUM_ITERATIONS: usize = 4;

/// The directions in which the inputs of adapted layers vary, found micro-batch by micro-batch.
#[derive(Debug)]
pub struct Directions {
    /// By block: its adapted layers with the largest ranks that they may get, until the first micro-batch shows which of them
    /// read one input.
    unseen: Vec<PerSite<usize>>,
    inputs: Vec<Input>,
    /// Sum of the ranks.
    budget: usize,
}

/// An input of a block.
#[derive(Debug)]
struct Input {
    layer: usize,
    /// The layers that read it, with the ranks that they would have now.
    ranks: PerSite<usize>,
    /// Number of directions that are followed.
    most: usize,
    seen: Option<Seen>,
}

/// What was seen of an input.
#[derive(Debug)]
struct Seen {
    num_tokens: f64,
    mean: Vec<f64>,
    /// Sum of the squared distances from the mean.
    variation: f64,
    /// Singular values and directions of these distances, the largest first.
    directions: Singular,
    /// Of each direction, whether the last micro-batch left it where it was.
    is_stable: Vec<bool>,
}

impl Directions {
    /// Before the first micro-batch. A layer of rank r gets at most `rho` r of the ranks of all.
    #[must_use]
    pub fn new(selection: &Selection, rho: f64) -> Self {
        let most = |(site, shape): (&SiteId, &AdapterShape)| {
            (*site, usize::try_from(as_u64((as_f64(shape.r) * rho).round_ties_even())).unwrap_or(shape.r))
        };
        let unseen = selection.shapes.iter().map(|block| block.iter().map(most).collect()).collect();
        let budget = selection.iter().map(|(_, _, shape)| shape.r).sum();
        Self { unseen, inputs: Vec::new(), budget }
    }

    /// The layers of a block whose inputs the next micro-batch is to bring; of those that read one input, the first.
    #[must_use]
    pub fn wanted(&self, block: usize) -> Vec<SiteId> {
        let open = self.inputs.iter().filter(|input| input.layer == block && !input.is_found());
        let open = open.filter_map(|input| input.ranks.keys().next());
        self.unseen[block].keys().chain(open).copied().collect()
    }

    /// The last block of which inputs are wanted; none once all directions are found.
    #[must_use]
    pub fn last_wanted(&self) -> Option<usize> {
        (0..self.unseen.len()).rev().find(|block| !self.wanted(*block).is_empty())
    }

    /// Number of layers whose directions are found.
    #[must_use]
    pub fn num_found(&self) -> usize {
        self.inputs.iter().filter(|input| input.is_found()).map(|input| input.ranks.len()).sum()
    }

    /// The number of tokens that a micro-batch needs, where none has had as many yet.
    #[must_use]
    pub fn missing_tokens(&self) -> Option<usize> {
        let inputs = self.inputs.iter().filter(|input| input.seen.is_none()).map(|input| input.most);
        self.unseen.iter().flat_map(PerSite::values).copied().chain(inputs).max()
    }

    /// Takes the inputs of the layers that are [wanted](Self::wanted) of a block, for the same tokens each, `[tokens, in_features]`.
    pub fn see(&mut self, block: usize, num_tokens: usize, inputs: Vec<(SiteId, Vec<f32>)>) {
        if num_tokens == 0 {
            return;
        }
        let mut unseen = std::mem::take(&mut self.unseen[block]);
        let mut rows: Vec<(SiteId, StartRows)> = Vec::new();
        for (site, values) in inputs {
            let length = values.len() / num_tokens;
            match rows.iter().find(|(_, other)| other.values == values) {
                // It reads the input of another, which is seen for both.
                Some((first, _)) => {
                    let own = unseen.remove(&site).zip(self.inputs.iter_mut().find(|it| it.is_of(block, *first)));
                    if let Some((most, input)) = own {
                        input.add(site, most);
                    }
                }
                None => {
                    if let Some(most) = unseen.remove(&site) {
                        let ranks = PerSite::from([(site, most)]);
                        self.inputs.push(Input { layer: block, ranks, most, seen: None });
                    }
                    rows.push((site, StartRows { values, length }));
                }
            }
        }
        let mut rows: PerSite<StartRows> = rows.into_iter().collect();
        let open: Vec<_> = self
            .inputs
            .iter_mut()
            .filter(|input| input.layer == block)
            .filter_map(|input| {
                let rows = rows.remove(input.ranks.keys().next()?)?;
                Some((input, rows))
            })
            .collect();
        open.into_par_iter().for_each(|(input, rows)| input.see(rows));
    }

    /// After a micro-batch: gives the ranks to the directions that make up most of the variation of their inputs.
    pub fn share_out(&mut self) {
        if self.missing_tokens().is_some() {
            return;
        }
        let mut shares = Vec::new();
        for is_first in [true, false] {
            for (index, input) in self.inputs.iter().enumerate() {
                let sites = input.ranks.keys().enumerate().filter(|(place, _)| (*place == 0) == is_first);
                for (_, site) in sites {
                    shares.extend(input.seen.iter().flat_map(Seen::shares).map(|share| (share, index, *site)));
                }
            }
        }
        shares.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
        self.inputs.iter_mut().flat_map(|input| input.ranks.values_mut()).for_each(|rank| *rank = 0);
        for (_, index, site) in shares.into_iter().take(self.budget) {
            self.inputs[index].ranks.entry(site).and_modify(|rank| *rank += 1);
        }
    }

    /// By block and layer its A, of as many rows, `[r, in_features]`, as it has ranks; of a layer without ranks it is empty.
    #[must_use]
    pub fn found(&self) -> BTreeMap<(usize, SiteId), Vec<f32>> {
        let of = |input: &Input, site: SiteId, rank: usize| {
            let rows = input.seen.as_ref().map(|seen| seen.directions.right.clone().first(rank).values);
            ((input.layer, site), rows.unwrap_or_default())
        };
        let all = self.inputs.iter().flat_map(|input| input.ranks.iter().map(move |at| (input, at)));
        all.map(|(input, (site, rank))| of(input, *site, *rank)).collect()
    }
}

impl AdapterSet {
    /// Gives the adapters their A, `[r, in_features]` of each, one after the other.
    pub fn start_a(&mut self, values: &[f32]) {
        let mut rest = values;
        for adapter in self.blocks.iter_mut().flat_map(PerSite::values_mut) {
            let (shape, device) = (adapter.matrices.a.dims(), adapter.matrices.a.device());
            let (own, others) = rest.split_at(shape[0] * shape[1]);
            adapter.matrices.a = host::tensor(own.to_vec(), shape, &device);
            rest = others;
        }
    }
}

impl Input {
    fn is_of(&self, block: usize, site: SiteId) -> bool {
        self.layer == block && self.ranks.contains_key(&site)
    }

    /// Adds a layer that reads it too, and may have ranks up to `most`.
    fn add(&mut self, site: SiteId, most: usize) {
        self.most = self.most.max(most);
        self.ranks.insert(site, most);
        self.ranks.values_mut().for_each(|rank| *rank = self.most);
    }

    /// Whether the directions that are needed are found. The first layer has most of the ranks.
    fn is_found(&self) -> bool {
        let rank = self.ranks.values().next().copied().unwrap_or_default();
        rank == 0 || self.seen.as_ref().is_some_and(|seen| seen.is_stable[..rank].iter().all(|stable| *stable))
    }

    fn see(&mut self, rows: StartRows) {
        if rows.count() >= self.most {
            self.seen = Some(Seen::and(self.seen.take(), rows, self.most));
        }
    }
}

impl Seen {
    /// With rows that were not seen before.
    fn and(before: Option<Self>, mut rows: StartRows, most: usize) -> Self {
        let (count, length) = (as_f64(rows.count()), rows.length);
        let mut mean = vec![0.0; length];
        for row in rows.iter() {
            mean.iter_mut().zip(row).for_each(|(mean, value)| *mean += f64::from(*value) / count);
        }
        let mut variation = 0.0;
        for row in rows.values.chunks_exact_mut(length) {
            for (value, mean) in row.iter_mut().zip(&mean) {
                let distance = f64::from(*value) - mean;
                variation += distance * distance;
                *value = as_f32(distance);
            }
        }
        let mut num_tokens = count;
        // What was seen before counts as its directions, in their lengths, and the distance of the means.
        let last = match before {
            None => None,
            Some(before) => {
                num_tokens += before.num_tokens;
                let weight = before.num_tokens / num_tokens * count;
                let distance: Vec<f64> = before.mean.iter().zip(&mean).map(|(before, mean)| before - mean).collect();
                variation += before.variation + weight * distance.iter().map(|it| it * it).sum::<f64>();
                let part = before.num_tokens / num_tokens;
                mean.iter_mut().zip(&distance).for_each(|(mean, distance)| *mean += part * distance);
                let mut all = before.directions.right.clone().scaled(&before.directions.values);
                all.values.append(&mut rows.values);
                all.values.extend(distance.iter().map(|distance| as_f32(weight.sqrt() * distance)));
                rows = all;
                Some(before.directions.right)
            }
        };
        let mut directions = estimated(&rows, 2 * most).first(most);
        directions.right.values.chunks_exact_mut(length).for_each(point);
        let is_stable = match last {
            None => vec![false; most],
            Some(last) => {
                directions.right.iter().zip(last.iter()).map(|(now, then)| cosine(now, then) >= STABLE).collect()
            }
        };
        Self { num_tokens, mean, variation, directions, is_stable }
    }

    /// The share of the variation that each direction makes up.
    fn shares(&self) -> impl Iterator<Item = f64> {
        self.directions.values.iter().map(|value| f64::from(*value).powi(2) / self.variation)
    }
}

/// The largest singular values and directions, as `torch.svd_lowrank` estimates them: as there, of a tall matrix.
fn estimated(w: &StartRows, count: usize) -> Singular {
    let count = count.min(w.count()).min(w.length);
    let is_flat = w.count() < w.length;
    let tall = if is_flat { Cow::Owned(w.transposed()) } else { Cow::Borrowed(w) };
    let number =
        |row: usize, column: usize| as_f32(as_f64(mix((column * count + row) as u64) >> 11) / 2_f64.powi(52) - 1.0);
    let start = (0..count).flat_map(|row| (0..tall.length).map(move |column| number(row, column)));
    let start = StartRows { values: start.collect(), length: tall.length };
    let Singular { values, left, right } = Singular::estimated(&tall, &start, NUM_ITERATIONS);
    if is_flat { Singular { values, left: right, right: left } } else { Singular { values, left, right } }
}

/// Turns a direction so that its largest number is above 0.
fn point(direction: &mut [f32]) {
    let largest = direction.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs()));
    if largest.is_some_and(|largest| largest < 0.0) {
        direction.iter_mut().for_each(|value| *value = -*value);
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
