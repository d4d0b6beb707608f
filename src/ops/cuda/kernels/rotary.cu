// Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) in Hugging Face's half-split layout: dimension i
// turns with i + half, half = head_dim / 2. Backwards it is also the gradient. By itself in place, where fewer dimensions may turn
// and those that do may be neighbours, or with the norm of each head before it (RMSNorm, as in norm.cu) in one pass.
//
// Tensors are Half, [tokens, heads * head_dim], rows `*_stride` elements apart, a multiple of 8; pointers of 16 bytes, head_dim a
// multiple of 16. q and k side by side are one x; what follows them in a row is not touched. cos, sin: f32, [positions, half];
// positions: [tokens], rows of those. A thread has eight pairs. Block: 128.
#include "eight.cuh"

enum { THREADS = 128 };

// Eight pairs of a head.
struct Pairs {
    Eight low, high;

    Pairs() = default;
    template <class T> INLINE Pairs(const T *from, int half) : low(from), high(from + half) {}

    INLINE void turn(const Eight &cosines, const Eight &sines, bool inverse) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float a = low.of[j], b = high.of[j], sine = inverse ? -sines.of[j] : sines.of[j];
            low.of[j] = a * cosines.of[j] - b * sine, high.of[j] = b * cosines.of[j] + a * sine;
        }
    }

    // Of 16 numbers, one behind the other, those with even and with odd numbers; and back.
    INLINE Pairs taken_apart() const {
        Pairs apart;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const Eight &from = j < 4 ? low : high;
            apart.low.of[j] = from.of[j % 4 * 2], apart.high.of[j] = from.of[j % 4 * 2 + 1];
        }
        return apart;
    }

    INLINE Pairs put_together() const {
        Pairs together;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            Eight &to = j < 4 ? together.low : together.high;
            to.of[j % 4 * 2] = low.of[j], to.of[j % 4 * 2 + 1] = high.of[j];
        }
        return together;
    }

    INLINE void store(Half *to, int half) const { low.store(to), high.store(to + half); }
};

// The first 2 * half dimensions of a head turn, half a multiple of 8; with `neighbours`, 2 i with 2 i + 1. head_dim is a multiple
// of 8 here. Grid: (tokens, num_heads * half / 1024 upwards).
extern "C" __global__ void __launch_bounds__(THREADS)
    rotary(Half *x, const float *cos, const float *sin, const int *positions, int stride, int num_heads, int head_dim, int half,
           int neighbours, int inverse) {
    const int i = (blockIdx.y * THREADS + threadIdx.x) * 8, head = i / half, first = i % half;
    if (head >= num_heads) return;
    x += (long long)blockIdx.x * stride + head * head_dim + (neighbours ? 2 * first : first);
    const long long angle = (long long)positions[blockIdx.x] * half + first;
    const int apart = neighbours ? 8 : half;
    Pairs pairs(x, apart);
    if (neighbours) pairs = pairs.taken_apart();
    pairs.turn(Eight(cos + angle), Eight(sin + angle), inverse);
    if (neighbours) pairs = pairs.put_together();
    pairs.store(x, apart);
}

// Where a thread of those of a head is: a power of two of them, the last of which may have no pairs.
struct Place {
    int num_threads, row, first;

    INLINE explicit Place(int head_dim)
        : num_threads(1 << (32 - __clz(head_dim / 16 - 1))), row(blockIdx.x * (THREADS / num_threads) + threadIdx.x / num_threads),
          first(threadIdx.x % num_threads * 8) {}

    // The sum over the head, in all of its threads. All of the warp call it.
    INLINE float sum(float x) const {
        for (int distance = num_threads / 2; distance; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
        return x;
    }
};

// Of all heads, those of q before those of k. cos and sin as for rotary; weights: f32, [head_dim]. head_dim <= 256; num_kv_heads
// may be 0. The backward computes the norm's factor again, of which nothing is kept. Grid: tokens * heads * threads of a head / 128 upwards; a head has
// head_dim / 16 threads or, if that is none, the next power of two.
//
// y = rotary(weight x rstd), rounded once: what norm.cu and rotary round in between is not. y may be x.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_norm_rotary(const Half *x, const float *q_weight, const float *k_weight, const float *cos, const float *sin,
                     const int *positions, Half *y, int x_stride, int y_stride, int tokens, int num_q_heads,
                     int num_kv_heads, int head_dim, float eps) {
    const Place place(head_dim);
    const int num_heads = num_q_heads + num_kv_heads, half = head_dim / 2;
    const int token = place.row / num_heads, head = place.row % num_heads, column = head * head_dim + place.first;
    const bool is_there = token < tokens && place.first < half;
    Pairs values;
    float squares = 0;
    long long angle = 0;
    if (is_there) {
        angle = (long long)positions[token] * half + place.first;
        values = Pairs(x + (long long)token * x_stride + column, half);
#pragma unroll
        for (int j = 0; j < 8; j++) squares += values.low.of[j] * values.low.of[j] + values.high.of[j] * values.high.of[j];
    }
    const float factor = 1 / sqrtf(place.sum(squares) / head_dim + eps);
    if (!is_there) return;
    const Pairs weights((head < num_q_heads ? q_weight : k_weight) + place.first, half);
#pragma unroll
    for (int j = 0; j < 8; j++) values.low.of[j] *= factor * weights.low.of[j], values.high.of[j] *= factor * weights.high.of[j];
    values.turn(Eight(cos + angle), Eight(sin + angle), false);
    values.store(y + (long long)token * y_stride + column, half);
}

// dx: the gradient by x, rounded once, of dy by y; it may be dy. The weights are frozen.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_norm_rotary_backward(const Half *dy, const Half *x, const float *q_weight, const float *k_weight, const float *cos,
                              const float *sin, const int *positions, Half *dx, int dy_stride, int x_stride, int dx_stride,
                              int tokens, int num_q_heads, int num_kv_heads, int head_dim, float eps) {
    const Place place(head_dim);
    const int num_heads = num_q_heads + num_kv_heads, half = head_dim / 2;
    const int token = place.row / num_heads, head = place.row % num_heads, column = head * head_dim + place.first;
    const bool is_there = token < tokens && place.first < half;
    Pairs gradient, values;
    float products = 0, squares = 0;
    if (is_there) {
        gradient = Pairs(dy + (long long)token * dy_stride + column, half);
        values = Pairs(x + (long long)token * x_stride + column, half);
        const long long angle = (long long)positions[token] * half + place.first;
        gradient.turn(Eight(cos + angle), Eight(sin + angle), true);
        const Pairs weights((head < num_q_heads ? q_weight : k_weight) + place.first, half);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            gradient.low.of[j] *= weights.low.of[j], gradient.high.of[j] *= weights.high.of[j];
            products += gradient.low.of[j] * values.low.of[j] + gradient.high.of[j] * values.high.of[j];
            squares += values.low.of[j] * values.low.of[j] + values.high.of[j] * values.high.of[j];
        }
    }
    const float factor = 1 / sqrtf(place.sum(squares) / head_dim + eps);
    const float pull = place.sum(products) / head_dim * factor * factor;
    if (!is_there) return;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        gradient.low.of[j] = (gradient.low.of[j] - values.low.of[j] * pull) * factor;
        gradient.high.of[j] = (gradient.high.of[j] - values.high.of[j] * pull) * factor;
    }
    gradient.store(dx + (long long)token * dx_stride + column, half);
}
