//! [`Flat`]: parameters of one dtype, one after the other in a buffer of which each rank owns a share.
//!
//! ```text
//! values     shard ──gather──► full ──views──► parameters            shard: a part of full, or apart from it
//! gradients  parameters ──views──► full_grad ──reduce_scatter──► shard's gradient ──views──► pieces
//! ```

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_tensor::{Category, DType, Device, Dims, Tensor};

use super::gradients::Gradients;
use super::{Cuts, Stage, ZeroConfig};
use crate::Result;
use crate::comm::{Call, Comm, Pending};

/// A parameter's place in a buffer.
pub(super) struct Member {
    pub(super) parameter: Parameter,
    pub(super) range: Range<usize>,
    pub(super) shape: Dims,
}

/// What [`Flat`] needs to know of the ranks.
pub(super) struct Ranks {
    /// Those that share a copy.
    pub(super) shard: Comm,
    /// Those that hold the same share.
    pub(super) replicas: Comm,
    /// All.
    pub(super) all: Comm,
}

pub(super) struct Flat {
    pub(super) members: Vec<Member>,
    pub(super) cuts: Cuts,
    pub(super) trained: bool,
    /// This rank's parts of parameters, as an optimizer gets them.
    pub(super) pieces: Vec<Parameter>,
    pub(super) own: Range<usize>,
    pub(super) dtype: DType,
    pub(super) device: Device,
    pub(super) grad_dtype: DType,
    /// This rank's values.
    pub(super) shard: Tensor,
    /// Whether all values stay with every rank, the shard being a part of them if it is of their dtype and device.
    keeps_full: bool,
    apart: bool,
    pub(super) keeps_grads: bool,
    full: Option<Tensor>,
    gathering: Option<Pending>,
    /// The shard's version that `full` has.
    gathered: u64,
    /// One buffer of gradients for each site that any parameter has.
    pub(super) gradients: Vec<Gradients>,
}

impl Flat {
    /// Takes the parameters' values over; `stage` as it applies to these.
    pub(super) fn new(
        parameters: &[Parameter],
        cuts: Cuts,
        rank: usize,
        stage: Stage,
        config: &ZeroConfig,
    ) -> Result<Flat> {
        let (mut members, mut end) = (Vec::new(), 0);
        for &number in &cuts.order {
            let parameter = parameters[number].clone();
            let (start, shape) = (end, Dims::from_slice(parameter.tensor().shape()));
            end += parameter.tensor().numel();
            members.push(Member { parameter, range: start..end, shape });
        }
        let (dtype, device) = (parameters[0].dtype(), parameters[0].device());
        let full = Tensor::empty(&[end], dtype, device)?.tagged(Category::Parameters);
        for member in &members {
            kernels::copy_(&mut member.of(&full)?, &member.parameter.tensor())?;
            member.parameter.set_tensor(member.of(&full)?)?;
        }
        let own = cuts.range(rank);
        let (shard_dtype, home) = (config.shard_dtype.unwrap_or(dtype), config.offload.unwrap_or(device));
        let keeps_full = stage < Stage::Parameters;
        let apart = !keeps_full || shard_dtype != dtype || home != device;
        let part = full.narrow(0, own.start, own.len())?;
        let shard = match apart {
            true => kernels::cast(&part, shard_dtype)?.to_device(home, false)?,
            false => part,
        };
        // A cast to the same dtype, or a move to the same place, is no copy.
        let shard = if apart && shard.shares_storage(&full) { shard.copy()? } else { shard };
        let shard = shard.tagged(Category::Parameters);
        let gathered = shard.version();
        let mut flat = Flat {
            trained: parameters[0].is_trained(),
            pieces: Vec::new(),
            grad_dtype: config.grad_dtype.unwrap_or(dtype),
            keeps_grads: stage == Stage::Optimizer,
            gathering: None,
            gradients: Vec::new(),
            full: Some(full),
            members,
            cuts,
            own,
            dtype,
            device,
            shard,
            keeps_full,
            apart,
            gathered,
        };
        let sites = flat.members.iter().map(|m| m.parameter.leaves().len()).max().unwrap_or(0);
        let ranks = flat.cuts.bounds.len() - 1;
        flat.gradients = (0..sites).map(|site| Gradients::new(&flat, site, ranks)).collect();
        flat.make_pieces()?;
        flat.free()?;
        Ok(flat)
    }

