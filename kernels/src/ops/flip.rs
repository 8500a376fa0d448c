//! Tensors with dimensions reversed.

use phalanx_tensor::{Dim, Loops, Result, Tensor, resolve_dims};

use crate::cuda::Strided;
use crate::dispatch::Kernels;
use crate::moves::reverse;
use crate::ops::copy::elements;
use crate::pointwise::PIECE;
use crate::pointwise::cuda::{self, Arrangement, Expression, bits_name};

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
        1 => copy::<u8>(x, dims, out),
        2 => copy::<u16>(x, dims, out),
        4 => copy::<u32>(x, dims, out),
        _ => copy::<u64>(x, dims, out),
    }
}

/// The strides of the dimensions that keep their order, and of those that are reversed; 0 for the others.
fn strides(x: &Tensor, dims: &[usize]) -> [Vec<usize>; 2] {
    [false, true].map(|flipped| {
        (0..x.rank()).map(|d| if dims.contains(&d) == flipped { x.strides()[d] } else { 0 }).collect()
    })
}

/// As [`copy`]: the differences of strides wrap around, and so do the sums of positions.
fn flip_on_gpu(x: &Tensor, dims: &[usize], out: &mut Tensor) -> Result<()> {
    const OP: &str = "flip";
    let [up, down] = strides(x, dims);
    let mut layout = Strided::of(OP, &Loops::new(x.shape(), [&up, out.strides(), &down]))?;
    layout.subtract(0, 2);
    let last = dims.iter().try_fold(x.clone(), |x, &d| x.narrow(d, x.shape()[d] - 1, 1))?;
    let (bits, same) = (bits_name(x.dtype()), Expression::of_bits("x[0]", x.dtype(), &[]));
    cuda::evaluate_in(OP, &same, Arrangement::singly(layout), [bits; 3], &[&last], out)
}

/// Counts the reversed dimensions from their last element down: element `i` of such a dimension has the source's
/// position of `n - 1 - i`. A stride is then negative, which the two sides' difference from the start expresses.
fn copy<T: bytemuck::Pod + Send + Sync>(x: &Tensor, dims: &[usize], out: &mut Tensor) -> Result<()> {
    const OP: &str = "flip";
    let (shape, pool) = (x.shape(), x.device().pool()?);
    let [up, down] = strides(x, dims);
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
    use phalanx_tensor::DType;

    use super::flip;
    use crate::ops::cast;
    use crate::testing::{make, tensors, values};

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
