//! The CPU: the kernels of [`cpu`], on tensors in host memory.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use half::bf16;

mod adamw_8bit;
mod delta_rule;
mod host_weight;

use host_weight::HostWeight;

use super::cpu::{self, Dropout};
use super::host;
use super::kernels::{Attention, Linears, Losses, Norms, Place, Properties, Recurrent, Updates};
use super::layout::{Layout, Stretch};
use super::low_rank::{Lora, LowRank};
use super::plain::attention::{Attended, AttentionInputs, LseOrder};
use super::plain::cached_attention::CachedKeyValues;
use super::plain::cross_entropy::{HeadGrads, LossInputs, most_cpu_targets};
use super::plain::delta_rule::chunks::CHUNK_TOKENS;
use super::plain::delta_rule::{DeltaInputs, Gates};
use super::plain::linear::{Applied, InputGrad, Layer, LayerGrads, LayerOutput, rank};
use super::plain::norms::Normed;
use super::plain::routing::ExpertRows;
use super::plain::short_conv::ConvWeights;
use super::plain::updates::{AdamState, Coded, Update};
use crate::device::{Dtype, has_bf16_products};
use crate::spec::{Activation, DeltaHeads, Heads};
use crate::util::cancel;

/// The kernels of the CPU: activations are `f32` in host memory, and autodiff does not track them.
#[derive(Debug)]
pub(super) struct Cpu {
    /// Whether attention rounds its operands, as products with frozen weights do that [round](Weight::rounds).
    pub(super) rounds: bool,
    /// Whether tokens are of as many [texts](Weight::of_texts).
    pub(super) of_texts: bool,
}

impl Properties for Cpu {
    fn with_rounding(&self, rounds: bool) -> Option<Place> {
        Some(if rounds { &Self { rounds: true, of_texts: false } } else { &Self { rounds: false, of_texts: false } })
    }

    fn of_texts(&self) -> Option<Place> {
        Some(if self.rounds { &Self { rounds: true, of_texts: true } } else { &Self { rounds: false, of_texts: true } })
    }

    fn is_host(&self) -> bool {
        true
    }

    fn pads_rows(&self) -> bool {
        false
    }

    fn takes_blocks(&self) -> bool {
        true
    }

    fn activation_dtype(&self, compute: Dtype) -> Dtype {
        if compute == Dtype::Bf16 { Dtype::F32 } else { compute }
    }

    fn rounded_bytes(&self, numbers: usize, compute: Dtype) -> usize {
        if compute == Dtype::Bf16 && has_bf16_products() { numbers * size_of::<bf16>() } else { 0 }
    }

    fn copies_operands(&self) -> bool {
        false
    }

    fn attention_backward_numbers(&self, heads: Heads, _: Dtype) -> usize {
        // The kernels keep each head's gradients of keys and values, and partial sums of the queries' gradients.
        6 * heads.query_width() + 2 * heads.key_value_width()
    }

    fn score_bytes(&self, _: [usize; 2], _: Heads, _: Dtype) -> usize {
        0
    }

    fn bytes_per_logit(&self, _: Dtype) -> usize {
        size_of::<f32>()
    }

    fn most_targets(&self, head: [usize; 2]) -> usize {
        most_cpu_targets(head)
    }

    fn target_multiple(&self) -> usize {
        1
    }

    fn delta_rule_numbers(&self, heads: DeltaHeads, _: Dtype) -> [usize; 2] {
        // The states before all chunks and what each writes, of the heads that are computed at a time.
        let of_head = heads.state_len() / CHUNK_TOKENS + heads.value_head_dim;
        [0, heads.num_key_heads.min(rayon::current_num_threads()) * of_head]
    }
}

