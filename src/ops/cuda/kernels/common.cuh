// What the kernels share: numbers of 16 bits, and the instructions of sm_80 for matrices and asynchronous copies, or what sm_75 has
// in their place. Includes nothing, so that NVRTC needs no headers.
#pragma once

#define INLINE __device__ __forceinline__

// The bits of a bf16; of an f16 where the build says so.
typedef unsigned short Half;

enum { WARP = 32 };
#define INFINITY __int_as_float(0x7f800000)

#ifdef IS_F16
#define MMA_TYPES "f32.f16.f16.f32"

INLINE float low_half(unsigned pair) {
    float x;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(x) : "r"(pair));
    return x;
}

INLINE float high_half(unsigned pair) { return low_half(pair >> 16); }

// Both rounded to nearest even; `low` comes first in memory.
INLINE unsigned half_pair(float low, float high) {
    unsigned pair;
    asm("{.reg .b16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high};}"
        : "=r"(pair) : "f"(low), "f"(high));
    return pair;
}
#else
#define MMA_TYPES "f32.bf16.bf16.f32"

INLINE float low_half(unsigned pair) { return __uint_as_float(pair << 16); }

INLINE float high_half(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// As above.
INLINE unsigned half_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

// 2^x; 0 for -infinity.
INLINE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Shared memory is addressed by 32 bits, which is less to compute and to hold than pointers.
typedef unsigned Shared;

INLINE Shared dynamic_shared() {
    extern __shared__ __align__(128) unsigned char shared[];
    return (Shared)__cvta_generic_to_shared(shared);
}

INLINE void store_shared(Shared at, unsigned x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }

INLINE float load_shared(Shared at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

INLINE uint4 load_shared_16_bytes(Shared at) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    return x;
}

INLINE void store_shared_16_bytes(Shared at, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// sums += A B: 16 x 8 sums, A of 16 x 16, B of 16 x 8, in the fragments' order of PTX: that of 16 columns is that of 8 and 8.
INLINE void mma_16x8x16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const unsigned b[2] = {b0, b1};
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm("mma.sync.aligned.m16n8k8.row.col." MMA_TYPES " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#endif
}

// Four matrices of 8 x 8; lane i gives the address of row i % 8 of matrix i / 8.
INLINE void ldmatrix(unsigned (&x)[4], Shared row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

INLINE void ldmatrix_transposed(unsigned (&x)[4], Shared row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

#if __CUDA_ARCH__ >= 800
// Tiles in shared memory, one of which is copied while another is read.
enum { TILES_IN_FLIGHT = 2 };

// Starts a copy to shared memory; zeros, and nothing is read, where `is_there` does not hold.
INLINE void copy_16_bytes(Shared to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

INLINE void copy_4_bytes(Shared to, const void *from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}

INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of the groups that this thread committed are under way.
template <int PENDING> INLINE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
#else
// Copies are done when they return: tiles in shared memory are as few as possible.
enum { TILES_IN_FLIGHT = 1 };

INLINE void copy_16_bytes(Shared to, const void *from, bool is_there) {
    store_shared_16_bytes(to, is_there ? *(const uint4 *)from : make_uint4(0, 0, 0, 0));
}

INLINE void copy_4_bytes(Shared to, const void *from, bool is_there) { store_shared(to, is_there ? *(const unsigned *)from : 0); }

INLINE void commit_copies() {}

template <int PENDING> INLINE void wait_for_copies() {}
#endif
