//! Shards that live on another device than the model, usually the host: how their values come to the model's device.

use phalanx_kernels as kernels;
use phalanx_tensor::{Category, Tensor};

use super::flat_parameter::FlatParameter;
use crate::Result;

/// The copy of an offloaded shard that stays on the model's device, in the model's dtype.
#[derive(Default)]
pub(super) struct DeviceShard {
    /// With the version of the shard that it has.
    values: Option<(Tensor, u64)>,
}

impl FlatParameter {
    /// This rank's values on the model's device, in the model's dtype.
    pub(super) fn shard_on_device(&mut self) -> Result<Tensor> {
        if !self.apart {
            return Ok(self.shard.clone());
        }
        let version = self.shard.version();
        if let Some((values, _)) =
            self.device_shard.as_ref().and_then(|kept| kept.values.as_ref()).filter(|(_, of)| *of == version)
        {
            return Ok(values.clone());
        }
        let Some(kept) = &mut self.device_shard else { return self.upload_shard() };
        // Its memory is free before the new values need memory.
        kept.values = None;
        let values = self.upload_shard()?.tagged(Category::Parameters);
        if let Some(kept) = &mut self.device_shard {
            kept.values = Some((values.clone(), version));
        }
        Ok(values)
    }

    fn upload_shard(&self) -> Result<Tensor> {
        Ok(kernels::cast(&self.shard.to_device(self.device, false)?, self.dtype)?)
    }
}
