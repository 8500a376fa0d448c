//! Running sums of floats, in f64.

use phalanx_tensor::{Result, Tensor};

use super::Scan;
use crate::gemm::with_scratch;
use crate::ops::cast::to_odd;
use crate::pointwise::PIECE;
use crate::real::Real;
use crate::simd::{Float, Isa, Kernel, dispatch};
use crate::source::BLOCK;

/// Elements of a run that is added by itself.
const RUN: usize = 32;
/// Runs that are added side by side.
const RUNS: usize = 8;

/// `x` is contiguous, and `out` new.
pub(super) fn run<T: Real>(scan: &Scan, x: &Tensor, out: &mut Tensor) -> Result<()> {
    let (inner, slab, numel) = (scan.inner, scan.n * scan.inner, out.numel());
    let source = x.read::<T>(scan.op)?;
    let source = &source[x.offset()..][..numel];
    let mut target = out.write::<T>(scan.op)?;
    let piece = PIECE.div_ceil(slab) * slab;
    x.device().pool()?.for_each_chunk(&mut target[..numel], piece, |i, to| {
        let x = &source[i * piece..][..to.len()];
        if inner == 1 {
            // Whole lines, as many as make a block.
            let lines = (BLOCK / slab).max(1) * slab;
            x.chunks(lines).zip(to.chunks_mut(lines)).for_each(|(x, to)| {
                rounded(x, to, |x, to, odd| match odd {
                    true => dispatch(Lines::<_, true> { x, to, n: slab, reversed: scan.reversed }),
                    false => dispatch(Lines::<_, false> { x, to, n: slab, reversed: scan.reversed }),
                });
            });
            return;
        }
        with_scratch(inner, |sums: &mut [f64]| {
            for (x, to) in x.chunks(slab).zip(to.chunks_mut(slab)) {
                sums.fill(0.0);
                for i in 0..scan.n {
                    let row = if scan.reversed { scan.n - 1 - i } else { i } * inner;
                    rounded(&x[row..][..inner], &mut to[row..][..inner], |x, to, odd| match odd {
                        true => dispatch(Row::<_, true> { x, to, sums: &mut *sums }),
                        false => dispatch(Row::<_, false> { x, to, sums: &mut *sums }),
                    });
                }
            }
        });
    });
    Ok(())
}

/// Calls `f` with what is computed with, and whether to round to odd as the results are rounded again.
fn rounded<T: Real>(x: &[T], to: &mut [T], f: impl FnOnce(&[T::Wide], &mut [T::Wide], bool)) {
    if let (Some(x), Some(to)) = (T::as_wide(x), T::as_wide_mut(to)) {
        return f(x, to, false);
    }
    with_scratch(2 * x.len(), |scratch| {
        let (wide, sums) = scratch.split_at_mut(x.len());
        T::widen_all(x, wide);
        f(wide, sums, true);
        T::narrow_all(sums, to);
    });
}

#[inline(always)]
fn narrow<W: Float, const ODD: bool>(x: f64) -> W {
    if ODD { W::from_f64(f64::from(to_odd(x))) } else { W::from_f64(x) }
}

/// Lines of `n` elements each.
struct Lines<'a, W, const ODD: bool> {
    x: &'a [W],
    to: &'a mut [W],
    n: usize,
    reversed: bool,
}

impl<W: Float, const ODD: bool> Kernel for Lines<'_, W, ODD> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for (x, to) in self.x.chunks_exact(self.n).zip(self.to.chunks_exact_mut(self.n)) {
            match self.reversed {
                true => line::<W, ODD, true>(x, to),
                false => line::<W, ODD, false>(x, to),
            }
        }
    }
}

#[inline(always)]
fn line<W: Float, const ODD: bool, const REVERSED: bool>(x: &[W], to: &mut [W]) {
    const TOGETHER: usize = RUN * RUNS;
    // The element that comes at some point of `len` elements.
    let at = |i: usize, len: usize| if REVERSED { len - 1 - i } else { i };
    let (blocks, rest) = (x.len() / TOGETHER, x.len() % TOGETHER);
    let mut before = 0.0;
    for block in 0..blocks {
        let start = if REVERSED { rest } else { 0 } + at(block, blocks) * TOGETHER;
        let (x, to) = (&x[start..][..TOGETHER], &mut to[start..][..TOGETHER]);
        let (mut sums, mut running) = ([0.0; RUNS], [0.0; TOGETHER]);
        for i in 0..RUN {
            for (run, sum) in sums.iter_mut().enumerate() {
                let place = run * RUN + at(i, RUN);
                *sum += x[place].to_f64();
                running[place] = *sum;
            }
        }
        for i in 0..RUNS {
            let run = at(i, RUNS);
            for (to, sum) in to[run * RUN..][..RUN].iter_mut().zip(&running[run * RUN..][..RUN]) {
                *to = narrow::<W, ODD>(before + sum);
            }
            before += sums[run];
        }
    }
    let start = if REVERSED { 0 } else { blocks * TOGETHER };
    for i in 0..rest {
        let place = start + at(i, rest);
        before += x[place].to_f64();
        to[place] = narrow::<W, ODD>(before);
    }
}

/// The next row of as many lines as there are sums.
struct Row<'a, W, const ODD: bool> {
    x: &'a [W],
    to: &'a mut [W],
    sums: &'a mut [f64],
}

impl<W: Float, const ODD: bool> Kernel for Row<'_, W, ODD> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        for ((x, to), sum) in self.x.iter().zip(self.to).zip(self.sums) {
            *sum += x.to_f64();
            *to = narrow::<W, ODD>(*sum);
        }
    }
}
