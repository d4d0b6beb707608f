//! Rotary embeddings: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

use crate::schema::{Section, Value};
use crate::spec::family::{Family, OwnRopes};
use crate::spec::{QueryGrowth, Rope, RopeAxes, RopeScaling};
use crate::util::stats::as_f64;

const THETA: std::ops::RangeInclusive<f64> = 1.0..=1e15;
const FACTOR: std::ops::RangeInclusive<f64> = 1.0..=1e6;

/// What the rotary embeddings of a model depend on besides their own keys.
#[derive(Clone, Copy)]
pub(super) struct RopeFacts<'a> {
    pub(super) family: &'a Family,
    /// Width of a head in layers without a window, and in those with one.
    pub(super) head_dims: [usize; 2],
    /// `max_position_embeddings`
    pub(super) longest: usize,
    /// `original_max_position_embeddings`, where it stands beside them.
    pub(super) original: Option<usize>,
}

/// The rotary embedding of all layers, and, in families that have such, that of the layers with a window.
pub(super) fn ropes(json: &mut Section, facts: RopeFacts<'_>) -> Vec<Rope> {
    let (theta, partial) = (facts.family.rope_theta, facts.family.partial_rotary_factor);
    // MiniMax M2 has the width that turns.
    #[expect(clippy::cast_precision_loss, reason = "widths")]
    let of_width =
        |json: &mut Section| json.count("rotary_dim", 2_usize, 2..=1 << 16) as f64 / facts.head_dims[0] as f64;
    let partial = partial.map(|factor| if json.has("rotary_dim") { of_width(json) } else { factor });
    let (theta, partial) = match partial {
        Some(factor) if facts.family.own_ropes == OwnRopes::NeoX => {
            (json.number("rotary_emb_base", theta, THETA), Some(json.number("rotary_pct", factor, 1e-3..=1.0)))
        }
        partial => (theta, partial),
    };
    let partial = partial.map(|factor| json.number("partial_rotary_factor", factor, 1e-3..=1.0));
    if partial.is_none() {
        json.only("partial_rotary_factor", "1.0", |value| value.number() == Some(1.0));
    }
    let partial = partial.unwrap_or(1.0);
    let is_nested =
        ["full_attention", "sliding_attention"].iter().any(|kind| json.has(&format!("rope_parameters.{kind}")));
    let Some(local) = facts.family.local_rope_theta else {
        if is_nested {
            let message = format!("differ by kind of layer, which models of type `{}` do not", facts.family.model_type);
            json.problem("rope_parameters", message);
        }
        return vec![of_all(json, theta, partial, facts)];
    };
    if is_nested {
        let mut nested = json.below("rope_parameters", "an object or null");
        let kinds = [("full_attention", theta), ("sliding_attention", local)];
        return kinds
            .map(|(kind, theta)| {
                let facts = if kind == "full_attention" { facts } else { facts.local() };
                parameters(&mut nested.below(kind, "an object"), None, theta, partial, facts)
            })
            .into();
    }
    if facts.family.own_ropes == OwnRopes::Olmo {
        let full = of_all(json, theta, partial, facts);
        return vec![full.clone(), Rope { scaling: None, ..full }];
    }
    let local = json.number("rope_local_base_freq", local, THETA);
    let local = rope(local, None, partial, facts.local());
    if facts.family.is_gemma4() {
        let scaling = RopeScaling::Proportional { num_turning: facts.head_dims[0] / 8, factor: 1.0 };
        return vec![rope(theta, Some(scaling), partial, facts), local];
    }
    vec![of_all(json, theta, partial, facts), local]
}

/// Takes over the base of the layers that have a rotary embedding in `layer_rope_theta`.
pub(super) fn base_of_layers(json: &mut Section, rope: &mut Rope) {
    let Some(Value::Array(bases)) = json.value("layer_rope_theta") else { return };
    let mut bases = bases.iter().filter_map(|base| base.value().number()).filter(|base| *base != 0.0);
    let Some(base) = bases.next() else { return };
    if THETA.contains(&base) && bases.all(|other| other == base) {
        rope.theta = base;
    } else {
        json.problem("layer_rope_theta", "has several bases, of which one is supported here");
    }
}

impl RopeFacts<'_> {
    /// For layers with a window.
    fn local(self) -> Self {
        Self { head_dims: [self.head_dims[1]; 2], ..self }
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a width, rounded down as in transformers"
)]
fn rope(
    theta: f64,
    scaling: Option<RopeScaling>,
    partial: f64,
    RopeFacts { family, head_dims: [head_dim, _], .. }: RopeFacts<'_>,
) -> Rope {
    let width = (head_dim as f64 * partial) as usize;
    Rope { theta, scaling, head_dim, width, pairs: family.rope_pairs, query_growth: None, axes: None }
}