impl Linears for Cpu {
    fn linear(&self, x: &Tensor<2>, layer: Layer<'_>, residual: Option<Tensor<2>>) -> LayerOutput {
        let Layer { weight, lora } = layer;
        let ([tokens, in_features], [out_features, _], device) = (x.dims(), weight.dims(), x.device());
        let (x, w) = (host::view(x), HostWeight::new(weight));
        let w = w.get().of_texts(self.of_texts);
        let accumulate = residual.is_some() || weight.bias.is_some();
        let sum = residual.unwrap_or_else(|| zeros([tokens, out_features], &device));
        let mut xa = None;
        let y = host::update(sum, |y| {
            if let Some(bias) = &weight.bias {
                let bias = host::view(bias);
                for row in y.chunks_exact_mut(out_features) {
                    row.iter_mut().zip(&*bias).for_each(|(y, bias)| *y += bias);
                }
            }
            match lora {
                None => cpu::linear(&x, w, in_features, out_features, y, accumulate),
                Some(lora) => {
                    let mut values = vec![0.0; tokens * rank(lora)];
                    with_slices(lora, |lora| {
                        cpu::lora_linear(&x, w, lora, in_features, out_features, y, accumulate, &mut values);
                    });
                    xa = Some(host::tensor(values, [tokens, rank(lora)], &device));
                }
            }
        });
        (y, xa)
    }

    fn linear_backward(&self, dy: &Tensor<2>, x: &Tensor<2>, layer: Applied<'_>, input_grad: InputGrad) -> LayerGrads {
        let (Layer { weight, lora }, xa) = layer;
        let ([tokens, in_features], [out_features, _], device) = (x.dims(), weight.dims(), x.device());
        let (dy, x, w) = (host::view(dy), host::view(x), HostWeight::new(weight));
        let (sum, accumulate) = match input_grad {
            InputGrad::Skip => (None, false),
            InputGrad::Fresh => (Some(zeros([tokens, in_features], &device)), false),
            InputGrad::AddTo(sum) => (Some(sum), true),
        };
        let mut grads = None;
        let mut run = |dx: Option<&mut [f32]>| match lora.zip(xa) {
            None => {
                if let Some(dx) = dx {
                    cpu::linear_backward_input(&dy, w.get(), in_features, out_features, dx, accumulate);
                }
            }
            Some((lora, xa)) => {
                let r = rank(lora);
                let mut values = LowRank { a: vec![0.0; r * in_features], b: vec![0.0; out_features * r] };
                let LowRank { a, b } = &mut values;
                let (xa, sums) = (host::view(xa), LowRank { a: a.as_mut_slice(), b: b.as_mut_slice() });
                with_slices(lora, |lora| {
                    let widths = [in_features, out_features];
                    cpu::lora_linear_backward(&dy, &x, &xa, w.get(), lora, widths, dx, accumulate, sums);
                });
                let shapes = LowRank { a: [r, in_features], b: [out_features, r] };
                grads = Some(values.zip(shapes).map(|(values, shape)| host::tensor(values, shape, &device)));
            }
        };
        let dx = match sum {
            None => {
                run(None);
                None
            }
            Some(sum) => Some(host::update(sum, |dx| run(Some(dx)))),
        };
        (dx, grads)
    }

    fn add_low_rank(&self, y: Tensor<2>, x: &Tensor<2>, layer: Layer<'_>, rows: Range<usize>) -> Tensor<2> {
        let Layer { weight, lora: Some(lora) } = layer else { return y };
        let ([out_features, in_features], x) = (weight.dims(), host::view(x));
        let x = &x[rows.start * in_features..rows.end * in_features];
        let like = cpu::Weight::f32(&[]).rounding(weight.rounds).of_texts(self.of_texts);
        host::update(y, |y| {
            let y = &mut y[rows.start * out_features..rows.end * out_features];
            with_slices(lora, |lora| cpu::add_low_rank(x, lora, like, in_features, out_features, y));
        })
    }

    fn dropout(&self, x: &Tensor<2>, settings: Dropout) -> Tensor<2> {
        let mut out = vec![0.0; x.shape().num_elements()];
        cpu::dropout(&host::view(x), x.dims()[1], settings, &mut out);
        host::tensor(out, x.dims(), &x.device())
    }

    fn gated(&self, activation: Activation, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
        let mut h = vec![0.0; gate.shape().num_elements()];
        cpu::gated(activation, &host::view(gate), &host::view(up), &mut h);
        host::tensor(h, gate.dims(), &gate.device())
    }

    fn gated_backward(&self, activation: Activation, dh: &Tensor<2>, [gate, up]: [&Tensor<2>; 2]) -> [Tensor<2>; 2] {
        let len = gate.shape().num_elements();
        let (mut dgate, mut dup) = (vec![0.0; len], vec![0.0; len]);
        cpu::gated_backward(activation, &host::view(dh), &host::view(gate), &host::view(up), &mut dgate, &mut dup);
        [(dgate, gate), (dup, up)].map(|(grad, like)| host::tensor(grad, like.dims(), &like.device()))
    }

