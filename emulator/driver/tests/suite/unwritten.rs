//! Memory that nothing has written: as conditions, indices, values of atomics, lanes of a shuffle, and results for the host; loops without
//! an end, assertions and traps.

use phalanx_ptx::FaultKind::{Assert, Endless, Trap, Uninitialised};

use crate::case::Case;

pub fn cases() -> Vec<Case> {
    let clamped = |x: &[i32]| x[..32].iter().map(|v| (*v).min(50)).collect::<Vec<_>>();
    vec![
        Case::new(
            "condition",
            1,
            32,
            r"
__global__ void condition(int *x, int *y, int n) {
    int *from = x;                                    //- unwritten
    int *from = y + 64;                               //+ unwritten
    if (from[threadIdx.x] > 50) y[threadIdx.x] = 50;  //! unwritten
    else atomicExch(&y[threadIdx.x], from[threadIdx.x]);
}",
        )
        .gives(clamped)
        .wrong(
            "unwritten",
            Uninitialised,
            &["of an allocation of 1024 bytes that nothing has written"],
        ),
        Case::new(
            "gather",
            1,
            32,
            r"
__global__ void gather(int *x, int *y, int n) {
    int *at = x;                                      //- unwritten
    int *at = y + 64;                                 //+ unwritten
    y[threadIdx.x] = x[at[threadIdx.x]];              //! unwritten
}",
        )
        .gives(|x| (0..32).map(|i| x[x[i] as usize]).collect())
        .wrong("unwritten", Uninitialised, &["that nothing has written"]),
        Case::new(
            "sum_into",
            1,
            32,
            r"
__global__ void sum_into(int *x, int *y, int n) {
    int t = threadIdx.x;
    y[t] = 0;                                         //- not_cleared
    y[t] += x[t];
}",
        )
        .gives(|x| x[..32].to_vec())
        // What is added to unwritten bytes is unwritten, and found where the host reads it.
        .values("not_cleared"),
        Case::new(
            "atomic_into",
            1,
            32,
            r"
__global__ void atomic_into(int *x, int *y, int n) {
    if (threadIdx.x == 0) y[0] = 0;                   //- not_cleared
    __syncwarp();
    atomicAdd(y, x[threadIdx.x]);                     //! not_cleared
}",
        )
        .gives(|x| vec![x[..32].iter().sum()])
        .wrong("not_cleared", Uninitialised, &["atomic operation", "that nothing has written"]),
        Case::new(
            "shared_part",
            1,
            64,
            r"
__global__ void shared_part(int *x, int *y, int n) {
    __shared__ int s[64];
    int t = threadIdx.x;
    if (t < 60) s[t] = x[t];                          //+ not_all
    s[t] = x[t];                                      //- not_all
    __syncthreads();
    y[t] = s[63 - t] > 50 ? 50 : 1;                   //- not_all
    if (s[63 - t] > 50) atomicExch(&y[t], 50); else atomicExch(&y[t], 1);   //+ not_all //! not_all
}",
        )
        .gives(|x| (0..64).map(|i| if x[63 - i] > 50 { 50 } else { 1 }).collect())
        .wrong("not_all", Uninitialised, &["of shared memory"]),
        Case::new(
            "shared_of_last_block",
            2,
            32,
            r"
__global__ void shared_of_last_block(int *x, int *y, int n) {
    __shared__ int s[32];
    int t = threadIdx.x;
    if (blockIdx.x == 0) s[t] = x[t];                 //+ kept
    s[t] = x[t];                                      //- kept
    __syncwarp();
    if (s[31 - t] > 50) atomicAdd(&y[t], 1);          //! kept
}",
        )
        .zeros()
        .gives(|x| (0..32).map(|i| 2 * (x[31 - i] > 50) as i32).collect())
        .wrong("kept", Uninitialised, &["of shared memory", "block (1, 0, 0)"]),
        Case::new(
            "local_part",
            1,
            32,
            r"
__global__ void local_part(int *x, int *y, int n) {
    int mine[8];
    for (int i = 0; i < 8; i++) mine[x[i] % 8] = i;   //+ not_all
    for (int i = 0; i < 8; i++) mine[i] = i;          //- not_all
    int v = mine[(x[threadIdx.x] + threadIdx.x) % 8]; //! not_all
    if (v > 5) y[threadIdx.x] = 5;
    else atomicExch(&y[threadIdx.x], v);
}",
        )
        .gives(|x| (0..32).map(|i| ((x[i] + i as i32) % 8).min(5)).collect())
        .wrong("not_all", Uninitialised, &["of local memory"]),
        Case::new(
            "heap_part",
            1,
            32,
            r"
__global__ void heap_part(int *x, int *y, int n) {
    int *p = (int *)malloc(64);
    for (int i = 0; i < 16; i++) p[i] = 0;            //- not_cleared
    for (int i = 0; i < 16; i++) p[x[i] % 16]++;
    int v = p[x[threadIdx.x] % 16];                   //! not_cleared
    if (v > 1) atomicExch(&y[threadIdx.x], 1);
    else atomicExch(&y[threadIdx.x], v);
    free(p);
}",
        )
        .gives(|x| {
            let bin = |b: i32| x[..16].iter().filter(|v| **v % 16 == b).count() as i32;
            (0..32).map(|i| bin(x[i] % 16).min(1)).collect()
        })
        .wrong("not_cleared", Uninitialised, &["that nothing has written"]),
        Case::new(
            "shuffled",
            1,
            32,
            r"
__global__ void shuffled(int *x, int *y, int n) {
    int *from = x;                                    //- unwritten
    int *from = y + 64;                               //+ unwritten
    y[threadIdx.x] = __shfl_xor_sync(0xffffffff, from[threadIdx.x], 1);    //! unwritten
}",
        )
        .gives(|x| (0..32).map(|i| x[i ^ 1]).collect())
        .wrong("unwritten", Uninitialised, &["that nothing has written"]),
        Case::new(
            "copied_padding",
            1,
            32,
            r"
struct Padded { char tag; int value; };
__global__ void copied_padding(int *x, int *y, int n) {
    Padded *p = (Padded *)(y + 64);
    p[threadIdx.x].tag = 1;
    p[threadIdx.x].value = x[threadIdx.x];
    p[32 + threadIdx.x] = p[threadIdx.x];
    y[threadIdx.x] = p[32 + threadIdx.x].value;       //- first_word
    y[threadIdx.x] = ((int *)&p[32 + threadIdx.x])[0];            //+ first_word
}",
        )
        .gives(|x| x[..32].to_vec())
        .values("first_word"),
        Case::new(
            "half_a_result",
            1,
            32,
            r"
__global__ void half_a_result(int *x, int *y, int n) {
    int t = threadIdx.x;
    if (x[t] % 2 == 0) y[t] = x[t];
    else y[t] = 0;                                    //- odd_forgotten
}",
        )
        .gives(|x| x[..32].iter().map(|v| if v % 2 == 0 { *v } else { 0 }).collect())
        .values("odd_forgotten"),
        Case::new(
            "halves_of_a_word",
            1,
            32,
            r"
__global__ void halves_of_a_word(int *x, int *y, int n) {
    short *halves = (short *)y;
    halves[2 * threadIdx.x] = x[threadIdx.x];
    halves[2 * threadIdx.x + 1] = 0;                  //- upper_forgotten
}",
        )
        .gives(|x| x[..32].to_vec())
        .values("upper_forgotten"),
        Case::new(
            "collatz",
            1,
            32,
            r"
__global__ void collatz(int *x, int *y, int n) {
    int v = x[threadIdx.x] + 1, steps = 0;
    while (v != 1) {                                  //- to_zero
    while (v != 0) {                                  //+ to_zero
        v = v % 2 ? 3 * v + 1 : v / 2;
        steps++;
        ((volatile int *)y)[threadIdx.x] = steps;
    }
    y[threadIdx.x] = steps;
}",
        )
        .gives(|x| {
            let steps = |v: i32| {
                std::iter::successors(Some(v), |v| Some(if v % 2 == 1 { 3 * v + 1 } else { v / 2 }))
                    .position(|v| v == 1)
                    .unwrap() as i32
            };
            x[..32].iter().map(|v| steps(v + 1)).collect()
        })
        .wrong("to_zero", Endless, &["the block is not over after"]),
        Case::new(
            "asserted",
            1,
            32,
            r#"
#define assert(what) ((what) ? (void)0 : __assert_fail(#what, "asserted.cu", __LINE__, "asserted"))
extern "C" __device__ void __assert_fail(const char *, const char *, unsigned, const char *);
__global__ void asserted(int *x, int *y, int n) {
    int v = x[threadIdx.x];
    assert(v < 101);                                  //- too_narrow
    assert(v < 50);                                   //+ too_narrow //! too_narrow
    y[threadIdx.x] = v;
}"#,
        )
        .gives(|x| x[..32].to_vec())
        .wrong("too_narrow", Assert, &["v < 50"]),
        Case::new(
            "trapped",
            1,
            32,
            r"
__global__ void trapped(int *x, int *y, int n) {
    if (x[threadIdx.x] > 100) __trap();               //- lower
    if (x[threadIdx.x] > 90) __trap();                //+ lower //! lower
    y[threadIdx.x] = x[threadIdx.x];
}",
        )
        .gives(|x| x[..32].to_vec())
        .wrong("lower", Trap, &["trap"]),
        Case::new(
            "divided",
            1,
            32,
            r"
__global__ void divided(int *x, int *y, int n) {
    int by = x[threadIdx.x] + 1;                      //- by_zero
    int by = x[threadIdx.x] - 11;                     //+ by_zero
    y[threadIdx.x] = 1000 / by;
}",
        )
        .gives(|x| x[..32].iter().map(|v| 1000 / (v + 1)).collect())
        // A GPU divides by zero without a fault: the value is wrong.
        .values("by_zero"),
    ]
}
