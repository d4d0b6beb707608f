//! The GGUF format, version 3: a header, metadata, descriptions of the tensors, and their numbers.
//!
//! Layout: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Numbers are little-endian, and the data of every
//! tensor starts at a multiple of 32 bytes.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::super::ExportError;
use crate::device::Dtype;
use crate::model::weights::convert;
use crate::ops::blocks;
use crate::schema::Problem;
use crate::spec::ModelConfig;
use crate::util::files;
use crate::util::gguf::{GgufType, List, Value};

/// Alignment of the data of a tensor, in bytes.
const ALIGNMENT: usize = 32;
/// Their bytes, as numbers of this type in rows of `width`; `importance` says how much an error in each column weighs.
///
/// # Errors
/// A number, or the scale of a block, that is too large for `f16`.
pub(super) fn encode(
    kind: GgufType,
    values: &[f32],
    width: usize,
    importance: Option<&[f32]>,
) -> Result<Vec<u8>, convert::Overflow> {
    match float(kind) {
        Some(dtype) => convert::from_f32(values, dtype),
        None => blocks::encode(kind, values, width, importance).map_err(|blocks::Overflow| convert::Overflow),
    }
}

/// The numbers that the bytes stand for.
pub(super) fn decode(kind: GgufType, bytes: &[u8]) -> Vec<f32> {
    match float(kind) {
        Some(dtype) => convert::to_f32(bytes, dtype),
        None => blocks::decode(kind, bytes),
    }
}

fn float(kind: GgufType) -> Option<Dtype> {
    match kind {
        GgufType::F32 => Some(Dtype::F32),
        GgufType::F16 => Some(Dtype::F16),
        GgufType::BF16 => Some(Dtype::Bf16),
        _ => None,
    }
}

/// The number of a type in the description of a tensor.
fn code(kind: GgufType) -> u32 {
    match kind {
        GgufType::F32 => 0,
        GgufType::F16 => 1,
        GgufType::Q4_0 => 2,
        GgufType::Q4_1 => 3,
        GgufType::Q5_0 => 6,
        GgufType::Q5_1 => 7,
        GgufType::Q8_0 => 8,
        GgufType::Q2_K => 10,
        GgufType::Q3_K => 11,
        GgufType::Q4_K => 12,
        GgufType::Q5_K => 13,
        GgufType::Q6_K => 14,
        GgufType::IQ4_NL => 20,
        GgufType::IQ4_XS => 23,
        GgufType::BF16 => 30,
        GgufType::MXFP4 => 39,
        GgufType::NVFP4 => 40,
        other => unreachable!("{other} is written nowhere"),
    }
}

/// A text of the metadata.
pub(super) fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// The problem that a file has no place for something.
pub(super) fn refused<T>(config: &ModelConfig, what: &str) -> Result<T, Problem> {
    let problem = Problem::new(format!("GGUF has no place for {what} in a model of type {}", config.model_type));
    Err(problem.hint("merge into a folder: --out DIR"))
}

/// A list of the metadata.
pub(super) fn list(list: List) -> Value {
    Value::Array(Box::new(list))
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(value) => typed(out, 0, &value.to_le_bytes()),
        Value::I8(value) => typed(out, 1, &value.to_le_bytes()),
        Value::U16(value) => typed(out, 2, &value.to_le_bytes()),
        Value::I16(value) => typed(out, 3, &value.to_le_bytes()),
        Value::U32(value) => typed(out, 4, &value.to_le_bytes()),
        Value::I32(value) => typed(out, 5, &value.to_le_bytes()),
        Value::F32(value) => typed(out, 6, &value.to_le_bytes()),
        Value::Bool(value) => typed(out, 7, &[u8::from(*value)]),
        Value::String(text) => {
            typed(out, 8, &[]);
            write_text(out, text);
        }
        Value::Array(list) => {
            typed(out, 9, &[]);
            write_list(out, list);
        }
        Value::U64(value) => typed(out, 10, &value.to_le_bytes()),
        Value::I64(value) => typed(out, 11, &value.to_le_bytes()),
        Value::F64(value) => typed(out, 12, &value.to_le_bytes()),
        other => unreachable!("GGUF has thirteen types, and {other:?} is none of them"),
    }
}

fn write_list(out: &mut Vec<u8>, list: &List) {
    match list {
        List::U8(values) => numbers(out, 0, values),
        List::I8(values) => numbers(out, 1, values),
        List::U16(values) => numbers(out, 2, values),
        List::I16(values) => numbers(out, 3, values),
        List::U32(values) => numbers(out, 4, values),
        List::I32(values) => numbers(out, 5, values),
        List::F32(values) => numbers(out, 6, values),
        List::Bool(values) => array(out, 7, values, |out, value| out.push(u8::from(*value))),
        List::String(texts) => array(out, 8, texts, |out, text| write_text(out, text)),
        List::Array(lists) => array(out, 9, lists, write_list),
        List::U64(values) => numbers(out, 10, values),
        List::I64(values) => numbers(out, 11, values),
        List::F64(values) => numbers(out, 12, values),
        other => unreachable!("GGUF has thirteen types, and {other:?} is none of them"),
    }
}

