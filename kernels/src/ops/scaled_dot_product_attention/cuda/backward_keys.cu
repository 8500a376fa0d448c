// Attention's backward pass on tensor cores, keys' part: dk and dv. Scores are made again tile by tile, and no two blocks
// add to one place.
//
// With p = exp2(s - logsumexp), k the dropout's factor, and for each query delta = sum of dy y (sums.cu):
//   dv = (p k)ᵀ dy    ds = p (k (dy vᵀ) - delta)    dk = scale dsᵀ q    dq = scale ds K (backward_queries.cu)
// The scores and dy vᵀ are thus made twice, by blocks of keys and by blocks of queries: seven products where adding to
// dq atomically takes five. It is the price of one fixed order, with the same bits every time, and without partial sums
// in memory (those would be S / 128 times dq, which costs more than the products).
//
// Parallel: a block keeps 128 keys and values, and loops over the queries that see them, of all heads that share them.
// Transposed scores, keys down and queries across, are at once the operands of dv and dk, so neither p nor ds goes
// through shared memory. Up to depth 64 four warps take 32 keys each: a fragment of queries read from shared memory
// feeds four matrix instructions in two of the four products, two in the others; above, registers hold 16 keys for each
// of eight warps. Blocks with most to do start first; what a causal mask hides is skipped, by blocks and by warps.
//
// Bytes: keys and values read once, dk and dv written once; queries and dy come from the cache: 4 D bytes each for 128
// keys and 1024 D operations: 256 operations a byte.
//
// Shared memory: 128 rows of keys and values, 2 x 64 of queries and dy (73 KiB at depth 64, 137 KiB at 128).
//
// Source: Dao: FlashAttention-2 (2023), with dq in a pass of its own.

// Sizes that registers suffice for, with what masks and the rest take of them.
constexpr bool PLAIN = !BIASED && DROPOUT == 0 && SLOPES == 0 && PACKETS;

constexpr int KEYS = 128, M = HEAD <= 64 ? 2 : 1, THREADS = KEYS / (16 * M) * 32;
constexpr int STAGE = 64;                    // queries that are copied at a time,
constexpr int QUERIES = PLAIN && !CUT ? 32 : 16;  // and worked on at a time
constexpr int N = QUERIES / 8, UNROLL = M == 2 ? 2 : STEPS;

struct Shared {
    u8 keys[KEYS * PITCH];
    u8 values[KEYS * PITCH];
    u8 queries[2][STAGE * PITCH];
    u8 dy[2][STAGE * PITCH];
    f32 sums[2][2][STAGE];  // stages of logsumexp and delta
#if DROPOUT
    u32 kept[STAGE][KEYS / 32];
#endif
};
static_assert(KEYS == BLOCK_ROWS && THREADS == BLOCK_THREADS && sizeof(Shared) == BLOCK_BYTES, "as launched");

