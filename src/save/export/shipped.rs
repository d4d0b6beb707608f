//! What is beside an adapter that was trained through the rounding of a file: the type of that, the adapter as it was when that
//! began, and what the inputs weighed. The scales of the file come from there: searched for anew, they would make another model.

use std::collections::BTreeMap;
use std::path::Path;

use clap::ValueEnum as _;
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};

use super::adapter_file::{read_tensors, write_tensors};
use super::{AdapterWeights, ExportError, Imatrix, InputSquares};
use crate::config::FileType;
use crate::model::weights::convert;
use crate::schema::Problem;

/// The file's name, in the folder of an adapter.
pub const SHIPPED_FILE: &str = "shipped_as.safetensors";
/// Its entry of metadata, in JSON.
const FACTS: &str = "ship_as";
/// What llama.cpp calls the numbers of a weight in an imatrix, behind its name.
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// A type of files that an adapter was trained for.
#[derive(Clone, Debug, PartialEq)]
pub struct Shipped {
    /// The type.
    pub file_type: FileType,
    /// The adapter before the first step through its rounding.
    pub start: AdapterWeights,
    /// What the inputs weighed then, where the type has a use for it.
    pub imatrix: Option<Imatrix>,
}

/// What of it are no tensors.
#[derive(Serialize, Deserialize)]
struct Facts {
    file_type: String,
    num_tokens: usize,
    num_chunks: usize,
    datasets: Vec<String>,
}

impl Shipped {
    /// Puts it beside an adapter.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), ExportError> {
        let Imatrix { inputs, num_tokens, num_chunks, datasets } = self.imatrix.clone().unwrap_or_default();
        let file_type = self.file_type.name();
        let path = folder.join(SHIPPED_FILE);
        let facts = serde_json::to_string(&Facts { file_type, num_tokens, num_chunks, datasets })
            .map_err(|error| ExportError::io("write", &path)(error.into()))?;
        let beside = inputs.into_iter().flat_map(|(weight, InputSquares { sums, num_tokens })| {
            #[expect(clippy::cast_precision_loss, reason = "counts below 2^24")]
            let count = num_tokens as f32;
            [(format!("{weight}{SUMS}"), sums), (format!("{weight}{COUNTS}"), vec![count])]
        });
        write_tensors(&path, &self.start, &beside.collect(), (FACTS, &facts))
    }

    /// Reads it; `None` for an adapter that was trained for no file.
    ///
    /// # Errors
    /// A file that is damaged.
    pub fn read(folder: &Path) -> Result<Option<Self>, ExportError> {
        let path = folder.join(SHIPPED_FILE);
        let Some((file_type, Facts { num_tokens, num_chunks, datasets, .. }, content)) = facts(&path)? else {
            return Ok(None);
        };
        let start = read_tensors(&path, |name| name.ends_with(SUMS) || name.ends_with(COUNTS))?;
        let tensors = SafeTensors::deserialize(&content).map_err(|_| damaged(&path))?;
        let mut inputs = BTreeMap::new();
        for (weight, sums) in tensors.iter().filter_map(|(name, sums)| Some((name.strip_suffix(SUMS)?, sums))) {
            let numbers = |data: &[u8]| convert::to_f32(data, crate::device::Dtype::F32);
            let counts = tensors.tensor(&format!("{weight}{COUNTS}")).map_err(|_| damaged(&path))?;
            let count = numbers(counts.data()).first().copied().unwrap_or_default();
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts")]
            inputs.insert(weight.to_owned(), InputSquares { sums: numbers(sums.data()), num_tokens: count as usize });
        }
        let imatrix = Imatrix { inputs, num_tokens, num_chunks, datasets };
        Ok(Some(Self { file_type, start, imatrix: Some(imatrix).filter(|imatrix| imatrix.num_chunks > 0) }))
    }
}

/// That the adapter in a folder, used beside its base, is not what was trained, for people; `None` where it is.
///
/// # Errors
/// A file that is damaged.
pub fn about_raw(folder: &Path) -> Result<Option<String>, ExportError> {
    let about = |file_type: FileType| {
        format!(
            "warning: {}: trained as a {} file has the weights, and beside its base it is not that\n  hint: `lora-train \
             merge` writes the file",
            folder.display(),
            file_type.name()
        )
    };
    Ok(facts(&folder.join(SHIPPED_FILE))?.map(|(file_type, ..)| about(file_type)))
}

/// The type, what else are no tensors, and the whole file; `None` without one.
fn facts(path: &Path) -> Result<Option<(FileType, Facts, Vec<u8>)>, ExportError> {
    if !path.is_file() {
        return Ok(None);
    }
    let content = std::fs::read(path).map_err(ExportError::io("read", path))?;
    let metadata = SafeTensors::read_metadata(&content).ok().and_then(|(_, metadata)| metadata.metadata().clone());
    let facts: Option<Facts> = metadata.as_ref().and_then(|metadata| serde_json::from_str(metadata.get(FACTS)?).ok());
    let known = facts.and_then(|facts| Some((FileType::from_str(&facts.file_type, false).ok()?, facts)));
    let (file_type, facts) = known.ok_or_else(|| damaged(path))?;
    Ok(Some((file_type, facts, content)))
}

fn damaged(path: &Path) -> Problem {
    let problem = Problem::new("names no type of files that is known here, or lacks tensors").at(path.display());
    problem.hint("an earlier or later version may have written it: use that, or delete the file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lora::Matrices;
    use crate::save::export::HostMatrix;

    #[test]
    fn type_and_start_come_back_and_what_is_damaged_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Shipped::read(folder.path()).unwrap(), None);
        let matrix =
            |num_rows, num_columns| HostMatrix { num_rows, num_columns, values: vec![0.1; num_rows * num_columns] };
        let pair = Matrices { a: matrix(2, 8), b: matrix(4, 2), magnitude: None };
        let start: AdapterWeights = [("model.layers.0.self_attn.q_proj".to_owned(), pair)].into_iter().collect();
        let inputs = InputSquares { sums: vec![0.25, 3.0], num_tokens: 7 };
        let inputs = [("model.layers.0.self_attn.q_proj.weight".to_owned(), inputs)].into();
        let imatrix = Imatrix { inputs, num_tokens: 7, num_chunks: 2, datasets: vec!["rows.jsonl".to_owned()] };
        for imatrix in [None, Some(imatrix)] {
            let shipped = Shipped { file_type: FileType::Q4KM, start: AdapterWeights::clone(&start), imatrix };
            shipped.write(folder.path()).unwrap();
            assert_eq!(Shipped::read(folder.path()).unwrap(), Some(shipped));
        }
        assert!(about_raw(folder.path()).unwrap().unwrap().contains("trained as a q4_k_m file"));
        std::fs::write(folder.path().join(SHIPPED_FILE), b"no").unwrap();
        assert!(about_raw(folder.path()).unwrap_err().to_string().contains(SHIPPED_FILE));
    }
}
