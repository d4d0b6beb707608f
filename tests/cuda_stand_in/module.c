/* Modules: PTX that ptxas checks and that becomes code of this machine. */
#define _GNU_SOURCE
#include "driver.h"
#include <dlfcn.h>
#include <errno.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* -- modules --------------------------------------------------------------------------------------------- */

Module *modules;
u64 num_modules, ptx_refused, not_translated;
double translate_s, ptxas_s;

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
void translate(Module *m) {
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

/* -- API: modules ---------------------------------------------------------------------------------------- */

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
