//! The shape of the tree: which crate may know which, what every file must have, and where unsafe code may live.

#[path = "tidy/circles.rs"]
mod circles;

use std::fs;
use std::path::{Path, PathBuf};

/// The crates, each allowed to depend on those before it.
const ORDER: [&str; 8] = ["rendezvous", "cuda", "tensor", "kernels", "autograd", "nn", "parallel", "train"];

/// Where unsafe code may live: storage, the pool, streaming stores, maps of files, SIMD, the matrix product's inner loops, calls of MPI and of
/// the CUDA libraries, the libraries that stand in for those, what a started process does before it is the program, and tests' faults of
/// connections and allocations.
const UNSAFE: [&str; 20] = [
    "cuda/src/",
    "cuda/tests/doctor.rs",
    "tensor/src/storage/",
    "tensor/src/allocator.rs",
    "tensor/src/pool/",
    "tensor/src/streaming.rs",
    "tensor/src/loom_models.rs",
    "tensor/src/io/",
    "kernels/src/simd/",
    "kernels/src/gemm/",
    "parallel/src/comm/wire/mpi.rs",
    "parallel/src/comm/nccl/",
    "tensor/src/cuda/",
    "launcher/src/tied.rs",
    "emulator/driver/",
    "emulator/cublaslt/",
    "emulator/nccl/",
    "emulator/link/",
    "train/tests/trials/links.rs",
    "tests/cuda/allocations.rs",
];

/// Lines that a file may have without a reason.
const LINES_MAX: usize = 500;
/// Files that are longer, with the reason.
const LONG: [(&str, &str); 1] =
    [("kernels/src/simd/", "one instruction set a file, each an instruction table")];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file of the repository, relative to its root.
fn sources() -> Vec<String> {
    let mut found = Vec::new();
    let tops = ORDER.iter().copied().chain(["launcher", "emulator", "src", "examples", "tests", "benches"]);
    let mut waiting: Vec<PathBuf> = tops.map(|top| root().join(top)).collect();
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() && !path.ends_with("target") {
                waiting.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/"));
            }
        }
    }
    assert!(found.len() > 50, "found only {} files under {}", found.len(), root().display());
    found.sort();
    found
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

#[test]
fn crates_depend_in_one_direction() {
    for (i, name) in ORDER.iter().enumerate() {
        let manifest = read(&format!("{name}/Cargo.toml"));
        let later = ORDER[i..].iter().map(|n| format!("phalanx-{n}")).chain(["phalanx".to_string()]);
        for wrong in later {
            let names = |line: &str| line.split(['.', '=', ' ']).next() == Some(wrong.as_str());
            assert!(!manifest.lines().any(names), "{name} must not depend on {wrong}");
        }
    }
}

#[test]
fn every_file_says_what_lives_there() {
    let silent: Vec<_> = sources().into_iter().filter(|path| !read(path).starts_with("//!")).collect();
    assert!(silent.is_empty(), "files that do not begin with //!: {silent:#?}");
}

#[test]
fn unsafe_code_stays_where_it_is_fenced() {
    for path in sources().iter().filter(|p| *p != "tests/tidy.rs" && !UNSAFE.iter().any(|u| p.starts_with(u)))
    {
        for (number, line) in read(path).lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            let found =
                code.contains("unsafe {") || code.contains("unsafe fn") || code.contains("unsafe impl");
            assert!(!found && !code.contains("allow(unsafe_code)"), "{path}:{}: unsafe code", number + 1);
        }
    }
    for name in ["autograd", "nn"] {
        assert!(
            read(&format!("{name}/src/lib.rs")).contains("#![forbid(unsafe_code)]"),
            "{name} must forbid it"
        );
    }
    assert!(read("src/lib.rs").contains("#![forbid(unsafe_code)]"), "the facade must forbid it");
}

/// The bodies of functions marked `#[inline(always)]`, each with the number of its first line.
fn inlined_bodies(text: &str) -> Vec<(usize, String)> {
    let mut bodies = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if line.trim() != "#[inline(always)]" {
            continue;
        }
        let (mut body, mut depth) = (String::new(), 0);
        for (_, line) in lines.by_ref() {
            body += line;
            depth += line.matches('{').count() as isize - line.matches('}').count() as isize;
            if depth <= 0 && (line.contains('}') || line.ends_with(';')) {
                break;
            }
        }
        bodies.push((number + 1, body));
    }
    bodies
}

#[test]
fn kernels_make_arrays_of_vectors_in_their_own_bodies() {
    for path in sources().iter().filter(|path| path.starts_with("kernels/src/")) {
        for (line, body) in inlined_bodies(&read(path)) {
            assert!(!body.contains("array::from_fn"), "{path}:{line}: simd::each in place of array::from_fn");
        }
    }
}

#[test]
fn long_files_have_a_reason() {
    let listed = |path: &str| LONG.iter().any(|(long, _)| path.starts_with(long));
    let long: Vec<_> = sources()
        .into_iter()
        .map(|path| (read(&path).lines().count(), path))
        .filter(|(lines, path)| *lines > LINES_MAX && !listed(path))
        .collect();
    assert!(long.is_empty(), "over {LINES_MAX} lines: {long:#?}");
}

/// Subjects that say nothing: a sentence with one of them leaves the reader to guess who acts.
const VAGUE: [&str; 5] = ["whoever", "nobody", "somebody", "anybody", "everybody"];

#[test]
fn comments_name_who_acts() {
    let vague = |text: &str| {
        text.split(|c: char| !c.is_alphabetic()).any(|word| VAGUE.contains(&word.to_lowercase().as_str()))
    };
    let mut found = Vec::new();
    let pages = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md"];
    for path in sources().into_iter().chain(pages.map(String::from)).filter(|path| path != "tests/tidy.rs") {
        let page = path.ends_with(".md");
        for (number, line) in read(&path).lines().enumerate() {
            let comment = if page { line } else { line.split_once("//").map_or("", |(_, comment)| comment) };
            if vague(comment) {
                found.push(format!("{path}:{}", number + 1));
            }
        }
    }
    assert!(found.is_empty(), "say who acts in place of {VAGUE:?}: {found:#?}");
}

#[test]
fn the_readme_and_ci_name_the_same_test_command() {
    let command = "cargo test --workspace --release";
    assert!(read("README.md").contains(command));
    let ci = read(".ci/run");
    assert!(ci.lines().any(|line| line == format!("step {command}")), "CI must run `{command}`");
}
