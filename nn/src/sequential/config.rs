//! [`SequentialConfig`]: the layers' configurations, which get the numbers of their places.

use std::ops::RangeBounds;

use super::{Sequential, within};
use crate::{Build, Error, Module, Result, Scope};

/// How a [`Sequential`] is made of its layers' configurations: each is built at the place of its number, so parameters and
/// random draws are named `0.weight`, `2.bias`, .. as in `torch.nn.Sequential`, where activations count too.
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
/// It is a configuration itself, so that one may stand in another.
#[derive(Default)]
pub struct SequentialConfig {
    layers: Vec<Maker>,
    first: usize,
}

type Maker = Box<dyn FnOnce(&Scope) -> Result<Box<dyn Module>> + Send>;

impl SequentialConfig {
    /// Without layers: the identity.
    pub fn new() -> SequentialConfig {
        SequentialConfig::default()
    }

    /// With one more layer at the end: a configuration, or a module that is ready.
    #[must_use]
    pub fn with(self, layer: impl Build + Send + 'static) -> SequentialConfig {
        self.with_fn(|scope| layer.build(scope))
    }

    /// With one more layer, which this function makes in its scope: for modules of your own, and for configurations that
    /// make several kinds (`|scope| config.init_transposed(scope)`).
    #[must_use]
    pub fn with_fn<M: Module>(
        mut self,
        layer: impl FnOnce(&Scope) -> Result<M> + Send + 'static,
    ) -> SequentialConfig {
        self.layers.push(Box::new(|scope| Ok(Box::new(layer(scope)?))));
        self
    }

    /// Only the layers of these numbers, which they keep: a pipeline's stage, of which the others are never allocated. Names
    /// and initial values are those of the whole.
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
        let made = |(number, layer): (usize, Maker)| {
            let scope = scope.child(number);
            layer(&scope).map_err(|error| named(error, &scope))
        };
        let modules = (self.first..).zip(self.layers).map(made).collect::<Result<_>>()?;
        Ok(Sequential { modules, first: self.first, ..Sequential::default() })
    }
}

/// The error with the layer's path, unless it says that already.
fn named(error: Error, scope: &Scope) -> Error {
    match error {
        Error::Invalid { what, why } if !what.starts_with(scope.path()) && !what.starts_with("layer ") => {
            Error::invalid(format!("layer {}: {what}", scope.path()), why)
        }
        other => other,
    }
}
