//! `y = a b`, broadcast, and `y = a s` with a number.
//!
//! Derivative: `da = dy b`, `db = dy a`, each summed over what was broadcast. Each operand is saved for the
//! other's gradient, if that is wanted. Where both are, and one is made again, `y` is so too ([`Rematerialized`]).

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::Scalar;

use crate::{
    Backward, Cx, Grads, Rematerialized, Result, SavedVariable, Saver, Var, begins, grads1, grads2, record,
};

impl Var {
    /// `self * other`, broadcast; floats or integers of one dtype.
    ///
    /// # Errors
    /// If the shapes do not broadcast, or dtypes or devices differ.
    pub fn mul(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::mul(self.tensor(), other.tensor())?;
        record("mul", &[self, other], y, |s: &Saver<'_>| {
            let mut operands = [None, None];
            for (i, operand) in operands.iter_mut().enumerate().filter(|(i, _)| s.needs(1 - i)) {
                *operand = Some(s.input(i)?);
            }
            let saved = operands.iter().flatten();
            let remakes = saved.clone().count() == 2 && saved.clone().any(SavedVariable::is_rematerialized);
            let rematerialized =
                remakes.then(|| s.rematerialized_of_rematerialized([0, 1], |x| kernels::mul(&x[0], &x[1])));
            Ok(Mul { operands, rematerialized: rematerialized.flatten() })
        })
    }

    /// `self * number`, in this dtype.
    ///
    /// # Errors
    /// If this is a bool, or an integer and the number is not.
    pub fn mul_scalar(&self, number: impl Into<Scalar>) -> Result<Var> {
        begins();
        let number = number.into();
        let y = kernels::mul_scalar(self.tensor(), number)?;
        record("mul", &[self], y, |_: &Saver<'_>| Ok(MulScalar { number }))
    }
}

struct Mul {
    operands: [Option<SavedVariable>; 2],
    rematerialized: Option<Arc<Rematerialized>>,
}

impl Backward for Mul {
    const REMATERIALIZES: bool = true;

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let grad = |i: usize| -> Result<Option<Var>> {
            let Some(other) = self.operands[1 - i].as_ref().filter(|_| cx.needs(i)) else { return Ok(None) };
            Ok(Some(cx.sum_to_input(i, cx.dy().mul(&cx.get(other)?)?)?))
        };
        grads2(grad(0)?, grad(1)?)
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        let [a, b] = self.operands;
        let mut grads = [None, None];
        for (i, other) in [b, a].into_iter().enumerate() {
            let Some(other) = other.filter(|_| cx.needs(i)) else { continue };
            let other = cx.take(other)?;
            let is_last = i == 1 || !cx.needs(1);
            let full = match is_last {
                true => kernels::mul_over(&other, cx.take_dy().into_tensor())?,
                false => kernels::mul(cx.dy().tensor(), &other)?,
            };
            grads[i] = Some(cx.sum_to_input(i, Var::new(full))?);
        }
        let [da, db] = grads;
        grads2(da, db)
    }

    fn rematerialized(&self, _: usize) -> Option<&Arc<Rematerialized>> {
        self.rematerialized.as_ref()
    }

    fn release(&mut self, later: &dyn Fn(usize) -> bool) {
        for i in 0..2 {
            self.operands[1 - i].take_if(|_| !later(i));
        }
    }
}

struct MulScalar {
    number: Scalar,
}

impl Backward for MulScalar {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads1(cx.dy().mul_scalar(self.number)?)
    }
}
