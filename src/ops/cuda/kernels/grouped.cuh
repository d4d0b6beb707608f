// What the kernels of grouped.cu and grouped_hopper.cu share.
//
// Rows of a mixture of experts, sorted by expert, times the frozen matrices of their experts: all groups of rows in one launch.
// Matrices are Half [out_features, in_features] of one shape and row stride, rows and strides multiples of 8, pointers of 16 bytes.
// An expert has one matrix or two, whose outputs have one stride (gate and up). first: the first row of each expert, and at its end
// the number of rows. A table has the experts from `first_expert` on; where there are more, there are more launches. A block takes
// some 128 rows of an expert: which ones it reads off `first`, so the host need not know. Sums in f32, rounded once.
#pragma once
#include "tile.cuh"

enum { SIZE = 128, EXPERTS = 64, LAYERS = 2 };

struct Experts {
    const Half *weights[EXPERTS][LAYERS];
    // Null where there are none.
    const float *biases[EXPERTS][LAYERS];
};

// Up to 128 rows of an expert of the table, counted from its first.
struct Group {
    int expert, first, count;
};

// The rows of a tile by its number; no expert beyond the last. By whole warps.
INLINE Group rows_of_tile(const int *first, int num_experts, int tile) {
    const int lane = threadIdx.x % WARP;
    for (int expert = 0; expert < num_experts; expert += WARP) {
        const int own = expert + lane, begin = own < num_experts ? first[own] : 0, end = own < num_experts ? first[own + 1] : 0;
        const int tiles = (end - begin + SIZE - 1) / SIZE;
        int until = tiles;
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int before = __shfl_up_sync(~0u, until, distance);
            if (lane >= distance) until += before;
        }
        const unsigned found = __ballot_sync(~0u, until > tile);
        if (found) {
            const int at = __ffs(found) - 1, row = begin + (tile - until + tiles) * SIZE;
            return {expert + at, __shfl_sync(~0u, row, at), __shfl_sync(~0u, min(end - row, (int)SIZE), at)};
        }
        tile -= __shfl_sync(~0u, until, WARP - 1);
    }
    return {-1, 0, 0};
}

// Does `work` for every tile of rows of the experts that falls to the block: of as many blocks as the grid has down, each one after
// as many others.
template <class Work> INLINE void each_tile(const int *first, int num_experts, const Work &work) {
    for (int tile = blockIdx.y;; tile += gridDim.y) {
        const Group rows = rows_of_tile(first, num_experts, tile);
        if (rows.expert < 0) return;
        work(rows);
        __syncthreads();
    }
}

// Adds numbers of `bias` to the columns of a warp's sums, which has `num_columns` of them.
template <int M, int N> INLINE void add_bias(Sums<M, N> &sums, const float *bias, int num_columns) {
#pragma unroll
    for (int n = 0; n < N; n++)
        if (n * 8 < num_columns) {
            const float2 two = *(const float2 *)(bias + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
            for (int i = 0; i < M * 4; i++) sums[i / 4][n][i % 4] += i % 2 ? two.y : two.x;
        }
}
