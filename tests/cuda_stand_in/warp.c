/* Warp-wide instructions, of the lanes in `mask`, and those of tensor cores. */
#include "simt.h"
#include <stdlib.h>

/* Warp-wide instructions. `mask`: the lanes that take part. */

void w_activemask(Thr **w, u32 mask, const int *imm) {
    (void)imm;
    for (int l = 0; l < 32; l++) if (mask >> l & 1) w[l]->o[0] = mask;
}

void w_nop(Thr **w, u32 mask, const int *imm) { (void)w; (void)mask; (void)imm; }

void w_shfl(Thr **w, u32 mask, const int *imm) {
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        Thr *t = w[l];
        u32 b = t->a[1] & 31, c = t->a[2], seg = (c >> 8) & 31, clamp = c & 31;
        int max_lane = (int)((l & seg) | (clamp & ~seg)), min_lane = (int)(l & seg), j, ok;
        switch (imm[0]) {
        case 0: j = l - (int)b; ok = j >= max_lane; break;
        case 1: j = l + (int)b; ok = j <= max_lane; break;
        case 2: j = l ^ (int)b; ok = j <= max_lane; break;
        default: j = min_lane | (int)(b & ~seg); ok = j <= max_lane; break;
        }
        if (!ok) j = l;
        if (!(mask >> j & 1)) { simt_note("shfl reads a lane that does not take part", t->site); t->o[0] = 0xdeadbeef; }
        else t->o[0] = w[j]->a[0];
        t->o[1] = (u32)ok;
    }
}

void w_vote(Thr **w, u32 mask, const int *imm) {
    u32 ballot = 0;
    for (int l = 0; l < 32; l++) if (mask >> l & 1 && w[l]->a[0]) ballot |= 1u << l;
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1) w[l]->o[0] = imm[0] == 0 ? ballot == mask : imm[0] == 1 ? ballot != 0 : imm[0] == 2 ? ballot == mask || !ballot : ballot;
}

void w_match(Thr **w, u32 mask, const int *imm) {
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        u32 same = 0;
        for (int j = 0; j < 32; j++) if (mask >> j & 1 && w[j]->a[0] == w[l]->a[0] && w[j]->a[1] == w[l]->a[1]) same |= 1u << j;
        w[l]->o[1] = same == mask;
        w[l]->o[0] = imm[0] ? (same == mask ? mask : 0) : same;
    }
}

void w_redux(Thr **w, u32 mask, const int *imm) {
    u32 r = 0; int first = 1;
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        u32 x = w[l]->a[0];
        if (first) { r = x; first = 0; continue; }
        switch (imm[0]) {
        case 0: r += x; break;
        case 1: r = imm[1] ? (u32)((s32)x < (s32)r ? (s32)x : (s32)r) : x < r ? x : r; break;
        case 2: r = imm[1] ? (u32)((s32)x > (s32)r ? (s32)x : (s32)r) : x > r ? x : r; break;
        case 3: r &= x; break;
        case 4: r |= x; break;
        default: r ^= x;
        }
    }
    for (int l = 0; l < 32; l++) if (mask >> l & 1) w[l]->o[0] = r;
}

void w_elect(Thr **w, u32 mask, const int *imm) {
    (void)imm;
    int leader = __builtin_ctz(mask);
    for (int l = 0; l < 32; l++) if (mask >> l & 1) { w[l]->o[0] = (u32)leader; w[l]->o[1] = l == leader; }
}

static u16 get16(u64 p) { u16 x; memcpy(&x, (void *)p, 2); return x; }
static void put16(u64 p, u16 x) { memcpy((void *)p, &x, 2); }

static void row_check(Thr *t, u64 addr) {
    if (addr % 16) simt_fail("matrix row is not aligned to 16 bytes", t, t->site, addr);
    if (!simt_is_shared(addr, 16)) simt_fail("matrix row outside shared memory", t, t->site, addr);
}