    fn gather(&self, x: &Tensor<2>, rows: &ExpertRows, weighted: bool) -> Tensor<2> {
        let (values, width, weights) = (host::view(x), x.dims()[1], weighted.then(|| host::view(&rows.weights)));
        let mut found = Vec::with_capacity(rows.tokens().count() * width);
        for (row, token) in rows.tokens().enumerate() {
            let (from, weight) =
                (&values[token * width..][..width], weights.as_ref().map_or(1.0, |weights| weights[row]));
            found.extend(from.iter().map(|number| weight * number));
        }
        let shape = [found.len() / width, width];
        host::tensor(found, shape, &x.device())
    }

    fn scatter_add(&self, y: Tensor<2>, rows: &ExpertRows, update: &Tensor<2>, weighted: bool) -> Tensor<2> {
        let (update, width) = (host::view(update), y.dims()[1]);
        let weights = weighted.then(|| host::view(&rows.weights));
        host::update(y, |y| {
            for (row, (token, from)) in rows.tokens().zip(update.chunks_exact(width)).enumerate() {
                let weight = weights.as_ref().map_or(1.0, |weights| weights[row]);
                let to = &mut y[token * width..][..width];
                to.iter_mut().zip(from).for_each(|(to, from)| *to += weight * from);
            }
        })
    }
}

impl Norms for Cpu {
    fn rms_norm(&self, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        let [tokens, width] = x.dims();
        let (mut y, mut rstd) = (vec![0.0; tokens * width], vec![0.0; tokens]);
        cpu::rms_norm(&host::view(x), &host::view(weight), eps, &mut y, &mut rstd);
        (host::tensor(y, [tokens, width], &x.device()), host::tensor(rstd, [tokens], &x.device()))
    }

    fn rms_norm_backward(&self, dy: &Tensor<2>, normed: Normed<'_>, residual: Tensor<2>) -> Tensor<2> {
        let Normed { x, weight, rstd } = normed;
        let (dy, x, weight, rstd) = (host::view(dy), host::view(x), host::view(weight), host::view(rstd));
        host::update(residual, |dx| cpu::rms_norm_backward(&dy, &x, &weight, &rstd, dx, true))
    }

    fn rotate(&self, qk: [Tensor<2>; 2], layout: &Layout, rope: usize, heads: Heads, inverse: bool) -> [Tensor<2>; 2] {
        let (head_dim, table) = (heads.head_dim, layout.table(rope));
        qk.map(|x| {
            let num_heads = x.dims()[1] / head_dim;
            let shape = cpu::RopeShape { num_heads, head_dim, half: table.half(), pairs: table.pairs() };
            host::update(x, |x| cpu::rope(x, table.values(), layout.positions(), shape, inverse))
        })
    }
}

impl Attention for Cpu {
    fn attention(&self, inputs: AttentionInputs<'_>) -> Attended {
        let AttentionInputs { qkv: [q, k, v], layout, heads } = inputs;
        let [tokens, width] = q.dims();
        let (mut o, mut lse) = (vec![0.0; tokens * width], vec![0.0; tokens * heads.num_heads]);
        let (host_q, k, v) = (host::view(q), host::view(k), host::view(v));
        cpu::attention(&host_q, &k, &v, layout.stretches(), &heads, self.rounds, &mut o, &mut lse);
        let (lse_shape, device) = ([lse.len()], q.device());
        Attended {
            o: host::tensor(o, [tokens, width], &device),
            lse: host::tensor(lse, lse_shape, &device),
            order: LseOrder::ByHead,
        }
    }

    fn attention_backward(&self, d_o: &Tensor<2>, attended: &Attended, inputs: AttentionInputs<'_>) -> [Tensor<2>; 3] {
        let AttentionInputs { qkv, layout, heads } = inputs;
        let views = qkv.map(host::view);
        let (d_o, o, lse) = (host::view(d_o), host::view(&attended.o), host::view(&attended.lse));
        let mut grads = views.each_ref().map(|x| vec![0.0; x.len()]);
        let grads_mut = grads.each_mut().map(Vec::as_mut_slice);
        let views = views.each_ref().map(|x| &**x);
        cpu::attention_backward(&d_o, views, &o, &lse, layout.stretches(), &heads, self.rounds, grads_mut);
        let [dq, dk, dv] = grads;
        let [q, k, v] = qkv;
        [(q, dq), (k, dk), (v, dv)].map(|(x, dx)| host::tensor(dx, x.dims(), &x.device()))
    }