fn typed(out: &mut Vec<u8>, code: u32, bytes: &[u8]) {
    out.extend(code.to_le_bytes());
    out.extend(bytes);
}

fn numbers<T: bytemuck::NoUninit>(out: &mut Vec<u8>, code: u32, values: &[T]) {
    array(out, code, values, |out, value| out.extend(bytemuck::bytes_of(value)));
}

fn array<T>(out: &mut Vec<u8>, code: u32, values: &[T], write: impl Fn(&mut Vec<u8>, &T)) {
    typed(out, code, &(values.len() as u64).to_le_bytes());
    values.iter().for_each(|value| write(out, value));
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A tensor of the file; its numbers are computed when they are written.
pub(super) struct Tensor<'a> {
    pub(super) name: String,
    /// Rows first, as in PyTorch; the file lists the dimensions in the other order.
    pub(super) shape: Vec<usize>,
    /// Type of its numbers.
    pub(super) kind: GgufType,
    /// The bytes in a type.
    bytes: Box<dyn Fn(GgufType) -> Result<Vec<u8>, Problem> + 'a>,
}

impl<'a> Tensor<'a> {
    /// In `f32`, unless [`FileType::choose`](super::FileType::choose) gives it another type.
    pub(super) fn new(
        name: String,
        shape: Vec<usize>,
        bytes: impl Fn(GgufType) -> Result<Vec<u8>, Problem> + 'a,
    ) -> Self {
        Self { name, shape, kind: GgufType::F32, bytes: Box::new(bytes) }
    }

    /// Of these numbers.
    pub(super) fn of(name: String, shape: Vec<usize>, values: impl Fn() -> Vec<f32> + 'a) -> Self {
        let width = shape.last().copied().unwrap_or_default();
        let of = name.clone();
        Self::new(name, shape, move |kind| encode(kind, &values(), width, None).map_err(|_| too_large(&of)))
    }

    /// One of several matrices of the same shape.
    pub(super) fn joined(name: String, matrices: Vec<Self>) -> Self {
        let mut shape = vec![matrices.len()];
        shape.extend(matrices.first().into_iter().flat_map(|matrix| &matrix.shape));
        Self::new(name, shape, move |kind| {
            let each: Result<Vec<_>, Problem> = matrices.iter().map(|matrix| (matrix.bytes)(kind)).collect();
            Ok(each?.concat())
        })
    }

    pub(super) fn num_bytes(&self) -> usize {
        let num_blocks = self.shape.iter().product::<usize>() / self.kind.block_size();
        num_blocks * self.kind.type_size().unwrap_or_default()
    }
}

/// The problem that a number has no place in 16 bits.
pub(super) fn too_large(name: &str) -> Problem {
    let problem = Problem::new(format!("a value of `{name}` is too large for f16"));
    problem.hint("bf16 holds it: --dtype bf16")
}

/// What a file holds.
pub(super) struct Gguf<'a> {
    pub(super) metadata: Vec<(String, Value)>,
    pub(super) tensors: Vec<Tensor<'a>>,
}

impl Gguf<'_> {
    /// Writes the file, whole or not at all; returns the size of its tensors in bytes.
    pub(super) fn write(&self, path: &Path) -> Result<usize, ExportError> {
        let written = files::write_with(path, |path| {
            let mut file = BufWriter::new(File::create(path)?);
            write_aligned(&mut file, &self.header())?;
            for tensor in &self.tensors {
                write_aligned(&mut file, &(tensor.bytes)(tensor.kind).map_err(io::Error::other)?)?;
            }
            file.flush()
        });
        match written.map_err(io::Error::downcast::<Problem>) {
            Ok(()) => Ok(self.tensors.iter().map(Tensor::num_bytes).sum()),
            Err(Ok(problem)) => Err(problem.into()),
            Err(Err(error)) => Err(ExportError::io("write", path)(error)),
        }
    }

    /// Everything before the numbers.
    fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_text(&mut out, key);
            write_value(&mut out, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            write_text(&mut out, &tensor.name);
            typed(&mut out, u32::try_from(tensor.shape.len()).unwrap_or_default(), &[]);
            tensor.shape.iter().rev().for_each(|size| out.extend((*size as u64).to_le_bytes()));
            typed(&mut out, code(tensor.kind), &(offset as u64).to_le_bytes());
            offset += tensor.num_bytes().next_multiple_of(ALIGNMENT);
        }
        out
    }
}