void w_ldmatrix(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    for (int m = 0; m < imm[0]; m++) {
        for (int r = 0; r < 8; r++) row_check(w[m * 8 + r], w[m * 8 + r]->addr);
        for (int l = 0; l < 32; l++) {
            int r = l / 4, c = (l % 4) * 2;
            u16 lo, hi;
            if (imm[1]) { lo = get16(w[m * 8 + c]->addr + 2 * r); hi = get16(w[m * 8 + c + 1]->addr + 2 * r); }
            else { lo = get16(w[m * 8 + r]->addr + 2 * c); hi = get16(w[m * 8 + r]->addr + 2 * c + 2); }
            w[l]->o[m] = lo | (u32)hi << 16;
        }
    }
}

void w_stmatrix(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    for (int m = 0; m < imm[0]; m++) {
        for (int r = 0; r < 8; r++) { row_check(w[m * 8 + r], w[m * 8 + r]->addr); simt_wrote(w[m * 8 + r], w[m * 8 + r]->addr, 16); }
        for (int l = 0; l < 32; l++) {
            int r = l / 4, c = (l % 4) * 2;
            u16 lo = (u16)w[l]->a[m], hi = (u16)(w[l]->a[m] >> 16);
            if (imm[1]) { put16(w[m * 8 + c]->addr + 2 * r, lo); put16(w[m * 8 + c + 1]->addr + 2 * r, hi); }
            else { put16(w[m * 8 + r]->addr + 2 * c, lo); put16(w[m * 8 + r]->addr + 2 * c + 2, hi); }
        }
    }
}

enum { T_F16, T_BF16, T_TF32, T_F32, T_S8, T_U8, T_S32, T_E4M3, T_E5M2 };

static float element(u32 word, int part, int type) {
    switch (type) {
    case T_F16: return h2f((u16)(word >> (16 * part)));
    case T_BF16: return b2f((u16)(word >> (16 * part)));
    case T_TF32: return asf(word & 0xffffe000u);
    case T_S8: return (float)(s8)(word >> (8 * part));
    case T_U8: return (float)(u8)(word >> (8 * part));
    case T_E4M3: return e4m3_to_f((u8)(word >> (8 * part)));
    case T_E5M2: return h2f((u16)((word >> (8 * part)) << 8));
    default: return asf(word);
    }
}

static int elements_per_word(int type) { return type == T_TF32 || type == T_F32 || type == T_S32 ? 1 : type == T_F16 || type == T_BF16 ? 2 : 4; }

enum { MAX_N = 256, MAX_K = 32 };
/* The operands of one product of a warp, 16 rows of A by all of B, and its sums. */
static float A[16][MAX_K], B[MAX_K][MAX_N];
static double sums[16][MAX_N];

static void set_a(int lane, const u32 *words, int num_words, int type) {
    int per = elements_per_word(type), g = lane >> 2, q = lane & 3;
    for (int r = 0; r < num_words; r++)
        for (int e = 0; e < per; e++) A[g + 8 * (r & 1)][q * per + e + 4 * per * (r >> 1)] = element(words[r], e, type);
}

static void multiply(int n, int k_size) {
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < n; j++) sums[i][j] = 0;
        for (int k = 0; k < k_size; k++)
            for (int j = 0; j < n; j++) sums[i][j] += (double)A[i][k] * (double)B[k][j];
    }
}

/* Adds the sums of 8 columns from `first` to this lane's accumulators: 4 words, or 2 of f16. */
static void accumulate(int lane, int first, int type, const u32 *c, u32 *d) {
    int g = lane >> 2, q = lane & 3;
    for (int r = 0; r < 4; r++) {
        double s = sums[g + 8 * (r >> 1)][first + q * 2 + (r & 1)];
        if (type == T_S32) d[r] = c[r] + (u32)(s64)s;
        else if (type == T_F32) d[r] = fas((float)(s + (double)asf(c[r])));
        else {
            int shift = 16 * (r & 1);
            u32 x = (u32)d2h(s + (double)element(c[r >> 1], r & 1, T_F16)) << shift;
            d[r >> 1] = (d[r >> 1] & ~(0xffffu << shift)) | x;
        }
    }
}

