/* Launches: what the driver refuses, and a kernel's run. */
#include "driver.h"
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

/* -- running a kernel ------------------------------------------------------------------------------------ */

CUresult sticky;
char sticky_text[1100];
u64 num_executed, refused_launches;
double run_s;

static sigjmp_buf fault_jump;
static volatile int guarding;
static pthread_t guarded;
static volatile u64 fault_address;

/* CubeCL's other threads spin while this one computes: it goes before them, where the system lets it. */
static void go_first(void) {
    static __thread int is_first;
    if (!is_first++) setpriority(PRIO_PROCESS, 0, -10);
}

static void on_fault(int sig, siginfo_t *info, void *context) {
    (void)sig; (void)context;
    if (guarding && pthread_equal(pthread_self(), guarded)) {
        fault_address = (u64)info->si_addr;
        siglongjmp(fault_jump, 1);
    }
    signal(SIGSEGV, SIG_DFL);
}

static double random_unit(void) {
    cfg.seed ^= cfg.seed << 13;
    cfg.seed ^= cfg.seed >> 7;
    cfg.seed ^= cfg.seed << 17;
    return (double)(cfg.seed >> 11) / 9007199254740992.0;
}

static void fault(CUresult code, const char *text) {
    sticky = code;
    snprintf(sticky_text, sizeof sticky_text, "%s", text);
    say("FAULT %d: %s", code, text);
    tell("fault %d: %s", code, text);
}

static u64 threads_of(const Op *op) {
    return (u64)op->grid[0] * op->grid[1] * op->grid[2] * op->block[0] * op->block[1] * op->block[2];
}

/* STAND_IN_EXEC: 1 runs every launch, 0 none, more those of so many threads at most. */
static int is_run(const Op *op) {
    if (op->kernel->is_probe && cfg.clock != REAL) return 0;
    return cfg.execute == 1 || (cfg.execute == TRIAL ? !trial_is_over : threads_of(op) <= (u64)cfg.execute);
}

/* What a launch takes by STAND_IN_TIME. */
static double seconds_of(const Op *op) {
    switch (cfg.clock) {
    case RANDOM: return 1e-5 + 1e-3 * random_unit();
    case CONSTANT: return cfg.launch_s;
    case MODEL: return 3e-6 + 5e-6 * (double)threads_of(op) / (132 * 2048.0);
    /* A round of tuning ends with the first candidate that takes no longer than a launch that does nothing. */
    case FIRST: return strstr(op->kernel->name, "launch_overhead") ? 1e-3 : 1e-6;
    case REAL: break;
    }
    return 0;
}

