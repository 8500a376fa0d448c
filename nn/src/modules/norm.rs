//! Normalisation by the statistics of each item alone: [`LayerNorm`] and [`RmsNorm`] over the last dimensions, [`GroupNorm`] over groups
//! of channels, [`InstanceNorm`] over each channel.

use phalanx_autograd::Var;
use phalanx_tensor::DType;

use crate::error::{check_non_negative, label};
use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

/// `(x - mean) / sqrt(var + eps) * weight + bias`, mean and variance over the last dimensions.
pub struct LayerNorm {
    /// The normalized shape; absent without affine map.
    pub weight: Option<Parameter>,
    /// The normalized shape; absent without affine map.
    pub bias: Option<Parameter>,
    shape: Vec<usize>,
    eps: f64,
}

parameters!(LayerNorm { weight, bias });

/// How a [`LayerNorm`] is made.
#[derive(Clone, Debug)]
pub struct LayerNormConfig {
    shape: Vec<usize>,
    eps: f64,
    affine: bool,
    bias: bool,
}

impl LayerNormConfig {
    /// Over the last dimensions, of this shape.
    pub fn new(shape: &[usize]) -> LayerNormConfig {
        LayerNormConfig { shape: shape.into(), eps: 1e-5, affine: true, bias: true }
    }

    /// With this epsilon, which is added to the variance.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> LayerNormConfig {
        LayerNormConfig { eps, ..self }
    }

    /// With weight and bias or without.
    #[must_use]
    pub fn with_affine(self, affine: bool) -> LayerNormConfig {
        LayerNormConfig { affine, ..self }
    }

    /// With a bias beside the weight or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> LayerNormConfig {
        LayerNormConfig { bias, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the shape has no dimensions, `eps` is negative or no number, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<LayerNorm> {
        let LayerNormConfig { shape, eps, affine, bias } = self;
        let what = label("LayerNorm", scope.path());
        check_non_negative(&what, "an eps of", eps)?;
        if shape.is_empty() {
            return Err(Error::invalid(what, "got a shape of no dimensions, wanted those to normalise over"));
        }
        let weight = affine.then(|| scope.parameter("weight", &shape, Init::ONES)).transpose()?;
        let bias = (affine && bias).then(|| scope.parameter("bias", &shape, Init::ZEROS)).transpose()?;
        Ok(LayerNorm { weight, bias, shape, eps })
    }
}

/// A norm that begins a branch of a residual stream.
pub trait PreNorm: Module {
    /// The stream `x`, to be used in its place from here on, and its norm in the branch's dtype. The stream's gradient is added in the
    /// norm's backward pass.
    ///
    /// # Errors
    /// If the shapes do not fit.
    fn pre_forward(&self, x: &Var, dtype: DType) -> Result<(Var, Var)>;
}

impl PreNorm for LayerNorm {
    fn pre_forward(&self, x: &Var, dtype: DType) -> Result<(Var, Var)> {
        let [weight, bias] = self.affine();
        Ok(x.pre_layer_norm(&self.shape, weight.as_ref(), bias.as_ref(), self.eps, dtype)?)
    }
}

impl PreNorm for RmsNorm {
    fn pre_forward(&self, x: &Var, dtype: DType) -> Result<(Var, Var)> {
        Ok(x.pre_rms_norm(&self.shape, self.factor()?.as_ref(), self.eps, dtype)?)
    }
}

impl LayerNorm {
    /// `x + residual` in the dtype of `x`, and its norm in that of the residual, computed in one pass.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn add_forward(&self, x: &Var, residual: &Var) -> Result<(Var, Var)> {
        let [weight, bias] = self.affine();
        Ok(x.add_layer_norm(residual, &self.shape, weight.as_ref(), bias.as_ref(), self.eps)?)
    }

    fn affine(&self) -> [Option<Var>; 2] {
        [&self.weight, &self.bias].map(|p| p.as_ref().map(Parameter::var))
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Var) -> Result<Var> {
        let [weight, bias] = self.affine();
        Ok(x.layer_norm(&self.shape, weight.as_ref(), bias.as_ref(), self.eps)?)
    }
}

