// What a thread does with its part of a tile of scores, for attention.cu and attention_hopper.cu.
#pragma once
#include "tile.cuh"

#define LOG2_E 1.44269504088896341f

// The columns that a thread's rows see: low ..= high, of row 16 * m + 8 * half + lane / 4 of a warp. Neither decreases.
template <int M> struct Visible {
    int low[M][2], high[M][2];

    // Whether any row of the warp sees one of the columns.
    template <int COLUMNS> INLINE bool any(int first_column) const {
        return __any_sync(~0u, first_column <= high[M - 1][1] && first_column + COLUMNS > low[0][0]);
    }

    // Sets the scores of columns that are not seen to -infinity. The lanes part nowhere: products need them together.
    template <int N> INLINE void mask(Sums<M, N> &scores, int first_column) const {
        if (__all_sync(~0u, first_column >= low[M - 1][1] && first_column + N * 8 - 1 <= high[0][0])) return;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int column = first_column + n * 8 + threadIdx.x % 4 * 2 + i % 2;
                    if (column < low[m][i / 2] || column > high[m][i / 2]) scores[m][n][i] = -INFINITY;
                }
    }
};

// What the queries from `first_row` on see. Rows behind the last see themselves.
template <int M> INLINE Visible<M> visible_keys(const int *first_key, int first_row, int tokens) {
    Visible<M> visible;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int query = first_row + i * 8 + threadIdx.x % WARP / 4;
        visible.low[i / 2][i % 2] = query < tokens ? first_key[query] : query;
        visible.high[i / 2][i % 2] = query;
    }
    return visible;
}

// Turns a tile of scores, [queries, keys] or its transpose, before they are multiplied by `scale`, into tanh(scale * score), by one
// exponential: this times the cap is the score under the cap where `scale` has been divided by it.
template <int M, int N> INLINE void cap_scores(Sums<M, N> &p, float scale) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) p[m][n][i] = 1 - __fdividef(2, exp2_approx(p[m][n][i] * (2 * LOG2_E * scale)) + 1);
}

// The same, and has the gradient of probabilities, less delta, which is by (m, n, i) of an element, multiplied by the slope of the cap.
template <int M, int N, class Delta> INLINE void cap_backward(Sums<M, N> &p, Sums<M, N> &ds, float scale, Delta delta) {
    cap_scores(p, scale);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) ds[m][n][i] = (ds[m][n][i] - delta(m, n, i)) * (1 - p[m][n][i] * p[m][n][i]);
}

// Turns a tile of scores into exponentials. What was summed so far is to be multiplied by `shrink`: the largest score has grown.
// row_sum is of this thread's columns.
template <int M, int K>
INLINE void add_to_softmax(Sums<M, K> &p, float (&row_max)[M][2], float (&row_sum)[M][2], float (&shrink)[M][2], float log2_scale) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = row_max[m][half];
#pragma unroll
            for (int n = 0; n < K; n++) largest = fmaxf(largest, fmaxf(p[m][n][half * 2], p[m][n][half * 2 + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            // A row that has seen no key yet has no largest score.
            const float shift = largest == -INFINITY ? 0 : largest * log2_scale;
            shrink[m][half] = exp2_approx(row_max[m][half] * log2_scale - shift);
            float sum = row_sum[m][half] * shrink[m][half];
#pragma unroll
            for (int n = 0; n < K; n++)
#pragma unroll
                for (int i = half * 2; i < half * 2 + 2; i++)
                    sum += p[m][n][i] = exp2_approx(p[m][n][i] * log2_scale - shift);
            row_max[m][half] = largest, row_sum[m][half] = sum;
        }
}

template <int M, int N> INLINE void multiply_rows(Sums<M, N> &sums, const float (&factor)[M][2]) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) sums[i / (N * 4)][i / 4 % N][i % 4] *= factor[i / (N * 4)][i % 4 / 2];
}

// Divides by the sums of exponentials, and writes the log-sum-exps of the warp's rows: those of the head from `first_row` on.
template <int M, int N>
INLINE void finish_softmax(Sums<M, N> &out, const float (&row_max)[M][2], const float (&row_sum)[M][2], float scale, float *lse,
                           int first_row, int tokens) {
    const int lane = threadIdx.x % WARP;
    float inverse[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = row_sum[m][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            inverse[m][half] = 1 / sum;
            const int row = first_row + m * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && row < tokens) lse[row] = row_max[m][half] * scale + __logf(sum);
        }
    multiply_rows(out, inverse);
}

// Turns a tile of scores, [queries, keys] or its transpose, into probabilities; lse is by (m, n, i) of an element.
template <int M, int N, class Lse> INLINE void softmax_again(Sums<M, N> &p, float scale, Lse lse) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) p[m][n][i] = exp2_approx(p[m][n][i] * (scale * LOG2_E) - lse(m, n, i) * LOG2_E);
}

// Turns the gradient of probabilities into that of the scaled scores; delta is by (m, n, i), too.
template <int M, int N, class Delta> INLINE void softmax_backward(const Sums<M, N> &p, Sums<M, N> &ds, Delta delta) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - delta(m, n, i));
}

template <int M, int N> INLINE void multiply(Sums<M, N> &sums, float factor) {
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) sums[i / (N * 4)][i / 4 % N][i % 4] *= factor;
}
