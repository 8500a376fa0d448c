// Rows on a GPU: each is worked on by a team of threads, a warp where it is short and a block where it is long.
//
// A row is cut into packets of 16 bytes from its beginning; packet p belongs to thread p % TEAM, whatever the row's
// address, so what is added to what depends on the width alone. A team keeps its row in registers between passes
// (PACKETS a thread) or, with PACKETS 0, reads it again, then from the cache. So a pass moves each element once.
//
// Macros: ELEMENT, the storage type; TEAM; PACKETS.
#pragma once

typedef ELEMENT T;
typedef Wide<T> W;

constexpr int LEN = Packet<T>::LEN;
constexpr int KEPT = PACKETS > 0 ? PACKETS : 1;
// Teams in a block of warps.
constexpr int WARPS = 4;
constexpr int TEAMS = TEAM == 32 ? WARPS : 1;
constexpr int THREADS = TEAM * TEAMS;

// A kernel of teams. Unless told that one block at a time will do, the compiler spills a few registers here and there.
#define TEAM_KERNEL TEAM_KERNEL_BESIDE(1)
// Where rows are not kept in registers, so many blocks fit a multiprocessor: one loads while others wait for their sums.
#define TEAM_KERNEL_BESIDE(BLOCKS) extern "C" __global__ void __launch_bounds__(THREADS, PACKETS > 0 ? 1 : BLOCKS)

DEVICE u64 team_row() { return (u64)blockIdx.x * TEAMS + (TEAM == 32 ? warp_number() : 0); }
DEVICE int team_rank() { return TEAM == 32 ? lane_number() : threadIdx.x; }

template <typename V> DEVICE V team_sum(V x) {
    if constexpr (TEAM == 32) return warp_sum(x);
    else return block_sum(x);
}
template <typename V> DEVICE V team_max(V x) {
    if constexpr (TEAM == 32) return warp_max(x);
    else return block_max(x);
}

// Calls f(which of the thread's packets, where it begins) for each packet of a row.
template <typename F> DEVICE void each_packet(i64 width, F f) {
    if constexpr (PACKETS > 0) {
#pragma unroll
        for (int i = 0; i < PACKETS; i++) {
            const i64 at = (i64)(team_rank() + i * TEAM) * LEN;
            if (at < width) f(i, at);
        }
    } else {
        for (i64 at = (i64)team_rank() * LEN; at < width; at += TEAM * LEN) f(0, at);
    }
}

// 16 bytes that begin at any element, from the two packets that they lie in.
DEVICE Packet<T> load_across(const T* p) {
    const u64 place = (u64)p;
    const ulonglong2* aligned = (const ulonglong2*)(place & ~15ull);
    const ulonglong2 low = aligned[0], high = aligned[1];
    const bool far = place & 8;
    const u64 a = far ? low.y : low.x, b = far ? high.x : low.y, c = far ? high.y : high.x;
    const u32 bits = (place & 7) * 8;
    union {
        u64 words[2];
        Packet<T> packet;
    } x;
    x.words[0] = a >> bits | (b << 1) << (63 - bits);
    x.words[1] = b >> bits | (c << 1) << (63 - bits);
    return x.packet;
}

// As many elements of V, which is T or narrower, as a packet of T has.
template <typename V> using PacketOf = Packet<V, LEN>;

// Whether a packet of V may begin here.
template <typename V> DEVICE bool is_aligned(const V* p) { return ((u64)p & (sizeof(PacketOf<V>) - 1)) == 0; }

// Elements `at ..` of `width` that lie together; `fill` where there is none.
template <typename V> DEVICE PacketOf<V> read_packet(const V* x, i64 at, i64 width, V fill) {
    if (at >= 0 && at + LEN <= width) {
        if (is_aligned(x + at)) return *(const PacketOf<V>*)(x + at);
        if constexpr (sizeof(V) == sizeof(T))
            if (at + 2 * LEN <= width) return load_across(x + at);
    }
    PacketOf<V> p;
#pragma unroll
    for (int j = 0; j < LEN; j++) p.at[j] = at + j >= 0 && at + j < width ? x[at + j] : fill;
    return p;
}

// All of a row's packets that the thread keeps. Where packets lie whole, nothing but loads stands between the first load and the last, so
// that all are under way together.
template <typename V> DEVICE void read_packets(PacketOf<V> (&kept)[KEPT], const V* x, i64 width, V fill) {
    if (is_aligned(x) && width % LEN == 0) each_packet(width, [&](int i, i64 at) { kept[i] = *(const PacketOf<V>*)(x + at); });
    else each_packet(width, [&](int i, i64 at) { kept[i] = read_packet(x, at, width, fill); });
}

