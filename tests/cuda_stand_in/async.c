/* Barrier objects (mbarrier) and asynchronous copies (cp.async, cp.async.bulk, copies of tensors). */
#include "simt.h"
#include "tensor_map.h"
#include <stdlib.h>

int simt_is_lazy;

/* -- barrier objects: 64 bits in shared memory -- */

enum { MAX_PENDING = (1 << 20) - 1, MAX_BARRIERS = 256 };
/* Those of the cluster that were initialized, and where; the first so many. */
static struct { u64 addr; Thr *thread; int site; u32 num_writes; } barriers[MAX_BARRIERS];
static u32 num_barriers;
typedef struct Mbarrier { u32 pending, expected; s32 tx; u32 phase; } Mbarrier;

/* Bits: 20 pending, 20 expected, 21 bytes that are still to come, 1 phase, and 01, which neither zeros nor NaN show. */
static int unpack(u64 x, Mbarrier *b) {
    *b = (Mbarrier){x & MAX_PENDING, x >> 20 & MAX_PENDING, (s32)((s64)(x << 3) >> 43), x >> 61 & 1};
    return x >> 62 == 1;
}
static u64 pack(const Mbarrier *b) {
    return (u64)b->pending | (u64)b->expected << 20 | ((u64)b->tx & 0x1fffff) << 40 | (u64)b->phase << 61 | 1ull << 62;
}

static Mbarrier get(Thr *t, int site, u64 addr) {
    Mbarrier b;
    if (addr % 8 || !simt_is_shared(addr, 8)) simt_fail("barrier object outside shared memory, or misaligned", t, site, addr);
    if (!unpack(*(u64 *)addr, &b)) simt_fail("barrier object that was not initialized", t, site, addr);
    return b;
}

static void put(u64 addr, Mbarrier b) {
    if (!b.pending && !b.tx) { b.pending = b.expected; b.phase ^= 1; }
    *(u64 *)addr = pack(&b);
}

int async_is_complete(u64 addr, u32 phase) { return (*(u64 *)addr >> 61 & 1) != phase; }

static void add_tx(Thr *t, int site, Mbarrier *b, s64 bytes) {
    if (b->tx + bytes > MAX_PENDING || b->tx + bytes < -MAX_PENDING) simt_fail("bytes of a barrier object out of range", t, site, (u64)bytes);
    b->tx += (s32)bytes;
}

/* Gives the state before an arrival, and whether the phase `count` is over for a test or wait. */
u64 async_mbarrier(Thr *t, int site, int what, u64 addr, u64 count, u64 tx) {
    if (what == MBARRIER_INIT) {
        if (addr % 8 || !simt_is_shared(addr, 8)) simt_fail("barrier object outside shared memory, or misaligned", t, site, addr);
        if (!count || count > MAX_PENDING) simt_fail("count of a barrier object out of range", t, site, addr);
        *(u64 *)addr = pack(&(Mbarrier){(u32)count, (u32)count, 0, 0});
        u32 i = 0;
        while (i < num_barriers && barriers[i].addr != addr) i++;
        if (i < MAX_BARRIERS) {
            barriers[i].addr = addr; barriers[i].thread = t; barriers[i].site = site; barriers[i].num_writes = simt_num_writes();
            num_barriers += i == num_barriers;
        }
        return 0;
    }
    Mbarrier b = get(t, site, addr);
    u64 state = *(u64 *)addr;
    switch (what) {
    case MBARRIER_INVAL: *(u64 *)addr = 0; return 0;
    case MBARRIER_TEST_WAIT:
        if (!async_is_complete(addr, (u32)count)) simt_pause(t);   /* for a loop around it */
        t->met = simt_num_writes();
        return (u64)async_is_complete(addr, (u32)count);
    case MBARRIER_TRY_WAIT:
        if (!async_is_complete(addr, (u32)count)) return (u64)simt_wait_for_phase(t, site, addr, (u32)count);
        t->met = simt_num_writes();
        return 1;
    case MBARRIER_EXPECT_TX: add_tx(t, site, &b, (s64)tx); break;
    case MBARRIER_COMPLETE_TX: add_tx(t, site, &b, -(s64)tx); break;
    default:
        if (count > b.pending) simt_fail("more arrivals at a barrier object than it waits for", t, site, addr);
        add_tx(t, site, &b, (s64)tx);
        b.pending -= (u32)count;
        if (what == MBARRIER_ARRIVE_DROP) b.expected -= (u32)count;
    }
    put(addr, b);
    return state;
}

/* -- what copies move -- */

