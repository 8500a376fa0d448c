//! Comparisons and logic. The results are bools or integers, and have no derivative.

use phalanx_kernels as kernels;
use phalanx_tensor::{DType, Dim, Error, Scalar, Tensor};

use super::frame::{broadcasts, named};
use super::reduce::{all_dims, dims_of};
use crate::{Result, Var, begins, record_none};

// Comparisons, which give bools and have no derivative.

macro_rules! comparisons {
    ($($name:ident $name_scalar:ident $op:tt;)*) => {
        impl Var {$(
            #[doc = concat!("`self ", stringify!($op), " other`, broadcast, of one dtype; with a NaN only `!=` is true.")]
            ///
            /// # Errors
            /// If the shapes do not broadcast, or dtypes or devices differ.
            pub fn $name(&self, other: &Var) -> Result<Var> {
                let y = kernels::$name(self.tensor(), other.tensor())?;
                record_none(stringify!($name), &[self, other], y)
            }

            #[doc = concat!("`self ", stringify!($op), " number`, the number rounded to this dtype if it is a float.")]
            ///
            /// # Errors
            /// If the result cannot be allocated.
            pub fn $name_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
                let y = kernels::$name_scalar(self.tensor(), number.into())?;
                record_none(stringify!($name), &[self], y)
            }
        )*}
    };
}

comparisons! {
    eq eq_scalar ==;
    ne ne_scalar !=;
    lt lt_scalar <;
    le le_scalar <=;
    gt gt_scalar >;
    ge ge_scalar >=;
}

// Bitwise and logical operations, `isclose`, `any` and `all`. None has a derivative.
//
// An element of any dtype is true unless it is 0; a NaN is true.

macro_rules! pairs {
    ($($logical:ident $bitwise:ident $what:literal;)*) => {
        impl Var {$(
            #[doc = concat!("Whether ", $what, " true, broadcast: a bool, of any dtypes.")]
            ///
            /// # Errors
            /// If the shapes do not broadcast or devices differ.
            pub fn $logical(&self, other: &Var) -> Result<Var> {
                let (name, a, b) = (stringify!($logical), truth(self)?, truth(other)?);
                named(name, kernels::$bitwise(&a, &b).map(Var::new).map_err(Into::into))
            }

            #[doc = concat!("The bits of which ", $what, " set, broadcast, of integers or bools of one dtype.")]
            ///
            /// # Errors
            /// If the dtype is a floating-point one, dtypes or devices differ, or the shapes do not broadcast.
            pub fn $bitwise(&self, other: &Var) -> Result<Var> {
                Ok(Var::new(kernels::$bitwise(self.tensor(), other.tensor())?))
            }
        )*}
    };
}

pairs! {
    logical_and bitwise_and "both are";
    logical_or bitwise_or "one or both are";
    logical_xor bitwise_xor "exactly one is";
}

/// Elementwise `x != 0`, as bool.
fn truth(x: &Var) -> Result<Tensor> {
    Ok(if x.dtype() == DType::Bool { x.tensor().clone() } else { kernels::ne_scalar(x.tensor(), 0.into())? })
}

impl Var {
    /// Whether each element is 0 or false: a bool, of any dtype.
    ///
    /// # Errors
    /// If the result cannot be allocated.
    pub fn logical_not(&self) -> Result<Var> {
        begins();
        record_none("logical_not", &[self], kernels::eq_scalar(self.tensor(), 0.into())?)
    }

    /// Whether `|self - other| <= atol + rtol |other|`, or both are the same infinity, or with `equal_nan` both NaN;
    /// broadcast. A bool. PyTorch's defaults are `rtol` 1e-5 and `atol` 1e-8.
    ///
    /// # Errors
    /// If the shapes do not broadcast, dtypes or devices differ, or a tolerance is negative or NaN.
    pub fn isclose(&self, other: &Var, rtol: f64, atol: f64, equal_nan: bool) -> Result<Var> {
        const NAME: &str = "isclose";
        if !(rtol >= 0.0 && atol >= 0.0) {
            let why = format!("got rtol {rtol} and atol {atol}, wanted numbers from 0 up");
            return Err(Error::invalid(NAME, why).into());
        }
        super::frame::same(NAME, &[self, other])?;
        broadcasts(NAME, &[self, other])?;
        let (a, b) = (self.detach().to(DType::F64)?, other.detach().to(DType::F64)?);
        let far = a.sub(&b)?.abs()?;
        let near = far.le(&b.abs()?.mul_scalar(rtol)?.add_scalar(atol)?)?.logical_and(&far.isfinite()?)?;
        let close = near.logical_or(&self.detach().eq(&other.detach())?)?;
        if equal_nan { close.logical_or(&a.isnan()?.logical_and(&b.isnan()?)?) } else { Ok(close) }
    }

    /// Whether any element along `dims` is true; they stay with size 1 if `keepdim`. False of none. A bool.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn any<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        begins();
        let count = kernels::sum(&truth(self)?, &dims_of("any", dims, self)?, keepdim)?;
        record_none("any", &[self], kernels::ne_scalar(&count, 0.into())?)
    }

    /// Whether any element of all is true, without dimensions; false of none.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn any_all(&self) -> Result<Var> {
        self.any(&all_dims(self), false)
    }

    /// Whether all elements along `dims` are true; they stay with size 1 if `keepdim`. True of none. A bool.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn all<D: Dim>(&self, dims: &[D], keepdim: bool) -> Result<Var> {
        begins();
        let zeros = kernels::eq_scalar(self.tensor(), 0.into())?;
        let count = kernels::sum(&zeros, &dims_of("all", dims, self)?, keepdim)?;
        record_none("all", &[self], kernels::eq_scalar(&count, 0.into())?)
    }

    /// Whether every element is true, without dimensions; true of none.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn all_all(&self) -> Result<Var> {
        self.all(&all_dims(self), false)
    }

    /// How many elements along `dims` are not 0 (a NaN is not), as i64; the dimensions go away.
    ///
    /// # Errors
    /// If a dimension does not exist or is named twice.
    pub fn count_nonzero<D: Dim>(&self, dims: &[D]) -> Result<Var> {
        begins();
        let dims = dims_of("count_nonzero", dims, self)?;
        record_none("count_nonzero", &[self], kernels::sum(&truth(self)?, &dims, false)?)
    }

    /// How many elements of all are not 0, as i64 without dimensions.
    ///
    /// # Errors
    /// None but those of the device.
    pub fn count_nonzero_all(&self) -> Result<Var> {
        self.count_nonzero(&all_dims(self))
    }
}
