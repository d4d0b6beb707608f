//! Cross-entropy of logits by the kernel of `cross_entropy.cu`: the gradient takes the logits' place.

use burn::tensor::{DType, Int, Tensor};

use super::matrix::{dims, stride};
use super::stream::{Launch, note_memory};
use crate::ops::custom::{Output, first_of, queue, spec};

const MODULE: &str = "cross_entropy";

const THREADS: usize = 1024;

/// The losses of `logits` at `targets`, `[targets]`, and the gradient by the logits times `scale`.
pub(super) fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    scale: Option<f64>,
) -> (Tensor<1>, Option<Tensor<2>>) {
    let ([rows, _], has_grad) = (logits.dims(), scale.is_some());
    let inputs = vec![logits.into_dispatch(), targets.into_dispatch()];
    let mut outputs = vec![Output::New(spec(DType::F32, [rows]))];
    outputs.extend(has_grad.then_some(Output::Changed(0)));
    let queued = queue("cross_entropy", inputs, outputs, move |inputs, outputs| {
        // Without a gradient the logits are an input.
        let (logits, inputs) = if has_grad { (&outputs[1], &inputs[..]) } else { (&inputs[0], &inputs[1..]) };
        note_memory(logits);
        let loss = Launch::new(MODULE, "cross_entropy", [rows, 1, 1], THREADS);
        let loss = if has_grad { loss.change(logits) } else { loss.read(logits) }.read(&inputs[0]);
        let loss = loss.write(&outputs[0]).long(stride(logits) as u64).ints([dims(logits)[1]]);
        loss.float(scale.unwrap_or_default()).ints([usize::from(has_grad)]).launch();
    });
    let ([losses], grad) = first_of(queued);
    (Tensor::from_dispatch(losses), grad.into_iter().next().map(Tensor::from_dispatch))
}
