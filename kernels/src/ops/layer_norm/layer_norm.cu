// Layer normalisation of rows, and root-mean-square normalisation, which is the same without the mean (CENTERED false).
//
// T is the dtype of the stream: of x, the sum, and the parameters. B (BRANCH) is that of the branch: of the residual that
// comes from one, and of y, which goes into the next. It is T, or narrower, so that no cast is a pass of its own.
//
// Forward reads x and writes y once; add_forward reads x and a residual, and writes their sum and y once. Backward reads x
// and dy, and the gradient of the sum where there is one, and writes dx once, and once more as the branch's gradient where
// that is narrower; each block walks down some rows and keeps their part of the sums over rows (dweight, dbias) in
// registers, a column a thread; `sums` adds the blocks' parts in their order. How many blocks there are depends on the
// shape alone.

typedef BRANCH B;
typedef RowsOf<B> BranchRows;
typedef LineOf<B> BranchLine;

constexpr int STATS = CENTERED ? 3 : 1;

DEVICE Standard load_standard(const W* stats) {
    return CENTERED ? Standard{stats[0], stats[1], stats[2]} : Standard{0, 0, stats[0]};
}

// The row's result, to `y`, and its numbers.
template <typename L>
DEVICE void normalise(B* y, W* stats, const L& line, u64 row, const T* weight, const T* bias, f64 eps, f64 share) {
    const i64 width = line.width;
    const T zero = narrow<T>(W(0));
    W variance;
    const Standard standard = standard_of<CENTERED>(line, eps, share, variance);
    if (team_rank() == 0) {
        W* kept = stats + row * STATS;
        if (CENTERED) {
            kept[0] = standard.high;
            kept[1] = standard.low;
        }
        kept[STATS - 1] = standard.inverse;
    }
    B* const to = y + row * width;
    each_packet(width, [&](int i, i64 at) {
        const Packet<T> p = line.packet(i, at);
        Packet<T> w, b;
        PacketOf<B> q;
        if (weight) w = read_packet(weight, at, width, zero);
        if (bias) b = read_packet(bias, at, width, zero);
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            W x = standard.of(widen(p.at[j]));
            if (weight) x *= widen(w.at[j]);
            if (bias) x += widen(b.at[j]);
            q.at[j] = narrow<B>(x);
        }
        write_packet(to, at, width, q);
    });
}

TEAM_KERNEL forward(B* y, W* stats, Rows x, const T* weight, const T* bias, f64 eps, f64 share, u64 rows, u64 width) {
    const u64 row = team_row();
    if (row >= rows) return;
    normalise(y, stats, Line(x, row, width, narrow<T>(W(0))), row, weight, bias, eps, share);
}

// The sum of two rows, rounded, as a Line.
struct SumLine {
    Line x;
    const B* residual;
    const i64 width;

    DEVICE SumLine(const Rows& x, const BranchRows& residual, u64 row, i64 width)
        : x(x, row, width, narrow<T>(W(0))), residual(residual.data + row * residual.stride), width(width) {
        if constexpr (PACKETS > 0) each_packet(width, [&](int i, i64 at) { this->x.kept[i] = sum(i, at); });
    }

    DEVICE Packet<T> sum(int i, i64 at) const {
        Packet<T> p = x.packet(i, at);
        const PacketOf<B> q = read_packet(residual, at, width, narrow<B>(0));
#pragma unroll
        for (int j = 0; j < LEN; j++) p.at[j] = narrow<T>(widen(p.at[j]) + widen(q.at[j]));
        return p;
    }

    DEVICE Packet<T> packet(int i, i64 at) const { return PACKETS > 0 ? x.packet(i, at) : sum(i, at); }
};

TEAM_KERNEL add_forward(B* y, W* stats, Rows x, BranchRows residual, T* sum, const T* weight, const T* bias, f64 eps, f64 share, u64 rows, u64 width) {
    const u64 row = team_row();
    if (row >= rows) return;
    const SumLine line(x, residual, row, width);
    each_packet(width, [&](int i, i64 at) { write_packet(sum + row * width, at, width, line.packet(i, at)); });
    normalise(y, stats, line, row, weight, bias, eps, share);
}

