//! Rows and columns of tensors that lie in another order in GGUF files than in Hugging Face's.

use crate::spec::delta_net::{A_LOG, CONV, DELTA_NET_FUSED_NAMES, DELTA_NET_NAMES, DT_BIAS};
use crate::spec::{Block, DeltaHeads, DeltaNetInputs, ModelConfig, Rope, RopePairs};

/// Where the rows of a tensor lie, or its columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Whether it is the columns that lie so.
    pub is_of_columns: bool,
    kind: OrderKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OrderKind {
    /// Those of the two halves of each head take turns: llama.cpp turns neighbours together, Hugging Face one of each half.
    Halves { head_dim: usize },
    /// Of the first `width` of each head those that turn together lie in two halves, where Hugging Face has them side by side: llama.cpp
    /// does so where tokens have three positions.
    Neighbours { head_dim: usize, width: usize },
    /// Behind the first so many, value heads of `width`: the first one of every key head, then every second one, and so on,
    /// where Hugging Face has those of a key head side by side.
    ValueHeads { first: usize, heads: DeltaHeads, width: usize },
    /// Queries, keys, values and gates of all key heads, where Hugging Face has those of a key head side by side.
    KeyHeads(DeltaHeads),
}

impl Order {
    /// The order of a tensor such as `model.layers.0.self_attn.q_proj.weight`; `None` where it is the same.
    #[must_use]
    pub fn of(config: &ModelConfig, name: &str) -> Option<Self> {
        if let Some(net) = config.blocks.iter().find_map(Block::delta_net) {
            let is_of_key_heads = name.contains(DELTA_NET_FUSED_NAMES[0]);
            return match net.inputs {
                DeltaNetInputs::Apart(_) => Self::of_value_heads(net.heads, name),
                DeltaNetInputs::ByKeyHead(_) => {
                    is_of_key_heads.then_some(Self { is_of_columns: false, kind: OrderKind::KeyHeads(net.heads) })
                }
            };
        }
        let Rope { head_dim, width, pairs, axes, .. } = config.ropes[0];
        let kind = match (axes, pairs) {
            _ if !(name.contains("q_proj") || name.contains("k_proj")) => return None,
            (Some(_), RopePairs::Neighbours) => OrderKind::Neighbours { head_dim, width },
            _ if config.family().gguf.interleaved => OrderKind::Halves { head_dim },
            _ => return None,
        };
        Some(Self { is_of_columns: false, kind })
    }

    fn of_value_heads(heads: DeltaHeads, name: &str) -> Option<Self> {
        let [qkv, z, b, a, out] = DELTA_NET_NAMES;
        let is = |part: &str| name.contains(part);
        let (first, width) = match () {
            () if is(qkv) || is(CONV) => (2 * heads.key_width(), heads.value_head_dim),
            () if is(z) || is(out) => (0, heads.value_head_dim),
            () if is(b) || is(a) || is(A_LOG) || is(DT_BIAS) => (0, 1),
            () => return None,
        };
        let kind = OrderKind::ValueHeads { first, heads, width };
        (heads.group() > 1).then_some(Self { is_of_columns: is(out), kind })
    }

    /// Neighbours that stay together begin at multiples of this many.
    #[must_use]
    pub fn run(&self) -> usize {
        match self.kind {
            OrderKind::Halves { .. } | OrderKind::Neighbours { .. } | OrderKind::KeyHeads(_) => 1,
            OrderKind::ValueHeads { width, .. } => width,
        }
    }

    /// Where a row or column lies in a file.
    #[must_use]
    pub fn place(&self, index: usize) -> usize {
        match self.kind {
            OrderKind::Halves { head_dim } => {
                let (head, within) = (index / head_dim, index % head_dim);
                let (half, pair) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * pair + half
            }
            OrderKind::Neighbours { head_dim, width } => {
                let (head, within) = (index / head_dim, index % head_dim);
                let turned = if within < width { within % 2 * (width / 2) + within / 2 } else { within };
                head * head_dim + turned
            }
            OrderKind::ValueHeads { first, .. } if index < first => index,
            OrderKind::ValueHeads { first, heads, width } => {
                let (head, within) = ((index - first) / width, (index - first) % width);
                let (key_head, member) = (head / heads.group(), head % heads.group());
                first + (member * heads.num_key_heads + key_head) * width + within
            }
            OrderKind::KeyHeads(heads) => {
                let of_values = heads.group() * heads.value_head_dim;
                let widths = [heads.key_head_dim, heads.key_head_dim, of_values, of_values];
                let before = |part: usize| widths[..part].iter().sum::<usize>();
                let (head, within) = (index / before(4), index % before(4));
                let part = (1..4).rev().find(|part| within >= before(*part)).unwrap_or(0);
                before(part) * heads.num_key_heads + head * widths[part] + within - before(part)
            }
        }
    }

