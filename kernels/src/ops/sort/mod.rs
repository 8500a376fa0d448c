//! [`sort`] and [`topk`] along a dimension.

mod best;
mod keys;
mod lines;

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{DType, Dim, Error, Result, Tensor};

use crate::cuda::{File, PRELUDE};
use crate::dispatch::Kernels;
use crate::reduce::stored;

/// The elements along `dim` in ascending (or descending) order, and where each was, i64. Stable; a NaN counts as
/// larger than any number.
///
/// # Errors
/// If there is no such dimension.
pub fn sort(x: &Tensor, dim: impl Dim, descending: bool) -> Result<(Tensor, Tensor)> {
    let dim = dim.resolve(x.rank().max(1), "sort")?;
    ordered("sort", x, dim, x.shape().get(dim).copied().unwrap_or(1), descending)
}

/// The `k` largest (or smallest) elements along `dim`, best first, and where each was, i64; of equal elements the
/// first ones. A NaN counts as larger than any number.
///
/// # Errors
/// If there is no such dimension, or it has fewer than `k` elements.
pub fn topk(x: &Tensor, k: usize, dim: impl Dim, largest: bool) -> Result<(Tensor, Tensor)> {
    let dim = dim.resolve(x.rank().max(1), "topk")?;
    let size = x.shape().get(dim).copied().unwrap_or(1);
    if k > size {
        return Err(Error::range(
            "topk",
            format!("k = {k}"),
            format!("at most {size}, the size of dimension {dim}"),
        ));
    }
    ordered("topk", x, dim, k, largest)
}

const ARRANGE: Kernels<Arrange> = Kernels { cpu: arrange_on_cpu, cuda: arrange_on_gpu };

