/* The driver's functions that write tensor maps. Limits are those of its manual; what no kernel of ours uses is NOT_SUPPORTED. */
#include "tensor_map.h"
#include <stdio.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801 };

static int refuse(int code, const char *why) {
    fprintf(stderr, "stand-in: tensor map refused: %s\n", why);
    return code;
}

static const u8 element_bytes[MAP_NUM_TYPES] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

static int encode(TensorMap *out, u32 type, u32 rank, u64 address, const u64 *size, const u64 *stride_bytes, const u32 *step, u32 interleave, u32 swizzle,
                  u32 is_nan_filled) {
    if ((u64)out % 64) return refuse(INVALID_VALUE, "its own address is not aligned to 64 bytes");
    if (type >= MAP_NUM_TYPES) return refuse(NOT_SUPPORTED, "element type");
    if (!rank || rank > MAX_RANK) return refuse(INVALID_VALUE, "rank");
    if (interleave || swizzle > 3) return refuse(NOT_SUPPORTED, "interleave, or a swizzle of atoms");
    if (address % 16) return refuse(INVALID_VALUE, "address is not aligned to 16 bytes");
    TensorMap m = {.magic = TENSOR_MAP_MAGIC, .type = (u8)type, .element_bytes = element_bytes[type], .rank = (u8)rank, .swizzle = (u8)swizzle,
                   .is_nan_filled = (u8)is_nan_filled, .address = address};
    for (u32 d = 0; d < rank; d++) {
        if (!size[d] || size[d] > 1ull << 32) return refuse(INVALID_VALUE, "size");
        if (!step[d] || step[d] > 8) return refuse(INVALID_VALUE, "element stride");
        m.size[d] = size[d];
        m.step[d] = d ? (u8)step[d] : 1;   /* that of the fastest axis is ignored */
        if (!d) continue;
        if (stride_bytes[d - 1] % 16 || stride_bytes[d - 1] >= 1ull << 40) return refuse(INVALID_VALUE, "stride");
        m.stride_bytes[d - 1] = stride_bytes[d - 1];
    }
    *out = m;
    return OK;
}

/* A row of the box fills the swizzle's span: how shorter ones are laid out is not documented. */
static int check_row(const TensorMap *m, u32 elements) {
    u32 bytes = elements * m->element_bytes, span = 16u << m->swizzle;
    if (bytes % 16) return refuse(INVALID_VALUE, "a row of the box is not of 16-byte pieces");
    if (m->swizzle && bytes > span) return refuse(INVALID_VALUE, "a row of the box is longer than the swizzle");
    if (m->swizzle && bytes < span) return refuse(NOT_SUPPORTED, "a row of the box is shorter than the swizzle");
    return OK;
}

API int cuTensorMapEncodeTiled(TensorMap *m, u32 type, u32 rank, u64 address, const u64 *size, const u64 *stride_bytes, const u32 *box, const u32 *step,
                               u32 interleave, u32 swizzle, u32 l2_promotion, u32 is_nan_filled) {
    (void)l2_promotion;
    int code = encode(m, type, rank, address, size, stride_bytes, step, interleave, swizzle, is_nan_filled);
    for (u32 d = 0; !code && d < rank; d++) {
        if (!box[d] || box[d] > 256) return refuse(INVALID_VALUE, "box");
        m->box[d] = (u16)box[d];
    }
    return code ? code : check_row(m, box[0]);
}

API int cuTensorMapEncodeIm2col(TensorMap *m, u32 type, u32 rank, u64 address, const u64 *size, const u64 *stride_bytes, const int *lower, const int *upper,
                                u32 channels, u32 pixels, const u32 *step, u32 interleave, u32 swizzle, u32 l2_promotion, u32 is_nan_filled) {
    (void)l2_promotion;
    int code = encode(m, type, rank, address, size, stride_bytes, step, interleave, swizzle, is_nan_filled);
    if (code) return code;
    if (rank < 3 || channels > 256 || pixels > 1024) return refuse(INVALID_VALUE, "box of pixels");
    int limit = rank == 3 ? 1 << 15 : rank == 4 ? 1 << 7 : 1 << 4;
    for (u32 d = 0; d + 2 < rank; d++) {
        if (lower[d] < -limit || lower[d] >= limit || upper[d] < -limit || upper[d] >= limit) return refuse(INVALID_VALUE, "corner of the box of pixels");
        m->lower[d] = (s16)lower[d];
        m->upper[d] = (s16)upper[d];
    }
    m->is_im2col = 1; m->channels = (u16)channels; m->pixels = (u16)pixels;
    return check_row(m, channels);
}
