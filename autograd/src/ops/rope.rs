//! Rotary position embedding: each row of `x` [.., T, D] turned by its position. With `a, b` the row's halves and
//! `angle[i] = position * base^(-2i/D)`, `y = (a cos - b sin, b cos + a sin)`.
//!
//! Derivative: the rotation back. Only the positions are saved. Angles are computed in f64.
//! Source: Su et al.: RoFormer (2021), in the half-split form of GPT-NeoX.

use phalanx_kernels as kernels;
use phalanx_tensor::Tensor;

pub use phalanx_kernels::Rope;

use crate::{Backward, Cx, Grads, Result, Saver, Var, begins, grads1, record};

impl Var {
    /// The rotation by positions `offset, offset + 1, ..` or by `position_ids`, i64 `[T]` or `[B, T]`.
    ///
    /// # Errors
    /// If D is odd, or shapes, dtypes or devices do not fit.
    pub fn rope(&self, position_ids: Option<&Var>, config: &Rope) -> Result<Var> {
        let ids = position_ids.map(Var::tensor);
        self.turn(ids, config, Sense::Forth)
    }

    fn turn(&self, ids: Option<&Tensor>, config: &Rope, sense: Sense) -> Result<Var> {
        begins();
        let y = match sense {
            Sense::Forth => kernels::rope(self.tensor(), ids, config)?,
            Sense::Back => kernels::rope_backward(self.tensor(), ids, config)?,
        };
        record("rope", &[self], y, |_: &Saver<'_>| Ok(Turn { ids: ids.cloned(), config: *config, sense }))
    }
}

#[derive(Clone, Copy)]
enum Sense {
    Forth,
    Back,
}

struct Turn {
    ids: Option<Tensor>,
    config: Rope,
    sense: Sense,
}

impl Backward for Turn {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let back = match self.sense {
            Sense::Forth => Sense::Back,
            Sense::Back => Sense::Forth,
        };
        grads1(cx.dy().turn(self.ids.as_ref(), &self.config, back)?)
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::check_twice;

    #[test]
    fn first_and_second_derivatives_hold() {
        let config = super::Rope { base: 100.0, offset: 3 };
        check_twice(&[&[2, 3, 6]], |v| v[0].rope(None, &config));
    }
}
