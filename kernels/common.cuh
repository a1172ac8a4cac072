// Types, conversions and vector access that every kernel shares. No include path is needed: NVRTC ships no headers, and
// neither do users' machines, so the few bf16 helpers are ours.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct __align__(2) bf16 {
    u16 bits;
};
struct __align__(2) f16 {
    u16 bits;
};

#define DEV __device__ __forceinline__

constexpr u32 NONE = 0xffffffffu;
constexpr u32 CARRY = 0xffffffffu;
constexpr u32 FROM_DEVICE = 0x80000000u;
constexpr int PAGE = 64;
#define INF __int_as_float(0x7f800000)

DEV float to_f32(float x) { return x; }
DEV float to_f32(i8 x) { return x; }
DEV float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEV float to_f32(f16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
    return r;
}

template <class T> DEV T from_f32(float x);
template <> DEV float from_f32<float>(float x) { return x; }
template <> DEV bf16 from_f32<bf16>(float x) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}
template <> DEV f16 from_f32<f16>(float x) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}

template <> DEV i8 from_f32<i8>(float x) { return (i8)__float2int_rn(x); }

// Two bf16 in a register, `lo` at the lower address.
DEV u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
DEV float bf16_lo(u32 x) { return __uint_as_float(x << 16); }
DEV float bf16_hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }
// a b + c of two bf16 each.
DEV u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// If `at` is set, a kernel writes its number there (host memory) when it starts, so that a late error can name its kernel. The Rust
// side adds the call to every kernel.
struct Started {
    volatile u32 *at;
    u32 number;
};
extern "C" __constant__ Started started;
DEV void mark_started() {
    if (started.at && threadIdx.x == 0 && (blockIdx.x | blockIdx.y | blockIdx.z) == 0) *started.at = started.number;
}

// One load or store of `BYTES` bytes; the address is a multiple of it.
template <int BYTES> struct Raw;
template <> struct Raw<16> { typedef uint4 type; };
template <> struct Raw<8> { typedef uint2 type; };
template <> struct Raw<4> { typedef u32 type; };
template <> struct Raw<2> { typedef u16 type; };
template <> struct Raw<1> { typedef u8 type; };

template <int N, class T> struct Packed {
    static constexpr int PIECE = N * (int)sizeof(T) < 16 ? N * (int)sizeof(T) : 16;
    static constexpr int PIECES = N * (int)sizeof(T) / PIECE;
    typedef typename Raw<PIECE>::type R;
    union {
        R raw[PIECES];
        T item[N];
    };
    DEV Packed() {}
    DEV void clear() {
#pragma unroll
        for (int i = 0; i < PIECES; i++) raw[i] = R();
    }
};

template <int N, class T> DEV Packed<N, T> load_raw(const T *p) {
    Packed<N, T> r;
#pragma unroll
    for (int i = 0; i < r.PIECES; i++) r.raw[i] = reinterpret_cast<const typename Packed<N, T>::R *>(p)[i];
    return r;
}

template <int N, class T> DEV void unpack(const Packed<N, T> &r, float *v) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = to_f32(r.item[i]);
}

// N elements as f32.
template <int N, class T> DEV void load(const T *p, float *v) { unpack<N, T>(load_raw<N, T>(p), v); }

template <int N, class T> DEV void pack(const float *v, Packed<N, T> &r) {
#pragma unroll
    for (int i = 0; i < N; i++) r.item[i] = from_f32<T>(v[i]);
}

template <int N, class T> DEV void store(T *p, const float *v) {
    Packed<N, T> r;
    pack(v, r);
#pragma unroll
    for (int i = 0; i < r.PIECES; i++) reinterpret_cast<typename Packed<N, T>::R *>(p)[i] = r.raw[i];
}

