// Sums of squares in the order of the CPU, bit for bit: leaves are blocks of 64 elements, added by eight lanes (element
// i by lane i % 8) and then halves first; above them a dyadic tree. Reads each element once.

typedef ELEMENT T;
// Leaves of a block of 256 threads that make one node: a power of two.
constexpr int LEAVES = 32;

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

// The leaves alone.
extern "C" __global__ void __launch_bounds__(256) leaves(f64* to, const T* x, u64 n) {
    const u64 number = (u64)blockIdx.x * LEAVES + threadIdx.x / 8;
    const f64 sum = leaf(x, number, n);
    if (threadIdx.x % 8 == 0 && number * 64 < n) to[number] = sum;
}

// Nodes of LEAVES leaves. A missing half adds 0, which changes no sum of squares.
extern "C" __global__ void __launch_bounds__(256) nodes(f64* to, const T* x, u64 n) {
    __shared__ f64 sums[LEAVES];
    const f64 sum = leaf(x, (u64)blockIdx.x * LEAVES + threadIdx.x / 8, n);
    if (threadIdx.x % 8 == 0) sums[threadIdx.x / 8] = sum;
    __syncthreads();
    if (warp_number() > 0) return;
    f64 node = sums[lane_number()];
#pragma unroll
    for (int step = 1; step < LEAVES; step *= 2) node += __shfl_xor_sync(ALL_LANES, node, step);
    if (lane_number() == 0) to[blockIdx.x] = node;
}

// Nodes of 256 nodes each; where there is but one block, the root.
extern "C" __global__ void __launch_bounds__(256) join(f64* to, const f64* from, u64 count) {
    __shared__ f64 sums[8];
    const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    f64 node = i < count ? from[i] : 0.0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) node += __shfl_xor_sync(ALL_LANES, node, step);
    if (lane_number() == 0) sums[warp_number()] = node;
    __syncthreads();
    if (threadIdx.x > 0) return;
    to[blockIdx.x] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}
