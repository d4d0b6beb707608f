//! What adapters have in place of a model's own weights: head and norms.

use std::borrow::Cow;

use burn::tensor::{DType, Tensor};

use super::Model;
use super::block::Block;
use crate::lora::{AdapterSet, FullTensor};
use crate::ops::cross_entropy::Head;
use crate::ops::linear::{Matrix, Weight};
use crate::ops::norm::Norm;
use crate::ops::token_rows::HeadRows;
use crate::spec::{self, ModelConfig};

/// The head that adapters give a model.
#[derive(Clone, Debug)]
pub struct OwnHead {
    /// `[vocab_size, hidden_size]`
    weight: Weight,
    /// Rows in place of the weight's.
    rows: Option<HeadRows>,
    soft_cap: Option<f64>,
}

impl OwnHead {
    /// As operations take it; where it is trained, its gradient is asked for apart.
    #[must_use]
    pub fn head(&self) -> Head<'_> {
        Head { weight: &self.weight, rows: self.rows.as_ref(), inputs: None, soft_cap: self.soft_cap }
    }

    /// The head whose logits, of an input that is divided by a number, are divided by that too.
    #[must_use]
    pub fn over(&self, divisor: f64) -> Self {
        let mut over = self.clone();
        over.weight.bias = over.weight.bias.map(|bias| bias / divisor);
        over.soft_cap = over.soft_cap.map(|cap| cap / divisor);
        over
    }
}

impl ModelConfig {
    /// The weight of a norm as its file has it, `[1, width]`, as the norm computes with it, `[width]`.
    fn norm_of(&self, values: &Tensor<2>) -> Tensor<1> {
        self.norm_weight(values.clone().squeeze_dim(0))
    }

    /// The same of the last one.
    fn last_norm_of(&self, values: &Tensor<2>) -> Tensor<1> {
        if self.family().is_muse() { values.clone().squeeze_dim(0) } else { self.norm_of(values) }
    }

    /// The opposite.
    fn norm_in_file(&self, weight: Tensor<1>) -> Tensor<2> {
        let weight = weight.unsqueeze_dim(0);
        if self.has_norms_less_one { weight - 1.0 } else { weight }
    }
}

impl Model {
    /// Gives adapters the rows of the embedding of these tokens, if they have none.
    pub fn start_tokens(&self, adapters: &mut AdapterSet, ids: &[usize]) {
        let rows = |ids: &[u32]| self.embed_tokens.clone().select(0, self.token_ids(ids)).cast(DType::F32);
        adapters.full.start_tokens(ids, rows);
    }

    /// Gives adapters the model's own of these modules, where they have none.
    pub fn start_modules(&self, adapters: &mut AdapterSet, modules: impl Iterator<Item = FullTensor>) {
        modules.for_each(|module| adapters.full.start(module, || self.module(module)));
    }

    /// The model's own values of a module, in `f32`.
    fn module(&self, module: FullTensor) -> Tensor<2> {
        match module {
            FullTensor::Head => self.lm_head.values.dense().into_owned().cast(DType::F32),
            FullTensor::Norm(_) => {
                let weight = self.norm.weight.clone() * self.config.logit_divisor;
                if self.config.family().is_muse() { weight.unsqueeze_dim(0) } else { self.config.norm_in_file(weight) }
            }
            FullTensor::BlockNorm(layer, name) => {
                let sublayers = self.blocks[layer].sublayers.iter().zip(&self.config.blocks[layer].sublayers);
                let norms = sublayers.flat_map(|(sublayer, spec)| {
                    [(spec.norm_before, &sublayer.norm_before), (spec.norm_after, &sublayer.norm_after)]
                });
                let of_name = |(of, norm): (_, &Option<Norm>)| norm.clone().filter(|_| of == Some(name));
                let found = norms.into_iter().find_map(of_name).map(|norm| norm.weight);
                self.config
                    .norm_in_file(found.unwrap_or_else(|| unreachable!("norms are named after those of the model")))
            }
            _ => self.embed_tokens.clone().cast(DType::F32),
        }
    }

