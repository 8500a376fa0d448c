// Attention for what tensor cores do not take: f32 and f64 in their own arithmetic, and depths beyond 128. The same
// algorithm, tiles and kernels as forward.cu and backward_*.cu, with multiply-adds instead of matrix instructions.
//
// Parallel: a block of 16 x 16 threads works on tiles of ROWS x ROWS scores: thread (x, y) has the R x R of rows y + 16 i
// and columns x + 16 j, and of sums over a tile the rows y + 16 i and every 16th packet of columns. Tiles of shared
// memory have rows of HEAD elements and a packet more, an odd number of packets: 16-byte reads without conflicts.
//
// Bytes: as there; tiles of 64 rows at f32 (32 at f64), narrower ones for depths whose tiles would not fit. An R x R
// block of scores does R² multiply-adds for 2 R elements read from shared memory: 4 fused multiply-adds per element
// and 16 bytes a read, so arithmetic is what limits f32.
//
// All sums are chains of fused multiply-adds over ascending depths, keys or queries.

constexpr int LEN = Packet<W>::LEN;
constexpr int R_MAX = sizeof(W) == 8 ? 2 : 4, R_FIT = 2048 / (HEAD * (int)sizeof(W));
constexpr int R = R_FIT < 1 ? 1 : R_FIT < R_MAX ? R_FIT : R_MAX;
constexpr int ROWS = 16 * R, THREADS = 256;
constexpr int PITCH = HEAD + LEN, SCORES_PITCH = ROWS + LEN;
constexpr int PACKETS_MINE = HEAD / 16 / LEN, COLUMNS = PACKETS_MINE * LEN;
static_assert(HEAD % (16 * LEN) == 0, "each thread has whole packets of columns");

typedef W Tile[ROWS][PITCH];
typedef W Scores[ROWS][SCORES_PITCH];
typedef u32 Kept[ROWS][(ROWS + 31) / 32];

DEVICE int mine_x() { return threadIdx.x % 16; }
DEVICE int mine_y() { return threadIdx.x / 16; }

// Rows `first ..` of a head, widened; zeros from row `end` and column `columns` on.
DEVICE void load_tile(Tile& tile, const T* head, i64 row_stride, int first, int end, int columns) {
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * HEAD; i += THREADS) {
        const int row = i / HEAD, column = i % HEAD;
        const bool valid = first + row < end && column < columns;
        tile[row][column] = valid ? widen(head[(first + row) * row_stride + column]) : W(0);
    }
}

// s = the inner products of a's rows y + 16 i and b's rows x + 16 j.
DEVICE void products(W (&s)[R][R], const Tile& a, const Tile& b) {
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < R; j++) s[i][j] = 0;
#pragma unroll 2
    for (int d = 0; d < HEAD; d += LEN) {
        Packet<W> left[R], right[R];
#pragma unroll
        for (int i = 0; i < R; i++) {
            left[i] = load(&a[mine_y() + 16 * i][d]);
            right[i] = load(&b[mine_x() + 16 * i][d]);
        }
#pragma unroll
        for (int n = 0; n < LEN; n++)
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int j = 0; j < R; j++) s[i][j] = fma(left[i].at[n], right[j].at[n], s[i][j]);
    }
}

DEVICE void put(Scores& to, const W (&s)[R][R]) {
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < R; j++) to[mine_y() + 16 * i][mine_x() + 16 * j] = s[i][j];
}

// sum += x's rows y + 16 i times b's rows, in this thread's columns.
DEVICE void add_products(W (&sum)[R][COLUMNS], const Scores& x, const Tile& b) {
#pragma unroll 1
    for (int row = 0; row < ROWS; row += LEN) {
        Packet<W> left[R];
#pragma unroll
        for (int i = 0; i < R; i++) left[i] = load(&x[mine_y() + 16 * i][row]);
#pragma unroll
        for (int n = 0; n < LEN; n++)
#pragma unroll
            for (int packet = 0; packet < PACKETS_MINE; packet++) {
                const Packet<W> right = load(&b[row + n][(packet * 16 + mine_x()) * LEN]);
#pragma unroll
                for (int i = 0; i < R; i++)
#pragma unroll
                    for (int c = 0; c < LEN; c++) {
                        W& to = sum[i][packet * LEN + c];
                        to = fma(left[i].at[n], right.at[c], to);
                    }
            }
    }
}

DEVICE void clear(W (&sum)[R][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[i][c] = 0;
}

// Writes rows y + 16 i, each times its factor, as rows `first ..` of a head.
DEVICE void store_rows(const W (&sum)[R][COLUMNS], const W (&factor)[R], T* head, i64 row_stride, int first, int end,
                       int columns) {
#pragma unroll
    for (int i = 0; i < R; i++) {
        const int row = first + mine_y() + 16 * i;
        if (row >= end) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int column = (c / LEN * 16 + mine_x()) * LEN + c % LEN;
            if (column < columns) head[row * row_stride + column] = narrow<T>(sum[i][c] * factor[i]);
        }
    }
}

