//! [`Owner`] and [`Follower`]: the two copies of a tied table in a schedule without flushes.
//!
//! The table belongs to the first stage: a micro-batch uses the version that the first stage has for it at both ends, and the first
//! stage's optimizer makes the next.
//!
//! ```text
//! first stage (owner)                           last stage (follower)
//!   U u   <------- gradient of the head ------- U u      after the last B of update u, before its own step
//!         -------- version u + 1 -------------> F m      the first that uses version u + 1, or the end of the run
//! ```
//! Nobody waits for it but as for the micro-batch itself: the first stage's `U` comes after its `B`, and that after the last
//! stage's; a version is sent before the `F` on the first stage that uses it, and so it is there before that on the last.

use phalanx_nn::Parameter;
use phalanx_nn::autograd::Var;
use phalanx_tensor::Tensor;

use super::versions::Versions;
use crate::comm::{Call, Comm, Pending};
use crate::{Error, Result};

/// The sites of a tied table.
const HEAD: usize = 0;
/// The ranks of the pair that has one.
const OWNER: usize = 0;
const FOLLOWER: usize = 1;

/// The first stage's copy.
pub(super) struct Owner {
    table: Parameter,
    pair: Comm,
    /// Versions that may still be under way.
    sent: Vec<Pending>,
}

impl Owner {
    pub(super) fn new(table: Parameter, pair: Comm) -> Owner {
        Owner { table, pair, sent: Vec::new() }
    }

    /// Adds the head's gradients, before an update.
    pub(super) fn add_head(&mut self) -> Result<()> {
        let table = self.table.tensor();
        let dtype = self.table.grad()?.map_or(table.dtype(), |grad| grad.dtype());
        let grad = Tensor::empty(table.shape(), dtype, table.device())?;
        self.pair.run(Call::recv(grad.clone(), FOLLOWER))?;
        Ok(self.table.leaves()[HEAD].accumulate(grad)?)
    }

    /// Sends the version that an update has made.
    pub(super) fn send(&mut self) -> Result<()> {
        self.sent.push(self.pair.start(Call::send(self.table.tensor(), FOLLOWER)));
        settle(&mut self.sent)
    }

    /// Until all versions have come, so that the newest may be written.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.sent.drain(..).try_for_each(|send| Ok(send.wait()?))
    }
}

/// The last stage's copy, which no optimizer touches.
pub(super) struct Follower {
    table: Parameter,
    pub(super) versions: Versions,
    pair: Comm,
    /// Gradients that may still be under way.
    sent: Vec<Pending>,
}

impl Follower {
    /// `versions` are the table's, as the owner makes them.
    pub(super) fn new(table: Parameter, versions: Versions, pair: Comm) -> Follower {
        Follower { table, versions, pair, sent: Vec::new() }
    }

    /// Lets the table hold a version, which it receives if it has not come yet.
    pub(super) fn hold(&mut self, version: usize) -> Result<()> {
        self.receive(version)?;
        self.versions.hold(version)
    }

    /// Receives versions up to that one.
    pub(super) fn receive(&mut self, version: usize) -> Result<()> {
        while self.versions.newest() < version {
            let (table, pair) = (&self.table, &self.pair);
            self.versions.update(|| Ok(pair.run(Call::recv(table.tensor(), OWNER))?))?;
        }
        Ok(())
    }

    /// Sends the head's gradients, which are gone then.
    pub(super) fn send_head(&mut self) -> Result<()> {
        let missing =
            || Error::Config(format!("{}: backward gave a tied table no gradient", self.table.name()));
        let head = &self.table.leaves()[HEAD];
        let grad = head.grad().map(Var::into_tensor).ok_or_else(missing)?;
        head.set_grad(None);
        self.sent.push(self.pair.start(Call::send(grad, OWNER)));
        settle(&mut self.sent)
    }

    /// Until all gradients have come, and all versions up to that one are here.
    pub(super) fn end(&mut self, version: usize) -> Result<()> {
        self.receive(version)?;
        self.versions.hold_newest()?;
        self.sent.drain(..).try_for_each(|send| Ok(send.wait()?))
    }
}

/// Forgets sends that are over.
fn settle(sent: &mut Vec<Pending>) -> Result<()> {
    let (over, under_way): (Vec<_>, Vec<_>) = sent.drain(..).partition(Pending::is_done);
    *sent = under_way;
    over.into_iter().try_for_each(|send| Ok(send.wait()?))
}
