// The attention of attention.cu for sm_90a, after the plan of FlashAttention-3 (Shah et al. 2024,
// https://arxiv.org/abs/2407.08608): one warpgroup of a block copies, two compute, 64 rows each. Tensors, spans, roundings and
// results are those of attention.cu; every sum has one order, whatever the grid.
//
// q, k, v and do come as tensor maps of rank 2 over bf16: sizes (heads * HEAD, tokens), the row's stride in bytes, boxes of (64, 64)
// with the swizzle of 128 bytes; for HEAD 96 of (32, 64) with that of 64 bytes. Rows behind the last are read as zeros. The other
// tensors are as there: rows of multiples of 8 elements, pointers of 16 bytes, lse and delta f32 [num_heads, tokens]; `order`, the tiles of
// 128 rows as blocks take them, int [tokens / 128 upwards]; and the parts of dk and dv.
#include "attention.cuh"
#include "hopper.cuh"

// Threads, and rows of a block's tile: 64 of each warpgroup that computes.
enum { THREADS = 3 * WARPGROUP, ROWS = 128 };
// bar.sync 0 is __syncthreads.
enum { TURNS = 1, OWN_ROWS = 3 };

template <int N> INLINE int bits_of(const Sums<1, N> &x) {
    int bits = 0;
#pragma unroll
    for (int i = 0; i < N * 4; i++) bits |= __float_as_int(x[0][i / 4][i % 4]);
    return bits;
}

// Writes the sums of a warpgroup by way of `tile`, 64 rows that are its own.
template <int HEAD> INLINE void store_tile(const Sums<1, HEAD / 8> &sums, Shared tile, Half *to, int stride, int num_rows) {
    const int warp_row = threadIdx.x % WARPGROUP / WARP * 16;
    store_rows<HEAD>(sums, tile + warp_row * HEAD * 2, to + (long long)warp_row * stride, stride, num_rows - warp_row);
}

// What a block computes at a time that goes by queries: a tile of them, of one head.
struct Item {
    int head, first_query, first_tile, num_tiles;
};

// Calls `run` for the items of this block. They are dealt out in `order`, the tiles of queries from those that see most keys on, in
// rounds that go to and fro: blocks get much the same work.
template <int KEYS, class Run> INLINE void for_items(const int *order, const int *first_key, int tokens, int num_heads, Run run) {
    const int num_query_tiles = (tokens + ROWS - 1) / ROWS, num_items = num_heads * num_query_tiles;
    for (int round = 0;; round++) {
        const int i = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (i >= num_items) return;
        Item item = {i % num_heads, same_in_warp(order[i / num_heads]) * ROWS};
        item.first_tile = same_in_warp(first_key[item.first_query]) / KEYS;
        item.num_tiles = (min(item.first_query + ROWS, tokens) - 1) / KEYS - item.first_tile + 1;
        run(item);
    }
}

