// The attention of attention.cu for sm_90a, after the plan of FlashAttention-3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608): one
// warpgroup copies, two compute, 64 rows each. Tensors, spans, roundings and results are those of attention.cu; every sum has one order.
//
// q, k, v and do come as tensor maps of [tokens, heads * HEAD] bf16: rank 2, sizes (heads * HEAD, tokens), the row's stride in bytes, boxes
// of (64, 64) with the swizzle of 128 bytes; of (32, 64) with that of 64 bytes for HEAD 96. What lies behind the rows is read as zeros.
#include "attention.cuh"
#include "hopper.cuh"

// Threads, and rows of a block's tile: 64 of each warpgroup that computes.
enum { THREADS = 3 * WARPGROUP, ROWS = 128 };
// bar.sync 0 is __syncthreads.
enum { TURNS = 1, OWN_ROWS = 3 };

// Writes the sums of a warpgroup by way of `tile`, 64 rows of its own that none of its warps reads any more after this.
template <int HEAD> INLINE void store_tile(const Sums<1, HEAD / 8> &sums, Shared tile, bf16 *to, int stride, int num_rows) {
    const int warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    store_rows<HEAD>(sums, tile + warp_row * HEAD * 2, to + (long long)warp_row * stride, stride, num_rows - warp_row);
}

template <int HEAD, int KEYS, int SLOTS>
INLINE void forward(const TensorMap &q, const TensorMap &k, const TensorMap &v, const int *first_key, bf16 *o, float *lse, int o_stride,
                    int tokens, int num_heads, int num_kv_heads, float scale) {
    constexpr int OWN = 64 * HEAD * 2, TILE = KEYS * HEAD * 2;
    const Shared q_tiles = dynamic_tiles(), tiles = q_tiles + 2 * OWN, barriers = tiles + SLOTS * TILE, q_full = barriers + SLOTS * 16;
    const int head = blockIdx.x, warpgroup = same_in_warp(threadIdx.x / WARPGROUP);
    // The last tiles see most keys: they begin.
    const int first_query = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const int first_tile = same_in_warp(first_key[first_query]) / KEYS;
    const int num_tiles = (min(first_query + ROWS, tokens) - 1) / KEYS - first_tile + 1;
    Ring<SLOTS> ring(barriers);
    if (threadIdx.x == 0) {
        ring.make(1, 2 * WARPGROUP / WARP);
        make_barrier(q_full, 1);
        show_barriers();
    }
    __syncthreads();

    if (warpgroup == 2) {
        give_registers<24>();
        if (threadIdx.x % WARPGROUP) return;
        const int kv_column = head / (num_heads / num_kv_heads) * HEAD;
        arrive_and_expect(q_full, 2 * OWN);
        load_boxes<HEAD, 64>(q_tiles, q, head * HEAD, first_query, q_full);
        load_boxes<HEAD, 64>(q_tiles + OWN, q, head * HEAD, first_query + 64, q_full);
        auto load = [&](const TensorMap &from, int tile) {
            ring.wait_until_empty();
            arrive_and_expect(ring.full(), TILE);
            load_boxes<HEAD, KEYS>(tiles + ring.slot * TILE, from, kv_column, (first_tile + tile) * KEYS, ring.full());
            ring.next();
        };
        // In the order in which they are wanted.
        load(k, 0);
        for (int tile = 1; tile < num_tiles; tile++) load(k, tile), load(v, tile - 1);
        load(v, num_tiles - 1);
        return;
    }

    take_registers<240>();
    const Shared q_tile = q_tiles + warpgroup * OWN;
    const int first_row = first_query + threadIdx.x / WARP * 16;
    const Visible<1> visible = visible_keys<1>(first_key, first_row, tokens);
    const u64 q_rows = descriptor<HEAD, 64>(q_tile);
    auto full_tile = [&]() {
        ring.wait_until_full();
        return descriptor<HEAD, KEYS>(tiles + ring.slot * TILE);
    };
    auto release = [&](Shared empty) {
        if (threadIdx.x % WARP == 0) arrive(empty);
    };
    Sums<1, HEAD / 8> out = {};
    Sums<1, KEYS / 8> p;
    Operand<1, KEYS / 16> operand;
    float row_max[1][2] = {{-INFINITY, -INFINITY}}, row_sum[1][2] = {}, shrink[1][2];

    auto softmax = [&](int tile) {
        visible.mask(p, (first_tile + tile) * KEYS);
        add_to_softmax(p, row_max, row_sum, shrink, scale * LOG2_E);
    };

    wait_for(q_full, 0);
    const u64 first_keys = full_tile();
    begin_products();
    start_product_of_rows<HEAD>(p, q_rows, first_keys);
    wait_for_products<0>();
    hold(p);
    release(ring.empty());
    ring.next();
    softmax(0);
    round_to_operand(operand, p);
    // The scores of a tile are computed, and then turned into exponentials, while the values of the one before are summed. One
    // warpgroup's products run beside the other's exponentials: they start theirs in turns.
    if (warpgroup == 1 && num_tiles > 1) arrive_at(TURNS, 2 * WARPGROUP);
    for (int tile = 1; tile < num_tiles; tile++) {
        const u64 k_rows = full_tile();
        const Shared k_empty = ring.empty();
        ring.next();
        sync_threads(TURNS + warpgroup, 2 * WARPGROUP);
        hold(out);
        hold(operand);
        begin_products();
        start_product_of_rows<HEAD>(p, q_rows, k_rows);
        const u64 v_rows = full_tile();
        begin_products();
        start_product<HEAD>(out, operand, v_rows);
        if (warpgroup == 0 || tile + 1 < num_tiles) arrive_at(TURNS + 1 - warpgroup, 2 * WARPGROUP);
        wait_for_products<1>();
        hold(p);
        release(k_empty);
        softmax(tile);
        wait_for_products<0>();
        hold(out);
        release(ring.empty());
        ring.next();
        multiply_rows(out, shrink);
        round_to_operand(operand, p);
    }
    const u64 last_values = full_tile();
    hold(out);
    hold(operand);
    begin_products();
    start_product<HEAD>(out, operand, last_values);
    wait_for_products<0>();
    hold(out);
    finish_softmax(out, row_max, row_sum, scale, lse + (long long)head * tokens, first_row, tokens);
    const long long row = first_query + warpgroup * 64;
    sync_threads(OWN_ROWS + warpgroup, WARPGROUP);
    store_tile<HEAD>(out, q_tile, o + row * o_stride + head * HEAD, o_stride, tokens - row);
}

