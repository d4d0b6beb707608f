//! Weights in the form in which products use them, kept in the cache folder: for models that stay on disk and whose files
//! have another form.

use std::borrow::Cow;
use std::cell::Cell;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use burn::tensor::{Device, Tensor};
use safetensors::View;
use sha2::{Digest as _, Sha256};

use super::convert;
use super::files::overflow;
use super::quantise::Quantisation;
use super::{Residency, Storage, StoredTensor, WeightFiles, Weights};
use crate::data::cache::{MAX_CACHE_BYTES, UNFINISHED_SUFFIX, hex, tidy};
use crate::device::Dtype;
use crate::files::{CACHE_VARIABLE, cache_folder};
use crate::ops::linear::Matrix;
use crate::schema::Problem;
use crate::spec::ModelConfig;

const SUFFIX: &str = ".safetensors";
/// Increase this with every change to what is in a file.
const FORMAT_VERSION: u32 = 1;

impl Weights {
    /// Weights that `storage` can use where they are: these, or those of the [copy](Self::copy), which is written where it is
    /// not there. While it is written, `on_bytes` is called with the size of what is there and of all.
    ///
    /// # Errors
    /// Where the copy cannot be written, or a number does not fit the form.
    pub fn in_form(
        &self,
        config: &ModelConfig,
        storage: Storage,
        on_bytes: &dyn Fn(usize, usize),
    ) -> Result<Cow<'_, Self>, Problem> {
        let (Self::Files(files), Some(path)) = (self, self.copy(config, storage)?) else {
            return Ok(Cow::Borrowed(self));
        };
        // A damaged copy is made again.
        let opened = WeightFiles::open_file(path.clone()).or_else(|_| {
            files.write_in_form(config, storage, &path, on_bytes)?;
            WeightFiles::open_file(path.clone())
        })?;
        // A failure is ignored: only `tidy` uses the time.
        drop(File::open(&path).and_then(|file| file.set_modified(SystemTime::now())));
        Ok(Cow::Owned(Self::Files(opened)))
    }

    /// The file in the cache folder for weights that are to stay on disk in another form than theirs.
    ///
    /// # Errors
    /// Where there is no cache folder.
    pub fn copy(&self, config: &ModelConfig, storage: Storage) -> Result<Option<PathBuf>, Problem> {
        match self {
            Self::Files(files) if storage.residency == Residency::Mapped && !files.are_in_form(config, storage) => {
                let folder = cache_folder().ok_or_else(|| Problem::new("there is no folder for caches").hint(HINT))?;
                Ok(Some(folder.join("weights").join(hex(&key(files, storage)) + SUFFIX)))
            }
            _ => Ok(None),
        }
    }
}

const HINT: &str = "`model.residency` = \"mapped\" keeps weights there in the form that they are used in; a `model.dtype` that is \
                    the type of the files, and no quantisation, needs no copy";

/// What decides the content of a file.
fn key(files: &WeightFiles, storage: Storage) -> [u8; 32] {
    let form = format!("{FORMAT_VERSION} {} {storage}", env!("CARGO_PKG_VERSION"));
    Sha256::new().chain_update(files.digest()).chain_update(form).finalize().into()
}

impl WeightFiles {
    fn are_in_form(&self, config: &ModelConfig, storage: Storage) -> bool {
        let is_in_form = |(name, shape): (String, Vec<usize>)| {
            let stored = self.tensors().get(&name);
            shape.len() < 2 || stored.is_some_and(|stored| self.has_numbers(stored, storage.dtype))
        };
        storage.quantisation.is_none() && config.expected_tensors().into_iter().all(is_in_form)
    }

    /// Whether a tensor can be used as numbers of `dtype` where it lies.
    fn has_numbers(&self, stored: &StoredTensor, dtype: Dtype) -> bool {
        stored.float_dtype() == Some(dtype) && self.pages(stored).is_aligned(dtype)
    }

    /// One matrix over the pages of its file.
    ///
    /// # Errors
    /// Where the tensor is missing, has another shape, or is not in that form.
    pub(super) fn map(
        &self,
        name: &str,
        shape: [usize; 2],
        dtype: Dtype,
        device: &Device,
    ) -> Result<Tensor<2>, Problem> {
        let (stored, _) = self.find(name, &shape)?;
        if !self.has_numbers(stored, dtype) {
            return Err(self.mismatch(&[format!("`{name}` cannot be used as {dtype} where it lies")]));
        }
        Ok(self.pages(stored).tensor(shape, dtype, device))
    }

    /// One quantised matrix over the pages of a file of the cache folder.
    ///
    /// # Errors
    /// Where the codes are missing or damaged.
    pub(super) fn map_codes(
        &self,
        name: &str,
        shape: [usize; 2],
        quantisation: Quantisation,
        device: &Device,
    ) -> Result<Matrix, Problem> {
        let pages = self.tensors().get(name).map(|stored| self.pages(stored));
        let pages = pages.filter(|pages| pages.as_ref().len() == quantisation.num_kept_bytes(shape));
        let pages = pages.filter(|pages| pages.is_aligned(Dtype::F32));
        let pages = pages.ok_or_else(|| self.mismatch(&[format!("`{name}` is not {quantisation}")]))?;
        Ok(Matrix::Quantised(Arc::new(quantisation.over(pages, shape, device))))
    }

