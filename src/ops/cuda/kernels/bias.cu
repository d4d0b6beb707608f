// Adds the biases of projections whose outputs lie side by side, in place.
//
// y: Half, [tokens, width0 + width1 + width2], rows `stride` elements apart; bias0 ..: f32, of those widths, which are 0 for
// projections that are not there. Strides and widths are multiples of 8, pointers of 16 bytes. A thread has eight columns. Grid:
// (tokens, all widths / 1024 upwards); block: 128.
#include "eight.cuh"

enum { THREADS = 128 };

extern "C" __global__ void __launch_bounds__(THREADS)
    add_bias(Half *y, const float *bias0, const float *bias1, const float *bias2, int stride, int width0, int width1, int width2) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * 8;
    if (column >= width0 + width1 + width2) return;
    const float *from = column < width0            ? bias0 + column
                        : column < width0 + width1 ? bias1 + (column - width0)
                                                   : bias2 + (column - width0 - width1);
    y += (long long)blockIdx.x * stride + column;
    Eight sum(y);
    const Eight bias(from);
#pragma unroll
    for (int i = 0; i < 8; i++) sum.of[i] += bias.of[i];
    sum.store(y);
}
