//! [`phony`]: a value without elements, for edges that only order.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use phalanx_tensor::{DType, Device, Tensor};

use crate::{Result, Var};

static CACHE: Mutex<BTreeMap<(Device, bool), Var>> = Mutex::new(BTreeMap::new());

/// The value of shape `[0]` of this device, always the same one: what [`crate::fork`] and [`crate::join`] pass along.
/// It takes no memory, and neither do its gradients.
///
/// # Errors
/// If the device cannot be used.
pub fn phony(device: Device, requires_grad: bool) -> Result<Var> {
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cached) = cache.get(&(device, requires_grad)) {
        return Ok(cached.clone());
    }
    let empty = Tensor::empty(&[0], DType::F32, device)?;
    let made = if requires_grad { Var::leaf(empty)? } else { Var::new(empty) };
    cache.insert((device, requires_grad), made.clone());
    Ok(made)
}
