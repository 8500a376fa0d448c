//! Copies between devices that nobody waits for but whoever needs them.
//!
//! ```text
//! forward    cpu:0  ── cell (i, 0) ─ send ── cell (i+1, 0) ──          backward is the same from right to left:
//!                                      │                               `copy` sends the gradient, and the `leave` of
//!            lane                      └─copy─┐                        cell (i, 0) receives it
//!            cpu:1  ── cell (i-1, 1) ──── receive ── cell (i, 1) ──
//! ```
//! Each pair of devices has a lane of its own in each direction, a thread that copies in the order of sending.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use phalanx_nn::autograd::{
    Backward, Cx, Error as GradError, Grads, Result as GradResult, Saver, Var, grads1, is_detecting_anomaly,
    record,
};
use phalanx_tensor::{Device, Result as TensorResult, Stream, Tensor, record_stream};

use super::clock::{Phase, Watch};
use crate::Result;

/// The lanes of a pipeline.
pub(super) struct Lanes(BTreeMap<(Device, Device), Stream>);

impl Lanes {
    /// Lanes there and back for each pair of different devices.
    ///
    /// # Errors
    /// If a device cannot be used, or the system refuses a thread.
    pub(super) fn new(pairs: impl IntoIterator<Item = (Device, Device)>) -> Result<Lanes> {
        let mut lanes = BTreeMap::new();
        for (a, b) in pairs.into_iter().filter(|(a, b)| a != b && !b.is_meta()) {
            for (from, to) in [(a, b), (b, a)] {
                lanes.insert((from, to), Stream::new(from)?);
            }
        }
        Ok(Lanes(lanes))
    }

    /// Begins to copy `from` to the device of the cell that it is for.
    fn copy(&self, from: &Tensor, to: &Watch) -> TensorResult<Flight> {
        let tensor = Tensor::empty(from.shape(), from.dtype(), to.device)?;
        let (landed, landing) = sync_channel(1);
        if to.device.is_meta() {
            let _ = landed.send(Ok(()));
            return Ok(Flight { tensor, landing });
        }
        let (source, mut target, watch) = (from.clone(), tensor.clone(), to.clone());
        let job = move || {
            let begin = Instant::now();
            let outcome = target.copy_from(&source);
            // Gone before anybody hears of it.
            drop((source, target));
            watch.over(Phase::Copy, begin);
            let _ = landed.send(outcome);
            Ok(())
        };
        match self.0.get(&(from.device(), to.device)) {
            Some(lane) => {
                lane.submit(job);
                // A GPU reads it after the lane's thread has gone on.
                if from.device().is_cuda() {
                    record_stream(from, lane);
                }
            }
            None => job()?,
        }
        Ok(Flight { tensor, landing })
    }
}

/// A copy under way. Nobody reads the tensor before it has landed.
pub(super) struct Flight {
    tensor: Tensor,
    landing: Receiver<TensorResult<()>>,
}

impl Flight {
    fn land(self) -> GradResult<Tensor> {
        let ended = |_| GradError::Custom("copy: the lane ended before it was copied".into());
        self.landing.recv().map_err(ended)??;
        Ok(self.tensor)
    }
}

/// Gradients on their way to a cell.
#[derive(Clone, Default)]
pub(super) struct Arrivals(Arc<Mutex<Vec<Flight>>>);

impl Arrivals {
    fn lock(&self) -> MutexGuard<'_, Vec<Flight>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for these gradients, if they are still under way. (Another pass over the same graph may have others.)
    pub(super) fn wait(&self, grads: &[&Tensor]) -> GradResult<()> {
        let ours = |flight: &mut Flight| grads.iter().any(|grad| grad.shares_storage(&flight.tensor));
        let flights: Vec<Flight> = self.lock().extract_if(.., ours).collect();
        flights.into_iter().try_for_each(|flight| flight.land().map(drop))
    }
}

/// The cell that sends, and receives the gradients.
#[derive(Clone)]
pub(super) struct Sender {
    pub(super) lanes: Arc<Lanes>,
    pub(super) watch: Watch,
    pub(super) arrivals: Arrivals,
}

/// A value on its way from one cell to another.
pub(super) enum Sent {
    /// Both are on one device.
    Here(Var),
    /// With the value's place in the graph; its memory is free when it is copied.
    Away { place: Var, flight: Flight, sender: Sender },
}

impl Sender {
    /// Sends a value to another cell.
    ///
    /// # Errors
    /// If its device has no room.
    pub(super) fn send(&self, value: Var, to: &Watch) -> Result<Sent> {
        if value.device() == to.device {
            return Ok(Sent::Here(value));
        }
        let flight = self.lanes.copy(value.tensor(), to)?;
        Ok(Sent::Away { place: value.place()?, flight, sender: self.clone() })
    }
}

impl Sent {
    /// The value at the device that it was sent to.
    ///
    /// # Errors
    /// If it could not be copied.
    pub(super) fn receive(self) -> Result<Var> {
        match self {
            Sent::Here(value) => Ok(value),
            Sent::Away { place, flight, sender } => {
                let tensor = flight.land()?;
                Ok(record("copy", &[&place], tensor, |_: &Saver<'_>| Ok(Copy(sender)))?)
            }
        }
    }
}

/// `y = x` on another device; `dx = dy`, sent back and received by whoever waits for the sender's arrivals.
struct Copy(Sender);

impl Backward for Copy {
    fn backward(&self, cx: &Cx<'_>) -> GradResult<Grads> {
        let Sender { lanes, watch, arrivals } = &self.0;
        if cx.create_graph() || is_detecting_anomaly() {
            return grads1(cx.dy().to_device(watch.device)?);
        }
        let flight = lanes.copy(cx.dy().tensor(), watch)?;
        let dx = Var::new(flight.tensor.clone());
        arrivals.lock().push(flight);
        grads1(dx)
    }
}