/// `x / sqrt(mean(x²) + eps) * weight`, the mean over the last dimensions.
/// Source: Zhang and Sennrich: Root mean square layer normalization (2019).
pub struct RmsNorm {
    /// The normalized shape; absent without scaling.
    pub weight: Option<Parameter>,
    shape: Vec<usize>,
    eps: f64,
    plus_one: bool,
}

parameters!(RmsNorm { weight });

/// How an [`RmsNorm`] is made.
#[derive(Clone, Debug)]
pub struct RmsNormConfig {
    shape: Vec<usize>,
    eps: f64,
    affine: bool,
    plus_one: bool,
}

impl RmsNormConfig {
    /// Over the last dimensions, of this shape.
    pub fn new(shape: &[usize]) -> RmsNormConfig {
        RmsNormConfig { shape: shape.into(), eps: 1e-5, affine: true, plus_one: false }
    }

    /// With this epsilon, which is added to the mean square.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> RmsNormConfig {
        RmsNormConfig { eps, ..self }
    }

    /// With a weight or without.
    #[must_use]
    pub fn with_affine(self, affine: bool) -> RmsNormConfig {
        RmsNormConfig { affine, ..self }
    }

    /// With a factor that is 1 more than the weight, which begins as 0: so weight decay draws the factor to 1. Gemma has it.
    #[must_use]
    pub fn with_plus_one(self, plus_one: bool) -> RmsNormConfig {
        RmsNormConfig { plus_one, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the shape has no dimensions, `eps` is negative or no number, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<RmsNorm> {
        let RmsNormConfig { shape, eps, affine, plus_one } = self;
        let what = label("RmsNorm", scope.path());
        check_non_negative(&what, "an eps of", eps)?;
        if shape.is_empty() {
            return Err(Error::invalid(what, "got a shape of no dimensions, wanted those to normalise over"));
        }
        let init = if plus_one { Init::ZEROS } else { Init::ONES };
        let weight = affine.then(|| scope.parameter("weight", &shape, init)).transpose()?;
        Ok(RmsNorm { weight, shape, eps, plus_one })
    }
}

impl RmsNorm {
    /// `x + residual` in the dtype of `x`, and its norm in that of the residual, computed in one pass.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn add_forward(&self, x: &Var, residual: &Var) -> Result<(Var, Var)> {
        Ok(x.add_rms_norm(residual, &self.shape, self.factor()?.as_ref(), self.eps)?)
    }

    /// What normalised elements are multiplied with.
    fn factor(&self) -> Result<Option<Var>> {
        let weight = self.weight.as_ref().map(Parameter::var);
        Ok(if self.plus_one { weight.map(|weight| weight.add_scalar(1.0)).transpose()? } else { weight })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.rms_norm(&self.shape, self.factor()?.as_ref(), self.eps)?)
    }
}

/// Each of `groups` groups of channels of `[N, C, ..]` to mean 0 and variance 1, then scaled and shifted by channel.
/// Source: Wu and He: Group normalization (2018).
pub struct GroupNorm {
    /// `[C]`; absent without affine map.
    pub weight: Option<Parameter>,
    /// `[C]`; absent without affine map.
    pub bias: Option<Parameter>,
    groups: usize,
    eps: f64,
}

parameters!(GroupNorm { weight, bias });

/// How a [`GroupNorm`] is made.
#[derive(Clone, Copy, Debug)]
pub struct GroupNormConfig {
    groups: usize,
    channels: usize,
    eps: f64,
    affine: bool,
}

impl GroupNormConfig {
    /// Over `channels` channels in `groups` groups.
    pub fn new(groups: usize, channels: usize) -> GroupNormConfig {
        GroupNormConfig { groups, channels, eps: 1e-5, affine: true }
    }