/// The bytes, and zeros up to the next multiple of the alignment.
fn write_aligned(file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.write_all(&[0; ALIGNMENT][..bytes.len().next_multiple_of(ALIGNMENT) - bytes.len()])
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A file as it was read back: its metadata as bytes, and each tensor's type, dimensions and data.
    #[derive(Debug)]
    pub(in super::super) struct Read {
        pub(in super::super) metadata: BTreeMap<String, Vec<u8>>,
        pub(in super::super) tensors: BTreeMap<String, (u32, Vec<u64>, Vec<u8>)>,
    }

    struct Reader<'a>(&'a [u8]);

    impl<'a> Reader<'a> {
        fn take(&mut self, len: usize) -> &'a [u8] {
            let (taken, rest) = self.0.split_at(len);
            self.0 = rest;
            taken
        }

        fn u32(&mut self) -> u32 {
            u32::from_le_bytes(self.take(4).try_into().unwrap())
        }

        fn u64(&mut self) -> u64 {
            u64::from_le_bytes(self.take(8).try_into().unwrap())
        }

        fn text(&mut self) -> String {
            let len = usize::try_from(self.u64()).unwrap();
            String::from_utf8(self.take(len).to_vec()).unwrap()
        }

        fn skip(&mut self, code: u32) {
            match code {
                4..=6 => drop(self.take(4)),
                7 => drop(self.take(1)),
                8 => drop(self.text()),
                9 => {
                    let (code, len) = (self.u32(), self.u64());
                    (0..len).for_each(|_| self.skip(code));
                }
                other => panic!("type {other}"),
            }
        }

        /// A value without its type.
        fn value(&mut self) -> Vec<u8> {
            let code = self.u32();
            let before = self.0;
            self.skip(code);
            before[..before.len() - self.0.len()].to_vec()
        }
    }

    /// Reads a file, by the format's description.
    pub(in super::super) fn read(path: &Path) -> Read {
        let content = std::fs::read(path).unwrap();
        let mut reader = Reader(&content);
        assert_eq!(reader.take(8), b"GGUF\x03\0\0\0");
        let (num_tensors, num_keys) = (reader.u64(), reader.u64());
        let metadata = (0..num_keys).map(|_| (reader.text(), reader.value())).collect();
        let infos: Vec<_> = (0..num_tensors)
            .map(|_| {
                let (name, num_dimensions) = (reader.text(), reader.u32());
                let shape: Vec<u64> = (0..num_dimensions).map(|_| reader.u64()).collect();
                (name, reader.u32(), shape, usize::try_from(reader.u64()).unwrap())
            })
            .collect();
        let start = (content.len() - reader.0.len()).next_multiple_of(32);
        let tensor = |(name, code, shape, offset): (String, u32, Vec<u64>, usize)| {
            let kinds = [GgufType::F32, GgufType::F16, GgufType::BF16].into_iter().chain(blocks::KINDS);
            let kind = kinds.into_iter().find(|kind| super::code(*kind) == code).unwrap();
            let num_blocks = usize::try_from(shape.iter().product::<u64>()).unwrap() / kind.block_size();
            let len = num_blocks * kind.type_size().unwrap();
            assert_eq!(offset % 32, 0);
            (name, (code, shape, content[start + offset..][..len].to_vec()))
        };
        Read { metadata, tensors: infos.into_iter().map(tensor).collect() }
    }

    #[test]
    fn a_tiny_file_has_the_bytes_that_the_format_prescribes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let tensors = vec![
            Tensor::of("v".into(), vec![3], || vec![1.0, 2.0, -1.0]),
            Tensor { kind: GgufType::BF16, ..Tensor::of("m".into(), vec![2, 1], || vec![1.0, -2.0]) },
        ];
        let metadata = vec![("k".into(), Value::U32(7)), ("t".into(), list(List::String(vec!["é".into()])))];
        assert_eq!(Gguf { metadata, tensors }.write(&path).unwrap(), 16);
        let expected: Vec<&[u8]> = vec![
            b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0",
            b"\x01\0\0\0\0\0\0\0k\x04\0\0\0\x07\0\0\0",
            b"\x01\0\0\0\0\0\0\0t\x09\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\xc3\xa9",
            b"\x01\0\0\0\0\0\0\0v\x01\0\0\0\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
            b"\x01\0\0\0\0\0\0\0m\x02\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x1e\0\0\0\x20\0\0\0\0\0\0\0",
        ];
        let mut expected = expected.concat();
        expected.resize(expected.len().next_multiple_of(32), 0);
        expected.extend(b"\0\0\x80\x3f\0\0\0\x40\0\0\x80\xbf");
        expected.extend([0; 20]);
        expected.extend(b"\x80\x3f\0\xc0");
        expected.extend([0; 28]);
        assert_eq!(std::fs::read(&path).unwrap(), expected);
    }

    #[test]
    fn a_number_that_f16_cannot_hold_is_an_error_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let tensors = vec![Tensor { kind: GgufType::F16, ..Tensor::of("m".into(), vec![1, 1], || vec![1e6]) }];
        let error = Gguf { metadata: vec![], tensors }.write(&folder.path().join("a.gguf")).unwrap_err();
        assert!(error.to_string().contains("`m` is too large for f16") && error.to_string().contains("--dtype bf16"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
