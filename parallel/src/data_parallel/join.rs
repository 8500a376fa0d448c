//! [`Ddp::join`]: ranks that run out of batches at different times.
//!
//! Ranks tell each other their next action before each collective part, so that a rank without batches can take part:
//!
//! ```text
//! rank 0   batch │ pass ........ │ batch │ pass ........ │ nothing │        │ nothing
//! rank 1   batch │ pass ........ │ batch │ pass ........ │ batch   │ pass   │ nothing
//! rank 2   batch │ pass ........ │ nothing, adds zeros   │ nothing │ zeros  │ nothing   then rank 1's values to all
//! ```
//!
//! Source: PyTorch's `join`, design note of `torch.distributed.algorithms`.

use phalanx_tensor::{Tensor, unpoisoned};

use super::Ddp;
use super::reducer::Roles;
use crate::{Error, Result};

/// How [`Ddp::join`] treats ranks that have run out of batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JoinConfig {
    /// The divisor of a mean; a sum is not divided.
    pub divisor: Divisor,
    /// Whether a rank that runs out before others is an error, on all ranks (PyTorch's
    /// `throw_on_early_termination`).
    pub refuse: bool,
}

/// The divisor of [`super::Average::Mean`] while some ranks have run out of batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Divisor {
    /// All ranks (PyTorch's): a batch weighs the same to the end.
    #[default]
    World,
    /// The ranks that still have a batch.
    Active,
}

/// A rank's next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextAction {
    /// Nothing of its own any more.
    Nothing,
    /// Its next batch.
    Batch,
    /// A pass that synchronises.
    Pass,
}

impl Ddp {
    /// Calls `step(Some(batch))` for each of this rank's batches, while other ranks may have more or fewer, even none.
    /// All ranks call this.
    ///
    /// A rank that has run out adds zeros to the synchronised passes of the others, and calls `step(None)` after
    /// each: the gradients are then those of all ranks, so an optimizer that steps here as well keeps the same
    /// parameters and optimizer state as the others. One that does not step gets the parameters at the end, when
    /// all take the values of the rank that had most batches, of several the last. The last pass of a `step`
    /// synchronises. An error on one rank ends the run of all.
    ///
    /// A rank without batches does not take part in other collectives of a step, such as those of [`super::SyncBatchNorm`], so the
    /// other ranks wait for it until the communicator's timeout. With such layers, run passes over batches without rows.
    ///
    /// # Errors
    /// Whatever `step` returns; if a rank runs out early and [`JoinConfig::refuse`] is set, or ranks that compute do different
    /// things; or as [`crate::comm::Pending::wait`].
    ///
    /// ```
    /// # use phalanx_nn::{LinearConfig, Module, Parameters, Scope, autograd::Var};
    /// # use phalanx_parallel::{Result, data_parallel::{Ddp, DdpConfig, JoinConfig}, launch};
    /// # use phalanx_tensor::DType;
    /// launch::threads(2, |rank| -> Result<()> {
    ///     let model = LinearConfig::new(1, 1).init(&Scope::new(7, DType::F32, rank.device()))?;
    ///     let ddp = Ddp::new(&model, rank.comm().clone(), DdpConfig::default())?;
    ///     let batches = vec![1f32; 2 + rank.rank()];
    ///     ddp.join(batches, JoinConfig::default(), |batch| {
    ///         if let Some(x) = batch {
    ///             let x = Var::from_slice(&[x], &[1, 1], rank.device())?;
    ///             ddp.backward(&model.forward(&x)?.sum_all()?)?;
    ///         }
    ///         // Here the optimizer steps.
    ///         Ok(model.parameters().iter().try_for_each(|p| p.zero_grad())?)
    ///     })
    /// })?;
    /// # Ok::<(), phalanx_parallel::comm::Error>(())
    /// ```
    pub fn join<B>(
        &self,
        batches: impl IntoIterator<Item = B>,
        config: JoinConfig,
        mut step: impl FnMut(Option<B>) -> Result<()>,
    ) -> Result<()> {
        let roles = Roles { first: 0, divisor: self.comm.size() };
        let _joined = Joined::new(self, config, roles)?;
        let mut batches = batches.into_iter().fuse();
        let mut run = || {
            let mut last = self.comm.size() - 1;
            loop {
                let batch = batches.next();
                let own = if batch.is_some() { NextAction::Batch } else { NextAction::Nothing };
                let round = self.announce(own)?;
                match round.what {
                    NextAction::Nothing => {
                        self.reducer.broadcast_zeroed(last)?;
                        return self.broadcast_values(last);
                    }
                    NextAction::Batch => {
                        last = round.last;
                        if config.refuse && !round.idle.is_empty() {
                            return Err(Error::Exhausted { ranks: round.idle });
                        }
                    }
                    NextAction::Pass => {
                        self.reducer.shadow(self.roles()).and_then(|()| self.end_pass())?;
                        step(None)?;
                    }
                }
                batch.map_or(Ok(()), |batch| step(Some(batch)))?;
            }
        };
        run().inspect_err(|error: &Error| self.comm.fail(&error.to_string()))
    }

