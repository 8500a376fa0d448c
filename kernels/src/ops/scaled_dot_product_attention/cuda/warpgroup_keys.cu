// Attention's backward pass on warpgroups, keys' part: dk and dv. The formulas, and why queries have a pass of their own, are
// backward_keys.cu's.
//
// Parallel: a block keeps 128 keys and values. One thread of the first warpgroup copies tiles of 64 queries and of their dy, of all heads
// that share the keys, and a warp their sums; the two other warpgroups compute, 64 keys each, transposed scores as in
// backward_keys.cu. The exponentials run beside the product dy vᵀ, differences beside that of dv, and the next tile's
// scores start behind that of dk. Blocks with most to do start first; what a causal mask hides is skipped.
//
// Bytes: keys and values read once, dk and dv written once; queries and dy come from the cache: 4 D bytes each for 128
// keys and 1024 D operations: 256 operations a byte.
//
// Shared memory: 128 rows of keys and values, a ring of 3 x 64 of queries and dy (82 KiB at depth 64, 162 KiB at 128).
//
// Source: Shah et al.: FlashAttention-3 (2024), with dq in a pass of its own.

constexpr int KEYS = 128, QUERIES = 64, STAGES = 3, N = QUERIES / 8;
constexpr int GROUPS = 2, THREADS = (1 + GROUPS) * WARPGROUP;

struct alignas(1024) Shared {
    Tile<KEYS> keys, values;
    Tile<QUERIES> queries[STAGES], dy[STAGES];
    f32 sums[STAGES][2][QUERIES];  // logsumexp and delta
    u64 keys_full;
    Turn turns[STAGES];
};
static_assert(KEYS == BLOCK_ROWS && THREADS == BLOCK_THREADS && sizeof(Shared) == BLOCK_BYTES, "as launched");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_keys(const __grid_constant__ Problem p, const __grid_constant__ TensorMap query,
                            const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
                            const __grid_constant__ TensorMap dy) {
    TILED_SHARED(bytes);
    Shared& shared = *(Shared*)bytes;
    // Under a causal mask the first keys are seen by the most queries.
    const Place at = place_of_block(p.heads / p.group, blocks_of(p.keys, KEYS));
    const int first = at.block * KEYS;
    const int start = p.causal ? first / QUERIES : 0;
    const int tiles = max(blocks_of(queries_seeing(p, at, first + KEYS), QUERIES) - start, 0);
    const int steps = tiles * p.group;
    const u32 keys_full = shared_address(&shared.keys_full);
    if (threadIdx.x == 0) {
        barrier_init(keys_full, 1);
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) shared.turns[stage].init(1 + 32, 4 * GROUPS);
        barriers_ready();
    }
    __syncthreads();
    const int warp = my_warp(), group = warp / 4;
    Ring<STAGES> ring;
    // Steps are tiles of the first head, then of the next.
    Place from = {at.item, at.head * p.group, start};
    auto next = [&] {
        ring.next();
        if (++from.block == start + tiles) from = {at.item, from.head + 1, start};
    };

    if (group == 0) {
        give_registers<24>();
        if (threadIdx.x == 0) {
            barrier_expect(keys_full, sizeof shared.keys + sizeof shared.values);
            shared.keys.copy(key, keys_full, first, at.head, at.item);
            shared.values.copy(value, keys_full, first, at.head, at.item);
#pragma unroll 1
            for (int step = 0; step < steps; step++, next()) {
                const u32 full = shared_address(&shared.turns[ring.stage].full);
                ring.wait_free(shared.turns);
                barrier_expect(full, 2 * sizeof(Tile<QUERIES>));
                shared.queries[ring.stage].copy(query, full, from.block * QUERIES, from.head, from.item);
                shared.dy[ring.stage].copy(dy, full, from.block * QUERIES, from.head, from.item);
            }
        } else if (warp == 1) {
#pragma unroll 1
            for (int step = 0; step < steps; step++, next()) {
                ring.wait_free(shared.turns);
#pragma unroll
                for (int i = lane_number(); i < 2 * QUERIES; i += 32) {
                    const int which = i / QUERIES, row = from.block * QUERIES + i % QUERIES;
                    const i64 head = (i64)which * p.batches * p.heads + from.item * p.heads + from.head;
                    shared.sums[ring.stage][which][i % QUERIES] = row < p.queries ? p.sums[head * p.queries + row] : 0;
                }
                barrier_arrive(shared_address(&shared.turns[ring.stage].full));
            }
        }
        return;
    }

    take_registers<240>();
    const int mine = group - 1, my_row = mine * 64 + warp % 4 * 16, row = first + my_row;
    const u32 my_keys = shared.keys.address() + mine * 64 * PIECE_PITCH;
    const u32 my_values = shared.values.address() + mine * 64 * PIECE_PITCH;
    f32 dk[1][CHUNKS][4], dv[1][CHUNKS][4], s[1][N][4], ds[1][N][4];
    u32 narrow_s[N / 2][4], narrow_ds[N / 2][4];
    clear(dk);
    clear(dv);
    barrier_wait(keys_full, 0);
#pragma unroll 1
    for (int step = 0; step < steps; step++, next()) {
        const int query = from.block * QUERIES, stage = ring.stage;
        ring.wait_full(shared.turns);
        if (p.causal && query + QUERIES <= first + mine * 64) {
            ring.release(shared.turns);
            continue;
        }
        products_fence();
        start_products<KEYS, QUERIES>(s[0], my_keys, shared.queries[stage].address());
        products_commit();
        start_products<KEYS, QUERIES>(ds[0], my_values, shared.dy[stage].address());
        products_commit();
        products_wait<1>(s[0]);
        probabilities(s, p, from, shared.sums[stage][0], query, row);
        narrow_rows(narrow_s, s[0]);
        products_fence();
        start_add_products<QUERIES>(dv[0], narrow_s, shared.dy[stage].address());
        products_commit();
        products_wait<1>(ds[0]);
        differentiate(ds, s, shared.sums[stage][1]);
        narrow_rows(narrow_ds, ds[0]);
        products_fence();
        start_add_products<QUERIES>(dk[0], narrow_ds, shared.queries[stage].address());
        products_commit();
        products_wait<0>(dk[0]);
        settle(dv[0]);
        ring.release(shared.turns);
    }

    const f32 one[1][2] = {{1, 1}}, scale[1][2] = {{(f32)p.scale, (f32)p.scale}};
    meet<WARPGROUP>(1 + mine);  // no warp's product reads this group's keys and values any more
    if (p.dvalue.data)
        store_rows(dv, one, shared.values.rows(my_row), p.dvalue.at(at.item, at.head), p.dvalue.row, row, p.keys, p.value_depth);
    if (p.dkey.data)
        store_rows(dk, scale, shared.keys.rows(my_row), p.dkey.at(at.item, at.head), p.dkey.row, row, p.keys, p.depth);
}
