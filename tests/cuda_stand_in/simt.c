#define _GNU_SOURCE
#include "simt.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* AT_PHASE waits for the phase of a barrier object; PAUSED has looked in vain and may look again when the others have run. */
enum { RUNNABLE, PAUSED, AT_BARRIER, AT_CLUSTER_BARRIER, AT_WARP, AT_PHASE, DONE };
enum { MAX_THREADS = 1024, STACK_BYTES = 128 << 10, NUM_BARRIERS = 16, MAX_IDLE_ROUNDS = 1 << 14 };

SimtNote simt_notes[256];
int simt_num_notes;
int (*simt_is_device_memory)(u64 addr, u32 bytes);

double simt_limit_s;
static double seconds(void) { struct timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }

static Thr threads[MAX_CLUSTER * MAX_THREADS];   /* those of the block of rank 0, of rank 1, ... */
static u32 threads_per_block, blocks_per_cluster;
static u8 *stacks;
static u8 *shared_memory;
static void *scheduler_sp;
static const FkModule *current_module;
static const FkEntry *current_entry;
static u32 current_shared_bytes;
static u32 cluster_phase;
static u32 bar_arrivals[MAX_CLUSTER][NUM_BARRIERS];   /* threads that came by bar.arrive and did not stay */
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

void simt_add_note(const char *text) {
    for (int i = 0; i < simt_num_notes; i++)
        if (!strcmp(simt_notes[i].text, text)) { simt_notes[i].count++; return; }
    if (simt_num_notes < 256) {
        snprintf(simt_notes[simt_num_notes].text, sizeof simt_notes->text, "%s", text);
        simt_notes[simt_num_notes++].count = 1;
    }
}

void simt_note(const char *what, int site) {
    char text[512];
    snprintf(text, sizeof text, "%s: %s in %.200s", what, site_text(site), current_entry ? current_entry->name : "?");
    simt_add_note(text);
}

void simt_fail(const char *what, Thr *t, int site, u64 addr) {
    snprintf(current_error->text, sizeof current_error->text, "%s at `%s` in %.300s, block %u,%u,%u thread %u,%u,%u, address 0x%llx", what,
             site_text(site), current_entry->name, t ? t->ctaid[0] : 0, t ? t->ctaid[1] : 0, t ? t->ctaid[2] : 0, t ? t->tid[0] : 0,
             t ? t->tid[1] : 0, t ? t->tid[2] : 0, (unsigned long long)addr);
    current_error->happened = 1;
    longjmp(abort_launch, 1);
}

/* -- who wrote shared memory: by words of 4 bytes -- */

static u32 num_writes, last_write[MAX_CLUSTER * SHARED_WINDOW / 4], fenced_by_others;
static const Thr *writer[MAX_CLUSTER * SHARED_WINDOW / 4];

void simt_wrote(const Thr *t, u64 addr, u32 bytes) {
    if (!simt_is_shared(addr, bytes)) return;
    num_writes++;
    for (u64 i = (addr - (u64)shared_memory) / 4; i * 4 < addr - (u64)shared_memory + bytes; i++) { last_write[i] = num_writes; writer[i] = t; }
}

u32 simt_num_writes(void) { return num_writes; }
u32 simt_last_write(u64 addr) { return simt_is_shared(addr, 1) ? last_write[(addr - (u64)shared_memory) / 4] : 0; }

void simt_read_async(Thr *t, int site, u64 addr, u32 bytes) {
    if (!simt_is_shared(addr, bytes)) return;
    for (u64 i = (addr - (u64)shared_memory) / 4; i * 4 < addr - (u64)shared_memory + bytes; i++)
        if (last_write[i] && writer[i] && last_write[i] > writer[i]->fenced && last_write[i] > fenced_by_others)
            simt_fail("read by the async proxy without fence.proxy.async after the write", t, site, (u64)shared_memory + i * 4);
}

static void rt_proxy_fence(Thr *t) {
    t->fenced = num_writes;
    if (t->met > fenced_by_others) fenced_by_others = t->met;
}

