//! Which type each tensor of a GGUF file has: that which `llama-quantize` of llama.cpp chooses
//! (<https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp>).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::file::Tensor;
use crate::config::FileType;
use crate::schema::Problem;
use crate::util::gguf::{GgufType, List, Value};
use crate::util::text::counted;

impl FileType {
    /// Its number, for `general.file_type`, and the type of most of its matrices.
    fn facts(self) -> (u32, GgufType) {
        match self {
            Self::W4a16 | Self::Fp8 => unreachable!("refused before a file is written"),
            Self::F32 => (0, GgufType::F32),
            Self::F16 => (1, GgufType::F16),
            Self::Q4 => (2, GgufType::Q4_0),
            Self::Q4Offset => (3, GgufType::Q4_1),
            Self::Q8 => (7, GgufType::Q8_0),
            Self::Q5 => (8, GgufType::Q5_0),
            Self::Q5Offset => (9, GgufType::Q5_1),
            Self::Q2K => (10, GgufType::Q2_K),
            Self::Q3KS => (11, GgufType::Q3_K),
            Self::Q3KM => (12, GgufType::Q3_K),
            Self::Q3KL => (13, GgufType::Q3_K),
            Self::Q4KS => (14, GgufType::Q4_K),
            Self::Q4KM => (15, GgufType::Q4_K),
            Self::Q5KS => (16, GgufType::Q5_K),
            Self::Q5KM => (17, GgufType::Q5_K),
            Self::Q6K => (18, GgufType::Q6_K),
            Self::Iq4Nl => (25, GgufType::IQ4_NL),
            Self::Iq4Xs => (30, GgufType::IQ4_XS),
            Self::Bf16 => (32, GgufType::BF16),
            Self::Mxfp4 => (38, GgufType::MXFP4),
            Self::Nvfp4 => (39, GgufType::NVFP4),
        }
    }

    /// Whether rows of `width` are in blocks of it, or of the type that then takes its place.
    pub(crate) fn has_blocks_for(self, width: usize) -> bool {
        fallback(self.facts().1, width).is_quantized()
    }

    /// Bytes of so many weights in the type of most of them.
    pub(crate) fn num_bytes(self, num_weights: usize) -> usize {
        let kind = self.facts().1;
        num_weights / kind.block_size() * kind.type_size().unwrap_or_default()
    }

    /// Its number, for `general.file_type`.
    pub(super) fn code(self) -> u32 {
        self.facts().0
    }

