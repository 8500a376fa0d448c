//! Rows and elements picked by index, and the reverse, adding to them.

mod add;
mod cuda;
mod select;
mod summand;

use std::ops::Range;

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{DType, Dims, Error, Result, Tensor};

use super::cast::cast;
use crate::check;
use crate::cuda::{FAULT, File, PRELUDE};
use crate::dispatch::Kernels;

pub use add::{gather_backward, index_add, index_select_backward, scatter_add};
pub use select::{embedding, embedding_backward, embedding_backward_accumulate_, gather, index_select};

pub(super) use cuda::add_to_planes;

/// The indices as contiguous i64, on the device of what they pick from.
fn indices(op: &'static str, index: &Tensor, from: &Tensor) -> Result<Tensor> {
    check::same_device(op, &[from, index])?;
    if !matches!(index.dtype(), DType::I64 | DType::I32) {
        return Err(Error::dtype(op, index.dtype(), "i64 or i32 for the indices"));
    }
    cast(index, DType::I64)?.contiguous()
}

/// The indices as numbers, all of them below `size`.
pub(super) fn indices_below(
    op: &'static str,
    index: &Tensor,
    from: &Tensor,
    size: usize,
) -> Result<Vec<usize>> {
    let at = indices(op, index, from)?.to_vec::<i64>()?;
    check_range(op, &at, size)?;
    Ok(at.into_iter().map(|at| at as usize).collect())
}

/// Whether all indices are in `0..size`.
fn all_in_range(indices: &[i64], size: usize) -> bool {
    let last = size as i64 - 1;
    indices.iter().fold(0, |signs, &i| signs | i | last.wrapping_sub(i)) >= 0
}

/// The error of the first index outside `0..size`, if any.
fn check_range(op: &'static str, indices: &[i64], size: usize) -> Result<()> {
    if all_in_range(indices, size) {
        return Ok(());
    }
    match indices.iter().position(|&i| i < 0 || i as u64 >= size as u64) {
        Some(item) => {
            let got = format!("index {} (item {item})", indices[item]);
            Err(Error::range(op, got, format!("an index below {size}")))
        }
        None => Ok(()),
    }
}

/// `[index's shape, classes]` of i64: 1 where the last dimension's place is the index, else 0.
///
/// # Errors
/// If the indices are not i64 or i32, or one is out of range.
pub fn one_hot(index: &Tensor, classes: usize) -> Result<Tensor> {
    let shape: Dims = index.shape().iter().chain([&classes]).copied().collect();
    let index = indices(ONE_HOT, index, index)?;
    let mut out = Tensor::zeros_for(ONE_HOT, &shape, DType::I64, index.device())?;
    SET.run(out.device(), |set| set(&mut out, &index, classes))?;
    Ok(out)
}

const SET: Kernels<Set> = Kernels { cpu: set_on_cpu, cuda: set_on_gpu };

type Set = fn(&mut Tensor, &Tensor, usize) -> Result<()>;

fn set_on_cpu(out: &mut Tensor, index: &Tensor, classes: usize) -> Result<()> {
    let read = index.read::<i64>(ONE_HOT)?;
    let at = &read[index.offset()..][..index.numel()];
    check_range(ONE_HOT, at, classes)?;
    let mut target = out.write::<i64>(ONE_HOT)?;
    at.iter().enumerate().for_each(|(row, &at)| target[row * classes + at as usize] = 1);
    Ok(())
}

const ONE_HOT: &str = "one_hot";

fn set_on_gpu(out: &mut Tensor, index: &Tensor, classes: usize) -> Result<()> {
    const FILES: &[File] = &[PRELUDE, FAULT, ("one_hot.cu", include_str!("one_hot.cu"))];
    let (gpu, rows) = (out.device().gpu()?, index.numel());
    let program = Program { name: "one_hot.cu", files: FILES, defines: &[] };
    let args =
        Args::new(ONE_HOT, gpu).write(out)?.read(index)?.value(rows as u64).value(classes as u64).faults()?;
    gpu.kernel(ONE_HOT, &program, "one_hot")?.launch(Grid::over(gpu, rows, 256), args)
}

const SPLIT_INDICES: &str = "rows cut over ranks";

/// Indices of rows of a table of `count`, as those of its rows in `own`, and whether each row is elsewhere (the index is 0
/// then): i64 and bool, of the shape of `index`. An `ignored` index is elsewhere wherever the table is cut.
///
/// # Errors
/// If the indices are not i64 or i32, or another is not below `count`.
pub fn split_indices(
    index: &Tensor,
    own: Range<usize>,
    count: usize,
    ignored: Option<i64>,
) -> Result<(Tensor, Tensor)> {
    let index = indices(SPLIT_INDICES, index, index)?;
    let mut here = Tensor::empty_for(SPLIT_INDICES, index.shape(), DType::I64, index.device())?;
    let mut elsewhere = Tensor::empty_for(SPLIT_INDICES, index.shape(), DType::Bool, index.device())?;
    let outputs = [&mut here, &mut elsewhere];
    SPLIT.run(index.device(), |split| split(outputs, &index, own, count, ignored))?;
    Ok((here, elsewhere))
}

const SPLIT: Kernels<Split> = Kernels { cpu: split_on_cpu, cuda: split_on_gpu };

type Split = fn([&mut Tensor; 2], &Tensor, Range<usize>, usize, Option<i64>) -> Result<()>;

fn split_on_cpu(
    [here, elsewhere]: [&mut Tensor; 2],
    index: &Tensor,
    own: Range<usize>,
    count: usize,
    ignored: Option<i64>,
) -> Result<()> {
    let read = index.read::<i64>(SPLIT_INDICES)?;
    let all = &read[index.offset()..][..index.numel()];
    let row = |index: i64| usize::try_from(index).ok().filter(|&row| row < count);
    if let Some(item) = all.iter().position(|&index| Some(index) != ignored && row(index).is_none()) {
        let got = format!("index {} (item {item})", all[item]);
        return Err(Error::range(SPLIT_INDICES, got, format!("an index below {count}")));
    }
    let place = |index: i64| row(index).filter(|row| Some(index) != ignored && own.contains(row));
    let mut to = here.write::<i64>(SPLIT_INDICES)?;
    to.iter_mut().zip(all).for_each(|(to, &i)| *to = place(i).map_or(0, |row| (row - own.start) as i64));
    let mut to = elsewhere.write_bytes(SPLIT_INDICES)?;
    to.iter_mut().zip(all).for_each(|(to, &index)| *to = u8::from(place(index).is_none()));
    Ok(())
}

fn split_on_gpu(
    [here, elsewhere]: [&mut Tensor; 2],
    index: &Tensor,
    own: Range<usize>,
    count: usize,
    ignored: Option<i64>,
) -> Result<()> {
    const FILES: &[File] = &[PRELUDE, FAULT, ("split.cu", include_str!("split.cu"))];
    let program = Program { name: "split.cu", files: FILES, defines: &[] };
    let (gpu, n) = (index.device().gpu()?, index.numel());
    let args = Args::new(SPLIT_INDICES, gpu).write(here)?.write(elsewhere)?.read(index)?.value(n as u64);
    let args = args.value(own.start as u64).value(own.len() as u64).value(count as u64);
    // Where nothing is ignored, an index that would be refused anyway.
    let args = args.value(ignored.unwrap_or(-1)).value(u64::from(ignored.is_some())).faults()?;
    gpu.kernel(SPLIT_INDICES, &program, "split")?.launch(Grid::over(gpu, n, 256), args)
}

#[cfg(test)]
mod tests;
