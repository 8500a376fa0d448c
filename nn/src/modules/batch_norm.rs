//! [`BatchNorm`]: normalisation over the batch, by channel, with running statistics.

use phalanx_autograd::{BatchNorm as Numbers, Var, is_recomputing};
use phalanx_kernels as kernels;
use phalanx_tensor::{Category, Context, DType, Device, Tensor};

use crate::error::{check_non_negative, check_probability, label};
use crate::mode::{Mode, modes};
use crate::{Buffer, Error, Init, Module, Parameter, Result, Scope, parameters};

/// Normalises each channel of `[N, C]` or `[N, C, ..]` to mean 0 and variance 1, then scales and shifts it. In training it uses the
/// batch's statistics and moves the running statistics towards them. In evaluation it uses the running statistics: inside
/// [`nn::eval`](crate::eval) or [`nn::inference`](crate::inference), or after [`BatchNorm::eval`], which freezes them while the rest of a
/// model is trained.
/// Cloning shares parameters and buffers. Source: Ioffe and Szegedy: Batch normalization (2015).
#[derive(Clone)]
pub struct BatchNorm {
    /// `[C]`; absent without affine map.
    pub weight: Option<Parameter>,
    /// `[C]`; absent without affine map.
    pub bias: Option<Parameter>,
    /// `[C]`; absent if not tracked.
    pub running_mean: Option<Buffer>,
    /// `[C]`; absent if not tracked.
    pub running_var: Option<Buffer>,
    /// Training batches seen (i64); absent if not tracked.
    pub num_batches_tracked: Option<Buffer>,
    momentum: Option<f64>,
    eps: f64,
    ranks: &'static [usize],
    mode: Mode,
}

modes!(BatchNorm);
parameters!(BatchNorm { weight, bias, running_mean, running_var, num_batches_tracked });

/// How a [`BatchNorm`] is made.
#[derive(Clone, Copy, Debug)]
pub struct BatchNormConfig {
    channels: usize,
    eps: f64,
    momentum: Option<f64>,
    affine: bool,
    tracked: bool,
}

impl BatchNormConfig {
    /// Over that many channels, affine, with running statistics.
    pub fn new(channels: usize) -> BatchNormConfig {
        BatchNormConfig { channels, eps: 1e-5, momentum: Some(0.1), affine: true, tracked: true }
    }

    /// With this epsilon, which is added to the variance.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> BatchNormConfig {
        BatchNormConfig { eps, ..self }
    }

    /// How far running statistics move towards a batch's. With `None` they are the mean over all batches.
    #[must_use]
    pub fn with_momentum(self, momentum: Option<f64>) -> BatchNormConfig {
        BatchNormConfig { momentum, ..self }
    }

    /// With weight and bias or without.
    #[must_use]
    pub fn with_affine(self, affine: bool) -> BatchNormConfig {
        BatchNormConfig { affine, ..self }
    }

    /// With running statistics or without.
    #[must_use]
    pub fn with_tracking(self, tracked: bool) -> BatchNormConfig {
        BatchNormConfig { tracked, ..self }
    }

    /// A layer for `[N, C]` and `[N, C, ..]`, with up to three more dimensions.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init(self, scope: &Scope) -> Result<BatchNorm> {
        self.for_ranks(scope, &[2, 3, 4, 5])
    }

    /// A layer that takes only `[N, C]` and `[N, C, L]`.
    ///
    /// # Errors
    /// If `eps` is negative, the momentum is not between 0 and 1, or it cannot be allocated.
    pub fn init_1d(self, scope: &Scope) -> Result<BatchNorm> {
        self.for_ranks(scope, &[2, 3])
    }

    /// A layer that takes only `[N, C, H, W]`.
    ///
    /// # Errors
    /// If `eps` is negative, the momentum is not between 0 and 1, or it cannot be allocated.
    pub fn init_2d(self, scope: &Scope) -> Result<BatchNorm> {
        self.for_ranks(scope, &[4])
    }

    /// A layer that takes only `[N, C, D, H, W]`.
    ///
    /// # Errors
    /// If `eps` is negative, the momentum is not between 0 and 1, or it cannot be allocated.
    pub fn init_3d(self, scope: &Scope) -> Result<BatchNorm> {
        self.for_ranks(scope, &[5])
    }

    fn for_ranks(self, scope: &Scope, ranks: &'static [usize]) -> Result<BatchNorm> {
        let BatchNormConfig { channels, eps, momentum, affine, tracked } = self;
        let what = label("BatchNorm", scope.path());
        check_non_negative(&what, "an eps of", eps)?;
        check_probability(&what, "a momentum of", momentum.unwrap_or(0.0))?;
        let _category = Context::with(|c| c.category = Category::Buffers);
        let full = |shape: &[usize], value: f64, dtype| {
            let made = || Ok::<_, Error>(Buffer::new(kernels::full(shape, value, dtype, scope.device())?));
            tracked.then(made).transpose()
        };
        let part = |name: &str, init| affine.then(|| scope.parameter(name, &[channels], init)).transpose();
        Ok(BatchNorm {
            weight: part("weight", Init::ONES)?,
            bias: part("bias", Init::ZEROS)?,
            running_mean: full(&[channels], 0.0, scope.dtype())?,
            running_var: full(&[channels], 1.0, scope.dtype())?,
            num_batches_tracked: full(&[], 0.0, DType::I64)?,
            momentum,
            eps,
            ranks,
            mode: Mode::default(),
        })
    }
}

