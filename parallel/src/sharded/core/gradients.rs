//! When gradients are sent.

use std::sync::atomic::Ordering;

use phalanx_nn::Parameter;
use phalanx_tensor::{Device, Tensor};

use super::{Core, State};
use crate::comm::Reduction;
use crate::sharded::Stage;
use crate::sharded::flat::{Flat, Ranks};
use crate::{Error, Result};

/// Groups whose gradients are under way at a time.
const IN_FLIGHT: usize = 2;

impl Core {
    /// A site of a parameter has its gradient of this pass.
    pub(in crate::sharded) fn arrived(&self, number: usize, synchronise: bool) -> Result<()> {
        if self.is_lost() {
            return Ok(());
        }
        let state = &mut *self.lock();
        if !state.begun {
            state.refused = true;
            let why = "got a gradient of a backward pass that Zero does not know of: call `zero.backward(&loss)` in the \
                       place of `loss.backward()`, or `zero.begin()` before it and `zero.finish()` after it";
            return Err(phalanx_nn::Error::invalid(self.parameters[number].0.name(), why).into());
        }
        state.touched[number] = true;
        self.local.store(true, Ordering::Relaxed);
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
        while self.sends_early() && state.unsent > 0 && state.groups[state.unsent - 1].missing == 0 {
            self.send_next(state)?;
        }
        Ok(())
    }

    /// Whether gradients are sent while backward runs. Where values are gathered between them and ranks may leave out
    /// different parameters, the ranks would not meet in one order.
    fn sends_early(&self) -> bool {
        !(self.config.find_unused && self.config.stage == Stage::Parameters)
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
    pub(in crate::sharded) fn finish(&self) -> Result<()> {
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
        // Sites are added to each other.
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
        self.local.store(false, Ordering::Relaxed);
        state.free()
    }

    /// The pass that was announced is over.
    pub(in crate::sharded) fn end(&self) -> Result<()> {
        match std::mem::take(&mut self.lock().begun) {
            true => Ok(()),
            false => {
                Err(Error::Config("Zero: `finish` came without the `begin` of its backward pass".into()))
            }
        }
    }

    /// Forgets all gradients, also those that no rank has sent.
    pub(in crate::sharded) fn zero_grad(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.touched.fill(false);
        state.refused = false;
        self.local.store(false, Ordering::Relaxed);
        for flat in state.groups.iter_mut().flat_map(|g| &mut g.flats) {
            flat.pieces.iter().try_for_each(Parameter::zero_grad)?;
            flat.close()?;
        }
        Ok(())
    }

    /// A parameter that no rank used has no gradient, rather than one of zeros, which an optimizer would act on. One
    /// that an earlier pass has left stays.
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
        let pieces = state.groups.iter().flat_map(|g| &g.flats).flat_map(Flat::first_grads);
        pieces.filter(|piece| unused.contains(&piece.name())).for_each(|piece| piece.set_grad(None));
        Ok(())
    }
}
