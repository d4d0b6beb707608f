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

// Entry points by head size. Block: 384. Grid and dynamic shared memory in bytes:
//   forward      (num_heads, tokens / 128 upwards)   2 * HEAD * (128 + SLOTS * KEYS) + 16 * SLOTS + 8
#define FORWARD(HEAD, KEYS, SLOTS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper_forward_##HEAD(                                           \
        const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,           \
        const int *first_key, bf16 *o, float *lse, int o_stride, int tokens, int num_heads, int num_kv_heads, float scale) {     \
        forward<HEAD, KEYS, SLOTS>(q, k, v, first_key, o, lse, o_stride, tokens, num_heads, num_kv_heads, scale);                \
    }

FORWARD(64, 128, 4)
FORWARD(96, 128, 4)
FORWARD(128, 128, 4)
FORWARD(256, 64, 4)
