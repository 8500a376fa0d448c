//! `c = a b`, matrices in the last two dimensions, those before them broadcast; a one-dimensional `a` is a row, a
//! one-dimensional `b` a column, and that dimension is not in the result.
//!
//! Derivative: `da = dc bᵀ`, `db = aᵀ dc`, each summed over the batch dimensions that were broadcast. Each operand is
//! saved for the other's gradient, if that is wanted. Transposes are views. Where `b` is one matrix for the whole
//! batch, `db` is a single product over all rows, in the order they lie.

use phalanx_kernels as kernels;
use phalanx_tensor::Dims;

use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, begins, grads2, record};

impl Var {
    /// The matrix product with `other`, batched and broadcast.
    ///
    /// # Errors
    /// If the inner sizes differ, the others do not broadcast, a tensor has no dimensions, or dtypes or devices
    /// differ.
    pub fn matmul(&self, other: &Var) -> Result<Var> {
        begins();
        let y = kernels::matmul(self.tensor(), other.tensor())?;
        record("matmul", &[self, other], y, |s: &Saver<'_>| {
            let for_other = |i: usize| s.needs(1 - i).then(|| s.input(i)).transpose();
            let shapes = [Dims::from_slice(self.shape()), Dims::from_slice(other.shape())];
            Ok(Matmul { shapes, operands: [for_other(0)?, for_other(1)?] })
        })
    }
}

struct Matmul {
    shapes: [Dims; 2],
    operands: [Option<SavedVariable>; 2],
}

impl Backward for Matmul {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        // All three as matrices: a row has its dimension in front, a column behind.
        let [mut a_shape, mut b_shape] = self.shapes.clone();
        let mut dy_shape = Dims::from_slice(cx.dy().shape());
        if b_shape.len() == 1 {
            b_shape.push(1);
            dy_shape.push(1);
        }
        if a_shape.len() == 1 {
            a_shape.insert(0, 1);
            dy_shape.insert(dy_shape.len() - 1, 1);
        }
        let dy = cx.dy().reshape_to(&dy_shape)?;
        let grad_a = |b: Var| {
            let b = b.reshape_to(&b_shape)?.transpose(-2, -1)?;
            dy.matmul(&b)?.sum_to(&a_shape)?.reshape_to(&self.shapes[0])
        };
        let grad_b = |a: Var| {
            let a = a.reshape_to(&a_shape)?;
            if b_shape.len() == 2 {
                return rows(&a)?.transpose(-2, -1)?.matmul(&rows(&dy)?)?.reshape_to(&self.shapes[1]);
            }
            a.transpose(-2, -1)?.matmul(&dy)?.sum_to(&b_shape)?.reshape_to(&self.shapes[1])
        };
        let other = |i: usize| self.operands[1 - i].as_ref().filter(|_| cx.needs(i));
        let da = other(0).map(|b| grad_a(cx.get(b)?)).transpose()?;
        let db = other(1).map(|a| grad_b(cx.get(a)?)).transpose()?;
        grads2(da, db)
    }
}

/// The rows of all matrices as one matrix.
pub(super) fn rows(x: &Var) -> Result<Var> {
    let (lead, width) = x.shape().split_at(x.rank() - 1);
    x.reshape_to(&[lead.iter().product(), width[0]])
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold_for_every_pairing_of_ranks() {
        let pairs: [(&[usize], &[usize]); 8] = [
            (&[4], &[4]),
            (&[3, 4], &[4]),
            (&[4], &[4, 2]),
            (&[3, 4], &[4, 2]),
            (&[2, 3, 4], &[4, 2]),
            (&[3, 4], &[2, 4, 2]),
            (&[2, 1, 3, 2], &[3, 2, 2]),
            (&[2, 3, 4], &[4]),
        ];
        for (a, b) in pairs {
            check_twice(&[a, b], |v| v[0].matmul(&v[1]));
        }
    }
}
