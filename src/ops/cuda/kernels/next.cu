// The next tokens of texts, from what sublayers without attention keep of those before them: the last inputs of a convolution, and
// the states of linear attention and of state spaces, which are changed in place. No sum depends on what other texts are in the
// launch.
#include "eight.cuh"

enum { TAPS = 4, THREADS = 128, TEXTS = 64, COLUMNS = 32, RUN = 16 };

// Threads of a block, of which those of a column have some rows of the state each.
template <int KEYS> struct Block {
    enum { THREADS = KEYS > 128 ? 256 : 128, LANES = THREADS / COLUMNS };
};

struct Texts {
    struct {
        void *state;
        unsigned first_row, count;
    } of[TEXTS];
};

INLINE Eight product(const Eight &a, const Eight &b) {
    Eight product;
#pragma unroll
    for (int i = 0; i < 8; i++) product.of[i] = a.of[i] * b.of[i];
    return product;
}

// x: Half, [tokens, channels], or where it is gated b, c and x side by side, [tokens, 3 channels]; y: Half, [tokens, channels];
// weight: f32, [TAPS, channels], zeros for taps that are not there; bias: f32, [channels], or none. A state is Half, [taps - 1, width
// of x], contiguous. y = silu(u), or c u, with u the sum of the weights times the last inputs x, or b x, and the bias. Channels and
// strides are multiples of 8, pointers of 16 bytes. Grid: texts, channels / 1024 upwards.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convolve_next(const Half *x, const float *weight, const float *bias, Half *y, const __grid_constant__ Texts texts, int x_stride, int y_stride,
                  int channels, int taps, int is_gated) {
    const int channel = (blockIdx.y * THREADS + threadIdx.x) * 8, parts = is_gated ? 3 : 1, kept = taps - 1;
    if (channel >= channels) return;
    const auto &text = texts.of[blockIdx.x];
    Half *const state = (Half *)text.state + channel;
    const Half *const rows = x + (long long)text.first_row * x_stride + channel;
    const auto input = [&](const Half *row) {
        const Eight first(row);
        return is_gated ? product(first, Eight(row + 2 * channels)) : first;
    };
    Eight weights[TAPS], window[TAPS] = {};
#pragma unroll
    for (int j = 0; j < TAPS; j++) weights[j] = Eight(weight + (long long)j * channels + channel);
    const Eight added = bias ? Eight(bias + channel) : Eight{};
#pragma unroll
    for (int j = 1; j < TAPS; j++) {
        const int row = j - TAPS + kept;
        if (row >= 0) window[j] = input(state + (long long)row * parts * channels);
    }
#pragma unroll 1
    for (int token = 0; token < text.count; token++) {
        const Half *const row = rows + (long long)token * x_stride;
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++) window[j] = window[j + 1];
        window[TAPS - 1] = input(row);
        Eight u = added;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
#pragma unroll
            for (int i = 0; i < 8; i++) u.of[i] += weights[j].of[i] * window[j].of[i];
#pragma unroll
        for (int i = 0; i < 8; i++) u.of[i] = is_gated ? u.of[i] : u.of[i] / (1 + expf(-u.of[i]));
        if (is_gated) u = product(Eight(row + channels), u);
        u.store(y + (long long)(text.first_row + token) * y_stride + channel);
    }
    // In order, so that what is moved is still there.
    for (int row = 0; row < kept; row++) {
        const int token = row - kept + (int)text.count;
        const Half *const from = token < 0 ? state + (long long)(row + text.count) * parts * channels : rows + (long long)token * x_stride;
        for (int part = 0; part < parts; part++)
            *(uint4 *)(state + ((long long)row * parts + part) * channels) = *(const uint4 *)(from + part * channels);
    }
}

// Where queries, keys and values of the first head begin in a row, and how many heads share a query and a key.
struct Heads {
    int query, key, value, group, value_dim;
};

