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

// The score of an order.
INLINE float score_of(u64 order) {
    const unsigned bits = order >> 32;
    return __uint_as_float(bits & 1u << 31 ? bits ^ 1u << 31 : ~bits);
}

INLINE u64 highest_of_warp(u64 own) {
    for (int distance = 16; distance; distance /= 2) own = max(own, __shfl_xor_sync(~0u, own, distance));
    return own;
}

INLINE float sum_of_warp(float own) {
    for (int distance = 16; distance; distance /= 2) own += __shfl_xor_sync(~0u, own, distance);
    return own;
}

// The scores of a token's experts: those of a lane are every 32nd, and are in masks by their number there.
struct Scores {
    enum { COUNT = MOST_EXPERTS / WARP };
    float of[COUNT];

    // The highest of those in the masks.
    INLINE u64 highest(unsigned mask) const {
        u64 own = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (mask >> i & 1) own = max(own, order_of(of[i], i * WARP + threadIdx.x % WARP));
        return highest_of_warp(own);
    }

    // Makes them their sigmoids, or exp(score - most); 0 of others. Their sum.
    INLINE float weigh(unsigned mask, bool is_sigmoid, float most) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            of[i] = !(mask >> i & 1) ? 0 : is_sigmoid ? 1 / (1 + expf(-of[i])) : expf(of[i] - most);
            sum += of[i];
        }
        return sum_of_warp(sum);
    }
};

// Takes an expert out of the mask of its lane.
INLINE int take(u64 order, unsigned &mask) {
    const int expert = ~(int)(unsigned)order;
    if (expert % WARP == threadIdx.x % WARP) mask &= ~(1u << expert / WARP);
    return expert;
}

// Of `groups` of neighbours, up to 32, the experts of the `kept` ones whose `best` highest scores have the largest sums.
INLINE unsigned in_kept_groups(const Scores &scores, int num_experts, int groups, int kept, int best) {
    const int lane = threadIdx.x % WARP, of_group = num_experts / groups;
    const auto mask_of = [&](int group) {
        unsigned mask = 0;
        for (int i = 0; i < Scores::COUNT; i++) mask |= (unsigned)((i * WARP + lane) / of_group == group) << i;
        return mask;
    };
    u64 own = 0;
    for (int group = 0; group < groups; group++) {
        unsigned left = mask_of(group);
        float sum = 0;
        for (int i = 0; i < min(best, of_group); i++) {
            const u64 highest = scores.highest(left);
            take(highest, left), sum += score_of(highest);
        }
        if (lane == group) own = order_of(sum, group);
    }
    unsigned mask = 0;
    for (int i = 0; i < kept; i++) {
        const u64 highest = highest_of_warp(own);
        if (own == highest) own = 0;
        mask |= mask_of(~(int)(unsigned)highest);
    }
    return mask;
}

enum { OF_ALL, OF_CHOSEN, SIGMOIDS, SIGMOIDS_OF_CHOSEN };

// The experts of every token, those with the highest scores [num_experts], f32, the highest first. probabilities: by `kind`, the
// softmax of the scores of all experts, or of the chosen ones with 0 for others; the sigmoids of all, or those of the chosen ones
// over their sum and `more`. weights: these of the chosen ones, times `factor` and their `scales` if there are any. With a `bias` or
// in groups, which are null and 0 if there are none, experts are chosen by the softmax or sigmoid of all and the bias, and among those
// of in_kept_groups. Grid: tokens / 8 upwards, block 256: a warp a token. Up to 512 experts.
extern "C" __global__ void __launch_bounds__(256)
    experts_route(const float *scores, const float *bias, const float *scales, float *probabilities, int *chosen, float *weights,
                  int tokens, int num_experts, int per_token, int kind, int groups, int kept_groups, int best_of_group, float more,
                  float factor) {
    const int token = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (token >= tokens) return;
    scores += (long long)token * num_experts, probabilities += (long long)token * num_experts;
    chosen += (long long)token * per_token, weights += (long long)token * per_token;
    const bool is_sigmoid = kind >= SIGMOIDS;
    Scores score;
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < Scores::COUNT; i++) {
        const bool is_there = i * WARP + lane < num_experts;
        score.of[i] = is_there ? scores[i * WARP + lane] : 0;
        all |= (unsigned)is_there << i;
    }
    float most = is_sigmoid ? 0 : score_of(score.highest(all));
    Scores choice = score;
    unsigned left = all;
    if (bias || groups) {
        const float sum = choice.weigh(all, is_sigmoid, most);
#pragma unroll
        for (int i = 0; i < Scores::COUNT; i++) {
            if (!is_sigmoid) choice.of[i] /= sum;
            if (bias && all >> i & 1) choice.of[i] += bias[i * WARP + lane];
        }
        if (groups) left &= in_kept_groups(choice, num_experts, groups, kept_groups, best_of_group);
    }
    unsigned taken = 0;
    float most_taken = -INFINITY;
    for (int j = 0; j < per_token; j++) {
        const unsigned before = left;
        const int expert = take(choice.highest(left), left);
        taken |= before & ~left, most_taken = fmaxf(most_taken, scores[expert]);
        if (lane == 0) chosen[j] = expert;
    }
    const bool is_of_chosen = kind == OF_CHOSEN || kind == SIGMOIDS_OF_CHOSEN;
    const float sum = score.weigh(is_of_chosen ? taken : all, is_sigmoid, is_of_chosen ? most_taken : most) + more;
#pragma unroll
    for (int i = 0; i < Scores::COUNT; i++)
        if (all >> i & 1) probabilities[i * WARP + lane] = kind == SIGMOIDS ? score.of[i] : score.of[i] / sum;
    __syncwarp();
    for (int j = lane; j < per_token; j += WARP) {
        const int expert = chosen[j];
        weights[j] = probabilities[expert] * (scales ? scales[expert] : 1) * factor;
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

// The gradient of scores [tokens, num_experts], f32, contiguous, from the products of every row's weight and its gradient: of softmax
// and of sigmoids over their sum by `probabilities`, of sigmoids alone without them; not yet times a sigmoid's slope. chosen: the expert
// of every slot. Grid: tokens / 8 upwards, block 256: a warp a token.
extern "C" __global__ void __launch_bounds__(256)
    experts_scores(const float *probabilities, const float *products, const int *places, const int *chosen, float *gradient,
                   int tokens, int num_experts, int per_token, int is_over_sum) {
    const int token = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (token >= tokens) return;
    const long long first = (long long)token * num_experts;
    places += token * per_token, chosen += token * per_token;
    float sum = 0;
    for (int j = 0; j < per_token; j++) sum += products[places[j]];
    for (int i = lane; i < num_experts; i += WARP) gradient[first + i] = is_over_sum ? -probabilities[first + i] * sum : 0;
    __syncwarp();
    for (int j = lane; j < per_token; j += WARP) gradient[first + chosen[j]] += products[places[j]];
}