    /// Gives each tensor its type. `float`: that of matrices which are never quantised; `has_imatrix`: errors are weighed.
    ///
    /// # Errors
    /// A type that would leave the model without a tensor of it.
    pub(super) fn choose(
        self,
        tensors: &mut [Tensor<'_>],
        metadata: &[(String, Value)],
        float: Self,
        has_imatrix: bool,
    ) -> Result<Chosen, Problem> {
        let main = self.facts().1;
        if self == Self::Mxfp4 && !tensors.iter().any(|tensor| tensor.name.contains("_exps.")) {
            let problem =
                Problem::new("mxfp4 is for mixtures: llama.cpp gives it to experts alone, and this model has none");
            return Err(problem.hint("of 4 bits there are q4_k_m and nvfp4 as well"));
        }
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by(|a, b| {
            let key = |index: usize| (layer_of(&tensors[index].name), &*tensors[index].name);
            key(*a).cmp(&key(*b))
        });
        let is_tied = tensors.iter().all(|tensor| tensor.name != "output.weight");
        let shape = Shape::of(metadata);
        let num_values = tensors.iter().filter(|tensor| Place::of(&tensor.name) == Place::Value).count();
        let (mut value, mut down) = (0, 0);
        let mut chosen = Chosen::default();
        for index in order {
            let tensor = &mut tensors[index];
            // llama.cpp adds biases of experts in 32 bits alone.
            let is_weight = tensor.name.ends_with("weight");
            // The norm of a state space has a row for each group.
            let is_norm = tensor.name.ends_with("_norm.weight");
            if tensor.shape.len() == 1 || is_norm || !is_weight || IN_F32.iter().any(|part| tensor.name.contains(part))
            {
                tensor.kind = GgufType::F32;
                continue;
            }
            if self.float().is_some() || !is_quantised(&tensor.name) {
                tensor.kind = if self.float().is_some() { main } else { float.facts().1 };
                continue;
            }
            let place = Place::of(&tensor.name);
            let layer = match place {
                Place::Value => (next(&mut value), num_values),
                Place::Down if shape.num_experts > 1 => (layer_of(&tensor.name).unwrap_or(0), shape.num_layers),
                Place::Down => (next(&mut down), shape.num_layers),
                _ => (0, 0),
            };
            let width = tensor.shape.last().copied().unwrap_or_default();
            let wanted = match self {
                _ if place == Place::Head || place == Place::Embedding && is_tied => self.of_head(width),
                Self::Mxfp4 if tensor.shape.len() < 3 => GgufType::Q8_0,
                _ => shape.bits(self.at(place, layer, &shape, has_imatrix), place),
            };
            tensor.kind = fallback(wanted, width);
            if tensor.kind != wanted {
                *chosen
                    .fallbacks
                    .entry((wanted.to_string(), tensor.kind.to_string(), wanted.block_size()))
                    .or_default() += 1;
            }
        }
        chosen.num_bytes = tensors.iter().map(Tensor::num_bytes).sum();
        chosen.num_weights = tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        Ok(chosen)
    }

    /// The type of a head with rows of this width.
    fn of_head(self, width: usize) -> GgufType {
        let main = self.facts().1;
        let is_whole = self == Self::Mxfp4 || main == GgufType::Q8_0 || !width.is_multiple_of(main.block_size());
        if is_whole { GgufType::Q8_0 } else { GgufType::Q6_K }
    }

    /// The type of a matrix at this place in the `i`-th of `n` layers.
    fn at(self, place: Place, (i, n): (usize, usize), shape: &Shape, has_imatrix: bool) -> GgufType {
        let has_more = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
        let is_grouped = shape.heads_of_each >= 4;
        match (place, self) {
            (Place::Value, Self::Q2K) if is_grouped => GgufType::Q4_K,
            (Place::Value, Self::Q3KM) if i < 2 => GgufType::Q5_K,
            (Place::Value, Self::Iq4Nl | Self::Iq4Xs) if is_grouped => GgufType::Q5_K,
            (Place::Value, Self::Q4KS) if i < 4 => GgufType::Q5_K,
            (Place::Value | Place::Down, Self::Q3KL) => GgufType::Q5_K,
            (Place::Value | Place::Down, Self::Q4KM | Self::Q5KM) if has_more => GgufType::Q6_K,
            (Place::Down, Self::Q3KM) if i < n / 16 => GgufType::Q5_K,
            (Place::Down, Self::Iq4Nl | Self::Iq4Xs) if i < n / 8 && !has_imatrix => GgufType::Q5_K,
            (Place::Down, Self::Q4KS) if i < n / 8 => GgufType::Q5_K,
            (Place::Down, Self::Q4) if i < n / 8 && has_imatrix => GgufType::Q4_1,
            (Place::Down, Self::Q5) if i < n / 8 && has_imatrix => GgufType::Q5_1,
            (
                Place::Output,
                Self::Q2K | Self::Q3KS | Self::Q3KM | Self::Q4KS | Self::Q4KM | Self::Iq4Nl | Self::Iq4Xs,
            ) if shape.num_experts == 8 => GgufType::Q5_K,
            (Place::Value | Place::Down | Place::Output, Self::Q2K) => GgufType::Q3_K,
            (Place::Value | Place::Down | Place::Output, Self::Q3KM) => GgufType::Q4_K,
            (Place::Output, Self::Q3KL) if shape.num_experts != 8 => GgufType::Q5_K,
            _ => self.facts().1,
        }
    }
}

/// What remains in `f32`: what chooses among experts, and convolutions.
const IN_F32: [&str; 5] =
    [".ffn_gate_inp.", ".ssm_conv1d.", ".shortconv.conv.", ".altup_correct_coef.", ".altup_predict_coef."];
/// Parts of names of matrices that no file has in blocks.
const NEVER: [&str; 4] = ["_norm.weight", "altup", "laurel", "per_layer_model_proj"];

fn is_quantised(name: &str) -> bool {
    name.ends_with("weight") && !NEVER.iter().any(|part| name.contains(part))
}

fn next(count: &mut usize) -> usize {
    *count += 1;
    *count - 1
}

/// The layer in a tensor's name; what is in none comes before all others.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// What has the place of a type whose blocks do not divide a row.
fn fallback(kind: GgufType, width: usize) -> GgufType {
    let is_whole = |kind: GgufType| width.is_multiple_of(kind.block_size());
    let smaller = match kind {
        GgufType::Q2_K | GgufType::Q3_K => GgufType::Q4_0,
        GgufType::Q4_K => GgufType::Q5_0,
        GgufType::Q5_K => GgufType::Q5_1,
        GgufType::Q6_K => GgufType::Q8_0,
        GgufType::IQ4_XS => GgufType::IQ4_NL,
        _ => GgufType::F16,
    };
    [kind, smaller].into_iter().find(|kind| is_whole(*kind)).unwrap_or(GgufType::F16)
}

/// Where a matrix is, as far as that decides on its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Embedding,
    Head,
    /// What makes values, alone or with queries and keys.
    Value,
    Key,
    Output,
    Down,
    Other,
}

