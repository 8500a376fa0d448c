//! Random zeroing of activations in training.

use std::sync::{Arc, Mutex, PoisonError};

use phalanx_autograd::{Var, repeated};
use phalanx_tensor::{Context, Window};

use crate::error::{at, share};
use crate::mode::{Mode, modes};
use crate::{Entry, Module, Parameters, Result, Scope};

/// In training, each element is 0 with probability `p`, else multiplied by `1 / (1 - p)`. In evaluation it is the identity: inside
/// [`nn::eval`](crate::eval) or [`nn::inference`](crate::inference), or after [`Dropout::eval`].
///
/// Each forward pass draws anew, as does each layer, and the scope's seed decides what is drawn. A micro-batch, another layout of
/// ranks and a recomputation draw what the whole batch on one device would:
/// [`RngKey`](phalanx_tensor::RngKey) says how. Clones are one layer.
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
    /// A dropout at this place. Two of one scope are two layers.
    ///
    /// # Errors
    /// If `p` is no probability.
    pub fn new(p: f64, scope: &Scope) -> Result<Dropout> {
        share(&at("Dropout", scope.path()), "a probability of", p)?;
        Ok(Dropout { p, site: scope.site(), mode: Mode::default(), calls: Arc::default() })
    }

    /// Whether it changes anything now.
    pub fn is_active(&self) -> bool {
        self.p > 0.0 && self.mode.is_training()
    }

    /// The output, of activations that lie at `window` in the global ones.
    ///
    /// # Errors
    /// If the dtype is no floating-point one.
    pub fn forward_in(&self, x: &Var, window: &Window) -> Result<Var> {
        self.drop_out(x, Some(window))
    }

    fn drop_out(&self, x: &Var, window: Option<&Window>) -> Result<Var> {
        match self.is_active() {
            true => Ok(x.dropout(self.p, self.site(), window)?),
            false => Ok(x.clone()),
        }
    }

    /// The number by which this call draws. While steps are counted, a layer that is called again in one draws anew.
    fn site(&self) -> u64 {
        let context = Context::current();
        if !context.rng.is_counted() {
            return self.site;
        }
        let call = repeated(|| self.calls.lock().unwrap_or_else(PoisonError::into_inner).next(&context));
        self.site.wrapping_add(call.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

/// Calls in one step: how many, for each part of the batch.
#[derive(Debug, Default)]
struct Calls {
    /// The step's number, and which setting of the key it is counted under.
    step: [u64; 2],
    of_rows: Vec<(u64, u64)>,
}

impl Calls {
    /// The number of this call among those of its step for the rows from the context's on.
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