template <int HEAD, int KEYS, int SLOTS>
INLINE void forward(const TensorMap &q, const TensorMap &k, const TensorMap &v, const int *order, const int *first_key, Half *o,
                    float *lse, int o_stride, int tokens, int num_heads, int num_kv_heads, float scale) {
    constexpr int OWN = 64 * HEAD * 2, TILE = KEYS * HEAD * 2;
    const Shared q_tiles = dynamic_tiles(), o_tiles = q_tiles + 2 * OWN, tiles = o_tiles + 2 * OWN;
    const Shared barriers = tiles + SLOTS * TILE;
    const int warpgroup = same_in_warp(threadIdx.x / WARPGROUP);
    Ring<SLOTS> ring(barriers);
    // Of the queries of each warpgroup.
    Ring<1> q_ring(barriers + (SLOTS + warpgroup % 2) * 16);
    if (threadIdx.x == 0) {
        ring.make(1, 2 * WARPGROUP / WARP);
        for (int i = 0; i < 2; i++) Ring<1>(barriers + (SLOTS + i) * 16).make(1, WARPGROUP / WARP);
        show_barriers();
    }
    __syncthreads();

    if (warpgroup == 2) {
        give_registers<24>();
        if (threadIdx.x % WARPGROUP) return;
        for_items<KEYS>(order, first_key, tokens, num_heads, [&](const Item &item) {
            const int column = item.head * HEAD, kv_column = item.head / (num_heads / num_kv_heads) * HEAD;
            auto load = [&](const TensorMap &from, int tile) {
                ring.wait_until_empty();
                arrive_and_expect(ring.full(), TILE);
                load_boxes<HEAD, KEYS>(tiles + ring.slot * TILE, from, kv_column, (item.first_tile + tile) * KEYS, ring.full());
                ring.next();
            };
            // In the order in which they are wanted.
            load(k, 0);
            for (int i = 0; i < 2; i++) {
                const Shared full = barriers + (SLOTS + i) * 16;
                wait_for(full + 8, q_ring.phase ^ 1);
                arrive_and_expect(full, OWN);
                load_boxes<HEAD, 64>(q_tiles + i * OWN, q, column, item.first_query + i * 64, full);
            }
            q_ring.next();
            for (int tile = 1; tile < item.num_tiles; tile++) load(k, tile), load(v, tile - 1);
            load(v, item.num_tiles - 1);
        });
        return;
    }

    take_registers<240>();
    const Shared q_tile = q_tiles + warpgroup * OWN;
    const u64 q_rows = descriptor<HEAD, 64>(q_tile);
    auto full_tile = [&]() {
        ring.wait_until_full();
        return descriptor<HEAD, KEYS>(tiles + ring.slot * TILE);
    };
    auto release = [&](Shared empty) {
        if (threadIdx.x % WARP == 0) arrive(empty);
    };
    for_items<KEYS>(order, first_key, tokens, num_heads, [&](const Item &item) {
        const int first_row = item.first_query + threadIdx.x / WARP * 16, num_tiles = item.num_tiles;
        const Visible<1> visible = visible_keys<1>(first_key, first_row, tokens);
        Sums<1, HEAD / 8> out = {};
        Sums<1, KEYS / 8> p;
        Operand<1, KEYS / 16> operand;
        float row_max[1][2] = {{-INFINITY, -INFINITY}}, row_sum[1][2] = {}, shrink[1][2];
        auto softmax = [&](int tile) {
            visible.mask(p, (item.first_tile + tile) * KEYS);
            add_to_softmax(p, row_max, row_sum, shrink, scale * LOG2_E);
        };

        auto leave_out = [&]() {
            ring.wait_until_full();
            __syncwarp();
            release(ring.empty());
            ring.next();
        };

        // The second warpgroup leaves out tiles that only the first one sees.
        const int num_left_out = same_in_warp(first_key[min(item.first_query + 64, tokens - 1)]) / KEYS - item.first_tile;
        const int first_tile = warpgroup == 0 ? 0 : num_left_out;
        for (int i = 0; i < 2 * first_tile - 1; i++) leave_out();
        q_ring.wait_until_full();
        const u64 first_keys = full_tile();
        begin_products();
        start_product_of_rows<HEAD>(p, q_rows, first_keys);
        wait_for_products<0>();
        hold(p);
        release(ring.empty());
        ring.next();
        if (first_tile > 0) leave_out();
        if (first_tile + 1 == num_tiles) release(q_ring.empty());
        softmax(first_tile);
        round_to_operand(operand, p);
        // The scores of a tile are computed, and then turned into exponentials, while the values of the one before are summed. One
        // warpgroup's products run beside the other's exponentials: they start theirs in turns, if they have as many.
        const bool is_in_turns = num_left_out == 0;
        if (is_in_turns && warpgroup == 1 && num_tiles > 1) arrive_at(TURNS, 2 * WARPGROUP);
        for (int tile = first_tile + 1; tile < num_tiles; tile++) {
            const u64 k_rows = full_tile();
            const Shared k_empty = ring.empty();
            ring.next();
            if (is_in_turns) sync_threads(TURNS + warpgroup, 2 * WARPGROUP);
            hold(out);
            hold(operand);
            begin_products();
            start_product_of_rows<HEAD>(p, q_rows, k_rows);
            const u64 v_rows = full_tile();
            begin_products();
            start_product<HEAD>(out, operand, v_rows);
            if (is_in_turns && (warpgroup == 0 || tile + 1 < num_tiles)) arrive_at(TURNS + 1 - warpgroup, 2 * WARPGROUP);
            wait_for_products<1>();
            hold(p);
            release(k_empty);
            if (tile + 1 == num_tiles) release(q_ring.empty());
            softmax(tile);
            wait_behind(__float_as_int(row_sum[0][0]) | __float_as_int(row_sum[0][1]), q_tile);
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
        release(ring.empty());
        ring.next();
        q_ring.next();
        finish_softmax(out, row_max, row_sum, scale, lse + (long long)item.head * tokens, first_row, tokens);
        const long long row = item.first_query + warpgroup * 64;
        store_tile<HEAD>(out, o_tiles + warpgroup * OWN, o + row * o_stride + item.head * HEAD, o_stride, tokens - row);
    });
}

template <int HEAD, int KEYS, int SLOTS>
INLINE void backward_q(const TensorMap &q, const TensorMap &k, const TensorMap &v, const TensorMap &d_o, const float *lse,
                       const float *delta, const int *order, const int *first_key, Half *dq, int dq_stride, int tokens,
                       int num_heads, int num_kv_heads, float scale) {
    static_assert(KEYS == ROWS, "both warpgroups see the last tile");
    constexpr int OWN = 64 * HEAD * 2, TILE = KEYS * HEAD * 2;
    // [warpgroup][q, do]
    const Shared row_tiles = dynamic_tiles(), dq_tiles = row_tiles + 4 * OWN, tiles = dq_tiles + 2 * OWN;
    const Shared barriers = tiles + SLOTS * TILE;
    const int warpgroup = same_in_warp(threadIdx.x / WARPGROUP);
    Ring<SLOTS> ring(barriers);
    // Of the queries of each warpgroup, with do.
    Ring<1> q_ring(barriers + (SLOTS + warpgroup % 2) * 16);
    if (threadIdx.x == 0) {
        ring.make(1, 2 * WARPGROUP / WARP);
        for (int i = 0; i < 2; i++) Ring<1>(barriers + (SLOTS + i) * 16).make(1, WARPGROUP / WARP);
        show_barriers();
    }
    __syncthreads();

    if (warpgroup == 2) {
        give_registers<24>();
        if (threadIdx.x % WARPGROUP) return;
        for_items<KEYS>(order, first_key, tokens, num_heads, [&](const Item &item) {
            const int column = item.head * HEAD, kv_column = item.head / (num_heads / num_kv_heads) * HEAD;
            auto load = [&](const TensorMap &from, int tile) {
                ring.wait_until_empty();
                arrive_and_expect(ring.full(), TILE);
                load_boxes<HEAD, KEYS>(tiles + ring.slot * TILE, from, kv_column, (item.first_tile + tile) * KEYS, ring.full());
                ring.next();
            };
            load(k, 0);
            for (int i = 0; i < 2; i++) {
                const Shared full = barriers + (SLOTS + i) * 16, to = row_tiles + i * 2 * OWN;
                wait_for(full + 8, q_ring.phase ^ 1);
                arrive_and_expect(full, 2 * OWN);
                load_boxes<HEAD, 64>(to, q, column, item.first_query + i * 64, full);
                load_boxes<HEAD, 64>(to + OWN, d_o, column, item.first_query + i * 64, full);
            }
            q_ring.next();
            load(v, 0);
            for (int tile = 1; tile < item.num_tiles; tile++) load(k, tile), load(v, tile);
        });
        return;
    }

    take_registers<240>();
    const Shared q_tile = row_tiles + warpgroup * 2 * OWN;
    const u64 q_rows = descriptor<HEAD, 64>(q_tile), do_rows = descriptor<HEAD, 64>(q_tile + OWN);
    auto full_tile = [&]() {
        ring.wait_until_full();
        return descriptor<HEAD, KEYS>(tiles + ring.slot * TILE);
    };
    auto release = [&](Shared empty) {
        if (threadIdx.x % WARP == 0) arrive(empty);
    };
    for_items<KEYS>(order, first_key, tokens, num_heads, [&](const Item &item) {
        const int first_row = item.first_query + threadIdx.x / WARP * 16;
        const Visible<1> visible = visible_keys<1>(first_key, first_row, tokens);
        float row_lse[2], row_delta[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int query = first_row + i * 8 + threadIdx.x % WARP / 4;
            row_lse[i] = query < tokens ? lse[(long long)item.head * tokens + query] : 0;
            row_delta[i] = query < tokens ? delta[(long long)item.head * tokens + query] : 0;
        }
        Sums<1, HEAD / 8> sums = {};
        Sums<1, KEYS / 8> p, ds;
        Operand<1, KEYS / 16> operand;

        auto leave_out = [&]() {
            ring.wait_until_full();
            __syncwarp();
            release(ring.empty());
            ring.next();
        };

        // Tiles that only the other warpgroup sees.
        int tile = same_in_warp(first_key[min(item.first_query + warpgroup * 64, tokens - 1)]) / KEYS - item.first_tile;
        for (int i = 0; i < 2 * tile; i++) leave_out();
        q_ring.wait_until_full();
        Shared last_k_empty = 0;
        // It runs at least once, as ptxas must know: else products that are under way from one tile to the next wait for each other.
        do {
            const u64 k_rows = full_tile();
            const Shared k_empty = ring.empty();
            ring.next();
            begin_products();
            start_product_of_rows<HEAD>(p, q_rows, k_rows);
            // That of the tile before is done.
            wait_for_products<1>();
            if (last_k_empty) release(last_k_empty);
            last_k_empty = k_empty;
            const u64 v_rows = full_tile();
            begin_products();
            start_product_of_rows<HEAD>(ds, do_rows, v_rows);
            wait_for_products<1>();
            hold(p);
            visible.mask(p, (item.first_tile + tile) * KEYS);
            softmax_again(p, scale, [&](int, int, int i) { return row_lse[i / 2]; });
            wait_behind(bits_of(p), q_tile);
            wait_for_products<0>();
            hold(ds);
            release(ring.empty());
            ring.next();
            if (tile + 1 == item.num_tiles) release(q_ring.empty());
            softmax_backward(p, ds, [&](int, int, int i) { return row_delta[i / 2]; });
            round_to_operand(operand, ds);
            hold(operand);
            begin_products();
            start_product<HEAD>(sums, operand, k_rows);
        } while (++tile < item.num_tiles);
        wait_for_products<0>();
        hold(sums);
        release(last_k_empty);
        q_ring.next();
        multiply(sums, scale);
        const long long row = item.first_query + warpgroup * 64;
        store_tile<HEAD>(sums, dq_tiles + warpgroup * OWN, dq + row * dq_stride + item.head * HEAD, dq_stride, tokens - row);
    });
}

// A tile of queries has 64 rows.
template <int HEAD, int QUERIES, int SLOTS>
INLINE void backward_kv(const TensorMap &q, const TensorMap &k, const TensorMap &v, const TensorMap &d_o, const float *lse,
                        const float *delta, const int *order, const int *last_query, Half *dk, Half *dv, int dk_stride,
                        int dv_stride, int tokens, int num_heads, int num_kv_heads, float scale) {
    static_assert(QUERIES == 64, "a box");
    constexpr int OWN = 64 * HEAD * 2, TILE = 2 * OWN;
    const Shared k_tiles = dynamic_tiles(), v_tiles = k_tiles + 2 * OWN, tiles = v_tiles + 2 * OWN;
    const Shared row_values = tiles + SLOTS * TILE, barriers = row_values + SLOTS * 8 * QUERIES, kv_full = barriers + SLOTS * 16;
    // Heads of a part, which are as many in each.
    const int parts = gridDim.x / num_kv_heads, group = num_heads / gridDim.x, kv_head = blockIdx.x / parts;
    const int warpgroup = same_in_warp(threadIdx.x / WARPGROUP), lane = threadIdx.x % WARP;
    const int first_key = same_in_warp(order[blockIdx.y]) * ROWS, first_tile = first_key / QUERIES;
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
        for (int head = blockIdx.x * group; head < (blockIdx.x + 1) * group; head++)
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
    // The keys of this warpgroup, and the last query that sees one.
    const int first_row = first_key + warpgroup * 64, last_column = same_in_warp(last_query[min(first_row + 64, tokens) - 1]);
    Shared last_empty = 0;
    // Tiles of all queries of the part's first head, of its second, ... At least one, as ptxas must know.
    int i = 0, tile = 0;
    do {
        ring.wait_until_full();
        const int first_column = (first_tile + tile) * QUERIES;
        if (first_column <= last_column && first_column + QUERIES > first_row) {
            const Shared q_tile = tiles + ring.slot * TILE, row_lse = row_values + ring.slot * 8 * QUERIES + lane % 4 * 8;
            const u64 q_rows = descriptor<HEAD, 64>(q_tile), do_rows = descriptor<HEAD, 64>(q_tile + OWN);
            begin_products();
            start_product_of_rows<HEAD>(p, k_rows, q_rows);
            // Those of the tile before are done.
            wait_for_products<1>();
            if (last_empty) release(last_empty);
            last_empty = ring.empty();
            begin_products();
            start_product_of_rows<HEAD>(ds, v_rows, do_rows);
            wait_for_products<1>();
            hold(p);
            visible.mask(p, first_column);
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
        } else {
            // The copying warp may wait for the tile before.
            wait_for_products<0>();
            if (last_empty) release(last_empty);
            last_empty = 0;
            release(ring.empty());
        }
        ring.next();
        tile = tile + 1 < num_tiles ? tile + 1 : 0;
    } while (++i < group * num_tiles);
    wait_for_products<0>();
    hold(dv_sums);
    hold(dk_sums);
    multiply(dk_sums, scale);
    const long long row = first_row;
    if (parts > 1) {
        const int warp_row = threadIdx.x % WARPGROUP / WARP * 16, num_rows = tokens - first_row - warp_row;
        const long long at = blockIdx.x % parts * (long long)tokens + row + warp_row;
        store_f32(dk_sums, (float *)dk + at * dk_stride + kv_head * HEAD, dk_stride, num_rows);
        store_f32(dv_sums, (float *)dv + at * dv_stride + kv_head * HEAD, dv_stride, num_rows);
        return;
    }
    sync_threads(OWN_ROWS + warpgroup, WARPGROUP);
    store_tile<HEAD>(dk_sums, k_tile, dk + row * dk_stride + kv_head * HEAD, dk_stride, tokens - row);
    store_tile<HEAD>(dv_sums, v_tile, dv + row * dv_stride + kv_head * HEAD, dv_stride, tokens - row);
}

// Entry points by head size. Block: 384. Grid and dynamic shared memory in bytes:
//   forward      (any: as many as there are SMs, num_heads * (tokens / 128 upwards) at most)
//                                                       2 * HEAD * (256 + SLOTS * KEYS) + 16 * SLOTS + 32
//   backward_q   as forward                             2 * HEAD * (384 + SLOTS * KEYS) + 16 * SLOTS + 32
//   backward_kv  (num_kv_heads * parts, tokens / 128 upwards)
//                                                       2 * HEAD * (256 + 2 * SLOTS * QUERIES) + (16 + 8 * QUERIES) * SLOTS + 8
#define MAP const __grid_constant__ TensorMap
#define FORWARD(HEAD, KEYS, SLOTS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper_forward_##HEAD(                                    \
        MAP q, MAP k, MAP v, const int *order, const int *first_key, Half *o, float *lse, int o_stride, int tokens,              \
        int num_heads, int num_kv_heads, float scale) {                                                                          \
        forward<HEAD, KEYS, SLOTS>(q, k, v, order, first_key, o, lse, o_stride, tokens, num_heads, num_kv_heads, scale);         \
    }