    fn attention_both_ways(&self, qkv: [&Tensor<2>; 3], groups: &[[usize; 2]], heads: Heads) -> Tensor<2> {
        let ([q, k, v], shape) = (qkv.map(host::view), qkv[0].dims());
        let lengths = groups.iter().flat_map(|[count, length]| std::iter::repeat_n(*length, *count));
        let stretches = lengths.scan(0, |end, length| {
            *end += length;
            Some(Stretch::both_ways(*end - length, length))
        });
        let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; shape[0] * heads.num_heads]);
        cpu::attention(&q, &k, &v, &stretches.collect::<Vec<_>>(), &heads, self.rounds, &mut o, &mut lse);
        host::tensor(o, shape, &qkv[0].device())
    }

    fn gate_output(&self, o: &Tensor<2>, gate: &Tensor<2>) -> Tensor<2> {
        let mut y = vec![0.0; o.shape().num_elements()];
        cpu::gate_output(&host::view(o), &host::view(gate), &mut y);
        host::tensor(y, o.dims(), &o.device())
    }

    fn gate_output_backward(&self, dy: Tensor<2>, o: &Tensor<2>, gate: Tensor<2>) -> [Tensor<2>; 2] {
        let o = host::view(o);
        host::update_all([dy, gate], |[d_o, d_gate]| cpu::gate_output_backward(&o, d_o, d_gate))
    }

    fn cache(&self, _: Heads, _: &Device, _: DType) -> CachedKeyValues {
        CachedKeyValues::default()
    }
}

impl Recurrent for Cpu {
    fn short_conv(&self, x: &Tensor<2>, (weight, bias): ConvWeights<'_>, layout: &Layout) -> Tensor<2> {
        let (values, [_, channels], bias) = (host::view(x), x.dims(), bias.map(host::view));
        let mut y = vec![0.0; values.len()];
        let weights = (&*host::view(weight), bias.as_deref());
        cpu::short_conv(&values, weights, channels, layout.documents(), &mut y);
        host::tensor(y, x.dims(), &x.device())
    }

    fn short_conv_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        (weight, bias): ConvWeights<'_>,
        layout: &Layout,
    ) -> Tensor<2> {
        let ([dy, values, weight], [_, channels]) = ([dy, x, weight].map(host::view), x.dims());
        let (mut dx, bias) = (vec![0.0; values.len()], bias.map(host::view));
        let weights = (&*weight, bias.as_deref());
        cpu::short_conv_backward(&dy, &values, weights, channels, layout.documents(), &mut dx);
        host::tensor(dx, x.dims(), &x.device())
    }

    fn gated_conv(&self, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        let ([tokens, _], [_, channels]) = (bcx.dims(), weight.dims());
        let mut y = vec![0.0; tokens * channels];
        cpu::gated_conv(&host::view(bcx), &host::view(weight), channels, layout.documents(), &mut y);
        host::tensor(y, [tokens, channels], &bcx.device())
    }

    fn gated_conv_backward(&self, dy: &Tensor<2>, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        let ([dy, values, host_weight], [_, channels]) = ([dy, bcx, weight].map(host::view), weight.dims());
        let mut d_bcx = vec![0.0; values.len()];
        cpu::gated_conv_backward(&dy, &values, &host_weight, channels, layout.documents(), &mut d_bcx);
        host::tensor(d_bcx, bcx.dims(), &bcx.device())
    }

    fn delta_rule(&self, inputs: DeltaInputs<'_>, state: Option<Tensor<3>>) -> (Tensor<2>, Option<Tensor<3>>) {
        delta_rule::forward(inputs, state)
    }

    fn delta_rule_backward(&self, d_o: &Tensor<2>, inputs: DeltaInputs<'_>) -> (Tensor<2>, Gates<Tensor<2>>) {
        delta_rule::backward(d_o, inputs)
    }
}

