//! [`CallStream`]: the calls of a group, or the messages of a pair in one direction, in order, on a stream of their own.
//!
//! [`combine`] launches the kernel that adds the elements of several ranks, in order of the ranks. Its reference,
//! slow and with the same bits, is the reduction on the host ([`phalanx_kernels::combine`]).
#![allow(unsafe_code)]

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use phalanx_kernels::cuda::{PRELUDE, type_name};
use phalanx_tensor::cuda::{Args, DevicePointer, Gpu, GpuEvent, Grid, Kernel, Program, Work};
use phalanx_tensor::{DType, Device, Event, Stream, Tensor, delivering};

use super::Sums;
use super::library::{ID_BYTES, Link, Op, unique_id};
use super::route::{Message, Native, Step, route};
use super::watchdog::{KeptTensors, RunningCall, Watchdog};
use crate::comm::pending::{Ticket, Waiter};
use crate::comm::plan::Side;
use crate::comm::{Call, CollectiveKind, Comm, Error, Pending, Reduction, Result};

/// How long a call stream sleeps between two polls of NCCL.
const NAP: Duration = Duration::from_micros(50);

/// Calls in order.
#[derive(Debug)]
pub(super) struct CallStream {
    watchdog: Arc<Watchdog>,
    stream: Stream,
    /// The control plane's group for the messages of call streams to each other.
    private: Comm,
    /// The other rank and whether this one sends; none for the collectives of the group.
    pair: Option<(usize, bool)>,
    sums: Sums,
    link: OnceLock<Arc<Link>>,
}

impl CallStream {
    pub(super) fn new(
        watchdog: Arc<Watchdog>,
        private: Comm,
        pair: Option<(usize, bool)>,
        sums: Sums,
    ) -> Result<Arc<CallStream>> {
        let stream = Stream::new(watchdog.gpu.device())?;
        Ok(Arc::new(CallStream { watchdog, stream, private, pair, sums, link: OnceLock::new() }))
    }

    /// Takes a call that was announced to the control plane.
    pub(super) fn start(self: &Arc<CallStream>, call: Call, announced: Pending) -> Pending {
        let kept = KeptTensors::new(call.input.iter().chain(&call.output).cloned());
        let Ticket { rank, group, sequence, .. } = *announced.ticket;
        let ticket = Ticket::new(call, announced.ticket.recorder.as_ref(), rank, group, sequence);
        let mut queued = Queued::new(&self.watchdog);
        let (this, ours, tensors) = (Arc::clone(self), Arc::clone(&ticket), Arc::clone(&kept));
        // On a GPU that is lost the stream drops this unrun.
        self.stream.submit(move || {
            let _delivering = delivering();
            let mut outcome = this.carry_out(&ours, announced, &tensors, &mut queued.work);
            if outcome.is_err() && queued.work.is_none() {
                tensors.release();
            }
            let given = queued.work.as_ref().map(|work| (work.call.clone(), Arc::clone(&work.ended)));
            drop(queued);
            // Now that it is watched it comes to an end, even if another rank's part never does.
            if let (Ok(()), Some((call, ended)), false) = (&outcome, given, ours.call.observations.is_empty())
            {
                outcome = ended.synchronize().map_err(|error| this.blame(&call, &error.into()));
            }
            ours.finish(outcome);
            Ok(())
        });
        let event = self.stream.record();
        let stream = self.watchdog.gpu.stream_handle().addr();
        Pending::new(ticket, Arc::new(StreamWaiter { gpu: self.watchdog.gpu, stream, event, kept }))
    }

