// Copies of boxes by tensor maps, written as CubeCL writes them.
#include <cuda/barrier>

typedef struct CUtensorMap_st { alignas(128) unsigned long long opaque[16]; } CUtensorMap;
using Barrier = cuda::barrier<cuda::thread_scope_block>;
namespace tma = cuda::device::experimental;
struct At { int c[5]; int offset[3]; };

// Loads a box of `bytes` and shows shared memory as it is; then stores it as another tensor's box, or adds it there.
extern "C" __global__ void __launch_bounds__(32) boxes(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, unsigned char *shown,
                                                       const At at, int rank, int is_im2col, int bytes, int store) {
    extern __shared__ __align__(1024) unsigned char dyn[];
    __shared__ Barrier bar;
    if (threadIdx.x == 0) {
        init(&bar, 32);
        tma::fence_proxy_async_shared_cta();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const int *c = at.c;
        if (is_im2col) {
            unsigned to_shared = __cvta_generic_to_shared(dyn), handle = __cvta_generic_to_shared(cuda::device::barrier_native_handle(bar));
            asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};"
                         ::"r"(to_shared), "l"(&from), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(handle), "h"((short)at.offset[0]), "h"((short)at.offset[1]) : "memory");
        } else if (rank == 1) tma::cp_async_bulk_tensor_1d_global_to_shared(dyn, &from, c[0], bar);
        else if (rank == 2) tma::cp_async_bulk_tensor_2d_global_to_shared(dyn, &from, c[0], c[1], bar);
        else if (rank == 3) tma::cp_async_bulk_tensor_3d_global_to_shared(dyn, &from, c[0], c[1], c[2], bar);
        else if (rank == 4) tma::cp_async_bulk_tensor_4d_global_to_shared(dyn, &from, c[0], c[1], c[2], c[3], bar);
        else tma::cp_async_bulk_tensor_5d_global_to_shared(dyn, &from, c[0], c[1], c[2], c[3], c[4], bar);
    }
    auto token = cuda::device::barrier_arrive_tx(bar, 1, threadIdx.x == 0 ? bytes : 0);
    bar.wait(std::move(token));
    for (int i = threadIdx.x; i < bytes; i += 32) shown[i] = dyn[i];
    if (threadIdx.x == 0 && store) {
        const int *c = at.c;
        if (store == 2) asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                                     ::"l"(&to), "r"(c[0]), "r"(c[1]), "r"((unsigned)__cvta_generic_to_shared(dyn)) : "memory");
        else if (rank == 2) tma::cp_async_bulk_tensor_2d_shared_to_global(&to, c[0], c[1], dyn);
        else tma::cp_async_bulk_tensor_3d_shared_to_global(&to, c[0], c[1], c[2], dyn);
        tma::cp_async_bulk_commit_group();
        tma::cp_async_bulk_wait_group_read<0>();
    }
}
