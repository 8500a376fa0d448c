//! The digests of a step's gradients and parameters, and the comparison of the copies that ranks must have alike.

use std::collections::HashSet;
use std::path::Path;

use phalanx_nn::{Optimizer, Parameter, Parameters};
use phalanx_parallel as parallel;
use phalanx_parallel::digest::{UnlikeCopies, whole_digests};
use phalanx_parallel::sharded_tensor::ShardedTensor;

use crate::checkpoints::{FrozenParameters, frozen_digest};
use crate::record::ByName;
use crate::run::Run;
use crate::run::optimizers::AnyRule;
use crate::{Config, Error, Result};

impl Run {
    /// The digests of the gradients, before the update of a step for which digests are due.
    pub(crate) fn gradient_digests(&self, step: u64) -> Result<Option<ByName>> {
        self.digests_of(step, "gradient", || {
            let mut parts = Vec::new();
            for parameter in self.setup.data_parallel.parameters() {
                if let Some(grad) = parameter.finish_grad()? {
                    let values = grad.contiguous()?;
                    parts.push(ShardedTensor { values, ..ShardedTensor::of_parameter(&parameter) });
                }
            }
            Ok(parts)
        })
    }

    /// The digests of the parameters, after the update of a step for which digests are due. If copies are to be compared, those of
    /// optimizer state are compared too: a wrong bit may change a moment by less than the parameter's last bit.
    pub(crate) fn parameter_digests(&self, step: u64) -> Result<Option<ByName>> {
        let digests = self.digests_of(step, "parameter", || self.parameter_parts())?;
        if is_due(self.setup.config.check_replicas, step) {
            self.digests_of(step, "optimizer state", || {
                let of = |optimizer: &Optimizer<AnyRule>| {
                    let state = optimizer.state_dict()?;
                    Ok::<_, Error>(ShardedTensor::of_optimizer_state(&optimizer.parameters(), &state))
                };
                Ok(self.optimizers.iter().map(of).collect::<Result<Vec<_>>>()?.concat())
            })?;
        }
        Ok(digests)
    }

    fn parameter_parts(&self) -> Result<Vec<ShardedTensor>> {
        let parameters = self.model.parameters();
        // A rank under ZeRO-3 keeps its shards only; under ZeRO-1 and 2 it keeps copies, which are compared.
        let is_here = |p: &Parameter| p.held_in().iter().all(|held| held.why_withheld().is_none());
        if parameters.iter().all(is_here) {
            let parts = parameters.iter().map(ShardedTensor::held_in);
            return Ok(parts.collect::<parallel::Result<Vec<_>>>()?.concat());
        }
        let parts = self.setup.data_parallel.parts(&*self.model)?;
        Ok(parts.into_iter().filter(|part| !part.buffer).collect())
    }

    /// Leaves the frozen parameters out of checkpoints, if they are from a folder. All ranks call it.
    pub(crate) fn leave_out_frozen(&mut self, folder: Option<&Path>) -> Result<()> {
        let Some(folder) = folder.filter(|_| !self.mesh_rank.device.is_meta()) else { return Ok(()) };
        let all = self.model.parameters();
        let trained: HashSet<&str> = all.iter().filter(|p| p.is_trained()).map(Parameter::name).collect();
        let mut parts = self.parameter_parts()?;
        parts.retain(|part| !trained.contains(&*part.name));
        let digests = whole_digests(self.mesh_rank.all_ranks(), &parts)?.of;
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.into());
        self.frozen = Some(FrozenParameters { folder, digest: frozen_digest(&digests) });
        Ok(())
    }

    /// Compares the weights with which the ranks begin, wherever ranks hold copies of the same part. All ranks call it.
    ///
    /// # Errors
    /// [`parallel::Error::Disagreement`] on every rank if copies differ.
    pub(crate) fn check_initial_weights(&self) -> Result<()> {
        let ranks = self.mesh_rank.all_ranks();
        if ranks.size() == 1 || self.mesh_rank.device.is_meta() {
            return Ok(());
        }
        let found = whole_digests(ranks, &self.parameter_parts()?)?.unlike;
        let Some(first) = found.first() else { return Ok(()) };
        // The first rank that fails ends the run of all. It waits until every rank has compared.
        let _ = ranks.barrier();
        let why = format!(
            "the ranks begin with different weights: {}; wanted values that depend on the scope's seed or on files alone",
            unlike("parameter", first, found.len())
        );
        Err(parallel::Error::Disagreement(why).into())
    }

    fn digests_of(
        &self,
        step: u64,
        what: &str,
        parts: impl FnOnce() -> Result<Vec<ShardedTensor>>,
    ) -> Result<Option<ByName>> {
        let Config { digests, check_replicas, .. } = self.setup.config;
        if !is_due(digests, step) && !is_due(check_replicas, step) {
            return Ok(None);
        }
        let found = whole_digests(self.mesh_rank.all_ranks(), &parts()?)?;
        if let Some(first) = found.unlike.first().filter(|_| is_due(check_replicas, step)) {
            let unlike = unlike(what, first, found.unlike.len());
            return Err(Error::Config(format!("silent data corruption: {unlike}")));
        }
        let hex = |(name, digest)| (name, format!("{digest:016x}"));
        Ok(is_due(digests, step).then(|| found.of.into_iter().map(hex).collect()))
    }
}

/// Whether something that is done every so many steps is due after a step.
fn is_due(every: u64, step: u64) -> bool {
    every > 0 && (step + 1).is_multiple_of(every)
}

/// The message about copies that must be alike.
fn unlike(what: &str, UnlikeCopies { name, odd, alike }: &UnlikeCopies, count: usize) -> String {
    let listed = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let (which, verb) = if odd.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
    let others = match &alike[..] {
        [] => "copies that differ, of which none has a majority".to_string(),
        alike => format!("a copy unlike that of ranks {}", listed(alike)),
    };
    let odd = listed(odd);
    let s = if count == 1 { "" } else { "s" };
    format!("of {what} {name}, {which} {odd} {verb} {others}; copies of {count} {what}{s} differ")
}
