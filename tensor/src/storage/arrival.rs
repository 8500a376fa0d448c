//! Values on their way into a storage: `Tensor::arriving` marks the storage, and every guard on it waits for them first. So a collective
//! may fill a tensor while the program goes on, and code that reads the tensor, by whatever handle, never sees the values from before.
//!
//! ```text
//! caller      arriving: mark, start the collective ── other work ── first guard: waits, takes the mark away ── reads
//! collective                  └──────── writes, in `delivering` ──── end ──┘
//! ```
//! The mark is a bit beside the counts of guards ([`Users`](super::guard::Users)), so guards on storages without it need no check for it.
//! Who waits is in a list, for as long as the storage is there and the mark is set.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_cuda::{GpuEvent, leave_lanes};

use super::Storage;
use crate::sync::lock;
use crate::{Device, Error, Result};

/// Values on their way into a storage.
#[derive(Clone)]
struct Arrival(Arc<Mutex<State>>);

impl Default for Arrival {
    fn default() -> Arrival {
        Arrival(Arc::new(Mutex::new(State::Failed("starting to bring its values panicked".into()))))
    }
}

enum State {
    /// Waits until they have come.
    OnTheWay(Wait),
    /// They have come, and the mark is still there.
    Come,
    /// The mark is gone.
    Here,
    /// They will not come.
    Failed(String),
}

/// Waits for values, or says why they do not come.
type Wait = Box<dyn FnOnce() -> std::result::Result<(), String> + Send>;

/// The marked storages, by their addresses.
static ARRIVING: Mutex<Vec<(usize, Device, Arrival)>> = Mutex::new(Vec::new());

fn address(storage: &Storage) -> usize {
    std::ptr::from_ref(storage).addr()
}

fn find(storage: &Storage) -> Option<Arrival> {
    let at = address(storage);
    lock(&ARRIVING).iter().find(|(of, ..)| *of == at).map(|(.., arrival)| arrival.clone())
}

/// Takes a storage from the list. What its entry held is dropped after the lock, since that may free other storages.
#[cold]
pub(super) fn forget(storage: &Storage) {
    let at = address(storage);
    let mut all = lock(&ARRIVING);
    let entry = all.iter().position(|(of, ..)| *of == at).map(|place| all.swap_remove(place));
    drop(all);
    drop(entry);
}

impl Storage {
    /// See `Tensor::arriving`.
    pub(crate) fn begin_arrival<W>(&self, start: impl FnOnce() -> W) -> Result<()>
    where
        W: FnOnce() -> std::result::Result<(), String> + Send + 'static,
    {
        let arrival = Arrival::default();
        let mut state = lock(&arrival.0);
        while !self.users.begin_arrival() {
            if is_delivering() {
                return Err(Error::invalid("arriving", "other values are on their way to the tensor"));
            }
            self.await_arrival("arriving")?;
        }
        // A thread that finds the mark and no entry yet looks again.
        lock(&ARRIVING).push((address(self), self.device(), arrival.clone()));
        self.bump_version();
        let _delivering = delivering();
        *state = State::OnTheWay(Box::new(start()));
        Ok(())
    }

    /// See `Tensor::arrived`.
    pub(crate) fn await_arrival(&self, op: &'static str) -> Result<()> {
        while self.users.now().is_arriving() && !is_delivering() {
            wait(self, op)?;
        }
        Ok(())
    }

    /// See `Tensor::has_not_arrived`.
    pub(crate) fn arrival_has_failed(&self) -> bool {
        let failed = |arrival: Arrival| matches!(*lock(&arrival.0), State::Failed(_));
        self.users.now().is_arriving() && find(self).is_some_and(failed)
    }
}

/// Waits for the values that are on their way into a storage, if there are any.
#[cold]
pub(super) fn wait(storage: &Storage, op: &'static str) -> Result<()> {
    find(storage).map_or(Ok(()), |arrival| arrival.wait(storage, op))
}

impl Device {
    /// Waits for all values that are on their way into its tensors: a captured graph reads and writes them without guards.
    pub(crate) fn await_arrivals(self, op: &'static str) -> Result<()> {
        if is_delivering() {
            return Ok(());
        }
        let of_device =
            |(_, device, arrival): &(usize, Device, Arrival)| (*device == self).then(|| arrival.clone());
        let here: Vec<Arrival> = lock(&ARRIVING).iter().filter_map(of_device).collect();
        here.iter().try_for_each(|arrival| arrival.come(self, op).map(drop))
    }
}

/// Makes this thread's work for a GPU come after what the GPU's own stream has been given.
fn follow_own_stream(device: Device) -> Result<()> {
    if !device.is_cuda() {
        return Ok(());
    }
    let own = leave_lanes();
    let point = GpuEvent::record(device.gpu()?);
    drop(own);
    point.and_then(|point| point.order_here()).map_err(Error::of_gpu)
}