/* -- addresses -- */

int simt_is_shared(u64 addr, u32 bytes) {
    u64 base = (u64)shared_memory, at = addr - base;
    return addr >= base && at / SHARED_WINDOW < blocks_per_cluster && at % SHARED_WINDOW + bytes <= current_shared_bytes;
}

u64 simt_window(const Thr *t) { return (u64)shared_memory + (u64)t->cluster_rank * SHARED_WINDOW; }

static u32 rt_cta_rank(Thr *t, int site, u64 addr) {
    if (!simt_is_shared(addr, 1)) simt_fail("address outside shared memory", t, site, addr);
    return (u32)((addr - (u64)shared_memory) / SHARED_WINDOW);
}

u64 simt_map_shared(Thr *t, int site, u64 addr, u32 rank) {
    if (rank >= blocks_per_cluster) simt_fail("block rank outside the cluster", t, site, rank);
    rt_cta_rank(t, site, addr);
    return (u64)shared_memory + (u64)rank * SHARED_WINDOW + (addr - (u64)shared_memory) % SHARED_WINDOW;
}

static int rt_is_local(Thr *t, u64 addr) {
    u64 base = (u64)t->stack;
    if (base) return addr >= base && addr < base + STACK_BYTES;
    char here;   /* a kernel without meeting points runs on the stack of whoever launched it */
    u64 stack_now = (u64)&here;
    return !in_fiber && addr + (1 << 20) > stack_now && addr < stack_now + (1 << 20);
}

static void rt_check(Thr *t, int site, u64 addr, u32 bytes, int write) {
    if (addr % (bytes > 16 ? 16 : bytes)) simt_fail("misaligned access", t, site, addr);
    if (simt_is_shared(addr, bytes)) {
        if (write) simt_wrote(t, addr, bytes);
        return;
    }
    if (simt_is_device_memory && simt_is_device_memory(addr, bytes)) return;
    /* Local memory, or a parameter, by a generic address. */
    if (rt_is_local(t, addr)) return;
    if (!write && addr >= (u64)t->params && addr + bytes <= (u64)t->params + current_entry->params_bytes) return;
    simt_fail(write ? "write out of bounds" : "read out of bounds", t, site, addr);
}

/* -- what a thread calls that waits -- */

static void yield_thread(Thr *t) { si_switch(&t->sp, scheduler_sp); }

static void stop_at(Thr *t, int site, int state) {
    if (!in_fiber) simt_fail("a thread waits in a kernel that was said to have no such place", t, site, 0);
    t->site = site; t->state = state;
    yield_thread(t);
    t->met = num_writes;
}

static void rt_bar(Thr *t, int site, int id, u32 count, int aligned) {
    t->mask = (u32)id; t->bar_count = count; t->aligned = aligned;
    stop_at(t, site, AT_BARRIER);
}

static void rt_bar_arrive(Thr *t, int site, int id, u32 count) {
    (void)site; (void)count;
    bar_arrivals[t->cluster_rank][id]++;
}

static void rt_warp(Thr *t, int site, u32 mask, int aligned, WarpFn fn, const int *imm) {
    t->mask = mask; t->aligned = aligned; t->fn = fn; t->imm = imm;
    stop_at(t, site, AT_WARP);
}

static void rt_cluster_arrive(Thr *t, int site) {
    if (t->has_arrived && t->cluster_phase == cluster_phase) simt_fail("barrier.cluster.arrive twice without a wait", t, site, 0);
    t->has_arrived = 1; t->cluster_phase = cluster_phase;
}

static void rt_cluster_wait(Thr *t, int site) {
    if (!t->has_arrived) simt_fail("barrier.cluster.wait without an arrive", t, site, 0);
    if (t->cluster_phase == cluster_phase) stop_at(t, site, AT_CLUSTER_BARRIER);
    t->has_arrived = 0;
}

/* Gives whether the phase is over. It is, but where all threads wait and none can go on: then a wait ends in vain, as on a GPU after
   some time. */
