//! Tensors joined along a dimension, padded, and with dimensions reversed.

use bytemuck::Pod;
use phalanx_tensor::{Device, Dim, Dims, Error, Loops, Read, Result, Scalar, Tensor, resolve_dims};

use super::creation::full_for;
use super::in_place::{copy_, elements};
use crate::check;
use crate::cuda::Strided;
use crate::data_movement::reverse;
use crate::dispatch::Kernels;
use crate::pointwise::PIECE;
use crate::pointwise::cuda::{self, Arrangement, Expression, bits_name};

/// The tensors one after another along `dim`; their other sizes must agree.
///
/// # Errors
/// If there is none, or ranks, other sizes, dtypes or devices differ.
pub fn cat(tensors: &[&Tensor], dim: impl Dim) -> Result<Tensor> {
    let first = tensors.first().ok_or_else(|| Error::invalid(CAT, "got no tensors, wanted at least one"))?;
    cat_along(tensors, first, dim.resolve(first.rank(), CAT)?)
}

const CAT: &str = "cat";

fn cat_along(tensors: &[&Tensor], first: &Tensor, dim: usize) -> Result<Tensor> {
    check::same(CAT, tensors)?;
    let others = |t: &Tensor| -> Dims {
        t.shape().iter().enumerate().map(|(d, &n)| if d == dim { 0 } else { n }).collect()
    };
    if let Some(odd) = tensors.iter().find(|t| t.rank() != first.rank() || others(t) != others(first)) {
        let wanted = format!("the sizes of {:?} but in dimension {dim}", first.shape());
        return Err(Error::shape(CAT, format!("a tensor of shape {:?}", odd.shape()), wanted));
    }
    let mut shape = others(first);
    shape[dim] = tensors.iter().map(|t| t.shape()[dim]).sum();
    let mut out = Tensor::empty_for(CAT, &shape, first.dtype(), first.device())?;
    let mut joined = Vec::new();
    let mut start = 0;
    for tensor in tensors {
        let length = tensor.shape()[dim];
        match tensor.is_contiguous() && matches!(out.device(), Device::Cpu(_)) {
            true => joined.push((start, *tensor)),
            false => copy_(&mut out.narrow(dim, start, length)?, tensor)?,
        }
        start += length;
    }
    if out.numel() == 0 || joined.is_empty() {
        return Ok(out);
    }
    match first.dtype().size() {
        1 => join::<u8>(&joined, dim, &mut out)?,
        2 => join::<u16>(&joined, dim, &mut out)?,
        4 => join::<u32>(&joined, dim, &mut out)?,
        _ => join::<u64>(&joined, dim, &mut out)?,
    }
    Ok(out)
}

/// A part of each row of the result, which has rows of its own one after another.
struct CatPart<'a> {
    start: usize,
    len: usize,
    bytes: Read<'a, u8>,
    offset: usize,
}

/// Copies contiguous tensors, each with where it begins along `dim`, in one pass over the result's rows: all that `dim` and the
/// dimensions behind it hold.
fn join<T: Pod + Send + Sync>(tensors: &[(usize, &Tensor)], dim: usize, out: &mut Tensor) -> Result<()> {
    let inside: usize = out.shape()[dim + 1..].iter().product();
    let (row, numel, pool) = (out.shape()[dim] * inside, out.numel(), out.device().pool()?);
    let mut parts = Vec::with_capacity(tensors.len());
    for &(start, tensor) in tensors.iter().filter(|(_, tensor)| tensor.numel() > 0) {
        let (start, len) = (start * inside, tensor.shape()[dim] * inside);
        parts.push(CatPart { start, len, bytes: tensor.read_bytes(CAT)?, offset: tensor.offset() });
    }
    let mut target = out.write_bytes(CAT)?;
    let target = &mut bytemuck::cast_slice_mut::<u8, T>(&mut target)[..numel];
    if row > 4 * PIECE {
        pool.for_each_chunk(target, 4 * PIECE, |piece, to| join_piece(to, &parts, row, piece * 4 * PIECE));
        return Ok(());
    }
    let rows_a_piece = (PIECE / row).max(1);
    pool.for_each_chunk(target, rows_a_piece * row, |piece, target| {
        for part in &parts {
            let from = &elements::<T>(&part.bytes)[part.offset + piece * rows_a_piece * part.len..];
            join_rows(target, from, row, part);
        }
    });
    Ok(())
}

