// Combines the elements of several ranks, in order of the ranks: ((x0 + x1) + x2) + ... in the type that they are computed
// in, rounded once at the end. An average is divided by the number of ranks before that.
//
// One thread an aligned packet of 16 bytes, or an element where addresses do not allow it, striding by the grid; the ranks
// in a loop. Reads each rank's element once and writes one: (ranks + 1) * sizeof(T) bytes an element.

typedef ELEM T;

#if FLOAT
typedef Wide<T> W;
DEVICE W enter(T x) { return widen(x); }
DEVICE T leave(W x) { return narrow<T>(x); }
DEVICE f32 sum(f32 a, f32 b) { return __fadd_rn(a, b); }
DEVICE f64 sum(f64 a, f64 b) { return __dadd_rn(a, b); }
DEVICE f32 product(f32 a, f32 b) { return __fmul_rn(a, b); }
DEVICE f64 product(f64 a, f64 b) { return __dmul_rn(a, b); }
DEVICE W largest(W a, W b) { return b > a || b != b ? b : a; }
DEVICE W smallest(W a, W b) { return b < a || b != b ? b : a; }
DEVICE f32 quotient(f32 a, f32 b) { return __fdiv_rn(a, b); }
DEVICE f64 quotient(f64 a, f64 b) { return __ddiv_rn(a, b); }
#else
// Integers wrap.
typedef T W;
DEVICE W enter(T x) { return x; }
DEVICE T leave(W x) { return x; }
DEVICE W sum(W a, W b) { return (W)((u64)a + (u64)b); }
DEVICE W product(W a, W b) { return (W)((u64)a * (u64)b); }
DEVICE W largest(W a, W b) { return b > a ? b : a; }
DEVICE W smallest(W a, W b) { return b < a ? b : a; }
DEVICE W bits_and(W a, W b) { return a & b; }
DEVICE W bits_or(W a, W b) { return a | b; }
DEVICE W bits_xor(W a, W b) { return a ^ b; }
#endif

#if AVERAGE
DEVICE T finish(W all, u64 ranks) { return leave(quotient(all, (W)ranks)); }
#else
DEVICE T finish(W all, u64 ranks) { return leave(all); }
#endif

// `own` are the elements of rank `place`; those of rank r before it begin at others + r * stride, of one after it at
// others + (r - 1) * stride. `out` may be `own`.
extern "C" __global__ void combine(T* out, const T* own, const T* others, u64 stride, u64 count, u64 ranks, u64 place) {
    constexpr u64 LEN = Packet<T>::LEN;
    const u64 step = (u64)gridDim.x * blockDim.x, first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool aligned = is_aligned16(out) && is_aligned16(own) && is_aligned16(others) && stride % LEN == 0;
    const u64 packets = aligned ? count / LEN : 0;
    for (u64 i = first; i < packets; i += step) {
        W all[LEN];
        for (u64 r = 0; r < ranks; r++) {
            const T* from = r == place ? own : others + (r < place ? r : r - 1) * stride;
            const Packet<T> x = load(from + i * LEN);
#pragma unroll
            for (u64 j = 0; j < LEN; j++) all[j] = r == 0 ? enter(x.at[j]) : BY(all[j], enter(x.at[j]));
        }
        Packet<T> y;
#pragma unroll
        for (u64 j = 0; j < LEN; j++) y.at[j] = finish(all[j], ranks);
        store(out + i * LEN, y);
    }
    for (u64 i = packets * LEN + first; i < count; i += step) {
        W all = W();
        for (u64 r = 0; r < ranks; r++) {
            const T* from = r == place ? own : others + (r < place ? r : r - 1) * stride;
            all = r == 0 ? enter(from[i]) : BY(all, enter(from[i]));
        }
        out[i] = finish(all, ranks);
    }
}
