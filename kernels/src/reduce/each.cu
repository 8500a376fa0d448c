// Reductions of what is not merged in vectors: integers, products, and extrema with their places. Each element is read
// once: by a team of threads an output where its elements lie together, by a thread a column where outputs do. Few outputs
// are cut into parts along n, which `finish` merges.
//
// Macros: STORED, the elements' type; VALUE, what they are merged in; KIND, a structure below; RESULT, the results' type.

// A NaN counts as better than any number, and the first of equals as the best.
template <bool LARGEST> struct Extremum {
    DEVICE static bool better(Value a, i64 at, Value b, i64 bt) {
        const bool a_none = a != a, b_none = b != b;
        if (at < 0 || bt < 0) return bt < 0;
        if (a_none != b_none) return a_none;
        if (a == b || a_none) return at < bt;
        return LARGEST ? a > b : a < b;
    }
};

struct Best {
    Value x;
    i64 at; // -1: nothing yet
};

struct Add {
    DEVICE static Best merge(Best a, Best b) { return {a.x + b.x, 0}; }
    DEVICE static Best none() { return {Value(0), 0}; }
};
struct Multiply {
    DEVICE static Best merge(Best a, Best b) { return {a.x * b.x, 0}; }
    DEVICE static Best none() { return {Value(1), 0}; }
};
struct Largest {
    DEVICE static Best merge(Best a, Best b) { return Extremum<true>::better(a.x, a.at, b.x, b.at) ? a : b; }
    DEVICE static Best none() { return {Value(0), -1}; }
};
struct Smallest {
    DEVICE static Best merge(Best a, Best b) { return Extremum<false>::better(a.x, a.at, b.x, b.at) ? a : b; }
    DEVICE static Best none() { return {Value(0), -1}; }
};

DEVICE Best merge(Best a, Best b) { return KIND::merge(a, b); }

DEVICE Best warp_best(Best best) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        Best other;
        other.x = __shfl_xor_sync(ALL_LANES, best.x, step);
        other.at = __shfl_xor_sync(ALL_LANES, best.at, step);
        best = merge(best, other);
    }
    return best;
}

struct Output {
    RESULT* values;
    i64* places; // may be null
    Best* parts; // null: there is one part only

    DEVICE void put(u64 o, Best best) const {
        if (parts) {
            parts[o * gridDim.y + blockIdx.y] = best;
            return;
        }
        values[o] = result_of<RESULT>(best.x);
        if (places) places[o] = best.at;
    }
};

// A block an output, and a part of n.
extern "C" __global__ void __launch_bounds__(256) rows(Output output, const STORED* x, u64 n, u64 part_len) {
    __shared__ Best shared[8];
    const u64 first = blockIdx.y * part_len, end = min(first + part_len, n);
    x += blockIdx.x * n;
    Best best = KIND::none();
    for (u64 r = first + threadIdx.x; r < end; r += blockDim.x) best = merge(best, Best{value_of(x[r]), (i64)r});
    best = warp_best(best);
    if (lane_number() == 0) shared[warp_number()] = best;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < blockDim.x / 32; w++) best = merge(best, shared[w]);
    output.put(blockIdx.x, best);
}

// A thread a column, and a part of n.
extern "C" __global__ void __launch_bounds__(256)
    columns(Output output, const STORED* x, u64 n, u64 part_len, u64 inner, u64 outputs) {
    const u64 o = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= outputs) return;
    const u64 first = blockIdx.y * part_len, end = min(first + part_len, n);
    x += o / inner * n * inner + o % inner;
    Best best = KIND::none();
    for (u64 r = first; r < end; r++) best = merge(best, Best{value_of(x[r * inner]), (i64)r});
    output.put(o, best);
}

// A warp an output.
extern "C" __global__ void __launch_bounds__(128) finish(Output output, const Best* parts, u64 count, u64 outputs) {
    const u64 o = (u64)blockIdx.x * 4 + warp_number();
    if (o >= outputs) return;
    Best best = KIND::none();
    for (u64 p = lane_number(); p < count; p += 32) best = merge(best, parts[o * count + p]);
    best = warp_best(best);
    if (lane_number() == 0) output.put(o, best);
}
