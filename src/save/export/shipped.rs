//! What is beside an adapter that was trained through the rounding of a file: the type of that, and the adapter as it was when that
//! began. The scales of the file come from there: searched for anew, they would make another model.

use std::path::Path;

use clap::ValueEnum as _;
use safetensors::SafeTensors;

use super::adapter_file::{read_tensors, write_tensors};
use super::{AdapterWeights, ExportError};
use crate::config::FileType;
use crate::schema::Problem;

/// The file's name, in the folder of an adapter.
pub const SHIPPED_FILE: &str = "shipped_as.safetensors";
/// The type of files, in its metadata.
const TYPE: &str = "ship_as";

/// A type of files that an adapter was trained for.
#[derive(Clone, Debug, PartialEq)]
pub struct Shipped {
    /// The type.
    pub file_type: FileType,
    /// The adapter before the first step through its rounding.
    pub start: AdapterWeights,
}

impl Shipped {
    /// Puts it beside an adapter.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), ExportError> {
        write_tensors(&folder.join(SHIPPED_FILE), &self.start, (TYPE, &self.file_type.name()))
    }

    /// Reads it; `None` for an adapter that was trained for no file.
    ///
    /// # Errors
    /// A file that is damaged.
    pub fn read(folder: &Path) -> Result<Option<Self>, ExportError> {
        let path = folder.join(SHIPPED_FILE);
        let Some(file_type) = file_type(&path)? else { return Ok(None) };
        Ok(Some(Self { file_type, start: read_tensors(&path)? }))
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
    Ok(file_type(&folder.join(SHIPPED_FILE))?.map(about))
}

fn file_type(path: &Path) -> Result<Option<FileType>, ExportError> {
    if !path.is_file() {
        return Ok(None);
    }
    let content = std::fs::read(path).map_err(ExportError::io("read", path))?;
    let metadata = SafeTensors::read_metadata(&content).ok().and_then(|(_, metadata)| metadata.metadata().clone());
    let name = metadata.as_ref().and_then(|metadata| metadata.get(TYPE));
    let file_type = name.and_then(|name| FileType::from_str(name, false).ok());
    file_type.map(Some).ok_or_else(|| {
        let problem = Problem::new("names no type of files that is known here").at(path.display());
        problem.hint("an earlier or later version may have written it: use that, or delete the file").into()
    })
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
        let start = [("model.layers.0.self_attn.q_proj".to_owned(), pair)].into_iter().collect();
        let shipped = Shipped { file_type: FileType::Q4KM, start };
        shipped.write(folder.path()).unwrap();
        assert_eq!(Shipped::read(folder.path()).unwrap(), Some(shipped));
        assert!(about_raw(folder.path()).unwrap().unwrap().contains("trained as a q4_k_m file"));
        std::fs::write(folder.path().join(SHIPPED_FILE), b"no").unwrap();
        assert!(about_raw(folder.path()).unwrap_err().to_string().contains(SHIPPED_FILE));
    }
}
