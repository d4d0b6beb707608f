// Causal attention with grouped queries over flat rows: query t sees the keys first_key[t] ..= t, so that documents, rows of a
// batch and windows are one thing. After the plan of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), algorithms 1
// and 2; the backward is two kernels, so that every sum has one order.
//
// Tensors are Half, [tokens, heads * HEAD], with rows `*_stride` elements apart: multiples of 8, and pointers of 16 bytes.
// `first_key` and `last_query` (the last query that sees a key) do not decrease; scale is above 0. lse (natural) and delta are
// f32, [num_heads, tokens]. Scores, probabilities and sums are f32; probabilities and their gradients are rounded to Half once,
// as operands. attention_capped.cu has the same kernels for scores under a cap, cap * tanh(score / cap): the others read no cap.
//
// `order` has the tiles of 128 rows, int [tokens / 128 upwards], in which blocks take them: those with most work first.
//
// A block has a tile of rows (queries; of dK and dV, keys), of which a warp has 16 * M, and goes through the tiles of columns
// that some row of it sees. Sizes are chosen for 99 KB of shared memory, the least that a block can have from sm_80 on, and for the
// 64 KB of sm_75, where a copy is waited for at once: there as many blocks as fit hide it.
#include "attention.cuh"

#ifndef NAME
#define NAME(kernel) attention_##kernel
enum { IS_CAPPED = false };
#endif

// Rows of the tiles of `order`.
enum { ORDERED = 128 };

// The first row of the block's tile, of ROWS; of those in one tile of `order` the last comes first where later ones have more work.
template <int ROWS, bool IS_LAST_FIRST> INLINE int first_row_of_block(const int *order) {
    constexpr int TILES = ORDERED / ROWS;
    const int tile = blockIdx.y % TILES;
    return order[blockIdx.y / TILES] * ORDERED + (IS_LAST_FIRST ? TILES - 1 - tile : tile) * ROWS;
}

template <int HEAD, int QUERIES, int KEYS, int WARPS, int STAGES>
INLINE void forward(const Half *q, const Half *k, const Half *v, const int *order, const int *first_key, Half *o, float *lse,
                    int q_stride, int k_stride, int v_stride, int o_stride, int tokens, int num_heads, int num_kv_heads, float scale,
                    float cap) {
    constexpr int M = QUERIES / WARPS / 16, THREADS = WARPS * WARP, TILE = KEYS * HEAD * 2;
    const Shared q_tile = dynamic_shared(), ring = q_tile + QUERIES * HEAD * 2;
    const int head = blockIdx.x, kv_head = head / (num_heads / num_kv_heads), lane = threadIdx.x % WARP;
    const int first_query = first_row_of_block<QUERIES, true>(order), warp_row = threadIdx.x / WARP * 16 * M;
    if (first_query >= tokens) return;
    const int first_tile = first_key[first_query] / KEYS;
    const int num_tiles = (min(first_query + QUERIES, tokens) - 1) / KEYS - first_tile + 1;
    q += head * HEAD, k += kv_head * HEAD, v += kv_head * HEAD;

    // Tiles of keys and of values take turns in a ring.
    auto load = [&](int i) {
        if (i < 2 * num_tiles)
            load_tile<HEAD, KEYS, THREADS>(ring + i % STAGES * TILE, i % 2 ? v : k, i % 2 ? v_stride : k_stride,
                                           (first_tile + i / 2) * KEYS, tokens);
        commit_copies();
    };
    // Waits for tile i, and lets another take the place of tile i - 1.
    auto next = [&](int i) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        load(i + STAGES - 1);
        return ring + i % STAGES * TILE;
    };
    load_tile<HEAD, QUERIES, THREADS>(q_tile, q, q_stride, first_query, tokens);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) load(i);

    const Visible<M> visible = visible_keys<M>(first_key, first_query + warp_row, tokens);
    const Rows<HEAD, M, false> q_rows(q_tile + warp_row * HEAD * 2);
    Sums<M, HEAD / 8> out = {};
    float row_max[M][2], row_sum[M][2] = {}, shrink[M][2];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) row_max[i / 2][i % 2] = -INFINITY;

    for (int tile = 0; tile < num_tiles; tile++) {
        const int first_column = (first_tile + tile) * KEYS;
        const bool is_seen = visible.template any<KEYS>(first_column);
        Operand<M, KEYS / 16> operand;
        const Shared k_tile = next(2 * tile);
        if (is_seen) {
            Sums<M, KEYS / 8> p;
            product_of_rows(p, q_rows, k_tile);
            if (IS_CAPPED) cap_scores(p, scale / cap);
            visible.mask(p, first_column);
            add_to_softmax(p, row_max, row_sum, shrink, (IS_CAPPED ? cap : scale) * LOG2_E);
            multiply_rows(out, shrink);
            round_to_operand(operand, p);
        }
        const Shared v_tile = next(2 * tile + 1);
        if (is_seen) add_product<HEAD>(out, operand, v_tile);
    }

    finish_softmax(out, row_max, row_sum, IS_CAPPED ? cap : scale, lse + (long long)head * tokens, first_query + warp_row, tokens);
    // Only this warp has read these rows of the queries.
    const long long row = first_query + warp_row;
    store_rows<HEAD>(out, q_tile + warp_row * HEAD * 2, o + row * o_stride + head * HEAD, o_stride, tokens - row);
}

