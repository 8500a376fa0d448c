// Tiles of attention on warpgroups: shared memory that boxes are copied to, and a warpgroup's 64 rows against a tile.
//
// A tile's rows are HEAD = 64 or 128 elements, in one or two pieces of 64 columns side by side. What a tensor lacks, rows or
// columns, are zeros.

static_assert((HEAD == 64 || HEAD == 128) && sizeof(T) == 2 && PACKETS && !BIASED && !DROPOUT && !SLOPES, "plain attention");

constexpr int PIECES = HEAD / 64;
constexpr int PIECE_PITCH = 128;  // bytes from row to row of a piece

template <int ROWS> struct Tile {
    u8 pieces[PIECES][ROWS * PIECE_PITCH];

    DEVICE u32 address() const { return shared_address(pieces); }

    // Starts copying rows `first ..` of a head; they arrive at the barrier, which expects them.
    DEVICE void copy(const TensorMap& map, u32 barrier, int first, int head, int item) const {
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
            copy_box(address() + piece * ROWS * PIECE_PITCH, map, barrier, piece * 64, first, head, item);
    }

    // Rows `first ..` (a multiple of 8), for `store_rows`.
    struct Rows {
        u8* tile;
        int first;

        DEVICE u8* operator()(int row, int byte) const {
            return tile + byte / PIECE_PITCH * (ROWS * PIECE_PITCH) + (first + row) * PIECE_PITCH +
                   (byte % PIECE_PITCH ^ row % 8 * 16);
        }
    };
    DEVICE Rows rows(int first) { return {(u8*)pieces, first}; }
};

// c (64 x 8 N) = 64 rows from `a` on, of a tile of `A_ROWS`, times the transpose of 8 N rows of a tile of `B_ROWS`; over depth.
template <int A_ROWS, int B_ROWS, int N> DEVICE void start_products(f32 (&c)[N][4], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const u32 piece = step / 4, column = step % 4 * 32;
        const u64 left = matrix_at(a + piece * A_ROWS * PIECE_PITCH + column);
        const u64 right = matrix_at(b + piece * B_ROWS * PIECE_PITCH + column);
        if (step == 0) multiply_rows<true>(c, left, right, false);
        else multiply_rows(c, left, right, true);
    }
}

// Numbers of a warp's 16 rows as an operand: those of 16 columns together.
template <int N> DEVICE void narrow_rows(u32 (&a)[N / 2][4], const f32 (&x)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[k][i] = narrow2<T>(x[2 * k + i / 2][i % 2 * 2], x[2 * k + i / 2][i % 2 * 2 + 1]);
}

// c (64 x HEAD) += a (64 x 16 K) times 16 K rows from `b` on, of a tile of `B_ROWS`.
template <int B_ROWS, int K> DEVICE void start_add_products(f32 (&c)[CHUNKS][4], const u32 (&a)[K][4], u32 b) {
#pragma unroll
    for (int k = 0; k < K; k++)
        multiply_columns(c, a[k], matrix_at(b + k * 16 * PIECE_PITCH, B_ROWS * PIECE_PITCH));
}

// Two barriers for a tile that is copied again and again: it is here, and no warp reads it any more.
struct Turn {
    u64 full, free;

    // `writers` threads arrive when they have written or begun to copy, `warps` when they have read.
    DEVICE void init(int writers, int warps) {
        barrier_init(shared_address(&full), writers);
        barrier_init(shared_address(&free), warps);
    }
};

// The place of a tile in a ring of `STAGES`, and how often the ring has come round.
template <int STAGES> struct Ring {
    int stage = 0, parity = 0;

    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    DEVICE void wait_free(Turn (&turns)[STAGES]) const { barrier_wait(shared_address(&turns[stage].free), parity ^ 1); }
    DEVICE void wait_full(Turn (&turns)[STAGES]) const { barrier_wait(shared_address(&turns[stage].full), parity); }
    // Of a warp that has waited for its products.
    DEVICE void release(Turn (&turns)[STAGES]) const {
        if (lane_number() == 0) barrier_arrive(shared_address(&turns[stage].free));
    }
};
