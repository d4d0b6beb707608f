//! Adapters that are one for all experts of a layer, taken apart by a model.
//!
//! Source: `ParamWrapper` of PEFT 0.21. Until 0.18 PEFT took every such weight for `[experts, in, out]`, which gpt-oss's alone are; there
//! the two matrices of the others have each other's places, and in 0.19.0 those of gpt-oss, too.

use std::collections::BTreeSet;

use super::{ByModule, INNER, OF_EXPERTS, OUTER, is_of_all, parameter_names, row_in};
use crate::config::{InitLoraWeights, LoraConfig, TargetModules};
use crate::lora::Matrices;
use crate::lora::targets::FIRST_EXPERT;
use crate::save::export::adapter_file::SavedAdapter;
use crate::save::export::{AdapterWeights, HostMatrix};
use crate::spec::{ExpertForm, ModelConfig, is_of_expert, is_router, short_name};

/// A scale that differs by less is the same, computed in another way.
const SAME_SCALE: f64 = 1e-6;

/// The experts of a layer in a model.
struct OfLayer {
    /// The module that holds them.
    experts: String,
    /// What gate, up and down are called in each.
    names: [String; 3],
    num_experts: usize,
    /// Width of their input and output: of Nemotron 3 Super, less than the model's.
    hidden_size: usize,
    intermediate_size: usize,
}

impl OfLayer {
    /// Of every layer that has experts.
    fn all(config: &ModelConfig) -> Vec<Self> {
        let of_layer = |layer: usize| {
            let mixture = config.blocks[layer].mixture()?;
            let first = mixture.experts.first()?;
            let sites = first.gate_up.sites().iter().chain([&first.down]).map(|site| config.module_name(layer, *site));
            let modules: Vec<String> = sites.collect();
            let experts = modules.first()?.split_once(FIRST_EXPERT)?.0.to_owned();
            // Without a gate, up has both places.
            let modules =
                if let [up, down] = &modules[..] { vec![up.clone(), up.clone(), down.clone()] } else { modules };
            let names = modules.iter().filter_map(|module| module.rsplit('.').next().map(str::to_owned));
            Some(Self {
                experts: format!("{experts}{OF_EXPERTS}"),
                names: names.collect::<Vec<_>>().try_into().ok()?,
                num_experts: mixture.experts.len(),
                hidden_size: config.blocks[layer].sites[first.down].shape[0],
                intermediate_size: first.intermediate_size,
            })
        };
        (0..config.num_layers()).filter_map(of_layer).collect()
    }

    fn has_gate(&self) -> bool {
        self.names[0] != self.names[1]
    }

    fn module(&self, expert: usize, part: usize) -> String {
        format!("{}.{expert}.{}", self.experts, self.names[part])
    }

    /// What the file has under an end of the name of what holds the experts, which transformers 5 has renamed in Mixtral.
    fn find<'a>(&self, weights: &'a ByModule, end: &str) -> Option<(String, &'a Matrices<HostMatrix>)> {
        let renamed = self.experts.replace(".block_sparse_moe.", ".mlp.");
        let all = [&self.experts, &renamed].map(|experts| format!("{experts}{end}"));
        all.into_iter().find_map(|module| weights.get(&module).map(|pair| (module, pair)))
    }

    /// Those of each expert of matrices that are of one expert below the other, or one for all.
    fn of_outer(&self, pair: &Matrices<HostMatrix>, part: usize) -> Option<Vec<Matrices<HostMatrix>>> {
        let out_features = if part < 2 { self.intermediate_size } else { self.hidden_size };
        let rank = pair.b.num_columns;
        let sizes = [(&pair.a, rank), (&pair.b, out_features)];
        let counts = sizes.map(|(matrix, rows)| (matrix, matrix.num_rows / rows));
        let fits = |(matrix, rows): &(&HostMatrix, usize)| {
            [1, self.num_experts].iter().any(|count| count * rows == matrix.num_rows)
        };
        (sizes.iter().all(fits) && pair.magnitude.is_none()).then(|| {
            let of = |expert: usize| {
                let [a, b] = counts.map(|(matrix, count)| matrix.part(expert.min(count - 1), count));
                Matrices { a, b, magnitude: None }
            };
            (0..self.num_experts).map(of).collect()
        })
    }

    /// Input and output of a parameter.
    fn shape(&self, parameter: usize) -> [usize; 2] {
        let (hidden, inside) = (self.hidden_size, self.intermediate_size);
        let num_parts = if self.has_gate() { 2 } else { 1 };
        if parameter == 0 { [hidden, num_parts * inside] } else { [inside, hidden] }
    }

    /// Which parameter a pair is of, where A and B have their places or, if `swapped`, each other's: `likely`, where shapes do not say.
    fn parameter(&self, pair: &Matrices<HostMatrix>, swapped: bool, likely: usize) -> Option<usize> {
        let [a, b] =
            if swapped { [pair.b.num_rows, pair.a.num_columns] } else { [pair.a.num_columns, pair.b.num_rows] };
        let has_ranks = pair.a.num_rows.is_multiple_of(self.num_experts) && pair.magnitude.is_none();
        [likely, 1 - likely].into_iter().find(|parameter| self.shape(*parameter) == [a, b] && has_ranks)
    }
}

