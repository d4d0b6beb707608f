// The gated delta rule (Yang et al., 2025, https://arxiv.org/abs/2412.06464) in chunks of 64 tokens, as src/ops/delta_rule.rs
// describes it: forward and backward of Half, for keys of 128 numbers.
//
// What a chunk does by itself is computed for all chunks at a time: `prepare`, and of the backward `chunks` and `keys`. Only the
// state goes from chunk to chunk: a block has 32 of its columns, which do not know of each other, and goes along a document.
// Operands of products are rounded to Half; states, and their gradients, are summed in f32. Every sum has one order.
//
// Queries and keys are multiplied by their factors, 1 / sqrt(|x|^2 + eps), with other numbers of their row where these are rounded.
//
// qkv: Half, [tokens, qkv_stride]: queries and keys of num_key_heads, values of num_value_heads, which share key heads evenly.
// decay, strength: f32, [tokens, num_value_heads]. chunks: (first token, tokens, negative outside of all documents, where outputs
// are zeros); documents: (first chunk, chunks). For every chunk and value head: sums of decays, f32 [64]; inverse and weights,
// Half [64, 64]; states before it and their gradients behind it, Half [128, value_head_dim]. factors: f32, for every chunk and key
// head, of queries, [64], with the root of their width, then of keys. value_head_dim is a multiple of 32, pointers of 16 bytes.
#include "tile.cuh"

enum { CHUNK = 64, KEY = 128, SLICE = 32, TILE_K = CHUNK * KEY * 2, TILE_C = CHUNK * CHUNK * 2, TILE_V = CHUNK * SLICE * 2,
       TILE_S = KEY * SLICE * 2 };
#define EPS 1e-6f
// Of queries, 1 / sqrt(KEY).
#define SCALE 0.08838834764831845f

INLINE float exponential(float x) { return exp2_approx(x * 1.4426950408889634f); }

struct Shape {
    int num_key_heads, num_value_heads, value_head_dim;

    INLINE int key_head(int head) const { return head / (num_value_heads / num_key_heads); }
    INLINE int value_width() const { return num_value_heads * value_head_dim; }
};

// sums += A B: A in fragments, B 16 rows of a tile from row 16 k on, 8 * N columns from `first_chunk` on.
template <int WIDTH, int M, int N>
INLINE void add_step(Sums<M, N> &sums, const unsigned (&a)[M][4], const Lane<WIDTH> &b, int k, int first_chunk = 0) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned y[4];
        ldmatrix_transposed(y, b.at(k * 16, first_chunk + n));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_16x8x16(sums[m][n], a[m], y[0], y[1]);
            mma_16x8x16(sums[m][n + 1], a[m], y[2], y[3]);
        }
    }
}

// The right operand of add_step.
template <int WIDTH> INLINE Lane<WIDTH> right_operand(Shared tile) {
    return Lane<WIDTH>(tile, threadIdx.x % 16, threadIdx.x % WARP / 16);
}

// A transposed tile as the left operand: rows are the tile's columns.
template <int WIDTH> struct Columns {
    Lane<WIDTH> lane;

    INLINE explicit Columns(Shared tile) : lane(tile, threadIdx.x % WARP / 16 * 8 + threadIdx.x % 8, threadIdx.x / 8 % 2) {}

    // 16 * M columns from column 16 m on, of the 16 rows from row 16 k on.
    template <int M> INLINE void load(unsigned (&x)[M][4], int k, int m) const {
#pragma unroll
        for (int i = 0; i < M; i++) ldmatrix_transposed(x[i], lane.at(k * 16, (m + i) * 2));
    }
};

// Rows first_row + 0 .. 16 * M of a tile from `first_chunk` on become the sums of a warp, rounded.
template <int WIDTH, int M, int N> INLINE void store_tile(const Sums<M, N> &sums, Shared tile, int first_row, int first_chunk = 0) {
    const int lane = threadIdx.x % WARP;
    const Lane<WIDTH> own(tile, first_row + lane / 4);
#pragma unroll
    for (int i = 0; i < M * N * 2; i++)
        store_shared(own.at(i / (N * 2) * 16 + i % 2 * 8, first_chunk + i / 2 % N) + lane % 4 * 4,
                     half_pair(sums[i / (N * 2)][i / 2 % N][i % 2 * 2], sums[i / (N * 2)][i / 2 % N][i % 2 * 2 + 1]));
}

// Rows of sums times a number for each.
template <int N> INLINE void scale_rows(Sums<1, N> &sums, float low, float high) {
#pragma unroll
    for (int n = 0; n < N; n++) sums[0][n][0] *= low, sums[0][n][1] *= low, sums[0][n][2] *= high, sums[0][n][3] *= high;
}

// Numbers of the tokens of a chunk.
struct Tokens {
    // c; exp(c), exp(c_last - c), b, and the factors.
    float sums[CHUNK], from_start[CHUNK], to_end[CHUNK], strength[CHUNK], of_query[CHUNK], of_key[CHUNK];
    float whole;

