// Lines sorted by a bitonic network of (key, place) pairs, all different, so that the order is the stable one whatever
// the network does. A line is filled up to a power of two with pairs that come last.
//
// Pairs that lie within a tile of shared memory are compared there (`sort_tiles`, `merge_tiles`), farther ones in global
// memory (`exchange`), each launch of which reads and writes 16 bytes a pair.

typedef STORED T;

// A pair's order: by key, then by place.
struct Item {
    u64 key, at;

    DEVICE bool operator<(const Item& other) const { return key < other.key || (key == other.key && at < other.at); }
};

// Keys in the order of the elements: all NaN are equal and above every number; zeros are equal.
DEVICE u64 key_of(f64 x) {
    if (x != x) return ~0ull;
    const u64 bits = __double_as_longlong(x + 0.0);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}
DEVICE u64 key_of(f32 x) { return key_of((f64)x); }
DEVICE u64 key_of(bf16 x) { return key_of((f64)widen(x)); }
DEVICE u64 key_of(f16 x) { return key_of((f64)widen(x)); }
DEVICE u64 key_of(i64 x) { return (u64)x ^ 1ull << 63; }
DEVICE u64 key_of(i32 x) { return key_of((i64)x); }
DEVICE u64 key_of(u8 x) { return x; }

// Pairs of a tile at most; there are two a thread.
constexpr int TILE_MAX = 1024;
constexpr int THREADS = TILE_MAX / 2;
DEVICE u64 tile_size() { return 2 * blockDim.x; }

// Compares items `step` apart within a tile; in runs of `size`, of which every other one is to descend.
DEVICE void compare(Item* items, u64 first, u64 size, u64 step) {
    const u64 low = threadIdx.x / step * 2 * step + threadIdx.x % step;
    const bool descends = ((first + low) & size) != 0;
    const Item a = items[low], b = items[low + step];
    if ((b < a) != descends) {
        items[low] = b;
        items[low + step] = a;
    }
}

// Reads elements, and sorts each tile, one up and the next down.
extern "C" __global__ void __launch_bounds__(THREADS)
    sort_tiles(Item* items, const T* x, u64 n, u64 padded, u64 descending) {
    __shared__ Item tile[TILE_MAX];
    const u64 len = tile_size(), tiles = padded / len, line = blockIdx.x / tiles, first = blockIdx.x % tiles * len;
    for (int i = threadIdx.x; i < len; i += blockDim.x) {
        const u64 at = first + i;
        const u64 key = at < n ? key_of(x[line * n + at]) : ~0ull;
        // Beyond the line's end the places are the largest.
        tile[i] = {at < n && descending ? ~key : key, at};
    }
    for (u64 size = 2; size <= len; size *= 2) {
        for (u64 step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            compare(tile, first, size, step);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < len; i += blockDim.x) items[line * padded + first + i] = tile[i];
}

// One step in global memory: a thread two items.
extern "C" __global__ void __launch_bounds__(256) exchange(Item* items, u64 padded, u64 size, u64 step, u64 pairs) {
    const u64 pair = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= pairs) return;
    const u64 line = pair / (padded / 2), i = pair % (padded / 2);
    const u64 low = i / step * 2 * step + i % step;
    const bool descends = (low & size) != 0;
    Item* const at = items + line * padded + low;
    const Item a = at[0], b = at[step];
    if ((b < a) != descends) {
        at[0] = b;
        at[step] = a;
    }
}

// The steps of a run of `size` that stay within tiles.
extern "C" __global__ void __launch_bounds__(THREADS) merge_tiles(Item* items, u64 padded, u64 size) {
    __shared__ Item tile[TILE_MAX];
    const u64 len = tile_size(), first = (u64)blockIdx.x % (padded / len) * len;
    items += (u64)blockIdx.x * len;
    for (int i = threadIdx.x; i < len; i += blockDim.x) tile[i] = items[i];
    for (u64 step = len / 2; step > 0; step /= 2) {
        __syncthreads();
        compare(tile, first, size, step);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < len; i += blockDim.x) items[i] = tile[i];
}

// The first k of every line.
extern "C" __global__ void __launch_bounds__(256)
    take(T* values, i64* places, const Item* items, const T* x, u64 n, u64 padded, u64 k, u64 total) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    const u64 line = i / k, at = items[line * padded + i % k].at;
    values[i] = x[line * n + at];
    places[i] = at;
}
