/* A stand-in for libcublasLt.so.13: products of matrices on a stream of the stand-in for libcuda.so.1. See README.md. */
#include "product.h"
#include <stdlib.h>

CUresult cuLaunchKernel(Kernel *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

typedef int Status;
enum {
    SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, CUBLAS_INVALID_VALUE = 7, ARCH_MISMATCH = 8, MAPPING_ERROR = 11,
    EXECUTION_FAILED = 13, INTERNAL_ERROR = 14, CUBLAS_NOT_SUPPORTED = 15, LICENSE_ERROR = 16
};
enum { COMPUTE_32F = 68, COMPUTE_32F_PEDANTIC = 69, FAST_16F = 74, FAST_16BF = 75, FAST_TF32 = 77 };

/* What the opaque pointers point to. A destroyed one is known by its mark, as long as its memory is not used again. */
enum { HANDLE = 0x1a7d1e01, DESC, LAYOUT, PREFERENCE, ALGO, DESTROYED };
typedef struct Handle { u64 pad[2]; u32 mark; } Handle;
typedef struct Desc {
    int compute, scale, pointer_mode, trans_a, trans_b, trans_c, fill, epilogue;
    u32 mark;
    int num_sms;
    u64 scales[2];   /* of A and B */
    signed char fast;   /* sums keep fewer bits: here they keep all */
} Desc;
typedef struct Layout {
    u64 rows, cols;
    s64 ld, stride, plane;
    int type, order, batches;
    u32 mark;
} Layout;
typedef struct Preference {
    u64 workspace, implementations;
    u32 mark, search, reductions, alignment[4];
    float waves;
} Preference;
/* 64 bytes, which a caller may keep and give to a later product of the same kind. */
typedef struct Algo { u32 mark, pad; u64 made_for, workspace; u16 alignment[4]; u64 m, n, k, unused; } Algo;
typedef struct Result { Algo algo; size_t workspace; Status state; float waves; int reserved[4]; } Result;
_Static_assert(sizeof(Algo) == 64 && sizeof(Result) == 96, "as cublasLt.h has them");

static Status refuse(Status status, const char *why) {
    stand_in.say("cublasLt: %s", why);
    return status;
}
#define REFUSE_IF(condition, status, why) do { if (condition) return refuse(status, why); } while (0)
static int is_asked_to_fail(const char *call) {
    const char *which = getenv("STAND_IN_LT_FAILS");
    return which && !strcmp(which, call);
}
#define IS(object, of) ((object) && (object)->mark == (of))
static const char *name_of(int type) { return type == R_32F ? "f32" : type == R_16F ? "f16" : type == R_E4M3 ? "e4m3" : "bf16"; }

/* -- what is refused ------------------------------------------------------------------------------------- */

/* Checks what a product is asked to be, and writes its sizes and steps. */
static Status look_at(const Handle *handle, const Desc *op, const Layout *const l[4], Product *p) {
    REFUSE_IF(!IS(handle, HANDLE), NOT_INITIALIZED, "no handle");
    REFUSE_IF(!IS(op, DESC), CUBLAS_INVALID_VALUE, "no description of a product");
    for (int i = 0; i < 4; i++) REFUSE_IF(!IS(l[i], LAYOUT), CUBLAS_INVALID_VALUE, "no layout");
    const Layout *a = l[0], *b = l[1], *c = l[2], *d = l[3];
    for (int i = 0; i < 4; i++) {
        REFUSE_IF(!l[i]->rows || !l[i]->cols, CUBLAS_INVALID_VALUE, "a matrix without rows or columns");
        REFUSE_IF(l[i]->ld < (s64)l[i]->rows, CUBLAS_INVALID_VALUE, "a leading dimension of less than the rows");
        REFUSE_IF(l[i]->batches < 1 || l[i]->batches != d->batches, CUBLAS_INVALID_VALUE, "unlike numbers of matrices");
        REFUSE_IF(l[i]->order || l[i]->plane || l[i]->stride < 0, CUBLAS_NOT_SUPPORTED, "an order other than by columns");
    }
    REFUSE_IF((u32)op->trans_a > 2 || (u32)op->trans_b > 2, CUBLAS_INVALID_VALUE, "no such operation");
    REFUSE_IF(op->pointer_mode || op->trans_c || op->fill != 2 || op->epilogue != 1, CUBLAS_NOT_SUPPORTED,
              "an epilogue, a transposed C, or scales in device memory");
    REFUSE_IF(d->batches > 1 && d->stride < d->ld * (s64)(d->cols - 1) + (s64)d->rows, CUBLAS_INVALID_VALUE,
              "matrices of D overlap");
    int is_plain = op->compute == COMPUTE_32F || op->compute == COMPUTE_32F_PEDANTIC;
    int is_fast = op->compute == FAST_16F || op->compute == FAST_16BF || op->compute == FAST_TF32;
    int is_e4m3 = a->type == R_E4M3, is_known = a->type == R_32F || a->type == R_16F || a->type == R_16BF || is_e4m3;
    REFUSE_IF(!(is_plain || (is_fast && a->type == R_32F)) || op->scale != R_32F, CUBLAS_NOT_SUPPORTED,
              "a compute or scale type that is not f32, or f32 in fewer bits for matrices that are not f32");
    int is_result = d->type == R_32F || (is_e4m3 ? d->type == R_16BF || d->type == R_16F : d->type == a->type);
    REFUSE_IF(!is_known || b->type != a->type || c->type != d->type || !is_result, CUBLAS_NOT_SUPPORTED,
              "not a combination of types");
    REFUSE_IF((op->scales[0] || op->scales[1]) && !is_e4m3, CUBLAS_NOT_SUPPORTED, "scales of factors that are not e4m3");
    if (is_e4m3) {
        REFUSE_IF(stand_in.cfg->major * 10 + stand_in.cfg->minor < 89 || !op->trans_a || op->trans_b, CUBLAS_NOT_SUPPORTED,
                  "e4m3 before compute capability 8.9, or not of A transposed and B");
        REFUSE_IF(a->rows % 16 || a->cols % 16 || a->ld % 16 || b->ld % 16 || d->ld % 8, CUBLAS_NOT_SUPPORTED,
                  "e4m3 whose rows are no multiples of 16 bytes");
    }
    int is_a_t = op->trans_a != 0, is_b_t = op->trans_b != 0;
    u64 m = is_a_t ? a->cols : a->rows, k = is_a_t ? a->rows : a->cols, n = is_b_t ? b->rows : b->cols;
    REFUSE_IF(k != (is_b_t ? b->cols : b->rows) || m != d->rows || n != d->cols || m != c->rows || n != c->cols,
              CUBLAS_INVALID_VALUE, "sizes that do not fit together");
    *p = (Product){.m = m, .n = n, .k = k, .in = a->type, .out = d->type, .batches = d->batches};
    p->ld_c = c->ld; p->ld_d = d->ld;
    p->row_a = is_a_t ? a->ld : 1; p->k_a = is_a_t ? 1 : a->ld;
    p->col_b = is_b_t ? 1 : b->ld; p->k_b = is_b_t ? b->ld : 1;
    for (int i = 0; i < 4; i++) p->stride[i] = l[i]->stride;
    memcpy(p->scale, op->scales, sizeof p->scale);
    return SUCCESS;
}

/* What an algorithm is made for. */
static u64 kind_of(const Desc *op, const Layout *const l[4]) {
    u64 h = 1469598103934665603ull;
    for (size_t i = 0; i < offsetof(Desc, scales); i++) h = (h ^ ((const u8 *)op)[i]) * 1099511628211ull;
    for (int j = 0; j < 4; j++)
        for (size_t i = 0; i < sizeof *l[j]; i++) h = (h ^ ((const u8 *)l[j])[i]) * 1099511628211ull;
    return h;
}

static u64 extent(const Layout *l) {
    return ((l->cols - 1) * (u64)l->ld + l->rows + (u64)(l->batches - 1) * (u64)l->stride) * bytes_of(l->type);
}

/* Whether two matrices share elements. They may lie between each other's columns, where these have the same distance. */
static int is_shared(u64 x, const Layout *a, u64 y, const Layout *b) {
    if (x >= y + extent(b) || y >= x + extent(a)) return 0;
    u64 step = (u64)a->ld * bytes_of(a->type), wide_a = a->rows * bytes_of(a->type), wide_b = b->rows * bytes_of(b->type);
    if (step != (u64)b->ld * bytes_of(b->type) || a->batches > 1) return 1;
    u64 shift = y >= x ? (y - x) % step : (step - (x - y) % step) % step;
    return shift < wide_a || shift + wide_b > step;
}

/* What a GPU may do slowly, or not alike: kept in the log. */
static void note_alignment(const Product *p, const Layout *const l[4], const u16 *promised) {
    const u64 at[] = {p->a, p->b, p->c, p->d};
    for (int i = 0; i < 4; i++) {
        char text[160];
        u64 ld_bytes = (u64)l[i]->ld * bytes_of(l[i]->type);
        const char *what = at[i] % 16                     ? "a pointer that is not aligned to 16 bytes"
                           : l[i]->cols > 1 && ld_bytes % 16 ? "a leading dimension that is no multiple of 16 bytes"
                           : promised && at[i] % promised[i] ? "a pointer that is not aligned as the preference said"
                                                          : 0;
        if (!what || !at[i]) continue;
        snprintf(text, sizeof text, "cublasLt: %c has %s (m %llu n %llu k %llu)", "ABCD"[i], what, (unsigned long long)p->m,
                 (unsigned long long)p->n, (unsigned long long)p->k);
        stand_in.note(text);
    }
}

static Status look_at_algo(const Algo *algo, const Desc *op, const Layout *const l[4]) {
    REFUSE_IF(!IS(algo, ALGO), CUBLAS_INVALID_VALUE, "an algorithm that no heuristic gave");
    REFUSE_IF(algo->made_for != kind_of(op, l), CUBLAS_INVALID_VALUE, "an algorithm for other layouts");
    return SUCCESS;
}

/* -- API: the product ------------------------------------------------------------------------------------ */

API Status cublasLtMatmul(Handle *handle, Desc *op, const float *alpha, const void *a, Layout *la, const void *b, Layout *lb,
                          const float *beta, const void *c, Layout *lc, void *d, Layout *ld, const Algo *algo, void *work,
                          size_t work_bytes, void *stream) {
    stand_in.count(__func__);
    const Layout *const l[] = {la, lb, lc, ld};
    Product p;
    Status status = look_at(handle, op, l, &p);
    if (status != SUCCESS) return status;
    REFUSE_IF(!alpha || !beta || !a || !b || !d, CUBLAS_INVALID_VALUE, "a null pointer");
    p.alpha = *alpha; p.beta = *beta;
    REFUSE_IF(!c && p.beta != 0, CUBLAS_INVALID_VALUE, "no C, and beta is not 0");
    p.a = (u64)a; p.b = (u64)b; p.c = (u64)c; p.d = (u64)d; p.work = (u64)work; p.work_bytes = work_bytes;
    if (algo && (status = look_at_algo(algo, op, l)) != SUCCESS) return status;
    if (!algo) stand_in.note("cublasLt: a product without an algorithm looks for one at each call");
    REFUSE_IF((work_bytes && !work) || p.work % 256, CUBLAS_INVALID_VALUE, "a workspace that is null, or not aligned to 256");
    REFUSE_IF(algo && work_bytes < algo->workspace, CUBLAS_INVALID_VALUE, "a workspace smaller than the algorithm's");
    const u64 at[] = {p.a, p.b, p.c, p.d};
    for (int i = 0; i < 4; i++) {
        REFUSE_IF(at[i] % bytes_of(l[i]->type), CUBLAS_INVALID_VALUE, "a pointer that is not aligned to its elements");
        REFUSE_IF(algo && at[i] % least(16, algo->alignment[i]), CUBLAS_INVALID_VALUE,
                  "a pointer less aligned than the preference said that the algorithm was made by");
        REFUSE_IF(at[i] && at[i] < p.work + work_bytes && p.work < at[i] + extent(l[i]), CUBLAS_INVALID_VALUE,
                  "a matrix in the workspace");
    }
    int is_in_place = c == d;
    REFUSE_IF(is_in_place && memcmp(lc, ld, sizeof *lc), CUBLAS_INVALID_VALUE, "C is D with another layout");
    REFUSE_IF(is_shared(p.d, ld, p.a, la) || is_shared(p.d, ld, p.b, lb) || (c && !is_in_place && is_shared(p.d, ld, p.c, lc)),
              CUBLAS_INVALID_VALUE, "D overlaps A, B or C");
    note_alignment(&p, l, algo ? algo->alignment : 0);

    char name[512];
    int n = snprintf(name, sizeof name, "cublasLt %c%c m %llu n %llu k %llu %s -> %s ld %lld %lld %lld %lld alpha %g beta %g%s "
                     "workspace %zu", "NTT"[op->trans_a], "NTT"[op->trans_b], (unsigned long long)p.m, (unsigned long long)p.n,
                     (unsigned long long)p.k, name_of(p.in), name_of(p.out), (long long)la->ld, (long long)lb->ld,
                     (long long)lc->ld, (long long)ld->ld, (double)p.alpha, (double)p.beta, is_in_place ? " in place" : "",
                     work_bytes);
    if (p.batches > 1) snprintf(name + n, sizeof name - (size_t)n, " x %d", p.batches);
    for (int i = 0; i < 4; i++)
        if (at[i] && (i != 2 || p.beta != 0)) {
            char what[600];
            snprintf(what, sizeof what, "%c of %s", "ABCD"[i], name);
            if (stand_in.reach(what, at[i], extent(l[i]))) return EXECUTION_FAILED;
        }
    for (int i = 0; i < 2; i++)
        if (p.scale[i] && stand_in.reach("scale of cublasLt", p.scale[i], 4)) return EXECUTION_FAILED;
    if (work_bytes && stand_in.reach("workspace of cublasLt", p.work, work_bytes)) return EXECUTION_FAILED;

    /* As many threads as a kernel of the usual kind would have: 256 for 128 x 128 elements. */
    void *params[] = {&p.a, &p.b, &p.c, &p.d, &p.work, &p.m};
    Kernel *kernel = stand_in.kernel(name, &product_entry, run_product);
    return cuLaunchKernel(kernel, (u32)((p.m + 127) / 128), (u32)((p.n + 127) / 128), (u32)p.batches, 256, 1, 1, 0, stream,
                          params, 0) ? EXECUTION_FAILED : SUCCESS;
}

static void fill(Result *result, const Algo *algo) {
    *result = (Result){.algo = *algo, .workspace = algo->workspace, .state = SUCCESS, .waves = 1};
}
API Status cublasLtMatmulAlgoGetHeuristic(Handle *handle, Desc *op, Layout *a, Layout *b, Layout *c, Layout *d,
                                          Preference *preference, int num_wanted, Result *results, int *num_results) {
    stand_in.count(__func__);
    const Layout *const l[] = {a, b, c, d};
    Product p;
    REFUSE_IF(!num_results || !results || num_wanted < 1 || !IS(preference, PREFERENCE), CUBLAS_INVALID_VALUE,
              "no preference, or nowhere to write");
    *num_results = 0;
    REFUSE_IF(is_asked_to_fail("heuristic"), CUBLAS_NOT_SUPPORTED, "asked for by STAND_IN_LT_FAILS");
    Status status = look_at(handle, op, l, &p);
    if (status != SUCCESS) return status;
    Algo algo = {.mark = ALGO, .made_for = kind_of(op, l), .m = p.m, .n = p.n, .k = p.k};
    algo.workspace = least(preference->workspace & ~255ull, 4 << 20);
    for (int i = 0; i < 4; i++) {
        REFUSE_IF(!preference->alignment[i] || preference->alignment[i] > 32768, CUBLAS_INVALID_VALUE, "no such alignment");
        algo.alignment[i] = (u16)preference->alignment[i];
    }
    fill(results, &algo);
    *num_results = 1;
    return SUCCESS;
}
API Status cublasLtMatmulAlgoCheck(Handle *handle, Desc *op, Layout *a, Layout *b, Layout *c, Layout *d, const Algo *algo,
                                   Result *result) {
    stand_in.count(__func__);
    const Layout *const l[] = {a, b, c, d};
    Product p;
    Status status = look_at(handle, op, l, &p);
    if (status == SUCCESS) status = look_at_algo(algo, op, l);
    REFUSE_IF(!result, CUBLAS_INVALID_VALUE, "nowhere to write");
    if (status == SUCCESS) fill(result, algo);
    return status;
}

/* -- API: handles, descriptions, layouts, preferences ---------------------------------------------------- */

static void *make(size_t size, size_t mark_at, u32 mark) {
    u8 *object = calloc(1, size);
    memcpy(object + mark_at, &mark, sizeof mark);
    return object;
}
#define CREATE(type, mark_) make(sizeof(type), offsetof(type, mark), mark_)
#define DESTROY(object, mark_, status) \
    REFUSE_IF(!IS(object, mark_), status, "destroyed twice, or never made"); \
    *(volatile u32 *)&(object)->mark = DESTROYED;   /* volatile: the compiler drops what is written before free */ \
    free(object); \
    return SUCCESS

API Status cublasLtCreate(Handle **out) {
    stand_in.count(__func__);
    REFUSE_IF(!out, CUBLAS_INVALID_VALUE, "nowhere to write");
    REFUSE_IF(is_asked_to_fail("create"), NOT_INITIALIZED, "asked for by STAND_IN_LT_FAILS");
    *out = CREATE(Handle, HANDLE);
    return SUCCESS;
}
API Status cublasLtDestroy(Handle *handle) { DESTROY(handle, HANDLE, NOT_INITIALIZED); }
API Status cublasLtMatmulDescCreate(Desc **out, int compute, int scale) {
    REFUSE_IF(!out, CUBLAS_INVALID_VALUE, "nowhere to write");
    *out = CREATE(Desc, DESC);
    (*out)->compute = compute; (*out)->scale = scale; (*out)->fill = 2; (*out)->epilogue = 1;
    return SUCCESS;
}
API Status cublasLtMatmulDescDestroy(Desc *op) { DESTROY(op, DESC, CUBLAS_INVALID_VALUE); }
API Status cublasLtMatrixLayoutCreate(Layout **out, int type, u64 rows, u64 cols, s64 ld) {
    REFUSE_IF(!out, CUBLAS_INVALID_VALUE, "nowhere to write");
    *out = CREATE(Layout, LAYOUT);
    (*out)->type = type; (*out)->rows = rows; (*out)->cols = cols; (*out)->ld = ld; (*out)->batches = 1;
    return SUCCESS;
}
API Status cublasLtMatrixLayoutDestroy(Layout *layout) { DESTROY(layout, LAYOUT, CUBLAS_INVALID_VALUE); }
API Status cublasLtMatmulPreferenceCreate(Preference **out) {
    REFUSE_IF(!out, CUBLAS_INVALID_VALUE, "nowhere to write");
    *out = CREATE(Preference, PREFERENCE);
    for (int i = 0; i < 4; i++) (*out)->alignment[i] = 256;
    return SUCCESS;
}
API Status cublasLtMatmulPreferenceDestroy(Preference *preference) { DESTROY(preference, PREFERENCE, CUBLAS_INVALID_VALUE); }

/* Attributes: number, and where it lies. */
typedef struct Attribute { int number; u16 at, size; } Attribute;
#define FIELD(number, type, field) {number, offsetof(type, field), sizeof(((type *)0)->field)}
static const Attribute of_desc[] = {
    FIELD(0, Desc, compute), FIELD(1, Desc, scale), FIELD(2, Desc, pointer_mode), FIELD(3, Desc, trans_a),
    FIELD(4, Desc, trans_b), FIELD(5, Desc, trans_c), FIELD(6, Desc, fill), FIELD(7, Desc, epilogue),
    FIELD(15, Desc, num_sms), FIELD(17, Desc, scales[0]), FIELD(18, Desc, scales[1]),
    FIELD(25, Desc, fast), {-1, 0, 0}};
static const Attribute of_layout[] = {
    FIELD(0, Layout, type), FIELD(1, Layout, order), FIELD(2, Layout, rows), FIELD(3, Layout, cols), FIELD(4, Layout, ld),
    FIELD(5, Layout, batches), FIELD(6, Layout, stride), FIELD(7, Layout, plane), {-1, 0, 0}};
static const Attribute of_preference[] = {
    FIELD(0, Preference, search), FIELD(1, Preference, workspace), FIELD(3, Preference, reductions),
    FIELD(5, Preference, alignment[0]), FIELD(6, Preference, alignment[1]), FIELD(7, Preference, alignment[2]),
    FIELD(8, Preference, alignment[3]), FIELD(9, Preference, waves), FIELD(12, Preference, implementations), {-1, 0, 0}};

static const Attribute *attribute(const Attribute *of, int number) {
    while (of->number >= 0 && of->number != number) of++;
    if (of->number < 0) stand_in.say("cublasLt: the stand-in does not know attribute %d", number);
    return of->number < 0 ? 0 : of;
}
static Status set(void *object, const Attribute *of, int number, const void *from, size_t bytes) {
    const Attribute *a = attribute(of, number);
    if (!a) return CUBLAS_NOT_SUPPORTED;
    REFUSE_IF(!from || bytes != a->size, CUBLAS_INVALID_VALUE, "an attribute of another size");
    memcpy((u8 *)object + a->at, from, bytes);
    return SUCCESS;
}
static Status get(const void *object, const Attribute *of, int number, void *to, size_t bytes, size_t *written) {
    const Attribute *a = attribute(of, number);
    if (!a) return CUBLAS_NOT_SUPPORTED;
    REFUSE_IF(bytes ? !to || bytes != a->size : !written, CUBLAS_INVALID_VALUE, "an attribute of another size");
    if (bytes) memcpy(to, (const u8 *)object + a->at, bytes);
    if (written) *written = a->size;
    return SUCCESS;
}
#define ATTRIBUTES(name, type, mark_, of) \
    API Status name##SetAttribute(type *object, int number, const void *from, size_t bytes) { \
        REFUSE_IF(!IS(object, mark_), CUBLAS_INVALID_VALUE, "an attribute of nothing"); \
        return set(object, of, number, from, bytes); \
    } \
    API Status name##GetAttribute(type *object, int number, void *to, size_t bytes, size_t *written) { \
        REFUSE_IF(!IS(object, mark_), CUBLAS_INVALID_VALUE, "an attribute of nothing"); \
        return get(object, of, number, to, bytes, written); \
    }
