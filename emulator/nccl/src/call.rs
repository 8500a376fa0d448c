//! What one rank asks for, and what becomes of all ranks' buffers: everything is read, then everything is written, so
//! in place is no special case.
//!
//! A rank's buffer is read when it is its turn, and goes along with its call; of a rank in another process that is all
//! there is.

use std::collections::BTreeMap;
use std::fmt;

use phalanx_emulator_link::driver::{Access, Driver};

use crate::reduction::{ElementType, Reduction, reduce};

/// The operation of a call, without what differs between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    AllReduce(Reduction),
    Reduce(Reduction, usize),
    ReduceScatter(Reduction),
    AllGather,
    Broadcast(usize),
    AllToAll,
    Gather(usize),
    Scatter(usize),
    /// To a rank.
    Send(usize),
    /// From a rank.
    Receive(usize),
}

/// A call of one rank; of one in another process, addresses are not known. `count` is what NCCL calls it for the
/// operation: of a gather the elements of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub operation: Operation,
    pub kind: ElementType,
    pub count: usize,
    pub from: u64,
    pub to: u64,
}

impl Call {
    /// Elements that the rank's own buffers have: read and written.
    pub(crate) fn lengths(&self, rank: usize, ranks: usize) -> (usize, usize) {
        let (one, all) = (self.count, self.count * ranks);
        match self.operation {
            Operation::AllReduce(_) => (one, one),
            Operation::Reduce(_, root) => (one, if rank == root { one } else { 0 }),
            Operation::ReduceScatter(_) => (all, one),
            Operation::AllGather => (one, all),
            Operation::Broadcast(root) => (if rank == root { one } else { 0 }, one),
            Operation::AllToAll => (all, all),
            Operation::Gather(root) => (one, if rank == root { all } else { 0 }),
            Operation::Scatter(root) => (if rank == root { all } else { 0 }, one),
            Operation::Send(_) => (one, 0),
            Operation::Receive(_) => (0, one),
        }
    }

    /// Bytes of the rank's own buffers that are read and written.
    pub(crate) fn moved_bytes(&self, rank: usize, ranks: usize) -> (u64, u64) {
        let (read, written) = self.lengths(rank, ranks);
        ((read * self.kind.bytes()) as u64, (written * self.kind.bytes()) as u64)
    }

    /// The device memory that it touches.
    pub(crate) fn accesses(&self, rank: usize, ranks: usize) -> Vec<Access> {
        let (read, written) = self.lengths(rank, ranks);
        let access =
            |address, count, written| Access { address, bytes: (count * self.kind.bytes()) as u64, written };
        let both = [access(self.from, read, 0), access(self.to, written, 1)];
        // What is written in place is one access: a read of the same operation is no conflict with itself.
        both.into_iter().filter(|access| access.bytes > 0).collect()
    }

    /// Whether it is one of two ranks' calls rather than all ranks'.
    pub(crate) fn is_between_two(&self) -> bool {
        matches!(self.operation, Operation::Send(_) | Operation::Receive(_))
    }

    /// Whether all ranks' calls are the same but for the addresses.
    pub(crate) fn fits(&self, other: &Call) -> bool {
        (self.operation, self.kind, self.count) == (other.operation, other.kind, other.count)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = format!("{} {:?}", self.count, self.kind).to_lowercase();
        match self.operation {
            Operation::AllReduce(reduction) => write!(f, "all_reduce of {what} ({reduction})"),
            Operation::Reduce(reduction, root) => write!(f, "reduce of {what} ({reduction}) to rank {root}"),
            Operation::ReduceScatter(reduction) => write!(f, "reduce_scatter of {what} a rank ({reduction})"),
            Operation::AllGather => write!(f, "all_gather of {what} a rank"),
            Operation::Broadcast(root) => write!(f, "broadcast of {what} from rank {root}"),
            Operation::AllToAll => write!(f, "all_to_all of {what} a pair"),
            Operation::Gather(root) => write!(f, "gather of {what} a rank to rank {root}"),
            Operation::Scatter(root) => write!(f, "scatter of {what} a rank from rank {root}"),
            Operation::Send(peer) => write!(f, "send of {what} to rank {peer}"),
            Operation::Receive(peer) => write!(f, "receive of {what} from rank {peer}"),
        }
    }
}

