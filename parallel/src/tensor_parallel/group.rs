//! [`TensorParallel`]: the ranks that hold a layer together, how activations enter and leave their region, and the norm of
//! the gradients when some parameters are split over them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_nn::autograd::{Result as GradResult, Var};
use phalanx_nn::{Error, Parameter, Result as NnResult, Squares, grad_squares, norm_of};

use super::mappings::{Exchange, PendingExchange, Split, exchanged, reduce_from_region};
use crate::Result;
use crate::all_gather::gather_sums;
use crate::comm::Comm;

/// The ranks over which the layers of a model are split, as this rank sees them. It builds `nn`'s models with parallel layers,
/// through [`phalanx_nn::LayerFactory`].
///
/// ```
/// use std::sync::Arc;
/// use phalanx_nn::models::{DecoderStage, GptConfig};
/// use phalanx_nn::{Parameters, Scope};
/// use phalanx_parallel::tensor_parallel::TensorParallel;
/// use phalanx_parallel::{Result, launch};
/// use phalanx_tensor::DType;
///
/// let shapes = launch::threads(3, |rank| -> Result<Vec<usize>> {
///     let layers = Arc::new(TensorParallel::new(rank.comm()).with_sequence_parallel(true));
///     let scope = Scope::new(1, DType::F32, rank.device());
///     let model = GptConfig::new(256, 24, 2, 6, 48).init_stage(&layers, &scope, DecoderStage::whole(2))?;
///     Ok(model.parameters()[0].tensor().shape().to_vec())
/// })?;
/// assert_eq!(shapes, [[86, 48], [85, 48], [85, 48]]);
/// # Ok::<(), phalanx_parallel::comm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TensorParallel {
    comm: Comm,
    sequence: bool,
    /// Whether the stream is whole for now. The layers of a model have it in common.
    whole_stream: Arc<AtomicBool>,
    /// Whether the caller of the layers has entered the region for all of them, with sequence parallelism.
    entered: Arc<AtomicBool>,
}

impl TensorParallel {
    /// Tensor parallelism over these ranks. Activations between layers are whole on every rank.
    pub fn new(comm: &Comm) -> TensorParallel {
        let (whole_stream, entered) = Default::default();
        TensorParallel { comm: comm.clone(), sequence: false, whole_stream, entered }
    }

    /// With or without sequence parallelism, which splits the activations between layers by positions.
    #[must_use]
    pub fn with_sequence_parallel(self, sequence: bool) -> TensorParallel {
        TensorParallel { sequence, ..self }
    }

    /// Keeps the activations between layers whole on every rank, or no longer, in all layers that were made with this.
    pub(super) fn keep_whole(&self, whole: bool) {
        self.whole_stream.store(whole, Ordering::Relaxed);
    }

    /// The ranks.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Whether activations between layers are split by positions. While keys and values are cached they are not.
    pub fn is_sequence_parallel(&self) -> bool {
        self.sequence && self.comm.size() > 1 && !self.whole_stream.load(Ordering::Relaxed)
    }

    /// Enters the region: from the activations between layers, `[B, T, ..]` or this rank's positions of them, to all positions.
    ///
    /// # Errors
    /// With sequence parallelism, if `x` has no positions; or as [`crate::comm::Pending::wait`].
    pub fn enter(&self, x: &Var) -> GradResult<Var> {
        exchanged("enter", x.clone(), &self.comm, self.entering(x)?)
    }

    /// Leaves the region: adds the ranks' partial sums `[B, T, ..]`. With sequence parallelism the result is this rank's positions.
    ///
    /// # Errors
    /// With sequence parallelism, if the ranks do not divide the positions; or as [`crate::comm::Pending::wait`].
    pub fn leave(&self, x: Var) -> GradResult<Var> {
        let exchanges = self.leaving(&x)?;
        exchanged("leave", x, &self.comm, exchanges)
    }

    /// Enters the region for all layers that `work` calls, which then exchange nothing, and leaves it with the result; without sequence parallelism
    /// each layer enters and leaves by itself.
    pub(super) fn in_region(&self, x: &Var, work: &mut dyn FnMut(&Var) -> NnResult<Var>) -> NnResult<Var> {
        if !self.is_sequence_parallel() {
            return work(x);
        }
        let x = self.enter(x)?;
        let y = {
            let _leaves = Entered::new(&self.entered);
            work(&x)?
        };
        Ok(self.leave(y)?)
    }

    /// Refuses what would be added once on every rank where the ranks' results are added later.
    pub(super) fn check_linear(&self, bias: Option<&Parameter>) -> GradResult<()> {
        match bias.filter(|_| self.is_sequence_parallel() && self.entered.load(Ordering::Relaxed)) {
            None => Ok(()),
            Some(bias) => {
                let why = "got a bias of every rank in a region with sequence parallelism, wanted none";
                Err(Error::invalid(bias.name(), why).into())
            }
        }
    }

    /// Makes the gradients of parameters that every rank holds whole the same on all ranks. With sequence parallelism each rank's
    /// backward pass computes the gradients of its positions; a hook adds them before they are accumulated. Models built through
    /// [`phalanx_nn::LayerFactory`] have called it; other modules have to call it once.
    ///
    /// # Errors
    /// None yet; kept for layers that check more.
    pub fn all_reduce_whole_grads(&self, parameters: &[Parameter]) -> GradResult<()> {
        if !self.is_sequence_parallel() {
            return Ok(());
        }
        let whole = parameters.iter().filter(|parameter| parameter.part().is_whole());
        whole.for_each(|parameter| self.all_reduce_grad(parameter));
        Ok(())
    }

