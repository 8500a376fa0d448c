//! The frame of functions of several values, elementwise and broadcast: `y = f(a, b, ..)`.
//!
//! Derivative: `dy` times the partial derivative, summed over what was broadcast. All inputs are saved. Computed in
//! one pass by a fused kernel, or of differentiable operations if it is to be differentiated again.

use phalanx_tensor::{Result as TensorResult, Tensor};
use smallvec::SmallVec;

use crate::{Backward, Cx, Grads, Result, SavedVariable, Saver, Var, record};

/// Such a function's derivatives.
pub(crate) trait Broadcasting: Send + Sync + 'static {
    /// The operation's name.
    const NAME: &'static str;

    /// The gradient of input `i`, of the broadcast shape, by a kernel; `None` if there is none for this input.
    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>>;

    /// The same of differentiable operations.
    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var>;
}

/// Makes `y` the function's recorded result.
pub(crate) fn broadcasting<F: Broadcasting>(inputs: &[&Var], y: Tensor, function: F) -> Result<Var> {
    record(F::NAME, inputs, y, |s: &Saver<'_>| {
        let saved = (0..inputs.len()).map(|i| s.input(i)).collect::<Result<_>>()?;
        Ok(Node { saved, function })
    })
}

struct Node<F> {
    saved: SmallVec<[SavedVariable; 2]>,
    function: F,
}

impl<F: Broadcasting> Backward for Node<F> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x: SmallVec<[Var; 2]> = self.saved.iter().map(|s| cx.get(s)).collect::<Result<_>>()?;
        let grad = |i: usize| -> Result<Option<Var>> {
            if !cx.needs(i) {
                return Ok(None);
            }
            let fused = match cx.create_graph() {
                true => None,
                false => self.function.fused(i, &x, cx.dy().tensor())?,
            };
            let full = match fused {
                Some(dx) => Var::new(dx),
                None => self.function.composed(i, &x, cx.dy())?,
            };
            Ok(Some(cx.sum_to_input(i, full)?))
        };
        (0..x.len()).map(grad).collect()
    }
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Reduction;

    use crate::ops::testing::check_twice;
    use crate::ops::{KlReduction, KlTarget};
    use crate::{Result, Var};

    const PAIRS: [[&[usize]; 2]; 3] = [[&[2, 3], &[2, 3]], [&[2, 3], &[3]], [&[2, 1], &[1, 3]]];

    #[test]
    fn first_and_second_derivatives_are_right_under_broadcasting() {
        let positive = |x: &Var| x.add_scalar(1.6);
        for shapes in PAIRS {
            let check = |f: fn(&Var, &Var) -> Result<Var>| check_twice(&shapes, |v| f(&v[0], &v[1]));
            check(Var::sub);
            check(|a, b| a.div(&b.add_scalar(1.6)?));
            check_twice(&shapes, |v| positive(&v[0])?.pow(&v[1]));
            check(|a, b| a.square()?.maximum(&b.add_scalar(0.3)?));
            check(|a, b| a.square()?.minimum(&b.add_scalar(0.3)?));
            check(|a, b| a.square()?.where_(&b.gt_scalar(0.1)?, &b.square()?));
            check(|a, b| a.add(b)?.square()?.masked_fill(&b.gt_scalar(0.1)?, 3.0));
        }
    }

    #[test]
    fn losses_have_right_first_and_second_derivatives() {
        for shapes in [PAIRS[0]] {
            for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
                check_twice(&shapes, |v| v[0].mse_loss(&v[1], reduction));
                check_twice(&shapes, |v| v[0].square()?.l1_loss(&v[1], reduction));
                check_twice(&shapes, |v| v[0].square()?.smooth_l1_loss(&v[1], 0.4, reduction));
                let kind = KlReduction::Elements(reduction);
                check_twice(&shapes, |v| v[0].kl_div(&v[1], KlTarget::LogProbabilities, kind));
                check_twice(&shapes, |v| v[0].kl_div(&v[1].add_scalar(1.6)?, KlTarget::Probabilities, kind));
            }
        }
        let entropy = |v: &[Var]| {
            let [x, t, w, p] = [&v[0], &v[1].sigmoid()?, &v[2], &v[3].exp()?];
            x.binary_cross_entropy_with_logits(t, Some(w), Some(p), Reduction::Mean)
        };
        check_twice(&[&[2, 3], &[2, 3], &[2, 1], &[3]], entropy);
        check_twice(&[&[2, 3], &[2, 3]], |v| {
            v[0].binary_cross_entropy_with_logits(&v[1], None, None, Reduction::Sum)
        });
    }
}
