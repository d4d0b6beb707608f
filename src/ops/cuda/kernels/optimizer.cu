// The norm of all gradients, and AdamW (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101, algorithm 2) over many
// matrices in one launch: their pointers are a table that is a parameter, so nothing is copied to the device. A table makes the
// most of 4 KB of parameters; where there are more matrices there are more launches. Values are f32, pointers of 16 bytes.
#include "common.cuh"

enum { THREADS = 256 };

struct Gradients {
    struct {
        const float *values;
        long long size;
    } of[240];
};

struct Parameters {
    struct {
        float *parameter;
        const float *gradient;
        float *m, *v;
        long long size;
    } of[100];
};

// The sum of all threads' values, in the first.
INLINE double sum_of_block(double x) {
    __shared__ double sums[THREADS / WARP];
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int i = 1; threadIdx.x == 0 && i < THREADS / WARP; i++) x += sums[i];
    return x;
}

// sums[y][x] = the part of block (x, y) in the sum of squares of matrix y. Grid: (any number, number of matrices); block: 256. Where
// there are more launches, `sums` of the next begins where that of the last ends.
extern "C" __global__ void __launch_bounds__(THREADS) sum_of_squares(const __grid_constant__ Gradients gradients, double *sums) {
    const float *x = gradients.of[blockIdx.y].values;
    const long long size = gradients.of[blockIdx.y].size, step = (long long)gridDim.x * THREADS * 4;
    double sum = 0;
#pragma unroll 4
    for (long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * 4; i < size; i += step) {
        if (i + 4 <= size) {
            const float4 four = *(const float4 *)(x + i);
            sum += (double)four.x * four.x + (double)four.y * four.y + ((double)four.z * four.z + (double)four.w * four.w);
        } else
            for (long long j = i; j < size; j++) sum += (double)x[j] * x[j];
    }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) sums[(long long)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// *out = the sum of all `sums`. Grid: 1; block: 256.
extern "C" __global__ void __launch_bounds__(THREADS) sum_of_sums(const double *sums, float *out, int num_sums) {
    double sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < num_sums; i += THREADS) sum += sums[i];
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) *out = (float)sum;
}

struct Parts {
    struct {
        const float *values;
        long long size, first;
    } of[160];
};

// out[first ..] = the values of every part, one after another. Grid: (any number, number of parts); block: 256.
extern "C" __global__ void __launch_bounds__(THREADS) join(const __grid_constant__ Parts parts, float *out) {
    const auto &part = parts.of[blockIdx.y];
    const long long step = (long long)gridDim.x * THREADS;
#pragma unroll 4
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < part.size; i += step) out[part.first + i] = part.values[i];
}

// *factor = that of the gradients, from what the host reads later: the losses, and behind them the sum of the gradients' squares. It
// clips their mean over `count` as torch.nn.utils.clip_grad_norm_ does; NaN, of which AdamW makes no step, where a number is not
// finite. Grid: 1; block: 256.
extern "C" __global__ void __launch_bounds__(THREADS)
    grad_factor(const float *figures, float *factor, int num_losses, double max_norm, double count) {
    double num_others = 0;
    for (int i = threadIdx.x; i <= num_losses; i += THREADS) num_others += !isfinite(figures[i]);
    num_others = sum_of_block(num_others);
    if (threadIdx.x > 0) return;
    const double norm = sqrt((double)figures[num_losses]) / count;
    const double clip = max_norm > 0 ? fmin(max_norm / (norm + 1e-6), 1.0) : 1.0;
    *factor = num_others == 0 ? (float)(clip / count) : __int_as_float(0x7fc00000);
}

// One step, in place, with the constants that ops/cpu/optimizer.rs has, which are computed in f64:
//   decay 1 - learning_rate * weight_decay, step_size learning_rate / (1 - beta1^step), root_correction 1 / sqrt(1 - beta2^step)
struct AdamW {
    float decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps, grad_scale;

    INLINE void step(float &parameter, float gradient, float &m, float &v) const {
        gradient *= grad_scale;
        m += (gradient - m) * one_minus_beta1;
        v = v * beta2 + gradient * gradient * one_minus_beta2;
        parameter = parameter * decay - step_size * (m / (sqrtf(v) * root_correction + eps));
    }
};

