//! Threads of one block: `__syncthreads` that is missing, passed by, or not reached by all; named barriers; memory that is used again.

use phalanx_ptx::FaultKind::{DivergentBarrier, InvalidOperand, SharedRace, Uninitialised};

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    let sum = |n: usize| move |x: &[i32]| vec![x[..n].iter().sum()];
    let scan = |n: usize| move |x: &[i32]| (1..=n).map(|n| x[..n].iter().sum()).collect::<Vec<i32>>();
    let reversed = |x: &[i32]| (0..128).map(|i| x[127 - i]).collect();
    vec![
        Case::new("block_reverse", 1, 128, r"
__global__ void block_reverse(int *x, int *y, int n) {
    __shared__ int s[128];
    s[threadIdx.x] = x[threadIdx.x];                  //! no_barrier warps_only
    __syncthreads();                                  //- no_barrier warps_only fence_only
    __syncwarp();                                     //+ warps_only
    __threadfence_block();                            //+ fence_only
    y[threadIdx.x] = s[127 - threadIdx.x];            //! no_barrier warps_only fence_only
}")
        .gives(reversed)
        .wrong("no_barrier", SharedRace, &["with no barrier between"])
        .wrong("warps_only", SharedRace, &["with no barrier between"])
        .wrong("fence_only", SharedRace, &["no barrier between"]),
        Case::new("block_tree", 1, 128, r"
__global__ void block_tree(int *x, int *y, int n) {
    __shared__ int s[128];
    int t = threadIdx.x;
    s[t] = x[t];                                      //! no_first
    __syncthreads();                                  //- no_first
    for (int half = 64; half > 0; half /= 2) {
        if (t < half) {
            s[t] += s[t + half];                      //! no_first no_loop
            __syncthreads();                          //+ in_branch //! in_branch
        }
        __syncthreads();                              //- no_loop in_branch
    }
    __syncthreads();                                  //+ in_branch
    if (t == 0) y[0] = s[0];
}")
        .gives(sum(128))
        .wrong("no_first", SharedRace, &["with no barrier between"])
        .wrong("no_loop", SharedRace, &["no "])
        .wrong("in_branch", DivergentBarrier, &["waits at"]),
        Case::new("block_scan", 1, 64, r"
__global__ void block_scan(int *x, int *y, int n) {
    __shared__ int s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    for (int by = 1; by < 64; by *= 2) {
        int other = t >= by ? s[t - by] : 0;          //! no_middle no_end
        __syncthreads();                              //- no_middle
        s[t] += other;                                //! no_middle no_end
        __syncthreads();                              //- no_end
    }
    y[t] = s[t];
}")
        .gives(scan(64))
        .wrong("no_middle", SharedRace, &["no __syncwarp or barrier between"])
        .wrong("no_end", SharedRace, &[]),
        Case::new("block_scan_twice", 1, 64, r"
__global__ void block_scan_twice(int *x, int *y, int n) {
    __shared__ int s[2][64];
    int t = threadIdx.x, in = 0;
    s[0][t] = x[t];
    __syncthreads();
    for (int by = 1; by < 64; by *= 2) {
        int out = 1 - in;                             //- one_buffer
        int out = in;                                 //+ one_buffer
        s[out][t] = s[in][t] + (t >= by ? s[in][t - by] : 0);     //! one_buffer
        in = out;
        __syncthreads();
    }
    y[t] = s[in][t];
}")
        .gives(scan(64))
        .wrong("one_buffer", SharedRace, &["no __syncwarp or barrier between"]),
        Case::new("block_broadcasts", 1, 96, r"
__global__ void block_broadcasts(int *x, int *y, int n) {
    __shared__ int s;
    int sum = 0;
    for (int i = 0; i < 4; i++) {
        if (threadIdx.x == 0) s = x[i];               //! no_first no_last
        __syncthreads();                              //- no_first
        sum += s;                                     //! no_first no_last
        __syncthreads();                              //- no_last
    }
    y[threadIdx.x] = sum;
}")
        .gives(|x| vec![x[..4].iter().sum(); 96])
        .wrong("no_first", SharedRace, &[])
        .wrong("no_last", SharedRace, &[]),
        Case::new("tiles_in_turn", 1, 64, r"
__global__ void tiles_in_turn(int *x, int *y, int n) {
    __shared__ int tile[64];
    int t = threadIdx.x, sum = 0;
    for (int start = 0; start < n; start += 64) {
        tile[t] = x[start + t];                       //! no_last
        __syncthreads();
        sum += tile[(t + 33) % 64];                   //! no_last
        __syncthreads();                              //- no_last
    }
    y[t] = sum;
}")
        .gives(|x| (0..64).map(|t| (0..4).map(|i| x[i * 64 + (t + 33) % 64]).sum()).collect())
        .wrong("no_last", SharedRace, &["barrier between"]),
        Case::new("two_tiles", 1, 64, r"
__global__ void two_tiles(int *x, int *y, int n) {
    __shared__ int tile[2][64];
    int t = threadIdx.x, sum = 0;
    tile[0][t] = x[t];
    for (int i = 0; i < 4; i++) {
        __syncthreads();                              //- no_barrier
        if (i < 3) tile[(i + 1) % 2][t] = x[64 * (i + 1) + t];    //- same_tile
        sum += tile[i % 2][(t + 33) % 64];            //! no_barrier same_tile
        if (i < 3) tile[i % 2][t] = x[64 * (i + 1) + t];          //+ same_tile //! same_tile
    }
    y[t] = sum;
}")
        .gives(|x| (0..64).map(|t| (0..4).map(|i| x[i * 64 + (t + 33) % 64]).sum()).collect())
        .wrong("no_barrier", SharedRace, &["barrier between"])
        .wrong("same_tile", SharedRace, &["barrier between"]),
        Case::new("bounded_block", 1, 128, r"
__global__ void bounded_block(int *x, int *y, int n) {
    __shared__ int s[128];
    int t = threadIdx.x, used = n - 156;
    if (t >= used) return;                            //+ returns
    if (t < used) s[t] = x[t];
    __syncthreads();                                  //! returns
    if (t < used) y[t] = s[used - 1 - t];
}")
        .strict()
        .gives(|x| (0..100).map(|i| x[99 - i]).collect())
        .wrong("returns", DivergentBarrier, &["28 threads of the block skip by exiting"]),
        Case::new("barriers_by_thread", 1, 64, r"
__global__ void barriers_by_thread(int *x, int *y, int n) {
    int times = 3;                                    //- uneven
    int times = threadIdx.x < 32 ? 3 : 2;             //+ uneven
    for (int i = 0; i < times; i++) {
        __syncthreads();                              //! uneven
        y[64 * i + threadIdx.x] = x[threadIdx.x];
    }
}")
        .strict()
        .gives(|x| (0..192).map(|i| x[i % 64]).collect())
        .wrong("uneven", DivergentBarrier, &["32 threads of the block skip by exiting"]),
        Case::new("barrier_in_else", 1, 64, r"
__global__ void barrier_in_else(int *x, int *y, int n) {
    if (threadIdx.x < 32) {
        y[threadIdx.x] = x[threadIdx.x];
        __syncthreads();                              //+ twice
    } else {
        y[threadIdx.x] = 2 * x[threadIdx.x];
        __syncthreads();                              //+ twice //! twice
    }
    __syncthreads();
}")
        .gives(|x| (0..64).map(|i| if i < 32 { x[i] } else { 2 * x[i] }).collect())
        .wrong("twice", DivergentBarrier, &["waits at another one"]),
        Case::new("barrier_by_lane", 1, 32, r"
__global__ void barrier_by_lane(int *x, int *y, int n) {
    __shared__ int s[32];
    int t = threadIdx.x;
    s[t] = x[t];
    if (t % 2)                                        //+ odd_lanes
        __syncthreads();                              //! odd_lanes
    if (t % 2 == 0)                                   //+ odd_lanes
        __syncthreads();                              //+ odd_lanes
    y[t] = s[t ^ 1];
}")
        .gives(|x| (0..32).map(|i| x[i ^ 1]).collect())
        .wrong("odd_lanes", DivergentBarrier, &["waits at"]),
        Case::new("named_barriers", 1, 128, r#"
__device__ void sync(int number, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory"); }
__device__ void arrive(int number, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(number), "r"(threads) : "memory"); }
__global__ void named_barriers(int *x, int *y, int n) {
    __shared__ int s[64];
    int t = threadIdx.x;
    for (int i = 0; i < 2; i++) {
        if (t < 64) {
            if (i > 0) sync(2, 128);                  //- no_empty
            s[t] = x[64 * i + t];                     //! no_full
            arrive(1, 128);                           //- no_full short
            arrive(1, 96);                            //+ short
        } else {
            sync(1, 128);                             //- no_full short odd
            sync(1, 96);                              //+ short
            sync(1, 100);                             //+ odd //! odd
            y[64 * i + t - 64] = s[127 - t];          //! no_full
            if (i == 0) arrive(2, 128);               //- no_empty
        }
    }
}"#)
        .gives(|x| (0..128).map(|i| x[i / 64 * 64 + 63 - i % 64]).collect())
        .wrong("no_empty", SharedRace, &[])
        .or(DivergentBarrier)
        .wrong("no_full", SharedRace, &["no barrier between"])
        .wrong("odd", InvalidOperand, &["no multiple of 32"])
        .wrong("short", DivergentBarrier, &[])
        .or(SharedRace),
        Case::new("producer_waits", 1, 64, r#"
__global__ void producer_waits(int *x, int *y, int n) {
    __shared__ int s[32];
    int t = threadIdx.x;
    if (t < 32) {
        s[t] = x[t];
        asm volatile("bar.sync 1, 64;" ::: "memory");         //! other_number
    } else {
        asm volatile("bar.sync 1, 64;" ::: "memory");         //- other_number too_many
        asm volatile("bar.sync 2, 64;" ::: "memory");         //+ other_number
        asm volatile("bar.sync 1, 96;" ::: "memory");         //+ too_many
        y[t - 32] = s[63 - t];
    }
}"#)
        .gives(|x| (0..32).map(|i| x[31 - i]).collect())
        .wrong("other_number", DivergentBarrier, &["do not reach"])
        .wrong("too_many", InvalidOperand, &["producer_waits.cu"]),
        Case::new("barrier_that_waits", 1, 96, r#"
__global__ void barrier_that_waits(int *x, int *y, int n) {
    if (threadIdx.x < 64) asm volatile("bar.sync 3, 64;");      //- for_more
    if (threadIdx.x < 64) asm volatile("bar.sync 3, 96;");      //+ for_more //! for_more
    y[threadIdx.x] = x[threadIdx.x];
}"#)
        .gives(|x| x[..96].to_vec())
        .wrong("for_more", DivergentBarrier, &["thread (0, 0, 0)"]),
        Case::new("shared_again", 1, 64, r"
__global__ void shared_again(int *x, int *y, int n) {
    extern __shared__ int words[];
    unsigned char *bytes = (unsigned char *)words;
    int t = threadIdx.x;
    words[t] = x[t];
    __syncthreads();
    int other = words[63 - t];                        //! no_barrier
    __syncthreads();                                  //- no_barrier
    bytes[t] = other;                                 //! no_barrier
    __syncthreads();
    y[t] = bytes[63 - t];
}")
        .shared(256)
        .gives(|x| x[..64].to_vec())
        .wrong("no_barrier", SharedRace, &["barrier between"]),
        Case::new("shared_flag", 1, 64, r"
__global__ void shared_flag(int *x, int *y, int n) {
    __shared__ volatile int flag;                     //- plain
    __shared__ int flag;                              //+ plain
    __shared__ int value;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        value = x[0];                                 //! no_first_fence no_second_fence
        __threadfence_block();                        //- no_first_fence
        flag = 1;                                     //! plain
    } else if (threadIdx.x == 32) {
        while (flag == 0) {}                          //- plain
        while (flag == 0) __threadfence_block();      //+ plain //! plain
        __threadfence_block();                        //- no_second_fence
        y[0] = value;                                 //! no_first_fence no_second_fence
    }
}")
        .gives(|x| vec![x[0]])
        .wrong("no_first_fence", SharedRace, &[])
        .wrong("no_second_fence", SharedRace, &["a flag was read"])
        .wrong("plain", SharedRace, &[]),
        Case::new("block_any", 1, 64, r"
__global__ void block_any(int *x, int *y, int n) {
    __shared__ int found;
    int t = threadIdx.x;
    if (t == 0) found = 0;                            //! no_barrier
    __syncthreads();                                  //- no_barrier
    if (x[t] > 50) atomicOr(&found, 1);              //- plain
    if (x[t] % 2) found = 1;                          //+ plain //! plain
    __syncthreads();
    y[t] = found;
}")
        .gives(|_| vec![1; 64])
        .wrong("plain", SharedRace, &["both write the same value"])
        .wrong("no_barrier", SharedRace, &[])
        .or(Uninitialised),
        Case::new("block_votes", 1, 64, r"
__global__ void block_votes(int *x, int *y, int n) {
    int odd;
    if (threadIdx.x < 32)                             //+ apart
        odd = __syncthreads_count(x[threadIdx.x] % 2);            //! apart
    else                                              //+ apart
        odd = __syncthreads_count(1);                 //+ apart
    y[threadIdx.x] = odd;
}")
        .gives(|x| vec![x[..64].iter().filter(|v| **v % 2 == 1).count() as i32; 64])
        .wrong("apart", DivergentBarrier, &["waits at another one"]),
        Case::new("swapped_roles", 1, 64, r"
__global__ void swapped_roles(int *x, int *y, int n) {
    __shared__ int a[32], b[32];
    int t = threadIdx.x % 32;
    bool first = threadIdx.x < 32;
    (first ? a : b)[t] = x[threadIdx.x];              //! no_barrier
    __syncthreads();                                  //- no_barrier
    int other = (first ? b : a)[31 - t];              //! no_barrier
    y[threadIdx.x] = other;
}")
        .gives(|x| (0..64).map(|i| if i < 32 { x[63 - i] } else { x[31 - (i - 32)] }).collect())
        .wrong("no_barrier", SharedRace, &["no barrier between"]),
        Case::new("unwritten_tile_edge", 1, 64, r"
__global__ void unwritten_tile_edge(int *x, int *y, int n) {
    __shared__ int s[66];
    int t = threadIdx.x;
    s[t + 1] = x[t];
    if (t < 2) s[65 * t] = 0;                         //- no_edges
    __syncthreads();
    int sum = s[t] + s[t + 1] + s[t + 2];
    y[t] = sum > 100 ? 100 : sum;
    if (sum > 250) y[t] = -1;
}")
        .gives(|x| {
            let at = |i: i32| if (0..64).contains(&i) { x[i as usize] } else { 0 };
            let sums = (0..64).map(|i| at(i - 1) + at(i) + at(i + 1));
            sums.map(|sum| if sum > 250 { -1 } else { sum.min(100) }).collect()
        })
        // The sums depend on what nothing has written, and so do the words that are stored.
        .values("no_edges"),
        Case::new("three_readers", 1, 128, r#"
__global__ void three_readers(int *x, int *y, int n) {
    __shared__ int s;
    int w = threadIdx.x / 32;
    if (threadIdx.x == 0) s = x[0];
    __syncthreads();
    if (w < 3) y[threadIdx.x] = s;                    //! third
    if (w != 2) asm volatile("bar.sync 1, 96;" ::: "memory");   //+ third
    asm volatile("bar.sync 1, 128;" ::: "memory");              //- third
    if (threadIdx.x == 96) s = 7;                     //! third
    __syncthreads();
    if (w == 3) y[threadIdx.x] = s;
}"#)
        .gives(|x| (0..128).map(|i| if i < 96 { x[0] } else { 7 }).collect())
        // Of several readers of a word two are remembered.
        .sometimes("third", SharedRace, &["no barrier between"]),
    ]
}