// Sums over the threads of a column.
template <int LANES> INLINE float over_lanes(float x) {
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

// As below, for keys of KEYS numbers: the threads of a column have its numbers in turn.
template <int KEYS>
INLINE void states_next(const Half *x, const float *decay, const float *strength, Half *o, const Texts &texts, const Heads heads, int x_stride,
                        int o_stride, int decay_stride, int strength_stride, int is_delta, float scale) {
    enum { THREADS = Block<KEYS>::THREADS, LANES = Block<KEYS>::LANES };
    __shared__ float queries[RUN][KEYS], keys[RUN][KEYS], values[RUN][COLUMNS], decays[RUN], strengths[RUN];
    const auto &text = texts.of[blockIdx.x];
    const int head = blockIdx.y, first_column = blockIdx.z * COLUMNS, column = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float *const state = (float *)text.state + (long long)head * KEYS * heads.value_dim + first_column + column;
    float held[KEYS / LANES];
#pragma unroll
    for (int i = 0; i < KEYS / LANES; i++) held[i] = state[(long long)(i * LANES + lane) * heads.value_dim];
    for (int first = 0; first < text.count; first += RUN) {
        const int count = min(RUN, (int)text.count - first);
        const long long row = text.first_row + first;
        __syncthreads();
        for (int i = threadIdx.x; i < count * KEYS; i += THREADS) {
            const Half *const of = x + (row + i / KEYS) * x_stride + head / heads.group * KEYS + i % KEYS;
            queries[i / KEYS][i % KEYS] = low_half(of[heads.query]);
            keys[i / KEYS][i % KEYS] = low_half(of[heads.key]);
        }
        for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS)
            values[i / COLUMNS][i % COLUMNS] =
                low_half(x[(row + i / COLUMNS) * x_stride + heads.value + head * heads.value_dim + first_column + i % COLUMNS]);
        if (threadIdx.x < count) {
            decays[threadIdx.x] = expf(decay[(row + threadIdx.x) * decay_stride + head]);
            strengths[threadIdx.x] = strength[(row + threadIdx.x) * strength_stride + head];
        }
        __syncthreads();
        if (is_delta)
            for (int i = threadIdx.x / WARP; i < 2 * count; i += THREADS / WARP) {
                float *const of = i < count ? queries[i] : keys[i - count];
                float sum = 0;
                for (int j = threadIdx.x % WARP; j < KEYS; j += WARP) sum += of[j] * of[j];
                for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
                const float factor = (i < count ? scale : 1) / sqrtf(sum + 1e-6f);
                for (int j = threadIdx.x % WARP; j < KEYS; j += WARP) of[j] *= factor;
            }
        __syncthreads();
#pragma unroll 1
        for (int token = 0; token < count; token++) {
            float known = 0, read = 0;
#pragma unroll
            for (int i = 0; i < KEYS / LANES; i++) {
                held[i] *= decays[token];
                known += held[i] * keys[token][i * LANES + lane];
            }
            known = is_delta ? over_lanes<LANES>(known) : 0;
            const float written = strengths[token] * (values[token][column] - known);
#pragma unroll
            for (int i = 0; i < KEYS / LANES; i++) {
                held[i] += keys[token][i * LANES + lane] * written;
                read += held[i] * queries[token][i * LANES + lane];
            }
            read = over_lanes<LANES>(read);
            if (lane == 0)
                o[(row + token) * o_stride + head * heads.value_dim + first_column + column] = (Half)half_pair(read, 0);
        }
    }
#pragma unroll
    for (int i = 0; i < KEYS / LANES; i++) state[(long long)(i * LANES + lane) * heads.value_dim] = held[i];
}

// x: Half, queries, keys and values of all heads in rows; decay and strength: f32, [tokens, heads]; o: Half, [tokens, heads *
// value_dim]. A state is f32, [heads, keys, value_dim]. A token makes S = exp(decay) S + strength k v^T, with the delta rule strength k (v
// - exp(decay) S^T k)^T of queries and keys that are divided by their norms, and reads o = S^T q; with the rule queries are multiplied by `scale`.
// Grid: texts, heads, value_dim / 32; block: 128, for keys of 256 twice as many.
#define STATES_NEXT(keys)                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(Block<keys>::THREADS, 1)                                                                                  \
        states_next_##keys(const Half *x, const float *decay, const float *strength, Half *o, const __grid_constant__ Texts texts, int query,    \
                      int key, int value, int group, int value_dim, int x_stride, int o_stride, int decay_stride, int strength_stride,           \
                      int is_delta, float scale) {                                                                                               \
        states_next<keys>(x, decay, strength, o, texts, {query, key, value, group, value_dim}, x_stride, o_stride, decay_stride,                \
                          strength_stride, is_delta, scale);                                                                                     \
    }
STATES_NEXT(64)
STATES_NEXT(128)
STATES_NEXT(256)