#define BACKWARD_Q(HEAD, KEYS, SLOTS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper_backward_q_##HEAD(                                 \
        MAP q, MAP k, MAP v, MAP d_o, const float *lse, const float *delta, const int *order, const int *first_key, Half *dq,    \
        int dq_stride, int tokens, int num_heads, int num_kv_heads, float scale) {                                               \
        backward_q<HEAD, KEYS, SLOTS>(q, k, v, d_o, lse, delta, order, first_key, dq, dq_stride, tokens, num_heads,              \
                                      num_kv_heads, scale);                                                                      \
    }
#define BACKWARD_KV(HEAD, QUERIES, SLOTS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper_backward_kv_##HEAD(                                \
        MAP q, MAP k, MAP v, MAP d_o, const float *lse, const float *delta, const int *order, const int *last_query, Half *dk,   \
        Half *dv, int dk_stride, int dv_stride, int tokens, int num_heads, int num_kv_heads, float scale) {                      \
        backward_kv<HEAD, QUERIES, SLOTS>(q, k, v, d_o, lse, delta, order, last_query, dk, dv, dk_stride, dv_stride, tokens,     \
                                          num_heads, num_kv_heads, scale);                                                       \
    }

FORWARD(64, 128, 4)
FORWARD(96, 128, 4)
FORWARD(128, 128, 4)
FORWARD(256, 64, 3)

BACKWARD_Q(64, 128, 4)
BACKWARD_Q(96, 128, 4)
BACKWARD_Q(128, 128, 4)

BACKWARD_KV(64, 64, 4)
BACKWARD_KV(96, 64, 4)
BACKWARD_KV(128, 64, 4)
