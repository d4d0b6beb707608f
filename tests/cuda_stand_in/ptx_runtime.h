/* Shared by the driver stand-in (driver.c) and by the C that ptx2c.py makes of a kernel. */
#ifndef FK_RT_H
#define FK_RT_H
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64;
typedef unsigned __int128 u128;

enum { FK_MAX_WORDS = 40 };

/* One thread of a block. */
typedef struct Thr {
    u32 tid[3], ntid[3], ctaid[3], nctaid[3];
    u32 cluster_ctaid[3], cluster_nctaid[3], cluster_rank;
    u32 lane, warp, linear;
    u8 *dyn_shared;          /* dynamic shared memory of the block */
    u8 *stat_shared;         /* static shared memory of the block */
    const u8 *params;        /* parameters, laid out as the kernel says */
    /* A warp-wide operation in flight. */
    u32 a[FK_MAX_WORDS];     /* operands of this lane */
    u32 o[FK_MAX_WORDS];     /* results of this lane */
    u64 addr;
    /* Scheduler. */
    void *sp;
    void *stack;
    int state, site, aligned;
    u32 mask, bar_count;
    void (*fn)(struct Thr **warp, u32 mask, const int *imm);
    const int *imm;
    int has_arrived;         /* at the barrier of the cluster, in phase `cluster_phase` */
    u32 cluster_phase;
    u32 copy_groups[2];      /* groups committed so far: of cp.async, of cp.async.bulk */
    struct Product *products;   /* of the first lane of a warp: its wgmma, in order */
    u32 num_products, product_groups;
    int is_fenced;           /* by wgmma.fence, since the last wait */
    u32 fenced, met;         /* numbers of writes to shared memory: by fence.proxy.async, and at the last barrier or wait */
} Thr;

/* Until its wait a sum of wgmma is a NaN: this, the number of the product, and of the register. */
enum { WGMMA_TAG = 0xffd5 };

typedef void (*WarpFn)(Thr **warp, u32 mask, const int *imm);

/* What is done with a barrier object in shared memory (async.c). */
enum { MBARRIER_INIT, MBARRIER_INVAL, MBARRIER_ARRIVE, MBARRIER_ARRIVE_DROP, MBARRIER_EXPECT_TX, MBARRIER_COMPLETE_TX, MBARRIER_TEST_WAIT,
       MBARRIER_TRY_WAIT };

/* An asynchronous copy, or (COPY_ARRIVE) the arrival that follows the copies that its thread started before. */
enum { COPY_BYTES, COPY_TENSOR_LOAD, COPY_TENSOR_STORE, COPY_ARRIVE };
enum { REDUCE_NONE, REDUCE_F16, REDUCE_BF16, REDUCE_F32, REDUCE_F64, REDUCE_U32, REDUCE_U64 };
typedef struct FkCopy {
    int kind;
    u64 dst, src;            /* of a tensor's copy one of them is its tensor map */
    u32 bytes, filled;       /* COPY_BYTES: how many of the destination; how many come from the source, the rest become zero */
    u64 mbarrier;            /* is told that the bytes have come; 0: the copy belongs to a group of its thread */
    int is_bulk;             /* which groups */
    int is_counted;          /* COPY_ARRIVE: the barrier object is told now to wait for one arrival more */
    int reduce;              /* REDUCE_*: what is there is added to; of a tensor's store any but NONE, its map has the type */
    u32 ctas;                /* blocks of the cluster that get it at the same place, by rank; 0: the one that `dst` is in */
    s32 at[5];
    int is_im2col;
    u16 offset[3];
} FkCopy;

