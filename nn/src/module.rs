//! [`Module`]: a layer of one input.

use std::any::Any;
use std::sync::Arc;

use phalanx_autograd::Var;

use crate::{Parameters, Result};

/// A layer that maps one value to one value. It is [`Any`], so that whoever replaces layers can tell them apart.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module",
    note = "a configuration becomes a module by its `init(&scope)`, or as a layer of a `SequentialConfig`"
)]
pub trait Module: Parameters + Any + Send + Sync {
    /// The layer's output.
    ///
    /// # Errors
    /// If the input does not fit.
    fn forward(&self, x: &Var) -> Result<Var>;
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn forward(&self, x: &Var) -> Result<Var> {
        (**self).forward(x)
    }
}

impl<M: Module + ?Sized> Module for Arc<M> {
    fn forward(&self, x: &Var) -> Result<Var> {
        (**self).forward(x)
    }
}
