//! The layers of a model: which have a window, and what is in them.

pub(super) mod gemma4;

use super::MULTIPLIER;
use super::delta_net::DeltaNetShape;
use super::experts::Mixtures;
use super::state_space::StateSpaceShape;
use crate::schema::{Node, Section, Value};
use crate::spec::block::attention::{Attention, Heads, Qkv, QueryKeyNorms};
use crate::spec::block::{
    Activation, Block, FUSED_NAMES, Gated, LAUREL_NAMES, LAYER_INPUT_NAMES, Laurel, LayerInput, Projections, Role,
    SharedExpert, Site, SiteId, Sublayer, SublayerKind, TwoBranches,
};
use crate::spec::family::{Arrangement, AttentionExtra, Family, LatentWidths, NoRope, Scales, Windows};
use crate::spec::{GATE_NAME, QueryGrowth, SHORT_CONV_NAMES, ShortConv};
use gemma4::Gemma4;

/// What layers differ in.
#[derive(Clone, Copy)]
pub(super) struct Layer {
    /// Whether `layer_types` says `sliding_attention`.
    pub(super) is_local: bool,
    pub(super) has_rope: bool,
    /// Whether it has linear attention, a short convolution or a state space in place of attention.
    pub(super) has_other: bool,
    pub(super) window: Option<usize>,
    pub(super) chunk: Option<usize>,
    /// What it is alone; absent: it has what mixes tokens and what feeds forward.
    pub(super) alone: Option<Alone>,
}

/// What a layer of one sublayer is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Alone {
    StateSpace,
    Attention,
    FeedForward,
    Experts,
}

impl Layer {
    /// A layer of one sublayer.
    pub(super) fn alone(kind: Alone) -> Self {
        let has_other = kind == Alone::StateSpace;
        Self { is_local: false, has_rope: false, has_other, window: None, chunk: None, alone: Some(kind) }
    }
}

/// What each layer is, by `layers_block_type`, or the letters of `hybrid_override_pattern` (Nemotron-H); empty after a problem.
pub(super) fn kinds_of_each(json: &mut Section) -> Vec<Alone> {
    const NAMES: [(&str, &str, Alone); 6] = [
        ("mamba", "M", Alone::StateSpace),
        ("linear_attention", "M", Alone::StateSpace),
        ("attention", "*", Alone::Attention),
        ("full_attention", "*", Alone::Attention),
        ("mlp", "-", Alone::FeedForward),
        ("moe", "E", Alone::Experts),
    ];
    let of =
        |is: &dyn Fn(&(&str, &str, Alone)) -> bool| NAMES.iter().find(|it| is(it)).map(|(.., kind)| *kind).ok_or(None);
    let named = |value: &Value| value.text().map_or(Err(None), |kind| of(&|(name, ..)| *name == kind));
    let pattern = |value: &Value| -> Result<Vec<Alone>, Option<String>> {
        let letters = value.text().ok_or(None)?;
        letters.chars().map(|letter| of(&|(_, known, _)| known.starts_with(letter))).collect()
    };
    let list = |value: &Value| -> Result<Vec<Alone>, Option<String>> {
        let Value::Array(kinds) = value else { return Err(None) };
        kinds.iter().map(|node| named(node.value())).collect()
    };
    if json.value("layers_block_type").is_none() {
        if json.value("hybrid_override_pattern").is_none() {
            json.problem("layers_block_type", "is missing: it says what each layer is");
        }
        return json.any("hybrid_override_pattern", Vec::new(), "letters M, E, * and -, one for each layer", pattern);
    }
    let expected = "\"mamba\", \"attention\", \"mlp\" or \"moe\" for each layer";
    json.any("layers_block_type", Vec::new(), expected, list)
}