// The rows of queries and of do are kept in registers where these suffice.
template <int HEAD, int QUERIES, int KEYS, int WARPS, bool IS_KEPT>
INLINE void backward_q(const Half *q, const Half *k, const Half *v, const Half *d_o, const float *lse, const float *delta,
                       const int *order, const int *first_key, Half *dq, int q_stride, int k_stride, int v_stride, int do_stride,
                       int dq_stride, int tokens, int num_heads, int num_kv_heads, float scale, float cap) {
    constexpr int M = QUERIES / WARPS / 16, THREADS = WARPS * WARP, TILE = KEYS * HEAD * 2;
    const Shared q_tile = dynamic_shared(), do_tile = q_tile + QUERIES * HEAD * 2, stages = do_tile + QUERIES * HEAD * 2;
    const int head = blockIdx.x, kv_head = head / (num_heads / num_kv_heads);
    const int first_query = first_row_of_block<QUERIES, true>(order), warp_row = threadIdx.x / WARP * 16 * M;
    if (first_query >= tokens) return;
    const int first_tile = first_key[first_query] / KEYS;
    const int num_tiles = (min(first_query + QUERIES, tokens) - 1) / KEYS - first_tile + 1;
    q += head * HEAD, d_o += head * HEAD, k += kv_head * HEAD, v += kv_head * HEAD;

    auto load = [&](int i) {
        if (i < num_tiles) {
            const Shared stage = stages + i % 2 * 2 * TILE;
            load_tile<HEAD, KEYS, THREADS>(stage, k, k_stride, (first_tile + i) * KEYS, tokens);
            load_tile<HEAD, KEYS, THREADS>(stage + TILE, v, v_stride, (first_tile + i) * KEYS, tokens);
        }
        commit_copies();
    };
    load_tile<HEAD, QUERIES, THREADS>(q_tile, q, q_stride, first_query, tokens);
    load_tile<HEAD, QUERIES, THREADS>(do_tile, d_o, do_stride, first_query, tokens);
    load(0);

    const Visible<M> visible = visible_keys<M>(first_key, first_query + warp_row, tokens);
    float row_lse[M][2], row_delta[M][2];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int query = first_query + warp_row + i * 8 + threadIdx.x % WARP / 4;
        row_lse[i / 2][i % 2] = query < tokens ? lse[(long long)head * tokens + query] : 0;
        row_delta[i / 2][i % 2] = query < tokens ? delta[(long long)head * tokens + query] : 0;
    }

    if (IS_KEPT) {
        wait_for_copies<0>();
        __syncthreads();
    }
    const Rows<HEAD, M, IS_KEPT> q_rows(q_tile + warp_row * HEAD * 2), do_rows(do_tile + warp_row * HEAD * 2);
    Sums<M, HEAD / 8> sums = {};
    for (int tile = 0; tile < num_tiles; tile++) {
        wait_for_copies<0>();
        __syncthreads();
        load(tile + 1);
        const int first_column = (first_tile + tile) * KEYS;
        if (!visible.template any<KEYS>(first_column)) continue;
        const Shared k_tile = stages + tile % 2 * 2 * TILE, v_tile = k_tile + TILE;
        Sums<M, KEYS / 8> p, ds;
        product_of_rows(p, q_rows, k_tile);
        product_of_rows(ds, do_rows, v_tile);
        if (IS_CAPPED) cap_backward(p, ds, scale / cap, [&](int m, int, int i) { return row_delta[m][i / 2]; });
        visible.mask(p, first_column);
        softmax_again(p, IS_CAPPED ? cap : scale, [&](int m, int, int i) { return row_lse[m][i / 2]; });
        softmax_backward(p, ds, [&](int m, int, int i) { return IS_CAPPED ? 0 : row_delta[m][i / 2]; });
        Operand<M, KEYS / 16> operand;
        round_to_operand(operand, ds);
        add_product<HEAD>(sums, operand, k_tile);
    }
    multiply(sums, scale);
    const long long row = first_query + warp_row;
    store_rows<HEAD>(sums, q_tile + warp_row * HEAD * 2, dq + row * dq_stride + head * HEAD, dq_stride, tokens - row);
}