int simt_wait_for_phase(Thr *t, int site, u64 addr, u32 phase) {
    t->addr = addr; t->mask = phase;
    stop_at(t, site, AT_PHASE);
    return async_is_complete(addr, phase);
}

void simt_pause(Thr *t) {
    if (!in_fiber) return;
    t->state = PAUSED;
    yield_thread(t);
}

static u64 rt_mbarrier(Thr *t, int site, int what, u64 addr, u64 count, u64 tx) {
    u64 state = async_mbarrier(t, site, what, addr, count, tx);
    /* Those that waited for an arrival go on first: what they overwrite, this thread must have done with. */
    if (what == MBARRIER_ARRIVE && !tx) simt_pause(t);
    return state;
}

static void rt_trap(Thr *t, int site) { simt_fail("trap", t, site, 0); }

const FkRt simt_runtime = {rt_bar, rt_warp, rt_trap, rt_check, rt_bar_arrive, simt_pause, rt_cluster_arrive, rt_cluster_wait, simt_map_shared,
                           rt_cta_rank, simt_is_shared, rt_is_local, rt_mbarrier, async_copy, async_commit, async_wait, w_activemask, w_shfl,
                           w_vote, w_match, w_redux, w_nop, w_elect, w_ldmatrix, w_stmatrix, w_mma, w_wmma_load, w_wmma_store, w_wmma_mma, w_wgmma,
                           w_wgmma_commit, w_wgmma_wait, wgmma_sum, rt_proxy_fence};

/* -- fibers -- */

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
    t->has_arrived = 0;
    t->copy_groups[0] = t->copy_groups[1] = 0;
    t->num_products = t->product_groups = t->fenced = t->met = 0;
    t->is_fenced = 0;
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
            if (w[l]->aligned && (here != alive)) simt_note("aligned warp instruction without all lanes", w[l]->site);
            if (w[l]->aligned && here != 0xffffffffu) simt_note("aligned warp instruction in a warp that is not whole", w[l]->site);
            group = wanted;
            /* Loads and stores of wmma are those of each lane on every GPU so far: a note is enough for them. */
            WarpFn fn = w[l]->fn;
            if ((fn == w_ldmatrix || fn == w_stmatrix || fn == w_mma || fn == w_wmma_mma || fn == w_wgmma || fn == w_wgmma_commit ||
                 fn == w_wgmma_wait) && group != 0xffffffffu)
                simt_fail("matrix instruction without all 32 lanes", w[l], w[l]->site, group);
        }
        w[l]->fn(w, group, w[l]->imm);
        for (int j = 0; j < 32; j++) if (group >> j & 1) w[j]->state = RUNNABLE;
        any = 1;
    }
    return any;
}

/* Runs the threads of a warp until each waits for something outside it. */
static void run_warp(Thr *first, u32 lanes) {
    Thr *w[32] = {0};
    for (u32 l = 0; l < lanes; l++) w[l] = first + l;
    do {
        for (u32 l = 0; l < lanes; l++) {
            if (w[l]->state == AT_PHASE && async_is_complete(w[l]->addr, w[l]->mask)) w[l]->state = RUNNABLE;
            if (w[l]->state == RUNNABLE) resume(w[l]);
        }
    } while (meet(w));
}

/* Opens the barriers of a block at which all are that it waits for. bar.red gets what it asks for in o: threads whose predicate holds,
   whether all, whether any. */
