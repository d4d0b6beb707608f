//! The next tokens of texts from the states of sublayers without attention, by the kernels of `next.cu`.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{rows, stride};
use super::short_conv::padded;
use super::stream::{Launch, Operand};
use crate::ops::custom::{Output, queue, spec};
use crate::ops::plain::delta_rule::DeltaInputs;
use crate::ops::plain::next::{Convolution, TextRows};
use crate::ops::plain::state_space::StateInputs;
use crate::util::stats::as_f64;

const MODULE: &str = "next";

const THREADS: usize = 128;
/// Texts of a launch, as their table was compiled.
const TEXTS: usize = 64;
/// Channels of a thread that convolves.
const CHANNELS: usize = 8;
/// Columns of a state that a block has.
const COLUMNS: usize = 32;
/// Rows of states for which there are kernels.
const KEYS: [usize; 3] = [64, 128, 256];

/// States that tokens change and read: `S = exp(decay) S + strength k v^T`, or by the delta rule; `o = S^T q`.
#[derive(Clone, Copy)]
pub(super) struct States<'a> {
    /// Queries, keys and values of all heads, `[tokens, width]`.
    x: &'a Tensor<2>,
    /// The logarithm of what states are multiplied by, `[tokens, heads]`, in `f32`, and what is multiplied by what is written.
    gates: [&'a Tensor<2>; 2],
    /// Where queries, keys and values begin in a row.
    starts: [usize; 3],
    /// Heads that share a query and a key.
    group: usize,
    /// Heads, and rows and columns of a state.
    sizes: [usize; 3],
    /// Of the delta rule, what queries are multiplied by after they are normed.
    scale: Option<f64>,
}

impl<'a> From<DeltaInputs<'a>> for States<'a> {
    fn from(DeltaInputs { qkv, gates, heads, .. }: DeltaInputs<'a>) -> Self {
        let keys = heads.key_head_dim;
        Self {
            x: qkv,
            gates: [&gates.decay, &gates.strength],
            starts: [0, heads.key_width(), 2 * heads.key_width()],
            group: heads.group(),
            sizes: [heads.num_value_heads, keys, heads.value_head_dim],
            scale: Some(as_f64(keys).powf(-0.5)),
        }
    }
}

impl<'a> From<StateInputs<'a>> for States<'a> {
    fn from(StateInputs { xbc, gates, heads, .. }: StateInputs<'a>) -> Self {
        let (inner, of_groups) = (heads.inner_width(), heads.num_groups * heads.state_dim);
        Self {
            x: xbc,
            gates: [&gates.decay, &gates.strength],
            starts: [inner + of_groups, inner, 0],
            group: heads.group(),
            sizes: [heads.num_heads, heads.state_dim, heads.head_dim],
            scale: None,
        }
    }
}

impl States<'_> {
    /// Whether there is a kernel for states of these sizes.
    pub(super) fn have_kernel(&self) -> bool {
        let [_, keys, columns] = self.sizes;
        KEYS.contains(&keys) && columns.is_multiple_of(COLUMNS)
    }
}

/// Where the new tokens of texts are: their first row, and how many.
fn spans(texts: &[TextRows]) -> Vec<[u64; 2]> {
    texts.iter().map(|text| [text.rows.start as u64, text.rows.len() as u64]).collect()
}

/// The launch with the table of texts of these states.
fn with_table(launch: Launch, states: &[CubeTensor], spans: &[[u64; 2]]) -> Launch {
    let entries = states.iter().zip(spans);
    let entries = entries.flat_map(|(state, [row, count])| [Operand::Change(state), Operand::Word(row | count << 32)]);
    launch.table(entries, 2 * TEXTS)
}