impl BatchNorm {
    /// Whether it is in training mode now. Layers that replace it ask this.
    pub fn is_training(&self) -> bool {
        self.mode.is_training()
    }

    /// The epsilon that is added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Refuses an input with another number of dimensions than the layer takes.
    ///
    /// # Errors
    /// If it has others.
    pub fn check(&self, x: &Var) -> Result<()> {
        if self.ranks.contains(&x.rank()) {
            return Ok(());
        }
        let why = format!("got an input of shape {:?}, wanted {:?} dimensions", x.shape(), self.ranks);
        Err(Error::invalid("BatchNorm", why))
    }

    /// Counts a training batch, unless its forward pass is recomputed, and returns how far the running statistics move towards the
    /// batch's. Layers that compute the statistics in another way call this. Without a momentum the host waits for the number of batches.
    ///
    /// # Errors
    /// If the counter cannot be written.
    pub fn count(&self) -> Result<f64> {
        let Some(counter) = &self.num_batches_tracked else { return Ok(self.momentum.unwrap_or(0.1)) };
        if counter.tensor().device().is_meta() {
            return Ok(self.momentum.unwrap_or(1.0));
        }
        self.count_batch()?;
        match self.momentum {
            Some(momentum) => Ok(momentum),
            None => Ok(1.0 / counter.tensor().item::<i64>()?.max(1) as f64),
        }
    }

    /// Counts a training batch and moves the running statistics towards the batch's `mean` and unbiased `variance`, f64 `[C]`; does nothing
    /// while the forward pass is recomputed. Layers that compute the statistics in another way call this. The host waits for no GPU.
    ///
    /// # Errors
    /// If the statistics do not fit, or memory is short.
    pub fn track(&self, mean: &Tensor, variance: &Tensor) -> Result<()> {
        if is_recomputing() {
            return Ok(());
        }
        self.count_batch()?;
        let share = match (&self.num_batches_tracked, self.momentum) {
            (Some(counter), None) => {
                let seen = kernels::cast(&counter.tensor().reshape(&[1])?, DType::F64)?;
                kernels::rdiv_scalar(&kernels::clamp(&seen, Some(1.0.into()), None)?, 1.0.into())?
            }
            (_, momentum) => kernels::full(&[1], momentum.unwrap_or(0.1), DType::F64, mean.device())?,
        };
        let rest = kernels::rsub_scalar(&share, 1.0.into())?;
        for (buffer, new) in [(&self.running_mean, mean), (&self.running_var, variance)] {
            let Some(buffer) = buffer else { continue };
            let old = kernels::cast(&buffer.tensor(), DType::F64)?;
            buffer.load(&kernels::add(&kernels::mul(&old, &rest)?, &kernels::mul(new, &share)?)?)?;
        }
        Ok(())
    }

    /// Adds one to the number of batches where it is, so that the host waits for no GPU.
    fn count_batch(&self) -> Result<()> {
        let Some(counter) = self.num_batches_tracked.as_ref().filter(|_| !is_recomputing()) else {
            return Ok(());
        };
        let mut seen = counter.tensor();
        match seen.device() {
            Device::Meta(_) => {}
            Device::Cpu(_) => {
                let next = seen.item::<i64>()? + 1;
                kernels::fill_(&mut seen, next)?;
            }
            Device::Cuda(_) => {
                let next = kernels::add_scalar(&seen, 1i64.into())?;
                kernels::copy_(&mut seen, &next)?;
            }
        }
        Ok(())
    }
}

impl Module for BatchNorm {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.check(x)?;
        let trains = self.is_training();
        let training = trains || self.running_mean.is_none();
        let momentum = if trains { self.count()? } else { 0.0 };
        let (weight, bias) =
            (self.weight.as_ref().map(Parameter::var), self.bias.as_ref().map(Parameter::var));
        let mut running: Option<[Tensor; 2]> = match (&self.running_mean, &self.running_var) {
            (Some(mean), Some(var)) => Some([mean.tensor(), var.tensor()]),
            _ => None,
        };
        let numbers = Numbers { training, momentum, eps: self.eps };
        Ok(x.batch_norm(running.as_mut().map(|r| r.each_mut()), weight.as_ref(), bias.as_ref(), &numbers)?)
    }
}