static int release_barriers(Thr *block, u32 rank) {
    struct { u32 here, count, true_ones; int site, is_mixed; } at[NUM_BARRIERS] = {0};
    u32 done = 0, any = 0, n = threads_per_block;
    for (u32 i = 0; i < n; i++) {
        Thr *t = block + i;
        done += t->state == DONE;
        if (t->state != AT_BARRIER) continue;
        u32 id = t->mask % NUM_BARRIERS;
        if (at[id].here++ && at[id].site != t->site) at[id].is_mixed = 1;
        at[id].count = t->bar_count; at[id].site = t->site; at[id].true_ones += t->a[0] != 0;
    }
    for (u32 id = 0; id < NUM_BARRIERS; id++) {
        u32 expected = at[id].count ? at[id].count : n - done;
        if (!at[id].here || at[id].here + bar_arrivals[rank][id] < expected) continue;
        if (done && !at[id].count) simt_note("barrier after some threads have ended", at[id].site);
        if (at[id].is_mixed) simt_note("threads meet at different barrier instructions", at[id].site);
        for (u32 i = 0; i < n; i++) {
            Thr *t = block + i;
            if (t->state != AT_BARRIER || t->mask % NUM_BARRIERS != id) continue;
            t->o[0] = at[id].true_ones; t->o[1] = at[id].true_ones == at[id].here; t->o[2] = at[id].true_ones != 0;
            t->state = RUNNABLE;
        }
        bar_arrivals[rank][id] = 0;
        any = 1;
    }
    return (int)any;
}

static int release_cluster_barrier(u32 all) {
    int is_asked = 0;
    for (u32 i = 0; i < all; i++) {
        if (threads[i].state != DONE && !(threads[i].has_arrived && threads[i].cluster_phase == cluster_phase)) return 0;
        is_asked |= threads[i].state == AT_CLUSTER_BARRIER;
    }
    if (!is_asked) return 0;
    cluster_phase++;
    for (u32 i = 0; i < all; i++) if (threads[i].state == AT_CLUSTER_BARRIER) threads[i].state = RUNNABLE;
    return 1;
}

/* What is under way when all threads have ended, or when the launch failed. */
static void end_cluster(int is_failed) {
    async_end(is_failed);
    for (u32 i = 0; i < MAX_CLUSTER * MAX_THREADS; i += 32) wgmma_end(&threads[i], is_failed);
}

static void run_cluster(void) {
    u32 n = threads_per_block, all = blocks_per_cluster * n, idle_rounds = 0;
    memset(bar_arrivals, 0, sizeof bar_arrivals);
    cluster_phase = 0;
    num_writes = fenced_by_others = 0;
    for (u32 i = 0; i < all; i++) make_fiber(&threads[i]);
    for (;;) {
        for (u32 first = 0; first < all; first += n)
            for (u32 i = 0; i < n; i += 32) run_warp(&threads[first + i], n - i < 32 ? n - i : 32);
        u32 done = 0, awake = 0, paused = 0;
        for (u32 i = 0; i < all; i++) {
            done += threads[i].state == DONE;
            awake += threads[i].state == AT_PHASE && async_is_complete(threads[i].addr, threads[i].mask);
            if (threads[i].state == PAUSED) { threads[i].state = RUNNABLE; paused++; }
        }
        if (done == all) break;
        for (u32 rank = 0; rank < blocks_per_cluster; rank++) awake += (u32)release_barriers(&threads[rank * n], rank);
        awake += (u32)release_cluster_barrier(all);
        if (awake) { idle_rounds = 0; continue; }
        if (paused && !idle_rounds++) continue;
        if (async_complete_one()) { idle_rounds = 0; continue; }
        for (u32 i = 0; i < all; i++) if (threads[i].state == AT_PHASE) { threads[i].state = RUNNABLE; paused++; }
        if (paused && idle_rounds++ < MAX_IDLE_ROUNDS) continue;
        Thr *stuck = threads;
        while (stuck->state == DONE) stuck++;
        simt_fail("deadlock: threads wait for each other", stuck, stuck->site, all - done);
    }
    end_cluster(0);
}

/* -- grids -- */

int simt_poison = 0xff;

