// The product of matrices of 16-bit types on warpgroups, C (m x n) = A (m x k) B (k x n), batched. An element is one sum over
// ascending k, 16 at a time, whatever m and n are: rows of a batch that was cut have the bits that they have together.
//
// Compiled for: ELEM, the type of a, b and bias; OUT, the type of c: ELEM, or f32; A_ALONG_K and B_ALONG_K, 1 where the
// operand's neighbours in memory are neighbours along k, 0 where they are along m or n; COLUMNS, 128 or 256: the columns of a tile;
// BLOCK_BYTES of dynamic shared memory.
//
// Parallel: a block makes a tile of 128 rows. One thread of the first warpgroup copies steps of 64 of k, each as soon as its place
// is free; the two other warpgroups have 64 rows each, and keep the products of one step under way while they start the
// next. Tiles are dealt out in bands of 8 tiles of rows, so that blocks at work together share their operands in the cache.
//
// Bytes: each tile reads its rows of A and columns of B once: 128 (256 columns: 171) operations a byte from the cache. C is written
// once, and read first if it is added to.
//
// Shared memory: a ring of 6 steps of 32 KiB, or 4 of 48 KiB; at the end the tile of C.

typedef ELEM T;
typedef OUT C;

constexpr int ROWS = 128, STEP = 64, STAGES = COLUMNS == 256 ? 4 : 6, N = COLUMNS / 8;
constexpr int GROUPS = 2, THREADS = (1 + GROUPS) * WARPGROUP;
constexpr int PITCH = STEP * sizeof(T);  // of a tile's rows, which lie along k, or across it in pieces of 64
constexpr int BAND = 8;
constexpr bool A_ACROSS = !A_ALONG_K, B_ACROSS = !B_ALONG_K;

struct alignas(1024) Stage {
    u8 a[ROWS * PITCH], b[COLUMNS * PITCH];
};

struct alignas(1024) Shared {
    Stage stages[STAGES];
    u64 full[STAGES], free[STAGES];
};
static_assert(sizeof(Shared) == BLOCK_BYTES, "as launched");

// Starts copying a step of an operand's rows `first ..`.
template <int COUNT, bool ACROSS>
DEVICE void copy_step(u32 to, const TensorMap& map, u32 barrier, int first, int from, int item) {
    if (ACROSS) {
#pragma unroll
        for (int piece = 0; piece < COUNT / 64; piece++)
            copy_box(to + piece * 64 * PITCH, map, barrier, first + piece * 64, from, item, 0);
    } else {
        copy_box(to, map, barrier, from, first, item, 0);
    }
}

// 16 of k of 64 (or more) rows from `at` on, as an operand.
template <bool ACROSS> DEVICE u64 step_at(u32 at, int k) {
    return ACROSS ? matrix_at(at + k * 16 * PITCH, 64 * PITCH) : matrix_at(at + k * 16 * sizeof(T));
}

// Two neighbours.
DEVICE void put_two(f32* to, f32 x, f32 y) { *(float2*)to = make_float2(x, y); }
template <typename C> DEVICE void put_two(C* to, f32 x, f32 y) { *(u32*)to = narrow2<C>(x, y); }