/// Where all layers have the same.
fn of_all(json: &mut Section, theta: f64, partial: f64, facts: RopeFacts<'_>) -> Rope {
    let outer = json.value("rope_theta").is_some().then(|| json.number("rope_theta", theta, THETA));
    let [new, old] = ["rope_parameters", "rope_scaling"]
        .map(|key| json.value(key).filter(|value| !matches!(value, Value::Table(table) if table.is_empty())));
    if old.is_some() && new.is_some() && old != new {
        json.problem("rope_parameters", "and `rope_scaling` differ; keep one of them");
    }
    let is_scaled = matches!(facts.family.own_ropes, OwnRopes::GptOss | OwnRopes::Ministral);
    if new.is_none() && old.is_none() && (is_scaled || matches!(facts.family.model_type, "cwm" | "apertus")) {
        json.problem("rope_parameters", "is missing, as is `rope_scaling`: models of this type are scaled");
    }
    let name = if new.is_some() { "rope_parameters" } else { "rope_scaling" };
    parameters(&mut json.below(name, "an object or null"), outer, theta, partial, facts)
}

/// Reads one of them; `outer` is the base where it stands beside it.
fn parameters(section: &mut Section, outer: Option<f64>, theta: f64, partial: f64, facts: RopeFacts<'_>) -> Rope {
    let theta = section.number("rope_theta", outer.unwrap_or(theta), THETA);
    if let Some(outer) = outer.filter(|outer| *outer != theta) {
        section.problem("rope_theta", format!("= {theta} and `rope_theta` = {outer} differ; keep one"));
    }
    let partial = match facts.family.partial_rotary_factor {
        Some(_) => section.number("partial_rotary_factor", partial, 1e-3..=1.0),
        None => partial,
    };
    let alpha = section.value("alpha").filter(|_| facts.family.own_ropes == OwnRopes::Hunyuan).and_then(Value::number);
    let alpha = alpha.filter(|alpha| *alpha > 0.0);
    let width = as_f64(facts.head_dims[0].max(4));
    let theta = theta * alpha.map_or(1.0, |alpha| alpha.powf(width / (width - 2.0)));
    let plain = rope(theta, None, partial, facts);
    if !plain.width.is_multiple_of(2) || plain.width == 0 {
        section.problem("partial_rotary_factor", format!("= {partial} makes {} numbers turn, not pairs", plain.width));
    }
    // Of text, the three positions of an image's parts are equal.
    let kinds = ["rope_type", "type"].map(|key| section.optional_string(key, None));
    let [kind, old_kind] = kinds.map(|kind| kind.map(|kind| if kind == "mrope" { "default".to_owned() } else { kind }));
    if let (Some(kind), Some(old)) = (&kind, old_kind.as_ref().filter(|old| Some(*old) != kind.as_ref())) {
        section.problem("rope_type", format!("= \"{kind}\" and `type` = \"{old}\" differ; keep one of them"));
    }
    let kind = kind.or(old_kind);
    let is_phi = facts.family.own_ropes == OwnRopes::Phi;
    let kind = kind.as_deref().map(|kind| if is_phi && matches!(kind, "su" | "yarn") { "longrope" } else { kind });
    let scaling = match kind {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: section.required_number("factor", FACTOR) }),
        Some("dynamic") if alpha.is_some() => None,
        Some("dynamic") => Some(RopeScaling::Dynamic {
            factor: section.required_number("factor", FACTOR),
            original_max_position_embeddings: facts.longest,
        }),
        Some("proportional") if facts.family.is_gemma4() => Some(proportional(section, plain.head_dim)),
        Some("llama3") => Some(llama3(section, facts)),
        Some("yarn") => Some(yarn(section, facts)),
        Some("longrope") => longrope(section, plain.width / 2, facts),
        Some(other) => {
            let expected = "`default`, `linear`, `dynamic`, `llama3`, `yarn` or `longrope`";
            section.problem("rope_type", format!("= \"{other}\" is not supported, expected {expected}"));
            None
        }
    };
    let growth = facts.family.own_ropes == OwnRopes::Ministral && section.value("llama_4_scaling_beta").is_some();
    let query_growth = growth.then(|| QueryGrowth {
        beta: section.number("llama_4_scaling_beta", 0.0, 0.0..=1e3),
        period: original(section, facts),
        first: 0,
    });
    let axes = match facts.family.own_ropes {
        OwnRopes::Axes(default) => Some(axes(section, default, plain.width / 2)),
        _ => None,
    };
    Rope { scaling, query_growth, axes, ..plain }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "small counts"
)]
fn axes(section: &mut Section, default: RopeAxes, num_pairs: usize) -> RopeAxes {
    let sections = section.numbers("mrope_section", default.sections.map(|pairs| pairs as f64), 0.0..=65536.0);
    let sections = sections.map(|pairs| pairs as usize);
    let sum: usize = sections.iter().sum();
    if !default.are_interleaved && sum != num_pairs {
        section.problem("mrope_section", format!("= {sections:?} are {sum} pairs, and {num_pairs} of a head turn"));
    }
    RopeAxes { sections, ..default }
}

