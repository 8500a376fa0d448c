//! Finds the files of the CUDA libraries, loads them, and says what was looked for where there are none.
//!
//! The bindings load a library by its name at its first call, and panic if there is none. So each library is looked for here first, and
//! preloaded: the system finds a library that is loaded already by its name, whatever folder it came from. The bindings ask for names
//! without a version first (`libcublasLt.so`), so the system may give them another file: [`require`] returns the one that serves.
//! The functions of NVRTC and of NCCL are taken from the file that was found ([`symbol`]).
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::vendor::{Library, Version};

/// The folder of stand-in libraries, where they are not beside the program.
const EMULATOR_DIR: &str = "PHALANX_CUDA_EMULATOR";
/// Folders with the toolkit's libraries, or with Python's packages that have them, separated as in `PATH`.
const LIBRARY_DIR: &str = "PHALANX_CUDA_LIBRARIES";

/// Which libraries `PHALANX_CUDA` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The vendor's.
    Gpu,
    /// `emulator`: the stand-ins, which run kernels on the CPU.
    Emulator,
    /// `dry`: the stand-ins, which execute nothing and log what they are given.
    Dry,
}

pub(crate) fn mode() -> Mode {
    match std::env::var("PHALANX_CUDA").as_deref() {
        Ok("emulator") => Mode::Emulator,
        Ok("dry") => Mode::Dry,
        _ => Mode::Gpu,
    }
}

/// Whether `PHALANX_CUDA` asks for the stand-in libraries: `emulator`, which run kernels on the CPU, or `dry`, which execute nothing.
pub fn emulated() -> bool {
    mode() != Mode::Gpu
}

/// Loads a library if it is not loaded yet, and returns the file that serves.
///
/// # Errors
/// If there is none: which files were looked for, and where.
pub fn require(library: Library) -> Result<&'static str, String> {
    loaded(library).map(|found| found.from.as_str())
}

/// A function of a library, which is loaded if it is not yet.
///
/// # Errors
/// If there is no such library, or no such function in it.
///
/// # Safety
/// `F` is a pointer to a function of that function's type.
pub unsafe fn symbol<F: Copy>(library: Library, name: &str) -> Result<F, String> {
    // SAFETY: by the caller.
    unsafe { function(loaded(library)?, name) }
}

/// # Safety
/// As for [`symbol`]; the library is not closed as long as the function may be called.
unsafe fn function<F: Copy>(LoadedLibrary { from, file }: &LoadedLibrary, name: &str) -> Result<F, String> {
    // SAFETY: by the caller.
    let found = unsafe { file.get::<F>(name.as_bytes()) };
    found.map(|f| *f).map_err(|_| format!("{from} has no function {name}: another version is needed"))
}

/// A library that is never closed.
struct LoadedLibrary {
    from: String,
    file: libloading::Library,
}

fn loaded(library: Library) -> Result<&'static LoadedLibrary, String> {
    static FOUND: [OnceLock<Result<LoadedLibrary, String>>; 4] = [const { OnceLock::new() }; 4];
    FOUND[library as usize].get_or_init(|| find(library)).as_ref().map_err(Clone::clone)
}

/// The version that a library says it has; of the driver, the newest CUDA that it serves.
///
/// # Errors
/// If there is no such library, or it does not say.
pub fn version(library: Library) -> Result<Version, String> {
    type Tell = unsafe extern "C" fn(*mut c_int) -> c_int;
    type TellTwo = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type Return = unsafe extern "C" fn() -> usize;
    let name = version_function(library);
    let (mut number, mut minor) = (0, 0);
    // SAFETY: the functions are of these types, and the numbers are there to be written.
    let status = unsafe {
        match library {
            Library::Driver | Library::Nccl => symbol::<Tell>(library, name)?(&raw mut number),
            Library::Nvrtc => symbol::<TellTwo>(library, name)?(&raw mut number, &raw mut minor),
            Library::CublasLt => {
                number = c_int::try_from(symbol::<Return>(library, name)?()).unwrap_or(0);
                0
            }
        }
    };
    if status != 0 || number <= 0 {
        return Err(format!("{} does not say its version: {name} returned {status}", require(library)?));
    }
    let [number, minor] = [number, minor].map(c_int::unsigned_abs);
    Ok(match library {
        Library::Nvrtc => Version([number, minor, 0]),
        Library::Driver => Version([number / 1000, number % 1000 / 10, 0]),
        // NCCL had four digits before 2.9.
        Library::Nccl if number < 10_000 => Version([number / 1000, number % 1000 / 100, number % 100]),
        _ => Version([number / 10_000, number % 10_000 / 100, number % 100]),
    })
}

