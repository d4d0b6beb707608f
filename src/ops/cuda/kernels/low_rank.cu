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
#include "dropout.cuh"
#include "tile.cuh"

enum { TOKENS = 64, COLUMNS = 256, THREADS = 256, TILE_BYTES = TOKENS * COLUMNS * 2 };

struct Widths {
    int of0, of1, of2;

    INLINE int total() const { return of0 + of1 + of2; }
    INLINE int of(int index) const { return index == 0 ? of0 : index == 1 ? of1 : of2; }
    INLINE int before(int index) const { return index == 0 ? 0 : index == 1 ? of0 : of0 + of1; }

    // Of blocks that have `each` columns of one projection, how many there are by projection.
    INLINE Widths blocks(int each) const { return {(of0 + each - 1) / each, (of1 + each - 1) / each, (of2 + each - 1) / each}; }
};

// A projection's columns: how many are before them, and how many there are.
struct Part {
    int index, first_column, width;

    INLINE Part(const Widths &widths, int column)
        : index((column >= widths.of0) + (column >= widths.of0 + widths.of1)), first_column(widths.before(index)),
          width(widths.of(index)) {}
};

// Of blocks that have `each` columns of one projection, the projection of this one and its first column there.
INLINE Part part_of_block(const Widths &widths, int each, int block, int &first_column) {
    const Widths blocks = widths.blocks(each);
    const int part = (block >= blocks.of0) + (block >= blocks.of0 + blocks.of1);
    first_column = (block - blocks.before(part)) * each;
    return Part(widths, widths.before(part));
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

// What products are summed up in, f32, [grid x, tokens, columns], and what they go to.
struct Products {
    float *sums;
    Half *out;
    int out_stride;
    float scale;
};

// What gradients are summed up in, f32, [shares, all widths, columns], and what they go to.
struct Gradients {
    float *sums;
    Factor<float> out;
    float scale;
    int adds;

    // Sums of COUNT neighbours by rank, the first of which is a multiple of COUNT.
    template <int COUNT> INLINE void put(const float (&values)[COUNT], int part, int j, int column) const {
        int num_rows;
        float *to = out.row(part, j, num_rows) + (long long)column * out.column_stride;
#pragma unroll
        for (int i = 0; i < COUNT; i++, to += out.rank_stride)
            if (i < num_rows) *to = (adds ? *to : 0) + values[i] * scale;
    }
};

// The tiles that a block in `share` of `num_shares` has.
INLINE void share_of_tiles(int num_tiles, int share, int num_shares, int &first, int &end) {
    const int each = (num_tiles + num_shares - 1) / num_shares;
    first = share * each, end = min(first + each, num_tiles);
}

// What a block has of a pass.
struct Place {
    int across, share, deep;
};

// One pass over x, for up to RANKS columns: of HAS_PRODUCT, of columns of a token the sum over the block's columns c of x[t, c]
// factor[j, c]; of HAS_GRADIENT, of columns of x the sum over the block's tokens of x[t, c] left[t, j]. They go to where they are
// summed up or, if no other block has terms of theirs, out.
template <int RANKS, bool HAS_PRODUCT, bool HAS_GRADIENT>
INLINE void pass(const Place &place, const Half *x, const Factor<const float> &factor, const Half *left, const Products &products,
                 const Gradients &gradients, const Dropout &dropout, int x_stride, int left_stride, int tokens,
                 const Widths &widths, int columns, int tiles_across, int shares) {
    constexpr int LEFT_BYTES = HAS_GRADIENT ? TOKENS * RANKS * 2 : 0;
    const Shared x_stages = dynamic_shared(), left_stages = x_stages + TILES_IN_FLIGHT * TILE_BYTES;
    const Shared factor_tiles = left_stages + TILES_IN_FLIGHT * LEFT_BYTES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_rank = place.deep * RANKS, ranks = min(columns - first_rank, RANKS);
    int first_column, first_tile, end_tile;
    const Part part = part_of_block(widths, COLUMNS * tiles_across, place.across, first_column);
    share_of_tiles((tokens + TOKENS - 1) / TOKENS, place.share, shares, first_tile, end_tile);
    const int width = part.width;
    x += part.first_column, left += part.index * columns;

    // What a thread copies of a tile, and drops from it: a chunk of every eighth row.
    const int row = threadIdx.x / (COLUMNS / 8), chunk = threadIdx.x % (COLUMNS / 8);
    auto load = [&](int tile, int across, int stage) {
        if (tile < end_tile) {
            const Lane<COLUMNS> at(x_stages + stage * TILE_BYTES, row, chunk);
            const int column = first_column + across * COLUMNS + chunk * 8, token = tile * TOKENS + row;
            const Half *from = x + (long long)token * x_stride + column;
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
                pairs[j] = half_pair(dropout.apply(low_half(pairs[j]), keys, column + 2 * j),
                                     dropout.apply(high_half(pairs[j]), keys, column + 2 * j + 1));
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
                             is_there ? half_pair(from[0], from[factor.column_stride]) : 0);
            }

    // Of a tile's product a warp has 16 tokens and every second 8 columns; of the gradient, 32 columns of x.
    Sums<1, RANKS / 16> product = {};
    Sums<2, RANKS / 8> gradient = {};
    for (int tile = first_tile, across = 0, stage = 0; tile < end_tile;) {
        const bool is_last = across + 1 == tiles_across;
        const int next_tile = tile + is_last, next_across = is_last ? 0 : across + 1, next_stage = (stage + 1) % TILES_IN_FLIGHT;
        wait_for_copies<0>();
        if (dropout.threshold) drop(tile, across, stage);
        __syncthreads();
        if (next_stage != stage) load(next_tile, next_across, next_stage);
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
                        const int column = first_rank + j + lane % 4 * 2;
                        float &a = product[0][n][half * 2], &b = product[0][n][half * 2 + 1];
                        if (j < ranks && token < tokens) {
                            if (width > COLUMNS * tiles_across)
                                *(float2 *)(products.sums + ((long long)place.across * tokens + token) * columns + column) =
                                    make_float2(a, b);
                            else
                                *(unsigned *)(products.out + (long long)token * products.out_stride + part.index * columns +
                                              column) = half_pair(a * products.scale, b * products.scale);
                        }
                        a = b = 0;
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
        if (next_stage == stage) {
            __syncthreads();
            load(next_tile, next_across, next_stage);
        }
        tile = next_tile, across = next_across, stage = next_stage;
    }
    if (HAS_GRADIENT)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = first_column + warp * 32 + i * 8 + lane / 4, own_rank = first_rank + lane % 4 * 2;
            const long long row = (long long)place.share * widths.total() + part.first_column + column;
#pragma unroll
            for (int n = 0; n < RANKS / 8; n++) {
                if (column >= width || n * 8 >= ranks) continue;
                const float pair[2] = {gradient[i / 2][n][i % 2 * 2], gradient[i / 2][n][i % 2 * 2 + 1]};
                if (shares > 1)
                    *(float2 *)(gradients.sums + row * columns + own_rank + n * 8) = make_float2(pair[0], pair[1]);
                else
                    gradients.put(pair, part.index, own_rank + n * 8, column);
            }
        }
}

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

