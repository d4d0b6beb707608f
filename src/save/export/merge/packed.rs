//! Linear layers in the forms of compressed-tensors, which servers such as `vLLM` read
//! (<https://github.com/vllm-project/compressed-tensors>).

use rayon::prelude::*;
use safetensors::Dtype as Stored;
use serde_json::{Value, json};

use crate::device::Dtype;
use crate::model::weights::convert;
use crate::ops::quantised::{E2M1, FP8, fp8_code};
use crate::schema::Problem;

/// The largest number of 8-bit floats.
const LARGEST_FP8: f32 = 448.0;
/// The largest number of 4-bit floats.
const LARGEST_FP4: f32 = 6.0;
/// Lengths of groups of integers for which servers have kernels, the usual one first.
const GROUPS: [usize; 3] = [128, 64, 32];

/// Forms, by the names that servers have for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// 4-bit integers, groups of which share a scale.
    W4a16 {
        /// Numbers of a group.
        group_len: usize,
    },
    /// 8-bit floats (E4M3), those of an output sharing a scale; servers round activations likewise.
    Fp8,
    /// 4-bit floats (E2M1), 16 of which share an 8-bit float, and all of a matrix another scale.
    Nvfp4,
    /// 4-bit floats (E2M1), 32 of which share a power of two.
    Mxfp4,
}

/// A matrix in one of the forms.
pub(super) struct Packed {
    pub(super) codes: Vec<u8>,
    pub(super) scales: Vec<u8>,
    /// What they stand for.
    pub(super) decoded: Vec<f32>,
}

impl Packing {
    /// 4-bit integers in the largest groups that divide all of these rows.
    ///
    /// # Errors
    /// No group that does.
    pub fn w4a16(widths: &[usize]) -> Result<Self, Problem> {
        let divides = |group_len: &usize| widths.iter().all(|width| width.is_multiple_of(*group_len));
        GROUPS.into_iter().find(divides).map(|group_len| Self::W4a16 { group_len }).ok_or_else(|| {
            let problem = Problem::new("w4a16 needs rows that are multiples of 32, and this model has others");
            problem.hint("--dtype fp8 takes rows of any length")
        })
    }

    /// Numbers of a row that share a scale; all of them for 8-bit floats.
    fn block_len(self, width: usize) -> usize {
        match self {
            Self::W4a16 { group_len } => group_len,
            Self::Fp8 => width,
            Self::Nvfp4 => 16,
            Self::Mxfp4 => 32,
        }
    }

    /// Whether the rows of a matrix are whole blocks.
    pub(super) fn divides(self, width: usize) -> bool {
        width.is_multiple_of(self.block_len(width))
    }

    /// What takes the place of a weight of this shape: codes, scales and for some a third tensor, with the end of their name,
    /// type and shape. `dtype` is the model's.
    pub(super) fn parts(self, shape: &[usize], dtype: Dtype) -> Vec<(&'static str, Stored, Vec<usize>)> {
        let [rows, width] = [shape[0], shape[1]];
        let blocks = vec![rows, width / self.block_len(width)];
        let dtype = convert::stored_dtype(dtype);
        match self {
            Self::W4a16 { .. } => vec![
                ("weight_packed", Stored::I32, vec![rows, width.div_ceil(8)]),
                ("weight_scale", dtype, blocks),
                ("weight_shape", Stored::I64, vec![2]),
            ],
            Self::Fp8 => vec![("weight", Stored::F8_E4M3, shape.to_vec()), ("weight_scale", dtype, blocks)],
            Self::Nvfp4 => vec![
                ("weight_packed", Stored::U8, vec![rows, width / 2]),
                ("weight_scale", Stored::F8_E4M3, blocks),
                ("weight_global_scale", Stored::F32, vec![1]),
            ],
            Self::Mxfp4 => {
                vec![("weight_packed", Stored::U8, vec![rows, width / 2]), ("weight_scale", Stored::U8, blocks)]
            }
        }
    }

    /// The third of them; `largest` is the largest absolute number of the matrices that share it.
    pub(super) fn third(self, shape: &[usize], largest: f32) -> Vec<u8> {
        match self {
            Self::Nvfp4 => global_scale(largest).to_le_bytes().to_vec(),
            _ => shape.iter().flat_map(|size| (*size as u64).to_le_bytes()).collect(),
        }
    }

