#include "check.h"
typedef unsigned u32;
typedef unsigned short u16;
enum { F16, BF16, TF32, S8, U8, E4M3, E5M2, F32, S32 };
static const int elements_per_word[] = {2, 2, 1, 4, 4, 4, 4, 1, 1};

/* A whole number from -4 to 4 as one type has it. */
static u32 encode(int x, int type) {
    static const u32 e4m3[] = {0, 0x38, 0x40, 0x44, 0x48}, e5m2[] = {0, 0x3c, 0x40, 0x42, 0x44};
    float f = (float)x;
    _Float16 h = (_Float16)f;
    u32 bits = 0;
    memcpy(&bits, &f, 4);
    switch (type) {
    case F16: { u16 half; memcpy(&half, &h, 2); return half; }
    case BF16: return bits >> 16;
    case S8: case U8: return (unsigned char)x;
    case E4M3: return e4m3[abs(x)] | (x < 0 ? 0x80 : 0);
    case E5M2: return e5m2[abs(x)] | (x < 0 ? 0x80 : 0);
    case S32: return (u32)x;
    default: return bits;
    }
}
static int number(int i, int type) { return type == U8 ? (i * 7 + i / 9) % 5 : (i * 7 + i / 9) % 9 - 4; }

static const struct { const char *name; int k, a, b, d; } products[] = {
    {"bf16_16", 16, BF16, BF16, F32}, {"bf16_8", 8, BF16, BF16, F32}, {"f16_16", 16, F16, F16, F32}, {"f16_f16", 16, F16, F16, F16}, {"tf32_8", 8, TF32, TF32, F32},
    {"tf32_4", 4, TF32, TF32, F32}, {"s8_32", 32, S8, S8, S32}, {"s8_u8", 32, S8, U8, S32}, {"u8_16", 16, U8, U8, S32}, {"e4m3", 32, E4M3, E5M2, F32}};

static void run_mma(void *m, int which) {
    int k_size = products[which].k, at = products[which].a, bt = products[which].b, dt = products[which].d, per = elements_per_word[at];
    u32 in[320] = {0}, got[128];
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, q = lane % 4;
        u32 *w = in + lane * 10;
        for (int k = 0; k < k_size; k++) {
            if (k / per % 4 != q) continue;   /* of each run of 4 words of a row this lane has one */
            int word = k / per / 4, shift = k % per * (32 / per);
            for (int half = 0; half < 2; half++) w[2 * word + half] |= encode(number((g + 8 * half) * k_size + k, at), at) << shift;
            w[4 + word] |= encode(number(k * 8 + g + 1000, bt), bt) << shift;
        }
        for (int r = 0; r < 4; r++) {
            u32 c = encode(r + 1, dt);
            if (dt == F16) w[6 + r / 2] |= c << 16 * (r & 1); else w[6 + r] = c;
        }
    }
    ptr a = device(in, sizeof in), b = device(0, sizeof got);
    launch(kernel(m, products[which].name), 1, 32, 0, (void *[]){&a, &b});
    CALL(cuMemcpyDtoH_v2, got, b, sizeof got);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            int lane = i % 8 * 4 + j / 2, r = i / 8 * 2 + j % 2, sum = r + 1;
            for (int k = 0; k < k_size; k++) sum += number(i * k_size + k, at) * number(k * 8 + j + 1000, bt);
            u32 x = dt == F16 ? (u16)(got[lane * 4 + r / 2] >> 16 * (r & 1)) : got[lane * 4 + r];
            EXPECT(x == encode(sum, dt), "%s %d %d: %x, expected %d", products[which].name, i, j, x, sum);
        }
}

static void run_matrices(void *m) {
    u16 in[256], got[256];
    for (int i = 0; i < 256; i++) in[i] = (u16)i;
    ptr a = device(in, sizeof in), b = device(0, sizeof got);
    launch(kernel(m, "matrices"), 1, 32, 0, (void *[]){&a, &b});
    CALL(cuMemcpyDtoH_v2, got, b, sizeof got);
    for (int i = 0; i < 256; i++) EXPECT(got[i] == in[i / 64 * 64 + i % 8 * 8 + i / 8 % 8], "matrices %d: %d", i, got[i]);
}

/* Where an element of A or B lies in shared memory. `row`: along M or N, of `rows`. */
static int place(int kind, int row, int k, int rows) {
    if (kind == 0) return k / 8 * (rows * 16) + row * 16 + k % 8 * 2;   /* 8 x 8 blocks, one column of them after the other */
    int byte = kind == 1 ? row * 128 + k * 2 : k * 128 + row * 2;
    return byte ^ (byte / 128 % 8) * 16;
}

static void run_wgmma(void *m, const char *name, int kind, int from_registers) {
    static unsigned char in[16384];
    static float got[64 * 32];
    for (int k = 0; k < 64; k++) {
        for (int i = 0; i < 64; i++) { u16 x = (u16)encode(number(i * 64 + k, BF16), BF16); memcpy(in + place(kind, i, k, 64), &x, 2); }
        for (int j = 0; j < 32; j++) { u16 x = (u16)encode(number(k * 32 + j + 77, BF16), BF16); memcpy(in + 8192 + place(kind, j, k, 32), &x, 2); }
    }
    ptr a = device(in, sizeof in), b = device(0, sizeof got);
    u32 step_a = kind == 0 ? 2048 : kind == 1 ? 32 : 2048, step_b = kind == 0 ? 1024 : step_a;
    struct { u32 leading_a, stride_a, leading_b, stride_b; } strides __attribute__((aligned(16))) = {1024, kind == 0 ? 128 : 1024, 512, kind == 0 ? 128 : 1024};
    launch(kernel(m, name), 1, 128, 0, (void *[]){&a, &b, &step_a, &step_b, &strides, &from_registers});
    CALL(cuMemcpyDtoH_v2, got, b, sizeof got);
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < 32; j++) {
            int sum = 1;
            for (int k = 0; k < 64; k++) sum += number(i * 64 + k, BF16) * number(k * 32 + j + 77, BF16);
            EXPECT(got[i * 32 + j] == (float)sum, "%s %d %d: %g, expected %d", name, i, j, got[i * 32 + j], sum);
        }
}

int main(void) {
    void *m = load("products.ptx");
    for (unsigned i = 0; i < sizeof products / sizeof *products; i++) run_mma(m, (int)i);
    run_matrices(m);
    run_wgmma(m, "wgmma_plain", 0, 0);
    run_wgmma(m, "wgmma_128", 1, 0);
    run_wgmma(m, "wgmma_128", 1, 1);
    run_wgmma(m, "wgmma_128_t", 2, 0);
    return report();
}