    // By 64 threads or more; to be met at a barrier.
    INLINE void load(const Shape &shape, int chunk, int head, int2 tokens, const float *sums_of, const float *factors,
                     const float *strengths) {
        const int i = threadIdx.x;
        if (i >= CHUNK) return;
        const float *own = sums_of + ((long long)chunk * shape.num_value_heads + head) * CHUNK;
        const float *of_keys = factors + ((long long)chunk * shape.num_key_heads + shape.key_head(head)) * 2 * CHUNK;
        const float sum = own[i], last = own[CHUNK - 1];
        sums[i] = sum, from_start[i] = exponential(sum), to_end[i] = exponential(last - sum);
        of_query[i] = of_keys[i], of_key[i] = of_keys[CHUNK + i];
        strength[i] = i < tokens.y ? strengths[(long long)(tokens.x + i) * shape.num_value_heads + head] : 0;
        if (i == 0) whole = exponential(last);
    }
};

// The square of a row of a tile, KEY wide.
INLINE float square_of_row(Shared tile, int row) {
    float sum = 0;
    const Lane<KEY> lane(tile, row);
#pragma unroll
    for (int i = 0; i < KEY / 8; i++) {
        const uint4 x = load_shared_16_bytes(lane.at(0, i));
        const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) sum += low_half(pairs[j]) * low_half(pairs[j]) + high_half(pairs[j]) * high_half(pairs[j]);
    }
    return sum;
}

// Sums of decays, factors, weights P and the inverse of I + A. Grid: (chunks, num_key_heads), block 128, dynamic shared memory
// 33280 bytes.
extern "C" __global__ void __launch_bounds__(128)
    delta_rule_prepare(const Half *qkv, const float *decay, const float *strength, const int2 *chunks, float *sums, float *factors,
                       Half *inverse, Half *weights, int qkv_stride, int num_key_heads, int num_value_heads) {
    // A and its inverse in f32 take the place of queries and keys.
    enum { STRIDE = CHUNK + 1 };
    __shared__ float of_query[CHUNK], of_key[CHUNK], c[CHUNK], b[CHUNK];
    const Shared q = dynamic_shared(), k = q + TILE_K;
    extern __shared__ __align__(128) unsigned char shared[];
    float *a = (float *)shared, *t = a + CHUNK * STRIDE;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, chunk = blockIdx.x, key_head = blockIdx.y;
    const int group = num_value_heads / num_key_heads;
    const int2 tokens = chunks[chunk];
    if (tokens.y < 0) return;
    load_tile<KEY, CHUNK, 128>(q, qkv + key_head * KEY, qkv_stride, tokens.x, tokens.x + tokens.y);
    load_tile<KEY, CHUNK, 128>(k, qkv + (num_key_heads + key_head) * KEY, qkv_stride, tokens.x, tokens.x + tokens.y);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    const float factor = (thread < CHUNK ? SCALE : 1) / sqrtf(square_of_row(thread < CHUNK ? q : k, thread % CHUNK) + EPS);
    (thread < CHUNK ? of_query : of_key)[thread % CHUNK] = factor;
    factors[((long long)chunk * num_key_heads + key_head) * 2 * CHUNK + thread] = factor;
    Sums<1, 8> qk, kk;
    product_of_rows(qk, Rows<KEY, 1, false>(q + warp * 16 * KEY * 2), k);
    product_of_rows(kk, Rows<KEY, 1, false>(k + warp * 16 * KEY * 2), k);

    for (int head = key_head * group; head < (key_head + 1) * group; head++) {
        const long long own = (long long)chunk * num_value_heads + head;
        if (thread < CHUNK) {
            const long long at = (long long)(tokens.x + thread) * num_value_heads + head;
            float sum = thread < tokens.y ? decay[at] : 0;
            for (int distance = 1; distance < WARP; distance *= 2) {
                const float before = __shfl_up_sync(~0u, sum, distance);
                if (lane >= distance) sum += before;
            }
            c[thread] = sum, b[thread] = thread < tokens.y ? strength[at] : 0;
        }
        __syncthreads();
        // The second half goes on from the first.
        if (thread < CHUNK) sums[own * CHUNK + thread] = c[thread] + (warp ? c[WARP - 1] : 0);
        __syncthreads();
        if (thread >= WARP && thread < CHUNK) c[thread] += c[WARP - 1];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const int row = warp * 16 + i / 2 % 2 * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2;
            float p[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int at = column + j;
                const float decayed = at <= row ? exponential(c[row] - c[at]) * of_key[at] : 0;
                p[j] = qk[0][i / 4][i % 4 + j] * of_query[row] * decayed;
                a[row * STRIDE + at] = at < row ? kk[0][i / 4][i % 4 + j] * of_key[row] * decayed * b[row] : 0;
                t[row * STRIDE + at] = at == row;
            }
            *(unsigned *)(weights + own * CHUNK * CHUNK + row * CHUNK + column) = half_pair(p[0], p[1]);
        }
        __syncthreads();
        // A column by two threads, row after row: those of the inverse before it times the row of A.
        const int column = thread / 2, first = warp * 16 + thread % 2;
        for (int row = warp * 16 + 1; row < CHUNK; row++) {
            float sum = 0;
#pragma unroll 8
            for (int j = first; j < row; j += 2) sum += a[row * STRIDE + j] * t[j * STRIDE + column];
            sum += __shfl_xor_sync(~0u, sum, 1);
            if (thread % 2 == 0 && row > column) t[row * STRIDE + column] = -sum;
            __syncwarp();
        }
        __syncthreads();
        for (int i = thread * 2; i < CHUNK * CHUNK; i += 256) {
            const float *from = t + i / CHUNK * STRIDE + i % CHUNK;
            *(unsigned *)(inverse + own * CHUNK * CHUNK + i) = half_pair(from[0], from[1]);
        }
        __syncthreads();
    }
}

