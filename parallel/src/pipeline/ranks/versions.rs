//! Weight versions, for schedules without flushes: [`Versions`] stashes those that are still needed, [`Updates`] chooses the
//! one that an action uses and makes the next, and [`Owner`] and [`Follower`] are the two copies of a tied table.
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

use std::collections::BTreeMap;
use std::ops::Range;

use phalanx_nn::Parameter;
use phalanx_nn::autograd::{Leaf, Slot, Stash, Var};
use phalanx_tensor::{Category, Context, Tensor};

use crate::comm::{Call, Comm, Pending};
use crate::pipeline::schedule::{Action, ActionKind, Asynchronous, Schedule};
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
struct Versions {
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
    fn new(parameters: Vec<Parameter>, uses: BTreeMap<usize, usize>) -> Result<Versions> {
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
    fn hold(&mut self, version: usize) -> Result<()> {
        if self.held != version {
            let missing = || Error::Config(format!("version {version} of the weights is not kept"));
            let stashes = self.kept.get(&version).ok_or_else(missing)?;
            self.leaves().zip(stashes).try_for_each(|(leaf, stash)| leaf.restore(stash))?;
            self.held = version;
        }
        Ok(())
    }

    /// The newest version.
    fn newest(&self) -> usize {
        self.newest
    }

    /// Whether an action needs the newest version again, so that an update must not write it.
    fn keeps_newest(&self) -> bool {
        self.left.contains_key(&self.newest)
    }

    /// Lets the parameters hold the newest version.
    fn hold_newest(&mut self) -> Result<()> {
        self.hold(self.newest)
    }

    /// Counts a computation that has used a version, and frees the version after the last.
    fn used(&mut self, version: usize) -> Result<()> {
        self.left.entry(version).and_modify(|left| *left -= 1);
        self.left.retain(|_, left| *left > 0);
        if version < self.newest && !self.left.contains_key(&version) {
            self.hold_newest()?;
            self.kept.remove(&version);
        }
        Ok(())
    }

    /// Makes the next version from the newest by `step`, which writes the parameters.
    fn update(&mut self, step: impl FnOnce() -> Result<()>) -> Result<()> {
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
        let Some(place) = parameters.iter().position(|p| p.leaves().len() == 2) else { return Ok(()) };
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
        follower.versions.used(of_table)?;
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
        follower.into_iter().for_each(|follower| follower.table.leaves()[HEAD].set_grad(head.clone()));
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

/// Refuses a tied table with gradients in buckets.
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
fn computes(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::Forward | ActionKind::Backward | ActionKind::Input | ActionKind::Weight)
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
struct Owner {
    table: Parameter,
    ends: Ends,
    /// Versions that may still be under way.
    sent: Vec<Pending>,
}

impl Owner {
    fn new(table: Parameter, ends: Ends) -> Owner {
        Owner { table, ends, sent: Vec::new() }
    }

    /// Adds the head's gradients, before the update after `micro_batch`.
    fn add_head(&mut self, micro_batch: usize) -> Result<()> {
        let table = self.table.tensor();
        let dtype = self.table.grad()?.map_or(table.dtype(), |grad| grad.dtype());
        let grad = Tensor::empty(table.shape(), dtype, table.device())?;
        self.ends.comm.run(Call::recv(grad.clone(), self.ends.follower(micro_batch)))?;
        Ok(self.table.leaves()[HEAD].accumulate(grad)?)
    }

    /// Sends the version that an update has made. One owner does it for all.
    fn send(&mut self) -> Result<()> {
        if self.ends.comm.rank() == 0 {
            let sends = self.ends.followers().map(|to| Call::send(self.table.tensor(), to));
            self.sent.extend(sends.map(|send| self.ends.comm.start(send)));
        }
        settle(&mut self.sent)
    }

    /// Waits until all versions have been received, so that the newest may be written.
    fn wait(&mut self) -> Result<()> {
        self.sent.drain(..).try_for_each(|send| Ok(send.wait()?))
    }
}

/// The last stage's copy, which no optimizer updates.
struct Follower {
    table: Parameter,
    versions: Versions,
    ends: Ends,
    /// Gradients that may still be under way.
    sent: Vec<Pending>,
}

impl Follower {
    /// `versions` are those of the table, which the owner makes.
    fn new(table: Parameter, versions: Versions, ends: Ends) -> Follower {
        Follower { table, versions, ends, sent: Vec::new() }
    }

    /// Lets the table hold a version, which it receives if it has not yet.
    fn hold(&mut self, version: usize) -> Result<()> {
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
    fn send_head(&mut self) -> Result<()> {
        let missing =
            || Error::Config(format!("{}: backward gave a tied table no gradient", self.table.name()));
        let grad = self.take_head().ok_or_else(missing)?.into_tensor();
        let sends = (0..self.ends.owners).map(|to| self.ends.comm.start(Call::send(grad.clone(), to)));
        self.sent.extend(sends);
        settle(&mut self.sent)
    }

    /// Takes the head's gradients.
    fn take_head(&self) -> Option<Var> {
        let head = &self.table.leaves()[HEAD];
        let grad = head.grad();
        head.set_grad(None);
        grad
    }

    /// Waits until all gradients have been received, and receives all versions up to `version`.
    fn end(&mut self, version: usize) -> Result<()> {
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