DEVICE W score_of(const Problem& p, W product, const Place& at, int query, int key) {
    if (key >= p.keys_before(query + 1) || key < first_key(p, at.item, at.head, query)) return least<W>();
    return product * (W)p.scale + bias_at(p, at.item, at.head, query, key);
}

// The dropout's factor of a query and a key, counted from the tile's first.
DEVICE W keep_of(const Problem& p, const Kept& kept, int query, int key) {
    return !DROPOUT || (kept[query][key / 32] >> key % 32 & 1) ? (DROPOUT ? (W)p.keep_scale : W(1)) : W(0);
}

// ---- Forward ----

struct ForwardShared {
    Tile queries, keys, values;
    Scores scores;
    Kept kept;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ Problem p) {
    DYNAMIC_SHARED(bytes);
    ForwardShared& shared = *(ForwardShared*)bytes;
    const int blocks = blocks_of(p.queries, ROWS);
    const Place at = place_of_block(p.heads, blocks);
    const int first = (blocks - 1 - at.block) * ROWS, end = p.keys_before(min(first + ROWS, p.queries));
    load_tile(shared.queries, p.query.at(at.item, at.head), p.query.row, first, p.queries, p.depth);
    W o[R][COLUMNS], largest[R], sum[R];
    clear(o);
#pragma unroll
    for (int i = 0; i < R; i++) {
        largest[i] = least<W>();
        sum[i] = 0;
    }
#pragma unroll 1
    for (int key = first_key(p, at.item, at.head, first) / ROWS * ROWS; key < end; key += ROWS) {
        __syncthreads();
        load_tile(shared.keys, p.key.at(at.item, at.head / p.group), p.key.row, key, end, p.depth);
        load_tile(shared.values, p.value.at(at.item, at.head / p.group), p.value.row, key, end, p.value_depth);
        if (DROPOUT) draw_tile<ROWS, ROWS>(&shared.kept[0][0], p, at.item, at.head, first, key);
        __syncthreads();
        W s[R][R];
        products(s, shared.queries, shared.keys);
#pragma unroll
        for (int i = 0; i < R; i++) {
            W high = largest[i];
#pragma unroll
            for (int j = 0; j < R; j++) {
                s[i][j] = score_of(p, s[i][j], at, first + mine_y() + 16 * i, key + mine_x() + 16 * j);
                high = Max()(high, s[i][j]);
            }
            high = warp_max<16>(high);
            // Of rows that saw nothing yet all exponentials are to be 0.
            const W base = high == least<W>() ? W(0) : high, shrink = exp(largest[i] - base);
            largest[i] = high;
            W part = 0;
#pragma unroll
            for (int j = 0; j < R; j++) {
                s[i][j] = exp(s[i][j] - base);
                part += s[i][j];
                s[i][j] *= keep_of(p, shared.kept, mine_y() + 16 * i, mine_x() + 16 * j);
            }
            sum[i] = fma(sum[i], shrink, warp_sum<16>(part));
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) o[i][c] *= shrink;
        }
        put(shared.scores, s);
        __syncthreads();
        add_products(o, shared.scores, shared.values);
    }
    W factor[R];
#pragma unroll
    for (int i = 0; i < R; i++) {
        factor[i] = sum[i] == 0 ? W(0) : 1 / sum[i];
        const int query = first + mine_y() + 16 * i;
        if (mine_x() == 0 && query < p.queries) {
            W* stats = p.stats + (((i64)at.item * p.heads + at.head) * p.queries + query) * 2;
            stats[0] = largest[i] == least<W>() ? W(0) : largest[i];
            stats[1] = factor[i];
        }
    }
    store_rows(o, factor, p.out.at(at.item, at.head), p.out.row, first, p.queries, p.value_depth);
}

// ---- Backward ----

struct BackwardShared {
    Tile queries, keys, values, dy;
    Scores scores;
    Kept kept;
};

static_assert(ROWS == BLOCK_ROWS && THREADS == BLOCK_THREADS, "as launched");
static_assert(sizeof(ForwardShared) == BLOCK_BYTES || sizeof(BackwardShared) == BLOCK_BYTES, "as launched");

// What is kept of a query; of one that is not there, zeros.
struct Kit {
    W base, inverse, delta;

