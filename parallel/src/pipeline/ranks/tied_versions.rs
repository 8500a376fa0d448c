//! A tied table in schedules without flushes: [`Owner`] and [`Follower`] are its copies on the first and on the last stage.
//!
//! ```text
//! first stage (owner)                           last stage (follower)
//!         <------- gradient of the head ------- B m      the last micro-batch of the first stage's update u
//!   U u   -------- version u + 1 -------------> F m      the first that uses version u + 1, or the end of the run
//! ```
//! A tied table belongs to the first stage, whose optimizer makes the next version: a micro-batch uses at both ends the
//! version that the first stage has for it. Neither rank waits longer than for the micro-batch itself. The first stage's `U`
//! comes after its `B`, which comes after the last stage's; a version is sent before the `F` on the first stage that uses it,
//! so it arrives before the `F` on the last.
//!
//! Each replica of the first stage is an owner, and each of the last a follower. The replica of the last stage that has the sum of the
//! head's gradients sends it to all owners. They make the same version, which the first of them sends to all followers.

use std::ops::Range;

use phalanx_nn::Parameter;
use phalanx_nn::autograd::{Slot, Var};
use phalanx_tensor::Tensor;

use super::versions::Versions;
use crate::comm::{Call, Comm, Pending};
use crate::pipeline::schedule::Schedule;
use crate::{Error, Result};

/// Refuses a tied table with gradients in buckets.
pub(super) fn has_its_own_gradients(table: &Parameter) -> Result<()> {
    if table.leaves().iter().all(|leaf| matches!(leaf.slot(), Slot::Owned(_))) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{}: got a tied table with data parallelism in a schedule without flushes, wanted one or the other: the \
         replicas' buckets would wait for gradients that the other end of the pipeline takes",
        table.name()
    )))
}

/// The site of a tied table at which it is the head.
const HEAD: usize = 0;

/// The ranks of the first and of the last stage.
#[derive(Clone)]
pub(super) struct Ends {
    /// The first stage's ranks, then the last's.
    comm: Comm,
    /// How many are the first stage's.
    owners: usize,
}

impl Ends {
    /// `None` if there is one stage, and on the ranks of other stages.
    pub(super) fn new(schedule: &Schedule, comm: &Comm) -> Result<Option<Ends>> {
        let (first, last) = (schedule.ranks_of(0), schedule.ranks_of(schedule.stages() - 1));
        let ranks: Vec<usize> = first.clone().chain(last.clone()).collect();
        if first == last || !ranks.contains(&comm.rank()) {
            return Ok(None);
        }
        Ok(Some(Ends { comm: comm.group(&ranks)?, owners: first.len() }))
    }

    fn followers(&self) -> Range<usize> {
        self.owners..self.comm.size()
    }

    /// The follower that computes a micro-batch.
    fn follower(&self, micro_batch: usize) -> usize {
        self.owners + micro_batch % self.followers().len()
    }
}

/// The first stage's copy.
pub(super) struct Owner {
    table: Parameter,
    ends: Ends,
    /// Versions that may still be under way.
    sent: Vec<Pending>,
}

impl Owner {
    pub(super) fn new(table: Parameter, ends: Ends) -> Owner {
        Owner { table, ends, sent: Vec::new() }
    }

    /// Adds the head's gradients, before the update after `micro_batch`.
    pub(super) fn add_head(&mut self, micro_batch: usize) -> Result<()> {
        let table = self.table.tensor();
        let dtype = self.table.grad()?.map_or(table.dtype(), |grad| grad.dtype());
        let grad = Tensor::empty(table.shape(), dtype, table.device())?;
        self.ends.comm.run(Call::recv(grad.clone(), self.ends.follower(micro_batch)))?;
        Ok(self.table.leaves()[HEAD].accumulate(grad)?)
    }

    /// Sends the version that an update has made. One owner does it for all.
    pub(super) fn send(&mut self) -> Result<()> {
        if self.ends.comm.rank() == 0 {
            let sends = self.ends.followers().map(|to| Call::send(self.table.tensor(), to));
            self.sent.extend(sends.map(|send| self.ends.comm.start(send)));
        }
        settle(&mut self.sent)
    }

    /// Waits until all versions have been received, so that the newest may be written.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.sent.drain(..).try_for_each(|send| Ok(send.wait()?))
    }
}

/// The last stage's copy, which no optimizer updates.
pub(super) struct Follower {
    table: Parameter,
    versions: Versions,
    ends: Ends,
    /// Gradients that may still be under way.
    sent: Vec<Pending>,
}

impl Follower {
    /// `versions` are those of the table, which the owner makes.
    pub(super) fn new(table: Parameter, versions: Versions, ends: Ends) -> Follower {
        Follower { table, versions, ends, sent: Vec::new() }
    }

    /// Lets the table hold a version, which it receives if it has not yet.
    pub(super) fn hold(&mut self, version: usize) -> Result<()> {
        self.receive(version)?;
        self.versions.hold(version)
    }

    /// Receives versions up to `version`.
    fn receive(&mut self, version: usize) -> Result<()> {
        while self.versions.newest() < version {
            let (table, comm) = (&self.table, &self.ends.comm);
            self.versions.update(|| Ok(comm.run(Call::recv(table.tensor(), 0))?))?;
        }
        Ok(())
    }

    /// Sends the head's gradients to the owners and clears them.
    pub(super) fn send_head(&mut self) -> Result<()> {
        let missing =
            || Error::Config(format!("{}: backward gave a tied table no gradient", self.table.name()));
        let grad = self.take_head().ok_or_else(missing)?.into_tensor();
        let sends = (0..self.ends.owners).map(|to| self.ends.comm.start(Call::send(grad.clone(), to)));
        self.sent.extend(sends);
        settle(&mut self.sent)
    }

    /// Takes the head's gradients.
    pub(super) fn take_head(&self) -> Option<Var> {
        let head = &self.table.leaves()[HEAD];
        let grad = head.grad();
        head.set_grad(None);
        grad
    }

    /// Gives them back.
    pub(super) fn put_head(&self, grad: Option<Var>) {
        self.table.leaves()[HEAD].set_grad(grad);
    }

    /// Counts a computation that has used a version.
    pub(super) fn used(&mut self, version: usize) -> Result<()> {
        self.versions.used(version)
    }

    /// Waits until all gradients have been received, and receives all versions up to `version`.
    pub(super) fn end(&mut self, version: usize) -> Result<()> {
        self.receive(version)?;
        self.versions.hold_newest()?;
        self.sent.drain(..).try_for_each(|send| Ok(send.wait()?))
    }
}

/// Drops sends that have ended.
fn settle(sent: &mut Vec<Pending>) -> Result<()> {
    let (over, under_way): (Vec<_>, Vec<_>) = sent.drain(..).partition(Pending::is_done);
    *sent = under_way;
    over.into_iter().try_for_each(|send| Ok(send.wait()?))
}
