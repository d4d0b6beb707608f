//! The mixtures of experts of a model.

use crate::schema::{Section, Value};
use crate::spec::Activation;
use crate::spec::block::{Gated, Mixture, Probabilities, Projections, Role, SHARED_GATE, SharedExpert, Site, SiteId};
use crate::spec::family::{Biases, Experts, Family};
use crate::util::gguf::MAX_EXPERTS;

/// Experts of all layers.
const MAX_EXPERTS_OF_ALL: usize = 1 << 17;

/// The mixtures of a model, and its layers that have one.
pub(super) struct Mixtures {
    names: [&'static str; 5],
    num_experts: usize,
    num_per_token: usize,
    intermediate_size: usize,
    shared: Option<usize>,
    probabilities: Probabilities,
    has_biases: bool,
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
    let Experts { count, num_per_token, intermediate_size, shared, norm_topk_prob, has_biases, names } =
        family.experts?;
    let is_gemma4 = family.is_gemma4();
    if is_gemma4 && !json.boolean("enable_moe_block", false) {
        return None;
    }
    json.only("use_sliding_window", "false", |value| *value == Value::Boolean(false));
    if family.biases == Biases::QueryKeyValue {
        json.only("qkv_bias", "true", |value| *value == Value::Boolean(true));
    }
    // It adds what balances the experts to the loss, which moves routers: these are frozen.
    json.only("output_router_logits", "false", |value| *value == Value::Boolean(false));
    json.only("router_jitter_noise", "0.0", |value| value.number() == Some(0.0));
    let key = if json.has("num_local_experts") { "num_local_experts" } else { "num_experts" };
    let num_experts = json.count(key, count, 1..=MAX_EXPERTS);
    let of_token = if is_gemma4 { "top_k_experts" } else { "num_experts_per_tok" };
    let num_per_token = json.count(of_token, num_per_token, 1..=MAX_EXPERTS);
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
        let every = json.count("decoder_sparse_step", 1, 1..=1 << 16);
        let dense = json.any("mlp_only_layers", Vec::new(), "a list of layers, or null", layers);
        for (layer, is_in) in is_in.iter_mut().enumerate() {
            *is_in = (layer + 1).is_multiple_of(every) && !dense.contains(&layer);
        }
    }
    Some(Mixtures {
        names,
        num_experts,
        num_per_token: num_per_token.min(num_experts),
        intermediate_size: intermediate_size
            .map_or(intermediate, |default| json.count("moe_intermediate_size", default, 1..=1 << 20)),
        shared: shared.map(|default| json.count("shared_expert_intermediate_size", default, 1..=1 << 20)),
        probabilities: if is_normalised { Probabilities::OfChosen } else { Probabilities::OfAll },
        has_biases,
        is_in,
    })
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
        let Self { num_experts, num_per_token, probabilities, .. } = *self;
        let [router, experts, gate, up, down] = self.names;
        let mut site = |name: String, shape, role| add(Site { name, shape, has_bias: self.has_biases, role });
        let router = site(router.to_owned(), [num_experts, hidden], Role::Router);
        let role = Role::Expert { num_per_token, num_experts };
        let mut gated = |within: &str, names: [&str; 3], width, role| {
            let shapes = [[width, hidden], [width, hidden], [hidden, width]];
            let mut shapes = shapes.into_iter();
            let [gate, up, down] =
                names.map(|name| site(format!("{within}.{name}"), shapes.next().unwrap_or_default(), role));
            Gated { activation, intermediate_size: width, gate_up: Projections::Apart([gate, up]), down }
        };
        let expert = |expert| gated(&format!("{experts}.{expert}"), [gate, up, down], self.intermediate_size, role);
        let experts = (0..num_experts).map(expert).collect();
        let shared = self
            .shared
            .map(|width| gated("mlp.shared_expert", ["gate_proj", "up_proj", "down_proj"], width, Role::Linear));
        let gate = |gated| SharedExpert { gated, gate: site(SHARED_GATE.to_owned(), [1, hidden], Role::Linear) };
        let shared = shared.map(gate);
        Mixture { router, probabilities, num_per_token, experts, shared }
    }
}
