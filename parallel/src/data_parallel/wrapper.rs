//! [`DataParallel`]: the calls that a training loop makes to ranks that share a batch, whatever each rank keeps. [`NoSync`] and
//! [`Gathered`] are its guards, [`SingleDevice`] its implementation for one device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_nn::autograd::Var;
use phalanx_nn::{
    Clip, Parameter, Parameters, Peers, Squares, grad_squares, load_state_dict, norm_of, state_dict,
};
use phalanx_tensor::Tensor;

use crate::Result;
use crate::comm::Traffic;
use crate::sharded_tensor::ShardedTensor;

/// Tensors by name.
pub type Entries = Vec<(String, Tensor)>;

/// The data-parallel wrapper of a model, as a trait: [`Ddp`](super::Ddp), [`Zero`](crate::sharded::Zero), or a
/// single device ([`SingleDevice`]), so that one training loop serves all three.
///
/// ```text
/// optimizer over parameters(), with_peers(peers())
/// each step:  for all micro-batches but the last: let _accumulate = no_sync(); backward(loss)
///             backward(loss); grad_norm(); optimizer.step_scaled(..); updated(); zero_grad()
/// ```
///
/// The default implementations hold where every rank keeps the whole model.
pub trait DataParallel: Send + Sync {
    /// The parameters for an optimizer: the trained parameters, or this rank's parts of them.
    fn parameters(&self) -> Vec<Parameter>;

    /// While the result lives, backward passes only accumulate on this rank.
    fn no_sync(&self) -> NoSync;

    /// Forgets the gradients of these, and those that passes without synchronisation have left.
    ///
    /// # Errors
    /// If a gradient's buffer cannot be written.
    fn zero_grad(&self) -> Result<()> {
        Ok(self.parameters().iter().try_for_each(Parameter::zero_grad)?)
    }

    /// Before a backward pass that the caller runs.
    ///
    /// # Errors
    /// As the implementation's.
    fn begin(&self) -> Result<()> {
        Ok(())
    }

    /// After a backward pass that the caller has run.
    ///
    /// # Errors
    /// As the implementation's.
    fn finish(&self) -> Result<()> {
        Ok(())
    }

    /// Runs backward; afterwards the parameters' gradients are those of all ranks, added.
    ///
    /// # Errors
    /// As the implementation's.
    fn backward(&self, loss: &Var) -> Result<()> {
        self.begin()?;
        loss.backward()?;
        self.finish()
    }

    /// Each parameter's sum of squared gradients, on their device and in order of the names, the same bits on all
    /// ranks and in every layout. For parameters that are sharded over other ranks (tensor parallelism) it covers
    /// this rank's part only ([`crate::tensor_parallel::sum_squares`]).
    ///
    /// # Errors
    /// As the implementation's.
    fn grad_squares(&self) -> Result<Squares> {
        Ok(grad_squares(&self.parameters())?)
    }

    /// The Euclidean norm of the gradients, the same bits on all ranks and in every layout that does not split layers.
    ///
    /// # Errors
    /// As the implementation's.
    fn grad_norm(&self) -> Result<f64> {
        Ok(norm_of(&self.grad_squares()?)?)
    }

