// A product of matrices that cuBLASLt does not take, of numbers of any type that it has, however they lie: y = factor A B (+ sum), with
// sums in f32 in one order. It is slow, by multiplications of f32 without tensor cores, and for what is left.
//
// A, [rows, depth], lies `row` from row to row and `depth` from column to column, B, [depth, columns], likewise with `column`; sum and y
// lie by rows. Each is `apart` from the next of a batch. Types: 0 f32, 1 bf16, 2 f16, 3 e4m3; those of sum and y are one. Factors are one
// number in f32 each, or null for 1.
#define IS_F16
#include "common.cuh"

enum { THREADS = 256, TILE = 64, DEPTH = 16, OWN = 4 };
enum { F32, BF16, F16, E4M3 };

struct Operand {
    const void *at;
    long long row, column, apart;
};

struct Product {
    Operand a, b, sum, y;
    const float *factors[2];
    int rows, columns, depth, of_factors, of_result;
};

INLINE float number(const void *from, long long at, int type) {
    if (type == F32) return ((const float *)from)[at];
    if (type == BF16) return __uint_as_float(((const Half *)from)[at] << 16);
    if (type == F16) return low_half(((const Half *)from)[at]);
    const unsigned code = ((const unsigned char *)from)[at], size = code & 0x7f;
    // Of the least exponent the numbers have no leading one.
    const float x = size == 0x7f ? __int_as_float(0x7fffffff) : size < 8 ? size / 512.0f : __uint_as_float((size << 20) + (120 << 23));
    return code & 0x80 ? -x : x;
}

INLINE void store(void *to, long long at, int type, float x) {
    if (type == F32) ((float *)to)[at] = x;
    if (type == F16) ((Half *)to)[at] = half_pair(x, 0);
    if (type != BF16) return;
    // To nearest even; what is no number stays so.
    const unsigned bits = __float_as_uint(x);
    ((Half *)to)[at] = x != x ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}

// Grid: (columns / 64 upwards, rows / 64 upwards, matrices of the batch); block: 256, each with 4 x 4 results.
extern "C" __global__ void __launch_bounds__(THREADS) product(const __grid_constant__ Product of) {
    __shared__ float a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    const int thread = threadIdx.x, first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    const long long in_a = of.a.apart * blockIdx.z, in_b = of.b.apart * blockIdx.z;
    float sums[OWN][OWN] = {};
    for (int first = 0; first < of.depth; first += DEPTH) {
        for (int i = thread; i < DEPTH * TILE; i += THREADS) {
            // Neighbours read what lies side by side.
            const int depth_of_a = of.a.column == 1 ? i % DEPTH : i / TILE, row = of.a.column == 1 ? i / DEPTH : i % TILE;
            const int depth_of_b = of.b.row == 1 ? i % DEPTH : i / TILE, column = of.b.row == 1 ? i / DEPTH : i % TILE;
            const bool is_in_a = first + depth_of_a < of.depth && first_row + row < of.rows;
            const bool is_in_b = first + depth_of_b < of.depth && first_column + column < of.columns;
            a[depth_of_a][row] = !is_in_a ? 0 : number(of.a.at, in_a + (first_row + row) * of.a.row + (first + depth_of_a) * of.a.column,
                                                       of.of_factors);
            b[depth_of_b][column] = !is_in_b ? 0 : number(of.b.at, in_b + (first + depth_of_b) * of.b.row + (first_column + column) * of.b.column,
                                                          of.of_factors);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float left[OWN], right[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) left[i] = a[k][thread / 16 + 16 * i], right[i] = b[k][thread % 16 + 16 * i];
#pragma unroll
            for (int i = 0; i < OWN * OWN; i++) sums[i / OWN][i % OWN] += left[i / OWN] * right[i % OWN];
        }
        __syncthreads();
    }
    const float factor = (of.factors[0] ? *of.factors[0] : 1) * (of.factors[1] ? *of.factors[1] : 1);
#pragma unroll
    for (int i = 0; i < OWN * OWN; i++) {
        const int row = first_row + thread / 16 + 16 * (i / OWN), column = first_column + thread % 16 + 16 * (i % OWN);
        if (row >= of.rows || column >= of.columns) continue;
        float x = sums[i / OWN][i % OWN] * factor;
        if (of.sum.at) x += number(of.sum.at, of.sum.apart * blockIdx.z + row * of.sum.row + column, of.of_result);
        store((void *)of.y.at, of.y.apart * blockIdx.z + row * of.y.row + column, of.of_result, x);
    }
}
