#define _GNU_SOURCE
#include "simt.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { RUNNABLE, AT_BARRIER, AT_WARP, DONE };
enum { MAX_THREADS = 1024, STACK_BYTES = 128 << 10, MAX_SHARED = 256 << 10, RED_ZONE = 4096 };

SimtNote simt_notes[256];
int simt_num_notes;
int (*simt_is_device_memory)(u64 addr, u32 bytes);

double simt_limit_s;
static double seconds(void) { struct timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }

static Thr threads[MAX_THREADS];
static u8 *stacks;
static u8 *shared_memory;
static void *scheduler_sp;
static const FkModule *current_module;
static const FkEntry *current_entry;
static u32 current_dyn_bytes, current_static_bytes;
static jmp_buf abort_launch;
static SimtError *current_error;
static int in_fiber;

/* Saves what the ABI asks a callee to keep, and swaps stacks. */
void si_switch(void **save, void *load);
__asm__(".text\n.globl si_switch\n.hidden si_switch\n.type si_switch,@function\nsi_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size si_switch,.-si_switch\n");

static const char *site_text(int site) {
    return current_module && site >= 0 && site < current_module->num_sites ? current_module->sites[site] : "?";
}

static void note(const char *what, int site) {
    char text[512];
    snprintf(text, sizeof text, "%s: %s in %.200s", what, site_text(site), current_entry ? current_entry->name : "?");
    for (int i = 0; i < simt_num_notes; i++)
        if (!strcmp(simt_notes[i].text, text)) { simt_notes[i].count++; return; }
    if (simt_num_notes < 256) {
        strcpy(simt_notes[simt_num_notes].text, text);
        simt_notes[simt_num_notes++].count = 1;
    }
}

static void fail(const char *what, Thr *t, int site, u64 addr) {
    snprintf(current_error->text, sizeof current_error->text, "%s at `%s` in %.300s, block %u,%u,%u thread %u,%u,%u, address 0x%llx", what,
             site_text(site), current_entry->name, t ? t->ctaid[0] : 0, t ? t->ctaid[1] : 0, t ? t->ctaid[2] : 0, t ? t->tid[0] : 0,
             t ? t->tid[1] : 0, t ? t->tid[2] : 0, (unsigned long long)addr);
    current_error->happened = 1;
    longjmp(abort_launch, 1);
}

static void yield_thread(Thr *t) { si_switch(&t->sp, scheduler_sp); }

static void rt_bar(Thr *t, int site, int id, u32 count, int aligned) {
    if (!in_fiber) fail("barrier in a kernel that was said to have none", t, site, 0);
    t->state = AT_BARRIER; t->site = site; t->mask = (u32)id; t->bar_count = count; t->aligned = aligned;
    yield_thread(t);
}

static void rt_warp(Thr *t, int site, u32 mask, int aligned, WarpFn fn, const int *imm) {
    if (!in_fiber) fail("warp-wide instruction in a kernel that was said to have none", t, site, 0);
    t->state = AT_WARP; t->site = site; t->mask = mask; t->aligned = aligned; t->fn = fn; t->imm = imm;
    yield_thread(t);
}

static void rt_trap(Thr *t, int site) { fail("trap", t, site, 0); }

static void rt_check(Thr *t, int site, u64 addr, u32 bytes, int write) {
    if (addr % (bytes > 16 ? 16 : bytes)) fail("misaligned access", t, site, addr);
    u64 dyn = (u64)t->dyn_shared, stat = (u64)t->stat_shared;
    if (addr >= dyn && addr + bytes <= dyn + current_dyn_bytes) return;
    if (addr >= stat && addr + bytes <= stat + current_static_bytes) return;
    if (simt_is_device_memory && simt_is_device_memory(addr, bytes)) return;
    /* Local memory, or a parameter, by a generic address. */
    u64 base = (u64)t->stack;
    if (base && addr >= base && addr + bytes <= base + STACK_BYTES) return;
    if (!write && addr >= (u64)t->params && addr + bytes <= (u64)t->params + current_entry->params_bytes) return;
    char here;
    u64 stack_now = (u64)&here;
    if (!in_fiber && addr + (1 << 20) > stack_now && addr < stack_now + (1 << 20)) return;
    fail(write ? "write out of bounds" : "read out of bounds", t, site, addr);
}

/* Warp-wide instructions. `mask`: the lanes that take part. */