// What the columns of a block are.
struct Slice {
    int head, first_column;

    INLINE explicit Slice(const Shape &shape) {
        const int slices = shape.value_head_dim / SLICE;
        head = blockIdx.x / slices, first_column = blockIdx.x % slices * SLICE;
    }

    // In a row of all heads' values.
    INLINE int column(const Shape &shape) const { return head * shape.value_head_dim + first_column; }

    // In what there is of every chunk and head, [KEY, value_head_dim].
    INLINE long long of_state(const Shape &shape, int chunk) const {
        return ((long long)chunk * shape.num_value_heads + head) * KEY * shape.value_head_dim + first_column;
    }
};

INLINE void clear_rows(Half *to, int stride, int first_row, int num_rows) {
    for (int i = threadIdx.x; i < num_rows * SLICE / 8; i += blockDim.x)
        *(uint4 *)(to + (long long)(first_row + i / (SLICE / 8)) * stride + i % (SLICE / 8) * 8) = make_uint4(0, 0, 0, 0);
}

// The states along a document: to read from them, or, of IS_KEPT, to keep them and what is written to them.
template <bool IS_KEPT>
INLINE void forward(const Half *qkv, const float *strength, const int2 *chunks, const int2 *documents, const float *sums,
                    const float *factors, const Half *inverse, const Half *weights, Half *out, Half *states, int qkv_stride,
                    const Shape &shape) {
    __shared__ Tokens numbers;
    // Values become what is multiplied by the inverse.
    const Shared k = dynamic_shared(), t = k + TILE_K, v = t + TILE_C, w = v + TILE_V, s = w + TILE_V;
    // Where memory is short, the weights take the place of the inverse when that has been read.
    constexpr bool IS_SHORT = TILES_IN_FLIGHT == 1;
    const Shared q = s + TILE_S, p = IS_SHORT ? t : q + TILE_K, w_at_end = IS_KEPT ? w : q + TILE_K + (IS_SHORT ? 0 : TILE_C);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, low = warp * 16 + lane / 4, high = low + 8;
    const Slice slice(shape);
    const int key_head = shape.key_head(slice.head), key_width = shape.num_key_heads * KEY, out_stride = shape.value_width();
    const int2 document = documents[blockIdx.y];
    out += slice.column(shape);
    Sums<2, 4> state = {};
    for (int chunk = document.x; chunk < document.x + document.y; chunk++) {
        const int2 tokens = chunks[chunk];
        if (tokens.y < 0) {
            if (!IS_KEPT) clear_rows(out, out_stride, tokens.x, -tokens.y);
            continue;
        }
        const long long own = (long long)chunk * shape.num_value_heads + slice.head;
        const int end = tokens.x + tokens.y;
        load_tile<KEY, CHUNK, 128>(k, qkv + key_width + key_head * KEY, qkv_stride, tokens.x, end);
        load_tile<SLICE, CHUNK, 128>(v, qkv + 2 * key_width + slice.column(shape), qkv_stride, tokens.x, end);
        load_tile<CHUNK, CHUNK, 128>(t, inverse + own * CHUNK * CHUNK, CHUNK, 0, CHUNK);
        if (!IS_KEPT) {
            load_tile<KEY, CHUNK, 128>(q, qkv + key_head * KEY, qkv_stride, tokens.x, end);
            if (!IS_SHORT) load_tile<CHUNK, CHUNK, 128>(p, weights + own * CHUNK * CHUNK, CHUNK, 0, CHUNK);
        }
        commit_copies();
        numbers.load(shape, chunk, slice.head, tokens, sums, factors, strength);
        if (IS_KEPT) {
            store_rows<SLICE, 2, 4>(state, s + warp * 32 * SLICE * 2,
                                    states + slice.of_state(shape, chunk) + (long long)warp * 32 * shape.value_head_dim,
                                    shape.value_head_dim, 32);
        } else
            store_tile<SLICE, 2, 4>(state, s, warp * 32);
        wait_for_copies<0>();
        __syncthreads();
        unsigned a[1][4];
        {   // What is known of the values, and what is not.
            Sums<1, 4> u = {};
            const Rows<KEY, 1, false> keys(k + warp * 16 * KEY * 2);
#pragma unroll
            for (int i = 0; i < KEY / 16; i++) keys.load(a, i), add_step(u, a, right_operand<SLICE>(s), i);
            const Lane<SLICE> own_values(v, low);
            const float known[2] = {numbers.from_start[low] * numbers.of_key[low], numbers.from_start[high] * numbers.of_key[high]};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int half = i % 2;
                const unsigned pair = __float_as_uint(load_shared(own_values.at(half * 8, i / 2) + lane % 4 * 4));
                const float b = numbers.strength[half ? high : low];
                u[0][i / 2][half * 2] = b * (low_half(pair) - known[half] * u[0][i / 2][half * 2]);
                u[0][i / 2][half * 2 + 1] = b * (high_half(pair) - known[half] * u[0][i / 2][half * 2 + 1]);
            }
            store_tile<SLICE, 1, 4>(u, v, warp * 16);
        }
        __syncthreads();
        {   // What is written.
            Sums<1, 4> written = {};
            const Rows<CHUNK, 1, false> rows(t + warp * 16 * CHUNK * 2);
#pragma unroll
            for (int i = 0; i < CHUNK / 16; i++)
                if (i <= warp) rows.load(a, i), add_step(written, a, right_operand<SLICE>(v), i);
            if (IS_KEPT) {
                store_rows<SLICE, 1, 4>(written, w + warp * 16 * SLICE * 2, out + (long long)(tokens.x + warp * 16) * out_stride,
                                        out_stride, tokens.y - warp * 16);
                __syncwarp();
            } else
                store_tile<SLICE, 1, 4>(written, w, warp * 16);
            scale_rows(written, numbers.to_end[low] * numbers.of_key[low], numbers.to_end[high] * numbers.of_key[high]);
            store_tile<SLICE, 1, 4>(written, w_at_end, warp * 16);
        }
        __syncthreads();
        if (!IS_KEPT && IS_SHORT) {
            load_tile<CHUNK, CHUNK, 128>(p, weights + own * CHUNK * CHUNK, CHUNK, 0, CHUNK);
            __syncthreads();
        }
        if (!IS_KEPT) {
            Sums<1, 4> o = {};
            const Rows<KEY, 1, false> queries(q + warp * 16 * KEY * 2);
            const Rows<CHUNK, 1, false> rows(p + warp * 16 * CHUNK * 2);
#pragma unroll
            for (int i = 0; i < KEY / 16; i++) queries.load(a, i), add_step(o, a, right_operand<SLICE>(s), i);
            scale_rows(o, numbers.from_start[low] * numbers.of_query[low], numbers.from_start[high] * numbers.of_query[high]);
#pragma unroll
            for (int i = 0; i < CHUNK / 16; i++)
                if (i <= warp) rows.load(a, i), add_step(o, a, right_operand<SLICE>(w), i);
            store_rows<SLICE, 1, 4>(o, v + warp * 16 * SLICE * 2, out + (long long)(tokens.x + warp * 16) * out_stride, out_stride,
                                    tokens.y - warp * 16);
        }
        const Columns<KEY> keys(k);
        unsigned of_keys[2][4];
#pragma unroll
        for (int i = 0; i < 32; i++) state[i / 16][i / 4 % 4][i % 4] *= numbers.whole;
#pragma unroll
        for (int i = 0; i < CHUNK / 16; i++)
            keys.load(of_keys, i, warp * 2), add_step(state, of_keys, right_operand<SLICE>(w_at_end), i);
        __syncthreads();
    }
}