/// The calls of one operation in the driver's log: each kind without its sizes, and how often it is called.
pub(crate) fn kinds(calls: &[Call], ranks: usize) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    for call in calls {
        let text = call.to_string();
        let name = text.split(' ').next().unwrap_or_default();
        *counts.entry(format!("{name} {:?}", call.kind).to_lowercase()).or_default() += 1;
    }
    let times = |(kind, count): (String, usize)| if count == 1 { kind } else { format!("{count} x {kind}") };
    format!("{} of {ranks} ranks", counts.into_iter().map(times).collect::<Vec<_>>().join(", "))
}

/// An access that the driver refused: its status, and what it was.
pub(crate) type Refused = (i32, String);

/// Reads what a rank brings to a call.
pub(crate) fn read_input(
    driver: &Driver,
    rank: usize,
    ranks: usize,
    call: &Call,
) -> Result<Vec<u8>, Refused> {
    if driver.is_dry() {
        return Ok(Vec::new());
    }
    let mut data = vec![0; call.lengths(rank, ranks).0 * call.kind.bytes()];
    if !data.is_empty() {
        driver.read(call.from, &mut data).map_err(|status| refused(status, rank, call, "read from"))?;
    }
    Ok(data)
}

/// Carries out a call of all ranks for one of them, which is here; `read` is what they brought, in order.
pub(crate) fn carry_out(driver: &Driver, rank: usize, call: &Call, read: &[&[u8]]) -> Result<(), Refused> {
    if driver.is_dry() {
        return Ok(());
    }
    write_output(driver, rank, call, &result(rank, call, read))
}

/// What one rank gets.
fn result(rank: usize, call: &Call, read: &[&[u8]]) -> Vec<u8> {
    let one = call.count * call.kind.bytes();
    let share = |of: usize| read.iter().map(|buffer| &buffer[of * one..][..one]).collect::<Vec<_>>();
    match call.operation {
        Operation::AllReduce(reduction) => reduce(call.kind, reduction, read),
        Operation::Reduce(reduction, root) if rank == root => reduce(call.kind, reduction, read),
        Operation::ReduceScatter(reduction) => reduce(call.kind, reduction, &share(rank)),
        Operation::AllGather => read.concat(),
        Operation::Gather(root) if rank == root => read.concat(),
        Operation::Broadcast(root) => read[root].to_vec(),
        Operation::AllToAll => share(rank).concat(),
        Operation::Scatter(root) => read[root][rank * one..][..one].to_vec(),
        Operation::Reduce(..) | Operation::Gather(_) | Operation::Send(_) | Operation::Receive(_) => {
            Vec::new()
        }
    }
}

/// Fills the result of a rank that gives up: any bytes, so that no later read is one of
/// uninitialised memory.
pub(crate) fn abandon(driver: &Driver, rank: usize, ranks: usize, call: &Call) {
    if driver.is_dry() {
        return;
    }
    let bytes = call.lengths(rank, ranks).1 * call.kind.bytes();
    // If the memory was freed, there is nothing to write.
    let _ = write_output(driver, rank, call, &vec![0xff; bytes]);
}

/// Writes a result, or what was sent, to a rank's buffer.
pub(crate) fn write_output(driver: &Driver, rank: usize, call: &Call, data: &[u8]) -> Result<(), Refused> {
    if data.is_empty() {
        return Ok(());
    }
    driver.write(call.to, data).map_err(|status| refused(status, rank, call, "write to"))
}

fn refused(status: i32, rank: usize, call: &Call, verb: &str) -> Refused {
    (
        status,
        format!("{call}: rank {rank}'s buffer to {verb} is not where, or not as long as, it is said to be"),
    )
}
