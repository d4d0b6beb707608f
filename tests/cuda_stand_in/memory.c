/* Device memory and pinned memory of the host, and copies. */
#include "driver.h"
#include <stdlib.h>
#include <sys/mman.h>

/* -- memory ---------------------------------------------------------------------------------------------- */

Block *blocks;
int num_blocks;
static int cap_blocks;
static Block *pinned; static int num_pinned, cap_pinned;
u64 peak_used, num_allocs, pinned_peak;
static u64 used, pinned_used;

int find(Block *list, int n, u64 at) {   /* last one that starts at or before `at` */
    int lo = 0, hi = n;
    while (lo < hi) { int mid = (lo + hi) / 2; if (list[mid].at <= at) lo = mid + 1; else hi = mid; }
    return lo - 1;
}

int is_device(u64 addr, u32 bytes) {
    static int last;
    if (last < num_blocks && addr >= blocks[last].at && addr + bytes <= blocks[last].at + blocks[last].bytes) return 1;
    int i = find(blocks, num_blocks, addr);
    if (i < 0 || addr + bytes > blocks[i].at + blocks[i].bytes) return 0;
    last = i;
    return 1;
}

static u64 add_block(Block **list, int *n, int *cap, u64 bytes, int poison) {
    u64 page = 4096, rounded = (bytes + 511) & ~511ull, map_bytes = ((rounded + page - 1) & ~(page - 1)) + 2 * page;
    u8 *map = mmap(0, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return 0;
    mprotect(map, page, PROT_NONE);
    mprotect(map + map_bytes - page, page, PROT_NONE);
    u64 at = (u64)(map + map_bytes - page) - rounded;
    if (poison && rounded <= (64u << 20)) memset((void *)at, simt_poison, rounded);
    if (*n == *cap) { *cap = *cap ? *cap * 2 : 64; *list = realloc(*list, sizeof(Block) * (size_t)*cap); }
    int i = find(*list, *n, at) + 1;
    memmove(*list + i + 1, *list + i, sizeof(Block) * (size_t)(*n - i));
    (*list)[i] = (Block){at, bytes, map, map_bytes};
    (*n)++;
    return at;
}

static int drop_block(Block *list, int *n, u64 at, u64 *bytes) {
    int i = find(list, *n, at);
    if (i < 0 || list[i].at != at) return 0;
    *bytes = list[i].bytes;
    munmap(list[i].map, list[i].map_bytes);
    memmove(list + i, list + i + 1, sizeof(Block) * (size_t)(*n - i - 1));
    (*n)--;
    return 1;
}

static CUresult allocate(CUdeviceptr *out, size_t bytes) {
    if (!bytes) return INVALID_VALUE;
    static int number;
    if (used + bytes > cfg.memory || ++number == cfg.oom_at) {
        tell("alloc %zu out of memory", bytes);
        return OUT_OF_MEMORY;
    }
    u64 at = add_block(&blocks, &num_blocks, &cap_blocks, bytes, cfg.poison);
    if (!at) return OUT_OF_MEMORY;
    used += bytes; num_allocs++;
    if (used > peak_used) peak_used = used;
    tell("alloc %zu at 0x%llx, used %llu", bytes, (unsigned long long)at, (unsigned long long)used);
    *out = at;
    return OK;
}

CUresult release(CUdeviceptr at) {
    u64 bytes;
    if (!at) return OK;
    if (!drop_block(blocks, &num_blocks, at, &bytes)) return INVALID_VALUE;
    used -= bytes;
    tell("free %llu", (unsigned long long)bytes);
    return OK;
}

static int is_pinned(const void *p) {
    int i = find(pinned, num_pinned, (u64)p);
    return i >= 0 && (u64)p < pinned[i].at + pinned[i].bytes;
}

/* -- API: memory ----------------------------------------------------------------------------------------- */

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(0) *free_bytes = cfg.memory - used;
    *total = cfg.memory;
    LEAVE(OK);
}
API CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) { ENTER(n) LEAVE(allocate(p, n)); }
API CUresult cuMemAllocAsync(CUdeviceptr *p, size_t n, void *s) { (void)s; ENTER(n) LEAVE(allocate(p, n)); }
API CUresult cuMemFree_v2(CUdeviceptr p) { ENTER(0) sync_all(); LEAVE(release(p)); }
API CUresult cuMemFreeAsync(CUdeviceptr p, void *s) {
    ENTER(0) Op op = {.kind = RELEASE, .dst = (void *)p};
    LEAVE(enqueue(s, op));
}
static CUresult pin(void **p, size_t n) {
    u64 at = add_block(&pinned, &num_pinned, &cap_pinned, n ? n : 1, 0);
    if (!at) return OUT_OF_MEMORY;
    pinned_used += n; if (pinned_used > pinned_peak) pinned_peak = pinned_used;
    tell("pin %zu", n);
    *p = (void *)at;
    return OK;
}
API CUresult cuMemAllocHost_v2(void **p, size_t n) { ENTER(n) LEAVE(pin(p, n)); }
API CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags) { (void)flags; ENTER(n) LEAVE(pin(p, n)); }
API CUresult cuMemFreeHost(void *p) {
    ENTER(0) sync_all();
    u64 bytes; if (!drop_block(pinned, &num_pinned, (u64)p, &bytes)) LEAVE(INVALID_VALUE);
    pinned_used -= bytes; LEAVE(OK);
}

