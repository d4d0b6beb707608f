//! The tensors of a GGUF file.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Bytes, DType};
use rayon::prelude::*;

use super::convert;
use super::files::digest;
use super::source::{MatrixStorage, Numbers, Source};
use crate::config::Residency;
use crate::device::Dtype;
use crate::ops::blocks::Blocks;
use crate::ops::cpu;
use crate::ops::linear::Matrix;
use crate::ops::place::place_of;
use crate::schema::Problem;
use crate::spec::GATED_CONV;
use crate::spec::gguf::{Coding, Order, Part, curve_key, names_of, norms_of_scale, num_predicting, parts_of};
use crate::spec::{Block, ModelConfig, in_layer};
use crate::util::gguf::{GgufFile, GgufTensor, GgufType, ROPE_FACTORS};
use crate::util::text;

/// The weights in a GGUF file.
#[derive(Debug)]
pub struct GgufWeights {
    file: GgufFile,
    config: ModelConfig,
}

impl GgufWeights {
    /// Maps a file; no weights are read.
    ///
    /// # Errors
    /// As [`GgufFile::open`].
    pub fn open(path: &Path, config: &ModelConfig) -> Result<Self, Problem> {
        Ok(Self { file: GgufFile::open(path)?, config: config.clone() })
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    /// The types of the tensors, such as `q4_k`, sorted.
    #[must_use]
    pub fn types(&self) -> Vec<String> {
        let mut types: Vec<String> =
            self.file.tensors().values().map(|tensor| tensor.kind.to_string().to_lowercase()).collect();
        types.sort();
        types.dedup();
        types
    }

    /// Type of the embedding; `None` where it is quantised.
    #[must_use]
    pub fn float_dtype(&self) -> Option<Dtype> {
        float_dtype(self.file.tensors().get("token_embd.weight")?.kind)
    }

    fn rows(&self, name: &str, shape: &[usize]) -> Result<GgufRows<'_>, Problem> {
        // Convolutions are also asked for without their rows.
        let is_conv = name.ends_with("conv1d.weight") || name.ends_with(GATED_CONV);
        let others = |block: &Block| block.other_tensors(self.config.hidden_size).collect::<Vec<_>>();
        let mut others = self.config.blocks.iter().filter(|_| is_conv).flat_map(others);
        let conv = others.find(|(part, _)| name.ends_with(part)).map(|(_, shape)| shape);
        let shape = conv.as_deref().unwrap_or(shape);
        let (order, coding) = (Order::of(&self.config, name), Coding::of(&self.config, name));
        // A bias is a column.
        let width = if shape.len() == 1 { 1 } else { shape[shape.len() - 1] };
        let mut parts = Vec::new();
        let mut first = 0;
        for (tensor, part) in self.stored(name, shape).map_err(|problem| self.mismatch(&[problem]))? {
            parts.push(GgufPart { first, kind: tensor.kind, bytes: self.file.bytes(tensor), turned: part.turned });
            first += part.num_rows * shape[1..].iter().product::<usize>() / width;
        }
        Ok(GgufRows { parts, width, order, coding })
    }

    /// A layer's number of a list in the metadata.
    fn number(&self, key: &str, layer: usize) -> Option<f32> {
        self.file.numbers(key)?.get(layer).copied()
    }

    /// The tensors with the rows of one of this shape; their types must be such that are read.
    fn stored(&self, name: &str, shape: &[usize]) -> Result<Vec<(&GgufTensor, Part)>, String> {
        let parts = parts_of(&self.config, name, shape).into_iter();
        let parts = parts.map(|part| Ok((self.part(&part, shape.len())?, part))).collect::<Result<Vec<_>, String>>()?;
        if parts.is_empty() { Err(format!("no place for `{name}`")) } else { Ok(parts) }
    }

    /// One of them; ours has so many dimensions.
    fn part(&self, Part { name: theirs, shape, .. }: &Part, num_dimensions: usize) -> Result<&GgufTensor, String> {
        let tensor = self.file.tensors().get(theirs).ok_or_else(|| format!("missing: `{theirs}` {shape:?}"))?;
        let is_more = |size: &&usize| **size > 1;
        if !tensor.shape.iter().filter(is_more).eq(shape.iter().filter(is_more)) {
            return Err(format!("misshapen: `{theirs}` is {:?}, expected {shape:?}", tensor.shape));
        }
        let is_whole = shape.last().is_some_and(|width| width.is_multiple_of(tensor.kind.block_size()));
        match float_dtype(tensor.kind) {
            None if !cpu::KINDS.contains(&tensor.kind) || !is_whole || num_dimensions != 2 => {
                Err(format!("type: `{theirs}` {shape:?} is {}, expected F32, F16, BF16 or whole blocks", tensor.kind))
            }
            _ => Ok(tensor),
        }
    }

