//! What becomes of all ranks' buffers: everything is read, then everything is written, so in place is no special case.
//!
//! A rank's buffer is read when it is its turn, and goes along with its call; of a rank in another process that is all there is.

use phalanx_emulator_link::driver::Driver;

use crate::call::{Call, Operation};
use crate::reduction::reduce;

/// An access that the driver refused: its status, and what it was.
pub(crate) type Refused = (i32, String);

/// What a rank brings to a call.
pub(crate) fn brought(driver: &Driver, rank: usize, ranks: usize, call: &Call) -> Result<Vec<u8>, Refused> {
    let mut data = vec![0; call.lengths(rank, ranks).0 * call.kind.bytes()];
    if !data.is_empty() {
        driver.read(call.from, &mut data).map_err(|status| refused(status, rank, call, "read from"))?;
    }
    Ok(data)
}

/// Carries out a call of all ranks for one of them, which is here; `read` is what they brought, in order.
pub(crate) fn together(driver: &Driver, rank: usize, call: &Call, read: &[&[u8]]) -> Result<(), Refused> {
    store(driver, rank, call, &result(rank, call, read))
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

/// What a rank that gives up leaves where results were to be: anything, which nobody may find uninitialised.
pub(crate) fn forsake(driver: &Driver, rank: usize, ranks: usize, call: &Call) {
    let bytes = call.lengths(rank, ranks).1 * call.kind.bytes();
    // Where there is no such memory any more, nobody reads it either.
    let _ = store(driver, rank, call, &vec![0xff; bytes]);
}

/// Gives what was sent to a rank's receive.
pub(crate) fn store(driver: &Driver, rank: usize, call: &Call, data: &[u8]) -> Result<(), Refused> {
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
