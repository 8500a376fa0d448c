//! (sharded/core/values.rs)
//! When values are gathered and freed.
//!
//! (sharded/flat/values.rs)
//! When [`Flat`]'s values are here, and where from.

use std::ops::Range;
use std::sync::atomic::Ordering;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::{is_grad_enabled, is_recomputing};
use phalanx_tensor::{Category, Tensor};

use super::Reshard;
use super::core::{Core, Group, State};
use super::flat_parameter::{Flat, Member, Ranks};
use crate::comm::Call;
use crate::{Error, Result};

/// The group of the parameters of no unit.
const ROOT: usize = 0;

/// Whether a pass goes through the units from the first to the last, or back.
#[derive(Clone, Copy)]
pub(super) enum Pass {
    Forward,
    Backward,
}

impl Core {
    /// A unit is about to compute.
    pub(super) fn enter(&self, unit: usize, pass: Pass) -> Result<()> {
        let state = &mut *self.lock();
        let here = self.units[unit];
        let is_kept = |group: usize| group == here || state.held > 0 || state.groups[group].outside;
        if let Some(other) = state.ahead.filter(|ahead| !is_kept(*ahead)) {
            state.groups[other].flats.iter_mut().try_for_each(Flat::free)?;
        }
        state.ahead = None;
        // Ranks may go on to use different parameters of no unit, so they gather all of them, and now.
        if matches!(pass, Pass::Forward) {
            state.groups[ROOT].gather(&self.ranks)?;
        }
        for flat in &mut state.groups[here].flats {
            flat.gather(&self.ranks)?;
            if matches!(pass, Pass::Backward) && flat.trained && state.begun {
                flat.open()?;
            }
        }
        match self.following(unit, pass) {
            Some(next) => self.gather_ahead(state, next),
            None => Ok(()),
        }
    }

    /// The group of the unit that presumably computes next: units are registered in that order. Nothing says where a
    /// forward pass ends that is repeated during backward.
    fn following(&self, unit: usize, pass: Pass) -> Option<usize> {
        let next = match pass {
            Pass::Forward if is_recomputing() => None,
            Pass::Forward => Some(unit + 1),
            Pass::Backward => unit.checked_sub(1),
        };
        next.filter(|_| self.config.prefetch).and_then(|next| self.units.get(next)).copied()
    }

    fn gather_ahead(&self, state: &mut State, group: usize) -> Result<()> {
        let flats = &mut state.groups[group].flats;
        if flats.iter().any(|flat| !flat.is_here()) {
            state.ahead = Some(group);
        }
        flats.iter_mut().try_for_each(|flat| flat.start_gather(&self.ranks))
    }

    /// A parameter of a group is about to be used. What a unit computes with is here; the rest is gathered, and stays until the
    /// pass is over. Values of which this rank's share alone is new are withheld instead.
    pub(super) fn used(&self, group: usize) -> Result<()> {
        let group = &mut self.lock().groups[group];
        if self.is_lost() {
            return Ok(());
        }
        if self.ranks.shard.size() > 1 {
            group.flats.iter().filter(|flat| flat.is_stale()).try_for_each(Flat::withhold)?;
        }
        if group.flats.iter().all(Flat::is_gathered) {
            return Ok(());
        }
        group.outside = true;
        group.gather(&self.ranks)
    }

    /// Takes back what a refused pass has added, where nothing else was; elsewhere that is to be zeroed.
    pub(super) fn check_unspoiled(&self) -> Result<()> {
        let state = &mut *self.lock();
        if state.refused && state.touched.contains(&true) {
            let why = "gradients may have a part of a backward pass that was refused; call `zero.zero_grad()` first";
            return Err(Error::Config(format!("Zero: {why}")));
        }
        if std::mem::take(&mut state.refused) {
            self.parameters().flat_map(Parameter::leaves).for_each(|leaf| leaf.set_grad(None));
        }
        Ok(())
    }

    /// Begins a backward pass: gathers what lies outside all units, in case an earlier pass has freed it.
    pub(super) fn begin(&self) -> Result<()> {
        self.check_unspoiled()?;
        let state = &mut *self.lock();
        state.begun = true;
        self.used.store(true, Ordering::Relaxed);
        for group in state.groups.iter_mut().filter(|group| group.outside) {
            group.gather(&self.ranks)?;
            group.flats.iter_mut().filter(|flat| flat.trained).try_for_each(Flat::open)?;
        }
        Ok(())
    }

    /// Before a unit's forward pass is repeated.
    pub(super) fn enter_again(&self, unit: usize) -> Result<()> {
        let group = &mut self.lock().groups[self.units[unit]];
        group.flats.iter_mut().try_for_each(|flat| flat.gather(&self.ranks))
    }

