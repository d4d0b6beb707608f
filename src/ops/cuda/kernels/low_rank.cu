// The low-rank paths of a linear layer y = x W^T + s drop(x) A^T B^T (Hu et al., 2021, equation 3):
//
//   xa = drop(x) A^T              low_rank_product(x, A)
//   y += s xa B^T                 low_rank_add_*(xa, B, y)
//   dxa = s dy B, dB = s dy^T xa  low_rank_both(dy, B, xa); for ranks above 32, whose sums are too many for one pass,
//                                 low_rank_product(dy, B) and low_rank_gradient(dy, xa)
//   dA = dxa^T drop(x)            low_rank_gradient(x, dxa)
//   dx += drop(dxa A)             low_rank_add_*(dxa, A, dx)
//
// x, dy, y, dx: Half, [tokens, width], rows `*_stride` elements apart. A: f32, [rank, width]; B: f32, [width, rank]; both are
// rounded to Half as operands. xa, dxa: Half, [tokens, columns]; the rank is padded to a multiple of 8, and the columns of
// padding are zeros. Strides and widths are multiples of 8, pointers of 16 bytes. Sums are f32 in one order, rounded once where
// the result is Half.
//
// Up to three projections of one input and of equal rank (q, k and v; gate and up) are joined: each launch above is one for all
// of them. Their A are `factor0` .., `columns` is the padded rank times their number, and they have one width, `width0`. Their B
// are `factor0` .., of `width0` .., `columns` is the padded rank of one, and y and dy have their columns side by side. xa and dxa
// have theirs side by side in any case. Widths of projections that are not there are 0. Masks differ by projection, so with
// dropout what takes A is launched for each by itself, on its columns of xa and dxa.
//
// The passes over x and dy are bound by memory: 12 us for 4096 x 4096 at 2.9 TB/s, where products with 16 columns take 1 us. A
// block keeps 256 columns of its factor in shared memory and goes down the tokens, which reads factors least. Sums over several
// blocks are of f32 in scratch memory: what is written and read of them, in L2, is 0.25 of the pass at rank 16 (0.12 if
// tiles_across is 2); of tiles of 64 tokens that go along the width, each would read all of A, 0.5 of the pass.
//
// Blocks at the end of the grid wait for the others and add up, in one order. The last block of those that share a result could do
// it, but it would be alone, with 64 bytes a clock: after the 12 us of 4096 x 4096, 2.3 us for 256 KB at rank 16 and 9 us for 1 MB
// at 64; for the products of 4096 x 14336 (40 us), 33 us of 3.7 MB. Spread over half the multiprocessors, 4 MB take 1 us.
#include "low_rank.cuh"

// Tells those who wait that a block's sums are in memory.
INLINE void arrive(unsigned *counters) {
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    atomicAdd(counters, 1);
}

// Waits until `num_blocks` have arrived. The last of `num_waiting` that see it sets the counters back.
INLINE void wait_for(unsigned *counters, int num_blocks, int num_waiting) {
    if (threadIdx.x == 0) {
        while (*(volatile unsigned *)counters < num_blocks) __nanosleep(100);
        __threadfence();
        if (atomicAdd(counters + 1, 1) + 1 == num_waiting) counters[0] = counters[1] = 0;
    }
    __syncthreads();
}

// The sum of `count` times four numbers, `step` apart, in their order.
INLINE float4 sum_of(const float *from, int count, long long step) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int n = 0; n < count; n += 16, from += 16 * step) {
        float4 x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = n + i < count ? __ldcg((const float4 *)(from + i * step)) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 16; i++) sum.x += x[i].x, sum.y += x[i].y, sum.z += x[i].z, sum.w += x[i].w;
    }
    return sum;
}

