//! Adapters on experts in the form in which PEFT has them for all experts of a layer.
//!
//! Source: `ParamWrapper` of PEFT 0.21.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::{AdapterWeights, HostMatrix};
use crate::lora::Matrices;
use crate::spec::{ExpertForm, is_router, router_in_transformers};

pub(super) mod apart;

/// Behind the module that holds the experts, that of gate and up where down has an adapter, too.
const INNER: &str = ".base_layer";
/// Behind it, gate, up and down as Tinker has them.
const OUTER: [&str; 3] = [".w1", ".w3", ".w2"];
const OF_EXPERTS: &str = ".experts";

type ByModule = BTreeMap<String, Matrices<HostMatrix>>;
/// By expert: its parts.
type Parts<'a> = BTreeMap<usize, Vec<&'a Matrices<HostMatrix>>>;

/// Whether a module of an adapter file stands for all experts of a layer.
pub(super) fn is_of_all(module: &str) -> bool {
    let of = |end: &&str| module.strip_suffix(*end).is_some_and(|experts| experts.ends_with(OF_EXPERTS));
    module.ends_with(OF_EXPERTS) || of(&INNER) || OUTER.iter().any(of)
}

/// Whether a module of an adapter file has a matrix for each expert, or one for all, in three dimensions.
pub(super) fn has_three_dimensions(module: &str) -> bool {
    is_of_all(module) && OUTER.iter().any(|end| module.ends_with(end))
}

/// The names of the parameters of a layer that hold its experts, within what holds them.
pub(super) fn parameter_names(form: ExpertForm) -> [&'static str; 2] {
    [if form == ExpertForm::Ungated { "up_proj" } else { "gate_up_proj" }, "down_proj"]
}

/// The module that holds an expert's linear layer, the expert, and whether the layer is gate, up or down: 0 to 2.
fn place(module: &str) -> Option<(&str, usize, usize)> {
    let (before, rest) = module.rsplit_once(".experts.")?;
    let (expert, name) = rest.split_once('.')?;
    let part = match name {
        "gate_proj" | "w1" => 0,
        "up_proj" | "w3" => 1,
        "down_proj" | "w2" => 2,
        _ => return None,
    };
    Some((&module[..before.len() + OF_EXPERTS.len()], expert.parse().ok()?, part))
}

impl AdapterWeights {
    /// The parameters of all experts that have adapters where the file has these joined, by the module that holds the experts.
    pub(super) fn parameters(&self) -> BTreeMap<&str, BTreeSet<usize>> {
        let mut found: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        let places = self.keys().filter(|_| self.experts.is_joined()).filter_map(|module| place(module));
        for (experts, _, part) in places {
            found.entry(experts).or_default().insert(part / 2);
        }
        found
    }

    /// The modules as the file has them.
    pub(super) fn modules_in_file(&self) -> Vec<String> {
        let joined = self.parameters();
        let of_all = joined.iter().flat_map(|(experts, parameters)| {
            parameters.iter().map(|parameter| in_file(experts, *parameter, parameters.len()))
        });
        let others = self.keys().filter(|module| joined.is_empty() || place(module).is_none());
        others.map(|module| other_in_file(module)).chain(of_all).collect()
    }

    /// The matrices by module as the file has them.
    pub(super) fn in_file(&self) -> Cow<'_, ByModule> {
        let joined = self.parameters();
        if joined.is_empty() && self.keys().all(|module| other_in_file(module) == *module) {
            return Cow::Borrowed(&self.adapters);
        }
        let mut parts: BTreeMap<(&str, usize), Parts<'_>> = BTreeMap::new();
        let mut all = ByModule::new();
        let of_module = |module| if joined.is_empty() { None } else { place(module) };
        let mut modules: Vec<_> = self.iter().map(|(module, pair)| (of_module(module), module, pair)).collect();
        // Gate before up, whatever their names.
        modules.sort_by_key(|(place, ..)| *place);
        for (place, module, pair) in modules {
            if let Some((experts, expert, part)) = place {
                parts.entry((experts, part / 2)).or_default().entry(expert).or_default().push(pair);
            } else {
                all.insert(other_in_file(module), pair.clone());
            }
        }
        for ((experts, parameter), parts) in parts {
            let parts: Vec<_> = parts.into_values().collect();
            let pair = join(&parts, self.experts);
            let pair = if self.experts == ExpertForm::Turned { turned(&pair, parts.len()) } else { pair };
            all.insert(in_file(experts, parameter, joined[experts].len()), pair);
        }
        Cow::Owned(all)
    }
}

