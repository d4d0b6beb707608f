//! Weights in the form in which products use them, kept in the cache folder: for models that stay on disk and whose files
//! have another form.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use burn::tensor::Device;
use safetensors::tensor::{Metadata, TensorInfo};
use sha2::{Digest as _, Sha256};

use super::{Storage, WeightFiles, Weights, convert, form};
use crate::config::Residency;
use crate::device::{DeviceKind, Dtype};
use crate::ops::linear::Matrix;
use crate::ops::place::place_on;
use crate::schema::Problem;
use crate::spec::ModelConfig;
use crate::util::files::{CACHE_VARIABLE, MAX_CACHE_BYTES, UNFINISHED_SUFFIX, cache_folder, hex, tidy};

const SUFFIX: &str = ".safetensors";
/// Increase this with every change to what is in a file.
const FORMAT_VERSION: u32 = 2;

impl Weights {
    /// Weights that `storage` can use in place: these, or those of the [copy](Self::copy), which is written if it does
    /// not exist. Meanwhile `on_bytes` is called with the bytes that are written and with the planned total.
    ///
    /// # Errors
    /// Where the copy cannot be written, or a number does not fit the form.
    pub fn in_form(
        &self,
        config: &ModelConfig,
        storage: Storage,
        on_bytes: &dyn Fn(usize, usize),
    ) -> Result<Cow<'_, Self>, Problem> {
        let Some(path) = self.copy(config, storage)? else { return Ok(Cow::Borrowed(self)) };
        // A damaged copy is made again.
        let opened = WeightFiles::open_file(path.clone()).or_else(|_| {
            self.write_in_form(config, storage, &path, on_bytes)?;
            WeightFiles::open_file(path.clone())
        })?;
        // A failure is ignored: only `tidy` uses the time.
        drop(File::open(&path).and_then(|file| file.set_modified(SystemTime::now())));
        Ok(Cow::Owned(Self::Files(opened)))
    }

    /// The file in the cache folder for weights that stay on disk, but in another form than that of the model's files.
    ///
    /// # Errors
    /// Where there is no cache folder.
    pub fn copy(&self, config: &ModelConfig, storage: Storage) -> Result<Option<PathBuf>, Problem> {
        let Some(digest) = self.digest().filter(|_| storage.residency == Residency::Mapped) else { return Ok(None) };
        if matches!(self, Self::Files(files) if files.are_in_form(config, storage)) {
            return Ok(None);
        }
        let folder = cache_folder().ok_or_else(|| Problem::new("there is no folder for caches").hint(HINT))?;
        let content = (config.quantisation.as_ref().map(|stored| stored.method), config.expected_tensors());
        let form = format!("{FORMAT_VERSION} {} {storage} {content:?}", env!("CARGO_PKG_VERSION"));
        let key: [u8; 32] = Sha256::new().chain_update(digest).chain_update(form).finalize().into();
        Ok(Some(folder.join("weights").join(hex(&key) + SUFFIX)))
    }

    /// Writes the file whole or not at all; two processes may do so at once.
    fn write_in_form(
        &self,
        config: &ModelConfig,
        storage: Storage,
        path: &Path,
        on_bytes: &dyn Fn(usize, usize),
    ) -> Result<(), Problem> {
        let cannot_write = |error: io::Error| {
            let problem = Problem::new(format!("cannot write {}: {error}", path.display()));
            problem.hint(format!("{CACHE_VARIABLE} names another folder. {HINT}"))
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        let tensors = config.expected_tensors();
        let sizes =
            tensors.iter().map(|(name, shape)| storage.tensor_bytes(config, name, shape, place_on(DeviceKind::Cpu)));
        let all = sizes.clone().sum();
        // Others may read it, as any new file.
        let unfinished =
            || tempfile::Builder::new().suffix(UNFINISHED_SUFFIX).make_in(folder, |path| File::create_new(path));
        let unfinished = std::fs::create_dir_all(folder).and_then(|()| unfinished()).map_err(cannot_write)?;
        let mut copy = TensorWriter::new(unfinished.as_file(), &tensors).map_err(cannot_write)?;
        let mut done = 0;
        for ((name, shape), size) in tensors.iter().zip(sizes) {
            let matrix = self.held(name, shape, storage, config)?;
            let dtype = if shape.len() == 2 { storage.dtype } else { Dtype::F32 };
            copy.add(name, dtype, shape, &matrix).map_err(cannot_write)?;
            done += size;
            on_bytes(done, all);
        }
        copy.finish().map_err(cannot_write)?;
        unfinished.persist(path).map_err(|error| cannot_write(error.error))?;
        tidy(folder, SUFFIX, MAX_CACHE_BYTES, path);
        Ok(())
    }

    /// A tensor as the model holds it in memory; a vector as a row.
    fn held(&self, name: &str, shape: &[usize], storage: Storage, config: &ModelConfig) -> Result<Matrix, Problem> {
        let (storage, device) = (Storage { residency: Residency::Memory, ..storage }, &Device::flex());
        match *shape {
            [rows, columns] if name == "model.embed_tokens.weight" => {
                self.table(name, [rows, columns], storage, device).map(Matrix::Dense)
            }
            [rows, columns] => self.matrix(name, [rows, columns], storage, config, device),
            _ => {
                let len = shape.iter().product();
                Ok(Matrix::Dense(self.load(name, [len], Dtype::F32, device)?.reshape([1, len])))
            }
        }
    }
}

