// Attention's forward pass on tensor cores: y = softmax(q kᵀ scale + mask) v in tiles, with a running softmax.
//
// Parallel: a block of 4 warps takes 128 queries of one head, a warp 32 of them (two blocks of 16 rows, so that each
// fragment of keys and values read from shared memory feeds four matrix instructions: 1 cycle of shared memory for 1
// instruction, half of what the tensor cores take). Two blocks share a multiprocessor, so that one's softmax (the
// exponentials take two thirds of the matrix instructions' time at depth 64) runs beside the other's products. Under a
// causal mask blocks with more keys start first, tiles above the diagonal are skipped, and warps skip their own;
// so are tiles before the first visible key.
// The queries' fragments stay in registers up to depth 64. Scores and probabilities never leave registers.
//
// Bytes: q, k, v read and y written once from device memory as far as the cache holds a head's keys and values; from
// the cache each block reads all the keys and values it sees: 4 D bytes per key for 128 queries, 512 D operations:
// 128 operations a byte. Tiles of 64 keys are copied asynchronously, the next one while one is computed.
//
// Shared memory: 128 rows of queries, 2 x 64 of keys and of values (54 KiB at depth 64), or 2 x 32 of deeper ones
// (68 KiB at depth 128).
//
// Source: Dao: FlashAttention-2 (2023). Exponentials in base 2, log2 e being part of the scale.

// Sizes that registers suffice for, with what masks and dropout take of them. Limits of first visible keys change no tile of
// keys, so documents keep their bits.
constexpr bool PLAIN = !BIASED && DROPOUT == 0 && PACKETS;
constexpr int M = (PLAIN && !(CUT && HEAD > 112)) || HEAD <= 96 ? 2 : 1, THREADS = 128, QUERIES = THREADS / 32 * 16 * M;
constexpr int KEYS = HEAD <= (PLAIN ? 80 : 32) ? 64 : 32;
constexpr bool HELD = PLAIN && !CUT && HEAD <= 64;  // the queries' fragments
constexpr int N = KEYS / 8;

struct Shared {
    u8 queries[QUERIES * PITCH];
    u8 keys[2][KEYS * PITCH];
    u8 values[2][KEYS * PITCH];
#if DROPOUT
    u32 kept[QUERIES][KEYS / 32];
#endif
};

static_assert(QUERIES == BLOCK_ROWS && THREADS == BLOCK_THREADS && sizeof(Shared) == BLOCK_BYTES, "as launched");

// Sets to 0 what `bits` leaves out: a row of words a query, from the warp's first on.
DEVICE void drop(f32 (&s)[M][N][4], const u32 (*bits)[KEYS / 32]) {
    const int g = lane_number() / 4, t = lane_number() % 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const u32 two = bits[m * 16 + half * 8 + g][n / 4] >> (n % 4 * 8 + 2 * t);
                if (!(two & 1)) s[m][n][half * 2] = 0;
                if (!(two & 2)) s[m][n][half * 2 + 1] = 0;
            }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_forward(const __grid_constant__ Problem p) {
    DYNAMIC_SHARED(bytes);
    Shared& shared = *(Shared*)bytes;
    const int blocks = blocks_of(p.queries, QUERIES);
    const Place at = place_of_block(p.heads, blocks);
    // Under a causal mask the last block has the most keys.
    const int first = (blocks - 1 - at.block) * QUERIES, my_row = my_warp() * 16 * M, mine = first + my_row;
    const int end = p.keys_before(first + QUERIES), tiles = blocks_of(end, KEYS);
    const int start = first_key(p, at.item, at.head, first) / KEYS;
    const T* keys = p.key.at(at.item, at.head / p.group);
    const T* values = p.value.at(at.item, at.head / p.group);
    auto load_keys = [&](int tile) {
        load_tile<KEYS, THREADS>(shared.keys[tile & 1], keys, p.key.row, tile * KEYS, end, p.depth);
        load_tile<KEYS, THREADS>(shared.values[tile & 1], values, p.value.row, tile * KEYS, end, p.value_depth);
        copy_async_commit();
    };

    load_tile<QUERIES, THREADS>(shared.queries, p.query.at(at.item, at.head), p.query.row, first, p.queries, p.depth);
    copy_async_commit();
    if (tiles > start) load_keys(start);
    if (tiles > start) copy_async_wait<1>();
    else copy_async_wait<0>();
    __syncthreads();
    u8* my_rows = shared.queries + my_row * PITCH;
    Left<M, HELD> queries;
    queries.open(shared_address(my_rows));

    const Scale scale(p);
    f32 o[M][CHUNKS][4], largest[M][2], sum[M][2];
    clear(o);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[m][half] = least<f32>();
            sum[m][half] = 0;
        }
#pragma unroll 1
    for (int tile = start; tile < tiles; tile++) {
        const int key = tile * KEYS;
        copy_async_wait<0>();
        __syncthreads();  // this tile is here, and no thread reads the one before
        if (tile + 1 < tiles) load_keys(tile + 1);
#if DROPOUT
        draw_tile<QUERIES, KEYS>(&shared.kept[0][0], p, at.item, at.head, first, key);
        __syncthreads();
#endif
        if ((p.causal && key >= mine + 16 * M) || (CUT && key + KEYS <= first_key(p, at.item, at.head, mine)))
            continue;
        f32 s[M][N][4];
        products(s, queries, shared_address(shared.keys[tile & 1]));
        finish(s, p, at, scale.factor, mine, key);
#pragma unroll
        for (int m = 0; m < M; m++) {
            f32 shrink[2];
            exponentials(s[m], largest[m], sum[m], shrink, scale.unit);
            multiply(o[m], shrink);
        }
#if DROPOUT
        drop(s, shared.kept + my_row);
#endif
        add_products(o, s, shared_address(shared.values[tile & 1]));
    }

    f32 factor[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        end_rows(factor[m], largest[m], sum[m], p, at, scale.unit, mine + m * 16 + lane_number() / 4);
        if (DROPOUT) factor[m][0] *= (f32)p.keep_scale, factor[m][1] *= (f32)p.keep_scale;
    }
    store_rows(o, factor, TileRows{my_rows}, p.out.at(at.item, at.head), p.out.row, mine, p.queries, p.value_depth);
}
