//! [`recurrence`]: linear recurrences `y[i] = a[i] y[i - 1] + b[i]` along a dimension.

use phalanx_tensor::cuda::{Args, Grid, Program};
use phalanx_tensor::{Dim, Error, Result, Tensor};

use crate::check;
use crate::cuda::{File, PRELUDE};
use crate::dispatch::Kernels;
use crate::ops::cast::Number;
use crate::pointwise::PIECE;
use crate::real::for_real;
use crate::reduce::{VALUE, stored};

const OP: &str = "recurrence";
const FILES: &[File] = &[PRELUDE, VALUE, ("recurrence.cu", include_str!("recurrence.cu"))];

/// `y[i] = a[i] y[i - 1] + b[i]` along `dim`, beginning with `y[0] = b[0]`; if `reversed` from the end,
/// `y[i] = a[i] y[i + 1] + b[i]`. Computed in f64, each result rounded once.
///
/// # Errors
/// If the dtype is no floating-point one, shapes, dtypes or devices differ, or there is no such dimension.
pub fn recurrence(a: &Tensor, b: &Tensor, dim: impl Dim, reversed: bool) -> Result<Tensor> {
    run_along(a, b, dim.resolve(a.rank().max(1), OP)?, reversed)
}

fn run_along(a: &Tensor, b: &Tensor, dim: usize, reversed: bool) -> Result<Tensor> {
    check::float(OP, a)?;
    check::same(OP, &[a, b])?;
    if a.shape() != b.shape() {
        return Err(Error::shape(OP, format!("{:?} and {:?}", a.shape(), b.shape()), "one shape"));
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    let mut out = a.empty_like()?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let n = a.shape().get(dim).copied().unwrap_or(1);
    let lines = Lines { n, inner: a.shape().iter().skip(dim + 1).product(), reversed };
    LINES.run(a.device(), |run| run(&lines, &a, &b, &mut out))?;
    Ok(out)
}

struct Lines {
    n: usize,
    inner: usize,
    reversed: bool,
}

const LINES: Kernels<LinesFn> = Kernels { cpu: Lines::on_cpu, cuda: Lines::launch };

type LinesFn = fn(&Lines, &Tensor, &Tensor, &mut Tensor) -> Result<()>;

impl Lines {
    fn on_cpu(&self, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<()> {
        for_real!(OP, a.dtype(), T => self.run::<T>(a, b, out))
    }

    fn run<T: Number>(&self, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<()> {
        let (inner, slab, numel) = (self.inner, self.n * self.inner, out.numel());
        let (a_read, b_read) = (a.read::<T>(OP)?, b.read::<T>(OP)?);
        let (a, b) = (&a_read[a.offset()..][..numel], &b_read[b.offset()..][..numel]);
        let slabs = PIECE.div_ceil(slab);
        let pool = out.device().pool()?;
        let mut target = out.write::<T>(OP)?;
        pool.for_each_chunk(&mut target[..numel], slabs * slab, |piece, target| {
            let mut last = vec![0.0; inner];
            for (s, to) in target.chunks_mut(slab).enumerate() {
                let start = (piece * slabs + s) * slab;
                let (a, b) = (&a[start..][..slab], &b[start..][..slab]);
                for i in 0..self.n {
                    let row = if self.reversed { self.n - 1 - i } else { i } * inner;
                    for ((last, at), to) in last.iter_mut().zip(row..).zip(&mut to[row..]) {
                        let before = if i == 0 { 0.0 } else { a[at].to_f64() * *last };
                        *last = before + b[at].to_f64();
                        *to = T::from_f64(*last);
                    }
                }
            }
        });
        Ok(())
    }

    fn launch(&self, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<()> {
        const OP: &str = "recurrence";
        let gpu = a.device().gpu()?;
        let defines = [("STORED", stored(a.dtype())), ("VALUE", "f64")];
        let program = Program { name: "recurrence.cu", files: FILES, defines: &defines };
        let lines = a.numel() / self.n;
        let args = Args::new(OP, gpu).write(out)?.read(a)?.read(b)?.value(self.n as u64);
        let args = args.value(u64::from(self.reversed)).value(self.inner as u64).value(lines as u64);
        gpu.kernel(OP, &program, "lines")?.launch(Grid::new(lines.div_ceil(256), 256), args)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::DType;

    use super::recurrence;
    use crate::ops::flip;
    use crate::testing::{FLOATS, assert_close, floats, make, tolerance, values};

    #[test]
    fn equals_the_plain_loop_from_either_end() {
        for dtype in FLOATS {
            for (shape, dim) in [(&[7][..], 0), (&[3, 5, 2], 1), (&[4, 0], 1), (&[9, 3000], 0), (&[], 0)] {
                let (a, b) = (make(shape, dtype, &floats(-1.5, 1.0)), make(shape, dtype, &floats(-1.0, 2.0)));
                let inner: usize = shape.iter().skip(dim + 1).product();
                let n = shape.get(dim).copied().unwrap_or(1);
                let (x, mut want) = (values(&a), values(&b));
                for i in inner..want.len() {
                    if !(i / inner).is_multiple_of(n) {
                        want[i] += x[i] * want[i - inner];
                    }
                }
                let got = values(&recurrence(&a, &b, dim, false).unwrap());
                for (&got, &want) in got.iter().zip(&want) {
                    assert_close(got, want, tolerance(dtype));
                }
                if shape.is_empty() {
                    continue;
                }
                let flipped = |t: &phalanx_tensor::Tensor| flip(t, &[dim]).unwrap();
                let back = flipped(&recurrence(&flipped(&a), &flipped(&b), dim, true).unwrap());
                assert_eq!(values(&back), got);
            }
        }
        assert!(
            recurrence(&make(&[2], DType::F32, &|_| 0.0), &make(&[3], DType::F32, &|_| 0.0), 0, true)
                .is_err()
        );
    }
}
