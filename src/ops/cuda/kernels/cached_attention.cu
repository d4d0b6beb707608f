// Attention of the new tokens of texts on the keys and values that caches keep, in three launches: `append_to_caches` writes those of
// the new tokens, `attend_to_chunks` computes the attention on each chunk of 256 keys, and `join_chunks` sums it over these in their
// order (Dao et al., 2023, Flash-Decoding). No sum depends on what other texts are in the launch.
//
// q, k, v: Half, a row a token, those of a text one behind the other; strides and head_dim, at most 256, are multiples of 8, pointers
// of 16 bytes. Caches: Half, [num_kv_heads, capacity, head_dim]. A token sees the keys up to its own position, of a window
// only the last so many (0: all). Of a launch the rows are those from first_row on.
#include "eight.cuh"

enum { THREADS = 128, CHUNK = 256, QUERIES = 8, WIDTH = 256, TEXTS = 64 };
#define LOG2_E 1.4426950408889634f

struct Texts {
    struct {
        Half *keys, *values;
        unsigned capacity, first_row;
        // Of its first row.
        long long position;
    } of[TEXTS];

    INLINE int text_of(int row, int num_texts) const {
        int text = 0;
        while (text + 1 < num_texts && row >= of[text + 1].first_row) text++;
        return text;
    }

    INLINE int position(int text, int row) const { return (int)of[text].position + row - (int)of[text].first_row; }
};

// Which chunks of keys a token sees.
struct Seen {
    int first, end, first_chunk, end_chunk;

    INLINE Seen(int position, int window)
        : first(window && position >= window ? position + 1 - window : 0), end(position + 1), first_chunk(first / CHUNK),
          end_chunk((end + CHUNK - 1) / CHUNK) {}
};

// Grid: rows, num_kv_heads * head_dim / 1024 upwards.
extern "C" __global__ void __launch_bounds__(THREADS)
    append_to_caches(const Half *k, const Half *v, const __grid_constant__ Texts texts, int num_texts, int first_row, int k_stride, int v_stride,
                     int num_kv_heads, int head_dim) {
    const int row = first_row + blockIdx.x, column = (blockIdx.y * THREADS + threadIdx.x) * 8;
    if (column >= num_kv_heads * head_dim) return;
    const int text = texts.text_of(row, num_texts);
    const long long to = ((long long)(column / head_dim) * texts.of[text].capacity + texts.position(text, row)) * head_dim + column % head_dim;
    *(uint4 *)(texts.of[text].keys + to) = *(const uint4 *)(k + (long long)row * k_stride + column);
    *(uint4 *)(texts.of[text].values + to) = *(const uint4 *)(v + (long long)row * v_stride + column);
}

