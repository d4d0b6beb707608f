// What NVRTC's kernels use beside sums and products, one of each.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// out: 64 words a test, one for each thread.
extern "C" __global__ void __launch_bounds__(64) instructions(const float *__restrict__ in, unsigned *__restrict__ out, unsigned *atomics, int n) {
    __shared__ unsigned word;
    unsigned i = threadIdx.x, *o = out + i, x, y;
    float f = in[i], g = in[i + 64];

    // One thread of those that are here.
    unsigned is_elected = 0;
    if (i % 32 > 4)
        asm volatile("{.reg .pred %%px;\n .reg .b32 %mask;\n activemask.b32 %mask;\n elect.sync _|%%px, %mask;\n selp.b32 %0, 1, 0, %%px;\n}" : "=r"(is_elected));
    o[0 * 64] = is_elected;
    asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;\n fence.proxy.async;\n fence.acq_rel.cluster;" ::: "memory");

    // Barriers that reduce; one at which the first warp only arrives.
    o[1 * 64] = __syncthreads_count(f > 0) * 4 + (__syncthreads_and(i < 64) != 0) * 2 + (__syncthreads_or(i == 70) != 0);
    if (i == 0) word = 77;
    if (i < 32) asm volatile("barrier.cta.arrive 3, 64;" ::: "memory");
    else asm volatile("barrier.cta.sync 3, 64;" ::: "memory");
    o[2 * 64] = i < 32 ? 77 : word;

    // Where an address lies.
    unsigned local[4] = {i, 1, 2, 3};
    unsigned *places[3] = {&word, local + (n & 3), out};
    unsigned spaces = 0;
    for (int p = 0; p < 3; p++) spaces |= (__isShared(places[p]) | __isLocal(places[p]) << 1 | __isGlobal(places[p]) << 2) << 4 * p;
    o[3 * 64] = spaces;

    // Rounding.
    o[4 * 64] = __float_as_uint(__fadd_rd(f, g)); o[5 * 64] = __float_as_uint(__fadd_ru(f, g)); o[6 * 64] = __float_as_uint(__fmul_rz(f, g));
    o[7 * 64] = __float_as_uint(__fmaf_rd(f, g, f)); o[8 * 64] = __float_as_uint(__fsub_rz(f, g)); o[9 * 64] = __float_as_uint(expf(f));
    o[10 * 64] = __float_as_uint(sinf(1000 * f));

    asm("tanh.approx.f32 %0, %1;" : "=r"(x) : "r"(__float_as_uint(f)));
    o[11 * 64] = x;
    __half2 h = __floats2half2_rn(f, g);
    asm("tanh.approx.f16x2 %0, %1;" : "=r"(x) : "r"(*(unsigned *)&h));
    o[12 * 64] = x;
    h = __hfma2(h, h, h2exp2(h)); o[13 * 64] = *(unsigned *)&h;
    __nv_bfloat162 b = __floats2bfloat162_rn(f, g);
    b = __hmax2(__hfma2(b, b, b), __float2bfloat162_rn(g)); o[14 * 64] = *(unsigned *)&b;
    o[15 * 64] = __hgt(__low2half(h), __high2half(h)) + 2 * __hlt(__low2bfloat16(b), __high2bfloat16(b)) + 4 * __hbeq2(b, b);

    // Atomics, packed ones too; the old value of the last one is kept.
    b = __floats2bfloat162_rn(1, (float)(i % 2));
    unsigned ones = *(unsigned *)&b;
    asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(atomics), "r"(ones) : "memory");
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(atomics + 2), "f"(f), "f"(1.0f) : "memory");
    asm volatile("atom.relaxed.add.noftz.v4.bf16x2 {%0, %1, _, _}, [%2], {%3, %3, %3, %3};" : "=r"(x), "=r"(y) : "l"(atomics + 4), "r"(ones) : "memory");
    asm volatile("red.relaxed.gpu.global.max.noftz.v4.f16 [%0], {%1, %1, %1, %1};" ::"l"(atomics + 8), "h"(__half_as_ushort(__float2half(f))) : "memory");
    atomicAdd((__half *)(atomics + 10), __float2half(1.0f));
    atomicMin((int *)(atomics + 11), -(int)i);
    atomicInc(atomics + 12, 9);
    atomicCAS(atomics + 13, i, i + 1);
    o[16 * 64] = x == y;

    // An integer that is no float.
    int odd = (1 << 24) * (i % 2 ? -1 : 1) + 2 * (int)i + 1;
    o[17 * 64] = __float_as_uint(__int2float_rd(odd)); o[18 * 64] = __float_as_uint(__int2float_ru(odd)); o[19 * 64] = __float_as_uint(__int2float_rz(odd));
}

// The same loops and names in two blocks of braces, as inline assembly that was expanded twice has them.
extern "C" __global__ void scopes(unsigned *out) {
    unsigned a = threadIdx.x, b;
    for (int i = 0; i < 2; i++) {
        asm volatile("{\n.reg .pred p;\n.reg .b32 v;\nmov.b32 v, %0;\nLOOP:\nadd.u32 v, v, 1;\nsetp.lt.u32 p, v, 10;\n@p bra LOOP;\nmov.b32 %0, v;\n}" : "+r"(a));
        asm volatile("{\n.reg .pred q;\n.reg .b64 v;\ncvt.u64.u32 v, %1;\nLOOP:\nshl.b64 v, v, 3;\nsetp.lt.u64 q, v, 34359738368;\n@q bra LOOP;\nshr.b64 v, v, 4;\ncvt.u32.u64 %0, v;\n}" : "=r"(b) : "r"(a));
    }
    out[threadIdx.x] = b;
}
