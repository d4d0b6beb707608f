//! A vision tower (Pixtral, Agrawal et al., 2024), forwards: from an image to what takes the place of embeddings.
//!
//! It computes in `f32`, whatever the language model computes in, and is needed before the first step alone.

use std::sync::Arc;

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Tensor};
use sha2::{Digest as _, Sha256};

use super::weights::{WeightFiles, Weights};
use crate::device::Dtype;
use crate::images::Scaled;
use crate::ops::host;
use crate::ops::kernels::Place;
use crate::ops::layout::{Layout, RotaryTable};
use crate::ops::linear::{Weight, linear};
use crate::ops::norm::rms_norm;
use crate::ops::place::place_of;
use crate::ops::product::{F32Products, matmul};
use crate::ops::rotary::rotate;
use crate::ops::swiglu::gated;
use crate::schema::Problem;
use crate::spec::{Heads, TOWER_PARTS, Vision};
use crate::util::faults;

/// Added to the mean square in the tower's norms.
const EPS: f64 = 1e-5;

/// Most scores that are computed at a time.
const MOST_SCORES: usize = 1 << 24;

/// Frozen weights of a vision tower and of what joins it to the language model.
#[derive(Debug)]
pub struct Tower {
    vision: Vision,
    place: Place,
    /// `[hidden_size, 3 * patch_size^2]`
    patches: Weight,
    norm: Tensor<1>,
    layers: Vec<Layer>,
    projector: Projector,
}

#[derive(Debug)]
struct Layer {
    norms: [Tensor<1>; 2],
    qkv: [Weight; 3],
    output: Weight,
    gate_up: [Weight; 2],
    down: Weight,
}

#[derive(Debug)]
struct Projector {
    norm: Tensor<1>,
    /// Of the patches of a token, `[hidden_size, hidden_size * merge_size^2]`.
    merge: Weight,
    layers: [Weight; 2],
}

/// The weights of a tower where they are.
struct Found<'a> {
    weights: &'a Weights,
    /// Before the names of its tensors.
    prefix: &'static str,
    device: &'a Device,
}

