// Attention's forward pass on warpgroups: y = softmax(q kᵀ scale + mask) v in tiles, with a running softmax.
//
// Parallel: a block takes 128 queries of one head. One thread of the first warpgroup copies tiles of 128 keys and of their values,
// each as soon as its place is free; the two other warpgroups compute, 64 queries each. A warpgroup starts the scores of the next tile
// and the products of this one's probabilities with the values, and takes the exponentials of the next scores while the
// latter run; the two take turns in starting products, so that one's exponentials run beside the other's products too. Under a
// causal mask blocks with more keys start first, tiles above the diagonal are skipped; so are tiles before the first visible key.
//
// Bytes: q, k, v read and y written once from device memory as far as the cache holds a head's keys and values; from
// the cache each block reads all the keys and values it sees: 4 D bytes per key for 128 queries, 512 D operations:
// 128 operations a byte.
//
// Shared memory: 128 rows of queries, and rings of 4 (depth 64) or 2 (128) tiles of keys and of values: 144 KiB, 160 KiB.
//
// Source: Shah et al.: FlashAttention-3 (2024), sections 3.1 and 3.2. Exponentials in base 2, log2 e being part of the scale.

constexpr int QUERIES = 128, KEYS = 128, STAGES = 256 / HEAD, N = KEYS / 8;
constexpr int GROUPS = 2, THREADS = (1 + GROUPS) * WARPGROUP;

struct alignas(1024) Shared {
    Tile<QUERIES> queries;
    Tile<KEYS> keys[STAGES], values[STAGES];
    u64 queries_full;
    Turn keys_turns[STAGES], values_turns[STAGES];
};
static_assert(QUERIES == BLOCK_ROWS && THREADS == BLOCK_THREADS && sizeof(Shared) == BLOCK_BYTES, "as launched");

// Lets the two warpgroups start products in turn: the first one begins.
struct Turns {
    int mine;

    DEVICE void begin() const {
        if (mine == 1) meet_later<GROUPS * WARPGROUP>(1);
    }
    DEVICE void take() const { meet<GROUPS * WARPGROUP>(1 + mine); }
    DEVICE void pass(bool last) const {
        if (mine == 0 || !last) meet_later<GROUPS * WARPGROUP>(2 - mine);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ Problem p, const __grid_constant__ TensorMap query,
                      const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value) {
    TILED_SHARED(bytes);
    Shared& shared = *(Shared*)bytes;
    const int blocks = blocks_of(p.queries, QUERIES);
    const Place at = place_of_block(p.heads, blocks);
    // Under a causal mask the last block has the most keys.
    const int first = (blocks - 1 - at.block) * QUERIES;
    const int start = first_key(p, at.item, at.head, first) / KEYS;
    const int tiles = max(blocks_of(p.keys_before(first + QUERIES), KEYS) - start, 0);
    const u32 queries_full = shared_address(&shared.queries_full);
    if (threadIdx.x == 0) {
        barrier_init(queries_full, 1);
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            shared.keys_turns[stage].init(1, 4 * GROUPS);
            shared.values_turns[stage].init(1, 4 * GROUPS);
        }
        barriers_ready();
    }
    __syncthreads();
    const int warp = my_warp(), group = warp / 4;
    Ring<STAGES> ring;

    if (group == 0) {
        give_registers<24>();
        if (threadIdx.x == 0) {
            const int key_head = at.head / p.group;
            auto copy = [&](Turn(&turns)[STAGES], Tile<KEYS>(&tiles)[STAGES], const TensorMap& map, int tile) {
                const u32 full = shared_address(&turns[ring.stage].full);
                ring.wait_free(turns);
                barrier_expect(full, sizeof(Tile<KEYS>));
                tiles[ring.stage].copy(map, full, tile * KEYS, key_head, at.item);
            };
            barrier_expect(queries_full, sizeof shared.queries);
            shared.queries.copy(query, queries_full, first, at.head, at.item);
#pragma unroll 1
            for (int tile = start; tile < start + tiles; tile++, ring.next()) {
                copy(shared.keys_turns, shared.keys, key, tile);
                copy(shared.values_turns, shared.values, value, tile);
            }
        }
        return;
    }

    take_registers<240>();
    const int mine = group - 1, my_row = mine * 64 + warp % 4 * 16, row = first + my_row;
    const u32 my_queries = shared.queries.address() + mine * 64 * PIECE_PITCH;
    const Turns turns{mine};
    const Scale scale(p);
    f32 o[1][CHUNKS][4], s[1][N][4], largest[2] = {least<f32>(), least<f32>()}, sum[2] = {}, shrink[2];
    u32 probabilities[N / 2][4];
    clear(o);
    auto start_scores = [&] {
        ring.wait_full(shared.keys_turns);
        products_fence();
        start_products<QUERIES, KEYS>(s[0], my_queries, shared.keys[ring.stage].address());
        products_commit();
    };
    auto start_values = [&](const Ring<STAGES>& of) {
        of.wait_full(shared.values_turns);
        products_fence();
        start_add_products<KEYS>(o[0], probabilities, shared.values[of.stage].address());
        products_commit();
    };
    auto end_scores = [&](int tile) {
        ring.release(shared.keys_turns);
        finish(s, p, at, scale.factor, row, tile * KEYS);
        exponentials(s[0], largest, sum, shrink, scale.unit);
    };

    barrier_wait(queries_full, 0);
    if (tiles > 0) {
        const int end = start + tiles;
        start_scores();
        products_wait<0>(s[0]);
        end_scores(start);
        if (tiles > 1) turns.begin();
        Ring<STAGES> before;
        // The wait for a turn's products with values stands in the next turn: compilers move it up within a block of code, before the
        // exponentials that are to run beside them.
#pragma unroll 1
        for (int tile = start + 1;; tile++) {
            products_wait<0>(o[0]);
            if (tile > start + 1) before.release(shared.values_turns);
            multiply(o[0], shrink);
            narrow_rows(probabilities, s[0]);
            if (tile == end) break;
            before = ring;
            ring.next();
            turns.take();
            start_scores();
            start_values(before);
            turns.pass(tile + 1 == end);
            products_wait<1>(s[0]);
            end_scores(tile);
        }
        start_values(ring);
        products_wait<0>(o[0]);
    }

    f32 factor[1][2];
    end_rows(factor[0], largest, sum, p, at, scale.unit, row + lane_number() / 4);
    meet<WARPGROUP>(3 + mine);  // no warp's product reads this group's queries any more
    store_rows(o, factor, shared.queries.rows(my_row), p.out.at(at.item, at.head), p.out.row, row, p.queries, p.value_depth);
}