static CUresult copy(void *dst, const void *src, size_t n, void *s, int host_src, int host_dst, int blocking) {
    if (host_src != 1 && n && !is_device((u64)src, (u32)n)) {
        tell("copy from what is not device memory");
        return INVALID_VALUE;
    }
    if (host_dst != 1 && n && !is_device((u64)dst, (u32)n)) {
        tell("copy to what is not device memory");
        return INVALID_VALUE;
    }
    tell("copy %s->%s %zu%s stream %d", host_src ? "host" : "device", host_dst ? "host" : "device", n,
         host_src   ? (is_pinned(src) ? " pinned" : " pageable")
         : host_dst ? (is_pinned(dst) ? " pinned" : " pageable")
                    : "",
         stream_of(s)->number);
    Op op = {.kind = COPY, .is_to_host = host_dst == 1, .dst = dst, .src = src, .bytes = n};
    /* Pageable memory is read before the call returns; pinned memory when the copy's turn comes. */
    if (cfg.lazy && host_src && !is_pinned(src)) { op.staged = malloc(n ? n : 1); memcpy(op.staged, src, n); }
    enqueue(s, op);
    if (blocking || (host_dst && !is_pinned(dst))) run_until(stream_of(s), ~0ull);
    return sticky;
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *h, size_t n, void *s) {
    ENTER(n) LEAVE(copy((void *)d, h, n, s, 1, 0, 0));
}
API CUresult cuMemcpyDtoHAsync_v2(void *h, CUdeviceptr d, size_t n, void *s) {
    ENTER(n) LEAVE(copy(h, (void *)d, n, s, 0, 1, 0));
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr a, CUdeviceptr b, size_t n, void *s) {
    ENTER(n) LEAVE(copy((void *)a, (void *)b, n, s, 0, 0, 0));
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void *h, size_t n) {
    ENTER(n) sync_all();
    LEAVE(copy((void *)d, h, n, 0, 1, 0, 1));
}
API CUresult cuMemcpyDtoH_v2(void *h, CUdeviceptr d, size_t n) {
    ENTER(n) sync_all();
    LEAVE(copy(h, (void *)d, n, 0, 0, 1, 1));
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr a, CUdeviceptr b, size_t n) {
    ENTER(n) sync_all();
    LEAVE(copy((void *)a, (void *)b, n, 0, 0, 0, 1));
}

typedef struct Copy2DParams {
    size_t src_x, src_y; int src_type; const void *src_host; CUdeviceptr src_device; void *src_array; size_t src_pitch;
    size_t dst_x, dst_y; int dst_type; void *dst_host; CUdeviceptr dst_device; void *dst_array; size_t dst_pitch;
    size_t width, height;
} Copy2DParams;
API CUresult cuMemcpy2DAsync_v2(const Copy2DParams *c, void *s) {
    ENTER(c->width * c->height)
    if (c->src_type > 2 || c->dst_type > 2 || c->src_pitch < c->width || c->dst_pitch < c->width) LEAVE(INVALID_VALUE);
    int from_host = c->src_type == 1, to_host = c->dst_type == 1;
    tell("copy2d %s->%s %zu x %zu, pitch %zu -> %zu", from_host ? "host" : "device", to_host ? "host" : "device",
         c->width, c->height, c->src_pitch, c->dst_pitch);
    Op op = {.kind = COPY2D, .is_to_host = to_host};
    op.src = from_host ? c->src_host : (void *)c->src_device;
    op.dst = to_host ? c->dst_host : (void *)c->dst_device;
    op.src = (const u8 *)op.src + c->src_y * c->src_pitch + c->src_x;
    op.dst = (u8 *)op.dst + c->dst_y * c->dst_pitch + c->dst_x;
    op.two = (Copy2D){c->src_pitch, c->dst_pitch, c->width, c->height};
    if (cfg.lazy && from_host && !is_pinned(op.src)) {
        size_t n = c->src_pitch * (c->height - 1) + c->width;
        op.staged = malloc(n); memcpy(op.staged, op.src, n);
    }
    enqueue(s, op);
    if (to_host && !is_pinned(op.dst)) run_until(stream_of(s), ~0ull);
    LEAVE(sticky);
}
static CUresult set(CUdeviceptr d, u32 v, size_t n, int unit, void *s) {
    Op op = {.kind = SET, .dst = (void *)d, .value = v, .bytes = n, .unit = unit};
    return enqueue(s, op);
}
API CUresult cuMemsetD8Async(CUdeviceptr d, u8 v, size_t n, void *s) { ENTER(n) LEAVE(set(d, v, n, 1, s)); }
API CUresult cuMemsetD16Async(CUdeviceptr d, u16 v, size_t n, void *s) { ENTER(n * 2) LEAVE(set(d, v, n, 2, s)); }
API CUresult cuMemsetD32Async(CUdeviceptr d, u32 v, size_t n, void *s) { ENTER(n * 4) LEAVE(set(d, v, n, 4, s)); }
API CUresult cuMemsetD8_v2(CUdeviceptr d, u8 v, size_t n) { ENTER(n) LEAVE(set(d, v, n, 1, 0)); }
