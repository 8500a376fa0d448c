//! Order in backward without data: [`fork`] and [`join`].
//!
//! Two independent branches of the graph may run backward in either order. Where the order matters (a pipeline's
//! micro-batches, a recomputation before its gradient) a phony ties them together:
//!
//! ```text
//!     a --> fork --> a'          forward: left to right
//!              \ phony           backward: what comes after `join` runs before
//!     b ------> join --> b'      what comes before `fork`
//! ```
//! Source: Kim et al., torchgpipe: on-the-fly pipeline parallelism (2020), section 3.2.1.

use std::collections::BTreeMap;
use std::sync::Mutex;

use phalanx_tensor::{DType, Device, Dims, Tensor, unpoisoned};
use smallvec::smallvec;

use crate::{
    Backward, Cx, Grads, Result, SaveContext, Var, grads1, grads2, is_recording, record, record_many,
};

static CACHE: Mutex<BTreeMap<(Device, bool), Var>> = Mutex::new(BTreeMap::new());

/// A value without elements, for edges that only order: of shape `[0]`, always the same one for a device. It is what
/// [`fork`] and [`join`] pass along. It takes no memory, and neither do its gradients.
///
/// # Errors
/// If the device cannot be used.
pub fn phony(device: Device, requires_grad: bool) -> Result<Var> {
    let mut cache = unpoisoned(CACHE.lock());
    if let Some(cached) = cache.get(&(device, requires_grad)) {
        return Ok(cached.clone());
    }
    let empty = Tensor::empty(&[0], DType::F32, device)?;
    let made = if requires_grad { Var::leaf(empty)? } else { Var::new(empty) };
    cache.insert((device, requires_grad), made.clone());
    Ok(made)
}

/// `x` itself, and a phony that leads back to it. Where nothing is recorded `x` is the very same value.
///
/// # Errors
/// If the device refuses.
pub fn fork(x: &Var) -> Result<(Var, Var)> {
    let phony = phony(x.device(), false)?;
    if !is_recording(&[x]) {
        return Ok((x.clone(), phony));
    }
    let value = x.tensor();
    let saved = Fork { shape: value.shape().into(), dtype: value.dtype(), device: value.device() };
    let outputs = smallvec![value.clone(), phony.into_tensor()];
    let mut made = record_many("fork", &[x], outputs, |_: &SaveContext<'_>| Ok(saved))?.into_iter();
    let mut next = || made.next().unwrap_or_else(|| unreachable!("two outputs were recorded"));
    Ok((next(), next()))
}

/// `x` itself, whose backward comes before that of the value that `phony` was forked from. Where nothing is recorded
/// it is the very same value.
///
/// # Errors
/// If the device refuses.
pub fn join(x: &Var, phony: &Var) -> Result<Var> {
    if !is_recording(&[x, phony]) {
        return Ok(x.clone());
    }
    let device = phony.device();
    record("join", &[x, phony], x.tensor().clone(), |_: &SaveContext<'_>| Ok(Join { device }))
}

struct Fork {
    shape: Dims,
    dtype: DType,
    device: Device,
}

impl Backward for Fork {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        if let Some(dx) = cx.dy_at(0) {
            return grads1(dx.clone());
        }
        // Only the phony was used. What lies behind must run nevertheless.
        grads1(Var::new(Tensor::zeros(&self.shape, self.dtype, self.device)?))
    }
}

struct Join {
    device: Device,
}

impl Backward for Join {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        grads2(Some(cx.dy().clone()), Some(phony(self.device, false)?))
    }
}
