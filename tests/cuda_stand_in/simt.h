/* Runs a cluster of blocks of a kernel at a time (one block, if it has no clusters): threads are fibers that meet at barriers and at
   warp-wide instructions. simt.c has the fibers and the barriers, warp.c what warps do together, async.c copies and their barriers. */
#ifndef SIMT_H
#define SIMT_H
#include "ptx_runtime.h"
#include <stddef.h>

typedef struct SimtError {
    char text[1024];
    int happened;
} SimtError;

typedef struct SimtLaunch {
    u32 grid[3], block[3];
    u32 cluster[3];             /* blocks; zeros: as the kernel says */
    u32 dyn_shared_bytes;
    const u8 *params;
} SimtLaunch;

/* Seconds that a launch may take; the blocks after that are left out, and the result is 2. 0: no limit. */
extern double simt_limit_s;
/* What shared memory is filled with before each block. */
extern int simt_poison;
/* 1: an asynchronous copy happens when it is waited for, and no earlier. 0: at once. */
extern int simt_is_lazy;
/* Runs a whole grid. Gives 0, 1 with `error` filled, or 2 where it was cut short. */
int simt_run(const FkModule *module, const FkEntry *entry, const SimtLaunch *launch, SimtError *error);
extern const FkRt simt_runtime;
/* Asked for each access where kernels are compiled with -DFK_CHECK, and for copies of tensors: whether device memory holds `bytes` at `addr`. */
extern int (*simt_is_device_memory)(u64 addr, u32 bytes);
/* Notes about what a GPU may not do alike: gives the number of distinct ones, and their text. */
typedef struct SimtNote { char text[512]; unsigned long long count; } SimtNote;
extern SimtNote simt_notes[256];
extern int simt_num_notes;

/* -- between simt.c, warp.c and async.c -- */

/* Shared memory of the blocks of a cluster: windows of so many bytes one after another. They lie in the lowest 4 GiB, since kernels
   keep shared addresses in 32 bits, and are aligned to their size, since descriptors of wgmma keep 18 bits. */
enum { SHARED_WINDOW = 256 << 10, MAX_CLUSTER = 16 };
void simt_add_note(const char *text);
void simt_note(const char *what, int site);
void simt_fail(const char *what, Thr *t, int site, u64 addr) __attribute__((noreturn));
int simt_is_shared(u64 addr, u32 bytes);
u64 simt_window(const Thr *t);
u64 simt_map_shared(Thr *t, int site, u64 addr, u32 rank);
/* Lets other threads run until `t` is woken: by its barrier object's phase, where it waits for one. */
int simt_wait_for_phase(Thr *t, int site, u64 addr, u32 phase);
void simt_pause(Thr *t);

/* How the tensor copies and wgmma permute the 16-byte pieces of a row: bits 7.. of the address are xored to bits 4.. */
static inline u64 simt_swizzle(u64 addr, u64 mask) { return addr ^ (addr >> 7 & mask) << 4; }

#define WARP_FN(name) void w_##name(Thr **w, u32 mask, const int *imm)
WARP_FN(activemask); WARP_FN(nop); WARP_FN(shfl); WARP_FN(vote); WARP_FN(match); WARP_FN(redux); WARP_FN(elect); WARP_FN(ldmatrix);
WARP_FN(stmatrix); WARP_FN(mma); WARP_FN(wmma_load); WARP_FN(wmma_store); WARP_FN(wmma_mma); WARP_FN(wgmma);
WARP_FN(wgmma_commit); WARP_FN(wgmma_wait);
#undef WARP_FN

u32 wgmma_sum(Thr *t, u32 tag);
/* Drops the products of a warp that are left. */
void wgmma_end(Thr *first_lane, int is_failed);

/* Writes to shared memory are numbered, by `t`, or, where it is 0, by copies of the async proxy. wgmma and bulk copies must not read what a
   thread wrote before fence.proxy.async of that thread, or of another that has met it since. */
void simt_wrote(const Thr *t, u64 addr, u32 bytes);
u32 simt_num_writes(void);
u32 simt_last_write(u64 addr);
void simt_read_async(Thr *t, int site, u64 addr, u32 bytes);

u64 async_mbarrier(Thr *t, int site, int what, u64 addr, u64 count, u64 tx);
int async_is_complete(u64 addr, u32 phase);
void async_copy(Thr *t, int site, const FkCopy *copy);
void async_commit(Thr *t, int is_bulk);
void async_wait(Thr *t, int is_bulk, u32 pending, int is_read_only);
/* Lets the oldest copy that a barrier object may wait for happen. Gives 0 where there is none. */
int async_complete_one(void);
/* Ends the copies of a cluster whose threads have ended, or drops them where the launch failed. */
void async_end(int is_failed);
#endif
