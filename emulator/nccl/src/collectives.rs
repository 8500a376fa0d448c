//! The calls that move data.

use phalanx_emulator_link::pointer::{Host, Out};

use crate::batch;
use crate::call::{Call, Operation};
use crate::communicator::communicator;
use crate::element::Kind;
use crate::reduction::Reduction;
use crate::status::{Result, Status};

/// The buffers and the type of a call.
struct Buffers {
    from: Host,
    to: Host,
    count: usize,
    kind: i32,
}

fn call(operation: Operation, buffers: Buffers, handle: usize, stream: usize) -> Result<()> {
    let found = communicator(handle)?;
    let (meeting, rank) = found.seat()?;
    let Buffers { from, to, count, kind } = buffers;
    let call = Call {
        operation,
        kind: Kind::from_number(kind)?,
        count,
        from: from.address() as u64,
        to: to.address() as u64,
    };
    if let Operation::Send(peer)
    | Operation::Receive(peer)
    | Operation::Broadcast(peer)
    | Operation::Reduce(_, peer)
    | Operation::Gather(peer)
    | Operation::Scatter(peer) = operation
        && peer >= meeting.ranks
    {
        return Err(Status::INVALID_ARGUMENT.because(format!("{call}: there are {} ranks", meeting.ranks)));
    }
    let (read, written) = call.lengths(*rank, meeting.ranks);
    if read > 0 && from.is_null() || written > 0 && to.is_null() {
        return Err(Status::INVALID_ARGUMENT.because(format!("{call}: a buffer is null")));
    }
    if let Some(failure) = meeting.error() {
        return Err(failure);
    }
    if count > 0 {
        batch::add(found.clone(), stream, call)?;
    }
    Ok(())
}

fn rank(number: i32) -> Result<usize> {
    usize::try_from(number).map_err(|_| Status::INVALID_ARGUMENT.because(format!("rank {number}")))
}

export! {
    fn ncclAllReduce(from: Host, to: Host, count: usize, kind: i32, op: i32, comm: usize, stream: usize) {
        let operation = Operation::AllReduce(Reduction::from_number(op)?);
        call(operation, Buffers { from, to, count, kind }, comm, stream)
    }
    fn ncclReduce(from: Host, to: Host, count: usize, kind: i32, op: i32, root: i32, comm: usize, stream: usize) {
        let operation = Operation::Reduce(Reduction::from_number(op)?, rank(root)?);
        call(operation, Buffers { from, to, count, kind }, comm, stream)
    }
    fn ncclReduceScatter(from: Host, to: Host, count: usize, kind: i32, op: i32, comm: usize, stream: usize) {
        let operation = Operation::ReduceScatter(Reduction::from_number(op)?);
        call(operation, Buffers { from, to, count, kind }, comm, stream)
    }
    fn ncclAllGather(from: Host, to: Host, count: usize, kind: i32, comm: usize, stream: usize) {
        call(Operation::AllGather, Buffers { from, to, count, kind }, comm, stream)
    }
    fn ncclBroadcast(from: Host, to: Host, count: usize, kind: i32, root: i32, comm: usize, stream: usize) {
        call(Operation::Broadcast(rank(root)?), Buffers { from, to, count, kind }, comm, stream)
    }
    fn ncclBcast(buffer: Host, count: usize, kind: i32, root: i32, comm: usize, stream: usize) {
        call(Operation::Broadcast(rank(root)?), Buffers { from: buffer, to: buffer, count, kind }, comm, stream)
    }
    fn ncclAlltoAll(from: Host, to: Host, count: usize, kind: i32, comm: usize, stream: usize) {
        call(Operation::AllToAll, Buffers { from, to, count, kind }, comm, stream)
    }
    fn ncclGather(from: Host, to: Host, count: usize, kind: i32, root: i32, comm: usize, stream: usize) {
        call(Operation::Gather(rank(root)?), Buffers { from, to, count, kind }, comm, stream)
    }
    fn ncclScatter(from: Host, to: Host, count: usize, kind: i32, root: i32, comm: usize, stream: usize) {
        call(Operation::Scatter(rank(root)?), Buffers { from, to, count, kind }, comm, stream)
    }
    fn ncclSend(from: Host, count: usize, kind: i32, peer: i32, comm: usize, stream: usize) {
        call(Operation::Send(rank(peer)?), Buffers { from, to: from, count, kind }, comm, stream)
    }
    fn ncclRecv(to: Host, count: usize, kind: i32, peer: i32, comm: usize, stream: usize) {
        call(Operation::Receive(rank(peer)?), Buffers { from: to, to, count, kind }, comm, stream)
    }
    fn ncclRedOpCreatePreMulSum(op: Out<i32>, scalar: Host, kind: i32, residence: i32, comm: usize) {
        Err(Status::INVALID_USAGE.because("premultiplied sums are not emulated"))
    }
    fn ncclRedOpDestroy(op: i32, comm: usize) {
        Err(Status::INVALID_USAGE.because("premultiplied sums are not emulated"))
    }
}