    fn make_pieces(&mut self) -> Result<()> {
        for (member, inside) in self.members.iter().filter_map(|m| Some((m, m.inside(&self.own)?))) {
            let start = member.range.start + inside.start - self.own.start;
            let piece = member.parameter.piece(self.shard.narrow(0, start, inside.len())?, inside)?;
            if self.trained {
                self.pieces.push(piece);
            }
        }
        for member in self.members.iter().filter(|_| self.trained) {
            member.parameter.set_grad_dtype(self.grad_dtype)?;
        }
        Ok(())
    }

    pub(super) fn is_meta(&self) -> bool {
        self.device.is_meta()
    }

    pub(super) fn device(&self) -> Device {
        self.device
    }

    pub(super) fn shard_dtype(&self) -> DType {
        self.shard.dtype()
    }
}

impl Member {
    /// Its part of the whole buffer, in its shape.
    pub(super) fn of(&self, full: &Tensor) -> Result<Tensor> {
        Ok(full.narrow(0, self.range.start, self.range.len())?.with_shape(&self.shape)?)
    }

    /// Which of its elements lie in a part of the buffer, if any do.
    pub(super) fn inside(&self, part: &Range<usize>) -> Option<Range<usize>> {
        let (start, end) = (self.range.start.max(part.start), self.range.end.min(part.end));
        (start < end).then(|| start - self.range.start..end - self.range.start)
    }
}

/// Values.
impl Flat {
    /// Starts to gather the values, unless they are here or on their way.
    pub(super) fn start_gather(&mut self, ranks: &Ranks) -> Result<()> {
        if self.full.is_some() { Ok(()) } else { self.start_renewal(ranks) }
    }

    /// Starts to gather the values, here or not.
    pub(super) fn start_renewal(&mut self, ranks: &Ranks) -> Result<()> {
        let full = match self.full.take() {
            Some(full) => full,
            None => {
                Tensor::empty(&[self.members_end()], self.dtype, self.device)?.tagged(Category::Parameters)
            }
        };
        let input = match self.apart {
            true => kernels::cast(&self.shard.to_device(self.device, false)?, self.dtype)?,
            false => self.shard.clone(),
        };
        let call = Call::all_gather_uneven(full.clone(), input, &self.cuts.counts());
        self.gathering = Some(ranks.shard.start(call));
        self.full = Some(full);
        Ok(())
    }

    /// Lets the parameters hold their values.
    pub(super) fn gather(&mut self, ranks: &Ranks) -> Result<()> {
        self.start_gather(ranks)?;
        let (Some(pending), Some(full)) = (self.gathering.take(), &self.full) else { return Ok(()) };
        pending.wait()?;
        self.gathered = self.shard.version();
        self.members.iter().try_for_each(|member| Ok(member.parameter.set_tensor(member.of(full)?)?))
    }

    /// Gives up all values but this rank's.
    pub(super) fn free(&mut self) -> Result<()> {
        if self.keeps_full {
            return Ok(());
        }
        if let Some(pending) = self.gathering.take() {
            pending.wait()?;
        }
        if self.full.take().is_some() {
            let nothing = Tensor::empty(&[0], self.dtype, self.device)?;
            self.members.iter().try_for_each(|m| m.parameter.set_tensor(nothing.clone()))?;
        }
        Ok(())
    }

    /// Whether all values stay with every rank.
    pub(super) fn keeps_full(&self) -> bool {
        self.keeps_full
    }

    /// Whether the values that are here are those of before this rank's last update.
    pub(super) fn is_stale(&self) -> bool {
        self.full.is_some() && self.gathered != self.shard.version()
    }

    /// All values in the shards' dtype, for a state dict.
    pub(super) fn whole(&self, ranks: &Ranks) -> Result<Tensor> {
        let all = Tensor::empty(&[self.members_end()], self.shard.dtype(), self.device)?;
        let own = self.shard.to_device(self.device, false)?;
        ranks.shard.run(Call::all_gather_uneven(all.clone(), own, &self.cuts.counts()))?;
        Ok(if self.is_meta() { all } else { all.to_device(Device::CPU, false)? })
    }

    /// Takes a parameter's values from a tensor of all of it.
    pub(super) fn load(&mut self, member: usize, values: &Tensor) -> Result<()> {
        let member = &self.members[member];
        if let Some(inside) = member.inside(&self.own) {
            let start = member.range.start + inside.start - self.own.start;
            let values = values.with_shape(&[member.range.len()])?.narrow(0, inside.start, inside.len())?;
            let values = kernels::cast(&values.to_device(self.shard.device(), false)?, self.shard.dtype())?;
            kernels::copy_(&mut self.shard.narrow(0, start, inside.len())?, &values)?;
        }
        Ok(())
    }

    fn members_end(&self) -> usize {
        self.members.last().map_or(0, |member| member.range.end)
    }
}
