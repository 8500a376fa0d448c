//! Blocks of a grid: what they write to the same places, counters, histograms, grid-stride loops, grids of the wrong size, and constant
//! loads.

use phalanx_ptx::FaultKind::{GlobalRace, OutOfBounds, Uninitialised};

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    let sum = |x: &[i32]| vec![x.iter().sum()];
    let doubled = |x: &[i32]| x.iter().map(|v| 2 * v).collect::<Vec<_>>();
    let bins = |x: &[i32]| (0..16).map(|b| x.iter().filter(|v| **v % 16 == b).count() as i32).collect();
    vec![
        Case::new(
            "grid_sum",
            4,
            64,
            r"
__global__ void grid_sum(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(y, x[i]);                               //- plain volatile
    *y += x[i];                                       //+ plain //! plain
    *(volatile int *)y = *(volatile int *)y + x[i];   //+ volatile //! volatile
}",
        )
        .zeros()
        .gives(sum)
        .wrong("plain", GlobalRace, &[])
        .wrong("volatile", GlobalRace, &["another value in the same instruction"]),
        Case::new(
            "block_counter",
            4,
            1,
            r"
__global__ void block_counter(int *x, int *y, int n) {
    atomicAdd(y, x[blockIdx.x]);                      //- volatile
    *(volatile int *)y = *(volatile int *)y + x[blockIdx.x];      //+ volatile
}",
        )
        .zeros()
        .gives(|x| vec![x[..4].iter().sum()])
        // Volatile accesses of several threads do not race by the letter; their order is not fixed.
        .values("volatile"),
        Case::new(
            "sum_of_lanes",
            1,
            32,
            r"
__global__ void sum_of_lanes(int *x, int *y, int n) {
    atomicAdd(y, x[threadIdx.x]);
    if (threadIdx.x == 0) y[1] = y[0];                //+ read_early //! read_early
}",
        )
        .zeros()
        .gives(|x| vec![x[..32].iter().sum()])
        .wrong("read_early", GlobalRace, &["sum_of_lanes.cu:2"]),
        Case::new(
            "block_counts",
            4,
            64,
            r"
__global__ void block_counts(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd_block(&y[blockIdx.x], x[i]);            //- one_word
    atomicAdd_block(&y[0], x[i]);                     //+ one_word //! one_word
}",
        )
        .zeros()
        .gives(|x| x.chunks(64).map(|c| c.iter().sum()).collect())
        .wrong("one_word", GlobalRace, &["atomically, but only for its own block"]),
        Case::new(
            "mixed_scopes",
            2,
            32,
            r"
__global__ void mixed_scopes(int *x, int *y, int n) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) atomicAdd_system(y, 1);
    else atomicAdd(y, 1);                             //- block
    else atomicAdd_block(y, 1);                       //+ block
}",
        )
        .zeros()
        .gives(|_| vec![2])
        .wrong("block", GlobalRace, &["(atomically)"]),
        Case::new(
            "grid_histogram",
            4,
            64,
            r"
__global__ void grid_histogram(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&y[x[i] % 16], 1);                      //- plain
    y[x[i] % 16]++;                                   //+ plain //! plain
}",
        )
        .zeros()
        .gives(bins)
        .wrong("plain", GlobalRace, &[]),
        Case::new(
            "private_histogram",
            2,
            64,
            r"
__global__ void private_histogram(int *x, int *y, int n) {
    __shared__ int bins[16];
    int t = threadIdx.x;
    if (t < 16) bins[t] = 0;                          //! no_first
    __syncthreads();                                  //- no_first
    for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[x[i] % 16], 1);               //- plain //! no_first no_last
        bins[x[i] % 16]++;                            //+ plain //! plain
    __syncthreads();                                  //- no_last
    if (t < 16) atomicAdd(&y[t], bins[t]);            //! no_last
}",
        )
        .zeros()
        .gives(bins)
        .wrong("no_first", phalanx_ptx::FaultKind::SharedRace, &[])
        .or(Uninitialised)
        .wrong("no_last", phalanx_ptx::FaultKind::SharedRace, &[])
        .wrong("plain", phalanx_ptx::FaultKind::SharedRace, &[]),
        Case::new(
            "grid_stride",
            3,
            32,
            r"
__global__ void grid_stride(int *x, int *y, int n) {
    int start = blockIdx.x * blockDim.x + threadIdx.x;
    int stride = gridDim.x * blockDim.x;              //- one_block one_thread too_far
    int stride = blockDim.x;                          //+ one_block
    int stride = 1;                                   //+ one_thread
    int stride = 2 * gridDim.x * blockDim.x;          //+ too_far
    for (int i = start; i < n; i += stride)
        y[i] += 2 * x[i];                             //! one_block one_thread
}",
        )
        .zeros()
        .gives(doubled)
        .wrong("one_block", GlobalRace, &["nothing orders the two blocks"])
        .wrong("one_thread", GlobalRace, &[])
        .values("too_far"),
        Case::new(
            "blocks_overlap",
            4,
            64,
            r"
__global__ void blocks_overlap(int *x, int *y, int n) {
    int i = blockIdx.x * 64 + threadIdx.x;            //- overlap
    int i = blockIdx.x * 63 + threadIdx.x;            //+ overlap
    y[i] = x[i] + blockIdx.x;                         //! overlap
}",
        )
        .gives(|x| x.iter().enumerate().map(|(i, v)| v + i as i32 / 64).collect())
        .wrong("overlap", GlobalRace, &["nothing orders the two blocks"]),
        Case::new(
            "full_grid",
            4,
            64,
            r"
__global__ void full_grid(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (blockIdx.x == 3) return;                      //+ too_few_blocks
    y[i] = 2 * x[i];
}",
        )
        .gives(doubled)
        // The rest of the result has bytes that nothing has written: a copy to the host finds them.
        .values("too_few_blocks"),
        Case::new(
            "rounded_grid",
            3,
            100,
            r"
__global__ void rounded_grid(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)                                        //- no_guard
        y[i] = 2 * x[i];                              //! no_guard
}",
        )
        .gives(doubled)
        .wrong(
            "no_guard",
            OutOfBounds,
            &["read of 4 bytes at offset", "of an allocation of 1024 bytes", "block (2, 0, 0)"],
        ),
        Case::new(
            "in_place_shift",
            4,
            64,
            r"
__global__ void in_place_shift(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = i + 1 < n ? x[i + 1] : 0;                  //- in_place barrier_of_blocks
    int next = i + 1 < n ? x[i + 1] : 0;              //+ in_place barrier_of_blocks //! in_place
    __syncthreads();                                  //+ barrier_of_blocks
    x[i] = next;                                      //+ in_place barrier_of_blocks //! in_place
}",
        )
        .gives(|x| (0..256).map(|i| if i < 255 { x[i + 1] } else { 0 }).collect())
        .wrong("in_place", GlobalRace, &[])
        // A barrier of a block orders nothing between blocks.
        .wrong("barrier_of_blocks", GlobalRace, &["nothing orders the two blocks"]),
        Case::new(
            "two_steps",
            2,
            64,
            r"
__global__ void two_steps(int *x, int *y, int n) {
    int t = threadIdx.x, base = blockIdx.x * 64;
    y[base + t] = x[base + t];
    __syncthreads();                                  //- no_barrier
    y[128 + base + t] = y[base + 63 - t];             //- other_block //! no_barrier
    y[128 + base + t] = y[127 - base - t];            //+ other_block //! other_block
}",
        )
        .gives(|x| {
            (0..256).map(|i| if i < 128 { x[i] } else { x[(i - 128) / 64 * 64 + 63 - i % 64] }).collect()
        })
        .wrong("no_barrier", GlobalRace, &["no barrier between"])
        .wrong("other_block", GlobalRace, &["nothing orders the two blocks"]),
        Case::new(
            "found_flag",
            4,
            64,
            r"
__global__ void found_flag(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (x[i] > 90) atomicExch(y, 1);                  //- plain
    if (x[i] > 90) *y = 1;                            //+ plain //! plain
}",
        )
        .zeros()
        .gives(|_| vec![1])
        .wrong("plain", GlobalRace, &["both write the same value, which `equal@found_flag_plain`"]),
        Case::new(
            "block_maxima",
            4,
            64,
            r"
__global__ void block_maxima(int *x, int *y, int n) {
    int v = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicMax(y, v);                                  //- checked compared
    if (*(volatile int *)y < v) *(volatile int *)y = v;           //+ checked //! checked
    int old = *y, seen;                               //+ compared
    do { seen = old; if (seen >= v) break; old = atomicCAS(y, seen, v); } while (old != seen);   //+ compared
}",
        )
        .zeros()
        .gives(|x| vec![*x.iter().max().unwrap()])
        // A loop of compare-and-swap may begin with a plain read.
        .also("compared")
        .wrong("checked", GlobalRace, &["another value in the same instruction"]),
        Case::new(
            "constant_load",
            1,
            64,
            r"
__global__ void constant_load(int *x, int *y, int n) {
    int t = threadIdx.x;
    x[t] += 1;                                        //! constant
    __syncthreads();
    y[t] = x[63 - t];                                 //- constant
    y[t] = __ldg(&x[63 - t]);                         //+ constant //! constant
}",
        )
        .gives(|x| (0..64).map(|i| x[63 - i] + 1).collect())
        .wrong("constant", GlobalRace, &["as constant (ld.global.nc"]),
        Case::new(
            "task_counter",
            2,
            32,
            r"
__global__ void task_counter(int *x, int *y, int n) {
    __shared__ int task;
    for (;;) {
        __syncthreads();                              //- no_barrier
        if (threadIdx.x == 0) task = atomicAdd(&y[255], 1);       //- plain //! no_barrier
        if (threadIdx.x == 0) task = y[255]++;        //+ plain //! plain
        __syncthreads();
        if (task >= 4) return;                        //! no_barrier
        y[task * 32 + threadIdx.x] = 2 * x[task * 32 + threadIdx.x];
    }
}",
        )
        .zeros()
        .gives(|x| (0..128).map(|i| 2 * x[i]).collect())
        .wrong("no_barrier", phalanx_ptx::FaultKind::SharedRace, &[])
        .wrong("plain", GlobalRace, &["nothing orders the two blocks"]),
        Case::new(
            "neighbouring_bytes",
            2,
            64,
            r"
__global__ void neighbouring_bytes(int *x, int *y, int n) {
    unsigned char *bytes = (unsigned char *)y;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    bytes[i] = x[i];                                  //- by_words
    unsigned word = y[i / 4], shift = i % 4 * 8;     //+ by_words
    y[i / 4] = word & ~(255u << shift) | (unsigned)x[i] << shift; //+ by_words
}",
        )
        .zeros()
        .gives(|x| x[..128].chunks(4).map(|c| c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24).collect())
        .wrong("by_words", GlobalRace, &[]),
        Case::new(
            "device_variable",
            4,
            64,
            r"
__device__ int total;
__global__ void device_variable(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int before = atomicAdd(&total, 1);                //- plain
    int before = total++;                             //+ plain //! plain
    if (before >= 0) y[i] = x[i];
}",
        )
        .gives(|x| x.to_vec())
        .wrong("plain", GlobalRace, &[]),
        Case::new(
            "order_of_blocks",
            4,
            1,
            r"
__global__ void order_of_blocks(int *x, int *y, int n) {
    int i = blockIdx.x;                               //- ticket
    int i = atomicAdd(&y[4], 1);                      //+ ticket
    y[i] = blockIdx.x;
}",
        )
        .zeros()
        .gives(|_| vec![0, 1, 2, 3])
        // Blocks do not come in the order of their index.
        .values("ticket"),
        Case::new(
            "unwritten_counter",
            4,
            64,
            r"
__global__ void unwritten_counter(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (x[i] % 2) y[i] = 1;                           //- counter
    else y[i] = 0;                                    //- counter
    if (x[i] % 2) y[atomicAdd(&y[255], 1)] = 1;       //+ counter //! counter
}",
        )
        .gives(|x| x.iter().map(|v| v % 2).collect())
        .wrong("counter", Uninitialised, &["atomic operation", "that nothing has written"]),
    ]
}