    /// A unit has computed.
    pub(super) fn leave(&self, unit: usize, pass: Pass) -> Result<()> {
        let state = &mut *self.lock();
        let group = &mut state.groups[self.units[unit]];
        let kept = state.held > 0 || group.outside;
        let Some((first, last)) = group.units.filter(|_| !kept) else { return Ok(()) };
        let over = match pass {
            Pass::Forward => unit == last && !(is_grad_enabled() && self.stays(unit)),
            Pass::Backward => unit == first,
        };
        if over { group.flats.iter_mut().try_for_each(Flat::free) } else { Ok(()) }
    }

    /// Whether a unit's parameters stay for the backward pass.
    fn stays(&self, unit: usize) -> bool {
        match self.config.reshard {
            Reshard::Always => false,
            Reshard::ExceptLast => unit + 1 == self.units.len(),
            Reshard::Never => true,
        }
    }

    /// Gives every rank what others have updated, where all ranks keep all values; frees what else is gathered. Whether
    /// this rank has updated anything says nothing about others, so all take part.
    pub(super) fn updated(&self, frozen: bool) -> Result<()> {
        let state = &mut *self.lock();
        state.free()?;
        let held = state.held > 0;
        let mut flats: Vec<&mut Flat> = state.groups.iter_mut().flat_map(|g| &mut g.flats).collect();
        flats.retain(|flat| (held || flat.keeps_full()) && (flat.trained || frozen));
        flats.iter_mut().try_for_each(|flat| flat.start_renewal(&self.ranks))?;
        flats.into_iter().try_for_each(|flat| flat.gather(&self.ranks))
    }

    /// Gathers everything, to stay until [`Core::release`] was called as often.
    pub(super) fn hold(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.groups.iter_mut().flat_map(|g| &mut g.flats).try_for_each(|flat| flat.gather(&self.ranks))?;
        state.held += 1;
        Ok(())
    }

    /// See [`Core::hold`].
    pub(super) fn release(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.held = state.held.saturating_sub(1);
        state.free()
    }

    /// Frees everything that need not be here.
    pub(super) fn free(&self) -> Result<()> {
        self.lock().free()
    }

    /// Refuses to go on from values of before the last update.
    pub(super) fn check_fresh(&self) -> Result<()> {
        let state = self.lock();
        let is = |what: fn(&Flat) -> bool| state.groups.iter().flat_map(|g| &g.flats).any(what);
        let refuse = |why: &str| Err(Error::Config(format!("Zero: {why}")));
        if is(Flat::is_stale) {
            return refuse("parameters were changed and `updated` was not called before backward");
        }
        if let Some(other) = state.groups.iter().flat_map(|g| &g.flats).find_map(Flat::replaced) {
            let why =
                "holds another tensor than `Zero` has given it; make it anew after parameters are replaced";
            return Err(phalanx_nn::Error::invalid(other.name(), why).into());
        }
        if is(Flat::is_overwritten) {
            return refuse(
                "values of the model were changed, wanted `load_full_state_dict`: shares are kept apart",
            );
        }
        Ok(())
    }
}

/// The end.
impl Core {
    /// Gives up gathered values, unless somebody holds them, and gradients that were not sent. Waits for nothing.
    pub(super) fn abandon(&self) {
        let state = &mut *self.lock();
        let held = state.held > 0;
        // What somebody holds stays for good.
        state.held += usize::from(held);
        for flat in state.groups.iter_mut().flat_map(|g| &mut g.flats) {
            // An empty stand-in and an empty slot always fit.
            let _ = if held { Ok(()) } else { flat.abandon() };
            let _ = flat.close();
        }
    }
}

impl Group {
    /// Lets all its parameters hold their values.
    fn gather(&mut self, ranks: &Ranks) -> Result<()> {
        self.flats.iter_mut().try_for_each(|flat| flat.gather(ranks))
    }
}

impl State {
    /// Frees everything that need not be here.
    pub(super) fn free(&mut self) -> Result<()> {
        match self.held {
            0 => self.groups.iter_mut().flat_map(|g| &mut g.flats).try_for_each(Flat::free),
            _ => Ok(()),
        }
    }
}

/// Why a parameter has no values here.
const SPREAD: &str = "these are values of a parameter that Zero has spread over the ranks: take \
    `zero.full_state_dict()`, or hold `zero.gathered()` while the model's own tensors are used";

/// Why a parameter has no values that agree.
const STALE: &str =
    "of these values only this rank's share is new: call `updated` of the `Zero` after the optimizer's step";

impl Flat {
    /// Starts to gather the values, unless they are here or on their way.
    pub(super) fn start_gather(&mut self, ranks: &Ranks) -> Result<()> {
        if self.full.is_some() { Ok(()) } else { self.start_renewal(ranks) }
    }

    /// Starts to gather the values, here or not.
    pub(super) fn start_renewal(&mut self, ranks: &Ranks) -> Result<()> {
        let full = match self.full.take() {
            Some(full) => full,
            None => Tensor::empty(&[self.elements()], self.dtype, self.device)?.tagged(Category::Parameters),
        };
        let input = match self.apart {
            true => kernels::cast(&self.shard.to_device(self.device, false)?, self.dtype)?,
            false => self.shard.clone(),
        };
        let call = Call::all_gather_uneven(full.clone(), input, &self.cuts.counts());
        self.gathering = Some(ranks.shard.start(call));
        self.gathered = self.shard.version();
        self.full = Some(full);
        Ok(())
    }