fn version_function(library: Library) -> &'static str {
    match library {
        Library::Driver => "cuDriverGetVersion",
        Library::Nvrtc => "nvrtcVersion",
        Library::CublasLt => "cublasLtGetVersion",
        Library::Nccl => "ncclGetVersion",
    }
}

/// The driver's file, for reports.
///
/// # Errors
/// If there is none: which files were looked for.
pub fn driver_name() -> Result<&'static str, String> {
    require(Library::Driver)
}

fn find(library: Library) -> Result<LoadedLibrary, String> {
    let Files { stand_in, names } = files(library);
    if let (Some(stand_in), true) = (stand_in, emulated()) {
        return stand_in_library(stand_in);
    }
    let names = &names[usize::from(is_too_new(library, names[0]))..];
    // The first folder that has the library decides, then the newest name in it.
    let found = folders(library).find_map(|f| names.iter().map(|name| f.join(name)).find(|p| p.is_file()));
    let loaded = match found {
        Some(path) => {
            let companions = companions(library, &path);
            let file = load(&path)?;
            // Never closed, so the system finds them by their names from now on.
            companions.into_iter().for_each(std::mem::forget);
            LoadedLibrary { from: path.display().to_string(), file }
        }
        // By name, from where the system looks.
        None => {
            let by_name =
                |name: &&str| Some(LoadedLibrary { from: (*name).into(), file: load(Path::new(name)).ok()? });
            names.iter().find_map(by_name).ok_or_else(|| missing(library, names))?
        }
    };
    match is_asked_for(library) {
        true => in_use(library, loaded),
        false => Err(format!("{} is there, but not under a name that is asked for", loaded.from)),
    }
}

/// Whether a library of this name compiles or computes for a newer CUDA than the driver serves. Its programs would not load.
fn is_too_new(library: Library, name: &str) -> bool {
    let of_cuda_13 = matches!(library, Library::Nvrtc | Library::CublasLt) && name.ends_with(".so.13");
    of_cuda_13 && version(Library::Driver).is_ok_and(|driver| driver < Version([13, 0, 0]))
}

/// The library whose functions are called: the file that was found, or the one that the bindings have got by another name.
fn in_use(library: Library, found: LoadedLibrary) -> Result<LoadedLibrary, String> {
    let name = version_function(library).as_bytes();
    // SAFETY: only the address is used; a library of the bindings is there, since they find one.
    let address = unsafe {
        match library {
            Library::Driver => {
                cudarc::driver::sys::culib().get::<unsafe extern "C" fn()>(name).map(|f| *f as usize).ok()
            }
            Library::CublasLt => {
                cudarc::cublaslt::sys::culib().get::<unsafe extern "C" fn()>(name).map(|f| *f as usize).ok()
            }
            Library::Nvrtc | Library::Nccl => {
                found.file.get::<unsafe extern "C" fn()>(name).map(|f| *f as usize).ok()
            }
        }
    };
    let Some(used) = address.and_then(mapped_file) else { return Ok(found) };
    let same = Path::new(&found.from).canonicalize().is_ok_and(|path| path == used);
    if same || !Path::new(&found.from).is_absolute() {
        return Ok(LoadedLibrary { from: used.display().to_string(), file: found.file });
    }
    let from = format!("{}, which the system gives in place of {}", used.display(), found.from);
    Ok(LoadedLibrary { from, file: load(&used)? })
}

/// The file from which the code at an address comes, where the system says so.
fn mapped_file(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
        range.is_some_and(|(start, end)| (number(start)..number(end)).contains(&address))
    })?;
    Some(PathBuf::from(&line[line.find('/')?..]))
}

/// The names of a library's files.
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
            Files { stand_in: Some("phalanx_emulated_nccl"), names: &["libnccl.so.2", "libnccl.so"] }
        }
    }
}

