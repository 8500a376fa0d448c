//! Boxes of tensors that are copied by tensor maps (TMA): to shared memory under an `mbarrier`, from it in groups, in rings between a warp
//! that copies and warps that compute, to all blocks of a cluster, permuted (swizzled), and as operands of `wgmma`.

use phalanx_ptx::FaultKind::{
    Deadlock, GlobalRace, InvalidOperand, Misaligned, MissingFence, OutOfBounds, Pending, SharedRace,
    Uninitialised,
};
use phalanx_ptx::Swizzle::{Bytes128, None as Plain};
use phalanx_ptx::TensorType::{Bf16, I32};

use crate::case::{Case, Map, Of};

/// `x` as 16 rows of 16 words, of which a copy moves 8 of 8.
fn squares(of: Of) -> Map {
    Map { of, kind: I32, sides: &[16, 16], window: &[8, 8], swizzle: Plain }
}

/// Small whole numbers in bf16, two in a word: 64 rows of 64.
fn halves() -> Vec<i32> {
    let bf16 = |i: usize| (f32::to_bits(small(i) as f32) >> 16) as i32;
    (0..64 * 64 / 2).map(|i| bf16(2 * i) | bf16(2 * i + 1) << 16).collect()
}

fn small(i: usize) -> i32 {
    (i * 7 + i / 64) as i32 % 5 - 2
}

