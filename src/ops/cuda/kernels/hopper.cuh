// The instructions of sm_90a: products of a warpgroup (wgmma), copies of boxes by tensor maps, barrier objects. Tiles of bf16 lie
// in shared memory in chunks of 64 columns (of 32 where HEAD is no multiple of 64), [chunk][row][column], as boxes come that have
// the swizzle of a chunk's row.
#pragma once
#include "tile.cuh"

typedef unsigned long long u64;
enum { WARPGROUP = 128 };

// A CUtensorMap.
struct alignas(64) TensorMap {
    u64 words[16];
};

// Aligned to what a swizzle repeats after.
INLINE Shared dynamic_tiles() {
    extern __shared__ __align__(1024) unsigned char tiles[];
    const Shared at = (Shared)__cvta_generic_to_shared(tiles);
    if (at % 1024) __trap();
    return at;
}

// What is the same for all lanes of a warp, so that the compiler knows it: where lanes may part, products wait for each other.
INLINE int same_in_warp(int x) { return __shfl_sync(~0u, x, 0); }

INLINE void sync_threads(int barrier, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
INLINE void arrive_at(int barrier, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Of all threads of the warpgroup. The registers of a block are those of its launch.
template <int REGISTERS> INLINE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> INLINE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// Barrier objects, of 8 bytes. A phase is over when all have arrived and the bytes have come that were expected in it.
INLINE void make_barrier(Shared barrier, int num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals) : "memory");
}
// By the thread that made them, before other threads, and copies, use them.
INLINE void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void arrive(Shared barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
INLINE void arrive_and_expect(Shared barrier, int bytes) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Arrives when the copies of this thread so far (copy_4_bytes) have come.
INLINE void arrive_after_copies(Shared barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
INLINE void wait_for(Shared barrier, unsigned phase) {
    int is_over;
    do
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                     : "=r"(is_over) : "r"(barrier), "r"(phase) : "memory");
    while (!is_over);
}

// Slots that a producer fills and consumers empty in turns, each with two barrier objects.
template <int SLOTS> struct Ring {
    Shared barriers;
    int slot = 0;
    unsigned phase = 0;

    INLINE explicit Ring(Shared barriers) : barriers(barriers) {}
    // By one thread.
    INLINE void make(int num_producers, int num_consumers) const {
        for (int i = 0; i < SLOTS; i++) {
            make_barrier(barriers + i * 16, num_producers);
            make_barrier(barriers + i * 16 + 8, num_consumers);
        }
    }
    INLINE Shared full() const { return barriers + slot * 16; }
    INLINE Shared empty() const { return full() + 8; }
    INLINE void wait_until_full() const { wait_for(full(), phase); }
    INLINE void wait_until_empty() const { wait_for(empty(), phase ^ 1); }
    INLINE void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

template <int HEAD> struct Chunk {
    enum { COLUMNS = HEAD % 64 ? 32 : 64, ROW = COLUMNS * 2, COUNT = HEAD / COLUMNS };
};

// Starts the copy of ROWS rows, in boxes of 64: what lies behind the tensor's rows becomes zeros.
template <int HEAD, int ROWS>
INLINE void load_boxes(Shared tile, const TensorMap &from, int first_column, int first_row, Shared barrier) {
    typedef Chunk<HEAD> C;
#pragma unroll
    for (int chunk = 0; chunk < C::COUNT; chunk++)
#pragma unroll
        for (int row = 0; row < ROWS; row += 64)
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                         ::"r"(tile + (chunk * ROWS + row) * C::ROW), "l"(&from), "r"(first_column + chunk * C::COLUMNS),
                         "r"(first_row + row), "r"(barrier) : "memory");
}

// The descriptor of a tile of ROWS rows, whichever of its axes is summed over: where it starts, from one chunk to the next, from
// eight rows to the next eight, in units of 16 bytes, and the swizzle.
template <int HEAD, int ROWS> INLINE u64 descriptor(Shared tile) {
    typedef Chunk<HEAD> C;
    const u64 swizzle = C::COLUMNS == 64 ? 1 : 2;
    return (tile & 0x3ffff) >> 4 | (u64)(C::ROW * ROWS >> 4) << 16 | (u64)(C::ROW * 8 >> 4) << 32 | swizzle << 62;
}

// What this thread's copies (copy_16_bytes) have written, for products: by each, before they meet.
INLINE void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before products that use registers which were written meanwhile.
INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the groups that were committed are under way.
template <int PENDING> INLINE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler does not know that wgmma changes and reads registers later: what it computes of these stays before or behind this.
template <int N> INLINE void hold(Sums<1, N> &sums) {
#pragma unroll
    for (int i = 0; i < N * 4; i++) asm volatile("" : "+f"(sums[0][i / 4][i % 4])::"memory");
}
template <int K> INLINE void hold(Operand<1, K> &x) {
#pragma unroll
    for (int i = 0; i < K * 4; i++) asm volatile("" : "+r"(x[0][i / 4][i % 4])::"memory");
}
// ptxas moves a wait up, in front of what does not need it, which then no longer runs beside the products. It stays behind what
// `bits` are made of; their sign is never set, so that nothing is stored.
INLINE void wait_behind(int bits, Shared at) {
    asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %0, 0;\n@p st.shared.b32 [%1], %0;\n}" ::"r"(bits), "r"(at) : "memory");
}