// o, [tokens, num_value_heads * value_head_dim]. Grid: (num_value_heads * value_head_dim / 32, documents), block 128, dynamic
// shared memory 69632 bytes, on sm_75 61440.
extern "C" __global__ void __launch_bounds__(128)
    delta_rule_forward(const Half *qkv, const float *strength, const int2 *chunks, const int2 *documents, const float *sums,
                       const float *factors, const Half *inverse, const Half *weights, Half *o, int qkv_stride, int num_key_heads,
                       int num_value_heads, int value_head_dim) {
    forward<false>(qkv, strength, chunks, documents, sums, factors, inverse, weights, o, nullptr, qkv_stride,
                   {num_key_heads, num_value_heads, value_head_dim});
}

// states, and W in `written`, as o. Grid and block likewise, dynamic shared memory 40960 bytes.
extern "C" __global__ void __launch_bounds__(128)
    delta_rule_states(const Half *qkv, const float *strength, const int2 *chunks, const int2 *documents, const float *sums,
                      const float *factors, const Half *inverse, Half *written, Half *states, int qkv_stride, int num_key_heads,
                      int num_value_heads, int value_head_dim) {
    forward<true>(qkv, strength, chunks, documents, sums, factors, inverse, nullptr, written, states, qkv_stride,
                  {num_key_heads, num_value_heads, value_head_dim});
}

