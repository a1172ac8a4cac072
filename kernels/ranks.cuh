// Exchange between ranks: every rank has an area of memory that the others write to, and reads what they left in its own. All
// ranks launch the same kernels with the same grids in the same order, so block b of one rank meets block b of the others.
//
// Words: short messages go in pairs of a word and the number of the exchange, so that a reader sees from each word that it has
// arrived. Pieces: long messages go as they are, and one flag per block says that they are there. Both have two sets of places
// that take turns: whoever fills a set for the second time has got an answer to the exchange between, which its peer gave only
// after it had read the first. Blocks count their exchanges by themselves, so a recorded launch can be played again.
// After the addresses of the areas comes that of a word in host memory, which is not 0 once a rank has failed.
// RANK, RANKS.

constexpr int WORD_BLOCKS = 512, WORD_THREADS = 128, PIECE_BLOCKS = 512, PIECE_THREADS = 256, PIECES_EACH = 4;
constexpr i64 WORDS_BYTES = WORD_THREADS * 32, PIECES_BYTES = PIECE_THREADS * PIECES_EACH * 16;
// What an area consists of, in bytes; `area_bytes` of `plan/ranks.rs` is their sum.
constexpr i64 COUNTS = 0, FLAGS = 4 * (WORD_BLOCKS + PIECE_BLOCKS), WORDS = FLAGS + 4 * 2 * RANKS * PIECE_BLOCKS;
constexpr i64 PIECES = WORDS + 2 * RANKS * WORD_BLOCKS * WORDS_BYTES;

// A rank that waits longer than this gives up: 60 s, in nanoseconds.
constexpr u64 DEADLINE = 60000000000ull;

DEV u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Asks again and again, but not for ever, and not for a rank that has failed: then the kernel ends with an error.
struct Patience {
    const u64 *areas;
    u64 began = 0;
    u32 asked = 0;
    DEV explicit Patience(const u64 *areas) : areas(areas) {}
    DEV void ask_again() {
        if (++asked % 16384) return;
        u64 t = now();
        if (!began) began = t;
        if (t - began > DEADLINE || *(const volatile u32 *)areas[RANKS]) asm volatile("trap;");
    }
};

DEV void put_words(u8 *to, u32 a, u32 b, u32 number) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(number), "r"(b), "r"(number) : "memory");
}
DEV void put_word(u8 *to, u32 a, u32 number) {
    asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(a), "r"(number) : "memory");
}
DEV void take_words(const u64 *areas, const u8 *at, u32 &a, u32 &b, u32 number) {
    Patience patience(areas);
    u32 n, m;
    while (true) {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(n), "=r"(b), "=r"(m) : "l"(at) : "memory");
        if (n == number && m == number) return;
        patience.ask_again();
    }
}
DEV u32 take_word(const u64 *areas, const u8 *at, u32 number) {
    Patience patience(areas);
    u32 a, n;
    while (true) {
        asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(n) : "l"(at) : "memory");
        if (n == number) return a;
        patience.ask_again();
    }
}
DEV void raise(u8 *flag, u32 number) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(number) : "memory");
}
DEV void await(const u64 *areas, const u8 *flag, u32 number) {
    Patience patience(areas);
    u32 n;
    while (true) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(n) : "l"(flag) : "memory");
        if (n == number) return;
        patience.ask_again();
    }
}

// Place of what `from` sends to block `block`, in the set of exchange `number`.
DEV i64 words_at(int from, int block, u32 number) {
    return WORDS + (((i64)(number & 1) * RANKS + from) * WORD_BLOCKS + block) * WORDS_BYTES;
}
DEV i64 pieces_at(int from, int block, u32 number) {
    return PIECES + (((i64)(number & 1) * RANKS + from) * PIECE_BLOCKS + block) * PIECES_BYTES;
}
DEV i64 flag_at(int from, int block, u32 number) { return FLAGS + 4 * (((i64)(number & 1) * RANKS + from) * PIECE_BLOCKS + block); }

// VEC elements as words of 4 bytes.
template <int VEC, class T>
union Piece {
    static constexpr int SIZE = VEC * (int)sizeof(T), N = SIZE < 4 ? 1 : SIZE / 4;
    static_assert(SIZE <= 16, "a piece has at most 16 bytes");
    u32 word[N];
    Packed<VEC, T> is;
    DEV Piece() {}
};

// What was left in this rank's area, past caches.
template <int VEC, class T>
DEV Piece<VEC, T> load_piece(const u32 *at) {
    Piece<VEC, T> piece;
    if constexpr (Piece<VEC, T>::N == 4) {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(piece.word[0]), "=r"(piece.word[1]), "=r"(piece.word[2]), "=r"(piece.word[3])
                     : "l"(at)
                     : "memory");
    } else {
#pragma unroll
        for (int w = 0; w < Piece<VEC, T>::N; w++) piece.word[w] = *(volatile const u32 *)(at + w);
    }
    return piece;
}
template <int VEC, class T>
DEV void store_piece(u32 *at, const Piece<VEC, T> &piece) {
    if constexpr (Piece<VEC, T>::N == 4) {
        *(uint4 *)at = make_uint4(piece.word[0], piece.word[1], piece.word[2], piece.word[3]);
    } else {
#pragma unroll
        for (int w = 0; w < Piece<VEC, T>::N; w++) at[w] = piece.word[w];
    }
}

