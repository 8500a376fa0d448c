//! The workers of a forward pass: one thread for each device, which computes the device's cells in order.
//!
//! ```text
//! worker cpu:0 ── compute cell ── post ──┐               ┌── take ── compute cell ── worker cpu:1
//!                                        └─> Mailboxes ──┘
//! ```
//! [`Mailboxes`] keeps the values that cells send to each other, and the first error; [`StageModule`] runs the layers of a
//! stage for one cell.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use phalanx_nn::autograd::{
    AnomalyGuard, Recompute, Result as GradResult, Var, checkpoint_apart, detect_anomaly,
    is_detecting_anomaly, is_recomputing,
};
use phalanx_tensor::{Context, Device, unpoisoned};

use super::clock::Phase;
use super::copy::{CopyStreams, PendingGrads, Sender, Sent};
use super::dependency::{BackwardStart, enter, leave};
use super::observe::{CellObserver, PassObserver};
use super::{Batch, Cell, Route, Sequence, Skip, Skips, StageLayers, device_orders};
use crate::catch_panic::catch_panic;
use crate::pipeline::MicroBatch;
use crate::{Error, Result};

/// One forward pass: the settings and the mailboxes that its workers share.
pub(super) struct ForwardPass<'a> {
    pub(super) stages: &'a [Arc<StageModule>],
    pub(super) copy_streams: &'a Arc<CopyStreams>,
    pub(super) observer: Option<Arc<PassObserver>>,
    /// The index of the first row of each micro-batch in the batch.
    pub(super) offsets: Vec<usize>,
    /// How many micro-batches, the first ones, are recomputed.
    pub(super) recomputed: usize,
    /// The caller's context; the workers run in it.
    pub(super) context: Context,
    pub(super) mailboxes: Mailboxes,
}

impl ForwardPass<'_> {
    /// Runs a worker for each device until all have computed their cells or one has failed.
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
                    self.mailboxes.fail(Error::Config(format!("gpipe: no thread for {device}: {error}")));
                }
            }
        });
    }

    /// Computes a device's cells in order; the body of a worker.
    fn work(&self, order: &[Cell]) {
        let mut tie = None;
        for &cell in order {
            let stage = &self.stages[cell.stage];
            let Some(arrived) = self.mailboxes.take(cell, self.stages.len(), &stage.incoming) else { return };
            let outcome = catch_panic(|| Ok::<_, Error>(self.compute(cell, arrived, &mut tie)));
            let panicked = |why| Err(Error::Config(why));
            if let Err(error) = outcome.unwrap_or_else(panicked) {
                let (device, source) = (stage.own.device, Box::new(error));
                let Cell { stage, micro_batch } = cell;
                return self.mailboxes.fail(Error::Stage { stage, device, micro_batch, source });
            }
        }
        tie.into_iter().for_each(|phony| self.mailboxes.post_last_phony(phony));
    }

    /// Computes a cell. `tie` is the phony of the cell that the device computed before; it becomes the phony of this one.
    fn compute(&self, cell: Cell, arrived: Arrived, tie: &mut Option<Var>) -> Result<()> {
        let offset = self.context.batch_offset + self.offsets[cell.micro_batch] as u64;
        let _context = Context { batch_offset: offset, ..self.context }.enter();
        let (cell_observer, pending_grads) = (self.cell_observer(cell), PendingGrads::default());
        let start = BackwardStart::new(cell_observer.clone());
        let after: Vec<&Var> = tie.iter().chain(&arrived.after).collect();
        let entered = enter(&after, &start)?;
        let skips = arrived.skips.into_iter().map(|sent| sent.map(Sent::receive).transpose());
        let input = StageValues {
            batch: arrived.batch.into_iter().map(Sent::receive).collect::<Result<_>>()?,
            skips: skips.collect::<Result<_>>()?,
        };
        let part = MicroBatch { index: cell.micro_batch, count: self.offsets.len() };
        let recomputed = cell.micro_batch < self.recomputed;
        let Computed { values, spec, recompute } =
            self.stages[cell.stage].compute(input, recomputed, part, &cell_observer)?;
        let (values, phony) = leave(values, &entered, &start, pending_grads.clone())?;
        if let Some(phony) = &phony {
            *tie = Some(recompute.map_or(Ok(phony.clone()), |recompute| recompute.before(phony))?);
        }
        self.mailboxes.post_end(cell, phony);
        let sender = Sender { copy_streams: self.copy_streams.clone(), cell_observer, pending_grads };
        self.send(cell, spec.unflatten(values), &sender)
    }

    /// Sends the output of a cell to the next stage, and its skips to the stages that pop them.
    fn send(&self, cell: Cell, output: StageValues, sender: &Sender) -> Result<()> {
        let Cell { micro_batch, stage } = cell;
        for (route, value) in self.stages[stage].outgoing.iter().zip(output.skips) {
            let to = self.cell_observer(Cell { micro_batch, stage: route.to });
            let sent = value.map(|value| sender.send(value, &to)).transpose()?;
            self.mailboxes.post_skip(micro_batch, &route.skip, sent);
        }
        let next = Cell { micro_batch, stage: stage + 1 };
        if next.stage == self.stages.len() {
            self.mailboxes.post_output(micro_batch, output.batch);
            return Ok(());
        }
        let to = self.cell_observer(next);
        let sent = output.batch.into_iter().map(|value| sender.send(value, &to)).collect::<Result<_>>()?;
        self.mailboxes.post(next, sent);
        Ok(())
    }

    fn cell_observer(&self, cell: Cell) -> CellObserver {
        let device = self.stages[cell.stage].own.device;
        CellObserver { pass: self.observer.clone(), device, cell }
    }
}