/* What the stand-in gives to kernels. */
typedef struct FkRt {
    void (*bar)(Thr *t, int site, int id, u32 count, int aligned);
    void (*warp)(Thr *t, int site, u32 mask, int aligned, WarpFn fn, const int *imm);
    void (*trap)(Thr *t, int site);
    void (*check)(Thr *t, int site, u64 addr, u32 bytes, int write);
    void (*bar_arrive)(Thr *t, int site, int id, u32 count);
    void (*pause)(Thr *t);
    void (*cluster_arrive)(Thr *t, int site);
    void (*cluster_wait)(Thr *t, int site);
    u64 (*mapa)(Thr *t, int site, u64 addr, u32 rank);
    u32 (*cta_rank)(Thr *t, int site, u64 addr);
    int (*is_shared)(u64 addr, u32 bytes);
    int (*is_local)(Thr *t, u64 addr);
    u64 (*mbarrier)(Thr *t, int site, int what, u64 addr, u64 count, u64 tx);
    void (*copy)(Thr *t, int site, const FkCopy *copy);
    void (*copy_commit)(Thr *t, int is_bulk);
    void (*copy_wait)(Thr *t, int is_bulk, u32 pending, int is_read_only);
    WarpFn activemask, shfl, vote, match, redux, nop, elect, ldmatrix, stmatrix, mma, wmma_load, wmma_store, wmma_mma, wgmma,
        wgmma_commit, wgmma_wait;
    u32 (*wgmma_sum)(Thr *t, u32 tag);
    void (*proxy_fence)(Thr *t);
} FkRt;

typedef struct FkEntry {
    const char *name;
    void (*run)(Thr *t);
    int num_params;
    const u32 *param_size, *param_offset;
    u32 params_bytes, static_shared, uses_sync, reqntid[3], cluster[3];
} FkEntry;

typedef struct FkModule {
    int num_entries;
    const FkEntry *entries;
    const char *const *sites;   /* source text of each numbered site */
    int num_sites;
} FkModule;

