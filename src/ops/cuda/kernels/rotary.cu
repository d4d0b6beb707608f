// Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) in place, in Hugging Face's half-split layout: dimension i
// turns with i + head_dim / 2. Backwards (`inverse`) it is also the gradient.
//
// x: bf16, [tokens, num_heads * head_dim], rows `stride` elements apart, a multiple of 8; pointer of 16 bytes, head_dim a multiple of 16. q and
// k side by side are one x. cos, sin: f32, [positions, head_dim / 2]; positions: [tokens], rows of those.
#include "common.cuh"

enum { THREADS = 128 };

// A thread turns eight pairs. Grid: (num_heads * head_dim / 2048 upwards, tokens); block: 128.
extern "C" __global__ void __launch_bounds__(THREADS)
    rotary(bf16 *x, const float *cos, const float *sin, const int *positions, int stride, int num_heads, int head_dim, int inverse) {
    const int half = head_dim / 2, i = (blockIdx.x * THREADS + threadIdx.x) * 8, head = i / half, first = i % half;
    if (head >= num_heads) return;
    uint4 *low = (uint4 *)(x + (long long)blockIdx.y * stride + head * head_dim + first), *high = (uint4 *)((bf16 *)low + half);
    const long long angle = (long long)positions[blockIdx.y] * half + first;
    const float4 *c = (const float4 *)(cos + angle), *s = (const float4 *)(sin + angle);
    const uint4 x_low = *low, x_high = *high;
    unsigned a[4] = {x_low.x, x_low.y, x_low.z, x_low.w}, b[4] = {x_high.x, x_high.y, x_high.z, x_high.w};
    const float sign = inverse ? -1 : 1;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 cosines = ((const float2 *)c)[j];
        float2 sines = ((const float2 *)s)[j];
        sines.x *= sign, sines.y *= sign;
        const float a0 = low_bf16(a[j]), a1 = high_bf16(a[j]), b0 = low_bf16(b[j]), b1 = high_bf16(b[j]);
        a[j] = bf16_pair(a0 * cosines.x - b0 * sines.x, a1 * cosines.y - b1 * sines.y);
        b[j] = bf16_pair(b0 * cosines.x + a0 * sines.x, b1 * cosines.y + a1 * sines.y);
    }
    *low = make_uint4(a[0], a[1], a[2], a[3]), *high = make_uint4(b[0], b[1], b[2], b[3]);
}