impl Found<'_> {
    fn vector(&self, name: &str, width: usize) -> Result<Tensor<1>, Problem> {
        self.weights.load(&format!("{}{name}", self.prefix), [width], Dtype::F32, self.device)
    }

    fn linear(&self, name: &str, shape: [usize; 2], has_bias: bool) -> Result<Weight, Problem> {
        let values = self.weights.load(&format!("{}{name}.weight", self.prefix), shape, Dtype::F32, self.device)?;
        let bias = has_bias.then(|| self.vector(&format!("{name}.bias"), shape[0])).transpose()?;
        Ok(Weight { bias, ..Weight::new(values) })
    }
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
    /// Reads the weights of a tower onto a device.
    ///
    /// # Errors
    /// Tensors that are missing, misshapen or of a type that cannot be read.
    pub fn load(vision: Vision, weights: &Weights, files: &WeightFiles, device: &Device) -> Result<Self, Problem> {
        let is_within = files.tensors().keys().any(|name| name.starts_with("model.vision_tower."));
        let found = Found { weights, prefix: if is_within { "model." } else { "" }, device };
        let (hidden, patch, text) = (vision.hidden_size, vision.patch_size, vision.text_size);
        let name = "vision_tower.patch_conv.weight";
        let shape = [hidden, 3, patch, patch];
        let patches: Tensor<4> = weights.load(&format!("{}{name}", found.prefix), shape, Dtype::F32, device)?;
        let layer = |index: usize| {
            let name = |part: &str| format!("vision_tower.transformer.layers.{index}.{part}");
            let square = |part: &str| found.linear(&name(part), [hidden, hidden], false);
            let (wide, inner) = ([vision.intermediate_size, hidden], [hidden, vision.intermediate_size]);
            Ok(Layer {
                norms: [
                    found.vector(&name("attention_norm.weight"), hidden)?,
                    found.vector(&name("ffn_norm.weight"), hidden)?,
                ],
                qkv: [square("attention.q_proj")?, square("attention.k_proj")?, square("attention.v_proj")?],
                output: square("attention.o_proj")?,
                gate_up: [
                    found.linear(&name("feed_forward.gate_proj"), wide, false)?,
                    found.linear(&name("feed_forward.up_proj"), wide, false)?,
                ],
                down: found.linear(&name("feed_forward.down_proj"), inner, false)?,
            })
        };
        let projected =
            |part: &str, shape, has_bias| found.linear(&format!("multi_modal_projector.{part}"), shape, has_bias);
        let has_bias = vision.has_projector_bias;
        Ok(Self {
            place: place_of(device, DType::F32),
            patches: Weight::new(patches.reshape([hidden, 3 * patch * patch])),
            norm: found.vector("vision_tower.ln_pre.weight", hidden)?,
            layers: (0..vision.num_layers).map(layer).collect::<Result<_, Problem>>()?,
            projector: Projector {
                norm: found.vector("multi_modal_projector.norm.weight", hidden)?,
                merge: projected(
                    "patch_merger.merging_layer",
                    [hidden, hidden * vision.merge_size * vision.merge_size],
                    false,
                )?,
                layers: [
                    projected("linear_1", [text, hidden], has_bias)?,
                    projected("linear_2", [text, text], has_bias)?,
                ],
            },
            vision,
        })
    }

    /// The features of an image, row by row, each as wide as the language model.
    ///
    /// # Panics
    /// As [`faults::read`].
    #[must_use]
    pub fn features(&self, image: Scaled) -> Vec<f32> {
        let Vision { patch_size, hidden_size, merge_size, .. } = self.vision;
        let [columns, rows] = image.size.map(|side| side / patch_size);
        let device = &self.norm.device();
        // [3, rows, patch, columns, patch] to [rows * columns, 3 * patch * patch]
        let pixels: Tensor<3> = host::tensor(image.values, [3, rows * patch_size, columns * patch_size], device);
        let by_patch = pixels.reshape([3, rows, patch_size, columns, patch_size]).permute([1, 3, 0, 2, 4]);
        let by_patch = by_patch.reshape([rows * columns, 3 * patch_size * patch_size]);
        let x = linear(self.place, &by_patch, &self.patches, None, None).0;
        let mut x = self.normed(&x, &self.norm, EPS);
        let layout = self.layout([rows, columns]);
        for layer in &self.layers {
            x = self.through(layer, x, &layout);
        }
        let Projector { norm, merge, layers: [first, second] } = &self.projector;
        let x = self.normed(&x, norm, self.vision.projector_eps);
        // [rows, merge, columns, merge, hidden] to [tokens, hidden * merge * merge]
        let num_tokens = rows * columns / (merge_size * merge_size);
        let by_token = x.reshape([rows / merge_size, merge_size, columns / merge_size, merge_size, hidden_size]);
        let by_token = by_token.permute([0, 2, 4, 1, 3]).reshape([num_tokens, hidden_size * merge_size * merge_size]);
        let merged = linear(self.place, &by_token, merge, None, None).0;
        let x = linear(self.place, &merged, first, None, None).0;
        let x = gated(self.place, self.vision.projector_activation, &x, &x.ones_like());
        faults::read(linear(self.place, &x, second, None, None).0, "a feature of an image")
    }

    fn normed(&self, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> Tensor<2> {
        rms_norm(self.place, x, weight, eps).0
    }

    fn through(&self, layer: &Layer, x: Tensor<2>, layout: &Layout) -> Tensor<2> {
        let normed = self.normed(&x, &layer.norms[0], EPS);
        let [q, k, v] = layer.qkv.each_ref().map(|weight| linear(self.place, &normed, weight, None, None).0);
        let [q, k] = rotate(self.place, [q, k], layout, 0, self.heads(), false);
        let attended = self.attended([q, k, v]);
        let x = linear(self.place, &attended, &layer.output, None, Some(x)).0;
        let normed = self.normed(&x, &layer.norms[1], EPS);
        let [gate, up] = layer.gate_up.each_ref().map(|weight| linear(self.place, &normed, weight, None, None).0);
        let inner = gated(self.place, self.vision.activation, &gate, &up);
        linear(self.place, &inner, &layer.down, None, Some(x)).0
    }

    fn heads(&self) -> Heads {
        let (num_heads, head_dim) = (self.vision.num_heads, self.vision.head_dim());
        #[expect(clippy::cast_precision_loss, reason = "a width")]
        let scale = (head_dim as f64).sqrt().recip();
        Heads { num_heads, num_kv_heads: num_heads, head_dim, scale, window: None, soft_cap: None }
    }

    /// Every patch sees every other; some queries at a time, so that their scores fit in memory.
    fn attended(&self, qkv: [Tensor<2>; 3]) -> Tensor<2> {
        let Heads { num_heads, head_dim, scale, .. } = self.heads();
        let [num_patches, width] = qkv[0].dims();
        let [q, k, v] = qkv.map(|x| x.reshape([num_patches, num_heads, head_dim]).swap_dims(0, 1));
        let (q, k) = (q * scale, k.swap_dims(1, 2));
        let at_a_time = (MOST_SCORES / (num_heads * num_patches)).max(1);
        let of_queries = |start: usize| {
            let queries = q.clone().narrow(1, start, at_a_time.min(num_patches - start));
            let shares = softmax(matmul(&queries, &k, F32Products::OfDevice), 2);
            matmul(&shares, &v, F32Products::OfDevice)
        };
        let parts = (0..num_patches).step_by(at_a_time).map(of_queries).collect();
        Tensor::cat(parts, 1).swap_dims(0, 1).reshape([num_patches, width])
    }

    /// Patches as tokens, whose positions turn with their row and column.
    fn layout(&self, [rows, columns]: [usize; 2]) -> Layout {
        let num_patches = rows * columns;
        let table = self.table([rows, columns]);
        let positions = (0..u32::try_from(num_patches).unwrap_or(u32::MAX)).collect();
        Layout::new(1, vec![(0, num_patches)], positions, Arc::from([table]))
    }

    /// The angles of every patch: frequencies are dealt alternately to rows and columns.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "in f32, as transformers has them"
    )]
    fn table(&self, [rows, columns]: [usize; 2]) -> RotaryTable {
        let head_dim = self.vision.head_dim();
        let frequency = |index: usize| 1.0 / (self.vision.rope_theta as f32).powf((2 * index) as f32 / head_dim as f32);
        let frequencies: Vec<f32> = (0..head_dim / 2).map(frequency).collect();
        let of_patch = |patch: usize| {
            let [row, column] = [patch / columns, patch % columns].map(|place| place as f32);
            let of_row = frequencies.iter().step_by(2).map(move |frequency| row * frequency);
            let of_column = frequencies[1..].iter().step_by(2).map(move |frequency| column * frequency);
            of_row.chain(of_column)
        };
        let angles: Vec<f32> = (0..rows * columns).flat_map(of_patch).collect();
        let [cos, sin] = [f32::cos, f32::sin].map(|of: fn(f32) -> f32| angles.iter().map(|angle| of(*angle)).collect());
        RotaryTable::new(cos, sin, head_dim / 2)
    }
}