static void check_device(const FkCopy *c, Thr *t, int site, u64 addr, u64 bytes) {
    if (bytes && simt_is_device_memory && !simt_is_device_memory(addr, (u32)bytes))
        simt_fail(c->kind == COPY_TENSOR_STORE ? "tensor map: write out of bounds" : "tensor map: read out of bounds", t, site, addr);
}

static void reduce(u8 *dst, const u8 *src, u32 bytes, int type) {
    int width = type == REDUCE_F16 || type == REDUCE_BF16 ? 2 : type == REDUCE_F64 || type == REDUCE_U64 ? 8 : 4;
    for (u32 i = 0; i < bytes; i += (u32)width) {
        u64 a = 0, b = 0;
        memcpy(&a, dst + i, (size_t)width); memcpy(&b, src + i, (size_t)width);
        switch (type) {
        case REDUCE_F16: a = f2h(h2f((u16)a) + h2f((u16)b)); break;
        case REDUCE_BF16: a = f2b(b2f((u16)a) + b2f((u16)b)); break;
        case REDUCE_F32: a = fas(asf((u32)a) + asf((u32)b)); break;
        case REDUCE_F64: a = das(asd(a) + asd(b)); break;
        default: a += b;
        }
        memcpy(dst + i, &a, (size_t)width);
    }
}

static int reduce_type(int map_type) {
    switch (map_type) {
    case MAP_F16: return REDUCE_F16;
    case MAP_BF16: return REDUCE_BF16;
    case MAP_F32: case MAP_F32_FTZ: return REDUCE_F32;
    case MAP_F64: return REDUCE_F64;
    case MAP_U64: case MAP_S64: return REDUCE_U64;
    default: return REDUCE_U32;
    }
}

/* Moves bytes between a row of shared memory, whose 16-byte pieces are permuted, and plain memory. */
static void swizzled(u64 shared, u8 *row, u32 bytes, u32 swizzle, int is_store) {
    u64 mask = swizzle == 3 ? 7 : swizzle == 2 ? 3 : swizzle == 1 ? 1 : 0;
    for (u32 i = 0; i < bytes; i += 16) {
        void *at = (void *)simt_swizzle(shared + i, mask);
        if (is_store) memcpy(row + i, at, 16); else memcpy(at, row + i, 16);
    }
}

static u32 box_extent(const TensorMap *m, int d) { return (m->box[d] + m->step[d] - 1u) / m->step[d]; }
static u32 row_bytes(const TensorMap *m) { return m->element_bytes * (m->is_im2col ? m->channels : (u32)m->box[0]); }

static u32 tensor_bytes(const TensorMap *m) {
    u32 bytes = row_bytes(m);
    if (m->is_im2col) return bytes * m->pixels;
    for (int d = 1; d < m->rank; d++) bytes *= box_extent(m, d);
    return bytes;
}

/* TMA gives f32 to kernels as its map says: rounded to TF32, subnormals as zero. */
static void convert(u8 *row, u32 bytes, int type) {
    if (type != MAP_F32_FTZ && type != MAP_TF32 && type != MAP_TF32_FTZ) return;
    for (u32 i = 0; i < bytes; i += 4) {
        u32 x; memcpy(&x, row + i, 4);
        if (type != MAP_TF32) x = fas(ftz(asf(x)));
        if (type != MAP_F32_FTZ) x = f2tf32(asf(x));
        memcpy(row + i, &x, 4);
    }
}

/* One row of a box: what of it lies in the tensor goes between there and shared memory; a load fills the rest. */
static void tensor_row(const FkCopy *c, Thr *t, int site, const TensorMap *m, const s64 at[MAX_RANK], u64 shared) {
    u8 row[4096];
    u32 width = m->element_bytes, bytes = row_bytes(m);
    u64 addr = m->address;
    int is_inside = 1;
    for (int d = 1; d < m->rank; d++) {
        is_inside &= at[d] >= 0 && at[d] < (s64)m->size[d];
        addr += (u64)at[d] * m->stride_bytes[d - 1];
    }
    s64 first = at[0] < 0 ? -at[0] : 0, end = (s64)m->size[0] - at[0], count = bytes / width;
    if (end > count) end = count;
    u32 inside = is_inside && end > first ? (u32)(end - first) * width : 0;
    u64 from = addr + (u64)(at[0] + first) * width;
    check_device(c, t, site, from, inside);
    if (c->kind == COPY_TENSOR_LOAD) {
        memset(row, 0, bytes);
        for (u32 i = 0; m->is_nan_filled && i < bytes; i++) row[i] = i % width == width - 1 ? 0x7f : 0xff;
        if (inside) memcpy(row + first * width, (void *)from, inside);
        convert(row, bytes, m->type);
        swizzled(shared, row, bytes, m->swizzle, 0);
    } else {
        swizzled(shared, row, bytes, m->swizzle, 1);
        if (c->reduce && inside) reduce((u8 *)from, row + first * width, inside, reduce_type(m->type));
        else if (inside) memcpy((void *)from, row + first * width, inside);
    }
}

