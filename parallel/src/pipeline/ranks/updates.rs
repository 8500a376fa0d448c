//! [`Updates`]: what a schedule without flushes adds to the executor: weights of the right version, and updates.

use std::collections::BTreeMap;

use phalanx_nn::Parameter;
use phalanx_nn::autograd::Slot;

use super::asynchronous::{AsynchronousPipeline, Weights};
use super::table::{Follower, Owner};
use super::versions::Versions;
use crate::pipeline::schedule::{Action, Asynchronous, Kind};
use crate::{Error, Result};

/// The versions of a rank's weights while a schedule runs.
pub(super) struct Updates<'a> {
    plan: &'a Asynchronous,
    weights: &'a mut dyn Weights,
    stages: BTreeMap<usize, Versions>,
    /// Where a table is tied: the first stage's copy or the last's.
    owner: Option<Owner>,
    follower: Option<Follower>,
}

impl<'a> Updates<'a> {
    pub(super) fn new(
        pipeline: &'a AsynchronousPipeline,
        weights: &'a mut dyn Weights,
    ) -> Result<Updates<'a>> {
        let (plan, stages) = (&pipeline.plan, BTreeMap::new());
        let mut updates = Updates { plan, weights, stages, owner: None, follower: None };
        let mut seen = Vec::new();
        for stage in pipeline.pipeline.stages() {
            let mut parameters = updates.trained(stage)?;
            if let Some(shared) = parameters.iter().find(|p| seen.iter().any(|other| p.is(other))) {
                let name = shared.name();
                return Err(Error::Config(format!(
                    "{name}: two stages of this rank share it, and each wants a version of its own"
                )));
            }
            seen.extend(parameters.iter().cloned());
            updates.tie(pipeline, stage, &mut parameters)?;
            updates.stages.insert(stage, Versions::new(parameters, plan.uses(stage, stage))?);
        }
        Ok(updates)
    }

    fn trained(&self, stage: usize) -> Result<Vec<Parameter>> {
        let all = self.weights.parameters(stage)?;
        Ok(all.into_iter().filter(Parameter::is_trained).collect())
    }

    /// If the stage has an end of the pipeline and a table that is tied to the other: the last stage's copy is not that stage's.
    fn tie(
        &mut self,
        pipeline: &AsynchronousPipeline,
        stage: usize,
        parameters: &mut Vec<Parameter>,
    ) -> Result<()> {
        let last = self.plan.schedule.stages() - 1;
        let Some(pair) = pipeline.ends.as_ref().filter(|_| [0, last].contains(&stage)) else { return Ok(()) };
        let Some(place) = parameters.iter().position(|p| p.leaves().len() == 2) else { return Ok(()) };
        has_its_own_gradients(&parameters[place])?;
        if stage == 0 {
            self.owner = Some(Owner::new(parameters[place].clone(), pair.clone()));
            return Ok(());
        }
        let table = parameters.remove(place);
        let versions = Versions::new(vec![table.clone()], self.plan.uses(last, 0))?;
        self.follower = Some(Follower::new(table, versions, pair.clone()));
        Ok(())
    }

    /// The micro-batches of an update.
    pub(super) fn interval(&self) -> usize {
        self.plan.interval
    }

    /// The version of a stage's weights that a micro-batch uses.
    fn version(&self, stage: usize, micro_batch: usize) -> usize {
        self.plan.versions[stage][micro_batch]
    }

    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.plan.schedule.stages()
    }

    /// Before an action.
    pub(super) fn enter(&mut self, Action { stage, kind, micro_batch }: Action) -> Result<()> {
        // What is received may be used to compute again meanwhile.
        if !computes(kind) && kind != Kind::RecvBackward {
            return Ok(());
        }
        let (version, of_table) = (self.version(stage, micro_batch), self.version(0, micro_batch));
        of(&mut self.stages, stage)?.hold(version)?;
        let is_last = self.is_last(stage);
        self.follower.iter_mut().filter(|_| is_last).try_for_each(|table| table.hold(of_table))
    }

    /// After an action.
    pub(super) fn leave(&mut self, Action { stage, kind, micro_batch }: Action) -> Result<()> {
        if !computes(kind) {
            return Ok(());
        }
        let (version, of_table) = (self.version(stage, micro_batch), self.version(0, micro_batch));
        of(&mut self.stages, stage)?.used(version)?;
        let is_last = self.is_last(stage);
        self.follower.iter_mut().filter(|_| is_last).try_for_each(|table| table.versions.used(of_table))
    }

    /// `U`.
    pub(super) fn update(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let number = micro_batch / self.plan.interval;
        if self.is_last(stage) {
            self.follower.iter_mut().try_for_each(Follower::send_head)?;
        }
        let Updates { weights, stages, owner, .. } = self;
        let mut owner = owner.as_mut().filter(|_| stage == 0);
        let versions = of(stages, stage)?;
        if let Some(owner) = &mut owner {
            owner.add_head()?;
            if !versions.keeps_newest() {
                owner.wait()?;
            }
        }
        versions.update(|| {
            weights.update(stage, number)?;
            Ok(weights.parameters(stage)?.iter().try_for_each(Parameter::zero_grad)?)
        })?;
        owner.map_or(Ok(()), Owner::send)
    }

    /// Leaves the newest weights; after an error as they are.
    pub(super) fn end(mut self) -> Result<()> {
        let updates = self.plan.schedule.micro_batches / self.plan.interval;
        self.stages.values_mut().try_for_each(Versions::hold_newest)?;
        self.owner.iter_mut().try_for_each(Owner::wait)?;
        self.follower.iter_mut().try_for_each(|table| table.end(updates))
    }
}

fn of(stages: &mut BTreeMap<usize, Versions>, stage: usize) -> Result<&mut Versions> {
    stages.get_mut(&stage).ok_or_else(|| Error::Config(format!("stage {stage} is not here")))
}

/// Refuses a tied table whose gradients lie in buckets.
fn has_its_own_gradients(table: &Parameter) -> Result<()> {
    if table.leaves().iter().all(|leaf| matches!(leaf.slot(), Slot::Owned(_))) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{}: got a tied table with data parallelism in a schedule without flushes, wanted one or the other: the \
         replicas' buckets would wait for gradients that the other end of the pipeline takes",
        table.name()
    )))
}

/// Whether an action uses weights.
fn computes(kind: Kind) -> bool {
    matches!(kind, Kind::Forward | Kind::Backward | Kind::Input | Kind::Weight)
}
