//! The doctor's report of folders with stand-ins for NVIDIA's libraries: whole, of several versions, damaged, and with a file of
//! the name that the bindings ask for first.
#![cfg(feature = "cuda")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The functions that tell a version, and those of a driver without a GPU.
const SOURCE: &str = r#"
#[unsafe(no_mangle)] pub extern "C" fn cuInit(_: u32) -> i32 { 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetCount(n: *mut i32) -> i32 { unsafe { *n = 0 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDriverGetVersion(n: *mut i32) -> i32 { unsafe { *n = NUMBER }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn nvrtcVersion(a: *mut i32, b: *mut i32) -> i32 {
    unsafe { (*a, *b) = (NUMBER / 1000, NUMBER % 1000 / 10) }; 0
}
#[unsafe(no_mangle)] pub extern "C" fn cublasLtGetVersion() -> usize { NUMBER as usize }
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclGetVersion(n: *mut i32) -> i32 { unsafe { *n = NUMBER }; 0 }
"#;

/// A folder of libraries, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("phalanx-doctor-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn library(&self, name: &str, number: u32) -> PathBuf {
        let (source, made) = (self.0.join("source.rs"), self.0.join(name));
        fs::write(&source, format!("const NUMBER: i32 = {number};\n{SOURCE}")).unwrap();
        let mut compiler = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        compiler
            .args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort", "-o"])
            .arg(&made)
            .arg(source);
        let done = compiler.arg(format!("-Clink-arg=-Wl,-soname,{name}")).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        made.canonicalize().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a process of its own reports: libraries are loaded once.
#[test]
#[ignore = "a process of the tests below"]
fn report() {
    print!("{}", phalanx_cuda::doctor());
}

/// The report where `named` has the libraries, and `system` is where the system looks first.
fn reported(named: &Path, system: &Path) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "report", "--ignored", "--nocapture"]);
    command.env("PHALANX_CUDA_LIBRARIES", named).env("LD_LIBRARY_PATH", system).env_remove("PHALANX_CUDA");
    command.env("PHALANX_KERNEL_CACHE", named.join("kernels"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn libraries_are_told_with_their_files_and_versions() {
    let folder = Folder::new("whole");
    let driver = folder.library("libcuda.so", 13_000);
    let nvrtc = folder.library("libnvrtc.so.13", 13_000);
    let products = folder.library("libcublasLt.so.13", 130_100);
    let nccl = folder.library("libnccl.so.2", 22_703);
    let text = reported(&folder.0, &folder.0);
    for line in [
        format!("driver    {}, for CUDA up to 13.0", driver.display()),
        format!("NVRTC     {}, 13.0", nvrtc.display()),
        format!("cuBLASLt  {}, 13.1", products.display()),
        format!("NCCL      {}, 2.27.3", nccl.display()),
        "tensors on a GPU: does not work: the driver finds no GPU".into(),
        "kernels: works".into(),
        "NCCL 2.27.3: it does not put several ranks on one GPU, as 2.30 does".into(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\nnot in\n{text}");
    }
    assert!(text.contains("kernels: 0 programs, 0.0 MiB, writable"), "{text}");
}

#[test]
fn libraries_for_a_newer_cuda_than_the_drivers_are_passed_over() {
    let folder = Folder::new("versions");
    folder.library("libcuda.so", 12_080);
    folder.library("libnvrtc.so.13", 13_000);
    let older = folder.library("libnvrtc.so.12", 12_080);
    let text = reported(&folder.0, &folder.0);
    assert!(text.contains(&format!("NVRTC     {}, 12.8\n", older.display())), "{text}");
    assert!(text.contains("kernels: works\n"), "{text}");
}

#[test]
fn a_damaged_library_is_told_with_the_command_that_brings_it_anew() {
    let folder = Folder::new("damaged");
    folder.library("libcuda.so", 13_000);
    fs::write(folder.0.join("libnvrtc.so.13"), "cut short").unwrap();
    let text = reported(&folder.0, &folder.0);
    let line = text.lines().find(|line| line.starts_with("NVRTC")).unwrap();
    assert!(line.starts_with("NVRTC     damaged: ") && line.contains("libnvrtc.so.13"), "{text}");
    assert!(text.contains("pip install --force-reinstall nvidia-cuda-nvrtc\n"), "{text}");
}

/// The bindings ask for `libcublasLt.so`, which the system may have from elsewhere.
#[test]
fn the_file_that_serves_is_told_where_it_is_not_the_one_that_was_found() {
    let (named, system) = (Folder::new("named"), Folder::new("system"));
    let found = named.library("libcublasLt.so.13", 130_100);
    let given = system.library("libcublasLt.so", 120_804);
    let text = reported(&named.0, &system.0);
    let told = format!("{}, which the system gives in place of {}", given.display(), found.display());
    assert!(text.contains(&format!("cuBLASLt  {told}, 12.8.4\n")), "{text}");
}
