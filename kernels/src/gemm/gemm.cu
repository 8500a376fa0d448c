// The product of matrices of any strides, C (m x n) = A (m x k) B (k x n), batched: for what the vendor's library does
// not do, and where it is not.
//
// Compiled for: ELEM, the type of a, b and bias; OUT, the type of c: ELEM, or f32 for gradients of 16-bit values;
// A_ALONG_K and B_ALONG_K, 1 where the operand's neighbours in memory are neighbours along k, 0 where they are along m or
// n; where they are along neither, any.
//
// Parallel: a block of 256 threads makes a tile of C: 128 x 128 of 16-bit types on tensor cores, each of 8 warps 64 x 32
// of it; f32 128 x 128 and f64 64 x 64 by fused multiply-adds, a thread 8 x 8 or 4 x 4. The grid is (tiles of n, tiles of
// m, batch); what is beyond it is done by the same blocks in turn. All of k is summed in registers before C is touched:
// for f32 and f64 as one chain of fused multiply-adds over ascending k, so these have the CPU's bits; for 16-bit types
// 16 at a time in the order of the matrix instruction, the same every time.
//
// Bytes: each tile reads its rows of A and columns of B once, in steps of 32 (16) of k, the next step's while one is
// computed: 64 (f32: 32) operations a byte from the cache. C is written once, and read first if it is added to.
//
// Shared memory, static: two steps of both operands. 16-bit operands lie as they do in memory, along k or along the
// rows, with a pitch of an odd number of 16-byte chunks, and ldmatrix turns what lies along the rows.

typedef ELEM T;
typedef OUT C;
typedef Wide<T> W;

// What is done with a tile's finished sums.
struct Finish {
    C* c;           // the tile's first element
    const T* bias;  // of its first column, or null
    u64 stride;     // from row to row
    int rows, columns;
    bool accumulate;

    // Rounded after every step, as steps of their own would.
    DEVICE void operator()(int i, int j, W sum) const {
        if (i >= rows || j >= columns) return;
        C value = narrow<C>(sum);
        if (bias) value = narrow<C>(widen(value) + widen(bias[j]));
        C* to = c + i * stride + j;
        *to = accumulate ? narrow<C>(widen(*to) + widen(value)) : value;
    }
};

// An operand's part of a tile: rows of A, or columns of B, against k.
struct Side {
    const T* data;
    u64 row_stride, k_stride;
    int rows;  // that there are
};

constexpr int THREADS = 256;

// ---- Fused multiply-adds ----