// The same to global memory, in pieces for certain: the compiler may take a store of 16 bytes apart into four.
DEV void store_piece(uint4 *p, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEV void store_piece(uint2 *p, uint2 v) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
template <class R> DEV void store_piece(R *p, R v) { *p = v; }

template <int N, class T> DEV void store_global(T *p, const float *v) {
    Packed<N, T> r;
    pack(v, r);
#pragma unroll
    for (int i = 0; i < r.PIECES; i++) store_piece(reinterpret_cast<typename Packed<N, T>::R *>(p) + i, r.raw[i]);
}

// Two neighbouring values, such as a tensor-core fragment holds of a recurrent state in f32 or bf16.
template <class T> DEV float2 load_pair(const T *p) {
    float v[2];
    load<2>(p, v);
    return make_float2(v[0], v[1]);
}
template <class T> DEV void store_pair(T *p, float x, float y) {
    float v[2] = {x, y};
    store<2>(p, v);
}

// 2^x, to 2 ulp; 0 for -inf.
DEV float ex2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
constexpr float LOG2E = 1.44269504f;

// Approximate quotients, to 2 ulp; a denominator beyond 2^126 gives 0, as it should here.
DEV float sigmoid(float x) { return __fdividef(1.f, 1.f + ex2(-x * LOG2E)); }
DEV float silu(float x) { return __fdividef(x, 1.f + ex2(-x * LOG2E)); }
// log(1 + e^x) = max(x, 0) + 2 atanh(z), z = e / (2 + e) <= 1/3, e = e^-|x|; the polynomial is atanh's to 4e-9.
DEV float softplus(float x) {
    float e = ex2(-fabsf(x) * LOG2E), z = __fdividef(e, 2.f + e), q = z * z;
    float r = __fmaf_rn(q, 0.140059933f, 0.140009031f);
    r = __fmaf_rn(r, q, 0.200107634f);
    r = __fmaf_rn(r, q, 0.333332092f);
    return fmaxf(x, 0.f) + 2.f * __fmaf_rn(z * q, r, z);
}

constexpr int ACT_IDENTITY = 0, ACT_SILU = 1, ACT_SIGMOID = 2, ACT_RELU2 = 3, ACT_GELU = 4;
template <int A> DEV float activate(float x) {
    if constexpr (A == ACT_SILU) return silu(x);
    if constexpr (A == ACT_SIGMOID) return sigmoid(x);
    if constexpr (A == ACT_RELU2) {
        float r = fmaxf(x, 0.f);
        return r * r;
    }
    if constexpr (A == ACT_GELU) return 0.5f * x * (1.f + erff(x * 0.70710678f));
    return x;
}

DEV float warp_sum(float x) {
#pragma unroll
    for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
    return x;
}
DEV float warp_max(float x) {
#pragma unroll
    for (int m = 16; m; m >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
    return x;
}

// Sum over the block's THREADS threads; every thread gets it. `part` holds THREADS / 32 floats.
template <int THREADS> DEV float block_sum(float x, float *part) {
    x = warp_sum(x);
    if constexpr (THREADS > 32) {
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
        __syncthreads();
        x = threadIdx.x % 32 < THREADS / 32 ? part[threadIdx.x % 32] : 0.f;
        x = warp_sum(x);
    }
    return x;
}

// KV pages of i8 hold codes, see core/src/kv8.rs: after those of a head's tokens in a page comes an f32 scale for each token.
template <class T> constexpr bool CODED = false;
template <> constexpr bool CODED<i8> = true;
// Elements of a head in a page.
template <class T> constexpr int head_in_page(int head_dim) { return PAGE * (head_dim + (CODED<T> ? 4 : 0)); }
// The scales of the codes at `head`.
DEV float *scales_of(const void *head, int head_dim) { return (float *)((i64)head + PAGE * head_dim); }
// The bits of |x|. As integers, values that are not finite are the largest.
DEV u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
// The factor that makes codes of a warp's row, whose scale is stored; `most` is the largest magnitude of the lane.
DEV float code_factor(u32 most, float *scale) {
    most = __reduce_max_sync(0xffffffffu, most);
    float amax = __uint_as_float(most);
    if (threadIdx.x % 32 == 0) *scale = most < 0x7f800000u ? amax / 127.f : __uint_as_float(0x7fc00000u);
    return amax > 1e-30f ? 127.f / amax : 0.f;
}

// Bytes I and J of a word, each a signed number, as two bf16.
template <int I, int J> DEV u32 pair_of_bytes(u32 w) {
    u32 b = __byte_perm(w, 0x43434343u, 0x4040 | J << 8 | I);
    // Bits 0 to 6 are the mantissa of 128 + n, or of 256 + n where n is negative; bit 7 makes the exponent that of 128 or 256.
    return fma_bf16x2(b & 0xff80ff80u, 0xbf80bf80u, b & 0xff7fff7fu);
}

constexpr int div_up(int a, int b) { return (a + b - 1) / b; }
// The largest power of two up to n.
constexpr int power_of_two(int n) { return n < 2 ? n : 2 * power_of_two(n / 2); }

// Programmatic dependent launch, compute capability 9.0 and later: a kernel may start while the previous one runs. Each kernel
// triggers the next one, some before their own wait. Each waits for all previous kernels before it first reads anything that a kernel
// writes and before its first write. Weights and the integers of a step are written by no kernel.
DEV void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEV void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The integers of a step, see core/src/step.rs.
struct Step {
    const u32 *w;
    int tokens, rows, chunks, outputs, pages, pad;

    DEV u32 id(int t) const { return w[t]; }
    DEV u32 position(int t) const { return w[tokens + t]; }
    DEV u32 token_row(int t) const { return w[2 * tokens + t]; }
    DEV const u32 *chunk(int c) const { return w + 3 * tokens + 5 * c; }
    DEV const u32 *row(int r) const { return w + 3 * tokens + 5 * chunks + 4 * r; }
    DEV u32 output_token(int o) const { return w[3 * tokens + 5 * chunks + 4 * rows + o]; }
    DEV u32 output_lane(int o) const { return w[3 * tokens + 5 * chunks + 4 * rows + outputs + o]; }
    DEV const u32 *page_row(int r) const {
        return w + 3 * tokens + 5 * chunks + 4 * rows + 2 * outputs + (i64)r * pages;
    }
};

// A chunk-table entry.
struct Chunk {
    u32 row, start, len, src, dst;
    DEV Chunk(const u32 *w) : row(w[0]), start(w[1]), len(w[2]), src(w[3]), dst(w[4]) {}
};

// The k-th row with more than `least` tokens, or -1. Called by whole warps.
DEV int long_row(const Step &st, u32 least, int k) {
    for (int base = 0; base < st.rows; base += 32) {
        int r = base + threadIdx.x % 32;
        u32 mask = __ballot_sync(0xffffffffu, r < st.rows && st.row(min(r, st.rows - 1))[1] > least);
        if (k >= __popc(mask)) {
            k -= __popc(mask);
            continue;
        }
        for (; k > 0; k--) mask &= mask - 1;
        return base + __ffs(mask) - 1;
    }
    return -1;
}

// Tile `tile` of `size` tokens, counted over the rows in order: its row, the row's first token and tokens, and `tile`
// counted within the row; false after the last. Called by whole warps.
DEV bool tile_row(const Step &st, int size, int &tile, int &r, int &first, int &tokens) {
    int lane = threadIdx.x % 32;
    for (int base = 0, before = 0; base < st.rows; base += 32) {
        const u32 *row = st.row(min(base + lane, st.rows - 1));
        int mine = base + lane < st.rows ? div_up(row[1], size) : 0, upto = mine;
#pragma unroll
        for (int m = 1; m < 32; m *= 2) {
            int other = __shfl_up_sync(0xffffffffu, upto, m);
            if (lane >= m) upto += other;
        }
        u32 past = __ballot_sync(0xffffffffu, before + upto > tile);
        if (past) {
            int who = __ffs(past) - 1;
            r = base + who;
            first = __shfl_sync(0xffffffffu, (int)row[0], who);
            tokens = __shfl_sync(0xffffffffu, (int)row[1], who);
            tile -= before + __shfl_sync(0xffffffffu, upto - mine, who);
            return true;
        }
        before += __shfl_sync(0xffffffffu, upto, 31);
    }
    return false;
}

// Tokens that a padding block looks through, and columns that it zeroes; `padding_blocks` of the planner counts with the same.
constexpr int PADDING_SPAN = 1024;
constexpr int PADDING_COLS = 1024;

// Zeroes the padding tokens of block `block`, of COLS columns in all, after the wait: previous kernels may still read
// there. Called by all threads of a block. Not inlined, so that its code is not between the start of a kernel and its main path.
template <int THREADS, int COLS, class T> __device__ __noinline__ void zero_padding(Step st, T *out, i64 stride, int block) {
    wait_for_inputs();
    constexpr int TILES = div_up(COLS, PADDING_COLS);
    int first = block / TILES * PADDING_SPAN, last = min(first + PADDING_SPAN, st.tokens);
    int col = block % TILES * PADDING_COLS, cols = min(PADDING_COLS, COLS - col);
    bool padding = false;
#pragma unroll
    for (int i = 0; i < PADDING_SPAN; i += THREADS) {
        int t = first + i + threadIdx.x;
        padding |= t < last && st.token_row(t) == NONE;
    }
    if (!__syncthreads_or(padding)) return;
    for (int t = first + threadIdx.x / 32; t < last; t += THREADS / 32) {
        if (st.token_row(t) != NONE) continue;
        for (int i = threadIdx.x % 32; i < cols; i += 32) out[t * stride + col + i] = from_f32<T>(0.f);
    }
}

// mma.m16n8k16, bf16 in, f32 sums: d += a b. Register layout as in the PTX manual.
DEV void mma_bf16(float *d, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEV u32 smem_addr(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEV void ldmatrix_x4(u32 *r, u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
DEV void ldmatrix_x4_trans(u32 *r, u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}

DEV void store_shared(u32 addr, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(v) : "memory"); }
DEV void store_shared16(u32 addr, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEV uint4 load_shared16(u32 addr) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(addr)
                 : "memory");
    return v;
}

DEV float load_shared_f32(u32 addr) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr) : "memory");
    return v;
}