static void w_activemask(Thr **w, u32 mask, const int *imm) {
    (void)imm;
    for (int l = 0; l < 32; l++) if (mask >> l & 1) w[l]->o[0] = mask;
}

static void w_nop(Thr **w, u32 mask, const int *imm) { (void)w; (void)mask; (void)imm; }

static void w_shfl(Thr **w, u32 mask, const int *imm) {
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
        if (!(mask >> j & 1)) { note("shfl reads a lane that does not take part", t->site); t->o[0] = 0xdeadbeef; }
        else t->o[0] = w[j]->a[0];
        t->o[1] = (u32)ok;
    }
}

static void w_vote(Thr **w, u32 mask, const int *imm) {
    u32 ballot = 0;
    for (int l = 0; l < 32; l++) if (mask >> l & 1 && w[l]->a[0]) ballot |= 1u << l;
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1) w[l]->o[0] = imm[0] == 0 ? ballot == mask : imm[0] == 1 ? ballot != 0 : imm[0] == 2 ? ballot == mask || !ballot : ballot;
}

static void w_match(Thr **w, u32 mask, const int *imm) {
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        u32 same = 0;
        for (int j = 0; j < 32; j++) if (mask >> j & 1 && w[j]->a[0] == w[l]->a[0] && w[j]->a[1] == w[l]->a[1]) same |= 1u << j;
        w[l]->o[1] = same == mask;
        w[l]->o[0] = imm[0] ? (same == mask ? mask : 0) : same;
    }
}

static void w_redux(Thr **w, u32 mask, const int *imm) {
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

static void w_elect(Thr **w, u32 mask, const int *imm) {
    (void)imm;
    int leader = __builtin_ctz(mask);
    for (int l = 0; l < 32; l++) if (mask >> l & 1) { w[l]->o[0] = (u32)leader; w[l]->o[1] = l == leader; }
}

static u16 get16(u64 p) { u16 x; memcpy(&x, (void *)p, 2); return x; }
static void put16(u64 p, u16 x) { memcpy((void *)p, &x, 2); }

static void row_check(Thr *t, u64 addr, int write) {
    u64 dyn = (u64)t->dyn_shared, stat = (u64)t->stat_shared;
    if (addr % 16) fail("matrix row is not aligned to 16 bytes", t, t->site, addr);
    if (!((addr >= dyn && addr + 16 <= dyn + current_dyn_bytes) || (addr >= stat && addr + 16 <= stat + current_static_bytes)))
        fail(write ? "stmatrix outside shared memory" : "ldmatrix outside shared memory", t, t->site, addr);
}

static void w_ldmatrix(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    for (int m = 0; m < imm[0]; m++) {
        for (int r = 0; r < 8; r++) row_check(w[m * 8 + r], w[m * 8 + r]->addr, 0);
        for (int l = 0; l < 32; l++) {
            int r = l / 4, c = (l % 4) * 2;
            u16 lo, hi;
            if (imm[1]) { lo = get16(w[m * 8 + c]->addr + 2 * r); hi = get16(w[m * 8 + c + 1]->addr + 2 * r); }
            else { lo = get16(w[m * 8 + r]->addr + 2 * c); hi = get16(w[m * 8 + r]->addr + 2 * c + 2); }
            w[l]->o[m] = lo | (u32)hi << 16;
        }
    }
}

static void w_stmatrix(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    for (int m = 0; m < imm[0]; m++) {
        for (int r = 0; r < 8; r++) row_check(w[m * 8 + r], w[m * 8 + r]->addr, 1);
        for (int l = 0; l < 32; l++) {
            int r = l / 4, c = (l % 4) * 2;
            u16 lo = (u16)w[l]->a[m], hi = (u16)(w[l]->a[m] >> 16);
            if (imm[1]) { put16(w[m * 8 + c]->addr + 2 * r, lo); put16(w[m * 8 + c + 1]->addr + 2 * r, hi); }
            else { put16(w[m * 8 + r]->addr + 2 * c, lo); put16(w[m * 8 + r]->addr + 2 * c + 2, hi); }
        }
    }
}

enum { T_F16, T_BF16, T_TF32, T_F32, T_S8, T_U8, T_S32 };

static float element(u32 word, int half, int type) {
    switch (type) {
    case T_F16: return h2f((u16)(word >> (16 * half)));
    case T_BF16: return b2f((u16)(word >> (16 * half)));
    case T_TF32: return asf(word & 0xffffe000u);
    case T_S8: return (float)(s8)(word >> (8 * half));
    case T_U8: return (float)(u8)(word >> (8 * half));
    default: return asf(word);
    }
}

/* mma.sync.m16n8kK: the layouts of fragments are those of the PTX manual. imm: m n k a_type b_type d_type regs_a regs_b regs_c */
static void w_mma(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    int k_size = imm[2], at = imm[3], bt = imm[4], ra = imm[6], rb = imm[7];
    static float A[16][32], B[32][8];
    int per = at == T_TF32 ? 1 : at == T_S8 || at == T_U8 ? 4 : 2;
    for (int l = 0; l < 32; l++) {
        int g = l >> 2, q = l & 3;
        for (int r = 0; r < ra; r++)
            for (int e = 0; e < per; e++) A[g + 8 * (r & 1)][q * per + e + 4 * per * (r >> 1)] = element(w[l]->a[r], e, at);
        for (int r = 0; r < rb; r++)
            for (int e = 0; e < per; e++) B[q * per + e + 4 * per * r][g] = element(w[l]->a[ra + r], e, bt);
    }
    for (int l = 0; l < 32; l++) {
        int g = l >> 2, q = l & 3;
        for (int r = 0; r < 4; r++) {
            int i = g + 8 * (r >> 1), j = q * 2 + (r & 1);
            double s = 0;
            for (int k = 0; k < k_size; k++) s += (double)A[i][k] * (double)B[k][j];
            u32 c = w[l]->a[ra + rb + r];
            w[l]->o[r] = imm[5] == T_S32 ? (u32)((s32)c + (s32)s) : fas((float)(s + (double)asf(c)));
        }
    }
}

/* wmma: the layout of its fragments is not documented, so any will do that loads, products and stores agree on. A lane has `elems`
   elements, numbered on through the lanes; where they are more than the matrix has, they repeat. */
static int fragment_at(int lane, int e, int elems, int total) { return (lane * elems + e) % total; }

static int elems_of(int type, int regs) { return type == T_F32 || type == T_TF32 || type == T_S32 ? regs : type == T_S8 || type == T_U8 ? regs * 4 : regs * 2; }

/* imm: rows cols type regs col_major */
static void w_wmma_load(Thr **w, u32 mask, const int *imm) {
    int rows = imm[0], cols = imm[1], type = imm[2], regs = imm[3], col_major = imm[4], elems = elems_of(type, regs);
    int bytes = type == T_F16 || type == T_BF16 ? 2 : type == T_S8 || type == T_U8 ? 1 : 4;
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        memset(w[l]->o, 0, sizeof(u32) * (size_t)regs);
        for (int e = 0; e < elems; e++) {
            int at = fragment_at(l, e, elems, rows * cols), i = at / cols, j = at % cols;
            u64 p = w[l]->addr + (u64)bytes * (col_major ? (u64)j * w[l]->a[0] + (u64)i : (u64)i * w[l]->a[0] + (u64)j);
            memcpy((u8 *)w[l]->o + e * bytes, (void *)p, (size_t)bytes);
        }
    }
}

