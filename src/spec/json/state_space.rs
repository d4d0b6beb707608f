//! The shape of state spaces.

use crate::schema::{Section, Value};
use crate::spec::block::{Role, Site};
use crate::spec::state_space::{STATE_NAMES, StateHeads, StateSpace};

/// What its layers have in common.
#[derive(Clone, Copy)]
pub(super) struct StateSpaceShape {
    heads: StateHeads,
    kernel_size: usize,
    has_conv_bias: bool,
    /// Whether the projections add a bias.
    has_bias: bool,
    bounds: [f64; 2],
}

/// Its shape, in a model that has it.
pub(super) fn shape(json: &mut Section, hidden: usize) -> StateSpaceShape {
    let num_heads = json.count("mamba_n_heads", 128, 1..=1 << 16);
    let num_groups = json.count("mamba_n_groups", 1, 1..=1 << 16);
    let inner = json.count("mamba_expand", 2, 1..=1 << 8) * hidden;
    let is_auto = json.value("mamba_d_head").and_then(Value::text) == Some("auto");
    let head_dim = if is_auto { None } else { json.value("mamba_d_head") };
    let head_dim = head_dim.map_or((inner / num_heads).max(1), |_| json.count("mamba_d_head", 64, 1..=1 << 12));
    if json.is_sound() && num_heads * head_dim != inner {
        let message = format!("= {num_heads} of {head_dim}, expected `mamba_expand` * `hidden_size` = {inner} in all");
        json.problem("mamba_n_heads", message);
    }
    if json.is_sound() && !num_heads.is_multiple_of(num_groups) {
        json.problem("mamba_n_groups", format!("= {num_groups} does not divide `mamba_n_heads` = {num_heads}"));
    }
    let silu = "\"silu\", which state spaces have behind their convolution";
    json.only("hidden_act", silu, |value| matches!(value.text(), Some("silu" | "swish")));
    let state_dim = json.count("mamba_d_state", 256, 1..=1 << 12);
    StateSpaceShape {
        heads: StateHeads { num_heads, num_groups, head_dim, state_dim },
        kernel_size: json.count("mamba_d_conv", 4, 1..=64),
        has_conv_bias: json.boolean("mamba_conv_bias", true),
        has_bias: json.boolean("mamba_proj_bias", false),
        bounds: json.any("time_step_limit", [0.0, f64::INFINITY], "two numbers, the smaller one first", bounds),
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
        let Self { heads, kernel_size, has_conv_bias, has_bias, bounds } = self;
        let inner = heads.inner_width();
        let mut add = |name: &str, shape| {
            sites.push(Site { name: name.to_owned(), shape, has_bias, role: Role::Linear });
            sites.len() - 1
        };
        let [input, output] = STATE_NAMES;
        let input = add(input, [inner + heads.xbc_width() + heads.num_heads, hidden]);
        let output = add(output, [hidden, inner]);
        StateSpace { heads, kernel_size, has_conv_bias, bounds, input, output }
    }
}