/* mma.sync.m16n8kK: the layouts of fragments are those of the PTX manual. imm: k a_type b_type d_type regs_a regs_b */
void w_mma(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    int k_size = imm[0], bt = imm[2], ra = imm[4], rb = imm[5], per = elements_per_word(bt);
    for (int l = 0; l < 32; l++) {
        int g = l >> 2, q = l & 3;
        set_a(l, w[l]->a, ra, imm[1]);
        for (int r = 0; r < rb; r++)
            for (int e = 0; e < per; e++) B[q * per + e + 4 * per * r][g] = element(w[l]->a[ra + r], e, bt);
    }
    multiply(8, k_size);
    for (int l = 0; l < 32; l++) accumulate(l, 0, imm[3], w[l]->a + ra + rb, w[l]->o);
}

/* Where an element of a matrix in shared memory lies that a descriptor of wgmma names. `row` counts along M or N; `is_transposed`: K is
   the slow axis. */
static u64 described(u64 descriptor, u64 window, int row, int k, int type, int is_transposed) {
    int bytes = 4 / elements_per_word(type), t = 16 / bytes, kind = (int)(descriptor >> 62), atom = kind == 0 ? 1 : kind == 1 ? 8 : kind == 2 ? 4 : 2;
    u64 at = window | (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    int fast = is_transposed ? row : k, slow = is_transposed ? k : row;
    at += (u64)(slow % 8 * atom * 16 + fast % (t * atom) * bytes);
    if (!is_transposed || kind) at += (u64)(slow / 8) * stride + (u64)(fast / (t * atom)) * leading;
    else at += (u64)(slow / 8) * leading + (u64)(fast / t) * stride;
    return simt_swizzle(at, kind == 1 ? 7 : kind == 2 ? 3 : kind == 3 ? 1 : 0);
}

/* A wgmma of a warp, 16 rows of sums. It reads shared memory, and its sums are there, at wgmma.wait_group and no earlier.
   imm: n k a_type b_type d_type regs_a transposed_a transposed_b negated_a negated_b. */
enum { MAX_WAITING = 512, MAX_SUMS = 128 };
typedef struct Product {
    const int *imm;
    Thr *thread;
    int site, is_done;
    u32 number, group, num_writes;   /* group 0: not committed yet */
    u64 a, b;
    u32 words_of_a[32][4], scale[32], sums[32][MAX_SUMS];
    struct Product *next;
} Product;

static int words_of(const int *imm) { return imm[0] / (imm[4] == T_F16 ? 4 : 2); }

static u32 tag_of(const Product *p, int i) { return (u32)WGMMA_TAG << 16 | p->number % MAX_WAITING << 7 | (u32)i; }

/* Calls `visit` for the elements of B, and of A where it is in shared memory, `step` apart along the axis that is dense. */
static void for_operands(const Product *p, int step, void (*visit)(const Product *p, int is_b, int row, int k, u64 at)) {
    u64 window = simt_window(p->thread);
    const int *imm = p->imm;
    for (int is_b = !!imm[5]; is_b < 2; is_b++) {
        int first = is_b ? 0 : (int)(p->thread->warp % 4) * 16, rows = is_b ? imm[0] : 16, is_transposed = imm[6 + is_b];
        for (int row = 0; row < rows; row += is_transposed ? step : 1)
            for (int k = 0; k < imm[1]; k += is_transposed ? 1 : step)
                visit(p, is_b, row, k, described(is_b ? p->b : p->a, window, first + row, k, imm[2 + is_b], is_transposed));
    }
}

static void check_operand(const Product *p, int is_b, int row, int k, u64 at) {
    if (!simt_is_shared(at, 16)) simt_fail("operand of wgmma outside shared memory", p->thread, p->site, at);
    simt_read_async(p->thread, p->site, at, 16);
}

static void read_operand(const Product *p, int is_b, int row, int k, u64 at) {
    if (simt_last_write(at) > p->num_writes) simt_fail("operand of wgmma written before its wait", p->thread, p->site, at);
    u32 word = 0;
    memcpy(&word, (void *)at, 4 / (size_t)elements_per_word(p->imm[2 + is_b]));
    float x = element(word, 0, p->imm[2 + is_b]);
    if (!is_b) A[row][k] = x;
    else B[k][row] = p->imm[8] != p->imm[9] ? -x : x;
}

/* Operands: scale-d, descriptor of B, A. `addr`: the accumulators of a lane, in memory. */
void w_wgmma(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    if (!w[0]->is_fenced) simt_fail("wgmma without wgmma.fence since the last wait", w[0], w[0]->site, 0);
    Product *p = malloc(sizeof *p), **last = &w[0]->products;
    *p = (Product){.imm = imm, .thread = w[0], .site = w[0]->site, .number = w[0]->num_products++, .num_writes = simt_num_writes()};
    while (*last) last = &(*last)->next;
    *last = p;
    memcpy(&p->b, w[0]->a + 1, 8); memcpy(&p->a, w[0]->a + 3, 8);
    for (int l = 0; l < 32; l++) {
        u32 *sums = (u32 *)w[l]->addr;
        memcpy(p->words_of_a[l], w[l]->a + 3, 4 * (size_t)imm[5]);
        p->scale[l] = w[l]->a[0];
        for (int i = 0; i < words_of(imm); i++) { p->sums[l][i] = sums[i]; sums[i] = tag_of(p, i); }
    }
    for_operands(p, 4 * elements_per_word(imm[3]), check_operand);
}

void w_wgmma_commit(Thr **w, u32 mask, const int *imm) {
    (void)mask; (void)imm;
    w[0]->product_groups++;
    for (Product *p = w[0]->products; p; p = p->next) if (!p->group) p->group = w[0]->product_groups;
}

static void multiply_at_wait(Product *p) {
    static const u32 zeros[4];
    const int *imm = p->imm;
    for_operands(p, 1, read_operand);
    for (int l = 0; imm[5] && l < 32; l++) set_a(l, p->words_of_a[l], imm[5], imm[2]);
    multiply(imm[0], imm[1]);
    for (int l = 0; l < 32; l++)
        for (int j = 0, words = imm[4] == T_F16 ? 2 : 4; j < imm[0] / 8; j++) {
            u32 *d = p->sums[l] + words * j;
            accumulate(l, 8 * j, imm[4], p->scale[l] ? d : zeros, d);
        }
    p->is_done = 1;
    /* Later products add to what were its sums. */
    for (Product *q = p->next; q; q = q->next)
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < words_of(q->imm); i++) if ((q->sums[l][i] ^ tag_of(p, 0)) < MAX_SUMS) q->sums[l][i] = p->sums[l][q->sums[l][i] % MAX_SUMS];
}