// From the end of a document to its start: gradients of the states behind every chunk, of values, dv, [tokens, dv_stride], and of
// what the inverse is multiplied with, d_known, as o. Grid and block as of the forward, dynamic shared memory 65536 bytes, on sm_75
// 57344.
extern "C" __global__ void __launch_bounds__(128)
    delta_rule_backward_states(const Half *d_o, const Half *qkv, const float *strength, const int2 *chunks, const int2 *documents,
                               const float *sums, const float *factors, const Half *inverse, const Half *weights, Half *d_known,
                               Half *d_states, Half *dv, int d_o_stride, int qkv_stride, int dv_stride, int num_key_heads,
                               int num_value_heads, int value_head_dim) {
    __shared__ Tokens numbers;
    const Shape shape = {num_key_heads, num_value_heads, value_head_dim};
    // Where memory is short, the inverse takes the place of the weights when these have been read.
    constexpr bool IS_SHORT = TILES_IN_FLIGHT == 1;
    const Shared k = dynamic_shared(), q = k + TILE_K, p = q + TILE_K, t = IS_SHORT ? p : p + TILE_C, asked = t + TILE_C;
    const Shared known = asked + TILE_V;
    const Shared ds = known + TILE_V;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, low = warp * 16 + lane / 4, high = low + 8;
    const Slice slice(shape);
    const int key_head = shape.key_head(slice.head), key_width = num_key_heads * KEY, known_stride = shape.value_width();
    const int2 document = documents[blockIdx.y];
    d_o += slice.column(shape), d_known += slice.column(shape), dv += slice.column(shape);
    Sums<2, 4> d_state = {};
    for (int chunk = document.x + document.y - 1; chunk >= document.x; chunk--) {
        const int2 tokens = chunks[chunk];
        if (tokens.y < 0) {
            clear_rows(dv, dv_stride, tokens.x, -tokens.y);
            continue;
        }
        const long long own = (long long)chunk * num_value_heads + slice.head;
        const int end = tokens.x + tokens.y, num_rows = tokens.y - warp * 16;
        const long long first_row = tokens.x + warp * 16;
        load_tile<KEY, CHUNK, 128>(k, qkv + key_width + key_head * KEY, qkv_stride, tokens.x, end);
        load_tile<KEY, CHUNK, 128>(q, qkv + key_head * KEY, qkv_stride, tokens.x, end);
        if (!IS_SHORT) load_tile<CHUNK, CHUNK, 128>(t, inverse + own * CHUNK * CHUNK, CHUNK, 0, CHUNK);
        load_tile<CHUNK, CHUNK, 128>(p, weights + own * CHUNK * CHUNK, CHUNK, 0, CHUNK);
        load_tile<SLICE, CHUNK, 128>(asked, d_o, d_o_stride, tokens.x, end);
        commit_copies();
        numbers.load(shape, chunk, slice.head, tokens, sums, factors, strength);
        store_rows<SLICE, 2, 4>(d_state, ds + warp * 32 * SLICE * 2,
                                d_states + slice.of_state(shape, chunk) + (long long)warp * 32 * value_head_dim, value_head_dim, 32);
        wait_for_copies<0>();
        __syncthreads();
        unsigned a[1][4];
        {   // Of what is written.
            Sums<1, 4> d_written = {};
            const Rows<KEY, 1, false> keys(k + warp * 16 * KEY * 2);
            const Columns<CHUNK> columns(p);
#pragma unroll
            for (int i = 0; i < KEY / 16; i++) keys.load(a, i), add_step(d_written, a, right_operand<SLICE>(ds), i);
            scale_rows(d_written, numbers.to_end[low] * numbers.of_key[low], numbers.to_end[high] * numbers.of_key[high]);
#pragma unroll
            for (int i = 0; i < CHUNK / 16; i++)
                if (i >= warp) columns.load(a, i, warp), add_step(d_written, a, right_operand<SLICE>(asked), i);
            store_tile<SLICE, 1, 4>(d_written, known, warp * 16);
        }
        __syncthreads();
        if (IS_SHORT) {
            load_tile<CHUNK, CHUNK, 128>(t, inverse + own * CHUNK * CHUNK, CHUNK, 0, CHUNK);
            __syncthreads();
        }
        {
            Sums<1, 4> x = {};
            const Columns<CHUNK> columns(t);
#pragma unroll
            for (int i = 0; i < CHUNK / 16; i++)
                if (i >= warp) columns.load(a, i, warp), add_step(x, a, right_operand<SLICE>(known), i);
            // Queries read the gradient of the output; nobody needs that of what is written any more.
            const Lane<SLICE> own_rows(asked, low);
            const float of[2] = {numbers.from_start[low] * numbers.of_query[low], numbers.from_start[high] * numbers.of_query[high]};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const Shared at = own_rows.at(i % 2 * 8, i / 2) + lane % 4 * 4;
                const unsigned pair = __float_as_uint(load_shared(at));
                store_shared(at, half_pair(low_half(pair) * of[i % 2], high_half(pair) * of[i % 2]));
            }
            __syncthreads();
            const Shared own_known = known + warp * 16 * SLICE * 2;
            store_rows<SLICE, 1, 4>(x, own_known, d_known + first_row * known_stride, known_stride, num_rows);
            __syncwarp();
            scale_rows(x, numbers.strength[low], numbers.strength[high]);
            store_rows<SLICE, 1, 4>(x, own_known, dv + first_row * dv_stride, dv_stride, num_rows);
            __syncwarp();
            scale_rows(x, -numbers.from_start[low] * numbers.of_key[low], -numbers.from_start[high] * numbers.of_key[high]);
            store_tile<SLICE, 1, 4>(x, known, warp * 16);
        }
        __syncthreads();
        const Columns<KEY> queries(q), keys(k);
        unsigned left[2][4];
#pragma unroll
        for (int i = 0; i < 32; i++) d_state[i / 16][i / 4 % 4][i % 4] *= numbers.whole;
#pragma unroll
        for (int i = 0; i < CHUNK / 16; i++) {
            queries.load(left, i, warp * 2), add_step(d_state, left, right_operand<SLICE>(asked), i);
            keys.load(left, i, warp * 2), add_step(d_state, left, right_operand<SLICE>(known), i);
        }
        __syncthreads();
    }
}