// Columns of 16 bytes side by side; each word with the number of the exchange.
template <int VEC, class T>
DEV void send_words(u8 *to, const Piece<VEC, T> &piece, u32 number) {
    if constexpr (Piece<VEC, T>::N == 1) put_word(to, piece.word[0], number);
#pragma unroll
    for (int w = 0; w + 1 < Piece<VEC, T>::N; w += 2) put_words(to + w / 2 * WORD_THREADS * 16, piece.word[w], piece.word[w + 1], number);
}
template <int VEC, class T>
DEV Piece<VEC, T> receive_words(const u64 *areas, const u8 *at, u32 number) {
    Piece<VEC, T> piece;
    if constexpr (Piece<VEC, T>::N == 1) piece.word[0] = take_word(areas, at, number);
#pragma unroll
    for (int w = 0; w + 1 < Piece<VEC, T>::N; w += 2)
        take_words(areas, at + w / 2 * WORD_THREADS * 16, piece.word[w], piece.word[w + 1], number);
    return piece;
}

// One round of a long message: PIECES_EACH pieces per thread from `first` on.
template <int VEC, class T, class Get, class Put>
DEV void exchange_pieces(const u64 *areas, int first, int all, u32 number, Get get, Put put) {
    using Own = Piece<VEC, T>;
    u8 *own_area = (u8 *)areas[RANK];
    int tid = threadIdx.x;
    Own own[PIECES_EACH];
#pragma unroll
    for (int k = 0; k < PIECES_EACH; k++) {
        int i = first + k * PIECE_THREADS + tid;
        if (i < all) own[k].is = get(i);
    }
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
        if (r == RANK) continue;
        u32 *to = (u32 *)((u8 *)areas[r] + pieces_at(RANK, blockIdx.x, number));
#pragma unroll
        for (int k = 0; k < PIECES_EACH; k++)
            if (first + k * PIECE_THREADS + tid < all) store_piece<VEC, T>(to + (k * PIECE_THREADS + tid) * Own::N, own[k]);
    }
    __syncthreads();
    if (tid < RANKS && tid != RANK) {
        raise((u8 *)areas[tid] + flag_at(RANK, blockIdx.x, number), number);
        await(areas, own_area + flag_at(tid, blockIdx.x, number), number);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PIECES_EACH; k++) {
        int i = first + k * PIECE_THREADS + tid;
        if (i >= all) continue;
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
            const u32 *at = (const u32 *)(own_area + pieces_at(r, blockIdx.x, number)) + (k * PIECE_THREADS + tid) * Own::N;
            put(i, r, r == RANK ? own[k].is : load_piece<VEC, T>(at).is);
        }
    }
}

// One round of a short message: piece i of this thread.
template <int VEC, class T, class Get, class Put>
DEV void exchange_words(const u64 *areas, int i, u32 number, Get get, Put put) {
    int at = threadIdx.x * 16;
    Piece<VEC, T> own;
    if constexpr (Piece<VEC, T>::SIZE < 4) own.word[0] = 0;
    own.is = get(i);
#pragma unroll
    for (int r = 0; r < RANKS; r++)
        if (r != RANK) send_words<VEC, T>((u8 *)areas[r] + words_at(RANK, blockIdx.x, number) + at, own, number);
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
        const u8 *left = (const u8 *)areas[RANK] + words_at(r, blockIdx.x, number) + at;
        put(i, r, r == RANK ? own.is : receive_words<VEC, T>(areas, left, number).is);
    }
}

// Exchanges `all` pieces of VEC elements: `get(i)` is piece i of this rank, `put(i, r, piece)` is called with that of every rank r in
// ascending order. Blocks of WORD_THREADS or, with LONG, PIECE_THREADS threads.
template <bool LONG, int VEC, class T, class Get, class Put>
DEV void exchange(const u64 *areas, int all, Get get, Put put) {
    constexpr int ROUND = LONG ? PIECE_THREADS * PIECES_EACH : WORD_THREADS;
    u32 *count = (u32 *)((u8 *)areas[RANK] + COUNTS) + (LONG ? WORD_BLOCKS : 0) + blockIdx.x;
    u32 number = *count;
    for (int first = blockIdx.x * ROUND; first < all; first += gridDim.x * ROUND) {
        // Threads without a piece in the last round must have read the one before.
        if (!LONG && first != blockIdx.x * ROUND) __syncthreads();
        number++;
        if constexpr (LONG)
            exchange_pieces<VEC, T>(areas, first, all, number, get, put);
        else if (first + (int)threadIdx.x < all)
            exchange_words<VEC, T>(areas, first + threadIdx.x, number, get, put);
    }
    __syncthreads();
    if (threadIdx.x == 0) *count = number;
}
