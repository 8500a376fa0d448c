//! [`Module`]: a layer of one input; [`Parameters`]: visits parameters and buffers by name; [`Buffer`]: a tensor that is saved with a
//! module but not trained.

use std::any::Any;
use std::sync::{Arc, RwLock};

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::{Category, Tensor, unpoisoned};

use crate::scope::join;
use crate::{AnyUnit, Parameter, Result};

/// A layer that maps one value to one value. It is [`Any`], so that code which replaces layers can ask for their types.
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

/// A tensor that [`Parameters::visit`] passes to the visitor.
#[derive(Clone, Copy, Debug)]
pub enum Entry<'a> {
    /// A trained tensor.
    Parameter(&'a Parameter),
    /// A tensor that is saved but not trained.
    Buffer(&'a Buffer),
}

impl Entry<'_> {
    /// The values.
    pub fn tensor(&self) -> Tensor {
        match self {
            Entry::Parameter(p) => p.tensor(),
            Entry::Buffer(b) => b.tensor(),
        }
    }

    pub(crate) fn load(&self, values: &Tensor) -> Result<()> {
        match self {
            Entry::Parameter(p) => p.load(values),
            Entry::Buffer(b) => b.load(values),
        }
    }
}

/// A value with parameters. [`crate::parameters!`] implements it from the names of the fields.
pub trait Parameters {
    /// Calls `visitor` with every parameter and buffer and its path (`path` in front), in order of registration.
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>));

    /// Calls `visitor` with every [`crate::WrappedUnit`] that is not inside another, switched on or off, in order of registration.
    fn visit_units(&self, _visitor: &mut dyn FnMut(&dyn AnyUnit)) {}

    /// Parameters that this module uses but another one visits, such as the table of a tied head.
    fn borrowed(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// The trained tensors with their paths. A shared one is listed once, under its first path.
    fn named_parameters(&self) -> Vec<(String, Parameter)> {
        let mut found: Vec<(String, Parameter)> = Vec::new();
        self.visit("", &mut |path, entry| {
            if let Entry::Parameter(p) = entry
                && !found.iter().any(|(_, known)| known.is(p))
            {
                found.push((path.into(), p.clone()));
            }
        });
        found
    }

    /// The trained tensors, each once.
    fn parameters(&self) -> Vec<Parameter> {
        self.named_parameters().into_iter().map(|(_, p)| p).collect()
    }
}

impl Parameters for Parameter {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        visitor(path, Entry::Parameter(self));
    }
}

impl Parameters for Buffer {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        visitor(path, Entry::Buffer(self));
    }
}

impl<T: Parameters> Parameters for Option<T> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.iter().for_each(|part| part.visit(path, visitor));
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.iter().for_each(|part| part.visit_units(visitor));
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.iter().flat_map(Parameters::borrowed).collect()
    }
}

impl<T: Parameters> Parameters for Vec<T> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.iter().enumerate().for_each(|(i, part)| part.visit(&join(path, i), visitor));
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.iter().for_each(|part| part.visit_units(visitor));
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.iter().flat_map(Parameters::borrowed).collect()
    }
}

impl<T: Parameters + ?Sized> Parameters for Box<T> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        (**self).visit(path, visitor);
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        (**self).visit_units(visitor);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        (**self).borrowed()
    }
}

impl<T: Parameters + ?Sized> Parameters for Arc<T> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        (**self).visit(path, visitor);
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        (**self).visit_units(visitor);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        (**self).borrowed()
    }
}

#[doc(hidden)]
pub fn join_path(path: &str, name: &str) -> String {
    if name.is_empty() { path.into() } else { join(path, name) }
}

/// Implements [`Parameters`] for a struct by naming the fields that have some, in order of registration; a field
/// whose saved name differs is given as `field = "name"`, and one that adds no name to those inside it as `field = ""`. Generics
/// stand in brackets in front.
///
/// ```
/// use phalanx_nn::{Linear, parameters};
/// struct Perceptron { c_fc: Linear, c_proj: Linear }
/// parameters!(Perceptron { c_fc, c_proj });
/// struct Wrapper<M> { inner: M }
/// parameters!([M: phalanx_nn::Parameters] Wrapper<M> { inner = "module" });
/// ```
#[macro_export]
macro_rules! parameters {
    ([$($generics:tt)*] $type:ty { $($field:ident $(= $name:literal)?),* $(,)? }) => {
        impl<$($generics)*> $crate::Parameters for $type {
            #[allow(unused_variables)]
            fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, $crate::Entry<'_>)) {
                $(
                    let name: &str = stringify!($field);
                    $(let name: &str = $name;)?
                    $crate::Parameters::visit(&self.$field, &$crate::join_path(path, name), visitor);
                )*
            }

            #[allow(unused_variables)]
            fn visit_units(&self, visitor: &mut dyn FnMut(&dyn $crate::AnyUnit)) {
                $($crate::Parameters::visit_units(&self.$field, visitor);)*
            }

            fn borrowed(&self) -> Vec<$crate::Parameter> {
                let parts: Vec<Vec<$crate::Parameter>> = vec![$($crate::Parameters::borrowed(&self.$field)),*];
                parts.concat()
            }
        }
    };
    ($type:ty { $($fields:tt)* }) => {
        $crate::parameters!([] $type { $($fields)* });
    };
}

/// A running statistic or another persistent tensor. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<RwLock<Tensor>>);

impl Buffer {
    /// A buffer that holds `tensor`.
    pub fn new(tensor: Tensor) -> Buffer {
        Buffer(Arc::new(RwLock::new(tensor.tagged(Category::Buffers))))
    }

    /// The tensor.
    pub fn tensor(&self) -> Tensor {
        unpoisoned(self.0.read()).clone()
    }

    /// Replaces the tensor.
    pub fn set(&self, tensor: Tensor) {
        *unpoisoned(self.0.write()) = tensor.tagged(Category::Buffers);
    }

    /// Copies values into its tensor, converted to its dtype and moved to its device.
    ///
    /// # Errors
    /// If the shape differs.
    pub fn load(&self, values: &Tensor) -> Result<()> {
        let mut held = self.tensor();
        let values = kernels::cast(&values.to_device(held.device(), false)?, held.dtype())?;
        Ok(kernels::copy_(&mut held, &values)?)
    }
}
