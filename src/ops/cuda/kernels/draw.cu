// The next token of each text by its logits, f32, [rows, vocab_size], rows `stride` elements apart: the draw of ops/cpu/draw.rs, to the
// bit. What decides is multiplied, added and divided with every result rounded, or summed in integers.
#include "dropout.cuh"

enum { THREADS = 1024, TEXTS = 64 };

struct Draws {
    struct {
        unsigned long long keys;
        // Of the logits; 0: the most likely token is taken.
        float factor;
        // 0: all.
        unsigned top_k;
        double top_p;
        float least_weight;
        unsigned nothing;
    } of[TEXTS];
};

INLINE float add(float x, float y) { return __fadd_rn(x, y); }
INLINE float times(float x, float y) { return __fmul_rn(x, y); }

// e^x for x from -60 to 0.
INLINE float exp_of(float x) {
    const float of[] = {1, 0.49999994f, 0.16666432f, 0.041668f, 0.0083741555f, 0.0013843653f}, round = 12582912;
    const float rounded = add(times(x, 1.44269504f), round), n = add(rounded, -round);
    const float r = add(add(x, -times(n, 0.6933594f)), -times(n, -2.1219444e-4f));
    float sum = of[5];
#pragma unroll
    for (int i = 4; i >= 0; i--) sum = add(times(sum, r), of[i]);
    return times(add(times(sum, r), 1), __uint_as_float((__float_as_uint(rounded) << 23) + (127u << 23)));
}

INLINE float weight_of(float logit, float max, float factor) {
    const float log = times(add(logit, -max), factor);
    return exp_of(log > -60 ? log : -60);
}

// The time that a token of weight 1 waits: -ln(1 - v) for v = (hash + 0.5) / 2^32.
INLINE float time_of(unsigned hash) {
    const float step = 2.3283064365386963e-10f;
    const unsigned three_quarters = 0x3f400000;
    const unsigned bits = __float_as_uint(times(add(__uint2float_rn(~hash), 0.5f), step)) - three_quarters;
    const int e = (int)bits >> 23;
    const float above_one = add(__uint_as_float((bits & 0x7fffff) + three_quarters), -1);
    const float z = e == 0 ? times(add(__uint2float_rn(hash), 0.5f), -step) : above_one;
    const float s = __fdiv_rn(z, add(z, 2)), q = times(s, s);
    float series = add(times(q, 1.0f / 9), 1.0f / 7);
    series = add(times(series, q), 0.2f);
    series = times(add(times(series, q), 1.0f / 3), q);
    return add(-times(__int2float_rn(e), 0.69314718f), -times(add(s, times(s, series)), 2));
}

// In the order of floats, 0 and -0 being one.
INLINE unsigned key_of(float x) {
    const unsigned bits = __float_as_uint(add(x, 0));
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

INLINE float of_key(unsigned key) { return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); }

// In all threads.
template <class T, class Combine> INLINE T over_block(T x, Combine combine) {
    __shared__ T of_warps[THREADS / WARP];
    for (int distance = 16; distance; distance /= 2) x = combine(x, __shfl_xor_sync(~0u, x, distance));
    __syncthreads();
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = x;
    __syncthreads();
    x = of_warps[threadIdx.x % WARP];
    for (int distance = 16; distance; distance /= 2) x = combine(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

struct Row {
    const float *logits;
    int size;

    template <class Each> INLINE void each(Each take) const {
        for (int i = threadIdx.x; i < size; i += THREADS) take(i, logits[i]);
    }

    // The largest logit, of those that are not less than `least`, from which on the weights reach `limit`. Two bits of its key at a
    // time.
    template <class Weight> INLINE float from_which(unsigned long long limit, float least, Weight weight) const {
        unsigned key = 0;
        for (int shift = 30; shift >= 0; shift -= 2) {
            unsigned long long sums[3] = {0, 0, 0};
            each([&](int, float x) {
                if (!(x >= least)) return;
                const unsigned above = key_of(x);
                const unsigned long long of = above >= (key | 1u << shift) ? weight(x) : 0;
#pragma unroll
                for (unsigned i = 0; i < 3; i++) sums[i] += above >= (key | (i + 1) << shift) ? of : 0;
            });
            unsigned digit = 0;
#pragma unroll
            for (unsigned i = 0; i < 3; i++) {
                const auto sum = over_block(sums[i], [](unsigned long long x, unsigned long long y) { return x + y; });
                if (sum >= limit) digit = i + 1;
            }
            key |= digit << shift;
        }
        return of_key(key);
    }
};

// drawn: [rows, 2], the token, or ~0 where the logits are not finite numbers, and the bits of the entropy. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    draw(const float *logits, unsigned *drawn, const __grid_constant__ Draws draws, long long stride, int first_row, int vocab_size) {
    const int at = first_row + blockIdx.x;
    const Row row{logits + at * stride, vocab_size};
    const auto &draw = draws.of[blockIdx.x];
    const auto largest = [](unsigned long long x, unsigned long long y) { return x > y ? x : y; };
    unsigned long long most = 0;
    bool is_nan = false;
    row.each([&](int i, float x) {
        is_nan |= x != x;
        // The first of equal ones.
        most = largest(most, (unsigned long long)key_of(x) << 32 | ~(unsigned)i);
    });
    most = over_block(most, largest);
    const float max = of_key(most >> 32);
    if (__syncthreads_or(is_nan) || !(fabsf(max) < INFINITY)) {
        if (threadIdx.x == 0) drawn[2 * at] = ~0u;
        return;
    }
    if (draw.factor == 0) {
        if (threadIdx.x == 0) drawn[2 * at] = ~(unsigned)most;
        return;
    }

    float sum = 0, weighted = 0;
    row.each([&](int, float x) {
        const float log = fmaxf((x - max) * draw.factor, -60), weight = exp_of(log);
        sum += weight;
        weighted += weight * log;
    });
    const auto plus = [](float x, float y) { return x + y; };
    sum = over_block(sum, plus);
    weighted = over_block(weighted, plus);

    float least = -INFINITY;
    if (draw.top_k) least = row.from_which(draw.top_k, least, [](float) { return 1ull; });
    if (draw.top_p < 1) {
        const auto fixed = [&](float x) { return __float2ull_rz(times(weight_of(x, max, draw.factor), 1099511627776.0f)); };
        unsigned long long total = 0;
        row.each([&](int, float x) { total += x >= least ? fixed(x) : 0; });
        total = over_block(total, [](unsigned long long x, unsigned long long y) { return x + y; });
        least = row.from_which(__double2ull_ru(__dmul_rn(__ull2double_rn(total), draw.top_p)), least, fixed);
    }

    unsigned long long first = ~0ull;
    row.each([&](int i, float x) {
        const float weight = weight_of(x, max, draw.factor);
        if (!(x >= least && weight >= draw.least_weight)) return;
        const float waits = __fdiv_rn(time_of(hash_of(draw.keys, i)), weight);
        const auto candidate = (unsigned long long)__float_as_uint(waits) << 32 | (unsigned)i;
        first = candidate < first ? candidate : first;
    });
    first = over_block(first, [](unsigned long long x, unsigned long long y) { return x < y ? x : y; });
    if (threadIdx.x == 0) {
        drawn[2 * at] = (unsigned)first;
        drawn[2 * at + 1] = __float_as_uint(logf(sum) - weighted / sum);
    }
}