/// Folders to look in, best first: the one named by the environment, Python's wheels, the toolkit's.
fn folders(library: Library) -> impl Iterator<Item = PathBuf> {
    let named = std::env::var_os(LIBRARY_DIR).unwrap_or_default();
    let named: Vec<PathBuf> = std::env::split_paths(&named).filter(|f| !f.as_os_str().is_empty()).collect();
    let named: Vec<PathBuf> =
        named.into_iter().flat_map(|f| [vec![f.clone()], packages(&f)].concat()).collect();
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

/// `nvidia/*/lib` in a folder of Python's packages, newest toolkit first.
fn packages(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.join("nvidia")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|e| e.path().join("lib")).filter(|lib| lib.is_dir()).collect();
    // `cu13` holds all libraries that CUDA 12 spreads over `cublas` and others.
    found.sort_by_key(|lib| (!lib.parent().is_some_and(|p| p.ends_with("cu13")), lib.clone()));
    found
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
fn stand_in_library(name: &str) -> Result<LoadedLibrary, String> {
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
            "PHALANX_CUDA asks for stand-in libraries, but there is no {file} in any of {folders:?}; build it with \
             `cargo build -p {}` or name its folder in {EMULATOR_DIR}",
            name.replace('_', "-")
        ));
    };
    let what = match mode() {
        Mode::Dry => "a dry run: kernels are logged and not run",
        _ => "an emulator: kernels run on the CPU",
    };
    let from = format!("{} ({what})", path.display());
    Ok(LoadedLibrary { from, file: load(&path)? })
}

/// The libraries that a library loads by itself, by name, when it is used, taken from the same folder.
fn companions(library: Library, path: &Path) -> Vec<libloading::Library> {
    if library != Library::Nvrtc {
        return Vec::new();
    }
    let entries =
        path.parent().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let builtins = entries.filter(|e| e.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so"));
    builtins.filter_map(|entry| load(&entry.path()).ok()).collect()
}

fn load(path: &Path) -> Result<libloading::Library, String> {
    // SAFETY: the initialisers of these libraries are the vendor's or ours and have no requirements.
    unsafe { libloading::Library::new(path) }.map_err(|e| format!("{}: {e}", path.display()))
}

/// Whether the bindings find a loaded library by its name, or do not look for it.
fn is_asked_for(library: Library) -> bool {
    // SAFETY: as for `load`: a library is opened and closed again.
    unsafe {
        match library {
            Library::Driver => cudarc::driver::sys::is_culib_present(),
            Library::CublasLt => cudarc::cublaslt::sys::is_culib_present(),
            Library::Nvrtc | Library::Nccl => true,
        }
    }
}

/// Part of the error for a library of which there is no file.
pub(crate) const NOT_FOUND: &str = "was not found";
/// Its end.
pub(crate) const DOCTOR: &str =
    "; `gpt doctor` (`cuda::doctor()`) says what there is and what brings the rest";

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
        "{what} {NOT_FOUND}: looked for {} where the system looks for libraries{places} ({LIBRARY_DIR} names folders){hint}{DOCTOR}",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_python_packages_has_those_of_the_newest_toolkit_first() {
        let site = std::env::temp_dir().join(format!("phalanx-packages-{}", std::process::id()));
        for name in ["nccl", "cublas", "cu13"] {
            std::fs::create_dir_all(site.join("nvidia").join(name).join("lib")).unwrap();
        }
        std::fs::create_dir_all(site.join("nvidia").join("headers")).unwrap();
        let wanted = ["cu13", "cublas", "nccl"].map(|name| site.join("nvidia").join(name).join("lib"));
        let found = packages(&site);
        std::fs::remove_dir_all(&site).unwrap();
        assert_eq!(found, wanted);
        assert_eq!(packages(Path::new("/nowhere")), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_function_that_a_library_does_not_have_is_an_error() {
        let file = load(Path::new("libc.so.6")).unwrap();
        let known = LoadedLibrary { from: "libc.so.6".into(), file };
        // SAFETY: `getpid` is such a function; the other one is not there.
        let (there, missing) = unsafe {
            (
                function::<extern "C" fn() -> i32>(&known, "getpid"),
                function::<extern "C" fn()>(&known, "nothing"),
            )
        };
        assert_eq!(there.unwrap()() as u32, std::process::id());
        assert_eq!(missing.unwrap_err(), "libc.so.6 has no function nothing: another version is needed");
    }
}
