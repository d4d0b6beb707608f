// RMSNorm (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467): y = weight x rstd, rstd = 1 / sqrt(mean(x^2) + eps).
//
// Tensors are Half but for rstd and the weight, f32. Row i is head i % heads of token i / heads: `stride` is from token to token,
// and heads lie side by side, `width` elements each; heads is 1 for the norm of whole tokens. Strides and widths are multiples of
// 8, pointers of 16 bytes. What is read a second time is still in L1. Grid: of *_wide rows, a block of 256 a row; of *_narrow
// (for width <= 512) rows / 8 upwards, a warp a row.
#include "eight.cuh"

enum { THREADS = 256 };

// The threads that have a row: a warp or, of IS_WIDE, the block.
template <bool IS_WIDE> struct Team {
    int row, first, step;

    INLINE Team()
        : row(IS_WIDE ? blockIdx.x : blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP),
          first((IS_WIDE ? threadIdx.x : threadIdx.x % WARP) * 8), step((IS_WIDE ? THREADS : WARP) * 8) {}

    // The sum over the team, in all of it; once in a kernel.
    INLINE float sum(float x) const {
        for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
        if (!IS_WIDE) return x;
        __shared__ float sums[THREADS / WARP];
        if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
        __syncthreads();
        x = sums[0];
        for (int i = 1; i < THREADS / WARP; i++) x += sums[i];
        return x;
    }
};

template <bool IS_WIDE>
INLINE void forward(const Half *x, const float *weight, Half *y, float *rstd, int x_stride, int y_stride, int rows, int width,
                    int heads, float eps) {
    const Team<IS_WIDE> team;
    if (team.row >= rows) return;
    x += (long long)(team.row / heads) * x_stride + team.row % heads * width;
    y += (long long)(team.row / heads) * y_stride + team.row % heads * width;
    float squares = 0;
#pragma unroll 2
    for (int i = team.first; i < width; i += team.step) {
        const Eight values(x + i);
#pragma unroll
        for (int j = 0; j < 8; j++) squares += values.of[j] * values.of[j];
    }
    const float factor = 1 / sqrtf(team.sum(squares) / width + eps);
    if (team.first == 0) rstd[team.row] = factor;
#pragma unroll 2
    for (int i = team.first; i < width; i += team.step) {
        Eight values(x + i);
        const Eight weights(weight + i);
#pragma unroll
        for (int j = 0; j < 8; j++) values.of[j] *= factor * weights.of[j];
        values.store(y + i);
    }
}

template <bool IS_WIDE>
INLINE void backward(const Half *dy, const Half *x, const float *weight, const float *rstd, const Half *residual, Half *dx,
                     Half *y, int dy_stride, int x_stride, int residual_stride, int dx_stride, int y_stride, int rows, int width,
                     int heads) {
    const Team<IS_WIDE> team;
    if (team.row >= rows) return;
    const long long token = team.row / heads;
    const int head = team.row % heads * width;
    dy += token * dy_stride + head, x += token * x_stride + head, dx += token * dx_stride + head;
    const float factor = rstd[team.row];
    float products = 0;
#pragma unroll 2
    for (int i = team.first; i < width; i += team.step) {
        const Eight gradient(dy + i), values(x + i), weights(weight + i);
#pragma unroll
        for (int j = 0; j < 8; j++) products += gradient.of[j] * weights.of[j] * values.of[j];
    }
    const float pull = team.sum(products) / width * factor * factor;
    for (int i = team.first; i < width; i += team.step) {
        const Eight values(x + i), weights(weight + i);
        Eight gradient(dy + i);
#pragma unroll
        for (int j = 0; j < 8; j++) gradient.of[j] = (gradient.of[j] * weights.of[j] - values.of[j] * pull) * factor;
        if (residual) {
            const Eight before(residual + token * residual_stride + head + i);
#pragma unroll
            for (int j = 0; j < 8; j++) gradient.of[j] += before.of[j];
        }
        gradient.store(dx + i);
        if (y) {
            Eight normed = values;
#pragma unroll
            for (int j = 0; j < 8; j++) normed.of[j] *= factor * weights.of[j];
            normed.store(y + token * y_stride + head + i);
        }
    }
}

// rms_norm_*: y and rstd, [rows]. rms_norm_backward_*: dx = residual + the gradient by x, rounded once, without `residual` where
// it is null; it may be dx, which may be dy. y, unless it is null, is made again, to the bits of the forward.
#define NORM(NAME, IS_WIDE)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                        \
        rms_norm_##NAME(const Half *x, const float *weight, Half *y, float *rstd, int x_stride, int y_stride, int rows,          \
                        int width, int heads, float eps) {                                                                       \
        forward<IS_WIDE>(x, weight, y, rstd, x_stride, y_stride, rows, width, heads, eps);                                       \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                        \
        rms_norm_backward_##NAME(const Half *dy, const Half *x, const float *weight, const float *rstd, const Half *residual,    \
                                 Half *dx, Half *y, int dy_stride, int x_stride, int residual_stride, int dx_stride,             \
                                 int y_stride, int rows, int width, int heads) {                                                 \
        backward<IS_WIDE>(dy, x, weight, rstd, residual, dx, y, dy_stride, x_stride, residual_stride, dx_stride, y_stride, rows, \
                          width, heads);                                                                                         \
    }

NORM(wide, true)
NORM(narrow, false)
