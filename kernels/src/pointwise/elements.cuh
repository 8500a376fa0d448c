// Loops of kernels that make each output element from the elements of INPUTS inputs at its own place.
//
// To be defined before: INPUTS; the storage types FIRST (of the first input), REST (of the others) and OUT. A functor
// `Each` states, as `Each::X`, the type that inputs are converted to, and makes an element of `x[INPUTS]` and its number
// in row-major order.
//
// A thread takes LANES neighbouring elements at a time, as many as make 16 bytes of the widest type, and threads stride
// by the grid. Each input element is read once and each output element written once, in accesses of up to 16 bytes
// wherever elements lie together; an input that repeats along the innermost dimension is read once for all lanes.
#pragma once

constexpr int widest(int a, int b) { return a > b ? a : b; }
constexpr int LANES = 16 / widest(sizeof(OUT), widest(sizeof(FIRST), INPUTS > 1 ? sizeof(REST) : 1));

struct Inputs {
    const void* at[INPUTS];
};

// An element in the type X.
template <typename X, typename A> DEVICE X value(A a) { return (X)a; }
template <typename X> DEVICE X value(bf16 a) { return (X)widen(a); }
template <typename X> DEVICE X value(f16 a) { return (X)widen(a); }

// What is read and written at once.
template <int BYTES> struct WordOf;
template <> struct WordOf<1> { typedef u8 type; };
template <> struct WordOf<2> { typedef u16 type; };
template <> struct WordOf<4> { typedef u32 type; };
template <> struct WordOf<8> { typedef uint2 type; };
template <> struct WordOf<16> { typedef uint4 type; };

template <typename T, int LEN> union Lanes {
    typedef typename WordOf<sizeof(T) * LEN>::type Word;
    Word word;
    T at[LEN];
};

// Input number n of LEN elements from `p` on, which lie a stride apart.
template <typename A, typename X, int LEN>
DEVICE void take(X (&x)[LEN][INPUTS], int n, const A* p, u64 stride) {
    if (stride == 1) {
        Lanes<A, LEN> lanes;
        lanes.word = *(const typename Lanes<A, LEN>::Word*)p;
#pragma unroll
        for (int l = 0; l < LEN; l++) x[l][n] = value<X>(lanes.at[l]);
    } else if (stride == 0) {
        const X all = value<X>(*p);
#pragma unroll
        for (int l = 0; l < LEN; l++) x[l][n] = all;
    } else {
#pragma unroll
        for (int l = 0; l < LEN; l++) x[l][n] = value<X>(p[l * stride]);
    }
}

// LEN elements of the output from `p` on, the first of them number i.
template <typename Each, int LEN>
DEVICE void put(const Each& each, const typename Each::X (&x)[LEN][INPUTS], OUT* p, u64 stride, u64 i) {
    Lanes<OUT, LEN> lanes;
#pragma unroll
    for (int l = 0; l < LEN; l++) lanes.at[l] = each(x[l], i + l);
    if (stride == 1) {
        *(typename Lanes<OUT, LEN>::Word*)p = lanes.word;
    } else {
#pragma unroll
        for (int l = 0; l < LEN; l++) p[l * stride] = lanes.at[l];
    }
}

// All lie together in one order.
template <int LEN, typename Each> DEVICE void at_place(const Each& each, OUT* out, const Inputs& in, u64 i) {
    typename Each::X x[LEN][INPUTS];
    take<FIRST>(x, 0, (const FIRST*)in.at[0] + i, 1);
#pragma unroll
    for (int n = 1; n < INPUTS; n++) take<REST>(x, n, (const REST*)in.at[n] + i, 1);
    put(each, x, out + i, 1, i);
}

template <typename Each> DEVICE void run_contiguous(const Each& each, OUT* out, const Inputs& in, u64 n) {
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    const u64 packets = n / LANES, rest = packets * LANES + thread;
    for (u64 p = thread; p < packets; p += threads) at_place<LANES>(each, out, in, p * LANES);
    if (rest < n) at_place<1>(each, out, in, rest);
}

// Any strides. For LEN > 1 the innermost dimension is a multiple of LEN, and what lies together along it is aligned.
template <int LEN, typename Each>
DEVICE void run_strided(const Each& each, OUT* out, const Inputs& in, const Strided& layout, u64 n) {
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    const u64 inner = layout.rank - 1;
    for (u64 p = thread; p < n / LEN; p += threads) {
        const u64 i = p * LEN;
        u64 at[INPUTS + 1];
        locate(layout, i, at);
        typename Each::X x[LEN][INPUTS];
        take<FIRST>(x, 0, (const FIRST*)in.at[0] + at[0], layout.strides[0][inner]);
#pragma unroll
        for (int k = 1; k < INPUTS; k++)
            take<REST>(x, k, (const REST*)in.at[k] + at[k], layout.strides[k][inner]);
        put(each, x, out + at[INPUTS], layout.strides[INPUTS][inner], i);
    }
}

// The entry points; a program has those of one kind.
#if CONTIGUOUS
#define KERNELS(Each)                                                                                                \
    extern "C" __global__ void contiguous(OUT* out, Inputs in, u64 n, Each each) { run_contiguous(each, out, in, n); }
#else
#define KERNELS(Each)                                                                                                \
    extern "C" __global__ void packets(OUT* out, Inputs in, const __grid_constant__ Strided layout, u64 n,          \
                                       Each each) {                                                                  \
        run_strided<LANES>(each, out, in, layout, n);                                                                \
    }                                                                                                                \
    extern "C" __global__ void singles(OUT* out, Inputs in, const __grid_constant__ Strided layout, u64 n,          \
                                       Each each) {                                                                  \
        run_strided<1>(each, out, in, layout, n);                                                                    \
    }
#endif
