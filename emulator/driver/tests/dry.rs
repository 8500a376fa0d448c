//! Runs that execute nothing: memory is counted and has no contents, work is checked and logged.
#![allow(unsafe_code)]

mod common;

use std::ffi::{CStr, c_char};
use std::process::Command;

use common::{context, status};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{LaunchConfig, PushKernelArg, result};
use cudarc::nvrtc::Ptx;

/// A kernel that would write beyond its memory, if it ran.
const PTX: &str = ".version 9.0\n.target sm_90\n.address_size 64\n
.visible .entry wild(.param .u64 x) {
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [x];
    st.global.u64 [%rd1+1099511627776], %rd1;
    ret;
}";

#[test]
fn nothing_runs_and_everything_is_counted() {
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_process_of_its_own", "--ignored", "--nocapture"])
        .envs([("PHALANX_CUDA", "dry"), ("PHALANX_EMULATED_MEMORY_BYTES", "1000000000000")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}

/// The fields of the log's rows.
fn log() -> Vec<Vec<String>> {
    let path = phalanx_emulated_driver::library().unwrap();
    // SAFETY: the library is loaded already, and the function of this name has this type.
    let text = unsafe {
        let library = libloading::Library::new(path).unwrap();
        let take = library.get::<extern "C" fn() -> *const c_char>(b"phalanx_driver_take_log\0").unwrap();
        CStr::from_ptr(take()).to_str().unwrap().to_string()
    };
    text.lines().map(|row| row.split('\t').map(String::from).collect()).collect()
}

/// The most bytes of the first device since the log was taken.
fn peak(log: &[Vec<String>]) -> u64 {
    log.iter().find(|row| row[0] == "peak" && row[1] == "0").unwrap()[2].parse().unwrap()
}

/// The rows of work: kind, name, grid, bytes read and written.
fn work(log: &[Vec<String>]) -> Vec<[&str; 5]> {
    let work = log.iter().filter(|row| row.len() > 5 && !row[5].is_empty());
    work.map(|row| [5, 7, 8, 11, 12].map(|field| row[field].as_str())).collect()
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn in_a_process_of_its_own() {
    let context = context(0);
    let stream = context.new_stream().unwrap();
    log();

    // 600 GB and 300 GB fit into 1 TB, whatever the host has; 600 GB twice do not.
    // SAFETY: nothing reads it.
    let large = unsafe { stream.alloc::<u8>(600_000_000_000) }.unwrap();
    // SAFETY: as above.
    let refused = unsafe { stream.alloc::<u8>(600_000_000_000) }.map(drop);
    assert_eq!(status(refused), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    // SAFETY: as above.
    let other = unsafe { stream.alloc::<u8>(300_000_000_000) }.unwrap();
    drop((large, other));
    assert_eq!(peak(&log()), 900_000_000_000);

    // Copies come back as zeros; one that is too long is refused all the same.
    let mut x = stream.clone_htod(&[7_u8; 64]).unwrap();
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [0; 64]);
    // SAFETY: the copy is refused.
    let beyond = unsafe {
        result::memcpy_dtoh_sync(&mut [0_u8; 65], cudarc::driver::DevicePtr::device_ptr(&x, &stream).0)
    };
    assert_eq!(status(beyond), CUresult::CUDA_ERROR_INVALID_VALUE);
    log();

    // A kernel is logged and not run.
    let wild = context.load_module(Ptx::from_src(PTX)).unwrap().load_function("wild").unwrap();
    let shape = LaunchConfig { grid_dim: (5, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: it does not run.
    unsafe { stream.launch_builder(&wild).arg(&mut x).launch(shape) }.unwrap();
    stream.memset_zeros(&mut x).unwrap();
    stream.synchronize().unwrap();
    let now = log();
    assert_eq!(work(&now), [["kernel", "wild", "5,1,1", "0", "0"], ["fill", "", "0,0,0", "0", "64"]]);

    // A graph's allocations share memory one after the other, and its launches are logged each time.
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    for bytes in [1_000_000, 3_000_000, 2_000_000] {
        // SAFETY: nothing reads it.
        drop(unsafe { stream.alloc::<u8>(bytes) }.unwrap());
    }
    // SAFETY: it does not run.
    unsafe { stream.launch_builder(&wild).arg(&mut x).launch(shape) }.unwrap();
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    let captured = log();
    assert_eq!((work(&captured).len(), peak(&captured)), (0, 64 + 3_000_000));
    graph.launch().unwrap();
    graph.launch().unwrap();
    let launched = log();
    assert_eq!(work(&launched).iter().filter(|row| row[0] == "kernel").count(), 2);
    assert!(launched.iter().filter(|row| row.len() > 5 && !row[5].is_empty()).all(|row| row[3] == "1"));
    drop(graph);
    log();
    assert_eq!(peak(&log()), 64);
}
