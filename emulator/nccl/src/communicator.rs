//! Communicators: one rank's handle on its rendezvous with the others, and what is queued together: one call, or those
//! between the start and the end of a group.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::lock;
use phalanx_emulator_link::pointer::{In, Out};

use crate::call::{Call, kinds};
use crate::driver::{current, driver, is_capturing, order, primary, within};
use crate::joining::{Joining, unique_id};
use crate::relay::UniqueId;
use crate::rendezvous::Rendezvous;
use crate::status::{Result, Status, present};
use crate::turns::Turn;

/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOUR: i32 = -1;

/// A rank of a communicator.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub joining: Joining,
    pub context: usize,
    pub device: i32,
    splits: AtomicU64,
    /// The stream of its last call.
    pub last_stream: Mutex<Option<usize>>,
}

impl Communicator {
    fn new(joining: Joining, (context, device): (usize, i32)) -> Communicator {
        let (splits, last_stream) = (AtomicU64::new(0), Mutex::default());
        Communicator { joining, context, device, splits, last_stream }
    }

    /// The rendezvous and the rank; waits until all ranks have come.
    pub(crate) fn seat(&self) -> Result<&(Arc<Rendezvous>, usize)> {
        self.joining.wait()
    }

    /// Whether all ranks have come.
    pub(crate) fn is_ready(&self) -> bool {
        self.joining.seat().is_some()
    }
}

/// The communicators that this process has not destroyed.
pub(crate) static COMMUNICATORS: Handles<Arc<Communicator>> = Handles::new("communicator", 32);

/// The first fields of `ncclConfig_t`; the others are hints.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Config {
    bytes: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

/// Hands out the handle of a communicator and waits for its ranks, unless that is for later.
fn start(out: Out<usize>, communicator: Communicator, config: In<Config>) -> Result<()> {
    let communicator = Arc::new(communicator);
    present(out.set(COMMUNICATORS.add(communicator.clone())), "comm")?;
    if is_open() {
        add_start(communicator);
        return Ok(());
    }
    if config.get().is_some_and(|config| config.blocking == 0) && !communicator.is_ready() {
        return Err(Status::IN_PROGRESS.because(""));
    }
    communicator.seat().map(|_| ())
}

/// A rank of a new communicator, in a context and on its device.
fn by_id(id: UniqueId, rank: usize, ranks: usize, place: (usize, i32)) -> Result<Communicator> {
    Ok(Communicator::new(Joining::by_id(id, rank, ranks, place.1)?, place))
}

pub(crate) fn init_rank(
    out: Out<usize>,
    ranks: i32,
    id: UniqueId,
    rank: i32,
    config: In<Config>,
) -> Result<()> {
    let wrong = || Status::INVALID_ARGUMENT.because(format!("rank {rank} of {ranks}"));
    let (rank, ranks) =
        (usize::try_from(rank).map_err(|_| wrong())?, usize::try_from(ranks).map_err(|_| wrong())?);
    if rank >= ranks {
        return Err(wrong());
    }
    start(out, by_id(id, rank, ranks, current()?)?, config)
}

pub(crate) fn init_all(out: Out<usize>, count: i32, devices: In<i32>) -> Result<()> {
    let count = usize::try_from(count).ok().filter(|n| *n > 0);
    let count = count.ok_or_else(|| Status::INVALID_ARGUMENT.because("no devices"))?;
    let id = unique_id();
    let mut all = Vec::new();
    for rank in 0..count {
        let device = devices.at(rank).unwrap_or(rank as i32);
        let place = (primary(device)?, device);
        all.push(Arc::new(by_id(id, rank, count, place)?));
    }
    for (rank, communicator) in all.into_iter().enumerate() {
        communicator.seat()?;
        present(out.set_at(rank, COMMUNICATORS.add(communicator)), "comm")?;
    }
    Ok(())
}

pub(crate) fn split(handle: usize, colour: i32, key: i32, out: Out<usize>, config: In<Config>) -> Result<()> {
    let parent = COMMUNICATORS.get(handle)?;
    let (rendezvous, rank) = parent.seat()?;
    let number = parent.splits.fetch_add(1, Ordering::Relaxed);
    let joining = Joining::by_split(rendezvous, number, *rank, (colour, key))?;
    let child = Communicator::new(joining, (parent.context, parent.device));
    if colour != NO_COLOUR {
        return start(out, child, config);
    }
    present(out.set(0), "newcomm")?;
    // It still tells the others that it wants to be in none.
    if is_open() {
        add_start(Arc::new(child))
    } else {
        child.seat().map(|_| ())?
    }
    Ok(())
}

