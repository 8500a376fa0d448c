//! [`Sequential`]: modules one after the other, and [`SequentialConfig`], which numbers them.

mod config;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt::Display;
use std::ops::{Bound, Range, RangeBounds};

use phalanx_autograd::Var;

pub use config::SequentialConfig;

use crate::forward_hooks::{ForwardHookHandle, ForwardHooks};
use crate::mode::{Mode, modes};
use crate::scope::join;
use crate::{AnyUnit, Entry, Error, Module, Parameter, Parameters, Result, Unit, UnitPolicy};

/// Modules applied one after the other; their parameters' paths begin with their number.
///
/// [`SequentialConfig`] makes one of configurations. `Sequential::new().with(..)` takes modules that are ready, whose names
/// are then the caller's matter.
#[derive(Default)]
pub struct Sequential {
    modules: Vec<Box<dyn Module>>,
    /// The number of the first.
    first: usize,
    hooks: ForwardHooks,
    mode: Mode,
}

modes!(Sequential);

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

    /// The modules, taken apart. Hooks on them are left behind.
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

    /// The layer of a path (`2`, or `"2.0"` for the first one of a `Sequential` that is number 2), if it is there and of this
    /// type: to freeze a batch norm, to look at a weight.
    ///
    /// ```
    /// use phalanx_nn::{BatchNorm, BatchNormConfig, LinearConfig, Scope, SequentialConfig, tensor::{DType, Device}};
    /// let layers = SequentialConfig::new().with(LinearConfig::new(4, 3)).with(BatchNormConfig::new(3));
    /// let model = layers.init(&Scope::new(1, DType::F32, Device::CPU))?;
    /// model.get::<BatchNorm>(1).unwrap().eval(); // its statistics stay, while the rest trains
    /// # Ok::<(), phalanx_nn::Error>(())
    /// ```
    pub fn get<M: Module>(&self, path: impl Display) -> Option<&M> {
        let (owner, number) = self.find(&path.to_string())?;
        of_type(&**owner.modules.get(number - owner.first)?)
    }

    /// The numbers of its layers in paths: from 0, unless it is a [slice](Sequential::slice).
    pub fn numbers(&self) -> Range<usize> {
        self.first..self.first + self.modules.len()
    }

    /// Only the layers of these [numbers](Sequential::numbers), which they keep: the parameters of a slice `4..` have the
    /// paths `4.weight`, .., as in the whole. See [`SequentialConfig::slice`] for a stage that never has the other layers.
    ///
    /// # Errors
    /// If there are no such layers.
    pub fn slice(self, layers: impl RangeBounds<usize>) -> Result<Sequential> {
        let layers = within("Sequential::slice", layers, self.numbers())?;
        let (skipped, first) = (layers.start - self.first, layers.start);
        let modules = self.modules.into_iter().skip(skipped).take(layers.len()).collect();
        Ok(Sequential { modules, first, hooks: self.hooks, mode: self.mode })
    }

    /// The layers before number `at`, and those from there on. All keep their numbers.
    ///
    /// # Errors
    /// If `at` is beyond the end.
    pub fn split_at(mut self, at: usize) -> Result<(Sequential, Sequential)> {
        let rest = within("Sequential::split_at", at.., self.numbers())?;
        let modules = self.modules.split_off(rest.start - self.first);
        let (hooks, mode) = (self.hooks.clone(), self.mode.clone());
        let rest = Sequential { modules, first: rest.start, hooks, mode };
        Ok((self, rest))
    }

    /// The same layers, of which the policy makes [units](Unit): what ZeRO gathers and frees together. Paths, and so state
    /// dicts, stay as they are.
    ///
    /// ```
    /// use phalanx_nn::tensor::{DType, Device};
    /// use phalanx_nn::{LinearConfig, Parameters, Relu, Scope, SequentialConfig, UnitPolicy};
    /// let scope = Scope::new(1, DType::F32, Device::CPU);
    /// let layers = SequentialConfig::new().with(LinearConfig::new(4, 64)).with(Relu).with(LinearConfig::new(64, 2));
    /// let model = layers.init(&scope)?.into_units(&UnitPolicy::EachLayer);
    /// let mut units = 0;
    /// model.visit_units(&mut |_| units += 1);
    /// assert_eq!(units, 2);
    /// # Ok::<(), phalanx_nn::Error>(())
    /// ```
    #[must_use]
    pub fn into_units(self, policy: &UnitPolicy) -> Sequential {
        let modules = self.modules.into_iter().map(|module| policy.wrap(module)).collect();
        Sequential { modules, ..self }
    }

    /// Calls `hook` with the input and the output of a layer at every forward pass from now on; what it returns takes the
    /// output's place. The layer is named by its path: `2`, or `"2.0"` for the first one of a `Sequential` that is number 2.
    /// See [`Hooked`](crate::Hooked) for other modules.
    ///
    /// # Errors
    /// If there is no such layer.
    pub fn on_forward(
        &self,
        path: impl Display,
        hook: impl Fn(&Var, &Var) -> Result<Option<Var>> + Send + Sync + 'static,
    ) -> Result<ForwardHookHandle> {
        let path = path.to_string();
        let (owner, layer) = self.find(&path).ok_or_else(|| {
            let why = format!("there is no layer {path:?}; the layers are numbered {:?}", self.numbers());
            Error::invalid("on_forward", why)
        })?;
        Ok(owner.hooks.add(layer, hook))
    }

    /// The `Sequential` that has the layer of that path, and its number there.
    fn find(&self, path: &str) -> Option<(&Sequential, usize)> {
        let (number, rest) = path.split_once('.').map_or((path, None), |(number, rest)| (number, Some(rest)));
        let number: usize = number.parse().ok().filter(|number| self.numbers().contains(number))?;
        let module = self.modules.get(number - self.first)?;
        match rest {
            None => Some((self, number)),
            Some(rest) => of_type::<Sequential>(&**module)?.find(rest),
        }
    }
}

/// A module of this type, in whatever boxes and units.
fn of_type<M: Module>(module: &dyn Module) -> Option<&M> {
    let any: &dyn Any = module;
    if let Some(boxed) = any.downcast_ref::<Box<dyn Module>>() {
        return of_type(&**boxed);
    }
    if let Some(unit) = any.downcast_ref::<Unit<dyn Module>>() {
        return of_type(unit.module());
    }
    any.downcast_ref::<Unit<M>>().map(Unit::module).or_else(|| any.downcast_ref())
}

/// The range asked for, if it lies within these numbers.
fn within(what: &str, asked: impl RangeBounds<usize>, all: Range<usize>) -> Result<Range<usize>> {
    let start = match asked.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => all.start,
    };
    let end = match asked.end_bound() {
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => all.end,
    };
    if start < all.start || end > all.end || start > end {
        return Err(Error::invalid(what, format!("got layers {start}..{end}, wanted some of {all:?}")));
    }
    Ok(start..end)
}

impl Parameters for Sequential {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.numbers().zip(&self.modules).for_each(|(i, module)| module.visit(&join(path, i), visitor));
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
        let _mode = self.mode.enter();
        self.numbers().zip(&self.modules).try_fold(x.clone(), |x, (i, module)| {
            let y = module.forward(&x)?;
            self.hooks.run(i, &x, y)
        })
    }
}
