// Running sums, or what else MERGE makes of `a` and the later `b`, along n of [outer, n, inner], in f64 or i64; FIRST leaves
// others as they are. Where inner is 1 a block walks down a row, a few elements a thread at a time; elsewhere a thread walks
// down a column. Each element is read and written once.

constexpr int THREADS = 256;
// Elements that a thread adds by itself.
constexpr int OWN = 4;

// ln(e^a + e^b)
DEVICE f64 log_add(f64 a, f64 b) {
    if (a == b) return a + 0.6931471805599453;
    const f64 high = a > b ? a : b, low = a > b ? b : a;
    if (isinf(high) && low == low) return high;
    return high + log1p(exp(low - high));
}

// Above every number.
template <typename T> DEVICE T most();
template <> DEVICE f64 most<f64>() { return __longlong_as_double(0x7ff0000000000000LL); }
template <> DEVICE i64 most<i64>() { return 0x7fffffffffffffffLL; }

DEVICE Value merge(Value a, Value b) { return MERGE; }

extern "C" __global__ void __launch_bounds__(THREADS) rows(RESULT* y, const STORED* x, u64 n, u64 reversed) {
    __shared__ Value sums[THREADS / 32];
    x += blockIdx.x * n;
    y += blockIdx.x * n;
    Value carried = FIRST;
    for (u64 start = 0; start < n; start += THREADS * OWN) {
        const u64 first = start + threadIdx.x * OWN;
        Value own[OWN], total = FIRST;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const u64 at = first + i;
            if (at < n) total = merge(total, value_of(x[reversed ? n - 1 - at : at]));
            own[i] = total;
        }
        Value up_to = total;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const Value below = __shfl_up_sync(ALL_LANES, up_to, step);
            if (lane_number() >= step) up_to = merge(below, up_to);
        }
        Value before = __shfl_up_sync(ALL_LANES, up_to, 1);
        if (lane_number() == 0) before = FIRST;
        if (lane_number() == 31) sums[warp_number()] = up_to;
        __syncthreads();
        Value warps = carried;
        for (int w = 0; w < THREADS / 32; w++) {
            if (w == warp_number()) before = merge(warps, before);
            warps = merge(warps, sums[w]);
        }
        carried = warps;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const u64 at = first + i;
            if (at < n) y[reversed ? n - 1 - at : at] = result_of<RESULT>(merge(before, own[i]));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    columns(RESULT* y, const STORED* x, u64 n, u64 reversed, u64 inner, u64 columns) {
    const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const u64 first = column / inner * n * inner + column % inner;
    Value sum = FIRST;
    for (u64 i = 0; i < n; i++) {
        const u64 at = first + (reversed ? n - 1 - i : i) * inner;
        sum = merge(sum, value_of(x[at]));
        y[at] = result_of<RESULT>(sum);
    }
}