// x times the dropout's factors; a row of words a query.
DEVICE void drop(f32 (&x)[M][N][4], const f32 (&from)[M][N][4], f32 keep_scale, const u32 (*kept)[KEYS / 32], int my_row) {
    const int g = lane_number() / 4, t = lane_number() % 4;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int bit = my_row + m * 16 + i / 2 * 8 + g;
                const u32 word = kept[n * 8 + 2 * t + i % 2][bit / 32];
                x[m][n][i] = word >> bit % 32 & 1 ? from[m][n][i] * keep_scale : 0;
            }
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD <= 64 ? 2 : 1)
    attention_backward_keys(const __grid_constant__ Problem p) {
    DYNAMIC_SHARED(bytes);
    Shared& shared = *(Shared*)bytes;
    // Under a causal mask the first keys are seen by the most queries.
    const Place at = place_of_block(p.heads / p.group, blocks_of(p.keys, KEYS));
    const int first = at.block * KEYS, my_row = my_warp() * 16 * M, mine = first + my_row;
    const int start = p.causal ? first / STAGE : 0, seeing = queries_seeing(p, at, first + KEYS);
    const int tiles = max(blocks_of(seeing, STAGE) - start, 0);
    const int steps = tiles * p.group;
    auto load_queries = [&](int step, const Place& from) {
        const int query = from.block * STAGE, stage = step & 1;
        load_tile<STAGE, THREADS>(shared.queries[stage], p.query.at(from.item, from.head), p.query.row, query, p.queries,
                                  p.depth);
        load_tile<STAGE, THREADS>(shared.dy[stage], p.dy.at(from.item, from.head), p.dy.row, query, p.queries, p.value_depth);
        if (threadIdx.x < 2 * STAGE) {
            const int which = threadIdx.x / STAGE, row = query + threadIdx.x % STAGE;
            const i64 head = (i64)which * p.batches * p.heads + from.item * p.heads + from.head;
            copy_async4(shared_address(&shared.sums[stage][0][threadIdx.x]), p.sums + head * p.queries + row, row < p.queries);
        }
        copy_async_commit();
    };

    load_tile<KEYS, THREADS>(shared.keys, p.key.at(at.item, at.head), p.key.row, first, p.keys, p.depth);
    load_tile<KEYS, THREADS>(shared.values, p.value.at(at.item, at.head), p.value.row, first, p.keys, p.value_depth);
    copy_async_commit();
    // Stages are tiles of the first head, then of the next.
    Place from = {at.item, at.head * p.group, start}, next = from;
    if (steps > 0) load_queries(0, next);
    u8* my_keys = shared.keys + my_row * PITCH;
    u8* my_values = shared.values + my_row * PITCH;
    Left<M, false> keys, values;
    keys.open(shared_address(my_keys));
    values.open(shared_address(my_values));
    f32 dk[M][CHUNKS][4], dv[M][CHUNKS][4];
    clear(dk);
    clear(dv);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        from = next;
        if (++next.block == start + tiles) next = {at.item, from.head + 1, start};
        const int stage = step & 1, query = from.block * STAGE;
        copy_async_wait<0>();
        __syncthreads();  // this stage is here, and no thread reads the one before
        if (step + 1 < steps) load_queries(step + 1, next);
#if DROPOUT
        draw_tile<STAGE, KEYS>(&shared.kept[0][0], p, from.item, from.head, query, first);
        __syncthreads();
#endif
#pragma unroll 1
        for (int local = 0; local < STAGE; local += QUERIES) {
            if (query + local >= p.queries || (p.causal && query + local + QUERIES <= mine)) continue;
            if (CUT && first_key(p, from.item, from.head, query + local) >= mine + 16 * M) continue;
            const u32 queries = shared_address(shared.queries[stage]) + local * PITCH;
            const u32 dy = shared_address(shared.dy[stage]) + local * PITCH;
            f32 s[M][N][4], ds[M][N][4];
            products<UNROLL>(s, keys, queries);
            products<UNROLL>(ds, values, dy);
            probabilities(s, p, from, shared.sums[stage][0] + local, query + local, mine);
#if DROPOUT
            drop(ds, ds, p.keep_scale, shared.kept + local, my_row);
#endif
            differentiate(ds, s, shared.sums[stage][1] + local);
            add_products(dk, ds, queries);
#if DROPOUT
            drop(s, s, p.keep_scale, shared.kept + local, my_row);
#endif
            add_products(dv, s, dy);
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    f32 one[M][2], scale[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            one[m][half] = 1;
            scale[m][half] = (f32)p.scale;
        }
    if (p.dvalue.data)
        store_rows(dv, one, TileRows{my_values}, p.dvalue.at(at.item, at.head), p.dvalue.row, mine, p.keys, p.value_depth);
    if (p.dkey.data)
        store_rows(dk, scale, TileRows{my_keys}, p.dkey.at(at.item, at.head), p.dkey.row, mine, p.keys, p.depth);
}
