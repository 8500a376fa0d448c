//! Comparisons, which give bools and have no derivative.

use phalanx_kernels as kernels;
use phalanx_tensor::Scalar;

use crate::{Result, Var, record_none};

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