// A warp has 16 * M keys and, where the sums of whole rows are too many for its registers, one of SPLIT parts of their columns;
// the scores are then computed SPLIT times. Its keys are kept in registers where these suffice.
//
// A block has one of `parts` parts of the query heads that share its keys. Where these are more than one, dk and dv are f32, and the sums
// of each part, [parts, tokens, *_stride], which `join_parts` adds up.
template <int HEAD, int KEYS, int QUERIES, int WARPS, int SPLIT, bool IS_KEPT>
INLINE void backward_kv(const Half *q, const Half *k, const Half *v, const Half *d_o, const float *lse, const float *delta,
                        const int *order, const int *last_query, Half *dk, Half *dv, int q_stride, int k_stride, int v_stride,
                        int do_stride, int dk_stride, int dv_stride, int tokens, int num_heads, int num_kv_heads, float scale,
                        float cap) {
    constexpr int M = KEYS * SPLIT / WARPS / 16, N = HEAD / 8 / SPLIT, THREADS = WARPS * WARP, TILE = QUERIES * HEAD * 2;
    const Shared k_tile = dynamic_shared(), v_tile = k_tile + KEYS * HEAD * 2, stages = v_tile + KEYS * HEAD * 2;
    const Shared row_stages = stages + 4 * TILE;
    // Heads of a part, which are as many in each.
    const int parts = gridDim.x / num_kv_heads, group = num_heads / gridDim.x, kv_head = blockIdx.x / parts;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first_key = first_row_of_block<KEYS, false>(order), warp_row = warp / SPLIT * 16 * M, first_chunk = warp % SPLIT * N;
    if (first_key >= tokens) return;
    const int first_tile = first_key / QUERIES;
    const int num_tiles = last_query[min(first_key + KEYS, tokens) - 1] / QUERIES - first_tile + 1;
    k += kv_head * HEAD, v += kv_head * HEAD;

    // Tiles of all queries of the part's first head, of its second, ...
    auto next_of = [&](int tile) { return tile + 1 < first_tile + num_tiles ? tile + 1 : first_tile; };
    int next_head = blockIdx.x * group, next_tile = first_tile;
    auto load_next = [&](int stage) {
        if (next_head < (blockIdx.x + 1) * group) {
            const Shared to = stages + stage * 2 * TILE;
            const int first_query = next_tile * QUERIES, query = first_query + threadIdx.x % QUERIES;
            load_tile<HEAD, QUERIES, THREADS>(to, q + next_head * HEAD, q_stride, first_query, tokens);
            load_tile<HEAD, QUERIES, THREADS>(to + TILE, d_o + next_head * HEAD, do_stride, first_query, tokens);
            if (threadIdx.x < 2 * QUERIES)
                copy_4_bytes(row_stages + stage * 8 * QUERIES + threadIdx.x * 4,
                             (threadIdx.x < QUERIES ? lse : delta) + (long long)next_head * tokens + query, query < tokens);
            next_tile = next_of(next_tile);
            next_head += next_tile == first_tile;
        }
        commit_copies();
    };
    load_tile<HEAD, KEYS, THREADS>(k_tile, k, k_stride, first_key, tokens);
    load_tile<HEAD, KEYS, THREADS>(v_tile, v, v_stride, first_key, tokens);
    load_next(0);

    Visible<M> visible;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int key = first_key + warp_row + i * 8 + lane / 4;
        visible.low[i / 2][i % 2] = key;
        visible.high[i / 2][i % 2] = key < tokens ? last_query[key] : key;
    }

    if (IS_KEPT) {
        wait_for_copies<0>();
        __syncthreads();
    }
    const Rows<HEAD, M, IS_KEPT> k_rows(k_tile + warp_row * HEAD * 2);
    const Rows<HEAD, M, false> v_rows(v_tile + warp_row * HEAD * 2);
    Sums<M, N> dk_sums = {}, dv_sums = {};
    for (int i = 0, tile = first_tile; i < group * num_tiles; i++, tile = next_of(tile)) {
        const int stage = i % 2, first_column = tile * QUERIES;
        wait_for_copies<0>();
        __syncthreads();
        load_next(1 - stage);
        if (!visible.template any<QUERIES>(first_column)) continue;
        const Shared q_tile = stages + stage * 2 * TILE, do_tile = q_tile + TILE;
        const Shared row_lse = row_stages + stage * 8 * QUERIES + lane % 4 * 8, row_delta = row_lse + 4 * QUERIES;
        Sums<M, QUERIES / 8> p, ds;
        product_of_rows(p, k_rows, q_tile);
        product_of_rows(ds, v_rows, do_tile);
        const auto delta_of = [&](int, int n, int i) { return load_shared(row_delta + n * 32 + i % 2 * 4); };
        if (IS_CAPPED) cap_backward(p, ds, scale / cap, delta_of);
        visible.mask(p, first_column);
        softmax_again(p, IS_CAPPED ? cap : scale, [&](int, int n, int i) { return load_shared(row_lse + n * 32 + i % 2 * 4); });
        softmax_backward(p, ds, [&](int m, int n, int i) { return IS_CAPPED ? 0 : delta_of(m, n, i); });
        Operand<M, QUERIES / 16> operand;
        round_to_operand(operand, p);
        add_product<HEAD>(dv_sums, operand, do_tile, first_chunk);
        round_to_operand(operand, ds);
        add_product<HEAD>(dk_sums, operand, q_tile, first_chunk);
    }
    multiply(dk_sums, scale);
    const long long row = first_key + warp_row;
    if (parts > 1) {
        const long long at = blockIdx.x % parts * (long long)tokens + row, column = kv_head * HEAD + first_chunk * 8;
        store_f32(dk_sums, (float *)dk + at * dk_stride + column, dk_stride, tokens - row);
        store_f32(dv_sums, (float *)dv + at * dv_stride + column, dv_stride, tokens - row);
        return;
    }
    // Other warps may still read the rows of this one.
    if (SPLIT > 1) __syncthreads();
    dk += row * dk_stride + kv_head * HEAD, dv += row * dv_stride + kv_head * HEAD;
    store_rows<HEAD>(dk_sums, k_tile + warp_row * HEAD * 2, dk, dk_stride, tokens - row, first_chunk);
    store_rows<HEAD>(dv_sums, v_tile + warp_row * HEAD * 2, dv, dv_stride, tokens - row, first_chunk);
}