static const TensorMap *map_of(const FkCopy *c, Thr *t, int site) {
    const TensorMap *m = (const TensorMap *)(c->kind == COPY_TENSOR_LOAD ? c->src : c->dst);
    if ((u64)m % 64) simt_fail("tensor map is not aligned to 64 bytes", t, site, (u64)m);
    if (m->magic != TENSOR_MAP_MAGIC) simt_fail("not a tensor map", t, site, (u64)m);
    if (m->is_im2col != c->is_im2col) simt_fail("tensor map of another mode, tiled or im2col", t, site, (u64)m);
    return m;
}

static void tensor_copy(const FkCopy *c, Thr *t, int site, u64 shared) {
    const TensorMap *m = map_of(c, t, site);
    s64 at[MAX_RANK];
    u32 bytes = row_bytes(m);
    if (shared % 128) simt_fail("shared memory of a tensor copy is not aligned to 128 bytes", t, site, shared);
    if (!simt_is_shared(shared, tensor_bytes(m))) simt_fail("tensor copy outside shared memory", t, site, shared);
    if (m->is_im2col) {
        /* The box of pixels is walked along its width, height, depth and then through the batch; each is read at its offset. */
        int pixel_axes = m->rank - 2;
        s64 pixel[MAX_RANK];
        for (int d = 0; d < m->rank; d++) pixel[d] = c->at[d];
        for (u32 p = 0; p < m->pixels; p++) {
            for (int d = 0; d < m->rank; d++) at[d] = pixel[d] + (d && d <= pixel_axes ? c->offset[d - 1] : 0);
            tensor_row(c, t, site, m, at, shared + (u64)p * bytes);
            int d = 1;
            for (; d <= pixel_axes; d++) {
                pixel[d] += m->step[d];
                if (pixel[d] < (s64)m->size[d] + m->upper[d - 1]) break;
                pixel[d] = m->lower[d - 1];
            }
            if (d > pixel_axes) pixel[d]++;
        }
        return;
    }
    u32 index[MAX_RANK] = {0};
    for (u64 offset = 0;; offset += bytes) {
        at[0] = c->at[0];
        for (int d = 1; d < m->rank; d++) at[d] = c->at[d] + (s64)index[d] * m->step[d];
        tensor_row(c, t, site, m, at, shared + offset);
        int d = 1;
        while (d < m->rank && ++index[d] == box_extent(m, d)) index[d++] = 0;
        if (d >= m->rank) return;
    }
}

/* -- when they happen -- */

typedef struct Pending {
    FkCopy copy;
    Thr *thread;
    int site;
    u32 group;              /* of its thread; 0: none yet */
    u8 *read_early;         /* a bulk store whose source was waited for: what it held then */
    struct Pending *next;
} Pending;
static Pending *oldest, **newest = &oldest;   /* of the cluster, in the order in which they were started */

static void perform(const FkCopy *c, Thr *t, int site, const u8 *read_early) {
    u32 bytes = c->kind == COPY_TENSOR_LOAD ? tensor_bytes(map_of(c, t, site)) : c->bytes;
    if (c->kind == COPY_ARRIVE) { async_mbarrier(t, site, MBARRIER_ARRIVE, c->mbarrier, 1, 0); return; }
    if (c->kind == COPY_TENSOR_STORE) { tensor_copy(c, t, site, c->src); return; }
    u32 ctas = c->ctas ? c->ctas : 1;
    for (u32 rank = 0; rank < 32; rank++) {
        if (!(ctas >> rank & 1)) continue;
        u64 dst = c->ctas ? simt_map_shared(t, site, c->dst, rank) : c->dst;
        simt_wrote(c->is_bulk ? 0 : t, dst, bytes);
        if (c->kind == COPY_TENSOR_LOAD) tensor_copy(c, t, site, dst);
        else if (c->reduce) reduce((u8 *)dst, read_early ? read_early : (u8 *)c->src, bytes, c->reduce);
        else {
            memcpy((void *)dst, read_early ? read_early : (u8 *)c->src, c->filled);
            memset((u8 *)dst + c->filled, 0, bytes - c->filled);
        }
        if (c->mbarrier) async_mbarrier(t, site, MBARRIER_COMPLETE_TX, c->ctas ? simt_map_shared(t, site, c->mbarrier, rank) : c->mbarrier, 0, bytes);
    }
}