// c[i, j] (+)= sum of a[i, d] b[d, j] + bias[j], for each item of the batch (along z); `bias` may be null. An operand that
// all items share has a step of 0, else 1.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_warpgroup(C* c, const T* bias, u64 c_batch, u64 c_row, i32 m, i32 n, i32 k, i32 a_step, i32 b_step, u32 accumulate,
                   const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b) {
    TILED_SHARED(bytes);
    Shared& shared = *(Shared*)bytes;
    const int across = (n + COLUMNS - 1) / COLUMNS, down = (m + ROWS - 1) / ROWS, band = blockIdx.x / (BAND * across);
    const int height = min(down - band * BAND, BAND), place = blockIdx.x % (BAND * across);
    const int first_row = (band * BAND + place % height) * ROWS, first_column = place / height * COLUMNS;
    const int steps = (k + STEP - 1) / STEP, item = blockIdx.z;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared_address(&shared.full[stage]), 1);
            barrier_init(shared_address(&shared.free[stage]), 4 * GROUPS);
        }
        barriers_ready();
    }
    __syncthreads();
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0), group = warp / 4;

    if (group == 0) {
        give_registers<24>();
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                const int stage = step % STAGES, round = step / STAGES;
                const u32 full = shared_address(&shared.full[stage]);
                barrier_wait(shared_address(&shared.free[stage]), round & 1 ^ 1);
                barrier_expect(full, sizeof(Stage));
                copy_step<ROWS, A_ACROSS>(shared_address(shared.stages[stage].a), a, full, first_row, step * STEP, item * a_step);
                copy_step<COLUMNS, B_ACROSS>(shared_address(shared.stages[stage].b), b, full, first_column, step * STEP,
                                             item * b_step);
            }
        }
        return;
    }

    take_registers<240>();
    const int mine = group - 1;
    f32 sums[N][4];
    int step = 0;
#pragma unroll 1
    do {
        const int stage = step % STAGES;
        const u32 my_a = shared_address(shared.stages[stage].a) + mine * 64 * PITCH;
        const u32 my_b = shared_address(shared.stages[stage].b);
        barrier_wait(shared_address(&shared.full[stage]), step / STAGES & 1);
        products_fence();
#pragma unroll
        for (int at = 0; at < STEP / 16; at++)
            multiply_rows<false, A_ACROSS, B_ACROSS>(sums, step_at<A_ACROSS>(my_a, at), step_at<B_ACROSS>(my_b, at),
                                                     step + at > 0);
        products_commit();
        products_wait<1>(sums);
        if (step > 0 && lane_number() == 0) barrier_arrive(shared_address(&shared.free[(step - 1) % STAGES]));
    } while (++step < steps);
    products_wait<0>(sums);

    // Rows of C go through shared memory, which no copy and no product uses any more, to be written in packets.
    meet<GROUPS * WARPGROUP>(1);
    constexpr int C_PITCH = COLUMNS * sizeof(C) + 16, LEN = Packet<C>::LEN, CHUNKS = COLUMNS / LEN;
    static_assert(ROWS * C_PITCH <= sizeof(Shared), "the tile of C");
    const int lane = lane_number(), my_row = mine * 64 + warp % 4 * 16;
    u8* rows = bytes + my_row * C_PITCH;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            put_two((C*)(rows + (half * 8 + lane / 4) * C_PITCH) + j * 8 + lane % 4 * 2, sums[j][half * 2], sums[j][half * 2 + 1]);
    __syncwarp();
    const bool packets = c_row % LEN == 0 && c_batch % LEN == 0 && is_aligned16(c);
    C* tile = c + item * c_batch + (first_row + my_row) * c_row + first_column;
#pragma unroll 1
    for (int chunk = lane; chunk < 16 * CHUNKS; chunk += 32) {
        const int row = chunk / CHUNKS, column = chunk % CHUNKS * LEN, left = n - first_column - column;
        if (first_row + my_row + row >= m || left <= 0) continue;
        Packet<C> x = *(const Packet<C>*)(rows + row * C_PITCH + column * sizeof(C));
        C* to = tile + row * c_row + column;
        const bool whole = packets && left >= LEN;
        Packet<C> before;
        if (accumulate && whole) before = load(to);
#pragma unroll
        for (int i = 0; i < LEN; i++) {
            // Rounded after every step, as steps of their own would.
            if (bias && i < left) x.at[i] = narrow<C>(widen(x.at[i]) + widen(bias[first_column + column + i]));
            if (accumulate && i < left) x.at[i] = narrow<C>(widen(whole ? before.at[i] : to[i]) + widen(x.at[i]));
        }
        if (whole) store(to, x);
        else
#pragma unroll
            for (int i = 0; i < LEN; i++)
                if (i < left) to[i] = x.at[i];
    }
}
