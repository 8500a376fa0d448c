//! `y = x Wᵀ + b`: `x` is `[.., in]`, `W` `[out, in]`, `b` `[out]`, `y` `[.., out]`.
//!
//! Derivative, with `x` and `dy` as matrices of all rows: `dx = dy W`, `dW = dyᵀ x`, `db` the sum of `dy`'s rows. Saves
//! `x` for `dW` and `W` for `dx`. `dW` goes straight into the weight's gradient buffer where there is one of this
//! dtype.

use phalanx_kernels::{self as kernels, Gelu};
use phalanx_tensor::Dims;
use smallvec::SmallVec;

use super::matmul::rows;
use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, is_recording, record};

impl Var {
    /// `self weightᵀ + bias`, with `weight` of shape `[out, in]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or dtypes or devices differ.
    pub fn linear(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        begins();
        let y = kernels::linear(self.tensor(), weight.tensor(), bias.map(Var::tensor))?;
        let inputs: SmallVec<[&Var; 3]> = [self, weight].into_iter().chain(bias).collect();
        record("linear", &inputs, y, |s: &Saver<'_>| {
            let shape = Dims::from_slice(self.shape());
            let x = s.needs(1).then(|| s.input(0)).transpose()?;
            let weight = s.needs(0).then(|| s.input(1)).transpose()?;
            Ok(Linear { shape, x, weight, has_bias: bias.is_some() })
        })
    }

    /// [`Var::linear`], then [`Var::gelu`]: in one pass where no gradient is recorded, else as the two operations, with
    /// the same bits.
    ///
    /// # Errors
    /// As [`Var::linear`].
    pub fn linear_gelu(&self, weight: &Var, bias: Option<&Var>, kind: Gelu) -> Result<Var> {
        let inputs: SmallVec<[&Var; 3]> = [self, weight].into_iter().chain(bias).collect();
        if is_recording(&inputs) {
            return self.linear(weight, bias)?.gelu(kind);
        }
        let y = kernels::linear_gelu(self.tensor(), weight.tensor(), bias.map(Var::tensor), kind)?;
        Ok(Var::new(y))
    }
}

struct Linear {
    shape: Dims,
    x: Option<SavedVariable>,
    weight: Option<SavedVariable>,
    has_bias: bool,
}

impl Backward for Linear {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x = self.x.as_ref().filter(|_| cx.needs(1)).map(|x| cx.get(x)).transpose()?;
        self.grads(cx, x)
    }

    fn backward_once(mut self, cx: &mut Cx<'_>) -> Result<Grads> {
        let x = self.x.take().filter(|_| cx.needs(1)).map(|x| cx.take(x)).transpose()?;
        self.grads(cx, x.map(Var::new))
    }
}

impl Linear {
    /// The gradients, given `x` for the weight's.
    fn grads(&self, cx: &Cx<'_>, x: Option<Var>) -> Result<Grads> {
        let dy = rows(cx.dy())?;
        // First, so that `x` is gone when `dx` is made, which is as large.
        let dw = match x {
            Some(x) => linear_weight_grad(cx, 1, &dy, &rows(&x)?)?,
            None => None,
        };
        let dx = match self.weight.as_ref().filter(|_| cx.needs(0)) {
            Some(weight) => Some(dy.matmul(&cx.get(weight)?)?.reshape_to(&self.shape)?),
            None => None,
        };
        let mut grads = Grads::from_buf([dx, dw]);
        if self.has_bias {
            grads.push(cx.needs(2).then(|| dy.sum(&[0], false)).transpose()?);
        }
        Ok(grads)
    }
}

/// The gradient `dyᵀ x` of a linear map's weight, which is input `i` of the operation, of `dy` `[rows, out]` and `x` `[rows,
/// in]`; nothing if it was added to the weight's gradient buffer. For operations that are made of linear maps.
///
/// # Errors
/// If the shapes do not fit.
pub fn linear_weight_grad(cx: &Cx<'_>, i: usize, dy: &Var, x: &Var) -> Result<Option<Var>> {
    let dy = dy.transpose(0, 1)?;
    let direct = !cx.create_graph()
        && cx.accumulate_into(i, |buffer| {
            let fits = buffer.is_contiguous() && buffer.dtype() == x.dtype();
            if fits {
                kernels::matmul_accumulate_(buffer, dy.tensor(), x.tensor())?;
            }
            Ok(fits)
        })?;
    if direct { Ok(None) } else { dy.matmul(x).map(Some) }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::{Leaf, Slot, Var};

    #[test]
    fn first_and_second_derivatives_hold() {
        for x in [&[4][..], &[3, 4], &[2, 3, 4]] {
            check_twice(&[x, &[5, 4], &[5]], |v| v[0].linear(&v[1], Some(&v[2])));
            check_twice(&[x, &[5, 4]], |v| v[0].linear(&v[1], None));
        }
    }

    #[test]
    fn a_gradient_written_into_a_buffer_has_the_bits_of_one_added_to_it() {
        let values: Vec<f32> = (0..12).map(|i| (i as f32 * 0.37).sin()).collect();
        let x = Var::from_slice(&values, &[4, 3], Device::CPU).unwrap();
        let grad = |slot: Option<DType>| {
            let leaf =
                Leaf::new(Tensor::from_slice(&values[..6], &[2, 3], Device::CPU).unwrap(), true).unwrap();
            let start = Tensor::from_slice(&values[6..], &[2, 3], Device::CPU).unwrap();
            match slot {
                Some(dtype) => {
                    leaf.set_slot(Slot::Into(phalanx_kernels::cast(&start, dtype).unwrap())).unwrap()
                }
                None => leaf.set_grad(Some(Var::new(start))),
            }
            x.linear(&leaf.var(), None).unwrap().sum_all().unwrap().backward().unwrap();
            phalanx_kernels::cast(leaf.grad().unwrap().tensor(), DType::F64).unwrap().to_vec::<f64>().unwrap()
        };
        assert_eq!(grad(None), grad(Some(DType::F32)));
        let wide = grad(Some(DType::F64));
        assert!(grad(None).iter().zip(&wide).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}
