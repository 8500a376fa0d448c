//! What workers do: read rows, and make a batch of a piece's rows. A panic in either becomes an error.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_tensor::Tensor;

use super::super::stack::odd_one;
use super::super::{HOST, Samples, wrong};
use super::plan::Plan;
use crate::Result;

/// The rows of a run: the tensors of each.
pub(super) type Items = Vec<Vec<Tensor>>;

/// The pieces of a step that are ready: their rows, and their batch.
pub(super) type Pieces = Vec<(Range<usize>, Result<Vec<Tensor>>)>;

/// The samples, and which of them each step has.
pub(super) struct Job {
    samples: Box<dyn Samples>,
    plan: Plan,
}

impl Job {
    pub(super) fn new(samples: Box<dyn Samples>, plan: Plan) -> Job {
        Job { samples, plan }
    }

    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// A whole step on this thread.
    pub(super) fn step(&self, step: u64, closed: &AtomicBool) -> Pieces {
        let piece = |rows: Range<usize>| {
            let batch =
                self.read(step, rows.clone(), closed).and_then(|items| self.collate(step, &rows, items));
            (rows, batch)
        };
        self.plan.pieces(step).into_iter().map(piece).collect()
    }

    /// The items of a run of rows, up to the first error. It stops early where the loader has been dropped.
    pub(super) fn read(&self, step: u64, rows: Range<usize>, closed: &AtomicBool) -> Result<Items> {
        let open = |_: &usize| !closed.load(Ordering::Relaxed);
        rows.take_while(open).map(|row| self.item(self.plan.first_sample(step) + row as u64)).collect()
    }

    fn item(&self, number: u64) -> Result<Vec<Tensor>> {
        let read = catch_unwind(AssertUnwindSafe(|| self.samples.sample(number)));
        let why = match read {
            Ok(Ok(tensors)) => return Ok(tensors),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("its reading panicked: {}", message(&*panic)),
        };
        Err(wrong(self.samples.name(number), why))
    }

    /// The batch of a piece's items, on the host.
    pub(super) fn collate(&self, step: u64, rows: &Range<usize>, items: Items) -> Result<Vec<Tensor>> {
        let odd = odd_one(&items);
        let made = catch_unwind(AssertUnwindSafe(|| -> Result<Vec<Tensor>> {
            let tensors = self.samples.collate(items)?.into_iter().map(|t| t.to_device(HOST, false));
            Ok(tensors.collect::<Result<_, _>>()?)
        }));
        let why = match made {
            Ok(Ok(tensors)) => return Ok(tensors),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("collate panicked: {}", message(&*panic)),
        };
        let names = odd.map(|(row, _)| {
            let name =
                |row: usize| self.samples.name(self.plan.first_sample(step) + (rows.start + row) as u64);
            format!("; item {row} is {}, item 0 is {}", name(row), name(0))
        });
        Err(wrong(format!("rows {rows:?} of step {step}"), why + &names.unwrap_or_default()))
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
