//! Rows and columns of tensors that lie in another order in GGUF files than in Hugging Face's.

use crate::spec::delta_net::{A_LOG, CONV, DELTA_NET_FUSED_NAMES, DELTA_NET_NAMES, DT_BIAS};
use crate::spec::{Block, DeltaHeads, DeltaNetInputs, ModelConfig, NEOX_NAMES, Rope, RopePairs};

use super::names::split_latent;

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
    /// The first part of all heads, then the second one of all, and so on, where Hugging Face has those of a head side by side.
    ByHead { num_heads: usize, widths: [usize; 4] },
}

impl Order {
    /// The order of a tensor such as `model.layers.0.self_attn.q_proj.weight`; `None` where it is the same.
    #[must_use]
    pub fn of(config: &ModelConfig, name: &str) -> Option<Self> {
        if let Some(net) = config.blocks.iter().find_map(Block::delta_net) {
            return match net.inputs {
                DeltaNetInputs::Apart(_) => Self::of_value_heads(net.heads, name),
                DeltaNetInputs::ByKeyHead(_) => {
                    name.contains(DELTA_NET_FUSED_NAMES[0]).then(|| Self::of_key_heads(net.heads))
                }
            };
        }
        if let Some((heads, latent)) = split_latent(config, name) {
            let widths = [heads.head_dim - latent.num_turning, latent.value_dim, 0, 0];
            return Some(Self::by_head(heads.num_heads, widths));
        }
        if name.contains(NEOX_NAMES[0]) {
            let heads = config.blocks[0].attention()?.heads;
            let [query, key, value] = [heads.head_dim; 3];
            return Some(Self::by_head(heads.num_heads, [query, key, value, 0]));
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

    fn by_head(num_heads: usize, widths: [usize; 4]) -> Self {
        Self { is_of_columns: false, kind: OrderKind::ByHead { num_heads, widths } }
    }

    /// Queries, keys, values and gates.
    fn of_key_heads(heads: DeltaHeads) -> Self {
        let of_values = heads.group() * heads.value_head_dim;
        Self::by_head(heads.num_key_heads, [heads.key_head_dim, heads.key_head_dim, of_values, of_values])
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
            OrderKind::Halves { .. } | OrderKind::Neighbours { .. } | OrderKind::ByHead { .. } => 1,
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
            OrderKind::ByHead { num_heads, widths } => {
                let before = |part: usize| widths[..part].iter().sum::<usize>();
                let (head, within) = (index / before(4), index % before(4));
                let part = (1..4).find(|part| within < before(*part)).unwrap_or(4) - 1;
                before(part) * num_heads + head * widths[part] + within - before(part)
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
    fn keys_of_latents_come_before_values_and_each_heads_rows_are_columns() {
        let text = include_str!("../../../tests/golden/youtu/config.json");
        let config =
            ModelConfig::from_json(&text.replace("\"rope_interleave\": false", "\"rope_interleave\": true")).unwrap();
        let name = "model.layers.0.self_attn.kv_b_proj.weight";
        // Four heads of 8 keys and 8 values, from 20.
        let numbers: Vec<f32> = (0..64 * 20u16).map(f32::from).collect();
        let in_file = Order::of(&config, name).unwrap().in_file(&numbers, 20);
        let [keys, values] = &super::super::parts_of(&config, name, &[64, 20])[..] else { panic!("two tensors") };
        assert_eq!((&*keys.name, &*keys.shape), ("blk.0.attn_k_b.weight", &[4, 20, 8][..]));
        assert_eq!((&*values.name, &*values.shape), ("blk.0.attn_v_b.weight", &[4, 8, 20][..]));
        let turned = keys.turn(in_file[..32 * 20].to_vec(), 20);
        // Of the second head, the third row of keys; and the second row of values.
        let row: Vec<f32> = turned[8 * 20..16 * 20].iter().skip(2).step_by(8).copied().collect();
        assert_eq!(row, numbers[(16 + 2) * 20..][..20]);
        let of_values = values.turn(in_file[32 * 20..].to_vec(), 20);
        assert_eq!(of_values[(8 + 1) * 20..][..20], numbers[(16 + 8 + 1) * 20..][..20]);
    }

    #[test]
    fn queries_keys_values_and_gates_of_all_key_heads_lie_together() {
        let heads = DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_head_dim: 2, value_head_dim: 1 };
        let order = Order::of_key_heads(heads);
        // Of each head two of a query, two of a key, one of two values, one of two gates.
        let numbers: Vec<f32> = (0..16u8).map(f32::from).collect();
        let together = [0., 1., 8., 9., 2., 3., 10., 11., 4., 5., 12., 13., 6., 7., 14., 15.];
        assert_eq!(order.in_file(&numbers, 1), together);
    }
}
