//! RMSNorm by the kernels of `norm.cu`.

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{dims, rows, stride};
use super::stream::Launch;
use crate::ops::custom::{Output, change, custom, spec};
use crate::ops::plain::norms::Normed;

const MODULE: &str = "norm";

const THREADS: usize = 256;
/// Up to this width a warp has a row, beyond a block.
const NARROW: usize = 512;

fn kernel(name: &str, x: &CubeTensor) -> Launch {
    let [tokens, width] = dims(x);
    let (kind, blocks) = if width <= NARROW { ("narrow", tokens.div_ceil(THREADS / 32)) } else { ("wide", tokens) };
    Launch::new(MODULE, format!("{name}_{kind}"), [blocks, 1, 1], THREADS)
}

/// [`rms_norm`](crate::ops::norm::rms_norm) of 16 bits.
pub(super) fn forward(x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
    let [tokens, width] = x.dims();
    let outputs = [spec(x.dtype(), [tokens, width]), spec(DType::F32, [tokens])];
    let inputs = [x.clone().into_dispatch(), weight.clone().into_dispatch()];
    let [y, rstd] = custom("rms_norm", inputs, outputs, move |[x, weight], [y, rstd]| {
        let x = rows(x);
        let norm = kernel("rms_norm", &x).read(&x).read(&weight).write(y).write(rstd);
        norm.ints([stride(&x), stride(y), tokens, width, 1]).float(eps).launch();
    });
    (Tensor::from_dispatch(y), Tensor::from_dispatch(rstd))
}

/// [`rms_norm_backward`](crate::ops::norm::rms_norm_backward) of 16 bits.
pub(super) fn backward(dy: &Tensor<2>, normed: Normed<'_>, residual: Tensor<2>) -> Tensor<2> {
    let Normed { x, weight, rstd } = normed;
    let [tokens, width] = x.dims();
    let [dy, x] = [dy, x].map(|x| x.clone().into_dispatch());
    let inputs = [dy, x, weight.clone().into_dispatch(), rstd.clone().into_dispatch()];
    let run = move |[dx]: &[CubeTensor; 1], [dy, x, weight, rstd]: [CubeTensor; 4]| {
        let (dy, x) = (rows(dy), rows(x));
        let norm = [&dy, &x, &weight, &rstd, dx].into_iter().fold(kernel("rms_norm_backward", &x), Launch::read);
        let norm = norm.change(dx).long(0);
        norm.ints([stride(&dy), stride(&x), stride(dx), stride(dx), 0, tokens, width, 1]).launch();
    };
    let [dx] = change("rms_norm_backward", Output::Changed, [residual.into_dispatch()], inputs, run);
    Tensor::from_dispatch(dx)
}
