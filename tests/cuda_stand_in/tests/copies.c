#include "check.h"
enum { TILES = 9, N = TILES * 256 };

static void expect_doubled(const char *name, ptr out, const float *in, int n, int last) {
    float got[N];
    CALL(cuMemcpyDtoH_v2, got, out, n * 4ul);
    for (int i = 0; i < n; i++) EXPECT(got[i] == (i < last ? 2 * in[i] : 0), "%s %d: %g, expected %g", name, i, got[i], i < last ? 2 * in[i] : 0);
}

int main(void) {
    void *m = load("copies.ptx");
    float in[N], got[N], zeros[64] = {0};
    for (int i = 0; i < N; i++) in[i] = (float)((i * 37 + 11) % 1009);
    ptr a = device(in, sizeof in), b = device(0, sizeof in);
    int tiles = TILES, last = 101, is_waiting = 1;
    launch(kernel(m, "barriers"), 1, 64, 2048, (void *[]){&a, &b, &tiles});
    expect_doubled("barriers", b, in, N, N);

    CALL(cuMemFree_v2, b); b = device(0, sizeof in);
    launch(kernel(m, "groups"), 1, 64, 0, (void *[]){&a, &b, &tiles, &last, &is_waiting});
    expect_doubled("groups", b, in, N, N - 256 + last);
    /* Without a wait the copies come too late, if they come as late as they may. */
    is_waiting = 0;
    launch(kernel(m, "groups"), 1, 64, 0, (void *[]){&a, &b, &tiles, &last, &is_waiting});
    CALL(cuMemcpyDtoH_v2, got, b, sizeof got);
    const char *order = getenv("STAND_IN_ORDER");
    int is_lazy = order && !strcmp(order, "lazy");
    EXPECT((got[0] == 2 * in[0]) != is_lazy, "missing wait: %g, where in[0] is %g", got[0], in[0]);

    CALL(cuMemFree_v2, b); b = device(0, sizeof in);
    ptr total = device(zeros, sizeof zeros);
    launch(kernel(m, "stores"), N / 64, 64, 0, (void *[]){&a, &b, &total});
    expect_doubled("stores", b, in, N, N);
    CALL(cuMemcpyDtoH_v2, got, total, sizeof zeros);
    for (int i = 0; i < 64; i++) {
        float sum = 0;
        for (int j = i; j < N; j += 64) sum += in[j];
        EXPECT(got[i] == sum, "reduce %d: %g, expected %g", i, got[i], sum);
    }

    CALL(cuMemFree_v2, b); b = device(0, sizeof in);
    tiles = N / 64;
    launch(kernel(m, "ring"), 1, 64, 0, (void *[]){&a, &b, &tiles});
    expect_doubled("ring", b, in, N, N);

    launch(kernel(m, "cluster"), 8, 32, 0, (void *[]){&a, &b});
    CALL(cuMemcpyDtoH_v2, got, b, 8 * 128ul);
    for (int i = 0; i < 256; i++) {
        float want = 2 * in[i / 128 * 128 + i % 32] + 4000;
        EXPECT(got[i] == want, "cluster %d: %g, expected %g", i, got[i], want);
    }
    EXPECT(cuLaunchKernel(kernel(m, "cluster"), 6, 1, 1, 32, 1, 1, 0, (void *)0, (void *[]){&a, &b}, (void *)0) == 1, "a grid of no whole clusters");

    struct { int id, pad; unsigned cluster[16]; } attribute = {4, 0, {2, 2, 1}};
    struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; } config = {{6, 4, 1}, {1, 1, 1}, 0, 0, &attribute, 1};
    unsigned place[24][4];
    CALL(cuLaunchKernelEx, &config, kernel(m, "places"), (void *[]){&b}, (void *)0);
    CALL(cuMemcpyDtoH_v2, place, b, sizeof place);
    for (unsigned i = 0; i < 24; i++) {
        unsigned x = i % 6, y = i / 6, *p = place[i];
        EXPECT(p[0] == y % 2 * 2 + x % 2 && p[1] == 4 && p[2] == y % 2 && p[3] == x / 2, "place %u: %u %u %u %u", i, p[0], p[1], p[2], p[3]);
    }
    return report();
}
