//! What the layers of Gemma 4 differ in besides their windows: heads, where keys and values come from, and embeddings of their
//! own.

use super::Layer;
use crate::schema::{Node, Section, Value};
use crate::spec::LayerInputs;
use crate::spec::block::attention::Heads;
use crate::spec::family::{AttentionExtra, Family};

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
}

/// Reads its keys. The last layer has no window, whatever `layer_types` says.
pub(in crate::spec::json) fn read(
    json: &mut Section,
    family: &Family,
    layers: &mut [Layer],
    heads: Heads,
) -> Option<Gemma4> {
    let AttentionExtra::Gemma4 { layer_input_width } = family.attention_extra else { return None };
    if let Some(last) = layers.last_mut() {
        (last.is_local, last.window) = (false, None);
    }
    let is_local: Vec<bool> = layers.iter().map(|layer| layer.is_local).collect();
    let values_are_keys = json.boolean("attention_k_eq_v", false);
    let full = full_heads(json, &is_local, heads, values_are_keys);
    let num_layers = is_local.len();
    let num_sharing = json.count("num_kv_shared_layers", 0, 0..=num_layers);
    let gemma4 = Gemma4 {
        full,
        values_are_keys,
        first_sharing: num_layers - num_sharing,
        is_double_wide: json.boolean("use_double_wide_mlp", false),
        layer_input_width: json.count("hidden_size_per_layer_input", layer_input_width, 0..=1 << 16),
        is_local,
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
        if self.is_double_wide && layer >= self.first_sharing { 2 * intermediate } else { intermediate }
    }

    /// The embeddings of the layers.
    pub(in crate::spec::json) fn layer_inputs(&self, json: &mut Section, vocab_size: usize) -> Option<LayerInputs> {
        let width = self.layer_input_width;
        (width > 0).then(|| LayerInputs {
            vocab_size: json.count("vocab_size_per_layer_input", 262_144, vocab_size..=1 << 24),
            width,
        })
    }
}