// With a `factor`, it is in the place of `grad_scale`. Grid: (any number, number of matrices); block: 256.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw(const __grid_constant__ Parameters parameters, float decay, float one_minus_beta1, float beta2, float one_minus_beta2,
          float step_size, float root_correction, float eps, float grad_scale, const float *factor) {
    if (factor) grad_scale = *factor;
    if (!isfinite(grad_scale)) return;
    const AdamW update = {decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps, grad_scale};
    const auto &matrix = parameters.of[blockIdx.y];
    const long long size = matrix.size, step = (long long)gridDim.x * THREADS * 4;
    for (long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * 4; i < size; i += step) {
        if (i + 4 > size) {
            for (long long j = i; j < size; j++) update.step(matrix.parameter[j], matrix.gradient[j], matrix.m[j], matrix.v[j]);
            break;
        }
        float4 *to_parameter = (float4 *)(matrix.parameter + i);
        float4 *to_m = (float4 *)(matrix.m + i), *to_v = (float4 *)(matrix.v + i);
        const float4 gradient = *(const float4 *)(matrix.gradient + i);
        float4 parameter = *to_parameter, m = *to_m, v = *to_v;
        update.step(parameter.x, gradient.x, m.x, v.x);
        update.step(parameter.y, gradient.y, m.y, v.y);
        update.step(parameter.z, gradient.z, m.z, v.z);
        update.step(parameter.w, gradient.w, m.w, v.w);
        *to_parameter = parameter, *to_m = m, *to_v = v;
    }
}

// The numbers of 256 codes of the first and of the second moment, ascending.
struct Numbers {
    float of[2][256];
};

// A step of one matrix whose moments are codes (Dettmers et al., 2022, https://arxiv.org/abs/2110.02861), with the largest absolute
// number of every 256 as their scale. Grid: from 1 to size / 256 upwards; block: 256, an element each.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_8bit(float *parameter, const float *gradient, unsigned char *m_codes, unsigned char *v_codes, float *m_scales,
               float *v_scales, const __grid_constant__ Numbers numbers, long long size, float decay, float one_minus_beta1,
               float beta2, float one_minus_beta2, float step_size, float root_correction, float eps, float grad_scale,
               const float *factor) {
    if (factor) grad_scale = *factor;
    if (!isfinite(grad_scale)) return;
    const AdamW update = {decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps, grad_scale};
    // And the middles between neighbours: a number that is not above one has the lower code.
    __shared__ float of[2][256], middles[2][256], largest[2][THREADS / WARP];
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        of[i][thread] = numbers.of[i][thread];
        middles[i][thread] = (float)(((double)numbers.of[i][thread] + numbers.of[i][min(thread + 1, 255)]) * 0.5);
    }
    __syncthreads();
    for (long long block = blockIdx.x; block * 256 < size; block += gridDim.x) {
        const long long at = block * 256 + thread;
        const bool is_there = at < size;
        float moments[2] = {0, 0}, most[2];
        if (is_there) {
            moments[0] = of[0][m_codes[at]] * m_scales[block], moments[1] = of[1][v_codes[at]] * v_scales[block];
            float value = parameter[at];
            update.step(value, gradient[at], moments[0], moments[1]);
            parameter[at] = value;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = fabsf(moments[i]);
            for (int distance = 16; distance; distance /= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], distance));
            if (thread % WARP == 0) largest[i][thread / WARP] = most[i];
        }
        // All have read the scales.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < THREADS / WARP; j++) most[i] = fmaxf(most[i], largest[i][j]);
            if (most[i] == 0) most[i] = 1;
            if (thread == 0) (i ? v_scales : m_scales)[block] = most[i];
            const float scaled = moments[i] / most[i];
            int code = 0;
#pragma unroll
            for (int step = 128; step; step /= 2)
                if (middles[i][code + step - 1] < scaled) code += step;
            if (is_there) (i ? v_codes : m_codes)[at] = (unsigned char)code;
        }
        __syncthreads();
    }
}
