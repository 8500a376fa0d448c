//! What ranks exchange after each step: its numbers, and a [`Request`]. By one the run ends its epoch between two steps, so that ranks that
//! wait come in.

use std::sync::atomic::Ordering;

use phalanx_parallel::launch::Rank;

use super::Run;
use super::step::Outcome;
use super::training_loop::TrainingLoop;
use crate::Result;

/// What a rank asks for after a step. All ranks do the greatest of their requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Request {
    /// The next step.
    GoOn,
    /// An epoch that has the ranks that wait for a place, too.
    MeetAgain,
    /// The end of the run.
    Stop,
}

impl Request {
    /// As ranks send it.
    pub fn number(self) -> f64 {
        f64::from(self as u8)
    }

    pub fn of_number(number: f64) -> Request {
        let all = [Request::GoOn, Request::MeetAgain];
        all.into_iter().find(|request| request.number() == number).unwrap_or(Request::Stop)
    }
}

impl Run {
    /// Lets in ranks that wait for a place, if the layout follows the number of ranks and a checkpoint brings the run to the next epoch.
    /// A pipeline without flushes has one replica, and no place for others.
    pub(crate) fn admit_others(&mut self, process: Option<&Rank>) {
        let config = &self.setup.config;
        let is_kept = config.memory_every() > 0 || config.folder().is_some();
        if config.dp_auto && is_kept && config.asynchronous.is_none() {
            self.process = process.cloned();
        }
    }

    /// What this rank asks for now.
    pub(crate) fn request(&self) -> Request {
        match &self.process {
            _ if self.stop.load(Ordering::Relaxed) => Request::Stop,
            Some(process) if process.wants_to_change() => Request::MeetAgain,
            _ => Request::GoOn,
        }
    }
}

impl TrainingLoop<'_> {
    /// The numbers of the whole batch, alike on all ranks, and what they ask for. The loss is the sum of the ranks' parts. The
    /// norm is the first rank's, or that of the first rank whose norm is not finite: of a parameter that tensor-parallel ranks have
    /// alike, one rank's gradient alone may be wrong.
    pub(super) fn of_all_ranks(&self, own: Outcome) -> Result<(Outcome, Request)> {
        let mesh_rank = &self.run.mesh_rank;
        let loss = if mesh_rank.counts_loss() || mesh_rank.size() == 1 { own.loss } else { 0.0 };
        let all = mesh_rank.all_gather_slice(&[loss, own.grad_norm, self.run.request().number()])?;
        let of = |number: usize| all.iter().copied().skip(number).step_by(3);
        let odd = of(1).find(|norm| !norm.is_finite());
        let grad_norm = odd.or_else(|| of(1).next()).unwrap_or(own.grad_norm);
        let request = Request::of_number(of(2).fold(0.0, f64::max));
        Ok((Outcome { loss: of(0).fold(0.0, |sum, x| sum + x), grad_norm }, request))
    }

    /// Ends the epoch with a checkpoint from which the next one goes on: in memory, or on disk if there is none in memory.
    pub(super) fn meet_again(&mut self) -> Result<()> {
        match self.run.setup.config.memory_every() {
            0 if !self.is_saved() => self.save()?,
            0 => {}
            _ if !self.is_held() => self.hold()?,
            _ => {}
        }
        self.run.process.iter().for_each(Rank::meet_again);
        self.run.meets_again = true;
        Ok(())
    }
}
