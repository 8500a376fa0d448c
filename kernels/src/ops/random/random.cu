// Random numbers by place: Philox's words for the elements of a part of a larger tensor, and what is made of them.
//
// The element of number i in row-major order has the place `first` + its offset by `places` in the whole tensor, and its
// words come from block place / 4. A thread takes GROUP neighbouring elements at a time, whose words are whole blocks if
// the places allow (`together`), so that a block is computed once for four elements. Bytes moved: each element written
// once, and for dropout read once.

typedef ELEM T;
typedef Wide<T> W;

constexpr int GROUP = sizeof(T) == 2 ? 8 : 4;

struct Places {
    u64 first;
    bool together;
};

// Words number `lane` of LEN elements from number i on.
template <int LEN>
DEVICE void words(u32 (&to)[LEN], const Stream& stream, u64 lane, const Strided& layout, const Places& places, u64 i) {
    u64 at[1];
    if (LEN > 1 && places.together) {
        locate(layout, i, at);
#pragma unroll
        for (int b = 0; b < LEN / 4; b++) {
            const uint4 block = stream.block((places.first + at[0]) / 4 + b, lane);
            to[4 * b] = block.x;
            to[4 * b + 1] = block.y;
            to[4 * b + 2] = block.z;
            to[4 * b + 3] = block.w;
        }
        return;
    }
    for (int l = 0; l < LEN; l++) {
        locate(layout, i + l, at);
        to[l] = stream.word(places.first + at[0], lane);
    }
}

// Numbers between 0 and 1; f64 takes further digits from word lane + 2.
template <int LEN>
DEVICE void units(W (&to)[LEN], const Stream& stream, u64 lane, const Strided& layout, const Places& places, u64 i) {
    u32 high[LEN], low[LEN];
    words(high, stream, lane, layout, places, i);
    if (sizeof(W) == 8) words(low, stream, lane + 2, layout, places, i);
#pragma unroll
    for (int l = 0; l < LEN; l++) {
        if constexpr (sizeof(W) == 8) to[l] = unit(high[l], low[l]);
        else to[l] = unit(high[l]);
    }
}

// `at<LEN>(i)` makes LEN elements from number i on.
template <typename Maker> DEVICE void for_groups(const Maker& make, u64 n) {
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 g = thread; g < n / GROUP; g += threads) make.template at<GROUP>(g * GROUP);
    const u64 rest = n / GROUP * GROUP + thread;
    if (rest < n) make.template at<1>(rest);
}

// The memory is the allocator's own, and groups are aligned in it.
template <int LEN, typename V = T>
struct __align__(LEN == 1 ? sizeof(V) : LEN * sizeof(V) > 16 ? 16 : LEN * sizeof(V)) Group {
    V at[LEN];
};

#if DROPOUT

struct Dropout {
    T* out;
    const T* x;
    const Strided& layout;
    Places places;
    Stream stream;
    u32 threshold;
    W scale;

    template <int LEN> DEVICE void at(u64 i) const {
        u32 draws[LEN];
        words(draws, stream, 0, layout, places, i);
        const Group<LEN> from = *(const Group<LEN>*)(x + i);
        Group<LEN> to;
#pragma unroll
        for (int l = 0; l < LEN; l++) to.at[l] = narrow<T>(draws[l] >= threshold ? widen(from.at[l]) * scale : W(0));
        *(Group<LEN>*)(out + i) = to;
    }
};

extern "C" __global__ void dropout(T* out, const T* x, const __grid_constant__ Strided layout, u64 first, u32 together,
                                   u64 n, Draws draws, u32 threshold, W scale) {
    const Places places = {first, together != 0};
    for_groups(Dropout{out, x, layout, places, draws.stream(), threshold, scale}, n);
}

// residual + dropout(x + bias), each step rounded: to T, and the sum to the stream's type S, which is T or wider. The bias
// repeats after `width` elements. A kernel without a bias, or without draws, has neither division nor generator in it.
typedef STREAM S;

