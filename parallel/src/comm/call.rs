//! [`Call`]: a collective with its tensors, before it is started. A communicator's methods make one and give it to
//! `Communicator::start`, which checks it ([`Call::checked`]) and hands it to the backend. [`Observation`]: when it began and its
//! observer. [`Staged`]: the output tensor on a GPU of a call that runs on host copies.
//!
//! A backend that moves elements itself (threads, wires) takes copies of a GPU's tensors in the host's memory. The thread that
//! finishes the call copies the output back to the GPU, after the work that the caller had queued there before. A rank that
//! waits for the call makes its later GPU work wait for that copy. This is slow: the caller waits for the GPU when it starts.

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use phalanx_tensor::cuda::{Gpu, GpuEvent};
use phalanx_tensor::{DType, Tensor, unpoisoned};

use super::{CollectiveKind, Error, Reduction, Result, Signature};

/// A collective with its tensors. A *chunk* is the part of a tensor that belongs to one rank.
/// Tensors that are written must be contiguous; those only read may have any strides. Between start and end the
/// tensors must not be changed nor, where they are written, read.
#[derive(Clone, Debug)]
pub struct Call {
    pub(crate) signature: Signature,
    /// The elements that this rank contributes, unless they lie in `output`.
    pub(crate) input: Option<Tensor>,
    /// The tensor that this rank's result is written to.
    pub(crate) output: Option<Tensor>,
    /// The GPU's tensor, if `output` is its copy on the host.
    pub(crate) staged: Option<Arc<Staged>>,
    /// The observers that are told when it has ended.
    pub(crate) observations: Vec<Observation>,
    /// The line that called it, for the flight recorder.
    pub(crate) site: &'static Location<'static>,
}

/// Constructors. Arguments that do not fit each other are reported when the call is started.
impl Call {
    #[track_caller]
    fn new(kind: CollectiveKind, input: Option<Tensor>, output: Option<Tensor>) -> Call {
        let dtype = output.as_ref().or(input.as_ref()).map(Tensor::dtype);
        let (by, root, counts, wanted) = Default::default();
        let signature = Signature { kind, by, dtype, root, counts, wanted, on_gpus: false };
        Call { signature, input, output, staged: None, observations: vec![], site: Location::caller() }
    }

    fn by(mut self, by: Reduction) -> Call {
        self.signature.by = Some(by);
        self
    }

    fn root(mut self, root: usize) -> Call {
        self.signature.root = Some(root);
        self
    }

    /// Every rank waits for all others.
    #[track_caller]
    pub fn barrier() -> Call {
        Call::new(CollectiveKind::Barrier, None, None)
    }

    /// `tensor` becomes the reduction of all ranks' tensors.
    #[track_caller]
    pub fn all_reduce(tensor: Tensor, by: Reduction) -> Call {
        Call::new(CollectiveKind::AllReduce, None, Some(tensor)).by(by)
    }

    /// `output` becomes this rank's chunk of the reduction of all ranks' inputs, which consist of as many equal
    /// chunks as there are ranks.
    #[track_caller]
    pub fn reduce_scatter(output: Tensor, input: Tensor, by: Reduction) -> Call {
        Call::new(CollectiveKind::ReduceScatter, Some(input), Some(output)).by(by)
    }

    /// [`Call::reduce_scatter`] with chunks of `counts` elements, the same on all ranks.
    #[track_caller]
    pub fn reduce_scatter_uneven(output: Tensor, input: Tensor, counts: &[usize], by: Reduction) -> Call {
        Call::reduce_scatter(output, input, by).counts(counts)
    }

    /// `output` becomes the inputs of all ranks, one after another. An input that is this rank's part of the
    /// output stays where it is.
    #[track_caller]
    pub fn all_gather(output: Tensor, input: Tensor) -> Call {
        Call::new(CollectiveKind::AllGather, Some(input), Some(output))
    }

    /// [`Call::all_gather`] of inputs of `counts` elements, the same on all ranks.
    #[track_caller]
    pub fn all_gather_uneven(output: Tensor, input: Tensor, counts: &[usize]) -> Call {
        Call::all_gather(output, input).counts(counts)
    }

