//! Copies and products that run beside the threads: `cp.async` and its groups, `mbarrier` phases, bulk copies, clusters, `wgmma` and `mma`.

use phalanx_ptx::FaultKind::{
    Deadlock, DivergentShuffle, InvalidOperand, Misaligned, MissingFence, OutOfBounds, Pending, SharedRace,
    Uninitialised, Unsupported,
};

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    let reversed = |x: &[i32]| (0..256).map(|i| x[255 - i]).collect::<Vec<_>>();
    vec![
        Case::new("copy_async", 1, 64, r#"
__device__ unsigned at(void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void copy_async(int *x, int *y, int n) {
    __shared__ __align__(16) int s[256];
    int t = threadIdx.x;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(s + 4 * t)), "l"(x + 4 * t) : "memory");   //- odd behind
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(at(s + 4 * t)), "l"(x + 1 + 4 * t) : "memory");   //+ odd //! odd
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(s + 4 * t)), "l"(x + 4 * t + 4) : "memory");   //+ behind //! behind
    asm volatile("cp.async.wait_all;" ::: "memory");          //- no_wait
    __syncthreads();                                  //- no_barrier
    for (int i = 0; i < 4; i++) y[4 * t + i] = s[255 - 4 * t - i];            //! no_wait no_barrier
}"#)
        .gives(reversed)
        .wrong("no_wait", Pending, &["asynchronous"])
        .wrong("no_barrier", SharedRace, &[])
        .wrong("odd", Misaligned, &["16"])
        .wrong("behind", OutOfBounds, &["16 bytes at offset 1024"]),
        Case::new("copy_groups", 1, 32, r#"
__device__ void copy(int *to, int *from) {
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");      //- no_commit
}
__global__ void copy_groups(int *x, int *y, int n) {
    __shared__ int s[2][32];
    int t = threadIdx.x, sum = 0;
    copy(&s[0][t], x + t);
    for (int i = 0; i < 8; i++) {
        if (i < 7) copy(&s[(i + 1) % 2][t], x + 32 * (i + 1) + t);            //! too_soon
        else asm volatile("cp.async.commit_group;" ::: "memory");         //- short_end
        asm volatile("cp.async.wait_group 1;" ::: "memory");  //- two_left
        asm volatile("cp.async.wait_group 2;" ::: "memory");  //+ two_left
        __syncwarp();
        sum += s[i % 2][31 - t];                      //! no_commit two_left short_end too_soon
        __syncwarp();                                 //- too_soon
    }
    y[t] = sum;
}"#)
        .gives(|x| (0..32).map(|t| (0..8).map(|i| x[32 * i + 31 - t]).sum()).collect())
        .wrong("no_commit", Pending, &["asynchronous"])
        .wrong("two_left", Pending, &["asynchronous"])
        .wrong("short_end", Pending, &["asynchronous"])
        .wrong("too_soon", SharedRace, &[]),
        Case::new("copy_over_reads", 1, 32, r#"
__global__ void copy_over_reads(int *x, int *y, int n) {
    __shared__ int s[32];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncwarp();
    int other = s[31 - t];
    __syncwarp();                                     //- no_syncwarp
    unsigned at = (unsigned)__cvta_generic_to_shared(s + t);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;" :: "r"(at), "l"(x + 32 + t) : "memory");   //! no_syncwarp
    y[t] = other + s[t];
}"#)
        .gives(|x| (0..32).map(|t| x[31 - t] + x[32 + t]).collect())
        .wrong("no_syncwarp", SharedRace, &[]),
        Case::new("phases", 1, 64, r#"
__device__ void init(unsigned bar, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
__device__ void arrive(unsigned bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(bar) : "memory");      //- relaxed_arrival
    asm volatile("{ .reg .b64 t; mbarrier.arrive.relaxed.cta.shared::cta.b64 t, [%0]; }" :: "r"(bar) : "memory");      //+ relaxed_arrival
}
__device__ void wait(unsigned bar, int parity) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra W; }" :: "r"(bar), "r"(parity) : "memory");   //- relaxed_wait //! more less_arrives
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 p, [%0], %1; @!p bra W; }" :: "r"(bar), "r"(parity) : "memory");   //+ relaxed_wait
}
__global__ void phases(int *x, int *y, int n) {
    __shared__ int s[64];
    __shared__ unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full);
    int t = threadIdx.x, sum = 0;
    if (t == 0) init(bar, 64);                        //- more fewer //! no_barrier
    if (t == 0) init(bar, 65);                        //+ more
    if (t == 0) init(bar, 32);                        //+ fewer
    __syncthreads();                                  //- no_barrier
    for (int i = 0; i < 4; i++) {
        s[t] = x[64 * i + t];                         //! wrong_phase fewer no_end relaxed_arrival relaxed_wait
        if (t != 5)                                   //+ less_arrives
        arrive(bar);
        wait(bar, i % 2);                             //- wrong_phase
        wait(bar, 1 - i % 2);                         //+ wrong_phase
        sum += s[63 - t];                             //! wrong_phase fewer no_end relaxed_arrival relaxed_wait
        __syncthreads();                              //- no_end
    }
    y[t] = sum;
}"#)
        .patient()
        .gives(|x| (0..64).map(|t| (0..4).map(|i| x[64 * i + 63 - t]).sum()).collect())
        .wrong("more", Deadlock, &[])
        .wrong("less_arrives", Deadlock, &[])
        .wrong("fewer", SharedRace, &[])
        .or(Deadlock)
        .wrong("wrong_phase", SharedRace, &[])
        .sometimes("no_end", SharedRace, &[])
        .wrong("relaxed_arrival", SharedRace, &[])
        .wrong("relaxed_wait", SharedRace, &[])
        .wrong("no_barrier", SharedRace, &[])
        .or(Uninitialised),
        Case::new("bulk_load", 1, 64, r#"
__device__ void wait(unsigned bar) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(bar) : "memory");   //! more_bytes
}
__global__ void bulk_load(int *x, int *y, int n) {
    __shared__ __align__(16) int s[256];
    __shared__ unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full), to = (unsigned)__cvta_generic_to_shared(s);
    int t = threadIdx.x, bytes = 1024;
    s[t] = 0;                                         //! no_proxy_fence
    asm volatile("fence.proxy.async;" ::: "memory");          //- no_proxy_fence
    if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar) : "memory");
    __syncthreads();
    if (t == 0) {
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" :: "r"(bar), "r"(bytes) : "memory");           //- more_bytes no_expect
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" :: "r"(bar), "r"(bytes + 16) : "memory");      //+ more_bytes
        asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(bar) : "memory");                                        //+ no_expect
        bytes = 1020;                                 //+ odd_size
        x += 4;                                       //+ behind
        x += 1;                                       //+ odd_start
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "l"(x), "r"(bytes), "r"(bar) : "memory");   //! no_proxy_fence odd_size behind odd_start
    }
    wait(bar);                                        //- no_wait
    for (int i = 0; i < 4; i++) y[4 * t + i] = s[255 - 4 * t - i];            //! no_wait
}"#)
        .patient()
        .gives(reversed)
        .wrong("no_wait", Pending, &[])
        .or(SharedRace)
        .wrong("no_proxy_fence", MissingFence, &["with no fence.proxy.async between"])
        .wrong("more_bytes", Deadlock, &[])
        .wrong("no_expect", Pending, &[])
        .or(SharedRace)
        .wrong("odd_size", Misaligned, &["no multiple of 16"])
        .wrong("behind", OutOfBounds, &["1024 bytes"])
        .wrong("odd_start", Misaligned, &["16"]),
        Case::new("bulk_store", 1, 64, r#"
__global__ void bulk_store(int *x, int *y, int n) {
    __shared__ __align__(16) int s[64];
    int t = threadIdx.x;
    unsigned from = (unsigned)__cvta_generic_to_shared(s);
    for (int i = 0; i < 4; i++) {
        s[t] = x[64 * i + 63 - t];                    //! no_fence no_wait
        asm volatile("fence.proxy.async;" ::: "memory");      //- no_fence
        __syncthreads();                              //- no_barrier
        if (t == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" :: "l"(y + 64 * i), "r"(from) : "memory");   //! no_fence no_barrier
            asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");   //- no_wait
        }
        __syncthreads();
    }
}"#)
        .gives(|x| (0..256).map(|i| x[i / 64 * 64 + 63 - i % 64]).collect())
        .wrong("no_fence", MissingFence, &["reads 256 bytes"])
        .wrong("no_barrier", SharedRace, &[])
        .wrong("no_wait", SharedRace, &["which the bulk copy at", "may still read"]),
        Case::new("bulk_store_read_back", 1, 64, r#"
__global__ void bulk_store_read_back(int *x, int *y, int n) {
    __shared__ __align__(16) int s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    if (t == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256; cp.async.bulk.commit_group;" :: "l"(y + 64), "r"((unsigned)__cvta_generic_to_shared(s)) : "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");          //- read_only no_wait
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");     //+ read_only
    }
    __syncthreads();
    y[t] = y[64 + 63 - t];                            //! read_only no_wait
}"#)
        .gives(|x| (0..64).map(|i| x[63 - i]).chain(x[..64].iter().copied()).collect())
        .wrong("read_only", Pending, &["before the asynchronous copy was waited for"])
        .wrong("no_wait", Pending, &[]),
        Case::new("cluster_arrival", 2, 32, r#"
__global__ void cluster_arrival(int *x, int *y, int n) {
    __shared__ unsigned long long bar;
    unsigned rank, there, own = (unsigned)__cvta_generic_to_shared(&bar);
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(own) : "memory");
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    if (rank == 1 && threadIdx.x == 0) {
        asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(own));
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(there) : "memory");     //! leaves
    }
    if (rank == 0) {                                  //- leaves
        asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; @!p bra W; }" :: "r"(own) : "memory");   //- leaves
    }                                                 //- leaves
    y[32 * blockIdx.x + threadIdx.x] = x[threadIdx.x];
}"#)
        .cluster(2)
        .patient()
        .gives(|x| [&x[..32], &x[..32]].concat())
        .sometimes("leaves", OutOfBounds, &["of a block of the cluster that has ended"]),
        Case::new("cluster_exchange", 4, 32, r#"
__global__ void cluster_exchange(int *x, int *y, int n) {
    __shared__ int s[32];
    int t = threadIdx.x;
    unsigned rank, there;
    s[t] = x[blockIdx.x * 32 + t];                    //! no_first
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");   //- no_first relaxed
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");   //+ relaxed
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(s + 31 - t)), "r"(1 - rank));   //- third
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(s + 31 - t)), "r"(2 + rank));   //+ third
    int other;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(other) : "r"(there) : "memory");   //! no_first third
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");   //- no_last
    s[t] = 0;                                         //+ no_last
    y[blockIdx.x * 32 + t] = other;
}"#)
        .cluster(2)
        .gives(|x| (0..128).map(|i| x[((i / 32) ^ 1) * 32 + 31 - i % 32]).collect())
        .wrong("no_first", SharedRace, &[])
        .wrong("no_last", SharedRace, &[])
        .or(OutOfBounds)
        .wrong("third", OutOfBounds, &[])
        .wrong("relaxed", SharedRace, &[]),
        Case::new("cluster_exit", 2, 32, r#"
__global__ void cluster_exit(int *x, int *y, int n) {
    __shared__ int s[32];
    unsigned rank, there;
    s[threadIdx.x] = x[threadIdx.x];
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    if (rank == 0) {
        int other;
        asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(s + threadIdx.x)));
        asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(other) : "r"(there) : "memory");
        y[threadIdx.x] = other;
    }
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");   //- leaves
}"#)
        .cluster(2)
        .gives(|x| x[..32].to_vec())
        .sometimes("leaves", OutOfBounds, &["of a block of the cluster that has ended"]),
        Case::new("tensor_product", 1, 32, r#"
__global__ void tensor_product(int *x, int *y, int n) {
    unsigned one = 0x3f803f80;
    float d[4] = {0, 0, 0, 0};
    if (threadIdx.x < 31)                             //+ not_all
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(one));
    for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = (int)d[i];
}"#)
        .gives(|_| vec![16; 128])
        .wrong("not_all", DivergentShuffle, &[]),
        Case::new("sparse_product", 1, 32, r#"
__global__ void sparse_product(int *x, int *y, int n) {
    unsigned one = 0x01010101, places = 0x44444444, d[4] = {0, 0, 0, 0};
    places = 0x45444444;                              //+ same_place
    asm volatile("mma.sp.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %4}, {%4, %4}, {%0, %1, %2, %3}, %5, 0;"   //- wide
    asm volatile("mma.sp.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4, %4, %4}, {%0, %1, %2, %3}, %5, 0;"   //+ wide
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(one), "r"(places));
    for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = d[i];
}"#)
        .gives(|_| vec![16; 128])
        .wrong("same_place", InvalidOperand, &["metadata of row 8 of a sparse matrix: places 1 and 1, where they must differ"])
        .wrong("wide", Unsupported, &["this shape of `mma.sp`"]),
        Case::new("matrix_rows", 1, 32, r#"
__global__ void matrix_rows(int *x, int *y, int n) {
    __shared__ __align__(16) int s[64];
    int t = threadIdx.x;
    s[t] = x[t];                                      //! no_syncwarp
    s[t + 32] = x[t + 32];
    __syncwarp();                                     //- no_syncwarp
    unsigned r, at = (unsigned)__cvta_generic_to_shared(s) + t % 8 * 16;
    at += 4;                                          //+ odd
    at += 240;                                        //+ behind
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at) : "memory");   //! no_syncwarp odd behind
    y[t] = r;
}"#)
        .gives(|x| x[..32].to_vec())
        .wrong("no_syncwarp", SharedRace, &[])
        .wrong("odd", Misaligned, &["16"])
        .wrong("behind", OutOfBounds, &["of shared memory"]),
        Case::new("warpgroup_product", 1, 128, r#"
__global__ void warpgroup_product(int *x, int *y, int n) {
    __shared__ __align__(128) unsigned s[1024];
    for (int i = threadIdx.x; i < 1024; i += 128) s[i] = 0x3f803f80;          //! no_proxy_fence
    asm volatile("fence.proxy.async;" ::: "memory");          //- no_proxy_fence
    __syncthreads();                                  //- no_barrier
    unsigned long long at = (__cvta_generic_to_shared(s) & 0x3ffff) >> 4;
    unsigned long long of = at | 8ull << 16 | 16ull << 32;
    float d[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; i++) d[i] = x[i] < 1000 ? 1 : 0;      
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");   //- no_fence
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(of) : "memory");
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    __syncthreads();                                  //+ used_again
    s[threadIdx.x] = 0;                               //+ used_again //! used_again
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");   //- no_wait
    for (int i = 0; i < 2; i++) y[2 * threadIdx.x + i] = (int)(d[i] + d[i + 2]);     //! no_wait
}"#)
        .gives(|_| vec![34; 256])
        .wrong("no_proxy_fence", MissingFence, &["with no fence.proxy.async between"])
        .wrong("no_fence", MissingFence, &["wgmma"])
        .wrong("no_wait", Pending, &["wgmma"])
        .wrong("used_again", SharedRace, &["which a wgmma may still read", "wgmma.wait_group"])
        .wrong("no_barrier", SharedRace, &[])
        .or(Uninitialised),
        Case::new("barrier_for_copies", 1, 64, r#"
__global__ void barrier_for_copies(int *x, int *y, int n) {
    __shared__ __align__(16) int s[64];
    __shared__ unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full), to = (unsigned)__cvta_generic_to_shared(s);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar) : "memory");
        asm volatile("fence.proxy.async;" ::: "memory");      //- no_fence
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], 256; }" :: "r"(bar) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" :: "r"(to), "l"(x), "r"(bar) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(bar) : "memory");
    y[threadIdx.x] = s[63 - threadIdx.x];
}"#)
        .patient()
        .gives(|x| (0..64).map(|i| x[63 - i]).collect())
        .missed("no_fence", "the fence between an `mbarrier.init` and the asynchronous proxy is not looked for"),
        Case::new("bulk_groups", 1, 64, r#"
__device__ void store(int *to, int *from) {
    unsigned at = (unsigned)__cvta_generic_to_shared(from);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256; cp.async.bulk.commit_group;" :: "l"(to), "r"(at) : "memory");
}
__global__ void bulk_groups(int *x, int *y, int n) {
    __shared__ __align__(16) int s[2][64];
    int t = threadIdx.x;
    for (int i = 0; i < 4; i++) {
        s[i % 2][t] = x[64 * i + 63 - t];             //! two_left other_waits
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
        if (t == 0) {
            store(y + 64 * i, s[i % 2]);
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");   //- two_left other_waits
            asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");   //+ two_left
        }
        if (t == 1) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");   //+ other_waits
        __syncthreads();
    }
}"#)
        .gives(|x| (0..256).map(|i| x[i / 64 * 64 + 63 - i % 64]).collect())
        .wrong("two_left", SharedRace, &["may still read"])
        // Only the thread that started a copy can wait for it.
        .wrong("other_waits", SharedRace, &["may still read"]),
    ]
}
