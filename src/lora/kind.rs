//! Kinds of adapters: what one adds to its linear layer, its gradients, its merged weight and the shapes of its matrices.

use std::ops::Range;

use burn::tensor::Tensor;

use super::dora;
use super::matrices::{Applied, Matrices};
use crate::ops::cpu::{Weight as HostWeight, linear_backward_input};
use crate::ops::kernels::Place;
use crate::ops::linear::{InputGrad, Layer, Weight, add_low_rank, linear, linear_backward, low_rank_input};
use crate::ops::low_rank::LowRank;

/// The kind of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// `scale B A` is added to the weight (Hu et al., 2021).
    Lora,
    /// The rows of the sum are brought to trained lengths besides (Liu et al., 2024).
    Dora,
    /// What [`Lora`](Self::Lora) adds is in the weight already, rounded with it. The gradients go straight through the rounding, as if
    /// that were the sum itself (Bengio et al., 2013). Dropout is off: there is no input of A alone.
    Rounded,
}

impl AdapterKind {
    /// Shapes of the matrices of rank `r` on a weight `[out_features, in_features]`.
    #[must_use]
    pub fn shapes(self, r: usize, [out_features, in_features]: [usize; 2]) -> Matrices<[usize; 2]> {
        match self {
            Self::Lora | Self::Rounded => Matrices { a: [r, in_features], b: [out_features, r], magnitude: None },
            Self::Dora => {
                let low_rank = Self::Lora.shapes(r, [out_features, in_features]);
                Matrices { magnitude: Some([1, out_features]), ..low_rank }
            }
        }
    }

    /// The output of a linear layer with its adapter, added to `residual` if there is one, and what the backward needs.
    ///
    /// # Shapes
    /// As in [`linear`].
    #[must_use]
    pub fn forward(
        self,
        place: Place,
        x: &Tensor<2>,
        weight: &Weight,
        adapter: Applied<'_>,
        residual: Option<Tensor<2>>,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        match self {
            Self::Lora => linear(place, x, weight, Some(adapter.lora()), residual),
            Self::Dora => (dora::forward(place, x, weight, adapter, residual), None),
            Self::Rounded => linear(place, x, weight, None, residual),
        }
    }

    /// The linear layer with its adapter, where the adapter is nothing but a low-rank update: such layers of one input are
    /// computed together.
    #[must_use]
    pub fn layer<'a>(self, weight: &'a Weight, adapter: Applied<'a>) -> Option<Layer<'a>> {
        match self {
            Self::Lora => Some(Layer { weight, lora: Some(adapter.lora()) }),
            Self::Dora | Self::Rounded => None,
        }
    }

    /// Adds what the adapter adds for some of the tokens to their rows of `y`, the output of the layer without one.
    #[must_use]
    pub fn add(
        self,
        place: Place,
        y: Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        adapter: Applied<'_>,
        rows: Range<usize>,
    ) -> Tensor<2> {
        match self {
            Self::Lora => add_low_rank(place, y, x, weight, adapter.lora(), rows),
            Self::Dora => dora::add(place, y, x, weight, adapter, rows),
            Self::Rounded => y,
        }
    }

