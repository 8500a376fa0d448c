//! Numbers that a recomputation has to see again, though what they were taken from has changed: how often a layer has drawn,
//! whether it was in evaluation mode.

use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    /// What the checkpointed function that runs on this thread has been told.
    static WRITTEN: RefCell<Option<Vec<u64>>> = const { RefCell::new(None) };
    /// What the function that is run again here was told the first time, and how much of that it has heard again.
    static READ: RefCell<Option<(Arc<[u64]>, usize)>> = const { RefCell::new(None) };
}

/// The number that `make` gives; in a recomputation the one that it gave in the first run. For layers whose forward pass
/// depends on something that may change before the backward pass.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use phalanx_autograd::{Var, checkpoint, repeated, tensor::{Device, Tensor}};
/// static CALLS: AtomicU64 = AtomicU64::new(0);
/// let x = Var::leaf(Tensor::scalar(3f64, Device::CPU)?)?;
/// let y = checkpoint(|v| v[0].mul_scalar(repeated(|| CALLS.fetch_add(1, Ordering::Relaxed)) as f64), &[&x])?;
/// CALLS.store(50, Ordering::Relaxed);
/// y.backward()?;
/// assert_eq!(x.grad().unwrap().item::<f64>()?, 0.0); // as in the forward pass
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
pub fn repeated(make: impl FnOnce() -> u64) -> u64 {
    let number = next().unwrap_or_else(make);
    WRITTEN.with_borrow_mut(|written| written.iter_mut().for_each(|log| log.push(number)));
    number
}

fn next() -> Option<u64> {
    READ.with_borrow_mut(|read| {
        let (numbers, heard) = read.as_mut()?;
        *heard += 1;
        numbers.get(*heard - 1).copied()
    })
}

/// Writes down what this thread is told until it ends.
pub(crate) struct Log {
    outer: Option<Vec<u64>>,
}

impl Log {
    pub(crate) fn write() -> Log {
        Log { outer: WRITTEN.replace(Some(Vec::new())) }
    }

    pub(crate) fn end(mut self) -> Arc<[u64]> {
        let numbers = WRITTEN.take().unwrap_or_default();
        if let Some(outer) = &mut self.outer {
            outer.extend_from_slice(&numbers);
        }
        numbers.into()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        WRITTEN.set(self.outer.take());
    }
}

/// Tells this thread these numbers again until the result is dropped.
pub(crate) fn read(numbers: &Arc<[u64]>) -> Reading {
    Reading { outer: READ.replace(Some((numbers.clone(), 0))) }
}

/// Ends the effect of [`read`].
pub(crate) struct Reading {
    outer: Option<(Arc<[u64]>, usize)>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        READ.set(self.outer.take());
    }
}
