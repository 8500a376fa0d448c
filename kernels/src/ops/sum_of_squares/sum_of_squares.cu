// Sums of squares in the order of the CPU, bit for bit: leaves are blocks of 64 elements, added by eight lanes (element
// i by lane i % 8) and then halves first; above them a dyadic tree. Reads each element once.

typedef ELEMENT T;
// Leaves that a block of 256 threads adds; those of a tree that it joins, EACH a thread; trees of a launch.
constexpr int LEAVES = 32, EACH = 16, TREES = 240;

struct Spans {
    u64 start_count[TREES][2];
};

DEVICE f64 leaf(const T* x, u64 number, u64 n) {
    const int lane = threadIdx.x % 8;
    f64 sum = 0;
#pragma unroll
    for (int row = 0; row < 8; row++) {
        const u64 i = number * 64 + row * 8 + lane;
        const f64 value = i < n ? (f64)widen(x[i]) : 0.0;
        // Each rounded: the CPU does not fuse them either.
        sum = __dadd_rn(sum, __dmul_rn(value, value));
    }
    return warp_reduce<8>(sum, Sum());
}

// The leaves of a tensor, of which the first goes to `to[first]`.
extern "C" __global__ void __launch_bounds__(256) leaves(f64* to, const T* x, u64 first, u64 n) {
    const u64 number = (u64)blockIdx.x * LEAVES + threadIdx.x / 8;
    const f64 sum = leaf(x, number, n);
    if (threadIdx.x % 8 == 0 && number * 64 < n) to[first + number] = sum;
}

// A block of threads joins at most 256 * EACH nodes that lie one after another to one. A missing half adds 0, which
// changes no sum of squares.
extern "C" __global__ void __launch_bounds__(256)
    trees(f64* to, const f64* from, u64 first, const __grid_constant__ Spans spans) {
    __shared__ f64 sums[8];
    const u64 start = spans.start_count[blockIdx.x][0], count = spans.start_count[blockIdx.x][1];
    f64 nodes[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const u64 at = threadIdx.x * EACH + i;
        nodes[i] = at < count ? from[start + at] : 0.0;
    }
#pragma unroll
    for (int step = 1; step < EACH; step *= 2) {
#pragma unroll
        for (int i = 0; i + step < EACH; i += 2 * step) nodes[i] += nodes[i + step];
    }
    f64 node = nodes[0];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) node += __shfl_xor_sync(ALL_LANES, node, step);
    if (lane_number() == 0) sums[warp_number()] = node;
    __syncthreads();
    if (threadIdx.x > 0) return;
    to[first + blockIdx.x] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}
