//! Two promises that the library's symbols keep or break.
//!
//! Everything a kernel does with vectors is inlined into it: an intrinsic that is a function of its own is called with its
//! vectors in memory, by code that was compiled without the instruction set. And frames are compiled once, so that a build
//! does not grow by a frame for every operation.
#![cfg(all(target_os = "linux", target_arch = "x86_64", not(debug_assertions)))]

use std::path::PathBuf;
use std::process::Command;

/// The library that this test was linked with.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let found = test.parent().expect("target/PROFILE/deps").read_dir().expect("a folder").flatten();
    let libraries = found.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libphalanx_kernels-") && name.ends_with(".rlib")
    });
    let built = |path: &PathBuf| path.metadata().and_then(|m| m.modified()).expect("a file has a time");
    libraries.max_by_key(built).expect("the library lies beside its tests")
}

/// Its functions, as `nm` names them.
fn functions() -> Vec<String> {
    let library = library();
    let listed = Command::new("nm").arg(&library).output().expect("nm comes with the linker");
    let symbols = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(symbols.contains("run_avx2"), "{}: no symbols", library.display());
    let function = |line: &&str| [" t ", " T ", " w ", " W "].iter().any(|kind| line.contains(kind));
    symbols.lines().filter(function).map(str::to_string).collect()
}

#[test]
fn no_intrinsic_is_left_as_a_function() {
    let functions = functions();
    let left: Vec<&String> = functions.iter().filter(|line| line.contains("core_arch")).collect();
    assert!(left.is_empty(), "{} intrinsics are functions: {left:#?}", left.len());
}

/// There were 14,950 (in 16 parts) before frames were erased, 4,737 after it, 5,705 with kernels for what no GPT does, in the same
/// processor seconds, 6,054 since halves are widened in registers and columns are
/// reduced as they lie, 6,084 when rows are read where they lie, and 6,052 without two ways to pack a weight.
#[test]
fn a_build_costs_what_it_did() {
    const FUNCTIONS_MAX: usize = 6_100;
    let functions = functions().len();
    assert!(functions <= FUNCTIONS_MAX, "{functions} functions, {FUNCTIONS_MAX} at most");
}
