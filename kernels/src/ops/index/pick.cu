// Rows by index (`rows_*`), and elements by index (`elements_*`); the number is an element's bytes.
//
// Rows: a group of 2^k lanes a row, so that a row's elements are read and written side by side; elements are as wide as the
// rows' addresses allow, 16 bytes at best. Moves each row once in, once out, and 8 bytes of index a row. An index out of
// range is reported, and its row becomes 0, so that what comes after reads no memory that nothing has written.
//
// Elements: one thread an element of the result, striding by the grid. Moves 8 bytes of index, one element in, one out.

// x is [outer, rows, inner], the index [count], out [outer, count, inner].
template <typename U>
DEVICE void pick_rows(U* out, const U* x, const i64* index, u64 outer, u64 count, u64 rows, u64 inner, u32 log_lanes,
                      Faults* faults, u32 code) {
    const u64 row = ((u64)blockIdx.x * blockDim.x + threadIdx.x) >> log_lanes;
    const u32 lanes = 1u << log_lanes, lane = threadIdx.x & (lanes - 1);
    if (row >= outer * count) return;
    const u64 nth = outer == 1 ? row : row % count;
    const i64 at = index[nth];
    const bool known = (u64)at < rows;
    if (!known && lane == 0 && blockIdx.y == 0) fault(faults, code, nth, at, rows);
    const U* from = x + (row / count * rows + (known ? at : 0)) * inner;
    U* to = out + row * inner;
    const u64 step = (u64)gridDim.y * lanes;
#pragma unroll 4
    for (u64 i = (u64)blockIdx.y * lanes + lane; i < inner; i += step) to[i] = known ? from[i] : U{};
}

// x has the strides of `layout` for the result's shape, with 0 along the dimension that the index stands for, where they
// are `along`.
template <typename U>
DEVICE void pick_elements(U* out, const U* x, const i64* index, const Strided& layout, u64 along, u64 size, u64 n,
                          Faults* faults, u32 code) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const i64 at = index[i];
        if ((u64)at >= size) {
            fault(faults, code, i, at, size);
            out[i] = U{};
            continue;
        }
        u64 from[1];
        locate(layout, i, from);
        out[i] = x[from[0] + at * along];
    }
}

#define ROWS(bytes, U)                                                                                              \
    extern "C" __global__ void rows_##bytes(U* out, const U* x, const i64* index, u64 outer, u64 count, u64 rows,   \
                                            u64 inner, u32 log_lanes, Faults* faults, u32 code) {                   \
        pick_rows(out, x, index, outer, count, rows, inner, log_lanes, faults, code);                               \
    }
#define ELEMENTS(bytes, U)                                                                                          \
    extern "C" __global__ void elements_##bytes(U* out, const U* x, const i64* index,                               \
                                                const __grid_constant__ Strided layout, u64 along, u64 size, u64 n, \
                                                Faults* faults, u32 code) {                                         \
        pick_elements(out, x, index, layout, along, size, n, faults, code);                                         \
    }
ROWS(1, u8)
ROWS(2, u16)
ROWS(4, u32)
ROWS(8, u64)
ROWS(16, uint4)
ELEMENTS(1, u8)
ELEMENTS(2, u16)
ELEMENTS(4, u32)
ELEMENTS(8, u64)
