//! The weights of a tower under the names that files have for them.

use burn::tensor::{DType, Device, Tensor};

use super::{Layer, Layers, Tower};
use crate::device::Dtype;
use crate::model::weights::{WeightFiles, Weights};
use crate::ops::host;
use crate::ops::linear::Weight;
use crate::ops::norm::Norm;
use crate::ops::place::place_of;
use crate::schema::Problem;
use crate::spec::{EncoderKind, Projector, Vision};
use crate::util::faults;

/// What files call the parts of an encoder; a layer's follow its number.
#[expect(clippy::struct_excessive_bools, reason = "a row of a table")]
struct Names {
    encoder: &'static str,
    patches: &'static str,
    class: Option<&'static str>,
    positions: Option<&'static str>,
    /// Before the layers and behind them.
    ends: [Option<&'static str>; 2],
    layers: &'static str,
    norms: [&'static str; 2],
    qkv: Qkv,
    qk_norms: Option<[&'static str; 2]>,
    output: &'static str,
    gate: Option<&'static str>,
    up: &'static str,
    down: &'static str,
    scales: Option<[&'static str; 2]>,
    /// Whether norms and linear layers have biases.
    has_bias: bool,
    /// Whether the norms of layers do.
    has_norm_bias: bool,
    /// Whether queries, keys and values do.
    has_qkv_bias: bool,
    /// Whether patches do.
    has_patch_bias: bool,
    /// Equal frames that patches are of.
    num_frames: usize,
}

/// What files call the layers of queries, keys and values.
enum Qkv {
    Apart([&'static str; 3]),
    /// Their rows follow one another.
    Fused(&'static str),
}

const PIXTRAL: Names = Names {
    encoder: "vision_tower.",
    patches: "patch_conv",
    class: None,
    positions: None,
    ends: [Some("ln_pre"), None],
    layers: "transformer.layers",
    norms: ["attention_norm", "ffn_norm"],
    qkv: Qkv::Apart(["attention.q_proj", "attention.k_proj", "attention.v_proj"]),
    qk_norms: None,
    output: "attention.o_proj",
    gate: Some("feed_forward.gate_proj"),
    up: "feed_forward.up_proj",
    down: "feed_forward.down_proj",
    scales: None,
    has_bias: false,
    has_norm_bias: false,
    has_qkv_bias: false,
    has_patch_bias: false,
    num_frames: 1,
};

const SIGLIP: Names = Names {
    encoder: "vision_model.",
    patches: "embeddings.patch_embedding",
    class: None,
    positions: Some("embeddings.position_embedding.weight"),
    ends: [None, Some("post_layernorm")],
    layers: "encoder.layers",
    norms: ["layer_norm1", "layer_norm2"],
    qkv: Qkv::Apart(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    qk_norms: None,
    output: "self_attn.out_proj",
    gate: None,
    up: "mlp.fc1",
    down: "mlp.fc2",
    scales: None,
    has_bias: true,
    has_norm_bias: true,
    has_qkv_bias: true,
    has_patch_bias: true,
    num_frames: 1,
};

const INTERN_VIT: Names = Names {
    encoder: "vision_tower.",
    patches: "embeddings.patch_embeddings.projection",
    class: Some("embeddings.cls_token"),
    positions: Some("embeddings.position_embeddings"),
    ends: [None, None],
    layers: "encoder.layer",
    norms: ["layernorm_before", "layernorm_after"],
    qkv: Qkv::Apart(["attention.q_proj", "attention.k_proj", "attention.v_proj"]),
    qk_norms: None,
    output: "attention.projection_layer",
    gate: None,
    up: "mlp.fc1",
    down: "mlp.fc2",
    scales: Some(["lambda_1", "lambda_2"]),
    has_bias: true,
    has_norm_bias: true,
    has_qkv_bias: true,
    has_patch_bias: true,
    num_frames: 1,
};

const QWEN3: Names = Names {
    encoder: "visual.",
    patches: "patch_embed.proj",
    class: None,
    positions: Some("pos_embed.weight"),
    ends: [None, None],
    layers: "blocks",
    norms: ["norm1", "norm2"],
    qkv: Qkv::Fused("attn.qkv"),
    qk_norms: None,
    output: "attn.proj",
    gate: None,
    up: "mlp.linear_fc1",
    down: "mlp.linear_fc2",
    scales: None,
    has_bias: true,
    has_norm_bias: true,
    has_qkv_bias: true,
    has_patch_bias: true,
    num_frames: 2,
};

const QWEN2_5: Names = Names {
    positions: None,
    gate: Some("mlp.gate_proj"),
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    has_norm_bias: false,
    has_patch_bias: false,
    ..QWEN3
};

const QWEN2: Names = Names { positions: None, up: "mlp.fc1", down: "mlp.fc2", has_patch_bias: false, ..QWEN3 };

impl Names {
    fn of(kind: EncoderKind) -> Self {
        match kind {
            EncoderKind::Pixtral { .. } => PIXTRAL,
            EncoderKind::Siglip { .. } => SIGLIP,
            EncoderKind::PaddleOcr { .. } => Self { encoder: "visual.vision_model.", ..SIGLIP },
            EncoderKind::Qwen3 { .. } => QWEN3,
            EncoderKind::Qwen2_5 { .. } => QWEN2_5,
            EncoderKind::Qwen2 { .. } => QWEN2,
            EncoderKind::InternVit { has_qk_norms, has_qkv_bias, has_rms_norms, has_last_norm, .. } => Self {
                ends: [None, has_last_norm.then_some("layernorm")],
                qk_norms: has_qk_norms.then_some(["attention.q_norm", "attention.k_norm"]),
                has_norm_bias: !has_rms_norms,
                has_qkv_bias,
                ..INTERN_VIT
            },
        }
    }
}

/// The weights of a tower where they are.
struct Found<'a> {
    weights: &'a Weights,
    /// Before the names of its tensors.
    prefix: &'static str,
    device: &'a Device,
}

impl Found<'_> {
    fn tensor<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<D>, Problem> {
        self.weights.load(&format!("{}{name}", self.prefix), shape, Dtype::F32, self.device)
    }

    fn bias(&self, name: &str, width: usize, has_bias: bool) -> Result<Option<Tensor<1>>, Problem> {
        has_bias.then(|| self.tensor(&format!("{name}.bias"), [width])).transpose()
    }

    fn norm(&self, name: &str, width: usize, has_bias: bool) -> Result<Norm, Problem> {
        let weight = self.tensor(&format!("{name}.weight"), [width])?;
        Ok(Norm { weight, bias: self.bias(name, width, has_bias)? })
    }

    fn linear(&self, name: &str, shape: [usize; 2], has_bias: bool) -> Result<Weight, Problem> {
        let values = self.tensor(&format!("{name}.weight"), shape)?;
        Ok(Weight { bias: self.bias(name, shape[0], has_bias)?, ..Weight::new(values) })
    }

    fn layer(&self, vision: &Vision, names: &Names, index: usize) -> Result<Layer, Problem> {
        let (hidden, inner, has_bias) = (vision.encoder.hidden_size, vision.encoder.intermediate_size, names.has_bias);
        let name = |part: &str| format!("{}{}.{index}.{part}", names.encoder, names.layers);
        let linear = |part: &str, shape: [usize; 2]| self.linear(&name(part), shape, has_bias);
        let has_qkv_bias = names.has_qkv_bias;
        let of_qkv = |part: &str| self.linear(&name(part), [hidden, hidden], has_qkv_bias);
        let norm = |part: &str, has_bias: bool| self.norm(&name(part), hidden, has_bias);
        let scale = |part: &str| self.tensor(&name(part), [hidden]);
        let qkv = match names.qkv {
            Qkv::Apart([q, k, v]) => [of_qkv(q)?, of_qkv(k)?, of_qkv(v)?],
            Qkv::Fused(all) => {
                let all = self.linear(&name(all), [3 * hidden, hidden], has_qkv_bias)?;
                let values = all.values.dense().into_owned();
                [0, hidden, 2 * hidden].map(|start| Weight {
                    bias: all.bias.as_ref().map(|bias| bias.clone().narrow(0, start, hidden)),
                    ..Weight::new(values.clone().narrow(0, start, hidden))
                })
            }
        };
        let [first, second] = names.norms;
        Ok(Layer {
            norms: [norm(first, names.has_norm_bias)?, norm(second, names.has_norm_bias)?],
            qkv,
            qk_norms: names.qk_norms.map(|[q, k]| Ok::<_, Problem>([norm(q, false)?, norm(k, false)?])).transpose()?,
            scales: names
                .scales
                .map(|[first, second]| Ok::<_, Problem>([scale(first)?, scale(second)?]))
                .transpose()?,
            output: linear(names.output, [hidden, hidden])?,
            gate: names.gate.map(|gate| linear(gate, [inner, hidden])).transpose()?,
            up: linear(names.up, [inner, hidden])?,
            down: linear(names.down, [hidden, inner])?,
        })
    }

    /// The projector, or another of those beside it.
    fn projector(&self, vision: &Vision, level: Option<usize>) -> Result<Layers, Problem> {
        let (hidden, text) = (vision.encoder.hidden_size, vision.text_size);
        let side = vision.projector.merge_size();
        let merged = hidden * side * side;
        match vision.projector {
            Projector::Merging { has_bias, .. } => {
                let name = |part: &str| format!("multi_modal_projector.{part}");
                Ok(Layers {
                    norm: Some(self.norm(&name("norm"), hidden, false)?),
                    merge: Some(self.linear(&name("patch_merger.merging_layer"), [hidden, merged], false)?),
                    merged_norm: None,
                    rest: Some([
                        self.linear(&name("linear_1"), [text, hidden], has_bias)?,
                        self.linear(&name("linear_2"), [text, text], has_bias)?,
                    ]),
                })
            }
            Projector::Normed { .. } => {
                let name = |part: &str| format!("multi_modal_projector.{part}");
                Ok(Layers {
                    norm: None,
                    merge: None,
                    merged_norm: Some(self.norm(&name("layer_norm"), merged, true)?),
                    rest: Some([
                        self.linear(&name("linear_1"), [text, merged], true)?,
                        self.linear(&name("linear_2"), [text, text], true)?,
                    ]),
                })
            }
            Projector::Joining { .. } => {
                let [norm, first, second] = match vision.encoder.kind {
                    EncoderKind::PaddleOcr { .. } => ["pre_norm", "linear_1", "linear_2"],
                    EncoderKind::Qwen2_5 { .. } | EncoderKind::Qwen2 { .. } => ["ln_q", "mlp.0", "mlp.2"],
                    _ => ["norm", "linear_fc1", "linear_fc2"],
                };
                let has_norm_bias = Names::of(vision.encoder.kind).has_norm_bias;
                let (name, norm_width) = match level {
                    None if matches!(vision.encoder.kind, EncoderKind::PaddleOcr { .. }) => {
                        ("mlp_AR".to_owned(), hidden)
                    }
                    None => ("visual.merger".to_owned(), hidden),
                    Some(level) => (format!("visual.deepstack_merger_list.{level}"), merged),
                };
                let norm = self.norm(&format!("{name}.{norm}"), norm_width, has_norm_bias)?;
                let (norm, merged_norm) = if level.is_none() { (Some(norm), None) } else { (None, Some(norm)) };
                Ok(Layers {
                    norm,
                    merge: None,
                    merged_norm,
                    rest: Some([
                        self.linear(&format!("{name}.{first}"), [merged, merged], true)?,
                        self.linear(&format!("{name}.{second}"), [text, merged], true)?,
                    ]),
                })
            }
            Projector::Pooling { .. } => {
                let name = |part: &str| format!("multi_modal_projector.{part}");
                // Files have it less 1, and the matrix by its inputs.
                let norm: Tensor<1> = self.tensor(&name("mm_soft_emb_norm.weight"), [hidden])?;
                let matrix: Tensor<2> = self.tensor(&name("mm_input_projection_weight"), [hidden, text])?;
                let values = faults::read(matrix.swap_dims(0, 1), "a weight");
                Ok(Layers {
                    norm: None,
                    merge: Some(Weight::new(host::tensor(values, [text, hidden], self.device))),
                    merged_norm: Some(Norm { weight: norm + 1.0, bias: None }),
                    rest: None,
                })
            }
            Projector::Linear { .. } => {
                let merge = self.linear("connector.modality_projection.proj", [text, merged], false)?;
                Ok(Layers { norm: None, merge: Some(merge), merged_norm: None, rest: None })
            }
        }
    }
}

impl Tower {
    /// Reads the weights of a tower onto a device.
    ///
    /// # Errors
    /// Tensors that are missing, misshapen or of a type that cannot be read.
    pub fn load(vision: Vision, weights: &Weights, files: &WeightFiles, device: &Device) -> Result<Self, Problem> {
        let mut names = Names::of(vision.encoder.kind);
        if let Projector::Pooling { .. } = vision.projector {
            // Newer files have less of its modules.
            const OLD: &str = "vision_tower.vision_model.";
            let is_old = files.tensors().keys().any(|name| name.trim_start_matches("model.").starts_with(OLD));
            names.encoder = if is_old { OLD } else { "vision_tower." };
        }
        let within = format!("model.{}", names.encoder);
        let is_within = files.tensors().keys().any(|name| name.starts_with(&within));
        let found = Found { weights, prefix: if is_within { "model." } else { "" }, device };
        let (hidden, patch) = (vision.encoder.hidden_size, vision.encoder.patch_size);
        let name = |part: &str| format!("{}{part}", names.encoder);
        let patches = name(names.patches);
        let patches_weight = format!("{patches}.weight");
        let values: Tensor<4> = match names.num_frames {
            1 => found.tensor(&patches_weight, [hidden, 3, patch, patch])?,
            // What frames have alike.
            frames => {
                let values: Tensor<5> = found.tensor(&patches_weight, [hidden, 3, frames, patch, patch])?;
                values.sum_dim(2).squeeze_dim(2)
            }
        };
        let values = values.reshape([hidden, 3 * patch * patch]);
        let positions = match (names.positions, vision.encoder.kind) {
            (
                Some(part),
                EncoderKind::Siglip { side } | EncoderKind::Qwen3 { side, .. } | EncoderKind::PaddleOcr { side, .. },
            ) => Some(found.tensor(&name(part), [side * side, hidden])?),
            (Some(part), EncoderKind::InternVit { side, .. }) => {
                let num_places = side * side + 1;
                Some(found.tensor(&name(part), [1, num_places, hidden])?.reshape([num_places, hidden]))
            }
            _ => None,
        };
        let class = |part: &str| Ok::<_, Problem>(found.tensor(&name(part), [1, 1, hidden])?.reshape([1, hidden]));
        let end = |part: Option<&str>| part.map(|part| found.norm(&name(part), hidden, names.has_bias)).transpose();
        Ok(Self {
            place: place_of(device, DType::F32),
            device: device.clone(),
            patches: Weight { bias: found.bias(&patches, hidden, names.has_patch_bias)?, ..Weight::new(values) },
            class: names.class.map(class).transpose()?,
            positions,
            ends: [end(names.ends[0])?, end(names.ends[1])?],
            layers: (0..vision.encoder.num_layers)
                .map(|index| found.layer(&vision, &names, index))
                .collect::<Result<_, _>>()?,
            projector: found.projector(&vision, None)?,
            deepstack: (0..vision.deepstack.len())
                .map(|level| found.projector(&vision, Some(level)))
                .collect::<Result<_, _>>()?,
            vision,
        })
    }
}