    /// Rows of `width` numbers as they lie in a file.
    #[must_use]
    pub fn in_file(&self, values: &[f32], width: usize) -> Vec<f32> {
        let mut placed = vec![0.0; values.len()];
        for (row, numbers) in values.chunks_exact(width).enumerate() {
            if self.is_of_columns {
                let to = &mut placed[row * width..][..width];
                numbers.iter().enumerate().for_each(|(column, number)| to[self.place(column)] = *number);
            } else {
                placed[self.place(row) * width..][..width].copy_from_slice(numbers);
            }
        }
        placed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::fixture::tiny_config;

    #[test]
    fn rows_of_the_halves_of_a_head_alternate_in_a_llama_and_stay_in_a_qwen() {
        let order = Order { is_of_columns: false, kind: OrderKind::Halves { head_dim: 4 } };
        let rows: Vec<f32> = (0..16u8).map(f32::from).collect();
        let turned = [0., 1., 4., 5., 2., 3., 6., 7., 8., 9., 12., 13., 10., 11., 14., 15.];
        assert_eq!(order.in_file(&rows, 2), turned);
        for (model_type, expected) in [("llama", true), ("mistral", true), ("qwen2", false), ("qwen3", false)] {
            let config = ModelConfig { model_type: model_type.into(), ..tiny_config() };
            assert_eq!(Order::of(&config, "model.layers.0.self_attn.k_proj.bias").is_some(), expected);
            assert_eq!(Order::of(&config, "model.layers.0.self_attn.v_proj.weight"), None);
        }
    }

    #[test]
    fn neighbours_that_turn_lie_in_halves_where_tokens_have_three_positions() {
        // `normal_to_neox` of llama.cpp's converter: every second one of those that turn, the others of these, and the rest.
        let order = Order { is_of_columns: false, kind: OrderKind::Neighbours { head_dim: 6, width: 4 } };
        let rows: Vec<f32> = (0..12u8).map(f32::from).collect();
        assert_eq!(order.in_file(&rows, 1), [0., 2., 1., 3., 4., 5., 6., 8., 7., 9., 10., 11.]);
    }

    #[test]
    fn value_heads_of_a_key_head_lie_apart() {
        let heads = DeltaHeads { num_key_heads: 2, num_value_heads: 6, key_head_dim: 1, value_head_dim: 2 };
        let of = |name: &str| Order::of_value_heads(heads, name).unwrap();
        let numbers: Vec<f32> = (0..16u8).map(f32::from).collect();
        let tiled = [4., 5., 10., 11., 6., 7., 12., 13., 8., 9., 14., 15.];
        let all = [&[0., 1., 2., 3.][..], &tiled].concat();
        assert_eq!(of("model.layers.1.linear_attn.in_proj_qkv.weight").in_file(&numbers, 1), all);
        assert_eq!(of("model.layers.1.linear_attn.A_log").in_file(&numbers[..6], 1), [0., 3., 1., 4., 2., 5.]);
        let output = of("model.layers.1.linear_attn.out_proj.weight");
        assert_eq!(output.in_file(&numbers[4..], 12), tiled);
        assert_eq!(Order::of_value_heads(heads, "model.layers.1.linear_attn.norm.weight"), None);
        let equal = DeltaHeads { num_value_heads: 2, ..heads };
        assert_eq!(Order::of_value_heads(equal, "model.layers.1.linear_attn.A_log"), None);
    }

    #[test]
    fn queries_keys_values_and_gates_of_all_key_heads_lie_together() {
        let heads = DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_head_dim: 2, value_head_dim: 1 };
        let order = Order { is_of_columns: false, kind: OrderKind::KeyHeads(heads) };
        // Of each head two of a query, two of a key, one of two values, one of two gates.
        let numbers: Vec<f32> = (0..16u8).map(f32::from).collect();
        let together = [0., 1., 8., 9., 2., 3., 10., 11., 4., 5., 12., 13., 6., 7., 14., 15.];
        assert_eq!(order.in_file(&numbers, 1), together);
    }
}
