//! Values on their way into a storage: [`Tensor::arriving`] marks the storage, and every guard on it waits for them first. So a collective
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

use phalanx_cuda::leave_lanes;

use super::Storage;
use crate::cuda::GpuEvent;
use crate::sync::lock;
use crate::{Device, Error, Result, Tensor};

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

/// The values of a tensor.
impl Tensor {
    /// Marks the storage, and lets `start` begin to bring values into it. What `start` returns waits until they are here, or says why they
    /// do not come: the first thread that takes a guard on the storage calls it, and others wait meanwhile. If the values do not come,
    /// every guard is refused with [`Error::NotArrived`] from then on. The version goes up once, at the start. `start` is
    /// [`delivering`]; other threads that bring the values say so.
    ///
    /// On a GPU the waiting makes this thread's later work come after the values. It is done in the device's own stream, and a lane that the
    /// reader has entered comes after that.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Tensor, delivering};
    /// let x = Tensor::zeros(&[1], DType::F32, Device::CPU)?;
    /// let mut target = x.clone();
    /// x.arriving(|| {
    ///     let bringing = std::thread::spawn(move || {
    ///         let _delivering = delivering();
    ///         target.copy_from(&Tensor::from_slice(&[5f32], &[1], Device::CPU)?)
    ///     });
    ///     move || bringing.join().unwrap().map_err(|error| error.to_string())
    /// })?;
    /// assert_eq!(x.item::<f32>()?, 5.0);
    /// # Ok::<(), phalanx_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// If values that were on their way before do not come.
    pub fn arriving<W>(&self, start: impl FnOnce() -> W) -> Result<()>
    where
        W: FnOnce() -> std::result::Result<(), String> + Send + 'static,
    {
        self.arrived("arriving")?;
        let arrival = Arrival::default();
        let (mut state, storage) = (lock(&arrival.0), self.storage());
        lock(&ARRIVING).push((address(storage), storage.device(), arrival.clone()));
        storage.users.begin_arrival();
        storage.bump_version();
        let _delivering = delivering();
        *state = State::OnTheWay(Box::new(start()));
        Ok(())
    }

    /// Waits for values that are on their way into the storage, if there are any that this thread does not bring, for the operation
    /// `op`.
    ///
    /// # Errors
    /// If they do not come.
    pub fn arrived(&self, op: &'static str) -> Result<()> {
        let storage = self.storage();
        while storage.users.now().is_arriving() && !is_delivering() {
            wait(storage, op)?;
        }
        Ok(())
    }

    /// Whether values that were on their way did not come, so that it has none.
    pub fn has_not_arrived(&self) -> bool {
        let storage = self.storage();
        storage.users.now().is_arriving()
            && find(storage).is_some_and(|arrival| matches!(*lock(&arrival.0), State::Failed(_)))
    }
}

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

/// Waits for the values that are on their way into a storage, if there are any.
#[cold]
pub(super) fn wait(storage: &Storage, op: &'static str) -> Result<()> {
    find(storage).map_or(Ok(()), |arrival| arrival.wait(storage, op))
}

/// Waits for all values that are on their way into a device's tensors: a captured graph reads and writes them without guards.
pub(crate) fn wait_for_all(device: Device, op: &'static str) -> Result<()> {
    let all: Vec<Arrival> =
        lock(&ARRIVING).iter().filter(|(_, of, _)| *of == device).map(|(.., arrival)| arrival.clone()).collect();
    all.iter().try_for_each(|arrival| arrival.come(device, op).map(drop))
}

/// Makes this thread's work for a GPU come after what the GPU's own stream has been given.
fn follow_own_stream(device: Device) -> Result<()> {
    if !device.is_cuda() {
        return Ok(());
    }
    let own = leave_lanes();
    let point = GpuEvent::record(device.gpu()?)?;
    drop(own);
    point.order_here()
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

/// Until the result is dropped, this thread brings values: its guards wait for none that are on their way. For the threads of a
/// communicator.
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
