//! Extrema over dimensions.

use phalanx_tensor::{Dim, Error, Result, Tensor};

use crate::dispatch::Kernels;
use crate::real::{for_integer, for_real};
use crate::reduce::cuda::{self, Finish, Precision, Target};
use crate::reduce::{
    By, Combine, Frame, Itself, Kind, Largest, Least, Most, Smallest, each, fold_each, fold_tensor,
};
use crate::source::Source;

/// The largest element over `dims`, which stay with size 1 if `keepdim`; NaN if there is one. Any dtype.
///
/// # Errors
/// If a dimension does not exist or is named twice, or there are no elements to choose from.
pub fn amax<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    largest(&Frame::new("amax", x, dims, keepdim)?)
}

/// The smallest element over `dims`; NaN if there is one. Any dtype.
///
/// # Errors
/// As [`amax`].
pub fn amin<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    smallest(&Frame::new("amin", x, dims, keepdim)?)
}

fn largest(frame: &Frame) -> Result<Tensor> {
    extremum("amax", frame, Largest)
}

fn smallest(frame: &Frame) -> Result<Tensor> {
    extremum("amin", frame, Smallest)
}

/// An extremum of nothing does not exist.
pub(super) fn refuse_empty(op: &'static str, x: &Tensor, n: usize) -> Result<()> {
    if n > 0 {
        return Ok(());
    }
    Err(Error::shape(op, format!("no elements to choose from in shape {:?}", x.shape()), "at least one"))
}

fn extremum<C: Combine>(op: &'static str, frame: &Frame, combine: C) -> Result<Tensor> {
    refuse_empty(op, &frame.view, frame.n)?;
    let (mut out, computes) = frame.output(op, frame.view.dtype())?;
    if computes {
        let extremum: Kernels<Extremum<C>> =
            Kernels { cpu: extremum_on_cpu::<C>, cuda: extremum_on_gpu::<C> };
        extremum.run(out.device(), |extremum| extremum(op, frame, combine, &mut out))?;
    }
    Ok(out)
}

type Extremum<C> = fn(&'static str, &Frame, C, &mut Tensor) -> Result<()>;

fn extremum_on_gpu<C: Combine>(op: &'static str, frame: &Frame, combine: C, out: &mut Tensor) -> Result<()> {
    if out.dtype().is_float() {
        let (term, finish) =
            (Itself { neutral: C::START }, Finish { text: "set(out, o, x[0])", numbers: [0.0; 2] });
        let target = Target::Tensor(out);
        return cuda::fold(op, frame, (combine, term), Precision::Plain, None, target, &finish);
    }
    let kind = if C::START < 0.0 { Kind::Largest } else { Kind::Smallest };
    each(op, frame, kind, out, None)
}

fn extremum_on_cpu<C: Combine>(op: &'static str, frame: &Frame, combine: C, out: &mut Tensor) -> Result<()> {
    let term = Itself { neutral: C::START };
    let frame = &frame.in_any_order()?;
    if out.dtype().is_float() {
        // Which of two zeros comes last, and which of two NaN, does not show.
        let finish = |_: usize, [x]: [f64; 1]| if x.is_nan() { f64::NAN } else { x + 0.0 };
        return for_real!(op, out.dtype(), T => {
            fold_tensor::<T, _, _, 1>(op, frame, (combine, term), &[], out, finish)
        });
    }
    let numel = out.numel();
    for_integer!(op, out.dtype(), T => {
        let source = Source::<T>::open(op, &frame.view, frame.view.shape())?;
        let target = &mut out.write::<T>(op)?[..numel];
        match C::START < 0.0 {
            true => fold_each::<T, T>(frame, &source, &By(Most), target),
            false => fold_each::<T, T>(frame, &source, &By(Least), target),
        }
    })
}