pub fn cases() -> Vec<Case> {
    // Row `r` and column `c` of the box at (4, 8).
    let boxed = |x: &[i32]| (0..64).map(|i| x[(8 + i / 8) * 16 + 4 + i % 8]).collect::<Vec<_>>();
    vec![
        Case::new("box_load", 1, 64, r#"
struct alignas(64) Map { char bytes[128]; };
__device__ void wait(unsigned bar) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(bar) : "memory");   //! more_bytes
}
__global__ void box_load(int *x, int *y, int n, const __grid_constant__ Map in) {
    __shared__ __align__(128) int s[128];
    __shared__ unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full), to = (unsigned)__cvta_generic_to_shared(s);
    int t = threadIdx.x, bytes = 256, column = 4;
    const Map *map = &in;
    s[t] = 0;                                         //+ no_proxy_fence //! no_proxy_fence
    if (t == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (t == 0) {
        to += 16;                                     //+ odd_place
        to += 384;                                    //+ behind
        bytes = 272;                                  //+ more_bytes
        bytes = 240;                                  //+ fewer_bytes
        map = (const Map *)x;                         //+ no_map
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" :: "r"(bar), "r"(bytes) : "memory");      //- no_expect
        asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(bar) : "memory");                                  //+ no_expect
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, 8}], [%3];" :: "r"(to), "l"(map), "r"(column), "r"(bar) : "memory");   //- flat //! no_proxy_fence odd_place behind no_map
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];" :: "r"(to), "l"(map), "r"(column), "r"(bar) : "memory");      //+ flat //! flat
    }
    wait(bar);                                        //- no_wait
    y[t] = s[t];                                      //! no_wait
}"#)
        .map(squares(Of::X))
        .patient()
        .gives(boxed)
        .wrong("no_wait", Pending, &["before the asynchronous copy was waited for"])
        .or(SharedRace)
        .wrong("no_expect", Pending, &[])
        .or(SharedRace)
        .wrong("more_bytes", Deadlock, &[])
        .wrong("fewer_bytes", Deadlock, &[])
        .wrong("odd_place", Misaligned, &["128"])
        .wrong("behind", OutOfBounds, &["of shared memory"])
        .wrong("no_proxy_fence", MissingFence, &["with no fence.proxy.async between"])
        .wrong("no_map", InvalidOperand, &["no tensor map at the address"])
        .wrong("flat", InvalidOperand, &["1 coordinates for a tensor of 2 sides"]),
        Case::new("box_at_the_edge", 1, 64, r#"
struct alignas(64) Map { char bytes[128]; };
__global__ void box_at_the_edge(int *x, int *y, int n, const __grid_constant__ Map in) {
    __shared__ __align__(128) int s[64];
    __shared__ unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full), to = (unsigned)__cvta_generic_to_shared(s);
    int t = threadIdx.x;
    if (t == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(bar) : "memory");
        // Bytes outside of the tensor count too.
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], 256; }" :: "r"(bar) : "memory");      //- inside_only
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], 96; }" :: "r"(bar) : "memory");       //+ inside_only
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {12, -2}], [%2];" :: "r"(to), "l"(&in), "r"(bar) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(bar) : "memory");
    y[t] = s[t];
}"#)
        .map(squares(Of::X))
        .patient()
        .gives(|x| {
            (0..64).map(|i| if i / 8 >= 2 && i % 8 < 4 { x[(i / 8 - 2) * 16 + 12 + i % 8] } else { 0 }).collect()
        })
        .wrong("inside_only", Deadlock, &[]),
        Case::new("box_store", 1, 64, r#"
struct alignas(64) Map { char bytes[128]; };
__global__ void box_store(int *x, int *y, int n, const __grid_constant__ Map out) {
    __shared__ __align__(128) int s[64];
    int t = threadIdx.x;
    unsigned from = (unsigned)__cvta_generic_to_shared(s);
    for (int i = 0; i < 4; i++) {
        s[t] = x[(i / 2 * 8 + t / 8) * 16 + i % 2 * 8 + t % 8];    //! no_fence no_wait
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");      //- no_fence
        __syncthreads();                              //- no_barrier
        if (t == 0) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" :: "l"(&out), "r"(8 - i % 2 * 8), "r"(i / 2 * 8), "r"(from) : "memory");   //! no_fence no_barrier
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");           //- no_commit
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");   //- no_wait
        }
        __syncthreads();
    }
}"#)
        .map(squares(Of::Y))
        .gives(|x| (0..256).map(|i| x[i ^ 8]).collect())
        .wrong("no_fence", MissingFence, &["reads 256 bytes"])
        .wrong("no_barrier", SharedRace, &[])
        .wrong("no_wait", SharedRace, &["may still read"])
        .wrong("no_commit", SharedRace, &["may still read"]),
        Case::new("box_sums", 4, 64, r#"
struct alignas(64) Map { char bytes[128]; };
__global__ void box_sums(int *x, int *y, int n, const __grid_constant__ Map out) {
    __shared__ __align__(128) int s[64];
    int t = threadIdx.x;
    s[t] = x[64 * blockIdx.x + t];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (t == 0) {
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {0, 8}], [%1];" :: "l"(&out), "r"((unsigned)__cvta_generic_to_shared(s)) : "memory");   //- stores
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {0, 8}], [%1];" :: "l"(&out), "r"((unsigned)__cvta_generic_to_shared(s)) : "memory");            //+ stores //! stores
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}"#)
        .map(squares(Of::Y))
        .zeros()
        .gives(|x| {
            let sum = |i: usize| (0..4).map(|block| x[64 * block + i]).sum();
            (0..256).map(|i| if i >= 128 && i % 16 < 8 { sum((i / 16 - 8) * 8 + i % 16) } else { 0 }).collect()
        })
        .wrong("stores", GlobalRace, &["nothing orders"]),
        Case::new("box_ring", 1, 96, r#"
struct alignas(64) Map { char bytes[128]; };
__device__ unsigned at(void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void wait(unsigned bar, int parity) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra W; }" :: "r"(bar), "r"(parity) : "memory");
}
__global__ void box_ring(int *x, int *y, int n, const __grid_constant__ Map in) {
    __shared__ __align__(128) int s[2][64];
    __shared__ unsigned long long full[2], free[2];
    int t = threadIdx.x, sum = 0;
    if (t == 0) {
        for (int i = 0; i < 2; i++) {
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(full + i)) : "memory");
            asm volatile("mbarrier.init.shared.b64 [%0], 2;" :: "r"(at(free + i)) : "memory");     //- one_frees three_free
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(free + i)) : "memory");     //+ one_frees
            asm volatile("mbarrier.init.shared.b64 [%0], 3;" :: "r"(at(free + i)) : "memory");     //+ three_free
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (t >= 64) {
        if (t > 64) return;
        for (int i = 0; i < 8; i++) {
            int stage = i % 2;
            wait(at(free + stage), i / 2 & 1 ^ 1);    //- no_free_wait free_parity
            wait(at(free + stage), i / 2 & 1);        //+ free_parity
            asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], 256; }" :: "r"(at(full + stage)) : "memory");
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" :: "r"(at(s[stage])), "l"(&in), "r"(i % 2 * 8), "r"(i / 2 % 2 * 8), "r"(at(full + stage)) : "memory");   //! no_free_wait one_frees too_soon
        }
        return;
    }
    for (int i = 0; i < 8; i++) {
        int stage = i % 2;
        wait(at(full + stage), i / 2 & 1);            //- no_full_wait full_parity
        wait(at(full + stage), i / 2 & 1 ^ 1);        //+ full_parity
        if (t % 32 == 0) asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(at(free + stage)) : "memory");     //+ too_soon
        sum += s[stage][63 - t];                      //! no_free_wait no_full_wait one_frees too_soon
        __syncwarp();
        if (t % 32 == 0) asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(at(free + stage)) : "memory");     //- too_soon
    }
    y[t] = sum;
}"#)
        .map(squares(Of::X))
        .patient()
        .gives(|x| {
            let of = |i: usize, at: usize| x[(i / 2 % 2 * 8 + at / 8) * 16 + i % 2 * 8 + at % 8];
            (0..64).map(|t| (0..8).map(|i| of(i, 63 - t)).sum()).collect()
        })
        .wrong("no_free_wait", SharedRace, &[])
        .or(Pending)
        .or(Deadlock)
        .wrong("free_parity", Deadlock, &[])
        .wrong("no_full_wait", Pending, &[])
        .or(SharedRace)
        .wrong("full_parity", Deadlock, &[])
        .or(SharedRace)
        .sometimes("one_frees", SharedRace, &[])
        .or(Pending)
        .or(Deadlock)
        .wrong("three_free", Deadlock, &[])
        .sometimes("too_soon", SharedRace, &[])
        .or(Pending),
        Case::new("box_to_a_cluster", 2, 64, r#"
struct alignas(64) Map { char bytes[128]; };
__global__ void box_to_a_cluster(int *x, int *y, int n, const __grid_constant__ Map in) {
    __shared__ __align__(128) int s[64];
    __shared__ unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full), to = (unsigned)__cvta_generic_to_shared(s);
    int t = threadIdx.x;
    unsigned short blocks = 3;
    blocks = 7;                                       //+ three_blocks
    if (t == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(bar) : "memory");
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], 256; }" :: "r"(bar) : "memory");
    }
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");      //- no_meeting
    __syncthreads();                                  //+ no_meeting
    if (t == 0 && blockIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {4, 8}], [%2], %3;" :: "r"(to), "l"(&in), "r"(bar), "h"(blocks) : "memory");   //! no_meeting three_blocks
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(bar) : "memory");
    y[64 * blockIdx.x + t] = s[t];
}"#)
        .map(squares(Of::X))
        .cluster(2)
        .patient()
        .gives(move |x| [boxed(x), boxed(x)].concat())
        .wrong("no_meeting", SharedRace, &["of block (1, 0, 0)"])
        .or(Uninitialised)
        .wrong("three_blocks", InvalidOperand, &["a multicast to the blocks 0b111 of a cluster of 2"]),
        Case::new("box_swizzled", 1, 128, r#"
struct alignas(64) Map { char bytes[128]; };
__global__ void box_swizzled(int *x, int *y, int n, const __grid_constant__ Map in) {
    __shared__ __align__(1024) int s[256];            //- odd_start
    __shared__ __align__(1024) int all[512];          //+ odd_start
    int *s = all + 32;                                //+ odd_start
    __shared__ unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full), to = (unsigned)__cvta_generic_to_shared(s);
    int t = threadIdx.x;
    if (t == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(bar) : "memory");
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], 1024; }" :: "r"(bar) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, 0}], [%2];" :: "r"(to), "l"(&in), "r"(bar) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(bar) : "memory");
    for (int i = t; i < 256; i += 128) {
        int row = i / 32, chunk = i % 32 / 4;
        y[i] = s[row * 32 + (chunk ^ row) * 4 + i % 4];      //- plain
        y[i] = s[i];                                  //+ plain
    }
}"#)
        .map(Map { of: Of::X, kind: I32, sides: &[32, 8], window: &[32, 8], swizzle: Bytes128 })
        .patient()
        .gives(|x| x.to_vec())
        .values("plain")
        .values("odd_start"),
        Case::new("box_product", 1, 128, r#"
struct alignas(64) Map { char bytes[128]; };
__device__ unsigned long long matrix(unsigned at) {
    return (unsigned long long)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;       //- no_swizzle
    return (unsigned long long)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32;                     //+ no_swizzle
}
__global__ void box_product(int *x, int *y, int n, const __grid_constant__ Map in) {
    __shared__ __align__(1024) unsigned short s[64 * 64];
    __shared__ unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full), tile = (unsigned)__cvta_generic_to_shared(s);
    int t = threadIdx.x, warp = t / 32, lane = t % 32;
    if (t == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(bar) : "memory");
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], 8192; }" :: "r"(bar) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, 0}], [%2];" :: "r"(tile), "l"(&in), "r"(bar) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(bar) : "memory");   //- no_full_wait
    float d[4];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < 4; k++)                       //- one_step
    for (int k = 0; k < 1; k++)                       //+ one_step
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(matrix(tile + 32 * k)), "l"(matrix(tile + 32 * k)), "r"(k) : "memory");    //! no_full_wait
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");          //- no_commit
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");   //- no_wait
    for (int i = 0; i < 4; i++) y[(16 * warp + lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = (int)d[i];     //! no_wait no_commit
}"#)
        .map(Map { of: Of::X, kind: Bf16, sides: &[64, 64], window: &[64, 64], swizzle: Bytes128 })
        .input(halves())
        .output(512)
        .patient()
        .gives(|_| {
            let sum = |row: usize, column: usize| (0..64).map(|k| small(row * 64 + k) * small(column * 64 + k)).sum();
            (0..512).map(|i| sum(i / 8, i % 8)).collect()
        })
        .wrong("no_full_wait", Pending, &[])
        .or(SharedRace)
        .values("one_step")
        .values("no_swizzle")
        .wrong("no_wait", Pending, &["wgmma"])
        .wrong("no_commit", Pending, &["wgmma"]),
    ]
}