// Adds up products of several blocks: `blocks` by projection.
INLINE void sum_products(const Products &products, const Widths &blocks, int tokens, int columns, int thread, int num_threads) {
    const int across = columns * (1 + (blocks.of1 > 0) + (blocks.of2 > 0)) / 4;
    for (int i = thread; i < tokens * across; i += num_threads) {
        const int token = i / across, j = i % across * 4, part = j / columns, count = blocks.of(part);
        if (count == 1) continue;
        const float *from = products.sums + ((long long)blocks.before(part) * tokens + token) * columns + j % columns;
        const float4 sum = sum_of(from, count, (long long)tokens * columns);
        *(uint2 *)(products.out + (long long)token * products.out_stride + j) =
            make_uint2(half_pair(sum.x * products.scale, sum.y * products.scale),
                       half_pair(sum.z * products.scale, sum.w * products.scale));
    }
}

// Adds up gradients of several shares. A warp has eight ranks of 16 columns: whole sectors of what it reads and writes.
INLINE void sum_gradients(const Gradients &gradients, const Widths &widths, int columns, int shares, int thread,
                          int num_threads) {
    const int eights = columns / 8;
    for (int i = thread; i < (widths.total() + 15) / 16 * eights * WARP; i += num_threads) {
        const int column = i / WARP / eights * 16 + i % WARP / 2, j = i / WARP % eights * 8 + i % 2 * 4;
        if (column >= widths.total()) continue;
        const float4 sum = sum_of(gradients.sums + (long long)column * columns + j, shares, (long long)widths.total() * columns);
        const Part part(widths, column);
        gradients.put({sum.x, sum.y, sum.z, sum.w}, part.index, j, column - part.first_column);
    }
}

// A pass and, by the blocks behind it, its sums.
template <int RANKS, bool HAS_PRODUCT, bool HAS_GRADIENT>
INLINE void pass_and_sums(const Half *x, const Factor<const float> &factor, const Half *left, const Products &products,
                          const Gradients &gradients, unsigned *counters, const Dropout &dropout, int x_stride, int left_stride,
                          int tokens, const Widths &widths, int columns, int tiles_across, int shares) {
    const Widths blocks = widths.blocks(COLUMNS * tiles_across);
    const int across = blocks.total(), num_blocks = across * shares * ((columns + RANKS - 1) / RANKS), block = blockIdx.x;
    const int num_waiting = gridDim.x - num_blocks;
    if (block < num_blocks) {
        pass<RANKS, HAS_PRODUCT, HAS_GRADIENT>({block % across, block / across % shares, block / across / shares}, x, factor, left,
                                               products, gradients, dropout, x_stride, left_stride, tokens, widths, columns,
                                               tiles_across, shares);
        if (num_waiting) arrive(counters);
        return;
    }
    wait_for(counters, num_blocks, num_waiting);
    const int thread = (block - num_blocks) * THREADS + threadIdx.x, num_threads = num_waiting * THREADS;
    if (HAS_PRODUCT) sum_products(products, blocks, tokens, columns, thread, num_threads);
    if (HAS_GRADIENT && shares > 1) sum_gradients(gradients, widths, columns, shares, thread, num_threads);
}

