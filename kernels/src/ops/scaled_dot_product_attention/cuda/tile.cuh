// Tiles of attention on tensor cores: a warp's 16 M rows against a tile of columns in shared memory.
//
// A tile's rows are HEAD elements and 16 bytes more: an odd number of 16-byte chunks, so that the eight rows that a
// phase of ldmatrix reads lie in different banks, and every address is a lane's base plus a constant (a swizzle by XOR
// would be as free of conflicts, but costs an instruction per load). Fragments are those of the prelude.

static_assert(sizeof(T) == 2 && HEAD % 16 == 0, "tensor cores want 16-bit types and depths of whole steps");

constexpr int PITCH = HEAD * 2 + 16;  // bytes from row to row
constexpr int CHUNKS = HEAD / 8;      // 16-byte chunks of a row
constexpr int STEPS = HEAD / 16;      // depth of a matrix instruction

// The part of a fragment's address that depends on the lane: A's rows or transposed B's (16 x 16), and B's (16 columns
// by 16 deep, as rows of the tile).
DEVICE u32 lane_as_rows() { return (lane_number() & 15) * PITCH + (lane_number() >> 4) * 16; }
DEVICE u32 lane_as_columns() {
    return ((lane_number() & 7) + (lane_number() >> 4) * 8) * PITCH + (lane_number() >> 3 & 1) * 16;
}

// This warp's number. Comes from a shuffle so that the compiler knows it to be one for the whole warp, and branches on it
// to be no divergence.
DEVICE int my_warp() { return __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0); }

DEVICE f32 exp2_fast(f32 x) {
    f32 y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Starts copying rows `first ..` of a head into a tile of `ROWS` rows; zeros from row `end` and column `columns` on.
template <int ROWS, int THREADS>
DEVICE void load_tile(u8* tile, const T* head, i64 row_stride, int first, int end, int columns) {
    if (PACKETS) {
        // A thread copies the same chunk of each `RUN`th row: one pointer, and nothing else to keep.
        constexpr int RUN = THREADS / CHUNKS;
        const int mine = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * 8;
        const int rows = column < columns ? end - first - mine : 0;
        const u32 to = shared_address(tile) + mine * PITCH + column * 2;
        const T* from = head + (first + mine) * row_stride + column;
#pragma unroll
        for (int row = 0; row < ROWS; row += RUN) {
            if ((THREADS % CHUNKS == 0 || mine < RUN) && (ROWS % RUN == 0 || row + mine < ROWS))
                copy_async16(to + row * PITCH, from, row < rows);
            from += RUN * row_stride;
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * HEAD; i += THREADS) {
            const int row = i / HEAD, column = i % HEAD;
            const bool valid = first + row < end && column < columns;
            *(T*)(tile + row * PITCH + column * 2) = valid ? head[(first + row) * row_stride + column] : narrow<T>(0);
        }
    }
}

// A operands of a warp's rows at all depths: in registers, or read when wanted where these do not suffice.
template <int M, bool HELD> struct Left {
    u32 held[HELD ? STEPS : 1][M][4];
    u32 from;

    // `rows` is the address of the warp's first row; the tile has arrived.
    DEVICE void open(u32 rows) {
        from = rows + lane_as_rows();
        if (HELD) {
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int m = 0; m < M; m++) load_matrices<false>(held[step][m], from + m * 16 * PITCH + step * 32);
        }
    }
    DEVICE void read(u32 (&a)[4], int m, int step) const {
        if (HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = held[HELD ? step : 0][m][i];
        } else {
            load_matrices<false>(a, from + m * 16 * PITCH + step * 32);
        }
    }
};

// c (16 M x 8 N) = left (16 M x HEAD) times the transpose of the 8 N rows at `right`. `UNROLL` bounds how many steps are
// in the air together, and with them the registers.
template <int UNROLL = STEPS, int M, int N, bool HELD>
DEVICE void products(f32 (&c)[M][N][4], const Left<M, HELD>& left, u32 right) {
    right += lane_as_columns();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0;
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; step++) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) left.read(a[m], m, step);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_matrices<false>(b, right + n * 8 * PITCH + step * 32);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(c[m][n], a[m], b[0], b[1]);
                multiply_add<T>(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// c (16 M x HEAD) += x (16 M x 8 N), rounded to T, times the 8 N rows at `right`.
template <int M, int N> DEVICE void add_products(f32 (&c)[M][CHUNKS][4], const f32 (&x)[M][N][4], u32 right) {
    right += lane_as_rows();
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = narrow2<T>(x[m][k + i / 2][i % 2 * 2], x[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < CHUNKS; n += 2) {
            u32 b[4];
            load_matrices<true>(b, right + k * 8 * PITCH + n * 16);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(c[m][n], a[m], b[0], b[1]);
                multiply_add<T>(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <int M> DEVICE void clear(f32 (&c)[M][CHUNKS][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < CHUNKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0;
}

// Writes a warp's rows, each times its factor (two a thread and 16 rows: g and g + 8), as rows `first ..` of a head,
// through 16 M rows of shared memory, which no other warp uses: `at` gives the address of a byte of a row.
template <int M, typename At>
DEVICE void store_rows(const f32 (&c)[M][CHUNKS][4], const f32 (&factor)[M][2], At at, T* head, i64 row_stride, int first,
                       int end, int columns) {
    const int lane = lane_number();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < CHUNKS; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(u32*)at(m * 16 + half * 8 + lane / 4, n * 16 + lane % 4 * 4) =
                    narrow2<T>(c[m][n][half * 2] * factor[m][half], c[m][n][half * 2 + 1] * factor[m][half]);
    __syncwarp();
#pragma unroll 1
    for (int chunk = lane; chunk < 16 * M * CHUNKS; chunk += 32) {
        const int row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        if (first + row >= end) break;
        const Packet<T> x = *(const Packet<T>*)at(row, column * 2);
        T* to = head + (first + row) * row_stride + column;
        if (PACKETS) {
            if (column < columns) store(to, x);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (column + i < columns) to[i] = x.at[i];
        }
    }
}

// Rows of a tile, for `store_rows`.
struct TileRows {
    u8* rows;

    DEVICE u8* operator()(int row, int byte) const { return rows + row * PITCH + byte; }
};

// What makes probabilities again in the backward pass.
struct Score {
    f32 unit;  // of a product, to exponents of 2

    DEVICE explicit Score(const Problem& p) : unit((f32)p.scale * (f32)LOG2_E) {}

    DEVICE f32 probability(f32 product, f32 logsumexp, const Problem& p, const Place& at, int query, int key) const {
        f32 score = product * unit - logsumexp;
        if (BIASED) score += (f32)LOG2_E * bias_at(p, at.item, at.head, query, key);
        return exp2_fast(score);
    }
};
