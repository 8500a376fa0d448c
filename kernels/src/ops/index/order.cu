// Positions sorted by a key, equal keys in ascending order: a radix sort by 8 bits at a time, from the lowest.
//
// A warp takes a tile of 1024 keys. `count_digits` counts each digit in each tile, `scan_digits` (a block a digit) turns
// the counts into places among the digit's own, and `place` writes keys and positions there; a lane's place among equal
// digits of its warp is a count of lower lanes. No atomics, so the order is always the same. Each pass moves 12 bytes a
// key, and 8 for each digit of each tile.

constexpr u32 DIGITS = 256, WARPS = 8, TILE = 1024;

// The lanes whose digit is this lane's.
DEVICE u32 lanes_alike(u32 digit, bool valid) {
    u32 alike = __ballot_sync(ALL_LANES, valid);
#pragma unroll
    for (int bit = 0; bit < 8; bit++) {
        const bool one = digit >> bit & 1;
        const u32 ones = __ballot_sync(ALL_LANES, one);
        alike &= one ? ones : ~ones;
    }
    return alike;
}

DEVICE u32 lanes_below() { return (1u << lane_number()) - 1; }

// counts[digit][tile]
extern "C" __global__ void count_digits(u32* counts, const u32* keys, u32 n, u32 shift, u32 tiles) {
    __shared__ u32 seen[WARPS][DIGITS];
    u32* own = seen[warp_number()];
    const u32 tile = blockIdx.x * WARPS + warp_number();
    for (u32 d = lane_number(); d < DIGITS; d += 32) own[d] = 0;
    __syncwarp();
    for (u32 first = 0; first < TILE; first += 32) {
        const u64 i = (u64)tile * TILE + first + lane_number();
        const bool valid = i < n;
        if (!__any_sync(ALL_LANES, valid)) break;
        const u32 digit = valid ? keys[i] >> shift & (DIGITS - 1) : 0;
        const u32 alike = lanes_alike(digit, valid);
        if (valid && !(alike & lanes_below())) own[digit] += __popc(alike);
        __syncwarp();
    }
    if (tile >= tiles) return;
    for (u32 d = lane_number(); d < DIGITS; d += 32) counts[(u64)d * tiles + tile] = own[d];
}

// The sum of what the threads before this one have, and of all; for 256 threads.
DEVICE u32 scan_block(u32 x, u32& total) {
    __shared__ u32 parts[8];
    u32 sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 below = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane_number() >= step) sum += below;
    }
    if (lane_number() == 31) parts[warp_number()] = sum;
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (int w = 0; w < 8; w++) {
        if (w < warp_number()) before += parts[w];
        total += parts[w];
    }
    __syncthreads();
    return before + sum - x;
}

// A block a digit: its counts become the sums of those before, and their total goes to totals[digit].
extern "C" __global__ void scan_digits(u32* counts, u32* totals, u32 tiles) {
    u32* own = counts + (u64)blockIdx.x * tiles;
    u32 sum = 0;
    for (u32 first = 0; first < tiles; first += blockDim.x) {
        const u32 i = first + threadIdx.x;
        u32 total;
        const u32 before = scan_block(i < tiles ? own[i] : 0, total);
        if (i < tiles) own[i] = sum + before;
        sum += total;
    }
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

// Without positions a key's position is its place.
extern "C" __global__ void place(u32* keys_out, u32* positions_out, const u32* keys, const u32* positions,
                                 const u32* counts, const u32* totals, u32 n, u32 shift, u32 tiles) {
    __shared__ u32 starts[DIGITS];
    __shared__ u32 next[WARPS][DIGITS];
    u32 all;
    starts[threadIdx.x] = scan_block(totals[threadIdx.x], all);
    __syncthreads();
    u32* own = next[warp_number()];
    const u32 tile = blockIdx.x * WARPS + warp_number();
    if (tile >= tiles) return;
    for (u32 d = lane_number(); d < DIGITS; d += 32) own[d] = starts[d] + counts[(u64)d * tiles + tile];
    __syncwarp();
    for (u32 first = 0; first < TILE; first += 32) {
        const u64 i = (u64)tile * TILE + first + lane_number();
        const bool valid = i < n;
        if (!__any_sync(ALL_LANES, valid)) break;
        const u32 key = valid ? keys[i] : 0, digit = key >> shift & (DIGITS - 1);
        const u32 alike = lanes_alike(digit, valid), below = alike & lanes_below();
        const u32 to = own[digit] + __popc(below);
        __syncwarp();
        if (valid) {
            keys_out[to] = key;
            positions_out[to] = positions ? positions[i] : (u32)i;
            if (!below) own[digit] = to + __popc(alike);
        }
        __syncwarp();
    }
}