fn original(section: &mut Section, facts: RopeFacts<'_>) -> usize {
    section.count("original_max_position_embeddings", facts.original.unwrap_or(facts.longest), 1..=1 << 32)
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a width, rounded down as in transformers"
)]
fn proportional(section: &mut Section, head_dim: usize) -> RopeScaling {
    let share = section.number("partial_rotary_factor", 1.0, 1e-3..=1.0);
    let factor = section.number("factor", 1.0, FACTOR);
    RopeScaling::Proportional { num_turning: (share * head_dim as f64 / 2.0) as usize, factor }
}

fn llama3(section: &mut Section, facts: RopeFacts<'_>) -> RopeScaling {
    let low_freq_factor = section.required_number("low_freq_factor", 1e-6..=1e6);
    let high_freq_factor = section.required_number("high_freq_factor", 1e-6..=1e6);
    if section.is_sound() && high_freq_factor < low_freq_factor {
        let message = format!("= {high_freq_factor}, expected at least `low_freq_factor` = {low_freq_factor}");
        section.problem("high_freq_factor", message);
    }
    let original_max_position_embeddings = original(section, facts);
    let factor = section.required_number("factor", FACTOR);
    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings }
}

/// By how much longer the contexts are than in pretraining.
#[expect(clippy::cast_precision_loss, reason = "lengths")]
fn growth(longest: usize, original: usize) -> f64 {
    longest as f64 / original as f64
}

fn yarn(section: &mut Section, facts: RopeFacts<'_>) -> RopeScaling {
    let original_max_position_embeddings = original(section, facts);
    let factor = section.number("factor", growth(facts.longest, original_max_position_embeddings).max(1.0), FACTOR);
    let [mscale, of_all] = ["mscale", "mscale_all_dim"]
        .map(|key| section.value(key).is_some().then(|| section.number(key, 1.0, 0.0..=1e3)).filter(|it| *it != 0.0));
    let grown = |by: f64| if factor > 1.0 { 0.1 * by * factor.ln() + 1.0 } else { 1.0 };
    let default = match (mscale, of_all) {
        (Some(mscale), Some(of_all)) => grown(mscale) / grown(of_all),
        _ => grown(1.0),
    };
    RopeScaling::Yarn {
        factor,
        beta_fast: section.number("beta_fast", 32.0, 1e-3..=1e6),
        beta_slow: section.number("beta_slow", 1.0, 1e-3..=1e6),
        truncate: section.boolean("truncate", true),
        attention_factor: section.number("attention_factor", default, 1e-3..=1e3),
        original_max_position_embeddings,
    }
}

/// `None` after a problem.
#[expect(clippy::cast_precision_loss, reason = "a length")]
fn longrope(section: &mut Section, half: usize, facts: RopeFacts<'_>) -> Option<RopeScaling> {
    let expected = format!("a list of {half} numbers above 0");
    let mut factors = |key| {
        section.any(key, None, &expected, |value| match value {
            Value::Array(numbers) if numbers.len() == half => {
                let number = |value: &Value| value.number().filter(|number| *number > 0.0);
                numbers.iter().map(|node| number(node.value())).collect::<Option<Vec<f64>>>().map(Some).ok_or(None)
            }
            _ => Err(None),
        })
    };
    let [short, long] = [factors("short_factor"), factors("long_factor")];
    let original = original(section, facts);
    let factor = section.number("factor", growth(facts.longest, original).max(1.0), FACTOR);
    let default = if factor > 1.0 { (1.0 + factor.ln() / (original as f64).ln()).sqrt() } else { 1.0 };
    let attention_factor = section.number("attention_factor", default, 1e-3..=1e3);
    let (Some(short_factor), Some(long_factor)) = (short, long) else {
        if section.is_sound() {
            section.problem("short_factor", "and `long_factor` are needed");
        }
        return None;
    };
    let original_max_position_embeddings = original;
    Some(RopeScaling::LongRope { short_factor, long_factor, attention_factor, original_max_position_embeddings })
}
