//! NCCL's C interface: it knows all other files, and none of them knows it.

use std::ffi::c_char;

use phalanx_emulator_link::pointer::{Host, In, Out};

use crate::call::{Call, Operation};
use crate::communicator::{
    COMMUNICATORS, Config, enqueue, group_end, group_start, init_all, init_rank, split,
};
use crate::joining::unique_id;
use crate::reduction::{ElementType, Reduction};
use crate::relay::{Ranks, UniqueId};
use crate::status::{Result, Status, answer, last, present, remember, text};

/// The version that this library reports: 2.30.7.
const VERSION: i32 = 23_007;

/// The buffers and the type of a call.
struct Buffers {
    from: Host,
    to: Host,
    count: usize,
    kind: i32,
}

fn call(operation: Operation, buffers: Buffers, handle: usize, stream: usize) -> Result<()> {
    let found = COMMUNICATORS.get(handle)?;
    let (rendezvous, rank) = found.seat()?;
    let Buffers { from, to, count, kind } = buffers;
    let call = Call {
        operation,
        kind: ElementType::from_number(kind)?,
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
        && peer >= rendezvous.ranks
    {
        return Err(Status::INVALID_ARGUMENT.because(format!("{call}: there are {} ranks", rendezvous.ranks)));
    }
    let (read, written) = call.lengths(*rank, rendezvous.ranks);
    if read > 0 && from.is_null() || written > 0 && to.is_null() {
        return Err(Status::INVALID_ARGUMENT.because(format!("{call}: a buffer is null")));
    }
    if let Some(failure) = rendezvous.error() {
        return Err(failure);
    }
    if count > 0 {
        enqueue(found.clone(), stream, call)?;
    }
    Ok(())
}

fn rank(number: i32) -> Result<usize> {
    usize::try_from(number).map_err(|_| Status::INVALID_ARGUMENT.because(format!("rank {number}")))
}

phalanx_emulator_link::export! {
    fn phalanx_emulated_nccl_name() -> *const c_char { c"phalanx emulated NCCL".as_ptr() }
    fn ncclGetErrorString(status: i32) -> *const c_char { text(status).as_ptr() }
    fn ncclGetLastError(communicator: usize) -> *const c_char { last() }
}

phalanx_emulator_link::export! {
    answered by answer;
    fn ncclGetVersion(version: Out<i32>) { present(version.set(VERSION), "version") }
    fn ncclGetUniqueId(id: Out<UniqueId>) { present(id.set(unique_id()), "uniqueId") }
    fn ncclCommInitRank(out: Out<usize>, ranks: i32, id: UniqueId, rank: i32) {
        init_rank(out, ranks, id, rank, In::null())
    }
    fn ncclCommInitRankConfig(out: Out<usize>, ranks: i32, id: UniqueId, rank: i32, config: In<Config>) {
        init_rank(out, ranks, id, rank, config)
    }
    fn ncclCommInitAll(out: Out<usize>, count: i32, devices: In<i32>) { init_all(out, count, devices) }
    fn ncclCommSplit(communicator: usize, colour: i32, key: i32, out: Out<usize>, config: In<Config>) {
        split(communicator, colour, key, out, config)
    }
    fn ncclCommFinalize(handle: usize) { Ok(COMMUNICATORS.get(handle).map(drop)?) }
    fn ncclCommDestroy(handle: usize) { Ok(COMMUNICATORS.remove(handle).map(drop)?) }
    fn ncclCommAbort(handle: usize) {
        let gone = COMMUNICATORS.remove(handle)?;
        if let Some((rendezvous, rank)) = gone.joining.seat() {
            rendezvous.leave(*rank);
        }
        Ok(())
    }
    fn ncclCommGetAsyncError(handle: usize, status: Out<i32>) {
        let found = COMMUNICATORS.get(handle)?;
        let failure = match found.is_ready() {
            false => Some(found.joining.refusal().unwrap_or_else(|| Status::IN_PROGRESS.into())),
            true => found.seat()?.0.error(),
        };
        failure.iter().for_each(remember);
        present(status.set(failure.map_or(0, |failure| failure.status.0)), "asyncError")
    }
    fn ncclCommCount(handle: usize, count: Out<i32>) {
        present(count.set(COMMUNICATORS.get(handle)?.seat()?.0.ranks as i32), "count")
    }
    fn ncclCommCuDevice(handle: usize, device: Out<i32>) { present(device.set(COMMUNICATORS.get(handle)?.device), "device") }
    fn ncclCommUserRank(handle: usize, rank: Out<i32>) {
        present(rank.set(COMMUNICATORS.get(handle)?.seat()?.1 as i32), "rank")
    }
    fn ncclGroupStart() {
        group_start();
        Ok(())
    }
    fn ncclGroupEnd() { group_end() }
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
