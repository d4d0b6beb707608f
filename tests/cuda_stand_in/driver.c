/* A stand-in for NVIDIA's driver library libcuda.so.1, on a machine without a GPU. See README.md. */
#define _GNU_SOURCE
#include "simt.h"
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

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

/* -- settings -------------------------------------------------------------------------------------------- */

static struct {
    int major, minor, driver, fault_at, fault_code, oom_at, refuse_at, sums, sms, shared_optin, shared_sm;
    int lazy, execute, check, quiet, poison, num_gpus;
    u64 memory, seed, tools;
    char home[1024], dir[1024], ptxas[1024], cc[256];
    enum { REAL, RANDOM, CONSTANT, MODEL, FIRST } clock;
    double launch_s;
} cfg;
enum { TRIAL = -1 };
static int trial_is_over;   /* STAND_IN_EXEC=trial: a result was read back, from now on memory stays as it is */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static FILE *trace;
static double started;
static CUresult sticky;
static char sticky_text[1100];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static const char *env(const char *name, const char *other) {
    const char *v = getenv(name);
    return v && *v ? v : other;
}

static void say(const char *format, ...) {
    if (cfg.quiet) return;
    va_list a; va_start(a, format);
    fputs("stand-in: ", stderr); vfprintf(stderr, format, a); fputc('\n', stderr);
    va_end(a);
}

static void write_log(void);

static u64 hash_of(const char *text) {
    u64 h = 1469598103934665603ull;
    for (; *text; text++) h = (h ^ (u8)*text) * 1099511628211ull;
    return h ^ (h >> 29);
}

static void first_lines(const char *path, char *out, size_t size) {
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(out, 1, size - 1, f) : 0;
    out[n] = 0;
    if (f) fclose(f);
}

static void start(void) {
    Dl_info info;
    started = now();
    if (dladdr((void *)start, &info)) {
        char real[1024];
        if (realpath(info.dli_fname, real)) {
            char *slash = strrchr(real, '/');
            if (slash) *slash = 0;
            snprintf(cfg.home, sizeof cfg.home, "%s", real);
        }
    }
    if (*env("STAND_IN_HOME", "")) snprintf(cfg.home, sizeof cfg.home, "%s", getenv("STAND_IN_HOME"));
    snprintf(cfg.dir, sizeof cfg.dir, "%s", env("STAND_IN_DIR", "/tmp/cuda-stand-in"));
    snprintf(cfg.ptxas, sizeof cfg.ptxas, "%s", env("STAND_IN_PTXAS", ""));
    snprintf(cfg.cc, sizeof cfg.cc, "%s", env("STAND_IN_CC_COMMAND", "cc -O1"));
    mkdir(cfg.dir, 0777);
    sscanf(env("STAND_IN_CC", "9.0"), "%d.%d", &cfg.major, &cfg.minor);
    cfg.driver = atoi(env("STAND_IN_DRIVER", "13000"));
    cfg.lazy = !strcmp(env("STAND_IN_ORDER", "issue"), "lazy");
    simt_is_lazy = cfg.lazy;
    cfg.execute = strcmp(env("STAND_IN_EXEC", "1"), "trial") ? atoi(env("STAND_IN_EXEC", "1")) : TRIAL;
    cfg.check = atoi(env("STAND_IN_CHECK", "0"));
    cfg.quiet = atoi(env("STAND_IN_QUIET", "0"));
    cfg.poison = atoi(env("STAND_IN_POISON", "1"));
    simt_poison = cfg.poison == 1 ? 0xff : cfg.poison;
    simt_limit_s = atof(env("STAND_IN_LAUNCH_S", "0"));
    cfg.num_gpus = atoi(env("STAND_IN_GPUS", "1"));
    cfg.memory = strtoull(env("STAND_IN_MEM", "85899345920"), 0, 0);
    const char *t = env("STAND_IN_TIME", "real");
    if (!strncmp(t, "random", 6)) {
        cfg.clock = RANDOM;
        cfg.seed = strtoull(t[6] ? t + 7 : "1", 0, 0) * 0x9e3779b97f4a7c15ull + 1;
    }
    if (!strncmp(t, "const", 5)) { cfg.clock = CONSTANT; cfg.launch_s = t[5] ? 1e-3 * atof(t + 6) : 1e-3; }
    if (!strcmp(t, "model")) cfg.clock = MODEL;
    if (!strcmp(t, "first")) cfg.clock = FIRST;
    cfg.fault_code = ILLEGAL_ADDRESS;
    sscanf(env("STAND_IN_FAULT_AT", "0"), "%d:%d", &cfg.fault_at, &cfg.fault_code);
    cfg.sums = atoi(env("STAND_IN_SUMS", "0"));
    cfg.refuse_at = atoi(env("STAND_IN_REFUSE_AT", "0"));
    cfg.oom_at = atoi(env("STAND_IN_OOM_AT", "0"));
    cfg.tools = hash_of(cfg.cc) + (u64)cfg.check;
    const char *const sources[] = {"ptx2c.py", "ptx_module.py", "ptx_numbers.py", "ptx_warp.py", "ptx_async.py",
                                   "ptx_runtime.h"};
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        static char text[1 << 20];
        char path[1100];
        snprintf(path, sizeof path, "%s/%s", cfg.home, sources[i]);
        first_lines(path, text, sizeof text);
        cfg.tools = cfg.tools * 31 + hash_of(text);
    }
    int cc = cfg.major * 10 + cfg.minor;
    cfg.sms = cc >= 100 ? 148 : cc >= 90 ? 132 : cc == 80 ? 108 : cc >= 86 ? 84 : cc >= 75 ? 72 : 80;
    static const struct { int from, bytes; } optin[] = {{120, 101376}, {90, 232448}, {89, 101376}, {87, 166912},
        {86, 101376}, {80, 166912}, {75, 65536}, {70, 98304}, {0, 49152}};
    for (int i = 0; !cfg.shared_optin; i++) if (cc >= optin[i].from) cfg.shared_optin = optin[i].bytes;
    cfg.shared_sm = cfg.shared_optin + 1024;
    if (*env("STAND_IN_TRACE", "")) trace = fopen(getenv("STAND_IN_TRACE"), "w");
    atexit(write_log);
}