/* imm: how many of the latest groups may still be under way. */
void w_wgmma_wait(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    for (int l = 0; l < 32; l++) w[l]->is_fenced = 0;
    for (Product *p; (p = w[0]->products) && p->is_done; free(p)) w[0]->products = p->next;
    for (Product *p = w[0]->products; p; p = p->next)
        if (p->group && p->group + (u32)imm[0] <= w[0]->product_groups) multiply_at_wait(p);
}

/* What came of a sum; `tag` itself before the wait. */
u32 wgmma_sum(Thr *t, u32 tag) {
    for (const Product *p = (t - t->lane)->products; p; p = p->next) if (p->is_done && (tag ^ tag_of(p, 0)) < MAX_SUMS) return p->sums[t->lane][tag % MAX_SUMS];
    return tag;
}

void wgmma_end(Thr *first_lane, int is_failed) {
    for (Product *p; (p = first_lane->products); free(p)) {
        first_lane->products = p->next;
        if (!p->is_done && !is_failed) simt_note("block ends before its wgmma does", p->site);
    }
}

/* wmma: the layout of its fragments is not documented, so any will do that loads, products and stores agree on. A lane has `elems`
   elements, numbered on through the lanes; where they are more than the matrix has, they repeat. */
static int fragment_at(int lane, int e, int elems, int total) { return (lane * elems + e) % total; }

static int elems_of(int type, int regs) { return regs * elements_per_word(type); }

static void copy_element(void *to, const void *from, int bytes) {
    if (bytes == 4) memcpy(to, from, 4); else if (bytes == 2) memcpy(to, from, 2); else memcpy(to, from, 1);
}

