// Products of grouped.cuh by the tensor cores of sm_75 or sm_80: a block has 128 x 128 results.
#include "grouped.cuh"

enum { THREADS = 128, DEPTH = 32, STAGES = TILES_IN_FLIGHT + 1, TILE = SIZE * DEPTH * 2 };

// Forward: the columns `column` on of layer `layer`, y = x W^T + bias. Backward: those of y = the sum over the layers of x W. A warp
// has 64 x 64 of them. width: columns of y; depth: what is summed over, of each layer.
template <bool IS_BACKWARD>
INLINE void product(const Experts &experts, const Half *x0, const Half *x1, int layer, Half *y, Group rows, int column, int num_layers, int x_stride,
                    int weight_stride, int y_stride, int width, int depth) {
    const Shared tiles = dynamic_shared();
    const int warp = threadIdx.x / WARP, warp_row = warp / 2 * 64, warp_column = warp % 2 * 64;
    const int steps_of_layer = (depth + DEPTH - 1) / DEPTH, steps = IS_BACKWARD ? num_layers * steps_of_layer : steps_of_layer;

    const auto load = [&](int step) {
        const Shared a = tiles + step % STAGES * 2 * TILE, b = a + TILE;
        const int of_layer = IS_BACKWARD ? step / steps_of_layer : layer;
        const int at = (step - (IS_BACKWARD ? of_layer * steps_of_layer : 0)) * DEPTH;
        const Half *weight = experts.weights[rows.expert][of_layer];
        const Half *x = IS_BACKWARD && of_layer ? x1 : x0;
        load_tile<DEPTH, SIZE, THREADS>(a, x + (long long)rows.first * x_stride + at, x_stride, 0, rows.count, depth - at);
        if (IS_BACKWARD)
            load_tile<SIZE, DEPTH, THREADS>(b, weight + (long long)at * weight_stride + column, weight_stride, 0, depth - at,
                                            width - column);
        else
            load_tile<DEPTH, SIZE, THREADS>(b, weight + (long long)column * weight_stride + at, weight_stride, 0, width - column,
                                            depth - at);
    };

    Sums<4, 8> sums;
    clear(sums);
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load(step);
        commit_copies();
    }
    for (int step = 0; step < steps; step++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        commit_copies();
        if (warp_row >= rows.count) continue;
        const Shared a = tiles + step % STAGES * 2 * TILE, b = a + TILE;
        const Rows<DEPTH, 4, false> left(a + warp_row * DEPTH * 2);
        if (IS_BACKWARD) {
            Operand<4, DEPTH / 16> x;
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                unsigned of_k[4][4];
                left.read(of_k, k);
#pragma unroll
                for (int i = 0; i < 16; i++) x[i / 4][k][i % 4] = of_k[i / 4][i % 4];
            }
            add_product<SIZE, 4, DEPTH / 16, 8>(sums, x, b, warp_column / 8);
        } else
            add_product_of_rows<DEPTH, 4, 8>(sums, left, b + warp_column * DEPTH * 2);
    }
    wait_for_copies<0>();
    __syncthreads();
    const int num_rows = rows.count - warp_row, num_columns = width - column - warp_column;
    if (num_rows <= 0 || num_columns <= 0) return;
    column += warp_column;
    if (!IS_BACKWARD && experts.biases[rows.expert][layer]) add_bias(sums, experts.biases[rows.expert][layer] + column, num_columns);
    store_rows<64, 4, 8>(sums, tiles + warp * 64 * 64 * 2, y + (long long)(rows.first + warp_row) * y_stride + column, y_stride, num_rows,
                         0, num_columns / 8);
}

// y of each layer. Grid: (layers x columns / 128 upwards, blocks that share the tiles of rows); block 128; 16 KB of dynamic shared memory a stage.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_forward(const __grid_constant__ Experts experts, const Half *x, const int *first, Half *y0, Half *y1, int first_expert,
                    int num_experts, int x_stride, int weight_stride, int y_stride, int width, int depth) {
    const int across = (width + SIZE - 1) / SIZE, layer = blockIdx.x / across;
    each_tile(first + first_expert, num_experts, [&](const Group &rows) {
        product<false>(experts, x, x, layer, layer ? y1 : y0, rows, (blockIdx.x - layer * across) * SIZE, 1, x_stride, weight_stride,
                       y_stride, width, depth);
    });
}

// dx, the sum over the layers. Grid: (columns of dx / 128 upwards, as forward); the rest likewise.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_backward(const __grid_constant__ Experts experts, const Half *dy0, const Half *dy1, const int *first, Half *dx,
                     int first_expert, int num_experts, int num_layers, int dy_stride, int weight_stride, int dx_stride, int width,
                     int depth) {
    each_tile(first + first_expert, num_experts, [&](const Group &rows) {
        product<true>(experts, dy0, dy1, 0, dx, rows, blockIdx.x * SIZE, num_layers, dy_stride, weight_stride, dx_stride, width, depth);
    });
}