/* -- counts ---------------------------------------------------------------------------------------------- */

typedef struct Count { const char *name; u64 n, bytes; } Count;
static Count counts[128];
static int num_counts;

static void count(const char *name, u64 bytes) {
    int i = 0;
    while (i < num_counts && strcmp(counts[i].name, name)) i++;
    if (i == 128) return;
    if (i == num_counts) counts[num_counts++].name = name;
    counts[i].n++; counts[i].bytes += bytes;
}

static void tell(const char *format, ...) {
    if (!trace) return;
    fprintf(trace, "%.6f ", now() - started);
    va_list a; va_start(a, format); vfprintf(trace, format, a); va_end(a);
    fputc('\n', trace);
}

/* Every function that can fail starts with ENTER, which reports an earlier fault as the real driver does. */
#define ENTER(bytes) \
    pthread_once(&once, start); \
    pthread_mutex_lock(&lock); \
    count(__func__, bytes); \
    if (sticky) { pthread_mutex_unlock(&lock); return sticky; }
#define LEAVE(result) do { CUresult r_ = (result); pthread_mutex_unlock(&lock); return r_; } while (0)

/* -- memory ---------------------------------------------------------------------------------------------- */

typedef struct Block { u64 at, bytes; void *map; size_t map_bytes; } Block;
static Block *blocks; static int num_blocks, cap_blocks;
static Block *pinned; static int num_pinned, cap_pinned;
static u64 used, peak_used, num_allocs, pinned_used, pinned_peak;
static CUresult sync_all(void);

static int find(Block *list, int n, u64 at) {   /* last one that starts at or before `at` */
    int lo = 0, hi = n;
    while (lo < hi) { int mid = (lo + hi) / 2; if (list[mid].at <= at) lo = mid + 1; else hi = mid; }
    return lo - 1;
}

