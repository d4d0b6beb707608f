//! GGUF files as they are read: metadata, and where the tensors lie. `export` writes them.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Cursor, Read, Seek};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anamnesis::{
    AnamnesisError, GgufFrontMatter, GgufTensorInfo, ParseLimits, parse_gguf_front_matter_from_reader_with_limits,
};
use memmap2::Mmap;

use crate::schema::Problem;
use crate::util::text::lines;

pub use anamnesis::{GgufMetadataArray as List, GgufMetadataValue as Value, GgufType};

/// Memory that metadata may take, for each byte of the file: a list of empty texts takes three.
const METADATA_SHARE: u64 = 8;

/// The tensor with what each rotary frequency is divided by.
pub const ROPE_FREQS: &str = "rope_freqs.weight";
/// The same in texts longer than the original context.
pub const ROPE_LONG: &str = "rope_factors_long.weight";
/// The same in other texts.
pub const ROPE_SHORT: &str = "rope_factors_short.weight";
/// All of them, which belong to the shape.
pub const ROPE_FACTORS: [&str; 3] = [ROPE_FREQS, ROPE_LONG, ROPE_SHORT];

/// A tensor's place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Sizes of the dimensions, rows first, as everywhere but in the file.
    pub shape: Vec<usize>,
    /// Type of its numbers.
    pub kind: GgufType,
    range: Range<usize>,
}

impl GgufTensor {
    /// Bytes that it takes.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.range.len()
    }
}

/// A file, memory-mapped.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    metadata: HashMap<String, Value>,
    tensors: BTreeMap<String, GgufTensor>,
}

/// Whether a path names a GGUF file.
#[must_use]
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The GGUF file of a model folder: the only one, where there are no safetensors files.
///
/// # Errors
/// Several, and no `config.json` that would make the folder a model.
pub fn only_gguf(folder: &Path) -> Result<Option<PathBuf>, Problem> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let is_other = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors");
    let mut files: Vec<PathBuf> = paths.iter().filter(|path| is_gguf(path) && path.is_file()).cloned().collect();
    files.sort();
    match &files[..] {
        _ if paths.iter().any(is_other) => Ok(None),
        [file] => Ok(Some(file.clone())),
        [first, _, ..] if !folder.join("config.json").is_file() => {
            let names: Vec<_> = files.iter().filter_map(|file| Some(file.file_name()?.display())).collect();
            let (shown, count) = (folder.display(), files.len());
            let message = format!("{shown}: {count} GGUF files, expected one:{}", lines(&names));
            let hint = format!("`model.path` may name one of them: {}", first.display());
            Err(Problem::new(message).hint(hint))
        }
        _ => Ok(None),
    }
}

impl GgufFile {
    /// Maps a file and reads everything but the numbers.
    ///
    /// # Errors
    /// A file that cannot be read, is damaged or cut short, or is no model or only a part of one.
    #[expect(unsafe_code, reason = "a file can only be mapped so")]
    pub fn open(path: &Path) -> Result<Self, Problem> {
        let cannot_read = |error| Problem::new(format!("cannot read {}: {error}", path.display()));
        let file = File::open(path).map_err(cannot_read)?;
        // SAFETY: the mapping is read-only and lives as long as what is read from it. If another process writes to the
        // file meanwhile, values are wrong, just as if they had been read a moment later.
        let map = unsafe { Mmap::map(&file) }.map_err(cannot_read)?;
        let GgufFrontMatter { metadata, tensor_infos, .. } =
            parse(Cursor::new(&map[..]), map.len() as u64).map_err(|error| damaged(path, &map, &error))?;
        let tensors = tensor_infos.into_iter().map(|info| place(info, map.len())).collect::<Option<Vec<_>>>();
        let tensors = tensors.ok_or_else(|| cut_short(path, &map, "its tensors lie behind its end"))?;
        let tensors = tensors.into_iter().flat_map(|(name, tensor)| apart(name, tensor)).collect();
        let file = Self { path: path.to_owned(), map, metadata, tensors };
        file.check_kind()?;
        Ok(file)
    }

