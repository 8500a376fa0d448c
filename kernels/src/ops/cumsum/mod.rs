//! Running sums, and what else runs along a dimension.

mod cuda;
mod others;
mod sums;

use phalanx_tensor::{DType, Dim, Element, Result, Tensor};

use crate::dispatch::by_device;
use crate::ops::cast::Number;
use crate::pointwise::PIECE;
use crate::real::{for_integer, for_real};

pub use others::{cummax, cummin, cumprod, logcumsumexp};

/// `y[i] = x[0] + .. + x[i]` along `dim`. Floats are summed in f64, each result rounded once; integers and bools in
/// i64. If the elements of a line lie together, runs of 32 of them are added by themselves, and the sum of what comes
/// before a run is added to each of its results.
///
/// # Errors
/// If there is no such dimension.
pub fn cumsum(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    running("cumsum", x, dim.resolve(x.rank().max(1), "cumsum")?, false)
}

/// `y[i] = x[i] + .. + x[n - 1]` along `dim`: [`cumsum`] from the end.
///
/// # Errors
/// As [`cumsum`].
pub fn cumsum_reversed(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    running("cumsum_reversed", x, dim.resolve(x.rank().max(1), "cumsum")?, true)
}

fn running(op: &'static str, x: &Tensor, dim: usize, reversed: bool) -> Result<Tensor> {
    let sums = Merge { text: "a + b", first: "0" };
    scanned(op, x, dim, reversed, sums, |scan, x, out| match x.dtype().is_float() {
        true => for_real!(op, x.dtype(), T => sums::run::<T>(scan, x, out)),
        false => for_integer!(op, x.dtype(), T => {
            scan.run::<T, i64, i64>(x, out, 0, |sum, x| sum.wrapping_add(x.to_i64()), |sum| sum)
        }),
    })
}

/// Makes the output, in `x`'s dtype or in i64 if that is no floating-point one, and hands what has elements to a GPU or to
/// `run`, with `x` contiguous.
fn scanned(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    reversed: bool,
    merge: Merge,
    run: impl FnOnce(&Scan, &Tensor, &mut Tensor) -> Result<()>,
) -> Result<Tensor> {
    let x = x.contiguous()?;
    let dtype = if x.dtype().is_float() { x.dtype() } else { DType::I64 };
    let mut out = Tensor::empty_for(op, x.shape(), dtype, x.device())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let scan = Scan {
        op,
        n: x.shape().get(dim).copied().unwrap_or(1),
        inner: x.shape().iter().skip(dim + 1).product(),
        reversed,
    };
    by_device(&mut out, |out| run(&scan, &x, out), |out| cuda::run(&scan, merge, &x, out))?;
    Ok(out)
}

/// How a GPU puts the numbers `a` and `b` together, `a` being of earlier elements, and what leaves the others as they are.
#[derive(Clone, Copy)]
struct Merge {
    text: &'static str,
    first: &'static str,
}

#[derive(Clone, Copy)]
struct Scan {
    op: &'static str,
    n: usize,
    inner: usize,
    reversed: bool,
}

impl Scan {
    fn run<T: Element, U: Element, A: Copy + Sync>(
        &self,
        x: &Tensor,
        out: &mut Tensor,
        start: A,
        add: impl Fn(A, T) -> A + Sync,
        narrow: impl Fn(A) -> U + Sync,
    ) -> Result<()> {
        let (inner, slab, numel) = (self.inner, self.n * self.inner, out.numel());
        let source = x.read::<T>(self.op)?;
        let source = &source[x.offset()..][..numel];
        let slabs_a_piece = PIECE.div_ceil(slab);
        let mut target = out.write::<U>(self.op)?;
        x.device().pool()?.for_each_chunk(&mut target[..numel], slabs_a_piece * slab, |piece, target| {
            let mut sums = vec![start; inner];
            let source = &source[piece * slabs_a_piece * slab..][..target.len()];
            for (x, to) in source.chunks(slab).zip(target.chunks_mut(slab)) {
                if inner == 1 {
                    let mut sum = start;
                    let mut next = |(&x, to): (&T, &mut U)| {
                        sum = add(sum, x);
                        *to = narrow(sum);
                    };
                    match self.reversed {
                        true => x.iter().zip(to).rev().for_each(&mut next),
                        false => x.iter().zip(to).for_each(&mut next),
                    }
                    continue;
                }
                sums.fill(start);
                for i in 0..self.n {
                    let row = if self.reversed { self.n - 1 - i } else { i } * inner;
                    for ((sum, &x), to) in sums.iter_mut().zip(&x[row..]).zip(&mut to[row..]) {
                        *sum = add(*sum, x);
                        *to = narrow(*sum);
                    }
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{cumsum, cumsum_reversed};
    use crate::testing::{assert_close, floats, tensors, tolerance, values};

    #[test]
    fn equals_plain_running_sums_from_either_end() {
        for x in tensors(&floats(-1.0, 2.0)) {
            for dim in 0..x.rank().max(1) {
                let n = x.shape().get(dim).copied().unwrap_or(1);
                let inner: usize = x.shape().iter().skip(dim + 1).product();
                let mut wanted = values(&x);
                for i in inner..wanted.len() {
                    if !(i / inner).is_multiple_of(n) {
                        wanted[i] += wanted[i - inner];
                    }
                }
                let sums = values(&cumsum(&x, dim).unwrap());
                let back = if x.rank() == 0 {
                    sums.clone()
                } else {
                    let turned = crate::ops::flip(&x, &[dim]).unwrap();
                    values(&crate::ops::flip(&cumsum_reversed(&turned, dim).unwrap(), &[dim]).unwrap())
                };
                for ((&got, &back), want) in sums.iter().zip(&back).zip(wanted) {
                    assert_close(got, want, tolerance(x.dtype()));
                    assert_eq!(got, back);
                }
            }
        }
    }
}
