//! Extrema over dimensions, and of all elements.
//!
//! Derivative: `dy`, shared evenly by the elements that equal the extremum (all NaNs equal each other here).

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Tensor};

use super::over_dims::{OverDims, reduce};
use super::sum::{all_dims, dims_of};
use crate::{Result, Var};

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

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::{Var, grad};

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
}
