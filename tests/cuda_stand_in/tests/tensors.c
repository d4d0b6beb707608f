#include "check.h"
enum { SIZE = 1 << 16 };
enum { U8, U16, U32, S32, U64, S64, F16, F32, F64, BF16, F32_FTZ, TF32 };

typedef struct Case {
    int type, bytes, rank, swizzle, nan;
    long size[5];
    unsigned box[5], step[5];
    int at[5];
} Case;

static unsigned char tensor[SIZE], shown[SIZE], want[SIZE], stored[SIZE];
static uint64_t maps[2][16] __attribute__((aligned(64)));

/* The byte of a box's element in shared memory by the manual's figures: 16-byte pieces change places within 2, 4 or 8 rows of 128 bytes. */
static long place(long byte, int swizzle) {
    long row = byte / 128, piece = byte / 16 % 8;
    if (swizzle == 1) piece ^= row & 1;
    if (swizzle == 2) piece ^= row & 3;
    if (swizzle == 3) piece ^= row & 7;
    return row * 128 + piece * 16 + byte % 16;
}

static void run(void *k, const Case *c, int store) {
    uint64_t size[5], stride[4];
    unsigned step[5];
    long pitch[5] = {c->bytes}, extent[5] = {1, 1, 1, 1, 1}, total = c->bytes;
    for (int d = 0; d < c->rank; d++) {
        size[d] = c->size[d];
        step[d] = c->step[d] ? c->step[d] : 1;
        if (d) stride[d - 1] = pitch[d] = (pitch[d - 1] * (d == 1 ? c->size[0] : c->size[d - 1]) + 15) / 16 * 16;
        extent[d] = (c->box[d] + step[d] - 1) / step[d];
        total *= extent[d];
    }
    for (int i = 0; i < SIZE; i++) tensor[i] = (unsigned char)(i * 31 + i / 256 * 7 + 1);
    for (int i = 0; c->type == F32 || c->type == TF32 ? i < SIZE / 4 : 0; i++) ((float *)tensor)[i] = 1 + (float)i / 4096;
    memset(want, 0, SIZE); memset(stored, 5, SIZE);
    ptr a = device(tensor, SIZE), b = device(0, SIZE), s = device(stored, SIZE);
    CALL(cuTensorMapEncodeTiled, maps[0], c->type, c->rank, a, size, stride, c->box, step, 0, c->swizzle, 2, c->nan);
    CALL(cuTensorMapEncodeTiled, maps[1], c->type, c->rank, s, size, stride, c->box, step, 0, c->swizzle, 0, 0);
    struct { int c[5], offset[3]; } at = {{0}, {0}};
    memcpy(at.c, c->at, sizeof at.c);
    int rank = c->rank, im2col = 0, bytes = (int)total;
    launch(k, 1, 32, 65536, (void *[]){maps[0], maps[1], &b, &at, &rank, &im2col, &bytes, &store});
    CALL(cuMemcpyDtoH_v2, shown, b, total);
    long n = total / c->bytes;
    for (long i = 0; i < n; i++) {
        long rest = i, from = 0, inside = 1;
        for (int d = 0; d < c->rank; d++) {
            long x = c->at[d] + rest % extent[d] * (d ? step[d] : 1);
            rest /= extent[d];
            from += x * pitch[d];
            inside &= x >= 0 && x < c->size[d];
        }
        unsigned char *to = want + place(i * c->bytes, c->swizzle);
        if (inside) {
            memcpy(to, tensor + from, c->bytes);
            if (c->type == TF32) { unsigned x; memcpy(&x, to, 4); x = (x + 0x1000) & ~0x1fffu; memcpy(to, &x, 4); }
            for (int e = 0; store == 1 && e < c->bytes; e++) stored[from + e] = tensor[from + e];
            if (store == 2) { unsigned x, y; memcpy(&x, tensor + from, 4); memcpy(&y, stored + from, 4); x += y; memcpy(stored + from, &x, 4); }
        } else if (c->nan) {
            memset(to, 0xff, c->bytes); to[c->bytes - 1] = 0x7f;
        }
    }
    long bad = 0;
    while (bad < total && shown[bad] == want[bad]) bad++;
    EXPECT(bad == total, "type %d rank %d swizzle %d: byte %ld of %ld is %d, expected %d", c->type, c->rank, c->swizzle, bad, total, shown[bad], want[bad]);
    if (store) {
        CALL(cuMemcpyDtoH_v2, shown, s, SIZE);
        EXPECT(!memcmp(shown, stored, SIZE), "store of type %d rank %d swizzle %d", c->type, c->rank, c->swizzle);
    }
    CALL(cuMemFree_v2, a); CALL(cuMemFree_v2, b); CALL(cuMemFree_v2, s);
}