    /// Writes the file whole or not at all; two processes may do so at once.
    fn write_in_form(
        &self,
        config: &ModelConfig,
        storage: Storage,
        path: &Path,
        on_bytes: &dyn Fn(usize, usize),
    ) -> Result<(), Problem> {
        let folder = path.parent().unwrap_or(Path::new(""));
        let (failure, done, all) = (OnceLock::new(), Cell::new(0), Cell::new(0));
        let on_tensor = |num_bytes: usize| {
            done.set(done.get() + num_bytes);
            on_bytes(done.get(), all.get());
        };
        let kept = |(name, shape): (String, Vec<usize>)| {
            let form = Form::of(&name, &shape, storage);
            let (stored, from) = self.find(&name, &shape)?;
            let shape = form.shape(stored);
            Ok((
                name.clone(),
                Kept { files: self, stored, from, name, form, shape, failure: &failure, on_tensor: &on_tensor },
            ))
        };
        let tensors: Result<Vec<_>, Problem> = config.expected_tensors().into_iter().map(kept).collect();
        let tensors = tensors?;
        all.set(tensors.iter().map(|(_, kept)| kept.data_len()).sum());
        let write = || -> io::Result<()> {
            std::fs::create_dir_all(folder)?;
            // safetensors writes a file of its own name beside the one that it gets.
            let unfinished = tempfile::Builder::new().suffix(UNFINISHED_SUFFIX).tempdir_in(folder)?;
            let file = unfinished.path().join("weights");
            safetensors::serialize_to_file(tensors, None, &file).map_err(io::Error::other)?;
            File::open(&file)?.sync_all()?;
            if failure.get().is_none() {
                std::fs::rename(file, path)?;
                tidy(folder, SUFFIX, MAX_CACHE_BYTES, path);
            }
            Ok(())
        };
        let written = write().map_err(|error| {
            let problem = Problem::new(format!("cannot write {}: {error}", path.display()));
            problem.hint(format!("{CACHE_VARIABLE} names another folder. {HINT}"))
        });
        failure.get().cloned().map_or(written, Err)
    }
}

/// What becomes of a tensor.
#[derive(Clone, Copy, Debug)]
enum Form {
    AsStored,
    Numbers(Dtype),
    Codes(Quantisation, [usize; 2]),
}

impl Form {
    fn of(name: &str, shape: &[usize], storage: Storage) -> Self {
        match (shape, storage.quantisation) {
            (&[out_features, in_features], Some(quantisation)) if name.starts_with("model.layers.") => {
                Self::Codes(quantisation, [out_features, in_features])
            }
            ([_, _], _) => Self::Numbers(storage.dtype),
            _ => Self::AsStored,
        }
    }

    fn shape(self, stored: &StoredTensor) -> Vec<usize> {
        match self {
            Self::Codes(quantisation, shape) => vec![quantisation.num_kept_bytes(shape)],
            Self::AsStored | Self::Numbers(_) => stored.shape.clone(),
        }
    }
}

/// A tensor as safetensors writes it, which knows no failure. Its content exists only while it is written.
struct Kept<'a> {
    files: &'a WeightFiles,
    stored: &'a StoredTensor,
    from: Dtype,
    name: String,
    form: Form,
    shape: Vec<usize>,
    failure: &'a OnceLock<Problem>,
    /// Called with its size when its content is there.
    on_tensor: &'a dyn Fn(usize),
}

impl Kept<'_> {
    fn bytes(&self) -> Result<Vec<u8>, Problem> {
        let source = self.files.bytes(self.stored);
        let bytes = match self.form {
            Form::AsStored => Ok(source.to_vec()),
            Form::Numbers(to) => {
                convert::converted(source, self.from, to).map_err(|_| overflow(self.files.folder(), &self.name, to))
            }
            Form::Codes(quantisation, shape) => {
                let quantised = self.files.quantise(&self.name, shape, quantisation, &Device::flex());
                quantised.map(|quantised| quantisation.kept_bytes(&quantised))
            }
        };
        self.files.release(self.stored);
        bytes
    }
}

impl View for Kept<'_> {
    fn dtype(&self) -> safetensors::Dtype {
        match self.form {
            Form::AsStored => self.stored.dtype,
            Form::Numbers(dtype) => convert::stored_dtype(dtype),
            Form::Codes(..) => safetensors::Dtype::U8,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.bytes().unwrap_or_else(|problem| {
            // The first problem is reported, and the file is not kept.
            drop(self.failure.set(problem));
            vec![0; self.data_len()]
        });
        (self.on_tensor)(bytes.len());
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        let width = match self.form {
            Form::AsStored => self.from.num_bytes(),
            Form::Numbers(dtype) => dtype.num_bytes(),
            Form::Codes(..) => 1,
        };
        width * self.shape.iter().product::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
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
        files.write_in_form(&tiny_config(), storage, &path, &on_bytes).unwrap();
        let (reported, all) = (reported.into_inner(), WeightFiles::open_file(path).unwrap().num_bytes());
        assert_eq!((reported.len(), reported.last()), (tiny_config().expected_tensors().len(), Some(&(all, all))));
        assert!(reported.is_sorted_by(|a, b| a.0 < b.0 && b.1 == all), "{reported:?}");
    }
}
