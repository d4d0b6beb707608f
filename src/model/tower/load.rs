//! The weights of encoders under the names that files have for them.

use std::cell::RefCell;

use burn::tensor::{DType, Device, Tensor};

use super::names::{Names, Qkv};
use super::{Layer, Linear, Tower};
use crate::device::Dtype;
use crate::model::weights::{WeightFiles, Weights};
use crate::ops::layout::indices;
use crate::ops::linear::Weight;
use crate::ops::norm::Norm;
use crate::ops::place::place_of;
use crate::schema::Problem;
use crate::spec::{Encoder, EncoderKind, ModelConfig, Projector, StoredQuantisation, Vision};

/// The weights of a tower where they are.
pub(super) struct Found<'a> {
    weights: &'a Weights,
    files: &'a WeightFiles,
    config: &'a ModelConfig,
    names: Names,
    /// Before the names of its tensors.
    prefix: &'static str,
    pub(super) device: &'a Device,
    /// What is wrong with them, where they are not read.
    problems: Option<RefCell<Vec<String>>>,
}

impl Found<'_> {
    pub(super) fn tensor<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<D>, Problem> {
        let name = format!("{}{name}", self.prefix);
        if self.is_checked(&name, &shape, None) {
            return Ok(Tensor::zeros(shape, (self.device, DType::F32)));
        }
        self.weights.load(&name, shape, Dtype::F32, self.device)
    }

    /// That of a linear layer, decoded where it is stored as codes.
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Tensor<2>, Problem> {
        let name = format!("{}{name}", self.prefix);
        if self.is_checked(&name, &shape, self.config.quantisation.as_ref()) {
            return Ok(Tensor::zeros(shape, (self.device, DType::F32)));
        }
        let matrix = self.weights.matrix(&name, shape, Dtype::F32.into(), self.config, self.device)?;
        Ok(matrix.dense().into_owned())
    }

    /// Whether a tensor is not read, but looked at.
    fn is_checked(&self, name: &str, shape: &[usize], quantisation: Option<&StoredQuantisation>) -> bool {
        let Some(problems) = &self.problems else { return false };
        problems.borrow_mut().extend(self.files.problem_of(name, shape, quantisation));
        true
    }

    pub(super) fn bias(&self, name: &str, width: usize, has_bias: bool) -> Result<Option<Tensor<1>>, Problem> {
        has_bias.then(|| self.tensor(&format!("{name}.bias"), [width])).transpose()
    }

    pub(super) fn norm(&self, name: &str, width: usize, has_bias: bool) -> Result<Norm, Problem> {
        let weight = self.tensor(&format!("{name}.weight"), [width])?;
        Ok(Norm { weight, bias: self.bias(name, width, has_bias)? })
    }

    pub(super) fn linear(&self, name: &str, shape: [usize; 2], has_bias: bool) -> Result<Linear, Problem> {
        let values = self.matrix(&format!("{name}.weight"), shape)?;
        let weight = Weight { bias: self.bias(name, shape[0], has_bias)?, ..Weight::new(values) };
        Ok(Linear { weight, bounds: None })
    }

    /// Between which numbers the inputs and outputs of a linear layer are kept.
    fn bounds(&self, name: &str) -> Result<[[f32; 2]; 2], Problem> {
        let layer = name.trim_end_matches("linear");
        let number = |of: &str| {
            let name = format!("{}{layer}{of}", self.prefix);
            if self.is_checked(&name, &[], None) { Ok(0.0) } else { self.weights.scalar(&name, &[]) }
        };
        Ok([[number("input_min")?, number("input_max")?], [number("output_min")?, number("output_max")?]])
    }

    fn layer(&self, vision: &Vision, index: usize) -> Result<Layer, Problem> {
        let names = &self.names;
        let (hidden, inner, has_bias) = (vision.encoder.hidden_size, vision.encoder.intermediate_size, names.has_bias);
        let has_bounds = matches!(vision.encoder.kind, EncoderKind::Gemma4 { has_bounds: true, .. });
        let name = |part: &str| format!("{}{}.{index}.{part}", names.encoder, names.layers);
        let layer = |part: &str, shape: [usize; 2], has_bias: bool| {
            let bounds = has_bounds.then(|| self.bounds(&name(part))).transpose()?;
            Ok::<_, Problem>(Linear { bounds, ..self.linear(&name(part), shape, has_bias)? })
        };
        let linear = |part: &str, shape: [usize; 2]| layer(part, shape, has_bias);
        let norm = |part: &str, has_bias: bool| self.norm(&name(part), hidden, has_bias);
        let pair = |[first, second]: [&str; 2]| {
            Ok::<_, Problem>([norm(first, names.has_norm_bias)?, norm(second, names.has_norm_bias)?])
        };
        let scale = |part: &str| self.tensor(&name(part), [hidden]);
        let qkv = match names.qkv {
            Qkv::Apart(parts) => {
                let [q, k, v] = parts.map(|part| layer(part, [hidden, hidden], names.has_qkv_bias));
                [q?, k?, v?]
            }
            Qkv::Fused(all) => in_thirds(&self.linear(&name(all), [3 * hidden, hidden], names.has_qkv_bias)?.weight),
        };
        let (qkv, qkv_norms) = self.of_heads(vision, qkv, names.qk_norms.map(|norms| norms.map(name)))?;
        Ok(Layer {
            norms: pair(names.norms)?,
            qkv,
            qkv_norms,
            scales: names
                .scales
                .map(|[first, second]| Ok::<_, Problem>([scale(first)?, scale(second)?]))
                .transpose()?,
            norms_behind: names.norms_behind.map(pair).transpose()?,
            output: linear(names.output, [hidden, hidden])?,
            gate: names.gate.map(|gate| linear(gate, [inner, hidden])).transpose()?,
            up: linear(names.up, [inner, hidden])?,
            down: linear(names.down, [hidden, inner])?,
        })
    }

    /// What makes queries, keys and values, with the norms of these. Where columns and rows turn half a head each, the rows of the
    /// weights are in the order in which both together turn a head: numbers of rows, then of columns, in both of its halves.
    fn of_heads(
        &self,
        vision: &Vision,
        qkv: [Linear; 3],
        names: Option<[String; 2]>,
    ) -> Result<([Linear; 3], [Option<Norm>; 3]), Problem> {
        let (head_dim, hidden) = (vision.encoder.head_dim(), vision.encoder.hidden_size);
        let has_halves = matches!(vision.encoder.kind, EncoderKind::Gemma4 { .. });
        let width = if has_halves { head_dim } else { hidden };
        let norms = names.map(|names| names.map(|name| self.norm(&name, width, false)));
        let (of_q, of_k) = norms.map_or((None, None), |[q, k]| (Some(q), Some(k)));
        let (of_q, of_k) = (of_q.transpose()?, of_k.transpose()?);
        if !has_halves {
            return Ok((qkv, [of_q, of_k, None]));
        }
        let quarter = head_dim / 4;
        let of_head = [2, 0, 3, 1].into_iter().flat_map(|part| part * quarter..(part + 1) * quarter);
        let of_head: Vec<usize> = of_head.collect();
        let all: Vec<usize> =
            (0..hidden).step_by(head_dim).flat_map(|head| of_head.iter().map(move |at| head + at)).collect();
        let [q, k, v] = qkv;
        let turned = |linear: Linear| {
            let values = linear.weight.values.dense().into_owned().select(0, indices(all.iter().copied(), self.device));
            Linear { weight: Weight::new(values), ..linear }
        };
        let norm = |norm: Norm| {
            let weight = norm.weight.select(0, indices(of_head.iter().copied(), self.device));
            Norm { weight, ..norm }
        };
        let ones = Norm { weight: Tensor::ones([head_dim], (self.device, DType::F32)), bias: None };
        Ok(([turned(q), turned(k), v], [of_q.map(norm), of_k.map(norm), Some(ones)]))
    }
}