/// How many micro-batches a stage may be ahead of the next stage. Cell (i, j) is computed after cell (i - 3, j + 1), and in
/// backward before it, so at most three activations, or three gradients, wait between two stages. In the clock cycles a stage
/// is 2 ahead; the third leaves time for copies.
pub(super) const AHEAD_MAX: usize = 3;

/// The inputs of a cell: its batch, its skips in the order of its stage's routes, and the phony of the cell of the next stage
/// that has to be computed before it.
struct Arrived {
    batch: Vec<Sent>,
    skips: Vec<Option<Sent>>,
    after: Option<Var>,
}

/// The values that cells send to each other in one forward pass; all workers share it.
#[derive(Default)]
pub(super) struct Mailboxes {
    state: Mutex<MailboxState>,
    changed: Condvar,
}

/// The values that were posted and not yet taken.
#[derive(Default)]
struct MailboxState {
    batches: BTreeMap<Cell, Vec<Sent>>,
    /// By micro-batch and skip.
    skips: BTreeMap<(usize, Skip), Option<Sent>>,
    /// The cells that are computed, with their phonies.
    ended: BTreeMap<Cell, Option<Var>>,
    outputs: BTreeMap<usize, Vec<Var>>,
    last_phonies: Vec<Var>,
    error: Option<Error>,
}

impl Mailboxes {
    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        unpoisoned(self.state.lock())
    }

    /// Posts the batch of a cell.
    pub(super) fn post(&self, cell: Cell, batch: Vec<Sent>) {
        self.lock().batches.insert(cell, batch);
        self.changed.notify_all();
    }

    /// Posts a skip of a micro-batch. It arrives before the batch of the cell that pops it, since that batch goes through the
    /// stages between.
    fn post_skip(&self, micro_batch: usize, skip: &Skip, value: Option<Sent>) {
        self.lock().skips.insert((micro_batch, skip.clone()), value);
    }

    /// Posts that a cell is computed, and its phony, if it has one.
    fn post_end(&self, cell: Cell, phony: Option<Var>) {
        self.lock().ended.insert(cell, phony);
        self.changed.notify_all();
    }

    /// Posts an output of the last stage.
    fn post_output(&self, micro_batch: usize, values: Vec<Var>) {
        self.lock().outputs.insert(micro_batch, values);
    }

    /// Posts the phony of a device's last cell.
    fn post_last_phony(&self, phony: Var) {
        self.lock().last_phonies.push(phony);
    }

    /// Waits for the inputs of a cell and takes them; `None` once a worker has failed. `stages` is the number of stages.
    fn take(&self, cell: Cell, stages: usize, incoming: &[Route]) -> Option<Arrived> {
        let Cell { micro_batch, stage } = cell;
        let before = (stage + 1 < stages && micro_batch >= AHEAD_MAX)
            .then(|| Cell { micro_batch: micro_batch - AHEAD_MAX, stage: stage + 1 });
        let mut state = self.lock();
        loop {
            if state.error.is_some() {
                return None;
            }
            if before.is_none_or(|before| state.ended.contains_key(&before))
                && let Some(batch) = state.batches.remove(&cell)
            {
                let after = before.and_then(|before| state.ended.remove(&before).flatten());
                let mut skip =
                    |route: &Route| state.skips.remove(&(micro_batch, route.skip.clone())).flatten();
                let skips = incoming.iter().map(&mut skip).collect();
                return Some(Arrived { batch, skips, after });
            }
            state = unpoisoned(self.changed.wait(state));
        }
    }

    /// Ends the pass with an error, unless it has one already.
    fn fail(&self, error: Error) {
        self.lock().error.get_or_insert(error);
        self.changed.notify_all();
    }

    /// The outputs in order of their micro-batches, and the phonies of the devices' last cells.
    ///
    /// # Errors
    /// The first error of a worker.
    pub(super) fn end(self) -> Result<(Vec<Vec<Var>>, Vec<Var>)> {
        let state = unpoisoned(self.state.into_inner());
        match state.error {
            Some(error) => Err(error),
            None => Ok((state.outputs.into_values().collect(), state.last_phonies)),
        }
    }
}

