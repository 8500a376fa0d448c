//! Communicators: one rank's handle on its meeting with the others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use phalanx_emulator_link::pointer::{In, Out};

use crate::batch;
use crate::id::Id;
use crate::joining::Joining;
use crate::meeting::Meeting;
use crate::status::{Result, Status, present};
use crate::stream::{current, primary};

/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOUR: i32 = -1;

/// A rank of a communicator.
#[derive(Debug)]
pub(crate) struct Communicator {
    joining: Joining,
    pub context: usize,
    device: i32,
    splits: AtomicU64,
    /// The stream of its last call.
    pub last_stream: Mutex<Option<usize>>,
}

impl Communicator {
    fn new(joining: Joining, (context, device): (usize, i32)) -> Communicator {
        let (splits, last_stream) = (AtomicU64::new(0), Mutex::default());
        Communicator { joining, context, device, splits, last_stream }
    }

    /// The meeting and the rank; waits until all ranks have come.
    pub(crate) fn seat(&self) -> Result<&(Arc<Meeting>, usize)> {
        self.joining.wait()
    }

    /// Whether all ranks have come.
    fn is_ready(&self) -> bool {
        self.joining.seat().is_some()
    }
}

type Living = (usize, HashMap<usize, Arc<Communicator>>);
static LIVING: LazyLock<Mutex<Living>> = LazyLock::new(Mutex::default);
/// The upper half of the handles.
const BASE: usize = 32 << 40;

fn living() -> MutexGuard<'static, Living> {
    LIVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The communicator of a handle.
pub(crate) fn communicator(handle: usize) -> Result<Arc<Communicator>> {
    living().1.get(&handle).cloned().ok_or_else(|| unknown(handle))
}

fn unknown(handle: usize) -> crate::status::Failure {
    Status::INVALID_ARGUMENT.because(format!("{handle:#x} is no living communicator"))
}

fn add(communicator: Arc<Communicator>) -> usize {
    let mut living = living();
    living.0 += 1;
    let handle = BASE + living.0 * 16;
    living.1.insert(handle, communicator);
    handle
}

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
    present(out.set(add(communicator.clone())), "comm")?;
    if batch::is_open() {
        batch::add_start(communicator);
        return Ok(());
    }
    if config.get().is_some_and(|config| config.blocking == 0) && !communicator.is_ready() {
        return Err(Status::IN_PROGRESS.because(""));
    }
    communicator.seat().map(|_| ())
}

fn init_rank(out: Out<usize>, ranks: i32, id: Id, rank: i32, config: In<Config>) -> Result<()> {
    let wrong = || Status::INVALID_ARGUMENT.because(format!("rank {rank} of {ranks}"));
    let (rank, ranks) =
        (usize::try_from(rank).map_err(|_| wrong())?, usize::try_from(ranks).map_err(|_| wrong())?);
    if rank >= ranks {
        return Err(wrong());
    }
    start(out, Communicator::new(Joining::by_id(id, rank, ranks)?, current()?), config)
}

fn init_all(out: Out<usize>, count: i32, devices: In<i32>) -> Result<()> {
    let count = usize::try_from(count).ok().filter(|n| *n > 0);
    let count = count.ok_or_else(|| Status::INVALID_ARGUMENT.because("no devices"))?;
    let id = Id::new();
    let mut all = Vec::new();
    for rank in 0..count {
        let device = devices.at(rank).unwrap_or(rank as i32);
        let place = (primary(device)?, device);
        all.push(Arc::new(Communicator::new(Joining::by_id(id, rank, count)?, place)));
    }
    for (rank, communicator) in all.into_iter().enumerate() {
        communicator.seat()?;
        present(out.set_at(rank, add(communicator)), "comm")?;
    }
    Ok(())
}

fn split(handle: usize, colour: i32, key: i32, out: Out<usize>, config: In<Config>) -> Result<()> {
    let parent = communicator(handle)?;
    let (meeting, rank) = parent.seat()?;
    let number = parent.splits.fetch_add(1, Ordering::Relaxed);
    let joining = Joining::by_split(meeting, number, *rank, (colour, key))?;
    let child = Communicator::new(joining, (parent.context, parent.device));
    if colour != NO_COLOUR {
        return start(out, child, config);
    }
    present(out.set(0), "newcomm")?;
    // It still tells the others that it wants to be in none.
    if batch::is_open() {
        batch::add_start(Arc::new(child))
    } else {
        child.seat().map(|_| ())?
    }
    Ok(())
}

fn remove(handle: usize) -> Result<Arc<Communicator>> {
    living().1.remove(&handle).ok_or_else(|| unknown(handle))
}

export! {
    fn ncclCommInitRank(out: Out<usize>, ranks: i32, id: Id, rank: i32) {
        init_rank(out, ranks, id, rank, In::null())
    }
    fn ncclCommInitRankConfig(out: Out<usize>, ranks: i32, id: Id, rank: i32, config: In<Config>) {
        init_rank(out, ranks, id, rank, config)
    }
    fn ncclCommInitAll(out: Out<usize>, count: i32, devices: In<i32>) { init_all(out, count, devices) }
    fn ncclCommSplit(communicator: usize, colour: i32, key: i32, out: Out<usize>, config: In<Config>) {
        split(communicator, colour, key, out, config)
    }
    fn ncclCommFinalize(handle: usize) { communicator(handle).map(|_| ()) }
    fn ncclCommDestroy(handle: usize) { remove(handle).map(|_| ()) }
    fn ncclCommAbort(handle: usize) {
        let gone = remove(handle)?;
        if let Some((meeting, rank)) = gone.joining.seat() {
            meeting.leave(*rank);
        }
        Ok(())
    }
    fn ncclCommGetAsyncError(handle: usize, status: Out<i32>) {
        let found = communicator(handle)?;
        let now = match found.is_ready() {
            false => Status::IN_PROGRESS.0,
            true => found.seat()?.0.error().map_or(0, |failure| failure.status.0),
        };
        present(status.set(now), "asyncError")
    }
    fn ncclCommCount(handle: usize, count: Out<i32>) {
        present(count.set(communicator(handle)?.seat()?.0.ranks as i32), "count")
    }
    fn ncclCommCuDevice(handle: usize, device: Out<i32>) { present(device.set(communicator(handle)?.device), "device") }
    fn ncclCommUserRank(handle: usize, rank: Out<i32>) {
        present(rank.set(communicator(handle)?.seat()?.1 as i32), "rank")
    }
}
