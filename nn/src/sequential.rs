//! [`Sequential`]: modules one after the other; [`SequentialConfig`], which builds it from configurations ([`Build`]).

#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt::Display;
use std::ops::{Bound, Range, RangeBounds};

use phalanx_autograd::Var;

use crate::forward_hooks::{ForwardHookHandle, ForwardHooks};
use crate::mode::{Mode, modes};
use crate::scope::join;
use crate::{
    AnyUnit, BatchNorm, BatchNormConfig, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Dropout, DropoutConfig,
    Embedding, EmbeddingConfig, Entry, Error, GroupNorm, GroupNormConfig, GroupedQueryAttention,
    GroupedQueryAttentionConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Module, Parameter,
    Parameters, Result, RmsNorm, RmsNormConfig, Scope, TransformerEncoderLayer,
    TransformerEncoderLayerConfig, WrapPolicy, WrappedUnit,
};

/// Modules applied one after the other; their parameters' paths begin with their number.
///
/// [`SequentialConfig`] builds one from configurations. `Sequential::new().with(..)` takes finished modules, whose parameters keep the
/// names that they were made with.
#[derive(Default)]
pub struct Sequential {
    modules: Vec<Box<dyn Module>>,
    /// The number of the first.
    first: usize,
    hooks: ForwardHooks,
    mode: Mode,
}

modes!(Sequential);

/// Makes what replaces a module, or nothing if it stays.
type Replacement<'a, E> = dyn FnMut(&dyn Any) -> Result<Option<Box<dyn Module>>, E> + 'a;

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

    /// The modules. Their forward hooks are dropped.
    pub fn into_modules(self) -> Vec<Box<dyn Module>> {
        self.modules
    }

    /// The modules, in order.
    pub fn modules(&self) -> &[Box<dyn Module>] {
        &self.modules
    }

    /// The modules, in order, to be replaced.
    pub fn modules_mut(&mut self) -> &mut [Box<dyn Module>] {
        &mut self.modules
    }

    /// Replaces each layer for which `replacement` has one, in inner sequences too, in order. It is called with every layer that is no
    /// `Sequential`.
    ///
    /// # Errors
    /// The first of `replacement`, which ends it.
    pub fn replace_layers<E>(&mut self, replacement: &mut Replacement<'_, E>) -> Result<(), E> {
        self.modules.iter_mut().try_for_each(|layer| replace(layer, replacement))
    }

    /// The layer at a path (`2`, or `"2.0"` for the first layer of a `Sequential` that is number 2), if it exists and has this type.
    /// Use it to freeze a batch norm or to read a weight.
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

    /// The numbers of its layers in paths. They begin at 0, unless it is a [slice](Sequential::slice).
    pub fn numbers(&self) -> Range<usize> {
        self.first..self.first + self.modules.len()
    }

    /// Only the layers of these [numbers](Sequential::numbers), which they keep: the parameters of a slice `4..` have the
    /// paths `4.weight`, .., as in the whole. See [`SequentialConfig::slice`] for a stage that never allocates the other layers.
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

    /// The same layers, some of them wrapped as [units](WrappedUnit) by the policy. ZeRO gathers and frees the parameters of a unit together.
    /// Paths, and so state dicts, do not change.
    ///
    /// ```
    /// use phalanx_nn::tensor::{DType, Device};
    /// use phalanx_nn::{LinearConfig, Parameters, Relu, Scope, SequentialConfig, WrapPolicy};
    /// let scope = Scope::new(1, DType::F32, Device::CPU);
    /// let layers = SequentialConfig::new().with(LinearConfig::new(4, 64)).with(Relu).with(LinearConfig::new(64, 2));
    /// let model = layers.init(&scope)?.into_units(&WrapPolicy::EachLayer);
    /// let mut units = 0;
    /// model.visit_units(&mut |_| units += 1);
    /// assert_eq!(units, 2);
    /// # Ok::<(), phalanx_nn::Error>(())
    /// ```
    #[must_use]
    pub fn into_units(self, policy: &WrapPolicy) -> Sequential {
        let modules = self.modules.into_iter().map(|module| policy.wrap(module)).collect();
        Sequential { modules, ..self }
    }

    /// Calls `hook` with the input and the output of a layer in every forward pass from now on. A value that it returns replaces the
    /// output. The layer is named by its path: `2`, or `"2.0"` for the first layer of a `Sequential` that is number 2.
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

/// The module of this type inside boxes and units.
fn of_type<M: Module>(module: &dyn Module) -> Option<&M> {
    let any: &dyn Any = module;
    if let Some(boxed) = any.downcast_ref::<Box<dyn Module>>() {
        return of_type(&**boxed);
    }
    if let Some(unit) = any.downcast_ref::<WrappedUnit<dyn Module>>() {
        return of_type(unit.module());
    }
    any.downcast_ref::<WrappedUnit<M>>().map(WrappedUnit::module).or_else(|| any.downcast_ref())
}

/// The range, if it is within these numbers.
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

