// Asynchronous copies and their barriers, written as CubeCL writes them. 64 threads a block.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cuda/barrier>

using Barrier = cuda::barrier<cuda::thread_scope_block>;

__device__ unsigned shared_address(const void *p) { return __cvta_generic_to_shared(p); }

// out[i] = 2 * in[i] in tiles of 256, copied in turn by the block, by each thread and in bulk.
extern "C" __global__ void __launch_bounds__(64) barriers(const float *__restrict__ in, float *__restrict__ out, int tiles) {
    extern __shared__ __align__(128) unsigned char dyn[];
    auto *bar = reinterpret_cast<Barrier *>(dyn);
    float *tile = reinterpret_cast<float *>(dyn + 128);
    if (threadIdx.x == 0) {
        init(bar, 64);
        cuda::device::experimental::fence_proxy_async_shared_cta();
    }
    __syncthreads();
    for (int i = 0; i < tiles; i++) {
        const float *from = in + i * 256;
        if (i % 4 == 0) {
            cuda::memcpy_async(cooperative_groups::this_thread_block(), tile, from, 1024, *bar);
            bar->arrive_and_wait();
        } else if (i % 4 == 1) {
            cuda::memcpy_async(tile + 4 * threadIdx.x, from + 4 * threadIdx.x, 16, *bar);
            bar->wait(bar->arrive());
        } else if (i % 4 == 2) {
            if (threadIdx.x == 0) cuda::device::memcpy_async_tx(tile, from, cuda::aligned_size_t<16>(1024), *bar);
            auto token = cuda::device::barrier_arrive_tx(*bar, 1, threadIdx.x == 0 ? 1024 : 0);
            bar->wait_parity(i % 2);
        } else {
            asm volatile("cp.async.cg.shared::cta.global [%0], [%1], 16, 16;" ::"r"(shared_address(tile + 4 * threadIdx.x)), "l"(from + 4 * threadIdx.x));
            asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(cuda::device::barrier_native_handle(*bar))));
            auto token = bar->arrive();
            bar->wait_parity(i % 2);
        }
        for (int j = 0; j < 4; j++) out[i * 256 + j * 64 + threadIdx.x] = 2 * tile[j * 64 + threadIdx.x];
        __syncthreads();
    }
}

// The same, two tiles in flight; of the last tile only `last` elements are read. With `is_waiting` 0 nobody waits for what comes.
extern "C" __global__ void __launch_bounds__(64) groups(const float *__restrict__ in, float *__restrict__ out, int tiles, int last, int is_waiting) {
    __shared__ __align__(16) float stage[2][256];
    auto start = [&](int i) {
        if (i < tiles) {
            int left = i + 1 < tiles ? 4 : last - 4 * int(threadIdx.x), bytes = 4 * min(4, max(0, left));
            asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(&stage[i % 2][4 * threadIdx.x])), "l"(in + i * 256 + 4 * threadIdx.x), "r"(bytes));
        }
        asm volatile("cp.async.commit_group;");
    };
    start(0);
    for (int i = 0; i < tiles; i++) {
        start(i + 1);
        if (is_waiting) asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        for (int j = 0; j < 4; j++) out[i * 256 + j * 64 + threadIdx.x] = 2 * stage[i % 2][j * 64 + threadIdx.x];
        __syncthreads();
    }
}

// out = 2 * in and total += in, by bulk stores out of shared memory.
extern "C" __global__ void __launch_bounds__(64) stores(const float *__restrict__ in, float *__restrict__ out, float *__restrict__ total) {
    __shared__ __align__(16) float row[64];
    float x = in[blockIdx.x * 64 + threadIdx.x];
    row[threadIdx.x] = x;
    cuda::device::experimental::fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 256;" ::"l"(total), "r"(shared_address(row)) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    __syncthreads();
    row[threadIdx.x] = 2 * x;
    cuda::device::experimental::fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(out + blockIdx.x * 64), "r"(shared_address(row)) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// A producer warp fills a ring of two stages, a consumer warp empties it: full and empty barriers, waited for by parity.
extern "C" __global__ void __launch_bounds__(64) ring(const float *__restrict__ in, float *__restrict__ out, int tiles) {
    __shared__ __align__(128) float stage[2][64];
    __shared__ __align__(8) unsigned long long full[2], empty[2];
    auto arrive = [](unsigned long long *bar) { asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory"); };
    auto wait = [](unsigned long long *bar, int parity) {
        asm volatile("{\n.reg .pred P1;\nLAB_WAIT:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%0], %1, 0x989680;\n@P1 bra DONE;\nbra LAB_WAIT;\nDONE:\n}"
                     ::"r"(shared_address(bar)), "r"(parity) : "memory");
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(shared_address(&empty[s])));
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (threadIdx.x == 32) {
        for (int i = 0; i < tiles; i++) {
            int s = i % 2;
            wait(&empty[s], (i / 2 + 1) % 2);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(shared_address(&full[s])) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(shared_address(stage[s])), "l"(in + i * 64), "r"(shared_address(&full[s])) : "memory");
        }
    } else if (threadIdx.x < 32) {
        for (int i = 0; i < tiles; i++) {
            int s = i % 2;
            wait(&full[s], i / 2 % 2);
            out[i * 64 + threadIdx.x] = 2 * stage[s][threadIdx.x];
            out[i * 64 + 32 + threadIdx.x] = 2 * stage[s][32 + threadIdx.x];
            arrive(&empty[s]);
        }
    }
}

// Clusters of 4: out[block] = the sum over the cluster's blocks of what each got, read from their shared memory; the load is a multicast
// by rank 0 to ranks 0 and 2, the others fill theirs.
extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(32) cluster(const float *__restrict__ in, float *__restrict__ out) {
    __shared__ __align__(128) float row[32];
    __shared__ __align__(8) unsigned long long bar;
    auto group = cooperative_groups::this_cluster();
    unsigned rank = group.block_rank();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&bar)));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    group.sync();
    if (rank % 2 == 0) {
        if (threadIdx.x == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(shared_address(&bar)) : "memory");
        if (rank == 0 && threadIdx.x == 0)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 128, [%2], %3;"
                         ::"r"(shared_address(row)), "l"(in + blockIdx.x * 32), "r"(shared_address(&bar)), "h"((short)5) : "memory");
        int is_done = 0;
        while (!is_done)
            asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is_done) : "r"(shared_address(&bar)) : "memory");
    } else {
        row[threadIdx.x] = 1000.0f * rank;
    }
    group.sync();
    float sum = 0;
    for (unsigned r = 0; r < 4; r++) sum += *group.map_shared_rank(&row[threadIdx.x], r);
    group.sync();
    out[blockIdx.x * 32 + threadIdx.x] = sum;
}

// What a block knows of its place, in clusters that the launch asks for.
extern "C" __global__ void places(uint4 *out) {
    auto group = cooperative_groups::this_cluster();
    unsigned x;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(x));
    out[blockIdx.y * gridDim.x + blockIdx.x] = make_uint4(group.block_rank(), group.num_blocks(), group.block_index().y, x);
}
