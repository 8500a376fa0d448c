// Indices of a whole table, as those of the rows `first .. first + own` of it.
//
// One thread an index: reads it, writes the index here (0 where its row is elsewhere) and whether it is elsewhere.

extern "C" __global__ void split(i64* here, u8* elsewhere, const i64* index, u64 n, u64 first, u64 own, u64 count,
                                 i64 ignored, u64 ignores, Faults* faults, u32 code) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const i64 at = index[i];
        const bool is_ignored = ignores && at == ignored;
        if (!is_ignored && (u64)at >= count) fault(faults, code, i, at, count);
        const bool is_here = !is_ignored && (u64)at >= first && (u64)at - first < own;
        here[i] = is_here ? at - (i64)first : 0;
        elsewhere[i] = !is_here;
    }
}