template <int HEAD, int KEYS, int SLOTS>
INLINE void backward_q(const TensorMap &q, const TensorMap &k, const TensorMap &v, const TensorMap &d_o, const float *lse,
                       const float *delta, const int *first_key, bf16 *dq, int dq_stride, int tokens, int num_heads, int num_kv_heads,
                       float scale) {
    constexpr int OWN = 64 * HEAD * 2, TILE = KEYS * HEAD * 2;
    const Shared q_tiles = dynamic_tiles(), do_tiles = q_tiles + 2 * OWN, tiles = do_tiles + 2 * OWN, barriers = tiles + SLOTS * TILE;
    const Shared q_full = barriers + SLOTS * 16;
    const int head = blockIdx.x, warpgroup = same_in_warp(threadIdx.x / WARPGROUP);
    const int first_query = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const int first_tile = same_in_warp(first_key[first_query]) / KEYS;
    const int num_tiles = (min(first_query + ROWS, tokens) - 1) / KEYS - first_tile + 1;
    Ring<SLOTS> ring(barriers);
    if (threadIdx.x == 0) {
        ring.make(1, 2 * WARPGROUP / WARP);
        make_barrier(q_full, 1);
        show_barriers();
    }
    __syncthreads();

    if (warpgroup == 2) {
        give_registers<24>();
        if (threadIdx.x % WARPGROUP) return;
        const int kv_column = head / (num_heads / num_kv_heads) * HEAD;
        arrive_and_expect(q_full, 4 * OWN);
        for (int i = 0; i < 2; i++) {
            load_boxes<HEAD, 64>(q_tiles + i * OWN, q, head * HEAD, first_query + i * 64, q_full);
            load_boxes<HEAD, 64>(do_tiles + i * OWN, d_o, head * HEAD, first_query + i * 64, q_full);
        }
        auto load = [&](const TensorMap &from, int tile) {
            ring.wait_until_empty();
            arrive_and_expect(ring.full(), TILE);
            load_boxes<HEAD, KEYS>(tiles + ring.slot * TILE, from, kv_column, (first_tile + tile) * KEYS, ring.full());
            ring.next();
        };
        for (int tile = 0; tile < num_tiles; tile++) load(k, tile), load(v, tile);
        return;
    }

    take_registers<240>();
    const Shared q_tile = q_tiles + warpgroup * OWN;
    const int first_row = first_query + threadIdx.x / WARP * 16;
    const Visible<1> visible = visible_keys<1>(first_key, first_row, tokens);
    const u64 q_rows = descriptor<HEAD, 64>(q_tile), do_rows = descriptor<HEAD, 64>(do_tiles + warpgroup * OWN);
    float row_lse[2], row_delta[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int query = first_row + i * 8 + threadIdx.x % WARP / 4;
        row_lse[i] = query < tokens ? lse[(long long)head * tokens + query] : 0;
        row_delta[i] = query < tokens ? delta[(long long)head * tokens + query] : 0;
    }
    auto full_tile = [&]() {
        ring.wait_until_full();
        return descriptor<HEAD, KEYS>(tiles + ring.slot * TILE);
    };
    auto release = [&](Shared empty) {
        if (threadIdx.x % WARP == 0) arrive(empty);
    };
    Sums<1, HEAD / 8> sums = {};
    Sums<1, KEYS / 8> p, ds;
    Operand<1, KEYS / 16> operand;

    wait_for(q_full, 0);
    for (int tile = 0; tile < num_tiles; tile++) {
        const u64 k_rows = full_tile();
        const Shared k_empty = ring.empty();
        ring.next();
        begin_products();
        start_product_of_rows<HEAD>(p, q_rows, k_rows);
        const u64 v_rows = full_tile();
        begin_products();
        start_product_of_rows<HEAD>(ds, do_rows, v_rows);
        wait_for_products<1>();
        hold(p);
        visible.mask(p, (first_tile + tile) * KEYS);
        softmax_again(p, scale, [&](int, int, int i) { return row_lse[i / 2]; });
        wait_for_products<0>();
        hold(ds);
        release(ring.empty());
        ring.next();
        softmax_backward(p, ds, [&](int, int, int i) { return row_delta[i / 2]; });
        round_to_operand(operand, ds);
        hold(operand);
        begin_products();
        hold(sums);
        start_product<HEAD>(sums, operand, k_rows);
        wait_for_products<0>();
        hold(sums);
        release(k_empty);
    }
    multiply(sums, scale);
    const long long row = first_query + warpgroup * 64;
    sync_threads(OWN_ROWS + warpgroup, WARPGROUP);
    store_tile<HEAD>(sums, q_tile, dq + row * dq_stride + head * HEAD, dq_stride, tokens - row);
}

