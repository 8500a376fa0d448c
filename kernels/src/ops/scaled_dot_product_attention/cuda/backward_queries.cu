// Attention's backward pass on tensor cores, queries' part: dq, and the scores' gradient if it is wanted. The formulas and
// the reason for a pass of its own are backward_keys.cu's.
//
// Parallel: as forward.cu, 128 queries a block and 32 a warp, which loop over the keys they see, 32 at a time: ds is at
// once the operand of dq. Each fragment of keys and values feeds four matrix instructions.
//
// Bytes: queries and dy read once, dq written once; keys and values come from the cache: 4 D bytes each for 128 queries
// and 768 D operations: 192 operations a byte. The scores' gradient, if wanted, is T x S and written once.
//
// Shared memory: 128 rows of queries and dy, 2 x 64 of keys and values (72 KiB at depth 64; 2 x 32, 102 KiB, at 128).
//
// Source: Dao: FlashAttention-2 (2023).

// Sizes that registers suffice for, with what masks and the rest take of them.
constexpr bool PLAIN = !BIASED && DROPOUT == 0 && SLOPES == 0 && PACKETS;

constexpr int M = PLAIN || HEAD <= 64 ? 2 : 1, THREADS = 128, QUERIES = THREADS / 32 * 16 * M;
constexpr int STAGE = HEAD <= 64 ? 64 : 32;  // keys that are copied at a time,
constexpr int KEYS = HEAD <= (CUT ? 64 : 112) && !SLOPES ? 32 : 16;  // and worked on at a time
constexpr int N = KEYS / 8;

struct Shared {
    u8 queries[QUERIES * PITCH];
    u8 dy[QUERIES * PITCH];
    u8 keys[2][STAGE * PITCH];
    u8 values[2][STAGE * PITCH];
#if DROPOUT
    u32 kept[QUERIES][STAGE / 32];
#endif
};
static_assert(QUERIES == BLOCK_ROWS && THREADS == BLOCK_THREADS && sizeof(Shared) == BLOCK_BYTES, "as launched");

// dy vᵀ becomes ds; `kept` has a row of words a query.
DEVICE void differentiate(f32 (&ds)[M][N][4], const f32 (&s)[M][N][4], const f32 (&delta)[M][2], const Problem& p,
                          const Place& at, const u32* kept, int query, int key) {
    const int g = lane_number() / 4, t = lane_number() % 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = m * 16 + i / 2 * 8 + g, number = query + row, column = key + n * 8 + 2 * t + i % 2;
                f32 slope = ds[m][n][i];
#if DROPOUT
                slope *= kept[row * (STAGE / 32)] >> column % 32 & 1 ? (f32)p.keep_scale : 0;
#endif
                ds[m][n][i] = s[m][n][i] * (slope - delta[m][i / 2]);
#if SLOPES
                if (number < p.queries && column < p.keys)
                    p.slopes[(((i64)at.item * p.heads + at.head) * p.queries + number) * p.keys + column] = ds[m][n][i];
#endif
            }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_backward_queries(const __grid_constant__ Problem p) {
    DYNAMIC_SHARED(bytes);
    Shared& shared = *(Shared*)bytes;
    const int blocks = blocks_of(p.queries, QUERIES);
    const Place at = place_of_block(p.heads, blocks);
    const int first = (blocks - 1 - at.block) * QUERIES, my_row = my_warp() * 16 * M, mine = first + my_row;
    // The scores' gradient is wanted of hidden keys too.
    const int end = SLOPES ? p.keys : p.keys_before(first + QUERIES), tiles = blocks_of(end, STAGE);
    const int start = SLOPES ? 0 : first_key(p, at.item, at.head, first) / STAGE;
    const T* keys = p.key.at(at.item, at.head / p.group);
    const T* values = p.value.at(at.item, at.head / p.group);
    auto load_keys = [&](int tile) {
        load_tile<STAGE, THREADS>(shared.keys[tile & 1], keys, p.key.row, tile * STAGE, end, p.depth);
        load_tile<STAGE, THREADS>(shared.values[tile & 1], values, p.value.row, tile * STAGE, end, p.value_depth);
        copy_async_commit();
    };

    load_tile<QUERIES, THREADS>(shared.queries, p.query.at(at.item, at.head), p.query.row, first, p.queries, p.depth);
    load_tile<QUERIES, THREADS>(shared.dy, p.dy.at(at.item, at.head), p.dy.row, first, p.queries, p.value_depth);
    copy_async_commit();
    if (tiles > start) load_keys(start);
    u8* my_queries = shared.queries + my_row * PITCH;
    Left<M, false> queries, dy;
    queries.open(shared_address(my_queries));
    dy.open(shared_address(shared.dy + my_row * PITCH));
    f32 dq[M][CHUNKS][4], logsumexp[M][2], delta[M][2];
    clear(dq);
#pragma unroll
    for (int m = 0; m < M; m++) load_sums(logsumexp[m], delta[m], p, at, mine + m * 16 + lane_number() / 4);
#pragma unroll 1
    for (int tile = start; tile < tiles; tile++) {
        copy_async_wait<0>();
        __syncthreads();  // this tile is here, and no thread reads the one before
        if (tile + 1 < tiles) load_keys(tile + 1);
#if DROPOUT
        draw_tile<QUERIES, STAGE>(&shared.kept[0][0], p, at.item, at.head, first, tile * STAGE);
        __syncthreads();
        const u32* kept = shared.kept[my_row];
#else
        const u32* kept = nullptr;
#endif
#pragma unroll 1
        for (int local = 0; local < STAGE; local += KEYS) {
            const int key = tile * STAGE + local;
            if (key >= end || (!SLOPES && p.causal && key >= mine + 16 * M)) continue;
            if (CUT && !SLOPES && key + KEYS <= first_key(p, at.item, at.head, mine)) continue;
            const u32 key_rows = shared_address(shared.keys[tile & 1]) + local * PITCH;
            f32 s[M][N][4], ds[M][N][4];
            products(s, queries, key_rows);
            products(ds, dy, shared_address(shared.values[tile & 1]) + local * PITCH);
            probabilities(s, logsumexp, p, at, mine, key);
            differentiate(ds, s, delta, p, at, kept + local / 32, mine, key);
            add_products(dq, ds, key_rows);
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    f32 scale[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) scale[m][0] = scale[m][1] = (f32)p.scale;
    if (p.dquery.data)
        store_rows(dq, scale, TileRows{my_queries}, p.dquery.at(at.item, at.head), p.dquery.row, mine, p.queries, p.depth);
}