// sums += A B^T, of 16 rows of A and 8 * N rows of B, all SLICE wide.
template <int N> INLINE void add_product_of_rows(Sums<1, N> &sums, const unsigned (&a)[SLICE / 16][1][4], Shared b) {
    const int lane = threadIdx.x % WARP;
    const Lane<SLICE> lane_b(b, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < SLICE / 16; k++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned y[4];
            ldmatrix(y, lane_b.at(n * 8, k * 2));
            mma_16x8x16(sums[0][n], a[k][0], y[0], y[1]);
            mma_16x8x16(sums[0][n + 1], a[k][0], y[2], y[3]);
        }
}

// The sum over the pairs of two chunks of eight numbers in shared memory.
INLINE float dot_of_eight(Shared a, Shared b) {
    const uint4 x = load_shared_16_bytes(a), y = load_shared_16_bytes(b);
    const unsigned left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum += low_half(left[i]) * low_half(right[i]) + high_half(left[i]) * high_half(right[i]);
    return sum;
}

// The products of a warp's rows of sums with those of a tile, KEY wide, over its columns from `first_chunk` on: of rows low and high,
// in all lanes of a quad.
INLINE float2 dot_of_rows(const Sums<1, 8> &sums, Shared tile, int low, int first_chunk) {
    const int lane = threadIdx.x % WARP;
    const Lane<KEY> own(tile, low);
    float dots[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const unsigned pair = __float_as_uint(load_shared(own.at(i % 2 * 8, first_chunk + i / 2) + lane % 4 * 4));
        dots[i % 2] += sums[0][i / 2][i % 2 * 2] * low_half(pair) + sums[0][i / 2][i % 2 * 2 + 1] * high_half(pair);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        dots[i] += __shfl_xor_sync(~0u, dots[i], 1);
        dots[i] += __shfl_xor_sync(~0u, dots[i], 2);
    }
    return make_float2(dots[0], dots[1]);
}

