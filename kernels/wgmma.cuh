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

// Waits until at most N groups run, whose sums stay untouched.
template <int N> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#define SUMS8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(d, i) SUMS8(d, i), SUMS8(d, i + 8), SUMS8(d, i + 16), SUMS8(d, i + 24)
#define NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES16 NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES24 NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES32 NAMES24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES40 NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES48 NAMES40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES56 NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES64 NAMES56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES72 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES80 NAMES72 ", %72, %73, %74, %75, %76, %77, %78, %79"

// d [64, N] = a [64, 16] bᵀ (+ d), both operands in shared memory with the inner dimension along the rows; N is a multiple of 16
// up to 160.
#define WGMMA_COLUMNS(COUNT, NAMES, A, B, ADD, ...)                                                                            \
    if constexpr (N == COUNT)                                                                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #COUNT                          \
                 "k16.f32.bf16.bf16 {" NAMES "}, " A ", " B ", p, 1, 1, 0, 0;}"                                                \
                 : __VA_ARGS__                                                                                                 \
                 : "l"(a), "l"(b), "r"((int)add))
template <int N> DEV void wgmma(float *d, u64 a, u64 b, bool add) {
    static_assert(N % 16 == 0 && N <= 160, "a case below");
    WGMMA_COLUMNS(16, NAMES8, "%8", "%9", "%10", SUMS8(d, 0));
    WGMMA_COLUMNS(32, NAMES16, "%16", "%17", "%18", SUMS8(d, 0), SUMS8(d, 8));
    WGMMA_COLUMNS(48, NAMES24, "%24", "%25", "%26", SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16));
    WGMMA_COLUMNS(64, NAMES32, "%32", "%33", "%34", SUMS32(d, 0));
    WGMMA_COLUMNS(80, NAMES40, "%40", "%41", "%42", SUMS32(d, 0), SUMS8(d, 32));
    WGMMA_COLUMNS(96, NAMES48, "%48", "%49", "%50", SUMS32(d, 0), SUMS8(d, 32), SUMS8(d, 40));
    WGMMA_COLUMNS(112, NAMES56, "%56", "%57", "%58", SUMS32(d, 0), SUMS8(d, 32), SUMS8(d, 40), SUMS8(d, 48));
    WGMMA_COLUMNS(128, NAMES64, "%64", "%65", "%66", SUMS32(d, 0), SUMS32(d, 32));
    WGMMA_COLUMNS(144, NAMES72, "%72", "%73", "%74", SUMS32(d, 0), SUMS32(d, 32), SUMS8(d, 64));
    WGMMA_COLUMNS(160, NAMES80, "%80", "%81", "%82", SUMS32(d, 0), SUMS32(d, 32), SUMS8(d, 64), SUMS8(d, 72));
}
// d [64, N] += a b, a in registers as for mma.m16n8k16, b in shared memory: [16, N] if TRANSPOSED, else [N, 16].
#define WGMMA_REGISTERS(COUNT, NAMES, A, B, T, ...)                                                                            \
    if constexpr (N == COUNT)                                                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COUNT "k16.f32.bf16.bf16 {" NAMES "}, {" A "}, " B ", 1, 1, 1, " T ";"   \
                 : __VA_ARGS__                                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)TRANSPOSED))
template <int N, bool TRANSPOSED> DEV void wgmma_registers(float *d, const u32 *a, u64 b) {
    static_assert(N == 16 || N == 32 || N == 48 || N == 64 || N == 128, "a case below");
    WGMMA_REGISTERS(16, NAMES8, "%8, %9, %10, %11", "%12", "%13", SUMS8(d, 0));
    WGMMA_REGISTERS(32, NAMES16, "%16, %17, %18, %19", "%20", "%21", SUMS8(d, 0), SUMS8(d, 8));
    WGMMA_REGISTERS(48, NAMES24, "%24, %25, %26, %27", "%28", "%29", SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16));
    WGMMA_REGISTERS(64, NAMES32, "%32, %33, %34, %35", "%36", "%37", SUMS32(d, 0));
    WGMMA_REGISTERS(128, NAMES64, "%64, %65, %66, %67", "%68", "%69", SUMS32(d, 0), SUMS32(d, 32));
}

// d [64, N] = a b (+ d), E4M3 in both: a [64, 32] in registers, four neighbours in each, b [N, 32] in shared memory.
#define WGMMA_EIGHTS(COUNT, NAMES, A, B, ADD, ...)                                                                             \
    if constexpr (N == COUNT)                                                                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #COUNT                          \
                 "k32.f32.e4m3.e4m3 {" NAMES "}, {" A "}, " B ", p, 1, 1;}"                                                    \
                 : __VA_ARGS__                                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))
template <int N> DEV void wgmma_eights(float *d, const u32 *a, u64 b, bool add) {
    static_assert(N == 16 || N == 32 || N == 48 || N == 64, "a case below");
    WGMMA_EIGHTS(16, NAMES8, "%8, %9, %10, %11", "%12", "%13", SUMS8(d, 0));
    WGMMA_EIGHTS(32, NAMES16, "%16, %17, %18, %19", "%20", "%21", SUMS8(d, 0), SUMS8(d, 8));
    WGMMA_EIGHTS(48, NAMES24, "%24, %25, %26, %27", "%28", "%29", SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16));
    WGMMA_EIGHTS(64, NAMES32, "%32, %33, %34, %35", "%36", "%37", SUMS32(d, 0));
}

// Makes this thread's writes to shared memory visible to wgmma.
DEV void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int N> DEV void registers_raise() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_lower() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// Stores four 8 x 8 blocks of bf16, held as a product leaves them, transposed: rows of 16 bytes. Lane l has the address of row l % 8
// of block l / 8.
DEV void store_transposed_x4(u32 addr, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
