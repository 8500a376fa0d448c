//! CUDA C++ compiled by NVRTC and run by the emulated driver, with the source's lines in what it reports.
//!
//! Without NVRTC these tests are reported as skipped. `PHALANX_CUDA_LIBRARIES` may name the folder of `libnvrtc.so.13`.
#![allow(unsafe_code)]

mod common;

use std::path::PathBuf;
use std::process::ExitCode;

use common::stream;
use cudarc::driver::sys::CUresult;
use cudarc::driver::{LaunchConfig, PushKernelArg, result};
use cudarc::nvrtc::{CompileOptions, Ptx, compile_ptx_with_opts};

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

/// A test with its claim.
type Test = (&'static str, fn() -> Result<(), String>);

const TESTS: [Test; 4] = [
    ("sums of rows are those of the CPU", sums_are_right),
    ("an access out of bounds is named with its line", out_of_bounds),
    ("an array of shared memory that runs over into the next is named", array_overrun),
    ("what is read too early for want of a barrier is named with its line", missing_barrier),
];

fn main() -> ExitCode {
    if std::env::args().any(|arg| arg == "--list") {
        return ExitCode::SUCCESS;
    }
    if !nvrtc() {
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

/// Whether the compiler is there; it is loaded from the folder that is named, or from where the system has it.
fn nvrtc() -> bool {
    if let Some(folder) = std::env::var_os("PHALANX_CUDA_LIBRARIES").map(PathBuf::from) {
        for name in ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"] {
            // SAFETY: a library of NVIDIA's, which runs no code that concerns us when it is loaded.
            if let Ok(library) = unsafe { libloading::Library::new(folder.join(name)) } {
                std::mem::forget(library);
            }
        }
    }
    // SAFETY: it looks whether the library can be loaded.
    unsafe { cudarc::nvrtc::sys::is_culib_present() }
}

fn compiled() -> Ptx {
    let options = vec!["-lineinfo".into(), "-default-device".into()];
    compile_ptx_with_opts(SOURCE, CompileOptions { arch: Some("compute_90"), options, ..Default::default() })
        .unwrap()
}

/// Runs the kernel over `rows` rows of a matrix of 10; the sums, or the code and the text of what went wrong.
fn row_sums(rows: u32, wait: bool) -> Result<Vec<f32>, (CUresult, String)> {
    let stream = stream();
    let kernel = stream.context().load_module(compiled()).unwrap().load_function("row_sums").unwrap();
    let x: Vec<f32> = (0..10 * 300).map(|i| (i % 7) as f32).collect();
    let (x, sums) = (stream.clone_htod(&x).unwrap(), stream.alloc_zeros::<f32>(10).unwrap());
    let config = LaunchConfig { grid_dim: (rows, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the emulator finds what is wrong.
    unsafe { stream.launch_builder(&kernel).arg(&x).arg(&sums).arg(&300_i32).arg(&wait).launch(config) }
        .unwrap();
    stream.clone_dtoh(&sums).map_err(|error| {
        let error = result::DriverError(error.0);
        (error.0, error.error_string().unwrap().to_string_lossy().into_owned())
    })
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
        let kernel = stream.context().load_module(compiled()).unwrap().load_function("two_arrays").unwrap();
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