// 64 x 8 * N sums of the warpgroup, as mma_16x8x16 has them for each warp, over 16 columns of A. `wgmma_first`: sums = A B^T,
// `wgmma_rows`: sums += A B^T, of A and B in shared memory, `wgmma_rows_columns`: sums += A B, likewise. `wgmma_columns`: sums += A B,
// of A in registers.
#define SUMS_4(way, n) way(sums[0][n][0]), way(sums[0][n][1]), way(sums[0][n][2]), way(sums[0][n][3])
#define SUMS_16(way, n) SUMS_4(way, n), SUMS_4(way, n + 1), SUMS_4(way, n + 2), SUMS_4(way, n + 3)
#define SUMS_64(way, n) SUMS_16(way, n), SUMS_16(way, n + 4), SUMS_16(way, n + 8), SUMS_16(way, n + 12)
#define SUMS_OF_64(way) SUMS_16(way, 0), SUMS_16(way, 4)
#define SUMS_OF_96(way) SUMS_OF_64(way), SUMS_16(way, 8)
#define SUMS_OF_128(way) SUMS_64(way, 0)
#define SUMS_OF_256(way) SUMS_64(way, 0), SUMS_64(way, 16)
#define NAMES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_96 NAMES_64 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_128 NAMES_96 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_256 NAMES_128 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CHANGED "+f"
#define MADE "=f"
#define WGMMA_OF(COLUMNS) "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" NAMES_##COLUMNS "}, "
#define WGMMA(COLUMNS, X0, X1, X2, X3, X4)                                                                                       \
    INLINE void wgmma_first(Sums<1, COLUMNS / 8> &sums, u64 a, u64 b) {                                                          \
        asm volatile(WGMMA_OF(COLUMNS) X0 ", " X1 ", 0, 1, 1, 0, 0;" : SUMS_OF_##COLUMNS(MADE) : "l"(a), "l"(b) : "memory");     \
    }                                                                                                                            \
    INLINE void wgmma_rows(Sums<1, COLUMNS / 8> &sums, u64 a, u64 b) {                                                           \
        asm volatile(WGMMA_OF(COLUMNS) X0 ", " X1 ", 1, 1, 1, 0, 0;" : SUMS_OF_##COLUMNS(CHANGED) : "l"(a), "l"(b) : "memory");  \
    }                                                                                                                            \
    INLINE void wgmma_rows_columns(Sums<1, COLUMNS / 8> &sums, u64 a, u64 b) {                                                   \
        asm volatile(WGMMA_OF(COLUMNS) X0 ", " X1 ", 1, 1, 1, 0, 1;" : SUMS_OF_##COLUMNS(CHANGED) : "l"(a), "l"(b) : "memory");  \
    }                                                                                                                            \
    INLINE void wgmma_columns(Sums<1, COLUMNS / 8> &sums, const unsigned (&a)[4], u64 b) {                                       \
        asm volatile(WGMMA_OF(COLUMNS) "{" X0 ", " X1 ", " X2 ", " X3 "}, " X4 ", 1, 1, 1, 1;"                                   \
                     : SUMS_OF_##COLUMNS(CHANGED) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");              \
    }
WGMMA(64, "%32", "%33", "%34", "%35", "%36")
WGMMA(96, "%48", "%49", "%50", "%51", "%52")
WGMMA(128, "%64", "%65", "%66", "%67", "%68")
WGMMA(256, "%128", "%129", "%130", "%131", "%132")

// sums = A B^T, of 64 rows of A with 8 * N rows of B.
template <int HEAD, int N> INLINE void start_product_of_rows(Sums<1, N> &sums, u64 a, u64 b) {
    typedef Chunk<HEAD> C;
#pragma unroll
    for (int column = 0; column < HEAD; column += 16) {
        const int chunk = column / C::COLUMNS, bytes = column % C::COLUMNS * 2;
        const u64 a_step = a + (chunk * 64 * C::ROW + bytes >> 4), b_step = b + (chunk * N * 8 * C::ROW + bytes >> 4);
        if (column)
            wgmma_rows(sums, a_step, b_step);
        else
            wgmma_first(sums, a_step, b_step);
    }
    commit_products();
}

// sums += A B, with the 16 * K rows of B.
template <int HEAD, int K> INLINE void start_product(Sums<1, HEAD / 8> &sums, const Operand<1, K> &a, u64 b) {
#pragma unroll
    for (int k = 0; k < K; k++) wgmma_columns(sums, a[0][k], b + (k * 16 * Chunk<HEAD>::ROW >> 4));
    commit_products();
}