/* imm: rows cols type regs col_major */
void w_wmma_load(Thr **w, u32 mask, const int *imm) {
    int rows = imm[0], cols = imm[1], type = imm[2], regs = imm[3], col_major = imm[4], elems = elems_of(type, regs);
    int bytes = type == T_F16 || type == T_BF16 ? 2 : type == T_S8 || type == T_U8 ? 1 : 4;
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        memset(w[l]->o, 0, sizeof(u32) * (size_t)regs);
        for (int e = 0; e < elems; e++) {
            int at = fragment_at(l, e, elems, rows * cols), i = at / cols, j = at % cols;
            u64 p = w[l]->addr + (u64)bytes * (col_major ? (u64)j * w[l]->a[0] + (u64)i : (u64)i * w[l]->a[0] + (u64)j);
            copy_element((u8 *)w[l]->o + e * bytes, (void *)p, bytes);
        }
    }
}

void w_wmma_store(Thr **w, u32 mask, const int *imm) {
    int rows = imm[0], cols = imm[1], type = imm[2], regs = imm[3], col_major = imm[4], elems = elems_of(type, regs);
    int bytes = type == T_F16 || type == T_BF16 ? 2 : 4;
    for (int l = 0; l < 32; l++)
        for (int e = 0; mask >> l & 1 && e < elems; e++) {
            int at = fragment_at(l, e, elems, rows * cols), i = at / cols, j = at % cols;
            u64 p = w[l]->addr + (u64)bytes * (col_major ? (u64)j * w[l]->a[0] + (u64)i : (u64)i * w[l]->a[0] + (u64)j);
            simt_wrote(w[l], p, (u32)bytes);
            copy_element((void *)p, (u8 *)&w[l]->a[1] + e * bytes, bytes);
        }
}

static void collect(Thr **w, int first, int regs, int type, int total, double *out) {
    int per = elements_per_word(type), elems = elems_of(type, regs);
    for (int l = 0; l < 32; l++) {
        double *to = out + fragment_at(l, 0, elems, total);   /* a lane's elements never wrap: it has a divisor of the matrix */
        const u32 *words = w[l]->a + first;
        if (per == 1) { u32 mask = type == T_TF32 ? 0xffffe000u : ~0u; for (int r = 0; r < regs; r++) to[r] = asf(words[r] & mask); }
        else for (int r = 0; r < regs; r++) for (int e = 0; e < per; e++) to[r * per + e] = element(words[r], e, type);
    }
}

/* imm: m n k a_type d_type c_type regs_a regs_b regs_c regs_d */
void w_wmma_mma(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    int m = imm[0], n = imm[1], k = imm[2], ra = imm[6], rb = imm[7], rc = imm[8], rd = imm[9];
    static double a[1024], b[1024], c[1024];
    static float d[1024];
    collect(w, 0, ra, imm[3], m * k, a);
    collect(w, ra, rb, imm[3], k * n, b);
    if (imm[5] == T_S32) {
        for (int l = 0; l < 32; l++)
            for (int e = 0; e < rc; e++) {
                int at = fragment_at(l, e, rc, m * n), i = at / n, j = at % n;
                s64 s = (s32)w[l]->a[ra + rb + e];
                for (int x = 0; x < k; x++) s += (s64)a[i * k + x] * (s64)b[x * n + j];
                w[l]->o[e] = (u32)s;
            }
        return;
    }
    collect(w, ra + rb, rc, imm[5], m * n, c);
    for (int i = 0; i < m; i++) {
        double row[32] = {0};
        for (int x = 0; x < k; x++)
            for (int j = 0; j < n; j++) row[j] += a[i * k + x] * b[x * n + j];
        for (int j = 0; j < n; j++) d[i * n + j] = (float)(row[j] + c[i * n + j]);
    }
    int elems = elems_of(imm[4], rd);
    for (int l = 0; l < 32; l++)
        for (int e = 0; e < elems; e++) {
            float x = d[fragment_at(l, e, elems, m * n)];
            if (imm[4] == T_F16) {
                u16 h = f2h(x);
                memcpy((u8 *)w[l]->o + 2 * e, &h, 2);
            } else {
                w[l]->o[e] = fas(x);
            }
        }
}

