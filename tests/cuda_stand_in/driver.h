/* What the files of the driver share. simt.h has what runs its kernels. */
#ifndef DRIVER_H
#define DRIVER_H
#include "simt.h"
#include <pthread.h>
#include <stdio.h>
#include <sys/types.h>

typedef int CUresult;
typedef int CUdevice;
typedef u64 CUdeviceptr;
typedef struct Stream Stream;
typedef struct Event Event;
#define API __attribute__((visibility("default")))

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_PTX = 218,
    UNSUPPORTED_PTX_VERSION = 222, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701,
    MISALIGNED = 716, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, INVALID_CLUSTER_SIZE = 912
};

/* -- driver.c: settings ---------------------------------------------------------------------------------- */

typedef struct Settings {
    int major, minor, driver, fault_at, fault_code, oom_at, refuse_at, sums, sms, shared_optin, shared_sm;
    int lazy, execute, check, quiet, poison, exclusive, num_gpus;
    u64 memory, seed, tools;
    const char *fault_in;
    char home[1024], dir[1024], ptxas[1024], cc[256];
    enum { REAL, RANDOM, CONSTANT, MODEL, FIRST } clock;
    double launch_s;
} Settings;
extern Settings cfg;
enum { TRIAL = -1 };
extern pthread_mutex_t lock;
extern pthread_once_t once;
void start(void);
double now(void);
const char *env(const char *name, const char *other);
u64 hash_of(const char *text);
void first_lines(const char *path, char *out, size_t size);

/* -- log.c ----------------------------------------------------------------------------------------------- */

extern FILE *trace;
extern double started;
void say(const char *format, ...);
void tell(const char *format, ...);
void count(const char *name, u64 bytes);
void write_log(void);

/* -- memory.c -------------------------------------------------------------------------------------------- */

typedef struct Block { u64 at, bytes; void *map; size_t map_bytes; } Block;
extern Block *blocks;
extern int num_blocks;
extern u64 peak_used, num_allocs, pinned_peak;
int find(Block *list, int n, u64 at);
int is_device(u64 addr, u32 bytes);
CUresult release(CUdeviceptr at);

/* -- module.c -------------------------------------------------------------------------------------------- */

typedef struct Kernel Kernel;
typedef struct Module {
    u64 hash;
    char path[1200];
    char *text;
    const FkModule *code;
    int failed;
    char error[512];
    pid_t assembler, compiler;   /* 0: not running */
    double translate_s, ptxas_s;
    int regs, spill_st, spill_ld, stack, static_shared;
    Kernel *kernels;
    struct Module *next;
} Module;
struct Kernel {
    Module *module;
    const FkEntry *entry;
    char name[512];
    int max_dynamic, is_any_cluster;
    u64 launches, blocks, threads;
    double seconds;
    u32 grid[3], block[3], shared;
    u64 cut, cut_blocks;
    int is_probe;   /* one of CubeCL's own benchmarks of the device, whose results nobody reads */
    int (*run)(const u8 *params);   /* a kernel that is C, not PTX: gives 2 where it was cut short */
    Kernel *next;
};
extern Module *modules;
extern u64 num_modules, ptx_refused, not_translated;
extern double translate_s, ptxas_s;
void translate(Module *m);

/* -- stream.c -------------------------------------------------------------------------------------------- */

enum { LAUNCH, COPY, COPY2D, SET, RECORD, WAIT, RELEASE };
typedef struct Copy2D { size_t src_pitch, dst_pitch, width, height; } Copy2D;
typedef struct Op {
    int kind, is_to_host; Kernel *kernel; u32 grid[3], block[3], cluster[3], shared; u8 *params;
    void *dst; const void *src; size_t bytes; void *staged; Copy2D two; u32 value; int unit;
    Event *event; u64 ticket, until; struct Op *next;
} Op;
struct Stream { Op *head, *tail; struct Stream *next; int number; };
struct Event { u64 ticket, done; double at; Stream *stream; };
extern int trial_is_over;
extern double modelled;
void run_until(Stream *s, u64 ticket);
Stream *stream_of(void *handle);
CUresult enqueue(void *handle, Op given);
CUresult sync_all(void);

/* -- launch.c -------------------------------------------------------------------------------------------- */

extern CUresult sticky;
extern char sticky_text[1100];
extern u64 num_executed, refused_launches;
extern double run_s;
void run_kernel(Op *op);

/* What the driver does for libcublasLt.so.13 (cublaslt.c), which is a library of its own, under the driver's lock. */
typedef struct StandIn {
    const Settings *cfg;
    const double *limit_s;
    /* The kernel of that name; made where there is none. */
    Kernel *(*kernel)(const char *name, const FkEntry *entry, int (*run)(const u8 *params));
    /* Whether one allocation holds so many bytes; where none does, the device faults as by an access there. */
    CUresult (*reach)(const char *what, u64 at, u64 bytes);
    void (*count)(const char *name), (*note)(const char *text), (*say)(const char *format, ...);
} StandIn;
extern API const StandIn stand_in;

/* Every function that can fail starts with ENTER, which reports an earlier fault as the real driver does. */
#define ENTER(bytes) \
    pthread_once(&once, start); \
    pthread_mutex_lock(&lock); \
    count(__func__, bytes); \
    if (sticky) { pthread_mutex_unlock(&lock); return sticky; }
#define LEAVE(result) do { CUresult r_ = (result); pthread_mutex_unlock(&lock); return r_; } while (0)
#endif
