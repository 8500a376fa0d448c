//! When values are unsharded (all-gathered) and resharded (freed): [`ZeroCore`] decides it for FSDP units, [`FlatParameter`] does it.
//!
//! ```text
//! module i            pre_forward: enter          post_forward: leave      pre_backward: enter       post_backward: leave
//! unit of module i    unshard                     reshard (`Reshard`)      unshard                   reshard
//! units ahead         prefetch: all-gathers start                          prefetch, `Pre`           prefetch, `Post`
//! ```
//! A module inside another one enters and leaves between the hooks of the other, whose unit stays unsharded meanwhile. What is ahead
//! is known from the pass before (`order.rs`).
//! The hooks of a wrapped module (`wrap.rs`) call [`ZeroCore::enter`] and [`ZeroCore::leave`]. A parameter that is used outside its
//! module comes in through [`ZeroCore::used`].

use std::sync::atomic::Ordering;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::{is_checkpointing, is_grad_enabled};
use phalanx_tensor::{Category, Tensor};

use super::core::{FsdpUnit, WrappedModule, ZeroCore, ZeroState};
use super::flat_parameter::{FlatParameter, Ranks};
use super::order::{Order, Pass, Step};
use super::{BackwardPrefetch, Prefetch, Reshard};
use crate::comm::{Call, Pending};
use crate::{Error, Result};

/// The unit of the parameters of no module.
pub(super) const ROOT: usize = 0;

impl ZeroCore {
    /// A module is about to compute: unshards its unit, prefetches those that are expected next, and reshards those that were
    /// prefetched in vain.
    pub(super) fn enter(&self, module: usize, pass: Pass) -> Result<()> {
        let state = &mut *self.lock();
        let here = self.modules[module].unit;
        // While all values are held, ranks may run different forward passes, which say nothing about the next pass of all ranks.
        if state.held == 0 {
            state.order.enter(
                Step { module, pass },
                pass != Pass::Forward || is_grad_enabled() || is_checkpointing(),
            );
        }
        let Prefetch { forward, backward, limit } = self.config.prefetch;
        let depth = match (pass, backward) {
            (Pass::Forward, _) => forward,
            (_, BackwardPrefetch::Pre) => 1,
            (_, BackwardPrefetch::Post | BackwardPrefetch::None) => 0,
        };
        let ahead = self.ahead(state, module, pass, depth.min(limit - 1));
        let (expected, others): (Vec<usize>, Vec<usize>) =
            state.prefetched.iter().filter(|&&unit| unit != here).partition(|unit| ahead.contains(unit));
        state.prefetched = expected;
        for other in others.into_iter().filter(|_| state.held == 0) {
            let FsdpUnit { flats, outside, .. } = &mut state.units[other];
            flats.iter_mut().filter(|_| !*outside).try_for_each(FlatParameter::reshard)?;
        }
        // Ranks may use different parameters of the root, so all ranks unshard the whole root here.
        if pass != Pass::Backward {
            state.units[ROOT].unshard(&self.ranks)?;
        }
        // A unit of several modules is sent after its first module's backward pass, and gets its buffers then.
        let unit = &mut state.units[here];
        let is_sent = unit.modules.is_none_or(|(first, _)| first == module);
        for flat in &mut unit.flats {
            flat.unshard(&self.ranks)?;
            if pass == Pass::Backward && is_sent && flat.trained && state.begun {
                flat.open()?;
            }
        }
        self.prefetch(state, ahead)
    }

    /// The units of the next modules, at most so many.
    fn ahead(&self, state: &ZeroState, module: usize, pass: Pass, units: usize) -> Vec<usize> {
        let WrappedModule { unit, around } = &self.modules[module];
        let mut ahead = Vec::new();
        for next in state.order.ahead(pass).map(|module| self.modules[module].unit) {
            if ahead.len() == units {
                break;
            }
            let busy = next == *unit || around.contains(&next) || state.units[next].flats.is_empty();
            if !busy && !ahead.contains(&next) {
                ahead.push(next);
            }
        }
        ahead
    }

    fn prefetch(&self, state: &mut ZeroState, units: Vec<usize>) -> Result<()> {
        for unit in units {
            let flats = &mut state.units[unit].flats;
            if flats.iter().any(|flat| !flat.is_here()) && !state.prefetched.contains(&unit) {
                state.prefetched.push(unit);
            }
            flats.iter_mut().try_for_each(|flat| flat.start_unshard(&self.ranks))?;
        }
        Ok(())
    }