static void perform_and_drop(Pending **link) {
    Pending *p = *link;
    *link = p->next;
    if (newest == &p->next) newest = link;
    Pending copy = *p;
    free(p);
    perform(&copy.copy, copy.thread, copy.site, copy.read_early);
    free(copy.read_early);
}

void async_copy(Thr *t, int site, const FkCopy *c) {
    if (c->is_bulk && c->kind == COPY_BYTES && (c->dst % 16 || c->src % 16 || c->bytes % 16)) simt_fail("bulk copy is not of aligned pieces of 16 bytes", t, site, c->src);
    if (c->is_bulk && c->kind != COPY_TENSOR_LOAD)
        simt_read_async(t, site, c->src, c->kind == COPY_BYTES ? c->bytes : tensor_bytes(map_of(c, t, site)));
    if (c->filled > c->bytes) simt_fail("copy takes more bytes than it gives", t, site, c->src);
    if (c->kind == COPY_ARRIVE && c->is_counted) {
        Mbarrier b = get(t, site, c->mbarrier);
        b.pending++;
        put(c->mbarrier, b);
    }
    if (!simt_is_lazy) { perform(c, t, site, 0); return; }
    Pending *p = malloc(sizeof *p);
    *p = (Pending){.copy = *c, .thread = t, .site = site};
    *newest = p;
    newest = &p->next;
}

void async_commit(Thr *t, int is_bulk) {
    u32 group = ++t->copy_groups[is_bulk];
    for (Pending *p = oldest; p; p = p->next)
        if (p->thread == t && p->copy.is_bulk == is_bulk && !p->copy.mbarrier && !p->group) p->group = group;
}

/* Lets the copies of a thread happen, but for its `pending` latest groups. `pending` ~0: all of them, committed or not. */
void async_wait(Thr *t, int is_bulk, u32 pending, int is_read_only) {
    for (Pending **link = &oldest; *link;) {
        Pending *p = *link;
        int is_waited_for = p->thread == t && p->copy.is_bulk == is_bulk && !p->copy.mbarrier
            && (pending == ~0u || (p->group && p->group + pending <= t->copy_groups[is_bulk]));
        if (!is_waited_for) { link = &p->next; continue; }
        if (!is_read_only) { perform_and_drop(link); continue; }
        /* Tensor stores would need the whole box: they happen, which is early but right. */
        if (p->copy.kind != COPY_BYTES) { perform_and_drop(link); continue; }
        if (!p->read_early) { p->read_early = malloc(p->copy.bytes); memcpy(p->read_early, (void *)p->copy.src, p->copy.bytes); }
        link = &p->next;
    }
}

int async_complete_one(void) {
    Pending **link = &oldest;
    while (*link && !(*link)->copy.mbarrier) link = &(*link)->next;
    if (!*link) return 0;
    if ((*link)->copy.kind == COPY_ARRIVE) {
        /* First the copies before it. */
        Pending *arrival = *link;
        link = &oldest;
        while (*link != arrival) {
            if ((*link)->thread == arrival->thread && !(*link)->copy.is_bulk) perform_and_drop(link);
            else link = &(*link)->next;
        }
    }
    perform_and_drop(link);
    return 1;
}

/* Stores happen, though nobody waited; what would have come to shared memory comes no more. */
void async_end(int is_failed) {
    while (oldest) {
        const FkCopy *c = &oldest->copy;
        if (!is_failed && c->is_bulk && !oldest->read_early) simt_note("block ends before its copy does", oldest->site);
        if (!is_failed && !c->mbarrier && !simt_is_shared(c->dst, 1)) { perform_and_drop(&oldest); continue; }
        Pending *p = oldest;
        oldest = p->next;
        free(p->read_early);
        free(p);
    }
    newest = &oldest;
    for (u32 i = 0; i < num_barriers && !is_failed; i++) {
        Mbarrier b;
        int is_there = simt_last_write(barriers[i].addr) <= barriers[i].num_writes;   /* its place may serve for something else */
        if (is_there && unpack(*(u64 *)barriers[i].addr, &b) && b.tx) {
            num_barriers = 0;
            simt_fail("barrier object that expects other bytes than came", barriers[i].thread, barriers[i].site, barriers[i].addr);
        }
    }
    num_barriers = 0;
}
