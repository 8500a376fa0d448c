//! Shards that live on another device than the model, usually the host: how values come from there, and how gradients go there.
//!
//! ```text
//! compute stream   ──unit k forward──┬──────────unit k+1 forward──        ──unit k backward──┬──unit k-1 backward──
//! upload stream      └─shard k+1──all-gather──┘      download stream                         └─reduce-scatter──sums of k──
//! ```
//! On a GPU both are streams of their own, and the host's memory is pinned. The compute stream waits for an upload when the unit is
//! used, and for no download. The host waits for the gradients at the end of the backward pass, since it makes the update.

use std::collections::BTreeMap;

use phalanx_kernels as kernels;
use phalanx_tensor::cuda::GpuEvent;
use phalanx_tensor::{
    Category, Context, CopyStream, DType, Device, HostMemory, PendingCopy, StreamGuard, Tensor, adopt,
    record_use,
};

use crate::Result;
use crate::comm::Pending;

/// The copy streams of a wrapper, by the model's device and the shards'.
#[derive(Default)]
pub(super) struct OffloadStreams(BTreeMap<(Device, Device), [CopyStream; 2]>);

impl OffloadStreams {
    /// For shards of parameters on `device`; none if they live there too.
    pub(super) fn between(&mut self, device: Device, home: Device, keeps: bool) -> Result<Option<Offload>> {
        if device == home {
            return Ok(None);
        }
        let [up, down] = match self.0.get(&(device, home)) {
            Some(known) => known.clone(),
            None => [CopyStream::new(home, device)?, CopyStream::new(device, home)?],
        };
        self.0.insert((device, home), [up.clone(), down.clone()]);
        Ok(Some(Offload { device, up, down, keeps, kept: None, uploaded: None }))
    }
}

/// Where a shard lives that is not on the model's device.
pub(super) struct Offload {
    device: Device,
    up: CopyStream,
    down: CopyStream,
    /// Whether the model's device keeps a copy of the shard for all-gathers.
    keeps: bool,
    /// That copy, with the version of the shard that it has.
    kept: Option<(Tensor, u64)>,
    /// The end of an upload that no all-gather follows.
    pub(super) uploaded: Option<GpuEvent>,
}

impl Offload {
    /// The shard's values on the model's device, in this dtype.
    pub(super) fn values(&mut self, shard: &Tensor, dtype: DType) -> Result<Tensor> {
        let version = shard.version();
        if let Some((values, _)) = self.kept.as_ref().filter(|(_, of)| *of == version) {
            return Ok(values.clone());
        }
        // Its memory is free before the new values need memory.
        self.kept = None;
        let values = self.in_dtype(shard, dtype)?.to_device(self.device, false)?;
        if self.keeps {
            self.kept = Some((values.clone().tagged(Category::Parameters), version));
        }
        Ok(values)
    }

    /// Uploads the shard of a rank that owns all values into the buffer of all, or copies it from where the device keeps it.
    pub(super) fn upload_all(&mut self, full: &mut Tensor, shard: &Tensor) -> Result<()> {
        let values = match self.keeps {
            true => self.values(shard, full.dtype())?,
            false => self.in_dtype(shard, full.dtype())?,
        };
        full.copy_from(&values)?;
        // The model may be dropped before.
        record_use(full)?;
        self.uploaded = Some(GpuEvent::record(self.device.gpu()?)?);
        Ok(())
    }

    /// The shard in this dtype, which is not wider. A copy is in memory that the GPU reads.
    fn in_dtype(&self, shard: &Tensor, dtype: DType) -> Result<Tensor> {
        let memory = HostMemory::beside(self.device)?;
        let _memory = Context::with(|c| c.host_memory = memory);
        Ok(kernels::cast(shard, dtype)?)
    }

    /// Until the result is dropped, this thread's work goes to the upload stream, after what has used the buffer that it is to write.
    pub(super) fn enter_upload(&self, full: Option<&Tensor>) -> Result<Option<StreamGuard>> {
        let used = match full {
            Some(_) if self.up.is_asynchronous() => Some(GpuEvent::record(self.device.gpu()?)?),
            _ => None,
        };
        let entered = self.up.enter()?;
        if let Some(used) = used {
            used.order(self.device.gpu()?)?;
        }
        Ok(entered)
    }

    /// Waits for the call that fills the buffer. The compute stream may then use it, and has its memory from now on.
    pub(super) fn wait(&mut self, pending: Pending, full: Option<&Tensor>) -> Result<()> {
        pending.wait_and_adopt()?;
        if let Some(uploaded) = self.uploaded.take() {
            uploaded.order(self.device.gpu()?)?;
        }
        full.into_iter().for_each(adopt);
        Ok(())
    }

    /// Begins to copy sums of gradients to the shard's device.
    pub(super) fn download(&self, sums: &Tensor) -> Result<PendingCopy> {
        let _category = Context::with(|c| c.category = Category::Gradients);
        Ok(self.down.start(sums)?)
    }
}
