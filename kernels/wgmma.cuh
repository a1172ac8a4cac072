// Warpgroup products of compute capability 9.0 and their tiles in shared memory.
// A tile is rows of 64 bf16 (128 bytes) from a multiple of 1024 bytes on, its pieces where `swizzle<8>` says.

// `stride` bytes between groups of 8 rows along the inner dimension of a transposed operand or the outer one of a plain
// one; `leading` bytes between blocks of 64 columns of a transposed operand.
DEV u64 tile_desc(u32 addr, u32 leading, u32 stride) {
    return 1ull << 62 | (u64)(stride >> 4) << 32 | (u64)(leading >> 4) << 16 | (addr & 0x3ffff) >> 4;
}

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups run; the sums of the others may be touched from here on.
template <int N, int COUNT> DEV void wgmma_wait(float *d) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define SUMS8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(d, i) SUMS8(d, i), SUMS8(d, i + 8), SUMS8(d, i + 16), SUMS8(d, i + 24)
#define NAMES32                                                                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                         \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                                                     \
    NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                     \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d [64, 128] = a [64, 16] bᵀ (+ d), both operands in shared memory with the inner dimension along the rows.
DEV void wgmma_n128(float *d, u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64
                 "}, %64, %65, p, 1, 1, 0, 0;}"
                 : SUMS32(d, 0), SUMS32(d, 32)
                 : "l"(a), "l"(b), "r"((int)add));
}
// d [64, N] += a b, a in registers as for mma.m16n8k16, b [16, N] transposed in shared memory.
template <int N> DEV void wgmma_registers(float *d, const u32 *a, u64 b) {
    if constexpr (N == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : SUMS32(d, 0), SUMS32(d, 32)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32
                     "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : SUMS32(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Makes this thread's writes to shared memory visible to wgmma.
DEV void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int N> DEV void registers_raise() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_lower() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
