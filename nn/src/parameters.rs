//! [`Parameters`]: visiting all parameters and buffers of a module by name.

use std::sync::Arc;

use phalanx_tensor::Tensor;

use crate::scope::join;
use crate::{AnyUnit, Buffer, LoadOptions, Parameter, Result, load_state_dict_with};

/// What a visit comes by.
#[derive(Clone, Copy, Debug)]
pub enum Entry<'a> {
    /// A trained tensor.
    Parameter(&'a Parameter),
    /// One that is only kept.
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

/// Anything that has parameters. Implemented with [`crate::parameters!`] by naming the fields.
pub trait Parameters {
    /// Calls `visitor` with every parameter and buffer and its path (`path` in front), in order of registration.
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>));

    /// Calls `visitor` with every [`crate::Unit`] that is not inside another, in order of registration.
    fn visit_units(&self, _visitor: &mut dyn FnMut(&dyn AnyUnit)) {}

    /// Parameters that are used here and visited elsewhere: the table of a tied head.
    fn borrowed(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// The trained tensors with their paths; a shared one comes once, under its first path.
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

/// Every parameter and buffer by name, as PyTorch's `state_dict`. The tensors are the module's own, not copies. Of parameters
/// whose values are spread over ranks they have no elements here: to read or save one is an error that says what to do instead
/// ([`Tensor::why_withheld`]). See [`save`](crate::save) for a file.
pub fn state_dict(module: &(impl Parameters + ?Sized)) -> Vec<(String, Tensor)> {
    let mut entries = Vec::new();
    module.visit("", &mut |path, entry| entries.push((path.into(), entry.tensor())));
    entries
}

/// Copies saved tensors into the parameters and buffers of those names, converted to their dtypes and moved to their
/// devices. See [`load_state_dict_with`] for one that may fit in part only.
///
/// # Errors
/// If names are missing, not known, of another shape or come twice, or a parameter's values are not here; then nothing is changed.
pub fn load_state_dict(
    module: &(impl Parameters + ?Sized),
    entries: impl IntoIterator<Item = (String, Tensor)>,
) -> Result<()> {
    load_state_dict_with(module, entries, LoadOptions::default()).map(drop)
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
    join(path, name)
}

/// Implements [`Parameters`] for a struct by naming the fields that have some, in order of registration; a field
/// whose saved name differs is given as `field = "name"`. Generics stand in brackets in front.
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
