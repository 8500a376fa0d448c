//! Convolutions of volumes.

use phalanx_autograd::Var;
use phalanx_kernels::Conv3dOptions;

use super::conv::{groups_of, weights};
use crate::error::at;
use crate::{Module, Parameter, Result, Scope, parameters};

/// A convolution of `[N, in, D, H, W]` with `out` kernels.
pub struct Conv3d {
    /// `[out, in / groups, kd, kh, kw]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    options: Conv3dOptions,
}

parameters!(Conv3d { weight, bias });

/// The transposed convolution of `[N, in, D, H, W]`.
pub struct ConvTranspose3d {
    /// `[in, out / groups, kd, kh, kw]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    options: Conv3dOptions,
    output_padding: [usize; 3],
}

parameters!(ConvTranspose3d { weight, bias });

/// How a convolution of volumes is made.
#[derive(Clone, Copy, Debug)]
pub struct Conv3dConfig {
    inputs: usize,
    outputs: usize,
    kernel: [usize; 3],
    options: Conv3dOptions,
    output_padding: [usize; 3],
    bias: bool,
}

impl Conv3dConfig {
    /// From `inputs` channels to `outputs`, with a bias.
    pub fn new(inputs: usize, outputs: usize, kernel: [usize; 3]) -> Conv3dConfig {
        let options = Conv3dOptions::default();
        Conv3dConfig { inputs, outputs, kernel, options, output_padding: [0; 3], bias: true }
    }

    /// With stride, padding, dilation and groups.
    #[must_use]
    pub fn with_options(self, options: Conv3dOptions) -> Conv3dConfig {
        Conv3dConfig { options, ..self }
    }

    /// With this many more places at the end, for a transposed convolution.
    #[must_use]
    pub fn with_output_padding(self, output_padding: [usize; 3]) -> Conv3dConfig {
        Conv3dConfig { output_padding, ..self }
    }

    /// With a bias or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Conv3dConfig {
        Conv3dConfig { bias, ..self }
    }

    /// A convolution.
    ///
    /// # Errors
    /// If a channel count, kernel size, stride or dilation is 0, the groups do not divide the channels, or it cannot be
    /// allocated.
    pub fn init(self, scope: &Scope) -> Result<Conv3d> {
        let groups = self.groups(&at("Conv3d", scope.path()))?;
        let shape = self.shape(self.outputs, self.inputs / groups);
        let (weight, bias) = weights(scope, &shape, self.bias.then_some(self.outputs))?;
        Ok(Conv3d { weight, bias, options: self.options })
    }

    /// A transposed convolution.
    ///
    /// # Errors
    /// If a channel count, kernel size, stride or dilation is 0, the groups do not divide the channels, or it cannot be
    /// allocated.
    pub fn init_transposed(self, scope: &Scope) -> Result<ConvTranspose3d> {
        let groups = self.groups(&at("ConvTranspose3d", scope.path()))?;
        let shape = self.shape(self.inputs, self.outputs / groups);
        let (weight, bias) = weights(scope, &shape, self.bias.then_some(self.outputs))?;
        Ok(ConvTranspose3d { weight, bias, options: self.options, output_padding: self.output_padding })
    }

    fn groups(&self, what: &str) -> Result<usize> {
        let Conv3dOptions { stride, dilation, groups, .. } = self.options;
        groups_of(what, [self.inputs, self.outputs], [self.kernel, stride, dilation], groups)
    }

    fn shape(&self, rows: usize, columns: usize) -> [usize; 5] {
        [rows, columns, self.kernel[0], self.kernel[1], self.kernel[2]]
    }
}

impl Module for Conv3d {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.conv3d(&self.weight.var(), self.bias.as_ref().map(Parameter::var).as_ref(), &self.options)?)
    }
}

impl Module for ConvTranspose3d {
    fn forward(&self, x: &Var) -> Result<Var> {
        let bias = self.bias.as_ref().map(Parameter::var);
        Ok(x.conv_transpose3d(&self.weight.var(), bias.as_ref(), &self.options, self.output_padding)?)
    }
}