static void w_wmma_store(Thr **w, u32 mask, const int *imm) {
    int rows = imm[0], cols = imm[1], type = imm[2], regs = imm[3], col_major = imm[4], elems = elems_of(type, regs);
    int bytes = type == T_F16 || type == T_BF16 ? 2 : 4;
    for (int l = 0; l < 32; l++)
        for (int e = 0; mask >> l & 1 && e < elems; e++) {
            int at = fragment_at(l, e, elems, rows * cols), i = at / cols, j = at % cols;
            u64 p = w[l]->addr + (u64)bytes * (col_major ? (u64)j * w[l]->a[0] + (u64)i : (u64)i * w[l]->a[0] + (u64)j);
            memcpy((void *)p, (u8 *)&w[l]->a[1] + e * bytes, (size_t)bytes);
        }
}

static void collect(Thr **w, int first, int regs, int type, int rows, int cols, float *out) {
    int elems = elems_of(type, regs);
    int half = type == T_F16 || type == T_BF16, byte = type == T_S8 || type == T_U8;
    for (int l = 0; l < 32; l++)
        for (int e = 0; e < elems; e++) {
            u32 word = w[l]->a[first + (half ? e / 2 : byte ? e / 4 : e)];
            float x = half ? element(word, e & 1, type) : byte ? element(word, e & 3, type) : element(word, 0, type);
            out[fragment_at(l, e, elems, rows * cols)] = x;
        }
}

