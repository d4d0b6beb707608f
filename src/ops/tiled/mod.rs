//! Attention by kernels of our own on the GPU backends: no scores in memory, grouped heads without copies, documents of
//! packed rows and windows without masks.
//!
//! They are not the default yet. Their numbers are held by `tests/cubecl.rs`, on the processor, where there are no
//! tensor cores; with tensor cores they have not run. `LORA_TRAIN_ATTENTION=tiled` takes them, which
//! `scripts/gpu_check.sh` does to compare the two.

mod backend;
mod kernels;
mod tile;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use super::attention::{Attended, Heads};
use super::layout::Layout;
use backend::{Launch, TiledAttention, tiles_for};

/// Names the attention of GPU backends: `tiled`, or `tiled-anywhere` also without tensor cores, for tests.
pub const ATTENTION_VARIABLE: &str = "LORA_TRAIN_ATTENTION";

/// How far tokens look and are looked at within their documents, `[tokens]` each.
#[derive(Clone, Debug)]
pub struct Spans {
    /// The first key of every query.
    first_key: Tensor<1, Int>,
    /// The last query of every key.
    last_query: Tensor<1, Int>,
}

/// Whether these kernels are asked for.
#[must_use]
pub fn is_wanted() -> bool {
    matches!(wish().as_deref(), Some("tiled" | "tiled-anywhere"))
}

fn wish() -> Option<String> {
    std::env::var(ATTENTION_VARIABLE).ok()
}

impl Spans {
    /// Of `num_tokens` tokens with `documents` (start, length); a token outside all of them sees itself.
    #[must_use]
    pub fn new(num_tokens: usize, documents: &[(usize, usize)], device: &burn::tensor::Device) -> Self {
        let own = |index: usize| i32::try_from(index).unwrap_or(i32::MAX);
        let mut first_key: Vec<i32> = (0..num_tokens).map(own).collect();
        let mut last_query = first_key.clone();
        for &(start, len) in documents.iter().filter(|(_, len)| *len > 0) {
            first_key[start..start + len].fill(own(start));
            last_query[start..start + len].fill(own(start + len - 1));
        }
        let tensor = |values: Vec<i32>| Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32));
        Self { first_key: tensor(first_key), last_query: tensor(last_query) }
    }
}

fn launch(q: &Tensor<2>, heads: Heads) -> Option<Launch> {
    let primitive = q.clone().try_into_primitive::<burn::backend::Cube>().ok()?;
    let anywhere = wish().as_deref() == Some("tiled-anywhere");
    let tiles = tiles_for(primitive.client.device(), q.dtype(), heads, anywhere)?;
    Some(Launch { tiles, window: heads.window, scale: heads.scale() as f32 })
}

/// [`attention`](super::attention::attention), where the device has what these kernels need.
#[must_use]
pub fn attention(q: &Tensor<2>, k: &Tensor<2>, v: &Tensor<2>, layout: &Layout, heads: Heads) -> Option<Attended> {
    let spans = layout.spans()?;
    let launch = launch(q, heads)?;
    let [q, k, v] = [q, k, v].map(|x| x.clone().into_dispatch());
    let (o, lse) = Dispatch::tiled_attention(q, k, v, spans.first_key.clone().into_dispatch(), launch);
    Some(Attended { o: Tensor::from_dispatch(o), lse: Tensor::from_dispatch(lse) })
}

/// [`attention_backward`](super::attention::attention_backward) of what [`attention`] has made.
#[must_use]
pub fn attention_backward(
    d_o: &Tensor<2>,
    [q, k, v]: [&Tensor<2>; 3],
    attended: &Attended,
    layout: &Layout,
    heads: Heads,
) -> Option<[Tensor<2>; 3]> {
    let spans = layout.spans()?;
    let launch = launch(q, heads)?;
    let [tokens, _] = q.dims();
    let product = d_o.clone().cast(DType::F32) * attended.o.clone().cast(DType::F32);
    let delta: Tensor<1> =
        product.reshape([tokens, heads.num_heads, heads.head_dim]).sum_dim(2).reshape([tokens * heads.num_heads]);
    let [q, k, v, d_o] = [q, k, v, d_o].map(|x| x.clone().into_dispatch());
    let (dq, dk, dv) = Dispatch::tiled_attention_backward(
        q,
        k,
        v,
        d_o,
        attended.lse.clone().into_dispatch(),
        delta.into_dispatch(),
        spans.first_key.clone().into_dispatch(),
        spans.last_query.clone().into_dispatch(),
        launch,
    );
    Some([dq, dk, dv].map(Tensor::from_dispatch))
}
