//! Reductions over dimensions: sums, means, extrema, norms, variances, logarithms of sums of exponentials.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dim, Dims, Tensor, resolve_dims};

use super::frame::record_linear;
use crate::{Backward, Cx, Grads, Result, SaveContext, SavedVariable, Var, begins, grads1, record};

// Reductions whose derivative depends on the values.
//
// Saves `x` and `y`. The gradient is written once, of differentiable operations. For bf16 and f16 (the *halves*) it is
// computed in f32, from a `y` that is computed anew there, since `y` rounded to a half may be too coarse for it.

/// A reduction over some dimensions.
pub(super) trait OverDims: Send + Sync + Sized + 'static {
    /// The operation's name.
    const NAME: &'static str;

    /// `y`, the reduced dimensions kept with size 1.
    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor>;

    /// `dx`; `y` and `dy` have the reduced dimensions, with size 1.
    fn gradient(&self, x: &Var, y: &Var, dy: &Var, dims: &[usize]) -> Result<Var>;
}

/// Computes and records a reduction over `dims`, which stay with size 1 if `keepdim`.
pub(super) fn reduce<R: OverDims>(x: &Var, dims: Dims, keepdim: bool, reduction: R) -> Result<Var> {
    begins();
    let y = reduction.forward(x.tensor(), &dims)?;
    let kept = |d: &usize| keepdim || !dims.contains(d);
    let shape: Dims = (0..x.rank()).filter(kept).map(|d| y.shape()[d]).collect();
    record(R::NAME, &[x], y.with_shape(&shape)?, |s: &SaveContext<'_>| {
        Ok(ReductionNode { x: s.input(0)?, y: s.output(0)?, dims, reduction })
    })
}

struct ReductionNode<R> {
    x: SavedVariable,
    y: SavedVariable,
    dims: Dims,
    reduction: R,
}

impl<R: OverDims> Backward for ReductionNode<R> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (x, dims, dtype) = (cx.get(&self.x)?, &self.dims, cx.dy().dtype());
        let kept = reduced(x.shape(), dims);
        let dy = cx.dy().reshape_to(&kept)?;
        if matches!(dtype, DType::F64 | DType::F32) {
            let y = cx.get(&self.y)?.reshape_to(&kept)?;
            return grads1(self.reduction.gradient(&x, &y, &dy, dims)?);
        }
        // Differentiated again, `y` must be the node's own output; it is as precise as the half then.
        let (x, dy) = (x.to(DType::F32)?, dy.to(DType::F32)?);
        let y = match cx.create_graph() {
            true => cx.get(&self.y)?.reshape_to(&kept)?.to(DType::F32)?,
            false => Var::new(self.reduction.forward(x.tensor(), dims)?),
        };
        grads1(self.reduction.gradient(&x, &y, &dy, dims)?.to(dtype)?)
    }
}

/// `y = sum(x)` and `y = mean(x)` over dimensions.
///
/// Derivative: `dy` repeated along the summed dimensions, over their number for the mean. Nothing is saved but the
/// shape.
impl Var {
    /// The sum of all elements, without dimensions.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn sum_all(&self) -> Result<Var> {
        self.sum(&all_dims(self), false)
    }

    /// The sum over `dims`, which stay with size 1 if `keepdim`. Integers and bools are summed in i64.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn sum<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        begins();
        let dims = dims_of("sum", dims, self)?;
        let y = kernels::sum(self.tensor(), &dims, keepdim)?;
        let from = Dims::from_slice(self.shape());
        record_linear("sum", self, y, move |dy| dy.spread(&from, &dims))
    }

    /// The sum over `dims` of what is no NaN; they stay with size 1 if `keepdim`. Integers and bools are summed in i64.
    /// The derivative by a NaN is 0.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn nansum<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        let dims = dims_of("nansum", dims, self)?;
        if !self.dtype().is_float() {
            return self.sum(&dims, keepdim);
        }
        self.masked_fill(&self.isnan()?, 0.0)?.sum(&dims, keepdim)
    }

    /// The mean of all elements, without dimensions.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn mean_all(&self) -> Result<Var> {
        self.mean(&all_dims(self), false)
    }

    /// The mean over `dims`, which stay with size 1 if `keepdim`.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
    pub fn mean<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        begins();
        let dims = dims_of("mean", dims, self)?;
        let y = kernels::mean(self.tensor(), &dims, keepdim)?;
        let from = Dims::from_slice(self.shape());
        let n: usize = dims.iter().map(|&d| from[d]).product();
        record_linear("mean", self, y, move |dy| dy.mul_scalar(1.0 / n as f64)?.spread(&from, &dims))
    }

    /// What a reduction of a tensor of shape `from` over `dims` made, with or without those dimensions, repeated
    /// along them.
    pub(super) fn spread(&self, from: &[usize], dims: &[usize]) -> Result<Var> {
        self.reshape_to(&reduced(from, dims))?.broadcast_to(from)
    }
}