// A tile of queries has 64 rows.
template <int HEAD, int QUERIES, int SLOTS>
INLINE void backward_kv(const TensorMap &q, const TensorMap &k, const TensorMap &v, const TensorMap &d_o, const float *lse,
                        const float *delta, const int *last_query, bf16 *dk, bf16 *dv, int dk_stride, int dv_stride, int tokens,
                        int num_heads, int num_kv_heads, float scale) {
    static_assert(QUERIES == 64, "a box");
    constexpr int OWN = 64 * HEAD * 2, TILE = 2 * OWN;
    const Shared k_tiles = dynamic_tiles(), v_tiles = k_tiles + 2 * OWN, tiles = v_tiles + 2 * OWN, row_values = tiles + SLOTS * TILE;
    const Shared barriers = row_values + SLOTS * 8 * QUERIES, kv_full = barriers + SLOTS * 16;
    const int kv_head = blockIdx.x, group = num_heads / num_kv_heads, warpgroup = same_in_warp(threadIdx.x / WARPGROUP);
    const int first_key = blockIdx.y * ROWS, lane = threadIdx.x % WARP, first_tile = first_key / QUERIES;
    const int num_tiles = same_in_warp(last_query[min(first_key + ROWS, tokens) - 1]) / QUERIES - first_tile + 1;
    Ring<SLOTS> ring(barriers);
    if (threadIdx.x == 0) {
        ring.make(1 + WARP, 2 * WARPGROUP / WARP);
        make_barrier(kv_full, 1);
        show_barriers();
    }
    __syncthreads();

    if (warpgroup == 2) {
        give_registers<24>();
        if (threadIdx.x % WARPGROUP >= WARP) return;
        if (lane == 0) {
            arrive_and_expect(kv_full, 4 * OWN);
            for (int i = 0; i < 2; i++) {
                load_boxes<HEAD, 64>(k_tiles + i * OWN, k, kv_head * HEAD, first_key + i * 64, kv_full);
                load_boxes<HEAD, 64>(v_tiles + i * OWN, v, kv_head * HEAD, first_key + i * 64, kv_full);
            }
        }
        for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
            for (int tile = first_tile; tile < first_tile + num_tiles; tile++) {
                ring.wait_until_empty();
                if (lane == 0) {
                    const Shared to = tiles + ring.slot * TILE;
                    arrive_and_expect(ring.full(), TILE);
                    load_boxes<HEAD, 64>(to, q, head * HEAD, tile * QUERIES, ring.full());
                    load_boxes<HEAD, 64>(to + OWN, d_o, head * HEAD, tile * QUERIES, ring.full());
                }
                const Shared to = row_values + ring.slot * 8 * QUERIES + lane * 4;
                const int query = tile * QUERIES + lane;
                const long long at = (long long)head * tokens + query;
#pragma unroll
                for (int i = 0; i < QUERIES; i += WARP) {
                    copy_4_bytes(to + i * 4, lse + at + i, query + i < tokens);
                    copy_4_bytes(to + (QUERIES + i) * 4, delta + at + i, query + i < tokens);
                }
                arrive_after_copies(ring.full());
                ring.next();
            }
        wait_for_copies<0>();
        return;
    }

    take_registers<240>();
    const Shared k_tile = k_tiles + warpgroup * OWN, v_tile = v_tiles + warpgroup * OWN;
    const u64 k_rows = descriptor<HEAD, 64>(k_tile), v_rows = descriptor<HEAD, 64>(v_tile);
    Visible<1> visible;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int key = first_key + threadIdx.x / WARP * 16 + i * 8 + lane / 4;
        visible.low[0][i] = key;
        visible.high[0][i] = key < tokens ? last_query[key] : key;
    }
    auto release = [&](Shared empty) {
        if (lane == 0) arrive(empty);
    };
    Sums<1, HEAD / 8> dk_sums = {}, dv_sums = {};
    Sums<1, QUERIES / 8> p, ds;
    Operand<1, QUERIES / 16> p_operand, ds_operand;

    wait_for(kv_full, 0);
    // Tiles of all queries of the group's first head, of its second, ...
    for (int i = 0, tile = 0; i < group * num_tiles; i++) {
        ring.wait_until_full();
        const Shared q_tile = tiles + ring.slot * TILE, row_lse = row_values + ring.slot * 8 * QUERIES + lane % 4 * 8;
        const u64 q_rows = descriptor<HEAD, 64>(q_tile), do_rows = descriptor<HEAD, 64>(q_tile + OWN);
        begin_products();
        start_product_of_rows<HEAD>(p, k_rows, q_rows);
        start_product_of_rows<HEAD>(ds, v_rows, do_rows);
        wait_for_products<1>();
        hold(p);
        visible.mask(p, (first_tile + tile) * QUERIES);
        softmax_again(p, scale, [&](int, int n, int i) { return load_shared(row_lse + n * 32 + i % 2 * 4); });
        round_to_operand(p_operand, p);
        hold(p_operand);
        begin_products();
        start_product<HEAD>(dv_sums, p_operand, do_rows);
        wait_for_products<1>();
        hold(ds);
        softmax_backward(p, ds, [&](int, int n, int i) { return load_shared(row_lse + 4 * QUERIES + n * 32 + i % 2 * 4); });
        round_to_operand(ds_operand, ds);
        hold(ds_operand);
        begin_products();
        start_product<HEAD>(dk_sums, ds_operand, q_rows);
        if (++tile == num_tiles) tile = 0;
        wait_for_products<0>();
        hold(dv_sums);
        hold(dk_sums);
        release(ring.empty());
        ring.next();
    }
    multiply(dk_sums, scale);
    const long long row = first_key + warpgroup * 64;
    sync_threads(OWN_ROWS + warpgroup, WARPGROUP);
    store_tile<HEAD>(dk_sums, k_tile, dk + row * dk_stride + kv_head * HEAD, dk_stride, tokens - row);
    store_tile<HEAD>(dv_sums, v_tile, dv + row * dv_stride + kv_head * HEAD, dv_stride, tokens - row);
}

