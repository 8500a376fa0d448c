// Running sums along n of [outer, n, inner], in f64 or i64. Where inner is 1 a block walks down a row, a few elements a
// thread at a time; elsewhere a thread walks down a column. Each element is read and written once.

constexpr int THREADS = 256;
// Elements that a thread adds by itself.
constexpr int OWN = 4;

extern "C" __global__ void __launch_bounds__(THREADS) rows(RESULT* y, const STORED* x, u64 n, u64 reversed) {
    __shared__ Value sums[THREADS / 32];
    x += blockIdx.x * n;
    y += blockIdx.x * n;
    Value carried = 0;
    for (u64 start = 0; start < n; start += THREADS * OWN) {
        const u64 first = start + threadIdx.x * OWN;
        Value own[OWN], total = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const u64 at = first + i;
            if (at < n) total += value_of(x[reversed ? n - 1 - at : at]);
            own[i] = total;
        }
        Value up_to = total;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const Value below = __shfl_up_sync(ALL_LANES, up_to, step);
            if (lane_number() >= step) up_to += below;
        }
        Value before = __shfl_up_sync(ALL_LANES, up_to, 1);
        if (lane_number() == 0) before = 0;
        if (lane_number() == 31) sums[warp_number()] = up_to;
        __syncthreads();
        Value warps = carried;
        for (int w = 0; w < THREADS / 32; w++) {
            if (w == warp_number()) before += warps;
            warps += sums[w];
        }
        carried = warps;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const u64 at = first + i;
            if (at < n) y[reversed ? n - 1 - at : at] = result_of<RESULT>(before + own[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    columns(RESULT* y, const STORED* x, u64 n, u64 reversed, u64 inner, u64 columns) {
    const u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const u64 first = column / inner * n * inner + column % inner;
    Value sum = 0;
    for (u64 i = 0; i < n; i++) {
        const u64 at = first + (reversed ? n - 1 - i : i) * inner;
        sum += value_of(x[at]);
        y[at] = result_of<RESULT>(sum);
    }
}
