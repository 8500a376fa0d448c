// Sets the places of a matrix of zeros that the indices name, one to a row.
//
// One thread a row: reads its index and writes one element.

extern "C" __global__ void one_hot(i64* out, const i64* index, u64 rows, u64 classes, Faults* faults, u32 code) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += step) {
        const i64 at = index[row];
        if ((u64)at < classes) {
            out[row * classes + at] = 1;
        } else {
            fault(faults, code, row, at, classes);
        }
    }
}
