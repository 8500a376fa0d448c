//! Lanes of one warp: what they exchange through shared memory, shuffles and votes, masks, and atomics by one lane for all.

use phalanx_ptx::FaultKind::{DivergentShuffle, GlobalRace, SharedRace, Uninitialised};

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    let reversed = |x: &[i32]| (0..32).map(|i| x[31 - i]).collect();
    let sum = |x: &[i32]| vec![x[..32].iter().sum()];
    let scan = |x: &[i32]| (1..=32).map(|n| x[..n].iter().sum()).collect();
    vec![
        Case::new(
            "warp_reverse",
            1,
            32,
            r"
__global__ void warp_reverse(int *x, int *y, int n) {
    __shared__ int s[32];
    s[threadIdx.x] = x[threadIdx.x];                  //! no_syncwarp shuffle_between
    __syncwarp();                                     //- no_syncwarp shuffle_between
    int other = __shfl_sync(0xffffffff, n, 0);        //+ shuffle_between
    n = other;                                        //+ shuffle_between
    y[threadIdx.x] = s[31 - threadIdx.x] + n - 256;   //! no_syncwarp shuffle_between
}",
        )
        .gives(reversed)
        .wrong("no_syncwarp", SharedRace, &["no __syncwarp or barrier between"])
        // A shuffle orders no accesses of memory.
        .wrong("shuffle_between", SharedRace, &["no __syncwarp or barrier between"]),
        Case::new(
            "warp_reverse_global",
            1,
            32,
            r"
__global__ void warp_reverse_global(int *x, int *y, int n) {
    int v = x[threadIdx.x];
    __syncwarp();                                     //- no_syncwarp
    x[31 - threadIdx.x] = v;                          //! no_syncwarp
    __syncwarp();
    y[threadIdx.x] = x[threadIdx.x];
}",
        )
        .gives(reversed)
        .wrong("no_syncwarp", GlobalRace, &["no __syncwarp or barrier between"]),
        Case::new(
            "warp_tree",
            1,
            32,
            r"
__global__ void warp_tree(int *x, int *y, int n) {
    __shared__ int s[32];
    int lane = threadIdx.x;
    s[lane] = x[lane];
    for (int half = 16; half > 0; half /= 2) {
        __syncwarp();                                 //- no_syncwarp
        int other = lane < half ? s[lane + half] : 0; //! no_syncwarp
        __syncwarp();                                 //- no_syncwarp no_second
        if (lane < half) s[lane] += other;
    }
    if (lane == 0) y[0] = s[0];
}",
        )
        .gives(sum)
        .wrong("no_syncwarp", SharedRace, &["no __syncwarp or barrier between"])
        // Lanes that a step reads write in the next one, behind its wait: one wait a step is enough.
        .also("no_second"),
        Case::new(
            "warp_volatile_tree",
            1,
            32,
            r"
__global__ void warp_volatile_tree(int *x, int *y, int n) {
    __shared__ int s[32];                             //- volatile
    __shared__ volatile int s[32];                    //+ volatile
    int lane = threadIdx.x;
    s[lane] = x[lane];
    for (int half = 16; half > 0; half /= 2) {
        __syncwarp();                                 //- volatile
        if (lane < half) s[lane] = s[lane] + s[lane + half];
    }
    if (lane == 0) y[0] = s[0];
}",
        )
        .gives(sum)
        // As before compute capability 7.0. Volatile accesses do not race by the letter.
        .values("volatile"),
        Case::new(
            "lane_broadcast",
            1,
            32,
            r"
__global__ void lane_broadcast(int *x, int *y, int n) {
    __shared__ int s;
    if (threadIdx.x == 0) s = x[0];                   //! no_syncwarp
    __syncwarp();                                     //- no_syncwarp
    y[threadIdx.x] = s;                               //! no_syncwarp
}",
        )
        .gives(|x| vec![x[0]; 32])
        .wrong("no_syncwarp", SharedRace, &["thread (0, 0, 0)"]),
        Case::new(
            "lane_broadcasts",
            1,
            32,
            r"
__global__ void lane_broadcasts(int *x, int *y, int n) {
    __shared__ int s;
    int sum = 0;
    for (int i = 0; i < 4; i++) {
        if (threadIdx.x == i) s = x[i];               //! no_last
        __syncwarp();
        sum += s;                                     //! no_last
        __syncwarp();                                 //- no_last
    }
    y[threadIdx.x] = sum;
}",
        )
        .gives(|x| vec![x[..4].iter().sum(); 32])
        .wrong("no_last", SharedRace, &["no __syncwarp or barrier between"]),
        Case::new(
            "half_warps",
            1,
            32,
            r"
__global__ void half_warps(int *x, int *y, int n) {
    __shared__ int s[32];
    int lane = threadIdx.x;
    s[lane] = x[lane];
    unsigned half = lane < 16 ? 0x0000ffff : 0xffff0000;
    __syncwarp(half);
    y[lane] = s[lane ^ 3];                            //- across
    y[lane] = s[lane ^ 19];                           //+ across //! across
}",
        )
        .gives(|x| (0..32).map(|i| x[i ^ 3]).collect())
        .wrong("across", SharedRace, &["half_warps.cu:4"]),
        Case::new(
            "one_word",
            1,
            32,
            r"
__global__ void one_word(int *x, int *y, int n) {
    __shared__ int s;
    s = n;                                            //- by_lane
    s = threadIdx.x;                                  //+ by_lane //! by_lane
    __syncwarp();
    y[threadIdx.x] = s;
}",
        )
        .gives(|_| vec![256; 32])
        .wrong("by_lane", SharedRace, &["another value in the same instruction"]),
        Case::new(
            "shuffle_sum",
            1,
            32,
            r"
__global__ void shuffle_sum(int *x, int *y, int n) {
    int v = x[threadIdx.x];
    unsigned mask = 0xffffffff;                       //- half_mask
    unsigned mask = 0x0000ffff;                       //+ half_mask
    for (int by = 16; by > 0; by /= 2)
        v += __shfl_down_sync(mask, v, by);           //! half_mask
    if (threadIdx.x == 0) y[0] = v;
}",
        )
        .gives(sum)
        .wrong("half_mask", DivergentShuffle, &["does not name it"]),
        Case::new(
            "shuffle_in_branch",
            1,
            32,
            r"
__global__ void shuffle_in_branch(int *x, int *y, int n) {
    int lane = threadIdx.x, v = x[lane];
    if (lane < 16) {
        v += __shfl_xor_sync(0x0000ffff, v, 1);       //- full_mask from_outside
        v += __shfl_xor_sync(0xffffffff, v, 1);       //+ full_mask //! full_mask
        v += __shfl_xor_sync(0x0000ffff, v, 16);      //+ from_outside //! from_outside
    }
    y[lane] = v;
}",
        )
        .gives(|x| (0..32).map(|i| if i < 16 { x[i] + x[i ^ 1] } else { x[i] }).collect())
        // Lanes that have ended need not come, and in other orders they may end before.
        .sometimes("full_mask", DivergentShuffle, &["named in the mask and ends without coming here"])
        .wrong(
            "from_outside",
            Uninitialised,
            &["lane 0 reads from lane 16, which does not take part"],
        ),
        Case::new(
            "shuffle_scan",
            1,
            32,
            r"
__global__ void shuffle_scan(int *x, int *y, int n) {
    int lane = threadIdx.x, v = x[lane];
    for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_up_sync(0xffffffff, v, by);
        if (lane >= by)                               //- no_guard
            v += other;
    }
    y[lane] = v;
}",
        )
        .gives(scan)
        .values("no_guard"),
        Case::new(
            "shuffle_after_return",
            1,
            32,
            r"
__global__ void shuffle_after_return(int *x, int *y, int n) {
    int lane = threadIdx.x;
    unsigned mask = 0xffffffff;
    if (lane >= 24) return;                           //+ returned
    int v = lane < 24 ? x[lane] : 0;
    if (lane >= 24) return;                           //+ counted
    v += __shfl_down_sync(mask, v, 8);                //! counted
    if (lane < 16) y[lane] = v;
    if (v < 0) y[0] = 0;                              //+ counted
}",
        )
        .gives(|x| (0..16).map(|i| x[i] + if i + 8 < 24 { x[i + 8] } else { 0 }).collect())
        .also("returned")
        .wrong("counted", DivergentShuffle, &["lane 16 reads from lane 24"]),
        Case::new(
            "half_warp_sum",
            1,
            32,
            r"
__global__ void half_warp_sum(int *x, int *y, int n) {
    int lane = threadIdx.x, v = x[lane];
    if (lane < 16) {
        int far = 8;                                  //- beyond
        int far = 16;                                 //+ beyond
        // Lanes above the half get what is undefined, and no lane whose sum counts reads it.
        for (int by = far; by > 0; by /= 2) {
            int other = __shfl_down_sync(0xffff, v, by); //! beyond voted added_up
            v += other;
        }
        bool any = __any_sync(0xffff, v > 3);         //+ voted
        if (any) y[1] = 1;                            //+ voted
        atomicAdd(&y[1], v);                          //+ added_up
        if (lane == 0) y[0] = v;
    }
}",
        )
        .gives(|x| vec![x[..16].iter().sum()])
        .wrong("beyond", Uninitialised, &["lane 0 reads from lane 16, which does not take part"])
        .wrong("voted", DivergentShuffle, &["which does not take part"])
        .wrong("added_up", DivergentShuffle, &["which does not take part"]),
        Case::new(
            "ballot_compact",
            1,
            32,
            r"
__global__ void ballot_compact(int *x, int *y, int n) {
    int lane = threadIdx.x, v = x[lane];
    unsigned odd = __ballot_sync(0xffffffff, v % 2);  //- in_branch
    if (v % 2) {
        unsigned odd = __ballot_sync(0xffffffff, 1);  //+ in_branch //! in_branch
        y[__popc(odd & ((1u << lane) - 1))] = v;
    } else {
        y[64 + lane] = v;
    }
}",
        )
        .gives(|x| x[..32].iter().copied().filter(|v| v % 2 == 1).collect())
        .sometimes("in_branch", DivergentShuffle, &["named in the mask"]),
        Case::new(
            "ballot_mask",
            1,
            32,
            r"
__global__ void ballot_mask(int *x, int *y, int n) {
    int lane = threadIdx.x, v = x[lane];
    unsigned low = __ballot_sync(0xffffffff, v < 50);
    if (v < 50) {
        int sum = __reduce_add_sync(low, v);          //- other_lanes
        int sum = __reduce_add_sync(~low, v);         //+ other_lanes //! other_lanes
        y[lane] = sum;
    } else {
        y[lane] = 0;
    }
}",
        )
        .gives(|x| {
            let sum = x[..32].iter().filter(|v| **v < 50).sum();
            x[..32].iter().map(|&v| if v < 50 { sum } else { 0 }).collect()
        })
        .wrong("other_lanes", DivergentShuffle, &["mask"]),
        Case::new(
            "syncwarp_without_me",
            1,
            32,
            r"
__global__ void syncwarp_without_me(int *x, int *y, int n) {
    int lane = threadIdx.x;
    __syncwarp(0xffffffff);                           //- named
    __syncwarp(0xfffffffe);                           //+ named //! named
    y[lane] = x[lane];
}",
        )
        .gives(|x| x[..32].to_vec())
        .wrong("named", DivergentShuffle, &["thread (0, 0, 0)"]),
        Case::new(
            "matched_lanes",
            1,
            32,
            r"
__global__ void matched_lanes(int *x, int *y, int n) {
    int lane = threadIdx.x, bin = x[lane] % 4;
    unsigned same = __match_any_sync(0xffffffff, bin);
    int first = __ffs(same) - 1;
    if (lane == first)                                //- all_add
        y[bin] += __popc(same);                       //! all_add
}",
        )
        .zeros()
        .gives(|x| (0..4).map(|b| x[..32].iter().filter(|v| **v % 4 == b).count() as i32).collect())
        .wrong("all_add", GlobalRace, &[]),
        Case::new(
            "aggregated_atomic",
            2,
            64,
            r"
__global__ void aggregated_atomic(int *x, int *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, at = 0;
    unsigned odd = __ballot_sync(0xffffffff, x[i] % 2);
    if (lane == 0) at = atomicAdd(&y[0], __popc(odd));            //- plain
    if (lane == 0) { at = y[0]; y[0] = at + __popc(odd); }        //+ plain //! plain
    at = __shfl_sync(0xffffffff, at, 0);
    if (x[i] % 2) atomicAdd(&y[1 + at + __popc(odd & ((1u << lane) - 1))], 1);
}",
        )
        .zeros()
        .gives(|x| {
            let odd = x[..128].iter().filter(|v| **v % 2 == 1).count();
            let mut y = vec![0; 129];
            y[0] = odd as i32;
            y[1..=odd].fill(1);
            y
        })
        .wrong("plain", GlobalRace, &[]),
        Case::new(
            "elected_lane",
            1,
            32,
            r"
__global__ void elected_lane(int *x, int *y, int n) {
    __shared__ int s;
    int lane = threadIdx.x;
    if (lane < 20) {
        unsigned here = __activemask();
        if (lane == 0) s = 20;                        //- by_activity
        if (lane == __ffs(here) - 1) s = __popc(here);            //+ by_activity
    }
    __syncwarp();
    y[lane] = s;
}",
        )
        .gives(|_| vec![20; 32])
        // `__activemask()` names those that are together by chance: several lanes may think to be the first.
        .sometimes("by_activity", SharedRace, &["elected_lane.cu:7"]),
        Case::new(
            "warp_transpose",
            1,
            32,
            r"
__global__ void warp_transpose(int *x, int *y, int n) {
    __shared__ int s[4][8];
    int lane = threadIdx.x;
    s[lane / 8][lane % 8] = x[lane];                  //! no_syncwarp
    __syncwarp();                                     //- no_syncwarp
    y[lane] = s[lane % 4][lane / 4];                  //! no_syncwarp
}",
        )
        .gives(|x| (0..32).map(|i| x[i % 4 * 8 + i / 4]).collect())
        .wrong("no_syncwarp", SharedRace, &["no __syncwarp or barrier between"]),
        Case::new(
            "warp_queue",
            1,
            32,
            r"
__global__ void warp_queue(int *x, int *y, int n) {
    __shared__ int count, queue[32];
    int lane = threadIdx.x;
    if (lane == 0) count = 0;                         //- no_zero //! no_syncwarp
    __syncwarp();                                     //- no_syncwarp
    if (x[lane] > 50) queue[atomicAdd(&count, 1)] = x[lane];      //! no_zero no_syncwarp
    __syncwarp();
    int sum = 0;
    for (int i = 0; i < count; i++) sum += queue[i];
    y[lane] = sum;
}",
        )
        .gives(|x| vec![x[..32].iter().filter(|v| **v > 50).sum(); 32])
        .wrong("no_zero", Uninitialised, &["that nothing has written"])
        .wrong("no_syncwarp", SharedRace, &[])
        .or(Uninitialised),
        Case::new(
            "partial_warp",
            1,
            40,
            r"
__global__ void partial_warp(int *x, int *y, int n) {
    int t = threadIdx.x, v = x[t];
    unsigned mask = t < 32 ? 0xffffffff : 0xff;
    int width = t < 32 ? 32 : 8;                      //- no_lanes
    int width = 32;                                   //+ no_lanes
    v += __shfl_down_sync(mask, v, 4, width);         //! no_lanes
    if (t % 32 < width - 4) y[t] = v;
    else y[t] = 0;
}",
        )
        .gives(|x| {
            (0..40).map(|t| if t < 28 || (32..36).contains(&t) { x[t] + x[t + 4] } else { 0 }).collect()
        })
        .wrong("no_lanes", Uninitialised, &["which does not take part"]),
    ]
}
