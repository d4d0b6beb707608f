// The gate of a feed-forward layer (Shazeer, 2020, https://arxiv.org/abs/2002.05202): h = activation(gate) * up, where
// activation(x) = x sigmoid(x) or, for GELU by tanh, x sigmoid(sqrt(8 / pi) (x + 0.044715 x^3)).
//
// Tensors are Half, [tokens, width], rows `*_stride` elements apart: gate and up may be one beside the other. Strides and widths
// are multiples of 8, pointers of 16 bytes. A thread has eight columns. Grid: (tokens, width / 1024 upwards); block: 128.
#include "eight.cuh"

enum { THREADS = 128 };

INLINE float sigmoid(float x) { return 1 / (1 + exp2_approx(x * -1.44269504088896341f)); }

// What a gate's activation multiplies it with, and how that grows with it.
template <bool IS_GELU> INLINE void factor_of(float x, float &factor, float &slope) {
    const float scale = IS_GELU ? 1.5957691216057307f : 1, cube = IS_GELU ? 0.044715f : 0;
    factor = sigmoid(x * (1 + cube * x * x) * scale);
    slope = (1 + 3 * cube * x * x) * scale * factor * (1 - factor);
}

template <bool IS_GELU>
INLINE void forward(const Half *gate, const Half *up, Half *h, int gate_stride, int up_stride, int h_stride, int width) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * 8;
    const long long token = blockIdx.x;
    if (column >= width) return;
    Eight g(gate + token * gate_stride + column);
    const Eight u(up + token * up_stride + column);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float factor, slope;
        factor_of<IS_GELU>(g.of[i], factor, slope);
        g.of[i] *= factor * u.of[i];
    }
    g.store(h + token * h_stride + column);
}

template <bool IS_GELU>
INLINE void backward(const Half *dh, const Half *gate, const Half *up, Half *dgate, Half *dup, Half *h, int dh_stride,
                     int gate_stride, int up_stride, int dgate_stride, int dup_stride, int h_stride, int width) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * 8;
    const long long token = blockIdx.x;
    if (column >= width) return;
    const Eight d(dh + token * dh_stride + column);
    Eight g(gate + token * gate_stride + column), u(up + token * up_stride + column), product;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float x = g.of[i];
        float factor, slope;
        factor_of<IS_GELU>(x, factor, slope);
        product.of[i] = x * (factor * u.of[i]);
        g.of[i] = d.of[i] * u.of[i] * (factor + x * slope);
        u.of[i] = d.of[i] * x * factor;
    }
    g.store(dgate + token * dgate_stride + column), u.store(dup + token * dup_stride + column);
    if (h) product.store(h + token * h_stride + column);
}

// dgate and dup may be gate and up. h of the backward, unless it is null, is made again, to the bits of the forward; it may be dh.
#define GATE(NAME, IS_GELU)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                        \
        NAME(const Half *gate, const Half *up, Half *h, int gate_stride, int up_stride, int h_stride, int width) {               \
        forward<IS_GELU>(gate, up, h, gate_stride, up_stride, h_stride, width);                                                  \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                        \
        NAME##_backward(const Half *dh, const Half *gate, const Half *up, Half *dgate, Half *dup, Half *h, int dh_stride,        \
                        int gate_stride, int up_stride, int dgate_stride, int dup_stride, int h_stride, int width) {             \
        backward<IS_GELU>(dh, gate, up, dgate, dup, h, dh_stride, gate_stride, up_stride, dgate_stride, dup_stride, h_stride,    \
                          width);                                                                                                \
    }

GATE(swiglu, false)
GATE(geglu, true)
