//! [`Module`]: a layer of one input, and [`Sequential`], several in a row.

use std::any::Any;
use std::sync::Arc;

use phalanx_autograd::Var;

use crate::{AnyUnit, Entry, Parameter, Parameters, Result};

/// A layer that maps one value to one value. It is [`Any`], so that whoever replaces layers can tell them apart.
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

/// Modules applied one after the other; their parameters' paths begin with their number.
#[derive(Default)]
pub struct Sequential {
    modules: Vec<Box<dyn Module>>,
}

impl Sequential {
    /// Without modules: the identity.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// With one more module at the end.
    #[must_use]
    pub fn with(mut self, module: impl Module + 'static) -> Sequential {
        self.modules.push(Box::new(module));
        self
    }

    /// The modules, taken apart.
    pub fn into_modules(self) -> Vec<Box<dyn Module>> {
        self.modules
    }

    /// The modules, in order.
    pub fn modules(&self) -> &[Box<dyn Module>] {
        &self.modules
    }

    /// The modules, in order, to put others in their places.
    pub fn modules_mut(&mut self) -> &mut [Box<dyn Module>] {
        &mut self.modules
    }
}

impl Parameters for Sequential {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.modules.visit(path, visitor);
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.modules.visit_units(visitor);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.modules.borrowed()
    }
}

impl Module for Sequential {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.modules.iter().try_fold(x.clone(), |x, module| module.forward(&x))
    }
}