/// Every layer, from `sliding_window` and the keys that choose its layers.
pub(super) fn layers(json: &mut Section, family: &Family, num_layers: usize) -> Vec<Layer> {
    let (default, first, pattern) = match family.windows {
        Windows::Never => (None, 0, 0),
        Windows::Everywhere(default) => (default.or_else(|| json.has("sliding_window").then_some(1)), 0, 0),
        Windows::LaterLayers { .. } if !json.boolean("use_sliding_window", false) => (None, 0, 0),
        Windows::LaterLayers { default, first } => {
            (Some(default), json.count("max_window_layers", first, 0..=1 << 32), 0)
        }
        Windows::AllButEvery { default, pattern } => {
            // EXAONE 4 has letters there, which say no more than the list.
            let is_said =
                json.has("layer_types") && json.value("sliding_window_pattern").and_then(Value::text).is_some();
            let pattern = if is_said { pattern } else { json.count("sliding_window_pattern", pattern, 1..=1 << 16) };
            (Some(default), 0, pattern)
        }
        Windows::AllButFirst { default, pattern } => (Some(default), 0, pattern),
    };
    let is_null = json.is_null("sliding_window");
    let window = default.filter(|_| !is_null).map(|default| json.count("sliding_window", default, 1..=1 << 32));
    let kinds = match json.value("layer_types") {
        Some(Value::Array(kinds)) if kinds.len() == num_layers => Some(kinds),
        None => None,
        Some(_) => {
            json.problem("layer_types", format!("must name one type for each of the {num_layers} layers"));
            None
        }
    };
    // What `layer_types` calls the layers without attention.
    let other: &[&str] = match family.delta_heads {
        Some(_) => &["linear_attention"],
        None if family.has_short_convs => &["conv"],
        None if family.state_spaces.is_some() => &["mamba", "linear_attention", "hybrid"],
        None => &[],
    };
    let full = match family.model_type {
        "bamba" => attention_layers(json, "attn_layer_indices"),
        _ if family.has_short_convs => attention_layers(json, "full_attn_idxs"),
        _ => None,
    };
    let pattern =
        if family.delta_heads.is_some() { json.count("full_attention_interval", 4, 1..=1 << 16) } else { pattern };
    // Granite 4's first files call it `attention`.
    let is_full = |kind: &Value| matches!(kind.text(), Some("full_attention" | "attention"));
    // Muse Glimmer's are counted from the last layer.
    let shift = if family.is_muse() { pattern - num_layers % pattern } else { 0 };
    let mut layers = Vec::with_capacity(num_layers);
    for layer in 0..num_layers {
        let kind = kinds.map(|kinds| kinds[layer].value());
        let is_first = matches!(family.windows, Windows::AllButFirst { .. });
        let is_last = pattern > 0 && (layer + usize::from(!is_first) + shift) % pattern == 0;
        let is_full = match (kind, &full) {
            (Some(kind), _) if family.has_chunks() => kind.text() == Some("chunked_attention") || is_full(kind),
            (Some(kind), _) => is_full(kind),
            (None, Some(full)) => full.contains(&layer),
            (None, None) if family.model_type == "flint" => layer < 2 || layer % 4 == 1 || layer + 1 == num_layers,
            (None, None) => layer < first || is_last || family.has_short_convs,
        };
        let is_other = |kind: &Value| kind.text().is_some_and(|kind| other.contains(&kind));
        let has_other = !other.is_empty() && kind.map_or(!is_full, is_other);
        let is_known = is_full
            || has_other
            || (window.is_some() && kind.is_none_or(|kind| kind.text() == Some("sliding_attention")));
        if let Some(kind) = kind.filter(|_| !is_known) {
            let message = format!("names {} for layer {layer}, which is not supported here", kind.shown());
            json.problem("layer_types", message);
            break;
        }
        let window = window.filter(|_| !is_full);
        layers.push(Layer { is_local: !is_full, has_rope: true, has_other, window, chunk: None, alone: None });
    }
    without_rope(json, family, &mut layers);
    if family.has_chunks() && !json.is_null("attention_chunk_size") {
        let chunk = json.count("attention_chunk_size", 8192, 1..=1 << 32);
        for (layer, at) in layers.iter_mut().enumerate() {
            let is_named = |kinds: &Vec<Node>| kinds[layer].value().text() == Some("chunked_attention");
            at.chunk = kinds.map_or(at.has_rope, is_named).then_some(chunk);
        }
    }
    layers
}