    /// The norm of all gradients and the factor that clips it to `max_norm`, for [`phalanx_nn::Optimizer::step_scaled`].
    ///
    /// # Errors
    /// As [`DataParallel::grad_norm`], or if the bound is not positive.
    fn clip_grad_norm(&self, max_norm: f64) -> Result<Clip> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            let why = format!("got a bound of {max_norm}, wanted more than 0");
            return Err(phalanx_nn::Error::invalid("clip_grad_norm", why).into());
        }
        Ok(Clip::new(self.grad_norm()?, max_norm))
    }

    /// Must be called by all ranks after the optimizer's step: gives all ranks the updated shards (ZeRO); does
    /// nothing for DDP.
    ///
    /// # Errors
    /// As the implementation's.
    fn updated(&self) -> Result<()> {
        Ok(())
    }

    /// The ranks that have parts of these parameters, for [`phalanx_nn::Optimizer::with_peers`]; none where no rank has cut them.
    fn peers(&self) -> Option<Arc<dyn Peers>> {
        None
    }

    /// The traffic of this rank for values and gradients so far.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    /// Lets the model hold all its values until the result is dropped.
    ///
    /// # Errors
    /// As the implementation's.
    fn gathered(&self) -> Result<Option<Gathered>> {
        Ok(None)
    }

    /// The whole model's state dict, at least on rank 0. All ranks call it.
    ///
    /// # Errors
    /// As the implementation's.
    fn full_state_dict(&self, model: &dyn Parameters) -> Result<Entries> {
        Ok(state_dict(model))
    }

    /// Takes the model's values from a whole state dict, which every rank has.
    ///
    /// # Errors
    /// If names or shapes do not fit.
    fn load_full_state_dict(&self, model: &dyn Parameters, entries: Entries) -> Result<()> {
        Ok(load_state_dict(model, entries)?)
    }

    /// The parts of the model's parameters and buffers that this rank keeps. The tensors are its own, not copies; after they were
    /// written, all ranks call [`DataParallel::reloaded`].
    ///
    /// # Errors
    /// As the implementation's.
    fn parts(&self, model: &dyn Parameters) -> Result<Vec<ShardedTensor>> {
        Ok(ShardedTensor::all_of(model))
    }

    /// After the tensors of [`DataParallel::parts`] were written: gives all ranks the values that each has. All ranks
    /// call it.
    ///
    /// # Errors
    /// As the implementation's.
    fn reloaded(&self) -> Result<()> {
        Ok(())
    }

    /// The state of an optimizer of whole parameters, at least on rank 0, made of this rank's
    /// [`phalanx_nn::Optimizer::state_dict`], whose rule keeps tensors of these `kinds` ([`phalanx_nn::Rule::state`]).
    /// All ranks call it.
    ///
    /// # Errors
    /// As the implementation's.
    fn full_optimizer_state(&self, own: Entries, _kinds: &[&'static str]) -> Result<Entries> {
        Ok(own)
    }

    /// This rank's part of it, for [`phalanx_nn::Optimizer::load_state_dict`]. All ranks call it, after
    /// [`DataParallel::load_full_state_dict`].
    ///
    /// # Errors
    /// If a tensor is not of its parameter's shape, or as the implementation's.
    fn part_of_optimizer_state(&self, whole: Entries) -> Result<Entries> {
        Ok(whole)
    }
}

/// While it lives, the model holds all its values; see [`DataParallel::gathered`].
#[must_use = "values are freed when it is dropped"]
pub struct Gathered {
    _guard: Box<dyn Send + Sync>,
}

impl Gathered {
    /// Drops `guard`, which frees the values, when it is dropped itself.
    pub(crate) fn new(guard: impl Send + Sync + 'static) -> Gathered {
        Gathered { _guard: Box::new(guard) }
    }
}

/// The [`DataParallel`] of a model on one device, without other ranks.
pub struct SingleDevice {
    parameters: Vec<Parameter>,
    synchronise: Synchronise,
}

impl SingleDevice {
    /// Trains a model's parameters.
    pub fn new(model: &(impl Parameters + ?Sized)) -> SingleDevice {
        let parameters = model.parameters().into_iter().filter(Parameter::is_trained).collect();
        SingleDevice { parameters, synchronise: Synchronise::default() }
    }
}

impl DataParallel for SingleDevice {
    fn parameters(&self) -> Vec<Parameter> {
        self.parameters.clone()
    }
    fn no_sync(&self) -> NoSync {
        self.synchronise.off()
    }
}

/// Whether backward passes synchronise: while no [`NoSync`] of it lives.
#[derive(Clone, Default)]
pub(crate) struct Synchronise(Arc<AtomicUsize>);

impl Synchronise {
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// Not while the result lives.
    pub(crate) fn off(&self) -> NoSync {
        self.0.fetch_add(1, Ordering::Relaxed);
        NoSync(vec![self.clone()])
    }
}

/// See [`Ddp::no_sync`](super::Ddp::no_sync). Several may live at a time, and end in any order.
#[must_use = "gradients are added again when it is dropped"]
pub struct NoSync(Vec<Synchronise>);

impl NoSync {
    /// Both, as one.
    pub(crate) fn and(mut self, mut other: NoSync) -> NoSync {
        self.0.append(&mut other.0);
        self
    }
}

impl Drop for NoSync {
    fn drop(&mut self) {
        for Synchronise(offs) in &self.0 {
            offs.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_synchronise_when_the_last_one_has_ended() {
        let synchronise = Synchronise::default();
        let (first, second) = (synchronise.off(), synchronise.off());
        drop(first);
        assert!(!synchronise.is_on());
        drop(second);
        assert!(synchronise.is_on());
        let other = Synchronise::default();
        let both = synchronise.off().and(other.off());
        assert!(!synchronise.is_on() && !other.is_on());
        drop(both);
        assert!(synchronise.is_on() && other.is_on());
    }
}
