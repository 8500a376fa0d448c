//! Adagrad.

use phalanx_kernels::optim::{self as kernel, Slice};
use phalanx_tensor::Tensor;

use super::{At, Rule, adam::wrong_state};
use crate::Result;

/// The gradient over the root of the sum of all its squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    /// How the learning rate shrinks with the steps.
    pub lr_decay: f64,
    /// What the sum of squares begins with.
    pub initial_accumulator_value: f64,
    /// Added to the root.
    pub eps: f64,
}

impl Default for Adagrad {
    fn default() -> Adagrad {
        Adagrad { lr_decay: 0.0, initial_accumulator_value: 0.0, eps: 1e-10 }
    }
}

impl Rule for Adagrad {
    fn state(&self) -> Vec<&'static str> {
        vec!["sum"]
    }

    fn initial(&self) -> f64 {
        self.initial_accumulator_value
    }

    fn update(&self, slice: Slice<'_>, state: &mut [Tensor], at: At) -> Result<()> {
        let [sum] = state else { return Err(wrong_state(state.len(), 1)) };
        let At { lr, weight_decay, step } = at;
        let numbers = kernel::Adagrad { lr, lr_decay: self.lr_decay, eps: self.eps, weight_decay, step };
        Ok(kernel::adagrad_(slice, sum, numbers)?)
    }
}