/// The dimensions to reduce over; a scalar may be reduced over its only one, as it were.
pub(super) fn dims_of<D: Dim>(op: &'static str, dims: &[D], x: &Var) -> Result<Dims> {
    let mut dims = resolve_dims(op, dims, x.rank().max(1))?;
    dims.retain(|d| *d < x.rank());
    Ok(dims)
}

/// Every dimension.
pub(super) fn all_dims(x: &Var) -> Dims {
    (0..x.rank()).collect()
}

/// The shape with `dims` of size 1.
pub(super) fn reduced(from: &[usize], dims: &[usize]) -> Dims {
    from.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect()
}

// Extrema over dimensions, and of all elements.
//
// Derivative: `dy`, shared evenly by the elements that equal the extremum (all NaNs equal each other here).

macro_rules! extrema {
    ($($name:ident $all:ident $type:ident $kernel:ident $what:literal;)*) => {$(
        impl Var {
            #[doc = concat!("The ", $what, " element over `dims`, which stay with size 1 if `keepdim`; NaN if there is one.")]
            ///
            /// # Errors
            /// If a dimension does not exist or is named twice, or there are no elements to choose from.
            pub fn $name<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
                reduce(self, dims_of(stringify!($name), dims, self)?, keepdim, $type)
            }

            #[doc = concat!("The ", $what, " of all elements, without dimensions.")]
            ///
            /// # Errors
            /// If there are no elements to choose from.
            pub fn $all(&self) -> Result<Var> {
                reduce(self, all_dims(self), false, $type)
            }
        }

        struct $type;

        impl OverDims for $type {
            const NAME: &'static str = stringify!($name);

            fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
                kernels::$kernel(x, dims, true)
            }

            fn gradient(&self, x: &Var, y: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
                share(x, y, dims)?.mul(dy)
            }
        }
    )*};
}

extrema! {
    amax max_all Largest amax "largest";
    amin min_all Smallest amin "smallest";
}

/// One over the number of elements of `x` that equal their `y`, at those elements; else 0. A constant.
pub(super) fn share(x: &Var, y: &Var, dims: &[usize]) -> Result<Var> {
    let (x, y) = (x.detach(), y.detach());
    let nan = |v: &Var| v.ne(v)?.to(v.dtype());
    let equal = x.eq(&y)?.to(x.dtype())?.add(&nan(&x)?.mul(&nan(&y)?)?)?;
    equal.div(&equal.sum(dims, true)?)
}

/// `y = sum(|x|^p)^(1/p)` over dimensions.
///
/// Derivative: `dx = dy sign(x) |x / y|^(p - 1)`, and 0 where `y` is 0; for an infinite `p` shared evenly by the
/// elements of that magnitude. The quotient is taken first, so that no power leaves the dtype's range.
impl Var {
    /// The vector norm of order `p` over `dims`, which stay with size 1 if `keepdim`. `f64::INFINITY` is the largest
    /// magnitude, 0 counts what is not 0.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, a dimension does not exist or is named twice, or `p` is infinite and
    /// there are no elements.
    pub fn norm<D: Dim>(&self, p: f64, dims: &[D], keepdim: bool) -> Result<Var> {
        reduce(self, dims_of("norm", dims, self)?, keepdim, Norm { p })
    }
}

struct Norm {
    p: f64,
}

impl OverDims for Norm {
    const NAME: &'static str = "norm";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        kernels::norm(x, self.p, dims, true)
    }

    fn gradient(&self, x: &Var, y: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
        if self.p == 0.0 {
            return Var::full(0.0, x);
        }
        if self.p.is_infinite() {
            return share(&x.abs()?, y, dims)?.mul(&sign(x)?)?.mul(dy);
        }
        if self.p == 1.0 {
            return sign(x)?.mul(dy);
        }
        // With 1 in the place of 0 nothing infinite is made there, to be multiplied by 0.
        let zero = y.eq_scalar(0.0)?;
        let ratio = x.div(&y.masked_fill(&zero, 1.0)?)?;
        if self.p == 2.0 {
            return ratio.mul(dy);
        }
        let none = x.eq_scalar(0.0)?;
        let power = ratio.abs()?.masked_fill(&none, 1.0)?.pow_scalar(self.p - 1.0)?;
        power.mul(&sign(x)?)?.mul(dy)
    }
}

/// -1, 0 or 1, as a constant.
fn sign(x: &Var) -> Result<Var> {
    let positive = x.gt_scalar(0.0)?.to(x.dtype())?;
    positive.sub(&x.lt_scalar(0.0)?.to(x.dtype())?)
}

/// `y = sum((x - mean)²) / (n - correction)` over dimensions.
///
/// Derivative: `dx = dy 2 (x - mean) / (n - correction)`. Of the standard deviation, its root:
/// `dx = dy (x - mean) / (y (n - correction))`, and 0 where `y` is 0.
impl Var {
    /// The variance over `dims`, which stay with size 1 if `keepdim`: 1 is the correction for a sample's, 0 for a
    /// population's.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
    pub fn var<D: Dim>(&self, dims: &[D], correction: f64, keepdim: bool) -> Result<Var> {
        let dims = dims_of("var", dims, self)?;
        reduce(self, dims, keepdim, Variance { correction })
    }

