//! When [`Flat`]'s values are here, and where from.

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_tensor::{Category, Tensor};

use super::{Flat, Member, Ranks};
use crate::Result;
use crate::comm::Call;

/// Why a parameter has no values here.
const SPREAD: &str = "these are values of a parameter that Zero has spread over the ranks: take \
    `zero.full_state_dict()`, or hold `zero.gathered()` while the model's own tensors are used";

/// Why a parameter has no values that agree.
const STALE: &str =
    "of these values only this rank's share is new: call `updated` of the `Zero` after the optimizer's step";

impl Flat {
    /// Starts to gather the values, unless they are here or on their way.
    pub(in crate::sharded) fn start_gather(&mut self, ranks: &Ranks) -> Result<()> {
        if self.full.is_some() { Ok(()) } else { self.start_renewal(ranks) }
    }

    /// Starts to gather the values, here or not.
    pub(in crate::sharded) fn start_renewal(&mut self, ranks: &Ranks) -> Result<()> {
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
    pub(in crate::sharded) fn gather(&mut self, ranks: &Ranks) -> Result<()> {
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
    pub(in crate::sharded) fn abandon(&mut self) -> Result<()> {
        self.gathering = None;
        self.free()
    }

    /// Gives up all values but this rank's.
    pub(in crate::sharded) fn free(&mut self) -> Result<()> {
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
    pub(in crate::sharded) fn is_gathered(&self) -> bool {
        self.full.is_some() && self.gathering.is_none()
    }

    /// Whether all values are here or on their way.
    pub(in crate::sharded) fn is_here(&self) -> bool {
        self.full.is_some()
    }

    /// Whether all values stay with every rank.
    pub(in crate::sharded) fn keeps_full(&self) -> bool {
        self.keeps_full
    }

    /// Whether the values that are here are those of before this rank's last update.
    pub(in crate::sharded) fn is_stale(&self) -> bool {
        self.full.is_some() && self.gathered != self.shard.version()
    }

    /// A parameter that somebody has let hold another tensor than this buffer's.
    pub(in crate::sharded) fn replaced(&self) -> Option<&Parameter> {
        let full = self.full.as_ref().filter(|_| self.gathering.is_none())?;
        let mut parameters = self.members.iter().map(|member| &member.parameter);
        parameters.find(|parameter| !parameter.tensor().shares_storage(full))
    }

    /// Puts tensors that cannot be read in the parameters' places, so that no layer computes with values from before the other ranks' last
    /// updates.
    pub(in crate::sharded) fn withhold(&self) -> Result<()> {
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
    pub(in crate::sharded) fn is_overwritten(&self) -> bool {
        self.written.is_some_and(|version| self.full.as_ref().is_some_and(|full| full.version() != version))
    }

    /// All values in the shards' dtype, for a state dict, on the parameters' device.
    pub(in crate::sharded) fn whole(&self, ranks: &Ranks) -> Result<Tensor> {
        let all = Tensor::empty(&[self.elements()], self.shard.dtype(), self.device)?;
        let own = self.shard.to_device(self.device, false)?;
        ranks.shard.run(Call::all_gather_uneven(all.clone(), own, &self.cuts.counts()))?;
        Ok(all)
    }

    /// Which of a member's elements this rank has, and their values.
    pub(in crate::sharded) fn share_of(&self, member: usize) -> Result<(Range<usize>, Tensor)> {
        let member = &self.members[member];
        let inside = member.inside(&self.own).unwrap_or(0..0);
        let start = (member.range.start + inside.start).saturating_sub(self.own.start);
        Ok((inside.clone(), self.shard.narrow(0, start.min(self.own.len()), inside.len())?))
    }

    /// Takes what this rank has of a member from a tensor of all of it.
    pub(in crate::sharded) fn load(&mut self, member: usize, values: &Tensor) -> Result<()> {
        let (own, mut share) = self.share_of(member)?;
        let values = values.with_shape(&[values.numel()])?.narrow(0, own.start, own.len())?;
        let values = kernels::cast(&values.to_device(share.device(), false)?, share.dtype())?;
        Ok(kernels::copy_(&mut share, &values)?)
    }
}