    fn check_kind(&self) -> Result<(), Problem> {
        if let Some(kind) = self.text("general.type").filter(|kind| *kind != "model") {
            let problem = self.problem(format!("`general.type` = \"{kind}\", expected a model"));
            return Err(problem.hint("an adapter or a projector is no base; name the model's own file"));
        }
        match self.integer("split.count")? {
            Some(parts @ 2..) => {
                let problem = self.problem(format!("one of {parts} parts of a model"));
                Err(problem.hint("join them with llama.cpp: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"))
            }
            _ => Ok(()),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of its bytes.
    #[must_use]
    pub fn content(&self) -> &[u8] {
        &self.map
    }

    /// The metadata by key.
    #[must_use]
    pub fn metadata(&self) -> &HashMap<String, Value> {
        &self.metadata
    }

    /// The tensors by llama.cpp's names.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// The bytes of a tensor.
    #[must_use]
    pub fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        &self.map[tensor.range.clone()]
    }

    /// Releases the pages of a tensor to the system; they can be read from the file again.
    #[expect(unsafe_code, reason = "pages of a mapping can only be released so")]
    pub fn release(&self, tensor: &GgufTensor) {
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the mapping is of a file and read-only, so released pages come back with the same content.
        let released = unsafe { self.map.unchecked_advise_range(advice, tensor.range.start, tensor.range.len()) };
        // This is only advice: where the system refuses it, the pages stay until the mapping ends.
        drop(released);
    }

    /// A problem with this file.
    #[must_use]
    pub fn problem(&self, message: impl Into<String>) -> Problem {
        Problem::new(message.into()).at(self.path.display())
    }

    /// A text of the metadata.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata.get(key)?.as_string()
    }

    /// A boolean of the metadata.
    #[must_use]
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.metadata.get(key)?.as_bool()
    }

    /// A whole number of the metadata, of any width.
    ///
    /// # Errors
    /// Where the key is there and has a value of another type, such as one for each layer.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, Problem> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let integer = match *value {
            Value::U8(x) => Some(x.into()),
            Value::U16(x) => Some(x.into()),
            Value::U32(x) => Some(x.into()),
            Value::U64(x) => Some(x),
            Value::I8(x) => x.try_into().ok(),
            Value::I16(x) => x.try_into().ok(),
            Value::I32(x) => x.try_into().ok(),
            Value::I64(x) => x.try_into().ok(),
            _ => None,
        };
        let expected = || self.problem(format!("`{key}` is not one whole number from 0 on"));
        integer.map(Some).ok_or_else(expected)
    }

    /// A token of the metadata by its use, such as `bos`.
    ///
    /// # Errors
    /// As [`integer`](Self::integer).
    pub fn token_id(&self, name: &str) -> Result<Option<u64>, Problem> {
        self.integer(&format!("tokenizer.ggml.{name}_token_id"))
    }

    /// Tokens that end a text, a turn or a message.
    ///
    /// # Errors
    /// As [`integer`](Self::integer).
    pub fn end_ids(&self) -> Result<Vec<u64>, Problem> {
        ["eos", "eot", "eom"].iter().filter_map(|name| self.token_id(name).transpose()).collect()
    }

    /// A number of the metadata, as a [`decimal`] one.
    #[must_use]
    pub fn number(&self, key: &str) -> Option<f64> {
        match *self.metadata.get(key)? {
            Value::F32(x) => Some(decimal(x)),
            Value::F64(x) => Some(x),
            _ => None,
        }
    }

    /// A list of texts of the metadata.
    #[must_use]
    pub fn texts(&self, key: &str) -> Option<&[String]> {
        self.metadata.get(key)?.as_array()?.as_string_slice()
    }

    /// A list of numbers of the metadata.
    #[must_use]
    pub fn numbers(&self, key: &str) -> Option<&[f32]> {
        self.metadata.get(key)?.as_array()?.as_f32_slice()
    }

    /// A list of whole numbers of the metadata, or of 1 for yes and 0 for no.
    #[must_use]
    pub fn integers(&self, key: &str) -> Option<Vec<i64>> {
        match self.metadata.get(key)?.as_array()? {
            List::I32(list) => Some(list.iter().map(|x| i64::from(*x)).collect()),
            List::U32(list) => Some(list.iter().map(|x| i64::from(*x)).collect()),
            List::Bool(list) => Some(list.iter().map(|x| i64::from(*x)).collect()),
            _ => None,
        }
    }
}

/// Reads the head of a file of `num_bytes`, which is all that lies before its tensors. Returns the places of
/// [`ROPE_FACTORS`]; none also where the head cannot be read, which is an error once the file is opened.
pub fn rope_factors_of_head(head: impl Read + Seek, num_bytes: u64) -> Vec<Range<u64>> {
    let infos = parse(head, num_bytes).map(|head| head.tensor_infos).unwrap_or_default();
    let factors = infos.into_iter().filter(|info| ROPE_FACTORS.contains(&&*info.name));
    let place = |info: GgufTensorInfo| {
        let end = info.data_offset.checked_add(info.byte_len?)?;
        (info.data_offset < end && end <= num_bytes).then_some(info.data_offset..end)
    };
    factors.filter_map(place).collect()
}

/// The decimal number that was written where a file has a rounded one.
#[must_use]
pub fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| x.into())
}

fn parse(head: impl Read + Seek, num_bytes: u64) -> Result<GgufFrontMatter, AnamnesisError> {
    let limits = ParseLimits::default().with_max_total_bytes(METADATA_SHARE.saturating_mul(num_bytes));
    parse_gguf_front_matter_from_reader_with_limits(head, &limits)
}