impl Losses for Cpu {
    fn linear_cross_entropy(&self, inputs: LossInputs<'_>) -> (Tensor<1>, Option<HeadGrads>) {
        let LossInputs { hidden, head, targets, scale, chunk_len } = inputs;
        let (values, weight, width) = (host::view(hidden), HostWeight::new(head.weight), hidden.dims()[1]);
        let rows_weight = head.rows.map(|rows| HostWeight::new(&rows.weight));
        let own = head.rows.zip(rows_weight.as_ref()).map(|(rows, weight)| (&*rows.ids, weight.get()));
        let num_own = own.map_or(0, |(ids, _)| ids.len());
        let (inputs, bias) = (head.inputs.map(host::view), head.weight.bias.as_ref().map(host::view));
        let head = cpu::Head { weight: weight.get(), bias: bias.as_deref(), rows: own, soft_cap: head.soft_cap };
        let mut losses = vec![0.0; targets.len()];
        let of_grads = |width: usize| vec![0.0; if scale.is_some() { targets.len() * width } else { 0 }];
        let (mut dhidden, mut drows) = (of_grads(width), of_grads(num_own));
        let mut dweight = inputs.as_ref().map(|_| vec![0.0; weight.get().num_elements()]);
        for (index, targets) in targets.chunks(chunk_len).enumerate() {
            cancel::check();
            let start = index * chunk_len;
            let (rows, range) = (start..start + targets.len(), start * width..(start + targets.len()) * width);
            #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
            let gradient = scale.map(|scale| cpu::HeadGradient {
                dhidden: &mut dhidden[range.clone()],
                drows: &mut drows[rows.start * num_own..rows.end * num_own],
                weight: inputs.as_ref().zip(dweight.as_mut()).map(|(inputs, sum)| (&inputs[range.clone()], &mut **sum)),
                scale: scale as f32,
            });
            cpu::linear_cross_entropy(&values[range], head, width, targets, &mut losses[rows], gradient);
        }
        let losses = host::tensor(losses, [targets.len()], &hidden.device());
        let device = hidden.device();
        let grads = scale.map(|_| {
            let drows = (num_own > 0).then(|| host::tensor(drows, [targets.len(), num_own], &device));
            let dweight = dweight.map(|sum| {
                let shape = [sum.len() / width, width];
                host::tensor(sum, shape, &device)
            });
            HeadGrads { dhidden: host::tensor(dhidden, hidden.dims(), &device), drows, dweight }
        });
        (losses, grads)
    }
}

impl Updates for Cpu {
    fn adamw(&self, states: Vec<(AdamState, &Tensor<2>)>, update: &Update, _: Option<&Tensor<1>>) -> Vec<AdamState> {
        let one = |(AdamState { parameter, m, v }, grad): (AdamState, &Tensor<2>)| {
            let grad = host::view(grad);
            let step = |[parameter, m, v]: [&mut [f32]; 3]| cpu::adamw(parameter, &grad, m, v, update);
            let [parameter, m, v] = host::update_all([parameter, m, v], step);
            AdamState { parameter, m, v }
        };
        states.into_iter().map(one).collect()
    }

    fn adamw_8bit(&self, state: Coded, grad: &Tensor<2>, update: &Update, _: Option<&Tensor<1>>) -> Coded {
        adamw_8bit::update(state, grad, update)
    }

    fn sum_of_squares(&self, blocks: &[Vec<&Tensor<2>>]) -> Tensor<1> {
        #[expect(clippy::cast_possible_truncation, reason = "summed in f64, read as f32")]
        let sum = blocks.iter().flatten().map(|grad| cpu::sum_of_squares(&host::view(grad))).sum::<f64>() as f32;
        host::tensor(vec![sum], [1], &Device::flex())
    }
}

/// Runs a kernel on the elements of A and B.
fn with_slices<R>(lora: Lora<&Tensor<2>>, run: impl FnOnce(Lora<&[f32]>) -> R) -> R {
    let views = lora.matrices.map(host::view);
    run(Lora { matrices: views.as_ref().map(|view| &**view), scale: lora.scale, dropout: lora.dropout })
}

fn zeros(shape: [usize; 2], device: &Device) -> Tensor<2> {
    host::tensor(vec![0.0; shape[0] * shape[1]], shape, device)
}
