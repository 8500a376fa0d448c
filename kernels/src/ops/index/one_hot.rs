//! Indices as unit vectors.

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{DType, Dims, Result, Tensor};

use super::{check_range, indices};
use crate::cuda::{FAULT, File, PRELUDE};
use crate::dispatch::Kernels;

/// `[index's shape, classes]` of i64: 1 where the last dimension's place is the index, else 0.
///
/// # Errors
/// If the indices are not i64 or i32, or one is out of range.
pub fn one_hot(index: &Tensor, classes: usize) -> Result<Tensor> {
    let shape: Dims = index.shape().iter().chain([&classes]).copied().collect();
    let index = indices(OP, index, index)?;
    let mut out = Tensor::zeros_for(OP, &shape, DType::I64, index.device())?;
    SET.run(out.device(), |set| set(&mut out, &index, classes))?;
    Ok(out)
}

const SET: Kernels<Set> = Kernels { cpu: set_on_cpu, cuda: set_on_gpu };

type Set = fn(&mut Tensor, &Tensor, usize) -> Result<()>;

fn set_on_cpu(out: &mut Tensor, index: &Tensor, classes: usize) -> Result<()> {
    let read = index.read::<i64>(OP)?;
    let at = &read[index.offset()..][..index.numel()];
    check_range(OP, at, classes)?;
    let mut target = out.write::<i64>(OP)?;
    at.iter().enumerate().for_each(|(row, &at)| target[row * classes + at as usize] = 1);
    Ok(())
}

const OP: &str = "one_hot";

fn set_on_gpu(out: &mut Tensor, index: &Tensor, classes: usize) -> Result<()> {
    const FILES: &[File] = &[PRELUDE, FAULT, ("one_hot.cu", include_str!("one_hot.cu"))];
    let (gpu, rows) = (out.device().gpu()?, index.numel());
    let program = Program { name: "one_hot.cu", files: FILES, defines: &[] };
    let args =
        Args::new(OP, gpu).write(out)?.read(index)?.value(rows as u64).value(classes as u64).faults()?;
    gpu.kernel(OP, &program, "one_hot")?.launch(Grid::over(gpu, rows, 256), args)
}
