// Tiles of Half in shared memory, WIDTH columns wide, and products of them by tensor cores, for attention.cu.
#pragma once
#include "common.cuh"

// Sums of 16 * M x 8 * N, as mma.sync leaves them: [.][.][0..1] are two columns of row lane / 4, [2..3] of row lane / 4 + 8.
template <int M, int N> using Sums = float[M][N][4];

// A tile in shared memory as a lane sees it that reads or writes a chunk of eight columns of a row, and rows and chunks that are
// constants further on. Chunks change places by the row, so that one and the same chunk of eight rows lies in all banks.
template <int WIDTH> struct Lane {
    Shared start, swizzle;

    INLINE Lane(Shared tile, int row, int chunk = 0)
        : start(tile + row * WIDTH * 2), swizzle(((WIDTH % 64 == 0 ? row % 8 : row / 2 % 4) ^ chunk) * 16) {}

    // Rows further on are a multiple of 8, chunks of the power of two that is above the lane's.
    INLINE Shared at(int rows, int chunks) const { return start + rows * WIDTH * 2 + (chunks * 16 ^ swizzle); }
};

// Starts the copy of ROWS rows from `first_row` on; those from `num_rows` on, and columns from `num_columns` on, become zeros.
template <int WIDTH, int ROWS, int THREADS>
INLINE void load_tile(Shared tile, const Half *from, int stride, int first_row, int num_rows, int num_columns = WIDTH) {
    // A power of two across, and at least 8 down: what a thread copies is by constants apart.
    constexpr int CHUNKS = WIDTH / 8, POWER = CHUNKS & -CHUNKS, ACROSS = POWER < THREADS / 8 ? POWER : THREADS / 8;
    constexpr int DOWN = THREADS / ACROSS;
    static_assert(ROWS % DOWN == 0, "all threads have as much to copy");
    const int row = threadIdx.x / ACROSS, chunk = threadIdx.x % ACROSS;
    from += (long long)(first_row + row) * stride + chunk * 8;
    const Lane<WIDTH> lane(tile, row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS; i += DOWN, from += DOWN * stride)
#pragma unroll
        for (int j = 0; j < CHUNKS; j += ACROSS) copy_16_bytes(lane.at(i, j), from + j * 8, first_row + row + i < num_rows && (chunk + j) * 8 < num_columns);
}

// 16 * M rows of a tile as the left operand of products, 16 columns at a time: read again for each product, or kept in registers.
template <int WIDTH, int M, bool IS_KEPT> struct Rows {
    Lane<WIDTH> lane;
    unsigned kept[IS_KEPT ? WIDTH / 16 : 1][M][4];

    INLINE explicit Rows(Shared tile) : lane(tile, threadIdx.x % 16, threadIdx.x % WARP / 16) {
#pragma unroll
        for (int k = 0; IS_KEPT && k < WIDTH / 16; k++) load(kept[k], k);
    }

    INLINE void load(unsigned (&x)[M][4], int k) const {
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix(x[m], lane.at(m * 16, k * 2));
    }

    INLINE void read(unsigned (&x)[M][4], int k) const {
        if constexpr (IS_KEPT)
#pragma unroll
            for (int i = 0; i < M * 4; i++) x[i / 4][i % 4] = kept[k][i / 4][i % 4];
        else
            load(x, k);
    }
};

template <int M, int N> INLINE void clear(Sums<M, N> &sums) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) sums[i / (N * 4)][i / 4 % N][i % 4] = 0;
}

// sums += A B^T, of the rows of A with 8 * N rows of B.
template <int WIDTH, int M, int N, bool IS_KEPT>
INLINE void add_product_of_rows(Sums<M, N> &sums, const Rows<WIDTH, M, IS_KEPT> &a, Shared b) {
    const int lane = threadIdx.x % WARP;
    const Lane<WIDTH> lane_b(b, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        unsigned x[M][4];
        a.read(x, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned y[4];
            ldmatrix(y, lane_b.at(n * 8, k * 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16x8x16(sums[m][n], x[m], y[0], y[1]);
                mma_16x8x16(sums[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// sums = A B^T, likewise.
template <int WIDTH, int M, int N, bool IS_KEPT>
INLINE void product_of_rows(Sums<M, N> &sums, const Rows<WIDTH, M, IS_KEPT> &a, Shared b) {
    clear(sums);
    add_product_of_rows(sums, a, b);
}

// Sums as the left operand of another product: they lie in registers as it wants them, but for rounding. [m][k] is 16 x 16.
template <int M, int K> using Operand = unsigned[M][K][4];

template <int M, int N> INLINE void round_to_operand(Operand<M, N / 2> &x, const Sums<M, N> &sums) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < N * 2; i++) x[m][i / 4][i % 4] = half_pair(sums[m][i / 2][i % 2 * 2], sums[m][i / 2][i % 2 * 2 + 1]);
}

// sums += A B, with 8 * N columns from `first_chunk` on of the 16 * K rows of B.
template <int WIDTH, int M, int K, int N>
INLINE void add_product(Sums<M, N> &sums, const Operand<M, K> &a, Shared b, int first_chunk = 0) {
    const int lane = threadIdx.x % WARP;
    const Lane<WIDTH> lane_b(b, lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned y[4];
            ldmatrix_transposed(y, lane_b.at(k * 16, first_chunk + n));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16x8x16(sums[m][n], a[m][k], y[0], y[1]);
                mma_16x8x16(sums[m][n + 1], a[m][k], y[2], y[3]);
            }
        }
}

// Writes the sums of a warp in Half to columns from `first_chunk` on of at most `num_rows` rows, by way of its rows of `tile`:
// rows go out in whole chunks, at most `num_chunks`.
template <int WIDTH, int M, int N>
INLINE void store_rows(const Sums<M, N> &sums, Shared tile, Half *to, int stride, int num_rows, int first_chunk = 0,
                       int num_chunks = N) {
    const int lane = threadIdx.x % WARP;
    const Lane<WIDTH> lane_row(tile, lane / 4);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared(lane_row.at(m * 16 + half * 8, first_chunk + n) + lane % 4 * 4,
                             half_pair(sums[m][n][half * 2], sums[m][n][half * 2 + 1]));
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * M * N; i += WARP) {
        const int row = i / N, chunk = first_chunk + i % N;
        if (row < num_rows && i % N < num_chunks)
            *(uint4 *)(to + (long long)row * stride + chunk * 8) = load_shared_16_bytes(Lane<WIDTH>(tile, row).at(0, chunk));
    }
}

// Writes the sums of a warp in f32 to at most `num_rows` rows.
template <int M, int N> INLINE void store_f32(const Sums<M, N> &sums, float *to, long long stride, int num_rows) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 2 * M * N; i++) {
        const int m = i / (2 * N), row = m * 16 + i % 2 * 8 + lane / 4, n = i / 2 % N;
        if (row < num_rows)
            *(float2 *)(to + row * stride + n * 8 + lane % 4 * 2) = make_float2(sums[m][n][i % 2 * 2], sums[m][n][i % 2 * 2 + 1]);
    }
}
