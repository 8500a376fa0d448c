//! [`TiedTable`]: one table at two stages, as the embedding on the first and the head on the last.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_nn::autograd::{HookHandle, Var};
use phalanx_nn::{Parameter, ParameterOwner, Parameters, Usage};
use phalanx_tensor::Tensor;

use crate::Result;
use crate::comm::{Call, Comm};
use crate::pipeline::schedule::Schedule;

/// This rank's copy of a table that is the embedding on the first stage and the head on the last, if these are on two ranks.
///
/// ```text
/// first stage     site 0 (head)  <-------  site 0     last stage
///                 site 1 (embedding) --->  site 1
/// ```
/// Each copy has both sites (uses of the parameter), and the same initial values. Backward computes the gradients of the rank's
/// own site; [`TiedTable::exchange`] adds those of the other, as a backward pass would. From then on both copies have the
/// gradients of one device's table: data parallelism adds the replicas, site by site, then the head's sum and the embedding's
/// are added, and both copies take the same step.
///
/// An optimizer refuses to update a copy whose gradients were not exchanged.
pub struct TiedTable {
    table: Parameter,
    /// The group of the first stage's rank and the last's.
    pair: Comm,
    owner: Arc<TiedTableOwner>,
    hooks: [HookHandle; 2],
}

/// Whether backward has given a copy gradients that were not exchanged.
#[derive(Default)]
struct TiedTableOwner(AtomicBool);

impl ParameterOwner for TiedTableOwner {
    fn refusal(&self, usage: Usage) -> Option<&'static str> {
        let alone = usage == Usage::Update && self.0.load(Ordering::Relaxed);
        alone.then_some(
            "is tied to a table at another stage, whose gradients were not added to these: call `TiedTable::exchange`, or \
             the mesh's `finish`, after the pipeline's pass",
        )
    }
}

impl TiedTable {
    /// The parameter with two sites in `model`, this rank's part of a model; `comm` is the group that runs the schedule. `None`
    /// on ranks without the first or last stage, if both stages are on one rank, and if there is no such parameter.
    ///
    /// # Errors
    /// If the schedule has other ranks than the group.
    pub fn new(model: &impl Parameters, schedule: &Schedule, comm: &Comm) -> Result<Option<TiedTable>> {
        let (Some(&first), Some(&last)) = (schedule.placement.first(), schedule.placement.last()) else {
            return Ok(None);
        };
        if first == last || ![first, last].contains(&comm.rank()) {
            return Ok(None);
        }
        let pair = comm.group(&[first, last])?;
        let table = model.parameters().into_iter().find(|parameter| parameter.leaves().len() == 2);
        Ok(table.map(|table| TiedTable::of(table, pair)))
    }

    fn of(table: Parameter, pair: Comm) -> TiedTable {
        let owner = Arc::new(TiedTableOwner::default());
        // If DDP or ZeRO already owns the table, it reports an unfinished pass itself.
        if table.owner().is_none() {
            table.set_owner(owner.clone());
        }
        // Backward accumulates the rank's own site first; `exchange` then accumulates the other one.
        let hooks = [(1 - pair.rank(), true), (pair.rank(), false)].map(|(site, waits)| {
            let owner = owner.clone();
            table.leaves()[site].on_accumulate(move |_| {
                owner.0.store(waits, Ordering::Relaxed);
                Ok(())
            })
        });
        TiedTable { table, pair, owner, hooks }
    }

    /// Whether sums over all parameters of all stages, such as a norm, have to leave this copy out. That is so for the last
    /// stage's copy; the first stage's counts.
    pub fn is_duplicate(&self) -> bool {
        self.pair.rank() == 1
    }

    /// The table.
    pub fn table(&self) -> &Parameter {
        &self.table
    }

    /// Adds the other copy's gradients to its site. Both ranks call it after their last backward passes, and before data
    /// parallelism finishes.
    ///
    /// # Errors
    /// If backward gave the table no gradient; if a hook fails; or as [`Pending::wait`](crate::comm::Pending::wait).
    pub fn exchange(&self) -> Result<()> {
        if !self.table.is_trained() {
            return Ok(());
        }
        let (here, there) = (self.pair.rank(), 1 - self.pair.rank());
        let [own, other] = [there, here].map(|site| &self.table.leaves()[site]);
        let missing =
            || phalanx_nn::Error::invalid(self.table.name(), "backward gave a tied table no gradient");
        let sent = own.grad().map(Var::into_tensor).ok_or_else(missing)?;
        let received = Tensor::empty(sent.shape(), sent.dtype(), sent.device())?;
        let send = self.pair.start(Call::send(sent, there));
        self.pair.run(Call::recv(received.clone(), there))?;
        send.wait()?;
        Ok(other.accumulate(received)?)
    }
}

impl Drop for TiedTable {
    fn drop(&mut self) {
        self.hooks.iter().for_each(HookHandle::remove);
        let owner: Arc<dyn ParameterOwner> = self.owner.clone();
        self.table.release_owner(&owner);
    }
}
