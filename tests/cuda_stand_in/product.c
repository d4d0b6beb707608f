/* A product of matrices on the processor, for cublaslt.c. */
#include "product.h"
#include <time.h>

/* D is computed in blocks of ROWS x COLS; of each the sums over DEPTH terms are taken in f32, and added in double. */
enum { TILE_ROWS = 16, TILE_COLS = 6, ROWS = 256, COLS = 252, DEPTH = 256 };
typedef float Eight __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) float number(const u8 *at, int type) {
    u16 half;
    float f;
    if (type == R_32F) { memcpy(&f, at, 4); return f; }
    if (type == R_E4M3) return e4m3_to_f(*at);
    memcpy(&half, at, 2);
    return type == R_16F ? h2f(half) : b2f(half);
}
static inline __attribute__((always_inline)) void pack_of(float *to, const u8 *from, int type, s64 step, s64 k_step,
                                                          u64 n, u64 depth, u64 width) {
    s64 size = (s64)bytes_of(type);
    for (u64 k = 0; k < depth; k++)
        for (u64 i = 0; i < width; i++)
            to[k * width + i] = i < n ? number(from + ((s64)i * step + (s64)k * k_step) * size, type) : 0;
}
/* `n` rows of op(A), or columns of op(B), over `depth` terms, as f32, with zeros up to `width`. */
static void pack(float *to, const u8 *from, int type, s64 step, s64 k_step, u64 n, u64 depth, u64 width) {
    if (type == R_32F) pack_of(to, from, R_32F, step, k_step, n, depth, width);
    else if (type == R_E4M3) pack_of(to, from, R_E4M3, step, k_step, n, depth, width);
    else if (type == R_16F) pack_of(to, from, R_16F, step, k_step, n, depth, width);
    else pack_of(to, from, R_16BF, step, k_step, n, depth, width);
}

static void add_tile(double *sums, const float *a, const float *b, u64 depth) {
    Eight acc[TILE_COLS][2] = {0};
    for (u64 k = 0; k < depth; k++, a += TILE_ROWS, b += TILE_COLS) {
        Eight low = *(const Eight *)a, high = *(const Eight *)(a + 8);
#pragma GCC unroll 6
        for (int j = 0; j < TILE_COLS; j++) {
            acc[j][0] += low * b[j];
            acc[j][1] += high * b[j];
        }
    }
    for (int j = 0; j < TILE_COLS; j++)
        for (int i = 0; i < TILE_ROWS; i++) sums[j * ROWS + i] += (double)acc[j][i / 8][i % 8];
}

static void put(const Product *p, u64 batch, u64 i, u64 j, double sum) {
    u8 *at = (u8 *)p->d + ((s64)batch * p->stride[3] + (s64)j * p->ld_d + (s64)i) * (s64)bytes_of(p->out);
    double x = (double)p->alpha * sum;
    for (int factor = 0; factor < 2; factor++)
        if (p->scale[factor]) x *= (double)*(const float *)p->scale[factor];
    if (p->beta != 0) {
        const u8 *c = (const u8 *)p->c + ((s64)batch * p->stride[2] + (s64)j * p->ld_c + (s64)i) * (s64)bytes_of(p->out);
        x += (double)p->beta * (double)number(c, p->out);
    }
    float f = (float)x;
    u16 half = p->out == R_16F ? f2h(f) : f2b(f);
    memcpy(at, p->out == R_32F ? (void *)&f : (void *)&half, bytes_of(p->out));
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int run_product(const u8 *params) {
    /* One product at a time: the driver's lock is held. */
    static float packed_a[ROWS * DEPTH] __attribute__((aligned(64))), packed_b[COLS * DEPTH];
    static double sums[COLS * ROWS];
    const Product *p = (const Product *)params;
    double began = cpu_seconds();
    /* The workspace's ends: all 32 MiB of it would take longer than most products. */
    if (p->work_bytes && stand_in.cfg->poison) {
        u64 n = least(p->work_bytes, 1 << 20);
        int byte = stand_in.cfg->poison == 1 ? 0xff : stand_in.cfg->poison;
        memset((void *)p->work, byte, n);
        memset((void *)(p->work + p->work_bytes - n), byte, n);
    }
    u64 size = bytes_of(p->in), num_i = (p->m + ROWS - 1) / ROWS, num_j = (p->n + COLS - 1) / COLS;
    for (u64 block = 0; block < num_i * num_j * (u64)p->batches; block++) {
        u64 i0 = block % num_i * ROWS, j0 = block / num_i % num_j * COLS, batch = block / num_i / num_j;
        u64 rows = least(ROWS, p->m - i0), cols = least(COLS, p->n - j0);
        const u8 *a = (const u8 *)p->a + ((s64)batch * p->stride[0] + (s64)i0 * p->row_a) * (s64)size;
        const u8 *b = (const u8 *)p->b + ((s64)batch * p->stride[1] + (s64)j0 * p->col_b) * (s64)size;
        if (*stand_in.limit_s > 0 && cpu_seconds() - began > *stand_in.limit_s) return 2;
        memset(sums, 0, sizeof sums);
        for (u64 k0 = 0; k0 < p->k; k0 += DEPTH) {
            u64 depth = least(DEPTH, p->k - k0);
            for (u64 i = 0; i < rows; i += TILE_ROWS)
                pack(packed_a + i * DEPTH, a + ((s64)i * p->row_a + (s64)k0 * p->k_a) * (s64)size, p->in, p->row_a, p->k_a,
                     least(TILE_ROWS, rows - i), depth, TILE_ROWS);
            for (u64 j = 0; j < cols; j += TILE_COLS)
                pack(packed_b + j * DEPTH, b + ((s64)j * p->col_b + (s64)k0 * p->k_b) * (s64)size, p->in, p->col_b, p->k_b,
                     least(TILE_COLS, cols - j), depth, TILE_COLS);
            for (u64 j = 0; j < cols; j += TILE_COLS)
                for (u64 i = 0; i < rows; i += TILE_ROWS)
                    add_tile(sums + j * ROWS + i, packed_a + i * DEPTH, packed_b + j * DEPTH, depth);
        }
        for (u64 j = 0; j < cols; j++)
            for (u64 i = 0; i < rows; i++) put(p, batch, i0 + i, j0 + j, sums[j * ROWS + i]);
    }
    return 0;
}

static const u32 param_size[] = {8, 8, 8, 8, 8, sizeof(Product) - 40}, param_offset[] = {0, 8, 16, 24, 32, 40};
const FkEntry product_entry = {.name = "cublasLt", .num_params = 6, .param_size = param_size, .param_offset = param_offset,
                              .params_bytes = sizeof(Product), .cluster = {1, 1, 1}};