/// The tensor's name and place; `None` where it is not within the file's `len` bytes.
fn place(info: GgufTensorInfo, len: usize) -> Option<(String, GgufTensor)> {
    let start = usize::try_from(info.data_offset).ok()?;
    let end = start.checked_add(usize::try_from(info.byte_len?).ok()?)?;
    let shape = info.shape.into_iter().rev().collect();
    (end <= len).then_some((info.name, GgufTensor { shape, kind: info.dtype, range: start..end }))
}

/// What is behind the name of the matrices in that of a tensor `[experts, rows, columns]`, or `[experts, rows]` of their biases.
const EXPERTS: &str = "_exps";
/// No layer has more of them.
pub const MAX_EXPERTS: usize = 4096;

/// Matrices of all residual streams but one, `[streams - 1, rows, columns]` (Gemma 3n).
const STREAMS: [&str; 2] = ["altup_proj", "altup_unembd_proj"];

/// The name before it where each expert has a gate and, behind it, what that multiplies.
const GATE_UP: &str = "ffn_gate_up";

/// The matrices and biases of experts or of streams, under the names that they had before files had them in one tensor: `blk.0.ffn_up.3.weight`.
fn apart(name: String, tensor: GgufTensor) -> Vec<(String, GgufTensor)> {
    let module = name.rsplit_once('.').and_then(|(module, part)| {
        let of_streams = STREAMS.contains(&module).then_some(module);
        Some((module.strip_suffix(EXPERTS).or(of_streams)?, part))
    });
    let (Some((layer, part)), [num_experts, of_expert @ ..]) = (module, &tensor.shape[..]) else {
        return vec![(name, tensor)];
    };
    let modules = match layer.strip_suffix(GATE_UP) {
        Some(layer) => vec![format!("{layer}ffn_gate"), format!("{layer}ffn_up")],
        None => vec![layer.to_owned()],
    };
    let is_whole = of_expert.first().is_some_and(|num_rows| num_rows.is_multiple_of(modules.len()));
    let num_experts = *num_experts;
    if num_experts == 0 || num_experts > MAX_EXPERTS || !is_whole {
        return vec![(name, tensor)];
    }
    let num = num_experts * modules.len();
    let (first, num_bytes) = (tensor.range.start, tensor.num_bytes() / num);
    let mut shape = of_expert.to_vec();
    shape[0] /= modules.len();
    let matrix = |index: usize| {
        let start = first + index * num_bytes;
        let matrix = GgufTensor { shape: shape.clone(), kind: tensor.kind, range: start..start + num_bytes };
        (format!("{}.{}.{part}", modules[index % modules.len()], index / modules.len()), matrix)
    };
    (0..num).map(matrix).collect()
}

/// The name of the tensor that holds a matrix or bias of an expert or a stream, and which one that is.
#[must_use]
pub fn joined(name: &str) -> Option<(String, usize)> {
    let (module, part) = name.rsplit_once('.')?;
    let (layer, expert) = module.rsplit_once('.')?;
    let expert = expert.parse().ok()?;
    if STREAMS.contains(&layer) {
        return Some((format!("{layer}.{part}"), expert));
    }
    let layer = Some(layer).filter(|layer| layer.contains(".ffn_"))?;
    Some((format!("{layer}{EXPERTS}.{part}"), expert))
}

fn damaged(path: &Path, content: &[u8], error: &AnamnesisError) -> Problem {
    if content.starts_with(b"version https://git-lfs") {
        let problem = Problem::new("a Git LFS pointer, not the model").at(path.display());
        return problem.hint("run `git lfs pull` in the model folder");
    }
    if content.starts_with(b"GGUF") {
        return cut_short(path, content, &error.to_string());
    }
    Problem::new("not a GGUF file: it does not begin with \"GGUF\"").at(path.display())
}

fn cut_short(path: &Path, content: &[u8], reason: &str) -> Problem {
    let problem = Problem::new(format!("its {} bytes are not what its header says ({reason})", content.len()));
    problem.at(path.display()).hint("half-downloaded? Delete the file and download it again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_experts_gate_lies_before_what_it_multiplies() {
        let tensor = |shape: &[usize], range| GgufTensor { shape: shape.to_vec(), kind: GgufType::F32, range };
        let found = apart("blk.7.ffn_gate_up_exps.weight".into(), tensor(&[2, 4, 3], 100..196));
        let expected = [("gate.0", 100), ("up.0", 124), ("gate.1", 148), ("up.1", 172)]
            .map(|(name, start)| (format!("blk.7.ffn_{name}.weight"), tensor(&[2, 3], start..start + 24)));
        assert_eq!(found, expected);
        let odd = ("blk.7.ffn_gate_up_exps.weight".to_owned(), tensor(&[2, 3, 3], 0..72));
        assert_eq!(apart(odd.0.clone(), odd.1.clone()), [odd]);
    }
}