    fn carry_out(
        &self,
        ticket: &Ticket,
        announced: Pending,
        kept: &Arc<KeptTensors>,
        work: &mut Option<RunningCall>,
    ) -> Result<()> {
        let text = announced.ticket.describe(self.private.ranks());
        let announcement = Arc::clone(&announced.ticket);
        ticket.waits();
        announced.wait()?;
        ticket.completed_as(&announcement);
        let blame = |error: Error| self.blame(&text, &error);
        let link = self.connect().map_err(blame)?;
        let (gpu, call) = (self.watchdog.gpu, ticket.whole_call());
        let began = || -> Result<GpuEvent> {
            gpu.make_current()?;
            Ok(GpuEvent::record(gpu)?)
        };
        let begun = began().map_err(blame)?;
        let (steps, mut buffer) = (self.steps(&call), None);
        let done = steps.into_iter().try_for_each(|step| self.step(&link, &call, step, &mut buffer));
        // Recorded after a failure too, since the work queued before it must leave the GPU.
        let ended = GpuEvent::record(gpu).map(Arc::new).map_err(Error::from);
        if let Ok(ended) = &ended {
            let (call, ended, kept) = (text.clone(), Arc::clone(ended), Arc::clone(kept));
            *work = Some(RunningCall { call, begun, ended, kept });
        }
        done.and(ended).map(drop).map_err(blame)
    }

    /// The error of the run as returned by a call: the one that ended it, or `error` if none had.
    fn blame(&self, call: &str, error: &Error) -> Error {
        let failure = self.watchdog.control.failure();
        failure.unwrap_or_else(|| self.watchdog.fail(call, &error.to_string())).seen_in(|| call.into())
    }

    /// The link, when all its ranks are there.
    fn connect(&self) -> Result<Arc<Link>> {
        let known = self.link.get();
        let mut letter =
            Tensor::zeros(&[if known.is_some() { 0 } else { ID_BYTES }], DType::U8, Device::CPU)?;
        let makes_id = match self.pair {
            None => self.private.rank() == 0,
            Some((_, sends)) => !sends,
        };
        if known.is_none() && makes_id {
            let id = unique_id().map_err(Error::Launch)?;
            letter = Tensor::from_slice(&id, &[ID_BYTES], Device::CPU)?;
        }
        match (self.pair, known) {
            // All have announced the call.
            (None, Some(_)) => {}
            (None, None) => self.private.broadcast(&mut letter, 0)?,
            // The sender learns that the receiver is there.
            (Some((peer, true)), _) => self.private.recv(&mut letter, peer)?,
            (Some((peer, false)), _) => self.private.send(&letter, peer)?,
        }
        if let Some(link) = known {
            return Ok(Arc::clone(link));
        }
        let id = letter.to_vec::<u8>()?.try_into().unwrap_or([0; ID_BYTES]);
        let (rank, size) = match self.pair {
            None => (self.private.rank(), self.private.size()),
            Some((_, sends)) => (usize::from(!sends), 2),
        };
        self.watchdog.gpu.make_current()?;
        let link = Arc::new(Link::begin(id, rank, size).map_err(Error::Launch)?);
        self.watchdog.linked(Arc::clone(&link));
        self.settle(&link)?;
        Ok(Arc::clone(self.link.get_or_init(|| link)))
    }

