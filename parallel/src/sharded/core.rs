//! [`Core`]: when values are gathered and freed, and when gradients are sent.
//!
//! A group is what is gathered together: the parameters of a unit, of several units that share one (a table and the
//! head tied to it), or those of no unit. Gradients are sent group by group, the last first, whatever the order in which
//! they come: collectives must meet in one order.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_nn::Parameter;
use phalanx_nn::autograd::is_grad_enabled;
use phalanx_tensor::{Device, Tensor};

use super::flat::{Flat, Ranks};
use super::gradients::Sent;
use super::{Reshard, ZeroConfig};
use crate::comm::Reduction;
use crate::{Error, Result};

/// Groups whose gradients are under way at a time.
const IN_FLIGHT: usize = 2;

pub(super) struct Core {
    pub(super) ranks: Ranks,
    pub(super) config: ZeroConfig,
    /// Each unit's group.
    units: Vec<usize>,
    /// The trained parameters, and each one's group.
    parameters: Vec<(Parameter, usize)>,
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) groups: Vec<Group>,
    /// Sites of each parameter that backward has not come to.
    sites: Vec<usize>,
    /// Whether a parameter got a gradient since the last synchronisation.
    touched: Vec<bool>,
    /// Groups whose gradients are not yet sent in this pass: those below this number.
    unsent: usize,
    /// Of a group and its buffer.
    sent: VecDeque<(usize, usize, Sent)>,
}

pub(super) struct Group {
    pub(super) flats: Vec<Flat>,
    /// The units it belongs to: the first and the last.
    units: Option<(usize, usize)>,
    /// Parameters whose gradients have not come.
    missing: usize,
    /// Those that are trained.
    trained: usize,
}

impl Group {
    pub(super) fn new(flats: Vec<Flat>, units: Option<(usize, usize)>) -> Group {
        let trained = flats.iter().filter(|f| f.trained).map(|f| f.members.len()).sum();
        Group { flats, units, missing: trained, trained }
    }
}

/// Whether a pass goes through the units from the first to the last, or back.
#[derive(Clone, Copy)]
pub(super) enum Pass {
    Forward,
    Backward,
}

impl Core {
    pub(super) fn new(ranks: Ranks, config: ZeroConfig, groups: Vec<Group>, units: Vec<usize>) -> Core {
        let of_group = |(g, group): (usize, &Group)| {
            let trained = group.flats.iter().filter(|f| f.trained).flat_map(|f| &f.members);
            trained.map(move |m| (m.parameter.clone(), g)).collect::<Vec<_>>()
        };
        let parameters: Vec<_> = groups.iter().enumerate().flat_map(of_group).collect();
        let sites = parameters.iter().map(|(p, _)| p.leaves().len()).collect();
        let (touched, unsent) = (vec![false; parameters.len()], groups.len());
        let state = State { groups, sites, touched, unsent, sent: VecDeque::new() };
        Core { ranks, config, units, parameters, state: Mutex::new(state) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The trained parameters of the model.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().map(|(parameter, _)| parameter)
    }
}

/// Values.
impl Core {
    /// A unit is about to compute.
    pub(super) fn enter(&self, unit: usize, pass: Pass) -> Result<()> {
        let state = &mut *self.lock();
        for flat in &mut state.groups[self.units[unit]].flats {
            flat.gather(&self.ranks)?;
            if matches!(pass, Pass::Backward) && flat.trained {
                flat.open()?;
            }
        }
        let next = match pass {
            Pass::Forward => self.units.get(unit + 1),
            Pass::Backward => unit.checked_sub(1).and_then(|before| self.units.get(before)),
        };
        match next.filter(|_| self.config.prefetch) {
            Some(&next) => state.groups[next].flats.iter_mut().try_for_each(|f| f.start_gather(&self.ranks)),
            None => Ok(()),
        }
    }

    /// Before a unit's forward pass is repeated.
    pub(super) fn enter_again(&self, unit: usize) -> Result<()> {
        let group = &mut self.lock().groups[self.units[unit]];
        group.flats.iter_mut().try_for_each(|flat| flat.gather(&self.ranks))
    }

    /// A unit has computed.
    pub(super) fn leave(&self, unit: usize, pass: Pass) -> Result<()> {
        let group = &mut self.lock().groups[self.units[unit]];
        let Some((first, last)) = group.units else { return Ok(()) };
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
        let mut flats: Vec<&mut Flat> = state.groups.iter_mut().flat_map(|g| &mut g.flats).collect();
        flats.iter_mut().try_for_each(|flat| flat.free())?;
        flats.retain(|flat| flat.keeps_full() && (flat.trained || frozen));
        flats.iter_mut().try_for_each(|flat| flat.start_renewal(&self.ranks))?;
        flats.into_iter().try_for_each(|flat| flat.gather(&self.ranks))
    }

