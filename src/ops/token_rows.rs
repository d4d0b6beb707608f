//! Rows of the embedding of some tokens that take the place of the base's, as PEFT's `trainable_token_indices` has them.

use std::sync::Arc;

use burn::tensor::{Bool, DType, Device, IndexingUpdateOp, Int, Tensor};

use super::plain::linear::{Matrix, Weight};
use super::product::{F32Products, matmul};

/// Token ids on a device, `[ids]`.
pub(super) fn ids_on(ids: &[u32], device: &Device) -> Tensor<1, Int> {
    let ids: Vec<i32> = ids.iter().map(|&id| id.cast_signed()).collect();
    Tensor::from_data(ids.as_slice(), (device, DType::I32))
}

/// Rows of the embedding, and of the head where that is the embedding.
#[derive(Clone, Debug)]
pub struct TokenRows {
    /// The tokens, each once.
    pub ids: Arc<[u32]>,
    /// A row for each, `[ids, hidden_size]`, in `f32`.
    pub values: Tensor<2>,
}

impl TokenRows {
    /// On the device, `[ids]`.
    fn ids_on_device(&self) -> Tensor<1, Int> {
        ids_on(&self.ids, &self.values.device())
    }

    /// Which token has which row, `[tokens, ids]`.
    fn owners(&self, tokens: Tensor<1, Int>) -> Tensor<2, Bool> {
        tokens.unsqueeze_dim::<2>(1).equal(self.ids_on_device().unsqueeze_dim(0))
    }

    /// The embeddings `x` of `tokens` with these rows, times `scale`, rounded to `dtype`.
    ///
    /// # Shapes
    /// `tokens`: `[tokens]`, `x`: `[tokens, hidden_size]`; returns the same, in the type of `x`.
    #[must_use]
    pub fn embedded(&self, tokens: Tensor<1, Int>, x: Tensor<2>, scale: Option<f64>, dtype: DType) -> Tensor<2> {
        let owners = self.owners(tokens);
        let row = owners.clone().int().argmax(1).squeeze_dim(1);
        let rows = self.values.clone().cast(dtype).cast(x.dtype()).select(0, row);
        let rows = if let Some(scale) = scale { rows * scale } else { rows };
        x.mask_where(owners.any_dim(1), rows)
    }

    /// The gradient of the rows from that of the embeddings, `[ids, hidden_size]` in `f32`.
    #[must_use]
    pub fn embedded_backward(
        &self,
        tokens: Tensor<1, Int>,
        dx: Tensor<2>,
        scale: Option<f64>,
        products: F32Products,
    ) -> Tensor<2> {
        let grad = matmul(&self.owners(tokens).float().cast(DType::F32).transpose(), &dx.cast(DType::F32), products);
        if let Some(scale) = scale { grad * scale } else { grad }
    }

    /// The rows as a part of this head.
    #[must_use]
    pub fn of_head(&self, head: &Weight, dtype: DType) -> HeadRows {
        let values = Matrix::Dense(self.values.clone().cast(dtype));
        HeadRows { ids: self.ids.clone(), weight: Weight { values, bias: None, rounds: head.rounds } }
    }
}

/// Rows of a head.
#[derive(Clone, Debug)]
pub struct HeadRows {
    /// The tokens, each once.
    pub ids: Arc<[u32]>,
    /// `[ids, hidden_size]`
    pub weight: Weight,
}

impl HeadRows {
    fn columns(&self, like: &Tensor<2>) -> Tensor<1, Int> {
        ids_on(&self.ids, &like.device())
    }

    /// The columns of these tokens, `[rows, ids]`.
    pub(super) fn of(&self, logits: &Tensor<2>) -> Tensor<2> {
        logits.clone().select(1, self.columns(logits))
    }

    /// `logits` with these columns, or with zeros in their place.
    pub(super) fn put(&self, logits: Tensor<2>, columns: Option<Tensor<2>>) -> Tensor<2> {
        let ([_, vocab_size], ids) = (logits.dims(), self.columns(&logits));
        let ones = Tensor::<1, Int>::ones([ids.dims()[0]], (&logits.device(), DType::I32));
        let zeros = Tensor::<1, Int>::zeros([vocab_size], (&logits.device(), DType::I32));
        let is_one = zeros.select_assign(0, ids.clone(), ones, IndexingUpdateOp::Add).greater_elem(0);
        let others = logits.mask_fill(is_one.unsqueeze_dim(0), 0.0);
        match columns {
            Some(columns) => {
                let columns = columns.cast(others.dtype());
                others.select_assign(1, ids, columns, IndexingUpdateOp::Add)
            }
            None => others,
        }
    }
}
