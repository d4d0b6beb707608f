//! The gated delta rule by the kernels of the CPU, on tensors in host memory.

use burn::tensor::Tensor;

use crate::ops::plain::delta_rule::{DeltaInputs, Gates};
use crate::ops::{cpu, host};

/// [`delta_rule`](crate::ops::delta_rule::delta_rule), or with a state
/// [`delta_rule_next`](crate::ops::delta_rule::delta_rule_next).
pub(super) fn forward(inputs: DeltaInputs<'_>, state: Option<Tensor<3>>) -> (Tensor<2>, Option<Tensor<3>>) {
    let DeltaInputs { layout, heads, .. } = inputs;
    let (tokens, device) = (inputs.qkv.dims()[0], inputs.qkv.device());
    let mut o = vec![0.0; tokens * heads.value_width()];
    let [qkv, decay, strength] = [inputs.qkv, &inputs.gates.decay, &inputs.gates.strength].map(host::view);
    let inputs = cpu::DeltaInputs { qkv: &qkv, decay: &decay, strength: &strength };
    let mut run = |states: Option<&mut [f32]>| cpu::delta_rule(inputs, layout.documents(), heads, &mut o, states);
    let state = match state {
        Some(state) => Some(host::update(state, |states| run(Some(states)))),
        None => {
            run(None);
            None
        }
    };
    (host::tensor(o, [tokens, heads.value_width()], &device), state)
}

/// [`delta_rule_backward`](crate::ops::delta_rule::delta_rule_backward).
pub(super) fn backward(d_o: &Tensor<2>, inputs: DeltaInputs<'_>) -> (Tensor<2>, Gates<Tensor<2>>) {
    let DeltaInputs { layout, heads, .. } = inputs;
    let tensors = [inputs.qkv, &inputs.gates.decay, &inputs.gates.strength];
    let views = tensors.map(host::view);
    let mut grads = views.each_ref().map(|values| vec![0.0; values.len()]);
    let [qkv, decay, strength] = views.each_ref().map(|values| &**values);
    let inputs = cpu::DeltaInputs { qkv, decay, strength };
    let to = grads.each_mut().map(Vec::as_mut_slice);
    cpu::delta_rule_backward(&host::view(d_o), inputs, layout.documents(), heads, to);
    let [dqkv, decay, strength] = grads;
    let [dqkv, decay, strength] = [(dqkv, tensors[0]), (decay, tensors[1]), (strength, tensors[2])]
        .map(|(grad, like)| host::tensor(grad, like.dims(), &like.device()));
    (dqkv, Gates { decay, strength })
}
