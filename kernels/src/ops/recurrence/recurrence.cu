// y[i] = a[i] y[i - 1] + b[i] along n of [outer, n, inner], in f64; from the end if `reversed`. A thread walks down a line.
// Each element is read and written once.

extern "C" __global__ void __launch_bounds__(256)
    lines(STORED* y, const STORED* a, const STORED* b, u64 n, u64 reversed, u64 inner, u64 count) {
    const u64 line = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (line >= count) return;
    const u64 first = line / inner * n * inner + line % inner;
    Value last = 0;
    for (u64 i = 0; i < n; i++) {
        const u64 at = first + (reversed ? n - 1 - i : i) * inner;
        last = i == 0 ? value_of(b[at]) : value_of(a[at]) * last + value_of(b[at]);
        y[at] = result_of<STORED>(last);
    }
}
