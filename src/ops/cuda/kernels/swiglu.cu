// The gate of Llama's feed-forward layer (Shazeer, 2020, https://arxiv.org/abs/2002.05202): h = silu(gate) * up.
//
// Tensors are bf16, [tokens, width], rows `*_stride` elements apart: gate and up may be one beside the other. Strides and widths
// are multiples of 8, pointers of 16 bytes. A thread has eight columns. Grid: (tokens, width / 1024 upwards); block: 128.
#include "eight.cuh"

enum { THREADS = 128 };

INLINE float sigmoid(float x) { return 1 / (1 + exp2_approx(x * -1.44269504088896341f)); }

extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu(const bf16 *gate, const bf16 *up, bf16 *h, int gate_stride, int up_stride, int h_stride, int width) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * 8;
    const long long token = blockIdx.x;
    if (column >= width) return;
    Eight g(gate + token * gate_stride + column);
    const Eight u(up + token * up_stride + column);
#pragma unroll
    for (int i = 0; i < 8; i++) g.of[i] *= sigmoid(g.of[i]) * u.of[i];
    g.store(h + token * h_stride + column);
}

// dgate and dup may be gate and up. h, unless it is null, is made again, to the bits of the forward; it may be dh.
extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu_backward(const bf16 *dh, const bf16 *gate, const bf16 *up, bf16 *dgate, bf16 *dup, bf16 *h, int dh_stride,
                    int gate_stride, int up_stride, int dgate_stride, int dup_stride, int h_stride, int width) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * 8;
    const long long token = blockIdx.x;
    if (column >= width) return;
    const Eight d(dh + token * dh_stride + column);
    Eight g(gate + token * gate_stride + column), u(up + token * up_stride + column), product;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float x = g.of[i], s = sigmoid(x);
        product.of[i] = x * (s * u.of[i]);
        g.of[i] = d.of[i] * u.of[i] * (s + x * s * (1 - s));
        u.of[i] = d.of[i] * x * s;
    }
    g.store(dgate + token * dgate_stride + column), u.store(dup + token * dup_stride + column);
    if (h) product.store(h + token * h_stride + column);
}