/// A call with where it belongs.
#[derive(Debug, Clone)]
struct Pending {
    communicator: Arc<Communicator>,
    stream: usize,
    call: Call,
}

/// The group that a thread has opened.
#[derive(Debug, Default)]
struct Group {
    depth: usize,
    starts: Vec<Arc<Communicator>>,
    calls: Vec<Pending>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Whether this thread has opened a group.
fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// A communicator whose ranks are waited for at the end of the group.
fn add_start(communicator: Arc<Communicator>) {
    GROUP.with_borrow_mut(|group| group.starts.push(communicator));
}

/// Queues a call, or keeps it for the end of the group.
pub(crate) fn enqueue(communicator: Arc<Communicator>, stream: usize, call: Call) -> Result<()> {
    let pending = Pending { communicator, stream, call };
    if is_open() {
        GROUP.with_borrow_mut(|group| group.calls.push(pending));
        return Ok(());
    }
    submit(&[pending])
}

/// Queues calls of one communicator, on the stream of the first.
fn submit(calls: &[Pending]) -> Result<()> {
    let Some(Pending { communicator, stream, .. }) = calls.first() else { return Ok(()) };
    let (rendezvous, rank) = communicator.seat()?.clone();
    let driver = driver()?;
    within(communicator.context, || {
        let mut last = lock(&communicator.last_stream);
        if let Some(last) = *last {
            order(last, *stream)?;
        }
        let others: Vec<usize> =
            calls.iter().map(|pending| pending.stream).filter(|other| other != stream).collect();
        others.iter().try_for_each(|other| order(*other, *stream))?;
        let calls: Vec<Call> = calls.iter().map(|pending| pending.call).collect();
        let names: Vec<String> = calls.iter().map(Call::to_string).collect();
        let what = format!("NCCL's {} of rank {rank}", names.join(", "));
        let lengths = calls.iter().map(|call| call.moved_bytes(rank, rendezvous.ranks));
        let (read, written) = lengths.fold((0, 0), |(r, w), (read, written)| (r + read, w + written));
        driver.note(&kinds(&calls, rendezvous.ranks), read, written, 0);
        let accesses: Vec<_> = calls.iter().flat_map(|call| call.accesses(rank, rendezvous.ranks)).collect();
        let turn = match driver.is_dry() || is_capturing(*stream)? {
            true => Turn::any(),
            false => Turn::new((communicator.device, *stream), &rendezvous, rank, what.clone()),
        };
        let ask = move |ticket| turn.take(ticket, || rendezvous.ask(driver, rank, ticket, &calls));
        let queued = driver.submit(*stream, &what, &accesses, ask);
        queued.map_err(|status| {
            Status::UNHANDLED_CUDA_ERROR.because(format!("the driver refuses {what}: {status}"))
        })?;
        *last = Some(*stream);
        others.iter().try_for_each(|other| order(*stream, *other))
    })
}

/// The end of the outermost group.
fn flush(group: Group) -> Result<()> {
    group.starts.iter().try_for_each(|communicator| communicator.seat().map(|_| ()))?;
    let mut batches: Vec<Vec<Pending>> = Vec::new();
    for pending in group.calls {
        let same = |batch: &&mut Vec<Pending>| Arc::ptr_eq(&batch[0].communicator, &pending.communicator);
        match batches.iter_mut().find(same) {
            Some(batch) => batch.push(pending),
            None => batches.push(vec![pending]),
        }
    }
    batches.iter().try_for_each(|batch| submit(batch))
}

/// Opens a group, or one more within it.
pub(crate) fn group_start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Closes what [`group_start`] opened; the outermost end queues the group's calls.
pub(crate) fn group_end() -> Result<()> {
    let ended = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(Status::INVALID_USAGE.because("no group was started")),
        1 => Ok(Some(std::mem::take(group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })?;
    ended.map_or(Ok(()), flush)
}