    /// With this epsilon, which is added to the variance.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> GroupNormConfig {
        GroupNormConfig { eps, ..self }
    }

    /// With weight and bias or without.
    #[must_use]
    pub fn with_affine(self, affine: bool) -> GroupNormConfig {
        GroupNormConfig { affine, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the groups do not divide the channels, `eps` is negative or no number, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<GroupNorm> {
        let GroupNormConfig { groups, channels, eps, affine } = self;
        if groups == 0 || !channels.is_multiple_of(groups) {
            let why =
                format!("got {groups} groups of {channels} channels, wanted groups that divide the channels");
            return Err(Error::invalid(label("GroupNorm", scope.path()), why));
        }
        check_non_negative(&label("GroupNorm", scope.path()), "an eps of", eps)?;
        let part = |name: &str, init| affine.then(|| scope.parameter(name, &[channels], init)).transpose();
        Ok(GroupNorm { weight: part("weight", Init::ONES)?, bias: part("bias", Init::ZEROS)?, groups, eps })
    }
}

impl Module for GroupNorm {
    fn forward(&self, x: &Var) -> Result<Var> {
        let (weight, bias) =
            (self.weight.as_ref().map(Parameter::var), self.bias.as_ref().map(Parameter::var));
        Ok(x.group_norm(self.groups, weight.as_ref(), bias.as_ref(), self.eps)?)
    }
}

/// Each channel of each item of `[N, C, ..]` (or of one item `[C, ..]`) to mean 0 and variance 1 by its own statistics, in training
/// and evaluation alike, then scaled and shifted by channel if it is affine.
/// Source: Ulyanov, Vedaldi, Lempitsky: Instance normalization (2016).
pub struct InstanceNorm {
    /// `[C]`; absent without affine map.
    pub weight: Option<Parameter>,
    /// `[C]`; absent without affine map.
    pub bias: Option<Parameter>,
    channels: usize,
    eps: f64,
    rank: usize,
}

parameters!(InstanceNorm { weight, bias });

/// How an [`InstanceNorm`] is made.
#[derive(Clone, Copy, Debug)]
pub struct InstanceNormConfig {
    channels: usize,
    eps: f64,
    affine: bool,
}

impl InstanceNormConfig {
    /// Over that many channels, without weight and bias, as in PyTorch.
    pub fn new(channels: usize) -> InstanceNormConfig {
        InstanceNormConfig { channels, eps: 1e-5, affine: false }
    }

    /// With this epsilon, which is added to the variance.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> InstanceNormConfig {
        InstanceNormConfig { eps, ..self }
    }

    /// With weight and bias or without.
    #[must_use]
    pub fn with_affine(self, affine: bool) -> InstanceNormConfig {
        InstanceNormConfig { affine, ..self }
    }

    /// A layer for `[N, C, L]` and `[C, L]`.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init_1d(self, scope: &Scope) -> Result<InstanceNorm> {
        self.init(scope, 3)
    }

    /// A layer for `[N, C, H, W]` and `[C, H, W]`.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init_2d(self, scope: &Scope) -> Result<InstanceNorm> {
        self.init(scope, 4)
    }

    /// A layer for `[N, C, D, H, W]` and `[C, D, H, W]`.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init_3d(self, scope: &Scope) -> Result<InstanceNorm> {
        self.init(scope, 5)
    }

    fn init(self, scope: &Scope, rank: usize) -> Result<InstanceNorm> {
        let InstanceNormConfig { channels, eps, affine } = self;
        let part = |name: &str, init| affine.then(|| scope.parameter(name, &[channels], init)).transpose();
        let (weight, bias) = (part("weight", Init::ONES)?, part("bias", Init::ZEROS)?);
        Ok(InstanceNorm { weight, bias, channels, eps, rank })
    }
}

impl Module for InstanceNorm {
    fn forward(&self, x: &Var) -> Result<Var> {
        let single = x.rank() + 1 == self.rank;
        let batch = if single { x.unsqueeze(0)? } else { x.clone() };
        if batch.rank() != self.rank || batch.shape()[1] != self.channels {
            let why = format!(
                "got an input of shape {:?}, wanted {} dimensions, or one less, with {} channels",
                x.shape(),
                self.rank,
                self.channels
            );
            return Err(Error::invalid("InstanceNorm", why));
        }
        let (weight, bias) =
            (self.weight.as_ref().map(Parameter::var), self.bias.as_ref().map(Parameter::var));
        let y = batch.instance_norm(weight.as_ref(), bias.as_ref(), self.eps)?;
        Ok(if single { y.squeeze(&[0])? } else { y })
    }
}