// delta[head, t] = sum of do * o over the head's columns; a warp for each.
// Grid: (tokens, num_heads / 4 upwards); block: 128.
extern "C" __global__ void __launch_bounds__(128) NAME(delta)(const Half *d_o, const Half *o, float *delta, int do_stride,
                                                              int o_stride, int tokens, int num_heads, int head_dim) {
    const int head = blockIdx.y * 4 + threadIdx.x / WARP, token = blockIdx.x, lane = threadIdx.x % WARP;
    if (head >= num_heads) return;
    const unsigned *x = (const unsigned *)(d_o + (long long)token * do_stride + head * head_dim);
    const unsigned *y = (const unsigned *)(o + (long long)token * o_stride + head * head_dim);
    float sum = 0;
    for (int i = lane; i < head_dim / 2; i += WARP) sum += low_half(x[i]) * low_half(y[i]) + high_half(x[i]) * high_half(y[i]);
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) delta[(long long)head * tokens + token] = sum;
}

// d, [tokens, width], the sum of its parts, f32 [parts, tokens, width], in their order. Grid: tokens * width / 512 upwards, block: 128.
extern "C" __global__ void __launch_bounds__(128) NAME(join_parts)(const float *parts_of, Half *d, int d_stride, int tokens, int width,
                                                                   int parts) {
    const long long size = (long long)tokens * width, i = ((long long)blockIdx.x * 128 + threadIdx.x) * 4;
    if (i >= size) return;
    float4 sum = *(const float4 *)(parts_of + i);
    for (int part = 1; part < parts; part++) {
        const float4 x = *(const float4 *)(parts_of + part * size + i);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    *(uint2 *)(d + i / width * d_stride + i % width) = make_uint2(half_pair(sum.x, sum.y), half_pair(sum.z, sum.w));
}

// Entry points by head size. Block: 32 * WARPS. Grid, of tiles as many as fill those of `order`, and dynamic shared memory in bytes:
//   (small_)forward   (num_heads, tiles of queries)      2 * HEAD * (QUERIES + STAGES * KEYS)
//   backward_q   (num_heads, tiles of queries)           4 * HEAD * (QUERIES + 2 * KEYS)
//   backward_kv  (num_kv_heads * parts, tiles of keys)   4 * HEAD * (KEYS + 2 * QUERIES) + 16 * QUERIES
#define FORWARD_AS(KERNEL, HEAD, QUERIES, KEYS, WARPS, STAGES)                                                                   \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(KERNEL)(                                                       \
        const Half *q, const Half *k, const Half *v, const int *order, const int *first_key, Half *o, float *lse, int q_stride,  \
        int k_stride, int v_stride, int o_stride, int tokens, int num_heads, int num_kv_heads, float scale, float cap) {         \
        forward<HEAD, QUERIES, KEYS, WARPS, STAGES>(q, k, v, order, first_key, o, lse, q_stride, k_stride, v_stride, o_stride,   \
                                                    tokens, num_heads, num_kv_heads, scale, cap);                                \
    }