static int is_device(u64 addr, u32 bytes) {
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

static CUresult release(CUdeviceptr at) {
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

/* -- modules --------------------------------------------------------------------------------------------- */

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
    Kernel *next;
};
static Module *modules;
static u64 num_executed, num_modules, ptx_refused, not_translated, refused_launches;
static double translate_s, ptxas_s, run_s;

static int exists(const char *path) { return !access(path, F_OK); }

/* Starts a shell command in the background. Gives its process, or 0. */
static pid_t begin(const char *command) {
    char *arguments[] = {"sh", "-c", (char *)command, 0};
    pid_t pid;
    return posix_spawn(&pid, "/bin/sh", 0, 0, arguments, environ) ? 0 : pid;
}

/* Waits for what `begin` started. */
static void end(pid_t *pid) {
    while (*pid && waitpid(*pid, 0, 0) < 0 && errno == EINTR) {}
    *pid = 0;
}

static int field_before(const char *text, const char *word) {   /* the number before `word` */
    const char *p = strstr(text, word);
    if (!p) return 0;
    while (p > text && (p[-1] == ' ')) p--;
    while (p > text && p[-1] >= '0' && p[-1] <= '9') p--;
    return atoi(p);
}

/* Refuses PTX of a version, or for a GPU, that the driver does not know, as the real one does before it assembles. */
static CUresult look_at_header(Module *m) {
    int major = 0, minor = 0, target = 0, driver = cfg.driver / 1000, update = cfg.driver % 1000 / 10;
    char suffix = 0;
    const char *version = strstr(m->text, ".version "), *gpu = strstr(m->text, ".target sm_");
    if (version) sscanf(version + 9, "%d.%d", &major, &minor);
    if (gpu) sscanf(gpu + 11, "%d%c", &target, &suffix);
    /* 12.6 brought no version of its own. */
    int newest = driver <= 11 ? 70 + update : driver == 12 ? 80 + update - (update > 5) : 90 + update;
    if (major * 10 + minor > newest) {
        snprintf(m->error, sizeof m->error, "Unsupported .version %d.%d; current version is '%d.%d'", major, minor,
                 newest / 10, newest % 10);
        return UNSUPPORTED_PTX_VERSION;
    }
    int cc = cfg.major * 10 + cfg.minor;
    if (target > cc || (suffix == 'a' && target != cc) || (suffix == 'f' && target / 10 != cfg.major)) {
        snprintf(m->error, sizeof m->error, "Program with .target 'sm_%d%s' cannot be compiled to architecture 'sm_%d'",
                 target, suffix == 'a' ? "a" : suffix == 'f' ? "f" : "", cc);
        return INVALID_PTX;
    }
    return OK;
}

/* The GPU that a module names, and where ptxas' report of it lies. */
static void name_report(const Module *m, char target[32], char *path, size_t size) {
    const char *t = strstr(m->text, ".target ");
    strcpy(target, "sm_90");
    if (t) sscanf(t + 8, "%31[a-z0-9_]", target);
    snprintf(path, size, "%s.%s.ptxas", m->path, target);
}

static void begin_assembler(Module *m) {
    char target[32], report[1300], command[8192];
    name_report(m, target, report, sizeof report);
    if (!*cfg.ptxas || exists(report)) return;
    int pid = (int)getpid();
    snprintf(command, sizeof command,
             "%s -v -arch=%s -o /dev/null %s.ptx >%s.%d 2>&1; echo exit $? >>%s.%d; mv %s.%d %s", cfg.ptxas, target,
             m->path, report, pid, report, pid, report, pid, report);
    m->assembler = begin(command);
}

/* What the real assembler says of the text. Gives 0 where it refuses it. */
static int end_assembler(Module *m) {
    if (!*cfg.ptxas) return 1;
    char target[32], report[1300], text[8192];
    double began = now();
    end(&m->assembler);
    m->ptxas_s = now() - began;
    ptxas_s += m->ptxas_s;
    name_report(m, target, report, sizeof report);
    first_lines(report, text, sizeof text);
    m->regs = field_before(text, " registers");
    m->stack = field_before(text, " bytes stack frame");
    m->spill_st = field_before(text, " bytes spill stores");
    m->spill_ld = field_before(text, " bytes spill loads");
    m->static_shared = field_before(text, " bytes smem");
    if (strstr(text, "exit 0")) return 1;
    snprintf(m->error, sizeof m->error, "ptxas: %.480s", text);
    return 0;
}

/* The compiled kernels of a module: one file for each version of the translator. */
static void name_code(const Module *m, char *path, size_t size) {
    snprintf(path, size, "%s.%08x.so", m->path, (u32)cfg.tools);
}

static void begin_translation(Module *m) {
    char so[1300], stem[1320], command[8192];
    name_code(m, so, sizeof so);
    if (m->compiler || exists(so)) return;
    snprintf(stem, sizeof stem, "%s.%d", so, (int)getpid());
    snprintf(
        command, sizeof command,
        "{ python3 -S %s/ptx2c.py %s.ptx %s.c && %s -march=x86-64-v3 -ffp-contract=off -fno-math-errno -shared -fPIC "
        "-w -I%s %s -o %s %s.c -lm; } >%s.err 2>&1 && mv %s %s && rm -f %s.c %s.err",
        cfg.home, m->path, stem, cfg.cc, cfg.home, cfg.check ? "-DFK_CHECK" : "", stem, stem, stem, stem, so, stem,
        stem);
    m->compiler = begin(command);
}

/* Loads the kernels of a module as code of this machine; once. */
static void translate(Module *m) {
    if (m->code || m->failed) return;
    char so[1300], err[1400], text[512];
    double began = now();
    name_code(m, so, sizeof so);
    begin_translation(m);
    end(&m->compiler);
    void *h = exists(so) ? dlopen(so, RTLD_NOW | RTLD_LOCAL) : 0;
    const FkModule *(*get)(const FkRt *) = h ? (const FkModule *(*)(const FkRt *))dlsym(h, "si_module") : 0;
    if (get) {
        m->code = get(&simt_runtime);
    } else {
        m->failed = 1;
        not_translated++;
        snprintf(err, sizeof err, "%s.%d.err", so, (int)getpid());
        first_lines(err, text, sizeof text);
        snprintf(m->error, sizeof m->error, "%.500s", *text ? text : "no such library");
        say("kernel not translated (%s.ptx): %s", m->path, m->error);
    }
    m->translate_s = now() - began;
    translate_s += m->translate_s;
}

/* -- streams: queues of work ----------------------------------------------------------------------------- */

enum { LAUNCH, COPY, COPY2D, SET, RECORD, WAIT, RELEASE };
typedef struct Copy2D { size_t src_pitch, dst_pitch, width, height; } Copy2D;
typedef struct Op {
    int kind, is_to_host; Kernel *kernel; u32 grid[3], block[3], cluster[3], shared; u8 *params;
    void *dst; const void *src; size_t bytes; void *staged; Copy2D two; u32 value; int unit;
    Event *event; u64 ticket, until; struct Op *next;
} Op;
struct Stream { Op *head, *tail; struct Stream *next; int number; };
struct Event { u64 ticket, done; double at; Stream *stream; };
static Stream *streams; static Stream default_stream;
static int num_streams;
static u64 tickets;
static double modelled;   /* the device's clock in seconds, where it is not that of this machine */

static sigjmp_buf fault_jump;
static volatile int guarding;
static pthread_t guarded;
static volatile u64 fault_address;

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

static void run_kernel(Op *op) {
    Kernel *k = op->kernel;
    SimtError error = {{0}, 0};
    double began = now();
    modelled += seconds_of(op);
    /* Such a benchmark doubles its work until it takes 20 ms by the host's clock. */
    if (k->is_probe && cfg.clock != REAL) usleep(20000);
    if (!is_run(op)) return;
    if (++num_executed == (u64)cfg.fault_at) { fault(cfg.fault_code, "asked for by STAND_IN_FAULT_AT"); return; }
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
        int how = k->cut && all >= k->cut_blocks ? 2 : simt_run(k->module->code, k->entry, &simt, &error);
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

static void run_until(Stream *s, u64 ticket);

static void run_op(Op *op) {
    int moves = op->kind == COPY || op->kind == COPY2D || op->kind == SET;
    if (sticky && op->kind != RECORD && op->kind != RELEASE) return;
    if (trial_is_over && moves && !op->is_to_host) return;
    if (cfg.execute == TRIAL && op->is_to_host) trial_is_over = 1;
    switch (op->kind) {
    case LAUNCH: run_kernel(op); break;
    case COPY: memmove(op->dst, op->staged ? op->staged : op->src, op->bytes); break;
    case COPY2D:
        for (size_t y = 0; y < op->two.height; y++)
            memmove((u8 *)op->dst + y * op->two.dst_pitch,
                    (const u8 *)(op->staged ? op->staged : op->src) + y * op->two.src_pitch, op->two.width);
        break;
    case SET:
        for (size_t i = 0; i < op->bytes; i++)
            memcpy((u8 *)op->dst + i * (size_t)op->unit, &op->value, (size_t)op->unit);
        break;
    case RECORD:
        if (op->event->done < op->ticket) op->event->done = op->ticket;
        op->event->at = cfg.clock == REAL ? now() : modelled;
        break;
    case WAIT:
        run_until(op->dst, op->until);
        break; /* up to the record that was the last one when the wait was asked for */
    case RELEASE: release((u64)op->dst); break;
    }
}

/* Runs a stream until the operation `ticket` is done, or all. */
static void run_until(Stream *s, u64 ticket) {
    while (s->head && s->head->ticket <= ticket) {
        Op *op = s->head;
        s->head = op->next;
        if (!s->head) s->tail = 0;
        run_op(op);
        free(op->params); free(op->staged); free(op);
    }
}

static Stream *stream_of(void *handle) { return handle && (u64)handle > 2 ? handle : &default_stream; }

static CUresult enqueue(void *handle, Op given) {
    Stream *s = stream_of(handle);
    if (given.kind == WAIT && !given.until) return OK;   /* nothing was recorded */
    Op *op = malloc(sizeof *op);
    *op = given;
    op->ticket = ++tickets;
    op->next = 0;
    if (given.kind == RECORD) { given.event->ticket = op->ticket; given.event->stream = s; }
    if (s->tail) s->tail->next = op; else s->head = op;
    s->tail = op;
    if (!cfg.lazy) run_until(s, ~0ull);
    return OK;
}

static CUresult sync_all(void) {
    run_until(&default_stream, ~0ull);
    for (Stream *s = streams; s; s = s->next) run_until(s, ~0ull);
    return sticky;
}

/* -- API: device and context ----------------------------------------------------------------------------- */

API CUresult cuInit(unsigned flags) {
    (void)flags;
    pthread_once(&once, start);
    simt_is_device_memory = is_device;
    return OK;
}

/* NVRTC asks for private tables, and does without them where it gets an error; without the function it crashes. */
API CUresult cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = 0;
    return NOT_FOUND;
}

API CUresult cuDriverGetVersion(int *v) { pthread_once(&once, start); *v = cfg.driver; return OK; }
API CUresult cuDeviceGetCount(int *n) { pthread_once(&once, start); *n = cfg.num_gpus; return OK; }
API CUresult cuDeviceGet(CUdevice *d, int ordinal) {
    pthread_once(&once, start);
    if (ordinal >= cfg.num_gpus) return INVALID_DEVICE;
    *d = ordinal;
    return OK;
}
API CUresult cuDeviceGetName(char *name, int len, CUdevice d) {
    (void)d; pthread_once(&once, start);
    snprintf(name, (size_t)len, "%s", env("STAND_IN_NAME", "NVIDIA stand-in without a GPU")); return OK;
}
API CUresult cuDeviceGetUuid(u8 *uuid, CUdevice d) {
    for (int i = 0; i < 16; i++) uuid[i] = (u8)(i * 17);
    uuid[15] = (u8)d;
    return OK;
}
API CUresult cuDeviceGetUuid_v2(u8 *uuid, CUdevice d) { return cuDeviceGetUuid(uuid, d); }
API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice d) {
    (void)d;
    pthread_once(&once, start);
    *bytes = cfg.memory;
    return OK;
}
API CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice d) {
    snprintf(id, (size_t)len, "0000:%02x:00.0", 16 + d);
    return OK;
}
API CUresult cuDeviceGetAttribute(int *v, int a, CUdevice d) {
    (void)d; pthread_once(&once, start);
    switch (a) {
    case 1: *v = 1024; break;
    case 2: case 3: *v = 1024; break;
    case 4: *v = 64; break;
    case 5: *v = 2147483647; break;
    case 6: case 7: *v = 65535; break;
    case 8: *v = 49152; break;
    case 9: *v = 65536; break;
    case 10: *v = 32; break;
    case 12: case 82: *v = 65536; break;
    case 13: *v = 1980000; break;
    case 14: *v = 512; break;
    case 16: *v = cfg.sms; break;
    case 19: case 31: case 41: case 78: case 83: case 95: case 115: *v = 1; break;
    case 36: *v = 2619000; break;
    case 37: *v = 5120; break;
    case 38: *v = 50 << 20; break;
    case 39: *v = cfg.major * 10 + cfg.minor == 75 ? 1024 : cfg.major == 8 && cfg.minor >= 6 ? 1536 : 2048; break;
    case 40: *v = 3; break;
    case 75: *v = cfg.major; break;
    case 76: *v = cfg.minor; break;
    case 81: *v = cfg.shared_sm; break;
    case 97: *v = cfg.shared_optin; break;
    case 106: *v = 32; break;
    case 111: *v = 1024; break;
    case 120: *v = cfg.major >= 9; break;   /* clusters */
    default: *v = 0;
    }
    return OK;
}
static __thread void *current_context;
static int the_context;
API CUresult cuDevicePrimaryCtxRetain(void **c, CUdevice d) { (void)d; *c = &the_context; return OK; }
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { (void)d; return OK; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) {
    (void)d;
    *flags = 0;
    *active = 1;
    return OK;
}
API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice d, unsigned flags) { (void)d; (void)flags; return OK; }
API CUresult cuCtxSetCurrent(void *c) { pthread_once(&once, start); current_context = c; return sticky; }
API CUresult cuCtxGetCurrent(void **c) { *c = current_context; return OK; }
API CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return OK; }
API CUresult cuCtxPushCurrent_v2(void *c) { current_context = c; return OK; }
API CUresult cuCtxPopCurrent_v2(void **c) { if (c) *c = current_context; return OK; }
API CUresult cuCtxSynchronize(void) { ENTER(0) tell("sync context"); LEAVE(sync_all()); }
API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return OK;
}
API CUresult cuCtxGetLimit(size_t *v, int which) { (void)which; *v = 1024; return OK; }
API CUresult cuCtxSetLimit(int which, size_t v) { (void)which; (void)v; return OK; }

