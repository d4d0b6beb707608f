//! Rotary embeddings: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

use crate::schema::{Section, Value};
use crate::spec::RopeScaling;
use crate::spec::families::Family;

const THETA: std::ops::RangeInclusive<f64> = 1.0..=1e15;
const FACTOR: std::ops::RangeInclusive<f64> = 1.0..=1e6;

/// Base and scaling of the frequencies.
pub(super) type Frequencies = (f64, Option<RopeScaling>);

/// The frequencies of all layers, and, in families that have such, of the layers with a window.
pub(super) fn frequencies(json: &mut Section, family: &Family, longest: usize) -> Vec<Frequencies> {
    let Some(local) = family.local_rope_theta else { return vec![of_all(json, family.rope_theta, longest)] };
    if json.has("rope_parameters.full_attention") || json.has("rope_parameters.sliding_attention") {
        let mut nested = json.below("rope_parameters", "an object or null");
        let kinds = [("full_attention", family.rope_theta), ("sliding_attention", local)];
        return kinds
            .map(|(kind, theta)| parameters(&mut nested.below(kind, "an object"), None, theta, longest))
            .into();
    }
    let local = json.number("rope_local_base_freq", local, THETA);
    vec![of_all(json, family.rope_theta, longest), (local, None)]
}

/// Where all layers have the same.
fn of_all(json: &mut Section, theta: f64, longest: usize) -> Frequencies {
    let outer = json.value("rope_theta").is_some().then(|| json.number("rope_theta", theta, THETA));
    let [new, old] = ["rope_parameters", "rope_scaling"]
        .map(|key| json.value(key).filter(|value| !matches!(value, Value::Table(table) if table.is_empty())));
    if old.is_some() && new.is_some() && old != new {
        json.problem("rope_parameters", "and `rope_scaling` differ; keep one of them");
    }
    let name = if new.is_some() { "rope_parameters" } else { "rope_scaling" };
    parameters(&mut json.below(name, "an object or null"), outer, theta, longest)
}

/// Reads one of them; `outer` is the base where it stands beside it.
fn parameters(rope: &mut Section, outer: Option<f64>, theta: f64, longest: usize) -> Frequencies {
    let theta = rope.number("rope_theta", outer.unwrap_or(theta), THETA);
    if let Some(outer) = outer.filter(|outer| *outer != theta) {
        rope.problem("rope_theta", format!("= {theta} and `rope_theta` = {outer} differ; keep one"));
    }
    let [kind, old_kind] = ["rope_type", "type"].map(|key| rope.optional_string(key, None));
    if let (Some(kind), Some(old)) = (&kind, old_kind.as_ref().filter(|old| Some(*old) != kind.as_ref())) {
        rope.problem("rope_type", format!("= \"{kind}\" and `type` = \"{old}\" differ; keep one of them"));
    }
    let scaling = match kind.or(old_kind).as_deref() {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: rope.required_number("factor", FACTOR) }),
        Some("llama3") => Some(llama3(rope, longest)),
        Some(other) => {
            let message = format!("= \"{other}\" is not supported, expected `default`, `linear` or `llama3`");
            rope.problem("rope_type", message);
            None
        }
    };
    (theta, scaling)
}

fn llama3(rope: &mut Section, longest: usize) -> RopeScaling {
    let low_freq_factor = rope.required_number("low_freq_factor", 1e-6..=1e6);
    let high_freq_factor = rope.required_number("high_freq_factor", 1e-6..=1e6);
    if rope.is_sound() && high_freq_factor <= low_freq_factor {
        let message = format!("= {high_freq_factor}, expected more than `low_freq_factor` = {low_freq_factor}");
        rope.problem("high_freq_factor", message);
    }
    let original_max_position_embeddings = rope.count("original_max_position_embeddings", longest, 1..=1 << 32);
    let factor = rope.required_number("factor", FACTOR);
    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings }
}