// sums: f32, [rows, num_heads, chunks, head_dim], of exp2(score - max) times values; ends: [rows, num_heads, chunks, 2], the max and
// the sum of these exp2. Scores are those of base 2; `cap` 0 is none. Grid: rows, num_kv_heads * (heads of a group / 8 upwards),
// chunks.
extern "C" __global__ void __launch_bounds__(THREADS)
    attend_to_chunks(const Half *q, float *sums, float *ends, const __grid_constant__ Texts texts, int num_texts, int first_row, int q_stride, int num_heads,
                     int num_kv_heads, int head_dim, int window, float scale, float cap) {
    __shared__ float queries[QUERIES * WIDTH], weights[QUERIES][CHUNK];
    const int row = first_row + blockIdx.x, chunk = blockIdx.z, chunks = gridDim.z;
    const int text = texts.text_of(row, num_texts);
    const Seen seen(texts.position(text, row), window);
    const int begin = max(seen.first, chunk * CHUNK), end = min(seen.end, chunk * CHUNK + CHUNK);
    if (begin >= end) return;
    const int group = num_heads / num_kv_heads, tiles = (group + QUERIES - 1) / QUERIES, kv_head = blockIdx.y / tiles;
    const int head = kv_head * group + blockIdx.y % tiles * QUERIES, count = min(QUERIES, group - (int)(blockIdx.y % tiles) * QUERIES);
    const long long cache = (long long)kv_head * texts.of[text].capacity * head_dim;
    const Half *keys = texts.of[text].keys + cache, *values = texts.of[text].values + cache;

    const Half *own = q + (long long)row * q_stride + head * head_dim;
    for (int i = threadIdx.x * 8; i < count * head_dim; i += THREADS * 8) {
        const Eight x(own + i);
#pragma unroll
        for (int j = 0; j < 8; j++) queries[i + j] = x.of[j];
    }
    __syncthreads();

    for (int key = begin + threadIdx.x; key < end; key += THREADS) {
        float scores[QUERIES] = {};
        for (int i = 0; i < head_dim; i += 8) {
            const Eight x(keys + (long long)key * head_dim + i);
#pragma unroll
            for (int query = 0; query < QUERIES; query++) {
                if (query >= count) break;
                const Eight y(queries + query * head_dim + i);
#pragma unroll
                for (int j = 0; j < 8; j++) scores[query] += x.of[j] * y.of[j];
            }
        }
#pragma unroll
        for (int query = 0; query < QUERIES; query++) {
            float score = scores[query] * scale;
            // tanh by one exponential.
            if (cap) score = cap - 2 * cap / (exp2_approx(score / cap * (2 * LOG2_E)) + 1);
            weights[query][key - chunk * CHUNK] = score * LOG2_E;
        }
    }
    __syncthreads();

    // A warp has a query: each lane the keys of one remainder.
    const int lane = threadIdx.x % WARP;
    for (int query = threadIdx.x / WARP; query < count; query += THREADS / WARP) {
        float most = -INFINITY, sum = 0;
        for (int i = lane; i < CHUNK; i += WARP)
            if (chunk * CHUNK + i >= begin && chunk * CHUNK + i < end) most = fmaxf(most, weights[query][i]);
        for (int distance = 16; distance; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
        for (int i = lane; i < CHUNK; i += WARP)
            if (chunk * CHUNK + i >= begin && chunk * CHUNK + i < end)
                sum += weights[query][i] = exp2_approx(weights[query][i] - most);
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) {
            float *to = ends + (((long long)blockIdx.x * num_heads + head + query) * chunks + chunk) * 2;
            to[0] = most, to[1] = sum;
        }
    }
    __syncthreads();

    // A thread has two numbers of the keys of one remainder.
    const int pairs = head_dim / 2, slots = THREADS / pairs, slot = threadIdx.x / pairs, column = threadIdx.x % pairs * 2;
    float low[QUERIES] = {}, high[QUERIES] = {};
    if (slot < slots) {
        const int skipped = (begin - chunk * CHUNK - slot + slots - 1) / slots;
        for (int key = chunk * CHUNK + slot + max(skipped, 0) * slots; key < end; key += slots) {
            const unsigned pair = *(const unsigned *)(values + (long long)key * head_dim + column);
#pragma unroll
            for (int query = 0; query < QUERIES; query++) {
                if (query >= count) break;
                const float weight = weights[query][key - chunk * CHUNK];
                low[query] += weight * low_half(pair), high[query] += weight * high_half(pair);
            }
        }
        // The queries are no longer needed.
#pragma unroll
        for (int query = 0; query < QUERIES; query++) {
            float *to = queries + (query * slots + slot) * head_dim + column;
            to[0] = low[query], to[1] = high[query];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * head_dim; i += THREADS) {
        const int query = i / head_dim, of = i % head_dim;
        float sum = 0;
        for (int slot = 0; slot < slots; slot++) sum += queries[(query * slots + slot) * head_dim + of];
        sums[(((long long)blockIdx.x * num_heads + head + query) * chunks + chunk) * head_dim + of] = sum;
    }
}

// o: Half, [.., num_heads * head_dim]; lse: f32, [.., num_heads], natural logarithms. Grid: rows, num_heads.
extern "C" __global__ void __launch_bounds__(THREADS)
    join_chunks(const float *sums, const float *ends, Half *o, float *lse, const __grid_constant__ Texts texts, int num_texts, int first_row, int num_heads,
                int head_dim, int chunks, int window) {
    const int row = first_row + blockIdx.x, head = blockIdx.y, column = threadIdx.x * 2;
    const Seen seen(texts.position(texts.text_of(row, num_texts), row), window);
    const long long of = ((long long)blockIdx.x * num_heads + head) * chunks;
    float most = -INFINITY, sum = 0, low = 0, high = 0;
    for (int chunk = seen.first_chunk; chunk < seen.end_chunk; chunk++) most = fmaxf(most, ends[(of + chunk) * 2]);
    for (int chunk = seen.first_chunk; chunk < seen.end_chunk; chunk++) {
        const float weight = exp2_approx(ends[(of + chunk) * 2] - most);
        sum += weight * ends[(of + chunk) * 2 + 1];
        if (column < head_dim) {
            const float2 x = *(const float2 *)(sums + (of + chunk) * head_dim + column);
            low += weight * x.x, high += weight * x.y;
        }
    }
    if (column < head_dim)
        *(unsigned *)(o + ((long long)row * num_heads + head) * head_dim + column) = half_pair(low / sum, high / sum);
    if (threadIdx.x == 0) lse[(long long)row * num_heads + head] = most / LOG2_E + logf(sum);
}