/* Numbers. */
static inline float asf(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 fas(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline double asd(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static inline u64 das(double f) { u64 x; memcpy(&x, &f, 8); return x; }
static inline float b2f(u16 x) { return asf((u32)x << 16); }
static inline float h2f(u16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
static inline float e4m3_to_f(u8 x) {
    int e = x >> 3 & 15, m = x & 7;
    if (e == 15 && m == 7) return asf(0x7fffffff);
    float f = e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    return x & 128 ? -f : f;
}
static inline u16 f2h(float f) { _Float16 h = (_Float16)f; u16 x; memcpy(&x, &h, 2); return f != f ? 0x7fff : x; }
/* The largest of either sign where it is beyond that. */
static inline u8 f2e4m3(float f) {
    float size = fabsf(f);
    if (f != f) return 0x7f;
    int e = size < 0.015625f ? -6 : size < 448 ? ilogbf(size) : 8;
    /* Eighths of the power of two; a whole one more is the next power's first. */
    int code = (e + 6) * 8 + (int)nearbyintf(ldexpf(size < 448 ? size : 448, 3 - e));
    return (u8)((signbit(f) ? 128 : 0) | code);
}
static inline u16 f2b(float f) {
    u32 x = fas(f);
    if (f != f) return 0x7fff;
    return (u16)((x + 0x7fff + ((x >> 16) & 1)) >> 16);
}
static inline u16 f2b_rz(float f) { return f != f ? 0x7fff : (u16)(fas(f) >> 16); }
/* A double as a float that is odd where it is inexact, so that a second rounding is right. */
static inline float d2f_odd(double d) {
    float f = (float)d;
    if (d != d || isinf(d) || (double)f == d) return f;
    u32 x = fas(f);
    if (fabs((double)f) > fabs(d)) x -= 1;   /* towards zero */
    return asf(x | 1);
}
static inline u16 d2b(double d) { return f2b(d2f_odd(d)); }
static inline u16 d2h(double d) { return f2h(d2f_odd(d)); }
static inline float ftz(float f) { return fabsf(f) < 1.17549435e-38f ? copysignf(0.0f, f) : f; }
/* What is exactly s + rest, s being it to the nearest, as a float rounded down ('m'), up ('p') or towards zero ('z'). */
static inline float round_directed(double s, double rest, char way) {
    float f = (float)s;
    if (!isfinite(s)) return f;
    if (way == 'z') way = s > 0 ? 'm' : 'p';
    if (way == 'm') return (double)f > s || ((double)f == s && rest < 0) ? nextafterf(f, -INFINITY) : f;
    return (double)f < s || ((double)f == s && rest > 0) ? nextafterf(f, INFINITY) : f;
}
static inline float add_directed(double a, double b, char way) {
    double s = a + b, c = s - a;
    if (s == 0) return way == 'm' && !(a == 0 && b == 0 && !signbit(a) && !signbit(b)) ? -0.0f : (float)s;
    return round_directed(s, (a - (s - c)) + (b - c), way);
}
static inline float satf(float f) { return f != f ? 0.0f : f < 0 ? 0.0f : f > 1 ? 1.0f : f; }
static inline double satd(double f) { return f != f ? 0.0 : f < 0 ? 0.0 : f > 1 ? 1.0 : f; }
static inline u32 f2tf32(float f) { u32 x = fas(f); if (f != f || isinf(f)) return x; return (x + 0x1000) & 0xffffe000u; }
static inline float minf_(float a, float b) { return a != a ? b : b != b ? a : (a == b) ? (signbit(a) ? a : b) : a < b ? a : b; }
static inline float maxf_(float a, float b) { return a != a ? b : b != b ? a : (a == b) ? (signbit(a) ? b : a) : a > b ? a : b; }
static inline float minf_nan(float a, float b) { return a != a || b != b ? asf(0x7fffffff) : minf_(a, b); }
static inline float maxf_nan(float a, float b) { return a != a || b != b ? asf(0x7fffffff) : maxf_(a, b); }
static inline double mind_(double a, double b) { return a != a ? b : b != b ? a : a < b ? a : b; }
static inline double maxd_(double a, double b) { return a != a ? b : b != b ? a : a > b ? a : b; }
static inline u64 sat_int(double v, double lo, double hi, s64 lo_i, u64 hi_i, int is_signed) {
    if (v <= lo) return (u64)lo_i;
    if (v >= hi) return hi_i;
    return is_signed ? (u64)(s64)v : (u64)v;
}
static inline u32 bfe_u(u64 a, u32 pos, u32 len, int bits) {
    pos &= 255; len &= 255;
    if (len == 0 || pos >= (u32)bits) return 0;
    u64 v = a >> pos;
    return (u32)(len >= 64 ? v : v & ((1ull << len) - 1));
}
static inline u64 bfe_u64(u64 a, u32 pos, u32 len) {
    pos &= 255; len &= 255;
    if (len == 0 || pos >= 64) return 0;
    u64 v = a >> pos;
    return len >= 64 ? v : v & ((1ull << len) - 1);
}
static inline s64 bfe_s(s64 a, u32 pos, u32 len, int bits) {
    pos &= 255; len &= 255;
    if (len == 0) return 0;
    int msb = bits - 1;
    int top = (int)(pos + len - 1) < msb ? (int)(pos + len - 1) : msb;
    int sign = (a >> top) & 1;
    u64 out = 0;
    for (int i = 0; i < bits; i++) {
        int at = (int)(pos + i);
        int bit = (i <= (int)len - 1 && at <= msb) ? (a >> at) & 1 : sign;
        out |= (u64)bit << i;
    }
    return bits == 32 ? (s32)out : (s64)out;
}
static inline u64 bfi_(u64 a, u64 b, u32 pos, u32 len, int bits) {
    pos &= 255; len &= 255;
    for (u32 i = 0; i < len && pos + i < (u32)bits; i++) {
        u64 bit = 1ull << (pos + i);
        b = ((a >> i) & 1) ? b | bit : b & ~bit;
    }
    return b;
}
static inline u32 prmt_(u32 a, u32 b, u32 sel) {
    u64 all = ((u64)b << 32) | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        u32 s = (sel >> (4 * i)) & 15;
        u32 byte = (u32)(all >> (8 * (s & 7))) & 255;
        if (s & 8) byte = (byte & 128) ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}
static inline u32 brev32(u32 x) { u32 y = 0; for (int i = 0; i < 32; i++) y |= ((x >> i) & 1u) << (31 - i); return y; }
static inline u64 brev64(u64 x) { return ((u64)brev32((u32)x) << 32) | brev32((u32)(x >> 32)); }
static inline u32 lop3_(u32 a, u32 b, u32 c, u32 lut) {
    u32 r = 0;
    if (lut & 1) r |= ~a & ~b & ~c;
    if (lut & 2) r |= ~a & ~b & c;
    if (lut & 4) r |= ~a & b & ~c;
    if (lut & 8) r |= ~a & b & c;
    if (lut & 16) r |= a & ~b & ~c;
    if (lut & 32) r |= a & ~b & c;
    if (lut & 64) r |= a & b & ~c;
    if (lut & 128) r |= a & b & c;
    return r;
}
#endif
