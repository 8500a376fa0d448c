//! [`Pending`]: a call that was started. [`Ticket`]: one rank's part in it. [`blame`]: which ranks a timeout names when ranks
//! wait for ranks that wait for others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use phalanx_tensor::{Tensor, unpoisoned};

use super::plan::Side;
use super::{Call, Reduction, Result, Signature};
use crate::flight::{FlightRecorder, Operation, What};

/// A call that was started (torch: `Work`). Dropping it does not cancel the call; an error is then returned by the
/// next call.
#[must_use = "the tensors are in use until `wait` has returned"]
#[derive(Debug)]
pub struct Pending {
    pub(crate) ticket: Arc<Ticket>,
    waiter: Option<Arc<dyn Waiter>>,
}

/// A backend's way to wait for a ticket, and to find the ranks to blame when it times out.
pub(crate) trait Waiter: std::fmt::Debug + Send + Sync {
    /// Blocks until the ticket is done; never longer than the timeout unless the call's data are on their way.
    fn wait(&self, ticket: &Arc<Ticket>) -> Result<()>;

    /// Makes this thread's later GPU work come after the call, which has ended.
    fn order(&self) -> Result<()> {
        Ok(())
    }

    /// Gives the memory of the call's tensors to this thread's current stream, which comes after the call.
    fn adopt(&self) {}
}

/// One rank's part in one call.
#[derive(Debug)]
pub(crate) struct Ticket {
    /// Without its tensors.
    pub(crate) call: Call,
    /// The input and the output. They are dropped before the end is reported, so a waiting thread finds their memory free.
    tensors: Mutex<[Option<Tensor>; 2]>,
    /// The rank, by its number in the whole run.
    pub(crate) rank: usize,
    /// The communicator's group, and the call's number in it (of a send or receive, among those of the pair).
    pub(crate) group: u64,
    pub(crate) sequence: u64,
    outcome: OnceLock<Result<()>>,
    done: AtomicBool,
    /// When all ranks had come, and which one came last, by its number in the whole run.
    complete: OnceLock<(Instant, usize)>,
    pub(crate) recorder: Option<FlightRecorder>,
    /// The operation's number in the recorder. What NCCL's ranks announce is not noted, since the call itself is.
    noted: Option<u64>,
}

impl Ticket {
    pub(crate) fn new(
        mut call: Call,
        recorder: Option<&FlightRecorder>,
        rank: usize,
        group: u64,
        sequence: u64,
    ) -> Arc<Ticket> {
        let is_noted = recorder.filter(|_| !call.signature.on_gpus);
        let noted = is_noted.map(|recorder| recorder.started(operation(recorder, &call, group, sequence)));
        let (outcome, done, complete) = (OnceLock::new(), AtomicBool::new(false), OnceLock::new());
        let tensors = Mutex::new([call.input.take(), call.output.take()]);
        let recorder = recorder.cloned();
        Arc::new(Ticket { call, tensors, rank, group, sequence, outcome, done, complete, recorder, noted })
    }

    /// All ranks have come to the call, `last` (of the whole run) after the others.
    pub(crate) fn completed_by(&self, last: usize) {
        // The first to say so learned of it first.
        let _ = self.complete.set((Instant::now(), last));
    }

    /// As the announcement of this call says.
    #[cfg(feature = "nccl")]
    pub(crate) fn completed_as(&self, announced: &Ticket) {
        if let Some(complete) = announced.complete.get() {
            let _ = self.complete.set(*complete);
        }
    }

    fn tensors(&self) -> MutexGuard<'_, [Option<Tensor>; 2]> {
        unpoisoned(self.tensors.lock())
    }

    /// The tensor of a side, if there is one and the call is not over.
    pub(crate) fn tensor(&self, side: Side) -> Option<Tensor> {
        self.tensors()[usize::from(side == Side::Output)].clone()
    }

    /// The call with its tensors.
    pub(crate) fn whole_call(&self) -> Call {
        let [input, output] = self.tensors().clone();
        Call { input, output, ..self.call.clone() }
    }

    /// Marks the call as ended with `outcome`; the first outcome counts.
    pub(crate) fn finish(&self, outcome: Result<()>) {
        let [_, output] = std::mem::take(&mut *self.tensors());
        let mut outcome = outcome;
        if self.outcome.get().is_none() {
            if let (Ok(()), Some(staged)) = (&outcome, &self.call.staged) {
                outcome = staged.deliver(output);
            }
            self.call.observations.iter().for_each(|observation| observation.report(self.call.kind()));
            if let (Some(recorder), Some(number)) = (&self.recorder, self.noted) {
                let error = outcome.as_ref().err().map(ToString::to_string);
                recorder.ended(number, self.complete.get().copied(), error);
            }
        }
        // The first outcome counts.
        let _ = self.outcome.set(outcome);
        self.done.store(true, Ordering::Release);
    }

    /// Notes that a thread begins to wait for the call.
    pub(crate) fn waits(&self) -> Instant {
        let since = Instant::now();
        if let (Some(recorder), Some(number)) = (&self.recorder, self.noted) {
            recorder.waits(number, since);
        }
        since
    }

    /// What an error of a call that hangs says about dumps.
    pub(crate) fn hint(&self) -> String {
        self.recorder.as_ref().map_or_else(String::new, FlightRecorder::hint)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(crate) fn outcome(&self) -> Option<Result<()>> {
        self.outcome.get().cloned()
    }

    /// The call and its place.
    pub(crate) fn describe(&self, ranks: &[usize]) -> String {
        format!("{} (call {} of group {ranks:?})", self.call.signature, self.sequence)
    }
}

