//! Loads the emulated driver for the tests of a file, before cudarc looks for one.
#![allow(unsafe_code, dead_code)]

use std::process::Command;
use std::sync::{Arc, Once};

use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};

/// A context of its own on device `ordinal` of the emulated driver, so that a fault in it is no other test's.
pub fn context(ordinal: usize) -> Arc<CudaContext> {
    load();
    let context = CudaContext::new_non_primary(ordinal, 0).unwrap();
    // SAFETY: the tests order their streams themselves.
    unsafe { context.disable_event_tracking() };
    context
}

/// As [`context`], with a stream that is not ordered with the default stream.
pub fn stream() -> Arc<CudaStream> {
    context(0).new_stream().unwrap()
}

/// Loads the library with two devices; from then on everything in this process that asks for a CUDA driver gets it.
pub fn load() {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        // SAFETY: tests load the driver before all else, and the driver reads its environment later.
        unsafe { std::env::set_var("PHALANX_EMULATED_DEVICES", "2") };
        let path = phalanx_emulated_driver::library().expect("the library is built with this test");
        // SAFETY: loading it runs no code of its own.
        std::mem::forget(unsafe { libloading::Library::new(path) }.unwrap());
    });
}

/// The status of a call.
pub fn status<T>(result: Result<T, DriverError>) -> sys::CUresult {
    match result {
        Ok(_) => sys::CUresult::CUDA_SUCCESS,
        Err(error) => error.0,
    }
}

/// Runs an ignored test of this program in a process of its own, with variables of the environment; whether it succeeded,
/// and what it said.
pub fn alone(case: &str, environment: &[(&str, &str)]) -> (bool, String) {
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", case, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(said.contains("running 1 test"), "{case}: {said}");
    (ran.status.success(), said)
}
