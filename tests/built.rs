//! Two promises that the libraries' symbols keep or break.
//!
//! Everything a kernel does with vectors is inlined into it: an intrinsic that is a function of its own is called with its
//! vectors in memory, by code that was compiled without the instruction set. And what does not depend on a type is compiled once, so that a
//! build does not grow by a copy for every operation, model or rank's function.
#![cfg(all(target_os = "linux", target_arch = "x86_64", not(debug_assertions)))]

use std::path::PathBuf;
use std::process::Command;

/// A library that this test was linked with.
fn library(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let found = test.parent().expect("target/PROFILE/deps").read_dir().expect("a folder").flatten();
    let libraries = found.map(|entry| entry.path()).filter(|path| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.starts_with(&format!("libphalanx_{name}-")) && file.ends_with(".rlib")
    });
    let built = |path: &PathBuf| path.metadata().and_then(|m| m.modified()).expect("a file has a time");
    libraries.max_by_key(built).expect("the library lies beside its tests")
}

/// The names of its functions, and the bytes that they take together.
fn functions(name: &str) -> (Vec<String>, usize) {
    let library = library(name);
    let listed = Command::new("nm").arg("-S").arg(&library).output().expect("nm comes with the linker");
    let symbols = String::from_utf8_lossy(&listed.stdout).into_owned();
    let (mut names, mut bytes) = (Vec::new(), 0);
    for line in symbols.lines() {
        // Place, bytes, kind, name.
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [_, size, "t" | "T" | "w" | "W", name] = fields[..] {
            names.push(name.to_string());
            bytes += usize::from_str_radix(size, 16).expect("nm writes sizes in base 16");
        }
    }
    assert!(!names.is_empty(), "{}: no symbols", library.display());
    (names, bytes)
}

#[test]
fn no_intrinsic_is_left_as_a_function() {
    let (functions, _) = functions("kernels");
    assert!(
        functions.iter().any(|name| name.contains("run_avx2")),
        "kernels have no names that say how they are built"
    );
    let left: Vec<&String> = functions.iter().filter(|name| name.contains("core_arch")).collect();
    assert!(left.is_empty(), "{} intrinsics are functions: {left:#?}", left.len());
}

/// Functions and KiB of code, at most. Kernels had 14,950 functions (in 16 parts) before frames were erased, 4,737 after it, 5,705 with kernels
/// for what no GPT does, and about 6,110 since, with what ranks combine, which parallel had, 6,151 since few rows of f32 and f64 are products of
/// their own, and 6,163 with broad tiles; 11,316 KiB since one row of bf16 takes 16 or 24 columns. Nn has 6,153 with adapters of embeddings, and 33 more (parallel 10) since numbers of JSON are read to
/// the last bit; 6,250 with adapters of the weights that transformers joins; 6,304 since folders are read by one function, of which parallel had copies
/// (5,513 functions of 5,111 KiB, then 5,482 of 4,984); 6,327 of 2,151 KiB with weights in panels (kernels 6,171 of 11,432, parallel 5,000). Kernels has 6,186 since bf16 lies in them by pairs, and
/// 6,205 of 11,450 since tiles (AMX) read them, and 6,279 of 11,530 with rows of scores of few queries. Who exceeds a number finds what is compiled again and again by
/// `cargo rustc --release -p phalanx-nn --lib -- --emit=llvm-ir -C no-prepopulate-passes`, a file in which each copy is a `define`.
const MOST: [(&str, usize, usize); 5] = [
    ("kernels", 6_280, 11_540),
    ("autograd", 2_350, 2_050),
    ("nn", 6_340, 2_160),
    ("parallel", 5_495, 5_010),
    ("train", 7_700, 2_400),
];

#[test]
fn a_build_costs_what_it_did() {
    for (name, functions_max, kib_max) in MOST {
        let (functions, bytes) = functions(name);
        let (functions, kib) = (functions.len(), bytes / 1024);
        println!("{name}: {functions} functions, {kib} KiB");
        assert!(
            functions <= functions_max && kib <= kib_max,
            "{name}: {functions} functions of {kib} KiB, wanted at most {functions_max} of {kib_max} KiB"
        );
    }
}