static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "cluster misconfiguration"},
};
API CUresult cuGetErrorName(CUresult e, const char **s) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == e) {
            *s = errors[i].name;
            return OK;
        }
    *s = "CUDA_ERROR_UNKNOWN"; return OK;
}
API CUresult cuGetErrorString(CUresult e, const char **s) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == e) {
            *s = errors[i].text;
            return OK;
        }
    *s = "unknown error"; return OK;
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

/* -- API: streams and events ----------------------------------------------------------------------------- */

static CUresult make_stream(void **out) {
    Stream *s = calloc(1, sizeof *s);
    s->next = streams; s->number = ++num_streams; streams = s;
    tell("new stream %d", s->number);
    *out = s;
    return OK;
}
API CUresult cuStreamCreate(void **s, unsigned flags) { (void)flags; ENTER(0) LEAVE(make_stream(s)); }
API CUresult cuStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    (void)flags;
    (void)priority;
    ENTER(0) LEAVE(make_stream(s));
}
API CUresult cuStreamDestroy_v2(void *s) { ENTER(0) run_until(stream_of(s), ~0ull); LEAVE(OK); }
API CUresult cuStreamSynchronize(void *s) {
    ENTER(0) tell("sync stream %d", stream_of(s)->number);
    run_until(stream_of(s), ~0ull);
    LEAVE(sticky);
}
API CUresult cuStreamQuery(void *s) { ENTER(0) LEAVE(stream_of(s)->head ? NOT_READY : OK); }
API CUresult cuStreamWaitEvent(void *s, Event *e, unsigned flags) {
    (void)flags;
    ENTER(0) Op op = {.kind = WAIT, .dst = e->stream, .until = e->ticket};
    LEAVE(enqueue(s, op));
}
API CUresult cuStreamIsCapturing(void *s, int *v) { (void)s; *v = 0; return OK; }
API CUresult cuStreamBeginCapture_v2(void *s, int mode) { (void)s; (void)mode; return NOT_SUPPORTED; }
API CUresult cuStreamEndCapture(void *s, void **g) { (void)s; *g = 0; return NOT_SUPPORTED; }
API CUresult cuEventCreate(Event **e, unsigned flags) { (void)flags; ENTER(0) *e = calloc(1, sizeof **e); LEAVE(OK); }
API CUresult cuEventDestroy_v2(Event *e) {
    ENTER(0)
    /* An event may be destroyed while its record or a wait for it is still queued. */
    if (e->ticket > e->done && e->stream) run_until(e->stream, e->ticket);
    (void)e;   /* kept: a queued wait may name it */
    LEAVE(OK);
}
API CUresult cuEventRecord(Event *e, void *s) { ENTER(0) Op op = {.kind = RECORD, .event = e}; LEAVE(enqueue(s, op)); }
API CUresult cuEventSynchronize(Event *e) {
    ENTER(0) tell("sync event");
    if (e->stream) run_until(e->stream, e->ticket);
    LEAVE(sticky);
}
API CUresult cuEventQuery(Event *e) { ENTER(0) LEAVE(e->ticket > e->done ? NOT_READY : OK); }
static CUresult elapsed(float *ms, Event *a, Event *b) {
    if (a->stream) run_until(a->stream, a->ticket);
    if (b->stream) run_until(b->stream, b->ticket);
    *ms = (float)((b->at - a->at) * 1e3);
    return sticky;
}
API CUresult cuEventElapsedTime(float *ms, Event *a, Event *b) { ENTER(0) LEAVE(elapsed(ms, a, b)); }
API CUresult cuEventElapsedTime_v2(float *ms, Event *a, Event *b) { ENTER(0) LEAVE(elapsed(ms, a, b)); }
API CUresult cuLaunchHostFunc(void *s, void (*fn)(void *), void *data) {
    ENTER(0) run_until(stream_of(s), ~0ull);
    pthread_mutex_unlock(&lock);
    fn(data);
    return OK;
}

