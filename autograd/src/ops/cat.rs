//! Tensors joined along a dimension, an existing one (`cat`) or a new one (`stack`).
//!
//! Derivative: each tensor's part of `dy`, a view.

use std::borrow::Borrow;

use phalanx_kernels as kernels;
use phalanx_tensor::{Dim, Dims, Error, Tensor};
use smallvec::SmallVec;

use crate::{Backward, Cx, Grads, Result, Saver, Var, begins, record};

impl Var {
    /// The tensors one after another along `dim`; their other sizes must agree.
    ///
    /// # Errors
    /// If there is none, or ranks, other sizes, dtypes or devices differ.
    pub fn cat<V: Borrow<Var>>(vars: &[V], dim: impl Dim) -> Result<Var> {
        begins();
        let vars: SmallVec<[&Var; 4]> = vars.iter().map(Borrow::borrow).collect();
        let tensors: SmallVec<[&Tensor; 4]> = vars.iter().map(|v| v.tensor()).collect();
        let Some(first) = vars.first() else {
            return Err(Error::invalid("cat", "got no tensors, wanted at least one").into());
        };
        let dim = dim.resolve(first.rank(), "cat")?;
        let y = kernels::cat(&tensors, dim)?;
        record("cat", &vars, y, |_: &Saver<'_>| {
            Ok(Cat { dim, sizes: vars.iter().map(|v| v.shape()[dim]).collect() })
        })
    }

    /// The tensors, all of one shape, along a new dimension put in before `dim`.
    ///
    /// # Errors
    /// If there is none, or shapes, dtypes or devices differ.
    pub fn stack<V: Borrow<Var>>(vars: &[V], dim: impl Dim) -> Result<Var> {
        let Some(first) = vars.first().map(Borrow::borrow) else {
            return Err(Error::invalid("stack", "got no tensors, wanted at least one").into());
        };
        let dim = dim.resolve(first.rank() + 1, "stack")?;
        if let Some(odd) = vars.iter().map(Borrow::borrow).find(|v| v.shape() != first.shape()) {
            let got = format!("tensors of shapes {:?} and {:?}", first.shape(), odd.shape());
            return Err(Error::shape("stack", got, "one shape").into());
        }
        let rows = vars.iter().map(|v| v.borrow().unsqueeze(dim)).collect::<Result<SmallVec<[Var; 4]>>>()?;
        Var::cat(&rows, dim)
    }
}

struct Cat {
    dim: usize,
    sizes: Dims,
}

impl Backward for Cat {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let mut start = 0;
        let grad = |(i, &size): (usize, &usize)| {
            start += size;
            cx.needs(i).then(|| cx.dy().narrow(self.dim, start - size, size)).transpose()
        };
        self.sizes.iter().enumerate().map(grad).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::Var;
    use crate::ops::testing::check_twice;

    #[test]
    fn joins_have_their_derivatives() {
        check_twice(&[&[2, 2], &[2, 3]], |v| {
            let y = Var::cat(v, 1)?;
            y.mul(&y)
        });
        check_twice(&[&[2, 2], &[2, 2]], |v| {
            let y = Var::stack(v, -1)?;
            y.mul(&y)
        });
    }
}
