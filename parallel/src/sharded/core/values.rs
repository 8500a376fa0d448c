//! When values are gathered and freed.

use std::sync::atomic::Ordering;

use phalanx_nn::Parameter;
use phalanx_nn::autograd::{is_grad_enabled, is_recomputing};

use super::{Core, Group, State};
use crate::sharded::Reshard;
use crate::sharded::flat::{Flat, Ranks};
use crate::{Error, Result};

/// The group of the parameters of no unit.
const ROOT: usize = 0;

/// Whether a pass goes through the units from the first to the last, or back.
#[derive(Clone, Copy)]
pub(in crate::sharded) enum Pass {
    Forward,
    Backward,
}

impl Core {
    /// A unit is about to compute.
    pub(in crate::sharded) fn enter(&self, unit: usize, pass: Pass) -> Result<()> {
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
    pub(in crate::sharded) fn used(&self, group: usize) -> Result<()> {
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
    pub(in crate::sharded) fn check_unspoiled(&self) -> Result<()> {
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
    pub(in crate::sharded) fn begin(&self) -> Result<()> {
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
    pub(in crate::sharded) fn enter_again(&self, unit: usize) -> Result<()> {
        let group = &mut self.lock().groups[self.units[unit]];
        group.flats.iter_mut().try_for_each(|flat| flat.gather(&self.ranks))
    }

    /// A unit has computed.
    pub(in crate::sharded) fn leave(&self, unit: usize, pass: Pass) -> Result<()> {
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
    pub(in crate::sharded) fn updated(&self, frozen: bool) -> Result<()> {
        let state = &mut *self.lock();
        state.free()?;
        let held = state.held > 0;
        let mut flats: Vec<&mut Flat> = state.groups.iter_mut().flat_map(|g| &mut g.flats).collect();
        flats.retain(|flat| (held || flat.keeps_full()) && (flat.trained || frozen));
        flats.iter_mut().try_for_each(|flat| flat.start_renewal(&self.ranks))?;
        flats.into_iter().try_for_each(|flat| flat.gather(&self.ranks))
    }

    /// Gathers everything, to stay until [`Core::release`] was called as often.
    pub(in crate::sharded) fn hold(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.groups.iter_mut().flat_map(|g| &mut g.flats).try_for_each(|flat| flat.gather(&self.ranks))?;
        state.held += 1;
        Ok(())
    }

    /// See [`Core::hold`].
    pub(in crate::sharded) fn release(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.held = state.held.saturating_sub(1);
        state.free()
    }

    /// Frees everything that need not be here.
    pub(in crate::sharded) fn free(&self) -> Result<()> {
        self.lock().free()
    }

    /// Refuses to go on from values of before the last update.
    pub(in crate::sharded) fn check_fresh(&self) -> Result<()> {
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
    pub(in crate::sharded) fn abandon(&self) {
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
