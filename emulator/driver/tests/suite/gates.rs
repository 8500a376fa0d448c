//! One right kernel, broken in ten ways, of which each must fail at a gate:
//!
//! | what is broken | gate |
//! |---|---|
//! | a barrier, a fence, a wait for a copy, an index | faults of the interpreter |
//! | the grid's size, the order of a sum | results, held against a CPU's bit by bit |
//! | the way through global memory, through shared memory | counters of sectors and of bank conflicts (`Checks::counters`) |
//! | registers | the assembler's report of spills |
//! | a `free` | what is left of the kernel's heap |
//!
//! Phalanx's own kernels have the same gates: the emulator under all tests, golden numbers and bits, `kernels/tests/cuda/counters.tsv` and
//! `tests/sass`. Waits that are missing between streams are the driver's (`mistakes.rs`).

use phalanx_ptx::FaultKind::{GlobalRace, OutOfBounds, Pending, SharedRace, Uninitialised};

use crate::case::{Case, Cost};

/// Sums of the columns of two tiles of 32 by 32, and by the last block their total; each sum in one order.
const SOURCE: &str = r#"
__device__ unsigned at(void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void __launch_bounds__(1024) column_sums(int *x, int *y, int n) {
    __shared__ int tile[32][33];                      //- banks
    __shared__ int tile[32][32];                      //+ banks
    __shared__ int last;
    int t = threadIdx.x, row = t / 32, column = t % 32, b = blockIdx.x, from = t;
    if (b == gridDim.x - 1) return;                   //+ grid
    from = column * 32 + row;                         //+ uncoalesced
    if (b == 1 && t == 1023) from = 1024;             //+ bounds
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(&tile[from / 32 % 32][from % 32])), "l"(x + b * 1024 + from) : "memory");   //! bounds
    asm volatile("cp.async.wait_all;" ::: "memory");  //- wait
    __syncthreads();                                  //- race
    float sum = __fmul_rn(0.1f, tile[column][row]);   //! race wait
    int *copy = (int *)malloc(4);                     //+ leak
    *copy = tile[column][row]; sum = __fmul_rn(0.1f, *copy);   //+ leak
    float many[80];                                   //+ registers
#pragma unroll
    for (int i = 0; i < 80; i++) many[i] = 0.1f * ((volatile int *)x)[b * 1024 + (t + 32 * i) % 1024];   //+ registers
    __syncthreads();                                  //+ registers
#pragma unroll
    for (int i = 0; i < 80; i++) if (many[i] < 0) sum = 1 + many[79 - i];     //+ registers
    for (int by = 16; by > 0; by /= 2)                //- order
    for (int by = 1; by < 32; by *= 2)                //+ order
        sum += __shfl_down_sync(0xffffffff, sum, by);
    if (column == 0) y[8 + b * 32 + row] = __float_as_int(sum);   //! fence
    __threadfence();                                  //- fence
    __syncthreads();
    if (t == 0) last = atomicAdd(&y[0], 1) == 1;
    __syncthreads();
    if (!last || t != 0) return;
    float total = 0;
    for (int i = 0; i < 64; i++) total += __int_as_float(y[8 + i]);           //! fence
    y[1] = __float_as_int(total);
}"#;

/// What the kernel leaves: the same sums in the same order, in f32.
fn sums(x: &[i32]) -> Vec<i32> {
    let column = |n: usize| {
        let mut lanes: Vec<f32> = (0..32).map(|i| 0.1 * x[n / 32 * 1024 + i * 32 + n % 32] as f32).collect();
        for by in [16, 8, 4, 2, 1] {
            (0..by).for_each(|i| lanes[i] += lanes[i + by]);
        }
        lanes[0]
    };
    let columns: Vec<f32> = (0..64).map(column).collect();
    let total = columns.iter().fold(0_f32, |total, sum| total + sum);
    let mut y = vec![0; 72];
    (y[0], y[1]) = (2, total.to_bits() as i32);
    y[8..].iter_mut().zip(&columns).for_each(|(y, sum)| *y = sum.to_bits() as i32);
    y
}

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("column_sums", 2, 1024, SOURCE)
            .input((0..2048).map(|i| (37 * i + 11) % 101).collect())
            .zeros()
            .gives(sums)
            .within(&[Cost::Sectors, Cost::Banks, Cost::Registers])
            .wrong("race", SharedRace, &["barrier between"])
            .or(Pending)
            .or(Uninitialised)
            .wrong("fence", GlobalRace, &["nothing orders the two blocks"])
            .wrong("wait", Pending, &["before the asynchronous copy was waited for"])
            .wrong("bounds", OutOfBounds, &["at offset 8192 of an allocation of 8192 bytes"])
            .values("grid")
            .values("order")
            .leaks("leak")
            .costs("uncoalesced", Cost::Sectors)
            .costs("banks", Cost::Banks)
            .costs("registers", Cost::Registers),
    ]
}