/// The layers that Bamba's configs, and LFM2's first ones, list as those with attention.
fn attention_layers(json: &mut Section, key: &'static str) -> Option<Vec<usize>> {
    json.value(key)?;
    Some(json.any(key, Vec::new(), "a list of layers, or null", super::experts::layers))
}

/// Notes which layers have no rotary embedding.
fn without_rope(json: &mut Section, family: &Family, layers: &mut [Layer]) {
    let interval = match family.no_rope {
        NoRope::Never => return,
        NoRope::LastOf(interval) => interval,
        NoRope::Bases => {
            let base = |layer: &Layer| if family.is_muse() && layer.window.is_none() { 0.0 } else { 1.0 };
            let expected = "a number for each layer, 0 without a rotary embedding";
            let default = layers.iter().map(base).collect();
            let bases = json.any("layer_rope_theta", default, expected, |value| match value {
                Value::Array(all) if all.len() == layers.len() => {
                    all.iter().map(|node| node.value().number()).collect::<Option<Vec<_>>>().ok_or(None)
                }
                _ => Err(None),
            });
            return layers.iter_mut().zip(bases).for_each(|(layer, base)| layer.has_rope = base != 0.0);
        }
        NoRope::Full => return layers.iter_mut().for_each(|layer| layer.has_rope = layer.window.is_some()),
        NoRope::FullUnlessNull => {
            let is_null = json.is_null("sliding_window");
            return layers.iter_mut().for_each(|layer| layer.has_rope = is_null || layer.window.is_some());
        }
        NoRope::All => return layers.iter_mut().for_each(|layer| layer.has_rope = false),
        NoRope::UnlessNamed => {
            if !json.has("layer_types") {
                let message =
                    "is missing: it names the layers with attention, without which transformers takes all for Mamba's";
                json.problem("layer_types", message);
            }
            let has_rope = json.value("position_embedding_type").and_then(Value::text) == Some("rope");
            return layers.iter_mut().for_each(|layer| layer.has_rope = has_rope);
        }
    };
    json.only("use_sliding_window", "false", |value| *value == Value::Boolean(false));
    let interval = json.count("no_rope_layer_interval", interval, 1..=1 << 16);
    let listed = match json.value("no_rope_layers") {
        Some(Value::Array(listed)) if listed.len() == layers.len() => Some(listed),
        // Llama 4's may be empty.
        Some(Value::Array(listed)) if listed.is_empty() => None,
        None => None,
        Some(_) => {
            let message = format!("must have one number for each of the {} layers: 0 without, 1 with", layers.len());
            return json.problem("no_rope_layers", message);
        }
    };
    for (index, layer) in layers.iter_mut().enumerate() {
        let by_interval = !(index + 1).is_multiple_of(interval);
        layer.has_rope = listed.map_or(by_interval, |listed| listed[index].value().number() != Some(0.0));
    }
}