// Writes a packet to device memory at once. An assignment of elements that were made one by one is as many writes.
template <typename T, int N> DEVICE void store_whole(T* p, const Packet<T, N>& x) {
    constexpr int BYTES = N * sizeof(T);
    if constexpr (BYTES % 8) {
        *(Packet<T, N>*)p = x;
    } else {
        union {
            Packet<T, N> packet;
            u32 words[BYTES / 4];
        } u;
        u.packet = x;
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++)
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"((u32*)p + 4 * i), "r"(u.words[4 * i]),
                         "r"(u.words[4 * i + 1]), "r"(u.words[4 * i + 2]), "r"(u.words[4 * i + 3])
                         : "memory");
        if constexpr (BYTES == 8)
            asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(u.words[0]), "r"(u.words[1]) : "memory");
    }
}

template <typename V> DEVICE void write_packet(V* y, i64 at, i64 width, const PacketOf<V>& p) {
    if (at >= 0 && at + LEN <= width && is_aligned(y + at)) {
        store_whole(y + at, p);
        return;
    }
#pragma unroll
    for (int j = 0; j < LEN; j++)
        if (at + j >= 0 && at + j < width) y[at + j] = p.at[j];
}

// A tensor of rows: each lies together, `stride` elements after the one before.
template <typename V> struct RowsOf {
    const V* data;
    u64 stride;
};
typedef RowsOf<T> Rows;

// A row of a tensor.
template <typename V> struct LineOf {
    const V* x;
    const i64 width;
    const V fill;
    PacketOf<V> kept[KEPT];

    DEVICE LineOf(const RowsOf<V>& rows, u64 row, i64 width, V fill)
        : x(rows.data + row * rows.stride), width(width), fill(fill) {
        if constexpr (PACKETS > 0) read_packets(kept, this->x, width, fill);
    }

    DEVICE PacketOf<V> read(i64 at) const { return read_packet(x, at, width, fill); }

    // The thread's packet number i, which begins at `at`.
    DEVICE PacketOf<V> packet(int i, i64 at) const {
        if constexpr (PACKETS > 0) return kept[i];
        else return read(at);
    }
};
typedef LineOf<T> Line;

// y[j] = f(j, x[j]) for a whole row. What is written does not depend on who writes it, so where nothing is kept,
// packets begin where the output's do.
template <typename F> DEVICE void map_row(T* y, const Line& x, F f) {
    const auto map = [&](i64 at, Packet<T> p) {
#pragma unroll
        for (int j = 0; j < LEN; j++) p.at[j] = narrow<T>(f(at + j, widen(p.at[j])));
        write_packet(y, at, x.width, p);
    };
    if constexpr (PACKETS > 0) {
        each_packet(x.width, [&](int i, i64 at) { map(at, x.packet(i, at)); });
    } else {
        const i64 before = ((u64)y & 15) / sizeof(T);
        for (i64 at = (i64)team_rank() * LEN - before; at < x.width; at += TEAM * LEN) map(at, x.read(at));
    }
}

// The same of two rows.
template <typename F> DEVICE void map_rows(T* y, const Line& a, const Line& b, F f) {
    each_packet(a.width, [&](int i, i64 at) {
        Packet<T> p = a.packet(i, at);
        const Packet<T> q = b.packet(i, at);
#pragma unroll
        for (int j = 0; j < LEN; j++) p.at[j] = narrow<T>(f(at + j, widen(p.at[j]), widen(q.at[j])));
        write_packet(y, at, a.width, p);
    });
}

// What softmax knows of a row: the largest element and the sum of the exponentials below it.
struct Peak {
    W max, sum;
};

// In one pass; what was added before a larger element came is scaled. The fill must be `least`.
DEVICE Peak peak_of(const Line& x) {
    // Nothing is subtracted while there is no number: NaN must come of NaN alone.
    const auto shift = [](W max) { return max == least<W>() ? W(0) : max; };
    W max = least<W>(), sum = 0;
    each_packet(x.width, [&](int i, i64 at) {
        const Packet<T> p = x.packet(i, at);
        W top = max;
#pragma unroll
        for (int j = 0; j < LEN; j++) top = Max()(widen(p.at[j]), top);
        const W below = shift(top);
        sum *= exp(max - below);
        W part = 0;
#pragma unroll
        for (int j = 0; j < LEN; j++) part += exp(widen(p.at[j]) - below);
        sum += part;
        max = top;
    });
    Peak peak;
    peak.max = team_max(max);
    peak.sum = team_sum(sum * exp(max - shift(peak.max)));
    return peak;
}