    /// A parameter of a unit is about to be used. If the unit is resharded, the use is outside its module: it is unsharded, and
    /// stays so until the pass is over. Values of which only this rank's shard is up to date are withheld.
    pub(super) fn used(&self, unit: usize) -> Result<()> {
        let unit = &mut self.lock().units[unit];
        if self.is_replaced() {
            return Ok(());
        }
        unit.flats.iter_mut().try_for_each(FlatParameter::settle)?;
        if self.ranks.shard.size() > 1 {
            unit.flats.iter().filter(|flat| flat.is_stale()).try_for_each(FlatParameter::withhold)?;
        }
        if unit.flats.iter().all(FlatParameter::is_unsharded) {
            return Ok(());
        }
        unit.outside = true;
        unit.unshard(&self.ranks)
    }

    /// Drops the gradients that a refused pass has added, if there were no others; otherwise asks for `zero_grad`. True if there was such a
    /// pass.
    pub(super) fn clear_refused_pass(&self, ignored_have_others: bool) -> Result<bool> {
        let state = &mut *self.lock();
        if state.refused && (ignored_have_others || state.touched.contains(&true)) {
            let why = "gradients may have a part of a backward pass that was refused; call `zero.zero_grad()` first";
            return Err(Error::Config(format!("Zero: {why}")));
        }
        let refused = std::mem::take(&mut state.refused);
        if refused {
            self.parameters().flat_map(Parameter::leaves).for_each(|leaf| leaf.set_grad(None));
        }
        Ok(refused)
    }

    /// Begins a backward pass: unshards the root and other units used outside modules, in case an earlier pass has freed them.
    pub(super) fn begin(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.begun = true;
        self.used.store(true, Ordering::Relaxed);
        for unit in state.units.iter_mut().filter(|unit| unit.outside) {
            unit.unshard(&self.ranks)?;
            unit.flats.iter_mut().filter(|flat| flat.trained).try_for_each(FlatParameter::open)?;
        }
        Ok(())
    }

    /// A module's forward pass is about to be recomputed.
    pub(super) fn enter_again(&self, module: usize) -> Result<()> {
        let unit = &mut self.lock().units[self.modules[module].unit];
        unit.flats.iter_mut().try_for_each(|flat| flat.unshard(&self.ranks))
    }

    /// A module has computed: reshards its unit unless it is needed again.
    pub(super) fn leave(&self, module: usize, pass: Pass) -> Result<()> {
        let state = &mut *self.lock();
        if state.held == 0 && (pass == Pass::Backward || is_grad_enabled()) {
            state.order.leave(Step { module, pass });
        }
        let stays = is_grad_enabled() && self.stays(&state.order, module, pass);
        let unit = &mut state.units[self.modules[module].unit];
        let over = match (unit.modules, pass) {
            _ if state.held > 0 || unit.outside => false,
            (Some((first, _)), Pass::Backward) => module == first,
            (Some((_, last)), _) => module == last && !stays,
            (None, _) => false,
        };
        if over {
            unit.flats.iter_mut().try_for_each(FlatParameter::reshard)?;
        }
        // A module that was recomputed is needed for its backward pass, unless others are recomputed before.
        let is_over = match pass {
            Pass::Forward => false,
            Pass::Recompute => state.order.next().is_some_and(|next| next.pass == Pass::Recompute),
            Pass::Backward => true,
        };
        if is_over && self.config.prefetch.backward == BackwardPrefetch::Post {
            let ahead = self.ahead(state, module, pass, 1);
            self.prefetch(state, ahead)?;
        }
        Ok(())
    }

    /// Whether the parameters of a module that has computed stay for its backward pass.
    fn stays(&self, order: &Order, module: usize, pass: Pass) -> bool {
        let next = order.next();
        match (self.config.reshard, pass) {
            (Reshard::Always, _) => false,
            (Reshard::Never, _) => true,
            (Reshard::ExceptLast, Pass::Forward) => next.is_none_or(|step| step.pass != Pass::Forward),
            (Reshard::ExceptLast, _) => next == Some(Step { module, pass: Pass::Backward }),
        }
    }

    /// Unshards everything until [`ZeroCore::release`] was called as often.
    pub(super) fn hold(&self) -> Result<()> {
        let state = &mut *self.lock();
        state
            .units
            .iter_mut()
            .flat_map(|unit| &mut unit.flats)
            .try_for_each(|flat| flat.unshard(&self.ranks))?;
        state.held += 1;
        Ok(())
    }

    /// See [`ZeroCore::hold`].
    pub(super) fn release(&self) -> Result<()> {
        let state = &mut *self.lock();
        // The next pass tells of an error.
        if state.held == 1
            && let Err(error) = state.write_back()
        {
            state.not_kept = Some(error.to_string());
        }
        state.held = state.held.saturating_sub(1);
        state.reshard()
    }

    /// Reshards everything that need not stay.
    pub(super) fn reshard(&self) -> Result<()> {
        self.lock().reshard()
    }