    fn mismatch(&self, problems: &[String]) -> Problem {
        self.file.problem(format!("the tensors do not fit the metadata:{}", text::lines(problems)))
    }
}

impl Source for GgufWeights {
    fn check(&self, config: &ModelConfig) -> Result<(), Problem> {
        let expected = config.expected_tensors();
        let problem = |(name, shape): &(String, Vec<usize>)| match curve_key(name) {
            Some((key, layer)) if self.number(key, layer).is_none() => {
                Some(format!("missing: `{key}` of layer {layer}"))
            }
            Some(_) => None,
            None => self.stored(name, shape).err(),
        };
        let mut problems: Vec<String> = expected.iter().filter_map(problem).collect();
        // What layers with the keys and values of others have of their own.
        let of_own =
            |layer| ["k_proj", "v_proj", "k_norm"].map(|part| in_layer(layer, &format!("self_attn.{part}.weight")));
        let unused = (0..config.num_layers()).flat_map(of_own).filter(|name| config.is_unused(name));
        let names = expected.iter().map(|(name, _)| name.clone()).chain(unused);
        let of_scale = expected.iter().flat_map(|(name, _)| norms_of_scale(config, name)).map(|(name, _)| name);
        let known: HashSet<String> = names.flat_map(|name| names_of(config, &name)).chain(of_scale).collect();
        let layer = |name: &str| name.strip_prefix("blk.")?.split_once('.')?.0.parse::<usize>().ok();
        let num_layers = config.num_layers();
        let predicting = num_layers..num_layers + usize::try_from(num_predicting(&self.file)).unwrap_or(0);
        let is_used = |name: &str| layer(name).is_none_or(|layer| !predicting.contains(&layer));
        let unexpected = self
            .file
            .tensors()
            .iter()
            .filter(|(name, _)| !known.contains(*name) && !ROPE_FACTORS.contains(&&***name) && is_used(name));
        problems.extend(unexpected.map(|(name, tensor)| format!("unexpected: `{name}` {:?}", tensor.shape)));
        if problems.is_empty() { Ok(()) } else { Err(self.mismatch(&problems)) }
    }

    fn digest(&self) -> Option<[u8; 32]> {
        let name = self.file.path().file_name().unwrap_or_default().to_string_lossy();
        Some(digest([(&*name, self.file.content())].into_iter()))
    }

    fn numbers(&self, name: &str, shape: &[usize]) -> Result<(Numbers<'_>, &Path), Problem> {
        if let Some(number) = curve_key(name).and_then(|(key, layer)| self.number(key, layer)) {
            return Ok((Numbers::Decoded(Box::new(move |_, to| to.fill(number))), self.file.path()));
        }
        let rows = self.rows(name, shape)?;
        Ok((Numbers::Decoded(Box::new(move |first, to| rows.read(first, to))), self.file.path()))
    }

    /// The matrix as it lies in the file, where it is quantised there and the kernels of the CPU will decode it.
    fn as_stored(&self, name: &str, shape: [usize; 2], held: &MatrixStorage<'_>) -> Result<Option<Matrix>, Problem> {
        // Those of a GPU travel as numbers: it has no kernel for the blocks of GGUF.
        if held.storage.residency == Residency::Host {
            return Ok(None);
        }
        let rows = self.rows(name, &shape)?;
        let kind = rows.parts[0].kind;
        // Of columns in another order, blocks are no blocks.
        let is_turned = rows.parts.iter().any(|part| part.turned.is_some());
        let has_blocks = kind.is_quantized() && !is_turned && !rows.order.is_some_and(|order| order.is_of_columns);
        let is_of_one_kind = rows.parts.iter().all(|part| part.kind == kind);
        if !has_blocks || !is_of_one_kind || !place_of(held.device, DType::F32).takes_blocks() {
            return Ok(None);
        }
        let mut bytes = vec![0; rows.parts.iter().map(|part| part.bytes.len()).sum()];
        let row_bytes = (bytes.len() / shape[0]).max(1);
        bytes.par_chunks_mut(row_bytes).enumerate().for_each(|(row, to)| {
            let row = rows.order.map_or(row, |order| order.place(row));
            let part = rows.part(row);
            to.copy_from_slice(&part.bytes[(row - part.first) * row_bytes..][..row_bytes]);
        });
        self.release_pages(name);
        Ok(Some(Matrix::Blocks(Arc::new(Blocks::new(shape, kind, Bytes::from_elems(bytes))))))
    }