/// Queries, keys and values of what makes all.
fn in_thirds(all: &Weight) -> [Linear; 3] {
    let (values, third) = (all.values.dense().into_owned(), all.values.dense().dims()[0] / 3);
    [0, third, 2 * third].map(|start| {
        let bias = all.bias.as_ref().map(|bias| bias.clone().narrow(0, start, third));
        Linear { weight: Weight { bias, ..Weight::new(values.clone().narrow(0, start, third)) }, bounds: None }
    })
}

/// Numbers that are of the colors of every pixel of a patch in turn, color by color.
fn by_channel(numbers: Tensor<1>, patch: usize) -> Tensor<1> {
    numbers.reshape([patch * patch, 3]).swap_dims(0, 1).reshape([3 * patch * patch])
}

impl<'a> Found<'a> {
    fn new(
        vision: &Vision,
        (weights, files): (&'a Weights, &'a WeightFiles),
        config: &'a ModelConfig,
        device: &'a Device,
    ) -> Self {
        let mut names = Names::of(vision.encoder.kind);
        let is_siglip = matches!(vision.encoder.kind, EncoderKind::Siglip2 { .. });
        if is_siglip || matches!(vision.projector, Projector::Pooling { .. }) {
            // Newer files have less of its modules.
            const OLD: &str = "vision_tower.vision_model.";
            let is_old = files.tensors().keys().any(|name| name.trim_start_matches("model.").starts_with(OLD));
            names.encoder = if is_old { OLD } else { "vision_tower." };
        }
        let within = format!("model.{}", names.encoder);
        let is_within = files.tensors().keys().any(|name| name.starts_with(&within));
        let prefix = if is_within { "model." } else { "" };
        Self { weights, files, config, names, prefix, device, problems: None }
    }