// y += scale drop(left factor^T), left: [tokens, columns], columns <= RANKS. A warp has 8 * N columns of y and 16 * M tokens, of
// which a thread holds N pairs side by side: which column or rank has which place in a fragment is free, as long as both operands
// agree. So y and `left` pass through no shared memory, and the factor stays in registers while the block goes down the tokens.
template <int RANKS, int M, int N>
INLINE void add(const Half *left, const Factor<const float> &factor, Half *y, const Dropout &dropout, int left_stride,
                int y_stride, int tokens, const Widths &widths, int columns, float scale) {
    struct alignas(4 * N) Pairs {
        unsigned of[N];
    };
    const int lane = threadIdx.x % WARP, quad = lane / 4, own_rank = lane % 4 * 8;
    int first_column, first_tile, end_tile;
    const Part part = part_of_block(widths, THREADS / WARP * 8 * N, blockIdx.x, first_column);
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
            for (int i = 0; i < 4; i++) b[k][n][i] = half_pair(ranks[i * 2], ranks[i * 2 + 1]);
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
                values[i].of[n] = half_pair(low_half(pair) + update[2 * n], high_half(pair) + update[2 * n + 1]);
            }
            *(Pairs *)(y + (long long)token * y_stride + own_column) = values[i];
        }
    }
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
        add<RANKS, M, N>(left, {factor0, factor1, factor2, rank, rank_stride, column_stride}, y,                                 \
                         {key, threshold, keep_factor}, left_stride, y_stride, tokens, {width0, width1, width2}, columns,        \
                         scale);                                                                                                 \
    }

ADD(64, 2, 4, 2)
ADD(256, 1, 2, 1)
