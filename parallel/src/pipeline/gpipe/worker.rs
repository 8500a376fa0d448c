//! The workers of a forward pass: a thread for each device, which computes the device's cells in order.

use std::sync::Arc;

use phalanx_nn::autograd::{AnomalyGuard, Var, detect_anomaly, is_detecting_anomaly};
use phalanx_tensor::{Context, Device};

use super::board::{Arrived, Board};
use super::copy::{Arrivals, Lanes, Sender, Sent};
use super::fence::{Mark, enter, leave};
use super::stage::{Computed, Parcel, Stage};
use super::timeline::Watch;
use super::{Cell, Observer, device_orders};
use crate::launch::caught;
use crate::pipeline::MicroBatch;
use crate::{Error, Result};

/// What the workers of one pass share.
pub(super) struct Pass<'a> {
    pub(super) stages: &'a [Arc<Stage>],
    pub(super) lanes: &'a Arc<Lanes>,
    pub(super) observer: &'a Option<Observer>,
    /// The number of the first row of each micro-batch.
    pub(super) offsets: Vec<usize>,
    /// The first so many micro-batches are recomputed.
    pub(super) recomputed: usize,
    /// The caller's, in which everything runs.
    pub(super) context: Context,
    pub(super) board: Board,
}

impl Pass<'_> {
    /// Runs a worker for each device until all are through or one has failed.
    pub(super) fn run(&self) {
        let devices: Vec<Device> = self.stages.iter().map(|stage| stage.own.device).collect();
        let anomaly = is_detecting_anomaly();
        std::thread::scope(|scope| {
            for (device, order) in device_orders(self.offsets.len(), &devices) {
                let work = move || {
                    let _anomaly: Option<AnomalyGuard> = anomaly.then(detect_anomaly);
                    self.work(&order);
                };
                let thread = std::thread::Builder::new().name(format!("gpipe {device}"));
                if let Err(error) = thread.spawn_scoped(scope, work) {
                    self.board.fail(Error::Config(format!("gpipe: no thread for {device}: {error}")));
                }
            }
        });
    }

    /// A worker's life.
    fn work(&self, order: &[Cell]) {
        let mut tie = None;
        for &cell in order {
            let stage = &self.stages[cell.stage];
            let Some(arrived) = self.board.take(cell, self.stages.len(), &stage.incoming) else { return };
            let outcome = caught(|| Ok::<_, Error>(self.compute(cell, arrived, &mut tie)));
            let panicked = |why| Err(Error::Config(why));
            if let Err(error) = outcome.unwrap_or_else(panicked) {
                let (device, source) = (stage.own.device, Box::new(error));
                let Cell { stage, micro_batch } = cell;
                return self.board.fail(Error::Stage { stage, device, micro_batch, source });
            }
        }
        tie.into_iter().for_each(|phony| self.board.post_tie(phony));
    }

    /// Computes a cell. `tie` is the phony of the device's last cell, then of this one.
    fn compute(&self, cell: Cell, arrived: Arrived, tie: &mut Option<Var>) -> Result<()> {
        let offset = self.context.batch_offset + self.offsets[cell.micro_batch] as u64;
        let _context = Context { batch_offset: offset, ..self.context }.enter();
        let (watch, arrivals) = (self.watch(cell), Arrivals::default());
        let mark = Mark::new(watch.clone());
        let after: Vec<&Var> = tie.iter().chain(&arrived.after).collect();
        let entered = enter(&after, &mark)?;
        let skips = arrived.skips.into_iter().map(|sent| sent.map(Sent::receive).transpose());
        let input = Parcel {
            batch: arrived.batch.into_iter().map(Sent::receive).collect::<Result<_>>()?,
            skips: skips.collect::<Result<_>>()?,
        };
        let part = MicroBatch { index: cell.micro_batch, count: self.offsets.len() };
        let recomputed = cell.micro_batch < self.recomputed;
        let Computed { values, packing, recompute } =
            self.stages[cell.stage].compute(input, recomputed, part, &watch)?;
        let (values, phony) = leave(values, &entered, &mark, arrivals.clone())?;
        if let Some(phony) = &phony {
            *tie = Some(recompute.map_or(Ok(phony.clone()), |recompute| recompute.before(phony))?);
        }
        self.board.post_end(cell, phony);
        let sender = Sender { lanes: self.lanes.clone(), watch, arrivals };
        self.send(cell, packing.unpack(values), &sender)
    }

    /// Hands on what leaves a cell.
    fn send(&self, cell: Cell, output: Parcel, sender: &Sender) -> Result<()> {
        let Cell { micro_batch, stage } = cell;
        for (route, value) in self.stages[stage].outgoing.iter().zip(output.skips) {
            let to = self.watch(Cell { micro_batch, stage: route.to });
            let sent = value.map(|value| sender.send(value, &to)).transpose()?;
            self.board.post_skip(micro_batch, &route.skip, sent);
        }
        let next = Cell { micro_batch, stage: stage + 1 };
        if next.stage == self.stages.len() {
            self.board.post_output(micro_batch, output.batch);
            return Ok(());
        }
        let to = self.watch(next);
        let sent = output.batch.into_iter().map(|value| sender.send(value, &to)).collect::<Result<_>>()?;
        self.board.post(next, sent);
        Ok(())
    }

    fn watch(&self, cell: Cell) -> Watch {
        let device = self.stages[cell.stage].own.device;
        Watch { observer: self.observer.clone(), device, cell }
    }
}