    fn tower(&self, vision: Vision) -> Result<Tower, Problem> {
        let (names, device) = (&self.names, self.device);
        let (hidden, patch) = (vision.encoder.hidden_size, vision.encoder.patch_size);
        let name = |part: &str| format!("{}{part}", names.encoder);
        let patches = name(names.patches);
        let patches_weight = format!("{patches}.weight");
        let values: Tensor<4> = match names.num_frames {
            0 => {
                let values = self.matrix(&patches_weight, [hidden, patch * patch * 3])?;
                values.reshape([hidden, patch, patch, 3]).permute([0, 3, 1, 2])
            }
            1 => self.tensor(&patches_weight, [hidden, 3, patch, patch])?,
            // What frames have alike.
            frames => {
                let values: Tensor<5> = self.tensor(&patches_weight, [hidden, 3, frames, patch, patch])?;
                values.sum_dim(2).squeeze_dim(2)
            }
        };
        let values = values.reshape([hidden, 3 * patch * patch]);
        let positions = match (names.positions, vision.encoder.kind) {
            (
                Some(part),
                EncoderKind::Siglip { side }
                | EncoderKind::Siglip2 { side }
                | EncoderKind::Glm { side, .. }
                | EncoderKind::Qwen3 { side, .. }
                | EncoderKind::PaddleOcr { side, .. },
            ) => Some(self.tensor(&name(part), [side * side, hidden])?),
            (Some(part), EncoderKind::InternVit { side, .. }) => {
                let num_places = side * side + 1;
                Some(self.tensor(&name(part), [1, num_places, hidden])?.reshape([num_places, hidden]))
            }
            (Some(part), EncoderKind::Gemma4 { num_places, .. }) => {
                Some(self.tensor(&name(part), [2, num_places, hidden])?.reshape([2 * num_places, hidden]))
            }
            (Some(part), EncoderKind::Gemma4Unified { num_places }) => {
                let places: Tensor<3> = self.tensor(&name(part), [num_places, 2, hidden])?;
                Some(places.swap_dims(0, 1).reshape([2 * num_places, hidden]))
            }
            _ => None,
        };
        let class = |part: &str| Ok::<_, Problem>(self.tensor(&name(part), [1, 1, hidden])?.reshape([1, hidden]));
        let end = |part: Option<&str>| part.map(|part| self.norm(&name(part), hidden, names.has_bias)).transpose();
        let weight = Weight { bias: self.bias(&patches, hidden, names.has_patch_bias)?, ..Weight::new(values) };
        let pixel_norm = names.pixels.map(|part| {
            let Norm { weight, bias } = self.norm(&name(part), 3 * patch * patch, true)?;
            Ok::<_, Problem>(Norm { weight: by_channel(weight, patch), bias: bias.map(|bias| by_channel(bias, patch)) })
        });
        Ok(Tower {
            place: place_of(device, DType::F32),
            device: device.clone(),
            pixel_norm: pixel_norm.transpose()?,
            patches: Linear { weight, bounds: None },
            class: names.class.map(class).transpose()?,
            positions,
            ends: [end(names.ends[0])?, end(names.ends[1])?],
            layers: (0..vision.encoder.num_layers).map(|index| self.layer(&vision, index)).collect::<Result<_, _>>()?,
            projector: self.projector(&vision, None)?,
            deepstack: (0..vision.deepstack.len())
                .map(|level| self.projector(&vision, Some(level)))
                .collect::<Result<_, _>>()?,
            vision,
        })
    }
}

impl Tower {
    /// Reads the weights of a model's tower onto a device. Matrices that the model's `config` says are stored as codes are decoded.
    ///
    /// # Errors
    /// Tensors that are missing, misshapen or of a type that cannot be read.
    pub fn load(
        vision: Vision,
        weights: (&Weights, &WeightFiles),
        config: &ModelConfig,
        device: &Device,
    ) -> Result<Self, Problem> {
        Self::check(&vision, weights, config)?;
        Found::new(&vision, weights, config, device).tower(vision)
    }

    /// Looks at the tensors that [`load`](Self::load) reads, by the headers of their files.
    ///
    /// # Errors
    /// Lists all tensors that are missing, misshapen or of a type that cannot be read.
    pub fn check(vision: &Vision, weights: (&Weights, &WeightFiles), config: &ModelConfig) -> Result<(), Problem> {
        let (device, problems) = (Device::flex(), Some(RefCell::default()));
        let found = Found { problems, ..Found::new(vision, weights, config, &device) };
        // Layers one by one: there is only room for them, but much.
        (0..vision.encoder.num_layers).try_for_each(|index| found.layer(vision, index).map(drop))?;
        let encoder = Encoder { num_layers: 0, ..vision.encoder.clone() };
        found.tower(Vision { encoder, ..vision.clone() })?;
        let problems = found.problems.unwrap_or_default().into_inner();
        if problems.is_empty() { Ok(()) } else { Err(found.files.mismatch(&problems)) }
    }
}
