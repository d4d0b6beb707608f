/* Products of libcublasLt.so.13 against plain sums, their place among the other work of a stream, and what is refused. */
#include "check.h"
#include <sys/wait.h>
#include <unistd.h>

enum { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28, COMPUTE_32F = 68, FAST_TF32 = 77, INVALID = 7, FAILED = 13, UNSUPPORTED = 15 };
typedef struct Result { unsigned long long algo[8]; size_t workspace; int state; float waves; int reserved[4]; } Result;
typedef void *Any;
int cublasLtCreate(Any *), cublasLtDestroy(Any), cublasLtMatmulDescCreate(Any *, int, int), cublasLtMatmulDescDestroy(Any),
    cublasLtMatmulDescSetAttribute(Any, int, const void *, size_t),
    cublasLtMatrixLayoutCreate(Any *, int, uint64_t, uint64_t, int64_t),
    cublasLtMatrixLayoutSetAttribute(Any, int, const void *, size_t), cublasLtMatrixLayoutDestroy(Any),
    cublasLtMatrixLayoutGetAttribute(Any, int, void *, size_t, size_t *), cublasLtMatmulPreferenceCreate(Any *),
    cublasLtMatmulPreferenceSetAttribute(Any, int, const void *, size_t), cublasLtMatmulPreferenceDestroy(Any),
    cublasLtMatmulAlgoGetHeuristic(Any, Any, Any, Any, Any, Any, Any, int, Result *, int *),
    cublasLtMatmulAlgoCheck(Any, Any, Any, Any, Any, Any, const void *, Result *),
    cublasLtMatmul(Any, Any, const float *, ptr, Any, ptr, Any, const float *, ptr, Any, ptr, Any, const void *, ptr, size_t,
                   Any);
int cuStreamCreate(), cuStreamQuery(), cuStreamSynchronize(), cuMemsetD16Async(ptr, unsigned short, size_t, Any),
    cuMemcpyDtoDAsync_v2(ptr, ptr, size_t, Any), cuEventCreate(), cuEventRecord(), cuStreamWaitEvent();
size_t cublasLtGetVersion(void);
const char *cublasLtGetStatusName(int);

static Any lt, stream;
static ptr work;
enum { WORK = 8 << 20 };

static size_t bytes_of(int type) { return type == F32 ? 4 : type == E4M3 ? 1 : 2; }
static void put(void *at, size_t i, int type, float x) {
    uint32_t bits; memcpy(&bits, &x, 4);
    uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    _Float16 h = (_Float16)x;
    if (type == F32) ((float *)at)[i] = x;
    else if (type == F16) ((_Float16 *)at)[i] = h;
    else ((uint16_t *)at)[i] = half;
}
static float get(const void *at, size_t i, int type) {
    if (type == F32) return ((const float *)at)[i];
    if (type == F16) return (float)((const _Float16 *)at)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
    float x; memcpy(&x, &bits, 4);
    return x;
}
/* Eighths from -2 to 2: sums of their products are exact in f32, whatever their order. */
static float number(size_t i) { return (float)((int)(i * 2654435761u >> 7 & 31) - 16) / 8; }