    /// Rounds a matrix with rows of `width`; its scales have the type `dtype` where they are floats.
    pub(super) fn pack(self, numbers: &[f32], width: usize, dtype: Dtype, largest: f32) -> Packed {
        let mut decoded = vec![0.0; numbers.len()];
        let len = self.block_len(width);
        let global = global_scale(largest);
        let block = |(numbers, decoded): (&[f32], &mut [f32])| {
            let most = numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
            let (scale, stored) = match self {
                Self::W4a16 { .. } => float_scale(most / 7.5, dtype),
                Self::Fp8 => float_scale(most / LARGEST_FP8, dtype),
                Self::Nvfp4 => {
                    let code = fp8_code((global * most / LARGEST_FP4).min(LARGEST_FP8));
                    (FP8[usize::from(code)] / global, vec![code])
                }
                Self::Mxfp4 => {
                    // Rounded to one bit of mantissa, of which 1.5 times the largest power of two is the most.
                    let exponent = (most.to_bits() + (1 << 21)) >> 23;
                    let code = u8::try_from(exponent.saturating_sub(2).min(254)).unwrap_or(254);
                    (f32::from_bits(if code == 0 { 1 << 22 } else { u32::from(code) << 23 }), vec![code])
                }
            };
            let codes = numbers.iter().zip(decoded).map(|(x, decoded)| {
                let scaled = if scale > 0.0 { x / scale } else { 0.0 };
                let (code, number) = self.code(scaled);
                *decoded = number * scale;
                code
            });
            (codes.collect::<Vec<u8>>(), stored)
        };
        let blocks = numbers.par_chunks(len).zip(decoded.par_chunks_mut(len)).map(block);
        let (codes, scales): (Vec<_>, Vec<_>) = blocks.unzip();
        let codes = codes.concat();
        let codes = if self == Self::Fp8 {
            codes
        } else {
            // Neighbours share a byte, the first in the lower half; words of 32 bits are then in order, too.
            codes.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 4).collect()
        };
        Packed { codes, scales: scales.concat(), decoded }
    }

    /// The code of a scaled number, and what it stands for.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "four bits")]
    fn code(self, x: f32) -> (u8, f32) {
        match self {
            Self::W4a16 { .. } => {
                let number = x.round_ties_even().clamp(-8.0, 7.0);
                ((number + 8.0) as u8, number)
            }
            Self::Fp8 => {
                let code = fp8_code(x.clamp(-LARGEST_FP8, LARGEST_FP8));
                (code, FP8[usize::from(code)])
            }
            Self::Nvfp4 | Self::Mxfp4 => {
                // Of two that are equally near, the one with an even code.
                let size = x.abs();
                let above = (1..8u8).take_while(|code| {
                    let between = f32::midpoint(E2M1[usize::from(*code)], E2M1[usize::from(*code - 1)]);
                    size > between || code % 2 == 0 && size == between
                });
                let code = above.count() as u8 | u8::from(x.is_sign_negative()) << 3;
                (code, E2M1[usize::from(code)])
            }
        }
    }

    /// The `quantization_config` of a model; `whole` are modules that stay as they are.
    pub(super) fn config(self, whole: &[String]) -> Value {
        let weights = |bits: u32, kind: &str, strategy: &str, group_size: Option<usize>| {
            json!({
                "num_bits": bits, "type": kind, "strategy": strategy, "group_size": group_size, "symmetric": true,
                "dynamic": false, "actorder": null,
            })
        };
        let (format, weights, inputs) = match self {
            Self::W4a16 { group_len } => ("pack-quantized", weights(4, "int", "group", Some(group_len)), Value::Null),
            Self::Fp8 => {
                let inputs =
                    json!({"num_bits": 8, "type": "float", "strategy": "token", "symmetric": true, "dynamic": true});
                ("float-quantized", weights(8, "float", "channel", None), inputs)
            }
            Self::Nvfp4 => ("nvfp4-pack-quantized", weights(4, "float", "tensor_group", Some(16)), Value::Null),
            Self::Mxfp4 => ("mxfp4-pack-quantized", weights(4, "float", "group", Some(32)), Value::Null),
        };
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            "ignore": whole,
        })
    }
}

/// By which the scales of 8-bit floats are multiplied, so that that of the largest numbers is the largest.
fn global_scale(largest: f32) -> f32 {
    if largest > 0.0 { LARGEST_FP8 * LARGEST_FP4 / largest } else { 1.0 }
}

/// A scale as it is stored, and its bytes.
fn float_scale(scale: f32, dtype: Dtype) -> (f32, Vec<u8>) {
    let bytes = convert::from_f32(&[scale], dtype).unwrap_or_default();
    (convert::to_f32(&bytes, dtype)[0], bytes)
}