    /// Refuses values that are older than the last update, replaced, overwritten or lost.
    pub(super) fn check_fresh(&self) -> Result<()> {
        let state = &mut *self.lock();
        let refuse = |why: &str| Err(Error::Config(format!("Zero: {why}")));
        if let Some(why) = &state.not_kept {
            return refuse(&format!("values written under `gathered` were not kept: {why}"));
        }
        state.settle()?;
        state.write_back()?;
        if state.is_any(FlatParameter::is_stale) {
            return refuse("parameters were changed and `updated` was not called before backward");
        }
        if let Some(other) = state.units.iter().flat_map(|unit| &unit.flats).find_map(FlatParameter::replaced)
        {
            let why =
                "holds another tensor than `Zero` has given it; make it anew after parameters are replaced";
            return Err(phalanx_nn::Error::invalid(other.name(), why).into());
        }
        if state.is_any(FlatParameter::is_overwritten) {
            return refuse(
                "values of the model were changed, wanted `load_full_state_dict`: shares are kept apart",
            );
        }
        Ok(())
    }
}

/// Dropping the wrapper.
impl ZeroCore {
    /// Drops unsharded values, unless a `Gathered` lives, and gradients that were not sent. Waits for nothing.
    pub(super) fn abandon(&self) {
        let state = &mut *self.lock();
        let held = state.held > 0;
        // Values that a `Gathered` holds stay for good.
        state.held += usize::from(held);
        for flat in state.units.iter_mut().flat_map(|unit| &mut unit.flats) {
            // An empty stand-in and an empty slot always fit.
            let _ = if held { Ok(()) } else { flat.abandon() };
            let _ = flat.close();
        }
    }
}

impl FsdpUnit {
    /// Unshards its flat parameters.
    fn unshard(&mut self, ranks: &Ranks) -> Result<()> {
        self.flats.iter_mut().try_for_each(|flat| flat.unshard(ranks))
    }
}

impl ZeroState {
    fn is_any(&self, what: fn(&FlatParameter) -> bool) -> bool {
        self.units.iter().flat_map(|unit| &unit.flats).any(what)
    }

    /// While all values are held: takes what other code has written there into the shards.
    pub(super) fn write_back(&mut self) -> Result<()> {
        let mut flats = self.units.iter_mut().flat_map(|unit| &mut unit.flats).filter(|_| self.held > 0);
        flats.try_for_each(FlatParameter::write_back)
    }

    /// Reshards everything that need not stay.
    pub(super) fn reshard(&mut self) -> Result<()> {
        if self.held > 0 {
            return Ok(());
        }
        self.prefetched.clear();
        self.units.iter_mut().flat_map(|unit| &mut unit.flats).try_for_each(FlatParameter::reshard)
    }
}

/// The reason in the error of reading a sharded parameter.
const SPREAD: &str = "these are values of a parameter that Zero has spread over the ranks: take \
    `zero.full_state_dict()`, or hold `zero.gathered()` while the model's own tensors are used";

/// Why a parameter has no values that agree.
const STALE: &str =
    "of these values only this rank's share is new: call `updated` of the `Zero` after the optimizer's step";

impl FlatParameter {
    /// Starts the all-gather, unless the values are here or on their way.
    pub(super) fn start_unshard(&mut self, ranks: &Ranks) -> Result<()> {
        if self.full.is_some() { Ok(()) } else { self.start_refresh(ranks) }
    }

    /// Starts the all-gather, whether or not the values are here.
    pub(super) fn start_refresh(&mut self, ranks: &Ranks) -> Result<()> {
        let _upload = match &self.offload {
            Some(offload) => offload.enter_upload(self.full.as_ref())?,
            None => None,
        };
        let full = match &self.full {
            Some(full) => full.clone(),
            None => Tensor::empty(&[self.elements()], self.dtype, self.device)?.tagged(Category::Parameters),
        };
        self.unsharding = Some(self.start_all_gather(&full, ranks)?);
        self.full_version = None;
        self.unsharded_version = self.shard.version();
        self.full = Some(full);
        Ok(())
    }

    fn start_all_gather(&mut self, full: &Tensor, ranks: &Ranks) -> Result<Pending> {
        let input = match &mut self.offload {
            Some(offload) if self.device.is_cuda() && ranks.shard.size() == 1 => {
                offload.upload_all(&mut full.clone(), &self.shard)?;
                return Ok(Pending::done(Call::barrier(), Ok(())));
            }
            Some(offload) => offload.values(&self.shard, self.dtype)?,
            None if self.apart => kernels::cast(&self.shard, self.dtype)?,
            None => self.shard.clone(),
        };
        let call = Call::all_gather_uneven(full.clone(), input, &self.cuts.counts());
        Ok(ranks.shard.start(call))
    }