/* A product: what the library is given, in one place. */
typedef struct Job {
    int in, out, ta, tb; size_t m, n, k, pad; float alpha, beta; int is_in_place, batches;
    Any op, l[4]; Result found;
} Job;
static Any layout(const Job *j, int type, size_t rows, size_t cols) {
    Any l;
    int64_t ld = (int64_t)(rows + j->pad), stride = ld * (int64_t)cols + 5;
    CALL(cublasLtMatrixLayoutCreate, &l, type, rows, cols, ld);
    CALL(cublasLtMatrixLayoutSetAttribute, l, 5, &j->batches, 4);
    CALL(cublasLtMatrixLayoutSetAttribute, l, 6, &stride, 8);
    return l;
}
static void describe(Job *j) {
    CALL(cublasLtMatmulDescCreate, &j->op, COMPUTE_32F, F32);
    CALL(cublasLtMatmulDescSetAttribute, j->op, 3, &j->ta, 4);
    CALL(cublasLtMatmulDescSetAttribute, j->op, 4, &j->tb, 4);
    if (!j->batches) j->batches = 1;
    j->l[0] = j->ta ? layout(j, j->in, j->k, j->m) : layout(j, j->in, j->m, j->k);
    j->l[1] = j->tb ? layout(j, j->in, j->n, j->k) : layout(j, j->in, j->k, j->n);
    j->l[2] = layout(j, j->out, j->m, j->n);
    j->l[3] = layout(j, j->out, j->m, j->n);
}
static int look_for(Job *j) {
    Any preference; int n = 0;
    size_t most = WORK;
    CALL(cublasLtMatmulPreferenceCreate, &preference);
    CALL(cublasLtMatmulPreferenceSetAttribute, preference, 1, &most, 8);
    int status = cublasLtMatmulAlgoGetHeuristic(lt, j->op, j->l[0], j->l[1], j->l[2], j->l[3], preference, 1, &j->found, &n);
    EXPECT(status || (n == 1 && !j->found.state && j->found.workspace <= WORK), "heuristic: %d results", n);
    CALL(cublasLtMatmulPreferenceDestroy, preference);
    return status;
}
static int multiply(const Job *j, ptr a, ptr b, ptr c, ptr d) {
    return cublasLtMatmul(lt, j->op, &j->alpha, a, j->l[0], b, j->l[1], &j->beta, c, j->l[2], d, j->l[3],
                          &j->found, work, WORK, stream);
}
static void forget(Job *j) {
    CALL(cublasLtMatmulDescDestroy, j->op);
    for (int i = 0; i < 4; i++) CALL(cublasLtMatrixLayoutDestroy, j->l[i]);
}

static void check(Job j) {
    describe(&j);
    CALL(look_for, &j);
    size_t rows[] = {j.ta ? j.k : j.m, j.tb ? j.n : j.k, j.m, j.m}, cols[] = {j.ta ? j.m : j.k, j.tb ? j.k : j.n, j.n, j.n};
    size_t stride[4], all[4];
    void *host[4]; ptr at[4];
    for (int i = 0; i < 4; i++) {
        int type = i < 2 ? j.in : j.out;
        stride[i] = (rows[i] + j.pad) * cols[i] + 5;
        all[i] = stride[i] * (size_t)j.batches * bytes_of(type);
        host[i] = malloc(all[i]);
        for (size_t e = 0; e < stride[i] * (size_t)j.batches; e++) put(host[i], e, type, number(e + (size_t)i * 999));
        at[i] = device(host[i], all[i]);
    }
    if (j.is_in_place) at[3] = at[2];
    CALL(multiply, &j, at[0], at[1], j.beta == 0 && !j.is_in_place ? 0 : at[2], at[3]);
    CALL(cuStreamSynchronize, stream);
    void *got = malloc(all[3]), *before = host[j.is_in_place ? 2 : 3];
    CALL(cuMemcpyDtoH_v2, got, at[3], all[3]);
    for (size_t e = 0; e < stride[3] * (size_t)j.batches; e++) {
        size_t batch = e / stride[3], y = e % stride[3] / (j.m + j.pad), x = e % stride[3] % (j.m + j.pad);
        float want = get(before, e, j.out);   /* between the columns, and between matrices */
        if (x < j.m && y < j.n) {
            double sum = 0;
            for (size_t k = 0; k < j.k; k++)
                sum += (double)get(host[0], batch * stride[0] + (j.ta ? x * (j.k + j.pad) + k : k * (j.m + j.pad) + x), j.in) *
                       (double)get(host[1], batch * stride[1] + (j.tb ? k * (j.n + j.pad) + y : y * (j.k + j.pad) + k), j.in);
            double c = j.beta != 0 ? get(host[2], batch * stride[2] + y * (j.m + j.pad) + x, j.out) : 0;
            float exact = (float)(j.alpha * sum + j.beta * c);
            char one[4]; put(one, 0, j.out, exact);
            want = get(one, 0, j.out);
        }
        EXPECT(get(got, e, j.out) == want, "%d->%d %d%d %zu %zu %zu beta %g: element %zu is %g, expected %g", j.in, j.out,
               j.ta, j.tb, j.m, j.n, j.k, j.beta, e, get(got, e, j.out), want);
    }
    for (int i = 0; i < 4; i++) { free(host[i]); if (i < 3 || !j.is_in_place) CALL(cuMemFree_v2, at[i]); }
    free(got);
    forget(&j);
}

