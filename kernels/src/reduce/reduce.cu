// Reductions: each element is read once. A few neighbouring elements' terms are merged in the type that they are computed
// in, all others in f64, in an order that the shape decides: where an output's elements lie together (inner is 1) by a
// team of threads an output; where outputs do, a thread a packet of them. Few outputs are cut into parts along n, a block
// each, which `finish` merges.

constexpr int BLOCK = 256;

struct TeamMerge {
    DEVICE f64 operator()(f64 x, f64 start) const {
        if constexpr (TEAM == 32) return warp_reduce(x, MergeTotal());
        else return block_reduce(x, MergeTotal(), start);
    }
};

// Terms of the elements `at ..` of n, as far as they are below `end`.
DEVICE void add_packet(Numbers& numbers, const computed::Term& term, const View& view, const T* x, i64 at, i64 end, f64 start, COMPUTED shift) {
    Packet<T> p;
    const i64 inside = view.run == view.n ? at : at % (i64)view.run;
    if (inside + LEN <= view.run) {
        p = read_packet(x + (at - inside) / (i64)view.run * view.run_strides[0], inside, view.run, narrow<T>(W(0)));
    } else {
#pragma unroll
        for (int j = 0; j < LEN; j++) p.at[j] = at + j < end ? x[view.place(at + j)] : narrow<T>(W(0));
    }
    Few few(start);
#pragma unroll
    for (int j = 0; j < LEN; j++)
        if (at + j < end) few.add(term, widen(p.at[j]), shift);
    few.join(numbers);
}

TEAM_KERNEL rows(Output output, View view, const W* shifts, u64 part_len, f64 start, computed::Term term) {
    const u64 o = team_row();
    if (o >= view.outputs) return;
    const Part part(view.n, part_len);
    const T* const x = view.begin(o);
    const W shift = shifts ? shifts[o] : W(0);
    Numbers numbers(start);
    for (i64 at = part.first + (i64)team_rank() * LEN; at < part.end; at += TEAM * LEN)
        add_packet(numbers, term, view, x, at, part.end, start, shift);
#pragma unroll
    for (int k = 0; k < TERMS; k++) numbers.x[k] = TeamMerge()(numbers.x[k], start);
    if (team_rank() == 0) output.put(o, view.outputs, numbers.x, shift);
}

// Rows that a thread reads before it adds.
constexpr int SIDE = 4;

// A block's `lanes` neighbouring threads take a packet of columns each; so it reads BLOCK / lanes rows side by side.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    columns(Output output, View view, const W* shifts, u64 part_len, f64 start, u64 lanes, computed::Term term) {
    __shared__ f64 shared[BLOCK * LEN];
    const u64 tiles = (view.inner + lanes * LEN - 1) / (lanes * LEN), outer = blockIdx.x / tiles;
    const i64 first = blockIdx.x % tiles * lanes * LEN, inner = view.inner;
    const int lane = threadIdx.x % lanes, stream = threadIdx.x / lanes, streams = BLOCK / lanes;
    const i64 column = first + lane * LEN;
    const Part part(view.n, part_len);
    const T* const x = view.begin(outer);
    const T zero = narrow<T>(W(0));
    W shift[LEN];
#pragma unroll
    for (int j = 0; j < LEN; j++) shift[j] = shifts && column + j < inner ? shifts[outer * inner + column + j] : W(0);
    f64 sums[LEN][TERMS];
#pragma unroll
    for (int j = 0; j < LEN; j++)
#pragma unroll
        for (int k = 0; k < TERMS; k++) sums[j][k] = start;
    for (i64 r = part.first + stream * SIDE; r < part.end && column < inner; r += streams * SIDE) {
        Packet<T> p[SIDE];
#pragma unroll
        for (int i = 0; i < SIDE; i++)
            if (r + i < part.end) p[i] = read_packet(x + view.place(r + i), column, inner, zero);
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            Few few(start);
#pragma unroll
            for (int i = 0; i < SIDE; i++)
                if (r + i < part.end) few.add(term, widen(p[i].at[j]), shift[j]);
            Numbers numbers(start);
#pragma unroll
            for (int k = 0; k < TERMS; k++) numbers.x[k] = sums[j][k];
            few.join(numbers);
#pragma unroll
            for (int k = 0; k < TERMS; k++) sums[j][k] = numbers.x[k];
        }
    }
    // Of every number all columns' streams, one after the other; then a thread a column.
    const int width = lanes * LEN;
    for (int c = threadIdx.x; c < (width + BLOCK - 1) / BLOCK * BLOCK; c += BLOCK) {
        f64 x[TERMS];
#pragma unroll
        for (int k = 0; k < TERMS; k++) {
            __syncthreads();
#pragma unroll
            for (int j = 0; j < LEN; j++) shared[stream * width + lane * LEN + j] = sums[j][k];
            __syncthreads();
            x[k] = start;
            if (c < width)
                for (int s = 0; s < streams; s++) x[k] = MergeTotal()(x[k], shared[s * width + c]);
        }
        if (c < width && first + c < inner) {
            const u64 o = outer * inner + first + c;
            output.put(o, view.outputs, x, shifts ? (f64)shifts[o] : 0.0);
        }
    }
}

// A warp an output merges its parts.
extern "C" __global__ void __launch_bounds__(128)
    finish(Output output, const f64* parts, u64 count, const W* shifts, f64 start, u64 outputs) {
    const u64 o = (u64)blockIdx.x * 4 + warp_number();
    if (o >= outputs) return;
    f64 x[TERMS];
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
        x[k] = start;
        for (u64 p = lane_number(); p < count; p += 32) x[k] = MergeTotal()(x[k], parts[(o * TERMS + k) * count + p]);
        x[k] = warp_reduce(x[k], MergeTotal());
    }
    if (lane_number() == 0) output.put(o, outputs, x, shifts ? (f64)shifts[o] : 0.0);
}