/* imm: m n k a_type d_type c_type regs_a regs_b regs_c regs_d */
static void w_wmma_mma(Thr **w, u32 mask, const int *imm) {
    (void)mask;
    int m = imm[0], n = imm[1], k = imm[2], ra = imm[6], rb = imm[7], rc = imm[8], rd = imm[9];
    static float A[1024], B[1024], C[1024], D[1024];
    collect(w, 0, ra, imm[3], m, k, A);
    collect(w, ra, rb, imm[3], k, n, B);
    if (imm[5] == T_S32) {
        for (int l = 0; l < 32; l++)
            for (int e = 0; e < rc; e++) {
                int at = fragment_at(l, e, rc, m * n), i = at / n, j = at % n;
                s64 s = (s32)w[l]->a[ra + rb + e];
                for (int x = 0; x < k; x++) s += (s64)A[i * k + x] * (s64)B[x * n + j];
                w[l]->o[e] = (u32)s;
            }
        return;
    }
    collect(w, ra + rb, rc, imm[5], m, n, C);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double s = 0;
            for (int x = 0; x < k; x++) s += (double)A[i * k + x] * (double)B[x * n + j];
            D[i * n + j] = (float)(s + (double)C[i * n + j]);
        }
    int elems = elems_of(imm[4], rd);
    for (int l = 0; l < 32; l++)
        for (int e = 0; e < elems; e++) {
            float x = D[fragment_at(l, e, elems, m * n)];
            if (imm[4] == T_F16) {
                u16 h = f2h(x);
                memcpy((u8 *)w[l]->o + 2 * e, &h, 2);
            } else {
                w[l]->o[e] = fas(x);
            }
        }
}

const FkRt simt_runtime = {rt_bar, rt_warp, rt_trap, rt_check, w_activemask, w_shfl, w_vote, w_match, w_redux, w_nop, w_elect,
                           w_ldmatrix, w_stmatrix, w_mma, w_wmma_load, w_wmma_store, w_wmma_mma};

/* Fibers. */

static Thr *starting;

static void fiber_main(void) {
    Thr *t = starting;
    current_entry->run(t);
    t->state = DONE;
    for (;;) yield_thread(t);
}

static void make_fiber(Thr *t) {
    u64 top = ((u64)t->stack + STACK_BYTES - 64) & ~15ull;
    u64 *sp = (u64 *)top;
    *--sp = 0;                      /* a return address that is never used; keeps the ABI's alignment at entry */
    *--sp = (u64)fiber_main;
    for (int i = 0; i < 6; i++) *--sp = 0;
    t->sp = sp;
    t->state = RUNNABLE;
}

static void resume(Thr *t) {
    starting = t;
    in_fiber = 1;
    si_switch(&scheduler_sp, t->sp);
    in_fiber = 0;
}

/* Lets warp-wide instructions happen whose lanes are all there. All lanes are blocked or done. Gives whether any happened. */
static int meet(Thr **w) {
    int any = 0;
    u32 seen = 0;
    for (int l = 0; l < 32; l++) {
        if (!w[l] || w[l]->state != AT_WARP || seen >> l & 1) continue;
        u32 here = 0, alive = 0;
        for (int j = 0; j < 32; j++) {
            if (!w[j] || w[j]->state == DONE) continue;
            alive |= 1u << j;
            if (w[j]->state == AT_WARP && w[j]->site == w[l]->site) here |= 1u << j;
        }
        seen |= here;
        u32 group;
        if (w[l]->fn == w_activemask) {
            group = here;
        } else {
            u32 wanted = w[l]->mask & alive;
            if ((wanted & here) != wanted) continue;
            if (w[l]->aligned && (here != alive)) note("aligned warp instruction without all lanes", w[l]->site);
            if (w[l]->aligned && here != 0xffffffffu) note("aligned warp instruction in a warp that is not whole", w[l]->site);
            group = wanted;
            /* Loads and stores of wmma are those of each lane on every GPU so far: a note is enough for them. */
            if (w[l]->fn == w_ldmatrix || w[l]->fn == w_stmatrix || w[l]->fn == w_mma || w[l]->fn == w_wmma_mma)
                if (group != 0xffffffffu) fail("matrix instruction without all 32 lanes", w[l], w[l]->site, group);
        }
        w[l]->fn(w, group, w[l]->imm);
        for (int j = 0; j < 32; j++) if (group >> j & 1) w[j]->state = RUNNABLE;
        any = 1;
    }
    return any;
}

