//! Stages with replicas, which take micro-batches in turn: their gradients are added in the order of all micro-batches, and their
//! losses are collected.
//!
//! ```text
//! replica 0   B0 ── g0 ──>        + g2 ── g0+g1+g2 ──>
//! replica 1          B1: g0 + g1 ──^                  + g3   ...   the last sum is sent to all replicas
//! ```
//! A replica adds its micro-batch's gradients to the sum of the micro-batches before, and sends the sum to the next replica. So
//! each parameter has the additions of one device, in the same order, and every replica takes the same step. Each backward pass
//! sends the stage's gradients once; an all-reduce of each replica's own sum would send less and add in another order.
//!
//! A sum has all micro-batches of the run, or, in a schedule without flushes, those of an update.

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::{Leaf, Slot, Var, waiting};
use phalanx_tensor::{Category, Context, DType, Tensor};

use super::Stages;
use super::executor::ScheduleRun;
use crate::comm::Call;
use crate::pipeline::schedule::{Action, ActionKind};
use crate::{Error, Result};

/// The gradients of one leaf after another; `None` where backward has given none.
type Sums = Vec<Option<Tensor>>;

impl<S: Stages> ScheduleRun<'_, S> {
    /// Before a run: finds the parameters of this rank's stage, if it has replicas. Gradients that they have already count once,
    /// on the first replica.
    pub(super) fn begin_sums(&mut self) -> Result<()> {
        let rank = self.rank();
        let schedule = &self.executor.schedule;
        let Some(stage) = schedule.stages_of(rank).find(|&stage| schedule.ranks_of(stage).len() > 1) else {
            return Ok(());
        };
        let parameters = match &self.updates {
            None => self.stages.parameters(stage)?,
            Some(updates) => updates.parameters(stage)?,
        };
        for parameter in parameters.into_iter().filter(Parameter::is_trained) {
            refuse_buckets(parameter.name(), parameter.leaves())?;
            self.sums.extend(parameter.leaves().iter().cloned());
        }
        if rank != schedule.ranks_of(stage).start {
            self.sums.iter().for_each(|leaf| leaf.set_grad(None));
        }
        Ok(())
    }

    /// After the gradients of a micro-batch: adds them to the sum of those before, which another replica has sent, and sends
    /// the new sum to the next replica. The replica of a sum's last micro-batch keeps it.
    pub(super) fn add_in_order(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        if self.sums.is_empty() {
            return Ok(());
        }
        // ZeRO makes its buckets as backward comes to a unit.
        refuse_buckets("replicas", &self.sums)?;
        let is_first = |micro_batch: usize| micro_batch.is_multiple_of(self.sum_of(stage));
        let (begins, ends) = (is_first(micro_batch), is_first(micro_batch + 1));
        if let Some(from) = self.rank_of(stage, micro_batch.wrapping_sub(1)).filter(|_| !begins) {
            let before = self.receive_sums(from)?;
            for (leaf, before) in self.sums.iter().zip(before) {
                let own = leaf.grad().map(Var::into_tensor);
                leaf.set_grad(add(before, own)?.map(Var::new));
            }
        }
        if ends || micro_batch + 1 == self.executor.schedule.micro_batches {
            return Ok(());
        }
        let to =
            self.rank_of(stage, micro_batch + 1).ok_or_else(|| Error::Config("no next replica".into()))?;
        self.send_sums(action, to)?;
        self.sums.iter().for_each(|leaf| leaf.set_grad(None));
        Ok(())
    }

    /// How many micro-batches a stage's sum of gradients has.
    pub(super) fn sum_of(&self, stage: usize) -> usize {
        let all = self.executor.schedule.micro_batches;
        self.updates.as_ref().map_or(all, |updates| updates.interval_of(stage))
    }

    /// After a run: shares the sum of the last micro-batches, unless an update has taken it.
    pub(super) fn share_last_sum(&mut self) -> Result<()> {
        let schedule = &self.executor.schedule;
        let (stage, last) = (schedule.stages_of(self.rank()).next(), schedule.micro_batches - 1);
        let stage = stage.filter(|&stage| {
            self.updates.is_none() || !schedule.micro_batches.is_multiple_of(self.sum_of(stage))
        });
        stage.map_or(Ok(()), |stage| self.share_sums(Action::new(stage, ActionKind::Backward, last)))
    }

    /// After the last micro-batch of a sum, which is the action's: its replica sends the sum to the others.
    pub(super) fn share_sums(&mut self, action: Action) -> Result<()> {
        let rank = self.rank();
        let Some(root) = self.rank_of(action.stage, action.micro_batch).filter(|_| !self.sums.is_empty())
        else {
            return Ok(());
        };
        if rank == root {
            let others = self.executor.schedule.ranks_of(action.stage).filter(|&to| to != root);
            others.into_iter().try_for_each(|to| self.send_sums(action, to))?;
            return if self.updates.is_some() { self.copy_sums() } else { Ok(()) };
        }
        let sums = self.receive_sums(root)?;
        self.sums.iter().zip(sums).for_each(|(leaf, sum)| leaf.set_grad(sum.map(Var::new)));
        Ok(())
    }

    /// Before an update, which may write the gradients while they are being sent.
    fn copy_sums(&self) -> Result<()> {
        let _category = Context::with(|c| c.category = Category::Gradients);
        self.sums.iter().try_for_each(|leaf| {
            let copy = leaf.grad().map(|grad| grad.tensor().copy()).transpose()?;
            leaf.set_grad(copy.map(Var::new));
            Ok(())
        })
    }

    fn send_sums(&mut self, action: Action, to: usize) -> Result<()> {
        let comm = &self.executor.comm;
        let sums: Sums = self.sums.iter().map(|leaf| leaf.grad().map(Var::into_tensor)).collect();
        let has: Vec<u8> = sums.iter().map(|sum| u8::from(sum.is_some())).collect();
        let _category = Context::with(|c| c.category = Category::Buffers);
        // A rank without peers takes all that there may be.
        let has = || Tensor::from_slice(&has, &[has.len()], self.executor.device.host());
        let has = comm.has_peers().then(has).transpose()?;
        let sends = has.into_iter().chain(sums.into_iter().flatten());
        self.sent.extend(sends.map(|tensor| (action, comm.start(Call::send(tensor, to)))));
        Ok(())
    }

    fn receive_sums(&self, from: usize) -> Result<Sums> {
        let comm = &self.executor.comm;
        let mut has = vec![1; self.sums.len()];
        if comm.has_peers() {
            let _category = Context::with(|c| c.category = Category::Buffers);
            let mut header = Tensor::empty(&[has.len()], DType::U8, self.executor.device.host())?;
            waiting("receive sums", || comm.recv(&mut header, from))?;
            has = header.to_vec::<u8>()?;
        }
        let _category = Context::with(|c| c.category = Category::Gradients);
        let receive = |(leaf, has): (&Leaf, u8)| {
            let like = leaf.tensor();
            let dtype = match leaf.slot() {
                Slot::Owned(dtype) => dtype.unwrap_or(like.dtype()),
                Slot::Into(into) => into.dtype(),
            };
            let mut sum = (has > 0).then(|| Tensor::empty(like.shape(), dtype, like.device())).transpose()?;
            sum.iter_mut().try_for_each(|sum| waiting("receive sums", || comm.recv(sum, from)))?;
            Ok(sum)
        };
        self.sums.iter().zip(has).map(receive).collect()
    }

    /// After a run: the last replica of the last stage gets the losses of the others, so that one rank has all.
    pub(super) fn collect_losses(&mut self) -> Result<()> {
        let schedule = &self.executor.schedule;
        let (last, comm, rank) = (schedule.stages() - 1, &self.executor.comm, self.rank());
        let ranks = schedule.ranks_of(last);
        if ranks.len() == 1 || !ranks.contains(&rank) {
            return Ok(());
        }
        if rank + 1 < ranks.end {
            for loss in self.losses.iter_mut().filter_map(Option::take) {
                comm.send(&loss, ranks.end - 1)?;
            }
            return Ok(());
        }
        let like = self.losses.iter().flatten().next().cloned();
        let like = like.ok_or_else(|| Error::Config("the last replica has no micro-batch".into()))?;
        for (micro_batch, loss) in self.losses.iter_mut().enumerate().filter(|(_, loss)| loss.is_none()) {
            let mut other = Tensor::empty(like.shape(), like.dtype(), like.device())?;
            let from = schedule.rank_of(last, micro_batch).unwrap_or_default();
            waiting("receive losses", || comm.recv(&mut other, from))?;
            *loss = Some(other);
        }
        Ok(())
    }
}

/// The sum of two gradients, of which there may be none: one device adds the later one to the earlier.
fn add(before: Option<Tensor>, own: Option<Tensor>) -> Result<Option<Tensor>> {
    Ok(match (before, own) {
        (Some(mut sum), Some(own)) => {
            kernels::accumulate_(&mut sum, &own)?;
            Some(sum)
        }
        (before, own) => before.or(own),
    })
}

/// Refuses gradients that another wrapper adds up.
fn refuse_buckets(name: &str, leaves: &[Leaf]) -> Result<()> {
    let Some(leaf) = leaves.iter().find(|leaf| matches!(leaf.slot(), Slot::Into(_))) else { return Ok(()) };
    let got = leaf.tensor().shape().to_vec();
    Err(Error::Config(format!(
        "{name}: got a parameter {got:?} of a stage with replicas whose gradients are in buckets, wanted no other data \
         parallelism or ZeRO around it"
    )))
}
