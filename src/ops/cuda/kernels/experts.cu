// Rows of a mixture of experts, sorted by expert: to their places, and back to their tokens.
//
// Matrices are bf16 with widths and strides that are multiples of 8, pointers of 16 bytes. A token has `per_token` experts, and slot
// token * per_token + j is its j-th: slots is the slot of every sorted row, negative where a group of rows is filled up; places the
// sorted row of every slot; weights f32 by slot, or null for ones. Sums are in f32, in the order of a token's experts.
#include "eight.cuh"

enum { BLOCK = 128, COLUMNS = BLOCK * 8 };

// y[i] = x[slots[i] / per_token] weights[slots[i]], zeros where a group is filled up. Grid: (rows, width / 1024 upwards), block 128.
extern "C" __global__ void __launch_bounds__(BLOCK)
    experts_gather(const bf16 *x, const int *slots, const float *weights, bf16 *y, int x_stride, int y_stride, int width, int per_token) {
    const int column = blockIdx.y * COLUMNS + threadIdx.x * 8, slot = slots[blockIdx.x];
    if (column >= width) return;
    Eight values = {};
    if (slot >= 0) {
        values = Eight(x + (long long)(slot / per_token) * x_stride + column);
        if (weights) {
            const float weight = weights[slot];
#pragma unroll
            for (int i = 0; i < 8; i++) values.of[i] *= weight;
        }
    }
    values.store(y + (long long)blockIdx.x * y_stride + column);
}

// sum[token] += the sum over j of weights[slot] y[places[slot]]. Grid: (tokens, width / 1024 upwards), block 128.
extern "C" __global__ void __launch_bounds__(BLOCK)
    experts_combine(const bf16 *y, const int *places, const float *weights, bf16 *sum, int y_stride, int sum_stride, int width,
                    int per_token) {
    const int column = blockIdx.y * COLUMNS + threadIdx.x * 8;
    if (column >= width) return;
    bf16 *own = sum + (long long)blockIdx.x * sum_stride + column;
    Eight total(own);
#pragma unroll 4
    for (int j = 0; j < per_token; j++) {
        const int slot = blockIdx.x * per_token + j;
        const Eight row(y + (long long)places[slot] * y_stride + column);
        const float weight = weights ? weights[slot] : 1;
#pragma unroll
        for (int i = 0; i < 8; i++) total.of[i] += weight * row.of[i];
    }
    total.store(own);
}

// products[first + i] = the scalar product of row i of a and b, added if `adds`; of b_stride 0 all rows of b are one. Grid: rows / 8 upwards,
// block 256: a warp a row.
extern "C" __global__ void __launch_bounds__(256)
    experts_products(const bf16 *a, const bf16 *b, float *products, int a_stride, int b_stride, int rows, int width, int first,
                     int adds) {
    const int row = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    a += (long long)row * a_stride, b += (long long)row * b_stride;
    float sum = 0;
    for (int i = lane * 8; i < width; i += WARP * 8) {
        const Eight left(a + i), right(b + i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += left.of[j] * right.of[j];
    }
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) products[first + row] = adds ? products[first + row] + sum : sum;
}

// The gradient of scores [tokens, num_experts], f32, contiguous, whose softmax is `probabilities`, from the products of every row's
// weight and its gradient. chosen: the expert of every slot. Grid: tokens / 8 upwards, block 256: a warp a token.
extern "C" __global__ void __launch_bounds__(256)
    experts_scores(const float *probabilities, const float *products, const int *places, const int *chosen, float *gradient,
                   int tokens, int num_experts, int per_token) {
    const int token = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (token >= tokens) return;
    const long long first = (long long)token * num_experts;
    places += token * per_token, chosen += token * per_token;
    float sum = 0;
    for (int j = 0; j < per_token; j++) sum += products[places[j]];
    for (int i = lane; i < num_experts; i += WARP) gradient[first + i] = -probabilities[first + i] * sum;
    __syncwarp();
    for (int j = lane; j < per_token; j += WARP) gradient[first + chosen[j]] += products[places[j]];
}