    /// Lets the parameters hold their values.
    pub(super) fn gather(&mut self, ranks: &Ranks) -> Result<()> {
        self.start_gather(ranks)?;
        let Some(pending) = self.gathering.take() else { return Ok(()) };
        if let Err(error) = pending.wait() {
            // Nobody is to take for values what is in there.
            self.full = if self.keeps_full { self.full.take() } else { None };
            return Err(error.into());
        }
        if !self.apart {
            // The shard, a part of what was written, is as new.
            self.gathered = self.shard.version();
        }
        self.note_written();
        let Some(full) = &self.full else { return Ok(()) };
        self.members.iter().try_for_each(|member| Ok(member.parameter.set_tensor(member.of(full)?)?))
    }

    /// Gives up all values but this rank's, whatever is under way.
    pub(super) fn abandon(&mut self) -> Result<()> {
        self.gathering = None;
        self.free()
    }

    /// Gives up all values but this rank's.
    pub(super) fn free(&mut self) -> Result<()> {
        if self.keeps_full {
            return Ok(());
        }
        if let Some(pending) = self.gathering.take() {
            pending.wait()?;
        }
        if let Some(full) = self.full.take() {
            for member in self.members.iter().filter(|m| m.parameter.tensor().shares_storage(&full)) {
                let stand_in = Tensor::withheld(&member.shape, self.dtype, self.device, SPREAD)?;
                member.parameter.set_tensor(stand_in)?;
            }
        }
        Ok(())
    }

    /// Whether all values are here to be used.
    pub(super) fn is_gathered(&self) -> bool {
        self.full.is_some() && self.gathering.is_none()
    }

    /// Whether all values are here or on their way.
    pub(super) fn is_here(&self) -> bool {
        self.full.is_some()
    }

    /// Whether all values stay with every rank.
    pub(super) fn keeps_full(&self) -> bool {
        self.keeps_full
    }

    /// Whether the values that are here are those of before this rank's last update.
    pub(super) fn is_stale(&self) -> bool {
        self.full.is_some() && self.gathered != self.shard.version()
    }

    /// A parameter that somebody has let hold another tensor than this buffer's.
    pub(super) fn replaced(&self) -> Option<&Parameter> {
        let full = self.full.as_ref().filter(|_| self.gathering.is_none())?;
        let mut parameters = self.members.iter().map(|member| &member.parameter);
        parameters.find(|parameter| !parameter.tensor().shares_storage(full))
    }

    /// Puts tensors that cannot be read in the parameters' places, so that no layer computes with values from before the other ranks' last
    /// updates.
    pub(super) fn withhold(&self) -> Result<()> {
        self.members.iter().try_for_each(|Member { parameter, shape, .. }| {
            Ok(parameter.set_tensor(Tensor::withheld(shape, self.dtype, self.device, STALE)?)?)
        })
    }

    /// Remembers that the values that stay are those of the shards.
    pub(super) fn note_written(&mut self) {
        let kept = self.full.as_ref().filter(|_| self.apart && self.keeps_full);
        self.written = kept.map(Tensor::version);
    }

    /// Whether somebody has changed the model's own values, which are given by the shards.
    pub(super) fn is_overwritten(&self) -> bool {
        self.written.is_some_and(|version| self.full.as_ref().is_some_and(|full| full.version() != version))
    }

    /// All values in the shards' dtype, for a state dict, on the parameters' device.
    pub(super) fn whole(&self, ranks: &Ranks) -> Result<Tensor> {
        let all = Tensor::empty(&[self.elements()], self.shard.dtype(), self.device)?;
        let own = self.shard.to_device(self.device, false)?;
        ranks.shard.run(Call::all_gather_uneven(all.clone(), own, &self.cuts.counts()))?;
        Ok(all)
    }

    /// Which of a member's elements this rank has, and their values.
    pub(super) fn share_of(&self, member: usize) -> Result<(Range<usize>, Tensor)> {
        let member = &self.members[member];
        let inside = member.inside(&self.own).unwrap_or(0..0);
        let start = (member.range.start + inside.start).saturating_sub(self.own.start);
        Ok((inside.clone(), self.shard.narrow(0, start.min(self.own.len()), inside.len())?))
    }

    /// Takes what this rank has of a member from a tensor of all of it.
    pub(super) fn load(&mut self, member: usize, values: &Tensor) -> Result<()> {
        let (own, mut share) = self.share_of(member)?;
        let values = values.with_shape(&[values.numel()])?.narrow(0, own.start, own.len())?;
        let values = kernels::cast(&values.to_device(share.device(), false)?, share.dtype())?;
        Ok(kernels::copy_(&mut share, &values)?)
    }
}
