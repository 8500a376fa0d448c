//! Compiles programs at run time, and keeps the results on disk ([`KernelCache`]).
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, OnceLock};

use cudarc::nvrtc::sys;

use crate::context::lock;
use crate::kernel_cache::KernelCache;
use crate::library::{require, symbol, version};
use crate::program::{Image, Target};
use crate::progress;
use crate::vendor::Library;

/// Compiles a program, or takes it from the cache.
///
/// # Errors
/// If there is no compiler and the cache does not have the program, or what the compiler finds wrong.
pub fn compile(name: &str, text: &str, target: Target) -> Result<Image, String> {
    remember(name, text);
    for &capability in further_capabilities() {
        cached(name, text, Target::Cubin(capability))?;
    }
    cached(name, text, target)
}

/// All that decides the code that [`compile`] makes, in one text: compiler, options and program.
///
/// # Errors
/// If there is no compiler.
pub fn compile_key(name: &str, text: &str, target: Target) -> Result<String, String> {
    Ok(format!("{} {}", version(Library::Nvrtc)?.short(), key(name, text, &options(target))))
}

fn key(name: &str, text: &str, options: &[String]) -> String {
    format!("{} {name}\n{text}", options.join(" "))
}

fn cached(name: &str, text: &str, target: Target) -> Result<Image, String> {
    let options = options(target);
    let (cache, key) = (KernelCache::of_environment(), key(name, text, &options));
    if let Err(why) = require(Library::Nvrtc) {
        return cache.of_any_compiler(&key).ok_or(why);
    }
    let version = version(Library::Nvrtc)?.short();
    cache.compile_once((&version, &key), || {
        let folder = cache.folder().map(Path::to_path_buf);
        progress::shown(folder, || build(name, text, &options, target))
    })
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

/// A function of the compiler, from the file that was found. The bindings would ask the system for another name first.
///
/// # Safety
/// As for [`symbol`].
unsafe fn function<F: Copy>(name: &str) -> Result<F, String> {
    // SAFETY: by the caller.
    unsafe { symbol(Library::Nvrtc, name) }
}

type Program = sys::nvrtcProgram;
type Names = *const *const c_char;
type Create =
    unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Names, Names) -> sys::nvrtcResult;
type Compile = unsafe extern "C" fn(Program, c_int, Names) -> sys::nvrtcResult;
type Destroy = unsafe extern "C" fn(*mut Program) -> sys::nvrtcResult;
type GetSize = unsafe extern "C" fn(Program, *mut usize) -> sys::nvrtcResult;
type GetBytes = unsafe extern "C" fn(Program, *mut c_char) -> sys::nvrtcResult;

/// A program in the compiler, destroyed on drop.
struct NvrtcProgram(Program);

impl NvrtcProgram {
    fn new(text: &CStr, name: &CStr) -> Result<NvrtcProgram, String> {
        let (mut program, none) = (ptr::null_mut(), ptr::null());
        // SAFETY: the function is of this type; it reads the texts before it returns, and there are no headers.
        let made = unsafe {
            function::<Create>("nvrtcCreateProgram")?(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                0,
                none,
                none,
            )
        };
        made.result().map_err(|e| format!("NVRTC: {e:?}"))?;
        Ok(NvrtcProgram(program))
    }

    /// One output of the program: its log, its CUBIN or its PTX, with the 0 at the end of a text.
    fn output(&self, what: &str) -> Result<Vec<u8>, String> {
        let mut length = 0;
        // SAFETY: the functions are of these types, and the program exists; `length` is there to be written, then as many bytes.
        unsafe {
            let size = function::<GetSize>(&format!("nvrtcGet{what}Size"))?;
            size(self.0, &raw mut length).result().map_err(|e| format!("{e:?}"))?;
            let mut taken = vec![0u8; length];
            let bytes = function::<GetBytes>(&format!("nvrtcGet{what}"))?;
            bytes(self.0, taken.as_mut_ptr().cast()).result().map_err(|e| format!("{e:?}"))?;
            Ok(taken)
        }
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: the function is of this type; the program exists and is used no more.
        unsafe {
            if let Ok(destroy) = function::<Destroy>("nvrtcDestroyProgram") {
                let _ = destroy(&raw mut self.0);
            }
        }
    }
}

fn build(name: &str, text: &str, options: &[String], target: Target) -> Result<Image, String> {
    let c = |s: &str| CString::new(s).map_err(|_| format!("{name}: the source has a 0 byte"));
    // The program may point to them.
    let (code, file) = (c(text)?, c(name)?);
    let program = NvrtcProgram::new(&code, &file)?;
    let texts = options.iter().map(|option| c(option)).collect::<Result<Vec<_>, _>>()?;
    let options: Vec<*const c_char> = texts.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the function is of this type, the program exists, and the options live until it returns.
    let compiled = unsafe {
        function::<Compile>("nvrtcCompileProgram")?(program.0, options.len() as c_int, options.as_ptr())
    };
    let log = program.output("ProgramLog").unwrap_or_default();
    let log = CStr::from_bytes_until_nul(&log).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    if let Err(e) = compiled.result() {
        return Err(format!("{name} does not compile for {target} ({e:?}):\n{log}"));
    }
    let code = match target {
        Target::Cubin(_) => program.output("CUBIN"),
        Target::Ptx(_) => program.output("PTX"),
    };
    Ok(Image { code: code.map_err(|e| format!("{name}: {e}"))?, log })
}
