/* A stand-in for NVIDIA's driver library libcuda.so.1, on a machine without a GPU. See README.md. */
#define _GNU_SOURCE
#include "driver.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* -- settings -------------------------------------------------------------------------------------------- */

Settings cfg;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_once_t once = PTHREAD_ONCE_INIT;

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
const char *env(const char *name, const char *other) {
    const char *v = getenv(name);
    return v && *v ? v : other;
}

u64 hash_of(const char *text) {
    u64 h = 1469598103934665603ull;
    for (; *text; text++) h = (h ^ (u8)*text) * 1099511628211ull;
    return h ^ (h >> 29);
}

void first_lines(const char *path, char *out, size_t size) {
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(out, 1, size - 1, f) : 0;
    out[n] = 0;
    if (f) fclose(f);
}

void start(void) {
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
    cfg.exclusive = atoi(env("STAND_IN_EXCLUSIVE", "0"));
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
    cfg.fault_in = env("STAND_IN_FAULT_IN", "");
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
/* Compute mode EXCLUSIVE_PROCESS: the second process gets CUDA_ERROR_DEVICE_UNAVAILABLE, until the first ends. */
static CUresult occupy(void) {
    static int file = -1;
    if (!cfg.exclusive || file >= 0) return OK;
    char path[600];
    snprintf(path, sizeof path, "%s/exclusive", cfg.dir);
    file = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0) return OK;
    close(file);
    file = -1;
    return 46;
}
API CUresult cuDevicePrimaryCtxRetain(void **c, CUdevice d) { (void)d; *c = &the_context; return occupy(); }
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

/* -- API: what is not there ------------------------------------------------------------------------------ */

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
