//! Tensors that hold the matrices of all experts of a layer, with adapters merged into these.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::OnceLock;

use safetensors::View;

use super::tensor::MergedTensor;
use crate::device::Dtype;
use crate::model::weights::{StoredTensor, WeightFiles, convert};
use crate::schema::Problem;

/// Ends of the names of codes of four bits and of their scales, which gpt-oss alone has: its numbers are transposed.
const CODES: &str = "_blocks";
const SCALES: &str = "_scales";

/// The matrices of experts of a base.
pub(super) struct Experts<'a> {
    pub(super) base: &'a WeightFiles,
    /// Every tensor of the merged model by its name.
    pub(super) parts: BTreeMap<&'a str, MergedTensor<'a>>,
}

/// The matrices of a tensor of the base, expert by expert, in the place that they have there, or that they would have in numbers.
pub(super) struct JoinedExperts<'a> {
    /// Absent: the base has codes of it.
    stored: Option<(&'a WeightFiles, &'a StoredTensor)>,
    parts: Vec<(MergedTensor<'a>, &'a StoredTensor)>,
    shape: Vec<usize>,
    dtype: Dtype,
    failure: &'a OnceLock<Problem>,
}

impl<'a> Experts<'a> {
    /// A tensor with its name; none for the scales of codes. Numbers keep their type, codes become numbers.
    pub(super) fn joined(
        &self,
        name: &str,
        stored: &'a StoredTensor,
        dtype: Option<Dtype>,
        failure: &'a OnceLock<Problem>,
    ) -> Option<(String, JoinedExperts<'a>)> {
        if name.ends_with(SCALES) {
            return None;
        }
        let is_weight = |(part, stored): (&'a String, &'a StoredTensor)| {
            let weight = part.strip_suffix("_packed").unwrap_or(part);
            Some((*self.parts.get(weight)?, stored))
        };
        let parts: Vec<_> = self.base.parts(stored).into_iter().filter_map(is_weight).collect();
        let own = stored.float_dtype().zip(Some((self.base, stored)));
        let &(first, _) = parts.first()?;
        let (name, shape, dtype) = match (&own, name.strip_suffix(CODES)) {
            (None, Some(name)) => {
                let (num_experts, [rows, columns]) = (stored.shape[0], [first.shape[0], first.shape[1]]);
                let shape = vec![num_experts, columns, rows * parts.len() / num_experts];
                (name, shape, dtype.unwrap_or(first.dtype()))
            }
            (own, _) => (name, stored.shape.clone(), own.as_ref().map_or(first.dtype(), |(dtype, _)| *dtype)),
        };
        let stored = own.map(|(_, stored)| stored);
        Some((name.to_owned(), JoinedExperts { stored, parts, shape, dtype, failure }))
    }
}

impl JoinedExperts<'_> {
    fn bytes(&self) -> Result<Vec<u8>, Problem> {
        let mut bytes =
            self.stored.map_or_else(|| vec![0; self.data_len()], |(files, stored)| files.bytes(stored).into_owned());
        let (width, num_experts) = (self.dtype.num_bytes(), self.shape[0]);
        let (of_expert, num_parts) = (bytes.len() / num_experts, self.parts.len() / num_experts);
        for (index, (tensor, part)) in self.parts.iter().enumerate() {
            let numbers = tensor.bytes_in(self.dtype)?;
            if let Some((_, stored)) = self.stored {
                part.put_into(stored, &numbers, &mut bytes);
            } else {
                let (expert, part) = (index / num_parts, index % num_parts);
                let to = &mut bytes[expert * of_expert..][..of_expert];
                let [rows, columns] = [tensor.shape[0], tensor.shape[1]];
                for (row, values) in numbers.chunks(columns * width).enumerate() {
                    for (column, value) in values.chunks(width).enumerate() {
                        let at = column * rows * num_parts + row * num_parts + part;
                        to[at * width..][..width].copy_from_slice(value);
                    }
                }
            }
            tensor.release();
        }
        Ok(bytes)
    }
}

impl View for JoinedExperts<'_> {
    fn dtype(&self) -> safetensors::Dtype {
        convert::stored_dtype(self.dtype)
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(self.bytes().unwrap_or_else(|problem| {
            drop(self.failure.set(problem));
            vec![0; self.data_len()]
        }))
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.num_bytes()
    }
}
