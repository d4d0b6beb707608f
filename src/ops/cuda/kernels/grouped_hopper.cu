// Products of grouped.cuh by wgmma of sm_90a: a block has 128 x 256 results, each of its two warpgroups 64 x 256.
#include "grouped.cuh"
#include "hopper.cuh"

// A stage is loaded while those of two others are multiplied, of which one may be under way still.
enum { THREADS = 2 * WARPGROUP, COLUMNS = 256, DEPTH = 64, STAGES = 4, AHEAD = STAGES - 2 };
enum { LEFT = SIZE * DEPTH * 2, RIGHT = COLUMNS * DEPTH * 2, STAGE = LEFT + RIGHT };

// As `product` of grouped.cu.
template <bool IS_BACKWARD>
INLINE void product(const Experts &experts, const Half *x0, const Half *x1, int layer, Half *y, Group rows, int column, int num_layers,
                    int x_stride, int weight_stride, int y_stride, int width, int depth) {
    const Shared tiles = dynamic_tiles();
    const int warp = same_in_warp(threadIdx.x / WARP), first_row = warp / 4 * 64;
    const int steps_of_layer = (depth + DEPTH - 1) / DEPTH, steps = IS_BACKWARD ? num_layers * steps_of_layer : steps_of_layer;

    const auto load = [&](int step) {
        const Shared left = tiles + step % STAGES * STAGE, right = left + LEFT;
        const int of_layer = IS_BACKWARD ? step / steps_of_layer : layer;
        const int at = (step - (IS_BACKWARD ? of_layer * steps_of_layer : 0)) * DEPTH;
        const Half *weight = experts.weights[rows.expert][of_layer];
        const Half *x = IS_BACKWARD && of_layer ? x1 : x0;
        load_tile<DEPTH, SIZE, THREADS>(left, x + (long long)rows.first * x_stride + at, x_stride, 0, rows.count, depth - at);
        if (IS_BACKWARD)
#pragma unroll
            for (int chunk = 0; chunk < COLUMNS; chunk += 64)
                load_tile<64, DEPTH, THREADS>(right + chunk * DEPTH * 2, weight + (long long)at * weight_stride + column + chunk,
                                              weight_stride, 0, depth - at, width - column - chunk);
        else
            load_tile<DEPTH, COLUMNS, THREADS>(right, weight + (long long)column * weight_stride + at, weight_stride, 0, width - column,
                                               depth - at);
    };

    Sums<1, COLUMNS / 8> sums;
    clear(sums);
    for (int step = 0; step < AHEAD; step++) {
        if (step < steps) load(step);
        commit_copies();
    }
    for (int step = 0; step < steps; step++) {
        wait_for_copies<AHEAD - 1>();
        show_copies();
        // The products of the step before the last are done, so the next stage is free.
        __syncthreads();
        const Shared left = tiles + step % STAGES * STAGE, right = left + LEFT;
        if (first_row < rows.count) {
            const u64 a = descriptor<DEPTH, 64>(left + first_row * DEPTH * 2);
            const u64 b = IS_BACKWARD ? descriptor<COLUMNS, DEPTH>(right) : descriptor<DEPTH, COLUMNS>(right);
            begin_products();
#pragma unroll
            for (int k = 0; k < DEPTH; k += 16)
                if (IS_BACKWARD)
                    wgmma_rows_columns(sums, a + (k * 2 >> 4), b + (k * 64 * 2 >> 4));
                else
                    wgmma_rows(sums, a + (k * 2 >> 4), b + (k * 2 >> 4));
            commit_products();
        }
        if (step + AHEAD < steps) load(step + AHEAD);
        commit_copies();
        wait_for_products<1>();
    }
    wait_for_products<0>();
    hold(sums);
    wait_for_copies<0>();
    __syncthreads();
    const int row = warp * 16, num_columns = width - column;
    if (!IS_BACKWARD && experts.biases[rows.expert][layer]) add_bias(sums, experts.biases[rows.expert][layer] + column, num_columns);
    store_rows<COLUMNS, 1, COLUMNS / 8>(sums, tiles + row * COLUMNS * 2, y + (long long)(rows.first + row) * y_stride + column, y_stride,
                                        rows.count - row, 0, num_columns / 8);
}

// y of each layer. Grid: (layers x columns / 256 upwards, blocks that share the tiles of rows); block 256; 192 KB of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_hopper_forward(const __grid_constant__ Experts experts, const Half *x, const int *first, Half *y0, Half *y1, int first_expert,
                           int num_experts, int x_stride, int weight_stride, int y_stride, int width, int depth) {
    const int across = (width + COLUMNS - 1) / COLUMNS, layer = blockIdx.x / across;
    each_tile(first + first_expert, num_experts, [&](const Group &rows) {
        product<false>(experts, x, x, layer, layer ? y1 : y0, rows, (blockIdx.x - layer * across) * COLUMNS, 1, x_stride, weight_stride,
                       y_stride, width, depth);
    });
}

// dx, the sum over the layers. Grid: (columns of dx / 256 upwards, as forward); the rest likewise.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_hopper_backward(const __grid_constant__ Experts experts, const Half *dy0, const Half *dy1, const int *first, Half *dx,
                            int first_expert, int num_experts, int num_layers, int dy_stride, int weight_stride, int dx_stride,
                            int width, int depth) {
    each_tile(first + first_expert, num_experts, [&](const Group &rows) {
        product<true>(experts, dy0, dy1, 0, dx, rows, blockIdx.x * COLUMNS, num_layers, dy_stride, weight_stride, dx_stride, width, depth);
    });
}