// What a chunk has by itself: gradients of normed queries and keys by value head, f32, [tokens, num_value_heads, 128], of decays and of
// the logarithms of strengths. Grid: (chunks, num_value_heads), block 256, dynamic shared memory 61440 bytes.
extern "C" __global__ void __launch_bounds__(256)
    delta_rule_backward_chunks(const Half *d_o, const Half *qkv, const float *strength, const int2 *chunks, const float *sums,
                               const float *factors, const Half *written, const Half *d_known, const Half *states,
                               const Half *d_states, float *d_queries, float *d_keys, float *d_decay, float *d_strength,
                               int d_o_stride, int qkv_stride, int num_key_heads, int num_value_heads, int value_head_dim) {
    __shared__ Tokens numbers;
    __shared__ float by_row[2][CHUNK], of_state[8];
    const Shape shape = {num_key_heads, num_value_heads, value_head_dim};
    const Shared q = dynamic_shared(), k = q + TILE_K, w = k + TILE_K, x = w + TILE_V, d = x + TILE_V, s = d + TILE_V;
    const Shared ds = s + TILE_S, of_pairs = w, of_system = w + TILE_C;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, chunk = blockIdx.x, head = blockIdx.y;
    // A warp has 16 tokens, and of keys' numbers, or of tokens they meet, a half.
    const int first_row = warp % 4 * 16, half = warp / 4, low = first_row + lane / 4, high = low + 8;
    const int2 tokens = chunks[chunk];
    const long long key_stride = (long long)num_value_heads * KEY;
    const int num_tokens = tokens.y < 0 ? -tokens.y : tokens.y;
    d_queries += (long long)tokens.x * key_stride + head * KEY, d_keys += (long long)tokens.x * key_stride + head * KEY;
    d_decay += (long long)tokens.x * num_value_heads + head, d_strength += (long long)tokens.x * num_value_heads + head;
    if (tokens.y < 0) {
        for (int i = thread; i < num_tokens * KEY; i += 256) {
            d_queries[i / KEY * key_stride + i % KEY] = 0, d_keys[i / KEY * key_stride + i % KEY] = 0;
            if (i < num_tokens) d_decay[(long long)i * num_value_heads] = 0, d_strength[(long long)i * num_value_heads] = 0;
        }
        return;
    }
    const int key_head = shape.key_head(head), end = tokens.x + tokens.y;
    const long long of_head = ((long long)chunk * num_value_heads + head) * KEY * value_head_dim;
    load_tile<KEY, CHUNK, 256>(q, qkv + key_head * KEY, qkv_stride, tokens.x, end);
    load_tile<KEY, CHUNK, 256>(k, qkv + (num_key_heads + key_head) * KEY, qkv_stride, tokens.x, end);
    numbers.load(shape, chunk, head, tokens, sums, factors, strength);

    // d_o W^T and X W^T; d_o S^T, X S^T and W dS^T; the product of the states, and X W by token.
    Sums<1, 4> pairs = {}, system = {};
    Sums<1, 8> asked = {}, known = {}, kept = {};
    float product = 0, of_strength = 0;
    for (int column = 0; column < value_head_dim; column += SLICE) {
        const int value = head * value_head_dim + column;
        load_tile<SLICE, CHUNK, 256>(w, written + value, shape.value_width(), tokens.x, end);
        load_tile<SLICE, CHUNK, 256>(x, d_known + value, shape.value_width(), tokens.x, end);
        load_tile<SLICE, CHUNK, 256>(d, d_o + value, d_o_stride, tokens.x, end);
        load_tile<SLICE, KEY, 256>(s, states + of_head + column, value_head_dim, 0, KEY);
        load_tile<SLICE, KEY, 256>(ds, d_states + of_head + column, value_head_dim, 0, KEY);
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
        unsigned rows_w[2][1][4], rows_x[2][1][4], rows_d[2][1][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Rows<SLICE, 1, false>(w + first_row * SLICE * 2).load(rows_w[i], i);
            Rows<SLICE, 1, false>(x + first_row * SLICE * 2).load(rows_x[i], i);
            Rows<SLICE, 1, false>(d + first_row * SLICE * 2).load(rows_d[i], i);
        }
        const Shared own_s = s + half * 64 * SLICE * 2;
        add_product_of_rows(pairs, rows_d, w + half * 32 * SLICE * 2);
        add_product_of_rows(system, rows_x, w + half * 32 * SLICE * 2);
        add_product_of_rows(asked, rows_d, own_s);
        add_product_of_rows(known, rows_x, own_s);
        add_product_of_rows(kept, rows_w, ds + half * 64 * SLICE * 2);
#pragma unroll
        for (int i = thread; i < KEY * SLICE / 8; i += 256)
            product += dot_of_eight(s + i * 16, ds + i * 16);
        of_strength += dot_of_eight(x + thread * 16, w + thread * 16);
        __syncthreads();
    }

    // Gradients of pairs of tokens, times the factors of both.
    const float b[2] = {numbers.strength[low], numbers.strength[high]};
    const float c[2] = {numbers.sums[low], numbers.sums[high]}, start[2] = {numbers.from_start[low], numbers.from_start[high]};
    const float of_query[2] = {numbers.of_query[low], numbers.of_query[high]};
    const float of_key[2] = {numbers.of_key[low], numbers.of_key[high]};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int high_row = i / 2 % 2, row = high_row ? high : low, at = half * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const float decayed = at <= row ? exponential(c[high_row] - numbers.sums[at]) * numbers.of_key[at] : 0;
        pairs[0][i / 4][i % 4] *= decayed * of_query[high_row];
        system[0][i / 4][i % 4] *= at < row ? -decayed * b[high_row] * of_key[high_row] : 0;
    }
    store_tile<CHUNK, 1, 4>(pairs, of_pairs, first_row, half * 4);
    store_tile<CHUNK, 1, 4>(system, of_system, first_row, half * 4);
    __syncthreads();

    unsigned a[1][4];
    const Lane<KEY> queries = right_operand<KEY>(q), keys = right_operand<KEY>(k);
    const float ends[2] = {numbers.to_end[low], numbers.to_end[high]};
    // Of the states, a warp's rows of keys with what they have kept; then rows of queries and keys.
    float2 of_kept = dot_of_rows(kept, k, low, half * 8);
    product = numbers.whole * product + (lane % 4 == 0 ? of_kept.x * ends[0] * of_key[0] + of_kept.y * ends[1] * of_key[1] : 0);
    scale_rows(asked, start[0] * of_query[0], start[1] * of_query[1]);
    scale_rows(known, -b[0] * start[0] * of_key[0], -b[1] * start[1] * of_key[1]);
    scale_rows(kept, ends[0] * of_key[0], ends[1] * of_key[1]);
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
        Rows<CHUNK, 1, false>(of_pairs + first_row * CHUNK * 2).load(a, i), add_step(asked, a, keys, i, half * 8);
        Rows<CHUNK, 1, false>(of_system + first_row * CHUNK * 2).load(a, i), add_step(known, a, keys, i, half * 8);
        Columns<CHUNK>(of_system).load(a, i, warp % 4), add_step(kept, a, keys, i, half * 8);
        Columns<CHUNK>(of_pairs).load(a, i, warp % 4), add_step(kept, a, queries, i, half * 8);
    }
    // All of them are still multiplied by their rows' factors, as the products with queries and keys want them.
    const float2 of_asked = dot_of_rows(asked, q, low, half * 8), of_known = dot_of_rows(known, k, low, half * 8);
    of_kept = dot_of_rows(kept, k, low, half * 8);
    if (lane % 4 == 0) {
        by_row[half][low] = of_asked.x + of_known.x - of_kept.x;
        by_row[half][high] = of_asked.y + of_known.y - of_kept.y;
    }
    scale_rows(asked, 1 / of_query[0], 1 / of_query[1]);
