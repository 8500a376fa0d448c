//! The search for NaN.

use phalanx_tensor::cuda::{Args, Grid, Program, Scratch};
use phalanx_tensor::{DType, Result, Tensor};

use crate::cuda::{PRELUDE, type_name};
use crate::dispatch::Kernels;
use crate::real::{Real, for_real};
use crate::source::{BLOCK, Source};

/// Whether an element is NaN.
///
/// # Errors
/// If the dtype is no floating-point one, or the device has no elements.
pub fn any_nan(x: &Tensor) -> Result<bool> {
    SEARCH.on(x.device())(x)
}

const SEARCH: Kernels<Search> = Kernels { cpu: search_on_cpu, cuda: search_on_gpu };

type Search = fn(&Tensor) -> Result<bool>;

fn search_on_cpu(x: &Tensor) -> Result<bool> {
    for_real!(OP, x.dtype(), T => search::<T>(x))
}

const OP: &str = "any_nan";

/// Waits for the answer.
fn search_on_gpu(x: &Tensor) -> Result<bool> {
    crate::check::float(OP, x)?;
    let gpu = x.device().gpu()?;
    let gathered = if x.is_contiguous() { None } else { Some(Scratch::of(OP, x)?) };
    let defines = [("ELEM", type_name(x.dtype()))];
    let files = &[PRELUDE, ("any_nan.cu", include_str!("any_nan.cu"))];
    let program = Program { name: "any_nan.cu", files, defines: &defines };
    let mut found = Tensor::zeros_for(OP, &[1], DType::U8, x.device())?;
    let args = Args::new(OP, gpu).write(&mut found)?;
    let args = match &gathered {
        Some(gathered) => args.scratch(gathered),
        None => args.read(x)?,
    };
    let args = args.value(x.numel() as u64);
    let grid = Grid::over(gpu, x.numel() * x.dtype().size() / 16 + 1, 256);
    gpu.kernel(OP, &program, "any_nan")?.launch(grid, args)?;
    Ok(found.to_vec::<u8>()? != [0])
}

fn search<T: Real>(x: &Tensor) -> Result<bool> {
    let source = Source::<T>::open(OP, x, x.shape())?;
    let mut scratch = [T::zeroed(); BLOCK];
    let is_nan = |x: &T| x.partial_cmp(x).is_none();
    let starts = (0..x.numel()).step_by(BLOCK);
    Ok(starts
        .into_iter()
        .any(|start| source.block(start, BLOCK.min(x.numel() - start), &mut scratch).iter().any(is_nan)))
}