/// A stage, and the skips that enter and leave it.
pub(super) struct StageModule {
    pub(super) model: Arc<Sequence>,
    pub(super) own: StageLayers,
    pub(super) incoming: Vec<Route>,
    pub(super) outgoing: Vec<Route>,
}

/// The values that enter or leave a stage: the batch, and the skips in the order of the routes. A skip may be `None`.
struct StageValues {
    batch: Vec<Var>,
    skips: Vec<Option<Var>>,
}

impl StageValues {
    /// The values as a flat list, and the spec that [`ValuesSpec::unflatten`] needs.
    fn flatten(self) -> (Vec<Var>, ValuesSpec) {
        let spec =
            ValuesSpec { batch: self.batch.len(), skips: self.skips.iter().map(Option::is_some).collect() };
        (self.batch.into_iter().chain(self.skips.into_iter().flatten()).collect(), spec)
    }
}

/// How [`StageValues`] were flattened: the number of batch values, and which skips there are.
#[derive(Clone, Default)]
struct ValuesSpec {
    batch: usize,
    skips: Vec<bool>,
}

impl ValuesSpec {
    fn unflatten(&self, values: Vec<Var>) -> StageValues {
        let mut values = values.into_iter();
        let batch = values.by_ref().take(self.batch).collect();
        let skips = self.skips.iter().map(|&there| if there { values.next() } else { None }).collect();
        StageValues { batch, skips }
    }
}

/// A stage's output, and its recomputation, if the micro-batch is recomputed.
struct Computed {
    values: Vec<Var>,
    spec: ValuesSpec,
    recompute: Option<Recompute>,
}

impl StageModule {
    /// The stage's output for `input`. With `recomputed`, values inside the stage are not kept for backward.
    ///
    /// # Errors
    /// If a layer refuses, or leaves its device.
    fn compute(
        self: &Arc<StageModule>,
        input: StageValues,
        recomputed: bool,
        part: MicroBatch,
        cell_observer: &CellObserver,
    ) -> Result<Computed> {
        let (values, spec) = input.flatten();
        let left = Arc::new(Mutex::new(ValuesSpec::default()));
        let (stage, cell_observer, packed) = (self.clone(), cell_observer.clone(), left.clone());
        let function = move |values: &[Var]| -> GradResult<Vec<Var>> {
            let begin = cell_observer.now()?;
            let _part = part.enter();
            let (output, spec) = stage.run(spec.unflatten(values.to_vec()))?.flatten();
            *unpoisoned(packed.lock()) = spec;
            cell_observer.report(if is_recomputing() { Phase::Recompute } else { Phase::Forward }, begin)?;
            Ok(output)
        };
        let (values, recompute) = match recomputed {
            true => checkpoint_apart(function, &values.iter().collect::<Vec<_>>())?,
            false => (function(&values)?, None),
        };
        let spec = std::mem::take(&mut *unpoisoned(left.lock()));
        Ok(Computed { values, spec, recompute })
    }

    /// Runs the stage's layers.
    fn run(&self, input: StageValues) -> Result<StageValues> {
        let mut skips = Skips::default();
        self.incoming.iter().zip(input.skips).for_each(|(route, value)| skips.hold(&route.skip, value));
        let batch = self.model.run_layers(self.own.layers.clone(), input.batch.into(), &mut skips)?;
        batch.check_device(self.own.device)?;
        let skips: Vec<_> = self.outgoing.iter().map(|route| skips.take(&route.skip).flatten()).collect();
        Batch::from(skips.iter().flatten().cloned().collect::<Vec<_>>()).check_device(self.own.device)?;
        Ok(StageValues { batch: batch.into_values(), skips })
    }
}