    /// The gradients of the input, as `input_grad` asks, and of the matrices. `kept` is of the forward, or computed anew.
    ///
    /// # Shapes
    /// As in [`linear_backward`].
    #[must_use]
    pub fn backward(
        self,
        place: Place,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        (adapter, kept): (Applied<'_>, Option<Tensor<2>>),
        input_grad: InputGrad,
    ) -> (Option<Tensor<2>>, Option<Matrices<Tensor<2>>>) {
        match self {
            Self::Lora => {
                let lora = adapter.lora();
                let xa = kept.unwrap_or_else(|| low_rank_input(place, x, lora));
                let (dx, grads) = linear_backward(place, dy, x, weight, Some((lora, &xa)), input_grad);
                (dx, grads.map(Matrices::from))
            }
            Self::Dora => dora::backward(place, dy, x, weight, adapter, input_grad),
            Self::Rounded => {
                let lora = Applied { dropout: None, ..adapter }.lora();
                let xa = low_rank_input(place, x, lora);
                let (dx, _) = linear_backward(place, dy, x, weight, None, input_grad);
                let (_, grads) = linear_backward(place, dy, x, weight, Some((lora, &xa)), InputGrad::Skip);
                (dx, grads.map(Matrices::from))
            }
        }
    }

    /// What merging adds to `weight`, `[out_features, in_features]`.
    #[must_use]
    pub fn difference(
        self,
        matrices: Matrices<&[f32]>,
        scale: f64,
        weight: &[f32],
        [out_features, in_features]: [usize; 2],
    ) -> Vec<f32> {
        match self {
            Self::Lora | Self::Rounded => {
                let LowRank { a, b } = matrices.low_rank();
                let mut update = vec![0.0; out_features * in_features];
                linear_backward_input(b, HostWeight::f32(a), in_features, a.len() / in_features, &mut update, false);
                // The product is rounded before it is scaled, as in PEFT.
                #[expect(clippy::cast_possible_truncation, reason = "the sum is in f32")]
                update.iter_mut().for_each(|update| *update *= scale as f32);
                update
            }
            Self::Dora => {
                let update = Self::Lora.difference(matrices, scale, weight, [out_features, in_features]);
                dora::difference(update, weight, matrices.magnitude.unwrap_or_default())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::device::DeviceKind;
    use crate::lora::RowNorms;
    use crate::ops::host;
    use crate::ops::place::place_on;

    /// Numbers without a pattern, exact in few bits.
    fn numbers(shape: [usize; 2], seed: usize) -> Vec<f32> {
        let number = |i: usize| f32::from(u8::try_from((i * 37 + seed * 11) % 29).unwrap()) / 8.0 - 1.75;
        (0..shape[0] * shape[1]).map(number).collect()
    }

    fn product(a: &[f32], b: &[f32], [rows, inner, columns]: [usize; 3]) -> Vec<f32> {
        let at = |row: usize, column: usize| (0..inner).map(|k| a[row * inner + k] * b[k * columns + column]).sum();
        (0..rows * columns).map(|i| at(i / columns, i % columns)).collect()
    }

    fn transposed(a: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
        (0..rows * columns).map(|i| a[i % rows * columns + i / rows]).collect()
    }

    #[test]
    fn gradients_go_straight_through_to_what_the_whole_gradient_of_the_weight_gives() {
        let ([tokens, out, inner, rank], scale) = ([5, 6, 8, 3], 0.5);
        let (x, dy) = (numbers([tokens, inner], 1), numbers([tokens, out], 2));
        let (weight, a, b) = (numbers([out, inner], 3), numbers([rank, inner], 4), numbers([out, rank], 5));
        let tensor = |values: &[f32], shape| host::tensor::<2>(values.to_vec(), shape, &Device::flex());
        let matrices = Matrices { a: tensor(&a, [rank, inner]), b: tensor(&b, [out, rank]), magnitude: None };
        let dropout = Some(crate::ops::dropout::Dropout { probability: 0.5, seed: 1, first_row: 0 });
        let norms = RowNorms::default();
        let adapter = Applied { matrices: matrices.as_ref(), scale, dropout, norms: &norms };
        let (place, kind) = (place_on(DeviceKind::Cpu), AdapterKind::Rounded);
        let [x_on, dy_on] = [tensor(&x, [tokens, inner]), tensor(&dy, [tokens, out])];
        let on = Weight::new(tensor(&weight, [out, inner]));
        let (output, kept) = kind.forward(place, &x_on, &on, adapter, None);
        let (dx, grads) = kind.backward(place, &dy_on, &x_on, &on, (adapter, kept), InputGrad::Fresh);
        let grads = grads.unwrap();
        let read = |tensor: Tensor<2>| tensor.to_data().try_to_vec::<f32>().unwrap();
        // The weight is all that the forward and the input's gradient know.
        assert_eq!(read(output), product(&x, &transposed(&weight, [out, inner]), [tokens, inner, out]));
        assert_eq!(read(dx.unwrap()), product(&dy, &weight, [tokens, out, inner]));
        // d(W + s B A) = dy^T x.
        let of_weight = product(&transposed(&dy, [tokens, out]), &x, [out, tokens, inner]);
        let scaled = |values: Vec<f32>| values.into_iter().map(|value| value * 0.5).collect::<Vec<_>>();
        let of_a = scaled(product(&transposed(&b, [out, rank]), &of_weight, [rank, out, inner]));
        let of_b = scaled(product(&of_weight, &transposed(&a, [rank, inner]), [out, inner, rank]));
        assert_eq!((read(grads.a), read(grads.b)), (of_a, of_b));
    }
}
