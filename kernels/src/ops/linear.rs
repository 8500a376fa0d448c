//! `x Wᵀ + b`, the layer most work is done in.

use phalanx_tensor::{Result, Tensor};

use super::gelu::Gelu;
use super::matmul::{Finish, Product};
use crate::check;

/// `x weightᵀ + bias` for `x` of shape `[.., in]`, `weight` `[out, in]` and `bias` `[out]`: `[.., out]`, the bias
/// added to the finished sums.
///
/// # Errors
/// If the shapes do not fit, the dtype is no floating-point one, or dtypes or devices differ.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    run("linear", x, weight, bias, Finish::default())
}

/// [`linear`], then [`crate::gelu`], in one pass and with the same bits.
///
/// # Errors
/// As [`linear`].
pub fn linear_gelu(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Gelu) -> Result<Tensor> {
    run("linear_gelu", x, weight, bias, Finish { activation: Some(kind), ..Finish::default() })
}

fn run(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    finish: Finish<'_>,
) -> Result<Tensor> {
    let inputs = x.shape().last().copied();
    let fits = weight.rank() == 2 && inputs == Some(weight.shape()[1]);
    if !fits {
        let got = format!("an input of shape {:?} and a weight of shape {:?}", x.shape(), weight.shape());
        return Err(phalanx_tensor::Error::shape(op, got, "[.., in] and [out, in]"));
    }
    let columns = weight.transpose(0, 1)?;
    let product = Product::new(op, x, &columns)?;
    let bias = match bias {
        Some(bias) => {
            check::same(op, &[x, bias])?;
            check::shape(op, "a bias", bias, &weight.shape()[..1])?;
            Some(bias.contiguous()?)
        }
        None => None,
    };
    let mut out = Tensor::empty_for(op, &product.out_shape(x, weight), x.dtype(), x.device())?;
    product.run(&mut out, Finish { bias: bias.as_ref(), ..finish })?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{add, gelu, matmul};
    use crate::testing::{FLOATS, floats, make, values};

    #[test]
    fn has_the_bits_of_a_product_and_a_sum() {
        for dtype in FLOATS {
            for shape in [&[17][..], &[1, 17], &[5, 17], &[2, 3, 17], &[0, 17]] {
                let x = make(shape, dtype, &floats(-1.0, 1.0));
                let (w, b) =
                    (make(&[33, 17], dtype, &floats(-1.0, 0.5)), make(&[33], dtype, &floats(-1.0, 2.0)));
                let product = matmul(&x, &w.transpose(0, 1).unwrap()).unwrap();
                assert_eq!(values(&linear(&x, &w, None).unwrap()), values(&product));
                let sum = add(&product, &b).unwrap();
                assert_eq!(values(&linear(&x, &w, Some(&b)).unwrap()), values(&sum));
                for kind in [Gelu::Exact, Gelu::Tanh] {
                    let fused = linear_gelu(&x, &w, Some(&b), kind).unwrap();
                    assert_eq!(values(&fused), values(&gelu(&sum, kind).unwrap()));
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let x = |shape: &[usize]| make(shape, phalanx_tensor::DType::F32, &floats(-1.0, 1.0));
        let message = linear(&x(&[2, 3]), &x(&[4, 5]), None).unwrap_err().to_string();
        assert!(message.contains("linear") && message.contains("[4, 5]"), "{message}");
        assert!(linear(&x(&[2, 3]), &x(&[4, 3]), Some(&x(&[3]))).is_err());
        assert!(linear(&x(&[]), &x(&[4, 3]), None).is_err());
    }
}