impl Arrival {
    /// Waits until the values have come.
    fn come(&self, device: Device, op: &'static str) -> Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.0);
        if let State::OnTheWay(_) = *state {
            let panicked = State::Failed("waiting for its values panicked".into());
            let State::OnTheWay(wait) = std::mem::replace(&mut *state, panicked) else { unreachable!() };
            let own = leave_lanes();
            *state = wait().map_or_else(State::Failed, |()| State::Come);
            drop(own);
        }
        if let State::Failed(why) = &*state {
            return Err(Error::NotArrived { op, why: why.clone() });
        }
        follow_own_stream(device)?;
        Ok(state)
    }

    fn wait(&self, storage: &Storage, op: &'static str) -> Result<()> {
        let mut state = self.come(storage.device(), op)?;
        if let State::Come = *state {
            *state = State::Here;
            // In this order, since the next values may be on their way as soon as the mark is gone.
            forget(storage);
            storage.users.end_arrival();
        }
        Ok(())
    }
}

thread_local! {
    static DELIVERING: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread one that brings values into tensors, until the result is dropped: its guards do not wait for values that are on
/// their way ([`Tensor::arriving`](crate::Tensor::arriving)), since these may be the ones that it brings. A communicator's threads are such.
pub fn delivering() -> Delivering {
    Delivering { before: DELIVERING.replace(true), thread: PhantomData }
}

pub(super) fn is_delivering() -> bool {
    DELIVERING.get()
}

/// See [`delivering`].
#[derive(Debug)]
#[must_use = "the thread waits for values again when this is dropped"]
pub struct Delivering {
    before: bool,
    thread: PhantomData<*const ()>,
}

impl Drop for Delivering {
    fn drop(&mut self) {
        DELIVERING.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::Tensor;

    /// A tensor of 1 into which 2 is on its way: it comes, or fails to, when something is sent.
    fn promised() -> (Tensor, Sender<std::result::Result<(), String>>) {
        let x = Tensor::from_slice(&[1f32], &[1], Device::CPU).unwrap();
        let ((bring, brought), mut target) = (channel::<std::result::Result<(), String>>(), x.clone());
        x.arriving(|| {
            let bringing = std::thread::spawn(move || {
                let _delivering = delivering();
                brought.recv().unwrap()?;
                target.copy_from(&Tensor::from_slice(&[2f32], &[1], Device::CPU).unwrap()).unwrap();
                Ok(())
            });
            move || bringing.join().unwrap()
        })
        .unwrap();
        (x, bring)
    }

    #[test]
    fn readers_and_writers_wait_for_values_on_their_way() {
        let (x, bring) = promised();
        let version = x.version();
        std::thread::scope(|scope| {
            let readers = [(); 3].map(|()| scope.spawn(|| x.narrow(0, 0, 1).unwrap().item::<f32>().unwrap()));
            std::thread::sleep(Duration::from_millis(20));
            assert!(readers.iter().all(|reader| !reader.is_finished()));
            bring.send(Ok(())).unwrap();
            readers.into_iter().for_each(|reader| assert_eq!(reader.join().unwrap(), 2.0));
        });
        assert_eq!(x.version(), version, "the version has gone up before");
        assert!(find(x.storage()).is_none());
        let (mut x, bring) = promised();
        bring.send(Ok(())).unwrap();
        x.write::<f32>("double").unwrap().iter_mut().for_each(|x| *x *= 2.0);
        assert_eq!(x.item::<f32>().unwrap(), 4.0);
        // The next values wait for those before.
        x.arriving(|| || Ok(())).unwrap();
        x.arriving(|| || Ok(())).unwrap();
        x.arrived("test").unwrap();
        assert_eq!(x.item::<f32>().unwrap(), 4.0);
    }

    #[test]
    fn values_that_do_not_come_are_an_error_of_every_guard() {
        let (mut x, bring) = promised();
        assert!(!x.has_not_arrived());
        bring.send(Err("rank 1 is lost".into())).unwrap();
        let wanted = "to_vec: the tensor's values were on their way and have not come: rank 1 is lost";
        for _ in 0..2 {
            assert_eq!(x.to_vec::<f32>().unwrap_err().to_string(), wanted);
        }
        // Also of the only handle.
        assert!(matches!(x.write::<f32>("double"), Err(Error::NotArrived { op: "double", .. })));
        let view = x.clone();
        assert!(matches!(x.write::<f32>("double"), Err(Error::NotArrived { op: "double", .. })));
        assert!(view.has_not_arrived() && view.arriving(|| || Ok(())).is_err());
    }

    #[test]
    fn a_storage_that_is_dropped_leaves_nothing_behind() {
        let (x, bring) = promised();
        let at = address(x.storage());
        bring.send(Err("lost".into())).unwrap();
        x.arrived("test").unwrap_err();
        let listed = || lock(&ARRIVING).iter().any(|(of, ..)| *of == at);
        assert!(listed());
        drop(x);
        assert!(!listed());
    }
}
