//! [`FlatParameter`]: parameters of one dtype, one after the other in a buffer of which each rank owns a shard.
//!
//! ```text
//! values     shard ──all-gather──► full ──views──► parameters          the shard is a part of full, or apart from it
//! gradients  parameters ──views──► full ──reduce-scatter──► the shard's sums ──views──► pieces, for the optimizer
//! ```

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use phalanx_kernels as kernels;
use phalanx_kernels::optim::optim_state_dtype;
use phalanx_nn::Parameter;
use phalanx_tensor::{Category, Context, DType, Device, Dims, HostMemory, PendingCopy, Tensor};

use super::gradients::Gradients;
use super::offload::{Offload, OffloadStreams};
use super::{Cuts, ZeroConfig, ZeroStage};
use crate::Result;
use crate::comm::{self, Comm, Pending};

pub(super) use super::gradients::ReduceScatter;

/// A tensor that holds a parameter's values, and its elements in the flat buffer.
pub(super) struct Member {
    pub(super) parameter: Parameter,
    /// Which of the parameter's [tensors](Parameter::held_in): frozen matrices in 8-bit blocks have two.
    pub(super) number: usize,
    pub(super) range: Range<usize>,
    pub(super) shape: Dims,
}

/// The process groups of a [`FlatParameter`].
pub(super) struct Ranks {
    /// The ranks that share a copy.
    pub(super) shard: Comm,
    /// The ranks that hold the same shard.
    pub(super) replicas: Comm,
    /// All ranks.
    pub(super) all: Comm,
}

/// Parameters in one flat buffer, and this rank's shard of it. `unshard.rs` gathers and frees the values, `gradients.rs` sends the
/// gradients.
pub(super) struct FlatParameter {
    pub(super) members: Vec<Member>,
    /// Which elements each rank owns.
    pub(super) cuts: Cuts,
    pub(super) trained: bool,
    /// This rank's parts of the parameters, for an optimizer.
    pub(super) pieces: Vec<Parameter>,
    /// The elements that this rank owns.
    pub(super) own: Range<usize>,
    pub(super) dtype: DType,
    pub(super) device: Device,
    pub(super) grad_dtype: DType,
    /// This rank's values.
    pub(super) shard: Tensor,
    /// How they and the gradients get to and from the device where they live, if that is another one.
    pub(super) offload: Option<Offload>,
    /// Sums of gradients on their way there, with their sites.
    pub(super) arriving: Vec<(usize, PendingCopy)>,
    /// Whether all values stay on every rank (ZeRO-1 and 2).
    pub(super) keeps_full: bool,
    /// Whether the shard has a storage of its own; otherwise it is a view of `full`. It has one in ZeRO-3, and if its dtype or device
    /// is not the parameters'.
    pub(super) apart: bool,
    /// Whether the sums of gradients are written into the buffer of all gradients (ZeRO-1).
    pub(super) keeps_grads: bool,
    /// All values, while they are unsharded or being gathered.
    pub(super) full: Option<Tensor>,
    /// The all-gather under way.
    pub(super) unsharding: Option<Pending>,
    /// While updated values are on their way into `full`: the error, if they do not come.
    pub(super) refresh: Option<Arc<OnceLock<comm::Error>>>,
    /// The shard's version that `full` has.
    pub(super) unsharded_version: u64,
    /// The version of `full` when it was gathered, if it is kept apart from the shard.
    pub(super) full_version: Option<u64>,
    /// The gradients at each site that a parameter has; none if they are frozen.
    pub(super) gradients: Vec<Gradients>,
    /// With a site for each replica: the gradients at the sites that have come, of each the ranks' one after the other.
    pub(super) of_replicas: Vec<Tensor>,
    /// The numbers of the pieces that had no gradient before the last pass.
    pub(super) first_grads: Vec<usize>,
}