#define FORWARD(HEAD, ...) FORWARD_AS(forward_##HEAD, HEAD, __VA_ARGS__)
// Of which more blocks fit into the 100 KB that a multiprocessor of sm_86, 89 and 120 has.
#define SMALL_FORWARD(HEAD, ...) FORWARD_AS(small_forward_##HEAD, HEAD, __VA_ARGS__)
#define BACKWARD_Q(HEAD, QUERIES, KEYS, WARPS, IS_KEPT)                                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(backward_q_##HEAD)(                                            \
        const Half *q, const Half *k, const Half *v, const Half *d_o, const float *lse, const float *delta, const int *order,    \
        const int *first_key, Half *dq, int q_stride, int k_stride, int v_stride, int do_stride, int dq_stride, int tokens,      \
        int num_heads, int num_kv_heads, float scale, float cap) {                                                               \
        backward_q<HEAD, QUERIES, KEYS, WARPS, IS_KEPT>(q, k, v, d_o, lse, delta, order, first_key, dq, q_stride, k_stride,      \
                                                        v_stride, do_stride, dq_stride, tokens, num_heads, num_kv_heads, scale,  \
                                                        cap);                                                                    \
    }
#define BACKWARD_KV(HEAD, KEYS, QUERIES, WARPS, SPLIT, IS_KEPT)                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(backward_kv_##HEAD)(                                           \
        const Half *q, const Half *k, const Half *v, const Half *d_o, const float *lse, const float *delta, const int *order,    \
        const int *last_query, Half *dk, Half *dv, int q_stride, int k_stride, int v_stride, int do_stride, int dk_stride,       \
        int dv_stride, int tokens, int num_heads, int num_kv_heads, float scale, float cap) {                                    \
        backward_kv<HEAD, KEYS, QUERIES, WARPS, SPLIT, IS_KEPT>(q, k, v, d_o, lse, delta, order, last_query, dk, dv, q_stride,   \
                                                                k_stride, v_stride, do_stride, dk_stride, dv_stride, tokens,     \
                                                                num_heads, num_kv_heads, scale, cap);                            \
    }

#if __CUDA_ARCH__ >= 800
FORWARD(32, 128, 64, 4, 4)
FORWARD(64, 128, 64, 4, 4)
FORWARD(96, 128, 64, 4, 3)
FORWARD(128, 128, 64, 4, 3)
FORWARD(256, 64, 64, 4, 2)
SMALL_FORWARD(96, 64, 64, 4, 2)
SMALL_FORWARD(128, 64, 64, 4, 2)

BACKWARD_Q(32, 128, 32, 4, false)
BACKWARD_Q(64, 128, 32, 4, false)
BACKWARD_Q(96, 128, 32, 4, false)
BACKWARD_Q(128, 128, 32, 8, true)
BACKWARD_Q(256, 64, 16, 4, false)

BACKWARD_KV(32, 128, 32, 4, 1, false)
BACKWARD_KV(64, 128, 32, 4, 1, false)
BACKWARD_KV(96, 128, 64, 8, 1, false)
BACKWARD_KV(128, 128, 32, 8, 1, true)
BACKWARD_KV(256, 64, 16, 8, 2, false)
#else
FORWARD(32, 128, 64, 4, 2)
FORWARD(64, 128, 64, 4, 2)
FORWARD(96, 64, 32, 4, 2)
FORWARD(128, 64, 32, 4, 2)
FORWARD(256, 64, 32, 4, 2)

BACKWARD_Q(32, 128, 32, 4, false)
BACKWARD_Q(64, 64, 32, 4, false)
BACKWARD_Q(96, 64, 32, 4, false)
BACKWARD_Q(128, 64, 32, 4, false)
BACKWARD_Q(256, 32, 16, 2, false)

BACKWARD_KV(32, 128, 32, 4, 1, false)
BACKWARD_KV(64, 64, 16, 4, 1, false)
BACKWARD_KV(96, 64, 32, 4, 1, false)
BACKWARD_KV(128, 64, 16, 4, 1, false)
BACKWARD_KV(256, 16, 16, 4, 4, false)
#endif