static void run_block(u32 n) {
    u32 warps = (n + 31) / 32;
    for (u32 i = 0; i < n; i++) make_fiber(&threads[i]);
    for (;;) {
        for (u32 wi = 0; wi < warps; wi++) {
            Thr *w[32] = {0};
            for (u32 l = 0; l < 32 && wi * 32 + l < n; l++) w[l] = &threads[wi * 32 + l];
            do {
                for (int l = 0; l < 32; l++)
                    if (w[l] && w[l]->state == RUNNABLE) resume(w[l]);
            } while (meet(w));
        }
        u32 done = 0, waiting = 0;
        for (u32 i = 0; i < n; i++) { done += threads[i].state == DONE; waiting += threads[i].state == AT_BARRIER; }
        if (done == n) return;
        /* Each barrier by its number. */
        int released = 0;
        for (u32 id = 0; id < 16; id++) {
            u32 here = 0, count = 0;
            int site = -1, mixed = 0;
            for (u32 i = 0; i < n; i++) {
                if (threads[i].state != AT_BARRIER || threads[i].mask != id) continue;
                here++;
                count = threads[i].bar_count;
                if (site >= 0 && site != threads[i].site) mixed = 1;
                site = threads[i].site;
            }
            if (!here) continue;
            u32 expected = count ? count : n - done;
            if (here < expected) continue;
            if (done && !count) note("barrier after some threads have ended", site);
            if (mixed) note("threads meet at different barrier instructions", site);
            for (u32 i = 0; i < n; i++) if (threads[i].state == AT_BARRIER && threads[i].mask == id) threads[i].state = RUNNABLE;
            released = 1;
        }
        if (!released) {
            Thr *stuck = 0;
            for (u32 i = 0; i < n && !stuck; i++) if (threads[i].state == AT_WARP || threads[i].state == AT_BARRIER) stuck = &threads[i];
            fail("deadlock: threads wait for each other", stuck, stuck ? stuck->site : -1, waiting);
        }
    }
}

int simt_poison = 0xff;
static void fill(u8 *p, size_t bytes) { memset(p, simt_poison, bytes); }   /* NaN, so that a use before a write shows */

int simt_run(const FkModule *module, const FkEntry *entry, const u32 grid[3], const u32 block[3], const u8 *params, u32 dyn_bytes,
             SimtError *error) {
    u32 n = block[0] * block[1] * block[2];
    error->happened = 0;
    if (!stacks) {
        stacks = mmap(0, (size_t)MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        shared_memory = mmap(0, 2 * MAX_SHARED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    current_module = module; current_entry = entry; current_error = error;
    current_dyn_bytes = dyn_bytes; current_static_bytes = entry->static_shared;
    if (n > MAX_THREADS || dyn_bytes > MAX_SHARED || entry->static_shared > MAX_SHARED) {
        snprintf(error->text, sizeof error->text, "launch of %u threads, %u bytes of shared memory", n, dyn_bytes);
        error->happened = 1;
        return 1;
    }
    if (setjmp(abort_launch)) { in_fiber = 0; return 1; }
    for (u32 i = 0; i < n; i++) {
        Thr *t = &threads[i];
        t->tid[0] = i % block[0]; t->tid[1] = i / block[0] % block[1]; t->tid[2] = i / (block[0] * block[1]);
        for (int d = 0; d < 3; d++) { t->ntid[d] = block[d]; t->nctaid[d] = grid[d]; }
        t->linear = i; t->lane = i % 32; t->warp = i / 32;
        t->dyn_shared = shared_memory; t->stat_shared = shared_memory + MAX_SHARED; t->params = params;
        t->stack = entry->uses_sync ? stacks + (size_t)i * STACK_BYTES : 0;
    }
    double end = simt_limit_s > 0 ? seconds() + simt_limit_s : 0;
    for (u32 z = 0; z < grid[2]; z++)
        for (u32 y = 0; y < grid[1]; y++)
            for (u32 x = 0; x < grid[0]; x++) {
                fill(shared_memory, dyn_bytes);
                fill(shared_memory + MAX_SHARED, entry->static_shared);
                for (u32 i = 0; i < n; i++) { threads[i].ctaid[0] = x; threads[i].ctaid[1] = y; threads[i].ctaid[2] = z; }
                if (entry->uses_sync) run_block(n);
                else for (u32 i = 0; i < n; i++) entry->run(&threads[i]);
                if (end && seconds() > end && (x + 1 < grid[0] || y + 1 < grid[1] || z + 1 < grid[2])) return 2;
            }
    return 0;
}