impl FlatParameter {
    /// Moves the values that these tensors of parameters hold into a buffer, gives all ranks rank 0's, and keeps this rank's shard. All ranks
    /// call it.
    pub(super) fn new(
        held: &[(Parameter, usize)],
        cuts: Cuts,
        ranks: &Ranks,
        config: &ZeroConfig,
        streams: &mut OffloadStreams,
    ) -> Result<FlatParameter> {
        let (mut members, mut end) = (Vec::new(), 0);
        for &place in &cuts.order {
            let (parameter, number) = held[place].clone();
            let tensor = held_tensor(&parameter, number);
            let start = end;
            end += tensor.numel();
            members.push(Member {
                parameter,
                number,
                range: start..end,
                shape: Dims::from_slice(tensor.shape()),
            });
        }
        let first = members[0].tensor();
        let (dtype, device) = (first.dtype(), first.device());
        let mut full = Tensor::empty(&[end], dtype, device)?.tagged(Category::Parameters);
        for member in &members {
            member.parameter.materialize()?;
            kernels::copy_(&mut member.of(&full)?, &member.tensor())?;
            member.give(member.of(&full)?)?;
        }
        ranks.all.broadcast(&mut full, 0)?;
        let own = cuts.range(ranks.shard.rank());
        // Codes of 8-bit blocks stay as they are.
        let shard_dtype = config.shard_dtype.filter(|_| dtype.is_float()).unwrap_or(dtype);
        let home = config.offload.unwrap_or(device);
        let keeps_full = config.stage < ZeroStage::Parameters;
        let apart = !keeps_full || shard_dtype != dtype || home != device;
        let part = full.narrow(0, own.start, own.len())?;
        let shard = {
            let memory = if home == device { HostMemory::default() } else { HostMemory::beside(device)? };
            let _memory = Context::with(|c| c.host_memory = memory);
            if apart { kernels::cast(&part, shard_dtype)?.to_device(home, false)? } else { part }
        };
        // A cast to the same dtype, or a move to the same place, is no copy.
        let shard = if apart && shard.shares_storage(&full) { shard.copy()? } else { shard };
        let shard = shard.tagged(Category::Parameters);
        let unsharded_version = shard.version();
        let mut flat = FlatParameter {
            trained: members[0].parameter.is_trained(),
            pieces: Vec::new(),
            grad_dtype: config.grad_dtype.unwrap_or(dtype),
            keeps_grads: config.stage == ZeroStage::Optimizer,
            unsharding: None,
            refresh: None,
            gradients: Vec::new(),
            of_replicas: Vec::new(),
            first_grads: Vec::new(),
            full: Some(full),
            members,
            cuts,
            own,
            dtype,
            device,
            offload: streams.between(device, home, !keeps_full && !config.offload_parameters)?,
            arriving: Vec::new(),
            shard,
            keeps_full,
            apart,
            unsharded_version,
            full_version: None,
        };
        if flat.trained {
            flat.gradients = Gradients::of(&flat);
        }
        flat.note_full_version();
        flat.make_pieces()?;
        flat.reshard()?;
        Ok(flat)
    }

    fn make_pieces(&mut self) -> Result<()> {
        let trained = self.members.iter().filter(|_| self.trained);
        for (member, inside) in trained.filter_map(|m| Some((m, m.inside(&self.own)?))) {
            let start = member.range.start + inside.start - self.own.start;
            self.pieces.push(member.parameter.piece(self.shard.narrow(0, start, inside.len())?, inside)?);
        }
        self.close()
    }

    /// Whether its parameters have a site for each replica ([`Parameter::with_replica_sites`]).
    pub(super) fn has_replica_sites(&self) -> bool {
        self.members.first().is_some_and(|member| member.parameter.has_replica_sites())
    }

    /// Elements of all its parameters.
    pub(super) fn elements(&self) -> usize {
        self.members.last().map_or(0, |member| member.range.end)
    }

    pub(super) fn device(&self) -> Device {
        self.device
    }

    /// Whether an optimizer of the parameters themselves keeps master copies.
    pub(super) fn has_master(&self) -> bool {
        self.trained && optim_state_dtype(self.dtype) != self.dtype
    }

    /// Whether the shards are as precise as master copies.
    pub(super) fn shard_is_master(&self) -> bool {
        self.has_master() && optim_state_dtype(self.shard_dtype()) == self.shard_dtype()
    }

    pub(super) fn shard_dtype(&self) -> DType {
        self.shard.dtype()
    }
}

/// One of the tensors that hold a parameter's values.
pub(super) fn held_tensor(parameter: &Parameter, number: usize) -> Tensor {
    parameter.held_in().swap_remove(number)
}

impl Member {
    /// What holds its values now.
    pub(super) fn tensor(&self) -> Tensor {
        held_tensor(&self.parameter, self.number)
    }

    /// Lets another tensor hold them.
    pub(super) fn give(&self, tensor: Tensor) -> Result<()> {
        Ok(self.parameter.set_held(self.number, tensor)?)
    }

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
