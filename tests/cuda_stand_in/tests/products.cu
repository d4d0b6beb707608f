// Tensor cores: mma.sync of every type that CubeK uses, ldmatrix and stmatrix, wgmma by descriptors.
// mma.sync takes its fragments from memory, by lane: 4 words of A, 2 of B, 4 of sums.
#define WORDS const unsigned *w = in + threadIdx.x * 10
#define SUMS(n) for (int i = 0; i < n; i++) out[threadIdx.x * 4 + i] = c[i]
#define MMA_4_2_4(name, opcode) \
    extern "C" __global__ void name(const unsigned *in, unsigned *out) { \
        WORDS; unsigned c[4] = {w[6], w[7], w[8], w[9]}; \
        asm volatile("mma.sync.aligned." opcode " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(w[4]), "r"(w[5])); \
        SUMS(4); }
#define MMA_2_1_4(name, opcode) \
    extern "C" __global__ void name(const unsigned *in, unsigned *out) { \
        WORDS; unsigned c[4] = {w[6], w[7], w[8], w[9]}; \
        asm volatile("mma.sync.aligned." opcode " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(w[0]), "r"(w[1]), "r"(w[4])); \
        SUMS(4); }
#define MMA_4_2_2(name, opcode) \
    extern "C" __global__ void name(const unsigned *in, unsigned *out) { \
        WORDS; unsigned c[2] = {w[6], w[7]}; \
        asm volatile("mma.sync.aligned." opcode " {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};" \
                     : "+r"(c[0]), "+r"(c[1]) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(w[4]), "r"(w[5])); \
        SUMS(2); }
MMA_4_2_4(bf16_16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_2_1_4(bf16_8, "m16n8k8.row.col.f32.bf16.bf16.f32")
MMA_4_2_4(f16_16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA_4_2_2(f16_f16, "m16n8k16.row.col.f16.f16.f16.f16")
MMA_4_2_4(tf32_8, "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_2_1_4(tf32_4, "m16n8k4.row.col.f32.tf32.tf32.f32")
MMA_4_2_4(s8_32, "m16n8k32.row.col.s32.s8.s8.s32")
MMA_4_2_4(s8_u8, "m16n8k32.row.col.s32.s8.u8.s32")
MMA_2_1_4(u8_16, "m16n8k16.row.col.s32.u8.u8.s32")
MMA_4_2_4(e4m3, "m16n8k32.row.col.f32.e4m3.e5m2.f32")

// Four matrices of 8 x 8 halves through shared memory: rows in, columns out.
extern "C" __global__ void matrices(const unsigned *in, unsigned *out) {
    __shared__ __align__(16) unsigned rows[128];
    unsigned x[4], at = (unsigned)__cvta_generic_to_shared(rows + threadIdx.x * 4);
    for (int i = 0; i < 4; i++) x[i] = in[i * 32 + threadIdx.x];
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    __syncwarp();
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
    for (int i = 0; i < 4; i++) out[i * 32 + threadIdx.x] = x[i];
}

__device__ unsigned long long descriptor(const void *p, unsigned leading, unsigned stride, unsigned long long swizzle) {
    unsigned a = (unsigned)__cvta_generic_to_shared(p);
    return (a & 0x3ffff) >> 4 | (unsigned long long)(leading >> 4) << 16 | (unsigned long long)(stride >> 4) << 32 | swizzle << 62;
}

// D[64, 32] = 1 + A[64, 64] B[64, 32] in steps of 16. Shared memory is given as it shall be: A, then 8,192 bytes on B.
template <int SWIZZLE, int A_IS_T, int B_IS_T>
__device__ void warpgroup(const uint4 *in, float *out, unsigned step_a, unsigned step_b, uint4 strides, int from_registers) {
    __shared__ __align__(1024) uint4 shared[1024];
    for (int i = threadIdx.x; i < 1024; i += 128) shared[i] = in[i];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    float d[16];
    for (int i = 0; i < 16; i++) d[i] = 1;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
    for (int k = 0; k < 4; k++) {
        unsigned long long a = descriptor((char *)shared + k * step_a, strides.x, strides.y, SWIZZLE), b = descriptor((char *)shared + 8192 + k * step_b, strides.z, strides.w, SWIZZLE);
#define D "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define DREGS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        if (!from_registers)
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " D ", %16, %17, p, 1, 1, %19, %20;\n}"
                         : DREGS : "l"(a), "l"(b), "r"(1), "n"(A_IS_T), "n"(B_IS_T));
        else {
            unsigned w[4];   // rows of 128 bytes, permuted
            for (int r = 0; r < 4; r++) {
                unsigned row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * (r & 1), byte = row * 128 + k * 32 + threadIdx.x % 4 * 4 + 16 * (r >> 1);
                w[r] = *(unsigned *)((char *)shared + (byte ^ (byte >> 7 & 7) << 4));
            }
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " D ", {%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}"
                         : DREGS : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(b), "r"(1), "n"(B_IS_T));
        }
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int j = 0; j < 4; j++)
        for (int r = 0; r < 4; r++) {
            int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * (r >> 1), column = 8 * j + threadIdx.x % 4 * 2 + (r & 1);
            out[row * 32 + column] = d[4 * j + r];
        }
}
#define WGMMA(name, SWIZZLE, A_IS_T, B_IS_T) \
    extern "C" __global__ void __launch_bounds__(128) name(const uint4 *in, float *out, unsigned step_a, unsigned step_b, uint4 strides, int from_registers) { \
        warpgroup<SWIZZLE, A_IS_T, B_IS_T>(in, out, step_a, step_b, strides, from_registers); }
WGMMA(wgmma_plain, 0, 0, 0)
WGMMA(wgmma_128, 1, 0, 0)
WGMMA(wgmma_128_t, 1, 1, 1)
