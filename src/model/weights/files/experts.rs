//! The matrices of experts that are stored as one tensor for all of a layer.

use std::collections::BTreeMap;

use super::StoredTensor;
use crate::util::gguf::MAX_EXPERTS;

/// Ends of the names of such tensors, `[experts, rows, ...]`, and what the rows of an expert are. Those of gpt-oss have gate and
/// up in turn, biases, and matrices that are transposed or codes; those of Qwen3-VL are transposed.
const JOINED: [(&str, &[&str], &str); 11] = [
    ("input_linear.weight", &["gate_proj", "up_proj"], "weight"),
    ("output_linear.weight", &["down_proj"], "weight"),
    ("gate_up_proj", &["gate_proj", "up_proj"], "weight"),
    ("down_proj", &["down_proj"], "weight"),
    ("up_proj", &["up_proj"], "weight"),
    ("gate_up_proj_bias", &["gate_proj", "up_proj"], "bias"),
    ("down_proj_bias", &["down_proj"], "bias"),
    ("gate_up_proj_blocks", &["gate_proj", "up_proj"], "weight_packed"),
    ("down_proj_blocks", &["down_proj"], "weight_packed"),
    ("gate_up_proj_scales", &["gate_proj", "up_proj"], "weight_scale"),
    ("down_proj_scales", &["down_proj"], "weight_scale"),
];
const EXPERTS: &str = ".experts.";
/// What Granite has in place of it.
const OF_GRANITE: &str = ".block_sparse_moe.";

type Tensors = BTreeMap<String, StoredTensor>;

/// What lies apart in a tensor that holds several: every `step` elements, of `len` bytes each, from the start of the tensor's
/// range on; row by row, or those of all rows for a column and then those of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strides {
    pub(super) len: usize,
    pub(super) of_row: usize,
    pub(super) of_column: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// The tensors with those that hold the matrices of several experts taken apart, each matrix under the name that it has where it
/// is stored by itself; and those as they are.
pub(super) fn apart(tensors: Tensors) -> (Tensors, Tensors) {
    // Nobody else has biases.
    let is_gpt_oss = tensors.keys().any(|name| name.ends_with(".experts.gate_up_proj_bias"));
    let layout = if is_gpt_oss { Layout::InTurn } else { halves(&tensors) };
    let (mut apart, mut joined) = (Tensors::new(), Tensors::new());
    for (name, stored) in tensors {
        if let Some(parts) = parts(&name, &stored, layout) {
            apart.extend(parts);
            joined.insert(name, stored);
        } else {
            apart.insert(name, stored);
        }
    }
    (apart, joined)
}

/// How gate and up lie in one tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// Up below gate.
    Below,
    /// Rows take turns; matrices of numbers are transposed.
    InTurn,
    /// Beside each other, since the matrices are transposed.
    Beside,
}

/// Whether up is below gate or beside it: as wide as both is what down is as wide as one.
fn halves(tensors: &Tensors) -> Layout {
    let first = tensors.iter().find(|(name, _)| name.ends_with(".experts.gate_up_proj"));
    let shapes = first.and_then(|(name, gate_up)| {
        let down = tensors.get(&name.replace("gate_up_proj", "down_proj"))?;
        Some((<[usize; 3]>::try_from(&*gate_up.shape).ok()?, <[usize; 3]>::try_from(&*down.shape).ok()?))
    });
    match shapes {
        Some(([_, hidden, both], [_, one, width])) if hidden == width && both == 2 * one => Layout::Beside,
        _ => Layout::Below,
    }
}

/// `None`: it holds no such matrices.
fn parts(name: &str, stored: &StoredTensor, layout: Layout) -> Option<Vec<(String, StoredTensor)>> {
    let is_gpt_oss = layout == Layout::InTurn;
    let of_block = name.split_once(EXPERTS).or_else(|| {
        let (block, end) = name.split_once(OF_GRANITE)?;
        Some((&name[..block.len() + OF_GRANITE.len() - 1], end))
    });
    let joined = of_block.and_then(|(block, end)| Some((block, JOINED.iter().find(|(known, ..)| *known == end)?)));
    let (block, (_, matrices, part)) = joined?;
    let [num_experts, of_expert @ ..] = &stored.shape[..] else { return None };
    if stored.range.is_empty() || *num_experts > MAX_EXPERTS {
        return None;
    }
    let num_bytes = stored.range.len() / (*num_experts).max(1);
    let width = stored.range.len() / stored.shape.iter().product::<usize>().max(1);
    let is_transposed = layout != Layout::Below && *part == "weight";
    let (rows, columns): (usize, usize) = match *of_expert {
        [columns, rows] if is_transposed => (rows, columns),
        [rows, ref rest @ ..] => (rows, rest.iter().product()),
        [] => return None,
    };
    let num_rows = rows / matrices.len();
    let matrix = |expert: usize, index: usize| {
        let first = stored.range.start + expert * num_bytes;
        let shape = if *part == "bias" { vec![num_rows] } else { vec![num_rows, columns] };
        let (range, strides) = if layout == Layout::Beside {
            let start = first + index * num_rows * width;
            let strides = Strides { len: width, of_row: width, of_column: rows * width, rows: num_rows, columns };
            (start..first + num_bytes, Some(strides))
        } else if is_gpt_oss && (is_transposed || matrices.len() > 1) {
            let (of_row, of_column) = if is_transposed { (width, rows * width) } else { (columns * width, width) };
            // A row of codes or of a bias is one element.
            let (len, columns, of_column) = if is_transposed { (width, columns, of_column) } else { (of_row, 1, 0) };
            let strides = Strides { len, of_row: of_row * matrices.len(), of_column, rows: num_rows, columns };
            (first + index * of_row..first + num_bytes, Some(strides))
        } else {
            let num_bytes = num_bytes / matrices.len();
            (first + index * num_bytes..first + (index + 1) * num_bytes, None)
        };
        StoredTensor { shape, range, strides, is_part: true, ..stored.clone() }
    };
    let all = (0..*num_experts)
        .flat_map(|expert| matrices.iter().enumerate().map(move |(index, name)| (expert, index, *name)));
    let nested = stored.nested_name.as_ref().and_then(|name| name.split_once(EXPERTS)).map(|(block, _)| block);
    let named = |(expert, index, name): (usize, usize, &str)| {
        let in_block = |block: &str| format!("{block}.experts.{expert}.{name}.{part}");
        (in_block(block), StoredTensor { nested_name: nested.map(in_block), ..matrix(expert, index) })
    };
    Some(all.map(named).collect())
}

impl Strides {
    /// Puts bytes that are row by row where they lie.
    pub(super) fn scatter(self, from: &[u8], to: &mut [u8]) {
        let Self { len, of_row, of_column, rows, columns } = self;
        for row in 0..rows {
            for column in 0..columns {
                let start = row * of_row + column * of_column;
                to[start..start + len].copy_from_slice(&from[(row * columns + column) * len..][..len]);
            }
        }
    }

    /// The bytes row by row.
    pub(super) fn gather(self, from: &[u8]) -> Vec<u8> {
        let Self { len, of_row, of_column, rows, columns } = self;
        let mut to = vec![0; rows * columns * len];
        for row in 0..rows {
            for column in 0..columns {
                let start = row * of_row + column * of_column;
                to[(row * columns + column) * len..][..len].copy_from_slice(&from[start..start + len]);
            }
        }
        to
    }
}
