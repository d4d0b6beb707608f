// Passes over activations for low-rank factors, of low_rank.cu and expert_rank.cu, which say what goes where.
#pragma once
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

// y += scale drop(left factor^T), left: [tokens, columns], columns <= RANKS. A warp has 8 * N columns of y and 16 * M tokens, of
// which a thread holds N pairs side by side: which column or rank has which place in a fragment is free, as long as both operands
// agree. So y and `left` pass through no shared memory, and the factor stays in registers while the block goes down the tokens.
template <int RANKS, int M, int N>
INLINE void add(int across, int share, int shares, const Half *left, const Factor<const float> &factor, Half *y, const Dropout &dropout,
                int left_stride, int y_stride, int tokens, const Widths &widths, int columns, float scale) {
    struct alignas(4 * N) Pairs {
        unsigned of[N];
    };
    const int lane = threadIdx.x % WARP, quad = lane / 4, own_rank = lane % 4 * 8;
    int first_column, first_tile, end_tile;
    const Part part = part_of_block(widths, THREADS / WARP * 8 * N, across, first_column);
    share_of_tiles((tokens + 16 * M - 1) / (16 * M), share, shares, first_tile, end_tile);
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
