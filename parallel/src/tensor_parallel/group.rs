//! [`TensorParallel`]: the ranks that hold a layer together, and how the stream reaches them.

use phalanx_nn::autograd::{Result, Var};
use phalanx_nn::{Error, Parameter};

use super::cut::Cut;
use super::exchange::{Exchange, Exchanged};
use super::regions::{exchanged, reduce_from_region};
use crate::comm::Comm;

/// The ranks over which the layers of a model are cut, as this one sees them. It makes `nn`'s models through
/// [`phalanx_nn::Layers`].
///
/// ```
/// use std::sync::Arc;
/// use phalanx_nn::models::{GptConfig, Stage};
/// use phalanx_nn::{Parameters, Scope};
/// use phalanx_parallel::tensor_parallel::TensorParallel;
/// use phalanx_parallel::{Result, launch};
/// use phalanx_tensor::DType;
///
/// let shapes = launch::threads(3, |rank| -> Result<Vec<usize>> {
///     let layers = Arc::new(TensorParallel::new(rank.comm()).with_sequence_parallel(true));
///     let scope = Scope::new(1, DType::F32, rank.device());
///     let model = GptConfig::new(256, 24, 2, 6, 48).init_stage(&layers, &scope, Stage::whole(2))?;
///     Ok(model.parameters()[0].tensor().shape().to_vec())
/// })?;
/// assert_eq!(shapes, [[86, 48], [85, 48], [85, 48]]);
/// # Ok::<(), phalanx_parallel::comm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TensorParallel {
    comm: Comm,
    sequence: bool,
}

impl TensorParallel {
    /// Over these ranks, the stream between the layers whole on each of them.
    pub fn new(comm: &Comm) -> TensorParallel {
        TensorParallel { comm: comm.clone(), sequence: false }
    }

    /// With the stream cut by positions, or not.
    #[must_use]
    pub fn with_sequence_parallel(self, sequence: bool) -> TensorParallel {
        TensorParallel { sequence, ..self }
    }

    /// The ranks.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Whether the stream is cut by positions.
    pub fn is_sequence_parallel(&self) -> bool {
        self.sequence && self.comm.size() > 1
    }

    /// The stream, `[B, T, ..]` or this rank's positions of it, on its way into the region: all positions.
    ///
    /// # Errors
    /// If the stream has no positions but is cut by them, or as [`crate::comm::Pending::wait`].
    pub fn enter(&self, x: &Var) -> Result<Var> {
        exchanged("enter", x.clone(), &self.comm, self.entering(x)?)
    }

    /// The ranks' parts of the stream `[B, T, ..]`, added; this rank's positions, where it is cut.
    ///
    /// # Errors
    /// If the positions do not divide by the ranks but are to be cut, or as [`crate::comm::Pending::wait`].
    pub fn leave(&self, x: Var) -> Result<Var> {
        let exchanges = self.leaving(&x)?;
        exchanged("leave", x, &self.comm, exchanges)
    }

    /// Sees to it that gradients of what all ranks hold whole are the same on all: where the stream is cut, each rank's
    /// backward pass finds those of its positions, and they are added before they are accumulated. Models made through
    /// [`phalanx_nn::Layers`] have called it; modules of other layers call it once.
    ///
    /// # Errors
    /// Never yet; kept for layers that check more.
    pub fn share(&self, parameters: &[Parameter]) -> Result<()> {
        if !self.is_sequence_parallel() {
            return Ok(());
        }
        let whole = parameters.iter().filter(|parameter| parameter.part().is_whole());
        for leaf in whole.flat_map(Parameter::leaves) {
            let comm = self.comm.clone();
            let sum = move |dy: &Var| Ok(Some(reduce_from_region(dy, &comm)?));
            // The handle would take the hook away; it stays as long as the parameter.
            let _stays = leaf.var().on_grad(sum);
        }
        Ok(())
    }

    pub(super) fn entering(&self, x: &Var) -> Result<[Exchange; 2]> {
        if !self.is_sequence_parallel() {
            return Ok([Exchange::Keep, Exchange::Sum]);
        }
        let cut = Cut::of_parts(1, self.positions(x)?, self.comm.size());
        Ok([Exchange::Gather(cut.clone()), Exchange::SumPart(cut)])
    }

    pub(super) fn leaving(&self, x: &Var) -> Result<[Exchange; 2]> {
        if !self.is_sequence_parallel() {
            return Ok([Exchange::Sum, Exchange::Keep]);
        }
        let cut = Cut::even("sequence parallelism: positions", 1, self.positions(x)?, self.comm.size())?;
        Ok([Exchange::SumPart(cut.clone()), Exchange::Gather(cut)])
    }

    fn positions(&self, x: &Var) -> Result<usize> {
        let why = || format!("got {:?} between layers, wanted [B, T, ..]", x.shape());
        let positions = x.shape().get(1).copied().filter(|_| x.rank() > 2);
        Ok(positions.ok_or_else(|| Error::invalid("sequence parallelism", why()))?)
    }
}

/// An exchange inside a backward pass: started, so that others run meanwhile, unless it is to be differentiated again.
pub(super) enum Begun {
    Done(Var),
    Started(Exchanged),
}

impl Begun {
    pub(super) fn new(x: Var, comm: &Comm, exchanges: [Exchange; 2], linked: bool) -> Result<Begun> {
        match linked {
            true => Ok(Begun::Done(exchanged("exchange", x, comm, exchanges)?)),
            false => {
                let [forth, _] = exchanges;
                let spare = x.tensor().is_sole_owner();
                Ok(Begun::Started(forth.start(comm, x.tensor(), spare)?))
            }
        }
    }

    pub(super) fn finish(self) -> Result<Var> {
        match self {
            Begun::Done(y) => Ok(y),
            Begun::Started(started) => Ok(Var::new(started.finish()?)),
        }
    }
}