    /// The standard deviation over `dims`, the root of [`Var::var`]. Its derivative where all elements are equal is 0.
    ///
    /// # Errors
    /// As [`Var::var`].
    pub fn std<D: Dim>(&self, dims: &[D], correction: f64, keepdim: bool) -> Result<Var> {
        let dims = dims_of("std", dims, self)?;
        super::frame::floats("std", &[self])?;
        reduce(self, dims, keepdim, Deviation { correction })
    }
}

struct Variance {
    correction: f64,
}

impl OverDims for Variance {
    const NAME: &'static str = "var";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        kernels::var(x, dims, self.correction, true)
    }

    fn gradient(&self, x: &Var, _: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
        let n: usize = dims.iter().map(|&d| x.shape()[d]).product();
        let deviation = x.sub(&x.mean(dims, true)?)?;
        deviation.mul(&dy.mul_scalar(2.0 / (n as f64 - self.correction).max(0.0))?)
    }
}

struct Deviation {
    correction: f64,
}

impl OverDims for Deviation {
    const NAME: &'static str = "std";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        // A half is rounded once, behind the root.
        let wide = if x.dtype().size() == 2 { DType::F32 } else { x.dtype() };
        let variance = kernels::var(&kernels::cast(x, wide)?, dims, self.correction, true)?;
        kernels::cast(&kernels::sqrt(&variance)?, x.dtype())
    }

    fn gradient(&self, x: &Var, y: &Var, dy: &Var, dims: &[usize]) -> Result<Var> {
        let n: usize = dims.iter().map(|&d| x.shape()[d]).product();
        let slope = dy.div(&y.mul_scalar((n as f64 - self.correction).max(0.0))?)?;
        let slope = slope.masked_fill(&y.eq_scalar(0.0)?, 0.0)?;
        x.sub(&x.mean(dims, true)?)?.mul(&slope)
    }
}

/// `y = log(sum(e^x))` over dimensions.
///
/// Derivative: `dx = dy e^(x - y)`.
impl Var {
    /// The logarithm of the sum of exponentials over `dims`, which stay with size 1 if `keepdim`; safe for large
    /// values.
    ///
    /// # Errors
    /// If the dtype is no floating-point one, or a dimension does not exist or is named twice.
    pub fn logsumexp<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        reduce(self, dims_of("logsumexp", dims, self)?, keepdim, LogSumExp)
    }
}

struct LogSumExp;

impl OverDims for LogSumExp {
    const NAME: &'static str = "logsumexp";

    fn forward(&self, x: &Tensor, dims: &[usize]) -> phalanx_tensor::Result<Tensor> {
        kernels::logsumexp(x, dims, true)
    }

    fn gradient(&self, x: &Var, y: &Var, dy: &Var, _: &[usize]) -> Result<Var> {
        x.sub(y)?.exp()?.mul(dy)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::{Var, grad};

    #[test]
    fn sums_and_means_have_their_derivatives() {
        check_twice(&[&[2, 3, 2]], |v| {
            let y = v[0].sum(&[0, -1], false)?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].mean(&[1], true)?;
            y.mul(&y)
        });
        check_twice(&[&[2, 3]], |v| {
            let y = v[0].mean_all()?;
            y.mul(&y)
        });
    }

    #[test]
    fn extrema_have_their_derivatives() {
        check_twice(&[&[3, 4]], |v| v[0].amax(&[1], false)?.tanh());
        check_twice(&[&[3, 4]], |v| v[0].amin(&[0], true)?.tanh());
        check_twice(&[&[3, 4]], |v| v[0].max_all()?.tanh());
    }

    #[test]
    fn ties_share_evenly() {
        let x = Var::leaf(Tensor::from_slice(&[1.0, 3.0, 3.0, 2.0], &[4], Device::CPU).unwrap()).unwrap();
        let dx = grad(&[(x.max_all().unwrap(), None)], &[&x], Default::default()).unwrap().remove(0).unwrap();
        assert_eq!(dx.to_vec::<f64>().unwrap(), [0.0, 0.5, 0.5, 0.0]);
    }

    #[test]
    fn norms_have_their_derivatives() {
        for p in [1.0, 1.5, 2.0, 3.0, f64::INFINITY] {
            check_twice(&[&[3, 4]], |v| v[0].norm(p, &[1], false)?.tanh());
        }
        check_twice(&[&[3, 4]], |v| v[0].norm(2.0, &[0, 1], true)?.tanh());
    }

    #[test]
    fn variances_have_their_derivatives() {
        check_twice(&[&[3, 4]], |v| v[0].var(&[1], 1.0, false)?.tanh());
        check_twice(&[&[3, 4]], |v| v[0].var(&[0, -1], 0.0, true)?.tanh());
    }

    #[test]
    fn logsumexp_has_its_derivatives() {
        check_twice(&[&[3, 4]], |v| v[0].logsumexp(&[1], false)?.tanh());
        check_twice(&[&[3, 4]], |v| v[0].logsumexp(&[0, 1], true)?.tanh());
    }
}
