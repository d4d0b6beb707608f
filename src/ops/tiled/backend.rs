//! The kernels as operations of burn: launched by the `CubeCL` backends, kept in order by burn's fusion.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::prelude::*;
use half::{bf16, f16};

use super::kernels;
use super::tile::Tiles;

/// What the launches need to know besides their tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub(super) tiles: Tiles,
    pub(super) window: Option<usize>,
    pub(super) scale: f32,
}

fn forward_specs(
    q: &TensorSpec,
    _: &TensorSpec,
    _: &TensorSpec,
    _: &TensorSpec,
    launch: &Launch,
) -> (TensorSpec, TensorSpec) {
    (q.clone(), TensorSpec::new(Shape::new([q.shape[0] * launch.tiles.num_heads]), DType::F32))
}

/// Tiled attention.
#[backend_extension(Cube, Fusion)]
pub(super) trait TiledAttention: Backend {
    /// Output, and log-sum-exps `[tokens * num_heads]`.
    #[fusion(meta = forward_specs)]
    fn tiled_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        first_key: IntTensor<Self>,
        launch: Launch,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Gradients of queries, keys and values.
    #[fusion(meta = |q, k, v, _d_o, _lse, _delta, _first_key, _last_query, _launch| (q.clone(), k.clone(), v.clone()))]
    fn tiled_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        d_o: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        first_key: IntTensor<Self>,
        last_query: IntTensor<Self>,
        launch: Launch,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl TiledAttention for CubeBackend {
    fn tiled_attention(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        first_key: CubeTensor,
        launch: Launch,
    ) -> (CubeTensor, CubeTensor) {
        let [q, k, v, first_key] = [q, k, v, first_key].map(into_contiguous);
        let Launch { tiles, scale, .. } = launch;
        let tokens = q.meta.shape()[0];
        let (o, lse) = (empty_like(&q), empty(&q, Shape::new([tokens * tiles.num_heads]), DType::F32));
        let (client, dtype) = (q.client.clone(), q.dtype);
        let [q, k, v, first_key] = [q, k, v, first_key].map(CubeTensor::into_buffer_arg);
        let outputs = [&o, &lse].map(|tensor| tensor.clone().into_buffer_arg());
        let [to_o, to_lse] = outputs;
        let (count, dim) = (launch.cubes(tokens, tiles.num_heads), launch.cube_dim());
        let window = launch.window.unwrap_or(tokens);
        macro_rules! start {
            ($float:ty) => {
                kernels::forward::launch_unchecked::<$float>(
                    &client, count, dim, q, k, v, first_key, to_o, to_lse, tokens, window, scale, tiles,
                )
            };
        }
        // SAFETY: the kernel reads and writes at tokens below `tokens` only, and in shared memory within its tiles.
        unsafe {
            match dtype {
                DType::BF16 => start!(bf16),
                DType::F16 => start!(f16),
                _ => start!(f32),
            }
        }
        (o, lse)
    }

    fn tiled_attention_backward(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        d_o: CubeTensor,
        lse: CubeTensor,
        delta: CubeTensor,
        first_key: CubeTensor,
        last_query: CubeTensor,
        launch: Launch,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let inputs = [q, k, v, d_o, lse, delta, first_key, last_query].map(into_contiguous);
        let [q, k, v, ..] = &inputs;
        let Launch { tiles, scale, .. } = launch;
        let tokens = q.meta.shape()[0];
        let (dq, dk, dv) = (empty_like(q), empty_like(k), empty_like(v));
        let (client, dtype) = (q.client.clone(), q.dtype);
        let arg = |index: usize| inputs[index].clone().into_buffer_arg();
        let [to_dq, to_dk, to_dv] = [&dq, &dk, &dv].map(|tensor| tensor.clone().into_buffer_arg());
        let (by_query, by_key) = (launch.cubes(tokens, tiles.num_heads), launch.cubes(tokens, tiles.num_kv_heads));
        let dim = launch.cube_dim();
        let window = launch.window.unwrap_or(tokens);
        macro_rules! start {
            ($float:ty) => {{
                kernels::backward_queries::launch_unchecked::<$float>(
                    &client,
                    by_query,
                    dim,
                    arg(0),
                    arg(1),
                    arg(2),
                    arg(3),
                    arg(4),
                    arg(5),
                    arg(6),
                    to_dq,
                    tokens,
                    window,
                    scale,
                    tiles,
                );
                kernels::backward_keys::launch_unchecked::<$float>(
                    &client,
                    by_key,
                    dim,
                    arg(0),
                    arg(1),
                    arg(2),
                    arg(3),
                    arg(4),
                    arg(5),
                    arg(6),
                    arg(7),
                    to_dk,
                    to_dv,
                    tokens,
                    window,
                    scale,
                    tiles,
                );
            }};
        }
        // SAFETY: as in the forward.
        unsafe {
            match dtype {
                DType::BF16 => start!(bf16),
                DType::F16 => start!(f16),
                _ => start!(f32),
            }
        }
        (dq, dk, dv)
    }
}

impl Launch {
    fn cubes(&self, tokens: usize, num_heads: usize) -> CubeCount {
        let side = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        CubeCount::Static(side(tokens.div_ceil(self.tiles.side)), side(num_heads), 1)
    }

    fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(u32::try_from(self.tiles.units).unwrap_or(u32::MAX))
    }
}

fn empty(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

fn empty_like(tensor: &CubeTensor) -> CubeTensor {
    empty(tensor, tensor.meta.shape().clone(), tensor.dtype)
}

/// Tiles that a device runs: with tensor cores where it has them in the right shape and enough shared memory; else, if
/// `without_tensor_cores`, small ones that any device runs, slowly.
pub(super) fn tiles_for(
    device: &CubeDevice,
    dtype: DType,
    heads: crate::ops::attention::Heads,
    without_tensor_cores: bool,
) -> Option<Tiles> {
    use cubecl::ir::{ElemType, FloatKind};

    let client = device.client();
    let hardware = &client.properties().hardware;
    let tiles = Tiles {
        num_heads: heads.num_heads,
        num_kv_heads: heads.num_kv_heads,
        head_dim: heads.head_dim,
        side: 64,
        units: 128,
        lanes: 2,
        cmma: true,
    };
    let kind = match dtype {
        DType::BF16 => Some(FloatKind::BF16),
        DType::F16 => Some(FloatKind::F16),
        _ => None,
    };
    let fits = kind.is_some_and(|kind| {
        let (narrow, wide) = (ElemType::Float(kind), ElemType::Float(FloatKind::F32));
        client.features().matmul.cmma.iter().any(|shape| {
            shape.a_type == narrow
                && shape.b_type == narrow
                && shape.cd_type == wide
                && [shape.m, shape.n, shape.k] == [16; 3]
        })
    });
    let one_plane_size = hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
    if fits
        && one_plane_size
        && tiles.shared_bytes(2) <= hardware.max_shared_memory_size
        && heads.head_dim.is_multiple_of(16)
    {
        return Some(tiles);
    }
    let units = (hardware.max_units_per_cube as usize).min(16);
    let small = Tiles { side: 16, units, lanes: 1, cmma: false, ..tiles };
    (without_tensor_cores && small.shared_bytes(dtype.size()) <= hardware.max_shared_memory_size).then_some(small)
}