    /// Gathers everything.
    pub(super) fn gather(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.groups.iter_mut().flat_map(|g| &mut g.flats).try_for_each(|flat| flat.gather(&self.ranks))
    }

    /// Frees everything that need not be here.
    pub(super) fn free(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.groups.iter_mut().flat_map(|g| &mut g.flats).try_for_each(Flat::free)
    }

    /// Refuses to go on from values of before the last update.
    pub(super) fn check_fresh(&self) -> Result<()> {
        match self.lock().groups.iter().flat_map(|g| &g.flats).any(Flat::is_stale) {
            true => Err(Error::Config(
                "parameters were changed and `updated` was not called before backward".into(),
            )),
            false => Ok(()),
        }
    }
}

/// Gradients.
impl Core {
    /// A site of a parameter has its gradient of this pass.
    pub(super) fn arrived(&self, number: usize, synchronise: bool) -> Result<()> {
        let state = &mut *self.lock();
        state.touched[number] = true;
        if !synchronise {
            return Ok(());
        }
        let (parameter, group) = &self.parameters[number];
        let Some(left) = state.sites[number].checked_sub(1) else {
            let why = "its gradient came again after it was sent; give each use a site of its own";
            return Err(phalanx_nn::Error::invalid(parameter.name(), why).into());
        };
        state.sites[number] = left;
        if left == 0 {
            state.groups[*group].missing -= 1;
        }
        while state.unsent > 0 && state.groups[state.unsent - 1].missing == 0 {
            self.send_next(state)?;
        }
        Ok(())
    }

    /// Sends the gradients of the next group in order, and waits for earlier ones if there are many.
    fn send_next(&self, state: &mut State) -> Result<()> {
        state.unsent -= 1;
        let group = state.unsent;
        for (number, flat) in state.groups[group].flats.iter_mut().enumerate().filter(|(_, f)| f.trained) {
            let sent = flat.send(&self.ranks, self.config.average)?;
            state.sent.extend(sent.into_iter().map(|sent| (group, number, sent)));
        }
        while state.sent.len() > IN_FLIGHT {
            Self::receive_next(&self.ranks, state)?;
        }
        Ok(())
    }

    fn receive_next(ranks: &Ranks, state: &mut State) -> Result<()> {
        let Some((group, flat, sent)) = state.sent.pop_front() else { return Ok(()) };
        state.groups[group].flats[flat].receive(sent, ranks)
    }

    /// Sends what is left, waits for everything, and gets ready for the next pass.
    pub(super) fn finish(&self) -> Result<()> {
        let state = &mut *self.lock();
        let missing = self.parameters.iter().zip(&state.sites).filter(|(_, sites)| **sites > 0);
        let missing: Vec<String> = missing.map(|((p, _), _)| p.name().into()).collect();
        if !missing.is_empty() && !self.config.find_unused {
            return Err(Error::Unused { parameters: missing });
        }
        while state.unsent > 0 {
            self.send_next(state)?;
        }
        while !state.sent.is_empty() {
            Self::receive_next(&self.ranks, state)?;
        }
        for piece in state.groups.iter().flat_map(|g| &g.flats).flat_map(|f| &f.pieces) {
            piece.finish_grad()?;
        }
        if self.config.find_unused {
            self.forget_unused(state)?;
        }
        state.unsent = state.groups.len();
        state.groups.iter_mut().for_each(|group| group.missing = group.trained);
        state.sites = self.parameters.iter().map(|(p, _)| p.leaves().len()).collect();
        state.touched.fill(false);
        state.groups.iter_mut().flat_map(|g| &mut g.flats).try_for_each(Flat::free)
    }

    /// A parameter that no rank used has no gradient, rather than one of zeros, which an optimizer would act on.
    fn forget_unused(&self, state: &mut State) -> Result<()> {
        let device = self.parameters.first().map_or(Device::CPU, |(p, _)| p.device().host());
        let touched: Vec<i32> = state.touched.iter().map(|&t| i32::from(t)).collect();
        let mut touched = Tensor::from_slice(&touched, &[touched.len()], device)?;
        if self.ranks.all.has_peers() {
            self.ranks.all.all_reduce(&mut touched, Reduction::Max)?;
        }
        let touched = touched.to_vec::<i32>()?;
        let unused: Vec<&str> =
            self.parameters().zip(touched).filter(|(_, t)| *t == 0).map(|(p, _)| p.name()).collect();
        let pieces = state.groups.iter().flat_map(|g| &g.flats).flat_map(|f| &f.pieces);
        pieces.filter(|piece| unused.contains(&piece.name())).for_each(|piece| piece.set_grad(None));
        Ok(())
    }
}