DEV float2 load_shared_f32x2(u32 addr) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(addr) : "memory");
    return v;
}

// Byte of 16-byte piece `piece` of row `row` in a tile of PIECES (an even number) a row: the same piece of 8 rows in a row lies in
// different banks, and so do all pieces of a row of 4 or 8.
template <int PIECES> DEV u32 swizzle(int row, int piece) {
    static_assert(PIECES % 2 == 0, "rows of whole operands");
    constexpr int GROUP = PIECES % 8 == 0 ? 8 : PIECES % 4 == 0 ? 4 : 2;
    return row * (PIECES * 16) + (piece & -GROUP) * 16 + (((piece ^ row / (8 / GROUP)) & (GROUP - 1)) << 4);
}

// Barriers in shared memory: a phase ends after `count` arrivals; `parity` is that of the phase waited for.
DEV void mbar_init(u32 bar, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEV void mbar_arrive(u32 bar) {
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(bar) : "memory");
}
// Arrives when this thread's copies have; the thread may have ended by then.
DEV void mbar_arrive_copied(u32 bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory"); }
#if __CUDA_ARCH__ >= 900
#define MBAR_TEST "mbarrier.try_wait.parity.shared.b64"
#else
#define MBAR_TEST "mbarrier.test_wait.parity.shared.b64"
#endif
DEV void mbar_wait(u32 bar, int parity) {
    asm volatile("{.reg .pred p; again: " MBAR_TEST " p, [%0], %1; @!p bra again;}" ::"r"(bar), "r"(parity) : "memory");
}

// Barrier `id` (1 to 15) of `threads` threads.
DEV void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Copies 16 bytes to shared memory in the background; zeros if `!valid`.
DEV void cp_async16(u32 dst, const void *src, bool valid = true) {
    int n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
// The same for 4 bytes.
DEV void cp_async4(u32 dst, const void *src, bool valid) {
    int n = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
// 16 bytes with the evict-first policy of the L2, for data that is read once.
DEV u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEV void cp_async16(u32 dst, const void *src, bool valid, u64 policy) {
    int n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src), "r"(n),
                 "l"(policy)
                 : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

#if __CUDA_ARCH__ >= 900
// Bulk copies of multiples of 16 bytes, and the barriers in shared memory that count their bytes.
DEV void barrier_init(u64 *bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(count) : "memory");
}
DEV void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void barrier_arrive(u64 *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(bar)) : "memory");
}
DEV void barrier_wait(u64 *bar, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(
                     smem_addr(bar)),
                 "r"(parity)
                 : "memory");
}
// Arrives, and lets the barrier wait for `bytes` bytes.
DEV void bulk_expect(u64 *bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes) : "memory");
}
DEV void bulk_load(void *dst, const void *src, u32 bytes, u64 *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_addr(dst)),
                 "l"(src), "r"(bytes), "r"(smem_addr(bar))
                 : "memory");
}
// With `policy` only if HINTED.
template <bool HINTED> DEV void bulk_load(void *dst, const void *src, u32 bytes, u64 *bar, u64 policy) {
    if constexpr (!HINTED) return bulk_load(dst, src, bytes, bar);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                     smem_addr(dst)),
                 "l"(src), "r"(bytes), "r"(smem_addr(bar)), "l"(policy)
                 : "memory");
}
// Orders this thread's writes to shared memory before bulk copies to it. Global memory written by previous kernels needs no such
// fence after `wait_for_inputs`.
DEV void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// Copies `len` rows of PIECES pieces of 16 bytes to a swizzled tile of ROWS in shared memory, and zeros after them. For `tid`
// of THREADS threads, of which the last have nothing to do where PIECES is no power of two.
template <int ROWS, int PIECES, int THREADS>
DEV void cp_async_tile(u32 dst, const bf16 *src, i64 stride, int len, int tid) {
    constexpr int STEP = power_of_two(THREADS / PIECES);
    static_assert(ROWS % STEP == 0, "every thread copies the same piece of some rows");
    int row = tid / PIECES, piece = tid % PIECES;
    if (STEP * PIECES < THREADS && row >= STEP) return;
    const bf16 *from = src + row * stride + piece * 8;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++, from += STEP * stride) {
        bool in = row + i * STEP < len;
        cp_async16(dst + swizzle<PIECES>(row + i * STEP, piece), in ? from : src, in);
    }
}
