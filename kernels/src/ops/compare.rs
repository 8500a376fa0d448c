//! Comparisons of elements, which give bools.

use bytemuck::Zeroable;
use phalanx_tensor::{DType, Result, Scalar, Tensor};

use super::cast::{Convert, convert};
use crate::block_reader::BLOCK;
use crate::check;
use crate::ops::cast::Number;
use crate::pointwise::cuda::{Expression, Numbers, computed_name};
use crate::pointwise::{in_order, map_blocks};
use crate::real::for_element;
use crate::simd::{Isa, Kernel, dispatch};

macro_rules! comparisons {
    ($($name:ident $name_scalar:ident $op:tt $comparison:ident;)*) => {$(
        #[doc = concat!("`a ", stringify!($op), " b`, broadcast, of one dtype; with a NaN only `!=` is true.")]
        ///
        /// # Errors
        /// If the shapes do not broadcast, or dtypes or devices differ.
        pub fn $name(a: &Tensor, b: &Tensor) -> Result<Tensor> {
            let text = concat!("x[0] ", stringify!($op), " x[1]");
            compare(stringify!($name), Comparison::$comparison, text, a, b)
        }

        #[doc = concat!("`a ", stringify!($op), " s`, with the number rounded to a floating-point dtype of `a`.")]
        ///
        /// # Errors
        /// If the result cannot be allocated.
        pub fn $name_scalar(a: &Tensor, s: Scalar) -> Result<Tensor> {
            let text = concat!("x[0] ", stringify!($op), " k[0]");
            compare_scalar(stringify!($name_scalar), Comparison::$comparison, text, a, s)
        }
    )*};
}

comparisons! {
    eq eq_scalar == Eq;
    ne ne_scalar != Ne;
    lt lt_scalar < Lt;
    le le_scalar <= Le;
    gt gt_scalar > Gt;
    ge ge_scalar >= Ge;
}

#[derive(Clone, Copy)]
enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

fn compare(op: &'static str, how: Comparison, text: &'static str, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    check::same(op, &[a, b])?;
    let cuda = &Expression { text, value: computed_name(a.dtype()), numbers: Numbers::Integers(&[]) };
    in_order(op, DType::Bool, [a, b], |inputs, out| {
        for_element!(a.dtype(), T => {
            map_blocks(op, &|[a, b]: [&[T]; 2], out: &mut [u8]| blocks(how, a, b, out), cuda, inputs, out)
        })
    })
}

/// An integer dtype is compared with an integer in its own type if that holds the number, else in i64; with another number in f64.
fn compare_scalar(
    op: &'static str,
    how: Comparison,
    text: &'static str,
    a: &Tensor,
    s: Scalar,
) -> Result<Tensor> {
    in_order(op, DType::Bool, [a], |inputs, out| {
        for_element!(a.dtype(), T => match s {
            Scalar::Int(s) if T::INTEGER => {
                let (numbers, near) = ([s], T::from_i64(s));
                let cuda = &Expression::of_integers(text, &numbers);
                match near.to_i64() == s {
                    true => map_blocks(op, &|[a]: [&[T]; 1], out| with(how, a, near, out), cuda, inputs, out),
                    false => map_blocks(op, &|[a]: [&[T]; 1], out| with_in(how, a, s, out), cuda, inputs, out),
                }
            }
            s => {
                let s = if T::INTEGER { s.to_f64() } else { T::from_f64(s.to_f64()).to_f64() };
                let cuda = &Expression { text, value: "f64", numbers: Numbers::Floats(&[s]) };
                match T::INTEGER {
                    true => map_blocks(op, &|[a]: [&[T]; 1], out| with_in(how, a, s, out), cuda, inputs, out),
                    false => {
                        let near = T::from_f64(s);
                        map_blocks(op, &|[a]: [&[T]; 1], out| with(how, a, near, out), cuda, inputs, out)
                    }
                }
            }
        })
    })
}

/// Elements and a number, in a type that they are converted to.
fn with_in<T: Convert, U: Convert<Direct = U>>(how: Comparison, a: &[T], s: U, out: &mut [u8]) {
    let mut wide = [U::zeroed(); BLOCK];
    let wide = &mut wide[..a.len()];
    convert(a, wide);
    with(how, wide, s, out);
}

/// Elements and a number.
fn with<T: Convert>(how: Comparison, a: &[T], s: T, out: &mut [u8]) {
    blocks(how, a, &[s; BLOCK][..a.len()], out);
}

/// The elements of two blocks.
fn blocks<T: Convert>(how: Comparison, a: &[T], b: &[T], out: &mut [u8]) {
    let mut scratch = [[<T::Direct as Zeroable>::zeroed(); BLOCK]; 2];
    let [left, right] = &mut scratch;
    let a = T::direct(a, &mut left[..a.len()]);
    let b = T::direct(b, &mut right[..b.len()]);
    let (a, b) = if matches!(how, Comparison::Gt | Comparison::Ge) { (b, a) } else { (a, b) };
    dispatch(Compare { how, a, b, out });
}

/// A comparison of `a` with `b`; for `>` and `>=` the two are exchanged already.
struct Compare<'a, T> {
    how: Comparison,
    a: &'a [T],
    b: &'a [T],
    out: &'a mut [u8],
}

impl<T: Number> Kernel for Compare<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let Compare { how, a, b, out } = self;
        let differs = u8::from(matches!(how, Comparison::Ne));
        match how {
            Comparison::Eq | Comparison::Ne => each(a, b, out, |a, b| u8::from(a == b) ^ differs),
            Comparison::Lt | Comparison::Gt => each(a, b, out, |a, b| u8::from(a < b)),
            Comparison::Le | Comparison::Ge => each(a, b, out, |a, b| u8::from(a <= b)),
        }
    }
}

#[inline(always)]
fn each<T: Copy>(a: &[T], b: &[T], out: &mut [u8], holds: impl Fn(T, T) -> u8) {
    for ((to, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *to = holds(a, b);
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
