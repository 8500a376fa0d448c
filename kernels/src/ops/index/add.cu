// Rows and elements added where indices name them; the order of additions is the CPU's.
//
// Positions are sorted by the destination that they name (order.cu). `add_rows`: a group of 2^k lanes a destination row adds
// the rows of the source that belong there, in the order of their positions, in registers, and touches the destination once.
// `add_elements`: the thread of the first position that names an element adds all that name it. `add_lines`: a thread a
// line along the dimension of the index, which needs no order. Each moves the source once in, the destination once in
// (where it is added to) and once out, and the positions.
//
// ELEMENT: the elements.

template <typename T> struct SumOf { typedef f32 type; };
template <> struct SumOf<f64> { typedef f64 type; };
template <> struct SumOf<i64> { typedef i64 type; };
template <> struct SumOf<i32> { typedef i32 type; };
template <> struct SumOf<u8> { typedef u8 type; };
typedef ELEMENT T;
typedef SumOf<T>::type S;

DEVICE f64 plus(f64 a, f64 b) { return a + b; }
DEVICE f32 plus(f32 a, f32 b) { return a + b; }
DEVICE i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
DEVICE i32 plus(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
DEVICE u8 plus(u8 a, u8 b) { return (u8)(a + b); }

struct Factor {
    f64 real;
    i64 whole;
};
DEVICE f64 times(f64 a, Factor f) { return __dmul_rn(a, f.real); }
DEVICE f32 times(f32 a, Factor f) { return __fmul_rn(a, (f32)f.real); }
DEVICE i64 times(i64 a, Factor f) { return (i64)((u64)a * (u64)f.whole); }
DEVICE i32 times(i32 a, Factor f) { return (i32)((u32)a * (u32)f.whole); }
DEVICE u8 times(u8 a, Factor f) { return (u8)(a * (u8)f.whole); }

DEVICE i64 widen(i64 x) { return x; }
DEVICE i32 widen(i32 x) { return x; }
DEVICE u8 widen(u8 x) { return x; }
template <typename E, typename X> DEVICE E stored(X x) { return (E)x; }
template <> DEVICE bf16 stored<bf16>(f32 x) { return narrow<bf16>(x); }
template <> DEVICE f16 stored<f16>(f32 x) { return narrow<f16>(x); }

// ---- Keys ----

// Rows that indices name; those out of range, which are reported, are the row behind the last.
extern "C" __global__ void row_keys(u32* keys, const i64* index, u64 n, u64 rows, Faults* faults, u32 code) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const i64 at = index[i];
        const bool inside = (u64)at < rows;
        if (!inside) fault(faults, code, i, at, rows);
        keys[i] = inside ? (u32)at : (u32)rows;
    }
}

// Places in a contiguous tensor of `places` elements: as `layout` has them, and `along` for each step of the index.
extern "C" __global__ void place_keys(u32* keys, const i64* index, const __grid_constant__ Strided layout, u64 along,
                                      u64 size, u64 places, u64 n, Faults* faults, u32 code) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const i64 at = index[i];
        const bool inside = (u64)at < size;
        if (!inside) fault(faults, code, i, at, size);
        u64 to[1];
        locate(layout, i, to);
        keys[i] = inside ? (u32)(to[0] + at * along) : (u32)places;
    }
}

// Places in planes of `plane` elements, `outputs` of which belong to each; those outside belong nowhere.
extern "C" __global__ void plane_keys(u32* keys, const i32* index, u64 plane, u64 outputs, u64 places, u64 n) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const u64 at = (u64)(i64)index[i];
        keys[i] = (u32)(at < plane ? i / outputs * plane + at : places);
    }
}

// ---- Sums ----

// Where each row's positions begin, and the end of the last.
extern "C" __global__ void row_starts(u32* starts, const u32* keys, u32 n, u32 rows) {
    const u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row > rows) return;
    u32 low = 0, high = n;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (keys[middle] < row) low = middle + 1; else high = middle;
    }
    starts[row] = low;
}

// What is done with a row's sum. STORE's begin at 0, and without one it leaves zeros.
enum { STORE, ADD_ROUNDED, ADD_SCALED };

template <int LEN> struct Lanes {
    T at[LEN];
};
template <> struct __align__(16) Lanes<16 / sizeof(T)> {
    T at[16 / sizeof(T)];
};

