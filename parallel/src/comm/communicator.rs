//! [`Communicator`]: one rank's membership in a group, with the collectives as methods (torch: `ProcessGroup`). The backends
//! `threads`, `wire`, `nccl` and `meta` implement it. [`Traffic`]: the bytes it has sent.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_tensor::{DType, Device, Tensor, unpoisoned};
use xxhash_rust::xxh64::xxh64;

use super::{Call, Error, Pending, Reduction, Result, Signature, plan};
use crate::flight::FlightRecorder;

/// A shared communicator.
pub type Comm = Arc<dyn Communicator>;

/// One rank's membership in a group of ranks. All members call the same collectives in the same order; see [`Call`]
/// for what they do. Sends and receives are ordered by pairs, apart from the collectives.
///
/// Numbers of ranks are those inside the group; errors name the ranks of the whole run.
pub trait Communicator: fmt::Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// The members, by their numbers in the whole run.
    fn ranks(&self) -> &[usize];

    /// Starts a call. It makes progress whether or not a thread waits for it.
    fn start(&self, call: Call) -> Pending;

    /// The group of some of these ranks, in this order; its members call this, in the same order where they have
    /// several in common, and others need not. No rank waits for another.
    ///
    /// # Errors
    /// If a rank is missing in this group or named twice, or this one is not among them.
    fn group(&self, ranks: &[usize]) -> Result<Comm>;

    /// The calls and bytes that this rank has sent in this group.
    fn traffic(&self) -> Traffic;

    /// Ends the run of all ranks with this rank's error, unless it has ended already.
    fn fail(&self, cause: &str);

    /// The error that ended the run, as far as this rank knows; none while the run goes on.
    fn failure(&self) -> Option<Error>;

    /// Whether the other ranks exist; see [`meta`](super::meta).
    fn has_peers(&self) -> bool {
        true
    }

    /// The recorder of this rank's last operations; none if there is none, as on `meta`.
    fn flight_recorder(&self) -> Option<&FlightRecorder> {
        None
    }

    /// The number of ranks.
    fn size(&self) -> usize {
        self.ranks().len()
    }

    /// Does a call, and returns when it is done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    fn run(&self, call: Call) -> Result<()> {
        self.start(call).wait()
    }

    /// One group for each color, its members ordered by key, then rank; none for ranks without a color. All ranks
    /// call it.
    ///
    /// # Errors
    /// As [`Pending::wait`]; or if the ranks have no peers (`meta`): there use [`Communicator::group`].
    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Comm>> {
        let mine = Tensor::from_slice(&[color.map_or(-1, i64::from), key], &[2], Device::CPU)?;
        let all = Tensor::empty(&[2 * self.size()], DType::I64, Device::CPU)?;
        self.run(Call::all_gather(all.clone(), mine))?;
        let Some(color) = color else { return Ok(None) };
        let all = all.to_vec::<i64>()?;
        let (pairs, _) = all.as_chunks::<2>();
        let members = pairs.iter().enumerate().filter(|(_, pair)| pair[0] == i64::from(color));
        let mut members: Vec<(i64, usize)> = members.map(|(rank, pair)| (pair[1], rank)).collect();
        members.sort_unstable();
        let ranks: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        self.group(&ranks).map(Some)
    }
}

