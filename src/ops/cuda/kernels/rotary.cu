// Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) in place, in Hugging Face's half-split layout:
// dimension i turns with i + head_dim / 2. Backwards (`inverse`) it is also the gradient.
//
// x: bf16, [tokens, num_heads * head_dim], rows `stride` elements apart, a multiple of 8; pointer of 16 bytes, head_dim a
// multiple of 16. q and k side by side are one x. cos, sin: f32, [positions, head_dim / 2]; positions: [tokens], rows of those.
#include "eight.cuh"

enum { THREADS = 128 };

// A thread turns eight pairs. Grid: (tokens, num_heads * head_dim / 2048 upwards); block: 128.
extern "C" __global__ void __launch_bounds__(THREADS)
    rotary(bf16 *x, const float *cos, const float *sin, const int *positions, int stride, int num_heads, int head_dim,
           int inverse) {
    const int half = head_dim / 2, i = (blockIdx.y * THREADS + threadIdx.x) * 8, head = i / half, first = i % half;
    if (head >= num_heads) return;
    x += (long long)blockIdx.x * stride + head * head_dim + first;
    const long long angle = (long long)positions[blockIdx.x] * half + first;
    Eight low(x), high(x + half);
    const Eight cosines(cos + angle), sines(sin + angle);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float a = low.of[j], b = high.of[j], sine = inverse ? -sines.of[j] : sines.of[j];
        low.of[j] = a * cosines.of[j] - b * sine, high.of[j] = b * cosines.of[j] + a * sine;
    }
    low.store(x), high.store(x + half);
}
