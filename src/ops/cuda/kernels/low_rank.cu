// The low-rank paths of a linear layer y = x W^T + s drop(x) A^T B^T (Hu et al., 2021, equation 3):
//
//   xa = drop(x) A^T              low_rank_product(x, A), low_rank_sum
//   y += s xa B^T                 low_rank_add_*(xa, B, y)
//   dxa = s dy B, dB = s dy^T xa  low_rank_both(dy, B, xa), low_rank_sum; for ranks above 32, whose sums are too many for
//                                 one pass, low_rank_product(dy, B) and low_rank_gradient(dy, xa) in place of low_rank_both
//   dA = dxa^T drop(x)            low_rank_gradient(x, dxa), low_rank_sum
//   dx += drop(dxa A)             low_rank_add_*(dxa, A, dx)
//
// x, dy, y, dx: bf16, [tokens, width], rows `*_stride` elements apart. A: f32, [rank, width]; B: f32, [width, rank]; both are
// rounded to bf16 as operands. xa, dxa: bf16, [tokens, columns]; the rank is padded to a multiple of 8, and the columns of
// padding are zeros. Strides and widths are multiples of 8, pointers of 16 bytes. Sums are f32 in one order, rounded once where
// the result is bf16.
//
// Up to three projections of one input and of equal rank (q, k and v; gate and up) are joined: each launch above is one for all
// of them. Their A are `factor0` .., `columns` is the padded rank times their number, and they have one width, `width0`. Their B
// are `factor0` .., of `width0` .., `columns` is the padded rank of one, and y and dy have their columns side by side. xa and dxa
// have theirs side by side in any case. Widths of projections that are not there are 0. Masks differ by projection, so with
// dropout what takes A is launched for each by itself, on its columns of xa and dxa.
//
// The passes over x and dy are bound by memory: 12 us for 4096 x 4096 at 2.9 TB/s, where products with 16 columns take 1 us. A
// block keeps 256 columns of its factor in shared memory and goes down the tokens, which reads factors least; sums over the
// blocks are a second launch. What it writes and reads of them, in L2, is 0.25 of the pass at rank 16 (0.12 if tiles_across is
// 2); of tiles of 64 tokens that go along the width, each would read all of A, 0.5 of the pass.
#include "dropout.cuh"
#include "tile.cuh"

enum { TOKENS = 64, COLUMNS = 256, THREADS = 256, TILE_BYTES = TOKENS * COLUMNS * 2 };

struct Widths {
    int of0, of1, of2;

    INLINE int total() const { return of0 + of1 + of2; }
};

// A projection's columns: how many are before them, and how many there are.
struct Part {
    int index, first_column, width;

    INLINE Part(const Widths &widths, int column)
        : index((column >= widths.of0) + (column >= widths.of0 + widths.of1)),
          first_column(index == 0 ? 0 : index == 1 ? widths.of0 : widths.of0 + widths.of1),
          width(index == 0 ? widths.of0 : index == 1 ? widths.of1 : widths.of2) {}
};

// Of blocks that have `each` columns of one projection, the projection of this one and its first column there.
INLINE Part part_of_block(const Widths &widths, int each, int &first_column) {
    const int blocks0 = (widths.of0 + each - 1) / each, blocks1 = (widths.of1 + each - 1) / each, block = blockIdx.x;
    const int part = (block >= blocks0) + (block >= blocks0 + blocks1);
    first_column = (part == 0 ? block : part == 1 ? block - blocks0 : block - blocks0 - blocks1) * each;
    return Part(widths, part == 0 ? 0 : part == 1 ? widths.of0 : widths.of0 + widths.of1);
}

// The f32 matrices, or their gradients, of all projections: element (j, c) of one, j of the rank.
template <class T> struct Factor {
    T *part0, *part1, *part2;
    int rank, rank_stride, column_stride;

    // Row j of the one that is `part`, or of several below each other from there on; and how many rows it has from there on,
    // itself included: none in the padding.
    INLINE T *row(int part, int j, int &num_rows) const {
        const int padded = (rank + 7) / 8 * 8, further = (j >= padded) + (j >= 2 * padded);
        part += further, j -= further * padded;
        num_rows = rank - j;
        return (part == 0 ? part0 : part == 1 ? part1 : part2) + (long long)j * rank_stride;
    }
};

