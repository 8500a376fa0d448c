//! Which files the CUDA libraries are loaded from, and what is said when there are none.
//!
//! The bindings load a library by its name when it is first called, and panic where there is none. So each is looked for
//! here first, and preloaded: a library that is loaded already is found by its name whatever folder it came from.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A library that CUDA programs use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`: devices, memory, launches. It comes with the GPU's driver.
    Driver,
    /// `libnvrtc`: the compiler of kernels.
    Nvrtc,
    /// `libcublasLt`: matrix products.
    CublasLt,
    /// `libnccl`: communication between GPUs.
    Nccl,
}

/// The folder of stand-in libraries, where they are not beside the program.
const EMULATOR_DIR: &str = "PHALANX_CUDA_EMULATOR";
/// Folders with the toolkit's libraries, separated as in `PATH`.
const LIBRARY_DIR: &str = "PHALANX_CUDA_LIBRARIES";

/// Whether `PHALANX_CUDA=emulator` asks for the stand-in libraries that run kernels on the CPU.
pub fn emulated() -> bool {
    std::env::var_os("PHALANX_CUDA").is_some_and(|value| value == "emulator")
}

/// Makes sure that a library is loaded; says where it came from.
///
/// # Errors
/// What was looked for, and where.
pub fn require(library: Library) -> Result<&'static str, String> {
    static FOUND: [OnceLock<Result<String, String>>; 4] = [const { OnceLock::new() }; 4];
    let found = FOUND[library as usize].get_or_init(|| find(library));
    found.as_ref().map(String::as_str).map_err(Clone::clone)
}

/// Where the driver came from: to be named in every report.
///
/// # Errors
/// If there is none: what was looked for.
pub fn driver_name() -> Result<&'static str, String> {
    require(Library::Driver)
}

fn find(library: Library) -> Result<String, String> {
    let Files { stand_in, names } = files(library);
    if let (Some(stand_in), true) = (stand_in, emulated()) {
        return stand_in_library(stand_in);
    }
    if let Some(path) =
        names.iter().flat_map(|name| folders(library).map(move |f| f.join(name))).find(|p| p.is_file())
    {
        companions(library, &path);
        preload(&path)?;
        return if is_present(library) { Ok(path.display().to_string()) } else { Err(unnamed(&path)) };
    }
    // By name, from where the system looks.
    match names.iter().find(|name| preload(Path::new(name)).is_ok()) {
        Some(name) if is_present(library) => Ok((*name).to_string()),
        Some(name) => Err(unnamed(Path::new(name))),
        None => Err(missing(library, names)),
    }
}

/// How a library's files are called.
struct Files {
    /// The stand-in, without prefix and suffix.
    stand_in: Option<&'static str>,
    names: &'static [&'static str],
}

fn files(library: Library) -> Files {
    match library {
        Library::Driver => {
            Files { stand_in: Some("phalanx_emulated_driver"), names: &["libcuda.so.1", "libcuda.so"] }
        }
        Library::Nvrtc => {
            Files { stand_in: None, names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"] }
        }
        Library::CublasLt => Files {
            stand_in: Some("phalanx_emulated_cublaslt"),
            names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        },
        Library::Nccl => {
            Files { stand_in: Some("phalanx_emulated_nccl"), names: &["libnccl.so", "libnccl.so.2"] }
        }
    }
}

/// Folders to look in, best first: the one named by the environment, Python's wheels, the toolkit's.
fn folders(library: Library) -> impl Iterator<Item = PathBuf> {
    let named = std::env::var_os(LIBRARY_DIR).unwrap_or_default();
    let named: Vec<PathBuf> = std::env::split_paths(&named).filter(|f| !f.as_os_str().is_empty()).collect();
    // The driver belongs to the system, never to a wheel.
    let rest = match library {
        Library::Driver => Vec::new(),
        Library::Nccl => wheels(&["nccl"]),
        Library::CublasLt => wheels(&["cu13", "cublas"]),
        Library::Nvrtc => wheels(&["cu13", "cuda_nvrtc"]),
    };
    let home = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkit = home.chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("lib64"));
    let toolkit = toolkit.filter(move |_| library != Library::Driver);
    named.into_iter().chain(rest).chain(toolkit)
}

