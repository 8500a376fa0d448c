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
    /// The group of the first stage's ranks, and then the last's.
    ends: Comm,
    /// The ranks in `ends` of the stages' first replicas.
    roots: [usize; 2],
    /// 0 on the first stage's ranks, 1 on the last's.
    here: usize,
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
        let last = schedule.stages().saturating_sub(1);
        let (first, last) = (schedule.ranks_of(0), schedule.ranks_of(last));
        let here = match comm.rank() {
            rank if first == last || !(first.contains(&rank) || last.contains(&rank)) => return Ok(None),
            rank => usize::from(last.contains(&rank)),
        };
        let roots = [0, first.len()];
        let ends = comm.group(&first.chain(last).collect::<Vec<_>>())?;
        let is_tied = |p: &Parameter| p.leaves().len() == 2 && !p.has_replica_sites();
        let table = model.parameters().into_iter().find(is_tied);
        Ok(table.map(|table| TiedTable::of(table, ends, roots, here)))
    }

    fn of(table: Parameter, ends: Comm, roots: [usize; 2], here: usize) -> TiedTable {
        let owner = Arc::new(TiedTableOwner::default());
        // If DDP or ZeRO already owns the table, it reports an unfinished pass itself.
        if table.owner().is_none() {
            table.set_owner(owner.clone());
        }
        // Backward accumulates the rank's own site first; `exchange` then accumulates the other one.
        let hooks = [(1 - here, true), (here, false)].map(|(site, waits)| {
            let owner = owner.clone();
            table.leaves()[site].on_accumulate(move |_| {
                owner.0.store(waits, Ordering::Relaxed);
                Ok(())
            })
        });
        TiedTable { table, ends, roots, here, owner, hooks }
    }

    /// Whether sums over all parameters of all stages, such as a norm, have to leave this copy out. That is so for the last
    /// stage's copy; the first stage's counts.
    pub fn is_duplicate(&self) -> bool {
        self.here == 1
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
        let (here, there) = (self.here, 1 - self.here);
        let [own, other] = [there, here].map(|site| &self.table.leaves()[site]);
        let missing =
            || phalanx_nn::Error::invalid(self.table.name(), "backward gave a tied table no gradient");
        let sent = own.grad().map(Var::into_tensor).ok_or_else(missing)?;
        let received = Tensor::empty(sent.shape(), sent.dtype(), sent.device())?;
        if self.ends.size() == 2 {
            let send = self.ends.start(Call::send(sent, there));
            self.ends.run(Call::recv(received.clone(), there))?;
            send.wait()?;
            return Ok(other.accumulate(received)?);
        }
        // Replicas of a stage have equal sums already; they take part in the broadcast of their own.
        let tensors = if here == 0 { [sent, received.clone()] } else { [received.clone(), sent] };
        let calls = tensors.into_iter().zip(self.roots).map(|(tensor, root)| Call::broadcast(tensor, root));
        calls.into_iter().try_for_each(|call| self.ends.run(call))?;
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
