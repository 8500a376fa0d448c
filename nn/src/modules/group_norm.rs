//! Normalisation over groups of channels.

use phalanx_autograd::Var;

use crate::error::{at, from_zero};
use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

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

    /// With this added to the variance.
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
            return Err(Error::invalid(at("GroupNorm", scope.path()), why));
        }
        from_zero(&at("GroupNorm", scope.path()), "an eps of", eps)?;
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