/// The pair of an expert of those for all.
fn of_expert(pair: &Matrices<HostMatrix>, expert: usize, num_experts: usize, swapped: bool) -> Matrices<HostMatrix> {
    let rank = pair.a.num_rows / num_experts;
    let a = pair.a.part(expert, num_experts);
    let columns = pair.b.values.chunks(pair.b.num_columns);
    let values = columns.flat_map(|row| row.iter().skip(expert).step_by(num_experts).copied()).collect();
    let b = HostMatrix { num_rows: pair.b.num_rows, num_columns: rank, values };
    let [a, b] = if swapped { [b.transposed(), a.transposed()] } else { [a, b] };
    Matrices { a, b, magnitude: None }
}

/// Gate and up of an expert's pair for both.
fn halves(pair: &Matrices<HostMatrix>, form: ExpertForm) -> [Matrices<HostMatrix>; 2] {
    let (rows, width) = (pair.b.num_rows / 2, pair.b.num_columns);
    [0, 1].map(|index| {
        let from = |row| &pair.b.values[row_in(form, (row, rows), (index, 2)) * width..][..width];
        let values = (0..rows).flat_map(from).copied().collect();
        Matrices { a: pair.a.clone(), b: HostMatrix { num_rows: rows, num_columns: width, values }, magnitude: None }
    })
}

/// Whether gate has the first half of the ranks alone, and up the second.
fn have_own_ranks([gate, up]: &[Matrices<HostMatrix>; 2]) -> bool {
    let rank = gate.a.num_rows;
    let is_zero = |matrix: &HostMatrix, from: usize| {
        matrix.values.chunks(rank).all(|row| row[from..from + rank / 2].iter().all(|value| *value == 0.0))
    };
    rank.is_multiple_of(2) && is_zero(&gate.b, rank / 2) && is_zero(&up.b, 0)
}

/// So many of its ranks, from `first` on.
fn ranks(pair: &Matrices<HostMatrix>, first: usize, count: usize) -> Matrices<HostMatrix> {
    let width = pair.a.num_columns;
    let a = pair.a.values[first * width..(first + count) * width].to_vec();
    let b =
        pair.b.values.chunks(pair.b.num_columns).flat_map(|row| row[first..first + count].iter().copied()).collect();
    Matrices {
        a: HostMatrix { num_rows: count, num_columns: width, values: a },
        b: HostMatrix { num_rows: pair.b.num_rows, num_columns: count, values: b },
        magnitude: None,
    }
}

/// A pair with more ranks, of zeros.
fn filled(pair: Matrices<HostMatrix>, rank: usize) -> Matrices<HostMatrix> {
    let Matrices { mut a, b, .. } = pair;
    a.values.resize(rank * a.num_columns, 0.0);
    let more = vec![0.0; rank - a.num_rows];
    let values = b.values.chunks(b.num_columns).flat_map(|row| [row, &more].concat()).collect();
    let b = HostMatrix { num_columns: rank, values, ..b };
    Matrices { a: HostMatrix { num_rows: rank, ..a }, b, magnitude: None }
}

