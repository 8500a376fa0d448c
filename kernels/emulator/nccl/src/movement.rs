//! What becomes of all ranks' buffers: everything is read, then everything is written, so in place is no special case.

use phalanx_emulator_link::driver::Driver;

use crate::call::{Call, Operation};
use crate::reduction::reduce;

/// An access that the driver refused: its status, and what it was.
pub(crate) type Refused = (i32, String);

/// Carries out a call of all ranks; `calls` are theirs, in order.
pub(crate) fn together(driver: &Driver, calls: &[Call]) -> Result<(), Refused> {
    let ranks = calls.len();
    let mut read = Vec::with_capacity(ranks);
    for (rank, call) in calls.iter().enumerate() {
        let bytes = call.lengths(rank, ranks).0 * call.kind.bytes();
        read.push(fetch(driver, rank, call, call.from, bytes)?);
    }
    for (rank, call) in calls.iter().enumerate() {
        let result = result(rank, call, &read);
        store(driver, rank, call, &result)?;
    }
    Ok(())
}

/// What one rank gets.
fn result(rank: usize, call: &Call, read: &[Vec<u8>]) -> Vec<u8> {
    let one = call.count * call.kind.bytes();
    let all = || read.iter().map(Vec::as_slice).collect::<Vec<_>>();
    let share = |of: usize| read.iter().map(|buffer| &buffer[of * one..][..one]).collect::<Vec<_>>();
    match call.operation {
        Operation::AllReduce(reduction) => reduce(call.kind, reduction, &all()),
        Operation::Reduce(reduction, root) if rank == root => reduce(call.kind, reduction, &all()),
        Operation::ReduceScatter(reduction) => reduce(call.kind, reduction, &share(rank)),
        Operation::AllGather => read.concat(),
        Operation::Gather(root) if rank == root => read.concat(),
        Operation::Broadcast(root) => read[root].clone(),
        Operation::AllToAll => share(rank).concat(),
        Operation::Scatter(root) => read[root][rank * one..][..one].to_vec(),
        Operation::Reduce(..) | Operation::Gather(_) | Operation::Send(_) | Operation::Receive(_) => {
            Vec::new()
        }
    }
}

/// What a rank that gives up leaves where results were to be: anything, which nobody may find uninitialised.
pub(crate) fn forsake(driver: &Driver, rank: usize, ranks: usize, call: &Call) {
    let bytes = call.lengths(rank, ranks).1 * call.kind.bytes();
    // Where there is no such memory any more, nobody reads it either.
    let _ = store(driver, rank, call, &vec![0xff; bytes]);
}

/// Carries out a send and its receive.
pub(crate) fn between(driver: &Driver, send: (usize, &Call), receive: (usize, &Call)) -> Result<(), Refused> {
    let bytes = send.1.count * send.1.kind.bytes();
    let data = fetch(driver, send.0, send.1, send.1.from, bytes)?;
    store(driver, receive.0, receive.1, &data)
}

fn fetch(driver: &Driver, rank: usize, call: &Call, address: u64, bytes: usize) -> Result<Vec<u8>, Refused> {
    let mut data = vec![0; bytes];
    if bytes > 0 {
        driver.read(address, &mut data).map_err(|status| refused(status, rank, call, "read from"))?;
    }
    Ok(data)
}

fn store(driver: &Driver, rank: usize, call: &Call, data: &[u8]) -> Result<(), Refused> {
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