/// What the layers of a model have in common.
pub(super) struct Widths {
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) heads: Heads,
    pub(super) activation: Activation,
    pub(super) delta_net: Option<DeltaNetShape>,
    /// Tokens that short convolutions see.
    pub(super) short_conv: Option<usize>,
    pub(super) state_space: Option<StateSpaceShape>,
    pub(super) latent: Option<LatentWidths>,
    pub(super) gemma4: Option<Gemma4>,
    pub(super) qk_norms: Option<QueryKeyNorms>,
    /// Those of [`Family`], as far as they are there.
    pub(super) norms: [[Option<&'static str>; 2]; 2],
    /// Whether the projections of an attention's input, that of its output and the feed-forward layers add a bias.
    pub(super) biases: [bool; 3],
    /// Factor of the outputs of sublayers.
    pub(super) output_scale: Option<f64>,
    pub(super) mixtures: Option<Mixtures>,
    pub(super) arrangement: Arrangement,
    pub(super) factors: PartFactors,
    /// In layers without a rotary embedding, and with one.
    pub(super) query_growths: [Option<QueryGrowth>; 2],
}

/// Factors of the inputs and outputs of sublayers, where they are not 1 (Falcon-H1).
#[derive(Clone, Copy, Default)]
pub(super) struct PartFactors {
    attention: [Option<f64>; 2],
    space: [Option<f64>; 2],
    /// Of the gate, and of the output.
    feed_forward: [Option<f64>; 2],
}

impl PartFactors {
    pub(super) fn read(json: &mut Section, family: &Family) -> Self {
        if family.scales != Scales::Parts {
            return Self::default();
        }
        let mut pair = |keys: [&'static str; 2]| keys.map(|key| Some(json.number(key, 1.0, MULTIPLIER)));
        Self {
            attention: pair(["attention_in_multiplier", "attention_out_multiplier"]),
            space: pair(["ssm_in_multiplier", "ssm_out_multiplier"]),
            feed_forward: json.numbers("mlp_multipliers", [1.0; 2], MULTIPLIER).map(Some),
        }
    }

    /// Of the input and of the output of a sublayer.
    fn of(self, kind: &SublayerKind) -> [Option<f64>; 2] {
        match kind {
            SublayerKind::Attention(_) => self.attention,
            SublayerKind::StateSpace(_) => self.space,
            SublayerKind::Gated(_) => [None, self.feed_forward[1]],
            _ => [None; 2],
        }
    }
}

impl Widths {
    /// The block of layer `index`.
    pub(super) fn block(&self, family: &Family, index: usize, layer: Layer) -> Block {
        let Self { hidden, output_scale, .. } = *self;
        let gemma4 = self.gemma4.as_ref();
        let mut sites = Vec::new();
        let has_mixing = !matches!(layer.alone, Some(Alone::FeedForward | Alone::Experts));
        let mixing = has_mixing.then(|| self.mixing(family, index, layer, &mut sites));
        let has_second = self.arrangement == Arrangement::MixersBeside;
        let second = has_second.then(|| SublayerKind::Attention(self.attention(family, index, layer, &mut sites)));
        let has_feed_forward = !matches!(layer.alone, Some(Alone::StateSpace | Alone::Attention));
        let laurel = gemma4.and_then(|gemma4| gemma4.laurel_rank).map(|rank| {
            let [left, right] = LAUREL_NAMES;
            let left = add(&mut sites, left, [rank, hidden], false);
            SublayerKind::Laurel(Laurel { rank, left, right: add(&mut sites, right, [hidden, rank], false) })
        });
        let feed_forward = has_feed_forward.then(|| self.feed_forward(family, index, layer, &mut sites));
        let [of_mixing, of_feed_forward] = self.norms;
        let of_laurel = [of_mixing[0], Some("laurel.post_laurel_norm")];
        let is_beside = matches!(self.arrangement, Arrangement::Beside | Arrangement::NormedApart);
        let has_one_norm = self.arrangement == Arrangement::Beside;
        let of_feed_forward = if has_one_norm { of_mixing } else { of_feed_forward };
        let kinds = [
            (mixing, of_mixing, false),
            (second, of_mixing, true),
            (laurel, of_laurel, true),
            (feed_forward, of_feed_forward, is_beside),
        ];
        let mut sublayers: Vec<_> = kinds
            .into_iter()
            .filter_map(|(kind, norms, is_beside)| Some((kind?, norms, is_beside)))
            .map(|(kind, [norm_before, norm_after], is_beside)| {
                // Each of the two has a norm of its own.
                let norm_before = norm_before.filter(|_| !matches!(kind, SublayerKind::TwoBranches(_)));
                let [input_scale, of_output] = self.factors.of(&kind);
                let output_scale = of_output.or(output_scale);
                Sublayer { norm_before, norm_after, input_scale, output_scale, is_beside, kind }
            })
            .collect();
        if let Some(width) = gemma4.map(|gemma4| gemma4.layer_input_width).filter(|width| *width > 0) {
            let [gate, projection] = LAYER_INPUT_NAMES;
            let [gate, projection] = [(gate, [width, hidden]), (projection, [hidden, width])]
                .map(|(name, shape)| add(&mut sites, name, shape, false));
            let kind = SublayerKind::LayerInput(LayerInput { activation: self.activation, width, gate, projection });
            let norm_after = Some("post_per_layer_input_norm");
            let norm_before = None;
            sublayers.push(Sublayer {
                norm_before,
                norm_after,
                input_scale: None,
                output_scale,
                is_beside: false,
                kind,
            });
        }
        let streams = gemma4.and_then(|gemma4| gemma4.streams);
        Block { sites, sublayers, has_scale: family.is_gemma4(), streams }
    }

    /// What mixes the tokens of a layer.
    fn mixing(&self, family: &Family, index: usize, layer: Layer, sites: &mut Vec<Site>) -> SublayerKind {
        let Self { hidden, .. } = *self;
        match (self.delta_net, self.short_conv, self.state_space) {
            (Some(shape), ..) if layer.has_other => SublayerKind::DeltaNet(shape.of_layer(family, hidden, sites)),
            (_, Some(kernel_size), _) if layer.has_other => {
                let [input, output] = SHORT_CONV_NAMES;
                let input = add(sites, input, [3 * hidden, hidden], false);
                let output = add(sites, output, [hidden, hidden], false);
                SublayerKind::ShortConv(ShortConv { kernel_size, input, output })
            }
            (.., Some(shape)) if layer.has_other => SublayerKind::StateSpace(shape.of_layer(hidden, sites)),
            _ => SublayerKind::Attention(self.attention(family, index, layer, sites)),
        }
    }

    /// What feeds forward in a layer.
    fn feed_forward(&self, family: &Family, index: usize, layer: Layer, sites: &mut Vec<Site>) -> SublayerKind {
        let Self { hidden, .. } = *self;
        let gemma4 = self.gemma4.as_ref();
        let intermediate = gemma4.map_or(self.intermediate, |gemma4| gemma4.intermediate(index, self.intermediate));
        let mixtures =
            self.mixtures.as_ref().filter(|mixtures| mixtures.is_in[index] && layer.alone != Some(Alone::FeedForward));
        let mixture = |mixtures: &Mixtures, sites: &mut Vec<Site>| {
            mixtures.mixture(self.activation, hidden, |site| {
                sites.push(site);
                sites.len() - 1
            })
        };
        match mixtures {
            None => {
                let cutoff = gemma4.and_then(|gemma4| gemma4.cutoff(index));
                SublayerKind::Gated(Gated { cutoff, ..self.gated(family, intermediate, sites) })
            }
            Some(mixtures) if gemma4.is_none() => {
                let mut mixture = mixture(mixtures, sites);
                if mixtures.beside_dense {
                    let gated = self.gated(family, intermediate, sites);
                    mixture.shared = Some(SharedExpert { gated, gate: None });
                }
                SublayerKind::Mixture(mixture)
            }
            Some(mixtures) => {
                let gated = self.gated(family, intermediate, sites);
                SublayerKind::TwoBranches(TwoBranches { gated, mixture: mixture(mixtures, sites) })
            }
        }
    }

    /// A feed-forward layer of this width.
    fn gated(&self, family: &Family, intermediate_size: usize, sites: &mut Vec<Site>) -> Gated {
        let Self { hidden, biases: [.., has_bias], activation, .. } = *self;
        let [.., gate_name, up_name, down_name] = family.names.sites;
        let inwards = [intermediate_size, hidden];
        let gate_up = if family.fused[1] {
            let site = add(sites, family.names.gate_up, [2 * intermediate_size, hidden], has_bias);
            Projections::Fused { site, widths: [intermediate_size; 2] }
        } else if !family.gated {
            Projections::Same(add(sites, up_name, inwards, has_bias))
        } else {
            Projections::Apart([gate_name, up_name].map(|name| add(sites, name, inwards, has_bias)))
        };
        let down = add(sites, down_name, [hidden, intermediate_size], has_bias);
        let gate_scale = self.factors.feed_forward[0];
        Gated { activation, gate_scale, cutoff: None, intermediate_size, gate_up, down }
    }

    /// The attention of a layer, whose linear layers are the first of `sites`.
    fn attention(&self, family: &Family, index: usize, layer: Layer, sites: &mut Vec<Site>) -> Attention {
        let Self { hidden, biases: [of_qkv, of_output, _], .. } = *self;
        if let Some(latent) = self.latent {
            let query_growth = self.query_growths[1];
            return Attention { query_growth, ..latent.of_layer(self.heads, hidden, [of_qkv, of_output], sites) };
        }
        let gemma4 = self.gemma4.as_ref();
        let full = gemma4.filter(|_| !layer.is_local);
        let heads = Heads { window: layer.window, chunk: layer.chunk, ..full.map_or(self.heads, |gemma4| gemma4.full) };
        let (query, key_value) = (heads.query_width(), heads.key_value_width());
        let [q_name, k_name, v_name, output_name, ..] = family.names.sites;
        let qkv = if family.fused[0] {
            let widths = [query, key_value, key_value];
            let site = add(sites, FUSED_NAMES[0], [query + 2 * key_value, hidden], of_qkv);
            Qkv::All(Projections::Fused { site, widths })
        } else if family.attention_extra == AttentionExtra::ByHead {
            Qkv::ByHead(add(sites, q_name, [3 * query, hidden], of_qkv))
        } else {
            let of_queries = if family.attention_extra == AttentionExtra::OutputGate { 2 * query } else { query };
            let mut project = |(name, width)| add(sites, name, [width, hidden], of_qkv);
            let [q, k, v] = [(q_name, of_queries), (k_name, key_value), (v_name, key_value)];
            match gemma4.and_then(|gemma4| gemma4.key_value_layer(index)) {
                Some(layer) => Qkv::OfLayer { queries: project(q), layer },
                None if full.is_some_and(|gemma4| gemma4.values_are_keys) => {
                    Qkv::ValuesAreKeys(Projections::Apart([q, k].map(project)))
                }
                None => Qkv::All(Projections::Apart([q, k, v].map(project))),
            }
        };
        let gate = family.is_muse().then(|| add(sites, GATE_NAME, [query, hidden], false));
        let output = add(sites, output_name, [hidden, query], of_output);
        let rope = usize::from(layer.is_local && family.local_rope_theta.is_some());
        let rope = layer.has_rope.then_some(rope);
        let query_key_norms = self.qk_norms.filter(|_| rope.is_some() || !family.has_chunks());
        let [has_sinks, has_output_gate] =
            [AttentionExtra::Sinks, AttentionExtra::OutputGate].map(|extra| family.attention_extra == extra);
        let (has_value_norm, norm_names) = (gemma4.is_some(), family.names.head_norms);
        Attention {
            heads,
            rope,
            query_growth: self.query_growths[usize::from(rope.is_some())],
            query_key_norms,
            norm_names,
            has_sinks,
            has_output_gate,
            gate,
            has_value_norm,
            qkv,
            output,
        }
    }
}

/// Adds a linear layer that all tokens pass.
fn add(sites: &mut Vec<Site>, name: &str, shape: [usize; 2], has_bias: bool) -> SiteId {
    sites.push(Site { name: name.to_owned(), shape, has_bias, role: Role::Linear });
    sites.len() - 1
}
