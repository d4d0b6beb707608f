/* A stand-in for libnccl.so.2: sums over processes, on a stream of the stand-in for libcuda.so.1. See README.md. */
#include "driver.h"
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

CUresult cuLaunchKernel(Kernel *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
CUresult cuCtxGetCurrent(void **);

typedef int Result;
enum { SUCCESS = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { FLOAT = 7, SUM = 0, CHUNK = 1 << 16, MOST_RANKS = 8 };
typedef struct Id { char path[128]; } Id;
typedef struct Config { size_t size; unsigned magic, version; int blocking; } Config;

/* What all processes map: each has its numbers in its own part. */
typedef struct Shared { u64 joined, arrived; float part[MOST_RANKS][CHUNK]; } Shared;
typedef struct Comm {
    Shared *shared;
    Id id;
    int rank, size, sums, asked;
    u64 at, count, arrivals;   /* `at`: of the sum that is not in its stream yet */
    void *stream;
    volatile int is_aborted;
} Comm;

static Result refuse(Result result, const char *why) {
    stand_in.say("nccl: %s", why);
    return result;
}
/* Of the ranks, only the second one fails: the others have to end as well. */
static int is_asked_to_fail(const Comm *comm, const char *call) {
    const char *which = getenv("STAND_IN_NCCL_FAILS");
    return comm->rank == 1 && which && !strcmp(which, call);
}

/* Waits until all have come to it as often as this one; not where the process ends meanwhile. */
static int meet(Comm *comm) {
    comm->arrivals += (u64)comm->size;
    __atomic_add_fetch(&comm->shared->arrived, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&comm->shared->arrived, __ATOMIC_SEQ_CST) < comm->arrivals && !comm->is_aborted) sched_yield();
    return !comm->is_aborted;
}

typedef struct Params { Comm *comm; float *at; u64 count; } Params;
static int run_sum(const u8 *params) {
    const Params *p = (const Params *)params;
    Comm *comm = p->comm;
    for (u64 first = 0; first < p->count; first += CHUNK) {
        u64 n = p->count - first < CHUNK ? p->count - first : CHUNK;
        memcpy(comm->shared->part[comm->rank], p->at + first, n * sizeof(float));
        if (!meet(comm)) return 0;
        for (u64 i = 0; i < n; i++) {
            float sum = comm->shared->part[0][i];
            for (int rank = 1; rank < comm->size; rank++) sum += comm->shared->part[rank][i];
            p->at[first + i] = sum;
        }
        if (!meet(comm)) return 0;
    }
    return 0;
}
static const u32 param_size[] = {8, 8, 8}, param_offset[] = {0, 8, 16};
static const FkEntry entry = {.name = "nccl", .num_params = 3, .param_size = param_size, .param_offset = param_offset,
                              .params_bytes = sizeof(Params), .cluster = {1, 1, 1}};

API Result ncclGetVersion(int *version) { *version = 22703; return SUCCESS; }
API const char *ncclGetErrorString(Result result) { return result == REMOTE_ERROR ? "remote process exited" : "an error"; }
API const char *ncclGetLastError(Comm *comm) { (void)comm; return "\nthe stand-in was asked to fail"; }

API Result ncclGetUniqueId(Id *id) {
    snprintf(id->path, sizeof id->path, "/tmp/nccl-stand-in-XXXXXX");
    int file = mkstemp(id->path);
    if (file < 0 || ftruncate(file, sizeof(Shared))) return refuse(SYSTEM_ERROR, "no file to share");
    close(file);
    return SUCCESS;
}

API Result ncclCommInitRankConfig(Comm **out, int size, Id id, int rank, Config *config) {
    stand_in.count(__func__);
    void *context = 0;
    if (cuCtxGetCurrent(&context) || !context) return refuse(CUDA_ERROR, "no context is current");
    if (config->magic != 0xcafebeef || config->size < sizeof *config || config->blocking || rank >= size || size > MOST_RANKS)
        return refuse(INVALID_ARGUMENT, "a configuration that blocks, or is none");
    int file = open(id.path, O_RDWR);
    void *shared = file < 0 ? MAP_FAILED : mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) return refuse(SYSTEM_ERROR, "the file of the id is not there");
    close(file);
    Comm *comm = *out = calloc(1, sizeof *comm);
    comm->shared = shared; comm->id = id; comm->rank = rank; comm->size = size;
    if (!is_asked_to_fail(comm, "init") && __atomic_add_fetch(&comm->shared->joined, 1, __ATOMIC_SEQ_CST) == (u64)size)
        unlink(id.path);
    return IN_PROGRESS;
}

/* The real one puts a sum into its stream from a thread of its own, some time after it was asked for: here when the caller asks twice
   whether that was done. What it put there meanwhile comes before the sum. */
API Result ncclCommGetAsyncError(Comm *comm, Result *state) {
    *state = SUCCESS;
    if (__atomic_load_n(&comm->shared->joined, __ATOMIC_SEQ_CST) < (u64)comm->size) *state = IN_PROGRESS;
    if (!comm->at) return SUCCESS;
    if (comm->sums == 3 && is_asked_to_fail(comm, "sum")) { *state = REMOTE_ERROR; return SUCCESS; }
    if (++comm->asked % 2) { *state = IN_PROGRESS; return SUCCESS; }
    Params p = {comm, (float *)comm->at, comm->count};
    void *params[] = {&p.comm, &p.at, &p.count};
    comm->at = 0;
    if (cuLaunchKernel(stand_in.kernel("ncclAllReduce", &entry, run_sum), 1, 1, 1, 256, 1, 1, 0, comm->stream, params, 0))
        *state = CUDA_ERROR;
    return SUCCESS;
}

API Result ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Comm *comm, void *stream) {
    stand_in.count(__func__);
    Result state;
    void *context = 0;
    if (cuCtxGetCurrent(&context) || !context) return refuse(CUDA_ERROR, "no context is current");
    if (comm->at || ncclCommGetAsyncError(comm, &state) || state) return refuse(INVALID_USAGE, "what was begun is not done");
    if (from != to || type != FLOAT || operation != SUM) return refuse(INVALID_ARGUMENT, "not a sum of f32 in its place");
    if (stand_in.reach("ncclAllReduce", (u64)to, count * sizeof(float))) return CUDA_ERROR;
    comm->at = (u64)to; comm->count = count; comm->stream = stream;
    comm->sums++;
    return IN_PROGRESS;
}

API Result ncclCommAbort(Comm *comm) {
    comm->is_aborted = 1;
    unlink(comm->id.path);
    return SUCCESS;
}
