//! Normalisation of each channel of each item.

use phalanx_autograd::Var;

use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

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

    /// With this added to the variance.
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
