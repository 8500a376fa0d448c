//! Convolutions and transposed convolutions of sequences, images and volumes.

use phalanx_autograd::Var;
use phalanx_kernels::{Conv1dOptions, Conv3dOptions, ConvOptions};

use crate::error::label;
use crate::{Error, Init, Module, Parameter, Result, Scope, parameters};

/// A convolution of `[N, in, H, W]` with `out` kernels; of one image `[in, H, W]` the result is one image too.
pub struct Conv2d {
    /// `[out, in / groups, kh, kw]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    options: ConvOptions,
}

parameters!(Conv2d { weight, bias });

/// A convolution of `[N, in, L]` with `out` kernels; of one sequence `[in, L]` the result is one too.
pub struct Conv1d {
    /// `[out, in / groups, k]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    options: Conv1dOptions,
}

parameters!(Conv1d { weight, bias });

/// The transposed convolution of `[N, in, L]`.
pub struct ConvTranspose1d {
    /// `[in, out / groups, k]`
    pub weight: Parameter,
    /// `[out]`
    pub bias: Option<Parameter>,
    options: Conv1dOptions,
    output_padding: usize,
}

parameters!(ConvTranspose1d { weight, bias });

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
    init: Option<Init>,
}

impl Conv2dConfig {
    /// From `inputs` channels to `outputs`, with a bias.
    pub fn new(inputs: usize, outputs: usize, kernel: [usize; 2]) -> Conv2dConfig {
        let options = ConvOptions::default();
        Conv2dConfig { inputs, outputs, kernel, options, output_padding: [0; 2], bias: true, init: None }
    }

    /// With stride, padding, dilation and groups.
    #[must_use]
    pub fn with_options(self, options: ConvOptions) -> Conv2dConfig {
        Conv2dConfig { options, ..self }
    }

    /// With this stride.
    #[must_use]
    pub fn with_stride(self, stride: [usize; 2]) -> Conv2dConfig {
        self.with_options(ConvOptions { stride, ..self.options })
    }

    /// With this padding of zeros.
    #[must_use]
    pub fn with_padding(self, padding: [usize; 2]) -> Conv2dConfig {
        self.with_options(ConvOptions { padding, ..self.options })
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

    /// With these initial weights, and a bias of 0.
    #[must_use]
    pub fn with_init(self, init: Init) -> Conv2dConfig {
        Conv2dConfig { init: Some(init), ..self }
    }

    /// A convolution.
    ///
    /// # Errors
    /// If a channel count, kernel size, stride or dilation is 0, the groups do not divide the channels, or it cannot be
    /// allocated.
    pub fn init(self, scope: &Scope) -> Result<Conv2d> {
        let groups = self.groups(&label("Conv2d", scope.path()))?;
        let shape = [self.outputs, self.inputs / groups, self.kernel[0], self.kernel[1]];
        let (weight, bias) = weights_of(scope, &shape, self.bias.then_some(self.outputs), self.init)?;
        Ok(Conv2d { weight, bias, options: self.options })
    }

    /// A transposed convolution.
    ///
    /// # Errors
    /// If a channel count, kernel size, stride or dilation is 0, the groups do not divide the channels, or it cannot be
    /// allocated.
    pub fn init_transposed(self, scope: &Scope) -> Result<ConvTranspose2d> {
        let groups = self.groups(&label("ConvTranspose2d", scope.path()))?;
        let shape = [self.inputs, self.outputs / groups, self.kernel[0], self.kernel[1]];
        let (weight, bias) = weights_of(scope, &shape, self.bias.then_some(self.outputs), self.init)?;
        Ok(ConvTranspose2d { weight, bias, options: self.options, output_padding: self.output_padding })
    }

    fn groups(&self, what: &str) -> Result<usize> {
        let ConvOptions { stride, dilation, groups, .. } = self.options;
        groups_of(what, [self.inputs, self.outputs], [self.kernel, stride, dilation], groups)
    }
}

/// How a convolution of sequences is made.
#[derive(Clone, Copy, Debug)]
pub struct Conv1dConfig {
    inputs: usize,
    outputs: usize,
    kernel: usize,
    options: Conv1dOptions,
    output_padding: usize,
    bias: bool,
}

impl Conv1dConfig {
    /// From `inputs` channels to `outputs`, with a bias.
    pub fn new(inputs: usize, outputs: usize, kernel: usize) -> Conv1dConfig {
        let options = Conv1dOptions::default();
        Conv1dConfig { inputs, outputs, kernel, options, output_padding: 0, bias: true }
    }

    /// With this stride.
    #[must_use]
    pub fn with_stride(self, stride: usize) -> Conv1dConfig {
        self.with_options(Conv1dOptions { stride, ..self.options })
    }

