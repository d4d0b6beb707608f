//! What the layers of Gemma 3n and 4 differ in besides their windows: heads, where keys and values come from, and embeddings of
//! their own.

use super::Layer;
use crate::schema::{Node, Section, Value};
use crate::spec::block::attention::Heads;
use crate::spec::family::{AttentionExtra, Family};
use crate::spec::{LayerInputs, Streams};

/// What its layers differ in.
pub(in crate::spec::json) struct Gemma4 {
    /// The heads of layers without a window.
    pub(in crate::spec::json) full: Heads,
    /// Whether values are keys in layers without a window.
    pub(in crate::spec::json) values_are_keys: bool,
    /// The first layer that uses the keys and values of an earlier one.
    first_sharing: usize,
    /// Whether feed-forward layers are twice as wide from there on.
    is_double_wide: bool,
    /// Width of the embeddings of a layer's own; 0: there are none.
    pub(in crate::spec::json) layer_input_width: usize,
    /// Whether layers have a window.
    is_local: Vec<bool>,
    /// Widths of the feed-forward layers, if they may differ, and shares of the gates that become 0 (Gemma 3n).
    widths: Vec<usize>,
    shares: Vec<f64>,
    pub(in crate::spec::json) streams: Option<Streams>,
    pub(in crate::spec::json) laurel_rank: Option<usize>,
}

/// Reads its keys. The last layer has no window, whatever `layer_types` says.
pub(in crate::spec::json) fn read(
    json: &mut Section,
    family: &Family,
    layers: &mut [Layer],
    heads: Heads,
) -> Option<Gemma4> {
    let layer_input_width = match family.attention_extra {
        AttentionExtra::Gemma4 { layer_input_width } => layer_input_width,
        AttentionExtra::Gemma3n => 256,
        _ => return None,
    };
    let is_gemma4 = family.is_gemma4();
    if let Some(last) = layers.last_mut().filter(|_| is_gemma4) {
        (last.is_local, last.window) = (false, None);
    }
    let is_local: Vec<bool> = layers.iter().map(|layer| layer.is_local).collect();
    let values_are_keys = is_gemma4 && json.boolean("attention_k_eq_v", false);
    let full = if is_gemma4 { full_heads(json, &is_local, heads, values_are_keys) } else { heads };
    let num_layers = is_local.len();
    let default = if is_gemma4 { 0 } else { num_layers.min(15) };
    let num_sharing = json.count("num_kv_shared_layers", default, 0..=num_layers);
    let least = usize::from(!is_gemma4);
    let gemma4 = Gemma4 {
        full,
        values_are_keys,
        first_sharing: num_layers - num_sharing,
        is_double_wide: is_gemma4 && json.boolean("use_double_wide_mlp", false),
        layer_input_width: json.count("hidden_size_per_layer_input", layer_input_width, least..=1 << 16),
        is_local,
        widths: if is_gemma4 { Vec::new() } else { widths(json, num_layers) },
        shares: if is_gemma4 { Vec::new() } else { shares(json, num_layers) },
        streams: (!is_gemma4).then(|| streams(json)),
        laurel_rank: (!is_gemma4).then(|| json.count("laurel_rank", 64, 1..=1 << 16)),
    };
    if (gemma4.first_sharing..num_layers).any(|layer| gemma4.key_value_layer(layer).is_none()) {
        let message = format!("= {num_sharing} leaves no layer whose keys and values the others of its type could use");
        json.problem("num_kv_shared_layers", message);
    }
    Some(gemma4)
}

/// The heads of layers without a window: by `per_layer_config` as transformers writes it, or the keys of published models.
fn full_heads(json: &mut Section, is_local: &[bool], heads: Heads, values_are_keys: bool) -> Heads {
    let [mut head_dim, mut num_kv_heads] = [heads.head_dim, heads.num_kv_heads];
    if let Some(Value::Table(layers)) = json.value("per_layer_config") {
        let of_layer = |layer: usize| {
            let overrides = layers.get(&layer.to_string()).map(Node::value);
            let count = |key, default| match overrides {
                Some(Value::Table(table)) => match table.get(key).map(Node::value) {
                    Some(Value::Integer(count)) => usize::try_from(*count).unwrap_or(0),
                    _ => default,
                },
                _ => default,
            };
            [count("head_dim", heads.head_dim), count("num_key_value_heads", heads.num_kv_heads)]
        };
        let of_layers =
            |local| is_local.iter().enumerate().filter(move |(_, is)| **is == local).map(|(layer, _)| layer);
        let of_full: Vec<_> = of_layers(false).map(of_layer).collect();
        let of_local = of_layers(true).map(of_layer);
        [head_dim, num_kv_heads] = of_full.first().copied().unwrap_or([head_dim, num_kv_heads]);
        let are_alike = of_full.iter().all(|it| *it == [head_dim, num_kv_heads]);
        if !are_alike || of_local.into_iter().any(|it| it != [heads.head_dim, heads.num_kv_heads]) {
            json.problem(
                "per_layer_config",
                "has other heads than one kind for layers with and one for layers without a window",
            );
        }
    } else {
        head_dim = json.count("global_head_dim", 512, 1..=1 << 16);
        if values_are_keys {
            num_kv_heads = json.count("num_global_key_value_heads", num_kv_heads, 1..=1 << 16);
        }
    }
    if json.is_sound() {
        crate::spec::json::check_heads(json, None, heads.num_heads, num_kv_heads.max(1), head_dim);
    }
    Heads { num_kv_heads, head_dim, ..heads }
}