    /// The head with what adapters have in place of it.
    #[must_use]
    pub fn own_head(&self, adapters: &AdapterSet) -> OwnHead {
        let cast = |values: &Tensor<2>| Weight {
            values: Matrix::Dense(values.clone().cast(self.rounding_dtype())),
            bias: None,
            rounds: self.lm_head.rounds,
        };
        let weight = adapters.full.head(cast).unwrap_or(&self.lm_head).clone();
        let tokens = adapters.full.tokens().filter(|_| self.config.tie_word_embeddings);
        let rows = tokens.map(|tokens| tokens.of_head(&self.lm_head, self.rounding_dtype()));
        OwnHead { weight, rows, soft_cap: self.config.logit_soft_cap }
    }

    /// The norm before the head.
    #[must_use]
    pub fn own_norm(&self, adapters: &AdapterSet) -> Norm {
        match adapters.full.get(FullTensor::Norm(self.config.last_norm)) {
            Some(values) => Norm { weight: self.config.last_norm_of(values) / self.config.logit_divisor, bias: None },
            None => self.norm.clone(),
        }
    }

    /// A block with the norms that adapters have in place of its own.
    #[must_use]
    pub fn with_own_norms<'a>(&self, layer: usize, block: &'a Block, adapters: &AdapterSet) -> Cow<'a, Block> {
        let own = |name: Option<&'static str>| {
            let name = name?;
            Some((name, self.config.norm_of(adapters.full.get(FullTensor::BlockNorm(layer, name))?)))
        };
        let of = |spec: &spec::Sublayer| [own(spec.norm_before), own(spec.norm_after)];
        let own: Vec<_> = self.config.blocks[layer].sublayers.iter().map(of).collect();
        if own.iter().flatten().all(Option::is_none) {
            return Cow::Borrowed(block);
        }
        let mut block = block.clone();
        for (sublayer, own) in block.sublayers.iter_mut().zip(own) {
            let names = own.each_ref().map(|own| own.as_ref().map(|(name, _)| *name));
            let [before, after] = own.map(|own| own.map(|(_, weight)| Norm { weight, bias: None }));
            sublayer.norm_before = before.or(sublayer.norm_before.take());
            sublayer.norm_after = after.or(sublayer.norm_after.take());
            sublayer.trained_norms = names;
        }
        Cow::Owned(block)
    }

    /// The gradient of the norm before the head as its file has it, from that of the norm's output, `[1, hidden_size]`.
    #[must_use]
    pub fn own_norm_backward(&self, grad: Tensor<2>) -> Tensor<2> {
        grad / self.config.logit_divisor
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::ops::host;
    use crate::ops::place::place_of;

    #[test]
    fn a_head_over_a_number_makes_logits_over_it() {
        let device = Device::flex();
        let place = place_of(&device, DType::F32);
        let tensor = |values: &[f32], rows| host::tensor(values.to_vec(), [rows, values.len() / rows], &device);
        let bias = Some(tensor(&[0.5, -2.0, 3.0], 1).squeeze_dim(0));
        let weight = Weight { bias, ..Weight::new(tensor(&[1.0, 2.0, -1.0, 0.5, 0.25, -3.0], 3)) };
        let own = OwnHead { weight, rows: None, soft_cap: Some(4.0) };
        let hidden = tensor(&[1.5, -0.5, 0.25, 2.0], 2);
        let logits = |own: &OwnHead, hidden| own.head().logits(place, &hidden).into_data().try_to_vec::<f32>().unwrap();
        let expected = logits(&own, hidden.clone()).into_iter().map(|logit| logit / 0.5);
        let found = logits(&own.over(0.5), hidden / 0.5);
        assert!(found.iter().zip(expected).all(|(found, is)| (found - is).abs() < 1e-5), "{found:?}");
    }
}
