// Attention's backward pass on warpgroups, queries' part: dq. The formulas are backward_keys.cu's.
//
// Parallel: as warpgroup_forward.cu, 128 queries a block and 64 a warpgroup, which loop over tiles of the 64 keys that they see. The
// exponentials run beside the product dy vᵀ, the next tile's scores start behind that of dq.
//
// Bytes: queries and dy read once, dq written once; keys and values come from the cache: 4 D bytes each for 128 queries
// and 768 D operations: 192 operations a byte.
//
// Shared memory: 128 rows of queries and dy, a ring of 3 x 64 of keys and values (80 KiB at depth 64, 160 KiB at 128).
//
// Source: Shah et al.: FlashAttention-3 (2024), with dq in a pass of its own.

constexpr int QUERIES = 128, KEYS = 64, STAGES = 3, N = KEYS / 8;
constexpr int GROUPS = 2, THREADS = (1 + GROUPS) * WARPGROUP;

struct alignas(1024) Shared {
    Tile<QUERIES> queries, dy;
    Tile<KEYS> keys[STAGES], values[STAGES];
    u64 queries_full;
    Turn turns[STAGES];
};
static_assert(QUERIES == BLOCK_ROWS && THREADS == BLOCK_THREADS && sizeof(Shared) == BLOCK_BYTES, "as launched");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_queries(const __grid_constant__ Problem p, const __grid_constant__ TensorMap query,
                               const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
                               const __grid_constant__ TensorMap dy) {
    TILED_SHARED(bytes);
    Shared& shared = *(Shared*)bytes;
    const int blocks = blocks_of(p.queries, QUERIES);
    const Place at = place_of_block(p.heads, blocks);
    const int first = (blocks - 1 - at.block) * QUERIES;
    const int start = first_key(p, at.item, at.head, first) / KEYS;
    const int end = blocks_of(p.keys_before(first + QUERIES), KEYS);
    const u32 queries_full = shared_address(&shared.queries_full);
    if (threadIdx.x == 0) {
        barrier_init(queries_full, 1);
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) shared.turns[stage].init(1, 4 * GROUPS);
        barriers_ready();
    }
    __syncthreads();
    const int warp = my_warp(), group = warp / 4;
    Ring<STAGES> ring;

    if (group == 0) {
        give_registers<24>();
        if (threadIdx.x == 0) {
            const int key_head = at.head / p.group;
            barrier_expect(queries_full, sizeof shared.queries + sizeof shared.dy);
            shared.queries.copy(query, queries_full, first, at.head, at.item);
            shared.dy.copy(dy, queries_full, first, at.head, at.item);
#pragma unroll 1
            for (int tile = start; tile < end; tile++, ring.next()) {
                const u32 full = shared_address(&shared.turns[ring.stage].full);
                ring.wait_free(shared.turns);
                barrier_expect(full, 2 * sizeof(Tile<KEYS>));
                shared.keys[ring.stage].copy(key, full, tile * KEYS, key_head, at.item);
                shared.values[ring.stage].copy(value, full, tile * KEYS, key_head, at.item);
            }
        }
        return;
    }

    take_registers<240>();
    const int mine = group - 1, my_row = mine * 64 + warp % 4 * 16, row = first + my_row;
    const u32 my_queries = shared.queries.address() + mine * 64 * PIECE_PITCH;
    const u32 my_dy = shared.dy.address() + mine * 64 * PIECE_PITCH;
    f32 dq[1][CHUNKS][4], s[1][N][4], ds[1][N][4], logsumexp[1][2], delta[1][2];
    u32 slopes[N / 2][4];
    clear(dq);
    load_sums(logsumexp[0], delta[0], p, at, row + lane_number() / 4);
    barrier_wait(queries_full, 0);
#pragma unroll 1
    for (int tile = start; tile < end; tile++, ring.next()) {
        const int key_number = tile * KEYS, stage = ring.stage;
        ring.wait_full(shared.turns);
        if (p.causal && key_number >= first + (mine + 1) * 64) {
            ring.release(shared.turns);
            continue;
        }
        products_fence();
        start_products<QUERIES, KEYS>(s[0], my_queries, shared.keys[stage].address());
        products_commit();
        start_products<QUERIES, KEYS>(ds[0], my_dy, shared.values[stage].address());
        products_commit();
        products_wait<1>(s[0]);
        probabilities(s, logsumexp, p, at, row, key_number);
        settle(s[0]);  // while the other product runs
        products_wait<0>(ds[0]);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) ds[0][n][i] = s[0][n][i] * (ds[0][n][i] - delta[0][i / 2]);
        narrow_rows(slopes, ds[0]);
        products_fence();
        start_add_products<KEYS>(dq[0], slopes, shared.keys[stage].address());
        products_commit();
        products_wait<0>(dq[0]);
        ring.release(shared.turns);
    }

    const f32 scale[1][2] = {{(f32)p.scale, (f32)p.scale}};
    meet<WARPGROUP>(1 + mine);  // no warp's product reads this group's queries any more
    store_rows(dq, scale, shared.queries.rows(my_row), p.dquery.at(at.item, at.head), p.dquery.row, row, p.queries, p.depth);
}