// Rows of the source that a thread has under way where a row has many, as a frequent token has. Their sum has one order, so the
// latency of one load after the other would be the time of the whole kernel. The bounds of the kernels leave registers for them: without,
// the compiler spreads the loads among the additions.
constexpr int AHEAD = sizeof(T) == 1 ? 4 : 8;

// out is [outer, rows, inner], the source [outer, count, inner].
template <int LEN>
DEVICE void add_rows(T* out, const T* source, const u32* starts, const u32* positions, u64 outer, u64 rows, u64 count,
                     u64 inner, u64 padding, u32 log_lanes, u32 kind, Factor factor) {
    const u64 nth = ((u64)blockIdx.x * blockDim.x + threadIdx.x) >> log_lanes;
    const u32 lanes = 1u << log_lanes, lane = threadIdx.x & (lanes - 1);
    if (nth >= outer * rows) return;
    const u64 row = nth % rows;
    const u32 begin = starts[row], end = row == padding ? begin : starts[row + 1];
    if (begin == end && kind != STORE) return;
    const T* from = source + nth / rows * count * inner;
    const u64 step = (u64)gridDim.y * lanes * LEN;
    for (u64 i = ((u64)blockIdx.y * lanes + lane) * LEN; i < inner; i += step) {
        S sums[LEN];
#pragma unroll
        for (int l = 0; l < LEN; l++) sums[l] = S(0);
        const auto row = [&](u64 p) { return *(const Lanes<LEN>*)(from + positions[p] * inner + i); };
        const auto add = [&](u64 p, const Lanes<LEN>& x) {
#pragma unroll
            for (int l = 0; l < LEN; l++) {
                const S more = S(widen(x.at[l]));
                sums[l] = p == begin && kind != STORE ? more : plus(sums[l], more);
            }
        };
        u64 p = begin;
        for (; p + AHEAD <= end; p += AHEAD) {
            Lanes<LEN> x[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) x[k] = row(p + k);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) add(p + k, x[k]);
        }
        for (; p < end; p++) add(p, row(p));
        Lanes<LEN>* to = (Lanes<LEN>*)(out + nth * inner + i);
        Lanes<LEN> y;
        if (kind != STORE) y = *to;
#pragma unroll
        for (int l = 0; l < LEN; l++) {
            const T rounded = stored<T>(sums[l]);
            const S old = kind == STORE ? S(0) : S(widen(y.at[l]));
            y.at[l] = kind == STORE        ? rounded
                      : kind == ADD_SCALED ? stored<T>(plus(old, times(sums[l], factor)))
                                           : stored<T>(plus(old, S(widen(rounded))));
        }
        *to = y;
    }
}

#define ROWS(name, LEN)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 3)                                                             \
        name(T* out, const T* source, const u32* starts, const u32* positions, u64 outer, u64 rows, u64 count,       \
             u64 inner, u64 padding, u32 log_lanes, u32 kind, Factor factor) {                                       \
        add_rows<LEN>(out, source, starts, positions, outer, rows, count, inner, padding, log_lanes, kind, factor);  \
    }
ROWS(rows_packed, 16 / sizeof(T))
ROWS(rows_single, 1)

// Keys from `places` on belong nowhere.
extern "C" __global__ void add_elements(T* out, const T* source, const u32* keys, const u32* positions, u64 places,
                                        u64 n) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const u32 key = keys[i];
        if (key >= places || (i > 0 && keys[i - 1] == key)) continue;
        S sum = S(widen(out[key]));
        for (u64 j = i; j < n && keys[j] == key; j++) sum = plus(sum, S(widen(source[positions[j]])));
        out[key] = stored<T>(sum);
    }
}

// `layout` has a line's first element in out, and in source and index, which lie alike; they have `count` elements a line,
// `step` apart, out `size`, `along` apart. Halves may have one element a line.
extern "C" __global__ void add_lines(T* out, const T* source, const i64* index, const __grid_constant__ Strided layout,
                                     u64 lines, u64 count, u64 step, u64 size, u64 along, Faults* faults, u32 code) {
    const u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 line = (u64)blockIdx.x * blockDim.x + threadIdx.x; line < lines; line += threads) {
        u64 first[2];
        locate(layout, line, first);
        for (u64 i = 0; i < count; i++) {
            const u64 from = first[1] + i * step;
            const i64 at = index[from];
            if ((u64)at >= size) {
                fault(faults, code, from, at, size);
                continue;
            }
            T* to = out + first[0] + at * along;
            *to = stored<T>(plus(S(widen(*to)), S(widen(source[from]))));
        }
    }
}