    /// `tensor` becomes the root's.
    #[track_caller]
    pub fn broadcast(tensor: Tensor, root: usize) -> Call {
        Call::new(CollectiveKind::Broadcast, None, Some(tensor)).root(root)
    }

    /// On the root, `tensor` becomes the reduction of all ranks' tensors; elsewhere it stays.
    #[track_caller]
    pub fn reduce(tensor: Tensor, root: usize, by: Reduction) -> Call {
        Call::new(CollectiveKind::Reduce, None, Some(tensor)).root(root).by(by)
    }

    /// On the root, `output` becomes the inputs of all ranks, one after another; elsewhere there is none.
    #[track_caller]
    pub fn gather(output: Option<Tensor>, input: Tensor, root: usize) -> Call {
        Call::new(CollectiveKind::Gather, Some(input), output).root(root)
    }

    /// `output` becomes this rank's chunk of the root's input; elsewhere there is none.
    #[track_caller]
    pub fn scatter(output: Tensor, input: Option<Tensor>, root: usize) -> Call {
        Call::new(CollectiveKind::Scatter, input, Some(output)).root(root)
    }

    /// Chunk `i` of the input goes to rank `i`, and chunk `j` of the output comes from rank `j`.
    #[track_caller]
    pub fn all_to_all(output: Tensor, input: Tensor) -> Call {
        Call::new(CollectiveKind::AllToAll, Some(input), Some(output))
    }

    /// [`Call::all_to_all`] with chunks of `sent` and `wanted` elements.
    #[track_caller]
    pub fn all_to_all_uneven(output: Tensor, wanted: &[usize], input: Tensor, sent: &[usize]) -> Call {
        let mut call = Call::all_to_all(output, input).counts(sent);
        call.signature.wanted = wanted.to_vec();
        call
    }

    /// Sends `tensor` to rank `to`, which receives this pair's messages in the order in which they are sent.
    #[track_caller]
    pub fn send(tensor: Tensor, to: usize) -> Call {
        Call::new(CollectiveKind::Send, Some(tensor), None).root(to)
    }

    /// `tensor` becomes the next that rank `from` sends to this one.
    #[track_caller]
    pub fn recv(tensor: Tensor, from: usize) -> Call {
        Call::new(CollectiveKind::Receive, None, Some(tensor)).root(from)
    }

    fn counts(mut self, counts: &[usize]) -> Call {
        self.signature.counts = counts.to_vec();
        self
    }
}

/// Checks.
impl Call {
    /// A copy without tensors, which NCCL's ranks compare over the control plane before NCCL moves the elements.
    #[cfg(feature = "nccl")]
    pub(crate) fn announcement(&self) -> Call {
        let signature = Signature { on_gpus: true, ..self.signature.clone() };
        Call { signature, input: None, output: None, staged: None, observations: vec![], site: self.site }
    }

    /// Which collective it is.
    pub fn kind(&self) -> CollectiveKind {
        self.signature.kind
    }

    /// Checks the call for rank `rank` of `size`, makes its input contiguous and fills in its counts.
    pub(crate) fn checked(mut self, rank: usize, size: usize) -> Result<Call> {
        let op = self.kind().name();
        if self.signature.on_gpus {
            return Ok(self);
        }
        // The threads that carry out calls wait for no values that other calls bring.
        self.input.iter().chain(&self.output).try_for_each(|tensor| tensor.arrived(op))?;
        if let Some(root) = self.signature.root.filter(|root| *root >= size) {
            return Err(Error::invalid(op, format!("got rank {root}, wanted one below {size}")));
        }
        self.check_tensors(op)?;
        self.fill_counts(op, rank, size)?;
        self.separate_input(rank)?;
        Ok(self)
    }

    fn check_tensors(&mut self, op: &'static str) -> Result<()> {
        if let (Some(by), Some(dtype)) = (self.signature.by, self.signature.dtype) {
            by.check(op, dtype)?;
        }
        if let Some(output) = self.output.as_ref().filter(|t| !t.is_contiguous()) {
            let why = format!("got strides {:?} to write to, wanted a contiguous tensor", output.strides());
            return Err(Error::invalid(op, why));
        }
        if let Some(input) = &self.input {
            let dtype = self.signature.dtype.unwrap_or(input.dtype());
            if input.dtype() != dtype {
                let why = format!("got an input of {} for an output of {dtype}", input.dtype());
                return Err(Error::invalid(op, why));
            }
            self.input = Some(input.contiguous()?);
        }
        Ok(())
    }