    /// With this padding of zeros.
    #[must_use]
    pub fn with_padding(self, padding: usize) -> Conv1dConfig {
        self.with_options(Conv1dOptions { padding, ..self.options })
    }

    /// With stride, padding, dilation and groups.
    #[must_use]
    pub fn with_options(self, options: Conv1dOptions) -> Conv1dConfig {
        Conv1dConfig { options, ..self }
    }

    /// With this many more elements at the end, for a transposed convolution.
    #[must_use]
    pub fn with_output_padding(self, output_padding: usize) -> Conv1dConfig {
        Conv1dConfig { output_padding, ..self }
    }

    /// With a bias or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Conv1dConfig {
        Conv1dConfig { bias, ..self }
    }

    /// The layer.
    ///
    /// # Errors
    /// If a channel count, kernel size, stride or dilation is 0, the groups do not divide the channels, or it cannot be
    /// allocated.
    pub fn init(self, scope: &Scope) -> Result<Conv1d> {
        let groups = self.groups(&label("Conv1d", scope.path()))?;
        let shape = [self.outputs, self.inputs / groups, self.kernel];
        let (weight, bias) = weights(scope, &shape, self.bias.then_some(self.outputs))?;
        Ok(Conv1d { weight, bias, options: self.options })
    }

    /// A transposed convolution.
    ///
    /// # Errors
    /// If a channel count, kernel size, stride or dilation is 0, the groups do not divide the channels, or it cannot be
    /// allocated.
    pub fn init_transposed(self, scope: &Scope) -> Result<ConvTranspose1d> {
        let groups = self.groups(&label("ConvTranspose1d", scope.path()))?;
        let shape = [self.inputs, self.outputs / groups, self.kernel];
        let (weight, bias) = weights(scope, &shape, self.bias.then_some(self.outputs))?;
        Ok(ConvTranspose1d { weight, bias, options: self.options, output_padding: self.output_padding })
    }

    fn groups(&self, what: &str) -> Result<usize> {
        let Conv1dOptions { stride, dilation, groups, .. } = self.options;
        groups_of(what, [self.inputs, self.outputs], [[self.kernel], [stride], [dilation]], groups)
    }
}

/// The groups, if all sizes are at least 1 and the groups divide the channels.
pub(super) fn groups_of<const N: usize>(
    what: &str,
    [inputs, outputs]: [usize; 2],
    [kernel, stride, dilation]: [[usize; N]; 3],
    groups: usize,
) -> Result<usize> {
    let channels = [inputs, outputs];
    if channels.contains(&0) {
        return Err(Error::invalid(what, format!("got channels {channels:?}, wanted at least 1")));
    }
    let sizes = [("kernel", kernel), ("stride", stride), ("dilation", dilation)];
    if let Some((name, got)) = sizes.into_iter().find(|(_, sizes)| sizes.contains(&0)) {
        return Err(Error::invalid(what, format!("got {name} {got:?}, wanted at least 1")));
    }
    if groups == 0 || !inputs.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
        let why =
            format!("got {groups} groups of {inputs} and {outputs} channels, wanted groups that divide both");
        return Err(Error::invalid(what, why));
    }
    Ok(groups)
}

/// Weight and bias, both uniform within `1 / sqrt(fan_in)`.
pub(super) fn weights(
    scope: &Scope,
    shape: &[usize],
    bias: Option<usize>,
) -> Result<(Parameter, Option<Parameter>)> {
    weights_of(scope, shape, bias, None)
}

/// The same with initial weights of one's own, and a bias of 0.
fn weights_of(
    scope: &Scope,
    shape: &[usize],
    bias: Option<usize>,
    init: Option<Init>,
) -> Result<(Parameter, Option<Parameter>)> {
    let fan_in = shape[1..].iter().try_fold(1usize, |product, &n| product.checked_mul(n));
    let usual = Init::layer(fan_in.unwrap_or(usize::MAX));
    let [of_weight, of_bias] = init.map_or([usual; 2], |init| [init, Init::ZEROS]);
    let bias = bias.map(|outputs| scope.parameter("bias", &[outputs], of_bias)).transpose()?;
    Ok((scope.parameter("weight", shape, of_weight)?, bias))
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

impl Module for ConvTranspose1d {
    fn forward(&self, x: &Var) -> Result<Var> {
        let bias = self.bias.as_ref().map(Parameter::var);
        Ok(x.conv_transpose1d(&self.weight.var(), bias.as_ref(), &self.options, self.output_padding)?)
    }
}

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

    /// With this many more voxels at the end, for a transposed convolution.
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
        let groups = self.groups(&label("Conv3d", scope.path()))?;
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
        let groups = self.groups(&label("ConvTranspose3d", scope.path()))?;
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