// The tiles that a block in `share` of `num_shares` has.
INLINE void share_of_tiles(int num_tiles, int share, int num_shares, int &first, int &end) {
    const int each = (num_tiles + num_shares - 1) / num_shares;
    first = share * each, end = min(first + each, num_tiles);
}

// One pass over x, for up to RANKS columns: of HAS_PRODUCT products[blockIdx.x][t][j] = sum over the block's columns c of x[t, c]
// factor[j, c]; of HAS_GRADIENT gradients[blockIdx.y][c][j] = sum over the block's tokens of x[t, c] left[t, j].
template <int RANKS, bool HAS_PRODUCT, bool HAS_GRADIENT>
INLINE void pass(const bf16 *x, const Factor<const float> &factor, const bf16 *left, float *products, float *gradients,
                 const Dropout &dropout, int x_stride, int left_stride, int tokens, const Widths &widths, int columns,
                 int tiles_across) {
    constexpr int LEFT_BYTES = HAS_GRADIENT ? TOKENS * RANKS * 2 : 0;
    const Shared x_stages = dynamic_shared(), left_stages = x_stages + 2 * TILE_BYTES;
    const Shared factor_tiles = left_stages + 2 * LEFT_BYTES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_rank = blockIdx.z * RANKS, ranks = min(columns - first_rank, RANKS);
    int first_column, first_tile, end_tile;
    const Part part = part_of_block(widths, COLUMNS * tiles_across, first_column);
    share_of_tiles((tokens + TOKENS - 1) / TOKENS, blockIdx.y, gridDim.y, first_tile, end_tile);
    const int width = part.width;
    x += part.first_column, left += part.index * columns;

    // What a thread copies of a tile, and drops from it: a chunk of every eighth row.
    const int row = threadIdx.x / (COLUMNS / 8), chunk = threadIdx.x % (COLUMNS / 8);
    auto load = [&](int tile, int across, int stage) {
        if (tile < end_tile) {
            const Lane<COLUMNS> at(x_stages + stage * TILE_BYTES, row, chunk);
            const int column = first_column + across * COLUMNS + chunk * 8, token = tile * TOKENS + row;
            const bf16 *from = x + (long long)token * x_stride + column;
#pragma unroll
            for (int i = 0; i < TOKENS; i += 8, from += 8 * x_stride)
                copy_16_bytes(at.at(i, 0), from, token + i < tokens && column < width);
            if (HAS_GRADIENT) {
                constexpr int ACROSS = RANKS / 8, DOWN = THREADS / ACROSS;
                const int row = threadIdx.x / ACROSS, chunk = threadIdx.x % ACROSS;
#pragma unroll
                for (int i = row; i < TOKENS; i += DOWN)
                    copy_16_bytes(Lane<RANKS>(left_stages + stage * LEFT_BYTES, i, chunk).at(0, 0),
                                  left + (long long)(tile * TOKENS + i) * left_stride + first_rank + chunk * 8,
                                  tile * TOKENS + i < tokens && chunk * 8 < ranks);
            }
        }
        commit_copies();
    };
    auto drop = [&](int tile, int across, int stage) {
        const Lane<COLUMNS> at(x_stages + stage * TILE_BYTES, row, chunk);
        const int column = first_column + across * COLUMNS + chunk * 8;
        for (int i = 0; i < TOKENS; i += 8) {
            const unsigned long long keys = dropout.row(tile * TOKENS + row + i);
            const Shared chunk_at = at.at(i, 0);
            uint4 x = load_shared_16_bytes(chunk_at);
            unsigned *pairs = &x.x;
#pragma unroll
            for (int j = 0; j < 4; j++)
                pairs[j] = bf16_pair(dropout.apply(low_bf16(pairs[j]), keys, column + 2 * j),
                                     dropout.apply(high_bf16(pairs[j]), keys, column + 2 * j + 1));
            store_shared_16_bytes(chunk_at, x);
        }
    };

    load(first_tile, 0, 0);
    if (HAS_PRODUCT)
        for (int across = 0; across < tiles_across; across++)
            for (int j = threadIdx.x / (COLUMNS / 2); j < ranks; j += THREADS / (COLUMNS / 2)) {
                const int pair = threadIdx.x % (COLUMNS / 2), column = first_column + across * COLUMNS + pair * 2;
                int num_rows;
                const float *from = factor.row(part.index, first_rank + j, num_rows) + (long long)column * factor.column_stride;
                const bool is_there = num_rows > 0 && column < width;
                store_shared(Lane<COLUMNS>(factor_tiles + across * ranks * COLUMNS * 2, j, pair / 4).at(0, 0) + pair % 4 * 4,
                             is_there ? bf16_pair(from[0], from[factor.column_stride]) : 0);
            }

    // Of a tile's product a warp has 16 tokens and every second 8 columns; of the gradient, 32 columns of x.
    Sums<1, RANKS / 16> product = {};
    Sums<2, RANKS / 8> gradient = {};
    for (int tile = first_tile, across = 0, stage = 0; tile < end_tile; stage ^= 1) {
        const bool is_last = across + 1 == tiles_across;
        wait_for_copies<0>();
        if (dropout.threshold) drop(tile, across, stage);
        __syncthreads();
        load(tile + is_last, is_last ? 0 : across + 1, stage ^ 1);
        const Shared x_tile = x_stages + stage * TILE_BYTES;
        if (HAS_PRODUCT) {
            const Lane<COLUMNS> lane_x(x_tile, warp % 4 * 16 + lane % 16, lane / 16);
            const Lane<COLUMNS> lane_factor(factor_tiles + across * ranks * COLUMNS * 2, lane % 8, lane / 8);
#pragma unroll 2
            for (int chunk = 0; chunk < COLUMNS / 8; chunk += 4) {
                unsigned a[2][4];
                ldmatrix(a[0], lane_x.at(0, chunk));
                ldmatrix(a[1], lane_x.at(0, chunk + 2));
#pragma unroll
                for (int n = 0; n < RANKS / 16; n++) {
                    const int j = n * 16 + warp / 4 * 8;
                    if (j >= ranks) break;
                    unsigned b[4];
                    ldmatrix(b, lane_factor.at(j, chunk));
                    mma_16x8x16(product[0][n], a[0], b[0], b[1]);
                    mma_16x8x16(product[0][n], a[1], b[2], b[3]);
                }
            }
            if (is_last) {
#pragma unroll
                for (int n = 0; n < RANKS / 16; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int j = n * 16 + warp / 4 * 8, token = tile * TOKENS + warp % 4 * 16 + half * 8 + lane / 4;
                        float *to = products + ((long long)blockIdx.x * tokens + token) * columns + first_rank + j + lane % 4 * 2;
                        if (j < ranks && token < tokens)
                            *(float2 *)to = make_float2(product[0][n][half * 2], product[0][n][half * 2 + 1]);
                        product[0][n][half * 2] = product[0][n][half * 2 + 1] = 0;
                    }
            }
        }
        if (HAS_GRADIENT) {
            const Lane<COLUMNS> lane_x(x_tile, lane / 16 * 8 + lane % 8, lane / 8 % 2);
            const Lane<RANKS> lane_left(left_stages + stage * LEFT_BYTES, lane % 16, lane / 16);
#pragma unroll
            for (int k = 0; k < TOKENS; k += 16) {
                unsigned a[2][4];
                ldmatrix_transposed(a[0], lane_x.at(k, warp * 4));
                ldmatrix_transposed(a[1], lane_x.at(k, warp * 4 + 2));
#pragma unroll
                for (int n = 0; n < RANKS / 8; n += 2) {
                    if (n * 8 >= ranks) break;
                    unsigned b[4];
                    ldmatrix_transposed(b, lane_left.at(k, n));
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma_16x8x16(gradient[m][n], a[m], b[0], b[1]);
                        mma_16x8x16(gradient[m][n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
        tile += is_last, across = is_last ? 0 : across + 1;
    }
    if (HAS_GRADIENT)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = first_column + warp * 32 + i * 8 + lane / 4;
            const long long row = (long long)blockIdx.y * widths.total() + part.first_column + column;
            float *to = gradients + row * columns + first_rank + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < RANKS / 8; n++)
                if (column < width && n * 8 < ranks)
                    *(float2 *)(to + n * 8) = make_float2(gradient[i / 2][n][i % 2 * 2], gradient[i / 2][n][i % 2 * 2 + 1]);
        }
}

// y += scale drop(left factor^T), left: [tokens, columns], columns <= RANKS. A warp has 8 * N columns of y and 16 * M tokens, of
// which a thread holds N pairs side by side: which column or rank has which place in a fragment is free, as long as both operands
// agree. So y and `left` pass through no shared memory, and the factor stays in registers while the block goes down the tokens.
template <int RANKS, int M, int N>
INLINE void add(const bf16 *left, const Factor<const float> &factor, bf16 *y, const Dropout &dropout, int left_stride,
                int y_stride, int tokens, const Widths &widths, int columns, float scale) {
    struct alignas(4 * N) Pairs {
        unsigned of[N];
    };
    const int lane = threadIdx.x % WARP, quad = lane / 4, own_rank = lane % 4 * 8;
    int first_column, first_tile, end_tile;
    const Part part = part_of_block(widths, THREADS / WARP * 8 * N, first_column);
    share_of_tiles((tokens + 16 * M - 1) / (16 * M), blockIdx.y, gridDim.y, first_tile, end_tile);
    first_column += threadIdx.x / WARP * 8 * N;
    const int width = part.width, own_column = first_column + lane % 4 * 2 * N;
    y += part.first_column, left += part.index * columns;
    // Rank k * 32 + q * 8 + i has places 2q and 2q + 1 or, of i / 2 odd, 2q + 8 and 2q + 9 of product i / 4; column q * 2N + n *
    // 2 + i has place 2q + i of n.
    unsigned b[RANKS / 32][N][4];
#pragma unroll
    for (int k = 0; k < RANKS / 32; k++) {
        int num_rows;
        const float *rows = factor.row(part.index, k * 32 + own_rank, num_rows);
        if (k * 32 + own_rank >= columns) num_rows = 0;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int column = first_column + quad / 2 * 2 * N + n * 2 + quad % 2;
            const float *from = rows + (long long)column * factor.column_stride;
            float ranks[8];
#pragma unroll
            for (int i = 0; i < 8; i++, from += factor.rank_stride) ranks[i] = i < num_rows && column < width ? *from : 0;
#pragma unroll
            for (int i = 0; i < 4; i++) b[k][n][i] = bf16_pair(ranks[i * 2], ranks[i * 2 + 1]);
        }
    }

    for (int tile = first_tile; tile < end_tile; tile++) {
        const int first_token = tile * 16 * M + quad;
        Pairs values[2 * M];
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            const int token = first_token + i * 8;
            if (token < tokens && own_column < width) values[i] = *(const Pairs *)(y + (long long)token * y_stride + own_column);
        }
        Sums<M, N> sums = {};
#pragma unroll
        for (int k = 0; k < RANKS / 32; k++) {
            if (k * 32 >= columns) break;
            uint4 a[2 * M];
#pragma unroll
            for (int i = 0; i < 2 * M; i++) {
                const int token = first_token + i * 8, j = k * 32 + own_rank;
                const bool is_there = token < tokens && j < columns;
                a[i] = is_there ? *(const uint4 *)(left + (long long)token * left_stride + j) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int m = 0; m < M; m++) {
                const unsigned low[4] = {a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y};
                const unsigned high[4] = {a[2 * m].z, a[2 * m + 1].z, a[2 * m].w, a[2 * m + 1].w};
#pragma unroll
                for (int n = 0; n < N; n++) {
                    mma_16x8x16(sums[m][n], low, b[k][n][0], b[k][n][1]);
                    mma_16x8x16(sums[m][n], high, b[k][n][2], b[k][n][3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            const int token = first_token + i * 8;
            if (token >= tokens || own_column >= width) continue;
            float update[2 * N];
#pragma unroll
            for (int j = 0; j < 2 * N; j++) update[j] = sums[i / 2][j / 2][i % 2 * 2 + j % 2] * scale;
            if (dropout.threshold) {
                const unsigned long long keys = dropout.row(token);
#pragma unroll
                for (int j = 0; j < 2 * N; j++) update[j] = dropout.apply(update[j], keys, own_column + j);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const unsigned pair = values[i].of[n];
                values[i].of[n] = bf16_pair(low_bf16(pair) + update[2 * n], high_bf16(pair) + update[2 * n + 1]);
            }
            *(Pairs *)(y + (long long)token * y_stride + own_column) = values[i];
        }
    }
}

// Of all entry points: block 256; rank_stride and column_stride of a factor are (width, 1) for A and (1, rank) for B; key,
// threshold and keep_factor are those of Dropout, and threshold 0 but where a product takes drop(x) or drop(dxa A).
//
// Passes. Grid: (the sum over the widths of width / 256 / tiles_across upwards; shares of the tokens; columns / 64 upwards).
// Shares: from 1 to tokens / 64 upwards, about 256 / grid x. Dynamic shared memory in bytes, with ranks = min(columns, 64):
// low_rank_product 65536 + 512 * ranks * tiles_across; low_rank_gradient 81920; low_rank_both 73728 + 512 * columns.
// tiles_across: from 1 up, such that ranks * tiles_across <= 32, or 1: two blocks have place in a multiprocessor then. products:
// f32, [grid x, tokens, columns]; gradients: f32, [grid y, all widths, columns]; all of them is written.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    low_rank_product(const bf16 *x, const float *factor0, const float *factor1, const float *factor2, float *products,
                     int x_stride, int rank_stride, int column_stride, int tokens, int width0, int width1, int width2, int rank,
                     int columns, int tiles_across, unsigned long long key, unsigned threshold, float keep_factor) {
    pass<64, true, false>(x, {factor0, factor1, factor2, rank, rank_stride, column_stride}, nullptr, products, nullptr,
                          {key, threshold, keep_factor}, x_stride, 0, tokens, {width0, width1, width2}, columns, tiles_across);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    low_rank_gradient(const bf16 *x, const bf16 *left, float *gradients, int x_stride, int left_stride, int tokens, int width0,
                      int width1, int width2, int columns, unsigned long long key, unsigned threshold, float keep_factor) {
    pass<64, false, true>(x, {}, left, nullptr, gradients, {key, threshold, keep_factor}, x_stride, left_stride, tokens,
                          {width0, width1, width2}, columns, 1);
}

// columns <= 32.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    low_rank_both(const bf16 *dy, const float *b0, const float *b1, const float *b2, const bf16 *xa, float *products,
                  float *gradients, int dy_stride, int xa_stride, int tokens, int width0, int width1, int width2, int rank,
                  int columns) {
    pass<32, true, true>(dy, {b0, b1, b2, rank, 1, rank}, xa, products, gradients, {}, dy_stride, xa_stride, tokens,
                         {width0, width1, width2}, columns, 1);
}

// out[t][j] = scale * sum of a token's products, in two columns for a thread. Blocks of the product's grid are those of the first
// part, of the second, ...: `blocks` of each.
INLINE void sum_rows(const float *products, bf16 *out, int out_stride, int tokens, int columns, const Widths &blocks,
                     float scale) {
    const long long size = (long long)tokens * columns, i = ((long long)blockIdx.x * THREADS + threadIdx.x) * 2;
    const int across = columns * (1 + (blocks.of1 > 0) + (blocks.of2 > 0)), token = i / across, j = i % across;
    if (token >= tokens) return;
    const int index = j / columns;
    products += (index == 0 ? 0 : index == 1 ? blocks.of0 : blocks.of0 + blocks.of1) * size;
    products += (long long)token * columns + j % columns;
    float2 sum = make_float2(0, 0);
#pragma unroll 4
    for (int n = 0; n < (index == 0 ? blocks.of0 : index == 1 ? blocks.of1 : blocks.of2); n++) {
        const float2 x = *(const float2 *)(products + n * size);
        sum.x += x.x, sum.y += x.y;
    }
    *(unsigned *)(out + (long long)token * out_stride + j) = bf16_pair(sum.x * scale, sum.y * scale);
}

// The block's 32 columns and 8 ranks of the gradients, = or, with `adds`, += scale * sum over the shares.
INLINE void sum_gradient(const float *sums, const Factor<float> &gradient, const Widths &widths, int columns, int num_shares,
                         float scale, bool adds, int block) {
    // Neighbours in the gradient are neighbours in a warp.
    const bool is_a = gradient.column_stride == 1;
    const int all = block / (columns / 8) * 32 + (is_a ? threadIdx.x % 32 : threadIdx.x / 8);
    const int j = block % (columns / 8) * 8 + (is_a ? threadIdx.x / 32 : threadIdx.x % 8);
    const Part part(widths, all);
    int num_rows;
    float *to = gradient.row(part.index, j, num_rows) + (long long)(all - part.first_column) * gradient.column_stride;
    if (all >= widths.total() || num_rows <= 0) return;
    float sum = 0;
#pragma unroll 4
    for (int n = 0; n < num_shares; n++) sum += sums[((long long)n * widths.total() + all) * columns + j];
    *to = (adds ? *to : 0) + sum * scale;
}

// What the passes have left: `products` to out (xa, dxa), bf16, rows out_stride apart, and `gradients` to gradient0 .. (dA, dB),
// f32, contiguous and strided like their matrices. Grid: row_blocks + gradient_blocks; row_blocks is 0 or tokens * all columns of
// out / 512 upwards, gradient_blocks 0 or columns / 8 * (all widths / 32 upwards). blocks0 .. are the products' blocks (grid x)
// of each width, num_shares the gradients' grid y.
extern "C" __global__ void __launch_bounds__(THREADS)
    low_rank_sum(const float *products, const float *gradients, bf16 *out, float *gradient0, float *gradient1, float *gradient2,
                 int out_stride, int rank_stride, int column_stride, int tokens, int width0, int width1, int width2, int rank,
                 int columns, int blocks0, int blocks1, int blocks2, int num_shares, float scale, int adds, int row_blocks) {
    if (blockIdx.x < row_blocks)
        sum_rows(products, out, out_stride, tokens, columns, {blocks0, blocks1, blocks2}, scale);
    else
        sum_gradient(gradients, {gradient0, gradient1, gradient2, rank, rank_stride, column_stride}, {width0, width1, width2},
                     columns, num_shares, scale, adds, blockIdx.x - row_blocks);
}

// Of columns <= 64 and <= 256. Grid: (the sum over the widths of width / 256 and width / 128 upwards; shares of the tokens, about
// 512 / grid x); no shared memory.
#define ADD(RANKS, M, N, BLOCKS)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                                \
        low_rank_add_##RANKS(const bf16 *left, const float *factor0, const float *factor1, const float *factor2, bf16 *y,        \
                             int left_stride, int y_stride, int rank_stride, int column_stride, int tokens, int width0,          \
                             int width1, int width2, int rank, int columns, float scale, unsigned long long key,                 \
                             unsigned threshold, float keep_factor) {                                                            \
        add<RANKS, M, N>(left, {factor0, factor1, factor2, rank, rank_stride, column_stride}, y,                                 \
                         {key, threshold, keep_factor}, left_stride, y_stride, tokens, {width0, width1, width2}, columns,        \
                         scale);                                                                                                 \
    }

ADD(64, 2, 4, 2)
ADD(256, 1, 2, 1)