#define REFUSED(call, status) \
    do { int s_ = call; EXPECT(s_ == status, "%s: %s, line %d", cublasLtGetStatusName(s_), #call, __LINE__); } while (0)
static void check_numbers(void) {
    static const struct { int in, out; } types[] = {{BF16, BF16}, {F16, F16}, {F32, F32}, {BF16, F32}, {F16, F32}};
    static const size_t sizes[][3] = {{1, 1, 1}, {17, 7, 3}, {64, 48, 64}, {257, 5, 300}, {40, 253, 515}};
    for (unsigned t = 0; t < 5; t++)
        for (unsigned s = 0; s < 5; s++)
            for (int trans = 0; trans < 4; trans++) {
                Job j = {types[t].in, types[t].out, trans & 1, trans >> 1, sizes[s][0], sizes[s][1], sizes[s][2], s % 3, 0.5f, 0};
                check(j);
                j.beta = 1; check(j);
                j.is_in_place = 1; j.beta = 2; check(j);
                if (s < 3) { j.batches = 3; check(j); }
            }
    /* What is not exact: rounded after blocks of terms, not after each. */
    enum { K = 20000 };
    static float x[K], y[K];
    float got; double sum = 0;
    for (int i = 0; i < K; i++) { x[i] = 2 + sinf((float)i); y[i] = 2 + cosf((float)i * 3); sum += (double)x[i] * y[i]; }
    Job j = {F32, F32, 1, 0, 1, 1, K, 0, 1, 0};
    describe(&j); CALL(look_for, &j);
    ptr a = device(x, sizeof x), b = device(y, sizeof y), d = device(0, 4);
    CALL(multiply, &j, a, b, 0, d);
    CALL(cuStreamSynchronize, stream);
    CALL(cuMemcpyDtoH_v2, &got, d, 4);
    EXPECT(fabs(got - sum) < 3e-7 * sum, "f32: %.9g, expected %.9g", got, sum);
}

/* Factors of eight bits, each with a number that it is multiplied by. */
static void check_e4m3(void) {
    enum { M = 32, N = 7, K = 48 };
    unsigned char a[M * K], b[N * K];
    uint16_t got[M * N];
    /* Of few exponents, so that sums are exact: 1 to 3.75 of either sign. */
    for (int i = 0; i < M * K; i++) a[i] = (unsigned char)((i * 2654435761u >> 9 & 0x8f) + 0x38);
    for (int i = 0; i < N * K; i++) b[i] = (unsigned char)((i * 2246822519u >> 11 & 0x8f) + 0x38);
    float scales[2] = {0.5f, 4};
    ptr at[] = {device(a, sizeof a), device(b, sizeof b), device(0, sizeof got)}, of = device(scales, sizeof scales);
    ptr second = of + 4;
    Job j = {E4M3, BF16, 1, 0, M, N, K, 0, 1, 0};
    describe(&j);
    CALL(cublasLtMatmulDescSetAttribute, j.op, 17, &of, 8);
    CALL(cublasLtMatmulDescSetAttribute, j.op, 18, &second, 8);
    CALL(look_for, &j);
    CALL(multiply, &j, at[0], at[1], 0, at[2]);
    CALL(cuStreamSynchronize, stream);
    CALL(cuMemcpyDtoH_v2, got, at[2], sizeof got);
    for (int i = 0; i < M * N; i++) {
        double sum = 0;
#define VALUE(code) (ldexp(8 + ((code) & 7), ((code) >> 3 & 15) - 10) * ((code) & 128 ? -1 : 1))
        for (int k = 0; k < K; k++) sum += VALUE(a[i % M * K + k]) * VALUE(b[i / M * K + k]);
        uint16_t want; put(&want, 0, BF16, (float)(2 * sum));
        EXPECT(got[i] == want, "e4m3: element %d is %x, expected %x", i, got[i], want);
    }
    forget(&j);
    Job other = {E4M3, BF16, 0, 0, M, N, K, 0, 1, 0}, odd = {E4M3, BF16, 1, 0, M, N, K + 8, 0, 1, 0};
    describe(&other); describe(&odd);
    REFUSED(look_for(&other), UNSUPPORTED);
    REFUSED(look_for(&odd), UNSUPPORTED);
}

/* A is written before the product, D is read after it and then overwritten, all without waiting: by a memset, a kernel,
   copies. */
static void check_order(int is_lazy) {
    enum { N = 64 };
    Job j = {F32, F32, 0, 0, N, N, N, 0, 1, 0};
    describe(&j); CALL(look_for, &j);
    float zeros[N * N] = {0}, ones[N * N], sum = 0, got[N * N];
    for (int i = 0; i < N * N; i++) ones[i] = 1;
    ptr a = device(zeros, sizeof zeros), b = device(ones, sizeof ones), d = device(0, sizeof ones);
    ptr kept = device(0, sizeof ones), total = device(&sum, 4);
    Any k = kernel(load("sample.ptx"), "block_sum"), other, event;
    CALL(cuStreamCreate, &other, 1);
    CALL(cuEventCreate, &event, 0);
    CALL(cuMemcpyDtoDAsync_v2, a, b, sizeof ones, stream);
    CALL(multiply, &j, a, b, 0, d);
    EXPECT(cuStreamQuery(stream) == (is_lazy ? 600 : 0), "the product is %s", is_lazy ? "done before anyone waits" : "not done");
    struct { long long pad; int n, more; } info = {0, N * N, 0};
    CALL(cuLaunchKernel, k, N * N / 64, 1, 1, 64, 1, 1, 8, stream, ((void *[]){&d, &total, &info}), (void *)0);
    CALL(cuEventRecord, event, stream);
    CALL(cuStreamWaitEvent, other, event, 0);
    CALL(cuMemcpyDtoDAsync_v2, kept, d, sizeof ones, other);
    CALL(cuStreamSynchronize, other);
    CALL(cuMemsetD16Async, work, 0, WORK / 2, stream);
    CALL(cuMemsetD16Async, a, 0, N * N * 2, stream);   /* the same product over its last result: zeros */
    CALL(multiply, &j, a, b, 0, d);
    CALL(cuStreamSynchronize, stream);
    CALL(cuMemcpyDtoH_v2, &sum, total, 4);
    EXPECT(sum == (float)N * N * N, "the kernel after the product sums %g", sum);
    CALL(cuMemcpyDtoH_v2, got, kept, sizeof got);
    for (int i = 0; i < N * N; i++) EXPECT(got[i] == N, "copied after the product: %g", got[i]);
    CALL(cuMemcpyDtoH_v2, got, d, sizeof got);
    for (int i = 0; i < N * N; i++) EXPECT(got[i] == 0, "second product: %g", got[i]);
    /* What lies in the workspace does not outlive a product. */
    CALL(cuMemcpyDtoH_v2, got, work, 4);
    CALL(cuMemcpyDtoH_v2, got + 1, work + WORK - 4, 4);
    EXPECT(isnan(got[0]) && isnan(got[1]), "workspace: %g %g", got[0], got[1]);
}

static void check_refusals(void) {
    Job j = {BF16, BF16, 1, 0, 64, 32, 128, 0, 1, 0}, wrong, wide = {BF16, BF16, 1, 0, 64, 32, 128, 64, 1, 0};
    describe(&j); CALL(look_for, &j);
    Result result;
    CALL(cublasLtMatmulAlgoCheck, lt, j.op, j.l[0], j.l[1], j.l[2], j.l[3], j.found.algo, &result);
    ptr a = device(0, 128 * 64 * 2), b = device(0, 128 * 32 * 2), d = device(0, 64 * 64 * 2);
    const float one = 1, zero = 0;
#define WITH(al, b_, c_, d_, algo, w, n) \
    cublasLtMatmul(lt, j.op, al, a, j.l[0], b_, j.l[1], &zero, c_, j.l[2], d_, j.l[3], algo, w, n, stream)
    CALL(WITH, &one, b, 0, d, 0, 0, 0);   /* without an algorithm or a workspace */
    REFUSED(WITH(0, b, d, d, &j.found, work, WORK), INVALID);
    REFUSED(WITH(&one, 0, d, d, &j.found, work, WORK), INVALID);
    REFUSED(WITH(&one, b + 1, d, d, 0, work, WORK), INVALID);
    REFUSED(WITH(&one, b + 2, d, d, &j.found, work, WORK), INVALID);   /* less aligned than the heuristic was told */
    REFUSED(WITH(&one, b, d, d, &j.found, work + 16, WORK - 16), INVALID);
    REFUSED(WITH(&one, b, d, d, &j.found, work, j.found.workspace - 1), INVALID);
    REFUSED(WITH(&one, b, d, d, &j.found, 0, WORK), INVALID);
    REFUSED(WITH(&one, b, d, d, &result.waves, work, WORK), INVALID);
    REFUSED(WITH(&one, b, d, a, 0, work, WORK), INVALID);              /* D over A */
    REFUSED(WITH(&one, work, d, d, &j.found, work, WORK), INVALID);
    REFUSED(cublasLtMatmul(lt, j.op, &one, a, j.l[0], b, j.l[1], &one, 0, j.l[2], d, j.l[3], 0, 0, 0, stream), INVALID);
    REFUSED(cublasLtMatmul(0, j.op, &one, a, j.l[0], b, j.l[1], &zero, d, j.l[2], d, j.l[3], 0, 0, 0, stream), 1);
    describe(&wide); CALL(look_for, &wide);
    REFUSED(cublasLtMatmul(lt, j.op, &one, a, j.l[0], b, j.l[1], &zero, d, j.l[2], d, wide.l[3], 0, 0, 0, stream), INVALID);
    REFUSED(WITH(&one, b, d, d, &wide.found, work, WORK), INVALID);
    /* C and D beside each other, in columns of one matrix. */
    ptr both = device(0, 128 * 32 * 2);
    wide.beta = 0;
    wide.pad = 0;
    ptr a2 = device(0, 192 * 64 * 2), b2 = device(0, 192 * 32 * 2);
    CALL(multiply, &wide, a2, b2, both + 128, both);
    REFUSED(multiply(&wide, a2, b2, both + 64, both), INVALID);

#define CHANGED(setter, object, attribute, value, status) do { \
        wrong = (Job){BF16, BF16, 1, 0, 64, 32, 128, 0, 1, 0}; describe(&wrong); \
        CALL(setter, wrong.object, attribute, &value, sizeof value); \
        REFUSED(look_for(&wrong), status); } while (0)
    int64_t ld = 63; uint64_t rows = 120; int type = F16, two = 2, tf32 = FAST_TF32, row_order = 1, n_op = 0, gelu = 32, none = 0;
    CHANGED(cublasLtMatrixLayoutSetAttribute, l[3], 4, ld, INVALID);
    CHANGED(cublasLtMatrixLayoutSetAttribute, l[1], 2, rows, INVALID);
    CHANGED(cublasLtMatrixLayoutSetAttribute, l[1], 5, two, INVALID);
    CHANGED(cublasLtMatrixLayoutSetAttribute, l[1], 5, none, INVALID);
    CHANGED(cublasLtMatrixLayoutSetAttribute, l[1], 0, type, UNSUPPORTED);
    CHANGED(cublasLtMatrixLayoutSetAttribute, l[1], 1, row_order, UNSUPPORTED);
    CHANGED(cublasLtMatmulDescSetAttribute, op, 0, tf32, UNSUPPORTED);
    CHANGED(cublasLtMatmulDescSetAttribute, op, 3, n_op, INVALID);
    CHANGED(cublasLtMatmulDescSetAttribute, op, 7, gelu, UNSUPPORTED);
    REFUSED(cublasLtMatrixLayoutSetAttribute(j.l[0], 2, &rows, 4), INVALID);
    REFUSED(cublasLtMatrixLayoutSetAttribute(j.op, 2, &rows, 8), INVALID);
    size_t written = 0;
    CALL(cublasLtMatrixLayoutGetAttribute, j.l[0], 4, &ld, 8, &written);
    EXPECT(ld == 128 && written == 8, "attribute: %lld of %zu bytes", (long long)ld, written);
    Any gone = j.l[0];
    forget(&j);
    REFUSED(cublasLtMatrixLayoutDestroy(gone), INVALID);
    EXPECT(cublasLtGetVersion() >= 130000, "version %zu", cublasLtGetVersion());
}

/* Two products of numbers that are `2` each, and what was read after each; run where a setting changes what happens. */
static void two_products(int status[2], float got[2], size_t short_of) {
    enum { N = 32 };
    float twos[N * N];
    for (int i = 0; i < N * N; i++) twos[i] = 2;
    Job j = {F32, F32, 0, 1, N, N, N, 0, 1, 0};
    describe(&j); CALL(look_for, &j);
    ptr a = device(twos, sizeof twos), d = device(twos, sizeof twos), b = device(twos, sizeof twos - short_of);
    for (int i = 0; i < 2; i++) {
        got[i] = -1;
        status[i] = multiply(&j, a, b, 0, d);
        cuMemcpyDtoH_v2(got + i, d, 4);
        j.alpha = 2;
    }
}
static void set_up(void) {
    CALL(cuInit, 0);
    CALL(cublasLtCreate, &lt);
    CALL(cuStreamCreate, &stream, 1);
    work = device(0, WORK);
}
/* A process of its own, since settings are read once and a fault stays. */
static void with(const char *name, const char *value, size_t short_of, int s0, int s1, float g0, float g1) {
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        int status[2]; float got[2];
        setenv(name, value, 1);
        setenv("STAND_IN_QUIET", "1", 1);
        set_up();
        two_products(status, got, short_of);
        EXPECT(status[0] == s0 && status[1] == s1 && got[0] == g0 && got[1] == g1, "%s=%s: %d %d, %g %g", name, value,
               status[0], status[1], got[0], got[1]);
        exit(failures != 0);
    }
    int rc; waitpid(child, &rc, 0);
    EXPECT(rc == 0, "%s=%s failed", name, value);
}
static void check_settings(void) {
    char path[] = "/tmp/cublaslt-log-XXXXXX", text[65536] = {0};
    close(mkstemp(path));
    with("STAND_IN_LOG", path, 0, 0, 0, 128, 256);
    FILE *f = fopen(path, "r");
    fread(text, 1, sizeof text - 1, f); fclose(f); unlink(path);
    EXPECT(strstr(text,
           "\"cublasLt NT m 32 n 32 k 32 f32 -> f32 ld 32 32 32 32 alpha 1 beta 0 workspace 8388608\", \"launches\": 1"), "not in the log");
    EXPECT(strstr(text, "\"cublasLtMatmulAlgoGetHeuristic\": {\"count\": 1,"), "heuristics are not counted");
    with("STAND_IN_EXEC", "trial", 0, 0, 0, 128, 128);
    with("STAND_IN_EXEC", "0", 0, 0, 0, 2, 2);
    with("STAND_IN_FAULT_AT", "2", 0, 0, 0, 128, -1);
    with("STAND_IN_REFUSE_AT", "1", 0, FAILED, 0, 2, 256);
    with("STAND_IN_QUIET", "1", 4, FAILED, FAILED, -1, -1);   /* B runs over the end of its allocation */
}

/* Without cuBLASLt a caller goes another way; so it does where one product is not supported. */
static void check_failures(void) {
    Job j = {BF16, BF16, 1, 0, 64, 32, 128, 0, 1, 0};
    Any none;
    describe(&j);
    setenv("STAND_IN_LT_FAILS", "create", 1);
    REFUSED(cublasLtCreate(&none), 1);
    CALL(look_for, &j);
    setenv("STAND_IN_LT_FAILS", "heuristic", 1);
    REFUSED(look_for(&j), UNSUPPORTED);
    unsetenv("STAND_IN_LT_FAILS");
    CALL(look_for, &j);
}

int main(void) {
    check_settings();
    setenv("STAND_IN_QUIET", "1", 1);
    set_up();
    check_numbers();
    check_e4m3();
    check_order(getenv("STAND_IN_ORDER") && !strcmp(getenv("STAND_IN_ORDER"), "lazy"));
    check_refusals();
    check_failures();
    CALL(cublasLtDestroy, lt);
    return report();
}
