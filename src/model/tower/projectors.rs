//! The weights of projectors.

use burn::tensor::{DType, Tensor};

use super::load::Found;
use super::names::Names;
use super::{Layers, Linear};
use crate::ops::host;
use crate::ops::linear::Weight;
use crate::ops::norm::Norm;
use crate::schema::Problem;
use crate::spec::{EncoderKind, Projector, Vision};
use crate::util::faults;

impl Found<'_> {
    /// The projector, or another of those beside it.
    pub(super) fn projector(&self, vision: &Vision, level: Option<usize>) -> Result<Layers, Problem> {
        let (hidden, text) = (vision.encoder.hidden_size, vision.text_size);
        let merged = hidden * vision.projector.merge_size().pow(2);
        match vision.projector {
            Projector::Merging { has_bias, .. } => {
                let merge = self.linear("multi_modal_projector.patch_merger.merging_layer", [hidden, merged], false)?;
                Ok(Layers {
                    norm: Some(self.norm("multi_modal_projector.norm", hidden, false)?),
                    merge: vec![merge],
                    rest: Some(self.two("multi_modal_projector.linear_", [hidden, text, text], has_bias)?),
                    ..Layers::default()
                })
            }
            Projector::Normed { inner, has_norm, has_bias, .. } => {
                let norm = || self.norm("multi_modal_projector.layer_norm", merged, true);
                Ok(Layers {
                    merged_norm: has_norm.then(norm).transpose()?,
                    rest: Some(self.two("multi_modal_projector.linear_", [merged, inner, text], has_bias)?),
                    ..Layers::default()
                })
            }
            Projector::Joining { .. } => self.joining(vision, level, merged),
            Projector::Gated { inner, .. } => self.gated(vision, inner),
            Projector::Plain { .. } => {
                let name = "embed_vision.multimodal_embedder.embedding_projection";
                Ok(Layers {
                    norm: Some(Norm { weight: Tensor::ones([hidden], (self.device, DType::F32)), bias: None }),
                    merge: vec![self.linear(name, [text, hidden], false)?],
                    ..Layers::default()
                })
            }
            Projector::Standardised { has_statistics, .. } => self.standardised(vision, has_statistics),
            Projector::Pooling { .. } => {
                let name = |part: &str| format!("multi_modal_projector.{part}");
                // Files have it less 1, and the matrix by its inputs.
                let norm: Tensor<1> = self.tensor(&name("mm_soft_emb_norm.weight"), [hidden])?;
                let matrix: Tensor<2> = self.tensor(&name("mm_input_projection_weight"), [hidden, text])?;
                let values = faults::read(matrix.swap_dims(0, 1), "a weight");
                let weight = Weight::new(host::tensor(values, [text, hidden], self.device));
                Ok(Layers {
                    merge: vec![Linear { weight, bounds: None }],
                    merged_norm: Some(Norm { weight: norm + 1.0, bias: None }),
                    ..Layers::default()
                })
            }
            Projector::Linear { .. } => {
                let merge = self.linear("connector.modality_projection.proj", [text, merged], false)?;
                Ok(Layers { merge: vec![merge], ..Layers::default() })
            }
        }
    }

    /// Two layers whose names end in 1 and 2, of these widths.
    fn two(&self, name: &str, [from, inner, to]: [usize; 3], has_bias: bool) -> Result<[Linear; 2], Problem> {
        Ok([
            self.linear(&format!("{name}1"), [inner, from], has_bias)?,
            self.linear(&format!("{name}2"), [to, inner], has_bias)?,
        ])
    }

    fn joining(&self, vision: &Vision, level: Option<usize>, merged: usize) -> Result<Layers, Problem> {
        let (hidden, text) = (vision.encoder.hidden_size, vision.text_size);
        let [norm, first, second] = match vision.encoder.kind {
            EncoderKind::PaddleOcr { .. } => ["pre_norm", "linear_1", "linear_2"],
            EncoderKind::Qwen2_5 { .. } | EncoderKind::Qwen2 { .. } => ["ln_q", "mlp.0", "mlp.2"],
            _ => ["norm", "linear_fc1", "linear_fc2"],
        };
        let has_norm_bias = Names::of(vision.encoder.kind).has_norm_bias;
        let (name, norm_width) = match level {
            None if matches!(vision.encoder.kind, EncoderKind::PaddleOcr { .. }) => ("mlp_AR".to_owned(), hidden),
            None => ("visual.merger".to_owned(), hidden),
            Some(level) => (format!("visual.deepstack_merger_list.{level}"), merged),
        };
        let norm = self.norm(&format!("{name}.{norm}"), norm_width, has_norm_bias)?;
        let (norm, merged_norm) = if level.is_none() { (Some(norm), None) } else { (None, Some(norm)) };
        Ok(Layers {
            norm,
            merged_norm,
            rest: Some([
                self.linear(&format!("{name}.{first}"), [merged, merged], true)?,
                self.linear(&format!("{name}.{second}"), [text, merged], true)?,
            ]),
            ..Layers::default()
        })
    }

    fn gated(&self, vision: &Vision, inner: usize) -> Result<Layers, Problem> {
        let (hidden, text, side) = (vision.encoder.hidden_size, vision.text_size, vision.projector.merge_size());
        let name = |part: &str| format!("visual.merger.{part}");
        let downsample = "visual.downsample";
        let values: Tensor<4> = self.tensor(&format!("{downsample}.weight"), [text, hidden, side, side])?;
        let values = values.permute([0, 2, 3, 1]).reshape([text, side * side * hidden]);
        let weight = Weight { bias: self.bias(downsample, text, true)?, ..Weight::new(values) };
        Ok(Layers {
            merge: vec![Linear { weight, bounds: None }, self.linear(&name("proj"), [text, text], false)?],
            merged_norm: Some(self.norm(&name("post_projection_norm"), text, true)?),
            gate: Some(self.linear(&name("gate_proj"), [inner, text], false)?),
            rest: Some([
                self.linear(&name("up_proj"), [inner, text], false)?,
                self.linear(&name("down_proj"), [text, inner], false)?,
            ]),
            ..Layers::default()
        })
    }

    fn standardised(&self, vision: &Vision, has_statistics: bool) -> Result<Layers, Problem> {
        let (hidden, text) = (vision.encoder.hidden_size, vision.text_size);
        let ones = || Tensor::ones([hidden], (self.device, DType::F32));
        let statistics = if has_statistics {
            [self.tensor("vision_tower.std_bias", [hidden])?, self.tensor("vision_tower.std_scale", [hidden])?]
        } else {
            [ones() * 0.0, ones()]
        };
        Ok(Layers {
            statistics: Some(statistics),
            merge: vec![self.linear("embed_vision.embedding_projection", [text, hidden], false)?],
            merged_norm: Some(Norm { weight: ones(), bias: None }),
            ..Layers::default()
        })
    }
}