    fn release_pages(&self, name: &str) {
        let names = names_of(&self.config, name).into_iter();
        let parts = names.filter_map(|name| self.file.tensors().get(&name));
        parts.for_each(|tensor| self.file.release(tensor));
    }
}

fn float_dtype(kind: GgufType) -> Option<Dtype> {
    match kind {
        GgufType::F32 => Some(Dtype::F32),
        GgufType::F16 => Some(Dtype::F16),
        GgufType::BF16 => Some(Dtype::Bf16),
        _ => None,
    }
}

/// The rows of a tensor in Hugging Face's order.
struct GgufRows<'a> {
    /// In the order of the file.
    parts: Vec<GgufPart<'a>>,
    width: usize,
    /// The order in the file, where it is another.
    order: Option<Order>,
    coding: Coding,
}

/// A tensor with some of the rows, of which `first` is its first.
struct GgufPart<'a> {
    first: usize,
    kind: GgufType,
    bytes: &'a [u8],
    /// As [`Part::turned`].
    turned: Option<usize>,
}

/// Rows of a head as they were read last, and where they begin in their part.
#[derive(Default)]
struct Head {
    start: Option<usize>,
    numbers: Vec<f32>,
}

impl GgufPart<'_> {
    /// Numbers as they lie in it.
    fn decode(&self, first: usize, to: &mut [f32]) {
        match float_dtype(self.kind) {
            Some(dtype) => {
                let width = dtype.num_bytes();
                convert::widen(&self.bytes[first * width..(first + to.len()) * width], dtype, to);
            }
            None => cpu::Blocks { kind: self.kind, bytes: self.bytes }.decode(first, to),
        }
    }
}

impl GgufRows<'_> {
    /// That with this row of the file.
    fn part(&self, row: usize) -> &GgufPart<'_> {
        self.parts.iter().rfind(|part| part.first <= row).unwrap_or(&self.parts[0])
    }

    /// Reads the numbers from `first` on.
    fn read(&self, first: usize, to: &mut [f32]) {
        let mut head = Head::default();
        let Some(order) = self.order else { return self.in_order(first, to) };
        let mut done = 0;
        while done < to.len() {
            let (row, column) = ((first + done) / self.width, (first + done) % self.width);
            let (place, end) = if order.is_of_columns {
                (row * self.width + order.place(column), (column / order.run() + 1) * order.run())
            } else {
                (order.place(row) * self.width + column, self.width)
            };
            let num = (end - column).min(to.len() - done);
            self.stretch(place, &mut head, &mut to[done..done + num]);
            done += num;
        }
    }

    /// The same where rows lie in the same order.
    fn in_order(&self, mut first: usize, mut to: &mut [f32]) {
        while !to.is_empty() {
            let mut starts = self.parts.iter().map(|part| part.first * self.width);
            let end = starts.find(|start| *start > first).unwrap_or(usize::MAX);
            let (part, behind) = to.split_at_mut((end - first).min(to.len()));
            self.stretch(first, &mut Head::default(), part);
            (first, to) = (end, behind);
        }
    }

    /// Reads neighbours in the file, of one tensor.
    fn stretch(&self, first: usize, head: &mut Head, to: &mut [f32]) {
        let part = self.part(first / self.width);
        let first = first - part.first * self.width;
        match part.turned {
            None => part.decode(first, to),
            Some(rows) => {
                // Of a row, each number is in another one there.
                let (row, column) = (first / self.width, first % self.width);
                let start = row / rows * rows * self.width;
                if head.start != Some(start) {
                    head.numbers.resize(rows * self.width, 0.0);
                    part.decode(start, &mut head.numbers);
                    head.start = Some(start);
                }
                let numbers = head.numbers[column * rows + row % rows..].iter().step_by(rows);
                to.iter_mut().zip(numbers).for_each(|(to, number)| *to = *number);
            }
        }
        if self.coding != Coding::Same {
            to.iter_mut().for_each(|number| *number = self.coding.read(*number));
        }
    }
}
