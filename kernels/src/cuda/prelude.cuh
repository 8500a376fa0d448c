// What kernels use beyond plain CUDA C++: storage types, packets of 16 bytes, reductions in a fixed order, matrix
// instructions, asynchronous copies and random numbers. Put before every kernel file; includes nothing, so NVRTC
// needs no headers. Needs sm_80 or later.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
typedef float f32;
typedef double f64;

#define DEVICE __device__ __forceinline__

// ---- Storage types: 16 bits in memory, f32 in arithmetic, rounded to nearest even ----

struct __align__(2) bf16 {
    u16 bits;
};

struct __align__(2) f16 {
    u16 bits;
};

// The type that a storage type is computed in.
template <typename T> struct WideOf {
    typedef f32 type;
};
template <> struct WideOf<f64> {
    typedef f64 type;
};
template <typename T> using Wide = typename WideOf<T>::type;

DEVICE f32 widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE f32 widen(f16 x) {
    f32 y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE f32 widen(f32 x) { return x; }
DEVICE f64 widen(f64 x) { return x; }

template <typename T> DEVICE T narrow(Wide<T> x) { return x; }
template <> DEVICE bf16 narrow<bf16>(f32 x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> DEVICE f16 narrow<f16>(f32 x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Below every number, and where there is none, 0.
template <typename T> DEVICE T least() { return T(0); }
template <> DEVICE f32 least<f32>() { return __int_as_float(0xff800000); }
template <> DEVICE f64 least<f64>() { return __longlong_as_double(0xfff0000000000000LL); }
template <> DEVICE i32 least<i32>() { return (i32)0x80000000; }
template <> DEVICE i64 least<i64>() { return (i64)0x8000000000000000LL; }

// Two values in one register, the first in the lower half.
template <typename T> DEVICE u32 narrow2(f32 low, f32 high);
template <> DEVICE u32 narrow2<bf16>(f32 low, f32 high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <> DEVICE u32 narrow2<f16>(f32 low, f32 high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// ---- Packets: 16 bytes at a time, unless N says otherwise; addresses are multiples of a packet's bytes ----

template <typename T, int N = 16 / (int)sizeof(T)> struct __align__(N * sizeof(T)) Packet {
    static constexpr int LEN = N;
    T at[LEN];
};

template <typename T> DEVICE bool is_aligned16(const T* p) { return ((u64)p & 15) == 0; }

template <typename T> DEVICE Packet<T> load(const T* p) { return *(const Packet<T>*)p; }
template <typename T> DEVICE void store(T* p, const Packet<T>& x) { *(Packet<T>*)p = x; }

// Of what is read once: passes the caches without displacing what is read again.
template <typename T> DEVICE Packet<T> load_streaming(const T* p) {
    union {
        u32 words[4];
        Packet<T> packet;
    } x;
    asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
                 : "l"(p)
                 : "memory");
    return x.packet;
}
// Of what is not read again soon.
template <typename T> DEVICE void store_streaming(T* p, const Packet<T>& x) {
    const u32* words = (const u32*)&x;
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

// ---- Reductions: every thread gets the result; the order depends on the number of threads alone ----

constexpr u32 ALL_LANES = 0xffffffffu;

DEVICE int lane_number() { return threadIdx.x & 31; }
DEVICE int warp_number() { return threadIdx.x >> 5; }

struct Sum {
    template <typename T> DEVICE T operator()(T a, T b) const { return a + b; }
};
struct Max {
    template <typename T> DEVICE T operator()(T a, T b) const { return a > b ? a : b; }
    DEVICE f32 operator()(f32 a, f32 b) const { return fmaxf(a, b); }
    DEVICE f64 operator()(f64 a, f64 b) const { return fmax(a, b); }
};

// Among groups of `WIDTH` neighbouring lanes.
template <int WIDTH = 32, typename T, typename Op> DEVICE T warp_reduce(T x, Op op) {
#pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2) x = op(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}
template <int WIDTH = 32, typename T> DEVICE T warp_sum(T x) { return warp_reduce<WIDTH>(x, Sum()); }
template <int WIDTH = 32, typename T> DEVICE T warp_max(T x) { return warp_reduce<WIDTH>(x, Max()); }

// Among a block of whole warps in one dimension. May be called again at once. `identity` leaves others unchanged.
template <typename T, typename Op> DEVICE T block_reduce(T x, Op op, T identity) {
    __shared__ T parts[32];
    const int warps = (blockDim.x + 31) >> 5;
    x = warp_reduce(x, op);
    if (lane_number() == 0) parts[warp_number()] = x;
    __syncthreads();
    x = warp_reduce(lane_number() < warps ? parts[lane_number()] : identity, op);
    __syncthreads();
    return x;
}
template <typename T> DEVICE T block_sum(T x) { return block_reduce(x, Sum(), T(0)); }
template <typename T> DEVICE T block_max(T x) { return block_reduce(x, Max(), least<T>()); }

// ---- Shared memory and asynchronous copies into it ----

// The block's dynamic shared memory, as bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global memory past the first cache; zeros, and nothing read, unless `valid`.
DEVICE void copy_async16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// The first `bytes` of 16, then zeros.
DEVICE void copy_async16_part(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// As the first, of 4 bytes.
DEVICE void copy_async4(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last `PENDING` committed groups of this thread are under way.
template <int PENDING> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- Matrix instructions ----
// Fragments, for g = lane / 4 and t = lane % 4, of 16-bit types:
//   a[0] (g, 2t..)  a[1] (g + 8, 2t..)  a[2] (g, 2t + 8..)  a[3] (g + 8, 2t + 8..)   of A (16 x 16)
//   b[0] (2t.., g)  b[1] (2t + 8.., g)                                              of B (16 x 8)
//   c[0], c[1] (g, 2t..)   c[2], c[3] (g + 8, 2t..)                                 of C (16 x 8)

// Four 8 x 8 matrices of 16-bit elements; lane i names row i % 8 of matrix i / 8. Lane i gets of matrix j, in r[j],
// elements (i / 4, 2 (i % 4)..), or with `trans` those of the transposed matrix.
template <bool TRANS> DEVICE void load_matrices(u32 (&r)[4], u32 row) {
    if (TRANS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(row)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(row)
                     : "memory");
    }
}

// c += a b
template <typename T> DEVICE void multiply_add(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> DEVICE void multiply_add<bf16>(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void multiply_add<f16>(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// f32 rounded to the 19 bits that m16n8k8 reads: a[0] (g, t)  a[1] (g + 8, t)  a[2] (g, t + 4)  a[3] (g + 8, t + 4);
// b[0] (t, g)  b[1] (t + 4, g); c as above.
DEVICE u32 narrow_tf32(f32 x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
DEVICE void multiply_add_tf32(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Random numbers: the CPU's, bit for bit (tensor's rng.rs) ----

// The draws of one site: blocks of four words, by number. Word w of the element at place p is
// block(p / 4, w)[p % 4].
struct Stream {
    u32 key0, key1;

    DEVICE uint4 block(u64 number, u64 lane) const {
        u32 c0 = (u32)number, c1 = (u32)(number >> 32), c2 = (u32)lane, c3 = (u32)(lane >> 32);
        u32 k0 = key0, k1 = key1;
#pragma unroll
        for (int round = 0; round < 10; round++) {
            const u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
            c0 = (u32)(b >> 32) ^ c1 ^ k0;
            c1 = (u32)b;
            c2 = (u32)(a >> 32) ^ c3 ^ k1;
            c3 = (u32)a;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        return make_uint4(c0, c1, c2, c3);
    }

    DEVICE u32 word(u64 place, u64 lane) const {
        const uint4 words = block(place >> 2, lane);
        const u32 low = place & 1 ? words.y : words.x, high = place & 1 ? words.w : words.z;
        return place & 2 ? high : low;
    }
};

// A site's draws as the launcher names them. In a captured step the step's number is in memory.
struct Draws {
    u64 seed, site, step;
    const u64* step_now;

    DEVICE Stream stream() const {
        const u64 at = step_now ? *step_now : step;
        const Stream run = {(u32)seed, (u32)(seed >> 32)};
        const uint4 key = run.block(at, site);
        return {key.x, key.y};
    }
};

// Numbers between 0 and 1, from one word, or two for f64; never 0.
DEVICE f32 unit(u32 word) { return ((f32)(word >> 8) + 0.5f) * 0x1p-24f; }
DEVICE f64 unit(u32 high, u32 low) {
    return ((f64)(((u64)high << 32 | low) >> 12) + 0.5) * 0x1p-52;
}

// A normally distributed number from two such numbers, by the method of Box and Muller. The cosine of a multiple of pi
// needs no table; it is the CPU's to a few units in the last place.
DEVICE f32 normal(f32 u, f32 v) { return sqrtf(logf(u) * -2.0f) * cospif((v - 0.5f) * 2.0f); }
DEVICE f64 normal(f64 u, f64 v) { return sqrt(log(u) * -2.0) * cospi((v - 0.5) * 2.0); }
