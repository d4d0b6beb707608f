/* Runs one block of a kernel at a time: threads are fibers that meet at barriers and at warp-wide instructions. */
#ifndef SIMT_H
#define SIMT_H
#include "ptx_runtime.h"
#include <stddef.h>

typedef struct SimtError {
    char text[1024];
    int happened;
} SimtError;

/* Seconds that a launch may take; the blocks after that are left out, and the result is 2. 0: no limit. */
extern double simt_limit_s;
/* What shared memory is filled with before each block. */
extern int simt_poison;
/* Runs a whole grid. Gives 0, 1 with `error` filled, or 2 where it was cut short. */
int simt_run(const FkModule *module, const FkEntry *entry, const u32 grid[3], const u32 block[3], const u8 *params, u32 dyn_shared_bytes,
             SimtError *error);
extern const FkRt simt_runtime;
/* Asked for each access where kernels are compiled with -DFK_CHECK: whether device memory holds `bytes` at `addr`. */
extern int (*simt_is_device_memory)(u64 addr, u32 bytes);
/* Notes about what a GPU may not do alike: gives the number of distinct ones, and their text. */
typedef struct SimtNote { char text[512]; unsigned long long count; } SimtNote;
extern SimtNote simt_notes[256];
extern int simt_num_notes;
#endif
