//! Causal self-attention with grouped queries, without the matrix of all scores in either direction.
//!
//! The forward keeps the log-sum-exp of each row of scores; from it the backward recomputes the probabilities (Dao et
//! al., 2022). Keys and values are never expanded to the number of query heads.

use burn::tensor::Tensor;

use super::layout::Layout;
use super::place::Place;
use super::profile::{self, Cost};
use super::{cpu, host};

pub mod plain;

pub use self::plain::{CHUNK_BYTES, plain_attention, plain_attention_backward};
pub use super::cpu::Heads;

/// Output of attention, and what its backward needs.
#[derive(Clone, Debug)]
pub struct Attended {
    /// `[tokens, num_heads * head_dim]`.
    pub o: Tensor<2>,
    /// Log-sum-exp of every row of scores, in `f32`, `[num_heads * tokens]`; the order is the implementation's.
    pub lse: Tensor<1>,
}

/// `softmax(scale q k^T + mask) v` for every head; a token sees itself and the tokens before it in its document.
///
/// # Shapes
/// `q`: `[tokens, num_heads * head_dim]`, `k`, `v`: `[tokens, num_kv_heads * head_dim]`.
#[must_use]
pub fn attention(q: &Tensor<2>, k: &Tensor<2>, v: &Tensor<2>, layout: &Layout, heads: Heads) -> Attended {
    let work = || match layout.place() {
        Place::Plain(_) => plain_attention(q, k, v, layout, heads),
        Place::Cpu => {
            let [tokens, width] = q.dims();
            let (mut o, mut lse) = (vec![0.0; tokens * width], vec![0.0; tokens * heads.num_heads]);
            let (host_q, k, v) = (host::view(q), host::view(k), host::view(v));
            cpu::attention(&host_q, &k, &v, layout.documents(), &heads, &mut o, &mut lse);
            let (lse_shape, device) = ([lse.len()], q.device());
            Attended { o: host::tensor(o, [tokens, width], &device), lse: host::tensor(lse, lse_shape, &device) }
        }
    };
    profile::measure("attention", || cost([q, k, v], layout, heads, 2), work)
}

/// Cost of `products` products for every visible pair of a query and a key, for each query head.
fn cost(operands: [&Tensor<2>; 3], layout: &Layout, heads: Heads, products: usize) -> Cost {
    let window = |len: usize| heads.window.map_or(len, |window| window.min(len));
    let pairs = |len: usize| window(len) * (window(len) + 1) / 2 + (len - window(len)) * window(len);
    let all_pairs: usize = layout.documents().iter().map(|(_, len)| pairs(*len)).sum();
    let output = profile::bytes(operands[0]);
    Cost {
        shape: format!("{} heads of {}", heads.num_heads, heads.head_dim),
        flops: profile::count(2 * products * all_pairs * heads.num_heads * heads.head_dim),
        bytes: operands.iter().map(|x| profile::bytes(x)).sum::<f64>() + output,
    }
}

/// The gradients of [`attention`] with respect to `q`, `k` and `v`.
///
/// # Shapes
/// `d_o`: `[tokens, num_heads * head_dim]`; the rest as in the forward.
#[must_use]
pub fn attention_backward(
    d_o: &Tensor<2>,
    operands: [&Tensor<2>; 3],
    attended: &Attended,
    layout: &Layout,
    heads: Heads,
) -> [Tensor<2>; 3] {
    let once = || cost(operands, layout, heads, 4);
    let cost = || Cost { bytes: 2.0 * once().bytes, ..once() };
    let work = || match layout.place() {
        Place::Plain(_) => plain_attention_backward(d_o, operands, attended, layout, heads),
        Place::Cpu => {
            let views = operands.map(host::view);
            let (d_o, o, lse) = (host::view(d_o), host::view(&attended.o), host::view(&attended.lse));
            let mut grads = views.each_ref().map(|x| vec![0.0; x.len()]);
            let grads_mut = grads.each_mut().map(Vec::as_mut_slice);
            cpu::attention_backward(
                &d_o,
                views.each_ref().map(|x| &**x),
                &o,
                &lse,
                layout.documents(),
                &heads,
                grads_mut,
            );
            let [dq, dk, dv] = grads;
            let [q, k, v] = operands;
            [(q, dq), (k, dk), (v, dv)].map(|(x, dx)| host::tensor(dx, x.dims(), &x.device()))
        }
    };
    profile::measure("attention_backward", cost, work)
}
