//! CUDA C++ compiled by NVRTC and run by the emulated driver, with the source's lines in what it reports.
//!
//! Without NVRTC these tests are reported as skipped. `PHALANX_CUDA_LIBRARIES` may name the folder of `libnvrtc.so.13`.
#![allow(unsafe_code)]

mod common;
#[path = "common/compiler.rs"]
mod compiler;

use std::process::ExitCode;

use common::stream;
use cudarc::driver::sys::CUresult;
use cudarc::driver::{LaunchConfig, PushKernelArg, result};
use cudarc::nvrtc::Ptx;

/// The kernels of these tests. The numbers of the lines matter.
const SOURCE: &str = r#"#line 1 "rows.cu"
extern "C" __global__ void row_sums(const float* x, float* sums, int columns, bool wait) {
    __shared__ float parts[128];
    float part = 0.f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) part += x[blockIdx.x * columns + i];
    parts[threadIdx.x] = part;
    if (wait) __syncthreads();
    for (int half = 64; half > 0; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}
extern "C" __global__ void two_arrays(float* out, int last) {
    __shared__ float low[32];
    __shared__ float high[32];
    extern __shared__ float more[];
    high[threadIdx.x] = threadIdx.x;
    more[threadIdx.x] = 1.f;
    __syncthreads();
    low[threadIdx.x + last] = high[31 - threadIdx.x] + more[31 - threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = low[threadIdx.x];
}
"#;

/// What kernels of other projects have: tables of functions, virtual calls, packed structs, calls of themselves,
/// numbers of 128 bits, memory of their own, parts of words.
const LANGUAGE: &str = r#"#line 1 "language.cu"
__device__ int inc(int x) { return x + 1; }
__device__ int square(int x) { return x * x; }
__device__ int (*table[2])(int) = {inc, square};
__constant__ int (*constant_table[2])(int) = {square, inc};
struct __attribute__((packed)) Packed { char c; int (*f)(int); const char *text; };
__device__ Packed packed = {3, square, "hello"};
struct Shape { int side; __device__ virtual int area() const = 0; };
struct Square : Shape { __device__ int area() const override { return side * side; } };
struct Line : Shape { __device__ int area() const override { return side; } };
__device__ void sort(int *x, int low, int high) {
    if (low >= high) return;
    int middle = x[(low + high) / 2], i = low, j = high;
    while (i <= j) {
        while (x[i] < middle) i++;
        while (x[j] > middle) j--;
        if (i <= j) { int t = x[i]; x[i++] = x[j]; x[j--] = t; }
    }
    sort(x, low, j);
    sort(x, i, high);
}
extern "C" __global__ void language(int *out, int which, long long big, int (*nothing)(int)) {
    int i = threadIdx.x;
    Square square_of; Line line; square_of.side = line.side = i;
    const Shape *shape = (i + which) % 2 ? (Shape *)&square_of : (Shape *)&line;
    int x[16];
    for (int j = 0; j < 16; j++) x[j] = (j * 7 + i) % 16;
    sort(x, 0, 15);
    int ordered = 1;
    for (int j = 0; j < 16; j++) ordered &= x[j] == j;
    int *mine = (int *)malloc(8 * sizeof(int));
    for (int j = 0; j < 8; j++) mine[j] = j * i;
    int sum = 0;
    for (int j = 0; j < 8; j++) sum += mine[j];
    free(mine);
    __int128 product = (__int128)big * big;
    out[i] = table[(i + which) % 2](i) + 1000 * constant_table[(i + which) % 2](i);
    out[32 + i] = packed.f(packed.c + i) + packed.text[i % 5] + shape->area() + ordered * 10000 + sum;
    out[64 + i] = (int)(product / (1000007 + i)) ^ (int)(product % (1000007 + i));
    out[96 + i] = __vadd4(i * 0x01020304, 0x7f80ff01) ^ __vmaxs2(i - 5, 0x00038000) ^ __fns(0xf0f0, i % 16, i % 5 - 2);
    if (which > 1) out[i] = nothing(i);
}
"#;

/// A test with its claim.
type Test = (&'static str, fn() -> Result<(), String>);

const TESTS: [Test; 6] = [
    ("sums of rows are those of the CPU", sums_are_right),
    ("an access out of bounds is named with its line", out_of_bounds),
    ("an array of shared memory that runs over into the next is named", array_overrun),
    ("what is read too early for want of a barrier is named with its line", missing_barrier),
    ("functions, classes, numbers of 128 bits and the heap are as in C++", language_is_right),
    ("a call of a null pointer is named with its line", null_call),
];

fn main() -> ExitCode {
    if std::env::args().any(|arg| arg == "--list") {
        return ExitCode::SUCCESS;
    }
    if !compiler::present() {
        println!(
            "nvrtc: {} tests skipped: there is no libnvrtc (PHALANX_CUDA_LIBRARIES may name its folder)",
            TESTS.len()
        );
        return ExitCode::SUCCESS;
    }
    let run = |(name, test): &Test| {
        let outcome = test();
        println!(
            "nvrtc: {name} ... {}",
            outcome.as_ref().err().map_or("ok".into(), |why| format!("FAILED: {why}"))
        );
        outcome.is_ok()
    };
    let passed = TESTS.iter().filter(|test| run(test)).count();
    println!("nvrtc: {passed} of {} tests passed", TESTS.len());
    if passed == TESTS.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn compiled(source: &str) -> Ptx {
    compiler::compile(source, "compute_90").unwrap()
}

/// Runs the kernel over `rows` rows of a matrix of 10; the sums, or the code and the text of what went wrong.
fn row_sums(rows: u32, wait: bool) -> Result<Vec<f32>, (CUresult, String)> {
    let stream = stream();
    let kernel = stream.context().load_module(compiled(SOURCE)).unwrap().load_function("row_sums").unwrap();
    let x: Vec<f32> = (0..10 * 300).map(|i| (i % 7) as f32).collect();
    let (x, sums) = (stream.clone_htod(&x).unwrap(), stream.alloc_zeros::<f32>(10).unwrap());
    let config = LaunchConfig { grid_dim: (rows, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the emulator finds what is wrong.
    unsafe { stream.launch_builder(&kernel).arg(&x).arg(&sums).arg(&300_i32).arg(&wait).launch(config) }
        .unwrap();
    stream.clone_dtoh(&sums).map_err(said)
}

/// The code of an error, and its text.
fn said(error: result::DriverError) -> (CUresult, String) {
    (error.0, error.error_string().unwrap().to_string_lossy().into_owned())
}

fn wanted<T: std::fmt::Debug>(right: bool, got: T) -> Result<(), String> {
    if right { Ok(()) } else { Err(format!("{got:?}")) }
}

fn sums_are_right() -> Result<(), String> {
    let sum = |row: usize| (0..300).map(|i| ((row * 300 + i) % 7) as f32).sum::<f32>();
    let got = row_sums(10, true);
    wanted(got == Ok((0..10).map(sum).collect()), got)
}

fn out_of_bounds() -> Result<(), String> {
    let got = row_sums(11, true);
    let named = |text: &str| text.contains("rows.cu:4") && text.contains("block (10, 0, 0)");
    wanted(matches!(&got, Err((CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, text)) if named(text)), got)
}

fn array_overrun() -> Result<(), String> {
    let arrays = |last: i32| {
        let stream = stream();
        let kernel =
            stream.context().load_module(compiled(SOURCE)).unwrap().load_function("two_arrays").unwrap();
        let out = stream.alloc_zeros::<f32>(32).unwrap();
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 128 };
        // SAFETY: the emulator finds what is wrong.
        unsafe { stream.launch_builder(&kernel).arg(&out).arg(&last).launch(config) }.unwrap();
        stream.clone_dtoh(&out).map_err(|error| {
            let error = result::DriverError(error.0);
            error.error_string().unwrap().to_string_lossy().into_owned()
        })
    };
    wanted(arrays(0) == Ok((0..32).map(|i| (32 - i) as f32).collect()), arrays(0))?;
    let got = arrays(1);
    let parts = [
        "write of 4 bytes at offset 128 of 128 bytes of shared memory",
        "low",
        "rows.cu:20",
        "thread (31, 0, 0)",
    ];
    wanted(got.as_ref().is_err_and(|text| parts.iter().all(|part| text.contains(part))), got)
}

fn missing_barrier() -> Result<(), String> {
    let got = row_sums(10, false);
    // The first warp reads what the others have not written yet, and they write it then.
    let named = |text: &str| {
        ["race in shared memory", "rows.cu:8", "rows.cu:5"].iter().all(|part| text.contains(part))
    };
    wanted(matches!(&got, Err((CUresult::CUDA_ERROR_LAUNCH_FAILED, text)) if named(text)), got)
}

/// What a warp of the kernel `language` leaves.
fn language(which: i32) -> Result<Vec<i32>, (CUresult, String)> {
    let stream = stream();
    let kernel = stream.context().load_module(compiled(LANGUAGE)).unwrap().load_function("language").unwrap();
    let out = stream.alloc_zeros::<i32>(128).unwrap();
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the emulator finds what is wrong.
    unsafe { stream.launch_builder(&kernel).arg(&out).arg(&which).arg(&BIG).arg(&0_u64).launch(config) }
        .unwrap();
    stream.clone_dtoh(&out).map_err(said)
}

const BIG: i64 = 1234567890123456789;

/// Each byte, or half, of two words joined.
fn parts(bits: usize, a: u32, b: u32, join: impl Fn(u32, u32) -> u32) -> u32 {
    let low = u32::MAX >> (32 - bits);
    (0..32).step_by(bits).fold(0, |word, at| word | (join(a >> at & low, b >> at & low) & low) << at)
}

/// The set bit that is `n` from `base`, as `__fns` counts.
fn nth_bit(bits: u32, base: i32, n: i32) -> u32 {
    let (mut at, mut left) = (base, n.abs().max(1));
    while (0..32).contains(&at) {
        left -= (bits >> at & 1) as i32;
        match (left, n) {
            (0, _) => return at as u32,
            (_, 0) => break,
            _ => at += n.signum(),
        }
    }
    u32::MAX
}

fn language_is_right() -> Result<(), String> {
    for which in [0, 1] {
        let got = language(which).map_err(|(_, text)| text)?;
        for i in 0..32_i32 {
            let odd = (i + which) % 2 == 1;
            let (plain, constant) = if odd { (i * i, i + 1) } else { (i + 1, i * i) };
            let area = if odd { i * i } else { i };
            let (product, by) = (BIG as i128 * BIG as i128, 1000007 + i as i128);
            let (text, larger) = (b"hello"[i as usize % 5] as i32, (i - 5) as u32);
            let most = parts(16, larger, 0x0003_8000, |a, b| (a as u16 as i16).max(b as u16 as i16) as u32);
            let sums = parts(8, (i as u32).wrapping_mul(0x01020304), 0x7f80_ff01, |a, b| a.wrapping_add(b));
            let all = [
                plain + 1000 * constant,
                (3 + i).pow(2) + text + area + 10000 + 28 * i,
                (product / by) as i32 ^ (product % by) as i32,
                (sums ^ most ^ nth_bit(0xf0f0, i % 16, i % 5 - 2)) as i32,
            ];
            let found = [0, 32, 64, 96].map(|at| got[at + i as usize]);
            wanted(found == all, format!("thread {i}: {found:?} where {all:?} is right"))?;
        }
    }
    Ok(())
}

fn null_call() -> Result<(), String> {
    let got = language(2);
    let named = |text: &str| text.contains("null pointer to a function") && text.contains("language.cu:40");
    wanted(matches!(&got, Err((CUresult::CUDA_ERROR_INVALID_PC, text)) if named(text)), got)
}
