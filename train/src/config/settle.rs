//! How a [`Config`] is completed when all its keys are set: those that mean something together.

use super::{Config, OnDivergence};
use crate::settings::{Given, Key, Keyed};
use crate::{Error, Result};

impl Keyed for Config {
    fn keys() -> Vec<Key<Config>> {
        super::keys::keys()
    }

    fn settle(&mut self, given: &Given<'_>) -> Result<()> {
        self.settle_ranks(given)?;
        self.settle_pieces(given)?;
        self.settle_schedule(given)?;
        match self.on_divergence {
            OnDivergence::Stop if is_beside(given, "divergence-limit", "on-divergence") => {
                refuse("`divergence-limit` goes with `on-divergence` skip or rollback, and it is stop")
            }
            _ => Ok(()),
        }
    }
}

fn refuse(why: impl Into<String>) -> Result<()> {
    Err(Error::Config(why.into()))
}

/// A key's whole number, which was checked when it was given.
fn whole(given: &Given<'_>, name: &str) -> Option<usize> {
    given(name)?.1.parse().ok()
}

/// Whether a key is given, and the other by no later source, which would mean that this one counts no more.
fn is_beside(given: &Given<'_>, name: &str, other: &str) -> bool {
    given(name).is_some_and(|(source, _)| given(other).is_none_or(|(other, _)| other <= source))
}

impl Config {
    /// As many replicas as `ranks` says.
    fn settle_ranks(&mut self, given: &Given<'_>) -> Result<()> {
        let Some(all) = whole(given, "ranks").filter(|_| is_beside(given, "ranks", "dp")) else {
            return Ok(());
        };
        if all == 0 {
            return refuse("`ranks` is 0, wanted at least 1");
        }
        let (tp, pp) = (self.layout.tp, self.layout.pp);
        let has_dp = is_beside(given, "dp", "ranks");
        if !has_dp {
            self.layout.dp = (all / tp.saturating_mul(pp).max(1)).max(1);
        }
        let (dp, ranks) = (self.layout.dp, self.ranks());
        match has_dp {
            _ if ranks == all => Ok(()),
            true => {
                refuse(format!("`ranks` {all} is not `dp` {dp} x `tp` {tp} x `pp` {pp}, which is {ranks}"))
            }
            false => refuse(format!(
                "`ranks` {all} is no multiple of `tp` {tp} x `pp` {pp}; the nearest is `dp` {dp}, {ranks} ranks"
            )),
        }
    }

    /// A rank's pieces, of which each chain has its part.
    fn settle_pieces(&mut self, given: &Given<'_>) -> Result<()> {
        let (pieces, chains) = (whole(given, "micro-batches"), whole(given, "emulate-dp"));
        let pieces = pieces.unwrap_or(self.layout.micro_batches.saturating_mul(self.chains));
        self.chains = chains.unwrap_or(self.chains);
        let chains = self.chains;
        if chains == 0 || pieces == 0 {
            let key = if chains == 0 { "emulate-dp" } else { "micro-batches" };
            return refuse(format!("`{key}` is 0, wanted at least 1"));
        }
        if !self.batch.is_multiple_of(chains) {
            return refuse(format!("`emulate-dp` {chains} does not divide `batch` {}", self.batch));
        }
        if !pieces.is_multiple_of(chains) {
            return refuse(format!("`emulate-dp` {chains} does not divide `micro-batches` {pieces}"));
        }
        self.layout.micro_batches = pieces / chains;
        Ok(())
    }

    /// Refuses keys of a pipeline that would do nothing.
    fn settle_schedule(&mut self, given: &Given<'_>) -> Result<()> {
        if let Some((_, schedule)) =
            given("schedule").filter(|_| given("pp").is_none() && self.layout.pp == 1)
        {
            return refuse(format!("`schedule` {schedule} goes with `pp`, which is not given"));
        }
        let stages =
            whole(given, "virtual-stages").filter(|_| is_beside(given, "virtual-stages", "schedule"));
        match (&self.layout.schedule[..], stages) {
            (_, None) | ("interleaved", _) | ("zb-v", Some(2)) => Ok(()),
            ("zb-v", Some(n)) => refuse(format!("`virtual-stages` is {n}, and zb-v always has 2")),
            (other, Some(n)) => refuse(format!(
                "`virtual-stages` {n} goes with `schedule` interleaved, and the schedule is {other}"
            )),
        }
    }
}
