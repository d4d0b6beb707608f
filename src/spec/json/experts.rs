//! The mixtures of experts of a model.

use crate::schema::{Section, Value};
use crate::spec::Activation;
use crate::spec::block::{
    Choice, ExpertGroups, Gated, LATENT_EXPERT_NAMES, Mixture, Probabilities, Projections, Role, SHARED_GATE,
    SharedExpert, Site, SiteId,
};
use crate::spec::family::{Arrangement, Biases, Experts, Family, Router, Windows};
use crate::util::gguf::MAX_EXPERTS;
use crate::util::stats::as_f64;

/// Experts of all layers.
const MAX_EXPERTS_OF_ALL: usize = 1 << 17;

/// The mixtures of a model, and its layers that have one.
pub(super) struct Mixtures {
    names: [&'static str; 5],
    num_experts: usize,
    num_per_token: usize,
    intermediate_size: usize,
    shared: Option<usize>,
    /// Width of the input of experts, where it is narrower.
    latent: Option<usize>,
    /// What holds the shared expert, if it has no gate.
    shared_name: Option<&'static str>,
    probabilities: Probabilities,
    choice: Choice,
    has_biases: bool,
    /// The feed-forward layer is the shared expert.
    pub(super) beside_dense: bool,
    weighs_inputs: bool,
    /// By layer.
    pub(super) is_in: Vec<bool>,
}

/// Reads the keys of a family that has them. `intermediate` is the width of feed-forward layers that are no mixtures.
pub(super) fn mixtures(
    json: &mut Section,
    family: &Family,
    intermediate: usize,
    num_layers: usize,
) -> Option<Mixtures> {
    let Experts { count, num_per_token, intermediate_size, shared, norm_topk_prob, has_biases, names, router, .. } =
        family.experts?;
    let Experts { beside_dense, weighs_inputs, .. } = family.experts?;
    let is_gemma4 = family.is_gemma4();
    if is_gemma4 && !json.boolean("enable_moe_block", false) {
        return None;
    }
    if family.state_spaces.is_some() && json.value("num_local_experts").and_then(Value::number) == Some(0.0) {
        return None;
    }
    // Where a list says which layers have a window, it does not matter.
    if !matches!(family.windows, Windows::AllButEvery { .. }) {
        json.only("use_sliding_window", "false", |value| *value == Value::Boolean(false));
    }
    if family.biases == Biases::QueryKeyValue {
        json.only("qkv_bias", "true", |value| *value == Value::Boolean(true));
    }
    // It adds what balances the experts to the loss, which moves routers: these are frozen.
    json.only("output_router_logits", "false", |value| *value == Value::Boolean(false));
    json.only("router_jitter_noise", "0.0", |value| value.number() == Some(0.0));
    let of_router = router.map(|router| router.counts[0]).filter(|key| json.has(key));
    let other = if json.has("num_local_experts") { "num_local_experts" } else { "num_experts" };
    let key = of_router.unwrap_or(other);
    let num_experts = json.count(key, count, 1..=MAX_EXPERTS);
    let of_token = match router {
        Some(router) => router.counts[1],
        None if is_gemma4 => "top_k_experts",
        None if json.has("moe_topk") => "moe_topk",
        None => "num_experts_per_tok",
    };
    let num_per_token = of_each(json, of_token).unwrap_or_else(|| json.count(of_token, num_per_token, 1..=MAX_EXPERTS));
    if num_per_token > num_experts {
        json.problem(of_token, format!("= {num_per_token}, but there are {num_experts} experts"));
    }
    if num_experts * num_layers > MAX_EXPERTS_OF_ALL {
        let message = format!("= {num_experts} in {num_layers} layers, expected at most {MAX_EXPERTS_OF_ALL} in all");
        json.problem(key, message);
        return None;
    }
    let mut is_in = vec![true; num_layers];
    let mut is_normalised = true;
    if let Some(default) = norm_topk_prob {
        is_normalised = json.boolean("norm_topk_prob", default);
    }
    let is_flint = family.model_type == "flint";
    if norm_topk_prob.is_some() && (router.is_none() || is_flint) {
        let every = json.count("decoder_sparse_step", 1, 1..=1 << 16);
        let first = if is_flint { vec![0, 1] } else { Vec::new() };
        let dense = json.any("mlp_only_layers", first, "a list of layers, or null", layers);
        for (layer, is_in) in is_in.iter_mut().enumerate() {
            *is_in = (layer + 1).is_multiple_of(every) && !dense.contains(&layer);
        }
        if json.has("mlp_layer_types") {
            by_type(json, &mut is_in);
        }
    }
    let of_width = if beside_dense || weighs_inputs { "intermediate_size" } else { "moe_intermediate_size" };
    let width = intermediate_size.map_or(intermediate, |default| json.count(of_width, default, 1..=1 << 20));
    let choice = router.map_or(Choice::PLAIN, |router| choice(json, router, num_experts));
    let shared_by_gate = shared.map(|default| json.count("shared_expert_intermediate_size", default, 1..=1 << 20));
    let without_gate = router.and_then(|router| {
        let (name, key) = router.shared?;
        let width = if key.ends_with("_size") {
            json.count(key, width, 1..=1 << 20)
        } else {
            json.count(key, 1, 0..=1 << 8) * width
        };
        (width > 0).then_some((name, width))
    });
    if let Some(router) = router {
        dense_layers(json, router, &mut is_in);
    }
    if weighs_inputs {
        let every = json.count("interleave_moe_layer_step", 1, 1..=1 << 16);
        let by_step = (0..num_layers).filter(|layer| (layer + 1).is_multiple_of(every)).collect();
        let listed = json.any("moe_layers", by_step, "a list of layers, or null", layers);
        is_in.iter_mut().enumerate().for_each(|(layer, is_in)| *is_in = listed.contains(&layer));
    }
    let probabilities = match (router.and_then(|router| router.sigmoid), is_normalised) {
        (None, true) => Probabilities::OfChosen,
        (None, false) => Probabilities::OfAll,
        (Some(more), true) => Probabilities::SigmoidsOfChosen(more),
        (Some(_), false) => Probabilities::Sigmoids,
    };
    Some(Mixtures {
        names,
        num_experts,
        num_per_token: num_per_token.min(num_experts),
        intermediate_size: width,
        shared: without_gate.map(|(_, width)| width).or(shared_by_gate),
        shared_name: without_gate.map(|(name, _)| name),
        latent: latent(json, family),
        probabilities,
        choice,
        has_biases,
        beside_dense: beside_dense && intermediate > 0,
        weighs_inputs,
        is_in,
    })
}

/// `moe_latent_size`, in the family that has it.
fn latent(json: &mut Section, family: &Family) -> Option<usize> {
    let is_given = family.arrangement == Arrangement::OneEach && json.value("moe_latent_size").is_some();
    is_given.then(|| json.count("moe_latent_size", 1024, 1..=1 << 20))
}

/// A count that is listed for every layer, where all are the same (Hunyuan).
fn of_each(json: &mut Section, key: &'static str) -> Option<usize> {
    let Some(Value::Array(counts)) = json.value(key) else { return None };
    let mut counts = counts.iter().map(|node| match node.value() {
        Value::Integer(count) => usize::try_from(*count).ok().filter(|count| (1..=MAX_EXPERTS).contains(count)),
        _ => None,
    });
    let first = counts.next()??;
    counts.all(|count| count == Some(first)).then_some(first)
}

/// What a router has beside its probabilities.
fn choice(json: &mut Section, router: Router, num_experts: usize) -> Choice {
    let bias = router.bias.filter(|(_, key)| key.is_none_or(|key| json.boolean(key, true)));
    let bias = bias.map(|(name, _)| name);
    let (key, default) = router.factor;
    let factor = json.number(key, default, 1e-6..=1e6);
    let Some(of_router) = router.groups else { return Choice { bias, groups: None, factor } };
    let mut choice = Choice { bias, groups: None, factor };
    if of_router.by_method {
        json.only("norm_topk_prob", "false, as transformers takes it", |value| *value == Value::Boolean(false));
        let known = |value: &Value| matches!(value.text(), Some("greedy" | "group_limited_greedy"));
        json.only("topk_method", "\"greedy\" or \"group_limited_greedy\"", known);
        if json.value("topk_method").and_then(Value::text) != Some("group_limited_greedy") {
            return choice;
        }
    }
    let [count, num_kept] = of_router.counts;
    let [count, num_kept] =
        [("n_group", count), ("topk_group", num_kept)].map(|(key, default)| json.count(key, default, 1..=MAX_EXPERTS));
    if !num_experts.is_multiple_of(count) || num_kept > count {
        let message = format!("= {count}, of which {num_kept} stay, does not divide {num_experts} experts");
        json.problem("n_group", message);
    } else if num_kept < count {
        choice.groups = Some(ExpertGroups { count, num_kept, num_best: of_router.num_best });
    }
    choice
}

/// Notes which layers are dense.
fn dense_layers(json: &mut Section, router: Router, is_in: &mut [bool]) {
    let Some((key, default)) = router.first else { return };
    if json.has("mlp_layer_types") {
        return by_type(json, is_in);
    }
    json.only("moe_layer_freq", "1", |value| value.number() == Some(1.0));
    let first = json.count(key, default, 0..=1 << 16);
    is_in.iter_mut().take(first).for_each(|is_in| *is_in = false);
    if key == "moe_layer_start_index" {
        // Its last layer counts from the end below 0.
        let last = json.value("moe_layer_end_index").and_then(Value::number).filter(|last| *last >= 0.0);
        let every = json.count("moe_layer_interval", 1, 1..=1 << 16);
        for (layer, is_in) in is_in.iter_mut().enumerate() {
            *is_in &= (layer + 1).is_multiple_of(every) && last.is_none_or(|last| as_f64(layer) <= last);
        }
    }
}

/// The same where a list says which (GLM-4.7-Flash).
fn by_type(json: &mut Section, is_in: &mut [bool]) {
    let expected = format!("\"dense\" or \"sparse\" for each of the {} layers", is_in.len());
    let kind = |value: &Value| match value.text() {
        Some("sparse") => Some(true),
        Some("dense") => Some(false),
        _ => None,
    };
    let num_layers = is_in.len();
    let kinds = json.any("mlp_layer_types", vec![true; num_layers], &expected, |value| match value {
        Value::Array(kinds) if kinds.len() == num_layers => {
            kinds.iter().map(|node| kind(node.value())).collect::<Option<Vec<_>>>().ok_or(None)
        }
        _ => Err(None),
    });
    is_in.copy_from_slice(&kinds);
}

pub(super) fn layers(value: &Value) -> Result<Vec<usize>, Option<String>> {
    let Value::Array(layers) = value else { return Err(None) };
    let layer = |value: &Value| match value {
        Value::Integer(layer) => usize::try_from(*layer).ok(),
        _ => None,
    };
    layers.iter().map(|node| layer(node.value())).collect::<Option<_>>().ok_or(None)
}

impl Mixtures {
    /// The mixture of a layer, whose linear layers `add` adds by name, shape and role.
    pub(super) fn mixture(
        &self,
        activation: Activation,
        hidden: usize,
        mut add: impl FnMut(Site) -> SiteId,
    ) -> Mixture {
        let Self { num_experts, num_per_token, probabilities, choice, weighs_inputs, .. } = *self;
        let [router, experts, gate, up, down] = self.names;
        let mut site = |name: String, shape, role| add(Site { name, shape, has_bias: self.has_biases, role });
        let router = site(router.to_owned(), [num_experts, hidden], Role::Router);
        let role = Role::Expert { num_per_token, num_experts };
        let inwards = self.latent.unwrap_or(hidden);
        let mut gated = |within: &str, names: [&str; 3], [hidden, width]: [usize; 2], role| {
            let mut site = |name, shape| site(format!("{within}.{name}"), shape, role);
            let ([gate, up, down], inwards) = (names, [width, hidden]);
            let gate_up = if gate == up {
                Projections::Same(site(up, inwards))
            } else {
                Projections::Apart([gate, up].map(|name| site(name, inwards)))
            };
            let down = site(down, [hidden, width]);
            Gated { activation, gate_scale: None, cutoff: None, intermediate_size: width, gate_up, down }
        };
        let expert =
            |expert| gated(&format!("{experts}.{expert}"), [gate, up, down], [inwards, self.intermediate_size], role);
        let experts = (0..num_experts).map(expert).collect();
        let shared = self.shared.map(|width| {
            gated(
                self.shared_name.unwrap_or("mlp.shared_expert"),
                [if gate == up { "up_proj" } else { "gate_proj" }, "up_proj", "down_proj"],
                [hidden, width],
                Role::Linear,
            )
        });
        let gate = |gated| {
            let has_gate = self.shared_name.is_none();
            SharedExpert { gated, gate: has_gate.then(|| site(SHARED_GATE.to_owned(), [1, hidden], Role::Linear)) }
        };
        let shared = shared.map(gate);
        let latent = self.latent.map(|width| {
            let [inwards, outwards] = LATENT_EXPERT_NAMES;
            [(inwards, [width, hidden]), (outwards, [hidden, width])]
                .map(|(name, shape)| site(name.to_owned(), shape, Role::Linear))
        });
        Mixture { router, probabilities, choice, num_per_token, weighs_inputs, experts, latent, shared }
    }
}