impl Place {
    fn of(name: &str) -> Self {
        let has = |part: &str| name.contains(part);
        match name {
            "output.weight" => Self::Head,
            "token_embd.weight" | "per_layer_token_embd.weight" => Self::Embedding,
            _ if ["attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight"].into_iter().any(has) => Self::Value,
            _ if has("attn_k.weight") => Self::Key,
            _ if has("attn_output.weight") => Self::Output,
            _ if has("ffn_down") => Self::Down,
            _ => Self::Other,
        }
    }
}

/// What the types depend on.
struct Shape {
    num_layers: usize,
    num_experts: usize,
    /// Heads of queries for each of keys and values.
    heads_of_each: usize,
    /// A model of 70 billion parameters, whose matrices of values are small.
    is_70b: bool,
}

impl Shape {
    fn of(metadata: &[(String, Value)]) -> Self {
        let number = |end: &str| {
            let value = metadata.iter().find(|(key, _)| key.split_once('.').is_some_and(|(_, key)| key == end))?;
            match &value.1 {
                Value::U32(number) => usize::try_from(*number).ok(),
                Value::Array(list) => match &**list {
                    List::I32(numbers) => numbers.first().and_then(|number| usize::try_from(*number).ok()),
                    List::U32(numbers) => numbers.first().and_then(|number| usize::try_from(*number).ok()),
                    _ => None,
                },
                _ => None,
            }
        };
        let heads = number("attention.head_count").unwrap_or_default();
        let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
        let num_layers = number("block_count").unwrap_or_default();
        let is_text = |(key, value): &(String, Value)| {
            key == "general.architecture"
                && matches!(value, Value::String(name) if ["llama", "qwen2"].contains(&&**name))
        };
        Self {
            num_layers,
            num_experts: number("expert_count").unwrap_or_default(),
            heads_of_each: heads.checked_div(kv_heads).unwrap_or_default(),
            is_70b: num_layers == 80 && heads != kv_heads && metadata.iter().any(is_text),
        }
    }

    /// The type where few matrices of the kind are worth more bits.
    fn bits(&self, kind: GgufType, place: Place) -> GgufType {
        match place {
            Place::Value | Place::Key if self.num_experts == 8 => GgufType::Q8_0,
            Place::Value if self.is_70b && matches!(kind, GgufType::Q3_K | GgufType::Q4_K) => GgufType::Q5_K,
            _ => kind,
        }
    }
}

