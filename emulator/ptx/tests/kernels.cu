// Kernels of a first test: sums of blocks, right, and wrong in four ways.

// The sum of each 128 numbers.
extern "C" __global__ void block_sums(const int *x, int *sums, int n) {
    __shared__ int parts[128];
    int t = threadIdx.x, i = blockIdx.x * 128 + t;
    parts[t] = i < n ? x[i] : 0;
    __syncthreads();
    for (int half = 64; half > 0; half /= 2) {
        if (t < half) parts[t] += parts[t + half];
        __syncthreads();
    }
    if (t == 0) sums[blockIdx.x] = parts[0];
}

// No barrier between the writes and the reads.
extern "C" __global__ void without_barrier(const int *x, int *sums, int n) {
    __shared__ int parts[128];
    int t = threadIdx.x, i = blockIdx.x * 128 + t;
    parts[t] = i < n ? x[i] : 0;
    for (int half = 64; half > 0; half /= 2) {
        if (t < half) parts[t] += parts[t + half];
        __syncthreads();
    }
    if (t == 0) sums[blockIdx.x] = parts[0];
}

// The last block reads beyond the end.
extern "C" __global__ void without_bound(const int *x, int *sums, int n) {
    if (threadIdx.x != 0) return;
    int sum = 0;
    for (int i = 0; i < 128; i++) sum += x[128 * blockIdx.x + i];
    sums[blockIdx.x] = sum;
}

// Odd blocks leave their sum unwritten.
extern "C" __global__ void odd_blocks_forgotten(const int *x, int *sums, int n) {
    if (threadIdx.x == 0 && blockIdx.x % 2 == 0) {
        int sum = 0;
        for (int i = 128 * blockIdx.x; i < min(128 * (blockIdx.x + 1), n); i++) sum += x[i];
        sums[blockIdx.x] = sum;
    }
}

// A warp that is believed to execute in step: no access races by the letter, but the values depend on the order of its lanes.
extern "C" __global__ void in_step(const int *x, int *sums, int n) {
    __shared__ volatile int parts[32];
    int t = threadIdx.x;
    parts[t] = x[t];
    for (int half = 16; half > 0; half /= 2)
        if (t < half) parts[t] = parts[t] + parts[t + half];
    if (t == 0) sums[0] = parts[0];
}