    /// Fills in the counts and compares the tensors with them.
    fn fill_counts(&mut self, op: &'static str, rank: usize, size: usize) -> Result<()> {
        let numel = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::numel);
        let (input, output) = (numel(&self.input), numel(&self.output));
        let Signature { kind, root, counts, wanted, .. } = &mut self.signature;
        let at_root = *root == Some(rank);
        let chunks = |count: usize| vec![count; size];
        if counts.is_empty() {
            *counts = match kind {
                CollectiveKind::Barrier => vec![],
                CollectiveKind::AllReduce
                | CollectiveKind::Broadcast
                | CollectiveKind::Reduce
                | CollectiveKind::Receive => vec![output.unwrap_or(0)],
                CollectiveKind::Send => vec![input.unwrap_or(0)],
                CollectiveKind::ReduceScatter | CollectiveKind::Scatter => chunks(output.unwrap_or(0)),
                CollectiveKind::AllGather | CollectiveKind::Gather => chunks(input.unwrap_or(0)),
                CollectiveKind::AllToAll => chunks(input.unwrap_or(0) / size),
            };
        }
        if *kind == CollectiveKind::AllToAll && wanted.is_empty() {
            *wanted = chunks(output.unwrap_or(0) / size);
        }
        let shared = matches!(
            kind,
            CollectiveKind::ReduceScatter
                | CollectiveKind::Scatter
                | CollectiveKind::AllGather
                | CollectiveKind::Gather
                | CollectiveKind::AllToAll
        );
        if shared && (counts.len() != size || !(wanted.is_empty() || wanted.len() == size)) {
            let why = format!("got counts {counts:?} and {wanted:?}, wanted one for each of {size} ranks");
            return Err(Error::invalid(op, why));
        }
        let total = counts.iter().sum();
        let (gives, gets) = match kind {
            CollectiveKind::ReduceScatter => (Some(total), Some(counts[rank])),
            CollectiveKind::AllGather => (Some(counts[rank]), Some(total)),
            CollectiveKind::Gather => (Some(counts[rank]), at_root.then_some(total)),
            CollectiveKind::Scatter => (at_root.then_some(total), Some(counts[rank])),
            CollectiveKind::AllToAll => (Some(total), Some(wanted.iter().sum())),
            _ => (input, output),
        };
        if (input, output) != (gives, gets) {
            let elements = |n: Option<usize>| n.map_or("no".into(), |n: usize| n.to_string());
            let [i, o, gives, gets] = [input, output, gives, gets].map(elements);
            let why = format!("got {i} elements to give and {o} to get, wanted {gives} and {gets}");
            return Err(Error::invalid(op, why));
        }
        // Other ranks compare theirs with this one's; this chunk no other rank sees.
        if *kind == CollectiveKind::AllToAll && counts[rank] != wanted[rank] {
            let (gives, gets) = (counts[rank], wanted[rank]);
            let why = format!("got {gives} elements for itself and {gets} from itself, wanted as many");
            return Err(Error::invalid(op, why));
        }
        Ok(())
    }

    /// Handles an input that lies in the output's storage: drops it if it is in its place, else copies it.
    fn separate_input(&mut self, rank: usize) -> Result<()> {
        let (Some(input), Some(output)) = (&self.input, &self.output) else { return Ok(()) };
        if !input.shares_storage(output) {
            return Ok(());
        }
        let before: usize = self.signature.counts[..rank].iter().sum();
        let in_place = matches!(self.kind(), CollectiveKind::AllGather | CollectiveKind::Gather);
        let here = in_place && (input.numel() == 0 || input.offset() == output.offset() + before);
        self.input = if here { None } else { Some(input.copy()?) };
        Ok(())
    }

    /// The other rank of a send or receive.
    pub(crate) fn peer(&self) -> Option<usize> {
        self.signature.root.filter(|_| matches!(self.kind(), CollectiveKind::Send | CollectiveKind::Receive))
    }

    /// The elements' type.
    pub(crate) fn dtype(&self) -> DType {
        // Only barriers have none, and no elements either.
        self.signature.dtype.unwrap_or(DType::U8)
    }
}

