// The low-rank paths of the experts of a mixture, as those of low_rank.cu, of rows that are sorted by expert:
//
//   xa = x A^T, dxa = s dy B         expert_rank_product(x, A), (dy, B)
//   y += s xa B^T, dx += dxa A       expert_rank_add_*(xa, B, y), (dxa, A, dx)
//   dB = s dy^T xa, dA = dxa^T x     expert_rank_gradient(dy, xa), (x, dxa): zeros of experts without rows
//
// x, dy, y, dx, xa, dxa: Half, [rows, ...], as there. factor: f32, the matrices of all experts one behind the other, each of `len`
// numbers; its strides as there. first: the first row of each expert, and at its end the number of rows. Every sum has one order, and
// is rounded once where the result is Half.
#include "grouped.cuh"
#include "low_rank.cuh"

enum { DEPTH = 64, RANKS = 64, X_BYTES = SIZE * DEPTH * 2, STAGE_BYTES = X_BYTES + RANKS * DEPTH * 2 };

// out = scale x factor^T. Grid: (rows / 128 upwards + experts, columns / 64 upwards); block 256: a warp has 16 rows. Dynamic shared
// memory: 24 KiB for each of TILES_IN_FLIGHT.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    expert_rank_product(const Half *x, const float *factor, const int *first, Half *out, int x_stride, int out_stride, int rank_stride,
                        int column_stride, int len, int num_experts, int width, int rank, int columns, float scale) {
    const Group rows = rows_of_tile(first, num_experts, blockIdx.x);
    if (rows.expert < 0) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_rank = blockIdx.y * RANKS, ranks = min(columns - first_rank, (int)RANKS), steps = (width + DEPTH - 1) / DEPTH;
    factor += (long long)rows.expert * len, x += (long long)rows.first * x_stride, out += (long long)rows.first * out_stride;
    const Shared tiles = dynamic_shared();
    const auto load = [&](int step) {
        const Shared x_tile = tiles + step % TILES_IN_FLIGHT * STAGE_BYTES, factor_tile = x_tile + X_BYTES;
        const int at = step * DEPTH;
        load_tile<DEPTH, SIZE, THREADS>(x_tile, x + at, x_stride, 0, rows.count, width - at);
        commit_copies();
        // Products are of sixteen ranks.
        for (int i = threadIdx.x; i < (ranks + 15) / 16 * 16 * (DEPTH / 2); i += THREADS) {
            const int j = i / (DEPTH / 2), pair = i % (DEPTH / 2), column = at + pair * 2;
            const float *from = factor + (long long)(first_rank + j) * rank_stride + (long long)column * column_stride;
            store_shared(Lane<DEPTH>(factor_tile, j, pair / 4).at(0, 0) + pair % 4 * 4,
                         first_rank + j < rank && column < width ? half_pair(from[0], from[column_stride]) : 0);
        }
    };
    Sums<1, RANKS / 8> sums;
    clear(sums);
    load(0);
    for (int step = 0; step < steps; step++) {
        wait_for_copies<0>();
        __syncthreads();
        if (TILES_IN_FLIGHT > 1 && step + 1 < steps) load(step + 1);
        const Shared x_tile = tiles + step % TILES_IN_FLIGHT * STAGE_BYTES;
        const Rows<DEPTH, 1, false> left(x_tile + warp * 16 * DEPTH * 2);
        const Lane<DEPTH> lane_factor(x_tile + X_BYTES, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            unsigned a[1][4];
            left.read(a, k);
#pragma unroll
            for (int n = 0; n < RANKS / 8; n += 2) {
                if (n * 8 >= ranks) break;
                unsigned b[4];
                ldmatrix(b, lane_factor.at(n * 8, k * 2));
                mma_16x8x16(sums[0][n], a[0], b[0], b[1]);
                mma_16x8x16(sums[0][n + 1], a[0], b[2], b[3]);
            }
        }
        if (TILES_IN_FLIGHT == 1 && step + 1 < steps) {
            __syncthreads();
            load(step + 1);
        }
    }
#pragma unroll
    for (int i = 0; i < RANKS / 4; i++) {
        const int n = i / 2, row = warp * 16 + i % 2 * 8 + lane / 4;
        if (n * 8 >= ranks || row >= rows.count) continue;
        *(unsigned *)(out + (long long)row * out_stride + first_rank + n * 8 + lane % 4 * 2) =
            half_pair(sums[0][n][i % 2 * 2] * scale, sums[0][n][i % 2 * 2 + 1] * scale);
    }
}

// gradient = scale left^T x of the rows of each expert, [rank, width] or its transpose. Grid: (width / 256 upwards, columns / 64
// upwards, experts); block 256; dynamic shared memory: 40 KiB for each of TILES_IN_FLIGHT.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    expert_rank_gradient(const Half *x, const Half *left, const int *first, float *gradient, int x_stride, int left_stride,
                         int rank_stride, int column_stride, int len, int width, int rank, int columns, float scale) {
    const int expert = blockIdx.z, begin = first[expert];
    gradient += (long long)expert * len;
    const Factor<float> out = {gradient, gradient, gradient, rank, rank_stride, column_stride};
    pass<RANKS, false, true>({(int)blockIdx.x, 0, (int)blockIdx.y}, x + (long long)begin * x_stride, {},
                             left + (long long)begin * left_stride, {}, {nullptr, out, scale, 0}, {}, x_stride, left_stride,
                             first[expert + 1] - begin, {width, 0, 0}, columns, 1, 1);
}

// y += scale left factor^T. Of columns <= 64 and <= 256. Grid: (width / 256 and width / 128 upwards, rows / 128 upwards + experts);
// block 256; no shared memory.
#define ADD(MOST, M, N, BLOCKS)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                                \
        expert_rank_add_##MOST(const Half *left, const float *factor, const int *first, Half *y, int left_stride, int y_stride,  \
                               int rank_stride, int column_stride, int len, int num_experts, int width, int rank, int columns,   \
                               float scale) {                                                                                    \
        const Group rows = rows_of_tile(first, num_experts, blockIdx.y);                                                         \
        if (rows.expert < 0) return;                                                                                             \
        factor += (long long)rows.expert * len;                                                                                  \
        add<MOST, M, N>(blockIdx.x, 0, 1, left + (long long)rows.first * left_stride,                                            \
                        {factor, factor, factor, rank, rank_stride, column_stride}, y + (long long)rows.first * y_stride, {},    \
                        left_stride, y_stride, rows.count, {width, 0, 0}, columns, scale);                                       \
    }

ADD(64, 2, 4, 2)
ADD(256, 1, 2, 1)
