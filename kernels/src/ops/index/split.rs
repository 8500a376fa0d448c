//! Indices into a table that is cut by its rows.

use std::ops::Range;

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{DType, Error, Result, Tensor};

use super::indices;
use crate::cuda::{FAULT, File, PRELUDE};
use crate::dispatch::Kernels;

const OP: &str = "rows cut over ranks";

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
    let index = indices(OP, index, index)?;
    let mut here = Tensor::empty_for(OP, index.shape(), DType::I64, index.device())?;
    let mut elsewhere = Tensor::empty_for(OP, index.shape(), DType::Bool, index.device())?;
    let outputs = [&mut here, &mut elsewhere];
    SPLIT.run(index.device(), |split| split(outputs, &index, own, count, ignored))?;
    Ok((here, elsewhere))
}

const SPLIT: Kernels<Split> = Kernels { cpu: split_on_cpu, cuda: launch };

type Split = fn([&mut Tensor; 2], &Tensor, Range<usize>, usize, Option<i64>) -> Result<()>;

fn split_on_cpu(
    [here, elsewhere]: [&mut Tensor; 2],
    index: &Tensor,
    own: Range<usize>,
    count: usize,
    ignored: Option<i64>,
) -> Result<()> {
    let read = index.read::<i64>(OP)?;
    let all = &read[index.offset()..][..index.numel()];
    let row = |index: i64| usize::try_from(index).ok().filter(|&row| row < count);
    if let Some(item) = all.iter().position(|&index| Some(index) != ignored && row(index).is_none()) {
        let got = format!("index {} (item {item})", all[item]);
        return Err(Error::range(OP, got, format!("an index below {count}")));
    }
    let place = |index: i64| row(index).filter(|row| Some(index) != ignored && own.contains(row));
    let mut to = here.write::<i64>(OP)?;
    to.iter_mut().zip(all).for_each(|(to, &i)| *to = place(i).map_or(0, |row| (row - own.start) as i64));
    let mut to = elsewhere.write_bytes(OP)?;
    to.iter_mut().zip(all).for_each(|(to, &index)| *to = u8::from(place(index).is_none()));
    Ok(())
}

fn launch(
    [here, elsewhere]: [&mut Tensor; 2],
    index: &Tensor,
    own: Range<usize>,
    count: usize,
    ignored: Option<i64>,
) -> Result<()> {
    const FILES: &[File] = &[PRELUDE, FAULT, ("split.cu", include_str!("split.cu"))];
    let program = Program { name: "split.cu", files: FILES, defines: &[] };
    let (gpu, n) = (index.device().gpu()?, index.numel());
    let args = Args::new(OP, gpu).write(here)?.write(elsewhere)?.read(index)?.value(n as u64);
    let args = args.value(own.start as u64).value(own.len() as u64).value(count as u64);
    // Where nothing is ignored, an index that would be refused anyway.
    let args = args.value(ignored.unwrap_or(-1)).value(u64::from(ignored.is_some())).faults()?;
    gpu.kernel(OP, &program, "split")?.launch(Grid::over(gpu, n, 256), args)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Device;

    use super::*;

    #[test]
    fn indices_are_those_of_the_own_rows_and_unknown_ones_are_refused() {
        let indices = |values: &[i64]| Tensor::from_slice(values, &[values.len()], Device::CPU).unwrap();
        let every = indices(&[0, 7, 4, 7, 6, 7, 9, 7, -100, 7]);
        let strided = every.slice(0, 0, 10, 2).unwrap();
        let (here, elsewhere) = split_indices(&strided, 4..7, 10, Some(-100)).unwrap();
        assert_eq!(here.to_vec::<i64>().unwrap(), [0, 0, 2, 0, 0]);
        assert_eq!(elsewhere.to_vec::<bool>().unwrap(), [true, false, false, true, true]);
        assert_eq!(split_indices(&indices(&[]), 0..1, 1, None).unwrap().0.numel(), 0);
        for wrong in [10, -1, -100] {
            let error = split_indices(&indices(&[3, wrong]), 0..4, 10, None).unwrap_err().to_string();
            assert!(
                error.contains(&format!("index {wrong} (item 1) is out of range, wanted an index below 10")),
                "{error}"
            );
        }
    }
}
