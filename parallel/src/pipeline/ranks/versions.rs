//! Weight versions, for schedules without flushes: [`Versions`] stashes those that are still needed, and [`Updates`] chooses the one
//! that an action uses and makes the next.

use std::collections::BTreeMap;

use phalanx_nn::Parameter;
use phalanx_nn::autograd::{Leaf, Stash};
use phalanx_tensor::{Category, Context};

use super::tied_versions::{Ends, Follower, Owner, has_its_own_gradients};
use crate::pipeline::schedule::{Action, ActionKind, Asynchronous};
use crate::{Error, Result};

/// The weights of a rank's stages, and how to update them, for a schedule without flushes.
pub trait Weights {
    /// The parameters of a stage that its passes use and [`Weights::update`] writes. Frozen ones may be left out.
    ///
    /// # Errors
    /// If the stage is not on this rank.
    fn parameters(&self, stage: usize) -> Result<Vec<Parameter>>;

    /// The optimizer's step, which writes the parameters of a stage in place. Their gradients are the sums over the micro-batches
    /// of update number `update`, counted from 0 in each
    /// [`AsynchronousPipeline::train`](super::AsynchronousPipeline::train). Gradients are cleared after it.
    ///
    /// The gradients are those of the weight version that the schedule says, some updates old. They are of this stage alone,
    /// since other stages are at other updates. So there is no norm over all stages; the norm of each stage can be clipped.
    ///
    /// # Errors
    /// Any error; it ends the run of all ranks.
    fn update(&mut self, stage: usize, update: usize) -> Result<()>;
}

/// The stashed weight versions of a stage, by handle. The parameters hold the version of the computation that is running. A
/// version is copied only if the next one is made while an action still needs it, and it is freed after its last use.
///
/// ```text
///            newest, needed again:  copy, set the copy, update that   (the old one stays in `kept`)
///   U  --->
///            newest, not needed:    update in place
/// ```
pub(super) struct Versions {
    parameters: Vec<Parameter>,
    /// The values of all leaves of the parameters, in order.
    kept: BTreeMap<usize, Vec<Stash>>,
    /// The version that the parameters hold.
    held: usize,
    newest: usize,
    /// How many computations are still to come, by the version that they use.
    left: BTreeMap<usize, usize>,
}

impl Versions {
    /// Version 0 is what the parameters hold; `uses` is the number of computations that use each version.
    pub(super) fn new(parameters: Vec<Parameter>, uses: BTreeMap<usize, usize>) -> Result<Versions> {
        parameters.iter().try_for_each(has_its_own_storage)?;
        let mut versions = Versions { parameters, kept: BTreeMap::new(), held: 0, newest: 0, left: uses };
        versions.keep();
        Ok(versions)
    }

    fn leaves(&self) -> impl Iterator<Item = &Leaf> {
        self.parameters.iter().flat_map(Parameter::leaves)
    }

    /// Stashes what the parameters hold as the newest version.
    fn keep(&mut self) {
        let stashes = self.leaves().map(Leaf::stash).collect();
        self.held = self.newest;
        self.kept.insert(self.newest, stashes);
    }

    /// Lets the parameters hold a version.
    pub(super) fn hold(&mut self, version: usize) -> Result<()> {
        if self.held != version {
            let missing = || Error::Config(format!("version {version} of the weights is not kept"));
            let stashes = self.kept.get(&version).ok_or_else(missing)?;
            self.leaves().zip(stashes).try_for_each(|(leaf, stash)| leaf.restore(stash))?;
            self.held = version;
        }
        Ok(())
    }

    /// The newest version.
    pub(super) fn newest(&self) -> usize {
        self.newest
    }

    /// Whether an action needs the newest version again, so that an update must not write it.
    fn keeps_newest(&self) -> bool {
        self.left.contains_key(&self.newest)
    }

    /// Lets the parameters hold the newest version.
    pub(super) fn hold_newest(&mut self) -> Result<()> {
        self.hold(self.newest)
    }

    /// Counts a computation that has used a version, and frees the version after the last.
    pub(super) fn used(&mut self, version: usize) -> Result<()> {
        self.left.entry(version).and_modify(|left| *left -= 1);
        self.left.retain(|_, left| *left > 0);
        if version < self.newest && !self.left.contains_key(&version) {
            self.hold_newest()?;
            self.kept.remove(&version);
        }
        Ok(())
    }

