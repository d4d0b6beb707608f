//! The shape of state spaces.

use super::MULTIPLIER;
use crate::schema::{Section, Value};
use crate::spec::block::{Role, Site};
use crate::spec::family::StateSpaces;
use crate::spec::state_space::{StateHeads, StateNames, StateSpace};

/// What its layers have in common.
#[derive(Clone, Copy)]
pub(super) struct StateSpaceShape {
    heads: StateHeads,
    kernel_size: usize,
    has_conv_bias: bool,
    /// Whether the projections of its input and of its output add a bias.
    has_biases: [bool; 2],
    bounds: [f64; 2],
    names: &'static StateNames,
    is_output_bare: bool,
    has_norm: bool,
    scales: Option<[f64; 5]>,
}

/// Its shape, in a model that has it.
pub(super) fn shape(json: &mut Section, keys: &StateSpaces, hidden: usize) -> StateSpaceShape {
    let [(of_heads, num_heads), (of_groups, num_groups), (of_width, head_dim), (of_state, state_dim), (of_conv, conv)] =
        keys.counts;
    let num_heads = json.count(of_heads, num_heads, 1..=1 << 16);
    let num_groups = json.count(of_groups, num_groups, 1..=1 << 16);
    let mut width = head_dim.max(1);
    if keys.divides {
        let is_null = json.is_null("mamba_d_ssm");
        let expanded = json.count("mamba_expand", 2, 1..=1 << 8) * hidden;
        let inner = keys.width.filter(|_| !is_null);
        let inner = inner.map_or(expanded, |default| json.count("mamba_d_ssm", default, 1..=1 << 22));
        let is_given = json.value(of_width).is_some_and(|value| value.text() != Some("auto"));
        width = (inner / num_heads).max(1);
        if is_given {
            width = json.count(of_width, width, 1..=1 << 12);
        }
        if json.is_sound() && num_heads * width != inner {
            let sum = if keys.width.is_some() { "`mamba_d_ssm`" } else { "`mamba_expand` * `hidden_size`" };
            let message = format!("= {num_heads} of {width}, expected {sum} = {inner} in all");
            json.problem(of_heads, message);
        }
    } else {
        width = json.count(of_width, width, 1..=1 << 12);
    }
    if json.is_sound() && !num_heads.is_multiple_of(num_groups) {
        json.problem(of_groups, format!("= {num_groups} does not divide `{of_heads}` = {num_heads}"));
    }
    let silu = "\"silu\", which state spaces have behind their convolution";
    json.only(keys.activation, silu, |value| matches!(value.text(), Some("silu" | "swish")));
    let expected = "two numbers, the smaller one first";
    let bounds = match keys.least {
        Some((least, default)) => [json.number(least, default, 0.0..=1e3), f64::INFINITY],
        None => json.any("time_step_limit", [0.0, f64::INFINITY], expected, bounds),
    };
    let has_norm = !keys.asks_for_norm || json.boolean("mamba_rms_norm", false);
    if has_norm && keys.asks_for_norm {
        json.only("mamba_norm_before_gate", "false", |value| *value == Value::Boolean(false));
        if !json.has("mamba_norm_before_gate") {
            json.problem("mamba_norm_before_gate", "is missing, which puts the norm before the gate: expected false");
        }
    }
    let scales = keys.asks_for_norm.then(|| json.numbers("ssm_multipliers", [1.0; 5], MULTIPLIER));
    let [of_conv_bias, of_bias] = keys.biases;
    let of_input = json.boolean(of_bias, false);
    let state_dim = json.count(of_state, state_dim, 1..=1 << 12);
    StateSpaceShape {
        heads: StateHeads { num_heads, num_groups, head_dim: width, state_dim },
        kernel_size: json.count(of_conv, conv, 1..=64),
        has_conv_bias: json.boolean(of_conv_bias, true),
        has_biases: [of_input, keys.output_bias.map_or(of_input, |key| json.boolean(key, false))],
        bounds,
        names: keys.names,
        is_output_bare: keys.is_output_bare,
        has_norm,
        scales,
    }
}

/// transformers writes what is infinite as an object.
fn bounds(value: &Value) -> Result<[f64; 2], Option<String>> {
    let number = |value: &Value| match value {
        Value::Table(table) => {
            let text = table.get("__float__").and_then(|node| node.value().text());
            (text == Some("Infinity")).then_some(f64::INFINITY)
        }
        other => other.number(),
    };
    let Value::Array(bounds) = value else { return Err(None) };
    match bounds.iter().map(|node| number(node.value())).collect::<Option<Vec<_>>>().as_deref() {
        Some(&[least, most]) if least < most => Ok([least, most]),
        _ => Err(None),
    }
}

impl StateSpaceShape {
    /// The state space of a layer, whose linear layers are the first of `sites`.
    pub(super) fn of_layer(self, hidden: usize, sites: &mut Vec<Site>) -> StateSpace {
        let Self { heads, kernel_size, has_conv_bias, bounds, names, has_norm, scales, .. } = self;
        let inner = heads.inner_width();
        let mut add = |name: &str, shape, has_bias, role| {
            sites.push(Site { name: name.to_owned(), shape, has_bias, role });
            sites.len() - 1
        };
        let [input, output] = names.linears;
        let [of_input, of_output] = self.has_biases;
        let input = add(input, [inner + heads.xbc_width() + heads.num_heads, hidden], of_input, Role::Linear);
        let output =
            add(output, [hidden, inner], of_output, if self.is_output_bare { Role::Bare } else { Role::Linear });
        StateSpace { heads, kernel_size, has_conv_bias, bounds, input, output, names, has_norm, scales }
    }
}