/// `nvidia/NAME/lib` of the Python installations at hand.
fn wheels(names: &[&str]) -> Vec<PathBuf> {
    let environment = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    let user = std::env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
    let roots = environment.into_iter().chain(user).chain(["/usr/local".into(), "/usr".into()]);
    let mut found = Vec::new();
    for lib in roots.map(|root| root.join("lib")) {
        let entries = std::fs::read_dir(lib).into_iter().flatten().flatten();
        for python in entries.filter(|e| e.file_name().to_string_lossy().starts_with("python3")) {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = python.path().join(packages).join("nvidia");
                found.extend(names.iter().map(|name| nvidia.join(name).join("lib")));
            }
        }
    }
    found
}

/// The stand-in, by its absolute path.
fn stand_in_library(name: &str) -> Result<String, String> {
    let file = format!("{}{name}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let named = std::env::var_os(EMULATOR_DIR).map(PathBuf::from);
    let program = std::env::current_exe().ok();
    let beside = program
        .iter()
        .flat_map(|p| p.ancestors().skip(1).take(3))
        .flat_map(|f| [f.to_path_buf(), f.join("deps")]);
    let folders: Vec<PathBuf> = named.into_iter().chain(beside).collect();
    let found = folders.iter().map(|folder| folder.join(&file)).find(|path| path.is_file());
    let Some(path) = found else {
        return Err(format!(
            "PHALANX_CUDA=emulator, but there is no {file} in any of {folders:?}; build it with \
             `cargo build -p {}` or name its folder in {EMULATOR_DIR}",
            name.replace('_', "-")
        ));
    };
    preload(&path).map(|()| format!("{} (an emulator: kernels run on the CPU)", path.display()))
}

/// What a library loads by itself when it is used, from the same folder.
fn companions(library: Library, path: &Path) {
    let prefix = match library {
        Library::Nvrtc => "libnvrtc-builtins.so",
        Library::CublasLt => "libcublas.so",
        Library::Driver | Library::Nccl => return,
    };
    let entries = path.parent().and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        if library == Library::Nvrtc && entry.file_name().to_string_lossy().starts_with(prefix) {
            let _ = preload(&entry.path());
        }
    }
}

/// Loads a file for as long as the process lives.
fn preload(path: &Path) -> Result<(), String> {
    // SAFETY: the initialisers of these libraries are the vendor's or ours and have no requirements.
    match unsafe { libloading::Library::new(path) } {
        Ok(library) => {
            std::mem::forget(library);
            Ok(())
        }
        Err(e) => Err(format!("{}: {e}", path.display())),
    }
}

/// Of a library that is there, under a name that the bindings do not ask for.
fn unnamed(path: &Path) -> String {
    let path = path.display();
    format!(
        "{path} is there, but not under a name that is asked for: link it as libNAME.so in a folder of LD_LIBRARY_PATH"
    )
}

/// Whether the bindings find it.
fn is_present(library: Library) -> bool {
    // SAFETY: as for `preload`: a library is opened and closed again.
    unsafe {
        match library {
            Library::Driver => cudarc::driver::sys::is_culib_present(),
            Library::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
            Library::CublasLt => cudarc::cublaslt::sys::is_culib_present(),
            Library::Nccl => cudarc::nccl::sys::is_culib_present(),
        }
    }
}

fn missing(library: Library, names: &[&str]) -> String {
    let what = match library {
        Library::Driver => "the NVIDIA driver",
        Library::Nvrtc => "NVRTC, the compiler of kernels (for example `pip install nvidia-cuda-nvrtc`)",
        Library::CublasLt => "cuBLASLt",
        Library::Nccl => "NCCL",
    };
    let hint = if library == Library::Driver { "; PHALANX_CUDA=emulator runs without one" } else { "" };
    let places: Vec<String> = folders(library).map(|f| f.display().to_string()).collect();
    let places = if places.is_empty() { String::new() } else { format!(", then in {}", places.join(", ")) };
    format!(
        "{what} was not found: looked for {} where the system looks for libraries{places} ({LIBRARY_DIR} names folders){hint}",
        names.join(", ")
    )
}