/* Pixels of 3 x 3 boxes over an image [2, 5, 6, 16 channels] of f16 with a border of one: as a convolution reads them at one offset. */
static void run_im2col(void *k) {
    uint64_t size[] = {16, 6, 5, 2}, stride[] = {32, 192, 960};
    int lower[] = {-1, -1}, upper[] = {-1, -1};
    unsigned step[] = {1, 1, 1, 1};
    for (int i = 0; i < 2 * 960; i++) tensor[i] = (unsigned char)(i * 31 + i / 256 * 7 + 1);
    ptr a = device(tensor, 2 * 960), b = device(0, SIZE);
    enum { PIXELS = 24, CHANNELS = 8 };
    CALL(cuTensorMapEncodeIm2col, maps[0], F16, 4, a, size, stride, lower, upper, CHANNELS, PIXELS, step, 0, 0, 0, 0);
    struct { int c[5], offset[3]; } at = {{8, 2, -1, 0}, {2, 1}};
    int rank = 4, im2col = 1, bytes = PIXELS * CHANNELS * 2, store = 0;
    launch(k, 1, 32, 65536, (void *[]){maps[0], maps[1], &b, &at, &rank, &im2col, &bytes, &store});
    CALL(cuMemcpyDtoH_v2, shown, b, (size_t)bytes);
    /* Upper left corners run over [-1, 4) x [-1, 3) of each image. */
    int w = 2, h = -1, n = 0;
    for (int p = 0; p < PIXELS; p++) {
        for (int c = 0; c < CHANNELS * 2; c++) {
            int x = w + 2, y = h + 1, inside = x >= 0 && x < 6 && y >= 0 && y < 5;
            int expected = inside ? tensor[n * 960 + y * 192 + x * 32 + 16 + c] : 0;
            EXPECT(shown[p * 16 + c] == expected, "im2col pixel %d byte %d: %d, expected %d", p, c, shown[p * 16 + c], expected);
        }
        if (++w == 5) { w = -1; if (++h == 4) { h = -1; n++; } }
    }
}

int main(void) {
    void *k = kernel(load("tensors.ptx"), "boxes");
    static const Case cases[] = {
        {F32, 4, 1, 0, 0, {100}, {64}, {0}, {50}},
        {F32, 4, 2, 0, 0, {24, 20}, {16, 8}, {0}, {4, 5}},
        {F32, 4, 2, 0, 1, {24, 20}, {16, 8}, {0}, {-3, 15}},
        {TF32, 4, 2, 3, 0, {64, 40}, {32, 16}, {0}, {40, 30}},
        {BF16, 2, 2, 1, 0, {64, 40}, {16, 32}, {0}, {8, 20}},
        {BF16, 2, 2, 2, 0, {64, 40}, {32, 32}, {0}, {40, 20}},
        {BF16, 2, 2, 3, 0, {64, 40}, {64, 32}, {0}, {8, -4}},
        {F16, 2, 2, 3, 1, {72, 40}, {64, 32}, {0}, {16, 20}},
        {U8, 1, 3, 0, 0, {32, 10, 12}, {16, 4, 6}, {1, 1, 1}, {20, 8, 3}},
        {BF16, 2, 3, 3, 0, {128, 9, 5}, {64, 8, 2}, {1, 1, 1}, {64, 4, 4}},
        {F32, 4, 3, 0, 0, {16, 20, 11}, {8, 12, 5}, {1, 3, 2}, {4, 6, 8}},
        {S32, 4, 4, 0, 0, {8, 6, 5, 4}, {4, 3, 2, 3}, {0}, {2, 4, 3, 2}},
        {F64, 8, 5, 0, 0, {4, 5, 4, 3, 4}, {2, 3, 2, 2, 2}, {0}, {1, 3, 2, 2, 3}},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        run(k, &cases[i], 0);
        if (cases[i].type != TF32 && !cases[i].nan && (cases[i].rank == 2 || cases[i].rank == 3)) run(k, &cases[i], 1);
    }
    run(k, &(Case){S32, 4, 2, 3, 0, {40, 20}, {32, 8}, {0}, {20, 15}}, 2);
    run_im2col(k);
    uint64_t size[] = {64, 64}, stride[] = {136};
    unsigned box[] = {32, 32}, step[] = {1, 1};
    EXPECT(cuTensorMapEncodeTiled(maps[0], F32, 2, (ptr)4096, size, stride, box, step, 0, 0, 0, 0) == 1, "a stride that is no multiple of 16");
    return report();
}