/// The collectives, done. They are functions of the type and not of the trait, so that the flight recorder learns the line that calls them.
impl dyn Communicator + '_ {
    /// Waits for all ranks.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.run(Call::barrier())
    }

    /// [`Call::all_reduce`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn all_reduce(&self, tensor: &mut Tensor, by: Reduction) -> Result<()> {
        self.run(Call::all_reduce(tensor.clone(), by))
    }

    /// [`Call::reduce_scatter`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn reduce_scatter(&self, output: &mut Tensor, input: &Tensor, by: Reduction) -> Result<()> {
        self.run(Call::reduce_scatter(output.clone(), input.clone(), by))
    }

    /// [`Call::all_gather`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Result<()> {
        self.run(Call::all_gather(output.clone(), input.clone()))
    }

    /// [`Call::broadcast`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        self.run(Call::broadcast(tensor.clone(), root))
    }

    /// [`Call::reduce`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn reduce(&self, tensor: &mut Tensor, root: usize, by: Reduction) -> Result<()> {
        self.run(Call::reduce(tensor.clone(), root, by))
    }

    /// [`Call::gather`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn gather(&self, output: Option<&mut Tensor>, input: &Tensor, root: usize) -> Result<()> {
        self.run(Call::gather(output.cloned(), input.clone(), root))
    }

    /// [`Call::scatter`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn scatter(&self, output: &mut Tensor, input: Option<&Tensor>, root: usize) -> Result<()> {
        self.run(Call::scatter(output.clone(), input.cloned(), root))
    }

    /// [`Call::all_to_all`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn all_to_all(&self, output: &mut Tensor, input: &Tensor) -> Result<()> {
        self.run(Call::all_to_all(output.clone(), input.clone()))
    }

    /// [`Call::send`], done: the tensor may be changed again. Whether the other rank has it is not known.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        self.run(Call::send(tensor.clone(), to))
    }

    /// [`Call::recv`], done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    #[track_caller]
    pub fn recv(&self, tensor: &mut Tensor, from: usize) -> Result<()> {
        self.run(Call::recv(tensor.clone(), from))
    }
}

/// The calls in which a rank sent something, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Calls, barriers included.
    pub calls: u64,
    /// Bytes of elements, as counted by the plan, which is what a ring sends.
    pub bytes: u64,
}

impl std::ops::Add for Traffic {
    type Output = Traffic;
    fn add(self, more: Traffic) -> Traffic {
        Traffic { calls: self.calls + more.calls, bytes: self.bytes + more.bytes }
    }
}

/// Counts a rank's [`Traffic`].
#[derive(Debug, Default)]
pub(crate) struct Meter {
    calls: AtomicU64,
    bytes: AtomicU64,
}

impl Meter {
    pub(crate) fn count(&self, signature: &Signature, rank: usize, size: usize) {
        let bytes = plan::sent(signature, rank, size) * signature.dtype.map_or(0, DType::size);
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Traffic {
        Traffic { calls: self.calls.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

/// The members of a group, checked: their numbers in the whole run, and this rank's place.
pub(crate) fn members(of: &[usize], me: usize, ranks: &[usize]) -> Result<(usize, Vec<usize>)> {
    let wrong = || {
        let why = format!(
            "got ranks {ranks:?} on rank {me} of {}, wanted some of them, each once, and this",
            of.len()
        );
        Error::invalid("group", why)
    };
    let twice = ranks.iter().enumerate().any(|(i, rank)| ranks[..i].contains(rank));
    let place = ranks.iter().position(|&rank| rank == me).filter(|_| !twice).ok_or_else(wrong)?;
    let world: Option<Vec<usize>> = ranks.iter().map(|&rank| of.get(rank).copied()).collect();
    Ok((place, world.ok_or_else(wrong)?))
}

/// The groups that a rank has made of one group, so that those with the same members get different numbers.
#[derive(Debug, Default)]
pub(crate) struct ChildGroups(std::sync::Mutex<Vec<Vec<usize>>>);

impl ChildGroups {
    /// The number of the next group with these members in group `parent`: the same on all members, without communication.
    pub(crate) fn identity(&self, parent: u64, members: &[usize]) -> u64 {
        let mut made = unpoisoned(self.0.lock());
        let before = made.iter().filter(|m| *m == members).count();
        made.push(members.to_vec());
        // A collision would have to be among the groups of one run.
        let words = members.iter().map(|&m| m as u64).chain([before as u64]);
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        xxh64(&bytes, parent)
    }
}