static void prepare_memory(void) {
    stacks = mmap(0, (size_t)MAX_CLUSTER * MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    u8 *low = mmap(0, (MAX_CLUSTER + 1) * SHARED_WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    if (stacks == MAP_FAILED || low == MAP_FAILED) { fputs("stand-in: no memory for the threads of a block\n", stderr); abort(); }
    shared_memory = (u8 *)(((u64)low + SHARED_WINDOW - 1) & ~(u64)(SHARED_WINDOW - 1));
}

/* Sets what the threads of the cluster at `first` know of their place, and their shared memory: what the kernel declares, then what the
   launch asks for. */
static void place_cluster(const FkEntry *entry, const u32 cluster[3], const u32 first[3]) {
    u32 dyn_offset = (entry->static_shared + 1023) & ~1023u;
    for (u32 rank = 0; rank < blocks_per_cluster; rank++) {
        u32 at[3] = {rank % cluster[0], rank / cluster[0] % cluster[1], rank / (cluster[0] * cluster[1])};
        u8 *window = shared_memory + rank * SHARED_WINDOW;
        memset(window, simt_poison, current_shared_bytes);   /* NaN, so that a use before a write shows */
        memset(last_write + rank * SHARED_WINDOW / 4, 0, current_shared_bytes);
        for (u32 i = 0; i < threads_per_block; i++) {
            Thr *t = &threads[rank * threads_per_block + i];
            for (int d = 0; d < 3; d++) { t->ctaid[d] = first[d] + at[d]; t->cluster_ctaid[d] = at[d]; t->cluster_nctaid[d] = cluster[d]; }
            t->cluster_rank = rank;
            t->stat_shared = window;
            t->dyn_shared = window + dyn_offset;
            t->stack = entry->uses_sync ? stacks + (size_t)(t - threads) * STACK_BYTES : 0;
        }
    }
}

int simt_run(const FkModule *module, const FkEntry *entry, const SimtLaunch *launch, SimtError *error) {
    const u32 *grid = launch->grid, *block = launch->block, *cluster = launch->cluster[0] ? launch->cluster : entry->cluster;
    threads_per_block = block[0] * block[1] * block[2];
    blocks_per_cluster = cluster[0] * cluster[1] * cluster[2];
    error->happened = 0;
    in_fiber = 0;
    end_cluster(1);   /* of a launch that a memory fault ended */
    if (!stacks) prepare_memory();
    current_module = module; current_entry = entry; current_error = error;
    u64 shared_bytes = ((u64)entry->static_shared + 1023) / 1024 * 1024 + launch->dyn_shared_bytes;
    if (threads_per_block > MAX_THREADS || blocks_per_cluster > MAX_CLUSTER || shared_bytes > SHARED_WINDOW) {
        snprintf(error->text, sizeof error->text, "launch of %u threads, clusters of %u blocks, %llu bytes of shared memory", threads_per_block,
                 blocks_per_cluster, (unsigned long long)shared_bytes);
        error->happened = 1;
        return 1;
    }
    current_shared_bytes = (u32)shared_bytes;
    if (setjmp(abort_launch)) { in_fiber = 0; end_cluster(1); return 1; }
    for (u32 i = 0; i < blocks_per_cluster * threads_per_block; i++) {
        Thr *t = &threads[i];
        u32 at = i % threads_per_block;
        t->tid[0] = at % block[0]; t->tid[1] = at / block[0] % block[1]; t->tid[2] = at / (block[0] * block[1]);
        for (int d = 0; d < 3; d++) { t->ntid[d] = block[d]; t->nctaid[d] = grid[d]; }
        t->linear = at; t->lane = at % 32; t->warp = at / 32; t->params = launch->params;
    }
    double end = simt_limit_s > 0 ? seconds() + simt_limit_s : 0;
    for (u32 z = 0; z < grid[2]; z += cluster[2])
        for (u32 y = 0; y < grid[1]; y += cluster[1])
            for (u32 x = 0; x < grid[0]; x += cluster[0]) {
                place_cluster(entry, cluster, (u32[3]){x, y, z});
                if (entry->uses_sync) run_cluster();
                else for (u32 i = 0; i < blocks_per_cluster * threads_per_block; i++) entry->run(&threads[i]);
                if (end && seconds() > end && (x + cluster[0] < grid[0] || y + cluster[1] < grid[1] || z + cluster[2] < grid[2])) return 2;
            }
    return 0;
}