    /// Makes the next version from the newest by `step`, which writes the parameters.
    pub(super) fn update(&mut self, step: impl FnOnce() -> Result<()>) -> Result<()> {
        self.hold_newest()?;
        if self.keeps_newest() {
            let _category = Context::with(|c| c.category = Category::Parameters);
            self.parameters.iter().try_for_each(|p| Ok::<_, Error>(p.set_tensor(p.tensor().copy()?)?))?;
        } else {
            self.kept.remove(&self.newest);
        }
        step()?;
        self.newest += 1;
        self.keep();
        Ok(())
    }
}

/// Refuses a parameter that shares its buffer with others, or is not always in memory.
fn has_its_own_storage(parameter: &Parameter) -> Result<()> {
    let tensor = parameter.tensor();
    let bytes = parameter.range().len() * tensor.dtype().size();
    if tensor.storage().bytes() == bytes {
        return Ok(());
    }
    let (name, got) = (parameter.name(), tensor.storage().bytes());
    Err(Error::Config(format!(
        "{name}: got a parameter of {bytes} bytes in a storage of {got}, as ZeRO's are, wanted one with a storage of \
         its own, of which versions can be kept"
    )))
}

/// The versions of a rank's weights while a schedule runs.
pub(super) struct Updates<'a> {
    plan: &'a Asynchronous,
    weights: &'a mut dyn Weights,
    stages: BTreeMap<usize, Versions>,
    /// If a table is tied: the first stage's copy, or the last's.
    owner: Option<Owner>,
    follower: Option<Follower>,
}