// The weights of a block's rows in shared memory, where they have room there; 1 where there are none, and 0 beyond a row.
constexpr bool SHARES_WEIGHTS = PACKETS > 0 && KEPT * TEAM * LEN * sizeof(T) <= 32 << 10;
struct alignas(16) SharedWeights {
    T at[SHARES_WEIGHTS ? KEPT * TEAM * LEN : 1];

    DEVICE void fill(const T* weight, i64 width) {
        for (i64 i = threadIdx.x; i < KEPT * TEAM * LEN; i += THREADS)
            at[i] = i >= width ? narrow<T>(W(0)) : weight ? weight[i] : narrow<T>(W(1));
        __syncthreads();
    }
};

// dx = (g - mean(g) - xhat mean(g xhat)) inverse with g = dy w, and `dsum` added if it is not null; without the first
// mean if not CENTERED. Written to dx, to the branch's gradient, or to both.
DEVICE void input_gradient(T* dx, B* dbranch, const Line& x, const BranchLine& dy, const T* dsum, const T* weight,
                           const SharedWeights& shared, const Standard& standard) {
    const i64 width = x.width;
    const T zero = narrow<T>(W(0));
    Packet<T> kept[KEPT];
    if constexpr (PACKETS > 0)
        if (dsum) read_packets(kept, dsum, width, zero);
    const auto gradient = [&](int i, i64 at, W (&g)[LEN]) {
        const PacketOf<B> q = dy.packet(i, at);
        Packet<T> w;
        if (SHARES_WEIGHTS) w = *(const Packet<T>*)(shared.at + at);
        else if (weight) w = read_packet(weight, at, width, zero);
#pragma unroll
        for (int j = 0; j < LEN; j++) g[j] = SHARES_WEIGHTS || weight ? widen(q.at[j]) * widen(w.at[j]) : widen(q.at[j]);
    };
    W sum = 0, product = 0;
    each_packet(width, [&](int i, i64 at) {
        const Packet<T> p = x.packet(i, at);
        W g[LEN];
        gradient(i, at, g);
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            sum += g[j];
            product += g[j] * standard.of(widen(p.at[j]));
        }
    });
    const W mean = CENTERED ? team_sum(sum) / W(width) : W(0);
    product = team_sum(product) / W(width);
    each_packet(width, [&](int i, i64 at) {
        Packet<T> p = x.packet(i, at);
        PacketOf<B> q;
        W g[LEN];
        gradient(i, at, g);
        Packet<T> beside;
        if (dsum) beside = PACKETS > 0 ? kept[i] : read_packet(dsum, at, width, zero);
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            W slope = (g[j] - mean - standard.of(widen(p.at[j])) * product) * standard.inverse;
            if (dsum) slope += widen(beside.at[j]);
            p.at[j] = narrow<T>(slope);
            q.at[j] = narrow<B>(slope);
        }
        if (dx) write_packet(dx, at, width, p);
        if (dbranch) write_packet(dbranch, at, width, q);
    });
}

// What a thread has of the sums over rows.
struct Sums {
    W dw[KEPT][LEN], db[KEPT][LEN];

    DEVICE void add(const Line& x, const BranchLine& dy, const Standard& standard) {
        each_packet(x.width, [&](int i, i64 at) {
            const Packet<T> p = x.packet(i, at);
            const PacketOf<B> q = dy.packet(i, at);
#pragma unroll
            for (int j = 0; j < LEN; j++) {
                const W g = widen(q.at[j]);
                dw[i][j] += g * standard.of(widen(p.at[j]));
                db[i][j] += g;
            }
        });
    }
};

