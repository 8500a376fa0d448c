//! Products over dimensions.

use phalanx_tensor::{DType, Dim, Result, Tensor};

use crate::ops::cast::Number;
use crate::real::for_element;
use crate::reduce::{Frame, Kind, each, fold_each};

/// The product over `dims`, which stay with size 1 if `keepdim`; 1 over nothing. Floats are multiplied in f64 and
/// rounded once; integers and bools in i64, where they wrap.
///
/// # Errors
/// If a dimension does not exist or is named twice.
pub fn prod<D: Dim>(x: &Tensor, dims: &[D], keepdim: bool) -> Result<Tensor> {
    prod_over(&Frame::new(OP, x, dims, keepdim)?)
}

const OP: &str = "prod";

fn prod_over(frame: &Frame) -> Result<Tensor> {
    let from = frame.view.dtype();
    let dtype = if from.is_float() { from } else { DType::I64 };
    let (mut out, computes) = frame.output(OP, dtype)?;
    if !computes {
        return Ok(out);
    }
    if out.device().is_cuda() {
        each(OP, frame, Kind::Multiply, &mut out, None)?;
        return Ok(out);
    }
    if dtype == DType::I64 {
        let mut target = out.write::<i64>(OP)?;
        for_element!(from, T => {
            let multiply = |product: &mut i64, _: usize, x: T| *product = product.wrapping_mul(x.to_i64());
            fold_each::<T, i64>(OP, frame, 1, &mut target, multiply)
        })?;
        drop(target);
        return Ok(out);
    }
    let mut products = vec![1.0; out.numel()];
    for_element!(dtype, T => {
        fold_each::<T, f64>(OP, frame, 1.0, &mut products, |product, _, x| *product *= x.to_f64())?;
        let mut target = out.write::<T>(OP)?;
        target.iter_mut().zip(products).for_each(|(to, x)| *to = <T as Number>::from_f64(x));
    });
    Ok(out)
}
