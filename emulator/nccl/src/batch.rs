//! What is queued together: one call, or those between the start and the end of a group.

use std::cell::RefCell;
use std::sync::{Arc, PoisonError};

use crate::call::Call;
use crate::communicator::Communicator;
use crate::status::{Result, Status};
use crate::stream::{driver, order, within};

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
pub(crate) fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// A communicator whose ranks are waited for at the end of the group.
pub(crate) fn add_start(communicator: Arc<Communicator>) {
    GROUP.with_borrow_mut(|group| group.starts.push(communicator));
}

/// Queues a call, or keeps it for the end of the group.
pub(crate) fn add(communicator: Arc<Communicator>, stream: usize, call: Call) -> Result<()> {
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
    let (meeting, rank) = communicator.seat()?.clone();
    let driver = driver()?;
    within(communicator.context, || {
        let mut last = communicator.last_stream.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = *last {
            order(last, *stream)?;
        }
        let others: Vec<usize> =
            calls.iter().map(|pending| pending.stream).filter(|other| other != stream).collect();
        others.iter().try_for_each(|other| order(*other, *stream))?;
        let calls: Vec<Call> = calls.iter().map(|pending| pending.call).collect();
        let names: Vec<String> = calls.iter().map(Call::to_string).collect();
        let what = format!("NCCL's {} of rank {rank}", names.join(", "));
        let accesses: Vec<_> = calls.iter().flat_map(|call| call.accesses(rank, meeting.ranks)).collect();
        let queued =
            driver.submit(*stream, &what, &accesses, move |turn| meeting.ask(driver, rank, turn, &calls));
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

export! {
    fn ncclGroupStart() {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(())
    }
    fn ncclGroupEnd() {
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
}
