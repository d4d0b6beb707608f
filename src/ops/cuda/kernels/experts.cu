// Tokens of a mixture to their experts: which ones, where their rows lie when sorted by expert, to these places, and back.
//
// Matrices are Half with widths and strides that are multiples of 8, pointers of 16 bytes. A token has `per_token` experts, and slot
// token * per_token + j is its j-th: slots is the slot of every sorted row, places the sorted row of every slot, chosen its expert;
// weights f32 by slot, or null for ones. Sums are in f32, in the order of a token's experts.
#include "eight.cuh"

typedef unsigned long long u64;
enum { BLOCK = 128, COLUMNS = BLOCK * 8, MOST_EXPERTS = 512, SORTERS = 256 };

// Greater for greater numbers, as f32's total order has them; of equal ones, for the first expert. Never 0.
INLINE u64 order_of(float score, int expert) {
    const unsigned bits = __float_as_uint(score);
    return (u64)(bits & 1u << 31 ? ~bits : bits | 1u << 31) << 32 | (unsigned)~expert;
}

// The experts with the highest scores [num_experts] of every token, f32, the highest first; the softmax of the scores of all
// experts, or of the chosen ones with 0 for others; and its numbers for the chosen ones, times their `scales` if there are any.
// Grid: tokens / 8 upwards, block 256: a warp a token. Up to 512 experts.
extern "C" __global__ void __launch_bounds__(256)
    experts_route(const float *scores, const float *scales, float *probabilities, int *chosen, float *weights, int tokens,
                  int num_experts, int per_token, int is_of_chosen) {
    const int token = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (token >= tokens) return;
    scores += (long long)token * num_experts, probabilities += (long long)token * num_experts;
    chosen += (long long)token * per_token, weights += (long long)token * per_token;
    float score[MOST_EXPERTS / WARP];
    // Bit i: the lane's i-th is chosen.
    unsigned taken = 0;
    float most = 0;
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / WARP; i++) score[i] = i * WARP + lane < num_experts ? scores[i * WARP + lane] : 0;
    for (int j = 0; j < per_token; j++) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < MOST_EXPERTS / WARP; i++)
            if (i * WARP + lane < num_experts && !(taken >> i & 1)) best = max(best, order_of(score[i], i * WARP + lane));
        for (int distance = 16; distance; distance /= 2) best = max(best, __shfl_xor_sync(~0u, best, distance));
        const int expert = ~(int)(unsigned)best;
        if (expert % WARP == lane) taken |= 1u << expert / WARP;
        if (lane == 0) chosen[j] = expert;
        if (j == 0) most = scores[expert];
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / WARP; i++)
        if (i * WARP + lane < num_experts) {
            score[i] = !is_of_chosen || taken >> i & 1 ? expf(score[i] - most) : 0;
            sum += score[i];
        }
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
    for (int i = 0; i < MOST_EXPERTS / WARP; i++)
        if (i * WARP + lane < num_experts) probabilities[i * WARP + lane] = score[i] / sum;
    __syncwarp();
    for (int j = lane; j < per_token; j += WARP) {
        const int expert = chosen[j];
        weights[j] = probabilities[expert] * (scales ? scales[expert] : 1);
    }
}

