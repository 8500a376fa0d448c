//! Which of cuBLASLt's algorithms a process uses: the heuristic's first, or the one that a file of the kernel cache names. The setting is
//! read once, so each run is a process of its own, this program with [`CHILD`] set.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use phalanx_tensor::cuda::{Epilogue, Matrices, Products, multiply};
use phalanx_tensor::{DType, Device, Error, Tensor};

/// Set in a process that is to multiply and print the results.
pub const CHILD: &str = "PHALANX_TEST_PRODUCTS";
const SETTING: &str = "PHALANX_CUDA_ALGORITHMS";

/// m, n and k.
const SIZES: [[usize; 3]; 4] = [[8, 16, 301], [16, 8, 300], [32, 8, 77], [3, 5, 64]];

/// Prints the results' elements.
pub fn child() -> ExitCode {
    for size in SIZES {
        match product(size) {
            Ok(c) => println!("{size:?}: {c:?}"),
            Err(error) => {
                println!("{error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// A product whose bits show the order of its additions.
fn product([m, n, k]: [usize; 3]) -> Result<Vec<f32>, Error> {
    let matrix = |rows: usize, cols: usize, step: f32| {
        let values: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * step).sin()).collect();
        Tensor::from_slice(&values, &[rows, cols], Device::Cuda(0))
    };
    let (a, b) = (matrix(m, k, 0.7)?, matrix(k, n, 0.3)?);
    let mut c = Tensor::empty(&[m, n], DType::F32, Device::Cuda(0))?;
    let products = Products {
        count: 1,
        size: [m, n, k],
        a: Matrices { tensor: &a, start: 0, strides: [0, k, 1] },
        b: Matrices { tensor: &b, start: 0, strides: [0, n, 1] },
        c: (&mut c, 0, [0, n]),
        accumulate: false,
        bias: None,
        epilogue: Epilogue::Plain,
    };
    if !multiply("test", products)? {
        return Err(Error::invalid("test", "cuBLASLt does not multiply"));
    }
    c.to_vec()
}

/// Starts a process with a setting and a cache.
fn start(setting: &str, folder: &Path) -> std::io::Result<Child> {
    let mut program = Command::new(std::env::current_exe()?);
    program.env(CHILD, "1").env(SETTING, setting).env("PHALANX_KERNEL_CACHE", folder);
    program.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
}

fn printed(child: std::io::Result<Child>) -> std::io::Result<String> {
    Ok(String::from_utf8_lossy(&child?.wait_with_output()?.stdout).into_owned())
}

fn files(folder: &Path) -> std::io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    let mut paths: Vec<_> =
        paths.into_iter().filter(|p| p.extension().is_some_and(|e| e == "algorithm")).collect();
    paths.sort();
    paths.into_iter().map(|path| Ok((path.clone(), std::fs::read(path)?))).collect()
}

/// Processes that time the same products at once have the bits of one file; so have later ones, while it is whole and of that product.
pub fn one_choice_for_all_processes() -> Result<(), Error> {
    let folder = std::env::temp_dir().join(format!("phalanx-algorithms-{}", std::process::id()));
    let outcome = choices(&folder).unwrap_or_else(|error| Err(error.to_string()));
    let _ = std::fs::remove_dir_all(&folder);
    outcome.map_err(|why| Error::invalid("test", why))
}

fn choices(folder: &Path) -> std::io::Result<Result<(), String>> {
    let run = |setting: &str| printed(start(setting, folder));
    let first = run("first")?;
    if first.lines().count() != SIZES.len() || run("kept")? != first || !files(folder)?.is_empty() {
        return Ok(Err(format!("by the heuristic's first algorithm: {first}")));
    }
    let together: Vec<_> = (0..3).map(|_| start("timed", folder)).collect();
    let timed = together.into_iter().map(printed).collect::<std::io::Result<Vec<_>>>()?;
    let kept = files(folder)?;
    if timed.iter().any(|other| *other != timed[0]) || kept.len() != SIZES.len() {
        return Ok(Err(format!("{} files, timed at once: {timed:?}", kept.len())));
    }
    let others = std::iter::zip(first.lines(), timed[0].lines()).filter(|(a, b)| a != b).count();
    println!(
        "cuda: {others} of {} products are by another algorithm than the heuristic's first",
        SIZES.len()
    );
    for setting in ["kept", "timed"] {
        let later = run(setting)?;
        if later != timed[0] || files(folder)? != kept {
            return Ok(Err(format!("{setting} later: {later}, wanted {}", timed[0])));
        }
    }
    // Damaged files, and files of other products.
    for foreign in [false, true] {
        for (i, (path, content)) in kept.iter().enumerate() {
            let mut content = if foreign { kept[(i + 1) % kept.len()].1.clone() } else { content.clone() };
            let last = content.len() - 1;
            content[last] ^= u8::from(!foreign);
            std::fs::write(path, content)?;
        }
        let damaged = files(folder)?;
        for setting in ["kept", "timed"] {
            let ignored = run(setting)?;
            if ignored != first || files(folder)? != damaged {
                return Ok(Err(format!("{setting}, foreign {foreign}: {ignored}, wanted {first}")));
            }
        }
    }
    let refused = run("fast")?;
    Ok(
        match refused.contains("PHALANX_CUDA_ALGORITHMS is `fast`, wanted `first`, `kept`, `timed` or `own`")
        {
            true => Ok(()),
            false => Err(format!("an unknown setting: {refused}")),
        },
    )
}