ATTRIBUTES(cublasLtMatmulDesc, Desc, DESC, of_desc)
ATTRIBUTES(cublasLtMatrixLayout, Layout, LAYOUT, of_layout)
ATTRIBUTES(cublasLtMatmulPreference, Preference, PREFERENCE, of_preference)

/* -- API: version and words ------------------------------------------------------------------------------ */

API size_t cublasLtGetVersion(void) { return 130002; }
API size_t cublasLtGetCudartVersion(void) { return 13000; }
API Status cublasLtGetProperty(int which, int *value) {
    static const int version[] = {13, 0, 2};
    REFUSE_IF(!value || which < 0 || which > 2, CUBLAS_INVALID_VALUE, "no such property");
    *value = version[which];
    return SUCCESS;
}
static const struct { Status code; const char *name, *text; } statuses[] = {
    {SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
    {NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED", "not initialised"},
    {ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED", "no memory"},
    {CUBLAS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE", "an invalid value"},
    {ARCH_MISMATCH, "CUBLAS_STATUS_ARCH_MISMATCH", "not on this GPU"},
    {MAPPING_ERROR, "CUBLAS_STATUS_MAPPING_ERROR", "memory could not be mapped"},
    {EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED", "the GPU could not run it"},
    {INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR", "an internal error"},
    {CUBLAS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED", "not supported"},
    {LICENSE_ERROR, "CUBLAS_STATUS_LICENSE_ERROR", "no license"},
};
API const char *cublasLtGetStatusName(Status code) {
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) if (statuses[i].code == code) return statuses[i].name;
    return "unknown status";
}
API const char *cublasLtGetStatusString(Status code) {
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) if (statuses[i].code == code) return statuses[i].text;
    return "unknown status";
}
