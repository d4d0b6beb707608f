//! The target tokens of a micro-batch.

use std::ops::Range;

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor};

use crate::data::batch::{Answer, Batch, Target};
use crate::model::Model;
use crate::train::references::{References, digests};

/// The target tokens of a micro-batch.
///
/// More targets fill up a multiple that the place asks for: the first row again, with token 0.
/// Their losses are cut off, and their gradients go nowhere.
#[derive(Debug)]
pub struct Targets {
    /// Rows of the last block's output that carry loss, on the device.
    rows: Tensor<1, Int>,
    /// The token that each of them is to predict.
    pub(super) tokens: Vec<u32>,
    /// Number of targets without those that fill up.
    num_tokens: usize,
    /// The targets of each document.
    pub(super) by_row: Vec<Range<usize>>,
    pub(super) answers: Vec<Answer>,
    /// Of each document of a preference, see [`digests`].
    pub(super) digests: Vec<u64>,
    /// See [`Batch::written`].
    pub(super) written: Vec<f32>,
    /// Where there are such, the target of every row of the last block's output, or -1, `[tokens]`.
    of_rows: Option<Tensor<1, Int>>,
}

impl Targets {
    /// The targets of a batch that is arranged for this model.
    #[must_use]
    pub fn new(model: &Model, batch: &Batch) -> Self {
        let index = |position| i32::try_from(position).unwrap_or(i32::MAX);
        let on_device = |rows: &[i32]| Tensor::from_data(rows, (&model.device(), DType::I32));
        let mut rows: Vec<i32> = batch.targets.iter().map(|target| index(target.position)).collect();
        let mut tokens: Vec<u32> = batch.targets.iter().map(|target| target.token).collect();
        let num_tokens = tokens.len();
        let multiple = model.place().target_multiple();
        let of_rows = (multiple > 1).then(|| {
            let mut of_rows = vec![-1; batch.input_ids.len()];
            for (target, row) in batch.targets.iter().enumerate() {
                of_rows[row.position] = index(target);
            }
            let filled_up = num_tokens.next_multiple_of(multiple);
            rows.resize(filled_up, rows.first().copied().unwrap_or(0));
            tokens.resize(filled_up, 0);
            on_device(&of_rows)
        });
        let mut first = 0;
        let by_row = batch.documents.iter().map(|document| {
            let is_in = |target: &&Target| target.position < document.start + document.len;
            let start = first;
            first += batch.targets[start..].iter().take_while(is_in).count();
            start..first
        });
        let (by_row, answers, written) = (by_row.collect(), batch.answers.clone(), batch.written.clone());
        let digests = if answers.is_empty() { Vec::new() } else { digests(batch) };
        Self { by_row, answers, digests, written, rows: on_device(&rows), tokens, num_tokens, of_rows }
    }

    /// Number of target tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Whether `references` have all that an objective needs of the reference.
    pub(in crate::train) fn are_known(&self, references: Option<&References>) -> bool {
        references.is_some_and(|references| references.of(&self.digests).is_some())
    }

    /// Their rows of the last block's output, `[targets, hidden_size]`.
    pub(super) fn select(&self, x: Tensor<2>) -> Tensor<2> {
        x.select(0, self.rows.clone())
    }

    /// The gradient of the last block's output, of this shape, from that of these rows.
    pub(super) fn scatter(&self, dhidden: Tensor<2>, shape: [usize; 2]) -> Tensor<2> {
        match self.of_rows.clone() {
            // That of the row's target, or zero. A scatter would take them one after the other.
            Some(of_rows) => {
                let has_none = of_rows.clone().lower_elem(0);
                let of_rows = of_rows.mask_fill(has_none.clone(), 0);
                dhidden.select(0, of_rows).mask_fill(has_none.unsqueeze_dim(1), 0.0)
            }
            None => {
                let zeros = Tensor::zeros(shape, (&dhidden.device(), dhidden.dtype()));
                zeros.select_assign(0, self.rows.clone(), dhidden, IndexingUpdateOp::Add)
            }
        }
    }

    /// What there is of every target, without those that fill up.
    pub(super) fn cut<const D: usize>(&self, of_targets: Tensor<D>) -> Tensor<D> {
        of_targets.narrow(0, 0, self.num_tokens)
    }
}