    /// Tells all ranks this rank's next action, and returns theirs.
    pub(super) fn announce(&self, own: NextAction) -> Result<Round> {
        let host = self.reducer.host();
        let mine = Tensor::from_slice(&[own as i64], &[1], host)?;
        let mut all = Tensor::zeros(&[self.comm.size()], mine.dtype(), host)?;
        self.comm.all_gather(&mut all, &mine)?;
        let round = Round::of(&all.to_vec::<i64>()?)?;
        if let Some((config, roles)) = &mut *unpoisoned(self.uneven.lock())
            && round.what != NextAction::Nothing
        {
            let active = self.comm.size() - round.idle.len();
            let divisor = if config.divisor == Divisor::Active { active } else { self.comm.size() };
            *roles = Roles { first: round.first, divisor };
        }
        Ok(round)
    }
}

/// The next actions of all ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Round {
    what: NextAction,
    /// The first and the last rank that do it.
    first: usize,
    last: usize,
    /// Those that have nothing to do.
    idle: Vec<usize>,
}

impl Round {
    fn of(moves: &[i64]) -> Result<Round> {
        let those = |what: NextAction| -> Vec<usize> {
            (0..moves.len()).filter(|&rank| moves[rank] == what as i64).collect()
        };
        let [idle, batch, pass] = [NextAction::Nothing, NextAction::Batch, NextAction::Pass].map(those);
        let (what, active) = match (&batch[..], &pass[..]) {
            ([], []) => (NextAction::Nothing, &idle),
            (_, []) => (NextAction::Batch, &batch),
            ([], _) => (NextAction::Pass, &pass),
            _ => return Err(Error::Passes { pass, batch }),
        };
        let (first, last) = (active.first().copied().unwrap_or(0), active.last().copied().unwrap_or(0));
        Ok(Round { what, first, last, idle: if what == NextAction::Nothing { vec![] } else { idle } })
    }
}

/// While it lives, ranks announce their actions.
struct Joined<'a>(&'a Ddp);

impl<'a> Joined<'a> {
    fn new(ddp: &'a Ddp, config: JoinConfig, roles: Roles) -> Result<Joined<'a>> {
        let mut uneven = unpoisoned(ddp.uneven.lock());
        if uneven.is_some() {
            return Err(phalanx_nn::Error::invalid("join", "got a `join` inside a `join`").into());
        }
        *uneven = Some((config, roles));
        Ok(Joined(ddp))
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        *unpoisoned(self.0.uneven.lock()) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_what_those_do_who_have_something_to_do() {
        let round = |moves: &[i64]| Round::of(moves);
        let wanted = |what, first, last, idle: &[usize]| Round { what, first, last, idle: idle.to_vec() };
        assert_eq!(round(&[1, 1]).unwrap(), wanted(NextAction::Batch, 0, 1, &[]));
        assert_eq!(round(&[0, 2, 2, 0]).unwrap(), wanted(NextAction::Pass, 1, 2, &[0, 3]));
        assert_eq!(round(&[0, 0]).unwrap(), wanted(NextAction::Nothing, 0, 1, &[]));
        let error = round(&[1, 2, 0]).unwrap_err().to_string();
        assert!(error.contains("[1]") && error.contains("[0]"), "{error}");
    }
}
