//! What a merged tensor becomes in a safetensors file: itself, or codes and scales under the names of bitsandbytes or
//! compressed-tensors.

use std::borrow::Cow;
use std::sync::OnceLock;

use safetensors::View;
use serde_json::json;

use super::experts::JoinedExperts;
use super::packed::Packing;
use super::tensor::MergedTensor;
use crate::device::Dtype;
use crate::model::weights::{Quantisation, StoredTensor, WeightFiles, convert};
use crate::ops::quantised::{BlockScales, Coding, Quantised};
use crate::schema::Problem;

/// A part of a merged tensor that is a tensor of the file.
#[derive(Clone, Copy)]
enum Part {
    Whole,
    Codes,
    Scales,
    /// The numbers that four-bit codes stand for.
    Table,
    /// Shape and kind of four-bit codes, as JSON.
    State,
    /// The kind of layout of eight-bit codes: rows.
    Layout,
    /// One of those of compressed-tensors.
    Packed(Packing, usize),
}

/// What linear layers are written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Codes that bitsandbytes reads.
    Bitsandbytes(Coding),
    /// A form of compressed-tensors.
    Packed(Packing),
}

/// A tensor of the file as safetensors writes it, which knows no failure.
pub(super) struct Written<'a> {
    tensor: MergedTensor<'a>,
    part: Part,
    dtype: Dtype,
    quantisation: Option<Quantisation>,
    shape: Vec<usize>,
    kind: safetensors::Dtype,
    failure: &'a OnceLock<Problem>,
}

impl<'a> Written<'a> {
    /// What the file holds of `tensor`: in `dtype`, or as codes.
    pub(super) fn all(
        tensor: MergedTensor<'a>,
        dtype: Dtype,
        codes: Option<Codes>,
        failure: &'a OnceLock<Problem>,
    ) -> Vec<(String, Self)> {
        use safetensors::Dtype::{F32, I8, U8};
        let shape = tensor.shape.to_vec();
        let whole = tensor.name_in_file();
        let quantisation = match codes {
            Some(Codes::Bitsandbytes(coding)) => Some(Quantisation { coding, nested: false }),
            _ => None,
        };
        let part = |(suffix, part, shape, kind): (&str, Part, Vec<usize>, safetensors::Dtype)| {
            let module = whole.strip_suffix(".weight").unwrap_or(&whole);
            let name = if suffix.is_empty() { whole.clone() } else { format!("{module}.{suffix}") };
            (name, Self { tensor, part, dtype, quantisation, shape, kind, failure })
        };
        let coding = match codes {
            None => return vec![part(("", Part::Whole, shape, convert::stored_dtype(dtype)))],
            Some(Codes::Packed(packing)) => {
                let parts = packing.parts(&shape, dtype).into_iter().enumerate();
                return parts
                    .map(|(i, (suffix, kind, shape))| part((suffix, Part::Packed(packing, i), shape, kind)))
                    .collect();
            }
            Some(Codes::Bitsandbytes(coding)) => coding,
        };
        let len: usize = shape.iter().product();
        let state = format!("weight.quant_state.bitsandbytes__{coding}");
        let parts = if coding == Coding::Int8 {
            vec![
                ("weight", Part::Codes, shape.clone(), I8),
                ("SCB", Part::Scales, vec![shape[0]], F32),
                ("weight_format", Part::Layout, Vec::new(), U8),
            ]
        } else {
            vec![
                ("weight", Part::Codes, vec![len.div_ceil(2), 1], U8),
                ("weight.absmax", Part::Scales, vec![len.div_ceil(Quantisation::BLOCK_LEN)], F32),
                ("weight.quant_map", Part::Table, vec![16], F32),
                (&*state, Part::State, vec![state_json(coding, &shape, dtype).len()], U8),
            ]
        };
        parts.into_iter().map(part).collect()
    }

    fn bytes(&self) -> Result<Cow<'_, [u8]>, Problem> {
        if let Part::Packed(packing, index) = self.part {
            return self.tensor.packed(packing, index, self.dtype).map(Cow::Owned);
        }
        let Some(quantisation) = self.quantisation else { return self.tensor.bytes_in(self.dtype) };
        let coding = quantisation.coding;
        let owned = match self.part {
            Part::Whole | Part::Packed(..) => return self.tensor.bytes_in(self.dtype),
            Part::Codes => {
                self.tensor.report();
                self.tensor.codes(quantisation)?.codes.into_data().bytes().to_vec()
            }
            Part::Scales => bytemuck::cast_slice(&scales(self.tensor.codes(quantisation)?)).to_vec(),
            Part::Table => coding.table().map_or_else(Vec::new, |table| bytemuck::cast_slice(table).to_vec()),
            Part::State => state_json(coding, self.tensor.shape, self.dtype).into_bytes(),
            Part::Layout => vec![0],
        };
        Ok(Cow::Owned(owned))
    }
}

/// The largest absolute number of each block.
fn scales(codes: Quantised) -> Vec<f32> {
    let BlockScales::Plain(scales) = codes.scales else { return Vec::new() };
    let factor = if codes.coding == Coding::Int8 { 127.0 } else { 1.0 };
    scales.into_data().iter::<f32>().map(|scale| scale * factor).collect()
}

/// What PyTorch calls a type.
pub(super) fn torch_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::Bf16 => "bfloat16",
        Dtype::F16 => "float16",
    }
}

fn state_json(coding: Coding, shape: &[usize], dtype: Dtype) -> String {
    let dtype = torch_name(dtype);
    json!({"quant_type": coding.to_string(), "blocksize": Quantisation::BLOCK_LEN, "dtype": dtype, "shape": shape})
        .to_string()
}

/// A tensor of the file.
pub(super) enum ToWrite<'a> {
    Merged(Written<'a>),
    Joined(JoinedExperts<'a>),
    /// It is reported when it is written.
    AsStored(&'a WeightFiles, &'a StoredTensor, &'a dyn Fn(usize, usize)),
}

impl View for ToWrite<'_> {
    fn dtype(&self) -> safetensors::Dtype {
        match self {
            Self::Merged(written) => written.dtype(),
            Self::Joined(joined) => joined.dtype(),
            Self::AsStored(_, stored, _) => stored.dtype,
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Self::Merged(written) => written.shape(),
            Self::Joined(joined) => joined.shape(),
            Self::AsStored(_, stored, _) => &stored.shape,
        }
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self {
            Self::Merged(written) => written.data(),
            Self::Joined(joined) => joined.data(),
            Self::AsStored(files, stored, on_bytes) => {
                let bytes = files.bytes(stored);
                on_bytes(bytes.len(), 0);
                bytes
            }
        }
    }

    fn data_len(&self) -> usize {
        match self {
            Self::Merged(written) => written.data_len(),
            Self::Joined(joined) => joined.data_len(),
            Self::AsStored(files, stored, _) => files.bytes(stored).len(),
        }
    }
}

impl View for Written<'_> {
    fn dtype(&self) -> safetensors::Dtype {
        self.kind
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes().unwrap_or_else(|problem| {
            // The first problem is reported, and the unfinished file deleted.
            drop(self.failure.set(problem));
            Cow::Owned(vec![0; self.data_len()])
        })
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype().bitsize() / 8
    }
}
