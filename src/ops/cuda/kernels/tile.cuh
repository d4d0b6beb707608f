// Tiles of bf16 in shared memory, WIDTH columns wide, and products of them by tensor cores, for attention.cu.
#pragma once
#include "common.cuh"

// Sums of 16 * M x 8 * N, as mma.sync leaves them: [.][.][0..1] are two columns of row lane / 4, [2..3] of row lane / 4 + 8.
template <int M, int N> using Sums = float[M][N][4];

// Eight columns of a row. They change places by the row, so that the same chunk of eight rows in a row lies in all banks.
template <int WIDTH> INLINE bf16 *chunk_at(bf16 *tile, int row, int chunk) {
    const int swizzle = WIDTH % 64 == 0 ? row % 8 : row / 2 % 4;
    return tile + row * WIDTH + (chunk ^ swizzle) * 8;
}

// Starts the copy of ROWS rows from `first_row` on; those from `num_rows` on become zeros.
template <int WIDTH, int ROWS, int THREADS> INLINE void load_tile(bf16 *tile, const bf16 *from, int stride, int first_row, int num_rows) {
    constexpr int CHUNKS = WIDTH / 8;
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS; i += THREADS) {
        const int at = i + threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
        if (ROWS * CHUNKS % THREADS && at >= ROWS * CHUNKS) break;
        copy_16_bytes(chunk_at<WIDTH>(tile, row, chunk), from + (long long)(first_row + row) * stride + chunk * 8, first_row + row < num_rows);
    }
}

// sums += A B^T: 16 * M rows of A with 8 * N rows of B.
template <int WIDTH, int M, int N> INLINE void add_product_of_rows(Sums<M, N> &sums, bf16 *a, bf16 *b) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int chunk = 0; chunk < WIDTH / 8; chunk += 2) {
        unsigned x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix(x[m], chunk_at<WIDTH>(a, m * 16 + lane % 16, chunk + lane / 16));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned y[4];
            ldmatrix(y, chunk_at<WIDTH>(b, n * 8 + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16x8x16(sums[m][n], x[m], y[0], y[1]);
                mma_16x8x16(sums[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// sums += A B with A rounded to bf16: the sums of one product are an operand of the next as they lie in registers. B has 8 * K rows, of
// which 8 * N columns from `first_chunk` on are used.
template <int WIDTH, int M, int K, int N> INLINE void add_product(Sums<M, N> &sums, const Sums<M, K> &a, bf16 *b, int first_chunk = 0) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        unsigned x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][i] = bf16_pair(a[m][k + i / 2][i % 2 * 2], a[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned y[4];
            ldmatrix_transposed(y, chunk_at<WIDTH>(b, k * 8 + lane % 16, first_chunk + n + lane / 16));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16x8x16(sums[m][n], x[m], y[0], y[1]);
                mma_16x8x16(sums[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// Writes the sums of a warp in bf16 to columns from `first_chunk` on of at most `num_rows` rows, by way of its rows of `tile`: rows go out
// in whole chunks.
template <int WIDTH, int M, int N>
INLINE void store_rows(const Sums<M, N> &sums, bf16 *tile, bf16 *to, int stride, int num_rows, int first_chunk = 0) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                bf16 *chunk = chunk_at<WIDTH>(tile, m * 16 + half * 8 + lane / 4, first_chunk + n);
                ((unsigned *)chunk)[lane % 4] = bf16_pair(sums[m][n][half * 2], sums[m][n][half * 2 + 1]);
            }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * M * N; i += WARP) {
        const int row = i / N, chunk = first_chunk + i % N;
        if (row < num_rows) *(uint4 *)(to + (long long)row * stride + chunk * 8) = *(uint4 *)chunk_at<WIDTH>(tile, row, chunk);
    }
}