fn replace<E>(layer: &mut Box<dyn Module>, replacement: &mut Replacement<'_, E>) -> Result<(), E> {
    let any: &mut dyn Any = &mut **layer;
    if let Some(inner) = any.downcast_mut::<Sequential>() {
        return inner.replace_layers(replacement);
    }
    if let Some(inner) = any.downcast_mut::<Box<dyn Module>>() {
        return replace(inner, replacement);
    }
    if let Some(new) = replacement(any)? {
        *layer = new;
    }
    Ok(())
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

/// Builds a [`Sequential`] from the configurations of its layers. Each layer is built in the scope of its number, so parameters are
/// named `0.weight`, `2.bias`, .. as in `torch.nn.Sequential`, where activations count too.
///
/// ```
/// use phalanx_nn::tensor::{DType, Device};
/// use phalanx_nn::{DropoutConfig, LinearConfig, Relu, Scope, SequentialConfig, state_dict};
/// let scope = Scope::new(1, DType::F32, Device::CPU);
/// let model = SequentialConfig::new()
///     .with(LinearConfig::new(1, 32))
///     .with(Relu)
///     .with(DropoutConfig::new(0.1))
///     .with(LinearConfig::new(32, 1))
///     .init(&scope)?;
/// let names: Vec<String> = state_dict(&model).into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["0.weight", "0.bias", "3.weight", "3.bias"]);
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
///
/// It is a configuration itself, so one may be a layer of another.
#[derive(Default)]
pub struct SequentialConfig {
    layers: Vec<LayerBuilder>,
    first: usize,
}

type LayerBuilder = Box<dyn FnOnce(&Scope) -> Result<Box<dyn Module>> + Send>;

impl SequentialConfig {
    /// Without layers: the identity.
    pub fn new() -> SequentialConfig {
        SequentialConfig::default()
    }

    /// With one more layer at the end: a configuration or a finished module.
    #[must_use]
    pub fn with(self, layer: impl Build + Send + 'static) -> SequentialConfig {
        self.with_fn(|scope| layer.build(scope))
    }

    /// With one more layer, which this function makes in its scope. Use it for modules of your own, and for configurations that
    /// make several kinds of layer (`|scope| config.init_transposed(scope)`).
    #[must_use]
    pub fn with_fn<M: Module>(
        mut self,
        layer: impl FnOnce(&Scope) -> Result<M> + Send + 'static,
    ) -> SequentialConfig {
        self.layers.push(Box::new(|scope| Ok(Box::new(layer(scope)?))));
        self
    }

    /// Only the layers of these numbers, which they keep. A pipeline's stage so allocates its own layers alone. Names and initial
    /// values are those of the whole.
    ///
    /// # Errors
    /// If there are no such layers.
    pub fn slice(self, layers: impl RangeBounds<usize>) -> Result<SequentialConfig> {
        let all = self.first..self.first + self.layers.len();
        let layers = within("SequentialConfig::slice", layers, all)?;
        let kept = self.layers.into_iter().skip(layers.start - self.first).take(layers.len());
        Ok(SequentialConfig { layers: kept.collect(), first: layers.start })
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The layers, in order, each at `scope.child(number)`.
    ///
    /// # Errors
    /// If a layer's settings make no sense, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<Sequential> {
        let made = |(number, layer): (usize, LayerBuilder)| {
            let scope = scope.child(number);
            layer(&scope).map_err(|error| named(error, &scope))
        };
        let modules = (self.first..).zip(self.layers).map(made).collect::<Result<_>>()?;
        Ok(Sequential { modules, first: self.first, ..Sequential::default() })
    }
}

/// The error with the layer's path, unless the message has one already.
fn named(error: Error, scope: &Scope) -> Error {
    match error {
        Error::Invalid { what, why } if !what.starts_with(scope.path()) && !what.starts_with("layer ") => {
            Error::invalid(format!("layer {}: {what}", scope.path()), why)
        }
        other => other,
    }
}

/// A layer's configuration or a finished layer, which [`SequentialConfig::with`] takes. Implement it for configurations of your own
/// modules.
pub trait Build {
    /// The layer.
    type Module: Module;

    /// The layer in this scope, whose path names its parameters. A finished layer is returned as it is.
    ///
    /// # Errors
    /// If the settings make no sense, or it cannot be allocated.
    fn build(self, scope: &Scope) -> Result<Self::Module>;
}

/// Activations, pools and other layers without parameters, and layers that were made before.
impl<M: Module> Build for M {
    type Module = M;

    fn build(self, _: &Scope) -> Result<M> {
        Ok(self)
    }
}

macro_rules! configs {
    ($($config:ty => $module:ty),* $(,)?) => {$(
        impl Build for $config {
            type Module = $module;

            fn build(self, scope: &Scope) -> Result<$module> {
                self.init(scope)
            }
        }
    )*};
}

configs! {
    BatchNormConfig => BatchNorm,
    Conv1dConfig => Conv1d,
    Conv2dConfig => Conv2d,
    DropoutConfig => Dropout,
    EmbeddingConfig => Embedding,
    GroupNormConfig => GroupNorm,
    GroupedQueryAttentionConfig => GroupedQueryAttention,
    LayerNormConfig => LayerNorm,
    LinearConfig => Linear,
    RmsNormConfig => RmsNorm,
    SequentialConfig => Sequential,
    TransformerEncoderLayerConfig => TransformerEncoderLayer,
}