void run_kernel(Op *op) {
    Kernel *k = op->kernel;
    SimtError error = {{0}, 0};
    double began = now();
    modelled += seconds_of(op);
    /* Such a benchmark doubles its work until it takes 20 ms by the host's clock. */
    if (k->is_probe && cfg.clock != REAL) usleep(20000);
    if (!is_run(op)) return;
    go_first();
    int is_bad = *cfg.fault_in && strstr(k->name, cfg.fault_in);
    if (++num_executed == (u64)cfg.fault_at || is_bad) { fault(cfg.fault_code, "asked for by STAND_IN_FAULT_*"); return; }
    struct sigaction old_segv, old_bus, act;
    memset(&act, 0, sizeof act);
    act.sa_sigaction = on_fault;
    act.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &act, &old_segv); sigaction(SIGBUS, &act, &old_bus);
    guarded = pthread_self();
    if (sigsetjmp(fault_jump, 1)) {
        snprintf(error.text, sizeof error.text, "memory fault at 0x%llx in %.300s (%s.ptx)",
                 (unsigned long long)fault_address, k->name, k->module->path);
        error.happened = 1;
    } else {
        guarding = 1;
        u64 all = (u64)op->grid[0] * op->grid[1] * op->grid[2];
        /* A launch that was cut short once is not tried again. */
        SimtLaunch simt = {.dyn_shared_bytes = op->shared, .params = op->params};
        memcpy(simt.grid, op->grid, sizeof simt.grid);
        memcpy(simt.block, op->block, sizeof simt.block);
        memcpy(simt.cluster, op->cluster, sizeof simt.cluster);
        int how = k->cut && all >= k->cut_blocks ? 2
                  : k->run                       ? k->run(op->params)
                                                 : simt_run(k->module->code, k->entry, &simt, &error);
        if (how == 2) { k->cut++; k->cut_blocks = all; tell("cut short: %s", k->name); }
    }
    guarding = 0;
    if (cfg.sums && trace) {
        const char *dump = env("STAND_IN_DUMP", "");
        int is_dumped = *dump && num_executed - 1 == (u64)atoi(dump);
        fprintf(trace, "  sums");
        for (int i = 0; i < k->entry->num_params; i++) {
            u64 at; memcpy(&at, op->params + k->entry->param_offset[i], 8);
            int b = k->entry->param_size[i] == 8 ? find(blocks, num_blocks, at) : -1;
            if (b < 0 || at >= blocks[b].at + blocks[b].bytes) continue;
            u64 n = blocks[b].at + blocks[b].bytes - at, h = 1469598103934665603ull;
            if (n > (u64)cfg.sums) n = (u64)cfg.sums;
            if (is_dumped) {
                char path[1200];
                snprintf(path, sizeof path, "%s.%d", getenv("STAND_IN_TRACE"), i);
                FILE *f = fopen(path, "w");
                if (f) { fwrite((void *)at, 1, n, f); fclose(f); }
            }
            for (u64 j = 0; j < n; j++) h = (h ^ ((u8 *)at)[j]) * 1099511628211ull;
            fprintf(trace, " %08x:%llu", (u32)(h ^ h >> 32), (unsigned long long)n);
        }
        if (is_dumped) {
            char path[1200];
            snprintf(path, sizeof path, "%s.params", getenv("STAND_IN_TRACE"));
            FILE *f = fopen(path, "w");
            if (f) { fwrite(op->params, 1, k->entry->params_bytes, f); fclose(f); }
        }
        fputc('\n', trace);
    }
    sigaction(SIGSEGV, &old_segv, 0); sigaction(SIGBUS, &old_bus, 0);
    double took = now() - began;
    k->seconds += took; run_s += took;
    if (error.happened) {
        char text[1100]; snprintf(text, sizeof text, "%s [%s]", error.text, strrchr(k->module->path, '/') + 1);
        fault(strstr(text, "misaligned")                               ? MISALIGNED
              : strstr(text, "bounds") || strstr(text, "memory fault") ? ILLEGAL_ADDRESS
                                                                       : LAUNCH_FAILED,
              text);
    }
}

/* -- API: launches --------------------------------------------------------------------------------------- */

static CUresult refuse(CUresult code, Kernel *k, const char *why) {
    refused_launches++;
    say("launch refused: %s (%s)", why, k->name);
    tell("launch refused: %s (%s)", why, k->name);
    return code;
}

