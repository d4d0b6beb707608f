//! A vision tower, forwards: from an image to what takes the place of embeddings.
//!
//! It computes in `f32`, whatever the language model computes in, and is needed before the first step alone.

use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Tensor};
use sha2::{Digest as _, Sha256};

use super::weights::WeightFiles;
use crate::images::Scaled;
use crate::ops::attention::attention_both_ways;
use crate::ops::host;
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::ops::linear::{Weight, linear};
use crate::ops::norm::Norm;
use crate::ops::rotary::rotate;
use crate::ops::swiglu::gated;
use crate::spec::{Activation, EncoderKind, Grid, Heads, Projector, TOWER_PARTS, Vision};
use crate::util::faults;

use places::{Between, Groups, Places};

mod load;
mod names;
mod places;
mod projectors;
mod sizes;

pub use sizes::{encoding_bytes, encoding_flops, weight_bytes};

/// Added to the variance in the norm of a token's patches, and to the mean squares of queries and keys.
const MERGED_EPS: f64 = 1e-5;
const QK_EPS: f64 = 1e-6;

/// Frozen weights of a vision tower and of what joins it to the language model.
#[derive(Debug)]
pub struct Tower {
    vision: Vision,
    place: Place,
    device: Device,
    /// Of the pixels of each patch.
    pixel_norm: Option<Norm>,
    /// `[hidden_size, 3 * patch_size^2]`
    patches: Linear,
    /// Goes before the patches, and is dropped behind the layers, `[1, hidden_size]`.
    class: Option<Tensor<2>>,
    /// Of that, and of every place, row by row, `[patches, hidden_size]`; or of the places between which patches are; or of every column
    /// and, behind them, every row.
    positions: Option<Tensor<2>>,
    /// Before the layers and behind them.
    ends: [Option<Norm>; 2],
    layers: Vec<Layer>,
    projector: Layers,
    /// What makes of the outputs of some layers what goes beside that.
    deepstack: Vec<Layers>,
}

/// A linear layer, and between which numbers its inputs and outputs are kept, if they are.
#[derive(Debug)]
struct Linear {
    weight: Weight,
    bounds: Option<[[f32; 2]; 2]>,
}

#[derive(Debug)]
struct Layer {
    norms: [Norm; 2],
    qkv: [Linear; 3],
    /// Of queries, keys and values: over all heads, or each head's.
    qkv_norms: [Option<Norm>; 3],
    output: Linear,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    /// Of what attention and feed-forward layer add.
    scales: Option<[Tensor<1>; 2]>,
    /// Likewise.
    norms_behind: Option<[Norm; 2]>,
}

/// Of a projector.
#[derive(Debug, Default)]
struct Layers {
    norm: Option<Norm>,
    /// Bias and factor of each number of the patches' mean.
    statistics: Option<[Tensor<1>; 2]>,
    /// Of the patches of a token, one after the other, or of the norm of their mean.
    merge: Vec<Linear>,
    /// Of these patches, or of their mean.
    merged_norm: Option<Norm>,
    /// Of a feed-forward layer behind it.
    gate: Option<Linear>,
    /// Behind it, if there are more.
    rest: Option<[Linear; 2]>,
}

/// Stands for the weights of a model's tower: a part of each of its tensors. `None` where the files have none.
#[must_use]
pub fn digest(files: &WeightFiles) -> Option<[u8; 32]> {
    let is_of_tower = |name: &str| TOWER_PARTS.iter().any(|part| name.trim_start_matches("model.").starts_with(part));
    let mut tensors = files.tensors().iter().filter(|(name, _)| is_of_tower(name)).peekable();
    tensors.peek()?;
    let mut hash = Sha256::new();
    for (name, stored) in tensors {
        let bytes = files.bytes(stored);
        hash.update(name.trim_start_matches("model."));
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(&bytes[..bytes.len().min(4096)]);
        hash.update(&bytes[bytes.len().saturating_sub(4096)..]);
    }
    Some(hash.finalize().into())
}

impl Tower {
    /// The features of an image's pieces, row by row, each as wide as [`Vision::feature_size`].
    ///
    /// # Panics
    /// As [`faults::read`].
    #[must_use]
    pub fn features(&self, pieces: Vec<Scaled>) -> Vec<f32> {
        pieces.into_iter().flat_map(|piece| self.of_piece(piece)).collect()
    }

