//! Compiles programs at run time, and keeps the results on disk, so that a program's first step is quick from the second run on.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::sync::{Mutex, OnceLock};

use cudarc::nvrtc::{result, sys};

use crate::cache::{self, Kind};
use crate::context::lock;
use crate::library::require;
use crate::program::{Image, Target};
use crate::vendor::Library;

/// Compiles a program, or takes it from the cache.
///
/// # Errors
/// If there is no compiler, or what it finds wrong.
pub fn compile(name: &str, text: &str, target: Target) -> Result<Image, String> {
    require(Library::Nvrtc)?;
    remember(name, text);
    for &capability in further_capabilities() {
        cached(name, text, Target::Cubin(capability))?;
    }
    cached(name, text, target)
}

fn cached(name: &str, text: &str, target: Target) -> Result<Image, String> {
    let options = options(target);
    let key = format!("{} {} {name}\n{text}", version()?, options.join(" "));
    if let Some(image) = cache::load(Kind::Kernel, &key).and_then(|content| parse(&content)) {
        return Ok(image);
    }
    let image = build(name, text, &options, target)?;
    cache::store(Kind::Kernel, &key, &bytes(&image));
    Ok(image)
}

/// Further compute capabilities for which each program is compiled, such as `80,90`: to fill a cache for GPUs of another machine.
const CAPABILITIES: &str = "PHALANX_KERNEL_CAPABILITIES";

fn further_capabilities() -> &'static [u32] {
    static FURTHER: OnceLock<Vec<u32>> = OnceLock::new();
    FURTHER.get_or_init(|| {
        let named = std::env::var(CAPABILITIES).unwrap_or_default();
        named.split(',').filter_map(|number| number.trim().parse().ok()).collect()
    })
}

/// Program number `n` of those that this process has compiled or found in the cache, as `(name, text)`, for a test that assembles them
/// for other architectures.
pub fn compiled(n: usize) -> Option<(String, String)> {
    lock(&COMPILED).get(n).cloned()
}

/// In the order of the first requests.
static COMPILED: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

fn remember(name: &str, text: &str) {
    let mut compiled = lock(&COMPILED);
    if !compiled.iter().any(|(_, known)| known == text) {
        compiled.push((name.to_string(), text.to_string()));
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

/// A program in the compiler, destroyed on drop.
struct NvrtcProgram(sys::nvrtcProgram);

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: it came from `create_program` and is used no more.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn build(name: &str, text: &str, options: &[String], target: Target) -> Result<Image, String> {
    let c = |s: &str| CString::new(s).map_err(|_| format!("{name}: the source has a 0 byte"));
    let (code, file) = (c(text)?, c(name)?);
    let program = result::create_program(&code, Some(&file)).map_err(|e| format!("NVRTC: {e:?}"))?;
    let program = NvrtcProgram(program);
    // SAFETY: the program exists; no option has a 0 byte.
    let compiled = unsafe { result::compile_program(program.0, options) };
    // SAFETY: the program exists and was compiled, or failed to be.
    let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
    let log = log_text(&log);
    if let Err(e) = compiled {
        return Err(format!("{name} does not compile for {target} ({e:?}):\n{log}"));
    }
    let code = match target {
        // SAFETY: the program was compiled to a CUBIN, or else its size is 0.
        Target::Cubin(_) => unsafe { read_output(&program, sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN) },
        // SAFETY: the program was compiled.
        Target::Ptx(_) => unsafe { read_output(&program, sys::nvrtcGetPTXSize, sys::nvrtcGetPTX) },
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
/// The functions give the size and the bytes of one output of the program, its CUBIN or its PTX.
unsafe fn read_output(program: &NvrtcProgram, size: GetSize, bytes: GetBytes) -> Result<Vec<u8>, String> {
    let mut length = 0;
    // SAFETY: the program exists; `length` is there to be written, then as many bytes.
    unsafe {
        size(program.0, &raw mut length).result().map_err(|e| format!("{e:?}"))?;
        let mut taken = vec![0u8; length];
        bytes(program.0, taken.as_mut_ptr().cast()).result().map_err(|e| format!("{e:?}"))?;
        Ok(taken)
    }
}

/// An image as the cache keeps it: length of the log, log, code.
fn bytes(image: &Image) -> Vec<u8> {
    let log = image.log.as_bytes();
    [&(log.len() as u64).to_le_bytes(), log, &image.code].concat()
}

fn parse(content: &[u8]) -> Option<Image> {
    let (length, rest) = content.split_at_checked(8)?;
    let length = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
    let (log, code) = rest.split_at_checked(length)?;
    Some(Image { code: code.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_comes_back_and_a_short_one_counts_as_none() {
        let image = Image { code: vec![7; 100], log: "12 registers".into() };
        let content = bytes(&image);
        assert_eq!(parse(&content).as_ref(), Some(&image));
        for cut in 0..20 {
            assert_eq!(parse(&content[..cut]), None, "cut at {cut}");
        }
    }
}