impl Gemma4 {
    /// The layer whose keys and values this one uses, if it has none of its own.
    pub(in crate::spec::json) fn key_value_layer(&self, layer: usize) -> Option<usize> {
        let of_type = |earlier: &usize| self.is_local[*earlier] == self.is_local[layer];
        if layer < self.first_sharing { None } else { (0..self.first_sharing).rev().find(of_type) }
    }

    /// The width of a feed-forward layer.
    pub(in crate::spec::json) fn intermediate(&self, layer: usize, intermediate: usize) -> usize {
        if let Some(width) = self.widths.get(layer) {
            return *width;
        }
        if self.is_double_wide && layer >= self.first_sharing { 2 * intermediate } else { intermediate }
    }

    /// The embeddings of the layers.
    pub(in crate::spec::json) fn layer_inputs(&self, json: &mut Section, vocab_size: usize) -> Option<LayerInputs> {
        let width = self.layer_input_width;
        // Tokens of images and sound have none of their own.
        let least = if self.streams.is_some() { 1 } else { vocab_size };
        (width > 0).then(|| LayerInputs {
            vocab_size: json.count("vocab_size_per_layer_input", 262_144, least..=1 << 24),
            width,
        })
    }

    /// By how many standard deviations a gate is above its mean where it is not 0.
    pub(in crate::spec::json) fn cutoff(&self, layer: usize) -> Option<f64> {
        self.shares.get(layer).filter(|share| **share > 0.0).map(|share| quantile(*share))
    }
}

fn streams(json: &mut Section) -> Streams {
    json.only("altup_active_idx", "0", |value| value.number() == Some(0.0));
    json.only("altup_correct_scale", "true", |value| *value == Value::Boolean(true));
    let clip = (!json.is_null("altup_coef_clip")).then(|| json.number("altup_coef_clip", 120.0, 1e-3..=1e6));
    Streams { count: json.count("altup_num_inputs", 4, 2..=64), clip }
}

/// `intermediate_size`, of all layers or of each.
fn widths(json: &mut Section, num_layers: usize) -> Vec<usize> {
    let width = |value: &Value| match value {
        Value::Integer(width) => usize::try_from(*width).ok().filter(|width| (1..=1 << 22).contains(width)),
        _ => None,
    };
    json.any("intermediate_size", vec![16_384; num_layers], "a width, or one for each layer", |value| match value {
        Value::Array(all) if all.len() == num_layers => {
            all.iter().map(|node| width(node.value())).collect::<Option<_>>().ok_or(None)
        }
        one => width(one).map(|width| vec![width; num_layers]).ok_or(None),
    })
}

/// `activation_sparsity_pattern`.
fn shares(json: &mut Section, num_layers: usize) -> Vec<f64> {
    let num_sparse = if num_layers > 10 { 10 } else { 0 };
    let default = (0..num_layers).map(|layer| if layer < num_sparse { 0.95 } else { 0.0 }).collect();
    let share = |value: &Value| value.number().filter(|share| (0.0..0.9999).contains(share));
    json.any("activation_sparsity_pattern", default, "a share below 1 for each layer, or null", |value| match value {
        Value::Array(all) if all.len() == num_layers => {
            all.iter().map(|node| share(node.value())).collect::<Option<_>>().ok_or(None)
        }
        _ => Err(None),
    })
}

/// Below which a standard normal distribution has this share: Newton's method, with Simpson's rule for the share below a number.
fn quantile(share: f64) -> f64 {
    let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    let below = |x: f64| {
        let step = x / 200.0;
        let inner = (1..200).map(|at| if at % 2 == 1 { 4.0 } else { 2.0 } * density(f64::from(at) * step));
        0.5 + step / 3.0 * (density(0.0) + density(x) + inner.sum::<f64>())
    };
    (0..60).fold(0.0, |x, _| x + (share - below(x)) / density(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (share, expected) in [(0.95, 1.644_853_626_951_472_7), (0.5, 0.0), (0.1, -1.281_551_565_544_600_4)] {
            assert!((quantile(share) - expected).abs() < 1e-9, "{share}: {}", quantile(share));
        }
    }
}