// The block's teams' sums together, into `to`.
DEVICE void store_sums(W* to, const W (&sums)[KEPT][LEN], i64 width) {
    __shared__ W parts[TEAMS][TEAM * LEN];
    each_packet((i64)KEPT * TEAM * LEN, [&](int i, i64 at) {
        const int team = TEAM == 32 ? warp_number() : 0, place = team_rank() * LEN;
#pragma unroll
        for (int j = 0; j < LEN; j++) parts[team][place + j] = sums[i][j];
        __syncthreads();
        for (int k = threadIdx.x; k < TEAM * LEN; k += THREADS) {
            W sum = 0;
            for (int t = 0; t < TEAMS; t++) sum += parts[t][k];
            const i64 column = (i64)i * TEAM * LEN + k;
            if (column < width) to[column] = sum;
        }
        __syncthreads();
    });
}

// A block takes the rows `rows_a_block` long from its own on; `parts` holds its sums: dweight's `width`, then dbias's.
TEAM_KERNEL backward(T* dx, B* dbranch, W* parts, Rows x, BranchRows dy, Rows dsum, const T* weight, const W* stats, u64 rows_a_block, u64 rows, u64 width) {
    const T zero = narrow<T>(W(0));
    const u64 first = blockIdx.x * rows_a_block, end = min(first + rows_a_block, rows);
    Sums sums = {};
    __shared__ SharedWeights weights;
    if (SHARES_WEIGHTS) weights.fill(weight, width);
    for (u64 row = first + (TEAM == 32 ? warp_number() : 0); row < end; row += TEAMS) {
        const Line values(x, row, width, zero);
        const BranchLine slopes(dy, row, width, narrow<B>(0));
        const Standard standard = load_standard(stats + row * STATS);
        const T* beside = dsum.data ? dsum.data + row * dsum.stride : nullptr;
        T* const to = dx ? dx + row * width : nullptr;
        B* const to_branch = dbranch ? dbranch + row * width : nullptr;
        if (to || to_branch) input_gradient(to, to_branch, values, slopes, beside, weight, weights, standard);
        if constexpr (PACKETS > 0)
            if (parts) sums.add(values, slopes, standard);
    }
    if constexpr (PACKETS > 0) {
        if (!parts) return;
        W* const own = parts + (u64)blockIdx.x * 2 * width;
        store_sums(own, sums.dw, width);
        store_sums(own + width, sums.db, width);
    }
}

// `parts` for rows that no team can keep: a thread a column.
extern "C" __global__ void __launch_bounds__(256)
    columns(W* parts, Rows x, BranchRows dy, const W* stats, u64 rows_a_block, u64 rows, u64 width) {
    const u64 first = blockIdx.x * rows_a_block, end = min(first + rows_a_block, rows);
    const u64 column = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= width) return;
    W dw = 0, db = 0;
    for (u64 row = first; row < end; row++) {
        const W g = widen(dy.data[row * dy.stride + column]);
        dw += g * load_standard(stats + row * STATS).of(widen(x.data[row * x.stride + column]));
        db += g;
    }
    parts[(u64)blockIdx.x * 2 * width + column] = dw;
    parts[(u64)blockIdx.x * 2 * width + width + column] = db;
}

// The parts of all blocks, added in f64: eight threads a column.
extern "C" __global__ void __launch_bounds__(256) sums(T* dw, T* db, const W* parts, u64 blocks, u64 width) {
    __shared__ f64 shared[8][32];
    const u64 column = (u64)blockIdx.x * 32 + lane_number();
    f64 sum = 0;
    if (column < 2 * width)
        for (u64 b = warp_number(); b < blocks; b += 8) sum += parts[b * 2 * width + column];
    shared[warp_number()][lane_number()] = sum;
    __syncthreads();
    if (warp_number() > 0 || column >= 2 * width) return;
    for (int w = 1; w < 8; w++) sum += shared[w][lane_number()];
    T* const to = column < width ? dw : db;
    if (to) to[column % width] = narrow<T>(W(sum));
}