impl<'a> Updates<'a> {
    /// `stages` are those of `rank`. `ends` has the first and the last stage's ranks, if these are two stages and this is one of the
    /// ranks.
    pub(super) fn new(
        plan: &'a Asynchronous,
        rank: usize,
        stages: Vec<usize>,
        ends: Option<&Ends>,
        weights: &'a mut dyn Weights,
    ) -> Result<Updates<'a>> {
        let mut updates = Updates { plan, weights, stages: BTreeMap::new(), owner: None, follower: None };
        let mut seen = Vec::new();
        for stage in stages {
            let mut parameters = updates.parameters(stage)?;
            if let Some(shared) = parameters.iter().find(|p| seen.iter().any(|other| p.is(other))) {
                let name = shared.name();
                return Err(Error::Config(format!(
                    "{name}: two stages of this rank share it, and each wants a version of its own"
                )));
            }
            seen.extend(parameters.iter().cloned());
            updates.tie(ends, rank, stage, &mut parameters)?;
            updates.stages.insert(stage, Versions::new(parameters, plan.uses(rank, stage, stage))?);
        }
        Ok(updates)
    }

    /// The parameters of a stage that are trained.
    pub(super) fn parameters(&self, stage: usize) -> Result<Vec<Parameter>> {
        let all = self.weights.parameters(stage)?;
        Ok(all.into_iter().filter(Parameter::is_trained).collect())
    }

    /// Registers a tied table of the first or the last stage. The last stage's copy is taken out of the stage's parameters.
    fn tie(
        &mut self,
        ends: Option<&Ends>,
        rank: usize,
        stage: usize,
        parameters: &mut Vec<Parameter>,
    ) -> Result<()> {
        let last = self.plan.schedule.stages() - 1;
        let Some(ends) = ends.filter(|_| [0, last].contains(&stage)) else { return Ok(()) };
        let is_tied = |p: &Parameter| p.leaves().len() == 2 && !p.has_replica_sites();
        let Some(place) = parameters.iter().position(is_tied) else { return Ok(()) };
        has_its_own_gradients(&parameters[place])?;
        let [first, followers] = [0, last].map(|stage| self.plan.schedule.ranks_of(stage).len());
        if followers > 1 && self.plan.interval_of(0) != self.plan.interval_of(last) {
            return Err(Error::Config(format!(
                "{}: got a tied table at a first stage of {first} replicas and a last of {followers}, which update after \
                 unlike numbers of micro-batches; wanted equal numbers, one replica of the last stage, or vertical sync",
                parameters[place].name()
            )));
        }
        if stage == 0 {
            self.owner = Some(Owner::new(parameters[place].clone(), ends.clone()));
            return Ok(());
        }
        let table = parameters.remove(place);
        let versions = Versions::new(vec![table.clone()], self.plan.uses(rank, last, 0))?;
        self.follower = Some(Follower::new(table, versions, ends.clone()));
        Ok(())
    }

    /// The number of micro-batches of a mini-batch.
    pub(super) fn interval(&self) -> usize {
        self.plan.interval
    }

    /// The number of micro-batches of an update of a stage.
    pub(super) fn interval_of(&self, stage: usize) -> usize {
        self.plan.interval_of(stage)
    }

    /// The weight version of a stage that a micro-batch uses.
    fn version(&self, stage: usize, micro_batch: usize) -> usize {
        self.plan.versions[stage][micro_batch]
    }

    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.plan.schedule.stages()
    }

    /// Before an action: lets the parameters hold the version that it uses.
    pub(super) fn enter(&mut self, Action { stage, kind, micro_batch }: Action) -> Result<()> {
        // A recomputation may run while a gradient is received.
        if !computes(kind) && kind != ActionKind::RecvBackward {
            return Ok(());
        }
        let (version, of_table) = (self.version(stage, micro_batch), self.version(0, micro_batch));
        of(&mut self.stages, stage)?.hold(version)?;
        let is_last = self.is_last(stage);
        self.follower.iter_mut().filter(|_| is_last).try_for_each(|table| table.hold(of_table))
    }

    /// After an action: counts its use of the version, and sends the head's gradients of a whole update of the first stage.
    pub(super) fn leave(&mut self, Action { stage, kind, micro_batch }: Action) -> Result<()> {
        if !computes(kind) {
            return Ok(());
        }
        let (version, of_table) = (self.version(stage, micro_batch), self.version(0, micro_batch));
        of(&mut self.stages, stage)?.used(version)?;
        let is_whole = kind.adds() && (micro_batch + 1).is_multiple_of(self.interval_of(0));
        let Some(follower) = self.follower.as_mut().filter(|_| stage + 1 == self.plan.schedule.stages())
        else {
            return Ok(());
        };
        follower.used(of_table)?;
        if is_whole { follower.send_head() } else { Ok(()) }
    }

    /// `U`.
    pub(super) fn update(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let number = micro_batch / self.interval_of(stage);
        let is_last = self.is_last(stage);
        let Updates { weights, stages, owner, follower, .. } = self;
        let mut owner = owner.as_mut().filter(|_| stage == 0);
        let versions = of(stages, stage)?;
        if let Some(owner) = &mut owner {
            owner.add_head(micro_batch)?;
            if !versions.keeps_newest() {
                owner.wait()?;
            }
        }
        // The head's gradients are not this update's, but wait for the first stage's.
        let follower = follower.as_ref().filter(|_| is_last);
        let head = follower.and_then(Follower::take_head);
        versions.update(|| {
            weights.update(stage, number)?;
            Ok(weights.parameters(stage)?.iter().try_for_each(Parameter::zero_grad)?)
        })?;
        follower.into_iter().for_each(|follower| follower.put_head(head.clone()));
        owner.map_or(Ok(()), Owner::send)
    }

    /// At the end of a run without errors: lets the parameters hold the newest version.
    pub(super) fn end(mut self) -> Result<()> {
        let updates = self.plan.schedule.micro_batches / self.interval_of(0);
        self.stages.values_mut().try_for_each(Versions::hold_newest)?;
        self.owner.iter_mut().try_for_each(Owner::wait)?;
        self.follower.iter_mut().try_for_each(|table| table.end(updates))
    }
}

fn of(stages: &mut BTreeMap<usize, Versions>, stage: usize) -> Result<&mut Versions> {
    stages.get_mut(&stage).ok_or_else(|| Error::Config(format!("stage {stage} is not here")))
}

/// Whether an action uses weights.
fn computes(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::Forward | ActionKind::Backward | ActionKind::Input | ActionKind::Weight)
}
