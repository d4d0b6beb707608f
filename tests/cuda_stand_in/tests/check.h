/* For tests: the driver's functions, and a way to fail. Tests are linked with the stand-in. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long ptr;
int cuInit(), cuModuleLoadData(), cuModuleGetFunction(), cuMemAlloc_v2(), cuMemFree_v2(), cuMemcpyHtoD_v2(), cuMemcpyDtoH_v2(), cuLaunchKernel(), cuLaunchKernelEx(),
    cuFuncSetAttribute(), cuTensorMapEncodeTiled(), cuTensorMapEncodeIm2col(), cuCtxSynchronize();
#define CALL(name, ...) do { int e_ = name(__VA_ARGS__); if (e_) { printf(#name " gives %d\n", e_); exit(1); } } while (0)

static int failures;
#define EXPECT(is_right, ...) do { if (!(is_right) && failures++ < 10) { printf(__VA_ARGS__); putchar('\n'); } } while (0)

static void *load(const char *path) {
    CALL(cuInit, 0);
    FILE *f = fopen(path, "r");
    char *text = calloc(1, 4 << 20);
    if (!f || !fread(text, 1, (4 << 20) - 1, f)) { printf("no %s\n", path); exit(1); }
    fclose(f);
    void *module;
    CALL(cuModuleLoadData, &module, text);
    return module;
}
static void *kernel(void *module, const char *name) {
    void *k;
    CALL(cuModuleGetFunction, &k, module, name);
    return k;
}
static ptr device(const void *from, size_t bytes) {
    ptr p;
    CALL(cuMemAlloc_v2, &p, bytes);
    if (from) CALL(cuMemcpyHtoD_v2, p, from, bytes);
    return p;
}
static void launch(void *k, unsigned blocks, unsigned threads, unsigned shared, void **params) {
    if (shared > 49152) CALL(cuFuncSetAttribute, k, 8, (int)shared);
    CALL(cuLaunchKernel, k, blocks, 1, 1, threads, 1, 1, shared, (void *)0, params, (void *)0);
}
static int report(void) { puts(failures ? "FAIL" : "ok"); return failures != 0; }
