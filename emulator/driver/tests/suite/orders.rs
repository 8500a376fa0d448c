//! What orders accesses of different threads: flags and fences, releases and acquires, their scopes, locks, and barriers of a grid.

use phalanx_ptx::FaultKind::{Deadlock, GlobalRace};

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    let first = |x: &[i32]| vec![x[0]];
    let sum = |x: &[i32]| vec![x.iter().sum()];
    vec![
        Case::new("message", 2, 1, r"
__global__ void message(int *x, int *y, int n) {
    volatile int *flag = y + 1;                       //- plain_flag
    int *flag = y + 1;                                //+ plain_flag
    if (blockIdx.x == 0) {
        x[1] = x[0];                                  //! no_writer_fence no_reader_fence block_fence
        __threadfence();                              //- no_writer_fence block_fence
        __threadfence_block();                        //+ block_fence
        *flag = 1;
    } else {
        while (*flag == 0) {}
        __threadfence();                              //- no_reader_fence
        y[0] = x[1];                                  //! no_writer_fence no_reader_fence block_fence
    }
}")
        .zeros()
        .gives(first)
        .wrong("no_writer_fence", GlobalRace, &["nothing orders the two blocks"])
        .wrong("no_reader_fence", GlobalRace, &["a flag was read, but with no acquire or fence behind that read"])
        .wrong("block_fence", GlobalRace, &["nothing orders the two blocks"])
        .wrong("plain_flag", GlobalRace, &[])
        // A compiler reads a flag that is not volatile once.
        .or(Deadlock),
        Case::new("release_acquire", 2, 32, r#"
__device__ int load(int *p) {
    int v;
    asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");    //- relaxed_load block_scope
    asm volatile("ld.relaxed.gpu.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");    //+ relaxed_load
    asm volatile("ld.acquire.cta.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");    //+ block_scope
    return v;
}
__device__ void store(int *p, int v) {
    asm volatile("st.release.gpu.b32 [%0], %1;" :: "l"(p), "r"(v) : "memory");     //- relaxed_store
    asm volatile("st.relaxed.gpu.b32 [%0], %1;" :: "l"(p), "r"(v) : "memory");     //+ relaxed_store
}
__global__ void release_acquire(int *x, int *y, int n) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
        x[1] = x[0];                                  //! relaxed_store relaxed_load
        store(&y[1], 1);
    } else {
        while (load(&y[1]) == 0) {}
        y[0] = x[1];                                  //! relaxed_store relaxed_load
    }
}"#)
        .zeros()
        .gives(first)
        .wrong("relaxed_store", GlobalRace, &[])
        .wrong("relaxed_load", GlobalRace, &["no acquire or fence behind"])
        .wrong("block_scope", GlobalRace, &[]),
        Case::new("message_within_block", 1, 64, r"
__global__ void message_within_block(int *x, int *y, int n) {
    volatile int *flag = y + 1;
    if (threadIdx.x == 0) {
        x[1] = x[0];                                  //! no_fence
        __threadfence_block();                        //- no_fence
        *flag = 1;
    } else if (threadIdx.x == 32) {
        while (*flag == 0) {}
        __threadfence_block();
        y[0] = x[1];                                  //! no_fence
    }
}")
        .zeros()
        .gives(first)
        .wrong("no_fence", GlobalRace, &["no barrier between"]),
        Case::new("message_in_word", 2, 1, r"
__global__ void message_in_word(int *x, int *y, int n) {
    volatile long long *word = (volatile long long *)(y + 2);
    if (blockIdx.x == 0) {
        *word = 1ll << 32 | x[0];                     //- two_words
        y[2] = x[0];                                  //+ two_words //! two_words
        ((volatile int *)y)[3] = 1;                   //+ two_words
    } else {
        long long seen;
        do seen = *word; while (seen >> 32 == 0);     //! two_words
        y[0] = (int)seen;
    }
}")
        .zeros()
        .gives(first)
        .wrong("two_words", GlobalRace, &[]),
        Case::new("last_block", 4, 64, r"
__global__ void last_block(int *x, int *y, int n) {
    __shared__ bool last;
    int t = threadIdx.x, sum = 0;
    if (t == 0) {
        for (int i = 0; i < 64; i++) sum += x[blockIdx.x * 64 + i];
        y[blockIdx.x + 4] = sum;                      //! no_fence block_fence
        __threadfence();                              //- no_fence block_fence
        __threadfence_block();                        //+ block_fence
        last = atomicAdd(&y[1], 1) == 3;
    }
    __syncthreads();
    if (last && t == 0) {
        int total = 0;
        for (int b = 0; b < 4; b++) total += y[b + 4];            //! no_fence block_fence
        y[0] = total;
    }
}")
        .zeros()
        .gives(sum)
        .wrong("no_fence", GlobalRace, &["nothing orders the two blocks"])
        .wrong("block_fence", GlobalRace, &["nothing orders the two blocks"]),
        Case::new("last_block_of_threads", 4, 64, r"
__global__ void last_block_of_threads(int *x, int *y, int n) {
    __shared__ bool last;
    int t = threadIdx.x;
    y[8 + blockIdx.x * 32 + t % 32] = 1;              //+ same_words
    if (t < 32) y[8 + blockIdx.x * 32 + t] = x[blockIdx.x * 64 + t] + x[blockIdx.x * 64 + t + 32];   //! no_barrier
    __threadfence();
    __syncthreads();                                  //- no_barrier
    if (t == 0) last = atomicAdd(&y[1], 1) == 3;      //- all_count no_barrier
    if (t == 32) last = atomicAdd(&y[1], 1) == 3;     //+ no_barrier
    last = atomicAdd(&y[1], 1) == 3;                  //+ all_count //! all_count
    __syncthreads();
    if (!last) return;
    if (t < 32) atomicAdd(&y[0], y[8 + t] + y[40 + t] + y[72 + t] + y[104 + t]);                     //! no_barrier
}")
        .zeros()
        .gives(sum)
        .wrong("no_barrier", GlobalRace, &[])
        .wrong("all_count", phalanx_ptx::FaultKind::SharedRace, &[])
        .wrong("same_words", GlobalRace, &[]),
        Case::new("spin_lock", 4, 32, r"
__global__ void spin_lock(int *x, int *y, int n) {
    if (threadIdx.x != 0) return;
    int sum = 0;
    for (int i = 0; i < 64; i++) sum += x[blockIdx.x * 64 + i];
    while (atomicCAS(&y[1], 0, 1) != 0) {}            //- no_lock
    __threadfence();                                  //- no_lock no_first_fence block_fences
    __threadfence_block();                            //+ block_fences
    y[0] += sum;                                      //! no_lock no_first_fence no_last_fence block_fences
    __threadfence();                                  //- no_lock no_last_fence block_fences
    __threadfence_block();                            //+ block_fences
    atomicExch(&y[1], 0);                             //- no_lock plain_unlock
    y[1] = 0;                                         //+ plain_unlock //! plain_unlock
}")
        .zeros()
        .gives(sum)
        .wrong("no_lock", GlobalRace, &[])
        .wrong("no_first_fence", GlobalRace, &[])
        .wrong("no_last_fence", GlobalRace, &[])
        .wrong("block_fences", GlobalRace, &[])
        .wrong("plain_unlock", GlobalRace, &[]),
        Case::new("lock_of_lanes", 1, 32, r"
__global__ void lock_of_lanes(int *x, int *y, int n) {
    for (bool done = false; !done;) {                 //- naive
        if (atomicCAS(&y[1], 0, 1) == 0) {            //- naive
    while (atomicCAS(&y[1], 0, 1) != 0) {}            //+ naive
    { {                                               //+ naive
            __threadfence();
            *(volatile int *)y += x[threadIdx.x];
            __threadfence();
            atomicExch(&y[1], 0);
            done = true;                              //- naive
        }
        __syncwarp(__activemask());                   //- naive
    }
}")
        .zeros()
        .gives(|x| vec![x[..32].iter().sum()])
        // Since compute capability 7.0 a lane that waits does not keep others of its warp from going on.
        .also("naive"),
        Case::new("two_locks", 2, 1, r"
__device__ void take(int *lock) { while (atomicCAS(lock, 0, 1) != 0) {} __threadfence(); }   //! crossed
__device__ void give(int *lock) { __threadfence(); atomicExch(lock, 0); }
__global__ void two_locks(int *x, int *y, int n) {
    int first = 0, second = 1;                        //- crossed
    int first = blockIdx.x, second = 1 - blockIdx.x;  //+ crossed
    for (int i = 0; i < 64; i++) {
        take(&y[2 + first]);
        take(&y[2 + second]);
        y[0] += x[i];
        give(&y[2 + second]);
        give(&y[2 + first]);
    }
}")
        .zeros()
        .gives(|x| vec![2 * x[..64].iter().sum::<i32>()])
        .sometimes("crossed", Deadlock, &["no thread has written anything"]),
        Case::new("lock_not_given", 2, 1, r"
__global__ void lock_not_given(int *x, int *y, int n) {
    while (atomicCAS(&y[1], 0, 1) != 0) {}            //! kept
    __threadfence();
    y[0] += x[blockIdx.x];
    if (y[0] > x[1]) return;                          //+ kept
    __threadfence();
    atomicExch(&y[1], 0);
}")
        .input(vec![5, 3])
        .zeros()
        .gives(|x| vec![x[0] + x[1]])
        .sometimes("kept", Deadlock, &[]),
        Case::new("grid_barrier", 4, 64, r"
__global__ void grid_barrier(int *x, int *y, int n) {
    int i = blockIdx.x * 64 + threadIdx.x;
    y[8 + i] = x[i];                                  //! no_fence no_barrier
    __threadfence();                                  //- no_fence
    __syncthreads();                                  //- no_barrier
    if (threadIdx.x == 0) {                           //- no_barrier
    if (threadIdx.x == 32) {                          //+ no_barrier
        atomicAdd(&y[0], 1);
        while (*(volatile int *)y < 4) {}             //- one_more
        while (*(volatile int *)y < 5) {}             //+ one_more //! one_more
        __threadfence();
    }
    __syncthreads();
    y[264 + i] = y[8 + 255 - i];                      //! no_fence no_barrier
}")
        .output(520)
        .zeros()
        .gives(|x| {
            let mut y = vec![0; 520];
            y[0] = 4;
            y[8..264].copy_from_slice(x);
            (0..256).for_each(|i| y[264 + i] = x[255 - i]);
            y
        })
        .wrong("no_fence", GlobalRace, &["nothing orders the two blocks"])
        .wrong("no_barrier", GlobalRace, &[])
        .wrong("one_more", Deadlock, &[]),
        Case::new("grid_barrier_twice", 2, 32, r"
__device__ void sync(int *count, int wanted) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(count, 1);
        while (*(volatile int *)count < wanted) {}
        __threadfence();
    }
    __syncthreads();
}
__global__ void grid_barrier_twice(int *x, int *y, int n) {
    int i = blockIdx.x * 32 + threadIdx.x, v = x[i];
    for (int step = 1; step <= 3; step++) {
        y[1 + i] = v;                                 //! once
        sync(y, 4 * step - 2);
        v += y[1 + 63 - i];                           //! once
        sync(y, 4 * step);                            //- once
        if (threadIdx.x == 0) atomicAdd(y, 1);        //+ once
    }
    y[128 + i] = v;
}")
        .output(256)
        .zeros()
        .gives(|x| {
            let mut y = vec![0; 192];
            y[0] = 12;
            (0..64).for_each(|i| {
                y[1 + i] = 2 * (x[i] + x[63 - i]);
                y[128 + i] = 4 * (x[i] + x[63 - i]);
            });
            y
        })
        // In some orders the values alone are wrong: a block hears of the next step through the same counter.
        .sometimes("once", GlobalRace, &["nothing orders the two blocks"]),
        Case::new("look_back", 4, 32, r"
__global__ void look_back(int *x, int *y, int n) {
    if (threadIdx.x != 0) return;
    int b = blockIdx.x, own = 0, before = 0;
    for (int i = 0; i < 64; i++) own += x[b * 64 + i];
    int *sums = y + 16;
    volatile int *states = y + 32;
    if (b > 0) {
        while (states[b - 1] == 0) {}
        __threadfence();                              //- no_reader_fence
        before = sums[b - 1];                         //! no_writer_fence no_reader_fence
    }
    sums[b] = before + own;                           //! no_writer_fence no_reader_fence
    __threadfence();                                  //- no_writer_fence
    states[b] = 1;
    y[b] = before + own;
}")
        .zeros()
        .gives(|x| (1..=4).map(|b| x[..64 * b].iter().sum()).collect())
        .wrong("no_writer_fence", GlobalRace, &["nothing orders the two blocks"])
        .wrong("no_reader_fence", GlobalRace, &["a flag was read"]),
        Case::new("linked_list", 2, 32, r"
__global__ void linked_list(int *x, int *y, int n) {
    int i = blockIdx.x * 32 + threadIdx.x;
    int *head = y, *next = y + 8, old;
    do {                                              //- plain
        old = *(volatile int *)head;                  //- plain
        next[i] = old;                                //- plain
        __threadfence();                              //- plain
    } while (atomicCAS(head, old, i + 1) != old);     //- plain
    next[i] = *head;                                  //+ plain
    *head = i + 1;                                    //+ plain
    __threadfence();
    if (atomicAdd(&y[1], 1) != 63) return;
    int length = 0, sum = 0;
    for (int at = *(volatile int *)head; at != 0; at = next[at - 1]) { length++; sum += x[at - 1]; }
    y[2] = length;
    y[3] = sum;
}")
        .zeros()
        .gives(|_| Vec::new())
        .wrong("plain", GlobalRace, &[]),
        Case::new("once_only", 4, 32, r"
__global__ void once_only(int *x, int *y, int n) {
    volatile int *ready = y + 1;
    if (threadIdx.x != 0) return;
    if (*ready == 0) {
        if (atomicCAS(&y[2], 0, 1) == 0) {
            y[3] = x[7];                              //! no_fence
            __threadfence();
            *ready = 1;
        }
        while (*ready == 0) {}
    }
    __threadfence();                                  //- no_fence
    y[8 + blockIdx.x] = y[3];                         //! no_fence
}")
        .zeros()
        .gives(|x| vec![0, 1, 1, x[7], 0, 0, 0, 0, x[7], x[7], x[7], x[7]])
        .wrong("no_fence", GlobalRace, &["a flag was read"]),
        Case::new("even_counter", 2, 1, r"
__global__ void even_counter(int *x, int *y, int n) {
    volatile int *count = y + 1, *data = y + 2;       //- plain_data
    volatile int *count = y + 1;                      //+ plain_data
    int *data = y + 2;                                //+ plain_data
    if (blockIdx.x == 0) {
        *count = 1; __threadfence();
        data[0] = x[0]; data[1] = -x[0];              //! plain_data
        __threadfence(); *count = 2;
    } else {
        int before, a, b;
        do {
            before = *count; __threadfence();
            a = data[0]; b = data[1];                 //! plain_data
            __threadfence();
        } while (before != 2 || *count != before);    //- no_check
        } while (false);                              //+ no_check
        y[0] = a + b + 1000;
    }
}")
        .zeros()
        .gives(|_| vec![1000])
        .sometimes("plain_data", GlobalRace, &[])
        .values("no_check"),
        Case::new("peterson", 2, 1, r"
__global__ void peterson(int *x, int *y, int n) {
    volatile int *wants = y + 2, *turn = y + 4;
    int me = blockIdx.x;
    wants[me] = 1;
    *turn = 1 - me;
    __threadfence();                                  //- no_fence
    while (wants[1 - me] && *turn == 1 - me) {}
    __threadfence();
    *(volatile int *)y += x[me];
    __threadfence();
    wants[me] = 0;
}")
        .zeros()
        .gives(|x| vec![x[0] + x[1]])
        .missed("no_fence", "stores that pass each other: values are those of one order of all accesses"),
        Case::new("too_many_blocks", 64, 256, r"
__global__ void too_many_blocks(int *x, int *y, int n) {
    if (threadIdx.x != 0) return;
    atomicAdd(y, 1);
    while (*(volatile int *)y < 64) {}                //+ waits //! waits
}")
        .shared(200_000)
        .zeros()
        .gives(|_| vec![64])
        .wrong("waits", Deadlock, &["fit"]),
        Case::new("barriers_while_waiting", 4, 64, r#"
__global__ void barriers_while_waiting(int *x, int *y, int n) {
    __shared__ int polls;
    int *flag = y + 200;
    if (blockIdx.x == 0) {
        // Other blocks have to come, though this one never rests.
        int seen = 0;
        while (!__syncthreads_or(seen == 3)) {
            if (threadIdx.x != 0) continue;
            asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");       //- relaxed
            asm volatile("ld.relaxed.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");       //+ relaxed
            polls = seen;
        }
        y[threadIdx.x] = y[100 + threadIdx.x];        //! relaxed
    } else {
        if (threadIdx.x / 22 + 1 == blockIdx.x) y[100 + threadIdx.x] = x[threadIdx.x];     //! relaxed
        __syncthreads();
        __threadfence();
        if (threadIdx.x == 0) atomicAdd(flag, 1);
    }
}"#)
        .zeros()
        .gives(|x| x[..64].to_vec())
        .wrong("relaxed", GlobalRace, &["with no acquire or fence behind that read"]),
        Case::new("flag_passed_on", 3, 1, r#"
__global__ void flag_passed_on(int *x, int *y, int n) {
    int *flag = y + 100, seen, old;
    if (blockIdx.x == 0) {
        y[10] = x[0];
        asm volatile("st.release.gpu.b32 [%0], 1;" :: "l"(flag) : "memory");
    } else if (blockIdx.x == 1) {
        do asm volatile("ld.relaxed.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory"); while (seen != 1);
        asm volatile("atom.relaxed.gpu.exch.b32 %0, [%1], 2;" : "=r"(old) : "l"(flag) : "memory");    //- store
        asm volatile("st.relaxed.gpu.b32 [%0], 2;" :: "l"(flag) : "memory");                            //+ store
    } else {
        do asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory"); while (seen != 2);
        y[0] = y[10];
    }
}"#)
        .zeros()
        .gives(|x| vec![x[0]])
        .missed("store", "what was published at an address stays published when another thread stores there"),
        Case::new("flag_of_two_widths", 2, 1, r#"
__global__ void flag_of_two_widths(int *x, int *y, int n) {
    int *flag = y + 100;
    long long wide;
    int narrow;
    if (blockIdx.x == 0) {
        y[10] = x[0];
        asm volatile("st.release.gpu.b64 [%0], 1;" :: "l"(flag) : "memory");
    } else {
        do asm volatile("ld.acquire.gpu.b64 %0, [%1];" : "=l"(wide) : "l"(flag) : "memory"); while (wide != 1);       //- narrow
        do asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(narrow) : "l"(flag) : "memory"); while (narrow != 1);   //+ narrow
        y[0] = y[10];
    }
}"#)
        .zeros()
        .gives(|x| vec![x[0]])
        .missed("narrow", "a flag is an address, whatever the widths of the accesses"),
        Case::new("volatile_message", 2, 1, r"
__global__ void volatile_message(int *x, int *y, int n) {
    volatile int *flag = y + 1, *data = y + 2;
    if (blockIdx.x == 0) {
        *data = x[0];
        __threadfence();                              //- no_fences
        *flag = 1;
    } else {
        while (*flag == 0) {}
        __threadfence();                              //- no_fences
        y[0] = *data;
    }
}")
        .zeros()
        .gives(first)
        .missed("no_fences", "volatile accesses that pass each other: values are those of one order of all accesses"),
        Case::new("message_to_a_warp", 2, 32, r"
__global__ void message_to_a_warp(int *x, int *y, int n) {
    volatile int *flag = y + 32;
    int t = threadIdx.x;
    if (blockIdx.x == 0) {
        x[t] += 1;                                    //! no_writers_syncwarp
        __syncwarp();                                 //- no_writers_syncwarp
        if (t == 0) { __threadfence(); *flag = 1; }
    } else {
        if (t == 0) { while (*flag == 0) {} __threadfence(); }
        __syncwarp();                                 //- no_readers_syncwarp
        y[t] = x[t];
    }
}")
        .zeros()
        .gives(|x| (0..32).map(|i| x[i] + 1).collect())
        // A fence counts for all lanes of its warp, so that other orders do not show it.
        .sometimes("no_writers_syncwarp", GlobalRace, &["nothing orders the two blocks"])
        .sometimes("no_readers_syncwarp", GlobalRace, &["nothing orders the two blocks"]),
    ]
}
