//! The shape of linear attention.

use crate::schema::Section;
use crate::spec::block::{DeltaNetInputs, Role, Site};
use crate::spec::family::Family;
use crate::spec::{DELTA_NET_FUSED_NAMES, DELTA_NET_NAMES, DeltaHeads, DeltaNet};

/// What its layers have in common.
#[derive(Clone, Copy)]
pub(super) struct DeltaNetShape {
    heads: DeltaHeads,
    kernel_size: usize,
}

/// Limit on the width of all heads.
const MAX_WIDTH: usize = 1 << 22;

/// Its shape, in a family that has it.
pub(super) fn shape(json: &mut Section, family: &Family) -> Option<DeltaNetShape> {
    let DeltaHeads { num_key_heads, num_value_heads, key_head_dim, value_head_dim } = family.delta_heads?;
    let heads = DeltaHeads {
        num_key_heads: json.count("linear_num_key_heads", num_key_heads, 1..=1 << 16),
        num_value_heads: json.count("linear_num_value_heads", num_value_heads, 1..=1 << 16),
        key_head_dim: json.count("linear_key_head_dim", key_head_dim, 1..=1 << 12),
        value_head_dim: json.count("linear_value_head_dim", value_head_dim, 1..=1 << 12),
    };
    let kernel_size = json.count("linear_conv_kernel_dim", 4, 1..=64);
    if json.is_sound() && !heads.num_value_heads.is_multiple_of(heads.num_key_heads) {
        let (values, keys) = (heads.num_value_heads, heads.num_key_heads);
        let message = format!("= {values} is not a multiple of `linear_num_key_heads` = {keys}");
        json.problem("linear_num_value_heads", message);
    }
    if json.is_sound() && heads.qkv_width() > MAX_WIDTH {
        let message =
            format!("makes queries, keys and values {} wide, expected at most {MAX_WIDTH}", heads.qkv_width());
        json.problem("linear_num_value_heads", message);
    }
    Some(DeltaNetShape { heads, kernel_size })
}

impl DeltaNetShape {
    /// The linear attention of a layer, whose linear layers are the first of `sites`.
    pub(super) fn of_layer(self, family: &Family, hidden: usize, sites: &mut Vec<Site>) -> DeltaNet {
        let Self { heads, kernel_size } = self;
        let mut add = |name: &str, shape| {
            sites.push(Site { name: name.to_owned(), shape, has_bias: false, role: Role::Linear });
            sites.len() - 1
        };
        let [qkv, z, b, a, output] = DELTA_NET_NAMES;
        let widths = [heads.qkv_width(), heads.value_width(), heads.num_value_heads, heads.num_value_heads];
        let mut project = |(name, width)| add(name, [width, hidden]);
        let inputs = if family.fused[2] {
            let [qkvz, ba] = DELTA_NET_FUSED_NAMES;
            DeltaNetInputs::ByKeyHead([(qkvz, widths[0] + widths[1]), (ba, widths[2] + widths[3])].map(project))
        } else {
            DeltaNetInputs::Apart([(qkv, widths[0]), (z, widths[1]), (b, widths[2]), (a, widths[3])].map(&mut project))
        };
        DeltaNet { heads, kernel_size, inputs, output: add(output, [hidden, heads.value_width()]) }
    }
}
