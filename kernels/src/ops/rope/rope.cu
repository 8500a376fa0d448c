// Rotary position embedding: rows of x [batch, heads, positions, D], the halves of each rotated by its position's angles.
//
// A thread takes LANES neighbouring angles of one position, computes their cosines and sines once, in f64, and rotates them
// in up to 16 heads. Each element is read once and written once, LANES at a time where they lie together; 8 bytes of
// position a thread.
//
// ELEMENT: the elements.

typedef ELEMENT T;
typedef Wide<T> W;

constexpr int HEADS = 16;

// LANES elements of a row, `step` apart.
template <int LANES> struct __align__(sizeof(T) * LANES) Run {
    T at[LANES];
};

template <int LANES> DEVICE Run<LANES> take(const T* p, u64 step) {
    if (step == 1) return *(const Run<LANES>*)p;
    Run<LANES> run;
#pragma unroll
    for (int l = 0; l < LANES; l++) run.at[l] = p[l * step];
    return run;
}

// `layout` has the rows' first elements, [batch, heads, positions]; positions are `ids` [batches, positions], where batches
// is 1 or batch, or without ids `offset` and those after it. heads: those that share positions. The angles at position 1 are
// `frequencies`, or follow from `base`.
template <int LANES>
DEVICE void rotate(T* y, const T* x, const i64* ids, const f64* frequencies, const Strided& layout, u64 step, u64 batches,
                   u64 heads, u64 positions, u64 half, i64 offset, f64 base, f64 factor, f64 sense) {
    const u64 runs = half / LANES, i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= positions * runs) return;
    const u64 t = i / runs, first = i % runs * LANES;
    for (u64 batch = blockIdx.z; batch < batches; batch += gridDim.z) {
        const f64 position = (f64)(ids ? ids[batch * positions + t] : offset + (i64)t);
        W cosines[LANES], sines[LANES];
#pragma unroll
        for (int l = 0; l < LANES; l++) {
            f64 sine, cosine;
            const f64 frequency = frequencies ? frequencies[first + l] : pow(base, -(f64)(first + l) / (f64)half);
            sincos(frequency * position, &sine, &cosine);
            cosines[l] = (W)(cosine * factor);
            sines[l] = (W)(sine * sense * factor);
        }
        for (u64 head = (u64)blockIdx.y * HEADS; head < heads; head += (u64)gridDim.y * HEADS) {
            const u64 last = min(head + HEADS, heads);
#pragma unroll 2
            for (u64 h = head; h < last; h++) {
                const u64 row = (batch * heads + h) * positions + t;
                u64 from[1];
                locate(layout, row, from);
                const Run<LANES> a = take<LANES>(x + from[0] + first * step, step);
                const Run<LANES> b = take<LANES>(x + from[0] + (first + half) * step, step);
                Run<LANES> p, q;
#pragma unroll
                for (int l = 0; l < LANES; l++) {
                    const W u = widen(a.at[l]), v = widen(b.at[l]);
                    p.at[l] = narrow<T>(u * cosines[l] - v * sines[l]);
                    q.at[l] = narrow<T>(v * cosines[l] + u * sines[l]);
                }
                *(Run<LANES>*)(y + row * 2 * half + first) = p;
                *(Run<LANES>*)(y + row * 2 * half + first + half) = q;
            }
        }
    }
}

#define ROTATE(name, LANES)                                                                                           \
    extern "C" __global__ void name(T* y, const T* x, const i64* ids, const f64* frequencies,                          \
                                    const __grid_constant__ Strided layout, u64 step, u64 batches, u64 heads,          \
                                    u64 positions, u64 half, i64 offset, f64 base, f64 factor, f64 sense) {            \
        rotate<LANES>(y, x, ids, frequencies, layout, step, batches, heads, positions, half, offset, base, factor,     \
                      sense);                                                                                          \
    }
ROTATE(rotate_2, 2)
ROTATE(rotate_1, 1)