template <bool BIAS, bool DRAWN> struct BiasDropoutAdd {
    S* out;
    const T* x;
    const S* residual;
    const T* bias;
    u64 width;
    const Strided& layout;
    Places places;
    Stream stream;
    u32 threshold;
    W scale;

    template <int LEN> DEVICE void at(u64 i) const {
        u32 draws[LEN] = {};
        if constexpr (DRAWN) words(draws, stream, 0, layout, places, i);
        const Group<LEN> from = *(const Group<LEN>*)(x + i);
        const Group<LEN, S> rest = *(const Group<LEN, S>*)(residual + i);
        Group<LEN, S> to;
        u64 column = BIAS ? i % width : 0;
#pragma unroll
        for (int l = 0; l < LEN; l++) {
            T y = from.at[l];
            if constexpr (BIAS) {
                y = narrow<T>(vec::add(widen(y), widen(bias[column])));
                column = column + 1 == width ? 0 : column + 1;
            }
            y = narrow<T>(draws[l] >= threshold ? vec::mul(widen(y), scale) : W(0));
            to.at[l] = narrow<S>(vec::add(widen(rest.at[l]), widen(y)));
        }
        *(Group<LEN, S>*)(out + i) = to;
    }
};

#define BIAS_DROPOUT_ADD(name, BIAS, DRAWN)                                                                            \
    extern "C" __global__ void name(S* out, const T* x, const S* residual, const T* bias, u64 width,                   \
                                    const __grid_constant__ Strided layout, u64 first, u32 together, u64 n,            \
                                    Draws draws, u32 threshold, W scale) {                                             \
        const Places places = {first, together != 0};                                                                  \
        const BiasDropoutAdd<BIAS, DRAWN> make = {out,    x,      residual,       bias,      width,                    \
                                                  layout, places, draws.stream(), threshold, scale};                   \
        for_groups(make, n);                                                                                           \
    }
BIAS_DROPOUT_ADD(bias_dropout_add, true, true)
BIAS_DROPOUT_ADD(bias_add, true, false)
BIAS_DROPOUT_ADD(dropout_add, false, true)
BIAS_DROPOUT_ADD(branch_add, false, false)

#else

// Makes a number of two between 0 and 1.
struct Function FUNCTION;

DEVICE W made(const Function& f, W u, W v) {
    const W x[2] = {u, v};
    W y[1];
    f(x, y);
    return y[0];
}

struct Fill {
    T* out;
    const Strided& layout;
    Places places;
    Stream stream;
    const Function& f;

    template <int LEN> DEVICE void at(u64 i) const {
        W u[LEN], v[LEN];
        units(u, stream, 0, layout, places, i);
        units(v, stream, 1, layout, places, i);
        Group<LEN> to;
#pragma unroll
        for (int l = 0; l < LEN; l++) to.at[l] = narrow<T>(made(f, u[l], v[l]));
        *(Group<LEN>*)(out + i) = to;
    }
};

extern "C" __global__ void fill(T* out, const __grid_constant__ Strided layout, u64 first, u32 together, u64 n,
                                Draws draws, const __grid_constant__ Function f) {
    for_groups(Fill{out, layout, {first, together != 0}, draws.stream(), f}, n);
}

// One element a thread: of up to `tries` numbers, from lanes 4 apart, the first within `bound`.
extern "C" __global__ void truncated(T* out, const __grid_constant__ Strided layout, u64 first, u64 n, Draws draws,
                                     const __grid_constant__ Function f, W bound, u32 tries, W mean, W std) {
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    const Places places = {first, false};
    const Stream stream = draws.stream();
    for (u64 i = thread; i < n; i += threads) {
        W kept = mean;
        for (u32 round = 0; round < tries; round++) {
            W u[1], v[1];
            units(u, stream, 4 * round, layout, places, i);
            units(v, stream, 4 * round + 1, layout, places, i);
            const W z = made(f, u[0], v[0]);
            if (z > bound || z < -bound) continue;
            kept = vec::add(mean, vec::mul(z, std));
            break;
        }
        out[i] = narrow<T>(kept);
    }
}

#endif
