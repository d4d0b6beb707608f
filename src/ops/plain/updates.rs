//! `AdamW` and the norm of all gradients in plain tensor calls.

use burn::tensor::{DType, Device, Int, Tensor};

use crate::ops::cpu::{BLOCK_LEN, Nearest, dynamic_table};

pub use crate::ops::cpu::AdamW as Update;

/// A parameter with its moments.
#[derive(Clone, Debug)]
pub struct AdamState {
    /// The parameter.
    pub parameter: Tensor<2>,
    /// First moment.
    pub m: Tensor<2>,
    /// Second moment.
    pub v: Tensor<2>,
}

pub(crate) fn plain_adamw(state: AdamState, grad: &Tensor<2>, update: &Update) -> AdamState {
    let [beta1, beta2] = update.betas;
    #[expect(clippy::cast_precision_loss, reason = "exact below 2^53 steps")]
    let [correction1, correction2] = update.betas.map(|beta| 1.0 - beta.powf(update.step as f64));
    let grad = grad.clone() * update.grad_scale;
    let m = state.m * beta1 + grad.clone() * (1.0 - beta1);
    let v = state.v * beta2 + grad.square() * (1.0 - beta2);
    let denominator = v.clone().sqrt() / correction2.sqrt() + update.eps;
    let decayed = state.parameter * (1.0 - update.learning_rate * update.weight_decay);
    let parameter = decayed - m.clone() / denominator * (update.learning_rate / correction1);
    AdamState { parameter, m, v }
}

/// A parameter with its moments in codes.
#[derive(Clone, Debug)]
pub struct Coded {
    /// The parameter.
    pub parameter: Tensor<2>,
    /// A byte for each number of the first and of the second moment.
    pub codes: [Tensor<1, Int>; 2],
    /// The scales of their blocks, `[1, blocks]`.
    pub scales: [Tensor<2>; 2],
}

pub(crate) fn plain_adamw_8bit(state: Coded, grad: &Tensor<2>, update: &Update) -> Coded {
    let (shape, device) = (grad.dims(), grad.device());
    let size: usize = shape.iter().product();
    let tables = [true, false].map(dynamic_table);
    let numbers = |values: &[f32]| Tensor::<1>::from_data(values, (&device, DType::F32));
    let [m, v] = std::array::from_fn(|moment| {
        let numbers = numbers(&tables[moment]).select(0, state.codes[moment].clone().cast(DType::I32));
        let scales = state.scales[moment].clone().transpose();
        (in_blocks(numbers, &device) * scales).reshape([-1]).narrow(0, 0, size).reshape(shape)
    });
    let AdamState { parameter, m, v } = plain_adamw(AdamState { parameter: state.parameter, m, v }, grad, update);
    let coded = [(m, &tables[0]), (v, &tables[1])].map(|(moment, table)| {
        let blocks = in_blocks(moment.reshape([-1]), &device);
        let most = blocks.clone().abs().max_dim(1);
        let scales = most.clone().mask_fill(most.equal_elem(0.0), 1.0);
        let scaled = (blocks / scales.clone()).reshape([-1]).narrow(0, 0, size);
        (nearest(&scaled, &numbers(&Nearest::new(table).middles)), scales.transpose())
    });
    let [(m, m_scales), (v, v_scales)] = coded;
    Coded { parameter, codes: [m, v], scales: [m_scales, v_scales] }
}

/// `[blocks, BLOCK_LEN]`, filled up with zeros.
fn in_blocks(numbers: Tensor<1>, device: &Device) -> Tensor<2> {
    let rest = numbers.dims()[0].next_multiple_of(BLOCK_LEN) - numbers.dims()[0];
    let whole = match rest {
        0 => numbers,
        _ => Tensor::cat(vec![numbers, Tensor::zeros([rest], (device, DType::F32))], 0),
    };
    whole.reshape([-1, i64::try_from(BLOCK_LEN).unwrap_or(-1)])
}

/// The number of middles below each number, halving what is left to search.
fn nearest(numbers: &Tensor<1>, middles: &Tensor<1>) -> Tensor<1, Int> {
    let mut code = Tensor::<1, Int>::zeros(numbers.dims(), (&numbers.device(), DType::I32));
    for step in [128, 64, 32, 16, 8, 4, 2, 1] {
        let is_above = middles.clone().select(0, code.clone() + (step - 1)).lower(numbers.clone());
        code = code + is_above.int().cast(DType::I32) * step;
    }
    code.cast(DType::U8)
}

/// Sum of the squares of the gradients of all blocks, `[1]`; there is at least one.
pub(crate) fn plain_sum_of_squares(blocks: &[Vec<&Tensor<2>>]) -> Tensor<1> {
    // Sums of sums: fusion makes one kernel of many additions, or of a `cat`, with as many inputs.
    let of_block = |grads: &Vec<&Tensor<2>>| {
        grads.iter().map(|&grad| grad.clone().square().sum()).reduce(|sum, squares| sum + squares)
    };
    let sum = blocks.iter().filter_map(of_block).reduce(|sum, squares| sum + squares);
    sum.unwrap_or_else(|| unreachable!("there is a gradient"))
}
