//! Comparisons, which give bools.

use phalanx_tensor::{DType, Element, Result, Scalar, Tensor};

use crate::check;
use crate::ops::cast::Number;
use crate::pointwise::cuda::{Expression, Numbers, computed_name};
use crate::pointwise::{common_shape, map_scalar};
use crate::real::for_element;

macro_rules! comparisons {
    ($($name:ident $name_scalar:ident $op:tt;)*) => {$(
        #[doc = concat!("`a ", stringify!($op), " b`, broadcast, of one dtype; with a NaN only `!=` is true.")]
        ///
        /// # Errors
        /// If the shapes do not broadcast, or dtypes or devices differ.
        pub fn $name(a: &Tensor, b: &Tensor) -> Result<Tensor> {
            check::same(stringify!($name), &[a, b])?;
            let mut out = Tensor::empty_for(stringify!($name), &common_shape(stringify!($name), &[a, b])?, DType::Bool, a.device())?;
            let (text, value) = (concat!("x[0] ", stringify!($op), " x[1]"), computed_name(a.dtype()));
            let cuda = Expression { text, value, numbers: Numbers::Integers(&[]) };
            for_element!(a.dtype(), T => {
                map_scalar(stringify!($name), |[a, b]: [T; 2]| u8::from(a $op b), &cuda, [a, b], &mut out)
            })?;
            Ok(out)
        }

        #[doc = concat!("`a ", stringify!($op), " s`, with the number rounded to a floating-point dtype of `a`.")]
        ///
        /// # Errors
        /// If the result cannot be allocated.
        pub fn $name_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
            let mut out = Tensor::empty_for(stringify!($name_scalar), a.shape(), DType::Bool, a.device())?;
            let text = concat!("x[0] ", stringify!($op), " k[0]");
            for_element!(a.dtype(), T => match comparable::<T>(s) {
                Scalar::Int(s) => {
                    let numbers = [s];
                    let cuda = Expression::of_integers(text, &numbers);
                    map_scalar(stringify!($name_scalar), |[a]: [T; 1]| u8::from(a.to_i64() $op s), &cuda, [a], &mut out)
                }
                Scalar::Float(s) => {
                    let cuda = Expression { text, value: "f64", numbers: Numbers::Floats(&[s]) };
                    map_scalar(stringify!($name_scalar), |[a]: [T; 1]| u8::from(a.to_f64() $op s), &cuda, [a], &mut out)
                }
            })?;
            Ok(out)
        }
    )*};
}

comparisons! {
    eq eq_scalar ==;
    ne ne_scalar !=;
    lt lt_scalar <;
    le le_scalar <=;
    gt gt_scalar >;
    ge ge_scalar >=;
}

/// The number as elements of `T` are compared with it: in i64 if both are integers, else in f64.
fn comparable<T: Number + Element>(s: Scalar) -> Scalar {
    match s {
        Scalar::Int(s) if T::INTEGER => Scalar::Int(s),
        s if T::INTEGER => Scalar::Float(s.to_f64()),
        s => Scalar::Float(T::from_f64(s.to_f64()).to_f64()),
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Scalar, Tensor};

    use super::*;

    #[test]
    fn nan_is_only_unequal() {
        let x = Tensor::from_slice(&[1.0f32, f32::NAN, 3.0], &[3], Device::CPU).unwrap();
        let y = Tensor::from_slice(&[2.0f32, f32::NAN, 3.0], &[3], Device::CPU).unwrap();
        let bools = |t: Result<Tensor>| t.unwrap().to_vec::<bool>().unwrap();
        assert_eq!(bools(eq(&x, &y)), [false, false, true]);
        assert_eq!(bools(ne(&x, &y)), [true, true, false]);
        assert_eq!(bools(lt(&x, &y)), [true, false, false]);
        assert_eq!(bools(ge(&x, &y)), [false, false, true]);
    }

    #[test]
    fn a_number_is_compared_in_the_dtype_of_floats_and_exactly_with_integers() {
        let x = Tensor::from_slice(&[0.1f32], &[1], Device::CPU).unwrap();
        assert!(eq_scalar(&x, Scalar::Float(0.1)).unwrap().item::<bool>().unwrap());
        let big = Tensor::from_slice(&[i64::MAX], &[1], Device::CPU).unwrap();
        assert!(!eq_scalar(&big, Scalar::Int(i64::MAX - 1)).unwrap().item::<bool>().unwrap());
        let two = Tensor::from_slice(&[2i64], &[1], Device::CPU).unwrap();
        assert!(lt_scalar(&two, Scalar::Float(2.5)).unwrap().item::<bool>().unwrap());
    }
}
