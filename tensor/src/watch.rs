//! [`watch_guards`]: lets a program see each guard that a thread takes on a tensor's elements, before it is granted. So code that
//! does not say what it reads and writes can be asked.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{Result, Tensor};

/// What a guard is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardAccess {
    /// Reading elements.
    Read,
    /// Writing elements.
    Write,
}

/// Sees what a thread does with tensors' storages.
pub trait GuardWatch {
    /// The thread is about to take a guard on the tensor's storage, for the operation `op`. May block.
    ///
    /// # Errors
    /// An error is returned to the operation in place of the guard.
    fn takes(&self, tensor: &Tensor, access: GuardAccess, op: &'static str) -> Result<()>;

    /// The thread has made a tensor with a storage of its own.
    fn makes(&self, tensor: &Tensor);
}

/// How many watches there are, so that threads without any pay one load.
static WATCHES: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// This thread's watches; the last sees its guards.
    static WATCHING: RefCell<Vec<Rc<dyn GuardWatch>>> = const { RefCell::new(Vec::new()) };
}

/// Shows the guards that this thread takes to `watch` until the result is dropped. Of several watches the one that came last
/// sees them. Threads that work for an operation of this thread take no guards.
pub fn watch_guards(watch: Rc<dyn GuardWatch>) -> WatchedGuards {
    WATCHES.fetch_add(1, Ordering::Relaxed);
    WATCHING.with_borrow_mut(|all| all.push(watch.clone()));
    WatchedGuards(watch)
}

/// While it lives, its thread's guards are watched. See [`watch_guards`].
#[must_use = "guards are watched until this is dropped"]
pub struct WatchedGuards(Rc<dyn GuardWatch>);

impl Drop for WatchedGuards {
    fn drop(&mut self) {
        WATCHING.with_borrow_mut(|all| {
            if let Some(at) = all.iter().rposition(|watch| Rc::ptr_eq(watch, &self.0)) {
                all.remove(at);
            }
        });
        WATCHES.fetch_sub(1, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for WatchedGuards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WatchedGuards")
    }
}

impl Tensor {
    /// Tells this thread's watch of a guard before it is taken.
    #[inline]
    pub(crate) fn tell_guard(&self, access: GuardAccess, op: &'static str) -> Result<()> {
        #[cold]
        fn tell(tensor: &Tensor, access: GuardAccess, op: &'static str) -> Result<()> {
            let watch = WATCHING.with_borrow(|all| all.last().cloned());
            watch.map_or(Ok(()), |watch| watch.takes(tensor, access, op))
        }
        if WATCHES.load(Ordering::Relaxed) == 0 { Ok(()) } else { tell(self, access, op) }
    }

    /// This, of a new storage, of which this thread's watch is told.
    #[inline]
    pub(crate) fn tell_made(self) -> Tensor {
        #[cold]
        fn tell(tensor: &Tensor) {
            if let Some(watch) = WATCHING.with_borrow(|all| all.last().cloned()) {
                watch.makes(tensor);
            }
        }
        if WATCHES.load(Ordering::Relaxed) > 0 {
            tell(&self);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, Error};

    #[derive(Default)]
    struct Log(RefCell<Vec<String>>);

    impl GuardWatch for Log {
        fn takes(&self, tensor: &Tensor, access: GuardAccess, op: &'static str) -> Result<()> {
            self.0.borrow_mut().push(format!("{op}: {access:?} of {:?}", tensor.shape()));
            if tensor.numel() == 3 { Err(Error::invalid(op, "refused")) } else { Ok(()) }
        }

        fn makes(&self, tensor: &Tensor) {
            self.0.borrow_mut().push(format!("made {:?}", tensor.shape()));
        }
    }

    #[test]
    fn a_watch_sees_guards_and_storages_of_its_thread_and_may_refuse() {
        let (mut x, y) = (
            Tensor::zeros(&[2, 1], DType::F32, Device::CPU).unwrap(),
            Tensor::zeros(&[3], DType::F32, Device::CPU),
        );
        let (log, inner) = (Rc::new(Log::default()), Rc::new(Log::default()));
        let watched = watch_guards(log.clone());
        let copy = x.transpose(0, 1).unwrap().copy().unwrap();
        x.copy_from(&copy.transpose(0, 1).unwrap()).unwrap();
        {
            let _inner = watch_guards(inner.clone());
            assert!(y.unwrap().to_vec::<f32>().unwrap_err().to_string().contains("refused"));
            std::thread::spawn(|| Tensor::zeros(&[9], DType::F32, Device::CPU).unwrap()).join().unwrap();
        }
        drop(watched);
        x.to_vec::<f32>().unwrap();
        assert_eq!(inner.0.take(), ["to_vec: Read of [3]"]);
        let seen = log.0.take();
        assert_eq!(seen[0], "made [1, 2]");
        let (reads, writes): (Vec<_>, Vec<_>) = seen[1..].iter().partition(|line| line.contains("Read"));
        assert!(reads.len() == 2 && writes.len() == 2, "{seen:?}");
        assert!(reads[0].ends_with("[1, 2]") && writes[1].starts_with("copy_from"), "{seen:?}");
    }
}