/// What was chosen for all tensors.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    /// How many have another type than they should, by what that is, what they have, and the length of a block.
    fallbacks: BTreeMap<(String, String, usize), usize>,
    num_bytes: usize,
    num_weights: usize,
}

impl Chosen {
    /// Bits that a weight takes, and what has not the type that it should, for people.
    #[expect(clippy::cast_precision_loss, reason = "shown with two digits")]
    pub(super) fn about(&self) -> String {
        let mut text = format!("{:.2} bits a weight", 8.0 * self.num_bytes as f64 / self.num_weights.max(1) as f64);
        for ((wanted, kind, len), count) in &self.fallbacks {
            let tensors = counted(*count, "tensor");
            let _ = write!(text, "\n  {tensors} in {kind} instead of {wanted}: rows that are no multiples of {len}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_of_experts_stay_in_32_bits() {
        for file_type in [FileType::F16, FileType::Bf16, FileType::Q8] {
            let tensor = |name: &str, shape| Tensor::of(name.to_owned(), shape, Vec::new);
            let mut tensors =
                [tensor("blk.0.ffn_up_exps.bias", vec![2, 32]), tensor("blk.0.ffn_up_exps.weight", vec![2, 32, 32])];
            file_type.choose(&mut tensors, &[], FileType::F16, false).unwrap();
            assert!(tensors[0].kind == GgufType::F32 && tensors[1].kind != GgufType::F32);
        }
    }

    /// Matrices of a model without numbers.
    struct Model {
        num_layers: u32,
        width: usize,
        heads: [u32; 2],
        head_dim: usize,
        inner: usize,
        num_experts: usize,
        vocabulary: usize,
        is_tied: bool,
    }

    const LLAMA_8B: Model = Model {
        num_layers: 32,
        width: 4096,
        heads: [32, 8],
        head_dim: 128,
        inner: 14_336,
        num_experts: 1,
        vocabulary: 128_256,
        is_tied: false,
    };

    impl Model {
        fn files(&self, of: FileType, is_weighed: bool) -> (BTreeMap<String, String>, Chosen) {
            let Self { width, inner, head_dim, .. } = *self;
            let [heads, kv_heads] = self.heads.map(|heads| heads as usize * head_dim);
            let experts = if self.num_experts > 1 { vec![self.num_experts] } else { vec![] };
            let end = if self.num_experts > 1 { "_exps" } else { "" };
            let empty = |name: String, shape: Vec<usize>| Tensor::of(name, shape, Vec::new);
            let layer = |layer: u32| {
                let name = move |name: &str| format!("blk.{layer}.{name}.weight");
                [
                    empty(name("attn_norm"), vec![width]),
                    empty(name("attn_q"), vec![heads, width]),
                    empty(name("attn_k"), vec![kv_heads, width]),
                    empty(name("attn_v"), vec![kv_heads, width]),
                    empty(name("attn_output"), vec![width, heads]),
                    empty(name("ffn_norm"), vec![width]),
                    empty(name(&format!("ffn_gate{end}")), [&experts[..], &[inner, width]].concat()),
                    empty(name(&format!("ffn_up{end}")), [&experts[..], &[inner, width]].concat()),
                    empty(name(&format!("ffn_down{end}")), [&experts[..], &[width, inner]].concat()),
                ]
            };
            let mut tensors: Vec<Tensor> = (0..self.num_layers).flat_map(layer).collect();
            tensors.push(empty("token_embd.weight".to_owned(), vec![self.vocabulary, width]));
            tensors.extend((!self.is_tied).then(|| empty("output.weight".to_owned(), vec![self.vocabulary, width])));
            let experts = u32::try_from(if self.num_experts > 1 { self.num_experts } else { 0 }).unwrap();
            let [heads, kv_heads] = self.heads;
            let keys = [
                ("block_count", self.num_layers),
                ("attention.head_count", heads),
                ("attention.head_count_kv", kv_heads),
                ("expert_count", experts),
            ];
            let mut metadata = vec![("general.architecture".to_owned(), Value::String("llama".to_owned()))];
            metadata.extend(keys.map(|(key, value)| (format!("llama.{key}"), Value::U32(value))));
            let chosen = of.choose(&mut tensors, &metadata, FileType::Bf16, is_weighed).unwrap();
            (tensors.iter().map(|tensor| (tensor.name.clone(), tensor.kind.to_string())).collect(), chosen)
        }
    }

    const QWEN3: Model = Model {
        num_layers: 28,
        width: 1024,
        heads: [16, 8],
        head_dim: 128,
        inner: 3072,
        num_experts: 1,
        vocabulary: 151_936,
        is_tied: true,
    };
    const SMOLLM2: Model = Model {
        num_layers: 30,
        width: 576,
        heads: [9, 3],
        head_dim: 64,
        inner: 1536,
        num_experts: 1,
        vocabulary: 49_152,
        is_tied: true,
    };

    #[test]
    fn every_matrix_of_known_models_has_the_type_that_llama_quantize_gives_it() {
        let golden: BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>> =
            serde_json::from_str(include_str!("../../../../tests/golden/gguf_types.json")).unwrap();
        let models = [
            ("llama-3.1-8b", LLAMA_8B),
            ("llama-3.1-70b", Model { num_layers: 80, width: 8192, heads: [64, 8], inner: 28_672, ..LLAMA_8B }),
            ("qwen3-0.6b", QWEN3),
            ("smollm2-135m", SMOLLM2),
            ("mixtral-8x7b", Model { num_experts: 8, vocabulary: 32_000, ..LLAMA_8B }),
            ("mixture-of-16", {
                let heads = [16, 4];
                let inner = 768;
                Model {
                    num_layers: 26,
                    width: 2048,
                    heads,
                    inner,
                    num_experts: 16,
                    vocabulary: 32_000,
                    is_tied: true,
                    ..LLAMA_8B
                }
            }),
        ];
        let mut num_compared = 0;
        for (name, model) in models {
            for (of, matrices) in &golden[name] {
                let (kind, is_weighed) = of.split_once(' ').map_or((&**of, false), |(kind, _)| (kind, true));
                let kinds = model.files(<FileType as clap::ValueEnum>::from_str(kind, false).unwrap(), is_weighed).0;
                for (matrix, expected) in matrices {
                    let runs: Vec<&str> = expected.split(' ').collect();
                    let of_layers = runs.chunks(2).flat_map(|run| vec![run[0]; run[1].parse().unwrap()]);
                    for (layer, expected) in of_layers.enumerate() {
                        let in_layer = kinds.get(&format!("blk.{layer}.{matrix}.weight"));
                        let found = in_layer.unwrap_or_else(|| &kinds[&format!("{matrix}.weight")]);
                        assert_eq!(found, expected, "{name}, {of}: {matrix} of layer {layer}");
                        num_compared += 1;
                    }
                }
            }
        }
        assert!(num_compared > 40_000, "{num_compared}");
        assert_eq!(LLAMA_8B.files(FileType::Q4KM, false).0["blk.0.attn_norm.weight"], "F32");
    }

    #[test]
    fn a_file_says_what_a_weight_takes_and_what_has_another_type_for_its_width() {
        let about = |model: &Model| model.files(FileType::Q4KM, false).1.about();
        // Of the tensors alone; the vocabulary of a small model's file takes a tenth of a bit more.
        assert_eq!(about(&LLAMA_8B), "4.89 bits a weight");
        assert_eq!(about(&QWEN3), "5.24 bits a weight");
        let text = about(&SMOLLM2);
        assert!(text.starts_with("6.17 bits a weight\n"), "{text}");
        assert!(text.contains(" in Q5_0 instead of Q4_K: rows that are no multiples of 256"), "{text}");
        assert!(text.contains(" in Q8_0 instead of Q6_K: "), "{text}");
        // No block at all.
        let odd = Model { width: 40, ..SMOLLM2 }.files(FileType::Q8, false).0;
        assert_eq!((&*odd["blk.0.attn_q.weight"], &*odd["blk.0.ffn_down.weight"]), ("F16", "Q8_0"));
    }
}