/// The result of `run`, which is `[tokens, width]` in the type of `x`, and the states, which it changes.
fn changed<const D: usize>(
    (name, x, width): (&'static str, &Tensor<2>, usize),
    others: impl IntoIterator<Item = DispatchTensor>,
    states: Vec<Tensor<D>>,
    run: impl Fn(&[CubeTensor], &CubeTensor, &[CubeTensor]) + Send + Sync + 'static,
) -> (Tensor<2>, Vec<Tensor<D>>) {
    let count = states.len();
    let inputs =
        states.into_iter().map(Tensor::into_dispatch).chain([x.clone().into_dispatch()]).chain(others).collect();
    let y = Output::New(spec(x.dtype(), [x.dims()[0], width]));
    let outputs = std::iter::once(y).chain((0..count).map(Output::Changed)).collect();
    let made = queue(name, inputs, outputs, move |inputs, outputs| {
        let (y, states) = outputs.split_first().unwrap_or_else(|| unreachable!("it has an output"));
        run(&inputs, y, states);
    });
    let mut made = made.into_iter();
    let y = made.next().map_or_else(|| x.clone(), Tensor::from_dispatch);
    (y, made.map(Tensor::from_dispatch).collect())
}

/// What a convolution makes of the tokens behind the last inputs of their texts, which become those of the tokens.
pub(super) fn convolve(
    conv: Convolution<'_>,
    last: Vec<Tensor<2>>,
    texts: &[TextRows],
    x: &Tensor<2>,
) -> (Tensor<2>, Vec<Tensor<2>>) {
    let ((weight, bias), is_gated) = match conv {
        Convolution::Short(weights) => (weights, false),
        Convolution::Gated(weight) => ((weight, None), true),
    };
    let ([taps, channels], spans, has_bias) = (weight.dims(), spans(texts), bias.is_some());
    let others = std::iter::once(padded(weight).into_dispatch()).chain(bias.map(|bias| bias.clone().into_dispatch()));
    changed(("convolve_next", x, channels), others, last, move |inputs, y, states| {
        let (x, weight) = (rows(inputs[0].clone()), into_contiguous(inputs[1].clone()));
        for (states, spans) in states.chunks(TEXTS).zip(spans.chunks(TEXTS)) {
            let blocks = channels.div_ceil(CHANNELS * THREADS);
            let conv = Launch::new(MODULE, "convolve_next", [states.len(), blocks, 1], THREADS).read(&x).read(&weight);
            let conv = if has_bias { conv.read(&inputs[2]) } else { conv.long(0) }.change(y);
            let conv = with_table(conv, states, spans).ints([stride(&x), stride(y), channels, taps]);
            conv.ints([usize::from(is_gated)]).launch();
        }
    })
}

/// What the tokens read of the states of their texts, which they change.
pub(super) fn states(of: States<'_>, memories: Vec<Tensor<3>>, texts: &[TextRows]) -> (Tensor<2>, Vec<Tensor<3>>) {
    let States { x, gates, starts, group, sizes: [heads, keys, columns], scale } = of;
    let (spans, gates) = (spans(texts), gates.map(|gate| gate.clone().into_dispatch()));
    changed(("states_next", x, heads * columns), gates, memories, move |inputs, y, states| {
        let (x, [decay, strength]) =
            (rows(inputs[0].clone()), [1, 2].map(|gate| into_contiguous(inputs[gate].clone())));
        for (states, spans) in states.chunks(TEXTS).zip(spans.chunks(TEXTS)) {
            let grid = [states.len(), heads, columns / COLUMNS];
            let next = Launch::new(
                MODULE,
                format!("states_next_{keys}"),
                grid,
                if keys > 128 { 2 * THREADS } else { THREADS },
            );
            let next = with_table(next.read(&x).read(&decay).read(&strength).change(y), states, spans);
            let next = next.ints(starts).ints([group, columns]).ints([&x, y, &decay, &strength].map(stride));
            next.ints([usize::from(scale.is_some())]).float(scale.unwrap_or(1.0)).launch();
        }
    })
}

/// Whether there is a kernel for rows of this width of a convolution with so many taps.
pub(super) fn has_convolution(conv: Convolution<'_>) -> bool {
    let (Convolution::Short((weight, _)) | Convolution::Gated(weight)) = conv;
    let [taps, channels] = weight.dims();
    taps <= super::short_conv::TAPS && channels.is_multiple_of(CHANNELS)
}
