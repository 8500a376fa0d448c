//! Whole algorithms in small: products by tiles, transposes, scans, sorts, histograms, queues, stencils in steps, with the mistakes that are
//! usual in them.

use phalanx_ptx::FaultKind::{GlobalRace, OutOfBounds, SharedRace, Uninitialised};

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    let sorted = |n: usize| {
        move |x: &[i32]| {
            let mut y = x[..n].to_vec();
            y.sort();
            y
        }
    };
    vec![
        Case::new("tiled_product", 4, 1, r"
__global__ void tiled_product(int *x, int *y, int n) {
    __shared__ int a[8][8], b[8][8];
    int r = threadIdx.y, c = threadIdx.x, row = blockIdx.x / 2 * 8 + r, column = blockIdx.x % 2 * 8 + c, sum = 0;
    for (int k = 0; k < 16; k += 8) {
        a[r][c] = x[row * 16 + k + c];
        b[r][c] = x[(k + r) * 16 + column];           //- too_far
        b[r][c] = x[(k + r + 1) * 16 + column];       //+ too_far //! too_far
        __syncthreads();                              //- no_first
        for (int i = 0; i < 8; i++) sum += a[r][i] * b[i][c];     //! no_first no_second
        __syncthreads();                              //- no_second
    }
    y[row * 16 + column] = sum;
}")
        .block(8, 8)
        .gives(|x| (0..256).map(|i| (0..16).map(|k| x[i / 16 * 16 + k] * x[k * 16 + i % 16]).sum()).collect())
        .wrong("no_first", SharedRace, &[])
        .or(Uninitialised)
        .wrong("no_second", SharedRace, &[])
        .wrong("too_far", OutOfBounds, &["of an allocation of 1024 bytes"]),
        Case::new("tiled_transpose", 4, 1, r"
__global__ void tiled_transpose(int *x, int *y, int n) {
    __shared__ int tile[8][9];
    int r = threadIdx.y, c = threadIdx.x, top = blockIdx.x / 2 * 8, left = blockIdx.x % 2 * 8;
    tile[r][c] = x[(top + r) * 16 + left + c];        //! no_barrier
    __syncthreads();                                  //- no_barrier
    y[(left + r) * 16 + top + c] = tile[c][r];        //- in_place same_tile //! no_barrier
    x[(left + r) * 16 + top + c] = tile[c][r];        //+ in_place //! in_place
    y[(top + r) * 16 + left + c] = tile[c][r];        //+ same_tile
}")
        .block(8, 8)
        .gives(|x| (0..256).map(|i| x[i % 16 * 16 + i / 16]).collect())
        .wrong("no_barrier", SharedRace, &["barrier between"])
        .wrong("in_place", GlobalRace, &["nothing orders the two blocks"])
        .values("same_tile"),
        Case::new("warp_sums", 1, 128, r"
__global__ void warp_sums(int *x, int *y, int n) {
    __shared__ int parts[4];
    int t = threadIdx.x, v = x[t];
    for (int by = 16; by > 0; by /= 2) v += __shfl_down_sync(0xffffffff, v, by);
    if (t % 32 == 0)                                  //- all_lanes
    parts[t / 32] = v;                                //! no_barrier all_lanes
    __syncthreads();                                  //- no_barrier
    if (t < 32) {
        int part = t < 4 ? parts[t] : 0;              //! no_barrier
        part += __shfl_xor_sync(0xffffffff, part, 1);
        part += __shfl_xor_sync(0xffffffff, part, 2);
        if (t == 0) y[0] = part;
    }
}")
        .gives(|x| vec![x[..128].iter().sum()])
        .wrong("no_barrier", SharedRace, &[])
        .or(Uninitialised)
        .wrong("all_lanes", SharedRace, &["another value in the same instruction"]),
        Case::new("block_sums_in_turn", 1, 64, r"
__device__ int block_sum(int v) {
    __shared__ int parts[2];
    for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(0xffffffff, v, by);
    __syncthreads();                                  //- no_first
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;       //! no_first
    __syncthreads();
    return parts[0] + parts[1];                       //! no_first
}
__global__ void block_sums_in_turn(int *x, int *y, int n) {
    int mean = block_sum(x[threadIdx.x]) / 64;
    int off = x[threadIdx.x] - mean;
    int squares = block_sum(off * off);
    y[threadIdx.x] = squares;
}")
        .gives(|x| {
            let mean = x[..64].iter().sum::<i32>() / 64;
            vec![x[..64].iter().map(|v| (v - mean) * (v - mean)).sum(); 64]
        })
        .wrong("no_first", SharedRace, &["barrier between"]),
        Case::new("up_and_down", 1, 64, r"
__global__ void up_and_down(int *x, int *y, int n) {
    __shared__ int s[128];
    int t = threadIdx.x;
    s[2 * t] = x[2 * t];
    s[2 * t + 1] = x[2 * t + 1];
    for (int d = 64, by = 1; d > 0; d /= 2, by *= 2) {
        __syncthreads();                              //- no_up
        if (t < d) s[by * (2 * t + 2) - 1] += s[by * (2 * t + 1) - 1];        //! no_up
    }
    __syncthreads();
    if (t == 0) s[127] = 0;
    for (int d = 1, by = 64; d <= 64; d *= 2, by /= 2) {
        __syncthreads();                              //- no_down
        if (t < d) {
            int left = by * (2 * t + 1) - 1, right = by * (2 * t + 2) - 1, old = s[left];
            s[left] = s[right];
            s[right] += old;
        }
    }
    __syncthreads();
    y[2 * t] = s[2 * t];
    y[2 * t + 1] = s[2 * t + 1];
}")
        .gives(|x| (0..128).map(|n| x[..n].iter().sum()).collect())
        .wrong("no_up", SharedRace, &[])
        .wrong("no_down", SharedRace, &[]),
        Case::new("bitonic_sort", 1, 128, r"
__global__ void bitonic_sort(int *x, int *y, int n) {
    __shared__ int s[128];
    int t = threadIdx.x;
    s[t] = x[t];
    for (int size = 2; size <= 128; size *= 2)
        for (int by = size / 2; by > 0; by /= 2) {
            __syncthreads();                          //- no_barrier only_warps
            if (by >= 32) __syncthreads();            //+ only_warps
            else __syncwarp();                        //+ only_warps
            int other = t ^ by;
            if (other > t && (s[t] > s[other]) == ((t & size) == 0)) {        //! no_barrier
                int v = s[t];
                s[t] = s[other];
                s[other] = v;
            }
        }
    __syncthreads();
    y[t] = s[t];
}")
        .gives(sorted(128))
        .wrong("no_barrier", SharedRace, &[])
        .or(Uninitialised)
        // A step of 16 and less stays in a warp, but the first of them reads what the last of 32 wrote in another.
        .wrong("only_warps", SharedRace, &["no barrier between"]),
        Case::new("odd_even_sort", 1, 32, r"
__global__ void odd_even_sort(int *x, int *y, int n) {
    __shared__ int s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    s[t + 32] = x[t + 32];
    for (int step = 0; step < 64; step++) {
        __syncwarp();                                 //- no_syncwarp
        int i = 2 * t + step % 2;
        if (i + 1 < 64)                               //- no_guard
        if (s[i] > s[i + 1]) { int v = s[i]; s[i] = s[i + 1]; s[i + 1] = v; } //! no_syncwarp no_guard
    }
    __syncwarp();
    y[t] = s[t];
    y[t + 32] = s[t + 32];
}")
        .gives(sorted(64))
        .wrong("no_syncwarp", SharedRace, &[])
        .wrong("no_guard", OutOfBounds, &["of shared memory"]),
        Case::new("rank_sort", 1, 128, r"
__global__ void rank_sort(int *x, int *y, int n) {
    __shared__ int s[128];
    int t = threadIdx.x, rank = 0, v = x[t];
    s[t] = v;
    __syncthreads();
    for (int i = 0; i < 128; i++) rank += s[i] < v || (s[i] == v && i < t);   //- ties
    for (int i = 0; i < 128; i++) rank += s[i] < v;   //+ ties
    y[rank] = t;                                      //! ties
}")
        .gives(|x| {
            let mut order: Vec<i32> = (0..128).collect();
            order.sort_by_key(|&i| x[i as usize]);
            order
        })
        .wrong("ties", GlobalRace, &[]),
        Case::new("merge_sort", 1, 32, r"
__global__ void merge_sort(int *x, int *y, int n) {
    __shared__ int keys[64 + 1];
    int t = threadIdx.x, mine[2] = {x[2 * t], x[2 * t + 1]};
    if (mine[0] > mine[1]) { int v = mine[0]; mine[0] = mine[1]; mine[1] = v; }
    for (int threads = 2; threads <= 32; threads *= 2) {
        __syncthreads();                              //- no_first
        keys[2 * t] = mine[0];                       
        keys[2 * t + 1] = mine[1];
        __syncthreads();                              //- no_second
        int begin = 2 * (t & ~(threads - 1)), middle = begin + threads, end = middle + threads;
        int diagonal = 2 * (t & (threads - 1)), low = max(0, diagonal - threads), high = min(diagonal, threads);
        while (low < high) {
            int i = (low + high) / 2;
            if (keys[middle + diagonal - 1 - i] < keys[begin + i]) high = i; else low = i + 1;  
        }
        int a = begin + low, b = middle + diagonal - low;
        int first = keys[a], second = keys[b];
        for (int i = 0; i < 2; i++) {
            bool take = b < end && (a >= middle || second < first);
            mine[i] = take ? second : first;
            if (take) second = keys[++b]; else first = keys[++a];
        }
    }
    y[2 * t] = mine[0];
    y[2 * t + 1] = mine[1];
}")
        .gives(sorted(64))
        .wrong("no_first", SharedRace, &[])
        .wrong("no_second", SharedRace, &[]),
        Case::new("radix_pass", 1, 64, r"
__global__ void radix_pass(int *x, int *y, int n) {
    __shared__ int counts[4][64], starts[4];
    int t = threadIdx.x, digit = x[t] % 4;
    for (int d = 0; d < 4; d++) counts[d][t] = digit == d;        //! no_first
    __syncthreads();                                  //- no_first
    if (t < 4) {
        int sum = 0;
        for (int i = 0; i < 64; i++) { int c = counts[t][i]; counts[t][i] = sum; sum += c; }     //! no_first
        starts[t] = sum;
    }
    __syncthreads();                                  //- no_second
    int at = counts[digit][t];
    for (int d = 0; d < digit; d++) at += starts[d]; 
    y[at] = x[t];
}")
        .gives(|x| {
            let mut y = x[..64].to_vec();
            y.sort_by_key(|v| v % 4);
            y
        })
        .wrong("no_first", SharedRace, &[])
        .wrong("no_second", SharedRace, &[])
        .or(Uninitialised)
        .or(GlobalRace),
        Case::new("heat_steps", 1, 64, r"
__global__ void heat_steps(int *x, int *y, int n) {
    __shared__ int s[2][66];
    int t = threadIdx.x;
    s[0][t + 1] = x[t];
    if (t == 0) s[0][0] = s[0][65] = s[1][0] = s[1][65] = 0;      //- no_halo
    if (t == 0) s[0][0] = s[0][65] = 0;               //+ no_halo
    for (int step = 0; step < 5; step++) {
        __syncthreads();                              //- no_barrier
        int *in = s[step % 2], *out = s[1 - step % 2];            //- in_place
        int *in = s[0], *out = s[0];                  //+ in_place
        int sum = in[t] + in[t + 1] + in[t + 2];      //! no_barrier
        out[t + 1] = sum / 3;                        
        if (sum < 0) out[t + 1] = 0;                 
    }
    y[t] = s[1][t + 1];                               //- in_place
    y[t] = s[0][t + 1];                               //+ in_place
}")
        .gives(|x| {
            let step = |s: &Vec<i32>| {
                let at = |i: i32| s.get(i as usize).copied().unwrap_or(0);
                (0..64).map(|i| (at(i - 1) + at(i) + at(i + 1)) / 3).collect::<Vec<i32>>()
            };
            (0..5).fold(x[..64].to_vec(), |s, _| step(&s))
        })
        .wrong("no_barrier", SharedRace, &[])
        .wrong("in_place", SharedRace, &[])
        .values("no_halo"),
        Case::new("breadth_first", 1, 64, r"
__global__ void breadth_first(int *x, int *y, int n) {
    __shared__ int more;
    int t = threadIdx.x, children[2] = {2 * t + 1, 2 * t + 2};
    y[t] = t == 0 ? 0 : -1;
    for (int level = 0; level < 8; level++) {
        __syncthreads();                              //- no_first
        if (t == 0) more = 0;                         //! no_first
        __syncthreads();
        bool mine = y[t] == level;
        __syncthreads();
        if (mine)
            for (int c : children)
                if (c < 64) { y[c] = level + 1; atomicOr(&more, 1); }         //- plain_flag
                if (c < 64) { y[c] = level + 1; more = 1; }                   //+ plain_flag //! plain_flag
        __syncthreads();
        if (!more) return;                            //! no_first
    }
}")
        .gives(|_| (0..64).map(|i: i32| (i + 1).ilog2() as i32).collect())
        .wrong("no_first", SharedRace, &[])
        .sometimes("plain_flag", SharedRace, &["both write the same value"]),
        Case::new("shared_queue", 1, 64, r"
__global__ void shared_queue(int *x, int *y, int n) {
    __shared__ int head, tail, queue[128];
    int t = threadIdx.x;
    if (t == 0) { head = 0; tail = 64; }
    queue[t] = x[t] % 64;
    for (;;) {
        __syncthreads();
        int end = tail;                               //! no_second
        int i = head + t;
        __syncthreads();                              //- no_second
        if (i < end) {
            atomicAdd(&y[queue[i]], 1);
            if (queue[i] % 2) queue[atomicAdd(&tail, 1)] = queue[i] / 2;      //- plain
            if (queue[i] % 2) queue[tail++] = queue[i] / 2;                   //+ plain //! plain
        }
        if (t == 0) head = min(head + 64, end);
        if (i - t >= end) return;
        if (end > 100) return;
    }
}")
        .zeros()
        .gives(|_| Vec::new())
        .wrong("plain", SharedRace, &[])
        .wrong("no_second", SharedRace, &[]),
        Case::new("segmented_sum", 2, 64, r"
__global__ void segmented_sum(int *x, int *y, int n) {
    int i = blockIdx.x * 64 + threadIdx.x, segment = i / 24;
    atomicAdd(&y[segment], x[i]);                     //- by_first
    if (i % 24 == 0) y[segment] = 0;                  //+ by_first //! by_first
    atomicAdd(&y[segment], x[i]);                     //+ by_first
}")
        .zeros()
        .gives(|x| x[..128].chunks(24).map(|c| c.iter().sum()).collect())
        .wrong("by_first", GlobalRace, &["segmented_sum.cu"]),
        Case::new("sum_and_broadcast", 1, 64, r"
__global__ void sum_and_broadcast(int *x, int *y, int n) {
    __shared__ float sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, (float)x[threadIdx.x]);           //! no_barrier
    __syncthreads();                                  //- no_barrier
    y[threadIdx.x] = (int)(sum / 64);                 //! no_barrier
}")
        .gives(|x| vec![x[..64].iter().sum::<i32>() / 64; 64])
        .wrong("no_barrier", SharedRace, &[]),
        Case::new("online_softmax", 1, 32, r"
__global__ void online_softmax(int *x, int *y, int n) {
    int most = -1, sum = 0;
    for (int i = threadIdx.x; i < n; i += 32) {
        if (x[i] > most) { most = x[i]; sum = 1; }
        else if (x[i] == most) sum++;
    }
    for (int by = 16; by > 0; by /= 2) {
        int other = __shfl_xor_sync(0xffffffff, most, by);
        int others = __shfl_xor_sync(0xffffffff, sum, by);        //- in_branch
        if (other > most) {
            int others = __shfl_xor_sync(0xffffffff, sum, by);       //+ in_branch
            most = other;
            sum = others;
        } else if (other == most) {
            int others = __shfl_xor_sync(0xffffffff, sum, by);    //+ in_branch
            sum += others;
        }
    }
    y[threadIdx.x] = 1000 * most + sum;
}")
        .gives(|x| {
            let most = *x.iter().max().unwrap();
            vec![1000 * most + x.iter().filter(|v| **v == most).count() as i32; 32]
        })
        .wrong("in_branch", phalanx_ptx::FaultKind::DivergentShuffle, &[]),
    ]
}