    fn wait_for_all_gather(&mut self, pending: Pending) -> Result<()> {
        match &mut self.offload {
            Some(offload) => offload.wait(pending, self.full.as_ref()),
            None => Ok(pending.wait()?),
        }
    }

    /// Waits until the values are here, and lets the parameters hold them.
    pub(super) fn unshard(&mut self, ranks: &Ranks) -> Result<()> {
        self.settle()?;
        self.start_unshard(ranks)?;
        let Some(pending) = self.unsharding.take() else { return Ok(()) };
        if let Err(error) = self.wait_for_all_gather(pending) {
            // The buffer's content must not be taken for values.
            self.full = if self.keeps_full { self.full.take() } else { None };
            return Err(error);
        }
        self.note_versions();
        self.give_values()
    }

    /// Notes that the full buffer has the values of the shards.
    pub(super) fn note_versions(&mut self) {
        if !self.apart {
            // The all-gather has written the shard too, as a part of the full buffer.
            self.unsharded_version = self.shard.version();
        }
        self.note_full_version();
    }

    /// Lets the parameters hold the values.
    pub(super) fn give_values(&self) -> Result<()> {
        let Some(full) = &self.full else { return Ok(()) };
        self.members.iter().try_for_each(|member| member.give(member.of(full)?))
    }

    /// Drops all values but this rank's, even those under way.
    pub(super) fn abandon(&mut self) -> Result<()> {
        self.unsharding = None;
        self.reshard()
    }

    /// Drops all values but this rank's.
    pub(super) fn reshard(&mut self) -> Result<()> {
        if self.keeps_full {
            return Ok(());
        }
        if let Some(pending) = self.unsharding.take() {
            self.wait_for_all_gather(pending)?;
        }
        if let Some(full) = self.full.take() {
            for member in self.members.iter().filter(|m| m.tensor().shares_storage(&full)) {
                member.give(Tensor::withheld(&member.shape, self.dtype, self.device, SPREAD)?)?;
            }
        }
        Ok(())
    }

    /// Whether all values are here to be used.
    pub(super) fn is_unsharded(&self) -> bool {
        self.full.is_some() && self.unsharding.is_none()
    }

    /// Whether all values are here or on their way.
    pub(super) fn is_here(&self) -> bool {
        self.full.is_some()
    }

    /// Whether all values stay with every rank.
    pub(super) fn keeps_full(&self) -> bool {
        self.keeps_full
    }

    /// Whether the values that are here are older than this rank's last update.
    pub(super) fn is_stale(&self) -> bool {
        self.full.is_some() && self.unsharded_version != self.shard.version()
    }

    /// A parameter that holds another tensor than this buffer's, because other code has replaced it.
    pub(super) fn replaced(&self) -> Option<&Parameter> {
        let full = self.full.as_ref().filter(|_| self.unsharding.is_none())?;
        self.members
            .iter()
            .find(|member| !member.tensor().shares_storage(full))
            .map(|member| &member.parameter)
    }

    /// Gives the parameters tensors that cannot be read, so that no layer computes with values that are older than the other
    /// ranks' last updates.
    pub(super) fn withhold(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| {
            member.give(Tensor::withheld(&member.shape, self.dtype, self.device, STALE)?)
        })
    }

    /// Notes the version at which the full buffer has the values of the shards.
    pub(super) fn note_full_version(&mut self) {
        self.full_version = self.full.as_ref().filter(|_| self.apart).map(Tensor::version);
    }

    /// Takes values that other code has written into the full buffer, the same on all ranks, into the shard. What was not written keeps
    /// the precision of a wider shard.
    fn write_back(&mut self) -> Result<()> {
        let Some(full) = self.full.as_ref().filter(|_| self.is_overwritten()) else { return Ok(()) };
        if self.is_stale() {
            let why =
                "values of the model were changed, and then its shards; call `updated` after each of the two";
            return Err(Error::Config(format!("Zero: {why}")));
        }
        let full = full.narrow(0, self.own.start, self.own.len())?.to_device(self.shard.device(), false)?;
        let mut values = kernels::cast(&full, self.shard.dtype())?;
        if self.shard.dtype() != self.dtype {
            let is_written = kernels::ne(&full, &kernels::cast(&self.shard, self.dtype)?)?;
            values = kernels::where_(&is_written, &values, &self.shard)?;
        }
        kernels::copy_(&mut self.shard, &values)?;
        // Where all values stay on every rank, `updated` makes sure that they are the same.
        if !self.keeps_full {
            self.unsharded_version = self.shard.version();
        }
        self.note_full_version();
        Ok(())
    }

    /// Whether other code has changed the model's own values, which come from the shards.
    pub(super) fn is_overwritten(&self) -> bool {
        self.full_version
            .is_some_and(|version| self.full.as_ref().is_some_and(|full| full.version() != version))
    }
}