// Of all entry points: block 256; rank_stride and column_stride of a factor, and of its gradient, are (width, 1) for A and
// (1, rank) for B; key, threshold and keep_factor are those of Dropout, and threshold 0 but where a product takes drop(x) or
// drop(dxa A).
//
// Passes. Grid: across * shares * deep + num_sums. across: the sum over the widths of width / 256 / tiles_across upwards; shares of
// the tokens: from 1 to tokens / 64 upwards, about 256 / across / deep; deep: columns / 64 upwards, of low_rank_both 1.
// tiles_across: from 1 up, such that ranks * tiles_across <= 32, or 1, with ranks = min(columns, 64): two blocks have place in a
// multiprocessor then; of low_rank_gradient and low_rank_both it is 1. Dynamic shared memory in bytes, n of TILES_IN_FLIGHT:
// low_rank_product n * 32768 + 512 * ranks * tiles_across; low_rank_gradient n * 40960; low_rank_both n * 36864 + 512 * columns.
//
// A product is summed up where a width is above 256 * tiles_across, a gradient where shares > 1; the others are written at once.
// num_sums, the blocks that add up: 0 if nothing is summed up; else from 1 to half of the multiprocessors (so that those they wait
// for find place, whatever comes first), and no more than n / 1024 upwards, n the numbers of xa or dxa and of the gradients that
// are summed up. products: f32, [across, tokens, columns]; gradients: f32, [shares, all widths, columns]; scratch, null if nothing
// of it is summed up. counters: two, zero before the launch and after it, for launches one after another; not used if num_sums
// is 0.
//
// out (xa, dxa) = scale * product. gradient0 .. (dA, dB), contiguous, =, with `adds` +=, scale * gradient.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    low_rank_product(const Half *x, const float *factor0, const float *factor1, const float *factor2, float *products, Half *out,
                     unsigned *counters, int x_stride, int out_stride, int rank_stride, int column_stride, int tokens, int width0,
                     int width1, int width2, int rank, int columns, int tiles_across, int shares, float scale,
                     unsigned long long key, unsigned threshold, float keep_factor) {
    pass_and_sums<64, true, false>(x, {factor0, factor1, factor2, rank, rank_stride, column_stride}, nullptr,
                                   {products, out, out_stride, scale}, {}, counters, {key, threshold, keep_factor}, x_stride, 0,
                                   tokens, {width0, width1, width2}, columns, tiles_across, shares);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    low_rank_gradient(const Half *x, const Half *left, float *gradients, float *gradient0, float *gradient1, float *gradient2,
                      unsigned *counters, int x_stride, int left_stride, int rank_stride, int column_stride, int tokens,
                      int width0, int width1, int width2, int rank, int columns, int shares, float scale, int adds,
                      unsigned long long key, unsigned threshold, float keep_factor) {
    const Factor<float> out = {gradient0, gradient1, gradient2, rank, rank_stride, column_stride};
    pass_and_sums<64, false, true>(x, {}, left, {}, {gradients, out, scale, adds}, counters, {key, threshold, keep_factor},
                                   x_stride, left_stride, tokens, {width0, width1, width2}, columns, 1, shares);
}

// columns <= 32.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    low_rank_both(const Half *dy, const float *b0, const float *b1, const float *b2, const Half *xa, float *products, Half *dxa,
                  float *gradients, float *db0, float *db1, float *db2, unsigned *counters, int dy_stride, int xa_stride,
                  int dxa_stride, int tokens, int width0, int width1, int width2, int rank, int columns, int shares, float scale,
                  int adds) {
    pass_and_sums<32, true, true>(dy, {b0, b1, b2, rank, 1, rank}, xa, {products, dxa, dxa_stride, scale},
                                  {gradients, {db0, db1, db2, rank, 1, rank}, scale, adds}, counters, {}, dy_stride, xa_stride,
                                  tokens, {width0, width1, width2}, columns, 1, shares);
}

// Of columns <= 64 and <= 256. Grid: (the sum over the widths of width / 256 and width / 128 upwards; shares of the tokens, about
// 512 / grid x); no shared memory.
#define ADD(RANKS, M, N, BLOCKS)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                                \
        low_rank_add_##RANKS(const Half *left, const float *factor0, const float *factor1, const float *factor2, Half *y,        \
                             int left_stride, int y_stride, int rank_stride, int column_stride, int tokens, int width0,          \
                             int width1, int width2, int rank, int columns, float scale, unsigned long long key,                 \
                             unsigned threshold, float keep_factor) {                                                            \
        add<RANKS, M, N>(blockIdx.x, blockIdx.y, gridDim.y, left,                                                                \
                         {factor0, factor1, factor2, rank, rank_stride, column_stride}, y, {key, threshold, keep_factor},        \
                         left_stride, y_stride, tokens, {width0, width1, width2}, columns, scale);                               \
    }

ADD(64, 2, 4, 2)
ADD(256, 1, 2, 1)
