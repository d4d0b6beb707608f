// wgmma and bulk copies with one thing wrong, by `wrong`; 0 and 1: with nothing.
#define WGMMA()                                                                                                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"                              \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(descriptor), "l"(descriptor) : "memory")

// out[128][4] = 1 + 2 A B and a sum of it, of ones: 64 x 16 and 16 x 8, in blocks of 8 x 8.
extern "C" __global__ void __launch_bounds__(128) late(float *out, int wrong) {
    __shared__ __align__(128) unsigned short ones[1024];
    const unsigned at = (unsigned)__cvta_generic_to_shared(ones);
    const unsigned long long descriptor = (at & 0x3ffff) >> 4 | 64ull << 16 | 8ull << 32;   // 1,024 and 128 bytes apart
    for (int i = threadIdx.x; i < 1024; i += 128) ones[i] = 0x3f80;
    if (wrong != 1 && wrong != 2) asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    if (wrong == 1 && threadIdx.x == 0) asm volatile("fence.proxy.async;" ::: "memory");   // by one thread, for all
    __syncthreads();
    float d[4] = {1, 1, 1, 1};
    if (wrong != 3) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    WGMMA();
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    WGMMA();
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (wrong == 4) ones[threadIdx.x] = 0;
    if (wrong == 5) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    else if (wrong != 6) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[i]) :: "memory");
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = d[i];
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128) store(float *out, int wrong) {
    __shared__ __align__(128) float numbers[512];
    for (int i = threadIdx.x; i < 512; i += 128) numbers[i] = 33;
    if (!wrong) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x) return;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 2048;\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;"
                 ::"l"(out), "r"((unsigned)__cvta_generic_to_shared(numbers)) : "memory");
}