const HINT: &str = "`model.residency` = \"mapped\" keeps weights there in the form that they are used in; a `model.dtype` that is \
                    the type of the files, and no quantisation, needs no copy";

impl WeightFiles {
    fn are_in_form(&self, config: &ModelConfig, storage: Storage) -> bool {
        let is_in_form = |(name, shape): (String, Vec<usize>)| {
            let stored = self.tensors().get(&name);
            shape.len() != 2 || stored.is_some_and(|stored| self.has_numbers(stored, storage.dtype))
        };
        storage.quantisation.is_none() && config.expected_tensors().into_iter().all(is_in_form)
    }
}

/// Tensors start at multiples of this.
const ALIGNMENT: usize = 64;
/// Most bytes that the header has of a tensor and of the gap behind it, beside two names.
const ENTRY_BYTES: usize = 400;

/// A safetensors file that is written tensor by tensor. Its header, which needs all their sizes, comes last, into room that
/// was left at the start.
struct TensorWriter<'a> {
    file: &'a File,
    room: usize,
    /// Bytes of the tensors so far.
    end: usize,
    tensors: Vec<(String, TensorInfo)>,
    forms: HashMap<String, String>,
}

impl<'a> TensorWriter<'a> {
    fn new(mut file: &'a File, tensors: &[(String, Vec<usize>)]) -> io::Result<Self> {
        let room: usize = tensors.iter().map(|(name, _)| 2 * name.len() + ENTRY_BYTES).sum();
        let room = room.next_multiple_of(ALIGNMENT);
        file.seek(SeekFrom::Start(room as u64))?;
        Ok(Self { file, room, end: 0, tensors: Vec::new(), forms: HashMap::new() })
    }

    /// Adds a matrix, or numbers of `dtype` in any shape.
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], matrix: &Matrix) -> io::Result<()> {
        let start = self.end;
        matrix.parts().into_iter().try_for_each(|part| self.write(&part))?;
        match form::form(matrix) {
            None => self.describe(name, convert::stored_dtype(dtype), shape.to_vec(), start),
            Some(form) => {
                self.forms.insert(name.to_owned(), form);
                self.describe(name, safetensors::Dtype::U8, vec![self.end - start], start);
            }
        }
        let (start, gap) = (self.end, self.end.next_multiple_of(ALIGNMENT) - self.end);
        if gap > 0 {
            self.write(&vec![0; gap])?;
            self.describe(&format!("gap.{start}"), safetensors::Dtype::U8, vec![gap], start);
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.end += bytes.len();
        self.file.write_all(bytes)
    }

    fn describe(&mut self, name: &str, dtype: safetensors::Dtype, shape: Vec<usize>, start: usize) {
        self.tensors.push((name.to_owned(), TensorInfo { dtype, shape, data_offsets: (start, self.end) }));
    }

    fn finish(mut self) -> io::Result<()> {
        let header = Metadata::new(Some(self.forms), self.tensors).map_err(io::Error::other)?;
        let mut header = serde_json::to_vec(&header)?;
        header.resize(self.room - size_of::<u64>(), b' ');
        self.file.rewind()?;
        self.file.write_all(&(header.len() as u64).to_le_bytes())?;
        self.file.write_all(&header)?;
        self.file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::model::weights::Quantisation;
    use crate::model::weights::fixture::{self, tiny_config};
    use crate::ops::quantised::Coding;

    #[test]
    fn while_a_copy_is_written_its_size_grows_to_that_of_all_its_tensors() {
        let folder = tempfile::tempdir().unwrap();
        fixture::write_model(folder.path(), &tiny_config(), 1, Dtype::F32);
        let files = WeightFiles::open(folder.path()).unwrap();
        let quantisation = Some(Quantisation { coding: Coding::Nf4, nested: false });
        let storage = Storage { dtype: Dtype::Bf16, quantisation, residency: Residency::Mapped };
        let path = folder.path().join("kept/a.safetensors");
        let reported = RefCell::new(Vec::new());
        let on_bytes = |done, all| reported.borrow_mut().push((done, all));
        Weights::Files(files).write_in_form(&tiny_config(), storage, &path, &on_bytes).unwrap();
        let (reported, all) = (reported.into_inner(), WeightFiles::open_file(path).unwrap().num_bytes());
        assert_eq!((reported.len(), reported.last()), (tiny_config().expected_tensors().len(), Some(&(all, all))));
        assert!(reported.is_sorted_by(|a, b| a.0 < b.0 && b.1 == all), "{reported:?}");
    }
}