    DEVICE Kit(const Problem& p, const Place& at, int query) : base(0), inverse(0), delta(0) {
        if (query >= p.queries) return;
        const i64 rows = (i64)p.batches * p.heads * p.queries;
        const i64 row = ((i64)at.item * p.heads + at.head) * p.queries + query;
        base = p.stats[row * 2];
        inverse = p.stats[row * 2 + 1];
        delta = p.sums[rows + row];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_keys(const __grid_constant__ Problem p) {
    DYNAMIC_SHARED(bytes);
    BackwardShared& shared = *(BackwardShared*)bytes;
    const Place at = place_of_block(p.heads / p.group, blocks_of(p.keys, ROWS));
    const int first = at.block * ROWS;
    load_tile(shared.keys, p.key.at(at.item, at.head), p.key.row, first, p.keys, p.depth);
    load_tile(shared.values, p.value.at(at.item, at.head), p.value.row, first, p.keys, p.value_depth);
    W dk[R][COLUMNS], dv[R][COLUMNS];
    clear(dk);
    clear(dv);
#pragma unroll 1
    for (int member = 0; member < p.group; member++) {
        const Place from = {at.item, at.head * p.group + member, 0};
#pragma unroll 1
        for (int query = p.causal ? first : 0; query < p.queries; query += ROWS) {
            if (CUT && first_key(p, from.item, from.head, query) >= first + ROWS) break;
            __syncthreads();
            load_tile(shared.queries, p.query.at(from.item, from.head), p.query.row, query, p.queries, p.depth);
            load_tile(shared.dy, p.dy.at(from.item, from.head), p.dy.row, query, p.queries, p.value_depth);
            if (DROPOUT) draw_tile<ROWS, ROWS>(&shared.kept[0][0], p, from.item, from.head, query, first);
            __syncthreads();
            W s[R][R], ds[R][R];
            products(s, shared.keys, shared.queries);
            products(ds, shared.values, shared.dy);
#pragma unroll
            for (int j = 0; j < R; j++) {
                const int column = mine_x() + 16 * j;
                const Kit kit(p, from, query + column);
#pragma unroll
                for (int i = 0; i < R; i++) {
                    const int row = mine_y() + 16 * i;
                    const W keep = keep_of(p, shared.kept, column, row);
                    const W x = exp(score_of(p, s[i][j], from, query + column, first + row) - kit.base) * kit.inverse;
                    ds[i][j] = x * (ds[i][j] * keep - kit.delta);
                    s[i][j] = x * keep;
                }
            }
            put(shared.scores, s);
            __syncthreads();
            add_products(dv, shared.scores, shared.dy);
            __syncthreads();
            put(shared.scores, ds);
            __syncthreads();
            add_products(dk, shared.scores, shared.queries);
        }
    }
    W one[R], scale[R];
#pragma unroll
    for (int i = 0; i < R; i++) {
        one[i] = 1;
        scale[i] = (W)p.scale;
    }
    if (p.dkey.data) store_rows(dk, scale, p.dkey.at(at.item, at.head), p.dkey.row, first, p.keys, p.depth);
    if (p.dvalue.data) store_rows(dv, one, p.dvalue.at(at.item, at.head), p.dvalue.row, first, p.keys, p.value_depth);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_queries(const __grid_constant__ Problem p) {
    DYNAMIC_SHARED(bytes);
    BackwardShared& shared = *(BackwardShared*)bytes;
    const int blocks = blocks_of(p.queries, ROWS);
    const Place at = place_of_block(p.heads, blocks);
    const int first = (blocks - 1 - at.block) * ROWS;
    // The scores' gradient is wanted of hidden keys too.
    const int end = SLOPES ? p.keys : p.keys_before(first + ROWS);
    load_tile(shared.queries, p.query.at(at.item, at.head), p.query.row, first, p.queries, p.depth);
    load_tile(shared.dy, p.dy.at(at.item, at.head), p.dy.row, first, p.queries, p.value_depth);
    W dq[R][COLUMNS];
    clear(dq);
#pragma unroll 1
    for (int key = SLOPES ? 0 : first_key(p, at.item, at.head, first) / ROWS * ROWS; key < end; key += ROWS) {
        __syncthreads();
        load_tile(shared.keys, p.key.at(at.item, at.head / p.group), p.key.row, key, end, p.depth);
        load_tile(shared.values, p.value.at(at.item, at.head / p.group), p.value.row, key, end, p.value_depth);
        if (DROPOUT) draw_tile<ROWS, ROWS>(&shared.kept[0][0], p, at.item, at.head, first, key);
        __syncthreads();
        W s[R][R], ds[R][R];
        products(s, shared.queries, shared.keys);
        products(ds, shared.dy, shared.values);
#pragma unroll
        for (int i = 0; i < R; i++) {
            const int row = mine_y() + 16 * i, query = first + row;
            const Kit kit(p, at, query);
#pragma unroll
            for (int j = 0; j < R; j++) {
                const int column = mine_x() + 16 * j;
                const W x = exp(score_of(p, s[i][j], at, query, key + column) - kit.base) * kit.inverse;
                ds[i][j] = x * (ds[i][j] * keep_of(p, shared.kept, row, column) - kit.delta);
#if SLOPES
                if (query < p.queries && key + column < p.keys)
                    p.slopes[(((i64)at.item * p.heads + at.head) * p.queries + query) * p.keys + key + column] = ds[i][j];
#endif
            }
        }
        put(shared.scores, ds);
        __syncthreads();
        add_products(dq, shared.scores, shared.keys);
    }
    W scale[R];
#pragma unroll
    for (int i = 0; i < R; i++) scale[i] = (W)p.scale;
    if (p.dquery.data) store_rows(dq, scale, p.dquery.at(at.item, at.head), p.dquery.row, first, p.queries, p.depth);
}
