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

// sums[y][x] = the part of block (x, y) in the sum of squares of matrix y. Grid: (16, number of matrices); block: 256. Where
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

// Grid: (16, number of matrices); block: 256.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw(const __grid_constant__ Parameters parameters, float decay, float one_minus_beta1, float beta2, float one_minus_beta2,
          float step_size, float root_correction, float eps, float grad_scale) {
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
