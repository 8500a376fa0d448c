//! [`ParameterOwner`]: the parallel wrapper that owns a parameter.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use phalanx_tensor::unpoisoned;

use super::{OBSERVED, OWNED, Parameter};
use crate::{Error, Result};

/// A use of a parameter that its [`ParameterOwner`] may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// An optimizer updates it, or is built over it.
    Update,
    /// The norm of gradients is computed.
    Norm,
    /// Its gradient is removed.
    ZeroGrad,
    /// The dtype or the place of its gradients is chosen.
    Gradients,
}

/// A parallel wrapper that owns parameters, such as one that shards them over ranks. Optimizers, norms and `zero_grad` ask it before
/// they use a parameter ([`Parameter::set_owner`]).
pub trait ParameterOwner: Send + Sync {
    /// Why this use is refused, and the remedy, as the end of a sentence that begins with the parameter's name. `None` allows it.
    fn refusal(&self, usage: Usage) -> Option<&'static str>;

    /// Is called when another wrapper becomes the owner of one of its parameters.
    fn replaced(&self) {}

    /// Whether [`ParameterOwner::before_use`] is to be called.
    fn observes_uses(&self) -> bool {
        false
    }

    /// Is called before an operation takes a parameter's values ([`Parameter::site`]), so that the wrapper can gather them. It returns
    /// no error: the operation that finds the values missing reports one, and so does the wrapper at its next call.
    fn before_use(&self, _parameter: &Parameter) {}
}

/// The parallel wrapper that owns it.
impl Parameter {
    /// Makes a wrapper its owner: the wrapper may refuse uses of the parameter from now on. It replaces an earlier owner, whose
    /// [`ParameterOwner::replaced`] is called.
    pub fn set_owner(&self, owner: Arc<dyn ParameterOwner>) {
        let earlier = self.replace_owner(Some(owner.clone())).filter(|earlier| !same(earlier, &owner));
        earlier.iter().for_each(|earlier| earlier.replaced());
    }

    /// Undoes [`Parameter::set_owner`], unless another wrapper has become the owner since.
    pub fn release_owner(&self, owner: &Arc<dyn ParameterOwner>) {
        if self.owner().is_some_and(|own| same(&own, owner)) {
            self.replace_owner(None);
        }
    }

    /// The wrapper that owns it.
    pub fn owner(&self) -> Option<Arc<dyn ParameterOwner>> {
        match self.flags() & OWNED {
            0 => None,
            _ => unpoisoned(self.0.owner.lock()).clone(),
        }
    }

    /// Sets the owner and returns the earlier one.
    fn replace_owner(&self, owner: Option<Arc<dyn ParameterOwner>>) -> Option<Arc<dyn ParameterOwner>> {
        let flags = match &owner {
            None => 0,
            Some(owner) if owner.observes_uses() => OWNED | OBSERVED,
            Some(_) => OWNED,
        };
        let mut held = unpoisoned(self.0.owner.lock());
        self.0.flags.fetch_and(!(OWNED | OBSERVED), Ordering::Relaxed);
        self.0.flags.fetch_or(flags, Ordering::Relaxed);
        std::mem::replace(&mut *held, owner)
    }

    /// Refuses a use that the owner does not allow.
    ///
    /// # Errors
    /// The owner's reason and the remedy.
    pub fn check_usage(&self, op: &str, usage: Usage) -> Result<()> {
        match self.owner().and_then(|owner| owner.refusal(usage)) {
            None => Ok(()),
            Some(why) => Err(Error::invalid(op, format!("{:?} {why}", self.name()))),
        }
    }
}

fn same(a: &Arc<dyn ParameterOwner>, b: &Arc<dyn ParameterOwner>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}