/// A call of one rank that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Which collective it was.
    pub kind: CollectiveKind,
    /// Bytes of elements of the larger of this rank's tensors.
    pub bytes: usize,
    /// When this rank called it.
    pub started: Instant,
    /// When its tensors were free again, or the call had failed.
    pub ended: Instant,
}

/// A function that is called when a call has ended, on the thread that finished it. It must be quick and not panic.
pub type Observer = Arc<dyn Fn(Observed) + Send + Sync>;

/// An observer and the start time, carried by a call.
#[derive(Clone)]
pub(crate) struct Observation {
    bytes: usize,
    started: Instant,
    observer: Observer,
}

impl Observation {
    /// The call is over.
    pub(crate) fn report(&self, kind: CollectiveKind) {
        let &Observation { bytes, started, .. } = self;
        (self.observer)(Observed { kind, bytes, started, ended: Instant::now() });
    }
}

impl fmt::Debug for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observation of {} bytes", self.bytes)
    }
}

impl Call {
    /// Adds an observer; the time of the call begins now.
    pub(crate) fn observed(mut self, observer: Observer) -> Call {
        let tensors = self.input.iter().chain(&self.output);
        let bytes = tensors.map(|tensor| tensor.numel() * tensor.dtype().size()).max().unwrap_or(0);
        self.observations.push(Observation { bytes, started: Instant::now(), observer });
        self
    }
}

/// An output on a GPU, of a call that works on a copy in the host's memory.
#[derive(Debug)]
pub(crate) struct Staged {
    gpu: &'static Gpu,
    /// Kept until a thread has waited for the call: only then may later GPU work use its memory.
    output: Mutex<Option<Tensor>>,
    /// Marks the work that the caller had queued on the GPU before.
    before: GpuEvent,
    /// Marks the copy back to the GPU.
    after: OnceLock<GpuEvent>,
}

impl Call {
    /// The call on rank `rank` with host copies in the place of a GPU's tensors.
    pub(crate) fn on_host(mut self, rank: usize) -> Result<Call> {
        if let Some(input) = self.input.take() {
            let host = if input.device().is_cuda() { input.device().host() } else { input.device() };
            self.input = Some(input.to_device(host, false)?);
        }
        let Some(output) = self.output.take_if(|output| output.device().is_cuda()) else { return Ok(self) };
        let (at_root, kind) = (self.signature.root == Some(rank), self.kind());
        let is_read = self.input.is_none()
            && kind != CollectiveKind::Receive
            && (kind != CollectiveKind::Broadcast || at_root);
        let is_written =
            !matches!((kind, at_root), (CollectiveKind::Broadcast, true) | (CollectiveKind::Reduce, false));
        let host = output.device().host();
        self.output = Some(match is_read {
            true => output.to_device(host, true)?,
            false => Tensor::empty(output.shape(), output.dtype(), host)?,
        });
        if is_written {
            let gpu = output.device().gpu()?;
            let (before, output) = (GpuEvent::record(gpu)?, Mutex::new(Some(output)));
            self.staged = Some(Arc::new(Staged { gpu, output, before, after: OnceLock::new() }));
        }
        Ok(self)
    }
}

impl Staged {
    fn output(&self) -> MutexGuard<'_, Option<Tensor>> {
        unpoisoned(self.output.lock())
    }

    /// Copies the output back to the GPU.
    pub(crate) fn deliver(&self, host: Option<Tensor>) -> Result<()> {
        let mut output = self.output();
        let (Some(output), Some(host)) = (output.as_mut(), host) else { return Ok(()) };
        self.before.order(self.gpu)?;
        output.copy_from(&host)?;
        // A call has one end.
        let _ = self.after.set(GpuEvent::record(self.gpu)?);
        Ok(())
    }

    /// Makes this thread's later GPU work wait for the output, and drops the output.
    pub(crate) fn order(&self) -> Result<()> {
        self.after.get().map_or(Ok(()), |after| after.order(self.gpu))?;
        *self.output() = None;
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let (Some(after), true) = (self.after.get(), self.output().is_some()) {
            // No thread has waited for the call, and this thread's stream may be any. A failure means that the device is lost.
            let _ = after.synchronize();
        }
    }
}
