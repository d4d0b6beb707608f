// Matrices of codes as Half: out[i] = (table[code i] - zero) * scale, each of the scales and zeros of a block of numbers.
//
// codes: bytes; of four bits, two to a byte, the first in the upper half. table: f32, [256, codes of a byte], what the codes of
// each byte stand for. scales: f32, one for each `block_len` numbers, which is a multiple of 8. zeros: likewise, or null.
// nested_codes: null, or a byte for each block, whose scale is nested_table[byte] * scales[block / 256] + offset. Up to 64 matrices
// of one shape and coding, of `len` numbers each, a multiple of 8; they go one behind the other. Pointers are multiples of 16 bytes.
// A thread has eight numbers. Grid: (len / 2048 upwards, matrices); block: 256.
#include "eight.cuh"

enum { THREADS = 256, NESTED_LEN = 256 };

struct Coded {
    const unsigned char *codes;
    const float *scales, *zeros;
    const unsigned char *nested_codes;
    const float *nested_table;
    // In a word of its own.
    float offset;
};

struct Matrices {
    Coded of[64];
};

template <bool IS_FOUR_BITS> INLINE void decode(const Coded &matrix, const float *table, Half *out, long long len, int block_len) {
    constexpr int NUMBERS = IS_FOUR_BITS ? 16 : 256;
    // Of sixteen numbers, each has a bank of its own.
    __shared__ float numbers[NUMBERS];
    if (threadIdx.x < NUMBERS) numbers[threadIdx.x] = table[IS_FOUR_BITS ? threadIdx.x * 32 : threadIdx.x];
    __syncthreads();
    const long long first = ((long long)blockIdx.x * THREADS + threadIdx.x) * 8;
    if (first >= len) return;
    const long long block = first / block_len;
    float scale = matrix.scales[matrix.nested_codes ? block / NESTED_LEN : block];
    if (matrix.nested_codes) scale = __fadd_rn(__fmul_rn(matrix.nested_table[matrix.nested_codes[block]], scale), matrix.offset);
    const float zero = matrix.zeros ? matrix.zeros[block] : 0;
    Eight values;
    if (IS_FOUR_BITS) {
        const unsigned bytes = *(const unsigned *)(matrix.codes + first / 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values.of[2 * i] = numbers[bytes >> (8 * i + 4) & 15];
            values.of[2 * i + 1] = numbers[bytes >> 8 * i & 15];
        }
    } else {
        const uint2 bytes = *(const uint2 *)(matrix.codes + first);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values.of[i] = numbers[bytes.x >> 8 * i & 255];
            values.of[i + 4] = numbers[bytes.y >> 8 * i & 255];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) values.of[i] = (values.of[i] - zero) * scale;
    values.store(out + blockIdx.y * len + first);
}

#define DECODE(BITS, IS_FOUR_BITS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                        \
        decode_##BITS(const __grid_constant__ Matrices matrices, const float *table, Half *out, long long len, int block_len) {  \
        decode<IS_FOUR_BITS>(matrices.of[blockIdx.y], table, out, len, block_len);                                               \
    }

DECODE(4, true)
DECODE(8, false)