#pragma unroll
    for (int i = 0; i < 32; i++) known[0][i / 4][i % 4] += kept[0][i / 4][i % 4];
    scale_rows(known, 1 / of_key[0], 1 / of_key[1]);
    const long long own = first_row * key_stride + half * 64;
    store_f32(asked, d_queries + own, key_stride, tokens.y - first_row);
    store_f32(known, d_keys + own, key_stride, tokens.y - first_row);

    for (int distance = 16; distance; distance /= 2) product += __shfl_xor_sync(~0u, product, distance);
    if (lane == 0) of_state[warp] = product;
    of_strength += __shfl_xor_sync(~0u, of_strength, 1);
    of_strength += __shfl_xor_sync(~0u, of_strength, 2);
    if (thread % 4 == 0 && thread / 4 < tokens.y) d_strength[(long long)(thread / 4) * num_value_heads] = of_strength;
    __syncthreads();
    // A decay is in the sums of its token and of all behind it.
    if (thread >= tokens.y) return;
    float sum = 0;
    for (int i = tokens.y - 1; i >= thread; i--) sum += by_row[0][i] + by_row[1][i];
    for (int i = 0; i < 8; i++) sum += of_state[i];
    d_decay[(long long)thread * num_value_heads] = sum;
}

// Gradients of queries and keys, in their columns of dqkv, from those of normed ones by value head. Grid: tokens * num_key_heads / 4
// upwards, block 256: a warp a query or key.
extern "C" __global__ void __launch_bounds__(256)
    delta_rule_backward_keys(const Half *qkv, const float *d_queries, const float *d_keys, Half *dqkv, int qkv_stride,
                             int dqkv_stride, int tokens, int num_key_heads, int num_value_heads) {
    const int lane = threadIdx.x % WARP, of_token = num_key_heads * 2, group = num_value_heads / num_key_heads;
    const long long row = (long long)blockIdx.x * 8 + threadIdx.x / WARP, token = row / of_token;
    const int head = (int)(row % of_token), key_head = head % num_key_heads;
    if (token >= tokens) return;
    const bool is_query = head < num_key_heads;
    const float *from = (is_query ? d_queries : d_keys) + (token * num_value_heads + key_head * group) * KEY + lane * 4;
    float gradient[4] = {0, 0, 0, 0};
    for (int i = 0; i < group; i++, from += KEY) {
        const float4 of_head = *(const float4 *)from;
        gradient[0] += of_head.x, gradient[1] += of_head.y, gradient[2] += of_head.z, gradient[3] += of_head.w;
    }
    const uint2 pairs = *(const uint2 *)(qkv + token * qkv_stride + head * KEY + lane * 4);
    const float x[4] = {low_half(pairs.x), high_half(pairs.x), low_half(pairs.y), high_half(pairs.y)};
    float square = 0, along = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (is_query) gradient[i] *= SCALE;
        square += x[i] * x[i], along += x[i] * gradient[i];
    }
    for (int distance = 16; distance; distance /= 2) {
        square += __shfl_xor_sync(~0u, square, distance);
        along += __shfl_xor_sync(~0u, along, distance);
    }
    const float factor = 1 / sqrtf(square + EPS);
    along *= factor * factor;
#pragma unroll
    for (int i = 0; i < 4; i++) gradient[i] = (gradient[i] - x[i] * along) * factor;
    *(uint2 *)(dqkv + token * dqkv_stride + head * KEY + lane * 4) =
        make_uint2(half_pair(gradient[0], gradient[1]), half_pair(gradient[2], gradient[3]));
}