type Arrange = fn(&'static str, &Tensor, [usize; 2], bool, [&mut Tensor; 2]) -> Result<()>;

fn arrange_on_cpu(
    op: &'static str,
    lines: &Tensor,
    sizes: [usize; 2],
    descending: bool,
    outputs: [&mut Tensor; 2],
) -> Result<()> {
    let arrange = match lines.dtype().size() {
        1 => lines::arrange::<u8>,
        2 => lines::arrange::<u16>,
        4 => lines::arrange::<u32>,
        _ => lines::arrange::<u64>,
    };
    arrange(op, lines, sizes, descending, outputs)
}

/// The first `k` of each line in order.
fn ordered(op: &'static str, x: &Tensor, dim: usize, k: usize, descending: bool) -> Result<(Tensor, Tensor)> {
    if x.rank() == 0 {
        let (values, indices) = ordered(op, &x.unsqueeze(0)?, 0, k, descending)?;
        return if k == 1 { Ok((values.squeeze(0)?, indices.squeeze(0)?)) } else { Ok((values, indices)) };
    }
    let lines = x.transpose(dim, -1)?.contiguous()?;
    let n = x.shape()[dim];
    let mut shape = lines.shape().to_vec();
    shape[x.rank() - 1] = k;
    let mut values = Tensor::empty_for(op, &shape, x.dtype(), x.device())?;
    let mut indices = Tensor::empty_for(op, &shape, DType::I64, x.device())?;
    if values.numel() > 0 {
        let outputs = [&mut values, &mut indices];
        ARRANGE.run(x.device(), |arrange| arrange(op, &lines, [n, k], descending, outputs))?;
    }
    let back = |t: Tensor| t.transpose(dim, -1)?.contiguous();
    Ok((back(values)?, back(indices)?))
}

const FILES: &[File] = &[PRELUDE, ("sort.cu", include_str!("sort.cu"))];
/// Pairs of a tile at most; half as many threads sort it.
const TILE_MAX: usize = 1024;
/// Bytes of a pair.
const ITEM_BYTES: usize = 16;

/// The first `k` of each line of `n`, which are the last dimension and lie together; there are elements.
fn arrange_on_gpu(
    op: &'static str,
    lines: &Tensor,
    [n, k]: [usize; 2],
    descending: bool,
    [values, indices]: [&mut Tensor; 2],
) -> Result<()> {
    let gpu = lines.device().gpu()?;
    let defines = [("STORED", stored(lines.dtype()))];
    let program = Program { name: "sort.cu", files: FILES, defines: &defines };
    let kernel = |entry| gpu.kernel(op, &program, entry);
    let (count, padded) = (lines.numel() / n, n.next_power_of_two().max(2));
    let tile = padded.min(TILE_MAX);
    let items = gpu.scratch(op, count * padded * ITEM_BYTES)?;
    let tiles = Grid::new(count * (padded / tile), tile as u32 / 2);
    let args = Args::new(op, gpu).scratch(&items).read(lines)?.value([
        n as u64,
        padded as u64,
        u64::from(descending),
    ]);
    kernel("sort_tiles")?.launch(tiles, args)?;
    let pairs = count * padded / 2;
    let mut size = 2 * tile;
    while size <= padded {
        let mut step = size / 2;
        while step >= tile {
            let sizes = [padded, size, step, pairs].map(|x| x as u64);
            let args = Args::new(op, gpu).scratch(&items).value(sizes);
            kernel("exchange")?.launch(Grid::new(pairs.div_ceil(256), 256), args)?;
            step /= 2;
        }
        let args = Args::new(op, gpu).scratch(&items).value([padded as u64, size as u64]);
        kernel("merge_tiles")?.launch(tiles, args)?;
        size *= 2;
    }
    let sizes = [n, padded, k, count * k].map(|x| x as u64);
    let args = Args::new(op, gpu).write(values)?.write(indices)?.scratch(&items).read(lines)?.value(sizes);
    kernel("take")?.launch(Grid::new((count * k).div_ceil(256), 256), args)
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use super::*;
    use crate::testing::{FLOATS, make, values};

    #[test]
    fn sorting_is_stable_in_both_directions_along_any_dimension() {
        for dtype in FLOATS {
            let x = make(&[31, 40], dtype, &|i| (i * 7 % 11) as f64);
            for (dim, descending) in [(0, false), (0, true), (1, false), (-1, true)] {
                let (sorted, at) = sort(&x, dim, descending).unwrap();
                assert_eq!(values(&crate::ops::gather(&x, dim, &at).unwrap()), values(&sorted));
                let lines = |t: &Tensor| values(&t.transpose(dim, -1).unwrap());
                let n = x.size(dim).unwrap();
                for (v, i) in lines(&sorted).chunks(n).zip(lines(&at).chunks(n)) {
                    let rising = |j: usize| if descending { v[j] > v[j + 1] } else { v[j] < v[j + 1] };
                    assert!((0..n - 1).all(|j| rising(j) || (v[j] == v[j + 1] && i[j] < i[j + 1])));
                }
                let (best, best_at) = topk(&x, 5, dim, descending).unwrap();
                assert_eq!(values(&best), values(&sorted.narrow(dim, 0, 5).unwrap()));
                assert_eq!(values(&best_at), values(&at.narrow(dim, 0, 5).unwrap()));
            }
        }
        let x = Tensor::from_slice(&[2.0f32, f32::NAN, -1.0, f32::INFINITY], &[4], Device::CPU).unwrap();
        assert_eq!(sort(&x, 0, false).unwrap().1.to_vec::<i64>().unwrap(), [2, 0, 3, 1]);
        assert_eq!(sort(&x, 0, true).unwrap().1.to_vec::<i64>().unwrap(), [1, 3, 0, 2]);
        assert!(topk(&x, 5, 0, true).is_err());
    }

    /// The order of a line by comparing: stable, NaN above all numbers.
    fn plain_order(line: &[f64], descending: bool) -> Vec<i64> {
        let compare = |a: f64, b: f64| a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
        let mut order: Vec<i64> = (0..line.len() as i64).collect();
        order.sort_by(|&i, &j| {
            let by_value = compare(line[i as usize], line[j as usize]);
            if descending { by_value.reverse() } else { by_value }
        });
        order
    }

    #[test]
    fn every_dtype_size_and_number_of_threads_has_the_order_of_comparing() {
        let device = Device::Cpu(930);
        let odd = |i: usize| match i % 13 {
            0 => f64::NAN,
            1 => -0.0,
            2 => 0.0,
            3 => f64::NEG_INFINITY,
            _ => ((i * 7919) % 257) as f64 - 100.0,
        };
        let whole = |i: usize| ((i * 7919) % 127) as f64;
        let far = |i: usize| ((i * 7919) % 10_007) as f64 * if i.is_multiple_of(2) { 1e5 } else { -1e5 };
        let dtypes =
            [DType::I32, DType::I64, DType::U8].map(|dtype| (dtype, &whole as &dyn Fn(usize) -> f64));
        let floats = FLOATS.map(|dtype| (dtype, &odd as &dyn Fn(usize) -> f64));
        let wide = [DType::F64, DType::I64].map(|dtype| (dtype, &far as &dyn Fn(usize) -> f64));
        for (dtype, fill) in dtypes.into_iter().chain(floats).chain(wide) {
            for shape in [[3, 0], [0, 3], [2, 1], [5, 7], [300, 33], [3, 129], [2, 1500], [1, 40_000]] {
                let n = shape[1];
                let x = make(&shape, dtype, fill);
                let lines: Vec<Vec<f64>> = values(&x).chunks(n.max(1)).map(<[f64]>::to_vec).collect();
                for (threads, descending) in [(1, false), (3, true)] {
                    device.set_threads(threads).unwrap();
                    let x = x.to_device(device, true).unwrap();
                    let picked = |k: usize| -> Vec<i64> {
                        lines.iter().flat_map(|line| plain_order(line, descending)[..k].to_vec()).collect()
                    };
                    let across = x.transpose(0, 1).unwrap().contiguous().unwrap();
                    for (x, dim) in [(&x, 1), (&across.transpose(0, 1).unwrap(), 1), (&across, 0)] {
                        let transposed = |t: Tensor| if dim == 0 { t.transpose(0, 1).unwrap() } else { t };
                        for k in [0, 1, 2, n / 5, n].into_iter().filter(|&k| k <= n) {
                            let (best, at) = topk(x, k, dim, descending).unwrap();
                            let at = transposed(at).contiguous().unwrap();
                            assert_eq!(at.to_vec::<i64>().unwrap(), picked(k), "{dtype} {shape:?} {k}");
                            let bits = |t: &Tensor| t.to_device(Device::CPU, true).unwrap();
                            let x = transposed(x.clone());
                            let wanted = values(&bits(&crate::ops::gather(&x, 1, &at).unwrap()));
                            let got = values(&bits(&transposed(best)));
                            assert!(got.iter().zip(&wanted).all(|(a, b)| a.to_bits() == b.to_bits()));
                        }
                        let sorted = transposed(sort(x, dim, descending).unwrap().1).contiguous().unwrap();
                        assert_eq!(sorted.to_vec::<i64>().unwrap(), picked(n));
                    }
                }
            }
        }
    }
}
