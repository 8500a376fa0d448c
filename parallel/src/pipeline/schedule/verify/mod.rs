//! [`verify`]: whether a schedule can be run, and computes what it should.

mod complete;
mod matched;
mod order;
mod run;

use super::{Kind, Result, Schedule};

/// Checks a schedule, with or without transfers, and counts what each rank must hold.
///
/// - Every stage has every micro-batch's `F` once, and its `B`, or its `I` and `W`, once, on the stage's rank.
/// - Whatever a computation needs has been done or received before it: `F` the output of the stage before, `B` and `I` their
///   stage's `F` and the gradient of the next stage, `W` its `I`. A stage adds its weights' gradients (`B` or `W`) ascending.
/// - If there is any transfer, there is each between ranks, none within one, and every rank receives from
///   another what that one sends, in the same order.
/// - An update (`U`) comes right after the gradients of its micro-batch have been added, before any others.
/// - The ranks come to their ends if up to `capacity` transfers of a pair of ranks may be sent before they are received; with 0, a
///   send waits for its receive. (Without transfers: if a computation waits for those it needs.)
///
/// Returned is, for each rank, how many activations it holds at once at the most: one more after an `F`, one less after a
/// `B`, or after the `W` that follows an `I`, in units of a stage and micro-batch.
///
/// # Errors
/// What is wrong first, with rank, position and action.
pub fn verify(schedule: &Schedule, capacity: usize) -> Result<Vec<usize>> {
    complete::check(schedule)?;
    order::check(schedule)?;
    matched::check(schedule)?;
    run::check(schedule, capacity)?;
    Ok(schedule.ranks.iter().map(|actions| live(actions.iter().map(|action| action.kind))).collect())
}

/// The most activations at once.
fn live(kinds: impl Iterator<Item = Kind>) -> usize {
    let (mut now, mut most) = (0_usize, 0);
    for kind in kinds {
        match kind {
            Kind::Forward => now += 1,
            Kind::Backward | Kind::Weight => now = now.saturating_sub(1),
            _ => {}
        }
        most = most.max(now);
    }
    most
}
