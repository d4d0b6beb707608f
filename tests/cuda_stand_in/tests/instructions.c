#include "check.h"
#include <fenv.h>
typedef unsigned u32;
typedef unsigned short u16;
static float in[128];
static u32 out[20 * 64], atomics[16];
static u32 bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static float number(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static float half(u16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
static u16 to_half(float f) { _Float16 h = (_Float16)f; u16 x; memcpy(&x, &h, 2); return x; }
static float brain(u16 x) { return number((u32)x << 16); }
static u16 to_brain(float f) { u32 x = bits(f); return (u16)((x + 0x7fff + (x >> 16 & 1)) >> 16); }
#define ROUNDED(way, e) (fesetround(way), v = (e), fesetround(FE_TONEAREST), bits(v))

int main(void) {
    void *m = load("instructions.ptx");
    for (int i = 0; i < 128; i++) in[i] = (float)((i * 37 + 11) % 61 - 30) / 7.3f;
    atomics[8] = atomics[9] = 0xfbfffbff;   /* the least halves */
    ptr a = device(in, sizeof in), b = device(0, sizeof out), c = device(atomics, sizeof atomics);
    int n = 1;
    launch(kernel(m, "instructions"), 1, 64, 0, (void *[]){&a, &b, &c, &n});
    CALL(cuMemcpyDtoH_v2, out, b, sizeof out);
    CALL(cuMemcpyDtoH_v2, atomics, c, sizeof atomics);
    u32 positive = 0;
    float sum = 0, most = -1e9f;
    for (int i = 0; i < 64; i++) { positive += in[i] > 0; sum += in[i]; most = fmaxf(most, in[i]); }
    for (int i = 0; i < 64; i++) {
        volatile float f = in[i], g = in[i + 64], v;
        float lo = half(to_half(f)), hi = half(to_half(g)), blo = brain(to_brain(f)), bhi = brain(to_brain(g));
        float hl = half(to_half(fmaf(lo, lo, half(to_half(exp2f(lo)))))), hh = half(to_half(fmaf(hi, hi, half(to_half(exp2f(hi))))));
        float bl = brain(to_brain(fmaf(blo, blo, blo))), bh = brain(to_brain(fmaf(bhi, bhi, bhi)));
        if (bl < bhi) bl = bhi;
        if (bh < bhi) bh = bhi;
        int odd = (1 << 24) * (i % 2 ? -1 : 1) + 2 * i + 1;
        u32 want[20] = {i % 32 == 5, positive * 4 + 2, 77, 0x421, ROUNDED(FE_DOWNWARD, f + g), ROUNDED(FE_UPWARD, f + g), ROUNDED(FE_TOWARDZERO, f * g),
                        ROUNDED(FE_DOWNWARD, fmaf(f, g, f)), ROUNDED(FE_TOWARDZERO, f - g), bits(expf(f)), bits(sinf(1000 * f)), bits(tanhf(f)),
                        to_half(tanhf(lo)) | (u32)to_half(tanhf(hi)) << 16, to_half(hl) | (u32)to_half(hh) << 16, to_brain(bl) | (u32)to_brain(bh) << 16,
                        (hl > hh) + 2 * (bl < bh) + 4, 1, ROUNDED(FE_DOWNWARD, odd), ROUNDED(FE_UPWARD, odd), ROUNDED(FE_TOWARDZERO, odd)};
        for (int t = 0; t < 20; t++) {
            u32 got = out[t * 64 + i];
            int is_near = t >= 9 && t <= 11 ? fabsf(number(got) - number(want[t])) <= 2e-7f + 3e-7f * fabsf(number(want[t])) : got == want[t];
            EXPECT(is_near, "instruction %d thread %d: %x, expected %x (of %g and %g)", t, i, got, want[t], f, g);
        }
    }
    u32 counted[] = {0x42004280, 0, bits(sum), bits(64), 0x42004280, 0x42004280, 0x42004280, 0x42004280, 0x10001u * to_half(most), 0x10001u * to_half(most), to_half(64),
                     (u32)-63, 4, 64};
    for (int i = 0; i < 14; i++) EXPECT(atomics[i] == counted[i] || (i == 2 && fabsf(number(atomics[2]) - sum) < 1e-4f), "atomic %d: %x, expected %x", i, atomics[i], counted[i]);
    launch(kernel(m, "scopes"), 1, 32, 0, (void *[]){&b});
    CALL(cuMemcpyDtoH_v2, out, b, 128ul);
    for (u32 i = 0; i < 32; i++) {
        u32 x = i;
        for (int j = 0; j < 2; j++) x = x + 1 < 10 ? 10 : x + 1;
        unsigned long long y = x;
        do y <<= 3; while (y < 1ull << 35);
        EXPECT(out[i] == (u32)(y >> 4), "scopes %u: %x", i, out[i]);
    }
    return report();
}