    /// Waits until NCCL has carried out its last call, or queued it on the GPU.
    fn settle(&self, link: &Link) -> Result<()> {
        let begin = Instant::now();
        while !link.is_settled().map_err(Error::Launch)? {
            if let Some(failure) = self.watchdog.control.failure() {
                link.abort();
                return Err(failure);
            }
            if begin.elapsed() > self.watchdog.timeout() {
                link.abort();
                let waited = self.watchdog.timeout().as_millis();
                return Err(Error::Launch(format!("NCCL has not found all ranks within {waited} ms")));
            }
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    fn steps(&self, call: &Call) -> Vec<Step> {
        let count = call.signature.counts.first().copied().unwrap_or(0);
        match call.kind() {
            CollectiveKind::Send | CollectiveKind::Receive if count == 0 => vec![],
            CollectiveKind::Send => {
                vec![Step::Exchange(vec![Message::Send { from: Side::Input, range: 0..count, to: 1 }])]
            }
            CollectiveKind::Receive => {
                vec![Step::Exchange(vec![Message::Receive { range: 0..count, from: 0 }])]
            }
            _ => {
                let place = (self.private.rank(), self.private.size());
                route(&call.signature, place, call.input.is_none(), self.sums)
            }
        }
    }

    /// Carries out a step; `buffer` is the buffer that owners receive parts into.
    fn step(&self, link: &Link, call: &Call, step: Step, buffer: &mut Option<Tensor>) -> Result<()> {
        match step {
            Step::Native(whole) => {
                let rank = self.private.rank();
                let reads = matches!(whole, Native::Broadcast { root, .. } if root == rank)
                    || matches!(whole, Native::Reduce { root, .. } if root != rank);
                self.enqueue(link, call, !reads, None, |at| vec![at.whole(&whole)])
            }
            Step::Exchange(messages) => {
                let given = messages.iter().filter_map(|message| match message {
                    Message::ReceivePart { range, .. } => Some(range.end),
                    _ => None,
                });
                *buffer = match given.max() {
                    Some(count) => Some(Tensor::empty(&[count], call.dtype(), self.watchdog.gpu.device())?),
                    None => None,
                };
                let writes = messages.iter().any(|message| matches!(message, Message::Receive { .. }));
                let ops = |at: Addresses| messages.iter().map(|message| at.message(message)).collect();
                self.enqueue(link, call, writes, buffer.as_mut(), ops)
            }
            Step::Combine { own: (side, own), out, by } => {
                let of = if side == Side::Input { &call.input } else { &call.output };
                let (Some(of), Some(output), Some(others)) = (of, &call.output, buffer.take()) else {
                    return Err(Error::invalid(call.kind().name(), "got no tensors to combine"));
                };
                let own = of.view_into(own.start, &[own.len()])?;
                let mut out = output.view_into(out.start, &[out.len()])?;
                Ok(combine(call.kind().name(), &mut out, &own, &others, self.private.rank(), by)?)
            }
        }
    }

    /// Gives NCCL calls on the tensors' addresses, and waits until it has given them to the GPU.
    fn enqueue(
        &self,
        link: &Link,
        call: &Call,
        writes: bool,
        buffer: Option<&mut Tensor>,
        ops: impl FnOnce(Addresses) -> Vec<Op>,
    ) -> Result<()> {
        let (op, dtype, gpu) = (call.kind().name(), call.dtype(), self.watchdog.gpu);
        let input = call.input.as_ref().map(|input| input.device_read(op)).transpose()?;
        let mut output = call.output.clone();
        let output = match writes {
            true => output.as_mut().map(|output| output.device_write(op)).transpose()?,
            false => output.as_ref().map(|output| output.device_read(op)).transpose()?,
        };
        let buffer = buffer.map(|buffer| buffer.device_write(op)).transpose()?;
        let address = |of: &Option<DevicePointer<'_>>| of.as_ref().map_or(0, DevicePointer::address);
        let [input_at, output_at, buffer_at] = [&input, &output, &buffer].map(address);
        let ops =
            ops(Addresses { input: input_at, output: output_at, buffer: buffer_at, size: dtype.size() });
        gpu.make_current()?;
        let _collective = gpu.enter_collective();
        // SAFETY: the stream is this one's, of this GPU, on whose thread this runs. The ranges are the route's, inside
        // tensors of the call, whose counts `Call::checked` holds against them. `kept` holds the tensors until the stream
        // has passed this point, or the waiting thread's stream comes after it; the buffer was obtained on this stream
        // and is freed in its order.
        let queue = || unsafe { link.enqueue(dtype, &ops, gpu.stream_handle()) }.map_err(Error::Launch);
        gpu.traced(op, Work::Collective, || queue().and_then(|()| self.settle(link)))?
    }
}

/// Where a call's tensors begin.
struct Addresses {
    input: u64,
    output: u64,
    buffer: u64,
    /// Bytes of an element.
    size: usize,
}

impl Addresses {
    fn of(&self, side: Side, start: usize) -> u64 {
        let base = if side == Side::Input { self.input } else { self.output };
        base + (start * self.size) as u64
    }

    fn message(&self, message: &Message) -> Op {
        match message {
            Message::Send { from, range, to } => {
                Op::Send { from: self.of(*from, range.start), count: range.len(), peer: *to }
            }
            Message::Receive { range, from } => {
                Op::Receive { to: self.of(Side::Output, range.start), count: range.len(), peer: *from }
            }
            Message::ReceivePart { range, from } => {
                let to = self.buffer + (range.start * self.size) as u64;
                Op::Receive { to, count: range.len(), peer: *from }
            }
        }
    }

    fn whole(&self, whole: &Native) -> Op {
        let (from, at) = (self.input, self.output);
        match *whole {
            Native::Broadcast { root, count } => Op::Broadcast { at, count, root },
            Native::AllGather { own: (side, start), count } => {
                Op::AllGather { from: self.of(side, start), to: at, count }
            }
            Native::AllReduce { by, count } => Op::AllReduce { at, count, by },
            Native::ReduceScatter { by, count } => Op::ReduceScatter { from, to: at, count, by },
            Native::Reduce { by, root, count } => Op::Reduce { at, count, by, root },
        }
    }
}

/// A call between its arrival at a call stream and its queueing on the GPU; counted even if that fails, panics, or never comes.
struct Queued {
    watchdog: Arc<Watchdog>,
    work: Option<RunningCall>,
}

impl Queued {
    fn new(watchdog: &Arc<Watchdog>) -> Queued {
        watchdog.queued();
        Queued { watchdog: Arc::clone(watchdog), work: None }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.watchdog.given(self.work.take());
    }
}

/// Waits for a call of a call stream.
#[derive(Debug)]
struct StreamWaiter {
    gpu: &'static Gpu,
    /// The caller's stream, on which its tensors are freed.
    stream: usize,
    /// Marks that the call stream has given it to the GPU.
    event: Event,
    kept: Arc<KeptTensors>,
}

impl Waiter for StreamWaiter {
    fn wait(&self, ticket: &Arc<Ticket>) -> Result<()> {
        self.event.synchronize()?;
        ticket.outcome().unwrap_or_else(|| Err(Error::Launch("a lane of NCCL has ended early".into())))
    }

    fn order(&self) -> Result<()> {
        self.event.synchronize()?;
        // Later work on this stream comes after the call, so the memory may be reused. On another stream the watchdog drops
        // the tensors when the call has ended on the GPU.
        if self.gpu.stream_handle().addr() == self.stream {
            self.kept.release();
        }
        Ok(())
    }

    fn adopt(&self) {
        self.kept.adopt();
    }
}

const FILES: &[(&str, &str)] = &[PRELUDE, ("combine.cu", include_str!("combine.cu"))];

/// Loads the kernel of [`combine`], which must not be done while a GPU waits for another one.
pub(super) fn prepare(
    op: &'static str,
    gpu: &'static Gpu,
    dtype: DType,
    by: Reduction,
) -> phalanx_tensor::Result<Kernel> {
    let defines = defines(dtype, by);
    gpu.kernel(op, &Program { name: "combine.cu", files: FILES, defines: &defines }, "combine")
}

/// `out` becomes the reduction of all ranks' elements: `own` are those of rank `place`, `others` of the rest, one after another.
/// `out` may be `own`.
pub(super) fn combine(
    op: &'static str,
    out: &mut Tensor,
    own: &Tensor,
    others: &Tensor,
    place: usize,
    by: Reduction,
) -> phalanx_tensor::Result<()> {
    let gpu = out.device().gpu()?;
    let count = out.numel();
    let ranks = others.numel() / count.max(1) + 1;
    let [stride, numel, ranks, place] = [count, count, ranks, place].map(|n| n as u64);
    // The output first: it may be `own`, which is then not locked again.
    let args = Args::new(op, gpu).write(out)?.read(own)?.read(others)?;
    let args = args.value(stride).value(numel).value(ranks).value(place);
    let threads = count.div_ceil(16 / own.dtype().size());
    prepare(op, gpu, own.dtype(), by)?.launch(Grid::over(gpu, threads, 256), args)
}

fn defines(dtype: DType, by: Reduction) -> [(&'static str, &'static str); 4] {
    let function = match by {
        Reduction::Sum | Reduction::Avg => "sum",
        Reduction::Prod => "product",
        Reduction::Max => "largest",
        Reduction::Min => "smallest",
        Reduction::BitAnd => "bits_and",
        Reduction::BitOr => "bits_or",
        Reduction::BitXor => "bits_xor",
    };
    let flag = |set| if set { "1" } else { "0" };
    // Truth values are 0 and 1.
    let element = if dtype == DType::Bool { DType::U8 } else { dtype };
    [
        ("ELEM", type_name(element)),
        ("FLOAT", flag(dtype.is_float())),
        ("BY", function),
        ("AVERAGE", flag(by == Reduction::Avg)),
    ]
}
