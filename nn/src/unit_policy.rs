//! [`UnitPolicy`]: which layers of a [`Sequential`] become units.

use std::any::Any;
use std::sync::Arc;

use crate::{Module, Parameters, Sequential, Unit};

/// Says of a layer whether it becomes a unit.
type Choice = Box<dyn Fn(&dyn Module) -> bool + Send + Sync>;

/// Which layers [`Sequential::into_units`] makes [units](Unit) of. Layers without parameters never become one, and what is
/// a unit already, or has some inside, stays as it is. What is left outside belongs to no unit.
#[non_exhaustive]
pub enum UnitPolicy {
    /// Every layer; of a `Sequential` inside, every layer of that.
    EachLayer,
    /// Every layer of at least so many elements. A `Sequential` inside is gone into; if it is large enough and none of its
    /// layers is, it becomes one unit.
    BySize(usize),
    /// Every layer of which this says so. A `Sequential` inside of which it does not is gone into.
    By(Choice),
}

impl UnitPolicy {
    /// Every layer of which `choose` says so; see [`UnitPolicy::By`].
    pub fn by(choose: impl Fn(&dyn Module) -> bool + Send + Sync + 'static) -> UnitPolicy {
        UnitPolicy::By(Box::new(choose))
    }

    /// Every layer of this type: a transformer's block.
    pub fn of_type<M: Module>() -> UnitPolicy {
        UnitPolicy::by(|module| (module as &dyn Any).is::<M>())
    }

    /// The layer, or the layers in it, as units.
    pub(crate) fn wrap(&self, module: Box<dyn Module>) -> Box<dyn Module> {
        let module = unboxed(module);
        if module.parameters().is_empty() || has_units(&*module) {
            return module;
        }
        let nested = (&*module as &dyn Any).is::<Sequential>();
        match self {
            UnitPolicy::By(choose) if choose(&*module) => unit(module),
            UnitPolicy::EachLayer if !nested => unit(module),
            UnitPolicy::BySize(least) if !nested => if_large(module, *least),
            UnitPolicy::BySize(least) => {
                let inside = self.inside(module);
                if has_units(&*inside) { inside } else { if_large(inside, *least) }
            }
            UnitPolicy::EachLayer | UnitPolicy::By(_) => self.inside(module),
        }
    }

    /// The layers of a `Sequential` as units; another module as it is.
    fn inside(&self, module: Box<dyn Module>) -> Box<dyn Module> {
        if !(&*module as &dyn Any).is::<Sequential>() {
            return module;
        }
        match (module as Box<dyn Any>).downcast::<Sequential>() {
            Ok(layers) => Box::new(layers.into_units(self)),
            Err(_) => unreachable!("its type was looked at"),
        }
    }
}

fn unit(module: Box<dyn Module>) -> Box<dyn Module> {
    Box::new(Unit::<dyn Module>::new(Arc::from(module)))
}

fn if_large(module: Box<dyn Module>, least: usize) -> Box<dyn Module> {
    let elements: usize = module.parameters().iter().map(|p| p.tensor().numel()).sum();
    if elements >= least { unit(module) } else { module }
}

fn has_units(module: &dyn Module) -> bool {
    let mut any = false;
    module.visit_units(&mut |_| any = true);
    any
}

/// A module out of the boxes that it was put into, so that its type shows.
fn unboxed(module: Box<dyn Module>) -> Box<dyn Module> {
    if !(&*module as &dyn Any).is::<Box<dyn Module>>() {
        return module;
    }
    match (module as Box<dyn Any>).downcast::<Box<dyn Module>>() {
        Ok(inner) => unboxed(*inner),
        Err(_) => unreachable!("its type was looked at"),
    }
}