static CUresult launch(Kernel *k, const u32 grid[3], const u32 block[3], const u32 cluster[3], u32 shared, void *s,
                       void **params, void **extra) {
    u64 n = (u64)block[0] * block[1] * block[2];
    Module *m = k->module;
    if (!n || !grid[0] || !grid[1] || !grid[2]) return refuse(INVALID_VALUE, k, "an axis of size zero");
    if (grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535) return refuse(INVALID_VALUE, k, "grid too large");
    if (n > 1024 || block[0] > 1024 || block[1] > 1024 || block[2] > 64)
        return refuse(INVALID_VALUE, k, "block too large");
    if ((int)shared > k->max_dynamic) return refuse(INVALID_VALUE, k, "more shared memory than asked for");
    if ((int)shared + m->static_shared > cfg.shared_optin)
        return refuse(INVALID_VALUE, k, "more shared memory than there is");
    if (m->regs && (u64)((m->regs + 7) / 8 * 8) * ((n + 31) / 32 * 32) > 65536)
        return refuse(OUT_OF_RESOURCES, k, "too many registers");
    if (extra) return refuse(NOT_SUPPORTED, k, "parameters by `extra`");
    Op op = {.kind = LAUNCH, .kernel = k, .shared = shared};
    memcpy(op.grid, grid, sizeof op.grid);
    memcpy(op.block, block, sizeof op.block);
    memcpy(op.cluster, cluster, sizeof op.cluster);
    if (is_run(&op)) {
        static int number;
        if (++number == cfg.refuse_at) return refuse(OUT_OF_RESOURCES, k, "asked for by STAND_IN_REFUSE_AT");
        if (!k->run) translate(m);
        if (m->failed) return refuse(NOT_SUPPORTED, k, m->error);
        for (int i = 0; !k->entry && i < m->code->num_entries; i++)
            if (!strcmp(m->code->entries[i].name, k->name)) k->entry = &m->code->entries[i];
        if (!k->entry) return refuse(NOT_FOUND, k, "no such entry");
        const u32 *r = k->entry->reqntid;
        if (r[0] && (r[0] != block[0] || r[1] != block[1] || r[2] != block[2]))
            return refuse(INVALID_VALUE, k, "block is not .reqntid");
        const u32 *c = cluster[0] ? cluster : k->entry->cluster;
        if (grid[0] % c[0] || grid[1] % c[1] || grid[2] % c[2])
            return refuse(INVALID_VALUE, k, "grid is not of whole clusters");
        if (c[0] * c[1] * c[2] > (k->is_any_cluster ? 16u : 8u))
            return refuse(INVALID_CLUSTER_SIZE, k, "cluster too large");
    }
    k->launches++; k->blocks += (u64)grid[0] * grid[1] * grid[2]; k->threads += n * grid[0] * grid[1] * grid[2];
    memcpy(k->grid, grid, sizeof k->grid); memcpy(k->block, block, sizeof k->block); k->shared = shared;
    tell("launch %016llx %s grid %u,%u,%u block %u,%u,%u shared %u stream %d", (unsigned long long)m->hash, k->name,
         grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, stream_of(s)->number);
    if (is_run(&op)) {
        op.params = aligned_alloc(64, (k->entry->params_bytes + 127) / 64 * 64);
        for (int i = 0; i < k->entry->num_params; i++)
            memcpy(op.params + k->entry->param_offset[i], params[i], k->entry->param_size[i]);
    }
    return enqueue(s, op);
}
API CUresult cuLaunchKernel(Kernel *k, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, void *s, void **params, void **extra) {
    ENTER(0)
    u32 grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    LEAVE(launch(k, grid, block, (u32[3]){0}, shared, s, params, extra));
}
typedef struct LaunchAttribute {
    int id, pad;
    union { u32 cluster[3]; u64 words[8]; } value;
} LaunchAttribute;
typedef struct LaunchConfig {
    unsigned g[3], b[3], shared;
    void *stream;
    LaunchAttribute *attrs;
    unsigned num_attrs;
} LaunchConfig;
API CUresult cuLaunchKernelEx(const LaunchConfig *c, Kernel *k, void **params, void **extra) {
    ENTER(0)
    u32 cluster[3] = {0};
    for (unsigned i = 0; i < c->num_attrs; i++) {
        if (c->attrs[i].id == 4) memcpy(cluster, c->attrs[i].value.cluster, sizeof cluster);
        if (c->attrs[i].id == 2 && c->attrs[i].value.words[0]) LEAVE(refuse(NOT_SUPPORTED, k, "cooperative launch"));
    }
    LEAVE(launch(k, c->g, c->b, cluster, c->shared, c->stream, params, extra));
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, Kernel *k, int threads, size_t shared) {
    (void)k;
    (void)shared;
    *n = threads ? 2048 / threads : 0;
    return OK;
}

/* -- kernels that are C ---------------------------------------------------------------------------------- */

static Kernel *c_kernel(const char *name, const FkEntry *entry, int (*run)(const u8 *params)) {
    static Module module = {.text = "", .path = "/cublasLt"};
    pthread_mutex_lock(&lock);
    if (!module.kernels) { module.next = modules; modules = &module; }
    Kernel *k = module.kernels;
    while (k && strcmp(k->name, name)) k = k->next;
    if (!k) {
        k = calloc(1, sizeof *k);
        snprintf(k->name, sizeof k->name, "%s", name);
        k->module = &module; k->entry = entry; k->run = run;
        k->next = module.kernels; module.kernels = k;
    }
    pthread_mutex_unlock(&lock);
    return k;
}

static CUresult reach(const char *what, u64 at, u64 bytes) {
    pthread_mutex_lock(&lock);
    int i = find(blocks, num_blocks, at);
    if (sticky || (i >= 0 && at + bytes <= blocks[i].at + blocks[i].bytes)) LEAVE(sticky);
    char text[256];
    snprintf(text, sizeof text, "%s out of bounds: %llu bytes at 0x%llx; the allocation has %llu from there", what,
             (unsigned long long)bytes, (unsigned long long)at,
             (unsigned long long)(i >= 0 && at < blocks[i].at + blocks[i].bytes ? blocks[i].at + blocks[i].bytes - at : 0));
    fault(ILLEGAL_ADDRESS, text);
    LEAVE(sticky);
}

static void count_call(const char *name) {
    pthread_once(&once, start);
    pthread_mutex_lock(&lock);
    count(name, 0);
    pthread_mutex_unlock(&lock);
}

static void note(const char *text) {
    pthread_mutex_lock(&lock);
    simt_add_note(text);
    pthread_mutex_unlock(&lock);
}

const StandIn stand_in = {&cfg, &simt_limit_s, c_kernel, reach, count_call, note, say};