    /// Adds the gradients of whole parameters that each rank uses for its own heads, such as the weight of a norm of queries. With sequence
    /// parallelism [`TensorParallel::all_reduce_whole_grads`] adds them.
    ///
    /// # Errors
    /// None yet.
    pub fn all_reduce_partial_grads(&self, parameters: &[Parameter]) -> GradResult<()> {
        if !self.is_sequence_parallel() {
            parameters.iter().for_each(|parameter| self.all_reduce_grad(parameter));
        }
        Ok(())
    }

    fn all_reduce_grad(&self, parameter: &Parameter) {
        for leaf in parameter.leaves() {
            let comm = self.comm.clone();
            let sum = move |dy: &Var| Ok(Some(reduce_from_region(dy, &comm)?));
            // The handle could remove the hook; without it the hook lives as long as the parameter.
            let _stays = leaf.var().on_grad(sum);
        }
    }

    /// The former name of [`TensorParallel::all_reduce_whole_grads`].
    ///
    /// # Errors
    /// As [`TensorParallel::all_reduce_whole_grads`].
    #[deprecated(since = "0.1.0", note = "renamed to `all_reduce_whole_grads`")]
    pub fn share(&self, parameters: &[Parameter]) -> GradResult<()> {
        self.all_reduce_whole_grads(parameters)
    }

    pub(super) fn entering(&self, x: &Var) -> GradResult<[Exchange; 2]> {
        if !self.is_sequence_parallel() {
            return Ok([Exchange::Keep, Exchange::Sum]);
        }
        if self.entered.load(Ordering::Relaxed) {
            return Ok([Exchange::Keep, Exchange::Keep]);
        }
        let split = Split::of_parts(1, self.positions(x)?, self.comm.size());
        Ok([Exchange::Gather(split.clone()), Exchange::SumPart(split)])
    }

    pub(super) fn leaving(&self, x: &Var) -> GradResult<[Exchange; 2]> {
        if !self.is_sequence_parallel() {
            return Ok([Exchange::Sum, Exchange::Keep]);
        }
        if self.entered.load(Ordering::Relaxed) {
            return Ok([Exchange::Keep, Exchange::Keep]);
        }
        let split = Split::even("sequence parallelism: positions", 1, self.positions(x)?, self.comm.size())?;
        Ok([Exchange::SumPart(split.clone()), Exchange::Gather(split)])
    }

    fn positions(&self, x: &Var) -> GradResult<usize> {
        let why = || format!("got {:?} between layers, wanted [B, T, ..]", x.shape());
        let positions = x.shape().get(1).copied().filter(|_| x.rank() > 2);
        Ok(positions.ok_or_else(|| Error::invalid("sequence parallelism", why()))?)
    }
}

/// Marks that the region was entered until it is dropped, after an error too.
struct Entered<'a>(&'a AtomicBool);

impl Entered<'_> {
    fn new(entered: &AtomicBool) -> Entered<'_> {
        entered.store(true, Ordering::Relaxed);
        Entered(entered)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// An exchange inside a backward pass. It is asynchronous, unless it has to be differentiated again.
pub(super) enum BackwardExchange {
    Done(Var),
    Pending(PendingExchange),
}

impl BackwardExchange {
    pub(super) fn new(
        x: Var,
        comm: &Comm,
        exchanges: [Exchange; 2],
        linked: bool,
    ) -> GradResult<BackwardExchange> {
        match linked {
            true => Ok(BackwardExchange::Done(exchanged("exchange", x, comm, exchanges)?)),
            false => {
                let [forth, _] = exchanges;
                let spare = x.tensor().is_sole_owner();
                Ok(BackwardExchange::Pending(forth.start(comm, x.tensor(), spare)?))
            }
        }
    }

    pub(super) fn finish(self) -> GradResult<Var> {
        match self {
            BackwardExchange::Done(y) => Ok(y),
            BackwardExchange::Pending(started) => Ok(Var::new(started.finish()?)),
        }
    }
}

/// The Euclidean norm of all gradients of a model that is split over these ranks, with the same bits on all of them. Parts of a
/// parameter count from every rank, and whole parameters once. On a `meta` device it is 0.
///
/// # Errors
/// If a gradient cannot be read, or as [`crate::comm::Pending::wait`].
pub fn grad_norm(parameters: &[Parameter], comm: &Comm) -> Result<f64> {
    Ok(norm_of(&sum_squares(grad_squares(parameters)?, comm)?)?)
}

/// Every parameter's sum of squares over all ranks, from the sums of this rank's parts. Those of whole parameters stay as they
/// are; those of split parameters are added in order of the ranks. All ranks call it with parameters of the same names. The host
/// does not wait for a GPU.
///
/// # Errors
/// As [`crate::comm::Pending::wait`].
pub fn sum_squares(squares: Squares, comm: &Comm) -> Result<Squares> {
    let Squares { mut of, sums } = squares;
    let parts: Vec<bool> = of.iter().map(|square| !square.whole).collect();
    of.iter_mut().for_each(|square| square.whole = true);
    if comm.size() == 1 || !comm.has_peers() {
        return Ok(Squares { of, sums });
    }
    let count = of.len();
    let pairs = parts.into_iter().enumerate().flat_map(|(i, part)| {
        let ranks = if part { 0..comm.size() } else { comm.rank()..comm.rank() + 1 };
        ranks.map(move |rank| (i, rank * count + i))
    });
    let sums = gather_sums(comm, &sums, &vec![count; comm.size()], count, pairs)?;
    Ok(Squares { of, sums })
}
