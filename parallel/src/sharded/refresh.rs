//! How the values that an optimizer has updated come to all ranks: [`ZeroCore::updated`].
//!
//! In ZeRO-1 and 2 every rank keeps all values. The all-gathers start in the order in which the next forward pass uses them, and
//! `updated` returns. Each unit's values are waited for where they are used: before the unit's module computes, and by every other
//! reader of the tensors, whose guards wait ([`Tensor::arriving`]).
//!
//! ```text
//! updated     starts unit 0, 1, 2 ──► returns
//! the ranks   unit 0 ───► unit 1 ───► unit 2 ───►
//! forward          data   └─ unit 0 ──┴─ unit 1 ──┴─ unit 2
//! ```

use std::sync::{Arc, OnceLock};

use phalanx_tensor::{Device, Tensor};

use super::ZeroStage;
use super::core::{ZeroCore, ZeroState};
use super::flat_parameter::{FlatParameter, Ranks};
use super::unshard::ROOT;
use crate::Result;
use crate::comm::{self, Pending};

/// How many passes are waited for until rank 0 knows in which order it uses the units.
const ASKED_MAX: usize = 3;

impl ZeroCore {
    /// After an update: gives all ranks the new shards where every rank keeps all values, and reshards the rest. All ranks take
    /// part, whether or not they have updated anything, since a rank does not know about the others.
    pub(super) fn updated(&self, frozen: bool) -> Result<()> {
        let state = &mut *self.lock();
        state.settle()?;
        match frozen {
            // All values were loaded.
            true => state.not_kept = None,
            false => state.write_back()?,
        }
        state.reshard()?;
        let held = state.held > 0;
        let mut units: Vec<_> = state.units.iter_mut().enumerate().collect();
        let place = |unit: usize| state.use_order.iter().flatten().position(|used| *used == unit);
        units.sort_by_key(|(unit, _)| place(*unit).map_or((1, *unit), |place| (0, place)));
        let flats = units.into_iter().flat_map(|(_, unit)| &mut unit.flats);
        let mut flats: Vec<&mut FlatParameter> =
            flats.filter(|flat| (held || flat.keeps_full()) && (flat.trained || frozen)).collect();
        for flat in &mut flats {
            // Loaded values and those under `gathered` are here when this returns, and a `meta` device has nothing to wait for.
            match held || frozen || flat.device.is_meta() {
                true => flat.start_refresh(&self.ranks)?,
                false => flat.start_to_arrive(&self.ranks)?,
            }
        }
        flats.into_iter().filter(|flat| flat.refresh.is_none()).try_for_each(|flat| flat.unshard(&self.ranks))
    }

    /// Where every rank keeps all values: learns, once after a whole pass, in which order rank 0 uses the units. Ranks may use them in
    /// different orders, and call for them in one.
    pub(super) fn agree_on_use(&self, state: &mut ZeroState) -> Result<()> {
        if self.config.stage == ZeroStage::Parameters || state.use_order.is_some() || self.modules.len() < 2 {
            return Ok(());
        }
        // On all ranks alike: rank 0 may never use a unit, and all would wait for it in every step.
        if state.asked == ASKED_MAX {
            return Ok(());
        }
        state.asked += 1;
        let mut units = vec![ROOT];
        for unit in state.order.known_forward().map(|module| self.modules[module].unit) {
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
        let mut known = units.len() > 1;
        if self.ranks.all.size() > 1 && self.ranks.all.has_peers() {
            let device = self.parameters.first().map_or(Device::CPU, |(p, _)| p.device().host());
            units.resize(state.units.len(), ROOT);
            let mut told: Vec<i64> = units.iter().map(|&unit| unit as i64).collect();
            told.push(i64::from(known));
            let mut told = Tensor::from_slice(&told, &[told.len()], device)?;
            self.ranks.all.broadcast(&mut told, 0)?;
            units = told.to_vec::<i64>()?.into_iter().map(|unit| unit as usize).collect();
            known = units.pop() == Some(1);
        }
        state.use_order = known.then_some(units);
        Ok(())
    }
}

impl ZeroState {
    /// Waits for all values that `updated` has called for.
    pub(super) fn settle(&mut self) -> Result<()> {
        self.units.iter_mut().flat_map(|unit| &mut unit.flats).try_for_each(FlatParameter::settle)
    }
}

impl FlatParameter {
    /// Starts to give this rank the other ranks' updates, for which every reader of the values waits.
    fn start_to_arrive(&mut self, ranks: &Ranks) -> Result<()> {
        let Some(full) = self.full.clone() else { return Ok(()) };
        let failure = Arc::new(OnceLock::new());
        let said = failure.clone();
        let mut started = Ok(());
        full.arriving(|| {
            started = self.start_refresh(ranks);
            // The values from before, which are still here, are not the ones that readers wait for.
            let refused = started.as_ref().err().map(ToString::to_string);
            let pending = self.unsharding.take();
            let uploaded = self.offload.as_mut().and_then(|offload| offload.uploaded.take());
            let device = self.device;
            let wait = move || -> comm::Result<()> {
                pending.map_or(Ok(()), Pending::wait_and_adopt)?;
                uploaded.map_or(Ok(()), |uploaded| Ok(uploaded.order(device.gpu()?)?))
            };
            move || match refused {
                Some(why) => Err(why),
                None => wait().map_err(|error| said.get_or_init(|| error).to_string()),
            }
        })?;
        started?;
        self.refresh = Some(failure);
        self.note_versions();
        self.give_values()
    }

    /// Waits for the values that `updated` has called for.
    pub(super) fn settle(&mut self) -> Result<()> {
        let (Some(failure), Some(full)) = (&self.refresh, &self.full) else { return Ok(()) };
        if let Err(error) = full.arrived("all_gather") {
            return Err(failure.get().cloned().map_or_else(|| error.into(), Into::into));
        }
        self.refresh = None;
        Ok(())
    }
}