/// What the flight recorder notes of a call.
fn operation(recorder: &FlightRecorder, call: &Call, group: u64, sequence: u64) -> Operation {
    let Signature { kind, by, dtype, root, counts, wanted, .. } = &call.signature;
    let shape = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.shape().into());
    let what = What::Call {
        group,
        sequence,
        root: *root,
        by: by.map(Reduction::name),
        dtype: *dtype,
        counts: recorder.counts(counts),
        wanted: recorder.counts(wanted),
        shapes: [shape(&call.input), shape(&call.output)],
    };
    Operation { kind: kind.name(), what, site: call.site }
}

impl Pending {
    pub(crate) fn new(ticket: Arc<Ticket>, waiter: Arc<dyn Waiter>) -> Pending {
        Pending { ticket, waiter: Some(waiter) }
    }

    /// A call that is over already.
    pub(crate) fn done(call: Call, outcome: Result<()>) -> Pending {
        let ticket = Ticket::new(call, None, 0, 0, 0);
        ticket.finish(outcome);
        Pending { ticket, waiter: None }
    }

    /// Whether it is over.
    pub fn is_done(&self) -> bool {
        self.ticket.is_done()
    }

    /// Blocks until it is over.
    ///
    /// # Errors
    /// If the call does not fit its tensors, the ranks call different things, a rank does not come in time, or
    /// anything ended the run.
    pub fn wait(self) -> Result<()> {
        match (&self.waiter, self.ticket.outcome()) {
            (Some(waiter), None) => self.wait_noted(&**waiter)?,
            (_, outcome) => outcome.unwrap_or(Ok(()))?,
        }
        self.waiter.as_ref().map_or(Ok(()), |waiter| waiter.order())?;
        self.ticket.call.staged.as_ref().map_or(Ok(()), |staged| staged.order())
    }
}

impl Pending {
    /// Waits, and tells the flight recorder.
    fn wait_noted(&self, waiter: &dyn Waiter) -> Result<()> {
        let Some(recorder) = &self.ticket.recorder else { return waiter.wait(&self.ticket) };
        let since = self.ticket.waits();
        let outcome = waiter.wait(&self.ticket);
        self.ticket.complete.get().into_iter().for_each(|complete| recorder.waited(since, *complete));
        outcome.inspect_err(|error| recorder.failed(&error.to_string()))
    }

    /// As [`Pending::wait`]. The memory of the call's tensors is freed in the order of this thread's current GPU stream from now on, which
    /// may be another one than the call was started from. No other stream uses the tensors any more.
    pub(crate) fn wait_and_adopt(self) -> Result<()> {
        let waiter = self.waiter.clone();
        self.wait()?;
        waiter.into_iter().for_each(|waiter| waiter.adopt());
        Ok(())
    }
}

/// The ranks to blame for `missing` ranks: follows `blockers`, which gives the ranks that a rank waits for, to the ranks
/// that wait for no other. If all wait in a circle, `missing`.
pub(crate) fn blame(missing: Vec<usize>, blockers: impl Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let (mut seen, mut found) = (missing.clone(), vec![]);
    let mut next = 0;
    while let Some(&rank) = seen.get(next) {
        next += 1;
        let before = blockers(rank);
        if before.is_empty() {
            found.push(rank);
        }
        for rank in before {
            if !seen.contains(&rank) {
                seen.push(rank);
            }
        }
    }
    found.sort_unstable();
    if found.is_empty() { missing } else { found }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blame_goes_to_the_end_of_the_chain() {
        let waits = |rank: usize| [vec![1], vec![2], vec![], vec![4], vec![3]][rank].clone();
        assert_eq!(blame(vec![0], waits), [2]);
        assert_eq!(blame(vec![2, 3], waits), [2]);
        assert_eq!(blame(vec![4], waits), [4]);
    }
}
