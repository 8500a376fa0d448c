//! Tensors joined along a dimension.

use bytemuck::Pod;
use phalanx_tensor::{Device, Dim, Dims, Error, Read, Result, Tensor};

use crate::check;
use crate::ops::copy::{copy_, elements};
use crate::pointwise::PIECE;

/// The tensors one after another along `dim`; their other sizes must agree.
///
/// # Errors
/// If there is none, or ranks, other sizes, dtypes or devices differ.
pub fn cat(tensors: &[&Tensor], dim: impl Dim) -> Result<Tensor> {
    let first = tensors.first().ok_or_else(|| Error::invalid(OP, "got no tensors, wanted at least one"))?;
    cat_along(tensors, first, dim.resolve(first.rank(), OP)?)
}

const OP: &str = "cat";

fn cat_along(tensors: &[&Tensor], first: &Tensor, dim: usize) -> Result<Tensor> {
    check::same(OP, tensors)?;
    let others = |t: &Tensor| -> Dims {
        t.shape().iter().enumerate().map(|(d, &n)| if d == dim { 0 } else { n }).collect()
    };
    if let Some(odd) = tensors.iter().find(|t| t.rank() != first.rank() || others(t) != others(first)) {
        let wanted = format!("the sizes of {:?} but in dimension {dim}", first.shape());
        return Err(Error::shape(OP, format!("a tensor of shape {:?}", odd.shape()), wanted));
    }
    let mut shape = others(first);
    shape[dim] = tensors.iter().map(|t| t.shape()[dim]).sum();
    let mut out = Tensor::empty_for(OP, &shape, first.dtype(), first.device())?;
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
struct Part<'a> {
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
        parts.push(Part { start, len, bytes: tensor.read_bytes(OP)?, offset: tensor.offset() });
    }
    let mut target = out.write_bytes(OP)?;
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
fn join_piece<T: Pod>(mut to: &mut [T], parts: &[Part<'_>], row: usize, mut at: usize) {
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
fn join_rows<T: Pod>(target: &mut [T], from: &[T], row: usize, part: &Part<'_>) {
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

#[cfg(test)]
mod tests {
    use phalanx_tensor::Tensor;

    use super::cat;
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
}