/* -- API: modules and launches --------------------------------------------------------------------------- */

/* Puts the text where the tools find it, whole. */
static void keep_text(const Module *m) {
    char path[1300], whole[1300];
    snprintf(whole, sizeof whole, "%s.ptx", m->path);
    if (exists(whole)) return;
    snprintf(path, sizeof path, "%s.%d", whole, (int)getpid());
    FILE *f = fopen(path, "w");
    if (!f) return;
    fputs(m->text, f);
    fclose(f);
    rename(path, whole);
}

static CUresult load_module(Module **out, const char *text) {
    Module *m = calloc(1, sizeof *m);
    m->text = strdup(text);
    m->hash = hash_of(text);
    snprintf(m->path, sizeof m->path, "%s/%016llx", cfg.dir, (unsigned long long)m->hash);
    m->next = modules; modules = m; num_modules++;
    keep_text(m);
    CUresult result = look_at_header(m);
    if (result == OK) {
        /* Both at once: most kernels are launched as soon as they are loaded. */
        begin_assembler(m);
        if (cfg.execute == 1 || cfg.execute >= 65536) begin_translation(m);
        if (!end_assembler(m)) result = INVALID_PTX;
    }
    tell("module %016llx, %zu bytes of PTX, %d registers, %d bytes spilled%s", (unsigned long long)m->hash,
         strlen(text), m->regs, m->spill_st, result == OK ? "" : ", REFUSED");
    if (result == OK) *out = m;
    else { ptx_refused++; say("PTX refused (%s.ptx): %s", m->path, m->error); }
    return result;
}
API CUresult cuModuleLoadData(Module **m, const void *text) { ENTER(0) LEAVE(load_module(m, text)); }
API CUresult cuModuleLoadDataEx(Module **m, const void *text, unsigned n, int *o, void **v) {
    (void)n;
    (void)o;
    (void)v;
    ENTER(0) LEAVE(load_module(m, text));
}
API CUresult cuModuleUnload(Module *m) { (void)m; ENTER(0) LEAVE(OK); }
API CUresult cuModuleGetFunction(Kernel **out, Module *m, const char *name) {
    ENTER(0)
    for (Kernel *k = m->kernels; k; k = k->next) if (!strcmp(k->name, name)) { *out = k; LEAVE(OK); }
    char line[600];
    snprintf(line, sizeof line, ".entry %s", name);
    const char *p = strstr(m->text, line);
    if (!p) LEAVE(NOT_FOUND);
    Kernel *k = calloc(1, sizeof *k);
    k->module = m;
    k->is_probe = strstr(name, "_throughput") != 0;
    snprintf(k->name, sizeof k->name, "%s", name);
    k->max_dynamic = 49152;
    k->next = m->kernels; m->kernels = k;
    tell("function %s of %016llx", name, (unsigned long long)m->hash);
    *out = k;
    LEAVE(OK);
}
API CUresult cuFuncSetAttribute(Kernel *k, int a, int v) {
    ENTER(0)
    if (a == 8) {
        if (v + k->module->static_shared > cfg.shared_optin) LEAVE(INVALID_VALUE);
        k->max_dynamic = v > 49152 ? v : 49152;
    }
    if (a == 14) k->is_any_cluster = v;
    LEAVE(OK);
}
API CUresult cuFuncGetAttribute(int *v, int a, Kernel *k) {
    ENTER(0) *v = a == 0   ? 1024
                  : a == 4 ? k->module->regs
                  : a == 1 ? k->module->static_shared
                  : a == 8 ? k->max_dynamic
                           : 0;
    LEAVE(OK);
}
API CUresult cuFuncSetCacheConfig(Kernel *k, int c) { (void)k; (void)c; return OK; }

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
        translate(m);
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
#define REFUSED(name)                                                                                                  \
    API CUresult name(void) {                                                                                          \
        pthread_once(&once, start);                                                                                    \
        count(#name, 0);                                                                                               \
        say(#name " is not there");                                                                                    \
        return NOT_SUPPORTED;                                                                                          \
    }
REFUSED(cuTensorMapEncodeIm2colWide)
REFUSED(cuGraphInstantiateWithFlags) REFUSED(cuGraphLaunch) REFUSED(cuGraphUpload) REFUSED(cuGraphDestroy)
REFUSED(cuGraphExecDestroy) REFUSED(cuGraphGetNodes) REFUSED(cuGraphNodeGetType)
REFUSED(cuMemAllocManaged) REFUSED(cuMemcpyPeerAsync) REFUSED(cuLaunchCooperativeKernel)

    /* -- the log --------------------------------------------------------------------------------------------- */

    static void json_text(FILE *f, const char *s) {
    fputc('"', f);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') fprintf(f, "\\%c", *s);
        else if ((u8)*s < 32) fputc(' ', f);
        else fputc(*s, f);
    }
    fputc('"', f);
}

/* What all threads of this process took. */
static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void write_log(void) {
    if (trace) fflush(trace);
    const char *path = env("STAND_IN_LOG", "");
    if (!*path) return;
    FILE *f = fopen(path, "w");
    if (!f) return;
    fprintf(f, "{\"compute_capability\": \"%d.%d\", \"driver\": %d, \"order\": \"%s\",\n", cfg.major, cfg.minor,
            cfg.driver, cfg.lazy ? "lazy" : "issue");
    fprintf(f,
            "\"wall_s\": %.3f, \"kernels_run_s\": %.3f, \"translate_s\": %.3f, \"ptxas_s\": %.3f, \"modules\": %llu, "
            "\"ptx_refused\": %llu, \"not_translated\": %llu, \"refused_launches\": %llu,\n",
            now() - started, run_s, translate_s, ptxas_s, (unsigned long long)num_modules,
            (unsigned long long)ptx_refused, (unsigned long long)not_translated, (unsigned long long)refused_launches);
    fprintf(f,
            "\"cpu_s\": %.3f, \"launches_run\": %llu, \"device_bytes_peak\": %llu, \"device_allocations\": %llu, "
            "\"pinned_bytes_peak\": "
            "%llu, \"fault\": ",
            cpu_seconds(), (unsigned long long)num_executed, (unsigned long long)peak_used,
            (unsigned long long)num_allocs, (unsigned long long)pinned_peak);
    json_text(f, sticky_text);
    fprintf(f, ",\n\"calls\": {");
    for (int i = 0; i < num_counts; i++)
        fprintf(f, "%s\n  \"%s\": {\"count\": %llu, \"bytes\": %llu}", i ? "," : "", counts[i].name,
                (unsigned long long)counts[i].n, (unsigned long long)counts[i].bytes);
    fprintf(f, "},\n\"notes\": [");
    for (int i = 0; i < simt_num_notes; i++) {
        fprintf(f, "%s\n  {\"count\": %llu, \"what\": ", i ? "," : "", simt_notes[i].count);
        json_text(f, simt_notes[i].text);
        fputc('}', f);
    }
    fprintf(f, "],\n\"kernels\": [");
    int first = 1;
    for (Module *m = modules; m; m = m->next) {
        Kernel none = {0}; none.module = m;
        Kernel *k = m->kernels ? m->kernels : &none;
        for (; k; k = k->next) {
            fprintf(f, "%s\n  {\"hash\": \"%016llx\", \"name\": ", first ? "" : ",", (unsigned long long)m->hash);
            json_text(f, k->name);
            fprintf(f,
                    ", \"launches\": %llu, \"blocks\": %llu, \"threads\": %llu, \"seconds\": %.6f, \"last_grid\": [%u, "
                    "%u, %u], \"block\": [%u, %u, %u], \"dynamic_shared\": %u, \"ptx_bytes\": %zu, \"registers\": %d, "
                    "\"stack\": %d, \"spill_stores\": %d, \"spill_loads\": %d, \"static_shared\": %d, \"ptxas_s\": "
                    "%.3f, \"translate_s\": %.3f, \"cut_short\": %llu, \"error\": ",
                    (unsigned long long)k->launches, (unsigned long long)k->blocks, (unsigned long long)k->threads,
                    k->seconds, k->grid[0], k->grid[1], k->grid[2], k->block[0], k->block[1], k->block[2], k->shared,
                    strlen(m->text), m->regs, m->stack, m->spill_st, m->spill_ld, m->static_shared, m->ptxas_s,
                    m->translate_s, (unsigned long long)k->cut);
            json_text(f, m->error);
            fputc('}', f);
            first = 0;
        }
    }
    fprintf(f, "]}\n");
    fclose(f);
}
