//! Convolutions.

use phalanx_autograd::Var;
use phalanx_kernels::{Conv1dOptions, ConvOptions};

use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

/// A convolution of `[N, in, H, W]` with `out` kernels.
pub struct Conv2d {
    /// `[out, in / groups, kh, kw]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    options: ConvOptions,
}

parameters!(Conv2d { weight, bias });

/// A convolution of `[N, in, L]` with `out` kernels.
pub struct Conv1d {
    /// `[out, in / groups, k]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    options: Conv1dOptions,
}

parameters!(Conv1d { weight, bias });

/// The transposed convolution of `[N, in, H, W]`.
pub struct ConvTranspose2d {
    /// `[in, out / groups, kh, kw]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    options: ConvOptions,
    output_padding: [usize; 2],
}

parameters!(ConvTranspose2d { weight, bias });

/// How a convolution of images is made.
#[derive(Clone, Copy, Debug)]
pub struct Conv2dConfig {
    inputs: usize,
    outputs: usize,
    kernel: [usize; 2],
    options: ConvOptions,
    output_padding: [usize; 2],
    bias: bool,
}

impl Conv2dConfig {
    /// From `inputs` channels to `outputs`, with a bias.
    pub fn new(inputs: usize, outputs: usize, kernel: [usize; 2]) -> Conv2dConfig {
        let options = ConvOptions::default();
        Conv2dConfig { inputs, outputs, kernel, options, output_padding: [0; 2], bias: true }
    }

    /// With stride, padding, dilation and groups.
    #[must_use]
    pub fn with_options(self, options: ConvOptions) -> Conv2dConfig {
        Conv2dConfig { options, ..self }
    }

    /// With this many more pixels at the end, for a transposed convolution.
    #[must_use]
    pub fn with_output_padding(self, output_padding: [usize; 2]) -> Conv2dConfig {
        Conv2dConfig { output_padding, ..self }
    }

    /// With a bias or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Conv2dConfig {
        Conv2dConfig { bias, ..self }
    }

    /// A convolution.
    ///
    /// # Errors
    /// If the groups do not divide the channels, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<Conv2d> {
        let groups = groups_of(self.options.groups, self.inputs, self.outputs)?;
        let shape = [self.outputs, self.inputs / groups, self.kernel[0], self.kernel[1]];
        let (weight, bias) = weights(scope, &shape, self.bias.then_some(self.outputs))?;
        Ok(Conv2d { weight, bias, options: self.options })
    }

    /// A transposed convolution.
    ///
    /// # Errors
    /// If the groups do not divide the channels, or it cannot be allocated.
    pub fn init_transposed(self, scope: &Scope) -> Result<ConvTranspose2d> {
        let groups = groups_of(self.options.groups, self.inputs, self.outputs)?;
        let shape = [self.inputs, self.outputs / groups, self.kernel[0], self.kernel[1]];
        let (weight, bias) = weights(scope, &shape, self.bias.then_some(self.outputs))?;
        Ok(ConvTranspose2d { weight, bias, options: self.options, output_padding: self.output_padding })
    }
}

/// How a convolution of sequences is made.
#[derive(Clone, Copy, Debug)]
pub struct Conv1dConfig {
    inputs: usize,
    outputs: usize,
    kernel: usize,
    options: Conv1dOptions,
    bias: bool,
}

impl Conv1dConfig {
    /// From `inputs` channels to `outputs`, with a bias.
    pub fn new(inputs: usize, outputs: usize, kernel: usize) -> Conv1dConfig {
        Conv1dConfig { inputs, outputs, kernel, options: Conv1dOptions::default(), bias: true }
    }

    /// With stride, padding, dilation and groups.
    #[must_use]
    pub fn with_options(self, options: Conv1dOptions) -> Conv1dConfig {
        Conv1dConfig { options, ..self }
    }

    /// With a bias or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Conv1dConfig {
        Conv1dConfig { bias, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If the groups do not divide the channels, or it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<Conv1d> {
        let groups = groups_of(self.options.groups, self.inputs, self.outputs)?;
        let shape = [self.outputs, self.inputs / groups, self.kernel];
        let (weight, bias) = weights(scope, &shape, self.bias.then_some(self.outputs))?;
        Ok(Conv1d { weight, bias, options: self.options })
    }
}

fn groups_of(groups: usize, inputs: usize, outputs: usize) -> Result<usize> {
    if groups == 0 || !inputs.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
        let why = format!("{groups} groups do not divide {inputs} and {outputs} channels");
        return Err(Error::invalid("convolution", why));
    }
    Ok(groups)
}

/// Weight and bias, both uniform within `1 / sqrt(fan_in)`.
fn weights(scope: &Scope, shape: &[usize], bias: Option<usize>) -> Result<(Parameter, Option<Parameter>)> {
    let init = Init::layer(shape[1..].iter().product());
    let bias = bias.map(|outputs| scope.parameter("bias", &[outputs], init)).transpose()?;
    Ok((scope.parameter("weight", shape, init)?, bias))
}

impl Module for Conv2d {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.conv2d(&self.weight.var(), self.bias.as_ref().map(Parameter::var).as_ref(), &self.options)?)
    }
}

impl Module for Conv1d {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.conv1d(&self.weight.var(), self.bias.as_ref().map(Parameter::var).as_ref(), &self.options)?)
    }
}

impl Module for ConvTranspose2d {
    fn forward(&self, x: &Var) -> Result<Var> {
        let bias = self.bias.as_ref().map(Parameter::var);
        Ok(x.conv_transpose2d(&self.weight.var(), bias.as_ref(), &self.options, self.output_padding)?)
    }
}