/// Copies what belongs to a piece of the rows, which begins at element `at`.
fn join_piece<T: Pod>(mut to: &mut [T], parts: &[CatPart<'_>], row: usize, mut at: usize) {
    while !to.is_empty() {
        let (number, column) = (at / row, at % row);
        let next = parts.get(parts.partition_point(|part| part.start + part.len <= column));
        let part = next.filter(|part| part.start <= column);
        let end = part.map(|part| part.start + part.len).or(next.map(|part| part.start)).unwrap_or(row);
        let (here, rest) = to.split_at_mut(to.len().min(end - column));
        if let Some(part) = part {
            let from = part.offset + number * part.len + column - part.start;
            here.copy_from_slice(&elements::<T>(&part.bytes)[from..][..here.len()]);
        }
        (at, to) = (at + here.len(), rest);
    }
}

/// Copies a part of each row.
fn join_rows<T: Pod>(target: &mut [T], from: &[T], row: usize, part: &CatPart<'_>) {
    match part.len {
        1 => join_few::<T, 1>(target, from, row, part.start),
        2 => join_few::<T, 2>(target, from, row, part.start),
        3 => join_few::<T, 3>(target, from, row, part.start),
        4 => join_few::<T, 4>(target, from, row, part.start),
        len => {
            for (to, from) in target.chunks_exact_mut(row).zip(from.chunks_exact(len)) {
                to[part.start..][..len].copy_from_slice(from);
            }
        }
    }
}

/// Copies `N` elements of each row: without a call.
fn join_few<T: Pod, const N: usize>(target: &mut [T], from: &[T], row: usize, start: usize) {
    for (to, from) in target.chunks_exact_mut(row).zip(from.chunks_exact(N)) {
        to[start..][..N].copy_from_slice(from);
    }
}

/// `x` with `before` elements of `value` put before it and `after` behind it along each of the last dimensions:
/// `margins[i]` is `(before, after)` of dimension `rank - 1 - i`. Negative margins crop.
///
/// # Errors
/// If there are more margins than dimensions, they crop more than there is, the result is too large, or an integer dtype
/// cannot hold the value.
pub fn pad(x: &Tensor, margins: &[(isize, isize)], value: Scalar) -> Result<Tensor> {
    const OP: &str = "pad";
    let wrong = || {
        let wanted = "margins of at most as many dimensions, which crop no more than there is";
        Error::shape(OP, format!("{margins:?} for shape {:?}", x.shape()), wanted)
    };
    if margins.len() > x.rank() {
        return Err(wrong());
    }
    let (mut shape, mut inside, mut places) = (Dims::from_slice(x.shape()), x.clone(), Vec::new());
    for (i, &(before, after)) in margins.iter().enumerate() {
        let dim = x.rank() - 1 - i;
        let size = x.shape()[dim];
        let (crop, crop_end) = (before.min(0).unsigned_abs(), after.min(0).unsigned_abs());
        let (margin, margin_end) = (before.max(0).unsigned_abs(), after.max(0).unsigned_abs());
        let length = size.checked_sub(crop.saturating_add(crop_end)).ok_or_else(wrong)?;
        let padded = margin.checked_add(length).and_then(|n| n.checked_add(margin_end));
        shape[dim] = padded.ok_or_else(wrong)?;
        inside = inside.narrow(dim, crop, length)?;
        places.push((dim, margin, length));
    }
    let out = full_for(OP, &shape, value, x.dtype(), x.device())?;
    let place = |t: Tensor, &(dim, start, length): &(usize, usize, usize)| t.narrow(dim, start, length);
    copy_(&mut places.iter().try_fold(out.clone(), place)?, &inside)?;
    Ok(out)
}

/// `x` with the order along each of `dims` reversed.
///
/// # Errors
/// If a dimension does not exist or is named twice.
pub fn flip<D: Dim>(x: &Tensor, dims: &[D]) -> Result<Tensor> {
    flip_over(x, &resolve_dims("flip", dims, x.rank())?)
}

fn flip_over(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let mut out = x.empty_like_for("flip")?;
    if out.numel() > 0 {
        FLIP.run(out.device(), |flip| flip(x, dims, &mut out))?;
    }
    Ok(out)
}

const FLIP: Kernels<Flip> = Kernels { cpu: flip_on_cpu, cuda: flip_on_gpu };

type Flip = fn(&Tensor, &[usize], &mut Tensor) -> Result<()>;

fn flip_on_cpu(x: &Tensor, dims: &[usize], out: &mut Tensor) -> Result<()> {
    match x.dtype().size() {
        1 => flip_elements::<u8>(x, dims, out),
        2 => flip_elements::<u16>(x, dims, out),
        4 => flip_elements::<u32>(x, dims, out),
        _ => flip_elements::<u64>(x, dims, out),
    }
}

/// The strides of the dimensions that keep their order, and of those that are reversed; 0 for the others.
fn flip_strides(x: &Tensor, dims: &[usize]) -> [Vec<usize>; 2] {
    [false, true].map(|flipped| {
        (0..x.rank()).map(|d| if dims.contains(&d) == flipped { x.strides()[d] } else { 0 }).collect()
    })
}

/// As [`flip_elements`]: the differences of strides wrap around, and so do the sums of positions.
fn flip_on_gpu(x: &Tensor, dims: &[usize], out: &mut Tensor) -> Result<()> {
    const OP: &str = "flip";
    let [up, down] = flip_strides(x, dims);
    let mut layout = Strided::of(OP, &Loops::new(x.shape(), [&up, out.strides(), &down]))?;
    layout.subtract(0, 2);
    let last = dims.iter().try_fold(x.clone(), |x, &d| x.narrow(d, x.shape()[d] - 1, 1))?;
    let (bits, same) = (bits_name(x.dtype()), Expression::of_bits("x[0]", x.dtype(), &[]));
    cuda::evaluate_in(OP, &same, Arrangement::singly(layout), [bits; 3], &[&last], out)
}

/// Counts the reversed dimensions from their last element down: element `i` of such a dimension has the source's
/// position of `n - 1 - i`. A stride is then negative, which the two sides' difference from the start expresses.
fn flip_elements<T: bytemuck::Pod + Send + Sync>(x: &Tensor, dims: &[usize], out: &mut Tensor) -> Result<()> {
    const OP: &str = "flip";
    let (shape, pool) = (x.shape(), x.device().pool()?);
    let [up, down] = flip_strides(x, dims);
    let last = x.offset() + down.iter().zip(shape).map(|(stride, n)| stride * (n - 1)).sum::<usize>();
    let loops = Loops::new(shape, [&up, &down]);
    let (inner, [up, down]) = (loops.inner(), loops.inner_strides());
    let source = x.read_bytes(OP)?;
    let source = elements::<T>(&source);
    let numel = out.numel();
    let mut target = out.write_bytes(OP)?;
    let target = &mut bytemuck::cast_slice_mut::<u8, T>(&mut target)[..numel];
    // Pieces begin with rows, unless these are long.
    let size = if inner <= PIECE { PIECE / inner * inner } else { PIECE };
    let rows_follow = inner <= PIECE && matches!(loops.strides(), [[next, 0], [0, 1]] if *next == inner);
    pool.for_each_chunk(target, size, |piece, mut rest| {
        let mut at = piece * size;
        if rows_follow {
            return reverse(&source[x.offset() + at..][..rest.len()], rest, inner);
        }
        while !rest.is_empty() {
            let (run, skip) = (at / inner, at % inner);
            let (to, after) = rest.split_at_mut(rest.len().min(inner - skip));
            let [add, sub] = loops.start(run);
            let first = last + add - sub + skip * up - skip * down;
            match [up, down] {
                [1, 0] => to.copy_from_slice(&source[first..][..to.len()]),
                [0, 1] => reverse(&source[first + 1 - to.len()..=first], to, to.len()),
                _ => to.iter_mut().enumerate().for_each(|(j, to)| *to = source[first + j * up - j * down]),
            }
            (at, rest) = (at + to.len(), after);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Tensor};

    use super::super::cast;
    use super::{cat, flip, pad};
    use crate::testing::{make, tensors, values};

    #[test]
    fn long_rows_are_joined_piece_by_piece() {
        let x = make(&[2, 50_001], phalanx_tensor::DType::I32, &|i| i as f64);
        let part = |start, length| x.narrow(1, start, length).unwrap();
        let parts =
            [part(0, 7).copy(), part(7, 40_000).copy(), Ok(part(40_007, 5000)), part(45_007, 4994).copy()];
        let parts = parts.map(|part| part.unwrap());
        assert_eq!(values(&cat(&parts.each_ref(), 1).unwrap()), values(&x));
    }

    #[test]
    fn parts_of_every_layout_follow_one_another_along_every_dimension() {
        for x in tensors(&|i| i as f64 % 100.0).iter().filter(|x| x.rank() > 0) {
            for dim in 0..x.rank() {
                let size = x.shape()[dim];
                let cuts = [0, size / 3, size / 3, size / 2, size];
                let views = cuts.windows(2).map(|cut| x.narrow(dim, cut[0], cut[1] - cut[0]).unwrap());
                let views: Vec<Tensor> = views.collect();
                let copies: Vec<Tensor> = views.iter().map(|view| view.copy().unwrap()).collect();
                let mixed = [&copies[0], &views[1], &copies[2], &views[3]];
                for parts in [mixed.to_vec(), copies.iter().collect(), views.iter().collect()] {
                    assert_eq!(values(&cat(&parts, dim).unwrap()), values(x));
                }
            }
        }
    }

    #[test]
    fn margins_fill_and_negative_ones_crop() {
        let x = make(&[2, 3], DType::F16, &|i| i as f64);
        let y = pad(&x, &[(1, -1), (0, 1)], 9.into()).unwrap();
        assert_eq!((y.shape(), values(&y)), (&[3, 3][..], vec![9.0, 0.0, 1.0, 9.0, 3.0, 4.0, 9.0, 9.0, 9.0]));
        assert_eq!(pad(&x, &[(-2, -1)], 0.into()).unwrap().shape(), [2, 0]);
        assert_eq!(values(&pad(&x, &[(-3, 2)], 7.into()).unwrap()), [7.0; 4]);
        assert!(pad(&x, &[(-4, 3)], 0.into()).is_err() && pad(&x, &[(3, -4)], 0.into()).is_err());
        assert!(pad(&x, &[(-2, -2)], 0.into()).is_err() && pad(&x, &[(0, 0); 3], 0.into()).is_err());
        assert!(pad(&x, &[(isize::MAX, isize::MAX)], 0.into()).is_err());
        let bytes = crate::ops::cast(&x, DType::U8).unwrap();
        let error = pad(&bytes, &[(1, 1)], 300.into()).unwrap_err().to_string();
        assert_eq!(error, "pad: got the number 300 for a tensor of u8, wanted an integer from 0 to 255");
    }

    #[test]
    fn rows_of_every_size_are_reversed_in_every_piece() {
        for (rows, width) in [(300, 70), (1000, 33), (20_000, 1), (3, 9000)] {
            let x = make(&[rows, width], DType::F32, &|i| (i % 251) as f64);
            for dtype in [DType::U8, DType::F16, DType::F32, DType::I64] {
                let x = cast(&x, dtype).unwrap();
                let wanted: Vec<f64> =
                    values(&x).chunks(width).flat_map(|row| row.iter().rev().copied()).collect();
                assert_eq!(values(&flip(&x, &[1]).unwrap()), wanted, "{dtype} {rows} x {width}");
            }
        }
    }

    #[test]
    fn every_layout_is_reversed_along_every_dimension() {
        for x in tensors(&|i| i as f64 % 200.0) {
            let all = values(&x);
            for set in 0..1usize << x.rank() {
                let dims: Vec<usize> = (0..x.rank()).filter(|d| set >> d & 1 == 1).collect();
                for (at, got) in values(&flip(&x, &dims).unwrap()).into_iter().enumerate() {
                    let (mut rest, mut from, mut step) = (at, 0, 1);
                    for (d, &n) in x.shape().iter().enumerate().rev() {
                        let i = rest % n;
                        from += step * if dims.contains(&d) { n - 1 - i } else { i };
                        (rest, step) = (rest / n, step * n);
                    }
                    assert_eq!(got, all[from]);
                }
            }
        }
    }
}