    fn of_piece(&self, image: Scaled) -> Vec<f32> {
        let patch_size = self.vision.encoder.patch_size;
        let [columns, rows] = image.size.map(|side| side / patch_size);
        // [3, rows, patch, columns, patch] to [rows * columns, 3 * patch * patch]
        let pixels: Tensor<3> = host::tensor(image.values, [3, rows * patch_size, columns * patch_size], &self.device);
        let by_patch = pixels.reshape([3, rows, patch_size, columns, patch_size]).permute([1, 3, 0, 2, 4]);
        let by_patch = by_patch.reshape([rows * columns, 3 * patch_size * patch_size]);
        let windows = self.vision.encoder.windows.as_ref();
        let places = Places::new(Grid { rows, columns }, windows);
        let by_patch = places.ordered(by_patch);
        let kind = self.vision.encoder.kind;
        let by_patch = if let EncoderKind::Gemma4 { .. } = kind { (by_patch - 0.5) * 2.0 } else { by_patch };
        let x = self.linear(&self.normed(by_patch, self.pixel_norm.as_ref()), &self.patches);
        let x = if let Some(class) = &self.class { Tensor::cat(vec![class.clone(), x], 0) } else { x };
        let mut x = self.normed(x, self.ends[0].as_ref());
        if let Some(positions) = &self.positions {
            let between = |side: usize, between: Between| places.between(positions, (side, between), &self.device);
            x = x + match kind {
                EncoderKind::Qwen3 { side, .. } => between(side, Between::Corners),
                EncoderKind::PaddleOcr { side, .. } => between(side, Between::Edges),
                EncoderKind::Siglip2 { side } => between(side, Between::Smoothed),
                EncoderKind::Glm { side, .. } => between(side, Between::Cubic),
                EncoderKind::Gemma4 { num_places, .. } | EncoderKind::Gemma4Unified { num_places } => {
                    places.of_columns_and_rows(positions, num_places)
                }
                _ => positions.clone(),
            };
        }
        let layout = places.layout(&self.vision.encoder);
        let mut beside = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let num_patches = x.dims()[0];
            let groups = places.groups(windows, index).unwrap_or_else(|| vec![[1, num_patches]]);
            x = self.through(layer, x, layout.as_ref(), &groups);
            let own = self.vision.deepstack.iter().position(|of| *of == index).and_then(|own| self.deepstack.get(own));
            beside.extend(own.map(|own| self.projected(own, &places.by_row(&x), [rows, columns])));
        }
        let x = self.normed(x, self.ends[1].as_ref());
        let x = if self.class.is_some() { x.narrow(0, 1, rows * columns) } else { x };
        beside.insert(0, self.projected(&self.projector, &places.by_row(&x), [rows, columns]));
        faults::read(Tensor::cat(beside, 1), "a feature of an image")
    }

    fn projected(&self, layers: &Layers, x: &Tensor<2>, [rows, columns]: [usize; 2]) -> Tensor<2> {
        let (side, hidden) = (self.vision.projector.merge_size(), self.vision.encoder.hidden_size);
        let (in_order, eps) = match self.vision.projector {
            Projector::Merging { eps, .. } => ([0, 2, 4, 1, 3], eps),
            Projector::Joining { eps, .. }
            | Projector::Pooling { eps, .. }
            | Projector::Standardised { eps, .. }
            | Projector::Plain { eps } => ([0, 2, 1, 3, 4], eps),
            Projector::Linear { .. } | Projector::Normed { .. } | Projector::Gated { .. } => {
                ([0, 2, 1, 3, 4], MERGED_EPS)
            }
        };
        let normed = |x: Tensor<2>, norm: &Option<Norm>| match norm {
            Some(norm) => norm.forward(self.place, &x, eps).0,
            None => x,
        };
        // [rows, side, columns, side, hidden] to [tokens, hidden * side * side]
        let by_token = normed(x.clone(), &layers.norm).reshape([rows / side, side, columns / side, side, hidden]);
        let (by_token, num_tokens) = (by_token.permute(in_order), rows * columns / (side * side));
        if let Projector::Pooling { .. } | Projector::Standardised { .. } = self.vision.projector {
            let pooled = by_token.reshape([num_tokens, side * side, hidden]).mean_dim(1).squeeze_dim(1);
            let pooled = match &layers.statistics {
                #[expect(clippy::cast_precision_loss, reason = "a width")]
                Some([bias, factor]) => {
                    (pooled * (hidden as f64).sqrt() - bias.clone().unsqueeze()) * factor.clone().unsqueeze()
                }
                None => pooled,
            };
            return self.in_turn(normed(pooled, &layers.merged_norm), &layers.merge);
        }
        let x = self.in_turn(by_token.reshape([num_tokens, hidden * side * side]), &layers.merge);
        let x = normed(x, &layers.merged_norm);
        let Some([first, second]) = &layers.rest else { return x };
        let activation = match self.vision.projector {
            Projector::Merging { activation, .. } | Projector::Normed { activation, .. } => activation,
            _ => Activation::Gelu,
        };
        let inner = match &layers.gate {
            Some(gate) => {
                let x = self.activated(activation, &x);
                gated(self.place, self.vision.encoder.activation, &self.linear(&x, gate), &self.linear(&x, first))
            }
            None => self.activated(activation, &self.linear(&x, first)),
        };
        self.linear(&inner, second)
    }

    fn in_turn(&self, x: Tensor<2>, layers: &[Linear]) -> Tensor<2> {
        layers.iter().fold(x, |x, layer| self.linear(&x, layer))
    }

    fn linear(&self, x: &Tensor<2>, Linear { weight, bounds }: &Linear) -> Tensor<2> {
        let Some([of_input, of_output]) = bounds else { return linear(self.place, x, weight, None, None).0 };
        let y = linear(self.place, &x.clone().clamp(of_input[0], of_input[1]), weight, None, None).0;
        y.clamp(of_output[0], of_output[1])
    }

    fn activated(&self, activation: Activation, x: &Tensor<2>) -> Tensor<2> {
        gated(self.place, activation, x, &x.ones_like())
    }

    fn normed(&self, x: Tensor<2>, norm: Option<&Norm>) -> Tensor<2> {
        match norm {
            Some(norm) => norm.forward(self.place, &x, self.vision.encoder.eps).0,
            None => x,
        }
    }

    fn through(&self, layer: &Layer, x: Tensor<2>, layout: Option<&Layout>, groups: &Groups) -> Tensor<2> {
        let normed = self.normed(x.clone(), Some(&layer.norms[0]));
        let [q, k, v] = [0, 1, 2].map(|part| {
            let x = self.linear(&normed, &layer.qkv[part]);
            layer.qkv_norms[part].as_ref().map_or_else(|| x.clone(), |norm| self.by_heads(&x, norm))
        });
        let [q, k] = match layout {
            Some(layout) => rotate(self.place, [q, k], layout, 0, self.heads(), false),
            None => [q, k],
        };
        let attended = attention_both_ways(self.place, [&q, &k, &v], groups, self.heads());
        let x = self.added(x, (layer, 0), (&attended, &layer.output));
        let normed = self.normed(x.clone(), Some(&layer.norms[1]));
        let (activation, up) = (self.vision.encoder.activation, self.linear(&normed, &layer.up));
        let inner = match &layer.gate {
            Some(gate) => gated(self.place, activation, &self.linear(&normed, gate), &up),
            None if matches!(self.vision.encoder.kind, EncoderKind::Qwen2 { .. }) => up.clone() * sigmoid(up * 1.702),
            None => self.activated(activation, &up),
        };
        self.added(x, (layer, 1), (&inner, &layer.down))
    }

    /// A norm over as many numbers as it has weights.
    fn by_heads(&self, x: &Tensor<2>, norm: &Norm) -> Tensor<2> {
        let ([rows, width], [of]) = (x.dims(), norm.weight.dims());
        let eps =
            if let EncoderKind::Gemma4 { .. } = self.vision.encoder.kind { self.vision.encoder.eps } else { QK_EPS };
        norm.forward(self.place, &x.clone().reshape([rows * width / of, of]), eps).0.reshape([rows, width])
    }

    /// `x` with what a layer's attention or feed-forward layer makes last.
    fn added(&self, x: Tensor<2>, (layer, which): (&Layer, usize), (inner, last): (&Tensor<2>, &Linear)) -> Tensor<2> {
        if let Some(scales) = &layer.scales {
            return x + self.linear(inner, last) * scales[which].clone().unsqueeze();
        }
        match &layer.norms_behind {
            Some(norms) => x + self.normed(self.linear(inner, last), Some(&norms[which])),
            None => linear(self.place, inner, &last.weight, None, Some(x)).0,
        }
    }

    fn heads(&self) -> Heads {
        let (num_heads, head_dim) = (self.vision.encoder.num_heads, self.vision.encoder.head_dim());
        #[expect(clippy::cast_precision_loss, reason = "a width")]
        let scale = match self.vision.encoder.kind {
            // Its norms of heads have it.
            EncoderKind::Gemma4 { .. } => 1.0,
            _ => (head_dim as f64).sqrt().recip(),
        };
        Heads { num_heads, num_kv_heads: num_heads, head_dim, scale, window: None, chunk: None, soft_cap: None }
    }
}
