// Operands of products in eight bits: E4M3 numbers (Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433) and what they are
// multiplied by, one number for a matrix, whose largest size then becomes 448, the largest that E4M3 has.
//
// x: bf16, rows of a multiple of 8 columns, `stride` from row to row, a multiple of 8; fewer than 2^34 numbers. Pointers are
// multiples of 16 bytes.
#include "eight.cuh"

enum { THREADS = 256, TILE = 64 };

// The largest of all threads', in all of the block; once in a kernel.
INLINE unsigned largest_of_block(unsigned x) {
    __shared__ unsigned of_warps[THREADS / WARP];
    for (int distance = 16; distance; distance /= 2) x = max(x, __shfl_xor_sync(~0u, x, distance));
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int i = 0; i < THREADS / WARP; i++) x = max(x, of_warps[i]);
    return x;
}

// Calls `f` with where each eight numbers of the block's share lie, and which they are.
template <typename F> INLINE void each_eight(const Half *x, int stride, int rows, int columns, const F &f) {
    const unsigned across = columns / 8, all = rows * across;
#pragma unroll 4
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < all; i += gridDim.x * THREADS)
        f(x + (long long)(i / across) * stride + i % across * 8, i);
}

// of_blocks[block]: the bits of the largest size in the block's share. Those of NaN are above those of infinity.
// Grid: as many as there are of_blocks; block: 256.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_largest(const Half *x, unsigned *of_blocks, int stride, int rows, int columns) {
    unsigned most = 0;
    each_eight(x, stride, rows, columns, [&](const Half *from, unsigned) {
        const Eight values(from);
#pragma unroll
        for (int j = 0; j < 8; j++) most = max(most, __float_as_uint(values.of[j]) & 0x7fffffff);
    });
    most = largest_of_block(most);
    if (threadIdx.x == 0) of_blocks[blockIdx.x] = most;
}

// codes: [rows, columns], the nearest to x / scale, even of two; NaN where x has one. scale: what 1 stands for. Grid: any; block: 256.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_rounded(const Half *x, const unsigned *of_blocks, unsigned char *codes,
                                                                  float *scale, int num_blocks, int stride, int rows, int columns) {
    unsigned most = 0;
    for (int i = threadIdx.x; i < num_blocks; i += THREADS) most = max(most, of_blocks[i]);
    const float largest = __uint_as_float(largest_of_block(most));
    // Of no size, and of one whose reciprocal is none, all become 0.
    const float factor = largest < 1e-30f ? 0 : 448 / largest;
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale = largest / 448;
    each_eight(x, stride, rows, columns, [&](const Half *from, unsigned i) {
        const Eight values(from);
        unsigned short pairs[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(pairs[j]) : "f"(values.of[2 * j + 1] * factor), "f"(values.of[2 * j] * factor));
        ((uint2 *)codes)[i] = make_uint2(pairs[0] | (unsigned)pairs[1] << 16, pairs[2] | (unsigned)pairs[3] << 16);
    });
}

// y, [columns, rows], of bytes x, [rows, columns], both multiples of 16. Grid: (columns / 64, rows / 64) upwards; block: 256.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_transposed(const unsigned char *x, unsigned char *y, int rows, int columns) {
    // Words of four bytes, and one more in a row, so that those of a column lie in banks of their own.
    __shared__ unsigned before[TILE][TILE / 4 + 1], after[TILE][TILE / 4 + 1];
    const int row = blockIdx.y * TILE, column = blockIdx.x * TILE, down = threadIdx.x / 4, across = threadIdx.x % 4;
    if (row + down < rows && column + across * 16 < columns) {
        const uint4 words = *(const uint4 *)(x + (long long)(row + down) * columns + column + across * 16);
        before[down][across * 4] = words.x, before[down][across * 4 + 1] = words.y;
        before[down][across * 4 + 2] = words.z, before[down][across * 4 + 3] = words.w;
    }
    __syncthreads();
    // A thread has a square of four by four.
    const int i = threadIdx.x / 16, j = threadIdx.x % 16;
    unsigned square[4];
#pragma unroll
    for (int k = 0; k < 4; k++) square[k] = before[4 * i + k][j];
    const unsigned low[2] = {__byte_perm(square[0], square[1], 0x5140), __byte_perm(square[2], square[3], 0x5140)};
    const unsigned high[2] = {__byte_perm(square[0], square[1], 0x7362), __byte_perm(square[2], square[3], 0x7362)};
    after[4 * j][i] = __byte_perm(low[0], low[1], 0x5410), after[4 * j + 1][i] = __byte_perm(low[0], low[1], 0x7632);
    after[4 * j + 2][i] = __byte_perm(high[0], high[1], 0x5410), after[4 * j + 3][i] = __byte_perm(high[0], high[1], 0x7632);
    __syncthreads();
    if (column + down < columns && row + across * 16 < rows) {
        const unsigned *words = after[down] + across * 4;
        *(uint4 *)(y + (long long)(column + down) * rows + row + across * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
