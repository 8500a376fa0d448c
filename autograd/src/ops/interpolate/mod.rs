//! Signals, images and volumes resized, `[n, channels, ..]`.
//!
//! Each spatial dimension by itself: a pixel is the weighted sum of a few of the input's ([`lines`]). Derivative: the transposed
//! sums. Nothing is saved.

mod lines;
mod scale;

use std::sync::Arc;

use phalanx_tensor::{DType, Error, Result as TensorResult, Tensor};
use smallvec::SmallVec;

use super::composed::{composed, named};
use super::linear_map::record_linear;
use crate::{Result, Var};
use lines::Lines;

/// How [`Var::interpolate`] finds a pixel's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterpolateMode {
    /// The input's pixel at `floor(place * in / out)`, in 1 to 3 dimensions.
    Nearest,
    /// The pixel whose centre is nearest, in 1 to 3 dimensions.
    NearestExact,
    /// Between two elements, in 1 dimension.
    Linear,
    /// Between four pixels, in 2 dimensions.
    Bilinear,
    /// Between eight places, in 3 dimensions.
    Trilinear,
    /// By cubic convolution of 16 pixels (with a = -3/4), in 2 dimensions.
    Bicubic,
    /// The mean of the pixels that it covers, in 1 to 3 dimensions.
    Area,
}

/// What [`Var::interpolate`] is told: the size or the scale, the mode, and where the pixels lie.
#[derive(Clone, Debug, PartialEq)]
pub struct Interpolate {
    target: Target,
    mode: InterpolateMode,
    align_corners: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Target {
    Size(SmallVec<[usize; 3]>),
    Scale(SmallVec<[f64; 3]>),
}

impl Interpolate {
    /// To these sizes; a single one is that of all spatial dimensions.
    pub fn to_size(size: &[usize], mode: InterpolateMode) -> Interpolate {
        Interpolate { target: Target::Size(size.into()), mode, align_corners: false }
    }

    /// To `floor(size * factor)`; a single factor is that of all spatial dimensions.
    pub fn by_scale(factors: &[f64], mode: InterpolateMode) -> Interpolate {
        Interpolate { target: Target::Scale(factors.into()), mode, align_corners: false }
    }

    /// Whether the centres of the corner pixels of input and output are the same points; else their outer corners are. For the linear
    /// modes and the cubic one.
    #[must_use]
    pub fn with_align_corners(self, align_corners: bool) -> Interpolate {
        Interpolate { align_corners, ..self }
    }
}

impl Var {
    /// `[n, channels, ..sizes]` with other sizes, as PyTorch's `functional.interpolate` without antialiasing. Where a factor
    /// is given, it also is the distance of the pixels.
    ///
    /// # Errors
    /// If the mode is not for so many dimensions or cannot align corners, sizes or factors are not as many as the spatial
    /// dimensions, a size is 0, a factor is not positive and finite, or the dtype is no floating-point one (except for the two
    /// nearest modes).
    ///
    /// ```
    /// use phalanx_autograd::{Interpolate, InterpolateMode, Var, tensor::Device};
    /// let x = Var::from_slice(&[0.0, 1.0], &[1, 1, 2], Device::CPU)?;
    /// let y = x.interpolate(&Interpolate::to_size(&[3], InterpolateMode::Linear).with_align_corners(true))?;
    /// assert_eq!(y.to_vec::<f64>()?, [0.0, 0.5, 1.0]);
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    pub fn interpolate(&self, options: &Interpolate) -> Result<Var> {
        let lines: Arc<[Lines]> = scale::lines(self.shape(), options)?.into();
        if lines.iter().all(Lines::only_picks) && !self.dtype().is_float() {
            return named(OP, resampled(self, lines));
        }
        composed(OP, &[self], |x| resampled(&x[0], lines))
    }
}

const OP: &str = "interpolate";

/// The last dimensions of `x` mapped by `lines`.
fn resampled(x: &Var, lines: Arc<[Lines]>) -> Result<Var> {
    let y = apply(x.tensor(), &lines)?;
    record_linear(OP, x, y, move |dy| {
        resampled(dy, lines.iter().map(Lines::transposed).collect::<Vec<_>>().into())
    })
}

/// Dimensions that grow are mapped last, and the last of them first.
fn apply(x: &Tensor, lines: &[Lines]) -> TensorResult<Tensor> {
    let first = x.rank() - lines.len();
    let mut order: SmallVec<[usize; 3]> = (0..lines.len()).rev().collect();
    order.sort_by_key(|&i| lines[i].grows());
    let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    order.iter().try_fold(x.clone(), |x, &i| lines[i].apply(&x, first + i, dtype))
}

fn wrong(shape: &[usize], options: &Interpolate, wanted: &str) -> Error {
    let target = match &options.target {
        Target::Size(size) => format!("size {size:?}"),
        Target::Scale(factors) => format!("factors {factors:?}"),
    };
    Error::invalid(
        OP,
        format!("got {target} in mode {:?} for shape {shape:?}, wanted {wanted}", options.mode),
    )
}

#[cfg(test)]
mod tests;
