//! NVRTC, which makes PTX of CUDA C++: loaded from the folder that `PHALANX_CUDA_LIBRARIES` names, or from where the system has it.
#![allow(unsafe_code, dead_code)]

use std::ffi::{CStr, CString};
use std::path::PathBuf;

use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts, result};

/// Whether the compiler is there.
pub fn present() -> bool {
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

/// The PTX of a source for an architecture (`compute_90`), with lines; or the compiler's log.
pub fn compile(source: &str, architecture: &'static str) -> Result<Ptx, String> {
    let options = vec!["-lineinfo".into(), "-default-device".into(), "--device-int128".into()];
    let options = CompileOptions { arch: Some(architecture), options, ..Default::default() };
    compile_ptx_with_opts(source, options).map_err(|error| match error {
        CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
        other => other.to_string(),
    })
}

/// The assembler's log of a source for a chip (`sm_90a`): registers, spills.
pub fn assembled(source: &str, chip: &str) -> Result<String, String> {
    let failed = |error: result::NvrtcError| format!("NVRTC: {error:?}");
    let source = CString::new(source).map_err(|error| error.to_string())?;
    let program = result::create_program(&source, None).map_err(failed)?;
    let options = [format!("-arch={chip}"), "-default-device".into(), "--ptxas-options=-v".into()];
    // SAFETY: the program was made above and is destroyed below.
    let compiled = unsafe { result::compile_program(program, &options) };
    // SAFETY: the same.
    let log = unsafe { result::get_program_log(program) }.map_err(failed)?;
    // SAFETY: it is not used any more.
    unsafe { result::destroy_program(program) }.map_err(failed)?;
    // SAFETY: the log ends with a 0.
    let log = unsafe { CStr::from_ptr(log.as_ptr()) }.to_string_lossy().into_owned();
    compiled.map(|()| log.clone()).map_err(|error| format!("NVRTC: {error:?}: {log}"))
}
