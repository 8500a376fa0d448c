//! Compiling kernels at run time.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::nvrtc::{result, sys};

use super::library::{Library, require};
use super::{Image, Target, cache};

/// Compiles a program, or takes it from the cache.
///
/// # Errors
/// If there is no compiler, or what it finds wrong.
pub fn compile(name: &str, text: &str, target: Target) -> Result<Image, String> {
    require(Library::Nvrtc)?;
    note(name, text);
    for &capability in also() {
        kept(name, text, Target::Cubin(capability))?;
    }
    kept(name, text, target)
}

fn kept(name: &str, text: &str, target: Target) -> Result<Image, String> {
    let options = options(target);
    let key = format!("{} {} {name}\n{text}", version()?, options.join(" "));
    if let Some(image) = cache::get(&key) {
        return Ok(image);
    }
    let image = build(name, text, &options, target)?;
    cache::put(&key, &image);
    Ok(image)
}

/// Compute capabilities that everything is compiled for beside what is asked for, such as `80,90`: so a cache is filled for
/// GPUs that are elsewhere.
const ALSO: &str = "PHALANX_KERNEL_CAPABILITIES";

fn also() -> &'static [u32] {
    static CAPABILITIES: OnceLock<Vec<u32>> = OnceLock::new();
    CAPABILITIES.get_or_init(|| {
        let named = std::env::var(ALSO).unwrap_or_default();
        named.split(',').filter_map(|number| number.trim().parse().ok()).collect()
    })
}

/// Program number `n` of those that this process has asked for, as `(name, text)`: what a test assembles for other
/// architectures.
pub fn compiled(n: usize) -> Option<(String, String)> {
    NOTED.lock().unwrap_or_else(PoisonError::into_inner).get(n).cloned()
}

/// In the order in which they were first asked for.
static NOTED: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

fn note(name: &str, text: &str) {
    let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !noted.iter().any(|(_, known)| known == text) {
        noted.push((name.to_string(), text.to_string()));
    }
}

fn options(target: Target) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={target}")];
    options.extend(["--std=c++17", "-default-device", "-lineinfo"].map(String::from));
    if let Target::Cubin(_) = target {
        options.push("--ptxas-options=-v".into());
    }
    options
}

/// The compiler's version.
fn version() -> Result<String, String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded, and both numbers are there to be written.
    let called = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    called.result().map_err(|e| format!("NVRTC: {e:?}"))?;
    Ok(format!("{major}.{minor}"))
}

/// A program of the compiler's, destroyed at the end.
struct Unit(sys::nvrtcProgram);

impl Drop for Unit {
    fn drop(&mut self) {
        // SAFETY: it came from `create_program` and is used no more.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn build(name: &str, text: &str, options: &[String], target: Target) -> Result<Image, String> {
    let c = |s: &str| CString::new(s).map_err(|_| format!("{name}: the source has a 0 byte"));
    let (source, file) = (c(text)?, c(name)?);
    let unit = result::create_program(&source, Some(&file)).map_err(|e| format!("NVRTC: {e:?}"))?;
    let unit = Unit(unit);
    // SAFETY: the program exists; no option has a 0 byte.
    let compiled = unsafe { result::compile_program(unit.0, options) };
    // SAFETY: the program exists and was compiled, or failed to be.
    let log = unsafe { result::get_program_log(unit.0) }.unwrap_or_default();
    let log = log_text(&log);
    if let Err(e) = compiled {
        return Err(format!("{name} does not compile for {target} ({e:?}):\n{log}"));
    }
    let code = match target {
        // SAFETY: the program was compiled to a CUBIN, or else its size is 0.
        Target::Cubin(_) => unsafe { take(&unit, sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN) },
        // SAFETY: the program was compiled.
        Target::Ptx(_) => unsafe { take(&unit, sys::nvrtcGetPTXSize, sys::nvrtcGetPTX) },
    };
    Ok(Image { code: code.map_err(|e| format!("{name}: {e}"))?, log })
}

fn log_text(log: &[c_char]) -> String {
    let bytes: Vec<u8> = log.iter().flat_map(|c| c.to_ne_bytes()).chain([0]).collect();
    CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

type GetSize = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
type GetBytes = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;

/// # Safety
/// The functions are the size and the bytes of one product of the program.
unsafe fn take(unit: &Unit, size: GetSize, bytes: GetBytes) -> Result<Vec<u8>, String> {
    let mut length = 0;
    // SAFETY: the program exists; `length` is there to be written, then as many bytes.
    unsafe {
        size(unit.0, &raw mut length).result().map_err(|e| format!("{e:?}"))?;
        let mut taken = vec![0u8; length];
        bytes(unit.0, taken.as_mut_ptr().cast()).result().map_err(|e| format!("{e:?}"))?;
        Ok(taken)
    }
}
