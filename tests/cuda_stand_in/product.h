/* A product of matrices as a kernel that is C: product.c computes it, cublaslt.c launches it. */
#ifndef PRODUCT_H
#define PRODUCT_H
#include "driver.h"

enum { R_32F = 0, R_16F = 2, R_16BF = 14, R_E4M3 = 28 };   /* types of elements, as CUDA numbers them */

/* A product as the kernel gets it: pointers first, as its entry says. */
typedef struct Product {
    u64 a, b, c, d, work;
    u64 m, n, k, work_bytes;
    s64 row_a, k_a, col_b, k_b;   /* steps of an element of op(A) and op(B) */
    s64 ld_c, ld_d, stride[4];
    int in, out, batches;
    float alpha, beta;
    u64 scale[2];   /* where the numbers are that A and B are multiplied by, or 0 */
} Product;

extern const FkEntry product_entry;
int run_product(const u8 *params);

static inline u64 bytes_of(int type) { return type == R_32F ? 4 : type == R_E4M3 ? 1 : 2; }
static inline u64 least(u64 a, u64 b) { return a < b ? a : b; }
#endif