impl SavedAdapter {
    /// The adapter with those of experts one by one, of one rank and the scale of others. What does not fit the model stays as it is.
    pub(in crate::save::export) fn with_experts_apart(mut self, config: &ModelConfig) -> Self {
        self.weights.experts = config.expert_form();
        let are_joined = self.weights.keys().any(|module| is_of_all(module));
        if are_joined || self.weights.keys().any(|module| module.contains(FIRST_EXPERT)) {
            // What these decided is over: experts that start here have no others.
            (self.config.lora_dropout, self.config.init_lora_weights) = (0.0, InitLoraWeights::Kaiming);
        }
        if !are_joined {
            if self.weights.keys().any(|module| is_router(module)) {
                self.config = with_modules(&self.config, &self.weights, config);
            }
            return self;
        }
        let (layers, form) = (OfLayer::all(config), self.weights.experts);
        // By layer: the pairs of its parameters.
        let mut pairs: Vec<(&OfLayer, &Matrices<HostMatrix>, usize)> = Vec::new();
        let (mut found, mut taken) = (Vec::new(), Vec::new());
        for layer in &layers {
            for end in ["", INNER] {
                let Some((module, pair)) = layer.find(&self.weights, end) else { continue };
                pairs.push((layer, pair, usize::from(end.is_empty())));
                taken.push(module);
            }
            for (part, end) in OUTER.into_iter().enumerate() {
                let Some((module, pair)) = layer.find(&self.weights, end) else { continue };
                let Some(of_each) = layer.of_outer(pair, part) else { return self };
                found.extend(of_each.into_iter().enumerate().map(|(expert, own)| (layer.module(expert, part), own)));
                taken.push(module);
            }
        }
        let fits =
            |swapped| pairs.iter().all(|(layer, pair, likely)| layer.parameter(pair, swapped, *likely).is_some());
        let swapped = match [fits(false), fits(true)] {
            [true, true] => match (form, self.weights.peft_version) {
                (ExpertForm::Turned, version) => version.is_none_or(|version| version >= [0, 19, 0]),
                (_, None) => false,
                (ExpertForm::InTurn, Some(version)) => version == [0, 19, 0],
                (_, Some(version)) => version <= [0, 19, 0],
            },
            [false, false] => return self,
            [_, swapped] => swapped,
        };
        let of_others = self.config.scale(self.config.r, self.config.lora_alpha);
        let mut of_both = Vec::new();
        for (layer, pair, likely) in pairs {
            let Some(parameter) = layer.parameter(pair, swapped, likely) else { continue };
            let alpha = self.config.alpha_of(&format!("{}.{}", layer.experts, parameter_names(form)[parameter]));
            let ratio = self.config.scale(pair.a.num_rows / layer.num_experts, alpha) / of_others;
            for expert in 0..layer.num_experts {
                let mut own = of_expert(pair, expert, layer.num_experts, swapped);
                if (ratio - 1.0).abs() > SAME_SCALE {
                    #[expect(clippy::cast_possible_truncation, reason = "the product is in f32")]
                    own.b.values.iter_mut().for_each(|value| *value *= ratio as f32);
                }
                if parameter == 0 && layer.has_gate() {
                    of_both.push(([0, 1].map(|part| layer.module(expert, part)), halves(&own, form)));
                } else {
                    found.push((layer.module(expert, parameter + 1), own));
                }
            }
        }
        // Of ours, and of those that PEFT has made of adapters one by one, each half has ranks of its own.
        let are_own = of_both.iter().all(|(_, both)| have_own_ranks(both));
        for (modules, both) in of_both {
            let count = both[0].a.num_rows / if are_own { 2 } else { 1 };
            let parts =
                both.iter().enumerate().map(|(part, pair)| ranks(pair, if are_own { part * count } else { 0 }, count));
            found.extend(modules.into_iter().zip(parts));
        }
        let rank = found.iter().map(|(_, pair)| pair.a.num_rows).max().unwrap_or(1);
        for module in taken {
            self.weights.remove(&module);
        }
        self.weights.adapters.extend(found.into_iter().map(|(module, pair)| (module, filled(pair, rank))));
        self.weights.peft_version = None;
        self.config.expert_rank = Some(rank);
        self.config = with_modules(&self.config, &self.weights, config);
        self
    }
}

/// The section with targets that name experts and routers among the weights: by the names that the recipe of such an adapter has, if
/// these name no others. Patterns of parameters are not in it.
pub(in crate::save::export) fn with_modules(
    config: &LoraConfig,
    weights: &AdapterWeights,
    model: &ModelConfig,
) -> LoraConfig {
    let adapted: BTreeSet<&String> = weights.keys().collect();
    let first: BTreeSet<&str> =
        adapted.iter().filter(|module| module.contains(FIRST_EXPERT)).map(|module| short_name(module)).collect();
    let named = |within: &str| {
        let names = first.iter().map(|name| format!("{within}{name}"));
        let target_modules = config.target_modules.clone().and(names.collect());
        LoraConfig { target_modules, ..config.clone() }.known_in(model)
    };
    let fits = |config: &LoraConfig| {
        config.select(model).is_ok_and(|selection| {
            let selected: Vec<String> = selection.adapted_modules(model).map(|(module, ..)| module).collect();
            selected.iter().collect::<BTreeSet<_>>() == adapted
        })
    };
    let own = config.known_in(model);
    if fits(&own) {
        return own;
    }
    let by_name = ["", &FIRST_EXPERT[1..]].map(named).into_iter().find(fits);
    by_name.unwrap_or_else(|| {
        let is_target = |module: &&&String| module.contains(FIRST_EXPERT) || !is_of_expert(module);
        let all = adapted.iter().filter(is_target).map(|module| (*module).clone()).collect();
        let target_modules = TargetModules::Names(all);
        LoraConfig { target_modules, layers_to_transform: None, layers_pattern: None, ..config.clone() }.known_in(model)
    })
}
