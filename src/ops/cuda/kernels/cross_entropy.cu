// Cross-entropy of rows of logits, Half, [rows, vocab_size], rows `stride` elements apart, any number of them: losses[row] = lse
// - logits[row][target], in f32, and over the logits the gradient weight (softmax - onehot).
//
// Two passes of a block over its row: of 128256 logits 256 KB, so those of a GPU's blocks about fill its L2. The second pass goes
// backwards, from what was read last.
#include "eight.cuh"

enum { THREADS = 1024 };
#define LOG2_E 1.44269504088896341f

// The logits from 16 bytes to 16 bytes; the first and the last chunk may be in part of other rows.
struct Row {
    Half *logits;
    int size, before;

    INLINE Row(Half *logits, int size) : logits(logits), size(size), before((long long)logits / 2 % 8) {}
    INLINE int num_chunks() const { return (before + size + 7) / 8; }
    INLINE bool is_whole(int first) const { return first >= 0 && first + 8 <= size; }
    INLINE bool has(int i) const { return i >= 0 && i < size; }

    // The chunk's logits, of which `first` is the first; -infinity for what is not of the row.
    INLINE Eight read(int first) const {
        if (is_whole(first)) return Eight(logits + first);
        Eight x;
#pragma unroll
        for (int i = 0; i < 8; i++) x.of[i] = has(first + i) ? low_half(logits[first + i]) : -INFINITY;
        return x;
    }

    INLINE void write(int first, const Eight &x) const {
        if (is_whole(first)) return x.store(logits + first);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (has(first + i)) logits[first + i] = (Half)half_pair(x.of[i], 0);
    }
};

// Less is exact where it matters, near the largest; nothing is larger than -infinity.
INLINE float exp_less(float x, float largest) { return largest == -INFINITY ? 0 : exp2_approx((x - largest) * LOG2_E); }

// In all threads; once for each `combine`, which has its own shared memory.
template <class Combine> INLINE float over_block(float x, Combine combine) {
    __shared__ float of_warps[THREADS / WARP];
    for (int distance = 16; distance; distance /= 2) x = combine(x, __shfl_xor_sync(~0u, x, distance));
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = x;
    __syncthreads();
    x = of_warps[threadIdx.x % WARP];
    for (int distance = 16; distance; distance /= 2) x = combine(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

// The gradient is that of the losses times `scale`; without `has_grad` the logits stay. Grid: rows; block: 1024.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy(Half *logits, const int *targets, float *losses, long long stride, int vocab_size, float scale,
                  int has_grad) {
    const Row row(logits + blockIdx.x * stride, vocab_size);
    const int num_chunks = row.num_chunks(), target = targets[blockIdx.x];
    const float of_target = low_half(row.logits[target]);
    float largest = -INFINITY, sum = 0;
#pragma unroll 2
    for (int chunk = threadIdx.x; chunk < num_chunks; chunk += THREADS) {
        const Eight x = row.read(chunk * 8 - row.before);
        float next = largest;
#pragma unroll
        for (int i = 0; i < 8; i++) next = fmaxf(next, x.of[i]);
        sum *= exp_less(largest, next);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += exp_less(x.of[i], next);
        largest = next;
    }
    const float of_all = over_block(largest, [](float x, float y) { return fmaxf(x, y); });
    sum = over_block(sum * exp_less(largest, of_all), [](float x, float y) { return x + y; });
    if (threadIdx.x == 0) losses[blockIdx.x] = of_all - of_target + logf(sum);
    if (!has_grad) return;

    const float factor = scale / sum;
#pragma unroll 2
    for (int chunk = num_chunks - 1 - (int)threadIdx.x; chunk >= 0; chunk -= THREADS) {
        const int first = chunk * 8 - row.before;
        Eight x = row.read(first);
#pragma unroll
        for (int i = 0; i < 8; i++) x.of[i] = exp_less(x.of[i], of_all) * factor - (first + i == target ? scale : 0);
        row.write(first, x);
    }
}