/// The module of what is of no expert, or of one alone: routers have the names that transformers gives them.
fn other_in_file(module: &str) -> String {
    if is_router(module) { router_in_transformers(module) } else { module.to_owned() }
}

/// The module of a parameter: each has its own around the one before.
fn in_file(experts: &str, parameter: usize, num_parameters: usize) -> String {
    let end = if parameter + 1 < num_parameters { INNER } else { "" };
    format!("{experts}{end}")
}

/// One pair for all experts. Of each its parts: A's rows are expert by expert, part below part; B's columns those of all experts for
/// a rank and then for the next, and each part has ranks of its own.
fn join(experts: &[Vec<&Matrices<HostMatrix>>], form: ExpertForm) -> Matrices<HostMatrix> {
    let num_experts = experts.len();
    let first = experts.first().map_or(&[][..], |parts| parts);
    let sum = |of: fn(&Matrices<HostMatrix>) -> usize| first.iter().map(|part| of(part)).sum::<usize>();
    let (rank, out_features) = (sum(|part| part.a.num_rows), sum(|part| part.b.num_rows));
    let in_features = first.first().map_or(0, |part| part.a.num_columns);
    let mut a = Vec::with_capacity(num_experts * rank * in_features);
    let mut b = vec![0.0; out_features * rank * num_experts];
    for (expert, parts) in experts.iter().enumerate() {
        let mut before = 0;
        for (index, part) in parts.iter().enumerate() {
            a.extend_from_slice(&part.a.values);
            let (rows, columns) = (part.b.num_rows, part.b.num_columns);
            for (row, values) in part.b.values.chunks(columns).enumerate() {
                let to = row_in(form, (row, rows), (index, parts.len()));
                for (column, value) in values.iter().enumerate() {
                    b[(to * rank + before + column) * num_experts + expert] = *value;
                }
            }
            before += part.a.num_rows;
        }
    }
    Matrices {
        a: HostMatrix { num_rows: num_experts * rank, num_columns: in_features, values: a },
        b: HostMatrix { num_rows: out_features, num_columns: rank * num_experts, values: b },
        magnitude: None,
    }
}

/// The same where A of each expert is its transposed B, and B its transposed A.
fn turned(pair: &Matrices<HostMatrix>, num_experts: usize) -> Matrices<HostMatrix> {
    let (from_a, from_b) = (pair.a.transposed(), pair.b.transposed());
    let (ranks, rank) = (pair.a.num_rows, pair.a.num_rows / num_experts);
    // Where what is of an expert and a rank lies in B's columns.
    let place = |row: usize| row % rank * num_experts + row / rank;
    let row = |row| &from_b.values[place(row) * from_b.num_columns..][..from_b.num_columns];
    let a = (0..ranks).flat_map(row).copied().collect();
    let mut b = vec![0.0; from_a.values.len()];
    for (to, from) in b.chunks_mut(ranks).zip(from_a.values.chunks(ranks)) {
        from.iter().enumerate().for_each(|(row, value)| to[place(row)] = *value);
    }
    Matrices { a: HostMatrix { values: a, ..from_b }, b: HostMatrix { values: b, ..from_a }, magnitude: None }
}

/// The row in one of several matrices, each of `rows`, of which this is number `index`.
fn row_in(form: ExpertForm, (row, rows): (usize, usize), (index, num_parts): (usize, usize)) -> usize {
    if form == ExpertForm::InTurn { row * num_parts + index } else { index * rows + row }
}
