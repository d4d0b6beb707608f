//! The language-model head and its cross-entropy.

use burn::tensor::{DType, Tensor};

use super::Linears;
use crate::ops::cpu::{Draw, Drawn};
use crate::ops::plain::cross_entropy::{Head, HeadGrads, LossInputs, plain_cross_entropy};
use crate::ops::plain::draw::plain_draw;
use crate::ops::plain::linear::{InputGrad, Layer};
use crate::ops::product::matmul;

/// The head and its losses, as in [`cross_entropy`](crate::ops::cross_entropy), and what is drawn from its logits, as in
/// [`draw`](crate::ops::draw).
pub trait Losses: Linears {
    /// Losses and their gradients times the scale.
    fn linear_cross_entropy(&self, inputs: LossInputs<'_>) -> (Tensor<1>, Option<HeadGrads>) {
        chunked_cross_entropy(self, inputs)
    }

    /// Losses of logits `[targets, vocab_size]`, and their gradients times `scale`.
    fn cross_entropy(&self, logits: Tensor<2>, targets: &[u32], scale: Option<f64>) -> (Tensor<1>, Option<Tensor<2>>) {
        plain_cross_entropy(&logits, targets, scale)
    }

    /// A token for each row.
    fn draw(&self, logits: &Tensor<2>, draws: &[Draw]) -> Vec<Option<Drawn>> {
        plain_draw(logits, draws)
    }
}

/// Logits before their cap, `[targets, vocab_size]`, in the type of `hidden`.
pub(crate) fn uncapped<L: Linears + ?Sized>(place: &L, head: Head<'_>, hidden: &Tensor<2>) -> Tensor<2> {
    let product = |weight| place.linear(hidden, Layer { weight, lora: None }, None).0;
    let logits = product(head.weight);
    match head.rows {
        Some(rows) => rows.put(logits, Some(product(&rows.weight))),
        None => logits,
    }
}

/// [`Losses::linear_cross_entropy`] by the place's products and cross-entropy, in chunks of targets.
fn chunked_cross_entropy<L: Losses + ?Sized>(place: &L, inputs: LossInputs<'_>) -> (Tensor<1>, Option<HeadGrads>) {
    let LossInputs { hidden, head, targets, scale, chunk_len } = inputs;
    let mut dweight: Option<Tensor<2>> = None;
    let chunk = |(index, targets): (usize, &[u32])| {
        let part = |x: &Tensor<2>| x.clone().narrow(0, index * chunk_len, targets.len());
        let hidden = part(hidden);
        let logits = head.capped(uncapped(place, head, &hidden));
        let kept = head.soft_cap.map(|_| logits.clone());
        let (losses, dlogits) = place.cross_entropy(logits, targets, scale);
        let dhidden = dlogits.map(|dlogits| {
            let dlogits = match kept {
                Some(logits) => head.capped_backward(dlogits, logits),
                None => dlogits,
            };
            let input_grad = |dlogits: &Tensor<2>, weight| {
                let layer = (Layer { weight, lora: None }, None);
                let (dhidden, _) = place.linear_backward(dlogits, &hidden, layer, InputGrad::Fresh);
                dhidden.unwrap_or_else(|| hidden.zeros_like())
            };
            if let Some(inputs) = head.inputs {
                let in_f32 = |x: Tensor<2>| x.cast(DType::F32);
                let grad = matmul(&in_f32(dlogits.clone()).transpose(), &in_f32(part(inputs)), place.f32_products());
                dweight = Some(match dweight.take() {
                    Some(sum) => sum + grad,
                    None => grad,
                });
            }
            let Some(rows) = head.rows else { return (input_grad(&dlogits, head.weight), None) };
            let of_rows = rows.of(&dlogits);
            let of_others = input_grad(&rows.put(dlogits, None), head.weight);
            (of_others + input_grad(&of_rows, &rows.weight), Some(of_rows.cast(DType::F32)))
        });
        (losses, dhidden)
    };
    let (losses, grads): (Vec<_>, Vec<_>) = targets.chunks(chunk_len).enumerate().map(chunk).unzip();
    let (dhidden, drows): (Vec<_>, Vec<_>) = grads.into_iter().flatten().unzip();
    let drows: Vec<_> = drows.into_iter().flatten().collect();
    let drows = (!drows.is_empty()).then(|| Tensor::cat(drows, 0));
    (Tensor::cat(losses, 0), scale.map(|_| HeadGrads { dhidden: Tensor::cat(dhidden, 0), drows, dweight }))
}