template <typename T> struct MultiplyAdds {
    static constexpr int MICRO = sizeof(W) == 8 ? 4 : 8, TILE = 16 * MICRO, STEP = 16, PITCH = TILE + 4;
    static constexpr int EACH = TILE * STEP / THREADS;  // elements of an operand that a thread copies

    struct Shared {
        W a[2][STEP][PITCH], b[2][STEP][PITCH];
    };

    // Which element of a step a thread copies as its i-th: neighbours in memory by neighbouring threads.
    template <bool ALONG_K> static DEVICE int row_of(int i) {
        const int at = i * THREADS + threadIdx.x;
        return ALONG_K ? at / STEP : at % TILE;
    }
    template <bool ALONG_K> static DEVICE int k_of(int i) {
        const int at = i * THREADS + threadIdx.x;
        return ALONG_K ? at % STEP : at / TILE;
    }

    template <bool ALONG_K> static DEVICE void fetch(W (&to)[EACH], const Side& side, u64 from, u64 end) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int row = row_of<ALONG_K>(i);
            const u64 k = from + k_of<ALONG_K>(i);
            to[i] = row < side.rows && k < end ? widen(side.data[row * side.row_stride + k * side.k_stride]) : W(0);
        }
    }

    template <bool ALONG_K> static DEVICE void put(W (&to)[STEP][PITCH], const W (&from)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; i++) to[k_of<ALONG_K>(i)][row_of<ALONG_K>(i)] = from[i];
    }

    // Row or column number i of the MICRO that a thread has, of sixteen in its direction: packets, spread over the tile.
    static DEVICE int place(int thread, int i) {
        constexpr int LEN = Packet<W>::LEN;
        return i / LEN * 16 * LEN + thread * LEN + i % LEN;
    }

    static DEVICE void read(W (&to)[MICRO], const W (&from)[PITCH], int thread) {
        constexpr int LEN = Packet<W>::LEN;
#pragma unroll
        for (int i = 0; i < MICRO; i += LEN) {
            const Packet<W> packet = load(&from[place(thread, i)]);
#pragma unroll
            for (int j = 0; j < LEN; j++) to[i + j] = packet.at[j];
        }
    }

    static DEVICE void tile(Shared& shared, const Side& a, const Side& b, u64 k, const Finish& finish) {
        const int x = threadIdx.x % 16, y = threadIdx.x / 16;
        W sums[MICRO][MICRO], next_a[EACH], next_b[EACH];
#pragma unroll
        for (int i = 0; i < MICRO; i++)
#pragma unroll
            for (int j = 0; j < MICRO; j++) sums[i][j] = 0;
        fetch<A_ALONG_K>(next_a, a, 0, k);
        fetch<B_ALONG_K>(next_b, b, 0, k);
        int stage = 0;
#pragma unroll 1
        for (u64 from = 0; from < k; from += STEP, stage ^= 1) {
            put<A_ALONG_K>(shared.a[stage], next_a);
            put<B_ALONG_K>(shared.b[stage], next_b);
            __syncthreads();  // this step is here, and no thread reads the one before the last
            fetch<A_ALONG_K>(next_a, a, from + STEP, k);
            fetch<B_ALONG_K>(next_b, b, from + STEP, k);
#pragma unroll
            for (int d = 0; d < STEP; d++) {
                W left[MICRO], right[MICRO];
                read(left, shared.a[stage][d], y);
                read(right, shared.b[stage][d], x);
#pragma unroll
                for (int i = 0; i < MICRO; i++)
#pragma unroll
                    for (int j = 0; j < MICRO; j++) sums[i][j] = fma(left[i], right[j], sums[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < MICRO; i++)
#pragma unroll
            for (int j = 0; j < MICRO; j++) finish(place(y, i), place(x, j), sums[i][j]);
        __syncthreads();
    }
};

// ---- Tensor cores ----

template <typename T> struct TensorCores {
    static constexpr int TILE = 128, STEP = 32, M = 4, N = 4;  // a warp's blocks of 16 rows and of 8 columns
    static constexpr int PITCH_K = STEP * 2 + 16, PITCH_ROWS = TILE * 2 + 16;
    static constexpr int BYTES = TILE * PITCH_K > STEP * PITCH_ROWS ? TILE * PITCH_K : STEP * PITCH_ROWS;

    struct Shared {
        u8 a[2][BYTES], b[2][BYTES];
    };

    // Copies an operand's steps one after the other; zeros beyond the ends.
    template <bool ALONG_K> struct Copy {
        static constexpr int NEAR = ALONG_K ? STEP : TILE, FAR = ALONG_K ? TILE : STEP;
        static constexpr int PITCH = ALONG_K ? PITCH_K : PITCH_ROWS;
        static constexpr int RUN = THREADS / (NEAR / 8);  // far places copied at a time

        const Side& side;
        bool packets;

        DEVICE explicit Copy(const Side& side) : side(side) {
            const u64 near = ALONG_K ? side.k_stride : side.row_stride, far = ALONG_K ? side.row_stride : side.k_stride;
            packets = near == 1 && far % 8 == 0 && is_aligned16(side.data);
        }

        DEVICE void start(u8* to, u64 from, u64 end) const {
            const int steps = (int)min(end - from, (u64)STEP);
            const int near_end = ALONG_K ? steps : side.rows, far_end = ALONG_K ? side.rows : steps;
            const u64 stride = ALONG_K ? side.row_stride : side.k_stride;
            const T* data = side.data + from * side.k_stride;
            if (packets) {
                const int near = threadIdx.x % (NEAR / 8) * 8, mine = threadIdx.x / (NEAR / 8);
                const int bytes = max(min(near_end - near, 8), 0) * 2;
#pragma unroll
                for (int far = mine; far < mine + FAR; far += RUN)
                    copy_async16_part(shared_address(to) + far * PITCH + near * 2, data + far * stride + near,
                                      far < far_end ? bytes : 0);
            } else {
#pragma unroll 1
                for (int i = threadIdx.x; i < NEAR * FAR; i += THREADS) {
                    const int far = i / NEAR, near = i % NEAR;
                    const T* one = data + far * stride + near * (ALONG_K ? side.k_stride : side.row_stride);
                    *(T*)(to + far * PITCH + near * 2) = far < far_end && near < near_end ? *one : narrow<T>(0);
                }
            }
        }
    };

    // Two blocks of rows (16 of A, or 2 x 8 of B's columns) by 16 of k, from row `row` and k `at` of a step. The
    // matrices come in the order of the instruction's operands: for A rows first, for B k first.
    template <bool ALONG_K, bool IS_A> static DEVICE void fragment(u32 (&to)[4], u32 step, int row, int at) {
        const int low = lane_number() & 7, second = lane_number() >> 3 & 1, third = lane_number() >> 4;
        const int rows = (IS_A ? second : third) * 8, ks = (IS_A ? third : second) * 8;
        if (ALONG_K) load_matrices<false>(to, step + (row + rows + low) * PITCH_K + (at + ks) * 2);
        else load_matrices<true>(to, step + (at + ks + low) * PITCH_ROWS + (row + rows) * 2);
    }

    static DEVICE void tile(Shared& shared, const Side& a, const Side& b, u64 k, const Finish& finish) {
        const Copy<A_ALONG_K> copy_a(a);
        const Copy<B_ALONG_K> copy_b(b);
        const int my_row = warp_number() / 4 * 16 * M, my_column = warp_number() % 4 * 8 * N;
        f32 sums[M][N][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
        auto copy = [&](u64 from, int stage) {
            copy_a.start(shared.a[stage], from, k);
            copy_b.start(shared.b[stage], from, k);
            copy_async_commit();
        };
        if (k > 0) copy(0, 0);
        int stage = 0;
#pragma unroll 1
        for (u64 from = 0; from < k; from += STEP, stage ^= 1) {
            copy_async_wait<0>();
            __syncthreads();  // this step is here, and no thread reads the one before
            if (from + STEP < k) copy(from + STEP, stage ^ 1);
#pragma unroll
            for (int at = 0; at < STEP; at += 16) {
                u32 x[M][4], y[N / 2][4];
#pragma unroll
                for (int m = 0; m < M; m++)
                    fragment<A_ALONG_K, true>(x[m], shared_address(shared.a[stage]), my_row + m * 16, at);
#pragma unroll
                for (int n = 0; n < N / 2; n++)
                    fragment<B_ALONG_K, false>(y[n], shared_address(shared.b[stage]), my_column + n * 16, at);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < N; n++) multiply_add<T>(sums[m][n], x[m], y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    finish(my_row + m * 16 + i / 2 * 8 + lane_number() / 4,
                           my_column + n * 8 + lane_number() % 4 * 2 + i % 2, sums[m][n][i]);
        copy_async_wait<0>();
        __syncthreads();
    }
};

template <typename T, int BYTES> struct MethodOf {
    typedef MultiplyAdds<T> type;
};
template <typename T> struct MethodOf<T, 2> {
    typedef TensorCores<T> type;
};

// c[i, j] (+)= sum of a[i, d] b[d, j] + bias[j], for each item of the batch; `bias` may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm(C* c, const T* a, const T* b, const T* bias, u64 m, u64 n, u64 k, u64 a_batch, u64 a_row, u64 a_column, u64 b_batch,
         u64 b_row, u64 b_column, u64 c_batch, u64 c_row, u64 batches, u32 accumulate) {
    typedef typename MethodOf<T, sizeof(T)>::type Method;
    __shared__ __align__(128) typename Method::Shared shared;
    constexpr u64 TILE = Method::TILE;
#pragma unroll 1
    for (u64 item = blockIdx.z; item < batches; item += gridDim.z)
#pragma unroll 1
        for (u64 row = blockIdx.y * TILE; row < m; row += gridDim.y * TILE)
#pragma unroll 1
            for (u64 column = blockIdx.x * TILE; column < n; column += gridDim.x * TILE) {
                const int rows = min(m - row, TILE), columns = min(n - column, TILE);
                const Side left = {a + item * a_batch + row * a_row, a_row, a_column, rows};
                const Side right = {b + item * b_batch + column * b_column, b_column, b_row, columns};
                C* to = c + item * c_batch + row * c_row + column;
                Method::tile(shared, left, right, k, {to, bias ? bias + column : bias, c_row, rows, columns, accumulate != 0});
            }
}
