//! Adapted weights as a quantised file has them, encoded anew after every update.

use std::sync::Arc;

use crate::config::FileType;
use crate::lora::{Adapter, AdapterSet};
use crate::model::Model;
use crate::model::weights::Weights;
use crate::ops::linear::{Matrix, Weight};
use crate::save::export::Shipped;
use crate::schema::Problem;
use crate::spec::in_layer;
use crate::util::faults;

/// What the adapted weights of a model are made of, update for update.
#[derive(Debug)]
pub(super) struct Rounding {
    pub(super) base: Weights,
    pub(super) shipped: Shipped,
}

impl Rounding {
    /// Encodes the adapted weights of `model` anew.
    ///
    /// # Errors
    /// A number that has no place in the type; files of the base that are gone.
    pub(super) fn round(&self, model: &mut Model, adapters: &AdapterSet) -> Result<(), Problem> {
        let Model { config, blocks, .. } = model;
        for ((layer, site), adapter) in adapters.by_site() {
            let of = &config.blocks[layer].sites[site];
            let name = format!("{}.weight", in_layer(layer, &of.name));
            let mut values = self.base.matrix_values(&name, of.shape, config)?;
            let update = update(adapter, &values, of.shape);
            values.iter_mut().zip(&update).for_each(|(value, update)| *value += update);
            let importance = self.shipped.imatrix.as_ref().and_then(|imatrix| imatrix.of(config, &name));
            encode(&mut blocks[layer].linears[site], &values, importance.as_deref(), (&name, self.shipped.file_type))?;
        }
        Ok(())
    }
}

/// What an adapter adds to its weight, as merging adds it.
fn update(adapter: &Adapter, weight: &[f32], shape: [usize; 2]) -> Vec<f32> {
    let matrices = adapter.matrices.as_ref().map(|matrix| faults::read(matrix.clone(), "an adapter"));
    adapter.kind.difference(matrices.as_ref().map(|values| &values[..]), adapter.scale, weight, shape)
}

fn encode(
    weight: &mut Weight,
    values: &[f32],
    importance: Option<&[f32]>,
    (name, file_type): (&str, FileType),
) -> Result<(), Problem> {
    let Matrix::Blocks(blocks) = &weight.values else {
        let message = format!("`train.ship_as`: `{name}` is in no blocks of a {} file", file_type.name());
        return Err(Problem::new(message).hint("leave it out of `lora.target_modules`, or name another type"));
    };
    let blocks = blocks.encoded_again(values, importance).map_err(|_| {
        let message = format!("`train.ship_as`: `{name}` with its adapter is too large for {}", file_type.name());
        Problem::new(message).hint("try a lower `optimizer.learning_rate`")
    })?;
    weight.values = Matrix::Blocks(Arc::new(blocks));
    Ok(())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;

    #[test]
    fn weights_with_no_place_in_a_type_are_named_with_what_to_do() {
        let rows = Tensor::<2>::ones([2, 64], &Device::flex());
        let mut weight = Weight::new(rows);
        let error = encode(&mut weight, &[1.0; 128], None, ("up_proj.weight", FileType::Q4)).unwrap_err().to_string();
        assert!(error.contains("`up_proj.weight` is in no blocks of a q4_0 file"), "{error}");
        let blocks = crate::ops::blocks::encode(crate::util::gguf::GgufType::Q4_0, &[1.0; 128], 64, None).unwrap();
        let blocks = burn::tensor::Bytes::from_elems(blocks);
        let blocks = crate::ops::blocks::Blocks::new([2, 64], crate::util::gguf::GgufType::Q4_0, blocks);
        weight.values = Matrix::Blocks(Arc::new(blocks));
        let error =
            encode(&mut weight, &[f32::NAN; 128], None, ("up_proj.weight", FileType::Q4)).unwrap_err().to_string();
        assert!(error.contains("too large for q4_0") && error.contains("learning_rate"), "{error}");
    }
}