// Entry points by head size. Block: 384. Grid and dynamic shared memory in bytes:
//   forward      (num_heads, tokens / 128 upwards)      2 * HEAD * (128 + SLOTS * KEYS) + 16 * SLOTS + 8
//   backward_q   (num_heads, tokens / 128 upwards)      2 * HEAD * (256 + SLOTS * KEYS) + 16 * SLOTS + 8
//   backward_kv  (num_kv_heads, tokens / 128 upwards)   2 * HEAD * (256 + 2 * SLOTS * QUERIES) + (16 + 8 * QUERIES) * SLOTS + 8
#define MAP const __grid_constant__ TensorMap
#define FORWARD(HEAD, KEYS, SLOTS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper_forward_##HEAD(                                    \
        MAP q, MAP k, MAP v, const int *first_key, bf16 *o, float *lse, int o_stride, int tokens, int num_heads,                 \
        int num_kv_heads, float scale) {                                                                                         \
        forward<HEAD, KEYS, SLOTS>(q, k, v, first_key, o, lse, o_stride, tokens, num_heads, num_kv_heads, scale);                \
    }
#define BACKWARD_Q(HEAD, KEYS, SLOTS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper_backward_q_##HEAD(                                 \
        MAP q, MAP k, MAP v, MAP d_o, const float *lse, const float *delta, const int *first_key, bf16 *dq, int dq_stride,       \
        int tokens, int num_heads, int num_kv_heads, float scale) {                                                              \
        backward_q<HEAD, KEYS, SLOTS>(q, k, v, d_o, lse, delta, first_key, dq, dq_stride, tokens, num_heads, num_kv_heads,       \
                                      scale);                                                                                    \
    }
#define BACKWARD_KV(HEAD, QUERIES, SLOTS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper_backward_kv_##HEAD(                                \
        MAP q, MAP k, MAP v, MAP d_o, const float *lse, const float *delta, const int *last_query, bf16 *dk, bf16 *dv,           \
        int dk_stride, int dv_stride, int tokens, int num_heads, int num_kv_heads, float scale) {                                \
        backward_kv<HEAD, QUERIES, SLOTS>(q, k, v, d_o, lse, delta, last_query, dk, dv, dk_stride, dv_stride, tokens, num_heads, \
                                          num_kv_heads, scale);                                                                  \
    }

FORWARD(64, 128, 4)
FORWARD(96, 128, 4)
FORWARD(128, 128, 4)
FORWARD(256, 64, 4)

BACKWARD_Q(64, 128, 4)
BACKWARD_Q(96, 128, 4)
BACKWARD_Q(128, 128, 4)

BACKWARD_KV(64, 64, 4)
BACKWARD_KV(96, 64, 4)
BACKWARD_KV(128, 64, 4)
