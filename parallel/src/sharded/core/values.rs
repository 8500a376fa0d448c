//! When values are gathered and freed.

use phalanx_nn::autograd::{is_grad_enabled, is_recomputing};

use super::{Core, State};
use crate::sharded::Reshard;
use crate::sharded::flat::Flat;
use crate::{Error, Result};

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
        if let Some(other) = state.ahead.take().filter(|ahead| *ahead != here && state.held == 0) {
            state.groups[other].flats.iter_mut().try_for_each(Flat::free)?;
        }
        for flat in &mut state.groups[here].flats {
            flat.gather(&self.ranks)?;
            if matches!(pass, Pass::Backward) && flat.trained {
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

    /// Before a unit's forward pass is repeated.
    pub(in crate::sharded) fn enter_again(&self, unit: usize) -> Result<()> {
        let group = &mut self.lock().groups[self.units[unit]];
        group.flats.iter_mut().try_for_each(|flat| flat.gather(&self.ranks))
    }

    /// A unit has computed.
    pub(in crate::sharded) fn leave(&self, unit: usize, pass: Pass) -> Result<()> {
        let state = &mut *self.lock();
        let group = &mut state.groups[self.units[unit]];
        let Some((first, last)) = group.units.filter(|_| state.held == 0) else { return Ok(()) };
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
        for flat in state.groups.iter_mut().flat_map(|g| &mut g.flats) {
            // An empty stand-in and an empty slot always fit.
            let _ = if held { Ok(()) } else { flat.abandon() };
            let _ = flat.close();
        }
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