// Sorts slots by the experts that are chosen, those of an expert in their order. first: the first row of every expert, and at the
// end the number of rows. Grid: experts, block 256: a block finds the slots of its expert.
extern "C" __global__ void __launch_bounds__(SORTERS)
    experts_sort(const int *chosen, int *first, int *slots, int *places, int num_slots) {
    __shared__ int before[SORTERS / WARP], counts[SORTERS / WARP];
    const int own = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int share = (num_slots + SORTERS - 1) / SORTERS;
    const int begin = min((int)threadIdx.x * share, num_slots), end = min(begin + share, num_slots);
    int lower = 0, count = 0;
#pragma unroll 8
    for (int slot = begin; slot < end; slot++) lower += chosen[slot] < own, count += chosen[slot] == own;
    int until = count;
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int others = __shfl_up_sync(~0u, until, distance);
        if (lane >= distance) until += others;
    }
    for (int distance = 16; distance; distance /= 2) lower += __shfl_xor_sync(~0u, lower, distance);
    if (lane == WARP - 1) before[warp] = lower, counts[warp] = until;
    __syncthreads();
    int row = 0, total = 0;
    for (int i = 0; i < SORTERS / WARP; i++) row += before[i], total += counts[i];
    if (threadIdx.x == 0) first[own] = row;
    if (threadIdx.x == 0 && own == gridDim.x - 1) first[own + 1] = row + total;
    for (int i = 0; i < warp; i++) row += counts[i];
    row += until - count;
#pragma unroll 8
    for (int slot = begin; slot < end; slot++)
        if (chosen[slot] == own) slots[row] = slot, places[slot] = row++;
}

// y[i] = x[slots[i] / per_token] weights[slots[i]]. Grid: (rows, width / 1024 upwards), block 128.
extern "C" __global__ void __launch_bounds__(BLOCK)
    experts_gather(const Half *x, const int *slots, const float *weights, Half *y, int x_stride, int y_stride, int width, int per_token) {
    const int column = blockIdx.y * COLUMNS + threadIdx.x * 8, slot = slots[blockIdx.x];
    if (column >= width) return;
    Eight values(x + (long long)(slot / per_token) * x_stride + column);
    if (weights) {
        const float weight = weights[slot];
#pragma unroll
        for (int i = 0; i < 8; i++) values.of[i] *= weight;
    }
    values.store(y + (long long)blockIdx.x * y_stride + column);
}

// sum[token] += the sum over j of weights[slot] y[places[slot]]. Grid: (tokens, width / 1024 upwards), block 128.
extern "C" __global__ void __launch_bounds__(BLOCK)
    experts_combine(const Half *y, const int *places, const float *weights, Half *sum, int y_stride, int sum_stride, int width,
                    int per_token) {
    const int column = blockIdx.y * COLUMNS + threadIdx.x * 8;
    if (column >= width) return;
    Half *own = sum + (long long)blockIdx.x * sum_stride + column;
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

struct Biases {
    const float *of[240];
};

// The scalar product of a warp's row.
template <typename T> INLINE float scalar_product(const Half *a, const T *b, int width) {
    float sum = 0;
    for (int i = threadIdx.x % WARP * 8; i < width; i += WARP * 8) {
        const Eight left(a + i), right(b + i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += left.of[j] * right.of[j];
    }
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// products[i] = the scalar product of row i of a and b. Grid: rows / 8 upwards, block 256: a warp a row.
extern "C" __global__ void __launch_bounds__(256)
    experts_products(const Half *a, const Half *b, float *products, int a_stride, int b_stride, int rows, int width) {
    const int row = blockIdx.x * 8 + threadIdx.x / WARP;
    if (row >= rows) return;
    const float product = scalar_product(a + (long long)row * a_stride, b + (long long)row * b_stride, width);
    if (threadIdx.x % WARP == 0) products[row] = product;
}

// products[i] += the scalar product of row i of x and the bias of its expert, of those in the table, which begins with
// `first_expert`. Likewise.
extern "C" __global__ void __launch_bounds__(256)
    experts_bias_products(const __grid_constant__ Biases biases, const Half *x, const int *slots, const int *chosen, float *products,
                          int first_expert, int num_experts, int stride, int rows, int width) {
    const int row = blockIdx.x * 8 + threadIdx.x / WARP;
    if (row >= rows) return;
    const int expert = chosen[slots[row]] - first_expert;
    if (expert < 0 || expert >= num_experts) return;
    const float product = scalar_product(x + (long long)row * stride, biases.of[expert], width);
    if (threadIdx.x % WARP == 0) products[row] += product;
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
