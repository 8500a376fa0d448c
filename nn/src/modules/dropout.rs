//! Random zeroing of activations in training.

use std::sync::{Arc, Mutex};

use phalanx_autograd::{Var, repeated};
use phalanx_kernels::AttentionDropout;
use phalanx_tensor::{Context, Window, unpoisoned};

use crate::error::{check_probability, label};
use crate::mode::{Mode, modes};
use crate::{Entry, Module, Parameters, Result, Scope};

/// In training, each element is 0 with probability `p`, else multiplied by `1 / (1 - p)`. In evaluation it is the identity: inside
/// [`nn::eval`](crate::eval) or [`nn::inference`](crate::inference), or after [`Dropout::eval`].
///
/// Each layer draws its own mask in each forward pass, from the scope's seed. Micro-batches, other layouts of ranks and recomputations
/// draw the mask of the whole batch on one device; [`RngKey`](phalanx_tensor::RngKey) explains how. Clones are one layer.
///
/// ```
/// use phalanx_nn::{Dropout, Module, Scope, eval, autograd::Var, tensor::{DType, Device}};
/// let dropout = Dropout::new(0.5, &Scope::new(1, DType::F32, Device::CPU))?;
/// let x = Var::from_slice(&[1f32; 64], &[64], Device::CPU)?;
/// let [first, second] = [dropout.forward(&x)?, dropout.forward(&x)?];
/// assert_ne!(first.to_vec::<f32>()?, second.to_vec::<f32>()?);
/// let _evaluation = eval();
/// assert_eq!(dropout.forward(&x)?.to_vec::<f32>()?, [1.0; 64]);
/// # Ok::<(), phalanx_nn::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Dropout {
    p: f64,
    site: u64,
    mode: Mode,
    calls: Arc<Mutex<Calls>>,
}

modes!(Dropout);

impl Dropout {
    /// A dropout in this scope. Two in one scope are two layers.
    ///
    /// # Errors
    /// If `p` is no probability.
    pub fn new(p: f64, scope: &Scope) -> Result<Dropout> {
        check_probability(&label("Dropout", scope.path()), "a probability of", p)?;
        Ok(Dropout { p, site: scope.site(), mode: Mode::default(), calls: Arc::default() })
    }

    /// Whether it is in training mode and `p` is above 0.
    pub fn is_active(&self) -> bool {
        self.p > 0.0 && self.mode.is_training()
    }

    /// The output, of activations at `window` of the global activations.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn forward_in(&self, x: &Var, window: &Window) -> Result<Var> {
        self.drop_out(x, Some(window))
    }

    /// `residual + dropout(x + bias)`, the end of a transformer's branch, in one pass and with the bits of the three operations. Without a
    /// window the rows are those of the context's part of the batch, as in [`Dropout::forward`].
    ///
    /// # Errors
    /// If the shapes do not fit, or the dtypes are no floating-point ones.
    pub fn bias_dropout_add(
        &self,
        x: &Var,
        bias: Option<&Var>,
        residual: &Var,
        window: Option<&Window>,
    ) -> Result<Var> {
        match (self.is_active(), bias) {
            (true, _) => Ok(x.bias_dropout_add(bias, residual, self.p, self.site(), window)?),
            (false, Some(_)) => Ok(x.bias_dropout_add(bias, residual, 0.0, self.site, window)?),
            (false, None) => add_branch(residual, x),
        }
    }

    /// The dropout of probabilities inside attention's kernel, for heads from `first` on of `all`; none if it is not active.
    pub(crate) fn of_attention(&self, [all, first]: [usize; 2]) -> Option<AttentionDropout> {
        if !self.is_active() {
            return None;
        }
        let dropout = AttentionDropout::new(self.p, self.site())?;
        Some(AttentionDropout { heads: Some([all as u64, first as u64]), ..dropout })
    }

    fn drop_out(&self, x: &Var, window: Option<&Window>) -> Result<Var> {
        match self.is_active() {
            true => Ok(x.dropout(self.p, self.site(), window)?),
            false => Ok(x.clone()),
        }
    }

    /// The site of this call's draw. While steps are counted, each call of a layer in a step has a site of its own.
    fn site(&self) -> u64 {
        let context = Context::current();
        if !context.rng.is_counted() {
            return self.site;
        }
        let call = repeated(|| unpoisoned(self.calls.lock()).next(&context));
        self.site.wrapping_add(call.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// The numbers of calls in one step, for each part of the batch.
#[derive(Debug, Default)]
struct Calls {
    /// The step's number, and the number of the RNG key's last setting.
    step: [u64; 2],
    of_rows: Vec<(u64, u64)>,
}

impl Calls {
    /// The number of this call among the calls of its step for the context's rows.
    fn next(&mut self, context: &Context) -> u64 {
        let step = [context.rng.step, context.seeding];
        if self.step != step {
            (self.step, self.of_rows) = (step, Vec::new());
        }
        let rows = context.batch_offset;
        let Some((_, calls)) = self.of_rows.iter_mut().find(|(first, _)| *first == rows) else {
            self.of_rows.push((rows, 1));
            return 0;
        };
        *calls += 1;
        *calls - 1
    }
}

/// A residual stream and a branch's result, perhaps in another dtype, added in one pass: the stream from here on.
pub(crate) fn add_branch(stream: &Var, branch: &Var) -> Result<Var> {
    match stream.dtype() == branch.dtype() {
        true => Ok(stream.add(branch)?),
        false => Ok(branch.bias_dropout_add(None, stream, 0.0, 0, None)?),
    }
}

/// How a [`Dropout`] is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutConfig {
    p: f64,
}

impl DropoutConfig {
    /// With this probability.
    pub fn new(p: f64) -> DropoutConfig {
        DropoutConfig { p }
    }

    /// The layer.
    ///
    /// # Errors
    /// If `p` is no probability.
    pub fn init(self, scope: &Scope) -> Result<Dropout> {
        Dropout::new(self.p, scope)
    }
}

impl Parameters for Dropout {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
}

impl Module for Dropout {
    fn forward(&self, x: &Var) -> Result<Var> {
        self.drop_out(x, None)
    }
}
