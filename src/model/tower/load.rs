//! The weights of a tower under the names that files have for them.

use burn::tensor::{DType, Device, Tensor};

use super::{Layer, Layers, Tower};
use crate::device::Dtype;
use crate::model::weights::{WeightFiles, Weights};
use crate::ops::linear::Weight;
use crate::ops::norm::Norm;
use crate::ops::place::place_of;
use crate::schema::Problem;
use crate::spec::{EncoderKind, Projector, Vision};

/// What files call the parts of an encoder; a layer's follow its number.
struct Names {
    encoder: &'static str,
    patches: &'static str,
    positions: Option<&'static str>,
    /// Before the layers and behind them.
    ends: [Option<&'static str>; 2],
    layers: &'static str,
    norms: [&'static str; 2],
    qkv: [&'static str; 3],
    output: &'static str,
    gate: Option<&'static str>,
    up: &'static str,
    down: &'static str,
    /// Whether norms and linear layers have biases.
    has_bias: bool,
}

const PIXTRAL: Names = Names {
    encoder: "vision_tower.",
    patches: "patch_conv",
    positions: None,
    ends: [Some("ln_pre"), None],
    layers: "transformer.layers",
    norms: ["attention_norm", "ffn_norm"],
    qkv: ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
    output: "attention.o_proj",
    gate: Some("feed_forward.gate_proj"),
    up: "feed_forward.up_proj",
    down: "feed_forward.down_proj",
    has_bias: false,
};

const SIGLIP: Names = Names {
    encoder: "vision_model.",
    patches: "embeddings.patch_embedding",
    positions: Some("embeddings.position_embedding.weight"),
    ends: [None, Some("post_layernorm")],
    layers: "encoder.layers",
    norms: ["layer_norm1", "layer_norm2"],
    qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    output: "self_attn.out_proj",
    gate: None,
    up: "mlp.fc1",
    down: "mlp.fc2",
    has_bias: true,
};

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
        let [q, k, v] = names.qkv;
        let [first, second] = names.norms;
        Ok(Layer {
            norms: [self.norm(&name(first), hidden, has_bias)?, self.norm(&name(second), hidden, has_bias)?],
            qkv: [linear(q, [hidden, hidden])?, linear(k, [hidden, hidden])?, linear(v, [hidden, hidden])?],
            output: linear(names.output, [hidden, hidden])?,
            gate: names.gate.map(|gate| linear(gate, [inner, hidden])).transpose()?,
            up: linear(names.up, [inner, hidden])?,
            down: linear(names.down, [hidden, inner])?,
        })
    }

    fn projector(&self, vision: &Vision) -> Result<Layers, Problem> {
        let (hidden, text) = (vision.encoder.hidden_size, vision.text_size);
        let side = vision.projector.merge_size();
        let merged = hidden * side * side;
        match vision.projector {
            Projector::Merging { has_bias, .. } => {
                let name = |part: &str| format!("multi_modal_projector.{part}");
                Ok(Layers {
                    norm: Some(self.norm(&name("norm"), hidden, false)?),
                    merge: self.linear(&name("patch_merger.merging_layer"), [hidden, merged], false)?,
                    rest: Some([
                        self.linear(&name("linear_1"), [text, hidden], has_bias)?,
                        self.linear(&name("linear_2"), [text, text], has_bias)?,
                    ]),
                })
            }
            Projector::Linear { .. } => {
                let merge = self.linear("connector.modality_projection.proj", [text, merged], false)?;
                Ok(Layers { norm: None, merge, rest: None })
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
        let names = match vision.encoder.kind {
            EncoderKind::Pixtral { .. } => PIXTRAL,
            EncoderKind::Siglip { .. } => SIGLIP,
        };
        let within = format!("model.{}", names.encoder);
        let is_within = files.tensors().keys().any(|name| name.starts_with(&within));
        let found = Found { weights, prefix: if is_within { "model." } else { "" }, device };
        let (hidden, patch) = (vision.encoder.hidden_size, vision.encoder.patch_size);
        let name = |part: &str| format!("{}{part}", names.encoder);
        let patches = name(names.patches);
        let values: Tensor<4> = found.tensor(&format!("{patches}.weight"), [hidden, 3, patch, patch])?;
        let values = values.reshape([hidden, 3 * patch * patch]);
        let positions = match (names.positions, vision.encoder.kind) {
            (Some(part), EncoderKind::Siglip { side }) => Some(found.tensor(&name(part), [side * side, hidden])?),
            _ => None,
        };
        let end = |part: Option<&str>| part.map(|part| found.norm(&name(part), hidden, names.has_bias)).transpose();
        Ok(Self {
            place: place_of(device, DType::F32),
            device: device.clone(),
            patches: Weight { bias: found.bias(&patches, hidden, names.has_bias)?, ..Weight::new(values) },
            positions,
            ends: [end(names.ends[0])?, end(names.ends[1])?],
            layers: (0..vision.encoder.num_layers)
                .map(|index| found.layer(&vision, &names, index))
                .collect::<Result<_, _>>()?,
            projector: found.projector(&vision)?,
            vision,
        })
    }
}
