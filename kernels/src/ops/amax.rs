//! Extrema over dimensions.

use phalanx_tensor::{Dim, Error, Result, Tensor};

use crate::ops::cast::Number;
use crate::real::{for_element, for_real};
use crate::reduce::cuda::{self, Finish, Precision, Target};
use crate::reduce::{Combine, Frame, Itself, Kind, Largest, Smallest, each, fold_each, fold_tensor};

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
    extremum("amax", frame, Largest, (i64::MIN, i64::max))
}

fn smallest(frame: &Frame) -> Result<Tensor> {
    extremum("amin", frame, Smallest, (i64::MAX, i64::min))
}

/// An extremum of nothing does not exist.
pub(super) fn refuse_empty(op: &'static str, x: &Tensor, n: usize) -> Result<()> {
    if n > 0 {
        return Ok(());
    }
    Err(Error::shape(op, format!("no elements to choose from in shape {:?}", x.shape()), "at least one"))
}

fn extremum<C: Combine>(
    op: &'static str,
    frame: &Frame,
    combine: C,
    (start, better): (i64, fn(i64, i64) -> i64),
) -> Result<Tensor> {
    refuse_empty(op, &frame.view, frame.n)?;
    let (mut out, computes) = frame.output(op, frame.view.dtype())?;
    if !computes {
        return Ok(out);
    }
    if out.dtype().is_float() {
        let term = Itself { neutral: C::START };
        if out.device().is_cuda() {
            let finish = Finish { text: "set(out, o, x[0])", numbers: [0.0; 2] };
            let target = Target::Tensor(&mut out);
            cuda::fold(op, frame, (combine, term), Precision::Plain, None, target, &finish)?;
            return Ok(out);
        }
        for_real!(op, out.dtype(), T => {
            fold_tensor::<T, _, _, 1>(op, frame, (combine, term), &[], &mut out, |_, [x]| x)
        })?;
        return Ok(out);
    }
    if out.device().is_cuda() {
        let kind = if C::START < 0.0 { Kind::Largest } else { Kind::Smallest };
        each(op, frame, kind, &mut out, None)?;
        return Ok(out);
    }
    let mut best = vec![start; out.numel()];
    for_element!(out.dtype(), T => {
        fold_each::<T, i64>(op, frame, start, &mut best, |best, _, x| *best = better(*best, x.to_i64()))?;
        let mut target = out.write::<T>(op)?;
        target.iter_mut().zip(best).for_each(|(to, x)| *to = <T as Number>::from_i64(x));
    });
    Ok(out)
}
